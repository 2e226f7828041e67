"""One odd client among three: what it does is the same in every engine and on a node of
Flower's road, and what is wrong with it is said with its number.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from tables import tabled
from torch import nn
from torch.nn import functional as F

from dpcomm.core.random import seed_tree
from dpcomm.core.vectors import pack
from dpcomm.datasets.images import Federation
from dpcomm.mechanisms.contract import mechanism
from dpcomm.training import example_level, federated, local_sgd, models
from dpcomm.training.federated import Config, Task
from dpcomm.training.round import train_cohort

ROADS = local_sgd.ENGINES
QUICK = mechanism("gaussian", clip_norm=1.0, sigma=0.1, local=True, exact=False)
ODD = 0  # its examples come first: number 0 also fills other clients' short batches


def net():
    layers = nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)
    return models.initialise(nn.Sequential(*layers), seed_tree(0, "net"))


def people(what):
    "Client 0 is odd, clients 1 and 2 hold five and three examples."
    rng, pairs = seed_tree(0, "odd"), []
    for n in (4, 5, 3):
        x = rng.normal(size=(n, 1, 6, 6)).astype(np.float32)
        pairs.append([x, rng.integers(4, size=n)])
    x, y = pairs[ODD]
    if what in ("empty", "one"):
        pairs[ODD] = [x[: what == "one"], y[: what == "one"]]
    elif what in ("nan", "inf"):
        x[2, 0, 1, 1] = float(what)
        x[0] = float(what)
    elif what is not None:
        y[[0, 3]] = what
    return Federation.of(pairs, test=pairs[1])


def task(what, engine="loop", sent=None, **settings):
    settings = dict(rounds=2, cohort=3, batch=4, lr=0.2, engine=engine) | settings
    sent = sent or mechanism("gaussian", clip_norm=1.0, sigma=0.1, local=True)
    return Task(net(), people(what), sent, Config(**settings), 5)


def updates(what, road, clients=(0, 1, 2), **settings):
    "What each of some clients moves by in round 0."
    work, cohort = task(what, road, **settings), np.array(clients)
    streams, w = work.streams(0, cohort, "batches"), pack(work.model)
    with ThreadPoolExecutor(1) as pool:
        chunks = train_cohort(work, w, cohort, streams, pool)
        found, losses = zip(*chunks)
    return torch.cat(found), torch.cat(losses)


@tabled("road", ROADS)
def test_an_empty_client_sends_zero_and_has_no_share_in_the_loss(road):
    found, losses = updates("empty", road)
    assert (found[0] == 0).all() and (found[1:].norm(dim=1) > 1e-3).all()
    assert losses is None or len(losses) == 2
    nobody, losses = updates("empty", road, (0,))
    assert nobody.shape == (1, len(found[0])) and (nobody == 0).all()
    assert losses is None or len(losses) == 0


@tabled("engine", local_sgd.ENGINES)
def test_a_run_with_an_empty_client_goes_on_and_pays_for_its_message(engine):
    "Also a round in which nobody has an example; the loss is of the others, or 0."
    run = federated.simulate(task("empty", engine, eval_every=1), progress=False)
    assert torch.isfinite(run.w).all()
    assert run.ledger.uplink_bits == 2 * 3 * 32 * len(run.w)
    _, losses = updates("empty", engine)
    assert run.history[0]["train_loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
    work = task("empty", engine, eval_every=1)
    parts = (np.zeros(0, int),) * 3
    work = replace(work, federation=replace(work.federation, parts=parts))
    run = federated.simulate(work, progress=False)
    assert run.finished and [entry["train_loss"] for entry in run.history] == [0.0, 0.0]


@tabled("road", ROADS)
def test_a_client_with_one_example_takes_one_step(road):
    work = task("one")
    x, y = work.federation.data.x[:1], work.federation.data.y[:1]
    weights = list(work.model.parameters())
    slope = torch.autograd.grad(F.cross_entropy(work.model(x), y), weights)
    wanted = -0.2 * torch.cat([g.flatten() for g in slope])
    found, _ = updates("one", road)
    torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-6)


@tabled("road", ROADS)
@tabled("what", ["nan", "inf"])
def test_bad_inputs_are_named_and_not_blamed_on_the_rate(what, road):
    says = "client 0 holds an input with nan or inf: correct it or drop it$"
    with pytest.raises(FloatingPointError, match=says) as error:
        updates(what, road)
    assert "lr" not in str(error.value)
    healthy, odd = updates(None, road, (1, 2))[0], updates(what, road, (1, 2))[0]
    assert torch.equal(healthy, odd), "another client's nan leaked"


@tabled("label", [4, 1000, -1, -100])
def test_a_label_without_a_class_is_named(label):
    says = f"^client 0 holds a label {label}; the model's classes are 0 to 3: correct"
    with pytest.raises(ValueError, match=says):
        federated.simulate(task(label), progress=False)


@tabled("road", ROADS)
def test_a_label_that_shows_only_in_training_names_its_visit(road):
    "... as of a federation that makes its clients when they are asked for."
    with pytest.raises(ValueError, match="client .*0.* is outside the model's range"):
        updates(1000, road)


def test_the_algorithm_for_single_examples_takes_an_empty_client():
    run = example_level.simulate(task("empty", sent=QUICK), progress=False)
    assert run.finished and torch.isfinite(run.w).all()
    work = task("empty", sent=QUICK)
    parts = (np.zeros(0, int),) * 3
    work = replace(work, federation=replace(work.federation, parts=parts))
    run = example_level.simulate(work, progress=False)
    assert torch.isfinite(run.w).all() and run.history[-1]["train_loss"] == 0
