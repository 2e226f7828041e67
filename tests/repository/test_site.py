"What happens to a page between its notebook and Quarto, and to its HTML after it."

import json
import re
import runpy
from collections import Counter

import pytest
import yaml
from checkout import EXPERIMENTS, ROOT, SHOWN, text
from nbdev.process import NBProcessor
from tables import tabled


@pytest.fixture(scope="module")
def site(built):
    "Every page as Quarto gets it: the cells that stay, docstrings rendered."
    root, done = built
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    pages = [path.relative_to("nbs") for path in SHOWN]
    return {
        page: json.loads((root / "_proc" / page).read_text())["cells"] for page in pages
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
@tabled("page", [path.relative_to("nbs") for path in SHOWN], ids=str)
def test_nothing_is_lost_on_the_way(page, site):
    notebook = json.loads((ROOT / "nbs" / page).read_text("utf-8"))["cells"]
    if found := list(lost(notebook, site[page])):
        pytest.fail(f"{page}:\n  " + "\n  ".join(found[:20]), pytrace=False)


@tabled("page", SHOWN, ids=str)
def test_figures_are_folded_and_experiments_lead_with_what_was_found(page):
    fold = runpy.run_path(str(ROOT / ".ci" / "fold_pages.py"))["Site"]
    made = NBProcessor(ROOT / page, procs=[fold], rm_directives=False)
    made.process()
    for cell in made.nb.cells:
        if any("image/png" in o.get("data", {}) for o in cell.get("outputs") or ()):
            assert re.search("^#[|] (code-fold|echo: false)", cell.source, re.M)
    if page in EXPERIMENTS:
        titles = re.findall("^## (.*)$", prose_of(made.nb.cells), re.M)
        assert titles[0] == "Finding" and titles[-1].endswith("{.closed}")


def test_the_container_installs_what_the_readme_does():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    (given,) = re.findall(r"install -e '\.\[(.*)\]'", container["postCreateCommand"])
    assert {"run", "dev"} <= {*given.split(",")}, "what test_readme.py asks for"
    assert container["image"].endswith(":3.11"), "the oldest Python that is promised"
