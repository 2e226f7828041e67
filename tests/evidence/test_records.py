"A record is one fact: read back as written, refused when wrong, never lost nor counted twice."

import getpass
import hashlib
import itertools
import json
import platform
import random
import socket
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from made_up import made_up
from tables import tabled

from dpcomm.evidence import paper_tables, records
from dpcomm.evidence.records import Record

FILES = sorted(paper_tables.assets("results").rglob("*.jsonl"))
ORIGIN = dict(code="0" * 12, machine="here", date="2026-01-02T00:00:00+00:00")
CELL = "mnist.eps3.rec.acc"
PROMISE = dict(eps=3.0, delta=1e-5, unit="client", relation="replace")
PROMISE |= dict(sampling="none", accountant="pld", scope="total", trust="central")


def promise(**more) -> dict:
    return PROMISE | more


WRONG = [  # field, value
    ("paper", 3),
    ("paper", "dprek"),
    ("experiment", "../x"),
    ("scale", "ful"),
    ("seed", True),
    ("seed", -1),
    ("config", {"f": [[[[[1]]]]]}),
    ("final", {"x": "text"}),
    ("final", {"best": [True]}),
    ("final", {"accuracy": 161.0}),
    ("final", {"best": {"auroc": 1.5}}),
    ("final", {"uplink_bits": -1}),
    ("history", {"y": ["text"]}),
    ("history", {"a": list(range(61))}),
    ("history", {"a": [1, 2], "b": [1]}),
    ("history", {"eps": [1.0, None, -1.0]}),
    ("cells", {CELL: [70]}),
    ("cells", {"mnist.eps3.rek.acc": [70, "percent"]}),
    ("cells", {CELL: [1.0, "a percents"]}),
    ("cells", {"ours.x": [-101, "percentage points"]}),
    ("cells", {"ours.x": [1.5, "diabetes130 fraction"]}),
    ("cells", {"ours.x": [1.0, "bananas"]}),
    ("guarantee", {"eps": 1.0}),
    ("guarantee", promise(eps=0)),
    ("guarantee", promise(eps="3")),
    ("guarantee", promise(delta=1.5)),
    ("guarantee", promise(rounds=0)),
    ("guarantee", promise(q=2.0)),
    ("guarantee", promise(premises={"proof": 1})),
    ("guarantee", promise(fine=True)),
    *(("guarantee", promise(**{k: "bananas"})) for k in ("unit", "relation", "trust")),
    *(("guarantee", promise(**{k: "bananas"})) for k in ("sampling", "scope")),
    ("as_run", {"bananas": promise()}),
    ("as_run", {"replace": promise(trust="bananas")}),
    ("bits", {"total": -88}),
    ("cost", {"cpu_seconds": "1"}),
    ("data", {"name": 3}),
    ("data", {"content_hash": None}),
    *(("origin", ORIGIN | {"date": day}) for day in (None, "", "soon", 20260101)),
    ("notes", "text"),
]


def record(seed=0, key="eps3.rec", accuracy=70.25, **more) -> Record:
    "A made-up record; what is given as `origin` is laid over the usual one."
    given = dict(
        config={"rounds": 10, "groups": [1, 2], "clip": None},
        final={"accuracy": accuracy, "round": 10},
        history={"round": [5, 10], "accuracy": [60.0, accuracy]},
        cells={CELL: [accuracy, "percent"]},
        guarantee=promise(),
        bits={"total": 88},
        data={"name": "digits"},
        cost={"wall_seconds": 1.0, "cpu_seconds": 2.0, "peak_bytes": 3},
    )
    origin = ORIGIN | more.pop("origin", {})
    return made_up(key, seed, **given | more, origin=origin)


def raw(**more) -> dict:
    "The same as JSON would hold it."
    return asdict(record()) | more


def line(**more) -> str:
    return json.dumps(raw(**more))


def without(name) -> str:
    return json.dumps({k: v for k, v in raw().items() if k != name})


def written(folder, *lines, name="made_up.full.jsonl", end="\n") -> Path:
    "A file of lines."
    path = folder / "dprec" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + end, encoding="utf-8")
    return path


def of_seeds(found) -> list:
    return sorted(r.seed for r in found)


# ---- committed files


@tabled("path", FILES, ids=lambda path: path.name)
def test_every_committed_line_reads_and_is_written_with_the_same_bytes(path):
    content = path.read_bytes()
    lines = content.decode("utf-8").split("\n")
    assert lines.pop() == "", "the last line has its end"
    found = records.read(path)
    assert len(found) == len(lines) > 0
    assert [records.to_line(r) for r in found] == lines
    assert {r.paper for r in found} == {path.parent.name}


def test_committed_files_hold_a_run_once_and_name_no_user_and_no_folder():
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert "/home/" not in text and "/root" not in text and "/tmp" not in text
        for a, b in itertools.combinations(records.read(path), 2):
            assert a.identity != b.identity or not records.same_kind(a, b), a.identity


# ---- refusals


@tabled(
    "text",
    [
        *(without(f.name) for f in fields(Record) if f.name != "notes"),
        line(surplus=1),
        "[]",
        '{"paper":',
        "[" * 9_000,
    ],
)
def test_a_wrong_line_is_refused_with_file_and_line(tmp_path, text):
    path = written(tmp_path, line(), text, line(seed=2))
    with pytest.raises(ValueError, match=r"^made_up.full.jsonl, line 2: .*; correct"):
        records.read(path)


@tabled("at, value", WRONG)
def test_what_would_not_be_read_is_not_written_whatever_its_hash(at, value):
    with pytest.raises(ValueError, match="^record "):
        records.to_line(record(**{at: value}))
    bare = line(**{at: value})[:-1]
    digest = hashlib.sha256(f"{bare}}}".encode()).hexdigest()
    with pytest.raises(ValueError, match="^here: .*; correct the line"):
        records.from_line(f'{bare},"sha256":"{digest}"}}', "here", hashed=True)


@tabled("number", ["1e999", "-1e999", "NaN", "1" + "0" * 400])
def test_a_number_that_is_none_is_refused_wherever_it_stands(tmp_path, number):
    for name in ("final", "config", "data", "cost", "origin", "bits"):
        text = line(**{name: raw()[name] | {"x": 0.125}}).replace("0.125", number)
        with pytest.raises(ValueError, match="line 1: "):
            records.read(written(tmp_path, text))


def test_a_line_of_another_experiment_scale_or_paper_is_refused(tmp_path, monkeypatch):
    for more, name in (
        (dict(experiment="other"), "other.full"),
        (dict(scale="quick", cells={}), "made_up.quick"),
    ):
        path = written(tmp_path, line(), "", line(**more))
        says = f"^made_up.full.jsonl, line 3: move it to .*/dprec/{name}.jsonl"
        with pytest.raises(ValueError, match=says):
            records.read(path)
    path = written(tmp_path, line())
    monkeypatch.chdir(path.parent)
    for name in (path.name, f"../{path.parent.name}/{path.name}"):
        assert records.read(name) == records.read(path), "by any of its names"
    written(tmp_path, line(), line(paper="imvu", cells={}))
    with pytest.raises(ValueError, match="line 2: move it to .*/imvu/made_up.full"):
        records.load("dprec", root=tmp_path)


def test_a_line_that_is_too_large_is_refused_when_written_and_when_read(tmp_path):
    spare = records.LARGEST - len(records.to_line(record(config={"x": ""})))
    assert len(records.to_line(record(config={"x": "a" * spare}))) == records.LARGEST
    large = record(config={"x": "a" * (spare + 100)})
    with pytest.raises(ValueError, match="record dprec/made_up/full/eps3.rec/0: .*10,"):
        records.to_line(large)
    with pytest.raises(ValueError, match="made_up.full.jsonl, line 1: .*10,000"):
        records.read(written(tmp_path, json.dumps(asdict(large))))


def test_a_last_line_without_its_end_is_read_or_refused_and_never_lost(tmp_path):
    whole = [line(seed=seed) for seed in range(3)]
    path = written(tmp_path, *whole, end="")
    assert of_seeds(records.read(path)) == [0, 1, 2]
    records.append(tmp_path, record(3))
    assert of_seeds(records.read(path)) == [0, 1, 2, 3]
    for cut in (1, 20, len(whole[2]) - 1):
        path = written(tmp_path, *whole[:2], whole[2][:cut], end="")
        before = path.read_bytes()
        with pytest.raises(ValueError, match="made_up.full.jsonl, line 3: "):
            records.append(tmp_path, record(9))
        assert path.read_bytes() == before
    assert records.read(written(tmp_path, "", end="")) == ()


# ---- a line knows its own hash


def test_every_flipped_digit_is_refused():
    text = records.to_line(record(accuracy=61.25))
    assert records.from_line(text, "here") == record(accuracy=61.25)
    for at in (i for i, letter in enumerate(text) if letter.isdigit()):
        flipped = text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]
        with pytest.raises(ValueError, match="^here: "):
            records.from_line(flipped, "here")


def test_a_line_without_a_hash_is_read_from_runs_and_not_from_the_package(
    tmp_path, monkeypatch
):
    "Runs of an older version are merged, and get their hash there."
    mine, ours, known = tmp_path / "runs", tmp_path / "committed", paper_tables.assets
    places = lambda kind: ours if kind == "results" else known(kind)  # noqa: E731
    monkeypatch.setattr(paper_tables, "assets", places)
    found = records.read(written(mine, line(seed=0), line(seed=1)))
    path = records.append(ours, *found)
    assert records.read(path) == found and path.read_text().count('"sha256":') == 2
    written(ours, records.to_line(record(0)), line(seed=1))
    with pytest.raises(ValueError, match="line 2: it has no hash"):
        records.load("dprec")


def test_a_random_record_survives_the_round_trip():
    rng = random.Random(3)
    odd = [True, False, None, "", "ä\n\u2028\t\"'", "\x00", 5e-324]

    def value(depth):
        kinds = [
            lambda: rng.uniform(-1e300, 1e300),
            lambda: rng.randrange(-(10**18), 10**18),
            lambda: rng.choice(odd),
            lambda: [value(depth - 1) for _ in range(rng.randrange(3))],
            lambda: {str(rng.random()): value(depth - 1) for _ in range(3)},
        ]
        return rng.choice(kinds[: 5 if depth else 3])()

    for seed in range(200):
        r = record(seed, config={"x": value(3)}, notes=[str(value(0))])
        text = records.to_line(r)
        assert "\n" not in text and text.isascii()
        assert records.from_line(text, "here") == r
        assert records.to_line(records.from_line(text, "here")) == text


# ---- adding


def test_the_same_record_twice_is_one_line(tmp_path):
    path = records.append(tmp_path, record())
    assert path == tmp_path / "dprec" / "made_up.full.jsonl"
    before = path.read_bytes()
    origin = {"date": "2027-01-01T00:00:00+00:00", "commit": "b" * 40}
    later = record(origin=origin, cost={"wall_seconds": 9.0})
    assert records.append(tmp_path, record()) == records.append(tmp_path, later) == path
    assert path.read_bytes() == before and before.count(b"\n") == 1
    assert [p.name for p in path.parent.iterdir()] == [path.name], "no lock is left"


@tabled(
    "more, what",
    [
        (dict(final={"accuracy": 70.5}), "final.accuracy is 70.25 and 70.5"),
        (dict(history={"round": [5]}), "history.round is [5, 10] and [5]"),
        (dict(cells={}), f"cells.{CELL} is [70.25, 'percent'] and None"),
        (dict(bits=None), "bits.total is 88 and None"),
    ],
)
def test_a_contradiction_is_refused_and_the_file_unchanged(more, what, tmp_path):
    path = records.append(tmp_path, record())
    before = path.read_bytes()
    with pytest.raises(ValueError) as error:
        records.append(tmp_path, record(**more))
    stands = "made_up.full.jsonl: eps3.rec, seed 0 is already recorded"
    assert stands in str(error.value) and what in str(error.value)
    assert path.read_bytes() == before and len([*path.parent.iterdir()]) == 1


def test_a_record_of_another_machine_or_code_is_kept():
    first, other = record(), record(accuracy=71.0)
    for name in ("machine", "device", "code", "threads", "engine", "dtype", "versions"):
        value = {"threads": 4, "versions": {"python": "3.12.0"}}.get(name, "another")
        elsewhere = [record(accuracy=x, origin={name: value}) for x in (71.0, 72.0)]
        assert records.union("a", [first, elsewhere[0]]) == [first, elsewhere[0]]
        for pair in (elsewhere, [first, other]):
            with pytest.raises(ValueError, match="is already recorded"):
                records.union("a", pair)


ADDS = """
import sys, time
from dataclasses import replace
from pathlib import Path
from dpcomm.evidence import records
folder, first = Path(sys.argv[1]), int(sys.argv[2])
one = records.from_line(sys.stdin.read(), "stdin")
(folder / f"ready{first}").touch()
while len(list(folder.glob("ready*"))) < 4:
    time.sleep(0.01)
for i in range(15):
    records.append(folder, replace(one, seed=first + i))
    records.append(folder, replace(one, seed=999))
"""


@pytest.mark.slow
def test_four_processes_that_add_to_one_file_lose_nothing(tmp_path):
    text, running = records.to_line(record()).encode(), []
    for i in range(4):
        words = [sys.executable, "-c", ADDS, str(tmp_path), str(100 * i)]
        running.append(subprocess.Popen(words, stdin=subprocess.PIPE))
        running[-1].stdin.write(text)
        running[-1].stdin.close()
    assert [process.wait(300) for process in running] == [0] * 4
    wanted = [100 * i + j for i in range(4) for j in range(15)] + [999]
    assert of_seeds(records.load("dprec", root=tmp_path)) == sorted(wanted)


KILLED = """
import os, sys
from dpcomm.evidence import records
real, left = os.replace, [int(sys.argv[2])]
def stop(a, b):
    left[0] -= 1
    os.kill(os.getpid(), 9) if left[0] == 0 else real(a, b)
os.replace = stop
one = records.from_line(sys.stdin.read(), "stdin")
for seed in range(10):
    records.append(sys.argv[1], records.Record(**vars(one) | {"seed": seed}))
"""


def test_a_killed_process_leaves_whole_lines_and_no_lock(tmp_path):
    words = [sys.executable, "-c", KILLED, str(tmp_path), "4"]
    text = records.to_line(record())
    done = subprocess.run(words, input=text, text=True, timeout=1200)
    assert done.returncode == -9
    assert of_seeds(records.load("dprec", root=tmp_path)) == [0, 1, 2]
    records.append(tmp_path, record(7))
    assert of_seeds(records.load("dprec", root=tmp_path)) == [0, 1, 2, 7]


# ---- union


def lines_of(found) -> list:
    return sorted(map(records.to_line, found))


def test_a_union_holds_every_record_once_or_refuses_whatever_the_order():
    there = dict(machine="aarch64, there", date="2026-01-05T00:00:00+00:00")
    sets = [
        [record(0), record(1), record(0, key="eps6.rec")],
        [record(1), record(2), record(0, accuracy=71.0, origin=there)],
        [record(0, accuracy=71.0, origin=there), record(3), record(0)],
    ]
    wanted = sorted({records.to_line(r) for each in sets for r in each})
    for order in itertools.permutations(sets):
        found = records.union("files", itertools.chain(*order, *order))
        assert lines_of(found) == wanted and len(wanted) == 6
    sets.append([record(3, final={"accuracy": 1.0})])
    for order in itertools.permutations(sets):
        with pytest.raises(ValueError, match="eps3.rec, seed 3 .*final.accuracy is"):
            records.union("files", itertools.chain(*order))


# ---- one a seed


def test_repeats_name_the_record_that_counts_and_what_differs():
    first = record(origin={"date": "2026-03-01T00:00:00+00:00"})
    equal = record(origin={"machine": "there"})
    other = record(accuracy=71.0, origin={"code": "1" * 12})
    found = [first, other, equal, record(1)]
    told = [(a is first, b, why) for a, b, why in records.repeats(found)]
    differs = "final.accuracy is 70.25 and 71.0"
    assert told == [(True, other, differs), (True, equal, "")]
    assert records.repeats([first, record(1)]) == []


# ---- thinning


@tabled("n", [1, 2, 59, 60, 61, 119, 1000])
@tabled("points", [2, 60])
def test_a_thinned_history_is_short_evenly_spaced_and_keeps_its_ends(n, points):
    short = records.thin([{"round": i, "x": i / 3} for i in range(n)], points)
    at = short["round"]
    assert len(at) == len(short["x"]) == min(n, points) == len(set(at))
    assert at[-1] == n - 1 and at == sorted(at)
    if n > 1:
        steps = [b - a for a, b in itertools.pairwise(at)]
        assert at[0] == 0 and max(steps) - min(steps) <= 1
    assert short["x"] == [float(f"{i / 3:.6g}") for i in at]


def test_what_is_published_keeps_the_columns_that_a_page_draws():
    columns = dict(round=[5, 10], balanced_accuracy=[50.0, 60.0], loss=[1.0, 0.5])
    many = record(experiment="fltop_medical", history=columns)
    short = {name: columns[name] for name in ("round", "balanced_accuracy")}
    assert records.published(many) == replace(many, history=short)
    assert records.published(record()) == record()


# ---- where a record comes from


def test_stamp_and_machine_name_no_host_no_user_and_no_path():
    text = json.dumps(records.stamp())
    assert json.dumps(records.machine())[1:-1] in text
    hidden = {platform.node(), socket.gethostname()} - {""}
    assert not any(word in text for word in hidden)
    words = set(text.replace('"', " ").replace(",", " ").split())
    assert getpass.getuser() not in words
    assert "/" not in text
