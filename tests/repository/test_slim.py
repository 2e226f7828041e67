"What `pip install dpcomm` has to do without: the packages of the extras."

import ast
import json
import sys

import pytest
from checkout import MODULES as PACKAGE
from checkout import ROOT, python
from packaging.requirements import Requirement
from test_wheel import SETTINGS

MODULES = sorted(
    ".".join(p.with_suffix("").parts).removesuffix(".__init__")
    for p in PACKAGE
    if p.name != "__main__.py"
)
# Distributions that are imported by another name.
NAMED = {"scikit-learn": {"sklearn"}, "distributed": {"distributed", "dask"}}
# Packages that an extra brings because another one of it needs them.
BROUGHT = {"run": {"IPython", "PIL", "nbclient", "nbformat"}}


def wanted(extra: str = "") -> set[str]:
    "What an extra, or the package itself, asks for, by the names of its imports."
    words = SETTINGS[f"{extra}_requirements" if extra else "requirements"]
    names = {Requirement(word).name for word in words.split()}
    imported = (NAMED.get(name, {name.replace("-", "_")}) for name in names)
    return set().union(*imported) | BROUGHT.get(extra, set())


EXTRAS = sorted(
    name.removesuffix("_requirements")
    for name in SETTINGS
    if name.endswith("_requirements")
)
BLOCKED = set().union(*map(wanted, EXTRAS)) - wanted()
BARE = f"""
import importlib, json, sys
import cryptography, filelock, numpy, randomgen, rich.live, scipy.stats, torch, tqdm
torch.func, torch.utils.data
BLOCKED = set({sorted(BLOCKED)})
for name in [*sys.modules]:
    if name.partition(".")[0] in BLOCKED:
        del sys.modules[name]
sys.modules.update(dict.fromkeys(BLOCKED))  # None: not to be imported
"""
USED = """
import contextlib, io
found = {}
for name in MODULES:
    importlib.import_module(name)
import dpcomm
from dpcomm import cli
from dpcomm.core.random import Insecure
from cases import CASES
assert {*CASES} == {*dpcomm.registered()}
for name, cases in CASES.items():
    case = next(iter(cases.values()))
    mechanism = case.make(7)
    data = mechanism.encode(torch.full((7,), 0.1), Insecure(1)).to_bytes()
    message = dpcomm.Message.from_bytes(data, 7)
    value = mechanism.decode(message)
    promise = mechanism.guarantee(**case.release)
    assert len(value) == 7 and promise.eps > 0 and mechanism.bits(7).total > 0, name

where = dpcomm.Deployment(n_clients=4, cohort=2, rounds=2, delta=0.1)
mechanism = where.calibrate("gaussian", eps=2.0)
x, y = torch.rand(40, 5), torch.arange(40) % 2
clients = [(x[i::4], y[i::4]) for i in range(4)]
run = dpcomm.train(torch.nn.Linear(5, 2), clients, mechanism, where, test=(x, y))
found["eps"], found["round"] = where.guarantee(mechanism).eps, run.round
assert dpcomm.audit.distinguish

def said(words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(words.split())
        except SystemExit as end:
            code = end.code
    return [code, out.getvalue(), err.getvalue()]

found["commands"] = {words: said(words) for words in COMMANDS}
print(json.dumps(found))
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


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    "What works in a process without the extras' packages."
    code = f"{BARE}\nMODULES = {MODULES}\nCOMMANDS = {[*COMMANDS]}\nsys.path[:0] = {[str(ROOT / 'tests' / 'mechanisms')]}\n"
    done = python("-c", code + USED, cwd=tmp_path_factory.mktemp("bare"))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_mechanisms_their_promises_and_a_run_need_no_extra(bare):
    assert 1.9 < bare["eps"] <= 2 and bare["round"] == 2


def test_commands_work_or_name_the_extra_that_they_need(bare):
    for words, (code, out, err) in bare["commands"].items():
        if (extra := COMMANDS[words]) is None:
            assert code == 0 and out and not err, (words, err)
            continue
        assert code == 2, (words, err)
        (err,) = [
            line for line in err.splitlines() if not line.startswith("writing records")
        ]
        assert f"the extra {extra} brings it" in err, (words, err)


def brought(node: ast.With) -> str | None:
    "The extra of a `with needs(extra)`."
    call = node.items[0].context_expr
    if isinstance(call, ast.Call) and ast.unparse(call.func) == "needs":
        return call.args[0].value
    return None


def strays(tree: ast.Module) -> list[str]:
    """Imports of what `pip install dpcomm` does not bring that no `needs` answers for, or
    one that names an extra without it; in a try that expects ImportError two may stand.
    """
    brings = wanted() | {*sys.stdlib_module_names, "dpcomm", "__future__"}

    def visit(node, here):
        if isinstance(node, ast.With):
            here = here | wanted(extra) if (extra := brought(node)) else here
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
            yield from visit(child, here)

    return list(visit(tree, brings))


def test_what_an_extra_brings_is_imported_where_the_extra_is_named():
    trees = {p: ast.parse((ROOT / p).read_text(encoding="utf-8")) for p in PACKAGE}
    assert not {str(p): found for p, tree in trees.items() if (found := strays(tree))}
