"From a notebook's cells to a page's: what is folded, what stays, what is rewritten."

import base64
import copy
import io
import runpy
from types import SimpleNamespace

import numpy as np
import pytest
from checkout import ROOT
from PIL import Image
from tables import tabled

from dpcomm.evidence import figures

site = SimpleNamespace(**runpy.run_path(str(ROOT / ".ci" / "fold_pages.py")))
PICTURE = [{"data": {"image/png": ""}}]
TABLE = [{"data": {"text/html": ["<table>", "</table>"]}}]
CARDS = [{"data": {"text/html": "<div></div>"}}]
TEXT = [{"text": ["1\n"]}]


class Cell(dict):
    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


def code(source, outputs=(), **directives):
    own = copy.deepcopy(list(outputs))  # processing a page changes its outputs
    return Cell(cell_type="code", source=source, outputs=own, directives_=directives)


def test_a_figure_is_folded_with_its_steps_and_nothing_else():
    cells = [
        code("import os"),
        code("print(1)", TEXT),
        code("x = 1"),
        code("#| label: fig-x\nplot(x)", PICTURE),
        code("y = 2"),
    ]
    found = [cell.source for cell in site.join_steps(cells)]
    assert found[0].endswith("import os") and "Imports" in found[0]
    assert found[1] == "print(1)" and found[3] == "y = 2" and len(found) == 4
    assert found[2].startswith("#| code-fold: true\n")
    assert found[2].endswith("#| label: fig-x\nx = 1\n\nplot(x)")


def test_a_page_s_own_word_counts():
    for own in ("#| code-fold: false\nimport os", "#| echo: false\nimport os"):
        assert site.fold(own, "imports") == own
    (kept,) = site.join_steps([code("#| code-fold: false\nimport os")])
    assert kept.source == "#| code-fold: false\nimport os"
    assert site.split_directives("#| a: b\n#| c: d\nx\n") == ("#| a: b\n#| c: d\n", "x")
    assert site.split_directives("#| a: b") == ("#| a: b", "")


@tabled(
    "formula, spaced",
    [
        (r"$\log x$", r"$\log\,x$"),
        (r"$\log(x)$", r"$\log(x)$"),
        (r"$\log\left(x\right)$", r"$\log\left(x\right)$"),
        (r"$\log \leq$", r"$\log \leq$"),
        (r"$s \tanh x$", r"$s\,\tanh\,x$"),
        (r"$a \cdot \log x$", r"$a \cdot \log\,x$"),
        (r"$\min_\lambda \alpha$", r"$\min_\lambda\,\alpha$"),
        (r"$\max_{i \in \{1, 2\}} x$", r"$\max_{i \in \{1, 2\}}\,x$"),
        (r"$\logistic x$", r"$\logistic x$"),
        (r"`$\log x$`", r"`$\log x$`"),
        ("costs $5 and $6", "costs $5 and $6"),
        (r"$\|u\|$", r"$\mathord{\Vert}u\mathord{\Vert}$"),
        (r"$\left\|u\right\|$", r"$\left\|u\right\|$"),
        (r"$\lVert u\rVert$", r"$\mathord{\Vert} u\mathord{\Vert}$"),
    ],
)
def test_functions_stand_apart_and_norms_are_as_high_as_letters(formula, spaced):
    assert site.space_functions(formula) == spaced
    assert site.space_functions(spaced) == spaced


def test_a_single_line_that_shows_a_table_is_left_out():
    (kept,) = site.join_steps([code("show()", TABLE)])
    assert kept.source == "#| echo: false\nshow()"
    (kept,) = site.join_steps([code("a = 1"), code("show(a)", TABLE)][:2])
    assert kept.source.startswith("#| code-fold: true")
    (kept,) = site.join_steps([code("plot()", PICTURE)])
    assert kept.source.startswith("#| code-fold: true")


def test_html_is_handed_on_raw_and_other_outputs_are_left():
    output = {"data": {"text/html": ["<b>", "</b>"], "text/plain": "b"}}
    site.keep_html(output)
    assert output["data"] == {
        "text/plain": "b",
        "text/markdown": "```{=html}\n<b></b>\n```",
    }
    for other in ({"text": "x"}, {"data": {"text/plain": "x"}}):
        before = dict(other)
        site.keep_html(other)
        site.lighten(other)
        assert other == before


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return base64.b64encode(buffer.getvalue()).decode()


def test_a_figure_gets_smaller_and_looks_the_same():
    x = np.linspace(0, 6, 200)
    lines = [figures.series(m, x, np.sin(x + i)) for i, m in enumerate(figures.MAIN)]
    figure, _ = figures.curve(lines, "x", "y", "Four waves")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    figures.pyplot().close(figure)
    before = np.asarray(Image.open(buffer).convert("RGB")).astype(int)
    output = {"data": {"image/png": base64.b64encode(buffer.getvalue()).decode()}}
    site.lighten(output)
    small = base64.b64decode(output["data"]["image/png"])
    after = np.asarray(Image.open(io.BytesIO(small)).convert("RGB")).astype(int)
    assert len(small) < 0.6 * len(buffer.getvalue())
    assert np.abs(after - before).mean() < 1 and np.abs(after - before).max() < 60
    stored = output["data"]["image/png"]
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(site.lighten.__globals__, "on_palette")
        site.lighten(output)
    assert output["data"]["image/png"] is stored, "it has its palette"


def test_a_picture_that_would_not_shrink_is_left():
    noise = np.random.default_rng(0).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    output = {"data": {"image/png": png(noise)}}
    before = output["data"]["image/png"]
    site.lighten(output)
    assert output["data"]["image/png"] == before


@pytest.mark.parametrize("room", ["dprec", "training"])
def test_source_is_folded_whatever_a_page_is_about(room):
    class Page:
        path_ = f"nbs/{room}/page.ipynb"
        cells = [
            Cell(cell_type="markdown", source=r"$\log x$"),
            code("#| code-fold: show\n#| code-summary: x\nf", exports=[]),
            code("#| code-fold: true\n#| code-fold: show\ng", exports=[]),
            code("def f(): ...", exporti=[]),
            code("LIMIT = 3", exporti=[]),
            code("import os\n\n\ndef _helper(): ...\n\n\n_CACHE = {}", exporti=[]),
            code("t", TABLE),
        ]

    page = Page()
    processor = site.Site(
        page
    )  # nbdev drops what is `exporti` by now, and keeps `exports`
    ways = [dict(cell.get("directives_", {})) for cell in page.cells]
    kept = {"exports": []}
    assert ways == [{}, kept, kept, kept, kept, {"exporti": []}, {}]
    page.cells = [cell for cell, way in zip(page.cells, ways) if "exporti" not in way]
    processor.begin()
    text, first, second, internal, constant, table = page.cells
    for cell in (internal, constant):
        assert "code-fold: true" in cell.source
    assert text.source == r"$\log\,x$" and "text/markdown" in table.outputs[0]["data"]
    for cell in (first, second):
        assert cell.source.count("code-fold: true") == 1, "whatever the page says"


def test_a_closed_section_may_end_a_page_with_a_sentence_and_not_with_code():
    def page(*sources):
        kinds = ["code" if s == "code" else "markdown" for s in sources]
        cells = [Cell(cell_type=k, source=s) for k, s in zip(kinds, sources)]
        site.close_sections(cells, {2: "Runs"})
        return [cell.source for cell in cells]

    first, _, last = page("## How {.closed}\n\nAll.", "code", "The end.")
    assert first.endswith('title="Runs"}') and last == "The end.\n\n:::::"
    first, *_ = page("## How {.closed}\n\nAll.", "### Costs", "code", "## Other\n\nx")
    assert ":::::" in first, "a subsection is in the box"
    first, *_ = page("## How {.closed}\n\nAll.", "## Other\n\nx", "code")
    assert ":::::" not in first, "no empty box"
    with pytest.raises(ValueError, match="let another section"):
        page("## How {.closed}\n\nAll.", "code")


def experiment(*cells):
    "Sources of an experiment's page as the site orders them; (source, outputs) is code."
    page = [
        code(*cell)
        if isinstance(cell, tuple)
        else Cell(cell_type="markdown", source=cell)
        for cell in cells
    ]
    return [cell.source for cell in site.lead(page)]


def test_an_experiment_leads_with_what_was_found_and_loses_nothing():
    cells = [
        *["# Title", ("import os",), "## Finding", ("f", TEXT)],
        *["## Table\n\nLines.", ("t1", TABLE), "More.", ("t2", TABLE)],
        *["## Words\n\nOnly."],
        *[
            "## Figures\n\nAbout a print.",
            ("print(1)", TEXT),
            ("p1", PICTURE),
            "Of p1.",
        ],
        *["### Second", ("p2", PICTURE)],
        *["## Why we differ", ("t3", TABLE), "## What is missing", ("m", TEXT)],
        *[
            "## How it was run {.closed}\n\nAll.",
            ("cost", TABLE),
            "## References\n\n* A.",
        ],
    ]
    found = experiment(*cells)
    at = found.index("## How it was run {.closed}")
    assert found[:at] == [
        *["# Title", "## Finding", "f", "## Table\n\nLines.", "t1"],
        *["## Figures\n\nAbout a print.", "p1", "Of p1."],
        *["## Why we differ", "t3", "## What is missing", "m"],
    ]
    assert found[at + 1 :] == [
        *["\n\nAll.", "import os", "### Table (continued)", "More.", "t2"],
        *["### Words\n\nOnly.", "### Figures (continued)", "print(1)"],
        *["#### Second", "p2", "cost", "### References\n\n* A."],
    ]
    assert experiment("# A", "## Finding", "x") == ["# A", "## Finding", "x"]


def test_a_widget_stays_and_a_cause_s_table_opens_with_its_caption():
    html = "<table><caption>What we took</caption><tr><td>1</td></tr></table>"
    table = [{"data": {"text/html": html}}]
    page = [
        Cell(cell_type="markdown", source="## Why"),
        code("t", table),
        Cell(cell_type="markdown", source="## Both"),
        code("w", CARDS),
        code("w2", CARDS),
        Cell(cell_type="markdown", source="## How {.closed}"),
    ]
    cells = site.lead(page)
    assert [c.source for c in cells[:4]] == ["## Why", "t", "## Both", "w"]
    folded = (
        "<details><summary>What we took</summary><table><tr><td>1</td></tr></table>"
    )
    assert cells[1].outputs[0]["data"]["text/html"] == f"{folded}</details>"


def test_a_table_is_long_beyond_twelve_rows_and_its_numbers_stay_with_their_errors():
    for rows in (12, 13):
        html = "<table><tr><th>a = b</th></tr>" + "<tr><td>? open [1]</td></tr>" * rows
        output = {"data": {"text/html": f"{html}</table>"}}
        site.mark_long(output)
        site.keep_html(output)
        shown = output["data"]["text/markdown"]
        assert ('class="long"' in shown) == (rows == 13)
        assert "<th>a = b</th>" in shown and "<td>?&nbsp;open&nbsp;[1]</td>" in shown
    short, long = ("<table>" + "<tr></tr>" * n + "</table>" for n in (10, 14))
    output = {"data": {"text/html": short + long + short}}
    site.mark_long(output)
    tables = output["data"]["text/html"].split("</table>")
    assert ['class="long"' in one for one in tables] == [False, True, False, False]
    output = {"data": {"text/html": "<table><tr><td>1.5 ± 0.2</td></tr></table>"}}
    site.keep_html(output)
    assert "1.5&nbsp;±&nbsp;0.2" in output["data"]["text/markdown"]
