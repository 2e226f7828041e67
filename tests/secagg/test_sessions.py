"""Secure aggregation: primitives against independent ones, sums under any dropouts,
refusals under any corruption, and parties that are put away and taken back.
"""

import hashlib
import hmac
import itertools
import math
import struct
import sys
import threading
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import (
    X25519PrivateKey,
    X25519PublicKey,
)
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from laws import ALARM, drawn, fit
from scipy import stats
from scipy.sparse.csgraph import connected_components
from tables import tabled

from dpcomm.core import wire
from dpcomm.core.random import seed_tree
from dpcomm.secagg import client as parties
from dpcomm.secagg import masking, protocol, server
from dpcomm.secagg import session as sessions
from dpcomm.secagg.client import LAST_USE, Client, Counter, stored_form
from dpcomm.secagg.errors import (
    ADVERTISE,
    CHECK,
    COMPLAIN,
    MASKED,
    ROUNDS,
    SERVER,
    SHARE,
    UNMASK,
    BadKey,
    BadShare,
    BadSignature,
    BelowThreshold,
    Damaged,
    Inconsistent,
    OutOfRange,
    Replay,
    RingOverflow,
    SecAggError,
    SupportMismatch,
    party_name,
)
from dpcomm.secagg.masking import CURVE, ELEMENT_SIZE, HEAD, PRIME, random_source
from dpcomm.secagg.protocol import BUNDLE_SIZE, SIGNATURE_SIZE, Setup, pack_records
from dpcomm.secagg.ring import Overflow, Ring
from dpcomm.secagg.server import Server
from dpcomm.secagg.session import run_session

few = settings(drawn, max_examples=25)


def vectors(n, d, ring, seed=0):
    return seed_tree(seed, "secagg test", n, d).integers(0, ring.modulus, (n, d))


def gathered(setup, x=None, seed=0):
    "A server and clients."
    n = setup.n_clients
    private, directory = sessions.identities(n, seed)
    x = vectors(n, setup.d, setup.ring) if x is None else x
    clients = [
        Client(setup, i, private[i], directory, x[i], seed=seed) for i in range(n)
    ]
    about = dict(setup=setup, private=private, directory=directory, x=x)
    about |= dict(clients=clients, server=Server(setup, private[SERVER], directory))
    return SimpleNamespace(**about, mail=dict.fromkeys(range(n)))


def play(p, stop=len(ROUNDS), drop={}, tamper=None):
    """Play up to a round; whoever errs or is refused is gone. Errors in order.

    tamper: (step, 'up' or 'down', client, data) -> data.
    """
    errors = []
    tamper = tamper or (lambda step, way, client, data: data)
    for step in range(p.server.step, stop):
        for i, data in p.mail.items():
            if drop.get(i, len(ROUNDS)) <= step:
                continue
            try:
                if step:
                    up = p.clients[i].receive(tamper(step - 1, "down", i, data))
                else:
                    up = p.clients[i].start()
                p.server.receive(i, tamper(step, "up", i, up))
            except SecAggError as error:
                errors.append(error)
        p.mail = p.server.advance()
    return errors


def exact(p, survivors=None):
    "The server's result is the sum of these clients' vectors, or of its survivors'."
    survivors = p.server.survivors if survivors is None else survivors
    assert sorted(p.server.survivors) == sorted(survivors)
    wanted = p.setup.ring.sum(np.asarray(p.x)[sorted(survivors)])
    np.testing.assert_array_equal(p.server.result, wanted)


def small(n=6, k=4, t=3, bits=16, d=4, session=bytes(range(16)), **more):
    return Setup(n, d, Ring(bits), t, k, session=session, **more)


def six(stop=0, drop={}, **more):
    p = gathered(small(**more))
    play(p, stop, drop)
    return p


def from_client(p, step, client, body):
    return protocol.seal(p.setup, p.private[client], (step, client, SERVER), body)


def up(p, client, step, body):
    "The server hears a signed message of a client."
    return p.server.receive(client, from_client(p, step, client, body))


def down(p, client, step, body):
    "A client hears a signed message of the server: bytes, or records."
    body = pack_records(body) if isinstance(body, dict) else body
    data = protocol.seal(p.setup, p.private[SERVER], (step, SERVER, client), body)
    return p.clients[client].receive(data)


def read(data):
    "A frame, whatever length it announces."
    return wire.parse_message(data, wire.FRAME.unpack_from(data)[4])


def body_of(data):
    return read(data).payload[HEAD.size : -SIGNATURE_SIZE]


def signed(p, i, keys):
    "A bundle with its owner's signature, as the server passes it on."
    return keys + read(from_client(p, 0, i, keys)).payload[-SIGNATURE_SIZE:]


def reframe(data, **changes):
    "The same message with some fields of the frame changed and a right checksum."
    return replace(read(data), **changes).to_bytes()


def records_of(data, size):
    return protocol.unpack_records(body_of(data), size, range(99), SERVER, 0)


def bundles_of(p):
    "The signed bundles that client 0 gets, and the first of its neighbours."
    entries = records_of(p.mail[0], BUNDLE_SIZE + SIGNATURE_SIZE)
    return entries, min(entries)


def bundle(p, i):
    return p.clients[i]._advertise()


def lists(p, survivors, dropouts):
    n = p.setup.n_clients
    return protocol.bitmap(survivors, n) + protocol.bitmap(dropouts, n)


def lying(p, said):
    """For `play`: clients say something else in a round, properly signed.

    said: (client, step) -> function of the body.
    """

    def tamper(step, way, i, data):
        if way == "down" or (i, step) not in said:
            return data
        return from_client(p, step, i, said[i, step](body_of(data)))

    return tamper


def stream(key, n, word="<u4"):
    "Words of the cipher's stream."
    raw = bytes(n * np.dtype(word).itemsize)
    raw = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(raw)
    return np.frombuffer(raw, word)


def masked(p):
    "The masked vectors that the clients send."
    ring, word = p.setup.ring, p.setup.word
    for c in p.clients:
        body = body_of(c.receive(p.mail[c.me]))
        yield masking.unpack_words(body, ring.bits, p.setup.d, word).astype(np.int64)


@contextmanager
def refused(kind, client, step, match=None):
    "A block that must raise an error that names its client and its round."
    with pytest.raises(kind, match=match) as caught:
        yield
    assert isinstance(caught.value, ValueError)
    assert (caught.value.client, caught.value.round) == (client, ROUNDS[step])


def flip(data, at, by=1):
    at %= len(data)
    return data[:at] + bytes([data[at] ^ by]) + data[at + 1 :]


# ---- primitives


@few
@given(st.data(), st.integers(1, 12), st.integers(0, PRIME - 1))
def test_any_threshold_of_shares_gives_the_secret_back(data, t, secret):
    points = st.lists(st.integers(1, 10**6), min_size=t, max_size=t + 5, unique=True)
    points = data.draw(points)
    line = masking.polynomial(secret, t, random_source(0, "split"))
    assert len({*line}) == t, "every coefficient is drawn anew"
    shares = dict(zip(points, masking.evaluate(line, points)))
    chosen = data.draw(st.permutations(points))[:t]
    part, everywhere = {x: shares[x] for x in chosen}, tuple(sorted(points))
    assert masking.reconstruct(part, t) == secret
    assert masking.reconstruct(part, t, everywhere) == secret, "weights of all points"
    assert masking.reconstruct(shares, t) == secret
    if t > 1:
        fewer = {x: shares[x] for x in chosen[1:]}
        assert masking.reconstruct(fewer, t - 1) != secret, "of degree t - 1"
        with pytest.raises(ValueError, match="entries needed: collect more"):
            masking.reconstruct(fewer, t)
    part[data.draw(st.sampled_from(chosen))] ^= 1 << data.draw(st.integers(0, 255))
    assert masking.reconstruct(part, t) != secret


def test_keys_are_hkdf_with_the_whole_context():
    "RFC 5869 by hand: extract with a salt of zeros, expand with the info."
    context = bytes([2]) + (3).to_bytes(4, "little") + (9).to_bytes(4, "little")
    info = b"dpcomm secagg pair mask" + bytes(range(16)) + context
    extracted = hmac.digest(bytes(32), b"secret", "sha256")
    key = masking.derive_key(b"secret", b"pair mask", 16, bytes(range(16)), 2, 3, 9)
    assert key == hmac.digest(extracted, info + b"\x01", "sha256")[:16]
    choices = (b"shares", b"pair mask"), (bytes(16), b"x" * 16), (1, 2), (3, 4)
    keys = {
        masking.derive_key(b"s" * 32, purpose, 16, *context)
        for purpose, *context in itertools.product(*choices, (3, 4, SERVER))
    }
    assert len(keys) == 48, "every part gives another key"


@tabled("word", [np.uint32, np.uint64])
@tabled("d", [1, 5, 2**14 - 1, 2**14 + 1, 40_001])
def test_masks_are_the_cipher_stream(word, d):
    key, before = bytes(range(16)), np.arange(d).astype(word)
    total = before.copy()
    masking.add_mask(total, key)
    np.testing.assert_array_equal(total, before + stream(key, d, word))
    masking.add_mask(total, key, negative=True)
    np.testing.assert_array_equal(total, before)


@few
@given(st.integers(2, 62), st.integers(1, 40), st.integers(0, 2**32))
def test_packing_is_little_endian_and_tight(bits, d, seed):
    word = np.dtype("<u4" if bits <= 32 else "<u8")
    x = seed_tree(seed).integers(0, 2**bits, d).astype(word)
    number = sum(int(v) << (bits * i) for i, v in enumerate(x))
    packed = masking.pack_words(x, bits)
    assert packed == number.to_bytes(-(-d * bits // 8), "little")
    np.testing.assert_array_equal(masking.unpack_words(packed, bits, d, word), x)


def test_elements_are_private_keys_and_sums_of_points_are_recognised():
    draw, same = random_source(0, "points"), masking.is_sum_or_difference

    def key(x):
        return masking.public_key(masking.private_from_scalar(x % PRIME))

    for _ in range(10):
        private, number = draw(32), masking.random_element(draw)
        clamped = int.from_bytes(private, "little") & (2**254 - 8) | 2**254
        mine = masking.private_from_scalar(masking.scalar(private))
        assert mine == clamped.to_bytes(32, "little"), "the key itself, clamped"
        assert key(masking.scalar(private)) == masking.public_key(private)
        assert key(number) == key(PRIME - number)
        a, b, e = number, *(masking.random_element(draw) for _ in range(2))
        assert same(key(a), key(b), key(a + b)) and same(key(a), key(b), key(a - b))
        assert same(key(a), key(a), key(2 * a))
        assert not same(key(a), key(b), key(a + 2 * b))
        assert not same(key(a), key(b), key(e))
        private = X25519PrivateKey.from_private_bytes(masking.private_from_scalar(e))
        times = private.exchange(X25519PublicKey.from_public_bytes(key(b)))
        assert times == key(e * b), "the group is of this order"
    with pytest.raises(ValueError, match="not a valid private key"):
        masking.private_from_scalar(0)


# ---- set-up and graph


def connected(alive, near):
    links, alive = np.zeros((len(near),) * 2), sorted(alive)
    np.put_along_axis(links, near, 1, 1)
    some = links[np.ix_(alive, alive)]
    return connected_components(some, return_labels=False) == 1


@few
@given(st.integers(2, 40), st.data())
def test_the_graph_is_regular_mutual_connected_and_the_sessions(n, data):
    k = data.draw(st.integers(min(2, n - 1), n - 1))
    assume(n * k % 2 == 0)
    session = data.draw(st.binary(min_size=16, max_size=16))
    near = protocol.graph(n, k, session)
    assert near.shape == (n, k) and connected(range(n), near)
    assert all(len({*row} - {i}) == k for i, row in enumerate(near.tolist()))
    assert all(i in near[j] for i in range(n) for j in near[i])
    assert sorted(protocol.client_circle(n, session)) == list(range(n))
    other = protocol.graph(n, k, bytes(b ^ 1 for b in session))
    assert n < 30 or k > n - 3 or not np.array_equal(near, other)


@few
@given(st.integers(5, 14), st.sampled_from([2, 4, 6, 8]), st.data())
def test_together_means_connected(n, k, data):
    assume(k < n - 1)
    alive = data.draw(st.sets(st.integers(0, n - 1), min_size=1))
    setup = Setup(n, 1, Ring(8), k // 2 + 1, k, session=bytes(16))
    near = protocol.graph(n, k, setup.session)
    assert protocol.surely_connected(setup, alive) == connected(alive, near)


@tabled(
    "bad",
    [
        *(dict(threshold=2), dict(threshold=5), dict(neighbours=6), dict(quorum=3)),
        *(dict(quorum=7), dict(committee=7), dict(committee=5, signatures=2)),
        *(dict(signatures=7), dict(largest=-1), dict(session=b"short")),
        *(dict(session=7), dict(support="x"), dict(n_clients=7, neighbours=3)),
    ],
    ids=str,
)
def test_unsafe_parameters_are_refused(bad):
    good = dict(n_clients=6, d=3, ring=Ring(8), threshold=3, neighbours=4)
    assert Setup(**good)
    with pytest.raises(ValueError, match=[*bad][-1]):
        Setup(**{**good, **bad})


def test_defaults_are_a_majority():
    setup = Setup(10, 1, Ring(8), 6)
    assert (setup.neighbours, setup.quorum) == (9, 7)
    for n, k in itertools.product(range(3, 20), range(2, 19)):
        for t in range(k // 2 + 1, k + 1) if k < n and n * k % 2 == 0 else ():
            q = Setup(n, 1, Ring(8), t, k).quorum
            assert n / 2 < q <= n and q > t
    sizes = [Setup(4, 1, Ring(bits), 2).word.itemsize for bits in (2, 32, 33, 62)]
    assert sizes == [4, 4, 8, 8], "a word holds the ring"


def test_overflow_is_checked_against_all_invited():
    Setup(100, 10, Ring(8), 60, largest=1)
    says = "n_clients \\* largest is 200; 8 bits hold sums up to 127"
    with refused(RingOverflow, SERVER, ADVERTISE, says):
        Setup(100, 10, Ring(8), 60, largest=2)
    assert issubclass(RingOverflow, (Overflow, SecAggError))


def test_every_parameter_is_in_the_digest():
    base = dict(n_clients=6, d=3, ring=Ring(8), threshold=3, neighbours=4)
    others = dict(d=4, ring=Ring(9), threshold=4, neighbours=5, n_clients=8, quorum=5)
    others |= dict(largest=1, support=b"x", committee=5, signatures=5)
    changed = [base | {name: value} for name, value in others.items()]
    digests = {Setup(**setting).digest for setting in [base, *changed]}
    assert len(digests) == len(others) + 1 and {len(d) for d in digests} == {32}
    assert Setup(**base, session=b"y" * 16).digest == Setup(**base).digest
    assert Setup(**base).session != Setup(**base).session, "fresh unless given"


# ---- the sum


def survives(setup, drop):
    """What should happen, from the rules: the survivors, or None where the protocol
    must stop.
    """
    n = setup.n_clients
    near = protocol.graph(n, setup.neighbours, setup.session)
    answered = [{i for i in range(n) if drop.get(i, 6) > step} for step in range(6)]

    def short(owners, here):
        near_here = {i: len(set(near[i].tolist()) & here) for i in owners}
        return {i for i in owners if near_here[i] < setup.threshold}

    members = set(answered[COMPLAIN])
    while lonely := short(members, members):
        members -= lonely
    for step, here in enumerate(answered):
        owners = members if step >= COMPLAIN else here
        here = here & members if step >= COMPLAIN else here
        if len(here) < setup.quorum or short(owners, here):
            return None
        if step <= MASKED and not connected(here, near):
            return None
    return tuple(sorted(answered[MASKED] & members))


SIZES = st.sampled_from([8, 13, 20, 32, 33, 62])


@settings(drawn, max_examples=75)
@given(st.data(), st.integers(5, 10), SIZES, st.integers(1, 20))
def test_the_sum_is_exact_under_any_dropouts(data, n, bits, d):
    k = data.draw(st.sampled_from([n - 1, n - 1, *range(2, n - 1)]))
    assume(n * k % 2 == 0)
    t = data.draw(st.sampled_from([k // 2 + 1, k // 2 + 1, k // 2 + 1, k]))
    rng = seed_tree(data.draw(st.integers(0, 2**32)), "schedule")  # uniform
    gone = rng.permutation(n)[: rng.integers(1, n // 2)]
    drop = {int(i): int(rng.integers(6)) for i in gone}
    ring, session = Ring(bits), data.draw(st.binary(min_size=16, max_size=16))
    expected, x = "unknown", vectors(n, d, ring)
    if k % 2 == 0 or k == n - 1:
        expected = survives(Setup(n, d, ring, t, k, session=session), drop)
    try:
        out = run_session(x, ring, t, k, seed=0, drop=drop, session=session)
    except BelowThreshold:
        assert expected in (None, "unknown")
    else:
        assert expected in (out.survivors, "unknown")
        assert set(out.survivors) <= {i for i in range(n) if drop.get(i, 6) > MASKED}
        assert (out.total == ring.sum(x[[*out.survivors]])).all()
        assert out.total.dtype == np.int64


def test_a_masked_vector_is_the_vector_plus_the_masks_and_no_sum_of_some_is_open():
    p = gathered(small(bits=20, d=7))
    pairs, own = [bytes(c.pair) for c in p.clients], bytes(p.clients[3].own)
    play(p, MASKED)
    key = masking.derive_key(own, b"own mask", 16, p.setup.session, MASKED, 3, 3)
    expected = p.x[3] + stream(key, 7).astype(np.int64)
    mine = X25519PrivateKey.from_private_bytes(pairs[3])
    for j in p.clients[3].neighbours:
        public = X25519PrivateKey.from_private_bytes(pairs[j]).public_key()
        key = parties.pair_key(p.setup, mine.exchange(public), 3, j)
        mask = stream(key, 7).astype(np.int64)
        expected = expected + (mask if j > 3 else -mask)
    sent, ring = np.array([*masked(p)]), p.setup.ring
    np.testing.assert_array_equal(sent[3], expected % 2**20)
    for size in range(1, 7):
        for chosen in map(list, itertools.combinations(range(6), size)):
            assert not np.array_equal(ring.sum(sent[chosen]), ring.sum(p.x[chosen]))


def test_no_vector_is_kept():
    "Twenty clients, one vector each in flight: the peak stays at a few vectors."
    d, ring = 200_000, Ring(32)
    x = vectors(1, d, ring)[0].astype(np.uint32)
    tracemalloc.start()
    out = run_session([x] * 20, ring, 4, 6, seed=0, drop={3: MASKED})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * x.nbytes
    np.testing.assert_array_equal(out.total, ring.wrap(19 * x.astype(np.int64)))


@tabled("bits", [8, 5])
def test_masks_are_uniform_and_reach_the_top(bits):
    setup = Setup(3, 2**15, Ring(bits), 2, session=bytes(16))
    p = gathered(setup, x=np.zeros((3, 2**15), np.int64), seed=5)
    play(p, MASKED)
    for sent in masked(p):
        count = np.bincount(sent, minlength=2**bits)
        assert fit(count, np.full(2**bits, 2.0**-bits)) > ALARM / 3
        assert len(count) == 2**bits and count[-1] > 0 and count[0] > 0


def test_nothing_is_unmasked_below_the_threshold():
    p = six(UNMASK)
    before = p.server.total.copy()
    with pytest.raises(BelowThreshold):
        play(p, drop={0: UNMASK, 1: UNMASK, 2: UNMASK})
    assert not hasattr(p.server, "result") and np.array_equal(p.server.total, before)
    for i in (1, 2):  # late, but the round is still open
        p.server.receive(i, p.clients[i].receive(p.mail[i]))
    p.server.advance()
    exact(p, range(6))


# ---- corruption


def repaired(data, at, by, seen):
    bad = flip(data[:-4], at, by)
    return bad + struct.pack("<I", zlib.crc32(bad))


KINDS = {
    "flip": lambda data, at, by, seen: flip(data, at, by),
    "flip, checksum repaired": repaired,
    "cut": lambda data, at, by, seen: data[: at % len(data)],
    "grown": lambda data, at, by, seen: data + bytes([by]) * (1 + at % 9),
    "another message": lambda data, at, by, seen: seen[at % len(seen)],
}
BYTE, PLACE, STEP = st.integers(1, 255), st.integers(0, 10**6), st.integers(0, 5)


@settings(drawn, max_examples=80)
@given(
    STEP,
    st.sampled_from(["up", "down"]),
    st.integers(0, 5),
    st.sampled_from(sorted(KINDS)),
    PLACE,
    BYTE,
    st.dictionaries(st.integers(0, 5), STEP, max_size=1),
)
def test_one_corrupted_message_never_makes_a_wrong_sum(
    step, way, client, kind, at, by, drop
):
    p, seen, changed = six(), [], []

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
        exact(p)
        assert len(errors) == sum(changed), "every change is noticed"
        for error in errors:
            assert isinstance(error, ValueError) and error.client in (client, SERVER)
            assert error.round == ROUNDS[step]
            assert f"round '{ROUNDS[step]}'" in str(error)
            assert party_name(error.client) in str(error)


def test_an_error_changes_nothing():
    "The right message is still accepted after a wrong one, by all, at every round."
    p = six()

    def once(receiver, call, data):
        before = receiver.step
        with pytest.raises(SecAggError):
            call(flip(data, len(data) // 2))
        assert receiver.step == before
        return call(data)

    for step in range(6):
        for c in p.clients:
            said = once(c, c.receive, p.mail[c.me]) if step else c.start()
            once(p.server, lambda data: p.server.receive(c.me, data), said)
        p.mail = p.server.advance()
    exact(p, range(6))


# ---- each refusal by name: what is done after all played up to a round


def passed_on(change):
    "A server passes keys on that it should have refused, signed by their owner or not."

    def act(p):
        entries, j = bundles_of(p)
        down(p, 0, 0, entries | {j: change(p, j, entries[j])})

    return act


def forged(p):
    stranger = sessions.identities(6, 99)[0][1]
    p.server.receive(1, protocol.seal(p.setup, stranger, (0, 1, SERVER), bundle(p, 1)))


def copied(part):
    def act(p):
        p.server.receive(0, p.clients[0].start())
        theirs, mine = bundle(p, 0), bundle(p, 1)
        keys = [theirs[:32] + mine[32:64], mine[:32] + theirs[:32], mine[:32] * 2]
        up(p, 1, 0, keys[part] + mine[64:])

    return act


def other_support(reframed):
    def act(p):
        c = Client(small(support=b"b"), 4, p.private[4], p.directory, p.x[4], seed=0)
        agreed = dict(fingerprint=p.setup.fingerprint) if reframed else {}
        p.server.receive(4, reframe(c.start(), **agreed))

    return act


ELSEWHERE = small(session=b"another session!")


def other_session(p):
    gathered(ELSEWHERE).server.receive(0, p.clients[0].start())


def rerouted(p):
    "Said in another session, with this one's name written over it."
    other = gathered(ELSEWHERE)
    said = read(other.clients[0].start()).payload[HEAD.size :]
    said = HEAD.pack(p.setup.session, 0, 0, SERVER) + said
    p.server.receive(0, reframe(p.clients[0].start(), payload=said))


def some_shares(p):
    body = p.clients[0]._share(body_of(p.mail[0]))
    up(p, 0, SHARE, body[: -4 - parties.DEALT_SIZE])


def rest(good):
    return dict([*good.items()][1:])


def two_bundles(p):
    down(p, 0, ADVERTISE, rest(rest(bundles_of(p)[0])))


def two_shares(p):
    down(p, 0, SHARE, rest(rest(records_of(p.mail[0], parties.FORWARDED_SIZE))))


def signatures(change):
    "Client 0 hears signatures on the lists, changed by (p, records, first id)."

    def act(p):
        good = records_of(p.mail[0], SIGNATURE_SIZE)
        down(p, 0, CHECK, change(p, good, min(good)))

    return act


def on_other_lists(p, good, j):
    other = hashlib.sha256(lists(p, range(5), [5])).digest()
    return {**good, j: read(from_client(p, CHECK, j, other)).payload[-SIGNATURE_SIZE:]}


def told(survivors, dropouts):
    return lambda p: down(p, 0, MASKED, lists(p, survivors, dropouts))


def without_a_neighbour(p):
    down(p, 0, MASKED, lists(p, set(range(6)) - {p.clients[0].neighbours[0]}, ()))


def unsigned(p, j, entry):
    return entry[:BUNDLE_SIZE][::-1] + entry[BUNDLE_SIZE:]


def unlike(p, j, entry):
    return signed(p, j, entry[:64] + small(support=b"b").digest)


FIRST, BOTH = "the first neighbour", "survivor and as dropout"
REFUSALS = [  # played up to, what is done, kind, who is named, round, words
    (0, forged, BadSignature, 1, 0, "does not match its key"),
    (1, passed_on(unsigned), BadSignature, FIRST, 0, "does not match its key"),
    (0, copied(0), BadKey, 1, 0, "same key as client 0"),
    (0, copied(1), BadKey, 1, 0, "same key as client 0"),
    (0, copied(2), BadKey, 1, 0, "same key as client 1"),
    (0, lambda p: up(p, 1, 0, bundle(p, 1)[:-1]), Damaged, 1, 0, "95 bytes"),
    (0, other_support(False), SupportMismatch, 4, 0, "a different support"),
    (0, other_support(True), SupportMismatch, 4, 0, "support differ"),
    (1, passed_on(unlike), SupportMismatch, FIRST, 0, "support differ"),
    (1, lambda p: p.clients[0].receive(reframe(p.mail[0], d=5)), Damaged, SERVER, 0, "4 are exp"),
    (1, lambda p: p.clients[0].start(), Replay, 0, 0, "already started"),
    (0, lambda p: p.clients[0].receive(b""), Replay, SERVER, 0, "no message is expected now"),
    (1, lambda p: up(p, 0, 0, bundle(p, 0)), Replay, 0, 1, "another round"),
    (1, lambda p: p.clients[0].receive(p.mail[1]), Replay, SERVER, 0, "another receiver"),
    (2, lambda p: down(p, 0, 0, b""), Replay, SERVER, 1, "another round"),
    (1, lambda p: p.server.receive(1, from_client(p, 1, 0, b"")), Replay, 1, 1, "another sender"),
    (0, other_session, Replay, 0, 0, "another session"),
    (1, lambda p: p.server.receive(9, b""), Replay, 9, 1, "not invited"),
    (0, rerouted, BadSignature, 0, 0, "does not match its key"),
    (1, lambda p: down(p, 0, 0, body_of(p.mail[0]) * 2), Inconsistent, SERVER, 0, "twice"),
    (1, two_bundles, BelowThreshold, 0, SHARE, "2 of its neighbours"),
    (2, two_shares, BelowThreshold, 0, COMPLAIN, "2 of its neighbours"),
    (1, some_shares, BadShare, 0, 1, "3 records; it must send 4"),
    (1, lambda p: up(p, 0, 1, b""), BadShare, 0, 1, "0 records"),
    (5, signatures(lambda p, good, j: rest(good)), BelowThreshold, 0, UNMASK, "2 others signed"),
    (5, signatures(on_other_lists), BadSignature, FIRST, CHECK, "does not match its key"),
    (5, signatures(lambda p, good, j: {0: good[j]}), Inconsistent, SERVER, CHECK, "not belong"),
    (4, lambda p: up(p, 1, CHECK, bytes(32)), Inconsistent, 1, CHECK, "differ from those sent"),
    (4, told(range(6), range(6)), Inconsistent, SERVER, MASKED, BOTH),
    (4, told(range(6), {1}), Inconsistent, SERVER, MASKED, BOTH),
    (4, told(range(1, 6), {0}), Inconsistent, SERVER, MASKED, "not listed"),
    (4, without_a_neighbour, Inconsistent, SERVER, MASKED, "do not agree"),
    (4, lambda p: down(p, 0, MASKED, bytes([255, 0])), Inconsistent, SERVER, MASKED, "not exist"),
    (4, lambda p: down(p, 0, MASKED, bytes(3)), Damaged, SERVER, MASKED, "3 bytes; they must have 2"),
    (4, told({0, 1, 2}, {3, 4, 5}), BelowThreshold, SERVER, MASKED, "3 clients are left; 4 are"),
]  # fmt: skip


@tabled("stop, act, kind, named, step, says", REFUSALS, ids=range(len(REFUSALS)))
def test_a_refusal_names_its_client_and_its_round(stop, act, kind, named, step, says):
    p = six(stop)
    if named == FIRST:
        sizes = {1: BUNDLE_SIZE + SIGNATURE_SIZE, 5: SIGNATURE_SIZE}
        named = min(records_of(p.mail[0], sizes[stop]))
    with refused(kind, named, step, says):
        act(p)


def test_no_client_reveals_both_secrets():
    "Who signed one pair of lists signs no other, and a dropout's key alone is opened."
    p = six(CHECK)
    p.clients[0].receive(p.mail[0])
    with refused(Replay, SERVER, CHECK, "round"):
        down(p, 0, MASKED, lists(p, range(5), {5}))
    sets = protocol.client_sets(p.setup, lists(p, {0, 4}, {1}), 2, MASKED)
    assert sets == [{0, 4}, {1}]
    for drop in ({}, {5: MASKED}):
        p = six(CHECK + 1, drop)
        for c in p.clients[: 6 - len(drop)]:
            held = {i: tuple(map(bytes, pair)) for i, pair in c.held.items()}
            shares = records_of(c.receive(p.mail[c.me]), ELEMENT_SIZE)
            assert shares == {i: held[i][i in drop] for i in c.neighbours}


def test_who_left_stays_away_and_what_is_over_is_over():
    p = six(CHECK, {5: 1})
    with refused(Replay, 5, CHECK, "dropped out"):
        p.server.receive(5, b"")
    c = next(c for c in p.clients[:5] if 5 in c.neighbours)
    with refused(Inconsistent, SERVER, MASKED, "do not agree"):
        down(p, c.me, MASKED, lists(p, range(6), ()))  # its masks would not cancel
    play(p)
    with refused(Replay, 0, UNMASK, "over"):
        p.server.receive(0, b"")
    with refused(Replay, SERVER, UNMASK, "over"):
        p.server.advance()
    with refused(Replay, SERVER, UNMASK, "no message is expected now"):
        p.clients[0].receive(b"")


def test_the_second_mail_is_held_against_the_first():
    p = six(MASKED, {5: SHARE})
    c = next(c for c in p.clients[:5] if 5 in c.neighbours)
    some = [c.me, *[i for i in c.neighbours if i < 5][:2]]
    for kind, ids, says in (
        (Inconsistent, range(6), "does not agree with the shares"),
        (Inconsistent, set(range(5)) - {c.me}, "does not agree"),
        (BelowThreshold, some, "3 clients are left"),
        (Damaged, None, "2 bytes; they must have 1"),
    ):
        with refused(kind, SERVER, COMPLAIN, says):
            down(p, c.me, COMPLAIN, b"ab" if ids is None else protocol.bitmap(ids, 6))
    assert down(p, c.me, COMPLAIN, protocol.bitmap(range(5), 6))


def test_a_directory_must_be_complete_and_without_repetition():
    private, directory = sessions.identities(6, 0)
    lacking = {i: key for i, key in directory.items() if i != 2}
    for wrong, named, says in (
        (lacking, 2, "no 32-byte key"),
        ({**directory, SERVER: b"x"}, SERVER, "no 32-byte key"),
        ({**directory, 4: directory[1]}, 4, "key of client 1"),
    ):
        with refused(BadKey, named, 0, says):
            Client(small(), 0, private[0], wrong)
        with refused(BadKey, named, 0, says):
            Server(small(), private[SERVER], wrong)
    with pytest.raises(ValueError, match="me is 6"):
        Client(small(), 6, private[0], directory)


ORDER_8 = (
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
)
LOW = {"0": 0, "1": 1, "-1": CURVE - 1, "order 8": ORDER_8[0], "8 too": ORDER_8[1]}
LOW |= {"p": CURVE, "p + 1": CURVE + 1, "high bit": 2**255, "not reduced": CURVE + 9}
LOW |= {"high bit, order 8": 2**255 + ORDER_8[0]}


@tabled("name, where", [*zip(LOW, [0, 32] * 5), ("0", 32), ("order 8", 0)])
def test_a_key_of_small_order_is_refused(name, where):
    """By the server in round 0, the session goes on without its sender; and by clients,
    should a server pass it on.
    """
    key = LOW[name].to_bytes(32, "little")

    def with_key(keys):
        return keys[:where] + key + keys[where + 32 :]

    p = six(n=8, k=6, t=4)
    errors = play(p, tamper=lying(p, {(1, ADVERTISE): with_key}))
    assert [(type(e), e.client, "not valid" in str(e)) for e in errors] == [
        (BadKey, 1, True)
    ]
    exact(p, [0, *range(2, 8)])
    p = six(1, n=4, k=2, t=2)
    with refused(BadKey, bundles_of(p)[1], 0, "not valid"):
        passed_on(lambda p, j, entry: signed(p, j, with_key(entry[:BUNDLE_SIZE])))(p)


@tabled(
    "vector, match",
    [
        (np.ones(4), "float64"),
        (np.ones(5, int), r"\(5,\)"),
        (None, "object"),
        (np.full(4, -1), "outside the ring, 0..65535"),
        (np.full(4, 2**16), "outside the ring"),
        (np.full(4, 11), "^(?!.*11).*larger than the declared 10"),
        (np.full(4, 2**16 - 11), "^(?!.*11).*larger than the declared 10"),
    ],
    ids=str,
)
def test_vectors_beyond_the_declared_range_stay_home_and_are_not_told(vector, match):
    p = gathered(small(largest=10), x=np.full((6, 4), 2**16 - 10))
    p.clients[1].vector = vector
    play(p, MASKED)
    with refused(OutOfRange, 1, MASKED, match):
        p.clients[1].receive(p.mail[1])
    p.clients[1].vector = np.full(4, 10)
    assert not play(p)
    np.testing.assert_array_equal(p.setup.ring.lift(p.server.result), np.full(4, -40))


# ---- liars: sessions of eight, six neighbours each, four shares


def garbage(p, victims):
    "Other ciphertexts for some neighbours."

    def change(body):
        size = ELEMENT_SIZE * (1 + 2 * p.setup.threshold)
        entries = protocol.unpack_records(
            body[size:], parties.DEALT_SIZE, range(99), 0, 0
        )
        spoilt = {i: flip(entries[i], 5) for i in entries if i in victims}
        return body[:size] + pack_records(entries | spoilt)

    return change


def hidden(owner):
    "A holder keeps a share back."

    def change(body):
        shares = protocol.unpack_records(body, ELEMENT_SIZE, range(99), 0, 0)
        return pack_records({i: share for i, share in shares.items() if i != owner})

    return change


def spoils(p, near, many):
    return {(3, SHARE): garbage(p, near[:many])}


def slanders(p, near, many):
    said = {(j, COMPLAIN): lambda body: pack_records({3: b""}) for j in near[:many]}
    return said | {(j, UNMASK): hidden(3) for j in near[:many]}


def deals(p, near, many):
    "Shares off the polynomial for some neighbours, with hashes to match."
    share, honest = p.clients[3]._share, masking.evaluate

    def crooked(c, at):
        return [v + (i < many) for i, v in enumerate(honest(c, at))]

    def shared(body):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(protocol, "evaluate", crooked)
            return share(body)

    p.clients[3]._share = shared
    return {}


def other_key(p, near, many):
    "It shares a mask key that it did not advertise."
    keys = bundle(p, 3)
    p.clients[3]._advertise = lambda: keys
    p.clients[3].pair = bytearray(b"z" * 32)
    return {}


SCENARIOS = [  # lie of or about client 3, victims, who leaves, refused, blamed, named, out
    *(
        (lie, many, drop, many, False, [], bool(drop))
        for lie in (spoils, slanders)
        for many in (1, 2)
        for drop in ({}, {3: MASKED})
    ),
    (spoils, 3, {}, 0, False, [], True),
    (spoils, 6, {}, 0, True, [], True),
    (deals, 1, {}, 1, False, [], False),
    (deals, 6, {}, 0, True, [], True),
    (other_key, 0, {}, 0, False, [3], True),
]


@tabled("lie, many, drop, disputed, blamed, named, out", SCENARIOS)
def test_a_lie_is_borne_or_blamed(lie, many, drop, disputed, blamed, named, out):
    """Up to k - t garbage shares or false complaints blame nobody: holder and owner go
    on, and the owner may still leave: its key is rebuilt without those who slander it.
    """
    p = six(n=8, k=6, t=4)
    near = p.clients[3].neighbours
    errors = play(p, drop=drop, tamper=lying(p, lie(p, near, many)))
    assert [(type(e), e.client) for e in errors] == [(BadShare, i) for i in named]
    assert p.server.blamed.keys() == ({3} if blamed else set())
    if lie is deals:  # a column of points, not of neighbours
        assert len(p.server.refused) == disputed
    else:
        assert p.server.refused == {(3, j) for j in near[:disputed]}
    exact(p, set(range(8)) - ({3} if out else set()))


@tabled("liar", range(4))
def test_a_wrong_revealed_share_names_its_holder_and_the_sum_opens(liar):
    p = six(n=8, k=6, t=4)
    gone = {(liar + 1) % 8: MASKED} if liar % 2 else {}
    play(p, UNMASK, drop=gone)
    true = p.clients[liar].receive(p.mail.pop(liar))
    shares = records_of(true, ELEMENT_SIZE)
    first, second = [*shares][:2]
    beyond = int.from_bytes(shares[first], "little") + PRIME
    says = f"of client {first} is not the one that it accepted"
    for lie, says in (
        ({i: flip(share, 0) for i, share in shares.items()}, says),
        ({**shares, first: bytes(32)}, says),
        ({**shares, first: shares[second]}, says),
        ({**shares, first: beyond.to_bytes(32, "little")}, says),
        (rest(shares), f"{len(shares) - 1} shares; it must send"),
    ):
        with refused(BadShare, liar, UNMASK, says):
            up(p, liar, UNMASK, pack_records(lie))
    if liar == 0:  # may still say the right thing
        p.server.receive(liar, true)
    assert not play(p)
    exact(p, set(range(8)) - gone.keys())


def some_garbage(p, i, rng, body):
    return garbage(p, rng.permutation(12)[: rng.integers(1, 13)])(body)


def slander(p, i, rng, body):
    near = rng.permutation(p.clients[i].neighbours)[: rng.integers(1, 9)]
    return pack_records({int(j): b"" for j in near if j in p.server.shared})


def flipped(low, high):
    return lambda p, i, rng, body: flip(body, int(rng.integers(low, high)))


LIES = {
    "low key": (ADVERTISE, lambda p, i, rng, body: bytes(32) + body[32:]),
    "short keys": (ADVERTISE, lambda p, i, rng, body: body[:-1]),
    "a different support": (ADVERTISE, lambda p, i, rng, body: body[:-32] + bytes(32)),
    "garbage": (SHARE, some_garbage),
    "proof": (SHARE, flipped(0, 32 * 11)),
    "hashes": (SHARE, flipped(-64, 0)),
    "records": (SHARE, lambda p, i, rng, body: body[: -4 - parties.DEALT_SIZE]),
    "slander": (COMPLAIN, slander),
    "no list": (COMPLAIN, lambda p, i, rng, body: body + b"x"),
    "length": (MASKED, lambda p, i, rng, body: body[:-1]),
    "lists": (CHECK, flipped(0, 1)),
    "reveal": (UNMASK, flipped(4, 36)),
    "nonsense": (SHARE, flipped(0, 10**6)),
    "complains nonsense": (COMPLAIN, lambda p, i, rng, body: bytes([7])),
    "silence": (None, None),
}
LATE = "length", "lists", "reveal", "slander", "no list", "complains nonsense"


@tabled("seed", range(20))
def test_liars_within_the_bound_end_no_session_and_no_honest_client_is_blamed(seed):
    """Up to k - t = 3 of 12 clients, each with a lie of its own: the sum opens,
    everybody honest is in it, and only liars are named.
    """
    rng = seed_tree(seed, "liars")
    p = gathered(small(n=12, k=8, t=5), seed=int(rng.integers(3)))
    chosen = rng.permutation(12)[: rng.integers(1, 4)].tolist()
    names = [*LIES]
    lies = {int(i): str(rng.choice(names)) for i in chosen}
    lies[chosen[0]] = names[seed % len(names)]  # each is tried
    drop = {i: int(rng.integers(6)) for i, lie in lies.items() if lie == "silence"}
    said = {
        (i, LIES[lie][0]): lambda body, i=i, lie=lie: LIES[lie][1](p, i, rng, body)
        for i, lie in lies.items()
    }
    errors = play(p, drop=drop, tamper=lying(p, said))
    exact(p)
    named = {error.client for error in errors} | p.server.blamed.keys()
    assert set(range(12)) - lies.keys() <= p.server.survivors and named <= lies.keys()
    out = set(lies) - set(getattr(p.server, "members", ()))  # some before their turn
    free = {"silence", "garbage", "slander", "hashes", "nonsense"}  # need not be named
    for i, lie in lies.items():
        assert lie in free or i in named or lie in LATE and i in out


# ---- the proof of shares

DEALER = random_source(0, "dealer")(32)


def dealt(setup, private=DEALER):
    keys = bytes(32) + masking.public_key(DEALER) + setup.digest
    secrets, holders = (7, masking.scalar(private)), [*protocol.share_points(setup, 0)]
    draw = random_source(0, "deal")
    return keys, protocol.deal(setup, 0, keys, secrets, holders, draw)


def test_honest_shares_pass_and_give_both_secrets_back():
    setup = small(n=8, k=6, t=4)
    keys, d = dealt(setup)
    e = protocol.check_dealing(setup, 0, keys, d)
    assert e == masking.scalar(protocol.challenge(setup, 0, keys, d.start, d.hashes))
    at = protocol.share_points(setup, 0)
    for kind, secret in enumerate((7, masking.scalar(DEALER))):
        assert masking.reconstruct({at[j]: d.shares[j][kind] for j in at}, 4) == secret
        for j in at:
            values = [masking.evaluate(line, [at[j]])[0] for line in d.lines]
            due, share = d.hashes[j] + masking.pack_elements((*values, e)), d.shares[j]
            blinds = {(v - e * f) % PRIME for v, f in zip(values, share)}
            assert len(blinds) == 2, "one tells how the two secrets differ"
            fits = partial(protocol.matches_commitment, setup, 0, j, due=due)
            wrong = share[kind] ^ 1, share[kind] + PRIME
            assert fits(kind, share[kind]) and not fits(1 - kind, share[kind])
            assert not any(fits(kind, value) for value in wrong)
    commit = protocol.share_commitment
    places = itertools.product((1, 2), (0, 1))
    assert len({commit(setup, 0, j, kind, 5, 6) for j, kind in places}) == 4


def test_a_proof_of_another_key_or_an_altered_one_fails():
    setup = small(n=8, k=6, t=4)
    keys, d = dealt(setup)
    own, (first, *others) = d.lines
    for owner, of, bad in (
        (0, *dealt(setup, b"y" * 32)),
        (0, keys, d._replace(start=keys[32:64])),
        (0, keys, d._replace(lines=[own, [first + 1, *others]])),
        (0, keys, d._replace(lines=[own, [0, *others]])),
        (0, keys, d._replace(hashes={**d.hashes, min(d.hashes): bytes(64)})),
        (0, keys, d._replace(hashes=rest(d.hashes))),
        (0, keys[:64] + bytes(32), d),
        (1, keys, d),
    ):
        with refused(BadShare, owner, SHARE, "do not belong to its key"):
            protocol.check_dealing(setup, owner, of, bad)


def difference_with(total, other):
    "A point R with total = R + other or R - other, up to sign: Montgomery's quadratic."
    x, y = (int.from_bytes(key, "little") for key in (total, other))
    p = CURVE
    middle = (x + y) * (x * y + 1) + 2 * 486662 * x * y
    square = (middle * middle - ((x - y) * (x * y - 1)) ** 2) % p
    root = pow(square, (p + 3) // 8, p)
    root = root if root * root % p == square else root * pow(2, (p - 1) // 4, p) % p
    return ((middle + root) * pow((x - y) ** 2, -1, p) % p).to_bytes(32, "little")


def test_the_proof_can_be_made_without_the_secrets(monkeypatch):
    "Proposition B: whoever chooses the oracle's answer needs t - 1 shares, no secret."
    setup, draw = small(n=8, k=6, t=4), random_source(0, "simulator")
    public = masking.public_key(b"unknown to the simulator........")
    keys = bytes(32) + public + setup.digest
    at, challenge = protocol.share_points(setup, 0), draw(32)
    e = masking.scalar(challenge)
    lines = [[masking.random_element(draw) for _ in range(4)] for _ in range(2)]
    known = {j: tuple(masking.random_element(draw) for _ in "ab") for j in [*at][:3]}
    hashes, values = {j: draw(64) for j in at}, {}
    for j, both in known.items():
        values[j] = [masking.evaluate(line, [at[j]])[0] for line in lines]
        hashes[j] = b"".join(
            protocol.share_commitment(setup, 0, j, kind, f, (g - e * f) % PRIME)
            for kind, (f, g) in enumerate(zip(both, values[j]))
        )
    total = masking.public_key(masking.private_from_scalar(lines[1][0]))
    private = X25519PrivateKey.from_private_bytes(challenge)
    times = private.exchange(X25519PublicKey.from_public_bytes(public))
    start = difference_with(total, times)
    monkeypatch.setattr(protocol, "challenge", lambda *about: challenge)
    dealing = protocol.Dealing(None, hashes, start, lines)
    assert protocol.check_dealing(setup, 0, keys, dealing) == e
    for j, kind in itertools.product(known, (0, 1)):
        due = hashes[j] + masking.pack_elements((*values[j], e))
        assert protocol.matches_commitment(setup, 0, j, kind, known[j][kind], due)


def test_a_key_that_the_shares_do_not_give_back_names_its_owner():
    "What the proof excludes is still noticed at the end."
    p = six(n=8, k=6, t=4)
    play(p, UNMASK, drop={2: MASKED})
    for wrong in (5, 0):
        with refused(BadShare, 2, SHARE, "reconstruct another key"):
            p.server._masks_of(2, wrong)


# ---- one step at a time, and secrets that go


def both(call):
    "What two threads get that call at once, an error last."
    gate = threading.Barrier(2)

    def go(_):
        gate.wait()
        try:
            return call()
        except SecAggError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return sorted(pool.map(go, "ab"), key=lambda x: isinstance(x, SecAggError))


def test_a_state_is_entered_once_under_threads(request):
    """Two threads bring the same mail, at every round and to both sides: one is
    answered, the other gets the typed error.
    """
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)
    for _ in range(4):
        p = six()
        for step in range(6):
            for c in p.clients:
                mail = p.mail[c.me]
                said, error = both(lambda: c.receive(mail) if step else c.start())
                assert isinstance(said, bytes) and type(error) is Replay
                none, error = both(lambda: p.server.receive(c.me, said))
                assert none is None and type(error) is Replay
            p.mail, error = both(p.server.advance)
            late = BelowThreshold if step < UNMASK else Replay
            assert type(error) is late, "the next round has no messages yet"
        exact(p, range(6))


ALIVE = {  # round -> secrets that a client still has after it
    ADVERTISE: {"box", "pair", "own", "draw", "vector"},
    SHARE: {"own", "share_keys", "agreed", "vector"},
    COMPLAIN: {"own", "agreed", "held", "vector"},
    MASKED: {"held"},
    CHECK: {"held"},
    UNMASK: set(),
}
SECRETS = set().union(*LAST_USE.values())


def alive(c):
    return {name for name in SECRETS if getattr(c, name, None) is not None}


def left(c):
    "Its secrets by name, each as a list of what it is made of."
    found = {}
    for name in alive(c) - {"draw", "vector"}:
        secret = getattr(c, name)
        parts = secret.values() if isinstance(secret, dict) else [secret]
        parts = (x if isinstance(x, tuple) else (x,) for x in parts)
        found[name] = [*itertools.chain(*parts)]
    return found


def test_secrets_are_erased_with_their_last_use_or_when_a_session_is_closed():
    p = six()
    c, seen = p.clients[0], {}
    for step in range(6):
        seen |= left(c)
        play(p, step + 1)
        assert alive(c) == ALIVE[step]
    flat = [*itertools.chain(*seen.values())]
    assert len(flat) == 3 + 4 + 4 + 8 and {*map(type, flat)} == {bytearray}
    assert not any(map(any, flat)), "overwritten, not only let go"
    s = p.server
    assert s.bundles == s.dealings == s.seen == {} and not s.total.size and not s.inbox
    p = six(MASKED)
    own = p.clients[0].own
    p.clients[0].close()
    assert not any(own) and not alive(p.clients[0])
    with refused(Replay, SERVER, UNMASK, "no message is expected now"):
        p.clients[0].receive(p.mail[0])


def test_secrets_are_fresh_unless_seeded():
    assert random_source()(32) != random_source()(32)
    a, b, c = (random_source(0, name) for name in "aab")
    assert a(20) + a(12) == b(32) != c(32)
    private, directory = sessions.identities(6, 0)
    p, q = (
        {bytes(c.box), bytes(c.pair), bytes(c.own)}
        for c in (Client(small(), 0, private[0], directory) for _ in range(2))
    )
    assert not p & q and len(p) == 3
    assert sessions.identities(3)[1] != sessions.identities(3)[1]
    assert len(set(sessions.identities(3, 1)[1].values())) == 4


# ---- put away before every step and taken back


def resumed(p, who, data, setup=None, **how):
    known = setup or p.setup, p.private[who], p.directory, data
    if who == SERVER:
        return Server.resume(*known)
    return Client.resume(*known, **(how or dict(seed=0)))


def away(p, party):
    "The same party after a night in a drawer."
    return resumed(p, party.me, party.state())


def played(between, drop={}):
    "All messages of a session, both ways, and its parties at the end."
    p, said = six(), []
    for step in range(6):
        p.server, p.clients = between(p, p.server), [between(p, c) for c in p.clients]
        play(p, step + 1, drop, lambda *about: said.append(about) or about[-1])
    p.server = between(p, p.server)
    return said, p


@settings(drawn, max_examples=20)
@given(st.dictionaries(st.integers(0, 5), STEP, max_size=1))
def test_put_away_before_every_step_equals_never_put_away(drop):
    (said, p), (again, q) = (played(f, drop) for f in (lambda p, c: c, away))
    assert said == again and p.server.survivors == q.server.survivors
    np.testing.assert_array_equal(p.server.result, q.server.result)
    np.testing.assert_array_equal(p.server.traffic, q.server.traffic)


def test_who_lied_is_remembered():
    p = six()
    p.server.blamed = {2: BadShare("it lied: drop it", 2, SHARE)}
    error = away(p, p.server).blamed[2]
    assert type(error) is BadShare and (error.client, error.round) == (2, "share")
    assert str(error) == "round 'share', client 2: it lied: drop it"


def test_what_was_put_away_says_nothing_more():
    p = six()
    c, box = p.clients[0], p.clients[0].box
    first = c.state()
    assert not any(box) and c.box is None
    p.server.state()
    for call in (c.start, p.server.advance):
        with pytest.raises(Replay):
            call()
    assert resumed(p, 0, first).start()


def test_erased_secrets_are_in_no_later_state():
    "Each secret of a client, as bytes, is absent from the states after its last use."
    secrets, seen = {}, []

    def look(p, party):
        if party is not p.clients[0]:
            return party
        secrets.update({name: [*map(bytes, x)] for name, x in left(party).items()})
        seen.append((party.step, party.state()))
        return resumed(p, 0, seen[-1][1])

    played(look)
    assert secrets.keys() == SECRETS - {"draw", "vector"}
    for last, names in LAST_USE.items():
        for value in itertools.chain(*(secrets.get(name, ()) for name in names)):
            held = [step for step, data in seen if value in data]
            assert held and max(held) <= last


def test_a_state_that_comes_back_answers_no_round_twice(tmp_path):
    """A copy of each state is brought back after its reply, in this process and by a
    counter of another; nothing is said, and an unacceptable message costs nothing.
    """
    p = six()
    p.clients[0].counter = Counter(tmp_path)
    for step in range(6):
        copy, mail = p.clients[0].state(), p.mail[0]
        p.clients[0] = resumed(p, 0, copy, counter=Counter(tmp_path))
        if step:
            with pytest.raises(SecAggError):
                p.clients[0].receive(mail[:-1])
        assert not play(p, step + 1)
        back = resumed(p, 0, copy, counter=Counter(tmp_path))
        with pytest.raises(Replay, match="answered this step before: drop"):
            back.receive(mail) if step else back.start()
    exact(p, range(6))
    assert Counter(tmp_path).reached(p.setup.session, 0) == 5
    assert all(mark.stat().st_mode & 0o777 == 0o600 for mark in tmp_path.iterdir())


def test_a_counter_never_falls_and_one_of_two_processes_passes(tmp_path, monkeypatch):
    session = bytes(range(16))
    one, two = (Counter(tmp_path / "keys") for _ in range(2))
    one.rise(session, 3, 2)
    two.rise(session, 4, 0)
    two.rise(bytes(16), 3, 0)
    for step in (0, 1, 2):
        with pytest.raises(Replay, match="client 3"):
            two.rise(session, 3, step)
    monkeypatch.setattr(Counter, "reached", lambda *_: -1)  # both at once
    with pytest.raises(Replay):
        two.rise(session, 3, 2)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be written .*: free some space"):
        Counter(tmp_path / "file").rise(bytes(16), 0, 0)


def test_a_state_of_somebody_else_is_refused(monkeypatch):
    p = six()
    data, its = p.clients[0].state(), p.server.state()
    for who, stored, setup, says in (
        *((0, flip(data, at), None, "is damaged") for at in (0, 31, 32, 60)),
        (SERVER, data, None, "belongs to client 0; the server must use"),
        (0, its, None, "belongs to the server; a client must use"),
        (0, data, ELSEWHERE, "written with a different session"),
        (0, data, small(bits=17), "written with different public parameters"),
    ):
        with pytest.raises(ValueError, match=says):
            resumed(p, who, stored, setup)
    with pytest.raises(ValueError, match="counter is missing.*: pass client.Counter"):
        resumed(p, 0, data, seed=None)
    monkeypatch.setattr(parties, "VERSION", 3)
    with pytest.raises(ValueError, match="of version 2; this code reads 3"):
        resumed(p, 0, data)


FIELDS = dict.fromkeys(stored_form(Server).__struct_fields__)
ODD = [{"total": total} for total in (7, ["<u4", [3], b"AA"], ["zz", [1], b""])]
ODD += [{"blamed": {1: ["Nothing", "text", 1, 1]}}, {"blamed": {1: "text"}}]
ODD += [{"seen": {b"key": "x"}}, {"refused": [[1]]}, {"step": -1}, {"odd": 1}]
WRONG = [{}, {"step": 0}, *(FIELDS | odd for odd in ODD)]
STORED = [(2, SERVER, small().session, small().digest, fields) for fields in WRONG]
HOSTILE = [b"", b"\x93", b"\x91" * 10**5, b"not msgpack"]
HOSTILE += map(msgspec.msgpack.encode, [(2, 0), *STORED])


@tabled("body", HOSTILE, ids=lambda body: repr(body)[-30:])
def test_whatever_stands_in_a_state_is_refused_in_a_sentence(body):
    "Its hash is no signature: whoever can write the file can write another."
    data = hashlib.sha256(body).digest() + body
    with pytest.raises(ValueError, match="the state cannot be read .*: use the copy"):
        resumed(six(), SERVER, data)


def test_every_field_a_party_can_have_is_kept_or_made_anew():
    "A field that is forgotten would lose the session."
    made = {"setup", "me", "identity", "directory", "draw", "neighbours", "lock"}
    made |= {"inbox", "graph", "counter"}

    def look(p, party):
        kept = stored_form(type(party)).__struct_fields__
        assert set(vars(party)) <= {*kept} | made
        return party

    assert played(look)[1].server.step == len(ROUNDS)


# ---- rulings and the committee


def test_the_ruling_on_complaints():
    setup = small(n=8, k=6, t=4)
    near = protocol.graph(8, 6, setup.session)
    a, b, c, d = near[0][:4].tolist()
    everybody, others = set(range(8)), set(range(1, 8))

    def ruling(*said):
        silent = {i: set() for i in range(8)}
        return server.resolve_complaints(setup, silent | dict(zip((a, b, c, d), said)))

    assert ruling() == (everybody, set(), {})
    assert ruling({0}, {0}) == (everybody, {(0, a), (0, b)}, {})
    assert ruling({0}, {0}, {0}) == (others, set(), {}), "out, but not blamed"
    members, _, named = ruling({0}, {0}, {0}, {0})
    assert members == others and named.keys() == {0} and named[0].round == "share"
    _, _, named = ruling(set(near[a].tolist()), {0}, {0}, {0})
    assert named.keys() == {a} and named[a].round == "complain", "void complaints"


def test_a_server_that_forges_shares_gets_complaints_and_no_shares():
    p = six(COMPLAIN)
    entries = records_of(p.mail[0], parties.FORWARDED_SIZE)
    places = 0, parties.SEALED_SIZE, parties.DEALT_SIZE, parties.FORWARDED_SIZE - 1
    changed = {i: flip(entries[i], at) for i, at in zip(entries, places)}
    said = records_of(down(p, 0, SHARE, changed), 0)
    assert set(said) == set(entries) and not any(p.clients[0].held.values())


def test_the_committee_must_sign():
    setup = small(n=20, k=10, t=6, committee=7, signatures=5)
    chosen = protocol.committee(setup)
    with refused(BelowThreshold, SERVER, CHECK, "4 members signed; 5 are"):
        play(gathered(setup), drop={i: CHECK for i in chosen[:3]})
    p, drop = gathered(setup), {i: CHECK for i in chosen[:2]}
    play(p, UNMASK, drop=drop)
    me, stranger = [i for i in range(20) if i not in chosen][:2]
    good = rest(records_of(p.mail[me], SIGNATURE_SIZE))
    with refused(BelowThreshold, me, UNMASK, "4 others signed the lists; 5 are"):
        down(p, me, CHECK, good)
    with refused(Inconsistent, SERVER, CHECK):
        down(p, me, CHECK, good | {stranger: bytes(64)})
    play(p, drop=drop)
    exact(p, range(20))


RATES = [(100, 0.1, 0.05), (1000, 0.1, 0.05), (1000, 0.05, 0.33), (10_000, 0.1, 0.05)]


@tabled("n, dropout, corrupt", RATES)
def test_the_committee_is_large_enough(n, dropout, corrupt):
    g = sessions.graph_parameters(n, dropout, corrupt)
    lost, bad = int(n * dropout + 1e-9), int(n * corrupt + 1e-9)
    c, m, s = 2 * g.signatures - g.committee - 1, g.committee, g.signatures
    assert stats.hypergeom.sf(c, n, bad, m) <= g.forked * (1 + 1e-6) + 1e-300
    assert g.exposed + g.apart + g.forked <= 2.0**-40
    assert stats.hypergeom.sf(m - s, n, lost, m) <= g.mute * (1 + 1e-6) + 1e-300
    k, t = g.neighbours, g.threshold
    stuck = n * stats.hypergeom.sf(k - t, n - 1, lost, k)
    assert math.isclose(g.stuck, stuck, rel_tol=1e-6) and stuck + g.mute <= 2.0**-20
    assert s <= 200 < g.quorum or s < g.quorum <= 200
    more = dict(quorum=g.quorum, committee=m, signatures=s)
    Setup(n, 1, Ring(8), g.threshold, g.neighbours, **more)


# ---- parameters and cost


@few
@given(st.integers(3, 10), st.data(), st.integers(1, 50), SIZES)
def test_declared_sizes_are_measured_sizes(n, data, d, bits):
    k = data.draw(st.integers(2, n - 1))
    assume(n * k % 2 == 0)
    t, ring = data.draw(st.integers(k // 2 + 1, k)), Ring(bits)
    declared = sessions.overhead(n, k, d, bits, t)
    traffic = run_session(vectors(n, d, ring), ring, t, k, seed=0).traffic
    for (step, way), size in declared.items():
        messages, sizes = traffic[ROUNDS.index(step), :, ("up", "down").index(way)].T
        assert (8 * sizes == size.total).all() and (messages == (size.total > 0)).all()
    assert declared["masked", "up"].payload == 8 * math.ceil(d * bits / 8)


def test_the_bounds_hold_by_enumeration():
    """All choices of marked clients among 9: how often the rest falls apart, and how
    often some client has many marked neighbours.
    """
    n, k = 9, 4
    near, everybody = protocol.graph(n, k, bytes(16)), set(range(n))
    split = sessions.split_probability
    for marked in range(1, 7):
        chosen = [set(c) for c in itertools.combinations(range(n), marked)]
        apart = np.mean([not connected(everybody - c, near) for c in chosen])
        assert apart <= split(n, marked, k) + 1e-12
        tails = sessions.neighbour_tails(n, marked, k)
        most = [
            max(len(c & {*near[j].tolist()}) for j in everybody - c) for c in chosen
        ]
        for i in range(k + 1):
            assert np.mean(np.array(most) >= i) <= tails[i] + 1e-12
        assert tails[-1] == 0 and tails[0] == 1
    assert split(9, 3, 4) == split(9, 8, 8) == 0.0


def test_too_few_are_refused():
    setup = Setup(20, 1, Ring(8), 3, 4, quorum=12, session=bytes(16))
    everybody, near = set(range(20)), protocol.graph(20, 4, setup.session)[7]
    gaps = protocol.client_circle(20, setup.session)[[3, 4, 11, 12]]
    protocol.check_survivors(setup, everybody, everybody, MASKED)
    for alive, owners, step, named, says in (
        (set(range(11)), [0], MASKED, SERVER, "11 clients are left; 12 are"),
        (everybody - {*near[:2].tolist()}, [7], 1, 7, "client 7: 2 of its neighbours"),
        (everybody - {*gaps.tolist()}, [], MASKED, SERVER, "may be disconnected"),
    ):
        with refused(BelowThreshold, named, step, says):
            protocol.check_survivors(setup, alive, owners, step)
    with refused(BelowThreshold, 7, 1, "2 of its neighbours"):
        refusals = [(7, j) for j in near[:2].tolist()]
        protocol.check_survivors(setup, everybody, [7], 1, refusals)
