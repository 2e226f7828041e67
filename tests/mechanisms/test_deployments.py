"Deployments: what they promise, what calibration finds, and what they refuse."

import inspect
from dataclasses import replace

import pytest
from tables import tabled

import dpcomm
from dpcomm import Deployment, mechanism, registered
from dpcomm.core.random import seed_tree
from dpcomm.mechanisms.contract import mechanism_class
from dpcomm.mechanisms.mvu_table import solve
from dpcomm.privacy.audit import refutes

AMPLIFIED = Deployment(5_000, 50, 800, 1e-6, visits=20, d=3_000)
FIXED = Deployment(1_000, 50, 100, 1e-5, sampling="fixed", d=500)
KNOWN = replace(AMPLIFIED, sampling="fixed", trust="secagg", d=500)
STEPS = ("privquant", "sqsgd")  # spend what a whole number of matches spends


def proved(s, m):
    "The smaller of what the mechanism proves of the draw, and of all messages of a client."
    about = {"relation": "zero-out"} if "zero-out" in m.relations else {}
    about |= {"d": s.d} if "d" in inspect.signature(m.guarantee).parameters else {}
    drawn = dict(n_clients=s.n_clients, cohort=s.cohort, sampling=s.sampling)
    ways = [dict(rounds=s.messages, sampling="none")]
    if s.trust == "central" and s.sampling in m.samplings:
        ways.append(dict(rounds=s.rounds, **drawn))
    made = [m.guarantee(delta=s.delta, **way, **about) for way in ways]
    return min(made, key=lambda one: one.eps)


@tabled("name", registered())
def test_every_mechanism_is_calibrated_at_three_deployments(name):
    for deployment in (AMPLIFIED, FIXED, KNOWN):
        if deployment is KNOWN and name in ("gaussian", "quantised"):
            with pytest.raises(ValueError, match="trust is 'secagg'.*trust='central'"):
                deployment.calibrate(name)
            continue
        eps = 60.0 if name == "sqsgd" else 4.0
        more = dict(rule="best") if name in STEPS else {}
        made = deployment.calibrate(name, eps, **more)
        stated, known = deployment.guarantee(made), proved(deployment, made)
        for field in ("eps", "trust", "rounds"):
            assert getattr(stated, field) == getattr(known, field)
        assert stated.eps <= eps and stated.delta == deployment.delta
        if name not in STEPS:
            assert stated.eps > 0.99 * eps
        assert type(made) is mechanism_class(name)


def test_the_gaussian_agrees_with_dp_accounting():
    import dp_accounting
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    noise = dp_accounting.PoissonSampledDpEvent
    for rounds, cohort, eps in ((800, 50, 4.0), (100, 500, 1.0)):

        def event(sigma, q=cohort / 5_000, rounds=rounds):
            one = noise(q, dp_accounting.GaussianDpEvent(sigma))
            return dp_accounting.SelfComposedDpEvent(one, rounds)

        theirs = dp_accounting.calibrate_dp_mechanism(
            RdpAccountant, event, eps, 1e-6, tol=1e-4
        )
        here = Deployment(5_000, cohort, rounds, 1e-6)
        ours = here.calibrate("gaussian", eps, accountant="rdp-balle")
        assert ours.sigma == pytest.approx(theirs, rel=0.01)
        least = here.calibrate("gaussian", eps).sigma
        spent = PLDAccountant().compose(event(least)).get_epsilon(1e-6)
        assert least < 0.98 * ours.sigma and 0.99 * eps < spent < 1.001 * eps


NOISE, SIGNS = (mechanism(m, clip_norm=1.0, sigma=3.0) for m in ("gaussian", "signsgd"))
REC = mechanism("rec", clip_norm=1.0, std=2.0)
PM = mechanism("pm", bound=1.0, eps=0.1)
OFTEN = Deployment(10, 9, 50, 1e-5)
NULL = replace(AMPLIFIED, relation="poisson-null")
EXACTLY = replace(AMPLIFIED, relation="zero-out", delta=0.0)


@tabled(
    "s, m, sampling, relation, rounds",
    [
        (AMPLIFIED, SIGNS, "none", "zero-out", 20),
        (replace(AMPLIFIED, visits=None), SIGNS, "none", "zero-out", 800),
        (AMPLIFIED.after(3), SIGNS, "none", "zero-out", 3),
        (AMPLIFIED.after(300), SIGNS, "none", "zero-out", 20),
        (AMPLIFIED, NOISE, "poisson", "zero-out", 800),
        (AMPLIFIED.after(3), NOISE, "poisson", "zero-out", 3),
        (replace(AMPLIFIED, relation="replace"), NOISE, "poisson", "replace", 800),
        (OFTEN, NOISE, "poisson", "zero-out", 50),
        (replace(OFTEN, visits=2), NOISE, "none", "zero-out", 2),
        (FIXED, NOISE, "fixed", "zero-out", 100),
        (replace(FIXED, visits=100), NOISE, "fixed", "zero-out", 100),
        (replace(FIXED, visits=20), NOISE, "none", "zero-out", 20),
        (AMPLIFIED, REC, "none", "local", 20),
        (NULL, REC, "poisson", "poisson-null", 800),
        (replace(AMPLIFIED, relation="replace"), PM, "none", "replace", 20),
        (EXACTLY, PM, "none", "zero-out", 20),
    ],
)
def test_the_smallest_way_that_is_proved_is_stated(s, m, sampling, relation, rounds):
    made = s.guarantee(m)
    assert (made.sampling, made.relation) == (sampling, relation)
    assert made.rounds == rounds and made.delta == s.delta
    often = sampling == "none" and s.visits is not None
    assert ("that comes most often" in made.note) == often
    if m is NOISE:
        assert made == s.guarantee(m, "pld")
        assert made.eps < s.guarantee(m, "rdp-balle").eps
    if s.delta == 0:
        assert made.eps == pytest.approx(2.0)
    if m is SIGNS:
        assert "published its data" in replace(s, delta=0.01).guarantee(m).note


def test_shares_of_noise_must_be_there():
    few = mechanism("topk", fraction=1.0, clip_norm=1.0, sigma=3.0, n_clients=10)
    fifty = replace(few, n_clients=50)
    loose = replace(KNOWN, tolerance=0.2, dropouts=0.1)
    assert KNOWN.guarantee(few).eps == KNOWN.guarantee(fifty).eps
    with pytest.raises(ValueError, match="needs 50 shares.*leave 40: build it with"):
        loose.guarantee(fifty)
    assert loose.calibrate("topk").tolerance == 0.2
    with pytest.raises(ValueError, match="dropouts is 0.3 and tolerance 0.2"):
        replace(loose, dropouts=0.3).guarantee(few)
    shares = replace(KNOWN, sampling="poisson").guarantee(fifty)
    assert "shares" in shares.premises and not KNOWN.guarantee(fifty).premises


@tabled(
    "name, changes, told",
    [
        (None, dict(n_clients=10**400), "n_clients"),
        (None, dict(cohort=5_001), "cohort is 5001 of 5000"),
        (None, dict(sampling="fixd"), "did you mean 'fixed'"),
        (None, dict(sampling="none"), "cohort is 50 of 5000 .*: pass cohort"),
        (None, dict(visits=801), "visits is 801; .* from 1 to 800"),
        (None, dict(sampling="fixed", visits=7), "visits is 7; .* from 8 to 800"),
        (None, dict(groups=()), "groups"),
        (None, dict(groups=(3, 5)), "groups sum to 8 and d is 3000"),
        ("gaussian", dict(delta=0.0), "delta is 0.0; it must be a number in"),
        ("skellam", dict(trust="local"), "trust='secagg'"),
        ("gaussian", dict(trust="local"), "local=True"),
        ("gaussian", dict(sampling="replacement", visits=None), "sampling='poisson'"),
        ("ddgauss", dict(d=None), "d is None"),
        ("rec", dict(unit="example"), "unit is 'example'"),
        ("pm", dict(relation="add-remove"), "relation is 'add-remove'.*use local"),
    ],
)
def test_what_a_deployment_cannot_be_or_serve_is_said(name, changes, told):
    with pytest.raises(ValueError, match=told):
        s = replace(AMPLIFIED, **changes)
        name and s.calibrate(name)


def test_groups_are_the_model_s():
    grouped = replace(AMPLIFIED, d=None, groups=(3, 5))
    assert grouped.d == 8 and grouped.calibrate("rec", 30.0).groups == (3, 5)
    with pytest.raises(ValueError, match="in the deployment and .* in the mechanism"):
        grouped.guarantee(replace(REC, groups=(4, 4)))


def test_a_small_ring_is_refused_with_the_bits_it_takes():
    often = replace(KNOWN, visits=None, d=500_000)
    with pytest.raises(ValueError, match="use ring_bits = (1[7-9]) or more") as caught:
        often.calibrate("skellam")
    bits = int(str(caught.value).partition("ring_bits = ")[2][:2])
    made = often.calibrate("skellam", ring_bits=bits)
    assert made.ring_bits == bits and 3.96 < often.guarantee(made).eps <= 4
    with pytest.raises(ValueError, match="needs more than 1.5 times the noise"):
        often.calibrate("skellam", eps=8.0)


def test_calibration_is_local_where_asked_and_forgets_its_start():
    seen = replace(AMPLIFIED, trust="local")
    made = seen.guarantee(seen.calibrate("gaussian", local=True))
    assert (made.trust, made.rounds) == ("local", 20) and 3.96 < made.eps <= 4
    usual = AMPLIFIED.calibrate("gaussian", 2.0).sigma
    for start in (1e-3, 50.0):
        made = AMPLIFIED.calibrate("gaussian", 2.0, start=start)
        assert made.sigma == pytest.approx(usual, rel=0.01)
    assert AMPLIFIED.calibrate("gaussian", 2.0, start=usual).sigma == usual


@tabled("bits", [1, 2])
def test_a_table_brings_its_own_eps_and_beta_is_set(bits):
    table = solve(2.0, 2, 2**bits)
    found = [KNOWN.calibrate("imvu", eps, table=table) for eps in (2.0, 4.0)]
    assert all(m.table is table and m.eps == 2.0 for m in found)
    assert [round(KNOWN.guarantee(m).eps) for m in found] == [2, 4]
    assert found[0].beta < found[1].beta
    with pytest.raises(TypeError, match="it must be a Table"):
        KNOWN.calibrate("imvu", table=object())


SEEN = Deployment(100, 50, 20, delta=1e-3, visits=5)


@tabled("name", [name for name in registered() if name != "rec"])
def test_an_audit_plays_what_the_deployment_promises(name):
    "Far more is promised than a hundred plays can refute; a tenth of the noise is not."
    d = 10 if name == "sqsgd" else 3
    made = replace(SEEN, d=d).calibrate(name, 60.0)
    found, promised = SEEN.audit(made, 100, seed_tree(0, name), rounds=2, d=d)
    assert promised.rounds == 2 and not refutes(found, promised)
    assert promised.sampling in ("none", *made.samplings)
    assert found.trials == 100 and found.delta == SEEN.delta


def test_an_audit_of_a_deployment_finds_a_lie():
    "Noise a tenth of what is promised, in a run where everybody takes part."
    made = replace(SEEN, cohort=100).calibrate("gaussian", 2.0, exact=False)
    false = replace(made, sigma=made.sigma / 10)
    everyone = replace(SEEN, cohort=100, rounds=1, visits=None)
    promised = everyone.audit(made, 3000, seed_tree(0))[1]
    found = everyone.audit(false, 3000, seed_tree(0))[0]
    assert promised.eps <= 2.0 and refutes(found, promised)


# ---- what a shuffle must hold, and what calibration cannot reach


@tabled("tolerance, right", [(0.16, 6.26), (0.2, 6.47), (0.24, 6.69)])
def test_a_shuffle_counts_on_the_fewest_messages_that_are_let_through(tolerance, right):
    "And not on those that are expected: with a tenth missing all 20 hold 45 never."
    s = Deployment(100, 50, 20, 1e-5, "fixed", "shuffler", dropouts=0.1, d=16)
    pm = mechanism("pm", bound=1.0, eps=1.684)
    with pytest.raises(ValueError, match="raise tolerance"):
        s.guarantee(pm)
    s = replace(s, tolerance=tolerance)
    made = s.guarantee(pm)
    assert made.eps == pytest.approx(right, abs=0.006)
    assert f"at least {s.least} of 50 messages" in made.note
    assert s.check_shuffle(s.least) == s.least
    with pytest.raises(ValueError, match=f"counts on {s.least}"):
        s.check_shuffle(s.least - 1)


@tabled("name, cohort, eps", [("gaussian", 50, 1e5), ("topk", 25, 9e4)])
def test_an_epsilon_that_is_out_of_reach_is_refused_with_the_nearest(name, cohort, eps):
    s = Deployment(5_000, cohort, 100, 1e-5, d=64)
    with pytest.raises(ValueError, match="ask for an eps of at most") as caught:
        s.calibrate(name, eps)
    nearest = float(str(caught.value).rpartition("at most ")[2])
    eps = s.guarantee(s.calibrate(name, nearest)).eps
    assert 0.99 * nearest <= eps <= nearest


def test_an_eps_below_all_but_none_names_the_least_there_is():
    where = dpcomm.Deployment(20, 4, 3, 1e-3)
    with pytest.raises(ValueError, match="jumps here from .* to 0: ask for") as told:
        where.calibrate("gaussian", 1e-30)
    least = float(str(told.value).split()[-1])
    made = where.calibrate("gaussian", 1.01 * least)
    assert where.guarantee(made).eps <= 1.01 * least
    with pytest.raises(ValueError, match="lower start, or leave it out"):
        where.calibrate("gaussian", 4.0, start=1e99)


def test_who_leaves_a_cohort_of_fixed_size_makes_room_for_another():
    "Two clips apart, so a message a client at one clip is no account of it."
    gaussian = mechanism("gaussian", clip_norm=1.0, sigma=2.0)
    drawn = dict(sampling="fixed", relation="add-remove")
    for cohort, rounds in ((99, 1), (50, 20), (100, 2)):
        s, who = Deployment(100, cohort, rounds, 1e-5, **drawn), (rounds, 1e-5)
        own = gaussian.guarantee(*who, n_clients=100, cohort=cohort, **drawn)
        assert s.guarantee(gaussian).eps == own.eps
    with pytest.raises(ValueError, match="no such .* use zero-out or replace$"):
        replace(s, cohort=50, rounds=30, visits=20).guarantee(gaussian)
