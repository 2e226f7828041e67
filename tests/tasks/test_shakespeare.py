"""Shakespeare: texts to windows, both readers, and the recurrent network whose passes
are written out.
"""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import or_skip
from tables import tabled

from dpcomm.core.chance import seed_tree
from dpcomm.core.vectors import flatten, groups
from dpcomm.mechanisms.gaussian import Gaussian
from dpcomm.tasks import shakespeare
from dpcomm.tasks.images import check_partition, data_root
from dpcomm.training import models, recurrent
from dpcomm.training.federated import Config, Task, batch_plan, simulate, train_loop

# ---- symbols and texts


def test_the_alphabet_is_leafs():
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    assert (
        shakespeare.SYMBOLS
        == "\n !\"&'(),-.0123456789:;>?" + letters + "[]" + letters.lower() + "}"
        and len(set(shakespeare.SYMBOLS)) == 80
    )
    assert shakespeare.encode_text("here", shakespeare.SYMBOLS).tolist() == list(
        range(80)
    ) and shakespeare.encode_text("here", "").shape == (0,)


@pytest.mark.parametrize(
    "text, symbol", [("a$", r"'\$'"), ("é", "'é'"), ("€?", "'€'"), ("a\tb", r"'\\t'")]
)
def test_other_symbols_are_refused(text, symbol):
    with pytest.raises(
        ValueError,
        match=f"here has the symbol {symbol}; it must be one of LEAF's 80: replace it",
    ):
        shakespeare.encode_text("here", text)


def test_cleaning_leaves_one_line_of_the_alphabet():
    assert (
        shakespeare.clean_text(["  To be,\nor  not\t", "to é be $ ."])
        == "To be, or not to be ."
    )
    assert shakespeare.clean_text([]) == ""


def test_the_longest_roles_in_the_order_of_the_file():
    texts = {"d": "xx", "c": "xxx", "b": "xx", "a": "x"}
    assert list(shakespeare.longest_roles(texts, 2)) == [
        "c",
        "b",
    ], "of two equals the first by name"
    assert list(shakespeare.longest_roles(texts, 3)) == ["d", "c", "b"]
    with pytest.raises(
        ValueError, match="n_clients is 5; it must be a whole number from 1 to 4"
    ):
        shakespeare.longest_roles(texts, 5)


# ---- windows


@pytest.mark.parametrize("n", [811, 843, 5000])
def test_no_test_window_holds_a_character_of_training(n):
    k, start = shakespeare.split_windows(n)
    read = set(range(k + 80))  # all that training reads or predicts
    assert k == int(0.9 * n) and 1 <= n - start and not read & set(range(start, n + 80))
    assert k + 79 in read and start == k + 80, "and the gap is not longer than needed"
    with pytest.raises(ValueError, match="fraction is 1; it must be between 0 and 1"):
        shakespeare.split_windows(n, 1)


@pytest.fixture(scope="module")
def texts():
    return shakespeare.synthetic_roles(3, 950)


def test_a_federation_holds_the_windows_of_the_texts(texts):
    found, start, test = shakespeare.federate(texts, "made", "made"), 0, []
    for text, part in zip(texts.values(), found.parts):
        k, first = shakespeare.split_windows(len(text) - 80)
        assert part.tolist() == list(range(start, start + k))
        for i in (0, k // 2, k - 1):
            window = "".join(shakespeare.SYMBOLS[j] for j in found.data.x[start + i])
            assert (
                window == text[i : i + 80]
                and shakespeare.SYMBOLS[found.data.y[start + i]] == text[i + 80]
            )
        test += [(text[i : i + 80], text[i + 80]) for i in range(first, len(text) - 80)]
        start += len(text)
    decoded = [
        ("".join(shakespeare.SYMBOLS[j] for j in x), shakespeare.SYMBOLS[y])
        for x, y in zip(found.data.x_test, found.data.y_test)
    ]
    assert decoded == test and found.data.y.dtype == torch.int64


def test_windows_are_a_view_of_the_text(texts):
    found = shakespeare.federate(texts, "made", "made")
    assert found.data.x.dtype == torch.uint8 and found.data.x.stride() == (1, 1)
    assert found.data.x.untyped_storage().nbytes() == sum(map(len, texts.values()))


def test_shortened_clients_and_fewer_test_windows(texts):
    whole = shakespeare.federate(texts, "made", "made")
    found = shakespeare.federate(texts, "made", "made", 7, 5)
    assert found.sizes.tolist() == [7, 7, 7] and all(
        (a == b[:7]).all() for a, b in zip(found.parts, whole.parts)
    )
    assert len(found.data.y_test) == 5 and torch.equal(
        found.data.x_test[[0, -1]], whole.data.x_test[[0, -1]]
    )
    with pytest.raises(ValueError, match="n_test is 0"):
        shakespeare.federate(texts, "made", "made", None, 0)


@pytest.mark.parametrize("length", [0, 80, 500, 880])
def test_a_client_without_windows_is_named(length):
    with pytest.raises(
        ValueError,
        match=(
            f"plays, user 'Hamlet', has {length} characters; a client needs a training"
            " and a test window.*drop the user"
        ),
    ):
        shakespeare.federate({"Hamlet": "x" * length}, "plays", "made")


def test_the_made_text_is_learnable_and_its_own():
    assert (
        shakespeare.synthetic_roles(2)
        == shakespeare.synthetic_roles(2)
        != shakespeare.synthetic_roles(2, seed=1)
    )
    found = list(shakespeare.synthetic_roles(4, 900).values())
    assert [len(t) for t in found] == [900, 1125, 1350, 1575] and set(
        "".join(found).split()[:50]
    ) <= set(shakespeare.WORDS)
    with pytest.raises(ValueError, match="length is 10"):
        shakespeare.synthetic_roles(2, 10)


# ---- the file of roles


def roles(folder, **changes):
    said = {"A__X": ["one two", "three"], "B__Y": ["four"]}
    content = {
        "users": list(said),
        "num_speeches": [2, 1],
        "num_chars": [12, 4],
        "speeches": said,
    } | changes
    path = folder / shakespeare.FILE
    path.write_bytes(
        gzip.compress(
            json.dumps({k: v for k, v in content.items() if v is not None}).encode()
        )
    )
    return path


def test_roles_are_read(tmp_path):
    assert shakespeare.read_roles(roles(tmp_path)) == {
        "A__X": "one two three",
        "B__Y": "four",
    }


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"speeches": None},
            (
                r"shakespeare_roles.json.gz has no 'speeches'; it must be an object:"
                r" make the file again"
            ),
        ),
        (
            {"num_chars": [12]},
            "has 2 users, 2 num_speeches and 1 num_chars; these must be equal",
        ),
        (
            {"speeches": {"A__X": ["one two", "three"]}},
            "user 'B__Y', has no speeches; every user needs them",
        ),
        (
            {"num_chars": [12, 5]},
            (
                "user 'B__Y', has 1 speeches of 4 characters and announces 1 of 5;"
                " these must be equal"
            ),
        ),
        (
            {"num_speeches": [3, 1]},
            "user 'A__X', has 2 speeches of 12 characters and announces 3 of 12",
        ),
    ],
)
def test_malformed_roles_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        shakespeare.read_roles(roles(tmp_path, **changes))


def test_a_broken_or_absent_file_of_roles(tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match=(
            "put shakespeare_roles.json.gz into <data root>/shakespeare, or LEAF's"
            " json.*DPCOMM_DATA"
        ),
    ):
        shakespeare.shakespeare(tmp_path)
    path = roles(tmp_path)
    for raw in (path.read_bytes()[:20], b"plain", gzip.compress(b"{")):
        path.write_bytes(raw)
        with pytest.raises(
            ValueError,
            match=(
                r"shakespeare_roles.json.gz (cannot be unpacked|is no json) \(.*make"
                r" the file again"
            ),
        ):
            shakespeare.read_roles(path)


def test_a_part_of_the_roles_is_refused_unless_asked_for(tmp_path, texts):
    (tmp_path / "shakespeare").mkdir()
    sizes = [len(t) for t in texts.values()]
    roles(
        tmp_path / "shakespeare",
        users=list(texts),
        num_speeches=[1] * 3,
        num_chars=sizes,
        speeches={u: [t] for u, t in texts.items()},
    )
    with pytest.raises(
        ValueError,
        match=(
            "has 3 roles of 1 plays; the whole file has 1339 of 37: make it again, or"
            " pass whole=False"
        ),
    ):
        shakespeare.shakespeare(tmp_path)
    assert len(shakespeare.shakespeare(tmp_path, 2, whole=False).parts) == 2


def test_the_real_roles_are_counted():
    real = or_skip(shakespeare.shakespeare)
    assert (
        len(real.parts) == 660 and 20 * abs(real.sizes.sum() - 3_678_451) < 3_678_451
    ), "the paper's count within 5 %"
    texts = shakespeare.read_roles(data_root() / "shakespeare" / shakespeare.FILE)
    chosen = shakespeare.longest_roles(texts)
    assert (
        min(map(len, chosen.values())) == 924
        and max(len(t) for u, t in texts.items() if u not in chosen) <= 924
    )
    assert real.sizes.tolist() == [int(0.9 * (len(t) - 80)) for t in chosen.values()]


# ---- LEAF's files


def leaf(folder, **changes):
    text = shakespeare.synthetic_roles(1, 900)["made__0"]
    entry = {
        "x": [text[i : i + 80] for i in range(5)],
        "y": [text[i + 80] for i in range(5)],
    }
    content = {
        "users": ["a", "b"],
        "num_samples": [5, 2],
        "user_data": {"a": entry, "b": {k: v[:2] for k, v in entry.items()}},
    } | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "all.json").write_text(
        json.dumps({k: v for k, v in content.items() if v is not None})
    )
    return content


def test_leafs_files_are_read_where_they_are(tmp_path):
    content = leaf(tmp_path / "shakespeare" / "train")
    leaf(tmp_path / "shakespeare" / "test", users=["b"], num_samples=[2])
    for found in (shakespeare.from_leaf(tmp_path), shakespeare.shakespeare(tmp_path)):
        assert (
            found.data.name == "shakespeare-leaf"
            and found.sizes.tolist() == [5, 2]
            and len(found.data.y_test) == 2
        )
        check_partition(found.parts, 7)
        windows = [
            "".join(shakespeare.SYMBOLS[j] for j in x)
            for x in found.data.x[found.parts[0]]
        ]
        assert (
            windows == content["user_data"]["a"]["x"]
            and found.data.x.dtype == torch.uint8
        )
        assert [
            shakespeare.SYMBOLS[j] for j in found.data.y[found.parts[1]]
        ] == content["user_data"]["b"]["y"]


X, Y = "x" * 80, "y"


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"users": None},
            "all.json has no 'users'; LEAF writes users, num_samples and user_data",
        ),
        (
            {"num_samples": [5]},
            "all.json has 2 users and 1 num_samples; these must be equal",
        ),
        (
            {"users": ["a", "c"]},
            "all.json, user 'c', has no x and y in user_data; every user needs both",
        ),
        ({"users": ["a", "a"]}, "all.json, user 'a', stands in the files twice"),
        ({"user_data": {"a": {"x": [X]}}}, "all.json, user 'a', has no x and y"),
        (
            {"user_data": {"a": {"x": [], "y": []}}},
            "all.json, user 'a', holds no sample; .*drop the user",
        ),
        (
            {"user_data": {"a": {"x": [X, X], "y": [Y]}}},
            (
                "all.json, user 'a', has 2 windows, 1 next characters and announces 5;"
                " these must be equal"
            ),
        ),
        ({"num_samples": [4, 2]}, "has 5 windows, 5 next characters and announces 4"),
        ({"users": []}, None),
    ],
)
def test_malformed_leaf_files_are_refused(tmp_path, changes, message):
    leaf(tmp_path, **changes)
    with pytest.raises(ValueError, match=message or "users and 2 num_samples"):
        shakespeare.read_leaf(tmp_path)


def test_leaf_files_that_are_no_json_or_absent(tmp_path):
    with pytest.raises(ValueError, match="holds no user; it must hold one or more"):
        shakespeare.read_leaf(tmp_path)
    (tmp_path / "cut.json").write_text("{")
    with pytest.raises(
        ValueError, match=r"cut.json is no json \(.*\); download it again"
    ):
        shakespeare.read_leaf(tmp_path)
    (tmp_path / "cut.json").write_text("[1]")
    with pytest.raises(ValueError, match="cut.json has no 'users'"):
        shakespeare.read_leaf(tmp_path)


@tabled(
    "x, y, message",
    [
        ([X[1:]], [Y], "in x; it must be a string of 80 characters"),
        ([7], [Y], "here has 7 in x"),
        ([X], ["yy"], "here has 'yy' in y; it must be a string of 1"),
        ([X], [""], "here has '' in y"),
        (["$" + X[1:]], [Y], r"here has the symbol '\$'"),
        ([X], ["é"], "here has the symbol 'é'"),
    ],
)
def test_check_role_refuses(x, y, message):
    with pytest.raises(ValueError, match=message):
        shakespeare.check_role("here", x, y)


# ---- the network


def problem(hidden=7, length=9, layers=2, seed=0):
    "A small network in double precision, a text of 12 symbols, three unequal clients."
    net = recurrent.CharLSTM(12, 3, hidden, layers).double()
    rng = seed_tree(seed, "net")
    w = torch.from_numpy(rng.uniform(-0.6, 0.6, sum(groups(net).values())))
    text = torch.from_numpy(rng.integers(0, 12, 200).astype(np.uint8))
    parts = [np.arange(4), np.arange(20, 57), np.arange(90, 101)]
    plan = torch.from_numpy(
        batch_plan(parts, 2, 5, [seed_tree(seed, i) for i in range(3)])
    )
    return net, w, text.unfold(0, length, 1)[:-1], text[length:].long(), plan


@pytest.mark.parametrize("lead", [(), (2,)])
def test_working_copies_keep_every_weight(lead):
    net, w, *_ = problem()
    p = recurrent.arrange(net, w, lead)
    assert set(p) == set(groups(net)) and torch.equal(
        recurrent.restore(net, p), w.expand(*lead, -1)
    )
    p["linear.bias"] += 1
    assert torch.equal(
        recurrent.restore(net, p)[..., -12:], w[-12:].expand(*lead, -1) + 1
    ) and not torch.equal(recurrent.restore(net, p), w.expand(*lead, -1))


@tabled("layers", [1, 2, 3])
@tabled("lead", [(), (2,)])
def test_scores_are_the_modules(layers, lead):
    net, w, x, *_ = problem(layers=layers)
    torch.nn.utils.vector_to_parameters(w, net.parameters())
    ids = x[:10].view(*(lead or (1,)), -1, 9)
    ids = (ids if lead else ids[0]).long().mT.contiguous()
    buffers = [
        recurrent.LayerBuffers(lead, 9, ids.shape[-1], 7, w) for _ in range(layers)
    ]
    with torch.no_grad():
        scores = recurrent.forward(recurrent.arrange(net, w, lead), buffers, ids)
        torch.testing.assert_close(
            scores.reshape(10, 12), net(x[:10]), rtol=0, atol=1e-12
        )


def test_one_layer_back_through_time_is_autograds():
    """forward_layer, gate_derivatives and backward alone: a gradient at every state,
    not only at the last.
    """
    rng, h = seed_tree(3, "layer"), 5
    cell = torch.nn.LSTM(h, h, 1, bias=False).double()
    z = torch.from_numpy(rng.standard_normal((6, 2, h)))
    push = torch.from_numpy(rng.standard_normal((6, 2, h)))
    (cell(z)[0] * push).sum().backward()
    turn = list(recurrent.GATE_ORDER)
    wx, wh = (
        p.detach().view(4, h, h)[turn].reshape(4 * h, h)
        for p in (cell.weight_ih_l0, cell.weight_hh_l0)
    )
    buffers = recurrent.LayerBuffers((), 6, 2, h, z)
    buffers.gates.copy_(z @ wx.T)
    torch.testing.assert_close(
        recurrent.forward_layer(buffers, wh.T.contiguous()),
        cell(z)[0][-1].detach(),
        rtol=0,
        atol=1e-12,
    )
    buffers.dh.copy_(push)
    gates = recurrent.backward(buffers, wh)
    for p, rows in (
        (cell.weight_hh_l0, buffers.h_before),
        (cell.weight_ih_l0, z.flatten(0, 1)),
    ):
        torch.testing.assert_close(
            (gates.T @ rows).view(4, h, h),
            p.grad.view(4, h, h)[turn],
            rtol=0,
            atol=1e-12,
        )
    recurrent.gate_derivatives(buffers)
    o = buffers.gates[..., :h]
    torch.testing.assert_close(buffers.dh_dc, o * (1 - buffers.tanh**2))
    torch.testing.assert_close(buffers.dgates[..., :h], o * (1 - o) * buffers.tanh)


@tabled("together", [1, 2, 3])
@tabled("masked", [False, True])
def test_local_sgd_is_autograds(together, masked):
    "Unequal clients, a batch that is not full, two epochs; in double precision."
    net, w, x, y, plan = problem()
    mask = (
        torch.from_numpy(seed_tree(0, "mask").integers(0, 2, len(w)).astype(bool))
        if masked
        else None
    )
    ours = recurrent.train_recurrent(net, w, x, y, plan, 0.7, mask, together)
    loop = train_loop(net, w, x, y, plan, 0.7, mask)
    assert float(loop[0].abs().max()) > 0.1 and not (
        masked and float(loop[0][:, ~mask].abs().max())
    )
    for a, b in zip(ours, loop):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-8)


def test_the_papers_network_takes_autograds_step():
    net = models.build("lstm", seed_tree(0, "init")).double()
    w = flatten(p.detach() for p in net.parameters())
    text = torch.from_numpy(seed_tree(0, "text").integers(0, 80, 120))
    x = text.unfold(0, 80, 1)[:-1]
    y = text[80:]
    plan = torch.tensor([[[0, 7, 30, 9], [3, 1, -1, -1]]])
    ours, loop = net.local_sgd(w, x, y, plan, 1.0), train_loop(net, w, x, y, plan, 1.0)
    torch.testing.assert_close(ours[0], loop[0], rtol=0, atol=1e-8)
    moved = recurrent.arrange(net, ours[0][0])
    assert all(float(p.abs().max()) > 0 for p in moved.values()), "every tensor moves"


def test_one_step_moves_the_working_copies_and_returns_the_loss_before_it():
    net, w, x, y, plan = problem()
    p = recurrent.arrange(net, w)
    buffers = [recurrent.LayerBuffers((), 9, 4, 7, w) for _ in range(2)]
    with torch.no_grad():
        loss = recurrent.sgd_step(
            recurrent.Descent(p, 0.3),
            buffers,
            x[:4].long().mT.contiguous(),
            y[:4],
            w.new_full((4,), 0.25),
        )
    assert float(loss) == pytest.approx(
        recurrent.score(net, w, x[:4], y[:4])["loss"], abs=1e-12
    )
    assert recurrent.score(net, recurrent.restore(net, p), x[:4], y[:4])[
        "loss"
    ] < float(loss)


def test_score_counts():
    net, w, x, y, _ = problem()
    torch.nn.utils.vector_to_parameters(w, net.parameters())
    with torch.no_grad():
        scores = net(x)
    whole = recurrent.score(net, w, x, y)
    assert whole["accuracy"] == pytest.approx(
        100 * float((scores.argmax(1) == y).double().mean())
    )
    assert whole["loss"] == pytest.approx(
        float(torch.nn.functional.cross_entropy(scores, y))
    ) and recurrent.score(net, w, x, y, 7) == pytest.approx(whole)
    with pytest.raises(ValueError, match="block is 0"):
        recurrent.score(net, w, x, y, 0)
    with pytest.raises(ValueError, match="hidden is 0"):
        recurrent.CharLSTM(hidden=0)


# ---- in a federated run


@pytest.fixture(scope="module")
def run():
    federation = shakespeare.federate(
        shakespeare.synthetic_roles(5, 900), "made", "made", 12, 60
    )
    config = Config(
        rounds=3, cohort=3, batch=5, lr=0.5, server="sgd", server_lr=1.0, eval_every=1
    )

    def go(chunk=1, workers=1, **changes):
        net = models.initialise(recurrent.CharLSTM(hidden=8), seed_tree(0, "init"))
        net.chunk = chunk
        return simulate(
            Task(net, federation, Gaussian(0.5, 0.01), replace(config, **changes), 0),
            workers=workers,
            metrics=recurrent.score,
        )

    return go


def test_on_a_cpu_the_engine_is_the_loop_with_the_systems_lstm(run):
    own, loop = run(), run(engine="loop")
    assert torch.equal(own.w, loop.w)
    assert own.history[-1]["loss"] < own.history[0]["loss"] and set(own.history[0]) >= {
        "accuracy",
        "loss",
        "train_loss",
    }


def test_the_written_passes_agree_with_the_loop(run, monkeypatch):
    loop = run()
    monkeypatch.setattr(recurrent, "train_loop", recurrent.train_recurrent)
    written = run()
    torch.testing.assert_close(written.w, loop.w, rtol=0, atol=1e-5)
    assert not torch.equal(written.w, loop.w), "two ways of adding up"


def test_threads_and_chunks_change_nothing(run):
    first = run()
    for other in (run(workers=2), run(chunk=3, workers=2)):
        assert torch.equal(first.w, other.w) and first.history == other.history
