"""The piecewise mechanism from its parts: window, answers, density, coordinates,
memory. What every mechanism must do is in test_conformance.

Statistical tests have false-alarm rate 1e-6 and fixed seeds.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from laws import ALARM, fit
from tables import tabled

from dpcomm.core.random import seed_tree
from dpcomm.mechanisms import pm
from dpcomm.mechanisms.pm import Pm

# ---- one number


@tabled("t", [-1.0, 0.3, 1.0])
def test_answers_keep_to_both_ends_of_epsilon(t):
    draws = seed_tree(0, "ends").random((2, 2))
    np.testing.assert_allclose(pm.perturb(np.array([-1, t]), 1e6, draws), [-1, t])
    assert np.isfinite(pm.perturb(np.array([-1, t]), 1e-6, draws)).all()


# ---- coordinates and answers of a vector


def test_coordinates_are_uniform_and_distinct():
    seen = [sorted(pm.coordinates(seed_tree(seed), 6, 3)) for seed in range(4000)]
    subsets = {s: i for i, s in enumerate(itertools.combinations(range(6), 3))}
    counts = np.bincount([subsets[tuple(row)] for row in seen], minlength=20)
    assert fit(counts, np.full(20, 1 / 20)) > ALARM


# ---- memory


def test_memory_is_sent_whole_where_drawn_and_kept_elsewhere():
    m = Pm(1.0, 400.0, 5)
    u = 0.01 * torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    memory = torch.full((3, 20), 0.2)
    before, whole = (u.clone(), memory.clone()), memory + u
    estimates, new = m.simulate_with_memory(
        memory, u, [seed_tree(0, i) for i in range(3)]
    )
    sent = new == 0
    # the arguments were changed
    assert torch.equal(u, before[0]) and torch.equal(memory, before[1])
    assert (sent.sum(1) == 5).all() and torch.equal(new[~sent], whole[~sent])
    assert not estimates[~sent].any()
    # no scale of d / k
    torch.testing.assert_close(estimates[sent], whole[sent], rtol=0, atol=1e-6)


# ---- messages on a grid


@tabled("t", [-1.0, -0.3, 0.0, 0.77, 1.0])
def test_cells_are_drawn_by_their_law(t, monkeypatch):
    "A grid of 12 cells: 60,000 answers against the mixture of the two nearest windows."
    monkeypatch.setattr(pm, "CELLS", 12)
    pm.cells.cache_clear()
    n, (width, outside, wide) = 60_000, pm.cells(1.5, 1)
    place, at, beyond = (t + 1) / 2 * (12 - width), np.arange(12), outside / pm.COIN

    def one(first):
        inside = (at >= first) & (at < first + width)
        return np.where(inside, (1 - beyond) / width, beyond / (12 - width))

    low, up = min(math.floor(place), 12 - width), place - math.floor(place)
    law = (1 - up) * one(low) + up * one(min(low + 1, 12 - width))
    # one answer at eps = 1.5: the same code with n coordinates and n times the epsilon
    many = pm.answer_cells(np.full(n, t), 1.5 * n, seed_tree(0, "many", str(t)))
    pm.cells.cache_clear()
    assert fit(np.bincount(many, minlength=12), law) > ALARM / 5
    assert wide * (2 * at - 11) / 12 @ law == pytest.approx(t, abs=1e-9)


def test_a_bound_between_two_floats_has_moments():
    "0.001 as a float32 is above 0.001, and a clipped vector holds it."
    m = Pm(bound=0.001, eps=1.0)
    bias, variance = m.moments(torch.full((2, 5), 7.0))
    assert float(bias.max()) == pytest.approx(0.001 - 7) and (variance > 0).all()
