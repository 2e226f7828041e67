"""The four papers in one PDF to cite: chapters, proofs, results with ours, errata.
`python .ci/book.py [FILE.pdf]`, `_docs/dpcomm.pdf` by default; needs Quarto. Prose, formulas,
figures, tables and what checks print come from the notebooks; their code stays there.
"""

import base64
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = """dprec/chapter dprec/theorem imvu/chapter imvu/proofs fltop/chapter fltop/privacy
sqsgd/chapter sqsgd/proofs reference/results reference/errata""".split()
LEFT_OUT = r"## (\d+\. Rerun|About this|Verdicts|Every row|Guarantees|The runs|Run l)"
ONLY_SITE = re.compile(r"^\*\*(Try it|Read first|All pages).*", re.M)
HEAD = """---
title: dpcomm
subtitle: |
  Four papers on private, communication-efficient federated learning,
  derived, implemented and checked
author: The dpcomm authors
date: {date}
abstract: |
  Version {version}, commit {commit}. The code and the runs behind every number are in the
  notebooks of this commit.
format: {{typst: {{toc: true, toc-depth: 2, papersize: a4, html-table-processing: none}}}}
filters: [{{path: {lua}, at: pre-ast}}]
---

```{{=typst}}
#show table: set text(size: 8pt)
#show table: set par(justify: false, leading: 0.5em)
```

"""
HEADING = re.compile(r"^(#+) +(.*?)(?: *\{(?:#([\w-]+))?.*\})?$", re.M)
LABEL = re.compile(r'(\{#(?:fig-|eq-)?|<h4 id=")([\w.-]+)')
LINK = re.compile(
    r'(?<!!)\[((?:[^][]|\[[^]]*\])*)\]\(([^)\s]+)\)|<a [^>]*?href="([^"]*)".*?>(.*?)</a>'
)
INSIDE = re.compile(r'(?<=\]\()#([\w.-]+)|(?<=<a href=")#([\w.-]+)')


def named(page: str) -> str:
    return page.replace("/", "-")


def unique(text: str, page: str) -> str:
    "A page's text with labels that no other page has, and no link that leaves the book."

    def heading(match):
        level, title, label = match.groups()
        words = re.sub(r"\s+", "-", re.sub(r"[^\w\s.-]", "", title.lower()).strip())
        label = named(page) if level == "#" else label or re.sub(r"^[^a-z]+", "", words)
        return match[0] if title == "Answer" else f"{level} {title} {{#{label}}}"

    def link(match):
        words, target = match[1] or match[4] or "", match[2] or match[3]
        file, _, label = target.partition("#")
        to = os.path.normpath(f"{page}/../{file}") if file else page
        to = to.removesuffix(".ipynb")
        if file.startswith("http"):
            return match[0]
        if to not in PAGES:
            return words
        to = f"#{named(to)}-{label}".removesuffix("-")
        return f"[{words}]({to})" if match[2] else f'<a href="{to}">{words}</a>'

    def label(match):
        own = match[2] == named(page)
        return match[0] if own else f"{match[1]}{named(page)}-{match[2]}"

    text = text.replace("{.column-margin}", "{.margin-note}")  # one column in print
    text = LABEL.sub(label, LINK.sub(link, HEADING.sub(heading, text)))
    return re.sub(r"@(fig|eq)-", rf"@\1-{named(page)}-", text)


def shown(cell, folder: Path, name: str):
    "What a code cell made: a figure with caption and label, a table, what it printed."
    said = dict(re.findall(r'^#\| ([\w-]+): "?(.*?)"?$', "".join(cell["source"]), re.M))
    for i, output in enumerate(cell["outputs"]):
        data = {kind: "".join(text) for kind, text in output.get("data", {}).items()}
        if "image/png" in data:
            image = base64.b64decode(data["image/png"])
            (folder / f"{name}-{i}.png").write_bytes(image)
            label = f"{{#{said['label']}}}" if "label" in said else ""
            yield f"![{said.get('fig-cap', '')}]({name}-{i}.png){label}"
        elif "text/html" not in data:
            printed = "".join(output.get("text", data.get("text/plain", "")))
            yield f"```\n{printed}\n```"
        elif not data["text/html"].startswith(("<figure", "<a download")):
            yield f"```{{=html}}\n{data['text/html']}\n```"


def written(page: str, folder: Path) -> str:
    "A page as one text."
    parts = []
    notebook = json.loads((ROOT / "nbs" / f"{page}.ipynb").read_text("utf-8"))
    for i, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "markdown":
            parts.append(ONLY_SITE.sub("", "".join(cell["source"])))
        else:
            parts += shown(cell, folder, f"{named(page)}-{i}")
    sections = re.split(r"^(?=## (?!Answer))", "\n\n".join(parts), flags=re.M)
    return unique("".join(s for s in sections if not re.match(LEFT_OUT, s)), page)


def source(folder: Path) -> str:
    "The text that Quarto gets; pictures go into the folder."
    text = "\n\n".join(written(page, folder) for page in PAGES)
    there = {*re.findall(r'(?:\{#|id=")([\w.-]+)', text)}

    def inside(match):  # an anchor that only the site has becomes its page
        label = match[1] or match[2]
        pages = [named(page) for page in PAGES if label.startswith(named(page))]
        return "#" + (label if label in there else pages[0])

    return INSIDE.sub(inside, text)


def main(target: Path) -> None:
    git = ["git", "-C", ROOT, "log", "-1", "--format=%h %cs"]
    commit, date = subprocess.check_output(git, text=True).split()
    settings = (ROOT / "settings.ini").read_text()
    version = re.search("^version = (.*)$", settings, re.M)[1]
    lua = ROOT / ".ci" / "book.lua"
    head = HEAD.format(version=version, commit=commit, date=date, lua=lua)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "dpcomm.qmd").write_text(head + source(folder), "utf-8")
        subprocess.run(["quarto", "render", "dpcomm.qmd"], cwd=folder, check=True)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes((folder / "dpcomm.pdf").read_bytes())


if __name__ == "__main__":
    main(Path(*sys.argv[1:] or [ROOT / "_docs" / "dpcomm.pdf"]))
