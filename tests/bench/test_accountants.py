"""The league of accountants: forty settings, the record of what all said, and ours again."""

import json

import pytest
from tables import tabled

from dpcomm.bench import accountants
from dpcomm.bench import suite as bench
from dpcomm.bench.accountants import GROUPS, SETTINGS, ours, standings
from dpcomm.evidence import measurements

PLACES = standings(measurements.league()["league"])


def test_there_are_forty_settings_of_every_kind_and_the_record_has_all():
    assert len(SETTINGS) == 40 and set(PLACES) == set(SETTINGS)
    assert min(map(len, GROUPS.values())) >= 4
    assert min(delta for _, delta in SETTINGS.values()) <= 1e-15
    who = {row["who"] for row in measurements.league()["league"]}
    assert who == {accountants.OURS} | {
        f"{library}, {kind}"
        for library, kinds in accountants.LIBRARIES.items()
        for kind in kinds
    }


def test_ours_is_within_one_per_cent_of_the_best_public_value_that_is_valid():
    for name, one in PLACES.items():
        assert one["low"] <= one["ours"] <= 1.01 * (one["best"] or one["ours"]), name
        assert one["ours"] <= (1.03 if "Skellam" in name else 1.01) * one["low"], name


@tabled("name", ["everyone: 100 rounds", "sampled: sigma .8", "lists: a last round"])
def test_the_record_is_what_ours_says(name):
    found = ours(SETTINGS[name])
    assert found.low <= PLACES[name]["ours"] * (1 + 1e-4)
    assert found.eps == pytest.approx(PLACES[name]["ours"], rel=1e-4)


@pytest.mark.deep
def test_all_forty_once_more():
    for name, one in PLACES.items():
        found = ours(SETTINGS[name])
        assert found.low <= found.eps <= 1.01 * (one["best"] or one["ours"]), name
        assert found.eps <= (1.03 if "Skellam" in name else 1.01) * found.low, name


def test_a_value_below_the_truth_is_no_best_value():
    said = dict(setting="a", cpu=0.1, note="")
    rows = [
        said | dict(who=accountants.OURS, eps=1.001, low=1.0),
        said | dict(who="one", eps=0.99),
        said | dict(who="two", eps=1.2),
        said | dict(who="three", eps=None, note="says inf"),
    ]
    one = standings(rows)["a"]
    assert one["below"] == ["one"] and one["best"] == 1.2
    assert one["notes"] == {"three": "says inf"}
    assert "says inf" in str(accountants.refusals(rows))
    assert standings(rows[:1])["a"]["best"] is None


def test_dp_accounting_is_asked_and_refuses_what_it_has_not():
    answer = accountants.LIBRARIES["dp_accounting"]["PLD"]
    told = accountants._limited(answer, *SETTINGS["everyone: one round"])
    assert told["eps"] == pytest.approx(PLACES["everyone: one round"]["ours"], rel=1e-3)
    told = accountants._limited(answer, *SETTINGS["whole numbers: Skellam, std 4"])
    assert told["eps"] is None and "Skellam" in told["note"]


@tabled(
    "raised, says",
    [
        (MemoryError(), "runs out of memory"),
        (ValueError("too\nlong"), "ValueError: too"),
        (float("inf"), "says inf"),
    ],
)
def test_an_accountant_that_fails_says_why(raised, says):
    def call():
        if isinstance(raised, float):
            return raised
        raise raised

    told = accountants._limited(call)
    assert told["eps"] is None and told["note"] == says


def test_a_library_alone_is_refused_and_one_that_is_missing_named():
    with pytest.raises(ValueError, match="add accountants to the names"):
        bench.check(("W1",), ("dp_accounting",), 1, 1)
    found = bench.check(("accountants",), ("dp_accounting",), 1, 1)
    assert list(found) == ["dp_accounting: dp_accounting"]
    with pytest.raises(ValueError, match="it must be one of"):
        accountants.library_version("autodp")


def test_a_folder_without_a_league_says_how_to_make_one(tmp_path):
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(ValueError, match="dpcomm bench accountants"):
        measurements.league(tmp_path)
    record = measurements.league() | dict(date="2030-01-01")
    (tmp_path / "mine.jsonl").write_text(json.dumps(record) + "\n")
    assert measurements.league(tmp_path)["date"] == "2030-01-01"
