"""Rounds with settings of one's own: a client whose update is not finite, clients' weights,
and cohorts that other processes train.
"""

import itertools
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from tables import tabled
from torch import nn

from dpcomm.core.random import seed_tree
from dpcomm.core.vectors import clip_l2, pack
from dpcomm.datasets.images import Federation
from dpcomm.mechanisms.contract import mechanism
from dpcomm.mechanisms.deployments import Deployment
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
    "Five clients of unequal size; the third holds a nan, or nothing."
    rng, pairs = seed_tree(0, "rounds"), []
    for n in (4, 9, 5, 2, 7):
        pairs.append([rng.normal(size=(n, 6)).astype(np.float32), np.arange(n) % 3])
    if odd == "nan":
        pairs[2][0][1, 2] = np.nan
    if odd == "empty":
        pairs[2] = [side[:0] for side in pairs[2]]
    return Federation.of(pairs, test=pairs[1])


def net(dropout=0.0):
    between = [nn.Dropout(dropout)] if dropout else []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), *between, nn.Linear(5, 3))


def task(sent=QUIET, odd=None, model=None, **settings):
    config = dict(rounds=2, cohort=5, batch=4, lr=0.1, server="sgd", server_lr=1.0)
    config |= dict(eval_every=1, engine="loop") | settings
    return Task(model or net(), people(odd), sent, Config(**config), 7)


# ---- an update that is not finite


@tabled("engine", ["loop", "vmap", "fused"])
@tabled("sent", ["gaussian", "rec", "topk"])
def test_a_client_that_is_dropped_counts_as_an_empty_one(engine, sent):
    "Two runs alike but for what the third client holds: nan, or nothing."
    nan, empty = (task(SENT[sent], odd, engine=engine) for odd in ("nan", "empty"))
    with pytest.warns(UserWarning, match="^round 0: client 2 .* nan .*as 0") as told:
        run = simulate(nan, progress=False)
    other = simulate(empty, progress=False)
    assert len(told) == 1 and run.dropped == [(0, 2), (1, 2)] and other.dropped == []
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
    assert run.dropped == straight.dropped == [(0, 2), (1, 2), (2, 2)]
    assert torch.equal(run.w, straight.w)


def test_the_server_draws_new_noise_in_every_round():
    "Noise a thousand times the clip on 53 weights: two steps are unrelated."
    loud = mechanism("gaussian", clip_norm=1.0, sigma=1e3, exact=False)
    one, two = (simulate(task(loud, rounds=t), progress=False).w for t in (1, 2))
    steps = np.corrcoef(one - pack(net()), two - one)
    assert abs(steps[0, 1]) < 0.7  # five standard deviations


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
