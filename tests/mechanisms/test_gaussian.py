"""Gaussian and quantised: exact noise on a public grid, floats for simulation, and what
either claims.
"""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from laws import ALARM
from tables import tabled

from dpcomm.core.chance import Insecure, normal, private_stream, seed_tree
from dpcomm.core.vectors import clip_l2
from dpcomm.mechanisms import contract, distributed_noise, gaussian, quantised
from dpcomm.mechanisms.distributed_noise import noisy_sum_guarantee
from dpcomm.mechanisms.gaussian import Gaussian
from dpcomm.mechanisms.quantised import Quantised
from dpcomm.privacy import accounting, audit, games
from dpcomm.privacy.fixed_cohorts import fixed_size_epsilon
from dpcomm.secagg import ring

ROWS = torch.tensor([[0.6, 0.0, -0.3], [3.0, -4.0, 12.0], [0.0, 0.0, 0.0]])


# ---- lengths, in whole numbers


def adversarial(d):
    "Rows on which a clip in floats leaves a length that is too long, or nearly."
    rng = seed_tree(0, "adversarial", d)
    rows = [rng.standard_normal(d) * scale for scale in (1e-3, 1.0, 1e3, 1e30)] + [
        np.eye(d)[0] * s for s in (0.1, 1 / 3, 7.0, 3e38)
    ]
    rows += [
        np.full(d, 1.0),
        np.r_[3.0, 4.0, np.zeros(d - 2)],
        np.r_[np.full(d - 1, 1e-20), 1.0],
        np.full(d, 1e-40),
    ]
    rows += [
        np.nextafter(row / np.linalg.norm(row) * c, np.inf)
        for row in rows[:2]
        for c in (0.1, 1 / 3, 1.0)
    ]
    return torch.from_numpy(np.array(rows).astype(np.float32))


@tabled("clip", [0.1, 1 / 3, 1.0, 0.0123456789, 7e5])
@tabled("d", [2, 5, 1000])
def test_no_row_is_longer_than_the_clip_by_a_single_bit(clip, d):
    scale = distributed_noise.grid(clip, 1.0, 1)
    z = ring.clip_to_grid(adversarial(d), clip, scale)
    for row, float_row in zip(z, clip_l2(adversarial(d), clip).double()):
        assert (
            sum(int(v) ** 2 for v in row) * Fraction(scale) ** 2 <= Fraction(clip) ** 2
        )
        assert np.abs(row * scale - float_row.numpy()).max() <= scale + 2e-6 * clip


def test_a_clip_in_floats_leaves_some_too_long():
    "What the cut is for: the same rows, clipped by clip_l2 alone, in exact arithmetic."
    long = [
        sum(Fraction(float(v)) ** 2 for v in row) > Fraction(0.1) ** 2
        for row in clip_l2(adversarial(5), 0.1)
    ]
    assert any(long) and 0 < ring.SHRINK < 1


def test_a_grid_too_fine_for_exact_squares_is_refused():
    with pytest.raises(ring.Overflow, match="use a larger scale"):
        ring.clip_to_grid(torch.ones(1, 2), 1.0, 2.0**-33)


def test_an_empty_cohort_is_noise_alone():
    assert ring.clip_to_grid(torch.zeros(0, 3), 1.0, 2.0**-20).shape == (0, 3)
    assert Gaussian(1.0, 1.0).aggregate(torch.zeros(0, 3), 5, seed_tree(0)).shape == (
        3,
    )


# ---- exact noise


@pytest.mark.parametrize("sigma", [0.05, 1.0, 30.0, 1e6])
def test_a_local_message_is_ring_elements_and_its_values_whole_steps(sigma):
    m = Gaussian(0.3, sigma, local=True)
    message = m.encode(ROWS[0], Insecure(3))
    assert len(message.payload) == 12 and math.log2(m.scale).is_integer()
    z = np.frombuffer(message.payload, "<u4").astype(np.int64)
    want = distributed_noise.exact_noise(
        ROWS[:1], 0.3, m.std, [private_stream(Insecure(3))]
    )[0]
    assert np.array_equal(distributed_noise.RING.lift(z), want)
    np.testing.assert_array_equal(
        m.decode(message).numpy(), (want * m.scale).astype(np.float32)
    )


@pytest.mark.parametrize("make", [Gaussian, Quantised])
def test_a_noisy_sum_is_whole_steps_and_believes_nobody(make):
    m = make(0.3, 1.0)
    total = 4 * m.aggregate(ROWS.double() * 1e30, 4.0, seed_tree(0)) / m.scale
    assert torch.equal(total, total.round())
    far = m.aggregate(torch.tensor([[1e30, 0.0]]), 1.0, seed_tree(1)) - m.aggregate(
        torch.zeros(1, 2), 1.0, seed_tree(1)
    )
    assert far[1] == 0 and 0.3 * (1 - 1e-5) < float(far[0]) <= 0.3 * (1 + 1e-6)


def test_several_rounds_at_once_have_noise_of_their_own():
    for m in (
        Gaussian(1.0, 1.0),
        Gaussian(1.0, 1.0, exact=False),
        Gaussian(1.0, 1.0, True),
        Quantised(1.0, 1.0, exact=False),
    ):
        out = m.aggregate(ROWS.expand(5, 3, 3), 3.0, seed_tree(0))
        assert out.shape == (5, 3) and (len(out.unique(dim=0)) == 5) == (
            not getattr(m, "local", False)
        )


def test_exact_noise_has_the_promised_deviation():
    z = distributed_noise.exact_noise(
        torch.zeros(1, 400_000), 2.0, 3.0, seed_tree(0)
    ) * distributed_noise.grid(2.0, 1.5, 1)
    assert (
        abs(z.std() - 3.0) < 6 * 3.0 / 800_000**0.5
        and abs(z.mean()) < 6 * 3.0 / 400_000**0.5
    )


# ---- floats, bit for bit what they were


@pytest.mark.parametrize("local", [False, True])
def test_floats_are_clip_plus_normal_numbers(local):
    m = Gaussian(0.3, 2.0, local, exact=False)
    noise = 0.6 * normal(ROWS.shape, seed_tree(5))
    want = clip_l2(ROWS, 0.3) + (noise if local else 0)
    assert torch.equal(m.simulate(ROWS, seed_tree(5)), want)
    noise = 0.0 if local else 0.6 / 7 * normal((3,), seed_tree(6))
    mean = m.aggregate(want, 7, seed_tree(6))
    torch.testing.assert_close(mean, want.sum(0) / 7 + noise, rtol=1e-6, atol=1e-7)
    row = clip_l2(ROWS[:1], 0.3) + (
        0.6 * normal((1, 3), private_stream(Insecure(1))) if local else 0
    )
    assert (
        m.encode(ROWS[0], Insecure(1)).payload == row[0].numpy().astype("<f4").tobytes()
    )


def test_the_servers_floats_of_quantised_are_those_of_dp_fedavg():
    a, b = (
        make(0.5, 2.0, exact=False).aggregate(torch.zeros(3, 1000), 10, seed_tree(0))
        for make in (Quantised, Gaussian)
    )
    assert torch.equal(a, b)


@pytest.mark.parametrize("make", [Gaussian, Quantised])
def test_floats_say_so(make):
    exact, floats = make(1.0, 1.0), make(1.0, 1.0, exact=False)
    run = dict(rounds=3, delta=1e-5, accountant="rdp-balle")
    assert (
        distributed_noise.FLOATS in floats.guarantee(**run).note
        and distributed_noise.FLOATS not in exact.guarantee(**run).note
    )
    assert (
        distributed_noise.FLOATS in floats.guarantee(note="mine", **run).note
        and "mine" in floats.guarantee(note="mine", **run).note
    )
    assert (
        exact.guarantee(**run).eps == floats.guarantee(**run).eps
        and exact.fingerprint != floats.fingerprint
    )
    assert exact.safe.startswith("safe to deploy") and floats.safe.startswith(
        "simulation only"
    )
    assert gaussian.SAFE[True] != quantised.SAFE[True]


# ---- what is claimed


def law(steps, shift, wide):
    x = np.arange(-wide, wide + 1)
    p = np.exp(-(((x - shift) / steps) ** 2) / 2)
    return p / p.sum()


@tabled(
    "sigma, steps", [(0.3, 2.0), (0.5, 9.0), (1.0, 40.0), (2.0, 1000.0), (5.0, 2e4)]
)
def test_enumerated_discrete_noise_keeps_every_claim(sigma, steps):
    """One dimension, the largest whole shift within the clip: exact delta at the
    claimed epsilon, and the whole curve.
    """
    shift = int(steps / sigma)
    wide = int(13 * steps) + shift
    p, q = law(steps, shift, wide), law(steps, 0, wide)
    for delta in (1e-2, 1e-5):
        for accountant in ("rdp-classic", "rdp-balle", "pld"):
            try:
                stated = distributed_noise.exact_guarantee(
                    sigma, delta, steps, accountant=accountant
                )
            except ValueError as error:
                assert accountant == "pld" and "use 'rdp-balle'" in str(error)
            else:
                assert games.listed_curve(p, q, stated.eps) <= delta * (1 + 1e-9)
    eps = np.linspace(0, 5, 21)
    bound = games.gaussian_curve(shift / steps, eps) + (
        1 + np.exp(eps)
    ) * ring.rounding_gap(steps, 1)
    assert (games.listed_curve(p, q, eps) <= bound + 1e-12).all()


@pytest.mark.parametrize("order", [2, 3, 17])
def test_sampled_moments_at_whole_orders_are_the_normal_ones(order):
    """The mixture's moment, enumerated at 1.5 steps a deviation, is the accountant's
    closed form.
    """
    steps, shift, q = 1.5, 2, 0.1
    p, base = law(steps, shift, 45), law(steps, 0, 45)
    seen = np.where(
        base > 0,
        base
        * (1 - q + q * np.divide(p, base, out=np.zeros_like(p), where=base > 0))
        ** order,
        0,
    ).sum()
    known = accounting.rdp_subsampled_gaussian(np.array([order]), steps / shift, q)[0]
    assert math.log(seen) / (order - 1) == pytest.approx(known, rel=1e-9)


@pytest.mark.parametrize("steps", [1.0, 1.7, 6.0, 30.0])
def test_the_gap_to_rounded_normal_numbers_is_bounded(steps):
    from scipy.stats import norm

    x = np.arange(-int(40 * steps), int(40 * steps) + 1)
    p = law(steps, 0, len(x) // 2)
    q = norm.sf((np.abs(x) - 0.5) / steps) - norm.sf((np.abs(x) + 0.5) / steps)
    assert (
        0.1 * ring.rounding_gap(steps, 1)
        < np.abs(p - q).sum() / 2
        < ring.rounding_gap(steps, 1)
    )
    assert ring.rounding_gap(0.9, 1) == 1 and ring.rounding_gap(
        2.0**20, 10**9
    ) == pytest.approx(math.sqrt(1e9 / 600) / 2**40)


def test_a_privacy_loss_distribution_pays_or_is_refused():
    fine, floats = (
        Gaussian(1.0, 1.0, exact=exact).guarantee(
            rounds=10, delta=1e-3, accountant="pld"
        )
        for exact in (True, False)
    )
    assert (
        floats.eps < fine.eps < floats.eps * 1.01
        and fine.delta == floats.delta == 1e-3
        and 0 < distributed_noise.PAID < 0.1
    )
    with pytest.raises(
        ValueError, match="accountant is 'pld'; discrete noise of 5 steps"
    ):
        distributed_noise.exact_guarantee(1.0, 1e-5, 5.0, accountant="pld")
    sampled = distributed_noise.exact_guarantee(
        1.0, 1e-5, 5.0, 0.1, 10, sampling="poisson"
    )
    assert (
        sampled.eps
        == accounting.gaussian_guarantee(
            1.0, 1e-5, 0.1, 10, sampling="poisson", orders=accounting.INTEGER_ORDERS
        ).eps
    )


# ---- single bits


def exponent(x):
    "The largest j with x a multiple of 2^j, by fractions."
    x = Fraction(float(x))
    return (
        games.ZERO
        if x == 0
        else (x.numerator & -x.numerator).bit_length()
        - 1
        - (x.denominator.bit_length() - 1)
    )


def test_the_lowest_bit_of_a_row():
    rng = seed_tree(0, "lowest")
    rows = np.concatenate(
        [
            rng.standard_normal((50, 3), dtype=np.float32),
            rng.standard_normal((50, 3)) * 2.0 ** rng.integers(-900, 900, (50, 3)),
            [
                [0.0, 0.0, 0.0],
                [0.0, 5e-324, 1.0],
                [12.0, 8.0, -4.0],
                [2.0**1023, 0.0, 0.0],
            ],
        ]
    )
    assert games.lowest_bit(rows).tolist() == [min(map(exponent, row)) for row in rows]


@tabled("sigma", [1.0, 4.0])
@tabled(
    "make, relation",
    [
        (Gaussian, "add-remove"),
        (Gaussian, "zero-out"),
        (lambda *a, **k: Gaussian(*a, local=True, **k), "zero-out"),
        (Quantised, "zero-out"),
    ],
)
def test_the_bits_refute_floats_and_leave_whole_numbers(make, relation, sigma):
    "20,000 plays at alarm 1e-6, against the curve and the guarantee."
    for exact in (True, False):
        found = audit.judge_play(
            make(1.0, sigma, exact=exact),
            relation,
            20_000,
            seed_tree(0, "bits", sigma == 1, exact),
        )
        assert found.refuted == (not exact), found
        assert exact or (found.attack == "bits" and found.pvalue <= ALARM)


def test_one_delta_sees_it_too():
    one = Gaussian(1.0, 4.0, local=True, exact=False)
    found = audit.audit_play(one, "zero-out", 200_000, 1e-5, seed_tree(0, "note"))
    assert (
        found.eps > 5
        and found.attack == "bits"
        and audit.refutes(found, audit.claim(one, "zero-out", 1e-5))
    )


@pytest.mark.parametrize("exact", [True, False])
def test_real_messages_are_looked_at_bit_by_bit(exact):
    m = Gaussian(1.0, 1.0, local=True, exact=exact)
    assert (
        audit.message_relation(m) == "zero-out"
        and audit.message_relation(Gaussian(1.0, 1.0)) is None
    )
    assert audit.judge_messages(m, 1500, seed_tree(0, "messages"), ALARM).refuted == (
        not exact
    )


PRIVATE = [
    name
    for name in contract.registered()
    if name != "gaussian"
    and any(
        audit.message_relation(contract.mechanism(name, **own))
        for own, *_ in contract.mechanism_class(name).audited
    )
]


@tabled("name", PRIVATE)
def test_the_messages_of_every_other_mechanism_stand(name):
    m = next(
        m
        for m in (
            contract.mechanism(name, **own)
            for own, *_ in contract.mechanism_class(name).audited
        )
        if audit.message_relation(m)
    )
    assert not audit.judge_messages(m, 800, seed_tree(0, "stands", name), ALARM).refuted
    scores = audit.message_scores(m, True, 100, seed_tree(1))
    assert set(scores) == {"bits", "sum", "size"} and all(
        x.shape == (100,) and np.isfinite(x).all() for x in scores.values()
    )
    eps, delta = audit.message_claims(m)
    assert eps.shape == delta.shape and (delta <= 1).all()


def test_a_message_that_is_not_private_by_itself_is_not_judged():
    assert len(PRIVATE) == 9
    with pytest.raises(ValueError, match="private message by message"):
        audit.judge_messages(Gaussian(1.0, 1.0), 100, seed_tree(0))


def test_a_lie_about_the_noise_changes_the_grid_and_nothing_else():
    assert dataclasses.replace(Gaussian(1.0, 4.0), sigma=2.0) == games.less_noise(
        Gaussian(1.0, 4.0), 2
    )


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
                assert known.eps <= made.eps <= 1.001 * known.eps
                told = made.sampling, made.q, made.rounds, made.relation, made.trust
                assert told == ("fixed", 0.05, 100, relation, "central")
    same = noisy_sum_guarantee(2.0, 1e-5, 0.05, 100, "fixed", "replace", "rdp-balle")
    assert (
        same.eps == fixed_size_epsilon(2.0, 0.05, 100, 1e-5, accountant="rdp-balle").eps
    )
    assert noise.guarantee(100, 1e-5, note="told", **run).note.count("told") == 1
    with pytest.raises(ValueError, match="use poisson or fixed, or 'none'"):
        noise.guarantee(100, 1e-5, **run | dict(sampling="replacement"))
    with pytest.raises(ValueError, match="trust is 'local'|sees who sends|fixed"):
        Gaussian(1.0, 2.0, local=True).guarantee(100, 1e-5, **run)
