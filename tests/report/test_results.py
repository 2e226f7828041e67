"The schema, atomic writing, and the rules of the verdict."

import copy
import json
import math
import os
import platform
import re
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import t

from dpcomm.report import papers, results

ACC = papers.cell("dprec", "mnist.eps3.rec.acc")  # 69.5, tol 3.0, higher is better
SIZE = papers.cell("dprec", "mnist.fedavg.comm")  # 43, tol 0.5, lower is better
STD = papers.cell("dprec", "mnist.client_size.std")  # 73.10, tol 10.4, neither


def result(scale="full", planned=3, **cells):
    "A made-up result: cells are given with '__' for the dot."
    n = max([len(v) for v in cells.values()], default=1)

    def unit(k):
        return "GiB" if k.endswith("comm") else "percent"

    seed = dict(
        seed=0,
        final=dict(accuracy=0.5),
        history=[dict(round=1, accuracy=0.5)],
        wall_seconds=1.0,
    )
    run = dict(
        key="mnist.eps3.rec",
        config={},
        guarantee=dict(eps=3.0),
        bits=dict(total=88),
        seeds=[seed],
    )
    return dict(
        schema=1,
        paper="dprec",
        experiment="made_up",
        scale=scale,
        params=dict(seeds=list(range(planned))),
        seeds=list(range(n)),
        runs=[run],
        cells={
            k.replace("__", "."): dict(values=list(v), unit=unit(k))
            for k, v in cells.items()
        },
        data={},
        commit="a" * 40,
        dirty=False,
        versions=dict(python="3.11"),
        device="cpu",
        wall_seconds=1.5,
        notebook_hash=None,
    )


def put(root, r, name="made_up"):
    return results.write_result(root / "dprec" / f"{name}.{r['scale']}.json", r)


def row(root, key, table="table1", **more):
    return next(
        dict(zip(("key", "paper", "ours", "delta", "verdict", "link"), r))
        for r in results.verdict_table("dprec", table, root=root, **more).rows
        if r[0] == key
    )


# ---- schema


def test_a_good_result_survives_the_round_trip(tmp_path):
    r = result(mnist__eps3__rec__acc=[1.0, 2.0], ours__extra=[3.0])
    assert results.load_result(put(tmp_path, r)) == r


@pytest.mark.parametrize("field", results.SCHEMA)
def test_every_field_is_needed(field):
    r = result()
    del r[field]
    with pytest.raises(ValueError, match=f"result.{field} is missing"):
        results.check_result(r)


@pytest.mark.parametrize(
    "path, value, message",
    [
        (("schema",), 2, "schema=2"),
        (("schema",), True, "schema=True, allowed int"),
        (("scale",), "ful", "did you mean 'full'"),
        (("paper",), "dprek", "did you mean 'dprec'"),
        (("device",), None, "device=None, allowed str"),
        (("dirty",), "no", "allowed bool or null"),
        (("surplus",), 1, "result: field='surplus'"),
        (("wall_seconds",), math.nan, "wall_seconds=nan"),
        (("wall_seconds",), math.inf, "wall_seconds=inf"),
        (("runs", 0, "bits"), "88", "runs[0].bits='88', allowed dict or null"),
        (("runs", 0, "seeds", 0, "final", "accuracy"), math.nan, "final.accuracy=nan"),
        (
            ("runs", 0, "seeds", 0, "history", 0, "accuracy"),
            -math.inf,
            "history[0].accuracy=-inf",
        ),
        (("runs", 0, "seeds", 0, "seed"), "0", "seeds[0].seed='0', allowed int"),
        (("runs", 0, "config", "clip"), np.float32(1), "float32, allowed plain JSON"),
        (("data", 7), 1, "has the key 7"),
        (("cells", "mnist.eps3.rec.acc"), [1.0], "cells.mnist.eps3.rec.acc is list"),
        (
            ("cells", "mnist.eps3.rek.acc"),
            dict(values=[1.0], unit="percent"),
            "did you mean",
        ),
        (
            ("cells", "ours.x"),
            dict(values=[], unit="percent"),
            "one finite number per seed",
        ),
        (("cells", "ours.x"), dict(values=["1"], unit="percent"), "one finite number"),
        (
            ("cells", "ours.x"),
            dict(values=[1.0, 2.0, 3.0], unit="percent"),
            "one finite number per seed",
        ),
        (("cells", "ours.x"), dict(values=[1.0]), "unit is missing"),
    ],
)
def test_bad_results_are_refused_and_leave_nothing(tmp_path, path, value, message):
    r = at = copy.deepcopy(result())
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    with pytest.raises(ValueError, match=re.escape(message)):
        put(tmp_path, r)
    assert not list(tmp_path.rglob("*.*"))


def test_a_cut_or_edited_file_is_named(tmp_path):
    path = put(tmp_path, result())
    text = path.read_text()
    for bad in (
        text[:-20],
        text.replace('"cpu"', "NaN"),
        text.replace('"full"', '"fool"'),
    ):
        path.write_text(bad)
        with pytest.raises(ValueError, match="made_up.full.json"):
            results.load_results("dprec", root=tmp_path)


def test_load_results_by_scale(tmp_path):
    for scale in results.SCALES:
        put(tmp_path, result(scale))
    assert len(results.load_results("dprec", root=tmp_path)) == 3
    assert [r["scale"] for r in results.load_results("dprec", "quick", tmp_path)] == [
        "quick"
    ]
    with pytest.raises(ValueError, match="did you mean 'quick'"):
        results.load_results("dprec", "quik", tmp_path)
    with pytest.raises(ValueError, match="did you mean 'dprec'"):
        results.load_results("dprek", root=tmp_path)


# ---- atomic writing


@pytest.mark.parametrize("broken", ["fsync", "replace", "fdopen"])
def test_an_interrupted_write_keeps_the_old_file_whole(tmp_path, monkeypatch, broken):
    path = put(tmp_path, result(mnist__eps3__rec__acc=[1.0]))
    before = path.read_bytes()

    def stop(*a, **k):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, broken, stop)
    with pytest.raises(KeyboardInterrupt):
        put(tmp_path, result(mnist__eps3__rec__acc=[2.0]))
    monkeypatch.undo()
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == [
        path.name
    ]


def test_the_name_never_points_at_half_a_file(tmp_path, monkeypatch):
    path, seen = put(tmp_path, result(mnist__eps3__rec__acc=[1.0])), []
    real = os.replace

    def spy(a, b):
        seen.append(
            (
                json.loads(open(a).read())["cells"],
                os.path.dirname(a) == os.path.dirname(b),
                path.read_bytes(),
            )
        )
        return real(a, b)

    monkeypatch.setattr(os, "replace", spy)
    old = path.read_bytes()
    put(tmp_path, result(mnist__eps3__rec__acc=[2.0]))
    assert seen == [
        ({"mnist.eps3.rec.acc": {"values": [2.0], "unit": "percent"}}, True, old)
    ]


# ---- summary and verdict


def test_summary_against_scipy():
    v = [70.1, 68.0, 71.5, 70.0]
    s = results.cell_summary(v, "percent")
    assert (s.low, s.high) == pytest.approx(
        t.interval(0.95, 3, np.mean(v), np.std(v, ddof=1) / 2)
    )
    assert (s.mean, s.se, s.n) == pytest.approx((np.mean(v), np.std(v, ddof=1) / 2, 4))


def test_one_seed_has_no_spread():
    assert results.cell_summary([5.0]) == results.Summary(5.0, None, None, None, 1)
    for bad in ([], [math.nan], [1.0, math.inf]):
        with pytest.raises(ValueError, match="finite"):
            results.cell_summary(bad)


@pytest.mark.parametrize(
    "cell, value, word",
    [
        (ACC, 69.5, "match"),
        (ACC, 72.5, "match"),
        (ACC, 66.5, "match"),
        (ACC, 72.5001, "near"),
        (ACC, 75.5, "near"),
        (ACC, 63.5, "near"),
        (ACC, 75.5001, "above"),
        (ACC, 63.4999, "below"),
        (ACC, 100.0, "above"),
        (ACC, 0.0, "below"),
        (SIZE, 43.5, "match"),
        (SIZE, 42.5, "match"),
        (SIZE, 43.5001, "near"),
        (SIZE, 44.0, "near"),
        (SIZE, 42.0, "near"),
        (SIZE, 44.0001, "below"),
        (SIZE, 41.9999, "above"),
        (STD, 94.0, "above"),
        (STD, 52.0, "below"),
        (STD, 83.5, "match"),
    ],
)
def test_verdict_boundaries(cell, value, word):
    assert results.verdict(cell, [value]) == word
    assert results.verdict(cell, [value - 1, value + 1]) == word, "the mean decides"


def test_boundaries_survive_binary_fractions():
    cell = replace(ACC, value=82.1, tol=1.6)
    assert 82.1 + 1.6 != 83.7 or 82.1 - 1.6 != 80.5
    assert [results.verdict(cell, [v]) for v in (83.7, 80.5, 85.3, 78.9)] == [
        "match",
        "match",
        "near",
        "near",
    ]


def test_orderings_and_bounds():
    order = papers.cell("dprec", "mnist.eps3.order")
    high = papers.cell("dprec", "mean.chen_public_randomness.mse")
    low = papers.cell("dprec", "femnist.eps1.reduction")
    assert [results.verdict(order, [v]) for v in (0.1, 0.0, -0.1)] == [
        "order holds",
        "order fails",
        "order fails",
    ]
    assert [results.verdict(high, [v]) for v in (10.1, 10.0, 9.0)] == [
        "order holds",
        "order fails",
        "order fails",
    ]
    assert [results.verdict(low, [v]) for v in (6.4, 6.5, 7.0)] == [
        "order holds",
        "order fails",
        "order fails",
    ]


def test_units_and_absence():
    assert results.verdict(ACC, None) == "not run"
    assert (
        results.verdict(SIZE, results.cell_summary([43.0], "bytes")) == "not comparable"
    )
    assert results.verdict(SIZE, results.cell_summary([43.0], "GiB")) == "match"


# ---- the table


def test_nothing_committed_is_not_run_with_a_reason(tmp_path):
    rows = results.verdict_table("dprec", root=tmp_path).rows
    assert len(rows) == len(papers.cells("dprec")) and all(r[2] for r in rows)
    shown = {c.key for c in papers.cells("dprec") if c.kind == "shown"}
    assert all(
        r[4].startswith("≠ not comparable [") if r[0] in shown else r[4] == "○ not run"
        for r in rows
    )
    assert (
        row(tmp_path, "mnist.eps3.rec.acc")["ours"] == "no full-scale result committed"
    )
    assert "FEMNIST" in row(tmp_path, "femnist.eps3.rec.acc")["ours"]
    assert "does not say" in row(tmp_path, "mnist.ratio_at_accuracy", "text")["ours"]


def test_the_longest_reason_that_fits_is_given():
    p = replace(
        papers.paper("dprec"),
        not_run=(("mnist.", "short"), ("mnist.eps3.", "long"), ("femnist.", "other")),
    )
    assert (
        results.reason_not_run(ACC, p, ()) == "long"
        and results.reason_not_run(SIZE, p, ()) == "short"
    )


@pytest.mark.parametrize("scale", ["smoke", "quick"])
def test_small_scales_earn_no_verdict(tmp_path, scale):
    put(tmp_path, result(scale, mnist__eps3__rec__acc=[69.5]))
    found = row(tmp_path, "mnist.eps3.rec.acc")
    assert (
        found["verdict"] == "○ not run"
        and f"scale {scale} only" in found["ours"]
        and not found["delta"]
    )


def test_full_scale_earns_one(tmp_path):
    put(tmp_path, result(mnist__eps3__rec__acc=[70.0, 71.0, 72.0]))
    found = row(tmp_path, "mnist.eps3.rec.acc")
    assert found == dict(
        key="mnist.eps3.rec.acc",
        paper="69.5 +/- 1.5 percent",
        ours="71.00 +/- 0.58 (n = 3)",
        delta="+1.50",
        verdict="● match",
        link="[made_up](../experiments/made_up.ipynb)",
    )
    assert row(tmp_path, "mnist.eps6.rec.acc")["verdict"] == "○ not run"


def test_missing_seeds_are_shown(tmp_path):
    put(tmp_path, result(planned=4, mnist__eps3__rec__acc=[70.0, 71.0]))
    assert "(n = 2 of 4 planned)" in row(tmp_path, "mnist.eps3.rec.acc")["ours"]


def test_a_gap_is_not_rounded_away(tmp_path):
    put(
        tmp_path,
        result(
            mnist__eps3__fedavg__acc=[90.44],
            mnist__rec__comm=[0.0102],
            mnist__fedavg__comm=[43.36],
        ),
    )
    assert row(tmp_path, "mnist.eps3.fedavg.acc")["verdict"] == "▲ above [1]"
    assert row(tmp_path, "mnist.eps3.fedavg.acc")["delta"] == "+8.34"
    assert row(tmp_path, "mnist.rec.comm")["ours"].startswith("0.0102 ")
    put(tmp_path, result(mnist__rec__comm=[0.01020, 0.01024]))
    assert (
        row(tmp_path, "mnist.rec.comm")["ours"]
        == "0.0102 +/- 2e-05 (n = 2 of 3 planned)"
    )


def test_orderings_and_ratios_are_derived(tmp_path):
    put(
        tmp_path,
        result(
            mnist__eps3__rec__acc=[70.0, 72.0],
            mnist__eps3__fedavg__acc=[60.0, 62.0],
            mnist__eps6__rec__acc=[80.0, 82.0],
            mnist__fedavg__comm=[43.0],
            mnist__rec__comm=[0.01],
        ),
    )
    assert row(tmp_path, "mnist.eps3.order")["verdict"] == "✗ order fails"
    assert row(tmp_path, "mnist.rec.order")["verdict"] == "✓ order holds"
    assert row(tmp_path, "mnist.rec.order")["ours"].startswith("10.00 +/- 1.41")
    assert row(tmp_path, "mnist.eps6.order")["verdict"] == "○ not run"
    assert row(tmp_path, "mnist.ratio", "text")["verdict"] == "● match"


def test_other_units_are_not_comparable(tmp_path):
    r = result(mnist__rec__comm=[0.01])
    r["cells"]["mnist.rec.comm"]["unit"] = "bytes"
    put(tmp_path, r)
    assert row(tmp_path, "mnist.rec.comm")["verdict"] == "≠ not comparable"


def test_two_experiments_may_not_claim_one_key(tmp_path):
    for name in ("one", "two"):
        put(tmp_path, dict(result(mnist__rec__comm=[0.01]), experiment=name), name)
    with pytest.raises(ValueError, match="mnist.rec.comm stands in one and in two"):
        results.verdict_table("dprec", root=tmp_path)


def test_what_is_only_shown_is_never_judged_and_says_why(tmp_path):
    cell = replace(ACC, kind="shown", tol=0.0, tol_why="other data")
    assert {results.verdict(cell, ours) for ours in ([69.5], [0.0], None)} == {
        "not comparable"
    }
    p = replace(papers.paper("dprec"), cells=(cell,), causes=((cell.key, "a cause"),))
    assert results.causes_of(cell, p, "not comparable") == ["other data", "a cause"]
    assert results.causes_of(ACC, p, "match") == [] == results.causes_of(
        ACC, p, "not run"
    ) and results.causes_of(ACC, p, "near") == ["a cause"]
    text = (papers.assets("papers") / "dprec.toml").read_text(encoding="utf-8")
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "dprec.toml").write_text(
        text.replace(
            'kind = "stochastic"\ntol = 1.6\n', 'kind = "shown"\ntol = 0.0\n', 1
        ),
        encoding="utf-8",
    )
    key = "mnist.eps3.fedavg.acc"
    note = "2 x the paper's standard error, at least 1.0 percentage point"
    found = row(tmp_path, key, papers_root=tmp_path / "papers")
    assert (found["verdict"], found["ours"], found["delta"]) == (
        "≠ not comparable [1] [2]",
        "no full-scale result committed",
        "",
    )
    put(tmp_path, result(mnist__eps3__fedavg__acc=[90.0]))
    table = results.verdict_table(
        "dprec", "table1", root=tmp_path, papers_root=tmp_path / "papers"
    )
    assert table.notes[0] == note and next(r for r in table.rows if r[0] == key)[
        2:5
    ] == ("90.00 (n = 1 of 3 planned)", "+7.90", "≠ not comparable [1] [2]")


def test_a_row_of_two_tables_is_counted_in_both():
    m = results.matrix()
    cells = dict(zip(m.header, next(r for r in m.rows if r[0].startswith("[fltop]"))))

    def count(text):
        return sum(int(word) for word in text.split() if word.isdigit())

    for table in ("table1", "table8"):
        assert count(cells[table]) == len(papers.cells("fltop", table))


def test_causes_become_numbered_notes(tmp_path):
    text = (papers.assets("papers") / "dprec.toml").read_text(encoding="utf-8")
    blocks = [
        ("mnist.eps3.rec.acc", "the model"),
        ("mnist.eps6.rec.acc", "the split"),
        ("mnist.eps3.fedavg.acc", "the model"),
        ("mnist.rec.comm", "idle"),
    ]
    toml = tmp_path / "papers"
    toml.mkdir()
    (toml / "dprec.toml").write_text(
        text + "".join(f'\n[[cause]]\nkey = "{k}"\ntext = "{v}"\n' for k, v in blocks),
        encoding="utf-8",
    )
    put(
        tmp_path,
        result(
            mnist__eps3__rec__acc=[90.0],
            mnist__eps6__rec__acc=[90.0],
            mnist__eps3__fedavg__acc=[90.0],
        ),
    )
    t = results.verdict_table("dprec", "table1", root=tmp_path, papers_root=toml)
    mine = papers.paper("dprec", toml).causes[-4:]
    assert mine == tuple(blocks)
    assert t.notes[:2] == ("the model", "the split") or set(t.notes) >= {
        "the model",
        "the split",
    }
    n = {note: i for i, note in enumerate(t.notes, 1)}
    marks = {r[0]: r[4] for r in t.rows}
    assert (
        f"[{n['the model']}]" in marks["mnist.eps3.rec.acc"]
        and f"[{n['the model']}]" in marks["mnist.eps3.fedavg.acc"]
    )
    assert (
        f"[{n['the split']}]" in marks["mnist.eps6.rec.acc"]
        and marks["mnist.rec.comm"] == "○ not run"
        and "idle" not in t.notes
    )
    assert (
        f"[{n['the split']}] the split" in str(t)
        and f"{n['the split']}. the split" in results.as_markdown(t)
        and "<li>the split</li>" in t._repr_html_()
    )


def test_renderings(tmp_path):
    table = results.Table(
        ("a", "b"), (("x|<y>", "[go](p.ipynb)"), ("long cell", "")), "T"
    )
    assert results.as_text(table).splitlines() == [
        "T",
        "a          b",
        "---------  --",
        "x|<y>      go",
        "long cell",
    ]
    many = results.Table(
        ("a",), tuple((str(i),) for i in range(results.LONG + 2)), sortable=True
    )
    assert (
        repr(many).splitlines()[-2:] == [str(results.LONG - 1), "... and 2 rows more"]
        and str(many).splitlines()[-1] == str(results.LONG + 1)
        and many._repr_html_().count("<tr>") == results.LONG + 3
    )
    assert repr(results.Table(many.header, many.rows)) == str(many)
    assert "| x\\|<y> | [go](p.ipynb) |" in results.as_markdown(table)
    assert (
        '<td>x|&lt;y&gt;</td><td><a href="p.ipynb">go</a></td>' in table._repr_html_()
        and "onclick" not in table._repr_html_()
    )
    assert replace(table, sortable=True)._repr_html_() == results.make_sortable(
        results.as_html(table)
    )
    assert results.make_sortable(results.as_html(table)).count("onclick") == 2
    assert results.cell_html(
        "[a<b](p.html)"
    ) == '<a href="p.html">a&lt;b</a>' and results.cell_html(
        "[3]"
    ) == "[3]" == results.link_text("[3]")


def test_matrix_counts_every_cell(tmp_path):
    put(tmp_path, result(mnist__eps3__rec__acc=[70.0], mnist__eps3__fedavg__acc=[99.0]))
    m = results.matrix(tmp_path)
    cells = dict(
        zip(m.header, m.rows[[r[0].startswith("[dprec]") for r in m.rows].index(True)])
    )
    assert cells["paper"] == "[dprec](nbs/papers/dprec.ipynb)"
    assert cells["table1"] == "● 1 ▲ 1 ✓ 1 ≠ 4 ○ 29"
    assert not any(name.startswith("iclr.") for name in m.header)


def test_committed_results_read_back():
    for paper in papers.papers():
        results.load_results(paper)
        assert len(results.verdict_table(paper).rows) == len(papers.cells(paper))


def test_finding_ours():
    cell = papers.cell("dprec", "mnist.ratio")
    found = results.ours_by_key(
        (result(mnist__fedavg__comm=[40.0, 44.0], mnist__rec__comm=[0.01]),)
    )
    assert (
        set(found) == {"mnist.fedavg.comm", "mnist.rec.comm"}
        and found["mnist.fedavg.comm"][0].mean == 42
    )
    s, run = results.ours_of(cell, found)
    assert (s.mean, s.n, run["experiment"]) == (pytest.approx(4200), 1, "made_up")
    assert results.ours_of(ACC, found) is None
    assert (
        results.row_of(SIZE, papers.paper("dprec"), found, (), "nbs")[5]
        == "[made_up](nbs/experiments/made_up.ipynb)"
    )


def test_types_are_named_in_words():
    assert (
        results.type_names((str, type(None))) == "str or null"
        and results.type_names(int) == "int"
    )
    results.check_schema(dict(a=1, b=2), dict(a=int), "x")
    with pytest.raises(ValueError, match="x: field='b'"):
        results.check_schema(dict(a=1, b=2), dict(a=int), "x", more=False)
    with pytest.raises(ValueError, match="x is list, allowed an object"):
        results.check_schema([], dict(a=int), "x")


# ---- stamp


def test_versions_come_from_metadata():
    assert (
        results.version_of("numpy") == np.__version__
        and results.version_of("no-such-package-here") is None
    )


def test_the_stamp_names_no_machine():
    s = results.stamp("a device")
    text = json.dumps(s)
    assert (
        s.keys() == {"versions", "commit", "dirty", "device"}
        and s["device"] == "a device"
    )
    assert (
        s["versions"]["python"] == platform.python_version()
        and s["versions"]["numpy"] == np.__version__
    )
    assert not {platform.node(), os.uname().nodename} & {
        s["commit"],
        *s["versions"].values(),
    }
    for path in (os.getcwd(), str(papers.assets("papers"))):
        assert path not in text
    assert (s["commit"] is None) == (s["dirty"] is None)


def test_the_stamp_outside_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(
        results.papers, "assets", lambda kind: tmp_path / "dpcomm" / "assets" / kind
    )
    assert results.git("rev-parse", "HEAD") is None and results.stamp()["dirty"] is None


def test_stamping_imports_no_torch():
    import subprocess
    import sys

    code = (
        "import sys; from dpcomm.report import results; results.stamp();"
        " results.matrix(); sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=papers.assets("papers").parents[2]
        ).returncode
        == 0
    )


def test_numbers_are_printed_as_the_paper_and_one_digit_finer():
    assert results.format_paper(ACC) == "69.5 +/- 1.5 percent"
    assert results.format_value(70.1234, ACC) == "70.12"
    s = results.cell_summary([70.0, 72.0])
    assert results.format_seeds(s, dict(params=dict(seeds=[0, 1]))) == "n = 2"
    planned = dict(params=dict(seeds=[0, 1, 2]))
    assert results.format_seeds(s, planned) == "n = 2 of 3 planned"


def test_a_tolerance_includes_its_end():
    assert results.within_tolerance(0.1 + 0.2, 0.3) and results.within_tolerance(0.0, 0)
    assert not results.within_tolerance(0.3001, 0.3)


def test_finite_means_all_the_way_down():
    results.check_finite(dict(a=[1, 2.0, dict(b=None)], c="text", d=True))
    for bad in (math.nan, [math.inf], dict(a=dict(b=-math.inf)), {1: 2}, {"a": {1, 2}}):
        with pytest.raises(ValueError, match="result"):
            results.check_finite(bad)


def test_runs_with_a_premise_are_listed_with_their_own_epsilons():
    table = results.guarantees_as_run()
    assert table.header[0] == "paper" and len(set(table.rows)) == len(table.rows) > 0
    assert all(re.search(r"\d (joins|silent|replaced)", row[-1]) for row in table.rows)
