"""Rings and exact integer noise from their parts.

Statistical tests have false-alarm rate 1e-6, split over their comparisons, and fixed seeds.
"""

import ast
import decimal
import inspect
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from laws import ALARM, count_bounds, drawn, fit, radius
from tables import tabled

from dpcomm.core import vectors
from dpcomm.core.random import seed_tree
from dpcomm.secagg import discrete, ring
from dpcomm.secagg.discrete import discrete_gaussian
from dpcomm.secagg.ring import Overflow, Ring


def weights(sigma2, reach):
    z = np.arange(-reach, reach + 1)
    w = np.exp(-(z**2) / (2 * float(sigma2)))
    return z, w / w.sum()


# ---- the ring


@drawn
@given(
    some.integers(2, 62),
    some.lists(some.integers(-(2**62), 2**62 - 1), min_size=1, max_size=8),
)
def test_sums_are_pythons(bits, numbers):
    r, z = Ring(np.int64(bits)), np.array(numbers)
    assert r == Ring(bits) and r.modulus == 2**bits
    total = int(r.sum(z[:, None])[0])
    assert total == sum(numbers) % 2**bits
    assert [int(x) for x in r.wrap(z)] == [x % 2**bits for x in numbers]
    centred = (sum(numbers) + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
    lifted = r.lift(np.array([total]))
    assert lifted.tolist() == [centred] and lifted.dtype == np.int64


@tabled("bad", [np.array([0.5]), np.array([1.0]), np.array([2**63], np.uint64), ["a"]])
def test_only_whole_numbers_enter(bad):
    for call in (
        lambda: Ring(8).wrap(bad),
        lambda: Ring(8).lift(bad),
        lambda: ring.check_whole("z", bad),
        lambda: Ring(8).sum([bad]),
    ):
        with pytest.raises(ValueError, match="whole numbers"):
            call()


# ---- fixed-point exponentials and cumulative laws


@drawn
@given(some.fractions(0, 60, max_denominator=10**9), some.integers(1, 200))
def test_exponentials_are_right_to_one_unit(a, bits):
    "Against a series of fractions cut where it cannot matter."
    with decimal.localcontext(prec=140):
        exact = (decimal.Decimal(-a.numerator) / a.denominator).exp() * 2**bits
    assert abs(discrete.exp_fixed(a, bits) - exact) <= 1


@tabled("half", [False, True])
@tabled("sigma2", [Fraction(1, 100), Fraction(1, 3), Fraction(2), Fraction(10**4)])
def test_thresholds_are_the_first_bits_of_the_cumulative_law(sigma2, half):
    "Against sums of 60-digit decimals."
    law = discrete.thresholds((discrete.gaussian_weights, sigma2, half), 63)
    with decimal.localcontext(prec=60):
        reach = len(law[1]) + 50 * max(1, math.isqrt(int(sigma2)))
        scale = decimal.Decimal(2 * sigma2.numerator) / sigma2.denominator
        weight = [(-(k * k) / scale).exp() for k in range(reach)]
        terms = [w if half or k == 0 else 2 * w for k, w in enumerate(weight)]
        sums = [*itertools.accumulate(terms)]
        for t, total in zip(law[1], sums):
            assert t == min(int(total / sums[-1] * 2**63), 2**63 - 1)
    assert law[0] == 0 and law[1][-1] == 2**63 - 1


# ---- draws

CHOICES = [0.01, 0.2, Fraction(1, 3), 1, 2.5, 40, 3000.0]


@tabled("sigma2", CHOICES)
def test_draws_follow_the_law(sigma2):
    "Chi-square over all values; false-alarm rate 1e-6 each."
    n, reach = 60_000, int(8 * math.sqrt(sigma2)) + 2
    z, p = weights(sigma2, reach)
    values = discrete_gaussian(sigma2, n, seed_tree(0, "law"))
    assert values.dtype == np.int64 and np.abs(values).max() <= reach
    counts = np.bincount(values + reach, minlength=len(z))
    if sigma2 == 0.01:
        assert counts[reach] == n, "the others come up once in 10^21"
    else:
        assert fit(counts, p) > ALARM


@tabled("bits", [3, 5, 9])
@tabled("half", [False, True])
def test_short_prefixes_give_the_same_law(bits, half):
    "Most draws need further bits then; resolve decides them."
    n, sigma2, rng = 6000, Fraction(17, 5), seed_tree(0, "short", bits)
    z, p = weights(sigma2, 20)
    p = np.concatenate([p[20:21], p[21:] * (1 if half else 2)])
    law = discrete.gaussian_weights, sigma2, half
    words = rng.integers(2**bits, size=n, dtype=np.uint64)
    found = discrete.by_inversion(law, words, rng, bits)
    assert fit(np.bincount(found, minlength=21)[:21], p / p.sum()) > ALARM
    undecided = discrete.inversion_table(law, bits)[2] < 0
    assert undecided.mean() > 0.01, "nothing was left to decide"


@tabled("sigma2", [2**20, 2**20 + 0.5, 5e6, 1e8, 1e12, 2.0**70])
def test_wide_laws(sigma2):
    "Blocks against the normal law and, for the low bits, the uniform one."
    from scipy import stats

    n, sigma = 60_000, math.sqrt(sigma2)
    z = discrete_gaussian(sigma2, n, seed_tree(0, "wide"))
    spread = (z + seed_tree(0, "dither").random(n) - 0.5) / math.sqrt(sigma2 + 1 / 12)
    assert stats.kstest(spread, "norm").pvalue > ALARM / 3
    assert fit(np.bincount(z % 16, minlength=16), np.full(16, 1 / 16)) > ALARM / 3
    assert abs((z / sigma).mean()) < radius(1, n, 3)


def exact_exponents(x, y, shift, sigma2):
    "Exponent of the coin of each pair (block, place), as a fraction."
    squares = (int(b) * (int(b) + (int(a) << shift + 1)) for a, b in zip(x, y))
    return [Fraction(square) / (2 * sigma2) for square in squares]


def test_blocks_and_tables_draw_one_law(monkeypatch):
    "A narrow law by blocks of 4 and 16 numbers, where every coin matters, by exact coins."
    z, p = weights(50, 60)

    def slow(x, y, shift, sigma2, rng):
        exponents = exact_exponents(x, y, shift, sigma2)
        return np.array([discrete.exp_coin(t, rng) for t in exponents])

    monkeypatch.setattr(discrete, "accept_pairs", slow)
    for shift in (2, 4):
        rng = seed_tree(0, "blocks", shift)
        values = discrete._draw_batch(Fraction(50), shift, 30_000, rng)
        assert fit(np.bincount(values + 60, minlength=121), p) > ALARM


@tabled("shift", [1, 5, 12, 25, 34])
def test_the_shortcut_of_the_coins_is_exact(shift):
    "Against the fractions alone, from the same 32 bits."
    sigma2 = Fraction(700 * 2**shift) ** 2 + Fraction(1, 3)
    rng = seed_tree(0, "keep", shift)
    x, y = rng.integers(9000, size=4000), rng.integers(2**shift, size=4000)
    accepted = discrete.accept_pairs(x, y, shift, sigma2, seed_tree(1, "keep", shift))
    rng = seed_tree(1, "keep", shift)
    u = rng.integers(2**32, size=4000)
    t = exact_exponents(x, y, shift, sigma2)
    coins = [discrete.exp_coin(s, rng, int(v), 32) for s, v in zip(t, u)]
    assert accepted.tolist() == coins and not all(coins)
    expected, n = sum(math.exp(-float(s)) for s in t), len(t)
    assert abs(accepted.sum() - expected) <= radius(0.5, n) * n


SAMPLER = map(inspect.unwrap, filter(callable, vars(discrete).values()))
SAMPLER = [f for f in SAMPLER if getattr(f, "__module__", "") == discrete.__name__]


@tabled("function", SAMPLER, ids=lambda f: f.__name__)
def test_no_float_takes_part_in_a_draw(function):
    "The sampler names no float; of math and its stream it uses whole numbers only."
    nodes = list(ast.walk(ast.parse(inspect.getsource(function))))

    def members(module):
        attributes = (node for node in nodes if isinstance(node, ast.Attribute))
        return {a.attr for a in attributes if getattr(a.value, "id", None) == module}

    constants = (node.value for node in nodes if isinstance(node, ast.Constant))
    assert not [value for value in constants if isinstance(value, float)]
    assert members("math") <= {"ceil", "floor", "isqrt", "prod"}
    assert members("rng") <= {"integers"}


# ---- rotation and rounding


@tabled("d", [1, 2, 3, 4, 5, 6, 7])
def test_every_entry_of_a_rotated_vector_is_sub_gaussian(d, monkeypatch):
    "Moment-generating function of every entry of three vectors, over all signs there are."
    P = vectors.block_size(d)
    assert d / 2 < P <= d
    many = [*itertools.product((1.0, -1.0), repeat=P if P == d else 2 * P)]
    u = torch.from_numpy(seed_tree(0, "flat", d).standard_normal((3, d)))
    u[0] = torch.eye(d)[P % d]
    u[1, : d - P] = 0
    u /= u.norm(dim=1, keepdim=True)
    monkeypatch.setattr(vectors, "signs", lambda size, seed: torch.tensor(many[seed]))
    v = torch.stack([vectors.rotate(u, i) for i in range(len(many))])
    for t in (-3.0, 1.0, 10.0):
        assert (torch.exp(t * v).mean(0) <= math.exp(t**2 / (2 * P)) + 1e-12).all()
    assert (v.square().mean(0) <= 1 / P + 1e-12).all()
    back = [vectors.unrotate(row, i) for i, row in enumerate(v)]
    torch.testing.assert_close(torch.stack(back), u.expand_as(v))


def test_the_bound_of_rounding():
    root = math.exp(-0.5)
    expected = math.sqrt(100 + 16 + 10 + 4)
    assert ring.rounded_norm(10.0, 64, root) == pytest.approx(expected)
    assert ring.rounded_norm(10.0, 64, 0.0) == 18.0
    assert ring.rounded_norm(0.0, 4, 1e-300) == 2.0
    for bad in (-0.1, 1.0, 2.0, math.nan):
        with pytest.raises(ValueError, match="beta is"):
            ring.rounded_norm(1.0, 4, bad)


@tabled("beta", [0.1, math.exp(-0.5), 0.9])
def test_roundings_are_refused_no_more_often_than_beta(beta):
    "Vectors at the worst fractions, and ordinary ones; exact binomial bound."
    rng, n = seed_tree(0, "refused"), 4000
    for x in (
        np.full((n, 16), 3.5),
        np.full((n, 16), 0.1),
        np.tile(rng.uniform(-5, 5, (1, 16)), (n, 1)),
    ):
        z = ring.conditional_round(x, None, rng)
        bound = ring.rounded_norm(float(np.linalg.norm(x[0])), 16, beta)
        assert (ring.squared_length(z) > bound**2).sum() <= count_bounds(n, beta, 3)[1]
        kept = ring.conditional_round(x, bound, seed_tree(0, "kept"))
        assert (ring.squared_length(kept) <= bound**2).all()


def test_conditional_rounding_has_the_law_of_the_roundings_within_the_bound():
    x, up = np.array([0.2, -1.7, 3.0, 0.5]), np.array([0.2, 0.3, 0.0, 0.5])
    corners = np.array([*itertools.product((0, 1), repeat=4)])
    law = np.where(corners, up, 1 - up).prod(1)
    law *= ((np.floor(x) + corners) ** 2).sum(1) <= 13
    assert 0.05 < law.sum() < 0.95
    rows, rng = np.tile(x, (40_000, 1)), seed_tree(1, "kept")
    z = ring.conditional_round(rows, math.sqrt(13.5), rng) - np.floor(x)
    counts = np.bincount(z.astype(int) @ [8, 4, 2, 1], minlength=16)
    assert not counts[law == 0].any()
    assert fit(counts[law > 0], law[law > 0] / law.sum()) > ALARM


def test_rounding_row_by_row_and_in_vain(monkeypatch):
    x = seed_tree(0).uniform(-3, 3, (5, 8))
    streams = [seed_tree(4, i) for i in range(5)]
    block = ring.conditional_round(torch.from_numpy(x), 9.0, streams)
    for i in range(5):
        row = ring.conditional_round(x[i : i + 1], 9.0, seed_tree(4, i))
        assert np.array_equal(block[i : i + 1], row)
    with pytest.raises(ValueError, match="rng holds 4 streams for 5 rows"):
        ring.conditional_round(x, 9.0, streams[:4])
    with pytest.raises(
        ValueError, match="5 rows still .* after 1 roundings: clip x first"
    ):
        ring.conditional_round(x + 500, 1.0, seed_tree(0))
    monkeypatch.setattr(ring, "TRIES", 20)
    with pytest.raises(ValueError, match="5 rows still exceeded it after 20 roundings"):
        ring.conditional_round(np.full((5, 20), 0.5), 0.0, seed_tree(0, "vain"))


def test_lengths_are_whole_numbers():
    z = np.array([[3, -4], [2**30, 2**30]])
    assert ring.squared_length(z).tolist() == [25, 2**61]
    assert ring.squared_length(np.array([[2**31, 2**31]])).tolist() == [2**63]
    one = np.ones((2, 1000), np.int64)
    one[0, 7], one[1, 999] = 3_037_000_499, -(2**31)
    assert ring.squared_length(one).tolist() == [3_037_000_499**2 + 999, 2**62 + 999]
    with pytest.raises(Overflow, match="3037000500, and its square 64 bits"):
        ring.squared_length(np.array([[3_037_000_500, 0]]))


def test_rows_of_a_block_are_rotated_alike_and_by_their_seed():
    u = torch.from_numpy(seed_tree(0, "rows").standard_normal((4, 100))).float()
    v = vectors.rotate(u, 7)
    assert v.dtype == u.dtype and v.shape == u.shape
    torch.testing.assert_close(vectors.rotate(u[2], 7), v[2])
    assert not torch.allclose(vectors.rotate(u, 8), v)
    assert set(vectors.signs(64, 7).tolist()) == {-1.0, 1.0}
