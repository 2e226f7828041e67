"One round of the simulator made of real messages, as nodes send them."

from dataclasses import replace

import numpy as np

from dpcomm.flower.client import OK, Node, expected, local_update, own_part
from dpcomm.flower.server import Gathering, add_reply, draw_round


def by_message(run, optimiser, task, pool):
    "One round of `simulate` with real messages and repeatable keys."
    t, w = run.round, run.w.detach()
    cohort, rng = draw_round(task, t, insecure=True)
    gathering = Gathering.of(task, t, cohort)
    for client in cohort:
        home = replace(task, federation=own_part(task.federation, client))
        update, key = local_update(home, client, w, t), Node(home, client, True).key(t)
        message = gathering.mechanism.encode(update, key).to_bytes()
        add_reply(gathering, client, dict(code=OK, round=t, message=message))
    run.w.grad = -gathering.total.average(expected(task), rng)
    optimiser.step()
    d, mechanism = len(w), gathering.mechanism
    run.ledger.record(t, np.array(cohort), mechanism.bits(d), 32 * d, False)
    run.round += 1
    return float("nan")
