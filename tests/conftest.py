"Settings and fixtures shared by all tests."
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

NOT_RUN = []  # cells that a flag kept from running: named at the end of the report, never silently green


@pytest.fixture(scope="session")
def pool():
    "Two workers for tests that wait for other processes."
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as executor:
        yield executor
        executor.shutdown(cancel_futures=True)


def pytest_terminal_summary(terminalreporter):
    terminalreporter.section("cells not run")
    terminalreporter.write_line(f"{len(NOT_RUN)} notebook cells flagged slow, gpu or eval: false were not run"
                                + (":" if NOT_RUN else ""))
    for line in NOT_RUN:
        terminalreporter.write_line(f"  {line}")
