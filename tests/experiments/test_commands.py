"""The command line, from the words of a command to its exit code."""

import csv
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import types

import pytest
from checkout import python, settings
from made_up import made_up
from tables import tabled

import dpcomm
from dpcomm import cli
from dpcomm.evidence import paper_tables, records
from dpcomm.experiments.run import runs, sweep
from dpcomm.mechanisms import contract

FAILED = ValueError("why")
SMOKE = "sweep dprec-mnist --scale smoke --seeds 0 --only linear.eps3"


def said(words, capsys):
    "Exit code and what was printed."
    code = cli.main(words.split())
    return code, capsys.readouterr()


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")


def test_the_package_is_the_command():
    done = python("-m", "dpcomm", "--version")
    assert done.returncode == 0 and done.stdout == f"dpcomm {dpcomm.__version__}\n"


def test_a_plan_says_what_is_missing_and_starts_nothing(tmp_path, capsys):
    code, shown = said(f"{SMOKE} --out {tmp_path} --plan", capsys)
    assert code == 0 and "2 runs are missing" in shown.out
    assert not list(tmp_path.glob("*/*.jsonl"))


@tabled(
    "words, sentence",
    [
        ("sweep dprec-mnits", "did you mean 'dprec-mnist'"),
        ("sweep dprec-mnist --only cmm.eps3", "did you mean 'cnn.eps3"),
        ("sweep dprec-mnist --seeds 0;1", "is not a list of distinct whole numbers"),
        ("sweep --seeds 99999999999999999999999999", "from 0 to 2**63 - 1"),
        ("sweep --dask tls://a:1 --slurm", "--slurm: not allowed with"),
        ("sweep --dask tls://a:1 --processes 2", "--processes: not allowed with"),
        ("list --json --csv", "--csv: not allowed with --json"),
        ("sweep --slurm-option account=mine", "belongs to --slurm"),
        ("sweep dprec-mnist --scale smoke --device gpu", "did you mean 'cpu'"),
        ("sweep --decide --seeds 1", "--decide: not allowed with --seeds"),
        ("sweep --decide --scale quick", "--decide chooses seeds of full-scale runs"),
        ("sweep --processes 0", "is not a whole number from 1"),
        ("run dprec-mnist -p workers=many", "int"),
        ("run dprec-mnist --device gpu", "did you mean 'cpu'"),
        ("run dprec-mnist -p scale=full", "use --scale instead"),
        ("audit gaussian --seed -1", "is not a whole number from 0"),
        ("flower new {out}/numpy", "is a Python keyword or an installed package"),
        ("run dprec-mnist --out nbs/here", "nbs/"),
        ("run dprec-mnist --out ~nobodyx/runs", "~nobodyx"),
        ("run dprec-mnist --out {out}/loop/runs", "link"),
        ("run ~nobodyx/my.ipynb", "~nobodyx"),
        ("run dprec-mnist --device cuda:99", "torch finds"),
        ("run dprec-mnist -p only=typo", "only is 'typo'; it must be one of"),
        ("run dprec-mnist -p onyl=rec", "setting is 'onyl'; it must be one of"),
        ("run dprec-mnist -p lr=0.1,fast", "lr is 'fast'"),
        ("run dprec-mnist -p lr=-1.0", "lr is -1.0"),
        ("run dprec-mnist -p lr=0.1 -p lr=0.2", "given twice"),
        ("run dprec-femnist -p name=sqsgd-emnist", "setting is 'name'"),
        ("run dprec-mnist -p rounds=10,20", "the privacy guarantee depends on it"),
        ("merge nowhere", "has no records"),
        ("data /nowhere mnits", "did you mean 'mnist'"),
        ("report dprec-mnist", "it must be one of"),
        ("sweep dprec-mnist --scale ful", "did you mean 'full'"),
        ("flower nwe {out}/app", "invalid choice: 'nwe'"),
    ],
)
def test_a_slip_costs_a_sentence_and_exit_code_two(
    words, sentence, capsys, monkeypatch, tmp_path
):
    def never(*_, **__):
        raise AssertionError("something was started")

    monkeypatch.setattr(runs, "execute", never)
    monkeypatch.setattr(runs, "run_page", never)
    (tmp_path / "loop").symlink_to("loop")
    code, shown = said(words.format(out=tmp_path), capsys)
    planned = "runs are missing" in shown.out
    assert code == 2 and sentence in shown.err and (planned or not shown.out)
    assert len(shown.err.splitlines()) == 1 and "Traceback" not in shown.err


def test_an_interruption_names_the_command_that_goes_on(monkeypatch, capsys, tmp_path):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "run_grid", stopped)
    monkeypatch.setattr("dpcomm.privacy.audit.ceiling", stopped)
    code, shown = said(f"run dprec-mnist -p lr=1 --out {tmp_path}", capsys)
    assert f"-mnist -p lr=1 --out {tmp_path} --resume`" in shown.err
    code, shown = said(f"run dprec-mnist --resume --out {tmp_path}", capsys)
    assert f"with `dpcomm run dprec-mnist --resume --out {tmp_path}`" in shown.err
    assert code == 130 and len(shown.err.splitlines()) == 2
    assert said("audit rec", capsys)[1].err == "dpcomm: interrupted\n"


def rows_of(text):
    return [*csv.reader(io.StringIO(text))]


@tabled(
    "words, column",
    [
        ("list", "experiment"),
        ("table dprec table2", "verdict"),
        ("sweep dprec-femnist --plan --scale full", "core-hours"),
        ("audit signsgd --trials 100", "claimed"),
    ],
)
def test_tables_are_printed_for_other_programs_too(words, column, capsys):
    code, shown = said(f"{words} --json", capsys)
    (table,) = json.loads(shown.out)["tables"]
    assert code == 0 and column in table["header"] and table["rows"]
    code, shown = said(f"{words} --csv", capsys)
    assert code == 0
    assert rows_of(shown.out) == [table["header"], *table["rows"]]


def test_a_run_prints_its_table_and_names_its_files(tmp_path, capsys, monkeypatch):
    def run_grid(name, out, tell, **how):
        tell(quick(0, 12.5))
        return [records.append(out, quick(0, 12.5))]

    monkeypatch.setattr(runs, "run_grid", run_grid)
    monkeypatch.setattr(runs, "run_page", lambda *_: tmp_path / "page.html")
    words = f"run dprec-mnist --scale quick --out {tmp_path}"
    code, shown = said(words, capsys)
    assert code == 0 and f"report {tmp_path / 'page.html'}" in shown.out
    place, first, *_ = shown.err.splitlines()
    assert place == f"writing records and pages to {tmp_path}"
    assert first == "linear.eps3.rec, seed 0  accuracy, %: 12.5"
    code, shown = said(f"{words} --json", capsys)
    found = json.loads(shown.out)
    assert code == 0 and found["tables"][0]["rows"][0][2] == "12.5"
    assert found["name"] == "dprec-mnist"
    assert found["guarantee"] == "no privacy is claimed"


@tabled("words, wanted", [("lr=0.1", 0.1), ("server=sgd,adam", ("sgd", "adam"))])
def test_settings_are_tried_outside_every_verdict(
    words, wanted, tmp_path, capsys, monkeypatch
):
    given = []

    def run_grid(name, change, **how):
        given.append(change)
        tried = words.split("=")[1].split(",")
        return [dataclasses.replace(quick(0, 1.0), config={"server": v}) for v in tried]

    monkeypatch.setattr(runs, "run_grid", run_grid)
    (tmp_path / "changes").mkdir()
    code, shown = said(f"run dprec-mnist -p {words} --out {tmp_path}", capsys)
    assert code == 0 and given == [{words.split("=")[0]: wanted}]
    assert ("figure " in shown.out) == ("," in words)
    assert [*tmp_path.glob("changes/*.png")] if "," in words else True


def quick(seed, value):
    "A record of scale quick that nobody trained."
    told = dict(final={"accuracy": value}, cost={"wall_seconds": 1.0})
    told |= dict(origin={"code": "0" * 12, "machine": "here", "date": "2026-01-01"})
    who = dict(experiment="dprec_mnist", scale="quick")
    return made_up("linear.eps3.rec", seed, **who, **told)


@pytest.fixture
def committed(tmp_path, monkeypatch):
    "A checkout's records that a test may change."
    there, known = tmp_path / "committed", paper_tables.assets
    places = lambda kind: there if kind == "results" else known(kind)  # noqa: E731
    monkeypatch.setattr(paper_tables, "assets", places)
    return there


def test_records_are_merged_by_union_and_contradictions_refused(
    tmp_path, committed, capsys
):
    mine = tmp_path / "runs"
    records.append(committed, quick(0, 1.0))
    records.append(mine, dataclasses.replace(quick(0, 1.0), experiment="ones_own"))
    for record in (quick(0, 1.0), quick(1, 2.0)):
        path = records.append(mine, record)
    assert said(f"merge {mine}", capsys)[1].out == "1 new records\n"
    assert said(f"merge {mine}", capsys)[1].out == "0 new records\n"
    path.write_text(records.to_line(quick(1, 2.5)) + "\n")
    before = (committed / "dprec" / path.name).read_bytes()
    code, shown = said(f"merge {mine}", capsys)
    assert code == 2 and "final.accuracy is 2.0 and 2.5" in shown.err
    assert (committed / "dprec" / path.name).read_bytes() == before
    assert [p.name for p in (committed / "dprec").iterdir()] == [path.name]


def full(seed, value, key="cnn.eps3.rec", **origin):
    "A full record of a cell of Table 1."
    cells = {"mnist.eps3.rec.acc": [value, "percent"], "ours.x": [value, "percent"]}
    more = dict(scale="full", key=key, cells=cells)
    made = {"code": "0" * 12, "machine": "here", "date": "2026-06-01"} | origin
    return dataclasses.replace(quick(seed, value), origin=made, **more)


def test_a_merge_names_published_numbers_that_change_and_asks(
    tmp_path, committed, capsys, monkeypatch
):
    mine = tmp_path / "runs"
    path = records.append(committed, full(0, 60.0), full(1, 62.0))
    records.append(mine, full(2, 70.0))
    before = path.read_bytes()
    code, shown = said(f"merge {mine}", capsys)
    assert code == 2 and "2 published numbers would change" in shown.err
    assert "mnist.eps3.rec.acc: 61.00" in shown.out and "-> 64.00" in shown.out
    assert "ours.x: 61 (n = 2) -> 64 (n = 3)" in shown.out
    assert path.read_bytes() == before
    for answer, wanted in (("n", 2), ("", 2), ("y", 0)):
        monkeypatch.setattr("builtins.input", lambda *_: answer)
        monkeypatch.setattr(cli.sys.stdin, "isatty", lambda: True, raising=False)
        assert said(f"merge {mine}", capsys)[0] == wanted
        assert (path.read_bytes() == before) == bool(wanted)
    records.append(mine, full(3, 80.0))
    monkeypatch.setattr("builtins.input", None)
    assert said(f"merge {mine} --yes", capsys)[0] == 0
    assert len(records.read(path)) == 4


def test_a_merge_takes_no_run_that_no_grid_has(tmp_path, committed, capsys):
    tried = dataclasses.replace(full(0, 60.0, "change.lr=1.cnn.eps3.rec"), cells={})
    records.append(tmp_path / "changes", tried)
    code, shown = said(f"merge {tmp_path / 'changes'} --yes", capsys)
    assert code == 2 and "key of a run is 'change.lr=1.cnn.eps3.rec'" in shown.err
    assert not committed.exists()


def test_no_clock_lets_a_merge_replace_what_stands(tmp_path, committed, capsys):
    "A record dated 1970 stands beside the published one, not for it."
    path = records.append(committed, full(0, 88.2, code=None))
    for i, date in enumerate(("1970-01-01T00:00:00", "1970-01-02T00:00:00")):
        mine = tmp_path / f"runs{i}"
        records.append(mine, full(0, 99.9 - i, code=str(i) * 12, date=date))
        code, shown = said(f"merge {mine}", capsys)
        assert code == 0 and shown.out.endswith("1 new records\n")
        told = f"cnn.eps3.rec, seed 0: final.accuracy is 88.2 and {99.9 - i}; the earlier one"
        assert f"{told} stays, its code unrecorded" in shown.out
        found = records.current(records.read(path)).values()
        assert [r.final["accuracy"] for r in found] == [88.2]


@tabled("width", [80, 120, 200])
def test_tables_fit_the_terminal(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    for words in ("table dprec table1", "table fltop table1", "list", "data"):
        code, shown = said(words, capsys)
        assert code == 0
        assert max(len(line.rstrip()) for line in shown.out.splitlines()) <= width


@tabled(
    "results, code, says",
    [
        ([True], 0, "1 done, 0 unfinished, 0 failed; last x.full/k.seed0"),
        ([True, False], 3, "1 runs are left"),
        ([True, False, FAILED], 1, "x.full/k.seed0 failed: ValueError: why"),
    ],
)
def test_a_sweep_ends_with_a_code(results, code, says, monkeypatch, capsys, tmp_path):
    done = [(types.SimpleNamespace(name="x.full/k.seed0"), each) for each in results]
    monkeypatch.setattr(sweep, "run_here", lambda *_, **__: done)
    found, shown = said(f"{SMOKE} --out {tmp_path}", capsys)
    assert found == code and says in shown.err


@tabled("encoding, paper", [("ascii", "sqsgd"), ("utf-8", "imvu")])
def test_tables_print_in_any_encoding(encoding, paper):
    "Signs that the output cannot show are left out, and their words stay."
    words = "-m", "dpcomm", "table", paper
    done = python(*words, env={"PYTHONIOENCODING": encoding}, encoding=encoding)
    assert done.returncode == 0, done.stderr
    assert "not run" in done.stdout
    assert ("\u25cb not run" in done.stdout) == (encoding == "utf-8")


@tabled("words", ["list", "table dprec --json", "report dprec", f"{SMOKE} --plan"])
def test_nothing_is_said_where_the_reader_of_a_pipe_ends_first(words):
    reader, pipe = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "dpcomm", *words.split()]
    with open(pipe, "wb") as out:
        how = dict(stdout=out, stderr=subprocess.PIPE, env=settings())
        done = subprocess.run(command, **how)
    assert (done.returncode, done.stderr) == (int("sweep" in words), b"")


OWN = """
from dataclasses import dataclass
from dpcomm.mechanisms.signsgd import SignSgd

@dataclass(frozen=True)
class Mine(SignSgd):
    name = "mine_of_a_test"

class Nothing:
    pass
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    "A module with a mechanism; the registry forgets it with the test."
    (tmp_path / "own_mechanism.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_mechanism", raising=False)
    contract.mechanism_class("signsgd")  # what is imported later leaves with the test
    monkeypatch.setattr(contract, "_REGISTRY", dict(contract._REGISTRY))


def test_a_mechanism_of_ones_own_is_audited_by_its_place(own, capsys):
    code, shown = said("audit own_mechanism:Mine --trials 100 --json", capsys)
    (table,) = json.loads(shown.out)["tables"]
    assert code == 0 and table["rows"][0][0].startswith("mine_of_a_test(")
    for place, why in (
        ("own_mechanism:Other", "cannot be imported .*: write it as my.module:Class"),
        ("no_such_module:Mine", "cannot be imported"),
        ("own_mechanism:Nothing", "is not a mechanism: derive the class from"),
        (":", "cannot be imported"),
    ):
        code, shown = said(f"audit {place}", capsys)
        assert code == 2 and re.search(why, shown.err), shown.err


def test_mechanisms_of_installed_packages_are_in_the_registry(own, capsys, monkeypatch):
    places = dict(mine_of_a_test="own_mechanism:Mine", broken="no_such:Class")
    places |= dict(misnamed="own_mechanism:Mine", nothing="own_mechanism:Nothing")
    points = [types.SimpleNamespace(name=k, value=v) for k, v in places.items()]
    monkeypatch.setattr(contract, "entry_points", lambda group: points)
    contract._places.cache_clear()
    try:
        assert places.keys() <= set(contract.registered())
        made = contract.mechanism("mine_of_a_test", clip_norm=1.0, sigma=0.5)
        assert type(made).__module__ == "own_mechanism"
        for name, why in (
            ("broken", "'no_such:Class' cannot be imported"),
            ("misnamed", "give both the same name"),
            ("nothing", "is not a mechanism"),
        ):
            with pytest.raises(ValueError, match=why):
                contract.mechanism_class(name)
            code, shown = said(f"audit {name}", capsys)
            assert code == 2 and len(shown.err.splitlines()) == 1
    finally:
        contract._places.cache_clear()
