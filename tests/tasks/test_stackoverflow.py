"""stackoverflow, stackoverflow_files, tagging: made clients, TFF's files, and sparse
training against a dense reference.
"""

import dataclasses
import json
import sqlite3
import sys
from contextlib import closing

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as some
from tables import tabled
from torch import nn

from dpcomm.core.chance import seed_tree
from dpcomm.experiments import dprec_curves
from dpcomm.tasks import stackoverflow_files as files
from dpcomm.tasks.stackoverflow import (
    LONGEST,
    TAGS,
    LazyFederation,
    SyntheticPosts,
    client_sizes,
    evaluation_posts,
    federation,
    size_law,
)
from dpcomm.training.federated import Config, Task, batch_plan, simulate
from dpcomm.training.tagging import (
    TagRegression,
    bags,
    local_sgd,
    loss_of,
    multi_hot,
    recall,
    sparse_step,
)

SMALL = dict(n_words=200, n_tags=30, n_topics=6, mean=8.0, std=9.0, most=100)


# ---- the law of the sizes


@pytest.mark.parametrize(
    "mean, std, most", [(396.58, 1278.94, 200_000), (30.0, 40.0, 400), (8.0, 9.0, 100)]
)
def test_size_law_has_the_moments_it_is_asked_for(mean, std, most):
    mu, s, cdf = size_law(mean, std, most)
    p, k = np.diff(cdf, prepend=0.0), np.arange(1, most + 1.0)
    assert len(cdf) == most and cdf[-1] == 1 and (p >= 0).all()
    assert (
        abs(p @ k - mean) < 1e-6 * mean
        and abs((p @ k**2 - (p @ k) ** 2) ** 0.5 - std) < 1e-6 * std
    )
    from scipy.stats import lognorm

    law = lognorm(s, scale=np.exp(mu))
    assert np.allclose(
        cdf[[0, 3, most // 2]],
        law.cdf([1, 4, most // 2 + 1]) / law.cdf(most),
        rtol=1e-10,
    )


@pytest.mark.parametrize(
    "args, text",
    [
        ((0.0, 1.0, 10), "mean is 0.0"),
        ((5.0, -1.0, 10), "std is -1.0"),
        ((5.0, 1.0, 1), "most is 1"),
        ((5.0, 500.0, 20), "no rounded log-normal has these moments"),
    ],
)
def test_size_law_refuses(args, text):
    with pytest.raises(ValueError, match=text), np.errstate(all="ignore"):
        size_law(*args)


def test_sizes_follow_the_law():
    made = SyntheticPosts(20_000, 3, **SMALL)
    sizes, cdf = made.sizes(), size_law(8.0, 9.0, 100)[2]
    assert (
        sizes.min() >= 1
        and sizes.max() <= 100
        and (made.sizes([7, 3]) == sizes[[7, 3]]).all()
    )
    gap = max(abs((sizes <= k).mean() - cdf[k - 1]) for k in range(1, 101))
    assert (
        gap < (np.log(2e6 * 100) / 2 / len(sizes)) ** 0.5
    )  # Hoeffding over 100 sizes: false alarm below 1e-6


# ---- posts


def test_a_client_depends_on_seed_and_number_alone():
    big, small = SyntheticPosts(342_477), SyntheticPosts(50)
    x, y, sizes = big.posts([9, 41, 4])
    at = np.r_[0, sizes.cumsum()]
    for j, client in enumerate((9, 41, 4)):
        alone = small.posts([client])
        assert (
            (alone[0] == x[at[j] : at[j + 1]]).all()
            and (alone[1] == y[at[j] : at[j + 1]]).all()
            and alone[2] == sizes[j]
        )
    assert not np.array_equal(SyntheticPosts(50, 1).posts([4])[0], small.posts([4])[0])


def test_posts_are_padded_and_every_post_has_a_tag():
    made = SyntheticPosts(300, **SMALL)
    x, y, sizes = made.posts(range(300))
    assert (
        x.shape == (sizes.sum(), LONGEST)
        and y.shape == (sizes.sum(), TAGS)
        and x.dtype == y.dtype == np.int32
    )
    assert (
        x.max() < 200
        and y.max() < 30
        and x.min() == y.min() == -1
        and (y[:, 0] >= 0).all()
        and (x[:, 0] >= 0).all()
    )
    assert (np.diff((x >= 0).astype(int), axis=1) <= 0).all(), (
        "words first, then padding"
    )
    for row in y:
        assert len(set(row[row >= 0])) == (row >= 0).sum()
    length = (x >= 0).sum(1)
    assert abs(length.mean() - 16.5) < 5 * 2.785 / len(length) ** 0.5


def test_words_are_zipf_exactly():
    made = SyntheticPosts(10, n_words=1000, n_tags=30, n_topics=7)
    t, zipf = made.tables, 1 / np.arange(1, 1001) / (1 / np.arange(1, 1001)).sum()
    through, order = np.zeros(1000), t["topical"] - np.r_[0, t["topical"][:-1]]
    for k in range(7):
        own = (t["topical"] > t["start"][k] + 1e-12) & (
            t["topical"] < t["start"][k] + t["mass"][k] + 1e-12
        )
        through[t["words"][own]] = t["topics"][k] * order[own] / t["mass"][k]
    law = t["share"] * through + (1 - t["share"]) * np.diff(t["rest"], prepend=0.0)
    assert (
        np.allclose(law, zipf, rtol=1e-9)
        and np.allclose(t["tags"].sum(1), 1)
        and np.isclose(t["topics"].sum(), 1)
    )


def test_words_and_tags_of_one_client_tell_each_other():
    made = SyntheticPosts(
        400,
        2,
        n_words=600,
        n_tags=60,
        n_topics=6,
        mean=40.0,
        std=10.0,
        most=200,
        focus=0.5,
    )
    x, y, sizes = made.posts(range(400))
    owner, first = np.repeat(np.arange(400), sizes), y[:, 0]
    same = np.mean(
        [
            (first[owner == c][:-1] == first[owner == c][1:]).mean()
            for c in range(400)
            if sizes[c] > 1
        ]
    )
    p = np.bincount(first, minlength=60) / len(first)
    assert same > 1.5 * (p**2).sum(), "posts of one client share topics, hence tags"


def test_held_out_posts_are_of_other_clients():
    made = SyntheticPosts(40, **SMALL)
    x, y = evaluation_posts(made, 333, each=4)
    assert x.shape == (333, LONGEST) and y.shape == (333, TAGS)
    trained = {row.tobytes() for row in made.posts(range(40))[0]}
    assert sum(row.tobytes() in trained for row in x) < 3
    first = int(client_sizes(made, [0], "held-out")[0])
    cut, whole = (
        evaluation_posts(made, 1 + min(first, 4), each=each)[0]
        for each in (min(first, 4), 100)
    )
    assert (cut[: min(first, 4)] == whole[: min(first, 4)]).all(), (
        "a client's first posts do not depend on how many are taken"
    )


@tabled(
    "change, text",
    [
        (dict(n_clients=0), "n_clients is 0"),
        (dict(n_topics=1), "n_topics is 1"),
        (dict(n_words=11), "n_words is 11"),
        (dict(n_tags=5), "n_tags is 5"),
        (dict(topical=1.0), "topical is 1.0; it must be in"),
        (dict(focus=0.0), "focus is 0.0"),
    ],
)
def test_made_refuses(change, text):
    with pytest.raises(ValueError, match=text):
        SyntheticPosts(**(dict(n_clients=9) | SMALL | change))


# ---- the lazy federation


def test_lazy_federation_visits():
    fed = federation(SyntheticPosts(60, **SMALL), 50)
    assert (
        isinstance(fed, LazyFederation)
        and len(fed.parts) == 60
        and len(fed.data.x) == 0
        and len(fed.data.x_test) == 50
        and (fed.sizes == fed.source.sizes()).all()
    )
    data, parts = fed.visit(np.array([5, 2, 5]))
    assert (
        [len(p) for p in parts] == fed.sizes[[5, 2, 5]].tolist()
        and (parts[0] == parts[2]).all()
        and len(data.x) == fed.sizes[[2, 5]].sum()
    )
    assert torch.equal(data.x[parts[1]], fed.visit([2])[0].x) and fed.visit([])[1] == []
    moved = dataclasses.replace(
        fed, data=dataclasses.replace(fed.data, x_test=fed.data.x_test[:3])
    )
    assert (
        moved.partition_hash == fed.partition_hash
        and len(moved.visit([1])[0].x) == fed.sizes[1]
    )
    assert (
        federation(SyntheticPosts(60, 1, **SMALL), 5).partition_hash
        != fed.partition_hash
    )
    for wrong in ([60], [-1]):
        with pytest.raises(ValueError, match=r"must be in 0..59"):
            fed.visit(wrong)


@pytest.mark.parametrize("kind", ["fedavg", "rec"])
def test_simulate_runs_and_neither_workers_nor_interruptions_change_it(kind, tmp_path):
    fed, d = federation(SyntheticPosts(60, **SMALL), 200), 200 * 30 + 30
    config = Config(
        rounds=4,
        cohort=6,
        batch=10,
        lr=100.0,
        server="momentum",
        server_lr=0.5,
        eval_every=2,
    )
    line = (
        dprec_curves.fedavg("f", config, 60, 1.0, 0.1)
        if kind == "fedavg"
        else dprec_curves.rec("r", config, 60, 1.0, 0.01, (1200,) * 5 + (30,))
    )

    def go(**more):
        return simulate(
            Task(TagRegression(200, 30), fed, line.mechanism, line.config, 0),
            metrics=recall,
            progress=False,
            **more,
        )

    run = go()
    assert (
        set(run.history[0]) >= {"recall5", "loss", "train_loss"}
        and len(run.w) == d
        and run.history[-1]["loss"] < np.log(2)
    )
    assert torch.equal(run.w, go(workers=2).w)
    go(checkpoint=tmp_path / "run.pt", max_seconds=0.0)
    assert torch.equal(run.w, go(checkpoint=tmp_path / "run.pt", resume=True).w)


# ---- the model


def dense(x, n_words):
    "Bags of words, normalised to one."
    return torch.stack(
        [
            sum(
                (F.one_hot(w.long(), n_words).float() for w in row[row >= 0]),
                torch.zeros(n_words),
            )
            / max(1, int((row >= 0).sum()))
            for row in x
        ]
    )


def made_posts(seed, n=60, n_words=40, n_tags=9):
    rng = seed_tree(seed, "posts")
    x, y = (
        torch.from_numpy(rng.integers(-1, high, (n, width)))
        for high, width in ((n_words, 6), (n_tags, 3))
    )
    x[0] = -1
    return rng, x, y


def test_model_has_the_stated_size_and_starts_from_zero():
    net = TagRegression()
    assert sum(p.numel() for p in net.parameters()) == 5_000_500 and not any(
        p.any() for p in net.parameters()
    )
    assert [p.numel() for p in net.parameters()] == [5_000_000, 500] and net.chunk == 1
    for wrong in (dict(n_words=0), dict(n_tags=0), dict(posts="median")):
        with pytest.raises(ValueError):
            TagRegression(**wrong)


def test_bags_labels_and_scores():
    x = torch.tensor([[3, 3, -1], [-1, -1, -1], [-1, 0, 2]])
    words, starts, length = bags(x)
    assert (
        words.tolist() == [3, 3, 0, 2]
        and starts.tolist() == [0, 2, 2]
        and length.tolist() == [2, 0, 2]
    )
    assert multi_hot(torch.tensor([[1, -1], [-1, -1], [0, 2]]), 3).tolist() == [
        [0, 1, 0],
        [0, 0, 0],
        [1, 0, 1],
    ]
    net = TagRegression(5, 3)
    nn.init.normal_(net.linear.weight, generator=torch.Generator().manual_seed(0))
    nn.init.ones_(net.linear.bias)
    assert torch.allclose(net(x), net.linear(dense(x, 5)), atol=1e-6)


def test_loss_is_the_mean_over_tags():
    _, x, y = made_posts(0)
    scores = torch.randn(60, 9, generator=torch.Generator().manual_seed(1))
    by_hand = F.binary_cross_entropy(
        torch.sigmoid(scores), multi_hot(y, 9), reduction="none"
    )
    assert torch.isclose(loss_of(scores, y), by_hand.mean()) and torch.isclose(
        loss_of(scores, y, "sum"), by_hand.mean(1).sum()
    )


@settings(max_examples=12, deadline=None)
@given(
    seed=some.integers(0, 10**6),
    posts=some.sampled_from(["mean", "sum"]),
    batch=some.integers(1, 17),
    epochs=some.integers(1, 2),
)
def test_local_sgd_is_dense_sgd(seed, posts, batch, epochs):
    rng, x, y = made_posts(seed)
    net = TagRegression(40, 9, posts)
    w = torch.from_numpy(rng.standard_normal(40 * 9 + 9).astype(np.float32))
    cuts = [np.arange(0, 4), np.arange(4, 31), np.arange(31, 60)]
    plan = torch.from_numpy(batch_plan(cuts, epochs, batch, [rng] * 3))
    updates, losses = net.local_sgd(w, x, y, plan, 2.0)
    for client, update, loss in zip(plan, updates, losses):
        reference, trace = nn.Linear(40, 9), []
        nn.utils.vector_to_parameters(
            w.clone(), reference.parameters()
        )  # it keeps views of what it is given
        optimiser = torch.optim.SGD(reference.parameters(), lr=2.0)
        for index in client:
            if not (index := index[index >= 0]).numel():
                continue
            each = F.binary_cross_entropy_with_logits(
                reference(dense(x[index], 40)), multi_hot(y[index], 9), reduction="none"
            ).mean(1)
            optimiser.zero_grad()
            (each.sum() if posts == "sum" else each.mean()).backward()
            optimiser.step()
            trace.append(float(each.mean().detach()))
        want = nn.utils.parameters_to_vector(reference.parameters()).detach() - w
        assert (
            torch.allclose(update, want, rtol=1e-4, atol=2e-6 * float(want.abs().max()))
            and abs(float(loss) - np.mean(trace)) < 1e-5
        )


def test_local_sgd_moves_only_used_words_and_does_not_depend_on_company():
    rng, x, y = made_posts(5)
    w = torch.zeros(40 * 9 + 9)
    plan = torch.from_numpy(
        batch_plan([np.arange(3), np.arange(3, 60)], 1, 10, [rng] * 2)
    )
    net = TagRegression(40, 9)
    updates, _ = local_sgd(net, w, x, y, plan, 50.0)
    used = set(x[:3].unique().tolist()) - {-1}
    assert (
        set(updates[0, :-9].view(9, 40).abs().sum(0).nonzero()[:, 0].tolist()) == used
    )
    assert torch.equal(updates.flip(0), local_sgd(net, w, x, y, plan.flip(0), 50.0)[0])
    assert torch.equal(updates[1:], local_sgd(net, w, x, y, plan[1:], 50.0)[0])
    with pytest.raises(ValueError, match="mask is given"):
        local_sgd(net, w, x, y, plan, 50.0, mask=torch.ones(369) > 0)


def test_sparse_step_by_hand():
    rows, bias = torch.zeros(3, 2), torch.zeros(2)
    loss = sparse_step(
        rows, bias, torch.tensor([[0, 0, 1]]), torch.tensor([[1, -1]]), 6.0
    )
    assert torch.isclose(loss, torch.tensor(2.0).log()) and bias.tolist() == [-3.0, 3.0]
    assert torch.allclose(rows, torch.tensor([[-2.0, 2.0], [-1.0, 1.0], [0.0, 0.0]]))


def test_recall_counts_tags_among_the_first_five():
    rng, x, y = made_posts(7)
    net = TagRegression(40, 9)
    w = torch.from_numpy(rng.standard_normal(40 * 9 + 9).astype(np.float32))
    scores = (dense(x, 40) @ w[:-9].view(9, 40).T + w[-9:]).numpy()
    truth = multi_hot(y, 9).numpy() > 0
    for k in (1, 5):
        best = np.argsort(-scores, 1)[:, :k]
        found = sum(truth[i, j] for i in range(60) for j in best[i])
        got = recall(net, w, x, y, k)
        assert got[f"recall{k}"] == pytest.approx(100 * found / truth.sum())
    assert got["loss"] == pytest.approx(
        float(loss_of(torch.from_numpy(scores), y)), rel=1e-5
    )
    assert recall(net, torch.zeros_like(w), x, y)["recall5"] == 0, "ties find nothing"
    with pytest.raises(ValueError, match="y holds no tag"):
        recall(net, w, x, torch.full_like(y, -1))


# ---- TFF's files

LONG = " ".join(["list"] * 60)  # longer than 127 bytes: lengths of two bytes
USERS = {
    "train": {
        "ann": [
            ("the list is sorted", "how to sort a list", "python|sorting"),
            (LONG, "a key", "css"),
        ],
        "bob": [("a table", "what", "sql|python|python")],
    },
    "test": {
        "cy": [("sort the table", "sql order", "sql")],
        "di": [("key", "list", "zzz"), ("a", "a", "python")],
    },
}


def varint(n):
    return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)


def field(number, content):
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(tokens, title, tags, names=files.FIELDS):
    "A tf.train.Example with three strings, a number and a field that nobody asked for."
    score = field(1, b"score") + field(2, field(3, field(1, varint(300))))
    entries = [
        field(1, name.encode()) + field(2, field(1, field(1, text.encode())))
        for name, text in zip(names, (tokens, title, tags))
    ]
    return (
        varint(7 << 3)
        + varint(300)
        + varint(8 << 3 | 5)
        + b"abcd"
        + field(1, b"".join(field(1, e) for e in [score, *entries]))
    )


def write_sqlite(path, users, rows=example, tables=("examples", "client_metadata")):
    with closing(sqlite3.connect(path)) as base:
        if "examples" in tables:
            base.execute(
                "CREATE TABLE examples (split_name TEXT, client_id TEXT,"
                " serialized_example_proto BLOB)"
            )
        if "client_metadata" in tables:
            base.execute(
                "CREATE TABLE client_metadata (client_id TEXT, split_name TEXT,"
                " num_examples INTEGER)"
            )
        for split, clients in users.items() if len(tables) == 2 else ():
            for client, posts in clients.items():
                base.execute(
                    "INSERT INTO client_metadata VALUES (?, ?, ?)",
                    (client, split, len(posts)),
                )
                base.executemany(
                    "INSERT INTO examples VALUES (?, ?, ?)",
                    [(split, client, rows(*post)) for post in posts],
                )
        base.commit()


def write_h5(root, users):
    h5py = pytest.importorskip("h5py")
    for split, clients in users.items():
        with h5py.File(root / f"stackoverflow_{split}.h5", "w") as file:
            for client, posts in clients.items():
                for name, column in zip(files.FIELDS, zip(*posts)):
                    file[f"examples/{client}/{name}"] = [
                        text.encode() for text in column
                    ]


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "stackoverflow"
    folder.mkdir()
    (folder / "stackoverflow.word_count").write_text(
        "a 5\nlist 9\nsort 3\nsorted 2\ntable 2\nkey 2\nrare 1\n"
    )
    (folder / "stackoverflow.tag_count").write_text(
        json.dumps({"sorting": 1, "python": 3, "sql": 2, "css": 1})
    )
    return folder


def load(root, n_words=6, n_tags=3):
    return files.stackoverflow(root.parent, n_words, n_tags, whole=False)


def test_vocabularies_are_by_frequency(root):
    assert files.read_counts(root / "stackoverflow.word_count", 3) == {
        "list": 0,
        "a": 1,
        "sort": 2,
    }
    assert list(files.read_counts(root / "stackoverflow.tag_count", 4)) == [
        "python",
        "sql",
        "sorting",
        "css",
    ]
    with pytest.raises(
        ValueError,
        match="stackoverflow.word_count has 7 entries and the vocabulary needs 8",
    ):
        files.read_counts(root / "stackoverflow.word_count", 8)
    with pytest.raises(ValueError, match="n is 0"):
        files.read_counts(root / "stackoverflow.word_count", 0)
    for name, text in (
        ("a.word_count", "one\n"),
        ("b.word_count", "one two\n"),
        ("c.tag_count", "{"),
        ("d.tag_count", "[1]"),
        ("e.tag_count", '{"a": null}'),
    ):
        (root / name).write_text(text)
        with pytest.raises(ValueError, match=f"{name} is no list of counts"):
            files.read_counts(root / name, 1)


def test_protocol_buffers():
    assert files.read_example(example("x y", LONG, "t|u")) == {
        "tokens": b"x y",
        "title": LONG.encode(),
        "tags": b"t|u",
    }
    assert list(
        files.message_fields(
            field(3, b"ab") + varint(1 << 3 | 1) + bytes(8) + field(300, b"")
        )
    ) == [(3, b"ab"), (300, b"")]
    for wrong in (field(1, b"abc")[:-1], b"\x0b", b"\x80"):
        with pytest.raises(IndexError):
            list(files.message_fields(wrong))


@pytest.mark.parametrize("kind", ["sqlite", "h5"])
def test_files_are_a_source(root, kind):
    if kind == "sqlite":
        write_sqlite(root / "stackoverflow.sqlite", USERS)
    else:
        write_h5(root, USERS)
    source = load(root)
    assert isinstance(source, files.Files)
    fed = federation(source, 3)
    assert (
        len(fed.parts) == source.n_clients == 2
        and fed.sizes.tolist() == [2, 1] == files.client_sizes(source, [0, 1]).tolist()
        and len(fed.data.x_test) == 3
    )
    data, parts = fed.visit([1, 0, 1])
    assert source.words == {
        "list": 0,
        "a": 1,
        "sort": 2,
        "sorted": 3,
        "table": 4,
        "key": 5,
    } and source.tags == {"python": 0, "sql": 1, "sorting": 2}
    post, tags = data.x[parts[1]][0], data.y[parts[1]]
    assert (
        post[post >= 0].tolist() == [0, 3, 2, 1, 0]
        and tags.tolist() == [[0, 2], [-1, -1]]
        and data.y[parts[0]].tolist() == [[0, 1]]
    )
    assert (data.x[parts[1]][1] >= 0).sum() == 62
    assert fed.partition_hash != federation(load(root, 5), 3).partition_hash
    run = simulate(
        Task(
            TagRegression(6, 3),
            fed,
            dprec_curves.fedavg("f", Config(), 2, 1.0, 0.1).mechanism,
            Config(rounds=1, cohort=2, lr=1.0, server="sgd", eval_every=1),
            0,
        ),
        metrics=lambda net, w, x, y: recall(net, w, x, y, 1),
        progress=False,
    )
    assert run.finished
    with pytest.raises(
        ValueError, match="n_test is 4, but stackoverflow.* has 3 test posts"
    ):
        federation(source, 4)
    with pytest.raises(ValueError, match="has 2 users.*the whole data set has 342477"):
        files.stackoverflow(root.parent, 6, 3)
    with pytest.raises(ValueError, match="has 7 entries"):
        files.stackoverflow(root.parent)


def test_readers_agree(root):
    write_sqlite(root / "stackoverflow.sqlite", USERS)
    write_h5(root, USERS)
    for split in USERS:
        base, h5 = root / "stackoverflow.sqlite", root / f"stackoverflow_{split}.h5"
        assert list(files.sqlite_clients(base, split)) == list(files.h5_clients(h5))
        for client, posts in USERS[split].items():
            want = [tuple(text.encode() for text in post) for post in posts]
            assert (
                files.sqlite_posts(base, split, client)
                == want
                == [tuple(map(bytes, p)) for p in files.h5_posts(h5, split, client)]
            )
    source = load(root)
    x, y, sizes = files.encode_posts(source, [[(b"a zzz", b"key", b"sql")], []])
    assert x.tolist() == [[1, 5]] and y.tolist() == [[1]] and sizes.tolist() == [1, 0]
    assert files.evaluation_posts(source, 2)[0].shape[0] == 2 and files.split_clients(
        source, "test"
    ) == {"cy": 1, "di": 2}
    assert files.read_client(source, "test", "cy") == [
        (b"sort the table", b"sql order", b"sql")
    ]


@pytest.mark.parametrize(
    "spoil, text",
    [
        (
            lambda p: write_sqlite(p, USERS, tables=("examples",)),
            "cannot be read as TFF's database .*no such table: client_metadata",
        ),
        (
            lambda p: p.write_bytes(b"not a database" * 99),
            "cannot be read as TFF's database",
        ),
        (
            lambda p: write_sqlite(p, {"test": USERS["test"]}),
            "holds no user of the split 'train'",
        ),
        (
            lambda p: write_sqlite(p, USERS, rows=lambda *post: example(*post)[:-2]),
            "user 'ann', has a row that is no tf.train.Example",
        ),
        (
            lambda p: write_sqlite(
                p,
                USERS,
                rows=lambda *post: example(*post, names=("tokens", "title", "labels")),
            ),
            "user 'ann', has a post without 'tags'",
        ),
        (
            lambda p: write_sqlite(p, USERS, rows=lambda *post: None),
            "user 'ann', has None as serialized_example_proto; it must be bytes",
        ),
        (
            lambda p: write_sqlite(p, USERS | {"train": {"ann": []}}),
            "user 'ann', holds 0 posts and announces 0; a user needs one or more",
        ),
    ],
)
def test_broken_databases_are_refused(root, spoil, text):
    spoil(root / "stackoverflow.sqlite")
    with pytest.raises(ValueError, match="stackoverflow.sqlite.*" + text):
        load(root).posts([0])


def test_a_database_without_examples_is_refused(root):
    write_sqlite(root / "stackoverflow.sqlite", USERS)
    with closing(sqlite3.connect(root / "stackoverflow.sqlite")) as base:
        base.execute("DROP TABLE examples")
        base.commit()
    with pytest.raises(ValueError, match="no such table: examples"):
        load(root).posts([0])


def test_broken_h5_files_are_refused(root, monkeypatch):
    h5py = pytest.importorskip("h5py")
    write_h5(root, USERS)
    path = root / "stackoverflow_train.h5"
    with h5py.File(path, "a") as file:
        del file["examples/ann/tags"], file["examples/bob/tags"]
        file["examples/bob/tags"] = [b"x", b"y"]
        file["examples/eve/tokens"] = file["examples/eve/title"] = file[
            "examples/eve/tags"
        ] = np.zeros(0, "S1")
    source = load(root)
    for i, text in enumerate(
        (
            "user 'ann', has no 'tags'",
            "user 'bob', has 1 tokens, 1 title, 2 tags",
            "user 'eve', holds 0 posts;",
        )
    ):
        with pytest.raises(ValueError, match=f"stackoverflow_train.h5, {text}"):
            source.posts([i])
    with h5py.File(path, "w"):
        pass
    with pytest.raises(
        ValueError, match="stackoverflow_train.h5 has no group 'examples'"
    ):
        load(root).posts([0])
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="stackoverflow_train.h5 is no h5 file"):
        load(root).posts([0])
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(
        ImportError,
        match=(
            "stackoverflow_train.h5 needs the package h5py: run `pip install h5py`, or"
            " use TFF's stackoverflow.sqlite"
        ),
    ):
        load(root).posts([0])


def test_missing_files_are_named(root):
    with pytest.raises(
        FileNotFoundError,
        match="stackoverflow lacks stackoverflow_train.h5 .*set DPCOMM_DATA",
    ):
        load(root)
    write_sqlite(root / "stackoverflow.sqlite", USERS)
    (root / "stackoverflow.tag_count").unlink()
    with pytest.raises(
        FileNotFoundError, match="stackoverflow lacks stackoverflow.tag_count"
    ):
        load(root)
    assert (
        files.WHOLE["train"] == (342_477, 135_818_730)
        and round(files.WHOLE["train"][1] / files.WHOLE["train"][0], 2) == 396.58
    )
