"What all contestants share: the work of a round, and the clocks that run in their turn."

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch


def processes_below():
    "Status of every process that this one has started, and they; by number."
    parts = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            parts[int(file.parent.name)] = file.read_text().rpartition(") ")[2].split()
        except OSError:
            pass  # it has ended
    found = [os.getpid()]
    for pid in found:
        found += [child for child, part in parts.items() if int(part[1]) == pid]
    return {pid: parts[pid] for pid in found[1:]}


def cpu_below():
    "CPU seconds of these processes so far."
    ticks = sum(int(part[11]) + int(part[12]) for part in processes_below().values())
    return ticks / os.sysconf("SC_CLK_TCK")


def flat(parameters):
    "Parameters as one vector."
    return torch.cat([p.detach().flatten() for p in parameters])


class Turns:
    "The work that a contestant reads, and the two calls between which its clocks run."

    def __init__(self):
        self.folder = Path(os.environ["BENCH_FOLDER"])
        self.device = torch.device(os.environ["BENCH_DEVICE"])
        work = np.load(self.folder / "work.npz")
        self.x, self.y, self.plan = (
            torch.from_numpy(work[name]).to(self.device) for name in ("x", "y", "plan")
        )
        self.lr, self.rounds = float(work["lr"]), int(work["rounds"])
        self.threads = int(work["threads"])
        file = self.folder / "model.pt"  # the referee's
        self.model = torch.load(file, weights_only=False).to(self.device)
        self.first = flat(self.model.parameters())
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        torch.backends.cudnn.allow_tf32 = False  # nobody computes in fewer digits

    def settle(self):
        "Until a GPU has done what was asked of it."
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def wait(self):
        "Until the referee says go; then the clocks start."
        if not sys.stdin.readline():
            os._exit(0)  # nobody is there any more
        self.settle()
        self.start = cpu_below(), time.perf_counter(), time.process_time()

    def done(self, parameters):
        "Stop the clocks; leave the first round's update, and say what the round cost."
        self.settle()
        below, wall, cpu = self.start
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        cpu = wall if self.device.type == "cuda" else cpu + cpu_below() - below
        update = self.folder / f"{os.environ['BENCH_NAME']}.npy"
        if not update.exists():
            np.save(update, (flat(parameters) - self.first).cpu().numpy())
        cost = dict(cpu=cpu, wall=wall, memory=self.memory())
        print(json.dumps(cost), flush=True)

    def memory(self):
        "Sum of the peaks of this process and of those below it, MiB; of a GPU its own."
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 2**20
        pids = (os.getpid(), *processes_below())
        files = [Path(f"/proc/{pid}/status") for pid in pids]
        told = [f.read_text().partition("VmHWM:")[2] for f in files if f.exists()]
        peaks = [int(text.split()[0]) for text in told if text]
        return sum(peaks) / 1024 if peaks else None
