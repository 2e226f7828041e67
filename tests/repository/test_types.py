"""What a type checker and an editor see of the public surface, and that the code of README
and of the how-to pages is accepted.
"""

import ast
import importlib.util
import json
import re
import symtable

import pytest
from checkout import NOTEBOOKS, ROOT, cells, python

import dpcomm

INIT = ast.parse((ROOT / "dpcomm" / "__init__.py").read_text(encoding="utf-8"))
CODE = "\n".join(
    re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
)
ASKED = """
reveal_type(mechanism.encode(torch.randn(61_706)))
reveal_type(where.guarantee(mechanism))
reveal_type(dpcomm.Deployment(n_clients=10, cohort=2, rounds=3, delta=0.1))
reveal_type(dpcomm.audit.distinguish)
"""
STANDARD = """
reportFunctionMemberAccess reportIncompatibleMethodOverride reportPossiblyUnboundVariable
reportIncompatibleVariableOverride reportOverlappingOverload
""".split()  # what pyright's standard mode asks beyond its basic one
OPEN = 37  # errors of pyright inside the package, which may only become fewer
# of other pages: arguments and names that the package does not have
LOST = re.compile('No param|unknown import|attribute of module "dpcomm|Import "dpcomm')
FOREIGN = re.compile('Import "(?!dpcomm)')  # libraries that need not be here
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


MORE = """
training/callbacks foundations/your-mechanism
interop/flower interop/pfl interop/opacus interop/sums
""".split()
GUIDES = [page for page in NOTEBOOKS if page.parent.name == "use"]
GUIDES += [
    page for page in NOTEBOOKS if page.relative_to("nbs").as_posix()[:-6] in MORE
]


def top_level(code: str) -> list[str]:
    "Names that a cell defines."
    symbols = symtable.symtable(code, "cell", "exec").get_symbols()
    return [s.get_name() for s in symbols if s.is_assigned() and not s.is_imported()]


def guide(page) -> str:
    """The code that a reader of a page would type. What it exports is imported in its
    place: how a module is typed inside is pyrightconfig.json's affair.
    """
    told, module = [], ""
    for cell in cells(page):
        if cell.kind != "code":
            continue
        if named := re.match(r"#\| default_exp (\S+)", cell.source):
            module = named[1]
        elif cell.exported:
            body = ast.parse(cell.code).body
            imports = (ast.Import, ast.ImportFrom)
            told += [ast.unparse(node) for node in body if isinstance(node, imports)]
            names = ", ".join(top_level(cell.code))
            told += [f"from dpcomm.{module} import {names}"] if names else []
        else:
            told.append(cell.code)
    return "\n\n".join(told) + "\n"


def filed(page) -> str:
    return "_".join(page.with_suffix(".py").parts).replace("-", "_")


@pytest.mark.slow
def test_pyright_accepts_package_readme_and_guides_and_knows_what_comes_back(tmp_path):
    if importlib.util.find_spec("basedpyright") is None:
        pytest.skip("NOT CHECKED: basedpyright is not installed")
    asked = tmp_path / "asked.py"
    asked.write_text(CODE + ASKED)
    for page in NOTEBOOKS:
        (tmp_path / filed(page)).write_text(guide(page))
    told = (ROOT / "pyrightconfig.json").read_text(encoding="utf-8")
    package = json.loads(re.sub(r"^ *//.*$", "", told, flags=re.M))
    rules = {rule: how for rule, how in package.items() if rule.startswith("report")}
    near = dict(extraPaths=[str(ROOT)])
    inside = dict(root=str(ROOT), **dict.fromkeys(STANDARD, "none") | rules)
    runs = inside | package["executionEnvironments"][1] | near
    places = [
        inside | near | dict(root=str(ROOT / "dpcomm" / "assets")),
        runs | dict(root=str(ROOT / "dpcomm" / "experiments")),
        inside,
        near | dict(root=str(tmp_path)),
    ]
    own = dict(include=[".", str(ROOT / "dpcomm")], pythonVersion="3.11")
    own |= dict(typeCheckingMode="standard", executionEnvironments=places)
    own |= dict(strictParameterNoneValue=package["strictParameterNoneValue"])
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(own))
    words = ["-m", "basedpyright", "-p", tmp_path, "--outputjson"]
    found = json.loads(python(*words).stdout)["generalDiagnostics"]
    wrong = [f for f in found if f["severity"] == "error"]
    wrong = [f for f in wrong if not FOREIGN.match(f["message"])]
    debt = [f for f in wrong if f["file"].startswith(str(ROOT / "dpcomm"))]
    strict = {str(tmp_path / filed(page)) for page in GUIDES} | {str(asked)}
    outside = [f for f in wrong if f not in debt]
    outside = [f for f in outside if f["file"] in strict or LOST.search(f["message"])]
    assert not outside, "\n".join(map(str, outside))
    assert len(debt) <= OPEN, f"{len(debt)} errors inside; they may only become fewer"
    said = [f["message"] for f in found if f["severity"] == "information"]
    assert all(kind in text for kind, text in zip(TOLD, said, strict=True))
