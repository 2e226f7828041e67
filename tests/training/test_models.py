"models: sizes, initial weights, layer order."

import numpy as np
import pytest
import torch
from laws import ALARM
from scipy import stats
from tables import tabled
from torch import nn

from dpcomm.core.random import seed_tree
from dpcomm.core.vectors import flatten
from dpcomm.training import local_sgd, models

close = torch.testing.assert_close


def wider(n: int) -> list:
    "Eighteen blocks of twice the width, the first with a projection."
    m = 2 * n
    return [(m, n, 3, 3), (m, m, 3, 3), (m, n, 1, 1), *[(m, m, 3, 3)] * 34]


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
        (16, 1, 3, 3),
        *[(16, 16, 3, 3)] * 36,
        *wider(16),
        *wider(32),
        (10, 64),
    ],
    "lstm": [(80, 8), (1024, 8), (1024, 256), (1024, 256), (1024, 256), (80, 256)],
}
# weights and biases of the one shared normalisation; of one after every convolution
NORMS = {"conv62": 64, "conv10": 64, "resnet110": 2 * (16 + 36 * 112 + 32 + 64)}
BIASES = {"resnet110": 10, "lstm": 2 * 2 * 4 * 256 + 80}  # elsewhere one an output
CLASSES = {"conv62": 62, "cnn62": 62, "lstm": 80}
TEXT = torch.from_numpy(seed_tree(0, "text").integers(0, 80, (3, 80)))
IMAGES = seed_tree(0, "images").random((3, 1, 28, 28), dtype=np.float32)
IMAGES = torch.from_numpy(IMAGES)


def weights(model: nn.Module) -> torch.Tensor:
    return flatten(p.detach() for p in model.parameters())


@tabled("name", SHAPES)
def test_parameter_counts(name):
    model, shapes = models.build(name, seed_tree(0)), SHAPES[name]
    assert [tuple(p.shape) for p in model.parameters() if p.ndim > 1] == shapes
    beside = BIASES.get(name, sum(s[0] for s in shapes)) + NORMS.get(name, 0)
    assert len(weights(model)) == sum(int(np.prod(s)) for s in shapes) + beside
    assert model(TEXT if name == "lstm" else IMAGES).shape == (3, CLASSES.get(name, 10))


@tabled("name", SHAPES)
def test_the_initial_law(name):
    """Uniform on +-1/sqrt(fan_in), symbols normal: Kolmogorov-Smirnov over all parameters,
    weights and biases apart; false-alarm rate 1e-6.
    """
    model, scaled = models.build(name, seed_tree(0)), {True: [], False: []}
    for layer in model.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear, nn.LSTM)):
            lstm = isinstance(layer, nn.LSTM)
            bound = (256 if lstm else np.prod(layer.weight.shape[1:])) ** -0.5
            for p in layer.parameters():
                assert float(p.detach().abs().max()) <= bound * (1 + 1e-7)
                scaled[p.ndim == 1].append(p.detach().flatten() / bound)
    for part in map(torch.cat, scaled.values()):
        assert stats.kstest(part.numpy(), "uniform", (-1, 2)).pvalue > ALARM / 3
    if name == "lstm":
        symbols = model.embedding.weight.detach().flatten()
        assert stats.kstest(symbols.numpy(), "norm").pvalue > ALARM / 3


def test_another_law_of_an_lstm_is_refused():
    with pytest.raises(ValueError, match="law is 'glorot'"):
        models.build("lstm", seed_tree(0), "glorot")


def test_the_four_normalisations_are_one():
    "... also where a functional call puts other weights in their place."
    model = models.build("conv10", seed_tree(0))
    norms = [layer for layer in model if isinstance(layer, nn.GroupNorm)]
    assert len({id(n) for n in norms}) == 4
    assert all(n.weight is norms[0].weight and n.bias is norms[0].bias for n in norms)
    assert all(n.num_groups == 32 and (n.weight == 1).all() for n in norms)
    named = {name: p.detach() for name, p in model.named_parameters()}
    before, double = model(IMAGES), named | {"1.weight": 2 * named["1.weight"]}
    twice = torch.func.functional_call(model, double, (IMAGES,))
    assert torch.equal(model(IMAGES), before), "the call left something behind"
    with torch.no_grad():
        norms[0].weight.mul_(2)
    assert torch.equal(model(IMAGES), twice)


def test_a_residual_block_against_its_formula():
    "relu(x + body(x)), with the projection where the width doubles; image by image."
    x = torch.from_numpy(seed_tree(1).standard_normal((3, 16, 6, 6)).astype(np.float32))
    for n_out, side in ((16, 6), (32, 3)):
        block = models.initialise(models.Residual(16, n_out), seed_tree(0))
        c1, n1, _, c2, n2 = block.body
        outer = x
        if n_out == 32:
            kernel = block.shortcut[0].weight
            outer = block.shortcut[1](nn.functional.conv2d(x, kernel, stride=2))
        assert block(x).shape == (3, n_out, side, side)
        close(block(x), torch.relu(n2(c2(torch.relu(n1(c1(x))))) + outer))
        close(block(x)[1:2], block(x[1:2]))


def test_scores_of_a_rare_class_by_hand():
    "Log-odds are the features: 3 of 4 deaths, 1 of 2 survivors; ordered pairs."
    net = nn.Sequential(nn.Linear(1, 1))
    x = torch.tensor([[2.0], [1.0], [0.5], [-1.0], [0.7], [-2.0]])
    y = torch.tensor([1, 1, 1, 1, 0, 0])
    scores = models.of_rare_class(net, torch.tensor([1.0, 0.0]), x, y)
    dead, alive = x[y == 1, 0].numpy(), x[y == 0, 0].numpy()
    odds = np.where(y.numpy() == 1, 1, -1) * x[:, 0].numpy()
    wanted = dict(balanced_accuracy=62.5, auroc=(dead[:, None] > alive).mean())
    wanted |= dict(loss=np.log1p(np.exp(-odds)).mean())
    assert scores == pytest.approx(wanted, rel=1e-6) and [*scores] == [*wanted]


# ---- tags of posts


def dense(x, n_words):
    "Bags of words, normalised to one."
    counts = nn.functional.one_hot(x.long() + 1, n_words + 1)[..., 1:].sum(1).float()
    return counts / counts.sum(1, keepdim=True).clamp_min(1)


def made_posts():
    "60 posts of up to 6 of 40 words and 3 of 9 tags, the first empty; and weights."
    rng = seed_tree(7, "posts")
    x, y = (rng.integers(-1, high, (60, width)) for high, width in ((40, 6), (9, 3)))
    x[0] = -1
    w = rng.standard_normal(40 * 9 + 9).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(w)


def test_tags_scores_and_training_are_those_of_dense_bags():
    x, y, w = made_posts()
    net, reference = models.TagRegression(40, 9), nn.Linear(40, 9)
    assert not any(p.any() for p in net.parameters())
    plan = torch.from_numpy(seed_tree(0, "plan").permutation(60)).view(1, 6, 10)
    update, _ = local_sgd.train_loop(net, w, x, y, plan, 2.0, loss=models.tag_loss)
    nn.utils.vector_to_parameters(w.clone(), reference.parameters())
    for index in plan[0]:
        scores, truth = reference(dense(x[index], 40)), models.multi_hot(y[index], 9)
        loss = nn.functional.binary_cross_entropy_with_logits(scores, truth)
        grads = torch.autograd.grad(loss, [*reference.parameters()])
        for p, g in zip(reference.parameters(), grads):
            p.data -= 2.0 * g
    close(update[0], weights(reference) - w, rtol=1e-4, atol=1e-6)
    hot = models.multi_hot(torch.tensor([[1, -1], [0, 2]]), 3)
    assert hot.tolist() == [[0, 1, 0], [1, 0, 1]]


def test_recall_counts_tags_among_the_first():
    x, y, w = made_posts()
    net = models.TagRegression(40, 9)
    scores = dense(x, 40) @ w[:-9].view(9, 40).T + w[-9:]
    truth = models.multi_hot(y, 9)
    for k in (1, 5):
        right = float(truth.gather(1, scores.topk(k).indices).sum())
        got = models.recall(net, w, x, y, k)
        assert got[f"recall{k}"] == pytest.approx(100 * right / float(truth.sum()))
    assert got["loss"] == pytest.approx(float(models.tag_loss(scores, y)), rel=1e-5)
