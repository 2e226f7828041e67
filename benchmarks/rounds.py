"""A round of federated averaging by dpcomm's engines, a plain PyTorch loop, pfl and Flower.
They take turns, each in a process of its own; every update is compared with the reference.
Prints one line of JSON: python benchmarks/rounds.py W1 W2 --peer loop --peer pfl
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from machine import median_row, print_record

from dpcomm.core.random import normal, seed_tree
from dpcomm.core.vectors import flatten
from dpcomm.training import local_sgd, models

HERE = Path(__file__).resolve().parent
WORKLOADS = {  # name: model, clients, local steps, batch
    "W1": ("lenet5", 10, 25, 20),  # DP-REC on MNIST
    "W2": ("cnn_same", 10, 5, 10),  # a tenth of FL-TOP's round
    "cnn": ("cnn", 10, 25, 20),  # DP-REC's larger network
    "resnet": ("resnet110", 2, 1, 32),
    "lstm": ("lstm", 2, 5, 10),  # Shakespeare
}
REFERENCE = "loop"  # the engine of ours to which every update is compared
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class NotRun(Exception):
    "A contestant could not play."


def workload(name, seed=0):
    "Model, inputs, labels and the numbers of inputs (clients, steps, batch)."
    net, *shape = WORKLOADS[name]
    plan, rng = (
        torch.arange(np.prod(shape)).view(*shape),
        seed_tree(seed, "bench", name),
    )
    n = plan.numel()
    if net == "lstm":
        x = (
            torch.from_numpy(rng.integers(0, 80, n + 80))
            .unfold(0, 80, 1)[:n]
            .contiguous()
        )
    else:
        x = torch.from_numpy(rng.random((n, 1, 28, 28), np.float32))
    model = models.build(net, seed_tree(seed, "bench", "init"))
    return model, x, torch.zeros(n).long(), plan


def training_flops(model, x):
    "Floating-point operations of one pass forward and back. [Griewank & Walther 2008]"
    forward = []

    def count(layer, inputs, output):
        if isinstance(layer, torch.nn.Conv2d):
            forward.append(2 * output.numel() * layer.weight[0].numel())
        elif isinstance(layer, torch.nn.Linear):
            forward.append(2 * output.numel() * layer.in_features)
        elif isinstance(layer, torch.nn.LSTM):
            matrices = sum(p.numel() for p in layer.parameters() if p.ndim == 2)
            forward.append(2 * inputs[0].shape[0] * inputs[0].shape[1] * matrices)
        elif isinstance(layer, torch.nn.Embedding):
            forward.append(0)  # the layer above it does need its inputs' gradient

    hooks = [layer.register_forward_hook(count) for layer in model.modules()]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return 3 * sum(forward) - forward[0]


def peak_flops(device="cpu"):
    "The fastest large product in single precision: operations a CPU second, or a GPU's."
    clock, best = time.process_time if device == "cpu" else time.perf_counter, 0.0
    for n in (1024, 2048) if device == "cpu" else (4096, 8192):
        a = normal((n, n), seed_tree(0, "bench", "product")).to(device)
        for _ in range(4):
            start = clock()
            (a @ a)[0, 0].item()  # waits for the GPU
            best = max(best, 2 * n**3 / (clock() - start))
    return best


class Contestant:
    "A process that runs a round on request."

    def __init__(self, name, engine, folder, python, threads, device):
        self.update = folder / f"{name}-{engine}.npy"
        self.errors = open(self.update.with_suffix(".txt"), "w+", encoding="utf-8")
        inside = "1" if name in ("dpcomm", "flower") else str(threads)  # workers else
        paths = map(str, (HERE, HERE.parent, os.environ.get("PYTHONPATH", "")))
        env = dict(os.environ, **QUIET, PYTHONPATH=os.pathsep.join(paths))
        env |= dict(
            OMP_NUM_THREADS=inside, MKL_NUM_THREADS=inside, FLWR_HOME=str(folder)
        )
        env |= dict(BENCH_FOLDER=str(folder), BENCH_UPDATE=self.update.name)
        env |= dict(BENCH_ENGINE=engine, BENCH_DEVICE=device)
        env |= {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        env["PATH"] = f"{Path(python).parent}{os.pathsep}{env.get('PATH', '')}"
        pipe, words = subprocess.PIPE, [python, str(HERE / "contestants.py"), name]
        self.process = subprocess.Popen(
            words, stdin=pipe, stdout=pipe, stderr=self.errors, text=True, env=env
        )

    def play(self, limit=600.0):
        "One round: cpu and wall seconds, memory in MiB."
        timer = threading.Timer(limit, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                if line.startswith('{"cpu"'):
                    return json.loads(line)
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
        self.errors.seek(0)
        raise NotRun(
            (self.errors.read().strip().splitlines() or ["it printed nothing"])[-1]
        )

    def leave(self):
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.errors.close()


def contest(name, peers=(), repeats=5, threads=1, python=None, device="cpu", peak=None):
    "Rows of a workload: a line for each engine of ours and for each peer."
    model, x, y, plan = workload(name)
    names = [("dpcomm", engine) for engine in local_sgd.ENGINES]
    names += [(peer, "") for peer in peers]
    turns, left_out, entered, updates = {}, {}, {}, {}
    with tempfile.TemporaryDirectory() as folder:
        numbers = dict(lr=0.01, rounds=repeats + 1, threads=threads)
        np.savez(Path(folder) / "work.npz", x=x, y=y, plan=plan, **numbers)
        torch.save(model, Path(folder) / "model.pt")
        try:
            for who in names:
                theirs = python if who[0] in ("pfl", "flower") else None
                how = Path(folder), theirs or sys.executable, threads, device
                entered[who] = Contestant(*who, *how)
            for turn in range(repeats + 1):  # the first is not timed
                for who in [who for who in names if who not in left_out]:
                    print(f"{name}, turn {turn}, {' '.join(who)}", file=sys.stderr)
                    try:
                        turns.setdefault(who, []).append(entered[who].play())
                    except NotRun as why:
                        left_out[who] = f"NOT RUN: {why}"[:200]
            for who in turns.keys() - left_out.keys():
                updates[who] = np.load(entered[who].update)
        finally:
            for contestant in entered.values():
                contestant.leave()
    w = flatten(p.detach() for p in model.parameters()).to(device)
    trainer, _ = local_sgd.local_trainer(model, w, "auto")
    made_by = {engine: key for key, engine in local_sgd.ENGINES.items()}
    chosen = made_by.get(getattr(trainer, "func", trainer), "auto")
    flops = training_flops(model, x[plan[0, 0]]) * plan[..., 0].numel()
    right, rows = updates["dpcomm", REFERENCE], []
    for who in names:
        row = median_row(name, *who, turns.get(who, [])[1:], left_out.get(who, ""))
        row |= dict(rule=who == ("dpcomm", chosen), size=len(plan), device=device)
        if who in updates:
            apart = np.linalg.norm(updates[who] - right) / np.linalg.norm(right)
            row["error"] = float(f"{apart:.2g}")
        if peak and row["cpu"]:
            row["fraction"] = round(flops / (row["cpu"][0] * peak), 3)
        rows.append(row)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["W1", "W2", "cnn"])
    parser.add_argument(
        "--peer", action="append", default=[], choices=["loop", "pfl", "flower"]
    )
    parser.add_argument("--peer-python", help="the Python that has pfl and Flower")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    fastest, rows = peak_flops(args.device), []
    for name in args.names:
        python, how = args.peer_python, (args.device, fastest)
        rows += contest(name, args.peer, args.repeats, args.threads, python, *how)
    print_record(rows, args.repeats, args.threads, args.device, fastest)
    sys.exit(any((row["error"] or 0) > 1e-3 for row in rows))
