"""Rounds of many clients: what one needs grows by some bytes a client, in whatever blocks
and chunks the clients are visited, and the result is the same.
"""

import os
import subprocess
import sys
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tables import tabled
from test_rounds import SENT, clean, net, task

from dpcomm.core.random import seed_tree
from dpcomm.core.vectors import pack
from dpcomm.datasets import images
from dpcomm.datasets.images import Federation
from dpcomm.mechanisms.contract import mechanism
from dpcomm.training import federated_round, models
from dpcomm.training.federated import Config, Task, simulate

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


def test_the_streams_of_many_visits_take_linear_time():
    "A client that comes 20,000 times: counting backwards each time would take minutes."
    work = task()
    streams = work.streams(0, np.zeros(20_000, int), "noise")
    last = work.stream(0, "client", 0, "copy", 19_999, "noise")
    assert streams[-1].random() == last.random()


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
        monkeypatch.setattr(federated_round, "BLOCK", block)
        found.append(simulate(work, progress=False))
    for run in found[:-1]:
        assert torch.equal(run.w, found[-1].w) and run.history == found[-1].history


@dataclass(frozen=True)
class Counting(Federation):
    "Says how many clients it is asked for."

    asked: tuple = ()

    def visit(self, cohort):
        self.asked[0].append(len(cohort))
        return super().visit(cohort)


def test_data_are_asked_for_a_block_at_a_time(monkeypatch):
    monkeypatch.setattr(federated_round, "BLOCK", 4)
    whole, asked = odd_people(), []
    counting = Counting(whole.data, whole.parts, whole.rule, (asked,))
    work = crowded(SENT["gaussian"], "loop", rounds=1)
    simulate(Task(work.model, counting, work.mechanism, work.config, 3), progress=False)
    assert max(asked) == 4 and sum(asked[1:]) == 11, "the first is the trial"


def test_a_label_of_the_last_block_is_refused_and_its_client_named(monkeypatch):
    monkeypatch.setattr(federated_round, "BLOCK", 2)
    work = task()
    work.federation.data.y[-1] = 7
    with pytest.raises(ValueError, match="^client 4 holds a label 7"):
        simulate(work, progress=False)


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
        chunks = federated_round.train_cohort(
            work, w, everybody, streams, pool, keep=keep
        )
        read = sum(1 for _ in chunks)
    assert read == 100 and max(peak) <= most + 1


# ---- bytes a visit


@dataclass(frozen=True)
class Windows:
    "Which of the images each of n clients holds: some in a row, counted in a circle."

    n: int
    each: int
    images: int

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if not 0 <= i < self.n:
            raise IndexError(i)
        return (np.arange(self.each) + i) % self.images


MESSAGES = {
    "rec": mechanism("rec", clip_norm=0.545, std=1.0, index_bits=7),
    "signsgd": mechanism("signsgd", clip_norm=1.0, sigma=1.0),
}


def crowd(n, sent, net="lenet5"):
    "One round, in which every client takes one step on four images."
    data = images.load("digits")
    clients = Federation(data, Windows(n, 4, len(data.y)), "windows of 4 images")
    config = Config(rounds=1, cohort=n, batch=4, eval_every=1)
    return Task(models.build(net, seed_tree(0)), clients, sent, config, 0)


SMALL = mechanism("signsgd", clip_norm=1.0, sigma=1.0)


def peak_of(n):
    "Peak of Python's and NumPy's memory in a round of n clients, bytes."
    work = crowd(n, SMALL, net="linear")
    tracemalloc.start()
    try:
        simulate(work, progress=False)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.deep
def test_a_visit_costs_some_bytes_and_no_streams():
    """Between n and 4 n clients the peak grows by the number of each client, its visits,
    and its entry in the ledger; two generators alone would be 1,240 bytes.
    """
    n = 250
    peak_of(n)  # what is computed once
    assert (peak_of(4 * n) - peak_of(n)) / (3 * n) < 400


CROWD = """
from test_large_cohorts import MESSAGES, crowd, simulate
import resource
work = crowd(4_000, MESSAGES["rec"])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
simulate(work, progress=False)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.deep
def test_a_round_of_four_thousand_clients_needs_less_than_their_updates():
    "These alone would be 990 MB; a round of a hundred needs nearly as much as this one."
    words = [sys.executable, "-c", CROWD]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, sys.path)))
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=env)
    assert int(done.stdout) < 4 * 10**8


# ---- over processes


@pytest.mark.deep
@pytest.mark.parametrize("name", MESSAGES)
def test_a_large_cohort_is_the_same_on_one_worker_and_on_four(name):
    "LeNet-5, in threads and in processes."
    work, found = crowd(300, MESSAGES[name]), []
    found.append(simulate(work, progress=False))
    found.append(simulate(work, progress=False, workers=4))
    for workers in (1, 4):
        with clean(workers) as executor:
            found.append(simulate(work, progress=False, executor=executor))
    for run in found[1:]:
        assert torch.equal(run.w, found[0].w) and run.history == found[0].history
        assert run.ledger == found[0].ledger
