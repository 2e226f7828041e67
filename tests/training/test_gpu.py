"""What a GPU must give: the messages and updates of a CPU, the laws that mechanisms state,
and runs that can stop. `pytest -m gpu` where there is one. Elsewhere the same tests run on
a pretended one."""

import dataclasses
import warnings

import numpy as np
import pretended
import pytest
import torch
from cases import CASES
from laws import radius
from tables import tabled
from torch import nn

from dpcomm.core.random import Insecure, seed_tree
from dpcomm.core.vectors import flatten
from dpcomm.datasets import images
from dpcomm.experiments import accounts
from dpcomm.experiments.run import runs
from dpcomm.mechanisms.contract import mechanism
from dpcomm.training import federated, fused, local_sgd, models
from dpcomm.training.round import one_thread

ALL = {
    f"{name}, {label}": case
    for name, cases in CASES.items()
    for label, case in cases.items()
}
every_case = tabled("case", list(ALL.values()), ids=ALL)

REAL = pytest.param("real", marks=pytest.mark.gpu)


@pytest.fixture(params=["pretended", REAL])
def gpu(request, monkeypatch):
    if request.param == "real":
        if not torch.cuda.is_available():
            pytest.skip("NOT CHECKED: no GPU on this machine")
        yield
        return
    monkeypatch.setattr(fused.RecordedStep, "record", lambda self: None)
    monkeypatch.setattr(federated, "ThreadPoolExecutor", pretended.Here)
    with pretended.cuda():
        yield
    fused.recorded.cache_clear()


def vector(d, seed=0):
    return torch.from_numpy(seed_tree(seed, "u").standard_normal(d, dtype=np.float32))


@every_case
def test_a_message_is_the_same_whatever_the_device(gpu, case):
    m, u = case.make(64), vector(64)
    here, there = m.encode(u, Insecure(3)), m.encode(u.to("cuda"), Insecure(3))
    assert here.to_bytes() == there.to_bytes()


@every_case
def test_simulated_rows_have_the_stated_moments(gpu, case):
    m, n, d = case.make(16), 4000, 16
    rows = 0.1 * vector(d).to("cuda").expand(n, d)
    bias, variance = (part[0].double().cpu().numpy() for part in m.moments(rows[:1]))
    found = m.simulate(rows, seed_tree(0, "rows"))
    assert found.is_cuda
    error = (found - rows).double().cpu().numpy().mean(0) - bias
    assert (np.abs(error) <= radius(np.sqrt(variance), n, d * len(ALL)) + 1e-6).all()


@every_case
def test_a_run_stays_on_the_device(gpu, case):
    "Two rounds with sums, noise, an average and an evaluation."
    net = models.build("linear", seed_tree(0, "init"))
    d = sum(p.numel() for p in net.parameters())
    config = federated.Config(rounds=2, cohort=5, steps=2, eval_every=1)
    clients = accounts.mnist_clients("digits", 20)
    task = federated.Task(net, clients, case.make(d), config, 0)
    run = federated.simulate(task, device="cuda")
    assert run.w.is_cuda and torch.isfinite(run.w).all() and len(run.history) == 2


@pytest.mark.parametrize("name", ["cnn", "lenet5", "lenet5_tanh", "cnn10", "linear"])
@pytest.mark.parametrize("held", [False, True])
def test_the_recorded_step_is_the_loops(gpu, name, held):
    x = torch.from_numpy(seed_tree(0, "x").random((20, 1, 28, 28))).float()
    y, plan = torch.arange(20) % 10, torch.arange(20).view(2, 2, 5)
    plan[0, 1, 3:], plan[1, 1] = -1, -1
    net = models.build(name, seed_tree(0, "init"))
    w = flatten(p.detach() for p in net.parameters())
    mask = torch.from_numpy(seed_tree(0, "mask").random(len(w)) < 0.1) if held else None
    with pretended.away():
        expected, losses = local_sgd.train_loop(net, w, x, y, plan, 0.1, mask)
    parts = w, x, y, plan, mask
    there = [part if part is None else part.to("cuda") for part in parts]
    with one_thread("cuda"):
        for _ in range(2):  # recorded, then played again
            found, loss = fused.train_graphed(net, *there[:4], 0.1, there[4])
            assert (found.cpu() - expected).norm() < 1e-4 * expected.norm()
            assert (loss.cpu() - losses).norm() < 1e-4 * losses.norm()
            assert not held or (found.cpu()[:, ~mask] == 0).all()


@pytest.mark.parametrize("engine", ["graphed", "vmap"])
def test_a_run_that_stops_ends_as_one_that_does_not(gpu, engine, tmp_path):
    net = models.build("lenet5", seed_tree(0, "init"))
    data = images.Dataset(
        "noise",
        torch.from_numpy(seed_tree(0, "x").random((60, 1, 28, 28))).float(),
        torch.arange(60) % 10,
        torch.from_numpy(seed_tree(1, "x").random((20, 1, 28, 28))).float(),
        torch.arange(20) % 10,
    )
    clients = images.Federation(data, tuple(np.arange(60).reshape(6, 10)), "blocks")
    config = federated.Config(rounds=6, cohort=3, batch=5, eval_every=3, engine=engine)
    rec = mechanism("rec", clip_norm=1.0, std=1.0)
    task = federated.Task(net, clients, rec, config, 0)
    straight = federated.simulate(task, device="cuda")
    how = dict(device="cuda", checkpoint=tmp_path / "c.pt", resume=True, max_seconds=0)
    while not (run := federated.simulate(task, **how)).finished:
        pass
    assert torch.equal(run.w, straight.w)
    other = dataclasses.replace(config, engine="loop")
    loop = federated.simulate(dataclasses.replace(task, config=other), device="cuda")
    assert (loop.w - straight.w).norm() < 1e-3 * straight.w.norm()


def mlp(*between):
    layers = nn.Linear(20, 8), *between, nn.Tanh(), nn.Linear(8, 3)
    return models.initialise(nn.Sequential(*layers), seed_tree(0, "mlp"))


def small(net, engine, loss=local_sgd.cross_entropy):
    pairs = [(torch.ones(6, 20) * i, torch.arange(6) % 3) for i in range(5)]
    held = images.Federation.of(pairs, test=pairs[1])
    noise = mechanism("gaussian", clip_norm=1.0, sigma=1e-6)
    config = federated.Config(rounds=2, cohort=3, batch=3, eval_every=1, engine=engine)
    return federated.Task(net, held, noise, config, 0, loss)


@pytest.mark.parametrize("engine", ["loop", "vmap", "graphed", "auto"])
@pytest.mark.parametrize("usual", [True, False])
def test_any_engine_learns_scores_and_pays_as_on_the_cpu(gpu, engine, usual):
    "With a frozen layer's weights and buffers elsewhere than the CPU, and a loss of its own."
    own = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, 1.0]))
    if engine == "graphed" and not usual:
        return  # it has the usual loss alone
    loss = local_sgd.cross_entropy if usual else own
    with pretended.away():
        here = federated.simulate(small(mlp(), "loop", loss), progress=False)
    how = dict(device="cuda", progress=False)
    there = federated.simulate(small(mlp(), engine, loss), **how)
    assert there.w.is_cuda and there.ledger == here.ledger
    moved = (there.w.detach().cpu() - here.w.detach()).norm() / here.w.detach().norm()
    assert moved < 1e-4
    for a, b in zip(here.history, there.history):
        assert a.keys() == b.keys() and abs(a["loss"] - b["loss"]) < 1e-3


def test_dropout_and_frozen_weights_and_buffers_live_there_too(gpu):
    net = mlp(nn.Dropout(0.5))
    net.register_buffer("unused", torch.ones(3))
    net[0].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        how = dict(device="cuda", progress=False)
        both = [federated.simulate(small(net, "auto"), **how) for _ in range(2)]
    assert torch.equal(*(run.w.detach().cpu() for run in both))
    assert len(both[0].w) == 27 and net.unused.device.type == "cpu"


# On the pretended device one experiment of each model, data set and trainer; the rest share
# all that they compute with them, and all are played where there is a GPU.
QUICK = "fltop-medical", "dprec-by-writer"
OWN = """dprec-mean dprec-quantised dprec-shakespeare dprec-stackoverflow fltop-fmnist frontier
imvu-femnist mean-estimation sqsgd-mnist""".split()
ALL_EXPERIMENTS = [
    *(pytest.param("pretended", name) for name in QUICK),
    *(pytest.param("pretended", name, marks=pytest.mark.slow) for name in OWN),
    *(pytest.param("real", name, marks=pytest.mark.gpu) for name in runs.experiments()),
]


@pytest.mark.parametrize("gpu, name", ALL_EXPERIMENTS, indirect=["gpu"])
@pytest.mark.filterwarnings("ignore")
def test_a_smoke_run_of_every_experiment(gpu, name):
    "Or it says that it computes on the CPU alone."
    experiment = runs.find(name)
    run = next(one for one in experiment.grid("smoke") if not one.needs)
    how = dict(device="cuda", progress=False, workers=1)
    try:
        found = runs.lines.run_one(run, 0, **how)
    except ValueError as error:
        assert "this experiment runs only on the CPU" in str(error)
        assert name.startswith("imvu")
    else:
        assert found["final"] or found["cells"]
