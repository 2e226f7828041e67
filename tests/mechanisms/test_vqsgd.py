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
from dpcomm.core.chance import Insecure, seed_tree
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
    """Law of one corner from the convex combination and the matrix of randomised
    response.
    """
    d, c = len(v), m.clip_norm
    weights = np.zeros(2 * d)
    for i, x in enumerate(v):
        weights[2 * i + (x < 0)] = abs(x) / (c * math.sqrt(d))
    weights += (1 - weights.sum()) / (2 * d)
    truth = (
        1.0 if m.eps == math.inf else math.exp(m.eps) / (math.exp(m.eps) + 2 * d - 1)
    )
    other = 0.0 if m.eps == math.inf else 1 / (math.exp(m.eps) + 2 * d - 1)
    response = np.full((2 * d, 2 * d), other)
    np.fill_diagonal(response, truth)
    return weights @ response


# ---- corners and lies


@tabled(
    "d, bits",
    [(1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (1024, 11), (61_706, 17), (1_722_224, 22)],
)
def test_bits_of_a_corner(d, bits):
    assert vqsgd.corner_bits(d) == bits == math.ceil(math.log2(2 * d))
    assert VqSgd(1.0, 1.0, 300).bits(d).payload == 8 * math.ceil(300 * bits / 8)


def test_the_probability_of_keeping():
    for d, eps in itertools.product((1, 3, 1000), (0.01, 1.0, 30.0)):
        keep = vqsgd.keep_probability(2 * d, eps)
        assert keep == pytest.approx((math.exp(eps) - 1) / (math.exp(eps) + 2 * d - 1))
        assert keep + (1 - keep) / (2 * d) == pytest.approx(
            math.exp(eps) / (math.exp(eps) + 2 * d - 1)
        ), "randomised response"
    assert (
        vqsgd.keep_probability(2 * 61_706, 400.0) == pytest.approx(1)
        and vqsgd.keep_probability(10, math.inf) == 1
    )


@tabled("eps", [0.3, 2.0, math.inf])
@tabled("u", INPUTS, ids=len)
def test_the_law_is_the_definition(u, eps):
    m = VqSgd(1.0, eps)
    p = vqsgd.law(m, u[None])[0].numpy()
    np.testing.assert_allclose(
        p, by_definition(m, m.clip(u[None])[0].double().numpy()), rtol=1e-6, atol=1e-8
    )
    assert p.sum() == pytest.approx(1)


@tabled("eps", [0.3, 2.0, math.inf])
@tabled("u", INPUTS, ids=len)
def test_corners_follow_the_law(u, eps):
    m, d = VqSgd(1.0, eps), len(u)
    found = vqsgd.corners(m, u.double().numpy(), seed_tree(0, "law", d), 30_000)
    assert (
        fit(np.bincount(found, minlength=2 * d), vqsgd.law(m, u[None])[0].numpy())
        > ALARM
    )


def test_entries_that_are_zero_share_the_remainder_only():
    """At both ends and between; the clip cuts, so that the share along the vector is
    that of its direction.
    """
    u = np.array([0.0, 0.5, 0.0, -0.5, 0.5, 0.5, 0.0])
    share = np.abs(u).sum() / (math.sqrt(7) * np.linalg.norm(u))
    found = vqsgd.corners(VqSgd(0.1, math.inf), u, seed_tree(0, "zeros"), 20_000)
    p = np.full(14, (1 - share) / 14)
    p[[2, 7, 8, 10]] += share / 4
    assert fit(np.bincount(found, minlength=14), p) > ALARM


def test_the_last_entry_can_be_drawn_and_nothing_beyond():
    class Edge(np.random.Generator):
        def random(self, shape):
            return np.array([[0.0] * 3, [0.0, 0.6, 1 - 2**-53]])

    edge = Edge(np.random.PCG64(0))
    assert vqsgd.corners(
        VqSgd(1.0, math.inf), np.array([0.5, 0.0, -0.5]), edge, 3
    ).tolist() == [0, 5, 5]
    assert vqsgd.corners(VqSgd(1.0, math.inf), np.zeros(3), edge, 3).tolist() == [
        0,
        3,
        5,
    ], "a zero vector sends anything"


def test_an_estimate_is_a_mean_of_corners_of_one_length():
    m = VqSgd(2.0, 3.0, 4)
    length = 2 * math.sqrt(3) / vqsgd.keep_probability(6, 3.0)
    one = vqsgd.estimate(m, np.arange(6)[:, None], 3)
    torch.testing.assert_close(one.norm(dim=1), torch.full((6,), length))
    assert one.sum(0).abs().max() == 0 and one[3].tolist() == pytest.approx(
        [0, -length, 0]
    )
    torch.testing.assert_close(
        vqsgd.estimate(m, np.array([[0, 0, 3, 1]]), 3)[0],
        torch.tensor([length / 4, -length / 4, 0]),
    )


@tabled("eps, repeats", [(0.7, 1), (2.0, 2), (math.inf, 3)])
@tabled("u", INPUTS[:4], ids=len)
def test_mean_and_variance_by_enumeration(u, eps, repeats):
    m, d = VqSgd(1.0, eps, repeats), len(u)
    p = vqsgd.law(m, u[None])[0].numpy()
    tuples = np.array(list(itertools.product(range(2 * d), repeat=repeats)))
    weight = p[tuples].prod(1)[:, None]
    x = vqsgd.estimate(m, tuples, d).double().numpy()
    mean = (weight * x).sum(0)
    bias, variance = (part[0].double().numpy() for part in m.moments(u[None]))
    np.testing.assert_allclose(mean, u.numpy() + bias, atol=2e-6)
    np.testing.assert_allclose(
        (weight * x**2).sum(0) - mean**2, variance, rtol=1e-5, atol=1e-5
    )
    length = d / vqsgd.keep_probability(2 * d, eps) ** 2
    assert variance.sum() == pytest.approx(
        (length - (mean**2).sum()) / repeats, rel=1e-5
    ), "eq. variance, summed"


# ---- messages


def test_a_message_is_its_corners():
    m, u = VqSgd(1.0, 3.0, 7), torch.linspace(-0.4, 0.5, 9)
    message = m.encode(u, Insecure(3))
    numbers = wire.unpack_bits(message.payload, 5, 7)
    assert (
        numbers.tolist()
        == vqsgd.corners(m, u.double().numpy(), seed_tree(3, "private"), 7).tolist()
    )
    assert torch.equal(m.decode(message), vqsgd.estimate(m, numbers[None], 9)[0])
    assert torch.equal(
        m.decode(message), m.simulate(u[None], [seed_tree(3, "private")])[0]
    )


def test_a_corner_that_does_not_exist_is_refused():
    m = VqSgd(1.0, 3.0, 2)
    message = m.encode(torch.tensor([0.1, 0.2, 0.3]), Insecure(0))
    with pytest.raises(ValueError, match="names corner 7; d = 3 has corners 0..5"):
        m.decode(
            dataclasses.replace(message, payload=wire.pack_bits(np.array([1, 7]), 3))
        )


def test_simulation_of_nobody_is_empty():
    assert VqSgd(1.0, 3.0, 2).simulate(torch.zeros(0, 4), []).shape == (0, 4)


# ---- privacy


@tabled("d", [1, 2, 3, 8, 50])
@tabled("eps", [0.1, 2.0, 20.0, 400.0])
def test_the_exact_epsilon_is_reached_and_not_passed(d, eps):
    m = VqSgd(1.5, eps)
    pair = vqsgd.worst_case(m, d)
    assert pair.norm(dim=1).tolist() == pytest.approx([1.5, 1.5])
    ratio = vqsgd.law(m, pair).log().diff(dim=0).abs().max()
    exact = vqsgd.exact_eps(d, eps)
    if d == 1 or eps < 30:  # beyond, rounding of the weights outweighs a lie
        assert float(ratio) == pytest.approx(exact, abs=1e-6)
    assert exact <= eps and (exact == pytest.approx(eps, rel=1e-12)) == (d == 1)
    rows = (
        torch.from_numpy(seed_tree(0, "pairs", d).standard_normal((400, d)))
        * torch.tensor([0.1, 9.0]).repeat(200)[:, None]
    )
    if eps < 30:
        logs = vqsgd.law(m, rows).log()
        assert (logs.amax(0) - logs.amin(0)).max() <= exact * (1 + 1e-9), (
            "all pairs of the 400, every corner"
        )


def test_repetition_is_paid_in_full():
    "All triples of corners under the worst pair: three times the epsilon of one."
    m = VqSgd(1.0, 1.0, 3)
    p, q = vqsgd.law(m, vqsgd.worst_case(m, 2)).numpy()
    triples = np.array(list(itertools.product(range(4), repeat=3)))
    found = audit.enumerated_eps(p[triples].prod(1), q[triples].prod(1), 0.0)[0]
    assert (
        found
        == pytest.approx(3 * vqsgd.exact_eps(2, 1.0))
        == pytest.approx(m.guarantee(d=2).eps)
    )
    assert found > 1.0, (
        "more than the epsilon of one repetition, which sqSGD's paper states"
    )


def test_guarantees_count_rounds_and_repetitions():
    m = VqSgd(1.0, 0.5, 4)
    found = m.guarantee(rounds=6)
    assert found.eps == 12.0 and "4 repetitions" in found.note and "pure" in found.note
    known = m.guarantee(rounds=6, d=9).eps
    assert known == pytest.approx(24 * vqsgd.exact_eps(9, 0.5))
    assert m.guarantee(d=1).eps == pytest.approx(2)


def test_scores_are_log_ratios_of_all_corners():
    m = VqSgd(1.0, 2.0, 2)
    scores = m.play("local", True, 500, seed_tree(0, "play"), d=1)["likelihood"]
    assert set(np.round(scores, 9)) <= {-4.0, 0.0, 4.0} and scores.mean() > 1
    longer = m.play("local", False, 500, seed_tree(0, "play"), rounds=2, d=1)[
        "likelihood"
    ]
    assert (
        set(np.round(longer, 9)) <= {-8.0, -4.0, 0.0, 4.0, 8.0} and longer.mean() < -2
    )


@pytest.mark.parametrize("parameters, arguments", [(p, a) for p, a, _ in vqsgd.AUDITED])
def test_the_audit_comes_close_to_the_claim(parameters, arguments):
    m = VqSgd(**parameters)
    found = audit.audit_play(
        m, "local", 200_000, 0.0, seed_tree(0, "audit"), ALARM, **arguments
    )
    exact = m.guarantee(d=arguments["d"]).eps
    assert 0.8 * exact < found.eps <= exact <= m.guarantee().eps


def test_a_claim_for_one_repetition_is_refuted():
    m = VqSgd(1.0, 0.5, 4)
    found = audit.audit_play(
        m, "local", 100_000, 0.0, seed_tree(0, "audit"), ALARM, d=1
    )
    assert audit.refutes(found, VqSgd(1.0, 0.5).guarantee()) and not audit.refutes(
        found, m.guarantee()
    )


def test_an_honest_budget_has_a_best_number_of_repetitions():
    "x = log 2d + log(2x - 1) splits the budget best, up to terms of e^-x."
    for d, budget, best in ((61_706, 400.0, 26), (1_722_224, 2000.0, 107)):
        errors = [
            d / vqsgd.keep_probability(2 * d, budget / r) ** 2 / r
            for r in range(1, 1001)
        ]
        assert int(np.argmin(errors)) + 1 == best
        x = budget / best
        assert x == pytest.approx(math.log(2 * d) + math.log(2 * x - 1), abs=0.4)
