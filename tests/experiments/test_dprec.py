"DP-REC's experiments: what each line varies, made data, floors and counts."

from dataclasses import replace

import numpy as np
import pytest
import torch
from tables import tabled

from dpcomm.core.random import seed_tree
from dpcomm.core.vectors import pack
from dpcomm.datasets import images
from dpcomm.datasets.shakespeare import SYMBOLS
from dpcomm.experiments import lines
from dpcomm.experiments.dprec import (
    ablations,
    gap,
    indices,
    mean,
    quantised,
    shakespeare,
    stackoverflow,
)
from dpcomm.mechanisms.gaussian import Gaussian
from dpcomm.training import models
from dpcomm.training.federated import Config, Task


def listed(experiment, scale="smoke"):
    return {line.key: line for line in experiment.grid(scale)}


@tabled("factor", gap.FACTORS)
def test_clients_differ_in_what_the_factor_names(factor, monkeypatch):
    digits = images.load("digits")  # of which the clients have a thousand
    fewer = replace(digits, x=digits.x[:1000], y=digits.y[:1000])
    dealt = images.Federation(fewer, [range(300), range(300, 1000)], "uneven")
    monkeypatch.setattr(gap, "mnist_clients", lambda *of: dealt)
    deal = gap.clients.__wrapped__
    base, varied = (deal(name, "smoke") for name in ("base", factor))
    same = {
        "pixels": torch.equal(base.data.x[:100], varied.data.x[:100]),
        "test images": torch.equal(base.data.y_test, varied.data.y_test),
        "sizes": varied.sizes.std() > 0,
    }
    odd = {"standard": "pixels", "validation": "test images", "equal": "sizes"}
    changed = [what for what, kept in same.items() if not kept]
    assert changed == ([odd[factor]] if factor in odd else [])


def test_clips_are_the_texts_and_each_promises_its_own_epsilon():
    clips = {"base.eps3": 0.545, "base.eps6": 0.87}
    clips |= {"iclr.eps3": 0.5, "iclr.eps6": 0.7625}
    runs, eps = listed(gap, "full"), {}
    for key, ratio in clips.items():
        _, spec = lines.prepared(runs[f"{key}.rec"])
        assert spec.mechanism.clip_norm == ratio * 0.005
        eps[key] = spec.guarantee(1000).eps
    assert sorted(eps, key=eps.get) == sorted(eps, key=clips.get)


@tabled("factor", ["base", "adam", "glorot", "tanh"])
def test_a_line_changes_what_its_factor_names(factor):
    line = listed(gap)[f"{factor}.eps3.fedavg"]
    net, spec = lines.prepared(line)
    assert spec.config.adam_eps == (1e-3 if factor == "adam" else 1e-8)
    assert line.noted["law"] == ("glorot" if factor == "glorot" else "torch")
    assert line.noted["model"] == ("lenet5_tanh" if factor == "tanh" else "linear")
    assert line.noted["factor"] == factor and spec.config.engine == "fused"
    again = models.build(line.noted["model"], seed_tree(0, "init"), line.noted["law"])
    assert torch.equal(pack(net), pack(again))


def test_a_line_on_the_large_network_differs_in_what_its_key_names(monkeypatch):
    asked = []
    monkeypatch.setattr(gap, "clients", lambda *who: asked.append(who))
    runs = listed(gap, "full")
    for key in ("step.eps6.rec", "deal.eps3.fedavg", "iclr.eps3.rec", "step.eps6.iclr"):
        line = runs[f"cnn.{key}"]
        net, spec = lines.prepared(line, 2, device="cuda")
        line.clients(2)
        assert len(pack(net)) == 582_026 and spec.config.engine == "auto"
        assert spec.config.server_lr == (1e-3 if "step" in key else 2e-3)
        if "iclr" in key:
            ratio = 0.5 if "eps3" in key else 0.7625
            assert spec.mechanism.clip_norm == ratio * 0.005
    assert [who[2] for who in asked] == [0, 2, 0, 0]


def test_noise_alone_leaves_the_length_and_rounding_toward_zero_takes_it():
    """A Gaussian with hardly any noise leaves everything; 8 bits on [-C, C] take nearly all
    of an update whose coordinates are smaller than a step; a range that fits leaves most.
    """
    runs, kept = listed(quantised), {}
    for kind in ("fedavg", "quant8", "quant8-range"):
        line = runs[f"eps3.{kind}"]
        net, spec = lines.prepared(line)
        silent = type(spec.mechanism)(**vars(spec.mechanism) | {"sigma": 1e-9})
        task = Task(net, line.clients(0), silent, Config(**line.changes), 0)
        kept[kind] = quantised.survives(task, pack(net))
    assert isinstance(lines.prepared(runs["eps3.fedavg"])[1].mechanism, Gaussian)
    assert kept["fedavg"] == pytest.approx(1, abs=1e-3)
    assert kept["quant8"] < kept["quant8-range"] <= 1 + 1e-3


@tabled("scale", ("smoke", "quick", "full"))
def test_shakespeares_lines_promise_the_epsilon_of_their_keys(scale):
    for line in shakespeare.grid(scale)[:2]:
        _, spec = lines.prepared(line)
        assert spec.guarantee(spec.config.rounds).eps == pytest.approx(3, rel=0.02)


def test_shakespeares_counts_are_those_of_the_windows_that_train():
    grid, clients = listed(shakespeare), shakespeare.federation("smoke")
    dealt = lines.run_one(grid["partition"], 0)
    assert dealt["cells"]["shakespeare.clients"][0] == 12
    assert dealt["cells"]["shakespeare.samples"][0] == clients.sizes.sum()
    assert dealt["data"]["n_train"] == clients.sizes.sum()
    ((value, unit),) = lines.run_one(grid["space"], 0)["cells"].values()
    text = [SYMBOLS[int(y)] for y in clients.data.y_test]
    assert unit == "percent" and value == 100 * text.count(" ") / len(text)


def test_only_the_full_setting_needs_the_theorem_that_holds():
    specs = {
        scale: lines.prepared(listed(stackoverflow, scale)["eps1.rec"])[1]
        for scale in ("quick", "full")
    }
    proved = {s: spec.guarantee(spec.config.rounds) for s, spec in specs.items()}
    assert proved["quick"].accountant == "theorem1-arxiv"
    assert 0.9 < proved["quick"].eps <= 1
    assert proved["full"].accountant == "exact-classic" and proved["full"].eps < 1
    assert specs["full"].mechanism.groups == (1_000_000,) * 5 + (500,)


@tabled("kind", ["bits4", "none", "local3.fedavg", "only.rec64", "only.fedavg"])
def test_a_study_takes_away_what_it_names(kind):
    net, spec = lines.prepared(listed(ablations)[kind])
    d, bits = len(pack(net)), spec.mechanism.bits(len(pack(net))).payload
    private = {"bits4", "local3.fedavg"}
    assert (spec.guarantee is not None) == (kind in private)
    whole_bytes = -(-(-(-d // 64) * 7) // 8) * 8
    groups = {"bits4": 8 * 4, "only.rec64": whole_bytes}
    assert bits == groups.get(kind, 32 * d)
    if kind == "local3.fedavg":
        promise = spec.guarantee(spec.config.rounds)
        assert (promise.scope, promise.trust) == ("per-round", "local")
        assert spec.as_run(20)["zero-out"].eps > promise.eps


def test_errors_of_one_bit_are_their_closed_forms():
    "Means over seeds against the formulas, in twenty dimensions."
    for key in ("sqkr", "rec.zero", "rec.good", "rec.unbiased"):
        line = listed(mean)[key]
        runs = [lines.run_one(line, seed) for seed in range(10)]
        error = np.mean([run["final"]["mse"] for run in runs])
        formula = runs[0]["config"]["closed_form"]
        assert abs(error / formula - 1) < 6 * (2 / 20 / 10) ** 0.5 + 0.1, key
        assert runs[0]["final"]["uplink_bits"] == 500 * 40


def test_a_priced_run_fills_its_cells_from_its_history():
    outcome = lines.run_one(listed(indices)["only64"], 0)
    cells = outcome["cells"]
    assert tuple(cells) == listed(indices)["only64"].fills
    told = np.mean([h["told"] for h in outcome["history"]])
    assert cells["ours.smoke.indices.only64.told"][0] == pytest.approx(told)
    fresh, public = (
        cells[f"ours.smoke.indices.{law}.p"][0] for law in ("fresh", "public")
    )
    assert fresh > 1e-6 > public
