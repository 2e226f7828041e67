"""Noise of a sum, from its parts: a server's, clients' shares, and roundings to whole levels.

What every mechanism must do is in test_conformance. Statistical tests have false-alarm rate
1e-6 and fixed seeds.
"""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import ALARM, drawn, radius
from tables import tabled

from dpcomm.core.random import Insecure, normal, private_stream, seed_tree
from dpcomm.core.vectors import clip_l2
from dpcomm.mechanisms import noisy_sums, quantised
from dpcomm.mechanisms.gaussian import Gaussian
from dpcomm.mechanisms.quantised import Quantised
from dpcomm.mechanisms.topk import TopK
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
    noise = [Gaussian(1.0, 1.0, exact=exact) for exact in (True, False)]
    for m in (*noise, Gaussian(1.0, 1.0, True), Quantised(1.0, 1.0, exact=False)):
        out = m.aggregate(ROWS.expand(5, 3, 3), 3.0, seed_tree(0))
        assert out.shape == (5, 3)
        assert (len(out.unique(dim=0)) == 5) == (not getattr(m, "local", False))


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
@tabled("make, local", [(Gaussian, {}), (Gaussian, dict(local=True)), (Quantised, {})])
def test_the_bits_refute_floats_and_leave_whole_numbers(make, local, sigma):
    "20,000 plays, against the curve and the guarantee."
    relation = "add-remove" if make is Gaussian and not local else "zero-out"
    for exact in (True, False):
        rng = seed_tree(0, "bits", sigma == 1, exact)
        m = make(1.0, sigma, exact=exact, **local)
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
    assert noise.guarantee(100, 1e-5, note="told", **run).note.count("told") == 1
    with pytest.raises(ValueError, match="sampling is"):
        noise.guarantee(100, 1e-5, **run | dict(sampling="replacement"))
    with pytest.raises(ValueError, match="sampling is"):
        Gaussian(1.0, 2.0, local=True).guarantee(100, 1e-5, **run)


def test_a_cohort_is_not_ignored_where_no_draw_amplifies():
    "It would be 40 times the noise, without a word."
    m = Gaussian(1.0, 2.0)
    with pytest.raises(ValueError, match="cohort is 50 of 5000 clients and sampling"):
        m.guarantee(800, 1e-6, n_clients=5000, cohort=50)
    everyone = m.guarantee(800, 1e-6, n_clients=50, cohort=50)
    assert everyone.eps == m.guarantee(800, 1e-6).eps


# ---- clients that add shares


MECH = TopK(1.0, 0.5, 1.5, 20, tolerance=0.25)


def test_honest_shares_keep_the_promise():
    for tolerance in (0.0, 0.1, 0.5):
        share = noisy_sums.share_std(2.0, 1.5, 40, tolerance)
        assert math.sqrt((1 - tolerance) * 40) * share == pytest.approx(3.0)


@drawn
@given(
    st.floats(1e-3, 1e3), st.floats(0.01, 50), st.integers(1, 10_000), st.floats(0, 0.9)
)
def test_the_noisy_sum_fits_the_ring_and_the_grid_is_no_coarser_than_needed(
    clip, sigma, n, tolerance
):
    made = clip, sigma, n, tolerance
    scale = noisy_sums.grid(*made)
    top = n * clip + noisy_sums.TAILS * math.sqrt(n) * noisy_sums.share_std(*made)
    assert top <= scale * (noisy_sums.RING.modulus // 2 - 1) < 2.0001 * top
    assert math.log2(scale).is_integer()


def test_shares_of_few_steps_are_simulated_as_whole_steps():
    plain, rows = dataclasses.replace(MECH, sigma=None), torch.full((400, 50), 0.1)
    assert torch.equal(plain.simulate(rows, None), rows)
    coarse = TopK(1.0, 1.0, 1.0, 520_000)
    rows = coarse.simulate(rows, [seed_tree(i) for i in range(400)])
    steps, share = rows.double().numpy() / coarse.scale, coarse.share / coarse.scale
    assert np.allclose(steps, np.round(steps), atol=1e-3) and 4 <= share < 8
    noise = steps - np.trunc(0.1 / coarse.scale)
    assert abs(noise.mean()) <= radius(share, noise.size, 2)
    off = abs(noise.var() - share**2)
    assert off <= radius(math.sqrt(2) * share**2, noise.size, 2) + 1e-3 * share**2
    # FL-TOP's own shares are drawn as normal numbers
    assert MECH.share >= noisy_sums.FINE * MECH.scale


def test_the_guarantee_is_the_gaussian_s_and_says_against_whom():
    known = MECH.guarantee(rounds=3, delta=1e-5)
    normal = accounting.gaussian_eps(1.5, 1e-5, 3)
    assert known.eps == pytest.approx(normal, rel=1e-9)
    classic = MECH.guarantee(rounds=3, delta=1e-5, accountant="rdp-classic").eps
    assert classic == accounting.gaussian_guarantee(1.5, 1e-5, 1.0, 3).eps > known.eps
    names = (known.trust, known.sampling, known.relation)
    assert names == ("secagg", "none", "zero-out")
    drawn = dict(rounds=200, delta=1e-5, n_clients=6000, cohort=100, sampling="poisson")
    hidden = MECH.guarantee(**drawn)
    assert hidden.eps < known.eps and hidden.trust == "central"
    assert noisy_sums.HIDDEN in hidden.note
    orders = accounting.INTEGER_ORDERS
    drawn |= dict(orders=orders, accountant="rdp-classic")
    table = TopK(1.0, 1.0, 1.54, 100).guarantee(**drawn)
    assert table.eps == pytest.approx(1.0006, abs=5e-5)
    assert set(MECH.relations) == set(noisy_sums.CLAIMED) == {"zero-out", "replace"}


@tabled("n, sigma", [(10**7, 1.0), (2 * 10**6, 0.5), (10**6, 0.1)])
def test_a_share_that_rounds_to_nothing_is_refused_with_the_bits_that_would_do(
    n, sigma
):
    with pytest.raises(ValueError, match="below 4 the shares do not") as error:
        TopK(1.0, 1.0, sigma, n)
    bits = int(str(error.value).split("a ring of ")[1].split()[0])
    step = 2.0 ** (noisy_sums.RING.bits - bits) * noisy_sums.grid(1.0, sigma, n)
    share = noisy_sums.share_std(1.0, sigma, n)
    assert share / step >= noisy_sums.LEAST > share / (2 * step)


@tabled("kind", [Gaussian, Quantised])
def test_what_a_streaming_server_adds_is_no_longer_than_the_clip(kind):
    "A message far outside the clip counts as one on it, exactly, as in a cohort's sum."
    m, monster = kind(1.0, 2.0), torch.full((7,), 100.0)
    message, scale = m.encode(torch.ones(7), None), m.scale
    object.__setattr__(m, "decode", lambda message: monster)
    code = m.to_summand(message)
    length = int((code.astype(object) ** 2).sum())
    assert length <= (Fraction(m.clip_norm) / Fraction(scale)) ** 2
    assert (code * scale == m.sum_estimates(monster[None]).numpy()).all()
    assert np.linalg.norm(code * scale) > 1 - 1e-6


# ---- whole levels: the length, which is the privacy


settings = st.builds(
    Quantised,
    st.sampled_from([0.01, 1.0, 3.7]),
    st.just(1.0),
    st.integers(2, 16),
    st.sampled_from(quantised.ROUNDINGS),
    st.sampled_from([1.0, 0.7, 1 / 3, 0.0625]),
)


def shapes(d, *path):
    "Unit vectors of several shapes: spread out, normal, heavy-tailed, one entry, half steps."
    rng = seed_tree(0, "shape", d, *path)
    rows = [np.ones(d), rng.standard_normal(d), rng.standard_t(2, d), np.eye(1, d)[0]]
    rows += [np.sign(rng.standard_normal(d)) * (np.arange(d) < (d + 1) // 2)]
    unit = np.stack(rows) / np.linalg.norm(rows, axis=1, keepdims=True)
    return torch.from_numpy(unit.astype(np.float32))


dimensions = st.sampled_from([1, 2, 5, 40, 300])


@drawn
@given(settings, dimensions, st.sampled_from([0.3, 1.0, 1.0000001, 7.0, 1e20]))
def test_no_message_is_longer_than_the_clip(m, d, size):
    u, streams = shapes(d) * (size * m.clip_norm), [seed_tree(1, i) for i in range(5)]
    z, M = m.whole(u, streams), m.longest(d)
    assert z.dtype == torch.int64 and int(z.abs().max()) <= m.levels
    # whole numbers, exactly
    assert max(sum(int(v) ** 2 for v in row) for row in z) <= M
    assert m.step(d) * math.sqrt(M) == pytest.approx(m.clip_norm, rel=1e-15)


def test_a_longer_rounding_is_drawn_again(monkeypatch):
    "With the chance of redrawing raised to 0.9, many are; none that is sent is too long."
    monkeypatch.setattr(quantised, "REDRAWN", 0.9)
    m, u = Quantised(1.0, 1.0, 3, "random"), torch.full((3000, 30), 30**-0.5)
    z, M = m.whole(u, seed_tree(0, "redrawn")), m.longest(30)
    assert (z.square().sum(1) <= M).all()
    up = float(m.in_steps(u[:1])[0, 0] % 1)
    free = np.random.default_rng(0).binomial(30, up, 3000)
    assert (free > M).any(), "some would have been too long"


# ---- roundings


def test_toward_zero_by_hand():
    m = Quantised(1.0, 1.0, 3)  # L = 3
    u = torch.tensor([[0.9, -0.34, 0.2], [2.0, 0.0, 0.0], [-0.3333, 0.3334, -0.6667]])
    assert m.whole(u, None).tolist() == [[2, -1, 0], [3, 0, 0], [0, 1, -2]]


@tabled("bits, clip", [(8, 0.01), (8, 0.3), (16, 0.7)])
def test_an_entry_on_the_grid_stays_on_it(bits, clip):
    m = Quantised(clip, 1.0, bits)
    k = torch.arange(-m.levels, m.levels + 1, max(1, m.levels // 100))
    u = (k.double() * m.step(1))[:, None]
    assert torch.equal(m.whole(u, None)[:, 0], k)


def test_the_cut_ends_the_grid():
    u = torch.tensor([[0.9, 0.1, -0.3]])
    for rounding in ("zero", "random"):
        m = Quantised(1.0, 1.0, 8, rounding, 0.25)
        sent = m.simulate(u, seed_tree(0, "cut"))
        assert sent[0].tolist() == pytest.approx([0.25, 0.1, -0.25], abs=0.25 / 127)
        assert sent[0, 0] == -sent[0, 2] == pytest.approx(0.25, rel=5e-3)
