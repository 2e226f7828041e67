"""Gaussian and quantised: exact noise on a public grid, floats for simulation, and what
either claims.
"""

import functools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from laws import ALARM
from tables import tabled

from dpcomm.core.random import Insecure, normal, private_stream, seed_tree
from dpcomm.core.vectors import clip_l2
from dpcomm.mechanisms import noisy_sums
from dpcomm.mechanisms.gaussian import Gaussian
from dpcomm.mechanisms.noisy_sums import noisy_sum_guarantee
from dpcomm.mechanisms.quantised import Quantised
from dpcomm.privacy import accounting, audit
from dpcomm.privacy.fixed_size_accountant import fixed_size_epsilon
from dpcomm.secagg import ring

ROWS = torch.tensor([[0.6, 0.0, -0.3], [3.0, -4.0, 12.0], [0.0, 0.0, 0.0]])


# ---- lengths, in whole numbers


def adversarial(d):
    "Rows on which a clip in floats leaves a length that is too long, or nearly."
    rng = seed_tree(0, "adversarial", d)
    rows = [rng.standard_normal(d) * scale for scale in (1e-3, 1.0, 1e3, 1e30)]
    unit = [row / np.linalg.norm(row) for row in rows[:2]]
    rows += [np.nextafter(x * c, np.inf) for x in unit for c in (0.1, 1 / 3, 1.0)]
    rows += [np.eye(d)[0] * s for s in (0.1, 1 / 3, 7.0, 3e38)]
    rows += [np.full(d, 1.0), np.r_[3.0, 4.0, np.zeros(d - 2)], np.full(d, 1e-40)]
    rows += [np.r_[np.full(d - 1, 1e-20), 1.0]]
    return torch.from_numpy(np.array(rows).astype(np.float32))


def square(row, scale=1):
    "The squared length, exactly."
    return sum(Fraction(float(v)) ** 2 for v in row) * Fraction(scale) ** 2


@tabled("clip", [0.1, 1 / 3, 1.0, 0.0123456789, 7e5])
@tabled("d", [2, 5, 1000])
def test_no_row_is_longer_than_the_clip_by_a_single_bit(clip, d):
    scale = noisy_sums.grid(clip, 1.0, 1)
    z = ring.clip_to_grid(adversarial(d), clip, scale)
    for row, float_row in zip(z, clip_l2(adversarial(d), clip).double()):
        assert square(row, scale) <= Fraction(clip) ** 2
        assert np.abs(row * scale - float_row.numpy()).max() <= scale + 2e-6 * clip


# ---- exact noise


@tabled("sigma", [0.05, 1.0, 1e6])
def test_a_local_message_is_ring_elements_and_its_values_whole_steps(sigma):
    m = Gaussian(0.3, sigma, local=True)
    message = m.encode(ROWS[0], Insecure(3))
    assert len(message.payload) == 12 and math.log2(m.scale).is_integer()
    z = np.frombuffer(message.payload, "<u4").astype(np.int64)
    rng = [private_stream(Insecure(3))]
    want = m.noisy_steps(ROWS[:1], rng)[0]
    assert np.array_equal(noisy_sums.RING.lift(z), want)
    assert m.decode(message).tolist() == (want * m.scale).astype(np.float32).tolist()


@tabled("make", [Gaussian, Quantised])
def test_a_noisy_sum_is_whole_steps_and_believes_nobody(make):
    m, huge = make(0.3, 1.0), torch.tensor([[1e30, 0.0]])
    total = 4 * m.aggregate(ROWS.double() * 1e30, 4.0, seed_tree(0)) / m.scale
    assert torch.equal(total, total.round())
    far, none = (m.aggregate(u, 1.0, seed_tree(1)) for u in (huge, 0 * huge))
    far = (far - none).tolist()
    assert far[1] == 0 and 0.3 * (1 - 1e-5) < far[0] <= 0.3 * (1 + 1e-6)


def test_several_rounds_at_once_have_noise_of_their_own():
    for m in (
        Gaussian(1.0, 1.0),
        Gaussian(1.0, 1.0, exact=False),
        Gaussian(1.0, 1.0, True),
        Quantised(1.0, 1.0, exact=False),
    ):
        out = m.aggregate(ROWS.expand(5, 3, 3), 3.0, seed_tree(0))
        assert out.shape == (5, 3)
        assert (len(out.unique(dim=0)) == 5) == (not getattr(m, "local", False))


def test_exact_noise_has_the_promised_deviation():
    n, rows = 400_000, torch.zeros(1, 400_000)
    m = Gaussian(2.0, 1.5)
    z = m.noise_steps(rows.shape, seed_tree(0)) * m.scale
    assert abs(z.std() - 3.0) < 6 * 3.0 / (2 * n) ** 0.5
    assert abs(z.mean()) < 6 * 3.0 / n**0.5


# ---- floats, bit for bit what they were


@tabled("local", [False, True])
def test_floats_are_clip_plus_normal_numbers(local):
    m, clipped = Gaussian(0.3, 2.0, local, exact=False), clip_l2(ROWS, 0.3)
    want = clipped + 0.6 * local * normal(ROWS.shape, seed_tree(5))
    assert torch.equal(m.simulate(ROWS, seed_tree(5)), want)
    noise = 0.0 if local else 0.6 / 7 * normal((3,), seed_tree(6))
    mean = m.aggregate(want, 7, seed_tree(6))
    torch.testing.assert_close(mean, want.sum(0) / 7 + noise, rtol=1e-6, atol=1e-7)
    row = clipped[:1] + 0.6 * local * normal((1, 3), private_stream(Insecure(1)))
    data = row[0].numpy().astype("<f4").tobytes()
    assert m.encode(ROWS[0], Insecure(1)).payload == data


# ---- what is claimed


def law(steps, shift, wide):
    x = np.arange(-wide, wide + 1)
    p = np.exp(-(((x - shift) / steps) ** 2) / 2)
    return p / p.sum()


@tabled("order", [2, 3, 17])
def test_sampled_moments_at_whole_orders_are_the_normal_ones(order):
    "The mixture's moment, enumerated at 1.5 steps a deviation, is the accountant's closed form."
    steps, shift, q = 1.5, 2, 0.1
    p, base = law(steps, shift, 45), law(steps, 0, 45)
    ratio = np.divide(p, base, out=np.zeros_like(p), where=base > 0)
    seen = (base * (1 - q + q * ratio) ** order).sum()
    known = accounting.rdp_subsampled_gaussian(np.array([order]), steps / shift, q)[0]
    assert math.log(seen) / (order - 1) == pytest.approx(known, rel=1e-9)


# ---- single bits


@tabled("sigma", [1.0, 4.0])
@tabled(
    "make, relation",
    [
        (Gaussian, "add-remove"),
        (functools.partial(Gaussian, local=True), "zero-out"),
        (Quantised, "zero-out"),
    ],
)
def test_the_bits_refute_floats_and_leave_whole_numbers(make, relation, sigma):
    "20,000 plays, against the curve and the guarantee."
    for exact in (True, False):
        rng, m = seed_tree(0, "bits", sigma == 1, exact), make(1.0, sigma, exact=exact)
        found = audit.judge_play(m, relation, 20_000, rng)
        assert found.refuted == (not exact), found
        assert exact or (found.attack == "bits" and found.pvalue <= ALARM)


def test_cohorts_of_a_fixed_size_are_accounted():
    "By the bound of normal noise; a PLD sets a hundredth of delta aside for whole steps."
    run = dict(n_clients=1_000, cohort=50, sampling="fixed")
    for relation in ("add-remove", "zero-out", "replace"):
        for kind in ("rdp-classic", "rdp-balle", "pld"):
            known = fixed_size_epsilon(2.0, 0.05, 100, 1e-5, relation, kind)
            how = dict(relation=relation, accountant=kind, **run)
            for exact in (True, False):
                noise = Gaussian(1.0, 2.0, exact=exact)
                made = noise.guarantee(100, 1e-5, **how)
                assert made.eps == known.eps or exact and kind == "pld"
                assert 1 - 1e-14 <= made.eps / known.eps <= 1.001  # rounding apart
                told = made.sampling, made.q, made.rounds, made.relation, made.trust
                assert told == ("fixed", 0.05, 100, relation, "central")
    same = noisy_sum_guarantee(2.0, 1e-5, 0.05, 100, "fixed", "replace", "rdp-balle")
    assert (
        same.eps == fixed_size_epsilon(2.0, 0.05, 100, 1e-5, accountant="rdp-balle").eps
    )
    assert noise.guarantee(100, 1e-5, note="told", **run).note.count("told") == 1
    with pytest.raises(ValueError, match="sampling is"):
        noise.guarantee(100, 1e-5, **run | dict(sampling="replacement"))
    with pytest.raises(ValueError, match="sampling is"):
        Gaussian(1.0, 2.0, local=True).guarantee(100, 1e-5, **run)


def test_a_cohort_is_not_ignored_where_no_draw_amplifies():
    "It would be 40 times the noise, without a word."
    m = Gaussian(1.0, 2.0)
    with pytest.raises(
        ValueError, match="cohort is 50 of 5000 clients and sampling is"
    ):
        m.guarantee(800, 1e-6, n_clients=5000, cohort=50)
    everyone = m.guarantee(800, 1e-6, n_clients=50, cohort=50)
    assert everyone.eps == m.guarantee(800, 1e-6).eps
