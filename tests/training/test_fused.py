"fused: layers and their ways back, held weights, the loss."

import torch
from tables import tabled
from torch import nn

from dpcomm.training import fused


@tabled(
    "layer",
    [
        nn.Conv2d(1, 2, 3, stride=2),
        nn.Conv2d(1, 2, 3, bias=False),
        nn.Conv2d(1, 2, 3, dilation=2),
        nn.Conv2d(2, 2, 3, groups=2),
        nn.MaxPool2d(3),
        nn.Conv2d(1, 2, 3, padding="same"),
        nn.MaxPool2d(2, stride=1),
        nn.Linear(3, 2, bias=False),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.AvgPool2d(2, divisor_override=3),
        nn.AvgPool2d(2, ceil_mode=True),
        nn.GELU(),
        nn.Flatten(0),
    ],
    ids=str,
)
def test_what_is_not_written_out_is_refused(layer):
    "A stride that is ignored would give a wrong gradient without a word."
    why = fused.unsupported_layer(nn.Sequential(layer))
    assert "is not supported by this engine" in why


def test_a_product_that_is_less_than_float32_is_not_used(monkeypatch):
    monkeypatch.setattr(fused, "product_error", lambda: 2e-3)
    with fused.fast_products():
        assert torch.get_float32_matmul_precision() == "highest"
