"""What guards `dpcomm.privacy.losses`: exact laws in closed form, in fractions and by
quadrature, from both sides; dp_accounting's own ends; refusals.
"""

import inspect
import math
from fractions import Fraction
from functools import partial, reduce
from itertools import combinations, product

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as theirs
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from tables import tabled

import dpcomm
from dpcomm.core.random import seed_tree
from dpcomm.mechanisms.contract import mechanism, mechanism_class
from dpcomm.privacy import accounting, audit, composition, losses, pairs
from dpcomm.privacy.accounting import gaussian_delta, gaussian_guarantee, rdp_gaussian
from dpcomm.privacy.fixed_size_accountant import fixed_size_epsilon
from dpcomm.privacy.guarantee import PROVED
from dpcomm.privacy.hypothesis_tests import (
    multinomial_laws,
    profile_of_gaussian,
    profile_of_pmfs,
)
from dpcomm.privacy.losses import compose, gaussian_losses, pure_losses

ours = settings(max_examples=40, deadline=None, derandomize=True)
POISSON = dict(sampling="poisson")


def ends(releases, delta):
    found = compose(releases, delta)
    assert isinstance(found, losses.Bracket) and found.guarantee.accountant == "pld"
    assert 0 <= found.low <= found.eps
    return found.low, found.eps


@tabled(
    "counts, j",
    [
        ({1: 30, 3: 4}, 11),
        ({1: 30, 3: 4}, 40),
        ({1: 10, 2: 10, 5: 2}, 13),
        ({7: 3}, 20),
    ],
)
def test_randomised_response_in_fractions_lies_between_the_ends(counts, j):
    "counts: how often eps is so many units; delta is exact at j units."
    odds, law = Fraction(3, 2), np.array([Fraction(1)])  # of losses -top..top, in units
    for k, rounds in counts.items():
        p = odds**k / (1 + odds**k)
        once = np.array([1 - p, *[Fraction(0)] * (2 * k - 1), p])
        law = reduce(np.convolve, [once] * rounds, law)
    top = len(law) // 2
    delta = sum(law[top + i] * (1 - odds ** (j - i)) for i in range(j + 1, top + 1))
    unit = math.log(odds)
    responses = [(pure_losses(k * unit), rounds) for k, rounds in counts.items()]
    low, high = ends(responses, float(delta))
    assert low - 1e-12 <= j * unit <= high + 1e-12
    assert high - low <= 1e-5 + 1e-4 * high


def pairs_of(mu, q):
    sampled = pairs._Sampled(mu, q)
    return (
        pairs._Normal(mu),
        sampled,
        pairs._Swapped(sampled),
        pairs._TwoSided(sampled),
        pairs.Seen((None, pairs._Normal(mu)), (1 - q, q)),
        pairs.Seen((sampled, pairs._Sampled(2 * mu, q)), (0.9, 0.09), 0.01),
        pairs._Swap(mu, q),
    )


def outcomes(pair):
    "Losses and masses of the first law of a pair, on a fine grid of outcomes."
    if isinstance(pair, pairs._TwoSided):
        y, p = outcomes(pair.pair)
        up = y > 0
        y, p = np.append(y[up], -y[up]), np.append(p[up], p[up] * np.exp(-y[up]))
        return np.append(y, 0), np.append(p, 1 - p.sum())
    x = np.linspace(-13, 16, 200_001)
    inner = getattr(pair, "pair", pair)
    mu, q = inner.mu, getattr(inner, "q", 1.0)
    null, full = (
        np.exp(-((x - c) ** 2) / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
        for c in (0, mu)
    )
    y = mu * x - mu * mu / 2 if q == 1 else np.log1p(q * np.expm1(mu * x - mu**2 / 2))
    mix = (1 - q) * null + q * full
    return (-y, null) if isinstance(pair, pairs._Swapped) else (y, mix)


def enclosed(pair, y, eps, room):
    "Masses of both roundings to a grid, whose curves enclose the pair's."
    above, null, *_ = pair.tails(eps)
    exact = np.exp(above) - np.exp(eps + null)
    up, infinite = composition._rounded_up(pair, y)
    down = composition._rounded_down(pair, y)
    upper, lower = (
        np.array([(p * -np.expm1(np.minimum(e - y, 0))).sum() for e in eps])
        for p in (up, down)
    )
    assert (up >= 0).all() and (down >= 0).all()
    assert (lower <= exact + room).all() and (exact <= infinite + upper + room).all()
    return up, down


@ours
@given(
    st.floats(0.05, 3), st.floats(0.001, 0.9), st.floats(0.003, 0.3), st.integers(0, 6)
)
def test_rounding_up_and_down_enclose_the_curve_at_every_eps(mu, q, step, which):
    pair = pairs_of(mu, q)[which]
    y = step * np.arange(-200, 201)
    eps = np.concatenate([np.linspace(-3, 3, 41), y[150:250:7]])
    enclosed(pair, y, eps, 1e-13)


@tabled("mu, part", [(0.5, 3), (1.25, 3), (1.25, 10), (2.0, 8)])
def test_a_rare_clients_bulk_keeps_its_mean_on_a_coarse_grid(mu, part):
    "Both roundings enclose the curve where the losses of q = 1e-5 span a few steps only."
    q = 1e-5
    exact = -q * q / 2 * (1 - math.exp(mu * mu))
    for pair in pairs.gaussian_pairs(mu, q, "add-remove", "poisson", None):
        step = abs(pair.anchor(q / part))
        step /= math.ceil(step * part / q)
        y = step * composition._points(step, -0.02, 0.02)
        eps = np.concatenate([y[::97], np.linspace(-2 * q, 2 * q, 41)])
        up, down = enclosed(pair, y, eps, 1e-15)
        small = abs(y) < 0.01
        assert abs(up[small] @ y[small] - down[small] @ y[small]) < 0.1 * exact


@tabled("first, second", [(i, j) for i in range(4) for j in range(i, 4)])
def test_two_releases_by_quadrature_lie_between_the_ends(first, second):
    a, b = pairs_of(1.3, 0.1)[first], pairs_of(0.7, 0.3)[second]
    y, p = outcomes(a)
    for eps in (0.3, 4.0):
        above, null, *_ = b.tails(eps - y)
        delta = float((p * (np.exp(above) - np.exp(eps - y + null))).sum())
        if eps > 0.98 * (a.top + b.top):
            assert delta < 1e-7
            continue
        low, high = composition.both_ends([(a, 1), (b, 1)], delta)
        assert low - 1e-5 <= eps <= high + 1e-5 and high - low < 1e-3 * high


def their_ends(parts, delta):
    "dp_accounting's: of makers of a distribution, each with its rounds."
    totals = [
        reduce(
            lambda one, other: one.compose(other),
            (make(pessimistic_estimate=side).self_compose(n) for make, n in parts),
        )
        for side in (False, True)
    ]
    return [total.get_epsilon_for_delta(delta) for total in totals]


@tabled(
    "parts, delta",
    [
        (((0.8, 0.05, 100),), 1e-6),
        (((1.0, 0.02, 300), (2.0, 0.1, 200)), 1e-5),
        (((5.0, 1.0, 1), (1.0, 0.01, 500)), 1e-6),
    ],
)
def test_ends_agree_with_those_of_dp_accounting(parts, delta):
    about = dict(value_discretization_interval=2e-4)
    made = [
        (partial(theirs.from_gaussian_mechanism, s, sampling_prob=q, **about), n)
        for s, q, n in parts
    ]
    found = their_ends(made, delta)
    list_ = [(gaussian_losses(s, q, **POISSON), n) for s, q, n in parts]
    low, high = ends(list_, delta)
    assert low <= found[1] and found[0] <= high, (low, high, found)
    assert high <= 1.0005 * found[1]


@tabled("part", [0.2, 0.5, 0.9])
def test_what_a_window_leaves_outside_is_charged(part):
    "A window that ends too early proves no less than the exact epsilon, and no more."
    sigma, rounds, delta = 2.0, 5, 1e-3
    (pair,) = gaussian_losses(sigma).pairs
    plan = composition._Plan([(pair, rounds)], delta)
    _, (low, high), t = plan.window(plan.theta)
    step = composition._view(plan, plan.theta)[3]
    cut = low + part * (high - low)
    size = 2 ** int(math.log2((cut - low) / step))
    view = plan.theta, t, math.floor(low / step), step, size
    exact = brentq(lambda e: gaussian_delta(sigma, e, rounds) - delta, 0, 100)
    assert composition._one_end(plan, view, True) >= exact
    assert composition._one_end(plan, view, False) <= exact


def test_what_is_revealed_counts_in_full():
    p, q = [0.6, 0.399, 1e-3, 0], [0.4, 0.599, 0, 1e-3]
    laws = multinomial_laws(p, q, 10)
    sure = losses.listed_losses(p, q, relation="zero-out")
    exact = brentq(lambda eps: profile_of_pmfs(*laws, eps) - 0.02, 0, 5)
    low, high = ends([(sure, 10)], 0.02)
    assert low <= exact <= high and high - low < 1e-3
    with pytest.raises(ValueError, match="revealed too often: raise delta"):
        compose([(sure, 10)], 1e-3)


def test_a_release_without_pairs_is_composed_by_renyi_curves():
    def renyi(orders):
        return rdp_gaussian(orders, 5.0)

    other = losses.Losses("other", renyi=renyi, relation="add-remove")
    found = compose([(gaussian_losses(1.0, 0.01, **POISSON), 100), (other, 1)], 1e-6)
    assert found.guarantee.accountant == "rdp-balle" and found.low == 0
    assert "other has no loss distribution" in found.guarantee.note
    half = gaussian_guarantee(2.5, 1e-6, accountant="rdp-balle").eps
    assert compose([(other, 4)], 1e-6).eps == pytest.approx(half)
    sharp = compose(
        [(gaussian_losses(1.0, 0.01, **POISSON), 100), (gaussian_losses(5.0), 1)], 1e-6
    )
    assert sharp.eps < found.eps


@tabled(
    "other, says",
    [
        (pure_losses(1.0), "relation"),
        (gaussian_losses(1.0, unit="example"), "unit"),
        (gaussian_losses(1.0, 0.1, sampling="fixed"), "sampling"),
    ],
)
def test_releases_about_different_things_have_no_epsilon_together(other, says):
    with pytest.raises(ValueError, match=says):
        compose([(gaussian_losses(1.0, 0.1, **POISSON), 1), (other, 1)], 1e-5)
    vote = gaussian_losses(5.0, name="vote")
    about = compose([(vote, 1), (gaussian_losses(1.0, 0.02, **POISSON), 40)], 1e-6)
    made = about.guarantee
    seen = made.sampling, made.rounds, made.q, made.trust
    assert seen == ("poisson", 41, 0.02, "central")
    local = pure_losses(0.5, premises={"keys": "as if so"})
    both = compose([(gaussian_losses(1.0, relation="local"), 1), (local, 2)], 1e-6)
    assert both.guarantee.trust == "central"
    assert both.guarantee.premises == local.premises


@tabled("name", ["topk", "ddgauss", "skellam"])
def test_noise_in_shares_is_composed_by_losses_and_beats_its_renyi_curve(name):
    made = mechanism(name, **mechanism_class(name).audit_cases[0][0])
    extra = dict(d=4) if name in ("ddgauss", "skellam") else {}
    stated = made.guarantee(rounds=3, delta=1e-5, accountant="rdp-balle", **extra)
    low, high = ends([(made.losses(**extra), 3)], 1e-5)
    assert 0.7 * stated.eps < low <= high < 0.98 * stated.eps
    for relation, sampling in product(("add-remove", "replace"), ("poisson", "fixed")):
        run = dict(sampling=sampling, relation=relation, **extra)
        release, sizes = made.losses(q=0.1, **run), dict(n_clients=10 * made.n_clients)
        low, high = ends([(release, 30)], 1e-5)
        there = made.guarantee(30, 1e-5, cohort=made.n_clients, **sizes, **run)
        assert 0.999 * low <= there.eps <= 1.02 * high and there.accountant == "pld"
        assert ("shares" in there.premises) == (sampling == "poisson")
        assert there.premises == release.premises
    with pytest.raises(ValueError, match="add-remove"):
        made.losses(relation="add-remove", **extra)


def test_very_many_very_coarse_shares_keep_their_renyi_curve():
    about, d = dict(clip_norm=1.0, sigma=0.8, n_clients=3000, ring_bits=19), dict(d=4)
    made = mechanism("ddgauss", **about)
    assert made.normal_sigma(4) == 0
    found = compose([(made.losses(**d), 1)], 1e-5)
    stated = made.guarantee(1, 1e-5, accountant="rdp-balle", **d)
    assert 0.5 * stated.eps < found.eps <= stated.eps and found.low == 0
    assert "ddgauss has no loss distribution" in found.guarantee.note
    for asked in (
        lambda: made.losses(q=0.1, sampling="fixed", **d),
        lambda: made.guarantee(1, 1e-5, accountant="pld", **d),
    ):
        with pytest.raises(ValueError, match="so little noise per client"):
            asked()


# ---- small federations, every cohort listed

X = np.linspace(-16, 16, 8001)
SIGMA, OTHERS, SEATS, RATE = 1.2, 3, 2, 0.3


def cohorts(n, sampling):
    "Every cohort of n clients, as a tuple of seats, with its probability."
    if sampling == "poisson":
        return {
            who: RATE**size * (1 - RATE) ** (n - size)
            for size in range(n + 1)
            for who in combinations(range(n), size)
        }
    found = dict(
        none=[tuple(range(n))],
        fixed=[*combinations(range(n), SEATS)],
        replacement=[*product(range(n), repeat=SEATS)],
    )[sampling]
    return dict.fromkeys(found, 1 / len(found))


def released(values, sampling, seen):
    "Law of one release: over all cohorts and X where the cohort is seen, else over X."
    rows = []
    for who, chance in cohorts(len(values), sampling).items():
        law = np.exp(-(((X - sum(values[i] for i in who)) / SIGMA) ** 2) / 2)
        rows.append(chance * law / law.sum())
    return np.concatenate(rows) if seen else np.sum(rows, axis=0)


def neighbours(relation, others):
    "Pairs of data sets, the client last."
    if relation == "add-remove":
        return [((*others, u), others) for u in (1.0, -1.0)]
    if relation == "zero-out":
        return [((*others, u), (*others, 0.0)) for u in (1.0, -1.0)]
    return [((*others, 1.0), (*others, w)) for w in (-1.0, 0.0, 0.4)]


WORLDS = [(-1.0,) * OTHERS, (1.0,) * OTHERS, (0.0,) * OTHERS, (-1.0, 0.3, 1.0)]
REACHED = {  # at eps 0 and .3, where no listed federation attains the curve
    ("fixed", "zero-out"): 0.42,
    ("poisson", "replace"): 0.85,
    ("replacement", "add-remove"): 0.97,
    ("replacement", "zero-out"): 0.41,
    ("replacement", "replace"): 0.97,
}


@tabled(
    "trust, sampling, relation",
    [
        (trust, sampling, relation)
        for (trust, sampling), found in PROVED.items()
        for relation in found
        if "null" not in relation and trust != "shuffler"
    ],
)
def test_every_covered_combination_by_listing_all_cohorts(trust, sampling, relation):
    "No listed federation is above the pair's curve, and one comes near it."
    seen, n = trust != "central" and sampling != "none", OTHERS + 1
    q = dict(none=1.0, poisson=RATE).get(sampling, SEATS / n)
    draws = SEATS if sampling == "replacement" else None
    made = gaussian_losses(SIGMA, q, relation, sampling, draws, trust)
    eps, best = np.linspace(0, 3, 31), 0.0
    tails = [pair.tails(eps) for pair in made.pairs]
    bound = np.max([np.exp(t[0]) - np.exp(eps + t[1]) for t in tails], axis=0)
    for others in WORLDS:
        for data in neighbours(relation, others):
            p, other = (released(values, sampling, seen) for values in data)
            exact = profile_of_pmfs(p, other, eps)
            assert (exact <= bound * (1 + 2e-5)).all(), "beyond quadrature"
            best = np.maximum(best, exact / bound)
    like = "replace" if relation == "local" else relation
    whole = seen or sampling == "none"
    reached = 1 - 2e-5 if whole else REACHED.get((sampling, like), 1 - 2e-5)
    assert best[[0, 3]].min() >= reached, best


def test_a_client_s_turns_are_few_in_the_largest_cohort_with_replacement():
    def spent(draws):
        release = gaussian_losses(1.3, 0.3, "replace", "replacement", draws)
        return compose([(release, 10)], 1e-6).eps

    often, rest = pairs._often(1.0, 2**31)
    assert len(often) < 40 and 0 <= rest <= pairs.RARE
    assert spent(60) < spent(1000) < spent(2**31) < 1.03 * spent(60)


@tabled("sigma, q, rounds", [(0.1, 0.1, 100), (0.2556, 0.01, 800)])
def test_a_large_epsilon_on_a_coarser_grid_is_above_the_truth_and_close(
    sigma, q, rounds
):
    args = 1 / sigma, q, "zero-out", "poisson", None
    pair = pairs.gaussian_pairs(*args)[0]
    low, high = composition.both_ends([(pair, rounds)], 1e-6)
    said = composition.upper_end([(pair, rounds)], 1e-6)
    assert composition.LARGE < low <= said <= high * (1 + 1e-3)


@tabled("relation, trust", product(("zero-out", "replace"), ("central", "secagg")))
def test_what_is_stated_is_its_pair_s_and_only_the_unseen_are_amplified(
    relation, trust
):
    how = dict(relation=relation, trust=trust)

    def stated(sigma, q, sampling, accountant):
        names = dict(sampling=sampling, accountant=accountant)
        return gaussian_guarantee(sigma, 1e-5, q, 200, **names, **how).eps

    release = gaussian_losses(2.0, 0.05, **POISSON | how)
    low, high = ends([(release, 200)], 1e-5)
    assert low <= stated(2.0, 0.05, "poisson", "pld") <= high
    everyone = stated(5e-3, 1.0, "none", "rdp-balle")  # too large to be composed
    hidden = (relation, trust) == ("zero-out", "central")
    assert hidden == (release.renyi is not None)
    assert (stated(5e-3, 0.05, "poisson", "pld") < everyone) == hidden


# ---- one draw, groups, and what numbers may cost


@tabled(
    "delta, q, rounds, right", [(1e-6, 0.01, 800, 4.891), (1e-6, 0.001, 10_000, 1.565)]
)
def test_sums_over_one_draw_of_the_cohort_are_one_release(delta, q, rounds, right):
    "Listed as two releases, each with a draw of its own, they prove too little."
    one = gaussian_losses((1.0, 1.0), q, **POISSON)
    found = compose([(one, rounds)], delta)
    assert right - 1e-3 < found.low <= found.eps < right * 1.0005
    alone = gaussian_losses(1.0, q, **POISSON)
    apart = compose([(alone, rounds), (alone, rounds)], delta)
    assert apart.eps < 0.6 * found.low
    assert "draws its cohort anew" in apart.guarantee.note
    assert "draws its cohort anew" not in found.guarantee.note


def test_a_sum_of_other_size_beside_an_update_adds_its_precision():
    both = gaussian_losses((2.0, 1.5), 0.1, "replace", "fixed")
    same = gaussian_losses((2.0**-2 + 1.5**-2) ** -0.5, 0.1, "replace", "fixed")
    assert both.pairs == same.pairs


@tabled("group, right", [(1, 0.9125), (2, 1.947), (3, 3.028)])
def test_several_clients_of_one_person_by_the_losses_themselves(group, right):
    "As dp_accounting's mixture of Gaussians has it; k times epsilon is not at this delta."
    release = gaussian_losses(1.0, 0.01, group=group, **POISSON)
    low, high = ends([(release, 200)], 1e-5)
    assert low - 5e-4 < right < high + 5e-4 and high < 1.0005 * right
    assert (f"any {group} clients" in release.note) == (group > 1)


def test_groups_without_a_proof_are_refused_and_those_that_are_seen_are_not():
    for how in (dict(sampling="fixed"), dict(POISSON, relation="replace")):
        with pytest.raises(ValueError, match="no bound for groups is proved"):
            gaussian_losses(1.0, 0.1, group=2, **how)
    with pytest.raises(ValueError, match="without sampling it must be 1: pass samp"):
        gaussian_losses(1.1, q=0.01)
    seen = gaussian_losses(2.0, 0.1, "zero-out", trust="secagg", group=2, **POISSON)
    (pair,) = seen.pairs
    assert gaussian_losses(2.0, 0.1, group=2, **POISSON).renyi is None
    y = np.linspace(-2, 2, 9)
    parts = [(0.18, pairs._Normal(0.5)), (0.01, pairs._Normal(1.0))]
    above = sum(w * np.exp(p.tails(y)[0]) for w, p in parts) + 0.81 * (y < 0)
    assert np.allclose(np.exp(pair.tails(y)[0]), above, rtol=1e-12)
    everyone = ends([(gaussian_losses(3.0, group=3), 4)], 1e-6)
    assert everyone == ends([(gaussian_losses(1.0), 4)], 1e-6)


def test_the_transform_s_error_is_charged():
    "Masses of a sum by the transform miss the exact ones by no more than is charged."
    whole = np.random.default_rng(0).integers(1, 2**20, 40).astype(object)
    k, mass = np.arange(40), whole.astype(float) / 2**24
    size, rounds, step, theta = 2**12, 6, 0.1, 0.5
    law, scale, error, _ = composition._composed(
        [(k, mass, rounds)], theta, step, size, 0
    )
    exact = np.array([1], object)
    for _ in range(rounds):
        exact = np.convolve(exact, whole)
    exact = np.array([float(x) for x in exact]) / 2.0 ** (24 * rounds)
    tilted = exact * np.exp(theta * step * np.arange(len(exact)) - scale)
    off = np.abs(law[: len(tilted)] - tilted).max()
    assert 1e-7 * error < off <= error


def test_a_loss_that_is_taken_for_a_point_of_the_grid_costs_what_it_misses():
    "It lies above the point by less than NEAR of a step."
    rounds, delta, step = 6, 1e-3, 0.05
    first, second = 10 * step, (20 + 0.9 * composition.NEAR) * step
    mass = np.array([0.5, 0.5, 0.0])
    null = mass * np.exp(-np.array([first, second, 0.0]))
    null[2] = 1 - null.sum()
    plan = composition._Plan([(pairs.Listed(mass, null), rounds)], delta)
    _, (low, _), t = plan.window(1.0)
    view = 1.0, t, math.floor(low / step), step, 2**12
    exact = rounds * second + math.log1p(-delta * 2**rounds)
    assert exact > (rounds - 1) * second + first, "one outcome decides"
    found = composition._one_end(plan, view, True)
    assert exact <= found < exact + 1e-6


@tabled(
    "sigma, q, rounds, delta, right",
    [
        (3.8, 0.1, 1000, 1e-5, 5.55),
        (5.0, 0.3, 50, 1e-6, 2.851),
        (2.0, 0.5, 100, 1e-5, 23.85),
        (1.589, 0.1, 20, 1e-5, 5.3205),
        (1.0, 0.01, 1000, 1e-6, 15.255),
    ],
)
def test_a_silenced_client_of_a_fixed_cohort_by_three_distances(
    sigma, q, rounds, delta, right
):
    "And not as if its silence moved the sum by two clips."
    release = gaussian_losses(sigma, q, "zero-out", "fixed")
    low, high = ends([(release, rounds)], delta)
    assert 0.999 * right < low <= high < 1.001 * right
    made = fixed_size_epsilon(sigma, q, rounds, delta, "zero-out")
    assert low <= made.eps <= high * 1.0005 and "zeroed" in made.theorem
    assert made.eps < fixed_size_epsilon(sigma, q, rounds, delta, "replace").eps


def envelope(x, y):
    "The largest convex function below points, at each of them: the least of all chords."
    i, j, k = np.ogrid[: len(x), : len(x), : len(x)]
    with np.errstate(divide="ignore", invalid="ignore"):
        chord = y[i] + (x[j] - x[i]) / (x[k] - x[i]) * (y[k] - y[i])
    return np.minimum(y, np.where((i < j) & (j < k), chord, np.inf).min((0, 2)))


@tabled("mu, q", [(0.3, 0.1), (1.0, 0.01), (3.0, 0.01), (0.5, 0.9)])
def test_the_pair_of_a_silenced_client_is_the_hull_of_its_bounds(mu, q):
    "It has the curve of Prop. zeroed, written again, and tails that add up."
    pairs._zeroed.cache_clear()
    forward, back = pairs.gaussian_pairs(mu, q, "zero-out", "fixed", None)
    y = np.linspace(0, 8 * mu, 160)
    eps = np.log1p(np.expm1(y) / q)
    one, two = (profile_of_gaussian(k * mu, eps) for k in (1, 2))
    b = np.exp(y - eps)
    for pair, bound in ((forward, q * ((1 - b) * two + b * one)), (back, q * one)):
        p, null, p_below, null_below = np.exp(pair.tails(y))
        found, right = p - np.exp(y) * null, envelope(np.exp(y), bound)
        assert (found <= bound * (1 + 3e-4)).all()
        assert np.allclose(found[1:-30], right[1:-30], rtol=5e-3)
        assert np.allclose(p + p_below, 1) and np.allclose(null + null_below, 1)


def hold_the_pair_of_a_swap(mu=0.8, q=0.1):
    "Opposite updates on a grid of outcomes; no other two lose more, at any angle."
    side = np.linspace(-8, 8, 321)
    x, y = np.meshgrid(side, side)

    def world(u, v=0.0):
        moved = np.exp(-((x - u) ** 2 + (y - v) ** 2) / 2)
        law = (1 - q) * np.exp(-(x**2 + y**2) / 2) + q * moved
        return law * (side[1] - side[0]) ** 2 / (2 * math.pi)

    eps = np.array([0.0, 0.05, 0.2, 0.6])
    p, null, below, null_below = np.exp(pairs._Swap(mu, q).tails(eps))
    assert np.allclose(p + below, 1) and np.allclose(null + null_below, 1)
    found = p - np.exp(eps) * null

    def curve(*worlds):
        return profile_of_pmfs(*(world(*at) for at in worlds), eps)

    assert np.allclose(found, curve((mu,), (-mu,)), rtol=1e-3, atol=1e-9)
    for angle, size in product((0.5, 2.0, 3.0), (0.5, 1.0)):
        other = size * mu * math.cos(angle), size * mu * math.sin(angle)
        assert (curve((mu,), other) <= found * (1 + 1e-6)).all()


MUTANTS = [  # where | what stands there | what does not hold | who notices
    (pairs, "_zeroed", "in (1, 2)", "in (1, 1.95)", 0),
    (pairs, "_zeroed", "in (1, 2)", "in (0.97, 2)", 0),
    (pairs, "_zeroed", "-(1 - q) *", "-0.9 * (1 - q) *", 0),
    (pairs, "_zeroed", "np.log1p(q *", "np.log1p(0.9 * q *", 0),
    (pairs, "_Swap", "(mu, -mu)", "(mu, -0.98 * mu)", 1),
    (pairs, "_Swap", "-(self.mu**2) / 2", "-(self.mu**2) / 2.1", 1),
    (pairs, "_Swap", "+ 2 * g + size", "+ 2 * g", 1),
    (pairs, "_Swap", "[1 - self.q, self.q]", "[1 - 0.98 * self.q, 0.98 * self.q]", 1),
]
HOLD = (
    partial(test_the_pair_of_a_silenced_client_is_the_hull_of_its_bounds, 1.0, 0.3),
    hold_the_pair_of_a_swap,
)


@tabled("module, name, old, new, check", MUTANTS)
def test_a_wrong_constant_of_a_proof_is_noticed(module, name, old, new, check):
    source = inspect.getsource(getattr(module, name))
    space = dict(vars(module))
    assert old in source
    exec(source.replace(old, new), space)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, space[name])
        with pytest.raises(AssertionError):
            HOLD[check]()
    pairs._zeroed.cache_clear()


def test_many_symbols_lose_less_than_their_epsilon():
    low, high = ends([(pure_losses(1.0, 3), 2)], 0.1)
    p, q = (np.array(x) / (math.e + 2) for x in ([math.e, 1, 1], [1, math.e, 1]))
    laws = multinomial_laws(p, q, 2)
    exact = brentq(lambda eps: profile_of_pmfs(*laws, eps) - 0.1, 0, 2)
    assert low <= exact <= high < low + 1e-4


@tabled(
    "sigma, q, delta, right", [(0.4, 1e-6, 1e-12, 1.0604), (0.6, 1e-4, 1e-10, 0.52518)]
)
def test_one_release_has_the_curve_of_its_pair(sigma, q, delta, right):
    "Where the composed losses say 1.276 and .5372."
    low, high = ends([(gaussian_losses(sigma, q, **POISSON), 1)], delta)
    assert low <= high < low * (1 + 1e-9) and high == pytest.approx(right, rel=1e-4)
    run = dict(sampling="poisson", accountant="pld")
    assert gaussian_guarantee(sigma, delta, q, 1, **run).eps == high
    (pair, *_) = gaussian_losses(sigma, q, **POISSON).pairs
    p, null = (math.exp(float(t[0])) for t in pair.tails(np.array([high]))[:2])
    assert p - math.exp(high) * null == pytest.approx(delta, rel=1e-6)


@tabled(
    "sigma, q, rounds, delta, right",
    [
        (0.6, 1e-4, 10**5, 1e-7, 1.4769),
        (1.0, 0.01, 1000, 1e-6, 3.2143),
        (0.8, 0.02, 200, 1e-5, 3.998),
    ],
)
def test_a_swap_under_coins_costs_what_opposite_updates_do(
    sigma, q, rounds, delta, right
):
    hold_the_pair_of_a_swap()
    low, high = ends([(gaussian_losses(sigma, q, "replace", "poisson"), rounds)], delta)
    assert low <= high <= 1.0001 * low and high == pytest.approx(right, rel=1e-4)
    run = dict(sampling="poisson", accountant="pld")
    swap = gaussian_guarantee(sigma, delta, q, rounds, relation="replace", **run)
    joins = gaussian_guarantee(
        sigma, delta / (1 + math.exp(high / 2)), q, rounds, **run
    )
    assert swap.eps == pytest.approx(high, rel=1e-4) and high < 2 * joins.eps


SILENT = fixed_size_epsilon(1.0, 0.5, 1, 1e-2, "zero-out")
JOINS, SWAP = (
    gaussian_guarantee(1.0, 1e-2, 0.5, relation=relation, accountant="pld", **POISSON)
    for relation in ("add-remove", "replace")
)


@tabled(
    "name, other, away, claimed, least",
    [
        ("silenced", 0.0, -1.0, SILENT, 0.4),  # another comes, and sends the opposite
        ("swapped", -1.0, 0.0, SWAP, 0.8),  # it comes with one update, or the opposite
    ],
)
def test_what_a_drawn_client_costs_is_audited(name, other, away, claimed, least):
    n, rng = 200_000, seed_tree(0, name)
    worlds = (
        np.where(rng.random(n) < 0.5, sent, away) + rng.standard_normal(n)
        for sent in (1.0, other)
    )
    found = audit.distinguish(*worlds, 1e-2)
    assert not audit.refutes(found, claimed) and found.eps > least * claimed.eps
    assert audit.refutes(found, JOINS), "as if its place stayed empty"


def test_more_rounds_than_rounding_allows_are_not_composed(monkeypatch):
    def composed(*_):
        raise AssertionError("the transform is of no use here")

    monkeypatch.setattr(accounting, "upper_end", composed)
    many = dpcomm.Deployment(5_000, 50, 2**53, 1e-6)
    made = many.calibrate("gaussian", eps=1.0)
    assert 0.99 <= many.guarantee(made).eps <= 1


@tabled("seed", range(12))
def test_a_listed_message_may_be_read_either_way_where_inputs_are_swapped(seed):
    "Against the worst of all ways that three messages go, by enumeration."
    rng = seed_tree(seed, "either way")
    p, q = rng.dirichlet(np.full(int(rng.integers(2, 6)), 0.7), 2)
    delta, exact = 10 ** -rng.uniform(0.5, 5), 0.0
    for ways in product(((p, q), (q, p)), repeat=3):
        here, there = (reduce(np.multiply.outer, laws).ravel() for laws in zip(*ways))

        def above(eps):
            return np.maximum(here - math.exp(eps) * there, 0).sum() - delta

        exact = max(exact, brentq(above, 0, 300) if above(0) > 0 else 0)
    found = compose([(losses.listed_losses(p, q), 3)], delta)
    assert found.low - 1e-9 <= exact <= found.eps + 1e-9
    one_way = compose([(losses.listed_losses(p, q, relation="zero-out"), 3)], delta)
    assert one_way.eps <= found.eps + 1e-6


def test_losses_that_are_all_negative_but_one_that_reveals_are_composed():
    p, q = [0.05, 0.5, 0.45], [0, 0.52, 0.48]
    found = compose([(losses.listed_losses(p, q, relation="zero-out"), 2)], 0.2)
    assert 0 <= found.low <= found.eps < 0.1
    with pytest.raises(ValueError, match="share no outcome: each"):
        losses.listed_losses([0.5, 0.5, 0], [0, 0, 1])


def test_a_list_keeps_every_premise():
    made = [losses.pure_losses(1.0, premises={"proof": text}) for text in "ab"]
    assert (
        compose([(one, 2) for one in made], 1e-5).guarantee.premises["proof"] == "a; b"
    )


def test_a_silenced_client_costs_no_more_where_the_noise_is_larger():
    eps = [fixed_size_epsilon(s, 0.1, 10**4, 1e-6, "zero-out").eps for s in (999, 1001)]
    assert eps[1] < eps[0]
    assert fixed_size_epsilon(20.0, 2.0**-53, 10, 1e-18, "zero-out").eps < 0.01
