"What a node answers a hostile server: with its owner's floor, without it, and never more."

import json
from dataclasses import replace

import pytest
import torch
from flower_nodes import Grid, client_app, digits, first_model, identity, network
from flwr.app import ArrayRecord, ConfigRecord, Error, MetricRecord, RecordDict
from flwr.app import Message as Letter
from flwr.clientapp import ClientApp

import dpcomm
from dpcomm.core.vectors import computation
from dpcomm.interop import floor, sums
from dpcomm.interop import flower as native

pytestmark = pytest.mark.flower
_ = digits, identity  # fixtures

IMVU = dpcomm.mechanism("imvu", clip_norm=1.0, eps=1.0)
BARE = dpcomm.mechanism("gaussian", clip_norm=1e3, sigma=1e-9, local=True, exact=False)
ROUNDS, LIMITS = 3, dict(clip=1.0, noise=0.0, epsilon_round=60.0, epsilon_total=90.0)
LIMITS |= dict(delta=1e-5, clients=2, rounds=3, models=[[[10, 784], [10]]])


def limits(tmp_path, name="claims", **change):
    given = dict(claims=str(tmp_path / name), mechanisms=("imvu",)) | LIMITS | change
    return floor.Floor(**given)


def written(tmp_path, **change):
    "The same as a file of the owner's."
    table = dict(mechanisms=["imvu"]) | LIMITS | change
    text = "\n".join(f"{name} = {json.dumps(value)}" for name, value in table.items())
    return str(floor.write_private(tmp_path / "owner" / "floor.toml", text.encode()))


def letter(t=0, mechanism=IMVU, rounds=ROUNDS, arrays=None, kind="train", **change):
    said = dict(mechanism=repr(mechanism), round=t, rounds=rounds, clients=240)
    said |= dict(trains=["weight", "bias"]) | change
    content = {"arrays": arrays or first_model(), "dpcomm": ConfigRecord(said)}
    return Letter(RecordDict(content), dst_node_id=1001, message_type=kind)


def answered(grid, *letters):
    "What the node's replies say: a message's bytes, or an error's text."
    replies = [grid.one(sent) for sent in letters]
    return [
        r.error.reason if r.has_error() else r.content["dpcomm"]["message"]
        for r in replies
    ]


def told(tmp_path, name="claims"):
    return (tmp_path / name / "log.txt").read_text()


# ---- nothing about the data decides whether a node answers


def fails(how):
    "An app whose training goes wrong as the server made it go wrong."

    def train(message, context):
        state = message.content["arrays"].to_torch_state_dict()
        if how == "overflows":
            state["weight"] = state["weight"] * torch.inf
        if how == "is empty":
            return Letter(RecordDict({}), reply_to=message)
        if how == "has another shape":
            state["bias"] = torch.zeros(3)
        if how == "replies an error":
            return Letter(Error(7, "patient 344901, label 2"), reply_to=message)
        raised = {
            "sees a label": IndexError("Target 17 is out of bounds."),
            "has no memory": MemoryError("row [0.4929, 0.1696]"),
            "exits": SystemExit("patient 344901"),
        }
        if how in raised:
            raise raised[how]
        metrics = MetricRecord({"num-examples": 3})
        content = {"arrays": ArrayRecord(state), "my record": metrics}
        return Letter(RecordDict(content), reply_to=message)

    return lambda mods: made(mods, train)


def made(mods, train):
    app = ClientApp(mods=mods)
    app.train()(train)
    return app


WRONG = ["overflows", "is empty", "has another shape", "replies an error"]
WRONG += ["sees a label", "has no memory", "exits", "is no code"]


@pytest.mark.parametrize("how", WRONG)
def test_a_training_that_goes_wrong_is_a_zero_vector(how, tmp_path, monkeypatch):
    "It was an error, and told one exact bit a round at any epsilon."
    seen, real = [], type(IMVU).encode

    def encode(self, u, key=None):
        if how == "is no code" and not seen:
            seen.append(u)
            raise RuntimeError("row 3 is odd")
        seen.append(u)
        return real(self, u, key)

    monkeypatch.setattr(type(IMVU), "encode", encode)
    grid = Grid(fails(how)([native.mod(IMVU, floor=limits(tmp_path))]))
    usual = Grid(fails("goes well")([native.mod(IMVU, limits(tmp_path, "other"))]))
    reply, other = grid.one(letter()), usual.one(letter())
    assert (seen[how == "is no code"] == 0).all() and seen[0].shape == (7850,)
    for name in ("array_records", "metric_records", "config_records"):
        mine, theirs = (getattr(r.content, name) for r in (reply, other))
        assert {*mine} == {*theirs}, "a record's name tells"
    sizes = [len(r.content["dpcomm"]["message"]) for r in (reply, other)]
    assert sizes[0] == sizes[1]
    assert "the client's code failed" in told(tmp_path)
    assert "the client's code failed" not in told(tmp_path, "other")


def test_weights_that_overflow_for_one_pixel_tell_nothing_about_it(digits, tmp_path):
    "Finite weights, for which training overflows if and only if the pixel is set."
    x, parts = digits[0], digits[4]
    mine = torch.as_tensor(parts[1001 % 240])
    pixels = [int(k) for k in x[mine].sum(0).topk(3).indices] + [0, 1, 2]
    bits = [bool((x[mine][:, k] != 0).any()) for k in pixels]
    assert True in bits and False in bits
    wide = limits(tmp_path, rounds=9, epsilon_total=900.0)
    grid = Grid(client_app(digits, [native.mod(IMVU, wide)]))
    letters = []
    for t, pixel in enumerate(pixels):
        state = network().state_dict()
        state["weight"][:, pixel] = 3.4e38
        state["bias"][:] = 3.4e38
        letters.append(letter(t, rounds=9, arrays=ArrayRecord(state)))
    heard = answered(grid, *letters)
    assert all(isinstance(message, bytes) for message in heard)
    assert len({*map(len, heard)}) == 1


def test_an_answer_leaves_when_the_floor_says(tmp_path, monkeypatch):
    "A slow training is a zero vector, a fast one waits."
    now, slept = [0.0], []
    monkeypatch.setattr(native.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(native.time, "sleep", lambda s: slept.append(s))

    class Clock:
        def __init__(self, target, daemon):
            self.target = target

        def start(self):
            pass

        def join(self, seconds):
            now[0] += min(took, seconds)
            if took <= seconds:
                self.target()

    monkeypatch.setattr(native.threading, "Thread", Clock)
    limited = limits(tmp_path, seconds=60.0)
    grid = Grid(fails("goes well")([native.mod(IMVU, limited)]))
    for t, took in enumerate((5.0, 3600.0)):
        assert isinstance(answered(grid, letter(t))[0], bytes)
    assert slept == [55.0, 0]


# ---- floors


def test_without_a_floor_nothing_is_answered(digits, capsys):
    "It was the raw update, cosine 1, twenty times the same round."
    sent = letter(mechanism=BARE)
    app = client_app(digits, [native.mod(BARE)])
    for kind in ("train", "evaluate", "query"):
        grid = Grid(app)
        if kind != "train":
            getattr(app, kind)()(lambda message, context: 1 / 0)
        (said,) = answered(grid, letter(mechanism=BARE, kind=kind))
        assert "no file of limits (floor.toml), and a node" in said
    grid = Grid(client_app(digits, [native.mod(BARE, floor=False)]))
    first, *again = answered(grid, *[sent] * 3)
    assert isinstance(first, bytes) and all("already answered" in s for s in again)
    assert "rehearsal without limits or ledger" in capsys.readouterr().err


@pytest.mark.parametrize("narrow", ["the owner's", "the app's"])
def test_the_floors_of_owner_and_app_are_both_held_and_counted(
    narrow, digits, tmp_path
):
    owners, apps = dict(), dict()
    (owners if narrow == "the owner's" else apps)["clip"] = 0.5
    place = written(tmp_path, **owners)
    app = client_app(digits, [native.mod(IMVU, limits(tmp_path, **apps))])
    grid = Grid(app, settings=lambda node: dict(floor=place))
    assert "clip is 0.5 on this machine" in answered(grid, letter())[0]
    wide = written(tmp_path)
    both = Grid(
        client_app(digits, [native.mod(IMVU, limits(tmp_path))]),
        settings=lambda node: dict(floor=wide),
    )
    assert isinstance(answered(both, letter())[0], bytes)
    for claims in (tmp_path / "owner" / "claims", tmp_path / "claims"):
        assert len([*claims.glob("*/7-1001-0")]) == 1
    one = Grid(client_app(digits, [native.mod(IMVU, wide)]), settings=both.settings)
    assert isinstance(answered(one, letter(1))[0], bytes), "one ledger, counted once"


def test_an_apps_keys_do_not_stand_in_for_the_owners(digits, tmp_path):
    shared = dict(clip_norm=0.5, sigma=1.0, n_clients=2, tolerance=0.0)
    used = dpcomm.mechanism("ddgauss", **shared)
    strangers = sums.generate_keys(tmp_path / "strangers", 2)
    place = written(tmp_path, mechanisms=["ddgauss"])
    mods = [native.mod(used, keys=strangers)]
    settings = {"floor": place, "partition-id": 1}
    grid = Grid(client_app(digits, mods), settings=lambda node: settings)
    sent = letter(mechanism=used, step=sums.HELLO, nonce=b"n" * sums.NONCE)
    (why,) = answered(grid, sent)
    assert "needs a secure sum: name the folder with its keys" in why


def test_the_ledger_counts_rounds_and_a_round_is_answered_once(digits, tmp_path):
    "A server that said rounds = 1 in each letter got rounds 0 to 39 answered."
    grid = Grid(client_app(digits, [native.mod(IMVU, limits(tmp_path))]))
    letters = [letter(t, rounds=3) for t in (0, 0, 1, 2)]
    first, again, *others = answered(grid, *letters)
    assert "already answered" in again
    assert all(isinstance(message, bytes) for message in (first, *others))
    (beyond,) = answered(grid, letter(7, rounds=3))
    assert "a late round" in beyond
    assert "rounds is 3 on this machine" in answered(grid, letter(1, rounds=40))[0]
    other = letter(1, rounds=3, mechanism=replace(IMVU, eps=0.5))
    changed = client_app(digits, [native.mod(replace(IMVU, eps=0.5), limits(tmp_path))])
    assert "already answered" in answered(Grid(changed), other)[0]


def test_evaluation_and_metrics_leave_only_where_the_file_says_so(digits, tmp_path):
    "From 101 evaluations 100 entries of the exact gradient came."

    def app(**change):
        place = written(tmp_path, rounds=99, **change)
        made = client_app(digits, [native.mod(IMVU, keep=("secret", "num-examples"))])

        @made.evaluate()
        def evaluate(message, context):
            metrics = MetricRecord({"loss": 0.25, "row": [0.5, 0.25]})
            content = {"metrics": metrics, "arrays": message.content["arrays"]}
            return Letter(RecordDict(content), reply_to=message)

        @made.query()
        def query(message, context):
            raise KeyError("patient 344901")

        return Grid(made, settings=lambda node: dict(floor=place))

    closed = app()
    for kind in ("evaluate", "query"):
        reply = closed.one(letter(kind=kind))
        assert "this machine does not allow evaluation" in reply.error.reason
    assert not closed.one(letter()).content.metric_records
    opened = app(evaluation=True, metrics=["loss", "num-examples"])
    reply = opened.one(letter(kind="evaluate"))
    assert dict(reply.content["metrics"]) == {"loss": 0.25}
    assert not reply.content.array_records
    assert opened.one(letter(kind="query")).error.reason == native.SILENT
    metrics = opened.one(letter(1)).content["metrics"]
    assert {*metrics} == {"num-examples"}


def test_no_exception_leaves_with_its_text(digits, tmp_path):
    "Of the app's builder, of the ledger, of a letter that is none."
    secret = "patient 344901.0312 label 2"

    def builder(context):
        raise ValueError(secret)

    grid = Grid(client_app(digits, [native.mod(builder, limits(tmp_path))]))
    assert answered(grid, letter()) == [native.SILENT]
    assert secret in told(tmp_path)
    grid = Grid(client_app(digits, [native.mod(IMVU, limits(tmp_path))]))
    assert "`$.trains`" in answered(grid, letter(trains=3.5))[0]
    (tmp_path / "claims").chmod(0o777)
    assert "other users of this machine can access" in answered(grid, letter())[0]


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(round=0.5), "`$.round`"),
        (dict(mechanism="Imvu()"), "use the same mechanism on both sides"),
        (dict(trains=["weight", "weight"]), "parameter twice"),
        (dict(computation="0123"), "is not this node's"),
        (dict(trains=[]), "`$.trains`"),
        (dict(trains=["another"]), "trainable is 'another'; it must be one of"),
        (dict(odd=True), "trainable is 'bias'; it must be one of"),
        (dict(odd=True, trains=["running_var"]), "trainable is 'running_var'; it"),
    ],
)
def test_a_strange_server_gets_a_sentence(change, said, digits, tmp_path):
    told = dict(computation=computation(network())) | change
    if told.pop("odd", False):
        odd = dict(weight=torch.zeros(10, 784), bias=torch.full((10,), torch.inf))
        told["arrays"] = ArrayRecord(odd | dict(running_var=torch.ones(10)))
    used = [native.mod(IMVU, limits(tmp_path), model=network())]
    grid = Grid(client_app(digits, used))
    assert said in answered(grid, letter(**told))[0]
    bare = letter()
    del bare.content["dpcomm"]
    assert "Private of this version" in answered(grid, bare)[0]
    assert not [*(tmp_path / "claims").glob("*/7-*")], "nothing is counted"
