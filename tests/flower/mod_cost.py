"""What the mod adds to a client's round: `python tests/flower/mod_cost.py` measures it, on an
environment with Flower, and writes the record that the page "In Flower" shows.

A client trains LeNet-5 for one epoch on 600 images of random pixels in batches of 20. Its app
answers a letter with and without the mod by turns; CPU time of the process, medians. What the
mechanism's own encoding takes is measured beside it, for it is no cost of the mod.
"""

import json
import statistics
import time
from pathlib import Path

import flwr
import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.app import Message as Letter
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

import dpcomm
from dpcomm.core.random import seed_tree
from dpcomm.interop import flower
from dpcomm.training import models

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "dpcomm" / "assets" / "flower" / "cost.jsonl"
TURNS = 15
D = 61_706
USED = {
    "gaussian": dict(clip_norm=1.0, sigma=1.0),
    "rec": dict(clip_norm=1.0, std=1.0, index_bits=7),
    "imvu": dict(clip_norm=1.0, eps=3.0),
    "signsgd": dict(clip_norm=1.0, sigma=1.0),
    "sqsgd": dict(bound=0.01, residuals=False),
}


def network():
    return models.build("lenet5", seed_tree(0, "net"))


def app_of(x, y, mods):
    app = ClientApp(mods=mods)

    @app.train()
    def train(message, context):
        net = network()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for i in range(0, len(x), 20):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(x[i : i + 20]), y[i : i + 20])
            loss.backward()
            optimizer.step()
        content = {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"num-examples": len(x)}),
        }
        return Letter(RecordDict(content), reply_to=message)

    return app


class OneNode:
    "A grid that keeps the letter it is given."

    def get_node_ids(self):
        return [1]


def letter(mechanism, where):
    "What the server sends, with or without the private strategy around FedAvg."
    plain = FedAvg(fraction_train=1.0, min_train_nodes=1, min_available_nodes=1)
    strategy = flower.Private(plain, mechanism, where) if mechanism else plain
    arrays = ArrayRecord(network().state_dict())

    (made,) = strategy.configure_train(1, arrays, ConfigRecord(), OneNode())
    return made


def seconds(app, message):
    start = time.process_time()
    reply = app(message, Context(7, 1, {}, RecordDict(), {}))
    assert not reply.has_error(), reply.error
    return time.process_time() - start


def encoding(mechanism, u):
    start = time.process_time()
    mechanism.encode(u)
    return time.process_time() - start


def measured(name, parameters):
    "One line of the record."
    generator = np.random.default_rng(0)
    x = torch.from_numpy(generator.random((600, 1, 28, 28), dtype=np.float32))
    y = torch.from_numpy(generator.integers(0, 10, 600))
    used = dpcomm.mechanism(name, **parameters)
    local = name not in ("gaussian",)
    where = dpcomm.Deployment(
        1,
        1,
        rounds=10**6,
        delta=1e-3,
        trust="local" if local else "central",
        sampling="none",
    )
    pairs = [
        (app_of(x, y, [flower.mod(used)]), letter(used, where)),
        (app_of(x, y, []), letter(None, where)),
    ]
    u = torch.from_numpy(generator.normal(0, 1e-3, D).astype(np.float32))
    times = [
        [*(seconds(*pair) for pair in pairs), encoding(used, u)] for _ in range(TURNS)
    ]
    with_mod, without, encode = (statistics.median(column) for column in zip(*times))

    return dict(
        mechanism=name,
        parameters=" ".join(f"{k}={v}" for k, v in parameters.items()),
        weights=D,
        turns=TURNS,
        seconds=round(without, 4),
        encode=round(encode / without, 3),
        mod=round((with_mod - encode) / without - 1, 3),
        flwr=flwr.__version__,
        torch=torch.__version__,
        threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    for name, value in dict(run_id=7, node_id=1, task_id=0).items():
        setattr(TaskIdentity, f"_{name}", value)
    torch.set_num_threads(1)
    lines = [json.dumps(measured(name, how)) for name, how in USED.items()]
    RECORD.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(RECORD.read_text(encoding="utf-8"))
