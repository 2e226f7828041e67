"Four mechanisms in one currency of noise, and what is read off their frontiers."

import dataclasses
import math
import types

import numpy as np
import pytest
from made_up import made_up

from dpcomm.evidence import paper_tables
from dpcomm.evidence.records import Record
from dpcomm.experiments.imvu import noise_scales

SMALL = noise_scales.smoke("mnist")
FULL = noise_scales.sweep("mnist", "full")


def kept(run, history, final=None) -> Record:
    "A record of a point, of (epoch, accuracy)."
    epochs, accuracies = zip(*history)
    columns = {"epoch": list(epochs), "accuracy": list(accuracies)}
    more = dict(final={"accuracy": 1.0}, data={"name": "digits"})
    return made_up(run, paper="imvu", history=columns, **more)


@pytest.mark.parametrize("task", ["mnist", "cifar10"])
def test_a_sweep_has_the_papers_settings_and_what_it_is_told(task):
    s = noise_scales.sweep(task, "full", epochs=3)
    assert (s.task, s.scale, s.images, s.epochs) == (task, "full", task, 3)
    for field, name in (
        ("clip", "clip"),
        ("d", "n_parameters"),
        ("batch", "batch_size"),
    ):
        assert getattr(s, field) == paper_tables.hyper("imvu", name, task).value
    assert s.delta == paper_tables.hyper("imvu", "delta").value and s.limit is None
    assert len(s.points) == len(noise_scales.KINDS) * len(s.sigmas) * len(s.steps)
    assert isinstance(s, noise_scales.Sweep) and {p[0] for p in s.points} == {
        *noise_scales.KINDS
    }


@pytest.mark.parametrize("sigma", [0.2, 1.5])
def test_all_mechanisms_have_the_noise_of_one_gaussian(sigma):
    clip = 0.5
    gaussian, sign = (
        noise_scales.at_noise(k, sigma, clip) for k in ("gaussian", "signsgd")
    )
    assert gaussian.sigma == sign.sigma == sigma and gaussian.clip_norm == clip
    imvu = noise_scales.at_noise("imvu", sigma, clip)
    assert imvu.beta == 2 / sigma and imvu.eps == 1.0 and imvu.clip_norm == clip
    for ratio in noise_scales.RATIOS:
        mvu = noise_scales.at_noise("mvu", sigma, clip, ratio)
        assert mvu.beta == ratio / sigma and mvu.n_inputs == noise_scales.MVU_INPUTS
        assert math.tanh(mvu.eps / 2) == pytest.approx(1 / ratio)


def test_a_price_is_the_guarantee_of_the_epochs_done():
    for curve, how in noise_scales.ACCOUNTANT.items():
        if curve in ("mvu", "mvu.exact"):
            continue
        kind = curve.split(".")[0]
        mech = noise_scales.build(SMALL, kind, 0.2)
        once, twice = (noise_scales.price(SMALL, curve, 0.2, n) for n in (1, 2))
        assert 0 < once < twice
        promise = noise_scales.account(SMALL, mech, 2, how)
        assert (promise.eps, promise.rounds) == (twice, 2)
        assert (promise.relation, promise.delta) == ("zero-out", SMALL.delta)
        assert promise.accountant == how
    exact = noise_scales.price(SMALL, "signsgd.exact", 0.2, 2)
    assert exact <= noise_scales.price(SMALL, "signsgd", 0.2, 2), (
        "an exact law costs less"
    )


def test_mvu_takes_the_ratio_that_its_accountant_charges_least():
    s = dataclasses.replace(SMALL, d=100)
    costs = noise_scales.charged(s)
    assert set(costs) == set(noise_scales.RATIOS) and all(v > 0 for v in costs.values())
    best = min(costs, key=costs.get)
    assert noise_scales.build(s, "mvu", 0.2) == noise_scales.at_noise(
        "mvu", 0.2, s.clip, best
    )
    assert noise_scales.build(s, "imvu", 0.2) == noise_scales.at_noise(
        "imvu", 0.2, s.clip
    )


def test_a_grid_has_a_run_a_point_and_one_a_curve_and_budget():
    minutes = dict.fromkeys(noise_scales.KINDS, 1.5)
    points, read = (
        noise_scales.trained(FULL, (0, 1), minutes, 2.0),
        noise_scales.read(FULL, (0, 1)),
    )
    assert [r.key for r in points] == [noise_scales.key_of(p) for p in FULL.points]
    assert noise_scales.key_of(("imvu", 2.0, 0.04)) == "imvu.sigma2.step0.04"
    assert {(r.data, r.memory, r.minutes) for r in points} == {(("mnist",), 2.0, 1.5)}
    assert len(read) == len(FULL.budgets) * len(noise_scales.ACCOUNTANT)
    known = {
        c.key for c in paper_tables.cells("imvu", "fig2") if c.key.startswith("mnist.")
    }
    cells = {cell for r in read for cell in r.fills}
    assert {c for c in cells if not c.startswith("ours.")} == known
    for r in read:
        kind = r.key.split(".")[1]
        assert {key.split(".")[0] for key in r.needs} == {kind, "imvu"}
    small = {c for r in noise_scales.read(SMALL, (0,)) for c in r.fills}
    assert all(c.startswith("ours.smoke.mnist.") for c in small), (
        "no budget of the paper"
    )


def test_a_frontier_is_the_best_that_a_budget_buys(monkeypatch):
    eps = {1: 1.0, 2: 2.0, 4: 4.0}
    monkeypatch.setattr(
        noise_scales, "price", lambda s, curve, sigma, n: sigma * eps[n]
    )
    s = dataclasses.replace(SMALL, sigmas=(1.0, 10.0), steps=(0.04,), budgets=(2.0,))
    inputs = {}
    for kind, gain in (("imvu", 5.0), ("signsgd", 0.0)):
        for sigma, base in ((1.0, 50.0), (10.0, 90.0)):
            key = noise_scales.key_of((kind, sigma, 0.04))
            line = [(n, base + gain + n) for n in eps]
            inputs[key] = kept(key, line)
    assert noise_scales.accuracy_at(s, inputs, "signsgd", 2.0) == 52.0
    assert noise_scales.accuracy_at(s, inputs, "imvu", 4.0) == 59.0
    middle = noise_scales.accuracy_at(s, inputs, "signsgd", math.sqrt(8))
    assert middle == pytest.approx(53.0), "between two prices, by their logarithm"
    assert math.isnan(noise_scales.accuracy_at(s, inputs, "signsgd", 0.5))
    runs = {r.key: r for r in noise_scales.read(s, (0,))}
    mark = "ours.smoke.mnist."
    assert noise_scales.run_one(
        s, runs["frontier.signsgd.eps2"], 0, inputs=inputs
    ) == dict(
        cells={
            f"{mark}signsgd.eps2.acc": [52.0, "percent"],
            f"{mark}imvu_minus_signsgd.eps2": [5.0, "percentage points"],
        },
        data={"name": "digits"},
    )
    found = noise_scales.frontier(s, runs["frontier.imvu.eps2"], inputs)
    assert found["cells"] == {f"{mark}imvu.eps2.acc": [57.0, "percent"]}
    dear = dataclasses.replace(s, budgets=(0.5,))
    for run in noise_scales.read(dear, (0,)):
        if run.key in ("noise_scales.imvu.eps0.5", "noise_scales.signsgd.eps0.5"):
            assert noise_scales.frontier(dear, run, inputs)["cells"] == {}, (
                "below all prices"
            )


def test_a_point_is_trained_and_a_seed_repeats_it():
    x, y, x_test, y_test, said = noise_scales.loaded("digits", (600, 200))
    assert (len(x), len(y), len(x_test), len(y_test)) == (600, 600, 200, 200)
    assert (said["n_train"], said["n_test"], said["name"]) == (600, 200, "digits")
    minutes = dict.fromkeys(noise_scales.KINDS, 1.0)
    runs = {r.key: r for r in noise_scales.trained(SMALL, (0,), minutes, 1.0)}
    run = runs["gaussian.sigma0.2.step0.04"]
    assert noise_scales.run_one(SMALL, run, 0, max_seconds=0) is None, "no time"
    one, two, other = (noise_scales.point(SMALL, run, seed) for seed in (0, 0, 1))
    assert one["history"] == two["history"] != other["history"]
    final = one["final"]
    assert final["eps"] == one["guarantee"].eps == one["history"][-1]["eps"]
    assert final["uplink_bits"] == 2 * 600 * one["bits"].content
    assert np.isfinite(final["accuracy"]) and one["data"] == said
    with pytest.raises(ValueError, match="runs only on the CPU"):
        noise_scales.point(SMALL, run, 0, device="cuda")


def test_pairing_tells_what_a_common_seed_saves():
    "Paired differences of constant size save everything, unrelated ones nothing."
    mine = np.array([[70.0, 80], [72, 84], [74, 88]])
    curves = {"imvu": mine, "gaussian": mine - 1, "signsgd": -mine, "mvu": 0 * mine}

    def made(kind, noise):
        config = {"noise": noise} if noise else {}
        return types.SimpleNamespace(key=f"{kind}.sigma1.step1", config=config)

    found = [made("imvu", "common"), made("gaussian", "common"), made("mvu", None)]
    rows = noise_scales.pairing(found, curves.__getitem__).rows
    assert [row[1:5] for row in rows] == [
        ("batches and noise", "0.00", "4.47", "100%"),
        ("batches", "6.32", "4.47", "-100%"),
        ("batches", "3.16", "3.16", "0%"),
    ]
