"""femnist_columns: which runs there are, with which rounds, and what they fill."""

import dataclasses

import pytest
from tables import tabled

from dpcomm.core.random import seed_tree
from dpcomm.datasets import images
from dpcomm.experiments import configurations
from dpcomm.experiments.dprec import femnist_columns
from dpcomm.experiments.run.grids import Run
from dpcomm.training import models


def test_the_protocol_is_the_papers_and_takes_changes():
    paper = femnist_columns.protocol()
    config, paper_setting = paper["config"], femnist_columns.paper_setting
    assert (config.cohort, config.lr, config.batch) == (100, 0.05, 20)
    assert (paper["short"], paper["long"]) == (1500, 4000)
    assert paper_setting("rec.std") == configurations.paper_setting(
        "rec.std", "femnist"
    )
    other = femnist_columns.protocol(cohort=7, eval_every=1)["config"]
    assert other == dataclasses.replace(config, cohort=7, eval_every=1)


def test_columns_leave_out_what_is_refused_and_name_the_papers_cells():
    s = femnist_columns.protocol()
    found = {run.key: run for run in femnist_columns.columns(s, "full")}
    assert len(found) == 11 and "eps1.ddg12" not in found
    assert found["eps3.rec"].fills[0] == "femnist.eps3.rec.acc"
    assert found["eps1.ddg16"].fills[0] == "ours.full.femnist.eps1.ddg16.acc"
    assert found["eps3.rec"].minutes > found["eps3.fedavg"].minutes
    few = femnist_columns.columns(s | dict(budgets=(1,), refused=()), "quick")
    assert [run.key for run in few] == [f"eps1.{k}" for k in femnist_columns.METHODS]


@tabled(
    "net, device, engine",
    [("cnn62", "cpu", "fused"), ("cnn62", "cuda", "auto"), ("linear", "cpu", "auto")],
)
def test_rounds_go_with_the_method_and_the_engine_with_the_network(net, device, engine):
    s = femnist_columns.protocol() | dict(net=net)
    short, long = femnist_columns.configs(s, device)
    assert (short.rounds, long.rounds) == (1500, 4000)
    assert short.engine == long.engine == engine


def test_a_line_has_the_papers_settings_with_the_papers_clients():
    s, sizes = femnist_columns.protocol(), (100,) * 8
    paper = femnist_columns.line(s, "eps3.rec", 3500, sizes)
    other = femnist_columns.line(s, "eps3.rec", 539, sizes)
    assert paper.mechanism.clip_norm == pytest.approx(1.41 * 0.03)
    assert other.mechanism.clip_norm < paper.mechanism.clip_norm
    assert paper.config.rounds == other.config.rounds == 4000
    assert femnist_columns.line(s, "eps3.fedavg", 3500, sizes).config.rounds == 1500


def test_a_trained_line_fills_its_cells_or_stops():
    found = images.load("digits")
    parts = images.iid(len(found.y), 12, seed_tree(0))
    clients = images.Federation(found, parts, "even")
    s = femnist_columns.protocol(cohort=4, eval_every=1)
    s |= dict(net="linear", short=2, long=2, task="digits")
    run = Run("eps3.fedavg", "DP-FedAvg", "smoke", ("femnist.a.acc", "femnist.a.comm"))
    played = femnist_columns.train(run, 0, s, clients, {})
    assert set(played["cells"]) == set(run.fills)
    assert (
        played["config"]["model"] == "linear" and played["config"]["task"] == "digits"
    )
    d = sum(p.numel() for p in models.build("linear", seed_tree(0)).parameters())
    assert played["final"]["uplink_bits"] == 2 * 4 * 32 * d
    assert femnist_columns.train(run, 0, s, clients, dict(max_seconds=0)) is None
