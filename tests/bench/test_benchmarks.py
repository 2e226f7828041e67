"""The scripts beside the package: contestants do the same work, and the forty settings that
the committed records hold are accounted as they say.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tables import tabled

SCRIPTS = Path("benchmarks").resolve()
RECORDS = [
    json.loads(line)
    for path in sorted(Path("dpcomm/assets/bench").glob("*.jsonl"))
    for line in path.read_text("utf-8").splitlines()
]
FIELDS = {"workload", "peer", "part", "cpu", "fraction", "rule"}


@pytest.fixture(scope="module")
def accountants():
    sys.path.insert(0, str(SCRIPTS))
    yield pytest.importorskip("accountants")
    sys.path.remove(str(SCRIPTS))


def league():
    "What the newest record has of accountants of other libraries."
    having = [record for record in RECORDS if "league" in record]
    return max(having, key=lambda record: record["date"])["league"]


def recorded():
    return {row["setting"]: row for row in league() if row["who"] == "dpcomm"}


def printed(script, *words):
    done = subprocess.run(
        [sys.executable, SCRIPTS / script, *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@tabled("name", ["everyone: 100 rounds", "sampled: sigma .8", "lists: a last round"])
def test_ours_is_what_the_record_says(accountants, name):
    bracket, row = accountants.ours(*accountants.SETTINGS[name]), recorded()[name]
    assert bracket.low <= row["eps"] * (1 + 1e-4)
    assert bracket.eps == pytest.approx(row["eps"], rel=1e-4)


@pytest.mark.slow
def test_all_forty_are_within_a_per_cent_of_the_best_valid_public_value(accountants):
    rows = league()
    assert set(recorded()) == set(accountants.SETTINGS)
    for name, setting in accountants.SETTINGS.items():
        bracket = accountants.ours(*setting)
        public = [r["eps"] for r in rows if r["setting"] == name and r["eps"]]
        best = min(eps for eps in public if eps >= bracket.low)
        assert bracket.low <= bracket.eps <= 1.01 * best, name
        assert bracket.eps <= (1.03 if "Skellam" in name else 1.01) * bracket.low, name


def test_dp_accounting_answers_and_refuses_what_it_has_not(accountants):
    call = accountants.LIBRARIES["dp_accounting"]["PLD"]
    told = accountants.limited(call, *accountants.SETTINGS["everyone: one round"])
    assert told["eps"] == pytest.approx(
        recorded()["everyone: one round"]["eps"], rel=1e-3
    )
    told = accountants.limited(
        call, *accountants.SETTINGS["whole numbers: Skellam, std 4"]
    )
    assert told["eps"] is None and "Skellam" in told["note"]


@pytest.mark.slow
def test_engines_and_the_plain_loop_do_the_same_work():
    record = printed("rounds.py", "W1", "--peer", "loop", "--repeats", "1")
    assert {row["peer"] for row in record["rows"]} == {"dpcomm", "loop"}
    assert sum(row["rule"] for row in record["rows"]) == 1
    for row in record["rows"]:
        assert row.keys() >= FIELDS and row["cpu"] and row["error"] <= 1e-3, row


def test_committed_records_are_of_the_same_work():
    for record in RECORDS:
        assert all((row["error"] or 0) <= 1e-3 for row in record["rows"]), record[
            "date"
        ]
