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
import torch
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
from dpcomm.core.chance import seed_tree
from dpcomm.secagg import (
    client as client_module,
)
from dpcomm.secagg import (
    protocol,
    server,
)
from dpcomm.secagg import (
    session as session_module,
)
from dpcomm.secagg.client import Client
from dpcomm.secagg.discrete import discrete_gaussian
from dpcomm.secagg.protocol import (
    ADVERTISE,
    CHECK,
    COMPLAIN,
    HEAD,
    MASKED,
    PRIME,
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
    Setup,
    SupportMismatch,
)
from dpcomm.secagg.ring import FixedPoint, Overflow, Ring
from dpcomm.secagg.server import Server
from dpcomm.secagg.session import GraphParameters, SessionResult

few = settings(drawn, max_examples=25)


def vectors(n, d, ring, seed=0):
    return seed_tree(seed, "secagg test", n, d).integers(0, ring.modulus, (n, d))


def parties(setup, x=None, seed=0, change=None):
    "A server and clients; `change` gives a client's own view of the setup."
    private, directory = session_module.identities(setup.n_clients, seed)
    x = vectors(setup.n_clients, setup.d, setup.ring) if x is None else x
    views = [change(i, setup) if change else setup for i in range(setup.n_clients)]
    clients = [
        Client(views[i], i, private[i], directory, x[i], seed=seed)
        for i in range(setup.n_clients)
    ]
    return SimpleNamespace(
        setup=setup,
        private=private,
        directory=directory,
        x=x,
        clients=clients,
        server=Server(setup, private[SERVER], directory),
        mail=dict.fromkeys(range(setup.n_clients)),
    )


def play(p, stop=len(ROUNDS), drop=None, tamper=lambda step, way, client, data: data):
    "Play up to a round; whoever errs or is refused is gone. Errors in order."
    errors = []
    for step in range(p.server.step, stop):
        for i, data in p.mail.items():
            if (drop or {}).get(i, len(ROUNDS)) > step:
                try:
                    up = (
                        p.clients[i].receive(tamper(step - 1, "down", i, data))
                        if step
                        else p.clients[i].start()
                    )
                    p.server.receive(i, tamper(step, "up", i, up))
                except SecAggError as error:
                    errors.append(error)
        p.mail = p.server.advance()
    return errors


def small(n=6, k=4, t=3, bits=16, d=4, **more):
    return Setup(n, d, Ring(bits), t, k, session=bytes(range(16)), **more)


def from_server(p, step, client, body):
    return protocol.seal(p.setup, p.private[SERVER], step, SERVER, client, body)


def from_client(p, step, client, body):
    return protocol.seal(p.setup, p.private[client], step, client, SERVER, body)


def read(data):
    "A frame, whatever length it announces."
    return wire.parse_message(data, wire.FRAME.unpack_from(data)[4])


def body_of(data):
    return read(data).payload[HEAD.size : -protocol.SIGNATURE_SIZE]


def reframe(data, **changes):
    "The same message with some fields of the frame changed and a right checksum."
    m = read(data)
    return wire.Message(
        **{
            **dict(
                mechanism=m.mechanism,
                d=m.d,
                payload=m.payload,
                fingerprint=m.fingerprint,
            ),
            **changes,
        }
    ).to_bytes()


def signed_bundles(p):
    "The bundles that client 0 gets, by their sender, each with its signature."
    size = protocol.BUNDLE_SIZE + protocol.SIGNATURE_SIZE
    return protocol.unpack_records(body_of(p.mail[0]), size, range(6), SERVER, 0)


def lists(p, survivors, dropouts):
    n = p.setup.n_clients
    return protocol.bitmap(survivors, n) + protocol.bitmap(dropouts, n)


# ---- primitives


def probable_prime(n):
    "Miller and Rabin, 78 bases."
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(
        (x := pow(base, odd, n)) in (1, n - 1)
        or any((x := x * x % n) == n - 1 for _ in range(twos - 1))
        for base in range(2, 80)
    )


def test_the_prime_is_prime():
    assert (
        probable_prime(PRIME)
        and probable_prime(protocol.CURVE)
        and not probable_prime(PRIME + 2)
    )
    assert 2**252 < PRIME < 2**253 <= 2 ** (8 * protocol.ELEMENT_SIZE)


@few
@given(st.data(), st.integers(1, 12), st.integers(0, PRIME - 1))
def test_any_threshold_of_shares_gives_the_secret_back(data, t, secret):
    points = data.draw(
        st.lists(st.integers(1, 10**6), min_size=t, max_size=t + 5, unique=True)
    )
    shares = dict(
        zip(
            points,
            protocol.split(secret, points, t, protocol.random_source(0, "split")),
        )
    )
    chosen = data.draw(st.permutations(points))[:t]
    assert protocol.reconstruct({x: shares[x] for x in chosen}, t) == secret
    assert (
        protocol.reconstruct({x: shares[x] for x in chosen}, t, tuple(sorted(points)))
        == secret
    ), "with the weights of all points"
    assert protocol.reconstruct(shares, t) == secret
    x = data.draw(st.sampled_from(chosen))
    shares[x] ^= 1 << data.draw(st.integers(0, 255))
    assert protocol.reconstruct({x: shares[x] for x in chosen}, t) != secret


def test_too_few_shares_fit_every_secret():
    """Given t - 1 shares, each secret leaves exactly one polynomial: interpolate with
    it at 0 and check degree and shares.
    """
    t, points = 4, (2, 5, 9)
    shares = dict(
        zip(
            range(1, 10),
            protocol.split(12345, range(1, 10), t, protocol.random_source(0, "few")),
        )
    )
    for secret in (0, 1, PRIME - 1):
        known = {0: secret, **{x: shares[x] for x in points}}
        fourth = (
            sum(
                v * math.prod((7 - y) * pow(x - y, -1, PRIME) for y in known if y != x)
                for x, v in known.items()
            )
            % PRIME
        )
        assert (
            protocol.reconstruct({**{x: shares[x] for x in points}, 7: fourth}, t)
            == secret
        )


@pytest.mark.parametrize("threshold", [0, -1, 1.5])
def test_a_threshold_that_protects_nothing_is_refused(threshold):
    with pytest.raises(ValueError, match=f"threshold is {threshold}"):
        protocol.split(7, [1, 2], threshold, protocol.random_source(0))
    with pytest.raises(ValueError, match=f"threshold is {threshold}"):
        protocol.reconstruct({1: 7}, threshold)


def test_fewer_shares_than_the_threshold_are_refused():
    with pytest.raises(ValueError, match="shares has 2 of them; 3 give"):
        protocol.reconstruct({1: 7, 2: 8}, 3)
    assert (
        protocol.lagrange((1,)) == {1: 1}
        and sum(protocol.lagrange((1, 2, 7)).values()) % PRIME == 1
    ), "weights of a constant polynomial"
    assert protocol.evaluate([5, 1, 2], [0, 1, 10]) == [
        5,
        8,
        215,
    ] and protocol.polynomial(9, 1, protocol.random_source(0)) == [9]
    assert protocol.unpack_elements(protocol.pack_elements([5, PRIME - 1])) == [
        5,
        PRIME - 1,
    ]
    assert 0 <= protocol.random_element(lambda n: b"\xff" * n) < PRIME


def test_the_weights_are_computed_once_for_everybody():
    """All owners' holders sit at the same points, and those who are missing change the
    weights by a product.
    """
    ring = Ring(16)
    x = vectors(18, 3, ring)
    for k, t, drop in (
        (10, 6, {}),
        (10, 6, {3: "check", 9: "unmask", 16: "masked"}),
        (17, 10, {1: "masked"}),
    ):
        protocol.lagrange.cache_clear()
        out = session_module.run_session(x, ring, t, k, seed=0, drop=drop)
        assert (
            protocol.lagrange.cache_info().misses,
            protocol.lagrange.cache_info().hits,
        ) == (1, 17)
        np.testing.assert_array_equal(
            out.total, session_module.ideal_sum(x[list(out.survivors)], ring)
        )


def test_keys_are_hkdf_with_the_whole_context():
    "RFC 5869 by hand: extract with a salt of zeros, expand with the info."
    session = bytes(range(16))
    info = (
        b"dpcomm secagg "
        + b"pair mask"
        + session
        + bytes([2])
        + (3).to_bytes(4, "little")
        + (9).to_bytes(4, "little")
    )
    extracted = hmac.digest(bytes(32), b"secret", "sha256")
    assert (
        protocol.derive_key(b"secret", b"pair mask", 16, session, 2, 3, 9)
        == hmac.digest(extracted, info + b"\x01", "sha256")[:16]
    )


def test_every_part_of_the_context_gives_another_key():
    contexts = itertools.product(
        (b"shares", b"pair mask"),
        (bytes(16), bytes(15) + b"\x01"),
        (1, 2),
        (3, 4),
        (3, 4, SERVER),
    )
    keys = [
        protocol.derive_key(b"s" * 32, purpose, 16, session, step, a, b)
        for purpose, session, step, a, b in contexts
    ]
    assert len(set(keys)) == len(keys) == 48


def test_every_bit_of_a_secret_counts():
    """Nothing is folded to 32 bits: each of 256 bits changes the key, and each of the
    key's 128 bits changes the mask.
    """
    secret = int.from_bytes(bytes(range(32)), "little")
    setup = small()
    keys = {
        client_module.pair_key(
            setup, (secret ^ (1 << bit)).to_bytes(32, "little"), 1, 2
        )
        for bit in range(256)
    }
    assert len(keys) == 256 and all(len(key) == 16 for key in keys)
    key, masks = int.from_bytes(keys.pop(), "little"), set()
    for bit in range(128):
        mask = np.zeros(4, np.uint32)
        protocol.add_mask(mask, (key ^ (1 << bit)).to_bytes(16, "little"))
        masks.add(mask.tobytes())
    assert len(masks) == 128
    assert client_module.pair_key(setup, bytes(32), 1, 2) == client_module.pair_key(
        setup, bytes(32), 2, 1
    )


def test_agreement_is_x25519():
    "The vector of RFC 7748, section 6.1."
    alice = X25519PrivateKey.from_private_bytes(
        bytes.fromhex(
            "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a"
        )
    )
    bob = bytes.fromhex(
        "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    )
    assert (
        protocol.agree(alice, bob, 1, 0).hex()
        == "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    )


@tabled("word", [np.uint32, np.uint64])
@tabled("d", [1, 5, 2**14 - 1, 2**14 + 1, 40_001])
def test_masks_are_the_cipher_stream(word, d):
    key, total = bytes(range(16)), np.arange(d).astype(word)
    stream = (
        Cipher(algorithms.AES(key), modes.CTR(bytes(16)))
        .encryptor()
        .update(bytes(total.nbytes))
    )
    before = total.copy()
    protocol.add_mask(total, key)
    np.testing.assert_array_equal(total, before + np.frombuffer(stream, word))
    protocol.add_mask(total, key, negative=True)
    np.testing.assert_array_equal(total, before)
    assert protocol.CHUNK == len(protocol.ZEROS)


@few
@given(st.integers(2, 62), st.integers(1, 40), st.integers(0, 2**32))
def test_packing_is_little_endian_and_tight(bits, d, seed):
    word = np.dtype("<u4" if bits <= 32 else "<u8")
    x = seed_tree(seed).integers(0, 2**bits, d).astype(word)
    packed = protocol.pack_words(x, bits)
    assert packed == sum(int(v) << (bits * i) for i, v in enumerate(x)).to_bytes(
        -(-d * bits // 8), "little"
    )
    np.testing.assert_array_equal(protocol.unpack_words(packed, bits, d, word), x)
    assert sum(shift >= 0 for _, _, shift in protocol.byte_spans(bits)) >= 8 * (
        bits // 8
    )


def test_secrets_are_fresh_unless_seeded():
    assert protocol.random_source() is not protocol.random_source(
        0, "a"
    ) and protocol.random_source()(32) != protocol.random_source()(32)
    a, b, c = (
        protocol.random_source(0, "a"),
        protocol.random_source(0, "a"),
        protocol.random_source(0, "b"),
    )
    assert a(20) + a(12) == b(32) != c(32)
    p, q = (
        Client(
            small(),
            0,
            session_module.identities(6, 0)[0][0],
            session_module.identities(6, 0)[1],
        )
        for _ in range(2)
    )
    p, q = ({bytes(c.box), bytes(c.pair), bytes(c.own)} for c in (p, q))
    assert not p & q and len(p) == 3
    assert (
        session_module.identities(3)[1] != session_module.identities(3)[1]
        and len(set(session_module.identities(3, 1)[1].values())) == 4
    )


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
    near = protocol.graph(n, k, data.draw(st.binary(min_size=16, max_size=16)))
    assert near.shape == (n, k) and all(
        len(set(row)) == k and i not in row for i, row in enumerate(near.tolist())
    )
    assert all(i in near[j] for i in range(n) for j in near[i]) and connected(
        range(n), near
    )


def test_holders_sit_at_points_of_the_circle():
    setup = small(n=9, k=4, t=3)
    at, circle = (
        protocol.circle_positions(9, setup.session),
        protocol.client_circle(9, setup.session),
    )
    assert [circle[x] for x in at] == list(range(9))
    for i in range(9):
        assert {
            circle[(at[i] + x) % 9]: x for x in (1, 2, 7, 8)
        } == protocol.share_points(setup, i), "the same four points for everybody"


def test_the_graph_is_the_sessions():
    a, b = (
        protocol.graph(30, 4, session) for session in (bytes(16), bytes(15) + b"\x01")
    )
    assert not np.array_equal(a, b) and sorted(
        protocol.client_circle(30, bytes(16))
    ) == list(range(30))


@few
@given(st.integers(5, 14), st.sampled_from([2, 4, 6, 8]), st.data())
def test_together_means_connected(n, k, data):
    assume(k < n - 1)
    alive = data.draw(st.sets(st.integers(0, n - 1), min_size=1))
    setup = Setup(n, 1, Ring(8), k // 2 + 1, k, session=bytes(16))
    assert protocol.surely_connected(setup, alive) == connected(
        alive, protocol.graph(n, k, setup.session)
    )


def test_too_few_are_refused():
    setup = Setup(20, 1, Ring(8), 3, 4, quorum=12, session=bytes(16))
    protocol.check_survivors(setup, range(20), range(20), MASKED)
    with pytest.raises(BelowThreshold, match="11 clients are left; 12 must") as caught:
        protocol.check_survivors(setup, range(11), [0], MASKED)
    assert (caught.value.client, caught.value.round) == (SERVER, "masked")
    near = protocol.graph(20, 4, setup.session)
    alive = set(range(20)) - set(near[7][:2].tolist())
    with pytest.raises(
        BelowThreshold, match="client 7: 2 of its neighbours are left; 3 must"
    ) as caught:
        protocol.check_survivors(setup, alive, [7], 1)
    assert (caught.value.client, caught.value.round) == (7, "share")
    circle = protocol.client_circle(20, setup.session)
    with pytest.raises(BelowThreshold, match="fall apart"):
        protocol.check_survivors(
            setup, set(range(20)) - set(circle[[3, 4, 11, 12]].tolist()), [], 2
        )


# ---- set-up


@tabled(
    "bad, match",
    [
        (dict(n_clients=1), "n_clients is 1"),
        (dict(d=0), "d is 0"),
        (dict(threshold=2), "threshold is 2"),
        (dict(threshold=5), "threshold is 5"),
        (dict(neighbours=6), "neighbours is 6"),
        (dict(neighbours=1), "neighbours is 1"),
        (dict(quorum=3), "quorum is 3"),
        (dict(quorum=7), "quorum is 7"),
        (dict(session=b"short"), "session is b'short'"),
        (dict(session="x" * 16), "session is"),
        (dict(support="x"), "support is 'x'"),
        (dict(committee=0), "committee is 0"),
        (dict(committee=7), "committee is 7"),
        (dict(committee=5, signatures=2), "signatures is 2"),
        (dict(signatures=7), "signatures is 7"),
        (dict(largest=-1), "largest is -1"),
        (dict(n_clients=7, neighbours=3), "product must be even"),
    ],
    ids=str,
)
def test_unsafe_parameters_are_refused(bad, match):
    good = dict(n_clients=6, d=3, ring=Ring(8), threshold=3, neighbours=4)
    protocol.check_setup(Setup(**good))
    with pytest.raises(ValueError, match=match):
        Setup(**{**good, **bad})


def test_defaults_are_a_majority():
    assert (Setup(10, 1, Ring(8), 6).neighbours, Setup(10, 1, Ring(8), 6).quorum) == (
        9,
        7,
    )
    for n, k in itertools.product(range(3, 20), range(2, 19)):
        if k < n and n * k % 2 == 0:
            for t in range(k // 2 + 1, k + 1):
                q = Setup(n, 1, Ring(8), t, k).quorum
                assert n / 2 < q <= n and q > t


def test_overflow_is_checked_against_all_invited():
    Setup(100, 10, Ring(8), 60, largest=1)
    with pytest.raises(
        RingOverflow, match="n_clients \\* largest is 200; 8 bits hold sums up to 127"
    ) as caught:
        Setup(100, 10, Ring(8), 60, largest=2)
    assert (
        isinstance(caught.value, (Overflow, SecAggError))
        and caught.value.client == SERVER
    )
    with pytest.raises(Overflow):
        FixedPoint(Ring(8), 1.0, 2.0, 100)


def test_every_parameter_is_in_the_digest():
    base = dict(n_clients=6, d=3, ring=Ring(8), threshold=3, neighbours=4)
    others = [
        dict(d=4),
        dict(ring=Ring(9)),
        dict(threshold=4),
        dict(neighbours=5, n_clients=6),
        dict(n_clients=8),
        dict(quorum=5),
        dict(largest=1),
        dict(support=b"x"),
        dict(committee=5),
        dict(signatures=5),
    ]
    digests = {Setup(**{**base, **other}).digest for other in [{}, *others]}
    assert len(digests) == len(others) + 1 and all(
        len(digest) == 32 for digest in digests
    )
    assert Setup(**base, session=b"y" * 16).digest == Setup(**base).digest
    assert Setup(**base).session != Setup(**base).session, "fresh unless given"


def test_the_word_holds_the_ring():
    assert [Setup(4, 1, Ring(bits), 2).word.itemsize for bits in (2, 32, 33, 62)] == [
        4,
        4,
        8,
        8,
    ]


# ---- the sum


def survives(setup, drop):
    """What should happen, from the rules: the survivors, or None where the protocol
    must stop.
    """
    near = protocol.graph(setup.n_clients, setup.neighbours, setup.session)
    answered = [
        {i for i in range(setup.n_clients) if drop.get(i, 6) > step}
        for step in range(6)
    ]

    def short(owners, here):
        return {
            i for i in owners if len(set(near[i].tolist()) & here) < setup.threshold
        }

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


EXACT = []  # the rounds at which somebody left, of each session that ended with a sum


@settings(drawn, max_examples=75)
@given(
    st.data(),
    st.integers(5, 10),
    st.sampled_from([8, 13, 20, 32, 33, 62]),
    st.integers(1, 20),
)
def test_the_sum_is_exact_under_any_dropouts(data, n, bits, d):
    k = data.draw(st.sampled_from([n - 1, n - 1, *range(2, n - 1)]))
    assume(n * k % 2 == 0)
    t = data.draw(st.sampled_from([k // 2 + 1, k // 2 + 1, k // 2 + 1, k]))
    rng = seed_tree(
        data.draw(st.integers(0, 2**32)), "schedule"
    )  # uniform: every round is tried often
    drop = {
        int(i): int(rng.integers(6))
        for i in rng.permutation(n)[: rng.integers(1, n // 2)]
    }
    ring, session = Ring(bits), data.draw(st.binary(min_size=16, max_size=16))
    expected = (
        survives(Setup(n, d, ring, t, k, session=session), drop)
        if k % 2 == 0 or k == n - 1
        else "unknown"
    )
    x = vectors(n, d, ring)
    try:
        out = session_module.run_session(
            x, ring, t, k, seed=0, drop=drop, session=session
        )
    except BelowThreshold:
        assert expected in (None, "unknown")
    else:
        assert expected in (out.survivors, "unknown") and set(out.survivors) <= {
            i for i in range(n) if drop.get(i, 6) > MASKED
        }
        np.testing.assert_array_equal(
            out.total, session_module.ideal_sum(x[list(out.survivors)], ring)
        )
        EXACT.append(set(drop.values()))
        assert isinstance(out, SessionResult) and out.total.dtype == np.int64


def test_the_schedules_above_were_no_empty_ones():
    assert not EXACT or all(
        sum(step in steps for steps in EXACT) >= 3 for step in range(6)
    ), "dropouts at each round, in sessions with a sum"


@tabled("step", range(6))
@tabled("k", [10, 19])
def test_ten_percent_may_leave_at_each_round(step, k):
    ring = Ring(24)
    x = vectors(20, 30, ring)
    out = session_module.run_session(
        x, ring, k // 2 + 1, k, seed=step, drop={3: step, 13: ROUNDS[step]}
    )
    assert len(out.survivors) == (18 if step <= MASKED else 20)
    np.testing.assert_array_equal(
        out.total, session_module.ideal_sum((x[i] for i in out.survivors), ring)
    )


def test_fresh_keys_change_everything_but_the_sum():
    ring = Ring(16)
    x = vectors(4, 9, ring)
    a, b = (session_module.run_session(x, ring, 2) for _ in range(2))
    np.testing.assert_array_equal(a.total, b.total)
    np.testing.assert_array_equal(a.total, ring.sum(x))


def test_a_masked_vector_is_the_vector_plus_the_masks():
    p = parties(small(bits=20, d=7))
    pairs, own = [bytes(c.pair) for c in p.clients], bytes(p.clients[3].own)
    play(p, MASKED)
    c = p.clients[3]
    sent = protocol.unpack_words(body_of(c.receive(p.mail[3])), 20, 7, p.setup.word)

    def words(key):
        return np.frombuffer(
            Cipher(algorithms.AES(key), modes.CTR(bytes(16)))
            .encryptor()
            .update(bytes(28)),
            "<u4",
        ).astype(np.int64)

    expected = p.x[3] + words(
        protocol.derive_key(own, b"own mask", 16, p.setup.session, MASKED, 3, 3)
    )
    for j in c.neighbours:
        public = X25519PrivateKey.from_private_bytes(pairs[j]).public_key()
        key = client_module.pair_key(
            p.setup,
            X25519PrivateKey.from_private_bytes(pairs[3]).exchange(public),
            3,
            j,
        )
        expected = expected + (words(key) if j > 3 else -words(key))
    np.testing.assert_array_equal(sent, expected % 2**20)


def test_noise_in_the_ring_survives_masking():
    n, d = 12, 50
    grid = FixedPoint(Ring(20), 2**-10, 1.0, n)
    u = np.clip(seed_tree(0, "u").normal(0, 0.3, (n, d)), -1, 1)
    z = np.stack([discrete_gaussian(400, d, seed_tree(0, i)) for i in range(n)])
    out = session_module.run_session(
        grid.ring.add(grid.encode(u), z), grid.ring, 6, 10, seed=0, drop={1: MASKED}
    )
    rest = [i for i in range(n) if i != 1]
    np.testing.assert_array_equal(
        grid.decode(out.total),
        grid.scale * (np.rint(u[rest] / grid.scale).sum(0) + z[rest].sum(0)),
    )


def test_no_vector_is_kept():
    "Twenty clients, one vector each in flight: the peak stays at a few vectors."
    d, ring = 200_000, Ring(32)
    x = vectors(1, d, ring)[0].astype(np.uint32)
    tracemalloc.start()
    out = session_module.run_session([x] * 20, ring, 4, 6, seed=0, drop={3: MASKED})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * x.nbytes
    np.testing.assert_array_equal(out.total, ring.wrap(19 * x.astype(np.int64)))


# ---- what the server sees


@pytest.mark.parametrize("bits", [8, 5])
def test_masks_are_uniform_and_reach_the_top(bits):
    p = parties(
        Setup(3, 2**15, Ring(bits), 2, session=bytes(16)),
        x=np.zeros((3, 2**15), np.int64),
        seed=5,
    )
    play(p, MASKED)
    counts = [
        np.bincount(
            protocol.unpack_words(
                body_of(c.receive(p.mail[c.me])), bits, 2**15, p.setup.word
            ),
            minlength=2**bits,
        )
        for c in p.clients
    ]
    assert all(fit(count, np.full(2**bits, 2.0**-bits)) > ALARM / 3 for count in counts)
    assert all(
        len(count) == 2**bits and count[-1] > 0 and count[0] > 0 for count in counts
    ), "0 and R - 1 occur"


def test_no_sum_of_some_vectors_is_open():
    """All proper subsets of the masked vectors, and the total itself before unmasking,
    differ from the sums of the inputs.
    """
    p = parties(small())
    play(p, MASKED)
    sent = [
        protocol.unpack_words(
            body_of(c.receive(p.mail[c.me])), 16, 4, p.setup.word
        ).astype(np.int64)
        for c in p.clients
    ]
    for size in range(1, 7):
        for chosen in itertools.combinations(range(6), size):
            assert not np.array_equal(
                p.setup.ring.sum([sent[i] for i in chosen]),
                p.setup.ring.sum(p.x[list(chosen)]),
            )


def test_nothing_is_unmasked_below_the_threshold():
    p = parties(small())
    play(p, UNMASK)
    before = p.server.total.copy()
    with pytest.raises(BelowThreshold):
        play(p, drop={0: UNMASK, 1: UNMASK, 2: UNMASK})
    assert not hasattr(p.server, "result") and np.array_equal(p.server.total, before)
    for i in (1, 2):
        p.server.receive(
            i, p.clients[i].receive(p.mail[i])
        )  # late, but the round is still open
    p.server.advance()
    np.testing.assert_array_equal(
        p.server.result, session_module.ideal_sum(p.x, p.setup.ring)
    )


# ---- corruption


def flip(data, at, by):
    at %= len(data)
    return data[:at] + bytes([data[at] ^ by]) + data[at + 1 :]


KINDS = {
    "flip": lambda data, at, by, seen: flip(data, at, by),
    "flip, checksum repaired": lambda data, at, by, seen: (
        (bad := flip(data[:-4], at, by)) + struct.pack("<I", zlib.crc32(bad))
    ),
    "cut": lambda data, at, by, seen: data[: at % len(data)],
    "grown": lambda data, at, by, seen: data + bytes([by]) * (1 + at % 9),
    "another message": lambda data, at, by, seen: seen[at % len(seen)],
}


@settings(drawn, max_examples=80)
@given(
    st.integers(0, 5),
    st.sampled_from(["up", "down"]),
    st.integers(0, 5),
    st.sampled_from(sorted(KINDS)),
    st.integers(0, 10**6),
    st.integers(1, 255),
    st.dictionaries(st.integers(0, 5), st.integers(0, 5), max_size=1),
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
        survivors = sorted(p.server.survivors)
        np.testing.assert_array_equal(
            p.server.result, session_module.ideal_sum(p.x[survivors], p.setup.ring)
        )
        assert len(errors) == sum(changed), "every change is noticed"
        for error in errors:
            assert (
                isinstance(error, ValueError)
                and error.client in (client, SERVER)
                and error.round == ROUNDS[step]
            )
            assert f"round '{ROUNDS[step]}'" in str(error) and protocol.party_name(
                error.client
            ) in str(error)


@settings(drawn, max_examples=30)
@given(
    st.sampled_from([SHARE, COMPLAIN, CHECK, UNMASK]),
    st.integers(0, 6),
    st.integers(0, 10**6),
    st.integers(1, 255),
    st.booleans(),
)
def test_a_client_that_signs_nonsense_never_ends_a_session(
    step, client, at, by, one_leaves
):
    """Shares, complaints, lists and revealed shares, altered by their own sender and
    properly signed: the sum opens, and only the liar is blamed.
    """
    p = parties(small(n=7, k=6, t=4))

    def tamper(now, direction, i, data):
        if (now, direction, i) != (step, "up", client):
            return data
        return from_client(
            p, step, i, flip(body_of(data), at, by) if body_of(data) else bytes([by])
        )

    errors = play(
        p, drop={(client + 1) % 7: COMPLAIN} if one_leaves else {}, tamper=tamper
    )
    np.testing.assert_array_equal(
        p.server.result,
        session_module.ideal_sum(p.x[sorted(p.server.survivors)], p.setup.ring),
    )
    assert {
        error.client for error in errors if error.round == ROUNDS[step]
    } | p.server.blamed.keys() <= {client}
    assert (
        errors or p.server.blamed or p.server.refused or step == SHARE and one_leaves
    ), "noticed, unless it was said to the one that left"


def test_an_error_changes_nothing():
    """The right message is still accepted after a wrong one, by server and clients, at
    every round.
    """
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
    np.testing.assert_array_equal(
        p.server.result, session_module.ideal_sum(p.x, p.setup.ring)
    )


# ---- each refusal by name


@contextmanager
def refused(kind, client, step, match=None):
    "A block that must raise an error that names its client and its round."
    with pytest.raises(kind, match=match) as caught:
        yield
    assert isinstance(caught.value, ValueError)
    assert (caught.value.client, caught.value.round) == (client, ROUNDS[step])


def test_a_directory_must_be_complete_and_without_repetition():
    private, directory = session_module.identities(6, 0)
    with refused(BadKey, 2, 0, "no 32-byte key"):
        client_module.check_directory(
            small(), {i: key for i, key in directory.items() if i != 2}
        )
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
    forged = protocol.seal(
        p.setup, stranger, 0, 1, SERVER, client_module.key_bundle(p.clients[1])
    )
    with refused(BadSignature, 1, 0):
        p.server.receive(1, forged)
    play(p, 1)
    entries = signed_bundles(p)
    j = min(entries)
    entries[j] = (
        entries[j][: protocol.BUNDLE_SIZE][::-1] + entries[j][protocol.BUNDLE_SIZE :]
    )
    with refused(BadSignature, j, 0):
        p.clients[0].receive(from_server(p, 0, 0, protocol.pack_records(entries)))
    with pytest.raises(BadSignature):
        protocol.check_signature(p.setup, p.directory, 0, 1, SERVER, b"body", bytes(64))


def test_repeated_keys_are_refused():
    p = parties(small())
    p.server.receive(0, p.clients[0].start())
    copied = (
        client_module.key_bundle(p.clients[0])[:32]
        + client_module.key_bundle(p.clients[1])[32:]
    )
    with refused(BadKey, 1, 0, "client 0 sent too"):
        p.server.receive(1, from_client(p, 0, 1, copied))
    own = client_module.key_bundle(p.clients[1])
    with refused(BadKey, 1, 0, "client 1 sent too"):
        client_module.check_bundle(p.setup, 1, own[:32] + own[:32] + own[64:], {})
    with refused(Damaged, 1, 0, "95 bytes"):
        client_module.check_bundle(p.setup, 1, own[:-1], {})
    swapped = (
        client_module.key_bundle(p.clients[1])[:32]
        + client_module.key_bundle(p.clients[0])[:32]
        + own[64:]
    )
    with refused(BadKey, 1, 0, "client 0 sent too"):
        p.server.receive(1, from_client(p, 0, 1, swapped))
    p.server.receive(1, p.clients[1].start())


ORDER_8 = (
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
)
LOW = {
    "0": 0,
    "1": 1,
    "-1": protocol.CURVE - 1,
    "order 8": ORDER_8[0],
    "order 8 too": ORDER_8[1],
    "p": protocol.CURVE,
    "p + 1": protocol.CURVE + 1,
    "high bit": 2**255,
    "high bit, order 8": 2**255 + ORDER_8[0],
    "not reduced": protocol.CURVE + 9,
}


def test_any_private_key_shows_what_is_of_small_order():
    """The result is zero for these keys and whichever private key is used, and for no
    random key.
    """
    draw = protocol.random_source(0, "small order")
    for private in (
        server.ANY_KEY,
        *(X25519PrivateKey.from_private_bytes(draw(32)) for _ in range(20)),
    ):
        for key in (0, 1, protocol.CURVE - 1, *ORDER_8):
            with pytest.raises(ValueError):
                private.exchange(
                    X25519PublicKey.from_public_bytes(key.to_bytes(32, "little"))
                )
        assert any(
            private.exchange(
                X25519PublicKey.from_public_bytes(
                    (int.from_bytes(draw(32), "little") % protocol.CURVE).to_bytes(
                        32, "little"
                    )
                )
            )
        )


@tabled("where", [0, 32], ids=["box", "pair"])
@tabled("key", LOW.values(), ids=LOW)
def test_a_key_of_small_order_is_refused(where, key):
    """By the server in round 0, the session goes on without its sender; and by clients,
    should a server pass it on.
    """
    p, key = parties(small(n=8, k=6, t=4)), key.to_bytes(32, "little")
    mine = client_module.key_bundle(p.clients[1])
    bad = mine[:where] + key + mine[where + 32 :]
    with refused(BadKey, 1, 0, "no key"):
        p.server.receive(1, from_client(p, 0, 1, bad))
    if bad[where : where + 32] in (bytes(32), LOW["order 8"].to_bytes(32, "little")):
        errors = play(
            p,
            tamper=lambda step, way, i, data: (
                from_client(p, 0, 1, bad) if (step, way, i) == (0, "up", 1) else data
            ),
        )
        assert [error.client for error in errors] == [1]
        exact(p, [0, *range(2, 8)])
    p = parties(small(n=4, k=2, t=2))
    play(p, 1)
    entries = signed_bundles(p)
    j = min(entries)
    mine = entries[j][: protocol.BUNDLE_SIZE]
    bad = mine[:where] + key + mine[where + 32 :]
    signature = read(from_client(p, 0, j, bad)).payload[-protocol.SIGNATURE_SIZE :]
    with refused(BadKey, j, 0, "no key"):
        p.clients[0].receive(
            from_server(p, 0, 0, protocol.pack_records({**entries, j: bad + signature}))
        )


def test_different_supports_are_refused_by_server_and_clients():
    def other(i, setup):
        return small(support=b"other") if i == 4 else setup

    p = parties(small(support=b"one"), change=other)
    with refused(SupportMismatch, 4, 0, "another support"):
        p.server.receive(4, p.clients[4].start())
    p = parties(small(support=b"one"), change=other)
    renamed = reframe(p.clients[4].start(), fingerprint=p.setup.fingerprint)
    with refused(SupportMismatch, 4, 0, "support differ"):
        p.server.receive(4, renamed)
    p = parties(small(support=b"one"))
    play(p, 1)
    entries = signed_bundles(p)
    j = min(entries)
    bundle = entries[j][:64] + small(support=b"other").digest
    signature = read(from_client(p, 0, j, bundle)).payload[-protocol.SIGNATURE_SIZE :]
    body = protocol.pack_records({**entries, j: bundle + signature})
    with refused(SupportMismatch, j, 0):
        p.clients[0].receive(from_server(p, 0, 0, body))
    with refused(Damaged, SERVER, 0, "about 5 entries; 4 are expected"):
        p.clients[0].receive(reframe(p.mail[0], d=5))


def test_foreign_frames_are_damaged():
    p = parties(small())
    data = p.clients[0].start()
    with refused(Damaged, 0, 0, "no message of secagg"):
        p.server.receive(0, reframe(data, mechanism="rec"))
    with refused(Damaged, 0, 0):
        p.server.receive(0, reframe(data, payload=b"x"))
    with refused(Damaged, 0, 0, "truncated"):
        p.server.receive(0, b"")


def test_replays_and_reordered_messages_are_refused():
    p = parties(small())
    first = [c.start() for c in p.clients]
    with refused(Replay, 0, 0):
        p.clients[0].start()
    with refused(Replay, SERVER, 0, "no message is due"):
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
    with refused(Replay, SERVER, UNMASK, "no message is due"):
        p.clients[0].receive(b"")


def test_too_few_bundles_are_refused_by_a_client():
    p = parties(small())
    play(p, 1)
    entries = signed_bundles(p)
    body = protocol.pack_records(dict(list(entries.items())[:2]))
    with refused(BelowThreshold, 0, 1, "2 of its neighbours"):
        p.clients[0].receive(from_server(p, 0, 0, body))
    assert client_module.neighbour_bundles(
        p.clients[0], protocol.pack_records(entries)
    ) == {i: entry[: protocol.BUNDLE_SIZE] for i, entry in entries.items()}


def test_records_name_each_client_once():
    records = {3: b"ab", 1: b"cd"}
    body = protocol.pack_records(records)
    assert protocol.unpack_records(body, 2, [1, 3], 0, 1) == records
    with refused(Damaged, 0, 1, "no whole number"):
        protocol.unpack_records(b"1234567", 2, [1], 0, 1)
    with refused(Inconsistent, 0, 1):
        protocol.unpack_records(protocol.pack_records({3: b"ab"}) * 2, 2, [1, 3], 0, 1)
    with refused(Inconsistent, 0, 1):
        protocol.unpack_records(protocol.pack_records({2: b"ab"}), 2, [1, 3], 0, 1)
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

    def say(survivors, dropouts):
        return c.receive(from_server(p, MASKED, 0, lists(p, survivors, dropouts)))

    for both in (everyone, {1}, {0}):
        with refused(Inconsistent, SERVER, MASKED, "survivor and as dropout"):
            say(everyone, both)
    with refused(Inconsistent, SERVER, MASKED, "no survivor"):
        say(everyone - {0}, {0})
    j = c.neighbours[0]
    with refused(Inconsistent, SERVER, MASKED, "do not agree"):
        say(everyone - {j}, ())
    with refused(Inconsistent, SERVER, MASKED, "do not exist"):
        c.receive(from_server(p, MASKED, 0, bytes([255, 0])))
    with refused(Damaged, SERVER, MASKED, "3 bytes; 2 are due"):
        c.receive(from_server(p, MASKED, 0, bytes(3)))
    with refused(BelowThreshold, SERVER, MASKED, "3 clients are left; 4 must"):
        say({0, 1, 2}, {3, 4, 5})
    c.receive(p.mail[0])
    with refused(Replay, SERVER, CHECK, "round"):
        say({0, 1, 2, 3, 4}, {5})
    assert protocol.client_sets(p.setup, lists(p, {0, 4}, {1}), 2, MASKED) == [
        {0, 4},
        {1},
    ]


def test_a_stranger_is_no_survivor():
    "A neighbour that sent no shares cannot be in the sum: its masks would not cancel."
    p = parties(small())
    play(p, CHECK, drop={5: 1})
    c = next(c for c in p.clients[:5] if 5 in c.neighbours)
    body = lists(p, range(6), ())
    with refused(Inconsistent, SERVER, MASKED, "do not agree"):
        c.receive(from_server(p, MASKED, c.me, body))


def test_nothing_is_revealed_before_enough_signed_the_same_lists():
    p = parties(small())
    play(p, CHECK + 1)
    good = protocol.unpack_records(
        body_of(p.mail[0]), protocol.SIGNATURE_SIZE, range(6), SERVER, CHECK
    )
    assert len(good) == p.setup.quorum - 1

    def say(entries):
        return p.clients[0].receive(
            from_server(p, CHECK, 0, protocol.pack_records(entries))
        )

    short = dict(list(good.items())[1:])
    with refused(BelowThreshold, 0, UNMASK, "2 others signed the lists; 3 must"):
        say(short)
    other = hashlib.sha256(lists(p, range(5), [5])).digest()
    j = min(good)
    elsewhere = read(from_client(p, CHECK, j, other)).payload[
        -protocol.SIGNATURE_SIZE :
    ]
    with refused(BadSignature, j, CHECK):
        say({**good, j: elsewhere})
    with refused(Inconsistent, SERVER, CHECK):
        say({**short, 0: good[j]})
    with refused(Inconsistent, j, CHECK, "other lists"):
        server.accept_lists(p.server, j, other)
    held = {i: tuple(map(bytes, pair)) for i, pair in p.clients[0].held.items()}
    shares = protocol.unpack_records(
        body_of(say(good)), protocol.ELEMENT_SIZE, range(6), 0, UNMASK
    )
    assert all(shares[i] == held[i][0] for i in shares), (
        "all survived: shares of own seeds only"
    )


def test_a_dropout_gets_its_key_revealed_and_nothing_else():
    p = parties(small())
    play(p, CHECK + 1, drop={5: MASKED})
    for c in p.clients[:5]:
        held = {i: tuple(map(bytes, pair)) for i, pair in c.held.items()}
        shares = protocol.unpack_records(
            body_of(c.receive(p.mail[c.me])),
            protocol.ELEMENT_SIZE,
            range(6),
            c.me,
            UNMASK,
        )
        assert all(share == held[i][i == 5] for i, share in shares.items()) and set(
            shares
        ) == set(c.neighbours)


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
    assert (
        "11"
        not in (
            text := str(
                pytest.raises(
                    OutOfRange, client_module.ring_words, p.setup, np.full(4, 11), 1
                ).value
            )
        )
        and "10" in text
    )
    assert client_module.ring_words(p.setup, np.full(4, 10), 1).dtype == np.uint32
    p.clients[1].vector = np.full(4, 10)
    assert not play(p)
    np.testing.assert_array_equal(p.setup.ring.lift(p.server.result), np.full(4, -40))


def test_a_vector_of_wrong_length_is_refused_by_the_server():
    p = parties(small())
    play(p, MASKED)
    with refused(Damaged, 3, MASKED, "9 bytes; 8 are due"):
        p.server.receive(3, from_client(p, MASKED, 3, bytes(9)))
    with pytest.raises(Damaged):
        server.accept_vector(p.server, 3, b"")
    assert not p.server.total.any()


# ---- liars


def rewrite(p, client, step, data, change):
    "The same client says something else, properly signed."
    return from_client(p, step, client, change(body_of(data)))


def cut_shares(p, body):
    "A message of round 1: proof, records."
    size = protocol.ELEMENT_SIZE * (1 + 2 * p.setup.threshold)
    return body[:size], protocol.unpack_records(
        body[size:], client_module.DEALT_SIZE, range(p.setup.n_clients), 0, SHARE
    )


def garbage(p, victims):
    "Other ciphertexts for some neighbours."

    def change(body):
        proof, entries = cut_shares(p, body)
        return proof + protocol.pack_records(
            {
                i: flip(record, 5, 1) if i in victims else record
                for i, record in entries.items()
            }
        )

    return change


def crooked(monkeypatch, victims):
    "Shares off the polynomial for some neighbours, with hashes to match."
    honest = protocol.evaluate
    monkeypatch.setattr(
        protocol,
        "evaluate",
        lambda c, at: [
            v + 1 if i in victims else v for i, v in enumerate(honest(c, at))
        ],
    )


def blamed(p, errors):
    "Everybody named: by an error at the server, or expelled."
    return {error.client for error in errors} | p.server.blamed.keys()


def exact(p, survivors):
    assert sorted(p.server.survivors) == sorted(survivors)
    np.testing.assert_array_equal(
        p.server.result, session_module.ideal_sum(p.x[sorted(survivors)], p.setup.ring)
    )


def eight(**more):
    return parties(small(n=8, k=6, t=4), **more)


@pytest.mark.parametrize("liar", [0, 3, 7])
def test_garbage_shares_expel_their_sender_and_nobody_else(liar):
    p = eight()
    errors = play(
        p,
        tamper=lambda step, way, i, data: (
            rewrite(p, i, SHARE, data, garbage(p, range(8)))
            if (step, way, i) == (SHARE, "up", liar)
            else data
        ),
    )
    assert (
        not errors
        and p.server.blamed.keys() == {liar}
        and "6 neighbours refuse its shares" in str(p.server.blamed[liar])
    )
    exact(p, set(range(8)) - {liar})


@pytest.mark.parametrize("victims", [1, 2])
def test_a_few_garbage_shares_blame_nobody_and_cost_nothing(victims):
    "Up to k - t: holder and owner go on, and the owner may still leave."
    for leaves in ({}, {3: MASKED}):
        p = eight()
        chosen = p.clients[3].neighbours[:victims]
        errors = play(
            p,
            drop=leaves,
            tamper=lambda step, way, i, data: (
                rewrite(p, i, SHARE, data, garbage(p, chosen))
                if (step, way, i) == (SHARE, "up", 3)
                else data
            ),
        )
        assert (
            not errors
            and not p.server.blamed
            and p.server.refused == {(3, j) for j in chosen}
        )
        exact(p, set(range(8)) - leaves.keys())


def test_three_garbage_shares_leave_too_few_holders_and_blame_nobody():
    "Three of six is more than k - t and less than t: either side could be lying."
    p = eight()
    errors = play(
        p,
        tamper=lambda step, way, i, data: (
            rewrite(p, i, SHARE, data, garbage(p, p.clients[3].neighbours[:3]))
            if (step, way, i) == (SHARE, "up", 3)
            else data
        ),
    )
    assert not errors and not p.server.blamed
    exact(p, set(range(8)) - {3})


@pytest.mark.parametrize("victims", [1, 6])
def test_shares_off_the_polynomial_are_refused_by_their_holders(victims, monkeypatch):
    p = eight()
    play(p, SHARE)
    for c in p.clients:
        with monkeypatch.context() as patch:
            if c.me == 3:
                crooked(patch, range(victims))
            up = c.receive(p.mail[c.me])
        p.server.receive(c.me, up)
    p.mail = p.server.advance()
    assert (
        not play(p)
        and len(p.server.refused) == (victims if victims < 4 else 0)
        and p.server.blamed.keys() == ({3} if victims == 6 else set())
    )
    exact(p, set(range(8)) - p.server.blamed.keys())


def test_shares_of_another_key_are_refused_at_once():
    """The owner shares a mask key that it did not advertise: the proof fails in round
    1, and the session goes on without it.
    """
    p = eight()
    play(p, SHARE)
    true, p.clients[2].pair = p.clients[2].pair, bytearray(b"z" * 32)
    up = p.clients[2].receive(p.mail[2])
    with refused(BadShare, 2, SHARE, "not those of its key"):
        p.server.receive(2, up)
    assert not play(p, drop={2: SHARE})
    exact(p, set(range(8)) - {2})
    assert bytes(true) != b"z" * 32


def test_a_seed_that_was_not_shared_is_like_another_vector():
    """What the shares give is the own seed: a client that masks with another one spoils
    its own entry, as any vector may.
    """
    p = eight()
    play(p, MASKED)
    shared, p.clients[2].own = bytes(p.clients[2].own), bytearray(b"q" * 32)
    assert not play(p)
    error = (p.server.result - session_module.ideal_sum(p.x, p.setup.ring)) % 2**16

    def words(seed):
        return np.frombuffer(
            Cipher(
                algorithms.AES(
                    protocol.derive_key(
                        seed, b"own mask", 16, p.setup.session, MASKED, 2, 2
                    )
                ),
                modes.CTR(bytes(16)),
            )
            .encryptor()
            .update(bytes(16)),
            "<u4",
        ).astype(np.int64)

    np.testing.assert_array_equal(error, (words(b"q" * 32) - words(shared)) % 2**16)


@pytest.mark.parametrize("liar", [0, 3, 7])
def test_whoever_complains_about_everybody_lied(liar):
    p = eight()

    def everybody(body):
        return protocol.pack_records({i: b"" for i in p.clients[liar].neighbours})

    errors = play(
        p,
        tamper=lambda step, way, i, data: (
            rewrite(p, i, COMPLAIN, data, everybody)
            if (step, way, i) == (COMPLAIN, "up", liar)
            else data
        ),
    )
    assert (
        not errors
        and p.server.blamed.keys() == {liar}
        and "complains about 6 neighbours" in str(p.server.blamed[liar])
    )
    exact(p, set(range(8)) - {liar})


@pytest.mark.parametrize("liars", [1, 2])
def test_false_complaints_expel_no_honest_client(liars):
    """Up to k - t neighbours slander client 3, which then even leaves: its key is
    rebuilt without them.
    """
    for leaves in ({}, {3: MASKED}):
        p = eight()
        crooks = p.clients[3].neighbours[:liars]
        said = {
            COMPLAIN: lambda body: protocol.pack_records({3: b""}),
            UNMASK: lambda body: protocol.pack_records(
                {
                    i: share
                    for i, share in protocol.unpack_records(
                        body, protocol.ELEMENT_SIZE, range(8), 0, UNMASK
                    ).items()
                    if i != 3
                }
            ),
        }
        assert not play(
            p,
            drop=leaves,
            tamper=lambda step, way, i, data: (
                rewrite(p, i, step, data, said[step])
                if way == "up" and step in said and i in crooks
                else data
            ),
        )
        assert not p.server.blamed and p.server.refused == {(3, j) for j in crooks}
        exact(p, set(range(8)) - leaves.keys())


def test_complaints_name_neighbours_that_sent_shares():
    p = parties(small())
    play(p, COMPLAIN)
    stranger = next(i for i in range(6) if i != 0 and i not in p.clients[0].neighbours)
    with refused(Inconsistent, 0, COMPLAIN):
        p.server.receive(
            0, from_client(p, COMPLAIN, 0, protocol.pack_records({stranger: b""}))
        )
    with refused(Damaged, 0, COMPLAIN):
        p.server.receive(0, from_client(p, COMPLAIN, 0, b"abc"))
    assert server.accept_complaints(
        p.server, 0, protocol.pack_records({p.clients[0].neighbours[0]: b""})
    ) == {p.clients[0].neighbours[0]}


def test_the_ruling_on_complaints():
    setup = small(n=8, k=6, t=4)
    near = protocol.graph(8, 6, setup.session)
    everybody = {i: set() for i in range(8)}
    assert server.resolve_complaints(setup, everybody) == (set(range(8)), set(), {})
    a, b, c, d = near[0][:4].tolist()
    members, out, named = server.resolve_complaints(
        setup, {**everybody, a: {0}, b: {0}}
    )
    assert (members, out, named) == (set(range(8)), {(0, a), (0, b)}, {})
    members, out, named = server.resolve_complaints(
        setup, {**everybody, a: {0}, b: {0}, c: {0}}
    )
    assert (members, out, named) == (set(range(1, 8)), set(), {}), "out, but not blamed"
    members, out, named = server.resolve_complaints(
        setup, {**everybody, a: {0}, b: {0}, c: {0}, d: {0}}
    )
    assert (
        members == set(range(1, 8))
        and named.keys() == {0}
        and named[0].round == "share"
    )
    slander = {**everybody, a: set(near[a].tolist()), b: {0}, c: {0}, d: {0}}
    members, out, named = server.resolve_complaints(setup, slander)
    assert named.keys() == {a} and named[a].round == "complain", (
        "void complaints do not count against others"
    )


@pytest.mark.parametrize("liar", range(4))
def test_a_wrong_revealed_share_names_its_holder_and_the_sum_opens(liar):
    p = eight()
    gone = {(liar + 1) % 8: MASKED} if liar % 2 else {}
    play(p, UNMASK, drop=gone)
    true = p.clients[liar].receive(p.mail.pop(liar))
    shares = protocol.unpack_records(
        body_of(true), protocol.ELEMENT_SIZE, range(8), 0, UNMASK
    )
    first, second = list(shares)[:2]
    for lie in (
        {i: flip(share, 0, 1) for i, share in shares.items()},
        {**shares, first: bytes(32)},
        {**shares, first: shares[second]},
        {
            **shares,
            first: (
                (int.from_bytes(shares[first], "little") + PRIME).to_bytes(32, "little")
            ),
        },
    ):
        with refused(
            BadShare, liar, UNMASK, f"of client {first} is not the one that it accepted"
        ):
            p.server.receive(
                liar,
                rewrite(p, liar, UNMASK, true, lambda body: protocol.pack_records(lie)),
            )
    assert not play(p)
    exact(p, set(range(8)) - gone.keys())


def test_a_liar_in_unmasking_may_still_say_the_right_thing():
    p = eight()
    play(p, UNMASK)
    true = p.clients[0].receive(p.mail[0])
    with refused(BadShare, 0, UNMASK, "not the one"):
        p.server.receive(
            0,
            rewrite(p, 0, UNMASK, true, lambda body: body[:4] + bytes(32) + body[36:]),
        )
    with refused(BadShare, 0, UNMASK, "5 shares; 6 are due"):
        p.server.receive(0, rewrite(p, 0, UNMASK, true, lambda body: body[:-36]))
    p.server.receive(0, true)
    with pytest.raises(BadShare):
        server.accept_revealed(p.server, 1, b"")
    assert (
        server.commitment_of(p.server, p.clients[0].neighbours[0], 0, 0)[0]
        != server.commitment_of(p.server, p.clients[0].neighbours[0], 0, 1)[0]
    )


LIES = {
    "low key": (ADVERTISE, lambda p, i, rng, body: bytes(32) + body[32:]),
    "short keys": (ADVERTISE, lambda p, i, rng, body: body[:-1]),
    "another support": (ADVERTISE, lambda p, i, rng, body: body[:-32] + bytes(32)),
    "garbage": (
        SHARE,
        lambda p, i, rng, body: garbage(p, rng.permutation(12)[: rng.integers(1, 13)])(
            body
        ),
    ),
    "proof": (
        SHARE,
        lambda p, i, rng, body: flip(
            body, int(rng.integers(32 * 11)), 1 << int(rng.integers(8))
        ),
    ),
    "hashes": (
        SHARE,
        lambda p, i, rng, body: flip(body, -1 - int(rng.integers(64)), 1),
    ),
    "records": (SHARE, lambda p, i, rng, body: body[: -4 - client_module.DEALT_SIZE]),
    "slander": (
        COMPLAIN,
        lambda p, i, rng, body: protocol.pack_records(
            {
                int(j): b""
                for j in rng.permutation(p.clients[i].neighbours)[: rng.integers(1, 9)]
                if j in p.server.shared
            }
        ),
    ),
    "no list": (COMPLAIN, lambda p, i, rng, body: body + b"x"),
    "length": (MASKED, lambda p, i, rng, body: body[:-1]),
    "lists": (CHECK, lambda p, i, rng, body: flip(body, 0, 1)),
    "reveal": (
        UNMASK,
        lambda p, i, rng, body: flip(body, 4 + int(rng.integers(32)), 1),
    ),
    "silence": (None, None),
}
TRIED = []


@settings(drawn, max_examples=24)
@given(st.integers(0, 2**32))
def test_liars_within_the_bound_end_no_session_and_no_honest_client_is_blamed(seed):
    """Up to k - t = 3 of 12 clients, each with a lie of its own: the sum opens,
    everybody honest is in it, and only liars are named.
    """
    rng = seed_tree(seed, "liars")
    p = parties(small(n=12, k=8, t=5), seed=int(rng.integers(3)))
    chosen = rng.permutation(12)[: rng.integers(1, 4)].tolist()
    lies = {int(i): str(rng.choice(list(LIES))) for i in chosen}
    drop = {i: int(rng.integers(6)) for i, lie in lies.items() if lie == "silence"}

    def tamper(step, way, i, data):
        at, change = LIES[lies.get(i, "silence")]
        return (
            rewrite(p, i, step, data, lambda body: change(p, i, rng, body))
            if (step, way) == (at, "up")
            else data
        )

    errors = play(p, drop=drop, tamper=tamper)
    TRIED.extend(lies.values())
    exact(p, p.server.survivors)
    assert (
        set(range(12)) - lies.keys() <= p.server.survivors
        and blamed(p, errors) <= lies.keys()
    )
    always = {
        i for i, lie in lies.items() if lie not in ("silence", "garbage", "slander")
    }
    assert always & (p.server.advertised if p.server.advertised else always) <= blamed(
        p, errors
    ) | {i for i in always if lies[i] == "hashes"} | late(p, lies)


def late(p, lies):
    "Liars who were out before their turn to lie came."
    return {
        i
        for i, lie in lies.items()
        if lie in ("length", "lists", "reveal", "slander", "no list")
        and i not in getattr(p.server, "members", ())
    }


def test_every_lie_was_tried():
    assert not TRIED or set(TRIED) == set(LIES)


# ---- the proof of shares


def test_sums_of_points_are_recognised():
    draw = protocol.random_source(0, "points")
    for _ in range(10):
        a, b, e = (protocol.random_element(draw) for _ in range(3))

        def key(x):
            return protocol.public_key(protocol.private_from_scalar(x % PRIME))

        assert (
            protocol.is_sum_or_difference(key(a), key(b), key(a + b))
            and protocol.is_sum_or_difference(key(a), key(b), key(a - b))
            and protocol.is_sum_or_difference(key(a), key(a), key(2 * a))
        )
        assert not protocol.is_sum_or_difference(
            key(a), key(b), key(a + 2 * b)
        ) and not protocol.is_sum_or_difference(key(a), key(b), key(e))
        times = X25519PrivateKey.from_private_bytes(
            protocol.private_from_scalar(e)
        ).exchange(X25519PublicKey.from_public_bytes(key(b)))
        assert times == key(e * b), "the group is of this order"


def test_elements_are_private_keys():
    draw = protocol.random_source(0, "scalars")
    for private in (draw(32) for _ in range(20)):
        number = protocol.scalar(private)
        assert protocol.private_from_scalar(number) == (
            int.from_bytes(private, "little") & (2**254 - 8) | 2**254
        ).to_bytes(32, "little"), "the key itself, clamped"
        assert (
            protocol.public_key(protocol.private_from_scalar(number))
            == protocol.public_key(private)
            == protocol.public_key(protocol.private_from_scalar(PRIME - number))
        )
    with pytest.raises(ValueError, match="no private key"):
        protocol.private_from_scalar(0)


def dealt(setup, secrets=None, key=None):
    private = protocol.random_source(0, "dealer")(32) if key is None else key
    keys = (
        bytes(32)
        + protocol.public_key(protocol.random_source(0, "dealer")(32))
        + setup.digest
    )
    holders = list(protocol.share_points(setup, 0))
    return keys, protocol.deal(
        setup,
        0,
        keys,
        (7, protocol.scalar(private)),
        holders,
        protocol.random_source(0, "deal"),
    )


def test_honest_shares_pass_and_give_both_secrets_back():
    setup = small(n=8, k=6, t=4)
    keys, d = dealt(setup)
    e = protocol.check_dealing(setup, 0, keys, d)
    assert e == protocol.scalar(protocol.challenge(setup, 0, keys, d.start, d.hashes))
    at = protocol.share_points(setup, 0)
    for kind, secret in enumerate(
        (7, protocol.scalar(protocol.random_source(0, "dealer")(32)))
    ):
        assert protocol.reconstruct({at[j]: d.shares[j][kind] for j in at}, 4) == secret
        for j in at:
            promise = (
                d.hashes[j][32 * kind : 32 * kind + 32],
                protocol.evaluate(d.lines[kind], [at[j]])[0],
                e,
            )
            assert protocol.matches_commitment(
                setup, 0, j, kind, d.shares[j][kind], promise
            ) and not protocol.matches_commitment(
                setup, 0, j, kind, d.shares[j][kind] ^ 1, promise
            )
            assert not protocol.matches_commitment(
                setup, 0, j, 1 - kind, d.shares[j][kind], promise
            ) and not protocol.matches_commitment(
                setup, 0, j, kind, d.shares[j][kind] + PRIME, promise
            )
    assert (
        protocol.share_commitment(setup, 0, 1, 0, 5, 6)
        != protocol.share_commitment(setup, 0, 1, 1, 5, 6)
        != protocol.share_commitment(setup, 0, 2, 1, 5, 6)
    )
    assert isinstance(d, protocol.Dealing)


def test_a_proof_of_another_key_or_an_altered_one_fails():
    setup = small(n=8, k=6, t=4)
    keys, d = dealt(setup, key=b"y" * 32)
    with refused(BadShare, 0, SHARE, "not those of its key"):
        protocol.check_dealing(setup, 0, keys, d)
    keys, d = dealt(setup)
    own, pair = d.lines
    j = min(d.hashes)
    for bad in (
        d._replace(start=keys[32:64]),
        d._replace(lines=[own, [pair[0] + 1, *pair[1:]]]),
        d._replace(lines=[own, [0, *pair[1:]]]),
        d._replace(hashes={**d.hashes, j: bytes(64)}),
        d._replace(hashes=dict(list(d.hashes.items())[1:])),
    ):
        with refused(BadShare, 0, SHARE):
            protocol.check_dealing(setup, 0, keys, bad)
    with refused(BadShare, 0, SHARE):
        protocol.check_dealing(setup, 0, keys[:64] + bytes(32), d)
    with refused(BadShare, 1, SHARE):
        protocol.check_dealing(setup, 1, keys, d)


def difference_with(total, other):
    "A point R with total = R + other or R - other, up to sign: Montgomery's quadratic."
    x, y = (int.from_bytes(key, "little") for key in (total, other))
    p = protocol.CURVE
    middle = (x + y) * (x * y + 1) + 2 * 486662 * x * y
    square = (middle * middle - ((x - y) * (x * y - 1)) ** 2) % p
    root = pow(square, (p + 3) // 8, p)
    root = root if root * root % p == square else root * pow(2, (p - 1) // 4, p) % p
    return ((middle + root) * pow((x - y) ** 2, -1, p) % p).to_bytes(32, "little")


def test_the_proof_can_be_made_without_the_secrets(monkeypatch):
    "Proposition B: whoever chooses the oracle's answer needs t - 1 shares, no secret."
    setup = small(n=8, k=6, t=4)
    draw = protocol.random_source(0, "simulator")
    public = protocol.public_key(b"unknown to the simulator........")
    keys = bytes(32) + public + setup.digest
    at, challenge = protocol.share_points(setup, 0), draw(32)
    e = protocol.scalar(challenge)
    lines = [[protocol.random_element(draw) for _ in range(4)] for _ in range(2)]
    known = {j: tuple(protocol.random_element(draw) for _ in "ab") for j in [*at][:3]}

    def commitment(j, kind):
        line, share = protocol.evaluate(lines[kind], [at[j]])[0], known[j][kind]
        blind = (line - e * share) % PRIME
        return protocol.share_commitment(setup, 0, j, kind, share, blind), line, e

    hashes = {j: draw(64) for j in at}
    for j in known:
        hashes[j] = commitment(j, 0)[0] + commitment(j, 1)[0]
    total = protocol.public_key(protocol.private_from_scalar(lines[1][0]))
    private = X25519PrivateKey.from_private_bytes(challenge)
    times = private.exchange(X25519PublicKey.from_public_bytes(public))
    start = difference_with(total, times)
    monkeypatch.setattr(protocol, "challenge", lambda *about: challenge)
    dealing = protocol.Dealing(None, hashes, start, lines)
    assert protocol.check_dealing(setup, 0, keys, dealing) == e
    for j, kind in itertools.product(known, (0, 1)):
        assert protocol.matches_commitment(
            setup, 0, j, kind, known[j][kind], commitment(j, kind)
        )


def test_a_key_that_the_shares_do_not_give_back_names_its_owner():
    "What the proof excludes is still noticed at the end."
    p = eight()
    play(p, UNMASK, drop={2: MASKED})
    for wrong in (5, 0):
        with refused(BadShare, 2, SHARE, "give another one back"):
            server.recovered_masks(p.server, 2, wrong)


def test_a_server_that_forges_shares_gets_complaints_and_no_shares():
    p = parties(small())
    play(p, COMPLAIN)
    entries = protocol.unpack_records(
        body_of(p.mail[0]), client_module.FORWARDED_SIZE, range(6), SERVER, SHARE
    )
    forged = {
        i: flip(record, at, 1)
        for (i, record), at in zip(
            entries.items(),
            (
                0,
                client_module.SEALED_SIZE,
                client_module.DEALT_SIZE,
                client_module.FORWARDED_SIZE - 1,
            ),
        )
    }
    said = body_of(
        p.clients[0].receive(from_server(p, SHARE, 0, protocol.pack_records(forged)))
    )
    assert set(protocol.unpack_records(said, 0, range(6), 0, COMPLAIN)) == set(
        entries
    ) and not any(p.clients[0].held.values())


def test_too_few_shares_stop_a_client():
    p = parties(small())
    play(p, COMPLAIN)
    entries = protocol.unpack_records(
        body_of(p.mail[0]), client_module.FORWARDED_SIZE, range(6), SERVER, SHARE
    )
    few = protocol.pack_records(dict(list(entries.items())[:2]))
    with refused(BelowThreshold, 0, COMPLAIN, "2 of its neighbours"):
        p.clients[0].receive(from_server(p, SHARE, 0, few))


def test_the_second_mail_is_held_against_the_first():
    p = parties(small())
    play(p, MASKED, drop={5: SHARE})
    c = next(c for c in p.clients[:5] if 5 in c.neighbours)

    def say(ids):
        return c.receive(from_server(p, COMPLAIN, c.me, protocol.bitmap(ids, 6)))

    with refused(Inconsistent, SERVER, COMPLAIN, "does not agree with the shares"):
        say(range(6))
    with refused(Inconsistent, SERVER, COMPLAIN, "does not agree"):
        say(set(range(5)) - {c.me})
    with refused(BelowThreshold, SERVER, COMPLAIN, "3 clients are left"):
        say([c.me, *[i for i in c.neighbours if i < 5][:2]])
    with refused(Damaged, SERVER, COMPLAIN, "2 bytes; 1 are due"):
        c.receive(from_server(p, COMPLAIN, c.me, b"ab"))
    assert say(range(5))


# ---- one step at a time, and secrets that go


@pytest.fixture
def hurried():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def both(call):
    "What two threads get that call at once: results, errors."
    results, errors, gate = [], [], threading.Barrier(2)

    def go():
        gate.wait()
        try:
            results.append(call())
        except SecAggError as error:
            errors.append(error)

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
            ups = {}
            for c in p.clients:
                (ups[c.me],), errors = both(
                    lambda: c.receive(p.mail[c.me]) if step else c.start()
                )
                assert [type(error) for error in errors] == [Replay]
            for i, up in ups.items():
                results, errors = both(lambda: p.server.receive(i, up))
                assert (len(results), [type(error) for error in errors]) == (
                    1,
                    [Replay],
                )
            if step < UNMASK:
                (p.mail,), errors = both(p.server.advance)
                assert [type(error) for error in errors] == [BelowThreshold], (
                    "the next round has no messages yet"
                )
            else:
                results, errors = both(p.server.advance)
                assert (len(results), [type(error) for error in errors]) == (
                    1,
                    [Replay],
                )
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
    assert len(flat) == 3 + 4 + 4 + 8
    for secret in flat:
        assert isinstance(secret, bytearray)
        assert not any(secret), "overwritten, not only let go"
    server = p.server
    assert server.bundles is server.dealings is server.seen is server.total is None
    assert not server.inbox


def test_a_session_that_fails_can_be_closed():
    p = parties(small())
    play(p, MASKED)
    c = p.clients[0]
    own = c.own
    c.close()
    assert not any(own) and all(
        getattr(c, name, None) is None
        for names in client_module.LAST_USE.values()
        for name in names
    )
    with refused(Replay, SERVER, UNMASK, "no message is due"):
        c.receive(p.mail[0])
    client_module.wipe({1: (bytearray(b"a"), "not a secret")})
    client_module.enter_round(c, len(ROUNDS))
    assert client_module.reply.__doc__ and c.step == len(ROUNDS)


# ---- fewer checks


def test_a_bundle_is_compared_once(monkeypatch):
    "Each bundle is looked at when it comes, not again with every later one."
    looked = []
    real = client_module.check_bundle
    monkeypatch.setattr(
        server,
        "check_bundle",
        lambda setup, i, body, seen: (looked.append(i), real(setup, i, body, seen)),
    )
    p = parties(small(n=20, k=4, t=3))
    for c in p.clients:
        p.server.receive(c.me, c.start())
    assert looked == list(range(20)) and len(p.server.seen) == 40
    with refused(Damaged, 0, 0):
        server.accept_bundle(p.server, 0, b"")


def test_only_the_committee_is_asked(monkeypatch):
    """The signatures on the lists that a client checks: s, or s - 1 of the others for a
    member of the committee.
    """
    checked, real = [], protocol.check_signature
    monkeypatch.setattr(
        client_module,
        "check_signature",
        lambda setup, directory, step, sender, receiver, *more: (
            checked.append((step, sender, receiver)),
            real(setup, directory, step, sender, receiver, *more),
        ),
    )
    setup = small(n=20, k=4, t=3, committee=7, signatures=5)
    p = parties(setup)
    assert not play(p, UNMASK)
    chosen = protocol.committee(setup)
    assert (
        len(chosen) == 7
        and set(chosen) < set(range(20))
        and sorted(protocol.committee(small(n=20, k=4, t=3))) == list(range(20))
    )
    for c in p.clients:
        checked.clear()
        c.receive(p.mail[c.me])
        about = [
            sender
            for step, sender, receiver in checked
            if step == CHECK and receiver == SERVER
        ]
        assert len(about) == (4 if c.me in chosen else 5) and set(about) < set(
            chosen
        ) - {c.me}


def test_the_committee_must_sign():
    setup = small(n=20, k=10, t=6, committee=7, signatures=5)
    chosen = protocol.committee(setup)
    p = parties(setup)
    with pytest.raises(
        BelowThreshold, match="4 of the committee signed; 5 must"
    ) as caught:
        play(p, drop={i: CHECK for i in chosen[:3]})
    assert (caught.value.client, caught.value.round) == (SERVER, "check")
    p = parties(setup)
    play(p, UNMASK, drop={i: CHECK for i in chosen[:2]})
    c = p.clients[next(i for i in range(20) if i not in chosen)]
    good = protocol.unpack_records(
        body_of(p.mail[c.me]), protocol.SIGNATURE_SIZE, range(20), SERVER, CHECK
    )

    def say(entries):
        return c.receive(from_server(p, CHECK, c.me, protocol.pack_records(entries)))

    with refused(BelowThreshold, c.me, UNMASK, "4 others signed the lists; 5 must"):
        say(dict(list(good.items())[1:]))
    stranger = next(i for i in range(20) if i not in chosen and i != c.me)
    with refused(Inconsistent, SERVER, CHECK):
        say({**dict(list(good.items())[1:]), stranger: bytes(64)})
    play(p, drop={i: CHECK for i in chosen[:2]})
    np.testing.assert_array_equal(
        p.server.result, session_module.ideal_sum(p.x, setup.ring)
    )


def test_two_lists_are_never_both_signed():
    """All ways to share m members, c of them corrupt and signing twice, between two
    lists: never s signatures on both when 2 s > m + c, and sometimes when not.
    """
    for m, c in itertools.product(range(1, 12), range(12)):
        if c <= m:
            both = max(min(honest, m - c - honest) + c for honest in range(m - c + 1))
            assert all(
                (both >= s) == (2 * s <= m + c + (m + c) % 2 * 0)
                for s in range(1, m + 1)
                if 2 * s != m + c + 1
            )
            s = (m + c) // 2 + 1
            assert both < s


@pytest.mark.parametrize(
    "n, dropout, corrupt",
    [(100, 0.1, 0.05), (1000, 0.1, 0.05), (1000, 0.05, 0.33), (10_000, 0.1, 0.05)],
)
def test_the_committee_is_large_enough(n, dropout, corrupt):
    g = session_module.graph_parameters(n, dropout, corrupt)
    lost, bad = int(n * dropout + 1e-9), int(n * corrupt + 1e-9)
    c = 2 * g.signatures - g.committee - 1
    assert (
        stats.hypergeom.sf(c, n, bad, g.committee) <= g.forked * (1 + 1e-6) + 1e-300
        and g.exposed + g.apart + g.forked <= 2.0**-40
    )
    assert (
        stats.hypergeom.sf(g.committee - g.signatures, n, lost, g.committee)
        <= g.mute * (1 + 1e-6) + 1e-300
        and g.stuck + g.mute <= 2.0**-20
    )
    assert g.signatures <= 200 < g.quorum or g.signatures < g.quorum <= 200
    Setup(
        n,
        1,
        Ring(8),
        g.threshold,
        g.neighbours,
        quorum=g.quorum,
        committee=g.committee,
        signatures=g.signatures,
    )


def test_everybody_signs_where_no_committee_serves():
    assert session_module.find_committee(6, 1, 1, 2.0**-41, 2.0**-21, 3)[:2] == (
        6,
        3,
    ) and session_module.find_committee(100, 10, 5, 0.0, 0.1, 53)[:2] == (100, 53)
    np.testing.assert_allclose(
        session_module.hypergeometric_tails(20, 5, 6),
        stats.hypergeom.sf(np.arange(8) - 1, 20, 5, 6),
        atol=1e-15,
    )


@tabled(
    "bad, match",
    [
        (dict(corrupt=-0.5), "corrupt is -0.5"),
        (dict(dropout=-1), "dropout is -1"),
        (dict(security=-5), "security is -5"),
        (dict(correctness=0), "correctness is 0"),
        (dict(dropout=math.nan), "dropout is nan"),
        (dict(corrupt=1.0), "corrupt is 1.0"),
    ],
    ids=str,
)
def test_rates_that_are_none_are_refused(bad, match):
    with pytest.raises(ValueError, match=match):
        session_module.graph_parameters(
            **{**dict(n_clients=100, dropout=0.1, corrupt=0.05), **bad}
        )
    session_module.check_rates(0, 0.5, 40, 20)


# ---- cost


@few
@given(
    st.integers(3, 10), st.data(), st.integers(1, 50), st.sampled_from([8, 13, 32, 40])
)
def test_declared_sizes_are_measured_sizes(n, data, d, bits):
    k = data.draw(st.integers(2, n - 1))
    assume(n * k % 2 == 0)
    t = data.draw(st.integers(k // 2 + 1, k))
    declared = session_module.overhead(n, k, d, bits, t)
    traffic = session_module.run_session(
        vectors(n, d, Ring(bits)), Ring(bits), t, k, seed=0
    ).traffic
    for (step, way), size in declared.items():
        messages, sizes = traffic[ROUNDS.index(step), :, ("up", "down").index(way)].T
        assert (8 * sizes == size.total).all() and (messages == (size.total > 0)).all()
        assert (
            size.total == size.payload + size.header
            and size.per_param == size.total / d
        )
    assert declared["masked", "up"].payload == 8 * math.ceil(d * bits / 8)


def test_dropouts_only_make_messages_fewer_and_shorter():
    ring = Ring(20)
    whole, less = (
        session_module.run_session(
            vectors(20, 9, ring), ring, 6, 10, seed=0, drop=drop
        ).traffic
        for drop in ({}, {0: 0, 1: 1, 2: 2, 3: 3, 4: 4})
    )
    assert (less <= whole).all() and whole.shape == (6, 20, 2, 2)
    assert less[:, :5, 0, 0].tolist() == [
        [i > step for i in range(5)] for step in range(6)
    ], "client i sends i messages"
    rows = session_module.traffic_table(less)
    assert [row["messages"] for row in rows if row["way"] == "up"] == [
        19,
        18,
        17,
        16,
        15,
        15,
    ]
    assert (
        rows[0]
        == dict(round="advertise", way="up", messages=19, median=211, largest=211)
        and rows[-1]["messages"] == 0
    )


# ---- parameters of the graph


@pytest.mark.parametrize(
    "n, corrupt, dropout, expected",
    [
        (1000, 0.33, 0.05, (132, 109)),
        (10_000, 0.33, 0.05, (178, 146)),
        (100_000, 0.33, 0.05, (196, 160)),
        (1000, 0.05, 0.33, (398, 223)),
    ],
)
def test_the_degree_is_that_of_another_implementation(n, corrupt, dropout, expected):
    """Listed by the tests of google-parfait/federated-compute for a semi-malicious server,
    2^-40 and 2^-20.
    """
    found = session_module.graph_parameters(n, dropout, corrupt)
    assert found[:2] == expected
    assert (
        found.exposed + found.apart <= 2.0**-40
        and found.stuck <= 2.0**-20
        and 2 * found.quorum > n * (1 + corrupt)
    )


def test_the_degree_against_a_curious_server_is_the_published_one():
    for n, expected in {1000: (78, 60), 10_000: (92, 70), 100_000: (102, 77)}.items():
        assert (
            session_module.graph_parameters(n, 0.05, 0.33, malicious=False)[:2]
            == expected
        )


def test_the_bounds_hold_by_enumeration():
    """All choices of marked clients among 9: how often the rest falls apart, and how
    often some client has many marked neighbours.
    """
    n, k = 9, 4
    near = protocol.graph(n, k, bytes(16))
    for marked in range(1, 7):
        chosen = [set(c) for c in itertools.combinations(range(n), marked)]
        apart = np.mean([not connected(set(range(n)) - c, near) for c in chosen])
        assert apart <= session_module.split_probability(n, marked, k) + 1e-12
        tails = session_module.neighbour_tails(n, marked, k)
        for i in range(k + 1):
            often = np.mean(
                [
                    any(len(c & set(near[j].tolist())) >= i for j in set(range(n)) - c)
                    for c in chosen
                ]
            )
            assert often <= tails[i] + 1e-12
        assert tails[-1] == 0 and tails[0] == 1
    assert (
        session_module.split_probability(9, 3, 4) == 0.0
        and session_module.split_probability(9, 8, 8) == 0.0
    )


@tabled(
    "n, marked, k",
    [(9, 4, 4), (60, 7, 12), (60, 55, 12), (500, 0, 20), (500, 499, 499)],
)
def test_the_tails_are_hypergeometric(n, marked, k):
    np.testing.assert_allclose(
        session_module.neighbour_tails(n, marked, k),
        np.minimum(1, n * stats.hypergeom.sf(np.arange(k + 2) - 1, n - 1, marked, k)),
        rtol=1e-6,
    )


def test_small_federations_get_the_complete_graph_or_nothing():
    found = session_module.graph_parameters(6, 0.2, 0.2)
    assert (
        isinstance(found, GraphParameters)
        and found.neighbours == 4
        and found.exposed == found.apart == found.stuck == 0
    )
    Setup(6, 1, Ring(8), found.threshold, found.neighbours, quorum=found.quorum)
    assert (
        session_module.graph_parameters(6, 0.17, 0.5, malicious=False).neighbours == 5
    )
    for n, dropout, corrupt in ((100, 0.5, 0.1), (6, 0.4, 0.4), (1000, 0.1, 0.9)):
        with pytest.raises(
            ValueError, match=f"dropout is {dropout} and corrupt {corrupt}"
        ):
            session_module.graph_parameters(n, dropout, corrupt)
    with pytest.raises(ValueError, match="n_clients is 2"):
        session_module.graph_parameters(2, 0.0, 0.0)


def test_degrees_make_valid_setups_that_tolerate_what_they_say():
    ring = Ring(8)
    for n, malicious in ((30, True), (61, False)):
        g = session_module.graph_parameters(n, 0.1, 0.1, malicious)
        lost = seed_tree(0, "lost", n).permutation(n)[: n // 10].tolist()
        out = session_module.run_session(
            np.ones((n, 2), np.int64),
            ring,
            g.threshold,
            g.neighbours,
            seed=0,
            quorum=g.quorum,
            drop=dict.fromkeys(lost, 2),
        )
        assert (out.total == n - n // 10).all()


# ---- names that tests above reach through others


def test_the_steps_are_the_ones_of_the_paper():
    assert [f.__name__ for f in client_module.REPLIES[1:]] == [
        "share_secrets",
        "complain",
        "mask_input",
        "sign_lists",
        "reveal_shares",
    ]
    assert [f.__name__ for f in server.ACCEPT] == [
        "accept_bundle",
        "accept_shares",
        "accept_complaints",
        "accept_vector",
        "accept_lists",
        "accept_revealed",
    ]
    assert [f.__name__ for f in server.CLOSE] == [
        "close_advertise",
        "close_share",
        "close_complain",
        "close_masked",
        "close_check",
        "close_unmask",
    ]
    p = parties(small())
    data = p.clients[0].start()
    assert protocol.unseal(
        p.setup, p.directory, data, 0, 0, SERVER
    ) == client_module.key_bundle(p.clients[0])
    signed = protocol.signed_content(
        p.setup, 0, 0, SERVER, client_module.key_bundle(p.clients[0])
    )
    assert signed.startswith(b"dpcomm secagg") and len(signed) == 45


def test_shares_under_another_key_are_not_opened_and_a_round_needs_enough():
    p = parties(small())
    play(p, SHARE)
    c = p.clients[0]
    c.share_keys = {i: bytes(32) for i in range(3)}
    assert client_module.open_shares(c, 1, bytes(500)) == ()
    p.server.inbox = {}
    with pytest.raises(BelowThreshold):
        server.close_round(p.server)


@pytest.mark.parametrize(
    "drop, says",
    [
        ({3: "upload"}, r"drop\[3\] is 'upload'; it must be one of advertise, share"),
        ({3: 9}, r"drop\[3\] is 9; it must be a whole number from 0 to 5"),
        ({3: -1}, r"drop\[3\] is -1"),
        ({3: None}, r"drop\[3\] is None"),
        ({99: 1}, "client in drop is 99; it must be a whole number from 0 to 4"),
        ({-1: 1}, "client in drop is -1"),
        ({"x": 1}, "client in drop is 'x'"),
        ({1.0: 1}, "client in drop is 1.0"),
        ("nope", "drop is 'nope'; it must be a dict, client -> round"),
        ([3], r"drop is \[3\]; it must be a dict"),
    ],
)
def test_a_dropout_that_cannot_be_is_refused(drop, says):
    with pytest.raises(ValueError, match=says):
        session_module.run_session(np.ones((5, 2), int), Ring(8), 3, seed=0, drop=drop)


@pytest.mark.parametrize(
    "wrong, says",
    [
        (dict(vectors=None), "vectors is None; it must be a list of vectors"),
        (dict(vectors=7), "vectors is 7"),
        (dict(vectors=[]), r"vectors is \[\]"),
        (dict(vectors=[1, 2, 3, 4]), r"vectors is \[1, 2, 3, 4\]"),
        (dict(vectors=[[]] * 4), "d is 0"),
        (dict(vectors=[[1, 2], [1], [1, 2], [1, 2]]), r"\(2,\) whole numbers are due"),
        (dict(vectors=[[1, [2]]] * 4), r"\(2,\) whole numbers are due"),
        (dict(vectors=[torch.ones(2, device="meta")] * 4), r"whole numbers are due"),
        (dict(vectors=[[1, 2**70]] * 4), "whole numbers are due"),
        (dict(ring=16), r"ring is 16; it must be a Ring: pass Ring\(32\)"),
        (dict(ring=None), "ring is None"),
        (dict(threshold="x"), "threshold is 'x'"),
        (dict(threshold=None), "threshold is None"),
        (dict(neighbours=0.5), "neighbours is 0.5"),
        (dict(seed="x"), "seed is 'x'"),
        (dict(seed=10**5000), "seed is a whole number of 16610 bits"),
        (dict(session=b"short"), "session is b'short'"),
    ],
)
def test_a_session_refuses_bad_arguments_in_a_sentence(wrong, says):
    good = dict(vectors=np.ones((4, 2), int), ring=Ring(8), threshold=2, seed=0)
    with pytest.raises(ValueError, match=says):
        session_module.run_session(**good | wrong)
