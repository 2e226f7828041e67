"""The two lines of the page of families, and every page that opens a secure sum: with
dropouts beyond the tolerance nothing is opened.
"""

import json
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from checkout import ROOT
from tables import tabled

from dpcomm.core.random import seed_tree
from dpcomm.mechanisms.contract import Total, mechanism
from dpcomm.secagg import session as session_module
from dpcomm.secagg.errors import BelowThreshold

N, D = 20, 6
MADE = {
    "compressive": dict(fraction=0.5),
    "ddgauss": {},
    "skellam": {},
    "topk": dict(fraction=0.5),
}
UPDATES = torch.from_numpy(seed_tree(0, "u").standard_normal((N, D))).float()


def made(name, tolerance):
    common = dict(clip_norm=1.0, sigma=1.0, n_clients=N, tolerance=tolerance)
    return mechanism(name, **common | MADE[name])


def recipe() -> str:
    "The two lines, as they stand on the page."
    page = json.loads((ROOT / "nbs/foundations/contract.ipynb").read_text("utf-8"))
    text = "".join("".join(cell["source"]) for cell in page["cells"])
    (found,) = re.findall(r"```python\n([^`]*run_session[^`]*)```", text)
    assert len(found.splitlines()) == 2
    return found


def follow(m, drop):
    "What the two lines come to in a session that loses clients."
    played = partial(session_module.run_session, seed=0, drop=drop)
    names = dict(m=m, updates=UPDATES, d=D, threshold=11)
    names["session"] = SimpleNamespace(run_session=played)
    exec(recipe(), names)
    return names


@tabled("name, at", [*zip(MADE, ["share", "masked"] * 2), ("ddgauss", "share")])
def test_the_recipe_opens_no_sum_with_too_little_noise(name, at):
    """20 clients of whom 4 may be missing: with 16 the sum is opened, with 15 and 14 the
    session ends before it is unmasked.
    """
    m = made(name, 0.2)
    names = follow(m, dict.fromkeys(range(4), at))
    assert len(names["outcome"].survivors) == m.honest == 16
    assert names["estimate"].shape == (D,)
    for lost in (5, 6):
        with pytest.raises(
            BelowThreshold, match=f"{N - lost} clients are left; 16 are"
        ):
            follow(m, dict.fromkeys(range(lost), at))


@tabled("name", MADE)
def test_a_total_is_opened_only_with_the_shares_it_must_hold(name):
    "The old lines, with a ring and without a quorum: the server holds a sum of 14."
    m = made(name, 0.2)
    words = [m.summand(u) for u in UPDATES]
    drop = dict.fromkeys(range(6), "masked")
    out = session_module.run_session(words, m.ring, 11, seed=0, drop=drop)
    with pytest.raises(TypeError, match="'n'"):
        m.from_sum(out.total, d=D)
    for kind, says, numbers in (
        (BelowThreshold, "clients .* on 16 shares of noise", (14, 15, 1)),
        (ValueError, "n is", (0, -1, 0.5, None, "x", True)),
    ):
        for n in numbers:
            with pytest.raises(kind, match=says):
                m.from_sum(out.total, n, D)
    assert m.from_sum(out.total, 16, D).shape == (D,), "the caller says who is in it"
    with pytest.raises(BelowThreshold, match="14 clients are in the sum"):
        session_module.run_session(words[:14], m, 11, seed=0)


@tabled("name", MADE)
def test_a_stream_of_messages_is_finished_only_with_its_shares(name):
    "A `Total` knows how many messages are in it."
    m = made(name, 0.2)
    total = Total(m, D)
    for i, u in enumerate(UPDATES[:16]):
        if i:
            with pytest.raises(BelowThreshold, match=f"{i} clients are in the sum"):
                total.average(N, None)
        total.add(m.encode(u))
    assert total.average(N, None).shape == (D,)
    assert not Total(m, D).average(N, None).any(), "nobody came, so nothing is shown"
