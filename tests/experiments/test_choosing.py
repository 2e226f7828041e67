"choose: what it predicts against what is played, what it ranks together, what it refuses."

import functools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tables import tabled

import dpcomm
from dpcomm import Deployment, cli, mechanism, registered
from dpcomm.core.random import seed_tree
from dpcomm.experiments import choosing, predictions
from dpcomm.privacy import audit

ASKED = Deployment(5_000, 50, 800, 1e-6, visits=20, d=256)
KNOWN = replace(ASKED, trust="secagg")
FEW = Deployment(4, 4, 1, 1e-5, sampling="none", d=32)


@pytest.fixture(scope="module")
def choice():
    return choosing.choose(ASKED, 4.0)


@pytest.fixture(scope="module")
def known():
    return choosing.choose(KNOWN, 4.0)


def played(m, u, gain, plays, rng):
    "Squared errors of rounds that are played."
    n, d = u.shape
    sent = m.simulate(u.repeat(plays, 1), rng).view(plays, n, d)
    made = torch.stack([m.aggregate(one, n, rng) for one in sent.double()])
    return ((made / gain - u.mean(0)) ** 2).sum(1)


@tabled("name", registered())
def test_the_predicted_error_is_the_played_one(name):
    plays, u = 400, predictions.examples(FEW.d, 4)
    # a mechanism at a budget where its noise does not hide everything else
    row = next(r for r in rows(40.0) if r.name == name)
    said = predictions.average_error(row.built, u, 4)
    found = played(row.built, u, said.gain, plays, seed_tree(1, name))
    off = (float(found.mean()) - said.error) / float(found.std()) * math.sqrt(plays)
    assert abs(off) < 5.5, f"{off:.1f} standard errors"


_ROWS = {}


def rows(eps):
    "All rows of few clients, once."
    if eps not in _ROWS:
        found = choosing.choose(FEW, eps)
        _ROWS[eps] = [row for r in found.rankings for row in r.rows]
    return _ROWS[eps]


def test_a_poisson_cohort_has_a_random_size():
    "Without noise and bias nothing is wrong; with a bias the random size counts."
    u, rng = predictions.examples(64, 40), seed_tree(2, "sizes")
    m = mechanism("topk", fraction=0.5, clip_norm=1.0, sigma=None, n_clients=10)
    said = predictions.average_error(m, u, 10, clients=40)
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
    rows = choosing.choose(
        Deployment(10**4, 10**4, 1, 1e-6, sampling="none", d=16), 4.0
    )
    row = next(r for r in rows.rankings[0].rows if r.name == name)
    assert row.error >= row.least and row.error > 0


@tabled("name", tuple(predictions.PIECES))
def test_a_piece_stands_for_the_whole(name, monkeypatch):
    cut = name in ("compressive", "topk")  # to a support that is drawn
    more = dict(fraction=0.25, n_clients=50) if cut else {}
    more |= dict(iterations=0) if name == "compressive" else {}
    more |= dict(rounding="random", top=0.05) if name == "quantised" else {}
    more |= dict(local=True) if name == "gaussian" else {}
    free = dict(eps=0.5) if name in ("imvu", "mvu", "sqkr") else dict(sigma=2.0)
    m, u = mechanism(name, clip_norm=1.0, **free, **more), predictions.examples(2**13)
    monkeypatch.setattr(predictions, "PIECES", {})
    whole = predictions.average_error(m, u, 50)
    monkeypatch.setattr(predictions, "PIECES", {name: 2**12})
    piece = predictions.average_error(m, u, 50)
    near = 0.2 if cut else 0.05
    assert piece.error == pytest.approx(whole.error, rel=near)
    assert piece.gain == pytest.approx(whole.gain, rel=near)


def test_every_mechanism_that_is_trusted_enough_is_ranked(choice, known):
    ranked = {row.name for row in choice.rankings[0].rows}
    assert ranked | {*choice.refused} == {*registered()} and not choice.refused
    trusts = {row.guarantee.trust for row in known.rankings[0].rows}
    assert "central" not in trusts and "quantised" in known.refused
    local = choosing.choose(replace(ASKED, trust="local"), 4.0)
    assert {row.guarantee.trust for row in local.rankings[0].rows} == {"local"}
    assert "gaussian" in {row.name for row in local.rankings[0].rows}


def test_one_ranking_has_one_definition_and_is_sorted(choice, known):
    for found in (
        choice,
        known,
        choosing.choose(replace(ASKED, sampling="fixed"), 4.0),
    ):
        for ranking in found.rankings:
            same = {choosing.definition(row.guarantee) for row in ranking.rows}
            assert same == {ranking.definition}
            errors = [row.error for row in ranking.rows]
            assert errors == sorted(errors)
            for row in ranking.rows:
                assert row.guarantee.eps <= found.eps
                assert row.guarantee == replace(
                    found.deployment, relation=row.guarantee.relation
                ).guarantee(row.built)


def test_another_definition_has_a_table_of_its_own():
    @dpcomm.mechanisms.contract.register
    class Swapped(dpcomm.mechanisms.contract.mechanism_class("gaussian")):
        name = "swapped"
        relations = {"replace": dict(relation="replace", accountant="rdp-balle")}

    try:
        found = choosing.choose(
            replace(ASKED, visits=None, sampling="none", cohort=5_000), 4.0
        )
        assert len(found.rankings) == 2
        assert [row.name for row in found.rankings[1].rows] == ["swapped"]
        assert "relation replace" in found.rankings[1].definition
        assert "not to be compared" in choosing.tables(found)[1].title
        assert found.best.name != "swapped"
    finally:
        del dpcomm.mechanisms.contract._REGISTRY["swapped"]


def record_of(row, d, n, **more):
    "What mean-estimation records of a row that it plays."
    config = dict(kind=row.name, d=d, n=n, eps=4.0, predicted=row.error)
    config |= dict(parameters=row.parameters) | more
    return SimpleNamespace(config=config, final=dict(mse=2 * row.error, se=row.error))


def test_a_prediction_is_checked_where_it_was_played_and_nowhere_else(monkeypatch):
    asked = Deployment(10, 10, 1, 1e-6, sampling="none", d=64)
    row = choosing.choose(asked, 4.0).best
    monkeypatch.setattr(choosing, "_played", lambda: ())
    assert choosing.checked(asked, row.built) == "extrapolated: no run stands"
    far, near = record_of(row, 2**16, 10), record_of(row, 64, 10)
    for found in ((far, near), (near, far)):
        monkeypatch.setattr(choosing, "_played", lambda found=found: found)
        said = choosing.checked(asked, row.built)
        assert said.startswith(
            "checked at d = 64, n = 10, eps = 4 a round: measured 2.00"
        )
    other = replace(row.built, sigma=1.1 * row.built.sigma)
    for deployment, built in (
        (asked, other),
        (replace(asked, d=65), row.built),
        (replace(asked, n_clients=100, sampling="poisson"), row.built),
    ):
        said = choosing.checked(deployment, built)
        assert said.startswith("extrapolated from d = 64, n = 10")


def test_a_refusal_checks_nothing(monkeypatch):
    empty = SimpleNamespace(config=dict(kind="topk", d=256, n=50), final={})
    monkeypatch.setattr(choosing, "_played", lambda: (empty,))
    m = mechanism("topk", fraction=1.0, clip_norm=1.0, sigma=1.0, n_clients=50)
    assert choosing.checked(ASKED, m) == "extrapolated: no run stands"


def test_memory_is_the_record_s_scaled_with_the_length(monkeypatch):
    held = {"pm, encode": dict(memory=3.0, size=512), "pm, decode": dict(memory=None)}
    monkeypatch.setattr(predictions, "_held", lambda: held)
    found = predictions.costs(ASKED, mechanism("pm", bound=1.0, eps=1.0))
    assert found["client_memory"] == 1.5 and found["server_memory"] is None


# ---- the epsilons, attacked at the parameters that choose finds

ATTACKED = Deployment(10, 10, 1, 1e-6, sampling="none", d=16)


@functools.cache
def rows_at(eps) -> dict:
    "What is offered at an epsilon, by name."
    return {r.name: r for r in choosing.choose(ATTACKED, eps).rankings[0].rows}


def attacked(row, less=1.0, trials=4_000):
    "The game of a row's mechanism, perhaps of one with less noise, against its claims."
    m, known = row.built, row.built.relations
    relation = row.guarantee.relation if row.guarantee.relation in known else "local"
    claimed = audit.claims(m, relation, d=16)
    free = m.free
    spent = getattr(m, free) * (less if free == "sigma" else 1 / less)
    rng = seed_tree(0, "attacked", m.name)
    liar = replace(m, **{free: spent})
    return audit.judge_play(liar, relation, trials, rng, against=claimed, d=16)


@pytest.mark.deep
@tabled("name", registered())
def test_no_attack_refutes_what_choose_promises(name):
    "The page of `choosing` plays five times as often."
    for eps in (0.5, 4.0):
        row = rows_at(eps)[name]
        assert row.guarantee == replace(ATTACKED, relation="zero-out").guarantee(
            row.built
        )
        assert not attacked(row, trials=1_000 if name == "rec" else 4_000).refuted


@tabled("name", ["gaussian", "privquant", "pm", "topk"])
def test_the_attack_notices_half_of_the_noise(name):
    row = rows_at(4.0)[name]
    assert not attacked(row).refuted
    assert attacked(row, less=0.5).refuted


def test_no_mechanism_is_below_its_bound():
    for trust in ("central", "secagg", "local"):
        for eps in (0.5, 8.0):
            for row in (
                choosing.choose(replace(ASKED, trust=trust), eps).rankings[0].rows
            ):
                assert row.error >= row.least, row.name
                assert row.against >= 1


def test_less_epsilon_is_more_error(choice):
    less = {r.name: r.error for r in choosing.choose(ASKED, 1.0).rankings[0].rows}
    for row in choice.rankings[0].rows:
        assert row.error < less[row.name]


def test_bits_are_kept(known):
    for bits in (0.5, 2.0):
        for row in choosing.choose(KNOWN, 4.0, bits).rankings[0].rows:
            assert row.built.bits(256).content <= bits * 256
    for row in known.rankings[0].rows:
        assert row.up["total"] == sum(v for k, v in row.up.items() if k != "total")
        assert ("session" in row.up) == row.built.summed


def test_a_session_s_bits_are_those_that_it_sends():
    import numpy as np

    from dpcomm.secagg import session

    m = mechanism("topk", fraction=1.0, clip_norm=1.0, sigma=5.0, n_clients=10)
    s = Deployment(10, 10, 1, 1e-5, sampling="none", trust="secagg", d=40)
    up, down = predictions.traffic(s, m)
    graph = session.graph_parameters(10, *predictions.RATES)
    chosen = {k: getattr(graph, k) for k in ("threshold", "neighbours", "quorum")}
    chosen |= {k: getattr(graph, k) for k in ("committee", "signatures")}
    ran = session.run_session([np.zeros(40, np.int64)] * 10, m.ring, seed=0, **chosen)
    sent = [8 * int(ran.traffic[:, :, j, 1].sum(0).max()) for j in (0, 1)]
    assert up["values"] + up["session"] == sent[0]
    assert down["session"] == sent[1]


def test_the_best_builds_for_every_clip(known):
    for row in known.rankings[0].rows:
        for clip in (0.01, 7.0):
            made = row.mechanism(clip)
            promise = replace(KNOWN, relation="zero-out").guarantee(made)
            assert promise.eps == pytest.approx(row.guarantee.eps, rel=1e-3)
            u = clip * predictions.examples(256)
            error = predictions.average_error(made, u, 50)
            assert error.error == pytest.approx(clip**2 * row_error(row), rel=1e-2)


def row_error(row):
    return predictions.average_error(row.built, predictions.examples(256), 50).error


def test_the_caller_s_updates_are_predicted_for():
    sparse = torch.zeros(3, 256)
    sparse[:, 0] = 1.0
    own = choosing.choose(ASKED, 4.0, updates=sparse).rankings[0].rows
    usual = {r.name: r.error for r in choosing.choose(ASKED, 4.0).rankings[0].rows}
    found = {row.name: row.error for row in own}
    assert found["pm"] != pytest.approx(usual["pm"], rel=0.1)
    assert found["gaussian"] == pytest.approx(usual["gaussian"], rel=0.01)


@tabled(
    "changes, wish, told",
    [
        (dict(), dict(bits=1e-4), r"raise bits to 0\.\d+ for \w+"),
        (dict(unit="example", delta=0.0), {}, "pass unit='client' for"),
        (
            dict(relation="add-remove", trust="local"),
            {},
            "relation add-remove.*pass .*relation=None for",
        ),
        (dict(d=None), {}, "d is None"),
        ({}, dict(eps=math.nan), "eps"),
        ({}, dict(updates=torch.zeros(2, 5)), r"updates has shape \(2, 5\)"),
        ({}, dict(updates=torch.zeros(1, 256)), "two clients"),
        ({}, dict(updates=torch.full((2, 256), math.nan)), "updates"),
    ],
)
def test_what_nothing_meets_says_what_to_relax(changes, wish, told):
    with pytest.raises(ValueError, match=told):
        choosing.choose(replace(ASKED, **changes), **dict(eps=4.0) | wish)


def test_a_ring_s_fewest_bits_are_advised(known):
    "And not those that are tried first."
    why = choosing.choose(KNOWN, 4.0, 2.0).refused["skellam"]
    bits = float(why.rpartition("raise bits to ")[2])
    assert 2 < bits < 20
    found = choosing.choose(KNOWN, 4.0, bits)
    assert "skellam" in {row.name for row in found.rankings[0].rows}


def test_a_ring_between_those_that_are_tried_is_found():
    "At epsilon .05 twelve bits do not hold the noise, and thirteen do."
    server = replace(ASKED, visits=None, d=2_000)
    found = choosing.choose(server, 0.05, 13.5)
    assert {r.name: r.built for r in found.rankings[0].rows}["ddgauss"].ring_bits == 13


def test_what_is_advised_is_feasible():
    with pytest.raises(ValueError, match="raise bits to") as caught:
        choosing.choose(ASKED, 4.0, bits=1e-4)
    bits, name = str(caught.value).split("raise bits to ")[1].split(" for ")
    found = choosing.choose(ASKED, 4.0, bits=float(bits))
    assert name in {row.name for row in found.rankings[0].rows}


def test_the_nearest_epsilon_is_feasible():
    said = [*choosing._more_eps(replace(ASKED, unit="example"), 1e-9, None)]
    eps, name = said[0].removeprefix("raise eps to ").split(" for ")
    found = replace(ASKED, unit="example", relation="zero-out").calibrate(
        name, float(eps)
    )
    assert found.name == name


WORDS = "--d 256 --clients 5e3 --cohort 50 --rounds 800 --eps 4 --delta 1e-6"


def test_the_command_prints_tables_json_and_a_picture(capsys, tmp_path):
    picture = tmp_path / "out.svg"
    words = f"choose {WORDS} --visits 20 --bits 1 --trust secagg"
    assert cli.main([*words.split(), "--plot", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "relation zero-out" in said and "signsgd" in said and "quantised: " in said
    assert picture.read_text("utf-8").count("<svg") == 1
    assert cli.main([*words.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    asked = choosing.choose(KNOWN, 4.0, 1.0)
    assert found == json.loads(json.dumps(asked.as_dict()))
    assert found["rankings"][0]["rows"][0]["mechanism"] == asked.best.name


@tabled(
    "words, told",
    [
        ("--cohort 6000", "cohort is 6000 of 5000 clients"),
        ("--trust nobody", "must be one of local, shuffler, secagg, central"),
        ("--d 1.5", "--d is 1.5; it must be a whole number"),
        ("--plot out.gif", "is not the name of an image file"),
        ("--plot nowhere/out.svg", "a folder that does not exist"),
        ("--bits 1e-5", "raise bits to"),
        ("--eps -1", "eps is -1"),
        ("--trsut local", "did you mean"),
    ],
)
def test_a_wrong_wish_is_a_sentence(words, told, capsys):
    assert cli.main([*f"choose {WORDS}".split(), *words.split()]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1
