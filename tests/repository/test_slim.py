"""What `pip install dpcomm` has to do without: the packages of the extras, and what of
Python only Unix has.
"""

import ast
import importlib
import json
import sys
from configparser import ConfigParser

import pytest
from checkout import ROOT, files, python
from packaging.requirements import Requirement

from dpcomm.core.checks import NotInstalled, needs

SETTINGS = ConfigParser(delimiters=["="])
SETTINGS.read(ROOT / "settings.ini", encoding="utf-8")
PACKAGE = [p for p in files() if p.parts[0] == "dpcomm" and p.suffix == ".py"]
PACKAGE = [p for p in PACKAGE if p.parts[1] != "assets"]  # apps to copy
MODULES = sorted(
    ".".join(p.with_suffix("").parts).removesuffix(".__init__")
    for p in PACKAGE
    if p.name != "__main__.py"
)
# Distributions that are imported, or found on the path, by another name.
NAMED = {
    "scikit-learn": {"sklearn"},
    "dp-accounting": {"dp_accounting"},
    "prv-accountant": {"prv_accountant"},
    "flwr": {"flwr", "flower-superlink"},
    "distributed": {"distributed", "dask"},
    "dask-jobqueue": {"dask_jobqueue"},
}
# Packages that an extra brings because another one of it needs them.
BROUGHT = {"run": {"IPython", "PIL", "nbclient"}}


def wanted(extra: str = "") -> set[str]:
    "What an extra, or the package itself, asks for, by the names of its imports."
    words = SETTINGS["DEFAULT"][f"{extra}_requirements" if extra else "requirements"]
    names = {Requirement(word).name for word in words.split()}
    found = set().union(*(NAMED.get(name, {name}) for name in names))
    return found | BROUGHT.get(extra, set())


EXTRAS = sorted(
    name.removesuffix("_requirements")
    for name in SETTINGS["DEFAULT"]
    if name.endswith("_requirements")
)
BLOCKED = set().union(*map(wanted, EXTRAS)) - wanted() | {"pandas"}
MODULES_OF_UNIX = "fcntl resource termios pwd grp pty tty syslog".split()
NAMES_OF_UNIX = dict(
    os="fork forkpty getuid geteuid getgid getpgid setsid killpg nice sysconf uname"
    " sched_getaffinity getloadavg mkfifo chown fchmod wait3 wait4 openpty",
    signal="SIGKILL SIGHUP SIGALRM SIGUSR1 SIGUSR2 SIGCHLD SIGQUIT alarm setitimer pause",
)
BARE = f"""
import importlib, json, os, signal, sys
import cryptography, filelock, numpy, randomgen, rich.live, scipy.stats, torch, tqdm
import concurrent.futures, multiprocessing, subprocess, tempfile
torch.func, torch.utils.data
BLOCKED = set({sorted(BLOCKED)}) | set({MODULES_OF_UNIX})
for name in BLOCKED & set(sys.modules):
    del sys.modules[name]

class Without:
    "A finder of modules that does not find these."

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        blocked = name.partition(".")[0] in BLOCKED
        return None if blocked else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
for module, names in {NAMES_OF_UNIX}.items():
    for name in names.split():
        delattr(sys.modules[module], name)
"""
USED = """
import contextlib, io
found = {}
for name in MODULES:
    importlib.import_module(name)
import dpcomm
from dpcomm import cli
from dpcomm.core.checks import NotInstalled
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
found["loaded"] = sorted(BLOCKED & {name.partition(".")[0] for name in sys.modules})
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
    "What works in a process without the extras' packages and without Unix."
    code = f"{BARE}\nMODULES = {MODULES}\nCOMMANDS = {[*COMMANDS]}\nsys.path[:0] = {[str(ROOT / 'tests' / 'mechanisms')]}\n"
    done = python("-c", code + USED, cwd=tmp_path_factory.mktemp("bare"))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_mechanisms_their_promises_and_a_run_need_no_extra_and_no_unix(bare):
    assert 1.9 < bare["eps"] <= 2 and bare["round"] == 2
    assert bare["loaded"] == []


def test_commands_work_or_name_the_extra_that_they_need(bare):
    for words, (code, out, err) in bare["commands"].items():
        if (extra := COMMANDS[words]) is None:
            assert code == 0 and out and not err, (words, err)
            continue
        assert code == 2, (words, err)
        (err,) = [
            line for line in err.splitlines() if not line.startswith("records go")
        ]
        assert f"the extra {extra} brings it" in err, (words, err)


def test_the_sentence_names_package_and_extra():
    with pytest.raises(NotInstalled) as error, needs("run", ", or stay"):
        importlib.import_module("no_such_package.part")
    said = str(error.value)
    assert said.startswith("no_such_package is not installed here, and the extra run")
    assert said.endswith("as in `pip install -e '.[run]'`, or stay")
    with pytest.raises(ZeroDivisionError), needs("run"):
        1 / 0


def brought(node: ast.With) -> str | None:
    "The extra of a `with needs(extra)`."
    call = node.items[0].context_expr
    if isinstance(call, ast.Call) and ast.unparse(call.func) == "needs":
        return call.args[0].value
    return None


def strays(tree: ast.Module) -> list[str]:
    """Imports of what `pip install dpcomm` does not bring that no `needs` answers for, or
    one that names an extra without it; in a try that expects ImportError, or in a hook of
    pytest, none.
    """
    known, found = wanted() | {*sys.stdlib_module_names, "dpcomm", "__future__"}, []

    def visit(node, extra):
        if isinstance(node, ast.With):
            extra = brought(node) or extra
        if isinstance(node, ast.FunctionDef) and node.name.startswith("pytest_"):
            extra = "*"  # a hook of a plugin, which pytest calls
        if isinstance(node, ast.Try):
            caught = {ast.unparse(h.type) for h in node.handlers if h.type}
            extra = "*" if "ImportError" in caught else extra
        names = (
            [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        )
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        if names == ["torch.utils.tensorboard"]:
            names = ["tensorboard"]
        for name in {name.partition(".")[0] for name in names} - known:
            if extra != "*" and not (extra and name in wanted(extra)):
                found.append(f"{name} in line {node.lineno}")
        for child in ast.iter_child_nodes(node):
            visit(child, extra)

    visit(tree, None)
    return found


def test_what_an_extra_brings_is_imported_where_the_extra_is_named():
    trees = {p: ast.parse((ROOT / p).read_text(encoding="utf-8")) for p in PACKAGE}
    assert not {str(p): found for p, tree in trees.items() if (found := strays(tree))}
    asked = {
        (call.args[0].value, call.args[1].value)
        for tree in trees.values()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) == "not_installed"
        and all(isinstance(word, ast.Constant) for word in call.args[:2])
    }
    assert asked and not [
        (name, extra)
        for name, extra in asked
        if name.partition(".")[0] not in wanted(extra)
    ]
