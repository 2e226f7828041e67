"One factor at a time: what each changes, and what it leaves as it is."

import torch
from tables import tabled

from dpcomm.core.random import seed_tree
from dpcomm.datasets import images
from dpcomm.experiments.dprec import gap as dprec_gap
from dpcomm.training import models

RUNS = {run.key: run for run in dprec_gap.grid("smoke")}


@tabled("factor", dprec_gap.FACTORS)
def test_clients_differ_in_what_the_factor_names(factor):
    base, found = (dprec_gap.clients(name, "smoke") for name in ("base", factor))
    same = {
        "pixels": torch.equal(base.data.x[:100], found.data.x[:100]),
        "test images": torch.equal(base.data.y_test, found.data.y_test),
        "sizes": found.sizes.std() > 0,
    }
    odd = {"standard": "pixels", "validation": "test images", "equal": "sizes"}
    assert [what for what, kept in same.items() if not kept] == (
        [odd[factor]] if factor in odd else []
    )


def test_standard_pixels_are_moved_alike_in_training_and_test():
    plain, moved = (dprec_gap.clients(f, "smoke").data for f in ("base", "standard"))
    scale = plain.x.std()
    torch.testing.assert_close(moved.x * scale + plain.x.mean(), plain.x)
    torch.testing.assert_close(moved.x_test * scale + plain.x.mean(), plain.x_test)


def test_validation_images_are_the_last_of_training():
    whole, held = images.load("digits"), dprec_gap.clients("validation", "smoke").data
    assert torch.equal(held.x_test, whole.x[-360:]) and len(held.y_test) == 360


def test_clips_are_the_texts_and_each_promises_its_own_epsilon():
    assert {key: dprec_gap.clip(key) for key in dprec_gap.CLIPS} == {
        "base.eps3.rec": 0.545,
        "base.eps6.rec": 0.87,
        "iclr.eps3.rec": 0.5,
        "iclr.eps6.rec": 0.7625,
    }
    config, told = dprec_gap.settings("full")["config"], {}
    for key in dprec_gap.CLIPS:
        line = dprec_gap.run_spec(RUNS[key], config, 100, (100,) * 10)
        assert line.mechanism.clip_norm == dprec_gap.clip(key) * 0.005
        told[key] = line.guarantee(1000).eps
    assert sorted(told, key=told.get) == sorted(told, key=dprec_gap.clip)


@tabled("factor", ["base", "adam", "glorot", "tanh"])
def test_play_changes_what_the_factor_names(factor, monkeypatch):
    "Played with a trainer that hands back its task, as each is in the deep tier."
    monkeypatch.setattr(
        dprec_gap.configurations, "train", lambda line, net, **told: (line, net, told)
    )
    line, net, told = dprec_gap.run_one(RUNS[f"{factor}.eps3.fedavg"], 0)
    assert line.config.adam_eps == (1e-3 if factor == "adam" else 1e-8)
    assert told["law"] == ("glorot" if factor == "glorot" else "torch")
    assert told["model"] == ("lenet5_tanh" if factor == "tanh" else "linear")
    assert told["factor"] == factor and line.config.engine == "fused"
    again = models.build(told["model"], seed_tree(0, "init"), told["law"])
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters()))


def test_a_run_on_the_large_network_differs_in_what_its_key_names(monkeypatch):
    "Played with a trainer that hands back its task."
    runs = {run.key: run for run in dprec_gap.grid("full")}

    def taken(line, net, clients, seed, fills, how, **config):
        return line, clients, sum(p.numel() for p in net.parameters()), config

    def dealt(name, n_clients, deal):
        return images.Federation(images.load("digits"), (deal,), "one")

    monkeypatch.setattr(dprec_gap.configurations, "train", taken)
    monkeypatch.setattr(dprec_gap.configurations, "mnist_clients", dealt)
    for key in ("cnn.step.eps6.rec", "cnn.deal.eps3.fedavg", "cnn.iclr.eps3.rec"):
        line, clients, d, config = dprec_gap.run_one(runs[key], 2, device="cuda")
        assert d == 582_026 and config["model"] == "cnn"
        assert line.config.server_lr == (1e-3 if "step" in key else 2e-3)
        assert clients.parts == ((2,) if "deal" in key else (0,))
        if "iclr" in key:
            assert line.mechanism.clip_norm == 0.5 * 0.005
    line, *_ = dprec_gap.run_one(runs["cnn.step.eps6.iclr"], 0, device="cuda")
    assert line.mechanism.clip_norm == 0.7625 * 0.005
    assert line.config.server_lr == 1e-3 and line.config.engine == "auto"
