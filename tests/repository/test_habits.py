"One style, hooks that run, and the two tiers."

import subprocess
import sys

import yaml
from checkout import ROOT, python
from mutations import MUTATIONS, path_of


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=1800)


def test_everything_is_formatted():
    done = run(sys.executable, "-m", "ruff", "format", "--check", ".")
    assert done.returncode == 0, f"run `ruff format .`:\n{done.stdout}"


def test_nothing_is_unused_unsorted_or_too_long():
    done = run(sys.executable, "-m", "ruff", "check", "--output-format", "concise", ".")
    assert done.returncode == 0, f"run `ruff check --fix .`:\n{done.stdout}"


def test_hooks_are_tools_of_the_dev_extra():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert [hook["id"] for hook in hooks] == ["format", "lint", "clean", "export"]
    assert all(hook["language"] == "system" for hook in hooks), "nothing is fetched"
    assert run(sys.executable, "-m", "pre_commit", "validate-config").returncode == 0


def test_the_deep_tier_is_left_out_unless_asked_for():
    "By a flag, by the mark, or by a test's name."
    file = "tests/repository/test_unchanged.py"
    name = f"{file}::test_two_runs_one_after_the_other"
    asked = {
        words: name in collected(*words)
        for words in ((file,), (file, "--all"), (file, "-m", "deep"), (name,))
    }
    assert [*asked.values()] == [False, True, True, True], asked


def collected(*words: str) -> str:
    done = python("-m", "pytest", "-n0", *words, "--collect-only", "-q")
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout


def test_mistakes_on_purpose_can_still_be_made_and_are_listed():
    told = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for one in MUTATIONS:
        assert path_of(one).read_text(encoding="utf-8").count(one.right) == 1, one
        assert one.right != one.wrong and f"| {one.mistake} |" in told, one.mistake
