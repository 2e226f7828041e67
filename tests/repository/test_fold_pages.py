"From a notebook's cells to a page's: what is folded, what stays, what is rewritten."

import copy
import runpy
from types import SimpleNamespace

import pytest
from checkout import ROOT
from fastcore.basics import AttrDict as Cell

site = SimpleNamespace(**runpy.run_path(str(ROOT / ".ci" / "fold_pages.py")))
PICTURE = [{"data": {"image/png": ""}}]
TABLE = [{"data": {"text/html": ["<table>", "</table>"]}}]
TEXT = [{"text": ["1\n"]}]


def code(source, outputs=(), **directives):
    own = copy.deepcopy(list(outputs))  # processing a page changes its outputs
    return Cell(cell_type="code", source=source, outputs=own, directives_=directives)


def page_of(*cells):
    "(source, outputs) is code."
    return [
        code(*cell)
        if isinstance(cell, tuple)
        else Cell(cell_type="markdown", source=cell)
        for cell in cells
    ]


def test_a_figure_is_folded_with_its_steps_and_nothing_else():
    cells = page_of(
        *[("import os",), ("print(1)", TEXT), ("x = 1",)],
        *[("#| label: fig-x\nplot(x)", PICTURE), ("y = 2",)],
    )
    first, text, figure, step = [cell.source for cell in site.join_steps(cells)]
    assert first.endswith("import os") and "Imports" in first
    assert (text, step) == ("print(1)", "y = 2")
    assert figure.startswith("#| code-fold: true\n")
    assert figure.endswith("#| label: fig-x\nx = 1\n\nplot(x)")


def test_a_closed_section_may_end_a_page_with_a_sentence_and_not_with_code():
    def page(*sources):
        cells = page_of(*((s,) if s == "code" else s for s in sources))
        site.close_sections(cells, {2: "Runs"})
        return [cell.source for cell in cells]

    first, _, last = page("## How {.closed}\n\nAll.", "code", "The end.")
    assert first.endswith('title="Runs"}') and last == "The end.\n\n:::::"
    first, *_ = page("## How {.closed}\n\nAll.", "### Costs", "code", "## Other\n\nx")
    assert ":::::" in first, "a subsection is in the box"
    first, *_ = page("## How {.closed}\n\nAll.", "## Other\n\nx", "code")
    assert ":::::" not in first, "no empty box"
    with pytest.raises(ValueError, match="let a sentence follow"):
        page("## How {.closed}\n\nAll.", "code")


def test_an_experiment_leads_with_what_was_found_and_loses_nothing():
    cells = page_of(
        *["# Title", ("import os",), "## Finding", ("f", TEXT)],
        *["## Table\n\nLines.", ("t1", TABLE), "## Words\n\nOnly.", ("t2", TABLE)],
        *["## Figure", ("p1", PICTURE), "## Why we differ", ("t3", TABLE)],
        *["## How it was run {.closed}\n\nAll.", ("cost", TABLE), "## References"],
    )
    before = len(cells)
    told = [cell.source for cell in site.lead(cells)]
    assert told == [
        *["# Title", "import os", "## Finding", "f", "## Table\n\nLines.", "t1"],
        *["## Figure", "p1", "## Why we differ", "t3"],
        *["## How it was run {.closed}\n\nAll.", "### Words\n\nOnly.", "t2"],
        *["cost", "### References"],
    ]
    assert len(told) == before
