"One run: its page through papermill, parameters, devices, folders, and mistakes on the way."

import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time

import pytest
from checkout import EXPERIMENTS, ROOT, page, python
from tables import tabled

from dpcomm import cli
from dpcomm.core.checks import NotInstalled
from dpcomm.evidence import paper_tables, records
from dpcomm.experiments.run import runs

ASIDE = {"cost", "date", "commit", "dirty", "sha256"}  # when and where a run was made
TRAINERS = {  # of each way to train an experiment, and runs of it
    "dprec-quantised": "eps3.quant8-",
    "fltop-fmnist": "fl_top_dp",
    "imvu-femnist": "digits.gaussian",
    "imvu-mnist": "imvu.",
    "sqsgd-mnist": "sqsgd.",
}


def timeless(value):
    "A result without its times and without when and at what commit it was made."
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k not in ASIDE}
        return {k: timeless(v) for k, v in kept.items() if "second" not in str(k)}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def written(folder) -> dict:
    "(key, seed) -> record of a folder."
    lines = [
        json.loads(line)
        for path in sorted(folder.glob("*/*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    once = {(line["key"], line["seed"]): line for line in lines}
    assert len(once) == len(lines)
    return once


# ---- every experiment at scale smoke


@tabled("name", TRAINERS)
def test_smoke_leaves_records_that_fit_the_grid(name, tmp_path):
    only = TRAINERS[name]
    folder = tmp_path / name
    made = runs.run_grid(name, "smoke", [0], folder, only)
    experiment = runs.find(name)
    jobs = runs.select(runs.Costs(experiment, "smoke"), [0], only)
    assert {(r.key, r.seed) for r in made} == {(job.key, job.seed) for job in jobs}
    trains = {job.key: job.run.trains for job in jobs}
    (path,) = folder.glob("*/*.jsonl")
    assert path.parent.name == experiment.paper
    for record in records.read(path):
        assert record.trained == trains[record.key]
        assert record.origin["code"] == experiment.code
        assert all(key.startswith("ours.") for key in record.cells)
    told = path.read_text(encoding="utf-8")
    assert str(tmp_path) not in told and str(ROOT) not in told


@pytest.mark.slow
@tabled("name", [n for n in runs.experiments() if n not in TRAINERS])
def test_every_experiment_runs_at_smoke(name, tmp_path):
    only = {"dprec-tight": "eps3", "dprec-gap": "base", "frontier": "u"}.get(
        name, "all"
    )
    assert runs.run_grid(name, "smoke", [0], tmp_path / name, only)


def sweep_of(name, folder):
    words = ["sweep", name, "--scale", "smoke", "--seeds", "0", "--out", str(folder)]
    return [*words, "--only", TRAINERS[name]]


@pytest.mark.slow
@tabled("name", TRAINERS)
def test_kill_and_resume_gives_the_same_result(name, tmp_path):
    "It is resumed in another process than it was killed in, which is this one."
    tmp_path = tmp_path / name
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=cli.main, args=(sweep_of(name, tmp_path),))
    process.start()
    end = time.monotonic() + 1200
    while not [*tmp_path.rglob("*.pt"), *tmp_path.glob("*/*.jsonl")]:
        assert process.exitcode is None and time.monotonic() < end
        time.sleep(0.01)
    process.kill()
    process.join()
    assert process.exitcode in (-signal.SIGKILL, 0)  # the shortest may have ended
    assert cli.main(sweep_of(name, tmp_path)) == 0
    assert cli.main(sweep_of(name, tmp_path / "straight")) == 0
    assert timeless(list(written(tmp_path).values())) == timeless(
        list(written(tmp_path / "straight").values())
    )


def test_every_page_with_parameters_is_an_experiment():
    found = {path.relative_to(ROOT) for path in runs.experiments().values()}
    assert found == {*EXPERIMENTS}
    for path in runs.experiments().values():
        assert runs.defaults(path)["device"] == "auto"
        assert path.read_text("utf-8").count("runs.device(device") == 1


# ---- a notebook of one's own, from the command line to a verdict

GUIDE = ROOT / "nbs" / "use"
SETTINGS = """scale = 'smoke'
seeds = [0]
out = None
resume = False
max_seconds = None"""
TINY = """from dpcomm.experiments.lines import Line
from dpcomm.experiments.run import runs
SIZE = 3


def grid(scale):
    return [Line('one', 'One', scale, trains=False, seeds=(0, 1))]


def run_one(run, seed, **how):
    return dict(final={'mse': 2.0 * SIZE + seed})


own = runs.own('tiny', grid, run_one)
runs.run_grid(own, scale, seeds, out, 'all', resume, max_seconds)"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    "A folder of somebody's own with the guide's two files."
    for name in ("experiment.ipynb", "digits.toml"):
        shutil.copy(GUIDE / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paper_tables, "_read", {})
    return tmp_path


@pytest.mark.slow
def test_a_notebook_of_ones_own_is_run_and_compared(folder, capsys):
    words = ["--scale", "full", "--seeds", "0", "-p", "only=gaussian"]
    assert cli.main(["run", "experiment.ipynb", *words]) == 0
    said = capsys.readouterr()
    assert said.err.splitlines()[0] == f"writing records and pages to {folder / 'runs'}"
    assert "gaussian" in said.out and "report " in said.out
    html = (folder / "runs" / "experiment.full.html").read_text("utf-8")
    assert "Noise of the server" in html and not re.search(r"<script[^>]* src=", html)
    found = records.read(folder / "runs" / "digits" / "experiment.full.jsonl")
    assert [(r.paper, r.key, r.seed) for r in found] == [("digits", "gaussian", 0)]
    paper_tables._read.clear()  # as another process, which has only the records
    assert cli.main(["table", "digits", "--out", "runs"]) == 0
    assert "gaussian.accuracy" in capsys.readouterr().out
    assert "digits" not in paper_tables.papers(), "the package's stay the package's"


def tiny(folder, *words, old="SIZE", new="SIZE"):
    "Exit code and records of a notebook that trains nothing."
    page(folder / "tiny.ipynb", (SETTINGS, "parameters"), (TINY.replace(old, new),))
    code = cli.main(["run", "tiny.ipynb", *words])
    path = folder / "runs" / "across" / "tiny.smoke.jsonl"
    return code, records.read(path) if path.is_file() else ()


def test_what_stands_is_not_played_again_and_other_code_is_another_record(
    folder, capsys
):
    code, first = tiny(folder)
    assert code == 0 and len(first) == 1
    assert tiny(folder) == tiny(folder, "--resume") == (0, first)
    code, both = tiny(folder, old="2.0", new="3.0")
    assert code == 0 and re.search(r"one +1 +9 ", capsys.readouterr().out)
    assert [r.final["mse"] for r in both] == [9.0, 6.0], "what was run last counts"
    assert both[0].code != both[1].code
    assert [r.code for r in tiny(folder)[1]] == [r.code for r in both[::-1]]
    assert tiny(folder, "--max-seconds", "0")[0] == 3
    assert "--resume" in capsys.readouterr().err


def test_a_record_of_other_parameters_or_code_is_not_resumed(folder, capsys):
    settings = f"{SETTINGS}\nlr = 2.0\nonly = 'all'"

    def run(*words, new="lr"):
        cells = (settings, "parameters"), (TINY.replace("2.0", new),)
        page(folder / "tiny.ipynb", *cells)
        code = cli.main(["run", "tiny.ipynb", *words])
        made = records.read(folder / "runs" / "across" / "tiny.smoke.jsonl")
        return code, [r.final["mse"] for r in made]

    assert run() == run("--resume", "-p", "only=one", "-p", "lr=2") == (0, [6.0])
    for new, words in ("lr", ["-p", "lr=4"]), ("3 * lr", []):
        assert run("--resume", *words, new=new) == (1, [6.0])
        why = "one.seed0 was made by other code or parameters: run without --resume"
        assert why in capsys.readouterr().err
    assert run("-p", "lr=4") == run("-p", "lr=4", "--resume") == (0, [12.0, 6.0])


def test_a_file_that_is_no_notebook_costs_one_sentence(folder, capsys):
    bare = '{"cells": [{"metadata": {"tags": ["parameters"]}}]}'
    cells = [dict(source=SETTINGS, metadata=dict(tags=["parameters"]))]
    for content in ("", "[]", '{"cells": 5}', bare, json.dumps(dict(cells=cells))):
        (folder / "x.ipynb").write_text(content)
        assert cli.main(["run", "x.ipynb"]) == 2
        *_, said = capsys.readouterr().err.splitlines()
        assert said.startswith("dpcomm: x.ipynb is not valid (")


def test_a_kernel_reads_no_startup_file_and_is_this_python(folder, monkeypatch, capsys):
    "Nor a shared `python3` of another environment, as a JupyterHub has it."
    startup = folder / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "00.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()")
    spec = folder / "shared" / "kernels" / "python3"
    spec.mkdir(parents=True)
    words = [str(folder / "gone"), "-f", "{connection_file}"]
    about = dict(argv=words, display_name="shared", language="python")
    (spec / "kernel.json").write_text(json.dumps(about))
    monkeypatch.setenv("JUPYTER_PATH", str(folder / "shared"))
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    same = f"import sys; assert sys.executable == {sys.executable!r}"
    path = page(folder / "x.ipynb", ("n = 1", "parameters"), (same,), kernel="gone")
    runs.run_page(path, folder / "done.ipynb", {})
    assert not (folder / "ran").exists()
    assert os.environ["IPYTHONDIR"] == str(folder / "ipython"), "set back"


KILL = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


@tabled(
    "cell, says",
    [
        ("1 / 0", "x.ipynb: ZeroDivisionError: division by zero; .*holds the trace"),
        ("pass", "finished without writing x.smoke.jsonl: .*run_grid"),
        (KILL, "killed, .* memory .* with --resume"),
    ],
)
def test_a_notebook_that_fails_costs_one_sentence(folder, capsys, cell, says):
    page(folder / "x.ipynb", (SETTINGS, "parameters"), (cell,))
    assert cli.main(["run", "x.ipynb"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(says, last) and last.startswith("dpcomm: ")


# ---- parameters, devices, folders


def test_a_parameters_cell_holds_literals_and_all_that_is_shared(tmp_path):
    path = tmp_path / "x.ipynb"
    for source, tags, message in [
        ("a = 1 + b", ["parameters"], "name = literal"),
        ("print(1)", ["parameters"], "name = literal"),
        ("a = 1", [], "0 cells"),
        ("a = 1", ["parameters"], "must set scale, seeds, out, resume, max_seconds"),
        ("a = {[]: 1}", ["parameters"], "name = literal"),
        ("a = ", ["parameters"], "an error, invalid syntax .*name = literal"),
    ]:
        page(path, (source, *tags))
        with pytest.raises(ValueError, match=message):
            runs.defaults(path)


def test_devices_are_checked(monkeypatch):
    assert runs.device("cpu") == runs.device("auto", gpu=False) == "cpu"
    for name in ("cuda", "cuda:0"):
        with pytest.raises(ValueError, match="runs only on the CPU: use 'cpu'"):
            runs.device(name, gpu=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert runs.device() == "cuda" and runs.device("cuda:1") == "cuda:1"
    for name in ("cuda:2", "cuda:-1", "cuda:x"):
        with pytest.raises(ValueError, match="torch finds 2 GPU here"):
            runs.device(name)


def test_the_folder_is_where_the_user_stands_but_for_the_site_s_pages(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert runs.output_folder() == tmp_path / "runs"
    monkeypatch.chdir(ROOT / "nbs" / "dprec")
    assert runs.output_folder() == ROOT / "runs"
    with pytest.raises(ValueError, match="inside nbs/"):
        runs.output_folder("here")


def test_without_a_checkout_the_copies_in_the_package_serve(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "PACKAGE", tmp_path / "site" / "dpcomm")
    assert runs.checkout() is None
    with pytest.raises(FileNotFoundError, match="clone the repository"):
        runs.experiments()
    (tmp_path / "site" / "dpcomm" / "assets" / "experiments").mkdir(parents=True)
    assert runs.experiments() == {}


def test_a_machine_without_papermill_is_told_before_anything_is_computed(
    folder, monkeypatch, capsys
):
    find = runs.importlib.util.find_spec
    missing = lambda name: None if name == "papermill" else find(name)  # noqa: E731
    monkeypatch.setattr(runs.importlib.util, "find_spec", missing)
    monkeypatch.setattr(runs, "run_grid", lambda *_, **__: 1 / 0)
    with pytest.raises(NotInstalled, match="papermill"):
        runs.page_tools()
    assert cli.main(["run", "dprec-mnist"]) == 2
    assert "the extra run brings it" in capsys.readouterr().err


def test_commands_that_only_tell_need_no_torch(tmp_path):
    code = (
        "import sys; from dpcomm.cli import main;"
        " words = ['list'], ['data'], ['table', 'sqsgd'], ['run', 'x'];"
        " assert [main(w) for w in words] == [0, 0, 0, 2];"
        " assert 'torch' not in sys.modules"
    )
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
