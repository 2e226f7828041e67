"""Deep tests that need not run again: they passed on this machine with the same code.

A test file depends on the files it imports, however deep, and a page's test on its cells of
code, whatever stands between them, and on the files that these import; what reads other files of the checkout while it runs, or starts a process,
depends on the whole checkout, as does what asks `checkout` for the list of its files. A
hash of those files, of the installed packages and of the data names a file in the
cache, which lists the deep tests that passed with it. Each run with `--all` or `-m deep`
writes there; `--changed` reads, and leaves out what is listed.
"""

import ast
import functools
import hashlib
import importlib
import json
import os
import re
import sys
import time
from collections import defaultdict
from importlib import metadata
from pathlib import Path

import pytest

ALWAYS = ("conftest.py", "unchanged.py", "run_page.py", "offline/sitecustomize.py")
LAZY = ("dpcomm/__init__.py", "tests/conftest.py")
CALLS = ("import_module", "__import__")
PAGE = re.compile(r"test_pages\.py::\w+\[(nbs/.+?\.ipynb)")
PROCESSES = ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "os.system")
STORE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
STORE /= "dpcomm-passed-tests"
CHILD = set()  # what the process of a page came to, as `watch` tells it
ASKS_THE_MACHINE = "ldconfig gcc uname lscpu".split()  # libraries and the processor
SITE = ("tests/repository/test_site.py", "tests/repository/test_built_site.py")
FORGET = 60 * 86400  # seconds after which a list that no run wrote again is removed


class Graph:
    "What each file of a checkout imports, read from its text."

    def __init__(self, root: Path, files):
        self.root, self.files = root, {Path(file).as_posix() for file in files}
        self.assets = {f for f in self.files if f.startswith("dpcomm/assets/")}
        python = [f for f in self.files - self.assets if f.endswith(".py")]
        self.modules = {self._name(file): file for file in python}
        self.rooms = {os.path.dirname(file) for file in python}

    @staticmethod
    def _name(file: str) -> str:
        "How a file is imported; test files stand on the path, so by their bare names."
        name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return name.rpartition(".")[2] if file.startswith("tests/") else name

    @functools.cached_property
    def homes(self) -> dict:
        "Public name -> the module that `dpcomm.NAME` imports when it is asked for."
        tree = ast.parse(self.text("dpcomm/__init__.py"))
        return next(
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and node.targets[0].id == "_HOMES"
        )

    def text(self, file: str) -> str:
        "A file's Python: of a notebook, that of its cells."
        if not file.endswith(".ipynb"):
            return (self.root / file).read_text("utf-8")
        return "\n".join("".join(c["source"]) for c in self.cells(file))

    def cells(self, page: str) -> list[dict]:
        "A page's cells of code, with their outputs."
        cells = json.loads((self.root / page).read_text("utf-8"))["cells"]
        return [cell for cell in cells if cell["cell_type"] == "code"]

    def _names(self, file: str):
        "Modules that a file's text names, anywhere in it; 'a.b.*' is every module below."
        package = file.split("/")[:-1]
        for node in ast.walk(ast.parse(self.text(file))):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.Attribute):
                if (
                    getattr(node.value, "id", None) == "dpcomm"
                    and node.attr in self.homes
                ):
                    yield f"dpcomm.{self.homes[node.attr]}"
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) + 1 - node.level] if node.level else []
                home = ".".join([*above, *filter(None, [node.module])])
                yield home
                for alias in node.names:
                    lazy = home == "dpcomm" and self.homes.get(alias.name)
                    yield f"dpcomm.{lazy}" if lazy else f"{home}.{alias.name}"
            elif isinstance(node, ast.Call) and node.args:
                called = getattr(node.func, "attr", getattr(node.func, "id", None))
                name = node.args[0]
                parts = name.values if isinstance(name, ast.JoinedStr) else [name]
                if called in CALLS and isinstance(parts[0], ast.Constant):
                    yield parts[0].value + "*" * (len(parts) > 1)

    @functools.cache
    def imports(self, file: str) -> frozenset:
        """Files that one file imports, with the packages they stand in. None for those that
        import when they are asked for a name or a fixture.
        """
        found = set()
        for name in set() if file in LAZY else set(self._names(file)):
            if name.endswith("*"):
                found |= {f for m, f in self.modules.items() if m.startswith(name[:-1])}
            while name:
                found |= {self.modules[name]} if name in self.modules else set()
                name = name.rpartition(".")[0]
        return frozenset(found)

    @functools.cache
    def closure(self, file: str) -> frozenset:
        "A file and all that it imports, however deep; with a reader of assets, these too."
        found, new = set(), {file}
        while new:
            found |= new
            new = set().union(*map(self.imports, new)) - found
        if any(
            re.search(r"\bassets\b", self.text(f)) for f in found if f.endswith(".py")
        ):
            found |= self.assets
        return frozenset(found)

    def lists(self, folder: str, known) -> bool:
        "Whether it is decided by files already known which files a folder holds."
        return folder in self.rooms or all(
            f in known for f in self.files if f.startswith(folder + "/")
        )


def surroundings() -> list:
    "What decides beside the checkout's files; without its tools a test is skipped, so not listed."
    packages = {f"{d.name} {d.version}" for d in metadata.distributions()}
    data = Path(os.environ.get("DPCOMM_DATA") or "/nowhere")
    sizes = [(str(p), p.stat().st_size) for p in data.rglob("*") if p.is_file()]
    return [sys.version, sorted(packages), sorted(sizes)]


class Passed:
    "Lists of tests that passed, by the hash of what they depend on."

    def __init__(self, graph: Graph, store: Path, around: list):
        self.graph, self.store = graph, store
        self.around = json.dumps(around)
        self.always = {f"tests/{name}" for name in ALWAYS} | {
            "settings.ini",
            "pytest.ini",
        }
        self.hashes = {
            file: hashlib.sha256((graph.root / file).read_bytes()).hexdigest()
            for file in graph.files
        }
        pages = [file for file in graph.files if file.endswith(".ipynb")]
        code = {page: json.dumps(graph.cells(page)) for page in pages}
        self.code = self.hashes | code  # of a page only its cells of code

    def known(self, unit: str) -> frozenset:
        "Files that a unit, a test file or a page, depends on as far as its text tells."
        if not unit.endswith(".ipynb"):
            return self.graph.closure(unit) | self.always
        runner = self.graph.closure("tests/repository/test_pages.py")
        return self.graph.closure(unit) | runner | self.always

    def is_whole(self, unit: str) -> bool:
        "Whether a unit's own text already says that it depends on the whole checkout."
        if unit.endswith(".ipynb"):
            return False
        spawns = re.search(r"multiprocessing|ProcessPool", self.graph.text(unit))
        return bool(spawns) or "tests/checkout.py" in self.graph.closure(unit)

    def _list(self, unit: str, files, hashes: dict) -> Path:
        of = [(file, hashes[file]) for file in sorted(files) if file in hashes]
        asked = ("DPCOMM_PAGES", "DPCOMM_SITE") if unit in SITE else ()
        words = f"{self.around} {[os.environ.get(name) for name in asked]} {of}"
        return self.store / hashlib.sha256(words.encode()).hexdigest()

    def lists(self, unit: str) -> list[Path]:
        "Where a unit's passed tests are listed: by its own files, and by all."
        own = [] if self.is_whole(unit) else [(self.known(unit), self.code)]
        which = [*own, (self.graph.files, self.hashes)]
        return [self._list(unit, files, hashes) for files, hashes in which]

    def again(self, unit: str) -> set[str]:
        "Tests of a unit that passed with the files as they are."
        return {
            test
            for path in self.lists(unit)
            if path.is_file()
            for test in json.loads(path.read_text("utf-8"))
            if unit_of(test) == unit
        }

    def reads_more(self, unit: str, seen) -> bool:
        "Whether a unit came to what its text does not tell."
        known = self.known(unit)
        return any(
            what in ("a process", "")
            or what not in known
            and (what in self.graph.files or not self.graph.lists(what, known))
            for what in seen
        )

    def write(self, unit: str, tests: set[str], seen):
        own, *whole = self.lists(unit)
        path = whole[0] if whole and self.reads_more(unit, seen) else own
        if path.is_file():
            tests = tests | set(json.loads(path.read_text("utf-8")))
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(sorted(tests)), "utf-8")
        part.replace(path)

    def forget(self):
        for path in self.store.glob("*"):
            if time.time() - path.stat().st_mtime > FORGET:
                path.unlink(missing_ok=True)


def unit_of(test: str) -> str:
    "The page that a test is about, else its file."
    page = PAGE.search(test)
    return page[1] if page else test.split("::")[0]


def watch(root: Path) -> set:
    """A set that fills with what this process does: files of the checkout that it opens and
    folders that it lists, relative to it, and 'a process'.
    """
    seen, top = set(), str(root) + os.sep

    def hook(event, args):
        if event in PROCESSES:
            if os.path.basename(str(args[0])) not in ASKS_THE_MACHINE:
                seen.add("a process")
        elif event in ("open", "os.listdir", "os.scandir"):
            if not isinstance(args[0], (str, bytes, os.PathLike)):
                return
            asks = sys._getframe(1).f_code.co_filename
            if event == "os.listdir" and "importlib" in asks:
                return  # a module there would be in the graph
            path = os.path.abspath(os.fsdecode(args[0])) + os.sep * (args[0] == ".")
            if not path.startswith(top):
                return
            words = path.removeprefix(top).split(os.sep)
            if words[-2:-1] == ["__pycache__"]:
                words[-2:] = [words[-1].split(".")[0] + ".py"]
            if not any(word.startswith(".") and word != ".ci" for word in words):
                seen.add("/".join(words))

    sys.addaudithook(hook)
    return seen


class Plugin:
    """Of one process of pytest. The one that started the others knows the lists; each process
    reports what its tests came to.
    """

    def __init__(self, config, root: Path):
        self.root = root
        self.seen, self.collected = watch(root), defaultdict(set)
        self.told = getattr(config, "workerinput", {}).get("again")
        self.count = 0
        if self.told is None:
            self.ended, self.passed = defaultdict(list), self._lists()
            units = [
                f for f in self.passed.hashes if "/test_" in f or f.endswith(".ipynb")
            ]
            use = config.getoption("changed")
            self.told = (
                sorted(set().union(*map(self.passed.again, units))) if use else []
            )

    def _lists(self) -> Passed:
        files = importlib.import_module("checkout").files()
        return Passed(Graph(self.root, files), STORE, surroundings())

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        node.workerinput["again"] = self.told

    def pytest_collection_modifyitems(self, config, items):
        again = set(self.told)
        left = [i for i in items if i.nodeid in again and i.get_closest_marker("deep")]
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=left)
        self.count = len(left)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector):
        self.seen.clear()
        report = yield
        self.collected[collector.nodeid] |= self.seen
        return report

    def pytest_runtest_logstart(self):
        self.seen.clear()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item):
        "A page tells what its own process came to."
        report = yield
        seen = self.seen | self.collected[item.nodeid.split("::")[0]]
        report.deep = bool(item.get_closest_marker("deep"))
        report.seen = sorted(CHILD if PAGE.search(item.nodeid) else seen)
        self.seen.clear()
        CHILD.clear()
        return report

    def pytest_runtest_logreport(self, report):
        if hasattr(self, "ended"):
            self.ended[report.nodeid].append(report)

    def pytest_sessionfinish(self):
        "Nothing is written where a file changed while the tests ran."
        if not hasattr(self, "ended"):
            return
        now, units = self._lists(), defaultdict(lambda: (set(), set()))
        for test, phases in self.ended.items():
            tests, seen = units[unit_of(test)]
            seen.update(what for phase in phases for what in phase.seen)
            sure = {phase.outcome for phase in phases} == {"passed"}
            partly = any(
                name == "not checked" for name, _ in phases[-1].user_properties
            )
            if sure and len(phases) == 3 and phases[0].deep and not partly:
                tests.add(test)
        if now.hashes == self.passed.hashes:
            for unit, (tests, seen) in units.items():
                if tests:
                    now.write(unit, tests, seen)
            now.forget()
