"What the comparison of sqSGD with its baselines shares between tasks."

import dataclasses
import math

import pytest
import torch
from made_up import made_up
from tables import tabled

from dpcomm.evidence import paper_tables
from dpcomm.evidence.records import Record
from dpcomm.experiments.sqsgd import fedsgd
from dpcomm.mechanisms import pm, sqsgd, vqsgd
from dpcomm.training.federated import Config

LENET = fedsgd.Base(61_706, (200, 300, 400))
RESNET = fedsgd.Base(
    1_730_426, (1000, 2000, 3000), matched_levels=128, fixed_eps=2000.0
)
TASKS = [("mnist", LENET), ("emnist", LENET), ("fmnist", RESNET)]


@tabled("task, base", TASKS)
def test_the_three_mechanisms_of_figure_3_fit_into_the_bits_of_pm(task, base):
    for eps in base.eps:
        found = {
            key: mech.bits(base.d).content
            for key, mech in fedsgd.matched(base, eps).items()
        }
        assert (
            found[f"pm.eps{eps}"] == fedsgd.spare_bits(eps) == 32 * (eps * 2 // 5) + 32
        )
        assert all(
            fedsgd.spare_bits(eps) / 2 < bits <= fedsgd.spare_bits(eps)
            for bits in found.values()
        )


@tabled("task, base", TASKS)
def test_figures_take_the_papers_settings(task, base):
    curves = fedsgd.figures(base)

    def paper_setting(name):
        return paper_tables.hyper("sqsgd", name, task).value

    assert (
        tuple(base.eps) == paper_setting("eps")
        and base.fixed_eps == paper_setting("eps.fig1")
        and base.levels == paper_setting("levels.fig2")
        and base.matched_levels == paper_setting("levels.fig3")
    )
    assert {curves[f"fig1.K{K}"].levels for K in paper_setting("levels.fig1")} == set(
        paper_setting("levels.fig1")
    ) and {*fedsgd.RATIOS, base.fraction} == set(paper_setting("ratios.fig4"))
    assert all(
        curves[f"fig2.eps{eps}"].eps == eps
        and curves[f"fig2.eps{eps}"].fraction == paper_setting("fraction")
        for eps in base.eps
    )
    bits = {K: curves[f"fig5.K{K}"].bits(base.d).payload for K in (2, 32, 128)}
    assert all(
        curves["fig2.eps400" if base is LENET else "fig2.eps2000"].bits(base.d).payload
        / 2
        < b
        for b in bits.values()
    )
    assert all(
        mech.momentum == paper_setting("momentum")
        and mech.bound == paper_setting("bound")
        for mech in curves.values()
        if isinstance(mech, sqsgd.SqSgd)
    )


@tabled("task, base", TASKS)
def test_every_claim_of_the_paper_is_computed_from_curves_that_exist(task, base):
    curves, claims = fedsgd.figures(base), fedsgd.claims(base, 1880)
    for above, below, _ in claims.values():
        assert {*above, below} <= set(curves)
    said = {
        c.key.removeprefix(f"{task}.")
        for c in paper_tables.cells("sqsgd")
        if c.key.startswith(f"{task}.")
    }
    assert said <= set(claims)


def test_additions_differ_from_the_papers_curves_in_one_thing():
    base, added = fedsgd.figures(LENET), fedsgd.additions(LENET)
    assert not set(base) & set(added)
    assert added["tight.eps400"] == dataclasses.replace(
        added["projected.eps400"], span="tight"
    ) and added["best.eps200"] == dataclasses.replace(base["fig2.eps200"], rule="best")
    for key in ("fig1.K2", "ratio.r5", "sqsgd.eps200"):
        assert added[f"projected.{key}"] == dataclasses.replace(
            base[key], projected="sum"
        )
    assert added["projected.eps300"] == dataclasses.replace(
        base["fig2.eps300"], projected="sum"
    )
    assert added["residuals.pm.eps400"] == dataclasses.replace(
        base["pm.eps400"], residuals=True
    )
    assert (
        added["honest.vqsgd.eps400"].guarantee(rounds=1).eps == pytest.approx(400)
        and base["vqsgd.eps400"].guarantee(rounds=1).eps
        == 400 * base["vqsgd.eps400"].repeats
    )


def test_momentum_is_on_one_side_only():
    config = Config(server="sgd")
    assert fedsgd.settings(config, LENET.sqsgd()).server == "sgd"
    for mech in (LENET.sqsgd(momentum=0.0), pm.Pm(1.0, 5.0), vqsgd.VqSgd(1.0, 5.0)):
        assert fedsgd.settings(config, mech).server == "momentum"


def kept(accuracies, rounds=(5, 9)) -> Record:
    "A record of a curve; without accuracies one that diverged."
    final = {"accuracy": accuracies[-1]} if accuracies else {}
    history = {"round": list(rounds), "accuracy": list(accuracies)}
    return made_up(final=final, history=history, data={"name": "digits"})


def test_a_gap_is_of_the_best_curve_at_the_last_round_or_an_early_one():
    inputs = {"a": kept([1.0, 2.0]), "b": kept([5.0, 4.5]), "c": kept([7.0, 3.0])}
    for claim, wanted in (
        ((("b",), "a", None), 2.5),
        ((("b", "c"), "a", None), 2.5),
        ((("c", "b"), "a", 5), 6.0),
        ((("a",), "b", None), -2.5),
    ):
        assert fedsgd.gap(inputs, claim) == wanted, claim
    with pytest.raises(KeyError):
        fedsgd.gap(inputs, (("b",), "a", 6))
    with pytest.raises(FloatingPointError, match="d diverged and has no accuracy"):
        fedsgd.gap(inputs | {"d": kept([])}, (("b", "d"), "a", None))


def small(*keys, **own) -> fedsgd.Comparison:
    "A comparison on digits that takes a second."
    own = dict(rounds=4, eval_every=2, batch=8, engine="fused") | own
    return fedsgd.comparison("mnist", "smoke", "digits", keys, **own)


@tabled("task", ["mnist", "emnist", "fmnist"])
def test_a_comparison_takes_the_papers_settings_and_changes_what_it_is_told(task):
    def paper_setting(name):
        return paper_tables.hyper("sqsgd", name, task).value

    c = fedsgd.comparison(task, "full", "digits", rounds=7)
    assert isinstance(c, fedsgd.Comparison) and (c.task, c.scale) == (
        task,
        "full",
    )
    assert (c.config.rounds, c.config.cohort) == (7, paper_setting("clients"))
    assert (c.config.batch, c.config.server_lr) == (
        paper_setting("batch_size"),
        paper_setting("server_lr"),
    )
    assert (c.base.eps, c.base.bound) == (
        tuple(paper_setting("eps")),
        paper_setting("bound"),
    )
    assert c.keys == tuple(fedsgd.figures(c.base)) == tuple(c.curves)
    assert fedsgd.early(c) == 10 * paper_setting("rounds_per_epoch")
    paper = fedsgd.comparison(task, "full", "digits").config
    assert paper.rounds == paper_setting("epochs") * paper_setting("rounds_per_epoch")
    assert fedsgd.comparison(task, "full", "x", ("plain",)).keys == ("plain",)


def test_a_grid_lists_its_curves_and_the_claims_whose_curves_are_drawn():
    every = fedsgd.comparison("mnist", "full", "mnist")
    runs = fedsgd.listed(every, 2.5, 3.0)
    curves, said = [r for r in runs if not r.needs], [r for r in runs if r.needs]
    assert [r.key for r in curves] == list(every.keys)
    assert {(r.minutes, r.memory, r.data) for r in curves} == {(2.5, 3.0, ("mnist",))}
    known = {c.key for c in paper_tables.cells("sqsgd") if c.key.startswith("mnist.")}
    assert {cell for r in said for cell in r.fills} == known
    for r in said:
        above, below, _ = fedsgd.claims(every.base, 1)[r.key[len("claim.") :]]
        assert r.needs == (*above, below) and r.seeds == curves[0].seeds
    few = fedsgd.listed(small("fig1.K2", "fig1.K8", "plain"), 1.0)
    assert [r.key for r in few] == [
        "fig1.K2",
        "fig1.K8",
        "plain",
        "claim.fig1.bits3_minus_bits1",
        "claim.fig1.early.bits3_minus_bits1",
    ]
    assert few[0].fills == ("ours.smoke.digits.accuracy.fig1.K2",) and not few[0].data


def test_clients_are_ten_equal_parts_and_the_same_each_time():
    found = fedsgd.federation("digits")
    assert found is fedsgd.federation("digits")
    sizes = [len(part) for part in found.parts]
    assert len(sizes) == 10 and max(sizes) - min(sizes) <= 1
    assert len({int(i) for part in found.parts for i in part}) == sum(sizes)
    assert len(fedsgd.federation("digits", 4).parts) == 4


def test_what_is_gathered_is_the_norm_of_the_share_that_is_sent():
    mechanism = LENET.sqsgd(fraction=0.25)
    memory = torch.zeros(3, 2, 1000)
    memory[:, 0, :9] = torch.tensor([1.0, 2.0, 3.0])[:, None]
    share = math.sqrt(mechanism.size(1000) / 1000)
    wanted = {"gathered": pytest.approx(share * 3.0 * 2.0)}
    assert fedsgd.gathered(mechanism, memory) == wanted
    assert fedsgd.gathered(mechanism, None) == {}
    assert fedsgd.gathered(pm.Pm(1.0, 5.0), memory) == {}


def played(c, key, place, **how):
    "What one curve gives, in a folder."
    run = next(r for r in fedsgd.listed(c, 1.0) if r.key == key)
    given = dict(checkpoint=place, resume=True, progress=False) | how
    return fedsgd.run_one(c, run, 0, **given)


def numbers(found) -> dict:
    return {k: found[k] for k in ("final", "history", "cells", "bits", "config")}


@pytest.mark.parametrize("key", ["fig2.eps400", "residuals.pm.eps400", "vqsgd.eps400"])
def test_a_run_in_pieces_is_the_run_in_one(tmp_path, key):
    c = small(key)
    whole = played(c, key, tmp_path / "whole.pt")
    for tries in range(99):
        more = dict(max_seconds=0.0, save_every=0.0) if tries < 2 else {}
        pieces = played(c, key, tmp_path / "pieces.pt", **more)
        assert (pieces is None) == bool(more), "no time, nothing to record"
        if pieces:
            break
    assert numbers(whole) == numbers(pieces) and len(whole["history"]) >= 2
    assert whole["cells"][f"ours.smoke.digits.accuracy.{key}"] == [
        whole["final"]["accuracy"],
        "percent",
    ]
    assert ("gathered" in whole["final"]) == key.startswith("fig2")
    assert whole["guarantee"].rounds == 4 and whole["data"]["n_clients"] == 10


def test_a_run_without_privacy_claims_none_and_a_claim_is_read_off_records():
    c = small("fig1.K2", "fig1.K8", "plain", rounds=1)
    assert played(c, "plain", None)["guarantee"] is None
    claim = next(r for r in fedsgd.listed(c, 1.0) if r.needs)
    inputs = {"fig1.K8": kept([1.0, 30.0]), "fig1.K2": kept([2.0, 10.0])}
    assert fedsgd.run_one(c, claim, 0, inputs=inputs) == dict(
        cells={"mnist.fig1.bits3_minus_bits1": [20.0, "percentage points"]},
        data={"name": "digits"},
    )
