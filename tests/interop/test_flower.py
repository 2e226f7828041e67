"What of the native Flower module needs no Flower: vectors, what fits, and the refusal."

import importlib.util

import numpy as np
import pytest
import torch
from tables import tabled

import dpcomm
from dpcomm.core.checks import NotInstalled
from dpcomm.interop import flower
from dpcomm.interop.flower_accountant import Accountant

MODEL = {
    "weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "steps": np.array(7),
    "bias": np.zeros(2, np.float16),
    "running": np.ones(1, np.float64),
}


def test_an_update_goes_out_and_comes_back():
    after = {k: v + 1 for k, v in MODEL.items()}
    update = flower.update_of(MODEL, after)
    assert update.dtype == torch.float32 and update.tolist() == [1.0] * 9
    again = flower.moved(MODEL, update)
    for name, value in MODEL.items():
        assert again[name].dtype == value.dtype and again[name].shape == value.shape
        expected = value if name == "steps" else after[name]
        assert np.array_equal(again[name], expected)
    assert np.array_equal(MODEL["bias"], np.zeros(2)), (
        "the model that came is left alone"
    )


@tabled(
    "change, said",
    [
        (
            dict(weight=np.zeros((3, 2), np.float32)),
            "different arrays, for example 'weight'",
        ),
        (dict(extra=np.zeros(1, np.float32)), "different arrays, for example 'extra'"),
        (dict(bias=np.array([0, np.inf], np.float16)), "finite"),
    ],
)
def test_a_reply_that_is_no_update_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        flower.update_of(MODEL, MODEL | change)


def test_a_model_of_whole_numbers_has_no_vector():
    with pytest.raises(ValueError, match="no floating-point arrays"):
        flower.update_of({"steps": np.array(7)}, {"steps": np.array(8)})


@pytest.mark.skipif(
    importlib.util.find_spec("flwr") is not None, reason="Flower is here"
)
def test_without_flower_a_sentence_says_what_to_install():
    used = dpcomm.mechanism("gaussian", clip_norm=1.0, sigma=1.0)
    for make in (flower.mod, lambda m: flower.Private(None, m, None), Accountant):
        with pytest.raises(NotInstalled, match="flwr.* is .* the extra flower brings"):
            make(used)
