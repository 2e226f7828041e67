"""Every page: restart, run all through nbdev's runner as on a fresh machine, without
data and network, and get the outputs that are stored in it.

Three kinds of cells are compared less: `timing` not at all; `trained`, which print what
a training came to, without their numbers, because the last digits of a training differ
between processors and its claim is an assert on the page; and those that say NOT
CHECKED, for want of data, here or in the page, which are counted at the end of the
report.
"""

import json
import multiprocessing
import os
import re
from pathlib import Path

import checkout
import pytest
import run_page
from checkout import NOTEBOOKS, PAGES, ROOT, cells, python, text
from conftest import NOT_CHECKED, bare
from tables import tabled

NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
REL, ABS = 1e-2, 1e-6


def split(printed: str) -> tuple[str, list[float]]:
    "The text around the numbers, blanks and rules of any length made alike; the numbers."
    printed = re.sub(r"(?<=\d),(?=\d{3}\b)| at 0x[0-9a-f]+", "", printed)
    numbers = [float(n) for n in NUMBER.findall(printed)]
    around = re.sub(r"([-=─━])\1+", r"\1\1", NUMBER.sub("#", printed))
    return " ".join(around.split()), numbers


def differs(stored: str, fresh: str, numbers: bool = True) -> str:
    "How two printed texts differ, with or without their numbers; empty if they agree."
    (text_a, numbers_a), (text_b, numbers_b) = split(stored), split(fresh)
    if text_a != text_b:
        return f"stored {stored!r}, now {fresh!r}"
    if not numbers:
        return ""
    far = [
        (a, b)
        for a, b in zip(numbers_a, numbers_b)
        if a != b and abs(a - b) > max(ABS, REL * max(abs(a), abs(b)))
    ]
    return f"stored {far[0][0]:g}, now {far[0][1]:g} in {fresh!r}" if far else ""


def seen(outputs: list) -> dict:
    "What a reader sees of a cell's outputs: printed text, values, number of images."
    printed = "".join(text(o["text"]) for o in outputs if o.get("name") == "stdout")
    data = [o["data"] for o in outputs if "data" in o]
    images = [d for d in data if any(kind.startswith("image/") for kind in d)]
    values = "\n".join(text(d.get("text/plain", "")) for d in data if d not in images)
    return {"printed": printed, "values": values, "images": str(len(images))}


def missing(seen: dict) -> list[str]:
    "What a cell says it could not check: a data set that is not under the data root."
    return re.findall("^NOT CHECKED: ([^:\n]*)", seen["printed"], re.M)


def disagreements(cell: dict) -> list[str]:
    "Where a cell's stored outputs are not what it prints now."
    stored, fresh = seen(cell["stored"]), seen(cell["fresh"])
    if cell["skipped"] or "timing" in cell["tags"] or missing(stored) != missing(fresh):
        return []
    quiet = cell["source"].rstrip().endswith(";")
    parts = [part for part in fresh if not (quiet and part == "printed")]
    whole = "trained" not in cell["tags"]
    return [
        f"{part}: {why}"
        for part in parts
        if (why := differs(stored[part], fresh[part], whole or part == "images"))
    ]


def unchecked(cell: dict) -> list[str]:
    "Data that are missing here, or were missing when the outputs were stored."
    stored, fresh = missing(seen(cell["stored"])), missing(seen(cell["fresh"]))
    made = [line for line in stored if line not in fresh]
    return fresh + [f"the stored output was made without data: {line}" for line in made]


# other kernels, so sums in another order
OLD_PROCESSOR = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
STARTS = re.compile(
    r"\b(?:models\.(?:build|initialise)|images\.load)\(|(?<![.\w])(?:build|initialise|load|mlp)\("
)
TRAINS = re.compile(
    r"\bfederated\.simulate\(|(?<![.\w])simulate\(|\b(?:trainer|train|train_\w+|fit)\(",
    re.I,
)


def trains(page: Path) -> bool:
    """Whether a page trains what dpcomm hands out; the page of benchmarks trains to
    measure time.
    """
    own = [c.code for c in cells(page) if c.kind == "code" and not c.exported]
    code = "\n".join(own) if page.stem != "benchmarks" else ""
    return bool(STARTS.search(code) and TRAINS.search(code))


TRAINING = [page for page in PAGES if trains(page)]


LIMIT = 1800  # seconds a page may take, ten times the slowest on an idle machine


@pytest.fixture(scope="session")
def forks():
    "A server that has imported what pages import; each page runs in a fork of it."
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(run_page.PRELOADED)
    return context


def report_of(page: Path, folder: Path, forks, env: dict, whole=False) -> dict:
    "What a page prints in a process of its own; its failure, if it fails."
    out = folder / "report.json"
    env = checkout.settings(env)
    env.pop("PYTEST_CURRENT_TEST", None)
    job = forks.Process(
        target=run_page.in_fork, args=(str(ROOT / page), str(out), env, whole)
    )
    job.start()
    job.join(LIMIT)
    return read_report(page, out, job.exitcode, Path(f"{out}.log"))


def read_report(page: Path, out: Path, code: int | None, log: Path) -> dict:
    if code != 0:
        said = log.read_text()[-6000:] if log.exists() else ""
        pytest.fail(f"{page} ended with {code}:\n{said}", pytrace=False)
    return json.loads(out.read_text())


def moved_report(page: Path, folder: Path) -> dict:
    "A whole page whose training starts a hair away, on an older processor's kernels."
    out, log = folder / "report.json", folder / "log"
    words = [run_page.__file__, ROOT / page, out, "--whole", "--moved"]
    base = os.environ | OLD_PROCESSOR
    done = python(*words, cwd=(ROOT / page).parent, base=base, timeout=LIMIT)
    log.write_text(done.stderr)
    return read_report(page, out, done.returncode, log)


SLOW = [page for page in PAGES if any("slow" in c.directives for c in cells(page))]


def judge(page: Path, report: dict, record_property, advice="run the page again"):
    "Fail with every output that differs; count what could not be checked."
    wrong = [
        f"{cell['source']}\n    {line}"
        for cell in report["cells"]
        for line in disagreements(cell)
    ]
    if wrong:
        found = f"{page}: {len(wrong)} outputs differ, {advice}:\n"
        pytest.fail(found + "\n".join(wrong), pytrace=False)
    for line in (line for cell in report["cells"] for line in unchecked(cell)):
        record_property(NOT_CHECKED, line)


@pytest.mark.parametrize("page", NOTEBOOKS, ids=str)
def test_page_prints_what_is_stored(page, tmp_path, forks, record_property):
    "But for its slow cells, on a fresh machine."
    env = bare(dict(os.environ), tmp_path / "home")
    report = report_of(page, tmp_path, forks, env)
    judge(page, report, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in SLOW if p not in TRAINING], ids=str)
def test_whole_page_prints_what_is_stored(page, tmp_path, forks, record_property):
    "With its slow cells, and with data where there are some."
    report = report_of(page, tmp_path, forks, dict(os.environ), whole=True)
    judge(page, report, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("page", TRAINING, ids=str)
def test_claims_hold_when_the_start_moves(page, tmp_path, record_property):
    """Weights and images a relative 1e-6 off, sums in another order: every assert holds,
    and what a training moved is tagged `trained`.
    """
    report = moved_report(page, tmp_path)
    assert report["moved"], "the page makes its weights and images itself"
    advice = "a training moves them: assert the claim, then tag the cell `trained`"
    judge(page, report, record_property, advice)


@tabled("page", PAGES, ids=str)
def test_what_is_trained_is_held_to_a_claim(page):
    "A cell tagged `trained`, or one of the next two of code, asserts something."
    code = [cell for cell in cells(page) if cell.kind == "code"]
    trained = [i for i, cell in enumerate(code) if "trained" in cell.tags]
    assert page in TRAINING or not trained
    for i in trained:
        near = "\n".join(cell.code for cell in code[i : i + 3])
        assert re.search(r"^\s*assert ", near, re.M), code[i].label
