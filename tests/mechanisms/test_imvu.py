"""I-MVU from its parts: closed form, information, divergences, coins, messages. What
every mechanism must do is in test_conformance.

Statistical tests have false-alarm rate 1e-6 and fixed seeds.
"""

import math
from types import SimpleNamespace

import numpy as np
import torch
from laws import ALARM, count_bounds, fit, radius
from scipy.special import expit, logsumexp
from tables import tabled

from dpcomm.core.random import seed_tree
from dpcomm.mechanisms import imvu, mvu
from dpcomm.mechanisms.imvu import (
    Imvu,
    closed_form,
    fisher,
    fisher_supremum,
    lemma2_bracket,
    pmf,
    rdp_exact,
    variance_bracket,
)
from dpcomm.privacy.accounting import ORDERS, gaussian_delta, rdp_gaussian


def thin(s):
    "Three symbols, the outer two of probabilities s and e s; private with eps = 1."
    w, row = 1 / (2 * s * (math.e - 1)), (math.e * s, 1 - (1 + math.e) * s, s)
    return mvu.Table(1.0, (0.5 - w, 0.5, 0.5 + w), (row, row[::-1]))


def random_table(*path, most=7):
    "Random rows of a few symbols, one the other backwards for every second number."
    rng, i = seed_tree(0, *path), path[-1]
    m = int(rng.integers(2, most))
    p = rng.dirichlet(np.ones(m) * rng.uniform(0.3, 3)) + 1e-4
    q = p[::-1] if i % 2 else rng.dirichlet(np.ones(m)) + 1e-4
    return rng, loose(p / p.sum(), q / q.sum())


def loose(*rows):
    "Rows as a table that nobody checked."
    return SimpleNamespace(
        alphabet=tuple(range(len(rows[0]))), rows=tuple(map(tuple, rows))
    )


def renyi(a, p, q):
    "Divergence of order a from two lists of probabilities."
    return float(logsumexp(a * np.log(p) + (1 - a) * np.log(q)) / (a - 1))


# ---- closed form


@tabled("eps", [1e-9, 1e-3, 1, 30.0, 700.0])
def test_the_closed_form_is_unbiased_private_and_as_informative_as_privacy_allows(eps):
    p, (low, high), M = closed_form(eps)
    assert low < 0 < 1 <= high and M == eps**2
    for x in (0.0, 1.0):
        mean, close = low * p(1 - x) + high * p(x), 1e-15 * (high - low)
        assert math.isclose(mean, x, rel_tol=1e-9, abs_tol=close)
    assert math.isclose(np.log(p(1.0)) - np.log(p(0.0)), eps, rel_tol=1e-6)
    assert p(np.array([[0.5, 0.5]])).tolist() == [[0.5, 0.5]]


@tabled("eps", [0.1, 1.0, 8.0])
@tabled("bits", [1, 4])
def test_the_solver_finds_the_closed_form_for_every_budget(eps, bits):
    table, x = mvu.solve(eps, n_inputs=2, n_outputs=2**bits), np.linspace(-2, 3, 11)
    p, alphabet, M = closed_form(eps)
    np.testing.assert_allclose(table.alphabet, alphabet, rtol=1e-9)
    want = np.stack([1 - p(x), p(x)], 1)
    np.testing.assert_allclose(pmf(x, table), want, rtol=1e-8, atol=1e-14)
    assert math.isclose(fisher_supremum(table), M, rel_tol=1e-6)


# ---- information


@tabled("i", range(20))
def test_information_is_the_mean_square_of_the_score(i):
    rng, table = random_table("score", i)
    x, h = rng.uniform(-2, 3), 1e-5
    score = (np.log(pmf(x + h, table)) - np.log(pmf(x - h, table))) / (2 * h)
    assert math.isclose(pmf(x, table) @ score**2, fisher(x, table), rel_tol=1e-5)


@tabled("i", range(24))
def test_the_supremum_is_certified(i):
    "At least every value on a fine grid, at most a trifle more; brackets hold what is larger."
    _, table = random_table("supremum", i, most=9)
    x = np.linspace(-40, 41, 40_001)
    values, M = fisher(x, table), fisher_supremum.__wrapped__(table)
    assert values.max() <= M <= values.max() * (1 + 1e-4)
    brackets = [f(table) for f in (variance_bracket, lemma2_bracket)[: 1 + i % 2]]
    for low, high in brackets:
        outside = values[(x < low) | (x > high)].max(initial=0)
        assert low <= 0.5 <= high and outside <= fisher(0.5, table) * (1 + 1e-9)
    if i % 2:
        (low, high), (wide_low, wide_high) = brackets
        assert wide_low <= low + 1e-9 and high <= wide_high + 1e-9
        other = fisher_supremum.__wrapped__(table, lemma2_bracket)
        assert math.isclose(M, other, rel_tol=1e-6)


def test_the_maximum_of_thin_tables_is_outside_the_box():
    table = thin(0.001)
    inside = fisher(np.linspace(0, 1, 999), table).max()
    assert inside < 0.01 < 0.25 < fisher_supremum(table) < 0.2501
    assert renyi(13.0, *pmf([1.0, 0.0], table)) > 20 * 13 / 2 * inside


def test_ties_of_the_extreme_ratio_are_one_symbol():
    top = fisher_supremum.__wrapped__
    split = loose([0.5, 0.1, 0.1, 0.1, 0.2], [0.2, 0.1, 0.1, 0.25, 0.35])
    merged = loose([0.5, 0.2, 0.3], [0.2, 0.2, 0.6])
    tied = loose([0.3, 0.2, 0.3, 0.12, 0.08], [0.12, 0.08, 0.3, 0.3, 0.2])
    lumped = loose([0.5, 0.3, 0.2], [0.2, 0.3, 0.5])
    assert math.isclose(top(tied), top(lumped), rel_tol=1e-6)
    assert top(split) > top(merged) > 0


# ---- divergences


@tabled("i", range(20))
def test_the_fisher_bound_holds_over_all_reals_and_for_every_table(i):
    rng, table = random_table("bound", i)
    M = fisher_supremum.__wrapped__(table)
    for _ in range(30):
        (x, y), a = rng.uniform(-1, 2, 2), 1 + 10 ** rng.uniform(-1.5, 1.5)
        bound = a / 2 * M * (x - y) ** 2
        assert renyi(a, pmf(x, table), pmf(y, table)) <= bound * (1 + 1e-7) + 1e-12


def coin_divergence(a, x, y):
    "Divergence between vectors of coins with log-odds x and y, coordinate by coordinate."
    p, q = (np.log(expit([z, np.negative(z)])) for z in (x, y))
    return float((logsumexp(a * p + (1 - a) * q, axis=0) / (a - 1)).sum())


@tabled("relation", imvu.RELATIONS)
@tabled("i", range(40))
def test_no_pair_of_the_ball_is_farther_than_the_even_one(relation, i):
    rng, swap = seed_tree(0, "worst", relation, i), relation == "replace"
    d, a = int(rng.integers(1, 9)), 1 + 10 ** rng.uniform(-1, 1.5)
    kappa = 10 ** rng.uniform(-1, 1)
    exact, even = rdp_exact(a, kappa, relation, d), np.full(d, kappa / d**0.5)

    def apart(x, y):
        return max(coin_divergence(a, x, y), coin_divergence(a, y, x))

    assert math.isclose(apart(even, -even if swap else 0 * even), exact, rel_tol=1e-7)
    for _ in range(20):
        noise, part = kappa * rng.standard_normal((2, d)), rng.uniform(size=3)
        x = even + 1.5 * part[0] * noise[0]
        y = swap * ((1.4 * part[1] - 1.2) * x + 0.7 * part[2] * noise[1])
        x, y = (v * min(1, kappa / max(np.linalg.norm(v), 1e-300)) for v in (x, y))
        assert apart(x, y) <= exact * (1 + 1e-9) + 1e-12


@tabled("relation, factor", [("zero-out", 1), ("replace", 4)])
def test_more_dimensions_leak_more_up_to_the_gaussian(relation, factor):
    dims, orders = (1, 2, 3, 10, 1000, 10**6, 10**12), ORDERS[::7]
    curves = np.array([rdp_exact(orders, 1.3, relation, d) for d in dims])
    limit = factor * rdp_gaussian(orders, 2 / 1.3)
    assert (np.diff(curves, axis=0) >= -1e-12).all() and (curves <= limit).all()
    np.testing.assert_allclose(rdp_exact(orders, 1.3, relation), limit, rtol=1e-12)
    np.testing.assert_allclose(curves[-1], limit, rtol=1e-3)


# ---- coins


@tabled("p", [0.5, 1 / 3, 2.0**-16, 1e-5, 1 - 2.0**-16, 1 - 1e-5])
def test_coins_come_up_as_often_as_they_should(p):
    "Probabilities on the edge of a cell of the first sixteen bits, and far below it."
    n, z = 2_000_000, math.log(p) - math.log1p(-p)
    odds = torch.full((n,), z, dtype=torch.float64)
    low, high = count_bounds(n, p, 6)
    assert low <= int(imvu.coins(odds, seed_tree(0, "coins", str(p))).sum()) <= high


class Cells:
    "A stream whose sixteen-bit numbers all lie in one cell."

    def __init__(self, cell):
        self.cell, self.fine = cell, seed_tree(0, "cell", cell)

    def integers(self, top, size, dtype):
        return np.full(size, self.cell * (1 + 2**16 + 2**32 + 2**48), dtype)

    def random(self, shape):
        return self.fine.random(shape)


@tabled("cell", [0, 1, 1000, 2**15, 2**16 - 2, 2**16 - 1])
@tabled("part", [0.0, 0.04, 0.3, 0.97, 1.0])
def test_coins_whose_first_bits_do_not_decide_are_exact(cell, part):
    "All uniforms in one cell, the probability at a known point of it."
    p, n = (cell + part) / 2**16, 20_000
    z = math.log(p) - math.log1p(-p) if 0 < p < 1 else math.copysign(800.0, p - 0.5)
    heads = imvu.coins(torch.full((n,), z, dtype=torch.float64), Cells(cell)).mean()
    assert abs(heads - part) <= radius(math.sqrt(part * (1 - part)), n, 30) + 1e-6


def test_the_single_precision_sigmoid_stays_inside_the_margin():
    z = seed_tree(0, "z").uniform(-40, 40, 1_000_000)
    z = torch.from_numpy(np.r_[z, np.linspace(-1e-3, 1e-3, 1001), 500.0, -500.0])
    off = z.float().sigmoid().numpy() - expit(z.numpy())
    assert np.abs(2.0**16 * off).max() < 0.05


def test_symbols_of_a_table_follow_its_law():
    m, u, n = Imvu(1.0, 1.0, 3.0, thin(0.15)), torch.tensor([[0.5, -0.2, 0.0]]), 30_000
    symbols = m.draw_symbols(u.expand(n, 3), seed_tree(0, "symbols"))
    drawn, law = (
        np.concatenate(list(symbols)),
        pmf(0.5 + 3.0 * u[0].numpy() / 2, m.table),
    )
    found = m.log_pmf(m.logits(u))[0].exp().numpy()
    np.testing.assert_allclose(found, law, rtol=1e-6)
    for column, p in zip(drawn.T, law):
        assert fit(np.bincount(column, minlength=3), p) > ALARM / 3


# ---- the mechanism

COIN, CLAMPED = Imvu(1.0, 0.5, 4.0), Imvu(1.0, 0.5, 4.0, clamp=True)
TABLE = Imvu(1.0, 1.0, 2.0, thin(0.2))


@tabled("clamp", [False, True])
def test_the_tilt_is_the_mean_sign(clamp):
    m = Imvu(2.0, 1.5, beta=5.0, clamp=clamp)
    u = torch.from_numpy(np.linspace(-1.9, 1.9, 39)[:, None])
    mean = m.moments(u)[0] + u
    torch.testing.assert_close(m.step * m.mean_sign(u), mean, rtol=1e-9, atol=1e-12)
    for dtype in (np.float32, np.float64):
        found = m.mean_sign(u.numpy().astype(dtype))
        assert found.dtype == dtype and found.shape == (39, 1)
        np.testing.assert_allclose(found, m.mean_sign(u), rtol=1e-5)
    assert m.mean_sign(u.float()).dtype == torch.float32
    assert m.mean_sign(np.empty(0)).shape == (0,)
    top = math.tanh(0.75) if clamp else math.tanh(7.5 * 1.9 / 4)
    assert math.isclose(float(m.mean_sign(u).max()), top, rel_tol=1e-12)
    if not clamp:  # it is defined for every real number
        assert math.isclose(m.mean_sign(np.array([900.0]))[0], 1.0)


def test_privacy_depends_on_the_product_of_eps_and_beta():
    twins = [Imvu(1.0, e, b) for e, b in ((1.0, 32.0), (0.5, 64.0), (0.25, 128.0))]
    u, run = torch.from_numpy(seed_tree(0).standard_normal((5, 50))), (3, 1e-5)
    for accountant in ("fisher-balle", "exact-classic"):
        names = dict(accountant=accountant, d=7)
        assert len({m.guarantee(*run, **names).eps for m in twins}) == 1
    drawn = [np.stack([*m.draw_symbols(u, seed_tree(1))]) for m in twins]
    assert (drawn[0] == drawn[1]).all() and (drawn[0] == drawn[2]).all()
    assert len({m.step for m in twins}) == 3


# ---- guarantees


@tabled("relation", imvu.RELATIONS)
def test_the_accountants_keep_their_order(relation):
    def eps(accountant, d=None, relation=relation):
        names = dict(relation=relation, accountant=accountant, d=d)
        return Imvu(1.0, 0.5, 2.0).guarantee(20, 1e-5, **names).eps

    assert eps("exact-balle", 1) < eps("exact-balle", 100) <= eps("exact-balle")
    assert eps("exact-balle") == eps("fisher-balle") < eps("fisher-classic")
    if relation == "zero-out":
        assert eps("fisher-balle") < eps("fisher-balle", relation="replace")
        assert eps("fisher-balle") < eps("pld")
        assert gaussian_delta(math.sqrt(8 / math.pi), eps("pld"), 20) <= 1e-5
