"""A deployment of four nodes, two runs, one node lost: what came of it, as JSON.

Runs as a process of its own, in a network that has loopback only where the system
allows it.
"""

import fcntl
import json
import signal
import socket
import struct
import sys
import time
from pathlib import Path

from dpcomm import deployment

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


def main(folder):
    folder, start, told = Path(folder), time.monotonic(), {}
    app = deployment.new(folder / "digits")
    with deployment.deployment(4, settings="insecure=true", metered=True) as here:
        told["up"] = time.monotonic() - start
        told["whole"] = play(here, app, folder / "whole", print, rounds=2)

        def lose(line):
            print(line, flush=True)
            if line.startswith("round 1:"):
                here.nodes[1].signal(signal.SIGKILL)

        told["lost"] = play(here, app, folder / "lost", lose, rounds=2)
        home, end = here.env["FLWR_HOME"], time.monotonic()
    told["stop"] = time.monotonic() - end
    told["left"] = deployment.left_over(home)
    told["seconds"] = time.monotonic() - start
    (folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    if "--alone" in sys.argv:
        raise_loopback()
    main(sys.argv[1])
