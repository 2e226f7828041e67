"From a notebook's cells to a page's: what is folded, what stays, what is rewritten."

import copy
import runpy
from types import SimpleNamespace

import pytest
from checkout import ROOT
from tables import tabled

site = SimpleNamespace(**runpy.run_path(str(ROOT / ".ci" / "fold_pages.py")))
PICTURE = [{"data": {"image/png": ""}}]
TABLE = [{"data": {"text/html": ["<table>", "</table>"]}}]
TEXT = [{"text": ["1\n"]}]


class Cell(dict):
    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


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


def test_in_a_chapter_all_code_is_folded_but_what_the_page_says_itself():
    own = "#| code-fold: false\nx = 2"
    cells = page_of(("print(1)", TEXT), ("assert x", TEXT), (own,), ("y = 3",))
    text, check, kept, step = site.join_steps(cells, everything=True)
    assert kept.source == own and "✓ checked" in check.source
    assert all("code-fold: true" in cell.source for cell in (text, check, step))


def test_a_single_line_that_shows_a_table_is_left_out():
    (kept,) = site.join_steps(page_of(("show()", TABLE)))
    assert kept.source == "#| echo: false\nshow()"
    for cells in ([("a = 1",), ("show(a)", TABLE)], [("plot()", PICTURE)]):
        (kept,) = site.join_steps(page_of(*cells))
        assert kept.source.startswith("#| code-fold: true")


@tabled(
    "formula, spaced",
    [
        (r"$\log x$", r"$\log\,x$"),
        (r"$\log(x)$", r"$\log(x)$"),
        (r"$\log\left(x\right)$", r"$\log\left(x\right)$"),
        (r"$\log \leq$", r"$\log \leq$"),
        (r"$s \tanh x$", r"$s\,\tanh\,x$"),
        (r"$a \cdot \log x$", r"$a \cdot \log\,x$"),
        (r"$\max_{i \in \{1, 2\}} x$", r"$\max_{i \in \{1, 2\}}\,x$"),
        (r"$\logistic x$", r"$\logistic x$"),
        (r"`$\log x$`", r"`$\log x$`"),
        (r"$\left\|u\right\|$", r"$\left\|u\right\|$"),
        (r"$\lVert u\rVert$", r"$\mathord{\Vert} u\mathord{\Vert}$"),
    ],
)
def test_functions_stand_apart_and_norms_are_as_high_as_letters(formula, spaced):
    assert site.space_functions(formula) == spaced
    assert site.space_functions(spaced) == spaced


def test_html_is_handed_on_raw_with_numbers_beside_their_errors():
    output = {"data": {"text/html": ["<td>1 ± 2</td>", "<b>? x</b>"], "text/plain": ""}}
    site.keep_html(output)
    wanted = "```{=html}\n<td>1&nbsp;±&nbsp;2</td><b>? x</b>\n```"
    assert output["data"] == {"text/plain": "", "text/markdown": wanted}
    site.keep_html(plain := {"text": "x"})
    assert plain == {"text": "x"}


@pytest.mark.parametrize("room", ["dprec", "training"])
def test_source_is_folded_whatever_a_page_is_about(room):
    page = SimpleNamespace(path_=f"nbs/{room}/page.ipynb")
    page.cells = [
        Cell(cell_type="markdown", source=r"$\log x$"),
        code("#| code-fold: show\n#| code-summary: x\nf", exports=[]),
        code("def f(): ...", exporti=[]),
        code("import os\n\n\ndef _helper(): ...\n\n\n_CACHE = {}", exporti=[]),
        code("t", TABLE),
    ]
    processor = site.Site(page)  # nbdev drops what is `exporti` by now
    ways = [[*cell.get("directives_", ())] for cell in page.cells]
    assert ways == [[], ["exports"], ["exports"], ["exporti"], []]
    del page.cells[3]
    processor.begin()
    text, first, internal, table = page.cells
    assert text.source == r"$\log\,x$" and "text/markdown" in table.outputs[0]["data"]
    for cell in (first, internal):
        assert cell.source.count("code-fold") == 1, "whatever the page says"


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
