"Seeds that can still change a verdict, and what looking several times costs."

import math

import numpy as np
import pytest
from made_up import replace
from scipy import stats
from tables import tabled

from dpcomm.evidence import paper_tables, records, verdicts
from dpcomm.evidence.verdicts import AFTER_A_LOOK, LOOKS, Summary
from dpcomm.experiments.run import grids, planning, runs

ORDER = paper_tables.cell("dprec", "mnist.eps3.order")
ACC = paper_tables.cell("fltop", "fmnist.fl_top.r0.5.accuracy")
PLANNED = 4


def decided_wrongly(draws, levels) -> float:
    "Share of pure chance for which some look says that an order holds or fails."
    wrong = np.zeros(len(draws), bool)
    for n, level in levels.items():
        x = draws[:, :n]
        reach = stats.t.ppf((1 + level) / 2, n - 1) * x.std(1, ddof=1) / math.sqrt(n)
        wrong |= abs(x.mean(1)) > reach
    return wrong.mean()


def test_three_looks_are_wrong_at_most_six_times_in_a_hundred():
    "100,000 families of no difference; .004 is five standard errors of the rate."
    draws = np.random.default_rng(3).standard_normal((100_000, max(LOOKS)))
    spent = {PLANNED: 0.95} | dict.fromkeys(LOOKS, AFTER_A_LOOK)
    bound = 0.05 + len(LOOKS) * (1 - AFTER_A_LOOK)
    assert bound == pytest.approx(0.06)
    assert 0.05 - 0.004 < decided_wrongly(draws, spent) < bound + 0.004
    naive = dict.fromkeys(spent, 0.95)
    assert decided_wrongly(draws, naive) > bound + 0.02, "looking is not free"


def test_verdicts_use_the_level_of_their_look():
    s = Summary(1.0, 0.2, 8, "percentage points", 7)
    late = replace(s, level=AFTER_A_LOOK)
    assert late.reach == pytest.approx(stats.t.ppf(0.9975, 7) * 0.2)
    near = replace(s, mean=0.6), replace(late, mean=0.6)
    words = [verdicts.verdict(ORDER, each) for each in near]
    assert words == ["order holds", "open"]
    alone = replace(ACC, spread=None, n_runs=None)
    widths = [verdicts.half_width(alone, each) for each in (s, late)]
    assert widths[1] / widths[0] == pytest.approx(
        stats.t.ppf(0.9975, 7) / stats.t.ppf(0.975, 7)
    )


@tabled(
    "mean, se, n, seeds",
    [
        (3.0, 0.1, 4, ()),  # decided
        (1.5, 0.5, 4, (4, 5, 6, 7)),  # at 8 it would
        (1.2, 0.5, 6, (4, 5, 6, 7, 8, 9, 10, 11, 12, 13)),  # at 16, of six others
        (0.9, 0.5, 4, tuple(range(4, 16))),  # at 16
        (0.1, 0.5, 4, ()),  # hopeless
        (0.1, 0.5, 16, ()),  # after the last look
    ],
)
def test_more_seeds_are_asked_for_up_to_the_look_that_decides(mean, se, n, seeds):
    s = Summary(mean, se, n, "percentage points", n - 1)
    have = {0, 1, 2, 3, *range(100, 96 + n)}
    asked = planning.seeds_that_decide(ORDER, s, (0, 1, 2, 3), have)
    assert asked == seeds
    assert len(asked) + n in (n, *LOOKS)


def test_planned_seeds_come_first_and_a_borrowed_spread_asks_for_no_more():
    assert planning.seeds_that_decide(ORDER, None, (0, 1), set()) == (0, 1)
    one = Summary(0.9, 0.5, 1, "percentage points", 3, "others")
    assert planning.seeds_that_decide(ORDER, one, (0, 1, 2), {0}) == (1, 2)
    assert planning.seeds_that_decide(ORDER, one, (0,), {0}) == ()
    assert planning.seeds_that_decide(ORDER, None, (0,), {0}) == ()


def test_a_plan_that_decides_starts_with_the_cheapest_number():
    asked = [dict(name=n, scale="full") for n in ("sqsgd-mnist", "fltop-fmnist")]
    jobs = planning.plan_decisive(asked)
    made = {job.record: i for i, job in enumerate(jobs)}
    assert jobs and len(made) == len(jobs)
    for job in jobs:
        stands = grids.recorded_runs(grids.planned(job.experiment), "full")
        assert (job.key, job.seed) not in stands
        for need in planning.needs_of(job):
            there = (need[2], need[3]) in grids.recorded_runs(
                grids.planned(need[0]), "full"
            )
            assert there or made[need] < made[job.record], "needs come first"
    assert jobs[0].minutes <= np.median([job.minutes for job in jobs])
    decided = paper_tables.cell("sqsgd", "mnist.fig3.sqsgd_minus_pm.eps400")
    assert (
        verdicts.verdict(decided, verdicts.evidence("sqsgd").summary(decided))
        == "order holds"
    )
    keys = {job.key for job in jobs}
    assert "claim.fig3.sqsgd_minus_pm.eps400" not in keys, "decided already"


def test_nothing_to_decide_is_an_empty_plan_and_other_scales_are_refused():
    assert planning.plan_decisive([dict(name="dprec-costs", scale="full")]) == []
    with pytest.raises(ValueError, match="only full-scale runs receive verdicts"):
        planning.plan_decisive([dict(name="dprec-mnist", scale="quick")])


def test_a_seed_beyond_the_planned_ones_is_marked_and_judged_by_the_later_level():
    experiment = grids.find("dprec-mnist")
    run = next(r for r in experiment.grid("smoke") if r.trains)
    played = dict(cells={run.fills[0]: [50.0, "percent"]})
    seed = max(run.seeds) + 1
    for at, beyond in ((seed, True), (run.seeds[0], False)):
        made = runs.record_of(experiment, run, at, played, {})
        assert (records.BEYOND in made.notes) == beyond
        ours = verdicts.ours_by_key([made])
        (mine,) = ours.values()
        assert mine.summary.level == (AFTER_A_LOOK if beyond else 0.95)
