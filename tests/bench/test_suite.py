"""`dpcomm bench`: contestants do the same work and take turns, what cannot be run is
refused in a sentence, and a record says on which machine.
"""

import dataclasses
import json
import os
import shutil
import sys

import numpy as np
import pretended
import pytest
import torch
from checkout import ROOT
from tables import tabled
from torch.utils.flop_counter import FlopCounterMode

from dpcomm import cli, commands
from dpcomm.bench import peers, rounds
from dpcomm.bench import suite as bench
from dpcomm.core.checks import NotInstalled
from dpcomm.evidence import measurements, paper_tables

PYTHON = os.environ.get("DPCOMM_PEER_PYTHON")  # of pfl and Flower, where it is not ours


def small(name="W1", clients=2, steps=3):
    "The beginning of a workload."
    work = rounds.workload(name)
    return dataclasses.replace(work, plan=work.plan[:clients, :steps])


@pytest.fixture
def tiny(monkeypatch):
    "Workloads of a second, and one thread."
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(rounds, "WORKLOADS", {"W1": ("linear", 2, 3, 2, 5)})
    monkeypatch.setattr(bench, "peak_flops", lambda **_: 1e11)


@pytest.fixture
def few(tiny, monkeypatch):
    "The reference alone stands for all engines."
    loop = {"loop": rounds.local_sgd.ENGINES["loop"]}
    monkeypatch.setattr(rounds.local_sgd, "ENGINES", loop)
    monkeypatch.setattr(rounds, "rule", lambda model, w: "loop")


@pytest.fixture
def played(monkeypatch, tmp_path):
    "A contestant that plays another script."
    scripts = peers.SCRIPTS

    def play(name, change):
        text = change((scripts / f"play_{name}.py").read_text(encoding="utf-8"))
        (tmp_path / f"play_{name}.py").write_text(text, encoding="utf-8")
        for path in scripts.glob("play_*.py"):
            if path.name != f"play_{name}.py":
                shutil.copy(path, tmp_path)
        monkeypatch.setattr(peers, "SCRIPTS", tmp_path)

    return play


def by_name(rows):
    return {(row["peer"], row["part"]): row for row in rows}


# ---- the work


@pytest.mark.parametrize("name, d", [("W1", 61_706), ("W2", 1_663_370)])
def test_a_workload_is_the_paper_s_round(name, d):
    work = rounds.workload(name)
    assert sum(p.numel() for p in work.model.parameters()) == d
    assert len(rounds.workload(name, whole=True).plan) == rounds.WORKLOADS[name][2]
    again = rounds.workload(name)
    assert isinstance(again, rounds.Work)
    assert torch.equal(work.x, again.x) and len(work.x) == work.plan.numel()


def test_operations_are_those_that_torch_counts():
    for name in ("W1", "W2", "cnn", "resnet"):
        work = rounds.workload(name)
        index = work.plan[0, 0]
        with FlopCounterMode(display=False) as counter:
            scores = work.model(work.x[index])
            torch.nn.functional.cross_entropy(scores, work.y[index]).backward()
        found = rounds.training_flops(work.model, work.x[index])
        assert found == counter.get_total_flops()


def test_operations_of_a_recurrent_network_are_its_products():
    work = small("lstm")
    net, x = work.model, work.x[work.plan[0, 0]]
    steps = sum(p.numel() for p in net.lstm.parameters() if p.ndim == 2) * x.numel()
    assert rounds.training_flops(net, x) == 6 * (steps + 10 * net.linear.weight.numel())


def test_the_peak_is_faster_than_a_small_product():
    a = torch.ones(64, 64)
    took = rounds.clocked(lambda: a @ a)()["cpu"]
    assert rounds.peak_flops(1, (512,)) > 2 * 64**3 / took / 4


# ---- turns


def test_calls_take_turns_and_who_fails_is_out():
    order = []

    def turn(name):
        order.append(name)
        if name == "b" and order.count("b") == 2:
            raise peers.NotRun("tired")
        return dict(cpu=1.0, wall=2.0, memory=None)

    calls = {name: lambda name=name: turn(name) for name in "ab"}
    found = rounds.measure(calls, 3)
    assert order == list("ababa") and len(found["a"]) == 3
    said = rounds.row("W1", "pfl", "", found["b"])
    assert said["note"] == "NOT RUN: tired" and said["cpu"] is None


def test_a_row_has_median_least_and_most():
    costs = [dict(cpu=t, wall=2 * t, memory=10 * t) for t in (3.0, 1.0, 2.0)]
    row = rounds.row("W1", "loop", "", costs, size=10)
    assert row["cpu"] == [2.0, 1.0, 3.0] and row["wall"] == [4.0, 2.0, 6.0]
    assert row["memory"] == 30 and row["size"] == 10


def test_a_slope_is_the_exponent():
    assert bench.slope([1, 10, 100], [2, 200, 20_000]) == pytest.approx(2)


# ---- contests


@pytest.mark.deep
def test_engines_and_the_plain_loop_do_the_same_work(tiny):
    work = small()
    peak = 1e3  # so small that no fraction is rounded away, however slow the machine
    rows = rounds.contest(work, ("loop",), 1, peak=peak)
    found = by_name(rows)
    assert ("loop", "") in found and ("dpcomm", "loop") in found
    assert max(row["error"] for row in rows) <= bench.LARGEST_ERROR
    assert not any(row["note"] for row in rows)
    flops = rounds.training_flops(work.model, work.x[work.plan[0, 0]])
    flops *= work.plan[..., 0].numel()
    for row in rows:  # the fraction is of the CPU time that the row states
        assert row["fraction"] * row["cpu"][0] * peak == pytest.approx(flops, rel=1e-6)
    (chosen,) = [row["part"] for row in rows if row["rule"]]
    w = torch.cat([p.detach().flatten() for p in work.model.parameters()])
    assert chosen == rounds.rule(work.model, w)
    assert chosen in rounds.rule_says(rows)


@pytest.mark.deep
def test_the_recurrent_network_meets_the_reference(tiny):
    rounds.WORKLOADS["lstm"] = ("lstm", 1, 1, 1, 2)
    found = by_name(rounds.contest(rounds.workload("lstm"), ("loop",), 1))
    assert set(found) == {("dpcomm", rounds.OWN), ("dpcomm", "loop")}
    assert found["dpcomm", rounds.OWN]["error"] <= bench.LARGEST_ERROR
    assert found["dpcomm", rounds.OWN]["rule"]


@pytest.mark.parametrize("peer", ["pfl", "flower"])
def test_a_peer_does_the_same_work(peer, few):
    try:
        peers.peer_versions(peer, PYTHON)
    except (ValueError, NotInstalled) as error:
        pytest.skip(f"NOT CHECKED: {error}")
    work = small()
    found = by_name(rounds.contest(work, (peer,), 1, python=PYTHON))[peer, ""]
    if found["note"]:
        pytest.skip(f"NOT CHECKED: {peer}: {found['note']}")
    assert found["error"] <= bench.LARGEST_ERROR and found["memory"] > 0


@pytest.mark.deep
def test_a_peer_that_fails_is_tried_again_and_reported(few, monkeypatch, played):
    played("flower", lambda _: "raise SystemExit('Timed out waiting for a port')")
    monkeypatch.setattr(bench, "peer_versions", lambda *_: {})
    left = []
    monkeypatch.setattr(rounds, "leave", lambda who: (left.append(who.own), end(who)))
    end = peers.leave
    row = by_name(rounds.contest(small(), ("flower",), 1))["flower", ""]
    assert row["note"] == "NOT RUN: Timed out waiting for a port"
    assert left.count("flower") == rounds.TRIES["flower"] == 3


@pytest.mark.deep
def test_other_work_is_noticed(few, played):
    played("loop", lambda text: text.replace("lr=turns.lr", "lr=2 * turns.lr"))
    rows = rounds.contest(small(), ("loop",), 1)
    record = dict(rows=rows)
    assert [row["peer"] for row in bench.differing(record)] == ["loop"]
    assert "its times are of other work" in bench.remarks(record)[0]


def test_a_silent_contestant_is_ended(tmp_path, played):
    played("loop", lambda _: "import time; input(); time.sleep(600)")
    work = small()
    inputs = work.model, work.x, work.y, work.plan
    peers.write_work(tmp_path, *inputs, lr=0.1, rounds=1, threads=1)
    who = peers.Contestant("loop", tmp_path)
    with pytest.raises(peers.NotRun):
        peers.run_round(who, limit=2)
    peers.leave(who)
    assert who.process.returncode


@pytest.mark.deep
@pytest.mark.weekly
def test_a_compiled_loop_does_the_same_work(tmp_path):
    "The contestant that takes part on a GPU alone, here on the CPU: PyTorch's compiler decides."
    work, updates = small(steps=1), []
    peers.write_work(
        tmp_path, work.model, work.x, work.y, work.plan, lr=0.1, rounds=1, threads=1
    )
    for engine in ("loop", "loop+compile"):
        who = peers.Contestant("dpcomm", tmp_path, engine=engine)
        peers.run_round(who)
        peers.leave(who)
        updates.append(np.load(who.update_file))
    loop, compiled = updates
    assert np.linalg.norm(compiled - loop) <= 1e-3 * np.linalg.norm(loop)


# ---- a GPU


def test_a_gpu_s_seconds_are_those_of_the_wall_clock(monkeypatch):
    "It is waited for before the clock starts, and before it stops."
    order = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("wait"))
    told = rounds.clocked(lambda: order.append("call"), least=1e-9, device="cuda")
    assert order == ["wait", "call", "wait"]
    del order[:]
    cost = told()
    assert cost["cpu"] == cost["wall"] and order[-1] == "wait"
    assert rounds.clocked(lambda: None)().keys() == cost.keys()


def test_every_codec_can_be_called_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with pretended.cuda():
        calls = bench.codec_calls(50, "cuda")
        for name, call in calls.items():
            if "," not in name.rpartition(", ")[0]:
                call()
        assert rounds.peak_flops(1, (64,), "cuda") > 0


def test_on_a_gpu_the_compiler_takes_part_and_a_table_names_the_clock(tmp_path):
    entered = rounds._entrants(small(), ("loop",), 1, None, tmp_path, "cuda")
    assert ("dpcomm", "loop, compiled") in entered and ("dpcomm", "graphed") in entered
    assert ("dpcomm", "loop, compiled") not in rounds._entrants(
        small(), (), 1, None, tmp_path, "cpu"
    )
    costs = [dict(cpu=0.5, wall=0.5, memory=None)]
    made = [
        rounds.row("W1", "dpcomm", "graphed", costs, size=10, rule=True, device="cuda")
    ]
    assert bench.table(made).header[1] == "GPU, ms"
    record = dict(
        bench.machine(),
        device="a card",
        versions={},
        repeats=3,
        peak_gflops=9.0,
        date="2026-01-01",
        commit=None,
        rows=made,
    )
    assert "peak 9 GFLOP/s on a card;" in bench.describe(record)
    (tmp_path / "mine.jsonl").write_text(json.dumps(record | dict(commit="c")) + "\n")
    assert measurements.committed("W1", root=tmp_path) == (None, [])
    assert measurements.committed("W1", root=tmp_path, gpu=True)[1] == made


def test_a_cpu_s_contestants_see_no_gpu(tmp_path):
    "pfl takes a GPU wherever it sees one."

    class Who:
        name, own, engine, folder, threads = "pfl", "pfl", "", tmp_path, 1

    for device, hidden in (
        ("cpu", ""),
        ("cuda", os.environ.get("CUDA_VISIBLE_DEVICES")),
    ):
        Who.device = device
        found = peers._environment(Who, sys.executable)
        assert found["BENCH_DEVICE"] == device
        assert found.get("CUDA_VISIBLE_DEVICES") == hidden


# ---- the other parts


def test_every_part_can_be_called():
    calls = bench.codec_calls(50) | bench.secagg_calls(30, 20)
    calls |= bench.accountant_calls()
    for name, call in calls.items():
        if "million" not in name and "masks" not in name:
            call()
    message = bench.message_calls(
        "rec", bench.contract.mechanism("rec", std=1.0, clip_norm=1.0), 9
    )
    assert message["rec, decode"]().shape == (9,)


def test_growth_has_its_curves():
    calls = bench.growth_calls(10**5)
    curves = {curve for curve, _ in calls}
    assert len(curves) == 5 and set(bench.PARTS) >= {"growth", "codecs"}
    rows = [
        rounds.row("growth", "dpcomm", c, [dict(cpu=n, wall=n, memory=None)], size=n)
        for c, n in calls
    ]
    shown = bench.table(rows)
    assert {r[0] for r in shown.rows} <= curves and {r[3] for r in shown.rows} == {
        "1.00"
    }
    for (_, size), call in calls.items():
        if size < 2000:
            call()


@pytest.mark.deep
def test_every_message_holds_what_is_returned_and_a_million_bytes_are_noticed():
    rows = bench.memory_rows()
    if not os.path.exists("/proc/self/clear_refs"):
        assert "NOT RUN" in rows[0]["note"]
        return
    held = {row["part"]: row["memory"] for row in rows}
    names = bench.contract.registered()
    assert {*held} == {f"{n}, {way}" for n in names for way in ("encode", "decode")}
    vector, slack = (
        4 * bench.HELD / 2**20,
        0.25,
    )  # the counter is right to 64 pages a core
    less = {part: peak for part, peak in held.items() if peak < vector - slack}
    assert not less and max(held.values()) < 200 * vector, (less, max(held.values()))


def test_memory_that_cannot_be_measured_says_so(monkeypatch):
    monkeypatch.setattr(bench.Path, "exists", lambda self: False)
    (only,) = bench.memory_rows()
    assert only["memory"] is None and "does not reset" in only["note"]
    shown = bench.table([only, only | dict(part="pm, encode", memory=2.5, note="")])
    assert shown.rows == (("all", "-"), ("pm, encode", "2.5"))
    assert len(shown.notes) == 1


# ---- what is printed and kept


@tabled(
    "words, sentence",
    [
        ("bench W3", "did you mean 'W2'"),
        ("bench codex", "did you mean 'codecs'"),
        ("bench W1 --threads 0", "--threads is 0; it must be a whole number from 1"),
        ("bench W1 --threads two", "invalid int value: 'two'"),
        ("bench W1 --repeats 0", "--repeats is 0; it must be a whole number from 1"),
        ("bench W1 --repeats 1.5", "invalid int value: '1.5'"),
        ("bench W1 --peer flowre", "did you mean 'flower'"),
        ("bench W1 --pear loop", "did you mean '--peer'"),
        ("bench W1 --peer pfl --peer-python nowhere", "is not a program"),
        ("bench --device cuda", "PyTorch finds no GPU here: leave --device out, or"),
        ("bench --device coda", "did you mean 'cuda'"),
        ("bench layers --device cuda", "layers is timed on a CPU alone: name some of"),
        ("bench W1 --device cuda --peer flower", "--peer flower is timed on a CPU"),
    ],
)
def test_a_slip_costs_a_sentence_and_exit_code_two(
    words, sentence, capsys, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code = cli.main(words.split())
    shown = capsys.readouterr()
    assert code == 2 and sentence in shown.err and not shown.out
    assert len(shown.err.splitlines()) == 1 and "Traceback" not in shown.err


def test_a_peer_that_is_not_installed_is_a_sentence(tmp_path, capsys):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    code = cli.main(["bench", "W1", "--peer", "flower", "--peer-python", str(bare)])
    said = capsys.readouterr().err
    assert code == 2 and "pip install -e '.[bench]'" in said
    assert len(said.splitlines()) == 1
    with pytest.raises(NotInstalled, match="the extra bench"):
        peers.peer_versions("pfl", str(bare))


def test_the_extra_names_what_the_peers_need():
    settings = (ROOT / "settings.ini").read_text()
    extra = settings.partition("bench_requirements = ")[2].splitlines()[0]
    core = settings.partition("\nrequirements = ")[2].splitlines()[0]
    for package in ("pfl==", "flwr[simulation]=="):
        assert package in extra and package.rstrip("=") not in core


def test_other_work_has_exit_code_one(few, monkeypatch, capsys):
    monkeypatch.setattr(bench, "LARGEST_ERROR", -1.0)
    parser, _ = cli._parser()
    args = parser.parse_args("bench W1 --repeats 1".split())
    assert commands.bench_all(args) == 1
    assert "its times are of other work" in " ".join(capsys.readouterr().out.split())


@pytest.mark.deep
def test_json_is_one_record_and_nothing_else(few, capsys, tmp_path):
    code = cli.main("bench W1 accountants --peer loop --repeats 1 --json".split())
    shown = capsys.readouterr()
    (line,) = shown.out.splitlines()
    record = json.loads(line)
    assert code == 0 and str(tmp_path) not in line and "/" not in record["machine"]
    assert record["threads"] == 1 and record["repeats"] == 1 and record["date"]
    assert {row["workload"] for row in record["rows"]} == {"W1", "accountants"}
    (tmp_path / "mine.jsonl").write_text(line + "\n")
    assert measurements.read(tmp_path / "mine.jsonl") == [record]
    newest, rows = measurements.committed("accountants", root=tmp_path)
    assert newest == record and len(rows) == len(bench.accountant_calls())
    assert measurements.committed("W2", root=tmp_path) == (None, [])


def test_an_interrupted_bench_keeps_what_it_has(few, monkeypatch, capsys):
    "Before anything is measured the interruption goes its way."

    def stopped(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "_part_rows", stopped)
    record = bench.run(("W1", "secagg", "growth"), repeats=1)
    assert {row["workload"] for row in record["rows"]} == {"W1"}
    assert record["missing"] == ["secagg", "growth"]
    commands._bench_report(record, ("W1", "secagg"))
    assert "secagg: not measured" in capsys.readouterr().out
    with pytest.raises(KeyboardInterrupt):
        bench.run(("secagg", "W1"), repeats=1)
    args = cli._parse("bench W1 secagg --repeats 1".split())
    assert commands.bench_all(args) == 130


def test_the_newest_of_each_processor_is_found(tmp_path):
    row = rounds.row("W1", "loop", "", [dict(cpu=1.0, wall=1.0, memory=None)])
    about = bench.machine() | dict(versions={}, commit="c", device="cpu", repeats=1)
    lines = [
        json.dumps(about | dict(machine=m, date=day, peak_gflops=float(i), rows=[row]))
        for i, (m, day) in enumerate(
            [("a", "2026-01-03"), ("b", "2026-01-02"), ("a", "2026-01-01")]
        )
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    found = measurements.by_processor("W1", root=tmp_path)
    assert [(r["machine"], r["peak_gflops"]) for r, _ in found] == [("b", 1), ("a", 0)]
    assert measurements.committed("W1", root=tmp_path) == found[-1]
    assert measurements.by_processor("W1", 2, tmp_path) == []
    assert measurements.by_processor("W1", root=tmp_path, peers=True) == []


def test_a_table_fits_a_terminal(few, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main("bench W1 --repeats 1 --whole".split()) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "W1, 3 clients" in shown and "the rule's choice" in shown
    assert "GFLOP/s per CPU second" in " ".join(shown.split())


def test_a_damaged_record_is_refused_with_its_line(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="mine.jsonl, line 1: versions is None"):
        measurements.read(path)
    path.write_text("{\n")
    with pytest.raises(ValueError, match="line 1 is not valid JSON"):
        measurements.read(path)


@tabled(
    "path", sorted(paper_tables.assets("bench").glob("*.jsonl")), ids=lambda p: p.name
)
def test_committed_records_are_of_the_same_work(path):
    for record in measurements.read(path):
        assert not bench.differing(record)
        assert bench.describe(record) and "\\" not in json.dumps(record["rows"])


def test_numbers_have_three_digits():
    assert bench.milliseconds(1.2345) == "1,234" and bench.milliseconds(2e-6) == "0.002"
    assert bench.machine(2)["threads"] == 2 and np.isfinite(bench.slope([1, 2], [1, 2]))
    assert bench.check(["W1"], ["loop"], 1, 1) == {} and shutil.which("python3")
