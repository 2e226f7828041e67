"""A deployment of four nodes: one run, one that asks for raw updates, the native app under
two strategies of Flower, and one secure sum in which a node is killed.

Runs as a process of its own, in a network that has loopback only where the system
allows it.
"""

import fcntl
import json
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path

from dpcomm.interop import flower_app as deployment
from dpcomm.interop import sums
from dpcomm.interop.flower_app import APPS
from dpcomm.secagg.errors import MASKED
from dpcomm.training.floor import write_private

SENT = "Sent successfully"  # in the log of a SuperNode, after every reply
SECONDS = 75.0  # that a step may take; ten are usual. Flower reports a node that was
# killed after a minute, and nobody waits longer.
LIMIT = 900.0  # that a run may take; a sum is six steps
RAW = dict(mechanism="gaussian", parameters="clip_norm=1000.0 sigma=1e-9 local=True")


def raise_loopback():
    "In a new network namespace even loopback is down."
    up, running = 1, 64
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        asked = struct.pack("16sh14x", b"lo", up | running)
        fcntl.ioctl(probe, 0x8914, asked)  # SIOCSIFFLAGS


def play(here, app, out, say, **settings):
    "One run, and the seconds it took."
    start = time.monotonic()
    settings |= dict(out=str(out), seconds=SECONDS, least=2)
    deployment.finish(here, deployment.submit(here, app, **settings), LIMIT, say)
    return time.monotonic() - start


def ask_for_raw_updates(here, app, folder):
    "A submitter's run, and what its server prints; the error that ends it."
    said, settings = [], RAW | dict(trust="central", rounds=1)
    try:
        play(here, app, folder / "raw", said.append, **settings)
    except ValueError as error:
        return [*said, str(error)]
    return said


def one_round(here, app, strategy):
    "What the server of the native app prints, with a strategy of Flower as it is."
    said, four = [], dict(clients=4, cohort=4, rounds=1, strategy=strategy)
    four |= dict(mechanism="imvu", trust="local", clip=1.0, eps=4.0)
    deployment.finish(here, deployment.submit(here, app, **four), LIMIT, said.append)
    return said


def floors(folder):
    "A floor for each node, wide enough for the apps and no wider."
    wide = deployment.LOOP_FLOOR | dict(
        mechanisms='["rec", "ddgauss", "imvu"]', epsilon_total="40.0"
    )
    text = deployment._changed((APPS / "floor.toml").read_text("utf-8"), wide)
    for i in range(4):
        write_private(folder / f"node-{i}" / "floor.toml", text.encode())
    return folder / "node-NODE" / "floor.toml"


def kill_before_its_vector(node):
    "Wait until a node has sent its third step of the sum, and kill it."
    before, three = node.said().count(SENT), 1 + MASKED  # with its greeting
    wait = lambda: node.said().count(SENT) >= before + three  # noqa: E731
    deployment.wait_for("the last client's third step", LIMIT, wait)
    node.signal(signal.SIGKILL)


def told_by(here):
    "The last lines of every daemon."
    for daemon in [here.link, *here.nodes]:
        lines = daemon.said().splitlines()[-20:]
        print(f"--- {daemon.name}", *lines, sep="\n", file=sys.stderr)


def main(folder):
    folder, start, told = Path(folder), time.monotonic(), {}
    native = deployment.new(folder / "native")
    app = deployment.new(folder / "digits", loop=True)
    summed = deployment.new(folder / "summed", sums=True, loop=True)
    keys = str(sums.generate_keys(folder / "keys", 4))
    settings = f'insecure=true keys="{keys}" floor="{floors(folder / "nodes")}"'
    with deployment.deployment(4, settings=settings) as here:
        told["up"] = time.monotonic() - start
        try:
            one = dict(rounds=1, keys=keys)
            told["whole"] = play(here, app, folder / "whole", print, **one)
            told["raw"] = ask_for_raw_updates(here, app, folder)
            told["native"] = [one_round(here, native, s) for s in ("FedAvg", "FedAdam")]
            last = here.nodes[3]
            act = dict(target=kill_before_its_vector, args=(last,), daemon=True)
            threading.Thread(**act).start()
            told["summed"] = play(here, summed, folder / "summed-out", print, **one)
        except ValueError:
            told_by(here)
            raise
        home, end = here.env["FLWR_HOME"], time.monotonic()
    told["stop"] = time.monotonic() - end
    told["left"] = deployment.orphans(home)
    told["seconds"] = time.monotonic() - start
    (folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    if "--alone" in sys.argv:
        raise_loopback()
    main(sys.argv[1])
