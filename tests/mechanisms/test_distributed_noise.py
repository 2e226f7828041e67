"""summed: shares, grid, ring messages, guarantee and audit of what secure aggregation
sums.
"""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from laws import drawn, radius
from tables import tabled

from dpcomm.core.random import seed_tree
from dpcomm.mechanisms import gaussian, quantised
from dpcomm.mechanisms import noisy_sums as shared
from dpcomm.mechanisms.topk import TopK
from dpcomm.privacy import accounting

MECH = TopK(1.0, 0.5, 1.5, 20, tolerance=0.25)


def test_honest_shares_keep_the_promise():
    for tolerance in (0.0, 0.1, 0.5):
        share = shared.share_std(2.0, 1.5, 40, tolerance)
        assert math.sqrt((1 - tolerance) * 40) * share == pytest.approx(3.0)
    assert MECH.share == shared.share_std(0.5, 1.5, 20, 0.25)
    assert MECH.scale == shared.grid(0.5, 1.5, 20, 0.25)
    assert dataclasses.replace(MECH, sigma=None).share == 0


@drawn
@given(
    some.floats(1e-3, 1e3),
    some.floats(0.01, 50),
    some.integers(1, 10_000),
    some.floats(0, 0.9),
)
def test_the_noisy_sum_fits_the_ring_and_the_grid_is_no_coarser_than_needed(
    clip, sigma, n, tolerance
):
    made = clip, sigma, n, tolerance
    scale = shared.grid(*made)
    top = n * clip + shared.TAILS * math.sqrt(n) * shared.share_std(*made)
    assert top <= scale * (shared.RING.modulus // 2 - 1) < 2.0001 * top
    assert math.log2(scale).is_integer()


def spread(x, std, comparisons=1, slack=0.0):
    "Whether normal numbers around zero have this deviation."
    n, x = x.size, np.asarray(x, float)
    off, most = abs(x.var() - std**2), radius(math.sqrt(2) * std**2, n, comparisons)
    return abs(x.mean()) <= radius(std, n, comparisons) and off <= most + slack


def test_noise_has_the_deviation_of_its_shares():
    rows, plain = torch.zeros(3, 5000), dataclasses.replace(MECH, sigma=None)
    assert torch.equal(plain.simulate(rows, None), rows)
    noisy = MECH.simulate(rows, [seed_tree(i) for i in range(3)])
    assert spread(noisy.numpy(), MECH.share)
    total = MECH.noise(20_000, 20, seed_tree(4)).numpy()
    assert spread(total, math.sqrt(20) * MECH.share)
    coarse = TopK(1.0, 1.0, 1.0, 1_300_000)
    rows = torch.full((400, 50), 0.1)
    rows = coarse.simulate(rows, [seed_tree(i) for i in range(400)])
    steps, share = rows.double().numpy() / coarse.scale, coarse.share / coarse.scale
    assert np.allclose(steps, np.round(steps), atol=1e-3) and 0.5 < share < 2
    centred = steps - np.trunc(0.1 / coarse.scale)
    assert spread(centred, share, 2, 1e-3 * share**2)
    # FL-TOP's own shares are drawn as normal numbers
    assert MECH.share >= shared.FINE * MECH.scale


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
    assert shared.HIDDEN in hidden.note
    orders = accounting.INTEGER_ORDERS
    drawn |= dict(orders=orders, accountant="rdp-classic")
    table = TopK(1.0, 1.0, 1.54, 100).guarantee(**drawn)
    assert table.eps == pytest.approx(1.0006, abs=5e-5)
    assert set(MECH.relations) == set(shared.CLAIMED) == {"zero-out", "replace"}


COARSE = TopK(1.0, 1.0, 1.0, 1_300_000)
COARSEST = TopK(1.0, 1.0, 1.0, 2_000_000)
RUN = dict(rounds=1, delta=1e-5)


@tabled("n, sigma", [(10**7, 1.0), (2 * 10**6, 0.5), (10**6, 0.1)])
def test_a_share_that_rounds_to_nothing_is_refused_with_the_bits_that_would_do(
    n, sigma
):
    with pytest.raises(ValueError, match="below half a step it rounds") as error:
        TopK(1.0, 1.0, sigma, n)
    bits = int(str(error.value).split("a ring of ")[1].split()[0])
    step = 2.0 ** (shared.RING.bits - bits) * shared.grid(1.0, sigma, n)
    share = shared.share_std(1.0, sigma, n)
    assert share / step >= 0.5 > share / (2 * step)


def test_coarse_shares_are_paid_for():
    fine, coarse = TopK(1.0, 1.0, 1.54, 100), COARSE
    assert fine.counted == fine.sigma
    for n, m in ((1_300_000, coarse), (2_000_000, COARSEST)):
        steps, k = m.share / m.scale, np.arange(1, n)
        sums = np.exp(-2 * np.pi**2 * steps**2 * k / (k + 1)).sum()
        left = (1 + 10 * sums * 2**32 / 2) ** -0.5
        counted = max(left, m.normal_sigma())
        assert steps >= 0.5 and counted * (1 - 1e-3) < m.counted < 1
        assert m.counted <= counted * (1 + 1e-12)
    assert COARSEST.normal_sigma() == 0 and 0.9999 < coarse.normal_sigma() < 1
    orders = accounting.INTEGER_ORDERS
    normal = accounting.gaussian_guarantee(coarse.counted, 1e-5, orders=orders)
    assert coarse.guarantee(**RUN, accountant="rdp-classic").eps == normal.eps
    found = coarse.guarantee(**RUN).eps
    assert found == accounting.gaussian_eps(coarse.normal_sigma(), 1e-5, 1)


@tabled("row", [[7.0, 0.0], [1.0, 1.0], [3.0, 4.0], [0.1, 1e-9]])
def test_a_message_is_no_longer_than_the_clip_by_a_single_bit(row):
    "The sketch is clipped in single precision."
    m = TopK(1.0, 0.1, 1e-6, 1)
    values = m.sketch(torch.tensor([row]))
    z, noise = (
        shared.RING.lift(m.words(v, seed_tree(3))[0]) for v in (values, 0 * values)
    )
    length = sum(int(a) ** 2 for a in z - noise) * Fraction(m.scale) ** 2
    assert length <= Fraction(0.1) ** 2


@tabled("kind", [gaussian.Gaussian, quantised.Quantised])
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
