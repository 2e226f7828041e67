"""Run one page with nbdev's own test runner and write what its cells print:
`python tests/run_page.py PAGE OUT [--moved] [--whole]`.

`--whole` runs cells flagged slow too. `--moved` starts every training a hair away: initial
weights and images times 1 + 1e-6 z, z standard normal.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import nbdev.test
from nbdev.config import get_config

ROOT = Path(__file__).resolve().parents[1]
PRELOADED = (  # by the server that pages are forked from: five CPU seconds of imports
    "torch torch._dynamo torchvision matplotlib.pyplot scipy.stats scipy.optimize"
    " scipy.signal sklearn.datasets run_page"
).split()
processed, moves = [], []


class Kept(nbdev.test.NBProcessor):
    "The runner's own processor; remembers the notebook and forgets the stored outputs."

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        processed.append(self.nb)
        self.nb.stored_outputs = [cell.get("outputs", []) for cell in self.nb.cells]
        for cell in self.nb.cells:
            if cell.cell_type == "code":
                cell.outputs = []


def move_starts(size=1e-6):
    "Let dpcomm hand out weights and images that are a relative `size` off."
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
        data = load(*args, **more)
        return replace(data, x=moved(data.x).clamp(max=1.0))

    models.initialise, images.load = moved_weights, moved_images


def draw_once():
    "Figures are drawn where they are shown, and not once more when their cell ends."
    from matplotlib.backend_bases import FigureCanvasBase

    FigureCanvasBase.draw_idle = lambda *args, **more: None


def skipped(cell, flags):
    "The flag that keeps a cell from running, if any."
    directives = getattr(cell, "directives_", None) or {}
    off = (directives.get("eval:") or [""])[0].lower() == "false"
    return next(iter(sorted(flags & set(directives))), "eval: false" if off else None)


def run(page, out, moved=False, whole=False):
    "Run a page; 0 if it passed. Once a process: nbdev's runner is changed for good."
    nbdev.test.NBProcessor = Kept
    draw_once()
    if moved:
        move_starts()
    flags = set(get_config(path=ROOT).tst_flags.split()) - (
        {"slow"} if whole else set()
    )
    passed, _ = nbdev.test.test_nb(Path(page), skip_flags=flags, basepath=ROOT)
    notebook = processed[0]
    cells = [
        dict(
            source=cell.source,
            tags=cell.metadata.get("tags", []),
            skipped=skipped(cell, flags),
            stored=stored,
            fresh=cell.get("outputs", []),
        )
        for cell, stored in zip(notebook.cells, notebook.stored_outputs)
        if cell.cell_type == "code"
    ]
    report = dict(passed=passed, moved=len(moves), cells=cells)
    Path(out).write_text(json.dumps(report, default=str))
    return 0 if passed else 1


def in_fork(page, out, env, whole):
    "A page in a fork of the server; what it says goes to OUT.log."
    log = os.open(f"{out}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.stdin = open(os.devnull)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [str(ROOT)]
    os.chdir(Path(page).parent)
    code = run(page, out, whole=whole)
    sys.stdout.flush()
    sys.exit(code)


if __name__ == "__main__":
    page, out = (Path(word).resolve() for word in sys.argv[1:3])
    sys.exit(run(page, out, "--moved" in sys.argv, "--whole" in sys.argv))
