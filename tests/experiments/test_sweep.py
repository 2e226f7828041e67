"Many runs: the plan, seeds that decide, this process, Dask's workers, kills and failures."

import importlib.util
import math
import os
import shlex
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest
from checkout import ROOT
from made_up import replace
from scipy import stats
from tables import tabled

from dpcomm.evidence import paper_tables, records, verdicts
from dpcomm.evidence.verdicts import AFTER_A_LOOK, LOOKS, Summary
from dpcomm.experiments.lines import Line
from dpcomm.experiments.run import runs, sweep

ASKED = (["dprec-mnist"], "smoke", (0, 1), "linear.eps3")
ORDER = paper_tables.cell("dprec", "mnist.eps3.order")
ACC = paper_tables.cell("fltop", "fmnist.fl_top.r0.5.accuracy")


@pytest.fixture(autouse=True)
def this_checkout(monkeypatch):
    "Children import the package that is tested, and use one thread each."
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def numbers(folder) -> dict:
    "What was recorded, without when and at what cost."
    found = records.load("dprec", root=folder)
    assert len({r.identity for r in found}) == len(found)
    return {(r.key, r.seed): records.result_of(r) for r in found}


def made_up(monkeypatch, *grid, run_one=None, name="made-up"):
    "An experiment that `find` finds by its name."
    module = types.ModuleType("made_up")
    module.grid, module.run_one = lambda scale: grid, run_one
    experiment, real = runs.Experiment(name, module), runs.find
    monkeypatch.setattr(runs, "find", lambda n: experiment if n == name else real(n))


def run(key, **how):
    return Line(key, key, "full", trains=False, **how)


# ---- the plan


def test_a_plan_is_ordered_by_cells_an_hour_after_what_it_needs(monkeypatch):
    cells = [f"ours.{i}" for i in range(99)]
    grid = [
        run("slow", minutes=100.0, fills=cells[:1]),
        run("gap", fills=cells[1:10], needs=("slow",)),
        run("fast", minutes=1.0, fills=cells[10:11]),
        run("many", minutes=100.0, fills=cells[11:61]),
        run("nothing", minutes=0.5),
        run("long nothing", minutes=50.0),
        run("second", fills=cells[61:62], needs=("gap",)),
    ]
    wanted = ["fast", "many", "slow", "nothing", "long nothing", "gap", "second"]
    for order in (grid, grid[::-1]):
        made_up(monkeypatch, *order)
        assert [job.key for job in sweep.plan(["made-up"])] == wanted
    jobs = sweep.plan(["made-up"], only="second")
    assert [job.key for job in jobs] == ["slow", "gap", "second"], "what it needs, too"


def test_a_plan_holds_each_missing_run_once_and_none_that_is_recorded(tmp_path):
    jobs = sweep.plan(*ASKED, tmp_path)
    keys = ("linear.eps3.fedavg", "linear.eps3.rec")
    planned = sorted((job.key, job.seed) for job in jobs)
    assert planned == [(key, seed) for key in keys for seed in (0, 1)]
    (one,) = [job for job in jobs if (job.key, job.seed) == (keys[1], 1)]
    records.append(tmp_path, runs.record_of(one, {}, {"wall_seconds": 120.0}))
    left = sweep.plan(*ASKED, tmp_path)
    assert len(left) == 3 and (keys[1], 1) not in [(job.key, job.seed) for job in left]
    assert [job.minutes for job in left if job.key == keys[1]] == [2.0]
    assert len(sweep.plan(*ASKED)) == 4, "another folder"


def test_a_shell_line_is_a_sweep_of_its_run_alone(monkeypatch, tmp_path):
    made_up(monkeypatch, run("a b", seeds=(3,)), run("a bc", seeds=(3,)))
    one, other = sweep.plan(["made-up"], only="a")
    assert [job.key for job in sweep.plan(["made-up"], only=one.key)] == ["a b"]
    assert [job.key for job in sweep.plan(["made-up"], only=other.key)] == ["a bc"]
    line = sweep.shell_line(one, tmp_path, "cuda")
    words = "-m dpcomm sweep made-up --scale full --only".split()
    more = ["a b", "--seeds", "3", "--device", "cuda", "--out", str(tmp_path)]
    assert shlex.split(line) == [sys.executable, *words, *more]


# ---- seeds that decide

PLANNED = 4


def decided_wrongly(draws, levels) -> float:
    "Share of pure chance for which some look says that an order holds or fails."
    wrong = np.zeros(len(draws), bool)
    for n, level in levels.items():
        x = draws[:, :n]
        reach = stats.t.ppf((1 + level) / 2, n - 1) * x.std(1, ddof=1) / math.sqrt(n)
        wrong |= abs(x.mean(1)) > reach
    return wrong.mean()


def test_three_looks_are_wrong_at_most_six_times_in_a_hundred():
    "100,000 families of no difference; .004 is five standard errors of the rate."
    draws = np.random.default_rng(3).standard_normal((100_000, max(LOOKS)))
    spent = {PLANNED: 0.95} | dict.fromkeys(LOOKS, AFTER_A_LOOK)
    bound = 0.05 + len(LOOKS) * (1 - AFTER_A_LOOK)
    assert bound == pytest.approx(0.06)
    assert 0.05 - 0.004 < decided_wrongly(draws, spent) < bound + 0.004
    naive = dict.fromkeys(spent, 0.95)
    assert decided_wrongly(draws, naive) > bound + 0.02, "looking is not free"


def test_verdicts_use_the_level_of_their_look():
    s = Summary(1.0, 0.2, 8, "percentage points", 7)
    late = replace(s, level=AFTER_A_LOOK)
    assert late.reach == pytest.approx(stats.t.ppf(0.9975, 7) * 0.2)
    near = replace(s, mean=0.6), replace(late, mean=0.6)
    words = [verdicts.verdict(ORDER, each) for each in near]
    assert words == ["order holds", "open"]
    alone = replace(ACC, spread=None, n_runs=None)
    widths = [verdicts.half_width(alone, each) for each in (s, late)]
    assert widths[1] / widths[0] == pytest.approx(
        stats.t.ppf(0.9975, 7) / stats.t.ppf(0.975, 7)
    )


@tabled(
    "mean, se, n, asked",
    [
        (3.0, 0.1, 4, ()),  # decided
        (1.5, 0.5, 4, (4, 5, 6, 7)),  # at 8 it would
        (1.2, 0.5, 6, (4, 5, 6, 7, 8, 9, 10, 11, 12, 13)),  # at 16, of six others
        (0.9, 0.5, 4, tuple(range(4, 16))),  # at 16
        (0.1, 0.5, 4, ()),  # hopeless
        (0.1, 0.5, 16, ()),  # after the last look
    ],
)
def test_more_seeds_are_asked_for_up_to_the_look_that_decides(mean, se, n, asked):
    s = Summary(mean, se, n, "percentage points", n - 1)
    have = {0, 1, 2, 3, *range(100, 96 + n)}
    assert sweep.seeds_that_decide(ORDER, s, (0, 1, 2, 3), have) == asked


def test_planned_seeds_come_first_and_a_borrowed_spread_asks_for_no_more():
    assert sweep.seeds_that_decide(ORDER, None, (0, 1), set()) == (0, 1)
    one = Summary(0.9, 0.5, 1, "percentage points", 3, "others")
    assert sweep.seeds_that_decide(ORDER, one, (0, 1, 2), {0}) == (1, 2)
    assert sweep.seeds_that_decide(ORDER, one, (0,), {0}) == ()


@pytest.mark.slow
def test_a_plan_that_decides_holds_what_is_open_after_what_it_needs():
    jobs = sweep.plan(["sqsgd-mnist", "fltop-fmnist"], decide=True)
    names = [(job.experiment.name, job.key, job.seed) for job in jobs]
    assert jobs and len({*names}) == len(names)
    for i, job in enumerate(jobs):
        stands = runs.recorded_runs(job.experiment, "full")
        assert (job.key, job.seed) not in stands
        for source, key, seed in job.inputs.values():
            there = (key, seed) in runs.recorded_runs(source, "full")
            assert there or names.index((source.name, key, seed)) < i, (
                "needs come first"
            )
    assert "claim.fig3.sqsgd_minus_pm.eps400" not in {j.key for j in jobs}, "decided"
    assert sweep.plan(["dprec-costs"], decide=True) == []


def test_a_seed_beyond_the_planned_ones_is_marked_and_judged_by_the_later_level():
    experiment = runs.find("dprec-mnist")
    costs = runs.Costs(experiment, "smoke")
    one = next(r for r in costs.grid if r.trains)
    played = dict(cells={one.fills[0]: [50.0, "percent"]})
    seed = max(one.seeds) + 1
    for at, beyond in ((seed, True), (one.seeds[0], False)):
        made = runs.record_of(costs.job(one.key, at), played, {})
        assert (records.BEYOND in made.notes) == beyond
        (mine,) = verdicts.ours_by_key([made]).values()
        assert mine.summary.level == (AFTER_A_LOOK if beyond else 0.95)


# ---- in this process


def test_a_failure_leaves_the_others_and_time_ends_a_sweep(monkeypatch, tmp_path):
    def run_one(run, seed, **how):
        if run.key == "bad":
            raise KeyError("a fault")
        return None if run.key == "long" else dict(final=dict(mse=1.0 + seed))

    grid = run("bad"), run("good"), run("long"), run("gap", needs=("bad",))
    made_up(monkeypatch, *grid, run_one=run_one)
    jobs = sweep.plan(["made-up"])
    done = {job.key: result for job, result in sweep.run_all(jobs, tmp_path)}
    assert repr(done.pop("bad")) == "KeyError('a fault')"
    assert done == dict(good=True, long=False, gap=False)
    late = [*sweep.run_all(jobs, tmp_path, end=time.time() - 1)]
    assert late == [(job, job.key == "good") for job in jobs]


SWEEP = """
import sys
from dpcomm.cli import main
words = "sweep dprec-mnist --scale smoke --seeds 0,1 --only linear.eps3 --out".split()
sys.exit(main([*words, sys.argv[1], *sys.argv[2:]]))
"""


@pytest.mark.slow
def test_a_sweep_that_is_killed_ends_with_the_same_records(one, tmp_path):
    words = [sys.executable, "-c", SWEEP, str(tmp_path)]
    with subprocess.Popen(words) as process:
        end = time.monotonic() + 1200
        while not [*tmp_path.rglob("*.jsonl")]:
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert 0 < len(numbers(tmp_path)) < 4, "killed in the middle"
    assert subprocess.run(words, timeout=1200).returncode == 0
    assert numbers(tmp_path) == one and not list(tmp_path.rglob("*.pt"))


# ---- on Dask's workers


@pytest.mark.slow
def test_a_killed_dask_worker_changes_no_number_and_no_run_is_lost(one, tmp_path):
    pytest.importorskip("distributed")
    jobs = sweep.plan(*ASKED)
    with sweep.dask_client(jobs, 2) as client:
        assert client.scheduler_info()["address"].startswith("tls://127.0.0.1:")
        results = sweep.run_dask(jobs, client, tmp_path)
        first = next(results)  # then a worker is killed that has jobs to do
        at = next(at for at, keys in client.processing().items() if keys)
        os.kill(client.run(os.getpid, workers=[at])[at], signal.SIGKILL)
        done = [first, *results]
    assert len(done) == 4 and all(result is True for _, result in done)
    assert numbers(tmp_path) == one


def test_a_slurm_job_asks_for_what_it_is_told(monkeypatch):
    if importlib.util.find_spec("dask_jobqueue") is None:
        pytest.skip("NOT CHECKED: dask_jobqueue is not installed")
    options = dict(time="4:00:00", account="mine", partition="long", qos="low")
    options["host"] = "127.0.0.1"  # of the scheduler
    with sweep._slurm_cluster(3, options) as cluster:
        script = cluster.job_script()
    for line in ("-A mine", "-p long", "-t 4:00:00", "--mem=3G", "--qos=low"):
        assert f"#SBATCH {line}" in script, script
