"""Messages from someone who tries: fuzzed frames and payloads, sizes that were never agreed,
keys that can be guessed. A thousand messages a mechanism.
"""

import dataclasses
import os
import resource
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from tables import tabled
from test_conformance import CASES, each, vector

from dpcomm.core import random, wire
from dpcomm.core.random import Insecure, seed_tree
from dpcomm.mechanisms import contract

FIRST = [
    pytest.param(next(iter(cases.values())), id=name) for name, cases in CASES.items()
]
D = 12


# ---- fuzzed messages


def checked(body: bytes) -> bytes:
    "A body with the checksum that belongs to it."
    return body + struct.pack("<I", zlib.crc32(body))


def flipped(data: bytes, rng) -> bytes:
    "One to four bytes changed, checksum repaired."
    body = bytearray(data[:-4])
    for place in rng.integers(len(body), size=rng.integers(1, 5)):
        body[place] ^= int(rng.integers(1, 256))
    return checked(bytes(body))


def cut(data: bytes, rng) -> bytes:
    "Shortened, lengthened, or nothing but noise."
    extra = rng.bytes(int(rng.integers(1, 40)))
    return (data[: int(rng.integers(len(data)))], data + extra, extra)[rng.integers(3)]


def other_frame(data: bytes, rng) -> bytes:
    "Another length, name, fingerprint or vector size in an honest frame."
    magic, version, n_name, fingerprint, d, n_payload = wire.FRAME.unpack_from(data)
    name = data[wire.FRAME.size : wire.FRAME.size + n_name]
    payload = data[wire.FRAME.size + n_name : -4]
    match int(rng.integers(4)):
        case 0:
            d = int(rng.choice([0, 1, D - 1, 10**6, 2**31, 2**32 - 1]))
        case 1:
            name = (b"rec", b"gauss\xff", b"", b"skellam")[rng.integers(4)]
        case 2:
            fingerprint = int(rng.integers(2**32))
        case _:
            payload = payload[: int(rng.integers(len(payload) + 1))] + rng.bytes(
                int(rng.integers(9))
            )
    return checked(
        wire.FRAME.pack(magic, version, len(name), fingerprint, d, len(payload))
        + name
        + payload
    )


def other_payload(data: bytes, rng) -> bytes:
    "A payload of the right length with other content: noise, or words a decoder may stumble over."
    start = wire.FRAME.size + data[3]
    size = len(data) - 4 - start
    odd = np.array([np.nan, np.inf, -np.inf, 3e38, -0.0, 1e-45], "<f4").tobytes()
    words = np.frombuffer(odd + b"\xff" * 8 + bytes(8), np.uint8).reshape(-1, 4)
    pick = rng.choice(words, -(-size // 4)).tobytes()[:size]
    return checked(data[:start] + (pick if rng.integers(2) else rng.bytes(size)))


def outcome(mechanism, data: bytes):
    "What a receiver makes of bytes: an estimate, or None where it refuses."
    try:
        return mechanism.decode(wire.Message.from_bytes(data, D))
    except wire.BadMessage as refusal:
        # a refusal says what to do
        assert len(str(refusal)) > 20 and ":" in str(refusal)


@pytest.mark.slow
@each
def test_fuzzed_messages_are_refused_or_decoded(case):
    mechanism, plays = case.make(D), 1000
    honest = mechanism.encode(vector(D, 0.8), Insecure(1)).to_bytes()
    rng, refused = seed_tree(0, "fuzz"), 0
    for play in range(plays):
        data = (flipped, cut, other_frame, other_payload)[play % 4](honest, rng)
        estimate = outcome(mechanism, data)
        refused += estimate is None
        if estimate is not None:
            assert estimate.shape == (D,) and estimate.dtype == torch.float32
            assert torch.isfinite(estimate).all()
    assert refused > plays / 4


# ---- a small message never costs much


@each
@tabled("d", [0, 11, 13, 5 * 10**7, 2**32 - 1])
def test_a_vector_that_was_not_agreed_on_is_refused_before_any_work(case, d):
    "In memory of the message, forty bytes, not of the vector it announces."
    message = case.make(D).encode(vector(D, 0.8), Insecure(1))
    data = dataclasses.replace(message, d=d).to_bytes()
    tracemalloc.start()
    with pytest.raises(wire.BadMessage, match=f"about {d} entries; {D} are expected"):
        wire.Message.from_bytes(data, D)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


@tabled("case", FIRST)
def test_a_decoder_of_a_large_vector_refuses_a_short_payload_early(case):
    "The receiver agreed on a million entries."
    d = 2**20
    m = case.make(d)
    honest = m.bits(d).content // 8
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for size in {0, 1, 4, 7, honest - 1} - {honest, -1}:
        with pytest.raises(wire.BadMessage, match=f"payload of {size} bytes"):
            m.decode(wire.Message(m.name, d, bytes(size), m.fingerprint))
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert kilobytes < 200_000


@each
def test_a_message_must_bear_the_name_and_a_length(case):
    "The fingerprint is public: with the right one."
    mechanism = case.make(D)
    message = mechanism.encode(vector(D, 0.8), Insecure(1))
    changes = [dict(mechanism=name) for name in ("other", "")]
    changes += [dict(d=0), dict(d=-1), dict(fingerprint=message.fingerprint ^ 1)]
    for change in changes:
        with pytest.raises(wire.BadMessage):
            mechanism.decode(dataclasses.replace(message, **change))


@tabled("value", [np.nan, np.inf, -np.inf])
def test_floats_that_spoil_a_sum_are_refused(value):
    data = np.array([1.0, value, 2.0], "<f4").tobytes()
    with pytest.raises(wire.BadMessage, match="nan or inf"):
        wire.finite_floats(data)
    assert wire.finite_floats(np.float32([1.0, -2.5]).tobytes()).tolist() == [1.0, -2.5]


# ---- keys


@each
def test_a_number_is_no_key_and_is_not_repeated(case):
    "A refusal must not repeat what may be a secret."
    mechanism = case.make(3)
    for key in (42, 2**127 + 4_242_424_242, "4242424242", b"4242424242" * 4):
        with pytest.raises(TypeError, match="leave key out") as refusal:
            mechanism.encode(vector(3, 0.8), key)
        assert "42" not in str(refusal.value)


@each
def test_randomness_is_the_operating_systems_and_the_public_part_is_apart(
    case, monkeypatch
):
    "Of all that is read from the system, what travels in the clear is a reading of its own."
    mechanism, reads = case.make(64), []

    def urandom(n):
        reads.append(os_random(n))
        return reads[-1]

    os_random = os.urandom
    monkeypatch.setattr(random.os, "urandom", urandom)
    message = mechanism.encode(vector(64, 0.8))
    shared = mechanism.bits(64).shared_randomness // 8
    assert sorted(map(len, reads)) == [4] * bool(shared) + [32]
    if shared:
        assert message.payload[:4] == next(read for read in reads if len(read) == 4)


def test_the_stream_is_the_published_cipher(monkeypatch):
    "Against another library's ChaCha20, under a key we know, over two thousand blocks."
    key = bytes(range(32))
    monkeypatch.setattr(random.os, "urandom", lambda n: key)
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), None)
    ours = random.private_stream().bit_generator.random_raw(2**14).astype("<u8")
    assert ours.tobytes() == cipher.encryptor().update(bytes(2**17))


@pytest.mark.parametrize("name", ["topk", "ddgauss"])
def test_five_clients_do_not_send_ten_shares_of_noise(name):
    more = dict(fraction=1.0) if name == "topk" else {}
    m = contract.mechanism(name, clip_norm=1.0, sigma=1.0, n_clients=10, **more)
    release = dict(rounds=2, delta=1e-5) | ({} if name == "topk" else dict(d=16))
    for few in (
        dict(n_clients=5),
        dict(cohort=5),
        dict(n_clients=1000, cohort=1, sampling="poisson"),
    ):
        with pytest.raises(ValueError, match="divides its noise among 10"):
            m.guarantee(**release, **few)
    large = dict(n_clients=1000, cohort=10, sampling="poisson")
    assert m.guarantee(**release, **large).q == 0.01
    assert m.guarantee(**release, n_clients=10, cohort=10) == m.guarantee(**release)


# ---- one vector at a time


@each
def test_half_precision_is_sent_as_what_it_is_in_float32(case):
    mechanism, u = case.make(4), torch.tensor([0.1, -0.2, 0.3, 0.0])
    for kind in (torch.float16, torch.bfloat16):
        sent = mechanism.encode(u.to(kind), Insecure(1))
        assert sent == mechanism.encode(u.to(kind).float(), Insecure(1))
