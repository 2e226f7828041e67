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
import math
import re
import sqlite3
import tracemalloc
from contextlib import closing
from dataclasses import dataclass
from datetime import date
from itertools import product

import numpy as np
import pytest
from tables import tabled
from test_images import idx
from test_records import record
from test_stackoverflow import example

from dpcomm.core import files
from dpcomm.core.random import seed_tree
from dpcomm.datasets import (
    emnist,
    femnist,
    images,
    medical,
    shakespeare,
    torchvision_files,
)
from dpcomm.datasets import stackoverflow_h5 as posts
from dpcomm.evidence import paper_tables, records, verdicts
from dpcomm.experiments.run import costs

WRONG = [None, True, 0, -1, 1.5, 1e308, 10**400, math.nan, math.inf, "x", "", "\ud800"]
WRONG += [[], {}, [[["x"]]], {"a": None}, "y" * 10**5]
TEXT = ["", "x", "nan", "inf", "-1", "1e999", "1_0", "9" * 5000, "é", "\0", "[50-"]
TEXT += ["a,b", '"', "../../x"]
CELLS = [None, 0, -1, 2**62, 1.5, math.inf, "x", "\ud7ff", b"", b"\xff" * 9, "y" * 9999]


@pytest.fixture
def flipped(request):
    "Damaged copies of bytes: changed, cut, doubled, zeroed."

    def flip(raw, name):
        rng = seed_tree(0, "flipped", name)
        for i in range(request.config.getoption("--fuzz", 1000) // 10):
            out = bytearray(raw)
            at, many = int(rng.integers(len(raw))), int(rng.integers(1, 9))
            if i % 5 == 0:
                out[at] ^= 1 << int(rng.integers(8))
            elif i % 5 == 1:
                out[at : at + many] = rng.bytes(len(out[at : at + many]))
            elif i % 5 == 2:
                del out[at:]
            elif i % 5 == 3:
                out[at:at] = out[at : at + many]
            else:
                out[at : at + 16 * many] = bytes(len(out[at : at + 16 * many]))
            yield bytes(out)

    return flip


def places(value, before=()):
    "Every place in nested lists and dictionaries; of a long list its two ends."
    yield before
    steps = {dict: lambda: value.items(), list: lambda: enumerate(value)}
    for step, inside in steps.get(type(value), tuple)():
        if isinstance(value, dict) or step < 2 or step == len(value) - 1:
            yield from places(inside, (*before, step))


def replaced(value, place, wrong):
    if not place:
        return wrong
    whole = at = copy.deepcopy(value)
    for step in place[:-1]:
        at = at[step]
    at[place[-1]] = wrong
    return whole


def refused(read, *names) -> bool:
    """Whether a file is refused, always by a plain ValueError with one sentence that
    names the file and what else must be named; otherwise it is read.
    """
    try:
        read()
        return False
    except FileNotFoundError as error:
        assert "DPCOMM_DATA" in str(error), error
    except ValueError as error:
        text = str(error)
        plain = type(error) is ValueError and len(text) < 700
        assert plain and "\n" not in text.strip(), f"{type(error)}: {text[:1000]}"
        for name in names:
            assert re.search(name, text), f"{name!r} is not named in: {text}"
        assert text.rsplit(":")[-1].strip() or ";" in text, f"what to do: {text}"
    return True


# ---- formats whose values have types: JSON and TOML


def leaf(x, y):
    own = {u: copy.deepcopy({"x": x, "y": y}) for u in ("ann", "bob")}
    return {"users": [*own], "num_samples": [2, 2], "user_data": own}


SAID = {
    "users": ["ann", "bob"],
    "num_speeches": [2, 1],
    "num_chars": [12, 4],
    "speeches": {"ann": ["one two", "three"], "bob": ["four"]},
}
PROMISE = dict(eps=3.0, delta=0.01, unit="client", relation="replace", rounds=None)
PROMISE |= dict(sampling="none", accountant="pld", scope="total", trust="central")
RECORD = record(
    experiment="a",
    guarantee=PROMISE,
    as_run={"replace": PROMISE},
    data={"name": "mnist", "n_test": 3, "content_hash": "0123456789ab"},
    final={"accuracy": 70.25, "uplink_bits": 8, "best": {"round": 3}},
    notes=["a note"],
)
SHARED = dict(unit="percent", better="higher", how="typed", kind="exact", table="t")
SHARED |= dict(tol_why="why", checked_by="nobody", set_on=date(2026, 1, 1))
ROW = SHARED | dict(key="a", value=1.0, where="p. 1", tol=1.0, also=["u"], spread=1.0)
ROW |= dict(n_runs=3, read_err=0.1, note="n")
GRID = SHARED | dict(key="g.{row}.{column}", where="{row}", rel_tol=0.5)
GRID |= dict(rows="acc comm\nrec 1 2.5 u", column={"acc": {"unit": "kB"}})
ABOUT = "short url claim finding title authors arxiv venue code_url code_licence"
HYPER = dict(task="all", name="clip", value=[1, 2.5], source="stated", where="p. 2")
PAPER = {
    "paper": {name: "u" for name in ABOUT.split()}
    | dict(id="made", year=2020, read_on=date(2026, 1, 1)),
    "titles": {"t": "T", "u": "U"},
    "cell": [
        ROW,
        ROW | {"key": "b", "value": 2.0},
        ROW | dict(key="c", kind="ordering", tol=0.0, above="b", below="a"),
        ROW | dict(key="q", quotient=["a", "b"]),
    ],
    "grid": [GRID],
    "hyper": [HYPER | {"unit": "u"}],
    "cause": [{"key": "a", "text": "why"}],
    "not_run": [{"prefix": "a", "text": "why"}],
}


def toml(value):
    "A value as TOML; KeyError for what TOML cannot hold."
    if isinstance(value, dict):
        inside = (f"{json.dumps(k)} = {toml(v)}" for k, v in value.items())
        return "{" + ", ".join(inside) + "}"
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
    lines = [f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()]
    path.write_text("\n".join(lines), encoding="utf-8")


def write_json(path, value):
    path.write_text(json.dumps(value))


def write_lines(path, value):
    "A good record, and a second one."
    path.parent.mkdir(exist_ok=True)
    good = dataclasses.asdict(dataclasses.replace(RECORD, seed=1))
    path.write_text(f"{json.dumps(good)}\n{json.dumps(value)}\n")


def write_packed(path, value):
    path.write_bytes(gzip.compress(json.dumps(value).encode(), 1))


def read_lines(path):
    "Records as tables read them."
    found = records._read.__wrapped__(path, None)
    for r in found:
        hash((verdicts.as_run(r), r.data.get("content_hash"), r.data.get("name")))
        assert costs.cpu_seconds(r) >= -1
    spreads = verdicts.spreads_of(verdicts.ours_by_key(found))
    return str(verdicts.runs_table(found)), spreads


WORDS = {  # a field, and what a sentence about it says
    "rel_tol": "tol",
    "rows": "rows|column|words|not a number",
    "x": " x|symbol|has no|images|pixels|windows",
    "y": " y|label|characters|symbol|has no",
    "num_samples": "num_samples|declares",
    "num_speeches": "num_speeches|declares",
    "num_chars": "num_chars|declares",
    "speeches": "speech",
    "users": "user",
    "quotient": "quotient|key",
    "above": "above|key",
    "below": "below|key",
    "seeds": "seed|values",
    "cell": "cell|key",
    "paper": "paper|id",
    "grid": "grid|key",
    "key": "key|'[ab]'|\\?",
    "experiment": "experiment|belongs in",
    "accuracy": "accuracy|columns",
    "round": "round|columns",
}


@dataclass
class Kind:
    "A format: a good value, how it is written, and how the file is read."

    file: str
    value: object
    write: object
    read: object
    users: tuple = ()
    where: str = ""  # what every sentence names besides the file
    large: str = ""  # what it says instead of the field where all is too large

    def named(self, place):
        "What the sentence must contain: the user by name or number, and the field."
        owner = [u for u in self.users if u in place]
        if self.users and len(place) == 2 and place[0].startswith("num_"):
            owner = [self.users[place[1]]]
        steps = [s for s in place if isinstance(s, str) and s not in self.users]
        typed = self.file.endswith((".jsonl", ".toml"))  # a path to the field, or to
        words = steps if typed else steps[-1:]  # what holds it, which is short
        word = "|".join(WORDS.get(step, re.escape(step)) for step in words)
        return *owner, f"{word}|{self.large}" if word and self.large else word


TWO = "ann", "bob"
KINDS = {
    "leaf images": Kind(
        "a.json",
        leaf([[0.5] * 784] * 2, [3, 61]),
        write_json,
        lambda p: femnist.read_leaf(p.parent),
        TWO,
    ),
    "leaf plays": Kind(
        "a.json",
        leaf(["x" * 80, "y" * 80], ["y", "z"]),
        write_json,
        lambda p: shakespeare.read_leaf(p.parent),
        TWO,
    ),
    "roles": Kind("roles.json.gz", SAID, write_packed, shakespeare.read_roles, TWO),
    "tags": Kind(
        "a.tag_count",
        {"python": 3, "sql": 2},
        write_json,
        lambda p: posts.read_counts(p, 1),
    ),
    "records": Kind(
        "dprec/a.full.jsonl",
        dataclasses.asdict(RECORD),
        write_lines,
        read_lines,
        where="^a.full.jsonl, line 2: ",
        large="10,000 are allowed|malformed",
    ),
    "papers": Kind(
        "made.toml",
        PAPER,
        write_toml,
        lambda p: paper_tables.parse(p.read_bytes(), p.name),
        large="missing required",
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_values_of_another_type_are_refused_with_file_user_and_field(name, tmp_path):
    kind, path, count = KINDS[name], tmp_path / KINDS[name].file, 0
    kind.write(path, kind.value)
    assert kind.read(path), "the honest file must be read"
    for place, wrong in product(places(kind.value), WRONG):
        try:
            kind.write(path, replaced(kind.value, place, wrong))
        except KeyError:
            continue
        named = path.name, *kind.named(place), kind.where
        count += refused(lambda: kind.read(path), *named)
    assert count > len(list(places(kind.value)))


@pytest.mark.parametrize("name", KINDS)
def test_flipped_bytes_are_refused_or_read(name, tmp_path, flipped):
    kind, path = KINDS[name], tmp_path / KINDS[name].file
    kind.write(path, kind.value)
    for raw in flipped(path.read_bytes(), name):
        path.write_bytes(raw)
        if name == "papers":
            paper_tables._from_file.cache_clear()
            refused(lambda: paper_tables.paper("made", tmp_path), path.name)
        else:
            refused(lambda: kind.read(path), path.name)


@pytest.mark.parametrize("name", KINDS)
def test_lists_in_lists_end_in_a_sentence(name, tmp_path):
    kind, path = KINDS[name], tmp_path / KINDS[name].file
    path.parent.mkdir(exist_ok=True)
    for depth in (100, 900, 10**5):
        deep = "[" * depth + "]" * depth
        texts = [deep, '{"a":' * depth + "1" + "}" * depth]
        for key in kind.value:
            whole = json.dumps({k: [] for k in kind.value} | {key: 7})
            texts.append(whole.replace("7", deep))
        for text in texts if name != "papers" else [f'"cell" = {deep}']:
            raw = (text + "\n" * (name == "records")).encode()
            path.write_bytes(gzip.compress(raw, 1) if path.suffix == ".gz" else raw)
            assert refused(lambda: kind.read(path), path.name)


# ---- formats of text


def write_table(path, row, full=True):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([row, *[row.values()] * full])
    return path


DIABETES = dict(gender="Male", age="[50-60)", admission_type_id="1", diag_1="250")
DIABETES |= dict(discharge_disposition_id="11", num_medications="3", diag_2="?")
DIABETES |= dict(diag_3="401", metformin="No", insulin="Up", change="Ch")
OUTCOME = {"RecordID": "7", "In-hospital_death": "1"}
PREMIER = "A", "52", "Male", "Urgent", "31", "x;y", "1"
STAY = (
    "Time,Parameter,Value\n00:00,RecordID,7\n00:00,Age,54\n00:00,Gender,1\n"
    "00:00,ICUType,4\n00:07,HR,73\n"
)


def stays(root, row, text=STAY):
    folder = root / "physionet2012"
    for part in "cba":
        path = write_table(folder / f"Outcomes-{part}.txt", row, part == "a")
        (folder / f"set-{part}").mkdir(exist_ok=True)
        (folder / f"set-{part}" / "7.txt").write_text(text, encoding="utf-8")
    return path


def read_stays(root):
    return medical.physionet2012(root, 1)


IN = "diabetes130/dataset_diabetes/diabetic_data.csv"
TABLES = {
    "diabetes": (
        lambda root, row: write_table(root / IN, row),
        DIABETES,
        lambda root: medical.diabetes130(root, 1),
        "diabetic_data.csv|diabetes130",
    ),
    "stays": (stays, OUTCOME, read_stays, "Outcomes-[ab].txt|7.txt|physionet2012"),
    "premier": (
        lambda root, row: write_table(root / "p.csv", row),
        dict(zip(medical.TABLE_COLUMNS, PREMIER)),
        lambda root: medical.read_admissions(root / "p.csv", 1),
        "p.csv",
    ),
}


class Always(str):
    "Equal to everything."

    __eq__, __ne__, __hash__ = (lambda *_: True), (lambda *_: False), str.__hash__


@pytest.fixture
def small(monkeypatch):
    "Counts and sums of the stand-ins as if one admission were all."
    one = {"diabetes130": (1, 1), "physionet2012": (1, 1)}
    monkeypatch.setattr(medical, "ADMISSION_COUNTS", one)
    monkeypatch.setattr(medical, "check_digest", lambda *_: None)
    sums = {"diabetes130": "", "physionet2012": Always()}
    monkeypatch.setattr(medical, "DIGESTS", sums)


@pytest.mark.parametrize("name", TABLES)
def test_tables_name_file_row_and_column(name, tmp_path, small, flipped):
    write, row, read, file = TABLES[name]
    path, count = write(tmp_path, row), 0
    raw = path.read_bytes()
    assert len(read(tmp_path).y) == 1
    for column, wrong in product(row, TEXT):
        write(tmp_path, row | {column: wrong})
        words = f"{column}|deaths|twice|header"
        count += refused(lambda: read(tmp_path), file, words)
        write(tmp_path, {wrong if c == column else c: v for c, v in row.items()})
        refused(lambda: read(tmp_path), file)
    assert count >= len(row) // 2
    for damaged in flipped(raw, name):
        path.write_bytes(damaged)
        refused(lambda: read(tmp_path), file)


def test_records_of_a_stay_name_file_and_row(tmp_path, small, flipped):
    count, words = 0, "00:00|00:00,HR|00:00,HR,x|00:00,HR,inf|00:00,HR,1,2"
    for line, wrong in product(range(1, 6), [*words.split("|"), "0,Age,é", "\0,\0,\0"]):
        lines = STAY.split("\n")
        lines[line] = wrong
        stays(tmp_path, OUTCOME, "\n".join(lines))
        count += refused(lambda: read_stays(tmp_path), "set-a/7.txt")
    assert count >= 30
    stays(tmp_path, OUTCOME)
    for raw in flipped(STAY.encode(), "stay"):
        (tmp_path / "physionet2012" / "set-a" / "7.txt").write_bytes(raw)
        refused(lambda: read_stays(tmp_path), "set-a/7.txt")


@tabled("wrong", ["../7", "..", "7\0", "/etc/passwd", "", "x"])
def test_a_record_number_is_no_path(wrong, tmp_path, small):
    stays(tmp_path, {"RecordID": wrong, "In-hospital_death": "1"})
    with pytest.raises(ValueError, match="Outcomes-a.txt"):
        read_stays(tmp_path)


COUNTED = ["one", "one two", "one 2 3", "one 1.5", "one nan", "one " + "9" * 5000, "\0"]


@tabled("line", COUNTED)
def test_word_counts_are_named(line, tmp_path):
    (tmp_path / "a.word_count").write_text(f"the 5\n{line}\n")
    with pytest.raises(ValueError, match="a.word_count is not a list of counts"):
        posts.read_counts(tmp_path / "a.word_count", 1)


# ---- binary formats


def base(path, client="ann", n=1, split="train", raw=example("a b", "t", "x|y")):
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA synchronous = OFF")
        columns = "split_name, client_id, serialized_example_proto"
        db.execute(f"CREATE TABLE examples ({columns})")
        db.execute("CREATE TABLE client_metadata (client_id, split_name, num_examples)")
        db.execute("INSERT INTO client_metadata VALUES (?, ?, ?)", (client, split, n))
        db.execute("INSERT INTO examples VALUES (?, ?, ?)", (split, client, raw))
        db.commit()


def read_base(path):
    source = posts.Files(path, path, {"a": 0, "t": 1}, {"x": 0})
    clients = source.clients("train")
    return [source.posts([i]) for i in range(len(clients))] and source.sizes()


def test_databases_name_file_and_user(tmp_path, flipped):
    path, count = tmp_path / "s.sqlite", 0
    base(path)
    assert read_base(path).tolist() == [1]
    raw = path.read_bytes()
    for field, wrong in product(("client", "n", "split", "raw"), CELLS):
        base(path, **{field: wrong})
        user = ["user 'ann'"] if field in ("n", "raw") else []
        count += refused(lambda: read_base(path), path.name, *user)
    assert count > 30
    for damaged in flipped(example("a b", "t", "x|y"), "post"):
        base(path, raw=damaged)
        refused(lambda: read_base(path), path.name, "user 'ann'")
    for damaged in flipped(raw, "base"):
        path.write_bytes(damaged)
        refused(lambda: read_base(path), path.name)


def test_a_number_without_end_is_refused():
    for raw in (b"\x80" * 10**6, b"\x0a" + b"\xff" * 10**6):
        with pytest.raises(IndexError, match="longer than ten bytes"):
            list(posts.message_fields(raw))


H5 = ["a group", np.float32(1), np.ones((2, 3), "f4"), np.array([b"x", b"y"])]
H5 += [np.arange(2), np.array([True, False]), np.zeros(0), np.array([np.nan, 1])]


@pytest.mark.parametrize("which", ["images", "posts"])
def test_h5_files_name_file_and_user(which, tmp_path):
    h5py = pytest.importorskip("h5py", reason="NOT CHECKED: h5py is not installed")
    good = {name: np.array([b"a", b"b"]) for name in posts.FIELDS}
    if which == "images":
        good = {"pixels": np.full((2, 28, 28), 0.5, "f4"), "label": np.int32([1, 2])}
    path, count = tmp_path / "f.h5", 0

    def read():
        return (femnist.read_tff if which == "images" else read_base)(path)

    def write(entries, promise=None):
        with h5py.File(path, "w") as file:
            for name, value in entries.items():
                if isinstance(value, str):
                    file.create_group(f"examples/ann/{name}")
                else:
                    file[f"examples/ann/{name}"] = value
            if promise:
                place, more = f"examples/ann/{promise}", dict(compression="gzip")
                file.create_dataset(place, (2**40,), "f4", chunks=(2**16,), **more)

    write(good)
    assert read() is not None
    for name in good:
        for wrong in H5:
            write(good | {name: wrong})
            count += refused(read, path.name, "user 'ann'")
        write({k: v for k, v in good.items() if k != name}, promise=name)
        assert path.stat().st_size < 10**5, "four terabytes announced"
        assert refused(read, path.name, "user 'ann'", name)
    assert count >= 4 * len(good)
    for place in ("examples", "other", "examples/ann"):
        with h5py.File(path, "w") as file:
            file[place] = np.ones(2)
        assert refused(read, path.name)


SIZES = (*range(8), 31, 32, 33, 64, 65, 128, 255)
SHAPES = [idx(np.zeros(s)) for s in ((), (0,), (3,), (2, 3), (2, 28, 28))]


def test_idx_files_are_refused_or_read(tmp_path, flipped):
    raws = [bytes([0, 0, 8, n]) + b"\xff" * 4 * n for n in SIZES]
    raws += [bytes([0, 0, 8, n]) + (b"\0\0\0\1") * n + b"x" for n in SIZES]
    raws += [bytes([0, 0, 8, 2]) + b"\xff" * 4 + bytes(4)]
    raws += [damaged for good in SHAPES for damaged in flipped(good, len(good))]
    cases = [(name, raw) for raw in raws for name in ("a", "a.gz")]
    cases = [(n, gzip.compress(raw, 1) if n == "a.gz" else raw) for n, raw in cases]
    cases += [("a.gz", raw) for raw in flipped(gzip.compress(SHAPES[-1], 1), "gz")]
    for name, raw in cases:
        (tmp_path / name).write_bytes(raw)
        refused(lambda: emnist.read_idx(tmp_path / name), name)


BOMB = gzip.compress(bytes(2**20)) * 1024  # a megabyte that unpacks to a gigabyte
PACKED = [
    (
        "EMNIST/raw/emnist-mnist-train-images-idx3-ubyte.gz",
        lambda root: emnist.emnist("mnist", root),
        784 * 60_000,
    ),
    (
        "shakespeare/shakespeare_roles.json.gz",
        shakespeare.shakespeare,
        shakespeare.MOST,
    ),
    ("QMNIST/raw/qmnist-train-labels-idx2-int.gz", images._writers, 60_000 * 32),
]


@tabled("file, read, most", PACKED)
def test_a_bomb_is_unpacked_no_further_than_what_it_may_hold(
    file, read, most, tmp_path
):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_bytes(BOMB)
    tracemalloc.start()
    try:
        says = f"{path.name} cannot be unpacked .it expands to more than"
        with pytest.raises(ValueError, match=says):
            read(root=tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 4 * most + 2**24
    finally:
        tracemalloc.stop()


# ---- content that is known


def test_an_altered_image_is_noticed(tmp_path, monkeypatch):
    raw, kept = tmp_path / "MNIST" / "raw", {}
    raw.mkdir(parents=True)
    for part, n in (("train", 6), ("t10k", 4)):
        pixels = seed_tree(0, part).integers(0, 256, (n, 28, 28))
        for kind, array in (("images-idx3", pixels), ("labels-idx1", np.arange(n))):
            (raw / f"{part}-{kind}-ubyte").write_bytes(idx(array))
            kept[f"{part}-{kind}-ubyte"] = hashlib.sha256(idx(array)).hexdigest()
    monkeypatch.setitem(torchvision_files.PUBLISHED, "mnist", kept)
    monkeypatch.setitem(images.COUNTS, "mnist", (6, 4))
    whole = images.load("mnist", tmp_path, download=False)
    assert len(whole.y) == 6
    fix = "delete it and load the data again"
    for path in sorted(raw.iterdir()):
        before = path.read_bytes()
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        for download in (False, True):
            says = f"^{path.name} is not the published file .*: {fix}$"
            with pytest.raises(ValueError, match=says):
                images.load("mnist", tmp_path, download)
        path.write_bytes(before)
    again = images.load("mnist", tmp_path, download=False)
    assert again.content_hash == whole.content_hash


def test_the_published_sums_are_those_of_the_packed_files_that_torchvision_knows():
    for name, files_of in torchvision_files.PUBLISHED.items():
        place = images.data_root() / torchvision_files.FILES[name][0]
        if not all((place / file).exists() for file in files_of):
            pytest.skip(f"NOT CHECKED: {name} is not under the data root")
        for file, digest in files_of.items():
            packed = place / f"{file}.gz"
            if packed.exists():
                files.check_digest(packed, digest, gzip.decompress(packed.read_bytes()))
            files.check_digest(place / file, digest)


def test_the_content_hash_sees_every_change_and_no_other():
    digits = images.load("digits")
    x, y = digits.x.clone(), digits.y_test.clone()
    x[5, 0, 14, 14] += 1 / 256
    y[0] = (y[0] + 1) % 10
    changes = [
        dict(),
        dict(x=x),
        dict(y_test=y),
        dict(x=digits.x_test, x_test=digits.x),
    ]
    changes += [dict(x=digits.x.double()), dict(x=digits.x[:-1])]
    changes += [dict(x=digits.x.reshape(-1, 1, 14, 56))]
    seen = [dataclasses.replace(digits, **change).content_hash for change in changes]
    assert len({*seen}) == len(seen)
    renamed = dataclasses.replace(digits, name="other", x=digits.x.clone())
    assert renamed.content_hash == digits.content_hash


def test_a_record_says_what_it_was_made_on(tmp_path):
    about = {"name": "mnist", "partition_hash": "c", "content_hash": "0123456789ab"}
    for name in about:
        wrong = dataclasses.replace(RECORD, data=about | {name: 7})
        with pytest.raises(ValueError, match="^record "):
            records.append(tmp_path, wrong)
    assert not list(tmp_path.rglob("*.jsonl"))
    records.append(tmp_path, dataclasses.replace(RECORD, data=about))
    old = dict(seed=1, experiment="b", data={"name": "mnist"})
    records.append(tmp_path, dataclasses.replace(RECORD, **old))
    found = records.load("dprec", root=tmp_path)
    assert [(r.experiment, r.data) for r in found] == [("a", about), ("b", old["data"])]


def test_a_score_that_is_null_is_left_out_of_a_table():
    found = [
        dataclasses.replace(RECORD, seed=i, final={"accuracy": a, "uplink_bits": b})
        for i, (a, b) in enumerate([(None, None), (70.0, 2**33), (72.0, None)])
    ]
    (row,) = verdicts.runs_table(found).rows
    assert row[1:3] == ("3", "71 +/- 1") and row[4:6] == ("1", "")
