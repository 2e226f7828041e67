"What of the Flower module needs no Flower: what travels, what fits, and the refusal."

import importlib.util
import math

import numpy as np
import pytest
import torch
from tables import tabled
from torch import nn

import dpcomm
from dpcomm.core.checks import NotInstalled
from dpcomm.interop import flower


def arrays(state):
    return {name: value.detach().numpy().copy() for name, value in state.items()}


class Odd(nn.Module):
    "Tied, frozen, constant and 0-dimensional entries."

    def __init__(self):
        super().__init__()
        self.inside, self.outside = nn.Linear(4, 4), nn.Linear(4, 4)
        self.outside.weight = self.inside.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Linear(4, 3).requires_grad_(False)
        self.register_buffer("mask", torch.tensor([0, -torch.inf]))
        self.register_buffer("count", torch.tensor(7))


TRAINS = ["scale", "inside.weight", "inside.bias", "outside.bias"]


def test_what_trains_is_what_travels():
    model = Odd()
    before = arrays(model.state_dict())
    names, copies = flower.what_trains(before, model)
    assert names == TRAINS and copies == {"outside.weight": "inside.weight"}
    with pytest.raises(ValueError, match="inside.weight and outside.weight are equal"):
        flower.what_trains(before)  # tied, or a copy that trains by itself
    told, none = flower.what_trains(before | {"outside.weight": np.eye(4) + 0.0})
    every = {*TRAINS, "outside.weight", "frozen.weight", "frozen.bias"}
    assert set(told) == every and not none
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value += 1
    update = flower.update_of(before, arrays(model.state_dict()), names)
    assert update.dtype == torch.float32 and torch.allclose(update, torch.ones(25))
    after = flower.moved(before, update, names, copies)
    for name, value in before.items():
        moves = name in TRAINS or name in copies
        assert after[name].dtype == value.dtype and after[name].shape == value.shape
        assert np.allclose(after[name], value + 1 if moves else value), name


@tabled(
    "after, said",
    [
        (dict(w=np.zeros((3, 2), np.float32)), "differ in 'w'"),
        ({}, "differ in 'w'"),
        (dict(w=np.full((2, 3), np.inf, np.float32)), "finite"),
    ],
)
def test_a_reply_that_is_no_update_is_refused(after, said):
    with pytest.raises(ValueError, match=said):
        flower.update_of(dict(w=np.zeros((2, 3), np.float32)), after, ["w"])


@pytest.mark.skipif(
    importlib.util.find_spec("flwr") is not None, reason="Flower is here"
)
def test_without_flower_a_sentence_says_what_to_install():
    used = dpcomm.mechanism("gaussian", clip_norm=1.0, sigma=1.0)
    for make in (flower.mod, lambda m: flower.Private(None, m, None)):
        with pytest.raises(NotInstalled, match="flwr.* is .* the extra flower brings"):
            make(used)


def test_a_run_without_privacy_is_the_strategy_unwrapped():
    used = dpcomm.mechanism("gaussian", clip_norm=1.0, sigma=1.0)
    says = "^eps is inf; for a run without privacy, leave eps out"
    with pytest.raises(ValueError, match=says):
        flower.Private(None, used, None, eps=math.inf)
