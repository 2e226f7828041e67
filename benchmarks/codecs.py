"""CPU time of every mechanism's encode, decode and simulate, of a session of secure aggregation
and of exact noise. Prints one line of JSON: python benchmarks/codecs.py
"""

import argparse
from functools import partial

import numpy as np
import torch
from machine import median_row, print_record, time_in_turns

from dpcomm.core.random import Insecure, normal, seed_tree
from dpcomm.mechanisms import contract
from dpcomm.secagg import discrete, masking, ring, session
from dpcomm.secagg.skellam_noise import skellam


def message_calls(name, mechanism, d):
    u, rng = normal((d,), seed_tree(0, "bench", d)), seed_tree(0, "bench", "simulate")
    message = mechanism.encode(u, Insecure(1))
    return {
        f"{name}, encode": lambda: mechanism.encode(u, Insecure(1)),
        f"{name}, decode": lambda: mechanism.decode(message),
        f"{name}, simulate": lambda: mechanism.simulate(u[None], rng),
    }


def mechanism_calls(d):
    "Every mechanism at the setting at which it is audited first."
    calls = {}
    for name in contract.registered():
        settings = contract.mechanism_class(name).audit_cases[0][0]
        calls |= message_calls(name, contract.mechanism(name, **settings), d)
    return calls


def codec_calls(d=61_706):
    rec = contract.mechanism("rec", clip_norm=0.545, std=1.0, index_bits=7)
    calls = mechanism_calls(d)
    for size in (d, 27 * d):
        calls |= message_calls(f"rec, K = 128, d = {size:,}", rec, size)
    return calls


def secagg_calls(n=100, d=16_634):
    words = [seed_tree(0, "words", i).integers(0, 2**32, d) for i in range(n)]
    how = dict(threshold=14, neighbours=20, seed=0)
    how["drop"] = {i: "masked" for i in range(n // 10)}
    total, keys = np.zeros(1 << 22, np.uint32), [bytes([i]) * 16 for i in range(4)]
    many, rng, exact = 10**6, seed_tree(0, "noise"), discrete.discrete_gaussian
    name = "a million of discrete Gaussian, variance "
    return {
        f"session, {n} clients, d = {d:,}": partial(
            session.run_session, words, ring.Ring(32), **how
        ),
        "masks of 64 MiB": lambda: [masking.add_mask(total, key) for key in keys],
        f"{name}1e+04": partial(exact, 10**4, many, rng),
        f"{name}1e+12": partial(exact, 10**12, many, rng),
        "a million of Skellam, variance 1e+04": partial(skellam, 10**4, many, rng),
        "a million of normal floats": partial(normal, (many,), rng),
    }


if __name__ == "__main__":
    parts = dict(codecs=codec_calls, secagg=secagg_calls)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(parts))
    parser.add_argument("--repeats", type=int, default=5)
    args, rows = parser.parse_args(), []
    torch.set_num_threads(1)
    for name in args.names:
        costs = time_in_turns(parts[name](), args.repeats)
        rows += [median_row(name, "dpcomm", part, c) for part, c in costs.items()]
    print_record(rows, args.repeats)
