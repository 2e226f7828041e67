"""rec: what is sent, by which law, at what cost, and what the paper's accountant says
of it.
"""

import math
import struct

import numpy as np
import pytest
import torch
from laws import ALARM, fit, radius, same_law
from scipy import special, stats
from tables import tabled

from dpcomm.core.random import Insecure, derive, seed_tree
from dpcomm.core.wire import Message, unpack_bits
from dpcomm.mechanisms import rec
from dpcomm.privacy import rec_accountant


def update(norm: float, d: int = 10) -> torch.Tensor:
    u = seed_tree(0, "update", d).standard_normal(d)
    return torch.from_numpy((norm * u / np.linalg.norm(u)).astype(np.float32))


def read(mechanism, message) -> tuple[int, list]:
    "Seed and indices of a message."
    n = len(mechanism.sizes(message.d))
    return (
        int.from_bytes(message.payload[:4], "little"),
        unpack_bits(message.payload[4:], mechanism.index_bits, n).tolist(),
    )


def candidates(seed: int, group: int, n: int, d: int) -> np.ndarray:
    "All candidates of a group at once, (n, d)."
    pairs = np.arange((d + 1) // 2)
    z = rec.addressed_normals(seed, group, np.arange(n)[:, None], pairs)
    return z.reshape(n, -1)[:, :d]


def probabilities(phi: np.ndarray, z: np.ndarray) -> np.ndarray:
    "softmax of log q(z)/p(z) for q = N(phi, I), p = N(0, I), in float64 and written out."
    phi, z = phi.astype(float), z.astype(float)
    return special.softmax((z**2).sum(1) / 2 - ((z - phi) ** 2).sum(1) / 2)


# ---- what is sent


@tabled("groups", [None, (6, 1, 3)])
@tabled("bits, chunk", [(1, 2**18), (7, 2**18), (5, 4)])
def test_the_chosen_candidate_arrives_bit_for_bit(bits, groups, chunk, monkeypatch):
    monkeypatch.setattr(rec, "CHUNK", chunk)
    m, sizes, std = rec.Rec(2.0, 0.3, bits, groups), groups or (10,), np.float32(0.3)
    for key in range(5):
        sent = m.encode(update(1.5), Insecure(key)).to_bytes()
        message = Message.from_bytes(sent, 10)
        seed, indices = read(m, message)
        assert seed == derive(key, "shared", bits=32)
        assert len(indices) == len(sizes) and all(0 <= k < 2**bits for k in indices)
        chosen = [
            std * candidates(seed, g, 2**bits, d)[k]
            for g, (d, k) in enumerate(zip(sizes, indices))
        ]
        decoded = m.decode(message).numpy()
        assert decoded.tobytes() == np.concatenate(chosen).tobytes()


def test_groups_are_plain_numbers_however_they_are_given():
    "Else two ends with the same groups would refuse each other's messages."
    plain, u = rec.Rec(1.0, 1.0, groups=(6, 4)), torch.linspace(-1, 1, 10)
    for groups in ([6, 4], torch.Size([6, 4]), tuple(np.array([6, 4]))):
        other = rec.Rec(1.0, 1.0, groups=groups)
        assert other == plain and hash(other) == hash(plain)
        assert repr(other) == repr(plain)
        plain.decode(other.encode(u)), other.decode(plain.encode(u))
    assert rec.Rec(1.0, 1.0, groups=()).groups is None


def test_candidates_are_aes_and_box_muller_written_out():
    "Each pair by scalar arithmetic on one block of the cipher, at both ends too."
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    for seed, group, k, pair in (
        (0, 0, 0, 0),
        (123, 1, 5, 9),
        (2**32 - 1, 2**32 - 1, 2**24 - 1, 2**31 - 1),
    ):
        block = struct.pack("<4I", group, k, pair, 0)
        cipher = Cipher(algorithms.AES(seed.to_bytes(16, "little")), modes.ECB())
        a, b = struct.unpack("<2q", cipher.encryptor().update(block))
        radius = math.sqrt(-2 * math.log((abs(a) + 0.5) * 2.0**-63))
        angle = math.pi * b / 2**63
        np.testing.assert_allclose(
            rec.addressed_normals(seed, group, k, pair),
            [radius * math.cos(angle), radius * math.sin(angle)],
            rtol=1e-6,
        )


@tabled("chunk", [1, 3, 64, 2**15])
def test_a_candidate_does_not_depend_on_its_company(chunk, monkeypatch):
    "Groups of odd and even length together, one by one, and in other chunks; so does its weight."
    sizes, groups, ks = (7, 1, 64, 2, 33), (0, 4, 2, 9, 3), (5, 0, 127, 3, 3)
    monkeypatch.setattr(rec, "CHUNK", 2**15)
    alone = [rec.selected([d], 8, [g], [k]) for d, g, k in zip(sizes, groups, ks)]
    phi = update(3.0, 1000).numpy()
    weight = candidates(5, 3, 78, 1000)[[77, 2]].astype(float) @ phi.astype(float)
    monkeypatch.setattr(rec, "CHUNK", chunk)
    together = rec.selected(sizes, 8, groups, ks)
    assert together.tobytes() == np.concatenate(alone).tobytes()
    np.testing.assert_allclose(rec.log_weights(phi, 5, 3, [77, 2]), weight, atol=1e-12)


# ---- the law of the index


@tabled("s, groups", [(0.0, None), (3.0, (6, 1, 3))])
def test_an_encoded_index_is_uniform_and_given_its_candidates_follows_the_weights(
    s, groups
):
    """800 messages: k is uniform, and given the candidates the probability of all heavier
    ones with a uniform share of k's own is uniform.
    """
    m, n = rec.Rec(10.0, 0.5, 3, groups), 800
    sizes = m.sizes(10)
    phis = np.split(update(0.5 * s).numpy() / np.float32(0.5), np.cumsum(sizes)[:-1])
    counts, transformed = np.zeros((len(sizes), 8)), np.zeros((len(sizes), n))
    jitter = seed_tree(1).random((len(sizes), n))
    for key in range(n):
        seed, indices = read(m, m.encode(update(0.5 * s), Insecure(key)))
        for g, (phi, k) in enumerate(zip(phis, indices)):
            counts[g, k] += 1
            p = probabilities(phi, candidates(seed, g, 8, len(phi)))
            heavier = (p > p[k]) | (p == p[k]) & (np.arange(8) < k)
            transformed[g, key] = p[heavier].sum() + jitter[g, key] * p[k]
    for seen, heights in zip(counts, transformed):
        assert fit(seen, np.full(8, 1 / 8)) > ALARM / 8
        assert stats.kstest(heights, "uniform").pvalue > ALARM / 8


def test_the_choice_is_not_in_the_shared_seed(monkeypatch):
    "One seed for all, known to everyone; keys still choose by the weights."
    monkeypatch.setattr(rec, "public_seed", lambda key: 99)
    m, u = rec.Rec(10.0, 0.5, 3), update(0.5)
    found = [read(m, m.encode(u, Insecure(key))) for key in range(1500)]
    assert {seed for seed, _ in found} == {99}
    counts = np.bincount([k for _, (k,) in found], minlength=8)
    assert fit(counts, probabilities(u.numpy() / 0.5, candidates(99, 0, 8, 10))) > ALARM


# ---- the law of the estimate


def test_many_groups_at_once_have_the_law_of_one_after_another(monkeypatch):
    "Ten groups of 8 entries and one of 3, drawn together and one by one."
    monkeypatch.setattr(rec, "MANY", 10)
    m = rec.Rec(1e6, 0.5, 3, (8,) * 10 + (3,))
    u = torch.from_numpy(seed_tree(0, "many").standard_normal(83)).float() * 0.4
    rows = [m.simulate(u[None], [seed_tree(1, i)]) for i in range(1000)]
    together = torch.cat(rows).double()
    bias, variance = (x[0].double().numpy() for x in m.moments(u[None]))
    error = (together.mean(0) - u).numpy() - bias
    assert (np.abs(error) < radius(np.sqrt(variance), 1000, 83)).all()
    monkeypatch.setattr(rec, "MANY", 10**9)
    apart = m.simulate(u.expand(700, -1), seed_tree(2)).double()
    for at in (0, 80):
        part = u[at : at + 3].double()
        across = torch.stack([part[1], -part[0], 0 * part[0]])
        for axis in (part, across):
            looks = [rows[:, at : at + 3] @ axis for rows in (together, apart)]
            assert same_law(*looks) > ALARM / 4


# ---- closed forms


@pytest.mark.filterwarnings("error::RuntimeWarning")
@tabled("K", [1, 2, 2**7, 2**24, 2**53])
@tabled("s", [0.0, 1e-3, 0.99, 1.0, 2.0, 10.0, 1e3, 1e6])
def test_selection_moments_at_the_ends(s, K):
    "Probabilities sum to one; one candidate is always chosen; without an update all are alike."
    first, second, third, last = (rec.selection_moment(r, s, K) for r in (1, 2, 3, 20))
    assert first == pytest.approx(1, abs=1e-13)
    if K == 1 or s == 0:
        assert second == pytest.approx(1 / K, rel=1e-12)
        assert third == pytest.approx(K**-2.0, rel=1e-12)
        assert last == pytest.approx(K**-19.0, rel=1e-9)
    low, most = 1 - 1e-12, 1 + 1e-12
    assert low / K <= second <= most and low * K**-2.0 <= third <= second * most
    # Jensen: E sum p^2 <= E alpha^2 / K
    assert second <= min(1.0, math.exp(min(s * s, 700)) / K) * most
    if s >= 1e3:  # the largest of K normals stands alone
        assert last > 1 - 200 / s


# ---- the paper's accountant

RUN = dict(delta=1e-3, n_clients=100, cohort=10)


@tabled("sampling, q", [("replacement", 0.1), ("poisson", 0.1), ("none", 1.0)])
def test_what_is_stated_without_a_choice_is_proved_and_names_its_run(sampling, q):
    m, run = rec.Rec(0.5, 1.0), dict(RUN, rounds=20, sampling=sampling)
    found, balle = m.guarantee(**run), m.guarantee(**run, accountant="exact-balle")
    tight = balle if sampling == "none" else m.guarantee(**run, accountant="pld-exact")
    assert found == tight and found.eps <= balle.eps
    assert "gaps" not in found.note
    assert (found.rounds, found.q) == (20, q) and "of 20 rounds" in str(found)
    alone = m.guarantee(rounds=20, delta=1e-3, accountant="exact-balle", n_clients=1)
    assert alone.q == 1.0
    notes = [m.guarantee(**(run | dict(delta=d))).note for d in (0.01, 0.0099)]
    assert ["delta is at least 1/100" in note for note in notes] == [True, False]


def test_the_versions_are_algorithm_7_written_out():
    "Against the binomial sum of (62) with plain floats."
    c, slots, n, bits, delta = 0.3, 1000, 50, 60, 1e-2

    def D(order):
        ks, q = range(order + 1), 1 / n
        drawn = [math.comb(order, k) * q**k * (1 - q) ** (order - k) for k in ks]
        moments = [math.exp(k * (k - 1) * c * c / 2) for k in ks]
        total = math.fsum(a * b for a, b in zip(drawn, moments))
        return slots * math.log(total) / (order - 1)

    left = math.log(delta - 12 * slots * math.exp(c * c) / 2**bits)
    printed = {
        "arxiv": lambda l: 2 * D(l + 1),
        "iclr": lambda l: (l - 1) / l * D(l) + D(l + 1),
        "iclr-shifted": lambda l: D(l + 1) + (l + 1) / l * D(l + 2),
    }
    for version, loss in printed.items():
        by_hand = min(loss(l) - left / l for l in range(2, 80))
        found = rec.theorem1_epsilon(c, slots, n, bits, delta, version)
        assert found.eps == pytest.approx(by_hand, rel=1e-9)


def test_what_the_choice_lacks_of_exact_is_paid_for_or_said_first():
    "24 bits, 10 groups, 100 messages: t = 1000 2^-27, which at eps = 5 is a delta of 1.1e-3."
    many = rec.Rec(0.05, 1.0, 24, groups=(1,) * 10)
    run, gap = dict(rounds=100, sampling="none"), 1000 * 2.0**-27
    assert (1 + math.exp(5)) * gap == pytest.approx(1.1e-3, rel=0.02)

    def exact(delta):
        run = rec_accountant.RecRun(100, 1, 2**24, 10, "local")
        return rec_accountant.exact_epsilon(0.05, run, delta, "balle").eps

    paid = many.guarantee(delta=0.01, **run)
    assert not paid.premises and paid.delta == 0.01 and exact(0.01) < paid.eps
    # as much of delta is set aside as the choice costs
    assert paid.eps >= exact(0.01 - (1 + math.exp(paid.eps)) * gap)
    short = many.guarantee(delta=1e-5, **run)
    assert "as if the choice of a candidate were exact" in short.premises["proof"]
    assert not short.theorem
