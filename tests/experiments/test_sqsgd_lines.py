"What the comparison of sqSGD with its baselines shares between tasks."

import dataclasses
import functools

import pytest
from made_up import made_up
from tables import tabled

from dpcomm.evidence import paper_tables
from dpcomm.experiments import lines
from dpcomm.experiments.run import runs
from dpcomm.experiments.sqsgd import mnist
from dpcomm.mechanisms import sqsgd

TASKS = {t: runs.find(f"sqsgd-{t}").module for t in ("mnist", "emnist", "fmnist")}
LENET = mnist.Base(61_706, (200, 300, 400))
paper_setting = functools.partial(lines.stated, "sqsgd")


@tabled("task", TASKS)
def test_the_three_mechanisms_of_figure_3_fit_into_the_bits_of_pm(task):
    base = TASKS[task].settings("full").base
    for eps in base.eps:
        spare = mnist.spare_bits(eps)
        for key, curve in mnist.matched(base, eps).items():
            bits = curve.bits(base.d).content
            assert spare / 2 < bits <= spare and (bits == spare or "pm" not in key)


@tabled("task", TASKS)
def test_figures_take_the_papers_settings(task):
    c = TASKS[task].settings("full")
    curves = mnist.papers_curves(c.base)
    levels = paper_setting(task, "levels.fig1")
    assert {curves[f"fig1.K{K}"].levels for K in levels} == set(levels)
    ratios = {*mnist.RATIOS, c.base.fraction}
    assert ratios == set(paper_setting(task, "ratios.fig4"))
    for eps in paper_setting(task, "eps"):
        assert curves[f"fig2.eps{eps}"].eps == eps
    for mech in curves.values():
        if isinstance(mech, sqsgd.SqSgd):
            assert mech.momentum == paper_setting(task, "momentum")
            assert mech.bound == paper_setting(task, "bound")
    assert c.early == 10 * paper_setting(task, "rounds_per_epoch")


@tabled("task", TASKS)
def test_every_claim_of_the_paper_is_computed_from_curves_that_exist(task):
    base = TASKS[task].settings("full").base
    curves, claims = mnist.papers_curves(base), mnist.claims(base, 1880)
    assert all(set(needs) <= set(curves) for needs, _ in claims.values())
    keys = [c.key.partition(".") for c in paper_tables.cells("sqsgd")]
    assert {rest for head, _, rest in keys if head == task} <= set(claims)


def test_additions_differ_from_the_papers_curves_in_one_thing():
    base, added = mnist.papers_curves(LENET), mnist.additions(LENET)
    change = dataclasses.replace
    assert not set(base) & set(added)
    assert added["best.eps200"] == change(base["fig2.eps200"], rule="best")
    summed = added["projected.eps400"]
    assert added["tight.eps400"] == change(summed, span="tight")
    for key in ("fig1.K2", "ratio.r5", "sqsgd.eps200"):
        assert added[f"projected.{key}"] == change(base[key], projected="sum")
    assert added["residuals.pm.eps400"] == change(base["pm.eps400"], residuals=True)
    honest, vq = added["honest.vqsgd.eps400"], base["vqsgd.eps400"]
    assert honest.guarantee(rounds=1).eps == pytest.approx(400)
    assert vq.guarantee(rounds=1).eps == 400 * vq.repeats


def test_momentum_is_on_one_side_only_and_plain_promises_nothing():
    servers = {
        line.key: lines.prepared(line)[1]
        for line in mnist.grid("smoke")
        if line.spec is not None
    }
    for key, spec in servers.items():
        on_clients = key.startswith(("sqsgd", "fig1", "projected"))
        assert spec.config.server == ("sgd" if on_clients else "momentum"), key
        assert (spec.guarantee is None) == (key == "plain")


def kept(accuracies, rounds=(5, 9)):
    "A record of a curve."
    final, history = (
        {"accuracy": accuracies[-1]},
        dict(round=rounds, accuracy=accuracies),
    )
    return made_up(final=final, history=history, data={"name": "digits"})


def test_a_gap_is_of_the_best_curve_at_the_last_round_or_an_early_one():
    inputs = {"a": kept([1.0, 2.0]), "b": kept([5.0, 4.5]), "c": kept([7.0, 3.0])}

    def gap(*needs, at=None):
        line = lines.Line("x", "x", "smoke", ("y",), needs)
        return lines.difference(line, 0, inputs, {}, at)["cells"]["y"][0]

    assert gap("b", "c", "a") == 2.5 and gap("c", "b", "a", at=5) == 6.0
    assert gap("a", "b") == -2.5
    claim = next(r for r in mnist.grid("smoke") if r.needs)
    named = dict(zip(claim.needs, (inputs["b"], inputs["a"])))
    value = lines.run_one(claim, 0, named)["cells"]
    assert value == {claim.fills[0]: [2.5, "percentage points"]}
