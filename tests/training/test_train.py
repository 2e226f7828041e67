"`train`, the short way to a run, what it refuses, and who takes part in it."

import math
import os
from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest
import torch
from tables import tabled
from torch import nn

import dpcomm
from dpcomm import Config, Deployment, Task, mechanism, simulate
from dpcomm.core.checks import nearest
from dpcomm.core.random import seed_tree
from dpcomm.core.vectors import flatten, pack
from dpcomm.datasets.images import Federation
from dpcomm.training import federated
from dpcomm.training.callbacks import Callback

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
        (dict(eps=math.inf, max_epsilon=2.0), ValueError, "eps is inf: leave out guar"),
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
    with pytest.raises(ValueError, match="with momentum, is 'adam'; .* of momentum"):
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
    assert not rounds
    with pytest.raises(IsADirectoryError, match="name a file"):
        train(checkpoint=tmp_path)


# ---- who takes part, read from a deployment


def _deployed(**changes):
    "A small run and the deployment that says who takes part."
    clients = [(torch.ones(3, 4) * i, torch.tensor([0, 1, i % 2])) for i in range(12)]
    made = Federation.of(clients, test=clients[1])
    deployment = Deployment(12, 4, 9, 1e-3, visits=4, **changes)
    mechanism = deployment.calibrate("signsgd", 8.0)
    return Task(nn.Linear(4, 2), made, mechanism, Config(engine="loop"), 0), deployment


@tabled("sampling", ("poisson", "fixed", "replacement"))
def test_a_run_is_its_deployment(sampling):
    task, deployment = _deployed(sampling=sampling)
    run = simulate(task, deployment=deployment, progress=False)
    assert run.round == 9 and run.history[-1]["eps"] <= 8.0
    made, _, unit = federated.deployed(task, deployment)
    assert (made.config.cohort, made.config.sampling, unit) == (4, sampling, "client")
    cohorts = [made.cohort(t).tolist() for t in range(9)]
    times = np.bincount(sum(cohorts, []), minlength=12)
    assert times.max() == 4 and [made.cohort(0).tolist()] == cohorts[:1]
    if sampling == "fixed":
        assert all(len({*cohort}) == 4 for cohort in cohorts)
    free, _, _ = federated.deployed(task, replace(deployment, visits=None))
    if sampling != "replacement":
        left = [free.cohort(t) for t in range(4)]
        assert all(a.tolist() == b for a, b in zip(left, cohorts))


@tabled(
    "here, there, told",
    [
        (dict(config=Config(rounds=8)), {}, "rounds is 9 in the deployment and 8"),
        (dict(config=Config(cohort=3)), {}, "cohort is 4 in the deployment and 3"),
        (dict(config=Config(sampling="replacement")), {}, "sampling is 'poisson'"),
        (dict(visits=5), {}, "visits is 4 in the deployment and 5"),
        ({}, dict(n_clients=13), "n_clients is 13 in the deployment and 12 in the run"),
        ({}, dict(d=9), "d is 9 in the deployment and 10 in the run"),
        ({}, dict(unit="example"), "unit is 'example' in the .* and 'client' in"),
    ],
)
def test_a_run_that_contradicts_its_deployment_is_refused(here, there, told):
    task, deployment = _deployed()
    task, deployment = replace(task, **here), replace(deployment, **there)
    with pytest.raises(ValueError, match=told):
        simulate(task, deployment=deployment, unit="client", progress=False)


def test_an_example_is_not_protected_where_whole_clients_are_clipped():
    task, deployment = _deployed()
    with pytest.raises(ValueError, match="'example', but clients are clipped"):
        simulate(task, deployment=replace(deployment, unit="example"), progress=False)


def test_promises_are_about_the_deployment_s_visits():
    task, deployment = _deployed()
    whole = replace(deployment, visits=None).guarantee(task.mechanism)
    assert whole.rounds == 9
    with pytest.raises(ValueError, match="covers 9 rounds, and the run counts 4"):
        simulate(task, lambda t: whole, deployment=deployment, progress=False)
    few = deployment.guarantee(task.mechanism)
    with pytest.raises(ValueError, match="covers 4 rounds, and the run counts 9"):
        federated.check_promise(few, replace(Config(), rounds=9, cohort=4), 12)
    drawn = mechanism("gaussian", clip_norm=1.0, sigma=2.0).guarantee(
        9, 1e-3, n_clients=12, cohort=4, sampling="fixed"
    )
    config = replace(Config(), rounds=9, cohort=4)
    assert federated.check_promise(drawn, config, 12).eps == drawn.eps
    with pytest.raises(ValueError, match="have used up their visits are left out"):
        federated.check_promise(drawn, config, 12, visits=4)


def test_visits_that_cannot_fill_a_cohort_are_refused_before_the_first_round():
    task, deployment = _deployed(sampling="fixed")
    tight = replace(deployment, cohort=11, rounds=12, visits=11)
    with pytest.raises(ValueError, match="clients have visits left.* raise visits"):
        for seed in range(40):
            simulate(replace(task, seed=seed), deployment=tight, max_seconds=0)


def test_numbers_of_numpy_are_numbers_and_another_loss_is_another_run(tmp_path):
    "A checkpoint of such a run is read again; one of another loss is not."
    path, few = tmp_path / "run.pt", dict(lr=np.float64(0.1), server_lr=np.float64(0.1))

    class Stop(Callback):
        def after_round(self, run, task, loss):
            return run.round == 2

    whole = train(**few, seed=np.int64(3))
    train(**few, seed=np.int64(3), checkpoint=path, callbacks=Stop())
    resumed = dict(lr=0.1, server_lr=0.1, seed=3, checkpoint=path, resume=True)
    smooth = [partial(nn.functional.cross_entropy, label_smoothing=0.1)]
    smooth += [nn.CrossEntropyLoss(torch.ones(3)), nn.CrossEntropyLoss()]
    for loss in smooth:
        with pytest.raises(ValueError, match="written with a different loss"):
            train(**resumed, loss=loss)
    assert torch.equal(train(**resumed).w, whole.w)
    with pytest.raises(ValueError, match="rounds beside a deployment is 1000"):
        train(rounds=1000)


def test_a_run_is_covered_up_to_each_of_its_evaluations():
    "Of few rounds nobody's visits are used up yet, and the draw hides who is there."
    where = Deployment(102, 10, 100, 1e-3, sampling="fixed", visits=30)
    made, people = mechanism("gaussian", clip_norm=1.0, sigma=5.0), parts()[1] * 17
    run = train(clients=people, mechanism=made, deployment=where, max_epsilon=2.0)
    first, last = run.history[0], where.after(run.round + 1).guarantee(made)
    few = where.after(first["round"]).guarantee(made)
    assert (few.sampling, few.eps) == ("fixed", first["eps"]) and last.eps > 2.0
