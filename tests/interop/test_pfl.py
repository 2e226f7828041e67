"""The postprocessor for pfl, driven as pfl drives it: with pfl's own classes where it is
installed, else with stand-ins of the few that it takes.
"""

import copy
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
from dpcomm.core.random import Insecure, derive, private_stream, seed_tree
from dpcomm.core.vectors import flatten
from dpcomm.core.wire import parse_message
from dpcomm.datasets import images
from dpcomm.interop import pfl
from dpcomm.mechanisms import contract
from dpcomm.mechanisms.deployments import Deployment
from dpcomm.training import models

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


def test_a_seed_is_a_premise(here):
    gaussian = made("gaussian", clip_norm=1.0, sigma=1.0)
    fresh, known = (here.Private(gaussian, PLACE, seed=seed) for seed in (None, 1))
    assert fresh.key(0, "server") is None and known.key(0, 0) is not None
    assert not fresh.after(1).premises
    said = str(known.after(1))
    assert said.startswith("As if nobody could guess the key (premise keys)")


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_an_update_that_is_not_finite_is_a_zero_vector(here, odd):
    "It was an error, which depends on the client's data."
    faint = made("gaussian", clip_norm=1.0, sigma=1e-9, exact=False)
    private, codes = here.Private(faint, PLACE, seed=1), []
    for value in (odd, 0.0):
        stats = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        stats["bias"][1] = value
        user = SimpleNamespace(user_id=0)
        out, _ = private.postprocess_one_user(stats=stats, user_context=user)
        codes.append(out["code"])
    assert torch.equal(*codes)


def test_sums_and_memories_do_not_fit(here):
    summed = made("skellam", clip_norm=1.0, sigma=1.0, n_clients=5)
    remembers = made("sqsgd", bound=1.0, residuals=True)
    assert not pfl.obstacle(made("rec", clip_norm=1.0, std=0.5))
    fit = {"secure sum": summed, "keep a state": remembers}
    for why, mechanism in fit.items():
        assert why in pfl.obstacle(mechanism)
        with pytest.raises(ValueError, match=f"is '{mechanism.name}'.*{why}"):
            here.Private(mechanism, PLACE)
    gaussian = made("gaussian", clip_norm=1.0, sigma=1.0)
    for place, epsilon, says in (
        (30, None, "deployment is 30; it must be a Deployment"),
        (replace(PLACE, sampling="poisson"), None, "is 'poisson', which cannot"),
        (PLACE, 1e-6, "after round 1 epsilon would be .*above max"),
        (PLACE, 0, "max_epsilon is 0; it must be a number"),
    ):
        with pytest.raises((TypeError, ValueError), match=says):
            here.Private(gaussian, place, max_epsilon=epsilon)


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
    out = capsys.readouterr().out
    assert done == 3 and "stopped after 3 rounds: after round 4" in out
    with pytest.raises(RuntimeError, match=f"above max_epsilon = {budget:g}: raise"):
        private.postprocess_one_user(stats=stats, user_context=user)
    free = here.Private(gaussian, place, seed=1)
    free.round = 5
    assert here.Budget(free).after_central_iteration(None, None, central_iteration=4)[0]
    with pytest.raises(RuntimeError, match="round 6 exceeds the 5 rounds"):
        free.postprocess_one_user(stats=stats, user_context=user)


@pytest.mark.skipif(INSTALLED, reason="pfl is installed")
def test_without_pfl_a_sentence_says_so():
    with pytest.raises(NotInstalled, match="pip install pfl"):
        pfl.Private(made("gaussian", clip_norm=1.0, sigma=1.0), PLACE)


# ---- a whole run inside pfl


def federation():
    "A small model, and digits of thirty clients."
    data = images.load("digits")
    layers = torch.nn.Sequential(
        torch.nn.AvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(49, 10)
    )
    parts = images.iid(len(data.y), 30, seed_tree(1, "parts"))
    clients = [(data.x[part], data.y[part]) for part in parts]
    return models.initialise(layers, seed_tree(1, "init")), clients


def trained_in_pfl(mechanism, rounds):
    "Weights and bytes of pfl's own federated averaging with our postprocessor."
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data import FederatedDataset
    from pfl.data.dataset import Dataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics, StringMetricName
    from pfl.model.pytorch import PyTorchModel

    class Classifier(torch.nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = layers

        def loss(self, images, labels, eval=False):
            return torch.nn.functional.cross_entropy(self.layers(images), labels)

        def metrics(self, images, labels, eval=True):
            return {}

    class Ledger(TrainingProcessCallback):
        sent = 0

        def after_central_iteration(self, metrics, model, *, central_iteration):
            self.sent += metrics[StringMetricName(pfl.SENT)].overall_value
            return False, Metrics()

    layers, clients = federation()
    users = [Dataset(data, user_id=i) for i, data in enumerate(clients)]
    sampler = get_user_sampler("minimize_reuse", list(range(30)))
    data, model = FederatedDataset(users.__getitem__, sampler), Classifier(layers)
    place = replace(PLACE, n_clients=30, cohort=30, rounds=rounds)
    private, ledger = pfl.Private(mechanism, place, seed=1), Ledger()
    server = torch.optim.SGD(model.parameters(), lr=1.0)
    FederatedAveraging().run(
        NNAlgorithmParams(rounds, 10**9, 30, None),
        SimulatedBackend(data, data, [private]),
        PyTorchModel(model, torch.optim.SGD, server),
        NNTrainHyperParams(10, 1, 0.5),
        callbacks=[ledger],
    )
    return flatten(p.detach() for p in model.parameters()), ledger.sent


def trained_by_hand(mechanism, rounds):
    "The same run without pfl."
    model, clients = federation()
    w, sent = flatten(p.detach() for p in model.parameters()), 0
    for t in range(rounds):
        now = mechanism.for_round(t)
        total = contract.Total(now, len(w))
        for i, (x, y) in enumerate(clients):
            local = copy.deepcopy(model)
            optimizer = torch.optim.SGD(local.parameters(), lr=0.5)
            for some, labels in zip(x.split(10), y.split(10)):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(local(some), labels).backward()
                optimizer.step()
            pairs = zip(local.parameters(), model.parameters())
            u = flatten((after - before).detach() for after, before in pairs)
            data = now.encode(u, Insecure(derive(1, t, i))).to_bytes()
            total.add(parse_message(data, len(w)))
            sent += len(data)
        w = w + total.average(30, private_stream(Insecure(derive(1, t, "server"))))
        torch.nn.utils.vector_to_parameters(w, model.parameters())
    return w, sent


@pytest.mark.skipif(not INSTALLED, reason="NOT CHECKED: pfl is not installed here")
@pytest.mark.parametrize(
    "mechanism",
    [
        made("gaussian", clip_norm=1.0, sigma=2.0),
        made("rec", clip_norm=1.0, std=0.5, index_bits=7, groups=(50,) * 10),
        made("sqsgd", bound=0.3, levels=4, eps=200.0, rule="best", residuals=False),
    ],
    ids=lambda m: m.name,
)
def test_a_run_inside_pfl_has_the_bits_and_bytes_of_the_run_by_hand(mechanism):
    (w, sent), (by_hand, bytes_by_hand) = (
        train(mechanism, 3) for train in (trained_in_pfl, trained_by_hand)
    )
    assert sent == bytes_by_hand and torch.equal(w, by_hand)
