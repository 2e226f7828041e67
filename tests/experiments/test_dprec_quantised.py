"What eight bits leave of an update, on the smoke run's own task."

import pytest
import torch

from dpcomm.core.random import seed_tree
from dpcomm.core.vectors import flatten
from dpcomm.experiments import configurations
from dpcomm.experiments.dprec import quantised as dprec_quantised
from dpcomm.mechanisms.gaussian import Gaussian
from dpcomm.training import models
from dpcomm.training.federated import Task

SETTINGS = dprec_quantised.settings("smoke")


def left(mechanism):
    model = models.build(SETTINGS["net"], seed_tree(0, "init"))
    clients = configurations.mnist_clients("digits", SETTINGS["n_clients"])
    task = Task(model, clients, mechanism, SETTINGS["config"], 0)
    return dprec_quantised.survives(
        task, flatten(p.detach() for p in model.parameters())
    )


def test_noise_alone_leaves_the_length_and_rounding_toward_zero_takes_it():
    """A Gaussian with hardly any noise leaves everything; 8 bits on [-C, C] take nearly all
    of an update whose coordinates are smaller than a step; a range that fits leaves most.
    """
    runs = {r.key.partition(".")[2]: r for r in dprec_quantised.grid("smoke")}
    d = sum(p.numel() for p in models.build(SETTINGS["net"], seed_tree(0)).parameters())
    clip = dprec_quantised.run_spec(runs["fedavg"], (d,)).mechanism.clip_norm
    assert left(Gaussian(clip, 1e-9, exact=False)) == pytest.approx(1, abs=1e-3)
    kept = {}
    for kind in ("quant8", "quant8-range"):
        mechanism = dprec_quantised.run_spec(runs[kind], (d,)).mechanism
        silent = type(mechanism)(**{**vars(mechanism), "sigma": 1e-9})
        kept[kind] = left(silent)
    assert kept["quant8"] < kept["quant8-range"] <= 1 + 1e-3
    assert torch.isfinite(torch.tensor(list(kept.values()))).all()
