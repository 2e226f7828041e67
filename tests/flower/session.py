"""A deployment of four nodes: one run, and one secure sum in which a node is killed.

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

from dpcomm import deployment, flower_sums
from dpcomm.secagg.protocol import MASKED

SECONDS = 75.0  # that a round may take: four times what it takes on two idle cores


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
    deployment.finish(here, deployment.submit(here, app, **settings), 240, say)
    return time.monotonic() - start


def kill_before_its_vector(node, claims):
    "Wait until the last client owes its masked vector, and kill its node."
    deployment.wait_for(
        "the last client's third reply",
        240,
        lambda: list(claims.glob(f"*-3-0-{MASKED}.state")),
    )
    node.signal(signal.SIGKILL)


def main(folder):
    folder, start, told = Path(folder), time.monotonic(), {}
    app = deployment.new(folder / "digits")
    summed = deployment.new(folder / "summed", sums=True)
    keys, claims = str(flower_sums.enrol(folder / "keys", 4)), folder / "claims"
    settings = f'insecure=true keys="{keys}" claims="{claims}"'
    with deployment.deployment(4, settings=settings, metered=True) as here:
        told["up"] = time.monotonic() - start
        told["whole"] = play(here, app, folder / "whole", print, rounds=1)
        act = kill_before_its_vector, (here.nodes[3], claims)
        threading.Thread(target=act[0], args=act[1], daemon=True).start()
        more = dict(rounds=1, keys=keys)
        told["summed"] = play(here, summed, folder / "summed-out", print, **more)
        home, end = here.env["FLWR_HOME"], time.monotonic()
    told["stop"] = time.monotonic() - end
    told["left"] = deployment.left_over(home)
    told["seconds"] = time.monotonic() - start
    (folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    if "--alone" in sys.argv:
        raise_loopback()
    main(sys.argv[1])
