"""After Quarto has rendered: formulas without their TeX source, in pages and in the
search index, and on one line with their punctuation; Python code left out of the search
index; folded code below what it made, and what a check prints inside its line;
pictures below the first fetched when they come near;
arguments of a function each on a line of its own; what people type leads to the
page they mean; version, commit and date at the foot of every page; llms.txt in the order of the
sidebar, with descriptions; a page that moved leads on from its old address.

Quarto calls it (`post-render` in _quarto.yml) and says where the site is.
"""

import html
import json
import os
import re
import subprocess
from configparser import ConfigParser
from pathlib import Path

ANNOTATION = re.compile(
    r'<annotation encoding="application/x-tex">(.*?)</annotation>', re.S
)
INLINE = re.compile(
    r'(<math display="inline"(?:(?!</math>).)*</math>)([.,;:!?)]+)', re.S
)
ARGUMENTS = re.compile(r"(<p>\w+: (?:(?!</p>).)*</p>)", re.S)  # of a function, in a row
NEXT = re.compile(r"(?<=[.!?)]) (?=\w+: )")
DESCRIPTION = re.compile(r'<meta name="description" content="(.*?)">')
SIDEBAR = re.compile(r'href="\./([^"#]+\.html)" class="sidebar-item-text sidebar-link"')
LISTED = re.compile(r"\]\([./]*(\S+)\.llms\.md\)")
MEANT = {  # what is typed -> the page that is meant
    "DP-REC": "dprec/chapter.html",
    "I-MVU": "imvu/chapter.html",
    "FL-TOP": "fltop/chapter.html",
    "sqSGD": "sqsgd/chapter.html",
    "quickstart": "tour.html",
    "tutorial": "tour.html",
    "choose": "use/choose.html",
    "which mechanism": "use/choose.html",
    "compare mechanisms": "experiments/frontier.html",
    "bandwidth": "use/choose.html",
    "PyTorch": "use/your_model.html",
    "Flower": "use/flower.html",
    "pfl": "use/pfl.html",
    "Opacus": "use/opacus.html",
    "accountant": "use/account.html",
    "Poisson sampling": "foundations/privacy.html",
    "GPU": "use/machines.html",
    "API": "reference/api.html",
    "install": "index.html#install-and-a-message-of-36-bytes",
    "privacy budget": "foundations/five_minutes.html",
    "epsilon": "foundations/five_minutes.html#epsilon",
    "secure aggregation": "use/secure_sums.html",
    "errata": "reference/errata.html",
    "results": "reference/results.html",
}


def without_tex(page: str) -> tuple[str, list]:
    "A page without the TeX of its formulas, and what was taken out, as the index may spell it."
    found = ANNOTATION.findall(page)
    spelt = {form for tex in found for form in (tex, html.unescape(tex))}
    return ANNOTATION.sub("", page), sorted(spelt, key=len, reverse=True)


def kept_together(page: str) -> str:
    "A page on which no line begins with the full stop of a formula."
    return INLINE.sub(r'<span class="nobreak">\1\2</span>', page)


def told_apart(page: str) -> str:
    "A page that tells each argument of a function on a line of its own."
    return ARGUMENTS.sub(lambda found: NEXT.sub("<br>\n", found[1]), page)


FOLDED = re.compile(
    r'<div id="[^"]*" class="cell"[^>]*>\s*(<details class="code-fold">.*?)(</details>\s*)',
    re.S,
)
SHOWN = re.compile(r'<div class="cell-output cell-output-(\w+)')
CHECKED = "<summary>✓ checked</summary>"


def end_of_div(page: str, start: int) -> int:
    "Where the `</div>` begins that closes a `<div` at `start`."
    depth = 0
    for tag in re.compile(r"<div\b|</div>").finditer(page, start):
        depth += 1 if tag[0] == "<div" else -1
        if not depth:
            return tag.start()
    raise ValueError(f"a <div> is not closed: {page[start : start + 60]}")


def code_below(page: str, checks: bool) -> str:
    """A page on which folded code follows what it made; with `checks`, what a check
    prints stands inside its fold.
    """
    parts, at = [], 0
    for cell in FOLDED.finditer(page):
        end = end_of_div(page, cell.start())
        made = page[cell.end() : end]
        if not made.strip():
            continue
        inside = checks and CHECKED in cell[1] and {*SHOWN.findall(made)} == {"stdout"}
        parts += [page[at : cell.start(1)]]
        parts += [cell[1], made, cell[2]] if inside else [made, cell[1], cell[2]]
        at = end
    return "".join(parts) + page[at:]


PICTURE = re.compile(r"<img (?=[^>]*\bwidth=)(?=[^>]*\bheight=)(?![^>]*\bloading=)")


def fetched_late(page: str) -> str:
    "A page whose pictures of a known size, all but the first, are fetched when they are near."
    first = PICTURE.search(page)
    if first is None:
        return page
    rest = PICTURE.sub('<img loading="lazy" ', page[first.end() :])
    return page[: first.end()] + rest


def clean(text: str, formulas: list) -> str:
    "A text of the search index without the TeX that follows each formula."
    for tex in formulas:
        if len(tex) > 1:
            text = text.replace(tex, "")
        elif tex.isalpha():
            text = re.sub(rf"\b{tex}{tex}\b", tex, text)
    return text


CODE = re.compile(r'<pre class="sourceCode python.*?</pre>', re.S)


def code_of(page: str) -> set:
    "The lines of Python on a page, as the search index has them."
    found = "\n".join(re.sub("<[^>]*>", "", block) for block in CODE.findall(page))
    return {line.strip() for line in html.unescape(found).splitlines()}


def without_code(text: str, code: set) -> str:
    "A text of the search index without lines of code."
    return "\n".join(s for s in text.splitlines() if not s or s.strip() not in code)


def stamp(root: Path) -> dict:
    "Version, commit and date of a checkout, by the words that stand for them."
    settings = ConfigParser()
    settings.read(root / "settings.ini")
    words = ["git", "log", "-1", "--format=%h %cs"]
    git = subprocess.run(words, cwd=root, capture_output=True, text=True)
    commit, date = git.stdout.split() if git.returncode == 0 else ("unknown", "unknown")
    return dict(VERSION=settings["DEFAULT"]["version"], COMMIT=commit, DATE=date)


FOOT = re.compile(r'<footer class="footer">.*?</footer>', re.S)


def stamped(page: str, known: dict) -> str:
    "A page whose foot says what it was built from."

    def filled(found):
        return re.sub("|".join(known), lambda word: known[word[0]], found[0])

    return FOOT.sub(filled, page)


def line_of(words: str, address: str, site: Path) -> dict:
    "A line of the search index that leads from some words to their page."
    page = (site / address.split("#")[0]).read_text(encoding="utf-8")
    text = html.unescape(DESCRIPTION.search(page)[1])
    return dict(
        objectID=f"{address}#{words}",
        href=address,
        title=words,
        section=words,
        text=text,
    )


def in_order(listing: str, site: Path) -> str:
    """The pages of llms.txt as the sidebar orders them, each with its description; last
    those that are not in the menu.
    """
    lines = listing.splitlines()
    kept = [line for line in lines if not line.startswith("- ")]
    listed = SIDEBAR.findall((site / "index.html").read_text(encoding="utf-8"))
    others = (f"{page}.html" for page in LISTED.findall(listing))
    for address in dict.fromkeys([*listed, *others]):
        name = address.removesuffix(".html")
        says = DESCRIPTION.search((site / address).read_text(encoding="utf-8"))
        for line in (line for line in lines if LISTED.findall(line)[-1:] == [name]):
            kept.append(f"{line}: {html.unescape(says[1])}" if says else line)
    return "\n".join(kept) + "\n"


MOVED = [  # old address, new address
    line.split()
    for line in Path(__file__).with_name("moved.txt").read_text("utf-8").splitlines()
]
LEAD = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>This page moved</title>
<link rel="canonical" href="{to}"><meta http-equiv="refresh" content="0; url={to}"></head>
<body><p>This page moved to <a href="{to}">{to}</a>.</p></body>
</html>
"""


def lead_on(site: Path) -> None:
    "At the old address of every page that moved, a page that leads to the new one."
    for old, new in MOVED:
        (site / old).parent.mkdir(parents=True, exist_ok=True)
        to = os.path.relpath(new, Path(old).parent)
        (site / old).write_text(LEAD.format(to=to), encoding="utf-8")


def main(site: Path) -> None:
    root = Path(__file__).resolve().parents[1]
    formulas, code, known = {}, {}, stamp(root)
    papers = {path.stem for path in (root / "dpcomm/assets/papers").glob("*.toml")}
    for path in site.rglob("*.html"):
        address = path.relative_to(site).as_posix()
        page, formulas[address] = without_tex(path.read_text(encoding="utf-8"))
        code[address] = code_of(page)
        notebook = (root / "nbs" / address).with_suffix(".ipynb")
        checks = address.split("/")[0] in papers or (
            notebook.exists() and '"parameters"' in notebook.read_text("utf-8")
        )
        page = fetched_late(code_below(page, checks))
        page = stamped(told_apart(kept_together(page)), known)
        path.write_text(page, encoding="utf-8")
    index = site / "search.json"
    if index.exists():
        lines = [
            line_of(words, address, site)
            for words, address in MEANT.items()
            if (site / address.split("#")[0]).exists()
        ]
        for line in json.loads(index.read_text(encoding="utf-8")):
            address = line["href"].split("#")[0]
            text = without_code(line["text"], code.get(address, set()))
            lines.append(line | dict(text=clean(text, formulas.get(address, []))))
        index.write_text(json.dumps(lines, ensure_ascii=False), encoding="utf-8")
    listing = site / "llms.txt"
    if listing.exists():
        text = in_order(listing.read_text(encoding="utf-8"), site)
        listing.write_text(text, encoding="utf-8")
    lead_on(site)


if __name__ == "__main__":
    main(Path(os.environ["QUARTO_PROJECT_OUTPUT_DIR"]))
