"""medical: counts and features of the stand-ins, virtual hospitals."""

import numpy as np
import pytest
import torch
from conftest import or_skip
from hypothesis import given
from hypothesis import strategies as some

from dpcomm.core.random import seed_tree
from dpcomm.datasets import medical
from dpcomm.training import local_sgd


@pytest.fixture(scope="module")
def made():
    return medical.synthetic_admissions(2000, seed_tree(0))


# ---- features


CODES = some.lists(some.sampled_from("abcdefg"), max_size=9)


@given(some.lists(CODES, min_size=1, max_size=30), some.integers(1, 6))
def test_a_feature_is_kept_exactly_where_enough_records_have_it(lists, least):
    x, names = medical.code_features(lists, least)
    frequent = {c for c in "abcdefg" if sum(c in codes for codes in lists) >= least}
    assert set(names) == frequent and x.shape == (len(lists), len(names))
    assert x.tolist() == [[name in codes for name in names] for codes in lists]


def test_scale_range_is_minmax_of_the_range_and_not_of_the_records():
    values = np.array([15.0, 52.0, 89.0, 7.0, 120.0, np.nan])
    scaled = medical.scale_range(values, 15, 89)
    assert scaled.tolist() == [0, 0.5, 1, 0, 1, 0] and scaled.dtype == np.float32
    alone = medical.scale_range(values[1:2], 15, 89)
    assert alone == scaled[1], "the other records change nothing"
    two = medical.scale_range(np.array([[1.0, 10.0], [2.0, 30.0]]), (0, 10), (2, 30))
    assert two.tolist() == [[0.5, 0.0], [1.0, 1.0]]


# ---- the stand-ins


def check(records):
    x, columns = records.x, records.columns
    assert x.shape == (len(records.y), len({*columns})) and x.dtype == torch.float32
    assert float(x.min()) == 0.0 and float(x.max()) == 1.0


@pytest.mark.slow
def test_no_feature_of_diabetes130_says_how_the_stay_ended():
    diabetes = or_skip(medical.diabetes130)
    check(diabetes)
    columns, x, dead = diabetes.columns, diabetes.x, diabetes.y.bool()
    names = "gender Female", "admission Elective", "drug insulin", "icd9 250"
    counts = [int(x[:, columns.index(name)].sum()) for name in names]
    assert counts == [54_708, 18_869, 54_383, 17_861]
    gap = (x[dead].mean(0) - x[~dead].mean(0)).abs()
    assert float(gap.max()) < 0.4, "no feature alone separates the dead"


@pytest.mark.slow
def test_a_day_in_physionet2012_has_a_least_mean_and_most():
    physionet = or_skip(medical.physionet2012)
    check(physionet)
    columns = {c: physionet.x[:, j] for j, c in enumerate(physionet.columns)}
    assert (sum(v for c, v in columns.items() if c.startswith("icu")) == 1).all()
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
    found = {"Age": [54], "Gender": [-1], "ICUType": [4], "HR": [73, 70]}
    assert medical.first_day(text) == found
    assert all(low < high for low, high in medical.BOUNDS.values())


# ---- invented patients


def test_invented_patients_are_the_same_again_and_can_be_learned(made):
    again = medical.synthetic_admissions(2000, seed_tree(0))
    assert torch.equal(made.x, again.x) and torch.equal(made.y, again.y)
    assert int(made.y.sum()) == 200
    assert 10 < len(made.columns) < 400
    older = made.x[:, made.columns.index("age")]
    assert float(older[made.y == 1].mean() - older[made.y == 0].mean()) > 0.05


def test_a_missing_table_is_named_and_an_altered_one_noticed(tmp_path):
    with pytest.raises(FileNotFoundError, match="/diabetic_data.csv .UCI.* into"):
        medical.diabetes130(tmp_path)
    with pytest.raises(FileNotFoundError, match="put Outcomes-a.txt .* into"):
        medical.physionet2012(tmp_path)
    table = tmp_path / "diabetes130" / "dataset_diabetes" / "diabetic_data.csv"
    table.parent.mkdir(parents=True)
    for content in (
        b"gender,age\nMale,[50-60)\n",
        b"",
        b"\xff\0",
        b'"' + b"a" * 200_000,
    ):
        table.write_bytes(content)
        says = "diabetic_data.csv is not the published file"
        with pytest.raises(ValueError, match=says):
            medical.diabetes130(tmp_path)
    (tmp_path / "physionet2012" / "set-b").mkdir(parents=True)
    for letter, content in dict(a="<html>\nhi\n", b="id,dead\n7,1\n8,0", c="").items():
        (tmp_path / "physionet2012" / f"Outcomes-{letter}.txt").write_text(content)
    (tmp_path / "physionet2012" / "set-b" / "7.txt").write_text("Time\n00:00,HR")
    with pytest.raises(ValueError, match="physionet2012 is not the published file"):
        medical.physionet2012(tmp_path)


# ---- virtual hospitals


def check_split(split, records, n_hospitals, public_deaths):
    "Every record is in one place, and every hospital has as many and a death."
    federation, n = split.federation, len(records.y)
    y, parts = federation.data.y.numpy(), federation.parts
    assert len(parts) == n_hospitals and len(set(federation.sizes)) == 1
    assert sorted(np.concatenate(parts)) == list(range(len(y)))
    assert min(y[part].sum() for part in parts) >= 1
    assert int(split.public_y.sum()) == public_deaths
    n_public, n_test = len(split.public_y), len(federation.data.y_test)
    dropped = n - len(y) - n_public - n_test
    assert 0 <= dropped < n_hospitals and n_test == n - round(0.8 * n)


def test_virtual_hospitals_belong_to_their_stream(made):
    split, again, other = (
        medical.virtual_hospitals(made, 40, seed_tree(i), public_deaths=5)
        for i in (0, 0, 1)
    )
    assert isinstance(split, medical.Split)
    check_split(split, made, 40, 5)
    assert again.federation.partition_hash == split.federation.partition_hash
    assert torch.equal(again.public_x, split.public_x)
    assert not torch.equal(other.federation.data.x_test, split.federation.data.x_test)
    y = split.federation.data.y.numpy()
    for part in split.federation.parts:
        visit = local_sgd.downsample_majority(part, y, seed_tree(0))
        assert len(visit) == 2 * y[part].sum() and y[visit].mean() == 0.5
        assert set(visit) <= set(part) and len(set(visit)) == len(visit)


def test_no_record_is_in_two_places():
    n = 500
    y = (torch.arange(n) % 10 == 0).long()
    ids = torch.arange(n, dtype=torch.float32)[:, None] / n
    records = medical.Records("made", ids, y, ("id",))
    split = medical.virtual_hospitals(records, 7, seed_tree(3), public_deaths=4)
    data = split.federation.data
    where = [data.x, data.x_test, split.public_x]
    assert n - 7 < len(torch.cat(where).unique()) == sum(map(len, where))
    for x, labels in zip(where, (data.y, data.y_test, split.public_y)):
        assert torch.equal(labels, y[(x[:, 0] * n).round().long()])
