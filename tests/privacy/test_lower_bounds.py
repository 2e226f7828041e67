"Lower bounds against mechanisms whose information and error are known exactly."

import math

import numpy as np
import pytest
from tables import tabled

from dpcomm.privacy.lower_bounds import information, least_error


@tabled("eps, d", [(0.2, 3), (1.0, 3), (3.0, 5)])
def test_no_channel_of_few_signs_says_more(eps, d):
    "The best privately chosen sign pattern, by enumeration: exponential mechanism."
    signs = np.array(np.meshgrid(*[[-1, 1]] * d)).reshape(d, -1).T
    for scale in (0.3, 1.0):
        weight = np.exp(scale * eps * (signs @ signs.T) / (2 * d))
        p = weight / weight.sum(1, keepdims=True)
        spent = np.log(p.max(0) / p.min(0)).max()
        marginal = p.mean(0)
        v = (p / marginal).T @ signs / len(signs)
        said = float(marginal @ (v**2).sum(1))
        assert said <= information(spent, 0.0, d) + 1e-12


def test_telling_everything_with_probability_delta_says_delta_k():
    assert information(0.0, 1e-3, 10_000) >= 1e-3 * 10_000
    assert information(2.0, 0.0, 1) <= information(2.0, 1e-9, 1) <= 6 + 1e-8
    assert information(1e4, 0.0, 5) == 2 * (1 + 1e4)
    assert information(math.inf, 0.0, 5) == math.inf
    assert information(0.5, 0.0, 9) == pytest.approx(math.exp(0.5) + math.exp(-0.5) - 2)


def test_the_largest_of_three_bounds_is_stated():
    how = dict(d=1_000, cohort=100, rounds=10, clients=400)
    bits = least_error(**how, nbits=8, information=math.inf, trust="local")
    assert bits == pytest.approx(1_000 / (100 * 16 * math.log(2)) - 0.01)
    local = least_error(**how, nbits=1e6, information=0.5, trust="local")
    assert local == pytest.approx(1_000 * 10 / (400 * 0.5) - 0.01)
    for trust in ("secagg", "central"):
        summed = least_error(**how, nbits=1e6, information=0.5, trust=trust)
        assert summed == pytest.approx(1_000 * 10 / (400**2 * 0.5) - 0.01)
    assert least_error(**how, nbits=1e6, information=math.inf, trust="local") == 0
