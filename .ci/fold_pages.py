"""Before Quarto renders: which code of a page is folded, which sections open with a click,
and tables that Quarto keeps. nbdev calls it for every page
(`procs` in settings.ini, with this folder on PYTHONPATH).

1. Exported code is on the page, signature open and source folded, whether an importer
   needs it (`#| exports`) or only other modules do (`#| exporti`); of the second kind not
   cells in which every name begins with an underscore, which nbdev drops.
2. Imports are folded, and the code of a figure or table with the steps that lead to it. A
   line that does nothing but show a table is left out.
3. In chapters, baselines, guides and experiments all other code is folded too; a check
   becomes the line "checked", which a click opens with what it prints (site.css puts the
   other lines below what the code made). Elsewhere it stays open.
4. A section whose heading ends in `{.closed}` shows its first cell; the rest is in a box.
5. An experiment shows its finding, why we differ, what is missing, and the sections that
   hold its first figure, table and widget; the others join its closed section.
6. A page overrules this for a cell by `#| code-fold`.

Quarto would load scripts from elsewhere for HTML outputs; as raw blocks they need none.
"""

import ast
import re
from itertools import groupby
from pathlib import Path

from nbdev.maker import ModuleMaker

from dpcomm.evidence.paper_tables import papers

SUMMARIES = {
    "imports": "Imports",
    "figure": "Code of the figure",
    "table": "Code of the table",
    "source": "Source",
    "check": "✓ checked",
}
SHOWN = ("figure", "table", "widget")


def code_of(cell):
    return "\n".join(s for s in cell.source.split("\n") if not s.startswith("#|"))


def role(cell) -> str:  # figure, table, widget, imports, check, step or open
    "Role of a code cell by what it made."
    outputs, tree = cell.get("outputs") or (), ast.parse(code_of(cell))
    made = {kind: text for o in outputs for kind, text in o.get("data", {}).items()}
    if any(kind.startswith("image/") for kind in made):
        return "figure"
    if "text/html" in made:
        return "table" if "<table" in "".join(made["text/html"]) else "widget"
    if tree.body and all(
        isinstance(n, (ast.Import, ast.ImportFrom)) for n in tree.body
    ):
        return "imports"
    if any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        return "check"
    return "open" if outputs or not tree.body else "step"


def fold(cell, kind: str) -> None:
    "Close a cell behind one line, unless it says itself how it is shown. [Quarto]"
    if not re.search(r"^#\| *(code-fold|echo|include):", cell.source, re.M):
        line, printed = SUMMARIES.get(kind, "Code"), cell.get("outputs") or ()
        if kind == "check" and all("text" in output for output in printed):
            cell.source = f"#| classes: checked\n{cell.source}"
        cell.source = f'#| code-fold: true\n#| code-summary: "{line}"\n{cell.source}'


def join_steps(cells: list, everything: bool = False) -> list:
    "Fold a row of code cells, each figure with the steps that lead to it."
    kept, steps = [], []
    for cell in [*cells, None]:
        made = "open" if cell is None or "code-fold" in cell.source else role(cell)
        if made == "step":
            steps.append(cell)
            continue
        if made in SHOWN or everything and cell and code_of(cell):
            alone = not steps and "\n" not in code_of(cell).strip()
            if alone and made in ("table", "widget"):
                cell.source = f"#| echo: false\n{cell.source}"
            elif "code-fold" not in cell.source:
                codes = "\n\n".join(map(code_of, [*steps, cell]))
                directives = cell.source.removesuffix(code_of(cell))
                cell.source, steps = directives + codes, []
                fold(cell, made)
        elif made == "imports":
            fold(cell, made)
        for step in steps if everything else ():
            fold(step, "step")
        kept, steps = [*kept, *steps, *([cell] if cell else [])], []
    return kept


TD = re.compile(r"<td>[^<]*</td>")
TOGETHER = re.compile(r"(?<=[±=●○◐?≠]) | (?=[±=] |\[\d+\])")


def keep_html(output: dict) -> None:
    "Hand HTML to Quarto as a raw block; numbers do not part from their errors and marks."
    data = output.get("data", {})
    if "text/html" in data:
        page = TD.sub(
            lambda cell: TOGETHER.sub("&nbsp;", cell[0]), "".join(data.pop("text/html"))
        )
        data["text/markdown"] = f"```{{=html}}\n{page}\n```"


TITLE = re.compile(r"## (.*?) *(\{.*\})?$", re.M)


def lead(cells: list) -> list:
    """An experiment leads with its finding, causes and gaps, and with the sections that hold
    its first figure, table and widget; the others join the closed one, a level lower.
    """
    starts = [i for i, c in enumerate(cells) if c.cell_type == "markdown"]
    starts = [i for i in starts if TITLE.match(cells[i].source)]
    sections = [cells[i:j] for i, j in zip(starts, [*starts[1:], len(cells)])]
    closed = [s for s in sections if ".closed" in s[0].source.split("\n")[0]]
    if not closed:
        return cells
    kept, box, seen = [], [], set()
    for section in sections:
        title = TITLE.match(section[0].source)[1]
        new = {*map(role, filter(_is_free, section))}.intersection(SHOWN) - seen
        if section is closed[0]:
            box += section[1:]
            continue
        if new or title in ("Finding", "What is missing") or title.startswith("Why"):
            kept, seen = kept + section, seen | new
            continue
        for cell in section:
            if cell.cell_type == "markdown":
                cell.source = re.sub(r"^(##+ )", r"#\1", cell.source, flags=re.M)
        box += section
    return [*cells[: starts[0]], *kept, closed[0][0], *box]


HEADING = re.compile(r"(##+) .*?(\{.*\.closed.*\})?$")
BOX = '\n\n::::: {.callout-note collapse="true" title="%s"}'
TITLES = dict.fromkeys((2, 3), "Show")
RUNS = {2: "Further results, costs, settings, grid, code, smoke run, references"}


def close_sections(cells: list, titles: dict = TITLES) -> None:
    "Put a section that asks for it, but for its first cell, into a box. [Quarto, callouts]"
    opened = waiting = depth = 0  # levels of sections, 0: none; of `:::` around a line
    fenced = False
    for cell, after in zip(cells, [*cells[1:], None]):
        if cell.cell_type != "markdown":
            continue
        lines = []
        for line in cell.source.split("\n"):
            fenced ^= line.startswith("```")
            if line.startswith(":::") and not fenced:
                depth += 1 if line.strip(": ") else -1
            head = None if depth or fenced else HEADING.match(line)
            level = len(head[1]) if head else 9
            if level <= opened:
                lines, opened = [*lines, ":::::", ""], 0
            if level <= (waiting or 9) and head:
                waiting = level if head[2] and not opened else 0
            lines.append(line)
        cell.source = "\n".join(lines)
        if waiting and not _begins(after, waiting):
            cell.source += BOX % titles[waiting]
            opened = waiting
        waiting = 0
    if opened and after is None and cell.cell_type == "markdown":
        cell.source += "\n\n:::::"
    elif opened:
        raise ValueError("the last section is closed: let a sentence follow it")


def _begins(cell, level):
    "Whether a page ends here, or a section of this level or above begins."
    if cell is None:
        return True
    head = cell.cell_type == "markdown" and HEADING.match(cell.source.split("\n")[0])
    return bool(head) and len(head[1]) <= level


class Site:
    "A page on its way to Quarto. [nbdev, procs in settings.ini]"

    def __init__(self, nb):
        self.nb = nb
        for cell in nb.cells:
            if cell.cell_type == "code" and "exporti" in cell.directives_:
                if ModuleMaker.make_all(None, [cell]):
                    cell.directives_["exports"] = cell.directives_.pop("exporti")

    def begin(self):
        "Fold the whole page."
        room = Path(self.nb.path_).parent.name
        tags = [(cell.get("metadata") or {}).get("tags", ()) for cell in self.nb.cells]
        experiment = room != "use" and any("parameters" in each for each in tags)
        everything = experiment or room in (*papers(), "baselines", "use")
        if experiment:
            self.nb.cells[:] = lead(self.nb.cells)
        kept = []
        for free, row in groupby(self.nb.cells, _is_free):
            kept += join_steps([*row], everything) if free else row
        self.nb.cells[:] = kept
        for cell in kept:
            if cell.cell_type == "code" and "exports" in cell.directives_:
                cell.source = re.sub(
                    r"^#\| code-(fold|sum).*\n", "", cell.source, flags=re.M
                )
                fold(cell, "source")
        close_sections(self.nb.cells, RUNS if experiment else TITLES)
        for output in (o for cell in self.nb.cells for o in cell.get("outputs", ())):
            keep_html(output)


def _is_free(cell):
    "Whether it is code, and neither nbdev nor the page has said how it is shown."
    if cell.cell_type != "code" or "exports" in cell.directives_:
        return False
    return not cell.source.startswith("#| echo: false")
