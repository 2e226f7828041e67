"""What FL-TOP's two trainings share: keys, runs, supports, thresholds, columns, against
tiny cases done by hand.
"""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from dpcomm.evidence import records
from dpcomm.experiments.fltop import fmnist as fltop_fmnist
from dpcomm.experiments.fltop import medical as fltop_medical
from dpcomm.experiments.fltop import scheme_grid
from dpcomm.experiments.fltop.scheme_grid import Column, Place
from dpcomm.experiments.run import runs
from dpcomm.mechanisms import topk

SMOKE = fltop_fmnist.settings("smoke")


@pytest.fixture(scope="module")
def public():
    return scheme_grid.public_images(SMOKE, 0)


def test_words_of_schemes_are_their_names_in_keys():
    for scheme in ("FL-TOP", "FL-STD", "FL-BAS-3", "FL-CS"):
        key = f"{scheme_grid.word(scheme)}_dp.r0.5"
        assert scheme_grid.parse(key) == (scheme, True, 0.005)


def test_a_setting_of_the_paper_has_table_5s_numbers():
    s = fltop_fmnist.settings("full")
    assert (s.config.rounds, s.config.epochs, s.config.lr) == (200, 5, 0.215)
    assert (s.sigma, s.draws, s.n_clients) == (1.54, 100, 6000)
    m = fltop_medical.settings("full")
    assert (m.config.rounds, m.config.epochs) == (100, 40) and m.sigma == 1.49
    assert scheme_grid.Setting.of_paper(
        "fmnist",
        dict(cohort=100, batch=10, eval_every=10),
        n_clients=6000,
        data=s.data,
        net=s.net,
        score=s.score,
        keys=s.keys,
    ) == dataclasses.replace(s, config=dataclasses.replace(s.config, batch=10))


def place(table=""):
    def cell(name):
        return None if name.endswith("nowhere") else f"ours.smoke.{name}"

    return Place("smoke", cell, table, ("digits",), 2.0)


def test_every_scheme_is_a_run_and_every_ratio_has_its_thresholds():
    keys = ["fl_top_dp.r1", "fl_top.r1", "fl_cs_dp.r5"]
    found = scheme_grid.scheme_runs(place(), keys, ("last", "round"), (2.0, 0.5))
    assert [run.key for run in found] == [*keys, "sensitivity.r1", "sensitivity.r5"]
    assert found[0].fills == (
        "ours.smoke.fl_top_dp.r1.last",
        "ours.smoke.fl_top_dp.r1.round",
    )
    assert found[3].fills == ("ours.smoke.sensitivity.fl_top_dp.r1",)
    assert [run.minutes for run in found] == [2.0] * 3 + [0.5] * 2


def test_orders_ask_only_of_what_is_trained():
    keys = ["fl_top.r1", "fl_basic.r1", "fl_top_dp.r1", "fl_std_dp.r100", "fl_cs.r1"]
    assert scheme_grid.orders(keys) == {
        "fl_basic.r1": ("fl_top.r1", "fl_basic.r1"),
        "fl_cs.r1": ("fl_top.r1", "fl_cs.r1"),
        "fl_std_dp.r1": ("fl_top_dp.r1", "fl_std_dp.r100"),
    }
    found = scheme_grid.order_runs(place("made"), keys)
    assert [run.key for run in found] == [
        "made.order.fl_basic.r1",
        "made.order.fl_cs.r1",
        "made.order.fl_std_dp.r1",
    ]
    assert found[0].needs == ("made.fl_top.r1", "made.fl_basic.r1")


def test_a_column_reads_the_best_or_the_last_round_and_divides_percents():
    final = {"accuracy": 80.0, "auroc": 0.7, "best": {"accuracy": 90.0, "auroc": 0.6}}
    best, last = Column("best", "accuracy"), Column("last", "auroc", "other")
    assert best.cell(best.value(final)) == [0.9, "fraction"]
    assert last.cell(last.value(final)) == [0.7, "other"]


def test_a_comparison_is_the_first_minus_the_second():
    run = place().run("order.x", "x", ["a", "b"], needs=("one", "two"))

    def record(best, last):
        final = {"accuracy": last, "best": {"accuracy": best}}
        return dataclasses.replace(records.load("fltop")[0], final=final)

    inputs = {"one": record(70.0, 60.0), "two": record(50.0, 65.0)}
    columns = [Column("best", "accuracy"), Column("last", "accuracy")]
    found = scheme_grid.compare(run, inputs, columns)
    assert found["cells"] == {
        "ours.smoke.a": [0.2, "fraction"],
        "ours.smoke.b": [-0.05, "fraction"],
    }
    assert found["data"] == inputs["one"].data


def test_the_public_batch_is_the_seeds(public):
    again, other = (scheme_grid.public_images(SMOKE, seed) for seed in (0, 1))
    assert torch.equal(public.x, again.x) and not torch.equal(public.x, other.x)
    assert torch.equal(public.start, again.start)
    assert len(public.x) == scheme_grid.paper_setting("fmnist", "public.batch")


def test_one_local_round_is_gradient_descent_on_the_whole_batch(public):
    "Against autograd's own steps; a weight outside the mask does not move."
    config = public.setting.config
    net = nn.Sequential(*(layer for layer in public.model))
    mask = (torch.arange(len(public.start)) % 3 == 0).float()
    for held in (None, mask):
        weights = public.start.clone()
        for _ in range(config.epochs):
            given = weights.clone().requires_grad_()
            named, at = {}, 0
            for name, p in net.named_parameters():
                named[name] = given[at : at + p.numel()].view_as(p)
                at += p.numel()
            scores = torch.func.functional_call(net, named, (public.x,))
            (gradient,) = torch.autograd.grad(public.loss(scores, public.y), given)
            weights -= config.lr * gradient * (1 if held is None else held)
        found = scheme_grid.one_local_round(public, held)
        assert torch.allclose(found, weights - public.start, atol=1e-5)
    assert torch.all(found[mask == 0] == 0)


def test_the_threshold_of_fl_top_is_the_norm_on_its_support(public):
    index = topk.top_k(public.scores, 0.05).index
    alone = torch.zeros(len(public.start))
    alone[index] = 1
    norm = scheme_grid.one_local_round(public, alone).norm()
    assert scheme_grid.threshold("fl_top_dp.r5", public) == pytest.approx(float(norm))
    everything = float(public.free.norm())
    assert scheme_grid.threshold("fl_std_dp.r100", public) == pytest.approx(everything)
    random = [scheme_grid.threshold("fl_basic_dp.r5", public, s) for s in (0, 1000)]
    assert max(random) < everything and random[0] != random[1]


def test_thresholds_of_a_ratio_fill_their_cells(public):
    run = next(r for r in fltop_fmnist.grid("smoke") if r.key.startswith("sensitivity"))
    clients = fltop_fmnist.federation("smoke")
    found = scheme_grid.thresholds(run, public, clients, 0, unit="made norm", d=3)
    assert list(found["cells"]) == list(run.fills)
    assert found["config"] == {"draws": SMOKE.draws, "d": 3}
    for cell, (value, unit) in found["cells"].items():
        key = cell.partition("sensitivity.")[2]
        assert value == scheme_grid.threshold(key, public, 0) and unit == "made norm"


def test_the_mechanism_sends_what_the_ratio_says(public):
    d = len(public.start)
    for key, size in (("fl_top.r5", topk.size(0.05, d)), ("fl_std.r100", d)):
        assert scheme_grid.mechanism(key, public).bits(d).payload == 32 * size


def test_training_keeps_the_best_round_and_the_weights(public):
    clients = fltop_fmnist.federation("smoke")
    short = dataclasses.replace(
        SMOKE, config=dataclasses.replace(SMOKE.config, rounds=3, eval_every=1)
    )
    tried = scheme_grid.public_images(short, 0)
    line = scheme_grid.run_spec("fl_top.r5", tried)
    cells = {"best": Column("best", "accuracy"), "last": Column("last", "accuracy")}
    played, w = scheme_grid.train(line, tried, clients, 0, cells)
    history = [at["accuracy"] for at in played["history"]]
    assert played["final"]["best"]["accuracy"] == max(history)
    assert played["cells"]["last"] == [history[-1] / 100, "fraction"]
    outside = torch.ones(len(w), dtype=torch.bool)
    outside[topk.top_k(tried.scores, 0.05).index] = False
    assert torch.equal(w[outside], tried.start[outside])
    found = scheme_grid.moved(tried, 0.05, w)
    change = (w.detach() - tried.start)[~outside].numpy()
    assert found["norm"] == pytest.approx(float(np.linalg.norm(change)))
    width = (found["high"] - found["low"]) / len(found["density"])
    assert sum(found["density"]) * width == pytest.approx(1, rel=1e-4)


def test_a_table_of_best_rounds_is_a_mean_over_seeds(public):
    base = next(
        r for r in records.load("fltop", "fltop_fmnist", "full") if r.final.get("best")
    )
    first, second = (
        dataclasses.replace(
            base,
            seed=seed,
            final=base.final
            | {
                "accuracy": 50.0 + seed,
                "best": base.final["best"] | {"accuracy": 60.0 + seed},
            },
        )
        for seed in (0, 2)
    )
    (row,) = scheme_grid.best_table([first, second], ("accuracy",), 0.5).rows
    assert row[:3] == (base.key, "2", "0.610") and row[-2] == "0.510"


def test_hospitals_have_a_death_each_and_the_server_has_patients():
    setting = fltop_medical.settings("smoke")
    split = scheme_grid.hospitals(setting, "made")
    clients, y = split.federation, split.federation.data.y.numpy()
    assert len(clients.parts) == setting.n_clients
    assert all(y[part].sum() >= 1 for part in clients.parts)
    found = scheme_grid.public_patients(setting, split, 0)
    assert 2 * int(found.y.sum()) == len(found.y)
    assert fltop_medical.public("smoke", "made", 0).start.equal(found.start)


def test_the_loss_of_log_odds_is_the_cross_entropy():
    scores, y = torch.tensor([[0.3], [-1.2]]), torch.tensor([1, 0])
    p = 1 / (1 + np.exp(-scores[:, 0].numpy()))
    by_hand = -(np.log(p[0]) + np.log(1 - p[1])) / 2
    assert float(scheme_grid.odds_loss(scores, y)) == pytest.approx(by_hand, rel=1e-6)


def test_figure_1_compares_fl_top_with_fl_std_where_both_are_trained():
    assert fltop_fmnist.pair("full") == ["fl_top.r0.5", "fl_std.r100"]
    assert fltop_fmnist.pair("quick") == []
    run = next(r for r in fltop_fmnist.grid("full") if r.key == "figure1")
    assert run.fills == ("fmnist.figure1.norm",)
    base = records.load("fltop")[0]
    ends = {"fl_top.r0.5": 3.0, "fl_std.r100": 1.0}
    inputs = {
        key: dataclasses.replace(base, final={"moved": {"norm": norm}})
        for key, norm in ends.items()
    }
    found = fltop_fmnist.run_one(run, 0, inputs=inputs)
    assert found["cells"] == {"fmnist.figure1.norm": [2.0, "norm"]}


@pytest.mark.parametrize("name", ["fltop-fmnist", "fltop-medical"])
def test_comparisons_of_committed_records_are_what_is_committed(name):
    experiment = runs.find(name)
    have, seen = runs.recorded_runs(experiment, "full"), 0
    for run in experiment.grid("full"):
        for seed in run.seeds if run.needs else ():
            if (run.key, seed) in have:
                inputs = {key: have[key, seed] for key in run.needs}
                played = experiment.module.run_one(run, seed, inputs=inputs)
                assert played["cells"] == have[run.key, seed].cells
                seen += 1
    assert seen or name == "fltop-fmnist"


def test_a_change_stands_before_the_key_and_changes_one_thing():
    assert scheme_grid.parted("fl_cs_dp.r5") == ("", "fl_cs_dp.r5")
    assert scheme_grid.parted("linear.fl_cs_dp.r5") == ("linear", "fl_cs_dp.r5")
    public = fltop_fmnist.public("smoke", 0)
    plain, linear = (
        scheme_grid.run_spec(key, public, 0, 0.57).mechanism
        for key in ("fl_cs_dp.r5", "linear.fl_cs_dp.r5")
    )
    assert linear == dataclasses.replace(plain, iterations=0) != plain
    rule = scheme_grid.run_spec("rule.fl_cs_dp.r5", public, 0).mechanism
    S = scheme_grid.threshold("fl_cs_dp.r5", public, 0)
    assert rule == dataclasses.replace(plain, clip_norm=S) != plain
    sizes = map(
        scheme_grid.printed,
        ("fmnist.sensitivity.fl_cs_dp.r5", "fmnist.sensitivity.rule.fl_cs_dp.r5"),
    )
    assert tuple(map(bool, sizes)) == (True, False), "the rule's run has a printed one"
    with pytest.raises(ValueError, match="change is 'solver'.*linear, rule"):
        scheme_grid.parted("solver.fl_cs_dp.r5")
