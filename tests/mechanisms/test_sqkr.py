"""SQKR from its parts: frame, representation, bits, lies. What every mechanism must do
is in test_conformance.

Statistical tests have false-alarm rate 1e-6 and fixed seeds.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from laws import ALARM, count_bounds, fit, radius
from scipy import linalg
from tables import tabled

from dpcomm import cli
from dpcomm.core import chance, vectors, wire
from dpcomm.core.chance import Insecure, seed_tree
from dpcomm.mechanisms import sqkr
from dpcomm.mechanisms.sqkr import Sqkr
from dpcomm.report import papers, records

SIZES = [1, 2, 3, 5, 16, 17, 100]
LEVEL = 1 / (0.6 * math.sqrt(0.8))


def unit_rows(n, d, *path):
    x = torch.from_numpy(seed_tree(0, "rows", n, d, *path).standard_normal((n, d)))
    return x / x.norm(dim=1, keepdim=True)


def matrix(f, d):
    "The frame as an (N, d) matrix."
    return sqkr.analyse(torch.eye(d, dtype=torch.float64), f).T


# ---- frame


@tabled("d", SIZES)
def test_the_frame_is_tight_with_rows_of_one_length(d):
    f = sqkr.frame(d)
    U = matrix(f, d)
    assert (
        isinstance(f, sqkr.Frame)
        and 2 * d <= f.size < 4 * d
        and f.size & (f.size - 1) == 0
    )
    assert len(set(f.columns.tolist())) == d and set(f.signs.tolist()) <= {-1.0, 1.0}
    torch.testing.assert_close(U.T @ U, torch.eye(d, dtype=torch.float64))
    torch.testing.assert_close(
        U.norm(dim=1), torch.full((f.size,), math.sqrt(d / f.size), dtype=torch.float64)
    )


def test_the_frame_is_public_and_has_a_seed():
    sqkr.frame.cache_clear()
    again = [matrix(sqkr.frame(20, seed), 20) for seed in (0, 1, 0)]
    assert torch.equal(again[0], again[2]) and not torch.equal(again[0], again[1])


@tabled("size", [1, 2, 16, 32, 64, 2048])
def test_the_transform_is_sylvesters_matrix(size):
    H = torch.from_numpy(linalg.hadamard(size)) / math.sqrt(size)
    x = unit_rows(3, size)
    torch.testing.assert_close(sqkr.walsh_hadamard(x), x @ H.double())
    assert sqkr.walsh_hadamard is vectors.walsh_hadamard


@tabled("d", SIZES)
def test_synthesis_is_the_adjoint_and_undoes_analysis(d):
    f, u = sqkr.frame(d), unit_rows(4, d)
    a = unit_rows(4, f.size, "a")
    torch.testing.assert_close(
        (sqkr.analyse(u, f) * a).sum(1), (u * sqkr.synthesise(a, f)).sum(1)
    )
    torch.testing.assert_close(sqkr.synthesise(sqkr.analyse(u, f), f), u)


# ---- representation


@tabled("d", SIZES)
def test_truncation_represents_exactly(d):
    f, u = sqkr.frame(d), unit_rows(50, d)
    torch.testing.assert_close(sqkr.synthesise(sqkr.kashin(u, f, 1.0), f), u)
    assert not sqkr.kashin(0 * u, f, 1.0).any()
    torch.testing.assert_close(sqkr.kashin(3 * u, f, 3.0), 3 * sqkr.kashin(u, f, 1.0))


@pytest.mark.parametrize("d", [20, 100, 128, 200])
def test_ordinary_vectors_fit_inside_the_bound(d):
    f, u = sqkr.frame(d), unit_rows(200, d)
    bound = LEVEL / math.sqrt(f.size)
    loose = sqkr.kashin(u, f, 1.0)
    before = loose.clone()
    a = sqkr.project(loose, f, bound)
    assert (loose.abs() > bound).any(), "nothing to do"
    assert a.abs().max() <= bound and torch.equal(loose, before), (
        "the argument was changed"
    )
    torch.testing.assert_close(sqkr.synthesise(a, f), u, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        sqkr.project(loose[7:8], f, bound)[0], a[7], rtol=0, atol=1e-12
    )
    assert 0 < sqkr.INNER < 1 and sqkr.PROJECTIONS >= 20


def test_truncation_alone_does_not_fit(monkeypatch):
    f, u = sqkr.frame(200), unit_rows(200, 200)
    bound, loose = LEVEL / math.sqrt(f.size), sqkr.kashin(u, f, 1.0)

    def lost():
        return float(
            (sqkr.synthesise(sqkr.project(loose, f, bound), f) - u).norm(dim=1).max()
        )

    monkeypatch.setattr(sqkr, "PROJECTIONS", 0)
    assert lost() > 0.03


# ---- bits and lies


def test_the_probability_of_keeping():
    assert sqkr.keep_probability(2, 1.0) == pytest.approx(math.tanh(0.5))
    assert sqkr.keep_probability(2**7, math.inf) == 1.0 and sqkr.keep_probability(
        2.0**512, 1000.0
    ) == pytest.approx(1.0)
    for k, eps in itertools.product((1, 2, 5, 16), (0.01, 1.0, 8.0)):
        keep = sqkr.keep_probability(2**k, eps)
        assert keep == pytest.approx((math.exp(eps) - 1) / (math.exp(eps) + 2**k - 1))
        assert 1 + keep * 2**k / (1 - keep) == pytest.approx(math.exp(eps)), (
            "the ratio of the likeliest and the least likely string"
        )


def test_the_answer_is_read_off_the_draws():
    x = torch.tensor([[1.0, -1.0, 0.5]], dtype=torch.float64)

    def said(bits, lies, honest):
        draws = torch.tensor([[*bits, *lies]], dtype=torch.float64)
        return sqkr.respond(x, draws, np.array([honest])).tolist()

    assert said((0.99, 0.0, 0.74), (0.1, 0.1, 0.9), True) == [[1, -1, 1]]
    assert said((0.99, 0.0, 0.76), (0.1, 0.1, 0.9), True) == [[1, -1, -1]]
    assert said((0.99, 0.0, 0.74), (0.1, 0.6, 0.4), False) == [[1, -1, 1]]
    coin = np.array([0.46, 0.47])
    assert sqkr.kept(coin, 2, 1.0, seed_tree(0)).tolist() == [True, False]


@pytest.mark.parametrize("k, eps", [(1, math.inf), (1, 1.0), (3, 2.0), (4, math.inf)])
def test_messages_follow_the_law_given_their_coordinates(k, eps):
    m, u, n = Sqkr(1.0, nbits=k, eps=eps), unit_rows(1, 10)[0].float(), 20_000
    p = sqkr.law(m, u, seed=5)
    assert float(p.sum()) == pytest.approx(1.0)
    a, f, bound = sqkr.represent(m, u[None])
    x = (a[:, sqkr.coordinates(5, f.size, k)] / bound).expand(n, k)
    rng = seed_tree(0, "law", k)
    strings = sqkr.answer(m, x, chance.uniform_rows(rng, n, 2 * k + 1), rng)
    index = ((strings > 0).long() * 2 ** torch.arange(k - 1, -1, -1)).sum(1)
    assert fit(np.bincount(index.numpy(), minlength=2**k), p.numpy()) > ALARM
    torch.testing.assert_close(
        sqkr.likelihood(x[:50], strings[:50], m.keep), p[index[:50]]
    )


@pytest.mark.parametrize("k, eps", [(1, 0.5), (1, 4.0), (3, 2.0), (6, 6.0)])
def test_no_string_is_likelier_than_epsilon_allows(k, eps):
    m = Sqkr(1.0, nbits=k, eps=eps)

    def ratio(u, v, seed):
        return float(
            (sqkr.law(m, u, seed).log() - sqkr.law(m, v, seed).log()).abs().max()
        )

    rows = unit_rows(60, 128).float() * 3
    assert max(ratio(u, v, i) for i, (u, v) in enumerate(zip(rows[1:], rows))) <= eps
    worst = sqkr.worst_case(m, sqkr.coordinates(3, 256, k), 128)
    assert (
        worst.norm() == pytest.approx(1.0)
        and 0.9 * eps < ratio(worst, -worst, 3) <= eps + 1e-9
    ), "the bound is nearly reached"


def test_the_law_of_many_bits_is_not_listed():
    with pytest.raises(ValueError, match="nbits is 17"):
        sqkr.law(Sqkr(1.0, nbits=17), torch.ones(3), 0)


# ---- estimate


def every_estimate(m, u):
    "All pairs of coordinates and strings: probability and estimate of each."
    a, f, bound = sqkr.represent(m, u[None])
    at = torch.tensor(list(itertools.product(range(f.size), repeat=m.nbits)))
    strings = torch.tensor(
        list(itertools.product((-1.0, 1.0), repeat=m.nbits)), dtype=torch.float64
    )
    p = torch.stack(
        [sqkr.likelihood(a[0, at] / bound, s[None], m.keep) for s in strings], 1
    ) / len(at)
    return (
        p[..., None],
        torch.stack(
            [sqkr.estimate(m, at, s.expand(len(at), -1), f) for s in strings], 1
        ).double(),
    )


@tabled("k, eps", [(1, math.inf), (1, 1.0), (2, math.inf), (2, 3.0), (3, 0.7)])
@tabled("d", [1, 2, 3])
def test_mean_and_variance_by_enumeration(d, k, eps):
    m, u = Sqkr(2.0, nbits=k, eps=eps), 1.7 * unit_rows(1, d)[0].float()
    p, x = every_estimate(m, u)
    mean = (p * x).sum((0, 1))
    bias, variance = (moment[0] for moment in m.moments(u[None]))
    torch.testing.assert_close(mean, u + bias, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        (p * x**2).sum((0, 1)) - mean**2, variance, rtol=1e-5, atol=1e-5
    )
    assert float(p.sum()) == pytest.approx(1.0)


def test_what_does_not_fit_is_counted_as_bias():
    """At K = 1.05 no Gaussian vector fits: the declared bias is there, and the average
    ends at it.
    """
    m, u, n = Sqkr(1.0, shrink=0.05, support=1.0), unit_rows(1, 20)[0].float(), 15_000
    bias, variance = (moment[0].double() for moment in m.moments(u[None]))
    assert 0.05 < bias.norm() < 1
    error = m.simulate(u.expand(n, 20), seed_tree(0, "bias")).double().mean(0) - u
    assert (
        (error - bias).abs().numpy() <= radius(np.sqrt(variance.numpy()), n, 20)
    ).all()
    assert not (error.abs().numpy() <= radius(np.sqrt(variance.numpy()), n, 20)).all()


def test_an_estimate_is_a_sum_of_rows_of_the_frame():
    m, f = Sqkr(2.0, nbits=3, eps=4.0), sqkr.frame(7)
    at = torch.tensor([[4, 4, 9]])
    signs = torch.tensor([[1.0, 1.0, -1.0]], dtype=torch.float64)
    U = matrix(f, 7)
    expected = f.size * (m.level / math.sqrt(f.size)) / (3 * m.keep) * (2 * U[4] - U[9])
    torch.testing.assert_close(sqkr.estimate(m, at, signs, f)[0], expected.float())


def test_a_message_says_its_coordinates_and_signs():
    m, u = Sqkr(1.0, nbits=11, eps=3.0), unit_rows(1, 9)[0].float()
    message = m.encode(u, Insecure(3))
    at = sqkr.coordinates(int.from_bytes(message.payload[:4], "little"), 32, 11)
    signs = torch.from_numpy(2.0 * wire.unpack_bits(message.payload[4:], 1, 11) - 1)
    assert len(message.payload) == 6
    torch.testing.assert_close(
        m.decode(message), sqkr.estimate(m, at[None], signs[None], sqkr.frame(9))[0]
    )


def test_coordinates_are_uniform_and_drawn_again():
    found = torch.cat(
        [sqkr.coordinates(seed, 16, 2)[None] for seed in range(4000)]
    ).numpy()
    assert (
        fit(
            np.bincount(found[:, 0] * 16 + found[:, 1], minlength=256),
            np.full(256, 1 / 256),
        )
        > ALARM
    )
    low, high = count_bounds(4000, 1 / 16)
    assert low <= (found[:, 0] == found[:, 1]).sum() <= high, "with replacement"
    assert torch.equal(sqkr.coordinates(7, 16, 5), sqkr.coordinates(7, 16, 5))


def test_streams_by_row_or_one_for_all():
    one = seed_tree(0)
    assert chance.row_streams(one, 3) == [one, one, one] and chance.row_streams(
        [one], 1
    ) == [one]
    with pytest.raises(ValueError, match="2 streams for 3 rows"):
        chance.row_streams([one, one], 3)


def test_draws_by_row_or_from_one_stream():
    streams = [seed_tree(0, i) for i in range(3)]
    rows = chance.uniform_rows(streams, 3, 4)
    assert (
        rows.shape == (3, 4)
        and np.array_equal(rows[1:2], chance.uniform_rows(seed_tree(0, 1), 1, 4))
        and ((0 <= rows) & (rows < 1)).all()
    )
    assert chance.uniform_rows([], 0, 4).shape == (0, 4)
    with pytest.raises(ValueError, match="2 streams for 3 rows"):
        chance.uniform_rows(streams[:2], 3, 4)


def test_public_coordinates_are_everybodys():
    "With one coordinate for all, every estimate is plus or minus one row of the frame."
    m, x = Sqkr(1.0), unit_rows(40, 12).float()
    f = sqkr.frame(12)
    estimates = m.simulate(x, seed_tree(0, "public"), at=torch.tensor([5])).double()
    row = f.size * m.level / math.sqrt(f.size) * matrix(f, 12)[5]
    assert {tuple((e / row).round(decimals=4).tolist()) for e in estimates} == {
        (1.0,) * 12,
        (-1.0,) * 12,
    }
    free = m.simulate(x, seed_tree(0, "public"))
    assert torch.linalg.matrix_rank(free) == 12


def test_the_error_of_one_bit_is_the_closed_form_everybody_quotes():
    m = Sqkr(1.0)
    bias, variance = m.moments(unit_rows(3, 200).float())
    assert m.level == pytest.approx(LEVEL) and float(bias.norm()) < 1e-6
    np.testing.assert_allclose(variance.sum(1), 200 * LEVEL**2 - 1, rtol=1e-6)
    assert papers.cell("dprec", "mean.chen.mse").value == pytest.approx(
        (200 * LEVEL**2 - 1) / 10_000, abs=5e-3
    )


# ---- guarantee


def test_the_game_follows_the_law():
    """Of the likeliest string as many as declared in both worlds; the score is the
    log-ratio of the two.
    """
    m, n = Sqkr(1.0, nbits=2, eps=1.5), 20_000
    assert m.relations == {"local": {}} and m.guarantee(rounds=6).eps == 9.0
    scores = {
        present: m.play("local", present, n, seed_tree(0, "play", present))[
            "likelihood"
        ]
        for present in (True, False)
    }
    top = scores[True].max()
    assert 0.95 * m.eps < top <= m.eps
    counts = {present: (s > top - 1e-9).sum() for present, s in scores.items()}
    p = sqkr.keep_probability(4, 1.5) + (1 - m.keep) / 4
    low, high = count_bounds(n, p, 2)
    assert 0.97 * low <= counts[True] <= high, (
        "both bits along the input, whose coordinates are within 2 % of the bound"
    )
    low, high = count_bounds(n, p * math.exp(-top), 2)
    assert 0.97 * low <= counts[False] <= high


# ---- the experiment on it


def committed():
    "Records of the mean estimation at full scale, by setting."
    found = {}
    for r in records.load("dprec", "dprec_mean", "full"):
        if r.final:
            found.setdefault(r.key, []).append(r)
    assert found, "no full record of dprec_mean is committed"
    return found


def test_the_committed_errors_lie_at_their_closed_forms():
    errors = {}
    for key, found in committed().items():
        values = np.array([r.final["mse"] for r in found])
        closed = errors[key] = found[0].config["closed_form"]
        assert len(values) >= 4
        if key != "sqkr.public":  # its error depends on the one coordinate that all ask
            assert values.mean() == pytest.approx(closed, rel=0.15), key
            assert values.std() < 0.25 * closed
    order = ("rec.good", "rec.unbiased", "sqkr", "rec.zero", "sqkr.public")
    rising = [errors[key] for key in order]
    assert rising == sorted(rising) and rising[3] < 10 < rising[4]


def test_deduced_settings_are_tagged():
    found = {h.name: h.source for h in papers.paper("dprec").hypers if h.task == "mean"}
    assert {name for name, source in found.items() if source == "inferred"} == {
        "data",
        "error",
        "sqkr.shrink",
        "sqkr.support",
        "rec.std",
    }


def test_a_run_without_accuracy_is_told_by_its_error():
    table, said = cli.summary([r for found in committed().values() for r in found])
    assert "mean squared error" in table.header and "no privacy" in said
    assert not [h for h in table.header if "accuracy" in h]
