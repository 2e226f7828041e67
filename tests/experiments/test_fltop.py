"FL-TOP's schemes, thresholds and trainings by hand; its costs and epsilons a second time."

import dataclasses

import pytest
import torch
from made_up import made_up
from test_dprec import listed
from torch import nn

from dpcomm.core.vectors import unpack
from dpcomm.evidence import paper_tables
from dpcomm.experiments import lines
from dpcomm.experiments.fltop import fmnist, medical
from dpcomm.experiments.fltop.fmnist import Column, Scheme
from dpcomm.experiments.run import runs
from dpcomm.mechanisms import topk

SMOKE = fmnist.settings("smoke")
PRINTED = {cell.key: cell.value for cell in paper_tables.cells("fltop")}


@pytest.fixture(scope="module")
def public():
    return SMOKE.public(0)


def test_orders_ask_only_of_what_is_trained():
    top, basic = (Scheme(name, False, 1) for name in ("FL-TOP", "FL-BASIC"))
    private, everything = Scheme("FL-TOP", True, 1), Scheme("FL-STD", True, 100)
    pairs = medical.orders([top, basic, private, everything])
    assert pairs == [
        ("fl_basic.r1", top, basic),
        ("fl_std_dp.r1", private, everything),
    ]


def test_a_comparison_is_of_the_best_or_the_last_round_and_divides_percents():
    final = {"accuracy": 80.0, "auroc": 0.7, "best": {"accuracy": 90.0, "auroc": 0.6}}
    best, last = Column("best", "accuracy"), Column("last", "auroc", "other")
    assert best.cell(final) == [0.9, "fraction"] and last.cell(final) == [0.7, "other"]
    other = {"auroc": 0.6, "best": {"accuracy": 70.0}}
    inputs = {"a": made_up("a", final=final), "b": made_up("b", final=other)}
    line = lines.Line("c", "c", "smoke", ("x", "y"), ("a", "b"))
    cells = fmnist.compared(line, 0, inputs, {}, [best, last])["cells"]
    assert cells == {"x": [0.2, "fraction"], "y": [pytest.approx(0.1), "other"]}


def test_the_public_batch_is_the_seeds(public):
    again, other = (dataclasses.replace(SMOKE).public(seed) for seed in (0, 1))
    assert torch.equal(public.x, again.x) and not torch.equal(public.x, other.x)
    assert torch.equal(public.start, again.start)
    assert len(public.x) == fmnist.paper_setting("fmnist", "public.batch")


def test_one_local_round_is_gradient_descent_on_the_whole_batch(public):
    "Against autograd's own steps; a weight outside the mask does not move."
    net = nn.Sequential(*(layer for layer in public.model))
    mask = (torch.arange(len(public.start)) % 3 == 0).float()
    for held in (None, mask):
        weights = public.start.clone()
        for _ in range(SMOKE.changes["epochs"]):
            given = weights.clone().requires_grad_()
            scores = torch.func.functional_call(net, unpack(net, given), (public.x,))
            (gradient,) = torch.autograd.grad(public.loss(scores, public.y), given)
            weights -= SMOKE.changes["lr"] * gradient * (1 if held is None else held)
        update = public.update(held)
        assert torch.allclose(update, weights - public.start, atol=1e-5)
    assert torch.all(update[mask == 0] == 0)


def test_a_threshold_is_the_norm_on_the_support(public):
    top = Scheme("FL-TOP", True, 5)
    alone = torch.zeros(len(public.start))
    alone[topk.top_k(public.scores, 0.05).index] = 1
    assert public.threshold(top) == pytest.approx(float(public.update(alone).norm()))
    everything = float(public.free.norm())
    assert public.threshold(Scheme("FL-STD", True, 100)) == pytest.approx(everything)
    random = [public.threshold(Scheme("FL-BASIC", True, 5), s) for s in (0, 1000)]
    assert max(random) < everything and random[0] != random[1]
    line = listed(fmnist)["sensitivity.r5"]
    cells = lines.run_one(line, 0)["cells"]
    assert tuple(cells) == line.fills
    assert cells["ours.smoke.digits.sensitivity.fl_top_dp.r5"][0] == public.threshold(
        top
    )


def test_training_keeps_the_best_round_and_the_weights_that_move(public):
    line = listed(fmnist)["fl_top.r5"]
    short = line.changes | dict(rounds=3, eval_every=1)
    outcome = lines.run_one(dataclasses.replace(line, changes=short), 0, progress=False)
    history = [at["accuracy"] for at in outcome["history"]]
    assert outcome["final"]["best"]["accuracy"] == max(history)
    cells = outcome["cells"]
    assert cells["ours.smoke.digits.fl_top.r5.last"] == [history[-1] / 100, "fraction"]
    assert outcome["bits"].payload == 32 * topk.size(0.05, len(public.start))
    shape = outcome["final"]["moved"]
    width = (shape["high"] - shape["low"]) / len(shape["density"])
    assert sum(shape["density"]) * width == pytest.approx(1, rel=1e-4)
    assert shape["norm"] > 0 and "moved" not in outcome["history"][-1]


def test_a_change_of_a_line_changes_one_thing(monkeypatch):
    grid = listed(fmnist)

    def made(key):
        line = grid[key]
        return lines.prepared(SMOKE.at(line, 0, **line.compute.keywords))[1].mechanism

    plain, linear, rule = map(
        made, ("fl_cs_dp.r5", "linear.fl_cs_dp.r5", "rule.fl_cs_dp.r5")
    )
    assert linear == dataclasses.replace(plain, iterations=0) != plain
    assert rule == plain, "at smoke both clips are the rule's"
    full = listed(fmnist, "full")
    clips = [
        full[f"{x}fl_cs_dp.r5"].compute.keywords.get("clip") for x in ("", "rule.")
    ]
    assert clips == [PRINTED["fmnist.sensitivity.fl_cs_dp.r5"], None]


def test_hospitals_have_a_death_each_and_the_server_as_many_dead_as_alive():
    (study,) = medical.studies("smoke")
    y = study.federation.data.y.numpy()
    assert len(study.federation.parts) == study.n_clients
    assert all(y[part].sum() >= 1 for part in study.federation.parts)
    batch = study.public(0)
    assert 2 * int(batch.y.sum()) == len(batch.y)


COMPUTED = "fltop-fmnist", "fltop-medical", "fltop-costs", "dprec-costs"
QUICK = ".eps", "readings", "mnist.eps3.rec"  # lines that take a second


@pytest.mark.parametrize("name", COMPUTED)
def test_what_follows_from_records_or_formulas_is_what_is_committed(name):
    "Privacy-loss distributions have become finer since, and roundings are paid for."
    experiment = runs.find(name)
    have, seen = runs.recorded_runs(experiment, "full"), 0
    for line in experiment.grid("full"):
        again = line.needs or name == "fltop-costs" or line.key.endswith(QUICK)
        for seed in line.seeds if again else ():
            if (line.key, seed) in have:
                inputs = {key: have[key, seed] for key in line.needs}
                cells = lines.run_one(line, seed, inputs)["cells"]
                for key, (value, _) in have[line.key, seed].cells.items():
                    near = 2e-2 if key.endswith(".pld") else 1e-5
                    assert cells.pop(key)[0] == pytest.approx(value, rel=near), key
                assert not cells
                seen += 1
    assert seen
