"choose: what it predicts against what is played, what it ranks together, what it refuses."

import functools
import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tables import tabled

from dpcomm import Deployment, cli, mechanism, registered
from dpcomm.core.random import seed_tree
from dpcomm.mechanisms import choose as choosing
from dpcomm.secagg import session

ASKED = Deployment(5_000, 50, 800, 1e-6, visits=20, d=256)
KNOWN = replace(ASKED, trust="secagg")
FEW = Deployment(4, 4, 1, 1e-5, sampling="none", d=32)


choose = functools.cache(choosing.choose)


def by_name(asked, eps=4.0, *bits) -> dict:
    return {row.name: row for row in choose(asked, eps, *bits).rows}


@tabled("name", registered())
def test_the_predicted_error_is_the_played_one(name):
    plays, u = 400, choosing.examples(FEW.d, 4)
    # a mechanism at a budget where its noise does not hide everything else
    row = by_name(FEW, 40.0)[name]
    said, rng = choosing.average_error(row.built, u, 4), seed_tree(1, name)
    sent = row.built.simulate(u.repeat(plays, 1), rng).view(plays, *u.shape)
    made = torch.stack([row.built.aggregate(one, 4, rng) for one in sent.double()])
    found = ((made / said.gain - u.mean(0)) ** 2).sum(1)
    off = (float(found.mean()) - said.error) / float(found.std()) * math.sqrt(plays)
    assert abs(off) < 5.5, f"{off:.1f} standard errors"


def test_a_poisson_cohort_has_a_random_size():
    "Without noise and bias nothing is wrong; with a bias the random size counts."
    u, rng = choosing.examples(64, 40), seed_tree(2, "sizes")
    m = mechanism("topk", fraction=0.5, clip_norm=1.0, sigma=None, n_clients=10)
    said = choosing.average_error(m, u, 10, clients=40)
    sent, errors = m.simulate(u, rng) / said.gain, []
    for _ in range(4_000):
        here = torch.from_numpy(rng.random(40) < 10 / 40)
        off = (sent[here].sum(0) - u[here].sum(0)) / 10
        errors.append(float(off @ off))
    errors = torch.tensor(errors, dtype=torch.float64)
    assert abs(errors.mean() - said.error) < 5.5 * errors.std() / 4_000**0.5


@tabled("name", ["privquant", "pm", "quantised"])
def test_few_examples_stand_for_a_large_cohort(name):
    "What clipping costs two clients together is no less than nothing."
    row = by_name(Deployment(10**4, 10**4, 1, 1e-6, sampling="none", d=16))[name]
    assert row.error >= row.least and row.error > 0


@tabled("name", tuple(choosing.PIECES))
def test_a_piece_stands_for_the_whole(name, monkeypatch):
    cut = name in ("compressive", "topk")  # to a support that is drawn
    more = dict(fraction=0.25, n_clients=50) if cut else {}
    more |= dict(iterations=0) if name == "compressive" else {}
    more |= dict(rounding="random", top=0.05) if name == "quantised" else {}
    more |= dict(local=True) if name == "gaussian" else {}
    free = dict(eps=0.5) if name in ("imvu", "mvu", "sqkr") else dict(sigma=2.0)
    m, u = mechanism(name, clip_norm=1.0, **free, **more), choosing.examples(2**13)
    monkeypatch.setattr(choosing, "PIECES", {})
    whole = choosing.average_error(m, u, 50)
    monkeypatch.setattr(choosing, "PIECES", {name: 2**12})
    piece = choosing.average_error(m, u, 50)
    near = 0.2 if cut else 0.05
    assert piece.error == pytest.approx(whole.error, rel=near)
    assert piece.gain == pytest.approx(whole.gain, rel=near)


def test_every_mechanism_that_is_trusted_enough_is_ranked():
    assert by_name(ASKED).keys() == {*registered()} and not choose(ASKED, 4.0).refused
    trusts = {row.guarantee.trust for row in choose(KNOWN, 4.0).rows}
    assert "central" not in trusts and "quantised" in choose(KNOWN, 4.0).refused
    local = by_name(replace(ASKED, trust="local"))
    assert {row.guarantee.trust for row in local.values()} == {"local"}
    assert "gaussian" in local


def test_rows_are_sorted_and_keep_what_they_promise():
    "Ties in error by bits, one definition, errors above the lower bound, bits in full."
    for asked in (
        (ASKED, 4.0),
        (KNOWN, 4.0),
        (replace(ASKED, sampling="fixed"), 4.0),
        (replace(ASKED, trust="local"), 8.0),
        (KNOWN, 0.5, 2.0),
        (replace(KNOWN, d=300), 4.0),
        (replace(KNOWN, d=4_096), 4.0, 16.0),
    ):
        found = choose(*asked)
        s = replace(found.deployment, relation="zero-out")
        for first, second in itertools.pairwise(found.rows):
            if second.error <= first.error:
                assert first.error <= choosing.TIE * second.error
                assert first.up["total"] <= second.up["total"]
        for row in found.rows:
            assert row.guarantee.eps <= found.eps and row.error >= row.least
            assert row.against >= 1 and row.guarantee == s.guarantee(row.built)
            assert row.built.bits(s.d).content <= (found.bits or math.inf) * s.d
            total = sum(v for k, v in row.up.items() if k != "total")
            assert row.up["total"] == total
            assert ("session" in row.up) == row.built.summed
    for name, row in by_name(ASKED).items():
        assert row.error < by_name(ASKED, 1.0)[name].error


def test_a_session_s_bits_are_those_that_it_sends():
    m = mechanism("topk", fraction=1.0, clip_norm=1.0, sigma=5.0, n_clients=10)
    s = Deployment(10, 10, 1, 1e-5, sampling="none", trust="secagg", d=40)
    up, down = choosing.traffic(s, m)
    graph = session.graph_parameters(10, *choosing.RATES)
    chosen = {k: getattr(graph, k) for k in ("threshold", "neighbours", "quorum")}
    chosen |= {k: getattr(graph, k) for k in ("committee", "signatures")}
    ran = session.run_session([np.zeros(40, np.int64)] * 10, m.ring, seed=0, **chosen)
    sent = [8 * int(ran.traffic[:, :, j, 1].sum(0).max()) for j in (0, 1)]
    assert up["values"] + up["session"] == sent[0]
    assert down["session"] == sent[1]


def test_the_best_builds_for_every_clip():
    for row in choose(KNOWN, 4.0).rows:
        for clip in (0.01, 7.0):
            made = row.mechanism(clip)
            promise = replace(KNOWN, relation="zero-out").guarantee(made)
            assert promise.eps == pytest.approx(row.guarantee.eps, rel=1e-3)
            u = clip * choosing.examples(256)
            error = choosing.average_error(made, u, 50).error
            usual = choosing.average_error(row.built, choosing.examples(256), 50).error
            assert error == pytest.approx(clip**2 * usual, rel=1e-2)


def test_the_caller_s_updates_are_predicted_for():
    sparse = torch.zeros(3, 256)
    sparse[:, 0] = 1.0
    own = choosing.choose(ASKED, 4.0, updates=sparse).rows
    found, usual = {row.name: row.error for row in own}, by_name(ASKED)
    assert found["pm"] != pytest.approx(usual["pm"].error, rel=0.1)
    assert found["gaussian"] == pytest.approx(usual["gaussian"].error, rel=0.01)
    long, other = dict(updates=2 * sparse), dict(tried=dict(gauss=[{}]))
    for how, says in zip((long, other), ("norm 2; ", "did you mean 'gaussian'")):
        with pytest.raises(ValueError, match=says):
            choosing.choose(ASKED, 4.0, **how)


def test_a_ring_s_fewest_bits_are_advised_and_found():
    "And not those that are tried first; of 12 and 13 only the latter hold the noise."
    why = choose(KNOWN, 4.0, 2.0).refused["skellam"]
    bits = float(why.rpartition("raise bits to ")[2])
    assert 2 < bits < 20 and "skellam" in by_name(KNOWN, 4.0, bits)
    server = replace(ASKED, visits=None, d=2_000)
    assert by_name(server, 0.05, 13.5)["ddgauss"].built.ring_bits == 13


# ---- the answer


def test_nothing_that_sends_a_part_is_listed_with_all_of_it():
    for asked in (ASKED, KNOWN, replace(KNOWN, d=2)):
        for name in {"topk", "compressive"} & by_name(asked).keys():
            assert by_name(asked)[name].built.fraction < 1
    whole = choosing.choose(ASKED, 4.0, tried=choosing.grids(256, whole=True))
    assert {r.name: r.built for r in whole.rows}["topk"].fraction == 1


def test_noise_that_drowns_the_signal_is_said_where_everybody_takes_part():
    found = choose(Deployment(4, 4, 9, 1e-6, sampling="none", d=256), 1.0)
    assert "visits" not in found.advice and "raise cohort" in found.advice
    assert found.advice in str(found) and found.advice in found.as_dict()["advice"]


def test_the_command_prints_tables_and_json(capsys):
    words = "choose --d 256 --clients 5e3 --cohort 50 --rounds 800 --eps 4 --delta 1e-6"
    words += " --visits 20 --bits 1 --trust secagg"
    assert cli.main(words.split()) == 0
    said = capsys.readouterr().out
    assert "relation zero-out" in said and "signsgd" in said and "quantised: " in said
    assert cli.main([*words.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    asked = choose(KNOWN, 4.0, 1.0)
    assert found == json.loads(json.dumps(asked.as_dict()))
    assert found["rows"][0]["mechanism"] == asked.best.name
    assert cli.main([*words.split(), "--cohort", "6000"]) == 2
    assert "cohort is 6000 of 5000 clients" in capsys.readouterr().err
