"The client: its share of the digits, its number, its floor and its keys."

import os
from dataclasses import replace

from dpcomm import flower
from dpcomm.core.random import seed_tree
from dpcomm.datasets import images
from dpcomm.flower.sums import read_keys
from dpcomm.training.floor import read_floor

from .plan import plan, situation


def node(config, own):
    "One client, from the run's settings and those of its SuperNode."
    client = own["partition-id"]
    floor = read_floor(own.get("floor") or os.environ.get("DPCOMM_FLOOR"))
    data, rng = images.load("digits"), seed_tree(config["seed"], "partition")
    parts = images.iid(len(data.y), config["clients"], rng)
    federation = images.Federation(data, parts, "iid")
    mine, identity = flower.own_part(federation, client), None
    if own.get("keys"):
        identity, sums = read_keys(own["keys"], f"client-{client}")
        mine = replace(mine, sums=sums if config["sums"] else None)
    who = client, own.get("insecure", False), floor, identity
    return flower.Node(plan(config, mine), *who, situation(config))


app = flower.client_app(node)
