"""Quantised DP-FedAvg from its parts: grid, bound on the length, roundings.

What every mechanism must do is in test_conformance. Statistical tests have false-alarm rate
1e-6 and fixed seeds.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import count_bounds, drawn, radius
from scipy import stats
from tables import tabled

from dpcomm.core.random import seed_tree
from dpcomm.mechanisms import quantised
from dpcomm.mechanisms.gaussian import Gaussian
from dpcomm.mechanisms.quantised import Quantised
from dpcomm.secagg.ring import rounded_norm

settings = st.builds(
    Quantised,
    st.sampled_from([0.01, 1.0, 3.7]),
    st.just(1.0),
    st.integers(2, 16),
    st.sampled_from(quantised.ROUNDINGS),
    st.sampled_from([1.0, 0.7, 1 / 3, 0.0625]),
)


def shapes(d, *path):
    "Unit vectors of several shapes: spread out, normal, heavy-tailed, one entry, half steps."
    rng = seed_tree(0, "shape", d, *path)
    rows = [np.ones(d), rng.standard_normal(d), rng.standard_t(2, d), np.eye(1, d)[0]]
    rows += [np.sign(rng.standard_normal(d)) * (np.arange(d) < (d + 1) // 2)]
    unit = np.stack(rows) / np.linalg.norm(rows, axis=1, keepdims=True)
    return torch.from_numpy(unit.astype(np.float32))


# ---- the length, which is the privacy


@drawn
@given(
    settings,
    st.sampled_from([1, 2, 5, 40, 300]),
    st.sampled_from([0.3, 1.0, 1.0000001, 7.0, 1e20]),
)
def test_no_message_is_longer_than_the_clip(m, d, size):
    u, streams = shapes(d) * (size * m.clip_norm), [seed_tree(1, i) for i in range(5)]
    z, M = m.whole(u, streams), m.longest(d)
    assert z.dtype == torch.int64 and int(z.abs().max()) <= m.levels
    # whole numbers, exactly
    assert max(sum(int(v) ** 2 for v in row) for row in z) <= M
    assert m.step(d) * math.sqrt(M) == pytest.approx(m.clip_norm, rel=1e-15)


@tabled("x, N", [(0.5, math.sqrt(0.25 * 4000)), (1.5, 1.5 * math.sqrt(400))])
def test_the_bound_of_random_rounding_holds_and_is_not_far(x, N):
    "Exact tail: the squared length of equal entries is a shifted binomial."
    d, k = round((N / x) ** 2), math.floor(x)
    for beta in (0.5, 1e-3, 1e-9):
        # entries rounded up that still fit
        hits = math.floor((rounded_norm(N, d, beta) ** 2 - d * k**2) / (2 * k + 1))
        assert stats.binom.sf(hits, d, x - k) <= beta
    assert rounded_norm(N, d, 0.5) < 1.06 * math.sqrt(N**2 + d / 4)


def test_a_longer_rounding_is_drawn_again(monkeypatch):
    "With the chance of redrawing raised to 0.9, many are; none that is sent is too long."
    monkeypatch.setattr(quantised, "REDRAWN", 0.9)
    m, u = Quantised(1.0, 1.0, 3, "random"), torch.full((3000, 30), 30**-0.5)
    z, M = m.whole(u, seed_tree(0, "redrawn")), m.longest(30)
    assert (z.square().sum(1) <= M).all()
    up = float(m.in_steps(u[:1])[0, 0] % 1)
    free = np.random.default_rng(0).binomial(30, up, 3000)
    assert (free > M).any(), "some would have been too long"


# ---- roundings


def test_toward_zero_by_hand():
    m = Quantised(1.0, 1.0, 3)  # L = 3
    u = torch.tensor([[0.9, -0.34, 0.2], [2.0, 0.0, 0.0], [-0.3333, 0.3334, -0.6667]])
    assert m.whole(u, None).tolist() == [[2, -1, 0], [3, 0, 0], [0, 1, -2]]
    torch.testing.assert_close(m.simulate(u, None)[1], torch.tensor([1.0, 0.0, 0.0]))
    assert m.in_steps(u)[1].tolist() == [3.0, 0.0, 0.0]


@tabled("bits, clip", [(8, 0.01), (8, 0.3), (16, 0.7)])
def test_an_entry_on_the_grid_stays_on_it(bits, clip):
    m = Quantised(clip, 1.0, bits)
    k = torch.arange(-m.levels, m.levels + 1, max(1, m.levels // 100))
    u = (k.double() * m.step(1))[:, None]
    assert torch.equal(m.whole(u, None)[:, 0], k)


def test_random_rounding_is_a_fair_coin():
    n, m = 20_000, Quantised(1.0, 1.0, 4, "random")
    u = torch.tensor([[0.31, -0.17, 0.02, 0.0]])
    x = m.in_steps(u)[0].numpy()
    z = m.whole(u.expand(n, 4), seed_tree(0, "coin")).numpy()
    up = z - np.floor(x)
    low, high = count_bounds(n, x - np.floor(x), 4)
    assert ((up == 0) | (up == 1)).all()
    assert (low <= up.sum(0)).all() and (up.sum(0) <= high).all()


def test_the_cut_ends_the_grid():
    u = torch.tensor([[0.9, 0.1, -0.3]])
    m, r = (Quantised(1.0, 1.0, 8, rounding, 0.25) for rounding in ("zero", "random"))
    sent = m.simulate(u, None)
    assert sent[0].tolist() == pytest.approx([0.25, 0.1, -0.25], abs=0.25 / 127)
    assert sent[0, 0] == -sent[0, 2] == pytest.approx(0.25, rel=1e-4)
    bias, variance = m.moments(u)
    torch.testing.assert_close(bias, sent - u)
    assert not variance.any()
    bias, variance = r.moments(u)
    assert bias[0].tolist() == pytest.approx([0.25 - 0.9, 0.0, 0.05], abs=3e-3)
    # what is cut is certain
    assert not variance[0, [0, 2]].any() and 0 < variance[0, 1] <= (0.25 / 127) ** 2 / 4


# ---- messages, sums, noise


@tabled("exact", [True, False])
def test_the_servers_noise_is_that_of_dp_fedavg(exact):
    sent, rng = torch.zeros(3, 50_000), [seed_tree(0, "noise") for _ in range(2)]
    a, b = (
        kind(0.5, 2.0, exact=exact).aggregate(sent, 10, at)
        for kind, at in zip((Quantised, Gaussian), rng)
    )
    assert torch.equal(a, b) and abs(float(a.mean())) < radius(0.1, 50_000)
    assert float(a.std()) == pytest.approx(0.1, rel=0.02)


# ---- guarantee and audit


@tabled("rounding", quantised.ROUNDINGS)
def test_the_guarantee_is_the_gaussian_mechanisms(rounding):
    run = dict(rounds=1000, delta=100**-1.1, n_clients=100, cohort=10)
    run |= dict(sampling="poisson", note="first")
    ours = Quantised(0.01, 3.8, rounding=rounding).guarantee(**run)
    theirs = Gaussian(0.01, 3.8).guarantee(**run)
    assert (ours.eps, ours.delta) == (theirs.eps, theirs.delta)
    assert (ours.trust, ours.relation) == ("central", "add-remove")
    said = "first; the server adds the noise and sees every sum before it"
    assert ours.note.startswith(said)
