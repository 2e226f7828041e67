"The conformance suite as others run it, on a mechanism of their own."

import re
import sys

import pytest
from checkout import python

MINE = """
from dataclasses import dataclass

from dpcomm.mechanisms.pm import Pm

import tables


@dataclass(frozen=True)
class Mine(Pm):
    "A copy."

    name = "mine"


@dataclass(frozen=True)
class Biased(Pm):
    "A copy that is not what its moments say."

    name = "biased"

    def simulate(self, u, rng):
        return super().simulate(u, rng) * 1.5


class Stranger:
    pass
"""
LIVE = ["-p", "no:cacheprovider", "-q"]


@pytest.fixture
def folder(tmp_path):
    "A project that has a module by the name of one of the suite's helpers."
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "tables.py").write_text("OURS = True\n")
    (tmp_path / "test_own.py").write_text(
        "import mine, tables\n\n\ndef test_it():\n    import tables as again\n"
        "    assert tables.OURS and again is tables and mine.tables is tables\n"
    )
    return tmp_path


def checked(folder, *words):
    return python("-m", "pytest", *LIVE, *words, cwd=folder)


def test_what_does_not_keep_the_contract_fails_by_name(folder):
    chosen = "-k", "bias_and_variance or signed or test_it"
    words = "--dpcomm-mechanism=mine:Mine", "--dpcomm-mechanism=mine:Biased"
    done = checked(folder, *words, *chosen, "test_own.py")
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert done.returncode == 1 and failed, done.stdout + done.stderr
    assert all("biased" in line for line in failed), failed
    assert "4 passed" in done.stdout, done.stdout


@pytest.mark.deep
def test_a_mechanism_of_ones_own_is_put_to_the_whole_suite(folder):
    done = checked(folder, "--dpcomm-mechanism", "mine:Mine")
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 30


@pytest.mark.parametrize(
    "place, why",
    [
        ("absent:Mine", "cannot be imported"),
        ("mine:Absent", "cannot be imported"),
        ("mine:Stranger", "Stranger"),
        ("gausian", "gaussian"),
    ],
)
def test_what_is_no_mechanism_is_a_sentence(folder, monkeypatch, place, why):
    from dpcomm.interop import conformance

    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    asked = type("Config", (), {"getoption": lambda self, name: [place]})()
    with pytest.raises(pytest.UsageError, match=why):
        conformance.pytest_configure(asked)
    assert conformance.selected() == ()
    sys.modules.pop("mine", None)
    sys.modules.pop("tables", None)
