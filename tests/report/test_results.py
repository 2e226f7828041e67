"The rules of the verdict against the page's prose, and every table against its records."

import itertools
import math
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from tables import tabled

from dpcomm.report import papers, records, results
from dpcomm.report.records import Record
from dpcomm.report.results import Evidence, Ours, Spread, Summary

ACC = papers.cell("dprec", "mnist.eps3.rec.acc")  # 69.5, tol 3.0, higher is better
FED = "mnist.eps3.fedavg.acc"
SIZE = papers.cell("dprec", "mnist.fedavg.comm")  # 43, tol 0.5, lower is better, exact
STD = papers.cell("dprec", "mnist.client_size.std")  # 73.10, tol 10.4, neither
NEITHER = replace(STD, kind="exact")
ORDER = papers.cell("dprec", "mnist.eps3.order")  # DP-FedAvg above DP-REC
RATIO = papers.cell("dprec", "mnist.ratio")  # 4300, 43 over 0.01
PAPERS = papers.papers()
TABLES = [(p, t) for p in PAPERS for t in papers.tables(p)]


def record(seed=0, cells=None, scale="full", key="all", **more) -> Record:
    "A made-up record of cells key -> number or [number, unit]."
    cells = {
        k: v if isinstance(v, list) else [v, "GiB" if k.endswith("comm") else "percent"]
        for k, v in (cells or {}).items()
    }
    given = dict(
        paper="dprec",
        experiment="made_up",
        trained=True,
        config={},
        final={},
        history={},
        guarantee=None,
        as_run={},
        bits=None,
        data={},
        cost={},
        origin={},
    )
    return Record(scale=scale, key=key, seed=seed, cells=cells, **given | more)


def seeds(values: dict, **more) -> list:
    "A record a seed, of key -> a number a seed."
    n = max(map(len, values.values()))
    return [
        record(s, {k: v[s] for k, v in values.items() if s < len(v)}, **more)
        for s in range(n)
    ]


def put(root, *found):
    for r in found:
        records.append(root, r)


def row(root, key, table="table1", **more) -> dict:
    rows = results.verdict_table("dprec", table, root=root, **more).rows
    names = ("key", "paper", "ours", "delta", "verdict", "link")
    return next(dict(zip(names, r)) for r in rows if r[0] == key)


def verdict_of(root, key, table="table1") -> str:
    return row(root, key, table)["verdict"]


def quantile(df) -> float:
    return float(stats.t.ppf(0.975, df))


def summary(mean, half, unit="percent", df=3) -> Summary:
    "Ours with a given half of its 95 % interval."
    return Summary(mean, half / quantile(df), df + 1, unit, df)


# ---- from seeds to a number


def test_a_summary_is_students():
    v = [70.1, 68.0, 71.5, 70.0]
    s = results.cell_summary(v, "percent")
    assert (s.low, s.high) == pytest.approx(
        stats.t.interval(0.95, 3, np.mean(v), stats.sem(v))
    )
    assert (s.mean, s.se) == pytest.approx((np.mean(v), stats.sem(v)))
    assert (s.n, s.df, s.unit, s.spread_of) == (4, 3, "percent", "")


def test_one_seed_has_a_mean_and_no_error():
    s = results.cell_summary([5.0])
    assert (s.mean, s.se, s.low, s.high, s.n, s.reach) == (
        5,
        None,
        None,
        None,
        1,
        math.inf,
    )


@pytest.mark.parametrize("bad", [[], [math.nan], [1.0, math.inf]])
def test_what_is_no_finite_number_has_no_mean(bad):
    with pytest.raises(ValueError, match="finite"):
        results.cell_summary(bad)


def sample(rng, n, mean, spread):
    return mean + spread * rng.standard_normal(n)


@tabled("n, m", list(itertools.product((2, 3, 4, 12), repeat=2)))
def test_the_half_width_is_welchs(n, m):
    rng = np.random.default_rng(100 * n + m)
    for spread in (0.01, 1.0, 30.0):
        ours, theirs = sample(rng, n, 70.0, 1.0), sample(rng, m, 69.0, spread)
        cell = replace(ACC, spread=float(stats.sem(theirs)), n_runs=m)
        found = results.half_width(cell, results.cell_summary(ours))
        interval = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval()
        assert found == pytest.approx((interval.high - interval.low) / 2, rel=1e-9)


def test_an_exact_number_of_the_paper_leaves_ours_alone():
    s = results.cell_summary([70.1, 68.0, 71.5])
    for cell in (replace(ACC, spread=None, n_runs=None), replace(ACC, spread=0.0)):
        assert results.half_width(cell, s) == pytest.approx(quantile(2) * s.se)


def test_a_spread_of_the_paper_without_its_runs_is_taken_as_normal():
    s = Summary(70.0, 0.0, 1)
    cell = replace(ACC, spread=1.5, n_runs=None)
    assert results.half_width(cell, s) == pytest.approx(1.5 * stats.norm.ppf(0.975))


def test_a_number_without_any_error_has_no_width_where_it_is_exact_alone():
    one = results.cell_summary([43.0])
    assert results.half_width(SIZE, one) == 0.0
    assert results.half_width(ACC, one) == math.inf
    assert results.half_width(SIZE, Summary(43.0, 0.0, 1)) == 0.0


# ---- borrowed spreads

LENT = (
    Spread("dprec", "made_up", "percent", 4.0, 2),
    Spread("dprec", "made_up", "percent", 1.0, 4),
    Spread("dprec", "other", "percent", 9.0, 3),
    Spread("imvu", "third", "percent", 25.0, 5),
    Spread("imvu", "third", "GiB", 49.0, 7),
)
ONE = Summary(70.0, None, 1, "percent")


@pytest.mark.parametrize(
    "of, variance, df, whose",
    [
        (dict(), (2 * 4 + 4 * 1) / 6, 6, "made_up"),
        (dict(experiment="new"), (2 * 4 + 4 * 1 + 3 * 9) / 9, 9, "2 experiments"),
        (
            dict(experiment="new", paper="sqsgd"),
            (2 * 4 + 4 * 1 + 3 * 9 + 5 * 25) / 14,
            14,
            "3 experiments",
        ),
        (dict(experiment="third", paper="imvu"), 25.0, 5, "third"),
    ],
)
def test_one_seed_borrows_the_pooled_spread_of_the_nearest_family(
    of, variance, df, whose
):
    s = results.borrow(ONE, record(**of), LENT)
    assert (s.se, s.df, s.spread_of) == (pytest.approx(math.sqrt(variance)), df, whose)
    assert (s.mean, s.n) == (70.0, 1)
    assert s.reach == pytest.approx(quantile(df) * math.sqrt(variance))
    assert results.format_seeds(s) == f"n = 1, spread of {whose}"


@pytest.mark.parametrize(
    "unit, differs, se",
    [
        ("percent", False, math.sqrt(2.0)),
        ("percentage points", True, math.sqrt(2 * 2.0)),
        ("fraction", False, 0.01 * math.sqrt(2.0)),
        ("fraction", True, 0.01 * math.sqrt(2 * 2.0)),
    ],
)
def test_a_difference_and_a_fraction_borrow_from_percent(unit, differs, se):
    s = results.borrow(replace(ONE, unit=unit), record(), LENT, differs)
    assert s.se == pytest.approx(se) and s.spread_of == "made_up"


def test_points_that_were_recorded_as_such_borrow_as_a_difference():
    points = record(0, {ORDER.key: [7.0, "percentage points"]})
    s = evidence(points, spreads=LENT).summary(ORDER)
    assert s.se == pytest.approx(math.sqrt(2 * 2.0)) and s.spread_of == "made_up"


def test_nobody_lends_to_another_unit():
    s = replace(ONE, unit="bits")
    assert results.borrow(s, record(), LENT) == s
    assert results.borrow(ONE, record(), ()) == ONE
    gib = results.borrow(replace(ONE, unit="GiB"), record(), LENT)
    assert (gib.se, gib.spread_of) == (7.0, "third")


def test_fractions_of_ones_own_experiment_are_nearer_than_percents_of_another_paper():
    ours = [
        record(i, {"ours.x": [v, "fraction"]}, paper="fltop", experiment="fltop_fmnist")
        for i, v in enumerate((0.68, 0.70, 0.72))
    ]
    own = results.spreads_of("fltop", results.ours_by_key(ours))
    assert own == [Spread("fltop", "fltop_fmnist", "percent", pytest.approx(4.0), 2)]
    one = replace(ONE, unit="fraction")
    s = results.borrow(
        one, record(paper="fltop", experiment="fltop_fmnist"), (*LENT, *own)
    )
    assert (s.se, s.spread_of) == (pytest.approx(0.02), "fltop_fmnist")


def ordered_fractions():
    "An ordering of two fractions, both with one seed, and what lends its spread."
    cell = next(
        c
        for c in papers.cells("fltop")
        if c.kind == "ordering" and c.unit == "fraction"
    )
    more = dict(paper="fltop", experiment="fltop_fmnist")
    found = record(
        0, {cell.above: [0.81, "fraction"], cell.below: [0.70, "fraction"]}, **more
    )
    lent = (Spread("fltop", "fltop_fmnist", "percent", 4.0, 3),)
    return cell, Evidence(results.ours_by_key([found]), (), lent)


def test_a_difference_of_two_fractions_spreads_as_one_of_two_percents():
    cell, found = ordered_fractions()
    s = found.summary(cell)
    assert s.mean == pytest.approx(0.11)
    assert s.se == pytest.approx(0.01 * math.sqrt(2) * 2.0)


def test_numbers_with_several_seeds_lend_and_others_do_not():
    values = {ACC.key: [70.0, 72.0, 74.0], FED: [80.0], "mnist.rec.comm": [0.01] * 3}
    ours = results.ours_by_key(seeds(values))
    assert results.spreads_of("dprec", ours) == [
        Spread("dprec", "made_up", "percent", pytest.approx(4.0), 2)
    ]
    formulas = results.ours_by_key(seeds(values, trained=False))
    assert results.spreads_of("dprec", formulas) == []


def evidence(*found, spreads=(), smaller=()) -> Evidence:
    return Evidence(results.ours_by_key(found), tuple(smaller), tuple(spreads))


def test_one_seed_without_a_family_is_not_resolved_and_with_one_it_is():
    mine = record(0, {ACC.key: 90.0})
    alone = evidence(mine)
    assert alone.summary(ACC).se is None
    assert results.verdict(ACC, alone.summary(ACC)) == "not resolved"
    lent = evidence(mine, spreads=[Spread("dprec", "x", "percent", 1.0, 12)])
    assert results.verdict(ACC, lent.summary(ACC)) == "above"
    assert lent.summary(ACC).spread_of == "x"
    wide = evidence(mine, spreads=[Spread("dprec", "x", "percent", 400.0, 2)])
    assert results.verdict(ACC, wide.summary(ACC)) == "not resolved"


def test_a_number_with_several_seeds_borrows_nothing():
    found = evidence(*seeds({ACC.key: [70.0, 71.0]}), spreads=LENT)
    assert found.summary(ACC) == results.cell_summary([70.0, 71.0], "percent")


@pytest.mark.parametrize(
    "cell, value, word",
    [(ACC, 69.5, "match"), (ACC, 74.0, "near"), (STD, 74.0, "match")],
)
def test_one_computed_number_has_no_spread_of_its_own_and_borrows_none(
    cell, value, word
):
    unit = cell.unit
    found = evidence(
        record(0, {cell.key: [value, unit]}, trained=False),
        spreads=[Spread("dprec", "made_up", unit, 1e6, 3)],
    )
    s = found.summary(cell)
    assert (s.mean, s.spread_of) == (value, "") and not s.se
    assert results.verdict(cell, s) == word


def test_what_was_not_run_has_no_summary():
    assert evidence().summary(ACC) is None and evidence().summary(ORDER) is None


# ---- the verdict, by enumeration

EXACT = replace(ACC, value=50.0, tol=4.0, spread=None, n_runs=None)


def judged(cell, gap, half) -> str:
    "The page's prose, of ours less the paper's and whole half of our own interval."
    tol, own = int(cell.tol), None if cell.own is None else int(cell.own - cell.value)
    known = range(-tol, tol + 1)  # where a half, a gap and a slip may lie
    if half in known and gap in known:
        return "match"
    if half in known and own is not None and gap - own in known:
        return "paper's slip"
    if half in known and -2 * tol <= gap <= 2 * tol:
        return "near"
    low, high = gap - half, gap + half
    if low > tol or high < -tol:
        more = low > tol
        return "above" if more != (cell.better == "lower") else "below"
    return "not resolved"


@tabled("own", [None, 74.0, 57.0, 44.0])
@tabled("better", ["higher", "lower", "neither"])
@tabled("kind", ["exact", "stochastic"])
def test_the_verdict_is_what_the_page_says_at_every_gap_and_half_width(
    kind, better, own
):
    cell, seen = replace(EXACT, kind=kind, better=better, own=own), Counter()
    for gap, half in itertools.product(range(-33, 34), range(0, 34)):
        word = results.verdict(cell, summary(50.0 + gap, half))
        assert word == judged(cell, gap, half), (gap, half)
        seen[word] += 1
    assert set(seen) == {"match", "near", "above", "below", "not resolved"} | (
        {"paper's slip"} if own else set()
    )


@tabled(
    "cell, value, word",
    [
        (SIZE, 43.5, "match"),
        (SIZE, 42.5, "match"),
        (SIZE, 43.5001, "near"),
        (SIZE, 44.0, "near"),
        (SIZE, 42.0, "near"),
        (SIZE, 44.0001, "below"),
        (SIZE, 41.9999, "above"),
        (NEITHER, 94.0, "above"),
        (NEITHER, 52.0, "below"),
        (NEITHER, 83.5, "match"),
    ],
)
def test_an_exact_number_is_judged_from_one_value(cell, value, word):
    assert results.verdict(cell, [value]) == word


def test_a_boundary_survives_binary_fractions():
    cell = replace(SIZE, value=82.1, tol=1.6, better="higher")
    assert 82.1 + 1.6 != 83.7 or 82.1 - 1.6 != 80.5
    found = [results.verdict(cell, [v]) for v in (83.7, 80.5, 85.3, 78.9)]
    assert found == ["match", "match", "near", "near"]


def test_the_papers_own_spread_hinders_disagreement_alone():
    "69.5 +/- 1.5 of three runs, tolerance 3: half its 95 % interval is 6.45."
    cell, sure = replace(ACC, spread=1.5, n_runs=3), replace(ACC, spread=None)
    words = {
        gap: [results.verdict(c, summary(69.5 + gap, 0.0)) for c in (sure, cell)]
        for gap in (2.9, 5.9, 6.1, 9.4, 9.5)
    }
    assert words == {
        2.9: ["match"] * 2,
        5.9: ["near"] * 2,
        6.1: ["above", "not resolved"],
        9.4: ["above", "not resolved"],
        9.5: ["above", "above"],
    }


@pytest.mark.parametrize("paper", PAPERS)
def test_every_stochastic_number_can_be_met_missed_and_left_open(paper):
    for c in (c for c in papers.cells(paper) if c.kind == "stochastic"):
        unit = c.unit
        assert results.verdict(c, Summary(float(c.value), 0.0, 9, unit, 8)) == "match"
        vague = summary(float(c.value), 1.001 * c.tol + 1e-9, unit)
        assert results.verdict(c, vague) == "not resolved", c.key
        alone = results.half_width(c, Summary(float(c.value), 0.0, 9, unit, 8))
        far = 2.001 * c.tol + alone + abs((c.own or c.value) - c.value) + 1e-6
        for sign in (1, -1):
            found = results.verdict(c, Summary(c.value + sign * far, 0.0, 9, unit, 8))
            better = (sign > 0) == (c.better != "lower")
            assert found == ("above" if better else "below"), c.key


@pytest.mark.parametrize("better", ["higher", "lower"])
def test_an_ordering_without_a_bound_asks_for_the_sign_of_our_difference(better):
    cell, seen = replace(ORDER, better=better), Counter()
    for gap, half in itertools.product(range(-9, 10), range(0, 9)):
        if abs(gap) == half != 0:
            continue
        word = "order holds" if gap > 0 else "order fails"
        word = word if abs(gap) > half else "not resolved"
        s = summary(float(gap), half, "percentage points")
        assert results.verdict(cell, s) == word, (gap, half)
        seen[word] += 1
    assert len(seen) == 3


@tabled("bound", ["above", "below"])
@tabled("value", [0.0, 10.0, -1.0])
def test_an_ordering_with_a_bound_asks_on_which_side_ours_lies(bound, value):
    cell, seen = (
        replace(ORDER, value=value, bound=bound, above=None, below=None),
        Counter(),
    )
    for gap, half in itertools.product(range(-9, 10), range(0, 9)):
        if abs(gap) == half != 0:
            continue
        right = gap > 0 if bound == "above" else gap < 0
        word = "order holds" if right else "order fails"
        word = word if abs(gap) > half else "not resolved"
        s = summary(value + gap, half, "percentage points")
        assert results.verdict(cell, s) == word, (gap, half)
        seen[word] += 1
    assert len(seen) == 3


def test_the_spread_of_the_paper_does_not_count_in_an_ordering():
    cell = replace(ORDER, spread=100.0, n_runs=2)
    assert (
        results.verdict(cell, summary(1.0, 0.5, "percentage points")) == "order holds"
    )


def test_one_trained_difference_resolves_no_ordering():
    assert results.verdict(ORDER, [50.0]) == "not resolved"


def test_the_papers_slips_are_judged_by_its_own_arithmetic():
    slips = [c for c in papers.cells("dprec") if c.own is not None]
    assert len(slips) == 5
    for cell in slips:
        assert results.verdict(cell, [cell.own]) == "paper's slip", cell.key
        assert results.verdict(cell, [cell.value]) == "match", cell.key
        far = cell.own + 3 * cell.tol + abs(cell.own - cell.value)
        assert results.verdict(cell, [far]) in ("above", "below"), cell.key


def test_other_units_are_not_comparable_and_first_words_decide():
    assert (
        results.verdict(SIZE, results.cell_summary([43.0], "bytes")) == "not comparable"
    )
    assert results.verdict(SIZE, results.cell_summary([43.0], "GiB")) == "match"
    assert results.verdict(SIZE, results.cell_summary([43.0])) == "match"


def test_what_is_only_shown_is_not_run_without_ours_and_never_judged_with():
    cell = replace(ACC, kind="shown", tol=0.0)
    assert results.verdict(cell, None) == "not run" == results.verdict(ACC, None)
    for s in ([69.5], [0.0], [69.5, 69.5], summary(69.5, 0.1)):
        assert results.verdict(cell, s) == "not comparable"


def test_every_verdict_has_a_sign_of_its_own():
    assert len(set(results.VERDICTS.values())) == len(results.VERDICTS) == 10


def test_a_tolerance_includes_its_end():
    assert results.within_tolerance(0.1 + 0.2, 0.3) and results.within_tolerance(0.0, 0)
    assert not results.within_tolerance(0.3001, 0.3)


# ---- finding ours


def test_quotients_and_differences_are_taken_seed_by_seed():
    found = results.ours_by_key(
        seeds(
            {
                FED: [90.0, 80.0, 85.0],
                ACC.key: [60.0, 70.0],
                SIZE.key: [40.0, 44.0, 42.0],
                "mnist.rec.comm": [0.01, 0.02],
            }
        )
    )
    assert results.ours_of(ORDER, found).values == {0: 30.0, 1: 10.0}
    assert results.ours_of(ORDER, found).unit == "percentage points"
    assert results.ours_of(RATIO, found).values == {0: 4000.0, 1: 2200.0}
    assert results.ours_of(RATIO, found).unit == "x"
    s = results.ours_of(ORDER, found).summary
    assert (s.mean, s.n, s.se) == (20.0, 2, pytest.approx(10.0))


def test_runs_of_the_same_settings_fill_the_numbers_of_both_texts():
    found = results.ours_by_key(seeds({FED: [90.0, 80.0]}))
    earlier = papers.cell("dprec", f"iclr.{FED}")
    assert earlier.same_as == FED
    assert results.ours_of(earlier, found) is results.ours_of(
        papers.cell("dprec", FED), found
    )
    assert results.ours_of(replace(earlier, same_as=None), found) is None


def test_seeds_that_only_one_side_has_give_no_difference():
    found = results.ours_by_key(
        [record(0, {FED: 90.0}, key="a"), record(1, {ACC.key: 60.0}, key="b")]
    )
    assert results.ours_of(ORDER, found) is None
    assert (
        results.ours_of(RATIO, found) is None and results.ours_of(SIZE, found) is None
    )


def test_a_derived_number_that_was_recorded_itself_stands():
    found = results.ours_by_key(
        [record(0, {FED: 90.0, ACC.key: 60.0, ORDER.key: [7.0, "percentage points"]})]
    )
    assert results.ours_of(ORDER, found).values == {0: 7.0}


@pytest.mark.parametrize("other", [dict(key="b"), dict(experiment="second", seed=1)])
def test_two_runs_that_claim_one_cell_are_refused(tmp_path, other):
    pair = [
        record(0, {ACC.key: 70.0}),
        record(**dict(seed=0, cells={ACC.key: 70.0}) | other),
    ]
    for found in (pair, pair[::-1]):
        with pytest.raises(
            ValueError, match=f"{ACC.key}, seed [01] stands in made_up|second"
        ):
            results.ours_by_key(found)
    put(tmp_path, *pair)
    with pytest.raises(ValueError, match="remove it from either"):
        results.verdict_table("dprec", root=tmp_path)


def test_seeds_of_one_number_may_come_from_runs_of_one_experiment():
    pair = record(0, {ACC.key: 70.0}), record(1, {ACC.key: 72.0}, key="b")
    assert results.ours_by_key(pair)[ACC.key].values == {0: 70.0, 1: 72.0}


def test_a_seed_that_two_machines_have_run_counts_once():
    pair = [
        record(0, {ACC.key: 70.0 + i}, origin={"date": f"202{i}", "machine": str(i)})
        for i in (1, 0)
    ]
    assert results.ours_by_key(pair)[ACC.key].values == {0: 71.0}, "the first"


# ---- the verdict table


def test_nothing_run_says_why_and_links_nowhere(tmp_path):
    for paper in PAPERS:
        rows = results.verdict_table(paper, root=tmp_path).rows
        assert [r[0] for r in rows] == [c.key for c in papers.cells(paper)]
        assert {r[3:] for r in rows} == {("", "○ not run", "")} and all(
            r[2] for r in rows
        )
    assert row(tmp_path, ACC.key)["ours"] == "no full-scale record"
    shown = next(c for c in papers.cells("dprec") if c.kind == "shown")
    ours = row(tmp_path, shown.key, shown.table)["ours"]
    assert ours.endswith(f"; would not be comparable: {shown.tol_why}")


def test_the_longest_reason_that_fits_is_given():
    given = (("mnist.", "short"), ("mnist.eps3.", "long"), ("femnist.", "other"))
    p = replace(papers.paper("dprec"), not_run=given)
    assert results.reason_not_run(ACC, p, ()) == "long"
    assert results.reason_not_run(SIZE, p, ()) == "short"


@pytest.mark.parametrize("scale", ["smoke", "quick"])
@pytest.mark.parametrize("prefix", ["", "ours.{}."])
def test_a_smaller_record_is_shown_and_earns_no_verdict(tmp_path, scale, prefix):
    key = prefix.format(scale) + ACC.key
    put(tmp_path, record(0, {key: 69.0}, scale), record(1, {key: 71.0}, scale))
    found = row(tmp_path, ACC.key)
    assert found["verdict"] == "○ not run" and found["delta"] == found["link"] == ""
    assert found["ours"] == f"{scale} 70.00 (n = 2): no verdict"
    assert results.evidence("dprec", tmp_path).ours == {}
    put(tmp_path, *seeds({ACC.key: [70.0, 70.1, 70.2]}))
    assert row(tmp_path, ACC.key)["ours"] == "70.10 +/- 0.06 (n = 3)"


def test_a_full_record_of_ours_alone_is_not_the_papers_number(tmp_path):
    put(tmp_path, *seeds({f"ours.full.lenet5.{ACC.key}": [69.5, 69.6]}))
    assert verdict_of(tmp_path, ACC.key) == "○ not run"


def test_full_scale_earns_a_verdict(tmp_path):
    put(tmp_path, *seeds({ACC.key: [69.0, 69.2, 69.4, 69.6]}))
    assert row(tmp_path, ACC.key) == dict(
        key=ACC.key,
        paper="69.5 +/- 1.5 percent",
        ours="69.30 +/- 0.13 (n = 4)",
        delta="-0.20",
        verdict=row(tmp_path, ACC.key)["verdict"],
        link="[made_up](../experiments/made_up.ipynb)",
    )
    word = results.verdict(ACC, [69.0, 69.2, 69.4, 69.6])
    assert verdict_of(tmp_path, ACC.key).startswith(f"{results.VERDICTS[word]} {word}")
    assert verdict_of(tmp_path, "mnist.eps6.rec.acc") == "○ not run"


def test_a_row_is_what_the_table_shows():
    p = papers.paper("dprec")
    base = "there"
    full = evidence(*seeds({ACC.key: [95.0, 95.1, 95.2]}))
    assert results.row_of(ACC, p, full, base) == (
        ACC.key,
        "69.5 +/- 1.5 percent",
        "95.10 +/- 0.06 (n = 3)",
        "+25.60",
        "above",
        "[made_up](there/experiments/made_up.ipynb)",
    )
    none = results.row_of(ACC, p, evidence(), base)
    assert none[2:] == (results.reason_not_run(ACC, p, ()), "", "not run", "")


def test_a_gap_is_not_rounded_away(tmp_path):
    put(tmp_path, *seeds({"mnist.rec.comm": [0.01020, 0.01024]}))
    assert row(tmp_path, "mnist.rec.comm")["ours"] == ("0.0102 +/- 2e-05 (n = 2)")
    assert results.format_value(70.1234, ACC) == "70.12"
    assert results.format_value(1234.5678, RATIO) == "1,234.6"
    assert results.format_value(0.010234, replace(ACC, value=0.01)) == "0.0102"
    assert results.format_value(1e-6, replace(ACC, value=1e-5)) == "0.0000010"


def test_the_papers_number_keeps_its_digits():
    assert results.format_paper(ACC) == "69.5 +/- 1.5 percent"
    assert results.format_paper(RATIO) == "4,300 x"
    assert results.format_paper(ORDER) == "> 0: 12.6 percentage points"
    bounds = [replace(ORDER, bound=b, value=6.5) for b in ("above", "below")]
    assert [results.format_paper(c)[:5] for c in bounds] == ["> 6.5", "< 6.5"]
    assert (
        results.format_paper(replace(ACC, read_err=0.5, spread=None)) == "~69.5 percent"
    )


def test_orderings_and_ratios_are_derived(tmp_path):
    put(
        tmp_path,
        *seeds(
            {
                ACC.key: [70.0, 72.0],
                FED: [60.0, 62.1],
                "mnist.eps6.rec.acc": [80.0, 82.1],
                SIZE.key: [43.0],
                "mnist.rec.comm": [0.01],
            }
        ),
    )
    assert verdict_of(tmp_path, "mnist.eps3.order") == "✗ order fails"
    assert verdict_of(tmp_path, "mnist.rec.order") == "✓ order holds"
    assert verdict_of(tmp_path, "mnist.eps6.order") == "○ not run"
    assert verdict_of(tmp_path, "mnist.ratio", "text") == "● match"
    assert row(tmp_path, "mnist.rec.order")["delta"] == "", "a size nobody claimed"
    assert row(tmp_path, "mnist.rec.order")["ours"] == ("10.05 +/- 0.05 (n = 2)")


def test_other_units_are_not_comparable_in_the_table(tmp_path):
    put(tmp_path, record(0, {"mnist.rec.comm": [0.01, "bytes"]}))
    assert verdict_of(tmp_path, "mnist.rec.comm") == "≠ not comparable"


def test_a_borrowed_spread_says_whose_it_is(tmp_path):
    put(
        tmp_path, *seeds({FED: [90.0, 91.0, 92.0]}), record(0, {ACC.key: 70.0}, key="b")
    )
    found = row(tmp_path, ACC.key)["ours"]
    assert found == "70.00 +/- 1.00 (n = 1, spread of made_up)"


def test_a_spread_is_borrowed_from_another_paper_where_the_own_has_none(tmp_path):
    put(
        tmp_path,
        record(0, {ACC.key: 70.0}),
        *[
            record(s, {"ours.x": v}, paper="imvu", experiment="far")
            for s, v in enumerate([1.0, 3.0])
        ],
    )
    found = row(tmp_path, ACC.key)["ours"]
    assert found == f"70.00 +/- {math.sqrt(2):.2f} (n = 1, spread of far)"


def with_causes(tmp_path, *blocks, old="", new=""):
    "A folder of DP-REC's file with more causes."
    text = (papers.assets("papers") / "dprec.toml").read_text(encoding="utf-8")
    more = "".join(f'\n[[cause]]\nkey = "{k}"\ntext = "{v}"\n' for k, v in blocks)
    (tmp_path / "papers").mkdir()
    path = tmp_path / "papers" / "dprec.toml"
    path.write_text(text.replace(old, new, 1) + more, encoding="utf-8")
    return path.parent


def test_causes_become_numbered_notes_and_equal_ones_share_a_number(tmp_path):
    blocks = [
        (ACC.key, "the model"),
        ("mnist.eps6.rec.acc", "the split"),
        (FED, "the model"),
        ("mnist.rec.comm", "idle"),
    ]
    toml = with_causes(tmp_path, *blocks)
    far = [95.0, 95.1, 95.2]
    put(tmp_path, *seeds({ACC.key: far, "mnist.eps6.rec.acc": far, FED: far}))
    t = results.verdict_table("dprec", "table1", root=tmp_path, papers_root=toml)
    assert papers.paper("dprec", toml).causes[-4:] == tuple(blocks)
    assert len(set(t.notes)) == len(t.notes)
    n = {note: i for i, note in enumerate(t.notes, 1)}
    marks = {r[0]: r[4] for r in t.rows}
    for key, text in blocks[:3]:
        assert f"[{n[text]}]" in marks[key] and marks[key].startswith("▲ above")
    assert marks["mnist.rec.comm"] == "○ not run" and "idle" not in n
    assert f"[{n['the split']}] the split" in str(t)
    assert f"{n['the split']}. the split" in results.as_markdown(t)
    assert "<li>the split</li>" in t._repr_html_()


def test_a_match_needs_no_cause_and_what_is_shown_says_why_it_is_not_judged():
    cell = replace(ACC, kind="shown", tol=0.0, tol_why="other data")
    p = replace(papers.paper("dprec"), cells=(cell,), causes=((cell.key, "a cause"),))
    assert results.causes_of(cell, p, "not comparable") == ["other data", "a cause"]
    assert results.causes_of(cell, p, "not run") == []
    assert (
        results.causes_of(ACC, p, "match") == results.causes_of(ACC, p, "not run") == []
    )
    assert results.causes_of(ACC, p, "near") == ["a cause"]


def test_a_number_that_is_only_shown_stands_beside_ours(tmp_path):
    old = 'kind = "stochastic"\ntol = 1.6\n'
    toml = with_causes(tmp_path, old=old, new='kind = "shown"\ntol = 0.0\n')
    put(tmp_path, record(0, {FED: 90.0}))
    found = row(tmp_path, FED, papers_root=toml)
    assert (
        found["verdict"].startswith("≠ not comparable [1]")
        and found["delta"] == "+7.90"
    )
    assert found["ours"] == "90.00 (n = 1)"


# ---- runs beside each other


def test_a_table_of_runs_has_a_row_a_setting_with_means_of_its_seeds():
    cost = {"cpu_seconds": 120.0, "wall_seconds": 999.0}
    final = [
        dict(accuracy=a, uplink_bits=2**33, downlink_bits=2**34) for a in (70.0, 72.0)
    ]
    found = [
        record(s, key="a", final=f, cost=cost, guarantee={"eps": 3.14159})
        for s, f in enumerate(final)
    ]
    found += [
        record(0, key="b", final=dict(mse=0.5), cost={"wall_seconds": 60.0}),
        record(0, key="none", final={}),
        record(0, key="bits", final=dict(uplink_bits=2**32)),
    ]
    t = results.runs_table(found, "A title")
    assert t.title == "A title" and t.header[:4] == (
        "run",
        "n",
        "accuracy, % or mean squared error",
        "epsilon",
    )
    assert t.rows == (
        ("a", "2", "71 +/- 1", "3.14", "1", "2", "2"),
        ("b", "1", "0.5", "", "", "", "1"),
        ("bits", "1", "", "", "0.5", "", "0"),
    )


def test_the_first_score_that_all_tables_know_is_shown():
    found = [record(i, final=dict(mse=0.5, recall5=40.0 + i)) for i in (0, 2)]
    name, s = results.score_of(found)
    assert (name, s.mean, s.n) == ("recall5", 41.0, 2)
    assert results.score_of([record(final=dict(round=3))]) == ("", None)
    assert results.score_of([record(final=dict(accuracy=None, mse=0.25))]) == (
        "mse",
        results.cell_summary([0.25]),
    )


def test_a_table_of_runs_counts_a_seed_once():
    pair = [
        record(0, final=dict(accuracy=70.0 + i), origin={"date": f"202{i}"})
        for i in (1, 0)
    ]
    assert [r[:3] for r in results.runs_table(pair).rows] == [("all", "1", "71")]


@pytest.mark.parametrize("paper", PAPERS)
def test_committed_runs_have_a_table_each(paper):
    for path in sorted((papers.assets("results") / paper).glob("*.jsonl")):
        found = records.read(path)
        t = results.runs_table(found)
        assert len(t.rows) == len({r.key for r in found if r.final})
        standing = [r for r in records.standing(found).values() if r.final]
        assert sum(int(r[1]) for r in t.rows) == len(standing)


# ---- epsilon as run


def test_an_epsilon_as_run_is_named():
    assert results.as_run(record()) == ""
    told = {"add-remove": {"eps": 5.449}, "replace": {"eps": 6.531}}
    assert results.as_run(record(as_run=told)) == "5.45 joins, 6.53 replaced"


def test_runs_with_a_premise_are_listed_once():
    t = results.guarantees_as_run()
    assert t.header[:3] == ("experiment", "scale", "run")
    assert len(set(t.rows)) == len(t.rows) > 0
    assert all(re.search(r"\d (joins|silent|replaced)", r[-1]) for r in t.rows)
    wanted = {
        (r.experiment, r.scale, r.key)
        for p in PAPERS
        for r in records.load(p)
        if r.as_run
    }
    assert {r[:3] for r in t.rows} == wanted


def test_committed_tables_have_a_row_a_cell():
    for paper in PAPERS:
        assert len(results.verdict_table(paper).rows) == len(papers.cells(paper))


# ---- a small table

TABLE = results.Table(("a", "b"), (("x|<y>", "[go](p.ipynb)"), ("long cell", "")), "T")


def test_a_table_as_text_has_aligned_columns():
    assert results.as_text(TABLE).splitlines() == [
        "T",
        "a          b",
        "---------  --",
        "x|<y>      go",
        "long cell",
    ]
    assert str(TABLE) == repr(TABLE) == results.as_text(TABLE)
    noted = replace(TABLE, notes=("why", "how"))
    assert str(noted).splitlines()[-2:] == ["[1] why", "[2] how"]


def test_a_table_as_markdown_escapes_strokes_and_keeps_links():
    text = results.as_markdown(replace(TABLE, notes=("why",)))
    assert text.splitlines() == [
        "**T**",
        "",
        "| a | b |",
        "|---|---|",
        "| x\\|<y> | [go](p.ipynb) |",
        "| long cell |  |",
        "",
        "1. why",
    ]


def test_a_table_as_html_escapes_all_but_links():
    text = results.as_html(replace(TABLE, notes=("a < b",)))
    assert '<td>x|&lt;y&gt;</td><td><a href="p.ipynb">go</a></td>' in text
    assert "<caption>T</caption>" in text and text.endswith(
        "<ol><li>a &lt; b</li></ol>"
    )
    assert TABLE._repr_html_() == results.as_html(TABLE) and "onclick" not in text
    assert results.cell_html("[a<b](p.html)") == '<a href="p.html">a&lt;b</a>'
    assert results.cell_html("[3]") == "[3]" == results.link_text("[3]")


def test_a_sortable_table_has_a_click_a_header_and_a_filter():
    many = replace(TABLE, sortable=True)
    assert many._repr_html_() == results.make_sortable(results.as_html(many))
    assert many._repr_html_().count("onclick") == 2
    assert many._repr_html_().count("oninput") == 1


def test_a_long_sortable_table_is_stored_in_part_and_shown_whole():
    rows = tuple((str(i),) for i in range(results.LONG + 2))
    many = results.Table(("a",), rows, sortable=True)
    assert repr(many).splitlines()[-2:] == [
        str(results.LONG - 1),
        "... and 2 rows more",
    ]
    assert str(many).splitlines()[-1] == str(results.LONG + 1)
    assert many._repr_html_().count("<tr>") == results.LONG + 3
    assert repr(results.Table(many.header, many.rows)) == str(many)


def test_ours_of_one_seed_has_no_error():
    assert Ours({0: 1.0}, "percent", record()).summary.se is None
