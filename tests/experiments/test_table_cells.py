"""What a count of one row fills: against closed forms of Section 2.5 and a second count
of the cohorts.
"""

import math

import pytest

from dpcomm.evidence import paper_tables
from dpcomm.experiments.dprec import costs as dprec_costs
from dpcomm.experiments.dprec import protocol_costs, table_cells
from dpcomm.experiments.run import grids


def test_as_much_goes_up_as_down_without_a_replay():
    counted = table_cells.count("femnist.only.fedavg", 0)
    assert counted.uplink_bits == counted.downlink_bits > 0


@pytest.mark.deep
def test_shares_are_percents_and_half_where_as_much_goes_up_as_down():
    shares = table_cells.formulas("shares")
    assert all(0 < value < 100 for value, unit in shares.values())
    assert shares["ours.femnist.only.fedavg.uplink_share"][0] == pytest.approx(50)


def test_every_reading_and_every_paid_epsilon_has_its_cell():
    for key in ("readings", "paid"):
        found = table_cells.formulas(key)
        assert sorted(found) == sorted(table_cells.CELLS[key])
        assert all(math.isfinite(value) for value, unit in found.values())


def test_whole_bytes_scale_the_count_by_what_an_index_is_filled_up_to():
    "StackOverflow's six indices are 42 bits, and a seed; the bytes hold six bits more."
    cells = table_cells.drawn_cells("solr.eps1.rec", 0)
    bits = protocol_costs.protocols()["solr.rec"]["bits"].content
    whole, comm = (
        cells[key][0] for key in ("ours.solr.rec.whole_bytes.comm", "solr.rec.comm")
    )
    assert whole / comm == pytest.approx(8 * math.ceil(bits / 8) / bits)


def test_participation_is_what_cohorts_with_replacement_see():
    "Its mean is 1 - (1 - 1 / n)^slots; its standard deviation is under 0.1 percent of n."
    n, slots = 342_477, 1500 * 60
    (seen, unit) = table_cells.drawn_cells("solr.eps1.rec", 0)["solr.participation"]
    assert unit == "percent"
    assert seen == pytest.approx(100 * (1 - (1 - 1 / n) ** slots), abs=0.5)


def test_epsilons_fill_the_papers_cell_only_where_they_are_finite():
    keys = table_cells.epsilon_cells("mnist.eps3.fedavg")
    assert keys[0] == "mnist.eps3.fedavg.eps" and len(keys) == 3
    assert "solr.eps1.rec.eps" not in table_cells.epsilon_cells("solr.eps1.rec")
    paper = math.isfinite(protocol_costs.epsilons("solr.eps1.rec")[0].eps)
    assert not paper


def test_a_counted_row_has_bits_traffic_and_a_finite_guarantee():
    run = next(r for r in dprec_costs.grid("full") if r.key == "mnist.eps3.rec")
    found = dprec_costs.counted(run, 0)
    up = found["final"]["uplink_bits"]
    config = found["config"]
    assert up == config["rounds"] * config["cohort"] * found["bits"].content
    assert math.isfinite(found["guarantee"].eps)
    assert set(found["cells"]) <= set(run.fills)


def test_the_grid_fills_every_row_of_its_tables_once():
    fills = [
        cell for run in grids.find("dprec-costs").grid("full") for cell in run.fills
    ]
    assert len(fills) == len(set(fills))
    printed = {c.key for c in paper_tables.cells("dprec") if c.table == "c2"}
    assert printed - set(fills) == {"solr.eps1.rec.eps"}
