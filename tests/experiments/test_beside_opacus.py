"""Beside Opacus: its history becomes a Guarantee, and its accountants say what the
record says. Where Opacus is not installed, NOT CHECKED.
"""

import os

import pytest
from checkout import ROOT

from dpcomm.experiments import beside_opacus, peers
from dpcomm.privacy import accounting

PYTHON = os.environ.get("DPCOMM_PEER_PYTHON")  # of Opacus, where it is not ours
HISTORY = [(1.1, 0.01, 1000)]


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


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
def test_a_history_of_one_part_is_a_sampled_gaussian(accountant):
    found = beside_opacus.guarantee(HISTORY, 1e-5, accountant)
    ours = accounting.gaussian_guarantee(
        *(1.1, 1e-5, 0.01, 1000), sampling="poisson", accountant=accountant
    )
    assert found.eps == ours.eps and found.rounds == 1000 and found.q == 0.01
    named = found.unit, found.relation, found.sampling, found.trust
    assert named == ("example", "add-remove", "poisson", "central")
    assert "floating point" in found.note, "Opacus adds floats"


def test_parts_add_up():
    whole = beside_opacus.guarantee(HISTORY, 1e-5, "rdp-balle")
    halves = [(1.1, 0.01, 400), (1.1, 0.01, 600)]
    parts = beside_opacus.guarantee(halves, 1e-5, "rdp-balle")
    assert parts.eps == pytest.approx(whole.eps) and parts.rounds == 1000
    more = beside_opacus.guarantee([*halves, (0.9, 0.01, 10)], 1e-5, "rdp-balle")
    assert more.eps > whole.eps


def test_batches_that_are_no_poisson_samples_are_said_first():
    found = beside_opacus.guarantee(HISTORY, 1e-5, poisson=False)
    assert str(found).startswith("As if every batch were a Poisson sample (premise")
    every = beside_opacus.guarantee([(5.0, 1.0, 10)], 1e-5, poisson=False)
    assert every.sampling == "none" and not every.premises


@pytest.mark.parametrize(
    "history, accountant, said",
    [
        ([], "rdp-balle", "history has 0 parts"),
        (2 * HISTORY, "pld", "history has 2 parts.*pass accountant='rdp-balle'"),
        (HISTORY, "prv", "accountant is 'prv'"),
    ],
)
def test_what_cannot_be_accounted_is_refused(history, accountant, said):
    with pytest.raises(ValueError, match=said):
        beside_opacus.guarantee(history, 1e-5, accountant)


def test_the_extra_names_opacus_and_the_core_does_not():
    settings = (ROOT / "settings.ini").read_text()
    extra = settings.partition("opacus_requirements = ")[2].splitlines()[0]
    core = settings.partition("\nrequirements = ")[2].splitlines()[0]
    version = peers.recorded("opacus")["versions"]["opacus"]
    assert extra == f"opacus=={version}" and "opacus" not in core


def test_an_answer_is_json_with_versions_and_a_failure_a_sentence():
    found = peers.answer("print('a')\nprint('{\"x\": 1}')", ("torch",), "bench")
    assert found["x"] == 1 and found["date"] and found["machine"]
    assert found["versions"] == peers.package_versions(("torch",))
    with pytest.raises(peers.NotRun, match="nothing to say"):
        peers.answer("raise SystemExit('nothing to say')", ("torch",), "bench")
    with pytest.raises(peers.NotRun, match="said nothing for 1 seconds"):
        peers.answer("import time; time.sleep(60)", ("torch",), "bench", limit=1)
    with pytest.raises(peers.NotRun, match=r"no-such is not.*\.\[bench\]"):
        peers.answer("", ("no-such",), "bench")
