"What is trained without clipping, and with noise of each client's own."

import pytest

from dpcomm.experiments import dprec_ablations as ablations
from dpcomm.report import papers
from dpcomm.training.federated import Config

CONFIG = Config(rounds=9, cohort=5)


def stated(name):
    return papers.hyper("dprec", name, "femnist").value


@pytest.mark.parametrize("sizes", [(100, 28), (64,), (640, 3)])
def test_nothing_is_clipped_in_table_3(sizes):
    found = {
        key: ablations.unclipped(key, CONFIG, sizes)
        for key in ("only.fedavg", "only.rec", "only.rec64")
    }
    for key, curve in found.items():
        assert (curve.key, curve.guarantee, curve.as_run) == (key, None, None)
        assert curve.mechanism.clip_norm == ablations.FAR and curve.config.rounds == 9
    assert found["only.fedavg"].config.sampling == "fixed"
    assert found["only.rec"].config.sampling == "replacement"
    assert found["only.rec"].mechanism.groups == sizes
    assert found["only.rec"].mechanism.std == stated("rec.std")
    many = found["only.rec64"].mechanism.groups
    assert sum(many) == sum(sizes) and {*many[:-1]} <= {64} and 0 < many[-1] <= 64


def test_a_clients_own_noise_is_accounted_alone_and_over_the_run():
    curve = ablations.local("local3.fedavg", CONFIG, 2.0, 1e-3)
    assert curve.mechanism.local and curve.mechanism.sigma == 2.0
    assert curve.mechanism.clip_norm == stated("fedavg.clip")
    once, (whole,) = curve.guarantee(9), curve.as_run(9).values()
    assert (once.scope, once.rounds, once.trust) == ("per-round", 1, "local")
    assert whole.rounds == 9 and whole.eps > once.eps and whole.relation == "zero-out"


@pytest.mark.parametrize("key", ablations.LINES)
def test_every_line_has_a_curve_of_its_name(key):
    s = ablations.settings("smoke")
    curve = ablations.curve(s, key, 100, (40, 40, 20))
    assert curve.key == key
    rounds = s["long"] if key.startswith("only") else s["short"]
    assert curve.config.rounds == rounds
    promised = key not in ("none",) and not key.startswith("only")
    assert (curve.guarantee is not None) == promised
    if key.startswith("bits"):
        assert curve.mechanism.index_bits == int(key[4:])
