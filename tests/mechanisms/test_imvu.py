"""I-MVU from its parts: closed form, divergences, privacy. What every mechanism must do
is in test_conformance, coins are in test_exact_coins.

Statistical tests have false-alarm rate 1e-6 and fixed seeds.
"""

import math
from types import SimpleNamespace

import numpy as np
import torch
from scipy.special import logsumexp
from tables import tabled

from dpcomm.core.random import seed_tree
from dpcomm.mechanisms import imvu
from dpcomm.mechanisms.imvu import Imvu, closed_form, fisher_supremum, pmf
from dpcomm.privacy.accounting import gaussian_delta


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


# ---- divergences


@tabled("i", range(8))
def test_the_fisher_bound_holds_over_all_reals_and_for_every_table(i):
    rng = seed_tree(0, "bound", i)
    rows = rng.dirichlet(np.ones(2 + i % 5) * rng.uniform(0.3, 3), 2) + 1e-4
    table = SimpleNamespace(rows=tuple(map(tuple, rows / rows.sum(1, keepdims=True))))
    M = fisher_supremum.__wrapped__(table)
    for _ in range(30):
        (x, y), a = rng.uniform(-1, 2, 2), 1 + 10 ** rng.uniform(-1.5, 1.5)
        bound = a / 2 * M * (x - y) ** 2
        assert renyi(a, pmf(x, table), pmf(y, table)) <= bound * (1 + 1e-7) + 1e-12


# ---- the mechanism


def test_privacy_depends_on_the_product_of_eps_and_beta():
    twins = [Imvu(1.0, e, b) for e, b in ((1.0, 32.0), (0.5, 64.0), (0.25, 128.0))]
    u = torch.from_numpy(seed_tree(0).standard_normal((5, 50)))
    assert len({m.guarantee(3, 1e-5, d=7).eps for m in twins}) == 1
    drawn = [m.symbols(u, seed_tree(1)) for m in twins]
    assert (drawn[0] == drawn[1]).all() and (drawn[0] == drawn[2]).all()


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
