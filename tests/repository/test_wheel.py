"The wheel: what it holds, and that it works in another folder, without the checkout."

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest
from checkout import EXPERIMENTS, NOTEBOOKS, ROOT, cells, copy, python
from packaging.requirements import Requirement

import dpcomm


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    "A copy of the repository to build from."
    return copy(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="session")
def wheel(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    words = "-m pip wheel --no-deps --no-build-isolation -q -w".split()
    done = python(*words, folder, ".", cwd=source)
    assert done.returncode == 0, done.stderr[-2000:]
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def bare(wheel, tmp_path_factory):
    "A folder with the wheel, which is found before any checkout."
    folder = tmp_path_factory.mktemp("bare")
    words = "-m pip install --no-deps --no-index -q --target".split()
    done = python(*words, folder, wheel)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def called(bare, tmp_path, *words):
    "A command of the installed package, in a folder of its own."
    unset = {"DPCOMM_DATA", "IN_TEST"}
    env = {k: v for k, v in os.environ.items() if k not in unset}
    env |= dict(HOME=str(tmp_path), OMP_NUM_THREADS="1", PYTHONPATH=str(bare))
    first = bare / "bin" / "dpcomm" if words[0] == "dpcomm" else sys.executable
    where = dict(cwd=tmp_path, env=env, timeout=1200)
    return subprocess.run([first, *words[1:]], capture_output=True, text=True, **where)


def said(bare, tmp_path, *words):
    "What it prints if all is well."
    done = called(bare, tmp_path, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_it_holds_the_package_its_assets_and_the_experiments(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = {i.filename: i.file_size for i in file.infolist()}
        pages = [n for n in names if n.startswith("dpcomm/assets/experiments/")]
        assert not any(b'"text/plain"' in file.read(page) for page in pages)
    held = {n.removeprefix("dpcomm/assets/experiments/") for n in pages}
    assert held == {path.relative_to("nbs").as_posix() for path in EXPERIMENTS}
    kept = [p for p in (ROOT / "dpcomm").rglob("*") if p.name != "_modidx.py"]
    due = {
        str(p.relative_to(ROOT))
        for p in kept
        if p.suffix in (".py", ".toml", ".jsonl", ".md")
    }
    assert due | {"dpcomm/py.typed"} <= set(names)
    strange = [n for n in names if not n.startswith(("dpcomm/", "dpcomm-"))]
    assert not strange and sum(names.values()) < 20e6


@pytest.mark.slow
def test_an_sdist_holds_the_notebooks_and_the_tests(source, tmp_path):
    done = python("setup.py", "-q", "sdist", "-d", tmp_path, cwd=source)
    assert done.returncode == 0, done.stderr[-2000:]
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    kept = ("nbs/index.ipynb", "nbs/site/site.css", "tests/conftest.py", "settings.ini")
    assert {*kept, "dpcomm/py.typed", "MANIFEST.in"} <= names
    assert {path.as_posix() for path in EXPERIMENTS} <= names


SETTINGS = ConfigParser(delimiters=["="])
SETTINGS.read(ROOT / "settings.ini", encoding="utf-8")
SETTINGS = SETTINGS["DEFAULT"]


def test_every_file_that_says_a_version_says_the_same():
    version, cited = SETTINGS["version"], (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {version}\n" in cited and version == dpcomm.__version__
    home = "\n".join(cell.source for cell in cells(Path("nbs/index.ipynb")))
    assert f"version = {{{version}}}" in home


def test_requirements_are_bounded_below_and_met_here():
    asked = SETTINGS["requirements"] + " " + SETTINGS["run_requirements"]
    for line in asked.split():
        wanted = Requirement(line)
        assert [s.operator for s in wanted.specifier] == [">="], line
        assert importlib.metadata.version(wanted.name) in wanted.specifier, line


@pytest.mark.slow
def test_commands_work_without_a_checkout(bare, tmp_path):
    where = "import dpcomm; print(dpcomm.__file__)"
    assert said(bare, tmp_path, "python", "-c", where).startswith(str(bare))
    assert "usage: dpcomm" in said(bare, tmp_path, "dpcomm", "--help")
    assert "dprec-mnist" in said(bare, tmp_path, "dpcomm", "list")
    assert "dprec, table1" in said(bare, tmp_path, "dpcomm", "table", "dprec", "table1")
    run = "dpcomm", "run", "imvu-mnist", "--scale", "smoke"
    assert "imvu" in said(bare, tmp_path, *run)
    assert list((tmp_path / "runs").glob("*/imvu_mnist.smoke.jsonl"))
    refused = called(bare, tmp_path, "dpcomm", "merge", "runs")
    assert refused.returncode == 2 and "clone the repository" in refused.stderr


@pytest.mark.slow
def test_guides_run_without_a_checkout(bare, tmp_path):
    "The cells of each in one script, but for those that need another library."
    for page in NOTEBOOKS:
        if page.parts[1] == "use":
            for beside in (ROOT / page).parent.glob("*.toml"):
                shutil.copy(beside, tmp_path)
            typed = [cell for cell in cells(page) if cell.kind == "code"]
            code = [cell.code for cell in typed if "eval: false" not in cell.directives]
            (tmp_path / "guide.py").write_text("\n\n".join(code) + "\n", "utf-8")
            said(bare, tmp_path, "python", "guide.py")
