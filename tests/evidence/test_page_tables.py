"Tables in the paper's shape, findings as sentences, the paper's points beside our curves."

import functools

import numpy as np
import pytest
from checkout import ROOT
from made_up import replace

from dpcomm.evidence import figures, page_tables, paper_tables, records, verdicts

PAPER = paper_tables.paper("dprec")


@functools.cache
def full() -> tuple:
    return records.load("dprec", "dprec_mnist", "full")


@functools.cache
def judged() -> verdicts.Evidence:
    return verdicts.evidence("dprec")


def test_a_gap_is_taken_seed_by_seed():
    a, b = (
        {r.seed: r.final["accuracy"] for r in full() if r.key == f"lenet5.eps3.{kind}"}
        for kind in ("fedavg", "rec")
    )
    found = page_tables.gap(full(), "lenet5.eps3.fedavg", "lenet5.eps3.rec")
    assert found == verdicts.cell_summary([a[s] - b[s] for s in sorted(a)])
    back = page_tables.gap(full(), "lenet5.eps3.rec", "lenet5.eps3.fedavg")
    assert back.mean == pytest.approx(-found.mean)
    assert page_tables.gap(full(), "lenet5.eps3.fedavg", "nothing") is None


def test_ours_is_finer_than_the_paper_and_says_whose_error_it_has():
    cell = paper_tables.cell("dprec", "mnist.eps3.rec.acc")
    count = paper_tables.cell("dprec", "shakespeare.clients")
    measured, of = page_tables.measured, verdicts.cell_summary
    assert measured(of([61, 62]), cell) == "61.50 ± 0.50 (2)" == measured(of([61, 62]))
    assert measured(replace(of([61, 62]), spread_of="x"), cell) == "61.50 ± 0.50* (2)"
    assert measured(of([660.0]), count, False) == "660"
    assert measured(of([4.59706])) == "4.597 (1)"
    assert measured(of([5.0]), seeds=False) == "5"
    assert measured(of([1.0, 1.0 + 1e-9])) == "1 (2)"


def test_a_quick_run_stands_in_without_a_verdict():
    cell = paper_tables.cell("dprec", "writer.eps1.order")
    quick = verdicts.smaller(cell, judged().smaller)
    assert quick.n == 1 and verdicts.smaller(cell, judged().smaller, "smoke") is None
    none = replace(judged(), ours={})
    line, notes = page_tables.table_line(cell.key, PAPER, none)
    ours = f"{page_tables.measured(quick, cell, False)} (quick)"
    assert line == ("+6.3", ours, "", "○ not run", "1") and len(notes) == 1


def test_a_line_is_paper_ours_difference_verdict_and_seeds():
    line, notes = page_tables.table_line("solr.participation", PAPER, judged())
    slip = paper_tables.cell("dprec", "solr.participation").arithmetic
    assert line[3] == "¶ paper's slip" and slip in notes and len(notes) == 2
    assert line[2].startswith("−"), "ours is smaller"
    line, _ = page_tables.table_line("mnist.eps3.order", PAPER, judged())
    assert line[0] == "+12.6" and line[2] == "", "an order is a difference already"
    assert page_tables.table_line("nothing", PAPER, judged()) == (None, [])


def test_a_table_has_a_line_a_number_and_its_notes():
    rows = {("3", "x"): ("eps3.", "acc"), ("all", "y"): ("", "comm")}
    columns = {"DP-FedAvg": "femnist.{0}fedavg.{1}", "DP-REC": "femnist.{0}rec.{1}"}
    asked = "dprec", rows, columns, "T", ("eps", "z"), judged()
    table, rest = page_tables.compared(*asked)
    names = "paper", "ours ± s.e.", "difference", "verdict", "seeds"
    assert table.header == ("eps", "z", "", *names) and not rest.rows
    assert [row[:3] for row in table.rows] == [
        ("3", "x", "DP-FedAvg"),
        ("3", "x", "DP-REC"),
        ("all", "y", "DP-FedAvg"),
        ("all", "y", "DP-REC"),
    ]
    assert table.rows[0][6] == "○ not run [1]" and len(table.notes) == 1
    assert table.rows[3][3] == "14.2" and table.rows[3][6] == "● match"
    assert table.title == (
        "T. Of 2 numbers compared, 2 agree with the paper; no number of ours contradicts"
        " it; 2 have not been run."
    )
    said = page_tables.paper_table(*asked)
    assert str(said) == str(table) and said.html == table._repr_html_()


def of_fltop(keys, judged=None):
    rows, judged = {key: key for key in keys}, judged or verdicts.evidence("fltop")
    return "fltop", rows, {"value": "{0}"}, "T", ("",), judged


def test_a_long_table_folds_what_agrees():
    keys = [c.key for c in paper_tables.cells("fltop", "table6")]
    assert len(keys) > page_tables.LONG
    read, agree = page_tables.compared(*of_fltop(keys))
    assert sorted(row[0] for row in (*read.rows, *agree.rows)) == sorted(keys)
    assert read.rows and agree.rows
    signs = [f"{verdicts.VERDICTS[word]} {word}" for word in verdicts.AGREEING]
    assert all(row[4] in signs for row in agree.rows)
    assert not any(row[4] in signs for row in read.rows)
    assert agree.folded.startswith(f"{len(agree.rows)} of {len(keys)} numbers agree")
    read, agree = page_tables.compared(*of_fltop([row[0] for row in agree.rows][:3]))
    assert len(read.rows) == 3 and not agree.rows


def test_the_epsilon_as_run_is_said_with_both_neighbours_and_on_every_page():
    said = str(page_tables.epsilon_as_run(full(), "DP-FedAvg"))
    record = next(r for r in full() if r.as_run)
    for g in record.as_run.values():
        assert f"{g['eps']:.2g} (one client" in said
    assert "for DP-FedAvg" in said and f"ε = {record.guarantee['eps']:.2g}" in said
    kept = [r for r in full() if not r.as_run]
    assert kept and str(page_tables.epsilon_as_run(kept, "DP-REC")) == ""
    for name in "ablations gap indices mnist shakespeare tight".split():
        page = (ROOT / f"nbs/dprec/{name}.ipynb").read_text("utf-8")
        assert "Epsilon as run" in page or "as the runs are" in page, name


def test_a_gap_over_seeds_that_were_added_has_the_interval_of_a_second_look():
    sides = "lenet5.eps6.fedavg", "lenet5.eps6.rec"
    first = [r for r in full() if r.key in sides]
    later = [replace(r, notes=[records.BEYOND]) if r.seed else r for r in first]
    gap, wide = (page_tables.gap(found, *sides) for found in (first, later))
    assert (wide.mean, wide.se) == (gap.mean, gap.se) and gap.n > 2
    assert (gap.level, wide.level) == (0.95, verdicts.AFTER_A_LOOK)


def test_the_papers_points_have_95_percent_intervals():
    keys = ["mnist.eps3.rec.acc", "mnist.eps6.rec.acc"]
    line = page_tables.paper_line("dprec", "rec", (3, 6), keys)
    assert line["source"] == "paper" and line["n"] == 10
    assert list(line["mean"]) == [69.5, 83.7]
    half = line["high"] - line["mean"]
    assert half[0] == pytest.approx(2.262 * 1.5, abs=1e-2)  # Student, 9 degrees


def test_a_curve_over_traffic_ends_at_what_was_sent():
    who = full(), "lenet5.eps3.fedavg", "gaussian"
    line = figures.learning_curve(*who, x="traffic")
    assert np.array_equal(line["mean"], figures.learning_curve(*who)["mean"])
    sent = judged().ours["ours.full.lenet5.mnist.fedavg.comm"].summary.mean
    assert line["x"][-1] == pytest.approx(sent) and (np.diff(line["x"]) > 0).all()
