"""The engine against federated averaging in forty lines, as the page of that name has it."""

import json

import numpy as np
import pytest
import torch
from checkout import ROOT
from torch import nn

from dpcomm import mechanism
from dpcomm.core.random import seed_tree
from dpcomm.core.vectors import pack
from dpcomm.datasets.images import Federation
from dpcomm.training import models
from dpcomm.training.federated import Config, Task, simulate


@pytest.fixture(scope="module")
def federated_averaging():
    "The function, from the page's cell, without the cell's run of it."
    page = json.loads((ROOT / "nbs/training/fedavg.ipynb").read_text("utf-8"))
    code = {c["id"]: "".join(c["source"]) for c in page["cells"]}
    names = {}
    exec(code["fa000003"], names)
    exec(code["fa000007"].partition("\n\n\n")[0], names)
    return names["federated_averaging"]


@pytest.mark.parametrize("engine", ["loop", "vmap", "fused"])
@pytest.mark.parametrize(
    "sent",
    [
        mechanism("gaussian", clip_norm=0.5, sigma=0.3),
        mechanism("gaussian", clip_norm=0.5, sigma=0.3, exact=False),
    ],
    ids=["exact", "floats"],
)
def test_the_engine_ends_where_forty_lines_do(federated_averaging, sent, engine):
    "Clients of several sizes, cohorts of several sizes, two layers."
    rng = np.random.default_rng(0)
    clients = [
        (torch.from_numpy(rng.normal(size=(n, 6))).float(), torch.arange(n) % 3)
        for n in (1, 4, 7, 2, 9, 3)
    ]
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    models.initialise(net, seed_tree(0, "init"))
    w, nbytes = federated_averaging(net, clients, sent, 4, 3, lr=0.3, batch=2, seed=7)
    rules = dict(rounds=4, cohort=3, sampling="poisson", batch=2, lr=0.3)
    rules |= dict(server="sgd", server_lr=1.0, engine=engine)
    task = Task(net, Federation.of(clients, clients[2]), sent, Config(**rules), seed=7)
    run = simulate(task, progress=False)
    assert (
        nbytes
        == 4 * len(w)
        == run.ledger.uplink_bits // 8 // sum(len(task.cohort(t)) for t in range(4))
    )
    assert float((w - pack(net)).abs().max()) > 1e-2
    torch.testing.assert_close(run.w, w, rtol=0, atol=1e-6)
