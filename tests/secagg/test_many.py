"Sums of sums: exact over the survivors, and one lost session takes nobody with it."

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import drawn

from dpcomm.core.chance import seed_tree
from dpcomm.secagg import many
from dpcomm.secagg.ring import Ring
from dpcomm.secagg.session import graph_parameters, overhead

X = seed_tree(0, "many").integers(-60, 61, (36, 3))


@drawn
@given(st.integers(1, 10**6), st.integers(1, 10**4))
def test_sizes_are_few_and_equal(n, most):
    sizes = many.session_sizes(n, most)
    assert sum(sizes) == n and max(sizes) <= most and max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-n // most)


@pytest.mark.parametrize("n, most", [(0, 5), (5, 0), (2.5, 2)])
def test_bad_sizes_are_refused(n, most):
    with pytest.raises((ValueError, TypeError), match="n|most"):
        many.session_sizes(n, most)


def test_the_sum_of_sums_may_leave_the_ring():
    "Entries of 60 in a ring of 2048 values: 12 clients fit, 36 do not."
    x, ring = np.full((36, 3), 60), Ring(11)
    found = many.sum_of_sums(ring.wrap(x), ring, 12, seed=0)
    assert found.total.tolist() == [36 * 60] * 3 and not found.lost
    assert found.survivors == tuple(range(36)) and isinstance(found, many.ManyResult)


def test_a_lost_session_costs_its_own_clients_only():
    drop = {i: "masked" for i in range(12, 20)} | {2: "masked"}
    ring = Ring(14)
    found = many.sum_of_sums(ring.wrap(X), ring, 12, seed=0, drop=drop)
    assert list(found.lost) == [1] and "clients are left" in found.lost[1]
    left = [i for i in range(36) if i != 2 and not 12 <= i < 24]
    assert found.survivors == tuple(left)
    assert found.total.tolist() == X[left].sum(0).tolist()


def test_fresh_secrets_give_the_same_sum():
    ring = Ring(14)
    found = many.sum_of_sums(ring.wrap(X), ring, 18)
    assert found.total.tolist() == X.sum(0).tolist()


def test_costs_are_the_formulas():
    n, d = 40, 50
    cost, g = many.session_cost(n, d, 20), graph_parameters(n, 0.1, 0.05)
    few = dict(committee=g.committee, signatures=g.signatures)
    bits = overhead(n, g.neighbours, d, 20, g.threshold, g.quorum, **few)
    assert cost["up"] == sum(b.total // 8 for k, b in bits.items() if k[1] == "up")
    assert (
        0 < cost["down"] <= sum(b.total // 8 for k, b in bits.items() if k[1] == "down")
    )
    assert cost["clients"] > 0 and cost["server"] > 0 and cost["n"] == n
