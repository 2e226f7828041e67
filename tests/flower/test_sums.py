"Secure sums over a transport, without Flower."

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tables import tabled
from test_into_flower import CONFIG, FEDERATION, TASK, W, allowed, soon

import dpcomm
from dpcomm.core.random import Insecure, derive
from dpcomm.flower import client as flower
from dpcomm.flower import server as flower_server
from dpcomm.flower import sums as flower_sums
from dpcomm.flower import transport as flower_transport
from dpcomm.interop import sums as keys
from dpcomm.secagg.errors import MASKED, ROUNDS, SERVER, UNMASK
from dpcomm.secagg.server import Server
from dpcomm.secagg.session import identities
from dpcomm.training import run_state
from dpcomm.training.floor import Beyond

SHARED = dict(clip_norm=1.0, sigma=1.0, n_clients=4, tolerance=0.25)
MECHANISMS = {
    "ddgauss": SHARED,
    "skellam": SHARED,
    "topk": SHARED | dict(fraction=0.05, seed=1),
}
PRIVATE, DIRECTORY = identities(4, seed=0)
SUMS = flower_sums.Sums(DIRECTORY)


def task_of(name="ddgauss", rounds=1, sums=SUMS):
    mechanism = dpcomm.mechanism(name, **MECHANISMS[name])
    apart, config = (
        flower.RemoteFederation(4, sums=sums),
        replace(CONFIG, rounds=rounds),
    )
    return replace(TASK, mechanism=mechanism, federation=apart, config=config)


def home(i, folder, task, **more):
    own = flower.own_part(FEDERATION, i)
    mine = replace(task, federation=replace(own, sums=task.federation.sums))
    given = dict(insecure=True, floor=allowed(folder / str(i)), identity=PRIVATE[i])
    given |= more
    return flower.Node(mine, i, **given)


def letter(task, step, t=0, **more):
    return dict(round=t, agreement=flower.agreement_digest(task), step=step, **more)


class Dying(flower_transport.InProcessTransport):
    "Nodes that die at a step: node -> step. Notes who was asked what."

    def __init__(self, homes, dies=()):
        super().__init__(homes)
        self.dies, self.asked = dict(dies), []

    def answer(self, action, node, fields, w):
        self.asked.append((node, fields.get("step")))
        dead = fields.get("step", -1) >= self.dies.get(node, 9)
        return "node unavailable" if dead else super().answer(action, node, fields, w)


def play(task, folder, dies=(), **more):
    "A served run, and its transport."
    line = Dying({i: home(i, folder, task, **more) for i in range(4)}, dies)
    return flower_server.serve(line, task, None, soon(), identity=PRIVATE[SERVER]), line


def by_hand(task, folder, rounds):
    "The model after rounds, each given as the clients of its sum."
    w = W.clone().requires_grad_()
    optimiser = run_state.server_optimiser(w, task.config)
    for t, cohort in enumerate(rounds):
        words, mechanism = [], task.mechanism.for_round(t)
        for i in cohort:
            node = home(i, folder, task)
            update = flower.local_update(node.task, i, w.detach(), t)
            words.append(mechanism.summand(update, node.key(t)))
        w.grad = -mechanism.lifted(mechanism.ring.sum(words), len(w)) / 4
        optimiser.step()
    return w.detach()


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_served_sum_is_the_sum(name, tmp_path):
    task = task_of(name, rounds=2)
    served, _ = play(task, tmp_path)
    due = by_hand(task, tmp_path, [range(4)] * 2)
    assert torch.allclose(served.w, due, atol=1e-6)
    assert not torch.allclose(served.w, W, atol=1e-4)
    assert [row.heard for row in served.rows] == [4, 4]
    one = task.mechanism.for_round(0).bits(len(W)).total // 8
    assert all(row.message_bytes > 4 * one for row in served.rows)
    assert all(row.model_bytes > 4 * 4 * len(W) for row in served.rows)
    assert not list(tmp_path.rglob("*.state*"))


@pytest.mark.parametrize("step", range(len(ROUNDS)))
def test_a_node_that_dies_at_any_step(step, tmp_path):
    task = task_of()
    served, _ = play(task, tmp_path, {3: step})
    survivors = range(4) if step > MASKED else range(3)
    assert served.rows[0].heard == len(survivors)
    due = by_hand(task, tmp_path, [survivors])
    assert torch.allclose(served.w, due, atol=1e-6)
    lost = served.rows[0].dropped
    assert lost == {"lost: node unavailable": 1}


@pytest.mark.parametrize("step", range(len(ROUNDS)))
def test_below_the_threshold_nothing_is_revealed(step, tmp_path):
    line = Dying(
        {i: home(i, tmp_path, task_of()) for i in range(4)}, {2: step, 3: step}
    )
    with pytest.raises(ValueError, match=f"skipped.*round '{ROUNDS[step]}'"):
        flower_server.serve(line, task_of(), None, soon(), identity=PRIVATE[SERVER])
    asked = [s for _, s in line.asked if s is not None]
    assert max(asked) == step  # nobody is asked for anything that comes after
    if step < UNMASK:
        assert UNMASK not in asked


def test_masks_and_noise_are_fresh_unless_a_node_says_so(tmp_path):
    task = task_of()
    runs = [play(task, tmp_path / str(k), insecure=k < 2)[0] for k in range(4)]
    assert torch.equal(runs[0].w, runs[1].w)
    assert not torch.allclose(runs[2].w, runs[3].w, atol=1e-3)
    said = {}
    for k in range(2):
        node = home(0, tmp_path / f"m{k}", task)
        said[k] = flower_sums_reply(node, letter(task, 0))["message"]
    assert said[0] != said[1]


def flower_sums_reply(node, fields, w=None, memory=None):
    "One step of a node."
    memory = {} if memory is None else memory
    return flower.answer(flower.SUM, node, fields, w, memory)


def test_a_share_never_leaves_alone(tmp_path, capsys):
    task = task_of()
    fields = dict(round=0, agreement=flower.agreement_digest(task))
    reply = flower.answer(flower.UPDATE, home(0, tmp_path, task), fields, W, {})
    assert reply == dict(code=flower.FAILED)
    assert "only masked" in capsys.readouterr().err


def test_each_step_is_answered_once_and_by_one_process(tmp_path):
    task = task_of()
    node = home(0, tmp_path, task)
    server = Server(flower_sums.session_of(task, 0), PRIVATE[SERVER], DIRECTORY)
    homes = [node, *(home(i, tmp_path, task) for i in (1, 2, 3))]
    for i, other in enumerate(homes):
        server.receive(i, flower_sums_reply(other, letter(task, 0))["message"])
    assert flower_sums_reply(node, letter(task, 0)) == dict(code=flower.AGAIN)
    mail = server.advance()
    (state,) = tmp_path.rglob("*-0-1.state")
    assert stat.S_IMODE(state.stat().st_mode) == 0o600
    with ThreadPoolExecutor(8) as pool:
        fields = letter(task, 1, mail=mail[0])
        asked = [pool.submit(flower_sums_reply, node, fields) for _ in range(8)]
    codes = sorted(reply.result()["code"] for reply in asked)
    assert codes == [flower.OK] + [flower.AGAIN] * 7


@pytest.mark.parametrize(
    "wrong",
    [
        dict(step=6), dict(step=-1), dict(step="0"), dict(step=0, round="../../x"),
        dict(step=1, round="../../x"), dict(step=1, round=9), dict(step=None),
        dict(step=1, mail=b"damaged"), dict(step=1, mail=7), dict(step=2, mail=b""),
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_letter_gets_a_number(wrong, tmp_path):
    task = task_of()
    node = home(0, tmp_path, task)
    assert flower_sums_reply(node, letter(task, 0))["code"] == flower.OK
    reply = flower_sums_reply(node, letter(task, 0) | wrong)
    assert reply.keys() == {"code"}
    assert reply["code"] in (flower.FAILED, flower.AGAIN, flower.REFUSED)
    claims = tmp_path / "0"
    states = {p.parent for p in tmp_path.rglob("*.state*")}
    assert states <= {claims} and not list(tmp_path.glob("*/../../x*"))
    assert {p for p in tmp_path.iterdir()} == {claims}


def test_a_damaged_state_ends_the_session(tmp_path):
    task = task_of()
    node = home(0, tmp_path, task)
    flower_sums_reply(node, letter(task, 0))
    (state,) = tmp_path.rglob("*.state")
    state.write_bytes(state.read_bytes()[:-1] + b"?")
    assert flower_sums_reply(node, letter(task, 1, mail=b"")) == dict(
        code=flower.FAILED
    )
    assert not list(tmp_path.rglob("*.state*"))


def test_a_state_is_overwritten_before_it_is_removed(tmp_path, monkeypatch):
    place, seen = tmp_path / "a.state", []
    keys.store_secret(place, b"secret")
    with pytest.raises(FileExistsError):
        keys.store_secret(place, b"another")
    monkeypatch.setattr(Path, "unlink", lambda self: seen.append(self.read_bytes()))
    assert keys.pop_secret(place) == b"secret"
    assert seen == [bytes(6)] and keys.pop_secret(place) is None


@pytest.mark.parametrize(
    "name, sums",
    [
        ("sums.threshold", replace(SUMS, threshold=3)),
        ("sums.directory", flower_sums.Sums(identities(4, seed=1)[1])),
    ],
)
def test_other_keys_or_thresholds_are_refused_at_the_first_message(
    name, sums, tmp_path
):
    task = task_of()
    stranger = home(2, tmp_path, task_of(sums=sums))
    nodes = {i: home(i, tmp_path, task) for i in (0, 1, 3)} | {2: stranger}
    heard = []
    clients, _ = flower_transport.handshake(
        flower_transport.InProcessTransport(nodes), task, soon(), heard.append
    )
    assert sorted(clients) == [0, 1, 3]
    assert len(heard) == 1 and f"node 2 is refused: {name} is" in heard[0]
    served = flower_server.serve(
        flower_transport.InProcessTransport(nodes),
        task,
        None,
        soon(),
        identity=PRIVATE[SERVER],
    )
    assert served.rows[0].heard == 3 and served.rows[0].dropped == {"without a node": 1}


@tabled(
    "change, said",
    [
        (
            dict(mechanism=dpcomm.mechanism("rec", clip_norm=1.0, std=1.0)),
            "cannot be summed securely",
        ),
        (dict(config=replace(CONFIG, cohort=3)), "includes every client"),
        (dict(config=replace(CONFIG, sampling="poisson")), "includes every client"),
        (
            dict(mechanism=dpcomm.mechanism("ddgauss", **SHARED | dict(n_clients=5))),
            "n_clients=4",
        ),
    ],
)
def test_what_is_no_sum_of_everybody_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        flower.check_task(replace(task_of(), **change))


@pytest.mark.parametrize("more", [dict(floor=None), dict(identity=None)])
def test_a_node_needs_a_floor_and_a_key(more, tmp_path):
    with pytest.raises(ValueError, match="floor.*identity"):
        home(0, tmp_path, task_of(), **more)


def test_what_is_dropped_leaves_the_session_alone(tmp_path):
    task = task_of()
    server = Server(flower_sums.session_of(task, 0), PRIVATE[SERVER], DIRECTORY)
    nodes = [home(i, tmp_path, task) for i in range(4)]
    good = flower_sums_reply(nodes[0], letter(task, 0))
    other = flower_sums_reply(nodes[1], letter(task, 0))

    def hear(client, reply):
        return flower_sums.accept_reply(server, client, reply, 0, 1000)

    drops = {
        "lost": "Flower's error 3",
        "failed": dict(code=flower.FAILED),
        "malformed": {},
        "of another step": good | dict(step=1),
        "of another length": good | dict(message=good["message"] * 99),
        "of another len": good | dict(message="text"),
        "refused: Damaged": good | dict(message=b"noise"),
        "refused: Replay": other,
    }
    for why, reply in drops.items():
        assert hear(0, reply).startswith(why)
    assert hear(7, good).startswith("refused") and not server.inbox
    assert hear(0, good) == "" and hear(0, good) == "refused: Replay"
    assert set(server.inbox) == {0}


def test_noise_for_replies_never_raises(tmp_path):
    rng = np.random.default_rng(0)
    task = task_of()
    server = Server(flower_sums.session_of(task, 0), PRIVATE[SERVER], DIRECTORY)
    pool = [0, 1, -1, 2**62, 0.5, "", "x", b"", b"dp\x01", [1], True, None]
    pool += [rng.bytes(n) for n in (26, 100, 215, 215)]
    for _ in range(2000):
        names = rng.choice(["code", "round", "step", "message"], 4)
        reply = {str(k): pool[rng.integers(len(pool))] for k in names}
        reply |= dict(code=0, round=0, step=0) if rng.random() < 0.5 else {}
        assert flower_sums.accept_reply(server, int(rng.integers(0, 5)), reply, 0, 300)
    assert not server.inbox


def test_keys_are_made_once_and_read_by_their_owner(tmp_path):
    folder = keys.generate_keys(tmp_path / "keys", 4)
    identity, sums = flower_sums.read_keys(folder, "client-2")
    assert identity.public_key().public_bytes_raw() == sums.directory[2]
    assert sorted(sums.directory) == sorted([*range(4), SERVER])
    assert (sums.threshold, sums.least) == (None, 4)
    keys.approve(folder, "client-2", 3, threshold=2)
    again = flower_sums.read_keys(folder, "client-2")[1]
    assert (again.threshold, again.least) == (2, 3)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for path in folder.glob("*.key"):
        assert path.read_text() not in (folder / "directory.json").read_text()
    assert len(json.loads((folder / "directory.json").read_text())) == 5
    with pytest.raises(FileExistsError):
        keys.generate_keys(folder, 4)
    with pytest.raises(ValueError, match="keys of client-9 are missing"):
        flower_sums.read_keys(folder, "client-9")
    own = tmp_path / "own"
    assert keys.new_key(own / "own.key") not in sums.directory.values()


def test_only_a_list_that_its_owner_signed_is_read(tmp_path):
    folder = keys.generate_keys(tmp_path / "keys", 4)
    signed = folder / "client-2.signed.json"
    good, listed = (
        signed.read_text(),
        json.loads((folder / "directory.json").read_text()),
    )
    del listed["3"]
    (folder / "directory.json").write_text(json.dumps(listed))
    assert len(flower_sums.read_keys(folder, "client-2")[1].directory) == 5
    another = (folder / "client-1.signed.json").read_text()
    wrong = [
        another,
        good.replace("least", "laest"),
        good[:-9],
        "[1]",
        "[" * 10**5,
        "{}",
    ]
    wrong += [good.replace('\\"least\\": 4', '\\"least\\": 2')]
    for text in wrong:
        assert text != good
        signed.write_text(text)
        with pytest.raises(ValueError, match="client-2.signed.json"):
            flower_sums.read_keys(folder, "client-2")
    signed.unlink()
    with pytest.raises(ValueError, match="has not signed"):
        flower_sums.read_keys(folder, "client-2")
    for text in ("{", "[]", "[" * 10**5, '{"a": 1}', '{"0": "zz"}', '{"0": "00"}'):
        (folder / "directory.json").write_text(text)
        with pytest.raises(ValueError, match="directory.json"):
            keys.approve(folder, "client-2", 4)


def test_a_key_that_others_may_read_or_that_is_no_key_is_refused(tmp_path):
    folder = keys.generate_keys(tmp_path / "keys", 4)
    key = folder / "client-1.key"
    key.chmod(0o644)
    with pytest.raises(ValueError, match="client-1.key.*chmod go="):
        flower_sums.read_keys(folder, "client-1")
    key.chmod(0o600)
    assert keys.read_key(folder, "client-1").public_key().public_bytes_raw()
    for text in ("", "zz", "00"):
        key.write_text(text)
        with pytest.raises(ValueError, match="client-1.key is not a key"):
            flower_sums.read_keys(folder, "client-1")
    key.write_text((folder / "client-2.key").read_text())
    with pytest.raises(ValueError, match="not signed by the key of client-1"):
        flower_sums.read_keys(folder, "client-1")
    keys.approve(folder, "client-1", 4)
    with pytest.raises(ValueError, match="lists a different key for client-1"):
        flower_sums.read_keys(folder, "client-1")


# ---- whose sum it is


def test_the_directory_is_exactly_the_set_of_clients(tmp_path):
    "A submitter that says clients = 2 got a session of two, and one update of the other."
    task = task_of()
    for n, sums in ((2, SUMS), (4, replace(SUMS, least=5))):
        config = replace(CONFIG, rounds=1, cohort=n)
        mechanism = replace(task.mechanism, n_clients=n, tolerance=0.0)
        own = replace(flower.own_part(FEDERATION, 0), n_clients=n, sums=sums)
        asked = replace(task, federation=own, config=config, mechanism=mechanism)

        def build():
            limits = allowed(tmp_path / "0")
            return flower.Node(asked, 0, floor=limits, identity=PRIVATE[0])

        with pytest.raises(Beyond, match=f"clients is {n}; the directory lists 4"):
            build()
        refused = dict(code=flower.LIMIT, limit="directory")
        assert flower.guarded(build)() == refused
    more = dict(DIRECTORY) | {4: bytes(32)}
    with pytest.raises(Beyond, match="clients is 4; the directory lists 5"):
        flower.check_task(task_of(sums=flower_sums.Sums(more)))
    fewer = {i: key for i, key in DIRECTORY.items() if i != 2}
    with pytest.raises(Beyond, match="clients is 4; the directory lists 3"):
        flower.check_task(task_of(sums=flower_sums.Sums(fewer)))


def test_a_sum_opens_with_no_fewer_shares_of_noise_than_are_counted_on(tmp_path):
    "The session alone would open with three of four: its mechanism counts on all."
    strict = replace(task_of().mechanism, tolerance=0.0)
    task = replace(task_of(), mechanism=strict)
    assert strict.honest == 4 and flower_sums.session_of(task_of(), 0).quorum == 3
    assert flower_sums.session_of(task, 0).quorum == 4
    with pytest.raises(ValueError, match="3 clients are left; 4 must be"):
        play(task, tmp_path, {3: MASKED})


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_vector_that_no_clip_allows_is_not_used(name, tmp_path, monkeypatch):
    task = task_of(name, rounds=2)
    mechanism, d = task.mechanism, len(W)
    ring = mechanism.ring
    words = [mechanism.summand(torch.ones(d), None) for _ in range(4)]
    assert keys.too_long(mechanism, ring.sum(words), d, 4) == ""
    liar = np.full(len(words[0]), 2 ** (ring.bits - 3), np.int64)
    due = keys.longest(mechanism, d, 4, len(words[0]))
    assert 4 * mechanism.clip_norm < due < 4 * keys.longest(mechanism, d, 1, len(liar))
    why = keys.too_long(mechanism, ring.sum([*words[1:], liar]), d, 4)
    assert why.startswith("the sum's norm is")
    cls = type(mechanism)

    def lying(self, u, key=None):
        path = "round", 0, "client", 3, "message"
        wrong = key == Insecure(derive(0, *path))
        return liar if wrong else made(self, u, key)

    made = cls.summand
    monkeypatch.setattr(cls, "summand", lying)
    served, _ = play(task, tmp_path)
    assert [bool(row.skipped) for row in served.rows] == [True, False]
    assert "the sum's norm is" in served.rows[0].skipped and served.rows[0].heard == 4
