"`train`, the short way to a run: the same run, and what it refuses."

import math
import os
from dataclasses import fields, replace

import pytest
import torch
from tables import tabled
from torch import nn

import dpcomm
from dpcomm.core.checks import nearest
from dpcomm.core.random import seed_tree
from dpcomm.core.vectors import flatten, pack
from dpcomm.datasets.images import Federation
from dpcomm.training.callbacks import CSV, Callback

RULES = dict(n_clients=6, cohort=3, rounds=4, delta=1e-2, sampling="fixed")


def parts():
    "A module, clients, a calibrated mechanism with its deployment, and test data."
    rng = seed_tree(0, "people")
    people = [(rng.normal(size=(5, 4)), rng.integers(3, size=5)) for _ in range(6)]
    test = rng.normal(size=(7, 4)), rng.integers(3, size=7)
    deployment = dpcomm.Deployment(**RULES)
    mechanism = deployment.calibrate("gaussian", eps=5.0, clip_norm=0.5)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3))
    return model, people, mechanism, deployment, test


NAMES = "model", "clients", "mechanism", "deployment", "test"


def train(**more):
    return dpcomm.train(**dict(zip(NAMES, parts()), progress=False) | more)


def test_it_is_the_run_that_simulate_makes():
    model, people, mechanism, deployment, test = parts()
    how, quiet = dict(lr=0.2, server="sgd", server_lr=1.0), dict(progress=False)
    parts_of, more = (mechanism, deployment), how | quiet | dict(seed=3)
    run = dpcomm.train(model, people, *parts_of, test=test, **more)
    held = Federation.of(people, test)
    task = dpcomm.Task(model, held, mechanism, dpcomm.Config(**how), 3)
    same = dpcomm.simulate(task, deployment=deployment, train_loss=False, **quiet)
    assert run.finished and torch.equal(run.w, same.w) and run.history == same.history
    assert run.history[-1]["eps"] == deployment.guarantee(mechanism).eps <= 5
    assert torch.equal(run.w, dpcomm.train(model, held, *parts_of, **more).w)


@tabled(
    "change, kind, says",
    [
        (dict(lrr=0.1), ValueError, "setting is 'lrr'.*did you mean 'lr'"),
        (dict(learning_rate=0.1), ValueError, "'learning_rate'.*did you mean 'lr'"),
        (dict(num_clients=6), ValueError, r"pass Deployment\(n_clients=...\)"),
        (dict(criterion=1), ValueError, "'criterion'.*did you mean 'loss'"),
        (dict(resume=True), ValueError, "resume is True, and there is no checkpoint"),
        (dict(metrics=lambda *_: dict(a="b")), TypeError, "score 'a' is 'b'; .*numb"),
        (dict(metrics=lambda *_: dict(eps=1)), ValueError, "score is named 'eps', w"),
        (dict(metrics=lambda *_: dict(a=torch.ones(2))), TypeError, "a float or"),
        (dict(onyl=1), ValueError, "setting is 'onyl'; .*: pass one of these$"),
        (dict(eps=3.0), ValueError, "eps is 3.0; only math.inf .*calibrate"),
        (dict(eps=math.inf, max_epsilon=2.0), ValueError, "eps is inf, and guarantee"),
        (dict(test=None), TypeError, r"pass test=\(x, y\)"),
        (dict(rounds=9), ValueError, "rounds"),
        (dict(weights=[1, 2]), ValueError, "weights is .* one for each of the 6"),
        (dict(clients=[]), ValueError, "clients have no examples"),
    ],
)
def test_what_does_not_go_is_a_sentence(change, kind, says):
    with pytest.raises(kind, match=says):
        train(**change)


TYPOS = {  # what was typed -> what was meant
    **dict(lrr="lr", epcohs="epochs", bacth="batch", servr_lr="server_lr"),
    **dict(momentun="momentum", callback="callbacks", worker="workers"),
    **dict(sampeling="sampling", num_rounds="rounds", optimizer="server"),
    **dict(without_replacement="fixed", POISSON="poisson", dpsgd="gaussian"),
    **dict(enigne="engine", validation="test", patience="callbacks"),
}
OTHERS = "callbacks workers metrics replacement fixed poisson gaussian vqsgd relation"
FAR = "onyl laplace everything foo verbose dropout shuffle hidden client noise".split()


def test_a_name_that_is_not_close_is_not_guessed():
    names = [f.name for f in fields(dpcomm.Config)] + [*OTHERS.split(), "test"]
    assert {name: nearest(name, names) for name in TYPOS} == TYPOS
    assert {nearest(name, names) for name in FAR} == {""}
    doors = dpcomm.Config, dpcomm.Deployment, type(parts()[2])
    for door, name in zip(doors, ("batch_size", "num_clients", "max_grad_norm")):
        with pytest.raises(ValueError, match=f"a field of .*'{name}'.*did you mean"):
            door(**{name: 1})
    with pytest.raises(ValueError, match="'adam' does not use it: pass server='mom"):
        dpcomm.Config(momentum=0.1)


@tabled("engine", ["loop", "vmap", "fused", "graphed"])
def test_without_privacy_the_same_call_is_federated_averaging(engine, capsys):
    "Every weight as by an update that is neither clipped nor noised, and it is said."
    model, people, _, deployment, _ = parts()
    how = dict(lr=0.5, server="sgd", server_lr=1.0, eps=math.inf, engine=engine)
    run = train(deployment=replace(deployment, cohort=6, rounds=1), **how)
    assert "no privacy: mechanism none gives no guarantee" in capsys.readouterr().out
    *lines, last = str(run).splitlines()
    assert len(lines) == 3 and last.startswith("no privacy:") and engine in lines[0]
    assert run.history[-1]["eps"] is None and run.ledger.uplink_bits == 6 * 32 * 15
    moved = []
    for x, y in people:
        x, y = torch.as_tensor(x).float(), torch.as_tensor(y)
        loss = nn.functional.cross_entropy(model(x), y)
        slope = flatten(torch.autograd.grad(loss, [*model.parameters()]))
        moved.append(pack(model) - 0.5 * slope)
    torch.testing.assert_close(run.w.detach(), torch.stack(moved).mean(0))
    assert torch.equal(pack(run.model()), run.w.detach())


def test_a_mechanism_that_guarantees_nothing_trains_in_a_deployment_too(capsys):
    train(mechanism=dpcomm.mechanism("vqsgd", eps=math.inf, clip_norm=1.0))
    assert "no privacy: mechanism vqsgd" in capsys.readouterr().out


def test_what_no_guarantee_covers_is_left_out_unless_asked_for():
    assert all("train_loss" not in entry for entry in train().history)
    assert all("train_loss" in entry for entry in train(train_loss=True).history)
    says = "deployment is None; it must be a Deployment: pass who takes part"
    with pytest.raises(TypeError, match=says):
        train(deployment=None)


@pytest.mark.skipif(os.name != "posix", reason="folders are closed by their mode")
def test_places_to_write_are_tried_before_the_first_round(tmp_path):
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "run"
    rounds = []

    class Told(Callback):
        def after_round(self, run, task, loss):
            rounds.append(run.round)

    with pytest.raises(OSError, match="cannot be written"):
        train(checkpoint=below, callbacks=[Told()])
    with pytest.raises(OSError, match="cannot be written"):
        CSV(below)
    assert not rounds
    with pytest.raises(IsADirectoryError, match="name a file"):
        train(checkpoint=tmp_path)
