"Settings solved for a budget, the promise beside the mechanism, and what a line records."

import dataclasses

import numpy as np
import pytest
from tables import tabled

from dpcomm.core.random import seed_tree
from dpcomm.core.vectors import groups
from dpcomm.evidence import paper_tables
from dpcomm.experiments import accounts, lines
from dpcomm.experiments.lines import Line, tensor_groups
from dpcomm.mechanisms.gaussian import Gaussian
from dpcomm.privacy import accounting
from dpcomm.privacy.rec_accountant import theorem1_epsilon
from dpcomm.training import models
from dpcomm.training.federated import Config

CONFIG = Config(rounds=1500, cohort=100, lr=0.05, server="sgd", server_lr=1.0)


def paper_setting(name, task="femnist"):
    return paper_tables.hyper("dprec", name, task).value


@pytest.mark.parametrize("eps, n_clients", [(6, 539), (3, 100)])
def test_a_setting_keeps_its_budget_and_the_next_digit_does_not(eps, n_clients):
    cohort = n_clients // 6
    run = dataclasses.replace(CONFIG, cohort=cohort), n_clients
    sigma = accounts.calibrated_sigma(eps, n_clients, cohort, 1500)
    c = accounts.calibrated_c(eps, n_clients, cohort, 1500, 8)

    def fedavg(x):
        return accounts.fedavg(*run, 0.1, x).guarantee(1500)

    def rec(x):
        return accounts.rec(*run, x, 0.03, (5, 6) * 4).guarantee(1500)

    assert fedavg(sigma).eps <= eps < fedavg(sigma - 2e-4).eps
    assert rec(c).eps <= eps < rec(c + 2e-4).eps
    delta = accounts.delta_of(n_clients)
    assert fedavg(sigma).delta == rec(c).delta == delta
    assert delta == pytest.approx(n_clients**-1.1)


@pytest.mark.slow
@tabled("eps", [1, 3, 6])
def test_the_listed_settings_of_mnist_by_writer_are_the_solved_ones(eps):
    n = paper_setting("n_clients", "by_writer")
    sigma = accounts.calibrated_sigma(eps, n, 100, 1500)
    long, short = (accounts.calibrated_c(eps, n, 100, t, 8) for t in (4000, 1500))
    assert paper_setting(f"fedavg.sigma.eps{eps}", "by_writer") == sigma
    assert paper_setting(f"rec.c.eps{eps}", "by_writer") == long
    if eps < 6:
        assert paper_setting(f"ablation.rec.c.eps{eps}", "by_writer") == short


@pytest.mark.slow
def test_each_method_draws_and_is_accounted_as_the_paper_says():
    a = accounts.fedavg(CONFIG, 3500, 0.1, 1.85)
    b = accounts.rec(CONFIG, 3500, 1.41, 0.03, (4,) * 8)
    c = accounts.ddgauss(CONFIG, 3500, 0.1, 3.0, 231_742, 16)
    assert [x.config.sampling for x in (a, b, c)] == ["fixed", "replacement", "fixed"]
    promised = [x.guarantee(1500).sampling for x in (a, b, c)]
    assert promised == ["poisson", "replacement", "poisson"]
    assert a.guarantee(10).premises == {"sampling": accounts.PREMISE}
    sums = c.guarantee(10).premises  # whose noise comes in shares
    assert sums["sampling"] == accounts.PREMISE and sums.keys() == {
        "sampling",
        "shares",
    }
    assert b.guarantee(10).accountant == "theorem1-arxiv"
    held = [{r: g.sampling for r, g in x.as_run(1500).items()} for x in (a, b, c)]
    assert held == [
        {"add-remove": "fixed", "replace": "fixed"},
        {"replace": "replacement"},
        {"zero-out": "none", "replace": "none"},
    ]
    for x in (a, b, c):
        assert all(g.eps > x.guarantee(1500).eps for g in x.as_run(1500).values())
    assert c.guarantee(1500).eps <= 3 and b.mechanism.index_bits == 7


def test_equal_local_guarantees_are_equal():
    delta, orders = accounts.delta_of(539), accounting.INTEGER_ORDERS
    how = dict(accountant="rdp-classic", relation="zero-out", trust="local")

    def there(sigma):
        return accounting.gaussian_guarantee(sigma, delta, orders=orders, **how).eps

    for c in (0.4, 1.4):
        eps = accounts.local_epsilon(c, 56, delta)
        sigma = accounts.equal_local_sigma(c, 56, delta)
        assert eps == theorem1_epsilon(c, 1, 1, 56, delta).eps
        assert there(sigma) <= eps < there(sigma - 2e-4)


def test_a_message_has_a_group_a_tensor_or_eight():
    net = models.build("cnn62", seed_tree(0))
    assert tensor_groups(net) == tuple(groups(net).values())
    linear = tensor_groups(models.build("linear", seed_tree(0)))
    assert linear == (982, 982, *[981] * 6)
    assert accounts.equal_groups(10, 4) == (4, 4, 2)
    assert accounts.equal_groups(3, 4) == (3,)


def test_a_line_takes_what_is_stated_at_the_papers_size_and_solves_elsewhere():
    config = dataclasses.replace(CONFIG, rounds=200, cohort=66)
    fedavg = config, (10,) * 11, "shakespeare", 3, "fedavg"
    papers = accounts.budget_spec(*fedavg, 660)
    sigma = paper_setting("fedavg.sigma.eps3", "shakespeare")
    assert papers.mechanism.sigma == sigma
    other = accounts.budget_spec(*fedavg, 6600, clip=2.0).mechanism
    assert other.sigma == accounts.calibrated_sigma(3, 6600, 66, 200)
    assert other.clip_norm == 2.0
    run = config, (10,) * 11, "shakespeare", 3, "rec", 660
    rec = accounts.budget_spec(*run, std=2.0, accountant="exact-balle")
    c = paper_setting("rec.c.eps3", "shakespeare")
    assert rec.mechanism.clip_norm == 2 * c
    assert rec.guarantee(200).eps < accounts.budget_spec(*run).guarantee(200).eps


def small(spec, **fields):
    "A line of four rounds on the digits."
    made = dict(net="linear", noted={"model": "linear"}, spec=spec)
    made |= dict(clients=lambda seed: accounts.mnist_clients("digits", 20))
    made |= dict(changes=dict(rounds=4, cohort=5, eval_every=2))
    cells = "ours.a.acc", "ours.a.comm", "ours.a.loss", "ours.order"
    return Line("a", "a", "smoke", cells, **made | fields)


def rec(config, sizes):
    return accounts.rec(config, 20, 1.0, 0.01, sizes)


def fedavg(config, sizes):
    return accounts.fedavg(config, 20, 1.0, 2.0)


def test_a_line_goes_on_where_it_stopped(tmp_path):
    line, how = small(rec), dict(resume=True, progress=False)
    whole = lines.run_one(line, 0, checkpoint=tmp_path / "whole.pt", **how)
    for tries in range(3):
        brief = dict(max_seconds=0.0, save_every=0.0) if tries < 2 else {}
        piece = lines.run_one(line, 0, checkpoint=tmp_path / "b.pt", **how, **brief)
        assert (piece is None) == bool(brief), "no time, nothing to record"
    for name in ("final", "history", "cells", "bits", "config", "guarantee"):
        assert whole[name] == piece[name], name
    other = lines.run_one(line, 1, progress=False)
    assert other["final"] != whole["final"]


def test_a_line_says_what_a_record_holds():
    line = small(fedavg)
    _, spec = lines.prepared(line)
    outcome = lines.run_one(line, 0, progress=False)
    final, config = outcome["final"], outcome["config"]
    assert final["eps"] == spec.guarantee(4).eps == outcome["guarantee"].eps
    assert final["round"] == 4 and np.isfinite(final["loss"])
    assert outcome["as_run"] == spec.as_run(4)
    traffic = (final["uplink_bits"] + final["downlink_bits"]) / 2**33
    accuracy = [final["accuracy"], "percent"]
    cells = {"ours.a.acc": accuracy, "ours.a.comm": [traffic, "GiB"]}
    cells |= {"ours.a.loss": [final["loss"], "nats"]}
    assert outcome["cells"] == cells
    assert outcome["bits"].payload == 32 * config["d"] == 32 * 7850
    assert config["model"] == "linear" and config["rounds"] == 4
    data = outcome["data"]
    assert (data["name"], data["n_clients"]) == ("digits", 20)
    bare = small(lambda config, _: accounts.Spec(Gaussian(1.0, 1.0), config))
    assert lines.run_one(bare, 0, progress=False)["guarantee"] is None
