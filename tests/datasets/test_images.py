"""data: counts, what a missing file says, partitions and their hash, FEMNIST, EMNIST."""

import dataclasses
import hashlib

import numpy as np
import pytest
import torch
from conftest import or_skip
from hypothesis import given
from hypothesis import strategies as some
from laws import drawn
from tables import tabled

from dpcomm.core.random import seed_tree
from dpcomm.datasets import images
from dpcomm.datasets.catalogue import CATALOGUE

DIGITS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


# ---- what is loaded


@tabled("name", images.SETS)
def test_what_is_here_is_the_published_set(name):
    loaded = or_skip(images.load, name, download=False)
    assert loaded.content_hash == images.SETS[name][2]
    assert (loaded.writers is None) == (name != "mnist-by-writer")


def test_digits_come_with_scikit_learn_and_never_change():
    first, again = images.load("digits"), images.load("digits", download=False)
    assert torch.equal(first.x, again.x) and torch.equal(first.y_test, again.y_test)
    assert first.x.shape == (1437, 1, 28, 28) and first.x.dtype == torch.float32
    assert float(first.x.min()) == 0.0 and 0.9 < float(first.x.max()) <= 1.0
    assert torch.bincount(torch.cat([first.y, first.y_test])).tolist() == DIGITS
    assert first.y[:12].tolist() == [0, 3, 3, 8, 1, 0, 4, 0, 1, 4, 1, 8]


# ---- what is missing


@tabled("name", images.SETS)
def test_offline_and_missing_says_what_to_do(name, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{name} is not under.*DPCOMM_DATA"):
        images.load(name, root=tmp_path, download=False)


@tabled("content", [b"", b"<html>not found</html>", b"\0\0\x08\1\0\0\0\5\1"])
def test_damaged_files_are_not_called_missing(content, tmp_path):
    for folder, name in ("MNIST", "{}"), ("EMNIST", "emnist-mnist-{}"):
        raw = tmp_path / folder / "raw"
        raw.mkdir(parents=True)
        for part in "train", "t10k", "test":
            for kind in "images-idx3", "labels-idx1":
                file = raw / f"{name.format(part)}-{kind}-ubyte"
                file.write_bytes(content)
    with pytest.raises(ValueError, match="are damaged or incomplete: delete .*/MNIST"):
        images.load("mnist", tmp_path, download=False)
    with pytest.raises(ValueError, match="are damaged or incomplete: delete .*/EMN"):
        images.emnist(tmp_path)


def test_the_root_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("DPCOMM_DATA", str(tmp_path))
    assert images.data_root() == tmp_path
    monkeypatch.delenv("DPCOMM_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert images.data_root() == tmp_path / "cache" / "dpcomm"


def test_what_is_said_to_be_fetched_can_be():
    fetched = {name for name, *_, source in CATALOGUE if source == "fetched"}
    assert fetched <= {*images.names()}


# ---- partitions

BALANCED = np.repeat(np.arange(10), 5000)  # as many as the paper's training split
SMALL = seed_tree(0, "labels").integers(0, 10, 400)


def covers(parts, n: int) -> bool:
    "Every image exactly once."
    return (np.sort(np.concatenate(parts)) == np.arange(n)).all()


@drawn
@given(some.integers(1, 60), some.data())
def test_iid_covers_exactly_and_evenly(n, more):
    n_clients = more.draw(some.integers(1, n))
    parts = images.iid(n, n_clients, seed_tree(0))
    assert len(parts) == n_clients and covers(parts, n)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@tabled("n_clients, alpha", [(1, 0.1), (4, 1e-3), (100, 1.0), (400, 100.0), (80, 1e-3)])
def test_dirichlet_equal_covers_exactly_in_equal_sizes(n_clients, alpha):
    parts = images.dirichlet_equal(SMALL, n_clients, alpha, seed_tree(1))
    assert len(parts) == n_clients and covers(parts, 400)
    assert {len(p) for p in parts} == {400 // n_clients}


def test_the_papers_partition_is_the_recorded_one():
    rng = seed_tree(0, "partition")
    parts = images.dirichlet_dealt(BALANCED, 100, 1.0, rng, spread=73.10)
    assert covers(parts, 50_000) and of(*parts) == "fd612770fecf"


def test_partitions_belong_to_their_stream():
    for rule in (
        lambda r: images.iid(400, 10, r),
        lambda r: images.dirichlet_equal(SMALL, 10, 1.0, r),
        lambda r: images.dirichlet_dealt(SMALL, 10, 1.0, r),
    ):
        first, again, other = (of(*rule(seed_tree(seed))) for seed in (0, 0, 1))
        assert first == again != other


# ---- the hash


def of(*parts) -> str:
    parts = tuple(np.array(p) for p in parts)
    return images.Federation(None, parts, "by hand").partition_hash


def test_the_partition_hash_is_pinned():
    "Every committed result carries it."
    raw = np.array([2, 0, 2, 1, 1], "<i8").tobytes()
    assert of([0, 2], [1]) == hashlib.sha256(raw).hexdigest()[:12] == "5898622a490e"
    other = images.Federation(None, (np.array([0, 2], np.int32), [1]), "another rule")
    assert other.partition_hash == of([0, 2], [1])
    changed = [([2, 0], [1]), ([1], [0, 2]), ([0, 2, 1],), ([0, 2], [1], [])]
    assert len({of([0, 2], [1]), *(of(*parts) for parts in changed)}) == 5


# ---- FEMNIST

USERS = [f"f{i:04d}_{i % 7:02d}" for i in range(20)]


def test_tff_groups_become_a_federation_of_users(tmp_path):
    h5py = pytest.importorskip("h5py", reason="NOT CHECKED: h5py is not installed")
    folder, rng, kept = tmp_path / "femnist", seed_tree(0, "tff"), {}
    with pytest.raises(FileNotFoundError, match="put fed_emnist_train.h5 .* into"):
        images.femnist(tmp_path)
    folder.mkdir()
    for split, n in (("train", 5), ("test", 2)):
        with h5py.File(folder / f"fed_emnist_{split}.h5", "w") as file:
            for user in USERS:
                kept[split, user] = rng.random((n, 28, 28), dtype=np.float32)
                file[f"examples/{user}/pixels"] = kept[split, user]
                file[f"examples/{user}/label"] = rng.integers(0, 62, n, dtype=np.int32)
    made = images.femnist(tmp_path, whole=False)
    assert len(made.parts) == 20 and (made.sizes == 5).all() and "tff" in made.rule
    assert made.data.x_test.shape == (40, 1, 28, 28)
    images_of = made.data.x[torch.from_numpy(made.parts[4])][:, 0]
    assert torch.equal(images_of, torch.from_numpy(kept["train", USERS[4]]))
    with pytest.raises(
        ValueError, match="20 clients with 5.00 images; .* has 3400 with"
    ):
        images.femnist(tmp_path)


def test_hold_out_keeps_whole_clients_apart():
    x = torch.arange(40.0).view(40, 1, 1, 1).expand(40, 1, 28, 28)
    y = torch.arange(40) % 10
    data = images.Dataset("made", x, y, x[:1], y[:1])
    parts = tuple(np.array_split(np.arange(40), 8))
    federation = images.Federation(data, parts, "made")

    def hold_out(n, *seed):
        return images.hold_out_clients(federation, n, seed_tree(*seed))

    held = hold_out(3, 0)
    train = np.concatenate(held.parts)
    test = held.data.x_test[:, 0, 0, 0].long().numpy()
    assert len(held.parts) == 5 and len(test) == 15 and held.data.x is x
    assert set(train) | set(test) == set(range(40)) and not set(train) & set(test)
    assert torch.equal(held.data.y_test, y[torch.from_numpy(test)])
    assert "3 clients held out" in held.rule
    assert held.partition_hash == hold_out(3, 0).partition_hash
    assert len({hold_out(3, 0, i).partition_hash for i in range(9)}) > 3


# ---- EMNIST


def test_emnist_comes_upright(tmp_path, monkeypatch):
    folder = tmp_path / "EMNIST" / "raw"
    with pytest.raises(FileNotFoundError, match="put emnist-mnist.* into .*EMNIST/raw"):
        images.emnist(tmp_path)
    folder.mkdir(parents=True)
    digit = np.zeros((2, 28, 28), np.uint8)
    digit[0, 4:24, 8] = digit[0, 23, 8:18] = 255  # upright; the file: columns first
    parts = {"images-idx3": digit.transpose(0, 2, 1), "labels-idx1": np.uint8([7, 1])}
    for kind, array in parts.items():
        head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
        for split in ("train", "test"):
            file = folder / f"emnist-mnist-{split}-{kind}-ubyte"
            file.write_bytes(head + array.tobytes())
    with pytest.raises(ValueError, match="has \\(2, 2\\) images of \\(60000, 10000"):
        images.emnist(tmp_path)
    monkeypatch.setattr(images, "EMNIST", (2, 2))
    made = images.emnist(tmp_path)
    assert torch.equal(made.x[0, 0] * 255, torch.from_numpy(digit[0]).float())
    assert made.y.tolist() == [7, 1] == made.y_test.tolist()


# ---- what a record is made on


def test_an_altered_data_set_is_noticed(monkeypatch):
    or_skip(images.load, "mnist", download=False)
    changed = (*images.SETS["mnist"][:2], "0" * 12)
    monkeypatch.setitem(images.SETS, "mnist", changed)
    with pytest.raises(ValueError, match="the hash 3c062e76f7aa; the published"):
        images.load("mnist", download=False)


def test_the_content_hash_sees_every_change_and_no_other():
    digits = images.load("digits")
    x, y = digits.x.clone(), digits.y_test.clone()
    x[5, 0, 14, 14] += 1 / 256
    y[0] = (y[0] + 1) % 10
    changes = [dict(), dict(x=x), dict(y_test=y), dict(x=digits.x.double())]
    changes += [dict(x=digits.x[:-1]), dict(x=digits.x.reshape(-1, 1, 14, 56))]
    seen = [dataclasses.replace(digits, **change).content_hash for change in changes]
    assert len({*seen}) == len(seen)
    renamed = dataclasses.replace(digits, name="other", x=digits.x.clone())
    assert renamed.content_hash == digits.content_hash
