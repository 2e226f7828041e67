"""The distributed discrete Gaussian from its parts: grid, shares, sums, epsilon, calibration. What every mechanism must do is in test_conformance.

Statistical tests have false-alarm rate 1e-6, split over their comparisons, and fixed
seeds.
"""

import itertools
import math
import zlib
from fractions import Fraction

import numpy as np
import pytest
import torch
from laws import radius
from tables import tabled

from dpcomm.core import vectors as vectors_module
from dpcomm.core import wire
from dpcomm.core.random import Insecure, seed_tree
from dpcomm.mechanisms import contract, ddgauss, noisy_sums
from dpcomm.mechanisms.ddgauss import DDGauss
from dpcomm.mechanisms.skellam import Skellam
from dpcomm.privacy.accounting import INTEGER_ORDERS, gaussian_guarantee
from dpcomm.secagg import ring
from dpcomm.secagg.ring import Ring

DIMENSIONS = [1, 2, 3, 16, 100]


def vectors(n, d, norm, *path):
    x = torch.from_numpy(seed_tree(0, "vectors", n, d, *path).standard_normal((n, d)))
    return (norm * x / x.norm(dim=1, keepdim=True)).float()


# ---- settings and grid


@tabled("d", DIMENSIONS)
@tabled("bits, n", [(8, 4), (16, 100), (20, 1000)])
@tabled("padded", [False, True])
def test_the_grid_solves_its_equation(d, bits, n, padded):
    m = DDGauss(1.5, 0.8, n, bits, tolerance=0.25, padded=padded)
    gamma, P = m.step(d), 2 ** (math.ceil if padded else math.floor)(math.log2(d))
    held = 2 * m.k * math.sqrt((n * 1.5) ** 2 / P + n * (gamma**2 / 4 + m.share**2))
    assert m.block(d) == P and 2**bits * gamma == pytest.approx(held)
    assert float(m.variance(d)) == pytest.approx((m.share / gamma) ** 2)


# ---- shares and sums


@tabled("k", [4.0, 0.4])
@tabled("d", [8, 6])
def test_aggregate_adds_in_the_ring(k, d):
    "Exactly, also where the sum wraps."
    m, close = DDGauss(1.0, 0.5, 16, 12, k=k), dict(rtol=0, atol=1e-4)
    sent = m.words(torch.eye(d)[:1].repeat(16, 1), seed_tree(0, "ring"))
    truth, estimates = m.lifted(Ring(12).sum(sent), d) / 16, m.lifted(sent, d)
    torch.testing.assert_close(m.aggregate(estimates, 16, None), truth, **close)
    rounds = m.aggregate(estimates.expand(3, 16, d), 1, None)
    torch.testing.assert_close(rounds, 16 * truth.expand(3, d), **close)
    plain = estimates.sum(0) / 16
    assert torch.allclose(plain, truth, atol=1e-5) == (k == 4.0)


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
    assert old.fingerprint == zlib.crc32(
        repr(old).replace(", padded=True", "").encode()
    )
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
    g, plain = m.guarantee(**names), DDGauss(1.0, 1.0, 40, 18).guarantee(**names)
    assert not g.premises and g.eps == pytest.approx(plain.eps, rel=1e-3)
    assert g.eps < honest and "30 of 40 honest shares" in g.note
    sampled = m.guarantee(**names, sampling="poisson", n_clients=400, cohort=40)
    assert sampled.eps < g.eps and sampled.sampling == "poisson"
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


TARGET = dict(eps=1.0, delta=1e-5, clip_norm=1.0, n_clients=100, d=2**18)
TARGET |= dict(rounds=10, q=1.0)


def test_too_few_bits_fail_loudly_and_name_what_works():
    words = "ring_bits is 8; eps = 1.*use at least"
    with pytest.raises(ValueError, match=words) as error:
        ddgauss.calibrate(**TARGET, ring_bits=8)
    enough = int(str(error.value).split("at least ")[1].split()[0])
    found = ddgauss.calibrate(**TARGET, ring_bits=enough)
    assert found.guarantee(rounds=10, delta=1e-5, d=2**18).eps <= 1.0 * (1 + 1e-5)
    with pytest.raises(ValueError, match=f"at least {enough} bits"):
        ddgauss.calibrate(**TARGET, ring_bits=enough - 1)


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


BIASES = [(6, (1.0,), 0.2306), (8, (1.0,), 0.0489), (6, (1.0, 0, 0, 0), 0.022)]


@tabled("bits, u, bias", BIASES)
def test_the_bias_of_a_bounded_rounding_is_known(bits, u, bias):
    "At an audited setting a quarter of C is lost; 200,000 messages agree."
    m, n, u = DDGauss(1.0, 1.0, 6, bits), 200_000, torch.tensor([u])
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
def test_a_wide_ring_takes_every_clipped_update(kind, bits, n, sigma, d):
    "Single precision clips to within 2^-23, which is up to 2^8 steps of such a grid."
    m, rounded, honest = kind(1.0, sigma, n, bits), [], noisy_sums.conditional_round

    def conditional_round(x, bound, rng):
        rounded.append((honest(x, bound, rng), bound))
        return rounded[-1][0]

    u = seed_tree(0, "wide", bits, d).standard_normal((2, d), dtype=np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noisy_sums, "conditional_round", conditional_round)
        patch.setattr(kind, "draw", lambda m, v, shape, rng: np.zeros(shape, np.int64))
        words = m.words(torch.from_numpy(u), seed_tree(1))
    ((z, bound),) = rounded
    assert np.array_equal(words, m.ring.wrap(z)) and len(z) == 2
    assert bound == ring.rounded_norm(1.0 / m.step(d), m.size(d), m.beta)
    assert max(ring.squared_length(z)) <= Fraction(bound) ** 2
