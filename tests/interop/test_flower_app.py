"The app that `dpcomm flower new` lays out, its own two components called by Flower's types."

import importlib
import tomllib

import pytest
from flower_nodes import Grid, identity
from flwr.app import Context, RecordDict

from dpcomm import cli
from dpcomm.interop import floor, sums

pytestmark = pytest.mark.flower
_, PARTS = identity, ("client", "server")  # a fixture


def laid_out(folder, name, monkeypatch, *words, **change):
    "An app's settings and its two modules."
    assert cli.main(["flower", "new", str(folder / name), *words]) == 0
    table = tomllib.loads((folder / name / "pyproject.toml").read_text("utf-8"))
    monkeypatch.syspath_prepend(str(folder / name))
    config = table["tool"]["flwr"]["app"]["config"] | change
    both = (importlib.import_module(f"{name}.{part}_app") for part in PARTS)
    return config, *both


def run(folder, config, client, server, **floors):
    "Play a run, each node with a copy of the app's floor; the nodes."
    (place,) = folder.glob("*/floor.toml")
    text = place.read_text("utf-8")
    for name, value in floors.items():
        text = text.replace(f"{name} = ", f"{name} = {value} #", 1)

    def settings(node):
        place = floor.write_private(folder / f"{node}" / "floor.toml", text.encode())
        own = {"partition-id": node - 1000, "floor": str(place)}
        return own | (dict(keys=config["keys"]) if config["keys"] else {})

    nodes = Grid(client.app, config["clients"], settings, config)
    server.app(nodes, Context(7, 1, {}, RecordDict(), config))
    return nodes


@pytest.mark.parametrize("strategy", ["FedAvg", "FedAdam"])
def test_the_app_learns_within_its_floor(strategy, tmp_path, monkeypatch, capsys):
    "At least 80 % at epsilon 8, delta 1e-3, for a client who is replaced."
    config, *both = laid_out(tmp_path, strategy.lower(), monkeypatch, strategy=strategy)
    assert (config["eps"], config["delta"]) == (8.0, 1e-3)
    nodes = run(tmp_path, config, *both)
    said = capsys.readouterr().out
    last = next(s for s in reversed(said.splitlines()) if s.startswith("round "))
    assert last.startswith("round 30: accuracy ") and float(last[19:-1]) >= 80, last
    assert float(said.rpartition("eps = ")[2].split()[0]) <= 8.0
    assert not any(reply.has_error() for replies in nodes.seen for reply in replies)
    for reply in nodes.seen[0]:
        assert not reply.content.array_records, "weights left a client in the clear"
        assert not reply.content.metric_records


def test_the_app_of_secure_sums_learns(tmp_path, monkeypatch, capsys):
    keys = sums.generate_keys(tmp_path / "keys", 12, least=6)
    small = dict(clients=12, cohort=6, rounds=6, eps=1e4, keys=str(keys))
    config, *both = laid_out(tmp_path, "sums", monkeypatch, "--sums", **small)
    assert config["mechanism"] == "ddgauss" and config["trust"] == "secagg"
    wide = dict(epsilon_round=1e9, epsilon_total=1e9, noise=0.0, clients=12)
    nodes = run(tmp_path, config, *both, **wide)
    said = capsys.readouterr().out
    scores = [s for s in said.splitlines() if s.startswith("round ")]
    assert "skipped" not in said and float(scores[-1][18:-1]) > 40, scores
    for replies in nodes.seen:
        assert not any(reply.content.array_records for reply in replies)
