"""Bytes that nodes of Flower and their SuperLink exchange, counted by a proxy for each node:
the last table of nbs/reference/flower.ipynb.
"""

import json
import socket
import threading
import time
import tomllib
from contextlib import suppress
from pathlib import Path

from dpcomm.interop import flower_app
from dpcomm.training import models


class Meter:
    "A proxy on loopback that counts bytes both ways."

    def __init__(self, port):  # of the SuperLink
        self.target, self.seen, self.server = port, [], socket.socket()
        self.server.bind(("127.0.0.1", 0))
        self.server.listen(64)
        self.port = self.server.getsockname()[1]
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        "Take connections until closed."
        with suppress(OSError):
            while True:
                near, _ = self.server.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
                for way in ((near, far, "up"), (far, near, "down")):
                    threading.Thread(target=self.carry, args=way, daemon=True).start()

    def carry(self, source, sink, way):
        "Pass bytes on in one direction."
        with suppress(OSError):
            while data := source.recv(2**16):
                self.seen.append((time.time(), way, len(data)))
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def between(self, begin, end):
        "Bytes up and down from one moment to another, seconds since 1970."
        seen = [s for s in list(self.seen) if begin <= s[0] < end]
        return tuple(sum(n for _, w, n in seen if w == way) for way in ("up", "down"))

    def close(self):
        "Stop listening."
        with suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()


class Meters(list):
    "A meter for each node of a deployment."

    def __call__(self, port):
        "Where a node connects to in the SuperLink's place."
        self.append(Meter(port))
        return self[-1].port

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for meter in self:
            meter.close()


def weigh(app, cases, nodes=4, seconds=600.0, say=print):
    """Bytes of messages, of Flower's objects, and on the wire, per client and round, of
    runs of an app with other settings, each a dict.
    """
    found, meters = [], Meters()
    wide = flower_app.with_test_keys(app, nodes, _wide(app, cases))
    with (
        meters,
        wide as (own, run),
        flower_app.deployment(nodes, settings=own, through=meters) as here,
    ):
        for i, case in enumerate(cases):
            out = here.folder / f"out-{i}"
            number = flower_app.submit(
                here, app, clients=nodes, out=str(out), **run | case
            )
            flower_app.finish(here, number, seconds, say)
            rows = [json.loads(r) for r in (out / "rounds.jsonl").open("rb")]
            rows = [r for r in rows if r["heard"] == r["asked"]]
            spans = [(r["began"], r["began"] + r["seconds"]) for r in rows]
            wire = [m.between(*span) for m in meters for span in spans]
            heard = sum(r["heard"] for r in rows)
            told = {k: sum(r[k] for r in rows) / heard for k in SIZES}
            up, down = (sum(way) / heard for way in zip(*wire))
            spent = sum(r["seconds"] for r in rows) / len(rows)
            found.append(case | told | dict(up=up, down=down, seconds=spent))
    return found


SIZES = "message_bytes", "object_bytes", "model_bytes"


def _wide(app, cases):
    "A floor under which all cases may run: for meters, not for data."
    text = (Path(app) / "pyproject.toml").read_text("utf-8")
    own = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
    runs, built = [own | case for case in cases], {}
    for name in {run["model"] for run in runs}:
        built[name] = [list(p.shape) for p in models.MODELS[name][0]().parameters()]
    limits = dict(mechanisms=sorted({run["mechanism"] for run in runs}), noise=0.0)
    limits |= dict.fromkeys(("clip", "epsilon_round", "epsilon_total"), 1e300)
    limits |= dict(delta=1e-5, clients=1, rounds=10**6, models=list(built.values()))
    limits |= dict(trusted_server=True, simulation=True)
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in limits.items())
