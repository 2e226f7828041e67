"""Rounds with settings of one's own: a client whose update is not finite, one odd client
whom every engine takes alike, clients' weights, and rounds of many clients.
"""

import itertools
import os
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from tables import tabled
from torch import nn
from torch.nn import functional as F

from dpcomm.core.random import seed_tree
from dpcomm.core.vectors import clip_l2, pack
from dpcomm.datasets.images import Federation
from dpcomm.mechanisms.contract import mechanism
from dpcomm.mechanisms.deployments import Deployment
from dpcomm.training import example_level, local_sgd, models
from dpcomm.training.federated import Config, Task, simulate
from dpcomm.training.round import Sums, shares, train_cohort

QUIET = mechanism("gaussian", clip_norm=1.0, sigma=1e-12, exact=False)
SKELLAM = mechanism("skellam", clip_norm=1.0, sigma=0.5, n_clients=4)
SENT = {
    "gaussian": mechanism("gaussian", clip_norm=1.0, sigma=0.1, exact=False),
    "rec": mechanism("rec", clip_norm=1.0, std=0.5),
    "pm": mechanism("pm", bound=0.1, eps=1.0, residuals=True),
    "topk": mechanism("topk", fraction=0.5, clip_norm=1.0, sigma=0.5, n_clients=4),
    "skellam": SKELLAM,
}


def people(odd=None):
    """Five clients; the first is odd, whose example 0 also fills other clients' batches.

    odd: how many examples it has, a value of some inputs, or a label; None: nothing.
    """
    rng, pairs = seed_tree(0, "rounds"), []
    for n in (4, 9, 5, 2, 7):
        x = rng.normal(size=(n, 1, 6, 6)).astype(np.float32)
        pairs.append([x, rng.integers(3, size=n)])
    x, y = pairs[0]
    if odd in ("empty", "one"):
        pairs[0] = [x[: odd == "one"], y[: odd == "one"]]
    elif odd in ("nan", "inf"):
        x[0] = x[2, 0, 1, 1] = float(odd)
    elif odd is not None:
        y[[0, 3]] = odd
    return Federation.of(pairs, test=pairs[1])


def net():
    layers = nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)
    return models.initialise(nn.Sequential(*layers), seed_tree(0, "net"))


def task(sent=QUIET, odd=None, **settings):
    config = dict(rounds=2, cohort=5, batch=4, lr=0.1, server="sgd", server_lr=1.0)
    config |= dict(eval_every=1, engine="loop") | settings
    return Task(net(), people(odd), sent, Config(**config), 7)


# ---- an update that is not finite


@tabled("engine", ["loop", "vmap", "fused"])
@tabled("sent", ["gaussian", "rec", "topk"])
def test_a_client_that_is_dropped_counts_as_an_empty_one(engine, sent):
    "Two runs alike but for what the first client holds: nan, or nothing."
    nan, empty = (task(SENT[sent], odd, engine=engine) for odd in ("nan", "empty"))
    with pytest.warns(UserWarning, match="^round 0: client 0 .* nan .*as 0") as told:
        run = simulate(nan, progress=False)
    other = simulate(empty, progress=False)
    assert len(told) == 1 and run.dropped == [(0, 0), (1, 0)] and other.dropped == []
    torch.testing.assert_close(run.w, other.w, rtol=1e-5, atol=1e-6)
    assert run.ledger == other.ledger
    loss, wanted = (r.history[-1]["train_loss"] for r in (run, other))
    assert loss == pytest.approx(wanted, rel=1e-5)


def test_a_run_that_is_resumed_lists_what_it_dropped_before(tmp_path):
    work = task(odd="nan", rounds=3)
    how = dict(progress=False)
    pieces = how | dict(checkpoint=tmp_path / "c", resume=True, max_seconds=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        straight = simulate(work, **how)
        while not (run := simulate(work, **pieces)).finished:
            pass
    assert run.dropped == straight.dropped == [(0, 0), (1, 0), (2, 0)]
    assert torch.equal(run.w, straight.w)


def test_the_server_draws_new_noise_in_every_round():
    "Noise a thousand times the clip on 177 weights: two steps are unrelated."
    loud = mechanism("gaussian", clip_norm=1.0, sigma=1e3, exact=False)
    one, two = (simulate(task(loud, rounds=t), progress=False).w for t in (1, 2))
    steps = np.corrcoef(one - pack(net()), two - one)
    assert abs(steps[0, 1]) < 0.38  # five standard deviations


# ---- an odd client


def updates(odd, road, clients=(0, 1, 2)):
    "What each of some clients moves by in round 0."
    work, cohort = task(odd=odd, engine=road), np.array(clients)
    streams, w = work.streams(0, cohort, "batches"), pack(work.model)
    with ThreadPoolExecutor(1) as pool:
        chunks = train_cohort(work, w, cohort, streams, pool)
        found, losses = zip(*chunks)
    return torch.cat(found), torch.cat(losses)


@tabled("road", local_sgd.ENGINES)
def test_an_empty_client_sends_zero_and_has_no_share_in_the_loss(road):
    found, losses = updates("empty", road)
    assert (found[0] == 0).all() and (found[1:].norm(dim=1) > 1e-3).all()
    assert losses is None or len(losses) == 2
    nobody, losses = updates("empty", road, (0,))
    assert nobody.shape == (1, len(found[0])) and (nobody == 0).all()
    assert losses is None or len(losses) == 0


@tabled("engine", local_sgd.ENGINES)
def test_a_run_with_an_empty_client_goes_on_and_pays_for_its_message(engine):
    "Also a round in which nobody has an example; the loss is of the others, or 0."
    work, nobody = task(odd="empty", engine=engine), (np.zeros(0, int),) * 5
    run = simulate(work, progress=False)
    assert torch.isfinite(run.w).all()
    assert run.ledger.uplink_bits == 2 * 5 * 32 * len(run.w)
    _, losses = updates("empty", engine, range(5))
    assert run.history[0]["train_loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
    work = replace(work, federation=replace(work.federation, parts=nobody))
    run = simulate(work, progress=False)
    assert run.finished and [entry["train_loss"] for entry in run.history] == [0.0, 0.0]


@tabled("road", local_sgd.ENGINES)
def test_a_client_with_one_example_takes_one_step(road):
    work = task(odd="one")
    x, y = work.federation.data.x[:1], work.federation.data.y[:1]
    weights = list(work.model.parameters())
    slope = torch.autograd.grad(F.cross_entropy(work.model(x), y), weights)
    wanted = -0.1 * torch.cat([g.flatten() for g in slope])
    found, _ = updates("one", road)
    torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-6)


@tabled("road", local_sgd.ENGINES)
@tabled("what", ["nan", "inf"])
def test_bad_inputs_are_named_and_not_blamed_on_the_rate(what, road):
    says = "client 0 holds an input with nan or inf: correct or drop it$"
    with pytest.raises(FloatingPointError, match=says) as error:
        updates(what, road)
    assert "lr" not in str(error.value)
    healthy, odd = updates(None, road, (1, 2))[0], updates(what, road, (1, 2))[0]
    assert torch.equal(healthy, odd), "another client's nan leaked"


@tabled("label", [3, 1000, -1, -100])
def test_a_label_without_a_class_is_named(label):
    says = f"^client 0 holds a label {label}; the model's classes are 0 to 2: correct"
    with pytest.raises(ValueError, match=says):
        simulate(task(odd=label), progress=False)


@tabled("road", local_sgd.ENGINES)
def test_a_label_that_shows_only_in_training_names_its_visit(road):
    "... as of a federation that makes its clients when they are asked for."
    with pytest.raises(ValueError, match="examples of client .*0.* are .*bounds"):
        updates(1000, road)


def test_the_algorithm_for_single_examples_takes_an_empty_client():
    local = mechanism("gaussian", clip_norm=1.0, sigma=0.1, local=True, exact=False)
    work, nobody = task(local, "empty"), (np.zeros(0, int),) * 5
    run = example_level.simulate(work, progress=False)
    assert run.finished and torch.isfinite(run.w).all()
    work = replace(work, federation=replace(work.federation, parts=nobody))
    run = example_level.simulate(work, progress=False)
    assert torch.isfinite(run.w).all() and run.history[-1]["train_loss"] == 0


# ---- weights


WEIGHTS = np.array([4.0, 9.0, 0.0, 2.0, 6.0])


@tabled("sent", [QUIET, SKELLAM], ids=["gaussian", "skellam"])
@tabled("cohort", [1, 2, 5])
def test_the_mean_over_all_cohorts_is_the_weighted_mean(sent, cohort):
    "All cohorts of a size are equally likely; no noise is drawn here."
    u = torch.from_numpy(seed_tree(1, "u").normal(size=(5, 4)))
    share, cohorts = shares(WEIGHTS, 5), [*itertools.combinations(range(5), cohort)]
    found = []
    for who in map(list, cohorts):
        streams = [seed_tree(0, i) for i in who]
        keep = Sums(sent, streams, share=share[who])
        total = keep(u[who], slice(0, cohort))
        weight = cohort * share.mean()
        if sent.summed:
            found.append(sent.reconstruct(total, weight, 4))
        else:
            found.append(total / weight)
    wanted = torch.from_numpy(WEIGHTS)[:, None] * clip_l2(u, 1.0)
    torch.testing.assert_close(
        torch.stack(found).mean(0).double(),
        wanted.sum(0) / WEIGHTS.sum(),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("sent", [QUIET, SKELLAM], ids=["gaussian", "skellam"])
def test_no_client_adds_more_than_the_bound(sent):
    "A client's part of the sum is as long as its share of the clip, and no longer."
    u = 50 * torch.from_numpy(seed_tree(2, "u").normal(size=(5, 4)))
    share = shares(WEIGHTS, 5)
    streams = [seed_tree(0, i) for i in range(5)]
    keep = Sums(sent, streams, share=share)
    parts = torch.stack([keep(u[i : i + 1], slice(i, i + 1)) for i in range(5)])
    assert parts.norm(dim=1).tolist() == pytest.approx((WEIGHTS / 9).tolist(), abs=1e-6)


def test_a_run_moves_by_the_weighted_mean_of_the_clipped_updates():
    work = task(rounds=1)
    run = simulate(work, progress=False, weights=WEIGHTS)
    everybody, w = np.arange(5), pack(work.model)
    streams = work.streams(0, everybody, "batches")
    with ThreadPoolExecutor(1) as pool:
        chunks = train_cohort(work, w, everybody, streams, pool)
        updates = torch.cat([u for u, _ in chunks])
    mean = torch.from_numpy(WEIGHTS / WEIGHTS.sum()) @ clip_l2(updates.double(), 1.0)
    torch.testing.assert_close(
        run.w.detach() - pack(work.model), mean.float(), atol=1e-6, rtol=1e-5
    )


def test_weights_are_a_premise_of_the_guarantee_and_the_engine_prints_it(capsys):
    where = Deployment(5, 5, 2, 1e-3, "none", trust="local")
    local = mechanism("gaussian", clip_norm=1.0, sigma=1.0, local=True)
    work = replace(task(), mechanism=local)
    simulate(work, deployment=where, progress=False)
    assert "weights" not in capsys.readouterr().out
    simulate(work, deployment=where, progress=False, weights=WEIGHTS)
    assert "as if the clients' weights were public" in capsys.readouterr().out


def test_a_run_says_how_many_clients_take_fewer_steps_than_asked_for(capsys):
    "Clients of 2 to 9 examples, in batches of 4: one has three, two have two."
    run = simulate(task(steps=3), progress=False)
    assert "steps is 3, at most: 4 of 5 clients" in capsys.readouterr().out
    assert "steps is 3, at most: 4 of 5 clients" in str(run).splitlines()[-1]
    assert "steps" not in str(simulate(task(steps=1), progress=False))
    assert "steps" not in capsys.readouterr().out


def test_a_round_whose_shuffle_is_smaller_than_the_guarantee_counts_on_ends_the_run():
    where = Deployment(5, 5, 2, 1e-3, "none", trust="shuffler", tolerance=0.25)
    work = replace(task(), mechanism=mechanism("pm", bound=1.0, eps=1.0))
    assert simulate(work, deployment=where, progress=False).finished

    class Thinned(Task):
        def cohort(self, t):
            return super().cohort(t)[: 4 - t]

    given = {f.name: getattr(work, f.name) for f in fields(Task)}
    with pytest.raises(ValueError, match="3 messages are in the shuffle; .* on 4"):
        simulate(Thinned(**given), deployment=where, progress=False)


def test_weights_are_part_of_what_a_checkpoint_is_about(tmp_path):
    how = dict(progress=False, checkpoint=tmp_path / "c")
    simulate(task(), **how, weights=WEIGHTS)
    for weights in (None, WEIGHTS[::-1]):
        with pytest.raises(ValueError, match="was written with a different share"):
            simulate(task(rounds=4), **how, resume=True, weights=weights)
    assert simulate(task(rounds=4), **how, resume=True, weights=2 * WEIGHTS).finished


# ---- rounds of many clients


@tabled("cohort", [[3, 1, 3, 0, 1, 3], [2], [], [0, 0, 4, 4, 4, 9]])
def test_streams_are_those_of_the_tree_and_made_whenever_asked_for(cohort):
    work, seen = task(), []
    streams = work.streams(5, np.array(cohort, int), "noise")
    for i, client in enumerate(cohort):
        path = "client", client, "copy", seen.count(client), "noise"
        wanted = work.stream(5, *path).random(3).tolist()
        seen.append(client)
        for found in (streams[i], streams[i], streams[i : i + 1][0], [*streams][i]):
            assert found.random(3).tolist() == wanted
    assert len(streams) == len(cohort) == len(streams[:]) and streams[3:3] == []


@pytest.mark.parametrize("workers", [1, 3])
def test_few_chunks_are_kept_ahead_of_who_reads_them(workers):
    """Each chunk's sum is alive until it is read, and only a few chunks are sent: the
    count is of objects, whatever the speed of the threads.
    """
    work, everybody = task(batch=2), np.arange(100) % 5
    w, most = pack(work.model), 2 * os.cpu_count()
    alive, peak = set(), []

    def keep(updates, visits):
        kept = updates.clone()
        alive.add(visits.start)
        weakref.finalize(kept, alive.discard, visits.start)
        peak.append(len(alive))
        return kept

    with ThreadPoolExecutor(workers) as pool:
        streams = work.streams(0, everybody, "batches")
        chunks = train_cohort(work, w, everybody, streams, pool, keep=keep)
        read = sum(1 for _ in chunks)
    assert read == 100 and max(peak) <= most + 1


@tabled("sigma", [None, 1e-3])
def test_equal_weights_are_no_weights_for_a_mechanism_that_sends_a_part(sigma):
    part = dict(fraction=0.3, clip_norm=0.02, n_clients=5, held=False, sigma=sigma)
    config = Config(rounds=1, cohort=5, lr=0.3, server="sgd", server_lr=1.0)
    work = Task(net(), people(), mechanism("topk", **part), config, 0)
    runs = [simulate(work, progress=False, weights=w).w for w in (None, [1] * 5)]
    torch.testing.assert_close(runs[1], runs[0])
