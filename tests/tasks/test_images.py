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
import types
import urllib.error
from http.client import IncompleteRead
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

from dpcomm.core.chance import seed_tree
from dpcomm.tasks import images

COUNTS = {
    "mnist": (60_000, 10_000, 1, 28),
    "fashion-mnist": (60_000, 10_000, 1, 28),
    "cifar10": (50_000, 10_000, 3, 32),
    "mnist-by-writer": (60_000, 10_000, 1, 28),
    "digits": (1_437, 360, 1, 28),
}
FIRST_FILE = {
    "mnist": "train-images-idx3-ubyte",
    "fashion-mnist": "train-images-idx3-ubyte",
    "cifar10": "data_batch_1",
}


def have(name: str) -> images.Dataset:
    "The data set from disk; a skip that says so where it is not there."
    return or_skip(images.load, name, download=False)


# ---- what is loaded


@pytest.mark.parametrize("name", COUNTS)
def test_counts_shapes_and_range(name):
    loaded = have(name)
    n, n_test, channels, side = COUNTS[name]
    assert loaded.name == name
    assert loaded.x.shape == (n, channels, side, side) and loaded.x_test.shape == (
        n_test,
        channels,
        side,
        side,
    )
    assert (
        loaded.x.dtype == loaded.x_test.dtype == torch.float32
        and loaded.y.dtype == loaded.y_test.dtype == torch.int64
    )
    for x, y in ((loaded.x, loaded.y), (loaded.x_test, loaded.y_test)):
        assert (
            len(x) == len(y) and float(x.min()) == 0.0 and 0.9 < float(x.max()) <= 1.0
        )
        assert sorted(set(y.tolist())) == list(range(10))
    if name in ("fashion-mnist", "cifar10"):
        assert (torch.bincount(loaded.y) == n // 10).all() and (
            torch.bincount(loaded.y_test) == n_test // 10
        ).all()
    if name == "mnist":
        assert torch.bincount(loaded.y).tolist() == [
            5923,
            6742,
            5958,
            6131,
            5842,
            5421,
            5918,
            6265,
            5851,
            5949,
        ]
    if name == "mnist-by-writer":
        check_writers(loaded)
    else:
        assert loaded.writers is None


def check_writers(loaded: images.Dataset):
    "539 people, and each client holds the images of exactly one of them."
    parts = images.by_writer(loaded.writers)
    federation = images.Federation(loaded, parts, "by writer")
    assert len(parts) == 539
    assert (
        federation.sizes.min(),
        np.median(federation.sizes),
        federation.sizes.max(),
    ) == (19, 116, 131)
    people = [np.unique(loaded.writers[part]) for part in parts]
    assert (
        all(len(p) == 1 for p in people)
        and len(np.unique(np.concatenate(people))) == 539
    )
    classes = [len(np.unique(loaded.y[torch.from_numpy(part)])) for part in parts]
    assert np.median(classes) == 10 and min(classes) >= 5, (
        "a writer wrote all the digits"
    )


def test_digits_come_with_scikit_learn_and_never_change():
    first, again = images.load("digits"), images.load("digits", download=False)
    assert torch.equal(first.x, again.x) and torch.equal(first.y_test, again.y_test)
    assert torch.bincount(torch.cat([first.y, first.y_test])).tolist() == [
        178,
        182,
        177,
        183,
        181,
        182,
        181,
        179,
        174,
        180,
    ]
    assert first.y[:12].tolist() == [0, 3, 3, 8, 1, 0, 4, 0, 1, 4, 1, 8]


# ---- what is missing


@pytest.mark.parametrize("name", [name for name in COUNTS if name != "digits"])
def test_offline_and_missing_says_which_file_goes_where(name, tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        images.load(name, root=tmp_path, download=False)
    folder = {
        "mnist": "MNIST/raw",
        "fashion-mnist": "FashionMNIST/raw",
        "cifar10": "cifar-10-batches-py",
    }
    base = "mnist" if name == "mnist-by-writer" else name
    for part in (base, folder[base], FIRST_FILE[base], "DPCOMM_DATA"):
        assert part in str(error.value), f"the error does not name {part}"


def test_missing_writers_say_which_file_goes_where(tmp_path):
    have("mnist")
    (tmp_path / "MNIST").symlink_to(
        images.data_root() / "MNIST", target_is_directory=True
    )
    with pytest.raises(
        FileNotFoundError,
        match="qmnist-train-labels-idx2-int.gz.*QMNIST/raw.*DPCOMM_DATA",
    ):
        images.load("mnist-by-writer", root=tmp_path, download=False)


@pytest.mark.parametrize(
    "broken", [False, True], ids=["nothing there", "damaged files there"]
)
def test_offline_means_that_nothing_is_fetched(broken, tmp_path, monkeypatch):
    def never(*args, **more):
        raise AssertionError("a download was tried")

    monkeypatch.setattr("urllib.request.urlopen", never)
    if broken:
        (tmp_path / "FashionMNIST" / "raw").mkdir(parents=True)
        for kind in (
            "train-images-idx3",
            "train-labels-idx1",
            "t10k-images-idx3",
            "t10k-labels-idx1",
        ):
            (tmp_path / "FashionMNIST" / "raw" / f"{kind}-ubyte.gz").write_bytes(
                b"damaged"
            )
    with pytest.raises(FileNotFoundError):
        images.load("fashion-mnist", root=tmp_path, download=False)


class Broken:
    """A connection that ends after the first bytes, or brings other bytes than were
    asked for.
    """

    length, url = None, "http://127.0.0.1/file"

    def __init__(self, content: bytes, error: Exception | None):
        self.content, self.error = [content], error

    def read(self, _):
        if self.content:
            return self.content.pop()
        if self.error:
            raise self.error
        return b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def refuses(*_):
    raise urllib.error.URLError("no network")


FAILURES = {
    "no network": refuses,
    "cut off": lambda *_: Broken(b"half", ConnectionResetError("cut off")),
    "cut off in a chunk": lambda *_: Broken(b"half", IncompleteRead(b"half")),
    "another file": lambda *_: Broken(b"<html>", None),
}


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
@pytest.mark.parametrize(
    "before", ["no root", "an empty root", "an empty folder", "a damaged file"]
)
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_download_leaves_nothing_and_says_what_to_do(
    name, before, failure, tmp_path, monkeypatch
):
    monkeypatch.setattr("urllib.request.urlopen", FAILURES[failure])
    root, folder = tmp_path / "cache" / "dpcomm", images.FILES[name][0]
    if before != "no root":
        (root / ("" if before == "an empty root" else folder)).mkdir(parents=True)
    if before == "a damaged file":
        (root / folder / FIRST_FILE[name]).write_bytes(b"damaged")
    there = sorted(tmp_path.rglob("*"))
    with pytest.raises(FileNotFoundError) as error:
        images.load(name, root=root)
    assert sorted(tmp_path.rglob("*")) == there, (
        "a failed download left something behind"
    )
    assert str(error.value).startswith(f"{name} is not under the data root")
    assert all(
        part in str(error.value)
        for part in (f"dpcomm data DIR {name}", folder, FIRST_FILE[name], "DPCOMM_DATA")
    )


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
        page = b"<html>please log in</html>"
        sent = page if kind == "page" else self.content
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
    monkeypatch.setattr(images, "PATIENCE", 0.5)
    for name in [n for n in os.environ if n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    yield lambda kind: f"http://127.0.0.1:{server.server_port}/{kind}/"
    server.over.set()
    server.shutdown()
    server.server_close()


def mirrored(monkeypatch, *addresses):
    "FashionMNIST with one file, to be had at some addresses."
    md5 = hashlib.md5(Mirror.content).hexdigest()

    class Set:
        resources, mirrors = [("train.gz", md5)], list(addresses)

        def __init__(self, root, train, download):
            path = Path(root) / "FashionMNIST" / "raw" / "train.gz"
            if not path.is_file() or path.read_bytes() != Mirror.content:
                raise RuntimeError("Dataset not found")
            self.data, self.targets = np.zeros((3, 28, 28), np.uint8), np.arange(3)

    monkeypatch.setattr("torchvision.datasets.FashionMNIST", Set)
    monkeypatch.setitem(images.COUNTS, "fashion-mnist", (3, 3))


HAPPENS = {
    "silent": "no answer in 0.5 s",
    "refuses": "it answered 403",
    "page": "a page came in the file's place",
    "half": "half a file came",
}


@pytest.mark.parametrize("kind", [*HAPPENS, "dead"])
def test_a_bad_mirror_leaves_its_turn_to_the_next_or_says_what_it_did(
    kind, mirror, monkeypatch, tmp_path
):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{nobody.getsockname()[1]}/"
        bad = dead if kind == "dead" else mirror(kind)
        told = HAPPENS.get(kind, "no network to it")
        mirrored(monkeypatch, bad, bad)
        with pytest.raises(FileNotFoundError) as error:
            images.load("fashion-mnist", tmp_path / "bad")
        assert str(error.value).count(f"127.0.0.1: {told}") == 2
        assert list(tmp_path.iterdir()) == []
        mirrored(monkeypatch, bad, mirror("good"))
        assert len(images.load("fashion-mnist", tmp_path / "good").y) == 3


class Source:
    """What torchvision's class does when a network is there: two files, and the images
    in them.
    """

    asked = []

    def __init__(self, root, train, download):
        folder = Path(root) / "FashionMNIST" / "raw"
        if download:
            folder.mkdir(parents=True, exist_ok=True)
            for part in ("True", "False"):
                (folder / part).write_text("whole")
                Source.asked.append(part)
        if not all(
            (folder / part).is_file() and (folder / part).read_text() == "whole"
            for part in ("True", "False")
        ):
            raise RuntimeError("Dataset not found")
        self.data, self.targets = np.zeros((3, 28, 28), np.uint8), np.arange(3)


@pytest.mark.parametrize(
    "before", ["no root", "an empty folder", "a damaged file beside another's"]
)
def test_a_whole_download_moves_into_place_and_is_fetched_once(
    before, tmp_path, monkeypatch
):
    monkeypatch.setattr("torchvision.datasets.FashionMNIST", Source)
    monkeypatch.setitem(images.COUNTS, "fashion-mnist", (3, 3))
    Source.asked.clear()
    root = tmp_path / "cache" / "dpcomm"
    raw = root / "FashionMNIST" / "raw"
    if before != "no root":
        raw.mkdir(parents=True)
    if before.startswith("a damaged"):
        (raw / "True").write_text("half")
        (raw / "other").write_text("kept")
    first, fetched = images.load("fashion-mnist", root), len(Source.asked)
    again = images.load("fashion-mnist", root, download=False)
    assert len(first.y) == len(again.y) == 3 and fetched == len(Source.asked) > 0
    assert [path.name for path in root.iterdir()] == ["FashionMNIST"]
    assert {path.name: path.read_text() for path in raw.iterdir()} == {
        "True": "whole",
        "False": "whole",
    } | ({"other": "kept"} if before.startswith("a damaged") else {})


def test_an_unknown_data_set_is_named_with_its_nearest():
    with pytest.raises(
        ValueError, match="name is 'minst'.*mnist.*did you mean 'mnist'"
    ):
        images.load("minst")
    assert set(images.names()) == set(COUNTS)


def test_the_root_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("DPCOMM_DATA", str(tmp_path))
    assert images.data_root() == tmp_path
    monkeypatch.delenv("DPCOMM_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert images.data_root() == tmp_path / "cache" / "dpcomm"


# ---- partitions

BALANCED = np.repeat(
    np.arange(10), 5000
)  # as many images as the paper's training split
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


@tabled("alpha", [1e-3, 0.1, 1.0, 100.0])
@tabled("n_clients", [1, 4, 100, 400])
def test_dirichlet_equal_covers_exactly_in_equal_sizes(n_clients, alpha):
    parts = images.dirichlet_equal(SMALL, n_clients, alpha, seed_tree(1))
    assert (
        len(parts) == n_clients
        and covers(parts, 400)
        and {len(p) for p in parts} == {400 // n_clients}
    )


def skew(parts, labels) -> float:
    "Mean share of a client's most frequent class."
    return float(np.mean([np.bincount(labels[p]).max() / len(p) for p in parts]))


def test_alpha_sets_how_much_clients_differ():
    rules = [
        lambda a: images.dirichlet_equal(BALANCED, 50, a, seed_tree(0)),
        lambda a: images.dirichlet_dealt(BALANCED, 50, a, seed_tree(0)),
    ]
    for rule in rules:
        few, some_, many = (
            skew(rule(alpha), BALANCED) for alpha in (0.05, 1.0, 1000.0)
        )
        assert few > 0.5 and few > some_ + 0.1 and some_ > many + 0.1 and many < 0.15


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_papers_spread_is_reached(seed):
    "Table 2: 100 clients, mean 500, standard deviation 73.10."
    parts = images.dirichlet_dealt(BALANCED, 100, 1.0, seed_tree(seed), spread=73.10)
    sizes = np.array([len(p) for p in parts])
    assert len(parts) == 100 and covers(parts, 50_000) and sizes.mean() == 500
    assert abs(sizes.std() - 73.10) <= 0.05
    assert 0.2 < skew(parts, BALANCED) < 0.45


def test_demand_never_hands_out_more_than_there_is():
    for seed in range(20):
        counts = images.demand(SMALL, 40, 0.1, seed_tree(seed))
        assert counts.shape == (40, 10) and (counts >= 0).all()
        assert (counts.sum(0) <= np.bincount(SMALL)).all()


def test_partitions_belong_to_their_stream():
    rules = [
        lambda r: images.iid(400, 10, r),
        lambda r: images.dirichlet_equal(SMALL, 10, 1.0, r),
        lambda r: images.dirichlet_dealt(SMALL, 10, 1.0, r),
    ]
    for rule in rules:
        assert same(rule(seed_tree(0)), rule(seed_tree(0))) and not same(
            rule(seed_tree(0)), rule(seed_tree(1))
        )


def test_by_writer_makes_one_client_a_writer_in_order():
    parts = images.by_writer(np.array([7, 2, 7, 2, 9, 7]))
    assert [p.tolist() for p in parts] == [[1, 3], [0, 2, 5], [4]]


@tabled(
    "call, message",
    [
        (
            lambda: images.iid(3, 4, seed_tree(0)),
            "n_clients is 4; it must be a whole number from 1 to 3",
        ),
        (lambda: images.iid(3, 0, seed_tree(0)), "n_clients is 0"),
        (
            lambda: images.dirichlet_equal(SMALL, 7, 1.0, seed_tree(0)),
            "n_clients is 7; it must divide the 400 images",
        ),
        (
            lambda: images.dirichlet_equal(SMALL, 401, 1.0, seed_tree(0)),
            "n_clients is 401",
        ),
        (lambda: images.dirichlet_equal(SMALL, 10, 0.0, seed_tree(0)), "alpha is 0.0"),
        (
            lambda: images.dirichlet_dealt(SMALL, 401, 1.0, seed_tree(0)),
            "n_clients is 401",
        ),
        (
            lambda: images.dirichlet_dealt(SMALL, 10, -1.0, seed_tree(0)),
            "alpha is -1.0",
        ),
        (
            lambda: images.dirichlet_dealt(
                SMALL, 10, 1.0, seed_tree(0), spread=5000.0, tries=20
            ),
            "spread is 5000.0; no draw of 20",
        ),
        (
            lambda: images.check_partition([[0, 1], [1, 2]], 4),
            "each of 0..3 must appear exactly once",
        ),
        (lambda: images.check_partition([[0, 1], [2]], 4), "exactly once"),
        (lambda: images.check_partition([[0, 1], [2, 4]], 4), "exactly once"),
        (
            lambda: images.check_partition([[0, 1], []], 2),
            "client 1 holds no image.*use fewer clients",
        ),
    ],
)
def test_a_partition_that_cannot_be_made_says_why(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---- the hash


def of(*parts) -> str:
    return images.Federation(
        None, tuple(np.array(p) for p in parts), "by hand"
    ).partition_hash


def test_the_partition_hash_is_pinned():
    "Every committed result carries it."
    assert (
        of([0, 2], [1])
        == hashlib.sha256(np.array([2, 0, 2, 1, 1], "<i8").tobytes()).hexdigest()[:12]
        == "5898622a490e"
    )
    parts = images.dirichlet_dealt(
        BALANCED, 100, 1.0, seed_tree(0, "partition"), spread=73.10
    )
    assert of(*parts) == "fd612770fecf"


def test_the_partition_hash_sees_every_change():
    partitions = [
        ([0, 2], [1]),
        ([2, 0], [1]),
        ([1], [0, 2]),
        ([0], [2, 1]),
        ([0, 2, 1],),
        ([0], [2], [1]),
        ([0, 2], [1], []),
        ([0, 2], [3]),
    ]
    assert len({of(*p) for p in partitions}) == len(partitions)
    assert images.Federation(
        None, (np.array([0, 2], np.int32), [1]), "another rule"
    ).partition_hash == of([0, 2], [1])


# ---- FEMNIST

USERS = [f"f{i:04d}_{i % 7:02d}" for i in range(20)]


def written(
    root, users=USERS, split="train", file="all_data_0.json", change=None, seed=0
):
    """Write LEAF's json for made users; `change` damages the content before it is
    written.
    """
    rng, sizes = seed_tree(seed, split, file), [3 + i % 4 for i in range(len(users))]
    entries = {
        u: {
            "x": rng.random((n, 784)).round(4).tolist(),
            "y": rng.integers(0, 62, n).tolist(),
        }
        for u, n in zip(users, sizes)
    }
    content = {"users": list(users), "num_samples": sizes, "user_data": entries}
    if change:
        change(content)
    path = root / "femnist" / split / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return content


def test_leaf_files_become_a_federation_of_users(tmp_path):
    first = written(tmp_path, USERS[:12], file="a.json")
    second = written(tmp_path, USERS[12:], file="b.json")
    test = written(tmp_path, split="test")
    found = images.femnist(tmp_path, whole=False)
    everyone = first["user_data"] | second["user_data"]
    assert (
        found.data.name == "femnist" and len(found.parts) == 20 and "leaf" in found.rule
    )
    assert (
        found.data.x.dtype == torch.float32
        and found.data.y.dtype == torch.int64
        and found.data.x.shape == (found.sizes.sum(), 1, 28, 28)
    )
    for user, part in zip(USERS, found.parts):
        own = torch.from_numpy(part)
        assert (
            torch.equal(found.data.x[own].flatten(1), torch.tensor(everyone[user]["x"]))
            and found.data.y[own].tolist() == everyone[user]["y"]
        )
    assert same(found.parts, images.by_writer(found.data.writers))
    assert found.data.y_test.tolist() == [
        y for u in USERS for y in test["user_data"][u]["y"]
    ]
    assert set(images.read_leaf(tmp_path / "femnist" / "train")) == set(USERS)


def test_femnists_counts_are_asserted_unless_it_is_a_part(tmp_path):
    written(tmp_path)
    written(tmp_path, split="test")
    with pytest.raises(
        ValueError,
        match=(
            r"femnist \(leaf\) has 20 clients with 4.50 .* the whole data set has 3500"
            r" with 201.6 .*whole=False"
        ),
    ):
        images.femnist(tmp_path)
    assert images.WHOLE["leaf"] == (
        3_500,
        201.60,
        78.92,
    ), "DP-REC's Table 2, last row; I-MVU's Section 4.2"
    assert (
        images.WHOLE["tff"][0] == 3_400
        and round(671_585 / 3_400, 2) == images.WHOLE["tff"][1]
    )


def entry_of(content, user=USERS[3]):
    return content["user_data"][user]


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda c: c["user_data"].pop(USERS[3]),
            (
                "all_data_0.json, user 'f0003_03', has no x and y in user_data.*make"
                " the file again"
            ),
        ),
        (lambda c: entry_of(c).pop("y"), "user 'f0003_03', has no x and y"),
        (
            lambda c: entry_of(c)["y"].pop(),
            (
                "user 'f0003_03', has 6 images, 5 labels and announces 6; these must be"
                " equal"
            ),
        ),
        (
            lambda c: c["num_samples"].__setitem__(3, 9),
            "user 'f0003_03', has 6 images, 6 labels and announces 9",
        ),
        (
            lambda c: c["num_samples"].pop(),
            "all_data_0.json has 20 users and 19 num_samples",
        ),
        (
            lambda c: entry_of(c).update(x=[], y=[]),
            "user 'f0003_03', holds no image.*drop the user",
        ),
        (
            lambda c: entry_of(c)["y"].__setitem__(0, 62),
            (
                "user 'f0003_03', has the label 62; labels must be whole numbers from 0"
                " to 61.*62-class"
            ),
        ),
        (
            lambda c: entry_of(c)["y"].__setitem__(0, -1),
            "user 'f0003_03', has the label -1; .*0 to 61",
        ),
        (
            lambda c: entry_of(c).update(y=list("abcdef")),
            "user 'f0003_03', has the label 'a'; .*0 to 61",
        ),
        (
            lambda c: entry_of(c)["y"].__setitem__(0, 1.5),
            "user 'f0003_03', has the label 1.5; .*whole numbers",
        ),
        (
            lambda c: entry_of(c)["x"][0].pop(),
            "user 'f0003_03', has images that are not of 784 pixels",
        ),
        (
            lambda c: entry_of(c)["x"][0].__setitem__(0, "ink"),
            "user 'f0003_03', has images that are not of 784 pixels",
        ),
        (
            lambda c: entry_of(c)["x"][0].__setitem__(5, 255),
            r"user 'f0003_03', has pixels from .* to 255.*\[0, 1\].*divide them by 255",
        ),
        (
            lambda c: entry_of(c)["x"][0].__setitem__(5, float("nan")),
            "user 'f0003_03', has pixels from nan",
        ),
        (
            lambda c: c.pop("users"),
            (
                "all_data_0.json has no 'users'; LEAF writes users, num_samples and"
                " user_data"
            ),
        ),
        (
            lambda c: c["users"].__setitem__(1, USERS[0]),
            "user 'f0000_00', stands in the files twice.*remove one",
        ),
    ],
)
def test_malformed_leaf_files_name_file_user_and_fix(tmp_path, change, message):
    written(tmp_path, change=change)
    written(tmp_path, split="test")
    with pytest.raises(ValueError, match=message):
        images.femnist(tmp_path, whole=False)


def test_a_damaged_json_file_and_an_empty_split_are_named(tmp_path):
    written(tmp_path)
    with pytest.raises(
        ValueError, match="test split holds no user.*put its files beside"
    ):
        images.femnist(tmp_path, whole=False)
    (tmp_path / "femnist" / "train" / "cut.json").write_text('{"users": [')
    with pytest.raises(ValueError, match="cut.json is no json .*download it again"):
        images.femnist(tmp_path, whole=False)
    (tmp_path / "femnist" / "train" / "cut.json").write_text("[1]")
    with pytest.raises(ValueError, match="cut.json has no 'users'"):
        images.femnist(tmp_path, whole=False)


def test_absent_femnist_says_which_files_go_where(tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match="femnist/train and femnist/test.*fed_emnist_train.h5.*DPCOMM_DATA",
    ):
        images.femnist(tmp_path)


def test_tff_without_h5py_names_file_and_both_fixes(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    (tmp_path / "femnist").mkdir()
    (tmp_path / "femnist" / "fed_emnist_train.h5").write_bytes(b"")
    with pytest.raises(
        ImportError,
        match=(
            "fed_emnist_train.h5 needs the package h5py: run `pip install h5py`, or use"
            " LEAF's json"
        ),
    ):
        images.femnist(tmp_path)


class Group(dict):
    """A group of an h5 file, as far as the reader uses it: values are arrays, read by
    [()].
    """

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def tff_like(monkeypatch, files):
    "Put a stand-in for h5py in place that serves the given files by name."

    class Array(np.ndarray):
        pass

    def wrap(value):
        return (
            Group({k: wrap(v) for k, v in value.items()})
            if isinstance(value, dict)
            else np.asarray(value).view(Array)
        )

    monkeypatch.setitem(
        sys.modules,
        "h5py",
        types.SimpleNamespace(File=lambda path, mode: wrap(files[path.name])),
    )


def tff_files(seed=0):
    rng = seed_tree(seed, "tff")

    def split(n):
        return {
            "examples": {
                u: {
                    "pixels": rng.random((n, 28, 28), dtype=np.float32),
                    "label": rng.integers(0, 62, n).astype(np.int32),
                }
                for u in USERS
            }
        }

    return {"fed_emnist_train.h5": split(5), "fed_emnist_test.h5": split(2)}


def test_tff_groups_become_the_same_federation(tmp_path, monkeypatch):
    """Through a stand-in for h5py, whose use is limited to File, items and [()]; with
    h5py itself in the next test.
    """
    files = tff_files()
    tff_like(monkeypatch, files)
    (tmp_path / "femnist").mkdir()
    (tmp_path / "femnist" / "fed_emnist_train.h5").write_bytes(b"")
    found = images.femnist(tmp_path, whole=False)
    assert (
        len(found.parts) == 20
        and (found.sizes == 5).all()
        and found.data.x_test.shape == (40, 1, 28, 28)
        and "tff" in found.rule
    )
    pixels = files["fed_emnist_train.h5"]["examples"][USERS[4]]["pixels"]
    assert torch.equal(
        found.data.x[torch.from_numpy(found.parts[4])][:, 0], torch.from_numpy(pixels)
    )
    files["fed_emnist_train.h5"]["examples"][USERS[2]]["label"][0] = 62
    with pytest.raises(
        ValueError, match="fed_emnist_train.h5, user 'f0002_02', has the label .*62"
    ):
        images.read_tff(tmp_path / "femnist" / "fed_emnist_train.h5")
    del files["fed_emnist_train.h5"]["examples"][USERS[0]]["pixels"]
    with pytest.raises(ValueError, match="user 'f0000_00', has no pixels and label"):
        images.read_tff(tmp_path / "femnist" / "fed_emnist_train.h5")
    del files["fed_emnist_train.h5"]["examples"]
    with pytest.raises(ValueError, match="fed_emnist_train.h5 has no group 'examples'"):
        images.read_tff(tmp_path / "femnist" / "fed_emnist_train.h5")


def test_tff_files_written_by_h5py(tmp_path):
    h5py = pytest.importorskip(
        "h5py",
        reason=(
            "NOT CHECKED: h5py is not installed, so TFF's files were read through a"
            " stand-in only"
        ),
    )
    (tmp_path / "femnist").mkdir()
    for name, content in tff_files().items():
        with h5py.File(tmp_path / "femnist" / name, "w") as file:
            for user, entry in content["examples"].items():
                for key, values in entry.items():
                    file[f"examples/{user}/{key}"] = values
    found = images.femnist(tmp_path, whole=False)
    assert (
        len(found.parts) == 20
        and (found.sizes == 5).all()
        and found.data.x_test.shape == (40, 1, 28, 28)
    )


@pytest.mark.parametrize(
    "x, y, message",
    [
        ([[0.5] * 784], [], "holds no image"),
        ([[0.5] * 784], [1, 2], "1 images, 2 labels; these"),
        ([[0.5] * 784], [True], "has the label True; .*whole numbers"),
    ],
)
def test_check_client_refuses_and_admits(x, y, message):
    with pytest.raises(ValueError, match=f"here.*{message}"):
        images.check_client("here", x, y)
    pixels, labels = images.check_client("here", [[0.5] * 784], [61], 1)
    assert (
        pixels.shape == (1, 784)
        and pixels.dtype == np.float32
        and labels.tolist() == [61]
    )


def test_hold_out_keeps_whole_clients_apart():
    x = torch.arange(40.0).view(40, 1, 1, 1).expand(40, 1, 28, 28)
    y = torch.arange(40) % 10
    federation = images.Federation(
        images.Dataset("made", x, y, x[:1], y[:1]),
        tuple(np.array_split(np.arange(40), 8)),
        "made",
    )
    held = images.hold_out_clients(federation, 3, seed_tree(0))
    train = np.concatenate(held.parts)
    test = held.data.x_test[:, 0, 0, 0].long().numpy()
    assert (
        len(held.parts) == 5
        and len(test) == 15
        and set(train) | set(test) == set(range(40))
        and not set(train) & set(test)
    )
    assert (
        torch.equal(held.data.y_test, y[torch.from_numpy(test)])
        and "3 clients held out" in held.rule
        and held.data.x is x
    )
    assert same(held.parts, images.hold_out_clients(federation, 3, seed_tree(0)).parts)
    assert (
        len(
            {
                images.hold_out_clients(federation, 3, seed_tree(0, i)).partition_hash
                for i in range(9)
            }
        )
        > 3
    )
    for bad in (0, 8):
        with pytest.raises(
            ValueError, match=f"n_test is {bad}; it must be a whole number from 1 to 7"
        ):
            images.hold_out_clients(federation, bad, seed_tree(0))


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


def made_emnist(root, split="letters", packed=True, sizes=(5, 3), change=None):
    """Write a made split as NIST stores it, columns first; `change` damages images and
    labels of the training part before.
    """
    first, rng, kept = int(split == "letters"), seed_tree(0, split), {}
    (root / "EMNIST" / "raw").mkdir(parents=True, exist_ok=True)
    for part, n in zip(("train", "test"), sizes):
        content = {
            "images": rng.integers(0, 256, (n, 28, 28)),
            "labels": rng.integers(first, first + EMNIST[split][0], n),
        }
        kept[part] = {kind: array.copy() for kind, array in content.items()}
        content["images"] = content["images"].transpose(0, 2, 1)
        if change and part == "train":
            change(content)
        for kind, array in content.items():
            path = (
                root / "EMNIST" / "raw" / f"emnist-{split}-{part}-{KINDS[kind]}-ubyte"
            )
            if packed:
                path.with_name(path.name + ".gz").write_bytes(gzip.compress(idx(array)))
            else:
                path.write_bytes(idx(array))
    return kept


def test_emnists_splits_and_their_counts():
    assert images.EMNIST == EMNIST
    totals = {split: n + n_test for split, (_, n, n_test) in EMNIST.items()}
    assert totals == {
        "mnist": 70_000,
        "digits": 280_000,
        "letters": 145_600,
        "balanced": 131_600,
    }, "the data set's own summary"
    assert all(
        n % classes == n_test % classes == 0 for classes, n, n_test in EMNIST.values()
    ), "all four are balanced"


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("split", EMNIST)
def test_emnist_comes_upright_and_labelled_from_zero(split, packed, tmp_path):
    made = made_emnist(tmp_path, split, packed)
    loaded = images.emnist(split, tmp_path, whole=False)
    assert loaded.name == f"emnist-{split}" and loaded.writers is None
    for x, y, part in (
        (loaded.x, loaded.y, made["train"]),
        (loaded.x_test, loaded.y_test, made["test"]),
    ):
        assert x.dtype == torch.float32 and y.dtype == torch.int64 and x.is_contiguous()
        assert torch.equal(x[:, 0], torch.from_numpy(part["images"]).float() / 255)
        assert y.tolist() == (part["labels"] - (split == "letters")).tolist()


@pytest.mark.parametrize("split", EMNIST)
def test_a_whole_emnist_split_has_its_counts(split):
    loaded = or_skip(images.emnist, split)
    classes, n, n_test = EMNIST[split]
    assert (len(loaded.y), len(loaded.y_test)) == (n, n_test)
    assert torch.bincount(loaded.y).tolist() == [n // classes] * classes


def test_a_part_of_emnist_is_not_taken_for_the_whole(tmp_path, monkeypatch):
    made_emnist(tmp_path, "digits")
    with pytest.raises(
        ValueError,
        match=(
            r"emnist-digits has 5 \+ 3 images; the whole split has 240000 \+ 40000:"
            r" .*whole=False"
        ),
    ):
        images.emnist("digits", tmp_path)
    monkeypatch.setitem(images.EMNIST, "digits", (10, 5, 3))
    assert len(images.emnist("digits", tmp_path).y) == 5


@pytest.mark.parametrize(
    "gone",
    [
        f"emnist-letters-{part}-{kind}-ubyte"
        for part in ("train", "test")
        for kind in KINDS.values()
    ],
)
def test_absent_emnist_says_which_file_goes_where(gone, tmp_path, monkeypatch):
    made_emnist(tmp_path)
    (tmp_path / "EMNIST" / "raw" / f"{gone}.gz").unlink()
    with pytest.raises(
        FileNotFoundError, match=f"put {gone}.gz .*EMNIST/raw.*DPCOMM_DATA"
    ):
        images.emnist("letters", tmp_path, whole=False)
    monkeypatch.setenv("DPCOMM_DATA", str(tmp_path / "empty"))
    with pytest.raises(
        FileNotFoundError, match="emnist-mnist-train-images-idx3-ubyte.gz"
    ):
        images.emnist()


@pytest.mark.parametrize(
    "split, change, message",
    [
        (
            "letters",
            lambda c: c["labels"].__setitem__(0, 0),
            (
                "emnist-letters-train has labels from 0 to .*from 1 to 26: use the"
                " files of one split"
            ),
        ),
        (
            "letters",
            lambda c: c["labels"].__setitem__(0, 27),
            "labels from .* to 27; they must be from 1 to 26",
        ),
        (
            "mnist",
            lambda c: c["labels"].__setitem__(0, 10),
            "emnist-mnist-train has labels from .* to 10; they must be from 0 to 9",
        ),
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
        images.emnist(split, tmp_path, whole=False)


def test_an_unknown_split_is_named_with_its_nearest():
    with pytest.raises(
        ValueError,
        match=(
            "split is 'leters'; it must be one of mnist, digits, letters, balanced: did"
            " you mean 'letters'"
        ),
    ):
        images.emnist("leters")


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 3, 4)])
def test_idx_files_come_back_as_written(shape, tmp_path):
    array = seed_tree(0, "idx", len(shape)).integers(0, 256, shape).astype(np.uint8)
    (tmp_path / "a").write_bytes(idx(array))
    (tmp_path / "a.gz").write_bytes(gzip.compress(idx(array)))
    for name in ("a", "a.gz"):
        read = images.read_idx(tmp_path / name)
        assert (
            read.shape == shape
            and read.dtype == np.uint8
            and np.array_equal(read, array)
        )


def test_mnist_read_through_the_same_reader():
    "Against torchvision, on the images that are on this machine."
    loaded = have("mnist")
    raw = images.data_root() / "MNIST" / "raw"
    found = next(
        (
            raw / name
            for name in ("t10k-images-idx3-ubyte.gz", "t10k-images-idx3-ubyte")
            if (raw / name).exists()
        )
    )
    assert torch.equal(
        torch.from_numpy(images.read_idx(found)).float() / 255, loaded.x_test[:, 0]
    )


@pytest.mark.parametrize(
    "name, content, message",
    [
        (
            "a",
            idx(np.zeros((2, 3)))[:-1],
            (
                r"a announces \(2, 3\) and holds 5 entries; these must agree: download"
                r" it again"
            ),
        ),
        ("a", idx(np.zeros((2, 3))) + b"0", r"announces \(2, 3\) and holds 7"),
        ("a", b"", "a starts with b''"),
        ("a", b"\0\0\x08\x03\0\0\0\x01", "two zeros, 8 and the number of axes"),
        ("a", b"\0\0\x0c\x01\0\0\0\0", "two zeros, 8 and the number of axes"),
        ("a.gz", b"plain", "a.gz cannot be unpacked .*download it again"),
        (
            "a.gz",
            gzip.compress(idx(np.zeros((2, 3))), mtime=0)[:-4],
            "a.gz cannot be unpacked",
        ),
        (
            "a.gz",
            gzip.compress(b"x" * 99, mtime=0)[:12] + b"\xff" * 9,
            "a.gz cannot be unpacked",
        ),
    ],
)
def test_damaged_idx_files_are_named(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        images.read_idx(tmp_path / name)


@pytest.mark.parametrize(
    "x, y, n, says",
    [
        ([], [], None, "holds no image"),
        ([1, 2], [1], None, "2 images, 1 labels; these must be equal"),
        ([1], [1], 3, "and announces 3"),
        ("x", [1], None, "a list"),
    ],
)
def test_a_client_of_unequal_lengths_is_refused_by_name(x, y, n, says):
    words = "image", "images", "labels"
    images.check_lengths("file, user", [1], [1], 1, (list,), words)
    with pytest.raises(ValueError, match=says):
        images.check_lengths("file, user", x, y, n, (list,), words)
