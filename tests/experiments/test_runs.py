"What is done once for every experiment: playing, resuming, claiming, recording, counting."

import json
import re
import subprocess
import sys
import time
import types
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from made_up import made_up
from tables import tabled

from dpcomm.datasets import catalogue
from dpcomm.evidence import figures, paper_tables, records
from dpcomm.experiments.lines import Line, difference
from dpcomm.experiments.run import runs, sweep

ACC, FED, ORDER = "mnist.eps3.rec.acc", "mnist.eps3.fedavg.acc", "mnist.eps3.order"
DONE = list(runs.experiments())
NEED = re.compile(r"(?:(?P<name>[^/@]+)/)?(?P<key>[^/@]+)(?:@(?P<seed>\d+))?")
GRIDS = [(name, scale) for name in DONE for scale in records.SCALES]


class Made:
    "A tiny experiment: what was played is kept, and a key may be told to misbehave."

    def __init__(self, *more: Line, scale="full"):
        self.played, self.does = [], {}
        self.runs = {s: (*self.own(s), *more) for s in records.SCALES}
        module = types.SimpleNamespace(
            __name__="dpcomm.experiments.run.runs",
            settings=lambda scale: {},
            grid=lambda scale: self.runs[scale],
            run_one=self.run_one,
        )
        self.experiment = runs.Experiment("made-up", module, "dprec")

    @staticmethod
    def own(scale):
        return (
            Line("fedavg", "DP-FedAvg", scale, (FED,), seeds=(0, 1)),
            Line("rec", "DP-REC", scale, (ACC,), seeds=(0, 1), minutes=3.0),
            Line("gap", "the difference", scale, (ORDER,), ("fedavg", "rec"), (0, 1)),
            Line("sizes", "a count", scale, ("ours.sizes",), trains=False),
        )

    def run_one(self, run, seed, **how):
        self.played.append((run.key, seed))
        self.how = how
        if run.key in self.does:
            return self.does[run.key](run, seed, **how)
        if run.needs:
            return difference(run, seed, how["inputs"], how)
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
        job = runs.Costs(self.experiment, scale).job(key, seed)
        return runs.execute(job, out, **how)


@pytest.fixture
def made(monkeypatch):
    found = Made()
    monkeypatch.setattr(runs, "find", lambda name: found.experiment)
    return found


def stored(folder) -> list:
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
    assert record.origin["code"] == made.experiment.code
    assert record.origin["device"] == "cpu" and record.origin["date"].endswith("+00:00")
    assert not made.execute("sizes", 0, tmp_path).trained


def test_a_run_that_stands_is_returned_without_being_played(made, tmp_path):
    first = made.execute("rec", 0, tmp_path)
    before = stored(tmp_path)
    assert made.execute("rec", 0, tmp_path) == first
    assert made.played == [("rec", 0)] and stored(tmp_path) == before
    again = made.execute("rec", 0, tmp_path, resume=False)
    assert made.played == [("rec", 0)] * 2 and stored(tmp_path) == before
    assert records.result_of(again) == records.result_of(first)
    made.execute("rec", 1, tmp_path)
    assert made.played[-1] == ("rec", 1) and len(stored(tmp_path)) == 2


def test_a_run_that_gives_other_numbers_the_second_time_is_refused(made, tmp_path):
    made.execute("rec", 0, tmp_path)
    before = stored(tmp_path)
    made.does["rec"] = lambda run, seed, **how: dict(final=dict(accuracy=1.0))
    with pytest.raises(ValueError, match="find out which run is wrong"):
        made.execute("rec", 0, tmp_path, resume=False)
    assert stored(tmp_path) == before


def test_a_run_gets_its_checkpoint_and_loses_it_when_it_is_recorded(made, tmp_path):
    path = tmp_path / "checkpoints" / "made_up.full" / "rec.seed0.pt"

    def half(run, seed, checkpoint, resume, max_seconds, **how):
        assert checkpoint == path and resume and 0 < max_seconds <= 700
        checkpoint.write_text("rounds")

    made.does["rec"] = half
    assert made.execute("rec", 0, tmp_path, end=time.time() + 700) is None
    assert path.read_text() == "rounds" and stored(tmp_path) == []
    del made.does["rec"]
    assert made.execute("rec", 0, tmp_path) and not path.exists()


HOLD = """
import sys
from fcntl import LOCK_EX, flock
with open(sys.argv[1], "w") as lock:
    flock(lock, LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_run_that_another_process_plays_is_left_to_it(made, tmp_path):
    place = tmp_path / "checkpoints" / "made_up.full"
    place.mkdir(parents=True)
    words = [sys.executable, "-c", HOLD, str(place / "rec.seed0.lock")]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen(words, **pipes) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError, match="held by another process"):
            made.execute("rec", 0, tmp_path)
        assert made.played == []
        assert made.execute("rec", 1, tmp_path), "another seed is free"
        other.kill()
        other.wait()
        assert made.execute("rec", 0, tmp_path), "a killed process holds nothing"


def test_a_divergence_is_recorded_once_and_said_of_what_needs_it(made, tmp_path):
    def diverges(run, seed, **how):
        raise FloatingPointError("loss is nan in round 3")

    made.does["rec"] = diverges
    record = made.execute("rec", 0, tmp_path)
    assert record.notes == ["diverged: loss is nan in round 3"]
    assert record.final == record.cells == record.history == {}
    assert made.execute("rec", 0, tmp_path) == record
    assert made.played == [("rec", 0)] and len(stored(tmp_path)) == 1
    made.execute("fedavg", 0, tmp_path)
    gap = made.execute("gap", 0, tmp_path)
    assert gap.cells == {} and gap.notes[0].startswith("computed from rec, which div")


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
    made = Made(Line("far", "from afar", "full", ("ours.far",), needs, (1,)))
    other = Made()
    other.experiment = replace(other.experiment, name="other-one")
    known = {"made-up": made.experiment, "other-one": other.experiment}
    monkeypatch.setattr(runs, "find", lambda name: known[name])

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


def test_a_cell_that_was_not_planned_is_refused(made, tmp_path):
    made.does["rec"] = lambda run, seed, **how: dict(cells={FED: [1.0, "percent"]})
    with pytest.raises(ValueError, match=f"{FED} is not a cell of its grid"):
        made.execute("rec", 0, tmp_path)
    assert stored(tmp_path) == []


def test_cells_below_full_scale_are_ours(made, tmp_path):
    for scale, cell in (
        ("smoke", f"ours.smoke.{ACC}"),
        ("quick", f"ours.quick.{ACC}"),
        ("full", ACC),
    ):
        assert [*made.execute("rec", 0, tmp_path, scale).cells] == [cell]
        assert [*made.execute("sizes", 0, tmp_path, scale).cells] == ["ours.sizes"]


# ---- choosing


def test_runs_that_need_others_come_after_them_and_seeds_as_planned(made):
    costs = runs.Costs(made.experiment, "full")
    jobs = [(job.key, job.seed) for job in runs.select(costs)]
    planned = [(k, s) for k in ("fedavg", "rec", "gap") for s in (0, 1)]
    assert sorted(jobs) == sorted([*planned, ("sizes", 0)])
    for seed in (0, 1):
        needs = [jobs.index((key, seed)) for key in ("fedavg", "rec")]
        assert jobs.index(("gap", seed)) > max(needs)
    asked = runs.select(costs, (7,), "fed")
    assert [(job.key, job.seed) for job in asked] == [("fedavg", 7)]


def test_experiments_are_found_by_name_and_refused_with_the_nearest():
    for name in ("dprec-mnist", "dprec_mnist"):
        found = runs.find(name)
        names = found.name, found.stem, found.paper
        assert names == ("dprec-mnist", "dprec_mnist", "dprec")
    with pytest.raises(ValueError, match="did you mean 'dprec-mnist'"):
        runs.find("dprec-mnits")


@tabled(
    "twice, message",
    [
        (Line("rec", "again", "full"), "key rec appears twice"),
        (Line("other", "", "full", ("ours.x", "ours.x")), "cell ours.x appears twice"),
    ],
)
def test_a_key_or_cell_that_stands_twice_in_a_grid_is_refused(twice, message):
    with pytest.raises(ValueError, match=f"made-up: {message} in its grid"):
        Made(twice).experiment.grid("full")


def test_a_grid_is_played_whole(made, tmp_path):
    found = runs.run_grid("made-up", "full", out=tmp_path)
    assert [(r.key, r.seed) for r in found] == made.played
    assert len(found) == 7 == len(stored(tmp_path))
    assert {r.cells[ORDER][0] for r in found if r.key == "gap"} == {10.0}
    again = runs.run_grid("made-up", "full", out=tmp_path, resume=True)
    assert again == found and len(made.played) == 7


def test_a_grid_with_rounds_left_stops_and_names_them(made, tmp_path):
    made.does["rec"] = lambda run, seed, **how: None
    with pytest.raises(runs.Unfinished) as error:
        runs.run_grid("made-up", "full", out=tmp_path, max_seconds=100)
    text = str(error.value)
    assert text.startswith("4 of 7 runs are unfinished: ")
    for left in ("rec seed 0", "rec seed 1", "gap seed 0", "gap seed 1"):
        assert left in text
    assert "fedavg" not in text and len(stored(tmp_path)) == 3
    del made.does["rec"]
    assert len(runs.run_grid("made-up", "full", out=tmp_path, resume=True)) == 7


def test_records_go_where_the_user_stands_and_the_place_is_said(
    made, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    runs.run_grid("made-up", "full", (0,), only="rec")
    assert capsys.readouterr().out.splitlines()[0] == (
        f"writing records to {tmp_path / 'runs'}"
    )
    assert (tmp_path / "runs" / "dprec" / "made_up.full.jsonl").is_file()


def test_a_place_that_cannot_be_written_is_tried_before_the_first_run(made, tmp_path):
    for blocked in (tmp_path / "file", tmp_path / "file" / "deeper"):
        (tmp_path / "file").write_text("not a folder")
        with pytest.raises(OSError, match="cannot be written"):
            runs.run_grid("made-up", "full", out=blocked)
    assert made.played == []


# ---- other settings on trial

TRIED = ("dprec-mnist", "smoke", (0,))
KEY = "linear.eps3.fedavg"


def test_a_changed_run_has_a_key_of_its_own_and_no_cell(tmp_path):
    change = dict(server_lr=0.03, eval_every=50)
    made = runs.run_grid(*TRIED, tmp_path, KEY, change=change)
    (record,) = records.load("dprec", root=tmp_path / "changes")
    assert made == [record] and not records.load("dprec", root=tmp_path)
    assert record.key == f"change.eval_every=50,server_lr=0.03.{KEY}"
    assert record.cells == {} and record.config["server_lr"] == 0.03
    assert record.notes == ["changed settings: eval_every=50,server_lr=0.03"]
    runs.run_grid(*TRIED, tmp_path, KEY)
    table = runs.change_table("dprec-mnist", made, tmp_path)
    assert [row[0] for row in table.rows] == [record.key, KEY]


def test_several_values_make_one_table_and_one_figure(tmp_path):
    "Each pair of values, each run under its own name, also where one begins another."
    change = dict(server_lr=(1.0, 1.5), lr=(0.05, 0.1), eval_every=50)
    told = []
    made = runs.run_grid(*TRIED, tmp_path, KEY, change=change, tell=told.append)
    assert told == made and len({r.key for r in made}) == 4
    rows = [(r.key, "1", f"{r.final['accuracy']:.4g}") for r in made]
    table = runs.change_table("dprec-mnist", made, tmp_path)
    assert [row[:3] for row in table.rows] == rows
    figure = runs.change_figure(made, change)
    lines = figure.axes[0].get_lines()
    assert [list(line.get_xdata()) for line in lines] == [[1.0, 1.5]] * 2
    ends = [[r.final["accuracy"] for r in made[i::2]] for i in (0, 1)]
    assert [list(line.get_ydata()) for line in lines] == ends


def test_a_line_of_a_figure_has_one_value_of_every_other_setting():
    made, change = [], dict(lr=(0.1, 1.0), server_lr=(0.1, 1.0))
    for lr, server_lr in product(*change.values()):
        config = dict(lr=lr, server_lr=server_lr, mechanism="Rec(1.0)")
        told = dict(config=config, final=dict(accuracy=10 * lr + server_lr))
        made.append(made_up(f"change.lr={lr},server_lr={server_lr}.rec", **told))
    lines = runs.change_figure(made, change).axes[0].get_lines()
    assert [list(line.get_ydata()) for line in lines] == [[1.1, 10.1], [2.0, 11.0]]


# ---- costs


def recorded(key, seed, cpu, wall=60.0):
    cost = dict(wall_seconds=wall, cpu_seconds=cpu, peak_bytes=1)
    return made_up(key, seed, cost=cost)


def costs_of(monkeypatch, grid, *have):
    there = {(r.key, r.seed): r for r in have}
    monkeypatch.setattr(runs, "recorded_runs", lambda *_: there)
    return runs.Costs(types.SimpleNamespace(grid=lambda scale: grid), "full")


def test_a_run_costs_what_it_cost_or_its_neighbours_or_what_was_guessed(monkeypatch):
    run = Line("a", "", "full", minutes=5.0)
    near, far = Line("b", "", "full", minutes=5.0), Line("c", "", "full", minutes=6.0)
    needs = Line("d", "", "full", minutes=5.0, needs=("a",))
    for have, wanted in (
        ([], (5.0, "guessed")),
        ([recorded("c", 0, 600), recorded("d", 0, 600)], (5.0, "guessed")),
        ([recorded("b", 0, 600), recorded("c", 0, 60)], (10.0, "like its neighbours")),
        (
            [recorded("a", 0, 60), recorded("a", 1, 180), recorded("b", 0, 600)],
            (2.0, "measured"),
        ),
        ([recorded("a", 0, None, wall=90.0)], (1.5, "measured")),
    ):
        grid = (run, near, far, needs)
        assert costs_of(monkeypatch, grid, *have).minutes(run) == wanted


def test_the_list_counts_committed_records():
    rows = {row[0]: row for row in sweep.overview().rows}
    assert [*rows] == DONE
    for name, row in rows.items():
        for scale, column in zip(records.SCALES, (2, 4, 6)):
            assert int(row[column]) == len(standing(name, scale))


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


@tabled("name, scale", GRIDS)
def test_committed_records_fit_the_grid(name, scale):
    grid = {run.key: run for run in runs.find(name).grid(scale)}
    for (key, _), row in standing(name, scale).items():
        assert key in grid, "records of a run that no grid has"
        bare = {k.removeprefix(f"ours.{scale}.") for k in row["cells"]}
        bare = {k for k in bare if not k.startswith("ours.cost.")}  # told twice
        fills = {k.removeprefix(f"ours.{scale}.") for k in grid[key].fills}
        assert bare <= fills, key
        assert row["trained"] == grid[key].trains, key


@tabled("name, scale", GRIDS)
def test_grids_name_cells_of_their_paper_and_runs_that_are_planned(name, scale):
    experiment = runs.find(name)
    grid = experiment.grid(scale)
    known = {c.key for c in paper_tables.cells(experiment.paper)}
    sets = {name for name, *_ in catalogue.CATALOGUE} if scale != "smoke" else set()
    for run in grid:
        assert run.scale == scale and set(run.data) <= sets, "smoke needs no download"
        wrong = [c for c in run.fills if c not in known and not c.startswith("ours.")]
        assert wrong == [], run.key
        assert run.seeds and len(set(run.seeds)) == len(run.seeds)
        for need in run.needs:
            words = NEED.fullmatch(need)
            assert words, f"{run.key} needs {need}: [experiment/]key[@seed]"
            near = grid if not words["name"] else runs.find(words["name"]).grid(scale)
            assert words["name"] in (None, *DONE), "as `dpcomm list` has it"
            (other,) = [r for r in near if r.key == words["key"]]
            wanted = {int(words["seed"])} if words["seed"] else set(run.seeds)
            assert wanted <= set(other.seeds), f"{run.key} needs seeds of {need}"
            assert not other.needs, "what is computed is computed from what is played"


@tabled("name", DONE)
def test_the_status_of_an_experiment_is_counted_from_its_records(name):
    have, shown = standing(name, "full"), sweep.status(name).rows
    grid = runs.find(name).grid("full")
    assert [row[0] for row in shown] == [run.key for run in grid]
    for run, row in zip(grid, shown):
        done = sum((run.key, seed) in have for seed in run.seeds)
        whole = done == len(run.seeds)
        assert row[3] == ("done" if whole else f"{done} of {len(run.seeds)} seeds")
        mine = [spent(r) for (key, _), r in have.items() if key == run.key]
        if sum(mine) and (run.minutes or not run.needs):
            assert row[4] == f"{sum(mine) / len(mine) / 60:,.1f} (measured)"


# ---- learning curves


def test_learning_curves_hold_every_setting_by_mechanism_with_its_seeds():
    "A band from three seeds on; of what has no rounds nothing is drawn."

    def record(key, seed, mechanism, ends):
        history = dict(round=[5, 10], accuracy=[40.0 + seed, ends + seed])
        return made_up(key, seed, config=dict(mechanism=mechanism), history=history)

    made = [record("eps3.rec", s, "Rec(clip_norm=1.0)", 60.0) for s in range(3)]
    made += [record("eps3.fedavg", 0, "Gaussian(1.0)", 80.0), made_up("partition")]
    figure = figures.learning_curves(made)
    gaussian, rec = figure.axes  # a panel a mechanism
    assert list(gaussian.get_lines()[0].get_ydata()) == [40.0, 80.0]
    assert list(rec.get_lines()[0].get_ydata()) == [41.0, 61.0]
    for axis, n, banded in (gaussian, 1, False), (rec, 3, True):
        (label,) = (text.get_text() for text in axis.get_legend().get_texts())
        assert label.endswith(f"(n = {n})")
        heights = axis.collections[0].get_paths()[0].vertices[:, 1]
        assert (len({*heights.round(6)}) > 2) == banded
    assert figures.learning_curves(made[-1:]) is None
