"""example_level: gradients an image, sums, releases at any base point, the visits that
are accounted, runs that resume.

Statistical tests have false-alarm rate 1e-6 and fixed seeds.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from laws import radius
from scipy.special import expit
from scipy.stats import norm
from tables import tabled

from dpcomm.core.random import seed_tree
from dpcomm.core.vectors import flatten, groups, pack
from dpcomm.datasets import images as data
from dpcomm.mechanisms import contract
from dpcomm.mechanisms.deployments import Deployment
from dpcomm.privacy.accounting import gaussian_guarantee
from dpcomm.training import example_level, federated, models, state
from dpcomm.training.federated import Config, Task

IMVU = contract.mechanism("imvu", clip_norm=2.0, eps=1.0, beta=0.5)
SIGN = contract.mechanism("signsgd", clip_norm=2.0, sigma=4.0)
GAUSS = contract.mechanism(
    "gaussian", clip_norm=2.0, sigma=4.0, local=True, exact=False
)
ALL = pytest.mark.parametrize("mech", [GAUSS, SIGN, IMVU], ids=lambda m: m.name)
SERVER = dict(server="momentum", server_lr=1.0, momentum=0.9)
CONFIG = Config(rounds=4, cohort=2, lr=0.1, eval_every=2, **SERVER)


def images(n, *path):
    rng = seed_tree(0, "images", n, *path)
    return torch.from_numpy(
        rng.random((n, 1, 28, 28), dtype=np.float32)
    ), torch.from_numpy(rng.integers(0, 10, n))


def federation(n=40, clients=4):
    x, y = images(n)
    ends = np.cumsum([4, 8, 12, 1, 1, 1, 1, 1])[: clients - 1]
    parts = tuple(np.split(np.arange(n), ends))
    made = data.Dataset("made", x, y, *images(10, "test"))
    return data.Federation(made, parts, "made")


# ---- gradients and their sum


@tabled("name", ["linear", "lenet5", "conv10"])
def test_each_images_gradient_is_autograds(name):
    model, (x, y) = models.build(name, seed_tree(0)), images(5)
    w = pack(models.build(name, seed_tree(1)))
    g, losses = example_level.example_gradients(model, w, x, y)
    assert g.shape == (5, len(w)) and losses.shape == (5,)
    own = models.build(name, seed_tree(1))
    for i in range(5):
        loss = F.cross_entropy(own(x[i : i + 1]), y[i : i + 1])
        expected = flatten(torch.autograd.grad(loss, list(own.parameters())))
        torch.testing.assert_close(g[i], expected, atol=2e-5, rtol=1e-3)
        torch.testing.assert_close(losses[i], loss.detach())
    assert list(groups(model)) == list(groups(own)) and torch.equal(
        pack(model), pack(models.build(name, seed_tree(0)))
    ), "the model is untouched"


def test_the_sum_clips_each_image_and_ignores_the_chunks(monkeypatch):
    model, (x, y) = models.build("linear", seed_tree(0)), images(9)
    w = pack(model)
    g, losses = example_level.example_gradients(model, w, x, y)
    clip = float(g.norm(dim=1).median())
    by_hand = sum(row * min(1.0, clip / float(row.norm())) for row in g)
    for chunk in (64, 4, 1):
        monkeypatch.setattr(example_level, "CHUNK", chunk)
        total, loss = example_level.clipped_sum(model, w, x, y, clip)
        torch.testing.assert_close(total, by_hand, atol=1e-5, rtol=1e-5)
        assert loss == pytest.approx(float(losses.mean()), rel=1e-5)


# ---- the release


def test_the_release_bypasses_the_clip():
    """Mean of each coordinate at a sum 50 clips long, where the mechanism's own clip
    would leave a fiftieth.
    """
    total = torch.tensor([100.0, -60.0, 20.0, 0.0])
    expected = {
        "gaussian": total.numpy(),
        "signsgd": 2 * norm.cdf(total.numpy() / 8) - 1,
        "imvu": IMVU.step * (2 * expit(0.5 * total.double().numpy() / 2) - 1),
    }
    stds = {"gaussian": 8.0, "signsgd": 1.0, "imvu": IMVU.step}
    for mech in (GAUSS, SIGN, IMVU):
        streams = [seed_tree(0, mech.name, i) for i in range(4000)]
        drawn = [example_level.release(mech, total, rng).numpy() for rng in streams]
        draws, far = np.stack(drawn), radius(stds[mech.name], 4000, 12)
        assert (np.abs(draws.mean(0) - expected[mech.name]) < far).all()
        if mech.name != "gaussian":
            assert np.allclose(np.abs(draws), mech.step)
    clipped = IMVU.simulate(total.expand(4000, -1), seed_tree(1)).numpy().mean(0)
    assert abs(clipped[0] - expected["imvu"][0]) > 10 * radius(IMVU.step, 4000)


# ---- what is proved


def test_every_mechanism_states_the_gaussian_curve_for_one_example():
    for mech, sigma in ((GAUSS, 4.0), (SIGN, 4.0), (IMVU, 2 / 0.5)):
        for most in (1, 7):
            proved = example_level.guarantee(mech, most)
            run = dict(rounds=most, relation="zero-out", trust="local", unit="example")
            run |= dict(accountant="rdp-balle")
            expected = gaussian_guarantee(sigma, 1e-5, **run).eps
            assert proved.eps == pytest.approx(expected, rel=1e-9)
            about = proved.unit, proved.relation, proved.trust, proved.sampling
            assert about == ("example", "zero-out", "local", "none")
            assert f"drawn most often, in {most} rounds" in proved.note
            assert proved.scope == "total" and "floating point" in proved.note
        with pytest.raises(ValueError, match="most"):
            example_level.guarantee(mech, 1.9)
        with pytest.raises(ValueError, match="total"):
            example_level.release(mech, torch.tensor([math.nan]), seed_tree(0))


# ---- rounds and runs


def test_average_weighs_by_images_and_signs_not_at_all():
    a, b = torch.tensor([4.0, 0.0]), torch.tensor([0.0, 8.0])
    for mech, wanted in ((IMVU, [0.5, 1.0]), (SIGN, [2.0, 4.0])):
        assert example_level.average(mech, [a, b], [1, 3], 0.5).tolist() == wanted


def test_a_round_without_noise_is_one_step_on_the_cohorts_images():
    model, fed = models.build("linear", seed_tree(0)), federation()
    w = pack(model).requires_grad_()
    run = federated.Run(w, 0, False, state.Ledger(4), [], 0.0)
    optimiser, before = state.server_optimiser(w, CONFIG), w.detach().clone()
    quiet = contract.mechanism(
        "gaussian", clip_norm=1e6, sigma=1e-12, local=True, exact=False
    )
    task = Task(model, fed, quiet, CONFIG, 0)
    loss = example_level.one_round(run, optimiser, task)
    own = torch.from_numpy(np.concatenate([fed.parts[c] for c in task.cohort(0)]))
    expected = F.cross_entropy(model(fed.data.x[own]), fed.data.y[own])
    gradient = flatten(torch.autograd.grad(expected, list(model.parameters())))
    torch.testing.assert_close(
        run.w.detach(), before - 0.1 * gradient, atol=1e-6, rtol=1e-4
    )
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5) and run.round == 1
    assert (
        run.ledger.uplink_bits == 2 * 32 * 7850
        and run.ledger.downlink_bits == 2 * 32 * 7850
    )


def trained(mech, seed=0, **how):
    model = models.build("linear", seed_tree(0))
    return example_level.simulate(Task(model, federation(), mech, CONFIG, seed), **how)


@ALL
def test_runs_repeat_and_count_their_bits(mech):
    run, again, other = trained(mech), trained(mech), trained(mech, 1)
    assert torch.equal(run.w, again.w) and run.history == again.history
    assert run.finished and not torch.equal(run.w, other.w)
    assert run.ledger.uplink_bits == 4 * 2 * mech.bits(7850).content
    assert run.ledger.header_bits == 4 * 2 * mech.bits(7850).header
    assert [h["round"] for h in run.history] == [2, 4]
    assert all(np.isfinite(h["loss"]) for h in run.history)


def test_the_tighter_epsilon_of_a_deployment_is_not_stated():
    where = Deployment(4, 2, 4, 1e-5, sampling="fixed", trust="local", unit="example")
    with pytest.raises(ValueError, match="the algorithm's own guarantee="):
        trained(SIGN, deployment=where)


def test_a_task_s_own_loss_is_what_is_trained():
    def squared(scores, y):
        return F.mse_loss(scores, torch.eye(10)[y])

    held, model = federation(), models.build("linear", seed_tree(0, "own loss"))
    how = dict(clip_norm=1e3, sigma=1e-9, local=True, exact=False)
    config = Config(rounds=1, cohort=4, lr=0.1, server="sgd", server_lr=1.0)
    task = Task(model, held, contract.mechanism("gaussian", **how), config, 0, squared)
    run = example_level.simulate(task, progress=False)
    loss = squared(model(held.data.x), held.data.y)
    slope = flatten(torch.autograd.grad(loss, [*model.parameters()]))
    torch.testing.assert_close(run.w.detach(), pack(model) - 0.1 * slope)
