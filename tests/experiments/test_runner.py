"""Experiments end to end: through papermill and inline, killed and resumed, and every
mistake on the way.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
from checkout import EXPERIMENTS, MODULES, ROOT, python

from dpcomm import cli
from dpcomm.core import files
from dpcomm.experiments import runner
from dpcomm.experiments.runner import code_cells

NAMES = [path.stem.replace("_", "-") for path in EXPERIMENTS]
ASIDE = {
    "out",
    "resume",
    "max_seconds",
    "save_every",
    "commit",
    "dirty",
}  # how a run was made, not what it computed


def dpcomm(*words, root=ROOT, **more):
    "Run the command line in a process of its own."
    return python("-m", "dpcomm.cli", *words, root=root, **more)


def result(folder, name, scale="smoke"):
    "The one result an experiment left in a folder, and its paper."
    found = list(folder.glob(f"*/{name.replace('-', '_')}.{scale}.json"))
    assert len(found) == 1, f"{len(found)} results in {folder}: {found}"
    return json.loads(found[0].read_text())


def timeless(value):
    "A result without its times and without how the run was made."
    if isinstance(value, dict):
        return {
            k: timeless(v)
            for k, v in value.items()
            if "second" not in k and k not in ASIDE
        }
    return [timeless(v) for v in value] if isinstance(value, list) else value


# ---- every experiment notebook of the repository, at scale smoke

ENGINES = "example_level", "linear", "sqsgd_curves", "dprec_curves"


def engine_of(name: str) -> str:
    "What trains in a notebook: the first of ENGINES that its code names, or ''."
    code = runner.notebook(name).read_text(encoding="utf-8")
    return next((e for e in ENGINES if re.search(rf"import [^\"]*\b{e}\b", code)), "")


# Each notebook runs through papermill; one a trainer runs inline too, and is killed and resumed.
TWINS = sorted({engine_of(name): name for name in reversed(NAMES)}.values())


@pytest.fixture(scope="module")
def smoke(request, pool, tmp_path_factory):
    "Every selected experiment at smoke, through papermill and inline, two at a time."
    chosen = {
        item.callspec.params.get("name")
        for item in request.session.items
        if item.module is request.module and hasattr(item, "callspec")
    }

    def one(name, *options):
        folder = tmp_path_factory.mktemp(name)
        return folder, dpcomm(
            "run", name, "--scale", "smoke", "--out", folder, *options, cwd=folder
        )

    return {
        (name, way): pool.submit(one, name, *way)
        for name in NAMES
        if name in chosen
        for way in [(), ("--inline",)][: 1 + (name in TWINS)]
    }


@pytest.mark.parametrize("name", NAMES)
def test_smoke_through_papermill(name, smoke):
    folder, done = smoke[name, ()].result()
    assert done.returncode == 0, done.stderr[-6000:]
    ours = result(folder, name)
    assert (
        ours["schema"] == 1
        and ours["scale"] == "smoke"
        and ours["runs"]
        and ours["seeds"]
    )
    assert (folder / f"{name.replace('-', '_')}.smoke.ipynb").exists()
    assert (
        any(w in done.stdout for w in ("accuracy", "recall5", "mean squared error"))
        and any(w in done.stdout for w in ("eps", "no privacy"))
        and "GiB" in done.stdout
    )
    assert str(folder) not in json.dumps(ours) and str(ROOT) not in json.dumps(ours), (
        "the result names a path of this machine"
    )


def test_every_engine_has_a_twin():
    assert {engine_of(name) for name in TWINS} >= {*ENGINES} and len(TWINS) < 8


@pytest.mark.parametrize("name", TWINS)
def test_inline_computes_the_same(name, smoke):
    (through, _), (inline, done) = (
        smoke[name, ()].result(),
        smoke[name, ("--inline",)].result(),
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert timeless(result(inline, name)) == timeless(result(through, name))
    assert not list(inline.glob("*.ipynb"))


@pytest.mark.parametrize("name", NAMES)
def test_a_result_is_valid(name, smoke):
    from dpcomm.report import results

    folder, _ = smoke[name, ()].result()
    paper = next(folder.glob(f"*/{name.replace('-', '_')}.smoke.json")).parent.name
    assert result(folder, name)["paper"] == paper
    results.load_result(next(folder.glob(f"{paper}/*.json")))


def kill_when_saved(folder, *words, root=ROOT, seconds=120):
    "Start a run, wait for its first checkpoint, and kill it with SIGKILL."
    env = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "dpcomm.cli", *map(str, words)],
        env=env,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    stop = time.monotonic() + seconds
    while not any(
        path.is_file() and ".part" not in path.name
        for path in (folder / "checkpoints").rglob("*")
    ):
        assert process.poll() is None and time.monotonic() < stop, (
            "the run ended before it saved anything"
        )
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    return process.wait()


@pytest.fixture(scope="module")
def resumed(request, pool, smoke, tmp_path_factory):
    """Every selected experiment killed at its first checkpoint and resumed, two at a
    time.
    """
    chosen = {
        item.callspec.params["name"]
        for item in request.session.items
        if item.module is request.module
        and "resumed" in getattr(item, "fixturenames", ())
    }

    def one(name):
        folder = tmp_path_factory.mktemp(name)
        often = (
            ["-p", "save_every=0"] if "save_every" in runner.parameters(name) else []
        )
        words = ["run", name, "--scale", "smoke", "--inline", "--out", folder, *often]
        killed, left = kill_when_saved(folder, *words), list(folder.glob("*/*.json"))
        return killed, left, folder, dpcomm(*words, "--resume", cwd=folder)

    return {name: pool.submit(one, name) for name in TWINS if name in chosen}


@pytest.mark.parametrize("name", TWINS)
def test_kill_and_resume_gives_the_same_result(name, smoke, resumed):
    killed, left, folder, done = resumed[name].result()
    assert killed == -signal.SIGKILL
    assert not left, "a killed run left a result"
    assert done.returncode == 0, done.stderr[-6000:]
    straight, _ = smoke[name, ("--inline",)].result()
    assert timeless(result(folder, name)) == timeless(result(straight, name))


def test_a_table_is_printed_alone_and_a_paper_whole():
    from dpcomm.report import papers

    one, whole = dpcomm("table", "dprec", "d3"), dpcomm("table", "dprec")
    assert (
        one.returncode == whole.returncode == 0
        and one.stdout.count("quant8") >= 2
        and "femnist" not in one.stdout
    )
    assert all(f"\n{cell.key} " in whole.stdout for cell in papers.cells("dprec"))


# ---- the machinery, on a toy experiment in a checkout of its own

TOY = [
    ["parameters"],
    """
scale = 'smoke'; seeds = [0]; device = 'auto'; out = None; resume = False; max_seconds = None
rounds = 40; pause = 0.0
""",
    [],
    """
import json, os, time
from pathlib import Path
from dpcomm.experiments import runner
import matplotlib.pyplot as plt
""",
    [],
    """
print('guarantee and bits come first')
saved = Path(out) / 'checkpoints' / 'toy.json'
saved.parent.mkdir(parents=True, exist_ok=True)
state = json.loads(saved.read_text()) if resume and saved.exists() else dict(round=0, total=0.0, calls=0)
state['calls'] += 1
start = time.monotonic()
""",
    [],
    """
while state['round'] < rounds:
    state |= dict(round=state['round'] + 1, total=state['total'] + 1 / (1 + state['round']))
    Path(f'{saved}.part').write_text(json.dumps(state)); os.replace(f'{saved}.part', saved)
    time.sleep(pause)
    if max_seconds is not None and time.monotonic() - start > max_seconds: raise runner.Unfinished(f"round {state['round']}")
""",
    [],
    """
bits = dict(payload=8, header=0, shared_randomness=0, total=8, per_param=8.0)
run = dict(key='toy', bits=bits, guarantee=None, seeds=[dict(seed=s, final=dict(accuracy=100 * state['total'], uplink_bits=8, downlink_bits=8)) for s in seeds])
target = Path(out) / 'toy' / f'toy_run.{scale}.json'
target.parent.mkdir(exist_ok=True)
target.write_text(json.dumps(dict(schema=1, paper='toy', scale=scale, seeds=seeds, runs=[run], cells={}, calls=state['calls'], wall_seconds=1.0)))
""",
    [],
    """
plt.plot([0, 1]); plt.gcf()
""",
]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    "A checkout whose only experiment is a toy."
    root = tmp_path_factory.mktemp("toy")
    for module in MODULES:
        (root / module).parent.mkdir(parents=True, exist_ok=True)
        (root / module).write_text((ROOT / module).read_text())
    cells = [
        dict(
            cell_type="markdown",
            id="m",
            metadata={},
            source="# Toy\n\n> Does the machinery work?",
        )
    ]
    cells += [
        dict(
            cell_type="code",
            id=f"c{i}",
            metadata={"tags": tags} if tags else {},
            source=source.strip(),
            outputs=[],
            execution_count=None,
        )
        for i, (tags, source) in enumerate(zip(TOY[::2], TOY[1::2]))
    ]
    kernel = dict(name="python3", display_name="python3", language="python")
    (root / "nbs" / "experiments").mkdir(parents=True)
    (root / "nbs" / "experiments" / "toy_run.ipynb").write_text(
        json.dumps(
            dict(
                cells=cells,
                metadata=dict(kernelspec=kernel),
                nbformat=4,
                nbformat_minor=5,
            )
        )
    )
    return root


def test_list_names_the_experiment_and_its_question(toy):
    done = dpcomm("list", root=toy, cwd=toy)
    assert done.returncode == 0 and done.stdout.split() == [
        "toy-run",
        "Does",
        "the",
        "machinery",
        "work?",
    ]


def test_papermill_and_inline_agree(toy, tmp_path):
    for way in [], ["--inline"]:
        done = dpcomm(
            "run",
            "toy-run",
            "--out",
            tmp_path / f"out{len(way)}",
            "--seeds",
            "3,4",
            "-p",
            "rounds=5",
            *way,
            root=toy,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        assert (
            "guarantee and bits come first" in done.stdout
            and "accuracy 228.33 % (seeds: 2), uplink" in done.stdout
        )
        assert "payload 8" in done.stdout
    assert result(tmp_path / "out0", "toy-run") == result(tmp_path / "out1", "toy-run")
    executed = tmp_path / "out0" / "toy_run.smoke.ipynb"
    assert [tags for _, tags in code_cells(executed)][:2] == [
        ["parameters"],
        ["injected-parameters"],
    ]
    assert "image/png" in executed.read_text(), "the executed copy keeps the figure"
    assert not list((tmp_path / "out1").glob("*.ipynb")) and not list(toy.glob("runs"))


@pytest.mark.parametrize("way", [[], ["--inline"]], ids=["papermill", "inline"])
def test_max_seconds_is_reported_as_unfinished(toy, tmp_path, way):
    words = ["run", "toy-run", "--out", tmp_path, "-p", "pause=0.01", *way]
    done = dpcomm(
        *words, "--max-seconds", "0.5", "-p", "rounds=100000", root=toy, cwd=tmp_path
    )
    assert done.returncode == 3 and "resume with --resume" in done.stderr, done.stderr
    assert not list(tmp_path.glob("toy/*.json"))
    done = dpcomm(*words, "--resume", "-p", "rounds=3", root=toy, cwd=tmp_path)
    assert done.returncode == 0 and result(tmp_path, "toy-run")["calls"] == 2, (
        done.stderr
    )


def test_kill_and_resume_of_the_toy(toy, tmp_path):
    words = ["run", "toy-run", "--inline", "-p", "rounds=60"]
    assert (
        kill_when_saved(
            tmp_path, *words, "--out", tmp_path, "-p", "pause=0.2", root=toy
        )
        == -signal.SIGKILL
    )
    assert not list(tmp_path.glob("toy/*.json"))
    assert (
        dpcomm(*words, "--out", tmp_path, "--resume", root=toy, cwd=tmp_path).returncode
        == 0
    )
    assert (
        dpcomm(
            *words, "--out", tmp_path / "straight", root=toy, cwd=tmp_path
        ).returncode
        == 0
    )
    resumed = result(tmp_path, "toy-run")
    straight = result(tmp_path / "straight", "toy-run")
    assert (resumed.pop("calls"), straight.pop("calls")) == (2, 1) and timeless(
        resumed
    ) == timeless(straight)


@pytest.mark.parametrize("way", [[], ["--inline"]], ids=["papermill", "inline"])
def test_a_failing_cell_is_named(toy, tmp_path, way):
    done = dpcomm(
        "run",
        "toy-run",
        "--out",
        tmp_path,
        "-p",
        "pause=-1.0",
        *way,
        root=toy,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert (
        "dpcomm: toy_run.ipynb, code cell 4 (`while state['round'] < rounds:`):"
        " ValueError: sleep length" in done.stderr
    )
    assert "time.sleep(pause)" in done.stderr, "the traceback shows the line"
    assert "run_cells" not in done.stderr and "\x1b[" not in done.stderr


@pytest.mark.parametrize(
    "words, nearest",
    [
        (["run", "toy-rum"], "toy-run"),
        (["run", "toy-run", "--scale", "ful"], "full"),
        (["run", "toy-run", "-p", "round=3"], "rounds"),
        (["run", "toy-run", "--device", "gpu"], "cpu"),
        (["run", "toy-run", "toy-rum"], "toy-run"),
        (["runn", "toy-run"], "run"),
        (["run", "toy-run", "--sclae", "full"], "--scale"),
        (["run", "toy-run", "--seeds", "one"], "0,1,2"),
        (["run", "toy-run", "--seeds", "-1"], "0"),
        (["run", "toy-run", "-p", "rounds=many"], "int"),
        (["run", "toy-run", "-p", "rounds"], "name=value"),
        (["run", "toy-run", "--max-seconds", "0"], "above 0"),
        (["run", "toy-run", "--max-seconds", "soon"], "--help"),
        (["run"], "NAME"),
        ([], "list"),
        (["run", "toy-run", "--out", "nbs/here"], "nbs/"),
    ],
)
def test_a_mistake_costs_one_sentence(toy, words, nearest):
    done = dpcomm(*words, root=toy, cwd=toy)
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr.startswith("dpcomm: ")
        and done.stderr.count("\n") == 1
        and nearest in done.stderr
    ), done.stderr


def test_no_checkout_is_a_clear_error(tmp_path):
    for module in MODULES:
        (tmp_path / module).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / module).write_text((ROOT / module).read_text())
    done = dpcomm("list", root=tmp_path, cwd=tmp_path)
    assert done.returncode == 2 and "clone the repository" in done.stderr


def test_a_parameters_cell_holds_literals_only(toy, tmp_path):
    path = tmp_path / "x.ipynb"
    for source, tags, message in [
        ("a = 1 + b", ["parameters"], "name = literal"),
        ("print(1)", ["parameters"], "name = literal"),
        ("a = 1", [], "0 cells"),
    ]:
        path.write_text(
            json.dumps(
                {
                    "cells": [
                        {
                            "cell_type": "code",
                            "source": source,
                            "metadata": {"tags": tags},
                        }
                    ]
                }
            )
        )
        with pytest.raises(ValueError, match=message):
            runner.defaults(path)
    assert (
        runner.defaults(toy / "nbs" / "experiments" / "toy_run.ipynb")["rounds"] == 40
    )


def test_a_machine_without_papermill_or_jupyter(toy, tmp_path):
    blocked = (
        "import sys; sys.modules.update(dict.fromkeys(['papermill', 'IPython',"
        " 'nbformat', 'jupyter_client', 'nbdev']))\n"
    )
    code = (
        blocked
        + "from dpcomm.cli import main; sys.exit(main(['run', 'toy-run', '--out',"
        f" {str(tmp_path)!r}, *sys.argv[1:]]))"
    )
    assert python("-c", code, "--inline", root=toy, cwd=tmp_path).returncode == 0
    done = python("-c", code, root=toy, cwd=tmp_path)
    assert done.returncode == 2 and "--inline" in done.stderr


def test_starting_the_command_needs_no_torch(toy):
    code = (
        "import sys; from dpcomm.cli import main; main(['list']); main(['run', 'x']);"
        " assert 'torch' not in sys.modules"
    )
    assert python("-c", code, root=toy, cwd=toy).returncode == 0


def test_pieces_of_the_command_line():
    assert cli.assignments(["a=1", "b=x=y", "c=[0.5]"]) == {
        "a": 1,
        "b": "x=y",
        "c": [0.5],
    }
    assert cli.seed_list("2,0") == [2, 0] and cli.literal("None") is None
    with pytest.raises(ValueError, match="name=value"):
        cli.assignments(["a"])
    with pytest.raises(ValueError, match="0,1,2"):
        cli.seed_list("0;1")


def test_a_summary_gives_means_over_seeds():
    finals = [
        dict(accuracy=a, uplink_bits=2**33, downlink_bits=2**34) for a in (80.0, 90.0)
    ]
    bits = dict(payload=56, header=0, shared_randomness=32, total=88, per_param=0.5)
    told = cli.summary(
        dict(
            runs=[
                dict(
                    key="x",
                    guarantee=None,
                    bits=bits,
                    seeds=[dict(final=f) for f in finals],
                )
            ]
        )
    )
    assert (
        "accuracy 85.00 % (seeds: 2), uplink 1 GiB, downlink 2 GiB" in told
        and "payload 56" in told
        and "no privacy" in told
    )


def test_devices_and_names_are_checked():
    assert runner.device("cpu") == "cpu" and runner.device().split(":")[0] in (
        "cpu",
        "cuda",
    )
    with pytest.raises(ValueError, match="did you mean 'cpu'"):
        runner.device("gpu")
    assert runner.device("auto", gpu=False) == runner.device("cpu", gpu=False) == "cpu"
    for name in ("cuda", "cuda:1"):
        with pytest.raises(ValueError, match="computes on the CPU only; use 'cpu'"):
            runner.device(name, gpu=False)
    with pytest.raises(ValueError, match="torch finds .* GPU here"):
        runner.device("cuda:99")


@pytest.mark.parametrize("name", runner.experiments())
def test_every_experiment_asks_the_runner_for_its_device(name):
    path = runner.notebook(name)
    assert runner.defaults(path)["device"] == "auto"
    code = "\n".join(source for source, _ in runner.code_cells(path))
    assert code.count("runner.device(device") == 1
    with pytest.raises(ValueError, match="did you mean 'b'"):
        runner.check_name("letter", "bb", ["a", "b"])
    assert runner.check_name("letter", "a", ["a", "b"]) == "a"


@pytest.mark.parametrize(
    "values",
    [
        {"rate": "1"},
        {"rate": True},
        {"n": 1.0},
        {"seeds": 1},
        {"seeds": []},
        {"seeds": [1, 1]},
        {"seeds": [0.5]},
    ],
)
def test_parameters_keep_the_type_of_their_default(values):
    known = {"rate": 0.5, "n": 1, "seeds": [0], "out": None}
    assert runner.check_parameters(
        known, {"rate": 1, "n": 2, "seeds": [2, 0], "out": "x"}
    )
    with pytest.raises(ValueError):
        runner.check_parameters(known, values)


def test_differences_name_ours_and_the_papers():
    @dataclass(frozen=True)
    class Config:
        rounds: int
        lr: float

    assert runner.differences(Config(3, 0.1), Config(9, 0.1)) == "rounds = 3 (paper: 9)"
    assert (
        runner.differences(Config(9, 0.1), Config(9, 0.1))
        == "every setting is the paper's"
    )


def test_only_a_result_of_this_run_counts(tmp_path):
    (tmp_path / "p").mkdir()
    for name, age in ("x.smoke", 100), ("x_variant.smoke", 50), ("x.full", 1):
        path = tmp_path / "p" / f"{name}.json"
        path.write_text("{}")
        os.utime(path, (time.time() - age, time.time() - age))
    assert runner.result_file("x", "smoke", tmp_path).name == "x_variant.smoke.json"
    assert runner.result_file("x", "smoke", tmp_path, since=time.time() - 10) is None
    assert (
        runner.output_folder(tmp_path) == tmp_path
        and runner.output_folder() == runner.checkout() / "runs"
    )


def test_cells_run_in_order_with_the_last_value_shown(tmp_path, capsys):
    sources = [
        ("x = 1", ["parameters"]),
        ("x + 1", []),
        ("x;", []),
        ("display('shown')", []),
    ]
    path = tmp_path / "x.ipynb"
    path.write_text(
        json.dumps(
            {
                "cells": [
                    {"cell_type": "code", "source": s, "metadata": {"tags": t}}
                    for s, t in sources
                ]
            }
        )
    )
    assert runner.run_cells(path, {"x": 5})["x"] == 5
    assert capsys.readouterr().out == "6\nshown\n"


def checkout_of(tmp_path, monkeypatch, *sources):
    """A checkout whose only experiment has these cells; the package believes it lives
    there.
    """
    folder = tmp_path / "nbs" / "experiments"
    folder.mkdir(parents=True)
    cells = [
        {"cell_type": "markdown", "id": "m", "metadata": {}, "source": "# X\n\n> Why?"}
    ]
    cells += [
        {
            "cell_type": "code",
            "id": f"c{i}",
            "metadata": {} if i else {"tags": ["parameters"]},
            "source": source,
            "outputs": [],
            "execution_count": None,
        }
        for i, source in enumerate(sources)
    ]
    kernel = {
        "kernelspec": {"name": "gone", "display_name": "gone", "language": "python"}
    }
    (folder / "x_y.ipynb").write_text(
        json.dumps(
            {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
        )
    )
    monkeypatch.setattr(runner, "checkout", lambda: tmp_path)
    return folder / "x_y.ipynb"


SHARED = (
    "scale = 'smoke'; seeds = [0]; device = 'auto'; out = None; resume = False;"
    " max_seconds = None"
)


def test_a_page_with_rounds_left_is_no_failed_cell(tmp_path, monkeypatch):
    stop = "from dpcomm.experiments import runner\nraise runner.Unfinished('3 left')"
    path = checkout_of(tmp_path, monkeypatch, SHARED, stop)
    with pytest.raises(runner.Unfinished, match="3 left"):
        runner.run_cells(path, {})


def test_names_of_experiments(tmp_path, monkeypatch):
    path = checkout_of(tmp_path, monkeypatch, SHARED)
    assert (
        runner.experiments() == {"x-y": path}
        and runner.notebook("x_y") == runner.notebook("x-y") == path
    )
    assert runner.question("x-y") == "Why?" and list(runner.parameters("x-y")) == [
        part.split(" =")[0] for part in SHARED.split("; ")
    ]
    found, folder, values = runner.prepare(
        "x-y", "quick", seeds=(1, 2), parameters={"device": "cpu"}
    )
    assert (
        (found, folder) == (path, tmp_path / "runs")
        and values["seeds"] == [1, 2]
        and values["scale"] == "quick"
        and values["device"] == "cpu"
    )


def test_run_returns_an_outcome_and_refuses_a_silent_notebook(tmp_path, monkeypatch):
    checkout_of(
        tmp_path,
        monkeypatch,
        SHARED,
        "if resume:\n    import pathlib; p = pathlib.Path(out) / 'p'; p.mkdir(); (p /"
        " f'x_y.{scale}.json').write_text('{}')",
    )
    with pytest.raises(runner.CellError, match="wrote no x_y.smoke.json"):
        runner.run("x-y", inline=True)
    outcome = runner.run("x-y", inline=True, resume=True)
    assert (
        isinstance(outcome, runner.Outcome)
        and outcome.finished
        and outcome.notebook is None
    )
    assert outcome.result == tmp_path / "runs" / "p" / "x_y.smoke.json"


def test_a_missing_kernelspec_falls_back_to_a_python_kernel(tmp_path, monkeypatch):
    path = checkout_of(tmp_path, monkeypatch, "n = 1", "assert n == 2")
    runner.run_papermill(
        path, tmp_path / "done.ipynb", {"n": 2}
    )  # the notebook names a kernel that is not installed
    with pytest.raises(
        runner.CellError,
        match=r"x_y.ipynb, code cell 2 \(`assert n == 2`\): AssertionError",
    ):
        runner.run_papermill(path, tmp_path / "failed.ipynb", {"n": 3})


def test_a_budget_spent_leaves_the_rest_for_the_next_call(monkeypatch, capsys):
    """`run_all` gives every experiment what is left of --max-seconds, and starts none
    without a second left.
    """
    given = []

    def run(name, max_seconds, **settings):
        given.append((name, max_seconds))
        time.sleep(0.05)
        return runner.Outcome(name, "smoke", None, None, False, 0.05)

    monkeypatch.setattr(cli.runner, "run", run)
    monkeypatch.setattr(cli.runner, "prepare", lambda name, **settings: None)
    code = cli.run_all(cli._parse(["run", "a", "b", "--max-seconds", "0.04"]))
    assert (
        code == 3 and [name for name, _ in given] == ["a"] and 0 < given[0][1] <= 0.04
    )
    assert "a, b; resume with --resume" in capsys.readouterr().err


# ---- parts of an experiment


def test_a_part_is_made_once_and_again_when_its_stamp_changes(tmp_path):
    made, path = [], tmp_path / "deep" / "part.json"

    def make():
        return made.append(1) or {"value": len(made)}

    def call(stamp, resume=True):
        return runner.checkpointed(path, stamp, make, resume)["value"]

    assert [
        call({"lr": (1, 2)}),
        call({"lr": [1, 2]}),
        call({"lr": [1, 3]}),
        call({"lr": [1, 3]}, resume=False),
    ] == [1, 1, 2, 3]
    assert (
        json.loads(files.read_sealed(path)) == {"value": 3, "stamp": {"lr": [1, 3]}}
        and len(list(path.parent.iterdir())) == 1
    )


def test_a_part_that_fails_leaves_the_old_one(tmp_path):
    path = tmp_path / "part.json"
    runner.checkpointed(path, {}, lambda: {"value": 1})
    with pytest.raises(ZeroDivisionError):
        runner.checkpointed(path, {"new": 1}, lambda: 1 / 0)
    assert json.loads(files.read_sealed(path))["value"] == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[:-5],
        lambda whole: b"",
        lambda whole: whole.replace(b"1", b"7"),
        lambda whole: b'{"value": 1}',
    ],
)
def test_a_damaged_part_is_refused_with_a_sentence(damage, tmp_path):
    path = tmp_path / "part.json"
    runner.checkpointed(path, {}, lambda: {"value": 1})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(
        ValueError, match="part.json is damaged .*: delete it, or run without resume"
    ):
        runner.checkpointed(path, {}, lambda: {"value": 2}, resume=True)
    assert runner.checkpointed(path, {}, lambda: {"value": 2})["value"] == 2


def test_the_code_hash_is_of_the_code_alone():
    found = runner.code_hash("dprec-mnist")
    assert (
        found == runner.code_hash("dprec_mnist")
        and len(found) == 12
        and int(found, 16) >= 0
    )
    assert found != runner.code_hash("dprec-mean")
