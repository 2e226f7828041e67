"""Modules and data that no paper has: twelve small models through every engine that takes
any module, and what may not happen to them.
"""

import copy
import math
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from tables import tabled
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from dpcomm.core.random import seed_tree
from dpcomm.core.vectors import groups, pack, unpack
from dpcomm.datasets.images import Federation
from dpcomm.mechanisms.contract import mechanism
from dpcomm.training import fused, local_sgd
from dpcomm.training.federated import Config, Task, simulate
from dpcomm.training.round import train_cohort

# ---- models


class Reader(nn.Module):
    "Tokens to the mean of what `body` makes of their embeddings, to scores."

    def __init__(self, body, width=8):
        super().__init__()
        self.embedding, self.body = nn.Embedding(11, width), body
        self.head = nn.Linear(width, 3)
        self.register_buffer("place", torch.linspace(-1, 1, 12)[:, None])

    def forward(self, x):
        h = self.body(self.embedding(x) + self.place)
        return self.head((h[0] if isinstance(h, tuple) else h).mean(1))


class Tied(nn.Module):
    "An autoencoder of two layers that share a matrix, then scores."

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(20, 20), nn.Linear(20, 20)
        self.up.weight = self.down.weight
        self.head = nn.Linear(20, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.up(torch.tanh(self.down(x)))))


class Adapted(nn.Module):
    "A frozen matrix beside a trained product of low rank."

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(20, 3).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(20, 2) / 4)
        self.b = nn.Parameter(torch.zeros(2, 3))

    def forward(self, x):
        return self.base(x) + x @ self.a @ self.b


def mlp(width=20, out=3, between=()):
    return nn.Sequential(nn.Linear(width, 8), nn.ReLU(), *between, nn.Linear(8, out))


def flat(first, curve, width):
    return nn.Sequential(first, curve, nn.Flatten(), nn.Linear(width, 3))


def frozen():
    net = mlp()
    net[0].requires_grad_(False)
    return net


ENCODER = nn.TransformerEncoderLayer
MODELS = {  # name -> (model, shape of an input; None: tokens)
    "mlp": (mlp, (20,)),
    "conv1d": (lambda: flat(nn.Conv1d(2, 3, 3), nn.GELU(), 24), (2, 10)),
    "image": (lambda: flat(nn.Conv2d(3, 4, 3), nn.SiLU(), 140), (3, 7, 9)),
    "lstm": (lambda: Reader(nn.LSTM(8, 8, batch_first=True)), None),
    "transformer": (lambda: Reader(ENCODER(8, 2, 16, batch_first=True)), None),
    "frozen": (frozen, (20,)),
    "tied": (Tied, (20,)),
    "adapter": (Adapted, (20,)),
    "dropout": (lambda: mlp(between=[nn.Dropout(0.5)]), (20,)),
    "groupnorm": (lambda: mlp(between=[nn.GroupNorm(2, 8)]), (20,)),
    "bfloat16": (lambda: mlp().bfloat16(), (20,)),
    "regression": (lambda: mlp(out=2), (20,)),
}
DRAWS = ("dropout", "transformer")
LOSSES = {"regression": F.mse_loss}


def build(name):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return MODELS[name][0]()


TARGETS = {
    "classes": lambda rng, n: rng.integers(3, size=n),
    "column": lambda rng, n: rng.integers(3, size=(n, 1)),
    "number": lambda rng, n: rng.normal(size=n),
    "numbers": lambda rng, n: rng.normal(size=(n, 2)),
}


def people(name="mlp", sizes=(5, 3, 8, 1), targets=None):
    shape, rng = MODELS[name][1], seed_tree(0, "people", name)
    made = TARGETS[targets or ("numbers" if name in LOSSES else "classes")]

    def pair(n):
        tokens = shape is None
        x = rng.integers(11, size=(n, 12)) if tokens else rng.normal(size=(n, *shape))
        return x, made(rng, n)

    return Federation.of([pair(n) for n in sizes], test=pair(30))


def task(name, engine="loop", sent=None, **settings):
    config = dict(rounds=2, cohort=3, batch=4, lr=0.1, server="sgd", server_lr=1.0)
    config |= dict(eval_every=1, engine=engine) | settings
    sent = sent or mechanism("gaussian", clip_norm=1.0, sigma=0.1)
    loss = dict(loss=LOSSES[name]) if name in LOSSES else {}
    return Task(build(name), people(name), sent, Config(**config), 3, **loss)


def state(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


# ---- the matrix


@tabled("engine", ["loop", "auto", "vmap"])
@tabled("name", MODELS)
def test_a_model_of_ones_own_trains_twice_alike_and_stays_as_it_was(name, engine):
    work, other = task(name, engine), task(name, engine)
    before, torch_before = state(work.model), torch.get_rng_state()
    one = simulate(work, progress=False)
    torch.manual_seed(99)
    two = simulate(other, progress=False, workers=3)
    torch.set_rng_state(torch_before)
    assert torch.equal(one.w, two.w) and one.history == two.history
    assert one.w.dtype == torch.float32 and torch.isfinite(one.w).all()
    assert not torch.equal(one.w.detach(), pack(work.model))
    after = work.model.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())
    assert work.model.training, "the caller's module is put into another mode"


def by_torch(model, x, y, plan, lr, loss):
    "What each client's weights move by, with a module and an optimiser of PyTorch's."
    rows = []
    for client in plan:
        mine = copy.deepcopy(model)
        free = [p for p in mine.parameters() if p.requires_grad]
        optimiser = torch.optim.SGD(free, lr)
        for index in client[(client >= 0).any(1)]:
            index = index[index >= 0]
            optimiser.zero_grad()
            loss(mine(x[index]), y[index]).backward()
            optimiser.step()
        rows.append(pack(mine) - pack(model))
    return torch.stack(rows)


@tabled("engine", ["loop", "vmap"])
@tabled("name", [n for n in MODELS if n not in (*DRAWS, "bfloat16")])
def test_updates_are_those_of_a_plain_loop(name, engine):
    "In double precision, with clients of unequal size and a last batch that is not full."
    model, data = build(name).double(), people(name).data
    x = data.x.double() if data.x.is_floating_point() else data.x
    y = data.y.double() if name in LOSSES else data.y
    plan = torch.tensor([[[0, 1, 2], [3, 4, -1]], [[5, 6, 7], [-1, -1, -1]]])
    loss = LOSSES.get(name, F.cross_entropy)
    train = local_sgd.ENGINES[engine]
    found, _ = train(model, pack(model), x, y, plan, 0.3, None, LOSSES.get(name))
    wanted = by_torch(model, x, y, plan, 0.3, loss)
    assert (wanted.norm(dim=1) > 1e-3).all()
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


# ---- models that are more than their layers


class Doubled(nn.Sequential):
    def forward(self, x):
        return super().forward(2 * x) + x[:, :3]


def hooked(kind):
    model = mlp()
    if kind == "layer":
        model[0].register_forward_hook(lambda layer, inputs, out: 3 * out)
    elif kind == "input":
        model.register_forward_pre_hook(lambda layer, inputs: (2 * inputs[0],))
    elif kind == "gradient":
        model[2].register_full_backward_hook(lambda layer, down, up: (2 * down[0],))
    elif kind == "forward":
        model[1].forward = torch.tanh
    return model


MORE = {"subclass": lambda: Doubled(*mlp())}
MORE |= {k: partial(hooked, k) for k in ("layer", "input", "gradient", "forward")}


@tabled("kind", MORE)
def test_what_a_model_is_beyond_its_layers_is_computed_too(kind, monkeypatch, capsys):
    "By the loop; and where no rule knows the kind, the probe of the first step does."
    model, held = MORE[kind](), people("mlp")
    plan = torch.tensor([[[0, 1, 2], [3, 4, -1]], [[5, 6, 7], [-1, -1, -1]]])
    visit = held.data.x, held.data.y, plan, 0.3
    how = dict(data=held.data, part=held.parts[0])
    engine, why = local_sgd.pick_engine("auto", model, **how)
    assert engine == "loop" and why
    update = local_sgd.train_loop(model, pack(model), *visit)[0]
    wanted = by_torch(model, *visit, F.cross_entropy)
    torch.testing.assert_close(update, wanted, rtol=1e-4, atol=1e-6)
    simulate(replace(task("mlp", "auto"), model=model), progress=False)
    assert why in capsys.readouterr().out
    monkeypatch.setattr(fused, "_more_than_layers", lambda model: "")
    engine, why = local_sgd.pick_engine("auto", model, **how)
    if kind != "forward":  # an instance's own forward fools the rule only
        assert engine == "loop" and why.startswith("its first step"), why
    with pytest.raises(ValueError, match="first step .* use engine='loop'"):
        local_sgd.pick_engine("fused", model, **how)


class Checkpointed(nn.Module):
    "Computes its forward pass a second time on the way back, as Hugging Face's models may."

    def __init__(self, again=True):
        super().__init__()
        self.body, self.head, self.again = mlp(out=6), nn.Linear(6, 3), again

    def forward(self, x):
        if self.again:
            h = torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)
        else:
            h = self.body(x)
        return self.head(torch.tanh(h))


def test_activation_checkpointing_sees_the_weights_of_its_own_forward_pass():
    model, data = Checkpointed().double(), people("mlp").data
    plain = Checkpointed(again=False).double()
    plain.load_state_dict(model.state_dict())
    plan = torch.arange(8).view(1, 4, 2)
    w = pack(model) + 0.3 * torch.randn(len(pack(model)), dtype=torch.float64)
    visit = w, data.x.double(), data.y, plan, 0.5
    ours, wanted = (local_sgd.train_loop(m, *visit)[0] for m in (model, plain))
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-14)


# ---- frozen, tied, of half precision


@tabled("engine", ["loop", "auto", "vmap"])
@tabled("name, d", [("frozen", 27), ("adapter", 46), ("tied", 503)])
def test_what_is_frozen_or_shared_neither_moves_nor_costs_twice(name, d, engine):
    """The frozen MLP has 8 x 3 + 3 free weights, the adapter 20 x 2 + 2 x 3, the tied
    network one matrix of 20 x 20, two biases and 63 of the head.
    """
    work = task(name, engine)
    before = state(work.model)
    run = simulate(work, progress=False)
    assert run.w.shape == (d,) and sum(groups(work.model).values()) == d
    assert run.ledger.uplink_bits == 2 * 3 * 32 * d
    assert run.ledger.downlink_bits == 2 * 3 * 32 * d
    assert all(torch.equal(work.model.state_dict()[k], v) for k, v in before.items())
    moved = copy.deepcopy(work.model)
    moved.load_state_dict(unpack(work.model, run.w.detach()), strict=False)
    kept = {k for k, v in before.items() if torch.equal(moved.state_dict()[k], v)}
    frozen = {k for k, p in work.model.named_parameters() if not p.requires_grad}
    assert kept == frozen
    x, y = work.federation.data.x_test, work.federation.data.y_test
    right = 100 * float((moved.eval()(x).argmax(1) == y).double().mean())
    assert run.history[-1]["accuracy"] == pytest.approx(right)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_with_and_not_stepped(kind):
    "A step of 2^-12 of a weight is lost in bfloat16 and in float16, and not here."
    net = nn.Sequential(nn.Linear(1, 1, bias=False)).to(kind)
    net[0].weight.data.fill_(1.0)
    w, x, y = pack(net), torch.ones(4, 1), torch.zeros(4, 1)
    assert w.dtype == torch.float32
    plan = torch.zeros(1, 4, 1, dtype=torch.int64)
    for engine in ("loop", "vmap"):
        train = local_sgd.ENGINES[engine]
        update, _ = train(net, w, x, y, plan, 2**-13, None, F.mse_loss)
        assert update.dtype == torch.float32
        assert float(update) == pytest.approx(-4 * 2**-12, rel=0.01)
    assert net[0].weight.dtype == kind and float(net[0].weight) == 1


# ---- dropout, evaluation, buffers


class Coins(nn.Linear):
    "Draws from two generators where no class of PyTorch's says so, and remembers."

    seen = None

    def forward(self, x):
        drawn = float(torch.rand(())), np.random.random()
        self.seen.append((self.training, drawn))
        return super().forward(x)


def test_every_visit_draws_from_its_own_address():
    "A trial and twelve visits have their streams; a client's is its own, whoever came."
    work = replace(task("mlp", rounds=3, cohort=4, batch=8), model=Coins(20, 3))
    Coins.seen = seen = []
    simulate(work, progress=False)
    training, scoring = ([c for on, c in seen if on == mode] for mode in (True, False))
    trials = 3  # which look for something kept
    assert len(set(training)) == len(training) - trials + 1 == 13
    assert len(set(scoring)) == 1
    alone, w = np.array([2]), pack(work.model)
    streams = work.streams(1, alone, "batches")
    Coins.seen = again = []
    with ThreadPoolExecutor(1) as pool:
        list(train_cohort(work, w, alone, streams, pool))
    assert again[-1] in seen and again[-1][0]


def test_clients_of_one_vmap_call_have_dropout_of_their_own():
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 2, bias=False))
    plan = torch.zeros(3, 1, 1, dtype=torch.int64)
    x, y = torch.ones(1, 64), torch.zeros(1, dtype=torch.int64)
    updates, _ = local_sgd.train_vmap(net, pack(net), x, y, plan, 1.0)
    masks = {tuple((u[:64] != 0).tolist()) for u in updates}
    assert len(masks) == 3


@tabled("engine", ["loop", "vmap"])
def test_a_norm_that_is_frozen_with_its_averages_stays_as_it_is(engine):
    "And is one of the two ways out that the refusal names."
    norm = nn.BatchNorm1d(8)
    norm.running_mean.fill_(0.5), norm.eval().requires_grad_(False)
    work = replace(task("mlp", engine), model=mlp(between=[norm]))
    before, data = state(norm), work.federation.data
    run = simulate(work, progress=False)
    assert all(torch.equal(norm.state_dict()[k], v) for k, v in before.items())
    assert float(run.model()[2].running_mean[0]) == 0.5
    plan = torch.tensor([[[0, 1, 2], [3, 4, -1]]])
    how = work.model, pack(work.model), data.x, data.y, plan, 0.3
    ours = local_sgd.ENGINES[engine](*how)[0]
    wanted = by_torch(work.model, data.x, data.y, plan, 0.3, F.cross_entropy)
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-6)


# ---- losses, scores, and clients


@pytest.mark.parametrize("kind", ["weighted", "masked", "plain"])
def test_a_test_loss_is_one_loss_over_all_outputs(kind):
    "A mean of means over batches of a sorted set is 80 % away for weights 1, 1, 20."
    net, rng = nn.Linear(4, 3), seed_tree(0, "sorted")
    x = torch.from_numpy(rng.normal(size=(1100, 4))).float()
    y = torch.sort(torch.from_numpy(rng.integers(0, 3, 1100)))[0]
    weight = torch.tensor([1.0, 1.0, 20.0]) if kind == "weighted" else None
    loss = nn.CrossEntropyLoss(weight=weight)
    if kind == "masked":
        y = torch.where(torch.arange(1100) > 600, -100, y)
    wanted, held = float(loss(net(x), y)), Federation.of([(x[:9], y[:9])], (x, y))
    config = Config(rounds=1, cohort=1, lr=1e-9, server_lr=1e-9, engine="loop")
    sent = mechanism("gaussian", clip_norm=1e-9, sigma=1e-9, exact=False)
    run = simulate(Task(net, held, sent, config, 0, loss), progress=False)
    assert run.history[-1]["loss"] == pytest.approx(wanted, rel=1e-5)


def test_a_task_is_scored_by_its_own_loss_or_the_callers_score():
    work = task("regression")
    run = simulate(work, progress=False)
    data = work.federation.data
    said = local_sgd.predict(work.model, run.w.detach(), data.x_test)
    loss = float(F.mse_loss(said, data.y_test))
    assert run.history[-1]["loss"] == pytest.approx(loss, rel=1e-5)
    assert "accuracy" not in run.history[-1]

    def largest(model, w, x, y):
        return {"largest": float((local_sgd.predict(model, w, x) - y).abs().max())}

    run = simulate(work, progress=False, metrics=largest)
    largest = float((said - data.y_test).abs().max())
    assert run.history[-1]["largest"] == pytest.approx(largest, rel=1e-5)


def test_clients_bring_their_own_data():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(zip(np.eye(3), (0, 1, 2)))

    class Counted(Stream):
        def __len__(self):
            return 3

    loader = torch.utils.data.DataLoader(Counted(), batch_size=2)
    swapped = np.eye(3).astype(">f8"), np.arange(3).astype(">i4")
    pd = pytest.importorskip("pandas")
    x, y = torch.eye(3), torch.arange(3)
    examples = [Counted(), loader, [*zip(np.eye(3), (0, 1, 2))], swapped]
    examples += [(pd.DataFrame(x.numpy()), pd.Series(y.numpy())), (list(x), list(y))]
    examples += [(x.to_sparse(), y), (x.clone().requires_grad_(), y)]
    examples += [D.TensorDataset(x, y), D.Subset(D.TensorDataset(x, y), [0, 1, 2])]
    for given in ([*examples, ([], [])], dict(enumerate(examples))):
        alike = Federation.of(given, test=Counted())
        assert alike.data.x.dtype == torch.float32 and alike.data.y.dtype == torch.int64
        assert [len(part) for part in alike.parts][:10] == [3] * 10
        assert not alike.data.x.requires_grad and sum(map(len, alike.parts)) == 30
        for part in alike.parts[:10]:
            assert torch.equal(alike.data.x[part], x)
            assert torch.equal(alike.data.y[part], y)
    endless = ((np.eye(3)[0], 0) for _ in iter(int, 1))
    for stream in (Stream(), torch.utils.data.DataLoader(Stream()), endless):
        with pytest.raises(ValueError, match="does not say how many examples"):
            Federation.of([stream], test=swapped)
    with pytest.raises(TypeError, match="clients is 7; pass the data of each"):
        Federation.of(7, test=swapped)


class Jittered(torch.utils.data.Dataset):
    "Ten examples with a random transform."

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return torch.tensor([i + self.draw()]), i


D, X = torch.utils.data, torch.rand(4, 3)
ROWS = D.TensorDataset(torch.rand(20, 1), torch.arange(20))
DRAWN = {"torch": lambda: float(torch.rand(()))}
DRAWN |= {"numpy": np.random.random, "python": random.random}
DRAWN |= {"one in five": lambda: float(torch.rand(()) < 0.2)}
CHANGE = {name: Jittered(draw) for name, draw in DRAWN.items()}
CHANGE |= {f"{name}, loaded": D.DataLoader(held, 3) for name, held in CHANGE.items()}


def mixing(draw):
    "A loader whose collate function adds examples to one another."

    def mixed(examples):
        x, y = D.default_collate(examples)
        return x + draw() * x.flip(0), y

    return D.DataLoader(ROWS, 4, collate_fn=mixed)


CHANGE |= {f"{name}, mixed": mixing(draw) for name, draw in DRAWN.items()}
SAMPLER = D.WeightedRandomSampler(torch.ones(20), 20)
CHANGE |= {"sampler": D.DataLoader(ROWS, 4, sampler=SAMPLER)}
KINDS = dict(half=X.bfloat16(), gradient=X.clone().requires_grad_(), nan=X * math.nan)
KINDS |= dict(sparse=[row.to_sparse() for row in X])
STAY = {name: [*zip(rows, range(4))] for name, rows in KINDS.items()}
STAY |= dict(shuffled=D.DataLoader(ROWS, 4, shuffle=True), rows=ROWS)


@tabled("name", CHANGE)
def test_examples_that_change_from_pass_to_pass_are_said_and_read_alike(name):
    with pytest.warns(UserWarning, match="differ from pass to pass"):
        twice = [Federation.of([CHANGE[name]], ([[0.0]], [0])) for _ in range(2)]
    assert torch.equal(*(one.data.x for one in twice))


@tabled("name", STAY)
@pytest.mark.filterwarnings("error")
def test_fixed_examples_of_every_kind_are_read_without_a_word(name):
    Federation.of([STAY[name]], test=STAY[name])


def test_a_loader_s_rows_are_those_it_yields():
    "A sampler, a batch sampler and a collate function are what they are in a loop."
    x, y = torch.arange(20.0)[:, None], torch.arange(20)
    rows = D.TensorDataset(x, y)
    mine = [3, 1, 8, 19, 4]

    def halved(pairs):
        inputs, targets = zip(*pairs)
        return torch.stack(inputs) / 2, torch.tensor(targets)

    batches = D.BatchSampler(D.SubsetRandomSampler(mine), 2, False)
    loaders = [
        D.DataLoader(rows, 2, sampler=D.SubsetRandomSampler(mine)),
        D.DataLoader(rows, batch_sampler=batches),
        D.DataLoader(D.Subset(rows, mine), 2, shuffle=True),
        D.DataLoader(rows, 2, sampler=D.WeightedRandomSampler(y == 7, 4)),
        D.DataLoader(D.Subset(rows, mine), 2, collate_fn=halved),
        D.DataLoader(rows, batch_size=None, sampler=mine),
    ]
    before = torch.get_rng_state()
    held = Federation.of(loaders, test=D.DataLoader(rows, 4, sampler=mine))
    assert torch.equal(torch.get_rng_state(), before)
    seen = [sorted(held.data.y[part].tolist()) for part in held.parts]
    assert seen == [sorted(mine)] * 3 + [[7] * 4] + [sorted(mine)] * 2
    assert held.data.y_test.tolist() == mine
    for client, part in enumerate(held.parts):
        scale = 0.5 if client == 4 else 1.0
        assert torch.equal(held.data.x[part][:, 0], scale * held.data.y[part])
    with pytest.raises(ValueError, match="drop_last leaves examples out"):
        Federation.of([D.DataLoader(rows, 32, drop_last=True)], test=rows)


class Masked(nn.Module):
    "Reads ids and their mask, by position or by name; an adapter beside a frozen base."

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8).requires_grad_(False)
        self.body = ENCODER(8, 2, 16, 0.0, batch_first=True).requires_grad_(False)
        self.head = nn.Linear(8, 3)

    def forward(self, ids, mask):
        h = self.body(self.embedding(ids), src_key_padding_mask=mask == 0)
        return self.head((h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def test_several_inputs_reach_the_model_as_in_a_loop_of_ones_own():
    "Ids and a mask of another type, in nine containers; and by the engine of a GPU."
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Masked()
    rng = seed_tree(0, "masked")
    ids, mask = rng.integers(11, size=(24, 5)), rng.random((24, 5)) < 0.8
    ids, mask = torch.from_numpy(ids), torch.from_numpy(mask).to(torch.int8)
    mask[:, 0], y = 1, ids[:, 0] % 3
    named = dict(ids=ids, mask=mask)
    examples = [dict(ids=i, mask=m, labels=int(k)) for i, m, k in zip(ids, mask, y)]
    nested = [((i, m), k) for i, m, k in zip(ids, mask, y)]
    rows = D.TensorDataset(ids, mask, y)
    dicts = named | dict(labels=y), (named, y), examples, D.DataLoader(examples, 5)
    tuples = ((ids, mask), y), rows, D.DataLoader(rows, 5), nested
    tuples = *tuples, D.DataLoader(nested, 5)
    plan, weights = torch.arange(12).view(1, 3, 4), []
    for held in (*dicts, *tuples):
        data = Federation.of([held], test=held).data
        assert [t.dtype for t in tree_leaves(data.x)] == [torch.int64, torch.int8]
        visit = net, pack(net), data.x, data.y, plan, 0.5
        weights.append(local_sgd.train_loop(*visit)[0])
        assert torch.equal(weights[0], weights[-1])
        assert local_sgd.predict(net, pack(net), data.x).shape == (24, 3)
    deep = dict(inner=named, labels=y)
    inner = Federation.of([deep], test=deep).data.x[plan[0, 0]].parts["inner"]
    assert torch.equal(inner["mask"], mask[plan[0, 0]]) and len(inner) == 2
    free = copy.deepcopy(net)
    optimiser = torch.optim.SGD(free.head.parameters(), 0.5)
    for rows in plan[0]:
        optimiser.zero_grad()
        F.cross_entropy(free(ids[rows], mask[rows]), y[rows]).backward()
        optimiser.step()
    torch.testing.assert_close(weights[0][0], pack(free) - pack(net))
    torch.testing.assert_close(local_sgd.train_vmap(*visit)[0], weights[0])
    people = Federation.of([held] * 4, held)
    work = replace(task("mlp", "vmap"), model=net, federation=people)
    assert simulate(work, progress=False).finished
    with pytest.raises(
        ValueError, match="of inputs .* int64 and inputs .* int8 and tar"
    ):
        simulate(replace(work, model=mlp()), progress=False)


class Pair(nn.Linear):
    "Returns two things, as a layer with a state does."

    def forward(self, x):
        return super().forward(x), x


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_model_of_several_outputs_needs_a_loss_and_a_score(engine):
    work = replace(task("mlp", engine), model=Pair(20, 3))
    with pytest.raises(ValueError, match="^Pair must return one .* loss and metrics"):
        simulate(work, progress=False)

    def loss(out, y):
        return F.cross_entropy(out[0], y) + out[1].square().mean()

    work = replace(work, loss=loss)
    run = simulate(work, progress=False, metrics=lambda *_: {"score": 1.0})
    assert run.finished and run.history[-1]["score"] == 1.0
    alone = simulate(work, progress=False)
    data, w = work.federation.data, alone.w.detach()
    call = local_sgd.as_function(work.model, w, training=False)
    said = loss(call(unpack(work.model, w), data.x_test), data.y_test)
    assert alone.history[-1]["loss"] == pytest.approx(float(said), rel=1e-5)
