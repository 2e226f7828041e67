"""Beside Opacus: its accountants say what the record says. Where Opacus is not installed, NOT CHECKED."""

import os

import pytest
from checkout import ROOT

from dpcomm.bench import beside_opacus, peers

PYTHON = os.environ.get("DPCOMM_PEER_PYTHON")  # of Opacus, where it is not ours


def test_opacus_says_what_is_recorded():
    try:
        record = beside_opacus.run(PYTHON)
    except peers.NotRun as why:
        if "is not installed here" not in str(why):
            raise
        pytest.skip(f"NOT CHECKED: {why}")
    stored = peers.recorded("opacus")
    for now, then in zip(record["cases"], stored["cases"], strict=True):
        assert now == pytest.approx(then, rel=1e-3, abs=1e-4)
    for name, run in stored["runs"].items():
        assert record["runs"][name]["history"] == run["history"]
        assert record["runs"][name]["eps"] == pytest.approx(run["eps"], rel=1e-3)
        assert record["runs"][name]["accuracy"] > 75


def test_the_record_has_every_case():
    stored = peers.recorded("opacus")
    assert len(stored["cases"]) == len(beside_opacus.CASES)
    assert stored["versions"]["opacus"] and set(stored["runs"]) == {
        "poisson",
        "shuffled",
    }


def test_the_extra_names_opacus_and_the_core_does_not():
    settings = (ROOT / "settings.ini").read_text()
    extra = settings.partition("opacus_requirements = ")[2].splitlines()[0]
    core = settings.partition("\nrequirements = ")[2].splitlines()[0]
    version = peers.recorded("opacus")["versions"]["opacus"]
    assert extra == f"opacus=={version}" and "opacus" not in core


def test_an_answer_is_json_with_versions_and_a_failure_a_sentence():
    found = peers.answer(("json", "loads", '{"x": [1]}'), ("torch",), "bench")
    assert found["x"] == [1] and found["date"] and found["machine"]
    assert found["versions"] == peers.package_versions(("torch",))
    with pytest.raises(peers.NotRun, match="nothing to say"):
        peers.answer(("sys", "exit", "nothing to say"), ("torch",), "bench")
    with pytest.raises(peers.NotRun, match="gave no output for 1 seconds"):
        peers.answer(("time", "sleep", 60), ("torch",), "bench", limit=1)
    with pytest.raises(peers.NotRun, match=r"no-such is not.*\.\[bench\]"):
        peers.answer(("json", "loads"), ("no-such",), "bench")
