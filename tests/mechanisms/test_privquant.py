"""PrivQuant from its parts: levels, thresholds, laws, draws. What every mechanism must
do is in test_conformance.

Statistical tests have false-alarm rate 1e-6 and fixed seeds.
"""

import itertools
import math
import tracemalloc

import numpy as np
import pytest
import torch
from laws import ALARM, fit
from tables import tabled

from dpcomm.core.random import Insecure, seed_tree
from dpcomm.mechanisms import privquant as pq
from dpcomm.mechanisms.privquant import PrivQuant, calibrate

SMALL = [
    (1, 2, 1.0, "best"),
    (1, 4, 2.0, "paper"),
    (2, 5, 0.5, "best"),
    (3, 3, 2.0, "paper"),
    (4, 3, 1.0, "best"),
    (5, 2, 6.0, "paper"),
    (3, 5, 8.0, "paper"),
]
small = tabled("d, K, eps, rule", SMALL)


def every_law(cal):
    "All sheets (K^d, d), and the law of the message for every rounded input (K^d, K^d)."
    sheets = np.array(list(itertools.product(range(cal.levels), repeat=cal.d)))
    return sheets, np.exp(pq.log_law((sheets[:, None] == sheets).sum(2), cal))


def exact(d, K):
    "Numbers of sheets by matches, as whole numbers."
    return [math.comb(d, l) * (K - 1) ** (d - l) for l in range(d + 1)]


# ---- thresholds


@tabled("d, K", [(1, 3), (2, 2), (6, 3), (30, 4)])
@tabled("eps", [1.3, 4.0, 11.5, 30.0])
@tabled("kappa_min", [None, 0])
def test_the_paper_s_rule_takes_the_largest_margin(d, K, eps, kappa_min):
    "Every kappa tried: log S0/S1 <= .9 eps, and the whole sum positive."
    b, ok = exact(d, K), {}
    for kappa in range(-d if kappa_min is None else kappa_min, d):
        tau = math.ceil((d + kappa + 1) / 2)
        ratio = math.log(sum(b[:tau]) / sum(b[tau:]))
        if -0.1 * eps < ratio <= 0.9 * eps:
            ok[kappa] = tau, ratio
    if not ok:
        with pytest.raises(ValueError, match="smallest|at least"):
            calibrate(d, K, eps, "paper", kappa_min)
        return
    cal = calibrate(d, K, eps, "paper", kappa_min)
    tau, ratio = ok[max(ok)]
    assert (cal.kappa, cal.tau) == (max(ok), tau)
    assert 0 < cal.actual_eps <= eps * (1 + 1e-12)
    assert cal.actual_eps == pytest.approx(0.1 * eps + ratio)
    assert cal.log_odds == 0.1 * eps
    assert cal.p == pytest.approx(1 / (1 + math.exp(-0.1 * eps)))


@small
def test_the_best_rule_is_the_best(d, K, eps, rule):
    "Against every threshold with every coin that keeps epsilon, on a fine grid."
    cal, tails = calibrate(d, K, eps, "best"), pq.tails(d, K)
    assert cal.actual_eps == pytest.approx(eps)
    spent = np.linspace(1e-3, eps, 200)
    for ratio, share in zip(tails.ratio, tails.share):
        m = math.exp(share) * -np.expm1(-spent) / (1 + np.exp(ratio - spent))
        assert m.max() <= cal.m * (1 + 1e-9)
    assert cal.m >= calibrate(d, K, eps, rule).m * (1 - 1e-12)


@tabled(
    "d, K, eps, rule",
    [
        (2**17, 16, 8000.0, "paper"),
        (2**17, 2, 1e-3, "best"),
        (8192, 128, 1e5, "paper"),
        (3, 2**16, 50.0, "best"),
    ],
)
def test_large_dimensions_and_budgets_stay_finite(d, K, eps, rule):
    cal = calibrate(d, K, eps, rule)
    law = pq.match_law(cal)
    assert law.sum() == pytest.approx(1)
    assert 0 < cal.m <= 1 + 1e-9 and 1 / K < cal.q <= 1 + 1e-9
    assert math.isfinite(pq.covariance_factor(cal))
    assert float(law @ np.arange(d + 1)) / d == pytest.approx(cal.q, rel=1e-7)
    assert cal.p == pytest.approx(1 / (1 + math.exp(-cal.log_odds)), rel=1e-12)


# ---- laws


@small
def test_messages_follow_their_law(d, K, eps, rule):
    "30,000 draws against the enumerated law of all messages, for one rounded input."
    cal, n = calibrate(d, K, eps, rule), 30_000
    sheets, law = every_law(cal)
    given = len(sheets) // 3
    seen = pq.randomise(np.tile(sheets[given], (n, 1)), cal, seed_tree(0, "law", d, K))
    index = (seen * K ** np.arange(d - 1, -1, -1)).sum(1)
    assert fit(np.bincount(index, minlength=len(sheets)), law[given]) > ALARM / 7


def test_a_long_vector_is_encoded_in_little_memory():
    "Beside the vector, and once its calibration is there."
    m, d = PrivQuant(1.0, 16, 4000.0), 300_001
    u = torch.from_numpy(seed_tree(0, "long").uniform(-1, 1, d)).float()
    m.encode(u, Insecure(1))
    tracemalloc.start()
    m.encode(u, Insecure(2))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * 4 * d


def test_long_rows_are_drawn_as_short_ones(monkeypatch):
    m, u = PrivQuant(1.0, 5, 40.0), torch.linspace(-1, 1, 50)
    short, rows = (
        m.encode(u, Insecure(1)).payload,
        m.simulate(u.expand(3, 50), seed_tree(1)),
    )
    monkeypatch.setattr(pq, "BLOCK", 7)
    monkeypatch.setattr(pq, "SHORT", 7)
    assert m.encode(u, Insecure(1)).payload == short
    assert torch.equal(m.simulate(u.expand(3, 50), seed_tree(1)), rows)
