"""The rules of the house, read from the files: who imports whom, what a page looks
like, what is in sync with what.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import json
import re
import subprocess
from collections import Counter
from graphlib import TopologicalSorter
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
    text,
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
    parts = module.with_suffix("").parts[1:]
    return ".".join(part for part in parts if part != "__init__")


def imports(module):
    "Absolute dotted names a module imports."
    package, named = ("dpcomm", *module.parts[1:-1]), set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join(filter(None, [*above, node.module]))
            named |= {f"{base}.{alias.name}" for alias in node.names} | {base}
    return named


def within(module):
    "The dpcomm modules that a module imports."
    inside = {
        dotted.removeprefix("dpcomm.")
        for dotted in imports(module)
        if dotted.startswith("dpcomm.")
    }
    return inside & {name(other) for other in MODULES} - {name(module)}


def arrows():
    "room -> rooms that its modules import from."
    found = {name(module).split(".")[0]: set() for module in MODULES if name(module)}
    for module in MODULES:
        me = name(module).split(".")[0]
        found.setdefault(me, set()).update(
            other.split(".")[0] for other in within(module) if other.split(".")[0] != me
        )
    return {room: others for room, others in found.items() if room}


def test_rooms_import_what_the_table_allows():
    drawn, found = {room: set(o.split()) for room, o in ROOMS.items()}, arrows()
    assert found.keys() == drawn.keys(), "the table names every room and no other"
    new = {room: found[room] - drawn[room] for room in found}
    assert not any(new.values()), f"arrows that the table does not have: {new}"


def test_no_imports_go_in_a_circle():
    rooms = {room: others.split() for room, others in ROOMS.items()}
    for graph in (rooms, {name(module): within(module) for module in MODULES}):
        assert list(TopologicalSorter(graph).static_order())


def test_modules_without_torch_load_without_torch():
    here = [
        name(m)
        for m in MODULES
        if any((name(m) + ".").startswith(w + ".") for w in WITHOUT_TORCH)
    ]
    assert len(here) > len(WITHOUT_TORCH)
    done = python(
        "-c",
        f"import sys, {', '.join(f'dpcomm.{m}' for m in here)}; assert 'torch' not in"
        " sys.modules",
    )
    assert done.returncode == 0, done.stderr


# ---- what is generated agrees with its source


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A copy of the repository whose package was thrown away and exported again, and
    whose notebooks were cleaned.
    """
    root = copy(tmp_path_factory.mktemp("export") / "repository")
    for path in (root / "dpcomm").rglob("*.py"):
        if "assets" in path.parts:  # apps to copy, which are no modules
            continue
        if path.parent != root / "dpcomm" or not path.stem.startswith("__"):
            path.unlink()
    done = python(
        "-c",
        "from nbdev.doclinks import nbdev_export; from nbdev.clean import nbdev_clean;"
        " nbdev_export(); nbdev_clean()",
        cwd=root,
        root=root,
    )
    assert done.returncode == 0, done.stderr
    return root


@pytest.mark.slow
def test_package_and_notebooks_are_what_nbdev_writes(exported):
    "Run nbdev_export and nbdev_clean."
    ours = {p for p in files() if p.parts[0] == "dpcomm" and p.suffix == ".py"}
    theirs = {p.relative_to(exported) for p in (exported / "dpcomm").rglob("*.py")}
    assert ours == theirs - {Path("dpcomm/_modidx.py")}
    same = [
        (ROOT / p).read_bytes() == (exported / p).read_bytes() for p in sorted(ours)
    ]
    assert all(same), [str(p) for p, kept in zip(sorted(ours), same) if not kept]
    dirty = [
        str(path)
        for path in NOTEBOOKS
        if (ROOT / path).read_bytes() != (exported / path).read_bytes()
    ]
    assert not dirty, f"run nbdev_clean: {dirty}"


# ---- what a notebook looks like


def printed(output):
    "The text of an output, and whether an image stands beside it."
    data = output.get("data", {})
    shown = text(output.get("text", "")) + "".join(
        text(data[k]) for k in data if k.startswith("text/")
    )
    return shown, any(k.startswith("image/") for k in data)


@functools.lru_cache(8)  # every rule asks for it
def syntax(source):
    try:
        return ast.parse(source)
    except SyntaxError:
        return ast.parse("")


def parsed(cell):
    "The syntax tree of a cell; empty for prose, and for code that is no Python."
    return syntax(cell.source if cell.kind == "code" else "")


def tracebacks(cell):
    for output in cell.outputs:
        shown, image = printed(output)
        if (
            output["output_type"] == "error"
            or "Traceback (most recent call last)" in shown
        ):
            yield "a stored traceback"
        if "<Figure size" in shown and not image:
            yield "a figure in words, without its image"


def long_lines(cell):
    "ruff lets captions stand on one line, so it does not measure notebooks."
    lines = cell.code.splitlines() if cell.kind == "code" else []
    yield from (
        f"{len(line)} characters: {line.strip()[:40]}"
        for line in lines
        if len(line) > 100
    )


def mixed_imports(cell):
    """The docs build runs every cell with an import in it, so nothing else may stand
    there.
    """
    nodes = list(ast.walk(parsed(cell)))
    has_import = any(isinstance(n, (ast.Import, ast.ImportFrom)) for n in nodes)
    if (
        not cell.exported
        and has_import
        and any(isinstance(n, (ast.Expr, ast.Assign)) for n in nodes)
    ):
        yield "imports and other code in one cell"


def undescribed_figures(cell):
    if any(d.startswith("label: fig-") for d in cell.directives):
        yield from (
            f"a labelled figure without {need}"
            for need in ("fig-cap:", "fig-alt:")
            if not any(d.startswith(need) for d in cell.directives)
        )


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
CELL_RULES = (
    tracebacks,
    long_lines,
    mixed_imports,
    undescribed_figures,
    lost_pages,
)


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


def lost_names(code):
    "Names that code takes from a module of the package and that are not there."
    module, modules = ast.parse(code), {}
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("dpcomm"):
            for alias in node.names:
                home, full = importlib.import_module(node.module), alias.name
                with contextlib.suppress(ModuleNotFoundError):
                    importlib.import_module(f"{node.module}.{full}")
                if full != "*" and not hasattr(home, full):
                    yield f"{node.module}.{full}"
                elif inspect.ismodule(getattr(home, full, None)):
                    modules[alias.asname or full] = getattr(home, full)
    names = [node for node in ast.walk(module) if isinstance(node, ast.Name)]
    for name in {n.id for n in names if isinstance(n.ctx, ast.Store)}:
        modules.pop(name, None)
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = modules.get(node.value.id)
            if owner is not None and not hasattr(owner, node.attr):
                yield f"{node.value.id}.{node.attr}"


@tabled("notebook", NOTEBOOKS, ids=str)
def test_the_package_has_the_names_a_page_uses(notebook):
    "Also those of experiments, which no other test executes as pages."
    code = "\n".join(cell.code for cell in cells(notebook) if cell.kind == "code")
    demand_none(sorted(set(lost_names(code))), str(notebook))


@tabled("notebook", EXPERIMENTS, ids=str)
def test_an_experiment_is_settings_a_grid_and_a_way_to_play(notebook):
    place = notebook.relative_to("nbs").with_suffix("").parts
    name = ".".join(["dpcomm.experiments", *place]).replace("s.experiments", "s")
    module = importlib.import_module(name)
    assert all(callable(getattr(module, name, None)) for name in PLAYS)


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
            a = node.args
            more = [*filter(None, [a.vararg]), *a.kwonlyargs, *filter(None, [a.kwarg])]
            for arg in [*a.posonlyargs, *a.args, *more]:
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
