"""FL-TOP's accounting against things computed another way: adaptive quadrature, exact
fractions, dp-accounting, brute force over all cohorts of a small population, and Monte
Carlo.
"""

import itertools
import math

import numpy as np
from dp_accounting import pld
from scipy.integrate import quad
from scipy.special import ndtr
from scipy.stats import norm
from tables import tabled

from dpcomm.privacy import fixed_size_accountant as accountant
from dpcomm.privacy.accounting import (
    ORDERS,
    gaussian_delta,
    gaussian_eps,
    gaussian_guarantee,
)
from dpcomm.privacy.composition import both_ends
from dpcomm.privacy.fixed_size_accountant import fixed_size_epsilon, fixed_size_rdp
from dpcomm.privacy.pairs import gaussian_pairs

FMNIST, MEDICAL = (1.54, 1 / 60, 200, 1e-5), (1.49, 100 / 5010, 100, 1e-5)


# ---- Theorem 1


@tabled("setting, known", [(FMNIST, 0.681), (MEDICAL, 0.627)])
def test_theorem_1_over_real_lambda_is_lower_and_above_the_exact_value(setting, known):
    sigma, q, rounds, delta = setting
    lambdas = (None, np.linspace(1, 60, 400))
    whole, real = (
        accountant.theorem1_epsilon(*setting, lambdas=lam).eps for lam in lambdas
    )
    names = dict(sampling="poisson", accountant="pld")
    exact = gaussian_guarantee(sigma, delta, q, rounds, **names).eps
    assert exact < real < whole
    assert abs(exact - known) < 1e-3


# ---- cohorts of a fixed size


def two_sided_pair(sigma, q, cells=20_000):
    "Log-masses of the dominating pair under replacement on cells of x, from its definition."
    x = np.concatenate([np.linspace(1, 2 + 10 * sigma, cells), [np.inf]])
    null, full = -np.diff(ndtr(-x / sigma)), -np.diff(ndtr((2 - x) / sigma))
    mixed = (1 - q) * null + q * full
    rest = [
        1 - mixed.sum() - null.sum()
    ]  # losses above zero, mirrored, the rest at zero
    laws = np.concatenate([mixed, null, rest]), np.concatenate([null, mixed, rest])
    assert rest[0] > 0
    return [np.log(np.maximum(p, 1e-300)) for p in laws]


@tabled("sigma, q, rounds", [(1.54, 1 / 60, 200), (1.0, 0.2, 5)])
def test_replacing_is_the_two_sided_pair_of_dp_accounting(sigma, q, rounds):
    "Grouping cells of x is post-processing, so this implementation errs below; ours errs above."
    upper, lower = (dict(enumerate(p)) for p in two_sided_pair(sigma, q))
    names = dict(pessimistic_estimate=False, value_discretization_interval=2e-4)
    pair = pld.privacy_loss_distribution.from_two_probability_mass_functions
    one = pair(lower, upper, **names)
    below = one.self_compose(rounds).get_epsilon_for_delta(1e-5)
    ours = fixed_size_epsilon(sigma, q, rounds, 1e-5).eps
    assert below <= ours + 1e-9 < below + 0.05 * (1 + below)


@tabled("sigma", [0.8, 1.54, 10.0])
@tabled("relation", accountant.FIXED_RELATIONS)
def test_everybody_in_the_cohort_is_the_gaussian_mechanism_at_half_the_noise(
    sigma, relation
):
    "Whoever is set to zero there moves the sum by one clip, and displaces nobody."
    far = 1 if relation == "zero-out" else 2
    exact = gaussian_eps(sigma / far, 1e-5, 4)
    ours = fixed_size_epsilon(sigma, 1.0, 4, 1e-5, relation).eps
    assert exact - 1e-6 <= ours < exact + 2e-3 * (1 + exact)
    curve = fixed_size_rdp(sigma, 1.0, ORDERS, relation)
    assert np.array_equal(curve, ORDERS / (2 * (sigma / 2) ** 2))


@tabled("sigma, q", [(1.54, 1 / 60), (0.7, 0.3), (5.0, 0.5)])
@tabled("relation", accountant.FIXED_RELATIONS)
def test_one_round_has_the_closed_profile(sigma, q, relation):
    eps = fixed_size_epsilon(sigma, q, 1, 1e-5, relation).eps
    far = math.log1p(math.expm1(eps) / q)
    exact = q * gaussian_delta(sigma / 2, far)
    if relation == "zero-out":
        b = math.exp(eps - far)
        exact = (1 - b) * exact + b * q * gaussian_delta(sigma, far)
    assert exact <= 1e-5 < exact * 1.02


@tabled("order", [1.2, 3.5, 40])
@tabled("sigma, q", [(0.02, 0.01), (0.1, 0.4), (0.3, 1e-4), (1.0, 0.9)])
def test_the_second_side_is_that_integral_at_any_noise(sigma, q, order):
    "The part where the ratio is flat in closed form, the rest on panels."

    def excess(x, power):
        ratio = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 2) / sigma**2)
        return math.expm1(power * ratio) * norm.pdf(x, 0, sigma)

    near, how = max(-14 * sigma, 1 - 40 * sigma**2), dict(epsrel=1e-11, limit=500)
    ends = (-14 * sigma, -4 * sigma, 0, 4 * sigma, near, 1)
    below = sum(
        quad(excess, a, b, (order,), epsabs=0, **how)[0]
        for a, b in itertools.pairwise(sorted({min(e, near) for e in ends} | {1}))
    )
    above = quad(excess, 1, max(1, 14 * sigma), (1 - order,), epsabs=0, **how)[0]
    known = above - below - q * (1 - 2 * norm.cdf(-1 / sigma))
    (found,) = accountant._two_sided(np.array([order]), sigma, q)
    assert math.isclose(found, max(known, 0), rel_tol=1e-8, abs_tol=1e-13)


@tabled("run", [(0.1, 0.5, 10, 1e-5), (1.54, 1 / 60, 200, 1e-13)])
def test_wide_losses_and_tiny_deltas_are_composed_as_well(run):
    sigma, q, rounds, delta = run
    wide, renyi = (fixed_size_epsilon(*run, accountant=a) for a in ("pld", "rdp-balle"))
    (pair,) = gaussian_pairs(1 / sigma, q, "replace", "fixed", None)
    low, high = both_ends([(pair, rounds)], delta)
    assert low <= wide.eps <= high * 1.001
    assert wide.eps < 0.97 * renyi.eps
