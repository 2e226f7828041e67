"What a mechanism states where nobody names an accountant is as small as what is known."

import inspect

import pytest
from tables import tabled

from dpcomm import mechanism, registered
from dpcomm.mechanisms.contract import mechanism_class
from dpcomm.privacy.losses import compose

ROUNDS, DELTA, SIZE = 40, 1e-6, 500
SIGNS = ("imvu", "signsgd")  # their own law proves less than the Gaussian's losses
PURE = ("pm", "privquant", "sqkr", "sqsgd", "vqsgd")


def cases(name):
    "The mechanism, its run by default, and the same releases composed."
    made = mechanism(name, **mechanism_class(name).audit_cases[0][0])
    sized = {"d": SIZE} if "d" in inspect.signature(made.losses).parameters else {}
    if name == "rec":
        who = dict(n_clients=100, cohort=10)
        yield made, who, (made.losses(**who), ROUNDS * 10)
        return
    for sampling in made.samplings:
        q = 1.0 if sampling == "none" else 0.1
        run = dict(sampling=sampling) | sized
        run |= {} if q == 1 else dict(n_clients=100, cohort=10)
        said = made.guarantee(rounds=ROUNDS, delta=DELTA, **run)
        release = sized | dict(relation=said.relation)
        release |= {} if made.trust == "local" else dict(q=q, sampling=sampling)
        yield made, run, (made.losses(**release), ROUNDS)


@tabled("name", registered())
def test_no_default_is_two_per_cent_above_its_composed_losses(name):
    for made, run, part in cases(name):
        said = made.guarantee(rounds=ROUNDS, delta=DELTA, **run)
        proved = compose([part], DELTA)
        same = proved.guarantee
        assert (said.relation, said.sampling) == (same.relation, same.sampling)
        assert said.eps <= 1.02 * proved.eps
        assert said.eps >= proved.low * (1 - 1e-9) or name in SIGNS
        assert said.accountant in ("pld", "pld-exact", "exact-balle", "mixture-balle")


@tabled("name", PURE)
def test_pure_epsilons_are_added_where_delta_is_zero_or_pure_is_asked_for(name):
    made = mechanism(name, **mechanism_class(name).audit_cases[0][0])
    one = made.message_epsilon(SIZE)
    for run in (dict(delta=0.0), dict(delta=DELTA, accountant="pure")):
        said = made.guarantee(ROUNDS, d=SIZE, **run)
        assert (said.eps, said.accountant) == (ROUNDS * one, "pure")
    once = made.guarantee(1, DELTA, d=SIZE)
    assert (once.eps, once.accountant) == (one, "pure")
    many = made.guarantee(ROUNDS, DELTA, d=SIZE)
    assert (many.accountant, many.delta) == ("pld", DELTA) and many.eps < ROUNDS * one
    with pytest.raises(ValueError, match="accountant"):
        made.guarantee(ROUNDS, DELTA, d=SIZE, accountant="rdp-balle")
