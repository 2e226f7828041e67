"""medical: counts and features of the stand-ins, the paper's own format, virtual
hospitals, the network and its metrics.
"""

import csv

import numpy as np
import pytest
import torch
from conftest import or_skip
from hypothesis import given
from hypothesis import strategies as some
from sklearn.preprocessing import MinMaxScaler
from tables import tabled

from dpcomm.core.chance import seed_tree
from dpcomm.core.vectors import flatten
from dpcomm.tasks import images, medical
from dpcomm.training import federated, models, tables


@pytest.fixture(scope="module")
def diabetes():
    return or_skip(medical.diabetes130)


@pytest.fixture(scope="module")
def physionet():
    return or_skip(medical.physionet2012)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return medical.write_synthetic_admissions(
        tmp_path_factory.mktemp("made") / "premier.csv", 2000, seed_tree(0)
    )


@pytest.fixture(scope="module")
def made(table):
    return medical.read_admissions(table)


# ---- features


def test_code_features_counts_a_code_once_a_record():
    lists = [["b", "a", "a"], ["a"], iter(["c", "a"]), []]
    x, names = medical.code_features(lists, min_records=1)
    assert names == ("a", "b", "c") and x.dtype == np.float32
    assert x.tolist() == [[1, 1, 0], [1, 0, 0], [1, 0, 1], [0, 0, 0]]
    x, names = medical.code_features(
        [["b", "a", "a"], ["a"], ["c", "a"], []], min_records=2
    )
    assert names == ("a",) and x[:, 0].tolist() == [1, 1, 1, 0]
    with pytest.raises(ValueError, match="min_records is 0"):
        medical.code_features([["a"]], 0)


@given(
    some.lists(
        some.lists(some.sampled_from("abcdefg"), max_size=9), min_size=1, max_size=30
    ),
    some.integers(1, 6),
)
def test_a_feature_is_kept_exactly_where_enough_records_have_it(lists, least):
    x, names = medical.code_features(lists, least)
    frequent = {c for c in "abcdefg" if sum(c in codes for codes in lists) >= least}
    assert set(names) == frequent and x.shape == (len(lists), len(names))
    assert all(
        bool(x[i, j]) == (name in codes)
        for i, codes in enumerate(lists)
        for j, name in enumerate(names)
    )


def test_scale_range_is_minmax_of_the_range_and_not_of_the_records():
    values = np.array([15.0, 52.0, 89.0, 7.0, 120.0, np.nan])
    scaled = medical.scale_range(values, 15, 89)
    assert (
        scaled.tolist() == [0.0, 0.5, 1.0, 0.0, 1.0, 0.0] and scaled.dtype == np.float32
    )
    inside = values[:3, None]
    assert np.allclose(scaled[:3], MinMaxScaler().fit(inside).transform(inside)[:, 0])
    assert medical.scale_range(values[1:2], 15, 89) == scaled[1], (
        "the other records change nothing"
    )
    two = medical.scale_range(np.array([[1.0, 10.0], [2.0, 30.0]]), (0, 10), (2, 30))
    assert two.tolist() == [[0.5, 0.0], [1.0, 1.0]]
    with pytest.raises(ValueError, match="low is 3 and high 3; low must be below high"):
        medical.scale_range(values, 3, 3)


def test_assemble_puts_codes_first():
    records = medical.assemble(
        "made", [["z"], ["y", "z"]], {"age": [0.25, 0.5]}, [True, False], 1
    )
    assert (
        records.columns == ("y", "z", "age")
        and records.y.tolist() == [1, 0]
        and records.y.dtype == torch.int64
    )
    assert (
        records.x.tolist() == [[0, 1, 0.25], [1, 1, 0.5]]
        and records.x.dtype == torch.float32
        and records.hospitals is None
    )


# ---- the stand-ins


def check(records, n, deaths):
    assert (
        (len(records.y), int(records.y.sum()))
        == (n, deaths)
        == medical.ADMISSION_COUNTS[records.name]
    )
    assert (
        records.x.shape == (n, len(records.columns))
        and records.x.dtype == torch.float32
        and records.y.dtype == torch.int64
    )
    assert (
        len(set(records.columns)) == len(records.columns)
        and float(records.x.min()) == 0.0
        and float(records.x.max()) == 1.0
    )
    flags = [
        j
        for j, c in enumerate(records.columns)
        if c.split()[0] in ("gender", "admission", "drug", "icd9", "icu", "measured")
    ]
    codes = records.x[:, flags]
    assert bool((codes * (1 - codes) == 0).all()) and int(codes.sum(0).min()) >= 100


def test_diabetes130_counts_and_features(diabetes):
    check(diabetes, 101_766, 1_652)
    kinds = {
        k: sum(c.split()[0] == k for c in diabetes.columns)
        for k in ("gender", "admission", "drug", "icd9", "age", "medications")
    }
    assert (
        kinds
        == {
            "gender": 2,
            "admission": 4,
            "drug": 11,
            "icd9": 265,
            "age": 1,
            "medications": 1,
        }
        and len(diabetes.columns) == 284
    )

    def count(name):
        return int(diabetes.x[:, diabetes.columns.index(name)].sum())

    assert (
        count("gender Female"),
        count("admission Elective"),
        count("drug insulin"),
        count("icd9 250"),
    ) == (54_708, 18_869, 54_383, 17_861)


def test_diabetes130_says_nothing_of_the_end_of_a_stay(diabetes):
    """No feature is the discharge, and none that is made of the row's label: each is a
    function of the columns allowed here.
    """
    allowed = ("gender ", "admission ", "drug ", "icd9 ", "age", "medications")
    assert all(c.startswith(allowed) for c in diabetes.columns)
    dead = diabetes.y.bool()
    gap = (diabetes.x[dead].mean(0) - diabetes.x[~dead].mean(0)).abs()
    assert float(gap.max()) < 0.4, (
        "no single feature separates the dead from the others"
    )


def test_what_the_papers_filters_would_leave(diabetes):
    path = images.data_root() / "diabetes130" / "dataset_diabetes" / "diabetic_data.csv"
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    died = [
        row["discharge_disposition_id"] in medical.DEATH_DISPOSITIONS for row in rows
    ]
    assert torch.equal(diabetes.y, torch.tensor(died).long()), (
        "order and label of the table"
    )
    kept = [
        d
        for row, d in zip(rows, died)
        if row["admission_type_id"] not in ("3", "4")
        and int(row["time_in_hospital"]) >= 3
        and row["age"] not in ("[0-10)", "[10-20)")
    ]
    assert (len(kept), sum(kept)) == (57_411, 977)

    def count(field, *values):
        return sum(row[field] in values for row in rows)

    assert (
        count("discharge_disposition_id", "13", "14") == 771
        and count("discharge_disposition_id", "19", "20", "21") == 10
    )
    assert (
        count("admission_type_id", "7") == 21
        and count("gender", "Unknown/Invalid") == 3
    )
    assert len({row["patient_nbr"] for row in rows}) == 71_518


def test_physionet2012_counts_and_features(physionet):
    check(physionet, 12_000, 1_707)
    assert (
        len(physionet.columns) == 160
        and sum(c.startswith("measured") for c in physionet.columns) == 38
    )
    icu = [j for j, c in enumerate(physionet.columns) if c.startswith("icu")]
    assert (physionet.x[:, icu].sum(1) == 1).all() and len(icu) == 4
    columns = {c: physionet.x[:, j] for j, c in enumerate(physionet.columns)}
    for name in ("HR", "Lactate", "TroponinT"):
        least, mean, most = (columns[f"{w} {name}"] for w in ("least", "mean", "most"))
        assert (least <= mean + 1e-6).all() and (mean <= most + 1e-6).all()
        assert float(most[columns[f"measured {name}"] == 0].abs().sum()) == 0.0


def test_first_day_reads_one_day_and_no_impossible_value():
    text = (
        "Time,Parameter,Value\n00:00,RecordID,1\n00:00,Age,54\n00:00,Gender,-1\n"
        "00:00,Height,-1\n00:00,ICUType,4\n00:07,HR,73\n"
        "01:00,,4.2\n09:00,pH,735\n23:59,HR,70\n24:00,HR,200\n47:00,Lactate,3\n"
    )
    assert medical.first_day(text) == {
        "Age": [54],
        "Gender": [-1],
        "ICUType": [4],
        "HR": [73, 70],
    }
    assert all(low < high for low, high in medical.BOUNDS.values())


@pytest.mark.parametrize(
    "load, file",
    [
        (medical.diabetes130, "diabetic_data.csv"),
        (medical.physionet2012, "Outcomes-a.txt"),
    ],
)
def test_missing_files_say_where_they_go(load, file, tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match=f"{load.__name__} is not under the data root: {file}.*DPCOMM_DATA",
    ):
        load(tmp_path)


def test_a_part_of_a_stand_in_is_refused(tmp_path):
    folder = tmp_path / "diabetes130" / "dataset_diabetes"
    folder.mkdir(parents=True)
    head = ",".join((*medical.COLUMNS[:-1], "insulin", "change"))
    row = "Male,[50-60),1,11,3,250,?,401,No,Up,Ch"
    (folder / "diabetic_data.csv").write_text(f"{head}\n{row}\n")
    with pytest.raises(
        ValueError, match="diabetes130: 1 admissions and 1 deaths, not .101766, 1652."
    ):
        medical.diabetes130(tmp_path, min_records=1)
    folder = tmp_path / "physionet2012"
    folder.mkdir()
    (folder / "Outcomes-a.txt").write_text("RecordID,In-hospital_death\n7,1\n")
    with pytest.raises(FileNotFoundError, match="set-a/7.txt"):
        medical.physionet2012(tmp_path)


# ---- the paper's own format


def test_premier_reads_what_the_table_says(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text(
        "hospital,age,gender,admission_type,mrci,codes,died\nA,52,Male,Urgent,31,x;y;"
        ' x,1\n"B, C",15,Unknown,Trauma Center,90.5,,0\n'
    )
    found = medical.read_admissions(path, min_records=1)
    assert found.columns == (
        "admission Trauma Center",
        "admission Urgent",
        "code x",
        "code y",
        "gender Male",
        "gender Unknown",
        "age",
        "mrci",
    )
    assert found.x.tolist() == [[0, 1, 1, 1, 1, 0, 0.5, 0.5], [1, 0, 0, 0, 0, 1, 0, 1]]
    assert (
        found.y.tolist() == [1, 0]
        and found.hospitals == ("A", "B, C")
        and found.name == "premier"
    )


@pytest.mark.parametrize(
    "row, message",
    [
        (",52,Male,Urgent,3,x,1", "hospital is empty"),
        ("A,14,Male,Urgent,3,x,1", "age is '14'; it must be a number from 15 to 89"),
        ("A,,Male,Urgent,3,x,1", "age is ''"),
        ("A,nan,Male,Urgent,3,x,1", "age is 'nan'"),
        ("A,52,male,Urgent,3,x,1", "gender is 'male'; .*Male, Female, Unknown"),
        ("A,52,Male,Elective,3,x,1", "admission_type is 'Elective'; .*Trauma Center"),
        ("A,52,Male,Urgent,-3,x,1", "mrci is '-3'"),
        ("A,52,Male,Urgent,3,x,yes", "died is 'yes'; it must be one of 0, 1"),
        ("A,52,Male,Urgent,3,x", "6 fields, not 7"),
        ("A,52,Male,Urgent,3,x,y,1", "8 fields, not 7"),
    ],
)
def test_a_wrong_row_is_named(row, message, table, tmp_path):
    lines = table.read_text().splitlines()
    lines[4] = row
    path = tmp_path / "wrong.csv"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(
        ValueError, match=f"wrong.csv, row 5: {message}.*correct the row"
    ):
        medical.read_admissions(path)


def test_check_admission_admits_a_good_row():
    row = dict(
        zip(
            medical.TABLE_COLUMNS,
            ("A", "89", "Female", "Emergency", "2.5", "d1; d2;", "0"),
        )
    )
    assert medical.check_admission("here", row) == (
        ["gender Female", "admission Emergency", "code d1", "code d2"],
        89.0,
        2.5,
        0,
    )


@pytest.mark.parametrize(
    "text, message",
    [
        ("hospital,age\n", "row 1: lacks the column gender"),
        ("", "row 1: lacks the column hospital"),
        (
            ",".join(medical.TABLE_COLUMNS) + ",extra\n",
            "row 1: has the unknown column 'extra'",
        ),
        (",".join(medical.TABLE_COLUMNS) + "\n", "holds no admission"),
    ],
)
def test_a_wrong_header_or_an_empty_table_is_refused(text, message, tmp_path):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=f"t.csv.*{message}"):
        medical.read_admissions(tmp_path / "t.csv")


def test_made_table_is_the_same_again_and_can_be_learned(made, table, tmp_path):
    assert (
        table.read_bytes()
        == medical.write_synthetic_admissions(
            tmp_path / "again.csv", 2000, seed_tree(0)
        ).read_bytes()
    )
    assert int(made.y.sum()) == 200 and len(set(made.hospitals)) == 10
    assert 20 < len(made.columns) < 400
    older = made.x[:, made.columns.index("age")]
    assert float(older[made.y == 1].mean() - older[made.y == 0].mean()) > 0.05
    for bad in (dict(n=0), dict(n=9, codes=19)):
        with pytest.raises(ValueError):
            medical.write_synthetic_admissions(
                tmp_path / "bad.csv", rng=seed_tree(0), **bad
            )


# ---- virtual hospitals


def check_split(split, records, n_hospitals, public_deaths):
    federation, x = split.federation, split.federation.data.x
    assert len(federation.parts) == n_hospitals and len(set(federation.sizes)) == 1
    assert sorted(np.concatenate(federation.parts)) == list(range(len(x))), (
        "every training record is in exactly one hospital"
    )
    y = federation.data.y.numpy()
    assert min(y[part].sum() for part in federation.parts) >= 1
    assert int(split.public_y.sum()) == public_deaths and len(split.public_x) == len(
        split.public_y
    )
    assert len(x) + len(split.public_y) + split.dropped + len(
        federation.data.y_test
    ) == len(records.y)
    assert split.dropped < n_hospitals and len(federation.data.y_test) == len(
        records.y
    ) - round(0.8 * len(records.y))


def test_virtual_hospitals_deal_every_record_once(made):
    split = medical.virtual_hospitals(made, 40, seed_tree(0), public_deaths=5)
    assert isinstance(split, medical.Split)
    check_split(split, made, 40, 5)
    groups = [split.federation.data.x, split.public_x, split.federation.data.x_test]
    numbers = [r[:, made.columns.index("mrci")] for r in groups]
    total = torch.cat(numbers).sort().values
    assert split.dropped or torch.equal(
        total, made.x[:, made.columns.index("mrci")].sort().values
    )
    again, other = (
        medical.virtual_hospitals(made, 40, seed_tree(i), public_deaths=5)
        for i in (0, 1)
    )
    assert (
        again.federation.partition_hash == split.federation.partition_hash
        and torch.equal(again.public_x, split.public_x)
    )
    assert not torch.equal(other.federation.data.x_test, split.federation.data.x_test)


def test_no_record_is_in_two_places():
    n = 500
    y = (torch.arange(n) % 10 == 0).long()
    ids = torch.arange(n, dtype=torch.float32)[:, None] / n
    split = medical.virtual_hospitals(
        medical.Records("made", ids, y, ("id",)), 7, seed_tree(3), public_deaths=4
    )
    where = [split.federation.data.x, split.federation.data.x_test, split.public_x]
    assert len(torch.cat(where).unique()) == sum(map(len, where)) == n - split.dropped
    for x, labels in (
        (where[0], split.federation.data.y),
        (where[1], split.federation.data.y_test),
        (where[2], split.public_y),
    ):
        assert torch.equal(labels, y[(x[:, 0] * n).round().long()])


def test_deaths_are_dealt_evenly_over_hospitals():
    """Beyond the first, a death falls on every hospital alike: the largest of 20 totals
    over 300 deals stays inside a 1e-6 radius.
    """
    y = (torch.arange(400) % 4 == 0).long()
    records = medical.Records("made", torch.zeros(400, 1), y, ("nothing",))
    totals = np.zeros(20)
    for i in range(300):
        split = medical.virtual_hospitals(records, 20, seed_tree(4, i), public_deaths=2)
        totals += [
            int(split.federation.data.y[torch.from_numpy(p)].sum())
            for p in split.federation.parts
        ]
    spread = np.sqrt(
        300 * 14 / 4
    )  # a hospital's count in one deal has at most the variance of 14 coins
    assert abs(totals - totals.mean()).max() < 5.4 * spread


@tabled(
    "bad, message",
    [
        (dict(n_hospitals=0), "n_hospitals is 0"),
        (
            dict(n_hospitals=160),
            "n_hospitals is 160; it must be a whole number from 1 to 1[2-5]",
        ),
        (dict(n_hospitals=4, public_deaths=0), "public_deaths is 0"),
        (dict(n_hospitals=4, public_deaths=999), "public_deaths is 999"),
        (dict(n_hospitals=4, test=1.0), "test is 1.0; it must be in"),
    ],
)
def test_bad_splits_are_refused(bad, message, made):
    with pytest.raises(ValueError, match=message):
        medical.virtual_hospitals(made, rng=seed_tree(0), **bad)


def test_the_papers_own_numbers():
    """Table 4's training size is the rounded 80 %, and the public batch is what 5,010
    hospitals of 203 leave over.
    """
    assert (
        round(0.8 * 1_271_733) == 32_106 + 985_280 == 1_017_386
        and 1_271_733 - 1_017_386 == 7_882 + 246_465
    )
    assert divmod(1_017_386, 5010) == (203, 356)


def test_the_stand_ins_make_1300_hospitals(diabetes, physionet):
    for records, size, public in ((diabetes, 62, 733), (physionet, 7, 83)):
        split = medical.virtual_hospitals(records, 1300, seed_tree(0, "hospitals"))
        check_split(split, records, 1300, 12)
        assert (
            split.federation.sizes[0] == size
            and abs(len(split.public_y) - public) < 0.1 * public
        )


def test_a_visit_is_down_sampled(made):
    split = medical.virtual_hospitals(made, 40, seed_tree(0))
    y = split.federation.data.y.numpy()
    for part in split.federation.parts:
        visit = federated.balanced(part, y, seed_tree(0))
        assert (
            len(visit) == 2 * y[part].sum()
            and y[visit].mean() == 0.5
            and set(visit) <= set(part)
            and len(set(visit)) == len(visit)
        )


# ---- network and metrics


@pytest.mark.parametrize("law", ["glorot", "torch"])
def test_mlp_has_the_papers_size(law):
    net = tables.mlp(7280, seed_tree(0), law)
    weights = flatten(p.detach() for p in net.parameters())
    assert len(weights) == 1_496_601 and torch.equal(
        weights,
        flatten(p.detach() for p in tables.mlp(7280, seed_tree(0), law).parameters()),
    )
    first, last = net[0], net[4]
    bound = {"glorot": (6 / 7480) ** 0.5, "torch": 7280**-0.5}[law]
    assert 0.999 * bound < float(
        first.weight.detach().abs().max()
    ) <= bound * 1.000001 and last.weight.shape == (1, 200)
    assert (law == "glorot") == all(
        float(layer.bias.detach().abs().max()) == 0 for layer in net[::2]
    )
    assert (
        abs(
            float(last.weight.detach().std())
            * 3**0.5
            / {"glorot": (6 / 201) ** 0.5, "torch": 200**-0.5}[law]
            - 1
        )
        < 0.2
    )


def test_mlp_refuses_another_law_or_no_feature():
    with pytest.raises(
        ValueError, match="law is 'keras'; it must be one of glorot, torch"
    ):
        tables.mlp(5, seed_tree(0), "keras")
    with pytest.raises(ValueError, match="features is 0"):
        tables.mlp(0, seed_tree(0))


def test_metrics_by_hand():
    """A linear 'network' whose log-odds are the features: 3 of 4 deaths found, 1 of 2
    survivors; AUROC counts ordered pairs.
    """
    model = models.initialise(torch.nn.Sequential(torch.nn.Linear(1, 1)), seed_tree(0))
    x = torch.tensor([[2.0], [1.0], [0.5], [-1.0], [0.7], [-2.0]])
    y = torch.tensor([1, 1, 1, 1, 0, 0])
    found = tables.metrics(model, torch.tensor([1.0, 0.0]), x, y)
    assert list(found) == [
        "balanced_accuracy",
        "auroc",
        "loss",
    ], "the first is the one shown in percent"
    assert found["balanced_accuracy"] == pytest.approx(100 * (3 / 4 + 1 / 2) / 2)
    pairs = [
        (a > b) + 0.5 * (a == b)
        for a in x[y == 1, 0].tolist()
        for b in x[y == 0, 0].tolist()
    ]
    assert found["auroc"] == pytest.approx(np.mean(pairs))
    odds = np.where(y.numpy() == 1, 1, -1) * x[:, 0].numpy()
    assert found["loss"] == pytest.approx(np.log1p(np.exp(-odds)).mean(), rel=1e-6)
    nothing = tables.metrics(model, torch.zeros(2), x, y)
    assert nothing == {
        "balanced_accuracy": 50.0,
        "auroc": 0.5,
        "loss": pytest.approx(np.log(2)),
    }
    with pytest.raises(ValueError, match="one class only"):
        tables.metrics(model, torch.zeros(2), x[:4], y[:4])


def test_metrics_of_a_balanced_subset_do_not_depend_on_the_batch(made):
    net = tables.mlp(len(made.columns), seed_tree(0))
    w = flatten(p.detach() for p in net.parameters())
    once = tables.metrics(net, w, made.x, made.y)
    five = tables.metrics(net, w, made.x.repeat(5, 1), made.y.repeat(5))
    assert all(once[k] == pytest.approx(five[k], rel=1e-5) for k in once)
