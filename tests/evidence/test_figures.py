"That every helper draws what it returns; the palette's claims are checked on its page."

import matplotlib
from made_up import made_up

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pytest

from dpcomm.evidence import figures, records
from dpcomm.mechanisms import contract


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def test_every_mechanism_has_a_look_of_its_own():
    assert sorted(figures.MECH) == sorted([*contract.registered(), "none"])
    colours, labels = zip(*((m.colour, m.label) for m in figures.MECH.values()))
    assert len({*colours}) == len({*labels}) == len(figures.MECH)


def test_two_seeds_have_no_band():
    y = np.random.default_rng(1).normal(size=(2, 3))
    for n in (1, 2):
        assert all((part == y[:n].mean(0)).all() for part in figures.interval(y[:n]))


def test_a_phone_gets_panels_and_legends_below_one_another():
    with figures.style((9.4, 3.7)):
        wide, axes = plt.subplots(1, 2, sharey=True)
        for ax, label in zip(axes, ("a rather long name of a line", "short")):
            ax.plot([1, 2], label=label)
        axes[0].set(ylabel="accuracy, %")
        axes[1].legend(loc="upper left", bbox_to_anchor=(1, 1))
        wide.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center")
    phone = figures.narrow(wide)
    assert (*wide.get_size_inches(), phone.get_figwidth()) == (9.4, 3.7, 4.2)
    phone.draw_without_rendering()
    first, second = phone.axes
    boxes = [first.bbox, second.bbox]
    boxes += [key.get_window_extent() for key in (second.get_legend(), *phone.legends)]
    assert all(low.y1 < high.y0 for high, low in zip(boxes, boxes[1:]))
    assert all(0 <= box.x0 and box.x1 <= phone.bbox.x1 for box in boxes)
    assert second.get_ylabel() and second.yaxis.get_tick_params()["labelleft"]
    first.yaxis.set_major_formatter(lambda value, place: f"{value:.0f} !")
    assert "phone" in figures.sharp(wide)[1] and "phone" not in figures.sharp(phone)[1]
    for ax in axes:  # as pictures have none
        ax.set_axis_off()
    assert "phone" not in figures.sharp(wide)[1]


def run(seed, rounds, accuracy, key="eps3.rec", **origin) -> records.Record:
    "A made-up record of a curve."
    history = dict(round=rounds, accuracy=accuracy)
    return made_up(key, seed, history=history, origin=origin)


def test_a_learning_curve_is_the_mean_over_seeds_of_the_rounds_all_have():
    found = [
        run(0, [10, 20, 30], [0.1, 0.2, 0.3]),
        run(1, [20, 10], [0.4, 0.3]),
        run(0, [10], [0.9], key="eps6.rec"),
    ]
    line = figures.learning_curve(found, "eps3.rec", "rec", "a name")
    wanted = figures.series("rec", [10, 20], [[0.1, 0.2], [0.3, 0.4]], "a name")
    for name, value in wanted.items():
        np.testing.assert_equal(line[name], value)
    assert line["n"] == 2 and line["label"] == "a name, ours (n = 2)"
    assert figures.learning_curve(found, "eps9.rec", "rec") is None
    one = figures.learning_curve(found, "eps6.rec", "rec", colour="#123456")
    assert (one["n"], one["colour"]) == (1, "#123456") and list(one["x"]) == [10]
    twice = [run(0, [10], [0.9], date="2026-02-01"), run(0, [10], [0.1])]
    for order in (twice, twice[::-1]):  # a seed counts once, the oldest
        assert [*figures.learning_curve(order, "eps3.rec", "rec")["mean"]] == [0.1]


TABLE = figures.Table(("a", "b"), (("x|<y>", "[go](p.ipynb)"), ("long cell", "")), "T")
KEYS = (
    "[x](javascript:alert(1))",
    "[x](JavaScript:alert`1`)",
    "[x](data:text/html,<script>)",
    "[x](//elsewhere.example)",
    "[x](vbscript:x)",
    "<script>alert(1)</script>",
)


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_no_live_link_and_no_markup(key):
    table = figures.Table(("run",), ((key,),), key, (key,), folded=key)
    page, text = table._repr_html_(), figures.cell_markdown(key)
    assert "href" not in page and "<script" not in page
    assert "](" not in text.replace("\\](", "")
    assert figures.link_text(key) == key


def test_links_within_the_site_and_to_the_web_stay():
    for address in ("p.ipynb", "../a/b.ipynb#c:d", "https://arxiv.org/abs/1", "#at"):
        link = f'<a href="{address}">a&lt;b</a>'
        assert figures.cell_html(f"[a<b]({address})") == link
        assert figures.cell_markdown(f"[a]({address})") == f"[a]({address})"
    assert figures.cell_html("[3]") == "[3]" == figures.link_text("[3]")


def test_a_bar_in_a_cell_is_no_column_and_json_has_the_words_of_a_link():
    assert "| x\\|<y> | [go](p.ipynb) |" in figures.as_markdown(TABLE)
    assert figures.as_dict(TABLE)["rows"] == [["x|<y>", "go"], ["long cell", ""]]
