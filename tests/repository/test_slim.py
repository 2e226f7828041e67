"What `pip install dpcomm` has to do without: the packages of the extras."

import ast
import json
import sys

import pytest
from checkout import MODULES, python, tree
from packaging.requirements import Requirement
from test_guards import NAMES
from test_wheel import SETTINGS

# Distributions that are imported by another name.
NAMED = {"scikit-learn": {"sklearn"}, "distributed": {"distributed", "dask"}}
# Packages that an extra brings because another one of it needs them.
BROUGHT = {"run": {"IPython", "PIL", "nbclient", "nbformat"}}


def wanted(words: str, extra: str = "") -> set[str]:
    "What an extra, or the package itself, asks for, by the names of its imports."
    names = {Requirement(word).name for word in words.split()}
    imported = (NAMED.get(name, {name.replace("-", "_")}) for name in names)
    return set().union(*imported) | BROUGHT.get(extra, set())


OURS = wanted(SETTINGS["requirements"])
EXTRAS = {  # extra -> what it brings
    extra: wanted(SETTINGS[name], extra)
    for name in SETTINGS
    if (extra := name.removesuffix("_requirements")) != name
}
BARE = f"""
import contextlib, importlib, io, json, sys
import cryptography, filelock, numpy, randomgen, rich.live, scipy.stats, torch, tqdm
torch.func, torch.utils.data
BLOCKED = {set().union(*EXTRAS.values()) - OURS}
for name in [*sys.modules]:
    if name.partition(".")[0] in BLOCKED:
        del sys.modules[name]
sys.modules.update(dict.fromkeys(BLOCKED))  # None: not to be imported
for name in {NAMES - {"__main__"}}:
    importlib.import_module(f"dpcomm.{{name}}".removesuffix(".__init__"))
"""
USED = """
import dpcomm
from dpcomm import cli

where = dpcomm.Deployment(n_clients=4, cohort=2, rounds=2, delta=0.1)
mechanism = where.calibrate("gaussian", eps=2.0)
x, y = torch.rand(40, 5), torch.arange(40) % 2
clients = [(x[i::4], y[i::4]) for i in range(4)]
run = dpcomm.train(torch.nn.Linear(5, 2), clients, mechanism, where, test=(x, y))
assert 1.9 < where.guarantee(mechanism).eps <= 2 and run.round == 2
assert dpcomm.audit.distinguish

def said(words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(words.split())
        except SystemExit as end:
            code = end.code
    return [code, out.getvalue(), err.getvalue()]

print(json.dumps({words: said(words) for words in COMMANDS}))
"""

# What each command needs beyond the package: nothing, or an extra.
CHOOSE = "choose --d 1000 --clients 100 --cohort 10 --rounds 3 --eps 4 --delta 1e-5"
COMMANDS = {
    "--help": None,
    "list": None,
    "list --json": None,
    CHOOSE: None,
    "table dprec table1": None,
    "report dprec": None,
    "data": None,
    "flower new app": None,
    "audit gaussian --trials 100": None,
    "sweep dprec-mnist --scale smoke --plan": None,
    "run dprec-mnist": "run",
    "sweep dprec-mnist --scale smoke --processes 2": "run",
}


def test_a_run_needs_no_extra_and_commands_name_the_one_that_they_need(tmp_path):
    code = f"{BARE}\nCOMMANDS = {[*COMMANDS]}\n{USED}"
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for words, (code, out, err) in json.loads(done.stdout.splitlines()[-1]).items():
        if (extra := COMMANDS[words]) is None:
            assert code == 0 and out and not err, (words, err)
            continue
        told = [s for s in err.splitlines() if not s.startswith("writing records")]
        assert code == 2 and len(told) == 1, (words, err)
        assert f"the extra {extra} brings it" in told[0], (words, err)


def strays(node, here):
    """Imports of what `pip install dpcomm` does not bring that no `with needs(extra)`
    answers for; in a try that expects ImportError two may stand.
    """
    if isinstance(node, ast.With):
        call = node.items[0].context_expr
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "needs":
            here = here | EXTRAS[call.args[0].value]
    if isinstance(node, ast.Try):
        caught = [ast.unparse(h.type) for h in node.handlers if h.type]
        here = here | {"flwr", "pfl"} if "ImportError" in caught else here
    names = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        names = [node.module]
    roots = {name.partition(".")[0] for name in names}
    yield from (f"{name} in line {node.lineno}" for name in roots - here)
    for child in ast.iter_child_nodes(node):
        yield from strays(child, here)


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_what_an_extra_brings_is_imported_where_the_extra_is_named(module):
    here = OURS | {*sys.stdlib_module_names, "dpcomm", "__future__"}
    assert not [*strays(tree(module), here)]
