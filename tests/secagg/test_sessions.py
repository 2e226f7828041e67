"""Secure aggregation: primitives against independent ones, sums under any dropouts, and
refusals under any corruption.
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
from contextlib import contextmanager
from types import SimpleNamespace

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
from tables import tabled

from dpcomm.core import wire
from dpcomm.core.random import seed_tree
from dpcomm.secagg import client as client_module
from dpcomm.secagg import masking, protocol, server, shamir
from dpcomm.secagg import session as session_module
from dpcomm.secagg.client import Client
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
from dpcomm.secagg.masking import CURVE, HEAD, random_source
from dpcomm.secagg.protocol import SIGNATURE_SIZE, Setup, pack_records
from dpcomm.secagg.ring import FixedPoint, Overflow, Ring
from dpcomm.secagg.server import Server
from dpcomm.secagg.session import SessionResult, run_session
from dpcomm.secagg.shamir import ELEMENT_SIZE, PRIME

few = settings(drawn, max_examples=25)


def vectors(n, d, ring, seed=0):
    return seed_tree(seed, "secagg test", n, d).integers(0, ring.modulus, (n, d))


def parties(setup, x=None, seed=0, change=None):
    "A server and clients; `change` gives a client's own view of the setup."
    n = setup.n_clients
    private, directory = session_module.identities(n, seed)
    x = vectors(n, setup.d, setup.ring) if x is None else x
    views = [change(i, setup) if change else setup for i in range(n)]
    clients = [
        Client(views[i], i, private[i], directory, x[i], seed=seed) for i in range(n)
    ]
    return SimpleNamespace(
        setup=setup,
        private=private,
        directory=directory,
        x=x,
        clients=clients,
        server=Server(setup, private[SERVER], directory),
        mail=dict.fromkeys(range(n)),
    )


def play(p, stop=len(ROUNDS), drop=None, tamper=lambda step, way, client, data: data):
    "Play up to a round; whoever errs or is refused is gone. Errors in order."
    errors = []
    for step in range(p.server.step, stop):
        for i, data in p.mail.items():
            if (drop or {}).get(i, len(ROUNDS)) > step:
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
    summed(p.server.result, p.x, p.setup.ring, survivors)


def summed(total, x, ring, survivors):
    wanted = ring.sum(np.asarray(x)[sorted(survivors)])
    np.testing.assert_array_equal(total, wanted)


def small(n=6, k=4, t=3, bits=16, d=4, **more):
    return Setup(n, d, Ring(bits), t, k, session=bytes(range(16)), **more)


def eight(**more):
    return parties(small(n=8, k=6, t=4), **more)


def from_server(p, step, client, body):
    return protocol.seal(p.setup, p.private[SERVER], step, SERVER, client, body)


def from_client(p, step, client, body):
    return protocol.seal(p.setup, p.private[client], step, client, SERVER, body)


def read(data):
    "A frame, whatever length it announces."
    return wire.parse_message(data, wire.FRAME.unpack_from(data)[4])


def body_of(data):
    return read(data).payload[HEAD.size : -SIGNATURE_SIZE]


def signature(p, step, client, body):
    return read(from_client(p, step, client, body)).payload[-SIGNATURE_SIZE:]


def reframe(data, **changes):
    "The same message with some fields of the frame changed and a right checksum."
    m = read(data)
    fields = dict(mechanism=m.mechanism, d=m.d, payload=m.payload)
    fields |= dict(fingerprint=m.fingerprint) | changes
    return wire.Message(**fields).to_bytes()


def records_of(body, size):
    return protocol.unpack_records(body, size, range(99), SERVER, 0)


def bundles_of(p):
    "The bundles that client 0 gets, by their sender, each with its signature."
    return records_of(body_of(p.mail[0]), protocol.BUNDLE_SIZE + SIGNATURE_SIZE)


def bundle(p, i):
    return client_module.key_bundle(p.clients[i])


def tell(p, step, client, entries):
    "What a client answers to records that the server signed."
    return p.clients[client].receive(
        from_server(p, step, client, pack_records(entries))
    )


def lists(p, survivors, dropouts):
    n = p.setup.n_clients
    return protocol.bitmap(survivors, n) + protocol.bitmap(dropouts, n)


def lying(p, liars, said):
    "For `play`: these clients say something else in a round, properly signed."

    def tamper(step, way, i, data):
        if way == "down" or i not in liars or step not in said:
            return data
        return from_client(p, step, i, said[step](body_of(data)))

    return tamper


def stream(key, n, word="<u4"):
    "Words of the cipher's stream."
    raw = bytes(n * np.dtype(word).itemsize)
    raw = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(raw)
    return np.frombuffer(raw, word)


def own_mask(p, i, seed):
    key = masking.derive_key(seed, b"own mask", 16, p.setup.session, MASKED, i, i)
    return stream(key, p.setup.d).astype(np.int64)


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


# ---- primitives


@few
@given(st.data(), st.integers(1, 12), st.integers(0, PRIME - 1))
def test_any_threshold_of_shares_gives_the_secret_back(data, t, secret):
    points = st.lists(st.integers(1, 10**6), min_size=t, max_size=t + 5, unique=True)
    points = data.draw(points)
    line = shamir.polynomial(secret, t, random_source(0, "split"))
    dealt = shamir.evaluate(line, points)
    shares = dict(zip(points, dealt))
    chosen = data.draw(st.permutations(points))[:t]
    part, everywhere = {x: shares[x] for x in chosen}, tuple(sorted(points))
    assert shamir.reconstruct(part, t) == secret
    assert shamir.reconstruct(part, t, everywhere) == secret, "weights of all points"
    assert shamir.reconstruct(shares, t) == secret
    if t > 1:
        fewer = {x: shares[x] for x in chosen[1:]}
        assert shamir.reconstruct(fewer, t - 1) != secret, (
            "a polynomial of degree t - 1"
        )
    part[data.draw(st.sampled_from(chosen))] ^= 1 << data.draw(st.integers(0, 255))
    assert shamir.reconstruct(part, t) != secret


def test_keys_are_hkdf_with_the_whole_context():
    "RFC 5869 by hand: extract with a salt of zeros, expand with the info."
    session, purposes = bytes(range(16)), (b"shares", b"pair mask")
    context = bytes([2]) + (3).to_bytes(4, "little") + (9).to_bytes(4, "little")
    info = b"dpcomm secagg pair mask" + session + context
    extracted = hmac.digest(bytes(32), b"secret", "sha256")
    key = masking.derive_key(b"secret", b"pair mask", 16, session, 2, 3, 9)
    assert key == hmac.digest(extracted, info + b"\x01", "sha256")[:16]
    sessions, holders = (bytes(16), bytes(15) + b"\x01"), (3, 4, SERVER)
    contexts = itertools.product(purposes, sessions, (1, 2), (3, 4), holders)
    keys = {
        masking.derive_key(b"s" * 32, purpose, 16, session, step, a, b)
        for purpose, session, step, a, b in contexts
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
    assert masking.CHUNK == len(masking.ZEROS)


@few
@given(st.integers(2, 62), st.integers(1, 40), st.integers(0, 2**32))
def test_packing_is_little_endian_and_tight(bits, d, seed):
    word = np.dtype("<u4" if bits <= 32 else "<u8")
    x = seed_tree(seed).integers(0, 2**bits, d).astype(word)
    number = sum(int(v) << (bits * i) for i, v in enumerate(x))
    packed = masking.pack_words(x, bits)
    assert packed == number.to_bytes(-(-d * bits // 8), "little")
    np.testing.assert_array_equal(masking.unpack_words(packed, bits, d, word), x)


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


def test_too_few_are_refused():
    setup = Setup(20, 1, Ring(8), 3, 4, quorum=12, session=bytes(16))
    check, everybody = protocol.check_survivors, set(range(20))
    check(setup, everybody, everybody, MASKED)
    with refused(BelowThreshold, SERVER, MASKED, "11 clients are left; 12 must"):
        check(setup, range(11), [0], MASKED)
    near = protocol.graph(20, 4, setup.session)[7]
    says = "client 7: 2 of its neighbours are left; 3 must"
    with refused(BelowThreshold, 7, SHARE, says):
        check(setup, everybody - set(near[:2].tolist()), [7], 1)
    gaps = protocol.client_circle(20, setup.session)[[3, 4, 11, 12]]
    with pytest.raises(BelowThreshold, match="fall apart"):
        check(setup, everybody - set(gaps.tolist()), [], 2)


# ---- set-up


@tabled(
    "bad",
    [
        *(dict(threshold=2), dict(threshold=5), dict(neighbours=6), dict(quorum=3)),
        *(dict(quorum=7), dict(committee=7), dict(committee=5, signatures=2)),
        *(dict(signatures=7), dict(largest=-1), dict(session=b"short")),
        dict(n_clients=7, neighbours=3),
    ],
    ids=str,
)
def test_unsafe_parameters_are_refused(bad):
    good = dict(n_clients=6, d=3, ring=Ring(8), threshold=3, neighbours=4)
    protocol.check_setup(Setup(**good))
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
    with pytest.raises(RingOverflow, match=says) as caught:
        Setup(100, 10, Ring(8), 60, largest=2)
    assert isinstance(caught.value, (Overflow, SecAggError))
    assert caught.value.client == SERVER
    with pytest.raises(Overflow):
        FixedPoint(Ring(8), 1.0, 2.0, 100)


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
        summed(out.total, x, ring, out.survivors)
        assert isinstance(out, SessionResult) and out.total.dtype == np.int64


def test_a_masked_vector_is_the_vector_plus_the_masks():
    p = parties(small(bits=20, d=7))
    pairs, own = [bytes(c.pair) for c in p.clients], bytes(p.clients[3].own)
    play(p, MASKED)
    near, expected = p.clients[3].neighbours, p.x[3] + own_mask(p, 3, own)
    mine = X25519PrivateKey.from_private_bytes(pairs[3])
    for j in near:
        public = X25519PrivateKey.from_private_bytes(pairs[j]).public_key()
        key = client_module.pair_key(p.setup, mine.exchange(public), 3, j)
        mask = stream(key, 7).astype(np.int64)
        expected = expected + (mask if j > 3 else -mask)
    np.testing.assert_array_equal([*masked(p)][3], expected % 2**20)


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


# ---- what the server sees


@tabled("bits", [8, 5])
def test_masks_are_uniform_and_reach_the_top(bits):
    setup = Setup(3, 2**15, Ring(bits), 2, session=bytes(16))
    p = parties(setup, x=np.zeros((3, 2**15), np.int64), seed=5)
    play(p, MASKED)
    for sent in masked(p):
        count = np.bincount(sent, minlength=2**bits)
        assert fit(count, np.full(2**bits, 2.0**-bits)) > ALARM / 3
        assert len(count) == 2**bits and count[-1] > 0 and count[0] > 0


def test_nothing_is_unmasked_below_the_threshold():
    p = parties(small())
    play(p, UNMASK)
    before = p.server.total.copy()
    with pytest.raises(BelowThreshold):
        play(p, drop={0: UNMASK, 1: UNMASK, 2: UNMASK})
    assert not hasattr(p.server, "result") and np.array_equal(p.server.total, before)
    for i in (1, 2):  # late, but the round is still open
        p.server.receive(i, p.clients[i].receive(p.mail[i]))
    p.server.advance()
    exact(p, range(6))


# ---- corruption


def flip(data, at, by):
    at %= len(data)
    return data[:at] + bytes([data[at] ^ by]) + data[at + 1 :]


def repaired(bad):
    return bad + struct.pack("<I", zlib.crc32(bad))


KINDS = {
    "flip": lambda data, at, by, seen: flip(data, at, by),
    "flip, checksum repaired": lambda data, at, by, seen: repaired(
        flip(data[:-4], at, by)
    ),
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
        exact(p)
        assert len(errors) == sum(changed), "every change is noticed"
        for error in errors:
            assert isinstance(error, ValueError) and error.client in (client, SERVER)
            assert error.round == ROUNDS[step]
            assert f"round '{ROUNDS[step]}'" in str(error)
            assert party_name(error.client) in str(error)


SIGNED = st.sampled_from([SHARE, COMPLAIN, CHECK, UNMASK])


@settings(drawn, max_examples=30)
@given(SIGNED, st.integers(0, 6), PLACE, BYTE, st.booleans())
def test_a_client_that_signs_nonsense_never_ends_a_session(
    step, client, at, by, one_leaves
):
    """Shares, complaints, lists and revealed shares, altered by their own sender and
    properly signed: the sum opens, and only the liar is blamed.
    """
    p = parties(small(n=7, k=6, t=4))
    nonsense = {step: lambda body: flip(body, at, by) if body else bytes([by])}
    drop = {(client + 1) % 7: COMPLAIN} if one_leaves else {}
    errors = play(p, drop=drop, tamper=lying(p, [client], nonsense))
    exact(p)
    named = {error.client for error in errors if error.round == ROUNDS[step]}
    assert named | p.server.blamed.keys() <= {client}
    noticed = errors or p.server.blamed or p.server.refused
    assert noticed or step == SHARE and one_leaves, "unless said to the one that left"


def test_an_error_changes_nothing():
    "The right message is still accepted after a wrong one, by all, at every round."
    p = parties(small())

    def once(receiver, call, data):
        before = receiver.step
        with pytest.raises(SecAggError):
            call(flip(data, len(data) // 2, 1))
        assert receiver.step == before
        return call(data)

    for step in range(6):
        for c in p.clients:
            up = once(c, c.receive, p.mail[c.me]) if step else c.start()
            once(p.server, lambda data: p.server.receive(c.me, data), up)
        p.mail = p.server.advance()
    exact(p, range(6))


# ---- each refusal by name


def test_a_directory_must_be_complete_and_without_repetition():
    private, directory = session_module.identities(6, 0)
    lacking = {i: key for i, key in directory.items() if i != 2}
    with refused(BadKey, 2, 0, "no 32-byte key"):
        client_module.check_directory(small(), lacking)
    with refused(BadKey, SERVER, 0, "no 32-byte key"):
        Client(small(), 0, private[0], {**directory, SERVER: b"x"})
    with refused(BadKey, 4, 0, "key of client 1"):
        Server(small(), private[SERVER], {**directory, 4: directory[1]})
    with pytest.raises(ValueError, match="me is 6"):
        Client(small(), 6, private[0], directory)


def test_a_bundle_of_another_key_is_refused():
    "By the server when it comes, and by the neighbours should a server pass it on."
    p = parties(small())
    stranger = session_module.identities(6, 99)[0][1]
    forged = protocol.seal(p.setup, stranger, 0, 1, SERVER, bundle(p, 1))
    with refused(BadSignature, 1, 0):
        p.server.receive(1, forged)
    play(p, 1)
    entries, n = bundles_of(p), protocol.BUNDLE_SIZE
    j = min(entries)
    turned = entries[j][:n][::-1] + entries[j][n:]
    with refused(BadSignature, j, 0):
        tell(p, 0, 0, entries | {j: turned})
    with pytest.raises(BadSignature):
        protocol.check_signature(p.setup, p.directory, 0, 1, SERVER, b"body", bytes(64))


def test_repeated_keys_are_refused():
    p = parties(small())
    p.server.receive(0, p.clients[0].start())
    theirs, own = bundle(p, 0), bundle(p, 1)
    for copied in (theirs[:32] + own[32:], own[:32] + theirs[:32] + own[64:]):
        with refused(BadKey, 1, 0, "client 0 sent too"):
            p.server.receive(1, from_client(p, 0, 1, copied))
    with refused(BadKey, 1, 0, "client 1 sent too"):
        client_module.check_bundle(p.setup, 1, own[:32] + own[:32] + own[64:], {})
    with refused(Damaged, 1, 0, "95 bytes"):
        client_module.check_bundle(p.setup, 1, own[:-1], {})
    p.server.receive(1, p.clients[1].start())


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

    p = eight()
    with refused(BadKey, 1, 0, "no key"):
        p.server.receive(1, from_client(p, 0, 1, with_key(bundle(p, 1))))
    if name in ("0", "order 8"):
        errors = play(p, tamper=lying(p, [1], {ADVERTISE: with_key}))
        assert [error.client for error in errors] == [1]
        exact(p, [0, *range(2, 8)])
    p = parties(small(n=4, k=2, t=2))
    play(p, 1)
    entries = bundles_of(p)
    j = min(entries)
    bad = with_key(entries[j][: protocol.BUNDLE_SIZE])
    with refused(BadKey, j, 0, "no key"):
        tell(p, 0, 0, entries | {j: bad + signature(p, 0, j, bad)})


def test_different_supports_are_refused_by_server_and_clients():
    def other(i, setup):
        return small(support=b"other") if i == 4 else setup

    p = parties(small(support=b"one"), change=other)
    data = p.clients[4].start()
    with refused(SupportMismatch, 4, 0, "another support"):
        p.server.receive(4, data)
    with refused(SupportMismatch, 4, 0, "support differ"):
        p.server.receive(4, reframe(data, fingerprint=p.setup.fingerprint))
    p = parties(small(support=b"one"))
    play(p, 1)
    entries = bundles_of(p)
    j = min(entries)
    bad = entries[j][:64] + small(support=b"other").digest
    with refused(SupportMismatch, j, 0):
        tell(p, 0, 0, entries | {j: bad + signature(p, 0, j, bad)})
    with refused(Damaged, SERVER, 0, "about 5 entries; 4 are expected"):
        p.clients[0].receive(reframe(p.mail[0], d=5))


def test_replays_and_reordered_messages_are_refused():
    p = parties(small())
    first = [c.start() for c in p.clients]
    with refused(Replay, 0, 0):
        p.clients[0].start()
    with refused(Replay, SERVER, 0, "no message is expected now"):
        parties(small()).clients[0].receive(first[0])
    for i, data in enumerate(first):
        p.server.receive(i, data)
    with refused(Replay, 0, 0, "here already"):
        p.server.receive(0, first[0])
    keys = p.server.advance()
    with refused(Replay, 0, 1, "round"):
        p.server.receive(0, first[0])
    with refused(Replay, SERVER, 0, "receiver"):
        p.clients[0].receive(keys[1])
    second = [c.receive(keys[c.me]) for c in p.clients]
    with refused(Replay, SERVER, 1, "round"):
        p.clients[0].receive(keys[0])
    with refused(Replay, 1, 1, "sender"):
        p.server.receive(1, second[0])
    other = parties(Setup(6, 4, Ring(16), 3, 4, session=b"another session!"))
    with refused(Replay, 0, 0, "session"):
        other.server.receive(0, first[0])
    with refused(Replay, 9, 1, "not invited"):
        p.server.receive(9, second[0])


def test_who_left_stays_away_and_what_is_over_is_over():
    p = parties(small())
    play(p, CHECK, drop={5: 1})
    with refused(Replay, 5, CHECK, "dropped out"):
        p.server.receive(5, b"")
    play(p)
    with refused(Replay, 0, UNMASK, "over"):
        p.server.receive(0, b"")
    with refused(Replay, SERVER, UNMASK, "over"):
        p.server.advance()
    with refused(Replay, SERVER, UNMASK, "no message is expected now"):
        p.clients[0].receive(b"")


def test_records_name_each_client_once():
    records = {3: b"ab", 1: b"cd"}

    def unpack(body):
        return protocol.unpack_records(body, 2, [1, 3], 0, 1)

    assert unpack(pack_records(records)) == records
    with refused(Damaged, 0, 1, "no whole number"):
        unpack(b"1234567")
    for bad in (pack_records({3: b"ab"}) * 2, pack_records({2: b"ab"})):
        with refused(Inconsistent, 0, 1):
            unpack(bad)
    p = parties(small())
    play(p, 1)
    body = client_module.share_secrets(p.clients[0], body_of(p.mail[0]))
    with refused(BadShare, 0, 1, "3 records; 4 are due"):
        p.server.receive(0, from_client(p, 1, 0, body[: -4 - client_module.DEALT_SIZE]))
    with pytest.raises(BadShare):
        server.accept_shares(p.server, 0, b"")


def test_no_client_reveals_both_secrets():
    p = parties(small())
    play(p, CHECK)
    c, everyone = p.clients[0], set(range(6))
    near = c.neighbours[0]

    def say(body):
        return c.receive(from_server(p, MASKED, 0, body))

    for kind, body, says in (
        (Inconsistent, lists(p, everyone, everyone), "survivor and as dropout"),
        (Inconsistent, lists(p, everyone, {1}), "survivor and as dropout"),
        (Inconsistent, lists(p, everyone, {0}), "survivor and as dropout"),
        (Inconsistent, lists(p, everyone - {0}, {0}), "no survivor"),
        (Inconsistent, lists(p, everyone - {near}, ()), "do not agree"),
        (Inconsistent, bytes([255, 0]), "do not exist"),
        (Damaged, bytes(3), "3 bytes; 2 are due"),
        (BelowThreshold, lists(p, {0, 1, 2}, {3, 4, 5}), "3 clients are left; 4 must"),
    ):
        with refused(kind, SERVER, MASKED, says):
            say(body)
    c.receive(p.mail[0])
    with refused(Replay, SERVER, CHECK, "round"):
        say(lists(p, range(5), {5}))
    sets = protocol.client_sets(p.setup, lists(p, {0, 4}, {1}), 2, MASKED)
    assert sets == [{0, 4}, {1}]


def test_a_stranger_is_no_survivor():
    "A neighbour that sent no shares cannot be in the sum: its masks would not cancel."
    p = parties(small())
    play(p, CHECK, drop={5: 1})
    c = next(c for c in p.clients[:5] if 5 in c.neighbours)
    with refused(Inconsistent, SERVER, MASKED, "do not agree"):
        c.receive(from_server(p, MASKED, c.me, lists(p, range(6), ())))


def held_by(c):
    return {i: tuple(map(bytes, pair)) for i, pair in c.held.items()}


def test_nothing_is_revealed_before_enough_signed_the_same_lists():
    p = parties(small())
    play(p, CHECK + 1)
    good = records_of(body_of(p.mail[0]), SIGNATURE_SIZE)
    assert len(good) == p.setup.quorum - 1
    short, j = dict([*good.items()][1:]), min(good)
    with refused(BelowThreshold, 0, UNMASK, "2 others signed the lists; 3 must"):
        tell(p, CHECK, 0, short)
    other = hashlib.sha256(lists(p, range(5), [5])).digest()
    with refused(BadSignature, j, CHECK):
        tell(p, CHECK, 0, {**good, j: signature(p, CHECK, j, other)})
    with refused(Inconsistent, SERVER, CHECK):
        tell(p, CHECK, 0, {**short, 0: good[j]})
    with refused(Inconsistent, j, CHECK, "other lists"):
        server.accept_lists(p.server, j, other)
    held = held_by(p.clients[0])
    shares = records_of(body_of(tell(p, CHECK, 0, good)), ELEMENT_SIZE)
    assert shares == {i: held[i][0] for i in shares}, "of own seeds only: all survived"


def test_a_dropout_gets_its_key_revealed_and_nothing_else():
    p = parties(small())
    play(p, CHECK + 1, drop={5: MASKED})
    for c in p.clients[:5]:
        held = held_by(c)
        shares = records_of(body_of(c.receive(p.mail[c.me])), ELEMENT_SIZE)
        assert shares == {i: held[i][i == 5] for i in c.neighbours}


@tabled(
    "vector, match",
    [
        (np.ones(4), "float64"),
        (np.ones(5, int), r"\(5,\)"),
        (None, "object"),
        (np.full(4, -1), "outside the ring, 0..65535"),
        (np.full(4, 2**16), "outside the ring"),
        (np.full(4, 11), "larger than the declared 10"),
        (np.full(4, 2**16 - 11), "larger than the declared 10"),
    ],
    ids=str,
)
def test_vectors_beyond_the_declared_range_stay_home(vector, match):
    p = parties(small(largest=10), x=np.full((6, 4), 2**16 - 10))
    p.clients[1].vector = vector
    play(p, MASKED)
    with refused(OutOfRange, 1, MASKED, match):
        p.clients[1].receive(p.mail[1])
    p.clients[1].vector = np.full(4, 10)
    assert not play(p)
    np.testing.assert_array_equal(p.setup.ring.lift(p.server.result), np.full(4, -40))


def test_a_refusal_does_not_tell_the_vector():
    setup = small(largest=10)
    with pytest.raises(OutOfRange) as caught:
        client_module.ring_words(setup, np.full(4, 11), 1)
    assert "11" not in str(caught.value) and "10" in str(caught.value)
    assert client_module.ring_words(setup, np.full(4, 10), 1).dtype == np.uint32


# ---- liars


def cut_shares(p, body):
    "A message of round 1: proof, records."
    size = ELEMENT_SIZE * (1 + 2 * p.setup.threshold)
    return body[:size], records_of(body[size:], client_module.DEALT_SIZE)


def garbage(p, victims):
    "Other ciphertexts for some neighbours."

    def change(body):
        proof, entries = cut_shares(p, body)
        spoilt = {i: flip(entries[i], 5, 1) for i in entries if i in victims}
        return proof + pack_records(entries | spoilt)

    return change


def crooked(monkeypatch, victims):
    "Shares off the polynomial for some neighbours, with hashes to match."
    honest = shamir.evaluate

    def evaluate(c, at):
        return [v + (i in victims) for i, v in enumerate(honest(c, at))]

    monkeypatch.setattr(protocol, "evaluate", evaluate)


@tabled("victims, leaves", [(1, {}), (2, {}), (1, {3: MASKED}), (2, {3: MASKED})])
def test_a_few_garbage_shares_or_false_complaints_blame_nobody(victims, leaves):
    """Up to k - t: holder and owner go on, and the owner may still leave: its key is
    rebuilt without those who slander it.
    """
    p = eight()
    chosen = p.clients[3].neighbours[:victims]
    assert not play(p, drop=leaves, tamper=lying(p, [3], {SHARE: garbage(p, chosen)}))
    assert not p.server.blamed and p.server.refused == {(3, j) for j in chosen}
    exact(p, set(range(8)) - leaves.keys())

    def without(body):
        shares = records_of(body, ELEMENT_SIZE)
        return pack_records({i: share for i, share in shares.items() if i != 3})

    p = eight()
    said = {COMPLAIN: lambda body: pack_records({3: b""}), UNMASK: without}
    assert not play(p, drop=leaves, tamper=lying(p, chosen, said))
    assert not p.server.blamed and p.server.refused == {(3, j) for j in chosen}
    exact(p, set(range(8)) - leaves.keys())


@tabled("victims", [1, 6])
def test_shares_off_the_polynomial_are_refused_by_their_holders(victims):
    p = eight()
    play(p, SHARE)
    for c in p.clients:
        with pytest.MonkeyPatch.context() as patch:
            if c.me == 3:
                crooked(patch, range(victims))
            up = c.receive(p.mail[c.me])
        p.server.receive(c.me, up)
    p.mail = p.server.advance()
    assert not play(p) and len(p.server.refused) == (1 if victims == 1 else 0)
    assert p.server.blamed.keys() == ({3} if victims == 6 else set())
    exact(p, set(range(8)) - p.server.blamed.keys())


def test_shares_of_another_key_are_refused_at_once():
    """The owner shares a mask key that it did not advertise: the proof fails in round
    1, and the session goes on without it.
    """
    p = eight()
    play(p, SHARE)
    p.clients[2].pair = bytearray(b"z" * 32)
    up = p.clients[2].receive(p.mail[2])
    with refused(BadShare, 2, SHARE, "not those of its key"):
        p.server.receive(2, up)
    assert not play(p, drop={2: SHARE})
    exact(p, set(range(8)) - {2})


@tabled("liar", range(4))
def test_a_wrong_revealed_share_names_its_holder_and_the_sum_opens(liar):
    p = eight()
    gone = {(liar + 1) % 8: MASKED} if liar % 2 else {}
    play(p, UNMASK, drop=gone)
    true = body_of(p.clients[liar].receive(p.mail.pop(liar)))
    shares = records_of(true, ELEMENT_SIZE)
    first, second = [*shares][:2]
    beyond = int.from_bytes(shares[first], "little") + PRIME
    says = f"of client {first} is not the one that it accepted"
    for lie in (
        {i: flip(share, 0, 1) for i, share in shares.items()},
        {**shares, first: bytes(32)},
        {**shares, first: shares[second]},
        {**shares, first: beyond.to_bytes(32, "little")},
    ):
        with refused(BadShare, liar, UNMASK, says):
            p.server.receive(liar, from_client(p, UNMASK, liar, pack_records(lie)))
    with refused(
        BadShare, liar, UNMASK, f"{len(shares) - 1} shares; {len(shares)} are"
    ):
        p.server.receive(liar, from_client(p, UNMASK, liar, true[:-36]))
    if liar == 0:  # may still say the right thing
        p.server.receive(liar, from_client(p, UNMASK, liar, true))
        with pytest.raises(BadShare):
            server.accept_revealed(p.server, 1, b"")
    assert not play(p)
    exact(p, set(range(8)) - gone.keys())


def some_garbage(p, i, rng, body):
    return garbage(p, rng.permutation(12)[: rng.integers(1, 13)])(body)


def slander(p, i, rng, body):
    near = rng.permutation(p.clients[i].neighbours)[: rng.integers(1, 9)]
    return pack_records({int(j): b"" for j in near if j in p.server.shared})


def bit(rng):
    return 1 << int(rng.integers(8))


LIES = {
    "low key": (ADVERTISE, lambda p, i, rng, body: bytes(32) + body[32:]),
    "short keys": (ADVERTISE, lambda p, i, rng, body: body[:-1]),
    "another support": (ADVERTISE, lambda p, i, rng, body: body[:-32] + bytes(32)),
    "garbage": (SHARE, some_garbage),
    "proof": (
        SHARE,
        lambda p, i, rng, body: flip(body, int(rng.integers(32 * 11)), bit(rng)),
    ),
    "hashes": (
        SHARE,
        lambda p, i, rng, body: flip(body, -1 - int(rng.integers(64)), 1),
    ),
    "records": (SHARE, lambda p, i, rng, body: body[: -4 - client_module.DEALT_SIZE]),
    "slander": (COMPLAIN, slander),
    "no list": (COMPLAIN, lambda p, i, rng, body: body + b"x"),
    "length": (MASKED, lambda p, i, rng, body: body[:-1]),
    "lists": (CHECK, lambda p, i, rng, body: flip(body, 0, 1)),
    "reveal": (
        UNMASK,
        lambda p, i, rng, body: flip(body, 4 + int(rng.integers(32)), 1),
    ),
    "silence": (None, None),
}
LATE = "length", "lists", "reveal", "slander", "no list"


@tabled("seed", range(20))
def test_liars_within_the_bound_end_no_session_and_no_honest_client_is_blamed(seed):
    """Up to k - t = 3 of 12 clients, each with a lie of its own: the sum opens,
    everybody honest is in it, and only liars are named.
    """
    rng = seed_tree(seed, "liars")
    p = parties(small(n=12, k=8, t=5), seed=int(rng.integers(3)))
    chosen = rng.permutation(12)[: rng.integers(1, 4)].tolist()
    names = [*LIES]
    lies = {int(i): str(rng.choice(names)) for i in chosen}
    lies[chosen[0]] = names[seed % len(names)]  # each is tried
    drop = {i: int(rng.integers(6)) for i, lie in lies.items() if lie == "silence"}

    def tamper(step, way, i, data):
        at, change = LIES[lies.get(i, "silence")]
        said = {at: lambda body: change(p, i, rng, body)}
        return lying(p, [i], said)(step, way, i, data)

    errors = play(p, drop=drop, tamper=tamper)
    exact(p)
    named = {error.client for error in errors} | p.server.blamed.keys()
    assert set(range(12)) - lies.keys() <= p.server.survivors and named <= lies.keys()
    out = set(lies) - set(getattr(p.server, "members", ()))  # some before their turn
    free = {"silence", "garbage", "slander", "hashes"}  # need not be named
    for i, lie in lies.items():
        assert lie in free or i in named or lie in LATE and i in out


# ---- the proof of shares


def test_sums_of_points_are_recognised():
    draw, same = random_source(0, "points"), shamir.is_sum_or_difference

    def key(x):
        return masking.public_key(shamir.private_from_scalar(x % PRIME))

    for _ in range(10):
        a, b, e = (shamir.random_element(draw) for _ in range(3))
        assert same(key(a), key(b), key(a + b)) and same(key(a), key(b), key(a - b))
        assert same(key(a), key(a), key(2 * a))
        assert not same(key(a), key(b), key(a + 2 * b))
        assert not same(key(a), key(b), key(e))
        private = shamir.private_from_scalar(e)
        private = X25519PrivateKey.from_private_bytes(private)
        times = private.exchange(X25519PublicKey.from_public_bytes(key(b)))
        assert times == key(e * b), "the group is of this order"


def test_elements_are_private_keys():
    draw = random_source(0, "scalars")
    for private in (draw(32) for _ in range(20)):
        number = shamir.scalar(private)
        clamped = int.from_bytes(private, "little") & (2**254 - 8) | 2**254
        own = shamir.private_from_scalar(number)
        assert own == clamped.to_bytes(32, "little"), "the key itself, clamped"
        public = masking.public_key(private)
        assert masking.public_key(own) == public
        assert masking.public_key(shamir.private_from_scalar(PRIME - number)) == public
    with pytest.raises(ValueError, match="not a valid private key"):
        shamir.private_from_scalar(0)


DEALER = random_source(0, "dealer")(32)


def dealt(setup, private=DEALER):
    keys = bytes(32) + masking.public_key(DEALER) + setup.digest
    secrets, holders = (7, shamir.scalar(private)), [*protocol.share_points(setup, 0)]
    draw = random_source(0, "deal")
    return keys, protocol.deal(setup, 0, keys, secrets, holders, draw)


def test_honest_shares_pass_and_give_both_secrets_back():
    setup = small(n=8, k=6, t=4)
    keys, d = dealt(setup)
    assert isinstance(d, protocol.Dealing)
    e = protocol.check_dealing(setup, 0, keys, d)
    assert e == shamir.scalar(protocol.challenge(setup, 0, keys, d.start, d.hashes))
    at = protocol.share_points(setup, 0)
    for kind, secret in enumerate((7, shamir.scalar(DEALER))):
        assert shamir.reconstruct({at[j]: d.shares[j][kind] for j in at}, 4) == secret
        for j in at:
            hashed = d.hashes[j][32 * kind : 32 * kind + 32]
            line, share = (
                shamir.evaluate(d.lines[kind], [at[j]])[0],
                d.shares[j][kind],
            )
            for as_kind, value, fits in (
                (kind, share, True),
                (kind, share ^ 1, False),
                (1 - kind, share, False),
                (kind, share + PRIME, False),
            ):
                promise = hashed, line, e
                about = setup, 0, j, as_kind, value, promise
                assert protocol.matches_commitment(*about) == fits
    commit = protocol.share_commitment
    assert (
        len({commit(setup, 0, j, kind, 5, 6) for j in (1, 2) for kind in (0, 1)}) == 4
    )


def test_a_proof_of_another_key_or_an_altered_one_fails():
    setup = small(n=8, k=6, t=4)
    keys, d = dealt(setup, b"y" * 32)
    with refused(BadShare, 0, SHARE, "not those of its key"):
        protocol.check_dealing(setup, 0, keys, d)
    keys, d = dealt(setup)
    own, (first, *rest) = d.lines
    for owner, of, bad in (
        (0, keys, d._replace(start=keys[32:64])),
        (0, keys, d._replace(lines=[own, [first + 1, *rest]])),
        (0, keys, d._replace(lines=[own, [0, *rest]])),
        (0, keys, d._replace(hashes={**d.hashes, min(d.hashes): bytes(64)})),
        (0, keys, d._replace(hashes=dict([*d.hashes.items()][1:]))),
        (0, keys[:64] + bytes(32), d),
        (1, keys, d),
    ):
        with refused(BadShare, owner, SHARE):
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
    setup = small(n=8, k=6, t=4)
    draw = random_source(0, "simulator")
    public = masking.public_key(b"unknown to the simulator........")
    keys = bytes(32) + public + setup.digest
    at, challenge = protocol.share_points(setup, 0), draw(32)
    e = shamir.scalar(challenge)
    lines = [[shamir.random_element(draw) for _ in range(4)] for _ in range(2)]
    known = {j: tuple(shamir.random_element(draw) for _ in "ab") for j in [*at][:3]}

    def commitment(j, kind):
        line, share = shamir.evaluate(lines[kind], [at[j]])[0], known[j][kind]
        blind = (line - e * share) % PRIME
        return protocol.share_commitment(setup, 0, j, kind, share, blind), line, e

    hashes = {j: draw(64) for j in at}
    for j in known:
        hashes[j] = commitment(j, 0)[0] + commitment(j, 1)[0]
    total = masking.public_key(shamir.private_from_scalar(lines[1][0]))
    private = X25519PrivateKey.from_private_bytes(challenge)
    times = private.exchange(X25519PublicKey.from_public_bytes(public))
    start = difference_with(total, times)
    monkeypatch.setattr(protocol, "challenge", lambda *about: challenge)
    dealing = protocol.Dealing(None, hashes, start, lines)
    assert protocol.check_dealing(setup, 0, keys, dealing) == e
    for j, kind in itertools.product(known, (0, 1)):
        about = setup, 0, j, kind, known[j][kind], commitment(j, kind)
        assert protocol.matches_commitment(*about)


def test_a_key_that_the_shares_do_not_give_back_names_its_owner():
    "What the proof excludes is still noticed at the end."
    p = eight()
    play(p, UNMASK, drop={2: MASKED})
    for wrong in (5, 0):
        with refused(BadShare, 2, SHARE, "give another one back"):
            server.recovered_masks(p.server, 2, wrong)


def test_the_second_mail_is_held_against_the_first():
    p = parties(small())
    play(p, MASKED, drop={5: SHARE})
    c = next(c for c in p.clients[:5] if 5 in c.neighbours)

    def say(body):
        return c.receive(from_server(p, COMPLAIN, c.me, body))

    def named(ids):
        return protocol.bitmap(ids, 6)

    few = [c.me, *[i for i in c.neighbours if i < 5][:2]]
    for kind, body, says in (
        (Inconsistent, named(range(6)), "does not agree with the shares"),
        (Inconsistent, named(set(range(5)) - {c.me}), "does not agree"),
        (BelowThreshold, named(few), "3 clients are left"),
        (Damaged, b"ab", "2 bytes; 1 are due"),
    ):
        with refused(kind, SERVER, COMPLAIN, says):
            say(body)
    assert say(named(range(5)))


# ---- one step at a time, and secrets that go


@pytest.fixture
def hurried():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def both(call):
    "What two threads get that call at once: results, kinds of errors."
    results, errors, gate = [], [], threading.Barrier(2)

    def go():
        gate.wait()
        try:
            results.append(call())
        except SecAggError as error:
            errors.append(type(error))

    threads = [threading.Thread(target=go) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results, errors


def test_a_state_is_entered_once_under_threads(hurried):
    """Two threads bring the same mail, at every round and to both sides: one is
    answered, the other gets the typed error.
    """
    for _ in range(4):
        p = parties(small())
        for step in range(6):
            for c in p.clients:
                mail = p.mail[c.me]
                (up,), errors = both(lambda: c.receive(mail) if step else c.start())
                assert errors == [Replay]
                results, errors = both(lambda: p.server.receive(c.me, up))
                assert len(results) == 1 and errors == [Replay]
            (p.mail,), errors = both(p.server.advance)
            late = BelowThreshold if step < UNMASK else Replay
            assert errors == [late], "the next round has no messages yet"
        exact(p, range(6))


ALIVE = {  # round -> secrets that a client still has after it
    ADVERTISE: {"box", "pair", "own", "draw", "vector"},
    SHARE: {"own", "share_keys", "agreed", "vector"},
    COMPLAIN: {"own", "agreed", "held", "vector"},
    MASKED: {"held"},
    CHECK: {"held"},
    UNMASK: set(),
}


def test_secrets_are_erased_with_their_last_use():
    p = parties(small())
    c, seen = p.clients[0], {}
    names = set().union(*client_module.LAST_USE.values())
    for step in range(6):
        for name in ("box", "pair", "own", "share_keys", "agreed", "held"):
            if getattr(c, name, None) is not None:
                seen[name] = getattr(c, name)
        play(p, step + 1)
        assert {n for n in names if getattr(c, n, None) is not None} == ALIVE[step]
    flat = [seen["box"], seen["pair"], seen["own"]]
    flat += [*seen["share_keys"].values(), *seen["agreed"].values()]
    flat += itertools.chain(*seen["held"].values())
    assert len(flat) == 3 + 4 + 4 + 8 and {type(secret) for secret in flat} == {
        bytearray
    }
    assert not any(map(any, flat)), "overwritten, not only let go"
    s = p.server
    assert s.bundles == s.dealings == s.seen == {} and not s.total.size and not s.inbox


def test_a_session_that_fails_can_be_closed():
    p = parties(small())
    play(p, MASKED)
    c = p.clients[0]
    own, names = c.own, set().union(*client_module.LAST_USE.values())
    c.close()
    assert not any(own) and all(getattr(c, name, None) is None for name in names)
    with refused(Replay, SERVER, UNMASK, "no message is expected now"):
        c.receive(p.mail[0])
    client_module.wipe({1: (bytearray(b"a"), "not a secret")})
    client_module.enter_round(c, len(ROUNDS))
    assert client_module.reply.__doc__ and c.step == len(ROUNDS)


# ---- the committee


def test_the_committee_must_sign():
    setup = small(n=20, k=10, t=6, committee=7, signatures=5)
    chosen = protocol.committee(setup)
    with refused(BelowThreshold, SERVER, CHECK, "4 of the committee signed; 5 must"):
        play(parties(setup), drop={i: CHECK for i in chosen[:3]})
    p, drop = parties(setup), {i: CHECK for i in chosen[:2]}
    play(p, UNMASK, drop=drop)
    me, stranger = [i for i in range(20) if i not in chosen][:2]
    good = [*records_of(body_of(p.mail[me]), SIGNATURE_SIZE).items()]
    with refused(BelowThreshold, me, UNMASK, "4 others signed the lists; 5 must"):
        tell(p, CHECK, me, dict(good[1:]))
    with refused(Inconsistent, SERVER, CHECK):
        tell(p, CHECK, me, dict(good[1:]) | {stranger: bytes(64)})
    play(p, drop=drop)
    exact(p, range(20))


RATES = [(100, 0.1, 0.05), (1000, 0.1, 0.05), (1000, 0.05, 0.33), (10_000, 0.1, 0.05)]


@tabled("n, dropout, corrupt", RATES)
def test_the_committee_is_large_enough(n, dropout, corrupt):
    g = session_module.graph_parameters(n, dropout, corrupt)
    lost, bad = int(n * dropout + 1e-9), int(n * corrupt + 1e-9)
    c, m, s = 2 * g.signatures - g.committee - 1, g.committee, g.signatures
    assert stats.hypergeom.sf(c, n, bad, m) <= g.forked * (1 + 1e-6) + 1e-300
    assert g.exposed + g.apart + g.forked <= 2.0**-40
    assert stats.hypergeom.sf(m - s, n, lost, m) <= g.mute * (1 + 1e-6) + 1e-300
    assert g.stuck + g.mute <= 2.0**-20
    assert s <= 200 < g.quorum or s < g.quorum <= 200
    more = dict(quorum=g.quorum, committee=m, signatures=s)
    Setup(n, 1, Ring(8), g.threshold, g.neighbours, **more)


# ---- cost


@few
@given(st.integers(3, 10), st.data(), st.integers(1, 50), SIZES)
def test_declared_sizes_are_measured_sizes(n, data, d, bits):
    k = data.draw(st.integers(2, n - 1))
    assume(n * k % 2 == 0)
    t, ring = data.draw(st.integers(k // 2 + 1, k)), Ring(bits)
    declared = session_module.overhead(n, k, d, bits, t)
    traffic = run_session(vectors(n, d, ring), ring, t, k, seed=0).traffic
    for (step, way), size in declared.items():
        messages, sizes = traffic[ROUNDS.index(step), :, ("up", "down").index(way)].T
        assert (8 * sizes == size.total).all() and (messages == (size.total > 0)).all()
        assert size.total == size.payload + size.header
        assert size.per_param == size.total / d
    assert declared["masked", "up"].payload == 8 * math.ceil(d * bits / 8)


# ---- parameters of the graph


def test_the_bounds_hold_by_enumeration():
    """All choices of marked clients among 9: how often the rest falls apart, and how
    often some client has many marked neighbours.
    """
    n, k = 9, 4
    near, everybody = protocol.graph(n, k, bytes(16)), set(range(n))
    split = session_module.split_probability
    for marked in range(1, 7):
        chosen = [set(c) for c in itertools.combinations(range(n), marked)]
        apart = np.mean([not connected(everybody - c, near) for c in chosen])
        assert apart <= split(n, marked, k) + 1e-12
        tails = session_module.neighbour_tails(n, marked, k)
        most = [
            max(len(c & {*near[j].tolist()}) for j in everybody - c) for c in chosen
        ]
        for i in range(k + 1):
            assert np.mean(np.array(most) >= i) <= tails[i] + 1e-12
        assert tails[-1] == 0 and tails[0] == 1
    assert split(9, 3, 4) == split(9, 8, 8) == 0.0


@tabled("n, malicious", [(30, True), (61, False)])
def test_degrees_make_valid_setups_that_tolerate_what_they_say(n, malicious):
    g = session_module.graph_parameters(n, 0.1, 0.1, malicious)
    lost = seed_tree(0, "lost", n).permutation(n)[: n // 10].tolist()
    more = dict(seed=0, quorum=g.quorum, drop=dict.fromkeys(lost, 2))
    x = np.ones((n, 2), np.int64)
    out = run_session(x, Ring(8), g.threshold, g.neighbours, **more)
    assert (out.total == n - n // 10).all()


# ---- arguments of a session


def test_secrets_are_fresh_unless_seeded():
    assert random_source() is not random_source(0, "a")
    assert random_source()(32) != random_source()(32)
    a, b, c = (random_source(0, name) for name in "aab")
    assert a(20) + a(12) == b(32) != c(32)
    private, directory = session_module.identities(6, 0)
    p, q = (
        {bytes(c.box), bytes(c.pair), bytes(c.own)}
        for c in (Client(small(), 0, private[0], directory) for _ in range(2))
    )
    assert not p & q and len(p) == 3
    assert session_module.identities(3)[1] != session_module.identities(3)[1]
    assert len(set(session_module.identities(3, 1)[1].values())) == 4


def test_the_ruling_on_complaints():
    setup = small(n=8, k=6, t=4)
    near = protocol.graph(8, 6, setup.session)
    a, b, c, d = near[0][:4].tolist()
    everybody, rest = set(range(8)), set(range(1, 8))

    def ruling(**said):
        who = dict(zip("abcd", (a, b, c, d)))
        said = {who[name]: about for name, about in said.items()}
        silent = {i: set() for i in range(8)}
        return server.resolve_complaints(setup, silent | said)

    assert ruling() == (everybody, set(), {})
    assert ruling(a={0}, b={0}) == (everybody, {(0, a), (0, b)}, {})
    assert ruling(a={0}, b={0}, c={0}) == (rest, set(), {}), "out, but not blamed"
    members, _, named = ruling(a={0}, b={0}, c={0}, d={0})
    assert members == rest and named.keys() == {0} and named[0].round == "share"
    _, _, named = ruling(a=set(near[a].tolist()), b={0}, c={0}, d={0})
    assert named.keys() == {a} and named[a].round == "complain", "void complaints"


def test_a_server_that_forges_shares_gets_complaints_and_no_shares():
    p = parties(small())
    play(p, COMPLAIN)
    of = client_module
    entries = records_of(body_of(p.mail[0]), of.FORWARDED_SIZE)
    places = 0, of.SEALED_SIZE, of.DEALT_SIZE, of.FORWARDED_SIZE - 1
    forged = {i: flip(entries[i], at, 1) for i, at in zip(entries, places)}
    said = records_of(body_of(tell(p, SHARE, 0, forged)), 0)
    assert set(said) == set(entries) and not any(p.clients[0].held.values())


def test_no_sum_of_some_vectors_is_open():
    "No sum of masked vectors, not even of all before unmasking, is that of the inputs."
    p = parties(small())
    play(p, MASKED)
    sent, ring = np.array([*masked(p)]), p.setup.ring
    for size in range(1, 7):
        for chosen in map(list, itertools.combinations(range(6), size)):
            assert not np.array_equal(ring.sum(sent[chosen]), ring.sum(p.x[chosen]))
