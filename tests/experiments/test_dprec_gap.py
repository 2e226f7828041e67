"One factor at a time: what each changes, and what it leaves as it is."

import pytest
import torch
from tables import tabled

from dpcomm.experiments import dprec_gap
from dpcomm.tasks import images

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
        line = dprec_gap.curve(RUNS[key], config, 100, (100,) * 10)
        assert line.mechanism.clip_norm == dprec_gap.clip(key) * 0.005
        told[key] = line.guarantee(1000).eps
    assert sorted(told, key=told.get) == sorted(told, key=dprec_gap.clip)


@pytest.mark.parametrize("factor", ["base", "adam", "glorot", "tanh"])
def test_play_changes_what_the_factor_names(factor):
    run = RUNS[f"{factor}.eps3.fedavg"]
    config = dprec_gap.play(run, 0)["config"]
    assert config["adam_eps"] == (1e-3 if factor == "adam" else 1e-8)
    assert config["law"] == ("glorot" if factor == "glorot" else "torch")
    assert config["model"] == ("lenet5_tanh" if factor == "tanh" else "linear")
    assert config["factor"] == factor and config["engine"] == "fused"


def test_ninety_two_runs():
    full = dprec_gap.grid("full")
    assert sum(len(run.seeds) for run in full) == 92 and len(full) == 17
