"""I-MVU from its parts: closed form, information, divergences, coins, messages. What
every mechanism must do is in test_conformance.

Statistical tests have false-alarm rate 1e-6 and fixed seeds.
"""

import functools
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from laws import ALARM, count_bounds, fit, radius
from scipy.special import expit, logsumexp
from tables import tabled

from dpcomm.core import wire
from dpcomm.core.chance import Insecure, seed_tree
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


def loose(*rows):
    "Rows as a table that nobody checked."
    return SimpleNamespace(
        alphabet=tuple(range(len(rows[0]))), rows=tuple(map(tuple, rows))
    )


def random_rows(rng, m, anadromic):
    p = rng.dirichlet(np.ones(m) * rng.uniform(0.3, 3)) + 1e-4
    q = p[::-1] if anadromic else rng.dirichlet(np.ones(m)) + 1e-4
    return loose(p / p.sum(), q / q.sum())


def renyi(a, p, q):
    "Divergence of order a from two lists of probabilities."
    return float(logsumexp(a * np.log(p) + (1 - a) * np.log(q)) / (a - 1))


# ---- closed form


@tabled("eps", [1e-9, 1e-3, 0.5, 1, 3.0, 30.0, 700.0])
def test_the_closed_form_is_unbiased_private_and_as_informative_as_privacy_allows(eps):
    p, (low, high), M = closed_form(eps)
    assert low < 0 < 1 <= high and M == eps**2
    for x in (0.0, 1.0):
        assert math.isclose(
            low * p(1 - x) + high * p(x), x, rel_tol=1e-9, abs_tol=1e-15 * (high - low)
        )
    assert math.isclose(np.log(p(1.0)) - np.log(p(0.0)), eps, rel_tol=1e-6)
    assert np.array_equal(p(np.array([[0.5, 0.5]])), np.array([[0.5, 0.5]]))


@tabled("bad", [0, -1.0, math.nan, math.inf, 700.1, "1"])
def test_an_epsilon_without_a_closed_form_is_refused(bad):
    for call in (closed_form, lambda eps: Imvu(1.0, eps)):
        with pytest.raises(ValueError, match="eps is"):
            call(bad)
    assert imvu.EPS == "(0, 700]"


@tabled("eps", [0.1, 1.0, 8.0])
@tabled("bits", [1, 2, 4])
def test_the_solver_finds_the_closed_form_for_every_budget(eps, bits):
    table = mvu.solve(eps, n_inputs=2, n_outputs=2**bits)
    p, alphabet, M = closed_form(eps)
    x = np.linspace(-2, 3, 11)
    np.testing.assert_allclose(table.alphabet, alphabet, rtol=1e-9)
    np.testing.assert_allclose(
        pmf(x, table), np.stack([1 - p(x), p(x)], 1), rtol=1e-8, atol=1e-14
    )
    assert math.isclose(fisher_supremum(table), M, rel_tol=1e-6)


# ---- information


def test_the_rows_stand_at_zero_and_one():
    for table in (
        thin(0.1),
        mvu.solve(2.0),
        random_rows(seed_tree(0, "rows"), 5, False),
    ):
        np.testing.assert_allclose(pmf([0.0, 1.0], table), table.rows, rtol=1e-12)
        at = imvu.line(table)
        assert isinstance(at, imvu.Line) and len(at.alphabet) == len(at.start) == len(
            at.theta
        )
        assert (
            pmf(np.zeros((2, 3)), table).shape == (2, 3, len(at.alphabet))
            and fisher(0.3, table).shape == ()
        )


@tabled("i", range(20))
def test_information_is_the_mean_square_of_the_score(i):
    rng = seed_tree(0, "score", i)
    table = random_rows(rng, int(rng.integers(2, 7)), bool(i % 2))
    x = rng.uniform(-2, 3)
    h = 1e-5
    score = (np.log(pmf(x + h, table)) - np.log(pmf(x - h, table))) / (2 * h)
    assert math.isclose(pmf(x, table) @ score**2, fisher(x, table), rel_tol=1e-5)


@tabled("i", range(24))
def test_the_supremum_is_certified(i):
    """At least every value on a fine grid, at most a trifle more; both brackets hold
    all larger values.
    """
    rng = seed_tree(0, "supremum", i)
    table = random_rows(rng, int(rng.integers(2, 9)), bool(i % 2))
    x = np.linspace(-40, 41, 40_001)
    values = fisher(x, table)
    M = fisher_supremum.__wrapped__(table)
    assert values.max() <= M <= values.max() * (1 + 1e-4)
    brackets = [variance_bracket(table)] + ([lemma2_bracket(table)] if i % 2 else [])
    for low, high in brackets:
        assert low <= 0.5 <= high and values[(x < low) | (x > high)].max(
            initial=0
        ) <= fisher(0.5, table) * (1 + 1e-9)
    if i % 2:
        assert (
            brackets[1][0] <= brackets[0][0] + 1e-9
            and brackets[0][1] <= brackets[1][1] + 1e-9
        )
        assert math.isclose(
            M, fisher_supremum.__wrapped__(table, lemma2_bracket), rel_tol=1e-6
        )


def test_the_maximum_of_thin_tables_is_outside_the_box():
    table = thin(0.001)
    assert (
        fisher(np.linspace(0, 1, 99), table).max()
        < 0.01
        < 0.25
        < fisher_supremum(table)
        < 0.2501
    )


def test_ties_of_the_extreme_ratio_are_one_symbol():
    p = np.array([0.5, 0.1, 0.1, 0.1, 0.2])
    split = loose(p, np.array([0.2, 0.1, 0.1, 0.25, 0.35]))
    merged = loose([0.5, 0.2, 0.3], [0.2, 0.2, 0.6])
    tied = loose([0.3, 0.2, 0.3, 0.12, 0.08], [0.12, 0.08, 0.3, 0.3, 0.2])
    lumped = loose([0.5, 0.3, 0.2], [0.2, 0.3, 0.5])
    assert math.isclose(
        fisher_supremum.__wrapped__(tied),
        fisher_supremum.__wrapped__(lumped),
        rel_tol=1e-6,
    )
    assert fisher_supremum.__wrapped__(split) > fisher_supremum.__wrapped__(merged) > 0


def test_lemma_2_refuses_what_is_not_anadromic():
    with pytest.raises(ValueError, match="anadromic.*variance_bracket"):
        lemma2_bracket(loose([0.5, 0.3, 0.2], [0.2, 0.25, 0.55]))


@pytest.mark.parametrize(
    "table, words",
    [
        (mvu.solve(1.0, n_inputs=3), "3 rows"),
        (
            SimpleNamespace(alphabet=(1, 0), rows=((0.3, 0.7), (0.7, 0.3))),
            "must ascend",
        ),
        (loose([0.5, 0.5, 0.0], [0.2, 0.3, 0.5]), "probability of 0"),
    ],
)
def test_a_table_without_a_line_is_refused(table, words):
    with pytest.raises(ValueError, match=words):
        imvu.line(table)


# ---- divergences


@tabled("i", range(30))
def test_the_fisher_bound_holds_over_all_reals_and_for_every_table(i):
    rng = seed_tree(0, "bound", i)
    table = random_rows(rng, int(rng.integers(2, 7)), bool(i % 2))
    M = fisher_supremum.__wrapped__(table)
    for _ in range(30):
        (x1, x2), a = rng.uniform(-1, 2, 2), 1 + 10 ** rng.uniform(-1.5, 1.5)
        assert (
            renyi(a, pmf(x1, table), pmf(x2, table))
            <= a / 2 * M * (x1 - x2) ** 2 * (1 + 1e-7) + 1e-12
        )


def test_the_unit_interval_is_not_enough():
    table = thin(0.001)
    inside = fisher(np.linspace(0, 1, 999), table).max()
    assert renyi(13.0, *pmf([1.0, 0.0], table)) > 20 * 13 / 2 * inside


def coin_divergence(a, x, y):
    """Divergence between vectors of coins with log-odds x and y, coordinate by
    coordinate.
    """
    return sum(renyi(a, expit([v, -v]), expit([w, -w])) for v, w in zip(x, y))


@tabled("relation", imvu.RELATIONS)
@tabled("i", range(60))
def test_no_pair_of_the_ball_is_farther_than_the_even_one(relation, i):
    rng = seed_tree(0, "worst", relation, i)
    d = int(rng.integers(1, 9))
    a = 1 + 10 ** rng.uniform(-1, 1.5)
    kappa = 10 ** rng.uniform(-1, 1)
    exact = rdp_exact(a, kappa, relation, d)
    even = np.full(d, kappa / d**0.5)
    pairs = (
        ((even, -even),)
        if relation == "replace"
        else ((even, 0 * even), (0 * even, even))
    )
    assert math.isclose(
        max(coin_divergence(a, *pair) for pair in pairs), exact, rel_tol=1e-7
    )
    for _ in range(20):
        x = even + rng.uniform(0, 1.5) * rng.standard_normal(d) * kappa
        y = (
            rng.uniform(-1.2, 0.2) * x
            + rng.uniform(0, 0.7) * rng.standard_normal(d) * kappa
            if relation == "replace"
            else 0 * x
        )
        x, y = (v * min(1, kappa / max(np.linalg.norm(v), 1e-300)) for v in (x, y))
        assert (
            max(coin_divergence(a, x, y), coin_divergence(a, y, x))
            <= exact * (1 + 1e-9) + 1e-12
        )


@pytest.mark.parametrize("relation, factor", [("zero-out", 1), ("replace", 4)])
def test_more_dimensions_leak_more_up_to_the_gaussian(relation, factor):
    dims, orders = (1, 2, 3, 10, 1000, 10**6, 10**12), ORDERS[::7]
    curves = np.array([rdp_exact(orders, 1.3, relation, d) for d in dims])
    limit = factor * rdp_gaussian(orders, 2 / 1.3)
    assert (np.diff(curves, axis=0) >= -1e-12).all() and (curves <= limit).all()
    np.testing.assert_allclose(rdp_exact(orders, 1.3, relation), limit, rtol=1e-12)
    np.testing.assert_allclose(curves[-1], limit, rtol=1e-3)


def hockey_stick(eps, x, y):
    "Exact delta at eps between two vectors of coins, by enumeration."
    p, q = (
        np.array(
            [
                np.prod(word)
                for word in itertools.product(*((expit(v), expit(-v)) for v in z))
            ]
        )
        for z in (x, y)
    )
    return np.maximum(p - math.exp(eps) * q, 0).sum()


@tabled("i", range(40))
def test_a_gaussian_of_multiplier_1_596_over_kappa_dominates(i):
    rng = seed_tree(0, "dominates", i)
    d, kappa = int(rng.integers(1, 7)), 10 ** rng.uniform(-1.5, 1)
    x, y = (kappa * v / np.linalg.norm(v) for v in rng.standard_normal((2, d)))
    for a, b, apart in (
        (x, 0 * x, 1.0),
        (0 * x, x, 1.0),
        (x, -x, 2.0),
        (x, 0.7 * y, np.linalg.norm(x - 0.7 * y) / kappa),
    ):
        for eps in (0.0, 0.1, 0.5, 2.0):
            assert (
                hockey_stick(eps, a, b)
                <= gaussian_delta(math.sqrt(8 / math.pi) / (kappa * apart), eps) + 1e-12
            )


def test_the_gaussian_of_equal_renyi_curve_does_not_dominate():
    assert hockey_stick(0.0, [0.1], [0.0]) > 1.2 * gaussian_delta(2 / 0.1, 0.0)


# ---- coins


@tabled("p", [0.5, 0.25, 1 / 3, 1e-3, 2.0**-16, 1e-5, 1 - 2.0**-16, 1 - 1e-5])
def test_coins_come_up_as_often_as_they_should(p):
    "Probabilities on the edge of a cell of the first sixteen bits, and far below it."
    n = 3_000_000
    heads = int(
        imvu.coins(
            torch.full((n,), math.log(p) - math.log1p(-p), dtype=torch.float64),
            seed_tree(0, "coins", str(p)),
        ).sum()
    )
    low, high = count_bounds(n, p)
    assert low <= heads <= high


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
    """All uniforms in one cell, the probability at a known point of it: the share of
    heads is that point.
    """
    p, n = (cell + part) / 2**16, 20_000
    z = math.log(p) - math.log1p(-p) if 0 < p < 1 else math.copysign(800.0, p - 0.5)
    heads = imvu.coins(torch.full((n,), z, dtype=torch.float64), Cells(cell)).mean()
    assert abs(heads - part) <= radius(math.sqrt(part * (1 - part)), n, 30) + 1e-6


def test_hopeless_coins_never_come_up():
    z = torch.tensor([-800.0, 800.0, -60.0, 60.0], dtype=torch.float64).repeat(10_000)
    heads = imvu.coins(z, seed_tree(0)).reshape(-1, 4)
    assert not heads[:, [0, 2]].any() and heads[:, [1, 3]].all()


def test_the_single_precision_sigmoid_stays_inside_the_margin():
    z = torch.from_numpy(
        np.r_[
            seed_tree(0, "z").uniform(-40, 40, 1_000_000),
            np.linspace(-1e-3, 1e-3, 1001),
            500.0,
            -500.0,
        ]
    )
    assert (
        np.abs(2.0**16 * (z.float().sigmoid().numpy() - expit(z.numpy()))).max() < 0.05
    )


def test_symbols_of_a_table_follow_its_law():
    mechanism = Imvu(1.0, 1.0, beta=3.0, table=thin(0.15))
    u, n = torch.tensor([[0.5, -0.2, 0.0]]), 30_000
    drawn = np.concatenate(
        list(imvu.draw_symbols(mechanism, u.expand(n, 3), seed_tree(0, "symbols")))
    )
    law = pmf(0.5 + 3.0 * u[0].numpy() / 2, mechanism.table)
    np.testing.assert_allclose(
        imvu.log_pmf(mechanism, imvu.logits(mechanism, u))[0].exp().numpy(),
        law,
        rtol=1e-6,
    )
    assert (
        min(fit(np.bincount(drawn[:, i], minlength=3), law[i]) for i in range(3))
        > ALARM / 3
    )


# ---- the mechanism

MECHANISMS = {
    "coin": Imvu(1.0, 0.5, 4.0),
    "clamped": Imvu(1.0, 0.5, 4.0, clamp=True),
    "table": Imvu(1.0, 1.0, 2.0, thin(0.2)),
}


@tabled("mechanism", MECHANISMS.values(), ids=MECHANISMS)
@tabled("n, d", [(1, 1), (70_000, 2), (3, 60_000), (200, 700), (0, 5)])
def test_the_sum_is_the_sum_of_the_rows(mechanism, n, d):
    u = torch.from_numpy(
        seed_tree(0, "u", n, d).standard_normal((n, d), dtype=np.float32)
    )
    total, rows = (
        f(mechanism, u, seed_tree(1)) for f in (imvu.sum_estimates, imvu.Imvu.simulate)
    )
    torch.testing.assert_close(
        total.double(), rows.double().sum(0), rtol=1e-5, atol=1e-4
    )
    if 0 < n < 300:

        def streams():
            return [seed_tree(2, i) for i in range(n)]

        own = mechanism.simulate(u, streams())
        torch.testing.assert_close(
            imvu.sum_estimates(mechanism, u, streams()),
            own.sum(0),
            rtol=1e-5,
            atol=1e-4,
        )
        with pytest.raises(ValueError, match="streams"):
            imvu.sum_estimates(mechanism, u, streams() + [seed_tree(0)])


def test_no_wide_array_of_the_size_of_the_cohort_exists(monkeypatch):
    sizes, logits = [], imvu.logits

    def watch(mechanism, u):
        sizes.append(logits(mechanism, u).numel())
        return logits(mechanism, u)

    monkeypatch.setattr(imvu, "logits", watch)
    imvu.sum_estimates(
        MECHANISMS["coin"],
        torch.randn(60, 39_700, generator=torch.Generator().manual_seed(0)),
        seed_tree(0),
    )
    MECHANISMS["table"].simulate(
        torch.randn(60, 39_700, generator=torch.Generator().manual_seed(0)),
        seed_tree(0),
    )
    assert max(sizes) <= imvu.PIECE and sum(sizes) == 2 * 60 * 39_700


def test_one_bit_is_one_bit():
    mechanism = MECHANISMS["coin"]
    message = mechanism.encode(torch.ones(61_706) / 300, Insecure(5))
    assert len(message.payload) == 7714 and mechanism.nbits == 1
    assert mechanism.bits(61_706).payload == 8 * 7714 and mechanism.bits(
        61_706
    ).total == 8 * len(message.to_bytes())
    bits = np.unpackbits(np.frombuffer(message.payload, np.uint8), count=61_706)
    np.testing.assert_array_equal(
        mechanism.decode(message).numpy(),
        np.where(bits, np.float32(mechanism.step), -np.float32(mechanism.step)),
    )


def test_a_symbol_that_no_table_has_is_refused():
    mechanism = MECHANISMS["table"]
    message = mechanism.encode(torch.zeros(4))
    assert mechanism.nbits == 2 and len(message.payload) == 1
    with pytest.raises(ValueError, match="symbol 3"):
        mechanism.decode(
            wire.Message(
                message.mechanism,
                4,
                wire.pack_bits([0, 1, 3, 2], 2),
                message.fingerprint,
            )
        )


@pytest.mark.parametrize("eps, beta", [(1e-3, 1.0), (1.0, 8.0), (50.0, 0.3)])
def test_estimates_are_scaled_back_from_the_alphabet(eps, beta):
    mechanism, alphabet = Imvu(2.0, eps, beta), np.array(closed_form(eps)[1])
    np.testing.assert_allclose(
        mechanism.levels, (alphabet - 0.5) * 2 * 2.0 / beta, rtol=1e-9
    )
    assert mechanism.step == mechanism.levels[1] and mechanism.kappa == eps * beta
    x = 0.5 + beta * 0.7 / 4
    assert math.isclose(
        mechanism.tilt(np.array([0.7]))[0], 2 * closed_form(eps)[0](x) - 1, rel_tol=1e-9
    )


@pytest.mark.parametrize("clamp", [False, True])
def test_the_tilt_is_the_mean_sign(clamp):
    mechanism = Imvu(2.0, 1.5, beta=5.0, clamp=clamp)
    u = torch.from_numpy(np.linspace(-1.9, 1.9, 39)[:, None])
    mean = mechanism.moments(u)[0] + u
    torch.testing.assert_close(
        mechanism.step * mechanism.tilt(u), mean, rtol=1e-9, atol=1e-12
    )
    for dtype in (np.float32, np.float64):
        found = mechanism.tilt(u.numpy().astype(dtype))
        assert found.dtype == dtype and found.shape == (39, 1)
        np.testing.assert_allclose(found, mechanism.tilt(u), rtol=1e-5)
    assert mechanism.tilt(u.float()).dtype == torch.float32 and mechanism.tilt(
        np.empty(0)
    ).shape == (0,)
    top = math.tanh(0.75) if clamp else math.tanh(7.5 * 1.9 / 4)
    assert math.isclose(float(mechanism.tilt(u).max()), top, rel_tol=1e-12)


def test_what_only_the_closed_form_has_is_refused_for_tables():
    mechanism = MECHANISMS["table"]
    for call in (
        lambda: mechanism.tilt(np.zeros(2)),
        lambda: mechanism.step,
        lambda: imvu.closed_only(mechanism),
        *(
            functools.partial(mechanism.guarantee, rounds=1, delta=1e-5, accountant=a)
            for a in ("exact-balle", "pld")
        ),
    ):
        with pytest.raises(ValueError, match="closed form"):
            call()
    assert imvu.closed_only(MECHANISMS["coin"]) is MECHANISMS["coin"]


def test_the_tilt_is_defined_for_every_real_number():
    for u in (np.array([0.3, -1.7, 900.0]), torch.tensor([[0.3, -1.7, 900.0]])):
        found = np.asarray(MECHANISMS["coin"].tilt(u)).ravel()
        np.testing.assert_allclose(
            found,
            np.tanh(MECHANISMS["coin"].kappa / 2 * np.array([0.3, -1.7, 900.0])),
            rtol=1e-6,
        )


def test_vectors_beyond_the_clip_are_clipped():
    u = torch.tensor([[3.0, -4.0], [0.3, 0.4], [0.0, 0.0]])
    np.testing.assert_allclose(
        imvu.logits(MECHANISMS["coin"], u).numpy(),
        2.0 * np.array([[0.6, -0.8], [0.3, 0.4], [0, 0]]),
        rtol=1e-6,
    )
    wide = u.double()
    imvu.logits(MECHANISMS["clamped"], wide)
    assert torch.equal(wide, u.double()), "the argument was changed"


def test_privacy_depends_on_the_product_of_eps_and_beta():
    pairs = ((1.0, 32.0), (0.5, 64.0), (0.25, 128.0))
    u = torch.from_numpy(seed_tree(0).standard_normal((5, 50)))
    for accountant in ("fisher-balle", "exact-classic"):
        assert (
            len(
                {
                    Imvu(1.0, e, b)
                    .guarantee(rounds=3, delta=1e-5, accountant=accountant, d=7)
                    .eps
                    for e, b in pairs
                }
            )
            == 1
        )
    drawn = [
        np.concatenate(list(imvu.draw_symbols(Imvu(1.0, e, b), u, seed_tree(1))))
        for e, b in pairs
    ]
    assert (
        (drawn[0] == drawn[1]).all()
        and (drawn[0] == drawn[2]).all()
        and len({Imvu(1.0, e, b).step for e, b in pairs}) == 3
    )


# ---- guarantees


def test_the_accountants_keep_their_order():
    mechanism, release = Imvu(1.0, 0.5, 2.0), dict(rounds=20, delta=1e-5)
    assert set(imvu.ACCOUNTANTS) == {"fisher", "exact", "pld"}
    for relation in imvu.RELATIONS:

        def eps(accountant, d=None):
            return mechanism.guarantee(
                **release, relation=relation, accountant=accountant, d=d
            ).eps

        assert (
            eps("exact-balle", 1)
            < eps("exact-balle", 100)
            <= eps("exact-balle")
            == eps("fisher-balle")
            < eps("fisher-classic")
        )
    assert (
        mechanism.guarantee(**release).eps
        < mechanism.guarantee(**release, relation="replace").eps
    )
    sigma = math.sqrt(8 / math.pi)
    pld = mechanism.guarantee(**release, accountant="pld").eps
    assert mechanism.guarantee(**release).eps < pld
    assert gaussian_delta(sigma, pld, 20) <= 1e-5


def test_a_guarantee_names_what_it_is():
    g = Imvu(1.0, 1.0).guarantee(
        rounds=2,
        delta=1e-5,
        unit="example",
        relation="replace",
        accountant="exact-classic",
        d=3,
    )
    assert (g.unit, g.relation, g.sampling, g.trust, g.scope, g.accountant) == (
        "example",
        "replace",
        "none",
        "local",
        "total",
        "exact-classic",
    )
    table = MECHANISMS["table"]
    assert math.isclose(table.fisher, fisher_supremum(table.table)) and table.fisher < 1
    weaker, coin = (
        m.guarantee(rounds=2, delta=1e-5).eps for m in (table, Imvu(1.0, 1.0, 2.0))
    )
    assert weaker < coin, "no private table informs more than randomised response"


def test_the_game_is_scored_by_the_true_likelihood():
    """E[exp(-score)] = 1 where the vector is present, for coins and tables, both
    relations.
    """
    for name, mechanism in MECHANISMS.items():
        for relation in imvu.RELATIONS:
            score = mechanism.play(
                relation, True, 20_000, seed_tree(0, name, relation), d=2, rounds=2
            )["likelihood"]
            inverse = np.exp(-score)
            assert abs(inverse.mean() - 1) < radius(inverse.std(), len(inverse), 6)
    assert {args["d"] for _, args, _ in imvu.AUDITED} == {1, 16}


# ---- settings


def test_a_table_is_in_the_fingerprint_and_its_notes_are_not():
    table = mvu.solve(1.0)
    twin = mvu.Table(1.0, table.alphabet, table.rows, log="another way")
    here, same, other = (
        Imvu(1.0, 1.0, 2.0, table=t).fingerprint for t in (table, twin, thin(0.2))
    )
    assert here == same != other


@pytest.mark.parametrize(
    "change, name",
    [
        (dict(beta=1e60), "beta is"),
        (dict(eps=1e-60), "beta is"),
        (dict(table=mvu.solve(2.0)), "eps is"),
        (dict(table=mvu.solve(1.0, 3)), "3 rows"),
    ],
)
def test_settings_out_of_range_are_refused(change, name):
    with pytest.raises(ValueError, match=name):
        Imvu(**(dict(clip_norm=1.0, eps=1.0) | change))
