"`train`, the short way to a run: the same run, and what it refuses."

import os

import pytest
import torch
from tables import tabled
from torch import nn

import dpcomm
from dpcomm.core.random import seed_tree
from dpcomm.datasets.images import Federation
from dpcomm.training.callbacks import CSV, Callback

RULES = dict(n_clients=6, cohort=3, rounds=4, delta=1e-2, sampling="fixed")


def parts():
    "A module, clients, test data and a calibrated mechanism with its deployment."
    rng = seed_tree(0, "people")
    people = [(rng.normal(size=(5, 4)), rng.integers(3, size=5)) for _ in range(6)]
    test = rng.normal(size=(7, 4)), rng.integers(3, size=7)
    deployment = dpcomm.Deployment(**RULES)
    mechanism = deployment.calibrate("gaussian", eps=5.0, clip_norm=0.5)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3))
    return model, people, test, mechanism, deployment


def test_it_is_the_run_that_simulate_makes():
    model, people, test, mechanism, deployment = parts()
    how = dict(lr=0.2, server="sgd", server_lr=1.0)
    run = dpcomm.train(
        model, people, mechanism, deployment, test=test, seed=3, progress=False, **how
    )
    held = Federation.of(people, test)
    task = dpcomm.Task(model, held, mechanism, dpcomm.Config(**how), 3)
    same = dpcomm.simulate(
        task, deployment=deployment, train_loss=False, progress=False
    )
    assert run.finished and torch.equal(run.w, same.w) and run.history == same.history
    assert run.history[-1]["eps"] == deployment.guarantee(mechanism).eps <= 5
    again = dpcomm.train(
        model, held, mechanism, deployment, seed=3, progress=False, **how
    )
    assert torch.equal(run.w, again.w)


@tabled(
    "change, kind, says",
    [
        (dict(lrr=0.1), ValueError, "setting is 'lrr'.*did you mean 'lr'"),
        (dict(test=None), TypeError, r"pass test=\(x, y\)"),
        (dict(rounds=9), ValueError, "rounds"),
        (dict(weights=[1, 2]), ValueError, "weights is .* one for each of the 6"),
        (dict(clients=[]), ValueError, "clients have no examples"),
    ],
)
def test_what_does_not_go_is_a_sentence(change, kind, says):
    model, people, test, mechanism, deployment = parts()
    given = dict(model=model, clients=people, mechanism=mechanism, test=test)
    with pytest.raises(kind, match=says):
        dpcomm.train(**given | dict(deployment=deployment, progress=False) | change)


def test_what_no_guarantee_covers_is_left_out_unless_asked_for():
    model, people, test, mechanism, deployment = parts()
    how = dict(test=test, progress=False)
    run = dpcomm.train(model, people, mechanism, deployment, **how)
    assert all("train_loss" not in entry for entry in run.history)
    told = dpcomm.train(model, people, mechanism, deployment, train_loss=True, **how)
    assert all("train_loss" in entry for entry in told.history)
    with pytest.raises(
        TypeError, match="deployment is None; it must say who takes part"
    ):
        dpcomm.train(model, people, mechanism, None, **how)


@pytest.mark.skipif(os.name != "posix", reason="folders are closed by their mode")
def test_places_to_write_are_tried_before_the_first_round(tmp_path):
    model, people, test, mechanism, deployment = parts()
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "run"
    rounds = []

    class Told(Callback):
        def after_round(self, run, task, loss):
            rounds.append(run.round)

    for place in (dict(checkpoint=below), dict(callbacks=[CSV(below), Told()])):
        how = dict(callbacks=[Told()]) | place | dict(test=test, progress=False)
        with pytest.raises(OSError, match="cannot be written"):
            dpcomm.train(model, people, mechanism, deployment, **how)
    assert not rounds
    with pytest.raises(IsADirectoryError, match="name a file"):
        dpcomm.train(
            model, people, mechanism, deployment, test=test, checkpoint=tmp_path
        )
