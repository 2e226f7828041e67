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

from dpcomm.core.chance import Insecure, seed_tree
from dpcomm.core.wire import BadMessage
from dpcomm.mechanisms import contract, distributed_noise, gaussian, quantised
from dpcomm.mechanisms.topk import TopK
from dpcomm.privacy import accounting

MECH = TopK(1.0, 0.5, 1.5, 20, tolerance=0.25)


def test_a_summed_mechanism_inherits_the_half_that_is_the_same():
    assert (
        isinstance(MECH, distributed_noise.LinearSketch)
        and MECH.replay is False
        and MECH.fingerprint != dataclasses.replace(MECH, sigma=1.6).fingerprint
    )
    assert MECH.scale == distributed_noise.grid(0.5, 1.5, 20, 0.25)


def test_honest_shares_keep_the_promise():
    for tolerance in (0.0, 0.1, 0.5):
        share = distributed_noise.share_std(2.0, 1.5, 40, tolerance)
        assert math.sqrt((1 - tolerance) * 40) * share == pytest.approx(3.0)
    assert (
        MECH.share == distributed_noise.share_std(0.5, 1.5, 20, 0.25)
        and dataclasses.replace(MECH, sigma=None).share == 0
    )


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
    scale = distributed_noise.grid(clip, sigma, n, tolerance)
    top = n * clip + distributed_noise.TAILS * math.sqrt(
        n
    ) * distributed_noise.share_std(clip, sigma, n, tolerance)
    assert (
        top <= scale * (distributed_noise.RING.modulus // 2 - 1) < 2.0001 * top
        and math.log2(scale).is_integer()
    )


def test_no_vector_is_lengthened_by_the_grid():
    rng = seed_tree(0)
    for scale in (0.3, 1e-3, 1e-7):
        x = rng.standard_normal(1000)
        z = (
            distributed_noise.RING.lift(
                distributed_noise.to_ring(x, scale, scale * 1e-9, rng)
            )
            * scale
        )
        assert (np.abs(z) <= np.abs(x)).all() and np.abs(z - x).max() <= scale


def test_ring_noise_has_the_share_s_deviation():
    z = (
        distributed_noise.RING.lift(
            distributed_noise.to_ring(np.zeros(40_000), 1e-6, 0.2, seed_tree(1))
        )
        * 1e-6
    )
    assert abs(z.mean()) <= radius(0.2, 40_000, 1) and abs(z.var() - 0.04) <= radius(
        math.sqrt(2) * 0.04, 40_000, 1
    )


def test_messages_come_back_and_foreign_ones_do_not():
    values = torch.tensor([0.1, -0.2, 0.3])
    message = MECH.encode(values, Insecure(5))
    read = MECH.decode(message)
    assert len(message.payload) == 12 and (read - values).abs().max() < 8 * MECH.share
    plain = dataclasses.replace(MECH, sigma=None)
    assert torch.equal(
        plain.decode(plain.encode(values)),
        values,
    )
    for mechanism, changes, says in (
        (plain, {}, "use the sender's parameters"),
        (MECH, dict(d=2), "payload of 12 bytes"),
        (dataclasses.replace(MECH, tolerance=0.2), {}, "use the sender's parameters"),
    ):
        with pytest.raises(BadMessage, match=says):
            mechanism.decode(dataclasses.replace(message, **changes))


def test_noisy_rows_are_noisy_only_with_privacy():
    rows = torch.zeros(3, 5000)
    assert torch.equal(dataclasses.replace(MECH, sigma=None).noisy(rows, None), rows)
    rows = MECH.noisy(rows, [seed_tree(i) for i in range(3)])
    assert abs(float(rows.var()) - MECH.share**2) <= radius(
        math.sqrt(2) * MECH.share**2, 15_000, 1
    )
    total = MECH.noise(20_000, 20, seed_tree(4))
    assert abs(float(total.var()) - 20 * MECH.share**2) <= radius(
        math.sqrt(2) * 20 * MECH.share**2, 20_000, 1
    )


def test_the_guarantee_is_the_gaussian_s_and_says_against_whom():
    known = MECH.guarantee(rounds=3, delta=1e-5)
    assert (
        known.eps == accounting.gaussian_guarantee(1.5, 1e-5, 1.0, 3).eps
        and known.trust == "secagg"
        and known.sampling == "none"
    )
    hidden = MECH.guarantee(200, 1e-5, n_clients=6000, cohort=100, sampling="poisson")
    assert (
        hidden.eps < known.eps
        and hidden.trust == "central"
        and distributed_noise.HIDDEN in hidden.note
    )
    table = TopK(1.0, 1.0, 1.54, 100).guarantee(
        rounds=200,
        delta=1e-5,
        n_clients=6000,
        cohort=100,
        sampling="poisson",
        orders=accounting.INTEGER_ORDERS,
    )
    assert table.eps == pytest.approx(1.0006, abs=5e-5)


def test_a_scheme_without_noise_promises_nothing():
    plain = dataclasses.replace(MECH, sigma=None)
    assert plain.relations == {} and set(MECH.relations) == set(
        distributed_noise.CLAIMED
    )
    with pytest.raises(
        ValueError, match="sigma is None; a scheme without noise promises nothing"
    ):
        plain.guarantee(rounds=1, delta=1e-5)


@pytest.mark.parametrize("relation", distributed_noise.CLAIMED)
def test_the_game_is_played_with_the_honest_noise(relation):
    """The score's mean and variance under both worlds are those of a Gaussian of the
    promised multiplier.
    """
    n, quiet = 20_000, TopK(1.0, 1.0, 2.0, 10, tolerance=0.2)
    shift = (2 if relation == "replace" else 1) / 2.0
    for present in (True, False):
        score = quiet.play(relation, present, n, seed_tree(0, relation, int(present)))[
            "likelihood"
        ]
        centre = shift**2 / 2 * (1 if present else -1)
        assert abs(score.mean() - centre) <= radius(shift, n, 4) + 1e-6
        assert (
            abs(score.var() - shift**2) <= radius(math.sqrt(2) * shift**2, n, 4) + 1e-6
        )
    with pytest.raises(ValueError, match="relation"):
        quiet.play("local", True, 10, seed_tree(0))


def test_a_client_that_leaves_with_its_share_is_promised_nothing():
    assert (
        MECH.guarantee(rounds=1, delta=1e-5).relation == "zero-out"
        and "add-remove" not in MECH.relations
    )
    with pytest.raises(ValueError, match="takes its share of the noise along"):
        MECH.guarantee(rounds=1, delta=1e-5, relation="add-remove")


@pytest.mark.parametrize(
    "n, sigma", [(10**7, 1.0), (4 * 10**6, 1.0), (2 * 10**6, 0.5), (10**6, 0.1)]
)
def test_a_share_that_rounds_to_nothing_is_refused_with_the_bits_that_would_do(
    n, sigma
):
    bits = distributed_noise.least_bits(1.0, sigma, n)
    with pytest.raises(
        ValueError,
        match=f"below half a step it rounds to nothing: a ring of {bits} bits would do",
    ):
        TopK(1.0, 1.0, sigma, n)
    shrink = 2.0 ** (distributed_noise.RING.bits - bits)
    assert (
        distributed_noise.share_std(1.0, sigma, n)
        / (shrink * distributed_noise.grid(1.0, sigma, n))
        >= 0.5
        > distributed_noise.share_std(1.0, sigma, n)
        / (2 * shrink * distributed_noise.grid(1.0, sigma, n))
    )


def test_coarse_shares_are_paid_for():
    fine, coarse = TopK(1.0, 1.0, 1.54, 100), TopK(1.0, 1.0, 1.0, 1_300_000)
    assert (
        fine.counted == fine.sigma
        and 0 < coarse.counted < coarse.sigma
        and coarse.share >= coarse.scale / 2
    )
    steps = coarse.share / coarse.scale
    excess = (
        10
        * np.exp(
            -2 * np.pi**2 * steps**2 * np.arange(1, 1_300_000) / np.arange(2, 1_300_001)
        ).sum()
        * 2**32
        / 2
    )
    assert coarse.counted == pytest.approx(
        (1 + excess) ** -0.5, rel=1e-3
    ) and coarse.counted <= (1 + excess) ** -0.5 * (1 + 1e-12)
    promised = coarse.guarantee(rounds=1, delta=1e-5)
    assert (
        promised.eps
        == accounting.gaussian_guarantee(
            coarse.counted, 1e-5, orders=accounting.INTEGER_ORDERS
        ).eps
    )
    with pytest.raises(ValueError, match="accountant is 'pld'"):
        coarse.guarantee(rounds=1, delta=1e-5, accountant="pld")


def test_what_a_caller_notes_is_added_to_what_must_be_said():
    for sampling in ("none", "poisson"):
        run = dict(rounds=3, delta=1e-5, n_clients=100, cohort=20, sampling=sampling)
        plain = MECH.guarantee(**run)
        noted = MECH.guarantee(
            **run, note="a remark", premises={"sampling": "as the paper accounts it"}
        )
        assert (
            "15 of 20 honest shares" in plain.note
            and plain.note.split(";")[0] in noted.note
            and "a remark" in noted.note
        )
        assert noted.premises["sampling"] == "as the paper accounts it"
        assert ("shares" in noted.premises) == (sampling == "poisson")
    assert (
        str(plain).startswith("As if the noise had one size")
        and distributed_noise.HIDDEN in plain.note
    )


@pytest.mark.parametrize(
    "name, made, release",
    [
        ("gaussian", {}, dict(sampling="poisson", n_clients=100, cohort=10)),
        ("gaussian", dict(exact=False), dict(n_clients=100)),
        (
            "quantised",
            dict(level_bits=8),
            dict(sampling="poisson", n_clients=100, cohort=10),
        ),
        ("topk", dict(fraction=1.0, n_clients=100), {}),
        ("compressive", dict(fraction=1.0, n_clients=100), {}),
        ("ddgauss", dict(n_clients=100), dict(d=8)),
        ("skellam", dict(n_clients=100), dict(d=8)),
        (
            "topk",
            dict(fraction=1.0, n_clients=10),
            dict(n_clients=100, cohort=10, sampling="poisson"),
        ),
    ],
)
def test_a_delta_of_one_client_is_noted_wherever_their_number_is_known(
    name, made, release
):
    m = contract.mechanism(name, clip_norm=1.0, sigma=1.0, **made)
    for delta, noted in ((0.99, True), (0.01, True), (0.0099, False)):
        told = m.guarantee(10, delta, **release)
        assert ("delta is at least 1/100" in told.note) == noted
        assert told.note.count("delta is at least") == noted


def test_coarse_messages_are_simulated_in_steps():
    coarse, rows = TopK(1.0, 1.0, 1.0, 1_300_000), torch.full((400, 50), 0.1)
    simulated = (
        coarse.noisy(rows, [seed_tree(i) for i in range(400)]).double().numpy()
        / coarse.scale
    )
    share = coarse.share / coarse.scale
    assert np.allclose(simulated, np.round(simulated), atol=1e-3) and 0.5 < share < 2
    assert abs(simulated.mean() - np.trunc(0.1 / coarse.scale)) <= radius(
        share, 20_000, 2
    )
    assert (
        abs(simulated.var() - share**2)
        <= radius(math.sqrt(2) * share**2, 20_000, 2) + 1e-3 * share**2
    )


def test_the_counted_noise_is_what_the_excess_leaves():
    assert distributed_noise.counted_sigma(1.0, 1.54, 100) == 1.54
    left = [
        distributed_noise.counted_sigma(1.0, 1.0, n)
        for n in (10**6, 13 * 10**5, 2 * 10**6)
    ]
    assert 1.0 >= left[0] > left[1] > left[2] > 0


def test_what_is_said_of_shares_keeps_what_a_caller_says():
    assert (
        distributed_noise.of_shares("none", 8, 10)["premises"] == {}
        and "8 of 10 honest shares"
        in distributed_noise.of_shares("none", 8, 10)["note"]
    )
    both = distributed_noise.of_shares(
        "poisson",
        8,
        10,
        {"note": "a", "premises": {"keys": "b"}, "relation": "replace"},
    )
    assert (
        both["note"].startswith("a; ")
        and both["premises"] == {"keys": "b", "shares": accounting.PREMISES["shares"]}
        and set(both) == {"note", "premises"}
    )


def test_coarse_noise_needs_a_stream_a_row():
    coarse = TopK(1.0, 1.0, 1.0, 1_300_000)
    with pytest.raises(ValueError, match="rng holds 3 streams for 2 rows"):
        coarse.noisy(torch.zeros(2, 4), [seed_tree(i) for i in range(3)])
    assert MECH.share >= distributed_noise.FINE * MECH.scale, (
        "FL-TOP's own shares are drawn as normal numbers"
    )


def test_a_message_is_no_longer_than_the_clip_by_a_single_bit():
    """The sketch is clipped in single precision; the row that goes into the ring is
    counted in whole numbers, its noise taken off again.
    """
    quiet = TopK(1.0, 0.1, 1e-6, 1)
    for row in ([7.0, 0.0], [1.0, 1.0], [3.0, 4.0], [0.1, 1e-9]):
        values = quiet.sketch(torch.tensor([row]))[0].double().numpy()
        z, noise = (
            distributed_noise.RING.lift(
                distributed_noise.to_ring(
                    v, quiet.scale, quiet.share, seed_tree(3), 0.1
                )
            )
            for v in (values, 0 * values)
        )
        assert (
            sum(int(a) ** 2 for a in z - noise) * Fraction(quiet.scale) ** 2
            <= Fraction(0.1) ** 2
        )


def test_a_loss_distribution_and_its_discrete_noise_share_one_delta(monkeypatch):
    """Grids finer and finer: the first that is accepted is the first whose price, with
    what the distribution got, is within delta.
    """
    asked, delta, normal = [], 1e-5, accounting.gaussian_guarantee(1.0, 1e-5)

    def stated(sigma, delta, q, rounds, **fields):
        asked.append(delta)
        return dataclasses.replace(normal, eps=1.0, delta=delta)

    monkeypatch.setattr(distributed_noise, "gaussian_guarantee", stated)
    accepted, fit = [], []
    for steps in np.geomspace(1e5, 1e8, 100):
        gap = distributed_noise.rounding_gap(steps, 3 * distributed_noise.COORDINATES)
        try:
            found = distributed_noise.exact_guarantee(
                1.0, delta, steps, rounds=3, accountant="pld"
            )
            assert found.delta == delta
            accepted.append(True)
        except ValueError:
            accepted.append(False)
        fit.append(asked[-1] + (1 + math.e) * gap <= delta * (1 + 1e-12))
    assert accepted == fit and 10 < sum(fit) < 90


@pytest.mark.parametrize("kind", [gaussian.Gaussian, quantised.Quantised])
def test_what_a_streaming_server_adds_is_no_longer_than_the_clip(kind):
    "A message far outside the clip counts as one on it, exactly, as in a cohort's sum."
    m, d = kind(1.0, 2.0), 7
    far = m.encode(torch.ones(d), None)
    monster = torch.full((d,), 100.0)
    loud = dataclasses.replace(m, clip_norm=1.0)
    object.__setattr__(loud, "decode", lambda message: monster)
    code = loud.code(far)
    assert (
        int((code.astype(object) ** 2).sum())
        <= (Fraction(m.clip_norm) / Fraction(m.scale)) ** 2
    )
    assert (code * m.scale == m.add_up(monster[None]).numpy()).all()
    assert np.linalg.norm(code * m.scale) > 1 - 1e-6
