"""The audit: its arithmetic against other routes, honest mechanisms that pass, broken ones
that are caught.

Every audit here has false-alarm rate 1e-6 (the default `alarm`), split by the audit itself
over its two binomials, so an honest mechanism fails one of these tests with probability at
most 1e-6, before its seed was fixed.
"""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from laws import ALARM, same_law
from scipy import stats
from tables import tabled

from dpcomm import cli
from dpcomm.core import wire
from dpcomm.core.random import Insecure, private_stream, public_seed, seed_tree
from dpcomm.mechanisms import contract, noisy_sums, privquant, quantised, rec, skellam
from dpcomm.mechanisms.gaussian import Gaussian
from dpcomm.mechanisms.imvu import Imvu
from dpcomm.mechanisms.rec import Rec
from dpcomm.mechanisms.signsgd import SignSgd
from dpcomm.privacy import audit, hypothesis_tests
from dpcomm.privacy.guarantee import Guarantee
from dpcomm.privacy.rec_accountant import RecRun, exact_epsilon
from dpcomm.secagg import skellam_noise

DELTA = 1e-2


# ---- confidence limits


@tabled("n", [1, 7, 200, 50_000])
@tabled("alarm", [0.05, ALARM])
def test_clopper_pearson_is_scipys(n, alarm):
    hits = np.unique(np.r_[0, 1, n // 3, n - 1, n])
    for k, *ends in zip(hits, *audit.clopper_pearson(hits, n, alarm)):
        theirs = stats.binomtest(int(k), n).proportion_ci(1 - alarm, "exact")
        np.testing.assert_allclose(ends, theirs, rtol=1e-7, atol=1e-12)


# ---- enumeration


@tabled("delta", [0.0, 0.01, 0.2])
def test_enumeration_is_the_best_of_all_sets(delta):
    rng = seed_tree(0, "sets")
    sets = np.array(list(itertools.product((0, 1), repeat=7)))[1:]
    for _ in range(20):
        p, q = rng.dirichlet(np.ones(7), 2)
        best = []
        for a, b in ((p, q), (q, p)):
            gain = np.log(np.maximum(sets @ a - delta, 1e-300) / (sets @ b))
            best.append(max(0.0, gain.max()))
        found = audit.enumerated_eps(p, q, delta)
        np.testing.assert_allclose(found, best, rtol=1e-9, atol=1e-12)
        for way, eps in enumerate(best):
            if eps > 0 and delta > 0:
                back = audit.enumerated_delta(p, q, eps)[way]
                np.testing.assert_allclose(back, delta, rtol=1e-8)


def test_enumeration_of_what_cannot_happen():
    apart, alike = ([0.5, 0.5, 0], [0, 0.5, 0.5]), ([0.3, 0.7], [0.3, 0.7])
    assert audit.enumerated_eps(*apart, 0.1) == (math.inf, math.inf)
    assert audit.enumerated_eps(*apart, 0.5) == (0, 0)
    assert audit.enumerated_eps(*alike, 0) == (0, 0)
    assert audit.enumerated_delta(*alike, 0) == (0, 0)


def rec_two(s, points=2001):
    "Law of (seed, index) with K = 2: the seed matters through the difference of two projections."
    u = np.linspace(-12, 12, points)
    weight = np.exp(-(u**2) / 4) / np.exp(-(u**2) / 4).sum()
    first = 1 / (1 + np.exp(-s * u))
    return np.array([first, 1 - first]) * weight, np.array([weight, weight]) / 2


@tabled("s", [0.3, 1.0])
def test_one_message_of_rec_by_enumeration_keeps_its_claim(s):
    p, q = rec_two(s)
    for relation, n_clients, pair in (
        ("null-slot", 1, (p, q)),
        ("local", 1, (p, p[::-1])),
        ("poisson-null", 2, ((p + q) / 2, q)),
    ):
        exact = max(audit.enumerated_eps(*pair, DELTA))
        claim = exact_epsilon(s, RecRun(1, n_clients, 2, 1, relation), DELTA, "balle")
        assert 0 < exact <= claim.eps


# ---- the distinguisher


def normal_worlds(n, *path, mu=1.0):
    rng = seed_tree(0, "normal", *path)
    return rng.standard_normal(n) + mu, rng.standard_normal(n)


def test_the_attack_that_sees_something_is_chosen():
    here, there = normal_worlds(2000, mu=4)
    noise = seed_tree(0, "blind").random(2000)
    worlds = [{"blind": noise, "sees": here}, {"blind": noise[::-1], "sees": there}]
    found = audit.distinguish(*worlds, DELTA)
    assert found.attack == "sees" and found.eps > 2
    assert "sees" in str(found) and "1e-06" in str(found)
    for world in worlds:
        del world["sees"]
    assert audit.distinguish(*worlds, DELTA).eps == 0


# ---- honest mechanisms


def test_honest_gaussian_passes_when_sampled():
    mechanism, release = Gaussian(1.0, 0.7), dict(n_clients=4, cohort=1)
    worlds = []
    for here in (True, False):
        run = "add-remove", here, 50_000, seed_tree(0, "sampled", here)
        worlds.append(mechanism.attack_scores(*run, **release))
    found = audit.distinguish(*worlds, DELTA)
    names = dict(sampling="poisson", accountant="rdp-balle", **release)
    told = mechanism.guarantee(rounds=1, delta=DELTA, **names)
    assert told.eps / 5 < found.eps <= told.eps


@pytest.mark.slow
@tabled("relation", Rec.relations)
@tabled("here", [True, False])
def test_messages_and_their_law_score_alike(here, relation):
    mechanism = Rec(1.0, 0.8, 2, (2, 3))
    real, drawn = (
        mechanism.attack_scores(
            relation, here, n, seed_tree(0, path, here), path=path, rounds=2
        )
        for path, n in (("encode", 700), ("law", 20_000))
    )
    assert set(real) == set(drawn) == {"likelihood", "index", "repeat"}
    for attack in real:
        assert same_law(real[attack], drawn[attack]) > ALARM / 24


# ---- the whole curve


@tabled(
    "n, m, eps, delta",
    [(12, 9, 0.0, 0.0), (10, 10, 0.7, 0.05), (15, 6, 1.5, 0.2), (8, 14, 3.0, 0.01)],
)
def test_count_p_values_cover_the_exact_worst_case(n, m, eps, delta):
    "Every pair of counts of small n and m, several claims, a fine grid of truths."
    i, j = np.meshgrid(np.arange(n + 1), np.arange(m + 1), indexing="ij")
    p = audit.count_pvalue(i, n, j, m, eps, delta)
    order = np.argsort(p, axis=None)
    level = p.ravel()[order]
    last = np.append(np.diff(level) > 0, True)
    for q in np.linspace(0, 1, 101):
        most = min(math.exp(eps) * q + delta, 1)
        law = stats.binom.pmf(i, n, most) * stats.binom.pmf(j, m, q)
        reached = np.cumsum(law.ravel()[order])
        assert (reached <= level * (1 + 1e-9) + 1e-12)[last].all()


def test_one_of_several_tests_pays_for_all():
    "Each direction and band of eps is a test; the p-value is that of the best, times them."
    here, there = np.arange(4000.0) % 11, np.arange(4000.0) % 7
    curve = audit.EPS, hypothesis_tests.profile_of_pure(0.1, audit.EPS)
    halves = [audit._split({"score": world}, 4) for world in (here, there)]
    (first, left), (second, rest) = halves
    tests = audit._select_tests(first, second, *curve)
    alone = []
    for test, cut, k in tests:
        counts = audit._counts(left, rest, test, cut)
        claim = curve[0][k], min(curve[1][k], 1.0)
        alone.append(float(audit.count_pvalue(*counts, *claim)))
    found = audit.judge(here, there, curve)
    assert (found.direction, found.false) == ("forward", 0), "7 to 10 tell worlds apart"
    assert len(tests) > 1 and 0 < len(tests) * min(alone) < 1
    assert math.isclose(found.pvalue, len(tests) * min(alone), rel_tol=1e-9)


def test_claims_are_the_curve_and_the_guarantee():
    m, n = Gaussian(1.0, 1.0), len(audit.EPS)
    eps, delta = audit.claims(m, "replace")
    assert len(eps) == n + len(audit.DELTAS) and set(audit.DELTAS) <= set(delta)
    np.testing.assert_allclose(delta[:n], m.privacy_profile("replace", audit.EPS))
    # the guarantee lies above the exact curve
    assert (hypothesis_tests.profile_of_gaussian(2.0, eps) <= delta + 1e-12).all()
    pure = contract.mechanism("sqkr", clip_norm=1.0, nbits=3, eps=2.0)
    eps, delta = audit.claims(pure, "local")
    assert ((eps == 2.0) & (delta <= 0.3)).any()
    assert len(eps) == 2 * n + len(audit.DELTAS)


def audited():
    "Every game of `dpcomm audit` that is not played byte by byte."
    for name in contract.registered():
        for parameters, arguments, _ in contract.mechanism_class(name).audit_cases:
            mechanism = contract.mechanism(name, **parameters)
            if arguments.get("path") != "encode":
                for relation in mechanism.relations:
                    yield mechanism, relation, arguments


def blind(mechanism, relation, arguments):
    "Vectors that round to nothing or hide in their rounding; DP-REC between two updates."
    hidden = arguments.get("d") in (3, 16) and mechanism.name == "quantised"
    return hidden or mechanism.name == "rec" and relation in ("replace", "local")


@pytest.mark.slow
@tabled("mechanism, relation, arguments", list(audited()))
def test_an_honest_game_stands_and_reaches_its_curve(mechanism, relation, arguments):
    "20,000 plays against everything claimed; and the game is not blind."
    rng = seed_tree(0, "honest", relation)
    found = audit.judge_play(mechanism, relation, 20_000, rng, **arguments)
    assert not found.refuted, found
    if not blind(mechanism, relation, arguments) and found.eps < 4:
        variance = (found.caught + math.exp(2 * found.eps) * found.false) / 15_000
        assert found.reached > found.delta - 6 * math.sqrt(variance), found


@pytest.mark.slow
@tabled("mechanism, relation, arguments", list(audited()))
def test_a_quarter_too_little_noise_is_caught_at_a_million_plays(
    mechanism, relation, arguments
):
    "By the laws of both: for every mechanism and relation with a curve that its game reaches."
    if not blind(mechanism, relation, arguments):
        few, many = (
            audit.detectable_noise_factor(mechanism, relation, n, **arguments)
            for n in (100, 10**6)
        )
        assert many <= 1.25 and few > many


# ---- planted bugs that one delta of a Renyi bound does not see


def off(kind, field, factor):
    "A property of a class, off by a factor."
    exact = getattr(kind, field).fget
    return kind, field, property(lambda m: factor * exact(m))


# a server that believes its clients' lengths
BELIEVED = (
    noisy_sums,
    "clip_to_grid",
    lambda rows, clip, scale: np.trunc(np.asarray(rows, float) / scale).astype(int),
)
LEVELS = quantised.Quantised
NEAREST = LEVELS, "whole", lambda m, u, rng: m.in_steps(u).round().long()
LONG_STEP = LEVELS, "step", lambda m, d: m.clip_norm / m.length
HALF_SKELLAM = skellam, "skellam", lambda mu, *a, f=skellam_noise.skellam: f(mu / 2, *a)
less = lambda s, *a, f=noisy_sums.discrete_gaussian: f(s * 16 / 25, *a)  # noqa: E731
LESS = noisy_sums, "discrete_gaussian", less
ROUND = lambda x, bound, rng, f=noisy_sums.conditional_round: f(x, None, rng)  # noqa: E731
ANY_ROUNDING = noisy_sums, "conditional_round", ROUND
WIDE = (
    noisy_sums,
    "rotate",
    lambda u, seed, f=noisy_sums.rotate: f(u, seed) * u.shape[-1] ** 0.5,
)


def in_order(rng, n, k, f=privquant.uniform_rows):
    "Keys of the entries that are kept, in order, so that the first ones are kept."
    draws = f(rng, n, k)
    draws[:, 1 : (k + 1) // 2].sort(1)
    return draws


FIRST = privquant, "uniform_rows", in_order
SHARED = noisy_sums.Summed
UNPAID = property(lambda m: m.sigma * m.clip_norm / m.n_clients**0.5)
NO_TOLERANCE = SHARED, "share", UNPAID
ONE = dict(clip_norm=1.0, sigma=1.0)
COARSE = dict(clip_norm=1.0, sigma=0.5, level_bits=2)
COIN = COARSE | dict(rounding="random")
SKY = ONE | dict(n_clients=6, ring_bits=6, tolerance=0.2)
SURE = SKY | dict(tolerance=0.0)
LONG = ONE | dict(sigma=3.0, n_clients=6, ring_bits=12)
FIVE = dict(clip_norm=1.0, sigma=0.7, n_clients=5, tolerance=0.2)
SIX = FIVE | dict(n_clients=6, tolerance=0.0)
TEN = ONE | dict(fraction=1.0, n_clients=10)
LACKING = TEN | dict(tolerance=0.2)
BALL = dict(clip_norm=1.0, eps=0.5, beta=4.0)
BOX = dict(bound=1.0, levels=4, eps=1.0, rule="best")


def planted(name, parameters, *changes, plays=20_000, **arguments):
    return contract.mechanism(name, **parameters), arguments, plays, changes


PLANTED = {  # what -> mechanism, arguments of play, plays, what is replaced by what
    "noise times 0.8": planted("gaussian", ONE, off(Gaussian, "std", 0.8)),
    "quantised noise times 0.8": planted("quantised", ONE, off(LEVELS, "std", 0.8)),
    "to the nearest level": planted("quantised", COARSE, NEAREST, BELIEVED, d=3),
    "step C / N at random": planted("quantised", COIN, LONG_STEP, BELIEVED, d=16),
    "ddgauss noise times 0.8": planted("ddgauss", SIX, LESS),
    "ddgauss, any rounding": planted("ddgauss", SURE, ANY_ROUNDING),
    "ddgauss, rotation without 1 / sqrt(D)": planted(
        "ddgauss", LONG, WIDE, ANY_ROUNDING, d=4
    ),
    "half the variance": planted("skellam", SKY, HALF_SKELLAM),
    "skellam, tolerance forgotten": planted(
        "skellam", FIVE, NO_TOLERANCE, plays=100_000
    ),
    "skellam, any rounding": planted("skellam", SKY, ANY_ROUNDING),
    "topk, tolerance forgotten": planted("topk", LACKING, NO_TOLERANCE, plays=100_000),
    "shares times 0.8": planted("compressive", TEN, off(SHARED, "share", 0.8)),
    "signs' noise / 1.3": planted("signsgd", ONE, off(SignSgd, "std", 1 / 1.3), d=16),
    "kappa times 1.5": planted("imvu", BALL, off(Imvu, "kappa", 1.5), d=16),
    "the first entries": planted("privquant", BOX, FIRST),
}


@tabled("what", PLANTED)
def test_a_planted_bug_is_caught_and_its_twin_stands(what):
    "Against the honest mechanism's claims, stated before anything is replaced."
    mechanism, arguments, plays, changes = PLANTED[what]
    relation = next(iter(mechanism.relations))
    known = dict(arguments, against=audit.claims(mechanism, relation, **arguments))

    def caught():
        rng = seed_tree(0, "planted", what)
        return audit.judge_play(mechanism, relation, plays, rng, **known).refuted

    assert not caught()
    with pytest.MonkeyPatch.context() as patch:
        for change in changes:
            patch.setattr(*change)
        assert caught()


# ---- broken mechanisms: the audit must catch each of them


class HalfTheNoise(Gaussian):
    std = property(lambda self: self.sigma * self.clip_norm / 2)


class SameNoiseEveryRound(Gaussian):
    def aggregate(self, estimates, cohort, rng):
        return super().aggregate(estimates, cohort, seed_tree(7))


class RecHalfThePrior(Rec):
    def encode(self, u, key):
        return Rec(self.clip_norm, self.std / 2, self.index_bits).encode(u, key)


class RecOneCandidateShort(Rec):
    def encode(self, u, key):
        seed, phi = public_seed(key), (self.clip(u[None])[0] / self.std).numpy()
        short = 2**self.index_bits - 1
        index = rec.encode_group(phi, short, seed, 0, private_stream(key))
        payload = seed.to_bytes(4, "little") + wire.pack_bits([index], self.index_bits)
        return wire.Message(self.name, len(u), payload, self.fingerprint)


class RecSameKey(Rec):
    def encode(self, u, key):
        return super().encode(u, Insecure(7))


class RecKeyOfThePlay(Rec):
    "A new key for every client, kept for the client's second round."

    keys = []

    def encode(self, u, key):
        n = self.plays
        self.keys.append(key if len(self.keys) < n else self.keys[len(self.keys) - n])
        return super().encode(u, self.keys[-1])


BROKEN = {  # what is broken -> its class, parameters, plays, rounds
    "gaussian: noise reused across rounds": (
        SameNoiseEveryRound,
        (1.0, 4.0),
        20_000,
        2,
    ),
    "rec: prior halved": (RecHalfThePrior, (0.6, 1.0, 1), 10_000, 1),
    "rec: K off by one": (RecOneCandidateShort, (0.5, 1.0, 2), 1500, 1),
    "rec: one seed for all": (RecSameKey, (0.5, 1.0, 2), 1000, 1),
    "rec: seed reused across rounds": (RecKeyOfThePlay, (0.2, 1.0, 3), 1500, 2),
}
broken = pytest.mark.parametrize(
    "what",
    [pytest.param(w, marks=[pytest.mark.slow] * ("halved" in w)) for w in BROKEN],
)


def refuted(what: str, honest: bool = False) -> bool:
    "Whether the audit refutes the claim in this game; the tests below assert on nothing else."
    kind, parameters, plays, rounds = BROKEN[what]
    mechanism = (kind.__base__ if honest else kind)(*parameters)
    RecKeyOfThePlay.plays, RecKeyOfThePlay.keys = plays, []
    relation = next(iter(mechanism.relations))
    run = mechanism, relation, plays, DELTA, seed_tree(0, "broken", relation)
    truth = audit.claim(mechanism, relation, DELTA, rounds)
    if kind is RecHalfThePrior:  # against the tightest true claim, by enumeration
        truth = replace(truth, eps=max(audit.enumerated_eps(*rec_two(0.6), DELTA)))
    return audit.refutes(audit.audit_play(*run, rounds=rounds), truth)


@broken
def test_a_broken_mechanism_is_caught(what):
    assert refuted(what)


@pytest.mark.slow
@broken
def test_its_honest_twin_passes(what):
    assert not refuted(what, honest=True)


# ---- the command


def test_the_rows_of_the_command_are_all_there():
    settings = contract.mechanism_class("rec").audit_cases
    made = [(contract.mechanism("rec", **own), *rest) for own, *rest in settings]
    cases = audit.cases(made)
    assert {case.relation for case in cases} == set(Rec.relations)
    paths = {case.arguments["path"] for case in cases}
    assert paths == {"encode", "law", "simulate", "messages"}
    for told, found, judged in (case.run(100, DELTA) for case in cases):
        assert isinstance(told, Guarantee) and found.trials == judged.trials == 100


def test_a_refuted_claim_is_exit_code_4(monkeypatch, capsys):
    monkeypatch.setitem(contract._REGISTRY, "gaussian", HalfTheNoise)
    monkeypatch.setattr(HalfTheNoise, "audit_cases", HalfTheNoise.audit_cases[:1])
    args = cli._parse(["audit", "gaussian", "--trials", "4000"])
    assert cli.audit_all(args) == 4
    assert "REFUTED" in capsys.readouterr().out
