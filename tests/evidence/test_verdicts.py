"The rules of the verdict against the page's prose, and every table against its records."

import itertools
import math
from collections import Counter
from datetime import date, timedelta

import numpy as np
import pytest
from made_up import made_up, replace
from scipy import stats
from tables import tabled

from dpcomm.evidence import claims, paper_tables, records, verdicts
from dpcomm.evidence.records import Record
from dpcomm.evidence.verdicts import Evidence, Ours, SeedVariance, Summary

FED, SIX, SMALL = "mnist.eps3.fedavg.acc", "mnist.eps6.rec.acc", "mnist.rec.comm"
# 69.5, tol 3; 43, tol 0.5, lower is better, exact; DP-FedAvg above DP-REC; 43 over 0.01
KEYS = "mnist.eps3.rec.acc", "mnist.fedavg.comm", "mnist.eps3.order", "mnist.ratio"
ACC, SIZE, ORDER, RATIO = (paper_tables.cell("dprec", key) for key in KEYS)
PAPERS = paper_tables.papers()
POINTS = "percentage points"


def record(seed=0, cells=None, scale="full", key="all", **more) -> Record:
    "A made-up record of cells key -> number or [number, unit]."
    cells = {
        k: v if isinstance(v, list) else [v, "GiB" if k.endswith("comm") else "percent"]
        for k, v in (cells or {}).items()
    }
    return made_up(key, seed, scale=scale, cells=cells, **more)


def seeded(values: dict, **more) -> list:
    "A record a seed, of key -> a number a seed."
    n = max(map(len, values.values()))
    return [
        record(s, {k: v[s] for k, v in values.items() if s < len(v)}, **more)
        for s in range(n)
    ]


def row(found, key) -> list:
    "Ours, difference, verdict and link of a number of Table 1 in a table of records."
    made = verdicts.verdict_table("dprec", "table1", found=verdicts.evidence_of(found))
    return next(told for name, _, *told in made.rows if name == key)


def quantile(df) -> float:
    return float(stats.t.ppf(0.975, df))


def summary(mean, half, unit="percent", df=3) -> Summary:
    "Ours with a given half of its 95 % interval."
    return Summary(mean, half / quantile(df), df + 1, unit, df)


def evidence(*found, spreads=()) -> Evidence:
    return Evidence(verdicts.ours_by_key(found), (), tuple(spreads))


# ---- from seeds to a number


@tabled("n, m", [(2, 2), (2, 12), (3, 4), (12, 3), (12, 12)])
def test_the_half_width_is_welchs(n, m):
    rng = np.random.default_rng(100 * n + m)
    for spread in (0.01, 1.0, 30.0):
        ours = 70.0 + rng.standard_normal(n)
        theirs = 69.0 + spread * rng.standard_normal(m)
        cell = replace(ACC, spread=float(stats.sem(theirs)), n_runs=m)
        found = verdicts.half_width(cell, verdicts.cell_summary(ours))
        interval = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval()
        assert found == pytest.approx((interval.high - interval.low) / 2, rel=1e-9)


def test_the_half_width_where_an_error_is_not_known():
    s, one = verdicts.cell_summary([70.1, 68.0, 71.5]), verdicts.cell_summary([43.0])
    spread = replace(ACC, spread=0.0), replace(ACC, n_runs=None)
    assert verdicts.half_width(spread[0], s) == pytest.approx(quantile(2) * s.se)
    normal = 1.5 * stats.norm.ppf(0.975)  # a spread without its runs
    found = verdicts.half_width(spread[1], Summary(70.0, 0.0, 1))
    assert found == pytest.approx(normal)
    assert verdicts.half_width(SIZE, one) == 0.0 and SIZE.kind == "exact"
    assert verdicts.half_width(ACC, one) == math.inf


@tabled("n, runs", [(2, None), (3, 1), (10, None), (4, 3)])
def test_a_number_printed_without_a_spread_gets_a_prediction_interval(n, runs):
    values = 70.0 + np.random.default_rng(n).standard_normal(n)
    s, sd = verdicts.cell_summary(values), values.std(ddof=1)
    cell = replace(ACC, spread=None, n_runs=runs)
    wide = quantile(n - 1) * sd * math.sqrt(1 / n + 1 / (runs or 1))
    assert verdicts.half_width(cell, s) == pytest.approx(wide)


# ---- borrowed spreads

HERE = dict(
    config=dict(model="cnn", d=582026, mechanism="Rec(clip_norm=1.0)"),
    data=dict(name="mnist"),
)
KEY = "ours.a.acc"
FAMILY = verdicts.family_of(record(**HERE), KEY)
LENT = SeedVariance(FAMILY, "made_up", 4.0, 2), SeedVariance(FAMILY, "other", 1.0, 4)
ONE = Summary(70.0, None, 1, "percent")


def mine(unit="percent", key=KEY, value=70.0, **more) -> Ours:
    "One seed of ours."
    return Ours({0: value}, unit, record(**HERE | more), key)


def test_one_seed_borrows_the_mean_variance_of_its_family_a_vote_a_setting():
    s = verdicts.with_pooled_variance(ONE, mine(), LENT)
    df = (4 + 1) ** 2 / (4**2 / 2 + 1**2 / 4)  # Satterthwaite, of the sum
    assert (s.se, s.df) == (pytest.approx(math.sqrt(5 / 2)), pytest.approx(df))
    assert (s.mean, s.n, s.spread_of) == (70.0, 1, "2 experiments")
    assert s.reach == pytest.approx(quantile(df) * math.sqrt(5 / 2))
    share = replace(ONE, unit="fraction")
    s = verdicts.with_pooled_variance(share, mine("fraction"), LENT[:1])
    assert (s.se, s.df, s.spread_of) == (pytest.approx(0.02), 2, "made_up")


def test_nobody_lends_outside_the_family():
    config = HERE["config"]
    for other in (
        dict(paper="imvu"),
        dict(data=dict(name="fashion-mnist")),
        dict(config=config | dict(model="lenet5")),
        dict(config=config | dict(d=61706)),
        dict(config=config | dict(mechanism="Gaussian(clip_norm=1.0)")),
        dict(config={}),
        dict(trained=False),
        dict(key="ours.a.last.acc"),
    ):
        assert verdicts.with_pooled_variance(ONE, mine(**other), LENT) == ONE
    assert verdicts.with_pooled_variance(ONE, mine(), LENT) != ONE
    assert verdicts.with_pooled_variance(ONE, mine(), ()) == ONE


def test_a_difference_has_the_variances_of_both_sides():
    both = {FED: 81.0, ACC.key: 70.0}
    for sides, se in ((LENT, math.sqrt(2 * 2.5)), (LENT[:1], math.sqrt(2 * 4.0))):
        s = evidence(record(0, both, **HERE), spreads=sides).summary(ORDER)
        assert (s.mean, s.se) == (11.0, pytest.approx(se))
    lost = evidence(record(0, both, config={}), spreads=LENT).summary(ORDER)
    assert lost.se is None, "nobody of the family"
    points = record(0, {ORDER.key: [7.0, POINTS]}, **HERE)
    assert evidence(points, spreads=LENT).summary(ORDER).se is None, "several settings"


def curve(last, best=80.0, **more) -> Record:
    "A run that ends at `last` after its best score."
    given = HERE | dict(history={"accuracy": [10.0, best, last]}) | more
    return record(cells={KEY: last}, **given)


@tabled("last, lost", [(80.0, False), (60.0, False), (59.9, True), (10.0, True)])
def test_a_diverged_run_neither_lends_nor_borrows(last, lost):
    found = verdicts.ours_by_key([curve(75.0), curve(last, seed=1)])
    assert verdicts.diverged(last, "percent", curve(last)) == lost
    assert found[KEY].diverged == lost
    assert (verdicts.spreads_of(found) == []) == lost
    alone = verdicts.ours_by_key([curve(last)])[KEY]
    assert (verdicts.with_pooled_variance(ONE, alone, LENT) == ONE) == lost
    share = record(cells={KEY: [last / 100, "fraction"]}, history={"accuracy": [80.0]})
    assert verdicts.diverged(last / 100, "fraction", share) == lost


def test_numbers_with_several_seeds_lend_once_and_others_do_not():
    values = {KEY: [70.0, 72.0, 74.0], "ours.b.acc": [80.0], SMALL: [0.01] * 3}
    lent = [SeedVariance(FAMILY, "made_up", pytest.approx(4.0), 2)]
    found = verdicts.ours_by_key(seeded(values, **HERE))
    assert verdicts.spreads_of(found) == lent
    again = {"ours.c.acc": [72.0, 74.0, 70.0]}
    twice = seeded(again, **HERE | dict(experiment="second", key="c"))
    found = verdicts.ours_by_key([*seeded(values, **HERE), *twice])
    assert verdicts.spreads_of(found) == lent, "the same runs in two experiments"
    formulas = verdicts.ours_by_key(seeded(values, **HERE | dict(trained=False)))
    assert verdicts.spreads_of(formulas) == []


# ---- the verdict, by enumeration

EXACT = replace(ACC, value=50.0, tol=4.0, spread=None, n_runs=None)


def trained(n, lent="", gap=20.0) -> Summary:
    "Far above the paper, and known well."
    return Summary(69.5 + gap, 0.01, n, "percent", n - 1, lent)


@tabled(
    "s, word",
    [
        (trained(1, "others"), "open"),
        (trained(2), "open"),
        (trained(12, "others"), "open"),
        (trained(3), "above"),
        (trained(3, gap=-20.0), "below"),
        (trained(2, gap=0.0), "match"),
        (Summary(89.5, None, 1, "percent"), "open"),
    ],
)
def test_fewer_than_three_trained_seeds_contradict_nobody(s, word):
    assert verdicts.verdict(ACC, s) == word
    assert claims.says(ACC, s) == ("" if word in ("open", "match") else "fails")
    neither = replace(ACC, better="neither")
    differs = "differs" if word in ("above", "below") else word
    assert verdicts.verdict(neither, s) == differs
    exact = replace(ACC, kind="exact")
    assert verdicts.verdict(exact, replace(s, spread_of="")) != "open" or s.se is None
    assert verdicts.verdict(SIZE, [99.0]) == "below", "nothing is trained"


@tabled("n, lent", [(1, "others"), (2, ""), (3, ""), (3, "others")])
def test_fewer_than_three_trained_seeds_refute_no_ordering(n, lent):
    s = Summary(-5.0, 0.01, n, POINTS, max(n - 1, 3 * bool(lent)), lent)
    few = n < 3 or bool(lent)
    assert verdicts.verdict(ORDER, s) == ("open" if few else "order fails")
    assert verdicts.verdict(ORDER, replace(s, mean=5.0)) == "order holds"
    late = replace(s, mean=-0.5, day=verdicts.TIE_SET_ON + timedelta(days=1))
    assert verdicts.verdict(ORDER, late) == ("open" if few else "order fails")


def judged(cell, gap, half) -> str:
    "The page's prose, of ours less the paper's and whole half of our own interval."
    tol, own = int(cell.tol), None if cell.own is None else int(cell.own - cell.value)
    known = range(-tol, tol + 1)  # where a half, a gap and a slip may lie
    if half in known and gap in known:
        return "match"
    if half in known and own is not None and gap - own in known:
        return "unexplained"
    if half in known and -2 * tol <= gap <= 2 * tol:
        return "near"
    reach = half * math.sqrt(5) if cell.kind == "stochastic" else half
    low, high = gap - reach, gap + reach
    if low > tol or high < -tol:
        if cell.better == "neither":
            return "differs"
        more = low > tol
        return "above" if more != (cell.better == "lower") else "below"
    return "agrees" if gap in known else "open"


SIDES = "higher", "lower", "neither"


@tabled("own, better", [*itertools.product([None, 57.0], SIDES), (74.0, "lower")])
@tabled("kind", ["exact", "stochastic"])
def test_the_verdict_is_what_the_page_says_at_every_gap_and_half_width(
    kind, better, own
):
    cell, seen = replace(EXACT, kind=kind, better=better, own=own), Counter()
    for gap, half in itertools.product(range(-33, 34), range(0, 34)):
        word = verdicts.verdict(cell, summary(50.0 + gap, half))
        assert word == judged(cell, gap, half), (gap, half)
        seen[word] += 1
    words = {"match", "near", "agrees", "open"}
    words |= {"differs"} if better == "neither" else {"above", "below"}
    assert set(seen) == words | ({"unexplained"} if own else set())


@tabled("word, values", [("match", (83.7, 80.5)), ("near", (83.7001, 85.3, 78.9))])
def test_an_exact_number_is_judged_from_one_value(word, values):
    cell = replace(SIZE, value=82.1, tol=1.6, better="higher")
    assert {verdicts.verdict(cell, [value]) for value in values} == {word}
    assert 82.1 + 1.6 != 83.7 or 82.1 - 1.6 != 80.5, "binary fractions"


def test_the_papers_own_spread_hinders_disagreement_alone():
    "69.5 +/- 1.5 of three runs, tolerance 3: half its 95 % interval is 6.45."
    cells = replace(ACC, spread=None), replace(ACC, spread=1.5, n_runs=3)
    for gap, *words in (
        (2.9, "match", "match"),
        (5.9, "near", "near"),
        (6.1, "above", "open"),
        (9.4, "above", "open"),
        (9.5, "above", "above"),
    ):
        s = summary(69.5 + gap, 0.0)
        assert [verdicts.verdict(cell, s) for cell in cells] == words


def test_an_order_has_the_level_of_the_seeds_that_both_sides_share():
    first = seeded({FED: [90.0, 91.0, 92.0], ACC.key: [80.0, 82.0, 81.0]})
    added = [record(seed, {FED: 95.0}, notes=[records.BEYOND]) for seed in (3, 4, 5)]
    found = evidence(*first, *added)
    order, side = found.summary(ORDER), found.ours[FED].summary
    assert (order.n, order.level, side.n, side.level) == (3, 0.95, 6, 0.995)


BOUND = replace(ORDER, above=None, below=None)


@tabled("better", ["higher", "lower"])
@tabled("bound, sign, value", [(None, 1, 0.0), ("above", 1, -1.0), ("below", -1, 10.0)])
def test_an_ordering_asks_on_which_side_ours_lies(bound, sign, value, better):
    cell, seen = replace(BOUND, bound=bound, value=value) if bound else ORDER, Counter()
    cell = replace(cell, better=better, spread=100.0, n_runs=2)  # which do not count
    for gap, half in itertools.product(range(-9, 10), range(0, 9)):
        if abs(gap) == half != 0:
            continue
        word = "order holds" if sign * gap > 0 else "order fails"
        word = word if abs(gap) > half else "open"
        s = summary(value + gap, half, POINTS)
        assert verdicts.verdict(cell, s) == word, (gap, half)
        seen[word] += 1
    assert len(seen) == 3
    assert verdicts.verdict(ORDER, [50.0]) == "open", "one trained difference"


@tabled(
    "mean, half, late, word",
    [
        (0.4, 0.6, True, "tie"),
        (-0.4, 0.6, True, "tie"),
        (0.4, 0.61, True, "open"),
        (0.4, 0.6, False, "open"),
        (0.4, 0.3, True, "order holds"),
        (-0.4, 0.3, True, "order fails"),
    ],
)
def test_a_tie_lies_within_a_margin_set_before_the_runs(mean, half, late, word):
    day = verdicts.TIE_SET_ON + timedelta(days=int(late))
    for cell, s in (
        (ORDER, summary(mean, half, POINTS)),
        (replace(BOUND, bound="above", value=-1.0), summary(mean - 1, half, POINTS)),
        (replace(ORDER, unit="fraction"), summary(mean / 100, half / 100, "fraction")),
    ):
        assert verdicts.verdict(cell, replace(s, day=day)) == word
    undated = summary(mean, half, POINTS)
    assert verdicts.verdict(ORDER, undated) == (word if word != "tie" else "open")


def test_a_difference_is_as_old_as_its_older_side():
    sides = {FED: "2026-12-01T10:00:00+00:00", ACC.key: "2026-11-20"}
    pair = [record(0, {k: 60.0}, key=k, origin={"date": d}) for k, d in sides.items()]
    assert evidence(*pair).summary(ORDER).day == date(2026, 11, 20)


def test_the_papers_slips_are_judged_by_its_own_arithmetic():
    slips = [c for c in paper_tables.cells("dprec") if c.own is not None]
    assert len(slips) == 5 and sum(bool(c.arithmetic) for c in slips) == 1
    for cell in slips:
        word = "paper's slip" if cell.arithmetic else "unexplained"
        assert verdicts.verdict(cell, [cell.own]) == word, cell.key
        assert verdicts.verdict(cell, [cell.value]) == "match", cell.key
        far = cell.own + 3 * cell.tol + abs(cell.own - cell.value)
        assert verdicts.verdict(cell, [far]) in ("above", "below", "differs"), cell.key


def test_other_units_are_not_comparable_and_first_words_decide():
    for unit, word in (("bytes", "not comparable"), ("GiB", "match"), ("", "match")):
        assert verdicts.verdict(SIZE, verdicts.cell_summary([43.0], unit)) == word


def test_what_is_only_shown_is_not_run_without_ours_and_never_judged_with():
    cell = replace(ACC, kind="shown", tol=0.0)
    assert verdicts.verdict(cell, None) == "not run" == verdicts.verdict(ACC, None)
    for s in ([69.5], [0.0], summary(69.5, 0.1)):
        assert verdicts.verdict(cell, s) == "not comparable"
    assert len(set(verdicts.VERDICTS.values())) == len(verdicts.VERDICTS) == 14


# ---- finding ours


def test_quotients_and_differences_are_taken_seed_by_seed():
    values = {FED: [90.0, 80.0, 85.0], ACC.key: [60.0, 70.0]}
    values |= {SIZE.key: [40.0, 44.0, 42.0], SMALL: [0.01, 0.02]}
    found = verdicts.ours_by_key(seeded(values))
    order, ratio = (verdicts.our_number(cell, found) for cell in (ORDER, RATIO))
    assert order.values == {0: 30.0, 1: 10.0} and order.unit == POINTS
    assert ratio.values == {0: 4000.0, 1: 2200.0} and ratio.unit == "x"
    s = order.summary
    assert (s.mean, s.n, s.se) == (20.0, 2, pytest.approx(10.0))


def test_runs_of_the_same_settings_fill_the_numbers_of_both_texts():
    found = verdicts.ours_by_key(seeded({FED: [90.0, 80.0]}))
    own, earlier = (paper_tables.cell("dprec", key) for key in (FED, f"iclr.{FED}"))
    assert earlier.same_as == FED
    assert verdicts.our_number(earlier, found) is verdicts.our_number(own, found)
    assert verdicts.our_number(replace(earlier, same_as=None), found) is None


FRACTION = {ACC.key: [0.7, "fraction"]}


@tabled(
    "other",
    [dict(key="b"), dict(experiment="second", seed=1), dict(seed=1, cells=FRACTION)],
)
def test_two_runs_that_claim_one_cell_are_refused(other):
    cells = {ACC.key: 70.0}
    pair = [record(0, cells), record(**dict(seed=0, cells=cells) | other)]
    units = r"\(percent\) .*\(fraction\)|\(fraction\) .*\(percent\)"
    says = f"{ACC.key}, seed [01] appears in (made_up|second).*"
    says += f"({units})" if "cells" in other else ""
    for found in (pair, pair[::-1]):
        with pytest.raises(ValueError, match=says):
            verdicts.ours_by_key(found)


def test_seeds_of_one_number_come_from_runs_of_one_experiment_and_count_once():
    pair = record(0, {ACC.key: 70.0}), record(1, {ACC.key: 72.0}, key="b")
    assert verdicts.ours_by_key(pair)[ACC.key].values == {0: 70.0, 1: 72.0}
    places = {71.0: {"machine": "here"}, 70.0: {"machine": "there"}}
    pair = [record(0, {ACC.key: x}, origin=place) for x, place in places.items()]
    assert verdicts.ours_by_key(pair)[ACC.key].values == {0: 71.0}, "the first"


# ---- the verdict table


@tabled("scale, prefix", [("smoke", ""), ("quick", ""), ("quick", "ours.quick.")])
def test_a_smaller_record_is_shown_and_earns_no_verdict(scale, prefix):
    some = seeded({prefix + ACC.key: [69.0, 71.0]}, scale=scale)
    told = f"{scale} 70.00 (n = 2): no verdict"
    assert row(some, ACC.key) == [told, "", "○ not run", ""]
    assert verdicts.evidence_of(some).ours == {}
    full = seeded({ACC.key: [70.0, 70.1, 70.2]})
    assert row(some + full, ACC.key)[0] == "70.10 +/- 0.06 (n = 3)"


def test_numbers_keep_the_digits_that_count():
    found = row(seeded({SMALL: [0.01020, 0.01024]}), SMALL)
    assert found[0] == "0.0102 +/- 2e-05 (n = 2)"
    for value, cell, shown in (
        (70.1234, ACC, "70.12"),
        (1234.5678, RATIO, "1,234.6"),
        (1e-6, replace(ACC, value=1e-5), "0.0000010"),
    ):
        assert verdicts.format_value(value, cell) == shown
    for cell, shown in (
        (RATIO, "4,300 x"),
        (ORDER, "> 0: 12.6 percentage points"),
        (replace(ACC, read_err=0.5, spread=None), "~69.5 percent"),
        (replace(ORDER, bound="below", value=6.5), "< 6.5 percentage points"),
    ):
        assert verdicts.format_paper(cell) == shown


def test_causes_become_numbered_notes_and_equal_ones_share_a_number(monkeypatch):
    blocks = [(ACC.key, "the model"), (SIX, "the split"), (FED, "the model")]
    causes = tuple(paper_tables.Reason(why, keys=(key,)) for key, why in blocks)
    given = replace(paper_tables.paper("dprec"), causes=causes)
    monkeypatch.setattr(paper_tables, "paper", lambda id: given)
    found = evidence(*seeded(dict.fromkeys([ACC.key, SIX, FED], [95.0, 95.1, 95.2])))
    t = verdicts.verdict_table("dprec", "table1", found=found)
    assert len(set(t.notes)) == len(t.notes)
    n = {note: i for i, note in enumerate(t.notes, 1)}
    marks = {r[0]: r[4] for r in t.rows}
    for key, text in blocks:
        assert f"[{n[text]}]" in marks[key] and marks[key].startswith("▲ above")
    assert marks[SMALL] == "○ not run"


def test_every_interval_is_counted_and_a_twentieth_of_them_is_expected_to_miss():
    n = [verdicts.intervals(paper) for paper in PAPERS]
    assert 0 < n[0] < len(paper_tables.cells(PAPERS[0]))
    assert "up to 6.0 of" in verdicts.expected_false(120)
    assert verdicts.intervals("dprec", evidence()) == 0
    found = evidence(*seeded({ACC.key: [70.0, 71.0], SIZE.key: [43.0, 43.1]}))
    assert verdicts.intervals("dprec", found) == 1, "an exact number rests on none"


def test_a_second_folder_adds_what_the_first_lacks_and_overrides_nothing():
    first, again = record(0, {KEY: 70.0}), record(0, {KEY: 99.0})
    more = record(1, {KEY: 72.0})
    found = verdicts.evidence_of([first], [again, more])
    assert found.ours[KEY].values == {0: 70.0, 1: 72.0}
    quick = verdicts.evidence_of([record(0, {KEY: 1.0}, "quick")])
    assert quick.ours == {} and len(quick.smaller) == 1
