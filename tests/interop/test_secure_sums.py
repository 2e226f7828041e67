"What of secure sums in Flower needs no Flower: keys, sessions, steps, and who is a client."

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from tables import tabled

import dpcomm
from dpcomm.core.random import Insecure
from dpcomm.interop import sums
from dpcomm.interop.floor import Beyond
from dpcomm.secagg import client
from dpcomm.secagg.errors import (
    MASKED,
    ROUNDS,
    SERVER,
    UNMASK,
    BelowThreshold,
    SecAggError,
)

SHARED = dict(clip_norm=1.0, sigma=1.0, n_clients=4)


SPARSE = dict(fraction=0.1)
KINDS = [("ddgauss", {}), ("ddgauss", dict(padded=True)), ("skellam", {})]


@tabled("name, more", [*KINDS, ("topk", SPARSE), ("compressive", SPARSE)])
@tabled("d", [64, 1000])
def test_a_session_is_as_long_as_the_summands(name, more, d):
    mechanism = dpcomm.mechanism(name, **SHARED, **more)
    setup = sums.session_of(mechanism, d, [0, 1, 2, 3], 7, 0)
    assert setup.d == len(mechanism.summand(torch.zeros(d), Insecure(0)))
    later = sums.session_of(mechanism, d, [0, 1, 2, 3], 7, 1)
    assert later.session != setup.session, "one session a round"


def test_a_state_is_overwritten_before_it_is_removed(tmp_path, monkeypatch):
    sums.store_secret(tmp_path / "a.state", b"secret")
    left = []
    monkeypatch.setattr(sums.Path, "unlink", lambda own: left.append(own.read_bytes()))
    assert sums.pop_secret(tmp_path / "a.state") == b"secret" and left == [bytes(6)]


def greeted(party, client):
    "A transport in which every node says that it is one client."

    def ask(letters):
        for node, asked in letters.items():
            said = party.reply_hello(asked["nonce"], 7, node)
            yield node, said | dict(client=client)

    return ask


def test_a_client_that_comes_back_as_another_node_takes_its_place(tmp_path):
    folder, said = sums.generate_keys(tmp_path / "keys", 3), []
    ask = greeted(sums.Party(folder, 1), 1)
    server = sums.Gatherer(folder, ask, said.append)
    server.handshake([1001], 7)
    server.handshake([1002], 7)
    assert server.clients == {1002: 1}
    assert said == ["client 1 is node 1002 now, no longer 1001"]
    for other in (2, True, 99, sums.SERVER, [1]):
        server.ask = greeted(sums.Party(folder, 1), other)
        server.handshake([1003], 7)
    assert server.clients == {1002: 1}


def test_places_of_absent_nodes_go_to_listed_clients_and_never_to_the_server(tmp_path):
    folder = sums.generate_keys(tmp_path / "keys", 5)
    server = sums.Gatherer(folder, lambda letters: [], lambda text: None)
    assert server.members.clients == [0, 1, 2, 3, 4]
    small = dpcomm.mechanism("ddgauss", **SHARED)
    with pytest.raises(Beyond, match="of 4 clients is asked, .* signed 5 or more"):
        server.begin([1, 2, 3], small, 10, 7, 0)
    with pytest.raises(ValueError, match="divides its noise among 4 clients, and 3"):
        sums.session_of(small, 10, [0, 1, 2], 7, 0)


# ---- sums over a transport, without Flower

D, TOLERANT = 1000, SHARED | dict(tolerance=0.25)
MECHANISMS = {
    "ddgauss": TOLERANT,
    "skellam": TOLERANT,
    "topk": TOLERANT | dict(fraction=0.2, seed=1),
}


class Nodes:
    """Four nodes in this process.

    dies: node -> step from which it is silent. lie: vector of node 3, or None.
    """

    def __init__(self, folder, mechanism, dies=(), lie=None):
        self.folder, self.mechanism, self.asked = folder, mechanism, []
        self.dies, self.words = dict(dies), []
        for i in range(4):
            update = torch.full((D,), 0.1 * i)
            self.words.append(mechanism.summand(update, Insecure(i)))
        if lie is not None:
            self.words[3] = lie(self.words[3])

    def step(self, node, asked):
        cohort, step = asked["cohort"], asked["step"]
        party = sums.Party(self.folder, node)
        setup = sums.session_of(self.mechanism, asked["entries"], cohort, 7, 0)
        vector = self.words[node] if step == MASKED else None
        return party.reply(setup, cohort, step, asked["mail"], vector)

    def ask(self, letters):
        for node, asked in letters.items():
            step = asked["step"]
            self.asked.append(step)
            if step == sums.HELLO:
                party = sums.Party(self.folder, node)
                yield node, party.reply_hello(asked["nonce"], 7, node)
            elif step < self.dies.get(node, 9):
                yield node, dict(message=self.step(node, asked))

    def sum(self):
        server = sums.Gatherer(self.folder, self.ask, lambda text: None)
        letters = server.begin([0, 1, 2, 3], self.mechanism, D, 7, 0)
        return server.end(self.ask(letters))


def nodes(tmp_path, name="ddgauss", **how):
    folder = sums.generate_keys(tmp_path / "keys", 4)
    return Nodes(folder, dpcomm.mechanism(name, **MECHANISMS[name]), **how)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("step", range(len(ROUNDS) + 1))
def test_a_sum_is_that_of_the_vectors_that_came(step, name, tmp_path):
    line = nodes(tmp_path, name, dies={3: step})
    total, there = line.sum()
    assert there == ([0, 1, 2, 3] if step > MASKED else [0, 1, 2])
    due = line.mechanism.ring.sum([line.words[i] for i in there])
    assert (total == due).all()
    left = [*tmp_path.rglob("*.state*")]
    assert all(path.name.split("-")[1] == "3" for path in left)


def test_a_client_that_complains_stays(tmp_path, monkeypatch):
    "Its message is longer than that of a client with nothing to complain about."
    real = client.deal

    def deal(setup, me, *rest):
        dealt = real(setup, me, *rest)
        if me == 3:
            dealt.shares[0] = 1, 1
        return dealt

    monkeypatch.setattr(client, "deal", deal)
    assert nodes(tmp_path).sum()[1] == [0, 1, 2, 3]


@pytest.mark.parametrize("step", range(len(ROUNDS)))
def test_below_the_threshold_nothing_is_revealed(step, tmp_path):
    line = nodes(tmp_path, dies={2: step, 3: step})
    with pytest.raises(BelowThreshold):
        line.sum()
    assert max(line.asked) == step  # nobody is asked for anything that comes after
    assert step >= UNMASK or UNMASK not in line.asked


def test_a_sum_opens_with_no_fewer_shares_of_noise_than_are_counted_on(tmp_path):
    "The session alone would open with three of four: its mechanism counts on all."
    line = nodes(tmp_path, dies={3: MASKED})
    line.mechanism = strict = replace(line.mechanism, tolerance=0.0)
    assert strict.honest == 4
    assert sums.session_of(strict, D, [0, 1, 2, 3], 7, 0).quorum == 4
    with pytest.raises(BelowThreshold, match="3 clients are left; 4 are needed"):
        line.sum()


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_vector_that_no_clip_allows_is_not_used(name, tmp_path):
    def lie(words):
        return np.full(len(words), 7 * 2 ** (mechanism.ring.bits - 4), np.int64)

    mechanism = dpcomm.mechanism(name, **MECHANISMS[name])
    line = nodes(tmp_path, name, lie=lie)
    with pytest.raises(BelowThreshold, match="the sum's norm is"):
        line.sum()
    honest = np.zeros(len(line.words[0]), np.int64)
    honest[0] = 4 * mechanism.clip_norm / mechanism.step(D)
    assert not sums.too_long(mechanism, honest, D, 4)


def test_each_step_is_answered_once_and_by_one_process(tmp_path):
    line = nodes(tmp_path)
    server = sums.Gatherer(line.folder, line.ask, lambda text: None)
    heard, letters = [], {}

    def ask(sent):
        letters.update(sent if next(iter(sent.values()))["step"] == 1 else {})
        heard.extend(sent)
        return line.ask(sent)

    line.dies = dict.fromkeys(range(4), 1)
    server.ask = ask
    with pytest.raises(BelowThreshold):
        server.begin([0, 1, 2, 3], line.mechanism, D, 7, 0)
    with pytest.raises(SecAggError):  # the first step, in a session that was begun
        line.step(0, letters[0] | dict(step=0, mail=b""))
    (state,) = tmp_path.rglob("*-0-1.state")
    assert stat.S_IMODE(state.stat().st_mode) == 0o600

    def attempt(_):
        try:
            return line.step(0, letters[0])
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        said = [*pool.map(attempt, range(8))]
    assert sum(isinstance(one, bytes) for one in said) == 1
    assert said.count("this step was already answered, or it skips one") == 7


# ---- keys


def test_keys_are_made_once_and_read_by_their_owner(tmp_path):
    folder = sums.generate_keys(tmp_path / "keys", 4)
    identity, members = sums.read_keys(folder, "client-2")
    assert identity.public_key().public_bytes_raw().hex() == members.directory[2]
    assert sorted(members.directory) == sorted([*range(4), SERVER])
    assert (members.threshold, members.least) == (None, 4)
    sums.approve(folder, "client-2", 3, threshold=2)
    again = sums.read_keys(folder, "client-2")[1]
    assert (again.threshold, again.least) == (2, 3)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for path in folder.glob("*.key"):
        assert path.read_text() not in (folder / "directory.json").read_text()
    assert len(json.loads((folder / "directory.json").read_text())) == 5
    with pytest.raises(FileExistsError):
        sums.generate_keys(folder, 4)
    with pytest.raises(ValueError, match="client-9.key is not a key .*does not exist"):
        sums.read_keys(folder, "client-9")
    own = tmp_path / "own"
    assert sums.new_key(own / "own.key").hex() not in members.directory.values()


def test_only_a_list_that_its_owner_signed_is_read(tmp_path):
    folder = sums.generate_keys(tmp_path / "keys", 4)
    signed = folder / "client-2.signed.json"
    good = signed.read_text()
    listed = json.loads((folder / "directory.json").read_text())
    del listed["3"]
    (folder / "directory.json").write_text(json.dumps(listed))
    assert len(sums.read_keys(folder, "client-2")[1].directory) == 5
    another = (folder / "client-1.signed.json").read_text()
    wrong = [another, good.replace("least", "laest"), good[:-9], "[1]", "[" * 10**5]
    wrong += ["{}", good.replace('\\"least\\": 4', '\\"least\\": 2')]
    for text in wrong:
        assert text != good
        signed.write_text(text)
        with pytest.raises(ValueError, match="client-2.signed.json"):
            sums.read_keys(folder, "client-2")
    signed.unlink()
    with pytest.raises(ValueError, match="is missing: sign directory.json"):
        sums.read_keys(folder, "client-2")
    for text in ("{", "[]", "[" * 10**5, '{"a": 1}', '{"0": "zz"}', '{"0": "00"}'):
        (folder / "directory.json").write_text(text)
        with pytest.raises(ValueError, match="directory.json"):
            sums.approve(folder, "client-2", 4)


def test_a_key_that_others_may_read_or_that_is_no_key_is_refused(tmp_path):
    folder = sums.generate_keys(tmp_path / "keys", 4)
    key = folder / "client-1.key"
    key.chmod(0o644)
    with pytest.raises(ValueError, match="client-1.key.*chmod go="):
        sums.read_keys(folder, "client-1")
    key.chmod(0o600)
    assert sums.read_key(folder, "client-1").public_key().public_bytes_raw()
    for text in ("", "zz", "00"):
        key.write_text(text)
        with pytest.raises(ValueError, match="client-1.key is not a key"):
            sums.read_keys(folder, "client-1")
    key.write_text((folder / "client-2.key").read_text())
    with pytest.raises(ValueError, match="not signed by the key of client-1"):
        sums.read_keys(folder, "client-1")
    sums.approve(folder, "client-1", 4)
    with pytest.raises(ValueError, match="lists a different key for client-1"):
        sums.read_keys(folder, "client-1")
