"""vqSGD from its parts: corners, lies, repetition and its price. What every mechanism
must do is in test_conformance.

Statistical tests have false-alarm rate 1e-6 and fixed seeds.
"""

import math

import numpy as np
import torch
from laws import ALARM, fit
from tables import tabled

from dpcomm.core.random import seed_tree
from dpcomm.mechanisms.vqsgd import VqSgd
from dpcomm.privacy import hypothesis_tests

INPUTS = [
    torch.tensor([0.6, 0.0, -0.3]),
    torch.tensor([0.0, 0.0]),
    torch.tensor([-0.7]),
    torch.tensor([3.0, -4.0, 0.0, 12.0]),
    torch.full((5,), -(5**-0.5)),
]


def by_definition(m, u):
    "Law of one corner from the convex combination and the matrix of randomised response."
    v = m.clip(torch.from_numpy(u)).numpy()
    n, c, lie = 2 * len(v), m.clip_norm, math.exp(-m.eps)
    weights = np.zeros(n)
    for i, x in enumerate(v):
        weights[2 * i + (x < 0)] = abs(x) / (c * math.sqrt(len(v)))
    weights += (1 - weights.sum()) / n
    return (
        weights @ (np.full((n, n), lie) + (1 - lie) * np.eye(n)) / (1 + (n - 1) * lie)
    )


# ---- corners and lies


@tabled("eps", [0.3, 2.0, math.inf])
@tabled("u", INPUTS, ids=len)
def test_corners_follow_their_law(u, eps):
    m, d = VqSgd(1.0, eps), len(u)
    found = m.corners(u.double().numpy(), seed_tree(0, "law", d), 30_000)
    law = by_definition(m, u.double().numpy())
    assert fit(np.bincount(found, minlength=2 * d), law) > ALARM / 15


def test_the_last_entry_can_be_drawn_and_nothing_beyond():
    class Edge(np.random.Generator):
        def random(self, shape):
            return np.array([[0.0] * 3, [0.0, 0.6, 1 - 2**-53]])

    edge, m = Edge(np.random.PCG64(0)), VqSgd(1.0, math.inf)
    some, none = (m.corners(np.array(u), edge, 3) for u in ([0.5, 0, -0.5], [0] * 3))
    # a zero vector sends anything
    assert some.tolist() == [0, 5, 5] and none.tolist() == [0, 3, 5]


# ---- privacy


@tabled("eps, repeats, d", [(1.0, 1, 1), (0.5, 3, 2), (3.0, 2, 8)])
def test_the_curve_is_that_of_the_corners(eps, repeats, d):
    m, grid = VqSgd(1.5, eps, repeats), np.linspace(0, 4, 9)
    worst = [by_definition(m, u) for u in m.worst_case(d).numpy()]
    laws = hypothesis_tests.multinomial_laws(*worst, repeats)
    want = hypothesis_tests.profile_of_pmfs(*laws, grid)
    np.testing.assert_allclose(m.privacy_profile("local", grid, d=d), want, atol=1e-9)
    assert VqSgd(1.0, 1000.0).game("local", d=d), "e^1000 overflows"
