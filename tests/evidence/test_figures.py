"That every helper draws what it returns; the palette's claims are checked on its page."

import io

import matplotlib
from made_up import made_up

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pytest
from PIL import Image
from scipy.stats import t

from dpcomm.evidence import figures, records
from dpcomm.mechanisms import contract

MECHANISMS = (*contract.registered(), "none")


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def test_every_mechanism_has_a_look_of_its_own():
    assert sorted(figures.MECH) == sorted(MECHANISMS)
    for field in ("colour", "marker", "label"):
        assert len({getattr(m, field) for m in figures.MECH.values()}) == len(
            MECHANISMS
        ), field
    assert figures.MECH["none"].colour == "#000000"


def test_band_is_the_95_percent_interval():
    y = np.random.default_rng(1).normal(size=(6, 3))
    for n in (1, 2):  # too few for a band
        assert all(
            np.array_equal(part, y[:n].mean(0)) for part in figures.interval(y[:n])
        )
    s = figures.series("rec", [1, 2, 3], y)
    low, high = t.interval(0.95, 5, y.mean(0), y.std(0, ddof=1) / np.sqrt(6))
    assert np.allclose(s["low"], low, rtol=1e-12) and np.allclose(
        s["high"], high, rtol=1e-12
    )


def test_style_restores_and_is_white():
    before = dict(plt.rcParams)
    with figures.style():
        fig, _ = plt.subplots()
        assert (
            fig.get_facecolor() == (1, 1, 1, 1)
            and fig.dpi == 110
            and tuple(fig.get_size_inches()) == (6.2, 3.6)
        )
    assert dict(plt.rcParams) == before
    with pytest.raises(RuntimeError), figures.style():
        raise RuntimeError
    assert dict(plt.rcParams) == before


def test_a_notebook_stores_two_dots_a_pixel_and_says_the_size():
    figure = plt.figure(figsize=(3, 2), dpi=50)
    figure.text(0, 0, "x")
    figure.text(1, 1, "y")
    data, size = figures.sharp(figure)
    image = Image.open(io.BytesIO(data))
    assert image.mode == "P" and image.size[0] > 2 * 3 * 50 - 2
    assert [2 * size["width"], 2 * size["height"]] == pytest.approx(image.size, abs=1)
    plt.close(figure)


def test_paper_is_hollow_and_dashed_ours_filled_with_a_band():
    ours = figures.series("rec", [1, 2, 3], np.arange(12.0).reshape(4, 3))
    paper = figures.series(
        "rec", [1, 2, 3], [1.0, 2.0, 3.0], source="paper", err=0.5, n=10
    )
    fig, rows = figures.curve([ours, paper], "round", "test accuracy, %")
    ax = fig.axes[0]
    a, b = ax.lines[:2]
    assert (a.get_linestyle(), b.get_linestyle()) == ("-", "--")
    assert a.get_markerfacecolor() != "none" and b.get_markerfacecolor() == "none"
    assert len(ax.collections) == 2, "one band of ours and the error bars of the paper"
    assert [x.get_text() for x in ax.get_legend().get_texts()] == [
        "DP-REC, ours (n = 4)",
        "DP-REC, paper (n = 10)",
    ]
    assert [r["y"] for r in rows] == [*ours["mean"], 1.0, 2.0, 3.0] and rows[-1][
        "high"
    ] == 3.5


def test_names_at_the_ends_keep_their_order_and_their_distance():
    lines = [
        figures.series("rec", [1, 10], [1.0, y], name, "formula")
        for name, y in {"low": 1.0, "top": 9.0, "a": 5.0, "b": 5.001}.items()
    ]
    fig, rows = figures.curve(lines, "x", "y", log="xy", ends=True)
    ax = fig.axes[0]
    assert ax.get_legend() is None and len(rows) == 8
    at = {t.get_text(): t.get_position()[1] for t in ax.texts}
    assert at["low"] < at["a"] < at["b"] < at["top"]
    assert at["b"] - at["a"] == pytest.approx(0.07)
    ends = ax.transAxes.inverted().transform(ax.transData.transform([(10, 1), (10, 9)]))
    assert [at["low"], at["top"]] == pytest.approx(list(ends[:, 1]))
    middle = figures.end_names(ax, lines[2:])
    assert middle.mean() == pytest.approx((at["a"] + at["b"]) / 2)


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
    line = figures.learning_curve(found, "eps3.rec", "rec", "a name", scale=100.0)
    wanted = figures.series("rec", [10, 20], [[10.0, 20.0], [30.0, 40.0]], "a name")
    for name, value in wanted.items():
        np.testing.assert_equal(line[name], value)
    assert line["mean"].tolist() == pytest.approx([20.0, 30.0])
    assert line["n"] == 2 and line["label"] == "a name, ours (n = 2)"
    assert figures.learning_curve(found, "eps9.rec", "rec") is None
    one = figures.learning_curve(found, "eps6.rec", "rec", colour="#123456")
    assert (one["n"], one["colour"]) == (1, "#123456") and list(one["x"]) == [10]


def test_a_learning_curve_counts_a_seed_once_the_oldest():
    found = [
        run(0, [10], [0.1], date="2026-01-01", machine="here"),
        run(0, [10], [0.9], date="2026-02-01", machine="there"),
    ]
    for order in (found, found[::-1]):
        line = figures.learning_curve(order, "eps3.rec", "rec")
        assert list(line["mean"]) == [0.1]


def test_a_dollar_of_a_name_is_drawn_and_starts_no_formula():
    line = figures.series("rec", [1, 2], [3.0, 4.0], "key $\\frac{$ and $5", "formula")
    for ends in (False, True):
        figure, rows = figures.curve([line], "x, $", "y, $\\{$", "$\\bad{$", ends=ends)
        figure.canvas.draw()
        assert rows[0]["label"] == "key $\\frac{$ and $5"
    figures.bars([line], "x", "y", "$\\frac{$")[0].canvas.draw()


# ---- tables

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
    page, text = (
        table._repr_html_(),
        figures.as_markdown(figures.Table(("run",), ((key,),))),
    )
    assert "href" not in page and "<script" not in page
    assert "](" not in text.replace("\\](", "")
    assert figures.link_text(key) == key


def test_links_within_the_site_and_to_the_web_stay():
    for address in ("p.ipynb", "../a/b.ipynb#c:d", "https://arxiv.org/abs/1", "#at"):
        assert (
            figures.cell_html(f"[a<b]({address})") == f'<a href="{address}">a&lt;b</a>'
        )
        assert figures.cell_markdown(f"[a]({address})") == f"[a]({address})"
    assert figures.cell_html("[3]") == "[3]" == figures.link_text("[3]")


def test_a_table_as_text_markdown_and_html():
    lines = ["T", "a          b", "---------  --", "x|<y>      go", "long cell"]
    assert str(TABLE).splitlines() == lines and repr(TABLE) == str(TABLE)
    noted = figures.Table(TABLE.header, TABLE.rows, notes=("why", "a < b"))
    assert str(noted).splitlines()[-2:] == ["[1] why", "[2] a < b"]
    assert figures.as_markdown(noted).splitlines() == [
        *("| a | b |", "|---|---|", "| x\\|<y> | [go](p.ipynb) |", "| long cell |  |"),
        *("", "1. why", "2. a < b"),
    ]
    page = noted._repr_html_()
    assert '<td>x|&lt;y&gt;</td><td><a href="p.ipynb">go</a></td>' in page
    assert page.endswith("<ol><li>why</li><li>a &lt; b</li></ol>")
    assert figures.as_dict(TABLE)["rows"] == [["x|<y>", "go"], ["long cell", ""]]


def test_the_rows_of_a_figure_are_a_link_to_csv():
    rows = figures.curve([figures.series("rec", [1, 2], [3.0, 1 / 3])], "x", "y")[1]
    made = figures.as_csv(rows)
    assert str(made) == "figure.csv: 2 rows" and made._repr_markdown_() is None
    assert 'download="figure.csv"' in made.html and "0.333333" in made.html
    assert figures.csv_text(("a", "b"), [("1,2", 3)]) == 'a,b\n"1,2",3\n'
