"""What local mechanisms spend as the machine draws them: every draw is replaced by the bits
of one number, the number at which the answer changes is found by halving, and the
probabilities that follow are compared with e^eps as fractions.
"""

import math
from bisect import bisect_left
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from tables import tabled

from dpcomm.core.random import below
from dpcomm.core.wire import unpack_bits
from dpcomm.mechanisms import contract, imvu, mvu, privquant, signsgd, sqkr, vqsgd
from dpcomm.secagg.discrete import choose, exp_fixed, symbols_by_inversion

BITS = 2400  # of the number that stands for a draw


class Tape:
    "A stream that reads one number's bits, where the first call's layout holds nan."

    def __init__(self, number, layout=(math.nan,)):
        self.number, self.left, self.layout = number, BITS, layout

    def take(self, bits):
        self.left -= bits
        return self.number >> self.left & (2**bits - 1)

    def random(self, shape):
        if not np.prod(shape):
            return np.empty(shape)
        out = np.reshape(np.array(self.layout, float), shape)
        self.layout = (math.nan,)
        out[np.isnan(out)] = self.take(53) * 2.0**-53
        return out

    def integers(self, top, size=None, dtype=None):
        if size is None:
            return self.take(top.bit_length() - 1)
        return np.full(size, self.take(16), dtype)


def probability(answer):
    """Of a yes, as a fraction right to 2^-70 of itself and of one less it; `answer` says
    yes to the numbers below some point.
    """
    top = 2**BITS - 1
    often = bool(answer(2 ** (BITS - 1)))

    def rare(number):
        return not answer(top - number) if often else answer(number)

    if not rare(0):
        return Fraction(often)
    bits = bisect_left(range(BITS), True, key=lambda b: not rare(2**b))
    low, high = 2**bits >> 1, 2**bits
    while high - low > 1 and high - low > high >> 71:
        middle = (low + high) // 2
        low, high = (middle, high) if rare(middle) else (low, middle)
    return Fraction(top + 1 - high if often else high, 2**BITS)


def excess(ratio, eps):
    "How far log(ratio) lies above eps."
    return float(Fraction(ratio) * exp_fixed(Fraction(eps), 1400) / 2**1400 - 1)


def sender(monkeypatch, mechanism, u, layout=(math.nan,)):
    "The payload that a number makes this client send."

    def sent(number):
        tape = Tape(number, layout)
        for module in (contract, sqkr):  # where messages are encoded
            monkeypatch.setattr(module, "private_stream", lambda key: tape)
        return mechanism.encode(torch.tensor(u), None)

    return sent


@tabled("nbits", [1, 64, 512])
@tabled("eps", [1e-3, 1.0, 60.0, 700.0])
def test_sqkr_spends_its_epsilon_for_every_number_of_bits(monkeypatch, nbits, eps):
    "Honest bits are +, those of the lie -; so the first bit tells which was sent."
    m = sqkr.Sqkr(1.0, nbits=nbits, eps=eps)
    layout = [0.0] * nbits + [0.9] * nbits + [math.nan]
    sent = sender(monkeypatch, m, [0.1, 0.2], layout)
    keep = probability(lambda number: sent(number).payload[4] & 128)
    assert -(2**-45) < excess(1 + keep * 2**nbits / (1 - keep), eps) <= 0


@tabled("d", [1, 100])
@tabled("eps", [0.1, 60.0, 600.0])
def test_vqsgd_spends_its_epsilon_at_the_worst_pair(d, eps):
    "A lie at the first or last place is another corner than the true one."
    m, liar = vqsgd.VqSgd(1.0, eps), vqsgd.VqSgd(1.0, 1e-9)
    u, v = m.worst_case(d).numpy()

    def corner(mechanism, vector, number, *layout):
        return int(mechanism.corners(vector, Tape(number, layout), 1)[0])

    h, k = (
        probability(lambda n: corner(m, w, n, math.nan, place) != int(place * 2 * d))
        for w, place in ((u, 1 - 2.0**-53), (v, 0.0))
    )
    first = probability(lambda n: not corner(liar, u, n, 0.5, math.nan))
    ratio = (h + (1 - h) * first) / ((1 - k) * first)
    assert excess(ratio, m.message_epsilon(d)) <= 0 and excess(ratio, eps) <= 0
    assert excess(ratio, m.message_epsilon(d)) > -(2**-30) or eps > 30, "it is reached"


@pytest.mark.parametrize("sigma", [0.01, 1 / 36.9, 0.1, 1 / 6, 1.0, 30.0])
def test_a_sign_has_the_probability_of_its_noise(monkeypatch, sigma):
    "Of both signs, to the 2^-41 that `safe` speaks of."
    m = signsgd.SignSgd(1.0, sigma)
    sent = sender(monkeypatch, m, [-1.0])
    rare = probability(lambda number: sent(number).payload[0] & 128)
    with mpmath.workdps(60):
        far = min(37, mpmath.mpf(1.0 / sigma))
        off = [
            mpmath.mpf(p.numerator) / p.denominator / mpmath.ncdf(v) - 1
            for p, v in ((rare, -far), (1 - rare, far))
        ]
    assert max(map(abs, off)) < 2**-41


@pytest.mark.parametrize("beta", [1.0, 20.0, 60.0, 699.0, 5000.0])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_logistic_coin_has_its_probability_on_both_sides(monkeypatch, beta, sign):
    "The high side reads its first 69 bits backwards; here they are turned round again."
    m = imvu.Imvu(1.0, eps=1.0, beta=beta)
    sent = sender(monkeypatch, m, [sign])
    turned = (2**69 - 1 << BITS - 69) * (sign > 0)
    rare = probability(lambda n: bool(sent(n ^ turned).payload[0]) != (sign > 0))
    small = Fraction(exp_fixed(Fraction(min(beta, 700)), BITS), 2**BITS)
    assert abs(float(rare * (1 + small) / small - 1)) < 2**-50


def test_a_table_of_i_mvu_gives_rare_symbols_their_share(monkeypatch):
    table = mvu.solve(2.0, 2, 2)
    m = imvu.Imvu(1.0, eps=2.0, beta=40.0, table=table)
    p = imvu.pmf(0.5 + 40 / 2, table)
    sent = sender(monkeypatch, m, [1.0])
    low = probability(lambda number: not sent(number).payload[0] & 128)
    assert p[0] < 1e-34 and abs(float(low / Fraction(p[0])) - 1) < 1e-12


@pytest.mark.parametrize("shape", [(2, 2), (9, 2), (5, 4)])
@pytest.mark.parametrize("eps", [0.5, 30.0, 700.0])
def test_mvu_spends_what_its_table_spends(monkeypatch, shape, eps):
    if shape == (5, 4):
        eps = 2.0
    m, laws = mvu.Mvu(1.0, eps, *shape), []
    for u in (-1.0, 1.0):
        sent = sender(monkeypatch, m, [u])
        symbols = range(len(m.table.alphabet))

        def upto(k):
            if k in (-1, symbols[-1]):
                return Fraction(k + 1 > 0)
            if len(symbols) == 2:  # the high one comes first
                return 1 - probability(lambda n: sent(n).payload[0] & 128)
            return probability(
                lambda n: unpack_bits(sent(n).payload, m.nbits, 1)[0] <= k
            )

        laws.append([upto(k) - upto(k - 1) for k in symbols])
    for p, q in zip(*laws):
        assert p > 0 and q > 0 and max(excess(p / q, eps), excess(q / p, eps)) < 2e-9
    if len(symbols) == 2:
        assert max(excess(p / q, eps) for p, q in zip(*laws)) > -1e-9
    spent = m.guarantee(relation="replace", accountant="pure", d=1).eps
    most = max(max(p / q, q / p) for p, q in zip(*laws))
    assert -1e-9 < excess(most, spent) <= 0


@tabled("d, K", [(1, 2), (3, 16), (8, 4)])
@tabled("eps", [0.1, 60.0, 400.0])
@tabled("rule", ["paper", "best"])
def test_privquant_spends_at_most_its_epsilon(d, K, eps, rule):
    "Subsets and other levels are uniform up to factors that are bounded on the page."
    if rule == "paper":
        eps = max(eps, privquant.thresholds(d, K).min())
    cal, numbers = privquant.calibrate(d, K, eps, rule), np.zeros((1, d), np.int64)
    layout = [math.nan, *np.linspace(0.1, 0.9, d), *np.full(d, 0.5)]

    def matches(number):
        return (privquant.randomise(numbers, cal, Tape(number, layout)) == 0).sum()

    ends = [probability(lambda n: matches(n) <= k) for k in range(d)]
    law = np.diff([Fraction(0), *ends, Fraction(1)])
    ways = [math.comb(d, k) * (K - 1) ** (d - k) for k in range(d + 1)]
    each = [p / w for p, w in zip(law, ways)]
    draws = (1 + Fraction(d**2, 2**52)) * (1 + Fraction(K, 2**52)) ** d
    draws /= (1 - Fraction(d**2, 2**54)) * (1 - Fraction(K, 2**52)) ** d
    assert max(each) / min(each) > 1 and cal.actual_eps <= eps
    assert excess(draws * max(each) / min(each), cal.actual_eps) <= 0


def test_a_coin_reads_as_many_bits_as_it_takes():
    for p in (3 * 2.0**-55, 1 - 2.0**-53, 0.3, 5e-324):

        def lower(number, p=p):
            tape = Tape(number)
            return below(tape.random(1), np.array([p]), tape)

        found = probability(lower)
        assert abs(found - Fraction(p)) <= min(found, 1 - found) / 2**69


@tabled("weights", [(1.0, 1e-300, 2.0), (1e-40, 0.0, 1.0), (3.0, 5.0)])
def test_symbols_have_exactly_their_shares(weights):
    steps = np.cumsum(weights)[:-1, None] / sum(weights)

    def symbol(number):
        tape = Tape(number)
        return symbols_by_inversion(tape.random(1), steps, lambda at: weights, tape)[0]

    for k in range(len(weights) - 1):
        exact = sum(map(Fraction, weights[: k + 1])) / sum(map(Fraction, weights))
        for draw in (symbol, lambda n: choose(weights, 0, 0, Tape(n))):
            found = probability(lambda n: draw(n) <= k)
            assert abs(found - exact) <= exact / 2**69
