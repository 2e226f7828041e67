"""What each contestant of rounds.py runs, in a process of its own and in its own Python:
the same work, and two calls between which its clocks run.
"""

import copy
import functools
import json
import os
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import torch


def cpu_below():
    "CPU seconds of every process that this one has started, and they."
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(t.user + t.system for t in times)


def flat(parameters):
    return torch.cat([p.detach().flatten() for p in parameters])


class Turns:
    "The work that a contestant reads, and its clocks."

    def __init__(self):
        self.folder = Path(os.environ["BENCH_FOLDER"])
        self.device = torch.device(os.environ["BENCH_DEVICE"])
        work = np.load(self.folder / "work.npz")
        self.x, self.y, self.plan = (
            torch.from_numpy(work[name]).to(self.device) for name in ("x", "y", "plan")
        )
        self.lr, self.rounds = float(work["lr"]), int(work["rounds"])
        self.threads = int(work["threads"])
        file = self.folder / "model.pt"  # rounds.py wrote it
        self.model = torch.load(file, weights_only=False).to(self.device)
        self.first = flat(self.model.parameters())
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        torch.backends.cudnn.allow_tf32 = False  # nobody computes in fewer digits

    def settle(self):
        "Wait until a GPU has done what was asked of it."
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def wait(self):
        "Until rounds.py says go; then the clocks start."
        if not sys.stdin.readline():
            os._exit(0)  # nobody is there any more
        self.settle()
        self.start = cpu_below(), time.perf_counter(), time.process_time()

    def done(self, parameters):
        "Stop the clocks; keep the first round's update, and print what the round cost."
        self.settle()
        below, wall, cpu = self.start
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        cpu = wall if self.device.type == "cuda" else cpu + cpu_below() - below
        update = self.folder / os.environ["BENCH_UPDATE"]
        if not update.exists():
            np.save(update, (flat(parameters) - self.first).cpu().numpy())
        print(json.dumps(dict(cpu=cpu, wall=wall, memory=self.memory())), flush=True)

    def memory(self):
        "Peak of this process and what those below it hold, MiB; of a GPU its own."
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 2**20
        below = psutil.Process().children(recursive=True)
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return (peak + sum(child.memory_info().rss for child in below)) / 2**20


turns = functools.cache(Turns)


def step_through(model, batches):
    "Local SGD in plain PyTorch."
    work, loss_of = turns(), torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=work.lr)
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model(work.x[batch]), work.y[batch]).backward()
        optimizer.step()
    return model.state_dict()


def play_loop():
    work = turns()
    for _ in range(work.rounds):
        work.wait()
        states = [step_through(copy.deepcopy(work.model), c) for c in work.plan]
        mean = {k: torch.stack([s[k] for s in states]).mean(0) for k in states[0]}
        work.model.load_state_dict(mean)
        work.done(work.model.parameters())


def play_dpcomm():
    from dpcomm.training.local_sgd import local_trainer

    work, w = turns(), turns().first
    trainer, size = local_trainer(work.model, w, os.environ["BENCH_ENGINE"])
    calls = -(-len(work.plan) // (size * work.threads)) * work.threads
    chunks = work.plan.tensor_split(min(calls, len(work.plan)))

    def train(clients):
        return trainer(w, work.x, work.y, clients, work.lr, None)[0].sum(0)

    with ThreadPoolExecutor(work.threads) as pool:
        for _ in range(work.rounds):
            work.wait()
            w = w + sum(pool.map(train, chunks)) / len(work.plan)
            work.done([w])


def play_pfl():
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data import FederatedDataset
    from pfl.data.dataset import Dataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Classifier(torch.nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = layers

        def loss(self, images, labels, eval=False):
            return torch.nn.functional.cross_entropy(self.layers(images), labels)

        def metrics(self, images, labels, eval=True):
            return {}

    class HandBack(TrainingProcessCallback):
        def after_central_iteration(self, metrics, model, *, central_iteration):
            work.done(model.pytorch_model.parameters())
            if central_iteration + 1 < work.rounds:
                work.wait()
            return False, Metrics()

    work = turns()
    users = [Dataset((work.x[c.flatten()], work.y[c.flatten()])) for c in work.plan]
    sampler = get_user_sampler("minimize_reuse", list(range(len(users))))
    federation = FederatedDataset(users.__getitem__, sampler)
    net = Classifier(work.model)
    work.wait()
    FederatedAveraging().run(
        NNAlgorithmParams(work.rounds, 10**9, len(users), None),
        SimulatedBackend(federation, federation),
        PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0)),
        NNTrainHyperParams(work.plan.shape[2], 1, work.lr),
        callbacks=[HandBack()],
    )


def flower_train(message, context):
    "What Flower's client does; Ray's actors import it from this file."
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    work = turns()
    work.model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    batches = work.plan[context.node_config["partition-id"]]
    arrays = ArrayRecord(step_through(work.model, batches))
    metrics = MetricRecord({"num-examples": batches.numel()})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def play_flower():
    from flwr.app import ArrayRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    work, client_app, server_app = turns(), ClientApp(), ServerApp()
    client_app.train()(flower_train)

    def take_turns(server_round, arrays):
        if server_round:
            work.done(arrays.to_torch_state_dict().values())
        if server_round < work.rounds:
            work.wait()

    @server_app.main()
    def main(grid, context):
        strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=len(work.plan))
        arrays = ArrayRecord(work.model.state_dict())
        strategy.start(grid, arrays, work.rounds, evaluate_fn=take_turns)

    ray = {"num_cpus": work.threads, "_node_ip_address": "127.0.0.1"}
    clients = {"num_cpus": 1, "num_gpus": 0.0}
    how = {"client_resources": clients, "init_args": ray}
    run_simulation(server_app, client_app, len(work.plan), backend_config=how)


if __name__ == "__main__":
    import contestants  # by its name, so that Ray's actors find the same functions

    getattr(contestants, f"play_{sys.argv[1]}")()
