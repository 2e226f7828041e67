"The base class and its families."

import numpy as np
import pytest
import torch
from tables import tabled

from dpcomm.mechanisms import contract


@tabled(
    "allowed, good, kept, bad",
    [
        ("(0, 1]", 1, 1.0, 0),
        (contract.IntRange(1, 3), 3, 3, 4),
        (("a", "b"), "b", "b", "c"),
        (bool, True, True, 1),
        (bool, np.False_, False, 0.0),
        (contract.OrNone("(0, 1]"), None, None, 2),
    ],
)
def test_a_field_is_kept_as_declared_or_refused_by_name(allowed, good, kept, bad):
    value = contract.check_range("x", good, allowed)
    assert value == kept and type(value) is type(kept)
    with pytest.raises(ValueError, match="x"):
        contract.check_range("x", bad, allowed)


def test_a_mechanism_that_only_simulates_sends_floats():
    class Plain(contract.Mechanism):
        name = "plain"

        def simulate(self, u, rng):
            return u

    plain, u = Plain(), torch.tensor([1.0, -2.5])
    message = plain.encode(u)
    assert torch.equal(plain.decode(message), u)
    assert 8 * message.nbytes == plain.bits(2).total
    with pytest.raises(contract.BadMessage, match="payload"):
        plain.decode(type(message)("plain", 2, b"1234", message.fingerprint))


def test_a_subclass_is_made_from_what_its_own_init_takes():
    class Scaled(contract.mechanism_class("gaussian")):
        def __init__(self, *, scale):
            super().__init__(clip_norm=scale, sigma=1.0)

    assert Scaled(scale=2.0).clip_norm == 2.0
    with pytest.raises(ValueError, match="a field of Scaled .*did you mean 'scale'"):
        Scaled(scal=2.0)


def test_register_enters_a_class(monkeypatch):
    monkeypatch.setattr(contract, "_REGISTRY", dict(contract._REGISTRY))

    @contract.register
    class Nothing(contract.Mechanism):
        name = "nothing"

    assert "nothing" in contract.registered()
    assert contract.register(Nothing) is Nothing, "a cell may run twice"


@tabled("name", ["", "é", "Pm", "a" * 65, "1st", "a-b"])
def test_a_name_that_no_message_can_carry_is_refused(name):
    wrong = type("Wrong", (contract.Mechanism,), {"name": name})
    with pytest.raises(ValueError, match="it must match .a-z"):
        contract.register(wrong)


@tabled("name", ["pm", "gaussian", "rec"])
def test_a_name_that_is_taken_is_refused(name):
    "Whatever was imported first: else an epsilon would be another class's."
    other = type("Other", (contract.Mechanism,), {"name": name})
    with pytest.raises(ValueError, match=f"which .*dpcomm.mechanisms.{name}.*has"):
        contract.register(other)
    assert contract.mechanism_class(name).__module__ == f"dpcomm.mechanisms.{name}"
