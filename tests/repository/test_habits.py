"One style, hooks that run, and rooms that only shrink."

import re
import subprocess
import sys
from collections import Counter

import yaml
from checkout import ROOT, files


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


ROW = re.compile(r"^\| ([\w/ ]+) \| ([\d,]+) \| ([\d,]+) \|$", re.M)


def weights() -> dict:
    "Lines of Python of each room, in the package and in its tests."
    lines = Counter()
    for path in files():
        kind = {"dpcomm": 0, "tests": 1}.get(path.parts[0])
        if kind is None or path.suffix != ".py":
            continue
        room = path.parts[1] if len(path.parts) > 2 else "the rest"
        lines[room, kind] += len((ROOT / path).read_text("utf-8").splitlines())
    rooms = sorted({room for room, _ in lines})
    return {room: (lines[room, 0], lines[room, 1]) for room in rooms}


def test_rooms_only_shrink():
    "The table in CONTRIBUTING; whoever needs more says who needs it and what leaves."
    table = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    allowed = {
        room: tuple(int(n.replace(",", "")) for n in most)
        for room, *most in ROW.findall(table)
    }
    assert weights().keys() == allowed.keys()
    grown = {
        room: (weights()[room], most)
        for room, most in allowed.items()
        if any(now > limit for now, limit in zip(weights()[room], most))
    }
    assert not grown, f"rooms over their budget: {grown}"


if __name__ == "__main__":  # what stands now, as the table has it
    for room, (package, tests) in weights().items():
        print(f"| {room} | {package:,} | {tests:,} |")
