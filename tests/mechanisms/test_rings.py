"""Integer noise on a ring from its parts: exact counts and their wide laws; grid, shares,
sums, epsilon and calibration of the distributed discrete Gaussian and of Skellam.

What every mechanism must do is in test_conformance. Statistical tests have false-alarm rate
1e-6, split over their comparisons, and fixed seeds. Independent yardsticks: sums of Poisson
terms in long decimals, scipy's Poisson and Bessel functions, and enumerated roundings.
"""

import functools
import itertools
import math
import zlib
from decimal import Decimal, getcontext, localcontext
from fractions import Fraction

import numpy as np
import pytest
import torch
from laws import ALARM, fit, radius
from scipy import stats
from scipy.special import ive
from tables import tabled

from dpcomm.core import vectors as vectors_module
from dpcomm.core import wire
from dpcomm.core.random import Insecure, seed_tree
from dpcomm.mechanisms import contract, ddgauss, noisy_sums
from dpcomm.mechanisms import skellam as skellam_module
from dpcomm.mechanisms.ddgauss import DDGauss
from dpcomm.mechanisms.skellam import Skellam
from dpcomm.privacy.accounting import INTEGER_ORDERS, gaussian_guarantee
from dpcomm.secagg import discrete, ring
from dpcomm.secagg import skellam_noise as counts
from dpcomm.secagg.ring import Ring, rounded_norm
from dpcomm.secagg.skellam_noise import poisson, skellam

MEANS = [Fraction(x) for x in ("1e-9", "1/3", 1, "5/2", 0.7, 40, "1234567/1000")]


def fits(x, mu, reach):
    "p-value of Skellam draws; what lies beyond `reach` counts as its end."
    law = ive(np.abs(np.arange(-reach, reach + 1)), float(mu))
    seen = np.bincount(np.clip(x, -reach, reach) + reach, minlength=2 * reach + 1)
    return fit(seen, law / law.sum())


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


def test_a_word_that_equals_a_threshold_is_settled_on_either_side(monkeypatch):
    mu, asked = Fraction(3), []
    law = counts.poisson_weights, mu
    found = discrete.inversion_table(law, 64)[1]
    settle = discrete.resolve
    told = lambda *a: asked.append(a[1]) or settle(*a)  # noqa: E731
    monkeypatch.setattr(discrete, "resolve", told)
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


# ---- privacy


def test_the_guarantee_is_the_bound_at_the_honest_noise():
    "By hand from the bound, for the rounded vector, or two opposite ones, and 35 of 50 shares."
    m, d = Skellam(1.0, 2.0, 50, 10, tolerance=0.3), 300
    d2 = rounded_norm(1 / m.step(d), d, m.beta)
    d1, mu = min(math.sqrt(d) * d2, d2**2), 35 * (m.share / m.step(d)) ** 2
    run = dict(rounds=5, delta=1e-5, d=d)
    assert m.honest == 35 and Skellam(1.0, 2.0, 51, tolerance=0.3).honest == 36
    for relation, far in (("zero-out", 1), ("replace", 2)):  # in L2, and in L1
        curve = 5 * skellam_module.rdp_skellam(INTEGER_ORDERS, mu, far * d2, far * d1)
        known = min(curve + math.log(1e5) / (INTEGER_ORDERS - 1))
        made = m.guarantee(**run, relation=relation, accountant="rdp-classic")
        assert made.eps == pytest.approx(known)
    assert m.guarantee(**run).eps < known


def test_the_law_of_a_share_at_the_grid():
    "A vector of zeros: nothing but Skellam noise in every rotated coordinate."
    m = Skellam(1.0, 1.0, 10, ring_bits=8)
    z = Ring(8).lift(m.words(torch.zeros(4000, 8), seed_tree(0, "zero"))).ravel()
    mu = (m.share / m.step(8)) ** 2
    assert fits(z, mu, int(5 * math.sqrt(mu)) + 3) > ALARM


def vectors(n, d, norm, *path):
    x = torch.from_numpy(seed_tree(0, "vectors", n, d, *path).standard_normal((n, d)))
    return (norm * x / x.norm(dim=1, keepdim=True)).float()


# ---- grid, shares and sums


@tabled("d", [1, 2, 3, 16, 100])
@tabled("bits, n", [(8, 4), (16, 100), (20, 1000)])
@tabled("kind, padded", [(DDGauss, False), (DDGauss, True), (Skellam, False)])
def test_the_grid_solves_its_equation(d, bits, n, kind, padded):
    m = kind(1.5, 0.8, n, bits, tolerance=0.25, padded=padded)
    gamma, P = m.step(d), 2 ** (math.ceil if padded else math.floor)(math.log2(d))
    held = 2 * m.k * math.sqrt((n * 1.5) ** 2 / P + n * (gamma**2 / 4 + m.share**2))
    assert m.block(d) == P and 2**bits * gamma == pytest.approx(held)
    assert float(m.variance(d)) == pytest.approx((m.share / gamma) ** 2)


def test_the_ring_holds_what_it_should():
    "The worst case, sixteen clients sending one vector in 4,096 coordinates."
    m, d = DDGauss(1.0, 0.3, 16, 12), 4096
    u = vectors(1, d, 1.0).repeat(16, 1)
    true = sum(m.lifted(s, d).double() for s in m.words(u, seed_tree(0, "hold")))
    x = vectors_module.rotate(true, 0).abs() / m.step(d)
    # 6.3e-5 a coordinate beyond four deviations: the binomial bound at 1e-6
    assert (x > 2**11).sum() <= 6 and x.max() > 2**10


@tabled("kind", [DDGauss, Skellam])
def test_a_message_of_the_padded_version_is_read_and_not_added(kind):
    "Nothing goes the other way, and sums are of one version."
    new, old = kind(1.0, 0.5, 4), kind(1.0, 0.5, 4, padded=True)
    u = vectors(1, 21, 0.9)[0]
    message = old.encode(u, Insecure(5))
    assert 8 * len(message.payload) == old.bits(21).payload == 32 * 16
    assert torch.equal(new.decode(message), old.decode(message))
    bare = repr(old).replace(", padded=True", "")
    assert old.fingerprint == zlib.crc32(bare.encode())
    with pytest.raises(wire.BadMessage, match="parameters that differ"):
        contract.Total(new, 21).add(message)
    with pytest.raises(wire.BadMessage, match="parameters that differ"):
        old.decode(new.encode(u))


# ---- epsilon


def test_a_guarantee_counts_only_honest_shares():
    names = dict(rounds=5, delta=1e-5, d=500)
    m = DDGauss(1.0, 1.0, 40, 18, tolerance=0.25)
    g = m.guarantee(**names, accountant="rdp-classic")
    far, share = m.longest(500), (m.share / m.step(500)) ** 2
    honest, careless = (
        min(
            5 * INTEGER_ORDERS * ddgauss.concentrated(far, share, n, 500) ** 2 / 2
            + math.log(1e5) / (INTEGER_ORDERS - 1)
        )
        for n in (30, 40)
    )
    assert careless < honest == pytest.approx(g.eps)
    assert "30 of 40 honest shares" in g.note
    assert not g.premises and m.guarantee(**names).eps < honest
    sampled = m.guarantee(**names, sampling="poisson", n_clients=400, cohort=40)
    assert sampled.premises["shares"].startswith("as if the noise had one size")
    assert "not the cohorts" in sampled.note


# ---- calibration


@tabled("q, tolerance", [(1.0, 0.0), (0.02, 0.0), (0.02, 0.2)])
def test_calibration_meets_its_target_with_the_least_noise(q, tolerance):
    more = dict(rounds=4, q=q, ring_bits=14, tolerance=tolerance)
    m = ddgauss.calibrate(2.0, 1e-5, 0.5, 64, 5000, **more)
    drawn = dict(sampling="poisson", n_clients=64 / q, cohort=64) if q < 1 else {}
    run = dict(rounds=4, delta=1e-5, d=5000) | drawn
    found = m.guarantee(**run, accountant="rdp-classic")
    assert 1.999 < found.eps <= 2.0 * (1 + 1e-5) and m.guarantee(**run).eps < 2.0
    assert m.tolerance == tolerance and m.clip_norm == 0.5
    orders = INTEGER_ORDERS if q == 1 else ddgauss.SAMPLED
    carried = m.sigma * math.sqrt(m.honest / (m.n_clients * (1 - tolerance)))
    names = dict(sampling=found.sampling, relation="zero-out", orders=orders)
    gauss = gaussian_guarantee(carried, 1e-5, q, 4, **names)
    assert gauss.eps < 2.0, "rounding costs something"


def test_too_few_bits_fail_loudly_and_name_what_works():
    target = dict(eps=1.0, delta=1e-5, clip_norm=1.0, n_clients=100, d=2**18)
    calibrate = functools.partial(ddgauss.calibrate, **target, rounds=10, q=1.0)
    with pytest.raises(ValueError, match="ring_bits is 8; eps = 1.*use at least") as e:
        calibrate(ring_bits=8)
    enough = int(str(e.value).split("at least ")[1].split()[0])
    found = calibrate(ring_bits=enough)
    assert found.guarantee(rounds=10, delta=1e-5, d=2**18).eps <= 1.0 * (1 + 1e-5)
    with pytest.raises(ValueError, match=f"at least {enough} bits"):
        calibrate(ring_bits=enough - 1)


def test_noise_cannot_buy_back_missing_bits():
    "The epsilon of a release has a limit in sigma of about k sqrt(D) / 2^b."
    D, limit = 2**16, 4 * 256 / 2**9
    eps = [DDGauss(1.0, s, 10, 9).release_epsilon(D) for s in (1.0, 1e2, 1e4, 1e6)]
    assert eps == sorted(eps, reverse=True)
    assert eps[-1] == pytest.approx(limit, rel=0.05) and eps[-2] < 1.01 * eps[-1]
    assert ddgauss.fit(1 / (0.9 * limit), 1.0, 10, D, 9, most=1e6) is None
    found = ddgauss.fit(1 / (1.5 * limit), 1.0, 10, D, 9, most=100.0)
    assert found.release_epsilon(D) == pytest.approx(1.5 * limit)
    # less than half a step of noise
    with pytest.raises(ValueError, match="variance is"):
        DDGauss(1.0, 1.0, 10**4, 12).release_epsilon(1)


# ---- moments


@tabled("bits, d, bias", [(6, 1, 0.2306), (8, 1, 0.0489), (6, 4, 0.022)])
def test_the_bias_of_a_bounded_rounding_is_known(bits, d, bias):
    "At an audited setting a quarter of C is lost; 200,000 messages agree."
    m, n, u = DDGauss(1.0, 1.0, 6, bits), 200_000, torch.eye(d)[:1]
    known, variance = (part[0].double().numpy() for part in m.moments(u))
    assert np.linalg.norm(known) == pytest.approx(bias, abs=5e-4)
    z = m.words(u.expand(n, -1), seed_tree(0, "bias", bits, len(known)))
    error = (m.lifted(z, len(known)).double() - u).mean(0).numpy() - known
    assert (np.abs(error) <= radius(np.sqrt(variance), n, 2 * len(known))).all()


def test_the_normal_approximation_of_a_bounded_rounding():
    "All 65,536 roundings of 16 coordinates; within a twentieth of a step."
    up = np.array(list(itertools.product((0, 1), repeat=16)))
    for length, rng in ((3.0, 0), (10.0, 1), (100.0, 2), (40.0, 3)):
        x = np.random.default_rng(rng).standard_normal(16)
        x *= length / np.linalg.norm(x)
        low, bound = np.floor(x), ring.rounded_norm(length, 16, math.exp(-0.5))
        p = np.where(up, x - low, 1 + low - x).prod(1)
        p *= ((low + up) ** 2).sum(1) <= bound**2
        truth = p @ (low + up) / p.sum()
        spread = p @ (low + up - truth) ** 2 / p.sum()
        mean, variance = noisy_sums.normal_rounding(x, bound, lambda rows: rows, 16)
        listed = noisy_sums.listed_rounding(x[:8], bound, lambda rows: rows)
        assert np.isfinite(listed).all()
        assert np.abs(x + mean - truth).max() < 0.05
        assert np.linalg.norm(truth - x) > np.linalg.norm(truth - x - mean)
        assert abs(variance.mean() - spread.mean()) < 0.01


# ---- wide rings


@tabled(
    "kind, bits, n, sigma, d",
    [
        (DDGauss, 28, 4, 1.0, 61_706),
        (DDGauss, 30, 4, 1.0, 1000),
        (DDGauss, 32, 4, 1.0, 61_706),
        (DDGauss, 32, 6, 0.7, 1_000_000),
        (Skellam, 32, 4, 1.0, 61_706),
    ],
)
def test_a_wide_ring_takes_every_clipped_update(kind, bits, n, sigma, d, monkeypatch):
    "Single precision clips to within 2^-23, which is up to 2^8 steps of such a grid."
    m, rounded, honest = kind(1.0, sigma, n, bits), [], noisy_sums.conditional_round

    def conditional_round(x, bound, rng):
        rounded.append((honest(x, bound, rng), bound))
        return rounded[-1][0]

    u = seed_tree(0, "wide", bits, d).standard_normal((2, d), dtype=np.float32)
    silence = lambda m, variance, shape, rng: np.zeros(shape, np.int64)  # noqa: E731
    monkeypatch.setattr(noisy_sums, "conditional_round", conditional_round)
    monkeypatch.setattr(kind, "draw", silence)
    words = m.words(torch.from_numpy(u), seed_tree(1))
    ((z, bound),) = rounded
    assert np.array_equal(words, m.ring.wrap(z)) and len(z) == 2
    assert bound == ring.rounded_norm(1.0 / m.step(d), m.size(d), m.beta)
    assert max(ring.squared_length(z)) <= Fraction(bound) ** 2
