"""After Quarto has rendered: formulas without their TeX source, and on one line with their
punctuation, named functions apart from letters, bars of a norm as high as letters; arguments
of a function each on a line of its own; pictures fetched when they come near, and on a
phone the second drawing that `dpcomm.evidence.figures.sharp` stored; the search
index without TeX and code; what the site was built from at its foot; a page that moved
leads on from its old addresses (moved.txt: page, then addresses it had).

Quarto calls it (`post-render` in _quarto.yml) and says where the site is.
"""

import base64
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
NAMED = r'<mrow><mi mathvariant="normal">\w+</mi><mo>(?:\u2061|&#8289;)</mo></mrow>'
AFTER = re.compile(rf"({NAMED}(?:<m[in]>[^<]*</m[in]></msub>)?)(?=<m(?!o))")
BEFORE = re.compile(
    rf'(</m[in]>|</msu[bp]>|form="postfix">[^<]*</mo>)(?=(?:<msub>)?{NAMED})'
)
NORM = re.compile(r'<mo stretchy="(?:true" form="\w+">‖|false" form="\w+">∥)</mo>')
BAR = '<mo stretchy="false" lspace="0" rspace="0">‖</mo>'
ARGUMENTS = re.compile(r"(<p>\w+: (?:(?!</p>).)*</p>)", re.S)  # of a function, in a row
NEXT = re.compile(r"(?<=[.!?)]) (?=\w+: )")
PICTURE = re.compile(r"<img (?=[^>]*\bwidth=)(?=[^>]*\bheight=)(?![^>]*\bloading=)")
PLOT = re.compile(r'<img [^>]*\bsrc="([^"]+_files/[^"]+)\.png"[^>]*>')
PHONE = '<picture><source media="(max-width: 500px)" srcset="{}">{}</picture>'
CODE = re.compile(r'<pre class="sourceCode python.*?</pre>', re.S)
NOTHING = "Call self as a function."  # nbdev's words where a docstring is missing
FOOT = re.compile(r'<footer class="footer">.*?</footer>', re.S)
LEAD = """<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>This page moved</title>
<link rel="canonical" href="{to}"><meta http-equiv="refresh" content="0; url={to}">
<p>This page moved to <a href="{to}">{to}</a>.</p></html>
"""


def tidied(page: str, built: dict) -> str:
    page = INLINE.sub(r'<span class="nobreak">\1\2</span>', TEX.sub("", page))
    apart = r'\1<mspace width="0.167em"></mspace>'
    page = NORM.sub(BAR, AFTER.sub(apart, BEFORE.sub(apart, page)))
    page = ARGUMENTS.sub(lambda match: NEXT.sub("<br>\n", match[1]), page)
    page = page.replace(f"<p><em>{NOTHING}</em></p>", "")
    page = PICTURE.sub('<img loading="lazy" ', page)
    word = re.compile("|".join(built))
    return FOOT.sub(lambda foot: word.sub(lambda w: built[w[0]], foot[0]), page)


def drawings() -> dict:  # PNG of each figure: PNG for a phone
    "The pairs that the notebooks' outputs hold."
    pairs = {}
    for path in (ROOT / "nbs").rglob("*.ipynb"):
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            for output in cell.get("outputs", []):
                about = output.get("metadata", {}).get("image/png", {})
                if "phone" in about:
                    wide = "".join(output["data"]["image/png"])
                    pairs[base64.b64decode(wide)] = base64.b64decode(about["phone"])
    return pairs


def with_phones(path: Path, page: str, pairs: dict) -> str:
    "The page with each figure's second drawing, which is written beside the first."

    def both(match):
        wide = path.parent / f"{match[1]}.png"
        narrow = pairs.get(wide.read_bytes() if wide.is_file() else None)
        if narrow is None:
            return match[0]
        wide.with_name(f"{wide.stem}-phone.png").write_bytes(narrow)
        return PHONE.format(f"{match[1]}-phone.png", match[0])

    return PLOT.sub(both, page)


def searched(text: str, page: str) -> str:
    "A text of the search index without the lines of code and the TeX of its page."
    code = html.unescape(re.sub("<[^>]*>", "", "\n".join(CODE.findall(page))))
    lines = {line.strip() for line in code.splitlines()} | {NOTHING}
    text = "\n".join(s for s in text.splitlines() if s.strip() not in lines)
    found = TEX.findall(page)  # Quarto keeps some of a formula's signs escaped
    for formula in sorted({*found, *map(html.unescape, found)}, key=len)[::-1]:
        text = text.replace(formula, "") if len(formula) > 1 else text
    return text


def main(site: Path) -> None:
    settings = ConfigParser()
    settings.read(ROOT / "settings.ini")
    git = ["git", "log", "-1", "--format=%h %cs"]
    said = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout
    commit, date = said.split() or ("unknown", "unknown")
    built = dict(VERSION=settings["DEFAULT"]["version"], COMMIT=commit, DATE=date)
    pages = {path: path.read_text("utf-8") for path in site.rglob("*.html")}
    pairs = drawings()
    for path, page in pages.items():
        page = with_phones(path, tidied(page, built), pairs)
        path.write_text(page, encoding="utf-8")
    if (index := site / "search.json").exists():
        lines = json.loads(index.read_text("utf-8"))
        for line in lines:
            page = pages.get(site / line["href"].split("#")[0], "")
            line["text"] = searched(line["text"], page)
        index.write_text(json.dumps(lines, ensure_ascii=False), encoding="utf-8")
    for line in (ROOT / ".ci" / "moved.txt").read_text("utf-8").splitlines():
        page, *before = line.split()
        for old in before:
            (site / old).parent.mkdir(parents=True, exist_ok=True)
            to = os.path.relpath(page, Path(old).parent)
            (site / old).write_text(LEAD.format(to=to), encoding="utf-8")


if __name__ == "__main__":
    main(Path(os.environ["QUARTO_PROJECT_OUTPUT_DIR"]))
