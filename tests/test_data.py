"data: counts, what a missing file says, partitions and their hash."
import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from laws import drawn

from dpcomm import data
from dpcomm.core import seed_tree

COUNTS = {"mnist": (60_000, 10_000, 1, 28), "fashion-mnist": (60_000, 10_000, 1, 28), "cifar10": (50_000, 10_000, 3, 32),
          "mnist-by-writer": (60_000, 10_000, 1, 28), "digits": (1_437, 360, 1, 28)}
FIRST_FILE = {"mnist": "train-images-idx3-ubyte", "fashion-mnist": "train-images-idx3-ubyte", "cifar10": "data_batch_1"}


def have(name: str) -> data.Dataset:
    "The data set from disk; a skip that says so where it is not there."
    try:
        return data.load(name, download=False)
    except FileNotFoundError as error:
        pytest.skip(f"NOT CHECKED, the data set {name} is not on this machine: {error}")


# ---- what is loaded

@pytest.mark.parametrize("name", COUNTS)
def test_counts_shapes_and_range(name):
    loaded = have(name)
    n, n_test, channels, side = COUNTS[name]
    assert loaded.name == name
    assert loaded.x.shape == (n, channels, side, side) and loaded.x_test.shape == (n_test, channels, side, side)
    assert loaded.x.dtype == loaded.x_test.dtype == torch.float32 and loaded.y.dtype == loaded.y_test.dtype == torch.int64
    for x, y in ((loaded.x, loaded.y), (loaded.x_test, loaded.y_test)):
        assert len(x) == len(y) and float(x.min()) == 0.0 and 0.9 < float(x.max()) <= 1.0
        assert sorted(set(y.tolist())) == list(range(10))
    if name in ("fashion-mnist", "cifar10"):
        assert (torch.bincount(loaded.y) == n // 10).all() and (torch.bincount(loaded.y_test) == n_test // 10).all()
    if name == "mnist":
        assert torch.bincount(loaded.y).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    if name == "mnist-by-writer":
        check_writers(loaded)
    else:
        assert loaded.writers is None


def check_writers(loaded: data.Dataset):
    "539 people, and each client holds the images of exactly one of them."
    parts = data.by_writer(loaded.writers)
    federation = data.Federation(loaded, parts, "by writer")
    assert len(parts) == 539
    assert (federation.sizes.min(), np.median(federation.sizes), federation.sizes.max()) == (19, 116, 131)
    people = [np.unique(loaded.writers[part]) for part in parts]
    assert all(len(p) == 1 for p in people) and len(np.unique(np.concatenate(people))) == 539
    classes = [len(np.unique(loaded.y[torch.from_numpy(part)])) for part in parts]
    assert np.median(classes) == 10 and min(classes) >= 5, "a writer wrote all the digits"


def test_digits_come_with_scikit_learn_and_never_change():
    first, again = data.load("digits"), data.load("digits", download=False)
    assert torch.equal(first.x, again.x) and torch.equal(first.y_test, again.y_test)
    assert torch.bincount(torch.cat([first.y, first.y_test])).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert first.y[:12].tolist() == [0, 3, 3, 8, 1, 0, 4, 0, 1, 4, 1, 8]


# ---- what is missing

@pytest.mark.parametrize("name", [name for name in COUNTS if name != "digits"])
def test_offline_and_missing_says_which_file_goes_where(name, tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        data.load(name, root=tmp_path, download=False)
    folder = {"mnist": "MNIST/raw", "fashion-mnist": "FashionMNIST/raw", "cifar10": "cifar-10-batches-py"}
    base = "mnist" if name == "mnist-by-writer" else name
    for part in (base, folder[base], FIRST_FILE[base], "DPCOMM_DATA"):
        assert part in str(error.value), f"the error does not name {part}"


def test_missing_writers_say_which_file_goes_where(tmp_path):
    root = data.data_root() / "MNIST"
    if not (root / "raw").is_dir():
        pytest.skip(f"NOT CHECKED, the data set mnist is not on this machine: {root.name}/raw is no folder under the data root")
    (tmp_path / "MNIST").symlink_to(root, target_is_directory=True)
    with pytest.raises(FileNotFoundError, match="qmnist-train-labels-idx2-int.gz.*QMNIST/raw.*DPCOMM_DATA"):
        data.load("mnist-by-writer", root=tmp_path, download=False)


@pytest.mark.parametrize("broken", [False, True], ids=["nothing there", "damaged files there"])
def test_offline_means_that_nothing_is_fetched(broken, tmp_path, monkeypatch):
    def never(*args, **more):
        raise AssertionError("a download was tried")
    monkeypatch.setattr("urllib.request.urlopen", never)
    if broken:
        (tmp_path / "FashionMNIST" / "raw").mkdir(parents=True)
        for kind in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
            (tmp_path / "FashionMNIST" / "raw" / f"{kind}-ubyte.gz").write_bytes(b"damaged")
    with pytest.raises(FileNotFoundError):
        data.load("fashion-mnist", root=tmp_path, download=False)


def test_an_unknown_data_set_is_named_with_its_nearest():
    with pytest.raises(ValueError, match="name is 'minst'.*mnist.*did you mean 'mnist'"):
        data.load("minst")
    assert set(data.names()) == set(COUNTS)


def test_the_root_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("DPCOMM_DATA", str(tmp_path))
    assert data.data_root() == tmp_path
    monkeypatch.delenv("DPCOMM_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data.data_root() == tmp_path / "cache" / "dpcomm"


# ---- partitions

BALANCED = np.repeat(np.arange(10), 5000)  # as many images as the paper's training split
SMALL = seed_tree(0, "labels").integers(0, 10, 400)


def covers(parts, n: int) -> bool:
    "Every image exactly once."
    return (np.sort(np.concatenate(parts)) == np.arange(n)).all()


def same(a, b) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b))


@drawn
@given(some.integers(1, 60), some.data())
def test_iid_covers_exactly_and_evenly(n, more):
    n_clients = more.draw(some.integers(1, n))
    parts = data.iid(n, n_clients, seed_tree(0))
    assert len(parts) == n_clients and covers(parts, n)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("alpha", [1e-3, 0.1, 1.0, 100.0])
@pytest.mark.parametrize("n_clients", [1, 4, 100, 400])
def test_dirichlet_equal_covers_exactly_in_equal_sizes(n_clients, alpha):
    parts = data.dirichlet_equal(SMALL, n_clients, alpha, seed_tree(1))
    assert len(parts) == n_clients and covers(parts, 400) and {len(p) for p in parts} == {400 // n_clients}


def skew(parts, labels) -> float:
    "Mean share of a client's most frequent class."
    return float(np.mean([np.bincount(labels[p]).max() / len(p) for p in parts]))


def test_alpha_sets_how_much_clients_differ():
    rules = [lambda a: data.dirichlet_equal(BALANCED, 50, a, seed_tree(0)), lambda a: data.dirichlet_dealt(BALANCED, 50, a, seed_tree(0))]
    for rule in rules:
        few, some_, many = (skew(rule(alpha), BALANCED) for alpha in (0.05, 1.0, 1000.0))
        assert few > 0.5 and few > some_ + 0.1 and some_ > many + 0.1 and many < 0.15


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_papers_spread_is_reached(seed):
    "Table 2: 100 clients, mean 500, standard deviation 73.10."
    parts = data.dirichlet_dealt(BALANCED, 100, 1.0, seed_tree(seed), spread=73.10)
    sizes = np.array([len(p) for p in parts])
    assert len(parts) == 100 and covers(parts, 50_000) and sizes.mean() == 500
    assert abs(sizes.std() - 73.10) <= 0.05
    assert 0.2 < skew(parts, BALANCED) < 0.45


def test_demand_never_hands_out_more_than_there_is():
    for seed in range(20):
        counts = data.demand(SMALL, 40, 0.1, seed_tree(seed))
        assert counts.shape == (40, 10) and (counts >= 0).all()
        assert (counts.sum(0) <= np.bincount(SMALL)).all()


def test_partitions_belong_to_their_stream():
    rules = [lambda r: data.iid(400, 10, r), lambda r: data.dirichlet_equal(SMALL, 10, 1.0, r), lambda r: data.dirichlet_dealt(SMALL, 10, 1.0, r)]
    for rule in rules:
        assert same(rule(seed_tree(0)), rule(seed_tree(0))) and not same(rule(seed_tree(0)), rule(seed_tree(1)))


def test_by_writer_makes_one_client_a_writer_in_order():
    parts = data.by_writer(np.array([7, 2, 7, 2, 9, 7]))
    assert [p.tolist() for p in parts] == [[1, 3], [0, 2, 5], [4]]


@pytest.mark.parametrize("call, message", [
    (lambda: data.iid(3, 4, seed_tree(0)), "n_clients is 4; it must be a whole number from 1 to 3"),
    (lambda: data.iid(3, 0, seed_tree(0)), "n_clients is 0"),
    (lambda: data.dirichlet_equal(SMALL, 7, 1.0, seed_tree(0)), "n_clients is 7; it must divide the 400 images"),
    (lambda: data.dirichlet_equal(SMALL, 401, 1.0, seed_tree(0)), "n_clients is 401"),
    (lambda: data.dirichlet_equal(SMALL, 10, 0.0, seed_tree(0)), "alpha is 0.0"),
    (lambda: data.dirichlet_dealt(SMALL, 401, 1.0, seed_tree(0)), "n_clients is 401"),
    (lambda: data.dirichlet_dealt(SMALL, 10, -1.0, seed_tree(0)), "alpha is -1.0"),
    (lambda: data.dirichlet_dealt(SMALL, 10, 1.0, seed_tree(0), spread=5000.0, tries=20), "spread is 5000.0; no draw of 20"),
    (lambda: data.check_partition([[0, 1], [1, 2]], 4), "each of 0..3 must appear exactly once"),
    (lambda: data.check_partition([[0, 1], [2]], 4), "exactly once"),
    (lambda: data.check_partition([[0, 1], [2, 4]], 4), "exactly once"),
    (lambda: data.check_partition([[0, 1], []], 2), "client 1 holds no image.*use fewer clients"),
])
def test_a_partition_that_cannot_be_made_says_why(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---- the hash

def of(*parts) -> str:
    return data.Federation(None, tuple(np.array(p) for p in parts), "by hand").partition_hash


def test_the_partition_hash_is_pinned():
    "Every committed result carries it."
    assert of([0, 2], [1]) == hashlib.sha256(np.array([2, 0, 2, 1, 1], "<i8").tobytes()).hexdigest()[:12] == "5898622a490e"
    parts = data.dirichlet_dealt(BALANCED, 100, 1.0, seed_tree(0, "partition"), spread=73.10)
    assert of(*parts) == "fd612770fecf"


def test_the_partition_hash_sees_every_change():
    partitions = [([0, 2], [1]), ([2, 0], [1]), ([1], [0, 2]), ([0], [2, 1]), ([0, 2, 1],), ([0], [2], [1]), ([0, 2], [1], []), ([0, 2], [3])]
    assert len({of(*p) for p in partitions}) == len(partitions)
    assert data.Federation(None, (np.array([0, 2], np.int32), [1]), "another rule").partition_hash == of([0, 2], [1])
