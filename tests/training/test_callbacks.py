"""What follows a run: it sees every round in order, changes nothing, and a run that is
interrupted or out of budget stops between two rounds.
"""

import math
import signal
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tables import tabled
from torch import nn

from dpcomm import Deployment, train
from dpcomm.core.random import seed_tree
from dpcomm.core.vectors import pack
from dpcomm.training import callbacks, models
from dpcomm.training.callbacks import Callback

PLACE = Deployment(6, 3, 6, delta=1e-2, sampling="poisson", d=22)


def go(**settings):
    "Six rounds on made-up data, evaluated after every second."
    net = models.initialise(nn.Sequential(nn.Linear(10, 2)), seed_tree(0, "init"))
    rng = seed_tree(0, "data")
    clients = [(rng.normal(size=(8, 10)), rng.integers(0, 2, 8)) for _ in range(6)]
    made = PLACE.calibrate("gaussian", eps=8, clip_norm=1.0)
    own = dict(test=clients[0], engine="loop", eval_every=2, progress=False)
    return train(net, clients, made, PLACE, **own | settings)


class Told(Callback):
    "Everything that it is told."

    def __init__(self, stop=None, fail=None):
        self.calls, self.stop, self.fail, self.within = [], stop, fail, []

    def before_round(self, run, task):
        self.calls.append(("before", run.round))
        if run.round == self.stop:
            signal.raise_signal(signal.SIGINT)

    def within_round(self, run, task, done, visits):
        self.within.append((run.round, done, visits, len(task.cohort(run.round))))

    def on_evaluate(self, run, task):
        self.calls.append(("evaluate", run.history[-1]["round"]))

    def after_round(self, run, task, loss):
        assert math.isfinite(loss)
        self.calls.append(("after", run.round))
        if run.round == self.fail:
            raise RuntimeError("enough")

    def close(self, run, task):
        self.calls.append(("close", run.round))


def test_rounds_and_evaluations_are_told_in_order_and_change_nothing():
    told = Told()
    run = go(callbacks=[told], rounds=6)
    expected = []
    for t in range(6):
        expected += [("before", t)]
        expected += [("evaluate", t + 1)] * (t % 2) + [("after", t + 1)]
    assert told.calls == [*expected, ("close", 6)]
    assert {t for t, *_ in told.within} <= set(range(6))
    for t in range(6):
        mine = [line for line in told.within if line[0] == t]
        assert [done for _, done, *_ in mine] == [*range(1, len(mine) + 1)]
        assert all(n == len(mine) == cohort for *_, n, cohort in mine)
    plain = go()
    assert torch.equal(plain.w, run.w) and plain.history == run.history


STOPPED = "after round 3, which is saved"


@tabled("how, error", [({"fail": 3}, "enough"), ({"stop": 2}, STOPPED)])
def test_what_ends_a_run_waits_for_its_round_and_closes(how, error, tmp_path, capsys):
    "A callback that raises, and an interruption."
    other, path = Told(), tmp_path / "run.pt"
    with pytest.raises((RuntimeError, KeyboardInterrupt), match=error):
        go(callbacks=[Told(**how), other], checkpoint=path)
    assert other.calls[-1] == ("close", 3)
    assert ("finishing this round" in capsys.readouterr().err) == ("stop" in how)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    whole = go(checkpoint=path, resume=True, callbacks=[told := Told()])
    assert told.calls[0] == ("before", 3) and torch.equal(whole.w, go().w)
    assert whole.history == go().history


def test_a_score_may_be_numpys_and_sees_the_weights_in_the_module():
    run = go(metrics=lambda net, w, *_: {"own": np.float32((pack(net) == w).all())})
    assert [type(entry["own"]) for entry in run.history] == [float] * 3
    assert {entry["own"] for entry in run.history} == {1.0}


@tabled("columns", [80, 120])
def test_a_bar_fits_and_shows_what_matters(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("DPCOMM_PROGRESS", "1")
    label = "lenet5.eps3.fedavg, seed 0 (12 of 80, 7.3 h left in total)"
    run = go(progress=label)
    last = capsys.readouterr().err.split("\r")[-1].rstrip()
    assert len(last) < columns and last.startswith("lenet5.eps3.fedavg")
    accuracy, eps = run.history[-1]["accuracy"], run.history[-1]["eps"]
    assert f"accuracy={accuracy:.1f}%, eps={eps:.2f}, MiB=" in last
    assert "100%|" in last and "6/6" in last


def test_a_log_has_a_line_now_and_then_also_within_a_long_round(capsys):
    shows = callbacks.Progress("label", False, every=0.0)
    run = SimpleNamespace(round=0, history=[])
    task = SimpleNamespace(config=SimpleNamespace(rounds=2))
    shows.before_round(run, task)
    for done in range(1000, 500_001, 1000):
        shows.within_round(run, task, done, 1_000_000)
    shows.close(run, task)
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("label: 0.5/2 rounds, ") and last.endswith(" left")


@tabled("asked, terminal, bar", [("1", 0, 1), ("0", 1, 0), (None, 1, 1), (None, 0, 0)])
def test_a_terminal_has_a_bar_and_a_log_has_lines(asked, terminal, bar, monkeypatch):
    monkeypatch.delenv("DPCOMM_PROGRESS", raising=False)
    if asked is not None:
        monkeypatch.setenv("DPCOMM_PROGRESS", asked)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    shell = SimpleNamespace(get_ipython=lambda: None)
    monkeypatch.setitem(sys.modules, "IPython", shell)
    (shows,) = callbacks.progress_of("label")
    assert shows.terminal == bool(bar) and callbacks.progress_of(False) == ()
    shell.get_ipython = lambda: "a shell"
    if asked is None and not terminal:
        assert callbacks.progress_of(True) == ()


def test_a_budget_stops_the_run_before_the_round_that_would_exceed_it(tmp_path, capsys):
    path, whole = tmp_path / "run.pt", go()
    spent = [entry["eps"] for entry in go(eval_every=1).history]
    budget = (spent[2] + spent[3]) / 2
    how = dict(checkpoint=path, resume=True)
    run = go(max_epsilon=budget, **how)
    assert (run.round, run.finished) == (3, False)
    assert run.history[-1]["eps"] == spent[2] <= budget
    assert torch.equal(pack(run.model()), run.w) and len(str(run).splitlines()) == 3
    assert "stopped after 3 of 6 rounds: the next" in capsys.readouterr().out
    assert go(max_epsilon=budget, **how).history == run.history
    for limit, done, more in ((spent[1], 3, how), (spent[0] / 2, 1, {})):
        with pytest.raises(ValueError, match=f"and after round {done} epsilon is"):
            go(max_epsilon=limit, **more)
    raised = go(max_epsilon=9.0, **how)
    assert raised.finished and raised.history == whole.history
    assert torch.equal(raised.w, whole.w)
