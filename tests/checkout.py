"""What the tests know about the checkout: its files, its notebooks, and how to copy and
run it.
"""

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]


def files() -> list[Path]:
    "Relative to ROOT: what git tracks or would track, else all but by-products."
    git = ["git", "ls-files", "-co", "--exclude-standard"]
    done = subprocess.run(git, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0 and done.stdout:
        paths = map(Path, {*done.stdout.splitlines()})
        return sorted(path for path in paths if (ROOT / path).is_file())
    made = re.compile(r"(^|/)(__pycache__|runs|_proc|_docs|build|venv|\.(?!ci/)[^/]*)/")
    paths = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return sorted(
        p for p in paths if not made.search(str(p)) and "egg-info" not in p.parent.name
    )


def copy(target: Path) -> Path:
    "A copy of the repository, without git and without by-products."
    for path in files():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target / path)
    return target


def settings(base=os.environ, root=ROOT) -> dict:
    "The environment `base` for a process that imports dpcomm from the checkout `root`."
    env = {name: value for name, value in base.items() if name != "IN_TEST"}
    slim = str(ROOT / "tests" / "slim")
    search = os.pathsep.join(filter(None, [str(root), slim, env.get("PYTHONPATH")]))
    one = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return env | one | {"PYTHONPATH": search}


def python(
    *args, cwd=ROOT, root=ROOT, timeout=1800, base=os.environ, **more
) -> subprocess.CompletedProcess:
    "Run this Python in `cwd`, importing dpcomm from the checkout `root`."
    return subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=cwd,
        env=settings(base, root) | more.pop("env", {}),
        capture_output=True,
        text=True,
        timeout=timeout,
        **more,
    )


@dataclass(frozen=True)
class Cell:
    "A notebook cell with its text joined."

    kind: str
    source: str
    tags: tuple
    outputs: tuple

    @property
    def directives(self) -> list[str]:
        lines = self.source.splitlines()
        return [line[2:].strip() for line in lines if line.startswith("#|")]

    @property
    def code(self) -> str:
        lines = filter(str.strip, self.source.splitlines())
        return "\n".join(line for line in lines if not line.startswith("#|"))

    @property
    def exported(self) -> bool:
        return any(
            d.split()[0] in ("export", "exporti", "exports") for d in self.directives
        )

    @property
    def label(self) -> str:
        return (self.code or self.source).strip().split("\n")[0][:60]


def text(value) -> str:
    "A notebook's text field, which is a string or a list of lines."
    return value if isinstance(value, str) else "".join(value)


@functools.cache
def cells(notebook: Path) -> list[Cell]:
    raw = json.loads((ROOT / notebook).read_text(encoding="utf-8"))["cells"]
    return [
        Cell(
            c["cell_type"],
            text(c["source"]),
            tuple(c["metadata"].get("tags", ())),
            tuple(c.get("outputs", ())),
        )
        for c in raw
    ]


NOTEBOOKS = [
    path for path in files() if path.parts[0] == "nbs" and path.suffix == ".ipynb"
]
EXPERIMENTS = [
    path
    for path in NOTEBOOKS
    if path.parts[1] != "use" and '"parameters"' in (ROOT / path).read_text("utf-8")
]
PAGES = [path for path in NOTEBOOKS if path not in EXPERIMENTS]
SITE = yaml.safe_load((ROOT / "_quarto.yml").read_text("utf-8"))
SHOWN = [Path("nbs", page) for page in SITE["project"]["render"]]

MODULES = [
    path
    for path in files()
    if path.parts[0] == "dpcomm" and path.suffix == ".py"
    if path.parts[1] != "assets"  # apps to copy
]


@functools.cache
def tree(module: Path) -> ast.Module:
    return ast.parse((ROOT / module).read_text(encoding="utf-8"))


def public(module: Path) -> dict[str, ast.AST]:
    "Functions and classes a module exports, by name."
    names, found = [], {}
    for node in tree(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
    return {name: node for name, node in found.items() if name in names}


def page(path, *cells, kernel="python3"):
    "Write a notebook of code cells, each its source and its tags, below a title."
    kernelspec = dict(name=kernel, display_name=kernel, language="python")
    found = [dict(cell_type="markdown", id="m", metadata={}, source="# X\n\n> Why?")]
    for i, (source, *tags) in enumerate(cells):
        run = dict(outputs=[], execution_count=None, metadata=dict(tags=tags))
        found.append(dict(cell_type="code", id=f"c{i}", source=source, **run))
    about = dict(metadata=dict(kernelspec=kernelspec), nbformat=4, nbformat_minor=5)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(cells=found, **about)))
    return path
