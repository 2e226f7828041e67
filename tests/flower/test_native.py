"""The mod and the wrapper inside Flower's own types: unchanged client code and strategies
over an in-process grid, budgets, floors, refusals, and Flower's protocol of an accountant.
"""

import importlib.util
import json
import random
from pathlib import Path

import pytest
import torch
from checkout import cells

import dpcomm
from dpcomm.core.random import seed_tree
from dpcomm.datasets import images
from dpcomm.interop import flower as native
from dpcomm.interop.flower_accountant import Accountant
from dpcomm.training.floor import Floor

pytestmark = [pytest.mark.flower, pytest.mark.deep]
HERE = importlib.util.find_spec("flwr") is not None
if HERE:
    from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
    from flwr.app import Message as Letter
    from flwr.clientapp import ClientApp
    from flwr.serverapp import strategy as strategies
    from flwr.serverapp.exception import PrivacyBudgetExhausted
    from flwr.supercore import privacy_accounting as theirs
    from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant
    from flwr.supercore.task_identity import TaskIdentity

CLIENTS, COHORT, ROUNDS = 240, 60, 30
WHERE = dict(
    n_clients=CLIENTS, cohort=COHORT, rounds=ROUNDS, delta=1e-3, sampling="fixed"
)


@pytest.fixture(autouse=True)
def identity(monkeypatch, request):
    """Who sends, as a ServerApp's process would know it. Cohorts, which Flower's strategies
    draw by `random`, are a test's own: clients refuse the same session a second time.
    """
    random.seed(request.node.name)
    if not HERE:
        pytest.skip("NOT CHECKED: flwr is not installed: pip install flwr==1.41.0")
    for name, value in dict(run_id=7, node_id=1, task_id=0).items():
        monkeypatch.setattr(TaskIdentity, f"_{name}", value, raising=False)


@pytest.fixture(scope="module")
def digits():
    data = images.load("digits")
    parts = images.iid(len(data.y), CLIENTS, seed_tree(0, "parts"))
    x, x_test = (v.flatten(1) for v in (data.x, data.x_test))
    return x, data.y, x_test, data.y_test, parts


def network():
    torch.manual_seed(0)
    return torch.nn.Linear(784, 10)


def client_app(digits, mods, broken=()):
    "What a Flower user writes: train on the data of this node, return the state."
    x, y, _, _, parts = digits
    app = ClientApp(mods=mods)

    @app.train()
    def train(message, context):
        model, mine = network(), torch.as_tensor(parts[context.node_id % CLIENTS])
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
            optimizer.step()
        if context.node_id in broken:
            model.weight.data[0, 0] = torch.nan
        metrics = MetricRecord({"num-examples": len(mine), "secret": 1.0})
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
        return Letter(RecordDict(content), reply_to=message)

    return app


class Grid:
    "Nodes in this process."

    def __init__(self, app, n=CLIENTS):
        self.app, self.n, self.seen = app, n, []

    def get_node_ids(self):
        return range(1000, 1000 + self.n)

    def send_and_receive(self, messages, timeout=None):
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            context = Context(7, node, {}, RecordDict(), {})
            if message.metadata.message_type == "train":
                replies.append(self.app(message, context))
        self.seen.append(replies)
        return replies


def accuracy(arrays, digits):
    model = network()
    model.load_state_dict(arrays.to_torch_state_dict())
    found = model(digits[2]).argmax(1) == digits[3]
    return found.double().mean().item()


def start(strategy, grid, rounds=ROUNDS):
    return strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=rounds)


def inner(kind, **how):
    how = dict(fraction_train=COHORT / CLIENTS, fraction_evaluate=0.0) | how
    return getattr(strategies, kind)(**how)


@pytest.mark.parametrize("kind", ["FedAvg", "FedAdam", "FedAvgM"])
def test_unchanged_client_code_learns_under_unchanged_strategies(kind, digits):
    "At least 80 % on digits at epsilon 8, delta 1e-3, for a client who is replaced."
    where = dpcomm.Deployment(**WHERE)
    used = where.calibrate("gaussian", eps=8.0, clip_norm=0.5, exact=False)
    how = dict(FedAdam=dict(eta=0.02), FedAvgM=dict(server_momentum=0.5)).get(kind, {})
    strategy = native.Private(inner(kind, **how), used, where, seed=0)
    assert strategy.promise.eps <= 8
    grid = Grid(client_app(digits, [native.mod(used)]))
    found = start(strategy, grid)
    assert accuracy(found.arrays, digits) >= 0.8
    assert strategy.spent.eps == strategy.promise.eps
    for reply in grid.seen[0]:
        assert not reply.content.array_records, "weights left a client in the clear"
        assert all(not metrics for metrics in reply.content.metric_records.values())


def test_one_bit_messages_are_what_travels(digits):
    used = dpcomm.mechanism("imvu", clip_norm=1.0, eps=1.0)
    where = dpcomm.Deployment(**WHERE | dict(trust="local"))
    strategy = native.Private(inner("FedAvg"), used, where)
    grid = Grid(client_app(digits, [native.mod(used, keep=("secret",))]))
    start(strategy, grid, rounds=1)
    for reply in grid.seen[0]:
        sent = reply.content["dpcomm"]["message"]
        assert 8 * len(sent) == used.bits(7850).payload + used.bits(7850).header
        assert dict(reply.content["metrics"]) == {"secret": 1.0}


def test_the_average_is_the_mean_of_clipped_updates_over_the_expected_cohort(digits):
    used = dpcomm.mechanism("gaussian", clip_norm=1e6, sigma=1e-12, exact=False)
    where = dpcomm.Deployment(**WHERE | dict(rounds=2))
    grid = Grid(client_app(digits, [native.mod(used)], broken=(1000, 1001, 1002)))
    plain = Grid(client_app(digits, []))
    private = native.Private(inner("FedAvg"), used, where, seed=0)
    private.strategy.configure_train = all_of(private.strategy)
    found = start(private, grid, rounds=1).arrays.to_torch_state_dict()
    told = [r.error.reason for r in grid.seen[0] if r.has_error()]
    assert told == [native.SILENT] * 3, (
        "what went wrong with the data stays on the node"
    )
    kept = [r for r in plain.send_and_receive(first_letters()) if ok(r)]
    moves = [r.content["arrays"].to_torch_state_dict() for r in kept]
    model = network().state_dict()
    for name, value in model.items():
        mean = sum(m[name] - value for m in moves) / COHORT
        assert torch.allclose(found[name], value + mean, atol=1e-5)


def first_letters():
    content = RecordDict({"arrays": ArrayRecord(network().state_dict())})
    made = dict(content=content, message_type="train")
    return [Letter(dst_node_id=1000 + i, **made) for i in range(COHORT)]


def all_of(strategy):
    return lambda *given: first_letters()


def ok(reply):
    return reply.metadata.src_node_id not in (1000, 1001, 1002)


def test_a_budget_ends_the_run_before_the_round_that_would_exceed_it(digits):
    where = dpcomm.Deployment(**WHERE)
    used = where.calibrate("gaussian", eps=8.0, clip_norm=0.5, exact=False)
    strategy = native.Private(inner("FedAvg"), used, where, max_epsilon=2.0, seed=0)
    grid = Grid(client_app(digits, [native.mod(used)]))
    with pytest.raises(PrivacyBudgetExhausted, match="above max_epsilon = 2"):
        start(strategy, grid)
    assert (
        strategy.spent.eps
        <= 2
        < where.after(strategy.rounds_done + 1).guarantee(used).eps
    )
    over = native.Private(inner("FedAvg"), used, where.after(1), seed=0)
    with pytest.raises(PrivacyBudgetExhausted, match="round 2 exceeds the 1 rounds"):
        start(over, grid, rounds=2)
    assert over.rounds_done == 1


def test_poisson_cohorts_are_drawn_by_a_coin_each_and_may_be_empty(digits):
    where = dpcomm.Deployment(**WHERE | dict(sampling="poisson", cohort=1, rounds=40))
    used = dpcomm.mechanism("gaussian", clip_norm=1.0, sigma=1.0, exact=False)
    strategy = native.Private(inner("FedAvg", fraction_train=1.0), used, where, seed=0)
    grid = Grid(client_app(digits, [native.mod(used)]))
    found = start(strategy, grid, rounds=40)
    sizes = [len(replies) for replies in grid.seen[::2]]
    assert 0 in sizes and len(set(sizes)) > 2 and sum(sizes) < 100
    assert strategy.rounds_done == 40 and found.arrays is not None


def test_a_cohort_that_was_not_accounted_for_is_not_asked(digits):
    used = dpcomm.mechanism("gaussian", clip_norm=1.0, sigma=1.0, exact=False)
    app = client_app(digits, [native.mod(used)])
    more = native.Private(
        inner("FedAvg", fraction_train=0.5), used, dpcomm.Deployment(**WHERE)
    )
    with pytest.raises(
        PrivacyBudgetExhausted, match="120 of 240 nodes would be selected"
    ):
        start(more, Grid(app))
    few = native.Private(
        inner("FedAvg", fraction_train=0.5), used, dpcomm.Deployment(**WHERE)
    )
    grid = Grid(app, n=120)
    with pytest.raises(PrivacyBudgetExhausted, match="60 of 120 nodes"):
        start(few, grid)
    assert grid.seen == []


def test_a_floor_holds_messages_and_a_node_answers_a_round_once(digits, tmp_path):
    used = dpcomm.mechanism("imvu", clip_norm=1.0, eps=1.0)
    where = dpcomm.Deployment(**WHERE | dict(trust="local", rounds=5))
    claims, shapes = str(tmp_path / "claims"), [[[10, 784], [10]]]
    limits = Floor(claims, ("imvu",), 1.0, 0.0, 60.0, 2.5, 1e-5, 2, 9, shapes)
    one = used.guarantee(1, 1e-5, sampling="none", d=7850).eps
    grid = Grid(client_app(digits, [native.mod(used, floor=limits)]))
    strategy = native.Private(inner("FedAvg"), used, where)
    letters = strategy.configure_train(
        1, ArrayRecord(network().state_dict()), ConfigRecord(), grid
    )
    first, again = (grid.send_and_receive(letters[:1])[0] for _ in range(2))
    assert not first.has_error() and again.has_error()
    assert "already answered" in again.error.reason
    narrow = Floor(claims, ("imvu",), 1.0, 0.0, one / 2, 60.0, 1e-5, 2, 9, shapes)
    refusing = Grid(client_app(digits, [native.mod(used, floor=narrow)]))
    (reply,) = refusing.send_and_receive(letters[1:2])
    assert reply.has_error() and "epsilon_round" in reply.error.reason


def test_a_strange_server_or_client_is_answered_by_a_sentence(digits):
    used = dpcomm.mechanism("imvu", clip_norm=1.0, eps=1.0)
    grid = Grid(client_app(digits, [native.mod(used)]))
    (reply,) = grid.send_and_receive(first_letters()[:1])
    assert "wrap it in dpcomm.flower.Private" in reply.error.reason
    where = dpcomm.Deployment(**WHERE | dict(trust="local"))
    other = dpcomm.mechanism("imvu", clip_norm=2.0, eps=1.0)
    strategy = native.Private(inner("FedAvg"), other, where)
    arrays = ArrayRecord(network().state_dict())
    letters = strategy.configure_train(1, arrays, ConfigRecord(), grid)
    (reply,) = grid.send_and_receive(letters[:1])
    assert "use the same mechanism on both sides" in reply.error.reason
    letters[1].content["dpcomm"] = ConfigRecord({"mechanism": repr(used), "round": 0.5})
    (odd,) = grid.send_and_receive(letters[1:2])
    assert "the server sent round = 0.5" in odd.error.reason
    letters = strategy.configure_train(1, arrays, ConfigRecord(), grid)
    damaged = Letter(
        RecordDict({"dpcomm": ConfigRecord({"message": b"x"})}), reply_to=letters[0]
    )
    strange = Letter(
        RecordDict(
            {
                "dpcomm": ConfigRecord({"message": 3.0}),
                "metrics": MetricRecord({"loss": [1.0, 2.0]}),
            }
        ),
        reply_to=letters[2],
    )
    after, _ = strategy.aggregate_train(1, [reply, damaged, strange])
    state = network().state_dict()
    for name, value in after.to_torch_state_dict().items():
        assert torch.equal(value, state[name]), (
            "nobody was heard, and imvu adds no noise"
        )


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: native.mod("gaussian"), "must be a mechanism"),
        (lambda: native.mod(dpcomm.mechanism("sqsgd")), "turn its residuals off"),
        (lambda: private("FedMedian"), "reads individual updates"),
        (lambda: private("Krum"), "reads individual updates"),
        (
            lambda: private("FedAvg", sampling="replacement"),
            "Flower selects a node at most once",
        ),
        (lambda: private("FedAvg", max_epsilon=-1.0), "max_epsilon"),
    ],
)
def test_refusals_say_what_to_do(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def private(kind, max_epsilon=None, **change):
    used = dpcomm.mechanism("gaussian", clip_norm=1.0, sigma=1.0)
    return native.Private(
        inner(kind), used, dpcomm.Deployment(**WHERE | change), max_epsilon
    )


def test_flowers_own_noise_is_not_added_twice():
    outer = strategies.DifferentialPrivacyServerSideFixedClipping
    theirs_ = outer(
        inner("FedAvg"), noise_multiplier=1.0, clipping_norm=1.0, num_sampled_clients=9
    )
    used = dpcomm.mechanism("gaussian", clip_norm=1.0, sigma=1.0)
    with pytest.raises(ValueError, match="already clips and adds noise"):
        native.Private(theirs_, used, dpcomm.Deployment(**WHERE))


# ---- the accountant


def config(sampling, relation, **how):
    return theirs.PrivacyConfig(1e-6, 5000, relation, sampling, **how)


@pytest.mark.parametrize("name", ["NO_AMPLIFICATION", "POISSON", "WITHOUT_REPLACEMENT"])
def test_the_accountant_is_never_above_flowers_own_and_never_below_the_truth(name):
    """The truth's lower end is that of the bracket. Flower's accountant counts noise in
    units of what a neighbour moves; a client who is replaced moves two clips.
    """
    pytest.importorskip("dp_accounting", reason="flwr[dp] is not installed")
    sampling = theirs.SamplingMethod[name]
    relation = theirs.NeighboringRelation.ADD_OR_REMOVE_ONE
    moves_twice = name == "WITHOUT_REPLACEMENT"
    if moves_twice:
        relation = theirs.NeighboringRelation.REPLACE_ONE
    event = theirs.GaussianPrivacyEvent(1.5, 50, 5000)
    ours, flowers = (
        kind(config(sampling, relation)) for kind in (Accountant, RdpAccountant)
    )
    for accountant, unit in ((ours, 1), (flowers, 2 if moves_twice else 1)):
        for z, size, count in ((1.5, 50, 60), (2.0, 40, 20)):
            accountant.compose(theirs.GaussianPrivacyEvent(z / unit, size, 5000), count)
    assert ours.num_releases == flowers.num_releases == 80
    mine, others = (a.get_epsilon(1e-6) for a in (ours, flowers))
    low = ours._bracket(ours._events, 1e-6).low
    assert low <= mine <= others * (1 + 1e-9)
    assert ours.get_privacy_spent().epsilon == mine
    delta = ours.get_delta(mine)
    assert 1e-6 * (1 - 1e-9) <= delta <= 1e-6 * 1.02
    again = Accountant(ours.config)
    again.load_state_dict(json.loads(json.dumps(ours.state_dict())))
    assert again.get_epsilon(1e-6) == mine
    assert ours.would_exceed(event, max_epsilon=mine) and not ours.would_exceed(
        event, 2 * mine
    )
    other = Accountant(config(sampling, relation, max_epsilon=3.0))
    with pytest.raises(ValueError, match="match this accountant's"):
        other.load_state_dict(ours.state_dict())
    with pytest.raises(ValueError, match="use the same population in both"):
        ours.compose(theirs.GaussianPrivacyEvent(1.5, 50, 4999))
    with pytest.raises(ValueError, match="set a budget"):
        ours.would_exceed(event)


def test_flowers_private_strategy_stops_at_our_budget(digits):
    settings = (
        theirs.SamplingMethod.NO_AMPLIFICATION,
        theirs.NeighboringRelation.ADD_OR_REMOVE_ONE,
    )
    accountant = Accountant(config(*settings, max_epsilon=6.0))
    outer = strategies.DifferentialPrivacyServerSideFixedClipping
    strategy = outer(
        inner("FedAvg"),
        noise_multiplier=2.0,
        clipping_norm=1.0,
        num_sampled_clients=COHORT,
        accountant=accountant,
    )
    plain = client_app(digits, [even])
    with pytest.raises(PrivacyBudgetExhausted, match="would exceed max_epsilon"):
        start(strategy, Grid(plain))
    assert 0 < accountant.get_epsilon(1e-6) <= 6 and accountant.num_releases >= 1


def even(message, context, call_next):
    "Flower's accounting asks for equal weights."
    reply = call_next(message, context)
    reply.content["metrics"] = MetricRecord({"num-examples": 1})
    return reply


def test_the_guide_is_run_whole():
    "The page in the order of its cells, and then one round of what it made."
    page = {}
    for cell in cells(Path("nbs/use/flower.ipynb")):
        if cell.kind == "code":
            exec(cell.source, page)
    where, strategy = page["where"], page["strategy"]
    assert isinstance(strategy, native.Private) and strategy.spent is None

    @page["app"].train()
    def fit(message, context):
        content = {"arrays": message.content["arrays"]}
        content["metrics"] = MetricRecord({"num-examples": 1})
        return Letter(RecordDict(content), reply_to=message)

    grid = Grid(page["app"], where.n_clients)
    model = ArrayRecord({"w": torch.zeros(1_000)})
    letters = [*strategy.configure_train(1, model, ConfigRecord(), grid)]
    arrays, _ = strategy.aggregate_train(1, grid.send_and_receive(letters))
    noise = arrays["w"].numpy().std() * where.cohort / page["mechanism"].sigma
    assert len(letters) == 50 and 0.8 < noise < 1.25  # nine standard deviations
    assert 0 < strategy.spent.eps < where.guarantee(page["mechanism"]).eps <= 4
