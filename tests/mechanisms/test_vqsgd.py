"""vqSGD from its parts: corners, lies, repetition and its price. What every mechanism
must do is in test_conformance.

Statistical tests have false-alarm rate 1e-6 and fixed seeds.
"""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from laws import ALARM, fit
from tables import tabled

from dpcomm.core import wire
from dpcomm.core.random import Insecure, seed_tree
from dpcomm.mechanisms import vqsgd
from dpcomm.mechanisms.vqsgd import VqSgd
from dpcomm.privacy import audit

INPUTS = [
    torch.tensor([0.6, 0.0, -0.3]),
    torch.tensor([0.0, 0.0]),
    torch.tensor([-0.7]),
    torch.tensor([3.0, -4.0, 0.0, 12.0]),
    torch.full((5,), -(5**-0.5)),
]


def by_definition(m, v):
    "Law of one corner from the convex combination and the matrix of randomised response."
    n, c, lie = 2 * len(v), m.clip_norm, math.exp(-m.eps)
    weights = np.zeros(n)
    for i, x in enumerate(v):
        weights[2 * i + (x < 0)] = abs(x) / (c * math.sqrt(len(v)))
    weights += (1 - weights.sum()) / n
    return (
        weights @ (np.full((n, n), lie) + (1 - lie) * np.eye(n)) / (1 + (n - 1) * lie)
    )


# ---- corners and lies


@tabled("eps", [0.3, 2.0, math.inf])
@tabled("u", INPUTS, ids=len)
def test_the_law_is_the_definition_and_corners_follow_it(u, eps):
    m, d = VqSgd(1.0, eps), len(u)
    p = m.law(u[None])[0].numpy()
    want = by_definition(m, m.clip(u[None])[0].double().numpy())
    np.testing.assert_allclose(p, want, rtol=1e-6, atol=1e-8)
    found = m.corners(u.double().numpy(), seed_tree(0, "law", d), 30_000)
    assert fit(np.bincount(found, minlength=2 * d), p) > ALARM / 15


def test_entries_that_are_zero_share_the_remainder_only():
    "At both ends and between; the clip cuts."
    u = np.array([0.0, 0.5, 0.0, -0.5, 0.5, 0.5, 0.0])
    share = np.abs(u).sum() / (math.sqrt(7) * np.linalg.norm(u))
    found = VqSgd(0.1, math.inf).corners(u, seed_tree(0, "zeros"), 20_000)
    p = np.full(14, (1 - share) / 14)
    p[[2, 7, 8, 10]] += share / 4
    assert fit(np.bincount(found, minlength=14), p) > ALARM


def test_the_last_entry_can_be_drawn_and_nothing_beyond():
    class Edge(np.random.Generator):
        def random(self, shape):
            return np.array([[0.0] * 3, [0.0, 0.6, 1 - 2**-53]])

    edge, m = Edge(np.random.PCG64(0)), VqSgd(1.0, math.inf)
    some, none = (m.corners(np.array(u), edge, 3) for u in ([0.5, 0, -0.5], [0] * 3))
    # a zero vector sends anything
    assert some.tolist() == [0, 5, 5] and none.tolist() == [0, 3, 5]


@tabled("eps, repeats", [(0.7, 1), (2.0, 2), (math.inf, 3)])
@tabled("u", INPUTS[:4], ids=len)
def test_mean_and_variance_by_enumeration(u, eps, repeats):
    m, d = VqSgd(1.0, eps, repeats), len(u)
    p = m.law(u[None])[0].numpy()
    tuples = np.array(list(itertools.product(range(2 * d), repeat=repeats)))
    weight, x = p[tuples].prod(1), m.estimate(tuples, d).double().numpy()
    mean = weight @ x
    bias, variance = (part[0].double().numpy() for part in m.moments(u[None]))
    np.testing.assert_allclose(mean, u.numpy() + bias, atol=2e-6)
    np.testing.assert_allclose(weight @ x**2 - mean**2, variance, rtol=1e-5, atol=1e-5)
    length = d / vqsgd.keep_probability(2 * d, eps) ** 2
    total = (length - (mean**2).sum()) / repeats  # eq. variance, summed
    assert variance.sum() == pytest.approx(total, rel=1e-5)


# ---- messages


def test_a_message_is_its_corners():
    m, u = VqSgd(1.0, 3.0, 7), torch.linspace(-0.4, 0.5, 9)
    message = m.encode(u, Insecure(3))
    numbers = wire.unpack_bits(message.payload, 5, 7)
    want = m.corners(u.double().numpy(), seed_tree(3, "private"), 7)
    assert numbers.tolist() == want.tolist()
    assert torch.equal(m.decode(message), m.estimate(numbers[None], 9)[0])


def test_a_corner_that_does_not_exist_is_refused():
    m = VqSgd(1.0, 3.0, 2)
    message, corners = m.encode(torch.ones(3)), wire.pack_bits(np.array([1, 7]), 3)
    with pytest.raises(ValueError, match="holds 7, and vqsgd sends 0..5"):
        m.decode(dataclasses.replace(message, payload=corners))


# ---- privacy


@tabled("d", [1, 2, 8, 50])
@tabled("eps", [0.1, 2.0, 20.0, 400.0])
def test_the_exact_epsilon_is_reached_and_not_passed(d, eps):
    m, exact = VqSgd(1.5, eps), vqsgd.exact_eps(d, eps)
    pair = m.worst_case(d)
    assert pair.norm(dim=1).tolist() == pytest.approx([1.5, 1.5])
    ratio = m.law(pair).log().diff(dim=0).abs().max()
    if d == 1 or eps < 30:  # beyond, rounding of the weights outweighs a lie
        assert float(ratio) == pytest.approx(exact, abs=1e-6)
    assert exact <= eps and (exact == pytest.approx(eps, rel=1e-12)) == (d == 1)
    if eps < 30:  # all pairs of 400, every corner
        rows = torch.from_numpy(seed_tree(0, "pairs", d).standard_normal((400, d)))
        rows[::2] *= 0.1
        logs = m.law(3 * rows).log()
        assert (logs.amax(0) - logs.amin(0)).max() <= exact * (1 + 1e-9)


def test_repetition_is_paid_in_full():
    "All triples of corners under the worst pair: three times the epsilon of one."
    m = VqSgd(1.0, 1.0, 3)
    triples = np.array(list(itertools.product(range(4), repeat=3)))
    laws = [p[triples].prod(1) for p in m.law(m.worst_case(2)).numpy()]
    found, claimed = audit.enumerated_eps(*laws, 0.0)[0], m.guarantee(d=2).eps
    # more than the epsilon of one repetition, which sqSGD's paper states
    assert 1.0 < found == pytest.approx(3 * vqsgd.exact_eps(2, 1.0))
    assert found == pytest.approx(claimed)
