"Every page: restart, run all through nbdev's runner, and get the outputs that are stored in it."
import json
import re
from pathlib import Path

import pytest
from conftest import NOT_RUN
from repository import PAGES, ROOT, python, text

NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
REL, ABS = 1e-2, 1e-6


def split(printed: str) -> tuple[str, list[float]]:
    "The text around the numbers, with blanks and rules of any length made alike, and the numbers."
    printed = re.sub(r"(?<=\d),(?=\d{3}\b)", "", re.sub(r" at 0x[0-9a-f]+", "", printed))
    numbers = [float(n) for n in NUMBER.findall(printed)]
    around = re.sub(r"([-=─━])\1+", r"\1\1", NUMBER.sub("#", printed))
    return " ".join(around.split()), numbers


def differs(stored: str, fresh: str) -> str:
    "How two printed texts differ; empty if they agree."
    (text_a, numbers_a), (text_b, numbers_b) = split(stored), split(fresh)
    if text_a != text_b:
        return f"stored {stored!r}, now {fresh!r}"
    far = [(a, b) for a, b in zip(numbers_a, numbers_b)
           if a != b and abs(a - b) > max(ABS, REL * max(abs(a), abs(b)))]
    return f"stored {far[0][0]:g}, now {far[0][1]:g} in {fresh!r}" if far else ""


def seen(outputs: list) -> dict:
    "What a reader sees of a cell's outputs: printed text, values, number of images."
    printed = "".join(text(o["text"]) for o in outputs if o["output_type"] == "stream" and o["name"] == "stdout")
    data = [o["data"] for o in outputs if "data" in o]
    images = sum(any(kind.startswith("image/") for kind in d) for d in data)
    values = "\n".join(text(d.get("text/plain", "")) for d in data if not any(k.startswith("image/") for k in d))
    return {"printed": printed, "values": values, "images": str(images)}


def disagreements(cell: dict) -> list[str]:
    "Where a cell's stored outputs are not what it prints now."
    if cell["skipped"] or "timing" in cell["tags"]:
        return []
    stored, fresh = seen(cell["stored"]), seen(cell["fresh"])
    parts = [part for part in fresh if not (cell["source"].rstrip().endswith(";") and part == "printed")]
    return [f"{part}: {why}" for part in parts if (why := differs(stored[part], fresh[part]))]


@pytest.fixture(scope="module")
def runs(request, pool, tmp_path_factory):
    "All selected pages, each in a process of its own, two at a time."
    folder = tmp_path_factory.mktemp("pages")
    chosen = [item.callspec.params.get("page") for item in request.session.items
              if item.module is request.module and hasattr(item, "callspec")]

    def one(page: Path):
        out = folder / ("-".join(page.with_suffix(".json").parts))
        process = python(ROOT / "tests" / "run_page.py", ROOT / page, out, cwd=(ROOT / page).parent)
        return process, json.loads(out.read_text()) if out.exists() else None

    return {page: pool.submit(one, page) for page in PAGES if page in chosen}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_page_runs_and_prints_what_is_stored(page, runs):
    process, report = runs[page].result()
    if process.returncode:
        pytest.fail(f"{page} fails:\n{process.stderr[-6000:]}", pytrace=False)
    for cell in report["cells"]:
        if cell["skipped"]:
            NOT_RUN.append(f"{page}: {cell['skipped']}: {cell['source'].splitlines()[0]}")
    wrong = [f"{cell['source']}\n    {line}" for cell in report["cells"] for line in disagreements(cell)]
    if wrong:
        pytest.fail(f"{page}: {len(wrong)} outputs differ, run the page again:\n" + "\n".join(wrong), pytrace=False)


@pytest.mark.parametrize("stored, fresh", [
    ("eps 3.02", "eps 3.07"), ("eps 3.02", "delta 3.02"), ("[1, 2]", "[1, 2, 3]"), ("", "1"), ("1", ""), ("5e-7", "3e-6"),
])
def test_a_changed_output_is_noticed(stored, fresh):
    assert differs(stored, fresh)


@pytest.mark.parametrize("stored, fresh", [
    ("eps 3.021", "eps 3.024"), ("a   1.0\n----", "a 1.001\n-----"), ("1,663,370", "1,663,371"), ("0.0", "1e-9"),
])
def test_rounding_and_column_widths_are_not(stored, fresh):
    assert not differs(stored, fresh)


def test_a_missing_output_is_noticed():
    stream = {"output_type": "stream", "name": "stdout", "text": ["3\n"]}
    image = {"output_type": "display_data", "data": {"image/png": "", "text/plain": "<Figure>"}, "metadata": {}}
    cell = {"source": "print(3)", "tags": [], "skipped": None, "stored": [], "fresh": [stream, image]}
    assert len(disagreements(cell)) == 2
    assert not disagreements(cell | {"stored": [stream, image]})
    assert not disagreements(cell | {"tags": ["timing"]})
