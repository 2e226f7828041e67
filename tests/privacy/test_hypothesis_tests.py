"""Curves against other routes, and the games that sums share."""

import itertools
import math

import numpy as np
from laws import ALARM, fit, radius
from tables import tabled

from dpcomm.core.random import seed_tree
from dpcomm.mechanisms import ddgauss, mvu, quantised, skellam
from dpcomm.mechanisms.gaussian import Gaussian
from dpcomm.mechanisms.privquant import PrivQuant, log_law
from dpcomm.mechanisms.rec import Rec
from dpcomm.privacy import audit, hypothesis_tests

EPS = np.array([0.0, 0.1, 0.5, 1.0, 2.5, 6.0])


def test_listed_curves_are_the_audit_s_enumeration():
    rng = seed_tree(0, "listed")
    for size in (2, 5, 40):
        p, q = rng.dirichlet(np.ones(size) / 2, 2)
        want = [max(audit.enumerated_delta(p, q, eps)) for eps in EPS]
        found = hypothesis_tests.profile_of_pmfs(p, q, EPS)
        np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-14)
    assert hypothesis_tests.profile_of_pmfs([1, 0], [0, 1], 3.0) == 1
    assert hypothesis_tests.profile_of_pmfs([1], [1], 0.0) == 0


def test_the_sum_game_sends_and_scores():
    seen, way = [], np.array([0.6, 0.8])

    def release(u):
        seen.append(u)
        length = np.clip(np.linalg.norm(u, axis=1, keepdims=True), 0, 2)
        return length * np.sign(u[:, :1]) * way

    def scores(relation, **more):
        game = hypothesis_tests.SumGame(clip=2.0, std=4.0, direction=way, **more)
        return game.scores(release, relation, False, 5, seed_tree(0))

    score = scores("replace", rounds=2)
    assert np.allclose(seen[0], -8 * way) and np.allclose(seen[1], -seen[0])
    assert np.allclose(score["likelihood"], -2 * 2 * 2 * 2 / 16)
    assert set(score) == {"likelihood", "bits", "repeat"}
    assert (hypothesis_tests.lowest_bit([[2, 0.75], [8, 0]]) == [-2, 3]).all()
    assert np.allclose(score["repeat"], -4)
    gone = scores("zero-out", grid=0.5)
    assert not seen[-1].any() and np.allclose(gone["likelihood"], -0.5 * 4 / 16)


# ---- the laws that mechanisms write down a second time


@tabled("cls", [ddgauss.DDGauss, skellam.Skellam])
@tabled(
    "parameters, d",
    [
        (dict(sigma=0.7, n_clients=3, ring_bits=5), 1),
        (dict(sigma=1.0, n_clients=6, ring_bits=6, tolerance=0.2), 4),
        (dict(sigma=1.5, n_clients=3, ring_bits=6), 2),
        (dict(sigma=1.5, n_clients=3, ring_bits=6), 3),
        (dict(sigma=1.0, n_clients=3, ring_bits=6, padded=True), 3),
        (dict(sigma=1.0, n_clients=4, ring_bits=6), 7),
    ],
)
def test_the_law_of_a_projection_is_that_of_real_plays(cls, parameters, d):
    "Chi-square of 40,000 sums in whole steps, client there and not."
    m, n = cls(1.0, **parameters), 40_000
    scale = m.step(d) / math.sqrt(m.block(d))
    centre = m.block(d) * 2 ** (m.ring_bits - 1)
    for sign, present, relation in (
        (1, True, "zero-out"),
        (0, False, "zero-out"),
        (-1, False, "replace"),
    ):
        score = m.attack_scores(relation, present, n, seed_tree(0, "law", sign), d=d)
        ratio = score["likelihood"] * m.sigma**2
        ratio = ratio / 2 if relation == "replace" else ratio + 0.5
        seen, law = np.rint(ratio / scale).astype(int) + centre, m.score_law(d, sign)
        assert abs(law.sum() - 1) < 1e-9
        counts = np.bincount(seen, minlength=len(law))
        assert fit(counts, law / law.sum()) > ALARM / 36


@tabled("s, bits", [(0.3, 1), (1.0, 1), (1.0, 3), (1.6, 7)])
def test_the_curve_of_rec_lies_just_above_its_law(s, bits):
    "Monte Carlo of the ratio itself, 100,000 null messages."
    m, K, n = Rec(s, 1.0, bits), 2**bits, 100_000
    z = seed_tree(0, "ratio", bits).standard_normal((n, K))
    w = K * np.exp(s * z[:, 0]) / np.exp(s * z).sum(1)
    for relation, q in (("null-slot", 1.0), ("poisson-null", 0.1)):
        r, names = 1 + q * (w - 1), dict(n_clients=round(1 / q), cohort=1)
        for eps, bound in zip(EPS[:4], m.privacy_profile(relation, EPS[:4], **names)):
            a = math.exp(eps)
            sides = np.maximum(r - a, 0), np.maximum(1 - a * r, 0)
            mean, error = max((x.mean(), x.std() / math.sqrt(n)) for x in sides)
            high = 1.03 * mean + 5 * error + 1e-6
            assert mean - 5 * error <= bound <= high, (relation, eps)
    assert (m.privacy_profile("local", EPS) == 1).all()


def test_the_curve_of_privquant_is_that_of_listed_messages():
    "All K^d outputs by their probabilities, d = 4 and K = 3."
    m = PrivQuant(1.0, 3, 2.0, "best")
    outs = np.array(list(itertools.product(range(3), repeat=4)))
    logs = [log_law((outs == corner).sum(1), m.calibration(4)) for corner in (2, 0)]
    want = hypothesis_tests.profile_of_pmfs(*np.exp(logs), EPS)
    np.testing.assert_allclose(m.privacy_profile("local", EPS, d=4), want, atol=1e-12)


def test_the_score_of_roundings_is_a_log_likelihood():
    "E[exp(score)] = 1 under no client; opposite under a swap."
    m = quantised.Quantised(1.0, 1.0, 2, "random")
    x = seed_tree(0, "rounding").standard_normal((200_000, 16)) * m.std
    ratio = np.exp(m.scored("zero-out", x)["rounding"])
    assert abs(ratio.mean() - 1) <= radius(ratio.std(), len(ratio))
    one, other = (m.scored("replace", s * x[:100])["rounding"] for s in (1, -1))
    np.testing.assert_allclose(one, -other, atol=1e-9)


def test_curves_that_are_not_listed_are_those_of_normal_noise():
    "A drawn cohort can only lower a curve, and keeps that of a known one."
    drawn, plain = dict(n_clients=10, cohort=1), Gaussian(1.0, 1.0)
    curves = [plain.privacy_profile("zero-out", EPS, **more) for more in (drawn, {})]
    assert np.array_equal(*curves)
    for kind in (ddgauss.DDGauss, skellam.Skellam):
        for bits, more in ((24, {}), (12, dict(d=64)), (8, dict(rounds=2))):
            made = kind(1.0, 1.0, 4, bits)
            stated = made.privacy_profile("zero-out", EPS, **more)
            normal = more.get("rounds", 1) ** 0.5 / made.sigma
            least = hypothesis_tests.profile_of_gaussian(normal, EPS)
            assert (least <= stated).all() and (stated < least + 0.05).all()
    assert (mvu.Mvu(1.0, 1.0).privacy_profile("replace", EPS) < 1).all()


@tabled("m, n", [(2, 1), (2, 9), (3, 4), (5, 3)])
def test_counts_of_symbols_lose_nothing(m, n):
    pair = seed_tree(0, "symbols", m).dirichlet(np.ones(m), 2)
    words = np.array(list(itertools.product(range(m), repeat=n)))
    whole = hypothesis_tests.profile_of_pmfs(*(law[words].prod(1) for law in pair), EPS)
    found = hypothesis_tests.profile_of_pmfs(
        *hypothesis_tests.multinomial_laws(*pair, n), EPS
    )
    np.testing.assert_allclose(found, whole, rtol=1e-9, atol=1e-13)


def test_no_mixture_of_inputs_is_above_the_curve_of_their_pure_privacy():
    truth = 1 / (1 + math.exp(-2))
    one, two = np.array([[truth, 1 - truth], [1 - truth, truth]])
    bound = hypothesis_tests.profile_of_pure(2.0, EPS) + 1e-12
    for pair in seed_tree(0, "mixed").random((20, 2)):
        mixed = [w * one + (1 - w) * two for w in pair]
        assert (hypothesis_tests.profile_of_pmfs(*mixed, EPS) <= bound).all()
