"Jobs in processes: the order, equal numbers whatever the processes, kills, failures."

import inspect
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import types
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
from checkout import ROOT
from tables import tabled

from dpcomm.evidence import records
from dpcomm.experiments.run import cluster, grids, planning, runs, sweep
from dpcomm.experiments.run.planning import Job
from dpcomm.experiments.run.sweep import Sweep, Worker

ASKED = dict(name="dprec-mnist", scale="smoke", seeds=(0, 1), only="linear.eps3")
NAME = "dprec_mnist.smoke.jsonl"


def job(key="a", **more) -> Job:
    given = dict(experiment="made-up", scale="full", data=(), seed=0, minutes=1.0)
    return Job(key=key, **given | dict(memory=1.0, cells=1, needs=()) | more)


@pytest.fixture(autouse=True)
def this_checkout(monkeypatch):
    "Children import the package that is tested."
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)


def numbers(folder) -> dict:
    "What was recorded, without when and at what cost."
    found = records.load("dprec", root=folder)
    assert len({r.identity for r in found}) == len(found)
    return {(r.key, r.seed): records.result_of(r) for r in found}


@pytest.fixture
def made_up(monkeypatch):
    "Experiments that are names and nothing else."
    real = grids.find

    def find(name):
        names = ("made-up", "other")
        return grids.Experiment(name, None) if name in names else real(name)

    monkeypatch.setattr(grids, "find", find)


def children_of(pid) -> list:
    "Workers that were started by a sweep, wherever they have gone since."
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"--parent" in words and words[words.index(b"--parent") + 1] == b"%d" % pid:
            found.append(int(path.parent.name))
    return found


def wait_for(what, seconds=1200):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"{seconds} s for {inspect.getsource(what)}"
        time.sleep(0.05)


# ---- the plan


def test_a_plan_is_ordered_by_cells_an_hour_and_what_needs_others_is_last(monkeypatch):
    jobs = [
        job("slow", minutes=100.0),
        job("gap", minutes=0.0, cells=9, needs=("slow",)),
        job("fast", minutes=1.0),
        job("many", minutes=100.0, cells=50),
        job("nothing", minutes=0.5, cells=0),
        job("long nothing", minutes=50.0, cells=0),
        job("second", minutes=0.0, cells=1, needs=("slow",)),
    ]
    monkeypatch.setattr(
        planning, "jobs_of", lambda out, names: [j for j in jobs if j.key in names]
    )
    wanted = ["fast", "many", "slow", "nothing", "long nothing", "gap", "second"]
    for order in (jobs, jobs[::-1]):
        asked = [dict(names=[j.key]) for j in order] + [dict(names=["fast"])]
        assert [j.key for j in planning.plan(asked)] == wanted
    assert all(j.value > 0 for j in jobs)


def test_a_plan_holds_each_missing_run_once_and_none_that_is_recorded(tmp_path):
    jobs = planning.plan([ASKED, dict(ASKED, only="linear.eps3.rec")], tmp_path)
    keys = ("linear.eps3.fedavg", "linear.eps3.rec")
    planned = sorted((j.key, j.seed) for j in jobs)
    assert planned == [(key, seed) for key in keys for seed in (0, 1)]
    experiment = grids.find("dprec-mnist")
    run = grids.find_run(experiment, "smoke", keys[1])
    record = runs.record_of(experiment, run, 1, {}, {"wall_seconds": 120.0})
    records.append(tmp_path, record)
    left = planning.plan([ASKED], tmp_path)
    assert len(left) == 3 and (keys[1], 1) not in [(j.key, j.seed) for j in left]
    assert [j.minutes for j in left if j.key == keys[1]] == [2.0], "as long as it took"
    assert len(planning.plan([ASKED])) == 4, "another folder"


def test_a_plan_table_adds_up():
    jobs = [
        job("a", minutes=30.0, cells=2, data=("mnist",)),
        job("b", minutes=90.0, cells=3, memory=4.0, data=("emnist",)),
        job("c", minutes=60.0, experiment="other"),
    ]
    t = planning.plan_table(jobs)
    assert t.rows == (
        ("made-up", "2", "5", "2.0", "4", "emnist, mnist"),
        ("other", "1", "1", "1.0", "1", ""),
    )
    assert t.title == "3 runs are missing: about 3.0 core-hours"


@tabled(
    "text, message",
    [
        ("[[sweep]]\nexperimnt = 'a'\n", "did you mean 'experiment'"),
        ("[[sweep]]\nscale = 'full'\n", "a [[sweep]] table names no experiment"),
        ("", "grid.toml has no [[sweep]] table: add one"),
        ("[[swep]]\nexperiment = 'a'\n", "grid.toml has no [[sweep]]"),
        ("[[sweep]\n", "grid.toml is not valid TOML"),
        (
            "[[sweep]]\nexperiment = 'a'\nexperiment = 'b'\n",
            "grid.toml is not valid TOML",
        ),
        ("\ufffe[[sweep", "grid.toml is not valid TOML"),
        ("[sweep]\nexperiment = 'dprec-mnist'\n", "[[sweep]]"),
        ("sweep = 3\n", "[[sweep]]"),
        ("[[sweep]]\nexperiment = 3\n", "experiment"),
        ("[[sweep]]\nexperiment = 'dprec-mnist'\nseeds = 3\n", "seeds"),
        ("[[sweep]]\nexperiment = 'dprec-mnist'\nseeds = ['0']\n", "seeds"),
        (
            "[[sweep]]\nexperiment = 'dprec-mnist'\nscale = 'ful'\n",
            "did you mean 'full'",
        ),
        ("[[sweep]]\nexperiment = 'dprec-mnits'\n", "did you mean 'dprec-mnist'"),
        ("[[sweep]]\nexperiment = 'dprec-mnist'\nonly = 'cmn'\n", "only='cmn'"),
    ],
)
def test_a_wrong_grid_file_is_refused_with_what_to_correct(tmp_path, text, message):
    path = tmp_path / "grid.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(message)):
        planning.plan(planning.read_grid(path))


def test_a_grid_file_says_what_to_run(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(
        "[[sweep]]\nexperiment = 'dprec-mnist'\nscale = 'smoke'\nseeds = [0, 1]\n"
        "only = 'linear.eps3'\n[[sweep]]\nexperiment = 'dprec-mnist'\nscale = 'quick'\n"
    )
    asked = planning.read_grid(path)
    assert asked == [dict(ASKED, seeds=[0, 1]), dict(name="dprec-mnist", scale="quick")]
    assert planning.plan(asked[:1]) == planning.plan([ASKED])


# ---- one decision at a time


def of(*waiting, **more) -> Sweep:
    return Sweep(Path("nowhere"), deque(waiting), **more)


def running(j, code=None, log=None) -> Worker:
    nothing = open(os.devnull, encoding="utf-8")  # at its end, as a process that ended
    if code is None:
        nothing = open(os.pipe()[0], encoding="utf-8")
    ended = types.SimpleNamespace(poll=lambda: code, wait=lambda: code, stdout=nothing)
    return Worker(j, ended, log)


def test_needs_are_named_as_the_records_they_are(made_up):
    given = "a", "a@3", "other/b", "other/b.c@0"
    assert planning.needs_of(job("gap", seed=7, needs=given)) == {
        ("made-up", "full", "a", 7),
        ("made-up", "full", "a", 3),
        ("other", "full", "b", 7),
        ("other", "full", "b.c", 0),
    }
    assert planning.needs_of(job("gap")) == set()
    assert job("a", seed=3).record == ("made-up", "full", "a", 3)


def test_a_job_waits_for_what_it_needs_of_its_own_seed(made_up):
    gap, a = job("gap", needs=("a",)), job("a")
    assert not sweep.ready(gap, of(a, gap))
    assert not sweep.ready(gap, of(gap, running=[running(a)]))
    assert sweep.ready(gap, of(gap)) and sweep.ready(a, of(a, gap))
    assert sweep.ready(gap, of(job("a", seed=1), job("a", experiment="other"), gap))
    assert sweep.ready(gap, of(job("a", scale="quick"), gap)), "of another scale"
    far = job("far", needs=("other/a@1",))
    assert not sweep.ready(far, of(job("a", seed=1, experiment="other"), far))
    assert sweep.ready(far, of(a, job("a", experiment="other"), far))
    later = time.monotonic() + 100
    assert not sweep.ready(a, of(a, busy={a: later}))
    assert sweep.ready(a, of(a, busy={a: 0.0}))


def test_the_best_job_that_fits_starts_and_one_that_never_fits_runs_alone(made_up):
    big, small = job("big", memory=9.0), job("small", memory=1.0)
    assert sweep.next_job(of(big, small), 10.0) == big
    assert sweep.next_job(of(big, small), 5.0) == small
    assert sweep.next_job(of(big), 5.0) == big, "alone"
    assert sweep.next_job(of(big, running=[running(small)]), 5.0) is None
    assert sweep.next_job(of(), 5.0) is None
    assert sweep.free_memory() > 0.1


def test_what_became_of_a_worker_is_told_by_its_code(made_up, tmp_path):
    log = tmp_path / "log"
    log.write_text("words")
    jobs = {code: job(str(code)) for code in (0, sweep.LATE, sweep.BUSY, 1, -9, None)}
    s = of(running=[running(j, code, log) for code, j in jobs.items()])
    sweep.collect(s)
    assert s.done == [jobs[0]] and s.late == [jobs[sweep.LATE]]
    assert list(s.waiting) == [jobs[sweep.BUSY], jobs[1], jobs[-9]]
    assert [w.job for w in s.running] == [jobs[None]]
    assert not sweep.ready(jobs[sweep.BUSY], s) and sweep.ready(jobs[1], s)
    assert s.tries == {jobs[1]: 1, jobs[-9]: 1} and s.failed == {}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_worker_that_has_grown_is_let_go(made_up, monkeypatch):
    assert 0.01 < sweep.resident(os.getpid()) < 100 and sweep.resident(2**30) == 0
    for memory, kept in ((1.0, 1), (0.0, 0)):
        command = [sys.executable, "-c", "print(0, flush=True); input()"]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, **pipes)
        s = of(running=[sweep.Worker(job("a", memory=memory), process, None)])
        while not s.done:
            sweep.collect(s)
        assert len(s.idle) == kept and (process.poll() is None) == bool(kept)
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_an_idle_worker_that_was_killed_is_replaced(
    how, made_up, tmp_path, monkeypatch
):
    command = [sys.executable, "-c", "input()"]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    dead = subprocess.Popen(command, **pipes)
    if how == "killed":
        dead.kill()
    else:
        dead.stdin.write("\n")
        dead.stdin.flush()
    dead.wait()
    new = types.SimpleNamespace(stdin=None, stdout=None)
    started = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # asks no nvidia-smi
    monkeypatch.setattr(
        sweep.subprocess, "Popen", lambda words, **_: started.append(words) or new
    )
    s = Sweep(tmp_path, deque(), idle=[Worker(job("a"), dead, None)])
    worker = sweep.start(job("b"), s)
    assert worker.process is new and worker.job.key == "b" and s.idle == []
    assert len(started) == 1 and "b" in started[0]
    dead.stdout.close()


def test_what_is_free_is_known_without_proc(monkeypatch):
    "As on macOS, which has neither /proc nor SC_AVPHYS_PAGES."
    real = os.sysconf

    def sysconf(name):
        if name == "SC_AVPHYS_PAGES":
            raise ValueError("unrecognized configuration name")
        return real(name)

    def gone(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(sweep.os, "sysconf", sysconf)
    assert sweep.free_memory() > 0.1
    monkeypatch.setattr(sweep.Path, "read_text", gone)
    assert sweep.free_memory() > 0.1


@pytest.mark.parametrize(
    "more, told",
    [
        (dict(processes=0), "processes is 0; it must be a whole number from 1"),
        (dict(processes=-1), "processes is -1"),
        (dict(processes=1.5), "processes is 1.5"),
        (dict(max_hours=float("nan")), r"max_hours is nan; it must be a number in \[0"),
        (dict(max_hours=-1), "max_hours is -1"),
    ],
)
def test_a_sweep_that_could_never_end_is_refused(tmp_path, more, told):
    with pytest.raises(ValueError, match=told):
        sweep.run_here([job()], tmp_path, **more)
    with pytest.raises(ValueError, match="seed is -1; it must be a whole number"):
        planning.plan([dict(ASKED, seeds=[-1])])


def test_a_job_fails_at_the_second_time_and_takes_all_that_need_it_along(
    made_up, tmp_path
):
    log = tmp_path / "log"
    log.write_text("x" * 5000 + "the end")
    a, b, c = job("a"), job("b", needs=("a",)), job("c", needs=("b",))
    others = [job("b", seed=1, needs=("a",)), job("d", needs=("e",))]
    others += [job("b", scale="quick", needs=("a",)), job("g", needs=("other/a",))]
    s = of(b, c, *others, tries={a: 1}, running=[running(a, 1, log)])
    sweep.collect(s)
    assert s.failed[a].endswith("the end") and len(s.failed[a]) == 4000
    assert s.failed[b] == s.failed[c] == "needs a run that failed"
    assert list(s.waiting) == others and set(s.failed) == {a, b, c}


def test_a_worker_tells_how_far_it_is_from_its_bar(tmp_path):
    log = tmp_path / "log"
    worker = running(job(), log=log)
    for text, told in (
        ("", "starting"),
        ("a warning\n", "starting"),
        (
            "eps3:  10%|# | 1/10\reps3:  42%|#### | accuracy=83.1%]",
            "42%, accuracy 83.1%",
        ),
        ("9%|x\n" * 3000 + "7%|", "7%"),
    ):
        log.write_text(text)
        assert sweep.state_of(worker) == told


def test_a_sweep_tells_itself_in_a_line(tmp_path):
    log = tmp_path / "log"
    log.write_text("50%|")
    s = of(
        job("c", minutes=60.0),
        running=[running(job("a", minutes=120.0), log=log)],
        done=[job("d")],
        failed={job("f"): "why"},
    )
    assert (
        sweep.progress_line(s)
        == "1 of 4 done, 1 failed; about 2.0 h left; a seed 0 50%"
    )


# ---- processes


@pytest.mark.deep
def test_one_and_two_processes_give_equal_numbers(one, tmp_path):
    said = []
    done = sweep.run_here(planning.plan([ASKED]), tmp_path, 2, say=said.append)
    assert not done.failed and len(done.done) == 4 and len(one) == 4
    assert numbers(tmp_path) == one
    assert max(line.count(" seed ") for line in said) == 2
    assert said[-1].startswith("4 of 4 done")
    assert len(list(tmp_path.rglob("*.log"))) == 2, "each process played two of them"
    assert planning.plan([ASKED], tmp_path) == []


@pytest.mark.deep
def test_a_shell_line_makes_the_record(one, tmp_path):
    first = planning.plan([ASKED])[0]
    folder = tmp_path / "with a space"
    line = planning.shell_line(first, folder)
    assert "\n" not in line and shlex.split(line)[0] == sys.executable
    done = subprocess.run(
        line, shell=True, cwd=tmp_path, capture_output=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    at = first.key, first.seed
    assert numbers(folder) == {at: one[at]}


def test_a_worker_without_time_or_whose_run_is_claimed_says_so(tmp_path, capsys):
    first = planning.plan([ASKED])[0]
    words = shlex.split(planning.shell_line(first, tmp_path))[3:]
    assert sweep.worker_main([*words, "--max-seconds", "0"]) == sweep.LATE
    assert numbers(tmp_path) == {}
    place = tmp_path / "checkpoints" / "dprec_mnist.smoke"
    with runs._claim(place / f"{first.key}.seed{first.seed}.lock"):
        assert sweep.worker_main(words) == sweep.BUSY
    assert "by another process" in capsys.readouterr().err


@pytest.mark.deep
def test_a_job_that_fails_is_tried_twice_and_the_rest_is_done(one, tmp_path):
    good = planning.plan([dict(ASKED, seeds=(0,))])
    bad = replace(good[0], key="linear.eps3.nothing")
    needs = replace(good[0], key="gap", needs=(bad.key,))
    done = sweep.run_here([bad, *good, needs], tmp_path, 2)
    assert set(done.done) == set(good) and done.tries == {bad: 2}
    assert (
        set(done.failed) == {bad, needs} and "linear.eps3.nothing" in done.failed[bad]
    )
    assert done.failed[needs] == "needs a run that failed"
    assert numbers(tmp_path) == {at: v for at, v in one.items() if at[1] == 0}


def test_a_second_sweep_in_one_folder_is_refused(tmp_path):
    says = f"another sweep is writing to {tmp_path.name}"
    with sweep.locked_folder(tmp_path), pytest.raises(ValueError, match=says):
        sweep.run_here([], tmp_path)
    assert sweep.run_here([], tmp_path).done == [], "it was let go"


@pytest.mark.deep
def test_a_sweep_stops_at_its_time(tmp_path):
    jobs = planning.plan([ASKED])
    done = sweep.run_here(jobs, tmp_path, 1, max_hours=0.0)
    assert done.done == [] and set(done.late) == set(jobs) and not done.failed


SWEEP = """
import sys
from dpcomm.experiments.run import planning, sweep
asked = dict(name="dprec-mnist", scale="smoke", seeds=(0, 1), only="linear.eps3")
done = sweep.run_here(planning.plan([asked], sys.argv[1]), sys.argv[1], 2)
sys.exit(len(done.failed))
"""


@pytest.mark.deep
def test_a_sweep_that_is_killed_twice_ends_with_the_same_records(one, tmp_path):
    words, left = [sys.executable, "-c", SWEEP, str(tmp_path)], []
    for kill in range(2):
        process = subprocess.Popen(words)
        before = len(numbers(tmp_path))
        logs = tmp_path / "logs"
        if kill == 0:  # while both play, at some round
            wait_for(
                lambda: (
                    len([p for p in logs.rglob("*.log") if b"%|" in p.read_bytes()])
                    == 2
                )
            )
        else:  # when something is recorded and the rest goes on
            wait_for(lambda: len(numbers(tmp_path)) > before)
            wait_for(lambda: children_of(process.pid))
        assert len(children_of(process.pid)) >= 1
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_for(lambda: not children_of(process.pid))
        left.append(len(numbers(tmp_path)))
    assert left[0] == 0 < left[1] < 4, "killed in the middle"
    assert subprocess.run(words, timeout=1200).returncode == 0
    assert numbers(tmp_path) == one
    text = (tmp_path / "dprec" / NAME).read_text()
    assert text.count("\n") == 4 and not list(tmp_path.rglob("*.pt"))


@pytest.mark.deep
def test_a_sweep_that_is_interrupted_leaves_no_child(tmp_path):
    "A shell that started the tests in the background made them deaf to the key."
    process = subprocess.Popen(
        [sys.executable, "-c", SWEEP, str(tmp_path)],
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_for(lambda: len(children_of(process.pid)) == 2)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    wait_for(lambda: not children_of(process.pid), 20)
    assert process.returncode != 0


@tabled(
    "shown, names",
    [("", ()), ("-1", ()), ("0", ("0",)), ("2, 0", ("2", "0")), ("1,-1,0", ("1",))],
)
def test_the_gpus_are_those_that_a_process_would_see(shown, names):
    assert sweep.gpus(shown) == names


def test_a_sweep_computes_on_the_device_it_is_told(monkeypatch, tmp_path):
    "On this machine, as a shell line and on a cluster's worker; where a GPU is of no use, not."
    asked = [ASKED, dict(name="dprec-costs", scale="smoke")]
    jobs = planning.placed(planning.plan(asked), "cuda")
    where = {(job.experiment, job.device) for job in jobs}
    assert where == {("dprec-mnist", "cuda"), ("dprec-costs", "cpu")}
    trained = next(job for job in jobs if job.device == "cuda")
    assert planning.shell_line(trained).endswith("--device cuda")
    assert "--device" not in planning.shell_line(replace(trained, device="cpu"))
    used = []

    def execute(experiment, run, seed, out, **how):
        used.append(how["device"])

    monkeypatch.setattr(runs, "execute", execute)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    line = planning.shell_line(trained).split("dpcomm.experiments.run.sweep ")[1]
    sweep.worker_main(line.split())
    sweep.worker_main([*line.split()[:-2], "--device", "auto"])
    with pytest.raises(ValueError, match="is missing"):
        cluster.remote(trained, tmp_path)
    assert used == ["cuda"] * 3
    with pytest.raises(ValueError, match="device"):
        planning.placed(jobs, "tpu")


def test_workers_spread_over_the_gpus(made_up, monkeypatch, tmp_path):
    "Each new process is shown the one that fewest have; with one or none, all as it is."
    started = []

    class Process:
        pid, poll, wait = 0, lambda self: None, lambda self: 0

        def __init__(self, words, env, **more):
            started.append(env.get("CUDA_VISIBLE_DEVICES"))
            self.stdin = io.StringIO()

    monkeypatch.setattr(sweep.subprocess, "Popen", Process)
    jobs = [job(f"k{i}") for i in range(5)]
    for shown, wanted in (("4,7", ["4", "7", "4", "7", "4"]), ("4", ["4"] * 5)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        here, started[:] = sweep.Sweep(tmp_path, deque()), []
        for one in jobs:
            here.running.append(sweep.start(one, here))
        assert started == wanted
    here.idle.append(replace(here.running.pop(), gpu="9"))
    again = sweep.start(jobs[0], here)
    assert again.gpu == "9" and len(started) == 5, "a worker keeps its GPU"
