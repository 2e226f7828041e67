"Replay: bit-equal replicas, forgetting, losses, what does not fit."

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from laws import drawn
from tables import tabled
from torch import nn

from dpcomm.core.random import Insecure, derive, seed_tree
from dpcomm.mechanisms.rec import Rec
from dpcomm.training import federated, models
from dpcomm.training import state as state_module
from dpcomm.training.downlink import (
    Agreement,
    Replica,
    Server,
    advance,
    answer,
    catch_up,
    close_round,
    initial_state,
    receive,
)

REC = Rec(0.5, 0.2, 3, (6, 2))  # 6 bits of indices and a seed: 5 bytes
SERVERS = {"sgd": 1.0, "momentum": 0.3, "adam": 0.05}


@pytest.fixture(scope="module", autouse=True)
def tiny():
    "A model of eight weights, so that the state is shorter than a handful of messages."
    with pytest.MonkeyPatch.context() as patch:
        made = (lambda: nn.Sequential(nn.Flatten(), nn.Linear(3, 2)), 8)
        patch.setitem(models.MODELS, "tiny", made)
        yield


def agree(server="adam") -> Agreement:
    config = federated.Config(cohort=2, server=server, server_lr=SERVERS[server])
    return Agreement("tiny", REC, config)


def update(*path) -> torch.Tensor:
    return torch.from_numpy(seed_tree(1, *path).standard_normal(8, dtype=np.float32))


def message(*path, mechanism=REC):
    return mechanism.encode(update(*path), Insecure(derive(2, *path)))


def bits_of(state) -> tuple:
    "Everything a state holds, comparable bit by bit."
    kept = state.optimiser.state.get(state.w, {})
    return state.round, state.to_bytes(), float(kept.get("step", -1))


def world(server="adam", n=3) -> tuple:
    "A server and its clients before the first round."
    agreement = agree(server)
    return Server(agreement, 9, n), [Replica(agreement) for _ in range(n)]


def visit(server, replicas, cohort) -> None:
    "One round over real packets and messages."
    for c in dict.fromkeys(cohort):
        receive(replicas[c], catch_up(server, c))
    t, messages = server.state.round, []
    for i, c in enumerate(cohort):
        messages.append(answer(replicas[c], update(t, i), Insecure(derive(3, t, i))))
    close_round(server, cohort, messages)


# ---- the step


@pytest.mark.parametrize("server", SERVERS)
def test_the_step_is_the_servers_of_a_federated_run(server):
    "The same averages through the engine's optimiser, up to the order of a sum."
    state = initial_state(agree(server), 0)
    w = state.w.detach().clone().requires_grad_()
    optimiser = state_module.server_optimiser(w, state.agreement.config)
    for t in range(6):
        messages = [message(t, i) for i in range(t % 3)]
        rows = [REC.decode(m) for m in messages] or [torch.zeros(8)]
        w.grad = -REC.aggregate(torch.stack(rows), 2, None)
        optimiser.step()
        advance(state, [m.payload for m in messages])
    assert torch.allclose(w, state.w, atol=1e-6)


# ---- any schedule


@drawn
@given(some.sampled_from(sorted(SERVERS)), some.integers(1, 4), some.data())
def test_any_schedule_gives_bit_equal_states_and_the_ledgers_bytes(server, n, more):
    """Repeats, empty rounds, long absences, late first contacts; every content equals
    the count of a ledger that forgets nothing.
    """
    cohort = some.lists(some.integers(0, n - 1), max_size=3)
    (hub, replicas), ledger, measured = world(server, n), state_module.Ledger(n), 0
    size, limit = hub.agreement.message_bytes, hub.agreement.state_bytes
    for t, cohort in enumerate(more.draw(some.lists(cohort, max_size=14))):
        for c in set(cohort):
            content = 8 * catch_up(hub, c).content
            due = state_module.download_bits(ledger, c, t, 8 * limit, True)
            assert content == due
            measured += content
        visit(hub, replicas, cohort)
        ledger.record(t, np.array(cohort, dtype=int), REC.bits(8), 8 * limit, True)
        assert all(replicas[c].state.round == t for c in cohort)
        kept = [len(messages) for messages in hub.rounds]
        assert len(kept) == t + 1 - hub.oldest
        assert sum(kept) * size <= limit + size * max(kept, default=0)
    assert measured == ledger.downlink_bits
    for c, replica in enumerate(replicas):
        assert bits_of(receive(replica, catch_up(hub, c))) == bits_of(hub.state)


@drawn
@given(some.sampled_from(sorted(SERVERS)), some.data())
def test_lost_messages_and_lost_packets_are_survived(server, more):
    """A client that downloaded and was not heard, or that was heard and lost its
    memory, is brought back to the server's bits.
    """
    hub, replicas = world(server, 3)
    fates = some.lists(
        some.sampled_from(["away", "heard", "lost", "wiped"]), min_size=3, max_size=3
    )
    for t in range(more.draw(some.integers(1, 12))):
        fate, cohort, messages = more.draw(fates), [], []
        for c in (c for c in range(3) if fate[c] != "away"):
            try:
                receive(replicas[c], catch_up(hub, c))
            except ValueError as error:
                assert "full=True" in str(error)
                receive(replicas[c], catch_up(hub, c, full=True))
            assert bits_of(replicas[c].state) == bits_of(hub.state)
            sent = answer(replicas[c], update(t, c), Insecure(derive(4, t, c)))
            if fate[c] != "lost":
                cohort, messages = [*cohort, c], [*messages, sent]
            if fate[c] == "wiped":
                replicas[c] = Replica(hub.agreement)
        close_round(hub, cohort, messages)


# ---- the server


def test_packets_name_nobody_and_leave_out_ones_own():
    hub, replicas = world()
    visit(hub, replicas, [0, 0, 1])
    all_three = sorted(replicas[0].sent + replicas[1].sent)
    for client, own in ((0, 2), (1, 1)):
        packet = catch_up(hub, client)
        assert (packet.kind, packet.since, packet.until) == ("history", 0, 1)
        others = [p for p in all_three if p not in replicas[client].sent]
        assert (packet.own, packet.rounds) == (own, (tuple(others),))
    new = catch_up(hub, 2)
    assert (new.kind, new.seed, new.own) == ("start", 9, 0)
    assert new.rounds == (tuple(all_three),)


OTHER = message(0, mechanism=dataclasses.replace(REC, std=0.3)).to_bytes()


@tabled(
    "cohort, messages, says",
    [
        ([0], [], "for each of 0 messages"),
        ([3], [message(0).to_bytes()], r"cohort is \[3\]"),
        ([0], [message(0).to_bytes()[:-1]], "truncated"),
        ([0], [OTHER], "sender.s parameters"),
    ],
)
def test_a_bad_round_changes_nothing(cohort, messages, says):
    hub, replicas = world()
    visit(hub, replicas, [0, 1])

    def everything():
        return bits_of(hub.state), [*hub.rounds], hub.seen.tolist(), {**hub.own}

    before = everything()
    with pytest.raises(ValueError, match=says):
        close_round(hub, cohort, messages)
    assert everything() == before


# ---- the client


def refused(replica, packet, says: str) -> None:
    "A packet is refused with a sentence, and the replica stays as it is."
    before = replica.state and bits_of(replica.state), replica.sent, replica.sent_in
    with pytest.raises(ValueError, match=says):
        receive(replica, packet)
    after = replica.state and bits_of(replica.state), replica.sent, replica.sent_in
    assert after == before


AWAY = "does not bring this replica, at round .*, to the server's state"


def test_a_client_that_missed_the_reset_or_forgot_is_told_and_repaired():
    hub, replicas = world()
    visit(hub, replicas, [0, 0, 1])
    old = Replica(hub.agreement, initial_state(hub.agreement, 9))
    visit(hub, replicas, [0])
    visit(hub, replicas, [1])
    refused(old, catch_up(hub, 0), f"rounds 1 to 3 {AWAY}")
    refused(Replica(hub.agreement), catch_up(hub, 0), AWAY)
    for sent, sent_in in ((replicas[1].sent[:0], replicas[1].sent_in), ((), -1)):
        lost = dataclasses.replace(replicas[1], sent=sent, sent_in=sent_in)
        refused(lost, catch_up(hub, 1), AWAY)
    repaired = receive(old, catch_up(hub, 0, full=True))
    assert bits_of(repaired) == bits_of(hub.state)
    one, other = world()
    receive(other[0], catch_up(one, 0))
    sent = [answer(other[0], update(i), Insecure(i)) for i in range(2)]
    close_round(one, [0], sent[:1])  # drawn twice, heard once
    refused(other[0], catch_up(one, 0), AWAY)


def test_old_packets_are_refused():
    hub, replicas = world()
    early = catch_up(hub, 0), catch_up(hub, 0, full=True)
    visit(hub, replicas, [0, 1])
    visit(hub, replicas, [0])
    for packet in early:
        refused(replicas[0], packet, "packet ends at round 0, but this replica is at 1")


@tabled("change", [dict(own=1), dict(own=0), dict(seed=9), dict(digest=0), {}], ids=str)
def test_a_packet_that_does_not_add_up_is_refused(change):
    hub, replicas = world()
    visit(hub, replicas, [0, 0, 1, 2])
    packet = dataclasses.replace(catch_up(hub, 0), **change)
    if change:
        refused(replicas[0], packet, AWAY)
    for rounds in (((),), (*packet.rounds, ()), packet.rounds[:0]):
        refused(replicas[0], dataclasses.replace(packet, rounds=rounds), AWAY)
