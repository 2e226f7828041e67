"A setting tried beside the recorded ones: under a key of its own, and never a verdict."

import pytest
from tables import tabled

from dpcomm.evidence import records, verdicts
from dpcomm.experiments.run import grids, runs

KEY = "linear.eps3.rec"
ASKED = dict(name="dprec-mnist", only=KEY)


@tabled(
    "text, says",
    [
        ("sever_lr=0.1", "did you mean 'server_lr'"),
        ("server_lr", "write it in the form server_lr=0.001"),
        ("server_lr=", "write it in the form server_lr=0.001"),
        ("server_lr=fast", "server_lr is 'fast'"),
        ("server_lr=-1", "server_lr is -1"),
        ("server=rmsprop", "server"),
        ("rounds=3", "the privacy guarantee depends on it"),
        ("lr=0.1,cohort=3", "the privacy guarantee depends on it"),
        ("lr=0.1,sampling=poisson", "the privacy guarantee depends on it"),
    ],
)
def test_what_cannot_be_changed_is_refused_by_name(text, says):
    with pytest.raises(ValueError, match=says):
        runs.read_change(text)


def test_a_change_is_read_with_its_types():
    found = runs.read_change("server_lr=0.001, server=sgd,epochs=2")
    assert found == dict(server_lr=0.001, server="sgd", epochs=2)
    run = grids.Run("a.b", "a run", "smoke")
    key = "change.epochs=2,server=sgd,server_lr=0.001.a.b"
    assert runs.changed_key(run, found) == key


def test_a_changed_run_has_a_key_of_its_own_and_no_cell(tmp_path):
    made = runs.try_change(change="server_lr=0.03,eval_every=50", out=tmp_path, **ASKED)
    assert made.header[-1] == "eval_every=50,server_lr=0.03"
    assert made.rows[0][:3] == (KEY, "0", "not recorded")
    assert not records.load("dprec", root=tmp_path)
    (r,) = records.load("dprec", root=tmp_path / "changes")
    assert r.key == f"change.eval_every=50,server_lr=0.03.{KEY}"
    assert r.cells == {} and r.config["server_lr"] == 0.03 and r.final["accuracy"]
    assert any("server_lr=0.03" in note for note in r.notes)
    assert verdicts.evidence("dprec", tmp_path / "changes").ours == {}


def test_a_change_to_what_a_run_has_already_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=f"{KEY} of dprec-mnist already has these settings"
    ):
        runs.try_change(change="server_lr=0.01", out=tmp_path, **ASKED)
    assert not list(tmp_path.rglob("*.jsonl"))


def test_a_change_that_another_record_means_is_refused_by_its_name(
    tmp_path, monkeypatch
):
    experiment = grids.find("dprec-mnist")
    (run,) = [r for r in experiment.grid("smoke") if r.key == KEY]
    change = dict(server_lr=0.03, eval_every=50)
    other = runs.execute(experiment, run, 0, tmp_path, change=change)
    there = {("step", 0): other}
    monkeypatch.setattr(runs, "recorded_runs", lambda *_: there)
    with pytest.raises(ValueError, match="is the run step"):
        runs.try_change(
            change="server_lr=0.03,eval_every=50", out=tmp_path / "b", **ASKED
        )
    there["step", 0] = other.__class__(**vars(other) | dict(data={"name": "other"}))
    assert runs.execute(experiment, run, 0, tmp_path / "c", change=change)


def test_what_trains_nothing_has_nothing_to_change(tmp_path):
    with pytest.raises(ValueError, match="dprec-costs has no training run"):
        runs.try_change("dprec-costs", "lr=0.1", out=tmp_path)
    run = next(r for r in grids.find("dprec-mean").grid("smoke"))
    with pytest.raises(ValueError, match="does not train a model"):
        runs.execute(grids.find("dprec-mean"), run, 0, tmp_path, change=dict(lr=0.1))
