"""Run one page with nbdev's own test runner and write what its cells print: `python
run_page.py PAGE OUT [--moved]`.

`--moved` starts every training a hair away: initial weights and images times 1 + 1e-6
z, z standard normal.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import nbdev.test
from nbdev.config import get_config

root = Path(__file__).resolve().parents[1]
page = Path(sys.argv[1]).resolve()
out = Path(sys.argv[2])
processed, moves = [], []


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


def move_starts(size=1e-6):
    """Let dpcomm hand out weights and images that are a relative `size` off, the same
    in every call.
    """
    import torch

    from dpcomm.tasks import images
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


nbdev.test.NBProcessor = Kept
if "--moved" in sys.argv:
    move_starts()
skip = set(get_config(path=root).tst_flags.split())
passed, seconds = nbdev.test.test_nb(page, skip_flags=skip, basepath=root)
notebook = processed[0]


def skipped(cell):
    "The flag that keeps a cell from running, if any."
    directives = getattr(cell, "directives_", None) or {}
    flags = sorted(skip & set(directives))
    off = (directives.get("eval:") or [""])[0].lower() == "false"
    return flags[0] if flags else "eval: false" if off else None


cells = [
    dict(
        source=cell.source,
        tags=cell.metadata.get("tags", []),
        skipped=skipped(cell),
        stored=stored,
        fresh=cell.get("outputs", []),
    )
    for cell, stored in zip(notebook.cells, notebook.stored_outputs)
    if cell.cell_type == "code"
]
out.write_text(
    json.dumps(
        dict(passed=bool(passed), seconds=seconds, moved=len(moves), cells=cells),
        default=str,
    )
)
sys.exit(0 if passed else 1)
