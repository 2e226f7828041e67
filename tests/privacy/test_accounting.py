"""What guards `dpcomm.privacy.accounting`: independent implementations, quadrature,
properties and refusals.
"""

import dataclasses
import inspect
import json
import subprocess
import sys
from itertools import product
from math import comb, exp, log

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant as theirs
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.special import gammaln, log_ndtr, logsumexp
from tables import tabled

from dpcomm.privacy import accounting as acc
from dpcomm.privacy.accounting import (
    ACCOUNTANTS,
    INTEGER_ORDERS,
    ORDERS,
    RELATIONS,
    SAMPLINGS,
    TRUSTS,
    Guarantee,
    calibrate,
    compose,
    gaussian_delta,
    gaussian_guarantee,
    guarantee_from_rdp,
    rdp_gaussian,
    rdp_subsampled_gaussian,
    rdp_to_delta,
    rdp_to_eps,
)

NAMES = dict(
    unit="client",
    relation="add-remove",
    sampling="poisson",
    accountant="rdp-classic",
    scope="total",
    trust="central",
)
QS, SIGMAS = (1e-3, 0.01, 0.1, 0.5, 0.9), (0.5, 0.957, 2.15, 5.0)
FRACTIONS = np.array([1.1, 1.5, 2.5, 3.7, 6.3, 10.9, 33.3, 100.5])
ours = settings(max_examples=60, deadline=None, derandomize=True)
alphas, sigmas, rates = st.floats(1.05, 60), st.floats(0.3, 20), st.floats(1e-3, 0.999)


def log_moment_by_quadrature(order, sigma, q, reverse=False):
    """log A by the trapezoid rule, which is exact to rounding for such integrands; the
    gain (1+x)^a - 1 - a x keeps small moments.
    """
    z = np.linspace(-14 * sigma, order + 14 * sigma + 1, 60_001)
    log_ratio = np.logaddexp(np.log1p(-q), np.log(q) + (2 * z - 1) / (2 * sigma**2))
    log_weight = (
        -(z**2) / (2 * sigma**2)
        - 0.5 * np.log(2 * np.pi * sigma**2)
        + np.log(z[1] - z[0])
    )
    power = 1 - order if reverse else order
    whole = logsumexp(power * log_ratio + log_weight)
    if whole > 1:
        return whole
    small = np.expm1(np.minimum(power * log_ratio, 30)) - power * np.expm1(
        np.minimum(log_ratio, 30)
    )
    gain = np.where(
        np.abs(power * log_ratio) < 30,
        small * np.exp(log_weight),
        np.exp(power * log_ratio + log_weight)
        - np.exp(log_weight)
        - power * (np.exp(log_ratio + log_weight) - np.exp(log_weight)),
    )
    return np.log1p(np.sum(gain))


def log_moment_without_signs(order, sigma, q, terms=1000):
    "The two series with |binomial|: what dp-accounting 0.6 sums at fractional orders."
    i = np.arange(terms)
    j, z0 = order - i, sigma**2 * log(1 / q - 1) + 0.5
    left = (
        i * log(q)
        + j * np.log1p(-q)
        + i * (i - 1) / (2 * sigma**2)
        + log_ndtr((z0 - i) / sigma)
    )
    right = (
        j * log(q)
        + i * np.log1p(-q)
        + j * (j - 1) / (2 * sigma**2)
        + log_ndtr((j - z0) / sigma)
    )
    return logsumexp(
        gammaln(order + 1) - gammaln(i + 1) - gammaln(j + 1) + np.logaddexp(left, right)
    )


# ---- Renyi curves ----


@tabled("q, sigma", list(product(QS, SIGMAS)))
def test_integer_orders_agree_with_dp_accounting(q, sigma):
    orders = np.array([2, 3, 4, 7, 16, 33, 64, 256, 1024])
    np.testing.assert_allclose(
        rdp_subsampled_gaussian(orders, sigma, q),
        theirs._compute_rdp_poisson_subsampled_gaussian(q, sigma, orders),
        rtol=1e-6,
    )


@tabled("q, sigma", list(product(QS, SIGMAS)))
def test_fractional_orders_are_the_integral_and_below_dp_accounting(q, sigma):
    found = rdp_subsampled_gaussian(FRACTIONS, sigma, q)
    exact = np.array(
        [log_moment_by_quadrature(a, sigma, q) / (a - 1) for a in FRACTIONS]
    )
    np.testing.assert_allclose(found, exact, rtol=2e-7)
    unsigned = np.array(
        [log_moment_without_signs(a, sigma, q) / (a - 1) for a in FRACTIONS]
    )
    reference = theirs._compute_rdp_poisson_subsampled_gaussian(q, sigma, FRACTIONS)
    done = np.isfinite(reference)
    np.testing.assert_allclose(
        reference[done],
        unsigned[done],
        rtol=1e-4,
        err_msg="dp-accounting no longer sums absolute binomials",
    )
    assert (found <= reference * (1 + 1e-6)).all()
    alike = np.isclose(unsigned, exact, rtol=1e-7, atol=0)
    assert alike.sum() >= 2
    np.testing.assert_allclose(found[alike], reference[alike], rtol=1e-6)


@tabled("q, sigma", list(product(QS, SIGMAS)))
def test_integer_orders_are_the_integral_and_the_larger_direction(q, sigma):
    for order in (2, 3, 5, 12, 64):
        forward = log_moment_by_quadrature(order, sigma, q)
        assert rdp_subsampled_gaussian(order, sigma, q) * (order - 1) == pytest.approx(
            forward, rel=1e-7
        )
        assert log_moment_by_quadrature(order, sigma, q, reverse=True) <= forward * (
            1 + 1e-9
        )


def test_quadrature_oracle_agrees_with_adaptive_quadrature():
    def density(z, m):
        return np.exp(-((z - m) ** 2) / (2 * 1.3**2)) / np.sqrt(2 * np.pi * 1.3**2)

    moment, _ = quad(
        lambda z: (
            ((0.8 * density(z, 0) + 0.2 * density(z, 1)) / density(z, 0)) ** 2.6
            * density(z, 0)
        ),
        -20,
        25,
        epsrel=1e-12,
    )
    assert log_moment_by_quadrature(2.6, 1.3, 0.2) == pytest.approx(
        log(moment), rel=1e-8
    )


def test_integer_orders_agree_with_enumeration():
    for order, sigma, q in product((2, 3, 9), (0.9, 3.0), (0.02, 0.6)):
        moment = sum(
            comb(order, k)
            * q**k
            * (1 - q) ** (order - k)
            * exp(k * (k - 1) / (2 * sigma**2))
            for k in range(order + 1)
        )
        assert rdp_subsampled_gaussian(order, sigma, q) * (order - 1) == pytest.approx(
            log(moment), rel=1e-9
        )


def test_a_mixture_is_its_binomial_sum():
    moments = np.array([0.3, 1.1, 2.5, 4.0])
    for order, q in product((2, 3, 5), (1e-3, 0.4)):
        powers = [1, 1, *np.exp(moments)]
        direct = sum(
            comb(order, k) * q**k * (1 - q) ** (order - k) * powers[k]
            for k in range(order + 1)
        )
        assert acc.log_mixture(order, q, moments) == pytest.approx(
            log(direct), rel=1e-9
        )


def test_rare_sampling_keeps_its_digits():
    for q in (1e-6, 1e-9):
        assert rdp_subsampled_gaussian(2, 1.0, q) == pytest.approx(
            q**2 * np.expm1(1.0), rel=1e-9
        )
        assert rdp_subsampled_gaussian(3, 1.0, q) == pytest.approx(
            1.5 * q**2 * np.expm1(1.0), rel=1e-4
        )


def test_rounded_fractional_orders_fall_back_to_an_upper_bound():
    for order, q in product((1.1, 1.5, 2.5), (1e-6, 1e-9)):
        exact = order / 2 * q**2 * np.expm1(1.0)
        assert (
            exact
            <= rdp_subsampled_gaussian(order, 1.0, q)
            <= 2 * exact / min(order - 1, 1)
        )


def test_ends_of_the_sampling_rate():
    assert (rdp_subsampled_gaussian(ORDERS, 1.7, 0) == 0).all()
    np.testing.assert_array_equal(
        rdp_subsampled_gaussian(ORDERS, 1.7, 1), rdp_gaussian(ORDERS, 1.7)
    )
    near = rdp_subsampled_gaussian(ORDERS, 1.7, 1 - 1e-13)
    np.testing.assert_allclose(near, rdp_gaussian(ORDERS, 1.7), rtol=1e-6)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("sigma", (1e-3, 0.1, 1e4))
def test_extremes_neither_overflow_nor_warn(sigma):
    orders = np.array([1.01, 1.5, 2, 255.5, 10_000, 10_000.5])
    for q in (1e-8, 1e-3, 0.5, 0.999999):
        found = rdp_subsampled_gaussian(orders, sigma, q)
        assert np.isfinite(found).all() and (found > 0).all()
        assert (found <= rdp_gaussian(orders, sigma)).all()
    high = rdp_subsampled_gaussian(10_000, 0.1, 0.01)
    assert high == pytest.approx(10_000 / 0.02 + 10_000 / 9_999 * log(0.01), rel=1e-9)


def test_gaussian_curve_and_shapes():
    assert rdp_gaussian(3.5, 2.0) == 3.5 / 8
    assert rdp_subsampled_gaussian(
        3.5, 2.0, 0.1
    ).shape == () and rdp_subsampled_gaussian([[2, 3.5]], 2.0, 0.1).shape == (1, 2)
    assert (
        (INTEGER_ORDERS % 1 == 0).all()
        and set(INTEGER_ORDERS) < set(ORDERS)
        and (np.diff(ORDERS) > 0).all()
        and ORDERS.min() > 1
    )


@ours
@given(alphas, sigmas, rates, st.floats(1.01, 3))
def test_curve_is_monotone(order, sigma, q, factor):
    here = rdp_subsampled_gaussian(order, sigma, q)
    slack = 1 + 1e-6
    if here * (order - 1) < 1e-8:
        return
    assert here <= rdp_subsampled_gaussian(order * factor, sigma, q) * slack
    assert here <= rdp_subsampled_gaussian(order, sigma / factor, q) * slack
    assert here <= rdp_subsampled_gaussian(order, sigma, min(1, q * factor)) * slack
    assert here <= rdp_gaussian(order, sigma) * slack


@ours
@given(st.integers(2, 40), st.floats(0.01, 0.99), sigmas, rates)
def test_log_moment_is_convex_between_integers(low, part, sigma, q):
    orders = np.array([low, low + part, low + 1])
    a, middle, b = rdp_subsampled_gaussian(orders, sigma, q) * (orders - 1)
    assert middle <= (1 - part) * a + part * b + 1e-12 * (1 + b)
    assert a <= middle <= b


# ---- composition and conversion ----


def test_composition_adds_and_is_exact_for_the_gaussian():
    curve = rdp_subsampled_gaussian(ORDERS, 1.3, 0.05)
    np.testing.assert_allclose(
        compose(curve, 7), sum(curve for _ in range(7)), rtol=1e-12
    )
    np.testing.assert_allclose(
        compose(rdp_gaussian(ORDERS, 3.0), 9), rdp_gaussian(ORDERS, 1.0), rtol=1e-12
    )
    assert gaussian_delta(3.0, 0.7, rounds=9) == pytest.approx(
        gaussian_delta(1.0, 0.7), rel=1e-12
    )


@tabled(
    "q, sigma, rounds", list(product((0.01, 0.1), (0.8, 2.15, 5.0), (1, 100, 2000)))
)
def test_epsilon_agrees_with_dp_accounting(q, sigma, rounds):
    for delta in (1e-3, 1e-6):
        curve = compose(rdp_subsampled_gaussian(INTEGER_ORDERS, sigma, q), rounds)
        eps, order = rdp_to_eps(INTEGER_ORDERS, curve, delta, "balle")
        assert (eps, order) == pytest.approx(
            theirs.compute_epsilon(INTEGER_ORDERS, curve, delta), rel=1e-6
        )
        event = dp_accounting.PoissonSampledDpEvent(
            q, dp_accounting.GaussianDpEvent(sigma)
        )
        whole = INTEGER_ORDERS[INTEGER_ORDERS <= 256]
        accountant = dp_accounting.rdp.RdpAccountant(whole).compose(event, rounds)
        stated = gaussian_guarantee(
            sigma,
            delta,
            q,
            rounds,
            sampling="poisson",
            accountant="rdp-balle",
            orders=whole,
        )
        assert stated.eps == pytest.approx(accountant.get_epsilon(delta), rel=1e-6)


def test_delta_agrees_with_dp_accounting():
    for q, rounds, eps in product((0.01, 0.1), (10, 500), (0.5, 4.0)):
        curve = compose(rdp_subsampled_gaussian(INTEGER_ORDERS, 2.0, q), rounds)
        want = theirs.compute_delta(INTEGER_ORDERS, curve, eps)[0]
        found = rdp_to_delta(INTEGER_ORDERS, curve, eps, "balle")[0]
        if want < 0.02:
            assert found == pytest.approx(want, rel=1e-6)
        else:
            assert found >= want


def test_classic_conversion_by_hand():
    assert rdp_to_eps([2.0, 5.0], [0.3, 0.9], 1e-3) == pytest.approx(
        (0.9 + log(1e3) / 4, 5.0)
    )
    assert rdp_to_eps([2.0, 5.0], [0.3, np.inf], 1e-3) == pytest.approx(
        (0.3 + log(1e3), 2.0)
    )
    assert rdp_to_eps([2.0, 5.0], [np.inf, np.inf], 1e-3)[0] == np.inf
    assert rdp_to_eps([2.0, 5.0], [0.0, 0.0], 1e-3)[0] == 0
    assert rdp_to_delta([2.0, 5.0], [0.3, 0.9], 2.0)[0] == pytest.approx(
        exp(4 * (0.9 - 2.0))
    )
    assert (
        rdp_to_delta([2.0], [9.0], 1.0)[0] == 1
        and rdp_to_delta([2.0], [0.0], 1.0)[0] == 0
    )


@ours
@given(st.floats(1.01, 200), st.floats(1e-6, 50), st.floats(1e-12, 0.5))
def test_conversions_invert_and_balle_is_below_classic(order, rdp, delta):
    classic, balle = (rdp_to_eps(order, rdp, delta, c)[0] for c in ("classic", "balle"))
    assert balle <= classic
    gap = (np.log(order) - (order - 1) * np.log1p(-1 / order)) / (order - 1)
    if balle > 0:
        assert classic - balle == pytest.approx(gap, rel=1e-6)
    for conversion, eps in (("classic", classic), ("balle", balle)):
        if eps > 0:
            assert rdp_to_delta(order, rdp, eps, conversion)[0] == pytest.approx(
                delta, rel=1e-6
            )


@ours
@given(st.floats(0.5, 20), st.floats(1e-9, 1e-2), st.integers(1, 200))
def test_no_conversion_falls_below_the_exact_gaussian(sigma, delta, rounds):
    curve = compose(rdp_gaussian(ORDERS, sigma), rounds)
    for conversion in ("classic", "balle"):
        eps, _ = rdp_to_eps(ORDERS, curve, delta, conversion)
        assert gaussian_delta(sigma, eps, rounds) <= delta * (1 + 1e-9)


# ---- the exact Gaussian ----


def test_gaussian_delta_agrees_with_dp_accounting_and_quadrature():
    for sigma, eps in product((0.5, 1.0, 3.0), (0.0, 0.3, 2.0, 8.0)):
        mechanism = dp_accounting.pld.privacy_loss_mechanism.GaussianPrivacyLoss(sigma)
        assert gaussian_delta(sigma, eps) == pytest.approx(
            mechanism.get_delta_for_epsilon(eps), rel=1e-6
        )

    def loss(z):
        return max(exp(-((z - 1) ** 2) / 8) - exp(0.4 - z**2 / 8), 0) / np.sqrt(
            8 * np.pi
        )

    assert gaussian_delta(2.0, 0.4) == pytest.approx(
        quad(loss, 0.5 + 0.4 * 4, 30, epsrel=1e-11)[0], rel=1e-9
    )
    assert gaussian_delta(1.0, 1e200) == 0 and gaussian_delta(1e-3, 0) == pytest.approx(
        1
    )


def test_pld_is_just_above_the_exact_gaussian():
    for sigma, delta, rounds in ((4.0, 1e-5, 10), (1.0, 1e-6, 1)):
        exact = brentq(
            lambda eps: gaussian_delta(sigma, eps, rounds) - delta, 0, 40, xtol=1e-12
        )
        pld = gaussian_guarantee(sigma, delta, rounds=rounds, accountant="pld").eps
        assert exact * (1 - 1e-9) <= pld <= exact * (1 + 1e-4)


def test_swapped_client_is_half_the_noise_under_every_accountant():
    for name in ACCOUNTANTS:
        swapped = gaussian_guarantee(
            6.0, 1e-5, rounds=4, relation="replace", accountant=name
        )
        assert (
            swapped.eps == gaussian_guarantee(3.0, 1e-5, rounds=4, accountant=name).eps
        )
        local = gaussian_guarantee(
            6.0, 1e-5, rounds=4, relation="local", trust="local", accountant=name
        )
        assert local.eps == swapped.eps and (local.relation, local.trust) == (
            "local",
            "local",
        )


# ---- guarantees ----

STATED = [
    ("MNIST", 100, 10, 1000, 3.8, 3, 0.04),
    ("MNIST", 100, 10, 1000, 2.15, 6, 0.04),
    ("FEMNIST", 3500, 100, 1500, 5, 1, 0.02),
    ("FEMNIST", 3500, 100, 1500, 1.85, 3, 0.02),
    ("FEMNIST", 3500, 100, 1500, 1.15, 6, 0.02),
    ("Shakespeare", 660, 66, 200, 2.15, 3, 0.02),
    ("StackOverflow", 342477, 60, 1500, 0.957, 1, 0.02),
]


@tabled("task, n, cohort, rounds, sigma, stated, tol", STATED)
def test_dp_fedavg_rows_of_dprec(task, n, cohort, rounds, sigma, stated, tol):
    classic, balle, pld = (
        gaussian_guarantee(
            sigma,
            n**-1.1,
            cohort / n,
            rounds,
            sampling="poisson",
            accountant=name,
            orders=INTEGER_ORDERS,
        )
        for name in ACCOUNTANTS
    )
    assert classic.eps == pytest.approx(stated, rel=tol)
    assert pld.eps < balle.eps < classic.eps
    assert (classic.sampling, classic.relation, classic.scope) == (
        "poisson",
        "add-remove",
        "total",
    )


def test_guarantee_prints_and_stores_every_field():
    g = gaussian_guarantee(
        2.0,
        1e-5,
        0.1,
        50,
        sampling="poisson",
        relation="zero-out",
        note="a remark",
        premises={"sampling": "as if it rained"},
    )
    for text in (
        "1e-05",
        f"{g.eps:.4g}",
        "unit client",
        "relation zero-out",
        "sampling poisson, q = 0.1",
        "rdp-classic (accountant)",
        "of 50 rounds (scope total)",
        "trust central",
        "a remark",
        "best order",
    ):
        assert text in str(g)
    assert str(g).startswith("As if it rained (premise sampling): eps = ") and str(
        dataclasses.replace(g, premises={})
    ).startswith("eps = ")
    assert Guarantee(**json.loads(json.dumps(g.as_dict()))) == g
    assert set(g.as_dict()) == {
        "eps",
        "delta",
        "unit",
        "relation",
        "sampling",
        "accountant",
        "scope",
        "trust",
        "note",
        "premises",
        "rounds",
        "q",
    }
    with pytest.raises(AttributeError):
        g.eps = 0.1
    assert (
        Guarantee(np.inf, 0, **NAMES).eps == np.inf
        and type(Guarantee(np.float64(1), 0, **NAMES).eps) is float
    )


def test_guarantee_from_rdp_states_the_conversion_and_the_edge():
    fields = {k: v for k, v in NAMES.items() if k != "accountant"}
    curve = compose(rdp_gaussian(ORDERS, 5.0), 3)
    g = guarantee_from_rdp(ORDERS, curve, 1e-5, "balle", **fields)
    assert (
        g.accountant == "rdp-balle"
        and g.eps == rdp_to_eps(ORDERS, curve, 1e-5, "balle")[0]
        and "edge" not in g.note
    )
    assert "edge" in guarantee_from_rdp([2, 3], [0.1, 0.1], 1e-5, **fields).note
    assert (
        guarantee_from_rdp(
            ORDERS, curve, 1e-5, accountant="rdp-theorem-1", **fields
        ).accountant
        == "rdp-theorem-1"
    )
    with pytest.raises(ValueError, match="sampling, trust"):
        guarantee_from_rdp(
            ORDERS, curve, 1e-5, unit="client", relation="replace", scope="total"
        )


@ours
@given(
    st.floats(0.6, 10), st.floats(0.01, 0.9), st.integers(1, 500), st.floats(1e-8, 1e-2)
)
def test_guarantees_are_ordered(sigma, q, rounds, delta):
    few = np.array([1.5, 2, 3, 5, 8, 12, 20, 40, 80])

    def at(sigma=sigma, q=q, rounds=rounds, delta=delta, accountant="rdp-classic"):
        return gaussian_guarantee(
            sigma,
            delta,
            q,
            rounds,
            sampling="poisson",
            accountant=accountant,
            orders=few,
        ).eps

    assert at(sigma=2 * sigma) <= at() <= at(rounds=2 * rounds) and at() <= at(
        delta=delta / 10
    )
    assert at(q=q / 2) <= at() and at(accountant="rdp-balle") <= at()
    assert at() <= gaussian_guarantee(sigma, delta, rounds=rounds, orders=few).eps


def test_no_participation_costs_nothing():
    for name in ACCOUNTANTS:
        assert (
            gaussian_guarantee(
                1.0, 1e-6, 0.0, 10, sampling="poisson", accountant=name
            ).eps
            == 0
        )


# ---- calibration ----


@ours
@given(st.floats(0.2, 8), st.floats(1e-7, 1e-2), st.sampled_from([0.02, 0.3, 1.0]))
def test_calibrated_noise_is_safe_and_tight(eps, delta, q):
    def at(sigma):
        return gaussian_guarantee(
            sigma,
            delta,
            q,
            20,
            sampling="poisson",
            orders=[1.5, 2, 3, 5, 8, 12, 20, 40, 80],
            accountant="rdp-balle",
        )

    if not at(100).eps <= eps <= at(0.3).eps:
        return
    sigma = calibrate(at, eps, 0.3, 100, tol=1e-4)
    assert at(sigma).eps <= eps < at(sigma * (1 - 2e-4)).eps


def test_calibrated_clip_is_safe_and_tight():
    def at(clip):
        return gaussian_guarantee(0.02 / clip, 1e-5, rounds=10)

    clip = calibrate(at, 2, 1e-4, 1, increasing=True)
    assert at(clip).eps <= 2 < at(clip * (1 + 2e-6)).eps
    assert calibrate(at, at(0.01).eps, 1e-4, 0.01, increasing=True) == pytest.approx(
        0.01, rel=1e-5
    )


def test_calibrate_stops_at_the_last_float():
    def at(x):
        return Guarantee(1.0 if x >= 0.3 else 2.0, 0, **NAMES)

    assert calibrate(at, 1.5, 0, 1, tol=1e-300) == 0.3


@pytest.mark.parametrize(
    "low, high, increasing, advice",
    [
        (50, 60, False, "widen"),
        (0.5, 0.6, False, "widen"),
        (0.5, 60, True, "increasing=False"),
    ],
)
def test_calibrate_refuses_a_bracket_without_the_target(low, high, increasing, advice):
    with pytest.raises(ValueError, match=advice) as error:
        calibrate(
            lambda sigma: gaussian_guarantee(sigma, 1e-5), 2, low, high, increasing
        )
    assert f"{gaussian_guarantee(low, 1e-5).eps:.4g}" in str(
        error.value
    ) and f"{gaussian_guarantee(high, 1e-5).eps:.4g}" in str(error.value)


# ---- refusals: every one names the argument and the value ----


@tabled(
    "name, wrong",
    [
        ("eps", -1),
        ("eps", float("nan")),
        ("eps", "x"),
        ("delta", 1),
        ("delta", -1e-9),
        ("delta", None),
        ("unit", "user"),
        ("relation", "add_remove"),
        ("relation", ["replace"]),
        ("sampling", "Poisson"),
        ("scope", "run"),
        ("trust", "server"),
        ("accountant", ""),
        ("accountant", 3),
        ("note", None),
        ("premises", None),
        ("rounds", 0),
        ("rounds", 1.5),
        ("q", 1.5),
        ("q", "x"),
    ],
)
def test_guarantee_refuses(name, wrong):
    with pytest.raises(ValueError) as error:
        Guarantee(**{**dict(eps=1, delta=1e-5), **NAMES, name: wrong})
    assert f"{name} is {wrong!r}" in str(error.value)


def test_a_premise_is_about_one_known_thing():
    names = dict(eps=1, delta=1e-5) | NAMES
    for wrong, said in (
        ({"everything": "as if all were well"}, "premises is 'everything'"),
        ({"keys": " "}, "premises['keys'] is ' '"),
        ("as the paper accounts it", "premises is 'as the paper accounts it'"),
    ):
        with pytest.raises(ValueError) as error:
            Guarantee(**names, premises=wrong)
        assert said in str(error.value)
    stated = Guarantee(**names, premises={"keys": "as if it rained"})
    more = stated.assuming("keys", "proof")
    assert more.premises == {"keys": "as if it rained", "proof": acc.PREMISES["proof"]}
    assert stated.theorem and not more.theorem, "a premise stands for the proof"
    assert stated.noting("", "x").noting("x").note == "x"


def test_a_record_of_old_is_read_with_the_premises_that_it_did_not_name():
    old = dict(eps=3.0, delta=1e-5, unit="client", scope="total", note="", q=0.1)
    old |= dict(trust="central", rounds=10)
    fixed = dict(relation="add-remove", sampling="poisson", accountant="rdp-classic")
    read = acc.recorded(old | fixed | dict(premise="as the paper accounts it"))
    assert read.premises == {"sampling": "as the paper accounts it"}
    null = dict(relation="null-slot", sampling="replacement", accountant="exact-balle")
    assert set(acc.recorded(old | null).premises) == {"neighbours"}
    gaps = acc.recorded(old | null | dict(accountant="theorem1-arxiv"))
    assert set(gaps.premises) == {"neighbours", "proof"} and not gaps.theorem
    assert acc.recorded(read.as_dict()) == read
    bare = acc.recorded(old | null | dict(premises={}))
    assert bare.premises == {}, "who names premises is taken at the word"


@pytest.mark.parametrize("n, said", [(100, True), (99, False), (None, False)])
def test_a_delta_that_may_publish_a_client_is_said(n, said):
    assert bool(acc.large_delta(0.01, n)) == said


def test_local_relation_needs_a_local_view():
    with pytest.raises(ValueError, match="trust = 'central'"):
        Guarantee(1, 1e-5, **{**NAMES, "relation": "local"})


def covered(relation, sampling, trust):
    "Whether some theorem covers three names, written a second time."
    if trust == "local":
        return sampling == "none" and relation in ("zero-out", "replace", "local")
    if trust == "secagg":
        return sampling == "none" and relation in ("zero-out", "replace")
    return (
        relation
        in {
            "none": ("add-remove", "replace", "zero-out"),
            "fixed": ("add-remove", "replace", "zero-out"),
            "poisson": ("add-remove", "zero-out", "poisson-null"),
            "replacement": ("null-slot", "replace"),
        }[sampling]
    )


def accountable(relation, sampling, trust):
    "Those of them that are about a Gaussian sum and accounted by `gaussian_guarantee`."
    return (
        covered(relation, sampling, trust)
        and sampling in ("none", "poisson")
        and relation != "poisson-null"
    )


@tabled("premises", [{}, dict(acc.PREMISES)])
@tabled("relation, sampling, trust", list(product(RELATIONS, SAMPLINGS, TRUSTS)))
def test_a_guarantee_is_made_only_where_a_theorem_covers_it(
    relation, sampling, trust, premises
):
    names = {
        **NAMES,
        "relation": relation,
        "sampling": sampling,
        "trust": trust,
        "premises": premises,
    }
    assert bool(acc.PROVED.get((trust, sampling), {}).get(relation)) == covered(
        relation, sampling, trust
    )
    if covered(relation, sampling, trust):
        assert Guarantee(1, 1e-5, **names).trust == trust
    else:
        with pytest.raises(
            ValueError,
            match=(
                f"trust = '{trust}' with sampling = '{sampling}' and relation ="
                f" '{relation}' is not allowed: no theorem"
            ),
        ):
            Guarantee(1, 1e-5, **names)


@tabled("scope, unit, rounds", list(product(acc.SCOPES, acc.UNITS, (None, 1, 5))))
def test_one_message_or_one_round_is_no_whole_run(scope, unit, rounds):
    names = {**NAMES, "scope": scope, "unit": unit, "rounds": rounds}
    if (scope == "per-round" and rounds == 5) or (
        scope == "total" and unit == "message"
    ):
        with pytest.raises(ValueError, match="scope"):
            Guarantee(1, 1e-5, **names)
    else:
        assert Guarantee(1, 1e-5, **names).rounds == rounds


@pytest.mark.parametrize(
    "sigma, q, rounds, delta, smaller",
    [
        (0.3, 1e-6, 10**6, 1e-12, "renyi"),
        (0.3, 1e-6, 10**6, 1e-15, "renyi"),
        (0.3, 1e-6, 10**6, 1e-20, "renyi"),
        (2.0, 0.1, 1000, 1e-5, "pld"),
    ],
)
def test_pld_is_never_above_the_renyi_value(sigma, q, rounds, delta, smaller):
    pld = gaussian_guarantee(
        sigma, delta, q, rounds, sampling="poisson", accountant="pld"
    )
    renyi = gaussian_guarantee(
        sigma, delta, q, rounds, sampling="poisson", accountant="rdp-balle"
    )
    assert pld.eps < np.inf and (
        pld.eps == renyi.eps if smaller == "renyi" else pld.eps < renyi.eps
    )


@tabled("relation, sampling, trust", list(product(RELATIONS, SAMPLINGS, TRUSTS)))
def test_only_proved_combinations_are_accounted(relation, sampling, trust):
    q = 1.0 if sampling == "none" else 0.1
    for name in ACCOUNTANTS[:2]:
        if accountable(relation, sampling, trust):
            g = gaussian_guarantee(
                3.0,
                1e-5,
                q,
                relation=relation,
                sampling=sampling,
                trust=trust,
                accountant=name,
            )
            assert (g.relation, g.sampling, g.trust, g.accountant) == (
                relation,
                sampling,
                trust,
                name,
            )
        else:
            with pytest.raises(ValueError, match="missing is|not allowed"):
                gaussian_guarantee(
                    3.0,
                    1e-5,
                    q,
                    relation=relation,
                    sampling=sampling,
                    trust=trust,
                    accountant=name,
                )


@tabled(
    "wrong, text",
    [
        (dict(sampling="fixed", q=0.1), "fixed size"),
        (dict(sampling="replacement", q=0.1), "fixed size"),
        (dict(sampling="poisson", relation="replace"), "swapped"),
        (dict(relation="null-slot"), "null message"),
        (dict(relation="substitute"), "relation is 'substitute'"),
        (dict(accountant="rdp"), "accountant is 'rdp'"),
        (dict(q=0.5), "q is 0.5"),
        (dict(sampling="poisson", q=1.1), "q is 1.1"),
        (dict(sampling="poisson", q=float("nan")), "q is nan"),
        (dict(rounds=3, scope="per-round"), "rounds is 3"),
        (dict(rounds=2.5), "rounds is 2.5"),
        (dict(rounds=0), "rounds is 0"),
        (dict(scope="epoch"), "scope is 'epoch'"),
        (dict(unit="person"), "unit is 'person'"),
        (dict(orders=[1, 2]), "orders"),
        (dict(orders="many"), "orders"),
        (dict(sigma=0), "sigma is 0"),
        (dict(sigma=-1), "sigma is -1"),
        (dict(sigma=float("nan")), "sigma is nan"),
        (dict(sigma=float("inf")), "sigma is inf"),
        (dict(sigma=None), "sigma is None"),
        (dict(delta=0), "delta is 0"),
        (dict(delta=1), "delta is 1"),
        (dict(delta=-0.1), "delta is -0.1"),
    ],
)
def test_gaussian_guarantee_refuses(wrong, text):
    with pytest.raises(ValueError) as error:
        gaussian_guarantee(**{**dict(sigma=2.0, delta=1e-5), **wrong})
    assert text in str(error.value)


@tabled(
    "call, text",
    [
        (lambda: rdp_gaussian([], 1.0), "orders"),
        (lambda: rdp_gaussian(1, 1.0), "orders holds 1"),
        (lambda: rdp_gaussian(np.inf, 1.0), "orders"),
        (lambda: rdp_subsampled_gaussian(2, 1.0, -0.1), "q is -0.1"),
        (lambda: rdp_subsampled_gaussian(2, "1 m", 0.1), "sigma is '1 m'"),
        (lambda: compose([1.0], 1.5), "rounds is 1.5"),
        (lambda: compose([1.0], float("inf")), "rounds is inf"),
        (lambda: compose([np.nan], 2), "rdp holds nan"),
        (lambda: rdp_to_eps([2, 3], [1.0], 1e-5), "shape"),
        (lambda: rdp_to_eps(2, -1.0, 1e-5), "rdp holds -1"),
        (lambda: rdp_to_eps(2, np.nan, 1e-5), "rdp holds nan"),
        (lambda: rdp_to_eps(2, 1.0, 0), "delta is 0"),
        (lambda: rdp_to_eps(2, 1.0, 1e-5, "clasic"), "mean 'classic'"),
        (lambda: rdp_to_delta(2, 1.0, -1), "eps is -1"),
        (lambda: rdp_to_delta(2, 1.0, np.inf), "eps is inf"),
        (lambda: gaussian_delta(0, 1.0), "sigma is 0"),
        (lambda: gaussian_delta(1.0, -1), "eps is -1"),
        (lambda: gaussian_delta(1.0, 1.0, 0), "rounds is 0"),
        (lambda: calibrate(None, 0, 1, 2), "eps is 0"),
        (lambda: calibrate(None, 1, 2, 1), "low is 2"),
        (lambda: calibrate(None, 1, 1, None), "high is None"),
        (lambda: calibrate(None, 1, 1, 1), "low is 1"),
        (lambda: calibrate(None, 1, 1, 2, tol=0), "tol is 0"),
    ],
)
def test_numbers_out_of_range_are_refused(call, text):
    with pytest.raises(ValueError) as error:
        call()
    assert text in str(error.value)


def test_pld_without_its_package_says_how_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ImportError, match="pip install dp-accounting"):
        gaussian_guarantee(2.0, 1e-5, accountant="pld")
    assert gaussian_guarantee(2.0, 1e-5, accountant="rdp-balle").eps > 0


# ---- the module itself ----


def test_no_torch_and_no_dp_accounting_at_import():
    code = (
        "import sys, dpcomm.privacy.accounting; print([m for m in ('torch',"
        " 'dp_accounting', 'dpcomm.core.vectors', 'matplotlib') if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert found == "[]"


def test_every_public_function_states_its_source():
    public = [
        name
        for name in acc.__all__
        if inspect.isfunction(getattr(acc, name)) or name == "Guarantee"
    ]
    assert len(public) >= 12
    for name in public:
        paragraphs = getattr(acc, name).__doc__.split(
            "\n\n"
        )  # the arguments are the last
        told = any(part.rstrip().endswith("]") for part in paragraphs)
        assert told or name == "calibrate", name  # bisection is nobody's theorem
