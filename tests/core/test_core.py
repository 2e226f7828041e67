"core: refusals, the seed tree, choices in log space, flat vectors, clipping."

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from laws import ALARM, drawn, fit
from scipy import linalg, special
from tables import tabled

from dpcomm.core import checks, random, vectors

TEXT = some.text('ab",é', max_size=3)
ADDRESS = some.lists(some.one_of(TEXT, some.integers(-3, 2**70)), max_size=4)
INF, NAN = math.inf, math.nan


# ---- a model beyond its state


class Scaled(torch.nn.Sequential):
    def forward(self, x):
        return 3 * super().forward(x)


class Doubled(torch.nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


def changed(what):
    "Two layers of one state, with something that no state_dict tells."
    kinds = dict(own=Scaled, another=Doubled)
    between = dict(tanh=torch.nn.Tanh(), slope=torch.nn.LeakyReLU(0.3))
    usual = torch.nn.LeakyReLU(0.2)
    layers = torch.nn.Linear(3, 2), between.get(what, usual)
    model = kinds.get(what, torch.nn.Sequential)(*layers)
    if what == "hook":
        model[0].register_forward_hook(lambda layer, x, y: 2 * y)
    if what == "gradient":
        model[0].weight.register_hook(lambda gradient: 0 * gradient)
    if what == "patched":
        model[1].forward = lambda x: x
    return vectors.computation(model.eval() if what == "eval" else model)


def test_models_of_one_state_that_compute_differently_are_told_apart():
    what = "tanh slope own another hook gradient patched".split()
    assert len({changed(""), *map(changed, what)}) == 8
    assert changed("") == changed("eval"), "and the same again are not"


# ---- refusals


def test_a_truth_value_is_no_number():
    "A scale of True was one of 1."
    more = dict(check_number=("[0, 2]",), check_between=(0, 2))
    for name in ("check_number", "check_between", "check_size"):
        with pytest.raises(ValueError, match="x is True"):
            getattr(checks, name)("x", True, *more.get(name, ()))
    with np.errstate(all="raise"):  # of a float32 that is compared with a float64
        assert checks.check_number("x", np.float32(0.5), checks.SCALE) == 0.5


def test_check_finite_counts_what_is_bad_and_takes_what_only_the_sum_overflows():
    says = "update holds 3 values.*finite.*lower the learning rate"
    with pytest.raises(ValueError, match=says):
        vectors.check_finite("update", torch.tensor([[1.0, NAN], [-INF, INF]]))
    wide = torch.full((9,), 1e308, dtype=torch.float64)
    for u in (torch.full((9,), 3e38), wide, torch.tensor([3e38, -1e-45])):
        assert vectors.check_finite("u", u) is u
    assert vectors.check_finite("u", torch.zeros(0, 3)).shape == (0, 3)


# ---- seed tree


@drawn
@given(some.integers(), ADDRESS, some.integers(), ADDRESS)
def test_two_addresses_have_two_streams(seed, path, other_seed, other_path):
    one, other = random.derive(seed, *path), random.derive(other_seed, *other_path)
    assert (one == other) == ((seed, path) == (other_seed, other_path))
    assert one == random.derive(seed, *list(path)) != random.derive(seed, *path, 0)


def test_addresses_that_look_alike_differ():
    for a, b in (
        ((0, "1"), (0, 1)),
        ((0, "a", "b"), (0, "ab")),
        ((0, 1, 2), (0, 12)),
        ((1, 0), (0, 1)),
        ((0,), (0, "")),
        ((0, '", "'), (0, "", "")),
        ((-1,), (1,)),
        ((2**64,), (0,)),
        ((2**128 + 5,), (5,)),
    ):
        assert random.derive(*a) != random.derive(*b)


def test_addresses_are_whole_numbers_of_any_type():
    assert random.derive(np.int64(5), "c", np.int32(7)) == random.derive(5, "c", 7)
    with pytest.raises(TypeError):
        random.derive(0, 1.5)


def test_the_seed_tree_is_pinned():
    "Every stored result hangs on these numbers."
    assert random.derive(0) == 131682519988427908492936586283876299031
    noise = random.derive(7, "round", 3, "client", 12, "noise")
    assert noise == 186782913841845592373283481551959796289
    drawn = random.seed_tree(7, "round", 3).integers(2**32, size=3)
    assert drawn.tolist() == [3673195847, 4018998647, 2528561415]


# ---- normal numbers


def streams(n):
    return [random.seed_tree(0, i) for i in range(n)]


def test_rows_of_normal_come_from_their_own_streams():
    block = random.normal((4, 3, 5), streams(4))
    assert block.shape == (4, 3, 5) and block.dtype == torch.float32
    for row, stream in zip(block, streams(4)):
        assert torch.equal(row, random.normal((3, 5), stream))
    assert torch.equal(random.normal((2, 3, 5), streams(4)[1:3]), block[1:3])
    one, again = (random.normal((2, 6), random.seed_tree(0)) for _ in range(2))
    assert not (one[0] == one[1]).any() and torch.equal(one, again)


@tabled("n", [0, 1, 4])
def test_as_many_streams_as_rows(n):
    "One stream too few would give clients the same noise by broadcasting."
    with pytest.raises(ValueError):
        random.normal((3, 2), streams(n))


# ---- choices

LOGITS = [0.0, 1.0, -2.0, 0.5, 0.5, -0.7, 1.5, -9.0, 0.1, -0.3, 2.0, 0.9]


@tabled("cuts", [[], [4, 8], [*range(1, 12)]])
def test_gumbel_argmax_draws_from_the_softmax(cuts):
    "Chi-square, in any division into blocks; false-alarm rate 1e-6 each."
    logits, rng = np.array(LOGITS) + 700, random.seed_tree(0, "gumbel", len(cuts))
    picks = [random.gumbel_argmax(np.split(logits, cuts), rng) for _ in range(8000)]
    assert all(value == logits[k] for k, value in picks)
    counts = np.bincount([k for k, _ in picks], minlength=12)
    assert fit(counts, special.softmax(logits)) > ALARM


# ---- flat vectors


def test_unflatten_makes_views_and_flatten_reads_in_logical_order():
    vector = torch.arange(6.0)
    vectors.unflatten(vector, [(2,), (2, 2)])[1].zero_()
    assert vector.tolist() == [0, 1, 0, 0, 0, 0]
    image = torch.arange(24.0).view(1, 2, 3, 4)
    other = image.to(memory_format=torch.channels_last)
    assert torch.equal(vectors.flatten([other]), torch.arange(24.0))


def test_blocks_of_columns_are_the_whole(monkeypatch):
    u = torch.arange(22.0).reshape(2, 11)

    def entries(part):
        return part**2, -part

    for width in (1, 4, 11, 50):
        monkeypatch.setattr(vectors, "COLUMNS", width)
        found = vectors.by_columns(entries, u)
        assert all(map(torch.equal, found, entries(u)))


# ---- clipping

ROUNDING = 1e-6  # float32 entries: a clipped norm may exceed the bound by this share
SIZES = [(1.0, 1), (1.0, 7), (0.01, 2_000_000), (1e-45, 100), (1e-20, 1000)]
SIZES += [(1e18, 1000), (1e30, 1000), (3e38, 10_000)]


@tabled("size, d", SIZES)
@tabled(
    "clip, dtype", [(1e-3, torch.float32), (1.0, torch.float64), (1e4, torch.float32)]
)
def test_clip_bounds_the_norm_and_keeps_the_direction(size, d, clip, dtype):
    u = size * torch.from_numpy(random.seed_tree(0).uniform(-1, 1, (2, d))).to(dtype)
    clipped = vectors.clip_l2(u, clip)
    norm, before = clipped.double().norm(dim=1), u.double().norm(dim=1)
    assert clipped.dtype == dtype and clipped.shape == u.shape
    assert (norm <= clip * (1 + ROUNDING)).all()
    assert (norm >= before.clamp_max(clip) * (1 - ROUNDING)).all()
    cosine = (clipped.double() * (u.double() / before[:, None])).sum(1) / norm
    assert (cosine >= 1 - ROUNDING).all()


def test_clip_leaves_rows_within_the_bound_untouched():
    u = torch.tensor([[0.0, 0.0], [3.0, 4.0], [-0.3, 0.1], [1e-45, 0.0], [30.0, 40.0]])
    clipped = vectors.clip_l2(u, 5.0)
    assert torch.equal(clipped[:4], u[:4]) and torch.allclose(clipped[4], u[1])
    assert torch.equal(u[4], torch.tensor([30.0, 40.0])), "the argument was changed"
    assert torch.equal(vectors.clip_l2(u[4], 5.0), clipped[4]), "a vector as a row"


def test_a_row_too_long_for_a_float64_is_refused_and_not_made_zero():
    "The square of 1e154 overflows, and the row would be clipped by 1 / inf."
    for entry in (1e155, 1e308):
        with pytest.raises(ValueError, match="overflows float64"):
            vectors.clip_l2(torch.full((2, 4), entry, dtype=torch.float64), 1.0)
    for dtype, entry in ((torch.float64, 1e153), (torch.float32, 3e38)):
        clipped = vectors.clip_l2(torch.full((4,), entry, dtype=dtype), 1.0)
        assert clipped.double().norm() == pytest.approx(1.0)


# ---- Hadamard transform


@tabled("dtype", [torch.float32, torch.float64])
@tabled("size", [2**k for k in range(13)])
def test_the_transform_is_sylvesters_matrix(size, dtype):
    H = torch.from_numpy(linalg.hadamard(size)).to(dtype) / math.sqrt(size)
    x = torch.from_numpy(random.seed_tree(0, size).standard_normal((3, size))).to(dtype)
    tight = dict(rtol=0, atol=1e-13 if dtype == torch.float64 else 1e-5)
    y = vectors.walsh_hadamard(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y, x @ H, **tight)
    torch.testing.assert_close(vectors.walsh_hadamard(y), x, **tight)
    if size <= 2**vectors.POINTS:
        torch.testing.assert_close(vectors.hadamard(size, dtype), H, **tight)


@tabled("shape", [(0, 8), (4, 1), (2, 3, 16), (9, 2**13), (3, 2**17), (2**18,)])
def test_any_batch_is_its_rows(shape):
    x = torch.from_numpy(random.seed_tree(0).standard_normal(shape, dtype=np.float32))
    before, y = x.clone(), vectors.walsh_hadamard(x)
    assert y.shape == x.shape and torch.equal(x, before)
    assert vectors.BLOCK < 3 * 2**17 and y.data_ptr() != x.data_ptr() or not len(x)
    for row, image in zip(x.reshape(-1, shape[-1]), y.reshape(-1, shape[-1])):
        for own in (row, row.double()):
            found = vectors.walsh_hadamard(own).float()
            torch.testing.assert_close(found, image, rtol=0, atol=1e-5)


class Shared(torch.nn.Module):
    "An embedding that is read twice, a frozen layer, running averages, a counter."

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.body = torch.nn.Linear(4, 4).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(4)
        self.out = torch.nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))


def test_a_model_is_packed_told_of_and_put_back():
    "Own precision, ties, frozen weights and buffers come back as they were."
    net = Shared().to(torch.bfloat16)
    w, before = vectors.pack(net), {k: t.clone() for k, t in net.state_dict().items()}
    moves = {"embed.weight": 20, "norm.weight": 4, "norm.bias": 4}
    assert vectors.groups(net) == moves
    assert w.dtype == torch.float32 and len(w) == 28
    said = vectors.left_out(net)
    assert said["out.weight"] == "shared with embed.weight"
    assert said["body.weight"] == said["body.bias"] == "frozen"
    assert said["norm.running_var"] == said["scale"] == "a buffer"
    net.load_state_dict(vectors.unpack(net, w + 1), strict=False)
    assert net.out.weight is net.embed.weight
    assert net.out.weight.dtype == torch.bfloat16
    assert torch.equal(vectors.pack(net), (w + 1).bfloat16().float())
    for name in before.keys() - moves.keys() - {"out.weight"}:
        assert torch.equal(net.state_dict()[name], before[name])


def test_a_state_dict_is_packed_without_running_averages():
    net = Shared()
    state = net.state_dict()
    norm = {f"norm.{name}" for name in vectors.STATISTICS}
    assert vectors.left_out(state).keys() == {"out.weight"} | norm
    assert len(vectors.pack(state)) == 49  # `scale` cannot be told from a parameter
    named = dict(net.named_parameters())
    assert torch.equal(vectors.pack(named), vectors.pack(net))
