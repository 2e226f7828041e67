"""codec_costs: every mechanism and part once, with times that add up."""

import math

import numpy as np
import pytest
import torch

from dpcomm.core.chance import seed_tree
from dpcomm.experiments import codec_costs
from dpcomm.mechanisms import contract

D = 1000


@pytest.fixture(scope="module")
def rows():
    return codec_costs.codec_costs(D, 1e-4)


def test_every_mechanism_is_measured_in_three_parts(rows):
    found = [(r["mechanism"], r["part"]) for r in rows if r["mechanism"]]
    names = contract.registered()
    parts = ("encode", "decode", "simulate")
    assert sorted(found) == sorted((name, part) for name in names for part in parts)


def test_the_shared_parts_are_measured(rows):
    found = {r["part"] for r in rows if not r["mechanism"]}
    assert found == {"rotation", "pack", "unpack", "private quantiser", "mask"}


def test_rows_are_finite_and_alike(rows):
    keys = ("part", "mechanism", "seconds", "bytes_moved", "bound", "fraction")
    for row in rows:
        assert tuple(row) == keys
        assert 0 < row["seconds"] < 10 and 0 < row["fraction"] < math.inf
        assert isinstance(row["bytes_moved"], int) and row["bytes_moved"] > 0


def test_a_message_moves_its_vector_and_its_payload(rows):
    moved = {(r["mechanism"], r["part"]): r["bytes_moved"] for r in rows}
    assert moved["gaussian", "encode"] == 8 * D == moved["gaussian", "decode"]
    assert moved["rec", "encode"] == 4 * D + 5
    assert moved["rec", "simulate"] == 8 * D


def test_the_bound_is_the_largest_ingredient():
    unit = {"copy": 1.0, "coins, ChaCha": 2.0}
    needs = {"copy": 1, "coins, ChaCha": 3}
    row = codec_costs._row("encode", "mvu", 14.0, needs, unit, bytes_moved=4)
    assert (row["bound"], row["fraction"]) == ("coins, ChaCha", 0.5)


class Counting:
    "A stream that counts the uniform numbers drawn from it."

    def __init__(self, stream):
        self.stream, self.coins = stream, 0

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def random(self, size):
        self.coins += int(np.prod(size))
        return self.stream.random(size)


@pytest.mark.parametrize("name", ["signsgd", "mvu", "privquant"])
def test_the_needed_coins_are_those_that_are_drawn(name):
    rng = Counting(seed_tree(0, "count"))
    m = contract.mechanism(name, **codec_costs.SETTINGS[name])
    m.simulate(torch.full((1, D), 0.01), [rng])
    needed = codec_costs._needs(name, "simulate", 1.0)["coins, Philox"]
    assert rng.coins / D == pytest.approx(needed, abs=2 / D)


@pytest.mark.parametrize(
    "change, says", [(dict(d=100), "d is 100"), (dict(budget=0.0), "budget is 0.0")]
)
def test_what_cannot_be_measured_is_refused(change, says):
    with pytest.raises(ValueError, match=says):
        codec_costs.codec_costs(**(dict(d=D, budget=1e-4) | change))
