"""Compressive sensing from its parts: coefficients, transform, reconstruction, sums.

What every mechanism must do is in test_conformance. Statistical tests have false-alarm rate
1e-6 and fixed seeds.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import drawn
from tables import tabled

from dpcomm.core.random import seed_tree
from dpcomm.mechanisms import compressive as cs
from dpcomm.mechanisms.compressive import Compressive


def rows(n, d, *path):
    return seed_tree(0, "rows", n, d, *path).standard_normal((n, d))


def make(**change):
    base = dict(fraction=0.4, clip_norm=1.0, sigma=1.0, n_clients=4, chunks=3)
    return Compressive(**(base | change))


# ---- which coefficients


@drawn
@given(
    d=st.integers(1, 300),
    chunks=st.integers(1, 300),
    r=st.floats(0.01, 1.0),
    kept=st.sampled_from(cs.KEPT),
)
def test_any_plan_adds_up(d, chunks, r, kept):
    count = math.floor(r * d * (1 + 1e-12))
    if chunks > d or count < 1:
        with pytest.raises(ValueError, match="chunks is|fraction is"):
            cs.plan(d, r, chunks, kept=kept)
        return
    p = cs.plan(d, r, chunks, kept=kept)
    assert len(p.kept) == count == len(set(p.kept.tolist()))
    assert (p.counts <= p.lengths).all() and sum(p.lengths) == d
    assert len(p.lengths) <= chunks and 1 <= p.lengths[-1] <= p.length
    assert set(p.lengths[:-1].tolist()) <= {p.length}
    low = cs.plan(30, 0.3, 3, kept="low").kept.tolist()
    assert low == [0, 1, 2, 10, 11, 12, 20, 21, 22], "the first of every chunk"


# ---- transform and measurement


@tabled("d, length", [(1, 1), (5, 5), (12, 4), (13, 4), (7, 3)])
def test_the_transform_is_the_cosine_matrix_of_every_chunk(d, length):
    x, out = rows(3, d), []
    for i in range(0, d, length):
        n = min(length, d - i)
        k, j = np.mgrid[:n, :n]
        size = np.where(k > 0, math.sqrt(2 / n), math.sqrt(1 / n))
        C = np.cos(np.pi * k * (2 * j + 1) / (2 * n)) * size
        out.append(x[:, i : i + n] @ C.T)
    there = cs.transform(x, length)
    np.testing.assert_allclose(there, np.hstack(out), atol=1e-12)
    np.testing.assert_allclose(cs.transform(there, length, inverse=True), x, atol=1e-12)
    assert cs.transform(x.astype(np.float32), length).dtype == np.float32


# ---- reconstruction


def test_recover_solves_the_lasso():
    "A^T (y - A x) is at most lambda, and lambda times the sign where x is not zero."
    p, y = cs.plan(90, 0.4, 2, seed=3), rows(1, 36, "lasso")
    x = cs.recover(y[0], p, penalty=0.3, iterations=4000)
    slope, start = cs.adjoint(y - cs.measure(x[None], p), p)[0], cs.adjoint(y, p)[0]
    for part in map(slice, p.edges, p.edges[1:]):
        top, on = 0.3 * np.abs(start[part]).max(), np.abs(x[part]) > 1e-6
        assert 3 <= on.sum() < len(on)
        assert (np.abs(slope[part]) <= top * (1 + 1e-6)).all()
        want = top * np.sign(x[part][on])
        np.testing.assert_allclose(slope[part][on], want, rtol=1e-5)


def test_a_large_penalty_gives_zero_and_no_iteration_the_adjoint():
    p, y = cs.plan(40, 0.5, 2), rows(1, 20)[0]
    assert np.abs(cs.recover(y, p, penalty=1.0, iterations=3000)).max() < 1e-6
    nothing = cs.recover(y, p, iterations=0)
    np.testing.assert_array_equal(nothing, cs.adjoint(y[None], p)[0])
    assert not cs.recover(0 * y, p).any() and 0 < cs.STEP < 1
    assert cs.recover(y.astype(np.float32), p).dtype == np.float32
    # it is as scale-free as its penalty
    np.testing.assert_allclose(
        cs.recover(1000 * y, p), 1000 * cs.recover(y, p), rtol=1e-9
    )


def test_chunks_without_a_coefficient_are_reconstructed_as_zero():
    m = make(fraction=0.05, chunks=8)
    p, y = m.plan(80), torch.tensor(rows(1, 4)[0]).float()
    x = m.reconstruct(y, 1.0, 80)
    empty = np.repeat(p.counts == 0, p.lengths)
    assert empty.sum() == 40 and not x.numpy()[empty].any() and x.numpy()[~empty].any()
