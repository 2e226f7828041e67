"What all benchmarks record: the machine, and the median of what turns cost."

import datetime
import json
import math
import os
import time
from pathlib import Path
from statistics import median

import torch

from dpcomm.evidence import records

INSTRUCTIONS = (
    "avx2 avx512f avx512_vnni avx512_bf16 amx_tile amx_bf16 asimd sve".split()
)


def median_row(workload, peer, part, costs, note="", **fields):
    "A row: median, least and most of the turns' costs."
    row = dict(
        workload=workload, peer=peer, part=part, cpu=None, wall=None, memory=None
    )
    row |= dict(fraction=None, error=None, rule=False, size=None, note=note) | fields
    if costs and not note:
        for name in ("cpu", "wall"):
            values = [cost[name] for cost in costs]
            spread = median(values), min(values), max(values)
            row[name] = [float(f"{value:.4g}") for value in spread]
        peaks = [cost["memory"] for cost in costs if cost.get("memory")]
        row["memory"] = round(max(peaks)) if peaks else None
    return row


def time_in_turns(calls, repeats, least=0.02):
    "name -> costs of each turn; a call is repeated until it lasts so many seconds."
    often, costs = {}, {name: [] for name in calls}
    for name, call in calls.items():
        start = time.perf_counter()
        call()
        often[name] = math.ceil(least / max(time.perf_counter() - start, 1e-7))
    for _ in range(repeats):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(often[name]):
                call()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            costs[name].append(dict(cpu=cpu / often[name], wall=wall / often[name]))
    return costs


def print_record(rows, repeats, threads=1, device="cpu", peak=0.0, **fields):
    "A line as dpcomm/assets/bench has them: no host name, no path."
    try:
        words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        words = set()
    card = "cpu" if device == "cpu" else torch.cuda.get_device_name(device)
    record = records.stamp(card) | dict(
        cores=os.cpu_count(),
        instructions=[name for name in INSTRUCTIONS if name in words],
        torch_kernels=torch.backends.cpu.get_cpu_capability(),
        threads=threads,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        repeats=repeats,
        peak_gflops=round(peak / 1e9, 1),
        rows=rows,
    )
    print(json.dumps(record | fields))
