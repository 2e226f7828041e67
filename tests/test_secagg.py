"Secure aggregation: primitives against independent ones, sums under any dropouts, and refusals under any corruption."
import hashlib
import hmac
import itertools
import math
import struct
import tracemalloc
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from laws import ALARM, drawn, fit
from scipy import stats

from dpcomm import secagg, wire
from dpcomm.core import seed_tree
from dpcomm.ring import FixedPoint, Overflow, Ring, discrete_gaussian
from dpcomm.secagg import (HEAD, ROUNDS, SERVER, BadKey, BadShare, BadSignature, BelowThreshold, Client, Damaged, Degree, Inconsistent,
                           Outcome, OutOfRange, Replay, RingOverflow, SecAggError, Server, Setup, SupportMismatch)

few = settings(drawn, max_examples=25)
CHECK, UNMASK = 3, 4  # rounds


def vectors(n, d, ring, seed=0):
    return seed_tree(seed, "secagg test", n, d).integers(0, ring.modulus, (n, d))


def parties(setup, x=None, seed=0, change=None):
    "A server and clients; `change` gives a client's own view of the setup."
    private, directory = secagg.identities(setup.n_clients, seed)
    x = vectors(setup.n_clients, setup.d, setup.ring) if x is None else x
    views = [change(i, setup) if change else setup for i in range(setup.n_clients)]
    clients = [Client(views[i], i, private[i], directory, x[i], seed=seed) for i in range(setup.n_clients)]
    return SimpleNamespace(setup=setup, private=private, directory=directory, x=x, clients=clients,
                           server=Server(setup, private[SERVER], directory), mail=dict.fromkeys(range(setup.n_clients)))


def play(p, stop=len(ROUNDS), drop=None, tamper=lambda step, way, client, data: data):
    "Play up to a round; whoever errs or is refused is gone. Errors in order."
    errors = []
    for step in range(p.server.step, stop):
        for i, data in p.mail.items():
            if (drop or {}).get(i, len(ROUNDS)) > step:
                try:
                    up = p.clients[i].receive(tamper(step - 1, "down", i, data)) if step else p.clients[i].start()
                    p.server.receive(i, tamper(step, "up", i, up))
                except SecAggError as error:
                    errors.append(error)
        p.mail = p.server.advance()
    return errors


def small(n=6, k=4, t=3, bits=16, d=4, **more):
    return Setup(n, d, Ring(bits), t, k, session=bytes(range(16)), **more)


def from_server(p, step, client, body):
    return secagg.seal(p.setup, p.private[SERVER], step, SERVER, client, body)


def from_client(p, step, client, body):
    return secagg.seal(p.setup, p.private[client], step, client, SERVER, body)


def body_of(data):
    return wire.parse_message(data).payload[HEAD.size:-secagg.SIGNATURE]


def reframe(data, **changes):
    "The same message with some fields of the frame changed and a right checksum."
    m = wire.parse_message(data)
    return wire.Message(**{**dict(mechanism=m.mechanism, d=m.d, payload=m.payload, fingerprint=m.fingerprint), **changes}).to_bytes()


def lists(p, survivors, dropouts):
    n = p.setup.n_clients
    return secagg.bitmap(survivors, n) + secagg.bitmap(dropouts, n)


# ---- primitives

def test_the_prime_is_prime():
    odd, twos = secagg.PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in range(2, 80):
        x = pow(base, odd, secagg.PRIME)
        assert x in (1, secagg.PRIME - 1) or any((x := x * x % secagg.PRIME) == secagg.PRIME - 1 for _ in range(twos - 1)), base
    assert 2**256 < secagg.PRIME < 2 ** (8 * secagg.SHARE)


@few
@given(st.data(), st.integers(1, 12), st.binary(min_size=32, max_size=32))
def test_any_threshold_of_shares_gives_the_secret_back(data, t, secret):
    points = data.draw(st.lists(st.integers(1, 10**6), min_size=t, max_size=t + 5, unique=True))
    shares = dict(zip(points, secagg.split(secret, points, t, secagg.source(0, "split"))))
    chosen = data.draw(st.permutations(points))[:t]
    assert secagg.join({x: shares[x] for x in chosen}, t) == secret
    assert secagg.join(shares, t) == secret
    x = data.draw(st.sampled_from(chosen))
    shares[x] ^= 1 << data.draw(st.integers(0, 255))
    assert secagg.join({x: shares[x] for x in chosen}, t) != secret


def test_too_few_shares_fit_every_secret():
    "Given t - 1 shares, each secret leaves exactly one polynomial: interpolate with it at 0 and check degree and shares."
    t, points, prime = 4, (2, 5, 9), secagg.PRIME
    shares = dict(zip(range(1, 10), secagg.split(b"s" * 32, range(1, 10), t, secagg.source(0, "few"))))
    interpolate = lambda known, at: sum(v * math.prod((at - y) * pow(x - y, -1, prime) for y in known if y != x) for x, v in known.items()) % prime
    for secret in (0, 1, 2**256 - 1):
        known = {0: secret, **{x: shares[x] for x in points}}
        fourth = interpolate(known, 7)
        assert secagg.join({**{x: shares[x] for x in points}, 7: fourth}, t) == secret.to_bytes(32, "little")


def test_a_value_above_the_secrets_is_no_secret():
    assert secagg.join({1: 2**256 + 5}, 1) == b""
    assert secagg.lagrange((1,)) == (1,) and sum(secagg.lagrange((1, 2, 7))) % secagg.PRIME == 1, "weights of a constant polynomial"


def test_keys_are_hkdf_with_the_whole_context():
    "RFC 5869 by hand: extract with a salt of zeros, expand with the info."
    session = bytes(range(16))
    info = b"dpcomm secagg " + b"pair mask" + session + bytes([2]) + (3).to_bytes(4, "little") + (9).to_bytes(4, "little")
    extracted = hmac.digest(bytes(32), b"secret", "sha256")
    assert secagg.expand(b"secret", b"pair mask", 16, session, 2, 3, 9) == hmac.digest(extracted, info + b"\x01", "sha256")[:16]


def test_every_part_of_the_context_gives_another_key():
    contexts = itertools.product((b"shares", b"pair mask"), (bytes(16), bytes(15) + b"\x01"), (1, 2), (3, 4), (3, 4, SERVER))
    keys = [secagg.expand(b"s" * 32, purpose, 16, session, step, a, b) for purpose, session, step, a, b in contexts]
    assert len(set(keys)) == len(keys) == 48


def test_every_bit_of_a_secret_counts():
    "Nothing is folded to 32 bits: each of 256 bits changes the key, and each of the key's 128 bits changes the mask."
    secret = int.from_bytes(bytes(range(32)), "little")
    setup = small()
    keys = {secagg.pair_key(setup, (secret ^ (1 << bit)).to_bytes(32, "little"), 1, 2) for bit in range(256)}
    assert len(keys) == 256 and all(len(key) == 16 for key in keys)
    key, masks = int.from_bytes(keys.pop(), "little"), set()
    for bit in range(128):
        mask = np.zeros(4, np.uint32)
        secagg.add_mask(mask, (key ^ (1 << bit)).to_bytes(16, "little"))
        masks.add(mask.tobytes())
    assert len(masks) == 128
    assert secagg.pair_key(setup, bytes(32), 1, 2) == secagg.pair_key(setup, bytes(32), 2, 1)


def test_agreement_is_x25519():
    "The vector of RFC 7748, section 6.1."
    alice = X25519PrivateKey.from_private_bytes(bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a"))
    bob = bytes.fromhex("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")
    assert secagg.agree(alice, bob, 1, 0).hex() == "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"


@pytest.mark.parametrize("word", [np.uint32, np.uint64])
@pytest.mark.parametrize("d", [1, 5, 2**14 - 1, 2**14 + 1, 40_001])
def test_masks_are_the_cipher_stream(word, d):
    key, total = bytes(range(16)), np.arange(d).astype(word)
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(total.nbytes))
    before = total.copy()
    secagg.add_mask(total, key)
    np.testing.assert_array_equal(total, before + np.frombuffer(stream, word))
    secagg.add_mask(total, key, negative=True)
    np.testing.assert_array_equal(total, before)
    assert secagg.CHUNK == len(secagg.ZEROS)


@few
@given(st.integers(2, 62), st.integers(1, 40), st.integers(0, 2**32))
def test_packing_is_little_endian_and_tight(bits, d, seed):
    word = np.dtype("<u4" if bits <= 32 else "<u8")
    x = seed_tree(seed).integers(0, 2**bits, d).astype(word)
    packed = secagg.pack_words(x, bits)
    assert packed == sum(int(v) << (bits * i) for i, v in enumerate(x)).to_bytes(-(-d * bits // 8), "little")
    np.testing.assert_array_equal(secagg.unpack_words(packed, bits, d, word), x)
    assert sum(shift >= 0 for _, _, shift in secagg.spans(bits)) >= 8 * (bits // 8)


def test_secrets_are_fresh_unless_seeded():
    assert secagg.source() is not secagg.source(0, "a") and secagg.source()(32) != secagg.source()(32)
    a, b, c = secagg.source(0, "a"), secagg.source(0, "a"), secagg.source(0, "b")
    assert a(20) + a(12) == b(32) != c(32)
    p, q = (Client(small(), 0, secagg.identities(6, 0)[0][0], secagg.identities(6, 0)[1]) for _ in range(2))
    assert not {p.box, p.pair, p.own} & {q.box, q.pair, q.own} and len({p.box, p.pair, p.own}) == 3
    assert secagg.identities(3)[1] != secagg.identities(3)[1] and len(set(secagg.identities(3, 1)[1].values())) == 4


# ---- graph

def connected(alive, near):
    "Breadth first."
    alive = set(alive)
    found = frontier = {min(alive)}
    while frontier:
        frontier = {int(j) for i in frontier for j in near[i]} & alive - found
        found = found | frontier
    return found == alive


@few
@given(st.integers(2, 40), st.data())
def test_the_graph_is_regular_and_mutual(n, data):
    k = data.draw(st.integers(min(2, n - 1), n - 1))
    assume(n * k % 2 == 0)
    near = secagg.graph(n, k, data.draw(st.binary(min_size=16, max_size=16)))
    assert near.shape == (n, k) and all(len(set(row)) == k and i not in row for i, row in enumerate(near.tolist()))
    assert all(i in near[j] for i in range(n) for j in near[i]) and connected(range(n), near)


def test_the_graph_is_the_sessions():
    a, b = (secagg.graph(30, 4, session) for session in (bytes(16), bytes(15) + b"\x01"))
    assert not np.array_equal(a, b) and sorted(secagg.order(30, bytes(16))) == list(range(30))


@few
@given(st.integers(5, 14), st.sampled_from([2, 4, 6, 8]), st.data())
def test_together_means_connected(n, k, data):
    assume(k < n - 1)
    alive = data.draw(st.sets(st.integers(0, n - 1), min_size=1))
    setup = Setup(n, 1, Ring(8), k // 2 + 1, k, session=bytes(16))
    assert secagg.together(setup, alive) == connected(alive, secagg.graph(n, k, setup.session))


def test_too_few_are_refused():
    setup = Setup(20, 1, Ring(8), 3, 4, quorum=12, session=bytes(16))
    secagg.check_enough(setup, range(20), range(20), 2)
    with pytest.raises(BelowThreshold, match="11 clients are left; 12 must") as caught:
        secagg.check_enough(setup, range(11), [0], 2)
    assert (caught.value.client, caught.value.round) == (SERVER, "masked")
    near = secagg.graph(20, 4, setup.session)
    alive = set(range(20)) - set(near[7][:2].tolist())
    with pytest.raises(BelowThreshold, match="client 7: 2 of its neighbours are left; 3 must") as caught:
        secagg.check_enough(setup, alive, [7], 1)
    assert (caught.value.client, caught.value.round) == (7, "share")
    circle = secagg.order(20, setup.session)
    with pytest.raises(BelowThreshold, match="fall apart"):
        secagg.check_enough(setup, set(range(20)) - set(circle[[3, 4, 11, 12]].tolist()), [], 2)


# ---- set-up

@pytest.mark.parametrize("bad, match", [
    (dict(n_clients=1), "n_clients is 1"), (dict(d=0), "d is 0"), (dict(threshold=2), "threshold is 2"), (dict(threshold=5), "threshold is 5"),
    (dict(neighbours=6), "neighbours is 6"), (dict(neighbours=1), "neighbours is 1"), (dict(quorum=3), "quorum is 3"), (dict(quorum=7), "quorum is 7"),
    (dict(session=b"short"), "session is b'short'"), (dict(session="x" * 16), "session is"), (dict(largest=-1), "largest is -1"),
    (dict(n_clients=7, neighbours=3), "product must be even"),
], ids=str)
def test_unsafe_parameters_are_refused(bad, match):
    good = dict(n_clients=6, d=3, ring=Ring(8), threshold=3, neighbours=4)
    secagg.check_setup(Setup(**good))
    with pytest.raises(ValueError, match=match):
        Setup(**{**good, **bad})


def test_defaults_are_a_majority():
    assert (Setup(10, 1, Ring(8), 6).neighbours, Setup(10, 1, Ring(8), 6).quorum) == (9, 7)
    for n, k in itertools.product(range(3, 20), range(2, 19)):
        if k < n and n * k % 2 == 0:
            for t in range(k // 2 + 1, k + 1):
                q = Setup(n, 1, Ring(8), t, k).quorum
                assert n / 2 < q <= n and q > t


def test_overflow_is_checked_against_all_invited():
    Setup(100, 10, Ring(8), 60, largest=1)
    with pytest.raises(RingOverflow, match="n_clients \\* largest is 200; 8 bits hold sums up to 127") as caught:
        Setup(100, 10, Ring(8), 60, largest=2)
    assert isinstance(caught.value, (Overflow, SecAggError)) and caught.value.client == SERVER
    with pytest.raises(Overflow):
        FixedPoint(Ring(8), 1.0, 2.0, 100)


def test_every_parameter_is_in_the_digest():
    base = dict(n_clients=6, d=3, ring=Ring(8), threshold=3, neighbours=4)
    others = [dict(d=4), dict(ring=Ring(9)), dict(threshold=4), dict(neighbours=5, n_clients=6), dict(n_clients=8), dict(quorum=5), dict(largest=1),
              dict(support=b"x")]
    digests = {Setup(**{**base, **other}).digest for other in [{}, *others]}
    assert len(digests) == len(others) + 1 and all(len(digest) == 32 for digest in digests)
    assert Setup(**base, session=b"y" * 16).digest == Setup(**base).digest
    assert Setup(**base).session != Setup(**base).session, "fresh unless given"


def test_the_word_holds_the_ring():
    assert [Setup(4, 1, Ring(bits), 2).word.itemsize for bits in (2, 32, 33, 62)] == [4, 4, 8, 8]


# ---- the sum

def survives(setup, drop):
    "What should happen, from the rules: the survivors, or None where the protocol must stop."
    near = secagg.graph(setup.n_clients, setup.neighbours, setup.session)
    answered = [{i for i in range(setup.n_clients) if drop.get(i, 5) > step} for step in range(5)]
    for step, here in enumerate(answered):
        owners = here if step < 2 else answered[1]
        if len(here) < setup.quorum or any(len(set(near[i].tolist()) & here) < setup.threshold for i in owners): return None
        if step < CHECK and not connected(here, near): return None
    return tuple(sorted(answered[2]))


EXACT = []  # the rounds at which somebody left, of each session that ended with a sum


@settings(drawn, max_examples=70)
@given(st.data(), st.integers(5, 10), st.sampled_from([8, 13, 20, 32, 33, 62]), st.integers(1, 20))
def test_the_sum_is_exact_under_any_dropouts(data, n, bits, d):
    k = data.draw(st.sampled_from([n - 1, n - 1, *range(2, n - 1)]))
    assume(n * k % 2 == 0)
    t = data.draw(st.sampled_from([k // 2 + 1, k // 2 + 1, k // 2 + 1, k]))
    rng = seed_tree(data.draw(st.integers(0, 2**32)), "schedule")  # uniform: every round is tried often
    drop = {int(i): int(rng.integers(5)) for i in rng.permutation(n)[:rng.integers(n // 2)]}
    ring, session = Ring(bits), data.draw(st.binary(min_size=16, max_size=16))
    expected = survives(Setup(n, d, ring, t, k, session=session), drop) if k % 2 == 0 or k == n - 1 else "unknown"
    x = vectors(n, d, ring)
    try:
        out = secagg.run(x, ring, t, k, seed=0, drop=drop, session=session)
    except BelowThreshold:
        assert expected in (None, "unknown")
    else:
        assert expected in (out.survivors, "unknown") and out.survivors == tuple(i for i in range(n) if drop.get(i, 5) > 2)
        np.testing.assert_array_equal(out.total, secagg.ideal_sum(x[list(out.survivors)], ring))
        EXACT.append(set(drop.values()))
        assert isinstance(out, Outcome) and out.total.dtype == np.int64


def test_the_schedules_above_were_no_empty_ones():
    assert not EXACT or all(sum(step in steps for steps in EXACT) >= 3 for step in range(5)), "dropouts at each round, in sessions with a sum"


@pytest.mark.parametrize("step", range(5))
@pytest.mark.parametrize("k", [10, 19])
def test_ten_percent_may_leave_at_each_round(step, k):
    ring = Ring(24)
    x = vectors(20, 30, ring)
    out = secagg.run(x, ring, k // 2 + 1, k, seed=step, drop={3: step, 13: ROUNDS[step]})
    assert len(out.survivors) == (18 if step <= 2 else 20)
    np.testing.assert_array_equal(out.total, secagg.ideal_sum((x[i] for i in out.survivors), ring))


def test_fresh_keys_change_everything_but_the_sum():
    ring = Ring(16)
    x = vectors(4, 9, ring)
    a, b = (secagg.run(x, ring, 2) for _ in range(2))
    np.testing.assert_array_equal(a.total, b.total)
    np.testing.assert_array_equal(a.total, ring.sum(x))


def test_a_masked_vector_is_the_vector_plus_the_masks():
    p = parties(small(bits=20, d=7))
    play(p, 2)
    c = p.clients[3]
    sent = secagg.unpack_words(body_of(c.receive(p.mail[3])), 20, 7, p.setup.word)
    words = lambda key: np.frombuffer(Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(28)), "<u4").astype(np.int64)
    expected = p.x[3] + words(secagg.expand(c.own, b"own mask", 16, p.setup.session, 2, 3, 3))
    for j in c.near:
        public = X25519PrivateKey.from_private_bytes(p.clients[j].pair).public_key()
        key = secagg.pair_key(p.setup, X25519PrivateKey.from_private_bytes(c.pair).exchange(public), 3, j)
        expected = expected + (words(key) if j > 3 else -words(key))
    np.testing.assert_array_equal(sent, expected % 2**20)


def test_noise_in_the_ring_survives_masking():
    n, d = 12, 50
    grid = FixedPoint(Ring(20), 2**-10, 1.0, n)
    u = np.clip(seed_tree(0, "u").normal(0, 0.3, (n, d)), -1, 1)
    z = np.stack([discrete_gaussian(400, d, seed_tree(0, i)) for i in range(n)])
    out = secagg.run(grid.ring.add(grid.encode(u), z), grid.ring, 6, 10, seed=0, drop={1: 2})
    rest = [i for i in range(n) if i != 1]
    np.testing.assert_array_equal(grid.decode(out.total), grid.scale * (np.rint(u[rest] / grid.scale).sum(0) + z[rest].sum(0)))


def test_no_vector_is_kept():
    "Twenty clients, one vector each in flight: the peak stays at a few vectors."
    d, ring = 200_000, Ring(32)
    x = vectors(1, d, ring)[0].astype(np.uint32)
    tracemalloc.start()
    out = secagg.run([x] * 20, ring, 4, 6, seed=0, drop={3: 2})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * x.nbytes
    np.testing.assert_array_equal(out.total, ring.wrap(19 * x.astype(np.int64)))


# ---- what the server sees

@pytest.mark.parametrize("bits", [8, 5])
def test_masks_are_uniform_and_reach_the_top(bits):
    p = parties(Setup(3, 2**15, Ring(bits), 2, session=bytes(16)), x=np.zeros((3, 2**15), np.int64), seed=5)
    play(p, 2)
    counts = [np.bincount(secagg.unpack_words(body_of(c.receive(p.mail[c.me])), bits, 2**15, p.setup.word), minlength=2**bits) for c in p.clients]
    assert all(fit(count, np.full(2**bits, 2.0**-bits)) > ALARM / 3 for count in counts)
    assert all(len(count) == 2**bits and count[-1] > 0 and count[0] > 0 for count in counts), "0 and R - 1 occur"


def test_no_sum_of_some_vectors_is_open():
    "All proper subsets of the masked vectors, and the total itself before unmasking, differ from the sums of the inputs."
    p = parties(small())
    play(p, 2)
    sent = [secagg.unpack_words(body_of(c.receive(p.mail[c.me])), 16, 4, p.setup.word).astype(np.int64) for c in p.clients]
    for size in range(1, 7):
        for chosen in itertools.combinations(range(6), size):
            assert not np.array_equal(p.setup.ring.sum([sent[i] for i in chosen]), p.setup.ring.sum(p.x[list(chosen)]))


def test_nothing_is_unmasked_below_the_threshold():
    p = parties(small())
    play(p, UNMASK)
    before = p.server.total.copy()
    with pytest.raises(BelowThreshold):
        play(p, drop={0: UNMASK, 1: UNMASK, 2: UNMASK})
    assert not hasattr(p.server, "result") and np.array_equal(p.server.total, before)
    for i in (1, 2): p.server.receive(i, p.clients[i].receive(p.mail[i]))  # late, but the round is still open
    p.server.advance()
    np.testing.assert_array_equal(p.server.result, secagg.ideal_sum(p.x, p.setup.ring))


# ---- corruption

def flip(data, at, by):
    at %= len(data)
    return data[:at] + bytes([data[at] ^ by]) + data[at + 1:]


KINDS = {
    "flip": lambda data, at, by, seen: flip(data, at, by),
    "flip, checksum repaired": lambda data, at, by, seen: (bad := flip(data[:-4], at, by)) + struct.pack("<I", zlib.crc32(bad)),
    "cut": lambda data, at, by, seen: data[:at % len(data)],
    "grown": lambda data, at, by, seen: data + bytes([by]) * (1 + at % 9),
    "another message": lambda data, at, by, seen: seen[at % len(seen)],
}


@settings(drawn, max_examples=80)
@given(st.integers(0, 4), st.sampled_from(["up", "down"]), st.integers(0, 5), st.sampled_from(sorted(KINDS)), st.integers(0, 10**6), st.integers(1, 255),
       st.dictionaries(st.integers(0, 5), st.integers(0, 4), max_size=1))
def test_one_corrupted_message_never_makes_a_wrong_sum(step, way, client, kind, at, by, drop):
    p, seen, changed = parties(small()), [], []

    def tamper(now, direction, i, data):
        bad = data
        if (now, direction, i) == (step, way, client):
            bad = KINDS[kind](data, at, by, seen or [b""])
            changed.append(bad != data)
        seen.append(data)
        return bad

    try:
        errors = play(p, drop=drop, tamper=tamper)
    except BelowThreshold as error:
        assert error.round in ROUNDS and not hasattr(p.server, "result")
    else:
        survivors = sorted(p.server.survivors)
        np.testing.assert_array_equal(p.server.result, secagg.ideal_sum(p.x[survivors], p.setup.ring))
        assert len(errors) == sum(changed), "every change is noticed"
        for error in errors:
            assert isinstance(error, ValueError) and error.client in (client, SERVER) and error.round == ROUNDS[step]
            assert f"round '{ROUNDS[step]}'" in str(error) and secagg.who(error.client) in str(error)


@settings(drawn, max_examples=30)
@given(st.sampled_from([1, CHECK, UNMASK]), st.integers(0, 5), st.integers(0, 10**6), st.integers(1, 255), st.booleans())
def test_a_client_that_signs_nonsense_never_makes_a_wrong_sum(step, client, at, by, one_leaves):
    "Shares, lists and revealed shares, altered by their own sender and properly signed."
    p = parties(small())

    def tamper(now, direction, i, data):
        return from_client(p, step, i, flip(body_of(data), at, by)) if (now, direction, i) == (step, "up", client) else data

    try:
        errors = play(p, drop={(client + 1) % 6: 2} if one_leaves else {}, tamper=tamper)
    except SecAggError:
        assert not hasattr(p.server, "result")
    else:
        np.testing.assert_array_equal(p.server.result, secagg.ideal_sum(p.x[sorted(p.server.survivors)], p.setup.ring))
        assert errors or step == UNMASK, "a bad share that is not among the first t is not used"


def test_an_error_changes_nothing():
    "The right message is still accepted after a wrong one, by server and clients, at every round."
    p = parties(small())

    def once(receiver, call, data):
        before = receiver.step
        with pytest.raises(SecAggError):
            call(flip(data, len(data) // 2, 1))
        assert receiver.step == before
        return call(data)

    for step in range(5):
        for c in p.clients:
            up = once(c, c.receive, p.mail[c.me]) if step else c.start()
            once(p.server, lambda data: p.server.receive(c.me, data), up)
        p.mail = p.server.advance()
    np.testing.assert_array_equal(p.server.result, secagg.ideal_sum(p.x, p.setup.ring))


# ---- each refusal by name

def refused(kind, client, step, call, match=None):
    with pytest.raises(kind, match=match) as caught:
        call()
    assert (caught.value.client, caught.value.round) == (client, ROUNDS[step]) and isinstance(caught.value, ValueError)


def test_a_directory_must_be_complete_and_without_repetition():
    private, directory = secagg.identities(6, 0)
    refused(BadKey, 2, 0, lambda: secagg.check_directory(small(), {i: key for i, key in directory.items() if i != 2}), "no 32-byte key")
    refused(BadKey, SERVER, 0, lambda: Client(small(), 0, private[0], {**directory, SERVER: b"x"}), "no 32-byte key")
    refused(BadKey, 4, 0, lambda: Server(small(), private[SERVER], {**directory, 4: directory[1]}), "key of client 1")
    with pytest.raises(ValueError, match="me is 6"):
        Client(small(), 6, private[0], directory)


def test_a_bundle_of_another_key_is_refused():
    "By the server when it comes, and by the neighbours should a server pass it on."
    p = parties(small())
    stranger = secagg.identities(6, 99)[0][1]
    forged = secagg.seal(p.setup, stranger, 0, 1, SERVER, secagg.bundle(p.clients[1]))
    refused(BadSignature, 1, 0, lambda: p.server.receive(1, forged))
    play(p, 1)
    entries = secagg.records(body_of(p.mail[0]), secagg.KEYS + secagg.SIGNATURE, range(6), SERVER, 0)
    j = min(entries)
    entries[j] = secagg.bundle(p.clients[j])[::-1] + entries[j][secagg.KEYS:]
    refused(BadSignature, j, 0, lambda: p.clients[0].receive(from_server(p, 0, 0, secagg.listed(entries))))
    with pytest.raises(BadSignature):
        secagg.check_signature(p.setup, p.directory, 0, 1, SERVER, b"body", bytes(64))


def test_repeated_keys_are_refused():
    p = parties(small())
    p.server.receive(0, p.clients[0].start())
    copied = secagg.bundle(p.clients[0])[:32] + secagg.bundle(p.clients[1])[32:]
    refused(BadKey, 1, 0, lambda: p.server.receive(1, from_client(p, 0, 1, copied)), "client 0 sent too")
    own = secagg.bundle(p.clients[1])
    refused(BadKey, 1, 0, lambda: secagg.check_bundles(p.setup, {1: own[:32] + own[:32] + own[64:]}), "client 1 sent too")
    refused(Damaged, 1, 0, lambda: secagg.check_bundles(p.setup, {1: own[:-1]}), "127 bytes")


def test_a_key_of_small_order_is_refused():
    p = parties(small())
    bad = bytes(32) + secagg.bundle(p.clients[1])[32:]
    for c in p.clients:
        p.server.receive(c.me, c.start() if c.me != 1 else from_client(p, 0, 1, bad))
    p.mail = p.server.advance()
    neighbour = p.clients[1].near[0]
    refused(BadKey, 1, 0, lambda: p.clients[neighbour].receive(p.mail[neighbour]), "no key")


def test_different_supports_are_refused_by_server_and_clients():
    other = lambda i, setup: small(support=b"other") if i == 4 else setup
    p = parties(small(support=b"one"), change=other)
    refused(SupportMismatch, 4, 0, lambda: p.server.receive(4, p.clients[4].start()), "another support")
    p = parties(small(support=b"one"), change=other)
    renamed = reframe(p.clients[4].start(), fingerprint=p.setup.fingerprint)
    refused(SupportMismatch, 4, 0, lambda: p.server.receive(4, renamed), "support differ")
    p = parties(small(support=b"one"))
    play(p, 1)
    entries = secagg.records(body_of(p.mail[0]), secagg.KEYS + secagg.SIGNATURE, range(6), SERVER, 0)
    j = min(entries)
    bundle = secagg.bundle(p.clients[j])[:96] + small(support=b"other").digest
    signature = wire.parse_message(from_client(p, 0, j, bundle)).payload[-secagg.SIGNATURE:]
    body = secagg.listed({**entries, j: bundle + signature})
    refused(SupportMismatch, j, 0, lambda: p.clients[0].receive(from_server(p, 0, 0, body)))
    refused(SupportMismatch, SERVER, 0, lambda: p.clients[0].receive(reframe(p.mail[0], d=5)))


def test_foreign_frames_are_damaged():
    p = parties(small())
    data = p.clients[0].start()
    refused(Damaged, 0, 0, lambda: p.server.receive(0, reframe(data, mechanism="rec")), "no message of secagg")
    refused(Damaged, 0, 0, lambda: p.server.receive(0, reframe(data, payload=b"x")))
    refused(Damaged, 0, 0, lambda: p.server.receive(0, b""), "truncated")


def test_replays_and_reordered_messages_are_refused():
    p = parties(small())
    first = [c.start() for c in p.clients]
    refused(Replay, 0, 0, p.clients[0].start)
    refused(Replay, SERVER, 0, lambda: parties(small()).clients[0].receive(first[0]), "no message is due")
    for i, data in enumerate(first): p.server.receive(i, data)
    refused(Replay, 0, 0, lambda: p.server.receive(0, first[0]), "here already")
    keys = p.server.advance()
    refused(Replay, 0, 1, lambda: p.server.receive(0, first[0]), "round")
    refused(Replay, SERVER, 0, lambda: p.clients[0].receive(keys[1]), "receiver")
    second = [c.receive(keys[c.me]) for c in p.clients]
    refused(Replay, SERVER, 1, lambda: p.clients[0].receive(keys[0]), "round")
    refused(Replay, 1, 1, lambda: p.server.receive(1, second[0]), "sender")
    other = parties(Setup(6, 4, Ring(16), 3, 4, session=b"another session!"))
    refused(Replay, 0, 0, lambda: other.server.receive(0, first[0]), "session")
    refused(Replay, 9, 1, lambda: p.server.receive(9, second[0]), "not invited")


def test_who_left_stays_away_and_what_is_over_is_over():
    p = parties(small())
    play(p, 3, drop={5: 1})
    refused(Replay, 5, 3, lambda: p.server.receive(5, p.clients[5].receive(p.mail.get(5, p.mail[0]))) if 5 in p.mail else p.server.receive(5, b""), "dropped out")
    play(p)
    refused(Replay, 0, 4, lambda: p.server.receive(0, b""), "over")
    refused(Replay, SERVER, 4, p.server.advance, "over")
    refused(Replay, SERVER, 4, lambda: p.clients[0].receive(b""), "no message is due")


def test_shares_that_do_not_decrypt_name_their_sender():
    p = parties(small())
    play(p, 2)
    entries = secagg.records(body_of(p.mail[0]), secagg.SEALED, range(6), SERVER, 1)
    j, k = sorted(entries)[:2]
    swapped = {**entries, j: entries[k]}
    refused(BadShare, j, 1, lambda: p.clients[0].receive(from_server(p, 1, 0, secagg.listed(swapped))), "do not decrypt")
    missing = {i: entry for i, entry in list(entries.items())[:2]}
    refused(BelowThreshold, 0, 2, lambda: p.clients[0].receive(from_server(p, 1, 0, secagg.listed(missing))), "2 of its neighbours")


def test_too_few_bundles_are_refused_by_a_client():
    p = parties(small())
    play(p, 1)
    entries = secagg.records(body_of(p.mail[0]), secagg.KEYS + secagg.SIGNATURE, range(6), SERVER, 0)
    body = secagg.listed(dict(list(entries.items())[:2]))
    refused(BelowThreshold, 0, 1, lambda: p.clients[0].receive(from_server(p, 0, 0, body)), "2 of its neighbours")


def test_records_name_each_client_once():
    assert secagg.records(secagg.listed({3: b"ab", 1: b"cd"}), 2, [1, 3], 0, 1) == {3: b"ab", 1: b"cd"}
    refused(Damaged, 0, 1, lambda: secagg.records(b"1234567", 2, [1], 0, 1), "no whole number")
    refused(Inconsistent, 0, 1, lambda: secagg.records(secagg.listed({3: b"ab"}) * 2, 2, [1, 3], 0, 1))
    refused(Inconsistent, 0, 1, lambda: secagg.records(secagg.listed({2: b"ab"}), 2, [1, 3], 0, 1))
    p = parties(small())
    play(p, 1)
    body = secagg.share(p.clients[0], body_of(p.mail[0]))
    refused(BadShare, 0, 1, lambda: p.server.receive(0, from_client(p, 1, 0, body[:-4 - secagg.SEALED])), "3 records; 4 are due")
    with pytest.raises(BadShare):
        secagg.accept_records(p.server, 0, b"")


def test_no_client_reveals_both_secrets():
    p = parties(small())
    play(p, 3)
    c, everyone = p.clients[0], set(range(6))
    say = lambda survivors, dropouts: c.receive(from_server(p, 2, 0, lists(p, survivors, dropouts)))
    for both in (everyone, {1}, {0}):
        refused(Inconsistent, SERVER, 2, lambda: say(everyone, both), "survivor and as dropout")
    refused(Inconsistent, SERVER, 2, lambda: say(everyone - {0}, {0}), "no survivor")
    j = c.near[0]
    refused(Inconsistent, SERVER, 2, lambda: say(everyone - {j}, ()), "do not agree")
    refused(Inconsistent, SERVER, 2, lambda: c.receive(from_server(p, 2, 0, bytes([255, 0]))), "do not exist")
    refused(Damaged, SERVER, 2, lambda: c.receive(from_server(p, 2, 0, bytes(3))), "3 bytes; 2 are due")
    refused(BelowThreshold, SERVER, 2, lambda: say({0, 1, 2}, {3, 4, 5}), "3 clients are left; 4 must")
    c.receive(p.mail[0])
    refused(Replay, SERVER, 3, lambda: say({0, 1, 2, 3, 4}, {5}), "round")
    assert secagg.survivor_lists(p.setup, lists(p, {0, 4}, {1})) == ({0, 4}, {1})


def test_a_stranger_is_no_survivor():
    "A neighbour that sent no shares cannot be in the sum: its masks would not cancel."
    p = parties(small())
    play(p, 3, drop={5: 1})
    c = next(c for c in p.clients[:5] if 5 in c.near)
    body = lists(p, range(6), ())
    refused(Inconsistent, SERVER, 2, lambda: c.receive(from_server(p, 2, c.me, body)), "do not agree")


def test_nothing_is_revealed_before_enough_signed_the_same_lists():
    p = parties(small())
    play(p, CHECK + 1)
    good = secagg.records(body_of(p.mail[0]), secagg.SIGNATURE, range(6), SERVER, 3)
    assert len(good) == p.setup.quorum - 1
    say = lambda entries: p.clients[0].receive(from_server(p, 3, 0, secagg.listed(entries)))
    short = dict(list(good.items())[1:])
    refused(BelowThreshold, 0, 4, lambda: say(short), "2 others signed the lists; 3 must")
    other = hashlib.sha256(lists(p, range(5), [5])).digest()
    j = min(good)
    elsewhere = wire.parse_message(from_client(p, 3, j, other)).payload[-secagg.SIGNATURE:]
    refused(BadSignature, j, 3, lambda: say({**good, j: elsewhere}))
    refused(Inconsistent, SERVER, 3, lambda: say({**short, 0: good[j]}))
    refused(Inconsistent, j, 3, lambda: secagg.accept_lists(p.server, j, other), "other lists")
    shares = secagg.records(body_of(say(good)), secagg.SHARE, range(6), 0, 4)
    assert all(shares[i] == p.clients[0].held[i][0] for i in shares), "all survived: shares of own seeds only"


def test_a_dropout_gets_its_key_revealed_and_nothing_else():
    p = parties(small())
    play(p, CHECK + 1, drop={5: 2})
    for c in p.clients[:5]:
        shares = secagg.records(body_of(c.receive(p.mail[c.me])), secagg.SHARE, range(6), c.me, 4)
        assert all(share == c.held[i][i == 5] for i, share in shares.items()) and set(shares) == set(c.near)


@pytest.mark.parametrize("owner, drop", [(2, {}), (5, {5: 2})])
def test_shares_of_another_secret_are_noticed(owner, drop):
    "The owner shared what it did not commit to: named, and no sum."
    p = parties(small())
    play(p, 1)
    c = p.clients[owner]
    true = c.own, c.pair
    c.own = c.pair = b"z" * 32
    p.server.receive(owner, c.receive(p.mail[owner]))
    c.own, c.pair = true
    for other in p.clients:
        if other is not c: p.server.receive(other.me, other.receive(p.mail[other.me]))
    p.mail = p.server.advance()
    refused(BadShare, owner, 4, lambda: play(p, drop=drop), "give another one back")
    assert not hasattr(p.server, "result")
    assert secagg.commitment(p.setup, 2, true[0]) != secagg.commitment(p.setup, 2, b"z" * 32)
    with pytest.raises(BadShare):
        secagg.recovered(p.server, owner, b"")


@pytest.mark.parametrize("vector, match", [
    (np.ones(4), "float64"), (np.ones(5, int), r"\(5,\)"), (None, "object"), (np.full(4, -1), "span -1"), (np.full(4, 2**16), "span 65536"),
    (np.full(4, 11), "largest entry is 11; 10 was declared"), (np.full(4, 2**16 - 11), "largest entry is 11"),
], ids=str)
def test_vectors_beyond_the_declared_range_stay_home(vector, match):
    p = parties(small(largest=10), x=np.full((6, 4), 2**16 - 10))
    p.clients[1].vector = vector
    play(p, 2)
    refused(OutOfRange, 1, 2, lambda: p.clients[1].receive(p.mail[1]), match)
    assert secagg.ring_words(p.setup, np.full(4, 10), 1).dtype == np.uint32
    p.clients[1].vector = np.full(4, 10)
    assert not play(p)
    np.testing.assert_array_equal(p.setup.ring.lift(p.server.result), np.full(4, -40))


def test_a_vector_of_wrong_length_is_refused_by_the_server():
    p = parties(small())
    play(p, 2)
    refused(Damaged, 3, 2, lambda: p.server.receive(3, from_client(p, 2, 3, bytes(9))), "9 bytes; 8 are due")
    with pytest.raises(Damaged):
        secagg.accept_vector(p.server, 3, b"")
    assert not p.server.total.any()


# ---- cost

@few
@given(st.integers(3, 10), st.data(), st.integers(1, 50), st.sampled_from([8, 13, 32, 40]))
def test_declared_sizes_are_measured_sizes(n, data, d, bits):
    k = data.draw(st.integers(2, n - 1))
    assume(n * k % 2 == 0)
    t = data.draw(st.integers(k // 2 + 1, k))
    declared = secagg.overhead(n, k, d, bits, t)
    traffic = secagg.run(vectors(n, d, Ring(bits)), Ring(bits), t, k, seed=0).traffic
    for (step, way), size in declared.items():
        messages, sizes = traffic[ROUNDS.index(step), :, ("up", "down").index(way)].T
        assert (8 * sizes == size.total).all() and (messages == (size.total > 0)).all()
        assert size.total == size.payload + size.header and size.per_param == size.total / d
    assert declared["masked", "up"].payload == 8 * math.ceil(d * bits / 8)


def test_dropouts_only_make_messages_fewer_and_shorter():
    ring = Ring(20)
    whole, less = (secagg.run(vectors(20, 9, ring), ring, 6, 10, seed=0, drop=drop).traffic for drop in ({}, {0: 0, 1: 1, 2: 2, 3: 3, 4: 4}))
    assert (less <= whole).all() and whole.shape == (5, 20, 2, 2)
    assert less[:, :5, 0, 0].tolist() == [[i > step for i in range(5)] for step in range(5)], "client i sends i messages"
    rows = secagg.table(less)
    assert [row["messages"] for row in rows if row["way"] == "up"] == [19, 18, 17, 16, 15]
    assert rows[0] == dict(round="advertise", way="up", messages=19, median=243, largest=243) and rows[-1]["messages"] == 0


# ---- parameters of the graph

@pytest.mark.parametrize("n, corrupt, dropout, expected", [
    (1000, 0.33, 0.05, (132, 109)), (10_000, 0.33, 0.05, (178, 146)), (100_000, 0.33, 0.05, (196, 160)),
    (1000, 0.05, 0.33, (398, 223)),
])
def test_the_degree_is_the_published_one(n, corrupt, dropout, expected):
    "Published with the authors' implementation for a semi-malicious server, 2^-40 and 2^-20."
    found = secagg.degree(n, dropout, corrupt)
    assert found[:2] == expected
    assert found.exposed + found.apart <= 2.0**-40 and found.stuck <= 2.0**-20 and 2 * found.quorum > n * (1 + corrupt)


def test_the_degree_against_a_curious_server_is_the_published_one():
    for n, expected in {1000: (78, 60), 10_000: (92, 70), 100_000: (102, 77)}.items():
        assert secagg.degree(n, 0.05, 0.33, malicious=False)[:2] == expected


def test_the_bounds_hold_by_enumeration():
    "All choices of marked clients among 9: how often the rest falls apart, and how often some client has many marked neighbours."
    n, k = 9, 4
    near = secagg.graph(n, k, bytes(16))
    for marked in range(1, 7):
        chosen = [set(c) for c in itertools.combinations(range(n), marked)]
        apart = np.mean([not connected(set(range(n)) - c, near) for c in chosen])
        assert apart <= secagg.split_chance(n, marked, k) + 1e-12
        tails = secagg.near_tails(n, marked, k)
        for i in range(k + 1):
            often = np.mean([any(len(c & set(near[j].tolist())) >= i for j in set(range(n)) - c) for c in chosen])
            assert often <= tails[i] + 1e-12
        assert tails[-1] == 0 and tails[0] == 1
    assert secagg.split_chance(9, 3, 4) == 0.0 and secagg.split_chance(9, 8, 8) == 0.0


@pytest.mark.parametrize("n, marked, k", [(9, 4, 4), (60, 7, 12), (60, 55, 12), (500, 0, 20), (500, 499, 499)])
def test_the_tails_are_hypergeometric(n, marked, k):
    np.testing.assert_allclose(secagg.near_tails(n, marked, k), np.minimum(1, n * stats.hypergeom.sf(np.arange(k + 2) - 1, n - 1, marked, k)), rtol=1e-6)


def test_small_federations_get_the_complete_graph_or_nothing():
    found = secagg.degree(6, 0.2, 0.2)
    assert isinstance(found, Degree) and found.neighbours == 4 and found.exposed == found.apart == found.stuck == 0
    Setup(6, 1, Ring(8), found.threshold, found.neighbours, quorum=found.quorum)
    assert secagg.degree(6, 0.17, 0.5, malicious=False).neighbours == 5
    for n, dropout, corrupt in ((100, 0.5, 0.1), (6, 0.4, 0.4), (1000, 0.1, 0.9)):
        with pytest.raises(ValueError, match=f"dropout is {dropout} and corrupt {corrupt}"):
            secagg.degree(n, dropout, corrupt)
    with pytest.raises(ValueError, match="n_clients is 2"):
        secagg.degree(2, 0.0, 0.0)


def test_degrees_make_valid_setups_that_tolerate_what_they_say():
    ring = Ring(8)
    for n, malicious in ((30, True), (61, False)):
        g = secagg.degree(n, 0.1, 0.1, malicious)
        lost = seed_tree(0, "lost", n).permutation(n)[:n // 10].tolist()
        out = secagg.run(np.ones((n, 2), np.int64), ring, g.threshold, g.neighbours, seed=0, quorum=g.quorum, drop=dict.fromkeys(lost, 2))
        assert (out.total == n - n // 10).all()


# ---- names that tests above reach through others

def test_the_steps_are_the_ones_of_the_paper():
    assert [f.__name__ for f in secagg.REPLIES[1:]] == ["share", "masked", "confirm", "reveal"]
    assert [f.__name__ for f in secagg.ACCEPT] == ["accept_bundle", "accept_records", "accept_vector", "accept_lists", "accept_records"]
    assert [f.__name__ for f in secagg.CLOSE] == ["close_advertise", "close_share", "close_masked", "close_check", "close_unmask"]
    p = parties(small())
    data = p.clients[0].start()
    assert secagg.unseal(p.setup, p.directory, data, 0, 0, SERVER) == secagg.bundle(p.clients[0])
    signed = secagg.signed_content(p.setup, 0, 0, SERVER, secagg.bundle(p.clients[0]))
    assert signed.startswith(b"dpcomm secagg") and len(signed) == 45
