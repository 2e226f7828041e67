"""PrivQuant from its parts: levels, thresholds, laws, draws. What every mechanism must
do is in test_conformance.

Statistical tests have false-alarm rate 1e-6 and fixed seeds.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from laws import ALARM, fit, radius
from tables import tabled

from dpcomm.core import wire
from dpcomm.core.chance import Insecure, seed_tree
from dpcomm.mechanisms import privquant
from dpcomm.mechanisms.privquant import Calibration, PrivQuant, Tails, calibrate

SMALL = [
    (1, 2, 1.0, "best"),
    (1, 4, 2.0, "paper"),
    (2, 2, 3.0, "paper"),
    (2, 5, 0.5, "best"),
    (3, 3, 2.0, "paper"),
    (4, 3, 1.0, "best"),
    (5, 2, 6.0, "paper"),
    (5, 3, 0.1, "best"),
    (3, 5, 8.0, "paper"),
]
small = pytest.mark.parametrize("d, K, eps, rule", SMALL)


def every_law(cal):
    """All sheets, and the law of the message for every rounded input: (K^d, d), (K^d
    inputs, K^d messages).
    """
    sheets = np.array(list(itertools.product(range(cal.levels), repeat=cal.d)))
    return sheets, np.exp(privquant.log_law((sheets[:, None] == sheets).sum(2), cal))


def exact(d, K):
    "Numbers of sheets by matches, as whole numbers."
    return [math.comb(d, l) * (K - 1) ** (d - l) for l in range(d + 1)]


# ---- rounding


@pytest.mark.parametrize("count", [2, 5, 16])
def test_a_sum_of_numbers_is_a_sum_of_levels(count):
    numbers = seed_tree(0, "numbers").integers(count, size=(7, 20))
    wanted = privquant.levels(1.5, count)[numbers].sum(0)
    found = privquant.sum_of_levels(numbers.sum(0), 7, 1.5, count)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


@tabled("K", [2, 3, 4, 16, 127])
def test_levels_are_equally_spaced_and_sum_to_zero(K):
    B = privquant.levels(3.0, K)
    assert len(B) == K and B[0] == -3 and B[-1] == 3 and abs(B.sum()) < 1e-12
    np.testing.assert_allclose(np.diff(B), 6 / (K - 1))
    assert (B**2).sum() == pytest.approx(9 * K * (K + 1) / (3 * (K - 1)))


@pytest.mark.parametrize("K", [2, 3, 16])
def test_rounding_is_unbiased_and_to_neighbours(K):
    n, B = 20_000, privquant.levels(1.0, K)
    x = np.concatenate([B, seed_tree(0, "x").uniform(-1, 1, 12)])
    numbers = privquant.quantise(
        np.repeat(x[None], n, 0), 1.0, K, seed_tree(0, "round", K)
    )
    place, low = privquant.position(x[None], 1.0, K)
    assert numbers.dtype == np.int64 and ((numbers == low) | (numbers == low + 1)).all()
    variance = privquant.variances(x[None], 1.0, calibrate(len(x), K, 100.0, "best"))[
        0
    ][0]
    np.testing.assert_allclose(
        variance, (B[low[0] + 1] - x) * (x - B[low[0]]), atol=1e-12
    )
    assert (
        np.abs(B[numbers].mean(0) - x)
        <= radius(np.sqrt(np.maximum(variance, 0)), n, len(x)) + 1e-12
    ).all()
    assert np.array_equal(numbers[:, :K], np.repeat(np.arange(K)[None], n, 0)), (
        "levels stay where they are"
    )


def test_rounding_draws_row_by_row():
    x = seed_tree(0, "x").uniform(-1, 1, (3, 50))
    together = privquant.quantise(x, 1.0, 8, [seed_tree(0, i) for i in range(3)])
    assert np.array_equal(
        together[1:2], privquant.quantise(x[1:2], 1.0, 8, [seed_tree(0, 1)])
    )


@pytest.mark.parametrize(
    "x, words",
    [
        ([[1.1]], "clip first"),
        ([[-1.1, 0.0]], "clip first"),
        ([[math.nan]], "nan"),
        ([[0.0, -math.inf]], "nan or inf"),
    ],
)
def test_inputs_outside_are_refused(x, words):
    cal = calibrate(len(x[0]), 4, 3.0, "best")
    for call in (
        lambda: privquant.quantise(np.array(x), 1.0, 4, seed_tree(0)),
        lambda: privquant.privatise(torch.tensor(x), 1.0, cal, seed_tree(0)),
        lambda: privquant.variances(np.array(x), 1.0, cal),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_float32_rounding_at_the_bound_is_forgiven():
    x = torch.full((1, 3), 0.1)
    assert (
        float(x.double()[0, 0]) > 0.1
        and (privquant.quantise(x.double(), 0.1, 5, seed_tree(0)) == 4).all()
    )
    assert 0 < privquant.ROUNDING <= 1e-6
    with pytest.raises(ValueError, match="raise bound"):
        privquant.quantise(
            np.array([[0.1 * (1 + 2 * privquant.ROUNDING)]]), 0.1, 5, seed_tree(0)
        )


@tabled("K", [1, 0, -3, 2.0, 2.5, privquant.MAX_LEVELS + 1, True])
def test_wrong_numbers_of_levels_are_refused(K):
    for call in (
        lambda: privquant.levels(1.0, K),
        lambda: privquant.quantise(np.zeros((1, 1)), 1.0, K, seed_tree(0)),
        lambda: privquant.tails(3, K),
    ):
        with pytest.raises(ValueError, match="levels is"):
            call()


# ---- thresholds


@tabled("d, K", [(1, 2), (2, 3), (7, 2), (40, 5), (60, 16)])
def test_sums_against_whole_numbers(d, K):
    b, tails = exact(d, K), privquant.tails(d, K)
    assert isinstance(tails, Tails) and sum(b) == K**d
    np.testing.assert_allclose(tails.log_counts, [math.log(x) for x in b], atol=1e-11)
    for tau in range(1, d + 1):
        assert tails.ratio[tau - 1] == pytest.approx(
            math.log(sum(b[:tau])) - math.log(sum(b[tau:])), abs=1e-11
        )
        assert tails.share[tau - 1] == pytest.approx(
            math.log(math.comb(d - 1, tau - 1) * (K - 1) ** (d - tau))
            - math.log(sum(b[tau:])),
            abs=1e-11,
        )
    assert (np.diff(tails.ratio) > 0).all()


@tabled(
    "d, K, eps",
    [
        (d, K, eps)
        for d, K in ((1, 3), (2, 2), (6, 3), (30, 4))
        for eps in (1.3, 4.0, 11.5, 30.0)
    ],
)
@tabled("kappa_min", [None, 0])
def test_the_paper_s_rule_takes_the_largest_margin(d, K, eps, kappa_min):
    "Every kappa tried: log S0/S1 <= .9 eps, and the whole sum positive."
    b = exact(d, K)
    ok = {}
    for kappa in range(-d if kappa_min is None else kappa_min, d):
        tau = math.ceil((d + kappa + 1) / 2)
        ratio = math.log(sum(b[:tau]) / sum(b[tau:]))
        if ratio <= 0.9 * eps and ratio > -0.1 * eps:
            ok[kappa] = tau, ratio
    if not ok:
        with pytest.raises(ValueError, match="smallest|or more"):
            calibrate(d, K, eps, "paper", kappa_min)
        return
    cal = calibrate(d, K, eps, "paper", kappa_min)
    assert (cal.kappa, cal.tau) == (max(ok), ok[max(ok)][0]) and math.ceil(
        (d + cal.kappa + 1) / 2
    ) == cal.tau
    assert cal.actual_eps == pytest.approx(
        0.1 * eps + ok[cal.kappa][1]
    ) and 0 < cal.actual_eps <= eps * (1 + 1e-12)
    assert cal.log_odds == privquant.COIN_SHARE * eps and cal.p == pytest.approx(
        1 / (1 + math.exp(-0.1 * eps))
    )


def test_settings_of_the_paper():
    found = {
        (d, eps): calibrate(d, 16, eps) for d, eps in ((512, 400.0), (8192, 2000.0))
    }
    assert (found[512, 400.0].kappa, found[512, 400.0].tau) == (-13, 250) and found[
        512, 400.0
    ].m == pytest.approx(0.4543, abs=5e-5)
    assert found[8192, 2000.0].kappa == -3707
    for d, eps, least in ((512, 400.0, 419.3361), (8192, 2000.0, 6611.09)):
        assert privquant.smallest_eps(d, 16, 0) == pytest.approx(least, rel=1e-6)
        with pytest.raises(ValueError, match=rf"{least:.6g}"[:5]):
            calibrate(d, 16, eps, kappa_min=0)


@tabled(
    "d, K, kappa_min",
    [
        (2, 2, None),
        (2, 2, 0),
        (7, 4, None),
        (512, 16, 0),
        (512, 16, 511),
        (8192, 16, None),
        (1, 3, None),
    ],
)
def test_the_smallest_epsilon_is_the_smallest(d, K, kappa_min):
    least = privquant.smallest_eps(d, K, kappa_min)
    assert least == privquant.thresholds(d, K, kappa_min).min()
    calibrate(d, K, least, "paper", kappa_min)
    with pytest.raises(ValueError, match="raise eps to it"):
        calibrate(d, K, least * (1 - 1e-9), "paper", kappa_min)
    assert calibrate(d, K, least / 2, "best", kappa_min).m > 0


def test_one_side_of_the_relation_is_not_enough():
    """d = 2, K = 2, eps = .5: relation (8) holds at tau = 1, and the mechanism lies
    more often than epsilon allows.
    """
    ratio = float(privquant.tails(2, 2).ratio[0])
    assert 0.05 + ratio <= 0.5 and 0.05 + ratio < -0.5
    law = np.array([1 / (1 + math.exp(-0.05)) / 3, 1 - 1 / (1 + math.exp(-0.05))])
    assert law[1] / law[0] > math.exp(0.5)
    with pytest.raises(ValueError, match="paper's rule needs"):
        calibrate(2, 2, 0.5)


@small
def test_the_best_rule_is_the_best(d, K, eps, rule):
    "Against every threshold with every coin that keeps epsilon, on a fine grid."
    cal, tails = calibrate(d, K, eps, "best"), privquant.tails(d, K)
    assert cal.actual_eps == pytest.approx(eps)
    for ratio, share in zip(tails.ratio, tails.share):
        for spent in np.linspace(1e-3, eps, 200):
            p = 1 / (1 + math.exp(ratio - spent))
            assert p * math.exp(share) * (1 - math.exp(-spent)) <= cal.m * (1 + 1e-9)
    assert cal.m >= calibrate(d, K, eps, rule).m * (1 - 1e-12)


def test_wrong_arguments_of_a_calibration():
    for change, words in (
        (dict(eps=0.0), "eps is"),
        (dict(eps=math.nan), "eps is"),
        (dict(rule="most"), "rule is"),
        (dict(d=0), "d is"),
        (dict(d=2.5), "d is"),
        (dict(kappa_min=9), "kappa_min is"),
        (dict(kappa_min=-9), "kappa_min is"),
    ):
        with pytest.raises(ValueError, match=words):
            calibrate(**(dict(d=8, levels=4, eps=3.0) | change))
    assert set(privquant.RULES) == {"paper", "best"}


def test_large_dimensions_and_budgets_stay_finite():
    for d, K, eps, rule in (
        (2**17, 16, 8000.0, "paper"),
        (2**17, 2, 1e-3, "best"),
        (8192, 128, 1e5, "paper"),
        (4, 4, 1e4, "best"),
        (3, 2**16, 50.0, "best"),
    ):
        cal = calibrate(d, K, eps, rule)
        law = privquant.match_law(cal)
        assert (
            law.sum() == pytest.approx(1)
            and 0 < cal.m <= 1 + 1e-9
            and 1 / K < cal.q <= 1 + 1e-9
            and math.isfinite(privquant.covariance_factor(cal))
        )
        assert float(law @ np.arange(d + 1)) / d == pytest.approx(cal.q, rel=1e-7)


# ---- laws


@small
def test_privacy_by_enumeration(d, K, eps, rule):
    """Every message under every pair of inputs: the largest log-ratio is what is
    declared, and no more than allowed.
    """
    cal = calibrate(d, K, eps, rule)
    law = np.log(every_law(cal)[1])
    np.testing.assert_allclose(np.exp(law).sum(1), 1)
    assert np.ptp(law, axis=0).max() == pytest.approx(
        cal.actual_eps, rel=1e-9
    ) and cal.actual_eps <= eps * (1 + 1e-12)
    assert PrivQuant(1.0, K, eps, rule).guarantee(d=d).eps == cal.actual_eps


@small
def test_moments_by_enumeration(d, K, eps, rule):
    """Rounding and privacy together, for inputs between the levels: mean, variance and
    covariance of Z.
    """
    cal, B = calibrate(d, K, eps, rule), privquant.levels(2.0, K)
    sheets, law = every_law(cal)
    x = seed_tree(0, "x", d, K).uniform(-2, 2, d)
    place, low = (a[0] for a in privquant.position(x[None], 2.0, K))
    rounded = np.prod(
        np.where(
            sheets == low,
            1 - (place - low),
            np.where(sheets == low + 1, place - low, 0),
        ),
        axis=1,
    )
    p, z = rounded @ law, B[sheets] / cal.m
    mean = p @ z
    np.testing.assert_allclose(mean, x, atol=1e-9)
    covariance = (p[:, None] * z).T @ z - np.outer(mean, mean)
    rounding, privacy = privquant.variances(x[None], 2.0, cal)
    np.testing.assert_allclose(np.diag(covariance), (rounding + privacy)[0], rtol=1e-9)
    np.testing.assert_allclose(
        np.diag((rounded[:, None] * B[sheets]).T @ B[sheets]) - x**2,
        rounding[0],
        atol=1e-9,
    )
    off = ~np.eye(d, dtype=bool)
    np.testing.assert_allclose(
        covariance[off],
        (privquant.covariance_factor(cal) * np.outer(x, x))[off],
        rtol=1e-7,
        atol=1e-9,
    )


@small
def test_the_formula_of_the_paper_for_m(d, K, eps, rule):
    cal, b = calibrate(d, K, eps, rule), exact(d, K)
    A = math.comb(d - 1, cal.tau - 1) * (K - 1) ** (d - cal.tau)
    assert cal.m == pytest.approx(
        cal.p * A / sum(b[cal.tau :]) - (1 - cal.p) * A / sum(b[: cal.tau]), rel=1e-9
    )
    l, law = np.arange(d + 1), privquant.match_law(cal)
    assert cal.q == pytest.approx(law @ l / d) and (
        d == 1 or cal.q2 == pytest.approx(law @ (l * (l - 1)) / (d * (d - 1)))
    )
    assert law[cal.tau :].sum() == pytest.approx(cal.p) and isinstance(cal, Calibration)


@small
def test_messages_follow_their_law(d, K, eps, rule):
    "60,000 draws against the enumerated law of all messages, for one rounded input."
    cal, n = calibrate(d, K, eps, rule), 60_000
    sheets, law = every_law(cal)
    given = len(sheets) // 3
    seen = privquant.randomise(
        np.repeat(sheets[given][None], n, 0), cal, seed_tree(0, "law", d, K)
    )
    index = (seen * K ** np.arange(d - 1, -1, -1)).sum(1)
    assert fit(np.bincount(index, minlength=len(sheets)), law[given]) > ALARM


def test_long_messages_have_the_right_matches():
    """Beyond the size that is sorted at once: counts against their law, and every entry
    and every other level alike.
    """
    cal, n = calibrate(100, 4, 30.0), 6000
    numbers = seed_tree(0, "numbers").integers(4, size=100)
    seen = privquant.randomise(
        np.repeat(numbers[None], n, 0), cal, seed_tree(0, "long")
    )
    match = seen == numbers
    assert (
        cal.d > privquant.SHORT
        and fit(np.bincount(match.sum(1), minlength=101), privquant.match_law(cal))
        > ALARM / 3
    )
    assert (
        np.abs(match.mean(0) - cal.q) <= radius(math.sqrt(cal.q * (1 - cal.q)), n, 300)
    ).all()
    shift = ((seen - numbers) % 4)[:, 0]
    assert (
        fit(np.bincount(shift, minlength=4), np.array([cal.q, *[(1 - cal.q) / 3] * 3]))
        > ALARM / 3
    )


@tabled("d", [1, 5, privquant.SHORT, privquant.SHORT + 1, 500])
def test_the_smallest_keys_are_chosen(d):
    keys = seed_tree(0, "keys", d).random((6, d))
    counts = np.array([0, 1, d // 2, max(d - 1, 0), d, d // 3])
    chosen = privquant.smallest(keys, counts)
    assert np.array_equal(chosen.sum(1), counts)
    for row, key in zip(chosen, keys):
        assert not row.any() or row.all() or key[row].max() < key[~row].min()


def test_steps_end_at_one_and_rise():
    steps = privquant.match_steps(calibrate(512, 16, 400.0))
    assert steps[-1] == 1.0 and (np.diff(steps) >= 0).all()
    assert steps[249] < 1e-17, (
        "fewer matches than the threshold are rarer than any draw resolves"
    )


def test_covariance_needs_two_entries():
    assert privquant.covariance_factor(calibrate(1, 4, 2.0)) == pytest.approx(
        0, abs=1e-12
    )


def test_means_and_variances_by_chance():
    "40,000 messages of 96 entries from a bound of 3."
    cal, n, x = calibrate(96, 8, 80.0), 10_000, seed_tree(0, "x").uniform(-3, 3, 96)
    z = np.concatenate(
        [
            privquant.privatise(
                np.repeat(x[None], n, 0), 3.0, cal, seed_tree(0, "z", i)
            )
            for i in range(4)
        ]
    )
    n, variance = len(z), sum(privquant.variances(x[None], 3.0, cal))[0]
    assert (np.abs(z.mean(0) - x) <= radius(np.sqrt(variance), n, 2 * 96)).all()
    square = (z - x) ** 2
    assert (np.abs(square.mean(0) - variance) <= radius(square.std(0), n, 2 * 96)).all()


# ---- draws and messages


def test_a_calibration_is_for_one_dimension():
    with pytest.raises(ValueError, match="rows of 3 entries"):
        privquant.randomise(np.zeros((1, 3), int), calibrate(4, 4, 3.0), seed_tree(0))


@tabled("K, bits", [(2, 1), (3, 2), (4, 2), (5, 3), (16, 4), (17, 5), (128, 7)])
def test_a_level_takes_log_k_bits(K, bits):
    numbers = seed_tree(0, "numbers", K).integers(K, size=101)
    data = privquant.pack(numbers, K)
    assert len(data) == -(-101 * bits // 8) and np.array_equal(
        privquant.unpack(data, K, 101), numbers
    )
    assert (
        PrivQuant(1.0, K).bits(101).payload == 8 * len(data)
        and PrivQuant(1.0, K).bits(101).shared_randomness == 0
    )


def test_a_level_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="levels 0..2"):
        privquant.unpack(wire.pack_bits([3, 0], 2), 3, 2)


def test_encode_is_privatise_of_the_clamped_vector():
    m = PrivQuant(1.0, levels=5, eps=9.0)
    u = torch.tensor([0.3, -4.0, 0.0, 0.99, 1e-9, 2.0])
    rng = seed_tree(11, "private")
    expected = privquant.privatise(
        privquant.represent(m, u[None]), 1.0, m.calibration(6), rng
    )[0]
    torch.testing.assert_close(
        m.decode(m.encode(u, Insecure(11))), torch.from_numpy(expected).float()
    )
    again = m.simulate(u[None], seed_tree(11, "private"))[0]
    torch.testing.assert_close(again, m.decode(m.encode(u, Insecure(11))))


def test_bias_is_what_clipping_cuts_off():
    m, u = PrivQuant(0.5, levels=4, eps=9.0), torch.tensor([[0.3, -4.0, 0.5]])
    bias, variance = m.moments(u)
    torch.testing.assert_close(bias, torch.tensor([[0.0, 3.5, 0.0]]))
    assert np.array_equal(
        variance.numpy(),
        sum(privquant.variances(u.clamp(-0.5, 0.5).double(), 0.5, m.calibration(3))),
    )


# ---- guarantee, game


def test_a_known_dimension_spends_less():
    m = PrivQuant(1.0, 4, 3.0)
    found, known = m.guarantee(rounds=6), m.guarantee(rounds=6, d=8)
    assert found.eps == 18.0 and "2^-1020" in found.note
    assert known.eps == pytest.approx(6 * m.calibration(8).actual_eps)
    assert known.eps < found.eps


@pytest.mark.parametrize("parameters, arguments, most", privquant.AUDITED)
def test_the_game_follows_the_law(parameters, arguments, most):
    "Three scores; each as often as the exact law of matches with both corners says."
    m, n = PrivQuant(**parameters), 30_000
    cal, d, K = (
        m.calibration(privquant.GAME_DIMENSION),
        privquant.GAME_DIMENSION,
        m.levels,
    )
    own, other = np.meshgrid(
        np.arange(d + 1), np.arange(d + 1), indexing="ij"
    )  # matches with what was sent, with the opposite corner
    ways = np.array(
        [
            [
                (
                    math.comb(d, a) * math.comb(d - a, b) * (K - 2) ** (d - a - b)
                    if a + b <= d
                    else 0
                )
                for b in range(d + 1)
            ]
            for a in range(d + 1)
        ],
        float,
    )
    p = ways * np.exp(privquant.log_law(own, cal))
    score = privquant.log_law(own, cal) - privquant.log_law(other, cal)
    assert p.sum() == pytest.approx(1) and np.abs(
        score[ways > 0]
    ).max() == pytest.approx(cal.actual_eps)
    for present in (True, False):
        found = m.play("local", present, n, seed_tree(0, "play", present), **arguments)[
            "likelihood"
        ]
        sign = np.round((found if present else -found) / cal.actual_eps).astype(int)
        assert np.allclose(np.abs(found), np.abs(sign) * cal.actual_eps)
        expected = [p[np.isclose(score, s * cal.actual_eps)].sum() for s in (-1, 0, 1)]
        assert fit(np.bincount(sign + 1, minlength=3), expected) > ALARM / 2
    assert most == 10**6 and m.relations == {"local": {}}
