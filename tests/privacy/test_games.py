"""Curves against other routes, and the games that sums share."""

import itertools
import math

import numpy as np
import pytest
from laws import ALARM, radius
from scipy import stats
from tables import tabled

from dpcomm.core.chance import seed_tree
from dpcomm.mechanisms import ddgauss, mvu, on_ring, quantised, skellam
from dpcomm.mechanisms.gaussian import Gaussian
from dpcomm.mechanisms.imvu import Imvu
from dpcomm.mechanisms.privquant import PrivQuant, randomise
from dpcomm.mechanisms.rec import Rec, loss_law
from dpcomm.mechanisms.vqsgd import VqSgd, law, worst_case
from dpcomm.privacy import accounting, audit, games

EPS = np.array([0.0, 0.1, 0.5, 1.0, 2.5, 6.0])


@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 4.0])
def test_the_normal_curve_is_the_accountant_s(mu):
    np.testing.assert_allclose(
        games.gaussian_curve(mu, EPS),
        [accounting.gaussian_delta(1 / mu, eps) for eps in EPS],
        rtol=1e-9,
        atol=1e-300,
    )


def test_listed_curves_are_the_audit_s_enumeration():
    rng = seed_tree(0, "listed")
    for size in (2, 5, 40):
        p, q = rng.dirichlet(np.ones(size) / 2, 2)
        np.testing.assert_allclose(
            games.listed_curve(p, q, EPS),
            [max(audit.enumerated_delta(p, q, eps)) for eps in EPS],
            rtol=1e-9,
            atol=1e-14,
        )
    assert (
        games.listed_curve([1, 0], [0, 1], 3.0) == 1
        and games.listed_curve([0.5, 0.5], [0.5, 0.5], 0.0) == 0
    )
    for p, q in (
        ([0.5, 0.6], [0.5, 0.5]),
        ([1.0], [0.5, 0.5]),
        ([1.5, -0.5], [0.5, 0.5]),
    ):
        with pytest.raises(
            ValueError, match="probabilities of the same outcomes|p holds -0.5"
        ):
            games.listed_curve(p, q, 0.0)


@pytest.mark.parametrize("m, n", [(2, 1), (2, 9), (3, 4), (5, 3)])
def test_counts_of_symbols_lose_nothing(m, n):
    rng = seed_tree(0, "symbols", m)
    p, q = rng.dirichlet(np.ones(m), 2)
    whole = [
        [math.prod(law[list(word)]) for word in itertools.product(range(m), repeat=n)]
        for law in (p, q)
    ]
    np.testing.assert_allclose(
        games.listed_curve(*games.repeated(p, q, n), EPS),
        games.listed_curve(*whole, EPS),
        rtol=1e-9,
        atol=1e-13,
    )


def test_two_likelihoods_and_pure_privacy():
    "The curve of randomised response, attained; above every mixture of inputs."
    truth = 1 / (1 + math.exp(-2))
    response = np.array([[truth, 1 - truth], [1 - truth, truth]])
    np.testing.assert_allclose(
        games.pure_curve(2.0, EPS), games.listed_curve(*response, EPS), atol=1e-12
    )
    for a, b in seed_tree(0, "mixed").random((20, 2)):
        mixed = [w * response[0] + (1 - w) * response[1] for w in (a, b)]
        assert (
            games.listed_curve(*mixed, EPS)
            <= games.two_valued_curve(truth, 2.0, EPS) + 1e-12
        ).all()


def test_the_sum_game_sends_and_scores():
    seen = []

    def release(u):
        return seen.append(u) or np.clip(
            np.linalg.norm(u, axis=1, keepdims=True), 0, 2
        ) * np.sign(u[:, :1]) * np.array([[0.6, 0.8]])

    score = games.sum_game(
        release,
        "replace",
        False,
        5,
        seed_tree(0),
        2.0,
        4.0,
        np.array([0.6, 0.8]),
        rounds=2,
    )
    assert np.allclose(seen[0], -8 * np.array([0.6, 0.8])) and np.allclose(
        seen[1], -seen[0]
    )
    assert (
        np.allclose(score["likelihood"], -2 * 2 * 2 * 2 / 16)
        and set(score) == {"likelihood", "bits", "repeat"}
        and np.allclose(score["repeat"], -4)
    )
    gone = games.sum_game(
        release,
        "zero-out",
        False,
        5,
        seed_tree(0),
        2.0,
        4.0,
        np.array([0.6, 0.8]),
        grid=0.5,
    )
    assert not seen[-1].any() and np.allclose(gone["likelihood"], -0.5 * 4 / 16)


def test_one_share_fewer_is_a_chi_square():
    rng, n, k = seed_tree(0, "fewer"), 4000, 30
    for present, shares in ((True, 5), (False, 4)):
        length = games.fewer_game(lambda i: rng.standard_normal((n, k)), present, 5)[
            "length"
        ]
        assert stats.kstest(length / shares, stats.chi2(k).cdf).pvalue > ALARM / 2


def test_a_lie_has_the_size_it_is_given():
    assert games.less_noise(Gaussian(1.0, 4.0), 2) == Gaussian(
        1.0, 2.0
    ) and games.less_noise(Rec(1.0, 0.5, 3), 2) == Rec(1.0, 0.25, 3)
    assert (
        games.less_noise(PrivQuant(1.0, 4, 1.0), 1.5).eps == 1.5
        and games.less_noise(Imvu(1.0, 0.5), 3).eps == 1.5
        and set(games.NOISE) == {"sigma", "std", "eps"}
    )


# ---- the laws that mechanisms write down a second time


@tabled("cls", [ddgauss.DDGauss, skellam.Skellam])
@tabled(
    "parameters, d",
    [
        (dict(sigma=1.0, n_clients=6, ring_bits=6), 1),
        (dict(sigma=0.7, n_clients=3, ring_bits=5), 1),
        (dict(sigma=1.0, n_clients=6, ring_bits=6, tolerance=0.2), 4),
        (dict(sigma=1.5, n_clients=3, ring_bits=6), 2),
    ],
)
def test_the_law_of_a_projection_is_that_of_real_plays(cls, parameters, d):
    """Chi-square of 40,000 sums in whole steps, client there and not, seldom values put
    together.
    """
    m, n = cls(1.0, **parameters), 40_000
    scale = m.step(d) / math.sqrt(on_ring.padded(d))
    for sign, present, relation in (
        (1, True, "zero-out"),
        (0, False, "zero-out"),
        (-1, False, "replace"),
    ):
        ratio = (
            m.play(relation, present, n, seed_tree(0, "law", sign), d=d)["likelihood"]
            * m.sigma**2
        )
        seen = np.rint(
            (ratio / 2 if relation == "replace" else ratio + 0.5) / scale
        ).astype(int) + on_ring.padded(d) * 2 ** (m.ring_bits - 1)
        want = m.score_law(d, sign) * n
        assert abs(want.sum() / n - 1) < 1e-9
        got = np.bincount(seen, minlength=len(want))
        many = want > 8
        got, want = (
            np.append(got[many], got[~many].sum()),
            np.append(want[many], want[~many].sum()),
        )
        assert stats.chisquare(got, want / want.sum() * n).pvalue > ALARM / 3


def test_a_coordinate_wraps():
    m = skellam.Skellam(1.0, 3.0, 4, 5, k=2.0)
    law = m.coordinate_law(1, 3)
    assert len(law) == 32 and abs(law.sum() - 1) < 0.1 and law.argmax() == 19
    other = ddgauss.DDGauss(1.0, 3.0, 4, 5, k=2.0).coordinate_law(1, -2)
    assert abs(other.sum() - 1) < 1e-12 and other.argmax() == 14


@pytest.mark.parametrize("s, bits", [(0.3, 1), (1.0, 1), (1.0, 3), (1.6, 7)])
def test_the_curve_of_rec_lies_just_above_its_law(s, bits):
    """Monte Carlo of the ratio itself, 200,000 null messages: above it but for five
    standard errors, and by 3 per cent at most.
    """
    K, n = 2**bits, 200_000
    z = seed_tree(0, "ratio", bits).standard_normal((n, K))
    w = K * np.exp(s * z[:, 0]) / np.exp(s * z).sum(1)
    for relation, q in (("null-slot", 1.0), ("poisson-null", 0.1)):
        r = 1 + q * (w - 1)
        for eps, bound in zip(
            EPS[:4],
            Rec(s, 1.0, bits).curve(
                relation, EPS[:4], n_clients=round(1 / q), cohort=1
            ),
        ):
            sides = [
                np.maximum(r - math.exp(eps), 0),
                np.maximum(1 - math.exp(eps) * r, 0),
            ]
            mean, error = max((x.mean(), x.std() / math.sqrt(n)) for x in sides)
            assert mean - 5 * error <= bound <= 1.03 * mean + 5 * error + 1e-6, (
                relation,
                eps,
            )
    D, law = loss_law(s, K, True)
    assert (
        (np.diff(D) > 0).all()
        and abs(law.sum() - 1) < 1e-9
        and (Rec(s, 1.0, bits).curve("local", EPS) == 1).all()
    )


def test_the_curve_of_privquant_is_that_of_listed_messages():
    "All K^d outputs by their probabilities, d = 4 and K = 3."
    m = PrivQuant(1.0, 3, 2.0, "best")
    cal = m.calibration(4)
    outs = np.array(list(itertools.product(range(3), repeat=4)))
    from dpcomm.mechanisms.privquant import log_law

    laws = [np.exp(log_law((outs == corner).sum(1), cal)) for corner in (2, 0)]
    np.testing.assert_allclose(
        m.curve("local", EPS, d=4), games.listed_curve(*laws, EPS), atol=1e-12
    )
    assert randomise(np.zeros((3, 4), np.int64), cal, seed_tree(0)).shape == (3, 4)


@pytest.mark.parametrize("eps, repeats, d", [(1.0, 1, 1), (0.5, 3, 2), (3.0, 2, 8)])
def test_the_curve_of_vqsgd_is_that_of_its_corners(eps, repeats, d):
    m = VqSgd(1.0, eps, repeats)
    laws = law(m, worst_case(m, d)).numpy()
    np.testing.assert_allclose(
        m.curve("local", EPS, d=d),
        games.listed_curve(*games.repeated(*laws, repeats), EPS),
        atol=1e-12,
    )


def test_the_score_of_roundings_is_a_log_likelihood():
    "E[exp(score)] = 1 under no client, and the score is larger under one."
    m = quantised.Quantised(1.0, 1.0, 2, "random")
    x = seed_tree(0, "rounding").standard_normal((200_000, 16)) * m.std
    ratio = np.exp(quantised.mixture_ratio(m, "zero-out", x))
    assert abs(ratio.mean() - 1) <= radius(ratio.std(), len(ratio))
    swap = quantised.mixture_ratio(m, "replace", x[:100])
    np.testing.assert_allclose(
        swap, -quantised.mixture_ratio(m, "replace", -x[:100]), atol=1e-9
    )


def test_curves_that_are_not_stated_claim_nothing():
    assert (
        Gaussian(1.0, 1.0).curve("zero-out", EPS, n_clients=10, cohort=1) == 1
    ).all()
    for m in (ddgauss.DDGauss(1.0, 1.0, 4, 24), skellam.Skellam(1.0, 1.0, 4, 24)):
        assert (m.curve("zero-out", EPS) == 1).all() and (
            type(m)(1.0, 1.0, 4, 12).curve("zero-out", EPS, d=64) == 1
        ).all()
    assert (mvu.Mvu(1.0, 1.0).curve("replace", EPS) < 1).all()
