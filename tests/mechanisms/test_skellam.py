"""The Skellam mechanism from its parts: exact counts, shares, the bound, the bits.

What every mechanism must do is in test_conformance. Statistical tests have false-alarm rate
1e-6 and fixed seeds. Independent yardsticks: sums of Poisson terms in long decimals, scipy's
Poisson and Bessel functions, convolutions, and enumerated Renyi divergences.
"""

import dataclasses
import math
from decimal import Decimal, getcontext, localcontext
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import ALARM, drawn, fit, radius, same_law
from scipy import stats
from scipy.optimize import brentq
from scipy.special import ive, logsumexp
from tables import tabled

from dpcomm.core import wire
from dpcomm.core.chance import Insecure, seed_tree
from dpcomm.core.vectors import rotate
from dpcomm.mechanisms import contract, on_ring
from dpcomm.mechanisms import skellam as module
from dpcomm.mechanisms.skellam import Skellam
from dpcomm.privacy import audit
from dpcomm.privacy.accounting import (
    INTEGER_ORDERS,
    gaussian_guarantee,
    rdp_gaussian,
    rdp_subsampled_gaussian,
)
from dpcomm.secagg import poisson as poisson_module
from dpcomm.secagg.poisson import poisson, skellam
from dpcomm.secagg.ring import Ring, rounded_norm

MEANS = [
    Fraction(1, 10**9),
    Fraction(1, 3),
    Fraction(1),
    Fraction(5, 2),
    Fraction(0.7),
    Fraction(40),
    Fraction(1234567, 1000),
]


def decimals(mu, digits=60):
    "P(X <= k) for k = 0, 1, ... as decimals, far into the tail."
    with localcontext() as context:
        context.prec = digits
        mean = Decimal(mu.numerator) / mu.denominator
        term = (-mean).exp()
        found, k = [term], 0
        while k < mean or term > Decimal(10) ** (10 - digits):
            k += 1
            term = term * mean / k
            found.append(found[-1] + term)
        return found


def law(mu, reach):
    "Skellam probabilities of -reach..reach."
    return ive(np.abs(np.arange(-reach, reach + 1)), float(mu))


def poisson_fit(x, mu, cells=60):
    "p-value of counts in cells of about equal probability."
    edges = np.unique(stats.poisson.ppf(np.linspace(0, 1, cells + 1)[1:-1], float(mu)))
    p = np.diff(np.concatenate([[0], stats.poisson.cdf(edges, float(mu)), [1]]))
    return fit(np.bincount(np.searchsorted(edges, x, side="left"), minlength=len(p)), p)


# ---- counts


@tabled("mu", MEANS, ids=str)
@tabled("bits", [8, 64, 128])
def test_thresholds_are_the_first_bits_of_the_cumulative_law(mu, bits):
    start, found = poisson_module.thresholds(mu, bits)
    truth = decimals(mu)
    for k, t in enumerate(found, start):
        with localcontext() as context:
            context.prec = 60
            assert t == min(int(truth[min(k, len(truth) - 1)] * 2**bits), 2**bits - 1)
    assert found[-1] == 2**bits - 1 or len(found) == 1


@tabled("mu", MEANS, ids=str)
def test_partial_sums_of_weights_are_low_by_at_most_the_bound(mu):
    """Against the same recursion with 200 more bits, whose own bound is far below one
    unit.
    """
    (low, start, error), (fine, first, _) = (
        poisson_module.poisson_weights(mu, 90 + more) for more in (0, 200)
    )
    sums, exact = np.cumsum(np.array(low, object)), np.cumsum(np.array(fine, object))
    gap = [(int(exact[start - first + i]) >> 200) - int(s) for i, s in enumerate(sums)]
    assert (
        0 <= min(gap)
        and max(gap) + 1 <= error
        and (int(exact[-1]) >> 200) - int(sums[-1]) + 1 <= error
    )


@tabled("bits", [1, 3, 6, 10, 64])
@tabled(
    "mu", [Fraction(1, 3), Fraction(5, 2), Fraction(40), Fraction(1000, 7)], ids=str
)
def test_counts_are_poisson_however_short_the_words(mu, bits):
    """With words of one bit every draw is settled by further bits; the law must not
    notice.
    """
    words = seed_tree(0, "words", bits).integers(2**bits, size=20_000, dtype=np.uint64)
    x = poisson_module.counts_by_inversion(mu, words, seed_tree(0, "more", bits), bits)
    assert x.dtype == np.int64 and poisson_fit(x, mu) > ALARM / 20


def test_a_word_that_equals_a_threshold_is_settled_on_either_side(monkeypatch):
    mu, asked = Fraction(3), []
    start, found, _ = poisson_module.count_table(mu)
    settle = poisson_module.resolve_count
    monkeypatch.setattr(
        poisson_module, "resolve_count", lambda *a: asked.append(a[1]) or settle(*a)
    )
    words = np.concatenate(
        [np.repeat(found[2], 400), found[2:3] - np.uint64(1), found[2:3] + np.uint64(1)]
    )
    x = poisson_module.counts_by_inversion(mu, words, seed_tree(0, "ties"))
    assert len(asked) == 400 and set(asked) == {int(found[2])}
    assert set(x[:400].tolist()) == {2, 3} and x[400:].tolist() == [2, 3]
    assert poisson_module.resolve_count(mu, 0, 64, seed_tree(1)) == 0, (
        "zero lies below every threshold of a small mean"
    )


@given(
    st.fractions(Fraction(1, 1000), 3000),
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20),
)
@drawn
def test_the_guide_agrees_with_a_search(mu, words):
    start, found = poisson_module.thresholds(mu)
    words += [min(t + step, 2**64 - 1) for t in found[::7] for step in (0, 1)]
    expected = [start + sum(t <= w for t in found) for w in words if w not in found]
    assert (
        poisson_module.counts_by_inversion(
            mu, np.array([w for w in words if w not in found], np.uint64), seed_tree(0)
        ).tolist()
        == expected
    )
    assert poisson_module.WORD_BITS == 64 and 1 <= poisson_module.GUIDE_BITS <= 20


# ---- wide laws


def test_stirlings_coefficients():
    assert poisson_module.stirling_coefficients(4) == (
        Fraction(1, 12),
        Fraction(-1, 360),
        Fraction(1, 1260),
        Fraction(-1, 1680),
    )
    for n, most in ((2**21, 200), (2**24, 1000)):
        for digits in (1, 11, 12, 60, most):
            terms = digits // 12 + 1
            assert abs(
                poisson_module.stirling_coefficients(terms + 1)[-1]
            ) * 10**digits < n ** (2 * terms + 1), "the first term left out"


@pytest.mark.parametrize("digits", [20, 60])
def test_log_factorials_differ_by_the_logarithms_between(digits):
    n = 2**21
    with localcontext() as context:
        context.prec = digits + 40
        between = sum((Decimal(n + i).ln() for i in range(1, 30)), Decimal(0))
        assert (
            abs(
                poisson_module.log_factorial(n + 29, digits)
                - poisson_module.log_factorial(n, digits)
                - between
            )
            < Decimal(10) ** -digits
        )


@pytest.mark.parametrize("bits", [40, 100])
def test_heights_are_those_of_the_recursion(bits):
    mu = Fraction(2**22) + Fraction(1, 3)
    w, start, error = poisson_module.poisson_weights(mu, bits + 60)
    for k in (2**22 - 12_000, 2**22 - 1, 2**22, 2**22 + 1, 2**22 + 5000):
        assert (
            abs(poisson_module.relative_probability(mu, k, bits) - (w[k - start] >> 60))
            <= 1
        )
    before = getcontext().prec
    context, log_mu, _ = poisson_module.mode_logarithms(mu, 30)
    assert float(log_mu) == pytest.approx(math.log(mu)) and context.prec >= 30
    assert getcontext().prec == before, "the caller's context is left alone"


@pytest.mark.parametrize(
    "mu",
    [Fraction(2**22 + 1), Fraction(10**9) + Fraction(1, 7), Fraction(2**57)],
    ids=str,
)
def test_chances_inside_a_block_lie_within_the_margin_of_a_line(mu):
    t, rng = poisson_module.block_table(mu), seed_tree(0, "margin")
    assert (
        isinstance(t, poisson_module.BlockTable)
        and t.shift <= 28
        and len(t.law) == len(t.weight) + 2 == len(t.margin) - 1
    )
    for j in rng.integers(len(t.weight), size=40).tolist() + [
        0,
        len(t.weight) // 2,
        len(t.weight) - 1,
    ]:
        for y in (0, 2**t.shift - 1, int(rng.integers(2**t.shift))):
            k = t.first + (j << t.shift) + y
            chance = (
                Fraction(
                    poisson_module.relative_probability(mu, k, 200) * t.scale,
                    t.weight[j],
                )
                / 2**200
            )
            line = int(t.chance[j + 1]) + (int(t.slope[j + 1]) * y >> t.shift)
            assert (
                chance <= 1 and abs(chance * 2**36 - line) <= int(t.margin[j + 1]) - 1
            )


@pytest.mark.parametrize(
    "mu", [Fraction(2**22 + 1), Fraction(10**12), Fraction(2**57)], ids=str
)
def test_tails_can_be_reached_and_are_never_short_of_weight(mu):
    """Every count of a tail is proposed with at least the probability that its height
    asks for.
    """
    t = poisson_module.block_table(mu)
    total = int(t.law[-1])
    assert total < 2**64 and t.law[0] == 1 and t.law[-1] - t.law[-2] == 1
    for edge, way in ((t.first - 1, -1), (t.first + (len(t.weight) << t.shift), 1)):
        heights = [
            poisson_module.relative_probability(
                mu, edge + way * (far << t.shift + 8), 900
            )
            for far in range(3)
        ]
        assert (
            Fraction(heights[0], 2**900) * t.scale * 2**9 < 1
            and 2 * heights[1] < heights[0]
            and 2 * heights[2] < heights[1]
        )
    where = [
        poisson_module.propose_from_tail(t, right, seed_tree(0, "tail", right, i))
        for right in (0, 1)
        for i in range(300)
    ]
    for k, over in where:
        away = (
            k - t.first - (len(t.weight) << t.shift) if k > t.first else t.first - 1 - k
        )
        assert away >= 0 and over == 2 ** (9 + (away >> t.shift + 8))
    assert (
        100 < sum(over == 2**9 for _, over in where) < 500
        and max(over for _, over in where) > 2**11
    )


def test_a_proposal_is_kept_as_often_as_its_height_says():
    mu, n, rng = Fraction(10**9), 400, seed_tree(0, "kept")
    k = 10**9 + 30_000
    p = math.exp(stats.poisson.logpmf(k, 10**9) - stats.poisson.logpmf(10**9, 10**9))
    found = sum(
        poisson_module.accept_count(
            mu, k, Fraction(3, 4), int(rng.integers(2**36)), 36, rng
        )
        for _ in range(n)
    )
    assert abs(found / n - 0.75 * p) <= radius(0.5, n)
    assert not poisson_module.accept_count(
        mu, -1, Fraction(1), 0, 36, rng
    ) and poisson_module.accept_count(mu, 10**9, Fraction(2), 2**36 - 1, 36, rng)


@pytest.mark.parametrize("bits, most", [(64, 1024), (12, 64), (16, 128)])
def test_wide_counts_are_poisson_with_short_words_and_few_blocks(bits, most):
    mu = Fraction(2**23) + Fraction(1, 2)
    x = poisson_module.counts_by_rejection(
        mu, 4000 if bits < 64 else 100_000, seed_tree(0, "wide", bits, most), bits, most
    )
    assert poisson_fit(x, mu) > ALARM / 3


def test_both_samplers_have_one_law_where_they_meet():
    mu, n = Fraction(poisson_module.LARGEST_TABLE_MEAN), 200_000
    table = poisson_module.counts_by_inversion(
        mu, seed_tree(0, "table").integers(2**64, size=n, dtype=np.uint64), seed_tree(1)
    )
    assert (
        same_law(
            table, poisson_module.counts_by_rejection(mu, n, seed_tree(0, "blocks"))
        )
        > ALARM
    )


@tabled(
    "mu",
    [1e-3, Fraction(1, 3), 2.5, 300, 10**5, 2**25, 2**25 + 1, 1e12, 2**58],
    ids=str,
)
def test_poisson_by_mean_variance_and_law(mu):
    n = 100_000
    x = poisson(mu, (n // 10, 10), seed_tree(0, "poisson"))
    assert x.shape == (n // 10, 10) and x.dtype == np.int64 and x.min() >= 0
    z = (x.ravel() - float(mu)) / math.sqrt(mu)
    assert abs(z.mean()) <= radius(1, n, 18) + 1 / math.sqrt(mu) / n
    if mu > 1:
        assert abs(z.var() - 1) <= radius(math.sqrt(2 + 1 / mu), n, 18)
    if mu < 10**10:
        assert poisson_fit(x.ravel(), mu) > ALARM / 18
    else:  # the law is normal to within 1e-6, far below what 100,000 draws can see
        assert stats.kstest(z, "norm").pvalue > ALARM / 18


# ---- Skellam


@pytest.mark.parametrize("mu", [Fraction(1, 4), 1, 7.25, 900], ids=str)
def test_skellam_follows_the_bessel_law(mu):
    n, reach = 100_000, int(9 * math.sqrt(mu)) + 3
    x = skellam(mu, n, seed_tree(0, "skellam"))
    p = law(mu, reach)
    assert (
        abs(p.sum() - 1) < 1e-9
        and fit(
            np.bincount(np.clip(x, -reach, reach) + reach, minlength=2 * reach + 1),
            p / p.sum(),
        )
        > ALARM / 4
    )


def test_a_sum_of_shares_is_the_same_law_exactly():
    for n, mu in ((2, 0.3), (5, 2.0), (10, 0.1)):
        total = law(mu, 120)
        for _ in range(n - 1):
            total = np.convolve(total, law(mu, 120), mode="same")
        np.testing.assert_allclose(total, law(n * mu, 120), atol=1e-14)
    draws = skellam(Fraction(3, 10), (10, 60_000), seed_tree(0, "ten")).sum(0)
    assert (
        fit(
            np.bincount(np.clip(draws, -14, 14) + 14, minlength=29),
            law(3, 14) / law(3, 14).sum(),
        )
        > ALARM
    )

    def gauss(v):
        return (
            np.exp(-(np.arange(-40, 41) ** 2) / 2 / v)
            / np.exp(-(np.arange(-40, 41) ** 2) / 2 / v).sum()
        )

    assert (
        abs(np.convolve(gauss(0.3), gauss(0.3), mode="same") - gauss(0.6)).sum() > 1e-3
    ), "discrete Gaussians do not"


def test_draws_come_from_the_stream_alone():
    assert np.array_equal(
        skellam(5, 100, seed_tree(3)), skellam(5.0, (100,), seed_tree(3))
    )
    assert not np.array_equal(
        skellam(5, 100, seed_tree(3)), skellam(5, 100, seed_tree(4))
    )
    assert (
        not skellam(0, 5, seed_tree(0)).any()
        and poisson(0, (2, 3), seed_tree(0)).shape == (2, 3)
        and poisson(3, 0, seed_tree(0)).shape == (0,)
    )
    assert (
        len(np.unique(poisson(2**30, 2 * poisson_module.BATCH + 5, seed_tree(0))))
        > poisson_module.BATCH
    ), "batches do not repeat"
    assert skellam(1e-300, 1000, seed_tree(0)).tolist() == [0] * 1000


@tabled("mu", [-1, math.nan, math.inf, "many", None, 2**58 + 1])
def test_means_out_of_range_are_refused(mu):
    with pytest.raises(ValueError, match="mu is .*0 to 2\\^58"):
        poisson(mu, 3, seed_tree(0))
    assert (
        poisson_module.check_mean(0.5) == Fraction(1, 2)
        and poisson_module.LARGEST_MEAN == 2**58
    )


# ---- privacy


def exact(a, shift, mu, q=1.0, reverse=False):
    """Renyi divergence of Skellam noise and its shift, enumerated; with q < 1 of the
    sampled release.
    """
    k = np.arange(
        -int(a * shift + 9 * math.sqrt(mu) + 9),
        int(a * shift + 9 * math.sqrt(mu) + 9) + shift,
    )
    p, r = (np.log(np.maximum(ive(np.abs(k - by), mu), 1e-305)) for by in (shift, 0))
    p, r = (x[np.minimum(p, r) > -700] for x in (p, r))
    if q < 1:
        p = np.logaddexp(math.log(q) + p, math.log1p(-q) + r)
    return logsumexp(a * r + (1 - a) * p if reverse else a * p + (1 - a) * r) / (a - 1)


def test_the_bessel_law_is_the_difference_of_two_counts():
    for mu in (0.2, 8.0, 60.0):
        one = stats.poisson.pmf(np.arange(200), mu / 2)
        np.testing.assert_allclose(
            np.convolve(one, one[::-1])[199 - 40 : 199 + 41],
            law(mu, 40),
            rtol=1e-9,
            atol=1e-300,
        )


@tabled("mu", [0.05, 0.3, 1.0, 4.0, 30.0, 300.0, 3000.0])
def test_the_bound_is_above_the_exact_divergence(mu):
    "In one dimension, and in several, where divergences of the coordinates add up."
    orders = np.array([2, 3, 5, 8, 16, 32])
    for shift in (1, 2, 3, 7):
        truth = np.array([exact(a, shift, mu) for a in orders])
        bound = module.rdp_skellam(orders, mu, shift, shift)
        assert (truth <= bound * (1 + 1e-9)).all()
        if mu >= 300 and shift <= 2:
            assert (bound <= 1.1 * truth).all(), "tight where the grid is fine"
    vector = np.array([3, -1, 1, 1, 0])
    truth = np.array([sum(exact(a, abs(x), mu) for x in vector if x) for a in orders])
    assert (
        truth
        <= module.rdp_skellam(orders, mu, np.linalg.norm(vector), np.abs(vector).sum())
    ).all()


def test_the_bound_with_a_scale_is_the_quoted_one():
    for s, mu, d2, d1, a in ((50, 2.0, 1.0, 3.0, 7), (3, 0.1, 2.0, 2.5, 2)):
        quoted = a * d2**2 / (2 * mu) + min(
            ((2 * a - 1) * s * d2**2 + 6 * d1) / (4 * s**3 * mu**2),
            3 * d1 / (2 * s * mu),
        )
        assert module.rdp_skellam([a], s**2 * mu, s * d2, s * d1)[0] == pytest.approx(
            quoted
        )
    for orders in ([], [1], [2.5], [2, math.nan]):
        with pytest.raises(ValueError, match="orders (is|holds)"):
            module.rdp_skellam(orders, 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="mu is"):
        module.rdp_skellam([2], 0.0, 1.0, 1.0)


@given(st.lists(st.integers(-40, 40), min_size=1, max_size=12))
@drawn
def test_l1_of_whole_numbers_is_bounded_by_l2(x):
    d2 = math.sqrt(sum(v * v for v in x))
    assert sum(map(abs, x)) <= min(math.sqrt(len(x)) * d2, d2**2) + 1e-9


@pytest.mark.parametrize(
    "mu, shift, q", [(1.0, 1, 0.1), (10.0, 3, 0.01), (100.0, 5, 0.5), (2.0, 2, 0.9)]
)
def test_sampling_is_exact_one_way_and_a_bound_the_other(mu, shift, q):
    orders = range(2, 25)
    bound = module.amplify([exact(a, shift, mu) for a in orders], q)
    np.testing.assert_allclose(
        bound, [exact(a, shift, mu, q) for a in orders], rtol=1e-7
    )
    assert (
        np.array([exact(a, shift, mu, q, reverse=True) for a in orders])
        <= bound * (1 + 1e-9)
    ).all()


def test_amplification_of_a_gaussian_is_the_gaussians():
    orders = np.arange(2, 200)
    np.testing.assert_allclose(
        module.amplify(rdp_gaussian(orders, 1.5), 1 / 60),
        rdp_subsampled_gaussian(orders, 1.5, 1 / 60),
        rtol=1e-9,
    )
    curve = rdp_gaussian(orders, 0.7)
    assert (
        np.array_equal(module.amplify(curve, 1), curve)
        and not module.amplify(curve, 0).any()
        and not module.amplify(0 * curve, 0.3).any()
    )
    with pytest.raises(ValueError, match="q is"):
        module.amplify(curve, 1.1)


def test_epsilon_becomes_the_gaussians_as_the_grid_becomes_fine():
    assert module.SAMPLED == 256 and on_ring.ACCOUNTANTS == ("rdp-classic", "rdp-balle")
    for accountant in on_ring.ACCOUNTANTS:
        for relation, q in (("zero-out", 1.0), ("replace", 1.0), ("zero-out", 0.02)):
            orders = INTEGER_ORDERS if q == 1 else np.arange(2, 257)
            gauss = gaussian_guarantee(
                1.5,
                1e-5,
                q,
                7,
                sampling="none" if q == 1 else "poisson",
                relation=relation,
                accountant=accountant,
                orders=orders,
            ).eps
            eps = [
                module.skellam_epsilon(
                    scale,
                    1.0,
                    10,
                    1.5 / math.sqrt(10),
                    1000,
                    q,
                    7,
                    1e-5,
                    relation=relation,
                    accountant=accountant,
                ).eps
                for scale in (0.1, 0.01, 1e-3, 1e-5)
            ]
            assert (
                eps == sorted(eps, reverse=True)
                and gauss <= eps[-1] * (1 + 1e-12)
                and eps[-1] < 1.001 * gauss
                and eps[0] > 1.3 * gauss
            )


def test_epsilon_is_that_of_the_rounded_vector():
    "Composed by hand from the bound."
    d2 = rounded_norm(1 / 0.05, 128, math.exp(-0.5))
    curve = 3 * module.rdp_skellam(
        INTEGER_ORDERS, 20 * (0.4 / 0.05) ** 2, d2, min(math.sqrt(128) * d2, d2**2)
    )
    expected = min(curve + math.log(1e5) / (INTEGER_ORDERS - 1))
    g = module.skellam_epsilon(0.05, 1.0, 20, 0.4, 100, 1.0, 3, 1e-5)
    assert g.eps == pytest.approx(expected) and (
        g.trust,
        g.sampling,
        g.relation,
        g.unit,
        g.accountant,
    ) == ("secagg", "none", "zero-out", "client", "rdp-classic")
    for wrong in (
        dict(scale=0.0),
        dict(clip=-1.0),
        dict(n_clients=0),
        dict(local_std=0.0),
        dict(d=0),
        dict(q=0.0),
        dict(q=1.5),
        dict(rounds=0),
        dict(delta=0.0),
        dict(beta=1.0),
        dict(accountant="pld"),
        dict(relation="local"),
        dict(relation="replace", q=0.5),
    ):
        with pytest.raises(ValueError):
            module.skellam_epsilon(
                **(
                    dict(
                        scale=0.05,
                        clip=1.0,
                        n_clients=20,
                        local_std=0.4,
                        d=100,
                        q=1.0,
                        rounds=3,
                        delta=1e-5,
                    )
                    | wrong
                )
            )


def test_a_guarantee_counts_the_promised_noise_only():
    run = dict(rounds=5, delta=1e-5, d=300)
    m, safe = Skellam(1.0, 2.0, 50), Skellam(1.0, 2.0, 50, tolerance=0.3)
    assert (
        safe.share == pytest.approx(m.share / math.sqrt(0.7))
        and safe.honest == 35
        and m.honest == 50
    )
    assert (
        Skellam(1.0, 1.0, 10, tolerance=0.7).honest == 3
        and Skellam(1.0, 1.0, 3, tolerance=0.5).honest == 2
    )
    g = safe.guarantee(**run)
    assert "35 of 50 honest shares" in g.note and g.eps == pytest.approx(
        m.guarantee(**run).eps, rel=1e-3
    )
    by_hand = module.skellam_epsilon(
        safe.step(300), 1.0, 35, safe.share, 300, 1.0, 5, 1e-5
    )
    assert g.eps == pytest.approx(by_hand.eps)
    sampled = m.guarantee(
        **run, n_clients=1000, cohort=50, sampling="poisson", note="mine"
    )
    assert (
        sampled.eps < 0.4 * g.eps
        and sampled.sampling == "poisson"
        and "mine" in sampled.note
        and "who took part" in sampled.note
    )
    with pytest.raises(ValueError, match="d is None"):
        m.guarantee(1, 1e-5)


def test_calibration_meets_the_target_with_the_least_noise():
    target = dict(
        eps=1.0,
        delta=1e-5,
        clip_norm=1.0,
        n_clients=100,
        d=10_000,
        rounds=200,
        q=1 / 60,
    )
    release = dict(rounds=200, delta=1e-5, d=10_000)
    release |= dict(n_clients=6000, cohort=100, sampling="poisson")
    m = module.calibrate(**target, tolerance=0.1, ring_bits=12)
    assert (
        m.guarantee(**release).eps
        <= 1.0
        < dataclasses.replace(m, sigma=m.sigma * (1 - 1e-4)).guarantee(**release).eps
    )
    assert m.tolerance == 0.1 and m.ring_bits == 12
    balle = module.calibrate(2.0, 1e-5, 1.0, 10, 100, accountant="rdp-balle")
    assert (
        balle.guarantee(1, 1e-5, d=100, accountant="rdp-balle").eps <= 2.0
        and balle.sigma < module.calibrate(2.0, 1e-5, 1.0, 10, 100).sigma
    )


def test_too_few_bits_are_an_error_that_names_enough():
    target = dict(eps=1.0, delta=1e-5, clip_norm=1.0, n_clients=100, d=2**20, most=1.3)
    with pytest.raises(
        ValueError, match=r"ring_bits is 8; .*use at least (\d+) bits"
    ) as found:
        module.calibrate(**target, ring_bits=8)
    enough = int(str(found.value).split("use at least ")[1].split()[0])
    assert module.calibrate(**target, ring_bits=enough).sigma > 1
    with pytest.raises(ValueError, match=f"use at least {enough} bits"):
        module.calibrate(**target, ring_bits=enough - 1)
    for wrong in (
        dict(most=1.0),
        dict(eps=0.0),
        dict(ring_bits=33),
        dict(accountant="pld"),
        dict(delta=1.0),
    ):
        with pytest.raises(ValueError):
            module.calibrate(**(target | wrong))


def words_of(m, message):
    "The words that a message carries."
    payload, D = m.unwrap(message), on_ring.padded(message.d)
    return wire.unpack_bits(payload, m.ring_bits, D)


# ---- shares and sums


def rows(n, d, norm=1.0):
    u = seed_tree(0, "rows", n, d).standard_normal((n, d))
    return torch.from_numpy(
        (norm * u / np.linalg.norm(u, axis=1, keepdims=True)).astype(np.float32)
    )


def test_the_grid_fits_the_ring():
    for d, bits, n in ((1, 6, 5), (100, 16, 20), (1000, 10, 100)):
        m = Skellam(2.0, 0.3 * math.sqrt(n) / 2.0, n, bits)
        gamma = m.step(d)
        room = 4 * math.sqrt(
            (2.0 * n) ** 2 / on_ring.padded(d) + n * (0.3**2 + gamma**2 / 4)
        )
        assert 2**bits * gamma / 2 == pytest.approx(room)
    assert [on_ring.padded(d) for d in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
    with pytest.raises(ValueError, match="ring_bits is 5; .* at least 6 bits"):
        Skellam(1.0, 1.0, 65, ring_bits=5)
    assert Skellam(1.0, 1.0, 65, ring_bits=6).ring_bits == 6


def test_the_noise_of_a_share_and_the_length_of_its_vector(monkeypatch):
    m, u = Skellam(1.0, 1.0, 4, ring_bits=6), rows(200, 60, 3.0)
    scale = m.step(60)
    drawn_with = []
    monkeypatch.setattr(
        module,
        "skellam",
        lambda mu, shape, rng: drawn_with.append(mu) or np.zeros(shape, np.int64),
    )
    z = Ring(6).lift(m.shares(u, seed_tree(0, "shares")))
    assert (
        float(drawn_with[0]) == pytest.approx((m.share / scale) ** 2) and m.share == 0.5
    )
    assert np.linalg.norm(z, axis=1).max() <= rounded_norm(1 / scale, 64, m.beta)
    assert abs(z - (rotate(m.clip(u).double(), 0) / scale).numpy()).max() < 1 + 1e-9, (
        "rounded to a neighbour"
    )
    assert z.shape == (200, 64) and len(np.unique(z)) > 3


def test_the_sum_in_the_ring_opens_to_the_sum_of_the_vectors():
    m, u = Skellam(1.0, 0.5, 20), rows(20, 50)
    messages = [m.encode(row, Insecure(key)) for key, row in enumerate(u)]
    sent = np.stack([words_of(m, message) for message in messages])
    total = m.lifted(Ring(16).sum(sent), 50)
    assert (
        ((total - u.sum(0)).abs() <= radius(0.5 * 1.001, 1, 50)).all()
        and sent.min() >= 0
        and sent.max() < 2**16
    )
    torch.testing.assert_close(
        total, torch.stack([m.decode(x) for x in messages]).sum(0), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(
        m.aggregate(torch.stack([m.decode(x) for x in messages]), 20, None),
        total / 20,
        rtol=1e-4,
        atol=1e-5,
    )


def test_partial_sums_may_leave_the_ring():
    m = Skellam(1.0, 0.01, 8, ring_bits=12, k=0.5)
    u = torch.eye(4)[:1].repeat(8, 1) * torch.tensor([1.0] * 5 + [-1.0] * 3)[:, None]
    z = Ring(12).lift(m.shares(u, seed_tree(0, "partial")))
    assert (abs(np.cumsum(z, axis=0)) >= 2**11).any(), "on the way the sum is outside"
    total = m.lifted(Ring(12).sum(z), 4)
    assert (total - u.sum(0)).abs().max() < 0.1


def test_aggregate_wraps_as_the_ring_does():
    m = Skellam(1.0, 0.5, 16, k=0.5)
    sent = m.shares(torch.eye(4)[:1].repeat(16, 1), seed_tree(0, "wrap"))
    opened = m.lifted(sent, 4)
    truth = m.lifted(Ring(16).sum(sent), 4)
    assert (truth - opened.sum(0)).abs().max() > 1, "the sum leaves the ring"
    torch.testing.assert_close(
        16 * m.aggregate(opened, 16, None), truth, rtol=1e-4, atol=1e-4
    )
    edge = torch.from_numpy(Ring(16).lift(np.array([[2**15, 2**15 - 1, 0, 5]]))) * 1.0
    whole = m.lifted(edge.long().numpy(), 4)
    torch.testing.assert_close(
        m.aggregate(whole, 1, None), whole[0], rtol=1e-4, atol=1e-3
    )


def test_missing_shares_leave_the_promised_noise():
    m = Skellam(1.0, 2.0, 10, tolerance=0.3)
    sent = m.shares(torch.zeros(7 * 3000, 2), seed_tree(0, "left")).reshape(7, 3000, 2)
    x = m.lifted(Ring(16).sum(sent), 2).double().numpy()
    assert (abs(x.var(0) / 4 - 1) <= radius(math.sqrt(2), 3000, 2) + 1e-4).all()


def test_the_law_of_a_share_at_the_grid():
    "A vector of zeros: nothing but Skellam noise in every rotated coordinate."
    m = Skellam(1.0, 1.0, 10, ring_bits=8)
    z = Ring(8).lift(m.shares(torch.zeros(4000, 8), seed_tree(0, "zero"))).ravel()
    mu = (m.share / m.step(8)) ** 2
    reach = int(5 * math.sqrt(mu)) + 3
    p = law(mu, reach)
    assert (
        fit(
            np.bincount(np.clip(z, -reach, reach) + reach, minlength=2 * reach + 1),
            p / p.sum(),
        )
        > ALARM
    )


# ---- the game


def test_the_game_moves_the_sum_by_the_clip():
    m, n = Skellam(2.0, 1.5, 5, tolerance=0.2), 20_000
    for relation, swing in (("zero-out", 1), ("replace", 2)):
        gap = [
            m.play(relation, here, n, seed_tree(0, relation, here))["likelihood"].mean()
            for here in (True, False)
        ]
        assert gap[0] - gap[1] == pytest.approx(
            (swing / 1.5) ** 2, abs=float(2 * radius(swing / 1.5, n))
        )
    two = m.play("zero-out", True, 500, seed_tree(0), rounds=2, n_clients=10, cohort=5)
    assert (
        set(two) == {"likelihood", "bits", "repeat"}
        and np.isfinite(two["likelihood"]).all()
    )
    with pytest.raises(ValueError, match="relation is"):
        m.play("local", True, 10, seed_tree(0))


@pytest.mark.parametrize("parameters", [p for p, _, _ in module.AUDITED], ids=str)
def test_no_audit_refutes_the_claim(parameters):
    m = contract.mechanism("skellam", **parameters)
    for relation in m.relations:
        found = audit.audit_play(
            m, relation, 4000, 1e-2, seed_tree(0, "audit", relation)
        )
        exact = brentq(lambda eps: float(m.curve(relation, eps)) - 1e-2, 0, 50)
        assert found.eps < exact < audit.claim(m, relation, 1e-2).eps and (
            found.eps > 0.2 * exact or m.sigma > 1
        )


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
