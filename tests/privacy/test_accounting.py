"""What guards `dpcomm.privacy.accounting`: independent implementations, quadrature,
properties and refusals.
"""

import dataclasses
from itertools import product
from math import log

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant as theirs
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import tabled

from dpcomm.privacy import accounting
from dpcomm.privacy import guarantee as said
from dpcomm.privacy.accounting import gaussian_guarantee, rdp_subsampled_gaussian
from dpcomm.privacy.guarantee import RELATIONS, SAMPLINGS, TRUSTS, Guarantee

NAMES = dict(unit="client", relation="add-remove", sampling="poisson", scope="total")
NAMES |= dict(accountant="rdp-classic", trust="central")
GRID = list(product((1e-3, 0.01, 0.5, 0.9), (0.5, 0.957, 5.0)))
WHOLE = np.array([2, 3, 4, 7, 16, 33, 64, 256, 1024])
FRACTIONS = np.array([1.1, 1.5, 2.5, 3.7, 6.3, 10.9, 33.3, 100.5])
FEW = np.array([1.5, 2, 3, 5, 8, 12, 20, 40, 80])
ours = settings(max_examples=60, deadline=None, derandomize=True)
alphas, sigmas, rates = st.floats(1.05, 60), st.floats(0.3, 20), st.floats(1e-3, 0.999)


# ---- Renyi curves ----


@tabled("q, sigma", GRID)
def test_no_order_is_above_dp_accounting_and_whole_ones_agree(q, sigma):
    "Between them it sums absolute binomials; the page holds ours against the integral."
    for orders in (FRACTIONS, WHOLE):
        found = rdp_subsampled_gaussian(orders, sigma, q)
        other = theirs._compute_rdp_poisson_subsampled_gaussian(q, sigma, orders)
        assert (found <= other * (1 + 1e-6)).all()
    np.testing.assert_allclose(found, other, rtol=1e-6)


@tabled("q", [1e-6, 1e-9])
def test_rare_sampling_keeps_its_digits(q):
    "Rounded fractional orders fall back to an upper bound."
    one = q**2 * np.expm1(1.0)
    assert rdp_subsampled_gaussian(2, 1.0, q) == pytest.approx(one, rel=1e-9)
    assert rdp_subsampled_gaussian(3, 1.0, q) == pytest.approx(1.5 * one, rel=1e-4)
    for order in (1.1, 1.5, 2.5):
        exact, found = order / 2 * one, rdp_subsampled_gaussian(order, 1.0, q)
        assert exact <= found <= 2 * exact / min(order - 1, 1)


@pytest.mark.filterwarnings("error")
@tabled("sigma", [1e-3, 0.1, 1e4])
def test_extremes_neither_overflow_nor_warn(sigma):
    orders = np.array([1.01, 1.5, 2, 255.5, 10_000, 10_000.5])
    for q in (1e-8, 1e-3, 0.5, 0.999999):
        found = rdp_subsampled_gaussian(orders, sigma, q)
        assert np.isfinite(found).all() and (found > 0).all()
        assert (found <= accounting.rdp_gaussian(orders, sigma)).all()
    high = rdp_subsampled_gaussian(10_000, 0.1, 0.01)
    assert high == pytest.approx(10_000 / 0.02 + 10_000 / 9_999 * log(0.01), rel=1e-9)


@ours
@given(alphas, sigmas, rates, st.floats(1.01, 3))
def test_curve_is_monotone(order, sigma, q, factor):
    here = rdp_subsampled_gaussian(order, sigma, q)
    slack = 1 + 1e-6
    if here * (order - 1) < 1e-8:
        return
    assert here <= rdp_subsampled_gaussian(order * factor, sigma, q) * slack
    assert here <= rdp_subsampled_gaussian(order, sigma / factor, q) * slack
    assert here <= rdp_subsampled_gaussian(order, sigma, min(1, q * factor)) * slack
    assert here <= accounting.rdp_gaussian(order, sigma) * slack


# ---- composition and conversion ----


@tabled("delta", [1e-3, 1e-6])
@tabled("q, sigma, rounds", [(0.01, 0.8, 100), (0.1, 2.15, 2000), (0.1, 5.0, 1)])
def test_epsilon_agrees_with_dp_accounting(q, sigma, rounds, delta):
    orders = accounting.INTEGER_ORDERS
    curve = accounting.compose(rdp_subsampled_gaussian(orders, sigma, q), rounds)
    found = accounting.rdp_to_eps(orders, curve, delta, "balle")
    other = theirs.compute_epsilon(orders, curve, delta)
    assert found == pytest.approx(other, rel=1e-6)
    whole, normal = np.arange(2, 257), dp_accounting.GaussianDpEvent(sigma)
    event = dp_accounting.PoissonSampledDpEvent(q, normal)
    other = dp_accounting.rdp.RdpAccountant(whole).compose(event, rounds)
    names = dict(sampling="poisson", accountant="rdp-balle", orders=whole)
    stated = gaussian_guarantee(sigma, delta, q, rounds, **names)
    assert stated.eps == pytest.approx(other.get_epsilon(delta), rel=1e-6)


# ---- the exact Gaussian ----


@tabled("sigma", [0.5, 1.0, 3.0])
@tabled("eps", [0.0, 0.3, 2.0, 8.0])
def test_gaussian_delta_agrees_with_dp_accounting(sigma, eps):
    other = dp_accounting.pld.privacy_loss_mechanism.GaussianPrivacyLoss(sigma)
    want = other.get_delta_for_epsilon(eps)
    assert accounting.gaussian_delta(sigma, eps) == pytest.approx(want, rel=1e-6)
    assert accounting.gaussian_delta(1.0, 1e200) == 0
    assert accounting.gaussian_delta(1e-3, 0) == pytest.approx(1)


# ---- guarantees ----


def test_guarantee_prints_and_stores_every_field():
    names = dict(sampling="poisson", relation="zero-out", note="a remark")
    rain = {"sampling": "as if it rained"}
    g = gaussian_guarantee(2.0, 1e-5, 0.1, 50, premises=rain, **names)
    told = "1e-05|unit client|relation zero-out|sampling poisson, q = 0.1|a remark"
    told += (
        "|rdp-classic (accountant)|of 50 rounds (scope total)|trust central|best order"
    )
    assert all(text in str(g) for text in [f"{g.eps:.4g}", *told.split("|")])
    assert str(g).startswith("As if it rained (premise sampling): eps = ")
    assert str(dataclasses.replace(g, premises={})).startswith("eps = ")
    fields = {"eps", "delta", "note", "premises", "rounds", "q", *NAMES}
    assert set(g.as_dict()) == fields
    with pytest.raises(AttributeError):
        g.eps = 0.1
    assert Guarantee(np.inf, 0, **NAMES).eps == np.inf
    assert type(Guarantee(np.float64(1), 0, **NAMES).eps) is float


@tabled("name", accounting.ACCOUNTANTS)
def test_swapped_client_is_half_the_noise_under_every_accountant(name):
    run = dict(delta=1e-5, rounds=4, accountant=name)
    half = gaussian_guarantee(3.0, **run)
    swapped = gaussian_guarantee(6.0, **run, relation="replace")
    local = gaussian_guarantee(6.0, **run, relation="local", trust="local")
    assert half.eps == swapped.eps == local.eps


# ---- calibration ----


@ours
@given(st.floats(0.2, 8), st.floats(1e-7, 1e-2), st.sampled_from([0.02, 0.3, 1.0]))
def test_calibrated_noise_is_safe_and_tight(eps, delta, q):
    names = dict(sampling="poisson", orders=FEW, accountant="rdp-balle")

    def at(sigma):
        return gaussian_guarantee(sigma, delta, q, 20, **names)

    if not at(100).eps <= eps <= at(0.3).eps:
        return
    sigma = accounting.calibrate(at, eps, 0.3, 100, tol=1e-4)
    assert at(sigma).eps <= eps < at(sigma * (1 - 2e-4)).eps


# ---- refusals: every one names the argument and the value ----


def test_a_premise_is_about_one_known_thing():
    stated = Guarantee(1, 1e-5, **NAMES, premises={"keys": "as if it rained"})
    more = stated.assuming("keys", "proof")
    assert more.premises == {"keys": "as if it rained", "proof": said.PREMISES["proof"]}
    assert stated.theorem and not more.theorem, "a premise stands for the proof"
    assert stated.noting("", "x").noting("x").note == "x"
    told = [Guarantee(1, 0.01, **NAMES).among(n).note for n in (100, 99, None)]
    assert [*map(bool, told)] == [True, False, False]
    with pytest.raises(ValueError, match="rounds is 2; with scope = 'per-round'"):
        Guarantee(1, 1e-5, **NAMES | dict(scope="per-round"), rounds=2)


def test_a_record_of_old_is_read_with_the_premises_that_it_did_not_name():
    old = dict(eps=3.0, delta=1e-5, unit="client", scope="total", note="", q=0.1)
    old |= dict(trust="central", rounds=10)
    fixed = dict(relation="add-remove", sampling="poisson", accountant="rdp-classic")
    read = said.recorded(old | fixed | dict(premise="as the paper accounts it"))
    assert read.premises == {"sampling": "as the paper accounts it"}
    null = dict(relation="null-slot", sampling="replacement", accountant="exact-balle")
    assert set(said.recorded(old | null).premises) == {"neighbours"}
    gaps = said.recorded(old | null | dict(accountant="theorem1-arxiv"))
    assert set(gaps.premises) == {"neighbours", "proof"} and not gaps.theorem
    assert said.recorded(read.as_dict()) == read
    bare = said.recorded(old | null | dict(premises={}))
    assert bare.premises == {}, "who names premises is taken at the word"


def covered(relation, sampling, trust):
    "Whether some theorem covers three names, written a second time."
    stays = ("zero-out", "replace", "local")
    if trust == "shuffler" and sampling not in ("none", "fixed"):
        return False
    if trust != "central":
        return relation in stays
    more = dict(poisson="poisson-null", replacement="null-slot").get(sampling)
    return relation in (*stays, "add-remove", more)


@tabled("relation, sampling, trust", list(product(RELATIONS, SAMPLINGS, TRUSTS)))
def test_a_guarantee_is_made_only_where_a_theorem_covers_it(relation, sampling, trust):
    three = dict(relation=relation, sampling=sampling, trust=trust)
    proved = bool(said.PROVED.get((trust, sampling), {}).get(relation))
    assert proved == covered(**three)
    words = f"'{trust}' with sampling = '{sampling}' and relation = '{relation}' is not"
    for premises in ({}, dict(said.PREMISES)):
        names = NAMES | three | dict(premises=premises)
        if proved:
            assert Guarantee(1, 1e-5, **names).trust == trust
        else:
            with pytest.raises(ValueError, match=f"= {words} allowed: no theorem"):
                Guarantee(1, 1e-5, **names)
    q, normal = 1.0 if sampling == "none" else 0.1, sampling in ("none", "poisson")
    for name in accounting.ACCOUNTANTS[:2]:
        run = dict(sigma=3.0, delta=1e-5, q=q, accountant=name, **three)
        swap = sampling == "poisson" and relation in ("replace", "local")
        known = normal and not swap and (trust == "central" or sampling == "none")
        known &= trust != "shuffler"
        if proved and known and relation != "poisson-null":
            g = gaussian_guarantee(**run)
            assert (g.accountant, {k: getattr(g, k) for k in three}) == (name, three)
        else:
            with pytest.raises(ValueError, match="a Gaussian sum|not allowed|'shuff"):
                gaussian_guarantee(**run)


@tabled(
    "run, smaller",
    [
        ((0.3, 1e-12, 1e-6, 10**6), "pld"),
        ((2.0, 1e-5, 0.1, 1000), "pld"),
        ((0.009, 1e-5, 0.1, 3), "renyi"),
        ((2.0, 1e-200, 0.1, 1000), "renyi"),
        ((1.0, 1e-5, 0.01, 2**40), "renyi"),
        ((1.0, 1e-5, 0.0, 10), "renyi"),
        ((0.01, 1e-5, 0.5, 1), "pld"),
        ((1e8, 1e-5, 0.1, 2**53), "renyi"),
    ],
)
def test_pld_is_never_above_the_renyi_value(run, smaller):
    pld, renyi = (
        gaussian_guarantee(*run, sampling="poisson", accountant=name).eps
        for name in ("pld", "rdp-balle")
    )
    assert pld < np.inf and (pld == renyi if smaller == "renyi" else pld < renyi)


@tabled(
    "run, published, true",
    [  # epsilon of dp_accounting 0.6's PLD, and the upper end of the exact pair's losses
        ((0.8, 1e-9, 1e-5, 10**6), 0.1674, 0.1),
        ((2.0, 1e-9, 1e-4, 10**6), 0.32, 0.2785),
        ((10.0, 1e-9, 1e-3, 10**6), 0.567, 0.5368),
    ],
)
def test_rare_clients_cost_what_their_pair_costs(run, published, true):
    made = gaussian_guarantee(*run, sampling="poisson", accountant="pld")
    assert 0.75 * true < made.eps <= true < published
