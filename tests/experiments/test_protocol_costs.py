"""protocol_costs: the bits of a run by arithmetic, its epsilons against the paper's."""

import math

import pytest
from tables import tabled

from dpcomm.evidence import paper_tables
from dpcomm.experiments.configurations import paper_setting
from dpcomm.experiments.dprec import protocol_costs as protocol


def test_rounds_and_groups_are_the_papers():
    rounds = {t: protocol.rounds_of(t, "rec") for t in protocol.TASKS}
    assert rounds == dict(mnist=1000, femnist=4000, shakespeare=200, solr=1500)
    assert protocol.rounds_of("femnist", "fedavg") == 1500
    assert [protocol.n_groups(t) for t in ("femnist", "shakespeare", "solr")] == [
        8,
        11,
        6,
    ]


def test_a_message_has_seven_bits_a_group_or_32_a_parameter():
    rec, dense = (protocol.protocol("femnist", m) for m in ("rec", "fedavg"))
    d = paper_setting("n_params", "femnist")
    assert rec["bits"].content == 8 * 7 + 32 and dense["bits"].content == 32 * d
    assert rec["replay"] and not dense["replay"]
    assert protocol.protocol("femnist", "ddg12")["bits"].content == 12 * d
    assert protocol.protocol("femnist", "rec", 10, 100)["bits"].content == 732
    servers = {t: protocol.protocol(t, "rec")["model_bits"] for t in protocol.TASKS}
    vectors = {
        t: bits / 32 / paper_setting("n_params", t) for t, bits in servers.items()
    }
    assert vectors == dict(mnist=3, femnist=1, shakespeare=1, solr=2)


@tabled("key", ["mnist.fedavg", "shakespeare.fedavg", "femnist.ddg16"])
def test_dense_methods_send_the_model_down_to_every_visitor(key):
    run = protocol.protocols()[key]
    visits = run["rounds"] * run["cohort"]
    bits = visits * (run["bits"].content + run["model_bits"])
    assert protocol.gib(key, 0) == pytest.approx(bits / 2**33, rel=1e-12)
    assert protocol.count(key, 0).uplink_bits == visits * run["bits"].content


def test_rec_sends_down_no_more_than_its_history_or_the_model():
    run, ledger = protocol.protocols()["mnist.rec"], protocol.count("mnist.rec", 0)
    visits = run["rounds"] * run["cohort"]
    assert ledger.uplink_bits == visits * run["bits"].content
    assert 0 < ledger.downlink_bits < visits * run["model_bits"]
    assert ledger.downlink_bits < visits * visits * run["bits"].content


@pytest.mark.parametrize(
    "row, eps", [("mnist.eps3.rec", 3), ("femnist.eps6.fedavg", 6)]
)
def test_the_papers_accountant_returns_the_papers_epsilon(row, eps):
    first, *tighter = protocol.epsilons(row)
    assert first.eps == pytest.approx(eps, rel=0.02)
    assert all(g.eps < first.eps and g.delta == first.delta for g in tighter)
    relations = set() if "rec" in row else {"add-remove", "replace"}
    assert set(protocol.as_run(row)) == relations


def test_no_epsilon_depends_on_the_size_of_clip_or_prior():
    m = protocol.mechanism_of("mnist.eps3.rec")
    assert m.clip_norm / m.std == paper_setting("rec.c.eps3", "mnist")
    m = protocol.mechanism_of("mnist.eps6.fedavg")
    assert (m.clip_norm, m.sigma) == (1.0, paper_setting("fedavg.sigma.eps6", "mnist"))


def test_only_other_readings_give_stackoverflow_an_epsilon():
    assert math.isinf(protocol.epsilons("solr.eps1.rec")[0].eps)
    found = protocol.readings()
    assert all(0.5 < eps < 1.2 for eps in found.values())
    assert found["dropped"] == min(found.values())


def test_epsilon_is_left_only_where_training_stops_early():
    found = protocol.paid()
    assert set(found) == {"mnist.eps6", "mnist.eps3", "femnist.eps6", "femnist.eps3"}
    for row, left in found.items():
        task, eps = row.split(".eps")
        at, whole = (
            paper_tables.cell("dprec", f"{task}.ratio{x}").value
            for x in ("_at_accuracy", "")
        )
        assert at < whole and 0 < left < int(eps)
