"sqSGD: the public subset, the rotation, the range, and what clients remember."

import itertools
import math

import numpy as np
import pytest
import torch
from laws import ALARM, fit, radius
from scipy.linalg import hadamard
from tables import tabled

from dpcomm.core.chance import Insecure, seed_tree
from dpcomm.mechanisms import privquant, sqsgd
from dpcomm.mechanisms.sqsgd import SqSgd


def vectors(n, d, *path):
    return torch.from_numpy(seed_tree(0, "sqsgd", *path).standard_normal((n, d)))


@tabled(
    "d, fraction, down, padded",
    [
        (119_850, 0.005, 512, 599),
        (1_722_224, 0.005, 8192, 8611),
        (61_706, 0.005, 256, 308),
        (64, 1.0, 64, 64),
        (7, 1.0, 4, 7),
        (1, 1.0, 1, 1),
        (1000, 0.001, 1, 1),
        (10, 0.3, 2, 3),
    ],
)
def test_the_number_of_coordinates(d, fraction, down, padded):
    assert (
        sqsgd.subset_size(d, fraction) == down
        and sqsgd.subset_size(d, fraction, padded=True) == padded
    )
    assert SqSgd(fraction=fraction, rule="best").size(d) == down
    assert (
        SqSgd(fraction=fraction, rule="best", padded=True).size(d)
        == sqsgd.padded_size(padded)
        == 2 ** math.ceil(math.log2(padded))
    )


def test_too_small_a_ratio_is_refused_with_the_smallest_that_works():
    with pytest.raises(
        ValueError,
        match=r"r d = 0\.5 is below one coordinate: raise fraction to 0\.01 or more",
    ):
        sqsgd.subset_size(100, 0.005)
    assert sqsgd.subset_size(100, 0.01) == 1


def test_padding_is_counted():
    assert (
        SqSgd(fraction=0.3, padded=True, rule="best").bits(10).payload == 16
        and SqSgd(fraction=0.3, rule="best").bits(10).payload == 8
    )  # 4 and 2 numbers of 4 bits, whole bytes
    bits = SqSgd().bits(119_850)
    assert (bits.payload, bits.shared_randomness) == (512 * 4, 0)


def test_the_subset_is_public_new_in_every_round_and_uniform():
    d, rounds = 20, 2000
    mechanism = SqSgd(fraction=0.2)
    drawn = [sqsgd.subset(mechanism.at(t), d) for t in range(rounds)]
    assert all(len(set(at.tolist())) == 4 and (at.diff() > 0).all() for at in drawn)
    assert torch.equal(
        drawn[7], sqsgd.subset(SqSgd(fraction=0.2, round=7), d)
    ) and not torch.equal(drawn[7], drawn[8])
    assert not torch.equal(sqsgd.subset(SqSgd(fraction=0.2, seed=1), d), drawn[0])
    pairs = [
        tuple(at.tolist())
        for at in (sqsgd.subset(SqSgd(fraction=0.5, round=t), 4) for t in range(rounds))
    ]
    assert (
        fit(
            [pairs.count(pair) for pair in itertools.combinations(range(4), 2)],
            np.full(6, 1 / 6),
        )
        > ALARM
    )


@tabled("d", [1, 2, 5, 8, 64])
def test_the_rotation_is_the_orthogonal_matrix_of_the_paper(d):
    x, size = vectors(3, d, "rotation"), sqsgd.padded_size(d)
    matrix = torch.from_numpy(hadamard(size) / math.sqrt(size)) @ torch.diag(
        sqsgd.signs(5, size)
    )
    wide = torch.nn.functional.pad(x, (0, size - d))
    assert torch.allclose(
        sqsgd.rotate(x, 5), wide @ matrix.T, atol=1e-12
    ) and torch.allclose(sqsgd.rotate(x, 5).norm(dim=1), x.norm(dim=1))
    assert torch.allclose(sqsgd.unrotate(sqsgd.rotate(x, 5), 5, d), x, atol=1e-12)


def test_how_often_the_tight_range_cuts_stays_below_its_bound():
    size = 8
    x = vectors(5, size, "span").numpy()
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    signs = np.array(list(itertools.product((-1, 1), repeat=size)))
    rotated = np.einsum("ij,sj,nj->sni", hadamard(size) / math.sqrt(size), signs, x)
    bound, limit = sqsgd.cut_probability(size)
    cut = (np.abs(rotated) > sqsgd.span(1.0, size, "tight")).mean((0, 2))
    assert 0 < cut.max() <= bound and bound == pytest.approx(2 / size) and limit < bound
    assert (
        sqsgd.span(3.0, size) == 3.0
        and sqsgd.span(1.0, 1, "tight") == sqsgd.span(1.0, 2, "tight") == 1.0
    )
    wide = seed_tree(0, "gauss").standard_normal((4000, 256))
    wide /= np.linalg.norm(wide, axis=1, keepdims=True)
    share = (np.abs(wide) > sqsgd.span(1.0, 256, "tight")).mean()
    assert (
        abs(share - sqsgd.cut_probability(256)[1]) < radius(0.03, wide.size) + 2e-4
    )  # the limit of large D is off by about 1/D of itself


@tabled("span", sqsgd.SPANS)
@tabled("rotated", [True, False])
@tabled("projected", sqsgd.PROJECTED)
def test_whatever_has_gathered_stays_in_the_range(span, rotated, projected):
    mechanism = SqSgd(
        bound=2.0, fraction=0.5, span=span, rotated=rotated, projected=projected
    )
    for scale in (1e-20, 1.0, 1e20):
        x = sqsgd.prepare(mechanism, scale * vectors(4, 32, "range"), 64)
        assert np.abs(x).max() <= mechanism.limit(64) and (
            projected == "gradient"
            or np.linalg.norm(x, axis=1).max() <= 2.0 * (1 + 1e-12)
        )
        privquant.quantise(x, mechanism.limit(64), 16, seed_tree(0))
    inside = 0.1 * vectors(1, 32, "inside")
    assert torch.allclose(
        sqsgd.restore(
            SqSgd(bound=2.0, fraction=0.5),
            sqsgd.prepare(SqSgd(bound=2.0, fraction=0.5), inside, 64),
            64,
        ),
        inside,
        atol=1e-12,
    )


def echo(mechanism, rows, d, rng):
    return rows.double()


@pytest.mark.parametrize("projected, norm", [("gradient", 10.0), ("sum", 50.0)])
def test_either_the_new_gradient_or_the_sum_is_projected(monkeypatch, projected, norm):
    monkeypatch.setattr(
        sqsgd,
        "send",
        lambda mechanism, rows, d, rng: torch.from_numpy(
            sqsgd.prepare(mechanism, rows, d)
        ),
    )
    mechanism = SqSgd(fraction=1.0, rotated=False, projected=projected)
    u = torch.full((1, 4), 25.0)
    out, _ = mechanism.remember(mechanism.memory(1, 4), u, [None])
    assert float(out.norm()) == pytest.approx(10.0)
    memory = torch.full((1, 1, 4), 100.0)
    out, _ = mechanism.remember(memory, u, [None])
    assert float(out.norm()) == pytest.approx(
        10.0 if projected == "sum" else 20.0
    )  # a sum that is not projected: every entry is cut to 10
    kept = SqSgd(fraction=0.5, rotated=False, projected=projected).remember(
        torch.zeros(1, 1, 4), u, [None]
    )[1]
    assert float(kept.norm()) == pytest.approx(norm / 2**0.5)


@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_what_is_not_sent_now_is_sent_later(monkeypatch, beta):
    monkeypatch.setattr(sqsgd, "send", echo)
    d, n = 30, 3
    mechanism = SqSgd(fraction=0.3, beta=beta)
    memory = torch.zeros(n, 1, d)
    sent = torch.zeros(n, d)
    given = torch.zeros(n, d)
    for t in range(40):
        u = vectors(n, d, "stream", t).float()
        at = sqsgd.subset(mechanism.at(t), d)
        out, memory = mechanism.at(t).remember(memory, u, [None] * n)
        lost = (1 - beta) * u[:, at]  # beta < 1 gives part of the newest gradient up
        sent, given = sent + out, given + u
        given[:, at] -= lost
        assert (out != 0).sum() == n * len(at) and not memory[:, :, at].any()
    assert torch.allclose(sent + memory[:, 0], given, atol=1e-4)


def test_momentum_is_corrected_and_masked(monkeypatch):
    monkeypatch.setattr(sqsgd, "send", echo)
    mechanism, d = SqSgd(fraction=0.5, momentum=0.9), 8
    memory = mechanism.memory(1, d)
    assert (
        memory.shape == (1, 2, d)
        and SqSgd().memory(2, d).shape == (2, 1, d)
        and SqSgd(residuals=False).memory(2, d) is None
    )
    residual, velocity = torch.zeros(d), torch.zeros(d)
    for t in range(6):
        u, at = vectors(1, d, "momentum", t).float(), sqsgd.subset(mechanism.at(t), d)
        out, memory = mechanism.at(t).remember(memory, u, [None])
        velocity = 0.9 * velocity + u[0]
        residual = residual + velocity
        assert torch.allclose(out[0, at], residual[at], atol=1e-6)
        residual[at], velocity[at] = 0.0, 0.0
        assert torch.allclose(memory[0], torch.stack([residual, velocity]), atol=1e-6)


def test_alpha_is_the_share_that_is_kept(monkeypatch):
    monkeypatch.setattr(sqsgd, "send", echo)
    mechanism, u = SqSgd(fraction=0.5, alpha=0.25), torch.ones(1, 8)
    memory = mechanism.remember(mechanism.memory(1, 8), u, [None])[1]
    rest = [j for j in range(8) if j not in sqsgd.subset(mechanism, 8)]
    assert memory[0, 0, rest].tolist() == [0.25] * len(rest)


def test_the_mask_needs_its_factor_only_without_memory():
    """Without memory the estimate times d / d_hat has the mean u; with memory the
    message has the mean of what was gathered, without a factor.
    """
    d, n = 4, 40_000
    mechanism = SqSgd(bound=1.0, levels=4, eps=3.0, fraction=0.5)
    u = torch.tensor([0.4, -0.3, 0.2, 0.1]).expand(n, d)
    std = float(mechanism.moments(u[:1])[1].max().sqrt())
    rounds = [mechanism.at(t) for t in range(60)]
    mean = np.mean(
        [
            m.simulate(u[:1000], seed_tree(0, "scale", m.round))
            .double()
            .mean(0)
            .numpy()
            for m in rounds
        ],
        0,
    )
    share = np.mean([[j in sqsgd.subset(m, d) for j in range(d)] for m in rounds], 0)
    assert np.abs(mean - 2 * share * u[0].numpy()).max() < radius(std, 60_000, d)
    out, _ = mechanism.remember(mechanism.memory(n, d), u.clone(), seed_tree(0, "sent"))
    at = sqsgd.subset(mechanism, d)
    assert (out.double().mean(0)[at] - u[0, at]).abs().max() < radius(std, n, 2)


def test_the_guarantee_is_of_the_size_that_is_sent():
    mechanism = SqSgd()
    g = mechanism.guarantee(rounds=9400, d=119_850)
    assert (
        g.eps == pytest.approx(9400 * privquant.calibrate(512, 16, 400.0).actual_eps)
        and g.eps <= mechanism.guarantee(rounds=9400).eps == 9400 * 400
    )
    assert (g.relation, g.trust, g.unit, g.scope) == (
        "local",
        "local",
        "client",
        "total",
    )


def test_an_infeasible_budget_names_the_smallest_that_works():
    with pytest.raises(ValueError, match="raise eps to it"):
        SqSgd(kappa_min=0).calibration(119_850)
    smallest = privquant.smallest_eps(512, 16, 0)
    assert (
        SqSgd(kappa_min=0, eps=smallest * 1.0001).calibration(119_850).kappa >= 0
        and smallest > 400
    )


def test_nan_is_refused_before_it_is_remembered():
    mechanism = SqSgd(fraction=0.5, rule="best", eps=2.0)
    with pytest.raises(ValueError, match="nan"):
        mechanism.remember(
            mechanism.memory(1, 4), torch.full((1, 4), math.nan), [seed_tree(0)]
        )


def test_the_audited_plays_tell_the_worlds_apart():
    mechanism = SqSgd(bound=1.0, levels=2, eps=2.0, fraction=1.0, span="tight")
    scores = [
        mechanism.play("local", present, 4000, seed_tree(0, "play", int(present)))[
            "projection"
        ]
        for present in (True, False)
    ]
    assert scores[0].mean() - scores[1].mean() > 10 * np.std(scores[0]) / math.sqrt(
        4000
    )
    assert {len(settings) for settings in sqsgd.AUDITED} == {3} and mechanism.encode(
        torch.ones(2), Insecure(3)
    ) == mechanism.encode(torch.ones(2), Insecure(3))
    assert torch.equal(
        mechanism.decode(mechanism.encode(torch.ones(2), Insecure(3))),
        mechanism.decode(mechanism.encode(torch.ones(2), Insecure(3))),
    )
    assert (
        mechanism.simulate(torch.ones(1, 2), seed_tree(0)).shape
        == mechanism.moments(torch.ones(1, 2))[0].shape
    )
    assert mechanism.guarantee().eps == 2.0
