"""After Quarto has rendered: formulas without their TeX source, and on one line with their
punctuation; arguments of a function each on a line of its own; folded code below what it
made; pictures fetched when they come near; the search index without TeX and code; what the
site was built from at its foot; a page that moved leads on from its old address.

Quarto calls it (`post-render` in _quarto.yml) and says where the site is.
"""

import html
import json
import os
import re
import subprocess
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEX = re.compile(r'<annotation encoding="application/x-tex">(.*?)</annotation>', re.S)
INLINE = re.compile(
    r'(<math display="inline"(?:(?!</math>).)*</math>)([.,;:!?)]+)', re.S
)
ARGUMENTS = re.compile(r"(<p>\w+: (?:(?!</p>).)*</p>)", re.S)  # of a function, in a row
NEXT = re.compile(r"(?<=[.!?)]) (?=\w+: )")
PICTURE = re.compile(r"<img (?=[^>]*\bwidth=)(?=[^>]*\bheight=)(?![^>]*\bloading=)")
FOLDED = re.compile(
    r'<div id="[^"]*" class="cell"[^>]*>\s*(<details class="code-fold">.*?)(</details>\s*)',
    re.S,
)
CODE = re.compile(r'<pre class="sourceCode python.*?</pre>', re.S)
FOOT = re.compile(r'<footer class="footer">.*?</footer>', re.S)
LEAD = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>This page moved</title>
<link rel="canonical" href="{to}"><meta http-equiv="refresh" content="0; url={to}"></head>
<body><p>This page moved to <a href="{to}">{to}</a>.</p></body>
</html>
"""


def code_below(page: str) -> str:
    "A page on which folded code follows what it made; what a check prints stays inside."
    parts, at = [], 0
    for cell in FOLDED.finditer(page):
        end, depth = cell.end(), 1
        for tag in re.compile(r"<div\b|</div>").finditer(page, cell.end()):
            depth += 1 if tag[0] == "<div" else -1
            if not depth:
                end = tag.start()
                break
        made = page[cell.end() : end]
        if made.strip():
            kinds = {*re.findall(r'<div class="cell-output cell-output-(\w+)', made)}
            inside = "<summary>✓ checked<" in cell[1] and kinds == {"stdout"}
            order = (cell[1], made, cell[2]) if inside else (made, cell[1], cell[2])
            parts += [page[at : cell.start(1)], *order]
            at = end
    return "".join(parts) + page[at:]


def tidied(page: str, built: dict) -> str:
    page = INLINE.sub(r'<span class="nobreak">\1\2</span>', TEX.sub("", page))
    page = ARGUMENTS.sub(lambda match: NEXT.sub("<br>\n", match[1]), page)
    page = PICTURE.sub('<img loading="lazy" ', code_below(page))
    word = re.compile("|".join(built))
    return FOOT.sub(lambda foot: word.sub(lambda w: built[w[0]], foot[0]), page)


def searched(text: str, page: str) -> str:
    "A text of the search index without the lines of code and the TeX of its page."
    code = "\n".join(re.sub("<[^>]*>", "", block) for block in CODE.findall(page))
    lines = {line.strip() for line in html.unescape(code).splitlines()} - {""}
    text = "\n".join(s for s in text.splitlines() if s.strip() not in lines)
    tex = {form for t in TEX.findall(page) for form in (t, html.unescape(t))}
    for formula in sorted(tex, key=len, reverse=True):
        if len(formula) > 1:
            text = text.replace(formula, "")
        elif formula.isalpha():
            text = re.sub(rf"\b{formula}{formula}\b", formula, text)
    return text


def main(site: Path) -> None:
    settings = ConfigParser()
    settings.read(ROOT / "settings.ini")
    git = ["git", "log", "-1", "--format=%h %cs"]
    said = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout
    commit, date = said.split() or ("unknown", "unknown")
    built = dict(VERSION=settings["DEFAULT"]["version"], COMMIT=commit, DATE=date)
    pages = {path: path.read_text("utf-8") for path in site.rglob("*.html")}
    for path, page in pages.items():
        path.write_text(tidied(page, built), encoding="utf-8")
    if (index := site / "search.json").exists():
        lines = json.loads(index.read_text("utf-8"))
        for line in lines:
            page = pages.get(site / line["href"].split("#")[0], "")
            line["text"] = searched(line["text"], page)
        index.write_text(json.dumps(lines, ensure_ascii=False), encoding="utf-8")
    for line in (ROOT / ".ci" / "moved.txt").read_text("utf-8").splitlines():
        old, new = line.split()
        (site / old).parent.mkdir(parents=True, exist_ok=True)
        to = os.path.relpath(new, Path(old).parent)
        (site / old).write_text(LEAD.format(to=to), encoding="utf-8")


if __name__ == "__main__":
    main(Path(os.environ["QUARTO_PROJECT_OUTPUT_DIR"]))
