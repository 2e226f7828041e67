"`train`, the short way to a run: the same run, and what it refuses."

import numpy as np
import pytest
import torch
from tables import tabled
from torch import nn
from torch.nn import functional as F

import dpcomm
from dpcomm.core.random import seed_tree
from dpcomm.datasets.images import Federation

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
    same = dpcomm.simulate(task, deployment=deployment, progress=False)
    assert run.finished and torch.equal(run.w, same.w) and run.history == same.history
    assert run.history[-1]["eps"] == deployment.guarantee(mechanism).eps <= 5
    again = dpcomm.train(
        model, held, mechanism, deployment, seed=3, progress=False, **how
    )
    assert torch.equal(run.w, again.w)


def test_a_loss_and_scores_of_ones_own():
    model, people, test, mechanism, deployment = parts()
    people, test = ([(x, x[:, :3]) for x, _ in people], (test[0], test[0][:, :3]))
    run = dpcomm.train(
        model,
        people,
        mechanism,
        deployment,
        test=test,
        loss=F.mse_loss,
        metrics=lambda model, w, x, y: {"far": float(np.float64(len(y)))},
        progress=False,
    )
    assert run.history[-1]["far"] == 7


@tabled(
    "change, kind, says",
    [
        (dict(lrr=0.1), ValueError, "setting is 'lrr'.*did you mean 'lr'"),
        (dict(test=None), TypeError, r"pass test=\(x, y\)"),
        (dict(rounds=9), ValueError, "rounds"),
        (dict(mechanism="gaussian"), TypeError, "mechanism is 'gaussian'"),
        (dict(clients=[]), ValueError, "clients have no examples"),
    ],
)
def test_what_does_not_go_is_a_sentence(change, kind, says):
    model, people, test, mechanism, deployment = parts()
    given = dict(model=model, clients=people, mechanism=mechanism, test=test)
    with pytest.raises(kind, match=says):
        dpcomm.train(**given | dict(deployment=deployment, progress=False) | change)


def test_test_data_are_given_once():
    model, people, test, mechanism, deployment = parts()
    with pytest.raises(TypeError, match="a Federation, which has its own"):
        held = Federation.of(people, test)
        dpcomm.train(model, held, mechanism, deployment, test=test)
