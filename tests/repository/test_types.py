"""What a type checker and an editor see of the public surface."""

import ast
import importlib.util
import json
import re
import subprocess
import sys

import pytest
from checkout import ROOT

import dpcomm

INIT = ast.parse((ROOT / "dpcomm" / "__init__.py").read_text(encoding="utf-8"))
CODE = "\n".join(
    re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
)
ASKED = """
reveal_type(rec.encode(update))
reveal_type(rec.guarantee(10, 1e-5))
reveal_type(dpcomm.Deployment(n_clients=10, cohort=2, rounds=3, delta=0.1))
reveal_type(dpcomm.audit.distinguish)
"""
TOLD = ("Message", "Guarantee", "Deployment", "Audit")


def test_what_is_imported_when_asked_for_is_what_a_checker_sees():
    (block,) = (node for node in INIT.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in block.body
        for alias in node.names
        if alias.name != "audit"
    }
    homes = {name: home for name, home in dpcomm._HOMES.items() if name != "audit"}
    assert seen == homes and sorted(dpcomm._HOMES) == dpcomm.__all__


@pytest.fixture
def asked(tmp_path):
    path = tmp_path / "asked.py"
    path.write_text(CODE + ASKED)
    return path


@pytest.mark.deep
def test_pyright_accepts_the_readme_and_knows_what_comes_back(asked, tmp_path):
    if importlib.util.find_spec("basedpyright") is None:
        pytest.skip("basedpyright is not installed")
    own = dict(include=[str(asked)], extraPaths=[str(ROOT)], pythonVersion="3.11")
    config = tmp_path / "pyrightconfig.json"
    config.write_text(json.dumps(own | dict(typeCheckingMode="standard")))
    words = ["-m", "basedpyright", "-p", str(config), "--outputjson"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = [f["message"] for f in found if f["severity"] == "error"]
    said = [f["message"] for f in found if f["severity"] == "information"]
    assert not errors and len(said) == len(TOLD)
    assert all(kind in text for kind, text in zip(TOLD, said))


@pytest.mark.deep
def test_mypy_accepts_the_readme_and_knows_what_comes_back(asked, tmp_path):
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    words = ["-m", "mypy", "--follow-imports=silent", "--cache-dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *words, str(asked)], cwd=ROOT, capture_output=True, text=True
    )
    said = [line for line in done.stdout.splitlines() if "Revealed type" in line]
    assert done.returncode == 0, done.stdout
    assert all(kind in text for kind, text in zip(TOLD, said, strict=True))
