"""`dpcomm bench layers`: operations are those that PyTorch counts, the parts of a step
add up to it, and a profile names what bounds a layer.
"""

import pytest
import torch
from tables import tabled
from torch.utils.flop_counter import FlopCounterMode

from dpcomm.bench import layers, rounds
from dpcomm.bench import suite as bench
from dpcomm.core.random import seed_tree
from dpcomm.evidence import measurements, paper_tables
from dpcomm.training import models


@tabled("name", ["lenet5", "cnn", "cnn62", "conv10", "linear"])
def test_operations_and_bytes_of_layers(name):
    net, x = models.build(name, seed_tree(0)), torch.rand(3, 1, 28, 28)
    costs = layers.layer_costs(net, x)
    with FlopCounterMode(display=False) as counter:
        net(x).sum().backward()
    flops = {key: flops for key, (_, flops, _) in costs.items()}
    assert sum(flops.values()) == counter.get_total_flops()
    back = sum(moved for (_, part), (_, _, moved) in costs.items() if part == "back")
    assert back > sum(moved for _, _, moved in costs.values()) / 2


def test_bytes_of_one_layer_are_counted_by_hand():
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 5))
    costs = layers.layer_costs(net, torch.rand(7, 3))
    assert costs[0, "forward"][1:] == (2 * 7 * 6, 4 * (21 + 8 + 14))
    assert costs[0, "back"][1:] == (2 * 7 * 6, 4 * (14 + 21 + 16))
    assert costs[1, "back"][1:] == (4 * 7 * 10, 4 * (35 + 14 + 30 + 14))


def test_a_profile_has_every_layer_both_ways(monkeypatch):
    monkeypatch.setattr(layers, "PROFILED", ("W1",))
    monkeypatch.setattr(rounds, "WORKLOADS", {"W1": ("lenet5", 3, 3, 2, 5)})
    rows = layers.layer_rows(1e11, 2)
    parts = [row["part"].split(", ")[1:] for row in rows]
    for kind in ("forward", "back"):
        layers_seen = [layer for layer, part in parts if part == kind]
        assert len(layers_seen) == len(set(layers_seen)) == 12
    assert ["all", "loss"] in parts and ["all", "batch"] in parts
    for row in rows:
        assert row["size"] == 3 and row["bound"] in ("arithmetic", "memory", "overhead")
        if row["fraction"]:
            wanted = row["flops"] / (row["cpu"][1] * 1e11)
            assert row["fraction"] == pytest.approx(wanted, abs=6e-4)
    table = layers.profile_table(rows, ("W1",))
    assert len(table.rows) == len(rows) + 1 and table.rows[-1][4] == "100 %"


@tabled(
    "seconds, arithmetic, memory, said",
    [
        (1.0, 0.5, 0.1, "arithmetic"),
        (1.0, 0.1, 0.9, "memory"),
        (1.0, 0.4, 0.49, "overhead"),
    ],
)
def test_what_bounds_a_layer(seconds, arithmetic, memory, said):
    assert layers.bound_by(seconds, arithmetic, memory) == said


def test_committed_profiles_are_of_both_kinds_of_vectors():
    records = measurements.read(paper_tables.assets("bench") / "layers.jsonl")
    assert {record["torch_kernels"] for record in records} == {"AVX2", "AVX512"}
    assert bench.table(records[0]["rows"]).rows


def test_the_engine_tells_its_parts_in_order():
    seen, work = [], rounds.workload("W1")
    w = torch.cat([p.detach().flatten() for p in work.model.parameters()])
    layers.fused.train_fused(
        work.model,
        w,
        work.x,
        work.y,
        work.plan[:1, :1],
        0.1,
        watch=lambda *part: seen.append(part),
    )
    forward = [(i, "forward") for i in range(12)]
    back = [(i, "back") for i in reversed(range(12))]
    assert seen == [(None, "batch"), *forward, (None, "loss"), *back]
