"Settings and fixtures shared by all tests."

import gc
import importlib
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A process in the background ignores ^C, and so would all that it starts: here it is
    # sent on purpose.
    signal.signal(signal.SIGINT, signal.default_int_handler)
TESTS = Path(__file__).resolve().parent
sys.path[:0] = [
    str(folder)
    for folder in (TESTS.parent, TESTS, *sorted(TESTS.iterdir()))
    if folder.is_dir()
]

OFFLINE = TESTS / "offline"
# Properties of a test that are counted at the end, never silently green: cells that a
# flag kept from running, and what a missing data set or tool kept from being checked.
NOT_RUN, NOT_CHECKED = "not run", "not checked"
LONG, LONG_CELL = (
    "long",
    3.0,
)  # a page's cell of so many CPU seconds should be flagged slow
CPU = {"last": 0.0, "elsewhere": 0.0}  # seconds; elsewhere: of processes not waited for
BUDGET = {"this tier": 14, "the deep tier": 32, "both tiers": 46}  # CPU minutes
# What takes longest starts first, so that no core is left alone with it at the end; a
# unit of work is a file, a page, or what shares an expensive fixture.
FIRST = ("test_built_site.py", "test_site.py", "test_runner.py", "test_cluster.py")
UNITS = {"test_site.py": "the site", "test_built_site.py": "the site"}
# Deselected tests, those of the weekly run, those that passed before, CPU seconds of all
# processes.
TOLD = {"deep": 0, "weekly": 0, "again": 0, "cpu": 0.0}


def cpu() -> float:
    "CPU seconds of this process and its children so far."
    return sum(os.times()[:4]) + CPU["elsewhere"]


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
        "--all",
        action="store_true",
        help="the deep tier too: every setting, every experiment, the site, the wheel",
    )
    parser.addoption(
        "--fresh-pages",
        action="store_true",
        help="every page in a process that starts from nothing, in place of a fork",
    )
    parser.addoption(
        "--changed",
        action="store_true",
        help="leave out deep tests that passed on this machine with the same code, and"
        " those of the weekly run",
    )
    parser.addoption(
        "--bare",
        action="store_true",
        help="as on a fresh machine: empty home, no data, network calls refused",
    )
    parser.addoption(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="the files, and the tests of each, in an order that this number decides",
    )
    parser.addoption(
        "--fuzz", type=int, default=1000, help="hostile messages a mechanism is sent"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file's tests run in one process, which makes their fixtures once; pages anywhere,
    but for those whose start moves: an environment of their own makes a server of their own.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::")[0]
            name = file.rpartition("/")[2]
            if name == "test_pages.py" and "when_the_start_moves" not in nodeid:
                return nodeid
            return UNITS.get(name, file)

    config.option.loadscopereorder = False  # they are in order
    return ByFile(config, log)


def turn(item) -> int:
    "When a test's file has its turn: the longest, then pages, then all others."
    name = item.path.name
    if name in FIRST:
        return FIRST.index(name)
    return len(FIRST) + (name != "test_pages.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    "Without `--all`, tests marked `deep` are left out unless they are asked for by name."
    items.sort(key=turn)
    if (seed := config.getoption("shuffle", None)) is not None:
        draw = random.Random(seed)
        draw.shuffle(items)
        files = list(dict.fromkeys(item.path for item in items))
        items.sort(key=lambda item: files.index(item.path))
    if config.getoption("changed", False):
        weekly = [item for item in items if item.get_closest_marker("weekly")]
        items[:] = [item for item in items if not item.get_closest_marker("weekly")]
        config.hook.pytest_deselected(items=weekly)
        TOLD["weekly"] = len(weekly)
    named = any("::" in str(word) for word in config.args)
    if config.getoption("all", False) or config.option.markexpr or named:
        return
    deep = [item for item in items if item.get_closest_marker("deep")]
    items[:] = [item for item in items if not item.get_closest_marker("deep")]
    config.hook.pytest_deselected(items=deep)
    TOLD["deep"] = len(deep)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    "Each phase of a test is given the CPU seconds since the last one ended."
    report = yield
    report.cpu, CPU["last"] = cpu() - CPU["last"], cpu()
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    "Half of a collection's time would go into looking for garbage among what stays."
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish():
    CPU["last"] = cpu()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    TOLD["cpu"] += cpu()
    if plugin := session.config.pluginmanager.get_plugin("unchanged"):
        TOLD["again"] = plugin.count or TOLD["again"]
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["told"] = TOLD


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    told = getattr(node, "workeroutput", {}).get("told")  # a worker that died has none
    if told:
        TOLD.update(told | {"cpu": TOLD["cpu"] + told["cpu"]})


def pytest_configure(config):
    if config.getoption("all", False) or config.option.markexpr == "deep":
        plugin = importlib.import_module("unchanged").Plugin(config, TESTS.parent)
        config.pluginmanager.register(plugin, "unchanged")
    if not config.getoption("bare", False):
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
def built(tmp_path_factory):
    """A checkout with its site built as `PYTHONPATH=.ci nbdev_docs` builds it, and what that said; needs
    Quarto.
    """
    if not (quarto := shutil.which("quarto")):
        pytest.skip("NOT CHECKED: quarto is not on PATH, the site was not built")
    checkout = importlib.import_module("checkout")
    root = checkout.copy(tmp_path_factory.mktemp("built") / "repository")
    path = os.pathsep.join([str(Path(quarto).parent), os.environ["PATH"]])
    search = os.pathsep.join([str(root), str(root / ".ci")])
    env = os.environ | {"PYTHONPATH": search, "PATH": path}
    if checkout.CHANGED != "all":
        listed = json.dumps([str(page) for page in checkout.rendered()])
        settings = root / "nbs" / "_quarto.yml"
        text = settings.read_text("utf-8").rstrip()
        alone = text.replace("type: website", f"type: website\n  render: {listed}")
        settings.write_text(alone + "\n", "utf-8")
    return root, subprocess.run(
        ["nbdev_docs"], cwd=root, env=env, capture_output=True, text=True
    )


@pytest.fixture(scope="session")
def one(tmp_path_factory):
    "(key, seed) -> what four small runs give in this process, one after the other."
    from dpcomm.evidence import records
    from dpcomm.experiments.run import runs

    folder = tmp_path_factory.mktemp("one")
    found = runs.run_grid("dprec-mnist", "smoke", [0, 1], folder, "linear.eps3")
    assert len(found) == 4
    return {(r.key, r.seed): records.result_of(r) for r in found}


@pytest.fixture(scope="session")
def pool():
    "Two workers for tests that wait for other processes."
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as executor:
        yield executor
        executor.shutdown(cancel_futures=True)


def reasons(report) -> tuple[Counter, Counter, Counter]:
    "How often each flag kept a cell from running, and each lack a check; cells to be flagged."
    told = {NOT_RUN: Counter(), NOT_CHECKED: Counter(), LONG: Counter()}
    ended = [*report.stats.get("passed", []), *report.stats.get("failed", [])]
    for name, line in (pair for test in ended for pair in test.user_properties):
        if name in told:
            told[name][line] += 1
    for skip in report.stats.get("skipped", []):
        reason = skip.longrepr[2].removeprefix("Skipped: ")
        told[NOT_CHECKED][reason.removeprefix("NOT CHECKED: ").split(":")[0]] += 1
    return tuple(told.values())


def slowest(report, count: int = 10) -> list[tuple[str, float]]:
    "The tests that used most CPU seconds, with what they set up."
    used = Counter()
    for test in (test for tests in report.stats.values() for test in tests):
        if hasattr(test, "cpu"):
            used[test.nodeid] += test.cpu
    return used.most_common(count)


def pytest_terminal_summary(terminalreporter, config):
    report = terminalreporter
    tier = "both tiers" if config.getoption("all", False) else "this tier"
    tier = "the deep tier" if config.option.markexpr == "deep" else tier
    flags, lacks, long = reasons(report)
    report.section("not run, not checked")
    for count, what in (
        (TOLD["deep"], "tests of the deep tier were not run; `pytest --all` does"),
        (TOLD["weekly"], "tests of the weekly run were not run; `pytest --all` does"),
        (TOLD["again"], "deep tests passed here before with the same code"),
        (flags.total(), "notebook cells flagged slow, gpu or eval: false were not run"),
        (lacks.total(), "cells and tests were NOT CHECKED" + ":" * bool(lacks)),
    ):
        report.write_line(f"{count:,} {what}")
    for reason, count in lacks.most_common():
        report.write_line(f"  {count} x {reason}")
    if long:
        report.section(f"cells of {LONG_CELL:g} CPU seconds or more without `#| slow`")
        for line in long:
            report.write_line(line)
    report.section("CPU time")
    for name, seconds in slowest(report):
        report.write_line(f"{seconds:6.1f} s  {name}")
    report.write_line(
        f"{TOLD['cpu'] / 60:.1f} CPU minutes in all; the budget of {tier} is {BUDGET[tier]}"
    )
