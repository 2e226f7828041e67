"What of secure sums in Flower needs no Flower: sizes of sessions, and who is a client."

import pytest
import torch
from tables import tabled

import dpcomm
from dpcomm.core.random import Insecure
from dpcomm.interop import sums
from dpcomm.training.floor import Beyond

SHARED = dict(clip_norm=1.0, sigma=1.0, n_clients=4)


@tabled(
    "name, more",
    [
        ("ddgauss", {}),
        ("ddgauss", dict(padded=True)),
        ("skellam", {}),
        ("topk", dict(fraction=0.1)),
        ("compressive", dict(fraction=0.1)),
    ],
)
@tabled("d", [64, 1000])
def test_a_session_is_as_long_as_the_summands(name, more, d):
    mechanism = dpcomm.mechanism(name, **SHARED, **more)
    setup = sums.session_of(mechanism, d, [0, 1, 2, 3], 7, 0)
    assert setup.d == len(mechanism.summand(torch.zeros(d), Insecure(0)))


def greeted(party, client):
    "A transport in which every node says that it is one client."

    def ask(letters):
        for node, asked in letters.items():
            if asked["step"] == sums.HELLO:
                yield (
                    node,
                    party.reply_hello(asked["nonce"], 7, node) | dict(client=client),
                )

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


def test_a_silent_place_is_never_the_servers(tmp_path):
    folder = sums.generate_keys(tmp_path / "keys", 3)
    server = sums.Gatherer(folder, lambda letters: [], lambda text: None)
    assert server.members.clients == [0, 1, 2]
    small = dpcomm.mechanism("ddgauss", **SHARED)
    with pytest.raises(ValueError, match="divides its noise among 4 clients, and 3"):
        server.begin([1, 2, 3, 4], small, 10, 7, 0)
    with pytest.raises(Beyond, match="requires at least 3"):
        server.members.among([0, 1])
