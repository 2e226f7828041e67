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
from dpcomm.secagg import client_state, errors
from dpcomm.secagg.client import CLIENT_STATE, LAST_USE, Client
from dpcomm.secagg.errors import MASKED, ROUNDS, SERVER
from dpcomm.secagg.protocol import Setup
from dpcomm.secagg.ring import Ring
from dpcomm.secagg.server import SERVER_STATE, Server
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
    assert type(error) is errors.BadShare and (error.client, error.round) == (
        2,
        "share",
    )
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
                        parts = [
                            p
                            for v in parts
                            for p in (v if isinstance(v, tuple) else (v,))
                        ]
                        secrets[name] = last, [bytes(p) for p in parts]
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


@tabled("at", [0, 31, 32, 60, -1])
def test_a_damaged_state_is_refused(at):
    data = bytearray(Client(SETUP, 0, PRIVATE[0], DIRECTORY).state())
    data[at] ^= 1
    with pytest.raises(ValueError, match="the state is damaged: use the copy"):
        Client.resume(SETUP, PRIVATE[0], DIRECTORY, bytes(data), seed=1)


def test_a_state_of_somebody_else_is_refused(monkeypatch):
    data = Client(SETUP, 0, PRIVATE[0], DIRECTORY).state()
    with pytest.raises(ValueError, match="belongs to client 0; the server must use"):
        Server.resume(SETUP, PRIVATE[SERVER], DIRECTORY, data)
    with pytest.raises(ValueError, match="belongs to the server; a client must use"):
        given = Server(SETUP, PRIVATE[SERVER], DIRECTORY).state()
        Client.resume(SETUP, PRIVATE[0], DIRECTORY, given, seed=1)
    other = Setup(6, 5, Ring(16), 3, 4, session=bytes(16))
    with pytest.raises(ValueError, match="written with a different session"):
        Client.resume(other, PRIVATE[0], DIRECTORY, data, seed=1)
    wider = Setup(6, 5, Ring(17), 3, 4, session=SETUP.session)
    with pytest.raises(ValueError, match="written with a different public parameters"):
        Client.resume(wider, PRIVATE[0], DIRECTORY, data, seed=1)
    monkeypatch.setattr(client_state, "VERSION", 3)
    with pytest.raises(ValueError, match="of version 2; this code reads 3"):
        Client.resume(SETUP, PRIVATE[0], DIRECTORY, data, seed=1)


def test_a_state_that_comes_back_answers_no_round_twice(tmp_path):
    """A copy of each state is brought back after its reply, in this process and by a
    counter of another; nothing is said, and an unacceptable message costs nothing.
    """
    server, mail = Server(SETUP, PRIVATE[SERVER], DIRECTORY), dict.fromkeys(range(6))
    clients = {i: Client(SETUP, i, PRIVATE[i], DIRECTORY, seed=1) for i in range(6)}
    clients[0].counter = client_state.Counter(tmp_path)
    known = SETUP, PRIVATE[0], DIRECTORY
    for step in range(6):
        copy = clients[0].state()
        clients[0] = Client.resume(*known, copy, counter=client_state.Counter(tmp_path))
        for i, data in mail.items():
            clients[i].vector = X[i] if step == MASKED else None
            if step and not i:
                with pytest.raises(errors.SecAggError):
                    clients[i].receive(data[:-1])
            up = clients[i].receive(data) if step else clients[i].start()
            server.receive(i, up)
        back = Client.resume(*known, copy, counter=client_state.Counter(tmp_path))
        back.vector = X[0]
        with pytest.raises(errors.Replay, match="answered this step before: drop"):
            back.receive(mail[0]) if step else back.start()
        mail = server.advance()
    assert server.result.tolist() == (X.sum(0) % 2**16).tolist()
    assert client_state.Counter(tmp_path).reached(SETUP.session, 0) == 5
    assert all(p.stat().st_mode & 0o777 == 0o600 for p in tmp_path.iterdir())


def test_a_counter_never_falls_and_one_of_two_processes_passes(tmp_path, monkeypatch):
    one, two = (
        client_state.Counter(tmp_path / "keys"),
        client_state.Counter(tmp_path / "keys"),
    )
    one.rise(SETUP.session, 3, 2)
    two.rise(SETUP.session, 4, 0)
    two.rise(bytes(16), 3, 0)
    for step in (0, 1, 2):
        with pytest.raises(errors.Replay, match="client 3"):
            two.rise(SETUP.session, 3, step)
    monkeypatch.setattr(
        client_state.Counter, "reached", lambda *_: -1
    )  # both looked at once
    with pytest.raises(errors.Replay):
        two.rise(SETUP.session, 3, 2)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be written .*: free some space"):
        client_state.Counter(tmp_path / "file").rise(bytes(16), 0, 0)


def test_a_state_is_taken_back_with_a_counter():
    data = Client(SETUP, 0, PRIVATE[0], DIRECTORY).state()
    with pytest.raises(
        ValueError, match="counter is missing.*: pass client_state.Counter"
    ):
        Client.resume(SETUP, PRIVATE[0], DIRECTORY, data)


def test_a_state_sets_no_attribute_that_a_party_does_not_write():
    "Its hash is no signature: whoever can write the file can write another."
    for party, take, form in (
        (Client(SETUP, 0, PRIVATE[0], DIRECTORY), Client.resume, CLIENT_STATE),
        (Server(SETUP, PRIVATE[SERVER], DIRECTORY), Server.resume, SERVER_STATE),
    ):
        who = getattr(party, "me", SERVER)
        more, key = {"seed": 1} if who == 0 else {}, PRIVATE[who]
        fields = client_state.unpack_state(SETUP, who, party.state(), form)[1]
        take(SETUP, key, DIRECTORY, client_state.pack_state(SETUP, who, fields), **more)
        other = fields | {"lists": [1]}
        for wrong in (
            {},
            fields | {"step": 7},
            {"step": 0},
            fields | {"odd": 1},
            other,
        ):
            data = client_state.pack_state(SETUP, who, wrong)
            with pytest.raises(ValueError, match="cannot be read .*: use the copy"):
                take(SETUP, key, DIRECTORY, data, **more)


ARRAY = dict.fromkeys(SERVER_STATE.__struct_fields__)
HOSTILE = (
    *(b"", b"\x93", b"\x91" * 10**5, b"not msgpack", msgspec.msgpack.encode([2, 0])),
    *(
        msgspec.msgpack.encode((2, SERVER, SETUP.session, SETUP.digest, ARRAY | odd))
        for odd in (
            *({"total": total} for total in (7, ["<u4", [3], b"AA"], ["zz", [1], b""])),
            *({"blamed": {1: ["Nothing", "text", 1, 1]}}, {"blamed": {1: "text"}}),
            *({"seen": {b"key": "x"}}, {"refused": [[1]]}, {"step": -1}),
        )
    ),
)


@tabled("body", HOSTILE, ids=lambda body: repr(body)[-30:])
def test_whatever_stands_in_a_state_is_refused_in_a_sentence(body):
    data = hashlib.sha256(body).digest() + body
    with pytest.raises(ValueError, match="the state cannot be read .*: use the copy"):
        Server.resume(SETUP, PRIVATE[SERVER], DIRECTORY, data)


def test_every_field_a_party_can_have_is_kept_or_made_anew():
    "A field that is forgotten would lose the session."
    made = {"setup", "me", "identity", "directory", "draw", "neighbours", "lock"}
    made |= {"inbox", "graph", "counter"}

    def look(party):
        kept = CLIENT_STATE if isinstance(party, Client) else SERVER_STATE
        assert set(vars(party)) <= {*kept.__struct_fields__} | made
        return party

    assert played(look)[1].step == len(ROUNDS)
