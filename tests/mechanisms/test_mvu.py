"""MVU from its parts: tables, program, certificate, laws, guarantees. What every
mechanism must do is in test_conformance.

Statistical tests have false-alarm rate 1e-6 and fixed seeds.
"""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from tables import tabled

from dpcomm.core.random import Insecure, seed_tree
from dpcomm.mechanisms import mvu, mvu_table
from dpcomm.mechanisms.mvu import Mvu, law, renyi_curve
from dpcomm.mechanisms.mvu_table import Table, relaxed, solve, two_symbols
from dpcomm.privacy import audit

SMALL = [(2.0, 3, 4, "strict"), (2.0, 3, 4, "metric")]
small = tabled("problem", [*SMALL, (1.0, 5, 4, "strict"), (4.0, 5, 4, "metric")])


def textbook(eps, alphabet, n, constraint):
    "Least mean variance for an alphabet: every pair of inputs spelled out, nothing scaled."
    a, m, x = np.array(alphabet), len(alphabet), np.linspace(0, 1, n)
    rows = []
    for (i, k), j in itertools.product(itertools.permutations(range(n), 2), range(m)):
        row, apart = np.zeros((n, m)), abs(x[i] - x[k]) if constraint == "metric" else 1
        row[i, j], row[k, j] = 1.0, -math.exp(eps * apart)
        rows.append(row.ravel())
    equal = np.vstack([np.kron(np.eye(n), np.ones(m)), np.kron(np.eye(n), a)])
    cost, sums = np.tile(a**2, n), np.concatenate([np.ones(n), x])
    found = linprog(cost, np.array(rows), np.zeros(len(rows)), equal, sums)
    return found.fun / n - (x**2).mean() if found.status == 0 else math.inf


def verify(table):
    "What a table promises, computed another way than the table does."
    p, x = np.array(table.rows), table.inputs
    assert np.abs(p.sum(1) - 1).max() < 1e-12
    assert np.abs(p @ np.array(table.alphabet) - x).max() < 1e-10
    assert p.max(0).min() >= mvu_table.FLOOR
    assert list(table.alphabet) == sorted(table.alphabet)
    for i, k in itertools.permutations(range(len(p)), 2):
        bound = table.eps * (abs(x[i] - x[k]) if table.constraint == "metric" else 1)
        assert (np.log(p[i]) - np.log(p[k])).max() <= bound + 1e-9


# ---- tables

GOOD = dict(eps=math.log(3), alphabet=(-0.5, 1.5), rows=((0.75, 0.25), (0.25, 0.75)))
MANY = np.exp(np.linspace(0, 1, 257)) / np.exp(np.linspace(0, 1, 257)).sum()
STEPS = np.linspace(-0.5, 0.5, 257) / (MANY @ np.linspace(-1, 1, 257))


@tabled(
    "change",
    [
        dict(alphabet=(-0.5, -0.5)),
        dict(eps=1.09),
        dict(alphabet=(-0.5, 1.5 + 1e-8)),
        dict(rows=((0.75, 0.25), (0.25, 0.75 + 1e-9))),
        dict(rows=((1.0, 0.0), (0.0, 1.0)), alphabet=(0.0, 1.0)),
        dict(rows=((0.75, 0.25),)),
        dict(alphabet=tuple(0.5 + STEPS), rows=(tuple(MANY[::-1]), tuple(MANY))),
    ],
)
def test_a_table_that_is_not_one_is_refused(change):
    with pytest.raises(ValueError):
        Table(**GOOD | change)


@tabled("constraint", mvu_table.CONSTRAINTS)
@tabled("eps", [1e-5, 1.0, 700.0])
def test_two_symbols_are_a_table_for_any_number_of_inputs(eps, constraint):
    for n in (2, 17, 512):
        table = two_symbols(eps, n, constraint)
        assert table == solve(eps, n, 2, constraint)
        logs = np.log(table.rows)
        whole, step = np.ptp(logs, axis=0).max(), np.abs(np.diff(logs, axis=0)).max()
        reached = step * (n - 1) if constraint == "metric" else whole
        assert reached == pytest.approx(eps, rel=1e-6), "the bound is reached"
    if eps < 100:
        low = -1 / math.expm1(eps)
        assert two_symbols(eps).alphabet == pytest.approx((low, 1 - low))
    verify(two_symbols(eps, 5, constraint))


# ---- the program and its certificate


@small
def test_solved_tables_keep_their_promise_and_beat_two_symbols(problem):
    table, (eps, n, m, constraint) = solve(*problem), problem
    verify(table)
    least, two = relaxed(eps, n, constraint)[2], two_symbols(eps, n, constraint)
    assert least <= table.variance < 0.99 * two.variance
    # the best table of its alphabet; three inputs need no more than four symbols
    best = textbook(eps, table.alphabet, n, constraint)
    assert best == pytest.approx(table.variance, rel=1e-4)
    assert n > 3 or table.variance <= least * 1.001
    assert len(table.alphabet) <= m


@small
def test_no_small_change_of_the_alphabet_helps(problem):
    table, (eps, n, _, constraint) = solve(*problem), problem
    rng, alphabet = seed_tree(0, "change", n), np.array(table.alphabet)
    for size in (1e-3, 1e-2, 0.1):
        changed = alphabet + size * rng.standard_normal((6, len(alphabet)))
        best = min(textbook(eps, np.sort(a), n, constraint) for a in changed)
        assert best > table.variance * (1 - 1e-5)


@tabled("constraint", mvu_table.CONSTRAINTS)
def test_the_certificate_lies_below_every_private_table(constraint):
    "Alphabets drawn at random."
    least, rng = relaxed(1.5, 4, constraint)[2], seed_tree(0, "tables")
    alphabets = [np.sort([-1.2, 2.2, *rng.uniform(-1, 2, 9)]) for _ in range(15)]
    values = [textbook(1.5, alphabet, 4, constraint) for alphabet in alphabets]
    assert least < min(values) < math.inf


@tabled("constraint", mvu_table.CONSTRAINTS)
@tabled("eps, variance", [(0.05, 400.0), (700.0, 0.0)])
def test_the_solver_holds_at_both_ends(eps, variance, constraint):
    table = solve(eps, 3, 4, constraint)
    verify(table)
    assert table.variance == pytest.approx(variance, rel=0.03, abs=1e-6)
    assert table.variance <= two_symbols(eps, 3, constraint).variance


# ---- laws and messages


TWO = Mvu(2.0, eps=1.5, beta=3.0)
FOUR = Mvu(2.0, eps=2.0, n_inputs=3, n_outputs=4, beta=1.5)
FIVE = Mvu(1.0, eps=1.0, n_inputs=5, n_outputs=4)


def test_blocks_change_nothing(monkeypatch):
    u = torch.from_numpy(seed_tree(0, "rows").standard_normal((5, 33), dtype="f4"))

    def draw(m):
        rows = m.simulate(u, [seed_tree(i) for i in range(5)])
        whole = torch.stack([m.simulate(u, seed_tree(1)), rows])
        return whole, m.encode(u[0], Insecure(3)).payload

    whole = [draw(m) for m in (TWO, FIVE)]
    monkeypatch.setattr(mvu, "BLOCK", 7)
    for (rows, sent), m in zip(whole, (TWO, FIVE)):
        again, data = draw(m)
        assert torch.equal(rows, again) and sent == data


# ---- guarantees


def divergence(p, q, alpha):
    return np.log((p**alpha * q ** (1 - alpha)).sum(-1)) / (alpha - 1)


TINY = Mvu(1.0, eps=0.05, n_inputs=3, n_outputs=4)
METRIC = Mvu(1.0, eps=4.0, n_inputs=5, n_outputs=4, constraint="metric", beta=0.8)
ODD = Mvu(1.0, eps=3.0, n_inputs=4, beta=3.0)


@tabled("m", [TWO, FOUR, FIVE, TINY, METRIC, ODD])
@tabled("relation", ["zero-out", "replace"])
def test_one_coordinate_spends_what_the_curve_says(m, relation):
    "All pairs of a fine grid; the page tries vectors."
    orders, half = (1.2, 2.0, 7.5, 60.0, 3000.0), min(1.0, m.beta) / 2
    x = np.linspace(0.5 - half, 0.5 + half, 401)
    p = law(m.table, x)[:, None]
    q = law(m.table, x if relation == "replace" else np.array([0.5]))
    curve = functools.partial(renyi_curve, m, relation, "mixture", orders=orders)
    one, most = curve(1), curve(None)
    for alpha, bound, any_d in zip(orders, one, most):
        with np.errstate(all="ignore"):
            found = [divergence(*ab, alpha) for ab in ((p, q), (q, p))]
        best = np.max(found, where=np.isfinite(found), initial=0)
        assert best <= bound * (1 + 1e-7) + 1e-12 and bound <= any_d * (1 + 1e-7)
        if alpha < 100 and (relation == "zero-out" or m.n_outputs == 2):
            assert best >= 0.999 * bound


def test_small_signals_cost_their_fisher_information():
    "For two symbols 1 / w^2, reached by dense vectors where beta is small: alpha J R^2 / 2."
    m, orders, d = Mvu(1.0, eps=1.0, beta=0.05), (1.5, 2.0, 4.0), 10_000
    limit = np.array(orders) / 2 * 4 * math.tanh(0.5) ** 2 * 0.025**2
    p, q = law(m.table, 0.5 + 0.025 / math.sqrt(d)), law(m.table, 0.5)
    for dim, wanted in ((None, limit), (d, [d * divergence(p, q, a) for a in orders])):
        found = renyi_curve(m, "zero-out", "mixture", dim, orders=orders)
        np.testing.assert_allclose(found, wanted, rtol=5e-3)


@tabled("d, total", [(1, 0.3), (3, 0.9), (4, 1.0), (7, 20.0)])
def test_the_ball_is_a_concave_envelope(d, total):
    "Against a linear program over mixtures of nodes; without d, against many coordinates."
    rng = seed_tree(0, "nodes", d)
    s, g = (np.append(0, np.sort(rng.random(12))) for _ in range(2))
    mix = linprog(-g, s[None], [total / d], np.ones((1, 13)), [1.0])
    assert mvu._ball(s, g, total, d) == pytest.approx(-d * mix.fun, rel=1e-9)
    many = mvu._ball(s, g, total, 10**6)
    assert mvu._ball(s, g, total, None) == pytest.approx(many, rel=1e-9)
    assert mvu._ball(np.array([0.0, 1.0]), np.array([0.1, 0.2]), 1.0, None) == math.inf


@tabled(
    "m, relation",
    [(FIVE, "replace"), (FIVE, "zero-out"), (ODD, "zero-out"), (METRIC, "replace")],
)
def test_the_knapsack_covers_all_pairs_of_rows(m, relation):
    p, n, half = np.array(m.table.rows), m.n_inputs - 1, min(1.0, m.beta) / 2
    ends = math.floor((0.5 - half) * n), math.ceil((0.5 + half) * n) + 1
    inside = range(max(0, ends[0]), min(n + 1, ends[1]))
    base = inside if relation == "replace" else sorted({n // 2, (n + 1) // 2})
    ((s, g),) = mvu._grid(m.table, m.beta, relation, np.array([3.0]))
    exact = np.zeros(len(s))
    for i, k in itertools.product(inside, base):
        both = divergence(p[i], p[k], 3.0), divergence(p[k], p[i], 3.0)
        exact[abs(i - k)] = max(exact[abs(i - k)], *both)
    np.testing.assert_allclose(g, np.maximum.accumulate(exact), atol=1e-12)
    np.testing.assert_allclose(s, (np.arange(len(s)) / n) ** 2)


@tabled("m", [Mvu(1.0, 2.0, beta=2.0), Mvu(1.0, 1.0, n_inputs=3, n_outputs=4)])
@tabled("relation", ["zero-out", "replace"])
def test_claims_cover_the_enumerated_epsilon(m, relation):
    run = dict(rounds=1, delta=1e-3, relation=relation, d=4)
    eps = {how: m.guarantee(**run, accountant=how).eps for how in mvu.ACCOUNTANTS}
    assert eps["mixture-balle"] <= eps["mixture-classic"] <= eps["grid-classic"]
    for v in (np.eye(4)[0], np.ones(4) / 2, np.array([1, 1, 0, 0]) / math.sqrt(2)):
        worlds = []
        for sign in (1, -(relation == "replace")):
            laws = law(m.table, (0.5 + sign * m.beta / 2 * v).clip(0, 1))
            worlds.append(functools.reduce(np.multiply.outer, laws).ravel())
        assert max(audit.enumerated_eps(*worlds, 1e-3)) <= min(eps.values())
        assert max(audit.enumerated_eps(*worlds, 0.0)) <= eps["pure"] * (1 + 1e-9)


# ---- what the grid's accountant pays


@tabled("rounds", [1, 2, 50])
def test_delta_pays_for_the_dithering_of_every_round(rounds, monkeypatch):
    "What is set aside for each round, and what is left for the curve, add up to delta."
    paid = {}

    def curve(mechanism, relation, how, d, slip, orders):
        return paid.update(slip=slip) or np.ones(len(orders))

    def convert(orders, curve, delta, *rest, **names):
        return paid.update(left=delta) or exact(orders, curve, delta, *rest, **names)

    exact = mvu.guarantee_from_rdp
    monkeypatch.setattr(mvu, "renyi_curve", curve)
    monkeypatch.setattr(mvu, "guarantee_from_rdp", convert)
    FIVE.guarantee(rounds=rounds, delta=1e-5, accountant="grid-balle", d=100)
    assert rounds * paid["slip"] + paid["left"] == pytest.approx(1e-5, rel=1e-12)


@tabled("constraint", mvu_table.CONSTRAINTS)
def test_the_reach_is_taken_over_the_cones_extreme_rays(constraint):
    eps, n, strict = 1.3, 6, constraint == "strict"
    signs = np.array(list(itertools.product((0, 1), repeat=n if strict else n - 1)))
    steps = (2 * signs - 1) * eps / (n - 1)
    walks = np.cumsum(np.c_[np.zeros(len(signs)), steps], 1)
    rays = np.exp(eps * signs) if strict else np.exp(walks)
    for mu in seed_tree(0, "mu").standard_normal((5, n)):
        reach = np.abs(rays @ mu / rays.sum(1)).max() / 2
        found = mvu_table._dual_reach(eps, mu, constraint)
        assert found == pytest.approx(reach, rel=1e-6)
