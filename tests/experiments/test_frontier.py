"""I-MVU's frontiers: noise matched, epsilon by hand, and the best accuracy that a budget
buys, on histories made up for the purpose.
"""

import dataclasses

import numpy as np
import pytest

from dpcomm.experiments import frontier
from dpcomm.report import records

SMOKE = frontier.smoke("mnist")


def test_mechanisms_have_the_signal_of_the_same_gaussian():
    for sigma in (0.5, 2.0):
        gaussian, imvu, sign = (
            frontier.at_noise(kind, sigma, 0.25)
            for kind in ("gaussian", "imvu", "signsgd")
        )
        assert gaussian.sigma == sign.sigma == sigma and gaussian.local
        assert imvu.beta == 2 / sigma
        mvu = frontier.at_noise("mvu", sigma, 0.25, ratio=3.0)
        assert np.tanh(mvu.eps / 2) == pytest.approx(1 / 3)
        assert mvu.beta * sigma == pytest.approx(3.0)


def test_an_account_is_the_mechanisms_own_guarantee():
    mech = frontier.at_noise("gaussian", 2.0, SMOKE.clip)
    found = frontier.account(SMOKE, mech, 3, "rdp-balle")
    run = dict(rounds=3, delta=SMOKE.delta, relation="zero-out")
    assert found == mech.guarantee(**run, accountant="rdp-balle")
    assert frontier.account(SMOKE, mech, 6, "rdp-balle").eps > found.eps


def test_mvu_is_built_with_the_ratio_that_is_charged_least():
    charges = frontier.charged(SMOKE)
    assert sorted(charges) == sorted(frontier.RATIOS)
    least = min(charges, key=charges.get)
    sigma = SMOKE.sigmas[0]
    assert frontier.build(SMOKE, "mvu", sigma).beta == pytest.approx(least / sigma)


def test_prices_grow_with_epochs_and_exact_ones_are_not_above():
    sigma = SMOKE.sigmas[0]
    for kind in ("signsgd", "mvu"):
        by_paper, exact = (
            [frontier.price(SMOKE, curve, sigma, epochs) for epochs in (1, 2)]
            for curve in (kind, f"{kind}.exact")
        )
        assert by_paper[0] < by_paper[1] and exact[0] < exact[1]
        assert all(e <= p * (1 + 1e-9) for e, p in zip(exact, by_paper))


def test_keys_name_the_point():
    assert frontier.key_of(("imvu", 2.0, 0.04)) == "imvu.sigma2.step0.04"


def test_features_of_a_few_images_are_those_of_the_first():
    few = frontier.loaded("digits", (60, 20))
    more = frontier.loaded("digits", (120, 20))
    assert len(few[0]) == 60 and np.allclose(few[0], more[0][:60], atol=1e-5)
    assert few[4]["n_train"] == 60 and few[4]["n_test"] == 20


def runs_of(accuracies):
    "Records of every point of the smoke sweep with one accuracy an epoch."
    base, found = records.load("imvu")[0], {}
    for kind, sigma, step in SMOKE.points:
        history = dict(epoch=[1, 2], accuracy=list(accuracies[kind]))
        key = frontier.key_of((kind, sigma, step))
        found[key] = dataclasses.replace(base, key=key, history=history)
    return found


def test_a_budget_buys_the_best_affordable_accuracy():
    inputs = runs_of(dict.fromkeys(frontier.KINDS, (70.0, 60.0)))
    sigma = SMOKE.sigmas[0]
    first, second = (frontier.price(SMOKE, "gaussian", sigma, e) for e in (1, 2))
    at = frontier.accuracy_at
    assert at(SMOKE, inputs, "gaussian", first) == pytest.approx(70)
    assert at(SMOKE, inputs, "gaussian", second) == pytest.approx(70)
    assert np.isnan(at(SMOKE, inputs, "gaussian", 0.9 * first))


def test_a_frontier_run_has_its_accuracy_and_what_imvu_is_above_it():
    flat = dict(gaussian=(50.0, 55.0), imvu=(60.0, 61.0), signsgd=(1, 2), mvu=(1, 2))
    inputs, top = runs_of(flat), 1e9
    s = dataclasses.replace(SMOKE, budgets=(top,))
    run = next(
        r for r in frontier.read(s, (0,)) if r.key.startswith("frontier.gaussian")
    )
    found = frontier.frontier(s, run, inputs)["cells"]
    assert found[run.fills[0]] == [pytest.approx(55), "percent"]
    assert found[run.fills[1]] == [pytest.approx(6), "percentage points"]


def test_a_point_is_trained_and_priced():
    run = frontier.trained(SMOKE, (0,), dict.fromkeys(frontier.KINDS, 0.1), 1.0)[0]
    found = frontier.point(SMOKE, run, 0)
    kind, sigma, _ = SMOKE.points[0]
    assert found["final"]["eps"] == frontier.price(SMOKE, kind, sigma, SMOKE.epochs)
    assert found["guarantee"].eps == pytest.approx(found["final"]["eps"])
    assert found["final"]["uplink_bits"] == SMOKE.epochs * 600 * found["bits"].content
    assert frontier.point(SMOKE, run, 0, max_seconds=0) is None
