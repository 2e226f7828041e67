"""The postprocessor for pfl, driven as pfl drives it: with pfl's own classes where it is
installed, else with stand-ins of the few that it takes.
"""

import importlib
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from checkout import cells

from dpcomm.core.checks import NotInstalled
from dpcomm.core.random import Insecure, derive, private_stream
from dpcomm.core.vectors import flatten
from dpcomm.core.wire import parse_message
from dpcomm.interop import pfl
from dpcomm.mechanisms import contract
from dpcomm.mechanisms.deployments import Deployment

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
        "pfl.callback": {},
        "pfl.callback.base": dict(TrainingProcessCallback=type("Callback", (), {})),
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


PLACE = Deployment(n_clients=3, cohort=3, rounds=2, delta=1e-2, sampling="none")


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
    private = here.Private(mechanism, PLACE, seed=7)
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


def test_the_guide_is_run_whole(here, monkeypatch):
    "Its last cell needs pfl, or here the stand-ins."
    monkeypatch.setitem(sys.modules, "dpcomm.interop.pfl", here)
    page = {}
    for cell in cells(Path("nbs/use/pfl.ipynb")):
        if cell.kind == "code":
            exec(cell.source, page)
    private, (budget,) = page["private"], page["callbacks"]
    assert page["postprocessors"] == [private] and budget.private is private
    assert private.after(100) == page["where"].guarantee(page["mechanism"])
    assert 0 < private.after(40).eps < private.after(100).eps <= 4


def test_without_a_seed_the_noise_is_fresh(here):
    gaussian = made("gaussian", clip_norm=1.0, sigma=1.0)
    assert here.Private(gaussian, PLACE).key("server") is None
    assert here.Private(gaussian, PLACE, seed=1).key(0) is not None


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
            here.Private(mechanism, PLACE)
    gaussian = made("gaussian", clip_norm=1.0, sigma=1.0)
    with pytest.raises(TypeError, match="deployment is 30; it must be a dpcomm.Depl"):
        here.Private(gaussian, 30)
    with pytest.raises(ValueError, match="is 'poisson', and pfl draws cohorts of a f"):
        here.Private(gaussian, replace(PLACE, sampling="poisson"))
    tight = dict(max_epsilon=1e-6)
    with pytest.raises(ValueError, match="after round 1 epsilon would be .*above max"):
        here.Private(gaussian, PLACE, **tight)
    with pytest.raises(ValueError, match="max_epsilon is 0; it must be a number"):
        here.Private(gaussian, PLACE, max_epsilon=0)


def test_a_budget_stops_before_the_round_that_would_exceed_it(here, capsys):
    place = Deployment(
        n_clients=9, cohort=3, rounds=5, d=11, delta=1e-2, sampling="fixed"
    )
    gaussian = place.calibrate("gaussian", eps=8, clip_norm=1.0)
    spent = [place.after(t).guarantee(gaussian).eps for t in range(1, 6)]
    budget = (spent[2] + spent[3]) / 2
    private = here.Private(gaussian, place, max_epsilon=budget, seed=1)
    stats = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    stop, done = here.Budget(private), 0
    while True:
        for who in range(3):
            user = SimpleNamespace(user_id=who)
            code, _ = private.postprocess_one_user(stats=stats, user_context=user)
        how = dict(central_context=None, aggregate_metrics=None)
        summed = Vectors({"code": 3 * code["code"]}, weight=3.0)
        private.postprocess_server(stats=summed, **how)
        done += 1
        if stop.after_central_iteration(None, None, central_iteration=done - 1)[0]:
            break
    assert done == 3 and "stopped after 3 rounds: after round 4" in (
        capsys.readouterr().out
    )
    with pytest.raises(RuntimeError, match=f"above max_epsilon = {budget:g}: raise"):
        private.postprocess_one_user(stats=stats, user_context=user)
    free = here.Private(gaussian, place, seed=1)
    free.round = 5
    assert here.Budget(free).after_central_iteration(None, None, central_iteration=4)[0]
    with pytest.raises(RuntimeError, match="round 6 of 5 that were promised"):
        free.postprocess_one_user(stats=stats, user_context=user)


@pytest.mark.skipif(INSTALLED, reason="pfl is installed")
def test_without_pfl_a_sentence_says_so():
    with pytest.raises(NotInstalled, match="pfl is .* the extra pfl brings"):
        pfl.Private(made("gaussian", clip_norm=1.0, sigma=1.0), PLACE)
