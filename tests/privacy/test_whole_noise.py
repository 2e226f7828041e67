"""What guards `dpcomm.privacy.whole_noise`: laws by convolution of positive terms, their
tails and hockey-stick curves at whole shifts; laws that are not of these families.
"""

import math

import numpy as np
import pytest
from scipy.special import ive, ndtri_exp
from tables import tabled

from dpcomm.mechanisms.contract import mechanism
from dpcomm.privacy.hypothesis_tests import profile_of_gaussian
from dpcomm.privacy.whole_noise import gaussian_curvature, normal_std, skellam_curvature


def shares(v, n):
    "Law of a sum of n discrete Gaussians, from -len // 2 on."
    reach = math.ceil(14 * math.sqrt(v)) + 8
    one = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * v))
    law = one = one / one.sum()
    for _ in range(n - 1):
        law = np.convolve(law, one)
    return law


def skellam(mu):
    reach = math.ceil(14 * math.sqrt(mu)) + 9
    return ive(np.abs(np.arange(-reach, reach + 1)), mu)


OF_SHARES = {1: (0.2, 0.3, 0.34, 1.0, 400.0), 2: (0.3, 0.5), 3: (0.4, 2.0), 4: (9.0,)}
OF_SHARES |= {5: (0.75,), 12: (0.5,), 40: (1.0,)}
CASES = [("gauss", v, n) for n, some in OF_SHARES.items() for v in some]
CASES += [("skellam", mu, 1) for mu in (0.5, 1.0, 2.0, 8.0, 50.0, 900.0)]


@tabled("kind, v, n", CASES)
def test_no_curvature_and_no_step_is_larger_than_is_proved(kind, v, n):
    law, bound = skellam(v), skellam_curvature(v)
    if kind == "gauss":
        law, bound = shares(v, n), gaussian_curvature(v, n)
    variance, middle = n * v, len(law) // 2
    reach = math.ceil(7 * math.sqrt(variance)) + 1
    log = np.log(law[middle - reach : middle + reach + 1])
    curved = (2 * log[1:-1] - log[2:] - log[:-2]).max()
    assert curved <= bound * (1 + 1e-9) + 1e-11
    assert bound <= 1.001 * curved + 1e-9 or (kind, v) == ("gauss", 0.3) or n in (2, 3)
    below = np.log(np.cumsum(law)[middle - reach : middle])
    widest = np.diff(ndtri_exp(below)).max()
    assert widest <= (1 + 1e-9) / normal_std(bound)
    if variance > 2 and kind == "gauss":
        assert normal_std(bound) >= math.sqrt(variance - 0.12)
        assert widest >= (1 - 0.05 / variance) / normal_std(bound)


@tabled("law", [[1, 2, 1], [1, 4, 6, 4, 1], [1, 3, 5, 6, 5, 3, 1], [2, 7, 9, 7, 2]])
def test_any_log_concave_law_of_positive_masses_is_dominated(law):
    "The proposition is about laws on all whole numbers: tails are continued at the last ratio."
    law, tail = np.array(law, float), np.arange(1, 400)
    ends = law[0] * (law[0] / law[1]) ** tail
    law = np.concatenate([ends[::-1], law, ends])
    law /= law.sum()
    log = np.log(law)
    a = 1 / normal_std((2 * log[1:-1] - log[2:] - log[:-2]).max())
    for z in (1, 2, 5):
        p, q = np.append(np.zeros(z), law), np.append(law, np.zeros(z))
        for e in np.linspace(0, 3, 13):
            exact = np.maximum(p - math.exp(e) * q, 0).sum()
            assert exact <= profile_of_gaussian(a * z, e) * (1 + 1e-9) + 1e-13


def test_large_variances_and_many_shares_lose_nothing():
    for v, n in ((1e4, 1), (1e4, 100), (8.0, 2**31), (3.0, 10**6), (1.0, 10**5)):
        assert gaussian_curvature(v, n) * n * v == pytest.approx(1, rel=1e-5)
    assert 0.725759 < gaussian_curvature(0.3, 6) < 0.7264, "eq. shares, by convolution"
    for mu in (1e4, 1e6, 1e9, 1e30):
        assert 1 < skellam_curvature(mu) * mu * (1 + 1e-12) < 1 + 3 / mu + 1e-8
    assert normal_std(1e-20) == pytest.approx(1e10, rel=1e-12)
    assert gaussian_curvature(0.25, 10**4) == math.inf and normal_std(math.inf) == 0
    stds = [normal_std(k) for k in np.geomspace(1e-3, 100, 200)]
    assert (np.diff(stds) < 0).all()


@tabled("name", ["ddgauss", "skellam"])
def test_a_coarse_ring_is_dominated_too(name):
    "One coordinate, six bits, everything enumerated but for wrapping, which only hides."
    m = mechanism(name, clip_norm=1.0, sigma=1.0, n_clients=6, ring_bits=6)
    eps, noise = np.linspace(0, 6, 13), normal_std(m.curvature(1))
    assert m.normal_sigma(1) * m.longest(1) <= noise * (1 + 1e-12)  # of a rounded one
    for relation, far in (("zero-out", 1), ("replace", 2)):
        bound = profile_of_gaussian(far / m.normal_sigma(1), eps)
        assert (m.privacy_profile(relation, eps, d=1) <= bound + 1e-8).all()
