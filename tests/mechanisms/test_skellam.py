"""The Skellam mechanism from its parts: exact counts, shares, the bound, the bits.

What every mechanism must do is in test_conformance. Statistical tests have false-alarm rate
1e-6 and fixed seeds. Independent yardsticks: sums of Poisson terms in long decimals, scipy's
Poisson and Bessel functions, convolutions, and enumerated Renyi divergences.
"""

import itertools
import math
from decimal import Decimal, getcontext, localcontext
from fractions import Fraction

import numpy as np
import pytest
import torch
from laws import ALARM, fit, radius
from scipy import stats
from scipy.special import ive
from tables import tabled

from dpcomm.core.random import seed_tree
from dpcomm.core.vectors import rotate
from dpcomm.mechanisms import skellam as module
from dpcomm.mechanisms.skellam import Skellam
from dpcomm.privacy.accounting import (
    INTEGER_ORDERS,
    rdp_gaussian,
    rdp_subsampled_gaussian,
)
from dpcomm.secagg import discrete
from dpcomm.secagg import skellam_noise as counts
from dpcomm.secagg.ring import Ring, rounded_norm
from dpcomm.secagg.skellam_noise import poisson, skellam

MEANS = [Fraction(x) for x in ("1e-9", "1/3", 1, "5/2", 0.7, 40, "1234567/1000")]


def law(mu, reach):
    "Skellam probabilities of -reach..reach."
    return ive(np.abs(np.arange(-reach, reach + 1)), float(mu))


def fits(x, mu, reach):
    "p-value of Skellam draws; what lies beyond `reach` counts as its end."
    seen = np.bincount(np.clip(x, -reach, reach) + reach, minlength=2 * reach + 1)
    return fit(seen, law(mu, reach) / law(mu, reach).sum())


def poisson_fit(x, mu, cells=60):
    "p-value of counts in cells of about equal probability."
    edges = np.unique(stats.poisson.ppf(np.linspace(0, 1, cells + 1)[1:-1], float(mu)))
    p = np.diff(np.concatenate([[0], stats.poisson.cdf(edges, float(mu)), [1]]))
    return fit(np.bincount(np.searchsorted(edges, x, side="left"), minlength=len(p)), p)


def decimals(mu):
    "P(X <= k) for k = 0, 1, ... as decimals of 60 digits, far into the tail."
    with localcontext(prec=60):
        mean = Decimal(mu.numerator) / mu.denominator
        term = (-mean).exp()
        found, k = [term], 0
        while k < mean or term > Decimal(10) ** -50:
            k += 1
            term = term * mean / k
            found.append(found[-1] + term)
        return found


# ---- counts


@tabled("mu", MEANS, ids=str)
@tabled("bits", [8, 64, 128])
def test_thresholds_are_the_first_bits_of_the_cumulative_law(mu, bits):
    start, found = discrete.thresholds((counts.poisson_weights, mu), bits)
    truth = decimals(mu)
    with localcontext(prec=60):
        for k, t in enumerate(found, start):
            exact = int(truth[min(k, len(truth) - 1)] * 2**bits)
            assert t == min(exact, 2**bits - 1)
    assert found[-1] == 2**bits - 1 or len(found) == 1


@tabled("bits", [1, 6, 64])
@tabled("mu", [Fraction(1, 3), Fraction(40), Fraction(1000, 7)], ids=str)
def test_counts_are_poisson_however_short_the_words(mu, bits):
    "With words of one bit every draw is settled by further bits; the law must not notice."
    words = seed_tree(0, "words", bits).integers(2**bits, size=20_000, dtype=np.uint64)
    law = counts.poisson_weights, mu
    x = discrete.by_inversion(law, words, seed_tree(0, "more", bits), bits)
    assert x.dtype == np.int64 and poisson_fit(x, mu) > ALARM / 9


def test_a_word_that_equals_a_threshold_is_settled_on_either_side(monkeypatch):
    mu, asked = Fraction(3), []
    law = counts.poisson_weights, mu
    found = discrete.inversion_table(law, 64)[1]
    settle = discrete.resolve
    monkeypatch.setattr(
        discrete, "resolve", lambda *a: asked.append(a[1]) or settle(*a)
    )
    one = np.uint64(1)
    words = np.array([found[2]] * 400 + [found[2] - one, found[2] + one], np.uint64)
    x = discrete.by_inversion(law, words, seed_tree(0, "ties"), 64)
    assert asked == [int(found[2])] * 400
    assert set(x[:400].tolist()) == {2, 3} and x[400:].tolist() == [2, 3]
    # zero lies below every threshold of a small mean
    assert settle(law, 0, 64, seed_tree(1)) == 0


# ---- wide laws


@tabled("bits", [40, 100])
def test_heights_are_those_of_the_recursion(bits):
    mu, before = Fraction(2**22) + Fraction(1, 3), getcontext().prec
    w, start, error = counts.poisson_weights(mu, bits + 60)
    for k in (2**22 - 12_000, 2**22 - 1, 2**22, 2**22 + 1, 2**22 + 5000):
        height = counts.relative_probability(mu, k, bits)
        assert abs(height - (w[k - start] >> 60)) <= 1
    assert getcontext().prec == before, "the caller's context is left alone"


WIDE = [Fraction(2**22 + 1), Fraction(10**9) + Fraction(1, 7), Fraction(2**57)]


@tabled("mu", WIDE, ids=str)
def test_chances_inside_a_block_lie_within_the_margin_of_a_line(mu):
    t, rng = counts.block_table(mu), seed_tree(0, "margin")
    n = len(t.weight)
    assert t.shift <= 28 and len(t.law) == n + 2 == len(t.margin) - 1
    for j in [*rng.integers(n, size=40).tolist(), 0, n // 2, n - 1]:
        for y in (0, 2**t.shift - 1, int(rng.integers(2**t.shift))):
            height = counts.relative_probability(mu, t.first + (j << t.shift) + y, 200)
            chance = Fraction(height * t.scale, t.weight[j]) / 2**200
            line = int(t.chance[j + 1]) + (int(t.slope[j + 1]) * y >> t.shift)
            assert chance <= 1
            assert abs(chance * 2**36 - line) <= int(t.margin[j + 1]) - 1


@tabled("mu", WIDE, ids=str)
def test_tails_can_be_reached_and_are_never_short_of_weight(mu):
    "Every count of a tail is proposed with at least the probability that its height asks for."
    t = counts.block_table(mu)
    last = t.first + (len(t.weight) << t.shift)
    assert int(t.law[-1]) < 2**64 and t.law[0] == 1 == t.law[-1] - t.law[-2]
    for edge, way in ((t.first - 1, -1), (last, 1)):
        places = [edge + way * (far << t.shift + 8) for far in range(3)]
        a, b, c = (counts.relative_probability(mu, k, 900) for k in places)
        assert Fraction(a, 2**900) * t.scale * 2**9 < 1 and 4 * c < 2 * b < a
    overs = []
    for right, i in itertools.product((0, 1), range(300)):
        k, over = counts.propose_from_tail(t, right, seed_tree(0, "tail", right, i))
        away = k - last if k > t.first else t.first - 1 - k
        assert away >= 0 and over == 2 ** (9 + (away >> t.shift + 8))
        overs.append(over)
    assert 100 < overs.count(2**9) < 500 and max(overs) > 2**11


@tabled("bits, most, n", [(64, 1024, 50_000), (12, 64, 4000), (16, 128, 4000)])
def test_wide_counts_are_poisson_with_short_words_and_few_blocks(bits, most, n):
    mu, rng = Fraction(2**23) + Fraction(1, 2), seed_tree(0, "wide", bits, most)
    x = counts.counts_by_rejection(mu, n, rng, bits, most)
    assert poisson_fit(x, mu) > ALARM / 3


@tabled("mu", [1e-3, 2.5, 10**5, 2**25, 2**25 + 1, 1e12, 2**58], ids=str)
def test_poisson_by_mean_variance_and_law(mu):
    n = 50_000
    x = poisson(mu, (n // 10, 10), seed_tree(0, "poisson"))
    assert x.shape == (n // 10, 10) and x.dtype == np.int64 and x.min() >= 0
    z = (x.ravel() - float(mu)) / math.sqrt(mu)
    assert abs(z.mean()) <= radius(1, n, 18) + 1 / math.sqrt(mu) / n
    if mu > 1:
        assert abs(z.var() - 1) <= radius(math.sqrt(2 + 1 / mu), n, 18)
    if mu < 10**10:
        assert poisson_fit(x.ravel(), mu) > ALARM / 18
    else:  # the law is normal to within 1e-6, far below what these draws can see
        assert stats.kstest(z, "norm").pvalue > ALARM / 18


# ---- Skellam


@tabled("mu", [Fraction(1, 4), 7.25, 900], ids=str)
def test_skellam_follows_the_bessel_law(mu):
    x = skellam(mu, 100_000, seed_tree(0, "skellam"))
    assert fits(x, mu, int(9 * math.sqrt(mu)) + 3) > ALARM / 3


def test_a_sum_of_shares_is_the_same_law_exactly():
    for n, mu in ((2, 0.3), (5, 2.0), (10, 0.1)):
        total = law(mu, 120)
        for _ in range(n - 1):
            total = np.convolve(total, law(mu, 120), mode="same")
        np.testing.assert_allclose(total, law(n * mu, 120), atol=1e-14)
    draws = skellam(Fraction(3, 10), (10, 60_000), seed_tree(0, "ten")).sum(0)
    assert fits(draws, 3, 14) > ALARM


# ---- privacy


def test_amplification_of_a_gaussian_is_the_gaussians():
    orders = np.arange(2, 200)
    found = module.amplify(rdp_gaussian(orders, 1.5), 1 / 60)
    np.testing.assert_allclose(
        found, rdp_subsampled_gaussian(orders, 1.5, 1 / 60), rtol=1e-9
    )
    curve = rdp_gaussian(orders, 0.7)
    assert np.array_equal(module.amplify(curve, 1), curve)
    assert not module.amplify(curve, 0).any()
    assert not module.amplify(0 * curve, 0.3).any()


def test_the_guarantee_is_the_bound_at_the_honest_noise():
    "Composed by hand from the bound, for the rounded vector and 35 of 50 shares."
    m, d = Skellam(1.0, 2.0, 50, tolerance=0.3), 300
    d2 = rounded_norm(1 / m.step(d), d, m.beta)
    d1, mu = min(math.sqrt(d) * d2, d2**2), 35 * (m.share / m.step(d)) ** 2
    curve = 5 * module.rdp_skellam(INTEGER_ORDERS, mu, d2, d1)
    known = min(curve + math.log(1e5) / (INTEGER_ORDERS - 1))
    run = dict(rounds=5, delta=1e-5, d=d)
    assert m.honest == 35
    assert m.guarantee(**run, accountant="rdp-classic").eps == pytest.approx(known)
    assert m.guarantee(**run).eps < known


# ---- shares and sums


@tabled("d, bits, n", [(1, 6, 5), (100, 16, 20), (1000, 10, 100)])
def test_the_grid_fits_the_ring(d, bits, n):
    m = Skellam(2.0, 0.3 * math.sqrt(n) / 2.0, n, bits)
    gamma, P = m.step(d), 2 ** math.floor(math.log2(d))
    room = 4 * math.sqrt((2.0 * n) ** 2 / P + n * (0.3**2 + gamma**2 / 4))
    assert 2**bits * gamma / 2 == pytest.approx(room)


def test_the_noise_of_a_share_and_the_length_of_its_vector(monkeypatch):
    m, u = (
        Skellam(1.0, 1.0, 4, ring_bits=6),
        0.4 * torch.randn(200, 60, generator=torch.Generator().manual_seed(0)),
    )
    scale, asked = m.step(60), []
    monkeypatch.setattr(
        module,
        "skellam",
        lambda mu, shape, rng: asked.append(mu) or np.zeros(shape, np.int64),
    )
    z = Ring(6).lift(m.words(u, seed_tree(0, "shares")))
    assert float(asked[0]) == pytest.approx((m.share / scale) ** 2) and m.share == 0.5
    assert np.linalg.norm(z, axis=1).max() <= rounded_norm(1 / scale, 60, m.beta)
    exact = (rotate(m.clip(u).double(), 0) / scale).numpy()
    assert abs(z - exact).max() < 1 + 1e-9, "rounded to a neighbour"
    assert z.shape == (200, 60) and len(np.unique(z)) > 3


def test_the_law_of_a_share_at_the_grid():
    "A vector of zeros: nothing but Skellam noise in every rotated coordinate."
    m = Skellam(1.0, 1.0, 10, ring_bits=8)
    z = Ring(8).lift(m.words(torch.zeros(4000, 8), seed_tree(0, "zero"))).ravel()
    mu = (m.share / m.step(8)) ** 2
    assert fits(z, mu, int(5 * math.sqrt(mu)) + 3) > ALARM


# ---- the game


def test_a_swap_doubles_both_distances(monkeypatch):
    "Two vectors of one length may be opposite: twice as far apart in L2, and in L1."
    asked, curve = [], module.rdp_skellam
    monkeypatch.setattr(
        module, "rdp_skellam", lambda *a: asked.append(a[2:]) or curve(*a)
    )
    for relation in ("zero-out", "replace"):
        Skellam(1.0, 2.0, 50).guarantee(rounds=1, delta=1e-5, d=64, relation=relation)
    (l2, l1), swapped = asked
    assert swapped == (2 * l2, 2 * l1) and l2 <= l1 <= 8 * l2
