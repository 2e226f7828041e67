"One style, hooks that run, and rooms that only shrink."

import subprocess
import sys

import yaml
from checkout import ROOT


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
