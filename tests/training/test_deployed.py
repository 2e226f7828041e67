"Runs that read who takes part from a deployment."

from dataclasses import replace

import numpy as np
import pytest
import torch
from tables import tabled
from torch import nn

from dpcomm import Config, Deployment, Task, mechanism, simulate
from dpcomm.datasets.images import Federation
from dpcomm.training import federated


def _deployed(**changes):
    "A small run and the deployment that says who takes part."
    clients = [(torch.ones(3, 4) * i, torch.tensor([0, 1, i % 2])) for i in range(12)]
    made = Federation.of(clients, test=clients[1])
    deployment = Deployment(12, 4, 9, 1e-3, visits=4, **changes)
    mechanism = deployment.calibrate("signsgd", 8.0)
    return Task(nn.Linear(4, 2), made, mechanism, Config(engine="loop"), 0), deployment


@tabled("sampling", ("poisson", "fixed", "replacement"))
def test_a_run_is_its_deployment(sampling):
    task, deployment = _deployed(sampling=sampling)
    run = simulate(task, deployment=deployment, progress=False)
    assert run.round == 9 and run.history[-1]["eps"] <= 8.0
    made, _, unit = federated.deployed(task, deployment)
    assert (made.config.cohort, made.config.sampling, unit) == (4, sampling, "client")
    cohorts = [made.cohort(t).tolist() for t in range(9)]
    times = np.bincount(sum(cohorts, []), minlength=12)
    assert times.max() == 4 and [made.cohort(0).tolist()] == cohorts[:1]
    if sampling == "fixed":
        assert all(len({*cohort}) == 4 for cohort in cohorts)
    free, _, _ = federated.deployed(task, replace(deployment, visits=None))
    if sampling != "replacement":
        left = [free.cohort(t) for t in range(4)]
        assert all(a.tolist() == b for a, b in zip(left, cohorts))


@tabled(
    "here, there, told",
    [
        (dict(config=Config(rounds=8)), {}, "rounds is 9 in the deployment and 8"),
        (dict(config=Config(cohort=3)), {}, "cohort is 4 in the deployment and 3"),
        (dict(config=Config(sampling="replacement")), {}, "sampling is 'poisson'"),
        (dict(visits=5), {}, "visits is 4 in the deployment and 5"),
        ({}, dict(n_clients=13), "n_clients is 13 in the deployment and 12 in the run"),
        ({}, dict(d=9), "d is 9 in the deployment and 10 in the run"),
        ({}, dict(unit="example"), "unit is 'example' in the .* and 'client' in"),
    ],
)
def test_a_run_that_contradicts_its_deployment_is_refused(here, there, told):
    task, deployment = _deployed()
    task, deployment = replace(task, **here), replace(deployment, **there)
    with pytest.raises(ValueError, match=told):
        simulate(task, deployment=deployment, unit="client", progress=False)


def test_promises_are_about_the_deployment_s_visits():
    task, deployment = _deployed()
    whole = replace(deployment, visits=None).guarantee(task.mechanism)
    assert whole.rounds == 9
    with pytest.raises(ValueError, match="covers 9 rounds, and the run counts 4"):
        simulate(task, lambda t: whole, deployment=deployment, progress=False)
    few = deployment.guarantee(task.mechanism)
    with pytest.raises(ValueError, match="covers 4 rounds, and the run counts 9"):
        federated.check_promise(few, replace(Config(), rounds=9, cohort=4), 12)
    drawn = mechanism("gaussian", clip_norm=1.0, sigma=2.0).guarantee(
        9, 1e-3, n_clients=12, cohort=4, sampling="fixed"
    )
    config = replace(Config(), rounds=9, cohort=4)
    assert federated.check_promise(drawn, config, 12).eps == drawn.eps
    with pytest.raises(ValueError, match="have used up their visits are left out"):
        federated.check_promise(drawn, config, 12, visits=4)


def test_visits_that_cannot_fill_a_cohort_are_refused_before_the_first_round():
    task, deployment = _deployed(sampling="fixed")
    tight = replace(deployment, cohort=11, rounds=12, visits=11)
    with pytest.raises(ValueError, match="clients have visits left.* raise visits"):
        for seed in range(40):
            federated.deployed(replace(task, seed=seed), tight)
