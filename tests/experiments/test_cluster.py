"More machines change when a record is there, never what is in it."

import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace
from http.client import HTTPException

import pytest
from checkout import ROOT, python

from dpcomm.core.checks import NotInstalled
from dpcomm.evidence import records
from dpcomm.experiments.run import cluster, planning, sweep

ASKED = dict(name="dprec-mnist", scale="smoke", seeds=(0, 1), only="linear.eps3")


def extra(name):
    "A package of the extra `[cluster]`; a skip that names it where it is not there."
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        pytest.skip(
            f"NOT CHECKED: {name} is not installed: pip install -e '.[cluster]'"
        )


@pytest.fixture(autouse=True, scope="module")
def this_checkout():
    "Children import the package that is tested, and use one thread each."
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (threads | {"PYTHONPATH": path}).items():
            patch.setenv(name, value)
        yield


def numbers(found) -> dict:
    "What was recorded, without when and at what cost."
    found = list(found)
    assert len({r.identity for r in found}) == len(found)
    return {(r.key, r.seed): records.result_of(r) for r in found}


def read(folder) -> dict:
    return numbers(records.load("dprec", root=folder))


@pytest.mark.deep
def test_a_killed_dask_worker_changes_no_number(one, tmp_path):
    distributed = extra("distributed")
    more = dict(dashboard_address=None, memory_limit=0, host="127.0.0.1")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, **more) as local:
        client, killed, said = distributed.Client(local), [], []

        def say(line):
            "The first result kills a worker that has jobs to do."
            said.append(line)
            if not killed:
                at = next(at for at, jobs in client.processing().items() if jobs)
                killed.append(client.run(os.getpid, workers=[at])[at])
                os.kill(killed[0], signal.SIGKILL)

        done = cluster.run_dask(
            planning.plan([ASKED]), local.scheduler_address, tmp_path, say=say
        )
        client.close()
    assert len(killed) == 1 and done.failed == {} and len(said) == 4
    assert numbers(done.records) == read(tmp_path) == one


@pytest.mark.deep
def test_a_local_dask_cluster_serves_nobody_else():
    """Loopback alone, TLS with certificates that nobody else has, no dashboard; a
    stranger of this machine can neither connect nor read anything.
    """
    distributed, psutil = extra("distributed"), extra("psutil")
    with cluster._client("local", 1) as client:
        address = client.scheduler_info()["address"]
        us = psutil.Process()
        sockets = [
            socket.laddr
            for process in (us, *us.children(recursive=True))
            for socket in process.net_connections("inet")
            if socket.status == "LISTEN"
        ]
        assert {at.ip for at in sockets} == {"127.0.0.1"}
        assert address.startswith("tls://127.0.0.1:")
        with pytest.raises((OSError, TypeError)):
            distributed.Client(address.replace("tls", "tcp"), timeout=2)
        with pytest.raises((OSError, TypeError)):
            own = distributed.security.Security.temporary()
            distributed.Client(address, security=own, timeout=2)
        for at in sockets:
            page = f"http://127.0.0.1:{at.port}/json/identity.json"
            with pytest.raises((OSError, HTTPException)):
                urllib.request.urlopen(page, timeout=5)


@pytest.mark.parametrize(
    "address, open_to_others",
    [
        ("tcp://10.0.0.1:8786", True),
        ("tcp://[2001:db8::1]:8786", True),
        ("10.0.0.1:8786", True),
        ("ws://login:8786", True),
        ("tls://10.0.0.1:8786", False),
        ("tcp://127.0.0.1:8786", False),
        ("tcp://[::1]:8786", False),
        ("localhost:8786", False),
    ],
)
def test_a_scheduler_without_encryption_is_warned_of(address, open_to_others):
    told = cluster.exposed(address)
    assert bool(told) == open_to_others
    assert not told or "runs code on the workers as you" in told


@pytest.mark.deep
def test_a_job_that_fails_under_dask_is_told_and_the_rest_is_done(tmp_path):
    extra("distributed")
    good = planning.plan([dict(ASKED, seeds=(0,))])[0]
    bad = replace(good, key="linear.eps3.nothing")
    late = replace(good, key="gap", needs=(bad.key,))
    done = cluster.run_dask([late, bad, good], out=tmp_path, processes=1)
    assert [r.key for r in done.records] == [good.key]
    assert set(done.failed) == {bad, late} and bad.key in done.failed[bad]
    assert list(read(tmp_path)) == [(good.key, 0)]


@pytest.mark.deep
def test_submitit_changes_no_number_and_tells_which_job_failed(one, tmp_path):
    extra("submitit")
    good, said = planning.plan([dict(ASKED, seeds=(0,))])[0], []
    bad = replace(good, key="linear.eps3.nothing")
    done = cluster.run_slurm([bad, good], tmp_path, "local", said.append)
    assert set(done.failed) == {bad} and bad.key in done.failed[bad] and said
    at = good.key, good.seed
    assert numbers(done.records) == read(tmp_path) == {at: one[at]}


SBATCH = """#!{python}
import re, sys
from pathlib import Path
text = Path(sys.argv[1]).read_text()
asked = dict(re.findall(r"#SBATCH --([a-z-]+)=(.*)", text))
with open({log!r}, "a") as log:
    print(repr(asked), file=log)
if asked.get("account") != "mine":
    sys.exit("sbatch: error: Batch job submission failed: Invalid account or"
             " account/partition combination specified")
if int(asked["time"]) > 7 * 24 * 60:
    sys.exit("sbatch: error: Batch job submission failed: Requested time limit is"
             " invalid (missing or exceeds some limit)")
n = int(asked.get("array", "0-0").split("%")[0].split("-")[1])
if n >= 4:
    sys.exit("sbatch: error: Batch job submission failed: Invalid job array specification")
print("Submitted batch job", len(Path({log!r}).read_text().splitlines()))
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    "A cluster that wants an account, gives seven days, and takes arrays of four."
    place, log = tmp_path / "bin", tmp_path / "asked"
    place.mkdir()
    programs = dict(
        sbatch=SBATCH.format(python=sys.executable, log=str(log)),
        srun="#!/bin/sh\n",
        scancel=f"#!/bin/sh\necho scancel $* >> {log}\n",
        scontrol="#!/bin/sh\necho 'MaxArraySize            = 4'\n",
    )
    for name, text in programs.items():
        (place / name).write_text(text)
        (place / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")
    return log


def test_slurm_jobs_ask_for_their_own_class_and_are_split_by_array_size(
    slurm, tmp_path
):
    extra("submitit")
    first = planning.plan([ASKED])[0]
    small = [replace(first, seed=i, minutes=5.0, memory=0.7) for i in range(9)]
    large = [replace(first, seed=i, minutes=500 * 60.0, memory=5.0) for i in range(2)]
    handed = cluster._submit(
        [*small, *large], tmp_path / "out", "slurm", {"account": "mine"}
    )
    assert [job for job, _ in handed] == [*small, *large]
    asked = [eval(row) for row in slurm.read_text().splitlines()]
    shape = [(a["time"], a["mem"], a.get("array", "one").split("%")[0]) for a in asked]
    few, day = ("60", "1GB"), (str(24 * 60), "8GB")
    assert shape == [
        (*few, "0-3"),
        (*few, "0-3"),
        (*few, "one"),
        (*day, "0-1"),
    ]
    assert all(a["account"] == "mine" and a["cpus-per-task"] == "1" for a in asked)
    turns = cluster.request_of(large[0])[2]
    assert turns * 24 * 60 > 3 * large[0].minutes, "it may come back until it is done"


def test_what_slurm_refuses_is_one_sentence_and_nothing_stays(slurm, tmp_path):
    extra("submitit")
    jobs = planning.plan([ASKED])
    with pytest.raises(ValueError) as error:
        cluster.run_slurm(jobs, tmp_path / "out")
    assert "Slurm refused the jobs (Invalid account or account/" in str(error.value)
    assert "--slurm-option account=NAME" in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 240
    slurm.unlink()
    late = replace(jobs[0], minutes=90_000.0)
    asks = {"account": "mine", "time": 10**6}
    with pytest.raises(ValueError, match="Requested time limit is invalid"):
        cluster._submit([late], tmp_path / "out", "slurm", asks)


def test_arrays_that_were_taken_are_taken_back_when_one_is_refused(
    slurm, tmp_path, monkeypatch
):
    extra("submitit")
    first = planning.plan([ASKED])[0]
    monkeypatch.setattr(cluster, "_array_size", lambda: 9)
    jobs = [replace(first, minutes=600.0)]
    jobs += [replace(first, seed=i, minutes=5.0) for i in range(9)]
    with pytest.raises(ValueError, match="Invalid job array specification"):
        cluster._submit(jobs, tmp_path / "out", "slurm", {"account": "mine"})
    assert "scancel 1" in slurm.read_text()


def test_where_there_is_no_slurm_nothing_starts(tmp_path, monkeypatch):
    extra("submitit")
    monkeypatch.setattr(cluster.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="Slurm was not found .* --processes N"):
        cluster.run_slurm(planning.plan([ASKED]), tmp_path)
    assert not list(tmp_path.rglob("*.jsonl")) and not (tmp_path / "submitit").exists()


def test_printed_lines_survive_the_recipe_of_the_page(tmp_path, monkeypatch):
    "Blanks, quotes and a semicolon in a folder's name reach the run as they are."
    page = (ROOT / "nbs" / "run" / "cluster.ipynb").read_text()
    recipe = re.search(r"tr .* xargs -0 -n 1 -P 8 sh -c", page).group()
    recipe = recipe.replace("\\\\", "\\")
    show = tmp_path / "show"
    show.write_text(
        f"#!/bin/sh\nprintf '%s\\n' \"$@\" >> {shlex.quote(str(tmp_path / 'said'))}\n"
    )
    show.chmod(0o755)
    monkeypatch.setattr(sweep.sys, "executable", str(show))
    jobs, folder = planning.plan([ASKED]), """a 'b"; touch c"""
    lines = [planning.shell_line(job, folder) for job in jobs]
    (tmp_path / "jobs.txt").write_text("".join(f"{line}\n" for line in lines))
    recipe = recipe.replace("-P 8", "-P 1")
    done = subprocess.run(["sh", "-c", recipe], cwd=tmp_path, timeout=60)
    words = [shlex.split(line)[1:] for line in lines]
    assert done.returncode == 0 and not (tmp_path / "c").exists()
    assert (tmp_path / "said").read_text().splitlines() == sum(words, [])
    assert all(each[-1] == folder for each in words)


def test_a_job_that_slurm_stops_is_put_back_as_it_was():
    extra("submitit")
    first = planning.plan([ASKED])[0]
    again = cluster.Resumable(first, "out").checkpoint()
    assert again.function.job == first and again.function.out == "out"


@pytest.mark.parametrize(
    "call, name", [(cluster.run_dask, "distributed"), (cluster.run_slurm, "submitit")]
)
def test_a_missing_extra_is_named_with_the_command(tmp_path, monkeypatch, call, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(NotInstalled, match=rf"{name} is .* the extra cluster brings"):
        call(planning.plan([ASKED])[:1], out=tmp_path)


def test_a_cluster_and_a_sweep_do_not_share_a_folder(tmp_path):
    for call in (cluster.run_dask, cluster.run_slurm):
        with (
            sweep.locked_folder(tmp_path),
            pytest.raises(ValueError, match="another sweep is writing"),
        ):
            call(planning.plan([ASKED])[:1], out=tmp_path)


def test_a_record_that_comes_back_is_checked_before_it_is_kept(tmp_path):
    first = planning.plan([ASKED])[0]
    with pytest.raises(ValueError, match="linear.eps3.fedavg.seed0: not valid JSON"):
        cluster._keep(
            cluster.Outcome(), replace(first, key="linear.eps3.fedavg"), "{", tmp_path
        )
    assert list(tmp_path.iterdir()) == []


def test_a_job_whose_inputs_are_missing_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster.runs, "execute", lambda *given, **how: None)
    with pytest.raises(
        ValueError, match="a record that it needs is missing: run the sweep again"
    ):
        cluster.remote(planning.plan([ASKED])[0], tmp_path)


def test_what_needs_others_is_a_stage_of_its_own():
    first = planning.plan([ASKED])[0]
    late = replace(first, key="gap", needs=("a",))
    assert cluster._stages([late, first]) == [[first], [late]]


def test_submitit_leaves_the_logging_of_others_alone():
    "Its import would shut every handler down, and absl's closes its stream with it."
    extra("submitit")
    done = python(
        "-c",
        "import io, logging\n"
        "from dpcomm.experiments.run import cluster\n"
        "kept = logging.StreamHandler(io.StringIO())\n"
        "logging.getLogger('other').addHandler(kept)\n"
        "cluster._submitit()\n"
        "assert logging.getLogger('other').handlers == [kept]\n"
        "logging.getLogger('other').warning('still here')\n"
        "assert 'still here' in kept.stream.getvalue()\n"
        "assert not logging.getLogger('other').disabled\n",
    )
    assert done.returncode == 0, done.stderr
