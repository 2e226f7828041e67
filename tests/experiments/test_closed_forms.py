"FL-TOP's arithmetic: against the printed rows and against sums done a second time."

import math
from dataclasses import replace

import pytest

from dpcomm.evidence import paper_tables, records
from dpcomm.experiments.fltop import closed_forms
from dpcomm.experiments.fltop import costs as fltop_costs
from dpcomm.experiments.run import runs
from dpcomm.mechanisms import topk

PRINTED = {cell.key: cell.value for cell in paper_tables.cells("fltop")}


def test_the_rounds_are_the_printed_ones():
    rounds = closed_forms.best_rounds()
    assert len(rounds) == sum(key.endswith(".round") for key in PRINTED)
    row = "fmnist", "fl_top_dp", "r0.5"
    assert rounds[row] == PRINTED["fmnist.fl_top_dp.r0.5.round"]
    assert row in closed_forms.rows_at("fmnist", "r0.5")
    assert all(r[2] == "r0.5" for r in closed_forms.rows_at("fmnist", "r0.5"))


def test_a_cost_is_four_bytes_a_weight_a_round_by_the_rate():
    "Fashion-MNIST: 100 of 6,000 clients a round."
    kb = closed_forms.cost_kb(1_000_000, "fmnist", 200)
    assert kb == pytest.approx(4 * 1_000_000 * 200 / 60 / 1000)
    n = 1_663_370
    for rounds, values, printed in (
        (193, topk.size(0.005, n), 107.0),
        (193, n, 21402.03),
    ):
        assert round(closed_forms.cost_kb(values, "fmnist", rounds), 2) == printed


def test_a_ratio_fills_every_row_with_both_costs_and_private_ones_with_epsilon():
    run = fltop_costs.ratio_run("full", "fmnist", "r0.5")
    found = closed_forms.at_ratio(run)
    assert set(found["cells"]) == set(run.fills)
    rows = closed_forms.rows_at("fmnist", "r0.5")
    gaps = [
        (found["cells"][f"{'.'.join(row)}.{c}"][0] - PRINTED[f"{'.'.join(row)}.{c}"])
        ** 2
        for row in rows
        for c in ("down_kb", "up_kb")
    ]
    assert found["final"]["mse"] == pytest.approx(sum(gaps) / len(gaps))
    s = closed_forms.setting("fmnist")
    sent = math.floor(s["n_params"] * 5 / 1000) * 32 * s["cohort"] * s["rounds"]
    assert found["final"]["uplink_bits"] == sent


def test_epsilon_grows_with_rounds_and_the_tighter_accountants_are_below():
    run = next(r for r in fltop_costs.grid("full") if r.key == "fmnist.epsilon")
    found = closed_forms.over_rounds(run)
    classic = [at["rdp-classic"] for at in found["history"] if "rdp-classic" in at]
    assert classic == sorted(classic)
    last = [found["cells"][key][0] for key in run.fills]
    assert last == sorted(last, reverse=True)
    assert found["final"]["eps"] == last[0] == classic[-1]


def test_the_patients_of_table_4_are_added_up():
    cells = {key: value for key, (value, _) in closed_forms.patients().items()}
    dead, alive = (PRINTED[f"medical.train.{w}"] for w in ("positive", "negative"))
    assert cells["medical.train.total"] == dead + alive
    total = cells["medical.train.total"] + cells["medical.test.total"]
    assert (
        cells["medical.records"]
        == PRINTED["medical.train.total"] + PRINTED["medical.test.total"]
    )
    assert total == pytest.approx(cells["medical.records"], rel=1e-3)


def test_what_follows_from_several_rows_comes_from_their_records():
    have = runs.recorded_runs(runs.find("fltop-costs"), "full")
    for key in ("fmnist.saved", "medical.eps_largest"):
        run = next(r for r in fltop_costs.grid("full") if r.key == key)
        inputs = {need: have[need, 0] for need in run.needs}
        found = fltop_costs.across(run, inputs)["cells"]
        assert found == have[key, 0].cells
    eps = [
        value
        for record in inputs.values()
        for cell, (value, _) in record.cells.items()
        if cell.endswith(".eps")
    ]
    assert found == {"medical.eps_largest": [max(eps), "nats"]}


def test_a_changed_row_changes_what_follows_from_it():
    run = next(r for r in fltop_costs.grid("full") if r.key == "fmnist.saved")
    base = records.load("fltop", "fltop_costs", "full")[0]

    def record(up, scheme):
        return replace(base, cells={f"fmnist.{scheme}.up_kb": [up, "kB"]})

    inputs = {
        "fmnist.r0.1": record(1.0, "fl_top.r0.1"),
        "fmnist.r100": record(4.0, "fl_std.r100"),
    }
    assert fltop_costs.across(run, inputs)["cells"] == {
        "fmnist.saved": [75.0, "percent"]
    }


@pytest.mark.parametrize("ratio", ["r0.5", "r100"])
def test_a_message_holds_whole_weights_unless_asked_otherwise(ratio):
    exact = closed_forms.entries("fmnist", ratio, floor=False)
    assert (
        exact * 1000
        == int(float(ratio[1:]) * 10) * closed_forms.setting("fmnist")["n_params"]
    )
    assert closed_forms.entries("fmnist", ratio) == math.floor(exact)
