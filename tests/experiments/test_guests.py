"""Mechanisms and accountants inside other people's libraries, told again where those
are installed.
"""

import json
import os

import pytest

from dpcomm.experiments import beside_opacus, inside_pfl, peers
from dpcomm.report import papers

PYTHON = os.environ.get("DPCOMM_PEER_PYTHON")  # of the libraries, where it is not ours


def has(library):
    try:
        return peers.tell(f"import {library}\nprint('true')", PYTHON)
    except ValueError:
        return False


def stored(name):
    return json.loads((papers.assets("peers") / f"{name}.json").read_text("utf-8"))


def test_a_script_tells_its_last_line_and_its_failure():
    assert peers.tell("print('words')\nprint('[1, 2]')") == [1, 2]
    with pytest.raises(ValueError, match="(?s)the script failed: .*ZeroDivisionError"):
        peers.tell("1 / 0")


def test_pfl_ends_with_what_our_mechanism_decodes():
    if not has("pfl"):
        pytest.skip("NOT CHECKED: pfl is not installed here")
    told = peers.tell(inside_pfl.MESSAGES + inside_pfl.MODEL + inside_pfl.TRAIN, PYTHON)
    kept = stored("pfl")
    for name in ("messages", "bytes", "guarantee"):
        assert told[name] == kept[name]
    assert told["gap"] < 1e-5 and told["after"] < told["before"]


def test_opacus_says_what_is_stored():
    if not has("opacus"):
        pytest.skip("NOT CHECKED: opacus is not installed here")
    told, kept = peers.tell(beside_opacus.SCRIPT, PYTHON), stored("opacus")
    assert told["history"] == kept["history"]
    for name in ("rdp", "prv"):
        assert told[name] == pytest.approx(kept[name], abs=1e-4)
