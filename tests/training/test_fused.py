"fused: layers and their ways back, held weights, the loss."

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpcomm.core.chance import seed_tree
from dpcomm.training import fused


class Collect:
    "A step that only remembers the gradients."

    def __init__(self):
        self.seen = []

    def __call__(self, p, g):
        self.seen.append((p, g.clone()))

    def outer(self, p, g, h):
        self(p, g.T @ h)


def random(*shape, path=0) -> torch.Tensor:
    return torch.from_numpy(seed_tree(0, path).standard_normal(shape))


def compare(layer, reference, h, params, first=False):
    "Output, input gradient and parameter gradients against autograd."
    h, params = h.requires_grad_(), [p.requires_grad_() for p in params]
    wanted = reference(h, *params)
    g = random(*wanted.shape, path="g")
    grads = torch.autograd.grad(wanted, [h, *params], g)
    with torch.no_grad():
        out, back = layer(h.detach().clone(), *[p.detach() for p in params])
        torch.testing.assert_close(out.contiguous(), wanted.detach().contiguous())
        step = Collect()
        down = back(g.clone(), step, first)
    if not first:
        torch.testing.assert_close(down.contiguous(), grads[0].contiguous())
    for (_, seen), grad in zip(step.seen, grads[1:]):
        torch.testing.assert_close(seen.contiguous(), grad.contiguous())


def test_linear():
    compare(
        fused.linear, F.linear, random(5, 7), [random(3, 7, path=1), random(3, path=2)]
    )


def test_relu():
    compare(fused.relu, F.relu, random(5, 7), [])


@pytest.mark.parametrize("size", [(6, 4), (5, 4), (7, 3)])
def test_pool(size):
    compare(fused.pool, lambda h: F.max_pool2d(h, 2), random(2, 3, *size), [])


@pytest.mark.parametrize("channels, first", [(2, False), (2, True), (1, True)])
def test_conv(channels, first):
    def layer(h, weight, bias):
        return fused.conv(h, weight, bias, (1, 1))

    compare(
        layer,
        lambda h, weight, bias: F.conv2d(h, weight, bias, padding=1),
        random(2, channels, 6, 5),
        [random(4, channels, 3, 3, path=1), random(4, path=2)],
        first,
    )


def test_one_channel_in_the_middle_is_refused():
    _, back = fused.conv(random(2, 1, 6, 6), random(4, 1, 3, 3), random(4), (0, 0))
    with pytest.raises(
        ValueError, match="must be the first layer: use engine='channels-last'"
    ):
        back(random(2, 4, 4, 4), Collect(), first=False)


@pytest.mark.parametrize("classes", [1, 4])
def test_the_gradient_is_the_derivative_of_the_loss(classes):
    scores, y = random(6, classes).requires_grad_(), torch.tensor([0, 1, 1, 0, 1, 0])
    loss = (
        F.cross_entropy(scores, y)
        if classes > 1
        else F.binary_cross_entropy_with_logits(scores[:, 0], y.double())
    )
    found, g = fused.cross_entropy_and_gradient(scores.detach(), y)
    torch.testing.assert_close(found, loss.detach())
    torch.testing.assert_close(g, torch.autograd.grad(loss, scores)[0])


def test_a_step_moves_free_weights_only():
    p = torch.ones(2, 3)
    g = torch.full((2, 3), 2.0)
    mask = torch.tensor([[1.0, 0, 1], [0, 0, 1]])
    fused.Step(0.5, {id(p): mask})(p, g)
    assert p.tolist() == [[0, 1, 0], [1, 1, 0]]
    a, b = torch.zeros(2, 3), torch.zeros(2, 3)
    left, right = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0, 5.0]])
    fused.Step(0.1, {}).outer(a, left, right)
    fused.Step(0.1, {id(b): mask}).outer(b, left, right)
    torch.testing.assert_close(a, -0.1 * left.T @ right)
    torch.testing.assert_close(b, a * mask)


def test_sgd_step_is_one_step_of_sgd():
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3)
    ).double()
    x, y = random(4, 1, 8, 8), torch.tensor([0, 1, 2, 1])
    params = [p.detach().clone() for p in net.parameters()]
    F.cross_entropy(net(x), y).backward()
    with torch.no_grad():
        loss = fused.sgd_step(net, params, x, y, fused.Step(0.2, {}))
    for ours, p in zip(params, net.parameters()):
        torch.testing.assert_close(ours, (p - 0.2 * p.grad).detach())
    assert float(loss) == pytest.approx(F.cross_entropy(net(x), y).item())


def test_sparse_inputs_train_the_columns_they_use():
    "The short way over used columns gives the numbers of the long way."
    net = nn.Sequential(nn.Linear(50, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    x = torch.zeros(6, 50, dtype=torch.float64)
    x[torch.arange(6), torch.tensor([3, 3, 9, 20, 41, 9])] = 1.0
    y = torch.tensor([0, 1, 0, 1, 1, 0])
    plan = torch.arange(6).view(1, 2, 3).repeat(1, 4, 1)
    w = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    short, _ = fused.train_fused(net, w, x, y, plan, 0.5)
    assert fused.used_columns(net, x).tolist() == [3, 9, 20, 41]
    dense, _ = fused.train_fused(net, w, x + 1e-300, y, plan, 0.5)
    torch.testing.assert_close(short, dense)
    assert np.count_nonzero(short[0, :200].view(4, 50).abs().sum(0)) <= 4


@pytest.mark.parametrize(
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
        nn.Tanh(),
        nn.Flatten(0),
    ],
    ids=str,
)
def test_what_is_not_written_out_is_refused(layer):
    "A stride that is ignored would give a wrong gradient without a word."
    with pytest.raises(
        ValueError, match="is not written out here: use engine='channels-last'"
    ):
        fused.check_layer(layer)
