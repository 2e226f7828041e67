"The site without Quarto: nbdev's own processing, then pandoc to HTML with MathML."

import json
import os
import re
import runpy
import shutil
from collections import Counter
from pathlib import Path

import pypandoc
import pytest
import yaml
from checkout import NOTEBOOKS, ROOT, copy, python, text
from tables import tabled

LABEL = re.compile(
    r"\{#((?:eq|prop|fig|tbl|thm|lem|cor|prp|cnj|def|exm|sec|lst)-[\w-]+)"
)
REFERENCE = re.compile(
    r"(?<![\w`])-?@((?:eq|fig|tbl|thm|lem|cor|prp|cnj|def|exm|sec|lst)-[\w-]+)"
)
LINK = re.compile(r"\]\(([^)\s]*?\.ipynb)(#[\w-]+)?\)")


def labels(cells):
    """Everything on a page that can be referred to: labels in the text, and cells with
    a label.
    """
    found = set()
    for cell in cells:
        source = text(cell["source"])
        found |= (
            set(LABEL.findall(source))
            if cell["cell_type"] == "markdown"
            else set(re.findall(r"^#\| *label: *([\w-]+)", source, re.M))
        )
    return found


def prose(source):
    "A markdown cell without its code: there, @ and brackets are no references."
    return re.sub(r"```.*?```|`[^`\n]*`", "", source, flags=re.S)


def markdown(cells):
    "A page as the markdown that Quarto would give to pandoc: text, code, outputs."
    for cell in cells:
        source = text(cell["source"])
        if cell["cell_type"] == "markdown":
            yield re.sub(r"(\$\$)\s*\{#eq-[\w-]+\}", r"\1", source)
        elif cell["cell_type"] == "code":
            shown = "\n".join(
                line for line in source.splitlines() if not line.startswith("#|")
            )
            yield (
                f"```python\n{shown}\n```"
                if shown and "echo: false" not in source
                else ""
            )
            yield from (output(o) for o in cell.get("outputs", []))


def output(o):
    "One output of a cell as markdown."
    data = o.get("data", {})
    image = next((kind for kind in data if kind.startswith("image/")), None)
    if image:
        return f"![figure](data:{image};base64,)"
    if "text/html" in data:
        return "\n```{=html}\n" + text(data["text/html"]) + "\n```\n"
    if "text/markdown" in data:
        return text(data["text/markdown"])
    shown = text(o.get("text", data.get("text/plain", o.get("traceback", ""))))
    return f"~~~~~~\n{shown}\n~~~~~~"


def to_html(source):
    "HTML with MathML; pandoc's warnings are errors."
    return pypandoc.convert_text(
        source,
        "html5",
        format="markdown-yaml_metadata_block",
        extra_args=["--mathml", "--fail-if-warnings"],
    )


def faults(page, cells, pages):
    """What would be wrong with a page on the site. `pages`: page -> its labels and
    heading anchors.
    """
    if isinstance(cells, str):
        yield f"nbdev cannot process it:\n{cells[-3000:]}"
        return
    known = labels(cells)
    for cell in cells:
        source, outputs = text(cell["source"]), cell.get("outputs", [])
        if cell["cell_type"] == "markdown":
            yield from (
                f"@{name} is defined nowhere on the page"
                for name in REFERENCE.findall(prose(source))
                if name not in known
            )
            for target, anchor in LINK.findall(prose(source)):
                path = None if "://" in target else (page.parent / target)
                path = Path(*resolved(path)) if path else None
                if path is not None and path not in pages:
                    yield f"a link to {target}, which is no page"
                elif path is not None and anchor and anchor[1:] not in pages[path]:
                    yield f"a link to {target}{anchor}, where that anchor is not"
        elif re.search(r"^#\| *label: fig-", source, re.M) and not any(
            k.startswith("image/") for o in outputs for k in o.get("data", {})
        ):
            yield (
                f"a labelled figure without a stored image: {source.splitlines()[-1]!r}"
            )
    try:
        html = to_html("\n\n".join(markdown(cells)))
    except RuntimeError as error:
        yield f"pandoc: {error}"
        return
    yield from (
        f"{what!r} on the page"
        for what in ("Traceback (most recent call last)", "&lt;Figure size")
        if what in html
    )


def resolved(path):
    "The parts of a relative path without its '..'."
    parts = []
    for part in path.parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return parts


def anchors(cells):
    """Where a link on another page may point: headings, as pandoc names them,
    boxes and labels.
    """
    told = "\n".join(text(c["source"]) for c in cells if c["cell_type"] == "markdown")
    titles = re.findall(r"^#+ +(.+?)(?: *\{.*\})?$", told, re.M)
    own = re.findall(r"^(?:#+|:::+) .*\{#([\w-]+)", told, re.M)
    plain = (
        re.sub(r"[^\w\s.-]", "", title.replace("$", "")).strip().lower()
        for title in titles
    )
    made = re.findall(
        r' id="([\w-]+)"',
        "\n".join(
            text(o.get("data", {}).get("text/markdown", ""))
            for cell in cells
            for o in cell.get("outputs", [])
        ),
    )
    return (
        {*made, *own}
        | labels(cells)
        | {re.sub(r"^[^a-z]+", "", re.sub(r"\s+", "-", title)) for title in plain}
    )


PROCESS = """
import sys, traceback
sys.path.append(".ci")
import nbdev.serve, nbdev.serve_drv
process = nbdev.serve_drv.main
def keep_going(job):
    try: process(job)
    except Exception: job[1].with_suffix(".error").write_text(traceback.format_exc())
nbdev.serve_drv.main = keep_going
nbdev.serve.proc_nbs(n_workers=0, force=True)
"""


def processed(request, tmp_path_factory):
    "A checkout whose pages nbdev has processed: the built site's, where that is tested."
    tested = {item.path.name for item in request.session.items}
    if "test_built_site.py" in tested and shutil.which("quarto"):
        if "DPCOMM_SITE" not in os.environ:
            root, done = request.getfixturevalue("built")
            if done.returncode == 0:
                return root
    root = copy(tmp_path_factory.mktemp("site") / "repository")
    done = python("-c", PROCESS, cwd=root, root=root)
    assert done.returncode == 0, done.stderr[-6000:]
    return root


@pytest.fixture(scope="module")
def site(request, tmp_path_factory):
    """Every page after nbdev's processing: the cells that stay, docstrings rendered. A
    page that fails holds its error instead.
    """
    root = processed(request, tmp_path_factory)
    made = {
        path.relative_to("nbs"): root / "_proc" / path.relative_to("nbs")
        for path in NOTEBOOKS
    }
    return {
        page: (
            json.loads(path.read_text())["cells"]
            if path.exists()
            else path.with_suffix(".error").read_text()
        )
        for page, path in made.items()
    }


WORD = re.compile(r"[^\W\d_]{2,}")


def words(text):
    "The words of a text, formulas left out: their spaces are mended on the way."
    return Counter(
        WORD.findall(re.sub(r"\$\$.+?\$\$|\$[^$\n]+\$", "", text, flags=re.S))
    )


def hidden(source):
    "Whether a code cell is not for the page: imports of the module, and nbdev's own."
    return bool(re.match(r"#\| *(export|exporti|hide|default_exp)\b(?!s)", source))


def lost(notebook, page):
    "Words and lines of code that stand in a notebook and not on its page."
    shown = "\n".join(map(source_of, page))
    for kind, count in (words(prose_of(notebook)) - words(shown)).items():
        yield f"{count} x {kind!r}"
    kept = {line.strip() for line in shown.splitlines()}
    for cell in notebook:
        source = text(cell["source"])
        if cell["cell_type"] == "code" and not hidden(source):
            yield from (
                f"the line {line.strip()!r}"
                for line in source.splitlines()
                if line.strip()
                and not line.startswith("#|")
                and line.strip() not in kept
            )


def source_of(cell):
    "A cell's text; of front matter, which escapes letters, its values."
    if cell["cell_type"] != "raw":
        return text(cell["source"])
    values = yaml.safe_load(text(cell["source"]).strip().strip("-"))
    return "\n".join(map(str, values.values()))


def prose_of(notebook):
    "All markdown of a notebook."
    return "\n".join(
        text(cell["source"]) for cell in notebook if cell["cell_type"] == "markdown"
    )


@pytest.mark.slow
@tabled("page", [path.relative_to("nbs") for path in NOTEBOOKS], ids=str)
def test_nothing_is_lost_on_the_way(page, site):
    notebook = json.loads((ROOT / "nbs" / page).read_text("utf-8"))["cells"]
    if found := list(lost(notebook, site[page])):
        pytest.fail(f"{page}:\n  " + "\n  ".join(found[:20]), pytrace=False)


@pytest.fixture(scope="module")
def html_faults(site, pool):
    "The faults of every page, pandoc running on two pages at a time."
    pages = {
        page: anchors([] if isinstance(cells, str) else cells)
        for page, cells in site.items()
    }
    return {
        page: pool.submit(
            lambda page=page, cells=cells: list(faults(page, cells, pages))
        )
        for page, cells in site.items()
    }


@pytest.mark.slow
@tabled("page", [path.relative_to("nbs") for path in NOTEBOOKS], ids=str)
def test_page_renders(page, html_faults):
    if found := html_faults[page].result():
        pytest.fail(f"{page}:\n  " + "\n  ".join(found), pytrace=False)


def test_the_container_installs_what_the_readme_does():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    asked = re.findall(
        r"pip install -e '\.\[(\w+)\]'", (ROOT / "README.md").read_text()
    )
    (given,) = re.findall(
        r"pip install -e '\.\[([\w,]+)\]'", container["postCreateCommand"]
    )
    assert {"run", "dev"} == {*asked} & {"run", "dev"} <= {*given.split(",")}
    assert container["image"].endswith(":3.11"), "the oldest Python that is promised"


FOLD = '<details class="code-fold">\n<summary>{}</summary>\nx\n</details>\n'
MADE = '<div class="cell-output cell-output-{}"><div>1</div></div>\n'


@tabled(
    "line, made, checks, order",
    [
        ("Code of the figure", "display", True, "output summary end"),
        ("✓ checked", "stdout", True, "summary output end"),
        ("✓ checked", "stdout", False, "output summary end"),
        ("✓ checked", "display", True, "output summary end"),
    ],
)
def test_folded_code_follows_what_it_made(line, made, checks, order):
    tidy = runpy.run_path(str(ROOT / ".ci" / "tidy_site.py"))["code_below"]
    fold, output = FOLD.format(line), MADE.format(made)
    page = f'<p>a</p>\n<div id="c1" class="cell">\n{fold}{output}</div>\n<p>b</p>'
    done = tidy(page, checks)
    marks = dict(output='"cell-output', summary="<summary>", end="</details>")
    assert " ".join(sorted(marks, key=lambda m: done.index(marks[m]))) == order
    assert sorted(done) == sorted(page) and tidy(done, checks) == done
    alone = f'<div id="c1" class="cell">\n{fold}</div>'
    assert tidy(alone, checks) == alone


def test_pictures_below_the_first_are_fetched_when_they_are_near():
    tidy = runpy.run_path(str(ROOT / ".ci" / "tidy_site.py"))["fetched_late"]
    sized, late = '<img src="a" width="2" height="1">', '<img loading="lazy" src="a"'
    unsized = '<img src="b">'  # a page would jump when it comes
    page = tidy(f"{unsized}{sized}{unsized}{sized}{sized}")
    assert page.startswith(unsized + sized + unsized) and page.count(late) == 2
    assert tidy(page) == page and tidy(unsized) == unsized


def test_what_people_type_leads_to_a_page():
    meant = runpy.run_path(str(ROOT / ".ci" / "tidy_site.py"))["MEANT"].values()
    pages = {path.relative_to("nbs").with_suffix(".html") for path in NOTEBOOKS}
    assert {Path(address.split("#")[0]) for address in meant} <= pages
