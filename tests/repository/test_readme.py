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
FIGURE = ROOT / "nbs" / "images" / "case.png"
INDEX = "nbs/index.ipynb"
REFRESH = "run `PYTHONPATH=tests python tests/repository/test_readme.py`"


BLOCK = re.compile(r"(?<=<!-- papers -->\n).*?(?=\n<!-- /papers -->)", re.S)


def made() -> str:
    "The table of papers."
    return figures.as_markdown(claims.summary("nbs"))


def fences(readme: str, language: str) -> list[str]:
    "The fenced blocks of one language."
    return [
        body
        for name, body in re.findall(r"^```(\w*)\n(.*?)^```$", readme, re.S | re.M)
        if name == language
    ]


def example(readme: str) -> tuple[str, str]:
    "The example's code and the output printed under it."
    return re.search(
        r"^```python\n(.*?)^```\n+```text\n(.*?)^```$", readme, re.S | re.M
    ).groups()


def printed(code: str) -> str:
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout


def figure() -> bytes:
    "The image that is stored in the home page."
    labelled = [cell for cell in cells(INDEX) if "label: fig-case" in cell.directives]
    return base64.b64decode(
        next(
            o["data"]["image/png"]
            for o in labelled[0].outputs
            if "image/png" in o.get("data", {})
        )
    )


def refresh() -> None:
    "Write everything that is made."
    readme = README.read_text(encoding="utf-8")
    readme = BLOCK.sub(lambda _: made(), readme)
    code, output = example(readme)
    README.write_text(
        readme.replace(f"```text\n{output}```", f"```text\n{printed(code)}```"),
        encoding="utf-8",
    )
    FIGURE.parent.mkdir(exist_ok=True)
    FIGURE.write_bytes(figure())


@pytest.fixture(scope="module")
def readme() -> str:
    return README.read_text(encoding="utf-8")


def test_the_table_is_the_results(readme):
    assert BLOCK.findall(readme) == [made()], REFRESH


@pytest.mark.slow
def test_the_example_prints_what_is_shown(readme):
    code, output = example(readme)
    (words, shown), (words_now, now) = split(output), split(printed(code))
    assert words == words_now and len(shown) == len(now), REFRESH
    assert all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(shown, now)), REFRESH


def test_the_figure_is_the_home_page_s(readme):
    assert FIGURE.relative_to(ROOT).as_posix() in readme
    assert FIGURE.read_bytes() == figure() and len(figure()) < 200_000, REFRESH


def typed(readme: str) -> str:
    "What was typed by hand: the README without its table and fences."
    return re.sub(r"^```.*?^```$", "", BLOCK.sub("", readme), flags=re.S | re.M)


RESULT = re.compile(
    r"\d[\d.,]*\s*(?:%|percent|[GMK]i?B\b|times\b|x\b)|\b(?:eps|epsilon|accuracy|loss)\b[^.\n]{0,20}\d",
    re.I,
)


def test_no_result_is_typed_by_hand(readme):
    assert not RESULT.findall(typed(readme)), (
        "results stand in the made tables, nowhere else"
    )


def test_the_commands_are_two_and_ci_runs_the_second(readme):
    install, commands = fences(readme, "sh")
    run, test = commands.splitlines()
    assert install == "pip install -e .\n"
    assert run == "pip install -e '.[run]' && dpcomm run dprec-mnist --scale smoke"
    assert test == "pip install -e '.[dev]' && pytest"
    assert f"\n{test}\n" in (ROOT / ".ci" / "run").read_text()


def test_the_layout_names_what_is_there(readme):
    named = {line.split()[0] for line in "".join(fences(readme, "")).splitlines()}
    assert not [path for path in named if not (ROOT / path).exists()]
    pages = {path.parent.as_posix() for path in NOTEBOOKS}
    assert pages <= named, f"the README does not name {pages - named}"


if __name__ == "__main__":
    refresh()
