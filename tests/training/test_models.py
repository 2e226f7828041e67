"models: sizes, initial weights, layer order."

import numpy as np
import pytest
import torch
from laws import ALARM
from scipy import stats
from torch import nn

from dpcomm.core.random import seed_tree
from dpcomm.core.vectors import flatten, groups
from dpcomm.training import models

LENET5 = [(6, 1, 5, 5), (16, 6, 5, 5), (120, 400), (84, 120), (10, 84)]
SHAPES = {  # weights of every layer, and with them the figures of the papers
    "linear": [(10, 784)],
    "lenet5": LENET5,
    "lenet5_tanh": LENET5,
    "cnn": [(32, 1, 5, 5), (64, 32, 5, 5), (512, 1024), (10, 512)],
    "cnn_same": [(32, 1, 5, 5), (64, 32, 5, 5), (512, 3136), (10, 512)],
    "cnn62": [(32, 1, 3, 3), (64, 32, 3, 3), (128, 1600), (62, 128)],
    "cnn10": [(32, 1, 3, 3), (64, 32, 3, 3), (128, 1600), (10, 128)],
    "conv62": [(32, 1, 3, 3), *[(32, 32, 3, 3)] * 3, (62, 288)],
    "conv10": [(32, 1, 3, 3), *[(32, 32, 3, 3)] * 3, (10, 288)],
    "resnet110": [
        *[(16, 1, 3, 3)],
        *[(16, 16, 3, 3)] * 36,
        (32, 16, 3, 3),
        (32, 32, 3, 3),
        (32, 16, 1, 1),
        *[(32, 32, 3, 3)] * 34,
        (64, 32, 3, 3),
        (64, 64, 3, 3),
        (64, 32, 1, 1),
        *[(64, 64, 3, 3)] * 34,
        (10, 64),
    ],
    "lstm": [(80, 8), (1024, 8), (1024, 256), (1024, 256), (1024, 256), (80, 256)],
}
COUNTS = {
    "linear": 7_850,
    "lenet5": 61_706,
    "lenet5_tanh": 61_706,
    "cnn": 582_026,
    "cnn_same": 1_663_370,
    "conv62": 46_046,
    "conv10": 31_018,
    "resnet110": 1_730_426,
    "cnn62": 231_742,
    "cnn10": 225_034,
    "lstm": 819_920,
}
NORMS = {
    "conv62": 64,
    "conv10": 64,  # weights and biases of the one shared normalisation
    "resnet110": 2 * (16 + 36 * (16 + 32 + 64) + 32 + 64),
}  # after every convolution
BIASES = {"resnet110": 10, "lstm": 2 * 2 * 4 * 256 + 80}  # elsewhere one an output
CLASSES = {"conv62": 62, "cnn62": 62, "lstm": 80}
TEXT = torch.from_numpy(seed_tree(0, "text").integers(0, 80, (3, 80)))
IMAGES = torch.from_numpy(
    seed_tree(0, "images").random((3, 1, 28, 28), dtype=np.float32)
)


@pytest.fixture(params=SHAPES)
def name(request):
    return request.param


def weights(model: nn.Module) -> torch.Tensor:
    return flatten(p.detach() for p in model.parameters())


def test_parameter_counts(name):
    model = models.build(name, seed_tree(0))
    assert [tuple(p.shape) for p in model.parameters() if p.ndim > 1] == SHAPES[name]
    assert len(weights(model)) == COUNTS[name] == sum(groups(model).values())
    biases = BIASES.get(name, sum(s[0] for s in SHAPES[name]))
    assert COUNTS[name] == sum(
        int(np.prod(s)) for s in SHAPES[name]
    ) + biases + NORMS.get(name, 0)
    assert model(TEXT if name == "lstm" else IMAGES).shape == (3, CLASSES.get(name, 10))


def test_the_initial_law(name):
    """Uniform on +-1/sqrt(fan_in): Kolmogorov-Smirnov over all parameters, weights and
    biases apart; false-alarm rate 1e-6.
    """
    model, scaled = models.build(name, seed_tree(0)), {True: [], False: []}
    for layer in model.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear, nn.LSTM)):
            bound = (
                np.prod(layer.weight.shape[1:]) ** -0.5
                if not isinstance(layer, nn.LSTM)
                else 256**-0.5
            )
            for p in layer.parameters():
                assert p.requires_grad and p.dtype == torch.float32
                assert float(p.detach().abs().max()) <= bound * (1 + 1e-7)
                scaled[p.ndim == 1].append(p.detach().flatten() / bound)
    for part in scaled.values():
        assert (
            stats.kstest(torch.cat(part).numpy(), "uniform", (-1, 2)).pvalue > ALARM / 2
        )


def test_initial_weights_belong_to_their_stream(name):
    "... and not to torch's global one."
    first = weights(models.build(name, seed_tree(0, "model")))
    torch.rand(3)
    assert torch.equal(first, weights(models.build(name, seed_tree(0, "model"))))
    assert (
        first != weights(models.build(name, seed_tree(1, "model")))
    ).float().mean() > 0.99


def test_the_symbols_of_the_lstm_start_normal_and_its_other_law_is_refused():
    "... as PyTorch's embedding does; Kolmogorov-Smirnov, false-alarm rate 1e-6."
    model = models.build("lstm", seed_tree(0))
    assert (
        model.embedding.weight.requires_grad
        and stats.kstest(
            model.embedding.weight.detach().flatten().numpy(), "norm"
        ).pvalue
        > ALARM
    )
    with pytest.raises(ValueError, match="law is 'glorot'.*an LSTM.*must be 'torch'"):
        models.build("lstm", seed_tree(0), "glorot")


def test_the_four_normalisations_are_one():
    """... in value and in gradient, also where a functional call puts other weights in
    their place.
    """
    model = models.build("conv10", seed_tree(0))
    norms = [layer for layer in model if isinstance(layer, nn.GroupNorm)]
    assert (
        len(norms) == 4
        and len({id(n) for n in norms}) == 4
        and all(n.weight is norms[0].weight and n.bias is norms[0].bias for n in norms)
    )
    assert (
        (norms[0].weight == 1).all()
        and (norms[0].bias == 0).all()
        and all(n.num_groups == 32 for n in norms)
    )
    named = {name: p.detach() for name, p in model.named_parameters()}
    before = model(IMAGES)
    twice = torch.func.functional_call(
        model, named | {"1.weight": 2 * named["1.weight"]}, (IMAGES,)
    )
    assert torch.equal(model(IMAGES), before) and all(
        n.weight is norms[0].weight for n in norms
    ), "the call left something behind"
    with torch.no_grad():
        norms[0].weight.mul_(2)
    assert torch.equal(model(IMAGES), twice)


def test_resnet110_starts_with_the_identity_in_its_normalisations_and_no_state_beside_its_weights():
    for law in ("torch", "glorot"):
        model = models.build("resnet110", seed_tree(0), law)
        norms = [layer for layer in model.modules() if isinstance(layer, nn.GroupNorm)]
        assert len(norms) == 1 + 2 * 54 + 2 and all(
            (n.weight == 1).all() and (n.bias == 0).all() and n.num_groups == 8
            for n in norms
        )
        assert not list(model.buffers()) and (
            law == "torch" or (model[-1].bias == 0).all()
        )
    fan_in, fan_out = model[0].weight[0].numel(), model[0].weight[:, 0].numel()
    assert (
        0.9
        < float(model[0].weight.detach().abs().max()) / (6 / (fan_in + fan_out)) ** 0.5
        <= 1
    )


def test_a_residual_block_against_its_formula():
    """relu(x + body(x)), with the projection where the width doubles; scores of an
    image do not depend on the others.
    """
    x = torch.from_numpy(seed_tree(1).standard_normal((3, 16, 6, 6)).astype(np.float32))
    for n_out, side in ((16, 6), (32, 3)):
        block = models.initialise(models.Residual(16, n_out), seed_tree(0))
        c1, n1, _, c2, n2 = block.body
        inner = n2(c2(torch.relu(n1(c1(x)))))
        outer = (
            x
            if n_out == 16
            else block.shortcut[1](
                nn.functional.conv2d(x, block.shortcut[0].weight, stride=2)
            )
        )
        assert block(x).shape == (3, n_out, side, side)
        torch.testing.assert_close(block(x), torch.relu(inner + outer))
        torch.testing.assert_close(block(x)[1:2], block(x[1:2]))
    with pytest.raises(
        ValueError, match="n_out is 24; it must be n_in = 16 or 32: add blocks"
    ):
        models.Residual(16, 24)
