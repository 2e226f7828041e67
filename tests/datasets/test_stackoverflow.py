"""stackoverflow, stackoverflow_files, tagging: made clients, TFF's files, and sparse
training against a dense reference.
"""

import dataclasses
import json

import numpy as np
import pytest
import torch
from scipy.stats import lognorm
from tables import tabled

from dpcomm.datasets import stackoverflow as files
from dpcomm.datasets.stackoverflow import LONGEST, TAGS, SyntheticPosts, federation
from dpcomm.experiments import accounts
from dpcomm.training.federated import Config, Task, simulate
from dpcomm.training.models import TagRegression, recall, tag_loss

SMALL = dict(n_words=200, n_tags=30, n_topics=6, mean=8.0, std=9.0, most=100)


# ---- the law of the sizes


@tabled("mean, std, most", [(396.58, 1278.94, 200_000), (30.0, 40.0, 400), (8, 9, 100)])
def test_size_law_has_the_moments_it_is_asked_for(mean, std, most):
    mu, s, cdf = files.size_law(mean, std, most)
    p, k = np.diff(cdf, prepend=0.0), np.arange(1, most + 1.0)
    assert len(cdf) == most and cdf[-1] == 1 and (p >= 0).all()
    moments = p @ k, (p @ k**2 - (p @ k) ** 2) ** 0.5
    assert moments == pytest.approx((mean, std), rel=1e-6)
    law, at = lognorm(s, scale=np.exp(mu)), [0, 3, most // 2]
    wanted = law.cdf([1, 4, most // 2 + 1]) / law.cdf(most)
    assert np.allclose(cdf[at], wanted, rtol=1e-10)


def test_sizes_follow_the_law():
    made = SyntheticPosts(20_000, 3, **SMALL)
    sizes, cdf = made.sizes(), files.size_law(8.0, 9.0, 100)[2]
    assert sizes.min() >= 1 and sizes.max() <= 100
    assert (made.sizes([7, 3]) == sizes[[7, 3]]).all()
    gap = max(abs((sizes <= k).mean() - cdf[k - 1]) for k in range(1, 101))
    # Hoeffding over 100 sizes: false alarm below 1e-6
    assert gap < (np.log(2e6 * 100) / 2 / len(sizes)) ** 0.5


# ---- posts


def test_a_client_depends_on_seed_and_number_alone():
    big, small = SyntheticPosts(342_477), SyntheticPosts(50)
    x, y, sizes = big.posts([9, 41, 4])
    at = np.r_[0, sizes.cumsum()]
    for j, client in enumerate((9, 41, 4)):
        alone, own = small.posts([client]), slice(at[j], at[j + 1])
        assert (alone[0] == x[own]).all() and (alone[1] == y[own]).all()
        assert alone[2] == sizes[j]
    assert not np.array_equal(SyntheticPosts(50, 1).posts([4])[0], small.posts([4])[0])


def test_posts_are_padded_and_every_post_has_a_tag():
    x, y, sizes = SyntheticPosts(300, **SMALL).posts(range(300))
    for found, width, high in ((x, LONGEST, 200), (y, TAGS, 30)):
        assert found.shape == (sizes.sum(), width) and found.dtype == np.int32
        assert found.min() == -1 and found.max() < high and (found[:, 0] >= 0).all()
    assert (np.diff((x >= 0).astype(int), axis=1) <= 0).all(), "padding comes last"
    assert all(len(set(row[row >= 0])) == (row >= 0).sum() for row in y)
    length = (x >= 0).sum(1)
    assert abs(length.mean() - 16.5) < 5 * 2.785 / len(length) ** 0.5


def test_words_are_zipf_exactly():
    t = SyntheticPosts(10, n_words=1000, n_tags=30, n_topics=7).tables
    zipf = 1 / np.arange(1, 1001) / (1 / np.arange(1, 1001)).sum()
    through, order = np.zeros(1000), np.diff(t["topical"], prepend=0.0)
    for k in range(7):
        low = t["start"][k] + 1e-12
        own = (t["topical"] > low) & (t["topical"] < low + t["mass"][k])
        through[t["words"][own]] = t["topics"][k] * order[own] / t["mass"][k]
    law = t["share"] * through + (1 - t["share"]) * np.diff(t["rest"], prepend=0.0)
    assert np.allclose(law, zipf, rtol=1e-9)
    assert np.allclose(t["tags"].sum(1), 1) and np.isclose(t["topics"].sum(), 1)


def test_held_out_posts_are_of_other_clients():
    made = SyntheticPosts(40, **SMALL)
    x, y = made.evaluation_posts(333, each=4)
    assert x.shape == (333, LONGEST) and y.shape == (333, TAGS)
    trained = {row.tobytes() for row in made.posts(range(40))[0]}
    assert sum(row.tobytes() in trained for row in x) < 3
    n = min(int(made.sizes([0], "held-out")[0]), 4)
    cut, whole = (made.evaluation_posts(1 + n, each=each)[0] for each in (n, 100))
    assert (cut[:n] == whole[:n]).all(), "the first posts, however many are taken"


# ---- the lazy federation


def test_lazy_federation_visits():
    fed = federation(SyntheticPosts(60, **SMALL), 50)
    assert isinstance(fed, files.LazyFederation) and len(fed.parts) == 60
    assert len(fed.data.x) == 0 and len(fed.data.x_test) == 50
    assert (fed.sizes == fed.source.sizes()).all()
    data, parts = fed.visit(np.array([5, 2, 5]))
    assert [len(p) for p in parts] == fed.sizes[[5, 2, 5]].tolist()
    assert (parts[0] == parts[2]).all() and len(data.x) == fed.sizes[[2, 5]].sum()
    assert torch.equal(data.x[parts[1]], fed.visit([2])[0].x) and fed.visit([])[1] == []
    fewer = dataclasses.replace(fed.data, x_test=fed.data.x_test[:3])
    moved = dataclasses.replace(fed, data=fewer)
    assert moved.partition_hash == fed.partition_hash
    assert len(moved.visit([1])[0].x) == fed.sizes[1]
    other = federation(SyntheticPosts(60, 1, **SMALL), 5)
    assert other.partition_hash != fed.partition_hash
    for wrong in ([60], [-1]):
        with pytest.raises(ValueError, match=r"must be in 0..59"):
            fed.visit(wrong)


def test_simulate_runs_and_neither_workers_nor_interruptions_change_it(tmp_path):
    fed = federation(SyntheticPosts(60, **SMALL), 200)
    config = Config(rounds=4, cohort=6, batch=10, lr=100.0, server="momentum")
    config = dataclasses.replace(config, server_lr=0.5, eval_every=2)
    line = accounts.rec(config, 60, 1.0, 0.01, (1200,) * 5 + (30,))

    def go(**more):
        net = TagRegression(200, 30)
        task = Task(net, fed, line.mechanism, line.config, 0, loss=tag_loss)
        return simulate(task, metrics=recall, progress=False, **more)

    run = go()
    assert set(run.history[0]) >= {"recall5", "loss", "train_loss"}
    assert len(run.w) == 200 * 30 + 30 and run.history[-1]["loss"] < np.log(2)
    assert torch.equal(run.w, go(workers=2).w)
    go(checkpoint=tmp_path / "run.pt", max_seconds=0.0)
    assert torch.equal(run.w, go(checkpoint=tmp_path / "run.pt", resume=True).w)


# ---- TFF's files

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


def load(root, n_words=6, n_tags=3):
    return files.from_files(root.parent, n_words, n_tags, whole=False)


def test_vocabularies_are_by_frequency(root):
    words, tags = root / "stackoverflow.word_count", root / "stackoverflow.tag_count"
    assert files.read_counts(words, 3) == {"list": 0, "a": 1, "sort": 2}
    assert [*files.read_counts(tags, 4)] == ["python", "sql", "sorting", "css"]
    with pytest.raises(ValueError, match="n is 8; .* from 1 to 7"):
        files.read_counts(words, 8)


def test_files_are_a_source(root):
    write_h5(root, USERS)
    source = load(root)
    assert isinstance(source, files.Files) and source.n_clients == 2
    fed = federation(source, 3)
    sizes = source.sizes([0, 1]).tolist()
    assert fed.sizes.tolist() == [2, 1] == sizes and len(fed.data.x_test) == 3
    assert [*source.words] == ["list", "a", "sort", "sorted", "table", "key"]
    assert source.tags == {"python": 0, "sql": 1, "sorting": 2}
    data, parts = fed.visit([1, 0, 1])
    (post, long), tags = data.x[parts[1]], data.y[parts[1]]
    assert post[post >= 0].tolist() == [0, 3, 2, 1, 0] and (long >= 0).sum() == 62
    assert tags.tolist() == [[0, 2], [-1, -1]] and data.y[parts[0]].tolist() == [[0, 1]]
    assert fed.partition_hash != federation(load(root, 5), 3).partition_hash
    config = Config(rounds=1, cohort=2, lr=1.0, server="sgd", eval_every=1)
    mechanism = accounts.fedavg(Config(), 2, 1.0, 0.1).mechanism
    task = Task(TagRegression(6, 3), fed, mechanism, config, 0, loss=tag_loss)
    assert simulate(task, metrics=lambda *of: recall(*of, 1), progress=False).finished
    for call, says in (
        (lambda: federation(source, 4), "n is 4; .* from 1 to 3"),
        (
            lambda: files.from_files(root.parent, 6, 3),
            "has 2 clients of 342477",
        ),
        (lambda: files.from_files(root.parent), "n is 10000; .* from 1 to 7"),
    ):
        with pytest.raises(ValueError, match=says):
            call()
