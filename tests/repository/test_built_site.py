"""The website as a visitor gets it: built with Quarto, read as HTML, and looked at in a
headless browser on a desk and on a phone.

`DPCOMM_SITE` names a built site; without it one is built, which takes minutes, and
without Quarto nothing is checked.
"""

import gzip
import html
import json
import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import browser
import pytest
from bs4 import BeautifulSoup
from checkout import ROOT, SHOWN
from fontTools.ttLib import TTFont
from tables import tabled

import dpcomm

pytestmark = pytest.mark.slow

PAGES = [path.relative_to("nbs").with_suffix(".html") for path in SHOWN]
WIDTHS = (1400, 400)
LIMIT = 500_000  # bytes of a page with all it loads as it opens, compressed


class Page:
    "What a page links to, loads and shows."

    def __init__(self, text):
        page = BeautifulSoup(text, "html.parser")
        self.ids = {tag["id"] for tag in page(id=True)}
        self.links = [tag["href"] for tag in page("a", href=True)]
        images = page("img", src=True)
        self.images = [(tag["src"][:80], tag.get("alt", "")) for tag in images]
        self.bare = [
            tag["src"]
            for tag in images
            if not (tag.find_parent("figure") or tag).find("figcaption")
        ]
        heads = page("link", rel=["stylesheet", "icon", "preload"])
        parts = page(["script", "img", "iframe"], src=True)
        self.late = [tag["src"] for tag in parts if tag.get("loading") == "lazy"]
        self.loads = [tag["href"] for tag in heads]
        self.loads += [tag["src"] for tag in parts if tag.get("loading") != "lazy"]
        for tag in page(["script", "style", "math", "pre", "code"]):
            tag.extract()
        self.words = page.get_text()


@pytest.fixture(scope="module")
def site(request):
    "Folder of the built site."
    if folder := os.environ.get("DPCOMM_SITE"):
        return Path(folder).resolve()
    root, done = request.getfixturevalue("built")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    said = [line for line in done.stderr.splitlines() if re.search("WARN|ERROR", line)]
    assert not said, "\n".join(said)
    return root / "_docs"


@pytest.fixture(scope="module")
def pages(site):
    "Every page, read."
    return {page: Page((site / page).read_text("utf-8")) for page in PAGES}


def outside(address):
    return bool(urlsplit(address).scheme or urlsplit(address).netloc)


def target(page, address):
    "Path and fragment that a link on a page points to, in the site."
    parts = urlsplit(address)
    path = unquote(parts.path)
    whole = Path(os.path.normpath(page.parent / path)) if path else page
    return (whole / "index.html" if whole == Path(".") else whole), parts.fragment


def broken(page, pages, site):
    "Links of a page that lead nowhere in the site."
    for address in pages[page].links:
        if outside(address) or address in ("#", ""):
            continue
        path, fragment = target(page, address)
        if not (site / path).exists():
            yield f"a link to {address}, which is not there"
        elif fragment and path in pages and unquote(fragment) not in pages[path].ids:
            yield f"a link to {address}, whose anchor is not there"


def unseen(page, pages):
    "Pictures without words for them, and formulas that were not set."
    for source, alt in pages[page].images:
        if not alt.strip():
            yield f"an image without alt text: {source}"
    for source in pages[page].bare:
        if "figure-html" in source:
            yield f"a figure without caption: {source}"
    text = pages[page].words
    for raw in re.findall(r"\\\(|\\\[|\$\$|\\(?:frac|mathbb|mathcal|lVert)\b", text):
        yield f"raw TeX: {raw}"
    for name in re.findall(r"\?@((?:eq|fig|tbl|thm|lem|cor|prp|def|exm)-[\w-]+)", text):
        yield f"@{name} is defined nowhere"


def weight(page, pages, site):
    "Compressed bytes of a page and of what it loads."
    loads = {target(page, a)[0] for a in pages[page].loads if not outside(a)} | {page}
    whole = [(site / path).read_bytes() for path in loads if (site / path).is_file()]
    return sum(len(gzip.compress(data, 6)) for data in whole)


@tabled("page", PAGES, ids=str)
def test_page_is_whole(page, pages, site):
    faults = [*broken(page, pages, site), *unseen(page, pages)]
    loads = [a for a in pages[page].loads + pages[page].late if outside(a)]
    faults += [f"it loads {a}" for a in loads if not a.startswith(("data:", "blob:"))]
    if (size := weight(page, pages, site)) > LIMIT:
        faults.append(f"{size:,} bytes compressed; the limit is {LIMIT:,}")
    if faults:
        pytest.fail(f"{page}:\n  " + "\n  ".join(faults), pytrace=False)


@pytest.fixture(scope="module")
def seen(site):
    "Every page as the browser lays it out, width by width."
    if not browser.BROWSER:
        pytest.skip("NOT CHECKED: no Chromium on PATH, no page was looked at")
    return {width: browser.measure(site, PAGES, width) for width in WIDTHS}


@tabled("width", WIDTHS)
@tabled("page", PAGES, ids=str)
def test_nothing_is_cut_off(page, width, seen):
    look = seen[width][str(page)]
    assert not look["cut"] and not look["foreign"] and not look["slides"], look


def test_the_search_index_has_words_and_no_tex(site):
    text = (site / "search.json").read_text("utf-8")
    assert not re.findall(r"\\\\(?:frac|mathbb|lVert|varepsilon)", text)
    assert len(gzip.compress(text.encode(), 6)) < 2_000_000
    lines = [line for line in json.loads(text) if "reference/api" in line["href"]]
    found = " ".join(line["text"] for line in lines)
    assert all(re.search(rf"\b{door}\b", found) for door in ("train", "choose", "rec"))


def test_the_font_of_formulas_has_their_characters(site):
    "matplotlib brings fontTools along."
    font = TTFont(ROOT / "nbs/site/stix-two-math.woff").getBestCmap()
    missing = {
        character
        for page in PAGES
        for formula in re.findall(r"<math.*?</math>", (site / page).read_text(), re.S)
        for character in html.unescape(re.sub("<[^>]*>", "", formula))
        if character.isprintable() and ord(character) not in font
    }
    assert ord("√") in font and not missing


PLOT = r'(<source [^>]*-phone\.png">)?<img [^>]*figure-html[^>]* width="(\d+)"'


def test_a_wide_figure_has_a_second_drawing_for_a_phone(site):
    for page in PAGES:
        for phone, width in re.findall(PLOT, (site / page).read_text("utf-8")):
            assert phone or int(width) < 600, f"{page}: a figure of {width} px"


needs_a_browser = pytest.mark.skipif(
    not browser.BROWSER, reason="NOT CHECKED: no Chromium on PATH"
)


@needs_a_browser
def test_a_link_into_a_closed_box_opens_it(site):
    page = "sqsgd/chapter.html"
    text = (site / page).read_text("utf-8")
    within = r'callout-collapse collapse(?:(?!</section>).)*?<section id="([\w-]+)"'
    name = re.search(within, text, re.S)[1]
    shown = "document.querySelectorAll('.callout-collapse.show').length"
    with browser.served(site) as address, browser.Tab() as tab:
        tab.open(f"{address}/{page}")
        assert tab.js(shown) == 0
        tab.js(f"location.hash = '{name}'")
        tab.js("new Promise(done => setTimeout(done, 500))")
        assert tab.js(shown) == 1


FIGURE = "main figure img"
LIGHTBOX = "document.querySelector('dialog.lightbox')"


@needs_a_browser
def test_a_figure_opens_by_key_and_click_and_closes_by_escape(site):
    figure = f"document.querySelector('{FIGURE}')"
    with browser.served(site) as address, browser.Tab() as tab:
        tab.open(f"{address}/sqsgd/chapter.html")
        assert tab.js(f"{figure}.tabIndex") == 0 and tab.js(f"{figure}.alt")
        assert not tab.js(f"{LIGHTBOX}.open")
        tab.js(f"{figure}.focus()")
        tab.press("Enter")
        assert tab.js(f"{LIGHTBOX}.open")
        large = f"{LIGHTBOX}.querySelector('img')"
        assert tab.js(f"{large}.src === {figure}.src && {large}.alt === {figure}.alt")
        tab.press("Escape")
        assert not tab.js(f"{LIGHTBOX}.open")
        assert tab.js(f"document.activeElement === {figure}"), "focus comes back"
        tab.click(FIGURE)
        assert tab.js(f"{LIGHTBOX}.open")
        tab.click("dialog.lightbox img")
        assert not tab.js(f"{LIGHTBOX}.open")


HIDDEN = """[...document.querySelectorAll('main img, main tr, main p, main pre')]
    .filter(e => !e.getClientRects().length && !e.closest('template, details:not([open])'))
    .length"""


@needs_a_browser
@tabled("page", ["dprec/chapter.html", "experiments/frontier.html"])
def test_nothing_is_hidden_without_scripts_or_on_paper(page, site):
    with browser.served(site) as address, browser.Tab() as tab:
        tab.open(f"{address}/{page}")
        assert tab.js(HIDDEN) > 0, "a closed box hides something on a screen"
        tab.do("Emulation.setEmulatedMedia", media="print")
        tab.js("dispatchEvent(new Event('beforeprint'))")
        assert tab.js(HIDDEN) == 0
        assert not tab.js(
            "document.querySelectorAll('main details:not([open])').length"
        )
        tab.do("Emulation.setEmulatedMedia", media="")
        tab.do("Emulation.setScriptExecutionDisabled", value=True)
        tab.open(f"{address}/{page}")
        assert tab.js(HIDDEN) == 0


def test_the_foot_says_what_the_site_was_built_from(site):
    text = (site / "index.html").read_text("utf-8")
    (foot,) = re.findall(r"dpcomm ([\d.]+), built from commit (\w+) of ([\w-]+)", text)
    assert foot[0] == dpcomm.__version__ and "VERSION" not in foot


def test_a_page_that_moved_leads_on_from_its_old_address(site):
    moved = (ROOT / ".ci" / "moved.txt").read_text("utf-8").splitlines()
    assert moved
    for new, *before in map(str.split, moved):
        assert Path("nbs", new).with_suffix(".ipynb") in SHOWN
        for old in before:
            (link,) = Page((site / old).read_text("utf-8")).links
            assert target(Path(old), link)[0] == Path(new) and Path(old) not in PAGES
