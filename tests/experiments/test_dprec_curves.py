"""curves: settings solved for a budget, the promise beside the mechanism, training with
a clock, entries of a result.
"""

import dataclasses

import numpy as np
import pytest
import torch

from dpcomm.core.chance import seed_tree
from dpcomm.core.vectors import groups
from dpcomm.experiments import dprec_curves
from dpcomm.privacy import accounting
from dpcomm.privacy.null_messages import theorem1_epsilon
from dpcomm.report import papers, results
from dpcomm.tasks import images
from dpcomm.training import models
from dpcomm.training.federated import Config

CONFIG = Config(rounds=1500, cohort=100, lr=0.05, server="sgd", server_lr=1.0)


def stated(name, task="femnist"):
    return papers.hyper("dprec", name, task).value


@pytest.mark.parametrize("eps", [1, 3, 6])
def test_the_papers_femnist_settings_come_out(eps):
    "To within the rounding of what Appendix C.2 prints."
    assert dprec_curves.calibrated_sigma(eps, 3500, 100, 1500) == pytest.approx(
        stated(f"fedavg.sigma.eps{eps}"), rel=0.02
    )
    assert dprec_curves.calibrated_c(eps, 3500, 100, 4000, 8) == pytest.approx(
        stated(f"rec.c.eps{eps}"), abs=0.005
    )


@pytest.mark.parametrize("eps, n_clients", [(1, 539), (6, 539), (3, 100)])
def test_a_setting_keeps_its_budget_and_the_next_digit_does_not(eps, n_clients):
    cohort = n_clients // 6
    run = dict(
        n_clients=n_clients,
        cohort=cohort,
        config=dataclasses.replace(CONFIG, cohort=cohort),
    )
    sigma = dprec_curves.calibrated_sigma(eps, n_clients, cohort, 1500)
    c = dprec_curves.calibrated_c(eps, n_clients, cohort, 1500, 8)

    def fedavg(x):
        return dprec_curves.fedavg("a", run["config"], n_clients, 0.1, x).guarantee(
            1500
        )

    def rec(x):
        return dprec_curves.rec(
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
        == dprec_curves.delta_of(n_clients)
    )


@pytest.mark.parametrize("eps", [1, 3, 6])
def test_the_listed_settings_of_mnist_by_writer_are_the_solved_ones(eps):
    n = stated("n_clients", "by_writer")
    assert stated(
        f"fedavg.sigma.eps{eps}", "by_writer"
    ) == dprec_curves.calibrated_sigma(eps, n, 100, 1500)
    assert stated(f"rec.c.eps{eps}", "by_writer") == dprec_curves.calibrated_c(
        eps, n, 100, 4000, 8
    )
    if eps < 6:
        assert stated(
            f"ablation.rec.c.eps{eps}", "by_writer"
        ) == dprec_curves.calibrated_c(eps, n, 100, 1500, 8)


def test_each_method_draws_and_is_accounted_as_the_paper_says():
    a = dprec_curves.fedavg("a", CONFIG, 3500, 0.1, 1.85)
    b = dprec_curves.rec("b", CONFIG, 3500, 1.41, 0.03, (4,) * 8)
    c = dprec_curves.ddgauss("c", CONFIG, 3500, 0.1, 3.0, 231_742, 16)
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
    assert b.guarantee(10).accountant == "theorem1-arxiv" and b.as_run is None
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
        for x in (a, c)
        for name in x.as_run(1500)
    )
    assert (
        b.mechanism.clip_norm == pytest.approx(1.41 * 0.03)
        and b.mechanism.index_bits == 7
        and c.guarantee(1500).eps <= 3
    )


def test_twelve_bits_need_more_noise_than_sixteen_or_are_refused():
    sixteen, twelve = (
        dprec_curves.ddgauss("x", CONFIG, 3500, 0.1, 3.0, 231_742, bits).mechanism.sigma
        for bits in (16, 12)
    )
    assert (
        twelve
        > 2 * sixteen
        > 2 * dprec_curves.calibrated_sigma(3, 3500, 100, 1500) * 0.99
    )
    with pytest.raises(
        ValueError, match="ring_bits is 12; .* use at least 1[3-9] bits"
    ):
        dprec_curves.ddgauss("x", CONFIG, 539, 0.1, 3.0, 225_034, 12)


def test_equal_local_guarantees_are_equal():
    delta = dprec_curves.delta_of(539)
    for c in (0.4, 1.4):
        eps = dprec_curves.local_epsilon(c, 56, delta)
        sigma = dprec_curves.equal_local_sigma(c, 56, delta)

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
    assert dprec_curves.tensor_groups(models.build("cnn62", seed_tree(0))) == tuple(
        groups(models.build("cnn62", seed_tree(0))).values()
    )
    assert dprec_curves.tensor_groups(models.build("linear", seed_tree(0))) == (
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
    sizes = dprec_curves.tensor_groups(models.build("cnn62", seed_tree(0)))
    listed, refused = dprec_curves.table1(
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
    listed, refused = dprec_curves.table1((3,), CONFIG, CONFIG, 539, sizes)
    assert (
        list(refused) == ["eps3.ddg12"]
        and "bits" in refused["eps3.ddg12"]
        and listed["eps3.fedavg"].mechanism.sigma
        == dprec_curves.calibrated_sigma(3, 539, 100, 1500)
    )


def test_gaps_and_cells_are_read_off_the_runs():
    @dataclasses.dataclass
    class Done:
        history: list
        ledger: object

    class Bits:
        uplink_bits, downlink_bits = 2**32, 2**32

    def run(accuracy):
        return Done([{"accuracy": 1.0}, {"accuracy": accuracy}], Bits)

    done = {"a": {0: run(80.0), 1: run(82.0)}, "b": {1: run(79.5)}, "c": {}}
    assert (
        dprec_curves.gaps(done, ("a", "b")) == [2.5]
        and dprec_curves.gaps(done, ("a", "c"))
        == dprec_curves.gaps(done, ("d", "a"))
        == []
    )
    cells = dprec_curves.own_cells("ours.x", done)
    assert (
        cells["ours.x.a.acc"] == {"values": [80.0, 82.0], "unit": "percent"}
        and cells["ours.x.b.comm"] == {"values": [1.0], "unit": "GiB"}
        and len(cells) == 4
    )


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


def test_a_trainer_goes_on_where_it_stopped_and_reads_what_is_done(tmp_path):
    federation, config, build = small()
    curve = dprec_curves.rec(
        "eps3.rec", config, 20, 1.0, 0.01, groups(build(0)).values()
    )
    whole = dprec_curves.Trainer(build, federation, tmp_path / "whole", progress=False)(
        curve, 0
    )
    for _ in range(99):
        piece = dprec_curves.Trainer(
            build,
            federation,
            tmp_path / "pieces",
            resume=True,
            max_seconds=1e-9,
            save_every=0.0,
            progress=False,
        )
        piece.end += 0.01
        if run := piece(curve, 0):
            break
    assert torch.equal(run.w, whole.w) and run.history == whole.history
    late = dprec_curves.Trainer(
        build,
        federation,
        tmp_path / "whole",
        resume=True,
        max_seconds=0.0,
        progress=False,
    )
    assert torch.equal(late(curve, 0).w, whole.w) and late(curve, 1) is None


def test_an_entry_and_a_document_pass_the_schema(tmp_path):
    federation, config, build = small()
    listed = [
        dprec_curves.fedavg("ours.a", config, 20, 1.0, 2.0),
        dprec_curves.Curve("ours.b", dprec_curves.Gaussian(1.0, 1.0), config),
    ]
    runs = {
        c.key: dprec_curves.Trainer(build, federation, tmp_path, progress=False)(c, 0)
        for c in listed
    }
    entries = [
        dprec_curves.entry(c, 7850, {0: runs[c.key]}, model="linear") for c in listed
    ]
    made = dprec_curves.document(
        "example",
        "smoke",
        [0, 1],
        entries,
        {"ours.x": {"values": [1.0], "unit": "percent"}},
        {"n": 1},
        {"name": "digits"},
        "cpu",
        None,
    )
    assert results.check_result(made)["params"]["seeds"] == [0, 1] and made[
        "wall_seconds"
    ] == sum(r.seconds for r in runs.values())
    final = entries[0]["seeds"][0]["final"]
    assert (
        final["eps"] == listed[0].guarantee(4).eps == entries[0]["guarantee"]["eps"]
        and final["round"] == 4
        and entries[1]["guarantee"] is None
    )
    assert (
        entries[1]["seeds"][0]["final"]["eps"] is None
        and entries[0]["bits"]["payload"] == 32 * 7850
        and np.isfinite(final["loss"])
    )


def test_what_stands_is_read_from_the_results(tmp_path):
    def seed(i, accuracy):
        return {
            "seed": i,
            "final": {
                "accuracy": accuracy,
                "uplink_bits": 2**32,
                "downlink_bits": 2**33,
            },
            "history": [],
            "wall_seconds": 1.0,
        }

    entries = [
        {
            "key": "a",
            "config": {},
            "guarantee": None,
            "bits": None,
            "seeds": [seed(0, 80.0), seed(1, 82.0)],
        },
        {
            "key": "b",
            "config": {},
            "guarantee": None,
            "bits": None,
            "seeds": [seed(0, 70.0)],
        },
    ]
    made = dprec_curves.document(
        "example", "quick", [0, 1, 2], entries, {}, {}, {}, "cpu", None
    )
    results.write_result(tmp_path / "dprec" / "example.quick.json", made)
    assert dprec_curves.committed("example", root=tmp_path).rows == (
        ("quick", "a", "81.00 +/- 1.00", "1.5", "n = 2 of 3 planned"),
        ("quick", "b", "70.00", "1.5", "n = 1 of 3 planned"),
    )
    assert dprec_curves.committed("other", root=tmp_path).rows == ()


def test_what_a_fixed_cohort_costs_is_told_in_words():
    mnist = dprec_curves.fedavg("eps3.fedavg", Config(), 100, 0.5, 3.8)
    assert (
        dprec_curves.describe_as_run({}) == ""
        and "eps = 5.448 when one client joins or leaves, eps = 6.526 when one client is swapped"
        in mnist.describe()
    )
    assert (
        mnist.describe().startswith("As the paper accounts it")
        and dprec_curves.Curve("a", None, None).describe() == "no privacy claimed"
    )
    with pytest.raises(
        ValueError, match="sampling is 'poisson'; this accounts 'fixed' cohorts"
    ):
        dprec_curves.as_run(
            mnist.mechanism, Config(sampling="poisson"), 100, 1000, 1e-2
        )


def test_a_trainer_refuses_a_curve_whose_promise_is_about_another_run(tmp_path):
    federation, config, build = small()
    curve = dataclasses.replace(
        dprec_curves.fedavg("a", config, 20, 0.1, 2.0),
        config=dataclasses.replace(config, sampling="poisson"),
    )
    curve = dataclasses.replace(
        curve,
        guarantee=lambda rounds: dprec_curves.as_run(
            curve.mechanism, Config(cohort=config.cohort), 20, rounds, 1e-2
        )["replace"],
    )
    with pytest.raises(
        ValueError, match="its sampling is 'fixed', the run's is 'poisson'"
    ):
        dprec_curves.Trainer(build, federation, tmp_path, progress=False)(curve, 0)


def test_a_fixed_size_costs_four_and_a_half_times_by_either_accountant():
    rows = dprec_curves.like_with_like(1.54, 100 / 6000, 200, 1e-5).rows
    assert [(row[1], row[2]) for row in rows] == [("1.00", "4.49"), ("0.68", "3.10")]
