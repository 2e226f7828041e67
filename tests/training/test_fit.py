"""A model, a loss and data that do not go together: one sentence before the first round, the
same in every engine, and no trace of the trial.
"""

import random
import re
from dataclasses import replace

import numpy as np
import pytest
import test_any_module
import torch
from tables import tabled
from test_any_module import mlp
from torch import nn
from torch.nn import functional as F

from dpcomm.core.vectors import pack, unpack
from dpcomm.datasets.images import Federation
from dpcomm.mechanisms.contract import mechanism
from dpcomm.training import local_sgd
from dpcomm.training.federated import Config, Task, simulate
from dpcomm.training.local_sgd import check_fit

SENT = mechanism("gaussian", clip_norm=1.0, sigma=0.1, exact=False)


def reader(tokens=11):
    return nn.Sequential(nn.Embedding(tokens, 4), nn.Flatten(), nn.Linear(48, 3))


def people(name="mlp", **more):
    "Four clients, one of them without an example."
    return test_any_module.people(name, (0, 5, 3, 6), **more)


def task(model, held=None, engine="loop", loss=local_sgd.cross_entropy, **settings):
    config = dict(rounds=1, cohort=4, batch=4, eval_every=1, engine=engine) | settings
    return Task(model, held or people(), SENT, Config(**config), 0, loss)


class NeedsTwo(nn.Linear):
    def forward(self, x, mask):
        return super().forward(x) * mask


def remembering():
    "Holds a tensor that was computed, which no copy can hold."
    layer = nn.Linear(20, 3)
    layer.last = layer.weight * 2
    return layer


def turned():
    "Has a complex buffer, as rotary positions do."
    layer = nn.Linear(20, 3)
    layer.register_buffer("turns", torch.ones(3, dtype=torch.complex64))
    return layer


class Keeps(nn.Linear):
    "Answers with what it was asked before, from the second call on."

    past = None

    def forward(self, x):
        self.past, past = x.detach().mean(), self.past
        return super().forward(x) + (0.0 if past is None else past)


class Listed(nn.Linear):
    "Reads its weights from a list, where a copy of the module has the old ones."

    def __init__(self):
        super().__init__(20, 3)
        self.both = [self.weight, self.bias]

    def forward(self, x):
        return F.linear(x, *self.both)


def bound():
    "Its forward is that of the module that was there before the copy."
    model = mlp()
    usual = model.forward
    model.forward = lambda x: usual(x)
    return model


def hooked():
    model = mlp()
    model[0].weight.register_hook(lambda g: g * 0)
    return model


def growing(out, y, seen=[]):
    seen.append(y)
    return F.cross_entropy(out, y) * len(seen)


SCALE, PENALISED = nn.Parameter(torch.ones(())), mlp()
ROW = nn.Sequential(*mlp(out=1), nn.Flatten(0))
BARE, CUT, WARM, SUMMED, DRAWN = (
    lambda out, y: out.sum().item(),
    lambda out, y: out.detach().sum(),
    lambda out, y: SCALE * out.sum(),
    lambda out, y: out.sum() + PENALISED[0].weight.sum(),
    lambda out, y: out.sum() * torch.rand(()),
)
TOKENS, NUMBERS = dict(name="lstm"), dict(targets="numbers")
NUMBER = dict(targets="number")
EACH = nn.MSELoss(reduction="none")
MISFITS = {
    "features": (mlp(7), {}, {}, r"client 1, of inputs \(2, 20\) float32"),
    "tokens into a linear layer": (mlp(12), TOKENS, {}, r"inputs \(2, 12\) int64"),
    "a token too many": (reader(5), TOKENS, {}, "client 1.*range"),
    "another argument": (NeedsTwo(20, 3), {}, {}, "do not go together .*'mask'"),
    "numbers for classes": (mlp(), NUMBER, {}, r"targets \(2,\) float32"),
    "a column of classes": (mlp(), dict(targets="column"), {}, "one class per example"),
    "a label too many": (mlp(out=2), {}, {}, "client . holds a label 2; .*0 to 1"),
    "a broadcast": (mlp(out=1), NUMBER, dict(loss=F.mse_loss), "Using a target size"),
    "no mean": (mlp(out=2), NUMBERS, dict(loss=EACH), "scalar .*the mean over a batch"),
    "a number of Python's": (mlp(), {}, dict(loss=BARE), "one number"),
    "a constant": (mlp(), {}, dict(loss=CUT), "does not require grad"),
    "complex": (nn.Linear(20, 3, dtype=torch.complex64), {}, {}, "complex64; weights"),
    "a complex buffer": (turned(), {}, {}, "'turns' is torch.complex64"),
    "no copy": (remembering(), {}, {}, "Linear cannot be copied"),
    "nothing to train": (nn.Flatten(), {}, {}, "Flatten has no trainable parameter"),
    "a hook": (hooked(), {}, {}, "'0.weight' has a gradient hook.*: freeze"),
    "a loss with weights": (mlp(), {}, dict(loss=WARM), r"its loss reads .* \(\)"),
    "a penalty": (PENALISED, {}, dict(loss=SUMMED), "and return penalties on them"),
    "weights in a list": (Listed(), {}, {}, r"Listed or its loss reads .* \(3,\)"),
    "a forward of before": (bound(), {}, {}, "Sequential or its loss reads a tensor"),
    "a memory": (Keeps(20, 3), {}, {}, "Keeps or its loss gives two answers to the"),
    "a loss's memory": (mlp(), {}, dict(loss=growing), "loss gives two answers to the"),
    "a loss that draws": (mlp(), {}, dict(loss=DRAWN), "or it is a loss that draws"),
    "a row of numbers": (ROW, NUMBER, {}, r"return one tensor here, \(n, classes\) or"),
    "a third class": (mlp(), {}, dict(balance=True), "holds a label 2; .* 0 to 1"),
    "a number for a yes": (
        mlp(out=1),
        NUMBER,
        {},
        "holds a label -?[0-9.]+; .* 0 to 1",
    ),
}
OFF, ON = (dict(track_running_stats=kept) for kept in (False, True))
BATCH, INSTANCE = nn.BatchNorm1d, nn.InstanceNorm1d
MISFITS |= {
    says: (model, {}, {}, f"{says}.*: use .*GroupNorm")
    for says, model in {
        "BatchNorm1d": mlp(between=[BATCH(8)]),
        "BatchNorm2d": nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
        "BatchNorm1d mixes the examples": mlp(between=[BATCH(8, **OFF)]),
        "InstanceNorm1d": mlp(between=[INSTANCE(8, **ON)]),
        "_u": nn.utils.parametrizations.spectral_norm(nn.Linear(20, 3)),
    }.items()
}


@tabled("engine", ["loop", "auto", "vmap"])
@tabled("name", MISFITS)
@pytest.mark.filterwarnings("ignore")
def test_a_misfit_is_one_sentence_in_every_engine_and_left_alone(name, engine):
    model, held, more, says = MISFITS[name]
    before = {k: v.detach().clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"(?s){says}") as error:
        simulate(task(model, people(**held), engine, **more), progress=False)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())


class Restless(nn.Linear):
    "Draws from every generator, writes into its input, and counts."

    calls = 0

    def forward(self, x):
        self.calls += 1
        x.mul_(1 + random.random() + np.random.random() + torch.rand(()))
        return super().forward(x)


def test_a_trial_leaves_no_trace():
    model, held = Restless(20, 3), people()
    x, w = held.data.x.clone(), pack(model)
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    check_fit(model, held.data, held.parts[1])
    after = torch.get_rng_state(), np.random.get_state(), random.getstate()
    assert torch.equal(before[0], after[0]) and before[2] == after[2]
    assert (before[1][1] == after[1][1]).all() and before[1][2:] == after[1][2:]
    assert torch.equal(held.data.x, x) and torch.equal(pack(model), w)
    assert model.calls == 0 and all(p.grad is None for p in model.parameters())


def test_a_model_that_writes_into_its_input_leaves_the_data_alone():
    held = people()
    x, x_test = held.data.x.clone(), held.data.x_test.clone()
    net = nn.Sequential(nn.ReLU(inplace=True), *mlp())
    simulate(task(net, held), progress=False)
    assert torch.equal(held.data.x, x) and torch.equal(held.data.x_test, x_test)
    assert local_sgd.obstacle("vmap", net, data=held.data, part=held.parts[1]) == ""
    assert torch.equal(held.data.x, x)


def test_runs_without_a_test_set_need_a_score():
    held = people()
    data = replace(held.data, x_test=held.data.x_test[:0], y_test=held.data.y_test[:0])
    work = task(mlp(), replace(held, data=data))
    with pytest.raises(ValueError, match="the test set is empty.*metrics="):
        simulate(work, progress=False)
    assert simulate(work, progress=False, metrics=lambda *_: {"score": 1.0}).finished
    data = replace(held.data, x_test=held.data.x_test * torch.nan)
    with pytest.warns(UserWarning, match="loss on the test set is nan"):
        simulate(task(mlp(), replace(held, data=data)), progress=False)


def test_a_loss_with_weights_of_its_own_is_placed_where_the_run_is():
    held, loss = people(), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    run = simulate(task(mlp(), held, loss=loss), progress=False)
    assert run.finished and local_sgd.loss_on(loss, "meta").weight.device.type == "meta"
    assert loss.weight.device.type == "cpu"


# ---- clients' data


@tabled(
    "held",
    [
        None,
        5,
        (np.ones((1, 2)),),
        (np.array([["a", "b"]]), [0]),
        (np.ones((1, 2)), ["cat"]),
        ([[1, 2], [3]], [0, 1]),
        (np.array([[1, None]]), [0]),
        (np.ones((1, 2), complex), [0]),
        (np.ones((1, 2)), np.ones((1, 3)), [0]),
        ((np.ones((2, 2)), np.ones((2, 2))), [0, 1]),
        ({"a": np.array([["b"]])}, [0]),
        {"a": np.ones((1, 2))},
    ],
)
def test_data_that_are_no_numbers_are_named(held):
    good, says = (np.ones((1, 2)), [0]), "^client 1 has .* not a pair of numeric arrays"
    with pytest.raises(ValueError, match=f"{says}.*: pass .* several inputs"):
        Federation.of([good, held], test=good)


# ---- what vmap takes


class Scaled(nn.Linear):
    "Has a parameter without an axis, and one without an entry."

    def __init__(self):
        super().__init__(20, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x):
        return super().forward(x) * self.scale + self.nothing.sum()


def test_a_parameter_without_an_axis_is_trained_by_vmap():
    model, data = Scaled().double(), people().data
    plan = torch.tensor([[[0, 1], [2, -1]], [[3, 4], [-1, -1]]])
    visit = model, pack(model), data.x.double(), data.y, plan, 0.1
    (loop, _), (vmap, _) = local_sgd.train_loop(*visit), local_sgd.train_vmap(*visit)
    names = list(unpack(model, loop[0]))
    place = names.index("scale")
    assert loop[0][60 + 3 * (place > 0)] != 0 and len(loop[0]) == 64
    torch.testing.assert_close(vmap, loop, rtol=1e-9, atol=1e-12)


class Centred(nn.Linear):
    "Takes the mean of a batch from its members."

    def forward(self, x):
        return super().forward(x - x.mean(0))


AWAY = "its first step on a batch is .* away from that of the plain loop"
OF_BATCHES = {
    "sum": (mlp(out=2), nn.MSELoss(reduction="sum"), AWAY),
    "root": (mlp(out=2), lambda a, b: F.mse_loss(a, b).sqrt(), AWAY),
    "spread": (mlp(out=2), lambda a, b: a.var(0).mean(), f"{AWAY}|vmap"),
    "centred": (Centred(20, 2), F.mse_loss, AWAY),
    "mean": (mlp(out=2), F.mse_loss, "^$"),
}


def test_what_vmap_does_not_know_is_an_obstacle_and_no_traceback():
    "Sparse gradients, which the loop takes."
    held = people("lstm")
    net = nn.Sequential(nn.Embedding(11, 4, sparse=True), *list(reader())[1:])
    assert simulate(task(net, held), progress=False).finished
    with pytest.raises(ValueError, match="does not work with vmap .*'loop'$"):
        simulate(task(net, held, "vmap"), progress=False)


@pytest.mark.parametrize("name", OF_BATCHES)
def test_vmap_is_for_losses_that_are_means_of_examples(name):
    model, loss, says = OF_BATCHES[name]
    held = people(targets="numbers")
    how = dict(data=held.data, loss=loss, part=held.parts[1])
    assert re.search(says, local_sgd.obstacle("vmap", model, **how))
    work = task(model, held, "vmap", loss)
    if name == "mean":
        simulate(work, progress=False)
        return
    with pytest.raises(ValueError, match=f"{says}.*: use engine='loop'$"):
        simulate(work, progress=False)


# ---- in the midst of a run


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_bad_token_of_a_later_client_is_that_clients(engine):
    held = people("lstm")
    held.data.x[-1, 3] = 11
    with pytest.raises(ValueError, match="examples of client .*3 are .*range"):
        simulate(task(reader(), held, engine), progress=False)


# ---- doors that a stranger's first lines come through


class Viewed(nn.Module):
    "PyTorch's own tutorial: what a convolution made is viewed as rows."

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(140, 3)

    def forward(self, x):
        return self.head(F.relu(self.conv(x)).view(-1, 140))


def test_a_network_that_views_its_images_is_evaluated():
    held = test_any_module.people("image", (5, 4, 3, 6))
    run = simulate(task(Viewed(), held), progress=False)
    with torch.no_grad():
        right = (run.model()(held.data.x_test).argmax(1) == held.data.y_test).double()
    assert run.history[-1]["accuracy"] == pytest.approx(100 * float(right.mean()))


def test_an_output_without_an_axis_of_examples_is_not_joined():
    class Aside(nn.Linear):
        def forward(self, x):
            return super().forward(x), super().forward(x).square().mean().reshape(1)

    net = Aside(4, 3)
    assert local_sgd.predict(net, pack(net), torch.zeros(1500, 4))[1].shape == (1,)


def test_nobody_in_the_first_cohort_excuses_nobody():
    work = task(Listed(), sampling="poisson", cohort=1)
    seed = next(s for s in range(99) if not len(replace(work, seed=s).cohort(0)))
    with pytest.raises(ValueError, match="Listed or its loss reads a tensor"):
        simulate(replace(work, seed=seed), progress=False)


def test_a_fast_engine_is_tried_on_the_whole_cohort():
    "A first client of one class would hide what weighs the classes."
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 20.0]))
    held = people()
    held.data.y[:] = torch.arange(len(held.data.y)) % 3
    held.data.y[torch.from_numpy(held.parts[1])] = 0
    with pytest.raises(ValueError, match="its first step .* use engine='loop'"):
        simulate(task(mlp(), held, "vmap", loss), progress=False)


def test_two_examples_in_a_list_are_examples():
    pair = [(torch.zeros(3), torch.ones(3)), (torch.full((3,), 2.0), torch.ones(3))]
    held = Federation.of([pair, pair * 2], test=pair)
    assert held.data.x.shape == (6, 3) and bool((held.data.y == 1).all())
