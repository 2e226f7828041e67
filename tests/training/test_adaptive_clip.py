"adaptive_clip: the split of the noise, the law of the count, where the clip goes, resume, audit."

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import stats
from tables import tabled
from torch import nn

from dpcomm import Deployment, train
from dpcomm.core.random import seed_tree
from dpcomm.mechanisms.contract import mechanism
from dpcomm.mechanisms.gaussian import Gaussian
from dpcomm.mechanisms.quantised import Quantised
from dpcomm.training.adaptive_clip import AdaptiveClip, Moving, in_rows
from dpcomm.training.round import Sums

D, N = 4, 12


def clients():
    rng = seed_tree(0, "clients")
    made = []
    for _ in range(N):
        x = torch.from_numpy(rng.normal(size=(6, 3)).astype(np.float32))
        made.append((x, x.sum(1, keepdim=True)))
    return made


def run(adaptive, rounds=6, clip=5.0, s=None, make=Gaussian, **more):
    net = nn.Linear(3, 1)
    nn.init.zeros_(net.weight), nn.init.zeros_(net.bias)
    s = s or Deployment(N, 6, rounds, delta=1e-3)
    given = dict(loss=nn.functional.mse_loss, test=clients()[0], eval_every=1)
    noise = make(clip_norm=clip, sigma=2.0)
    if adaptive is not None:
        given["adaptive"] = adaptive
    return train(net, clients(), noise, s, lr=0.01, server="sgd", **given | more)


@tabled("sigma, count_std, cohort", [(1.0, None, 50), (3.0, None, 10), (0.5, 0.3, 7)])
def test_updates_and_count_together_have_the_noise_of_the_run(sigma, count_std, cohort):
    adaptive = AdaptiveClip(count_std=count_std)
    std = adaptive.noise(sigma, cohort)
    split = adaptive.split(Gaussian(2.0, sigma), cohort, clip=0.1)
    both = split.sigma**-2 + (2 * std) ** -2
    assert sigma**-2 * (1 - 1e-8) < both < sigma**-2
    assert split.clip_norm == 0.1 and split.exact


@tabled("std", [0.8, 5.0])
def test_a_count_has_its_noise_and_no_bias(std):
    n, rng = 40_000, seed_tree(0, "count")
    drawn = AdaptiveClip(count_std=std).noised(np.full(n, 2.5), 1.0, 8, rng) - 2.5
    low, high = stats.chi2.interval(1 - 1e-6, n)
    assert low < (drawn**2).sum() / std**2 < high
    assert abs(drawn.mean()) < 5 * std / math.sqrt(n)


@tabled("share, way", [(0.0, 1), (0.5, 0), (1.0, -1)])
def test_the_clip_moves_toward_the_quantile(share, way):
    adaptive = AdaptiveClip(quantile=0.5, rate=0.2)
    moved = adaptive.moved(2.0, 10 * (share - 0.5), 10)
    assert moved == pytest.approx(2.0 * math.exp(0.1 * way))
    assert AdaptiveClip(rate=1e9).moved(2.0, -5, 10) == pytest.approx(2 * math.exp(7))


def test_a_sum_says_last_how_many_are_below_the_clip():
    u = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [0.6, 0.79]])
    streams = [seed_tree(i) for i in range(4)]
    moving = Moving(AdaptiveClip(), Gaussian(1.0, 1.0, exact=False), 4)
    sums = Sums(moving.mechanism, streams, moving=moving)
    found = sums(u, slice(0, 4))
    assert found.tolist() == pytest.approx([1.5, 1.99, 1.0])
    weighted = dataclasses.replace(sums, share=np.array([0.5, 1, 1, 1]))
    assert weighted(u, slice(0, 4))[-1] == 1.0, "weights change no count"


@tabled("make", [Gaussian, Quantised])
def test_the_clip_moves_in_training_and_epsilon_does_not(make):
    still = run(None, make=make)
    moves = run(AdaptiveClip(rate=1.0, count_std=8.0), make=make)
    assert [h["eps"] for h in still.history] == [h["eps"] for h in moves.history]
    clips = [h["clip"] for h in moves.history]
    assert len(set(clips)) == len(clips) == 6 and "clip" not in still.history[0]
    sent = [made.ledger.uplink_bits for made in (still, moves)]
    assert 0 < sent[1] - sent[0] <= 32 * 6 * N, "an entry more a message"
    assert not torch.equal(still.w, moves.w)


def test_workers_and_interruptions_change_nothing(tmp_path):
    adaptive = AdaptiveClip(rate=1.0)
    whole = run(adaptive)
    assert torch.equal(whole.w, run(adaptive, workers=3).w)
    kept = dict(checkpoint=tmp_path / "run.pt", max_seconds=0, resume=True)
    for _ in range(6):
        pieces = run(adaptive, **kept)
    assert pieces.finished and torch.equal(whole.w, pieces.w)
    assert pieces.clip == whole.clip
    for other in (AdaptiveClip(rate=0.5), None):
        with pytest.raises(ValueError, match="a different adaptive"):
            run(other, **kept)


def test_a_cohort_of_nobody_still_moves_the_clip():
    s = Deployment(N, 1, 12, delta=1e-3)
    moved = run(AdaptiveClip(rate=1.0), rounds=12, s=s)
    clips = [h["clip"] for h in moved.history]
    assert len(set(clips)) == 12 and np.isfinite(clips).all()


RINGS = ("ddgauss", "skellam")
SUMMED = Deployment(N, N, 6, delta=1e-3, sampling="none", trust="secagg")


def ring(name, **given):
    return mechanism(name, n_clients=N, **dict(clip_norm=5.0, sigma=2.0) | given)


@tabled("name, sigma, std", [("ddgauss", 1.0, 0.6), ("skellam", 3.0, None)])
def test_rows_with_a_count_are_no_longer_than_the_clip(name, sigma, std):
    adaptive, made = AdaptiveClip(count_std=std), ring(name, sigma=sigma)
    a, c = adaptive.parts(sigma, N)
    assert 1 - 1e-8 < a**2 + c**2 / 4 < 1
    assert adaptive.split(made, N, clip=0.1) == dataclasses.replace(made, clip_norm=0.1)
    u = torch.tensor([[30.0, 40.0], [0.3, 0.4], [0.0, 0.0]]).double()
    below = torch.tensor([-0.5, 0.5, 0.5]).double()
    rows = in_rows(made, u, below, (a, c))
    assert rows.norm(dim=1).max() <= 5.0 and rows[0].norm() > 5.0 * (1 - 1e-6)
    assert torch.allclose(rows[:, 2], c * 5.0 * below)
    assert torch.allclose(rows[1, :2], a * u[1])


@tabled("name", RINGS)
def test_a_sum_of_rows_gives_updates_and_count_with_their_noises(name):
    made, adaptive = ring(name), AdaptiveClip(count_std=1.5)
    parts, z = adaptive.parts(2.0, N), 2.0
    u = torch.tensor([[3.0, 4.0, 0.0], [30.0, 40.0, 0.0], [0.3, 0.0, 0.0]])
    streams = [seed_tree(i) for i in range(3)]
    moving = Moving(adaptive, made, N)
    total = Sums(made, streams, moving=moving)(u, slice(0, 3))
    assert total[:3] / parts[0] == pytest.approx([6.3, 8.0, 0.0], rel=1e-6)
    assert total[3] / (parts[1] * 5.0) == pytest.approx(0.5)
    rng, n = seed_tree(0, "shares"), 4_000
    noise = torch.stack([made.noise(4, N, rng) for _ in range(n)]).double().numpy()
    said = (z * 5.0 / parts[0], 1.5)
    for drawn, std in zip((noise[:, 0] / parts[0], noise[:, 3] / (parts[1] * 5)), said):
        low, high = stats.chi2.interval(1 - 1e-6, n)
        assert low < (drawn**2).sum() / std**2 < high


def test_what_cannot_move_is_refused():
    s = Deployment(N, 6, 3, delta=1e-3, trust="secagg", sampling="fixed")
    for name, given in (("signsgd", {}), ("gaussian", dict(local=True))):
        noise = mechanism(name, clip_norm=1.0, sigma=2.0, **given)
        with pytest.raises(ValueError, match="use gaussian or quantised"):
            run(AdaptiveClip(), s=s, make=lambda **_: noise)
    with pytest.raises(ValueError, match="adaptive need advance=federated.one_round"):
        run(AdaptiveClip(), advance=lambda *a, **k: 0.0)


@tabled("name", RINGS)
def test_under_secure_sums_the_clip_moves_and_the_promise_is_of_one_entry_more(name):
    def make(clip_norm, sigma):
        return ring(name, clip_norm=clip_norm, sigma=sigma)

    adaptive = AdaptiveClip(rate=1.0, count_std=3.0)
    moves = run(adaptive, s=SUMMED, make=make, clip=1e3)
    clips = [h["clip"] for h in moves.history]
    assert len(set(clips)) == 6 and clips[-1] < 0.2 * 1e3
    wide = dataclasses.replace(SUMMED, d=D + 1)
    assert moves.history[-1]["eps"] == wide.guarantee(make(1e3, 2.0)).eps
    still = run(None, s=SUMMED, make=make, clip=1e3)
    less = dataclasses.replace(SUMMED, d=D).guarantee(make(1e3, 2.0)).eps
    assert still.history[-1]["eps"] == less != moves.history[-1]["eps"]
    again = run(adaptive, s=SUMMED, make=make, clip=1e3, workers=3)
    assert torch.equal(moves.w, again.w)
