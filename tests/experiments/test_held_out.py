"I-MVU on clients: settings, the frontier over seeds, more bits."

import dataclasses
import math

from made_up import made_up

from dpcomm.evidence import paper_tables
from dpcomm.evidence.records import Record
from dpcomm.experiments.imvu import held_out

SMALL = held_out.Sweep(
    "smoke",
    ("digits",),
    held_out.paper_config(rounds=4, eval_every=2),
    (0,),
    sigmas=(1.0, 4.0),
    eps=(0.5, 2.0),
    rates=(1.0,),
    small=(0.001,),
)


def kept(key, eps, accuracy, seed=0) -> Record:
    final = {} if accuracy is None else {"accuracy": accuracy}
    more = dict(guarantee={"eps": eps}, data={"name": "x"})
    return made_up(key, seed, paper="imvu", scale="smoke", final=final, **more)


def test_clients_that_are_held_out_do_not_train():
    found = held_out.federation("digits")
    assert len(found.parts) == 18, "a tenth of twenty"
    mean = float(found.sizes.mean())
    size = held_out.nominal("digits")
    assert size / 2 < mean <= size and math.log2(size) == int(math.log2(size))
    said = held_out.about_data(found)
    assert said["n_train"] == int(found.sizes.sum()) < 1797
    assert said["n_clients"] == 18 and said["name"] == found.data.name


def test_a_level_is_a_noise_or_an_epsilon():
    imvu = held_out.at_level("imvu", 2.0, 64)
    assert (imvu.eps, imvu.beta) == (2.0, held_out.BETA / 64)
    for kind in ("gaussian", "signsgd"):
        assert held_out.at_level(kind, 3.0, 64).sigma == 3.0
    assert held_out.at_level("gaussian", 3.0, 64).local


def test_the_config_is_the_papers_and_what_it_is_told():
    config = held_out.paper_config(rounds=7)
    for name, hyper in (
        ("cohort", "cohort"),
        ("lr", "client_lr"),
        ("momentum", "server_momentum"),
    ):
        assert (
            getattr(config, name) == paper_tables.hyper("imvu", hyper, "femnist").value
        )
    assert (config.rounds, config.server) == (7, "momentum")


def test_keys_tell_points_apart_and_grids_read_all_of_them():
    assert held_out.key_of("digits", "imvu", 0.5, 1.0) == "digits.imvu.eps0.5.rate1"
    assert held_out.key_of("a", "signsgd", 4, 0.001) == "a.signsgd.sigma4.rate0.001"
    points, read = held_out.trained(SMALL, 0.5), held_out.read(SMALL)
    assert [r.key for r in points] == list(SMALL.points) and len(points) == 6
    assert [r.key.split(".")[1] for r in read] == [
        "imvu_minus_gaussian",
        "imvu_minus_signsgd",
        "more_bits",
    ]
    own = {k for k in SMALL.points if k.split(".")[1] in ("imvu", "gaussian")}
    two = dataclasses.replace(SMALL, seeds=(0, 1))
    assert {*held_out.read(two)[0].needs} == {f"{k}@{s}" for k in own for s in (0, 1)}
    full = dataclasses.replace(SMALL, data=("femnist",), scale="full")
    known = {c.key for c in paper_tables.cells("imvu")}
    assert {cell for r in held_out.read(full) for cell in r.fills} <= known


def test_the_worst_gap_of_two_frontiers_is_of_means_over_seeds():
    lines = [
        kept("d.imvu.eps1", 1.0, 60.0),
        kept("d.imvu.eps1", 1.0, 70.0, 1),
        kept("d.imvu.eps9", 9.0, 50.0),
        kept("d.signsgd.a", 0.5, 99.0),  # cheaper than any of I-MVU: no gap
        kept("d.signsgd.b", 2.0, 40.0),
        kept("d.signsgd.c", 10.0, 62.0),
        kept("d.signsgd.c", 10.0, None, 1),  # diverged
    ]
    lines[3] = kept("d.signsgd.a", 0.5, 30.0)
    inputs = {f"{r.key}@{r.seed}": r for r in lines}
    assert held_out.worst(inputs, "imvu", "signsgd") == 3.0
    assert held_out.worst(inputs, "signsgd", "imvu") == -35.0
    run = held_out.read(SMALL)[1]
    named = {run.needs[0]: lines[0]} | {k: inputs[k] for k in list(inputs)[1:]}
    assert held_out.run_one(SMALL, run, 0, inputs=named) == dict(
        cells={run.fills[0]: [3.0, "percentage points"]}, data={"name": "x"}
    )


def test_a_setting_is_trained_and_goes_on_where_it_stopped(tmp_path):
    run = held_out.trained(SMALL, 0.5)[1]
    task, about = held_out.task_of(SMALL, SMALL.points[run.key], 0)
    assert about["model"] == "linear" and about["most"] >= 1
    assert about["nominal"] == held_out.nominal("digits")
    how = dict(resume=True, progress=False)
    whole = held_out.train(SMALL, run, 0, checkpoint=tmp_path / "a.pt", **how)
    place = dict(checkpoint=tmp_path / "b.pt", **how)
    assert held_out.run_one(SMALL, run, 0, max_seconds=0.0, **place) is None
    pieces = held_out.run_one(SMALL, run, 0, **place)
    for name in ("final", "history", "cells", "bits", "config", "data"):
        assert whole[name] == pieces[name], name
    assert whole["final"]["eps"] == whole["guarantee"].eps > 0
    assert whole["cells"] == {run.fills[0]: [whole["final"]["accuracy"], "percent"]}


def test_more_bits_of_one_law_are_compared_with_one():
    task, _ = held_out.task_of(SMALL, ("digits", "imvu", 2.0, 1.0), 0)
    found = held_out.more_bits(task)
    assert set(found) == {
        f"{what}.b{b}" for what in ("symbols", "away") for b in (2, 3, 4)
    }
    assert all(found[f"symbols.b{b}"] <= 2**b for b in (2, 3, 4))
    assert all(found[f"away.b{b}"] >= 0 for b in (2, 3, 4))
    run = held_out.read(SMALL)[-1]
    assert held_out.run_one(SMALL, run, 0)["final"] == found
