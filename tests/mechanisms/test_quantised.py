"""Quantised DP-FedAvg from its parts: grid, bound on the length, roundings, what survives.

What every mechanism must do is in test_conformance. Statistical tests have false-alarm rate
1e-6 and fixed seeds.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import ALARM, count_bounds, drawn, radius
from scipy import integrate, stats
from tables import tabled

from dpcomm.core.chance import Insecure, seed_tree
from dpcomm.core.wire import Message, pack_bits
from dpcomm.mechanisms import distributed_noise, quantised
from dpcomm.mechanisms.gaussian import Gaussian
from dpcomm.mechanisms.quantised import Quantised
from dpcomm.privacy import audit
from dpcomm.secagg.ring import Ring, rounded_norm

LENET, CNN = 61_706, 582_026
settings = st.builds(
    Quantised,
    st.sampled_from([0.01, 1.0, 3.7]),
    st.just(1.0),
    st.integers(2, 16),
    st.sampled_from(quantised.ROUNDINGS),
    st.sampled_from([1.0, 0.7, 1 / 3, 0.0625]),
)


def shapes(d, *path):
    """Unit vectors of several shapes: spread out, normal, heavy-tailed, one entry, half
    steps.
    """
    rng = seed_tree(0, "shape", d, *path)
    rows = np.stack(
        [
            np.ones(d),
            rng.standard_normal(d),
            rng.standard_t(2, d),
            np.eye(1, d)[0],
            np.sign(rng.standard_normal(d)) * (np.arange(d) < (d + 1) // 2),
        ]
    )
    return torch.from_numpy(
        (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    )


# ---- the length, which is the privacy


@drawn
@given(
    settings,
    st.sampled_from([1, 2, 5, 40, 300]),
    st.sampled_from([0.3, 1.0, 1.0000001, 7.0, 1e20]),
)
def test_no_message_is_longer_than_the_clip(m, d, size):
    z = quantised.whole(
        m, shapes(d) * (size * m.clip_norm), [seed_tree(1, i) for i in range(5)]
    )
    M = quantised.longest(m, d)
    assert z.dtype == torch.int64 and int(z.abs().max()) <= m.levels
    assert max(sum(int(v) ** 2 for v in row) for row in z) <= M, (
        "whole numbers, exactly"
    )
    assert quantised.step(m, d) * math.sqrt(M) == pytest.approx(m.clip_norm, rel=1e-15)


@pytest.mark.parametrize("rounding", quantised.ROUNDINGS)
@pytest.mark.parametrize("top", [1.0, 4 / LENET**0.5])
def test_nor_at_the_size_of_a_network(rounding, top):
    m = Quantised(0.01, 3.8, rounding=rounding, top=top)
    z = quantised.whole(m, shapes(LENET), seed_tree(0, rounding)).double()
    assert (z.square().sum(1) <= quantised.longest(m, LENET)).all()
    assert (
        m.simulate(shapes(LENET), seed_tree(0, rounding)).double().norm(dim=1)
        <= 0.01 * (1 + 1e-6)
    ).all()


def test_nearest_rounding_would_break_the_promise():
    """The reason for the two roundings: the same grid, rounded to the nearest level,
    doubles some lengths.
    """
    L, v = 127, torch.full((math.floor((127 / 0.501) ** 2),), 0.501)
    assert v.norm() <= L and torch.round(v).norm() > 1.99 * L


def test_the_bound_counts_whole_squares():
    m = Quantised(2.0, 1.0, 8, "zero", 0.3)
    assert (
        quantised.longest(m, 9) == math.floor((127 / 0.3) ** 2) == m.length**2
        and m.levels == 127
    )
    r = Quantised(2.0, 1.0, 8, "random", 0.3)
    assert (
        quantised.longest(r, 9)
        == math.floor(rounded_norm(m.length, 9, quantised.REDRAWN) ** 2)
        > m.length**2
    )


@pytest.mark.parametrize(
    "x, N", [(0.5, math.sqrt(0.25 * 4000)), (1.5, 1.5 * math.sqrt(400))]
)
def test_the_bound_of_random_rounding_holds_and_is_not_far(x, N):
    "Exact tail: the squared length of equal entries is a shifted binomial."
    d = round((N / x) ** 2)
    k, low = math.floor(x), math.floor(x) ** 2
    for beta in (0.5, 1e-3, 1e-9):
        hits = math.floor(
            (rounded_norm(N, d, beta) ** 2 - d * low) / (2 * k + 1)
        )  # entries rounded up that still fit
        assert stats.binom.sf(hits, d, x - k) <= beta
    assert rounded_norm(N, d, 0.5) < 1.06 * math.sqrt(N**2 + d / 4)


def test_a_longer_rounding_is_drawn_again(monkeypatch):
    """With the chance of redrawing raised to 0.9, many are; none that is sent is too
    long.
    """
    monkeypatch.setattr(quantised, "REDRAWN", 0.9)
    m = Quantised(1.0, 1.0, 3, "random")
    u = torch.full((3000, 30), 30**-0.5)
    z = quantised.whole(m, u, seed_tree(0, "redrawn"))
    assert (z.square().sum(1) <= quantised.longest(m, 30)).all()
    free = np.random.default_rng(0).binomial(
        30, float(quantised.in_steps(m, u[:1])[0, 0] % 1), 3000
    )
    assert (free > quantised.longest(m, 30)).any(), "some would have been too long"


# ---- roundings


def test_toward_zero_by_hand():
    m = Quantised(1.0, 1.0, 3)  # L = 3
    u = torch.tensor([[0.9, -0.34, 0.2], [2.0, 0.0, 0.0], [-0.3333, 0.3334, -0.6667]])
    assert quantised.whole(m, u, None).tolist() == [[2, -1, 0], [3, 0, 0], [0, 1, -2]]
    torch.testing.assert_close(m.simulate(u, None)[1], torch.tensor([1.0, 0.0, 0.0]))
    assert quantised.in_steps(m, u)[1].tolist() == [3.0, 0.0, 0.0]


def test_an_entry_on_the_grid_stays_on_it():
    for bits, clip in ((8, 0.01), (8, 0.3), (16, 0.7)):
        m = Quantised(clip, 1.0, bits)
        k = torch.arange(-m.levels, m.levels + 1, max(1, m.levels // 100))
        u = (k.double() * quantised.step(m, 1))[:, None]
        assert torch.equal(quantised.whole(m, u, None)[:, 0], k)


def test_random_rounding_is_a_fair_coin():
    n = 20_000
    m = Quantised(1.0, 1.0, 4, "random")
    u = torch.tensor([[0.31, -0.17, 0.02, 0.0]])
    x = quantised.in_steps(m, u)[0]
    z = quantised.whole(m, u.expand(n, 4), seed_tree(0, "coin"))
    for j in range(4):
        low, high = count_bounds(n, float(x[j] - x[j].floor()), 4)
        assert low <= int((z[:, j] == x[j].floor() + 1).sum()) <= high and set(
            z[:, j].tolist()
        ) <= {math.floor(x[j]), math.floor(x[j]) + 1}


def test_the_cut_ends_the_grid():
    m = Quantised(1.0, 1.0, 8, "zero", 0.25)
    sent = m.simulate(torch.tensor([[0.9, 0.1, -0.3]]), None)[0]
    assert sent[0] == pytest.approx(0.25, rel=1e-4) == -sent[2] and sent[
        1
    ] == pytest.approx(0.1, abs=0.25 / 127)
    bias, variance = m.moments(torch.tensor([[0.9, 0.1, -0.3]]))
    torch.testing.assert_close(bias[0], sent - torch.tensor([0.9, 0.1, -0.3]))
    assert not variance.any()
    bias, variance = Quantised(1.0, 1.0, 8, "random", 0.25).moments(
        torch.tensor([[0.9, 0.1, -0.3]])
    )
    torch.testing.assert_close(
        bias[0], torch.tensor([0.25 - 0.9, 0.0, 0.3 - 0.25]), rtol=0, atol=3e-3
    )
    assert (
        not variance[0, [0, 2]].any() and 0 < variance[0, 1] <= (0.25 / 127) ** 2 / 4
    ), "what is cut is certain"


# ---- messages, sums, noise


def test_a_message_is_its_levels():
    m = Quantised(1.0, 1.0, 5, "random")
    u = shapes(30)[1]
    message = m.encode(u, Insecure(4))
    assert len(message.payload) == math.ceil(5 * 30 / 8) == m.bits(30).payload // 8
    np.testing.assert_array_equal(
        quantised.levels_of(m, message),
        quantised.whole(m, u[None], seed_tree(4, "private"))[0],
    )
    torch.testing.assert_close(
        m.decode(message),
        m.simulate(u[None], seed_tree(4, "private"))[0],
        rtol=0,
        atol=0,
    )
    with pytest.raises(ValueError, match="levels end at 15"):
        m.decode(Message(m.name, 2, pack_bits([31, 0], 5), m.fingerprint))


def test_sums_open_in_a_ring():
    m, rows = Quantised(1.0, 1.0, 8, "random"), shapes(12)
    messages = [m.encode(row, Insecure(i)) for i, row in enumerate(rows)]
    ring = Ring(11)
    total = ring.lift(
        ring.sum([ring.wrap(quantised.levels_of(m, message)) for message in messages])
    )
    expected = sum(m.decode(message).double() for message in messages).numpy()
    np.testing.assert_allclose(total * quantised.step(m, 12), expected, atol=1e-6)


def test_the_servers_noise_is_that_of_dp_fedavg():
    m, g, sent = Quantised(0.5, 2.0), Gaussian(0.5, 2.0), torch.zeros(3, 50_000)
    a, b = (x.aggregate(sent, 10, seed_tree(0, "noise")) for x in (m, g))
    assert (
        torch.equal(a, b)
        and abs(float(a.mean())) < radius(0.1, 50_000)
        and float(a.std()) == pytest.approx(0.1, rel=0.02)
    )


# ---- guarantee and audit


def test_the_guarantee_is_the_gaussian_mechanisms():
    run = dict(
        rounds=1000,
        delta=100**-1.1,
        n_clients=100,
        cohort=10,
        sampling="poisson",
        note="first",
    )
    for rounding in quantised.ROUNDINGS:
        ours = Quantised(0.01, 3.8, rounding=rounding).guarantee(**run)
        theirs = Gaussian(0.01, 3.8).guarantee(**run)
        assert (ours.eps, ours.delta, ours.trust, ours.relation) == (
            theirs.eps,
            theirs.delta,
            "central",
            "add-remove",
        )
        assert ours.note.startswith(
            "first; the server adds the noise and sees every sum before it"
        )


@pytest.mark.parametrize("rounding", quantised.ROUNDINGS)
def test_the_audit_comes_close_to_the_claim(rounding):
    m, delta = Quantised(2.0, 2.0, rounding=rounding), 1e-2
    found = audit.audit_play(m, "replace", 60_000, delta, seed_tree(0, "audit"), ALARM)
    assert (
        0.5 * audit.claim(m, "replace", delta).eps
        < found.eps
        <= audit.claim(m, "replace", delta).eps
    )


def test_an_audit_would_notice_a_longer_message(monkeypatch):
    """A grid whose step is three times too wide breaks the claim where the server
    believes it, and does not where the server clips.
    """
    m, delta, wide = Quantised(1.0, 1.0), 1e-2, quantised.step
    monkeypatch.setattr(quantised, "step", lambda mechanism, d: 3 * wide(mechanism, d))

    def refuted():
        return audit.refutes(
            audit.audit_play(
                m, "add-remove", 20_000, delta, seed_tree(0, "wide"), ALARM
            ),
            audit.claim(m, "add-remove", delta),
        )

    assert not refuted()
    monkeypatch.setattr(
        distributed_noise,
        "clip_to_grid",
        lambda rows, clip, scale: (rows / scale).long().numpy(),
    )
    assert refuted()


def test_scores_add_up_over_rounds_and_mix_under_sampling():
    m = Quantised(1.0, 2.0)
    one = m.play("add-remove", True, 40_000, seed_tree(0, "one"))["likelihood"]
    assert abs(one.mean() - 1 / 8) < radius(0.5, 40_000) and one.std() == pytest.approx(
        0.5, rel=0.03
    )
    two = m.play("add-remove", True, 40_000, seed_tree(0, "two"), rounds=2)[
        "likelihood"
    ]
    assert abs(two.mean() - 2 / 8) < radius(0.5**0.5, 40_000)
    rare = m.play("zero-out", True, 2000, seed_tree(0, "rare"), n_clients=10, cohort=1)[
        "likelihood"
    ]
    assert rare.min() >= math.log(0.9)


# ---- what survives of an update


@tabled(
    "m, d, expected",
    [
        (Quantised(1.0, 1.0), LENET, 0.2313),
        (Quantised(1.0, 1.0), CNN, 0.0),
        (
            Quantised(1.0, 1.0, rounding="random"),
            LENET,
            127 / rounded_norm(127, LENET, 1e-9),
        ),
        (Quantised(0.01, 1.0, top=4 / LENET**0.5), LENET, 0.987),
        (Quantised(1.0, 1.0, 16), LENET, 0.996),
    ],
)
def test_what_survives_of_normal_entries(m, d, expected):
    u = torch.from_numpy(seed_tree(0, "normal").standard_normal((2, d)))
    found = quantised.survival(
        m, u / u.norm(dim=1, keepdim=True) * m.clip_norm, seed_tree(0, "rounding")
    )
    assert found == pytest.approx(expected, abs=4e-3)


def test_the_survival_of_truncation_is_an_integral():
    t, g = LENET**0.5 / 127, Gaussian(1.0, 1.0)
    by_parts = integrate.quad(
        lambda x: 2 * x * t * math.floor(x / t) * stats.norm.pdf(x),
        0,
        12,
        points=[t * k for k in range(1, 7)],
        limit=200,
    )[0]
    assert by_parts == pytest.approx(0.2313, abs=1e-3)
    assert quantised.survival(g, shapes(50), seed_tree(0)) == pytest.approx(
        1, abs=1e-6
    ), "without quantisation nothing is lost"


# ---- settings


@pytest.mark.parametrize(
    "change", [dict(top=1.1), dict(top=1e-5), dict(level_bits=16, top=0.05)]
)
def test_a_range_outside_the_clip_or_too_fine_is_refused(change):
    with pytest.raises(ValueError, match="top is .* must be"):
        Quantised(**(dict(clip_norm=1.0, sigma=1.0) | change))
