"""dprec_indices: three ways to cut and clip, and the cells of a run."""

import math

import numpy as np
import pytest

from dpcomm.experiments.configurations import paper_setting
from dpcomm.experiments.dprec import index_codes
from dpcomm.experiments.dprec import indices as dprec_indices

RUNS = {run.key: run for run in dprec_indices.grid("smoke")}


def test_only_the_private_case_clips_and_promises():
    lines = {key: dprec_indices.run_spec(run) for key, run in RUNS.items()}
    c, std = paper_setting("rec.c.eps3", "femnist"), paper_setting("rec.std", "femnist")
    assert lines["private"].mechanism.clip_norm == pytest.approx(c * std)
    assert lines["private"].guarantee(6).accountant == "exact-balle"
    for key in ("only", "only64"):
        assert lines[key].guarantee is None and lines[key].mechanism.clip_norm == 1e6
    *equal, last = lines["only64"].mechanism.groups
    assert set(equal) == {64} and 0 < last <= 64
    assert len({sum(line.mechanism.groups) for line in lines.values()}) == 1


def test_the_smoke_federation_needs_no_download_and_covers_the_images():
    clients = dprec_indices.federation("smoke")
    dealt = np.concatenate(clients.parts)
    assert len(clients.parts) == 24 and len(np.unique(dealt)) == len(dealt)


def test_numbers_are_means_over_the_rounds_and_one_for_every_cell():
    m = dprec_indices.run_spec(RUNS["only"]).mechanism
    history = [
        dict(zip(index_codes.CODES, row)) for row in ((1, 2, 3, 4), (3, 4, 5, 6.0))
    ]
    found = dprec_indices.numbers(RUNS["only"], 0, m, history, None)
    assert [value for value, _ in found] == [2, 3, 4, 5, 2 * len(m.groups)]
    assert len(found) == len(RUNS["only"].fills)


def test_a_run_fills_its_cells_from_its_history():
    played = dprec_indices.run_one(RUNS["only64"], 0)
    assert (
        tuple(played["cells"]) == RUNS["only64"].fills and played["guarantee"] is None
    )
    told = np.mean([h["told"] for h in played["history"]])
    assert math.isclose(played["cells"]["ours.smoke.indices.only64.told"][0], told)
    assert len(played["history"]) == played["config"]["rounds"] - 1
    visits = played["config"]["rounds"] * played["config"]["cohort"]
    assert played["final"]["uplink_bits"] == visits * played["bits"].content
    assert dprec_indices.run_one(RUNS["only64"], 0, max_seconds=0) is None
