"sqSGD: the public subset, the rotation, the range, and what clients remember."

import itertools
import math

import numpy as np
import pytest
import torch
from laws import ALARM, fit, radius
from scipy.linalg import hadamard
from tables import tabled

from dpcomm.core.random import seed_tree
from dpcomm.mechanisms import privquant, sqsgd
from dpcomm.mechanisms.sqsgd import SqSgd


def vectors(n, d, *path):
    return torch.from_numpy(seed_tree(0, "sqsgd", *path).standard_normal((n, d)))


def test_the_subset_is_public_new_in_every_round_and_uniform():
    def drawn(d, fraction, **more):
        return tuple(SqSgd(fraction=fraction, **more).subset(d).tolist())

    at = drawn(20, 0.2, round=7)
    assert len(set(at)) == 4 and list(at) == sorted(at)
    assert at == drawn(20, 0.2, round=7) != drawn(20, 0.2, round=8)
    assert drawn(20, 0.2, seed=1) != drawn(20, 0.2)
    assert torch.equal(SqSgd(fraction=0.2).for_round(7).subset(20), torch.tensor(at))
    pairs = [drawn(4, 0.5, round=t) for t in range(2000)]
    counts = [pairs.count(pair) for pair in itertools.combinations(range(4), 2)]
    assert fit(counts, np.full(6, 1 / 6)) > ALARM


@tabled("d", [1, 2, 5, 8, 64])
def test_the_rotation_is_the_orthogonal_matrix_of_the_paper(d):
    x, size = vectors(3, d, "rotation"), sqsgd.padded_size(d)
    signs = torch.diag(sqsgd.signs(5, size))
    matrix = torch.from_numpy(hadamard(size) / math.sqrt(size)) @ signs
    rotated, wide = sqsgd.rotate(x, 5), torch.nn.functional.pad(x, (0, size - d))
    assert torch.allclose(rotated, wide @ matrix.T, atol=1e-12)
    assert torch.allclose(rotated.norm(dim=1), x.norm(dim=1))
    assert torch.allclose(sqsgd.unrotate(rotated, 5, d), x, atol=1e-12)


@tabled("span", ["fixed", "tight"])
@tabled("rotated", [True, False])
@tabled("projected", ["gradient", "sum"])
def test_whatever_has_gathered_stays_in_the_range(span, rotated, projected):
    half = dict(bound=2.0, fraction=0.5)
    m = SqSgd(**half, span=span, rotated=rotated, projected=projected)
    for scale in (1e-20, 1.0, 1e20):
        x = m.prepare(scale * vectors(4, 32, "range"), 64)
        length = np.linalg.norm(x, axis=1).max()
        assert np.abs(x).max() <= m.limit(64)
        assert projected == "gradient" or length <= 2.0 * (1 + 1e-12)
        privquant.quantise(x, m.limit(64), 16, seed_tree(0))
    m, inside = SqSgd(**half), 0.1 * vectors(1, 32, "inside")
    back = m.restore(m.prepare(inside, 64), 64)
    assert torch.allclose(back, inside, atol=1e-12)


def echo(mechanism, rows, d, rng):
    return rows.double()


@tabled("projected, out, norm", [("gradient", 20.0, 10.0), ("sum", 10.0, 50.0)])
def test_either_the_new_gradient_or_the_sum_is_projected(
    projected, out, norm, monkeypatch
):
    "A sum that is not projected: every entry is cut to 10."
    prepared = lambda m, rows, d, rng: torch.from_numpy(m.prepare(rows, d))  # noqa: E731
    monkeypatch.setattr(SqSgd, "send", prepared)

    def remember(gathered, fraction=1.0):
        m = SqSgd(fraction=fraction, rotated=False, projected=projected)
        memory = torch.full((1, 1, 4), gathered)
        sent, kept = m.simulate_with_memory(memory, torch.full((1, 4), 25.0), [None])
        return float(sent.norm()), float(kept.norm())

    assert remember(0.0)[0] == pytest.approx(10.0)
    assert remember(100.0)[0] == pytest.approx(out)
    assert remember(0.0, 0.5)[1] == pytest.approx(norm / 2**0.5)


RULES = [(1.0, 1.0, 0.0), (1.0, 0.5, 0.0), (0.25, 1.0, 0.0), (1.0, 1.0, 0.9)]


@tabled("alpha, beta, momentum", [*RULES, (0.5, 0.7, 0.9)])
def test_memory_is_that_of_the_papers(alpha, beta, momentum, monkeypatch):
    "What is not sent is kept; momentum is corrected and masked. [Lin et al. 2018, Alg. 4]"
    monkeypatch.setattr(SqSgd, "send", echo)
    m = SqSgd(fraction=0.3, alpha=alpha, beta=beta, momentum=momentum)
    memory, close = m.client_memory(3, 30), dict(rtol=0, atol=1e-5, check_dtype=False)
    assert memory.shape == (3, 1 + (momentum > 0), 30)
    assert SqSgd(residuals=False).client_memory(3, 30) is None
    residual = velocity = torch.zeros(3, 30).double()
    for t in range(6):
        u, at = vectors(3, 30, "memory", t), m.for_round(t).subset(30)
        out, memory = m.for_round(t).simulate_with_memory(memory, u, [None] * 3)
        velocity = momentum * velocity + u
        sent = torch.zeros(3, 30).double()
        sent[:, at] = (residual + beta * velocity)[:, at]
        residual = (residual + alpha * velocity).index_fill_(1, at, 0)
        velocity.index_fill_(1, at, 0)
        torch.testing.assert_close(out, sent, **close)
        torch.testing.assert_close(memory[:, 0], residual, **close)
        if momentum:
            torch.testing.assert_close(memory[:, 1], velocity, **close)


def test_without_memory_the_mask_has_its_factor():
    "Without memory the estimate times d / d_hat has the mean u."
    d, m = 4, SqSgd(bound=1.0, levels=4, eps=3.0, fraction=0.5)
    u = torch.tensor([[0.4, -0.3, 0.2, 0.1]])
    share = torch.zeros(d).double()
    for r in map(m.for_round, range(3000)):
        share += r.moments(u)[0][0] + u[0]
        assert torch.count_nonzero(r.moments(u)[0][0] + u[0]) == 2
    most = radius(float(u.max()), 3000, d)
    assert (share / 3000 - u[0]).abs().max() < most


def test_the_guarantee_is_of_the_size_that_is_sent():
    g, any_d = (SqSgd().guarantee(rounds=9400, d=d) for d in (119_850, None))
    assert g.eps == pytest.approx(9400 * privquant.calibrate(512, 16, 400.0).actual_eps)
    assert g.eps <= any_d.eps == 9400 * 400
    names = (g.relation, g.trust, g.unit, g.scope)
    assert names == ("local", "local", "client", "total")
    smallest = privquant.thresholds(512, 16, 0).min()
    feasible = SqSgd(kappa_min=0, eps=smallest * 1.0001).calibration(119_850)
    assert feasible.kappa >= 0 and smallest > 400
