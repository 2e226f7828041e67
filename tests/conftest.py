"""Settings and fixtures shared by all tests.

`pytest` leaves out what is marked `slow`, `flower` or `gpu` (pytest.ini) and runs as on a
fresh machine: an empty home, no data, no network. `pytest -m slow` uses the data and tools
that are there, and says at its end what it could not check.
"""

import importlib
import importlib.util
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A process in the background ignores ^C, and so would all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
TESTS = Path(__file__).resolve().parent
sys.path[:0] = [
    str(folder)
    for folder in (TESTS.parent, TESTS, *sorted(TESTS.iterdir()))
    if folder.is_dir()
]

OFFLINE = TESTS / "offline"
NOT_CHECKED = "NOT CHECKED"  # what a missing data set or tool kept from being checked
# what needs Flower is collected where it is
collect_ignore_glob = ["interop/test_flower_*"] * (not importlib.util.find_spec("flwr"))
LONGEST = ("test_built_site.py", "test_pages.py")  # start first


def bare(env: dict, home) -> dict:
    "An environment as on a fresh machine: empty home and cache, no data, no network."
    kept = {
        name: value
        for name, value in env.items()
        if name != "DPCOMM_DATA"
        and not name.lower().endswith("_proxy")
        and not name.startswith("XDG_")
    }
    search = os.pathsep.join(filter(None, [str(OFFLINE), env.get("PYTHONPATH")]))
    home = dict(HOME=str(home), XDG_CACHE_HOME=str(Path(home) / ".cache"))
    return kept | home | {"PYTHONPATH": search}


def pytest_configure(config):
    if "not slow" not in (config.option.markexpr or ""):
        return
    home = tempfile.mkdtemp()
    config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))
    settings = bare(dict(os.environ), home)
    os.environ.clear()
    os.environ.update(settings)
    runpy.run_path(str(OFFLINE / "sitecustomize.py"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    "A file's tests run in one process, which makes their fixtures once; pages anywhere."
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::")[0].replace("test_built_site", "test_site")
            return nodeid if file.endswith("test_pages.py") else file

    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONGEST)


def or_skip(load, *args, **more):
    "A data set from disk; a skip that names it where it is not there."
    try:
        return load(*args, **more)
    except FileNotFoundError as error:
        pytest.skip(f"{NOT_CHECKED}: {error}")


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    "A checkout with its site built by `nbdev_docs`, and what that said; needs Quarto."
    if not (quarto := shutil.which("quarto")):
        pytest.skip(f"{NOT_CHECKED}: quarto is not on PATH, the site was not built")
    checkout = importlib.import_module("checkout")
    root = checkout.copy(tmp_path_factory.mktemp("built") / "repository")
    path = os.pathsep.join([str(Path(quarto).parent), os.environ["PATH"]])
    search = os.pathsep.join([str(root), str(root / ".ci")])
    env = os.environ | {"PYTHONPATH": search, "PATH": path}
    return root, subprocess.run(
        ["nbdev_docs"], cwd=root, env=env, capture_output=True, text=True
    )


@pytest.fixture(scope="session")
def one(tmp_path_factory):
    "(key, seed) -> what four small runs give in this process, one after the other."
    from dpcomm.evidence import records
    from dpcomm.experiments.run import runs

    folder = tmp_path_factory.mktemp("one")
    made = runs.run_grid("dprec-mnist", "smoke", [0, 1], folder, "linear.eps3")
    assert len(made) == 4
    return {(r.key, r.seed): records.result_of(r) for r in made}


def lacks(stats: dict) -> Counter:
    "How often each lack of data or tools kept a test or a cell from being checked."
    tests = [*stats.get("passed", []), *stats.get("failed", [])]
    told = [
        line for t in tests for name, line in t.user_properties if name == NOT_CHECKED
    ]
    reasons = [skip.longrepr[2] for skip in stats.get("skipped", [])]
    told += [
        r.removeprefix("Skipped: ").removeprefix(f"{NOT_CHECKED}: ") for r in reasons
    ]
    return Counter(line.split(":")[0] for line in told)


def pytest_terminal_summary(terminalreporter):
    if missing := lacks(terminalreporter.stats):
        terminalreporter.section("not checked")
        for reason, count in missing.most_common():
            terminalreporter.write_line(f"  {count} x {reason}")
