"""The report of a run: everything that a record says of curves, traffic, epsilon,
settings and guarantees is in one file that needs no other.
"""

import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import pytest
from PIL import Image

from dpcomm.evidence import records, run_report
from dpcomm.privacy.guarantee import recorded

FULL = records.load("dprec", "dprec_mnist", "full")


class Text(HTMLParser):
    "Words of a page, addresses of what it loads, and tags that were opened or closed."

    def __init__(self, page):
        super().__init__()
        self.words, self.loads, self.open = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.loads += [v for k, v in attrs if k in ("src", "href", "srcset")]
        self.open += [] if tag in ("img", "meta", "html", "i") else [tag]

    def handle_endtag(self, tag):
        if tag not in ("html", "i"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_a_page_holds_everything_and_loads_nothing(tmp_path):
    made = run_report.write(FULL, tmp_path / "mnist.jsonl")
    assert [path.name for path in made] == ["mnist.html", "mnist.png"]
    page = made[0].read_text(encoding="utf-8")
    assert "<script" not in page and "@import" not in page and "url(" not in page
    text = Text(page)
    assert len(text.loads) == 3 and not text.open
    assert all(a.startswith("data:image/png;base64,") for a in text.loads)
    words = unescape(" ".join(text.words))
    trained = [r for r in FULL if r.history]
    assert all(r.key in words for r in trained)
    for r in trained:
        assert str(recorded(r.guarantee)) in words
        assert all(f"As run: {recorded(g)}" in words for g in r.as_run.values())
    assert "server_lr" in words and "0.002" in words and "Settings that differ" in words
    with Image.open(made[1]) as image:
        assert image.width > 1000


def test_titles_say_what_the_records_say():
    curves = run_report.curves_of(FULL)
    last = {
        key: sum(r.history["accuracy"][-1] for r in own) / len(own)
        for key, (_, own) in curves.items()
    }
    best = max(last, key=last.get)

    class Axis:
        def __init__(self):
            self.said, self.marks = {}, []

        def plot(self, x, y, *style, marker="", **look):
            self.marks += [y] if marker not in ("", ".") and x != [] else []

        def set(self, **said):
            self.said |= said

        def __getattr__(self, name):
            return lambda *args, **more: None

    score, epsilon, traffic = Axis(), Axis(), Axis()
    assert run_report._score_panel(score, curves)
    assert score.said["title"] == f"{best} ends best, at {last[best]:.4g}"
    assert run_report._epsilon_panel(epsilon, curves)
    promised = max(r.history["eps"][-1] for _, own in curves.values() for r in own)
    marks = [g["eps"] for _, own in curves.values() for g in own[0].as_run.values()]
    assert epsilon.marks == marks
    assert epsilon.said["title"] == (
        f"promised at most {promised:.3g}, as run at most {max(marks):.3g}"
    )
    assert run_report._traffic_panel(traffic, curves)
    least = min(r.history["uplink_bits"][-1] for _, own in curves.values() for r in own)
    assert traffic.said["title"].endswith(f"sends least, {least / 2**23:.3g} MiB")


def test_runs_without_curves_or_privacy_have_a_page_without_a_picture(tmp_path):
    computed = [r for r in FULL if not r.history]
    (path,) = run_report.write(computed, tmp_path / "a.html")
    page = path.read_text(encoding="utf-8")
    assert "No privacy is claimed." in page and "<img" not in page


def test_a_page_escapes_what_records_say(tmp_path):
    odd = replace(FULL[0], notes=["<script>alert(1)</script>"], key="a<b>.c")
    path, _ = run_report.write([odd], tmp_path / "a.html")
    page = path.read_text(encoding="utf-8")
    assert "<script" not in page and "a&lt;b&gt;.c" in page


def test_keys_are_chosen_and_what_fits_none_is_refused(tmp_path):
    path, _ = run_report.write(FULL, tmp_path / "a.html", only="lenet5")
    page = path.read_text(encoding="utf-8")
    assert "lenet5.eps3.rec" in page and "cnn.eps3.rec" not in page
    with pytest.raises(
        ValueError, match="no recorded run begins with 'typo': choose one of"
    ):
        run_report.write(FULL, tmp_path / "b.html", only="typo")
    assert not (tmp_path / "b.html").exists()


def test_more_settings_than_a_picture_holds_are_said(tmp_path):
    many = records.load("fltop", "fltop_fmnist", "full")
    page = run_report.page(many)
    drawn = run_report.curves_of(many)
    keys = {r.key for r in many if r.history}
    assert len(drawn) == run_report.LINES < len(keys)
    assert f"{len(keys) - len(drawn)} more runs are in the tables" in page
    assert len({colour for colour, _ in drawn.values()}) == len(drawn)
    assert re.search(r"--only KEY chooses", page)
