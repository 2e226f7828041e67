"Settings and fixtures shared by all tests."

import os
import runpy
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
TESTS = Path(__file__).resolve().parent
sys.path[:0] = [
    str(folder)
    for folder in (TESTS.parent, TESTS, *sorted(TESTS.iterdir()))
    if folder.is_dir()
]

OFFLINE = TESTS / "offline"
# Properties of a test that are told at the end, never silently green: cells that a flag
# kept from running, and what a missing data set kept from being checked.
NOT_RUN, NOT_CHECKED = "not run", "not checked"
QUICK = """
core/test_core core/test_package core/test_wire privacy/test_accounting privacy/test_games
secagg/test_ring report/test_labels report/test_papers mechanisms/test_gaussian
mechanisms/test_vqsgd mechanisms/test_signsgd repository/test_guards repository/test_habits
training/test_models
""".split()  # files of `pytest -m quick`


def bare(env: dict, home) -> dict:
    """An environment as on a fresh machine: empty home and cache, no data, network
    calls refused.
    """
    kept = {
        name: value
        for name, value in env.items()
        if name != "DPCOMM_DATA"
        and not name.lower().endswith("_proxy")
        and not name.startswith("XDG_")
    }
    search = os.pathsep.join(filter(None, [str(OFFLINE), env.get("PYTHONPATH")]))
    return kept | {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(Path(home) / ".cache"),
        "PYTHONPATH": search,
    }


def pytest_addoption(parser):
    parser.addoption(
        "--bare",
        action="store_true",
        help="as on a fresh machine: empty home, no data, network calls refused",
    )
    parser.addoption(
        "--fuzz", type=int, default=1000, help="hostile messages a mechanism is sent"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    "A file's tests run in one process, which makes their fixtures once; pages anywhere."
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::")[0]
            return nodeid if file.endswith("test_pages.py") else file

    return ByFile(config, log)


def pytest_collection_modifyitems(items):
    "Mark what takes seconds: `pytest -m quick`."
    for item in items:
        if item.path.relative_to(TESTS).with_suffix("").as_posix() in QUICK:
            item.add_marker(pytest.mark.quick)


def pytest_configure(config):
    config.addinivalue_line("markers", "quick: tests of the files that take seconds")
    if not config.getoption("bare"):
        return
    home = tempfile.mkdtemp()
    config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))
    settings = bare(dict(os.environ), home)
    os.environ.clear()
    os.environ.update(settings)
    runpy.run_path(str(OFFLINE / "sitecustomize.py"))


def or_skip(load, *args, **more):
    "A data set from disk; a skip that names it where it is not there."
    try:
        return load(*args, **more)
    except FileNotFoundError as error:
        pytest.skip(f"NOT CHECKED: {error}")


@pytest.fixture(scope="session")
def pool():
    "Two workers for tests that wait for other processes."
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as executor:
        yield executor
        executor.shutdown(cancel_futures=True)


def pytest_terminal_summary(terminalreporter):
    report = terminalreporter
    told = {NOT_RUN: [], NOT_CHECKED: []}
    ended = [*report.stats.get("passed", []), *report.stats.get("failed", [])]
    for name, line in (pair for test in ended for pair in test.user_properties):
        told.get(name, []).append(line)
    for skip in report.stats.get("skipped", []):
        reason = skip.longrepr[2].removeprefix("Skipped: ")
        reason = reason.removeprefix("NOT CHECKED: ").split(":")[0]
        told[NOT_CHECKED].append(f"{skip.nodeid}: {reason}")
    report.section("not run, not checked")
    for lines, what in (
        (told[NOT_RUN], "notebook cells flagged slow, gpu or eval: false were not run"),
        (told[NOT_CHECKED], "cells and tests were NOT CHECKED"),
    ):
        report.write_line(f"{len(lines)} {what}" + (":" if lines else ""))
        for line in lines:
            report.write_line(f"  {line}")
