"""`dpcomm bench clients`: who takes part, what a process tells while it runs a round, and
what a table makes of it.
"""

import json

import numpy as np
import pytest

from dpcomm.bench import crowd
from dpcomm.bench import suite as bench
from dpcomm.bench.peers import NotRun


def test_windows_are_images_in_a_circle():
    parts = crowd.Windows(7, 3, 5)
    assert [p.tolist() for p in parts] == [
        [i % 5, (i + 1) % 5, (i + 2) % 5] for i in range(7)
    ]
    with pytest.raises(IndexError):
        parts[7]
    work = crowd.crowd(50, crowd.MESSAGES["rec"], batch=4)
    assert work.n_clients == 50 and (work.federation.sizes == 4).all()
    assert work.cohort(0).tolist() == [*range(50)]
    assert np.array_equal(work.federation.visit([3])[1][0], [3, 4, 5, 6])


def test_a_round_tells_how_far_it_is_and_what_it_cost(monkeypatch, capsys):
    monkeypatch.setattr(crowd, "WARM", 10)
    crowd.tell("signsgd", 40, threads=2)
    *percents, end = map(json.loads, capsys.readouterr().out.splitlines())
    assert [p["percent"] for p in percents] == [25, 50, 75, 100]
    assert end["cpu"] > 0 < end["wall"] and (end["memory"] is None or end["memory"] > 0)


def test_rows_and_their_table(monkeypatch):
    "A message that fails is a row too; the million is the largest round's time, scaled."
    asked = []

    def costs(name, n, threads, say):
        asked.append((name, n, threads))
        if name == "rec":
            raise NotRun("no memory")
        return dict(cpu=n * 6e-3, wall=n * 3e-3, memory=700.4)

    monkeypatch.setattr(crowd, "round_costs", costs)
    said = []
    rows = crowd.crowd_rows(threads=2, whole=True, say=said.append)
    assert asked == [(name, n, 2) for name in crowd.MESSAGES for n in crowd.A_TENTH]
    assert said[0] == "clients, rec, 0 % of 25,000" and len(said) == 4
    table = bench.table(rows)
    assert table.rows[0][2] == "not run" and table.rows[0][0] == "rec"
    assert "NOT RUN: no memory" in table.notes
    assert table.rows[3] == (
        "signsgd",
        "100,000",
        "600.0",
        "300.0",
        "6,000",
        "100",
        "700",
    )
    monkeypatch.setattr(crowd, "SIZES", (5,))
    assert [r["size"] for r in crowd.crowd_rows()] == [5, 5]


@pytest.mark.deep
def test_a_round_in_a_process_of_its_own():
    said = []
    told = crowd.round_costs("rec", 30, say=said.append)
    assert told["cpu"] > 0 and said[-1] == "clients, rec, 100 % of 30"
    with pytest.raises(NotRun, match="KeyError: 'nobody'"):
        crowd.round_costs("nobody", 30)
