"""The distributed discrete Gaussian from its parts: grid, shares, sums, law of the sum,
epsilon, calibration. What every mechanism must do is in test_conformance.

Statistical tests have false-alarm rate 1e-6, split over their comparisons, and fixed
seeds.
"""

import dataclasses
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from laws import radius
from tables import tabled

from dpcomm.core import vectors as vectors_module
from dpcomm.core import wire
from dpcomm.core.chance import Insecure, seed_tree
from dpcomm.mechanisms import contract, ddgauss, on_ring
from dpcomm.mechanisms.ddgauss import DDGauss
from dpcomm.mechanisms.distributed_noise import CLAIMED
from dpcomm.mechanisms.skellam import Skellam
from dpcomm.privacy import accounting, audit
from dpcomm.privacy.accounting import INTEGER_ORDERS, gaussian_guarantee
from dpcomm.secagg import discrete, ring
from dpcomm.secagg.ring import Ring

DIMENSIONS = [1, 2, 3, 16, 100]


def vectors(n, d, norm, *path):
    x = torch.from_numpy(seed_tree(0, "vectors", n, d, *path).standard_normal((n, d)))
    return (norm * x / x.norm(dim=1, keepdim=True)).float()


# ---- settings and grid


@tabled("d", DIMENSIONS)
@tabled("bits, n", [(8, 4), (16, 100), (20, 1000)])
def test_the_grid_solves_its_equation(d, bits, n):
    m = DDGauss(1.5, 0.8, n, bits, tolerance=0.25)
    gamma, D = m.step(d), ddgauss.padded(d)
    assert D == 1 << (d - 1).bit_length()
    held = 2 * m.k * math.sqrt((n * 1.5) ** 2 / D + n * (gamma**2 / 4 + m.share**2))
    assert 2**bits * gamma == pytest.approx(held) and float(
        m.variance(d)
    ) == pytest.approx((m.share / gamma) ** 2)


def test_a_ring_that_rounding_fills_is_refused():
    with pytest.raises(ValueError, match="ring_bits is 5.*use at least 6 bits"):
        DDGauss(1.0, 1.0, 100, 5)
    assert DDGauss(1.0, 1.0, 100, 6).ring_bits == 6


@tabled(
    "tolerance, n, left",
    [
        (0.0, 10, 10),
        (0.1, 10, 9),
        (0.29, 100, 71),
        (0.3, 10, 7),
        (0.34, 6, 4),
        (0.99, 10, 1),
    ],
)
def test_honest_shares_keep_the_promise(tolerance, n, left):
    m = DDGauss(2.0, 0.7, n, tolerance=tolerance)
    assert m.honest == left and left * m.share**2 >= (0.7 * 2.0) ** 2 * (1 - 1e-12)
    assert m.share**2 * n * (1 - tolerance) == pytest.approx((0.7 * 2.0) ** 2)


# ---- shares and sums


@tabled("d", DIMENSIONS)
def test_a_sum_of_shares_is_the_sum_of_vectors_and_noise(d):
    """Mean and variance of 3,000 sums in the ring; central-limit radii with the fourth
    moment measured.
    """
    m, n, plays = DDGauss(1.0, 0.5, 8, 14), 8, 3000
    u = vectors(n, d, 0.9)
    sent = m.shares(u.repeat(plays, 1), seed_tree(0, "sums", d)).reshape(plays, n, -1)
    assert sent.min() >= 0 and sent.max() < 2**14 and sent.dtype == np.int64
    total = (
        m.lifted(np.stack([Ring(14).sum(s) for s in sent]), d).double().numpy()
        - u.sum(0).double().numpy()
    )
    variance = (m.sigma * m.clip_norm) ** 2 + n * (
        m.moments(u)[1].mean(0).numpy() - m.share**2
    )
    assert (np.abs(total.mean(0)) <= radius(np.sqrt(variance), plays, 2 * d)).all()
    square = total**2
    assert (
        np.abs(square.mean(0) - variance) <= radius(square.std(0), plays, 2 * d)
    ).all(), "the noise is not sqrt(2) too large"


@pytest.mark.parametrize("k", [4.0, 0.4])
def test_aggregate_adds_in_the_ring(k):
    """In a power of two coordinates exactly, also where the sum wraps, which a mean of
    lifted messages hides.
    """
    m = DDGauss(1.0, 0.5, 16, 12, k=k)
    sent = m.shares(torch.eye(8)[:1].repeat(16, 1), seed_tree(0, "ring"))
    truth = m.lifted(Ring(12).sum(sent), 8) / 16
    estimates = m.lifted(sent, 8)
    torch.testing.assert_close(
        m.aggregate(estimates, 16, None), truth, rtol=0, atol=1e-5
    )
    torch.testing.assert_close(
        m.aggregate(estimates.expand(3, 16, 8), 1, None),
        16 * truth.expand(3, 8),
        rtol=0,
        atol=1e-4,
    )
    assert torch.allclose(
        contract.mean_over_cohort(estimates, 16), truth, atol=1e-5
    ) == (k == 4.0)


def test_aggregate_is_the_plain_sum_where_nothing_wraps():
    for d in DIMENSIONS:
        m, u = DDGauss(1.0, 0.5, 10), vectors(10, d, 0.8)
        sent = m.shares(u, seed_tree(0, d))
        estimates = m.lifted(sent, d)
        torch.testing.assert_close(
            m.aggregate(estimates, 10, None),
            m.lifted(Ring(16).sum(sent), d) / 10,
            rtol=0,
            atol=1e-5,
        )
        torch.testing.assert_close(
            m.aggregate(estimates, 10, None),
            contract.mean_over_cohort(estimates, 10),
            rtol=0,
            atol=1e-5,
        )


def test_the_ring_holds_what_it_should():
    """The worst case, sixteen clients sending one vector in 4,096 coordinates: four
    standard deviations are left with probability 6.3e-5 a coordinate and tail.
    """
    m, d = DDGauss(1.0, 0.3, 16, 12), 4096
    u = vectors(1, d, 1.0).repeat(16, 1)
    true = sum(m.lifted(s, d).double() for s in m.shares(u, seed_tree(0, "hold")))
    x = vectors_module.rotate(true, 0).abs() / m.step(d)
    assert (x > 2**11).sum() <= 6, (
        "binomial upper bound of 4,096 coordinates at 1e-6" and x.max() > 2**10
    )


def test_messages_are_packed_shares():
    for bits in (7, 8, 12, 16, 32):
        m, u = DDGauss(1.0, 0.5, 4, bits), vectors(1, 21, 0.9)[0]
        message = m.encode(u, Insecure(5))
        assert (
            8 * len(message.payload)
            == m.bits(21).payload
            == 8 * math.ceil(32 * bits / 8)
        )
        row = wire.unpack_bits(message.payload, bits, 32)
        assert np.array_equal(row, m.shares(u[None], seed_tree(5, "private"))[0])
        assert wire.pack_bits(row, bits) == message.payload
        assert torch.equal(m.decode(message), m.lifted(row, 21))


def test_a_message_of_another_name_is_refused():
    m = DDGauss(1.0, 0.5, 4)
    with pytest.raises(ValueError, match="of 'skellam', to be read by 'ddgauss'"):
        m.decode(dataclasses.replace(m.encode(torch.ones(3)), mechanism="skellam"))


# ---- the law of the sum


def law(variance, n, reach=300):
    z = np.arange(-reach, reach + 1.0)
    one = np.exp(-(z**2) / (2 * variance))
    one /= one.sum()
    total = one
    for _ in range(n - 1):
        total = np.convolve(total, one, "same")
    return z, total


def divergence(a, b, alpha):
    good = (a > 0) & (b > 0)
    return np.logaddexp.reduce(
        alpha * np.log(a[good]) - (alpha - 1) * np.log(b[good])
    ) / (alpha - 1)


GRID = [(variance, n) for variance in (0.25, 0.3, 0.5, 1.0) for n in (2, 3, 7)]


@tabled("variance, n", GRID)
def test_lemma_1(variance, n):
    (z, p), (_, q) = law(variance, n), law(variance * n, 1)
    near = np.abs(z) < 12 * math.sqrt(n * variance)
    g = np.log(p[near] / q[near])
    assert np.ptp(g) <= ddgauss.omega(variance, n) * (
        1 + 1e-6
    ) + 1e-12 and ddgauss.omega(variance, n) <= 0.405 * ddgauss.tau(variance, n)
    assert np.abs(g).max() <= ddgauss.tau(variance, n) / 2
    assert g.argmax() == len(g) // 2 or g.max() - g[len(g) // 2] < 1e-12, (
        "largest at zero"
    )
    torch.testing.assert_close(g[n:], g[:-n], rtol=0, atol=1e-9)


def test_lemma_1_is_nearly_met():
    z, p = law(0.25, 2)
    q = law(0.5, 1)[1]
    near = np.abs(z) < 8
    assert np.ptp(np.log(p[near] / q[near])) > 0.99 * ddgauss.omega(0.25, 2)


@tabled("variance, n", GRID)
def test_lemma_2_and_the_concentrated_form(variance, n):
    p = law(variance, n)[1]
    for x in (1, 2, 5):
        for alpha in (1.1, 1.7, 2, 3, 6.5, 12):
            exact = divergence(p[:-x], p[x:], alpha)
            assert (
                exact
                <= alpha * x**2 / (2 * n * variance) + ddgauss.omega(variance, n) + 1e-9
            )
            if alpha >= 2:
                assert (
                    exact
                    <= alpha / 2 * ddgauss.concentrated(x, variance, n, 1) ** 2 + 1e-9
                )


def test_a_sum_can_be_less_private_than_the_gaussian():
    """So tau is needed: the exact divergence exceeds that of normal noise of the same
    variance.
    """
    p = law(0.25, 4)[1]
    assert divergence(p[:-3], p[3:], 2) > 9.03 > 2 * 9 / (2 * 4 * 0.25)


def test_both_forms_are_used():
    assert (
        ddgauss.tau(0.3, 1) == 0.0 == ddgauss.omega(0.3, 1)
        and ddgauss.concentrated(3.0, 4.0, 1, 7) == 1.5
    )
    gap = ddgauss.tau(0.5, 10)
    assert gap == pytest.approx(
        10 * sum(math.exp(-(math.pi**2) * k / (k + 1)) for k in range(1, 10))
    )
    shift = 4.0 / math.sqrt(5)
    assert ddgauss.concentrated(4.0, 0.5, 10, 8) == pytest.approx(
        min(math.sqrt(shift**2 + gap * 4), shift + gap * math.sqrt(8))
    )
    large, small = (ddgauss.concentrated(d2, 0.5, 10, 8) ** 2 for d2 in (4.0, 0.001))
    assert large != pytest.approx(shift**2 + gap * 4) or small != pytest.approx(
        (0.001 / math.sqrt(5)) ** 2 + gap * 4
    ), "each form wins somewhere"
    for bad in (0.2499, 0.0, math.nan):
        with pytest.raises(ValueError, match="variance is.*(1/4|must be a number)"):
            ddgauss.concentrated(1.0, bad, 2, 2)


@pytest.mark.parametrize(
    "variance, n, x, q", [(0.4, 3, 1, 0.05), (0.5, 2, 2, 0.3), (3.0, 5, 4, 0.5)]
)
def test_sampling_in_both_directions(variance, n, x, q):
    p = law(variance, n)[1]
    absent, present = p[x:], p[:-x]
    mix = (1 - q) * absent + q * present
    good = (absent > 1e-300) & (present > 1e-300)
    for alpha in (2, 3, 7):
        forward = divergence(mix[good], absent[good], alpha)
        reverse = divergence(absent[good], mix[good], alpha)
        bound = accounting.rdp_subsampled_gaussian(
            [alpha], 1 / ddgauss.concentrated(x, variance, n, 1), q
        )[0]
        assert (
            reverse <= forward + 1e-12
            and forward <= bound + 1e-12
            and forward > 0.25 * bound
        )


# ---- epsilon


def test_epsilon_of_printed_parameters_by_hand():
    "One release without sampling, all numbers spelt out."
    g = ddgauss.ddgauss_epsilon(
        scale=0.01,
        clip=1.0,
        n_clients=100,
        local_std=0.2,
        d=1000,
        q=1.0,
        rounds=3,
        delta=1e-6,
    )
    delta2 = math.sqrt(100**2 + 256 + 100 + 16)
    eps = delta2 / (math.sqrt(100) * 20)
    rdp = 3 * INTEGER_ORDERS * eps**2 / 2
    assert g.eps == pytest.approx(
        (rdp + math.log(1e6) / (INTEGER_ORDERS - 1)).min(), rel=1e-9
    )
    assert (g.relation, g.sampling, g.trust, g.accountant, g.scope, g.unit) == (
        "zero-out",
        "none",
        "secagg",
        "rdp-classic",
        "total",
        "client",
    )
    assert (
        ddgauss.ddgauss_epsilon(
            0.01, 1.0, 100, 0.2, 1000, 1.0, 3, 1e-6, accountant="rdp-balle"
        ).eps
        < g.eps
    )
    beta0 = ddgauss.ddgauss_epsilon(0.01, 1.0, 100, 0.2, 1000, 1.0, 3, 1e-6, beta=0.0)
    assert beta0.eps > g.eps, "without conditioning the worst rounding counts"
    assert ddgauss.ddgauss_epsilon(
        10.0, 1000.0, 100, 200.0, 1000, 1.0, 3, 1e-6
    ).eps == pytest.approx(g.eps), "units cancel"


def test_a_fine_grid_is_the_gaussian():
    for q, relation in ((1.0, "zero-out"), (1.0, "replace"), (0.05, "zero-out")):
        g = ddgauss.ddgauss_epsilon(
            1e-6, 1.0, 50, 1.3 / math.sqrt(50), 64, q, 20, 1e-5, relation=relation
        )
        orders = INTEGER_ORDERS if q == 1 else ddgauss.SAMPLED
        exact = gaussian_guarantee(
            1.3,
            1e-5,
            q,
            20,
            sampling="none" if q == 1 else "poisson",
            relation=relation,
            orders=orders,
        )
        assert exact.eps <= g.eps == pytest.approx(exact.eps, rel=1e-4)
        assert g.sampling == exact.sampling and g.relation == relation


def test_epsilon_is_monotone():
    base = dict(
        scale=0.02,
        clip=1.0,
        n_clients=40,
        local_std=0.2,
        d=300,
        q=0.1,
        rounds=10,
        delta=1e-5,
    )
    eps = ddgauss.ddgauss_epsilon(**base).eps
    for more in (
        dict(scale=0.05),
        dict(clip=1.2),
        dict(d=3000),
        dict(q=0.2),
        dict(rounds=20),
        dict(beta=0.1),
    ):
        assert ddgauss.ddgauss_epsilon(**(base | more)).eps > eps, more
    for less in (dict(n_clients=50), dict(local_std=0.3), dict(delta=1e-4)):
        assert ddgauss.ddgauss_epsilon(**(base | less)).eps < eps, less


def test_epsilon_refuses():
    base = dict(
        scale=0.02,
        clip=1.0,
        n_clients=40,
        local_std=0.2,
        d=300,
        q=0.1,
        rounds=10,
        delta=1e-5,
    )
    for bad, text in (
        (dict(scale=0.0), "scale is"),
        (dict(clip=-1.0), "clip is"),
        (dict(local_std=0.0), "local_std is"),
        (dict(q=0.0), "q is"),
        (dict(q=1.5), "q is 1.5"),
        (dict(rounds=0), "rounds"),
        (dict(delta=0.0), "delta"),
        (dict(beta=1.0), "beta is"),
        (dict(relation="local"), "relation is"),
        (dict(relation="replace"), "relation is 'replace'"),
        (dict(accountant="pld"), "accountant is"),
        (dict(local_std=0.009), "variance is"),
        (dict(d=0), "d is"),
    ):
        with pytest.raises(ValueError, match=text):
            ddgauss.ddgauss_epsilon(**(base | bad))


def test_a_guarantee_counts_only_honest_shares():
    names = dict(rounds=5, delta=1e-5, d=500)
    m = DDGauss(1.0, 1.0, 40, 18, tolerance=0.25)
    g = m.guarantee(**names)
    assert (
        g.eps
        == ddgauss.ddgauss_epsilon(m.step(500), 1.0, 30, m.share, 500, 1.0, 5, 1e-5).eps
    )
    assert (
        "30 of 40 honest shares" in g.note
        and not g.premises
        and g.eps
        == pytest.approx(DDGauss(1.0, 1.0, 40, 18).guarantee(**names).eps, rel=1e-3)
    )
    careless = ddgauss.ddgauss_epsilon(m.step(500), 1.0, 40, m.share, 500, 1.0, 5, 1e-5)
    assert careless.eps < g.eps
    sampled = m.guarantee(**names, sampling="poisson", n_clients=400, cohort=40)
    assert (
        sampled.eps < g.eps
        and sampled.sampling == "poisson"
        and sampled.premises["shares"].startswith("as if the noise had one size")
        and "not the cohorts" in sampled.note
    )
    with pytest.raises(ValueError, match="d is None"):
        m.guarantee(rounds=5, delta=1e-5)


# ---- calibration


@pytest.mark.parametrize("q, tolerance", [(1.0, 0.0), (0.02, 0.0), (0.02, 0.2)])
def test_calibration_meets_its_target_with_the_least_noise(q, tolerance):
    m = ddgauss.calibrate(
        2.0, 1e-5, 0.5, 64, 5000, rounds=4, q=q, ring_bits=14, tolerance=tolerance
    )
    names = dict(rounds=4, delta=1e-5, d=5000) | (
        dict(sampling="poisson", n_clients=64 / q, cohort=64) if q < 1 else {}
    )
    assert (
        1.999 < m.guarantee(**names).eps <= 2.0 * (1 + 1e-5)
        and m.tolerance == tolerance
        and m.clip_norm == 0.5
    )
    orders = INTEGER_ORDERS if q == 1 else ddgauss.SAMPLED
    carried = m.sigma * math.sqrt(m.honest / (m.n_clients * (1 - tolerance)))
    gauss = gaussian_guarantee(
        carried,
        1e-5,
        q,
        4,
        sampling="none" if q == 1 else "poisson",
        relation="zero-out",
        orders=orders,
    )
    assert gauss.eps < 2.0, "rounding costs something"


def test_too_few_bits_fail_loudly_and_name_what_works():
    target = dict(
        eps=1.0, delta=1e-5, clip_norm=1.0, n_clients=100, d=2**18, rounds=10, q=1.0
    )
    with pytest.raises(
        ValueError, match=r"ring_bits is 8; eps = 1.*use at least (\d+) bits"
    ) as error:
        ddgauss.calibrate(**target, ring_bits=8)
    enough = int(str(error.value).split("at least ")[1].split()[0])
    found = ddgauss.calibrate(**target, ring_bits=enough)
    assert found.guarantee(rounds=10, delta=1e-5, d=2**18).eps <= 1.0 * (1 + 1e-5)
    with pytest.raises(ValueError, match=f"at least {enough} bits"):
        ddgauss.calibrate(**target, ring_bits=enough - 1)
    with pytest.raises(ValueError, match="32 bits are not enough"):
        ddgauss.calibrate(**(target | dict(n_clients=2**31, d=1)), ring_bits=20, k=1e3)
    for bad, text in (
        (dict(most=1.0), "most is"),
        (dict(eps=0.0), "eps"),
        (dict(accountant="pld"), "accountant is"),
        (dict(ring_bits=1), "ring_bits is"),
    ):
        with pytest.raises(ValueError, match=text):
            ddgauss.calibrate(**(target | bad))


def test_noise_cannot_buy_back_missing_bits():
    "The epsilon of a release has a limit in sigma of about k sqrt(D) / 2^b."
    eps = [
        DDGauss(1.0, sigma, 10, 9).release_epsilon(2**16)
        for sigma in (1.0, 1e2, 1e4, 1e6)
    ]
    limit = 4 * 256 / 2**9
    assert (
        eps == sorted(eps, reverse=True)
        and eps[-1] == pytest.approx(limit, rel=0.05)
        and eps[-2] == pytest.approx(eps[-1], rel=1e-2)
    )
    assert ddgauss.fit(1 / (0.9 * limit), 1.0, 10, 2**16, 9, most=1e6) is None
    found = ddgauss.fit(1 / (1.5 * limit), 1.0, 10, 2**16, 9, most=100.0)
    assert found.release_epsilon(2**16) == pytest.approx(1.5 * limit)
    assert DDGauss(1.0, 1.0, 10**4, 12).release_epsilon(1) == math.inf, (
        "less than half a step of noise"
    )


# ---- audit


def test_the_game_sees_missing_noise():
    """Half of the promised shares and no tolerance: the audit refutes the claim of the
    full noise.
    """
    claimed = DDGauss(1.0, 2.0, 8, 16)
    half = DDGauss(1.0, 2.0, 8, 16, tolerance=0.5)
    cheat = DDGauss(1.0, 0.35, 8, 16)
    honest, lying = (
        audit.audit_play(m, "zero-out", 20_000, 1e-3, seed_tree(0, "game"))
        for m in (claimed, cheat)
    )
    claim = audit.claim(claimed, "zero-out", 1e-3)
    assert not audit.refutes(honest, claim) and audit.refutes(lying, claim)
    scores = [
        half.play("zero-out", present, 8000, seed_tree(0, "half", present))[
            "likelihood"
        ]
        for present in (True, False)
    ]
    assert abs(scores[0].mean() - 1 / 8) < radius(0.5, 8000, 2) and abs(
        scores[1].mean() + 1 / 8
    ) < radius(0.5, 8000, 2)


def test_the_game_has_rounds_and_relations():
    m = DDGauss(1.0, 1.0, 3, 16)
    assert set(m.relations) == set(CLAIMED) and all(
        arguments["d"] == 1 for arguments in m.relations.values()
    )
    assert set(m.play("replace", True, 200, seed_tree(0), rounds=2)) == {
        "likelihood",
        "bits",
        "repeat",
    }
    swap, silent = (
        m.play(r, True, 20_000, seed_tree(0, r))["likelihood"].mean()
        for r in ("replace", "zero-out")
    )
    assert swap == pytest.approx(2.0, abs=0.1) and silent == pytest.approx(0.5, abs=0.1)
    rare = m.play("zero-out", True, 2000, seed_tree(0), n_clients=100, cohort=1)[
        "likelihood"
    ]
    assert abs(rare.mean()) < 0.01
    with pytest.raises(ValueError, match="relation is"):
        m.play("local", True, 10, seed_tree(0))


# ---- moments


def test_conditioning_moves_the_mean_by_less_than_stated():
    """By enumeration of all roundings of eight coordinates, at the fractions where it
    matters most: half a step, where the bound is just below one.
    """
    corners = np.array([[c >> i & 1 for i in range(8)] for c in range(256)])
    for level, fraction in (
        (0, 0.5),
        (1, 0.5),
        (5, 0.5),
        (40, 0.5),
        (5, 0.1),
        (5, 0.9),
    ):
        x = np.full(8, level + fraction)
        bound = ring.rounded_norm(float(np.linalg.norm(x)), 8, math.exp(-0.5))
        p = np.prod(np.where(corners, fraction, 1 - fraction), axis=1)
        within = ((level + corners) ** 2).sum(1) <= bound**2
        mean = (p * within) @ (level + corners) / (p * within).sum()
        assert np.linalg.norm(mean - x) < 0.5 and (p * within).sum() >= 1 - math.exp(
            -0.5
        )


@pytest.mark.parametrize(
    "bits, d, u, bias",
    [(6, 1, (1.0,), 0.2306), (8, 1, (1.0,), 0.0489), (6, 4, (1, 0, 0, 0), 0.022)],
)
def test_the_bias_of_a_bounded_rounding_is_known(bits, d, u, bias):
    "At an audited setting a quarter of C is lost; 400,000 messages agree."
    m, n = DDGauss(1.0, 1.0, 6, bits), 400_000
    u = torch.tensor([u], dtype=torch.float32)
    known, variance = (part[0].double().numpy() for part in m.moments(u))
    assert np.linalg.norm(known) == pytest.approx(bias, abs=5e-4)
    z = m.shares(u.expand(n, d), seed_tree(0, "bias", bits, d))
    error = m.open(z, d).double().numpy() - u[0].double().numpy()
    assert (np.abs(error.mean(0) - known) <= radius(np.sqrt(variance), n, 2 * d)).all()


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
        mean, variance = on_ring.normal_rounding(x, bound, lambda rows: rows)
        listed = on_ring.listed_rounding(x[:8], bound, lambda rows: rows)
        assert np.isfinite(listed).all() and np.abs(mean - truth).max() < 0.05
        assert np.linalg.norm(truth - x) > np.linalg.norm(truth - mean)
        assert abs(variance.mean() - spread.mean()) < 0.01


def test_moments_of_a_coarse_grid():
    """Rounding dominates here: 30,000 messages against the closed form, the
    conditioning left off by beta near 0.
    """
    m, n = DDGauss(1.0, 0.02, 4, 6, beta=0.0), 30_000
    u = vectors(1, 8, 0.9)
    assert m.step(8) > 3 * m.share
    z = m.shares(u.repeat(n, 1), seed_tree(0, "coarse"))
    estimates = m.lifted(z, 8).double().numpy() - u.double().numpy()
    rounding = m.moments(u)[1].numpy()[0] - m.share**2
    noise = (
        discrete.discrete_gaussian(m.variance(8), 400_000, seed_tree(0, "share"))
        .astype(float)
        .var()
        * m.step(8) ** 2
    )
    assert (np.abs(estimates.mean(0)) <= radius(estimates.std(0), n, 16)).all()
    assert (
        np.abs((estimates**2).mean(0) - rounding - noise)
        <= radius((estimates**2).std(0), n, 16) + 0.02 * noise
    ).all()


# ---- wide rings


@pytest.mark.parametrize("kind", [DDGauss, Skellam])
@pytest.mark.parametrize(
    "bits, n, sigma, d",
    [
        (28, 4, 1.0, 61_706),
        (29, 4, 1.0, 1000),
        (30, 4, 1.0, 1000),
        (31, 4, 1.0, 1000),
        (32, 4, 1.0, 61_706),
        (32, 6, 0.7, 1_000_000),
    ],
)
def test_a_wide_ring_takes_every_clipped_update(kind, bits, n, sigma, d, monkeypatch):
    """Single precision clips to within 2^-23, which is up to 2^8 steps of such a grid; what
    goes into the sum is within the bound that the proof names.
    """
    m, rounded = kind(1.0, sigma, n, bits), []
    honest = on_ring.conditional_round

    def conditional_round(x, bound, rng):
        rounded.append((honest(x, bound, rng), bound))
        return rounded[-1][0]

    monkeypatch.setattr(on_ring, "conditional_round", conditional_round)
    monkeypatch.setattr(
        kind, "draw", lambda self, variance, shape, rng: np.zeros(shape, np.int64)
    )
    rows = 12 if d < 10**6 else 2
    u = seed_tree(0, "wide", bits, d).standard_normal((rows, d), dtype=np.float32)
    words = m.shares(torch.from_numpy(u), seed_tree(1))
    ((z, bound),) = rounded
    assert np.array_equal(words, m.ring.wrap(z)) and len(z) == rows
    assert bound == ring.rounded_norm(1.0 / m.step(d), on_ring.padded(d), m.beta)
    assert max(ring.squared_length(z)) <= Fraction(bound) ** 2
