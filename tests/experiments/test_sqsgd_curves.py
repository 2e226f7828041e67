"What the comparison of sqSGD with its baselines shares between tasks."

import dataclasses

import numpy as np
import pytest
import torch

from dpcomm.core.chance import seed_tree
from dpcomm.experiments import sqsgd_curves
from dpcomm.mechanisms import pm, sqsgd, vqsgd
from dpcomm.report import papers
from dpcomm.tasks import images
from dpcomm.training.federated import Config

LENET = sqsgd_curves.Base(61_706, (200, 300, 400))
RESNET = sqsgd_curves.Base(
    1_730_426, (1000, 2000, 3000), matched_levels=128, fixed_eps=2000.0
)
TASKS = [("mnist", LENET), ("emnist", LENET), ("fmnist", RESNET)]


@pytest.mark.parametrize("task, base", TASKS)
def test_the_three_mechanisms_of_figure_3_fit_into_the_bits_of_pm(task, base):
    for eps in base.eps:
        found = {
            key: mech.bits(base.d).content
            for key, mech in sqsgd_curves.matched(base, eps).items()
        }
        assert (
            found[f"pm.eps{eps}"]
            == sqsgd_curves.spare_bits(eps)
            == 32 * (eps * 2 // 5) + 32
        )
        assert all(
            sqsgd_curves.spare_bits(eps) / 2 < bits <= sqsgd_curves.spare_bits(eps)
            for bits in found.values()
        )


@pytest.mark.parametrize("task, base", TASKS)
def test_figures_take_the_papers_settings(task, base):
    curves = sqsgd_curves.figures(base)

    def stated(name):
        return papers.hyper("sqsgd", name, task).value

    assert (
        tuple(base.eps) == stated("eps")
        and base.fixed_eps == stated("eps.fig1")
        and base.levels == stated("levels.fig2")
        and base.matched_levels == stated("levels.fig3")
    )
    assert {curves[f"fig1.K{K}"].levels for K in stated("levels.fig1")} == set(
        stated("levels.fig1")
    ) and {sqsgd_curves.RATIOS[i] for i in (0, 1, 3)} | {base.fraction} == set(
        stated("ratios.fig4")
    )
    assert all(
        curves[f"fig2.eps{eps}"].eps == eps
        and curves[f"fig2.eps{eps}"].fraction == stated("fraction")
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
        mech.momentum == stated("momentum") and mech.bound == stated("bound")
        for mech in curves.values()
        if isinstance(mech, sqsgd.SqSgd)
    )


@pytest.mark.parametrize("task, base", TASKS)
def test_every_claim_of_the_paper_is_computed_from_curves_that_exist(task, base):
    curves, claims = sqsgd_curves.figures(base), sqsgd_curves.claims(base, 1880)
    for above, below, _ in claims.values():
        assert {*above, below} <= set(curves)
    said = {
        c.key.removeprefix(f"{task}.")
        for c in papers.cells("sqsgd")
        if c.key.startswith(f"{task}.")
    }
    assert said <= set(claims)


def test_additions_differ_from_the_papers_curves_in_one_thing():
    base, added = sqsgd_curves.figures(LENET), sqsgd_curves.additions(LENET)
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
    assert sqsgd_curves.settings(config, LENET.sqsgd()).server == "sgd"
    for mech in (LENET.sqsgd(momentum=0.0), pm.Pm(1.0, 5.0), vqsgd.VqSgd(1.0, 5.0)):
        assert sqsgd_curves.settings(config, mech).server == "momentum"


def test_gaps_are_taken_seed_by_seed_where_all_curves_are_there():
    runs = {
        (key, seed): [
            {"round": 5, "accuracy": value},
            {"round": 9, "accuracy": value + seed},
        ]
        for key, seed, value in (
            ("a", 0, 1.0),
            ("a", 1, 2.0),
            ("b", 1, 5.0),
            ("b", 0, 3.0),
            ("c", 1, 7.0),
        )
    }
    assert sqsgd_curves.gaps(runs, (("b",), "a", None)) == [
        2.0,
        3.0,
    ] and sqsgd_curves.gaps(runs, (("b", "c"), "a", None)) == [5.0]
    assert (
        sqsgd_curves.gaps(runs, (("c",), "a", 5)) == [5.0]
        and sqsgd_curves.gaps(runs, (("d",), "a", None)) == []
    )


@pytest.mark.parametrize("key", ["fig2.eps400", "residuals.pm.eps400", "vqsgd.eps400"])
def test_a_run_in_pieces_is_the_run_in_one(tmp_path, key):
    digits = images.load("digits")
    federation = images.Federation(
        digits, images.iid(len(digits.y), 10, seed_tree(0, "partition")), "iid"
    )
    config = Config(
        rounds=4,
        cohort=10,
        steps=1,
        batch=8,
        lr=1.0,
        server="sgd",
        server_lr=1e-3,
        eval_every=2,
        engine="grouped",
    )
    mechanism = (sqsgd_curves.figures(LENET) | sqsgd_curves.additions(LENET))[key]
    whole = sqsgd_curves.Trainer(
        federation, config, "lenet5", tmp_path / "whole", progress=False
    )(key, mechanism, 0)
    for _ in range(99):
        pieces = sqsgd_curves.Trainer(
            federation,
            config,
            "lenet5",
            tmp_path / "pieces",
            resume=True,
            max_seconds=0.5,
            progress=False,
            save_every=0.0,
        )(key, mechanism, 0)
        if pieces:
            break
    assert torch.equal(whole.w, pieces.w) and whole.history == pieces.history
    assert (whole.memory is None) == (
        mechanism.memory(1, 1) is None if hasattr(mechanism, "memory") else True
    )
    if whole.memory is not None:
        assert torch.equal(whole.memory, pieces.memory) and whole.memory.any()


def test_a_finished_run_is_read_and_an_unfinished_one_left_when_time_is_up(tmp_path):
    digits = images.load("digits")
    federation = images.Federation(
        digits, images.iid(len(digits.y), 10, seed_tree(0, "partition")), "iid"
    )
    config = Config(
        rounds=1,
        cohort=10,
        steps=1,
        batch=8,
        lr=1.0,
        server="sgd",
        server_lr=1e-3,
        eval_every=1,
    )
    late = sqsgd_curves.Trainer(
        federation,
        config,
        "lenet5",
        tmp_path,
        resume=True,
        max_seconds=0.0,
        progress=False,
    )
    assert late("a", LENET.sqsgd(), 0) is None
    run = sqsgd_curves.Trainer(federation, config, "lenet5", tmp_path, progress=False)(
        "a", LENET.sqsgd(), 0
    )
    assert torch.equal(late("a", LENET.sqsgd(), 0).w, run.w) and np.isfinite(
        run.history[0]["loss"]
    )
