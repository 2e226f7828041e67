"One style, types that fit, hooks and commands that run: what CONTRIBUTING.md promises."

import json
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from checkout import ROOT, python

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for fence in re.findall(r"```bash\n(.*?)```", CONTRIBUTING, re.S)
    for line in fence.splitlines()
]
INSTALLED = ("pip install -e '.[dev]'", "pre-commit install")  # before any test runs
ELSEWHERE = {  # command -> the test that runs it
    "nbdev_export": "tests/repository/test_guards.py::test_the_package_is_what_the_notebooks_export",
    "nbdev_clean": "tests/repository/test_guards.py::test_notebooks_are_clean",
    "nbdev_docs": "tests/repository/test_built_site.py::test_page_is_whole",
    "DPCOMM_SITE=_docs pytest tests/repository/test_built_site.py": (
        "tests/repository/test_built_site.py::test_ci_and_forks_build_the_same_site"
    ),
    "python -m http.server -d _docs": "",  # of Python itself
    "python -m pip wheel --no-deps -w dist .": (
        "tests/repository/test_wheel.py::test_it_holds_the_package_its_assets_and_the_experiments"
    ),
    "python setup.py -q sdist -d dist": (
        "tests/repository/test_wheel.py::test_an_sdist_holds_the_notebooks_and_the_tests"
    ),
    "dpcomm run NAME --scale smoke": "tests/experiments/test_runner.py::test_inline_computes_the_same",
    **{
        f"dpcomm {words}": f"tests/experiments/test_commands.py::{test}"
        for words, test in {
            "sweep NAME --scale full --plan": "test_a_plan_says_what_is_missing",
            "sweep NAME --scale full --processes 2": "test_a_sweep_plays",
            "merge runs": "test_records_are_merged_by_union",
        }.items()
    },
    "pytest": "",
    "pytest --all": "",
}


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_everything_is_formatted():
    done = run(sys.executable, "-m", "ruff", "format", "--check", ".")
    assert done.returncode == 0, f"run `ruff format .`:\n{done.stdout}"


def test_nothing_is_unused_unsorted_or_too_long():
    done = run(sys.executable, "-m", "ruff", "check", "--output-format", "concise", ".")
    assert done.returncode == 0, f"run `ruff check --fix .`:\n{done.stdout}"


def test_a_long_line_an_unused_import_and_a_bad_name_are_noticed(tmp_path):
    config = str(ROOT / "ruff.toml")
    for code in ("import os\n", f"x = '{'a' * 100}'\n", "class bad:\n    pass\n"):
        (tmp_path / "it.py").write_text(code)
        done = run(
            sys.executable, "-m", "ruff", "check", "--config", config, str(tmp_path)
        )
        assert done.returncode == 1, code


@pytest.mark.deep
def test_types_fit():
    done = run(
        sys.executable,
        "-m",
        "basedpyright",
        "--outputjson",
        "--pythonpath",
        sys.executable,
    )
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] > 40
    wrong = [
        f"{d['file']}:{d['range']['start']['line'] + 1}: {d['message']}"
        for d in found["generalDiagnostics"]
        if d["severity"] == "error"
    ]
    assert not wrong, "\n".join(wrong)


def test_hooks_are_tools_of_the_dev_extra():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert [hook["id"] for hook in hooks] == ["format", "lint", "clean", "export"]
    assert all(hook["language"] == "system" for hook in hooks), "nothing is fetched"
    assert run(sys.executable, "-m", "pre_commit", "validate-config").returncode == 0


def test_every_command_of_contributing_is_run_by_a_test():
    here = {"ruff format .", "ruff check ."}
    unknown = set(COMMANDS) - here - set(INSTALLED) - set(ELSEWHERE)
    assert len(COMMANDS) > 9 and not unknown, f"no test runs {unknown}"
    for where in filter(None, ELSEWHERE.values()):
        path, _, test = where.partition("::")
        assert re.search(rf"^def {test}", (ROOT / path).read_text(), re.M) or not test


def test_the_deep_tier_is_left_out_unless_asked_for():
    "By a flag, by the mark, or by a test's name."
    file = "tests/repository/test_habits.py"
    name = f"{file}::test_types_fit"
    asked = {
        words: name in collected(*words)
        for words in ((file,), (file, "--all"), (file, "-m", "deep"), (name,))
    }
    assert [*asked.values()] == [False, True, True, True], asked


def collected(*words: str) -> str:
    done = python("-m", "pytest", "-n0", *words, "--collect-only", "-q")
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout


@pytest.mark.parametrize("command", ["pip install -e '.[dev]'", "pre-commit install"])
def test_what_sets_up_is_in_the_dev_extra(command):
    tool = shlex.split(command)[0]
    extra = (ROOT / "settings.ini").read_text()
    assert command in COMMANDS and (tool == "pip" or tool in extra)
