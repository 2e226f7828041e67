"""Run one page with nbdev's own test runner and write what its cells print: `python
run_page.py PAGE OUT [--moved] [--whole] [--timed]`.

`--whole` runs cells flagged slow too, `--timed` with those that measure times.
`--moved` starts every training a hair away: initial weights and images times 1 + 1e-6
z, z standard normal. `--serve LIMIT` reads jobs, lists [page, out, moved, whole, timed] in JSON, from
standard input and runs each in a fork of a process that has imported what nearly all
pages import; it answers [exit code, CPU seconds] and kills a job after LIMIT seconds.
"""

import importlib
import json
import os
import signal
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import nbdev.test
from nbdev.config import get_config
from unchanged import watch

root = Path(__file__).resolve().parents[1]
processed, moves = [], []
SHARED = (  # torch._dynamo: the first optimiser that is made imports it
    "torch torch._dynamo torchvision matplotlib.pyplot scipy.stats scipy.optimize"
    " scipy.signal sklearn.datasets"
)


class Kept(nbdev.test.NBProcessor):
    "The runner's own processor; remembers the notebook and forgets the stored outputs."

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        processed.append(self.nb)
        self.stored = [cell.get("outputs", []) for cell in self.nb.cells]
        for cell in self.nb.cells:
            if cell.cell_type == "code":
                cell.outputs = []
        self.nb.stored_outputs = self.stored


class Timed(nbdev.test.CaptureShell):
    """The runner's own shell; notes the CPU seconds of every cell. Slow cells that measure
    times are left out where nobody asks for them: nothing of them is compared.
    """

    timed = False

    def cell(self, cell, **more):
        if not self.timed and long_clock(cell):
            return
        start = sum(os.times()[:4])
        super().cell(cell, **more)
        cell.cpu = sum(os.times()[:4]) - start


def long_clock(cell):
    "Whether a cell is slow and measures times."
    directives = getattr(cell, "directives_", None) or {}
    return "slow" in directives and "timing" in cell.metadata.get("tags", [])


def move_starts(size=1e-6):
    """Let dpcomm hand out weights and images that are a relative `size` off, the same
    in every call.
    """
    import torch

    from dpcomm.datasets import images
    from dpcomm.training import models

    initialise, load = models.initialise, images.load

    def moved(values):
        moves.append(values.shape)
        shake = torch.randn(values.shape, generator=torch.Generator().manual_seed(0))
        return values * (1 + size * shake).to(values.dtype)

    def moved_weights(model, *args, **more):
        model = initialise(model, *args, **more)
        for p in model.parameters():
            p.data = moved(p.data)
        return model

    def moved_images(*args, **more):
        found = load(*args, **more)
        return replace(found, x=moved(found.x).clamp(max=1.0))

    models.initialise, images.load = moved_weights, moved_images


def draw_once():
    "Figures are drawn where they are shown, and not once more when their cell ends."
    from matplotlib.backend_bases import FigureCanvasBase

    FigureCanvasBase.draw_idle = lambda *args, **more: None


def skipped(cell, skip):
    "The flag that keeps a cell from running, if any."
    directives = getattr(cell, "directives_", None) or {}
    flags = sorted(skip & set(directives))
    off = (directives.get("eval:") or [""])[0].lower() == "false"
    clock = "timing" if long_clock(cell) and not Timed.timed else None
    return flags[0] if flags else "eval: false" if off else clock


def run(page, out, moved=False, whole=False, timed=False):
    "Run a page; 0 if it passed. Once a process: nbdev's runner is changed for good."
    nbdev.test.NBProcessor, nbdev.test.CaptureShell = Kept, Timed
    seen = watch(root)
    draw_once()
    if moved:
        move_starts()
    Timed.timed = timed
    skip = set(get_config(path=root).tst_flags.split()) - ({"slow"} if whole else set())
    passed, seconds = nbdev.test.test_nb(Path(page), skip_flags=skip, basepath=root)
    notebook = processed[0]
    cells = [
        dict(
            source=cell.source,
            tags=cell.metadata.get("tags", []),
            skipped=skipped(cell, skip),
            cpu=cell.get("cpu", 0.0),
            stored=stored,
            fresh=cell.get("outputs", []),
        )
        for cell, stored in zip(notebook.cells, notebook.stored_outputs)
        if cell.cell_type == "code"
    ]
    report = dict(
        passed=passed, seconds=seconds, moved=len(moves), cells=cells, seen=sorted(seen)
    )
    Path(out).write_text(json.dumps(report, default=str))
    return 0 if passed else 1


def in_fork(page, out, moved, whole, timed, limit):
    "The child: what it prints goes to OUT.log, and it never comes back."
    code = 1
    try:
        log = os.open(f"{out}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdin = open(os.devnull)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        importlib.import_module("numpy").random.seed()
        os.chdir(Path(page).parent)
        signal.alarm(limit)
        code = run(page, out, moved, whole, timed)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve(limit):
    for module in SHARED.split():
        importlib.import_module(module)
    for line in sys.stdin:
        job = json.loads(line)
        if not (child := os.fork()):
            in_fork(*job, limit)
        _, status, used = os.wait4(child, 0)
        cpu = used.ru_utime + used.ru_stime
        print(json.dumps([os.waitstatus_to_exitcode(status), cpu]), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(int(sys.argv[2]))
    else:
        page, out = (Path(word).resolve() for word in sys.argv[1:3])
        flags = (f"--{flag}" in sys.argv for flag in ("moved", "whole", "timed"))
        sys.exit(run(page, out, *flags))
