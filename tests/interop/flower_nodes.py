"A Flower user's app on scikit-learn's digits, and nodes in this process to run it on."

import random

import pytest
import torch
from flwr.app import ArrayRecord, Context, MetricRecord, RecordDict
from flwr.app import Message as Letter
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as strategies
from flwr.supercore.task_identity import TaskIdentity

from dpcomm.core.random import seed_tree
from dpcomm.datasets import images

CLIENTS, COHORT = 240, 60


@pytest.fixture(autouse=True)
def identity(monkeypatch, request):
    """Who sends, as a ServerApp's process would know it. Cohorts, which Flower's strategies
    draw by `random`, are a test's own: clients refuse the same session a second time.
    """
    random.seed(request.node.name)
    for name, value in dict(run_id=7, node_id=1, task_id=0).items():
        monkeypatch.setattr(TaskIdentity, f"_{name}", value, raising=False)


@pytest.fixture(scope="session")
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
    "Nodes in this process, each with its settings and with a state that Flower would keep."

    def __init__(self, app, n=CLIENTS, settings=lambda node: {}, config=None):
        self.app, self.n, self.seen, self.states = app, n, [], {}
        self.settings, self.config = settings, config or {}

    def get_node_ids(self):
        return range(1000, 1000 + self.n)

    def one(self, message):
        node = message.metadata.dst_node_id
        state = self.states.setdefault(node, RecordDict())
        context = Context(7, node, self.settings(node), state, self.config)
        return self.app(message, context)

    def send_and_receive(self, messages, timeout=None):
        replies = [self.one(m) for m in messages if m.metadata.message_type == "train"]
        self.seen.append(replies)
        return replies


def first_model(model=None):
    return ArrayRecord((model or network()).state_dict())


def start(strategy, grid, rounds):
    return strategy.start(grid, first_model(), num_rounds=rounds)


def inner(kind, **how):
    return getattr(strategies, kind)(**dict(fraction_evaluate=0.0) | how)
