"""Data files from someone who tries.

Every field is replaced by values of other types; bytes are flipped; there are bombs, nested lists
and altered images. A reader either reads or says what is wrong and where, in one sentence: file,
user where there is one, field. `--fuzz N` sets how many damaged copies of a file a reader gets (a
tenth of N, and all replaced fields).
"""

import copy
import csv
import dataclasses
import gzip
import hashlib
import json
import re
import sqlite3
import tracemalloc
from contextlib import closing
from dataclasses import dataclass
from datetime import date

import numpy as np
import pytest
from tables import tabled
from test_images import idx
from test_records import record
from test_stackoverflow import example

from dpcomm.core import files
from dpcomm.core.chance import seed_tree
from dpcomm.experiments import runs
from dpcomm.report import papers, records, results
from dpcomm.tasks import images, medical, shakespeare, stackoverflow_files

WRONG = [
    None,
    True,
    0,
    -1,
    1.5,
    1e308,
    10**400,
    float("nan"),
    float("inf"),
    "x",
    "",
    "\ud800",
    [],
    {},
    [[["x"]]],
    {"a": None},
    "y" * 10**5,
]
TEXT = [
    "",
    "x",
    "nan",
    "inf",
    "-1",
    "1e999",
    "1_0",
    "9" * 5000,
    "é",
    "\0",
    "[50-",
    "a,b",
    '"',
    "../../x",
]
CELLS = [
    None,
    0,
    -1,
    2**62,
    1.5,
    float("inf"),
    "x",
    "\ud7ff",
    b"",
    b"\xff" * 9,
    "y" * 10**4,
]


def places(value, before=()):
    "Every place in nested lists and dictionaries; of a long list its two ends."
    yield before
    steps = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for step, inside in steps:
        if not isinstance(value, list) or step < 2 or step == len(value) - 1:
            yield from places(inside, (*before, step))


def replaced(value, place, wrong):
    if not place:
        return wrong
    whole = copy.deepcopy(value)
    at = whole
    for step in place[:-1]:
        at = at[step]
    at[place[-1]] = wrong
    return whole


def flipped(raw, n, name):
    "Damaged copies: bytes changed, cut, doubled, zeroed."
    rng = seed_tree(0, "flipped", name)
    for i in range(n):
        out = bytearray(raw)
        at = int(rng.integers(len(raw)))
        many = int(rng.integers(1, 9))
        kind = i % 5
        if kind == 0:
            out[at] ^= 1 << int(rng.integers(8))
        if kind == 1:
            out[at : at + many] = rng.bytes(len(out[at : at + many]))
        if kind == 2:
            del out[at:]
        if kind == 3:
            out[at:at] = out[at : at + many]
        if kind == 4:
            out[at : at + 16 * many] = bytes(len(out[at : at + 16 * many]))
        yield bytes(out)


def sentence(read, file, *names):
    """Read, or be refused by a plain ValueError with one sentence that names the file
    and what else must be named.
    """
    try:
        return read()
    except FileNotFoundError as error:
        assert "DPCOMM_DATA" in str(error), error
    except ValueError as error:
        text = str(error)
        assert (
            type(error) is ValueError and len(text) < 700 and "\n" not in text.strip()
        ), f"{type(error).__name__}: {text[:1000]}"
        for name in (file, *names):
            assert re.search(name, text), f"{name!r} is not named in: {text}"
        assert text.rsplit(":")[-1].strip() or ";" in text, (
            f"what to do is missing: {text}"
        )


# ---- formats whose values have types: JSON and TOML

IMAGES = {"x": [[0.5] * 784] * 2, "y": [3, 61]}
LEAF = {
    "users": ["ann", "bob"],
    "num_samples": [2, 2],
    "user_data": {"ann": IMAGES, "bob": copy.deepcopy(IMAGES)},
}
WINDOWS = {"x": ["x" * 80, "y" * 80], "y": ["y", "z"]}
PLAYS = {
    "users": ["ann", "bob"],
    "num_samples": [2, 2],
    "user_data": {"ann": WINDOWS, "bob": copy.deepcopy(WINDOWS)},
}
SAID = {
    "users": ["ann", "bob"],
    "num_speeches": [2, 1],
    "num_chars": [12, 4],
    "speeches": {"ann": ["one two", "three"], "bob": ["four"]},
}
PROMISE = {"eps": 3.0, "delta": 0.01, "scope": "total", "rounds": None}
RECORD = record(
    experiment="a",
    guarantee=PROMISE,
    as_run={"replace": PROMISE},
    data={"name": "mnist", "n_test": 3, "content_hash": "0123456789ab"},
    final={"accuracy": 70.25, "uplink_bits": 8, "best": {"round": 3}},
    notes=["a note"],
)


ROW = dict(
    key="a",
    table="t",
    value=1.0,
    unit="percent",
    better="higher",
    where="p. 1",
    how="typed",
    kind="exact",
    tol=1.0,
    tol_why="why",
    checked_by="nobody",
    set_on=date(2026, 1, 1),
    also=["u"],
    spread=1.0,
    n_runs=3,
    read_err=0.1,
    note="n",
)
GRID = {
    name: value
    for name, value in ROW.items()
    if name
    in (
        "unit",
        "better",
        "how",
        "kind",
        "tol_why",
        "checked_by",
        "set_on",
        "table",
    )
} | dict(
    key="g.{row}.{column}",
    where="{row}",
    rel_tol=0.5,
    rows="acc comm\nrec 1 2.5 u",
    column={"acc": {"unit": "kB"}},
)
PAPER = {
    "paper": dict(
        id="made",
        short="M",
        year=2020,
        url="u",
        claim="c",
        finding="f",
        title="T",
        authors="A",
        arxiv="1",
        venue="V",
        code_url="u",
        code_licence="l",
        read_on=date(2026, 1, 1),
    ),
    "titles": {"t": "T", "x": "X"},
    "cell": [
        ROW,
        ROW | {"key": "b", "value": 2.0},
        ROW | dict(key="c", kind="ordering", tol=0.0, above="b", below="a"),
        ROW | dict(key="q", quotient=["a", "b"]),
    ],
    "grid": [GRID],
    "hyper": [
        dict(
            task="all",
            name="clip",
            value=[1, 2.5],
            source="stated",
            where="p. 2",
            unit="u",
        )
    ],
    "cause": [{"key": "a", "text": "why"}],
    "not_run": [{"prefix": "a", "text": "why"}],
}


def toml(value):
    "A value as TOML; KeyError for what TOML cannot hold."
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items())
            + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, date):
        return value.isoformat()
    if value is None or isinstance(value, str) and "\ud800" in value:
        raise KeyError(value)
    return str(value) if isinstance(value, float) else json.dumps(value)


def write_toml(path, value):
    if not isinstance(value, dict):
        raise KeyError(value)
    path.write_text(
        "\n".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()),
        encoding="utf-8",
    )


def write_json(path, value):
    path.write_text(json.dumps(value))


def write_lines(path, value):
    "A good record, and a second one."
    path.parent.mkdir(exist_ok=True)
    good = dataclasses.asdict(dataclasses.replace(RECORD, seed=1))
    path.write_text(f"{json.dumps(good)}\n{json.dumps(value)}\n")


def read_lines(path):
    "Records as tables read them."
    found = records._read.__wrapped__(path, None)
    mine = results.ours_by_key(found)
    shown = str(results.runs_table(found)), results.spreads_of("dprec", mine)
    told = [
        (results.as_run(r), r.data.get("content_hash"), r.data.get("name"))
        for r in found
    ]
    assert len({*told}) <= len(told) and all(runs.cpu_seconds(r) >= -1 for r in found)
    return shown


def write_packed(path, value):
    path.write_bytes(gzip.compress(json.dumps(value).encode(), 1))


WORDS = {
    "rel_tol": "tol",
    "rows": "rows|column|words|no number",
    "x": " x|symbol|holds no|images|pixels|windows",
    "y": " y|label|characters|symbol|holds no",
    "num_samples": "num_samples|announces",
    "num_speeches": "num_speeches|announces",
    "num_chars": "num_chars|announces",
    "speeches": "speech",
    "users": "user",
    "quotient": "quotient|key",
    "above": "above|key",
    "below": "below|key",
    "seeds": "seed|values",
    "cell": "cell|key",
    "grid": "grid|key",
    "key": "key|'[ab]'|\\?",
    "experiment": "experiment|belongs into",
    "accuracy": "accuracy|columns",
    "round": "round|columns",
}


@dataclass
class Kind:
    """A format: a good value, how it is written, how the file is read, and which fields
    belong to which user.
    """

    file: str
    value: object
    write: object
    read: object
    users: tuple = ()
    where: str = ""  # what every sentence names besides the file
    large: str = ""  # what it says instead of the field where all is too large

    def owner(self, place):
        "The user a place belongs to: by its name or by its number."
        if any(u in place for u in self.users):
            return [u for u in self.users if u in place]
        return (
            [self.users[place[1]]]
            if len(place) == 2 and place[0].startswith("num_")
            else []
        )

    def field(self, place):
        "What the sentence must contain: the field, or the word that stands for it."
        names = [
            step for step in place if isinstance(step, str) and step not in self.users
        ]
        word = WORDS.get(names[-1], re.escape(names[-1])) if names else ""
        return f"{word}|{self.large}" if word and self.large else word


KINDS = {
    "leaf images": Kind(
        "a.json", LEAF, write_json, lambda p: images.read_leaf(p.parent), ("ann", "bob")
    ),
    "leaf plays": Kind(
        "a.json",
        PLAYS,
        write_json,
        lambda p: shakespeare.read_leaf(p.parent),
        ("ann", "bob"),
    ),
    "roles": Kind(
        "roles.json.gz", SAID, write_packed, shakespeare.read_roles, ("ann", "bob")
    ),
    "tags": Kind(
        "a.tag_count",
        {"python": 3, "sql": 2},
        write_json,
        lambda p: stackoverflow_files.read_counts(p, 1),
    ),
    "records": Kind(
        "dprec/a.full.jsonl",
        dataclasses.asdict(RECORD),
        write_lines,
        read_lines,
        where="^a.full.jsonl, line 2: ",
        large="more than 10,000 bytes",
    ),
    "papers": Kind(
        "made.toml",
        PAPER,
        write_toml,
        lambda p: papers.parse(p.read_text(encoding="utf-8"), p.name),
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_values_of_another_type_are_refused_with_file_user_and_field(name, tmp_path):
    kind, path, refused = KINDS[name], tmp_path / KINDS[name].file, 0
    kind.write(path, kind.value)
    assert kind.read(path), "the honest file must be read"
    for place in places(kind.value):
        for wrong in WRONG:
            try:
                kind.write(path, replaced(kind.value, place, wrong))
            except KeyError:
                continue
            refused += (
                sentence(
                    lambda: kind.read(path),
                    path.name,
                    *kind.owner(place),
                    kind.field(place),
                    kind.where,
                )
                is None
            )
    assert refused > len(list(places(kind.value)))


@pytest.mark.parametrize("name", KINDS)
def test_flipped_bytes_are_refused_or_read(name, tmp_path, request):
    kind, path = KINDS[name], tmp_path / KINDS[name].file
    kind.write(path, kind.value)
    for raw in flipped(
        path.read_bytes(), request.config.getoption("--fuzz", 1000) // 10, name
    ):
        path.write_bytes(raw)
        if name != "papers":
            sentence(lambda: kind.read(path), path.name)
        else:
            sentence(lambda: papers.paper.__wrapped__("made", tmp_path), path.name)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("depth", [100, 900, 10**5])
def test_lists_in_lists_end_in_a_sentence(name, depth, tmp_path):
    kind, path = KINDS[name], tmp_path / KINDS[name].file
    deep = "[" * depth + "]" * depth
    path.parent.mkdir(exist_ok=True)
    for text in (
        deep,
        '{"a":' * depth + "1" + "}" * depth,
        *(
            json.dumps({k: [] for k in kind.value} | {key: 7}).replace("7", deep)
            for key in kind.value
        ),
    ):
        if name == "papers":
            text = f'"cell" = {deep}'
        if name == "records":
            text += "\n"
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode(), 1))
        else:
            path.write_text(text)
        assert sentence(lambda: kind.read(path), path.name) is None


# ---- formats of text


def write_table(path, head, rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([head, *rows])


DIABETES = dict(
    gender="Male",
    age="[50-60)",
    admission_type_id="1",
    discharge_disposition_id="11",
    num_medications="3",
    diag_1="250",
    diag_2="?",
    diag_3="401",
    metformin="No",
    insulin="Up",
    change="Ch",
)
STAY = (
    "Time,Parameter,Value\n00:00,RecordID,7\n00:00,Age,54\n00:00,Gender,1\n"
    "00:00,ICUType,4\n00:07,HR,73\n"
)


def diabetes(root, row):
    path = root / "diabetes130" / "dataset_diabetes" / "diabetic_data.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_table(path, row, [row.values()])
    return path


def stays(root, row, text=STAY):
    for part in "abc":
        folder = root / "physionet2012" / f"set-{part}"
        folder.mkdir(parents=True, exist_ok=True)
        write_table(
            folder.parent / f"Outcomes-{part}.txt",
            row,
            [row.values()] if part == "a" else [],
        )
        (folder / "7.txt").write_text(text, encoding="utf-8")
    return root / "physionet2012" / "Outcomes-a.txt"


def premier(root, row):
    write_table(root / "p.csv", row, [row.values()])
    return root / "p.csv"


TABLES = {
    "diabetes": (diabetes, DIABETES, lambda root: medical.diabetes130(root, 1)),
    "stays": (
        stays,
        {"RecordID": "7", "In-hospital_death": "1"},
        lambda root: medical.physionet2012(root, 1),
    ),
    "premier": (
        premier,
        dict(
            zip(medical.TABLE_COLUMNS, ("A", "52", "Male", "Urgent", "31", "x;y", "1"))
        ),
        lambda root: medical.read_admissions(root / "p.csv", 1),
    ),
}


NAMED = {
    "diabetes": "diabetic_data.csv|diabetes130",
    "stays": "Outcomes-[ab].txt|7.txt|physionet2012",
    "premier": "p.csv",
}


@pytest.fixture
def small(monkeypatch):
    """Counts and sums of the stand-ins as if one admission were all; what is read then
    is read to the end.
    """
    monkeypatch.setattr(
        medical, "ADMISSION_COUNTS", {"diabetes130": (1, 1), "physionet2012": (1, 1)}
    )
    monkeypatch.setattr(medical, "check_digest", lambda *_: None)
    monkeypatch.setattr(
        medical, "DIGESTS", {"diabetes130": "", "physionet2012": Always()}
    )


class Always(str):
    "Equal to everything."

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    __hash__ = str.__hash__


@pytest.mark.parametrize("name", TABLES)
def test_tables_name_file_row_and_column(name, tmp_path, small, request):
    write, row, read = TABLES[name]
    path, refused = write(tmp_path, row), 0
    raw = path.read_bytes()
    assert len(read(tmp_path).y) == 1
    for column in row:
        for wrong in TEXT:
            write(tmp_path, row | {column: wrong})
            refused += (
                sentence(
                    lambda: read(tmp_path), NAMED[name], f"{column}|deaths|twice|header"
                )
                is None
            )
            write(tmp_path, {wrong if c == column else c: v for c, v in row.items()})
            sentence(lambda: read(tmp_path), NAMED[name])
    assert refused >= len(row) // 2
    for damaged in flipped(raw, request.config.getoption("--fuzz", 1000) // 10, name):
        path.write_bytes(damaged)
        sentence(lambda: read(tmp_path), NAMED[name])


@pytest.mark.parametrize(
    "column, wrong, says",
    [
        (
            "age",
            "fifty",
            "diabetic_data.csv, row 2: age is 'fifty'; it must be a decade",
        ),
        (
            "num_medications",
            "many",
            "row 2: num_medications is 'many'; it must be a number",
        ),
        ("num_medications", "inf", "row 2: num_medications is 'inf'"),
    ],
)
def test_a_wrong_cell_of_a_stand_in_is_named(column, wrong, says, tmp_path, small):
    diabetes(tmp_path, DIABETES | {column: wrong})
    with pytest.raises(ValueError, match=says):
        medical.diabetes130(tmp_path, 1)


def test_records_of_a_stay_name_file_and_row(tmp_path, small, request):
    row, refused = {"RecordID": "7", "In-hospital_death": "1"}, 0
    for line in range(1, 6):
        for wrong in (
            "00:00",
            "00:00,HR",
            "00:00,HR,x",
            "00:00,HR,inf",
            "00:00,HR,1,2",
            "00:00,Age,é",
            "\0,\0,\0",
        ):
            lines = STAY.split("\n")
            lines[line] = wrong
            stays(tmp_path, row, "\n".join(lines))
            refused += (
                sentence(lambda: medical.physionet2012(tmp_path, 1), "set-a/7.txt")
                is None
            )
    assert refused >= 30
    for raw in flipped(
        STAY.encode(), request.config.getoption("--fuzz", 1000) // 10, "stay"
    ):
        stays(tmp_path, row)
        (tmp_path / "physionet2012" / "set-a" / "7.txt").write_bytes(raw)
        sentence(lambda: medical.physionet2012(tmp_path, 1), "set-a/7.txt")


@pytest.mark.parametrize("wrong", ["../7", "..", "7\0", "/etc/passwd", "", "x"])
def test_a_record_number_is_no_path(wrong, tmp_path, small):
    stays(tmp_path, {"RecordID": wrong, "In-hospital_death": "1"})
    with pytest.raises(ValueError, match="Outcomes-a.txt"):
        medical.physionet2012(tmp_path, 1)


@pytest.mark.parametrize(
    "line",
    ["one", "one two", "one 2 3", "one 1.5", "one nan", "one " + "9" * 5000, "\0"],
)
def test_word_counts_are_named(line, tmp_path):
    (tmp_path / "a.word_count").write_text(f"the 5\n{line}\n")
    with pytest.raises(ValueError, match="a.word_count is no list of counts"):
        stackoverflow_files.read_counts(tmp_path / "a.word_count", 1)


# ---- binary formats


def base(path, client="ann", n=1, split="train", raw=example("a b", "t", "x|y")):
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA synchronous = OFF")
        db.execute(
            "CREATE TABLE examples (split_name, client_id, serialized_example_proto)"
        )
        db.execute("CREATE TABLE client_metadata (client_id, split_name, num_examples)")
        db.execute("INSERT INTO client_metadata VALUES (?, ?, ?)", (client, split, n))
        db.execute("INSERT INTO examples VALUES (?, ?, ?)", (split, client, raw))
        db.commit()
    return stackoverflow_files.Files(path, path, {"a": 0, "t": 1}, {"x": 0})


def read_base(source):
    clients = stackoverflow_files.split_clients(source, "train")
    return [source.posts([i]) for i in range(len(clients))] and source.sizes()


def test_databases_name_file_and_user(tmp_path, request):
    path, refused = tmp_path / "s.sqlite", 0
    assert read_base(base(path)).tolist() == [1]
    raw, post = path.read_bytes(), example("a b", "t", "x|y")
    for field in ("client", "n", "split", "raw"):
        for wrong in CELLS:
            source = base(path, **{field: wrong})
            refused += (
                sentence(
                    lambda: read_base(source),
                    path.name,
                    *(["user 'ann'"] if field in ("n", "raw") else []),
                )
                is None
            )
    assert refused > 30
    many = request.config.getoption("--fuzz", 1000) // 10
    for damaged in flipped(post, many, "post"):
        source = base(path, raw=damaged)
        sentence(lambda: read_base(source), path.name, "user 'ann'")
    for damaged in flipped(raw, many, "base"):
        path.write_bytes(damaged)
        sentence(
            lambda: read_base(
                stackoverflow_files.Files(path, path, {"a": 0}, {"x": 0})
            ),
            path.name,
        )


def test_a_number_without_end_is_refused():
    for raw in (b"\x80" * 10**6, b"\x0a" + b"\xff" * 10**6):
        with pytest.raises(IndexError, match="longer than ten bytes"):
            list(stackoverflow_files.message_fields(raw))


H5 = [
    "a group",
    np.float32(1),
    np.ones((2, 3), "f4"),
    np.array([b"x", b"y"]),
    np.arange(2),
    np.array([True, False]),
    np.zeros(0),
    np.array([np.nan, 1]),
]


@pytest.mark.parametrize("which", ["images", "posts"])
def test_h5_files_name_file_and_user(which, tmp_path):
    h5py = pytest.importorskip("h5py", reason="NOT CHECKED: h5py is not installed")
    good = {
        "images": {
            "pixels": np.full((2, 28, 28), 0.5, "f4"),
            "label": np.int32([1, 2]),
        },
        "posts": {name: np.array([b"a", b"b"]) for name in stackoverflow_files.FIELDS},
    }[which]
    path, refused = tmp_path / "f.h5", 0

    def read():
        if which == "images":
            return images.read_tff(path)
        return read_base(stackoverflow_files.Files(path, path, {"a": 0}, {"x": 0}))

    def write(entries, promise=None):
        with h5py.File(path, "w") as file:
            for name, value in entries.items():
                place = f"examples/ann/{name}"
                if isinstance(value, str):
                    file.create_group(place)
                else:
                    file[place] = value
            if promise:
                file.create_dataset(
                    f"examples/ann/{promise}",
                    (2**40,),
                    "f4",
                    chunks=(2**16,),
                    compression="gzip",
                )

    write(good)
    assert read() is not None
    for name in good:
        for wrong in H5:
            write(good | {name: wrong})
            refused += sentence(read, path.name, "user 'ann'") is None
        write({k: v for k, v in good.items() if k != name}, promise=name)
        assert (
            path.stat().st_size < 10**5
            and sentence(read, path.name, "user 'ann'", name) is None
        ), "four terabytes announced"
    assert refused >= 4 * len(good)
    for content in (
        {"examples": np.ones(2)},
        {"other": np.ones(2)},
        {"examples/ann": np.ones(2)},
    ):
        with h5py.File(path, "w") as file:
            for place, value in content.items():
                file[place] = value
        assert sentence(read, path.name) is None


SIZES = (*range(8), 31, 32, 33, 64, 65, 128, 255)
SHAPES = [idx(np.zeros(s)) for s in ((), (0,), (3,), (2, 3), (2, 28, 28))]


def test_idx_files_are_refused_or_read(tmp_path, request):
    path = tmp_path / "a"
    announced = [bytes([0, 0, 8, n]) + b"\xff" * 4 * n for n in SIZES] + [
        bytes([0, 0, 8, n]) + (1).to_bytes(4, "big") * n + b"x" for n in SIZES
    ]
    zero = [bytes([0, 0, 8, 2]) + b"\xff" * 4 + bytes(4)]
    for raw in [
        *announced,
        *zero,
        *(
            d
            for good in SHAPES
            for d in flipped(
                good, request.config.getoption("--fuzz", 1000) // 10, len(good)
            )
        ),
    ]:
        for name, content in (("a", raw), ("a.gz", gzip.compress(raw, 1))):
            (tmp_path / name).write_bytes(content)
            sentence(lambda: images.read_idx(tmp_path / name), name)
    whole = gzip.compress(SHAPES[-1], 1)
    path = tmp_path / "a.gz"
    for raw in flipped(whole, request.config.getoption("--fuzz", 1000) // 10, "gz"):
        path.write_bytes(raw)
        sentence(lambda: images.read_idx(path), path.name)


BOMB = gzip.compress(bytes(2**20)) * 1024  # a megabyte that unpacks to a gigabyte


def emnist(root):
    for part in ("train", "test"):
        for kind in ("images-idx3", "labels-idx1"):
            yield root / "EMNIST" / "raw" / f"emnist-mnist-{part}-{kind}-ubyte.gz"


@pytest.mark.parametrize(
    "file, read, most",
    [
        (
            "EMNIST/raw/emnist-mnist-train-images-idx3-ubyte.gz",
            images.emnist,
            784 * 60_000,
        ),
        (
            "shakespeare/shakespeare_roles.json.gz",
            shakespeare.shakespeare,
            shakespeare.MOST,
        ),
        ("QMNIST/raw/qmnist-train-labels-idx2-int.gz", images._writers, 60_000 * 32),
    ],
    ids=["emnist", "roles", "writers"],
)
def test_a_bomb_is_unpacked_no_further_than_what_it_may_hold(
    file, read, most, tmp_path
):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_bytes(BOMB)
    tracemalloc.start()
    try:
        with pytest.raises(
            ValueError, match=f"{path.name} cannot be unpacked .it holds more than"
        ):
            if read is not images.emnist:
                read(root=tmp_path)
            else:
                images.emnist("mnist", tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 4 * most + 2**24
    finally:
        tracemalloc.stop()


# ---- content that is known


def made_mnist(root, monkeypatch):
    "Four small files in MNIST's place whose sums are the published ones."
    raw, kept = root / "MNIST" / "raw", {}
    raw.mkdir(parents=True)
    for part, n in (("train", 6), ("t10k", 4)):
        for kind, array in (
            ("images-idx3", seed_tree(0, part).integers(0, 256, (n, 28, 28))),
            ("labels-idx1", np.arange(n)),
        ):
            (raw / f"{part}-{kind}-ubyte").write_bytes(idx(array))
            kept[f"{part}-{kind}-ubyte"] = hashlib.sha256(idx(array)).hexdigest()
    monkeypatch.setitem(images.PUBLISHED, "mnist", kept)
    monkeypatch.setitem(images.COUNTS, "mnist", (6, 4))
    return raw


def test_an_altered_image_is_noticed(tmp_path, monkeypatch):
    raw = made_mnist(tmp_path, monkeypatch)
    whole = images.load("mnist", tmp_path, download=False)
    assert len(whole.y) == 6
    for path in sorted(raw.iterdir()):
        before = path.read_bytes()
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        for download in (False, True):
            with pytest.raises(
                ValueError,
                match=(
                    f"^{path.name} is not the published file .*: delete it, and load"
                    " the data again$"
                ),
            ):
                images.load("mnist", tmp_path, download)
        path.write_bytes(before)
    assert (
        images.load("mnist", tmp_path, download=False).content_hash
        == whole.content_hash
    )


def test_the_published_sums_are_those_of_the_packed_files_that_torchvision_knows():
    for name, files_of in images.PUBLISHED.items():
        place = images.data_root() / images.FILES[name][0]
        if not place.exists():
            pytest.skip(f"NOT CHECKED: {name} is not under the data root")
        for file, digest in files_of.items():
            packed = place / f"{file}.gz"
            if packed.exists():
                files.check_digest(packed, digest, gzip.decompress(packed.read_bytes()))
            files.check_digest(place / file, digest)


def test_the_content_hash_sees_every_change_and_no_other():
    digits = images.load("digits")

    def changed(**more):
        return dataclasses.replace(digits, **more)

    x = digits.x.clone()
    x[5, 0, 14, 14] += 1 / 256
    y = digits.y_test.clone()
    y[0] = (y[0] + 1) % 10
    seen = [
        digits,
        changed(x=x),
        changed(y_test=y),
        changed(x=digits.x_test, x_test=digits.x),
        changed(x=digits.x.double()),
        changed(x=digits.x[:-1]),
        changed(x=digits.x.reshape(-1, 1, 14, 56)),
    ]
    assert (
        len({each.content_hash for each in seen}) == len(seen)
        and changed(name="other", x=digits.x.clone()).content_hash
        == digits.content_hash
    )


def test_a_record_says_what_it_was_made_on(tmp_path):
    about = {"name": "mnist", "partition_hash": "c", "content_hash": "0123456789ab"}
    for name in about:
        wrong = dataclasses.replace(RECORD, data=about | {name: 7})
        with pytest.raises(ValueError, match=f"data.{name} is 7; it must be text"):
            records.append(tmp_path, wrong)
    assert not list(tmp_path.rglob("*.jsonl"))
    records.append(tmp_path, dataclasses.replace(RECORD, data=about))
    old = dict(seed=1, experiment="b", data={"name": "mnist"})
    records.append(tmp_path, dataclasses.replace(RECORD, **old))
    found = records.load("dprec", root=tmp_path)
    assert [(r.experiment, r.data) for r in found] == [("a", about), ("b", old["data"])]


# ---- the checkers themselves


def test_checkers_refuse_and_admit(tmp_path):
    assert (
        files.typed("a", "n", 3, int) == 3
        and files.typed("a", "n", 3, float) == 3
        and files.typed("a", "n", (), (list, tuple)) == ()
    )
    assert files.field("a", {"n": []}, "n", list) == [] and files.read_json(
        "a", b'{"a": [1]}'
    ) == {"a": [1]}
    for wrong, kind, says in (
        (True, int, "a has True as n; it must be a whole number: make the file again"),
        (1.0, int, "a has 1.0"),
        ("1", float, "it must be a number"),
        (None, (list, tuple), "it must be a list"),
        (False, float, "a has False"),
    ):
        with pytest.raises(ValueError, match=says):
            files.typed("a", "n", wrong, kind)
    for wrong in (None, [], {}, {"m": 1}, "n"):
        with pytest.raises(
            ValueError, match="a has no 'n'; it must be text: make the file again"
        ):
            files.field("a", wrong, "n", str)
    path = files.write_whole(
        tmp_path / "a.gz", [gzip.compress(b"12"), gzip.compress(b"345")]
    )
    assert files.unpack(path, 5) == b"12345"
    with pytest.raises(
        ValueError,
        match=(
            "a.gz cannot be unpacked .it holds more than the 4 bytes it may.; mend it"
        ),
    ):
        files.unpack(path, 4, "mend it")
    with pytest.raises(FileNotFoundError):
        files.unpack(tmp_path / "b.gz", 4)


def test_readers_shared_by_several_formats(tmp_path):
    h5py = pytest.importorskip("h5py", reason="NOT CHECKED: h5py is not installed")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["examples/ann/n"] = np.arange(5)
    with images.h5_users(tmp_path / "a.h5", "json", "n") as users:
        assert images.h5_column("a", users["ann"], "n", 5).tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(
            ValueError,
            match=(
                r"a has a column 'n' of shape \(5,\); it must be an array of 1 to 4"
                r" entries"
            ),
        ):
            images.h5_column("a", users["ann"], "n", 4)
    (tmp_path / "a.csv").write_text("a,b\n1,2\n\n3,4\n")
    assert medical.read_table(tmp_path / "a.csv", ("b",)) == [
        ("a.csv, row 2", {"a": "1", "b": "2"}),
        ("a.csv, row 4", {"a": "3", "b": "4"}),
    ]
    for columns, only, says in (
        (("c",), False, "lacks the column c"),
        (("a",), True, "has the unknown column 'b'"),
    ):
        with pytest.raises(ValueError, match=f"a.csv, row 1: {says}"):
            medical.read_table(tmp_path / "a.csv", columns, only)


@tabled(
    "change, says",
    [
        (
            {"as_run": {"replaced": PROMISE}},
            "as_run: relation='replaced' is not one of .*did you mean 'replace'",
        ),
        (
            {"as_run": {"replace": {}}},
            "as_run.replace.eps is None; it must be a number",
        ),
        ({"as_run": {"replace": None}}, "as_run.replace is None; it must be of type"),
        ({"as_run": [1]}, r"as_run is \[1\]; it must be of type dict"),
        ({"guarantee": {}}, "guarantee.eps is None; it must be a number"),
        ({"guarantee": PROMISE | {"delta": "0"}}, "guarantee.delta is '0'"),
        (
            {"guarantee": PROMISE | {"scope": 7}},
            "guarantee.scope is 7; it must be text",
        ),
        (
            {"cost": {"wall_seconds": "1"}},
            "cost.wall_seconds is '1'; it must be a number",
        ),
        ({"origin": {"date": 2026}}, "origin.date is 2026; it must be text"),
        (
            {"experiment": "../../x"},
            "experiment is '../../x'; it must be a module's name",
        ),
        ({"experiment": ""}, "experiment is ''"),
    ],
)
def test_records_are_checked_as_deep_as_tables_read_them(change, says):
    assert records.fault(RECORD) == ""
    wrong = dataclasses.replace(RECORD, **change)
    assert re.match(says, records.fault(wrong))
    line = json.dumps(dataclasses.asdict(wrong))
    with pytest.raises(ValueError, match=f"here: {says}"):
        records.from_line(line, "here")


def test_a_score_that_is_null_is_left_out_of_a_table():
    found = [
        dataclasses.replace(RECORD, seed=i, final={"accuracy": a, "uplink_bits": b})
        for i, (a, b) in enumerate([(None, None), (70.0, 2**33), (72.0, None)])
    ]
    (row,) = results.runs_table(found).rows
    assert row[1:3] == ("3", "71 +/- 1") and row[4:6] == ("1", "")
