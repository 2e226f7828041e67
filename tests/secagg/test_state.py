"""A session whose parties are put away and taken back before every step is the session
that never was.
"""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import drawn
from tables import tabled

from dpcomm.core.chance import seed_tree
from dpcomm.secagg import protocol, state
from dpcomm.secagg.client import LAST_USE, Client
from dpcomm.secagg.protocol import MASKED, ROUNDS, SERVER, Setup
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


def test_fresh_secrets_survive_too():
    def truly(party):
        if isinstance(party, Server):
            return away(party)
        return Client.resume(SETUP, PRIVATE[party.me], DIRECTORY, party.state())

    _, server = played(truly)
    assert server.result.tolist() == (X.sum(0) % 2**16).tolist()


def test_who_lied_is_remembered():
    server = Server(SETUP, PRIVATE[SERVER], DIRECTORY)
    server.blamed = {2: protocol.BadShare("it lied: drop it", 2, protocol.SHARE)}
    error = away(server).blamed[2]
    assert type(error) is protocol.BadShare and (error.client, error.round) == (
        2,
        "share",
    )
    assert str(error) == "round 'share', client 2: it lied: drop it"


def test_what_was_put_away_says_nothing_more():
    client = Client(SETUP, 0, PRIVATE[0], DIRECTORY, seed=1)
    box, first = client.box, client.state()
    assert not any(box) and client.box is None
    with pytest.raises(protocol.Replay):
        client.start()
    assert Client.resume(SETUP, PRIVATE[0], DIRECTORY, first).start()
    server = Server(SETUP, PRIVATE[SERVER], DIRECTORY)
    server.state()
    with pytest.raises(protocol.Replay):
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
    with pytest.raises(ValueError, match="the state is damaged: take the copy"):
        Client.resume(SETUP, PRIVATE[0], DIRECTORY, bytes(data))


def test_a_state_of_somebody_else_is_refused(monkeypatch):
    data = Client(SETUP, 0, PRIVATE[0], DIRECTORY).state()
    with pytest.raises(ValueError, match="that of client 0; the server must take"):
        Server.resume(SETUP, PRIVATE[SERVER], DIRECTORY, data)
    with pytest.raises(ValueError, match="that of the server; a client must take"):
        given = Server(SETUP, PRIVATE[SERVER], DIRECTORY).state()
        Client.resume(SETUP, PRIVATE[0], DIRECTORY, given)
    other = Setup(6, 5, Ring(16), 3, 4, session=bytes(16))
    with pytest.raises(ValueError, match="belongs to another session"):
        Client.resume(other, PRIVATE[0], DIRECTORY, data)
    wider = Setup(6, 5, Ring(17), 3, 4, session=SETUP.session)
    with pytest.raises(ValueError, match="belongs to another public parameters"):
        Client.resume(wider, PRIVATE[0], DIRECTORY, data)
    monkeypatch.setattr(state, "VERSION", 2)
    with pytest.raises(ValueError, match="of version 1; this code reads 2"):
        Client.resume(SETUP, PRIVATE[0], DIRECTORY, data)


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
    back = state.from_json(json.loads(json.dumps(state.to_json(value))))
    assert back == value and type(back) is type(value)
    assert state.unpack_state(SETUP, 3, state.pack_state(SETUP, 3, {"x": value})) == (
        3,
        {"x": value},
    )


@pytest.mark.parametrize("dtype", ["<u4", "<u8", "<i8"])
def test_arrays_keep_their_type_and_may_be_written(dtype):
    value = np.arange(6, dtype=dtype).reshape(2, 3)
    back = state.from_json(json.loads(json.dumps(state.to_json(value))))
    assert back.dtype == value.dtype and back.flags.writeable
    np.testing.assert_array_equal(back, value)


@pytest.mark.parametrize("value", [1.5, object(), np.ones(2), {"f": len}])
def test_other_types_are_refused(value):
    with pytest.raises(TypeError, match="has no place in a state"):
        state.to_json(value)
    with pytest.raises(ValueError, match="it is not one of ours"):
        state.from_json(["module", "os"])


def test_every_field_a_party_can_have_is_kept_or_made_anew():
    "A field that is forgotten would lose the session."
    made = {"setup", "me", "identity", "directory", "draw", "neighbours", "lock"}
    made |= {"inbox", "graph"}

    def look(party):
        kept = client_kept if isinstance(party, Client) else server_kept
        assert set(vars(party)) <= kept | made
        return party

    from dpcomm.secagg.client import KEPT
    from dpcomm.secagg.server import SERVER_KEPT

    client_kept, server_kept = set(KEPT), set(SERVER_KEPT)
    _, server = played(look)
    assert server.step == len(ROUNDS)
