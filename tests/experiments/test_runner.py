"""Experiments end to end: through papermill and inline, killed and resumed, and every
mistake on the way.
"""

import functools
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkout import EXPERIMENTS, MODULES, ROOT, page, python, settings
from made_up import made_up
from tables import tabled

from dpcomm import cli, commands
from dpcomm.evidence import paper_tables, records
from dpcomm.experiments.run import grids, runner, runs
from dpcomm.experiments.run.runner import code_cells

NAMES = [*runner.experiments()]
ASIDE = {
    "cost",
    "date",
    "commit",
    "dirty",
    "sha256",
}  # when a run was made, not what it gave


def dpcomm(*words, root=ROOT, **more):
    "Run the command line in a process of its own."
    wide = {"COLUMNS": "400"}
    return python("-m", "dpcomm.cli", *words, root=root, env=wide, **more)


def here(folder, *words) -> subprocess.CompletedProcess:
    """Run the command line in this process, which has imported what it needs; papermill
    still starts a process for the notebook.
    """
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        patch.chdir(folder)
        for name, value in (settings() | {"COLUMNS": "400"}).items():
            patch.setenv(name, value)
        code = cli.main([*words])
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def written(folder) -> list:
    "Lines of records in a folder."
    return [
        json.loads(line)
        for path in sorted(folder.glob("*/*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def result(folder, name, scale="smoke") -> dict:
    "(key, seed) -> the one record an experiment left of it in a folder."
    found = list(folder.glob("*/*.jsonl"))
    names = [path.name for path in found]
    assert names == [f"{name.replace('-', '_')}.{scale}.jsonl"], names
    lines = written(folder)
    once = {(line["key"], line["seed"]): line for line in lines}
    assert len(once) == len(lines) > 0
    return once


def timeless(value):
    "A result without its times and without when and at what commit it was made."
    if isinstance(value, dict):
        return {
            k: timeless(v)
            for k, v in value.items()
            if k not in ASIDE and "second" not in str(k)
        }
    return [timeless(v) for v in value] if isinstance(value, list) else value


# ---- every experiment notebook of the repository, at scale smoke

# One run of each trainer is played in the first tier, two of them through papermill; in the
# deep tier every experiment runs inline and whole, and those of the trainers are killed and
# resumed.
TRAINERS = {  # the experiment, and the runs whose keys begin so
    "configurations": ("dprec-quantised", "eps3.fedavg"),
    "scheme_grid": ("fltop-fmnist", "fl_top_dp"),
    "noise_scales": ("imvu-mnist", "imvu."),
    "held_out": ("imvu-femnist", "digits.imvu.eps2"),
    "fedsgd": ("sqsgd-mnist", "sqsgd."),
}
ONE = dict(TRAINERS.values())
TWINS = sorted(ONE)
KERNEL = "imvu-mnist"  # through papermill
KILLED = {  # runs of which the first is killed: two or more, or one that saves every round
    "dprec-quantised": "eps3.quant8-",
    "fltop-fmnist": "fl_top_dp",
    "imvu-femnist": "digits.gaussian",
    "imvu-mnist": "all",
    "sqsgd-mnist": "p",
}
PART = {  # whose other runs do the same at another epsilon, or by the other method
    "dprec-tight": r"eps3\.",
    "dprec-gap": r"(base|tanh|adam)\.eps3\.fedavg|(?!base|tanh|adam)\w+\.eps3\.rec",
}


def played(name: str, way: str) -> str:
    "How the keys begin that are played at smoke: of a trainer's experiment one run's."
    return "all" if way == "inline" else ONE[name]


@contextmanager
def part_of(name: str):
    "An experiment whose grid has the runs of PART alone."
    module = grids.find(name).module
    grid, wanted = module.grid, PART.get(name, "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            module,
            "grid",
            lambda scale: [run for run in grid(scale) if re.match(wanted, run.key)],
        )
        yield


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """(name, way) -> the folder and the outcome of an experiment at smoke, played once, in
    this process: what one experiment calibrates serves the next.
    """

    @functools.cache
    def made(name, way):
        folder = tmp_path_factory.mktemp(name)
        words = ["run", name, "--scale", "smoke", "--out", str(folder)]
        words += ["--inline"] * (way != "papermill")
        with part_of(name):
            return folder, here(folder, *words, "-p", f"only={played(name, way)}")

    return made


def parted(printed: str) -> tuple[str, str]:
    "The table of a run, and what it promises; the line that names its report is left out."
    lines = printed.rstrip().splitlines()
    lines = lines[:-1] if lines[-1].startswith("report ") else lines
    ends = (line.endswith("no privacy is claimed") for line in lines)
    start = next(i for i, end in enumerate(ends) if end or "eps = " in lines[i])
    return "\n".join(lines[:start]), "\n".join(lines[start:])


both_ways = pytest.mark.parametrize(
    "way",
    [
        pytest.param([], id="papermill", marks=pytest.mark.deep),
        pytest.param(["--inline"], id="inline"),
    ],
)


@pytest.mark.parametrize(
    "name, way",
    [(name, "papermill" if name == KERNEL else "one run") for name in TWINS]
    + [pytest.param(name, "inline", marks=pytest.mark.deep) for name in NAMES],
)
def test_smoke(name, way, smoke):
    "One run a trainer in the first tier; in the deep one every experiment."
    folder, done = smoke(name, way)
    assert done.returncode == 0, done.stderr[-6000:]
    ours = result(folder, name)
    with part_of(name):
        jobs = runs.select(grids.find(name), "smoke", [0], played(name, way))
    assert set(ours) == {(run.key, seed) for run, seed in jobs}
    kept = [path.name for path in folder.glob("*.ipynb")]
    assert kept == [f"{name.replace('-', '_')}.smoke.ipynb"] * (way == "papermill")
    table, promise = parted(done.stdout)
    ended = [record for record in ours.values() if record["final"]]
    sent = any("uplink_bits" in record["final"] for record in ended)
    promised = any(record["guarantee"] for record in ended)
    shown = {"epsilon": promised, "up, GiB": sent, "CPU minutes": bool(ended)}
    assert {name: name in table for name in shown} == shown
    for key in {record["key"] for record in ended}:
        assert re.search(rf"^ *{re.escape(key)} ", table, re.M), key
    private = any(record["guarantee"] for record in ours.values())
    assert (promise == "no privacy is claimed") is not private
    assert "delta" in promise or not private
    told = json.dumps(list(ours.values()))
    assert str(folder) not in told and str(ROOT) not in told, (
        "a record names a path of this machine"
    )
    records_are_valid(folder, grids.find(name))


def records_are_valid(folder, experiment):
    (path,) = folder.glob("*/*.jsonl")
    assert path.parent.name == experiment.paper
    for record in records.read(path):
        assert (record.paper, record.experiment) == (experiment.paper, experiment.stem)
        run = grids.find_run(experiment, "smoke", record.key)
        assert record.trained == run.trains
        assert record.origin["code"] == grids.code_hash(experiment.module.__name__)
        assert all(key.startswith("ours.") for key in record.cells)


def test_every_page_with_parameters_is_an_experiment():
    found = {path.relative_to(ROOT) for path in runner.experiments().values()}
    assert found == {*EXPERIMENTS}


@pytest.mark.deep
def test_inline_computes_the_same(smoke):
    ways = (smoke(KERNEL, way) for way in ("papermill", "inline"))
    one, whole = (result(folder, KERNEL) for folder, _ in ways)
    assert timeless(one) == timeless({key: whole[key] for key in one})


def saved(folder) -> list:
    "Checkpoints and records of a run."
    return [*folder.rglob("*.pt"), *folder.glob("*/*.jsonl")]


def wait_until_saved(folder, ended, seconds=1200):
    "Wait for the first checkpoint or record of a run, which goes on."
    stop = time.monotonic() + seconds
    while not saved(folder):
        assert not ended() and time.monotonic() < stop, (
            f"the run ended, or saved nothing in {seconds} s"
        )
        time.sleep(0.01)


def kill_when_saved(folder, *words, root=ROOT):
    "Start a run, wait for its first checkpoint or record, and kill it with SIGKILL."
    process = subprocess.Popen(
        [sys.executable, "-m", "dpcomm.cli", *map(str, words)],
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_until_saved(folder, lambda: process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    return process.wait()


@pytest.fixture
def killed(tmp_path, monkeypatch):
    """Words of a run -> its exit code, killed at the first checkpoint or record: in a fork
    of a process that has imported what runs import, and computed nothing.
    """
    monkeypatch.chdir(tmp_path)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dpcomm.commands", "torch._dynamo"])

    def kill(words):
        process = context.Process(target=cli.main, args=(words,))
        process.start()
        wait_until_saved(tmp_path, lambda: process.exitcode is not None)
        process.kill()
        process.join()
        return process.exitcode

    return kill


@pytest.mark.deep
@pytest.mark.parametrize("name", TWINS)
def test_kill_and_resume_gives_the_same_result(name, smoke, killed, tmp_path):
    "It is resumed in another process than it was killed in, which is this one."
    words = ["run", name, "--scale", "smoke", "--inline", "--out", str(tmp_path)]
    words += ["-p", "save_every=0"] if "save_every" in runner.parameters(name) else []
    words += ["-p", f"only={KILLED[name]}"]
    assert killed(words) == -signal.SIGKILL
    left, done = len(written(tmp_path)), here(tmp_path, *words, "--resume")
    assert done.returncode == 0, done.stderr[-6000:]
    straight, _ = smoke(name, "inline")
    whole, ours = result(straight, name), result(tmp_path, name)
    assert left < len(ours), "it was killed before its end"
    assert timeless(ours) == timeless({key: whole[key] for key in ours})
    jobs = runs.select(grids.find(name), "smoke", [0], KILLED[name])
    assert {key for key, _ in ours} == {run.key for run, _ in jobs}


def test_a_table_is_printed_alone_and_a_paper_whole():
    one, whole = dpcomm("table", "dprec", "d3"), dpcomm("table", "dprec")
    assert one.returncode == whole.returncode == 0
    assert one.stdout.count("quant8") >= 2 and "femnist" not in one.stdout
    for cell in paper_tables.cells("dprec"):
        assert re.search(rf"^ *{re.escape(cell.key)} ", whole.stdout, re.M), cell.key


# ---- the machinery, on a toy experiment in a checkout of its own

TOY_MODULE = """
import json, os, time
from dpcomm.experiments.run.grids import Run

BITS = dict(payload=8, header=0, shared_randomness=0, total=8, per_param=8.0)

def settings(scale):
    return {}

def grid(scale):
    return [Run("toy", "a harmonic sum", scale, ("ours.toy",))]

def run_one(run, seed, rounds, pause, checkpoint, resume, max_seconds, **how):
    state = dict(round=0, total=float(seed), calls=0)
    if resume and checkpoint.exists():
        state = json.loads(checkpoint.read_text())
    state["calls"] += 1
    assert 1 / (rounds + 1) > 0
    start, part = time.monotonic(), checkpoint.with_suffix(".part")
    while state["round"] < rounds:
        state["round"] += 1
        state["total"] += 1 / state["round"]
        part.write_text(json.dumps(state))
        os.replace(part, checkpoint)
        time.sleep(pause)
        if max_seconds is not None and time.monotonic() - start > max_seconds:
            return None
    score = 10 * state["total"]
    sent = dict(uplink_bits=2**33, downlink_bits=2**32)
    notes = [f"{state['calls']} calls"]
    cells = {"ours.toy": [score, "percent"]}
    final = dict(accuracy=score, **sent)
    return dict(final=final, cells=cells, bits=BITS, notes=notes)
"""
TOY = [
    (
        """scale = 'smoke'
seeds = [0]
device = 'auto'
out = None
resume = False
max_seconds = None
rounds = 40
pause = 0.0
only = 'all'
""",
        "parameters",
    ),
    (
        "import matplotlib.pyplot as plt\nfrom dpcomm.experiments.run import grids, runs",
    ),
    ("print('guarantee and bits come first')",),
    (
        "found = runs.run_grid('toy-run', scale, seeds, out, only, resume, max_seconds,"
        " rounds=rounds, pause=pause)",
    ),
    ("plt.plot([0, 1]); plt.gcf()",),
]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    "A checkout whose only experiment is a toy."
    root = tmp_path_factory.mktemp("toy")
    for module in MODULES:
        (root / module).parent.mkdir(parents=True, exist_ok=True)
        (root / module).write_text((ROOT / module).read_text())
    assets = Path("dpcomm") / "assets"
    shutil.copytree(ROOT / assets / "papers", root / assets / "papers")
    (root / "dpcomm" / "experiments" / "toy_run.py").write_text(TOY_MODULE)
    page(root / "nbs" / "experiments" / "toy_run.ipynb", *TOY)
    return root


def test_list_names_the_experiment_and_what_it_needs(toy):
    done = dpcomm("list", root=toy, cwd=toy)
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if "toy-run" in line]
    assert row.split()[:3] == ["toy-run", "across", "1"] and "bundled" in row
    assert row.rstrip().endswith("0/1")


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
        said = " ".join(done.stdout.split())
        assert "run n accuracy, % up, GiB down, GiB CPU minutes" in said
        assert re.search(r"\ntoy +2 +57.83 \+/- 5 +1 +0.5 +\S+ *\n", done.stdout)
        assert re.search(r"no privacy is claimed report \S+\.html$", said)
    through, inline = (result(tmp_path / f"out{n}", "toy-run") for n in (0, 1))
    assert set(through) == {("toy", 3), ("toy", 4)}
    assert timeless(through) == timeless(inline)
    executed = tmp_path / "out0" / "toy_run.smoke.ipynb"
    assert [tags for _, tags in code_cells(executed)][:2] == [
        ["parameters"],
        ["injected-parameters"],
    ]
    kept = executed.read_text()
    assert "image/png" in kept, "the executed copy keeps the figure"
    assert '"guarantee and bits come first\\n"' in kept, "and what was printed"
    assert not list((tmp_path / "out1").glob("*.ipynb")) and not list(toy.glob("runs"))
    said = (tmp_path / "out1" / "toy_run.smoke.txt").read_text()
    assert "guarantee and bits come first" in said


@both_ways
def test_max_seconds_is_reported_as_unfinished(toy, tmp_path, way):
    words = ["run", "toy-run", "--out", tmp_path, "-p", "pause=0.01", *way]
    done = dpcomm(
        *words, "--max-seconds", "0.5", "-p", "rounds=100000", root=toy, cwd=tmp_path
    )
    assert done.returncode == 3 and "resume with --resume" in done.stderr, done.stderr
    assert not written(tmp_path)
    done = dpcomm(*words, "--resume", "-p", "rounds=3", root=toy, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert result(tmp_path, "toy-run")["toy", 0]["notes"] == ["2 calls"]


@both_ways
def test_a_failing_cell_is_named(toy, tmp_path, way):
    words = ["run", "toy-run", "--out", tmp_path, *way]
    cell = (
        "dpcomm: toy_run.ipynb, code cell 4 (`found = runs.run_grid('toy-run', scale,"
    )
    done = dpcomm(*words, "-p", "rounds=-1", root=toy, cwd=tmp_path)
    assert done.returncode == 1 and not written(tmp_path)
    assert cell in done.stderr and "): ZeroDivisionError: division by" in done.stderr
    assert "assert 1 / (rounds + 1) > 0" in done.stderr, "the traceback shows the line"
    assert "run_cells" not in done.stderr and "\x1b[" not in done.stderr


@both_ways
def test_a_wrong_value_that_a_cell_refuses_costs_one_sentence(toy, tmp_path, way):
    words = ["run", "toy-run", "--out", tmp_path, *way]
    done = dpcomm(*words, "-p", "pause=-1.0", root=toy, cwd=tmp_path)
    assert done.returncode == 2 and not written(tmp_path)
    assert done.stderr.startswith("dpcomm: toy_run.ipynb, code cell 4 (`found = ")
    assert "): ValueError: sleep length" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_a_parameters_cell_holds_literals_only(toy, tmp_path):
    path = tmp_path / "x.ipynb"
    for source, tags, message in [
        ("a = 1 + b", ["parameters"], "name = literal"),
        ("print(1)", ["parameters"], "name = literal"),
        ("a = 1", [], "0 cells"),
    ]:
        page(path, (source, *tags))
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


def test_commands_that_only_tell_need_no_torch(tmp_path):
    verbs = ["list"], ["data"], ["table", "sqsgd"], ["sweep", "--plan"], ["run", "x"]
    code = (
        f"import sys; from dpcomm.cli import main; codes = [main(w) for w in {verbs}];"
        " assert codes == [0, 0, 0, 0, 2]; assert 'torch' not in sys.modules"
    )
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_pieces_of_the_command_line():
    assert commands.assignments(["a=1", "b=x=y", "c=[0.5]"]) == {
        "a": 1,
        "b": "x=y",
        "c": [0.5],
    }
    assert commands.seed_list("2,0") == [2, 0] and commands.literal("None") is None
    with pytest.raises(ValueError, match="name=value"):
        commands.assignments(["a"])
    with pytest.raises(ValueError, match="0,1,2"):
        commands.seed_list("0;1")


def test_a_summary_gives_means_over_seeds_and_the_first_guarantee():
    def record(seed, **more):
        final = dict(accuracy=80.0 + 10 * seed, uplink_bits=2**33, downlink_bits=2**34)
        given = dict(final=final) | more
        return made_up("x", seed, cost={"cpu_seconds": 120.0}, **given)

    table, promise = commands.summary([record(0), record(1)], "A title")
    assert table.title == "A title" and promise == "no privacy is claimed"
    assert table.rows == (("x", "2", "85 +/- 5", "", "1", "2", "2"),)
    found = records.load("dprec", "dprec_mnist", "full")
    first = next(r.guarantee for r in found if r.guarantee)
    _, promise = commands.summary([record(0), record(1, guarantee=first)])
    assert f"eps = {first['eps']:.4g}"[:10] in promise and "delta" in promise


def test_devices_and_names_are_checked():
    assert runner.device("cpu") == "cpu" and runner.device().split(":")[0] in (
        "cpu",
        "cuda",
    )
    with pytest.raises(ValueError, match="did you mean 'cpu'"):
        runner.device("gpu")
    assert runner.device("auto", gpu=False) == runner.device("cpu", gpu=False) == "cpu"
    for name in ("cuda", "cuda:1"):
        with pytest.raises(ValueError, match="runs only on the CPU: use 'cpu'"):
            runner.device(name, gpu=False)
    with pytest.raises(ValueError, match="torch finds .* GPU here"):
        runner.device("cuda:99")


@tabled("name", runner.experiments())
def test_every_experiment_asks_the_runner_for_its_device(name):
    path = runner.notebook(name)
    assert runner.defaults(path)["device"] == "auto"
    code = "\n".join(source for source, _ in runner.code_cells(path))
    assert code.count("runner.device(device") == 1
    with pytest.raises(ValueError, match="did you mean 'b'"):
        runner.check_name("letter", "bb", ["a", "b"])
    assert runner.check_name("letter", "a", ["a", "b"]) == "a"


@tabled(
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


def test_the_records_of_one_experiment_and_scale_are_found(tmp_path):
    (tmp_path / "p").mkdir()
    for name in ("x_y.smoke", "x_y_variant.smoke", "x_y.full", "x.smoke"):
        (tmp_path / "p" / f"{name}.jsonl").write_text("")
    for name, scale in (("x-y", "smoke"), ("x_y", "full"), ("x", "smoke")):
        found = runner.result_file(name, scale, tmp_path)
        assert found == tmp_path / "p" / f"{name.replace('-', '_')}.{scale}.jsonl"
    assert runner.result_file("x-y", "quick", tmp_path) is None
    assert runner.result_file("y", "smoke", tmp_path) is None
    assert runner.output_folder(tmp_path) == tmp_path
    assert runner.output_folder() == runner.checkout() / "runs"


def test_without_a_checkout_the_copies_in_the_package_serve(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "PACKAGE", tmp_path / "site" / "dpcomm")
    monkeypatch.chdir(tmp_path)
    assert runner.checkout() is None
    with pytest.raises(FileNotFoundError, match="clone the repository"):
        runner.notebooks()
    copies = tmp_path / "site" / "dpcomm" / "assets" / "experiments"
    copies.mkdir(parents=True)
    assert runner.notebooks() == copies and runner.experiments() == {}
    assert runner.output_folder() == tmp_path / "runs"


def test_cells_run_in_order_with_the_last_value_shown(tmp_path, capsys):
    sources = ("x = 1", "parameters"), ("x + 1",), ("x;",), ("display('shown')",)
    path = page(tmp_path / "x.ipynb", *sources)
    assert runner.run_cells(path, {"x": 5})["x"] == 5
    assert capsys.readouterr().out == "6\nshown\n"


def checkout_of(tmp_path, monkeypatch, *sources):
    """A checkout whose only experiment has these cells; the package believes it lives
    there.
    """
    monkeypatch.setattr(runner, "checkout", lambda: tmp_path)
    first, *others = sources
    cells = (first, "parameters"), *((source,) for source in others)
    return page(tmp_path / "nbs" / "experiments" / "x_y.ipynb", *cells, kernel="gone")


SHARED = (
    "scale = 'smoke'; seeds = [0]; device = 'auto'; out = None; resume = False;"
    " max_seconds = None"
)


def test_run_returns_an_outcome_and_refuses_a_silent_notebook(tmp_path, monkeypatch):
    checkout_of(
        tmp_path,
        monkeypatch,
        SHARED,
        "if resume:\n    import pathlib; p = pathlib.Path(out) / 'p'; p.mkdir(); (p /"
        " f'x_y.{scale}.jsonl').write_text('')",
    )
    with pytest.raises(
        runner.CellError, match="without writing x_y.smoke.jsonl: .*run_grid"
    ):
        runner.run("x-y", inline=True)
    outcome = runner.run("x-y", inline=True, resume=True)
    assert (
        isinstance(outcome, runner.Outcome)
        and outcome.finished
        and outcome.notebook is None
    )
    assert outcome.result == tmp_path / "runs" / "p" / "x_y.smoke.jsonl"


def test_the_kernel_is_this_python_whatever_jupyter_finds(tmp_path, monkeypatch):
    "A shared `python3` of another environment, as a JupyterHub has it."
    spec = tmp_path / "shared" / "kernels" / "python3"
    spec.mkdir(parents=True)
    other = tmp_path / "other"
    other.write_text(f'#!/bin/sh\ntouch "{tmp_path}/ran"\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    words = [str(other), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    about = dict(argv=words, display_name="shared", language="python")
    (spec / "kernel.json").write_text(json.dumps(about))
    monkeypatch.setenv("JUPYTER_PATH", str(spec.parents[1]))
    same = f"import sys; assert sys.executable == {sys.executable!r}, sys.executable"
    path = checkout_of(tmp_path, monkeypatch, "n = 1", same)
    runner.run_papermill(path, tmp_path / "done.ipynb", {})
    assert not (tmp_path / "ran").exists()
    assert os.environ["JUPYTER_PATH"] == str(spec.parents[1]), "set back"


def test_a_gpu_that_is_not_there_is_refused_before_anything_starts(monkeypatch):
    for name in ("cuda:99", "cuda:-1", "cuda:x"):
        with pytest.raises(ValueError, match="torch finds .* GPU here"):
            runner.prepare("dprec-mnist", parameters={"device": name})
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="torch finds no GPU here"):
        runner.prepare("dprec-mnist", parameters={"device": "cuda"})
    runner.prepare("dprec-mnist", parameters={"device": "cpu"})


def test_a_budget_spent_leaves_the_rest_for_the_next_call(monkeypatch, capsys):
    """`run_all` gives every experiment what is left of --max-seconds, and starts none
    without a second left.
    """
    given = []

    def run(name, max_seconds, **settings):
        given.append((name, max_seconds))
        time.sleep(0.05)
        return runner.Outcome(name, "smoke", None, None, False, 0.05)

    monkeypatch.setattr(commands.runner, "run", run)
    monkeypatch.setattr(commands.runner, "prepare", lambda name, **settings: None)
    monkeypatch.setattr(grids, "find", lambda name: name)
    monkeypatch.setattr(runs, "select", lambda name, scale, seeds, only: [])
    code = commands.run_all(cli._parse(["run", "a", "b", "--max-seconds", "0.04"]))
    assert (
        code == 3 and [name for name, _ in given] == ["a"] and 0 < given[0][1] <= 0.04
    )
    assert "a, b; resume with --resume" in capsys.readouterr().err


INTERRUPTED = """
import os, signal
from dpcomm import Deployment, train
from dpcomm.core.random import seed_tree
from dpcomm.training.callbacks import Callback
from torch import nn

class Stop(Callback):
    def after_round(self, run, task, loss):
        if run.round == 2:
            os.kill(os.getppid(), signal.SIGINT)

x = seed_tree(0, "x").normal(size=(6, 4, 3))
place = Deployment(n_clients=6, cohort=3, rounds=100_000, d=8, delta=1e-2)
made = place.calibrate("gaussian", eps=8, clip_norm=1.0)
people = [(rows, [0, 1, 0, 1]) for rows in x]
how = dict(test=people[0], checkpoint=kept, eval_every=100_000, engine="loop")
train(nn.Linear(3, 2), people, made, place, callbacks=[Stop()], **how)
"""


@pytest.mark.deep
def test_an_interruption_reaches_the_kernel_which_saves_its_round(tmp_path, capfd):
    kept = tmp_path / "run.pt"
    path = page(tmp_path / "long.ipynb", ("kept = ''", "parameters"), (INTERRUPTED,))
    with pytest.raises(KeyboardInterrupt):
        runner.run_papermill(path, tmp_path / "done.ipynb", {"kept": str(kept)})
    assert kept.exists() and "finishing the round" in capfd.readouterr().err
