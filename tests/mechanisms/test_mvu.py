"""MVU from its parts: tables, program, certificate, cache, laws, guarantees. What every
mechanism must do is in test_conformance.

Statistical tests have false-alarm rate 1e-6 and fixed seeds.
"""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
import torch
from laws import ALARM, fit, radius
from scipy.optimize import linprog
from tables import tabled

from dpcomm.core import wire
from dpcomm.core.chance import Insecure, seed_tree
from dpcomm.mechanisms import mvu
from dpcomm.mechanisms.mvu import (
    Mvu,
    Table,
    law,
    relaxed,
    renyi_curve,
    solve,
    two_symbols,
)
from dpcomm.privacy import audit

SMALL = [
    (eps, n, 4, c) for c in mvu.CONSTRAINTS for eps, n in ((2.0, 3), (1.0, 5), (4.0, 5))
]
small = pytest.mark.parametrize("problem", SMALL, ids=str)


@pytest.fixture(scope="module", autouse=True)
def data_root(tmp_path_factory):
    "Tables of these tests are solved here, and kept apart from the user's."
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPCOMM_DATA", str(tmp_path_factory.mktemp("data")))
        yield


def textbook(eps, alphabet, n, constraint):
    """Least mean variance for an alphabet: every pair of inputs spelled out, nothing
    scaled.
    """
    a, m, x = np.array(alphabet), len(alphabet), np.linspace(0, 1, n)
    rows = []
    for i, k, j in itertools.product(range(n), range(n), range(m)):
        if i != k:
            row = np.zeros((n, m))
            row[i, j], row[k, j] = (
                1.0,
                -math.exp(eps * (abs(x[i] - x[k]) if constraint == "metric" else 1)),
            )
            rows.append(row.ravel())
    equal = np.vstack([np.kron(np.eye(n), np.ones(m)), np.kron(np.eye(n), a)])
    found = linprog(
        np.tile(a**2, n),
        np.array(rows),
        np.zeros(len(rows)),
        equal,
        np.concatenate([np.ones(n), x]),
    )
    return found.fun / n - (x**2).mean() if found.status == 0 else math.inf


def verify(table):
    "What a table promises, computed another way than the table does."
    p, x = np.array(table.rows), table.inputs
    assert (
        np.abs(p.sum(1) - 1).max() < 1e-12
        and np.abs(p @ np.array(table.alphabet) - x).max() < 1e-10
    )
    assert p.max(0).min() >= mvu.FLOOR and list(table.alphabet) == sorted(
        table.alphabet
    )
    for i, k in itertools.permutations(range(len(p)), 2):
        bound = table.eps * (abs(x[i] - x[k]) if table.constraint == "metric" else 1)
        assert (np.log(p[i]) - np.log(p[k])).max() <= bound + 1e-9


# ---- tables

GOOD = dict(eps=math.log(3), alphabet=(-0.5, 1.5), rows=((0.75, 0.25), (0.25, 0.75)))


def test_a_table_knows_its_inputs_and_variance():
    table = Table(**GOOD, log="by hand")
    assert (
        table == Table(**GOOD)
        and table.log == "by hand"
        and hash(table) == hash(Table(**GOOD))
    )
    assert table.inputs.tolist() == [0, 1] and table.variance == pytest.approx(0.75)


@tabled(
    "change, match",
    [
        (dict(alphabet=(1.5, -0.5)), "alphabet is .*sort it"),
        (dict(alphabet=(-0.5, -0.5)), "alphabet (is|holds)"),
        (dict(alphabet=(-0.5, math.nan)), "alphabet holds nan"),
        (dict(eps=1.09), "rows is not private.*raise eps"),
        (dict(alphabet=(-0.5, 1.5 + 1e-8)), "rows is biased"),
        (dict(constraint="l2"), "constraint is"),
        (dict(rows=((0.75, 0.25), (0.25, 0.75 + 1e-9))), "rows is off"),
        (dict(rows=((1.0, 0.0), (0.0, 1.0)), alphabet=(0.0, 1.0)), "rows is off"),
        (dict(rows=((0.75, 0.25),)), "rows is of shape"),
        (dict(alphabet=(-0.5, 1.0, 1.5)), "rows is of shape"),
        (dict(eps=-1.0), "eps is"),
        (
            dict(
                alphabet=(-0.5, 1.5, 9.0),
                rows=((0.75 - 1e-9, 0.25, 1e-9), (0.25 - 1e-9, 0.75, 1e-9)),
            ),
            "dust.*drop it",
        ),
    ],
)
def test_a_table_that_is_not_one_is_refused(change, match):
    with pytest.raises(ValueError, match=match):
        Table(**GOOD | change)


@tabled("constraint", mvu.CONSTRAINTS)
@tabled("eps", [1e-5, 0.3, 1.0, 30.0, 700.0])
def test_two_symbols_are_a_table_for_any_number_of_inputs(eps, constraint):
    for n in (2, 3, 17, 512):
        table = two_symbols(eps, n, constraint)
        assert table == solve(eps, n, 2, constraint)
        logs = np.log(table.rows)
        steps = (
            np.abs(np.diff(logs, axis=0)).max() * (n - 1)
            if constraint == "metric"
            else np.ptp(logs, axis=0).max()
        )
        assert steps == pytest.approx(eps, rel=1e-6), "the bound is reached"
    if eps < 100:
        assert two_symbols(eps).alphabet == pytest.approx(
            (-1 / math.expm1(eps), 1 + 1 / math.expm1(eps))
        )
    verify(two_symbols(eps, 5, constraint))


@pytest.mark.parametrize("constraint", mvu.CONSTRAINTS)
def test_no_other_two_symbols_do_better(constraint):
    best = two_symbols(1.0, 4, constraint)
    low, high = best.alphabet
    assert textbook(1.0, best.alphabet, 4, constraint) == pytest.approx(
        best.variance, rel=1e-6
    )
    around = [
        (low + s, high + t)
        for s, t in itertools.product((-0.2, -0.01, 0.0, 0.01, 0.2), repeat=2)
        if s or t
    ]
    assert min(textbook(1.0, each, 4, constraint) for each in around) > best.variance


# ---- the program and its certificate


@pytest.mark.parametrize("eps", [0.1, 1.0, 4.0, 8.0])
def test_two_inputs_need_two_symbols_however_many_are_offered(eps):
    symbols, weights, least = relaxed(eps, 2)
    two = two_symbols(eps)
    used, step = symbols[weights > 1e-6 * weights.sum()], symbols[1] - symbols[0]
    assert (
        all(min(abs(u - a) for a in two.alphabet) <= step for u in used)
        and len(used) <= 4
    )
    assert least <= two.variance <= least + 2 * step**2
    assert all(
        solve(eps, 2, m, c) == two_symbols(eps, 2, c)
        for m in (2, 3, 16)
        for c in mvu.CONSTRAINTS
    )


@small
def test_solved_tables_keep_their_promise_and_beat_two_symbols(problem):
    table, (eps, n, m, constraint) = solve(*problem), problem
    verify(table)
    least = relaxed(eps, n, constraint)[2]
    assert (
        least <= table.variance < 0.99 * two_symbols(eps, n, constraint).variance
        and len(table.alphabet) <= m
    )
    assert textbook(eps, table.alphabet, n, constraint) == pytest.approx(
        table.variance, rel=1e-4
    ), "the best table of its alphabet"
    assert (
        f"{len(table.alphabet)} of {m} symbols" in table.log and "at least" in table.log
    )
    if n == 3:
        assert table.variance <= least * 1.001, (
            "three inputs need no more than four symbols"
        )


@small
def test_no_small_change_of_the_alphabet_helps(problem):
    table, (eps, n, _, constraint) = solve(*problem), problem
    rng = seed_tree(0, "change", n)
    for size in (1e-3, 1e-2, 0.1):
        changed = np.sort(
            np.array(table.alphabet)
            + size * rng.standard_normal((10, len(table.alphabet)))
        )
        assert min(
            textbook(eps, a, n, constraint) for a in changed
        ) > table.variance * (1 - 1e-5)


@pytest.mark.parametrize("constraint", mvu.CONSTRAINTS)
def test_the_reach_is_taken_over_the_cones_extreme_rays(constraint):
    eps, n = 1.3, 6
    signs = np.array(
        list(itertools.product((0, 1), repeat=n if constraint == "strict" else n - 1))
    )
    rays = (
        np.exp(eps * signs)
        if constraint == "strict"
        else np.exp(
            np.cumsum(np.c_[np.zeros(len(signs)), (2 * signs - 1) * eps / (n - 1)], 1)
        )
    )
    for mu in seed_tree(0, "mu").standard_normal((5, n)):
        assert mvu._dual_reach(eps, mu, constraint) == pytest.approx(
            np.abs(rays @ mu / rays.sum(1)).max() / 2, rel=1e-6
        )


@pytest.mark.parametrize("constraint", mvu.CONSTRAINTS)
def test_the_certificate_lies_below_every_private_table(constraint):
    """Mixtures of a solved table with others of the same mean, alphabets drawn at
    random.
    """
    least, rng = relaxed(1.5, 4, constraint)[2], seed_tree(0, "tables")
    values = [
        textbook(
            1.5,
            np.sort(np.concatenate([[-1.2, 2.2], rng.uniform(-1, 2, 9)])),
            4,
            constraint,
        )
        for _ in range(15)
    ]
    assert min(values) < math.inf and least < min(values)


@tabled("constraint", mvu.CONSTRAINTS)
@tabled("eps, variance", [(0.05, 400.0), (30.0, 0.0), (700.0, 0.0)])
def test_the_solver_holds_at_both_ends(eps, variance, constraint):
    table = solve(eps, 3, 4, constraint)
    verify(table)
    assert table.variance == pytest.approx(variance, rel=0.03, abs=1e-6)
    assert table.variance <= two_symbols(eps, 3, constraint).variance


def test_symbols_are_merged_by_weight():
    a, w = np.array([0.0, 0.1, 1.0, 2.0]), np.array([3.0, 1.0, 1.0, 1.0])
    assert mvu._merge(a, w, 3).tolist() == pytest.approx([0.025, 1.0, 2.0])
    assert (
        len(mvu._merge(a, w, 4)) == 4
        and len(mvu._merge(a, w, 4, step=0.2)) == 3
        and mvu._merge(a, w, 1).tolist() == pytest.approx([3.1 / 6])
    )


@tabled(
    "arguments, name",
    [
        ((0.0,), "eps"),
        ((-1.0,), "eps"),
        ((math.nan,), "eps"),
        ((math.inf,), "eps"),
        ((701.0,), "eps"),
        ((1e-6,), "eps"),
        ((1.0, 1), "n_inputs"),
        ((1.0, 2.0), "n_inputs"),
        ((1.0, 3, 1), "n_outputs"),
        ((1.0, 3, 300), "n_outputs"),
        ((1.0, 3, 3, "l2"), "constraint"),
        ((1.0, 1000, 4), "n_inputs"),
    ],
)
def test_problems_without_a_table_are_refused_by_name(arguments, name):
    with pytest.raises(ValueError, match=f"{name} is .*:"):
        solve(*arguments)


# ---- the cache


def test_tables_are_kept_and_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("DPCOMM_DATA", str(tmp_path))
    problem = (2.0, 3, 4, "strict")

    def fresh():
        return solve.__wrapped__(2.0, 3, 4, "strict")

    path, first = mvu._table_file(*problem), fresh()
    assert (
        path.parent == tmp_path / "tables"
        and len(
            {mvu._table_file(*p) for p in SMALL}
            | {mvu._table_file(2.0, 3, 5, "strict")}
        )
        == len(SMALL) + 1
    )
    calls, search = [], mvu._search
    monkeypatch.setattr(mvu, "_search", lambda *p: calls.append(p) or search(*p))
    again = fresh()
    assert again == first and again.log == first.log and not calls, "read from disk"
    content = json.loads(path.read_text())
    wrong = [
        path.read_text()[:100],
        "[]",
        "null",
        json.dumps(content | dict(log="better")),
        json.dumps(content | dict(eps=3.0)),
        json.dumps({}),
        json.dumps(content | dict(alphabet=content["alphabet"][::-1])),
        json.dumps(content | dict(rows=None)),
    ]
    for i, text in enumerate(wrong):
        path.write_text(text)
        assert fresh() == first and len(calls) == i + 1, f"damage {i} was solved again"
        assert json.loads(path.read_text()) == content


def test_a_folder_that_cannot_be_written_costs_the_cache_only(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("DPCOMM_DATA", str(tmp_path / "file"))
    verify(solve.__wrapped__(2.0, 3, 4, "strict"))


def test_without_a_data_root_tables_go_to_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("DPCOMM_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert mvu._table_file(1.0, 3, 4, "strict").parent == tmp_path / "dpcomm" / "tables"


# ---- laws and messages


@small
def test_the_law_interpolates_rows_and_keeps_the_mean(problem):
    table, x = solve(*problem), np.linspace(0, 1, 101)
    p = law(table, x)
    np.testing.assert_allclose(p @ np.array(table.alphabet), x, atol=1e-10)
    np.testing.assert_allclose(p[:: 100 // (problem[1] - 1)], table.rows, atol=1e-15)
    np.testing.assert_allclose(
        law(table, 0.3),
        (
            0.3 / 0.25 % 1 * law(table, 0.5) + (1 - 0.3 / 0.25 % 1) * law(table, 0.25)
            if problem[1] == 5
            else law(table, [0.3])[0]
        ),
    )
    for bad in (-1e-9, 1.2, math.nan):
        with pytest.raises(ValueError, match=r"x holds .*\[0, 1\]"):
            law(table, [0.5, bad])


def test_with_two_symbols_the_grid_is_invisible():
    x = np.linspace(0, 1, 77)
    for n in (3, 8, 512):
        np.testing.assert_allclose(
            law(solve(1.7, n, 2), x), law(solve(1.7, 2, 2), x), atol=1e-14
        )


TWO = Mvu(2.0, eps=1.5, beta=3.0)
FOUR = Mvu(2.0, eps=2.0, n_inputs=3, n_outputs=4, beta=1.5)
FIVE = Mvu(1.0, eps=1.0, n_inputs=5, n_outputs=4)


def test_step_and_tilt_give_the_mean():
    u = np.linspace(-2, 2, 41)
    assert TWO.step == pytest.approx(2.0 / 3.0 / math.tanh(0.75))
    np.testing.assert_allclose(
        TWO.step * TWO.tilt(u), u.clip(-2 / 3, 2 / 3), atol=1e-12
    )
    for kind in (np.float32, np.float64):
        assert TWO.tilt(u.astype(kind)).dtype == kind and isinstance(
            TWO.tilt(u), np.ndarray
        )
        tensor = TWO.tilt(torch.from_numpy(u.astype(kind)))
        assert tensor.dtype == torch.from_numpy(u.astype(kind)).dtype
        np.testing.assert_allclose(tensor, TWO.tilt(u), atol=1e-6)
    metric = Mvu(2.0, eps=1.5, beta=3.0, n_inputs=9, constraint="metric")
    np.testing.assert_allclose(
        metric.step * metric.tilt(u), u.clip(-2 / 3, 2 / 3), atol=1e-12
    )
    for bad in (lambda: FIVE.step, lambda: FIVE.tilt(u)):
        with pytest.raises(ValueError, match="n_outputs is 4"):
            bad()


@pytest.mark.parametrize("m", [TWO, FOUR, FIVE], ids=str)
def test_symbols_follow_the_law(m):
    n, u = 40_000, torch.tensor([[1.9, 0.35, -0.1, 0.0]]) * m.clip_norm / 2
    u = m.clip(u)
    seen = m.simulate(u.expand(n, 4), seed_tree(0, "law"))
    levels = (np.array(m.table.alphabet) - 0.5) * 2 * m.clip_norm / m.beta
    p = law(
        m.table, (0.5 + m.beta * u[0].double().numpy() / (2 * m.clip_norm)).clip(0, 1)
    )
    for column, law_of_it in zip(seen.T.numpy(), p):
        counts = [(np.abs(column - level) < 1e-5).sum() for level in levels]
        assert sum(counts) == n and fit(counts, law_of_it) > ALARM / 12
    bias, variance = (part[0].double().numpy() for part in m.moments(u))
    mean, second = p @ levels, p @ levels**2
    np.testing.assert_allclose(bias, mean - u[0].double().numpy(), atol=1e-6)
    np.testing.assert_allclose(variance, second - mean**2, rtol=1e-5)
    assert (
        np.abs(seen.double().numpy().mean(0) - mean) <= radius(np.sqrt(variance), n, 12)
    ).all()


@pytest.mark.parametrize("m", [TWO, FIVE], ids=["two", "four"])
def test_blocks_change_nothing(m, monkeypatch):
    u = torch.from_numpy(
        seed_tree(0, "rows").standard_normal((5, 33)).astype(np.float32)
    )

    def draw():
        return (
            m.simulate(u, seed_tree(1)),
            m.simulate(u, [seed_tree(i) for i in range(5)]),
            m.encode(u[0], Insecure(3)).payload,
        )

    whole = draw()
    monkeypatch.setattr(mvu, "BLOCK", 7)
    cut = draw()
    assert (
        torch.equal(whole[0], cut[0])
        and torch.equal(whole[1], cut[1])
        and whole[2] == cut[2]
    )
    assert torch.equal(
        m.decode(m.encode(u[2], Insecure(9))),
        m.simulate(u[2:3], [seed_tree(9, "private")])[0],
    )


def test_bits_are_packed():
    u = torch.zeros(61_706)
    assert (
        len(TWO.encode(u).payload) == 7_714
        and len(FIVE.encode(u).payload) == 15_427
        and FIVE.bits(3).payload == 8
    )
    assert (TWO.nbits, FOUR.nbits, FIVE.nbits) == (1, 2, 2) and len(
        FOUR.table.alphabet
    ) == 3
    message = FOUR.encode(torch.zeros(4))
    foreign = dataclasses.replace(message, payload=wire.pack_bits([0, 3, 1, 2], 2))
    with pytest.raises(ValueError, match="symbol 3 of an alphabet of 3"):
        FOUR.decode(foreign)


# ---- guarantees


def divergence(p, q, alpha):
    return np.log((p**alpha * q ** (1 - alpha)).sum(-1)) / (alpha - 1)


TINY = Mvu(1.0, eps=0.05, n_inputs=3, n_outputs=4)
METRIC = Mvu(1.0, eps=4.0, n_inputs=5, n_outputs=4, constraint="metric", beta=0.8)
ODD = Mvu(1.0, eps=3.0, n_inputs=4, beta=3.0)


def pairs(m, relation, d, n=4000):
    "Scaled pairs of vectors in the ball, sparse and dense, together and opposite."
    rng = seed_tree(0, "pairs", d)
    u, v = (
        rng.standard_normal((n, d)) * (rng.random((n, d)) < rng.random((n, 1)))
        for _ in range(2)
    )
    u[0], u[1], v[: n // 2] = np.eye(d)[0], 1.0, -u[: n // 2]
    u, v = (
        w / np.maximum(np.linalg.norm(w, axis=1, keepdims=True), 1e-9) for w in (u, v)
    )
    length = rng.random((n, 1)) ** 0.3
    length[:2] = 1.0
    return [
        (0.5 + m.beta / 2 * w).clip(0, 1)
        for w in (u * length, v * length * (relation == "replace"))
    ]


@tabled("m", [TWO, FOUR, FIVE, TINY, METRIC, ODD], ids=str)
@tabled("relation", ["zero-out", "replace"])
def test_no_pair_in_the_ball_exceeds_the_curve(m, relation):
    orders = (1.2, 2.0, 7.5, 60.0, 3000.0)
    any_d = renyi_curve(m, relation, "mixture", orders=orders)
    for d in (1, 2, 7):
        bound = renyi_curve(m, relation, "mixture", d, orders=orders)
        p, q = (law(m.table, x) for x in pairs(m, relation, d))
        for k, alpha in enumerate(orders):
            with np.errstate(all="ignore"):
                best = max(
                    np.nanmax(
                        np.where(
                            np.isfinite(s := divergence(a, b, alpha).sum(-1)), s, 0
                        )
                    )
                    for a, b in ((p, q), (q, p))
                )
            assert best <= bound[k] * (1 + 1e-7) + 1e-12 and bound[k] <= any_d[k] * (
                1 + 1e-7
            )
            if d == 1 and alpha < 100 and (relation == "zero-out" or m.n_outputs == 2):
                assert best >= 0.999 * bound[k], (
                    "the end of the range is the worst of one coordinate"
                )


@pytest.mark.parametrize("m", [FOUR, METRIC], ids=str)
@pytest.mark.parametrize("relation", ["zero-out", "replace"])
def test_no_pair_of_inputs_exceeds_the_polygon(m, relation):
    """All pairs on a fine lattice of inputs, kinks or not, against the polygon at their
    distance.
    """
    half, alpha = min(1.0, m.beta) / 2, 4.0
    x = np.linspace(0.5 - half, 0.5 + half, 181)
    i, k = (
        (each.ravel() for each in np.indices((181, 181)))
        if relation == "replace"
        else (np.arange(181), np.full(181, 90))
    )
    p, q = law(m.table, x[i]), law(m.table, x[k])
    ((s, g),) = mvu._mixture(m.table, m.beta, relation, np.array([alpha]))
    order = np.argsort(s, kind="stable")
    bound = np.interp((x[i] - x[k]) ** 2, s[order], g[order])
    worst = np.maximum(divergence(p, q, alpha), divergence(q, p, alpha))
    assert (worst <= bound * (1 + 1e-9) + 1e-12).all()
    near = np.abs(i - k) == 20
    assert worst[near].max() >= 0.98 * bound[near].max()


def test_small_signals_cost_their_fisher_information():
    """For two symbols 1 / w^2, reached by dense vectors where beta is small: alpha J
    R^2 / 2.
    """
    m, orders = Mvu(1.0, eps=1.0, beta=0.05), (1.5, 2.0, 4.0)
    information = 4 * math.tanh(0.5) ** 2
    np.testing.assert_allclose(
        renyi_curve(m, "zero-out", "mixture", orders=orders),
        np.array(orders) / 2 * information * 0.025**2,
        rtol=5e-3,
    )
    x = 0.5 + 0.025 / math.sqrt(10_000)
    dense = [
        10_000 * divergence(law(m.table, x), law(m.table, 0.5), alpha)
        for alpha in orders
    ]
    np.testing.assert_allclose(
        renyi_curve(m, "zero-out", "mixture", 10_000, orders=orders), dense, rtol=5e-3
    )


def test_the_ball_is_a_concave_envelope():
    """Against a linear program over mixtures of nodes; without d, against many
    coordinates.
    """
    rng = seed_tree(0, "nodes")
    for d, total in ((1, 0.3), (3, 0.9), (4, 1.0), (7, 20.0)):
        s = np.append(0, np.sort(rng.random(12)))
        g = np.append(0, np.sort(rng.random(12)))
        mix = linprog(-g, s[None], [total / d], np.ones((1, 13)), [1.0])
        assert mvu._ball(s, g, total, d) == pytest.approx(-d * mix.fun, rel=1e-9)
        assert mvu._ball(s, g, total, None) == pytest.approx(
            mvu._ball(s, g, total, 10**6), rel=1e-9
        )
    assert mvu._ball(np.array([0.0, 1.0]), np.array([0.1, 0.2]), 1.0, None) == math.inf


@pytest.mark.parametrize(
    "n, beta, d", [(2, 1.0, 50), (8, 1.0, 300), (9, 3.0, 20), (512, 1.0, 400)]
)
def test_dithering_stays_within_its_budget(n, beta, d):
    h, rng = 1 / (n - 1), seed_tree(0, "dither", n)
    for shape in (np.ones(d), np.eye(d)[0], rng.standard_normal(d)):
        x = (0.5 + beta / 2 * shape / np.linalg.norm(shape)).clip(0, 1)
        total = ((x - 0.5) ** 2).sum()
        coins = rng.random((3000, d))
        far = ((np.floor(x / h + coins) - np.floor(0.5 / h + coins)) ** 2).sum(1) * h**2
        assert far.mean() <= total + min(
            h * math.sqrt(total * d), h * h * d / 4
        ) + radius(far.std(), 3000, 12)
        assert (far > mvu._budget(total, h, d, 0.05)).mean() <= 0.05
        assert far.max() <= (math.sqrt(total) + h * math.sqrt(d)) ** 2 + 1e-9
        assert (
            mvu._budget(total, h, d, 1e-300)
            <= (math.sqrt(total) + h * math.sqrt(d)) ** 2
        )


@pytest.mark.parametrize(
    "m, relation",
    [(FIVE, "replace"), (FIVE, "zero-out"), (ODD, "zero-out"), (METRIC, "replace")],
    ids=str,
)
def test_the_knapsack_covers_all_pairs_of_rows(m, relation):
    p, n = np.array(m.table.rows), m.n_inputs - 1
    half = min(1.0, m.beta) / 2
    inside = [
        i
        for i in range(n + 1)
        if math.floor((0.5 - half) * n) <= i <= math.ceil((0.5 + half) * n)
    ]
    base = inside if relation == "replace" else sorted({n // 2, (n + 1) // 2})
    ((s, g),) = mvu._grid(m.table, m.beta, relation, np.array([3.0]))
    exact = {i: 0.0 for i in range(len(s))}
    for i, k in itertools.product(inside, base):
        exact[abs(i - k)] = max(
            exact.get(abs(i - k), 0),
            divergence(p[i], p[k], 3.0),
            divergence(p[k], p[i], 3.0),
        )
    np.testing.assert_allclose(
        g, np.maximum.accumulate([exact[i] for i in range(len(s))]), atol=1e-12
    )
    np.testing.assert_allclose(s, (np.arange(len(s)) / n) ** 2)


@pytest.mark.parametrize(
    "m",
    [Mvu(1.0, eps=2.0, beta=2.0), Mvu(1.0, eps=1.0, n_inputs=3, n_outputs=4)],
    ids=str,
)
@pytest.mark.parametrize("relation", ["zero-out", "replace"])
def test_claims_cover_the_enumerated_epsilon(m, relation):
    d, delta = 4, 1e-3
    claims = {
        how: m.guarantee(rounds=1, delta=delta, relation=relation, accountant=how, d=d)
        for how in mvu.ACCOUNTANTS
    }
    for v in (np.eye(d)[0], np.ones(d) / 2, np.array([1, 1, 0, 0]) / math.sqrt(2)):
        worlds = [
            np.full(d, 0.5) if sign == 0 else (0.5 + sign * m.beta / 2 * v).clip(0, 1)
            for sign in (1, -(relation == "replace"))
        ]
        p, q = (np.ones(1) for _ in worlds)
        for a, b in zip(*(law(m.table, w) for w in worlds)):
            p, q = np.multiply.outer(p, a).ravel(), np.multiply.outer(q, b).ravel()
        true = max(audit.enumerated_eps(p, q, delta))
        assert true <= min(claim.eps for claim in claims.values())
        assert max(audit.enumerated_eps(p, q, 0.0)) <= claims["pure"].eps * (1 + 1e-9)
    assert (
        claims["mixture-balle"].eps
        <= claims["mixture-classic"].eps
        <= claims["grid-classic"].eps
    )


def test_a_claim_names_what_it_covers():
    g = TWO.guarantee(rounds=5, delta=1e-5)
    assert (g.relation, g.trust, g.sampling, g.accountant, g.scope, g.unit) == (
        "zero-out",
        "local",
        "none",
        "mixture-classic",
        "total",
        "client",
    )
    assert (
        "any d" in g.note
        and TWO.guarantee(rounds=1, delta=1e-5, unit="example").unit == "example"
    )
    assert (
        TWO.guarantee(rounds=5, delta=1e-5, d=100).eps
        <= g.eps
        <= TWO.guarantee(rounds=5, delta=1e-5, relation="replace").eps
    )
    grid = TWO.guarantee(rounds=5, delta=1e-5, accountant="grid-balle", d=100)
    assert (
        grid.delta == 1e-5 and "half of delta" in grid.note and "d = 100" in grid.note
    )
    pure = TWO.guarantee(rounds=5, accountant="pure", d=7, relation="replace")
    assert pure.delta == 0 and pure.eps == pytest.approx(35 * 1.5)
    assert TWO.guarantee(accountant="pure", d=1).eps == pytest.approx(
        -math.log(1 - math.tanh(0.75))
    )


@pytest.mark.parametrize(
    "change, match",
    [
        (dict(accountant="grid-balle"), "d is None"),
        (dict(accountant="pure"), "d is None"),
        (dict(accountant="mixture"), "accountant is"),
    ],
)
def test_claims_that_cannot_be_made_are_refused(change, match):
    with pytest.raises(ValueError, match=match):
        TWO.guarantee(**dict(rounds=1, delta=1e-5) | change)


def test_the_game_scores_the_log_likelihood():
    for m, relation in ((TWO, "zero-out"), (FOUR, "replace")):
        seen = {
            here: m.play(relation, here, 20_000, seed_tree(0, "play", here))
            for here in (True, False)
        }
        for attack, k in {"one-hot": 1, "spread": max(2, int(m.beta**2))}.items():
            x = [
                0.5 + sign * m.beta / 2 / math.sqrt(k)
                for sign in (1, -1 if relation == "replace" else 0)
            ]
            p, q = (law(m.table, min(1.0, max(0.0, each))) for each in x)
            gain = np.log(p / q)
            for here, truth in ((True, p), (False, q)):
                scores = seen[here][attack]
                assert np.abs(scores.mean() - k * truth @ gain) <= radius(
                    math.sqrt(k * (truth @ gain**2 - (truth @ gain) ** 2)), 20_000, 8
                )
                assert scores.max() <= k * gain.max() + 1e-6
    assert (
        TWO.play("zero-out", True, 50, seed_tree(1), rounds=3, delta=0.1)[
            "one-hot"
        ].max()
        <= 3 * 1.5
    )
    assert set(TWO.relations) == {"zero-out", "replace"}


# ---- what the grid's accountant pays


def test_dithering_has_the_budget_of_its_lemma(monkeypatch):
    """R = 1/2, h = 1/4, d = 100, pi = 1e-6 in @eq-dither: 1.5 + 0.875 sqrt(ln(1e6) / 2);
    and the curve is taken at that distance.
    """
    lemma = 1.5 + 0.875 * math.sqrt(math.log(1e6) / 2)
    assert mvu._budget(0.25, 0.25, 100, 1e-6) == pytest.approx(lemma, rel=1e-12)
    asked = []
    monkeypatch.setattr(mvu, "_ball", lambda s, g, total, d: asked.append(total) or 1.0)
    for relation, total in (("zero-out", 0.25), ("replace", 1.0)):
        renyi_curve.__wrapped__(FIVE, relation, "grid", 100, 1e-6, (2.0,))
        assert asked.pop() == mvu._budget(total, 0.25, 100, 1e-6)


@pytest.mark.parametrize("rounds", [1, 2, 50])
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
