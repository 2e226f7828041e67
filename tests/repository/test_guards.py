"""The rules of the house, read from the files: who imports whom, what a page looks
like, what is in sync with what.
"""

import ast
import json
import re
import subprocess
from collections import Counter
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest
import yaml
from checkout import (
    EXPERIMENTS,
    MODULES,
    NOTEBOOKS,
    ROOT,
    SITE,
    cells,
    copy,
    files,
    public,
    python,
    tree,
)
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tables import tabled
from test_wheel import SETTINGS

# Which room may import from which: a new arrow is drawn here, so that it shows in review. Arrows point down, and form no circle.
ROOMS = {
    "core": "",
    "privacy": "core",
    "secagg": "core",
    "datasets": "core",
    "evidence": "core privacy",
    "mechanisms": "core privacy secagg",
    "training": "core privacy datasets mechanisms",
    "interop": "core privacy secagg mechanisms",
    "experiments": "core privacy secagg datasets evidence mechanisms training",
    "cli": "core privacy datasets evidence mechanisms training interop experiments",
    "__main__": "cli",
}
WITHOUT_TORCH = (
    "core.checks",
    "core.files",
    "privacy",
    "interop.floor",
    "evidence",
    "experiments.run.runs",
    "experiments.run.sweep",
    "cli",
)


def name(module):
    "Dotted name of a module below dpcomm: 'mechanisms.rec'."
    return ".".join(module.with_suffix("").parts[1:]).removesuffix(".__init__")


NAMES = {name(module) for module in MODULES}


def within(module):
    "The dpcomm modules that a module imports."
    package, named = ".".join(module.parts[:-1]), set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            named |= {f"{base}.{alias.name}" for alias in node.names} | {base}
    return {dotted.removeprefix("dpcomm.") for dotted in named} & NAMES - {name(module)}


IMPORTS = {name(module): within(module) for module in MODULES}


def test_rooms_import_what_the_table_allows():
    found = {room: set() for room in ROOMS}
    for module in IMPORTS.keys() - {"__init__"}:
        rooms = {other.split(".")[0] for other in IMPORTS[module]}
        found[module.split(".")[0]] |= rooms - {module.split(".")[0]}
    new = {room: found[room] - {*ROOMS[room].split()} for room in found}
    assert not any(new.values()), f"arrows that the table does not have: {new}"


def test_no_imports_go_in_a_circle():
    rooms = {room: others.split() for room, others in ROOMS.items()}
    assert all(
        list(TopologicalSorter(graph).static_order()) for graph in (rooms, IMPORTS)
    )


def test_modules_without_torch_load_without_torch():
    rooms = tuple(f"{room}." for room in WITHOUT_TORCH)
    here = [f"dpcomm.{module}" for module in NAMES if f"{module}.".startswith(rooms)]
    assert len(here) > len(WITHOUT_TORCH)
    code = f"import sys, {', '.join(here)}; assert 'torch' not in sys.modules"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


# ---- what is generated agrees with its source


@pytest.mark.slow
def test_package_and_notebooks_are_what_nbdev_writes(tmp_path):
    "Run nbdev_export and nbdev_clean."
    root = copy(tmp_path / "repository")
    for path in MODULES:
        if path.parent != Path("dpcomm") or not path.stem.startswith("__"):
            (root / path).unlink()
    code = (
        "from nbdev.doclinks import nbdev_export; from nbdev.clean import nbdev_clean"
    )
    done = python("-c", f"{code}; nbdev_export(); nbdev_clean()", cwd=root, root=root)
    assert done.returncode == 0, done.stderr
    ours = {p for p in files() if p.parts[0] == "dpcomm" and p.suffix == ".py"}
    theirs = {p.relative_to(root) for p in (root / "dpcomm").rglob("*.py")}
    assert ours == theirs - {Path("dpcomm/_modidx.py")}
    both = sorted({*ours, *NOTEBOOKS})
    old = [p for p in both if (ROOT / p).read_bytes() != (root / p).read_bytes()]
    assert not old, f"run nbdev_export and nbdev_clean: {old}"


# ---- what a notebook looks like


def tracebacks(cell):
    for output in cell.outputs:
        told = json.dumps(output)
        if output["output_type"] == "error" or "Traceback (most recent" in told:
            yield "a stored traceback"
        if "<Figure size" in told and '"image/' not in told:
            yield "a figure in words, without its image"


def long_lines(cell):
    "ruff lets captions stand on one line, so it does not measure notebooks."
    for line in cell.code.splitlines() if cell.kind == "code" else ():
        if len(line) > 100:
            yield f"{len(line)} characters: {line.strip()[:40]}"


def mixed_imports(cell):
    "The docs build runs every cell with an import, so nothing else may stand there."
    code = cell.code if cell.kind == "code" and not cell.exported else ""
    kinds = {type(node) for node in ast.walk(ast.parse(code))}
    if kinds & {ast.Import, ast.ImportFrom} and kinds & {ast.Expr, ast.Assign}:
        yield "imports and other code in one cell"


def undescribed_figures(cell):
    if any(d.startswith("label: fig-") for d in cell.directives):
        for need in ("fig-cap:", "fig-alt:"):
            if not any(d.startswith(need) for d in cell.directives):
                yield f"a labelled figure without {need}"


PAGES_NAMED = Counter(
    name
    for path in NOTEBOOKS
    for name in {path.stem, path.relative_to("nbs").with_suffix("").as_posix()}
)
PAGE_NAMED = re.compile(r"\[[^]\n]*?\bpage ([\w/-]+)|\bpage (\w+[/_][\w/-]+)")


def lost_pages(cell):
    "Pages that code names, as `[page pairs]` or `page dprec/theorem`."
    if cell.kind == "code" and "page " in cell.code:
        for name in map("".join, PAGE_NAMED.findall(cell.code)):
            if PAGES_NAMED[name] != 1:
                yield f"page {name}: {PAGES_NAMED[name]} pages have this name, not one"


PLAYS = {"settings", "grid"}  # of an experiment, called by the runner
CELL_RULES = tracebacks, long_lines, mixed_imports, undescribed_figures, lost_pages


def faults(page):
    "What is wrong with a page, cell by cell and as a whole."
    raw = (ROOT / page).read_bytes()
    if json.loads(raw)["metadata"].get("kernelspec", {}).get("name") != "python3":
        yield "another kernel than python3"
    if len(raw) >= 1_000_000:
        yield f"{len(raw):,} bytes"
    first = cells(page)[0].source.splitlines()
    told = any(line.startswith("> ") for line in first[1:4])
    if not (first[0].startswith("# ") and told):
        yield "the first cell is not `# Title` and `> one line`"
    if page in EXPERIMENTS and sum("parameters" in c.tags for c in cells(page)) != 1:
        yield "an experiment needs exactly one cell tagged parameters"
    for cell in cells(page):
        for rule in CELL_RULES:
            yield from (f"{cell.label!r}: {fault}" for fault in rule(cell))


def demand_none(found, what):
    "Fail with every fault on a line of its own."
    if found := list(found):
        pytest.fail(f"{what}:\n  " + "\n  ".join(found), pytrace=False)


@tabled("notebook", NOTEBOOKS, ids=str)
def test_page_keeps_the_style(notebook):
    demand_none(faults(notebook), str(notebook))


# ---- names and docstrings


def undescribed(module):
    "What `help` of a public name leaves out: the name itself, or an argument."
    classes = {n.name for n in public(module).values() if isinstance(n, ast.ClassDef)}
    classes |= {  # of other modules of the package; their help says what they are
        alias.asname or alias.name
        for node in tree(module).body
        if isinstance(node, ast.ImportFrom) and (node.level or "dpcomm" in node.module)
        for alias in node.names
        if alias.name[0].isupper() and not alias.name.isupper()
    }
    for node in public(module).values():
        said = ast.get_docstring(node) or ""
        if not said:
            yield f"{node.name} has no docstring"
        if isinstance(node, ast.FunctionDef) and node.name not in PLAYS:
            parts = ast.iter_child_nodes(node.args)
            for arg in [part for part in parts if isinstance(part, ast.arg)]:
                its = getattr(arg.annotation, "id", None)
                its = its or str(getattr(arg.annotation, "value", "")).split(".")[-1]
                if its not in classes and not re.search(rf"(^|\s){arg.arg}:\s", said):
                    yield f"{node.name}: {arg.arg} is not described; say shape, unit, range"


@tabled("module", MODULES, ids=str)
def test_exported_names_are_described(module):
    demand_none(undescribed(module), str(module))


# ---- the rest of the repository

# An absolute path of somebody's machine, a package index, or an address of a project that
# has none yet (an account of its name is somebody else's).
MACHINE = re.compile(
    r"(?<![\w.:/])/(?:work|farm|root|tmp|home)/[\w.-]+|file:///|(?:extra-)?index-url"
    r"|find-links|(?:pypi|simple)\.[\w.-]*/|/simple/|github\.com/dpcomm"
    r"|dpcomm\.github\.io|@ git\+|dpcomm\.(?:org|dev|io)"
)
CONFLICT = re.compile(r"^([<>])\1{6} ", re.M)
TEXT = ".ipynb .py .md .toml .ini .yml .json .sh .txt .cff .scss .css .html .js".split()


def test_files_are_small_whole_and_name_nobody_s_machine():
    for path in files():
        whole = (ROOT / path).read_bytes()
        records = path.parts[:3] == ("dpcomm", "assets", "results")
        limit = 10_000 * whole.count(b"\n") if records else 1_500_000
        assert len(whole) <= limit, f"{path} is too large to track"
        named = path.name in ("LICENSE", "test_guards.py")
        if path.suffix in ("", *TEXT) and not named:
            text = whole.decode("utf-8", errors="replace")
            assert not CONFLICT.search(text), f"conflict marks in {path}"
            assert not (match := MACHINE.search(text)), f"{path}: {match[0]}"


def test_readme_links_are_alive():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", readme):
        path = "".join(target).partition("#")[0]
        outside = path.startswith(("http", "mailto:"))
        assert outside or (ROOT / path).exists(), f"README links to {path}"


def test_security_names_tests_that_exist():
    told = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    found = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", told)
    assert len(found) > 12
    for path, test in found:
        assert re.search(rf"^def {test}\b", (ROOT / path).read_text(), re.M), (
            f"SECURITY.md names {path}::{test}, which does not exist"
        )


def test_the_gate_is_a_script_that_runs():
    script = (ROOT / ".ci" / "run").read_text()
    assert "\npytest -m slow\n" in script and len(script.splitlines()) <= 60
    assert subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")]).returncode == 0
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111, ".ci/run is not executable"


def test_workflows_take_actions_by_their_commits():
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        actions = re.findall(r"uses: (\S+)", path.read_text("utf-8"))
        assert actions and all(re.search(r"@[0-9a-f]{40}$", a) for a in actions), path


def test_constraints_pin_every_requirement():
    lines = (ROOT / ".ci" / "constraints.txt").read_text().split()
    assert all(re.fullmatch(r"[\w.-]+==[\w.+!-]+", line) for line in lines)
    pinned = {canonicalize_name(line.split("==")[0]) for line in lines}
    wanted = " ".join(
        SETTINGS[f"{extra}requirements"] for extra in ("", "run_", "dev_")
    )
    names = {canonicalize_name(Requirement(word).name) for word in wanted.split()}
    assert names <= pinned, f"not pinned: {names - pinned}"


def test_pages_that_the_papers_files_name_are_there():
    for path in sorted((ROOT / "dpcomm" / "assets" / "papers").glob("*.toml")):
        named = set(re.findall(r"\bpage ([a-z][\w/-]*)", path.read_text("utf-8")))
        assert not {name for name in named if PAGES_NAMED[name] != 1}, path.name


def test_the_site_shows_sixty_pages_and_holds_the_other_notebooks_as_files():
    stub = yaml.safe_load((ROOT / "nbs" / "_quarto.yml").read_text())
    assert stub == {
        "project": {"type": "website"},
        "metadata-files": ["../_quarto.yml"],
    }
    assert SITE["format"]["html"]["html-math-method"] == "mathml"
    assert SITE["execute"]["enabled"] is False
    menu = SITE["website"]["sidebar"]["contents"]
    listed = [page for section in menu for page in section["contents"]]
    assert listed == SITE["project"]["render"] and len({*listed}) == len(listed) <= 60
    pages = {path.relative_to("nbs").as_posix() for path in NOTEBOOKS}
    assert {*listed} <= pages and "*/*.ipynb" in SITE["project"]["resources"]
    assert all(page.count("/") == 1 for page in pages - {*listed})
