"The smaller public functions, each against something computed another way."

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tables import tabled
from torch import nn

from dpcomm.core import wire
from dpcomm.core.chance import seed_tree
from dpcomm.core.vectors import flatten
from dpcomm.mechanisms import contract, rec, topk
from dpcomm.mechanisms.gaussian import Gaussian
from dpcomm.tasks import images as data
from dpcomm.training import (
    federated,
    federated_round,
    fused,
    local_sgd,
    models,
    run_state,
)


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


def test_fetch_says_what_is_there():
    assert (
        data.fetch("digits")
        == "digits: 1437 training and 360 test images, counts as expected"
    )
    with pytest.raises(ValueError, match="did you mean 'digits'"):
        data.fetch("digit")


@pytest.mark.parametrize(
    "train",
    [
        local_sgd.train_loop,
        local_sgd.train_channels_last,
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


def test_download_bits_takes_the_shorter_way():
    ledger = run_state.Ledger(2, sent=[0, 100, 300], seen=[1, -1], own=[40, 0])
    assert run_state.download_bits(ledger, 0, 2, 10_000, True) == 200 - 40
    assert run_state.download_bits(ledger, 1, 2, 10_000, True) == 300 + 32
    assert run_state.download_bits(ledger, 1, 2, 250, True) == 250
    assert run_state.download_bits(ledger, 0, 2, 250, False) == 250


def test_checkpoint_round_trip_and_refusal(tmp_path):
    w = torch.arange(3.0).requires_grad_()
    run = federated.Run(
        w, 2, False, run_state.Ledger(4, uplink_bits=7), [{"round": 2}], 1.5
    )
    optimiser = run_state.server_optimiser(w, federated.Config())
    run_state.save_checkpoint(tmp_path / "deep" / "run.pt", run, optimiser, {"seed": 1})
    state = run_state.load_checkpoint(tmp_path / "deep" / "run.pt", {"seed": 1})
    assert (
        torch.equal(state["w"], w)
        and run_state.Ledger(**state["ledger"]) == run.ledger
        and state["history"] == run.history
    )
    assert [f.name for f in (tmp_path / "deep").iterdir()] == ["run.pt"]
    with pytest.raises(ValueError, match="seed"):
        run_state.load_checkpoint(tmp_path / "deep" / "run.pt", {"seed": 2})


def test_train_cohort_ignores_the_pool_and_takes_nobody():
    model, config = net(), federated.Config(cohort=4, batch=2)
    task = federated.Task(model, toy(), Gaussian(1.0, 1.0), config, 0)

    def train(cohort, workers):
        with ThreadPoolExecutor(workers) as pool:
            chunks = federated_round.train_cohort(
                task,
                weights(model),
                np.array(cohort, int),
                [seed_tree(0, c) for c in cohort],
                pool,
            )
            return torch.cat([updates for updates, _ in chunks])

    one, three = train([0, 1, 3], 1), train([0, 1, 3], 3)
    assert torch.equal(one, three) and one.shape == (3, len(weights(model)))


def test_an_empty_cohort_averages_to_nothing():
    w, quiet = weights(net()), Gaussian(1.0, 1e-15, exact=False)
    for mechanism in (quiet, topk.TopK(0.5, 1.0, None, 4)):
        mean, loss = federated_round.average(mechanism, w, None, 4, 0, seed_tree(0))
        assert mean.shape == w.shape and float(mean.abs().max()) < 1e-12 and loss == 0


def test_one_round_moves_the_server_by_the_average():
    model, fed = net(), toy()
    config = federated.Config(cohort=4, batch=2, server="sgd", server_lr=1.0, lr=0.1)
    w = weights(model).requires_grad_()
    run = federated.Run(w, 0, False, run_state.Ledger(4), [], 0.0)
    task = federated.Task(model, fed, Gaussian(1e9, 1e-15, exact=False), config, 5)
    with ThreadPoolExecutor(1) as pool:
        ((updates, _),) = federated_round.train_cohort(
            task,
            w.detach(),
            np.arange(4),
            [
                seed_tree(5, "round", 0, "client", c, "copy", 0, "batches")
                for c in range(4)
            ],
            pool,
        )
        federated_round.one_round(
            run, run_state.server_optimiser(w, config), task, pool
        )
    assert run.round == 1 and run.ledger.uplink_bits == 4 * 32 * len(w)
    assert torch.allclose(w.detach(), weights(model) + updates.mean(0), atol=1e-5)


def test_decode_group_is_the_scaled_candidate():
    z = rec.selected([50], 9, [2], [17])
    assert (rec.decode_group(50, 0.5, 9, 2, 17) == np.float32(0.5) * z).all()


def test_select_projection_has_the_closed_mean():
    "Mean s (1 - S2) within 5.2 standard errors: false-alarm rate 2e-7."
    rng, s, n = seed_tree(0, "select"), 1.3, 40_000
    draws = np.array([rec.select_projection(s, 8, rng) for _ in range(n)])
    expected = s * (1 - rec.selection_moment(2, s, 8))
    assert abs(draws.mean() - expected) < 5.2 * draws.std() / n**0.5
    assert abs(expected - s) > 20 * draws.std() / n**0.5
    assert rec.select_projection(0.0, 8, rng) == 0.0


def test_simulate_group_leaves_the_other_directions_alone():
    """Across phi the prior's mean and variance, along phi the closed mean, each within
    5.2 standard errors: false-alarm rate 6e-7.
    """
    n, phi = 40_000, torch.tensor([[0.0, 2.0, 0.0]])
    out = rec.simulate_group(phi.repeat(n, 1), 0.7, 8, [seed_tree(0, "group", 0)] * n)
    across = out[:, 0].double().numpy()
    assert abs(across.mean()) < 5.2 * 0.7 / n**0.5
    assert abs(across.var() / 0.49 - 1) < 5.2 * (2 / n) ** 0.5
    along = out[:, 1].double().numpy()
    assert (
        abs(along.mean() - 2.0 * (1 - rec.selection_moment(2, 2.0 / 0.7, 8)))
        < 5.2 * along.std() / n**0.5
    )


def test_register_enters_a_class_and_mechanisms_keep_the_protocol(monkeypatch):
    monkeypatch.setattr(contract, "_REGISTRY", dict(contract._REGISTRY))

    @contract.register
    class Nothing(contract.Mechanism):
        name = "nothing"

    assert "nothing" in contract.registered()
    assert contract.register(Nothing) is Nothing, "a cell may run twice"
    promised = [m for m in vars(contract.Mechanism) if not m.startswith("_")]
    for name in ("gaussian", "rec"):
        assert all(hasattr(contract._REGISTRY[name], m) for m in promised), name


@tabled("name", ["", "é", "Pm", "a" * 65, "1st", "a-b"])
def test_a_name_that_no_message_can_carry_is_refused(name):
    wrong = type("Wrong", (contract.Mechanism,), {"name": name})
    with pytest.raises(ValueError, match="must be small letters"):
        contract.register(wrong)


@pytest.mark.parametrize("name", ["pm", "gaussian", "rec"])
def test_a_name_that_is_taken_is_refused(name):
    "Whatever was imported first: else an epsilon would be another class's."
    other = type("Other", (contract.Mechanism,), {"name": name})
    with pytest.raises(ValueError, match=f"which dpcomm.mechanisms.{name}.*has"):
        contract.register(other)
    assert contract.mechanism_class(name).__module__ == f"dpcomm.mechanisms.{name}"


@pytest.mark.parametrize("thing", [int, object, "rec", None])
def test_what_is_no_mechanism_is_not_registered(thing):
    with pytest.raises(TypeError, match="derive the class from Mechanism"):
        contract.register(thing)


def test_the_reader_of_damaged_bytes_is_parse_message():
    message = wire.Message("rec", 3, b"abc", 5)
    assert wire.parse_message(message.to_bytes(), 3) == message
    assert wire.header_bits("rec") == 8 * (message.nbytes - 3)
    with pytest.raises(ValueError, match="checksum"):
        wire.parse_message(
            dataclasses.replace(message, payload=b"abd").to_bytes()[:-4]
            + message.to_bytes()[-4:],
            3,
        )
