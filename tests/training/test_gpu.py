"""What a GPU must give: the messages and updates of a CPU, the laws that mechanisms state,
and runs that can stop. `pytest -m gpu` where there is one. Elsewhere what needs no
autograd runs on a pretended one."""

import dataclasses

import numpy as np
import pretended
import pytest
import torch
from cases import CASES
from laws import radius

from dpcomm.core.chance import Insecure, seed_tree
from dpcomm.core.vectors import flatten
from dpcomm.mechanisms.contract import mechanism
from dpcomm.tasks import images
from dpcomm.training import federated, graphed, models

ALL = [
    pytest.param(case, id=f"{name}, {label}")
    for name, cases in CASES.items()
    for label, case in cases.items()
]


REAL = pytest.param("real", marks=pytest.mark.gpu)
real = pytest.mark.parametrize("gpu", [REAL], indirect=True)


@pytest.fixture(params=["pretended", REAL])
def gpu(request, monkeypatch):
    if request.param == "real":
        if not torch.cuda.is_available():
            pytest.skip("NOT CHECKED: no GPU on this machine")
        yield
        return
    monkeypatch.setattr(graphed.RecordedStep, "record", lambda self: None)
    monkeypatch.setattr(federated, "ThreadPoolExecutor", pretended.Here)
    with pretended.cuda():
        yield
    graphed.recorded.cache_clear()


def vector(d, seed=0):
    return torch.from_numpy(seed_tree(seed, "u").standard_normal(d, dtype=np.float32))


@pytest.mark.parametrize("case", ALL)
def test_a_message_is_the_same_whatever_the_device(gpu, case):
    m, u = case.make(64), vector(64)
    here, there = m.encode(u, Insecure(3)), m.encode(u.to("cuda"), Insecure(3))
    assert here.to_bytes() == there.to_bytes()


@pytest.mark.parametrize("case", ALL)
def test_simulated_rows_have_the_stated_moments(gpu, case):
    m, n, d = case.make(16), 4000, 16
    rows = 0.1 * vector(d).to("cuda").expand(n, d)
    bias, variance = (part[0].double().cpu().numpy() for part in m.moments(rows[:1]))
    found = m.simulate(rows, seed_tree(0, "rows"))
    assert found.is_cuda
    error = (found - rows).double().cpu().numpy().mean(0) - bias
    assert (np.abs(error) <= radius(np.sqrt(variance), n, d * len(ALL)) + 1e-6).all()


def digits(n_clients=20):
    data = images.load("digits")
    parts = images.iid(len(data.y), n_clients, seed_tree(0, "partition"))
    return images.Federation(data, parts, "iid")


@pytest.mark.parametrize("case", ALL)
def test_a_run_stays_on_the_device(gpu, case):
    "Two rounds with sums, noise, an average and an evaluation."
    net = models.build("linear", seed_tree(0, "init"))
    d = sum(p.numel() for p in net.parameters())
    config = federated.Config(rounds=2, cohort=5, steps=2, eval_every=1)
    task = federated.Task(net, digits(), case.make(d), config, 0)
    run = federated.simulate(task, device="cuda")
    assert run.w.is_cuda and torch.isfinite(run.w).all() and len(run.history) == 2


@pytest.mark.parametrize(
    "name", ["cnn", "lenet5", "lenet5_tanh", "cnn10", "conv10", "linear"]
)
@pytest.mark.parametrize("held", [False, True])
def test_the_recorded_step_is_the_loops(gpu, name, held):
    x = torch.from_numpy(seed_tree(0, "x").random((20, 1, 28, 28))).float()
    y, plan = torch.arange(20) % 10, torch.arange(20).view(2, 2, 5)
    plan[0, 1, 3:], plan[1, 1] = -1, -1
    net = models.build(name, seed_tree(0, "init"))
    w = flatten(p.detach() for p in net.parameters())
    mask = torch.from_numpy(seed_tree(0, "mask").random(len(w)) < 0.1) if held else None
    with pretended.away():
        expected, losses = federated.train_loop(net, w, x, y, plan, 0.1, mask)
    there = [
        part if part is None else part.to("cuda") for part in (w, x, y, plan, mask)
    ]
    with federated._one_thread("cuda"):
        for _ in range(2):  # recorded, then played again
            found, loss = graphed.train_graphed(net, *there[:4], 0.1, there[4])
            assert (found.cpu() - expected).norm() < 1e-4 * expected.norm()
            assert (loss.cpu() - losses).norm() < 1e-4 * losses.norm()
            assert not held or (found.cpu()[:, ~mask] == 0).all()


@real
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
