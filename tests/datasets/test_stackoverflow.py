"""stackoverflow: TFF's files, as sources of clients."""

import json

import pytest
import torch

from dpcomm.datasets import stackoverflow as files
from dpcomm.experiments import accounts
from dpcomm.training.federated import Config, Task, simulate
from dpcomm.training.models import TagRegression, recall, tag_loss

LONG = " ".join(["list"] * 60)  # longer than 127 bytes: lengths of two bytes
ANN = (
    ("the list is sorted", "how to sort a list", "python|sorting"),
    (LONG, "a key", "css"),
)
BOB = (("a table", "what", "sql|python|python"),)
CY = (("sort the table", "sql order", "sql"),)
DI = ("key", "list", "zzz"), ("a", "a", "python")
USERS = {"train": {"ann": ANN, "bob": BOB}, "test": {"cy": CY, "di": DI}}


def write_h5(root, users):
    h5py = pytest.importorskip("h5py")
    for split, clients in users.items():
        with h5py.File(root / f"stackoverflow_{split}.h5", "w") as file:
            for client, posts in clients.items():
                for name, column in zip(("tokens", "title", "tags"), zip(*posts)):
                    texts = [text.encode() for text in column]
                    file[f"examples/{client}/{name}"] = texts


WORDS = "a 5\nlist 9\nsort 3\nsorted 2\ntable 2\nkey 2\nrare 1\n"
COUNTED = {"sorting": 1, "python": 3, "sql": 2, "css": 1}


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "stackoverflow"
    folder.mkdir()
    (folder / "stackoverflow.word_count").write_text(WORDS)
    (folder / "stackoverflow.tag_count").write_text(json.dumps(COUNTED))
    return folder


def load(root, n_words=6, n_test=3):
    return files.from_files(root.parent, n_words, 3, n_test, whole=False)


def test_vocabularies_are_by_frequency(root):
    words, tags = root / "stackoverflow.word_count", root / "stackoverflow.tag_count"
    assert files.read_counts(words, 3) == {"list": 0, "a": 1, "sort": 2}
    assert [*files.read_counts(tags, 4)] == ["python", "sql", "sorting", "css"]
    with pytest.raises(ValueError, match="n is 8; .* from 1 to 7"):
        files.read_counts(words, 8)


def test_files_are_a_source(root):
    write_h5(root, USERS)
    fed = load(root)
    assert fed.sizes.tolist() == [2, 1] and len(fed.data.x_test) == 3
    assert [*fed.words] == ["list", "a", "sort", "sorted", "table", "key"]
    assert fed.tags == {"python": 0, "sql": 1, "sorting": 2}
    data, parts = fed.visit([1, 0, 1])
    (post, long), tags = data.x[parts[1]], data.y[parts[1]]
    assert post[post >= 0].tolist() == [0, 3, 2, 1, 0] and (long >= 0).sum() == 62
    assert tags.tolist() == [[0, 2], [-1, -1]] and data.y[parts[0]].tolist() == [[0, 1]]
    assert fed.partition_hash != load(root, 5).partition_hash
    config = Config(rounds=1, cohort=2, lr=1.0, server="sgd", eval_every=1)
    mechanism = accounts.fedavg(Config(), 2, 1.0, 0.1).mechanism
    task = Task(TagRegression(6, 3), fed, mechanism, config, 0, loss=tag_loss)
    how = dict(metrics=lambda *of: recall(*of, 1), progress=False)
    alone, shared = (simulate(task, workers=k, **how) for k in (1, 2))
    assert alone.finished and torch.equal(alone.w, shared.w)
    assert fed.visit([])[1] == []
    for given, says in (
        (dict(n_test=4, whole=False), "n_test is 4; .* from 1 to 3"),
        (dict(n_test=3), "has 2 clients of 342477"),
        (dict(n_words=10_000), "n is 10000; .* from 1 to 7"),
    ):
        with pytest.raises(ValueError, match=says):
            files.from_files(root.parent, **dict(n_words=6, n_tags=3) | given)
