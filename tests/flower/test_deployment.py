"Laying an app out, ports, daemons and meters, without Flower."

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import meter
import pytest
from checkout import ROOT

import dpcomm
from dpcomm import cli, commands
from dpcomm.core.checks import NotInstalled
from dpcomm.core.random import seed_tree
from dpcomm.flower import client as flower
from dpcomm.interop import flower_app as deployment
from dpcomm.training import federated, models
from dpcomm.training.floor import TRUST, Beyond, afford, allow, read_floor

GAUSSIAN = dpcomm.mechanism("gaussian", clip_norm=1.0, sigma=1.0)
SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]


def test_an_app_is_laid_out_once(tmp_path, capsys):
    folder = tmp_path / "mine"
    assert cli.main(["flower", "new", str(folder)]) == 0
    assert "dpcomm flower try" in capsys.readouterr().out
    setup = tomllib.loads((folder / "pyproject.toml").read_text())
    parts = setup["tool"]["flwr"]["app"]["components"]
    assert parts == dict(
        serverapp="mine.server_app:app", clientapp="mine.client_app:app"
    )
    for path in folder.rglob("*.py"):
        compile(path.read_text(), path, "exec")
    assert cli.main(["flower", "new", str(folder)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_an_app_of_secure_sums_is_laid_out(tmp_path):
    plain, summed = tmp_path / "plain", tmp_path / "summed"
    assert cli.main(["flower", "new", str(plain), "--loop"]) == 0
    assert cli.main(["flower", "new", str(summed), "--sums", "--loop"]) == 0
    one, other = (
        tomllib.loads((p / "pyproject.toml").read_text())["tool"]["flwr"]["app"][
            "config"
        ]
        for p in (plain, summed)
    )
    assert one["sums"] is False and other["sums"] is True
    changed = {key for key in one if one[key] != other[key]}
    assert changed == set(deployment.IN_SUMS) and set(one) == set(other)
    with deployment.with_test_keys(plain, 1) as (node, server):
        assert server == {} and "keys=" not in node and "floor=" in node
    with deployment.with_test_keys(summed, 2) as (node, server):
        folder = server["keys"]
        assert f'keys="{folder}"' in node and os.path.isfile(f"{folder}/client-1.key")
        own = tomllib.loads("\n".join(node.replace("NODE", "1").split()))
        limits = read_floor(own["floor"])
        assert limits.clients == 2 and limits.mechanisms == ["ddgauss"]
        assert limits.claims == Path(own["floor"]).parent / "claims"
    assert not os.path.exists(folder)


def test_one_sentence_says_whom_to_trust_wherever_a_user_decides():
    "On SECURITY's first screen and on the page; `new` and the server have their tests."
    for path in ("SECURITY.md", "nbs/flower/client.ipynb"):
        told = (ROOT / path).read_text(encoding="utf-8")
        assert 0 < told.replace("`", "").find(TRUST) < 6000, path
    told = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "example.org" not in told + (ROOT / "settings.ini").read_text()


@pytest.mark.parametrize("sums", [False, True])
def test_a_floor_is_laid_out_that_fits_the_example_and_no_more(sums, tmp_path, capsys):
    folder = tmp_path / "mine"
    assert cli.main(["flower", "new", str(folder), "--loop", *["--sums"] * sums]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert TRUST in said and "floor.toml limits what a node takes part in" in said
    assert stat.S_IMODE((folder / "floor.toml").stat().st_mode) == 0o600
    limits = read_floor(folder / "floor.toml")
    config = tomllib.loads((folder / "pyproject.toml").read_text())
    assert config["project"]["dependencies"] == []
    asked = config["tool"]["flwr"]["app"]["config"]
    given = commands.assignments(asked["parameters"].split())
    made = dpcomm.mechanism(asked["mechanism"], **given)
    apart = flower.RemoteFederation(4, sums=None)
    run = federated.Config(rounds=asked["rounds"], cohort=4)
    model = models.build(asked["model"], seed_tree(0))
    task = federated.Task(model, apart, made, run, 0)
    assert limits.epsilon_round * 0.97 < allow(limits, task).eps <= limits.epsilon_round
    whole = afford(limits, made, 7850, asked["rounds"])
    assert limits.epsilon_total * 0.97 < whole <= limits.epsilon_total
    for beyond in (
        replace(made, clip_norm=1.1),
        GAUSSIAN,
    ):
        with pytest.raises(Beyond):
            allow(limits, replace(task, mechanism=beyond))
    with pytest.raises(Beyond, match="epsilon_total"):
        afford(limits, made, 7850, asked["rounds"] + 1)


@pytest.mark.parametrize("name", ["Mine", "1st", "a-b", "a b", "é"])
def test_a_name_that_python_cannot_import(tmp_path, name):
    with pytest.raises(ValueError, match="must be importable by Python"):
        deployment.new(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_the_command_refuses_what_it_does_not_know(tmp_path, capsys):
    assert cli.main(["flower", "nwe", str(tmp_path)]) == 2
    assert "new" in capsys.readouterr().err
    assert cli.main(["flower", "try", str(tmp_path)]) == 2
    assert "pyproject.toml" in capsys.readouterr().err


def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} of this machine"):
            deployment.open_port(port)
    assert 0 < deployment.open_port() < 2**16
    with pytest.raises(ValueError, match="port 70000"):
        deployment.open_port(70_000)


def test_without_flower_a_deployment_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    before = set(tmp_path.iterdir())
    with pytest.raises(NotInstalled, match="the extra flower brings it"):
        with deployment.deployment(1):
            pass
    assert set(tmp_path.iterdir()) == before


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="NOT CHECKED: no /proc here")
def test_stop_ends_what_was_started_and_what_that_started(tmp_path):
    env = os.environ | dict(FLWR_HOME=str(tmp_path))
    here = deployment.Deployment(tmp_path, env)
    here.link = deployment.Daemon("link", SLEEP, tmp_path, env)
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    own = subprocess.Popen(
        [sys.executable, "-c", stubborn], env=env, start_new_session=True
    )
    deployment.wait_for("up", 20, lambda: "up" in here.link.said())
    assert {here.link.process.pid, own.pid} == set(deployment.orphans(tmp_path))
    threading.Thread(target=own.wait, daemon=True).start()  # so that it is no zombie
    deployment.stop(here, 1.0)
    assert here.link.process.poll() is not None
    deployment.wait_for("the end", 20, lambda: not deployment.orphans(tmp_path))


def command(folder, text):
    "A Deployment whose `flwr` is a script of ours."
    script = folder / "flwr"
    script.write_text(f"#!{sys.executable}\n{text}")
    script.chmod(0o755)
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    return deployment.Deployment(folder, os.environ | dict(PATH=path))


def test_a_command_that_fails_with_code_0(tmp_path, monkeypatch):
    here = command(tmp_path, 'print(\'{"success": false, "error": "no link"}\')')
    monkeypatch.setenv("PATH", here.env["PATH"])
    with pytest.raises(ValueError, match="flwr run failed.*no link"):
        deployment.submit(here, tmp_path, rounds=2)


def test_a_command_that_never_answers(tmp_path, monkeypatch):
    here = command(tmp_path, "import time; time.sleep(60)")
    monkeypatch.setenv("PATH", here.env["PATH"])
    with pytest.raises(ValueError, match="did not answer within 0.5 s"):
        here.flwr("list", seconds=0.5)


def test_settings_are_written_as_toml(tmp_path, monkeypatch):
    text = "import sys, json\nprint(json.dumps({'success': True, 'run-id': sys.argv}))"
    here = command(tmp_path, text)
    monkeypatch.setenv("PATH", here.env["PATH"])
    words = deployment.submit(here, tmp_path, rounds=2, release="a='b'", out="x")
    for pair in ("rounds=2", 'release=\\"a=', 'out=\\"x\\"'):
        assert pair.replace("\\", "") in words


def test_a_run_is_followed_and_its_failure_told(tmp_path, monkeypatch):
    text = (
        "import sys, json\n"
        "if sys.argv[1] == 'log': print('round 1\\nINFO :  noise\\nValueError: why\\nFor more, see')\n"
        "else: print(json.dumps({'success': True, 'runs': [{'status': sys.argv[3]}]}))"
    )
    here = command(tmp_path, text)
    monkeypatch.setenv("PATH", here.env["PATH"])
    here.link = SimpleNamespace(check=lambda: None)
    said = []
    done = deployment.finish(here, "finished:completed", 20, said.append)
    assert done["status"] == "finished:completed"
    assert said == ["round 1", "ValueError: why", "For more, see"]
    with pytest.raises(ValueError, match="is finished:failed: ValueError: why"):
        deployment.finish(here, "finished:failed", 20)


def test_a_meter_passes_on_and_counts():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        passing = meter.Meter(server.getsockname()[1])
        begin = time.time()
        with socket.create_connection(("127.0.0.1", passing.port), timeout=5) as client:
            far, _ = server.accept()
            with far:
                client.sendall(b"x" * 1000)
                got = b""
                while len(got) < 1000:
                    got += far.recv(4096)
                far.sendall(b"yes")
                assert client.recv(16) == b"yes"
        assert passing.between(begin, time.time() + 1) == (1000, 3)
        assert passing.between(0, begin) == (0, 0)
        passing.close()


# ---- with commands of ours in Flower's place


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    "A folder of commands that is found first: `put(name, text of a Python script)`."
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(sys, "executable", str(folder / "python"))

    def put(name, text):
        (folder / name).write_text(f"#!{PYTHON}\n{text}")
        (folder / name).chmod(0o755)

    return put


PYTHON = sys.executable
SERVE = (
    "import http.server, sys\n"
    "class Answer(http.server.BaseHTTPRequestHandler):\n"
    "    def do_GET(self):\n"
    "        self.send_response(200)\n"
    "        self.end_headers()\n"
    "port = int(sys.argv[sys.argv.index('--port') + 1])\n"
    "http.server.HTTPServer(('127.0.0.1', port), Answer).serve_forever()\n"
)
NODE = "import time\nprint('Node ID: 1', flush=True)\ntime.sleep(60)\n"


def test_a_deployment_starts_and_stops(fakes):
    fakes("flower-superlink", SERVE)
    fakes("flower-supernode", NODE)
    meters = meter.Meters()
    with (
        meters,
        deployment.deployment(2, settings="insecure=true", through=meters) as here,
    ):
        assert len(here.nodes) == len(meters) == 2
        home, pids = here.folder, deployment.orphans(here.folder)
        assert "loop" in (home / "config.toml").read_text()
        assert len(pids) == 3 or not os.path.isdir("/proc")
    assert not home.exists() and deployment.orphans(home) == []
    assert here.link.process.poll() is not None


def test_a_deployment_whose_body_fails_leaves_nothing(fakes):
    fakes("flower-superlink", SERVE)
    fakes("flower-supernode", NODE)
    with pytest.raises(RuntimeError, match="mine"):
        with deployment.deployment(1) as here:
            raise RuntimeError("mine")
    assert here.link.process.poll() is not None
    assert here.nodes[0].process.poll() is not None


def test_a_node_that_is_refused_once_is_started_again(fakes, tmp_path):
    fakes("flower-superlink", SERVE)
    once = f"from pathlib import Path\nmark = Path({str(tmp_path / 'mark')!r})\n"
    once += "if not mark.exists():\n    mark.touch()\n    raise SystemExit(305 % 256)\n"
    fakes("flower-supernode", once + NODE)
    with deployment.deployment(1) as here:
        assert [node.name for node in here.nodes] == ["supernode-0-1"]
    fakes("flower-supernode", "raise SystemExit('Public key already in use')")
    with pytest.raises(ValueError, match="supernode-0-2 ended.*already in use"):
        with deployment.deployment(1):
            pass


def test_start_node_gives_up_at_its_deadline(fakes):
    fakes("flower-superlink", SERVE)
    fakes("flower-supernode", "import time\ntime.sleep(60)")
    with deployment.deployment(0) as here:
        with pytest.raises(ValueError, match="SuperNode 0 did not arrive within 0.5 s"):
            deployment.start_node(
                here, 0, deployment.open_port(), "partition-id=0", 0.5
            )
    assert here.nodes[0].process.poll() is not None


def test_a_link_that_dies_at_once_is_reported(fakes):
    fakes("flower-superlink", "raise SystemExit('no such option: --port')")
    with pytest.raises(ValueError, match="superlink ended with code 1: no such option"):
        with deployment.deployment(1):
            pass


def test_an_app_is_tried_and_weighed(fakes, tmp_path):
    fakes("flower-superlink", SERVE)
    fakes("flower-supernode", NODE)
    row = dict(asked=2, heard=2, message_bytes=56, object_bytes=500, model_bytes=800)
    fakes(
        "flwr",
        "import json, pathlib, sys, time, tomllib\n"
        "if sys.argv[1] == 'run':\n"
        "    words = sys.argv[sys.argv.index('--run-config') + 1].split()\n"
        "    given = tomllib.loads('\\n'.join(words))\n"
        "    out = given.get('out')\n"
        f"    row = {row!r} | dict(began=time.time(), seconds=1.0)\n"
        "    if out:\n"
        "        pathlib.Path(out).mkdir()\n"
        "        (pathlib.Path(out) / 'rounds.jsonl').write_text(json.dumps(row))\n"
        "if sys.argv[1] == 'log':\n"
        "    print('round 1: all is well')\n"
        "else:\n"
        "    runs = [dict(status='finished:completed')]\n"
        "    print(json.dumps({'success': True, 'run-id': '7', 'runs': runs}))\n",
    )
    app, said = deployment.new(tmp_path / "mine", loop=True), []
    deployment.try_app(app, 1, 30, said.append)
    assert said[-1] == "round 1: all is well"
    words = SimpleNamespace(what="try", folder=str(app), nodes=1, max_seconds=30)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert commands.flower_app(words) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    (found,) = meter.weigh(app, [dict(mechanism="rec")], 2, 30, said.append)
    sizes = dict(message_bytes=28, object_bytes=250, model_bytes=400, up=0, down=0)
    assert found == dict(mechanism="rec", seconds=1.0) | sizes
