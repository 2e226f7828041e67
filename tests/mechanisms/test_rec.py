"""rec: what is sent, by which law, at what cost, and what the paper's accountant says
of it.
"""

import dataclasses
import math
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from laws import ALARM, fit, radius, same_law
from scipy import special, stats
from tables import tabled
from test_conformance import directions

from dpcomm.core.chance import Insecure, derive, seed_tree
from dpcomm.core.wire import Message, unpack_bits
from dpcomm.mechanisms import rec
from dpcomm.privacy import null_messages

GROUPS = {"one group": None, "three groups": (6, 1, 3)}
PINNED = [-0.551711916923523, -0.4290156066417694, -0.0463981032371521]
parted = pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)


def update(norm: float, d: int = 10) -> torch.Tensor:
    u = seed_tree(0, "update", d).standard_normal(d)
    return torch.from_numpy((norm * u / np.linalg.norm(u)).astype(np.float32))


def read(mechanism: rec.Rec, message: Message) -> tuple[int, list]:
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
    """softmax of log q(z)/p(z) for q = N(phi, I), p = N(0, I), in float64 and written
    out.
    """
    phi, z = phi.astype(float), z.astype(float)
    return special.softmax((z**2).sum(1) / 2 - ((z - phi) ** 2).sum(1) / 2)


# ---- what is sent


@parted
@pytest.mark.parametrize("bits", [1, 5, 7])
@pytest.mark.parametrize("chunk", [4, 2**18])
def test_the_chosen_candidate_arrives_bit_for_bit(bits, groups, chunk, monkeypatch):
    monkeypatch.setattr(rec, "CHUNK", chunk)
    mechanism, std = rec.Rec(2.0, 0.3, bits, groups), np.float32(0.3)
    for key in range(10):
        message = Message.from_bytes(
            mechanism.encode(update(1.5), Insecure(key)).to_bytes(), len(update(1.5))
        )
        seed, indices = read(mechanism, message)
        sizes = groups or (10,)
        assert len(indices) == len(sizes) and all(0 <= k < 2**bits for k in indices)
        chosen = [
            std * candidates(seed, g, 2**bits, d)[k]
            for g, (d, k) in enumerate(zip(sizes, indices))
        ]
        assert (
            mechanism.decode(message).numpy().tobytes()
            == np.concatenate(chosen).tobytes()
        )


def test_groups_are_plain_numbers_however_they_are_given():
    "Else two ends with the same groups would refuse each other's messages."
    plain, u = rec.Rec(1.0, 1.0, groups=(6, 4)), torch.linspace(-1, 1, 10)
    for groups in ([6, 4], torch.Size([6, 4]), tuple(np.array([6, 4]))):
        other = rec.Rec(1.0, 1.0, groups=groups)
        assert other == plain and hash(other) == hash(plain)
        assert repr(other) == repr(plain)
        assert torch.equal(
            plain.decode(other.encode(u, Insecure(3))),
            other.decode(plain.encode(u, Insecure(3))),
        )
    assert rec.Rec(1.0, 1.0, groups=()).groups is None
    for wrong, told in (([6, 0], "groups is 0"), (6.0, "groups is 6.0")):
        with pytest.raises(ValueError, match=told):
            rec.Rec(1.0, 1.0, groups=wrong)


@parted
def test_the_shared_seed_is_32_bits_of_the_key(groups):
    mechanism, seeds = rec.Rec(2.0, 0.3, 6, groups), []
    for key in range(200):
        seed, indices = read(mechanism, mechanism.encode(update(0.2), Insecure(key)))
        assert seed == derive(key, "shared", bits=32)
        seeds.append(seed)
    assert len(set(seeds)) == 200 and max(seeds) > 2**31


def test_payload_is_a_seed_and_packed_indices():
    mechanism = rec.Rec(1.0, 0.5, 7, (2,) * 8)
    message = mechanism.encode(torch.zeros(16))
    assert len(message.payload) == 4 + 7, "eight indices of seven bits fill seven bytes"
    bits = mechanism.bits(16)
    assert (bits.payload, bits.shared_randomness, bits.content) == (56, 32, 88)
    assert (
        rec.Rec(1.0, 0.5, 24).bits(16).payload == 24
        and rec.Rec(1.0, 0.5, 1).bits(16).payload == 8
    )


def test_candidates_are_pinned():
    """A change of the generator would make stored messages unreadable; another library
    may round the last bit otherwise.
    """
    np.testing.assert_allclose(
        rec.selected([3], 123, [1], [5]), PINNED, rtol=2e-7, atol=0
    )


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


def test_candidates_are_standard_normal():
    """A million entries of 1,000 candidates: Kolmogorov-Smirnov, the four first moments,
    and the products of neighbours by entry, candidate, group and seed; false-alarm rate
    1e-6 over twenty looks.
    """
    z = candidates(5, 0, 1000, 1000).astype(float)
    level = ALARM / 20
    assert stats.kstest(z.ravel(), "norm").pvalue > level
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        off = (z**power).mean() - mean
        assert abs(off) < radius(variance**0.5, z.size, 20), power
    neighbours = {
        "entry": (z[:, 1:], z[:, :-1]),
        "pair": (z[:, 2:], z[:, :-2]),
        "candidate": (z[1:], z[:-1]),
        "group": (z, candidates(5, 1, 1000, 1000)),
        "seed": (z, candidates(6, 0, 1000, 1000)),
    }
    for name, (a, b) in neighbours.items():
        for f, deviation in ((lambda x: x, 1.0), (lambda x: x**2 - 1, 2.0)):
            assert abs((f(a) * f(b)).mean()) < radius(deviation, a.size, 20), name


def test_the_tail_is_there():
    "Four million entries beyond 4.5: Poisson of mean 28.5, false-alarm rate 1e-6."
    z = np.concatenate([rec.selected([2**20], 1, [0], [k]) for k in range(4)])
    count, mean = int((np.abs(z) > 4.5).sum()), 2 * stats.norm.sf(4.5) * len(z)
    assert (
        min(stats.poisson.cdf(count, mean), stats.poisson.sf(count - 1, mean)) > ALARM
    )
    assert np.isfinite(z).all()


def test_candidates_have_entries_of_their_own():
    addresses = [
        (0, 0, 0),
        (1, 0, 0),
        (0, 1, 0),
        (0, 0, 1),
        (2**32 - 1, 0, 0),
        (0, 2**20, 0),
        (0, 0, 2**24 - 1),
        (1, 1, 0),
        (0, 1, 1),
        (1, 0, 1),
    ]
    found = {rec.addressed_normals(*a, 0).tobytes() for a in addresses}
    assert len(found) == len(addresses)


@pytest.mark.parametrize("chunk", [1, 3, 64, 2**15])
def test_a_candidate_does_not_depend_on_its_company(chunk, monkeypatch):
    "Groups of odd and even length together, one by one, and in other chunks."
    sizes, groups, ks = (7, 1, 64, 2, 33), (0, 4, 2, 9, 3), (5, 0, 127, 3, 3)
    alone = [rec.selected([d], 8, [g], [k]) for d, g, k in zip(sizes, groups, ks)]
    monkeypatch.setattr(rec, "CHUNK", chunk)
    together = rec.selected(sizes, 8, groups, ks)
    assert together.tobytes() == np.concatenate(alone).tobytes()


def test_a_decoded_candidate_does_not_need_the_others():
    "The last of 2**24 candidates is made as directly as the first: three pairs are."
    counted, original = [], rec.addressed_normals
    mechanism = rec.Rec(1.0, 0.5, 24, (3, 2))
    message = Message(
        "rec", 5, (7).to_bytes(4, "little") + b"\xff" * 6, mechanism.fingerprint
    )

    def counting(seed, group, k, pair):
        counted.extend(zip(group.tolist(), k.tolist(), pair.tolist()))
        return original(seed, group, k, pair)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rec, "addressed_normals", counting)
        decoded = mechanism.decode(message)
    last = 2**24 - 1
    assert counted == [(0, last, 0), (0, last, 1), (1, last, 0)]
    assert torch.equal(
        decoded[3:], torch.from_numpy(np.float32(0.5) * original(7, 1, last, 0))
    )


# ---- the law of the index


@pytest.mark.parametrize("s", [0.0, 0.7, 2.5])
@pytest.mark.parametrize("chunk", [3, 2**15])
def test_an_index_is_drawn_by_its_weight(s, chunk, monkeypatch):
    """16 explicit candidates of one shared seed, 3,000 draws of the private stream;
    chi-square, false-alarm rate 1e-6.
    """
    monkeypatch.setattr(rec, "CHUNK", chunk)
    phi, private = update(s).numpy(), seed_tree(0, "private", int(10 * s))
    picks = [rec.encode_group(phi, 16, 99, 2, private) for _ in range(3000)]
    assert (
        fit(
            np.bincount(picks, minlength=16),
            probabilities(phi, candidates(99, 2, 16, 10)),
        )
        > ALARM
    )


@pytest.mark.parametrize(
    "s, groups", [(0.0, None), (1.0, None), (3.0, None), (3.0, (6, 1, 3))]
)
def test_an_encoded_index_is_uniform_and_given_its_candidates_follows_the_weights(
    s, groups
):
    """1,500 messages, each with candidates of its own. Marginally k is uniform
    (chi-square). Given the candidates, the probability of all heavier ones plus a uniform
    share of k's own is uniform (Kolmogorov-Smirnov). False-alarm rate 1e-6, split over
    groups.
    """
    mechanism, n = rec.Rec(10.0, 0.5, 3, groups), 1500
    sizes = mechanism.sizes(10)
    phis = np.split(update(0.5 * s).numpy() / np.float32(0.5), np.cumsum(sizes)[:-1])
    counts = np.zeros((len(sizes), 8))
    transformed = np.zeros((len(sizes), n))
    jitter = seed_tree(1).random((len(sizes), n))
    for key in range(n):
        seed, indices = read(
            mechanism, mechanism.encode(update(0.5 * s), Insecure(key))
        )
        for g, (phi, k) in enumerate(zip(phis, indices)):
            counts[g, k] += 1
            p = probabilities(phi, candidates(seed, g, 8, len(phi)))
            heavier = (p > p[k]) | (p == p[k]) & (np.arange(8) < k)
            transformed[g, key] = p[heavier].sum() + jitter[g, key] * p[k]
    for g in range(len(sizes)):
        assert fit(counts[g], np.full(8, 1 / 8)) > ALARM / 2 / len(sizes)
        assert same_law(
            transformed[g], (np.arange(200_000) + 0.5) / 200_000
        ) > ALARM / 2 / len(sizes)


def test_the_choice_is_not_in_the_shared_seed(monkeypatch):
    """One seed for all, known to everyone; keys still choose by the weights: chi-square
    over 1,500 keys, false-alarm rate 1e-6.
    """
    monkeypatch.setattr(rec, "public_seed", lambda key: 99)
    mechanism, u = rec.Rec(10.0, 0.5, 3), update(0.5)
    counts = np.zeros(8)
    for key in range(1500):
        seed, (k,) = read(mechanism, mechanism.encode(u, Insecure(key)))
        assert seed == 99
        counts[k] += 1
    assert fit(counts, probabilities(u.numpy() / 0.5, candidates(99, 0, 8, 10))) > ALARM


# ---- the law of the estimate


def sent(mechanism, u, n: int) -> np.ndarray:
    return (
        torch.stack(
            [mechanism.decode(mechanism.encode(u, Insecure(key))) for key in range(n)]
        )
        .double()
        .numpy()
    )


def drawn(mechanism, u, n: int, *path) -> np.ndarray:
    return mechanism.simulate(u.expand(n, len(u)), seed_tree(0, *path)).double().numpy()


def test_many_groups_at_once_have_the_law_of_one_after_another(monkeypatch):
    """65 groups of 8 entries and one of 3, drawn together and one by one:
    Kolmogorov-Smirnov along the update and across it in the first and the last group, and the mean
    against the closed form of the bias; false-alarm rate 1e-6 over all looks.
    """
    groups = (8,) * 65 + (3,)
    mechanism = rec.Rec(1e6, 0.5, 3, groups)
    u = torch.from_numpy(seed_tree(0, "many").standard_normal(523)).float() * 0.4
    together = torch.cat(
        [mechanism.simulate(u[None], [seed_tree(1, i)]) for i in range(3000)]
    ).double()
    bias, variance = (m[0].double() for m in mechanism.moments(u[None]))
    assert (
        (together.mean(0) - u - bias).abs().numpy()
        < radius(variance.sqrt().numpy(), 3000, 523)
    ).all()
    monkeypatch.setattr(rec, "MANY", 10**9)
    apart = mechanism.simulate(u.expand(1500, -1), seed_tree(2)).double()
    for part in (slice(0, 8), slice(520, 523)):
        across = torch.tensor([u[part][1], -u[part][0]]).double()
        for look in (
            lambda e: e[:, part] @ u[part].double(),
            lambda e: e[:, part][:, :2] @ across,
        ):
            assert same_law(look(together), look(apart)) > ALARM / 4


def test_many_groups_tell_a_wrong_selection_apart(monkeypatch):
    "What the test above must reject: the first candidate, whatever the weights."
    mechanism, u = rec.Rec(1e6, 0.5, 3, (8,) * 66), torch.full((528,), 0.4)
    rows = torch.cat(
        [rec.simulate_many(0 * u, 8, 0.5, 8, seed_tree(1, i))[None] for i in range(500)]
    ).double()
    bias, variance = (m[0].double() for m in mechanism.moments(u[None]))
    assert not (
        (rows.mean(0) - u - bias).abs().numpy()
        < radius(variance.sqrt().numpy(), 500, 528)
    ).all()


def test_the_yardstick_tells_wrong_simulations_apart():
    """What the conformance suite's test of one law must reject: half the candidates, no
    selection, the unbiased Gaussian.
    """
    mechanism, u = rec.Rec(10.0, 0.5, 3), update(0.5 * 4)
    messages, along = sent(mechanism, u, 1500), directions(u.numpy())[0]
    noise = 0.5 * seed_tree(3).standard_normal((10_000, 10))
    wrong = {
        "half the candidates": drawn(rec.Rec(10.0, 0.5, 2), u, 10_000, "wrong"),
        "no selection": noise,
        "gaussian": noise + u.numpy(),
    }
    for name, rows in wrong.items():
        assert same_law(along(messages), along(rows)) < ALARM / 100, name


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-20])
def test_a_vanishing_update_leaves_the_prior(size):
    "Kolmogorov-Smirnov against N(0, std^2) along and across; false-alarm rate 1e-6."
    rows = (
        rec.Rec(1.0, 0.5, 4, (2, 2))
        .simulate(torch.full((4000, 4), size), seed_tree(0, "zero"))
        .double()
        .numpy()
    )
    for axis in ([1, 1, 0, 0], [1, -1, 0, 0], [0, 0, 1, 1], [0, 1, 0, 0]):
        assert (
            stats.kstest(rows @ axis / (0.5 * np.linalg.norm(axis)), "norm").pvalue
            > ALARM / 4
        )


def test_one_of_many_candidates_is_nearly_the_gaussian():
    """K = 2**12 at s = 1: along and across are N(phi, std^2) up to the closed form's
    bias; Kolmogorov-Smirnov cannot tell 3,000 rows.
    """
    u = update(0.5)
    mechanism = rec.Rec(10.0, 0.5, 12)
    rows = drawn(mechanism, u, 3000, "gaussian")
    assert float(mechanism.moments(u[None])[0].abs().max()) < 1e-3
    assert (
        stats.kstest((rows @ u.double().numpy() / 0.5 - 0.5) / 0.5, "norm").pvalue
        > ALARM
    )


# ---- closed forms


@tabled("order", [2, 3])
@tabled(
    "s, n_candidates",
    [(0.3, 2), (1.0, 16), (1.0, 128), (3.0, 2), (3.0, 16), (6.0, 128)],
)
def test_selection_moments_against_brute_force(s, n_candidates, order):
    """Sum of p_k**r over 400,000 // K drawn softmaxes; central limit, false-alarm rate
    1e-6.
    """
    n = 400_000 // n_candidates
    p = special.softmax(
        s * seed_tree(0, "moment", n_candidates).standard_normal((n, n_candidates)),
        axis=1,
    )
    power = (p**order).sum(1)
    assert abs(power.mean() - rec.selection_moment(order, s, n_candidates)) < radius(
        power.std(), n
    )


@pytest.mark.filterwarnings("error::RuntimeWarning")
@tabled(
    "s, n_candidates",
    [
        *(
            (s, k)
            for k in (1, 2, 2**7, 2**16)
            for s in (0.0, 0.01, 0.545, 2.0, 5.0, 10.0)
        ),
        (0.545, 2**24),
        (5.0, 2**24),
    ],
)
def test_selection_moments_at_the_ends(s, n_candidates):
    """Probabilities sum to one; one candidate is always chosen; without an update all
    are alike; moments lie between and fall with the order.
    """
    first, second, third = (rec.selection_moment(r, s, n_candidates) for r in (1, 2, 3))
    assert first == pytest.approx(1, abs=1e-6)
    if n_candidates == 1 or s == 0:
        assert second == pytest.approx(
            1 / n_candidates, rel=1e-6
        ) and third == pytest.approx(n_candidates**-2.0, rel=1e-6)
    assert n_candidates**-1.0 * (
        1 - 1e-6
    ) <= second <= 1 + 1e-6 and n_candidates**-2.0 * (1 - 1e-6) <= third <= second * (
        1 + 1e-6
    )
    assert second <= min(1.0, math.exp(min(s * s, 700)) / n_candidates) * (1 + 1e-6), (
        "Jensen: E sum p^2 <= E alpha^2 / K"
    )


def test_bias_points_against_the_update_and_shrinks_with_candidates():
    u = update(0.5 * 2)
    shares = []
    for bits in (1, 4, 8, 12):
        bias, _ = rec.Rec(10.0, 0.5, bits).moments(u[None])
        shares.append(
            float(-(bias[0].double() @ u.double()) / (u.double() @ u.double()))
        )
        torch.testing.assert_close(
            bias[0].double(), -shares[-1] * u.double(), rtol=1e-5, atol=1e-7
        )
        assert shares[-1] == pytest.approx(
            rec.selection_moment(2, 2.0, 2**bits), rel=1e-5
        ), "closed form: E sum p_k^2"
    assert 1 > shares[0] > shares[1] > shares[2] > shares[3] > 0


# ---- cost


def test_encoding_needs_little_memory():
    "2**12 candidates of 50,000 entries are 800 MB; what exists at one time is not."
    mechanism, u = rec.Rec(1.0, 0.5, 12), update(0.8, 50_000)
    mechanism.encode(u[:10], Insecure(0))
    tracemalloc.start()
    try:
        mechanism.encode(u, Insecure(0))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2**20, f"{peak / 2**20:.1f} MiB"


def test_memory_does_not_grow_with_the_group(monkeypatch):
    "A group larger than CHUNK: the candidate never exists whole."
    phi = update(0.8, 3_000_000).numpy()
    tracemalloc.start()
    try:
        rec.log_weights(phi, 1, 0, [0])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 128 * rec.CHUNK < phi.nbytes


@pytest.mark.parametrize("chunk", [1, 7, 64, 999, 1000])
def test_a_weight_does_not_depend_on_the_chunk(chunk, monkeypatch):
    phi = update(3.0, 1000).numpy()
    expected = candidates(5, 3, 78, 1000)[[77, 2]].astype(float) @ phi.astype(float)
    monkeypatch.setattr(rec, "CHUNK", chunk)
    found = rec.log_weights(phi, 5, 3, [77, 2])
    np.testing.assert_allclose(found, expected, atol=1e-12)


# ---- the paper's accountant

STATED = [  # task, c, N, B, T, bits of a message, stated epsilon
    ("mnist", 0.545, 100, 10, 1000, 56, 3),
    ("mnist", 0.87, 100, 10, 1000, 56, 6),
    ("femnist", 0.77, 3500, 100, 4000, 56, 1),
    ("femnist", 1.41, 3500, 100, 4000, 56, 3),
    ("femnist", 1.745, 3500, 100, 4000, 56, 6),
    ("shakespeare", 1.435, 660, 66, 200, 77, 3),
]


@tabled("task, c, n_clients, cohort, rounds, bits, stated", STATED)
def test_the_stated_epsilons_are_reproduced(
    task, c, n_clients, cohort, rounds, bits, stated
):
    delta = n_clients**-1.1
    guarantee = rec.theorem1_epsilon(c, rounds * cohort, n_clients, bits, delta)
    assert guarantee.eps == pytest.approx(stated, rel=0.015)
    assert (
        guarantee.relation,
        guarantee.sampling,
        guarantee.scope,
        guarantee.trust,
    ) == ("null-slot", "replacement", "total", "central")
    sizes = (1,) * (bits // 7)
    mechanism = rec.Rec(c * 0.3, 0.3, 7, sizes)
    assert mechanism.guarantee(
        rounds=rounds,
        delta=delta,
        n_clients=n_clients,
        cohort=cohort,
        accountant="theorem1-arxiv",
    ).eps == pytest.approx(guarantee.eps, rel=1e-12)


@pytest.mark.parametrize("sampling", ["replacement", "poisson", "none"])
def test_what_is_stated_without_a_choice_is_proved(sampling):
    run = dict(rounds=20, delta=1e-3, n_clients=100, cohort=10, sampling=sampling)
    found = rec.Rec(0.5, 1.0).guarantee(**run)
    assert found == rec.Rec(0.5, 1.0).guarantee(**run, accountant="exact-balle")
    assert "gaps" not in found.note


def test_so_lr_has_no_finite_epsilon_as_printed():
    assert (
        rec.theorem1_epsilon(1.227, 60 * 1500, 342_477, 42, 342_477**-1.1).eps
        == math.inf
    )


@pytest.mark.parametrize("version", ["arxiv", "iclr", "iclr-shifted"])
def test_epsilon_grows_with_signal_and_slots_and_falls_with_clients_delta_and_bits(
    version,
):
    def eps(c=0.5, slots=10000, n=100, bits=56, delta=0.006):
        return rec.theorem1_epsilon(c, slots, n, bits, delta, version).eps

    assert eps(c=0.4) < eps() < eps(c=0.6) and eps(slots=5000) < eps() < eps(
        slots=20_000
    )
    assert eps(n=200) < eps() < eps(n=50) and eps(delta=1e-2) < eps() < eps(delta=1e-3)
    assert eps(bits=60) <= eps() < eps(bits=25) < eps(bits=24) == math.inf


def test_the_versions_are_algorithm_7_written_out():
    """Against the binomial sum of (62) with plain floats, at one order where float64 is
    far from its limits.
    """
    c, slots, n, bits, delta = 0.3, 1000, 50, 60, 1e-2

    def divergence(order):
        q = 1 / n
        terms = [
            math.comb(order, k)
            * q**k
            * (1 - q) ** (order - k)
            * math.exp(k * (k - 1) * c * c / 2)
            for k in range(order + 1)
        ]
        return slots * math.log(math.fsum(terms)) / (order - 1)

    left = math.log(delta - 12 * slots * math.exp(c * c) / 2**bits)
    printed = {
        "arxiv": lambda l: 2 * divergence(l + 1),
        "iclr": lambda l: (l - 1) / l * divergence(l) + divergence(l + 1),
        "iclr-shifted": lambda l: divergence(l + 1) + (l + 1) / l * divergence(l + 2),
    }
    for version, loss in printed.items():
        by_hand = min(loss(l) - left / l for l in range(2, 80))
        assert rec.theorem1_epsilon(
            c, slots, n, bits, delta, version
        ).eps == pytest.approx(by_hand, rel=1e-9)


@pytest.mark.parametrize("c", [20.0, 40.0, 1e3])
def test_a_hopeless_signal_is_an_infinite_epsilon_not_an_error(c):
    assert rec.theorem1_epsilon(c, 10, 100, 56, 1e-3).eps == math.inf


# ---- refusals


def test_groups_of_another_model_are_refused():
    mechanism = rec.Rec(1.0, 0.5, 3, (4, 5))
    for call in (
        lambda: mechanism.encode(torch.zeros(10)),
        lambda: mechanism.simulate(torch.zeros(2, 10), seed_tree(0)),
        lambda: mechanism.bits(10),
        lambda: mechanism.moments(torch.zeros(1, 10)),
        lambda: mechanism.decode(
            dataclasses.replace(mechanism.encode(torch.zeros(9)), d=10)
        ),
    ):
        with pytest.raises(ValueError, match="groups sum to 9, but the vector has 10"):
            call()


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(sampling="poisson"),
            "relation is 'poisson-null'.*drawn with replacement",
        ),
        (
            dict(accountant="theorem1-neurips"),
            "accountant is 'theorem1-neurips'.*theorem1-iclr-shifted",
        ),
    ],
)
def test_what_algorithm_7_cannot_account_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        rec.Rec(1.0, 0.5, 7).guarantee(
            **(
                dict(rounds=3, delta=1e-3, n_clients=100, cohort=10)
                | dict(accountant="theorem1-arxiv")
                | change
            )
        )


@pytest.mark.parametrize("c", [0.0, -1.0, math.nan, math.inf])
def test_a_signal_that_is_none_is_refused(c):
    with pytest.raises(ValueError, match="c is"):
        rec.theorem1_epsilon(c, 10, 100, 56, 1e-3)


def test_a_guarantee_says_which_run_it_is_about():
    for sampling, q in (("replacement", 0.1), ("poisson", 0.1), ("none", 1.0)):
        found = rec.Rec(0.5, 1.0).guarantee(
            rounds=20,
            delta=1e-3,
            n_clients=100,
            cohort=10,
            sampling=sampling,
            accountant="exact-balle",
        )
        assert (found.rounds, found.q) == (20, q) and "of 20 rounds" in str(found)
    alone = rec.Rec(0.5, 1.0).guarantee(
        rounds=20, delta=1e-3, accountant="exact-balle", n_clients=1
    )
    assert alone.q == 1.0


def test_what_the_choice_lacks_of_exact_is_paid_for_or_said_first():
    """24 bits, 10 groups, 100 messages: t = 1000 2^-27, which at eps = 5 is a delta of
    1.1e-3. A delta of .01 pays for it, one of 1e-5 does not.
    """
    many = rec.Rec(0.05, 1.0, 24, groups=(1,) * 10)
    run, gap = dict(rounds=100, sampling="none"), 1000 * 2.0**-27
    assert (1 + math.exp(5)) * gap == pytest.approx(1.1e-3, rel=0.02)
    paid = many.guarantee(delta=0.01, **run)
    exact = null_messages.exact_epsilon(0.05, 100, 1, 2**24, 10, 0.01, "local", "balle")
    assert not paid.premises and paid.delta == 0.01 and exact.eps < paid.eps
    cost = (1 + math.exp(paid.eps)) * gap
    left = null_messages.exact_epsilon(
        0.05, 100, 1, 2**24, 10, 0.01 - cost, "local", "balle"
    )
    assert paid.eps >= left.eps, "as much of delta is set aside as the choice costs"
    short = many.guarantee(delta=1e-5, **run)
    assert "as if the choice of a candidate were exact" in short.premises["proof"]
    assert not short.theorem
    usual = rec.Rec(0.5, 1.0).guarantee(1000, 100**-1.1, 100, 10)
    bare = null_messages.exact_epsilon(
        0.5, 10_000, 100, 128, 1, 100**-1.1, conversion="balle"
    )
    assert not usual.premises and bare.eps < usual.eps < bare.eps * (1 + 1e-6)


def test_the_papers_number_stands_on_its_proof():
    run = dict(rounds=1000, delta=100**-1.1, n_clients=100, cohort=10)
    said = rec.Rec(0.5, 1.0, groups=(1,) * 8).guarantee(
        **run, accountant="theorem1-arxiv"
    )
    assert set(said.premises) == {"proof"} and said.theorem == ""
    assert str(said).startswith("As if the paper's theorem were proved")
    proved = rec.Rec(0.5, 1.0).guarantee(**run)
    assert not proved.premises and proved.theorem


def test_a_large_delta_is_noted():
    run = dict(rounds=10, n_clients=100, cohort=10)
    notes = [rec.Rec(0.5, 1.0).guarantee(delta=d, **run).note for d in (0.01, 0.0099)]
    assert ["delta is at least 1/100" in note for note in notes] == [True, False]
