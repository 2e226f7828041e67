"""The transcriptions: a second, independent typing (typed/*.tsv) compared with the TOML,
and the checks that guard the files.
"""

import csv
import fnmatch
import re
import tomllib
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from tables import tabled

from dpcomm.evidence import paper_tables

TYPED = Path(__file__).parent / "typed"
PAPERS = paper_tables.papers()


def second(paper, kind) -> list:
    "The second typing: a dict a line, '-' where nothing is printed."
    with open(TYPED / f"{paper}.{kind}.tsv", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def number(text) -> float | None:
    above, _, below = text.partition("/")
    return None if text == "-" else float(above) / float(below or 1)


def printed(paper) -> list:
    "Its numbers; of DP-REC also the orders, which it prints as differences."
    every, stand_ins = paper_tables.cells(paper), paper_tables.paper(paper).stand_ins
    if paper == "dprec":
        return every
    return [c for c in every if c.kind != "ordering" and c.table not in stand_ins]


@tabled("paper", PAPERS)
def test_every_number_equals_its_second_typing(paper):
    file = paper_tables.assets("papers") / f"{paper}.toml"
    about = tomllib.loads(file.read_text("utf-8"))["paper"]
    assert {"id", *paper_tables.ABOUT} <= about.keys()
    rows, cells = second(paper, "cells"), {c.key: c for c in printed(paper)}
    assert {row["key"] for row in rows} == cells.keys() and len(rows) == len(cells)
    for row in rows:
        cell = cells[row["key"]]
        assert float(cell.value) == number(row["value"]), cell.key
        for name in row.keys() & {"spread", "n_runs"}:
            assert getattr(cell, name) == number(row[name]), cell.key
        if "also" in row:
            assert cell.also == (() if row["also"] == "-" else (row["also"],))


@tabled("paper", PAPERS)
def test_every_stated_setting_equals_its_second_typing(paper):
    typed = {
        (row["task"], row["name"], row["version"]): [*map(number, row["value"].split())]
        for row in second(paper, "settings")
    }
    stated = {
        (h.task, h.name, h.version): [*map(float, np.atleast_1d(h.value))]
        for h in paper_tables.paper(paper).hypers
        if h.source == "stated"
        and all(type(v) in (int, float) for v in np.atleast_1d(h.value).tolist())
    }
    once = ("medical", "hidden"), ("femnist", "ablation.bits"), ("all", "rec.std.range")
    assert {at[:2] for at in stated.keys() - typed.keys()} <= {*once}
    assert typed.keys() <= stated.keys()
    assert {at: stated[at] for at in typed} == typed


def test_a_tilde_is_a_reading_error():
    marked = {c.value for c in paper_tables.cells("dprec", "table1") if c.read_err}
    assert marked == {72, 25, 77, 71, 14, 10}


def test_tolerances_follow_their_rule():
    for c in paper_tables.cells("dprec"):
        if c.set_on == date(2026, 11, 26):
            assert c.kind == "shown" and c.tol == 0
            continue
        later = c.table in ("c2", "by_writer") or c.key == "mnist.eps3.quant8.order"
        posts = re.match(r"solr.(samples|client_size|eps1.(fedavg|rec).rec)", c.key)
        day = 29 if posts else 22 if later else 20
        assert c.set_on == date(2026, 11, day), c.key
        if c.table == "c2":
            assert (c.tol, c.unit, c.kind) == (0.5, "eps", "exact")
        if c.kind == "stochastic" and c.unit == "percent":
            assert c.tol == pytest.approx(max(2 * (c.spread or 0), 1.0)), c.key
        if c.key.endswith(".comm"):
            digits = len(str(c.value).partition(".")[2])
            assert c.tol == pytest.approx(0.5 * 10**-digits), c.key


def test_tolerances_of_fltop_follow_their_rule():
    rule = dict.fromkeys(("down_kb", "up_kb", "eps"), ("exact", 0.005))
    rule |= dict.fromkeys(("bal_acc", "auroc", "round"), ("shown", 0))
    rule["accuracy"] = ("stochastic", 0.02)
    for c in paper_tables.cells("fltop"):
        if c.set_on == date(2026, 11, 26):
            assert c.kind == "shown" and c.tol == 0
            continue
        assert c.set_on == date(2026, 11, 23 if c.key == "fmnist.figure1.norm" else 21)
        if "sensitivity" in c.key and c.table == "table6":
            assert c.kind == "stochastic" and c.tol == pytest.approx(0.33 * c.value)
        elif c.table in ("table8", "table9", "table10") and c.kind != "ordering":
            column = c.key.rsplit(".", 1)[1]
            assert (c.kind, c.tol) == rule[column], c.key
            why = "by chance" if column == "round" else "other data"
            assert c.kind != "shown" or why in c.tol_why


@tabled("paper, n", [("dprec", 5 + 22), ("fltop", 29 + 24 + 5 + 3 + 9 + 9 + 6 + 1)])
def test_orderings_agree_with_the_printed_values(paper, n):
    cells = {c.key: c for c in paper_tables.cells(paper)}
    pairs = [c for c in cells.values() if c.above]
    assert len(pairs) == n
    for c in pairs:
        gap = cells[c.above].value - cells[c.below].value
        assert c.value >= 0 and gap == pytest.approx(c.value), c.key


def test_a_setting_takes_its_task_first_and_the_version_asked_for():
    assert paper_tables.hyper("dprec", "rec.groups", "solr").value == 6
    assert paper_tables.hyper("dprec", "rec.groups", "mnist").task == "all"
    for h in paper_tables.paper("dprec").hypers:
        for version in ("arxiv", "iclr") if h.version == "both" else (h.version,):
            assert paper_tables.hyper("dprec", h.name, h.task, version=version) == h


FED = "mnist.eps3.fedavg.acc"
CLAIM = '[[claim]]\ntext = "A"\nwhere = "B"\n'
BAD = [
    ("value = 69.5\n", "value = nan\n"),
    ("value = 69.5\n", 'value = "69.5"\n'),
    ("spread = 1.5\n", "spread = -1.5\n"),
    ("tol = 3.0\n", "tol = 0.0\n"),
    ("tol = 3.0\n", ""),
    ('[[cell]]\nkey = "mnist.eps3.rec.acc"', f'[[cell]]\nkey = "{FED}"'),
    ('kind = "stochastic"', 'kind = "random"'),
    ('kind = "stochastic"', 'kind = "ordering"'),
    (f'above = "{FED}"', 'above = "mnist.eps3.fedavg.ac"'),
    ('id = "dprec"', "id = 1"),
    ('table = "table1"', 'table = "table99"'),
    ("[[cell]]", f'{CLAIM}cells = ["*.comm"]\nwords = "x"\n[[cell]]'),
]
ROW = "fl_basic.r0.1        0.14      111    12308.94  12.31    -"
BAD_ROWS = [(ROW, ROW[:-1]), (ROW, f"{ROW} 2"), ("accuracy  round", "accuracie  round")]
BAD_ROWS += [(ROW, ROW.replace("0.14", number)) for number in ("0,14", "0.1.4")]
CASES = [*(("dprec", pair) for pair in BAD), *(("fltop", pair) for pair in BAD_ROWS)]


@tabled("paper, change", CASES)
def test_a_bad_file_is_refused_by_its_name(paper, change):
    file = paper_tables.assets("papers") / f"{paper}.toml"
    good = file.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=rf"^{paper}.toml: .*; correct the file"):
        paper_tables.parse(good.replace(*change, 1), file.name)
    assert change[0] in good


@tabled("paper, tables", [("imvu", 3), ("sqsgd", 5)])
def test_every_claimed_inequality_is_quoted(paper, tables):
    cells = [c for c in paper_tables.cells(paper) if c.kind == "ordering"]
    assert len({c.table for c in cells}) == tables
    for c in cells:
        assert c.bound == "above" and "'" in c.where and c.set_on == date(2026, 11, 21)
        margins = {"fig1.bits": 1.0, "sqsgd_minus_pm": 1.0, "vqsgd_minus_sqsgd": -3.0}
        margins["sqsgd_minus_vqsgd"] = 10.0
        if paper == "imvu":
            margins = {"gaussian": -1.0, "b4": -1.0}
        due = [margin for words, margin in margins.items() if words in c.key]
        assert [c.value] == (due[:1] or [0.0]), c.key


def test_the_two_texts_of_dprec_share_their_runs_only_where_no_setting_differs():
    cells = {c.key: c for c in paper_tables.cells("dprec")}
    same = [c for c in cells.values() if c.same_as]
    scores = [key for key in cells if key.endswith(".fedavg.acc")]
    assert [c.key for c in same] == [key for key in scores if key.startswith("iclr.")]
    for c in same:
        other = cells[c.same_as]
        assert c.same_as == c.key.removeprefix("iclr.")
        assert not other.same_as and other.unit == c.unit
    for paper in PAPERS:
        for c in paper_tables.cells(paper):
            assert (c.version == "iclr") == c.key.startswith("iclr."), c.key
            assert c.own is not None or not c.arithmetic, c.key
    apart = {h.name for h in paper_tables.paper("dprec").hypers if h.version != "both"}
    assert all(name.startswith("rec.") or name.endswith("n_runs") for name in apart)


@tabled("paper", PAPERS)
def test_claims_causes_and_stand_ins_name_what_is_in_the_file(paper):
    p = paper_tables.paper(paper)
    keys = [c.key for c in p.cells]
    assert {*p.stand_ins} <= {*p.titles}
    assert all({*cause.keys} <= {*keys} and cause.keys for cause in p.causes)
    for claim in p.claims:
        assert claim.cells or claim.erratum or claim.cannot, claim.text
        assert all(fnmatch.filter(keys, pattern) for pattern in claim.cells), claim.text


@tabled("paper", PAPERS)
def test_no_two_keys_of_a_table_are_said_alike(paper):
    for table in paper_tables.tables(paper):
        said = [paper_tables.in_words(c.key) for c in paper_tables.cells(paper, table)]
        assert len(set(said)) == len(said)
