"""After Quarto has rendered: formulas without their TeX source, in pages and in the
search index, and llms.txt in the order of the sidebar.

Quarto calls it (`post-render` in _quarto.yml) and says where the site is.
"""

import html
import json
import os
import re
from pathlib import Path

ANNOTATION = re.compile(
    r'<annotation encoding="application/x-tex">(.*?)</annotation>', re.S
)


def without_tex(page: str) -> tuple[str, list]:
    "A page without the TeX of its formulas, and the TeX that was taken out."
    found = [html.unescape(tex) for tex in ANNOTATION.findall(page)]
    return ANNOTATION.sub("", page), sorted(set(found), key=len, reverse=True)


def clean(text: str, formulas: list) -> str:
    "A text of the search index without the TeX that follows each formula."
    for tex in formulas:
        if len(tex) > 1:
            text = text.replace(tex, "")
    return text


def main(site: Path) -> None:
    formulas = {}
    for path in site.rglob("*.html"):
        page, formulas[path.relative_to(site).as_posix()] = without_tex(
            path.read_text(encoding="utf-8")
        )
        path.write_text(page, encoding="utf-8")
    index = site / "search.json"
    if index.exists():
        entries = json.loads(index.read_text(encoding="utf-8"))
        for entry in entries:
            known = formulas.get(entry["href"].split("#")[0], [])
            entry["text"] = clean(entry["text"], known)
        index.write_text(json.dumps(entries, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main(Path(os.environ["QUARTO_PROJECT_OUTPUT_DIR"]))
