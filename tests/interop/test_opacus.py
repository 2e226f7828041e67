"A history of Opacus becomes a Guarantee."

from types import SimpleNamespace

import pytest
from tables import tabled

from dpcomm.interop import opacus
from dpcomm.privacy import accounting

HISTORY = [(1.1, 0.01, 1000)]


@tabled("accountant", accounting.ACCOUNTANTS)
def test_a_history_of_one_part_is_a_sampled_gaussian(accountant):
    found = opacus.guarantee(HISTORY, 1e-5, accountant)
    ours = accounting.gaussian_guarantee(
        *(1.1, 1e-5, 0.01, 1000), sampling="poisson", accountant=accountant
    )
    assert found.eps == ours.eps and found.rounds == 1000 and found.q == 0.01
    named = found.unit, found.relation, found.sampling, found.trust
    assert named == ("example", "add-remove", "poisson", "central")
    assert "floating point" in found.note, "Opacus adds floats"


def test_parts_add_up():
    whole = opacus.guarantee(HISTORY, 1e-5, "rdp-balle")
    halves = [(1.1, 0.01, 400), (1.1, 0.01, 600)]
    parts = opacus.guarantee(halves, 1e-5, "rdp-balle")
    assert parts.eps == pytest.approx(whole.eps) and parts.rounds == 1000
    more = opacus.guarantee([*halves, (0.9, 0.01, 10)], 1e-5, "rdp-balle")
    assert more.eps > whole.eps


def test_parts_are_composed_by_their_losses():
    whole = opacus.guarantee(HISTORY, 1e-5)
    halves = opacus.guarantee([(1.1, 0.01, 400), (1.1, 0.01, 600)], 1e-5)
    assert halves.eps == pytest.approx(whole.eps, rel=1e-4)
    mixed = [*HISTORY, (0.9, 0.01, 500), (8.0, 1.0, 1)]
    made, renyi = (opacus.guarantee(mixed, 1e-5, a) for a in ("pld", "rdp-balle"))
    assert whole.eps < made.eps < 0.95 * renyi.eps
    for name in ("unit", "relation", "sampling", "trust", "rounds", "scope", "q"):
        assert getattr(made, name) == getattr(renyi, name) or name == "q"
    assert "floating point" in made.note and made.accountant == "pld"
    shuffled = opacus.guarantee(mixed, 1e-5, poisson=False)
    assert shuffled.premises == {"sampling": opacus.PREMISE}


def test_an_engine_and_its_accountant_are_their_history():
    accountant = SimpleNamespace(history=HISTORY)
    for kept in (accountant, SimpleNamespace(accountant=accountant)):
        assert opacus.guarantee(kept, 1e-5) == opacus.guarantee(HISTORY, 1e-5)


def test_batches_that_are_no_poisson_samples_are_said_first():
    found = opacus.guarantee(HISTORY, 1e-5, poisson=False)
    assert str(found).startswith("As if every batch were a Poisson sample (premise")
    every = opacus.guarantee([(5.0, 1.0, 10)], 1e-5, poisson=False)
    assert every.sampling == "none" and not every.premises


@tabled(
    "history, accountant, said",
    [
        ([], "rdp-balle", "history is empty"),
        ([], "pld", "history is empty.*train first"),
        (HISTORY, "prv", "accountant is 'prv'"),
        ([(1.1, 0.025)], "pld", "history is .*it must be a PrivacyEngine"),
        (object(), "pld", "history is .*it must be a PrivacyEngine"),
    ],
)
def test_what_cannot_be_accounted_is_refused(history, accountant, said):
    with pytest.raises(ValueError, match=said):
        opacus.guarantee(history, 1e-5, accountant)
