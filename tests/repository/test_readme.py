"""The README shows what the package says now.

Its tables, the example's output and its figure are made, not typed: `python
tests/repository/test_readme.py` writes them anew.
"""

import base64
import math
import re

import pytest
from checkout import NOTEBOOKS, ROOT, cells, python
from test_pages import split

from dpcomm.evidence import claims, figures

README = ROOT / "README.md"
TOLD = README.read_text(encoding="utf-8")
FIGURE = ROOT / "nbs" / "images" / "case.png"
REFRESH = "run `PYTHONPATH=tests python tests/repository/test_readme.py`"
BLOCK = re.compile(r"(?<=<!-- papers -->\n).*?(?=\n<!-- /papers -->)", re.S)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
FENCES = dict(FENCE.findall(TOLD)[::-1])  # the first of each language


def table() -> str:
    "What is shown of the papers."
    return figures.as_markdown(claims.summary("nbs"))


def printed() -> str:
    done = python("-c", FENCES["python"])
    assert done.returncode == 0, done.stderr
    return done.stdout


def figure() -> bytes:
    "The image that is stored in the home page."
    (cell,) = [c for c in cells("nbs/index.ipynb") if "label: fig-case" in c.directives]
    (data,) = [o["data"] for o in cell.outputs if "image/png" in o.get("data", {})]
    return base64.b64decode(data["image/png"])


def test_the_table_is_the_results():
    assert BLOCK.findall(TOLD) == [table()], REFRESH


@pytest.mark.slow
def test_the_example_prints_what_is_shown():
    (words, shown), (words_now, now) = split(FENCES["text"]), split(printed())
    assert words == words_now and len(shown) == len(now), REFRESH
    assert all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(shown, now)), REFRESH


def test_the_figure_is_the_home_page_s():
    assert FIGURE.relative_to(ROOT).as_posix() in TOLD
    assert FIGURE.read_bytes() == figure() and len(figure()) < 200_000, REFRESH


RESULT = re.compile(
    r"\d[\d.,]*\s*(?:%|percent|[GMK]i?B\b|times\b|x\b)|\b(?:eps|epsilon|accuracy|loss)\b[^.\n]{0,20}\d",
    re.I,
)


def test_no_result_is_typed_by_hand():
    typed = FENCE.sub("", BLOCK.sub("", TOLD))
    assert not RESULT.findall(typed), "results stand in the made tables, nowhere else"


def test_the_commands_are_two_and_ci_runs_the_second():
    install, commands = [body for name, body in FENCE.findall(TOLD) if name == "sh"]
    run, test = commands.splitlines()
    assert install == "pip install -e .\n"
    assert run == "pip install -e '.[run]' && dpcomm run dprec-mnist --scale smoke"
    assert test == "pip install -e '.[dev]' && pytest"
    assert f"\n{test}\n" in (ROOT / ".ci" / "run").read_text()


def test_the_layout_names_what_is_there():
    named = {line.split()[0] for line in FENCES[""].splitlines()}
    assert not [path for path in named if not (ROOT / path).exists()]
    pages = {path.parent.as_posix() for path in NOTEBOOKS}
    assert pages <= named, f"the README does not name {pages - named}"


if __name__ == "__main__":
    told = BLOCK.sub(lambda _: table(), TOLD).replace(FENCES["text"], printed())
    README.write_text(told, encoding="utf-8")
    FIGURE.write_bytes(figure())
