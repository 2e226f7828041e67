"The app that `dpcomm flower new` lays out, its own two components called by Flower's types."

import importlib
import stat
import sys
import tomllib

import pytest
from test_native import HERE, identity
from test_native_sums import Summing

from dpcomm import cli
from dpcomm.interop import flower_app as deployment
from dpcomm.interop import sums
from dpcomm.training.floor import TRUST, read_floor, write_private

if HERE:
    from flwr.app import Context, RecordDict
_ = identity  # a fixture


def laid_out(folder, monkeypatch, *words, **change):
    "An app's settings and its two modules."
    assert cli.main(["flower", "new", str(folder / "mine"), *words]) == 0
    table = tomllib.loads((folder / "mine" / "pyproject.toml").read_text("utf-8"))
    monkeypatch.syspath_prepend(str(folder / "mine"))
    for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
        monkeypatch.delitem(sys.modules, name)
    config = table["tool"]["flwr"]["app"]["config"] | change
    both = (importlib.import_module(f"mine.{n}_app") for n in ("client", "server"))
    return config, *both


class Enough(Exception):
    "A run was looked at long enough."


class Nodes(Summing):
    "Nodes that know the run's settings and their owner's."

    def __init__(self, app, config, **own):
        super().__init__(app)
        self.n, self.config, self.own = config["clients"], config, own

    def send_and_receive(self, messages, timeout=None):
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            own = {k: v.replace("NODE", str(node)) for k, v in self.own.items()}
            own |= {"partition-id": node - 1000}
            given = Context(7, node, own, RecordDict(), self.config)
            replies.append(self.app(message, given))
        self.seen.append(replies)
        return replies


def run(config, client, server, **own):
    "Play a run; the nodes."
    nodes = Nodes(client.app, config, **own)
    server.app(nodes, Context(7, 1, {}, RecordDict(), config))
    return nodes


@pytest.mark.parametrize("strategy", ["FedAvg", "FedAdam"])
@pytest.mark.flower
@pytest.mark.deep
def test_the_app_learns(strategy, tmp_path, monkeypatch, capsys):
    "At least 80 % at epsilon 8, delta 1e-3, for a client who is replaced."
    config, *both = laid_out(tmp_path, monkeypatch, strategy=strategy)
    assert (config["eps"], config["delta"]) == (8.0, 1e-3)
    run(config, *both)
    said = capsys.readouterr().out
    last = next(s for s in reversed(said.splitlines()) if s.startswith("round "))
    assert last.startswith("round 30: accuracy ") and float(last[19:-1]) >= 80, last
    assert float(said.rpartition("eps = ")[2].split()[0]) <= 8.0


@pytest.mark.flower
@pytest.mark.deep
def test_the_app_of_secure_sums_learns(tmp_path, monkeypatch, capsys):
    keys = sums.generate_keys(tmp_path / "keys", 12, least=6)
    small = dict(clients=12, cohort=6, rounds=6, eps=1e4, keys=str(keys))
    config, *both = laid_out(tmp_path, monkeypatch, "--sums", **small)
    assert config["mechanism"] == "ddgauss" and config["trust"] == "secagg"
    nodes = run(config, *both, keys=str(keys))
    said = capsys.readouterr().out
    scores = [s for s in said.splitlines() if s.startswith("round ")]
    assert "skipped" not in said and float(scores[-1][18:-1]) > 40, scores
    for replies in nodes.seen:
        assert not any(reply.content.array_records for reply in replies)


@pytest.mark.flower
@pytest.mark.deep
def test_a_nodes_owner_has_the_last_word(tmp_path, monkeypatch):
    config, *both = laid_out(tmp_path, monkeypatch)
    text = (tmp_path / "mine" / "floor.toml").read_text("utf-8")
    told = []
    for said in (text, text.replace("clip = 0.5", "clip = 0.1")):
        for node in range(1000, 1000 + config["clients"]):
            write_private(tmp_path / str(node) / "floor.toml", said.encode())
        own = dict(floor=str(tmp_path / "NODE" / "floor.toml"))
        replies = first_round(config, *both, **own)
        told.append({r.error.reason for r in replies if r.has_error()})
    assert told[0] == set()
    assert told[1] == {
        "dpcomm: clip is 0.1 on this machine, and the run asks 0.5: stay within it, or"
        " ask the machine's owner"
    }


def first_round(config, client, server, **own):
    "What the nodes reply in a run's first round."

    class Once(Nodes):
        def send_and_receive(self, messages, timeout=None):
            super().send_and_receive(messages, timeout)
            raise Enough

    nodes = Once(client.app, config, **own)
    with pytest.raises(Enough):
        server.app(nodes, Context(7, 1, {}, RecordDict(), config))
    return nodes.seen[0]


@pytest.mark.parametrize("words", [[], ["--sums"]])
def test_an_app_is_laid_out_with_a_floor_and_no_dependency(words, tmp_path, capsys):
    folder = tmp_path / "mine"
    assert cli.main(["flower", "new", str(folder), *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert TRUST in said and "dpcomm flower try" in said
    table = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
    assert table["project"]["dependencies"] == []
    config = table["tool"]["flwr"]["app"]["config"]
    assert stat.S_IMODE((folder / "floor.toml").stat().st_mode) == 0o600
    limits = read_floor(folder / "floor.toml")
    assert limits.mechanisms == [config["mechanism"]]
    assert (limits.clients, limits.rounds) == (config["clients"], config["rounds"])
    assert limits.trusted_server == (config["trust"] == "central")
    source = deployment.APPS / "app"
    assert {p.name for p in (folder / "mine").iterdir()} == {
        p.name for p in source.glob("*.py")
    }
    for path in folder.rglob("*.py"):
        compile(path.read_text(), path, "exec")
