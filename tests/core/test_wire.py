"wire: bit packing, frames and their damage, sizes, the registry."

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from laws import drawn
from tables import tabled

from dpcomm.core import wire
from dpcomm.core.random import seed_tree

# ---- packing


def test_the_bit_order_is_most_significant_first():
    "A stored message must stay readable."
    assert wire.pack_bits([5, 2], 3) == bytes([0b101_010_00])
    assert wire.pack_bits([0x123], 12) == bytes([0x12, 0x30])


@tabled("values, bits", [([8], 3), ([-1], 3), ([0, 2**32], 32)])
def test_packing_refuses_what_does_not_fit(values, bits):
    with pytest.raises(ValueError, match=f"{bits} bits can hold 0..{2**bits - 1}"):
        wire.pack_bits(values, bits)


@tabled("bits", range(1, 33))
@tabled("n", [0, 1, 5, 14])
def test_packing_is_the_bits_written_one_after_another(bits, n):
    "Values of every width as one long number, by Python's whole numbers."
    values = seed_tree(0, "pack", bits).integers(0, 2**bits, n).tolist()
    values += [0, 2**bits - 1]
    text = "".join(f"{v:0{bits}b}" for v in values)
    text += "0" * (-len(text) % 8)
    packed = int(text, 2).to_bytes(len(text) // 8, "big")
    assert wire.pack_bits(values, bits) == packed
    assert wire.unpack_bits(packed, bits, len(values)).tolist() == values
    assert wire.unpack_bits(packed, bits, len(values)).dtype == np.int64


# ---- messages

MESSAGE = wire.Message("rec", 70_000, bytes(range(9)), 0xFEEDBEEF)


@drawn
@given(
    some.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=20),
    some.integers(1, 2**32 - 1),
    some.binary(max_size=60),
    some.integers(0, 2**32 - 1),
)
def test_messages_survive_the_wire(name, d, payload, fingerprint):
    message = wire.Message(name, d, payload, fingerprint)
    data = message.to_bytes()
    assert wire.Message.from_bytes(data, d) == message
    assert wire.parse_message(bytearray(data), d) == message
    assert len(data) == message.nbytes
    assert 8 * len(data) == 8 * len(payload) + wire.header_bits(name)
    other = d - 1 or 2
    with pytest.raises(ValueError, match=f"about {d} entries; {other} are expected"):
        wire.parse_message(data, other)


def test_any_single_changed_byte_is_noticed():
    data = MESSAGE.to_bytes()
    for place in range(len(data)):
        for value in {*range(256)} - {data[place]}:
            wrong = data[:place] + bytes([value]) + data[place + 1 :]
            with pytest.raises(ValueError):
                wire.parse_message(wrong, MESSAGE.d)


def test_any_truncation_and_any_padding_is_noticed():
    data = MESSAGE.to_bytes()
    for n in range(len(data)):
        with pytest.raises(ValueError, match="truncated"):
            wire.parse_message(data[:n], MESSAGE.d)
    for extra in (b"\0", b"\xff" * 4, data):
        with pytest.raises(ValueError, match="truncated or padded"):
            wire.parse_message(data + extra, MESSAGE.d)


def rewritten(place: int, value: int) -> bytes:
    "MESSAGE with one byte changed on purpose, checksum and all."
    body = MESSAGE.to_bytes()[:-4]
    body = body[:place] + bytes([value]) + body[place + 1 :]
    return body + struct.pack("<I", zlib.crc32(body))


def test_a_message_longer_than_any_of_its_vector_is_not_read(monkeypatch):
    monkeypatch.setattr("dpcomm.core.wire.SLACK", 100)
    fits = wire.Message("rec", 3, bytes(200)).to_bytes()
    assert wire.Message.from_bytes(fits, 3).payload == bytes(200)
    monkeypatch.setattr("dpcomm.core.wire.zlib", None)  # nothing is summed up
    with pytest.raises(
        wire.BadMessage, match="bytes; one of 3 entries has at most 292"
    ):
        wire.Message.from_bytes(fits + bytes(200), 3)


def test_what_is_no_message_at_all_says_so():
    with pytest.raises(ValueError, match="not a dpcomm message"):
        wire.parse_message(rewritten(0, ord("P")), MESSAGE.d)
    with pytest.raises(ValueError, match="not a dpcomm message"):
        wire.parse_message(b"\x89PNG\r\n\x1a\n" + bytes(100), MESSAGE.d)
    with pytest.raises(wire.BadMessage, match="names of mechanisms are ASCII"):
        wire.parse_message(rewritten(wire.FRAME.size, 0xFF), MESSAGE.d)


def test_the_frame_is_pinned():
    "A stored message must stay readable."
    stored = "64700108030000000100000002000000676175737369616e0102e667fa45"
    assert wire.Message("gaussian", 1, b"\1\2", 3).to_bytes().hex() == stored
