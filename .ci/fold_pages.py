"""Before Quarto renders: which code of a page is folded, which sections open with a click,
formulas spaced as TeX spaces them, tables that Quarto keeps, pictures on a palette.

nbdev calls it for every page (`procs` in settings.ini, with this folder on PYTHONPATH);
nbs/evidence/site.ipynb says the rules.
"""

import ast
import base64
import copy
import re
from pathlib import Path

from dpcomm.evidence.figures import on_palette
from dpcomm.evidence.paper_tables import papers


def role(
    code: str,  # a cell's source without directives
    outputs=(),  # its stored outputs, as a notebook holds them
) -> str:  # a name in `SUMMARIES`, 'step' (no output, no claim) or 'open'
    "Role of a code cell. [Quarto, code folding]"
    kinds = {kind: text for o in outputs for kind, text in o.get("data", {}).items()}
    if any(kind.startswith("image/") for kind in kinds):
        return "figure"
    if "text/html" in kinds:
        return "table" if "<table" in "".join(kinds["text/html"]) else "output"
    body = ast.parse(code).body
    if body and all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in body):
        return "imports"
    if any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(code))):
        return "check"
    return "open" if outputs or not body else "step"


def split_directives(
    source: str,  # a cell
) -> tuple:  # (its lines of directives, its code), two strings
    "Take a cell's first `#|` lines from its code. [Quarto, cell options]"
    lines = source.splitlines(keepends=True)
    first = next((i for i, s in enumerate(lines) if not s.startswith("#|")), len(lines))
    return "".join(lines[:first]), "".join(lines[first:]).strip("\n")


SUMMARIES = {
    "imports": "Imports",
    "figure": "Code of the figure",
    "table": "Code of the table",
    "output": "Code",
    "source": "Source",
    "check": "✓ checked",
    "code": "Code",
}


def fold(
    source: str,  # a cell, directives and code
    kind: str,  # a name in `SUMMARIES`
) -> str:  # the same, closed on the page; as it was where it says so itself
    "Close a cell behind one line. [Quarto, code-fold]"
    if re.search(r"^#\| *(code-fold|echo|include):", source, re.M):
        return source
    if kind in ("table", "output") and "\n" not in split_directives(source)[1]:
        return f"#| echo: false\n{source}"
    return f'#| code-fold: true\n#| code-summary: "{SUMMARIES[kind]}"\n{source}'


def join_steps(
    cells: list,  # code cells without prose between; with `source` and `outputs`
    chapter: bool = False,  # whether checks and examples are folded as well
) -> list:  # the cells that stay, imports and figures folded
    "Fold a row of cells, each figure with the steps that lead to it."
    folded = ("figure", "table", "output") + ("check", "code") * chapter
    kept, waiting = [], []
    for cell in cells:
        directives, code = split_directives(cell.source)
        own = "code-fold" in directives  # the page has said it
        kind = "open" if own else role(code, cell.get("outputs") or ())
        kind = "code" if chapter and kind == "open" and code and not own else kind
        if kind in folded:
            codes = [split_directives(c.source)[1] for c in waiting] + [code]
            cell.source = fold(directives + "\n\n".join(codes), kind)
            kept, waiting = [*kept, cell], []
        elif kind in ("open", "check"):
            kept, waiting = [*kept, *_without_figure(waiting, chapter), cell], []
        else:
            waiting.append(cell)
    return kept + _without_figure(waiting, chapter)


def _without_figure(cells, chapter):
    "Steps that lead to no figure: imports are joined and folded, the rest is as its page's."
    imports = [c for c in cells if role(split_directives(c.source)[1]) == "imports"]
    steps = [c for c in cells if c not in imports]
    if imports:
        first = imports[0]
        codes = (split_directives(c.source)[1] for c in imports)
        first.source = fold("\n".join(codes), "imports")
    if chapter:
        for step in steps:
            step.source = fold(step.source, "code")
    return imports[:1] + steps


FUNCTIONS = "log ln exp sin cos tan sinh cosh tanh max min sup inf lim det arg Pr"
APART = "quad qquad cdot times le leq ge geq ne in to mid sim approx ll gg left right"
NAMED = rf"\\(?:{FUNCTIONS.replace(' ', '|')})(?![A-Za-z])"
INDEX = r"(?:_(?:\{(?:[^{}]|\{[^{}]*\})*\}|\\[A-Za-z]++|\w))?"
POWER = r"(?:\^(?:\{[^{}]*\}|\w))?"
LETTER = r"(?=[A-Za-z0-9]|\\(?!left|big|Big|quad|qquad|cdot|[,;:!{|]|l[ef]|g[eq]))"
AFTER = re.compile(rf"({NAMED}{INDEX}{POWER})\s*{LETTER}")
BEFORE = re.compile(rf"(\\[A-Za-z]++|[A-Za-z0-9)\]}}])\s*({NAMED})")
NORM = re.compile(r"(\\(?:left|right|[bB]igg?[lr]?)\s*)?\\(?:[lr]Vert(?![A-Za-z])|\|)")
BAR = r"\mathord{\Vert}"  # as high as a letter, and close to it
MATH = re.compile(r"`[^`]*`|\$\$.+?\$\$|\$[^$\n]+\$", re.S)


def space_functions(
    text: str,  # Markdown with formulas between dollars
) -> str:  # with `\,` between a named function and what stands beside it
    "Thin spaces around named functions, bars as high as letters. [MathML Core, 3.2.4]"

    def before(found):
        apart = found[1].startswith("\\") and found[1][1:] in APART.split()
        return found[0] if apart else rf"{found[1]}\,{found[2]}"

    def spaced(found):
        formula = found[0]
        if formula.startswith("`"):
            return formula
        formula = NORM.sub(lambda bar: bar[0] if bar[1] else BAR, formula)
        return AFTER.sub(r"\1\\,", BEFORE.sub(before, formula))

    return MATH.sub(spaced, text)


TD = re.compile(r"<td>[^<]*</td>")
TOGETHER = re.compile(r"(?<=[±=●○◐?≠]) | (?=[±=] |\[\d+\])")


def _kept_together(found):
    "A cell of a table whose numbers do not part from their errors, marks and notes."
    return TOGETHER.sub("&nbsp;", found[0])


def keep_html(
    output: dict,  # one stored output of a cell, changed in place
) -> None:
    "Hand HTML to Quarto as a raw block of Markdown. [Pandoc, raw_attribute]"
    data = output.get("data", {})
    if "text/html" in data:
        html = TD.sub(_kept_together, "".join(data.pop("text/html")))
        data["text/markdown"] = f"```{{=html}}\n{html}\n```"


def lighten(
    output: dict,  # one stored output of a cell, changed in place
) -> None:
    "Store a PNG with a palette, where that makes it smaller. [PNG, 11.2.2]"
    picture = output.get("data", {}).get("image/png")
    if picture is None:
        return
    whole = base64.b64decode("".join(picture))
    if whole[25] == 3:  # its type of colour: it has a palette
        return
    if whole[25] == 3:  # its type of colour: it has a palette
        return
    if len(small := on_palette(whole)) < len(whole):
        output["data"]["image/png"] = base64.b64encode(small).decode()


LED = "Finding", "What is missing"  # sections that stay whole, as causes do
HEADED = re.compile(r"## (.*?) *(\{.*\})?$", re.M)


def lead(
    cells: list,  # of an experiment's page; markdown changed in place
) -> list:  # of the same cells, with headings for those that moved
    "A page that leads with what was found; the rest joins its closed section."
    starts = [i for i, cell in enumerate(cells) if _title(cell)] + [len(cells)]
    sections = [cells[i:j] for i, j in zip(starts, starts[1:])]
    kept, box, seen = [], [], set()
    for section in sections:
        title, first = _title(section[0]), section[0].source.split("\n")[0]
        if ".closed" in first:
            how = copy.copy(section[0])
            how.source, section[0].source = first, section[0].source[len(first) :]
            kept, box = [*kept, how], [section[0], *box, *section[1:]]
        elif title.startswith("Why"):
            for output in (o for cell in section for o in cell.get("outputs") or ()):
                fold_table(output)
            kept += section
        elif title in LED:
            kept += section
            seen |= {_made(cell) for cell in section}
        else:
            stay, go = _parted(section, seen)
            kept, box = kept + stay, box + _lowered(go, section[0], bool(stay))
    if not any(".closed" in cell.source for cell in kept):
        return cells
    opening = cells[: starts[0]]
    imports = [cell for cell in opening if _made(cell) == "imports"]
    opening = [cell for cell in opening if cell not in imports]
    return [*opening, *kept, box[0], *imports, *box[1:]]


def _title(cell):
    "What the heading of a section says, where the cell begins one."
    found = cell.cell_type == "markdown" and HEADED.match(cell.source)
    return found[1] if found else ""


def _made(cell):
    "The role of a cell of code; none of what is only folded with another."
    if cell.cell_type != "code" or "exports" in cell.directives_:
        return ""
    return role(split_directives(cell.source)[1], cell.get("outputs") or ())


def _parted(section, seen):
    "Cells of a section that stay, with a figure, table or widget not yet `seen`, and the rest."
    stay, go, waiting, last = [], [], [], []
    for cell in section:
        if cell.cell_type == "markdown" and cell.source.startswith("###") and last:
            last += waiting
            waiting = []
        waiting.append(cell)
        made = _made(cell)
        if made in ("figure", "table", "output") and made not in seen:
            seen.add(made)
            last = stay
        elif cell.cell_type == "code" and cell.get("outputs"):
            last = go
        else:
            continue
        last += waiting
        waiting = []
    (last or go).extend(waiting)
    if stay and section[0] not in stay:  # text before a cell that goes
        stay, go = [section[0], *stay], go[1:]
    return stay, go


def _lowered(go, heading, parted):
    "Cells with their headings a level lower; a heading for those whose own stayed."
    cells = list(go)
    for cell in cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"^(##+ )", r"#\1", cell.source, flags=re.M)
    if parted and cells:
        more = copy.copy(heading)
        more.source = f"### {_title(heading)} (continued)"
        cells = [more, *cells]
    return cells


def fold_table(
    output: dict,  # one stored output of a cell, changed in place
) -> None:
    "Close a table behind its caption."
    data = output.get("data", {})
    page = "".join(data.get("text/html", ()))
    if not page.startswith("<table>"):
        return
    caption = re.search("<caption>(.*?)</caption>", page, re.S)
    line = caption[1] if caption else "Table"
    page = page.replace(caption[0], "") if caption else page
    data["text/html"] = f"<details><summary>{line}</summary>{page}</details>"


LONG = ' class="long"'


def mark_long(
    output: dict,  # one stored output of a cell, changed in place
    rows: int = 12,  # up to which a table is shown whole
) -> None:
    "Mark each long table, of which a script of the site shows the first rows."

    def marked(table):
        long = table[0].count("<tr>") > 1 + rows
        return f"<table{LONG * long}>" + table[0].removeprefix("<table>")

    data = output.get("data", {})
    page = "".join(data.get("text/html", ()))
    if page:
        data["text/html"] = re.sub(r"<table>.*?</table>", marked, page, flags=re.S)


# checks and examples are folded, as in experiments
FOLDED = *papers(), "baselines", "use"
HEADING = re.compile(r"(##+) .*?(\{.*\.closed.*\})?$")
BOX = '\n\n::::: {.callout-note collapse="true" title="%s"}'
TITLES = {2: "The code of this section", 3: "The details of this section"}
RUNS = {2: "Further results, costs, settings, grid, code, smoke run, references"}


def close_sections(
    cells: list,  # of a page, with `cell_type` and `source`, changed in place
    titles: dict = TITLES,  # level of a section -> what its box is called
) -> None:
    "Put a section that asks for it, but for its first cell, into a box. [Quarto, callouts]"
    opened = waiting = depth = (
        0  # level of the section, 0: none; of `:::` around a line
    )
    fenced = False
    for cell, after in zip(cells, [*cells[1:], None]):
        if cell.cell_type != "markdown":
            continue
        lines = []
        for line in cell.source.split("\n"):
            fenced ^= line.startswith("```")
            if line.startswith(":::") and not fenced:
                depth += 1 if line.strip(": ") else -1
            found = None if depth or fenced else HEADING.match(line)
            level = len(found[1]) if found else 9
            if level <= opened:
                lines, opened = [*lines, ":::::", ""], 0
            if level <= (waiting or 9) and found:
                waiting = level if found[2] and not opened else 0
            lines.append(line)
        cell.source = "\n".join(lines)
        if waiting and not _begins(after, waiting):
            cell.source += BOX % titles[waiting]
            opened = waiting
        waiting = 0
    if opened and after is None and cell.cell_type == "markdown":
        cell.source += "\n\n:::::"
    elif opened:
        raise ValueError(
            "the last section is closed: let another section, such as references, or"
            " a sentence follow it"
        )


def _begins(cell, level):
    "Whether a page ends here, or a section of this level or above begins."
    if cell is None:
        return True
    found = cell.cell_type == "markdown" and HEADING.match(cell.source.split("\n")[0])
    return bool(found) and len(found[1]) <= level


class Site:
    "A page on its way to Quarto. [nbdev, procs in settings.ini]"

    def __init__(
        self,
        nb,  # nbdev's notebook: `cells`, each with `cell_type`, `source`; `path_`
    ):
        self.nb = nb
        for cell in nb.cells:
            if cell.cell_type == "code" and _teaches(cell):
                cell.directives_["exports"] = cell.directives_.pop("exporti")

    def begin(self):
        "Fold and space the whole page."
        room = Path(self.nb.path_).parent.name
        set_from_outside = any("parameters" in _tags(cell) for cell in self.nb.cells)
        experiment = room != "use" and set_from_outside
        kept, row, chapter = [], [], experiment or room in FOLDED
        for cell in self.nb.cells:
            if cell.cell_type == "code" and not _is_fixed(cell):
                row.append(cell)
                continue
            kept, row = kept + join_steps(row, chapter), []
            if cell.cell_type == "markdown":
                cell.source = space_functions(cell.source)
            elif "exports" in cell.directives_:
                cell.source = _exported(cell.source)
            kept.append(cell)
        kept += join_steps(row, chapter)
        if experiment:
            kept = lead(kept)
        self.nb.cells[:] = kept
        close_sections(kept, RUNS if experiment else TITLES)
        for cell in self.nb.cells:
            for output in cell.get("outputs", ()):
                if experiment:
                    mark_long(output)
                keep_html(output)
                lighten(output)


def _tags(cell):
    "Tags of a cell."
    return (cell.get("metadata") or {}).get("tags", ())


def _teaches(cell):
    "Whether a cell of internal code defines something that has no underscore."
    if "exporti" not in cell.directives_:
        return False
    body = ast.parse(cell.source).body
    names = [getattr(node, "name", "_") for node in body]
    names += [t.id for node in body for t in _targets(node) if isinstance(t, ast.Name)]
    return any(not name.startswith("_") for name in names)


def _targets(node):
    "What a statement of a module assigns to."
    return getattr(node, "targets", None) or [getattr(node, "target", None)]


def _is_fixed(cell):
    "Whether nbdev, or the page itself, has said how the cell is shown."
    return "exports" in cell.directives_ or cell.source.startswith("#| echo: false")


def _exported(source):
    "Exported code, folded, whatever nbdev said of it."
    lines = [s for s in source.splitlines() if not re.match(r"#\| code-(fold|sum)", s)]
    return fold("\n".join(lines), "source")
