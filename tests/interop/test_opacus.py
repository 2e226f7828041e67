"A history of Opacus becomes a Guarantee."

from types import SimpleNamespace

import pytest
from tables import tabled

from dpcomm.interop import opacus
from dpcomm.privacy import accounting

HISTORY = [(1.1, 0.01, 1000)]


def test_a_history_is_a_sampled_gaussian_and_its_parts_are_composed():
    found = opacus.guarantee(HISTORY, 1e-5)
    how = dict(sampling="poisson", accountant="pld")
    ours = accounting.gaussian_guarantee(1.1, 1e-5, 0.01, 1000, **how)
    assert found.eps == pytest.approx(ours.eps, rel=1e-6) and found.rounds == 1000
    named = found.unit, found.relation, found.sampling, found.trust
    assert named == ("example", "add-remove", "poisson", "central")
    assert "floating point" in found.note, "Opacus adds floats"
    halves = opacus.guarantee([(1.1, 0.01, 400), (1.1, 0.01, 600)], 1e-5)
    assert halves.eps == pytest.approx(found.eps, rel=1e-4) and halves.rounds == 1000
    mixed = [*HISTORY, (0.9, 0.01, 500), (8.0, 1.0, 1)]
    assert found.eps < opacus.guarantee(mixed, 1e-5).eps < 1.6 * found.eps


def test_an_engine_and_its_accountant_are_their_history():
    accountant = SimpleNamespace(history=HISTORY)
    for kept in (accountant, SimpleNamespace(accountant=accountant)):
        assert opacus.guarantee(kept, 1e-5) == opacus.guarantee(HISTORY, 1e-5)


def test_batches_that_are_no_poisson_samples_are_said_first():
    found = opacus.guarantee(HISTORY, 1e-5, poisson=False)
    assert str(found).startswith("As if every batch were a Poisson sample (premise")
    every = opacus.guarantee([(5.0, 1.0, 10)], 1e-5, poisson=False)
    assert every.sampling == "none" and not every.premises


@tabled("history", [[], [(1.1, 0.025)], (1.1, 0.01, 1000), [None], object()])
def test_what_cannot_be_accounted_is_refused(history):
    with pytest.raises(ValueError, match="history is .*it must be a PrivacyEngine"):
        opacus.guarantee(history, 1e-5)
    for wrong, says in (([(0, 0.1, 9)],), "multiplier is 0"), ((HISTORY, "no"), "'no'"):
        with pytest.raises(ValueError, match=says):
            opacus.guarantee(wrong[0], 1e-5, *wrong[1:])
