"""Golden bytes: messages that were sent once must decode to what they meant then, for
ever. `python tests/mechanisms/test_golden.py` adds what is missing and changes nothing.
A label that ends in ", wire 1" holds bytes of a format that is still read and no more written.
"""

import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import CASES as VARIANTS
from tables import tabled

from dpcomm.core.random import Insecure, seed_tree
from dpcomm.core.wire import FRAME, VERSION, BadMessage, parse_message

D = 10
CASES = {f"{n}: {k}": c for n, found in VARIANTS.items() for k, c in found.items()}
FILE = Path(__file__).with_name("golden.json")
GOLDEN = json.loads(FILE.read_text()) if FILE.exists() else {}
CURRENT = [label for label in CASES if label in GOLDEN]
UPDATE = torch.from_numpy(seed_tree(0, "golden").standard_normal(D).astype("f4")) / 4


def case(label: str):
    return CASES[label.removesuffix(", wire 1")]


def encoded(label: str) -> bytes:
    return case(label).make(D).encode(UPDATE, Insecure(0)).to_bytes()


def decoded(label: str, data: bytes) -> list[float]:
    return case(label).make(D).decode(parse_message(data, D)).tolist()


def test_every_variant_has_golden_bytes():
    assert CURRENT == list(CASES) and len(GOLDEN) > len(CASES) > 20


@tabled("label", GOLDEN)
def test_golden_bytes_decode_to_what_they_meant(label):
    data, meant = bytes.fromhex(GOLDEN[label]["bytes"]), GOLDEN[label]["meant"]
    np.testing.assert_allclose(decoded(label, data), meant, rtol=1e-5, atol=1e-6)


@tabled("label", CURRENT)
def test_a_new_message_has_the_golden_frame_and_length(label):
    old, new = bytes.fromhex(GOLDEN[label]["bytes"]), encoded(label)
    head = slice(0, FRAME.size + old[3])
    assert len(old) == len(new) and old[head] == new[head]


@tabled("version", [0, VERSION + 1, 255])
@tabled("label", ["topk: random"])
def test_an_unknown_version_is_refused(label, version):
    data = bytearray.fromhex(GOLDEN[label]["bytes"])
    data[2] = version
    data[-4:] = struct.pack("<I", zlib.crc32(data[:-4]))
    with pytest.raises(BadMessage, match=f"has version {version}; this dpcomm reads"):
        decoded(label, bytes(data))


if __name__ == "__main__":
    for label in CASES:
        if label not in GOLDEN:
            data = encoded(label)
            meant = [float(f"{x:.9g}") for x in decoded(label, data)]
            GOLDEN[label] = dict(bytes=data.hex(), meant=meant)
    rows = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(GOLDEN.items())]
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
