"""Every page: restart, run all through nbdev's runner as on a fresh machine, without
data and network, and get the outputs that are stored in it.

Three kinds of cells are compared less: `timing` not at all; `trained`, which print what
a training came to, without their numbers, because the last digits of a training differ
between processors and its claim is an assert on the page; and those that say NOT
CHECKED, for want of data, here or in the page, which are counted at the end of the
report.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import checkout
import pytest
import unchanged
from checkout import PAGES, ROOT, Cell, cells, python, text
from conftest import CPU, LONG, LONG_CELL, NOT_CHECKED, NOT_RUN, bare
from tables import tabled

from dpcomm.datasets import images

NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
REL, ABS = 1e-2, 1e-6
RUN = ROOT / "tests" / "run_page.py"


def split(printed: str) -> tuple[str, list[float]]:
    """The text around the numbers, with blanks and rules of any length made alike, and
    the numbers.
    """
    printed = re.sub(
        r"(?<=\d),(?=\d{3}\b)", "", re.sub(r" at 0x[0-9a-f]+", "", printed)
    )
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
    printed = "".join(
        text(o["text"])
        for o in outputs
        if o["output_type"] == "stream" and o["name"] == "stdout"
    )
    data = [o["data"] for o in outputs if "data" in o]
    images = sum(any(kind.startswith("image/") for kind in d) for d in data)
    values = "\n".join(
        text(d.get("text/plain", ""))
        for d in data
        if not any(k.startswith("image/") for k in d)
    )
    return {"printed": printed, "values": values, "images": str(images)}


def missing(seen: dict) -> list[str]:
    """What a cell says it could not check, `NOT CHECKED: <data set> is not under the
    data root`.
    """
    return [
        line.partition(": ")[2].split(":")[0]
        for line in seen["printed"].splitlines()
        if line.startswith("NOT CHECKED: ")
    ]


def disagreements(cell: dict) -> list[str]:
    "Where a cell's stored outputs are not what it prints now."
    stored, fresh = seen(cell["stored"]), seen(cell["fresh"])
    if cell["skipped"] or "timing" in cell["tags"] or missing(stored) != missing(fresh):
        return []
    parts = [
        part
        for part in fresh
        if not (cell["source"].rstrip().endswith(";") and part == "printed")
    ]
    whole = "trained" not in cell["tags"]
    return [
        f"{part}: {why}"
        for part in parts
        if (why := differs(stored[part], fresh[part], whole or part == "images"))
    ]


def unchecked(cell: dict) -> list[str]:
    """What was not checked in a cell that ran: data that are missing here, or were
    missing when its outputs were stored.
    """
    stored, fresh = missing(seen(cell["stored"])), missing(seen(cell["fresh"]))
    return [
        *fresh,
        *(
            f"the stored output was made without data: {line}"
            for line in stored
            if line not in fresh
        ),
    ]


OLD_PROCESSOR = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}  # other kernels, so sums in another order
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
    code = "\n".join(
        cell.code for cell in cells(page) if cell.kind == "code" and not cell.exported
    )
    return page.stem != "benchmarks" and bool(
        STARTS.search(code) and TRAINS.search(code)
    )


TRAINING = [page for page in PAGES if trains(page)]


@pytest.fixture(scope="session")
def fresh_machine(tmp_path_factory):
    "An environment without data and network, in a home that starts empty."
    return bare(dict(os.environ), tmp_path_factory.mktemp("home"))


LIMIT = 1800  # seconds a page may take, ten times the slowest on an idle machine


class Server:
    """A process that has imported what pages import and runs each page in a fork of
    itself: the imports cost six CPU seconds, most pages one.
    """

    def __init__(self, base: dict):
        self.process = subprocess.Popen(
            [sys.executable, str(RUN), "--serve", str(LIMIT)],
            cwd=ROOT,
            env=checkout.settings(base),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, *job) -> int | None:
        "The exit code of a page's process; None where the server is gone."
        try:
            print(json.dumps(job), file=self.process.stdin, flush=True)
            code, cpu = json.loads(self.process.stdout.readline())
        except (OSError, ValueError):
            return None
        CPU["elsewhere"] += cpu
        return code

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@pytest.fixture(scope="session")
def servers(request):
    """environment -> Server; none where a process cannot fork, and for `--fresh-pages`,
    which starts a process a page.
    """
    found = {}

    def server(base):
        if not hasattr(os, "fork") or request.config.getoption("fresh_pages"):
            return None
        key = tuple(sorted(base.items()))
        if key not in found:
            found[key] = Server(base)
        return found[key]

    yield server
    for each in found.values():
        each.close()
    CPU["elsewhere"] = 0  # now among what this process waited for


def report_of(
    page: Path, folder: Path, servers, base, moved=False, whole=False, timed=False
) -> dict:
    "What a page prints in a process of its own; its failure, if it fails."
    out, base = folder / "report.json", dict(base) | (OLD_PROCESSOR if moved else {})
    base.pop("PYTEST_CURRENT_TEST", None)
    server = servers(base)
    how = dict(moved=moved, whole=whole, timed=timed)
    code = server.run(str(ROOT / page), str(out), *how.values()) if server else None
    if code is None:
        words = [RUN, ROOT / page, out, *(f"--{name}" for name in how if how[name])]
        done = python(*words, cwd=(ROOT / page).parent, base=base, timeout=LIMIT)
        code, log = done.returncode, done.stderr
    else:
        log = Path(f"{out}.log").read_text()
    if code:
        why = "fails" if code > 0 else f"was stopped by signal {-code} ({LIMIT} s?)"
        pytest.fail(f"{page} {why}:\n{log[-6000:]}", pytrace=False)
    report = json.loads(out.read_text())
    unchanged.CHILD.update(report["seen"])
    return report


def reports(page: Path, folder: Path, servers, base, **how) -> list[dict]:
    """A page as on a fresh machine; where it lacks data there, and data are here, with
    them too. A whole page, which ran without data in the first tier, runs once.
    """
    if how["whole"] and images.data_root().is_dir():
        base = base | {"DPCOMM_DATA": str(images.data_root())}
        return [report_of(page, folder, servers, base, **how)]
    found = [report_of(page, folder, servers, base, **how)]
    lacks = [
        line for cell in found[0]["cells"] for line in missing(seen(cell["fresh"]))
    ]
    if lacks and images.data_root().is_dir():
        found.append(report_of(page, folder, servers, os.environ, **how))
    return found


def demand_agreement(page: Path, report: dict, advice: str):
    wrong = [
        f"{cell['source']}\n    {line}"
        for cell in report["cells"]
        for line in disagreements(cell)
    ]
    if wrong:
        pytest.fail(
            f"{page}: {len(wrong)} outputs differ, {advice}:\n" + "\n".join(wrong),
            pytrace=False,
        )


def whole_run(page: Path) -> list:
    """The whole page, where it has slow cells that nobody else runs: those of a training
    run where its start moves. Slow cells that measure times are for the weekly run, and so
    is a page that has no others: what they print is not compared.
    """
    slow = [cell for cell in cells(page) if "slow" in cell.directives]
    clocks = [cell for cell in slow if "timing" in cell.tags]
    if not slow or page in TRAINING and not clocks:
        return []
    weekly = page in TRAINING or slow == clocks
    marks = [pytest.mark.deep, *[pytest.mark.weekly] * weekly]
    return [pytest.param(page, True, id=f"{page}-whole", marks=marks)]


@pytest.mark.parametrize(
    "page, whole",
    [pytest.param(page, False, id=str(page)) for page in PAGES]
    + [param for page in PAGES for param in whole_run(page)],
)
def test_page_runs_and_prints_what_is_stored(
    page, whole, tmp_path, servers, fresh_machine, record_property, request
):
    """Cells flagged slow run in the deep tier; the summary names those that take three
    CPU seconds or more and are not.
    """
    timed = not request.config.getoption("changed")
    how = dict(whole=whole, timed=timed)
    found = reports(page, tmp_path, servers, fresh_machine, **how)
    for report in found:
        demand_agreement(page, report, "run the page again")
    for cell in found[-1]["cells"]:
        if cell["skipped"]:
            record_property(NOT_RUN, cell["skipped"])
        if cell["cpu"] >= LONG_CELL and not whole:
            label = Cell("code", cell["source"], (), ()).label
            record_property(LONG, f"{cell['cpu']:.1f} s  {page}: {label}")
        for line in unchecked(cell):
            record_property(NOT_CHECKED, line)


@pytest.mark.deep
@pytest.mark.parametrize("page", TRAINING, ids=str)
def test_claims_hold_when_the_start_moves(page, tmp_path, servers, record_property):
    """Weights and images a relative 1e-6 off, sums in another order: every assert
    holds, and what a training moved is tagged `trained`. This is the one run of the slow
    cells of such a page.
    """
    report = report_of(page, tmp_path, servers, os.environ, moved=True, whole=True)
    assert report["moved"], (
        "nothing was moved: the page makes its weights and images itself"
    )
    demand_agreement(
        page,
        report,
        "a training moves them: assert the claim, then tag the cell `trained`",
    )
    for line in (line for cell in report["cells"] for line in unchecked(cell)):
        record_property(NOT_CHECKED, line)


def unguarded(found: list[Cell]) -> list[str]:
    """Cells tagged `trained` whose claim no assert states, in the cell or in the next
    two of code.
    """
    code = [cell for cell in found if cell.kind == "code"]
    return [
        cell.label
        for i, cell in enumerate(code)
        if "trained" in cell.tags
        and not any(
            re.search(r"^\s*assert ", after.code, re.M) for after in code[i : i + 3]
        )
    ]


@tabled("page", PAGES, ids=str)
def test_what_is_trained_is_held_to_a_claim(page):
    assert not unguarded(cells(page))
    assert page in TRAINING or not any("trained" in cell.tags for cell in cells(page))


def test_a_training_without_a_claim_is_noticed():
    trained, claim, other = (
        Cell("code", source, tags, ())
        for source, tags in (
            ("print(score)", ("trained",)),
            ("assert score > 80", ()),
            ("print(1)", ()),
        )
    )
    assert not unguarded([trained, other, claim]) and unguarded(
        [trained, other, other, claim]
    ) == ["print(score)"] == unguarded([claim, trained])


@tabled(
    "stored, fresh",
    [
        ("eps 3.02", "eps 3.07"),
        ("eps 3.02", "delta 3.02"),
        ("[1, 2]", "[1, 2, 3]"),
        ("", "1"),
        ("1", ""),
        ("5e-7", "3e-6"),
    ],
)
def test_a_changed_output_is_noticed(stored, fresh):
    assert differs(stored, fresh)


@tabled(
    "stored, fresh",
    [
        ("eps 3.021", "eps 3.024"),
        ("a   1.0\n----", "a 1.001\n-----"),
        ("1,663,370", "1,663,371"),
        ("0.0", "1e-9"),
    ],
)
def test_rounding_and_column_widths_are_not(stored, fresh):
    assert not differs(stored, fresh)


def printed(line: str) -> list:
    return [{"output_type": "stream", "name": "stdout", "text": [line + "\n"]}]


IMAGE = {
    "output_type": "display_data",
    "data": {"image/png": "", "text/plain": "<Figure>"},
    "metadata": {},
}
CELL = {
    "source": "print(3)",
    "tags": [],
    "skipped": None,
    "stored": printed("3"),
    "fresh": printed("3"),
}


def test_a_missing_output_is_noticed():
    assert (
        not disagreements(CELL)
        and len(disagreements(CELL | {"stored": [], "fresh": [*printed("3"), IMAGE]}))
        == 2
    )
    assert not disagreements(CELL | {"stored": [], "tags": ["timing"]})


def test_a_training_s_numbers_may_differ_and_nothing_else():
    trained = CELL | {
        "tags": ["trained"],
        "stored": printed("accuracy 81.2 %"),
        "fresh": printed("accuracy 84.0 %"),
    }
    assert disagreements(trained | {"tags": []}) and not disagreements(trained)
    assert disagreements(trained | {"fresh": printed("loss 81.2 %")}) and disagreements(
        trained | {"fresh": [*trained["fresh"], IMAGE]}
    )


@tabled(
    "stored, fresh, named",
    [
        (
            "60,000 images",
            "NOT CHECKED: mnist is not under the data root: put",
            ["mnist is not under the data root"],
        ),
        (
            "NOT CHECKED: mnist is not under the data root",
            "60,000 images",
            [
                "the stored output was made without data: mnist is not under the data"
                " root"
            ],
        ),
        (
            "NOT CHECKED: mnist is missing: put",
            "NOT CHECKED: mnist is missing: put",
            ["mnist is missing"],
        ),
        ("60,000 images", "60,000 images", []),
    ],
)
def test_what_data_decide_is_counted_and_neither_green_nor_red(stored, fresh, named):
    cell = CELL | {"stored": printed(stored), "fresh": printed(fresh)}
    assert unchecked(cell) == named and not disagreements(cell)


def test_a_difference_beside_what_is_not_checked_is_noticed():
    cell = CELL | {
        "stored": printed("3\nNOT CHECKED: mnist is missing"),
        "fresh": printed("4\nNOT CHECKED: mnist is missing"),
    }
    assert disagreements(cell)
