"""The shared half of DP-REC's experiments: what is stated, the lines made from it, and
training one.
"""

import dataclasses

import numpy as np
import pytest

from dpcomm.core.random import seed_tree
from dpcomm.evidence import paper_tables
from dpcomm.experiments import configurations
from dpcomm.mechanisms.gaussian import Gaussian
from dpcomm.privacy.rec_accountant import theorem1_epsilon
from dpcomm.training import models
from dpcomm.training.federated import Config

CONFIG = Config(rounds=1500, cohort=100, lr=0.05, server="sgd", server_lr=1.0)


def stated(name, task="femnist"):
    return paper_tables.hyper("dprec", name, task).value


def test_stated_is_the_papers_file():
    assert (
        configurations.stated("rec.c.eps3", "femnist") == stated("rec.c.eps3") == 1.41
    )
    with pytest.raises(ValueError, match="rec.d"):
        configurations.stated("rec.d", "femnist")


def test_a_stated_configuration_has_the_tasks_own_server():
    solr, plain = (configurations.stated_config(t) for t in ("solr", "shakespeare"))
    assert (solr.server, solr.momentum, solr.cohort) == ("momentum", 0.9, 60)
    assert (plain.server, plain.server_lr, plain.batch) == ("sgd", 1.0, 10)
    assert configurations.stated_config("solr", cohort=3).cohort == 3


def test_a_line_takes_what_is_stated_at_the_papers_size_and_solves_elsewhere():
    config = configurations.stated_config("shakespeare", rounds=200)
    sizes = (10,) * 11
    own = configurations.line("shakespeare", "eps3.fedavg", config, 660, sizes)
    assert own.mechanism.sigma == stated("fedavg.sigma.eps3", "shakespeare")
    other = configurations.line(
        "shakespeare", "eps3.fedavg", config, 6600, sizes, clip=2.0
    )
    assert other.mechanism.sigma == configurations.calibrated_sigma(3, 6600, 66, 200)
    assert other.mechanism.clip_norm == 2.0
    run = "shakespeare", "eps3.rec", config, 660, sizes
    rec = configurations.line(*run, std=2.0, accountant="exact-balle")
    assert rec.mechanism.clip_norm == 2 * stated("rec.c.eps3", "shakespeare")
    assert rec.guarantee(200).eps < configurations.line(*run).guarantee(200).eps


def test_a_line_of_table1_is_dense_short_or_rec_long():
    long = dataclasses.replace(CONFIG, rounds=4000)
    curve = configurations.of_table1("eps6.rec", CONFIG, long, 3500, (5,) * 8)
    assert curve.config.rounds == 4000 and curve.config.sampling == "replacement"
    curve = configurations.of_table1("eps6.fedavg", CONFIG, long, 3500, (5,) * 8)
    assert curve.config.rounds == 1500 and curve.config.sampling == "fixed"


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


def test_what_is_premised_is_said_and_what_is_run_stands_beside_it():
    mechanism = Gaussian(0.1, 2.0, exact=False)
    curve = configurations.premised("a", mechanism, CONFIG, 3500)
    promise, held = curve.guarantee(10), curve.as_run(10)
    assert (
        promise.premises == {"sampling": configurations.PREMISE}
        and promise.sampling == "poisson"
    )
    assert curve.config.sampling == "fixed"
    assert min(g.eps for g in held.values()) > promise.eps


def test_tight_accountants_need_less_noise_and_keep_the_budget():
    run = 3, 100, 10, 1000
    loose, tight = (
        f(*run) for f in (configurations.calibrated_sigma, configurations.tight_sigma)
    )
    assert tight < loose
    printed, exact = (
        configurations.calibrated_c(*run, 8),
        configurations.tight_c(*run, 8),
    )
    assert exact > printed
    assert theorem1_epsilon(printed, 10_000, 100, 56, 100**-1.1).eps <= 3
    assert theorem1_epsilon(exact, 10_000, 100, 56, 100**-1.1).eps > 3


def test_mnists_clients_and_lines_are_one_for_all_experiments():
    clients = configurations.mnist_clients("digits", 12)
    dealt = np.concatenate(clients.parts)
    assert len(clients.parts) == 12 and len(np.unique(dealt)) == len(dealt)
    assert configurations.mnist_clients("digits", 12) is clients
    rec = configurations.mnist_curve("lenet5.eps3.rec", Config(), 100, (5,) * 8)
    assert rec.mechanism.clip_norm == stated("rec.c.eps3", "mnist") * rec.mechanism.std
    fedavg = configurations.mnist_curve("cnn.eps6.fedavg", Config(), 100, (5,) * 8)
    assert fedavg.mechanism.sigma == stated("fedavg.sigma.eps6", "mnist")


def test_a_line_is_trained_resumed_and_scored(tmp_path):
    clients = configurations.mnist_clients("digits", 12)
    config = Config(
        rounds=3, cohort=4, lr=0.05, server="sgd", server_lr=1.0, eval_every=1
    )
    net = models.build("linear", seed_tree(0, "init"))
    sizes = configurations.tensor_groups(net)
    curve = configurations.rec("a", config, 12, 1.0, 0.01, sizes)

    def play(**how):
        fills = "x.acc", "x.comm"
        return configurations.train(curve, net, clients, 0, fills, how, model="linear")

    whole = play()
    assert whole["config"]["model"] == "linear"
    assert whole["cells"]["x.acc"] == [whole["final"]["accuracy"], "percent"]
    bits = whole["final"]["uplink_bits"] + whole["final"]["downlink_bits"]
    assert whole["cells"]["x.comm"] == [bits / 2**33, "GiB"]
    assert whole["guarantee"] == curve.guarantee(3) and whole["as_run"] == curve.as_run(
        3
    )
    path = tmp_path / "a.pt"
    assert play(checkpoint=path, max_seconds=0) is None
    again = play(checkpoint=path, resume=True)
    assert again["final"] == whole["final"] and again["history"] == whole["history"]


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
