"The frontier: one guarantee, one budget of tuning, and data that tuning never saw."

from dataclasses import replace

import numpy as np
import pytest
import torch
from tables import tabled

from dpcomm import registered
from dpcomm.datasets import images
from dpcomm.experiments import frontier
from dpcomm.training import models

SMALL = frontier.settings("smoke")["digits"]


@pytest.mark.parametrize("scale", ["quick", "full"])
def test_every_registered_mechanism_is_tuned_and_trained_alike(scale):
    grid = {run.key: run for run in frontier.grid(scale)}
    for task, s in frontier.settings(scale).items():
        for name in (*registered(), "gaussian.local"):
            tuned = grid[f"tune.{task}.{name}"]
            for eps in s.budgets:
                run = grid[f"{task}.eps{eps}.{name}"]
                assert (
                    run.needs == (f"{tuned.key}@0",)
                    and run.seeds == (frontier.SEEDS[scale])
                )
        few = {
            k.split(".")[2] for k in grid if k.startswith(task) and k.endswith("few")
        }
        assert few == set(frontier.FEWER)
    assert len(frontier.SEEDS["full"]) >= 3


def test_full_is_the_three_tasks_and_the_network_of_the_paper():
    full = frontier.settings("full")
    assert {s.images for s in full.values()} == {
        "mnist",
        "fashion-mnist",
        "mnist-by-writer",
    }
    assert models.MODELS[full["cnn"].net][1] == 582_026
    for s in full.values():
        left = (s.n_clients - s.held) * s.visits - (s.rounds - 1) * s.cohort
        assert left >= s.cohort * s.visits  # whoever is drawn, the last cohort is full


def test_all_rows_keep_one_definition_and_the_epsilon():
    kinds = [end for end in frontier.keys(SMALL, "full") if end != "none"]
    made = {end: frontier.row_of(SMALL, end) for end in kinds}
    assert len(made) == len(registered()) + 1 + len(frontier.FEWER)
    shared = {
        (g.unit, g.relation, g.delta, g.scope)
        for g in (row.guarantee for row in made.values())
    }
    assert shared == {("client", "zero-out", frontier.DELTA, "total")}
    assert all(row.guarantee.eps <= 8 for row in made.values())
    assert (
        not made["eps8.gaussian"].built.local
        and made["eps8.gaussian.local"].built.local
    )
    for kind, bits in frontier.FEWER.items():
        few, usual = (made[f"eps8.{kind}{how}"].up["values"] for how in (".few", ""))
        assert few < usual and few <= bits * 7850


@pytest.mark.slow
@tabled("task", frontier.settings("full"))
def test_every_row_of_the_grid_can_be_made(task):
    "In as many dimensions as its network has, and with as few bits as it says."
    s = frontier.settings("full")[task]
    for end in frontier.keys(s, "full"):
        if end != "none":
            assert frontier.row_of(s, end).guarantee.eps <= int(end[3 : end.index(".")])


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


def test_the_step_that_scores_best_is_taken(monkeypatch):
    seen = []

    class Done:
        def __init__(self, step):
            self.history = [dict(accuracy=100 - 1000 * abs(step - 0.03))]

    def train(s, row, step, clients, seed, **how):
        seen.append((step, seed))
        return None, Done(step), None

    monkeypatch.setattr(frontier, "train", train)
    found = frontier.tune(SMALL, "none", 0, {})
    assert found["final"]["server_lr"] == 0.03 and found["final"]["accuracy"] == 100
    assert seen == [(step, frontier.TUNING) for step in SMALL.steps]
    assert frontier.tune(SMALL, "none", 0, dict(max_seconds=0)) is None


def test_a_smaller_clip_trains_the_same_model():
    "Why the clip is not tuned: below every update, size is lost on Adam."
    clients = frontier.federations(SMALL)[1]
    ends = [
        frontier.train(replace(SMALL, clip=clip), None, 0.03, clients, 0)[1].w
        for clip in (0.1, 0.01)
    ]
    assert torch.allclose(*ends, atol=1e-4)


def test_predictions_from_updates_are_of_those_who_never_train():
    u = frontier.updates(SMALL)
    assert u.shape == (16, 7850)
    assert torch.allclose(u.norm(dim=1), torch.ones(16))
    found = frontier.informed(SMALL, "smoke")["final"]
    assert set(found) == {end for end in frontier.keys(SMALL, "smoke") if end != "none"}
    row = frontier.row_of(SMALL, "eps8.gaussian")
    assert found["eps8.gaussian"] == pytest.approx(row.error, rel=1e-3)
