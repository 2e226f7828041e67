"""data: counts, what a missing file says, partitions and their hash, FEMNIST's two
formats, EMNIST's idx files.
"""

import gzip
import hashlib
import json
import os
import socket
import sys
import threading
import urllib.error
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import or_skip
from hypothesis import given
from hypothesis import strategies as some
from laws import drawn
from tables import tabled

from dpcomm.core.checks import NotInstalled
from dpcomm.core.random import seed_tree
from dpcomm.datasets import emnist, femnist, images, torchvision_files

COUNTS = {
    "mnist": (60_000, 10_000, 1, 28),
    "fashion-mnist": (60_000, 10_000, 1, 28),
    "cifar10": (50_000, 10_000, 3, 32),
    "mnist-by-writer": (60_000, 10_000, 1, 28),
    "digits": (1_437, 360, 1, 28),
}
MNIST = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
DIGITS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
FIRST_FILE = {
    "mnist": "train-images-idx3-ubyte",
    "fashion-mnist": "train-images-idx3-ubyte",
    "cifar10": "data_batch_1",
}


def have(name: str) -> images.Dataset:
    "The data set from disk; a skip that says so where it is not there."
    return or_skip(images.load, name, download=False)


# ---- what is loaded


@tabled("name", COUNTS)
def test_counts_shapes_and_range(name):
    loaded = have(name)
    *counts, channels, side = COUNTS[name]
    assert loaded.name == name
    splits = (loaded.x, loaded.y), (loaded.x_test, loaded.y_test)
    for (x, y), n in zip(splits, counts):
        assert x.shape == (n, channels, side, side) and y.shape == (n,)
        assert x.dtype == torch.float32 and y.dtype == torch.int64
        assert float(x.min()) == 0.0 and 0.9 < float(x.max()) <= 1.0
        assert sorted(set(y.tolist())) == list(range(10))
        if name in ("fashion-mnist", "cifar10"):
            assert (torch.bincount(y) == n // 10).all()
    if name == "mnist":
        assert torch.bincount(loaded.y).tolist() == MNIST
    if name == "mnist-by-writer":
        check_writers(loaded)
    else:
        assert loaded.writers is None


def check_writers(loaded: images.Dataset):
    "539 people, and each client holds the images of exactly one of them."
    parts = images.by_writer(loaded.writers)
    sizes = images.Federation(loaded, parts, "by writer").sizes
    assert (sizes.min(), np.median(sizes), sizes.max()) == (19, 116, 131)
    people = [np.unique(loaded.writers[part]) for part in parts]
    assert all(len(p) == 1 for p in people)
    assert len(parts) == len(np.unique(np.concatenate(people))) == 539
    classes = [len(np.unique(loaded.y[torch.from_numpy(part)])) for part in parts]
    assert np.median(classes) == 10 and min(classes) >= 5, "all digits are written"


def test_digits_come_with_scikit_learn_and_never_change():
    first, again = images.load("digits"), images.load("digits", download=False)
    assert torch.equal(first.x, again.x) and torch.equal(first.y_test, again.y_test)
    assert torch.bincount(torch.cat([first.y, first.y_test])).tolist() == DIGITS
    assert first.y[:12].tolist() == [0, 3, 3, 8, 1, 0, 4, 0, 1, 4, 1, 8]


# ---- what is missing


@tabled("name", [name for name in COUNTS if name != "digits"])
def test_offline_and_missing_says_which_file_goes_where(name, tmp_path, monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", None)  # nothing is fetched
    base = "mnist" if name == "mnist-by-writer" else name
    folder, first = torchvision_files.FILES[base][0], FIRST_FILE[base]
    for damaged in (False, True):
        if damaged:
            (tmp_path / folder).mkdir(parents=True)
            (tmp_path / folder / first).write_bytes(b"damaged")
        with pytest.raises(FileNotFoundError) as error:
            images.load(name, root=tmp_path, download=False)
        for part in (base, folder, first, "DPCOMM_DATA"):
            assert part in str(error.value), f"the error does not name {part}"
        if name != base:
            break


def test_missing_writers_say_which_file_goes_where(tmp_path):
    have("mnist")
    (tmp_path / "MNIST").symlink_to(images.data_root() / "MNIST", True)
    says = "qmnist-train-labels-idx2-int.gz.*QMNIST/raw.*DPCOMM_DATA"
    with pytest.raises(FileNotFoundError, match=says):
        images.load("mnist-by-writer", root=tmp_path, download=False)


def refuses(*_):
    raise urllib.error.URLError("no network")


@tabled("name", ["mnist", "fashion-mnist", "cifar10"])
def test_a_failed_download_leaves_nothing_and_says_what_to_do(
    name, tmp_path, monkeypatch
):
    monkeypatch.setattr("urllib.request.urlopen", refuses)
    folder, first = torchvision_files.FILES[name][0], FIRST_FILE[name]
    for before in ("no root", "an empty folder", "a damaged file"):
        root = tmp_path / name / before / "dpcomm"
        if before != "no root":
            (root / folder).mkdir(parents=True)
        if before == "a damaged file":
            (root / folder / first).write_bytes(b"damaged")
        there = sorted(tmp_path.rglob("*"))
        with pytest.raises(FileNotFoundError) as error:
            images.load(name, root=root)
        assert sorted(tmp_path.rglob("*")) == there, "something is left behind"
        assert str(error.value).startswith(f"{name} is not under the data root")
        for part in (f"dpcomm data DIR {name}", folder, first, "DPCOMM_DATA"):
            assert part in str(error.value)


class Mirror(BaseHTTPRequestHandler):
    "A mirror of one file, good or bad as the first word of the address says."

    content = b"the whole file" * 99

    def do_GET(self):
        kind = self.path.split("/")[1]
        if kind == "silent":
            self.server.over.wait(60)
            return
        if kind == "refuses":
            self.send_error(403)
            return
        sent = b"<html>please log in</html>" if kind == "page" else self.content
        self.send_response(200)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent[:100] if kind == "half" else sent)

    def log_message(self, *_):
        pass


@pytest.fixture
def mirror(monkeypatch):
    "Addresses of mirrors on loopback; one that is silent is waited for a moment."
    server = ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
    server.over = threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(torchvision_files, "PATIENCE", 0.5)
    for name in [n for n in os.environ if n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    yield lambda kind: f"http://127.0.0.1:{server.server_port}/{kind}/"
    server.over.set()
    server.shutdown()
    server.server_close()


class Set:
    "FashionMNIST as torchvision has it, with one file."

    resources, mirrors = [("train.gz", hashlib.md5(Mirror.content).hexdigest())], []

    def __init__(self, root, train, download):
        path = Path(root) / "FashionMNIST" / "raw" / "train.gz"
        if not path.is_file() or path.read_bytes() != Mirror.content:
            raise RuntimeError("Dataset not found")
        self.data, self.targets = np.zeros((3, 28, 28), np.uint8), np.arange(3)


@pytest.fixture
def fashion(monkeypatch):
    monkeypatch.setitem(images.COUNTS, "fashion-mnist", (3, 3))
    return lambda kind: monkeypatch.setattr("torchvision.datasets.FashionMNIST", kind)


HAPPENS = {
    "silent": "no answer in 0.5 s",
    "refuses": "it answered 403",
    "page": "a page came in the file's place",
    "half": "half a file came",
    "dead": "no network to it",
}


@pytest.mark.parametrize("kind", HAPPENS)
def test_a_bad_mirror_leaves_its_turn_to_the_next_or_says_what_it_did(
    kind, mirror, fashion, monkeypatch, tmp_path
):
    fashion(Set)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{nobody.getsockname()[1]}/"
        bad = dead if kind == "dead" else mirror(kind)
        monkeypatch.setattr(Set, "mirrors", [bad, bad])
        with pytest.raises(FileNotFoundError) as error:
            images.load("fashion-mnist", tmp_path / "bad")
        assert str(error.value).count(f"127.0.0.1: {HAPPENS[kind]}") == 2
        assert list(tmp_path.iterdir()) == []
        monkeypatch.setattr(Set, "mirrors", [bad, mirror("good")])
        assert len(images.load("fashion-mnist", tmp_path / "good").y) == 3


class Source:
    "What torchvision's class does when a network is there, with two files."

    asked = []

    def __init__(self, root, train, download):
        folder = Path(root) / "FashionMNIST" / "raw"
        files = [folder / "True", folder / "False"]
        if download:
            folder.mkdir(parents=True, exist_ok=True)
            for file in files:
                file.write_text("whole")
                Source.asked.append(file)
        if not all(file.is_file() and file.read_text() == "whole" for file in files):
            raise RuntimeError("Dataset not found")
        self.data, self.targets = np.zeros((3, 28, 28), np.uint8), np.arange(3)


@tabled("before", ["no root", "an empty folder", "a damaged file beside another's"])
def test_a_whole_download_moves_into_place_and_is_fetched_once(
    before, tmp_path, fashion
):
    fashion(Source)
    Source.asked.clear()
    root = tmp_path / before / "dpcomm"
    raw, there = root / "FashionMNIST" / "raw", {"True": "whole", "False": "whole"}
    if before != "no root":
        raw.mkdir(parents=True)
    if before.startswith("a damaged"):
        (raw / "True").write_text("half")
        (raw / "other").write_text("kept")
        there["other"] = "kept"
    first, fetched = images.load("fashion-mnist", root), len(Source.asked)
    again = images.load("fashion-mnist", root, download=False)
    assert len(first.y) == len(again.y) == 3 and fetched == len(Source.asked) > 0
    assert [path.name for path in root.iterdir()] == ["FashionMNIST"]
    assert {path.name: path.read_text() for path in raw.iterdir()} == there


def test_the_root_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("DPCOMM_DATA", str(tmp_path))
    assert images.data_root() == tmp_path
    monkeypatch.delenv("DPCOMM_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert images.data_root() == tmp_path / "cache" / "dpcomm"


# ---- partitions

BALANCED = np.repeat(np.arange(10), 5000)  # as many as the paper's training split
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
    parts = images.iid(n, n_clients, seed_tree(0))
    assert len(parts) == n_clients and covers(parts, n)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@tabled("n_clients, alpha", [(1, 0.1), (4, 1e-3), (100, 1.0), (400, 100.0), (80, 1e-3)])
def test_dirichlet_equal_covers_exactly_in_equal_sizes(n_clients, alpha):
    parts = images.dirichlet_equal(SMALL, n_clients, alpha, seed_tree(1))
    assert len(parts) == n_clients and covers(parts, 400)
    assert {len(p) for p in parts} == {400 // n_clients}


def skew(parts, labels) -> float:
    "Mean share of a client's most frequent class."
    return float(np.mean([np.bincount(labels[p]).max() / len(p) for p in parts]))


@tabled("rule", [images.dirichlet_equal, images.dirichlet_dealt])
def test_alpha_sets_how_much_clients_differ(rule):
    few, one, many = (
        skew(rule(BALANCED, 50, alpha, seed_tree(0)), BALANCED)
        for alpha in (0.05, 1.0, 1000.0)
    )
    assert few > 0.5 and few > one + 0.1 and one > many + 0.1 and many < 0.15


def test_the_papers_spread_is_reached():
    "Table 2: 100 clients, mean 500, standard deviation 73.10; its hash is recorded."
    rng = seed_tree(0, "partition")
    parts = images.dirichlet_dealt(BALANCED, 100, 1.0, rng, spread=73.10)
    sizes = np.array([len(p) for p in parts])
    assert len(parts) == 100 and covers(parts, 50_000) and sizes.mean() == 500
    assert abs(sizes.std() - 73.10) <= 0.05 and 0.2 < skew(parts, BALANCED) < 0.45
    assert of(*parts) == "fd612770fecf"


@tabled(
    "rule",
    [
        lambda r: images.iid(400, 10, r),
        lambda r: images.dirichlet_equal(SMALL, 10, 1.0, r),
        lambda r: images.dirichlet_dealt(SMALL, 10, 1.0, r),
    ],
)
def test_partitions_belong_to_their_stream(rule):
    assert same(rule(seed_tree(0)), rule(seed_tree(0)))
    assert not same(rule(seed_tree(0)), rule(seed_tree(1)))


def test_by_writer_makes_one_client_a_writer_in_order():
    parts = images.by_writer(np.array([7, 2, 7, 2, 9, 7]))
    assert [p.tolist() for p in parts] == [[1, 3], [0, 2, 5], [4]]


def equal(n_clients, alpha):
    return images.dirichlet_equal(SMALL, n_clients, alpha, seed_tree(0))


def dealt(n_clients, alpha, **more):
    return images.dirichlet_dealt(SMALL, n_clients, alpha, seed_tree(0), **more)


check_partition, once = images.check_partition, "each of 0..3 must appear exactly once"


@tabled(
    "call, message",
    [
        (lambda: images.iid(3, 4, seed_tree(0)), "n_clients is 4; .* from 1 to 3"),
        (lambda: equal(7, 1.0), "n_clients is 7; it must divide the 400 images"),
        (lambda: equal(10, 0.0), "alpha is 0.0"),
        (
            lambda: dealt(10, 1.0, spread=5e3, tries=9),
            "spread is 5000.0; none of 9 draws",
        ),
        (lambda: check_partition([[0, 1], [1, 2]], 4), once),
        (lambda: check_partition([[0, 1], [2]], 4), once),
        (lambda: check_partition([[0, 1], [2, 4]], 4), once),
        (lambda: check_partition([[0, 1], []], 2), "1 has no image.*use fewer"),
        (lambda: images.load("minst"), "'minst'.*mnist.*did you mean 'mnist'"),
        (lambda: emnist.emnist("leters"), "'leters'; .* did you mean 'letters'"),
    ],
)
def test_what_cannot_be_made_says_why(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    assert set(images.names()) == set(COUNTS)


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


def test_the_partition_hash_sees_every_change():
    partitions = [([0, 2], [1]), ([2, 0], [1]), ([1], [0, 2]), ([0], [2, 1])]
    partitions += [([0, 2, 1],), ([0], [2], [1]), ([0, 2], [1], []), ([0, 2], [3])]
    assert len({of(*p) for p in partitions}) == len(partitions)


# ---- FEMNIST

USERS = [f"f{i:04d}_{i % 7:02d}" for i in range(20)]


def written(root, users=USERS, split="train", file="all_data_0.json", change=None):
    "LEAF's json for made users; `change` damages the file and its user 3 before."
    rng, content = seed_tree(0, split, file), {}
    for i, user in enumerate(users):
        x, y = rng.random((3 + i % 4, 784)).round(4), rng.integers(0, 62, 3 + i % 4)
        content[user] = {"x": x.tolist(), "y": y.tolist()}
    sizes = [len(entry["y"]) for entry in content.values()]
    content = {"users": list(users), "num_samples": sizes, "user_data": content}
    if change:
        change(content, content["user_data"][users[3]])
    path = root / "femnist" / split / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return content["user_data"]


def test_leaf_files_become_a_federation_of_users(tmp_path):
    everyone = written(tmp_path, USERS[:12], file="a.json")
    everyone |= written(tmp_path, USERS[12:], file="b.json")
    test = written(tmp_path, split="test")
    found = femnist.femnist(tmp_path, whole=False)
    x, y = found.data.x, found.data.y
    assert found.data.name == "femnist" and len(found.parts) == 20
    assert "leaf" in found.rule and x.dtype == torch.float32 and y.dtype == torch.int64
    assert x.shape == (found.sizes.sum(), 1, 28, 28)
    for user, part in zip(USERS, found.parts):
        assert torch.equal(x[part].flatten(1), torch.tensor(everyone[user]["x"]))
        assert y[part].tolist() == everyone[user]["y"]
    assert same(found.parts, images.by_writer(found.data.writers))
    assert found.data.y_test.tolist() == [y for u in USERS for y in test[u]["y"]]
    assert set(femnist.read_leaf(tmp_path / "femnist" / "train")) == set(USERS)


def test_femnists_counts_are_asserted_unless_it_is_a_part(tmp_path):
    written(tmp_path)
    written(tmp_path, split="test")
    says = r"\(leaf\) has 20 clients with 4.50 .* has 3500 with 201.6 .*whole=False"
    with pytest.raises(ValueError, match=says):
        femnist.femnist(tmp_path)
    leaf = (3_500, 201.60, 78.92)
    assert femnist.WHOLE["leaf"] == leaf, "DP-REC's Table 2; I-MVU's Section 4.2"
    assert femnist.WHOLE["tff"][:2] == (3_400, round(671_585 / 3_400, 2))


DAMAGES = [
    (lambda c, e: e["y"].pop(), "U, has 6 images, 5 labels and declares 6; .* equal"),
    (
        lambda c, e: e["y"].__setitem__(0, 62),
        "U, has the label 62; labels must be whole numbers from 0 to 61.*62-class",
    ),
    (
        lambda c, e: e["x"][0].__setitem__(5, 255),
        r"U, has pixels from .* to 255.*\[0, 1\].*divide them by 255",
    ),
    (
        lambda c, e: c["users"].__setitem__(1, USERS[0]),
        "user 'f0000_00', appears twice in the files.*remove one",
    ),
]


@tabled("change, message", DAMAGES)
def test_malformed_leaf_files_name_file_user_and_fix(change, message, tmp_path):
    written(tmp_path, change=change)
    with pytest.raises(ValueError, match=message.replace("U,", "user 'f0003_03',")):
        femnist.read_leaf(tmp_path / "femnist" / "train")


def test_a_damaged_json_file_and_an_empty_split_are_named(tmp_path):
    says = "femnist/train and femnist/test.*fed_emnist_train.h5.*DPCOMM_DATA"
    with pytest.raises(FileNotFoundError, match=says):
        femnist.femnist(tmp_path)
    written(tmp_path)
    says = "test split has no users.*put its files in the same folder"
    with pytest.raises(ValueError, match=says):
        femnist.femnist(tmp_path, whole=False)
    for text, says in (
        ('{"users": [', "cut.json is not valid JSON .*download it again"),
        ("[1]", "cut.json has no 'users'"),
    ):
        (tmp_path / "femnist" / "train" / "cut.json").write_text(text)
        with pytest.raises(ValueError, match=says):
            femnist.femnist(tmp_path, whole=False)


def test_tff_groups_become_the_same_federation(tmp_path, monkeypatch):
    folder = tmp_path / "femnist"
    folder.mkdir()
    train, rng, kept = folder / "fed_emnist_train.h5", seed_tree(0, "tff"), {}
    train.write_bytes(b"")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "h5py", None)
        says = "h5py is .* the extra run .*, or use LEAF's json .* fed_emnist_train.h5"
        with pytest.raises(NotInstalled, match=says):
            femnist.femnist(tmp_path)
    h5py = pytest.importorskip("h5py", reason="NOT CHECKED: h5py is not installed")
    for split, n in (("train", 5), ("test", 2)):
        with h5py.File(folder / f"fed_emnist_{split}.h5", "w") as file:
            for user in USERS:
                kept[split, user] = rng.random((n, 28, 28), dtype=np.float32)
                file[f"examples/{user}/pixels"] = kept[split, user]
                file[f"examples/{user}/label"] = rng.integers(0, 62, n, dtype=np.int32)
    found = femnist.femnist(tmp_path, whole=False)
    assert len(found.parts) == 20 and (found.sizes == 5).all() and "tff" in found.rule
    assert found.data.x_test.shape == (40, 1, 28, 28)
    own = found.data.x[torch.from_numpy(found.parts[4])][:, 0]
    assert torch.equal(own, torch.from_numpy(kept["train", USERS[4]]))
    for place, value, says in (
        ("f0002_02/label", [62] * 5, "user 'f0002_02', has the label .*62"),
        ("f0000_00/pixels", None, "user 'f0000_00', has no pixels and label"),
        ("", None, "fed_emnist_train.h5 has no group 'examples'"),
    ):
        with h5py.File(train, "a") as file:
            del file[f"examples/{place}"]
            if value:
                file[f"examples/{place}"] = value
        with pytest.raises(ValueError, match=says):
            femnist.read_tff(train)


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
    assert "3 clients held out" in held.rule and same(held.parts, hold_out(3, 0).parts)
    assert len({hold_out(3, 0, i).partition_hash for i in range(9)}) > 3
    for bad in (0, 8):
        with pytest.raises(ValueError, match=f"n_test is {bad}; .* from 1 to 7"):
            hold_out(bad, 0)


# ---- EMNIST

EMNIST = {
    "mnist": (10, 60_000, 10_000),
    "digits": (10, 240_000, 40_000),
    "letters": (26, 124_800, 20_800),
    "balanced": (47, 112_800, 18_800),
}
KINDS = {"images": "images-idx3", "labels": "labels-idx1"}


def idx(array) -> bytes:
    "The bytes of an idx file, written out axis by axis."
    sizes = b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


def made_emnist(root, split="letters", packed=True, change=None):
    "A made split as NIST stores it, columns first; `change` damages its training part."
    first, rng, kept = int(split == "letters"), seed_tree(0, split), {}
    raw = root / "EMNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for part, n in (("train", 5), ("test", 3)):
        pixels = rng.integers(0, 256, (n, 28, 28))
        labels = rng.integers(first, first + EMNIST[split][0], n)
        kept[part] = pixels, labels.copy()
        content = {"images": pixels.transpose(0, 2, 1), "labels": labels}
        if change and part == "train":
            change(content)
        for kind, array in content.items():
            name = f"emnist-{split}-{part}-{KINDS[kind]}-ubyte"
            pack = gzip.compress if packed else bytes
            (raw / f"{name}{'.gz' * packed}").write_bytes(pack(idx(array)))
    return kept


def test_emnists_splits_and_their_counts():
    "The data set's own summary: four balanced splits of these totals."
    assert emnist.EMNIST == EMNIST
    totals = [n + n_test for _, n, n_test in EMNIST.values()]
    assert totals == [70_000, 280_000, 145_600, 131_600]
    assert all(n % k == n_test % k == 0 for k, n, n_test in EMNIST.values())


@tabled("split, packed", [*zip(EMNIST, [True, False] * 2), ("letters", False)])
def test_emnist_comes_upright_and_labelled_from_zero(split, packed, tmp_path):
    made = made_emnist(tmp_path / f"{packed}", split, packed)
    loaded = emnist.emnist(split, tmp_path / f"{packed}", whole=False)
    assert loaded.name == f"emnist-{split}" and loaded.writers is None
    splits = (loaded.x, loaded.y), (loaded.x_test, loaded.y_test)
    for (x, y), (pixels, labels) in zip(splits, made.values()):
        assert x.dtype == torch.float32 and y.dtype == torch.int64 and x.is_contiguous()
        assert torch.equal(x[:, 0], torch.from_numpy(pixels).float() / 255)
        assert y.tolist() == (labels - (split == "letters")).tolist()


@pytest.mark.parametrize("split", EMNIST)
def test_a_whole_emnist_split_has_its_counts(split):
    loaded = or_skip(emnist.emnist, split)
    classes, n, n_test = EMNIST[split]
    assert (len(loaded.y), len(loaded.y_test)) == (n, n_test)
    assert torch.bincount(loaded.y).tolist() == [n // classes] * classes


def test_a_part_of_emnist_is_not_taken_for_the_whole(tmp_path, monkeypatch):
    made_emnist(tmp_path, "digits")
    says = r"emnist-digits has 5 \+ 3 images; .* has 240000 \+ 40000: .*whole=False"
    with pytest.raises(ValueError, match=says):
        emnist.emnist("digits", tmp_path)
    monkeypatch.setitem(emnist.EMNIST, "digits", (10, 5, 3))
    assert len(emnist.emnist("digits", tmp_path).y) == 5


def test_absent_emnist_says_which_file_goes_where(tmp_path, monkeypatch):
    made_emnist(tmp_path)
    for path in sorted((tmp_path / "EMNIST" / "raw").iterdir()):
        content = path.read_bytes()
        path.unlink()
        says = f"put {path.name} .*EMNIST/raw.*DPCOMM_DATA"
        with pytest.raises(FileNotFoundError, match=says):
            emnist.emnist("letters", tmp_path, whole=False)
        path.write_bytes(content)
    monkeypatch.setenv("DPCOMM_DATA", str(tmp_path / "empty"))
    with pytest.raises(FileNotFoundError, match="emnist-mnist-train-images-idx3"):
        emnist.emnist()


def label(value):
    return lambda c: c["labels"].__setitem__(0, value)


@tabled(
    "split, change, message",
    [
        (
            "letters",
            label(0),
            "emnist-letters-train has labels from 0 to .* 1 to 26: .* files of one split",
        ),
        ("letters", label(27), "labels from .* to 27; they must be from 1 to 26"),
        ("mnist", label(10), "-mnist-train has labels from .* to 10; .* from 0 to 9"),
        (
            "balanced",
            lambda c: c.update(labels=c["labels"][1:]),
            r"images \(5, 28, 28\) and labels \(4,\)",
        ),
        (
            "digits",
            lambda c: c.update(images=c["images"][:, 1:]),
            r"images \(5, 27, 28\) .*must be \(n, 28, 28\)",
        ),
        (
            "digits",
            lambda c: c.update(images=c["images"][:0], labels=c["labels"][:0]),
            "emnist-digits-train has labels none",
        ),
    ],
)
def test_unfitting_emnist_files_are_refused(split, change, message, tmp_path):
    made_emnist(tmp_path, split, change=change)
    with pytest.raises(ValueError, match=message):
        emnist.emnist(split, tmp_path, whole=False)


@tabled("shape", [(), (0,), (3,), (2, 3), (2, 3, 4)])
def test_idx_files_come_back_as_written(shape, tmp_path):
    array = seed_tree(0, "idx", len(shape)).integers(0, 256, shape).astype(np.uint8)
    (tmp_path / "a").write_bytes(idx(array))
    (tmp_path / "a.gz").write_bytes(gzip.compress(idx(array)))
    for name in ("a", "a.gz"):
        read = emnist.read_idx(tmp_path / name)
        assert read.shape == shape and read.dtype == np.uint8
        assert np.array_equal(read, array)


def test_mnist_read_through_the_same_reader():
    "Against torchvision, on the images that are on this machine."
    loaded = have("mnist")
    raw = images.data_root() / "MNIST" / "raw"
    found = min(raw.glob("t10k-images-idx3-ubyte*"))
    read = torch.from_numpy(emnist.read_idx(found)).float() / 255
    assert torch.equal(read, loaded.x_test[:, 0])


SIX, PACKED = idx(np.zeros((2, 3))), "a.gz cannot be unpacked"


@tabled(
    "name, content, message",
    [
        (
            "a",
            SIX[:-1],
            r"a declares the shape \(2, 3\) and has 5 entries; .* download it aga",
        ),
        ("a", b"\0\0\x08\x03\0\0\0\x01", "two zeros, 8 and the number of axes"),
        ("a.gz", b"plain", f"{PACKED} .*download it again"),
        ("a.gz", gzip.compress(SIX)[:-4], PACKED),
    ],
)
def test_damaged_idx_files_are_named(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        emnist.read_idx(tmp_path / name)
