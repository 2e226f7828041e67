"""curves: settings solved for a budget, the promise beside the mechanism, and what a
record holds of a line.
"""

import dataclasses

import numpy as np
import pytest
from tables import tabled

from dpcomm.core.random import seed_tree
from dpcomm.core.vectors import groups
from dpcomm.datasets import images
from dpcomm.evidence import paper_tables
from dpcomm.experiments import configurations
from dpcomm.privacy import accounting
from dpcomm.privacy.rec_accountant import theorem1_epsilon
from dpcomm.training import models
from dpcomm.training.federated import Config

CONFIG = Config(rounds=1500, cohort=100, lr=0.05, server="sgd", server_lr=1.0)


def paper_setting(name, task="femnist"):
    return paper_tables.hyper("dprec", name, task).value


@tabled("eps", [1, 3, 6])
def test_the_papers_femnist_settings_come_out(eps):
    "To within the rounding of what Appendix C.2 prints."
    assert configurations.calibrated_sigma(eps, 3500, 100, 1500) == pytest.approx(
        paper_setting(f"fedavg.sigma.eps{eps}"), rel=0.02
    )
    assert configurations.calibrated_c(eps, 3500, 100, 4000, 8) == pytest.approx(
        paper_setting(f"rec.c.eps{eps}"), abs=0.005
    )


@pytest.mark.parametrize("eps, n_clients", [(6, 539), (3, 100)])
def test_a_setting_keeps_its_budget_and_the_next_digit_does_not(eps, n_clients):
    cohort = n_clients // 6
    run = dict(
        n_clients=n_clients,
        cohort=cohort,
        config=dataclasses.replace(CONFIG, cohort=cohort),
    )
    sigma = configurations.calibrated_sigma(eps, n_clients, cohort, 1500)
    c = configurations.calibrated_c(eps, n_clients, cohort, 1500, 8)

    def fedavg(x):
        return configurations.fedavg("a", run["config"], n_clients, 0.1, x).guarantee(
            1500
        )

    def rec(x):
        return configurations.rec(
            "b", run["config"], n_clients, x, 0.03, (5, 6) * 4
        ).guarantee(1500)

    assert (
        fedavg(sigma).eps <= eps < fedavg(sigma - 2e-4).eps
        and rec(c).eps <= eps < rec(c + 2e-4).eps
    )
    assert (
        fedavg(sigma).delta
        == rec(c).delta
        == pytest.approx(n_clients**-1.1)
        == configurations.delta_of(n_clients)
    )


@pytest.mark.deep
@tabled("eps", [1, 3, 6])
def test_the_listed_settings_of_mnist_by_writer_are_the_solved_ones(eps):
    n = paper_setting("n_clients", "by_writer")
    assert paper_setting(
        f"fedavg.sigma.eps{eps}", "by_writer"
    ) == configurations.calibrated_sigma(eps, n, 100, 1500)
    assert paper_setting(f"rec.c.eps{eps}", "by_writer") == configurations.calibrated_c(
        eps, n, 100, 4000, 8
    )
    if eps < 6:
        assert paper_setting(
            f"ablation.rec.c.eps{eps}", "by_writer"
        ) == configurations.calibrated_c(eps, n, 100, 1500, 8)


@pytest.mark.deep
def test_each_method_draws_and_is_accounted_as_the_paper_says():
    a = configurations.fedavg("a", CONFIG, 3500, 0.1, 1.85)
    b = configurations.rec("b", CONFIG, 3500, 1.41, 0.03, (4,) * 8)
    c = configurations.ddgauss("c", CONFIG, 3500, 0.1, 3.0, 231_742, 16)
    assert [x.config.sampling for x in (a, b, c)] == ["fixed", "replacement", "fixed"]
    assert [x.guarantee(1500).sampling for x in (a, b, c)] == [
        "poisson",
        "replacement",
        "poisson",
    ]
    assert all(
        str(x.guarantee(10)).startswith(
            "As the paper accounts it, by Poisson sampling, while"
        )
        for x in (a, c)
    )
    assert b.guarantee(10).accountant == "theorem1-arxiv"
    assert {name: (g.sampling, g.relation) for name, g in b.as_run(10).items()} == {
        "replace": ("replacement", "replace")
    }
    assert {name: g.sampling for name, g in a.as_run(1500).items()} == {
        "add-remove": "fixed",
        "replace": "fixed",
    }
    assert {name: (g.sampling, g.trust) for name, g in c.as_run(1500).items()} == {
        "zero-out": ("none", "secagg"),
        "replace": ("none", "secagg"),
    }
    assert all(
        x.as_run(1500)[name].eps > x.guarantee(1500).eps
        for x in (a, b, c)
        for name in x.as_run(1500)
    )
    assert (
        b.mechanism.clip_norm == pytest.approx(1.41 * 0.03)
        and b.mechanism.index_bits == 7
        and c.guarantee(1500).eps <= 3
    )


def test_twelve_bits_need_more_noise_than_sixteen_or_are_refused():
    sixteen, twelve = (
        configurations.ddgauss(
            "x", CONFIG, 3500, 0.1, 3.0, 231_742, bits
        ).mechanism.sigma
        for bits in (16, 12)
    )
    assert (
        twelve
        > 2 * sixteen
        > 2 * configurations.calibrated_sigma(3, 3500, 100, 1500) * 0.99
    )
    with pytest.raises(
        ValueError, match="ring_bits is 12; .* use at least 1[3-9] bits"
    ):
        configurations.ddgauss("x", CONFIG, 539, 0.1, 3.0, 225_034, 12)


def test_equal_local_guarantees_are_equal():
    delta = configurations.delta_of(539)
    for c in (0.4, 1.4):
        eps = configurations.local_epsilon(c, 56, delta)
        sigma = configurations.equal_local_sigma(c, 56, delta)

        def there(s):
            return accounting.gaussian_guarantee(
                s,
                delta,
                accountant="rdp-classic",
                orders=accounting.INTEGER_ORDERS,
                relation="zero-out",
                trust="local",
            ).eps

        assert eps == theorem1_epsilon(c, 1, 1, 56, delta).eps and there(
            sigma
        ) <= eps < there(sigma - 2e-4)


def test_a_message_has_a_group_a_tensor_or_eight():
    assert configurations.tensor_groups(models.build("cnn62", seed_tree(0))) == tuple(
        groups(models.build("cnn62", seed_tree(0))).values()
    )
    assert configurations.tensor_groups(models.build("linear", seed_tree(0))) == (
        982,
        982,
        981,
        981,
        981,
        981,
        981,
        981,
    )


def test_table1_takes_the_papers_settings_at_its_size_and_no_other():
    sizes = configurations.tensor_groups(models.build("cnn62", seed_tree(0)))
    listed, refused = configurations.table1(
        (3,), CONFIG, dataclasses.replace(CONFIG, rounds=4000), 3500, sizes
    )
    assert (
        list(listed) == ["eps3.fedavg", "eps3.rec", "eps3.ddg16", "eps3.ddg12"]
        and not refused
    )
    assert listed["eps3.fedavg"].mechanism.sigma == 1.85 and listed[
        "eps3.rec"
    ].mechanism.clip_norm == pytest.approx(1.41 * 0.03)
    assert (
        listed["eps3.rec"].config.rounds == 4000
        and listed["eps3.ddg12"].config.rounds == 1500
    )
    listed, refused = configurations.table1((3,), CONFIG, CONFIG, 539, sizes)
    assert (
        list(refused) == ["eps3.ddg12"]
        and "bits" in refused["eps3.ddg12"]
        and listed["eps3.fedavg"].mechanism.sigma
        == configurations.calibrated_sigma(3, 539, 100, 1500)
    )


@pytest.mark.deep
@pytest.mark.parametrize("eps", [3])
def test_tighter_accountants_need_less_noise_for_the_same_budget(eps):
    n, cohort, rounds, delta = 539, 100, 300, configurations.delta_of(539)
    sigma = configurations.tight_sigma(eps, n, cohort, rounds)

    def at(x):
        run = dict(sampling="poisson", accountant="pld")
        return accounting.gaussian_guarantee(x, delta, cohort / n, rounds, **run).eps

    assert at(sigma) <= eps < at(sigma - 3e-4)
    assert sigma < configurations.calibrated_sigma(eps, n, cohort, rounds)
    c = configurations.tight_c(eps, n, cohort, rounds, 8)
    assert c > configurations.calibrated_c(eps, n, cohort, rounds, 8)


def test_a_premised_curve_draws_a_fixed_size_and_says_what_it_assumes():
    mechanism = configurations.Gaussian(0.1, 2.0, exact=False)
    curve = configurations.accounted_as_poisson("a.b", mechanism, CONFIG, 3500)
    assert (curve.key, curve.mechanism) == ("a.b", mechanism)
    assert curve.config == dataclasses.replace(CONFIG, sampling="fixed")
    told = curve.guarantee(1500)
    assert told.premises == {"sampling": configurations.PREMISE}
    assert told.delta == configurations.delta_of(3500)
    assert told.q == pytest.approx(100 / 3500) and told.rounds == 1500
    assert {*curve.as_run(1500)} == {"add-remove", "replace"}


@tabled("kind", ["fedavg", "rec", "ddg16", "ddg12"])
def test_a_line_of_table1_is_the_same_alone_and_among_all(kind):
    sizes = configurations.tensor_groups(models.build("cnn62", seed_tree(0)))
    long = dataclasses.replace(CONFIG, rounds=4000)
    given = CONFIG, long, 3500, sizes
    alone = configurations.of_table1(f"eps3.{kind}", *given)
    among = configurations.table1((3,), *given)[0][f"eps3.{kind}"]
    assert (alone.key, alone.mechanism, alone.config) == (
        among.key,
        among.mechanism,
        among.config,
    )
    assert alone.guarantee(10) == among.guarantee(10)


def test_the_clients_of_mnist_hold_every_image_once():
    found = configurations.mnist_clients("digits", 20)
    assert (
        found is configurations.mnist_clients("digits", 20) and len(found.parts) == 20
    )
    indices = sorted(int(i) for part in found.parts for i in part)
    assert indices == list(range(len(found.data.y)))


@pytest.mark.parametrize("key", ["eps3.fedavg", "lenet5.eps6.rec"])
def test_a_curve_of_mnist_has_the_papers_settings(key):
    *_, eps, kind = key.split(".")
    curve = configurations.mnist_spec(key, CONFIG, 100, (5, 6))
    assert curve.key == key
    if kind == "fedavg":
        assert curve.mechanism.sigma == paper_setting(f"fedavg.sigma.{eps}", "mnist")
        assert curve.mechanism.clip_norm == paper_setting("fedavg.clip", "mnist")
    else:
        c, std = (
            paper_setting(f"rec.c.{eps}", "mnist"),
            paper_setting("rec.std", "mnist"),
        )
        assert curve.mechanism.clip_norm == pytest.approx(c * std)


def small():
    digits = images.load("digits")
    federation = images.Federation(
        digits, images.iid(len(digits.y), 20, seed_tree(0, "partition")), "iid"
    )
    return (
        federation,
        Config(rounds=4, cohort=5, eval_every=2),
        lambda seed: models.build("linear", seed_tree(seed, "init")),
    )


def trained(curve, place, seed=0, **how):
    "One line as `run_one` returns it."
    clients, _, build = small()
    given = dict(checkpoint=place, resume=True, progress=False) | how
    fills = "ours.a.acc", "ours.a.comm", "ours.order"
    net = build(seed)
    return configurations.train(curve, net, clients, seed, fills, given, model="linear")


def test_a_line_goes_on_where_it_stopped(tmp_path):
    _, config, build = small()
    sizes = tuple(groups(build(0)).values())
    curve = configurations.rec("eps3.rec", config, 20, 1.0, 0.01, sizes)
    whole = trained(curve, tmp_path / "whole.pt")
    for tries in range(99):
        more = dict(max_seconds=0.0, save_every=0.0) if tries < 2 else {}
        piece = trained(curve, tmp_path / "pieces.pt", **more)
        assert (piece is None) == bool(more), "no time, nothing to record"
        if piece:
            break
    for name in ("final", "history", "cells", "bits", "config", "guarantee"):
        assert whole[name] == piece[name], name
    assert trained(curve, tmp_path / "other.pt", 1)["final"] != whole["final"]


def test_a_line_says_what_a_record_holds():
    _, config, build = small()
    curve = configurations.fedavg("a", config, 20, 1.0, 2.0)
    found = trained(curve, None)
    final = found["final"]
    assert final["eps"] == curve.guarantee(4).eps == found["guarantee"].eps
    assert final["round"] == 4 and np.isfinite(final["loss"])
    assert found["as_run"] == curve.as_run(4)
    traffic = (final["uplink_bits"] + final["downlink_bits"]) / 2**33
    assert found["cells"] == {
        "ours.a.acc": [final["accuracy"], "percent"],
        "ours.a.comm": [traffic, "GiB"],
    }
    d = sum(p.numel() for p in build(0).parameters())
    assert found["bits"].payload == 32 * d and found["config"]["d"] == d
    assert found["config"]["model"] == "linear" and found["config"]["rounds"] == 4
    assert (found["data"]["name"], found["data"]["n_clients"]) == ("digits", 20)
    bare = configurations.RunSpec("b", configurations.Gaussian(1.0, 1.0), config)
    found = trained(bare, None)
    assert found["guarantee"] is None and found["final"]["eps"] is None


def test_stated_is_the_papers_file():
    assert (
        configurations.paper_setting("rec.c.eps3", "femnist")
        == paper_setting("rec.c.eps3")
        == 1.41
    )
    with pytest.raises(ValueError, match="rec.d"):
        configurations.paper_setting("rec.d", "femnist")


def test_a_stated_configuration_has_the_tasks_own_server():
    solr, plain = (configurations.paper_config(t) for t in ("solr", "shakespeare"))
    assert (solr.server, solr.momentum, solr.cohort) == ("momentum", 0.9, 60)
    assert (plain.server, plain.server_lr, plain.batch) == ("sgd", 1.0, 10)
    assert configurations.paper_config("solr", cohort=3).cohort == 3


def test_a_line_takes_what_is_stated_at_the_papers_size_and_solves_elsewhere():
    config = configurations.paper_config("shakespeare", rounds=200)
    sizes = (10,) * 11
    own = configurations.budget_spec("shakespeare", "eps3.fedavg", config, 660, sizes)
    assert own.mechanism.sigma == paper_setting("fedavg.sigma.eps3", "shakespeare")
    other = configurations.budget_spec(
        "shakespeare", "eps3.fedavg", config, 6600, sizes, clip=2.0
    )
    assert other.mechanism.sigma == configurations.calibrated_sigma(3, 6600, 66, 200)
    assert other.mechanism.clip_norm == 2.0
    run = "shakespeare", "eps3.rec", config, 660, sizes
    rec = configurations.budget_spec(*run, std=2.0, accountant="exact-balle")
    assert rec.mechanism.clip_norm == 2 * paper_setting("rec.c.eps3", "shakespeare")
    assert rec.guarantee(200).eps < configurations.budget_spec(*run).guarantee(200).eps


def test_equal_groups_sum_to_the_model():
    assert configurations.equal_groups(10, 4) == (4, 4, 2)
    assert configurations.equal_groups(8, 4) == (4, 4)
    assert configurations.equal_groups(3, 4) == (3,)


def test_counts_are_of_clients_and_samples():
    class Clients:
        sizes = np.array([1, 3])

    fills = tuple(f"a.{name}" for name in configurations.COUNTS)
    values = [value for value, _ in configurations.counts(Clients, fills).values()]
    assert values == [2, 4, 2, 1]


def test_the_last_word_of_a_cell_says_its_score():
    fills = "a.acc", "ours.a.comm", "a.loss", "a.recall5"
    found = configurations.scores_of(fills)
    assert found == {"a.acc": "accuracy", "ours.a.comm": "traffic", "a.loss": "loss"}


def test_training_refuses_a_promise_about_another_run():
    clients = configurations.mnist_clients("digits", 12)
    config = Config(rounds=2, cohort=4, lr=0.05, server="sgd")
    curve = configurations.fedavg("a", config, 12, 0.1, 2.0)
    curve = dataclasses.replace(curve, guarantee=lambda t: curve.as_run(t)["replace"])
    curve = dataclasses.replace(
        curve, config=dataclasses.replace(config, sampling="poisson")
    )
    net = models.build("linear", seed_tree(0, "init"))
    with pytest.raises(ValueError, match="its sampling is 'fixed'"):
        configurations.train(curve, net, clients, 0, (), {})
