"""Compressive sensing from its parts: coefficients, transform, reconstruction, sums.

What every mechanism must do is in test_conformance. Statistical tests have false-alarm rate
1e-6 and fixed seeds.
"""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import ALARM, drawn, radius
from scipy import optimize, stats
from tables import tabled

from dpcomm.core import wire
from dpcomm.core.chance import Insecure, seed_tree
from dpcomm.core.vectors import clip_l2
from dpcomm.mechanisms import compressive as cs
from dpcomm.mechanisms.compressive import Compressive
from dpcomm.mechanisms.distributed_noise import RING
from dpcomm.secagg.ring import overflow_probability

FASHION, MEDICAL = (1_663_370, 200), (1_496_601, 100)


def rows(n, d, *path):
    return seed_tree(0, "rows", n, d, *path).standard_normal((n, d))


def matrix(p):
    "The measurements as a (K, d) matrix."
    return cs.measure(np.eye(p.d), p).T


def make(**change):
    return Compressive(
        **(dict(fraction=0.4, clip_norm=1.0, sigma=1.0, n_clients=4, chunks=3) | change)
    )


# ---- which coefficients


@pytest.mark.parametrize(
    "model, rates",
    [
        (FASHION, (0.001, 0.005, 0.01, 0.05, 0.1)),
        (MEDICAL, (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1)),
    ],
)
def test_exactly_floor_of_r_d_coefficients_are_kept(model, rates):
    d, chunks = model
    for r in rates:
        p = cs.plan(d, r, chunks)
        assert len(p.kept) == math.floor(Fraction(str(r)) * d) == sum(p.counts)
        assert len(p.counts) == chunks and sum(p.lengths) == d
        assert (np.diff(p.kept) > 0).all() and p.kept[0] >= 0 and p.kept[-1] < d
        assert np.ptp(p.counts[:-1]) <= 1, "chunks of one length keep equally many"


def test_a_decimal_fraction_is_taken_as_written():
    "0.29 * 100 is 28.999999999999996 in floating point."
    assert (
        len(cs.plan(100, 0.29).kept) == 29
        and len(cs.plan(FASHION[0], 0.1, 200).kept) == 166_337
    )


@drawn
@given(
    d=st.integers(1, 300),
    chunks=st.integers(1, 300),
    r=st.floats(0.01, 1.0),
    kept=st.sampled_from(cs.KEPT),
)
def test_any_plan_adds_up(d, chunks, r, kept):
    if chunks > d or math.floor(Fraction(str(r)) * d) < 1:
        with pytest.raises(ValueError, match="chunks is|fraction is"):
            cs.plan(d, r, chunks, kept=kept)
        return
    p = cs.plan(d, r, chunks, kept=kept)
    assert isinstance(p, cs.Plan) and len(p.kept) == math.floor(
        Fraction(str(r)) * d
    ) == len(set(p.kept.tolist()))
    assert (
        (p.counts <= p.lengths).all()
        and sum(p.lengths) == d
        and len(p.lengths) <= chunks
    )
    assert set(p.lengths[:-1].tolist()) <= {p.length} and 1 <= p.lengths[-1] <= p.length


def test_fewer_than_one_coefficient_is_refused():
    with pytest.raises(ValueError, match="fraction is 0.004.*r d must be at least 1"):
        cs.plan(200, 0.004)
    with pytest.raises(ValueError, match="chunks is 6"):
        cs.plan(5, 0.5, 6)
    with pytest.raises(ValueError, match="fraction is"):
        make(fraction=0.1, chunks=1).sketch(torch.ones(1, 5))


def test_low_frequencies_are_the_first_of_every_chunk():
    p = cs.plan(30, 0.3, 3, kept="low")
    assert p.kept.tolist() == [0, 1, 2, 10, 11, 12, 20, 21, 22]


def test_the_random_choice_is_public_uniform_and_has_a_seed():
    assert np.array_equal(
        cs.plan(99, 0.2, 3, 7).kept, cs.plan.__wrapped__(99, 0.2, 3, 7).kept
    )
    others = [
        cs.plan(99, 0.2, 3, seed, t=t).kept.tolist()
        for seed, t in ((7, 0), (8, 0), (7, 1))
    ]
    assert others[0] != others[1] != others[2] != others[0]
    counts = sum(
        np.bincount(cs.plan(12, 0.25, seed=seed).kept, minlength=12)
        for seed in range(4000)
    )
    assert stats.chisquare(counts).pvalue > ALARM


def test_chunks_have_a_length_that_transforms_fast():
    assert [
        cs.largest_factors(n, n)[0] for n in (1, 2, 12, 97, 8317, 8320, 15_000)
    ] == [1, 2, 3, 97, 8317, 13, 5]
    assert [cs.chunk_length(*model) for model in (FASHION, MEDICAL)] == [8320, 15_000]
    assert (
        cs.chunk_length(7, 1) == 7
        and cs.chunk_length(7, 7) == 1
        and cs.chunk_length(7, 5) == 2
    )


# ---- transform and measurement


@tabled("d, length", [(1, 1), (5, 5), (12, 4), (13, 4), (7, 3)])
def test_the_transform_is_the_cosine_matrix_of_every_chunk(d, length):
    x, out = rows(3, d), []
    for i in range(0, d, length):
        n = min(length, d - i)
        k, j = np.mgrid[:n, :n]
        C = np.cos(np.pi * k * (2 * j + 1) / (2 * n)) * np.where(
            k > 0, math.sqrt(2 / n), math.sqrt(1 / n)
        )
        out.append(x[:, i : i + n] @ C.T)
    np.testing.assert_allclose(cs.transform(x, length), np.hstack(out), atol=1e-12)
    np.testing.assert_allclose(
        cs.transform(cs.transform(x, length), length, inverse=True), x, atol=1e-12
    )
    assert cs.transform(x.astype(np.float32), length).dtype == np.float32


@pytest.mark.parametrize("kept", cs.KEPT)
def test_measuring_has_orthonormal_rows(kept):
    p = cs.plan(101, 0.3, 7, kept=kept)
    A, x, y = matrix(p), rows(4, 101), rows(4, 30)
    np.testing.assert_allclose(A @ A.T, np.eye(30), atol=1e-12)
    np.testing.assert_allclose(cs.adjoint(y, p), y @ A, atol=1e-12)
    np.testing.assert_allclose(cs.measure(x, p), x @ A.T, atol=1e-12)
    np.testing.assert_allclose(cs.leverage(p), np.diag(A.T @ A), atol=1e-12)
    assert (np.linalg.norm(x @ A.T, axis=1) <= np.linalg.norm(x, axis=1)).all()


def test_all_coefficients_lose_nothing():
    m, u = make(fraction=1.0, sigma=None), torch.from_numpy(rows(2, 50)).float()
    torch.testing.assert_close(m.expand(m.sketch(u), 50), u, rtol=0, atol=1e-5)
    np.testing.assert_allclose(cs.leverage(m.plan(50)), 1, atol=1e-12)


# ---- the sketch


def test_a_sum_of_sketches_is_the_sketch_of_the_sum():
    m, u = make(sigma=None), torch.from_numpy(rows(5, 40)).float()
    torch.testing.assert_close(
        m.sketch(u).sum(0), m.sketch(u.sum(0, keepdim=True))[0], rtol=0, atol=1e-5
    )


def test_the_compressed_vector_is_clipped_not_the_update():
    """An update of norm 5 whose coefficients are inside the bound stays as it is; clip
    would have scaled it.
    """
    m, d = make(chunks=1), 60
    p = m.plan(d)
    lost = np.setdiff1d(np.arange(d), p.kept)[0]
    wide = np.zeros((2, d))
    wide[0, [lost, p.kept[0]]], wide[1, p.kept[1]] = (4.9, 0.9), 3.0
    u = torch.from_numpy(cs.transform(wide, p.length, inverse=True)).float()
    values = m.sketch(u)
    assert float(u[0].norm()) > 4.9 and float(m.clip(u)[0].norm()) == pytest.approx(1.0)
    assert values.norm(dim=1).tolist() == pytest.approx([0.9, 1.0], rel=1e-5)
    torch.testing.assert_close(
        m.sketch(m.clip(u)).norm(dim=1),
        torch.tensor([0.9 / math.hypot(4.9, 0.9), 1.0]),
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_cohort_is_transformed_in_blocks(monkeypatch):
    m, u = make(), torch.from_numpy(rows(7, 40)).float()
    whole = m.sketch(u)
    monkeypatch.setattr(cs, "BLOCK", 80)
    torch.testing.assert_close(m.sketch(u), whole, rtol=1e-6, atol=1e-7)
    assert m.sketch(u[:0]).shape == (0, 16)


# ---- reconstruction


def test_recover_solves_the_lasso():
    """The optimality conditions: A^T (y - A x) is at most lambda, and lambda times the
    sign where x is not zero.
    """
    p = cs.plan(90, 0.4, 2, seed=3)
    y = rows(1, 36, "lasso")[0]
    x = cs.recover(y, p, penalty=0.3, iterations=4000)
    slope = cs.adjoint((y - cs.measure(x[None], p)[0])[None], p)[0]
    for a, b in zip(p.edges, p.edges[1:]):
        top = 0.3 * np.abs(cs.adjoint(y[None], p)[0, a:b]).max()
        on = np.abs(x[a:b]) > 1e-6
        assert 3 <= on.sum() < b - a and (np.abs(slope[a:b]) <= top * (1 + 1e-6)).all()
        np.testing.assert_allclose(slope[a:b][on], top * np.sign(x[a:b][on]), rtol=1e-5)


def test_a_small_penalty_is_basis_pursuit():
    p, y = cs.plan(40, 0.5, seed=1), rows(1, 20, "pursuit")[0]
    A = matrix(p)
    best = optimize.linprog(
        np.ones(80), A_eq=np.hstack([A, -A]), b_eq=y, method="highs"
    )
    x = cs.recover(y, p, penalty=1e-6, iterations=3000)
    assert np.abs(x).sum() == pytest.approx(best.fun, rel=1e-4)
    np.testing.assert_allclose(A @ x, y, atol=1e-4)


def test_a_large_penalty_gives_zero_and_no_iteration_the_adjoint():
    p, y = cs.plan(40, 0.5, 2), rows(1, 20)[0]
    assert np.abs(cs.recover(y, p, penalty=1.0, iterations=3000)).max() < 1e-6
    np.testing.assert_array_equal(
        cs.recover(y, p, iterations=0), cs.adjoint(y[None], p)[0]
    )
    assert not cs.recover(0 * y, p).any() and 0 < cs.STEP < 1
    assert cs.recover(y.astype(np.float32), p).dtype == np.float32


def test_reconstruction_is_as_scale_free_as_its_penalty():
    p, y = cs.plan(60, 0.4, 2), rows(1, 24)[0]
    np.testing.assert_allclose(
        cs.recover(1000 * y, p), 1000 * cs.recover(y, p), rtol=1e-9, atol=1e-9
    )


def test_sparse_vectors_come_back_and_dense_ones_do_not():
    d, p = 1600, cs.plan(1600, 0.2, 4)
    rng, x = seed_tree(0, "sparse"), np.zeros((1, 1600))
    x[0, rng.choice(d, 24, replace=False)] = rng.standard_normal(24)

    def lost(x, **settings):
        return np.linalg.norm(
            cs.recover(cs.measure(x, p)[0], p, **settings) - x
        ) / np.linalg.norm(x)

    assert (
        lost(x, iterations=300, penalty=0.01)
        < 0.02
        < lost(x)
        < 0.2
        < 0.8
        < lost(x, iterations=0)
    )
    assert lost(rows(1, d), iterations=300) > 0.8


def test_chunks_without_a_coefficient_are_reconstructed_as_zero():
    m = make(fraction=0.05, chunks=8)
    p, y = m.plan(80), torch.tensor(rows(1, 4)[0]).float()
    x = m.reconstruct(y, 1.0, 80)
    empty = np.repeat(p.counts == 0, p.lengths)
    assert empty.sum() == 40 and not x.numpy()[empty].any() and x.numpy()[~empty].any()


# ---- the sum


def test_the_aggregate_and_the_reconstructed_sum_have_one_law():
    """Without iterations the server's answer is linear: mean and variance of both ways,
    every entry.
    """
    m, d, n = make(iterations=0, clip_norm=2.0, sigma=0.5, tolerance=0.25), 9, 2000
    u = torch.from_numpy(rows(4, d)).float()
    together = torch.stack(
        [m.aggregate(m.simulate(u, seed_tree(0, "one", i)), 5, None) for i in range(n)]
    ).double()
    summed = torch.stack(
        [
            m.reconstruct(
                m.sketch(u).sum(0) + m.noise(3, 4, seed_tree(0, "two", i)), 5, d
            )
            for i in range(n)
        ]
    ).double()
    seen = cs.leverage(m.plan(d)) > 1e-9
    assert (
        seen.sum() >= 7
        and float(together[:, ~seen].abs().amax() if (~seen).any() else 0) < 1e-6
    ), "what no coefficient sees has no noise"
    together, summed = together[:, seen], summed[:, seen]
    std = together.std(0).numpy()
    assert (
        abs((together.mean(0) - summed.mean(0)).numpy())
        <= math.sqrt(2) * radius(std, n, 2 * d)
    ).all()
    assert (
        abs(together.var(0) / summed.var(0) - 1).numpy()
        <= math.sqrt(2) * radius(math.sqrt(2), n, 2 * d)
    ).all()
    np.testing.assert_allclose(
        std**2, 4 * m.share**2 * cs.leverage(m.plan(d))[seen] / 25, rtol=0.25
    )


def test_the_reconstruction_reads_nothing_but_the_linear_mean():
    m, d = make(), 50
    estimates = m.simulate(torch.from_numpy(rows(4, d)).float(), seed_tree(0))
    mean = m.aggregate(estimates, 4, None)
    values = torch.from_numpy(cs.measure(estimates.numpy(), m.plan(d))).sum(0)
    direct = torch.from_numpy(
        cs.recover(
            cs.measure(mean.numpy()[None], m.plan(d))[0],
            m.plan(d),
            m.penalty,
            m.iterations,
        )
    )
    torch.testing.assert_close(m.reconstruct(values, 4, d), direct, rtol=0, atol=1e-5)


def test_ring_elements_add_up_to_the_noisy_sum():
    m, d = make(sigma=1e-3, n_clients=5), 200
    u = torch.from_numpy(rows(5, d)).float()
    payloads = [
        np.frombuffer(m.encode(row, Insecure(key)).payload, "<u4").astype(np.int64)
        for key, row in enumerate(u)
    ]
    total = RING.lift(RING.sum(payloads)) * m.scale
    error = total - m.sketch(u).double().sum(0).numpy()
    assert 0 < np.abs(error).max() < 1e-3 * stats.norm.isf(ALARM / 2 / 80) + 5 * m.scale
    assert np.linalg.norm(error) == pytest.approx(1e-3 * math.sqrt(80), rel=0.5)


@pytest.mark.parametrize(
    "model, n_clients, sigma, clip",
    [(FASHION, 100, 1.54, 0.26), (MEDICAL, 100, 1.49, 0.01)],
)
def test_the_papers_sums_fit_four_bytes(model, n_clients, sigma, clip):
    m = Compressive(0.1, clip, sigma, n_clients, chunks=model[1])
    assert (
        overflow_probability(
            32,
            m.scale,
            clip,
            n_clients,
            math.sqrt(n_clients) * m.share,
            int(0.1 * model[0]),
        )
        < 2**-40
    )
    assert m.share / m.scale > 1e6, (
        "a share is millions of steps, so that it is normal to the last bit of a float"
    )


def test_the_noise_of_a_sum_is_that_of_its_shares():
    m, n = make(clip_norm=3.0, sigma=2.0, n_clients=10, tolerance=0.2), 40_000
    z = m.noise(n, 7, seed_tree(0, "noise")).double().numpy()
    assert z.var() == pytest.approx(
        7 * 36 / 8, abs=radius(math.sqrt(2) * 7 * 36 / 8, n)
    )
    assert (
        abs(z.mean()) <= radius(z.std(), n)
        and not make(sigma=None).noise(5, 7, seed_tree(0)).any()
    )


# ---- rounds, twins, guarantee


def test_a_fresh_choice_each_round():
    m = make()
    assert m.fresh and m.at(0) == m and m.at(3).round == 3 and m.at(3).at(5) == m.at(5)
    assert not np.array_equal(m.at(3).plan(60).kept, m.plan(60).kept) and len(
        m.at(3).plan(60).kept
    ) == len(m.plan(60).kept)
    for fixed in (make(fresh=False), make(kept="low")):
        assert fixed.at(3) is fixed


def test_the_plain_twin_sends_floats():
    plain, u = make(sigma=None), torch.from_numpy(7 * rows(1, 40)[0]).float()
    assert torch.equal(
        plain.decode(plain.encode(u)), plain.simulate(u[None], seed_tree(0))[0]
    )
    assert (
        float(plain.sketch(u[None]).norm()) > 5 and not plain.moments(u[None])[1].any()
    )


def test_the_guarantee_is_the_gaussians_and_reproduces_the_papers_epsilon():
    m = Compressive(0.005, 0.26, 1.54, 100, chunks=200)
    g = m.guarantee(
        rounds=200,
        delta=1e-5,
        sampling="poisson",
        n_clients=6000,
        cohort=100,
        relation="add-remove",
    )
    assert (g.trust, g.relation, g.sampling) == (
        "central",
        "add-remove",
        "poisson",
    ) and g.eps == pytest.approx(1.0006, abs=1e-3)
    assert (
        dataclasses.replace(m, tolerance=0.3)
        .guarantee(
            rounds=200, delta=1e-5, sampling="poisson", n_clients=6000, cohort=100
        )
        .eps
        == g.eps
    )
    assert (
        m.guarantee(rounds=1, delta=1e-5, relation="replace").eps
        > m.guarantee(rounds=1, delta=1e-5, relation="zero-out").eps
    )


def test_four_bytes_a_value():
    m = Compressive(0.005, 0.26, 1.54, 100, chunks=200)
    assert m.bits(FASHION[0]).payload == 32 * 8316 and m.bits(
        FASHION[0]
    ).header == wire.header_bits("compressive")


def test_clipping_in_all_dimensions_is_the_plain_one():
    u = torch.from_numpy(rows(3, 20)).float()
    assert torch.equal(make().clip(u), clip_l2(u, 1.0))
