"""mean_error: each closed form against an integral, an enumeration, or a case that can be
told without it.
"""

import math

import pytest
import torch
from scipy import integrate, stats
from tables import tabled

from dpcomm.core.random import seed_tree
from dpcomm.experiments.dprec import mean_error
from dpcomm.mechanisms import sqkr
from dpcomm.mechanisms.contract import mechanism


def unit(n, d, shift=0.0):
    x = torch.from_numpy(seed_tree(0, "x").standard_normal((n, d))) + shift
    return torch.nn.functional.normalize(x).float()


@tabled("s", [0.0, 0.3, 1.0, 5.0])
def test_a_collision_is_its_integral(s):
    "S_2 = E[p^2 + (1-p)^2] for p a logistic function of a normal of variance 2 s^2."

    def squares(z):
        p = 1 / (1 + math.exp(-s * math.sqrt(2) * z))
        return (p**2 + (1 - p) ** 2) * stats.norm.pdf(z)

    wanted = integrate.quad(squares, -12, 12, epsabs=1e-12)[0]
    assert mean_error.collision(s) == pytest.approx(wanted, abs=1e-9)
    assert 0.5 <= mean_error.collision(s) < 1


def test_away_moves_by_a_vector_of_length_t():
    x = unit(3, 16)
    assert torch.equal(mean_error.away(x, 0.0), x)
    moved = x - mean_error.away(x, -0.7)
    assert moved.norm(dim=1) == pytest.approx([0.7] * 3, rel=1e-5) and moved[0, 0] < 0


def test_an_input_at_the_prior_has_the_priors_noise_alone():
    x = torch.full((10, 4), 0.5)
    assert mean_error.rec_error(x, 1.0, 2.0) == pytest.approx(4 * 2.0**2 / 10)


def test_messages_meet_the_closed_form():
    "DP-REC, averaged over many repetitions of the same inputs."
    x, m = unit(5, 6, 1.0), mechanism("rec", clip_norm=3.0, std=0.8, index_bits=1)
    sent = m.simulate(x.repeat(4000, 1), seed_tree(0, "messages")).view(4000, 5, 6)
    errors = ((sent.mean(1) - x.mean(0)) ** 2).sum(1)
    wanted = mean_error.rec_error(x, 0.0, 0.8)
    assert abs(errors.mean() - wanted) < 5 * errors.std() / 4000**0.5
    kept = 1 - float(mean_error.collision(1 / 0.8))
    errors = ((sent.mean(1) / kept - x.mean(0)) ** 2).sum(1)
    wanted = mean_error.unbiased_error(5, 6, 0.8)
    assert abs(errors.mean() - wanted) < 5 * errors.std() / 4000**0.5


def test_the_undone_bias_costs_pi_d_over_n_at_least():
    floor = (math.pi * 50 - 1) / 100
    errors = [mean_error.unbiased_error(100, 50, std) for std in (0.02, 0.2, 1.0)]
    assert floor < errors[0] < errors[1] < errors[2]
    assert errors[0] == pytest.approx(floor, rel=0.01)


def test_public_randomness_is_an_average_over_the_coordinate():
    "Every coordinate of the frame asked in turn, bias and noise worked out by hand."
    x, m = unit(4, 3), mechanism("sqkr", clip_norm=1.0)
    a, frame, _ = m.represent(x)
    total, size = 0.0, frame.size
    for at in range(size):
        hit = torch.zeros(1, size, dtype=a.dtype)
        hit[0, at] = size
        answer = a.mean(0)[at] * sqkr.synthesise(hit, frame)[0]
        noise = float((m.level**2 / size - a[:, at] ** 2).sum() / 16)
        noise *= float(sqkr.synthesise(hit, frame).norm() ** 2)
        total += float(((answer - x.mean(0)) ** 2).sum()) + noise
    wanted = mean_error.sqkr_error(x, m, public=True)
    assert total / size == pytest.approx(wanted, rel=1e-4)


def test_one_coordinate_is_the_seeds_and_nobody_elses():
    m = mechanism("sqkr", clip_norm=1.0)
    own = [int(mean_error.one_coordinate(m, 20, seed)) for seed in range(30)]
    assert own == [int(mean_error.one_coordinate(m, 20, seed)) for seed in range(30)]
    assert len(set(own)) > 5 and max(own) < sqkr.frame(20, 0).size


@pytest.mark.parametrize("slots, delta, bits", [(1, 1e-5, 21), (1, 12 / 2**8, 9)])
def test_least_bits_is_the_least(slots, delta, bits):
    assert mean_error.least_bits(slots, delta) == bits
    assert 12 * slots / 2**bits < delta <= 12 * slots / 2 ** (bits - 1)
