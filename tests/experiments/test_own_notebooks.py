"""An experiment in a notebook outside the package, from the command line to a verdict."""

import json
import shutil

import pytest
from checkout import ROOT, page, python
from tables import tabled

from dpcomm import cli
from dpcomm.evidence import paper_tables, records
from dpcomm.experiments.run import grids, runs

GUIDE = ROOT / "nbs" / "use"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    "A folder of somebody's own with the guide's two files."
    for name in ("experiment.ipynb", "digits.toml"):
        shutil.copy(GUIDE / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paper_tables, "_added", {})
    return tmp_path


def rewritten(folder, old, new):
    path = folder / "experiment.ipynb"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


SETTINGS = """scale = 'smoke'
seeds = [0]
out = None
resume = False
max_seconds = None"""
TINY = """from dpcomm.experiments.run import grids, runs
SIZE = 3


class Doubled:
    def of(self, n):
        return 2.0 * n


def grid(scale):
    return [grids.Run('one', 'One', scale, trains=False, seeds=(0, 1))]


def run_one(run, seed, max_seconds=None, **how):
    "Nothing is trained."
    if max_seconds == 0:
        return None
    return dict(final={'mse': Doubled().of(SIZE) + seed})


own = grids.own('tiny', grid, run_one)
runs.run_grid(own, scale, seeds, out, 'all', resume, max_seconds)"""


def tiny(folder, old="SIZE", new="SIZE"):
    "Records of a notebook that trains nothing, run inline."
    assert old in TINY
    code = (TINY.replace(old, new),)
    page(folder / "tiny.ipynb", (SETTINGS, "parameters"), code)
    assert cli.main(["run", "tiny.ipynb", "--inline", "--resume"]) == 0
    return records.read(folder / "runs" / "across" / "tiny.smoke.jsonl")


def test_a_notebook_of_ones_own_is_run_compared_and_reported(folder, capsys):
    words = ["--scale", "full", "--seeds", "0", "--inline", "-p", "only=gaussian"]
    assert cli.main(["run", "experiment.ipynb", *words]) == 0
    said = capsys.readouterr().out
    assert "digits, expected" in said and "(n = 1)" in said and "report " in said
    home = folder / "runs" / "digits"
    found = records.read(home / "experiment.full.jsonl")
    assert [(r.paper, r.key, r.seed) for r in found] == [("digits", "gaussian", 0)]
    paper_tables._added.clear()  # as another process, which has only the records
    assert cli.main(["table", "digits", "--out", "runs"]) == 0
    assert "gaussian.accuracy" in capsys.readouterr().out
    paper_tables._added.clear()
    assert cli.main(["report", "runs/digits/experiment.full.jsonl"]) == 0
    assert "digits" not in paper_tables.papers(), "the package's stay the package's"


@pytest.mark.deep
def test_through_papermill_from_another_folder(folder, tmp_path_factory):
    away = tmp_path_factory.mktemp("away")
    done = python("-m", "dpcomm", "run", str(folder / "experiment.ipynb"), cwd=away)
    assert done.returncode == 0, done.stderr
    assert (folder / "runs" / "digits" / "experiment.smoke.jsonl").is_file()
    assert (folder / "runs" / "experiment.smoke.ipynb").is_file()
    assert not any(away.iterdir())


def test_what_stands_is_not_played_again_and_a_stop_goes_on(folder, capsys):
    words = ["run", "experiment.ipynb", "--inline", "--max-seconds", "1e-6"]
    assert cli.main([*words, "-p", "only=signsgd"]) == 3
    assert "resume" in capsys.readouterr().err
    first = tiny(folder)
    assert len(first) == 1 and tiny(folder) == first


def code_of(folder, *change):
    (folder / "runs" / "across" / "tiny.smoke.jsonl").unlink(missing_ok=True)
    (record,) = tiny(folder, *change)
    return record.code


def test_a_record_names_the_code_that_its_notebook_depends_on(folder):
    first = code_of(folder)
    assert code_of(folder, "Nothing is trained.", "Another docstring.") == first
    assert code_of(folder, "SIZE = 3", "SIZE = 3  # a remark\nOTHER = 4") == first
    others = [
        code_of(folder, *change)
        for change in (
            ("SIZE = 3", "SIZE = 4"),
            ("2.0 * n", "3.0 * n"),
            ("seeds=(0, 1)", "seeds=(0, 1, 2)"),
            ("+ seed", "- seed"),
        )
    ]
    assert len({first, *others}) == 5


HELD = """from dataclasses import dataclass
from functools import partial

from dpcomm.experiments.run import grids


@dataclass(frozen=True)
class Setting:
    rounds: int = 3

    def __call__(self):
        return 7


def of(size):
    return size + 1


def maker(bias):
    def run_one(run, seed, **how):
        return SETTINGS['a'].rounds, WAYS[0](2), TWICE(), NAMES, bias
    return run_one


SETTINGS, NAMES = {'a': Setting(3)}, {'one', 'two', 'three'}
WAYS, TWICE = [of, lambda x: x], partial(of, 5)
print(grids.own_code(maker(1)))
"""


def test_what_containers_closures_and_calls_hold_counts_alike_in_every_process(
    tmp_path,
):
    def told(old="", new=""):
        assert old in HELD
        (tmp_path / "held.py").write_text(HELD.replace(old, new) if old else HELD)
        done = python("held.py", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = told()
    assert told() == first == told("def of(size):", "def of(size):  # a remark")
    changes = (
        ("Setting(3)", "Setting(4)"),
        ("size + 1", "size + 2"),
        ("lambda x: x]", "lambda x: -x]"),
        ("partial(of, 5)", "partial(of, 6)"),
        ("maker(1)", "maker(2)"),
        ("return 7", "return 8"),
        ("'three'", "'four'"),
    )
    assert len({first, *(told(*change) for change in changes)}) == 8


def told(folder, capsys, *words):
    assert cli.main(["run", "experiment.ipynb", "--inline", *words]) != 0
    return capsys.readouterr().err


def test_what_a_notebook_lacks_is_said(folder, capsys):
    (folder / "runs").mkdir()
    rewritten(folder, "max_seconds = None", "least = None")
    assert "does not set max_seconds" in told(folder, capsys)
    rewritten(folder, "least = None", "max_seconds = None")
    rewritten(folder, '"parameters"', '"settings"')
    assert "exactly one" in told(folder, capsys)
    rewritten(folder, '"settings"', '"parameters"')
    rewritten(folder, 'own(\\"experiment\\"', 'own(\\"another\\"')
    assert "named 'experiment'" in told(folder, capsys)
    rewritten(folder, 'own(\\"another\\"', 'own(\\"experiment\\"')
    rewritten(folder, "digits.toml", "numbers.toml")
    assert "'numbers.toml' does not exist" in told(folder, capsys)
    (folder / "numbers.toml").write_text('[paper]\nid = "digits"\n[titles]\n')
    assert "the name of the file" in told(folder, capsys)
    (folder / "numbers.toml").write_text("[paper]\n[titles]\n")
    assert "numbers.toml" in told(folder, capsys)
    assert "change=" in told(folder, capsys, "-p", "change=lr=0.1")


@pytest.mark.parametrize("name", ["absent.ipynb", "My Notebook.ipynb"])
def test_a_file_that_cannot_be_an_experiment_is_refused(folder, capsys, name):
    if " " in name:
        shutil.copy("experiment.ipynb", name)
    assert cli.main(["run", name]) == 2
    said = capsys.readouterr().err
    assert "does not exist" in said or "rename it" in said


def nothing(*_, **__):
    return []


@tabled("name", ["dprec-mnist", "Two words", "9", ""])
def test_a_name_of_this_package_or_no_name_is_refused(name):
    with pytest.raises(ValueError, match="pass another name"):
        grids.own(name, nothing, nothing)


def test_without_a_table_records_belong_to_no_paper(tmp_path):
    def grid(scale):
        return [grids.Run("one", "One", scale, trains=False)]

    def run_one(run, seed, **how):
        return dict(final={"mse": 1.0 + seed})

    experiment = grids.own("mine", grid, run_one)
    (record,) = runs.run_grid(experiment, "quick", [0], tmp_path)
    assert record.final == {"mse": 1.0} and record.paper == paper_tables.ACROSS
    path = tmp_path / "across" / "mine.quick.jsonl"
    assert json.loads(path.read_text())["experiment"] == "mine"
