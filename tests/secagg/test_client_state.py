"""A session whose parties are put away and taken back before every step is the session
that never was.
"""

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import drawn
from tables import tabled

from dpcomm.core.random import seed_tree
from dpcomm.secagg import client_state, errors
from dpcomm.secagg.client import LAST_USE, Client
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
            held = [step for step, data in seen if value.hex().encode() in data]
            assert held and max(held) <= last


def test_a_server_is_put_away_between_rounds_only():
    server = Server(SETUP, PRIVATE[SERVER], DIRECTORY)
    server.receive(0, Client(SETUP, 0, PRIVATE[0], DIRECTORY).start())
    with pytest.raises(ValueError, match="1 messages of the round 'advertise'"):
        server.state()
    server.receive(1, Client(SETUP, 1, PRIVATE[1], DIRECTORY).start())


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
    monkeypatch.setattr(client_state, "VERSION", 2)
    with pytest.raises(ValueError, match="of version 1; this code reads 2"):
        Client.resume(SETUP, PRIVATE[0], DIRECTORY, data, seed=1)


VALUES = st.recursive(
    st.none() | st.integers() | st.text() | st.binary() | st.binary().map(bytearray),
    lambda inside: (
        st.lists(inside, max_size=3)
        | st.tuples(inside, inside)
        | st.sets(st.integers())
        | st.dictionaries(st.binary() | st.integers(), inside, max_size=3)
    ),
    max_leaves=8,
)


@settings(drawn)
@given(VALUES)
def test_the_notation_is_exact(value):
    back = client_state.from_json(json.loads(json.dumps(client_state.to_json(value))))
    assert back == value and type(back) is type(value)
    assert client_state.unpack_state(
        SETUP, 3, client_state.pack_state(SETUP, 3, {"x": value})
    ) == (
        3,
        {"x": value},
    )


@tabled("dtype", ["<u4", "<u8", "<i8"])
def test_arrays_keep_their_type_and_may_be_written(dtype):
    value = np.arange(6, dtype=dtype).reshape(2, 3)
    back = client_state.from_json(json.loads(json.dumps(client_state.to_json(value))))
    assert back.dtype == value.dtype and back.flags.writeable
    np.testing.assert_array_equal(back, value)


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


@tabled("odd", ["receive", "directory", "__class__", "setup"])
def test_a_state_sets_no_attribute_that_a_party_does_not_write(odd):
    "Its hash is no signature: whoever can write the file can write another."
    for party, take in (
        (Client(SETUP, 0, PRIVATE[0], DIRECTORY), Client.resume),
        (Server(SETUP, PRIVATE[SERVER], DIRECTORY), Server.resume),
    ):
        who = getattr(party, "me", SERVER)
        fields = client_state.unpack_state(SETUP, who, party.state())[1]
        more = {"seed": 1} if who == 0 else {}
        key = PRIVATE[who]
        take(SETUP, key, DIRECTORY, client_state.pack_state(SETUP, who, fields), **more)
        for wrong in (fields | {odd: 1}, {}, fields | {"step": 7}, {"step": 0}):
            data = client_state.pack_state(SETUP, who, wrong)
            with pytest.raises(
                ValueError, match="the state (has an unexpected value|is at step)"
            ):
                take(SETUP, key, DIRECTORY, data, **more)


@tabled(
    "body",
    [
        "[" * 10**5,
        "[" * 500 + "]" * 500,
        '["list", [["dict", []], ["dict", []]]]',
        '["bytes", "zz"]',
        '["array", "<u4", [3], "AA=="]',
        '["error", "Nothing", "text", 1, 1]',
        '["dict", 7]',
        "7",
        "{}",
        '"text"',
        "not json",
        "",
    ],
)
def test_whatever_stands_in_a_state_is_refused_in_a_sentence(body):
    data = hashlib.sha256(body.encode()).digest() + body.encode()
    with pytest.raises(ValueError, match="the state cannot be read .*: use the copy"):
        client_state.unpack_state(SETUP, 0, data)


def test_every_field_a_party_can_have_is_kept_or_made_anew():
    "A field that is forgotten would lose the session."
    made = {"setup", "me", "identity", "directory", "draw", "neighbours", "lock"}
    made |= {"inbox", "graph", "counter"}

    def look(party):
        kept = client_kept if isinstance(party, Client) else server_kept
        assert set(vars(party)) <= kept | made
        return party

    from dpcomm.secagg.client import KEPT
    from dpcomm.secagg.server import SERVER_KEPT

    client_kept, server_kept = set(KEPT), set(SERVER_KEPT)
    _, server = played(look)
    assert server.step == len(ROUNDS)
