"""Rounds of many clients: what one needs grows by some bytes a client, in whatever blocks
and chunks the clients are visited, and the result is the same.
"""

import os
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tables import tabled
from test_rounds import SENT, net, task

from dpcomm.core.random import seed_tree
from dpcomm.core.vectors import pack
from dpcomm.datasets.images import Federation
from dpcomm.training import round as round_module
from dpcomm.training.federated import Config, Task, simulate
from dpcomm.training.round import train_cohort

# ---- streams


@tabled("cohort", [[3, 1, 3, 0, 1, 3], [2], [], [0, 0, 4, 4, 4, 9]])
def test_streams_are_those_of_the_tree_and_made_whenever_asked_for(cohort):
    work, seen = task(), []
    streams = work.streams(5, np.array(cohort, int), "noise")
    for i, client in enumerate(cohort):
        path = "client", client, "copy", seen.count(client), "noise"
        wanted = work.stream(5, *path).random(3).tolist()
        seen.append(client)
        for found in (streams[i], streams[i], streams[i : i + 1][0], [*streams][i]):
            assert found.random(3).tolist() == wanted
    assert len(streams) == len(cohort) == len(streams[:]) and streams[3:3] == []


# ---- blocks and chunks


def odd_people(n=23):
    "Clients of 0 to 7 examples."
    rng = seed_tree(0, "many")
    sizes = rng.integers(0, 8, n)
    pairs = [(rng.normal(size=(k, 6)), rng.integers(0, 3, k)) for k in sizes]
    return Federation.of(pairs, test=pairs[int(sizes.argmax())])


def crowded(sent, engine, sampling="replacement", **settings):
    "Two rounds of eleven visits."
    config = Config(
        **dict(rounds=2, cohort=11, sampling=sampling, batch=2, engine=engine)
        | dict(eval_every=1, server="sgd", server_lr=1.0)
        | settings
    )
    return Task(net(0.0 if engine == "fused" else 0.3), odd_people(), sent, config, 3)


@pytest.mark.parametrize("engine", ["loop", "vmap", "fused"])
@pytest.mark.parametrize("sent", ["gaussian", "rec", "skellam"])
def test_the_size_of_a_block_changes_no_bit(sent, engine, monkeypatch):
    "Blocks smaller than a chunk, cut chunks, one block for all."
    work, found = crowded(SENT[sent], engine), []
    for block in (1, 3, 4, 10, 1000):
        monkeypatch.setattr(round_module, "BLOCK", block)
        found.append(simulate(work, progress=False))
    for run in found[:-1]:
        assert torch.equal(run.w, found[-1].w) and run.history == found[-1].history


@pytest.mark.parametrize("workers", [1, 3])
def test_few_chunks_are_kept_ahead_of_who_reads_them(workers):
    """Each chunk's sum is alive until it is read, and only a few chunks are sent: the
    count is of objects, whatever the speed of the threads.
    """
    work = crowded(SENT["gaussian"], "loop", cohort=100)
    everybody, w, most = np.arange(100) % 23, pack(work.model), 2 * os.cpu_count()
    alive, peak = set(), []

    def keep(updates, visits):
        kept = updates.clone()
        alive.add(visits.start)
        weakref.finalize(kept, alive.discard, visits.start)
        peak.append(len(alive))
        return kept

    with ThreadPoolExecutor(workers) as pool:
        streams = work.streams(0, everybody, "batches")
        chunks = train_cohort(work, w, everybody, streams, pool, keep=keep)
        read = sum(1 for _ in chunks)
    assert read == 100 and max(peak) <= most + 1
