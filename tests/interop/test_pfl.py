"""The postprocessor for pfl, driven as pfl drives it: with pfl's own classes where it is
installed, else with stand-ins of the few that it takes.
"""

import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from dpcomm.core.random import Insecure, derive, private_stream
from dpcomm.core.vectors import flatten
from dpcomm.core.wire import parse_message
from dpcomm.interop import pfl
from dpcomm.mechanisms import contract

INSTALLED = importlib.util.find_spec("pfl") is not None
SHAPES = {"weight": (2, 4), "bias": (3,)}


class Vectors(dict):
    "pfl's MappedVectorStatistics: vectors by name, and a weight."

    def __init__(self, found, weight=None):
        super().__init__(found)
        self.weight = weight


@pytest.fixture
def here(monkeypatch):
    "The module, loaded where pfl is installed or stands in."
    if INSTALLED:
        return pfl
    stand_ins = {
        "pfl": {},
        "pfl.metrics": dict(Metrics=dict, StringMetricName=str, Summed=float),
        "pfl.postprocessor": {},
        "pfl.postprocessor.base": dict(Postprocessor=type("Postprocessor", (), {})),
        "pfl.stats": dict(MappedVectorStatistics=Vectors),
    }
    for name, parts in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(parts)
    spec = importlib.util.find_spec("dpcomm.interop.pfl")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(name, **parameters):
    return contract.mechanism(name, **parameters)


@pytest.mark.parametrize(
    "mechanism",
    [
        made("gaussian", clip_norm=1.0, sigma=0.5),  # the server's noise
        made("rec", clip_norm=1.0, std=0.5),  # a replay
        made("sqsgd", bound=0.3, fraction=0.2, residuals=False),  # rounds that differ
    ],
    ids=lambda m: m.name,
)
def test_two_rounds_are_those_of_the_mechanism(here, mechanism):
    private = here.Private(mechanism, 3, seed=7)
    for t in range(2):
        now, d = mechanism.for_round(t), 11
        total, sums, sent = contract.Total(now, d), 0, []
        for who in range(3):
            u = (
                torch.randn(d, generator=torch.Generator().manual_seed(10 * t + who))
                / 9
            )
            stats = dict(weight=u[:8].reshape(2, 4), bias=u[8:])
            user = SimpleNamespace(user_id=who)
            out, metrics = private.postprocess_one_user(stats=stats, user_context=user)
            sums = sums + out["code"]
            data = now.encode(u, Insecure(derive(7, t, who))).to_bytes()
            total.add(parse_message(data, d))
            sent.append((metrics, len(data)))
        if not INSTALLED:
            assert all(m == {here.SENT: float(n)} for m, n in sent)
        stats = Vectors({"code": sums}, weight=3.0)
        how = dict(stats=stats, central_context=None, aggregate_metrics=None)
        mean, _ = private.postprocess_server(**how)
        noise = private_stream(Insecure(derive(7, t, "server")))
        found = {name: tuple(mean[name].shape) for name in SHAPES}
        assert found == SHAPES
        wanted = total.average(3, noise)
        assert torch.equal(flatten(mean[name] for name in SHAPES), wanted)


def test_without_a_seed_the_noise_is_fresh(here):
    gaussian = made("gaussian", clip_norm=1.0, sigma=1.0)
    assert here.Private(gaussian, 2).key("server") is None
    assert here.Private(gaussian, 2, seed=1).key(0) is not None


def test_sums_and_memories_do_not_fit(here):
    summed = made("skellam", clip_norm=1.0, sigma=1.0, n_clients=5)
    remembers = made("sqsgd", bound=1.0, residuals=True)
    assert not pfl.obstacle(made("rec", clip_norm=1.0, std=0.5))
    for mechanism, why in (
        (summed, "secure sum"),
        (remembers, "clients that remember"),
    ):
        assert why in pfl.obstacle(mechanism)
        with pytest.raises(ValueError, match=f"is '{mechanism.name}'.*{why}"):
            here.Private(mechanism, 2)
    with pytest.raises(ValueError, match="cohort is 0"):
        here.Private(made("gaussian", clip_norm=1.0, sigma=1.0), 0)


@pytest.mark.skipif(INSTALLED, reason="pfl is installed")
def test_without_pfl_a_sentence_says_so():
    with pytest.raises(ImportError, match="needs pfl.*pip install pfl"):
        pfl.Private(made("gaussian", clip_norm=1.0, sigma=1.0), 2)
