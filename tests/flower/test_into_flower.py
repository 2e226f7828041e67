"Client, server and conversation, without Flower."

import importlib
import itertools
import json
import stat
import sys
import tempfile
import threading
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from by_message import by_message
from tables import tabled

import dpcomm
from dpcomm import flower as room
from dpcomm.core.checks import NotInstalled
from dpcomm.core.random import seed_tree
from dpcomm.core.vectors import flatten
from dpcomm.datasets import images
from dpcomm.flower import client as flower
from dpcomm.flower import server as flower_server
from dpcomm.flower import transport as flower_transport
from dpcomm.interop import flower_app as deployment
from dpcomm.secagg.session import identities
from dpcomm.training import downlink, federated, federated_round, models, run_state
from dpcomm.training.floor import TRUST, Floor

MECHANISMS = {
    "rec": dict(clip_norm=1.0, std=1.0, index_bits=5),
    "imvu": dict(clip_norm=1.0, eps=3.0),
    "signsgd": dict(clip_norm=1.0, sigma=1.0),
    "gaussian": dict(clip_norm=1.0, sigma=1.0),
    "sqsgd": dict(residuals=False),
}
DATA = images.load("digits")
PARTS = images.iid(len(DATA.y), 4, seed_tree(0, "partition"))
FEDERATION = images.Federation(DATA, PARTS, "iid")
REC = dpcomm.mechanism("rec", **MECHANISMS["rec"])
CONFIG = federated.Config(
    rounds=2, cohort=4, lr=0.1, server="sgd", server_lr=0.3, engine="loop"
)
TASK = federated.Task(
    models.build("linear", seed_tree(0, "init")),
    flower.RemoteFederation(4),
    REC,
    CONFIG,
    0,
)
W = flatten(p.detach() for p in TASK.model.parameters())


PLACE, NUMBERS = tempfile.TemporaryDirectory(), itertools.count()
SHAPES = [[[10, 784], [10]]]
LENET = [list(p.shape) for p in models.build("lenet5", seed_tree(0)).parameters()]
WIDE = Floor(
    "",
    ("ddgauss", "skellam", "topk", *MECHANISMS),
    *(10.0, 0.0, 1e300, 1e300, 1e-5, 1, 9, [*SHAPES, LENET], True, True),
)


def allowed(folder=None, **more):
    "What an owner allows, with a ledger of its own."
    folder = folder or Path(PLACE.name) / str(next(NUMBERS))
    return replace(WIDE, claims=folder, **more)


def home(i, task=TASK, **more):
    "Client i, with repeatable keys."
    own = replace(task, federation=flower.own_part(FEDERATION, i))
    return flower.Node(own, i, **dict(insecure=True, floor=allowed()) | more)


def homes(task=TASK):
    return {100 + i: home(i, task) for i in range(4)}


def letter(t=0, task=TASK):
    return dict(round=t, agreement=flower.agreement_digest(task))


def soon(**more):
    return flower_transport.Deadlines(
        **dict(start=0.2, hello=0.2, round=0.2, poll=0.01) | more
    )


def promise(rounds):
    return REC.guarantee(rounds, 1e-5, sampling="none", accountant="exact-balle")


# ---- what both ends agree on


@pytest.mark.parametrize(
    "version, kind, says",
    [
        (None, NotInstalled, "the extra flower brings it"),
        ("1.40.0", ValueError, "pip install flwr==1.41.0"),
    ],
)
def test_another_flower_is_refused_in_a_sentence(monkeypatch, version, kind, says):
    def found(name):
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", found)
    with pytest.raises(kind, match=says):
        flower.need_flower()
    for app in (flower.client_app, flower_server.server_app):
        with pytest.raises(kind, match="flwr is"):
            app(None)
    monkeypatch.setattr(metadata, "version", lambda name: flower.FLWR)
    assert flower.need_flower() == flower.FLWR


SUMMED = dpcomm.mechanism("skellam", clip_norm=1.0, sigma=1.0, n_clients=4)


@tabled(
    "wrong, said",
    [
        (dict(mechanism=SUMMED), "sum"),
        (dict(mechanism=dpcomm.mechanism("sqsgd")), "residuals=False"),
        (dict(config=replace(CONFIG, sampling="replacement")), "twice"),
    ],
)
def test_what_cannot_travel_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        flower.check_task(replace(TASK, **wrong))
    with pytest.raises(ValueError, match=said):
        flower_server.serve(
            flower_transport.InProcessTransport({}), replace(TASK, **wrong)
        )


@tabled(
    "name, other",
    [
        ("mechanism", dict(mechanism=replace(REC, std=2.0))),
        ("seed", dict(seed=1)),
        ("clients", dict(federation=flower.RemoteFederation(5))),
        ("config.lr", dict(config=replace(CONFIG, lr=0.2))),
        ("weights", dict(model=models.build("lenet5", seed_tree(0, "init")))),
    ],
)
def test_a_difference_is_named_and_nothing_else(name, other):
    theirs = flower.agreement(replace(TASK, **other))
    said, *rest = flower.differences(flower.agreement(TASK), theirs)
    assert said.startswith(f"{name} is ")
    assert [line[:9] for line in rest] == ["layers is"] * (name == "weights")
    reply = flower.reply_hello(home(0), theirs)
    assert reply["code"] == flower.REFUSED
    if name != "clients":
        heard, node = [], homes() | {102: home(2, replace(TASK, **other))}
        clients, _ = flower_transport.handshake(
            flower_transport.InProcessTransport(node), TASK, soon(), heard.append
        )
        assert sorted(clients) == [0, 1, 3]
        assert len(heard) == 1 and f"node 102 is refused: {name} is" in heard[0]


def test_text_of_a_stranger_is_quoted_and_cut():
    theirs = flower.agreement(TASK) | dict(seed="\x1b[31m" + "x" * 10_000)
    (said,) = flower.differences(flower.agreement(TASK), theirs)
    assert len(said) < 400 and "\x1b" not in said
    assert len(flower.differences(flower.agreement(TASK), {})) > 10


def test_another_version_is_refused(monkeypatch):
    theirs = flower.agreement(TASK) | dict(dpcomm="0.0.1")
    assert flower.reply_hello(home(0), theirs)["code"] == flower.REFUSED
    assert flower.reply_hello(home(0), flower.agreement(TASK))["code"] == flower.OK


def test_a_part_is_the_clients_own():
    own = flower.own_part(FEDERATION, 2)
    data, (numbers,) = own.visit([2])
    assert torch.equal(data.x[numbers], DATA.x[PARTS[2]])
    assert len(own.parts) == 4
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match="client"):
            flower.own_part(FEDERATION, wrong)
    with pytest.raises(ValueError, match="n_clients"):
        flower.RemoteFederation(0)
    with pytest.raises(ValueError, match="client"):
        flower.Node(TASK, 4)


# ---- the client


@tabled("name", MECHANISMS)
def test_any_update_becomes_a_message_of_the_stated_size(name):
    task = replace(TASK, mechanism=dpcomm.mechanism(name, **MECHANISMS[name]))
    update = torch.from_numpy(seed_tree(1, name).standard_normal(len(W), np.float32))
    mechanism, key = task.mechanism.for_round(0), home(0, task).key(0)
    data = mechanism.encode(update).to_bytes()
    assert len(data) == mechanism.bits(len(W)).total // 8
    again = mechanism.encode(update, key).to_bytes()
    assert again == mechanism.encode(update, home(0, task).key(0)).to_bytes()


def test_keys_are_secret_unless_the_node_says_so():
    assert home(0, insecure=False).key(0) is None
    assert home(0).key(0) != home(0).key(1) != home(1).key(1)
    same, fresh = (
        [
            flower.train_and_reply(home(0, insecure=k), letter(), W)["message"]
            for _ in range(2)
        ]
        for k in (True, False)
    )
    assert same[0] == same[1] and fresh[0] != fresh[1]


def test_an_update_is_the_simulators():
    cohort = np.array([1])
    streams = TASK.streams(1, cohort, "batches")
    with ThreadPoolExecutor(1) as pool:
        whole = replace(TASK, federation=FEDERATION)
        ((updates, _),) = federated_round.train_cohort(whole, W, cohort, streams, pool)
    mine = flower.local_update(home(1).task, 1, W, 1)
    assert torch.equal(mine, updates[0])
    wild = replace(home(1).task, config=replace(CONFIG, lr=1e38))
    with pytest.raises(FloatingPointError, match="lower lr"):
        flower.local_update(wild, 1, W, 1)


def test_a_node_answers_each_round_once_and_in_order():
    memory = dict(last=0)
    assert flower.train_and_reply(home(0), letter(1), W, memory)["code"] == flower.OK
    assert memory == dict(last=1)
    for t in (1, 0):
        assert flower.train_and_reply(home(0), letter(t), W, memory) == dict(
            code=flower.AGAIN
        )
    for wrong in (-1, 2, 10**9):
        assert flower.train_and_reply(home(0), letter(wrong), W) == dict(
            code=flower.REFUSED
        )
    for wrong in (1.0, True, "1", None):
        assert flower.admit(home(0), letter() | dict(round=wrong), {}) == flower.REFUSED
    stranger = letter() | dict(agreement="1")
    assert flower.train_and_reply(home(0), stranger, W) == dict(code=flower.REFUSED)


def test_a_claimed_round_is_answered_by_one_of_many(tmp_path):
    node = home(0, insecure=False, floor=allowed(tmp_path / "claims"))
    with ThreadPoolExecutor(8) as pool:
        asked = [
            pool.submit(flower.train_and_reply, node, letter(), W) for _ in range(8)
        ]
    codes = sorted(reply.result()["code"] for reply in asked)
    assert codes == [flower.OK] + [flower.AGAIN] * 7
    assert flower.claim(node, 1) and not flower.claim(node, 1)
    assert flower.claim(home(1, floor=node.floor), 0)  # another client's
    other = home(0, replace(TASK, seed=1), floor=node.floor)
    assert flower.claim(other, 0)  # another agreement


@tabled("w", [W[:-1], W.double(), W * float("nan"), W * float("inf"), W[None]])
def test_another_model_is_refused_on_the_node(w):
    assert flower.check_weights(W, len(W)) is W
    for call in (
        flower.check_weights,
        lambda w, d: flower.train_and_reply(home(0), letter(), w),
    ):
        with pytest.raises(ValueError, match="agreed model"):
            call(w, len(W))
    reply = flower.guarded(flower.train_and_reply)(home(0), letter(), w)
    assert reply == dict(code=flower.FAILED)


@tabled("error", [ValueError, KeyError, SystemExit, MemoryError])
def test_no_exception_leaves_a_node(error, capsys):
    def handle(fields):
        raise error("Mrs Miller, 54")

    assert flower.guarded(handle)({}) == dict(code=flower.FAILED)
    assert "Miller" in capsys.readouterr().err  # the node's own log
    assert flower.guarded(lambda: 1)() == 1


# ---- the server


def test_what_is_dropped_leaves_the_sum_alone():
    good = flower.train_and_reply(home(0), letter(), W)
    gathering = flower_server.Gathering.of(TASK, 0, range(3))
    assert flower_server.add_reply(gathering, 0, good) == ""
    before = gathering.total.sum.copy()
    message = good["message"]
    drops = {
        "sent twice": [(0, good)],
        "not asked": [(3, good)],
        "lost": [(1, "Flower's error 5"), (1, "x" * 10_000)],
        "other agreement": [(1, dict(code=flower.REFUSED))],
        "failed on the node": [(1, dict(code=flower.FAILED))],
        "asked again on the node": [(1, dict(code=flower.AGAIN))],
        "malformed": [
            (1, {}), (1, dict(code=9)), (1, dict(code=-1)), (1, dict(code="0")),
            (1, dict(code=[0])), (1, dict(code=True)),
        ],
        "of another round": [(1, good | dict(round=1)), (1, dict(code=0))],
        "of another length": [
            (1, good | dict(message=message * 9)), (1, good | dict(message="text")),
            (1, good | dict(message=b"")), (1, dict(code=0, round=0)),
        ],
        "damaged or foreign": [
            (1, good | dict(message=bytes(len(message)))),
            (1, good | dict(message=message[:-1] + b"?")),
        ],
    }  # fmt: skip
    for reason, replies in drops.items():
        for client, reply in replies:
            assert flower_server.add_reply(gathering, client, reply).startswith(reason)
    assert gathering.heard == {0} and gathering.total.n == 1
    assert np.array_equal(gathering.total.sum, before)
    assert sum(gathering.dropped.values()) == sum(map(len, drops.values()))
    assert max(map(len, gathering.dropped)) < 100
    assert (
        flower_server.add_reply(
            gathering, 1, flower.train_and_reply(home(1), letter(), W)
        )
        == ""
    )


def test_noise_for_replies_never_raises():
    rng = np.random.default_rng(0)
    gathering = flower_server.Gathering.of(TASK, 0, range(4))
    pool = [0, 1, -1, 2**62, 0.5, "", "x", b"", b"dp\x01", [1], [b""], True, None]
    pool += [rng.bytes(26) for _ in range(9)]
    for _ in range(2000):
        names = rng.choice(["code", "round", "message", "x"], 3)
        reply = {str(k): pool[rng.integers(len(pool))] for k in names}
        assert flower_server.add_reply(gathering, int(rng.integers(-1, 5)), reply)
    assert gathering.total.n == 0


def simulated(task):
    "The same run in one process, message by message."
    whole = replace(task, federation=FEDERATION)
    return federated.simulate(whole, advance=by_message, progress=False)


WAYS = [("fixed", 3), ("poisson", 2)] * 3


@tabled("name, sampling, cohort", [(n, *w) for n, w in zip([*MECHANISMS, "rec"], WAYS)])
def test_a_served_run_is_the_simulators(name, sampling, cohort):
    config = replace(CONFIG, sampling=sampling, cohort=cohort)
    mechanism = dpcomm.mechanism(name, **MECHANISMS[name])
    task = replace(TASK, mechanism=mechanism, config=config)
    waits = soon(least=1)
    cohorts = [len(task.cohort(t)) for t in range(config.rounds)]
    served = flower_server.serve(
        flower_transport.InProcessTransport(homes(task)),
        task,
        None,
        waits,
        insecure=True,
    )
    run = simulated(task)
    assert [row.heard for row in served.rows] == cohorts
    assert torch.allclose(served.w, run.w.detach(), atol=1e-6)
    size = mechanism.bits(len(W)).total // 8
    assert [row.message_bytes for row in served.rows] == [n * size for n in cohorts]
    if name == "gaussian":  # clients add no noise: nothing is left to chance
        direct = replace(task, federation=FEDERATION)
        plain = federated.simulate(direct, progress=False)
        assert torch.allclose(served.w, plain.w.detach(), atol=1e-6)


# ---- the conversation


class Moody(flower_transport.InProcessTransport):
    "Nodes that never answer, answer twice, or answer for an older round."

    def __init__(self, homes, moods):
        super().__init__(homes)
        self.moods, self.old = moods, {}

    def answer(self, action, node, fields, w):
        reply = super().answer(action, node, fields, w)
        if action == flower.UPDATE and self.moods.get(node) == "old":
            self.old.setdefault(node, reply)
            return self.old[node]
        return reply

    def replies(self, numbers):
        for number, reply in super().replies(numbers):
            mood = self.moods.get(self.asked[number])
            if mood != "silent":
                yield number, reply
            if mood == "twice":
                yield number, reply

    def send(self, action, letters, w, seconds):
        numbers = super().send(action, letters, w, seconds)
        self.asked = getattr(self, "asked", {}) | numbers
        return numbers


def test_a_node_counts_once_whatever_it_sends():
    line = Moody(homes(), {100: "twice"})
    served = flower_server.serve(line, TASK, None, soon())
    run = simulated(TASK)
    assert torch.allclose(served.w, run.w.detach(), atol=1e-6)


def test_an_older_rounds_reply_is_dropped():
    served = flower_server.serve(Moody(homes(), {101: "old"}), TASK, None, soon())
    assert [row.heard for row in served.rows] == [4, 3]
    assert served.rows[1].dropped == {"of another round": 1}
    assert "1 of another round" in str(served.rows[1])


def test_a_silent_node_costs_the_deadline_and_no_more():
    heard = []
    line = Moody(homes(), {101: "silent"})
    clients, _ = flower_transport.handshake(line, TASK, soon(), heard.append)
    assert sorted(clients) == [0, 2, 3] and "did not answer within 0.2 s" in heard[0]
    gathering, row = flower_server.gather(
        line,
        TASK,
        {1: 101, 2: 102},
        flower_server.ModelDownlink(TASK),
        0,
        [0, 1, 2, 3],
        soon(),
    )
    assert gathering.heard == {2} and 0.2 <= row.seconds
    assert "1 silent" in str(row) or "without a node" in str(row)
    with pytest.raises(ValueError, match="3 of 4 clients connected"):
        flower_server.serve(line, TASK, None, soon(least=4))


def test_two_nodes_with_one_number():
    heard, line = [], flower_transport.InProcessTransport(homes() | {200: home(1)})
    clients, known = flower_transport.handshake(line, TASK, soon(), heard.append)
    assert clients == {0: 100, 1: 101, 2: 102, 3: 103} and known
    assert heard == ["node 200 is refused: client 1 is here already"]


def test_the_guarantee_is_of_this_run_and_says_what_is_not_met():
    said = []
    served = flower_server.serve(
        flower_transport.InProcessTransport(homes()),
        TASK,
        promise,
        soon(),
        say=said.append,
    )
    assert "nobody could guess the key" in said[-1] and served.guarantee.rounds == 2
    secret = {i: home(i, insecure=False) for i in range(4)}
    served = flower_server.serve(
        flower_transport.InProcessTransport(secret), TASK, promise, soon()
    )
    assert served.guarantee == promise(2)
    with pytest.raises(ValueError, match="does not match this run"):
        flower_server.serve(
            flower_transport.InProcessTransport(homes()),
            TASK,
            lambda rounds: promise(rounds + 1),
        )


@tabled("sampling", ["fixed", "poisson"])
def test_the_servers_draws_are_secret_unless_it_says_so(sampling):
    config = replace(CONFIG, sampling=sampling, cohort=2, rounds=1)
    task = replace(TASK, config=config)
    known = [flower_server.draw_round(task, 0, insecure=True) for _ in range(2)]
    assert known[0][0] == known[1][0] == task.cohort(0).tolist()
    assert known[0][1].random() == known[1][1].random()
    fresh = [flower_server.draw_round(task, 0) for _ in range(64)]
    assert len({tuple(cohort) for cohort, _ in fresh}) > 1  # fails once in 6^63
    assert len({rng.random() for _, rng in fresh}) == 64


def test_noise_of_a_central_mechanism_cannot_be_guessed_from_the_seed():
    gaussian = dpcomm.mechanism("gaussian", **MECHANISMS["gaussian"])
    task = replace(TASK, mechanism=gaussian)

    def promise(rounds):
        how = dict(sampling="none", relation="zero-out", accountant="rdp-balle")
        return gaussian.guarantee(rounds, 1e-5, **how)

    def play(**more):
        quiet = {100 + i: home(i, task, insecure=False) for i in range(4)}
        return flower_server.serve(
            flower_transport.InProcessTransport(quiet), task, promise, soon(), **more
        )

    known = [play(insecure=True) for _ in range(2)]
    assert torch.equal(known[0].w, known[1].w)
    assert "nobody could guess the key" in str(known[0].guarantee)
    fresh = [play() for _ in range(2)]
    for served in fresh:
        assert served.guarantee == promise(2)
    moved = [served.w - known[0].w for served in fresh]
    spread = 0.3 * gaussian.sigma * 2**0.5 / 4  # of two rounds of noise, a coordinate
    for apart in (*moved, moved[0] - moved[1]):
        assert 0.9 < float(apart.std()) / (spread * 2**0.5) < 1.1


# ---- the history in the model's place


def plainly(**more):
    "The history's own settings: the simulator's draws, everybody's keys known."
    return dict(insecure=True, history="linear") | more


@tabled(
    "server, sampling",
    [("sgd", "fixed"), ("momentum", "poisson"), ("adam", "fixed"), ("adam", "poisson")],
)
def test_history_leads_to_the_same_model(server, sampling):
    rounds = dict(rounds=5, server=server, server_lr=0.01)
    config = replace(CONFIG, sampling=sampling, cohort=2, **rounds)
    task = replace(TASK, config=config)
    whole = flower_server.serve(
        flower_transport.InProcessTransport(homes(task)),
        task,
        None,
        soon(),
        insecure=True,
    )
    line = flower_transport.InProcessTransport(homes(task))
    served = flower_server.serve(line, task, None, soon(), **plainly())
    assert torch.allclose(served.w, whole.w, atol=1e-5)
    assert [row.heard for row in served.rows] == [row.heard for row in whole.rows]
    assert all(row.dropped == {} for row in served.rows)
    down = sum(row.model_bytes for row in served.rows)
    assert 0 < down < sum(row.model_bytes for row in whole.rows) / 20


def test_a_node_without_memory_gets_the_whole_state():
    task = replace(TASK, config=replace(CONFIG, rounds=4))

    class Forgetful(flower_transport.InProcessTransport):
        def answer(self, action, node, fields, w):
            if fields.get("round") == 2 and node == 101:
                self.memory[node].clear()
            return super().answer(action, node, fields, w)

    served = flower_server.serve(
        Forgetful(homes(task)), task, None, soon(), **plainly()
    )
    assert [row.heard for row in served.rows] == [4, 4, 3, 4]
    assert served.rows[2].dropped == {"behind on the node": 1}
    sizes = [row.model_bytes for row in served.rows]
    assert sizes[1] == sizes[2] < 4 * len(W) < sizes[3]


def test_a_lost_reply_does_not_lose_the_thread():
    task = replace(TASK, config=replace(CONFIG, rounds=3))

    class Lossy(flower_transport.InProcessTransport):
        def replies(self, numbers):
            for number, reply in super().replies(numbers):
                lost = reply.get("round") == 1 and self.asked[number] == 102
                yield number, "Flower's error 1" if lost else reply

        def send(self, action, letters, w, seconds):
            numbers = super().send(action, letters, w, seconds)
            self.asked = getattr(self, "asked", {}) | numbers
            return numbers

    served = flower_server.serve(Lossy(homes(task)), task, None, soon(), **plainly())
    assert [row.heard for row in served.rows] == [4, 3, 4]


def test_a_history_that_cannot_be_replayed_is_refused():
    gaussian = dpcomm.mechanism("gaussian", **MECHANISMS["gaussian"])
    line = flower_transport.InProcessTransport({})
    with pytest.raises(ValueError, match="server_is_deterministic"):
        task = replace(TASK, mechanism=gaussian)
        flower_server.serve(line, task, None, soon(), history="linear")
    with pytest.raises(ValueError, match="give the model's own name"):
        other = models.build("linear", seed_tree(9, "init"))
        task = replace(TASK, model=other)
        flower_server.serve(line, task, None, soon(), history="linear")
    with pytest.raises(ValueError, match="model"):
        flower_server.serve(line, TASK, None, soon(), history="nothing")
    damaged = letter() | dict(history="linear", packet=b"dr" + bytes(60))
    assert flower.train_and_reply(home(0), damaged) == dict(code=flower.BEHIND)


def test_ledger_and_model_are_kept(tmp_path):
    served = flower_server.serve(
        flower_transport.InProcessTransport(homes()),
        TASK,
        None,
        soon(),
        lambda w: "scored",
    )
    folder = flower_server.save(served, tmp_path / "out")
    assert np.array_equal(np.load(folder / "model.npy"), served.w.numpy())
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").open()]
    assert [flower_server.RoundReport(**row) for row in rows] == list(served.rows)
    assert (folder / "guarantee.txt").read_text() == "None\n"


# ---- the app that is laid out, on a line in this process


@pytest.mark.parametrize(
    "sums, history", [(False, False), (True, False), (False, True)]
)
def test_the_app_that_is_laid_out_runs_without_flower(
    sums, history, tmp_path, monkeypatch
):
    for module, app in ((room, "client_app"), (flower_server, "server_app")):
        monkeypatch.setattr(module, app, lambda build: build)
    folder = deployment.new(tmp_path / "laid_out", sums, loop=True)
    monkeypatch.syspath_prepend(str(folder))
    try:
        client, server = (
            importlib.import_module(f"laid_out.{name}_app")
            for name in ("client", "server")
        )
        with deployment.with_test_keys(folder, 4) as (node, run):
            text = (folder / "pyproject.toml").read_text()
            config = tomllib.loads(text)["tool"]["flwr"]["app"]["config"] | run
            config["history"] = history
            own = [node.replace("NODE", str(i)).split() for i in range(4)]
            own = [tomllib.loads("\n".join(words)) for words in own]
            own = [k | {"partition-id": i, "insecure": True} for i, k in enumerate(own)]
            nodes = {i: client.app(config, own[i]) for i in range(4)}
            served = flower_server.serve(
                flower_transport.InProcessTransport(nodes), **server.app(config)
            )
    finally:
        for name in [name for name in sys.modules if name.startswith("laid_out")]:
            del sys.modules[name]
    assert [row.heard for row in served.rows] == [4] * 3
    assert (served.rows[0].model_bytes < 1000) == history
    assert served.guarantee.relation == ("zero-out" if sums else "local")
    assert served.guarantee.trust == ("secagg" if sums else "local")
    assert "nobody could guess" in served.guarantee.premises["keys"]
    if not sums:
        run = simulated(nodes[0].task)
        assert torch.allclose(served.w, run.w.detach(), atol=1e-6)


# ---- Flower's parts, with stand-ins for its classes


class Record(dict):
    "A RecordDict, a ConfigRecord, an ArrayRecord."

    config_records = array_records = property(lambda self: self)


class Letter:
    "A Message."

    def __init__(self, content, reply_to=None, **post):
        self.content, self.post, self.lost = content, post, None
        number = getattr(reply_to, "number", None)
        self.metadata = SimpleNamespace(reply_to_message_id=number)

    def has_error(self):
        return self.lost is not None

    @property
    def error(self):
        return SimpleNamespace(code=self.lost, reason="Mrs Miller, 54")


class App:
    "A ClientApp or ServerApp that keeps its functions by message type."

    def __init__(self):
        self.calls = {}

    def __getattr__(self, kind):
        def register(action=""):
            def keep(function):
                self.calls[f"{kind}.{action}"] = function
                return function

            return keep

        return register


class Grid:
    "A grid whose nodes answer at once, in this process."

    def __init__(self, app, contexts, dead=()):
        self.app, self.contexts, self.dead, self.box = app, contexts, dead, {}

    def get_node_ids(self):
        return list(self.contexts)

    def push_messages(self, letters):
        for letter in letters:
            letter.number = f"n{len(self.box)}"
            node, kind = letter.post["dst_node_id"], letter.post["message_type"]
            answer = self.app.calls[kind](letter, self.contexts[node])
            answer.lost = 5 if node in self.dead and kind == flower.UPDATE else None
            answer.of = node, kind
            self.box[letter.number] = answer
        return [letter.number for letter in letters]

    def pull_messages(self, numbers):
        return [self.box[k] for k in numbers]


@pytest.fixture
def flwr(monkeypatch):
    "Stand-ins for what the module takes from Flower."
    array = SimpleNamespace
    app = ModuleType("flwr.app")
    app.Message, app.RecordDict = Letter, Record
    app.ConfigRecord = app.ArrayRecord = Record
    app.Array = lambda w: array(numpy=lambda: w)
    client, server = ModuleType("flwr.clientapp"), ModuleType("flwr.serverapp")
    client.ClientApp = server.ServerApp = App
    for module in (ModuleType("flwr"), app, client, server):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(metadata, "version", lambda name: flower.FLWR)
    monkeypatch.setattr(flower_transport, "object_bytes", lambda content: 100)


def contexts(build_settings=None):
    return {
        100 + i: SimpleNamespace(
            run_config=build_settings or {}, node_config={"partition-id": i}, state={}
        )
        for i in range(4)
    }


def test_both_apps_meet_over_a_grid(flwr, tmp_path):
    app = flower.client_app(lambda run, own: home(own["partition-id"]))
    settings = {"out": str(tmp_path / "out")}
    server = flower_server.server_app(lambda run: dict(task=TASK, deadlines=soon()))
    grid = Grid(app, contexts())
    server.calls["main."](grid, SimpleNamespace(run_config=settings))
    run = simulated(TASK)
    model = np.load(tmp_path / "out" / "model.npy")
    assert np.allclose(model, run.w.detach(), atol=1e-6)
    states = [context.state["dpcomm"] for context in grid.contexts.values()]
    assert states == [{"last": 1}] * 4


def test_a_line_counts_and_tells_what_was_lost_by_number_only(flwr):
    app = flower.client_app(lambda run, own: home(own["partition-id"]))
    line = flower_transport.GridTransport(Grid(app, contexts(), dead={101}))
    served = flower_server.serve(line, TASK, None, soon())
    assert isinstance(served, flower_server.RunResult)
    assert [row.dropped for row in served.rows] == [{"lost: Flower's error 5": 1}] * 2
    assert line.up == 100 * (4 + 3 + 3) and line.down == 100 * (4 + 4 + 4)
    assert [row.object_bytes for row in served.rows] == [300, 300]


def test_a_reply_that_never_comes_whole_holds_up_no_other(flwr):
    "A node that dies while it sends: Flower's call for its reply blocks for minutes."
    end, came_back = threading.Event(), []

    class Half(Grid):
        def pull_messages(self, numbers):
            answers = super().pull_messages(numbers)
            if any(answer.of == (103, flower.UPDATE) for answer in answers):
                came_back.append(end.wait(600))
            return answers

    app = flower.client_app(lambda run, own: home(own["partition-id"]))
    waits = flower_transport.Deadlines(start=1, hello=5, round=3, least=1, poll=0.01)
    try:
        served = flower_server.serve(
            flower_transport.GridTransport(Half(app, contexts())), TASK, None, waits
        )
        assert not came_back, "the run waited for the call that hangs"
    finally:
        end.set()
    assert [row.heard for row in served.rows] == [3, 3]


def test_a_builder_that_fails_tells_the_server_nothing(flwr, capsys):
    def build(run, own):
        raise KeyError("Mrs Miller, 54")

    grid = Grid(flower.client_app(build), contexts())
    with pytest.raises(ValueError, match="0 of 4 clients connected"):
        flower_server.serve(flower_transport.GridTransport(grid), TASK, None, soon())
    told = [dict(answer.content["letter"]) for answer in grid.box.values()]
    assert told and all(letter == {"code": flower.FAILED} for letter in told)
    printed = capsys.readouterr()
    assert "Miller" not in printed.out and "Miller" in printed.err


# ---- small parts


def test_codes_have_words():
    assert [flower.code_of(dict(code=k)) for k in range(6)] == ["", *flower.CODES[1:]]
    named = flower.code_of(dict(code=flower.LIMIT, limit="clip"))
    assert named == "beyond what its owner allows (clip)"
    for stranger in ("x" * 10**7, 3, b"clip"):
        reply = dict(code=flower.LIMIT, limit=stranger)
        assert flower.code_of(reply) == "beyond what its owner allows"
    for wrong in (6, -1, "0", None, [0], True, 0.0):
        assert flower.code_of(dict(code=wrong)) == "malformed"
    assert flower.code_of({}) == "malformed"


def test_a_replica_is_remembered_in_plain_values():
    down, memory = flower_server.History(TASK, "linear"), {}
    replica = flower.caught_up(TASK, letter() | down.parcel(0), memory)
    assert torch.equal(replica.state.w.detach(), W)
    assert {type(value) for value in memory.values()} <= {int, bytes}
    replica.sent, replica.sent_in = (b"mine",), 0
    flower.save_replica(replica, memory)
    again = flower.caught_up(TASK, letter() | down.parcel(0), memory)
    assert again.sent == (b"mine",) and again.sent_in == 0
    assert again.state.digest == replica.state.digest
    other = replace(TASK, config=replace(CONFIG, server_lr=9.0))
    other = flower_server.History(other, "linear")
    with pytest.raises(ValueError, match="agreement"):
        flower.caught_up(TASK, letter() | other.parcel(0), memory)


# ---- a submitter who asks too much


NARROW = dict(
    mechanisms=("rec", "gaussian", "sqsgd"),
    clip=1.0,
    noise=1.0,
    epsilon_round=12.0,
    epsilon_total=23.0,
    clients=4,
    rounds=3,
    models=SHAPES,
    trusted_server=False,
    simulation=False,
)
RAW = dict(clip_norm=1000.0, sigma=1e-9, local=True)


def asking(name=None, parameters=None, **more):
    "A task that a submitter asks for."
    made = dpcomm.mechanism(name, **parameters) if name else REC
    return replace(TASK, mechanism=made, **more)


@pytest.mark.parametrize(
    "limit, task",
    [
        ("clip", asking("gaussian", RAW)),
        ("noise", asking("gaussian", RAW | dict(clip_norm=1.0))),
        ("trusted_server", asking("gaussian", dict(clip_norm=1.0, sigma=1.0))),
        ("simulation", asking("gaussian", RAW | dict(clip_norm=1.0, sigma=1.0, exact=False))),
        ("mechanisms", asking("imvu", dict(clip_norm=1.0, eps=3.0))),
        ("clip", asking("sqsgd", dict(residuals=False))),
        ("clients", asking(federation=flower.RemoteFederation(2))),
        ("rounds", asking(config=replace(CONFIG, rounds=100_000))),
        ("models", asking(model=models.build("lenet5", seed_tree(0)))),
        ("epsilon_round", asking()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_an_owner_does_not_allow_is_refused_by_name(limit, task, tmp_path, capsys):
    "The first of them sent the raw update: cosine 1.0000 with the node's own."
    most = 10.0 if limit == "epsilon_round" else 12.0
    limits = allowed(tmp_path / "claims", **NARROW | dict(epsilon_round=most))
    own = replace(flower.own_part(FEDERATION, 0), n_clients=task.n_clients)
    node = flower.Node(replace(task, federation=own), 0, floor=limits)
    fields = flower.agreement(task)
    refused = dict(code=flower.LIMIT, limit=limit)
    assert flower.answer(flower.HELLO, node, fields, None, {}) == refused
    letters = letter(0, task)
    w = flatten(p.detach() for p in task.model.parameters())
    assert flower.answer(flower.UPDATE, node, letters, w, {}) == refused
    assert f"refused: {limit} is " in capsys.readouterr().err
    log = (tmp_path / "claims" / "log.txt").read_text()
    assert log.count(f"refused: {limit} is ") == 2 and len(log.splitlines()) == 2
    assert max(map(len, log.splitlines())) < 400


def test_without_a_floor_nothing_is_answered(capsys):
    node = home(0, floor=None)
    refused = dict(code=flower.LIMIT, limit="floor")
    for action, fields in (
        (flower.HELLO, flower.agreement(TASK)),
        (flower.UPDATE, letter()),
    ):
        assert flower.answer(action, node, fields, W, {}) == refused
    assert "has no floor" in capsys.readouterr().err
    heard = []
    with pytest.raises(ValueError, match="0 of 4 clients connected"):
        nodes = {i: home(i, floor=None) for i in range(4)}
        flower_server.serve(
            flower_transport.InProcessTransport(nodes),
            TASK,
            None,
            soon(),
            say=heard.append,
        )
    assert "node 0 is refused: beyond what its owner allows (floor)" in heard


def test_the_ledger_counts_all_runs_and_seeds_and_survives_a_restart(tmp_path):
    "Any other seed, or another number of rounds, was answered again: 5 of 5."
    limits = allowed(tmp_path / "claims", **NARROW | dict(epsilon_total=35.0))
    said, codes = [], []
    for seed in range(5):
        for rounds in (2, 3):
            config = replace(CONFIG, rounds=rounds)
            task = replace(TASK, seed=seed, config=config)
            node = home(0, task, insecure=False, floor=limits)  # a process of its own
            agreed, first = flower.agreement(task), letter(0, task)
            said.append(flower.answer(flower.HELLO, node, agreed, None, {}))
            codes.append(flower.answer(flower.UPDATE, node, first, W, {})["code"])
    n = codes.count(flower.OK)
    assert codes == [flower.OK] * n + [flower.LIMIT] * (len(codes) - n)
    cost = [REC.guarantee(k, 1e-5, sampling="none").eps for k in (n, n + 1)]
    assert 4 <= n and cost[0] <= 35.0 < cost[1]
    fits = [REC.guarantee(k + r, 1e-5, sampling="none").eps <= 35.0
            for k, r in zip(range(n), [2, 3] * n)]  # fmt: skip
    assert [reply["code"] == flower.OK for reply in said[:n]] == fits
    before = [reply["before"] for reply in said[:n] if "before" in reply]
    assert before == list(range(sum(fits)))
    assert "eps = " in (tmp_path / "claims" / "log.txt").read_text()


def test_two_runs_at_once_do_not_share_the_last_answer(tmp_path):
    one = REC.guarantee(1, 1e-5, sampling="none").eps
    limits = allowed(tmp_path / "claims", **NARROW | dict(epsilon_total=one + 1e-6))
    tasks = [
        replace(TASK, seed=seed, config=replace(CONFIG, rounds=1)) for seed in range(8)
    ]
    nodes = [home(0, task, floor=limits) for task in tasks]
    with ThreadPoolExecutor(8) as pool:
        asked = [
            pool.submit(flower.answer, flower.UPDATE, node, letter(0, task), W, {})
            for node, task in zip(nodes, tasks)
        ]
    codes = Counter(reply.result()["code"] for reply in asked)
    assert codes[flower.OK] <= 1 and codes[flower.OK] + codes[flower.LIMIT] == 8


# ---- who is a client


def test_a_number_is_nobodys_without_its_key():
    private, directory = identities(4, seed=0)
    honest = {i: home(i, identity=private[i]) for i in range(4)}
    thief, keyless = home(1, identity=private[3]), home(1)
    said = []
    line = flower_transport.InProcessTransport({-2: thief, -1: keyless} | honest)
    clients, _ = flower_transport.handshake(line, TASK, soon(), said.append, directory)
    assert clients == {i: i for i in range(4)}
    lost = "is refused: it does not hold the key of client 1"
    assert said == [f"node -2 {lost}", f"node -1 {lost}"]
    served = flower_server.serve(line, TASK, None, soon(), directory=directory)
    assert [row.heard for row in served.rows] == [4, 4]


def test_a_proof_is_of_one_server_one_run_and_one_client():
    private, _ = identities(4, seed=0)
    node = home(1, identity=private[1])
    fields = flower.agreement(TASK) | dict(nonce=bytes(16))
    proofs = {flower.reply_hello(node, fields)["proof"]}
    proofs.add(flower.reply_hello(node, fields | dict(nonce=b"1" * 16))["proof"])
    other = replace(TASK, seed=1)
    node = home(1, other, identity=private[1])
    proofs.add(
        flower.reply_hello(node, flower.agreement(other) | dict(nonce=bytes(16)))[
            "proof"
        ]
    )
    assert len(proofs) == 3
    told = [flower.proven(task, i, bytes(16)) for task in (TASK, other) for i in (0, 1)]
    assert len(set(told)) == 4 and all(t.startswith(b"dpcomm hello ") for t in told)
    for nonce in (None, "x" * 16, bytes(15), bytes(17), b"x" * 10**7, 7):
        asked = flower.agreement(other) | dict(nonce=nonce)
        assert "proof" not in flower.reply_hello(node, asked)


def test_a_server_says_whom_one_has_to_trust():
    said = []
    flower_server.serve(
        flower_transport.InProcessTransport(homes()),
        TASK,
        None,
        soon(),
        say=said.append,
    )
    assert said[0] == TRUST and "--trusted-entities" in TRUST
    assert any("whoever's asks first" in text for text in said)


# ---- what is too large


def test_a_greeting_of_many_megabytes_is_dropped_unread():
    "It cost ten seconds and a gigabyte: quoted whole, and cut after."

    class Loud(str):
        "Text that must not be quoted whole."

        def __repr__(self):
            raise AssertionError("quoted before it was cut")

    large = Loud("\x00" * 10**7)
    theirs = flower.agreement(TASK) | dict(seed=large, mechanism=large)
    assert max(map(len, flower.differences(flower.agreement(TASK), theirs))) < 700
    assert flower.reply_hello(home(0), theirs)["code"] == flower.REFUSED

    class Shouting(flower_transport.InProcessTransport):
        def answer(self, action, node, fields, w):
            reply = super().answer(action, node, fields, w)
            return reply | dict(seed=large, client=large) if node == 102 else reply

    said = []
    clients, _ = flower_transport.handshake(
        Shouting(homes()), TASK, soon(), said.append
    )
    assert sorted(clients) == [0, 1, 3]
    assert said == ["node 102 is refused: its answer was lost (its reply is too long)"]
    for huge in (10**5000, "x" * 10**7, b"x" * 10**7, [1] * 10**6):
        assert len(flower.shown(huge)) <= 83


def test_a_message_longer_than_its_mechanisms_is_dropped_unread():
    class Padding(flower_transport.InProcessTransport):
        def answer(self, action, node, fields, w):
            reply = super().answer(action, node, fields, w)
            long = action == flower.UPDATE and node == 101
            return reply | (dict(more=bytes(10**6)) if long else {})

    served = flower_server.serve(Padding(homes()), TASK, None, soon())
    lost = {"lost: its reply is too long": 1}
    assert [row.dropped for row in served.rows] == [lost] * 2


def test_a_packet_is_held_to_the_rounds_of_its_run(monkeypatch):
    "A packet of empty rounds cost .27 ms a byte, without an end."
    made = downlink.Agreement("linear", REC, CONFIG)
    replayed = []
    monkeypatch.setattr(downlink, "advance", lambda *given: replayed.append(given))

    def packet(rounds):
        head = "start", made.fingerprint, 0, rounds, 0
        return downlink.Packet(*head, (0,) * (rounds + 1), bytes(4)).to_bytes()

    def ask(data, t):
        fields = letter(t) | dict(history="linear", packet=data)
        return flower.train_and_reply(home(0), fields)

    for rounds in (2, 3, 20_000):
        assert ask(packet(rounds), 1) == dict(code=flower.BEHIND)
    assert ask(bytes(10**7), 1) == dict(code=flower.BEHIND)
    assert not replayed
    assert ask(packet(1), 1) == dict(code=flower.BEHIND)  # another digest
    assert len(replayed) == 1


# ---- rounds that too few answer, and a server that stops


class Failing(flower_transport.InProcessTransport):
    "Nodes that are away in some rounds: round -> nodes. A server that stops in one."

    def __init__(self, homes, away=None, stops=None):
        super().__init__(homes)
        self.away, self.stops = away or {}, stops

    def answer(self, action, node, fields, w):
        t = fields.get("round")
        if t is not None and t == self.stops:
            raise KeyboardInterrupt
        if node in self.away.get(t, ()):
            return "node unavailable"
        return super().answer(action, node, fields, w)


@pytest.mark.parametrize("history", [None, "linear"])
def test_a_round_that_too_few_answer_is_skipped_and_told(history):
    task = replace(TASK, config=replace(CONFIG, rounds=4))
    said, away = [], {1: (100, 101)}
    line = Failing(homes(task), away)
    more = dict(say=said.append, insecure=True, history=history)
    served = flower_server.serve(line, task, None, soon(least=3), **more)
    assert [bool(row.skipped) for row in served.rows] == [False, True, False, False]
    assert [row.heard for row in served.rows] == [4, 2, 4, 4]
    assert served.rows[1].skipped == "2 clients heard, 3 needed"
    assert any("2 lost: node unavailable; skipped: 2 clients heard" in s for s in said)
    w = W.clone().requires_grad_()
    optimiser = run_state.server_optimiser(w, task.config)
    for t in (0, 2, 3):
        gathering = flower_server.Gathering.of(task, t, range(4))
        for i in range(4):
            reply = flower.train_and_reply(home(i, task), letter(t, task), w.detach())
            assert flower_server.add_reply(gathering, i, reply) == ""
        w.grad = -gathering.total.average(4, seed_tree(0))
        optimiser.step()
    assert torch.allclose(served.w, w.detach(), atol=1e-6)


def test_rounds_that_nobody_answers_end_the_run():
    away = dict.fromkeys(range(9), (100, 101, 102, 103))
    task = replace(TASK, config=replace(CONFIG, rounds=9))
    with pytest.raises(ValueError, match="3 of 4 rounds were skipped"):
        del away[0]
        flower_server.serve(Failing(homes(task), away), task, None, soon(skips=2))
    with pytest.raises(ValueError, match="2 of 2 rounds were skipped"):
        flower_server.serve(Failing(homes(), away | {0: away[1]}), TASK, None, soon())


@pytest.mark.parametrize("history, server", [(None, "sgd"), ("linear", "adam")])
def test_a_run_that_stops_is_kept_and_goes_on(history, server, tmp_path):
    "A server that was killed left nothing, and began again at round 1."
    more = dict(rounds=4, server=server, server_lr=0.05)
    task = replace(TASK, config=replace(CONFIG, **more))
    how = dict(insecure=True, history=history)
    whole = flower_server.serve(
        flower_transport.InProcessTransport(homes(task)), task, promise, soon(), **how
    )
    nodes, out = homes(task), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        line = Failing(nodes, stops=2)
        flower_server.serve(line, task, promise, soon(), folder=out, **how)
    assert len((out / "rounds.jsonl").read_text().splitlines()) == 2
    two = f"eps = {promise(2).eps:.2f} "  # of two messages a client
    assert two in (out / "guarantee.txt").read_text()
    assert not np.array_equal(np.load(out / "model.npy"), W)
    served = flower_server.serve(
        flower_transport.InProcessTransport(nodes),
        task,
        promise,
        soon(),
        folder=out,
        **how,
    )
    assert [row.t for row in served.rows] == [0, 1, 2, 3]
    assert torch.equal(served.w, whole.w)
    assert served.guarantee == whole.guarantee and served.guarantee.rounds == 4
    assert np.array_equal(np.load(out / "model.npy"), served.w.numpy())
    with pytest.raises(ValueError, match="has finished its 4 rounds"):
        flower_server.serve(
            flower_transport.InProcessTransport(nodes),
            task,
            promise,
            soon(),
            folder=out,
            **how,
        )


def test_a_run_that_fails_in_its_last_round_goes_on(tmp_path):
    nodes, away = homes(), {1: (100, 101, 102, 103)}
    with pytest.raises(ValueError, match="can be resumed"):
        line = Failing(nodes, away)
        flower_server.serve(line, TASK, promise, soon(skips=0), folder=tmp_path / "out")
    longer = replace(TASK, config=replace(CONFIG, rounds=3))
    nodes = {100 + i: home(i, longer, floor=nodes[100 + i].floor) for i in range(4)}
    line = flower_transport.InProcessTransport(nodes)
    served = flower_server.serve(line, longer, promise, soon(), folder=tmp_path / "out")
    assert [row.heard for row in served.rows] == [4, 0, 4]
    assert served.guarantee.eps == promise(3).eps
    assert served.guarantee.eps >= promise(2).eps  # what each client has sent


def test_rounds_may_grow_and_nothing_else_may_change(tmp_path):
    out, nodes = tmp_path / "out", homes()
    flower_server.serve(
        flower_transport.InProcessTransport(nodes),
        TASK,
        promise,
        soon(),
        folder=out,
        insecure=True,
    )
    for name, other in (
        ("seed", dict(seed=1)),
        ("config.lr", dict(config=replace(CONFIG, lr=0.2))),
        ("mechanism", dict(mechanism=replace(REC, std=2.0))),
    ):
        with pytest.raises(
            ValueError, match=f"out contains a different run, where {name} is"
        ):
            task = replace(TASK, **other)
            flower_server.serve(
                flower_transport.InProcessTransport(homes(task)),
                task,
                None,
                soon(),
                folder=out,
            )
    longer = replace(TASK, config=replace(CONFIG, rounds=4, eval_every=7))
    nodes = {100 + i: home(i, longer, floor=nodes[100 + i].floor) for i in range(4)}
    line, how = (
        flower_transport.InProcessTransport(nodes),
        dict(folder=out, insecure=True),
    )
    served = flower_server.serve(line, longer, promise, soon(), **how)
    line = flower_transport.InProcessTransport(homes(longer))
    whole = flower_server.serve(line, longer, promise, soon(), insecure=True)
    assert torch.equal(served.w, whole.w) and len(served.rows) == 4
    assert served.guarantee.eps == promise(4).eps  # two before, two after


def test_a_promise_counts_what_clients_sent_before():
    "The second run promised 10.73 for four rounds; its clients had sent six messages."
    nodes = homes()
    flower_server.serve(
        flower_transport.InProcessTransport(nodes), TASK, promise, soon()
    )
    again = replace(TASK, seed=1, config=replace(CONFIG, rounds=3))
    nodes = {100 + i: home(i, again, floor=nodes[100 + i].floor) for i in range(4)}
    served = flower_server.serve(
        flower_transport.InProcessTransport(nodes), again, promise, soon()
    )
    assert served.guarantee.eps == promise(5).eps > promise(3).eps
    assert "2 of the rounds were in earlier runs" in str(served.guarantee)


def test_what_a_run_leaves_is_its_owners_alone(tmp_path):
    nodes = {
        100 + i: home(i, floor=allowed(tmp_path / f"claims-{i}")) for i in range(4)
    }
    flower_server.serve(
        flower_transport.InProcessTransport(nodes),
        TASK,
        promise,
        soon(),
        folder=tmp_path / "out",
    )
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"server.pt", "model.npy", "rounds.jsonl", "guarantee.txt"}
    found = [path for path in tmp_path.rglob("*")]
    assert len(found) > 20
    for path in found:
        due = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == due, path
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(ValueError, match="chmod go= open"):
        flower_server.serve(
            flower_transport.InProcessTransport(nodes),
            TASK,
            None,
            soon(),
            folder=tmp_path / "open",
        )


def test_a_damaged_checkpoint_is_refused_by_name(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        flower_server.serve(Failing(homes(), stops=1), TASK, None, soon(), folder=out)
    good = (out / "server.pt").read_bytes()
    for wrong in (b"", good[:-1], good[:99], good[:-9] + b"?" + good[-8:]):
        (out / "server.pt").write_bytes(wrong)
        with pytest.raises(ValueError, match="server.pt is damaged"):
            flower_server.serve(
                flower_transport.InProcessTransport(homes()),
                TASK,
                None,
                soon(),
                folder=out,
            )


def test_a_promise_names_what_it_does_not_count():
    sampled = dict(n_clients=100, cohort=10, sampling="poisson")

    def central(rounds):
        gaussian = dpcomm.mechanism("gaussian", **MECHANISMS["gaussian"])
        return gaussian.guarantee(rounds, 1e-5, **sampled)

    assert flower_server.Promise().after(3) is None
    assert flower_server.Promise(promise).after(3) == promise(3)
    assert flower_server.Promise(promise, before=2).after(3).eps == promise(5).eps
    made = flower_server.Promise(central, before=2).after(3)
    assert made.eps == central(3).eps
    assert "2 messages of earlier runs are not counted" in made.note
    assert "keys" in flower_server.Promise(central, known=True).after(3).premises


# ---- weights, and a deployment

SHARES = [1.0, 4.0, 0.0, 2.0]


def weighty(i, task):
    "Client i of a federation in which clients weigh differently."
    own = replace(flower.own_part(FEDERATION, i), weights=SHARES)
    return flower.Node(replace(task, federation=own), i, insecure=True, floor=allowed())


def test_weights_by_data_are_the_simulators():
    noise = dpcomm.mechanism("gaussian", clip_norm=0.5, sigma=0.1)
    apart = flower.RemoteFederation(4, weights=SHARES)
    task = replace(TASK, mechanism=noise, federation=apart)
    nodes = {100 + i: weighty(i, task) for i in range(4)}
    served = flower_server.serve(
        flower_transport.InProcessTransport(nodes),
        task,
        deadlines=soon(),
        insecure=True,
    )
    whole = replace(task, federation=FEDERATION)
    run = federated.simulate(whole, weights=SHARES, progress=False)
    alike = federated.simulate(whole, progress=False)
    assert torch.allclose(served.w, run.w.detach(), atol=1e-6)
    assert not torch.allclose(served.w, alike.w.detach(), atol=1e-4)
    update = flower.local_update(nodes[103].task, 3, W, 0)
    assert float(update.norm()) <= 0.5 * 0.5 + 1e-6  # a bound times its share


def test_weights_of_one_end_alone_are_a_difference():
    task = replace(TASK, federation=flower.RemoteFederation(4, weights=SHARES))
    said = flower.differences(flower.agreement(task), flower.agreement(TASK))
    assert len(said) == 1 and said[0].startswith("share is ")
    with pytest.raises(ValueError, match="weights is .* one for each of the 4 clients"):
        flower.RemoteFederation(4, weights=[1.0, 2.0])
    with pytest.raises(ValueError, match="weights and history are both given"):
        flower_server.serve(
            flower_transport.InProcessTransport({}), task, history="linear"
        )


@tabled(
    "other",
    [
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)).double(),
        torch.nn.Sequential(torch.nn.Linear(784, 10), torch.nn.Flatten()),
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Bilinear(28, 28, 10)),
    ],
)
def test_models_of_one_size_that_differ_are_told_apart(other):
    "By the types of weights, by names, and by layers and shapes."
    flat = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    ends = [flower.agreement(replace(TASK, model=m)) for m in (flat, other)]
    (said,) = flower.differences(*ends)
    assert said.startswith("layers is ")


def test_a_deployment_says_who_takes_part_at_both_ends():
    "Rounds, cohorts and promise; a config that says otherwise is refused."
    situation = dpcomm.Deployment(4, 4, 2, 1e-5, sampling="none", trust="local")
    task = replace(TASK, config=federated.Config(lr=0.1, server="sgd", engine="loop"))
    nodes = {100 + i: home(i, task, deployment=situation) for i in range(4)}
    assert nodes[100].task.config.rounds == 2
    line = flower_transport.InProcessTransport(nodes)
    served = flower_server.serve(line, task, deadlines=soon(), deployment=situation)
    assert [row.heard for row in served.rows] == [4, 4]
    assert served.guarantee.eps == situation.guarantee(REC).eps
    with pytest.raises(ValueError, match="rounds is 2 in the deployment and 9 in"):
        wrong = replace(task, config=federated.Config(rounds=9))
        flower_server.serve(line, wrong, deployment=situation)
    with pytest.raises(ValueError, match="n_clients is 5 in the deployment and 4 in"):
        home(0, task, deployment=replace(situation, n_clients=5, cohort=5))


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_a_server_asks_nobody_more_often_than_the_deployment_says(sampling, tmp_path):
    "From the system's randomness, and over a stop; earlier messages count beside them."
    situation = dpcomm.Deployment(4, 1, 4, 1e-5, sampling=sampling, visits=1)
    rec = dpcomm.mechanism("rec", clip_norm=1.0, std=1.0)
    task = replace(TASK, mechanism=rec, config=federated.Config(lr=0.1, server="sgd"))
    nodes = {100 + i: home(i, task, deployment=situation) for i in range(4)}
    folder, asked = tmp_path / "run", []
    say = lambda text: asked.append(text)  # noqa: E731
    how = dict(deadlines=soon(least=1, skips=9), deployment=situation, folder=folder)
    served = flower_server.serve(
        flower_transport.InProcessTransport(nodes), task, say=say, **how
    )
    total = sum(row.heard for row in served.rows)
    assert (
        total == 4 if sampling == "fixed" else total <= 4
    )  # nobody, once in a hundred
    limited = federated.deployed(task, situation)[0]
    journal = flower_server.Journal(
        replace(limited, config=replace(limited.config, rounds=5)),
        flower_server.ModelDownlink(limited),
        folder,
    )
    assert journal.asked.max() == 1 and journal.asked.sum() == total
    own = federated.deployed(task, situation)[1]
    assert own(2, 3).rounds == 4 and own(4).rounds == 1
