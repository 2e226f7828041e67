"Secure sums through the two lines: a cohort a round, dropouts, and what is refused."

from dataclasses import replace

import pytest
import torch
from flower_nodes import Grid, client_app, digits, first_model, identity, inner, network
from flwr.app import ConfigRecord, RecordDict
from flwr.app import Message as Letter

import dpcomm
from dpcomm.interop import floor, sums
from dpcomm.interop import flower as native
from dpcomm.secagg.errors import MASKED, ROUNDS

pytestmark = pytest.mark.flower
_ = digits, identity  # fixtures

CLIENTS, IN_SUM = 30, 8
FAINT = dict(clip_norm=0.5, sigma=1e-3, n_clients=IN_SUM, tolerance=0.25)
WHERE = dpcomm.Deployment(
    n_clients=CLIENTS,
    cohort=IN_SUM,
    rounds=12,
    delta=1e-3,
    d=7850,
    trust="secagg",
    sampling="fixed",
    tolerance=0.25,
)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    place = tmp_path_factory.mktemp("keys") / "all"
    return sums.generate_keys(place, CLIENTS, least=IN_SUM)


class Summing(Grid):
    """Nodes that know which client they are.

    gone: place among those asked first -> step from which it takes part in no run.
    """

    def __init__(self, app, gone=None, number=lambda node: node - 1000, **settings):
        self.gone, self.order, self.steps = gone or {}, [], []
        own = lambda node: {"partition-id": number(node)} | settings  # noqa: E731
        super().__init__(app, CLIENTS, own)

    def send_and_receive(self, messages, timeout=None):
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            step = message.content.config_records.get("dpcomm", {}).get("step")
            if node not in self.order:
                self.order.append(node)
            self.steps.append((node, step))
            if step is None or step < self.gone.get(self.order.index(node), 99):
                replies.append(self.one(message))
        self.seen.append(replies)
        return replies


def serve(digits, keys, rounds=1, broken=(), **more):
    "The model after a run, its transport and its strategy."
    used = dpcomm.mechanism("ddgauss", **FAINT)
    private = native.Private(inner("FedAvg"), used, WHERE, seed=0, keys=keys)
    mods = [native.mod(used, floor=False, keys=keys)]
    grid = Summing(client_app(digits, mods, broken), **more)
    result = private.start(grid, first_model(), num_rounds=rounds)
    return result.arrays.to_torch_state_dict(), grid, private


def mean_of(digits, nodes):
    "The model after the sum of some nodes' clipped updates, over the cohort."
    model, plain = network().state_dict(), Grid(client_app(digits, []))
    after = {k: v.clone() for k, v in model.items()}
    content = RecordDict({"arrays": first_model()})
    for node in nodes:
        letter = Letter(content, dst_node_id=node, message_type="train")
        state = plain.one(letter).content["arrays"].to_torch_state_dict()
        moves = {k: state[k] - v for k, v in model.items()}
        norm = float(torch.cat([m.flatten() for m in moves.values()]).norm())
        for k, move in moves.items():
            after[k] += min(1.0, FAINT["clip_norm"] / norm) * move / IN_SUM
    return after


def same(found, due):
    "Up to rounding and a noise of a thousandth of the clip."
    return all(torch.allclose(found[k], v, atol=2e-3) for k, v in due.items())


@pytest.mark.parametrize("gone", [{}, {2: sums.HELLO}, {5: MASKED}, {0: 0, 7: 5}])
def test_a_cohorts_sum_moves_the_model_whoever_drops_out(gone, digits, keys):
    found, grid, private = serve(digits, keys, gone=gone)
    asked = grid.order[:IN_SUM]
    heard = [n for i, n in enumerate(asked) if gone.get(i, len(ROUNDS)) > MASKED]
    assert same(found, mean_of(digits, heard))
    assert not same(found, network().state_dict())
    if len(heard) < IN_SUM:
        assert not same(found, mean_of(digits, asked))
    assert {node for node, step in grid.steps if step is not None} == set(asked)
    for replies in grid.seen:
        for reply in replies:
            assert not reply.content.array_records, "weights left a client in the clear"
    assert private.rounds_done == 1 and not [*(keys / "states").glob("*-6.state")]


def test_nodes_whose_code_fails_are_in_the_sum_as_zeros(digits, keys):
    "They were dropouts: one bit a round of whoever the server chose, at any epsilon."
    found, grid, private = serve(digits, keys, broken=range(1000, 1003))
    asked = grid.order[:IN_SUM]
    assert same(found, mean_of(digits, [n for n in asked if n >= 1003]))
    masked = [node for node, step in grid.steps if step == MASKED + 1]
    assert sorted(masked) == sorted(asked), "nobody dropped out"
    every, *_ = serve(digits, keys, broken=range(1000, 1000 + CLIENTS))
    assert same(every, network().state_dict())


def test_too_few_leave_the_model_alone_and_the_run_goes_on(digits, keys, capsys):
    late = {place: MASKED for place in range(3)}
    found, grid, private = serve(digits, keys, gone=late)
    assert found == {} and private.rounds_done == 1
    assert "round 1 is skipped" in capsys.readouterr().out
    assert max(step for _, step in grid.steps if step is not None) == MASKED
    assert private.spent == WHERE.after(1).guarantee(private.mechanism).assuming("keys")
    early = {place: 0 for place in range(4)}
    found, grid, _ = serve(digits, keys, gone=early, rounds=2)
    assert "round 1 is skipped" in capsys.readouterr().out
    assert any(step == MASKED for _, step in grid.steps), "the second round was played"


def test_a_node_with_anothers_number_is_no_client(digits, keys, capsys):
    _, grid, private = serve(digits, keys, number=lambda node: 3)
    said = capsys.readouterr().out
    assert "client 3 is node " in said and "is skipped" in said
    assert list(private._sums.clients.values()) == [3]
    wrong = sums.Gatherer(keys, lambda letters: [], lambda text: None)
    letter = {1005: dict(client=5, proof=b"x" * 64)}
    wrong.ask = lambda letters: letter.items()
    wrong.handshake([1005], 7)
    assert wrong.clients == {}


def asked_of(grid, used, **change):
    "What a node says to one letter."
    fields = dict(mechanism=repr(used), round=0, rounds=12, clients=CLIENTS)
    fields |= dict(trains=["weight", "bias"], step=0, cohort=[*range(8)])
    fields |= dict(entries=7850, mail=b"") | change
    content = {"dpcomm": ConfigRecord(fields)}
    if change.get("step") == MASKED:
        content["arrays"] = first_model()
    letter = Letter(RecordDict(content), dst_node_id=1001, message_type="train")
    (reply,) = grid.send_and_receive([letter])
    return reply.error.reason if reply.has_error() else reply.content["dpcomm"]


def test_a_round_is_in_one_sum_whatever_cohorts_the_server_names(digits, keys):
    "One round under eight cohorts was eight sums, accounted as one."
    used = dpcomm.mechanism("ddgauss", **FAINT)
    grid = Summing(client_app(digits, [native.mod(used, floor=False, keys=keys)]))
    first, *others = [
        asked_of(grid, used, step=MASKED, cohort=[0, 1, *range(k, k + 6)])
        for k in range(2, 6)
    ]
    assert "or it skips one" in first  # it was noted all the same
    assert all("already answered" in said for said in others)


def test_the_owners_floor_holds_sums_by_the_signed_list(digits, keys, tmp_path):
    used = dpcomm.mechanism("ddgauss", **FAINT | dict(sigma=1.0))
    limits = dict(claims=tmp_path / "claims", mechanisms=["ddgauss"], clip=1.0, noise=0)
    limits |= dict(epsilon_round=50.0, epsilon_total=50.0, delta=1e-5, clients=30)
    limits = floor.Floor(**limits, rounds=12, models=[[[10, 784], [10]]])
    for change, said in (
        (dict(clients=31), "clients is 31 on this machine, and the run asks for 30"),
        (dict(tolerance=0.5), "tolerance is 0.5 on this machine"),
        ({}, "or it skips one"),
    ):
        mods = [native.mod(used, floor=replace(limits, **change), keys=keys)]
        grid = Summing(client_app(digits, mods))
        assert said in asked_of(grid, used, step=MASKED, clients=10**6)


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(step=True), "`$.step`"),
        (dict(cohort=[1, 2]), "divides its noise among 8 clients, and 2"),
        (dict(cohort=[*range(7), 99]), "client 99 is not in the directory"),
        (dict(cohort=[1] * 8), "signed 8 or more, distinct"),
        (dict(cohort=[*range(20, 28)]), "client 1 is not in the cohort"),
        (dict(step=MASKED, entries=7), "do not have the model's length"),
        (dict(mail=[1]), "`$.mail`"),
        (dict(step=2), "or it skips one"),
        (dict(step=-1, nonce=b"short"), "length >= 16 - at `$.nonce`"),
        (dict(step=-1), "or no nonce"),
    ],
)
def test_a_strange_server_gets_a_sentence_and_no_vector(change, said, digits, keys):
    used = dpcomm.mechanism("ddgauss", **FAINT)
    grid = Summing(client_app(digits, [native.mod(used, floor=False, keys=keys)]))
    assert said in asked_of(grid, used, **change)
