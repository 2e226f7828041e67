"""What guards `dpcomm.privacy.shuffling`: curves by listing all sequences in fractions, the
published numbers, the attack from below, and deployments that name a shuffler.
"""

import math

import numpy as np
import pytest
from scipy.stats import binom
from tables import tabled

from dpcomm import Deployment
from dpcomm.core.random import seed_tree
from dpcomm.mechanisms.contract import mechanism
from dpcomm.privacy import audit, shuffling
from dpcomm.privacy.guarantee import Guarantee
from dpcomm.privacy.losses import compose, gaussian_losses, listed_losses
from dpcomm.privacy.shuffling import Shuffled, shuffled_losses


def ends(release, delta, rounds=1):
    found = compose([(release, rounds)], delta)
    assert 0 <= found.low <= found.eps
    return found.low, found.eps


def curve(pair, eps):
    p, q, _, _ = pair.tails(np.array([float(eps)]))
    return float(np.exp(p[0]) - np.exp(eps + q[0]))


@tabled(
    "eps, n, delta",
    [(1.0, 300, 1e-9), (4.0, 3000, 1e-3), (0.01, 5000, 1e-3)] + [(40.0, 1000, 1e-9)],
)
def test_shuffled_responses_are_below_the_bound_and_near_it(eps, n, delta):
    "Randomised response with as many symbols as e^eps says, of which one is counted."
    c = np.arange(n + 1)
    law = binom.pmf(c, n, 1 / (2 + math.expm1(eps)))
    seen, tilt = law > 1e-300, math.exp(eps) * c + (n - c) * math.exp(-eps)
    p, q = (law * tilt / n)[seen], law[seen]
    attack = ends(listed_losses(p / p.sum(), q / q.sum()), delta)[0]
    bound = ends(shuffled_losses(eps, n), delta)[1]
    assert attack <= bound
    assert bound <= 1.5 * attack or eps == 40.0


def test_cohorts_of_a_fixed_size_gain_what_the_client_is_away():
    every, some = (shuffled_losses(2.0, 1000, q) for q in (1.0, 0.1))
    p, q = every.pairs[0], some.pairs[0]
    for eps in (0.05, 0.2):
        assert curve(q, eps) == pytest.approx(0.1 * curve(p, eps), rel=1e-6)
    assert ends(some, 1e-6, 100)[1] < 0.5 * ends(every, 1e-6, 100)[0]


def test_a_list_with_a_shuffler_and_a_secure_sum_is_refused():
    parts = [
        (shuffled_losses(1.0, 1000), 1),
        (gaussian_losses(1.0, relation="local", trust="secagg"), 1),
    ]
    with pytest.raises(ValueError, match="trust"):
        compose(parts, 1e-6)


SQKR = mechanism("sqkr", clip_norm=1.0, nbits=1, eps=2.0)
PURE = dict(sqkr=dict(nbits=1), pm={}, vqsgd={}, privquant=dict(levels=2, rule="best"))


@tabled("name", list(PURE))
def test_deployments_with_a_shuffler_let_messages_spend_more(name):
    s = Deployment(2000, 2000, 5, 1e-6, "none", trust="shuffler")
    made = s.calibrate(name, 1.0, **PURE[name])
    found = s.guarantee(made)
    assert made.eps > 1.0 > 0.99 < found.eps * 1.005 and found.eps <= 1.0
    assert found.trust == "shuffler" and "2,000 messages" in found.note
    local = Deployment(2000, 2000, 5, 1e-6, "none", trust="local")
    assert local.guarantee(made).eps == pytest.approx(5 * made.eps)


def test_deployments_count_the_messages_that_arrive_and_the_rounds():
    s = dict(n_clients=5000, cohort=500, rounds=8, delta=1e-6, trust="shuffler")
    fixed = Deployment(sampling="fixed", **s).guarantee(SQKR)
    assert (fixed.sampling, fixed.q, fixed.rounds) == ("fixed", 0.1, 8)
    assert fixed.eps == compose([(shuffled_losses(2.0, 500, 0.1), 8)], 1e-6).eps
    fewer = Deployment(sampling="fixed", dropouts=0.5, tolerance=0.5, **s).guarantee(
        SQKR
    )
    assert fewer.eps == compose([(shuffled_losses(2.0, 250, 0.1), 8)], 1e-6).eps
    capped = Deployment(sampling="fixed", visits=2, **s).guarantee(SQKR)
    assert capped.eps == compose([(shuffled_losses(2.0, 500), 2)], 1e-6).eps
    poisson = Deployment(sampling="poisson", **s).guarantee(SQKR)
    assert poisson.trust == "local" and 15.99 < poisson.eps <= 16
    pure = Deployment(5000, 5000, 8, 0.0, "none", trust="shuffler").guarantee(SQKR)
    assert pure.trust == "local" and pure.eps == 16.0


def test_only_pure_local_mechanisms_gain():
    s = Deployment(1000, 1000, 3, 1e-6, "none", trust="shuffler")
    signs = mechanism("signsgd", clip_norm=1.0, sigma=3.0)
    assert s.guarantee(signs).trust == "local"
    sums = mechanism("skellam", clip_norm=1.0, sigma=3.0, n_clients=1000)
    with pytest.raises(ValueError, match="secagg"):
        s.guarantee(sums)
    with pytest.raises(ValueError, match="no theorem covers"):
        Guarantee(1, 1e-6, "client", "local", "poisson", "pld", "total", "shuffler")


# ---- the audit


def test_deployments_audit_shuffled_rounds():
    s = Deployment(8, 8, 2, 1e-2, "none", trust="shuffler")
    seen, promised = s.audit(SQKR, 20_000, seed_tree(0, "a"), rounds=2)
    assert promised.trust == "shuffler" and promised.rounds == 2
    assert 0.4 * promised.eps < seen.eps <= promised.eps


def test_a_shuffle_of_too_many_is_caught(monkeypatch):
    own = shuffling._clones
    monkeypatch.setattr(shuffling, "_clones", lambda eps, n: own(eps, 3 * n))
    case = audit.Case(Shuffled(SQKR, 12), "local", {}, 30_000)
    assert case.run(30_000, 1e-2, seed=3)[-1].refuted


def test_rounds_of_a_shuffle_are_composed():
    low, high = ends(SQKR.losses(shuffled=12), 1e-2, rounds=5)
    assert low <= Shuffled(SQKR, 12).guarantee(5, 1e-2).eps <= high
