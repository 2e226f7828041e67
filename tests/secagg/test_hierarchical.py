"Sums of sums: exact over the survivors, and one lost session takes nobody with it."

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import drawn
from tables import tabled

from dpcomm.core.random import seed_tree
from dpcomm.mechanisms.contract import mechanism
from dpcomm.secagg import errors, hierarchical
from dpcomm.secagg.ring import Ring
from dpcomm.secagg.session import graph_parameters, overhead

X = seed_tree(0, "many").integers(-60, 61, (36, 3))


@drawn
@given(st.integers(6, 10**6), st.integers(5, 10**4))
def test_sizes_are_few_and_equal(n, most):
    sizes = hierarchical.session_sizes(n, most)
    assert sum(sizes) == n and max(sizes) <= most and max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-n // most) and min(sizes) >= hierarchical.LEAST


@tabled("n, most", [(4, 3), (5, 3), (5, 4)])
def test_a_session_of_two_is_refused_at_set_up(n, most):
    "Refused before anything is played, with a size that does."
    says = (
        f"most is {most} with {n} clients, which gives sessions of 2.*most={most + 1}"
    )
    with pytest.raises(ValueError, match=says):
        hierarchical.sum_of_sums(np.ones((n, 1), int), Ring(8), most, seed=0)
    assert hierarchical.sum_of_sums(np.ones((4, 1), int), Ring(8), 4, seed=0).total == [
        4
    ]


def test_the_sum_of_sums_may_leave_the_ring():
    "Entries of 60 in a ring of 2048 values: 12 clients fit, 36 do not."
    x, ring = np.full((36, 3), 60), Ring(11)
    found = hierarchical.sum_of_sums(ring.wrap(x), ring, 12, seed=0)
    assert found.total.tolist() == [36 * 60] * 3 and not found.lost
    assert found.survivors == tuple(range(36)) and isinstance(
        found, hierarchical.ManyResult
    )


def test_a_lost_session_costs_its_own_clients_only():
    ring, sessions = Ring(14), hierarchical.assign(36, 12, 0)
    drop = {int(i): "masked" for i in sessions[1][:8]} | {int(sessions[0][5]): "share"}
    found = hierarchical.sum_of_sums(ring.wrap(X), ring, 12, seed=0, drop=drop)
    assert list(found.lost) == [1] and "clients are left" in found.lost[1]
    left = {*range(36)} - {*sessions[1].tolist(), int(sessions[0][5])}
    assert found.survivors == tuple(sorted(left))
    assert found.total.tolist() == X[sorted(left)].sum(0).tolist()
    assert all((a == b).all() for a, b in zip(found.sessions, sessions))


@tabled("wrong", [[7000, 0, 0], [1, 2], [0.5, 1, 1], None, "text", [2**70, 0, 0]])
def test_one_bad_vector_ends_its_own_session(wrong):
    "Beyond the bound, of another length, no numbers; the client is named by its id."
    ring, sessions = Ring(14), hierarchical.assign(36, 12, 0)
    bad = int(sessions[2][3])
    words = [wrong if i == bad else ring.wrap(x) for i, x in enumerate(X)]
    found = hierarchical.sum_of_sums(words, ring, 12, seed=0)
    left = sorted({*range(36)} - {*sessions[2].tolist()})
    assert list(found.lost) == [2] and f"client {bad}: " in found.lost[2]
    assert found.survivors == tuple(left)
    assert found.total.tolist() == X[left].sum(0).tolist()


def test_a_sum_that_leaves_the_ring_is_refused():
    "24 times 20 is 480; in eight bits it wraps to -32."
    x, ring = np.full((24, 1), 20), Ring(8)
    with pytest.raises(errors.RingOverflow, match="largest is 480; 8 bits hold"):
        hierarchical.sum_of_sums(x, ring, 24, seed=0, largest=20)
    with pytest.raises(ValueError, match="larger than the declared 5: clip"):
        hierarchical.sum_of_sums(x, ring, 24, seed=0)
    assert hierarchical.sum_of_sums(x // 4, ring, 24, seed=0).total == [120]


def test_members_are_drawn_and_not_in_the_order_of_ids():
    """200 colluders of 4,000 with ids in a row, one in the mean in a session of 20. Eleven
    in any session have a chance below 200 * 8.3e-10 = 1.7e-7, and the seeds are fixed.
    """
    for seed in (0, 1):
        sessions = hierarchical.assign(4000, 20, seed)
        assert sorted(np.concatenate(sessions).tolist()) == list(range(4000))
        assert [len(s) for s in sessions] == [20] * 200
        assert max(((1000 <= s) & (s < 1200)).sum() for s in sessions) < 11
    again = hierarchical.assign(4000, 20, 0), hierarchical.assign(4000, 20, 1)
    assert not all((a == b).all() for a, b in zip(*again))
    fresh = hierarchical.assign(4000, 20), hierarchical.assign(4000, 20)
    assert not all((a == b).all() for a, b in zip(*fresh))
    found = hierarchical.sum_of_sums(Ring(14).wrap(X), Ring(14), 12)
    assert not all(
        (a == b).all() for a, b in zip(found.sessions, hierarchical.assign(36, 12, 0))
    )


def test_words_of_a_mechanism_may_be_any_ring_element():
    "Every session needs the shares that the mechanism counts on."
    m = mechanism("ddgauss", clip_norm=1.0, sigma=0.1, n_clients=12, tolerance=0.1)
    words = [m.summand(torch.full((3,), 0.1)) for _ in range(24)]
    sessions = hierarchical.assign(24, 12, 0)
    drop = {int(sessions[0][0]): "masked"} | {int(i): "share" for i in sessions[1][:2]}
    found = hierarchical.sum_of_sums(words, m, 12, rates=(0.2, 0), seed=0, drop=drop)
    assert list(found.lost) == [1] and "10 clients are left; 11 must" in found.lost[1]
    assert len(found.survivors) == 11
    total = m.from_sum(found.total, 11, 3)
    assert (total - 1.1).abs().max() < 1.0


def test_costs_are_the_formulas():
    n, d = 40, 50
    cost, g = hierarchical.session_cost(n, d, 20), graph_parameters(n, 0.1, 0.05)
    few = dict(committee=g.committee, signatures=g.signatures)
    bits = overhead(n, g.neighbours, d, 20, g.threshold, g.quorum, **few)
    assert cost["up"] == sum(b.total // 8 for k, b in bits.items() if k[1] == "up")
    assert (
        0 < cost["down"] <= sum(b.total // 8 for k, b in bits.items() if k[1] == "down")
    )
    assert cost["clients"] > 0 and cost["server"] > 0 and cost["n"] == n
