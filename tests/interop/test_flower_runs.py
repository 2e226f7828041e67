"Runs of the two lines in Flower's own types: client code and strategies as they are."

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkout import cells
from flower_nodes import (
    CLIENTS,
    COHORT,
    Grid,
    client_app,
    digits,
    first_model,
    identity,
    inner,
    network,
    start,
)
from flwr.app import ArrayRecord, ConfigRecord, Error, MetricRecord, RecordDict
from flwr.app import Message as Letter
from flwr.clientapp import ClientApp
from flwr.serverapp.exception import PrivacyBudgetExhausted

import dpcomm
from dpcomm.interop import flower as native

pytestmark = pytest.mark.flower
_ = digits, identity  # fixtures

ROUNDS = 30
WHERE = dpcomm.Deployment(
    n_clients=CLIENTS, cohort=COHORT, rounds=ROUNDS, delta=1e-3, sampling="fixed"
)
FAINT = dict(clip_norm=1e6, sigma=1e-12, exact=False)


def faint():
    return dpcomm.mechanism("gaussian", **FAINT)


def rehearsal(mechanism, **how):
    return [native.mod(mechanism, floor=False, **how)]


def test_the_average_is_the_mean_of_updates_over_the_expected_cohort(digits):
    "Broken clients count as zero, and absent ones too."
    broken = range(1000, 1020)
    grid = Grid(client_app(digits, rehearsal(faint()), broken))
    private = native.Private(inner("FedAvg"), faint(), WHERE, seed=0)
    found = start(private, grid, 1).arrays.to_torch_state_dict()
    assert not any(reply.has_error() for reply in grid.seen[0])
    asked = [reply.metadata.src_node_id for reply in grid.seen[0]]
    replies = Grid(client_app(digits, [])).send_and_receive(first_letters(asked))
    kept = [r for r in replies if r.metadata.src_node_id not in broken]
    assert len({*asked}) == COHORT > len(kept)
    moves = [r.content["arrays"].to_torch_state_dict() for r in kept]
    for name, value in network().state_dict().items():
        mean = sum(m[name] - value for m in moves) / COHORT
        assert torch.allclose(found[name], value + mean, atol=1e-5)


def first_letters(nodes):
    made = dict(content=RecordDict({"arrays": first_model()}), message_type="train")
    return [Letter(dst_node_id=node, **made) for node in nodes]


@pytest.mark.parametrize("statistics", ["refuse", "client"])
def test_running_averages_are_refused_or_stay_on_their_client(statistics):
    "They were noised, negative, and every output nan."
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    model.register_buffer("places", torch.arange(6))
    model.register_buffer("mask", torch.tensor([True, False]))
    where = dpcomm.Deployment(4, 4, 2, 1e-3, sampling="none")
    private = native.Private(inner("FedAvg"), faint(), where, statistics=statistics)
    seen = []
    app = made_app(rehearsal(faint()), model, seen)
    if statistics == "refuse":
        with pytest.raises(ValueError, match="0.running_mean: .*use GroupNorm"):
            private.start(Grid(app, 4), first_model(model), num_rounds=2)
        return
    result = private.start(Grid(app, 4), first_model(model), num_rounds=2)
    state, before = result.arrays.to_torch_state_dict(), model.state_dict()
    for name in set(before) - {"0.weight", "0.bias", "1.weight", "1.bias"}:
        assert state[name].dtype == before[name].dtype, name  # also whole numbers
        assert torch.equal(state[name], before[name]), name
    assert not torch.equal(state["1.weight"], model.state_dict()["1.weight"])
    first, second = seen[:4], seen[4:]
    assert all((mean == 0).all() for mean, _ in first)
    by_node = {float(mean[0]) for mean, _ in second}
    assert len(by_node) == 4, "each node found its own"


def made_app(mods, model, seen):
    "An app that notes the running mean it was sent, and trains on numbers of its own."
    app = ClientApp(mods=mods)

    @app.train()
    def train(message, context):
        mine = deepcopy(model)
        mine.load_state_dict(message.content["arrays"].to_torch_state_dict())
        seen.append((mine[0].running_mean.clone(), context.node_id))
        mine(torch.randn(8, 3) + context.node_id - 1000).square().sum().backward()
        torch.optim.SGD(mine.parameters(), lr=0.01).step()
        return Letter(RecordDict({"arrays": first_model(mine)}), reply_to=message)

    return app


# ---- budgets, rounds, cohorts


def test_a_budget_ends_the_run_with_its_model(digits):
    "It ended it with an exception, and the model was gone."
    used = WHERE.calibrate("gaussian", eps=8.0, clip_norm=0.5, exact=False)
    private = native.Private(inner("FedAvg"), used, WHERE, max_epsilon=2.0)
    grid = Grid(client_app(digits, rehearsal(used)))
    result = start(private, grid, ROUNDS)
    played = private.rounds_done
    assert 0 < played < ROUNDS and len(grid.seen) == 2 * played
    assert private.spent.eps <= 2 < WHERE.after(played + 1).guarantee(used).eps
    model = private.model(network()).state_dict()
    for name, value in result.arrays.to_torch_state_dict().items():
        assert torch.equal(value, model[name])
    with pytest.raises(PrivacyBudgetExhausted, match="above max_epsilon = 2"):
        start(private, grid, 1)


def test_a_second_start_counts_on(digits):
    "Three starts of five rounds were stated as five."
    used = dpcomm.mechanism("gaussian", clip_norm=0.5, sigma=1.0, exact=False)
    private = native.Private(inner("FedAvg"), used, replace(WHERE, rounds=5))
    grid = Grid(client_app(digits, rehearsal(used)))
    start(private, grid, 3)
    assert private.spent == WHERE.after(3).guarantee(used)
    start(private, grid, 3)
    assert private.rounds_done == 5
    assert private.spent == WHERE.after(5).guarantee(used)
    answered = [r for replies in grid.seen for r in replies if not r.has_error()]
    why = "rounds of the second start are new to the nodes"
    assert len(answered) == 5 * COHORT, why


def test_a_seed_is_a_premise():
    used = dpcomm.mechanism("gaussian", clip_norm=0.5, sigma=1.0)
    assert not native.Private(inner("FedAvg"), used, WHERE).promise.premises
    private = native.Private(inner("FedAvg"), used, WHERE, seed=0)
    private.rounds_done = 1
    for made in (private.promise, private.spent):
        assert str(made).startswith("As if nobody could guess the key (premise keys)")


def test_poisson_cohorts_are_drawn_by_a_coin_each_and_may_be_empty(digits):
    where = replace(WHERE, sampling="poisson", cohort=1, rounds=40)
    used = dpcomm.mechanism("gaussian", clip_norm=1.0, sigma=1.0, exact=False)
    private = native.Private(inner("FedAvg"), used, where, seed=0)
    grid = Grid(client_app(digits, rehearsal(used)))
    result = start(private, grid, 40)
    sizes = [len(replies) for replies in grid.seen[::2]]
    assert 0 in sizes and len(set(sizes)) > 2 and sum(sizes) < 100
    assert private.rounds_done == 40 and result.arrays is not None


def test_a_node_that_leaves_makes_a_smaller_round(digits):
    "The cohort is one of all 240; of those, 60 are gone: a draw of 60 meets 15 of them."
    used = dpcomm.mechanism("gaussian", clip_norm=1.0, sigma=1.0, exact=False)
    grid = Grid(client_app(digits, rehearsal(used)), n=CLIENTS - 60)
    private = native.Private(inner("FedAvg"), used, replace(WHERE, rounds=40), seed=0)
    letters = [
        private.configure_train(1, first_model(), ConfigRecord(), grid)
        for _ in range(40)
    ]
    sizes = [len(sent) for sent in letters]
    assert private.rounds_done == 40 and max(sizes) <= COHORT
    # mean 45, standard deviation 2.9 a round: seven of them over 40 rounds
    assert abs(sum(sizes) / 40 - 45) < 3.3 and len({*sizes}) > 3
    asked = {letter.metadata.dst_node_id for sent in letters for letter in sent}
    assert len(asked) > 170


def test_a_cohort_that_was_not_accounted_for_is_not_asked(digits):
    used = dpcomm.mechanism("gaussian", clip_norm=1.0, sigma=1.0, exact=False)
    grid = Grid(client_app(digits, rehearsal(used)))
    all_asked = native.Private(inner("FedAvg"), used, WHERE)
    letters = all_asked.configure_train(1, first_model(), ConfigRecord(), grid)
    assert len({letter.metadata.dst_node_id for letter in letters}) == COHORT
    for fraction in (0.1, COHORT / CLIENTS, 0.5):  # who is asked is not the strategy's
        few = native.Private(inner("FedAvg", fraction_train=fraction), used, WHERE)
        with pytest.raises(PrivacyBudgetExhausted, match="of 240 nodes: set"):
            start(few, grid, 1)
    with pytest.raises(ValueError, match="visits is 20, which nothing here counts"):
        native.Private(inner("FedAvg"), used, replace(WHERE, visits=20))
    wrong = native.Private(inner("FedAvg"), used, replace(WHERE, d=7000))
    with pytest.raises(PrivacyBudgetExhausted, match="7850 trainable entries.* d = 70"):
        start(wrong, grid, 1)
    assert grid.seen == []


# ---- what nodes send


def test_what_nodes_send_is_bounded_and_cleaned(digits, capsys):
    "Forged lines, escape codes, a megabyte, nan in an average, thousands of names."
    used = dpcomm.mechanism("imvu", clip_norm=1.0, eps=1.0)
    private = native.Private(inner("FedAvg"), used, replace(WHERE, trust="local"))
    letters = private.configure_train(1, first_model(), ConfigRecord(), Grid(None))
    good = client_app(digits, rehearsal(used, keep=("secret",)))
    loud = "round 1: 2 of 2 messages\n\x1b[31m" + "x" * 10**6
    replies = [Letter(Error(1, loud), reply_to=letters[0])]
    for fields in ({"message": b"x"}, {"message": 3.0}, {}):
        content = RecordDict({"dpcomm": ConfigRecord(fields)})
        replies.append(Letter(content, reply_to=letters[1]))
    (honest,) = Grid(good).send_and_receive(letters[2:3])
    odd = {"secret": float("nan"), "bad": float("inf"), "many": [1.0, 2.0]}
    odd |= {"\x1b[31mred": 1.0, "round 1\u2028fine": 1.0}
    odd |= {f"name {k}": 1.0 for k in range(4000)} | {"y" * 10**5: 1.0}
    (liar,) = Grid(good).send_and_receive(letters[3:4])
    liar.content["metrics"] = MetricRecord(odd)
    arrays, metrics = private.aggregate_train(1, [*replies, honest, liar])
    assert arrays is not None and metrics["secret"] == 1.0 and len(metrics) <= 101
    assert not {"bad", "many"} & {*metrics} and all(map(str.isprintable, metrics))
    plain = [{"loss": value, "num-examples": 2, "parts": [0.5]} for value in (1.0, 3.0)]
    lies = ({"loss": float("nan")}, {"\x1b[31mred": 1.0}, {"y" * 10**5: 1.0}, odd)
    for metric in (*plain, *({**plain[0], **lie} for lie in lies)):
        content = RecordDict({"metrics": MetricRecord(metric)})
        replies.append(Letter(content, reply_to=letters[4]))
    scores = private.aggregate_evaluate(1, [replies[0], *replies[-6:]])
    assert dict(scores) == {"loss": 2.0, "parts": [0.5]}
    said = capsys.readouterr().out
    assert "\x1b" not in said and len(said) < 3000
    assert not any(line.startswith("round 1: 2") for line in said.splitlines())


def test_the_guide_is_run_whole():
    "The page in the order of its cells, and then one round of what it made."
    page = {}
    for cell in cells(Path("nbs/use/flower.ipynb")):
        if cell.kind == "code":
            exec(cell.source, page)
    where, strategy = page["where"], page["strategy"]
    assert isinstance(strategy, native.Private) and strategy.spent is None
    page["app"].train()(lambda message, context: 1 / 0)
    model = ArrayRecord({"w": torch.zeros(1_000)})
    grid = Grid(page["app"], where.n_clients)
    letters = [*strategy.configure_train(1, model, ConfigRecord(), grid)]
    replies = grid.send_and_receive(letters)
    assert all("no file of limits" in reply.error.reason for reply in replies)
    arrays, _ = strategy.aggregate_train(1, replies)
    noise = arrays["w"].numpy().std() * where.cohort / page["mechanism"].sigma
    assert len(letters) == 50 and 0.8 < noise < 1.25  # nine standard deviations
    assert 0 < strategy.spent.eps < where.guarantee(page["mechanism"]).eps <= 4
