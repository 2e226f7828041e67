"""A session whose parties are put away and taken back before every step is the session
that never was.
"""

import hashlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import drawn
from tables import tabled

from dpcomm.core.random import seed_tree
from dpcomm.secagg import client as storing
from dpcomm.secagg import errors
from dpcomm.secagg.client import LAST_USE, Client, stored_form
from dpcomm.secagg.errors import MASKED, ROUNDS, SERVER
from dpcomm.secagg.protocol import Setup
from dpcomm.secagg.ring import Ring
from dpcomm.secagg.server import Server
from dpcomm.secagg.session import identities

SETUP = Setup(6, 5, Ring(16), 3, 4, session=bytes(range(16)))
PRIVATE, DIRECTORY = identities(6, 0)
X = seed_tree(0, "vectors").integers(0, 2**16, (6, 5))


def away(party):
    "The same party after a night in a drawer."
    if isinstance(party, Server):
        return Server.resume(SETUP, PRIVATE[SERVER], DIRECTORY, party.state())
    return Client.resume(SETUP, PRIVATE[party.me], DIRECTORY, party.state(), seed=1)


def played(between, drop=None):
    "All messages of a session, both ways, and the server at its end."
    server, said = Server(SETUP, PRIVATE[SERVER], DIRECTORY), []
    clients = [Client(SETUP, i, PRIVATE[i], DIRECTORY, seed=1) for i in range(6)]
    mail = dict.fromkeys(range(6))
    for step in range(6):
        server, clients = between(server), [between(c) for c in clients]
        for i, data in mail.items():
            if (drop or {}).get(i, 6) > step:
                clients[i].vector = X[i] if step == MASKED else None
                up = clients[i].receive(data) if step else clients[i].start()
                server.receive(i, up)
                said.append((step, i, data, up))
        mail = server.advance()
    return said, between(server)


@settings(drawn, max_examples=20)
@given(st.dictionaries(st.integers(0, 5), st.integers(0, 5), max_size=1))
def test_put_away_before_every_step_equals_never_put_away(drop):
    (said, server), (told, again) = (played(f, drop) for f in (lambda p: p, away))
    assert said == told
    assert server.result.tolist() == again.result.tolist()
    assert server.survivors == again.survivors
    np.testing.assert_array_equal(server.traffic, again.traffic)


def test_who_lied_is_remembered():
    server = Server(SETUP, PRIVATE[SERVER], DIRECTORY)
    server.blamed = {2: errors.BadShare("it lied: drop it", 2, errors.SHARE)}
    error = away(server).blamed[2]
    assert type(error) is errors.BadShare
    assert (error.client, error.round) == (2, "share")
    assert str(error) == "round 'share', client 2: it lied: drop it"


def test_what_was_put_away_says_nothing_more():
    client = Client(SETUP, 0, PRIVATE[0], DIRECTORY, seed=1)
    box, first = client.box, client.state()
    assert not any(box) and client.box is None
    with pytest.raises(errors.Replay):
        client.start()
    assert Client.resume(SETUP, PRIVATE[0], DIRECTORY, first, seed=1).start()
    server = Server(SETUP, PRIVATE[SERVER], DIRECTORY)
    server.state()
    with pytest.raises(errors.Replay):
        server.advance()


def test_erased_secrets_are_in_no_later_state():
    "Each secret of a client, as bytes, is absent from the states after its last use."
    secrets, seen = {}, []

    def look(party):
        if isinstance(party, Client) and party.me == 0:
            for last, names in LAST_USE.items():
                for name in set(names) - {"draw", "vector"}:
                    value = getattr(party, name, None)
                    if value:
                        parts = value.values() if isinstance(value, dict) else [value]
                        flat = (v if isinstance(v, tuple) else (v,) for v in parts)
                        secrets[name] = last, [bytes(p) for v in flat for p in v]
            step, data = party.step, party.state()
            seen.append((step, data))
            return Client.resume(SETUP, PRIVATE[0], DIRECTORY, data, seed=1)
        return party

    played(look)
    assert set(secrets) == {"box", "pair", "share_keys", "own", "agreed", "held"}
    for last, values in secrets.values():
        for value in values:
            held = [step for step, data in seen if value in data]
            assert held and max(held) <= last


def test_a_state_that_comes_back_answers_no_round_twice(tmp_path):
    """A copy of each state is brought back after its reply, in this process and by a
    counter of another; nothing is said, and an unacceptable message costs nothing.
    """
    server, mail = Server(SETUP, PRIVATE[SERVER], DIRECTORY), dict.fromkeys(range(6))
    clients = {i: Client(SETUP, i, PRIVATE[i], DIRECTORY, seed=1) for i in range(6)}
    clients[0].counter = storing.Counter(tmp_path)
    known = SETUP, PRIVATE[0], DIRECTORY
    for step in range(6):
        copy = clients[0].state()
        clients[0] = Client.resume(*known, copy, counter=storing.Counter(tmp_path))
        for i, data in mail.items():
            clients[i].vector = X[i] if step == MASKED else None
            if step and not i:
                with pytest.raises(errors.SecAggError):
                    clients[i].receive(data[:-1])
            up = clients[i].receive(data) if step else clients[i].start()
            server.receive(i, up)
        back = Client.resume(*known, copy, counter=storing.Counter(tmp_path))
        back.vector = X[0]
        with pytest.raises(errors.Replay, match="answered this step before: drop"):
            back.receive(mail[0]) if step else back.start()
        mail = server.advance()
    assert server.result.tolist() == (X.sum(0) % 2**16).tolist()
    assert storing.Counter(tmp_path).reached(SETUP.session, 0) == 5
    assert all(p.stat().st_mode & 0o777 == 0o600 for p in tmp_path.iterdir())


def test_a_counter_never_falls_and_one_of_two_processes_passes(tmp_path, monkeypatch):
    one, two = (storing.Counter(tmp_path / "keys") for _ in range(2))
    one.rise(SETUP.session, 3, 2)
    two.rise(SETUP.session, 4, 0)
    two.rise(bytes(16), 3, 0)
    for step in (0, 1, 2):
        with pytest.raises(errors.Replay, match="client 3"):
            two.rise(SETUP.session, 3, step)
    monkeypatch.setattr(storing.Counter, "reached", lambda *_: -1)  # both at once
    with pytest.raises(errors.Replay):
        two.rise(SETUP.session, 3, 2)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be written .*: free some space"):
        storing.Counter(tmp_path / "file").rise(bytes(16), 0, 0)


def resumed(data, setup=SETUP, server=False):
    if server:
        return Server.resume(setup, PRIVATE[SERVER], DIRECTORY, data)
    return Client.resume(setup, PRIVATE[0], DIRECTORY, data, seed=1)


def test_a_state_of_somebody_else_is_refused(monkeypatch):
    data = Client(SETUP, 0, PRIVATE[0], DIRECTORY).state()
    its = Server(SETUP, PRIVATE[SERVER], DIRECTORY).state()
    other = Setup(6, 5, Ring(16), 3, 4, session=bytes(16))
    wider = Setup(6, 5, Ring(17), 3, 4, session=SETUP.session)
    damaged = [data[:k] + bytes([data[k] ^ 1]) + data[k + 1 :] for k in (0, 31, 32, 60)]
    for stored, how, says in (
        *((bad, {}, "is damaged") for bad in damaged),
        (data, dict(server=True), "belongs to client 0; the server must use"),
        (its, {}, "belongs to the server; a client must use"),
        (data, dict(setup=other), "written with a different session"),
        (data, dict(setup=wider), "written with different public parameters"),
    ):
        with pytest.raises(ValueError, match=says):
            resumed(stored, **how)
    with pytest.raises(ValueError, match="counter is missing.*: pass client.Counter"):
        Client.resume(SETUP, PRIVATE[0], DIRECTORY, data)
    monkeypatch.setattr(storing, "VERSION", 3)
    with pytest.raises(ValueError, match="of version 2; this code reads 3"):
        resumed(data)


FIELDS = dict.fromkeys(stored_form(Server).__struct_fields__)
ODD = [{"total": total} for total in (7, ["<u4", [3], b"AA"], ["zz", [1], b""])]
ODD += [{"blamed": {1: ["Nothing", "text", 1, 1]}}, {"blamed": {1: "text"}}]
ODD += [{"seen": {b"key": "x"}}, {"refused": [[1]]}, {"step": -1}, {"odd": 1}]
HEAD = 2, SERVER, SETUP.session, SETUP.digest
HOSTILE = [
    b"",
    b"\x93",
    b"\x91" * 10**5,
    b"not msgpack",
    msgspec.msgpack.encode([2, 0]),
]
WRONG = [{}, {"step": 0}, *(FIELDS | odd for odd in ODD)]
HOSTILE += [msgspec.msgpack.encode((*HEAD, fields)) for fields in WRONG]


@tabled("body", HOSTILE, ids=lambda body: repr(body)[-30:])
def test_whatever_stands_in_a_state_is_refused_in_a_sentence(body):
    "Its hash is no signature: whoever can write the file can write another."
    data = hashlib.sha256(body).digest() + body
    with pytest.raises(ValueError, match="the state cannot be read .*: use the copy"):
        resumed(data, server=True)


def test_every_field_a_party_can_have_is_kept_or_made_anew():
    "A field that is forgotten would lose the session."
    made = {"setup", "me", "identity", "directory", "draw", "neighbours", "lock"}
    made |= {"inbox", "graph", "counter"}

    def look(party):
        kept = stored_form(type(party)).__struct_fields__
        assert set(vars(party)) <= {*kept} | made
        return party

    assert played(look)[1].step == len(ROUNDS)
