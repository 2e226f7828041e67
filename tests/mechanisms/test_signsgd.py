"""SignSGD from its parts: the law of a sign, its units, and the theorem about its
privacy. What every mechanism must do is in test_conformance.

Statistical tests have false-alarm rate 1e-6 and fixed seeds.
"""

import decimal
import itertools
import math

import numpy as np
import pytest
import torch
from laws import ALARM, count_bounds, fit
from scipy import stats
from scipy.optimize import minimize
from tables import tabled

from dpcomm.core.chance import Insecure, seed_tree
from dpcomm.mechanisms import signsgd
from dpcomm.mechanisms.signsgd import SignSgd
from dpcomm.privacy import audit
from dpcomm.privacy.accounting import (
    INTEGER_ORDERS,
    ORDERS,
    calibrate,
    gaussian_guarantee,
    rdp_gaussian,
)

RUN = dict(rounds=20, delta=1e-5)


def divergence(order, v, w):
    """Renyi divergence of the signs of v and w plus standard normal noise, by
    definition; sums the last axis.
    """
    p, q = (stats.norm.logcdf(np.stack([x, -x])) for x in np.broadcast_arrays(v, w))
    return (np.logaddexp.reduce(order * p + (1 - order) * q) / (order - 1)).sum(-1)


# ---- the law of a sign


@pytest.mark.parametrize("kind", [np.float32, np.float64, torch.float32, torch.float64])
def test_the_tilt_is_the_mean_sign_in_the_callers_type(kind):
    m, values = SignSgd(2.0, 1.5), [-40.0, -3.0, 0.0, 1e-9, 0.5, 40.0]
    u = (
        torch.tensor(values, dtype=kind)
        if isinstance(kind, torch.dtype)
        else np.array(values, dtype=kind)
    )
    found = m.tilt(u)
    assert type(found) is type(u) and found.dtype == u.dtype and found.shape == u.shape
    np.testing.assert_allclose(
        np.asarray(found),
        2 * stats.norm.cdf(np.array(values) / 3.0) - 1,
        rtol=1e-6,
        atol=1e-12,
    )
    np.testing.assert_array_equal(np.asarray(m.tilt(u)), np.asarray(found))
    assert m.step == 1.0 and m.std == 3.0


@pytest.mark.parametrize("sigma", [0.3, 1.0, 5.0])
def test_coins_have_the_law_of_signs_of_noisy_values(sigma):
    """Both against Phi(v), exact binomial bounds; then whole patterns of signs, which
    shows independence.
    """
    m, u, n = SignSgd(1.0, sigma), torch.tensor([0.7, -0.3, 0.0, 0.05]), 60_000
    coins = m.simulate(u.repeat(n, 1), seed_tree(0, "coins", str(sigma)))
    noisy = u + m.std * torch.from_numpy(
        seed_tree(0, "noise", str(sigma)).standard_normal((n, 4))
    )
    p = stats.norm.cdf(u.numpy() / sigma)
    for found in (coins.numpy() > 0, noisy.numpy() > 0):
        for count, chance in zip(found.sum(0), p):
            low, high = count_bounds(n, chance, 8)
            assert low <= count <= high
        patterns = np.bincount(found @ [8, 4, 2, 1], minlength=16)
        law = [
            np.prod(np.where(bits, p, 1 - p))
            for bits in itertools.product((0, 1), repeat=4)
        ]
        assert fit(patterns, law) > ALARM / 2
    assert set(coins.unique().tolist()) == {-1.0, 1.0} and coins.dtype == torch.float32


def test_the_rarer_sign_is_tossed_with_its_own_probability(monkeypatch):
    asked = []
    monkeypatch.setattr(
        signsgd, "bernoulli", lambda p, rng: asked.append(p) or np.zeros(p.shape, bool)
    )
    u = torch.tensor([[0.6, -0.6, 0.0, -0.0]])
    signs = SignSgd(1.0, 0.05).simulate(u, None)
    np.testing.assert_allclose(
        asked[0][0], [stats.norm.sf(12), stats.norm.sf(12), 0.5, 0.5], rtol=1e-5
    )
    assert signs.tolist() == [[1, -1, 1, 1]], "the likelier sign where the coin says no"
    monkeypatch.setattr(signsgd, "bernoulli", lambda p, rng: np.ones(p.shape, bool))
    assert SignSgd(1.0, 0.05).simulate(u, None).tolist() == [[-1, 1, -1, -1]]


def test_the_sign_of_nothing_is_a_fair_coin():
    n = 40_000
    for u in (torch.zeros(n, 1), torch.full((n, 1), -0.0)):
        low, high = count_bounds(n, 0.5, 2)
        assert (
            low
            <= int((SignSgd(1.0, 1.0).simulate(u, seed_tree(0, "fair")) > 0).sum())
            <= high
        )


def test_moments_keep_their_digits_in_the_tail():
    m = SignSgd(1.0, 1 / 7)
    bias, variance = m.moments(torch.tensor([[1.0, 0.0]], dtype=torch.float64))
    assert (
        float(variance[0, 0]) == pytest.approx(4 * stats.norm.sf(7), rel=1e-6)
        and float(variance[0, 1]) == 1.0
    )
    assert bias[0].tolist() == pytest.approx([0.0, 0.0], abs=1e-11), (
        "here the sign happens to be in u's units"
    )


def test_the_decoded_vector_is_not_in_the_units_of_u():
    """The bias is against u; small coordinates come back when the sign is multiplied by
    sigma C sqrt(pi/2).
    """
    m, u = SignSgd(3.0, 2.0), torch.tensor([[0.06, -0.03, 0.0]], dtype=torch.float64)
    bias, variance = m.moments(u)
    torch.testing.assert_close(bias + u, m.tilt(u))
    unit = 6.0 * math.sqrt(math.pi / 2)
    torch.testing.assert_close(unit * (bias + u), u, rtol=2e-5, atol=0)
    assert unit * math.sqrt(float(variance[0, 0])) / 6.0 == pytest.approx(
        math.sqrt(math.pi / 2), rel=1e-3
    ), "noise against the Gaussian's"


def test_messages_are_packed_signs():
    m, u = SignSgd(1.0, 1.0), torch.linspace(-1, 1, 13)
    message = m.encode(u, Insecure(5))
    bits = np.unpackbits(np.frombuffer(message.payload, np.uint8))
    decoded = m.decode(message)
    assert len(message.payload) == 2 and not bits[13:].any()
    assert decoded.tolist() == (2.0 * bits[:13] - 1).tolist()
    assert torch.equal(decoded, m.simulate(u[None], [seed_tree(5, "private")])[0])
    assert (
        m.bits(61_706).payload == 8 * 7714 and m.bits(61_706).content / 61_706 < 1.001
    )


# ---- numbers that keep their digits


@tabled("y", ["0", "1e-150", "1e-8", "0.3", "0.9999999", "1", "1.0000001", "40", "1e5"])
def test_log_cosh_keeps_its_digits(y):
    with decimal.localcontext(prec=330):
        x = decimal.Decimal(float(y))
        exact = float(((x.exp() + (-x).exp()) / 2).ln())
    assert (
        float(signsgd.log_cosh(float(y)))
        == float(signsgd.log_cosh(-float(y)))
        == pytest.approx(exact, rel=1e-14, abs=1e-320)
    )


def test_the_half_logit_keeps_its_digits():
    v = np.array([0.0, 1e-150, 1e-12, 1e-5])
    np.testing.assert_allclose(
        signsgd.half_logit(v), v * math.sqrt(2 / math.pi), rtol=1e-9
    )
    x = np.array([0.01, 0.5, 0.999999, 1.000001, 3.0, 8.0, 30.0])
    np.testing.assert_allclose(
        signsgd.half_logit(x),
        (stats.norm.logcdf(x) - stats.norm.logsf(x)) / 2,
        rtol=1e-13,
    )
    np.testing.assert_array_equal(signsgd.half_logit(-x), -signsgd.half_logit(x))
    assert np.isfinite(signsgd.log_cosh([1e300, -1e300])).all() and signsgd.half_logit(
        np.zeros((2, 3))
    ).shape == (2, 3)


# ---- the theorem


@tabled("relation, scale", [("zero-out", 1), ("replace", 4)])
@tabled("order", [2.0, 2.5, 7.0, 100.0])
def test_the_worst_vector_has_the_declared_divergence(order, relation, scale):
    for d, sigma in itertools.product((1, 2, 17, 1000), (0.2, 1.0, 6.0)):
        v = np.full(d, 1 / (sigma * math.sqrt(d)))
        pairs = [(v, -v)] if scale == 4 else [(v, 0 * v), (0 * v, v)]
        found = max(divergence(order, *pair) for pair in pairs)
        assert signsgd.rdp_signs(order, sigma, relation, d) == pytest.approx(
            found, rel=1e-8
        )
        assert found <= scale * order / (math.pi * sigma**2) * (1 + 1e-9)


@tabled("order", [2.0, 3.0, 30.0])
@tabled("sigma", [0.15, 0.6, 3.0])
def test_no_random_pair_exceeds_the_theorem(order, sigma):
    rng = seed_tree(0, "pairs", int(order), int(100 * sigma))
    for d in (1, 2, 5):
        v, w = (
            x / np.linalg.norm(x, axis=1, keepdims=True) / sigma
            for x in rng.standard_normal((2, 4000, d))
            * rng.choice([0.05, 1.0], (2, 4000, d))
        )
        short = rng.random((4000, 1)) ** 0.2
        for a, b in (
            (v, w),
            (v, -v),
            (short * v, -v),
            (v, -short * v),
            (v, w * short),
            (short * v, v),
        ):
            assert divergence(order, a, b).max() <= signsgd.rdp_signs(
                order, sigma, "replace", d
            ) * (1 + 1e-9)
        for a, b in ((v, 0 * v), (0 * v, v)):
            assert divergence(order, a, b).max() <= signsgd.rdp_signs(
                order, sigma, "zero-out", d
            ) * (1 + 1e-9)


@pytest.mark.parametrize("order, sigma", [(2.0, 0.4), (7.0, 0.8)])
def test_an_optimiser_finds_nothing_worse(order, sigma):
    "From three starts in three dimensions, both points of a pair free in the ball."

    def pair(x):
        return [
            y / max(np.linalg.norm(y), 1e-12) * min(np.linalg.norm(y), 1 / sigma)
            for y in x.reshape(2, 3)
        ]

    top = signsgd.rdp_signs(order, sigma, "replace", 3)
    best = max(
        -minimize(
            lambda x: -divergence(order, *pair(x)),
            seed_tree(0, "start", i).normal(0, 1 / sigma, 6),
            method="Nelder-Mead",
            options=dict(maxiter=600),
        ).fun
        for i in range(3)
    )
    assert 0.97 * top < best <= top * (1 + 1e-9)


@pytest.mark.parametrize("relation, scale", [("zero-out", 1), ("replace", 2)])
def test_the_curve_grows_with_dimension_to_its_limit_below_the_gaussian(
    relation, scale
):
    for sigma in (0.3, 1.0, 10.0):
        curves = np.array(
            [
                signsgd.rdp_signs(ORDERS, sigma, relation, d)
                for d in (1, 2, 10, 1000, 10**6, 10**13, None)
            ]
        )
        gaussian = rdp_gaussian(ORDERS, sigma / scale)
        assert (np.diff(curves, axis=0) >= -1e-9 * curves[1:]).all() and (
            np.diff(curves, axis=1) >= -1e-12
        ).all()
        assert (curves <= gaussian * (1 + 1e-12)).all()
        high = ORDERS >= 2
        np.testing.assert_allclose(
            curves[-1, high], 2 / np.pi * gaussian[high], rtol=1e-12
        )
        np.testing.assert_allclose(curves[-2, high], curves[-1, high], rtol=1e-3)


@pytest.mark.parametrize("relation", signsgd.RELATIONS)
def test_below_order_two_the_curve_is_a_bound(relation):
    "The small-signal limit itself is exceeded there, so it must not be used."
    v = np.geomspace(0.01, 20, 400)
    for order in (1.01, 1.2, 1.5, 1.9):
        for x in v:
            pairs = (
                [(x, -x), (x, 0.3 * x)] if relation == "replace" else [(x, 0), (0, x)]
            )
            found = max(
                divergence(order, np.array([a]), np.array([b])) for a, b in pairs
            )
            for d in (1, None):
                assert found <= signsgd.rdp_signs(order, 1 / x, relation, d) * (
                    1 + 1e-9
                )
    excess = divergence(1.5, np.zeros((400, 1)), v[:, None]) / (1.5 * v**2 / math.pi)
    assert 1.08 < excess.max() < 1.1


def test_other_relations_and_dimensions_have_no_curve():
    for bad in (dict(relation="add-remove"), dict(d=0), dict(d=2.5)):
        with pytest.raises(ValueError, match="relation is|d is"):
            signsgd.rdp_signs(2.0, 1.0, **bad)
    with pytest.raises(ValueError, match="order"):
        signsgd.rdp_signs(1.0, 1.0)
    with pytest.raises(ValueError, match="sigma"):
        signsgd.rdp_signs(2.0, 0.0)


# ---- guarantees


@pytest.mark.parametrize(
    "accountant, relation, scale",
    [
        ("rdp-classic", "zero-out", 1),
        ("rdp-classic", "replace", 2),
        ("rdp-balle", "replace", 2),
        ("pld", "zero-out", 1),
    ],
)
def test_post_processing_is_the_gaussian_mechanism(accountant, relation, scale):
    g = SignSgd(3.0, 5.0).guarantee(**RUN, relation=relation, accountant=accountant)
    plain = gaussian_guarantee(
        5.0 / scale,
        1e-5,
        rounds=20,
        relation="zero-out",
        accountant=accountant,
        trust="local",
    )
    assert g.eps == pytest.approx(plain.eps) and "after the Gaussian" in g.note
    assert (g.trust, g.unit, g.sampling, g.scope, g.relation, g.accountant) == (
        "local",
        "client",
        "none",
        "total",
        relation,
        accountant,
    )


@pytest.mark.parametrize("conversion", ["classic", "balle"])
def test_counted_exactly_a_smaller_sigma_is_enough(conversion):
    """At equal epsilon the noise multiplier is sqrt(2/pi) of the post-processing one; a
    known dimension lowers it further.
    """

    def eps(sigma, how, **more):
        return (
            SignSgd(1.0, sigma)
            .guarantee(**RUN, accountant=f"{how}-{conversion}", **more)
            .eps
        )

    assert eps(5.0 * math.sqrt(2 / math.pi), "exact") == pytest.approx(eps(5.0, "rdp"))
    assert (
        eps(5.0, "exact", d=3)
        < eps(5.0, "exact", d=10_000)
        <= eps(5.0, "exact")
        < eps(5.0, "rdp")
    )
    assert eps(5.0, "exact", orders=INTEGER_ORDERS) >= eps(5.0, "exact")
    sigma = calibrate(
        lambda s: SignSgd(1.0, s).guarantee(**RUN, accountant=f"exact-{conversion}"),
        2.0,
        1.0,
        100.0,
    )
    assert eps(sigma, "exact") <= 2.0


def test_the_note_names_the_dimension_and_the_unit_is_the_callers():
    g = SignSgd(1.0, 5.0).guarantee(
        **RUN, accountant="exact-balle", d=7, unit="example"
    )
    assert "dimension 7" in g.note and g.unit == "example"
    assert (
        "any dimension"
        in SignSgd(1.0, 5.0).guarantee(**RUN, accountant="exact-balle").note
    )
    assert set(signsgd.ACCOUNTANTS) == {
        "rdp-classic",
        "rdp-balle",
        "pld",
        "exact-classic",
        "exact-balle",
    }


@tabled("relation", signsgd.RELATIONS)
@tabled("d, rounds, sigma", [(1, 1, 0.4), (1, 5, 1.0), (300, 1, 1.0), (300, 1, 5.0)])
def test_the_enumerated_loss_of_the_worst_vector_stays_below_the_claim(
    d, rounds, sigma, relation
):
    """The count of plus signs is sufficient, and binomial: its epsilon is exact. d =
    300: the claim is within 15 %.
    """
    v, n = 1 / (sigma * math.sqrt(d)), d * rounds
    here, there = (
        stats.binom.pmf(np.arange(n + 1), n, stats.norm.cdf(x))
        for x in (v, -v if relation == "replace" else 0.0)
    )
    true = max(audit.enumerated_eps(here, there, 1e-5))
    g = SignSgd(1.0, sigma).guarantee(rounds, 1e-5, relation, "exact-balle", d=d)
    assert true <= g.eps
    if d == 300:
        assert true > 0.85 * g.eps


# ---- the game


@pytest.mark.parametrize(
    "relation, d, sigma",
    [
        ("zero-out", 1, 0.5),
        ("zero-out", 4, 1.0),
        ("replace", 4, 1.0),
        ("replace", 16, 2.0),
    ],
)
def test_the_game_follows_the_law(relation, d, sigma):
    """Scores take the values of the likelihood ratio, with the binomial law of the
    number of plus signs.
    """
    m, n, v = SignSgd(2.0, sigma), 20_000, 1 / (sigma * math.sqrt(d))
    other = -v if relation == "replace" else 0.0
    plus = np.arange(d + 1)
    ratios = plus * (stats.norm.logcdf(v) - stats.norm.logcdf(other)) + (d - plus) * (
        stats.norm.logcdf(-v) - stats.norm.logcdf(-other)
    )
    for present, x in ((True, v), (False, other)):
        scores = m.play(
            relation, present, n, seed_tree(0, "play", relation, d, present), d=d
        )["likelihood"]
        nearest = np.abs(scores[:, None] - ratios).argmin(1)
        np.testing.assert_allclose(scores, ratios[nearest], atol=1e-9)
        assert (
            fit(
                np.bincount(nearest, minlength=d + 1),
                stats.binom.pmf(plus, d, stats.norm.cdf(x)),
            )
            > ALARM / 2
        )


def test_too_little_noise_is_caught():
    "A program that adds half the noise it declares loses an audit."

    class Sloppy(SignSgd):
        def simulate(self, u, rng):
            return SignSgd(self.clip_norm, self.sigma / 2).simulate(u, rng)

    found = audit.audit_play(
        Sloppy(1.0, 1.0), "zero-out", 40_000, 1e-2, seed_tree(0, "sloppy"), ALARM, d=64
    )
    assert audit.refutes(found, audit.claim(SignSgd(1.0, 1.0), "zero-out", 1e-2))
    honest = audit.audit_play(
        SignSgd(1.0, 1.0), "zero-out", 40_000, 1e-2, seed_tree(0, "honest"), ALARM, d=64
    )
    assert not audit.refutes(honest, audit.claim(SignSgd(1.0, 1.0), "zero-out", 1e-2))
