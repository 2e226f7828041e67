"Secure sums through the two lines: a cohort a round, dropouts, and what is refused."

import re

import pytest
import torch
from test_native import HERE, Grid, client_app, digits, identity, inner, network

import dpcomm
from dpcomm.interop import flower as native
from dpcomm.interop import sums
from dpcomm.secagg.errors import MASKED, ROUNDS

pytestmark = [pytest.mark.flower, pytest.mark.deep]
if HERE:
    from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
    from flwr.app import Message as Letter
    from flwr.serverapp.exception import PrivacyBudgetExhausted
_ = digits, identity  # fixtures

CLIENTS, IN_SUM = 30, 8
FAINT = dict(clip_norm=0.5, sigma=1e-3, n_clients=IN_SUM, tolerance=0.25)
WHERE = dict(n_clients=CLIENTS, cohort=IN_SUM, rounds=12, delta=1e-3, d=7850)
WHERE |= dict(trust="secagg", sampling="fixed", tolerance=0.25)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return sums.generate_keys(
        tmp_path_factory.mktemp("keys") / "all", CLIENTS, least=IN_SUM
    )


class Summing(Grid):
    """Nodes that know which client they are.

    gone: place among those asked first -> step from which it takes part in no run.
    """

    def __init__(self, app, gone=None, number=lambda node: node - 1000):
        super().__init__(app, CLIENTS)
        self.gone, self.number, self.order, self.steps = gone or {}, number, [], []

    def send_and_receive(self, messages, timeout=None):
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            step = message.content.config_records.get("dpcomm", {}).get("step")
            if node not in self.order:
                self.order.append(node)
            self.steps.append((node, step))
            late = self.gone.get(self.order.index(node), 99)
            own = {"partition-id": self.number(node)}
            context = Context(7, node, own, RecordDict(), {})
            if step is None or step < late:
                replies.append(self.app(message, context))
        self.seen.append(replies)
        return replies


def serve(digits, keys, rounds=1, broken=(), mechanism=FAINT, **more):
    "The model after a run, its transport and its strategy."
    used = dpcomm.mechanism("ddgauss", **mechanism)
    where = dpcomm.Deployment(**WHERE)
    strategy = inner("FedAvg", fraction_train=IN_SUM / CLIENTS)
    private = native.Private(strategy, used, where, seed=0, keys=keys)
    mods = [native.mod(used, keys=keys)]
    grid = Summing(client_app(digits, mods, broken), **more)
    first = ArrayRecord(network().state_dict())
    found = private.start(grid, first, num_rounds=rounds).arrays
    return found.to_torch_state_dict(), grid, private


def mean_of(digits, nodes):
    "The model after the sum of some nodes' clipped updates, over the cohort."
    model, app = network().state_dict(), client_app(digits, [])
    found = {k: v.clone() for k, v in model.items()}
    for node in nodes:
        content = RecordDict({"arrays": ArrayRecord(model)})
        letter = Letter(content, dst_node_id=node, message_type="train")
        reply = app(letter, Context(7, node, {}, RecordDict(), {}))
        after = reply.content["arrays"].to_torch_state_dict()
        moves = {k: after[k] - v for k, v in model.items()}
        norm = float(torch.cat([m.flatten() for m in moves.values()]).norm())
        for k, move in moves.items():
            found[k] += min(1.0, FAINT["clip_norm"] / norm) * move / IN_SUM
    return found


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


def test_nodes_whose_code_fails_are_dropouts(digits, keys, capsys):
    found, grid, _ = serve(digits, keys, broken=range(1000, 1000 + CLIENTS))
    assert found == {} and "0 clients are left" in capsys.readouterr().out


def test_too_few_leave_the_model_alone_and_the_run_goes_on(digits, keys, capsys):
    late = {place: MASKED for place in range(3)}
    found, grid, private = serve(digits, keys, gone=late)
    assert found == {} and private.rounds_done == 1
    assert "round 1 is skipped" in capsys.readouterr().out
    assert max(step for _, step in grid.steps if step is not None) == MASKED
    assert (
        private.spent.eps
        == dpcomm.Deployment(**WHERE).after(1).guarantee(private.mechanism).eps
    )
    early = {place: 0 for place in range(4)}
    found, grid, _ = serve(digits, keys, gone=early, rounds=2)
    assert "round 1 is skipped" in capsys.readouterr().out
    assert any(step == MASKED for _, step in grid.steps), "the second round was played"


def test_the_strategys_rounds_learn_through_sums(digits, keys):
    noise = FAINT | dict(sigma=0.2)
    found, _, private = serve(digits, keys, rounds=12, mechanism=noise)
    model = network()
    model.load_state_dict(found)
    right = (model(digits[2]).argmax(1) == digits[3]).double().mean()
    assert right > 0.4, "chance is 0.1"
    assert (
        private.promise.trust == "secagg" and private.spent.eps == private.promise.eps
    )


def test_a_node_with_anothers_number_is_no_client(digits, keys, capsys):
    _, grid, private = serve(digits, keys, number=lambda node: 3)
    said = capsys.readouterr().out
    assert "client 3 is node " in said and "is skipped" in said
    assert list(private._sums.clients.values()) == [3]
    wrong = sums.Gatherer(keys, lambda letters: [], said_nothing)
    letter = {1005: dict(client=5, proof=b"x" * 64)}
    wrong.ask = lambda letters: letter.items()
    wrong.handshake([1005], 7)
    assert wrong.clients == {}


def said_nothing(text):
    "Where no sentence is needed."


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(step=9), "step = 9, which is not a step"),
        (dict(step=True), "step = True, which is not a step"),
        (dict(cohort=[1, 2]), "divides its noise among 8 clients, and 2"),
        (dict(cohort=[*range(7), 99]), "client 99 is not in the directory"),
        (dict(cohort=[1] * 8), "distinct clients"),
        (dict(cohort=[*range(9)]), "divides its noise among 8 clients, and 9"),
        (dict(cohort=[*range(20, 28)]), "client 1 is not in the cohort"),
        (dict(cohort=["1"]), "cohort = "),
        (dict(entries=0), "entries = 0"),
        (dict(mail=[1]), "mail = "),
        (dict(step=2), "comes too early"),
        (dict(step=-1, nonce=b"short"), "nonce does not have 16 bytes"),
    ],
)
def test_a_strange_server_gets_a_sentence_and_no_vector(change, said, digits, keys):
    used = dpcomm.mechanism("ddgauss", **FAINT)
    grid = Summing(client_app(digits, [native.mod(used, keys=keys)]))
    fields = dict(mechanism=repr(used), round=0, rounds=12, clients=CLIENTS)
    fields |= dict(step=0, cohort=[*range(8)], entries=7850, mail=b"") | change
    content = RecordDict({"dpcomm": ConfigRecord(fields)})
    letter = Letter(content, dst_node_id=1001, message_type="train")
    (reply,) = grid.send_and_receive([letter])
    assert reply.has_error() and re.search(said, reply.error.reason), reply.error.reason


def test_what_does_not_fit_is_refused_before_the_first_round(digits, keys, tmp_path):
    used, where = dpcomm.mechanism("ddgauss", **FAINT), dpcomm.Deployment(**WHERE)
    with pytest.raises(ValueError, match="needs a secure sum: pass keys"):
        native.Private(inner("FedAvg"), used, where)
    with pytest.raises(ValueError, match="the keys of server are missing"):
        native.Private(inner("FedAvg"), used, where, keys=tmp_path)
    varying = dpcomm.Deployment(**WHERE | dict(sampling="poisson"))
    with pytest.raises(ValueError, match="whose cohorts vary"):
        native.Private(inner("FedAvg"), used, varying, keys=keys)
    grid = Summing(client_app(digits, [native.mod(used, keys=keys)]))
    other = dpcomm.Deployment(**WHERE | dict(d=7000))
    strategy = inner("FedAvg", fraction_train=IN_SUM / CLIENTS)
    private = native.Private(strategy, used, other, keys=keys)
    with pytest.raises(
        PrivacyBudgetExhausted, match="has 7850 trainable entries.* d = 7000"
    ):
        private.start(grid, ArrayRecord(network().state_dict()), num_rounds=1)
    assert grid.steps == []
    nobody = Summing(client_app(digits, [native.mod(used, keys=keys)]), number=str)
    fields = dict(mechanism=repr(used), round=0, rounds=12, clients=9, step=-1)
    letter = Letter(
        RecordDict({"dpcomm": ConfigRecord(fields)}),
        dst_node_id=1001,
        message_type="train",
    )
    (reply,) = nobody.send_and_receive([letter])
    assert "has no client number" in reply.error.reason
    keyless = Summing(client_app(digits, [native.mod(used)]))
    (reply,) = keyless.send_and_receive([letter])
    assert "needs a secure sum: pass keys" in reply.error.reason
