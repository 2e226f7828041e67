"Where a paper stands: every number counted once, rows told together only with one cause."

import re
from collections import Counter

import pytest
from tables import tabled

from dpcomm.evidence import cell_names, paper_tables, records, summaries, verdicts

PAPERS = paper_tables.papers()


@pytest.fixture(scope="module")
def evidence():
    return {paper: verdicts.evidence(paper) for paper in PAPERS}


@pytest.mark.parametrize("paper", PAPERS)
def test_every_number_is_counted_once_and_in_its_class(paper, evidence):
    p, found = paper_tables.paper(paper), evidence[paper]
    counted = summaries.tally(paper, found=found).counts
    assert list(counted) == [c for c in summaries.CLASSES if c in counted]
    words = Counter()
    for cell in p.cells:
        word = verdicts.verdict(cell, found.summary(cell))
        judged = cell.kind != "shown" and word != "not comparable"
        words[word] += judged and cell.table not in p.stand_ins
    assert sum(map(Counter, counted.values()), Counter()) == +words
    assert counted.get("not run", {}).keys() <= {"not run"}
    exact = [c for c in p.cells if c.kind == "exact"]
    assert sum(counted.get("computed", {}).values()) <= len(exact) + 2


@pytest.mark.parametrize("paper", PAPERS)
def test_what_was_asked_of_other_data_is_counted_by_itself(paper, evidence):
    p, all_of_it = paper_tables.paper(paper), str(summaries.tally(paper))
    for table in p.stand_ins:
        apart = summaries.tally(paper, table, evidence[paper]).counts
        assert sum(map(len, apart.values())) and "not comparable" not in apart
        cells = paper_tables.cells(paper, table)
        judged = [c for c in cells if c.kind != "shown"]
        assert sum(sum(each.values()) for each in apart.values()) == len(judged)
        pairs = [(c.above, c.below) for c in judged if c.above]
        assert len(set(pairs)) == len(pairs), "each comparison once"
    assert all_of_it == str(summaries.tally(paper, found=evidence[paper]))


@tabled(
    "kind, verdict, name",
    [
        ("exact", "match", "computed"),
        ("stochastic", "match", "trained"),
        ("ordering", "order fails", "trained"),
        ("exact", "not run", "not run"),
        ("shown", "not comparable", ""),
        ("shown", "not run", ""),
        ("stochastic", "not comparable", ""),
    ],
)
def test_a_number_has_one_class(kind, verdict, name):
    cell = next(c for p in PAPERS for c in paper_tables.cells(p) if c.kind == kind)
    assert summaries.class_of(cell, verdict) == name


@tabled(
    "paper, key, name",
    [
        ("fltop", "fmnist.sensitivity.fl_top_dp.r1", "measured"),
        ("dprec", "mean.chen.mse", "measured"),
        ("dprec", "mnist.client_size.std", "measured"),
        ("fltop", "fmnist.eps_largest", "computed"),
        ("fltop", "fmnist.fl_top.r1.accuracy", "trained"),
        ("fltop", "fmnist.order.fl_cs.r1", "trained"),
    ],
)
def test_a_threshold_is_measured_and_not_trained(paper, key, name):
    assert summaries.class_of(paper_tables.cell(paper, key), "match") == name


@pytest.mark.parametrize("paper", PAPERS)
def test_a_claim_loses_no_row(paper, evidence):
    for table in summaries.tables_of(paper):
        found = summaries.claim(paper, table, evidence[paper])
        rows = [row[0] for row in found.shown.rows]
        rows += [row[0] for _, group in found.groups for row in group.rows]
        keys = [cell_names.in_words(c.key) for c in paper_tables.cells(paper, table)]
        assert sorted(rows) == sorted(keys)
        assert summaries.anchor(paper, table) in summaries.Section(paper)._repr_html_()
        for what, group in found.groups:
            cells = "1 cell: " if len(group.rows) == 1 else f"{len(group.rows)} cells: "
            assert what.startswith(cells)
            assert len(group.rows) > 2 or "not run" in what


@pytest.mark.parametrize("paper", PAPERS)
def test_a_disagreement_is_never_grouped(paper, evidence):
    alone = {"below", "above", "order fails", "near", "paper's slip"}
    alone |= {"agrees", "tie", "open", "differs", "unexplained"}
    for table in summaries.tables_of(paper):
        found = summaries.claim(paper, table, evidence[paper])
        assert not [w for w, _ in found.groups if any(f"{a}:" in w for a in alone)]
        for row in found.shown.rows:
            for number in map(int, re.findall(r"\[(\d+)\]", row[4])):
                assert number <= len(found.shown.notes)


@tabled("paper", PAPERS)
def test_a_finding_has_the_numbers_of_the_records(paper):
    template, said = (
        paper_tables.paper(paper).about["finding"],
        summaries.finding(paper),
    )
    assert "{" in template and "{" not in said
    ours = verdicts.ours_by_key(records.load(paper, scale="full"))
    for key in re.findall(r"\{([^ {}]+)\}", template):
        assert f"{ours[key].summary.mean:.1f}" in said
    card = summaries.Cards(".")._repr_html_()
    assert (
        paper_tables.paper(paper).about["url"] in card
        and f"{paper}/chapter.ipynb" in card
    )


@tabled("paper", PAPERS)
def test_no_two_keys_of_a_table_are_said_alike(paper):
    for table in summaries.tables_of(paper):
        said = [cell_names.in_words(c.key) for c in paper_tables.cells(paper, table)]
        assert len(set(said)) == len(said)
