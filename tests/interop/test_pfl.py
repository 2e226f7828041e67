"""The postprocessor for pfl, driven as pfl drives it: with pfl's own classes where it is
installed, else with stand-ins of the few that it takes.
"""

import importlib.util
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

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
NINE = dict(n_clients=9, sampling="fixed")
PLACE = Deployment(n_clients=3, cohort=3, rounds=2, delta=1e-2, sampling="none")
made = contract.mechanism
GAUSSIAN = made("gaussian", clip_norm=1.0, sigma=1.0)


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
        "callback.base": dict(TrainingProcessCallback=type("Callback", (), {})),
        "metrics": dict(Metrics=dict, StringMetricName=str, Summed=float),
        "postprocessor.base": dict(Postprocessor=type("Postprocessor", (), {})),
        "stats": dict(MappedVectorStatistics=Vectors),
    }
    for name, parts in stand_ins.items():
        monkeypatch.setitem(sys.modules, f"pfl.{name}", SimpleNamespace(**parts))
    spec = importlib.util.find_spec("dpcomm.interop.pfl")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def layers(u):
    return dict(weight=u[:8].reshape(2, 4), bias=u[8:])


def ask(private, u, who=0):
    "What a client of pfl makes of an update of eleven entries."
    stats, user = layers(u), SimpleNamespace(user_id=who)
    out, metrics = private.postprocess_one_user(stats=stats, user_context=user)
    return out["code"], metrics


def play(private, updates):
    "A round as pfl plays it: the server's mean, and the clients' metrics."
    draw = private.sampler(range(private.deployment.n_clients))
    cohort = sorted(draw() for _ in updates)
    codes, metrics = zip(*(ask(private, *pair) for pair in zip(updates, cohort)))
    stats = Vectors({"code": sum(codes)}, weight=float(len(codes)))
    how = dict(stats=stats, central_context=None, aggregate_metrics=None)
    return private.postprocess_server(**how)[0], metrics


def by_hand(mechanism, t, updates, seed):
    "A round without pfl: the mean, and the bytes of each message."
    now, sizes = mechanism.for_round(t), []
    total = contract.Total(now, len(updates[0]))
    for who, u in enumerate(updates):
        data = now.encode(u, Insecure(derive(seed, t, who))).to_bytes()
        total.add(parse_message(data, total.d))
        sizes.append(len(data))
    noise = private_stream(Insecure(derive(seed, t, "server")))
    return total.average(len(updates), noise), sizes


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
        updates = torch.randn(3, 11, generator=torch.Generator().manual_seed(t)) / 9
        mean, metrics = play(private, updates)
        wanted, sizes = by_hand(mechanism, t, updates, 7)
        if not INSTALLED:
            assert [*metrics] == [{here.SENT: float(n)} for n in sizes]
        assert mean["weight"].shape == (2, 4) and mean["bias"].shape == (3,)
        assert torch.equal(flatten([mean["weight"], mean["bias"]]), wanted)


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


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_an_update_that_is_not_finite_is_a_zero_vector(here, odd):
    "It was an error, which depends on the client's data."
    faint = made("gaussian", clip_norm=1.0, sigma=1e-9, exact=False)
    private, zero = here.Private(faint, PLACE, seed=1), torch.zeros(11)
    broken = zero.clone()
    broken[9] = odd
    private.sampler(range(3))()
    assert torch.equal(ask(private, broken)[0], ask(private, zero, 1)[0])


def test_sums_and_memories_do_not_fit(here):
    summed = made("skellam", clip_norm=1.0, sigma=1.0, n_clients=5)
    remembers = made("sqsgd", bound=1.0, residuals=True)
    assert not pfl.obstacle(made("rec", clip_norm=1.0, std=0.5))
    fit = {"secure sum": summed, "keep a state": remembers}
    for why, mechanism in fit.items():
        with pytest.raises(ValueError, match=f"is '{mechanism.name}'.*{why}"):
            here.Private(mechanism, PLACE)
    for place, epsilon, says in (
        (30, None, "deployment is 30; it must be a Deployment"),
        (replace(PLACE, sampling="poisson"), None, "sampling is 'poisson'; it must be"),
        (replace(PLACE, **NINE, visits=1), None, "visits is 1, which nothing here"),
        (replace(PLACE, unit="example"), None, "unit is 'example'; it must be"),
        (PLACE, 1e-6, "after round 1 epsilon would be .*above max"),
        (PLACE, 0, "max_epsilon is 0; it must be a number"),
    ):
        with pytest.raises((TypeError, ValueError), match=says):
            here.Private(GAUSSIAN, place, max_epsilon=epsilon)


def test_a_client_is_asked_once_and_only_if_it_was_drawn(here):
    "500 rounds of 3 of 9: each client comes 167 times, 10.5 more or less; six of them."
    place = replace(PLACE, **NINE, rounds=500)
    private, zero = here.Private(GAUSSIAN, place, seed=3), torch.zeros(11)
    draw, came = private.sampler("abcdefghi"), Counter()
    with pytest.raises(RuntimeError, match="client a is not of this round's cohort"):
        ask(private, zero, "a")
    for _ in range(500):
        cohort = {draw(), draw(), draw()}
        came.update(cohort)
        private.round += len(cohort) == 3
    assert private.round == 500 and max(abs(k - 500 / 3) for k in came.values()) < 64
    private.round = 0
    first = draw()
    ask(private, zero, first)
    with pytest.raises(RuntimeError, match="or answers again"):
        ask(private, zero, first)
    draw(), draw()
    with pytest.raises(RuntimeError, match="round 1 asks more than the 3 clients"):
        draw()
    with pytest.raises(ValueError, match="names 8 clients, and the deployment has 9"):
        private.sampler("abcdefgh")


def test_clients_send_the_same_dense_tensors(here):
    place, u = replace(PLACE, d=11), torch.ones(11)
    odd = layers(torch.ones(12)), dict(reversed(layers(u).items())), {}
    odd += dict(layers(u), bias=u[8:].numpy()), dict(weight=u[8:], bias=u[:8])
    for stats in (*odd, dict(layers(u), bias=u[8:].to_sparse())):
        private = here.Private(GAUSSIAN, place, seed=3)
        private.sampler(range(3))()
        ask(private, u)
        with pytest.raises(ValueError, match="client 1 sends"):
            user = SimpleNamespace(user_id=1)
            private.postprocess_one_user(stats=stats, user_context=user)
    private = here.Private(GAUSSIAN, replace(PLACE, d=12), seed=3)
    private.sampler(range(3))()
    with pytest.raises(ValueError, match="client 0 sends 11 entries.*the model's d"):
        ask(private, u)


def test_a_budget_stops_before_the_round_that_would_exceed_it(here, capsys):
    place = replace(PLACE, **NINE, rounds=5, d=11)
    gaussian = place.calibrate("gaussian", eps=8, clip_norm=1.0)
    spent = [place.after(t).guarantee(gaussian).eps for t in range(1, 6)]
    budget, zeros = (spent[2] + spent[3]) / 2, torch.zeros(3, 11)
    private = here.Private(gaussian, place, max_epsilon=budget, seed=1)
    stop = here.Budget(private).after_central_iteration
    for done in range(1, 4):
        play(private, zeros)
        assert stop(None, None, central_iteration=done - 1)[0] is (done == 3)
    assert "stopped after 3 rounds: after round 4" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match=f"above max_epsilon = {budget:g}: raise"):
        ask(private, zeros[0])
    free = here.Private(gaussian, place, seed=1)
    free.round = 5
    assert here.Budget(free).after_central_iteration(None, None, central_iteration=4)[0]
    with pytest.raises(RuntimeError, match="round 6 exceeds the 5 rounds"):
        ask(free, zeros[0])


@pytest.mark.skipif(INSTALLED, reason="pfl is installed")
def test_without_pfl_a_sentence_says_so():
    with pytest.raises(NotInstalled, match="pip install pfl"):
        pfl.Private(GAUSSIAN, PLACE)


@pytest.mark.skipif(not INSTALLED, reason="NOT CHECKED: pfl is not installed here")
@pytest.mark.parametrize(
    "mechanism",
    [
        made("gaussian", clip_norm=1.0, sigma=2.0),
        made("rec", clip_norm=1.0, std=0.5, index_bits=7, groups=(5,) * 10),
        made("sqsgd", bound=0.3, eps=200.0, fraction=0.2, residuals=False),
    ],
    ids=lambda m: m.name,
)
def test_a_run_inside_pfl_has_the_bits_and_bytes_of_its_messages_by_hand(mechanism):
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data import FederatedDataset
    from pfl.data.dataset import Dataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics, StringMetricName
    from pfl.model.pytorch import PyTorchModel

    class Classifier(torch.nn.Linear):
        def loss(self, x, y, eval=False):
            return torch.nn.functional.cross_entropy(self(x), y)

        def metrics(self, x, y, eval=True):
            return {}

    class Heard(pfl.Private):
        def postprocess_one_user(self, *, stats, user_context):
            updates[self.round, user_context.user_id] = flatten(stats.values())
            return super().postprocess_one_user(stats=stats, user_context=user_context)

    class Ledger(TrainingProcessCallback):
        def after_central_iteration(self, metrics, model, *, central_iteration):
            sent.append(metrics[StringMetricName(pfl.SENT)].overall_value)
            return False, Metrics()

    updates, sent = {}, []
    torch.manual_seed(0)
    model, x, y = Classifier(4, 10), torch.randn(6, 20, 4), torch.randint(10, (6, 20))
    w = flatten(p.detach().clone() for p in model.parameters())
    users = [Dataset([x[i], y[i]], user_id=i) for i in range(6)]
    private = Heard(mechanism, replace(PLACE, n_clients=6, cohort=6, rounds=3), seed=1)
    data = FederatedDataset(users.__getitem__, private.sampler(range(6)))
    server = torch.optim.SGD(model.parameters(), lr=1.0)
    FederatedAveraging().run(
        NNAlgorithmParams(3, 10**9, 6, None),
        SimulatedBackend(data, data, [private]),
        PyTorchModel(model, torch.optim.SGD, server),
        NNTrainHyperParams(10, 1, 0.5),
        callbacks=[Ledger()],
    )
    for t in range(3):
        mean, sizes = by_hand(mechanism, t, [updates[t, i] for i in range(6)], 1)
        assert sent[t] == sum(sizes)
        w = w + mean
    assert torch.equal(w, flatten(p.detach() for p in model.parameters()))
