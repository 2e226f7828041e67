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
from scipy import stats
from tables import tabled

from dpcomm.mechanisms import signsgd
from dpcomm.mechanisms.signsgd import SignSgd
from dpcomm.privacy import audit
from dpcomm.privacy.accounting import ORDERS, rdp_gaussian


def divergence(order, v, w):
    "Renyi divergence of the signs of v and w plus standard normal noise; sums the last axis."
    p, q = (stats.norm.logcdf(np.stack([x, -x])) for x in np.broadcast_arrays(v, w))
    return (np.logaddexp.reduce(order * p + (1 - order) * q) / (order - 1)).sum(-1)


# ---- the law of a sign


def test_moments_keep_their_digits_in_the_tail():
    m = SignSgd(1.0, 1 / 7)
    bias, variance = m.moments(torch.tensor([[1.0, 0.0]], dtype=torch.float64))
    assert float(variance[0, 0]) == pytest.approx(4 * stats.norm.sf(7), rel=1e-6)
    assert float(variance[0, 1]) == 1.0
    # here the sign happens to be in u's units
    assert bias[0].tolist() == pytest.approx([0.0, 0.0], abs=1e-11)


# ---- numbers that keep their digits


@tabled("y", ["0", "1e-150", "1e-8", "0.9999999", "1", "1.0000001", "40", "1e5"])
def test_log_cosh_keeps_its_digits(y):
    with decimal.localcontext(prec=330):
        x = decimal.Decimal(float(y))
        exact = float(((x.exp() + (-x).exp()) / 2).ln())
    found, other = (float(signsgd.log_cosh(sign * float(y))) for sign in (1, -1))
    assert found == other == pytest.approx(exact, rel=1e-14, abs=1e-320)


def test_the_half_logit_keeps_its_digits():
    v = np.array([0.0, 1e-150, 1e-12, 1e-5])
    x = np.array([0.01, 0.5, 0.999999, 1.000001, 3.0, 8.0, 30.0])
    exact = (stats.norm.logcdf(x) - stats.norm.logsf(x)) / 2
    small = v * math.sqrt(2 / math.pi)
    np.testing.assert_allclose(signsgd.half_logit(v), small, rtol=1e-9)
    np.testing.assert_allclose(signsgd.half_logit(x), exact, rtol=1e-13)
    np.testing.assert_array_equal(signsgd.half_logit(-x), -signsgd.half_logit(x))
    assert np.isfinite(signsgd.log_cosh([1e300, -1e300])).all()
    assert signsgd.half_logit(np.zeros((2, 3))).shape == (2, 3)


# ---- the theorem


@tabled("relation, scale", [("zero-out", 1), ("replace", 4)])
@tabled("order", [2.0, 2.5, 7.0, 100.0])
def test_the_worst_vector_has_the_declared_divergence(order, relation, scale):
    for d, sigma in itertools.product((1, 2, 17, 1000), (0.2, 1.0, 6.0)):
        v = np.full(d, 1 / (sigma * math.sqrt(d)))
        other = -v if scale == 4 else 0 * v
        found = max(divergence(order, v, other), divergence(order, other, v))
        claimed = signsgd.rdp_signs(order, sigma, relation, d)
        assert claimed == pytest.approx(found, rel=1e-8)
        assert found <= scale * order / (math.pi * sigma**2) * (1 + 1e-9)


@tabled("relation, scale", [("zero-out", 1), ("replace", 2)])
@tabled("sigma", [0.3, 1.0, 10.0])
def test_the_curve_grows_with_dimension_to_its_limit_below_the_gaussian(
    relation, scale, sigma
):
    sizes = (1, 2, 10, 1000, 10**6, 2**32 - 1, None)
    curves = np.array([signsgd.rdp_signs(ORDERS, sigma, relation, d) for d in sizes])
    gaussian, high = rdp_gaussian(ORDERS, sigma / scale), ORDERS >= 2
    assert (np.diff(curves, axis=0) >= -1e-9 * curves[1:]).all()
    assert (np.diff(curves, axis=1) >= -1e-12).all()
    assert (curves <= gaussian * (1 + 1e-12)).all()
    np.testing.assert_allclose(curves[-1, high], 2 / np.pi * gaussian[high], rtol=1e-12)
    low = high & (ORDERS <= 256)
    np.testing.assert_allclose(curves[-2, low], curves[-1, low], rtol=1e-3)


@tabled("relation", ["zero-out", "replace"])
@tabled("order", [1.01, 1.2, 1.5, 1.9])
def test_below_order_two_the_curve_is_a_bound(order, relation):
    "The small-signal limit itself is exceeded there, so it must not be used."
    v = np.geomspace(0.01, 20, 400)[:, None]
    pairs = [(v, -v), (v, 0.3 * v)] if relation == "replace" else [(v, 0), (0, v)]
    found = np.max([divergence(order, a, b) for a, b in pairs], axis=0)
    for d in (1, None):
        most = [signsgd.rdp_signs(order, 1 / x, relation, d) for x in v[:, 0]]
        assert (found <= np.array(most) * (1 + 1e-9)).all()
    excess = divergence(1.5, 0, v) / (1.5 * v[:, 0] ** 2 / math.pi)
    assert 1.08 < excess.max() < 1.1


# ---- guarantees


@tabled("relation", ["zero-out", "replace"])
@tabled("d, rounds, sigma", [(1, 1, 0.4), (1, 5, 1.0), (300, 1, 1.0), (300, 1, 5.0)])
def test_the_enumerated_loss_of_the_worst_vector_stays_below_the_claim(
    d, rounds, sigma, relation
):
    "The count of plus signs is sufficient, and binomial: its epsilon is exact."
    v, n = 1 / (sigma * math.sqrt(d)), d * rounds
    p = stats.norm.cdf([v, -v if relation == "replace" else 0.0])
    laws = stats.binom.pmf(np.arange(n + 1), n, p[:, None])
    true = max(audit.enumerated_eps(*laws, 1e-5))
    g = SignSgd(1.0, sigma).guarantee(rounds, 1e-5, relation, "exact-balle", d=d)
    assert true <= g.eps and (d < 300 or true > 0.85 * g.eps)
