"A round by dpcomm, with the engine that is named."

import os
from concurrent.futures import ThreadPoolExecutor

from dpcomm.assets.peers.turns import Turns
from dpcomm.training import federated_round, local_sgd

turns = Turns()
x, y, plan, device = turns.x, turns.y, turns.plan, turns.device
w, (engine, _, compiled) = turns.first, os.environ["BENCH_ENGINE"].partition("+")
trainer, size = local_sgd.local_trainer(turns.model, w, engine, compiled=bool(compiled))
chunks = plan.tensor_split(federated_round.chunk_ends(len(plan), size, device)[:-1])


def train(some):
    return trainer(w, x, y, some, turns.lr, None)[0].sum(0)


with federated_round.one_thread(device), ThreadPoolExecutor(turns.threads) as pool:
    for _ in range(turns.rounds):
        turns.wait()
        w = w + sum(pool.map(train, chunks)) / len(plan)
        turns.done([w])
