"""index_codes: what a code can save, on cases small enough to enumerate."""

import math

import numpy as np
import pytest
import torch

from dpcomm.core.random import seed_tree
from dpcomm.datasets import images
from dpcomm.experiments.dprec import index_codes
from dpcomm.experiments.dprec.index_codes import BITS, K
from dpcomm.mechanisms.rec import Rec
from dpcomm.training import models
from dpcomm.training.federated import Config


def fresh_state():
    return {"counts": np.full(K, 0.5), "sum": 0.0, "n": 0}


def test_a_message_tells_nothing_or_everything():
    even, certain = np.zeros((1, K)), np.where(np.arange(K) == 3, 1000.0, 0.0)[None]
    two = np.where(np.arange(K) < 2, 0.0, -np.inf)[None]
    assert index_codes.told(even) == pytest.approx(0, abs=1e-12)
    assert index_codes.told(certain) == pytest.approx(BITS)
    assert index_codes.told(two) == pytest.approx(BITS - 1)


@pytest.mark.parametrize("s", [0.1, 0.8])
def test_the_limit_is_kept_and_nearly_reached_by_short_updates(s):
    saved = index_codes.told(s * seed_tree(0).standard_normal((40_000, K)))
    spare = 5 * saved.std() / 200
    assert 0.5 * index_codes.limit(s) < saved.mean() <= index_codes.limit(s) + spare


def test_an_update_is_read_by_length_and_part_along():
    m = Rec(100.0, 2.0, BITS, (2, 3))
    u, v = torch.tensor([[6.0, 8.0, 0.0, 0.0, 4.0]]), torch.tensor([3.0, 0, 0, 5.0, 0])
    lengths, parts = index_codes.along(u, v, m)
    assert lengths.tolist() == [[5.0, 2.0]] and parts.tolist() == [[3.0, 0.0]]
    halved, _ = index_codes.along(2 * u, v, Rec(float(u.norm()), 2.0, BITS, (2, 3)))
    assert halved == pytest.approx(lengths)


def test_a_long_update_chooses_its_own_direction():
    n = 400
    bits, rank, b, mine = index_codes.choose(
        np.full(n, 1e4), np.full(n, 1e4), seed_tree(0)
    )
    assert (rank == 0).mean() > 0.99 and bits.mean() > 0.99 * BITS
    assert np.array_equal(mine[rank == 0], b.max(1)[rank == 0])
    bits, rank, b, mine = index_codes.choose(np.zeros(n), np.zeros(n), seed_tree(0))
    assert (
        abs(bits).max() < 1e-9 and abs(rank.mean() - (K - 1) / 2) < 5 * K / 12**0.5 / 20
    )


def test_a_round_is_priced_before_it_is_learnt():
    state, shape = fresh_state(), (4, 50)
    lengths = np.full(shape, 4.0)
    first = dict(
        zip(index_codes.CODES, index_codes.price(state, lengths, lengths, seed_tree(0)))
    )
    assert first["tilt"] == pytest.approx(0, abs=1e-9) == first["rank"]
    assert 0 < first["oracle"] <= first["told"] + 0.2
    assert state["n"] == 200 and state["counts"].sum() == K / 2 + 200
    for i in range(20):
        later = index_codes.price(state, lengths, lengths, seed_tree(1, i))
    later = dict(zip(index_codes.CODES, later))
    assert later["tilt"] > 1 and later["rank"] > 1


def test_evenness_knows_even_from_uneven():
    balanced = np.repeat(np.arange(K), 10)
    p, plain, corrected, code = index_codes.evenness(balanced)
    assert p == pytest.approx(1) and plain == pytest.approx(BITS)
    assert corrected == pytest.approx(
        BITS + (K - 1) / (2 * len(balanced) * math.log(2))
    )
    assert code > BITS
    p, plain, _, code = index_codes.evenness(np.zeros(1000, dtype=int))
    assert p < 1e-9 and plain == 0 and 0 < code < 1
    assert len(index_codes.TESTS) == 4


def test_the_adaptive_code_is_the_product_of_its_guesses():
    k, counts, bits = np.array([3, 3, 5, 3]), np.full(K, 0.5), 0.0
    for index in k:
        bits -= math.log2(counts[index] / counts.sum())
        counts[index] += 1
    assert index_codes.evenness(k)[3] == pytest.approx(bits / 4)


def test_indices_are_read_from_messages_and_are_even_only_with_fresh_seeds():
    m = Rec(1e6, 1.0, BITS, (8,) * 60)
    updates = torch.from_numpy(seed_tree(0, "u").standard_normal((3, 480))).float()
    fresh, public = index_codes.both_indices(m, updates, 0, 20, 50)
    assert len(fresh) == len(public) == 1000
    assert index_codes.evenness(fresh)[0] > 1e-6 > index_codes.evenness(public)[0]
    few = Rec(1e6, 1.0, BITS, (8,) * 50)
    again = index_codes.fresh_indices(few, updates, 0, 20)
    assert np.array_equal(fresh, again) and fresh.max() < K
    last = updates[0, 392:400]
    one = index_codes.public_indices(last, 0, 1000)
    longer = index_codes.public_indices(7 * last, 0, 1000)  # made three long anyway
    assert np.array_equal(one, public) and (one == longer).mean() > 0.99


def test_a_priced_run_depends_on_its_seed_and_not_on_threads():
    found = images.load("digits")
    parts = images.iid(len(found.y), 8, seed_tree(0))
    clients = images.Federation(found, parts, "even")
    net = models.build("linear", seed_tree(0, "init"))
    d = sum(p.numel() for p in net.parameters())
    m = Rec(1e6, 0.03, BITS, (d // 2, d - d // 2))
    config = Config(rounds=3, cohort=3, sampling="replacement", server="sgd", lr=0.05)

    def run(seed, workers):
        return index_codes.priced_run(m, net, clients, config, seed, workers)

    (history, final, updates), (again, same, _), (other, *_) = (
        run(0, 1),
        run(0, 3),
        run(1, 1),
    )
    assert [h["round"] for h in history] == [2, 3] and history == again != other
    assert final == same and final["uplink_bits"] == 9 * m.bits(d).content
    assert set(index_codes.CODES) < set(history[0]) and updates.shape == (3, d)
