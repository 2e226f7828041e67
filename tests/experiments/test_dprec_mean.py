"""dprec_mean: the clients' vectors, and estimates that meet their closed forms."""

import pytest
import torch
from tables import tabled

from dpcomm.experiments.dprec import mean as dprec_mean
from dpcomm.experiments.run import grids


def test_half_the_clients_point_along_the_diagonal():
    x = dprec_mean.vectors(0, 50, 401)
    assert x.shape == (401, 50) and x.norm(dim=1) == pytest.approx(
        [1.0] * 401, rel=1e-5
    )
    diagonal = x.sum(1) / 50**0.5
    assert diagonal[:200].min() > 0.98 > 0.9 > diagonal[200:].mean()
    assert torch.equal(x, dprec_mean.vectors(0, 50, 401))
    assert not torch.equal(x, dprec_mean.vectors(1, 50, 401))


def test_every_method_sends_one_bit_and_a_seed():
    keys = [run.key for run in dprec_mean.grid("full") if run.key != "bits"]
    bits = {dprec_mean.method(key).bits(200).content for key in keys}
    assert bits == {8 + 32}  # a bit travels as a byte
    assert dprec_mean.method("rec.unbiased").std == 0.1


@tabled("key", ["sqkr", "rec.zero", "rec.good", "rec.unbiased", "rec.t0.4"])
def test_estimates_meet_their_closed_form(key):
    x = dprec_mean.vectors(0, **dprec_mean.settings("smoke"))
    found = [dprec_mean.estimate(key, x, seed) - x.mean(0) for seed in range(60)]
    errors = (torch.stack(found).double() ** 2).sum(1)
    wanted = dprec_mean.closed_form(key, "smoke")
    assert abs(errors.mean() - wanted) < 5 * errors.std() / 60**0.5


def test_public_randomness_is_one_draw_for_everybody():
    x = dprec_mean.vectors(0, **dprec_mean.settings("smoke"))
    found = [dprec_mean.estimate("sqkr.public", x, seed) for seed in (0, 0, 1)]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    public, own = (dprec_mean.closed_form(k, "smoke") for k in ("sqkr.public", "sqkr"))
    assert public > 50 * own


def test_bits_need_no_clients_and_nothing_begins_without_time():
    grid = {run.key: run for run in dprec_mean.grid("full")}
    assert dprec_mean.run_one(grid["sqkr"], 0, max_seconds=0) is None
    experiment = grids.find("dprec-mean")
    have = grids.recorded_runs(experiment, "full")[("bits", 0)]
    assert have.cells["mean.bits"][0] == 21
