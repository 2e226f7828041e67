"""Private SGD of a linear model: rank-one gradients, exact sums of messages, training.
Statistical tests: alarm 1e-6 each, fixed seeds.
"""

import math

import numpy as np
import pytest
from laws import ALARM, fit
from scipy.special import erf
from tables import tabled

from dpcomm.core.random import seed_tree
from dpcomm.mechanisms.contract import mechanism
from dpcomm.training import linear_model

TILTS = {
    "logistic": np.tanh,
    "normal": lambda u: erf(u / math.sqrt(2)),
    "clamped": lambda u: 0.8 * np.clip(2 * u, -1, 1),
}


def batch(n=6, p=4, classes=3, seed=0):
    "Features with a last column of ones, labels, weights."
    rng = seed_tree(seed, "batch", n, p)
    f = np.concatenate([rng.standard_normal((n, p - 1)), np.ones((n, 1))], 1)
    y, w = rng.integers(0, classes, n), rng.standard_normal((classes, p))
    return f.astype(np.float32), y, w.astype(np.float32)


def cells(a, f):
    "Every gradient entry, (n, classes * p) float64."
    return np.einsum("ic,ij->icj", a, f, dtype=np.float64).reshape(len(a), -1)


def law(t):
    "Distribution of a sum of signs with means t, on -n, -n + 2, ..., n."
    p = np.ones(1)
    for m in t:
        p = np.convolve(p, [(1 - m) / 2, (1 + m) / 2])
    return p


# ---- sums of signs


@tabled("tilt", TILTS.values(), ids=TILTS)
@tabled("top", [1e-3, 0.3, 2.0])
def test_the_rate_is_above_that_of_every_cell(tilt, top):
    rate = linear_model.forced_rate(tilt, top)
    u = np.linspace(0, top, 20_001)[1:]
    assert (-np.log1p(-tilt(u)) <= rate * u * (1 + 1e-12)).all()
    assert rate <= 1.05 * (-np.log1p(-tilt(u)) / u).max(), "a rate far above costs time"


@tabled("name", TILTS)
@tabled("scale", [0.2, 1.5])
def test_a_sum_of_signs_has_the_exact_law(name, scale):
    """Every coordinate of 2,000 sums against a convolution of coins; coordinates share
    the alarm.
    """
    f, y, w = batch(5, 3)
    a = scale * linear_model.clip_rank_one(linear_model.errors(w, f, y), f, 1.0)
    tilt, sums = TILTS[name], []
    rng = seed_tree(0, "sums", name, str(scale))
    for _ in range(2_000):
        noise = rng.standard_normal((3, 3))
        sums.append(linear_model.sum_signs(tilt, a, f, rng, noise).ravel())
    sums = np.stack(sums)
    assert set(np.unique(sums)) <= {-5, -3, -1, 1, 3, 5}
    for s, t in zip(sums.T, tilt(cells(a, f)).T):
        seen = np.bincount(((s + 5) // 2).astype(int), minlength=6)
        assert fit(seen, law(t)) > ALARM / sums.shape[1]


# ---- sums of messages


def test_gains_are_the_closed_forms():
    for name, made, gain in (
        ("gaussian", dict(sigma=1.0, local=True), 1.0),
        ("imvu", dict(eps=2.0, beta=3.0), 1 / math.tanh(1.0)),
        ("signsgd", dict(sigma=4.0), math.sqrt(2 / math.pi) / 0.4),
        ("mvu", dict(eps=2.0, beta=3.0), 1.0),
    ):
        slope = linear_model.gain(mechanism(name, clip_norm=0.1, **made))
        assert slope == pytest.approx(gain, rel=1e-6)


# ---- training


QUIET = mechanism("gaussian", clip_norm=1.0, sigma=0.05, local=True, exact=False)


def test_training_learns_and_is_a_function_of_its_seed():
    rng = seed_tree(0, "toy")
    centres, y = rng.standard_normal((3, 6)), rng.integers(0, 3, 300)
    x = (centres[y] + 0.3 * rng.standard_normal((300, 6))).astype(np.float32)
    config = linear_model.Settings(epochs=4, lr=0.5, batch=50)
    runs = [linear_model.train(x, y, x, y, QUIET, config, seed) for seed in (0, 0, 1)]
    first, again, other = (weights for weights, _ in runs)
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    (last,) = runs[0][1]
    assert last["accuracy"] > 95 and last["epoch"] == 4 and first.shape == (3, 7)
