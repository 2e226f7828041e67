"A claim's status follows from its numbers by a rule; every number is counted once."

import functools
import itertools
import json
import re
from collections import Counter

from checkout import ROOT
from made_up import replace
from tables import tabled

from dpcomm.evidence import claims, paper_tables, verdicts

PAPERS = paper_tables.papers()
evidence = functools.cache(verdicts.evidence)
SIZE = paper_tables.cell("dprec", "mnist.fedavg.comm")


def test_the_status_is_the_rule_of_the_page_for_every_mix():
    for told in itertools.product(["holds", "fails", ""], repeat=4):
        holds, fails = told.count("holds"), told.count("fails")
        for cannot in ("", "no data"):
            if holds == 4:
                word = "reproduced"
            elif holds:
                word = "in part"
            elif fails > 2:
                word = "refuted"
            else:
                word = "cannot be tested here" if cannot and not fails else "open"
            assert claims.status_of([*told], "", cannot) == word
    assert claims.status_of([], "false") == "refuted"
    assert claims.status_of(["holds"], "gap") == "open"
    assert claims.status_of([]) == "open"


@tabled("value, says", [(43.0, "holds"), (43.7, "holds"), (50.0, "fails")])
def test_one_computed_number_counts(value, says):
    assert claims.says(SIZE, verdicts.cell_summary([value])) == says
    puzzle = replace(SIZE, own=value, value=value + 9)
    assert claims.says(puzzle, verdicts.cell_summary([value])) == "", "refutes nobody"


@tabled("paper", PAPERS)
def test_committed_claims_have_a_place_a_status_and_seeds(paper):
    told = claims.rows(paper, evidence(paper), base="nbs")
    assert 6 <= len(told) <= 11
    assert len({r.claim.text for r in told}) == len(told)
    for r in told:
        assert r.claim.where and r.status in claims.STATUS and r.seeds
        assert r.number or r.claim.kind or r.claim.cannot, r.claim.text
        assert (ROOT / r.link.partition("#")[0]).is_file(), r.link
        if r.status in ("reproduced", "refuted") and not r.claim.kind:
            votes = [
                s.n
                for c, s in claims._numbers(r.claim, paper, evidence(paper))
                if claims.says(c, s) and c.kind != "exact"
            ]
            assert all(n >= claims.SEEDS for n in votes), r.claim.text
    counted = re.findall(r"\d+", claims.counts(paper, evidence(paper)))
    assert sum(map(int, counted)) == len(told)


@tabled("paper", PAPERS)
def test_a_claim_about_a_proof_is_what_the_errata_say(paper):
    page = json.loads((ROOT / "nbs" / "reference" / "errata.ipynb").read_text("utf-8"))
    text = "\n".join("".join(cell["source"]) for cell in page["cells"])
    for claim in paper_tables.paper(paper).claims:
        if claim.erratum:
            row = re.search(
                rf"^\| \*\*{claim.erratum}\*\* .* \| (\w+), \w+: .*$", text, re.M
            )
            assert row and row[1] == claim.kind, claim.erratum
            assert claim.link.removeprefix("../") in row[0], claim.erratum


def test_numbers_are_looked_up_and_nothing_is_said_where_one_is_missing():
    found = evidence("dprec")
    key = "ours.full.tight.mnist.eps3.rec.acc"
    s, gaps = found.ours[key].summary, f"{{{key}}} {{se {key}}} {{n {key}}} {{g {key}}}"
    text = f"{s.mean:.1f} {s.se:.1f} {s.n} {s.mean:.3g}"
    assert claims.fill(gaps, "dprec", found) == text
    assert claims.fill("{paper mnist.eps3.rec.acc}", "dprec", found) == "69.5"
    assert claims.fill("{femnist.eps1.rec.acc}", "dprec", found) == ""
    held, left = claims.fill(
        "{holds *_minus_*} {open *_minus_*}", "imvu", evidence("imvu")
    ).split()
    assert int(held) + int(left) <= len(paper_tables.cells("imvu"))


@tabled("paper", PAPERS)
def test_every_number_is_counted_once_and_in_its_class(paper):
    p, judged = paper_tables.paper(paper), evidence(paper)
    counted = claims.tally(paper, found=judged)
    assert list(counted) == [c for c in claims.CLASSES if c in counted]
    words = Counter()
    for cell in p.cells:
        word = verdicts.verdict(cell, judged.summary(cell))
        counts = cell.kind != "shown" and word != "not comparable"
        words[word] += counts and cell.table not in p.stand_ins
    assert sum(map(Counter, counted.values()), Counter()) == +words
    assert counted.get("not run", {}).keys() <= {"not run"}
    for table in p.stand_ins:
        apart = claims.tally(paper, table, judged)
        cells = [c for c in paper_tables.cells(paper, table) if c.kind != "shown"]
        assert sum(sum(each.values()) for each in apart.values()) == len(cells)


@tabled("paper", PAPERS)
def test_no_row_is_lost_and_no_disagreement_grouped(paper):
    for table in paper_tables.tables(paper):
        alone, named = claims.groups(paper, table, evidence(paper))
        rows = [row[0] for row in alone.rows]
        rows += [row[0] for group in named.values() for row in group.rows]
        keys = [paper_tables.in_words(c.key) for c in paper_tables.cells(paper, table)]
        assert sorted(rows) == sorted(keys)
        for what, group in named.items():
            cells = f"{(n := len(group.rows))} number{'s' * (n > 1)}: "
            assert what.startswith(cells) and (len(group.rows) > 2 or "not run" in what)
            word = re.search(r"numbers?: . ([a-z ]+)", what)[1]
            assert word in claims.GROUPED, what
        for row in alone.rows:
            for number in map(int, re.findall(r"\[(\d+)\]", row[4])):
                assert number <= len(alone.notes)


def test_the_headline_says_the_epsilon_of_the_run_as_it_was_run():
    page = json.loads((ROOT / "nbs/reference/findings.ipynb").read_text("utf-8"))
    text = json.dumps([cell.get("outputs", []) for cell in page["cells"]])
    replaced = re.search(r"two have epsilon ([\d.]+) and ([\d.]+)\.", text)[2]
    assert f"which carry no data ({replaced} where" in claims.finding("dprec")
