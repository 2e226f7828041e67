"I-MVU's sweeps: mechanisms on one scale of noise, frontiers, clients held out, more bits."

import dataclasses
import math
from functools import partial

import pytest
from made_up import made_up

from dpcomm.evidence import paper_tables
from dpcomm.experiments import lines
from dpcomm.experiments.imvu import femnist, mnist

SMALL, FULL = mnist.settings("smoke"), mnist.settings("full")


def kept(key, history, **fields):
    "A record of a point, of (epoch, accuracy)."
    columns = dict(zip(("epoch", "accuracy"), map(list, zip(*history))))
    return made_up(key, paper="imvu", history=columns, data={"name": "digits"})


def test_a_price_is_the_guarantee_of_the_epochs_done():
    for curve, how in mnist.ACCOUNTANT.items():
        kind = curve.partition(".")[0]
        if kind == "mvu":
            continue
        once, twice = (mnist.price(SMALL, curve, 0.2, n) for n in (1, 2))
        mech = mnist.build(SMALL, kind, 0.2)
        promise = mnist.account(SMALL, mech, 2, how)
        assert 0 < once < twice == promise.eps and promise.rounds == 2
        assert (promise.relation, promise.accountant) == ("zero-out", how)
    sign = mnist.price(SMALL, "signsgd", 0.2, 2)
    exact = mnist.price(SMALL, "signsgd.exact", 0.2, 2)
    assert exact <= sign, "an exact law costs less"


def test_a_frontier_is_the_best_that_a_budget_buys(monkeypatch):
    eps = {1: 1.0, 2: 2.0, 4: 4.0}
    price = lambda s, curve, sigma, n: sigma * eps[n]  # noqa: E731
    monkeypatch.setattr(mnist, "price", price)
    budgets = 2.0, 0.5
    s = dataclasses.replace(SMALL, sigmas=(1.0, 10.0), steps=(0.04,), budgets=budgets)
    inputs = {}
    for kind, gain in (("imvu", 5.0), ("signsgd", 0.0)):
        for sigma, base in ((1.0, 50.0), (10.0, 90.0)):
            key = mnist.key_of((kind, sigma, 0.04))
            inputs[key] = kept(key, [(n, base + gain + n) for n in eps])
    at = partial(mnist.accuracy_at, s, inputs)
    assert (at("signsgd", 2.0), at("imvu", 4.0)) == (52.0, 59.0)
    middle = at("signsgd", math.sqrt(8))
    assert middle == pytest.approx(53.0), "between two prices, by their logarithm"
    assert math.isnan(at("signsgd", 0.5))
    runs = {r.key: r for r in mnist.listed(s, dict.fromkeys(mnist.KINDS))}
    mark = "ours.smoke.mnist."
    found = lines.run_one(runs["frontier.signsgd.eps2"], 0, inputs)
    assert found["cells"] == {
        f"{mark}signsgd.eps2.acc": [52.0, "percent"],
        f"{mark}imvu_minus_signsgd.eps2": [5.0, "percentage points"],
    }
    assert found["data"] == {"name": "digits"}
    dear = lines.run_one(runs["frontier.signsgd.eps0.5"], 0, inputs)
    assert dear["cells"] == {}, "below all prices"


def test_a_grid_fills_the_papers_cells_and_reads_both_mechanisms():
    printed = {c.key for c in paper_tables.cells("imvu", "fig2")}
    cells = {cell for line in mnist.grid("full") for cell in line.fills}
    theirs = {cell for cell in cells if not cell.startswith("ours.")}
    assert theirs == {key for key in printed if key.startswith("mnist.")}
    for line in mnist.grid("full"):
        kind = line.key.split(".")[1]
        assert {key.split(".")[0] for key in line.needs} in (set(), {kind, "imvu"})


def test_a_point_is_trained_and_a_seed_repeats_it():
    line = next(r for r in mnist.grid("smoke") if r.key == "gaussian.sigma0.2.step0.04")
    one, two, other = (lines.run_one(line, seed) for seed in (0, 0, 1))
    assert one["history"] == two["history"] != other["history"]
    final = one["final"]
    assert final["eps"] == one["guarantee"].eps == one["history"][-1]["eps"]
    assert final["uplink_bits"] == 2 * 600 * one["bits"].content
    assert (one["data"]["n_train"], one["data"]["n_test"]) == (600, 200)


def test_clients_that_are_held_out_do_not_train():
    clients, size = femnist.federation("digits"), femnist.nominal("digits")
    mean = float(clients.sizes.mean())
    assert size / 2 < mean <= size and math.log2(size) == int(math.log2(size))
    about = lines.source_of(clients)
    assert about["n_train"] == int(clients.sizes.sum()) < 1797
    assert about["n_clients"] == len(clients.parts) == 18, "a tenth of twenty"


def test_the_worst_gap_of_two_frontiers_is_of_means_over_seeds():
    rows = [
        ("d.imvu.eps1", 1.0, 60.0, 0),
        ("d.imvu.eps1", 1.0, 70.0, 1),
        ("d.imvu.eps9", 9.0, 50.0, 0),
        ("d.signsgd.a", 0.5, 30.0, 0),  # cheaper than any of I-MVU: no gap
        ("d.signsgd.b", 2.0, 40.0, 0),
        ("d.signsgd.c", 10.0, 62.0, 0),
        ("d.signsgd.c", 10.0, None, 1),  # diverged
    ]
    inputs = {}
    for key, eps, accuracy, seed in rows:
        final = {} if accuracy is None else {"accuracy": accuracy}
        more = dict(guarantee={"eps": eps}, data={"name": "x"}, final=final)
        inputs[f"{key}@{seed}"] = made_up(key, seed, paper="imvu", **more)
    how = partial(femnist.worst, mine=("d.imvu.eps1", "d.imvu.eps9"))
    line = lines.Line("a", "a", "smoke", ("a.gap",), (next(iter(inputs)),), compute=how)
    cells = {"a.gap": [3.0, "percentage points"]}
    assert lines.run_one(line, 0, inputs) == dict(cells=cells, data={"name": "x"})


def test_more_bits_of_one_law_are_compared_with_one():
    how = partial(
        femnist.more_bits, s=femnist.Sweep("smoke", ("digits",), 4, 2), data="digits"
    )
    final = lines.run_one(lines.Line("a", "a", "smoke", compute=how), 0)["final"]
    assert all(final[f"symbols.b{b}"] <= 2**b for b in (2, 3, 4))
    assert all(final[f"away.b{b}"] >= 0 for b in (2, 3, 4)) and len(final) == 6
