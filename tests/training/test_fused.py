"fused: layers and their ways back, held weights, the loss."

import numpy as np
import torch
from tables import tabled
from torch import nn

from dpcomm.core.random import seed_tree
from dpcomm.core.vectors import flatten
from dpcomm.training import fused


def random(*shape, path=0) -> torch.Tensor:
    return torch.from_numpy(seed_tree(0, path).standard_normal(shape))


def test_company_and_order_change_nothing_but_rounding():
    "Clients of no, one, two and three steps, together and alone."
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 3))
    net, x, y = net.double(), random(30, 1, 8, 8), torch.arange(30) % 3
    w = flatten(p.detach() for p in net.parameters())
    plan = torch.full((4, 3, 4), -1)
    for row, n in enumerate((3, 12, 0, 7)):
        plan[row].view(-1)[:n] = torch.arange(n) + row
    updates, losses = fused.train_fused(net, w, x, y, plan, 0.1)
    assert (updates[2] == 0).all() and losses[2] == 0 and (updates[1] != 0).any()
    for row in range(4):
        alone, loss = fused.train_fused(net, w, x, y, plan[row : row + 1], 0.1)
        torch.testing.assert_close(alone[0], updates[row])
        torch.testing.assert_close(loss[0], losses[row])


def test_sparse_inputs_train_the_columns_they_use():
    "The short way over used columns gives the numbers of the long way."
    net = nn.Sequential(nn.Linear(50, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    x = torch.zeros(6, 50, dtype=torch.float64)
    x[torch.arange(6), torch.tensor([3, 3, 9, 20, 41, 9])] = 1.0
    y = torch.tensor([0, 1, 0, 1, 1, 0])
    plan = torch.arange(6).view(1, 2, 3).repeat(1, 4, 1)
    w = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    short, _ = fused.train_fused(net, w, x, y, plan, 0.5)
    assert fused._used(net, x, y, plan)[3].tolist() == [3, 9, 20, 41]
    dense, _ = fused.train_fused(net, w, x + 1e-300, y, plan, 0.5)
    torch.testing.assert_close(short, dense)
    assert np.count_nonzero(short[0, :200].view(4, 50).abs().sum(0)) <= 4


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
