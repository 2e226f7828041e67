"More machines change when a record is there, never what is in it."

import importlib
import os
import signal
import sys
from dataclasses import replace

import pytest
from checkout import ROOT

from dpcomm.experiments import cluster, sweep
from dpcomm.report import records

ASKED = dict(name="dprec-mnist", scale="smoke", seeds=(0, 1), only="linear.eps3")


def extra(name):
    "A package of `dpcomm[cluster]`; a skip that names it where it is not there."
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        pytest.skip(
            f"NOT CHECKED: {name} is not installed: pip install 'dpcomm[cluster]'"
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


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    "The numbers of processes of this machine, without a cluster."
    folder = tmp_path_factory.mktemp("one")
    done = sweep.run_here(sweep.plan([ASKED]), folder, 2)
    assert not done.failed and len(done.done) == 4
    return read(folder)


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
            sweep.plan([ASKED]), local.scheduler_address, tmp_path, say=say
        )
        client.close()
    assert len(killed) == 1 and done.failed == {} and len(said) == 4
    assert numbers(done.records) == read(tmp_path) == one


@pytest.mark.deep
def test_a_job_that_fails_under_dask_is_told_and_the_rest_is_done(tmp_path):
    extra("distributed")
    good = sweep.plan([dict(ASKED, seeds=(0,))])[0]
    bad = replace(good, key="linear.eps3.nothing")
    late = replace(good, key="gap", needs=(bad.key,))
    done = cluster.run_dask([late, bad, good], out=tmp_path, processes=2)
    assert [r.key for r in done.records] == [good.key]
    assert set(done.failed) == {bad, late} and bad.key in done.failed[bad]
    assert list(read(tmp_path)) == [(good.key, 0)]


@pytest.mark.deep
def test_submitit_on_this_machine_changes_no_number(one, tmp_path):
    extra("submitit")
    said = []
    done = cluster.run_slurm(sweep.plan([ASKED]), tmp_path, "local", said.append)
    assert done.failed == {} and len(said) == 4
    assert numbers(done.records) == read(tmp_path) == one


@pytest.mark.deep
def test_a_job_that_fails_under_submitit_is_told_and_the_rest_is_done(tmp_path):
    extra("submitit")
    good = sweep.plan([dict(ASKED, seeds=(0,))])[0]
    bad = replace(good, key="linear.eps3.nothing")
    done = cluster.run_slurm([bad, good], tmp_path, "local")
    assert set(done.failed) == {bad} and bad.key in done.failed[bad]
    assert list(read(tmp_path)) == [(good.key, 0)]


def test_a_job_that_slurm_stops_is_put_back_as_it_was():
    extra("submitit")
    first = sweep.plan([ASKED])[0]
    again = cluster.Resumable(first, "out").checkpoint()
    assert again.function.job == first and again.function.out == "out"


@pytest.mark.parametrize(
    "call, name", [(cluster.run_dask, "distributed"), (cluster.run_slurm, "submitit")]
)
def test_a_missing_extra_is_named_with_the_command(tmp_path, monkeypatch, call, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ValueError, match=rf"{name} is not installed .*dpcomm\[cluster\]"
    ):
        call(sweep.plan([ASKED])[:1], out=tmp_path)


def test_a_cluster_and_a_sweep_do_not_share_a_folder(tmp_path):
    for call in (cluster.run_dask, cluster.run_slurm):
        with (
            sweep.own(tmp_path),
            pytest.raises(ValueError, match="another sweep is writing"),
        ):
            call(sweep.plan([ASKED])[:1], out=tmp_path)


def test_a_record_that_comes_back_is_checked_before_it_is_kept(tmp_path):
    first = sweep.plan([ASKED])[0]
    with pytest.raises(ValueError, match="linear.eps3.fedavg.seed0: no JSON"):
        cluster._keep(
            cluster.Outcome(), replace(first, key="linear.eps3.fedavg"), "{", tmp_path
        )
    assert list(tmp_path.iterdir()) == []


def test_a_job_whose_inputs_are_missing_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster.runs, "perform", lambda *given, **how: None)
    with pytest.raises(
        ValueError, match="a record that it needs is missing; sweep again"
    ):
        cluster.remote(sweep.plan([ASKED])[0], tmp_path)


def test_what_needs_others_is_a_stage_of_its_own():
    first = sweep.plan([ASKED])[0]
    late = replace(first, key="gap", needs=("a",))
    assert cluster._stages([late, first]) == [[first], [late]]
