"A deep test is left out of the gate only where nothing that it depends on has changed."

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from checkout import ROOT, settings
from unchanged import Graph, Passed, unit_of

PACKAGE = {
    "dpcomm/__init__.py": "_HOMES = {'choose': 'late.named'}\nif False:\n    from .early import base\n",
    "dpcomm/early/base.py": "ONE = 1\n",
    "dpcomm/early/user.py": "from .base import ONE\n",
    "dpcomm/late/named.py": "choose = 1\n",
    "dpcomm/late/alone.py": "def late():\n    from ..early import user\n",
    "dpcomm/late/reads.py": "TABLE = 'assets'\n",
    "dpcomm/registry.py": "import importlib\nload = lambda n: importlib.import_module(f'dpcomm.early.{n}')\n",
    "dpcomm/assets/table.toml": "",
    "README.md": "",
    "settings.ini": "",
    "tests/helper.py": "from dpcomm.early import base\n",
    "tests/checkout.py": "",
    "tests/repository/test_pages.py": "import checkout\n",
}
UNITS = {  # a test file -> what it says, and what it depends on beside itself
    "tests/test_base.py": ("from dpcomm.early import base", "early/base"),
    "tests/test_user.py": ("import dpcomm.early.user", "early/base early/user"),
    "tests/test_helped.py": ("import helper", "early/base tests/helper"),
    "tests/test_lazy.py": ("import dpcomm\ndpcomm.choose", "late/named"),
    "tests/test_named.py": ("from dpcomm import choose", "late/named"),
    "tests/test_inside.py": (
        "from dpcomm.late.alone import late",
        "early/base early/user late/alone",
    ),
    "tests/test_registry.py": (
        "from dpcomm import registry",
        "early/base early/user registry",
    ),
    "tests/test_assets.py": (
        "from dpcomm.late import reads",
        "late/reads assets/table",
    ),
    "tests/test_tree.py": ("import checkout", "*"),
    "tests/test_pools.py": ("import multiprocessing", "*"),
    "nbs/page.ipynb": ("from dpcomm.early import user", "early/base early/user"),
}

RUNNERS = ("tests/checkout", "tests/repository/test_pages")
ALONE = ("-p", "xdist", "-n2")  # without this package's own plugin
WORDS = ("passed", "failed", "skipped")


@pytest.fixture
def root(tmp_path):
    for file, text in PACKAGE.items() | {(f, text) for f, (text, _) in UNITS.items()}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        if file.endswith(".ipynb"):
            text = json.dumps({"cells": [{"cell_type": "code", "source": [text]}]})
        (tmp_path / file).write_text(text)
    return tmp_path


def passed(root) -> Passed:
    return Passed(Graph(root, [*PACKAGE, *UNITS]), root / "store", [])


def test_a_changed_file_makes_exactly_its_dependents_run_again(root):
    """Settings decide about all, `dpcomm/__init__.py` about all that import the package, and
    about what depends on the whole checkout.
    """
    before = {unit: passed(root).lists(unit)[0] for unit in UNITS}
    whole = {unit for unit, (_, needs) in UNITS.items() if needs == "*"}
    common = {"settings.ini": {*UNITS}, "dpcomm/__init__.py": {*UNITS}}
    for file in [*PACKAGE, *UNITS]:
        text = (root / file).read_text()
        other = text.replace("import", "import  ") if file.endswith(".ipynb") else text
        (root / file).write_text(other + "\n")
        now = passed(root)
        (root / file).write_text(text)
        stem = os.path.splitext(file.removeprefix("dpcomm/"))[0]
        uses = {unit for unit, (_, needs) in UNITS.items() if stem in needs.split()}
        runs_pages = {"nbs/page.ipynb"} if file.startswith(RUNNERS) else set()
        changed = {unit for unit in UNITS if now.lists(unit)[0] != before[unit]}
        wanted = common.get(file, uses | whole | runs_pages | ({file} & {*UNITS}))
        assert changed == wanted, file


@pytest.mark.parametrize(
    "seen, whole",
    [
        ({"dpcomm/early/base.py", "tests/test_base.py", "dpcomm/early"}, False),
        ({"README.md"}, True),
        ({"dpcomm/late/alone.py"}, True),
        ({"dpcomm/assets"}, True),
        ({""}, True),
        ({"a process"}, True),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_what_reads_more_than_it_imports_depends_on_everything(root, seen, whole):
    unit, test = "tests/test_base.py", "tests/test_base.py::test_it"
    passed(root).write(unit, {test}, seen)
    assert passed(root).again(unit) == {test}
    (root / "dpcomm/late/named.py").write_text("choose = 2\n")
    assert passed(root).again(unit) == (set() if whole else {test})


def test_words_between_the_cells_of_a_page_do_not_decide(root):
    page = root / "nbs/page.ipynb"
    unit, cells = "nbs/page.ipynb", json.loads(page.read_text())["cells"]
    own, whole = passed(root).lists(unit)
    words = {"cell_type": "markdown", "source": ["Words."]}
    page.write_text(json.dumps({"cells": [words, *cells]}))
    now = passed(root).lists(unit)
    assert now[0] == own and now[1] != whole
    for more in ({"outputs": ["1"]}, {"metadata": {"tags": ["trained"]}}):
        page.write_text(json.dumps({"cells": [cells[0] | more]}))
        assert passed(root).lists(unit)[0] != own


def test_a_page_is_a_unit_of_its_own():
    page = "tests/repository/test_pages.py::test_it[nbs/a/b.ipynb-whole]"
    assert unit_of(page) == "nbs/a/b.ipynb"
    assert unit_of("tests/a/test_b.py::test_c[x]") == "tests/a/test_b.py"


TESTS = """
import subprocess
from pathlib import Path
import pytest
from dpcomm.early import base

@pytest.mark.deep
def test_right():
    assert base.ONE

@pytest.mark.deep
def test_wrong():
    assert not base.ONE

@pytest.mark.deep
def test_skipped():
    pytest.skip("NOT CHECKED: no tool")

@pytest.mark.deep
@pytest.mark.parametrize("what", ["once"])
def test_with_a_property(what, record_property):
    record_property("not checked", "no data")

@pytest.mark.deep
@pytest.mark.weekly
def test_each_week():
    pass
"""
READS = """
from pathlib import Path
import pytest

@pytest.mark.deep
def test_reading():
    assert Path("README.md").read_text() is not None
"""


@pytest.mark.deep
def test_two_runs_one_after_the_other(root):
    """What failed, was skipped or was checked in part runs again, and so does all without
    the flag, under which the tests of the weekly run never run.
    """
    for name in ("conftest.py", "unchanged.py", "checkout.py"):
        shutil.copy(ROOT / "tests" / name, root / "tests" / name)
    for unit in UNITS:
        (root / unit).unlink()
    (root / "pytest.ini").write_text("[pytest]\nmarkers =\n  deep: it\n  weekly: it")
    (root / "tests/test_it.py").write_text(TESTS)
    (root / "tests/test_reading.py").write_text(READS)

    env = {
        "XDG_CACHE_HOME": str(root / ".cache"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }

    def run(*words) -> str:
        "How many passed, failed and were skipped, and how many were left out."
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *ALONE, "-qm", "deep", *words],
            cwd=root,
            env=settings(root=root) | env,
            capture_output=True,
            text=True,
        )
        told = done.stdout
        assert "deep tests passed here before" in told, told + done.stderr
        before = re.search(r"(\d+) deep tests passed here before", told)
        last = told.strip().splitlines()[-1]
        found = [*(re.search(rf"(\d+) {word}", last) for word in WORDS), before]
        return " ".join(f[1] if f else "0" for f in found)

    assert run() == "4 1 1 0"
    assert run("--changed") == "1 1 1 2"
    assert run() == "4 1 1 0"
    (root / "README.md").write_text("read me")
    assert run("--changed") == "2 1 1 1"
    (root / "dpcomm/late/alone.py").write_text("")
    assert run("--changed", "tests/test_it.py") == "1 1 1 1"
    (root / "dpcomm/early/base.py").write_text("ONE = 2")
    assert run("--changed") == "3 1 1 0"
