"""Shakespeare, StackOverflow and FEMNIST: made data, floors, counts, and what a record
says of them.
"""

import numpy as np
import pytest
import torch

from dpcomm.core.random import seed_tree
from dpcomm.datasets import femnist
from dpcomm.experiments.dprec import femnist as dprec_femnist
from dpcomm.experiments.dprec import shakespeare as dprec_shakespeare
from dpcomm.experiments.dprec import stackoverflow as dprec_stackoverflow


def test_the_network_is_the_papers_where_the_text_is():
    smoke, quick = (dprec_shakespeare.network(s, 0) for s in ("smoke", "quick"))
    sizes = [sum(p.numel() for p in net.parameters()) for net in (smoke, quick)]
    assert sizes[1] == dprec_shakespeare.paper_setting("n_params") > sizes[0]
    other = next(dprec_shakespeare.network("smoke", 1).parameters())
    assert not torch.equal(next(smoke.parameters()), other)


def test_shakespeares_counts_are_those_of_the_windows_that_train():
    clients = dprec_shakespeare.federation("smoke")
    grid = {run.key: run for run in dprec_shakespeare.grid("smoke")}
    dealt = dprec_shakespeare.counted(grid["partition"], clients)["cells"]
    assert dealt["shakespeare.clients"][0] == 12
    assert dealt["shakespeare.samples"][0] == clients.sizes.sum()
    assert dprec_shakespeare.source(clients)["n_train"] == clients.sizes.sum()
    ((value, unit),) = dprec_shakespeare.counted(grid["space"], clients)[
        "cells"
    ].values()
    text = [dprec_shakespeare.shakespeare.SYMBOLS[int(y)] for y in clients.data.y_test]
    assert unit == "percent" and value == 100 * text.count(" ") / len(text)


@pytest.mark.parametrize("scale", ["smoke", "quick"])
def test_shakespeares_lines_keep_epsilon_three(scale):
    for run in dprec_shakespeare.grid(scale):
        if run.trains:
            line = dprec_shakespeare.run_spec(run)
            assert 2.9 < line.guarantee(line.config.rounds).eps <= 3


def test_the_floor_is_reached_by_naming_the_commonest_tags():
    clients = dprec_stackoverflow.federation("smoke")
    made = dprec_stackoverflow.settings("smoke")["made"]
    tags = np.asarray(clients.data.y_test)
    common = np.argsort(made.tables["topics"] @ made.tables["tags"])[-5:]
    hits = 100 * np.isin(tags, common).sum() / (tags >= 0).sum()
    assert dprec_stackoverflow.floor("smoke") == pytest.approx(hits)
    assert 5 < hits < 100


def test_two_rounds_cost_two_rounds_and_promise_nothing():
    played = dprec_stackoverflow.two_rounds("smoke", "rec")
    visits = 2 * dprec_stackoverflow.settings("smoke")["config"].cohort
    assert played["final"]["uplink_bits"] == visits * played["bits"].content
    assert played["guarantee"] is None and played["history"] == []
    assert (
        played["data"]["made"]["n_clients"] == 300 and "n_train" not in played["data"]
    )


def test_only_the_full_setting_needs_the_theorem_that_holds():
    found = {s: dprec_stackoverflow.run_spec(s, "rec") for s in ("quick", "full")}
    proved = {s: line.guarantee(line.config.rounds) for s, line in found.items()}
    assert (
        proved["quick"].accountant == "theorem1-arxiv"
        and 0.9 < proved["quick"].eps <= 1
    )
    assert proved["full"].accountant == "exact-classic" and proved["full"].eps < 1
    assert found["full"].mechanism.groups == (1_000_000,) * 5 + (500,)


def test_letters_are_digits_turned_into_62_classes():
    found = list(dprec_femnist.letters(seed_tree(0), 200))
    kinds = {kind for kind, _ in found}
    assert len(found) == 200 and kinds <= set(range(62)) and len(kinds) > 50
    assert all(len(x) == 784 and 0 <= min(x) <= max(x) <= 1 for _, x in found)


def test_a_made_leaf_file_is_read_like_leafs_own(tmp_path):
    dprec_femnist.make_leaf(tmp_path, 5, 12)
    made = femnist.femnist(tmp_path, whole=False)
    assert len(made.parts) == 5 and made.sizes.min() >= 2
    assert 5 < made.sizes.mean() < 20 and made.data.y.max() < 62
    assert len(made.data.y_test) >= 10
