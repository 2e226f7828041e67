"Frontiers: points from records, the picture, two orders, and a figure that needs nobody else."

from dataclasses import replace

import numpy as np
import pytest
from checkout import cells
from made_up import made_up

from dpcomm import registered
from dpcomm.evidence import frontiers, records
from dpcomm.evidence.frontiers import Point
from dpcomm.evidence.verdicts import cell_summary

KINDS = ("gaussian", "gaussian.local", "topk", "topk.few", "imvu", "mvu", "pm")


def point(kind, mean, predicted, **other):
    given = dict(task="toy", eps=8.0, trust="local", bits=1.0, built=f"{kind}()")
    given |= dict(informed=predicted)
    accuracy = cell_summary([mean - 1, mean, mean + 1], "percent")
    given |= dict(accuracy=accuracy, predicted=predicted)
    return Point(kind=kind, **given | other)


@pytest.fixture
def found():
    made = [point(kind, 90 - 10 * i, float(i + 1)) for i, kind in enumerate(KINDS)]
    central = {"gaussian": "central", "topk": "secagg", "topk.few": "secagg"}
    made = [replace(p, trust=central.get(p.kind, "local")) for p in made]
    return (*made, point("none", 95, None, eps=None, trust="central", bits=32.0))


def test_orders_agree_disagree_and_are_ranks_alone(found):
    same = frontiers.agreement(found)
    assert isinstance(same, frontiers.Agreement) and str(same).endswith("n = 7)")
    assert same.rho == pytest.approx(1) and same.n == len(KINDS)
    other = [replace(p, predicted=p.predicted and 1 / p.predicted) for p in found]
    assert frontiers.agreement(other).rho == pytest.approx(-1)
    curved = [replace(p, predicted=p.predicted and p.predicted**9) for p in found]
    assert frontiers.agreement(curved) == same
    assert frontiers.agreement(other, "informed") == same


def test_the_interval_is_bonett_and_wrights(found):
    swapped = [
        replace(p, predicted={3.0: 4.0, 4.0: 3.0}.get(p.predicted, p.predicted))
        for p in found
    ]
    a, n = frontiers.agreement(swapped), len(KINDS)
    assert a.rho == pytest.approx(1 - 6 * 2 / (n * (n**2 - 1)))
    half = 1.96 * np.sqrt((1 + a.rho**2 / 2) / (n - 3))
    assert np.arctanh(a.low) == pytest.approx(np.arctanh(a.rho) - half)
    assert np.arctanh(a.high) == pytest.approx(np.arctanh(a.rho) + half)


def test_two_tasks_or_two_epsilons_are_no_one_order(found):
    for other in (dict(task="two"), dict(eps=2.0)):
        with pytest.raises(ValueError, match="number of tasks and epsilons"):
            frontiers.agreement((*found, replace(found[0], **other)))
    with pytest.raises(ValueError, match="at least four are needed"):
        frontiers.agreement(found[:3])


def test_points_are_means_over_seeds_of_what_was_trained(monkeypatch):
    def record(key, seed, accuracy, **config):
        config = dict(kind="pm", d=10, mechanism="Pm()") | config
        return made_up(key, seed, config=config, final=dict(accuracy=accuracy))

    private = dict(trust="local", predicted=2.0, up={"values": 5, "total": 15})
    made = [record("toy.eps8.pm", s, 50.0 + s, **private) for s in range(3)]
    made += [record("tune.toy.pm", 0, 99.0), record("toy.none", 0, 90.0, kind="none")]
    made += [replace(record("updates.toy", 0, 0.0), final={"eps8.pm": 3.0})]
    private, none = frontiers.points(made)
    assert (private.eps, private.bits, private.predicted) == (8.0, 1.5, 2.0)
    assert (private.accuracy.mean, private.accuracy.n) == (51.0, 3)
    assert private.informed == 3.0 and none.informed is None
    assert none.eps is None and none.bits == 32 and none.accuracy.n == 1


def test_the_picture_has_every_point_and_says_whom_it_trusts(found):
    (axis,) = frontiers.picture(found, "toy", "a title").axes
    lines = [line for line in axis.lines if line.get_marker() not in ("", "None", None)]
    assert len([line for line in lines if len(line.get_xdata()) == 1]) == len(KINDS)
    names = axis.get_legend_handles_labels()[1]
    assert "Gaussian (server trusted)" in names
    assert "Gaussian, noise of each client (nobody trusted)" in names
    with pytest.raises(ValueError, match="task"):
        frontiers.picture(found, "tov")


USED = """<script>
const lists = document.querySelectorAll("select"), change = new Event("change");
lists[1].value = "local"; lists[1].dispatchEvent(change);
const marks = document.querySelectorAll("g[role=img]");
const count = marks.length;
marks[count - 1].focus();
const said = document.querySelector("[aria-live]").textContent;
lists[3].value = "2"; lists[1].value = "secagg"; lists[1].dispatchEvent(change);
const few = document.querySelectorAll("g[role=img]").length;
document.title = JSON.stringify([count, said, few]);
</script>"""


def test_the_numbers_of_home_are_those_of_the_records():
    found = frontiers.points(records.load("across", "frontier", "full"))
    (caption,) = [
        d for c in cells("nbs/index.ipynb") for d in c.directives if "fig-cap" in d
    ]
    mine = [p for p in found if (p.task, p.eps) == ("mnist", 8.0)]
    (plain,) = [p.accuracy for p in found if p.task == "mnist" and p.eps is None]

    def lost(fits):
        return f"{plain.mean - max(p.accuracy.mean for p in mine if fits(p)):.1f}"

    sums = lost(lambda p: p.trust == "secagg")
    local = lost(lambda p: p.trust == "local")
    one = lost(lambda p: p.trust == "local" and 0.9 < p.bits < 1.1)
    assert f"loses {sums} points of the {plain.mean:.1f} %" in caption
    assert f"it loses {local}, and {one} with one bit" in caption
    assert {p.accuracy.n for p in mine} == {3} and "three seeds" in caption
    assert len({p.mech for p in mine}) == len(registered()) and "fifteen" in caption
