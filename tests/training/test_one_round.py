"The parts of a round, each against something computed another way."

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from tables import tabled
from torch import nn

from dpcomm.core.random import seed_tree
from dpcomm.core.vectors import flatten
from dpcomm.datasets import images as data
from dpcomm.mechanisms import topk
from dpcomm.mechanisms.gaussian import Gaussian
from dpcomm.training import federated, fused, local_sgd, models, state
from dpcomm.training.round import Sums, average, one_round, train_cohort


def net():
    return models.initialise(
        nn.Sequential(
            nn.Conv2d(1, 2, 3),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(18, 3),
        ),
        seed_tree(0),
    )


def toy(n=12):
    rng = seed_tree(1)
    x = torch.from_numpy(rng.random((n, 1, 8, 8), dtype=np.float32))
    y = torch.from_numpy(rng.integers(0, 3, n))
    return data.Federation(
        data.Dataset("toy", x, y, x, y), tuple(np.array_split(np.arange(n), 4)), "toy"
    )


def weights(model):
    return flatten(p.detach() for p in model.parameters())


@tabled(
    "train",
    [
        local_sgd.train_loop,
        fused.train_fused,
        local_sgd.train_vmap,
    ],
)
def test_one_step_is_minus_lr_times_the_gradient(train):
    model, fed = net().double(), toy()
    x, y = fed.data.x.double(), fed.data.y
    loss = nn.functional.cross_entropy(model(x[:4]), y[:4])
    gradient = flatten(torch.autograd.grad(loss, list(model.parameters())))
    updates, losses = train(
        model, weights(model), x, y, torch.arange(4).view(1, 1, 4), 0.3
    )
    assert torch.allclose(updates[0], -0.3 * gradient, atol=1e-12) and torch.allclose(
        losses[0], loss.detach()
    )


def test_an_empty_cohort_averages_to_nothing():
    w, quiet = weights(net()), Gaussian(1.0, 1e-15, exact=False)
    for mechanism in (quiet, topk.TopK(0.5, 1.0, None, 4)):
        nobody = Sums(mechanism, []).of_nobody(w)
        mean = average(mechanism, nobody, w, 0, 4, seed_tree(0))
        assert mean.shape == w.shape and float(mean.abs().max()) < 1e-12


def test_one_round_moves_the_server_by_the_average():
    model, fed = net(), toy()
    config = federated.Config(cohort=4, batch=2, server="sgd", server_lr=1.0, lr=0.1)
    w = weights(model).requires_grad_()
    run = federated.Run(w, 0, False, state.Ledger(4), [], 0.0)
    task = federated.Task(model, fed, Gaussian(1e9, 1e-15, exact=False), config, 5)
    with ThreadPoolExecutor(1) as pool:
        chunks = train_cohort(
            task,
            w.detach(),
            np.arange(4),
            [
                seed_tree(5, "round", 0, "client", c, "copy", 0, "batches")
                for c in range(4)
            ],
            pool,
        )
        updates = torch.cat([kept for kept, _ in chunks])
        one_round(run, state.server_optimiser(w, config), task, pool)
    assert run.round == 1 and run.ledger.uplink_bits == 4 * 32 * len(w)
    assert torch.allclose(w.detach(), weights(model) + updates.mean(0), atol=1e-5)
