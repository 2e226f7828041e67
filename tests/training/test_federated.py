"federated: engines, sampling, optimisers, ledgers, resume, workers, divergence."

import dataclasses
import functools
import io
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checkout import ROOT
from hypothesis import given
from hypothesis import strategies as some
from laws import count_bounds, drawn
from tables import tabled
from torch import nn

from dpcomm.core import files
from dpcomm.core import vectors as core
from dpcomm.core.random import seed_tree
from dpcomm.core.wire import Bits
from dpcomm.datasets import images as data
from dpcomm.mechanisms import contract
from dpcomm.mechanisms.gaussian import Gaussian
from dpcomm.mechanisms.rec import Rec
from dpcomm.privacy.guarantee import PREMISES, Guarantee
from dpcomm.training import federated, fused, local_sgd, models
from dpcomm.training import state as state_module
from dpcomm.training.round import Sums
from dpcomm.training.state import sample_cohort

# ---- a federation that trains in milliseconds


def tiny_model(seed=0) -> nn.Sequential:
    layers = nn.Conv2d(1, 3, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()
    net = nn.Sequential(*layers, nn.Linear(27, 4))
    return models.initialise(net, seed_tree(seed, "model"))


def other_activation(model) -> nn.Sequential:
    "A model of the same state that computes something else."
    (k,) = [i for i, layer in enumerate(model) if isinstance(layer, nn.ReLU)]
    model[k] = nn.Tanh()
    return model


def images(n: int, side: int, classes: int, *path) -> tuple:
    rng = seed_tree(0, "images", *path)
    x = torch.from_numpy(rng.random((n, 1, side, side), dtype=np.float32))
    return x, torch.from_numpy(rng.integers(0, classes, n))


def federation(
    sizes=(5, 9, 2, 6, 4, 7), side=8, classes=4, name="toy"
) -> data.Federation:
    x, y = images(sum(sizes), side, classes, name)
    x_test, y_test = images(20, side, classes, name, "test")
    order = seed_tree(0, "parts").permutation(sum(sizes))
    cuts = tuple(np.split(order, np.cumsum(sizes)[:-1]))
    return data.Federation(data.Dataset(name, x, y, x_test, y_test), cuts, "toy")


def altered(toy) -> data.Federation:
    "The same images but for one pixel."
    x = toy.data.x.clone()
    x[3, 0, 2, 2] += 1 / 256
    return dataclasses.replace(toy, data=dataclasses.replace(toy.data, x=x))


TOY = federation()
CONFIG = federated.Config(
    rounds=4, cohort=3, batch=4, lr=0.5, server_lr=0.1, eval_every=2, engine="loop"
)
GAUSSIAN = Gaussian(0.5, 0.3)
REC = Rec(0.5, 0.2, 3, (27, 3, 108, 4))
MECHANISMS = {
    "gaussian": GAUSSIAN,
    "local gaussian": Gaussian(0.5, 0.3, local=True),
    "rec": REC,
}


def go(
    mechanism=GAUSSIAN, config=CONFIG, seed=3, toy=TOY, model=None, **more
) -> federated.Run:
    task = federated.Task(model or tiny_model(), toy, mechanism, config, seed)
    return federated.simulate(task, progress=False, **more)


def outcome(run: federated.Run) -> dict:
    "All that a run leaves, times aside, comparable bit by bit."
    return {
        "w": run.w.numpy().tobytes(),
        "round": run.round,
        "finished": run.finished,
        "ledger": dataclasses.asdict(run.ledger),
        "history": json.dumps(run.history),
    }


# ---- engines


@functools.cache
def looped(name):
    """What the loop makes of a model in float64, with clients of unequal size, two epochs
    and last batches that are not full.
    """
    if name == "resnet110":  # a block a stage has all kinds of its layers
        model = models.initialise(models._resnet(1), seed_tree(0))
    else:
        model = models.build(name, seed_tree(0))
    w = core.flatten(p.detach() for p in model.parameters()).double()
    x, y = images(8, 28, 10)
    parts = np.split(seed_tree(1).permutation(8), [2, 5, 6])
    rngs = [seed_tree(0, i) for i in range(4)]
    plan = torch.from_numpy(local_sgd.batch_plan(parts, 2, 2, rngs))
    assert plan.shape == (4, 4, 2) and (plan < 0).any()
    work = model, w, x.double(), y, plan, 0.1
    return work, local_sgd.train_loop(*work)


@tabled("name", [name for name in models.MODELS if name != "lstm"])
@tabled("engine", [e for e in local_sgd.ENGINES if e != "loop"])
def test_engines_agree_with_the_loop(engine, name):
    work, (updates, losses) = looped(name)
    normed = any(isinstance(layer, nn.GroupNorm) for layer in work[0])
    if engine in ("fused", "graphed") and normed:
        told = "is not supported by this engine"
        with pytest.raises(ValueError, match=told):
            local_sgd.ENGINES[engine](*work)
        return
    others, other_losses = local_sgd.ENGINES[engine](*work)
    assert updates.dtype == others.dtype == torch.float64
    assert updates.shape == (4, len(work[1])) and (updates.norm(dim=1) > 1e-3).all()
    gap = (others - updates).norm(dim=1) / updates.norm(dim=1)
    assert gap.max() < 1e-10, f"{engine} is off by {gap.tolist()} of each update"
    assert torch.allclose(losses, other_losses.double(), rtol=1e-6)


@dataclasses.dataclass(frozen=True)
class Diary(contract.Mechanism):
    "A mechanism whose clients remember how often they came, and what they saw last."

    name, server_is_deterministic = "diary", False

    def client_memory(self, n, d):
        return torch.zeros(n, 2, d)

    def simulate_with_memory(self, memory, u, rng):
        return torch.zeros_like(u), torch.stack([memory[:, 0] + 1, u], 1)

    def simulate(self, u, rng):
        raise AssertionError("a mechanism with a memory is not simulated without it")

    def bits(self, d):
        return Bits.of(8, 0, 0, d)


def test_clients_remember_from_visit_to_visit_and_across_a_stop(tmp_path):
    config = dataclasses.replace(CONFIG, rounds=6, server="sgd")
    drawn = [
        sample_cohort(6, 3, "fixed", seed_tree(3, "round", t, "sample"))
        for t in range(6)
    ]
    visits, whole = np.bincount(np.concatenate(drawn), minlength=6), go(Diary(), config)
    assert whole.memory[:, 0, 0].tolist() == visits.tolist() and visits.max() > 1
    seen = whole.memory[:, 1].norm(dim=1) > 0
    assert seen.tolist() == (visits > 0).tolist()
    pieces = dict(checkpoint=tmp_path / "run.pt", resume=True, max_seconds=0)
    while not (run := go(Diary(), config, **pieces)).finished:
        pass
    assert torch.equal(whole.memory, run.memory) and torch.equal(whole.w, run.w)
    keep = Sums(Diary(), [None] * 3, whole.memory, np.array([4, 1, 2]))
    before, d = whole.memory[:, 0, 0].clone(), whole.memory.shape[2]
    assert keep(torch.ones(2, d), slice(1, 3)).shape == (d,)
    assert (whole.memory[:, 0, 0] - before).tolist() == [0, 1, 1, 0, 0, 0]
    with pytest.raises(ValueError, match="sampling, where clients keep a memory,"):
        go(Diary(), dataclasses.replace(config, sampling="replacement"))


def scores(model, w, x):
    "What a module makes of inputs with a vector of weights."
    return torch.func.functional_call(model, core.unpack(model, w), (x,))


@tabled("engine", local_sgd.ENGINES)
def test_held_weights_stay_and_the_others_move_as_if_alone(engine):
    "Against plain SGD whose gradient is multiplied by the mask, in float64."
    model, (x, y) = tiny_model(), images(6, 8, 4)
    w = core.flatten(p.detach() for p in model.parameters()).double()
    mask = torch.from_numpy(seed_tree(2).random(len(w)) < 0.3)
    plan = torch.tensor([[[0, 1], [2, 3]], [[4, 5], [0, 4]]])
    visit = model, w, x.double(), y, plan, 0.3, mask.double()
    updates, _ = local_sgd.ENGINES[engine](*visit)
    assert (updates[:, ~mask] == 0).all() and (updates[:, mask] != 0).any(1).all()
    for client, update in zip(plan, updates):
        point = w.clone()
        for index in client:
            free = point.clone().requires_grad_()
            loss = F.cross_entropy(scores(model, free, x[index].double()), y[index])
            point = point - 0.3 * mask.double() * torch.autograd.grad(loss, free)[0]
        torch.testing.assert_close(update, point - w, rtol=1e-9, atol=1e-12)


@tabled("engine", local_sgd.ENGINES)
def test_one_output_trains_with_binary_cross_entropy(engine):
    """Against the gradient of log(1 + exp(-s)) written out, on sparse inputs of which
    one client uses few columns.
    """
    layers = nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 1)
    model = models.initialise(nn.Sequential(*layers), seed_tree(3))
    x = torch.from_numpy(seed_tree(0, "sparse").random((4, 1, 8, 8)) < 0.1).double()
    y = torch.tensor([0, 1, 1, 0])
    w = core.flatten(p.detach() for p in model.parameters()).double()
    plan = torch.tensor([[[0, 1], [1, -1]], [[2, 3], [3, 2]]])
    updates, losses = local_sgd.ENGINES[engine](model, w, x, y, plan, 0.5)
    for client, update, loss in zip(plan, updates, losses):
        point, seen = w.clone(), []
        for index in client:
            index, free = index[index >= 0], point.clone().requires_grad_()
            odds = scores(model, free, x[index])[:, 0]
            wrong = torch.where(y[index] == 1, -odds, odds)
            value = torch.log1p(torch.exp(wrong)).mean()
            point = point - 0.5 * torch.autograd.grad(value, free)[0]
            seen.append(float(value.detach()))
        torch.testing.assert_close(update, point - w, rtol=1e-9, atol=1e-12)
        assert float(loss) == pytest.approx(np.mean(seen), rel=1e-6)


@drawn
@given(
    some.lists(some.integers(1, 9), min_size=1, max_size=5),
    some.integers(1, 3),
    some.integers(1, 5),
)
def test_a_plan_shows_every_image_once_an_epoch(sizes, epochs, batch):
    parts = np.split(np.arange(sum(sizes)) + 100, np.cumsum(sizes)[:-1])
    streams = [seed_tree(0, i) for i in range(len(parts))]
    plan = local_sgd.batch_plan(parts, epochs, batch, streams)
    steps = [epochs * -(-len(part) // batch) for part in parts]
    assert plan.shape == (len(parts), max(steps), batch)
    assert local_sgd.batch_plan(parts, 1, 2**40, streams).shape[2] == 4096
    for rows, part, n in zip(plan, parts, steps):
        assert (rows[n:] == -1).all() and (rows[:n, 0] >= 0).all()
        for epoch in rows[:n].reshape(epochs, -1):
            assert sorted(epoch[epoch >= 0]) == sorted(part)
            assert (epoch[len(part) :] == -1).all()


def test_the_engine_follows_model_and_device():
    names = "lenet5", "cnn", "lstm"
    small, large, wide = (models.build(name, seed_tree(0)) for name in names)
    assert local_sgd.pick_engine("auto", small) == ("fused", "")
    assert local_sgd.pick_engine("auto", small, "cuda") == ("graphed", "")
    assert local_sgd.pick_engine("auto", wide, "cuda")[0] == "vmap"
    assert local_sgd.pick_engine("auto", small, "meta") == ("vmap", "")
    assert local_sgd.pick_engine("loop", small, "cuda") == ("loop", "")
    together = [local_sgd.clients_per_call("fused", model) for model in (small, large)]
    assert together == [10, 2]
    matrix = nn.Sequential(nn.Linear(70_000, 1))
    assert local_sgd.clients_per_call("fused", matrix) == 1
    assert local_sgd.clients_per_call("vmap", small) == 100
    assert local_sgd.clients_per_call("loop", small) == 1
    name, why = local_sgd.pick_engine("auto", wide)
    assert name == "loop" and why.startswith("CharLSTM is not a plain sequence")
    with pytest.raises(ValueError, match="CharLSTM is not a plain.*use engine='loop"):
        local_sgd.pick_engine("fused", wide)
    with pytest.raises(ValueError, match="CharLSTM is not a plain"):
        local_sgd.pick_engine("graphed", wide, "cuda")


@tabled(
    "layer",
    [
        nn.Conv2d(1, 2, 3, stride=2),
        nn.Conv2d(1, 2, 3, bias=False),
        nn.Conv2d(1, 2, 3, dilation=2),
        nn.Conv2d(2, 2, 3, groups=2),
        nn.MaxPool2d(3),
        nn.Conv2d(1, 2, 3, padding="same"),
        nn.MaxPool2d(2, stride=1),
        nn.Linear(3, 2, bias=False),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.AvgPool2d(2, divisor_override=3),
        nn.AvgPool2d(2, ceil_mode=True),
        nn.GELU(),
        nn.Flatten(0),
    ],
    ids=str,
)
def test_what_is_not_written_out_is_refused(layer):
    "A stride that is ignored would give a wrong gradient without a word."
    why = fused.unsupported_layer(nn.Sequential(layer))
    assert "is not supported by this engine" in why


def test_a_product_that_is_less_than_float32_is_not_used(monkeypatch):
    monkeypatch.setattr(fused, "product_error", lambda: 2e-3)
    with fused.fast_products():
        assert torch.get_float32_matmul_precision() == "highest"


# ---- sampling


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_every_client_is_sampled_at_the_stated_rate(sampling):
    """Exact binomial bounds on each of 12 clients and on each of 66 pairs; false-alarm
    rate 1e-6.
    """
    streams = (seed_tree(0, sampling, t) for t in range(2000))
    cohorts = [sample_cohort(12, 5, sampling, rng) for rng in streams]
    taken = np.array([np.isin(np.arange(12), c) for c in cohorts])
    together = 5 / 12 * (5 / 12 if sampling == "poisson" else 4 / 11)
    low, high = count_bounds(2000, 5 / 12, 78)
    assert (low <= taken.sum(0)).all() and (taken.sum(0) <= high).all()
    low, high = count_bounds(2000, together, 78)
    every = itertools.combinations(range(12), 2)
    pairs = [(taken[:, a] & taken[:, b]).sum() for a, b in every]
    assert low <= min(pairs) and max(pairs) <= high


# ---- ledger of bits


def algorithm_5(n_clients, rounds, bits: Bits, model_bits: int, replay: bool) -> tuple:
    """Uplink and downlink bits with every message of every client's history kept in a
    list. [dprec Alg. 5]
    """
    histories = {c: [("initial seed", 32)] for c in range(n_clients)}
    uplink = downlink = 0
    for cohort in rounds:
        for client in sorted(set(cohort)):
            size = sum(length for _, length in histories[client])
            downlink += min(size, model_bits) if replay else model_bits
            histories[client] = []
        messages = [(client, bits.content) for client in cohort]
        uplink += sum(length for _, length in messages)
        for client, history in histories.items():
            history += [message for message in messages if message[0] != client]
    return uplink, downlink


@drawn
@given(
    some.integers(1, 5),
    some.data(),
    some.integers(1, 40),
    some.integers(0, 32),
    some.integers(0, 400),
    some.booleans(),
)
def test_the_ledger_is_algorithm_5(
    n_clients, more, payload, seed_bits, model_bits, replay
):
    clients = some.lists(some.integers(0, n_clients - 1), max_size=4).map(sorted)
    rounds = more.draw(some.lists(clients, max_size=12))
    bits, ledger = Bits.of(payload, 7, seed_bits, 3), state_module.Ledger(n_clients)
    for t, cohort in enumerate(rounds):
        ledger.record(t, np.array(cohort, dtype=int), bits, model_bits, replay)
    wanted = algorithm_5(n_clients, rounds, bits, model_bits, replay)
    assert (ledger.uplink_bits, ledger.downlink_bits) == wanted
    assert ledger.header_bits == 7 * sum(map(len, rounds))


@tabled("server, state", [("sgd", 0), ("momentum", 1), ("adam", 2)])
def test_a_run_fills_the_ledger(server, state):
    """Every round counted with the mechanism's bits; the model is downloaded with the
    optimiser only where it can be replaced.
    """
    longer = Rec(0.5, 0.2, 8, (1,) * 142)
    for mechanism, vectors in ((GAUSSIAN, 1), (longer, 1 + state)):
        run = go(mechanism, dataclasses.replace(CONFIG, server=server))
        streams = [seed_tree(3, "round", t, "sample") for t in range(4)]
        rounds = [sample_cohort(6, 3, "fixed", rng).tolist() for rng in streams]
        bits, last = mechanism.bits(142), run.history[-1]
        full, replay = 32 * 142 * vectors, mechanism.server_is_deterministic
        expected = algorithm_5(6, rounds, bits, full, replay)
        assert (last["uplink_bits"], last["downlink_bits"]) == expected
        assert last["header_bits"] == 12 * bits.header
        assert last["uplink_bits"] == 12 * bits.content


# ---- what a run reports


def promise(
    rounds, eps=1.0, sampling="fixed", relation="add-remove", trust="central", **more
):
    "A guarantee about CONFIG's run of six clients, but for what is given."
    about = dict(unit="client", relation=relation, sampling=sampling, trust=trust)
    about |= dict(accountant="pld", scope="total", rounds=rounds)
    about |= dict(q=CONFIG.cohort / 6 if sampling != "none" else 1.0)
    return Guarantee(eps, 1e-5, **about | more)


FREE = dict(sampling="none", relation="zero-out")
NULL = dict(sampling="poisson", relation="poisson-null")


@tabled(
    "why, sampling, told",
    [
        ("its sampling is 'poisson', the run's", "fixed", dict(sampling="poisson")),
        ("its sampling is 'fixed', the run's is 'poisson'", "poisson", {}),
        ("its sampling is 'fixed', the run's is 'repl", "replacement", {}),
        ("its rate q is 0.1, the run's is 3 of 6", "fixed", dict(q=0.1)),
        ("its rate q is 0.499999, the run's is", "fixed", dict(q=0.499999)),
        ("its rate q is None", "fixed", dict(q=None)),
        ("it covers 7 rounds, and the run counts 4", "fixed", dict(rounds=7)),
        ("it covers None rounds", "fixed", dict(rounds=None)),
        ("a client that joins changes who else", "fixed", dict(sampling="none")),
        ("a client may be drawn twice in a round", "replacement", FREE),
        ("absent clients send nothing here, and not null", "poisson", NULL),
    ],
)
def test_a_guarantee_about_another_run_is_refused_before_the_first_round(
    why, sampling, told
):
    config = dataclasses.replace(CONFIG, rounds=4, sampling=sampling)
    with pytest.raises(
        ValueError, match="does not match this run: .*" + re.escape(why)
    ):
        go(config=config, guarantee=lambda t: promise(**({"rounds": t} | told)))
    stated = promise(**({"rounds": 4} | told))
    helps = None if {"q", "rounds"} & {*told} else "sampling"
    helps = "neighbours" if stated.relation in federated.NULL else helps
    for name in PREMISES:
        marked = stated.assuming(name)
        if name == helps:
            assert federated.check_promise(marked, config, 6) is marked
            (line,) = federated.relied_on(marked, config, 6)
            other = name == "neighbours"
            said = "does not apply to this run" if other else PREMISES[name]
            assert said in line and why in line
        else:
            with pytest.raises(ValueError, match=re.escape(why)):
                federated.check_promise(marked, config, 6)
    if helps:
        with pytest.raises(ValueError, match=re.escape(f"assuming({helps!r})")):
            federated.check_promise(stated, config, 6)


def test_whom_a_promise_protects_and_from_whom_is_compared():
    noisy = contract.mechanism("gaussian", clip_norm=1.0, sigma=1.0)
    config = dataclasses.replace(CONFIG, rounds=4, sampling="fixed")
    none = dict(sampling="none", relation="zero-out")
    right, every = promise(4, **none), tuple(PREMISES)
    assert federated.check_promise(right, config, 6, 4, noisy) is right
    alike = dataclasses.replace(right, unit="example")
    with pytest.raises(ValueError, match="one example, and the run protects one"):
        federated.check_promise(alike.assuming(*every), config, 6, 4, noisy)
    assert federated.check_promise(alike, config, 6, 4, noisy, "example") is alike
    for trust in ("secagg", "local"):
        seen = promise(4, trust=trust, **none)
        with pytest.raises(ValueError, match=f"its trust is '{trust}'"):
            federated.check_promise(seen.assuming(*every), config, 6, 4, noisy)
    own = contract.mechanism("gaussian", clip_norm=1.0, sigma=1.0, local=True)
    assert federated.check_promise(seen, config, 6, 4, own) is seen


def test_a_null_slot_promise_needs_a_premise_and_the_engine_prints_it(capsys):
    rec = contract.mechanism("rec", clip_norm=1.0, std=1.0)
    config = dataclasses.replace(CONFIG, rounds=2, sampling="replacement", eval_every=2)

    def told(t):
        return rec.guarantee(t, 1e-3, n_clients=6, cohort=CONFIG.cohort)

    with pytest.raises(ValueError, match="hold other clients' messages here"):
        go(rec, config, guarantee=told)
    assert not capsys.readouterr().out
    go(rec, config, guarantee=lambda t: told(t).assuming("neighbours", "keys"))
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("so it does not apply to this run")
    assert "a null message" in first
    assert "assumption about keys: as if nobody could guess the key" in second


def test_a_promise_counts_on_shares_of_noise_that_come():
    "Ten shares are promised and three come: the noise would be half of what is said."
    made = dict(clip_norm=0.5, sigma=1.0, fraction=1.0)
    ten, three = (contract.mechanism("topk", n_clients=n, **made) for n in (10, 3))
    config = dataclasses.replace(CONFIG, rounds=2, cohort=3, sampling="fixed")
    promised = ten.guarantee(2, 1e-5)
    with pytest.raises(ValueError, match="3 clients send noise, .* needs 10"):
        federated.check_promise(promised, config, 20, 2, ten)
    assert federated.check_promise(three.guarantee(2, 1e-5), config, 20, 2, three)
    four = contract.mechanism("topk", n_clients=4, **made)
    with pytest.raises(ValueError, match="3 clients send noise, .* needs 4"):
        federated.check_promise(four.guarantee(2, 1e-5), config, 20, 2, four)
    drawn = dataclasses.replace(config, sampling="poisson")
    with pytest.raises(ValueError, match="may bring fewer noise shares"):
        federated.check_promise(three.guarantee(2, 1e-5), drawn, 20, 2, three)
    said = three.guarantee(2, 1e-5, n_clients=20, cohort=3, sampling="poisson")
    assert federated.check_promise(said, drawn, 20, 2, three) is said and said.premises
    with pytest.raises(ValueError, match="it covers 2 rounds, and the run counts 5"):
        federated.check_promise(said, drawn, 20, 5, three)
    with pytest.raises(ValueError, match="clients send noise"):
        go(ten, config, guarantee=lambda t: ten.guarantee(t, 1e-5))


def test_history_is_entered_every_eval_and_at_the_end():
    longer = dataclasses.replace(CONFIG, rounds=5)
    run = go(config=longer, guarantee=lambda t: promise(t, eps=t / 2))
    assert [entry["round"] for entry in run.history] == [2, 4, 5]
    assert [entry["eps"] for entry in run.history] == [1.0, 2.0, 2.5]
    assert run.finished and run.round == 5 and run.seconds > 0
    assert all(entry["eps"] is None for entry in go().history)
    assert all(math.isfinite(entry["train_loss"]) for entry in run.history)


# ---- workers and order


@tabled("name", MECHANISMS)
@tabled("engine", local_sgd.ENGINES)
def test_workers_change_nothing(engine, name):
    "24 clients of one round over 1 and 3 threads, bit for bit."
    toy = federation(sizes=tuple(3 + i % 5 for i in range(24)))
    config = dataclasses.replace(CONFIG, rounds=2, cohort=24, engine=engine)
    one, three = (go(MECHANISMS[name], config, toy=toy, workers=n) for n in (1, 3))
    assert outcome(one) == outcome(three)


def test_copies_of_a_client_train_and_hide_apart():
    """With replacement one client may fill several slots; each has its own batches and
    its own noise.
    """
    toy = federation(sizes=(16,))
    rules = dict(rounds=1, cohort=3, sampling="replacement", server="sgd")
    config, seen = dataclasses.replace(CONFIG, **rules, server_lr=1.0), []

    class Spy(federated.Plain):
        def simulate(self, u, rng):
            seen.append((u, [r.random() for r in rng]))
            return u

    go(Spy(), config, toy=toy)
    updates = torch.cat([u for u, _ in seen])
    noise = {number for _, numbers in seen for number in numbers}
    assert len(updates) == len(noise) == 3
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(updates, 2))


# ---- an empty cohort


@tabled("name", MECHANISMS)
@tabled("engine", local_sgd.ENGINES)
def test_a_round_without_clients_is_a_round(engine, name):
    "Poisson sampling at 1/6: most of 8 rounds are empty, noise and server steps go on."
    rules = dict(rounds=8, cohort=1, sampling="poisson", eval_every=1, engine=engine)
    config = dataclasses.replace(CONFIG, **rules)
    streams = [seed_tree(3, "round", t, "sample") for t in range(8)]
    sizes = [len(sample_cohort(6, 1, "poisson", rng)) for rng in streams]
    assert 0 in sizes and max(sizes) > 0
    run = go(MECHANISMS[name], config)
    bits = MECHANISMS[name].bits(142).content
    assert run.finished and torch.isfinite(run.w).all()
    sent = [entry["uplink_bits"] for entry in run.history]
    assert sent == [bits * n for n in np.cumsum(sizes).tolist()]
    json.dumps(run.history, allow_nan=False)


# ---- resume


@pytest.mark.parametrize("server", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("name", MECHANISMS)
def test_a_run_stopped_after_every_round_equals_a_straight_one(name, server, tmp_path):
    made, config = MECHANISMS[name], dataclasses.replace(CONFIG, server=server)
    path = tmp_path / "deep" / "run.pt"
    again = dict(checkpoint=path, resume=True)
    straight = outcome(go(made, config))
    for rounds in range(1, 5):
        run = go(made, config, **again, max_seconds=0.0)
        assert run.round == rounds and run.finished == (rounds == 4)
    assert outcome(run) == straight
    assert outcome(go(made, config, **again)) == straight, "a finished run is read back"
    assert [p.name for p in path.parent.iterdir()] == ["run.pt"]


def test_a_killed_process_resumes_bit_for_bit(tmp_path):
    "SIGKILL in the middle of a run, no warning given."
    path = tmp_path / "run.pt"
    script = (
        "import dataclasses, test_federated as t\nt.go(t.REC,"
        " dataclasses.replace(t.CONFIG, rounds=10_000), checkpoint=%r, save_every=0.0)"
        % str(path)
    )
    folders = (ROOT, ROOT / "tests", ROOT / "tests" / "training")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    process = subprocess.Popen([sys.executable, "-c", script], env=env)
    try:
        late = time.monotonic() + 600
        while not path.exists() and process.poll() is None and time.monotonic() < late:
            time.sleep(0.02)
        time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    config = dataclasses.replace(CONFIG, rounds=10_000)
    done = stored(path)["round"]
    assert 0 < done < 10_000, "the process was not killed in the middle"
    resumed = go(REC, config, checkpoint=path, resume=True, max_seconds=0.0)
    assert outcome(resumed) == outcome(stop_at(REC, config, done + 1))


def stop_at(mechanism, config, rounds: int) -> federated.Run:
    "An uninterrupted run of `config`, left after `rounds` rounds."
    run = go(mechanism, dataclasses.replace(config, rounds=rounds))
    if rounds % config.eval_every:
        run.history.pop()
    run.finished = False
    return run


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("server", ["sgd", "adam"])
def test_a_run_goes_on_for_more_rounds(server, every, tmp_path):
    "4 + 4 = 8 to the last bit, also where the fourth round is evaluated only as a last."
    whole = dataclasses.replace(CONFIG, rounds=8, server=server, eval_every=every)
    half, path = dataclasses.replace(whole, rounds=4), tmp_path / "run.pt"
    assert go(REC, half, checkpoint=path).history[-1]["round"] == 4
    grown = go(REC, whole, checkpoint=path, resume=True)
    assert grown.finished and outcome(grown) == outcome(go(REC, whole))
    with pytest.raises(ValueError, match="^rounds is 4, .* has done 8: raise"):
        go(REC, half, checkpoint=path, resume=True)


@pytest.mark.parametrize(
    "what, change",
    [
        ("seed", dict(seed=4)),
        ("config.lr", dict(config=dataclasses.replace(CONFIG, lr=0.25))),
        ("mechanism", dict(mechanism=Gaussian(0.5, 0.31))),
        ("mechanism", dict(mechanism=REC)),
        ("partition", dict(toy=federation(sizes=(9, 5, 2, 6, 4, 7)))),
        ("data", dict(toy=federation(name="other images, same partition"))),
        ("content", dict(toy=altered(federation()))),
        ("model", dict(model=tiny_model(seed=1))),
        ("computation", dict(model=other_activation(tiny_model()))),
    ],
)
def test_another_run_is_not_resumed(what, change, tmp_path):
    path = tmp_path / "run.pt"
    go(checkpoint=path, max_seconds=0.0)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=f"run.pt was written with a different {what}"):
        go(checkpoint=path, resume=True, **change)
    assert path.read_bytes() == before, "the other run's checkpoint was touched"


def test_a_save_that_fails_leaves_the_last_whole_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    go(checkpoint=path, max_seconds=0.0)
    before, save = path.read_bytes(), torch.save

    def half(state, target):
        save(state, target)
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="disk full"):
        go(checkpoint=path, resume=True, max_seconds=0.0)
    assert path.read_bytes() == before
    monkeypatch.undo()
    assert outcome(go(checkpoint=path, resume=True)) == outcome(go())


def stored(path) -> dict:
    "What a checkpoint holds."
    content = io.BytesIO(files.read_sealed(path))
    return torch.load(content, map_location="cpu", weights_only=True)


def test_a_checkpoint_sealed_again_around_something_else_is_refused(tmp_path):
    path = tmp_path / "run.pt"
    go(checkpoint=path, max_seconds=0.0)
    assert os.name != "posix" or path.stat().st_mode & 0o777 == 0o600
    for each in (b"nothing of ours", b""):
        path.write_bytes(files.add_checksum(each))
        with pytest.raises(
            ValueError, match="run.pt is not a checkpoint .*: name another"
        ):
            go(checkpoint=path, resume=True)
