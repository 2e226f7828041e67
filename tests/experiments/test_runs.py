"What is done once for every experiment: playing, resuming, claiming, recording, counting."

import json
import re
import subprocess
import sys
import time
import types
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np
import pytest
from made_up import made_up
from tables import tabled

from dpcomm.evidence import paper_tables, records
from dpcomm.experiments.run import costs, grids, runner, runs
from dpcomm.experiments.run.grids import Run

ACC, FED, ORDER = "mnist.eps3.rec.acc", "mnist.eps3.fedavg.acc", "mnist.eps3.order"
DONE = list(runner.experiments())
NEED = re.compile(r"(?:(?P<name>[^/@]+)/)?(?P<key>[^/@]+)(?:@(?P<seed>\d+))?")
GRIDS = [(name, scale) for name in DONE for scale in records.SCALES]


class Made:
    "A tiny experiment: what was played is kept, and a key may be told to misbehave."

    def __init__(self, *more: Run, scale="full"):
        self.played, self.does = [], {}
        self.runs = {s: (*self.own(s), *more) for s in records.SCALES}
        module = types.SimpleNamespace(
            __name__="dpcomm.experiments.run.runs",
            settings=lambda scale: {},
            grid=lambda scale: self.runs[scale],
            run_one=self.run_one,
        )
        self.experiment = grids.Experiment("made-up", module, "dprec")

    @staticmethod
    def own(scale):
        return (
            Run("fedavg", "DP-FedAvg", scale, (FED,), seeds=(0, 1)),
            Run("rec", "DP-REC", scale, (ACC,), seeds=(0, 1), minutes=3.0),
            Run("gap", "the difference", scale, (ORDER,), ("fedavg", "rec"), (0, 1)),
            Run("sizes", "a count", scale, ("ours.sizes",), trains=False),
        )

    def run(self, key, scale="full") -> Run:
        return next(run for run in self.runs[scale] if run.key == key)

    def run_one(self, run, seed, **how):
        self.played.append((run.key, seed))
        self.how = how
        if run.key in self.does:
            return self.does[run.key](run, seed, **how)
        if run.needs:
            return runs.difference(how["inputs"], "fedavg", "rec", ORDER)
        if run.key == "sizes":
            return dict(cells={"ours.sizes": [24, "clients"]})
        score = {"fedavg": 80.0, "rec": 70.0}[run.key] + seed
        return dict(
            config=dict(rounds=np.int64(3), groups=(1, 2)),
            final=dict(accuracy=np.float64(score)),
            history=[dict(round=i, accuracy=score - 9 + i) for i in range(10)],
            cells={run.fills[0]: (score, "percent")},
            wall_seconds=5.0,
            cpu_seconds=4.0,
        )

    def execute(self, key, seed=0, out=None, scale="full", **how):
        return runs.execute(self.experiment, self.run(key, scale), seed, out, **how)


@pytest.fixture
def made(monkeypatch):
    found = Made()
    for module in (grids, runs):
        monkeypatch.setattr(module, "find", lambda name: found.experiment)
    return found


def lines(folder) -> list:
    paths = sorted(folder.rglob("*.jsonl"))
    return [text for path in paths for text in path.read_text().splitlines()]


# ---- playing and recording


def test_a_run_is_played_and_recorded(made, tmp_path):
    record = made.execute("rec", 1, tmp_path)
    path = tmp_path / "dprec" / "made_up.full.jsonl"
    assert records.read(path) == (record,)
    assert record.identity == ("dprec", "made_up", "full", "rec", 1)
    assert record.trained and record.final == {"accuracy": 71.0}
    assert record.cells == {ACC: [71.0, "percent"]}
    assert record.config == {"rounds": 3, "groups": [1, 2]}
    assert type(record.config["rounds"]) is int
    assert record.history["round"] == list(range(10))
    assert (record.cost["wall_seconds"], record.cost["cpu_seconds"]) == (5.0, 4.0)
    assert record.cost["peak_bytes"] > 10**6
    assert record.origin["code"] == grids.code_hash("dpcomm.experiments.run.runs")
    assert record.origin["device"] == "cpu" and record.origin["date"].endswith("+00:00")
    assert not made.execute("sizes", 0, tmp_path).trained


def test_a_run_without_its_own_cost_is_timed(made, tmp_path):
    def slow(run, seed, **how):
        clocks = time.process_time, time.perf_counter
        ends = [clock() + 0.2 for clock in clocks]
        while any(clock() < end for clock, end in zip(clocks, ends)):
            pass
        return {}

    made.does["rec"] = slow
    cost = made.execute("rec", 0, tmp_path).cost
    assert 0.2 <= cost["cpu_seconds"] < 5 and 0.2 <= cost["wall_seconds"] < 60


def test_a_run_that_stands_is_returned_without_being_played(made, tmp_path):
    first = made.execute("rec", 0, tmp_path)
    before = lines(tmp_path)
    assert made.execute("rec", 0, tmp_path) == first
    assert made.played == [("rec", 0)] and lines(tmp_path) == before
    again = made.execute("rec", 0, tmp_path, resume=False)
    assert made.played == [("rec", 0)] * 2 and lines(tmp_path) == before
    assert records.result_of(again) == records.result_of(first)
    made.execute("rec", 1, tmp_path)
    assert made.played[-1] == ("rec", 1) and len(lines(tmp_path)) == 2


def test_a_run_that_gives_other_numbers_the_second_time_is_refused(made, tmp_path):
    made.execute("rec", 0, tmp_path)
    before = lines(tmp_path)
    made.does["rec"] = lambda run, seed, **how: dict(final=dict(accuracy=1.0))
    with pytest.raises(ValueError, match="find out which run is wrong"):
        made.execute("rec", 0, tmp_path, resume=False)
    assert lines(tmp_path) == before


def test_a_run_gets_its_checkpoint_and_loses_it_when_it_is_recorded(made, tmp_path):
    path = tmp_path / "checkpoints" / "made_up.full" / "rec.seed0.pt"

    def half(run, seed, checkpoint, resume, max_seconds, **how):
        assert checkpoint == path and resume and max_seconds == 7
        checkpoint.write_text("rounds")

    made.does["rec"] = half
    assert made.execute("rec", 0, tmp_path, max_seconds=7) is None
    assert path.read_text() == "rounds" and lines(tmp_path) == []
    del made.does["rec"]
    assert made.execute("rec", 0, tmp_path) and not path.exists()


def test_an_error_of_a_run_is_not_swallowed_and_records_nothing(made, tmp_path):
    def broken(run, seed, **how):
        raise KeyError("a fault")

    made.does["rec"] = broken
    with pytest.raises(KeyError, match="a fault"):
        made.execute("rec", 0, tmp_path)
    assert lines(tmp_path) == []
    del made.does["rec"]
    assert made.execute("rec", 0, tmp_path), "the claim was let go"


HOLD = """
import sys
from fcntl import LOCK_EX, flock
with open(sys.argv[1], "w") as lock:
    flock(lock, LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_run_that_another_process_plays_is_claimed(made, tmp_path):
    place = tmp_path / "checkpoints" / "made_up.full"
    place.mkdir(parents=True)
    words = [sys.executable, "-c", HOLD, str(place / "rec.seed0.lock")]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen(words, **pipes) as other:
        assert other.stdout.readline() == "held\n"
        says = "rec.seed0 is being run by another process"
        with pytest.raises(runs.Claimed, match=says):
            made.execute("rec", 0, tmp_path)
        assert made.played == []
        assert made.execute("rec", 1, tmp_path), "another seed is free"
        other.kill()
        other.wait()
        assert made.execute("rec", 0, tmp_path), "a killed process holds nothing"


def test_a_divergence_is_recorded_once_with_a_note(made, tmp_path):
    def diverges(run, seed, **how):
        raise FloatingPointError("loss is nan in round 3")

    made.does["rec"] = diverges
    record = made.execute("rec", 0, tmp_path)
    assert record.notes == ["diverged: loss is nan in round 3"]
    assert record.final == record.cells == record.history == {}
    assert made.execute("rec", 0, tmp_path) == record
    assert made.played == [("rec", 0)] and len(lines(tmp_path)) == 1


def test_what_is_computed_waits_for_its_inputs_of_the_same_seed(made, tmp_path):
    assert made.execute("gap", 0, tmp_path) is None
    made.execute("fedavg", 0, tmp_path)
    made.execute("rec", 1, tmp_path)
    assert made.execute("gap", 0, tmp_path) is None
    assert ("gap", 0) not in made.played
    made.execute("rec", 0, tmp_path)
    record = made.execute("gap", 0, tmp_path)
    assert record.cells == {ORDER: [10.0, "percentage points"]}
    assert set(made.how) == {"inputs"} and set(made.how["inputs"]) == {"fedavg", "rec"}
    assert {r.seed for r in made.how["inputs"].values()} == {0}


def test_a_run_may_need_another_seed_and_another_experiment(monkeypatch, tmp_path):
    needs = ("rec", "rec@0", "other-one/fedavg@1")
    made = Made(Run("far", "from afar", "full", ("ours.far",), needs, (1,)))
    other = Made()
    other.experiment = replace(other.experiment, name="other-one")
    known = {"made-up": made.experiment, "other-one": other.experiment}
    for module in (grids, runs):
        monkeypatch.setattr(module, "find", lambda name: known[name])

    def far(run, seed, inputs):
        values = [inputs[need].final["accuracy"] for need in needs]
        return dict(cells={"ours.far": [sum(values), "x"]})

    made.does["far"] = far
    for seed in (0, 1):
        made.execute("rec", seed, tmp_path)
        made.execute("fedavg", seed, tmp_path)
    assert made.execute("far", 1, tmp_path) is None, "the other's is not there"
    other.execute("fedavg", 0, tmp_path)
    assert made.execute("far", 1, tmp_path) is None, "another seed of it"
    other.execute("fedavg", 1, tmp_path)
    record = made.execute("far", 1, tmp_path)
    assert record.cells == {"ours.far": [71.0 + 70.0 + 81.0, "x"]}


def test_what_is_computed_from_a_diverged_run_says_so(made, tmp_path):
    def diverges(run, seed, **how):
        raise FloatingPointError("loss is nan")

    made.does["rec"] = diverges
    made.execute("fedavg", 0, tmp_path)
    made.execute("rec", 0, tmp_path)
    record = made.execute("gap", 0, tmp_path)
    assert record.cells == {} and "diverged" in record.notes[0]


def test_a_cell_that_was_not_planned_is_refused(made, tmp_path):
    made.does["rec"] = lambda run, seed, **how: dict(cells={FED: [1.0, "percent"]})
    says = f"rec produces {FED}, which its grid does not list"
    with pytest.raises(ValueError, match=says):
        made.execute("rec", 0, tmp_path)
    assert lines(tmp_path) == []


def test_cells_below_full_scale_are_ours(made, tmp_path):
    for scale, cell in (
        ("smoke", f"ours.smoke.{ACC}"),
        ("quick", f"ours.quick.{ACC}"),
        ("full", ACC),
    ):
        assert [*made.execute("rec", 0, tmp_path, scale).cells] == [cell]
        assert [*made.execute("sizes", 0, tmp_path, scale).cells] == ["ours.sizes"]


def test_an_origin_says_code_machine_and_time(made):
    found = runs.origin_of(made.experiment, dict(engine="fused", dtype="float64"), "x")
    told = found["engine"], found["dtype"], found["device"]
    assert told == ("fused", "float64", "x")
    assert found["code"] == grids.code_hash("dpcomm.experiments.run.runs")
    assert found["threads"] >= 1 and found["machine"] == records.machine()
    age = datetime.now(UTC) - datetime.fromisoformat(found["date"])
    assert abs(age.total_seconds()) < 100
    bare = runs.origin_of(made.experiment, {}, "cpu")
    assert (bare["engine"], bare["dtype"]) == (None, "float32")
    low = runs.origin_of(made.experiment, dict(precision="bfloat16"), "cpu")["dtype"]
    assert low.startswith("float32, products in bfloat16, error ") and low[-3:] == "-03"


def training(finished=True):
    "A federated run as `from_training` takes it."
    made = types.SimpleNamespace
    mechanism = made(bits=lambda d: {"total": 8 * d})
    data = made(name="digits", content_hash="ab", y=[*range(7)], y_test=[*range(3)])
    federation = made(data=data, partition_hash="cd", parts=[0, 1])
    task = made(config=Config(4), mechanism=mechanism, federation=federation)
    ledger = made(uplink_bits=2**33, downlink_bits=2**34)
    scores = [dict(round=4, accuracy=50.0, loss=0.5)]
    clocks = dict(seconds=1.5, cpu_seconds=1.25)
    run = made(finished=finished, history=scores, w=[0.0] * 5, ledger=ledger, **clocks)
    return task, run


@dataclass(frozen=True)
class Config:
    rounds: int


def test_a_training_fills_cells_with_its_last_scores_and_its_traffic():
    cells = {"a": "accuracy", "b": "traffic", "c": "loss"}
    promise = lambda rounds: {"eps": rounds}  # noqa: E731
    found = runs.from_training(*training(), cells, promise, net="cnn")
    filled = {"a": [50.0, "percent"], "b": [3.0, "GiB"], "c": [0.5, "nats"]}
    assert found["cells"] == filled
    assert found["guarantee"] == {"eps": 4} and found["bits"] == {"total": 40}
    assert (found["config"]["d"], found["config"]["net"]) == (5, "cnn")
    assert found["data"]["n_clients"] == 2 and found["data"]["n_test"] == 3
    assert (found["wall_seconds"], found["cpu_seconds"]) == (1.5, 1.25)
    assert found["final"] == found["history"][-1] and found["as_run"] == {}
    assert runs.from_training(*training(), cells)["guarantee"] is None
    assert runs.from_training(*training(finished=False), cells) is None


# ---- choosing


def test_runs_that_need_others_come_after_them_and_seeds_as_planned(made):
    jobs = [(run.key, seed) for run, seed in runs.select(made.experiment, "full")]
    planned = [(k, s) for k in ("fedavg", "rec", "gap") for s in (0, 1)]
    assert sorted(jobs) == sorted([*planned, ("sizes", 0)])
    for seed in (0, 1):
        needs = [jobs.index((key, seed)) for key in ("fedavg", "rec")]
        assert jobs.index(("gap", seed)) > max(needs)
    asked = runs.select(made.experiment, "full", (7,), "fed")
    assert [(run.key, seed) for run, seed in asked] == [("fedavg", 7)]


def test_what_matches_nothing_is_refused_with_the_nearest(made):
    says = "made-up, only='fedavj' .*did you mean 'fedavg'"
    with pytest.raises(ValueError, match=says):
        runs.select(made.experiment, "full", None, "fedavj")
    with pytest.raises(ValueError, match="did you mean 'rec'"):
        grids.find_run(made.experiment, "full", "rek")
    with pytest.raises(ValueError, match="did you mean 'quick'"):
        made.experiment.grid("quik")
    assert grids.find_run(made.experiment, "full", "rec") == made.run("rec")


def test_experiments_are_found_by_name_and_refused_with_the_nearest():
    for name in ("dprec-mnist", "dprec_mnist"):
        found = grids.find(name)
        names = found.name, found.stem, found.paper
        assert names == ("dprec-mnist", "dprec_mnist", "dprec")
    with pytest.raises(ValueError, match="did you mean 'dprec-mnist'"):
        grids.find("dprec-mnits")


def test_the_index_holds_what_the_experiments_say():
    kept = json.loads(paper_tables.assets("experiments.json").read_bytes())
    again = "`python -m dpcomm.experiments.run.runs` writes the index again"
    assert list(kept) == list(runner.experiments()), again
    old = [name for name in kept if kept[name] != grids.index_entry(name)]
    assert not old, f"not as their modules say: {', '.join(old)}; {again}"


def test_an_experiment_is_planned_from_the_index_while_it_is_true(monkeypatch):
    found, real = grids.planned("dprec_mnist"), grids.find("dprec-mnist")
    assert not hasattr(found.module, "run_one")
    assert (found.name, found.paper) == (real.name, real.paper)
    for scale in records.SCALES:
        assert found.grid(scale) == real.grid(scale)
    with pytest.raises(ValueError, match="did you mean 'dprec-mnist'"):
        grids.planned("dprec-mnits")
    grids._from_index.cache_clear()
    with monkeypatch.context() as changed:
        changed.setattr(grids, "_digest", lambda names: "of another file")
        assert grids.planned("dprec-mnist").module is real.module
    grids._from_index.cache_clear()
    assert grids._digest(["experiments/nothing.py"]) == ""


def test_the_index_is_written_where_it_is_read(monkeypatch, tmp_path):
    committed = paper_tables.assets("experiments.json").read_bytes()
    here = tmp_path / "experiments.json"
    monkeypatch.setattr(paper_tables, "assets", lambda kind: here)
    monkeypatch.setattr(runner, "experiments", lambda: ["imvu-mnist"])
    entry = json.loads(committed)["imvu-mnist"]
    monkeypatch.setattr(grids, "index_entry", lambda name: entry)
    assert grids.write_index() == here
    assert json.loads(here.read_bytes()) == {"imvu-mnist": entry}
    assert here.read_bytes().count(b"\n") > len(entry["grids"]["full"])


@tabled(
    "twice, message",
    [
        (Run("rec", "again", "full"), "key rec appears twice"),
        (Run("other", "again", "full", (ACC,)), f"cell {ACC} appears twice"),
        (Run("other", "", "full", ("ours.x", "ours.x")), "cell ours.x appears twice"),
    ],
)
def test_a_key_or_cell_that_stands_twice_in_a_grid_is_refused(twice, message):
    with pytest.raises(ValueError, match=f"made-up: {message} in its grid"):
        Made(twice).experiment.grid("full")


def test_a_grid_is_played_whole(made, tmp_path):
    found = runs.run_grid("made-up", "full", out=tmp_path)
    assert [(r.key, r.seed) for r in found] == made.played
    assert len(found) == 7 == len(lines(tmp_path))
    assert {r.cells[ORDER][0] for r in found if r.key == "gap"} == {10.0}
    again = runs.run_grid("made-up", "full", out=tmp_path, resume=True)
    assert again == found and len(made.played) == 7


def test_a_grid_with_rounds_left_stops_and_names_them(made, tmp_path):
    made.does["rec"] = lambda run, seed, **how: None
    with pytest.raises(runner.Unfinished) as error:
        runs.run_grid("made-up", "full", out=tmp_path, max_seconds=100)
    text = str(error.value)
    assert text.startswith("4 of 7 runs are unfinished: ")
    for left in ("rec seed 0", "rec seed 1", "gap seed 0", "gap seed 1"):
        assert left in text
    assert "fedavg" not in text and len(lines(tmp_path)) == 3
    del made.does["rec"]
    assert len(runs.run_grid("made-up", "full", out=tmp_path, resume=True)) == 7


def test_a_grid_shares_its_time_and_says_where_it_is(made, tmp_path):
    seen = []

    def told(run, seed, max_seconds, progress, **how):
        seen.append((max_seconds, progress))
        time.sleep(0.05)
        return {}

    made.does |= dict(fedavg=told, rec=told)
    runs.run_grid("made-up", "full", (0,), tmp_path, "fed", max_seconds=100)
    runs.run_grid("made-up", "full", (0, 1), tmp_path, "rec", max_seconds=0.06)
    (first, label), (second, _), (third, last) = seen
    assert 99 < first <= 100
    assert label == "fedavg, seed 0 (1 of 1, 0 min left in all)"
    assert 0 <= third < second - 0.04
    assert last == "rec, seed 1 (2 of 2, 3 min left in all)"


# ---- the hash of code


def package(folder, **files) -> object:
    "A copy of a package under the name dpcomm: dotted name with '__' -> source."
    top = folder / "dpcomm"
    for name, source in files.items():
        path = top / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return types.SimpleNamespace(__file__=str(top / "__init__.py"))


FILES = dict(
    experiments__a="'Doc.'\nfrom ..core.b import f\nfrom ..evidence import papers\nX = 1\n",
    core__b="def f():\n    'Doc.'\n    # comment\n    from . import c\n    return 2.5\n",
    core__c="class C:\n    'Doc.'\n    y = 3\n",
    core__d="UNUSED = 1\n",
    evidence__papers="Y = 1\n",
)


@pytest.fixture
def hashed(tmp_path, monkeypatch):
    def call(name="dpcomm.experiments.a", **changed):
        where = package(tmp_path, **FILES | changed)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "dpcomm", where)
            return grids.code_hash.__wrapped__(name)

    return call


@tabled(
    "name, old, new, same",
    [
        ("experiments__a", "'Doc.'", "'Another doc, longer.'", True),
        ("experiments__a", "X = 1", "# more\n\n\nX   =  1  # words", True),
        ("core__b", "'Doc.'", '"""Other."""', True),
        ("core__b", "    # comment\n", "", True),
        ("core__c", "    'Doc.'\n", "", True),
        ("core__d", "UNUSED = 1", "UNUSED = 2", True),
        ("evidence__papers", "Y = 1", "Y = 2", True),
        ("experiments__a", "X = 1", "X = 2", False),
        ("experiments__a", "X = 1", "X = 1.0", False),
        ("core__b", "return 2.5", "return 2.5000001", False),
        ("core__b", "return 2.5", "return '2.5'", False),
        ("core__c", "y = 3", "y = 4", False),
        ("core__c", "y = 3", "z = 3", False),
    ],
)
def test_only_what_is_depended_on_changes_the_hash(name, old, new, same, hashed):
    "Not words, layout, unused modules and reports; numbers, names and types do."
    assert old in FILES[name]
    assert (hashed(**{name: FILES[name].replace(old, new)}) == hashed()) == same


@tabled(
    "how",
    [
        "import dpcomm.core.c\n",
        "from dpcomm.core import c\n",
        "from dpcomm.core.c import C\n",
        "def f():\n    from ..core import c\n",
    ],
)
def test_every_way_to_import_a_module_is_followed(hashed, how):
    more = dict(experiments__a=how, core__b="")
    changed = more | dict(core__c="class C:\n    y = 4\n")
    assert hashed(**more) != hashed(**changed)


# ---- what a run costs


def recorded(key, seed, cpu, wall=60.0):
    cost = dict(wall_seconds=wall, cpu_seconds=cpu, peak_bytes=1)
    return made_up(key, seed, cost=cost)


def test_a_run_costs_what_it_cost_or_its_neighbours_or_what_was_guessed():
    run = Run("a", "", "full", minutes=5.0)
    near, far = Run("b", "", "full", minutes=5.0), Run("c", "", "full", minutes=6.0)
    needs = Run("d", "", "full", minutes=5.0, needs=("a",))
    grid = (run, near, far, needs)

    def told(*found):
        return costs.expected_minutes(run, {(r.key, r.seed): r for r in found}, grid)

    for found, wanted in (
        ([], (5.0, "guessed")),
        ([recorded("c", 0, 600), recorded("d", 0, 600)], (5.0, "guessed")),
        ([recorded("b", 0, 600), recorded("c", 0, 60)], (10.0, "like its neighbours")),
        (
            [recorded("a", 0, 60), recorded("a", 1, 180), recorded("b", 0, 600)],
            (2.0, "measured"),
        ),
        ([recorded("a", 0, None, wall=90.0)], (1.5, "measured")),
    ):
        assert told(*found) == wanted


def test_memory_is_the_largest_that_was_measured_or_what_was_guessed():
    run = Run("a", "", "full", memory=2.5)
    peaks = {("a", 0): 2**30, ("a", 1): 3 * 2**29, ("b", 0): 2**40, ("a", 2): None}

    def told(*at):
        have = {(key, seed): recorded(key, seed, 1.0) for key, seed in at}
        for place, r in have.items():
            r.cost["peak_bytes"] = peaks[place]
        return costs.expected_memory(run, have)

    assert told() == told(("b", 0), ("a", 2)) == "about 2.5"
    assert told(("a", 0), ("a", 1), ("b", 0), ("a", 2)) == "1.5"


# ---- committed records


def standing(name, scale) -> dict:
    "(key, seed) -> raw record, the oldest, read without the package."
    stem, found = name.replace("-", "_"), {}
    folder = paper_tables.assets("results")
    rows = [
        json.loads(text)
        for path in folder.glob(f"*/{stem}.{scale}.jsonl")
        for text in path.read_text(encoding="utf-8").splitlines()
    ]
    for row in sorted(rows, key=lambda row: row["origin"].get("date") or ""):
        found.setdefault((row["key"], row["seed"]), row)
    return found


def spent(row) -> float:
    return row["cost"].get("cpu_seconds") or row["cost"]["wall_seconds"]


def costs_told_twice(row) -> set:
    "Cells that say a run's own cost once more: of one of its two rounds."
    own, found = row["cost"], set()
    for key, (value, unit) in row["cells"].items():
        wanted = {
            "seconds": (own["wall_seconds"] / 2, "s a round"),
            "core_seconds": (own["cpu_seconds"] / 2, "s a round"),
            "peak": (own["peak_bytes"] / 2**30, "GiB"),
        }[key.rsplit(".", 1)[1]]
        assert key.startswith("ours.cost.") and unit == wanted[1]
        assert value == pytest.approx(wanted[0], rel=1e-12), key
        found.add(key)
    return found


@tabled("name, scale", GRIDS)
def test_committed_records_fit_the_grid(name, scale):
    grid = {run.key: run for run in grids.find(name).grid(scale)}
    for (key, _), row in standing(name, scale).items():
        assert key in grid, "records of a run that no grid has"
        bare = {k.removeprefix(f"ours.{scale}.") for k in row["cells"]}
        if key.startswith("cost."):
            bare -= costs_told_twice(row)
        fills = {k.removeprefix(f"ours.{scale}.") for k in grid[key].fills}
        assert bare <= fills, key
        assert row["trained"] == grid[key].trains, key


@tabled("name, scale", GRIDS)
def test_grids_name_cells_of_their_paper_and_runs_that_are_planned(name, scale):
    experiment = grids.find(name)
    grid = experiment.grid(scale)
    known = {c.key for c in paper_tables.cells(experiment.paper)}
    for run in grid:
        assert run.scale == scale
        wrong = [c for c in run.fills if c not in known and not c.startswith("ours.")]
        assert wrong == [], run.key
        assert run.seeds and len(set(run.seeds)) == len(run.seeds)
        for need in run.needs:
            words = NEED.fullmatch(need)
            assert words, f"{run.key} needs {need}: [experiment/]key[@seed]"
            near = grid if not words["name"] else grids.find(words["name"]).grid(scale)
            assert words["name"] in (None, *DONE), "as `dpcomm list` has it"
            (other,) = [r for r in near if r.key == words["key"]]
            wanted = {int(words["seed"])} if words["seed"] else set(run.seeds)
            assert wanted <= set(other.seeds), f"{run.key} needs seeds of {need}"
            assert not other.needs, "what is computed is computed from what is played"


def left_minutes(name, scale) -> float:
    "Minutes that the seeds which are missing would take, by hand."
    have, total = standing(name, scale), 0.0
    grid = grids.find(name).grid(scale)
    for run in grid:
        own = [spent(r) for (key, _), r in have.items() if key == run.key]
        alike = [g for g in grid if (g.minutes, g.needs) == (run.minutes, run.needs)]
        like = {g.key for g in alike}
        near = [spent(r) for (key, _), r in have.items() if key in like]
        some = own if sum(own) else near if sum(near) else None
        each = sum(some) / len(some) / 60 if some else run.minutes
        total += each * sum((run.key, seed) not in have for seed in run.seeds)
    return total


@tabled("name", DONE)
def test_the_status_of_an_experiment_is_counted_from_its_records(name):
    have, t = standing(name, "full"), costs.status(name)
    grid = grids.find(name).grid("full")
    assert [r[0] for r in t.rows] == [run.key for run in grid]
    for run, shown in zip(grid, t.rows):
        done = sum((run.key, seed) in have for seed in run.seeds)
        whole = done == len(run.seeds)
        assert shown[3] == ("done" if whole else f"{done} of {len(run.seeds)} seeds")
        assert shown[2] == str(len(run.fills))
        own = [spent(r) for (key, _), r in have.items() if key == run.key]
        if run.needs and not run.minutes:
            assert shown[4] == "0.0 (from others)"
        elif sum(own):
            assert shown[4] == f"{sum(own) / len(own) / 60:,.1f} (measured)"
    told = t.title.split("about ")[1].split(" core")[0].replace(",", "")
    assert float(told) == pytest.approx(left_minutes(name, "full") / 60, abs=0.0501)


def test_the_status_of_a_folder_counts_its_own_records(made, tmp_path):
    runs.run_grid("made-up", "full", (0,), tmp_path, "rec")
    rows = {r[0]: r[3] for r in costs.status("made-up", "full", tmp_path).rows}
    assert rows["rec"] == "1 of 2 seeds" and rows["fedavg"] == "0 of 2 seeds"


@pytest.fixture
def those_with_a_module(monkeypatch):
    real = runner.experiments()
    monkeypatch.setattr(runner, "experiments", lambda: {n: real[n] for n in DONE})


@tabled("scale", records.SCALES)
def test_the_ledger_adds_up(those_with_a_module, scale):
    t = costs.ledger(scale)
    assert [r[0] for r in t.rows] == DONE
    for name, paper, cells, done, seeds, hours, left in t.rows:
        have, grid = standing(name, scale), grids.find(name).grid(scale)
        assert paper == grids.find(name).paper
        assert int(cells) == sum(len(run.fills) for run in grid)
        mine = {run.key: sum((run.key, s) in have for s in run.seeds) for run in grid}
        some = [n for n in mine.values() if n]
        assert done == f"{len(some)} of {len(grid)}"
        planned = max(len(run.seeds) for run in grid)
        wanted = f"{min(some)}..{max(some)} of {planned}" if some else "none"
        assert seeds == wanted
        total = sum(map(spent, have.values())) / 3600
        assert float(hours.replace(",", "")) == pytest.approx(total, abs=0.0501)
        rest = left_minutes(name, scale) / 60
        assert float(left.replace(",", "")) == pytest.approx(rest, abs=0.0501)


@tabled("name", DONE)
def test_the_smoke_scale_of_an_experiment_needs_no_download(name):
    grid = grids.find(name).grid("smoke")
    assert {d for run in grid for d in run.data} == set()
