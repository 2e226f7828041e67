"The frontier: one guarantee, one budget of tuning, and data that tuning never saw."

from dataclasses import replace

import numpy as np
import pytest
import torch
from checkout import cells
from made_up import made_up
from tables import tabled

from dpcomm import registered
from dpcomm.datasets import images
from dpcomm.evidence import records
from dpcomm.experiments import frontier, lines

SMALL = frontier.settings("smoke")["digits"]


EVERY = ("gaussian.local", *registered())


@pytest.mark.parametrize("scale", ["quick", "full"])
def test_every_registered_mechanism_is_tuned_and_trained_alike(scale):
    grid = {line.key: line for line in frontier.grid(scale)}
    for task, s in frontier.settings(scale).items():
        for name in EVERY:
            for eps in s.budgets:
                line = grid[f"{task}.eps{eps}.{name}"]
                assert line.needs == (f"tune.{task}.{name}@0",)
                assert line.seeds == frontier.SEEDS[scale]
        few = {k for k in grid if k.startswith(f"{task}.eps8") and k.endswith("few")}
        assert len(few) == len(frontier.FEWER)


def test_whoever_is_drawn_the_last_cohort_is_full():
    for s in frontier.settings("full").values():
        left = (s.n_clients - s.held) * s.visits - (s.rounds - 1) * s.cohort
        assert left >= s.cohort * s.visits


def test_all_rows_keep_one_definition_and_the_epsilon():
    asked = frontier.asked_of(SMALL, EVERY)
    made = {end: frontier.row_of(SMALL, **who) for end, who in asked.items()}
    guarantees = [row.guarantee for row in made.values()]
    shared = {(g.unit, g.relation, g.delta, g.scope) for g in guarantees}
    assert shared == {("client", "zero-out", frontier.DELTA, "total")}
    assert all(g.eps <= 8 for g in guarantees)
    local = made["eps8.gaussian"].built.local, made["eps8.gaussian.local"].built.local
    assert local == (False, True)
    for kind, bits in frontier.FEWER.items():
        few, usual = (made[f"eps8.{kind}{how}"].up["values"] for how in (".few", ""))
        assert few < usual and few <= bits * 7850


@pytest.mark.slow
@tabled("task", frontier.settings("full"))
def test_every_row_of_the_grid_can_be_made(task):
    "In as many dimensions as its network has, and with as few bits as it says."
    s = frontier.settings("full")[task]
    for who in frontier.asked_of(s, EVERY).values():
        assert frontier.row_of(s, **who).guarantee.eps <= who["eps"]


def test_tuning_is_scored_on_clients_who_never_train(monkeypatch):
    tuning, final, out = frontier.federations(SMALL)
    assert len(out.parts) == SMALL.held
    assert tuning.parts is final.parts and len(final.parts) == 400
    trained = set(np.concatenate(final.parts).tolist())
    assert len(trained) + len(tuning.data.y_test) == len(final.data.y)
    whole = images.load("digits")
    assert torch.equal(final.data.x_test, whole.x_test)
    held = sorted(set(range(len(whole.y))) - trained)
    of_held = whole.x[held].flatten(1).sum(1).sort().values
    assert torch.equal(tuning.data.x_test.flatten(1).sum(1).sort().values, of_held)


def test_predictions_from_updates_are_of_those_who_never_train():
    u = frontier.updates(SMALL)
    assert u.shape == (16, 7850)
    assert torch.allclose(u.norm(dim=1), torch.ones(16))
    line = next(x for x in frontier.grid("smoke") if x.key == "updates.digits")
    final, kinds = lines.run_one(line, 0)["final"], frontier.SMOKE[1:]
    assert set(final) == set(frontier.asked_of(SMALL, kinds))
    row = frontier.row_of(SMALL, "gaussian", 8)
    assert final["eps8.gaussian"] == pytest.approx(row.error, rel=1e-3)


def test_points_are_means_over_seeds_of_what_was_trained(monkeypatch):
    def record(key, seed, accuracy, **config):
        config = dict(kind="pm", d=10, mechanism="Pm()") | config
        return made_up(key, seed, config=config, final=dict(accuracy=accuracy))

    private = dict(trust="local", predicted=2.0, up={"values": 5, "total": 15})
    made = [record("toy.eps8.pm", s, 50.0 + s, **private) for s in range(3)]
    made += [record("tune.toy.pm", 0, 99.0), record("toy.none", 0, 90.0, kind="none")]
    made += [replace(record("updates.toy", 0, 0.0), final={"eps8.pm": 3.0})]
    private, none = frontier.points(made)
    assert (private.eps, private.bits, private.predicted) == (8.0, 1.5, 2.0)
    assert (private.accuracy.mean, private.accuracy.n) == (51.0, 3)
    assert private.informed == 3.0 and none.informed is None
    assert none.eps is None and none.bits == 32 and none.accuracy.n == 1


def test_the_numbers_of_home_are_those_of_the_records():
    found = frontier.points(records.load("across", "frontier", "full"))
    (caption,) = [
        d for c in cells("nbs/index.ipynb") for d in c.directives if "fig-cap" in d
    ]
    mine = [p for p in found if (p.task, p.eps) == ("mnist", 8.0)]
    (plain,) = [p.accuracy for p in found if p.task == "mnist" and p.eps is None]

    def lost(fits):
        return f"{plain.mean - max(p.accuracy.mean for p in mine if fits(p)):.1f}"

    sums = lost(lambda p: p.trust == "secagg")
    local = lost(lambda p: p.trust == "local")
    one = lost(lambda p: p.trust == "local" and 0.9 < p.bits < 1.1)
    assert f"loses {sums} points of {plain.mean:.1f} %" in caption
    assert f"{local} where nobody is trusted, {one} with one bit" in caption
    assert {p.accuracy.n for p in mine} == {3} and "n = 3" in caption
    assert len({p.mech for p in mine}) == len(registered()) and "fifteen" in caption
