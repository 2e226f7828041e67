"""The 24 models of the page "Your own model", through every engine that takes any module."""

import json
import warnings

import pytest
import torch
from checkout import ROOT
from tables import tabled
from torch import nn

from dpcomm.core.vectors import pack
from dpcomm.training import local_sgd
from dpcomm.training.federated import simulate

PAGE = json.loads((ROOT / "nbs/training/your-model.ipynb").read_text())
PARTS = "ymod0003", "ymod0014", "ymod0016"  # imports, layers, the list
HERE = {}
for cell in PAGE["cells"]:
    if cell["id"] in PARTS:
        exec("".join(cell["source"]), HERE)
ENGINES = "loop", "auto", "vmap"
EACH = [(name, engine) for name in HERE["LAYERS"] for engine in ENGINES]
ONE_EACH = [one for i, one in enumerate(EACH) if i % 3 == i // 3 % 3]  # engines in turn


def test_the_list_has_what_the_page_promises():
    assert len(HERE["LAYERS"]) == 24 and len(EACH) == 72
    assert [name for name, _ in ONE_EACH] == list(HERE["LAYERS"])


@tabled("name, engine", ONE_EACH)
def test_a_model_of_the_page_trains_twice_alike(name, engine):
    trains_twice_alike(name, engine)


@pytest.mark.deep
@tabled("name, engine", [one for one in EACH if one not in ONE_EACH])
def test_every_engine_trains_a_model_of_the_page_twice_alike(name, engine):
    trains_twice_alike(name, engine)


def trains_twice_alike(name, engine):
    "And moves, stays finite, is paid for by what trains, and is left as it was."
    work, other = (HERE["one_task"](name, engine) for _ in range(2))
    before = {k: v.clone() for k, v in work.model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = simulate(work, progress=False, metrics=HERE["score"])
        torch.rand(3)
        two = simulate(other, progress=False, metrics=HERE["score"], workers=2)
    start = pack(work.model)
    assert torch.equal(one.w, two.w) and one.history == two.history
    assert torch.isfinite(one.w).all() and not torch.equal(one.w.detach(), start)
    assert one.ledger.uplink_bits == 2 * 4 * 32 * len(start)
    after = work.model.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())


DRAWS = nn.Dropout, nn.TransformerEncoder


@tabled("name", list(HERE["LAYERS"]))
def test_vmap_computes_the_loops_updates(name):
    "In double precision, of clients of unequal size; where nothing is drawn."
    work = HERE["one_task"](name, "loop")
    if any(isinstance(layer, DRAWS) for layer in work.model.modules()):
        assert local_sgd.vmap_obstacle(work.model, work.federation.data, "cpu") == ""
        return
    model, data = work.model.double(), work.federation.data
    x, y = (
        side.double() if side.is_floating_point() else side for side in (data.x, data.y)
    )
    plan = torch.tensor([[[0, 1, 2], [3, 4, -1]], [[5, 6, 7], [-1, -1, -1]]])
    visit = model, pack(model), x, y, plan, 0.2, None, local_sgd.Objective(work.loss)
    loop, vmap = (local_sgd.ENGINES[e](*visit)[0] for e in ("loop", "vmap"))
    assert (loop.norm(dim=1) > 1e-3).all()
    torch.testing.assert_close(vmap, loop, rtol=1e-8, atol=1e-12)
