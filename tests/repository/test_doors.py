"""The public doors: the calls that a stranger makes. A bad value gets a sentence there, in
the package's words; inside, Python, torch and numpy say what they say.

DOORS holds a working call of each. One argument at a time is replaced by what people pass
by mistake; the call may refuse it by a ValueError or TypeError in a sentence, or take it.
"""

import math
import re
import signal
import warnings
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from tables import tabled

import dpcomm
from dpcomm.core import wire
from dpcomm.core.random import Insecure, seed_tree
from dpcomm.datasets import images
from dpcomm.mechanisms import contract
from dpcomm.secagg import protocol, ring
from dpcomm.training import federated

SECONDS = 60.0  # of processor time before a call counts as hung
ROW = torch.tensor([0.3, -0.2, 0.1, 0.25])
ROWS = torch.stack([ROW, -ROW])
MECHANISMS = {
    name: contract.mechanism_class(name).audit_cases[0][0]
    for name in dpcomm.registered()
}
MADE = {name: dpcomm.mechanism(name, **given) for name, given in MECHANISMS.items()}
WHERE = dict(n_clients=20, cohort=4, rounds=3, delta=1e-3, sampling="poisson")
DEPLOYED = dpcomm.Deployment(**WHERE)
GAUSSIAN = dpcomm.mechanism("gaussian", clip_norm=1.0, sigma=2.0)
X = torch.rand(40, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 2
CLIENTS = [(X[i::20], Y[i::20]) for i in range(20)]


def train(**how):
    torch.manual_seed(0)
    return dpcomm.train(torch.nn.Linear(4, 2), **how).history


TRAIN = dict(clients=CLIENTS, mechanism=GAUSSIAN, deployment=DEPLOYED, test=(X, Y))
TRAIN |= dict(seed=0, batch=2, lr=0.1, progress=False)
FLAGS = dict(train_loss=False, resume=False, unit="client", advance=federated.one_round)
FLAGS |= dict(workers=1, max_seconds=9.0, save_every=9.0, device="cpu", metrics=None)
FLAGS |= dict(adaptive=None, weights=[1.0] * len(CLIENTS), max_epsilon=9.0)
DOORS = {
    f"mechanism {name}": (type(MADE[name]), given) for name, given in MECHANISMS.items()
}
for _name, _made in MADE.items():
    _message = _made.encode(ROW, Insecure(0))
    DOORS[f"{_name}.decode"] = _made.decode, dict(message=_message)
    DOORS[f"{_name}.clip"] = _made.clip, dict(u=ROWS)
    DOORS[f"{_name}.encode"] = _made.encode, dict(u=ROW, key=Insecure(0))
    DOORS[f"{_name}.bits"] = _made.bits, dict(d=4)
CHOICE = dict(deployment=replace(DEPLOYED, d=100), eps=4.0, bits=32.0)
CONFIG = dict(
    rounds=3, cohort=2, sampling="poisson", epochs=1, batch=2, lr=0.1, steps=3
)
PROMISE = dict(eps=1.0, delta=1e-5, unit="client", relation="zero-out", sampling="none")
PROMISE |= dict(accountant="x", scope="total", trust="central")
SETUP = dict(n_clients=4, d=3, ring=ring.Ring(16), threshold=2, neighbours=3)
BYTES = GAUSSIAN.encode(ROW, Insecure(0)).to_bytes()
LEAST = dict(name="gaussian", eps=4.0, clip_norm=1.0, start=1.0)
DOORS |= {
    "mechanism": (dpcomm.mechanism, dict(name="gaussian", clip_norm=1.0, sigma=1.0)),
    "Deployment": (dpcomm.Deployment, WHERE),
    "Deployment.guarantee": (DEPLOYED.guarantee, dict(mechanism=GAUSSIAN)),
    "Deployment.calibrate": (DEPLOYED.calibrate, LEAST),
    "choose": (dpcomm.choose, CHOICE | dict(accountants=None, tried=None)),
    "train": (train, TRAIN),
    "train's flags": (lambda **flags: train(**TRAIN, **flags), FLAGS),
    "Config": (dpcomm.Config, CONFIG),
    "Guarantee": (dpcomm.Guarantee, PROMISE),
    "Message.from_bytes": (wire.Message.from_bytes, dict(data=BYTES, d=4)),
    "Ring": (ring.Ring, dict(bits=16)),
    "Setup": (protocol.Setup, SETUP),
    "images.load": (images.load, dict(name="digits", root=None)),
}

LONG = "y" * 10**5  # an error quotes 80 characters of it
NUMBERS = (LONG, math.nan, math.inf, -1, 0, 0.5, 2**63, 1e308, True, 1j, "x", [], {})
NUMBERS += (1e-300,)
ARRAYS = ("x", None, [], [math.nan], [-1.0], ["x"], [[1.0], [1.0, 2.0]], 7)
TENSORS = (
    *("x", None, [0.1, 0.2], 1.0),
    *(torch.ones(2, 4, dtype=torch.int64), torch.full((2, 4), math.nan)),
    *(torch.ones(2, 4).half(), torch.ones(2, 4, requires_grad=True), torch.ones(())),
)
TEXTS = (LONG, "x", "", "Poisson", None, 0, [], b"x")
OTHERS = (
    *(np.float32(1.5), np.array(2.0), np.bool_(True), np.datetime64("2020"), -0.0),
    *(Decimal("1.5"), Fraction(3, 2), 10**5000, 5e-324, 1 + 2j, "12", b"12", Path("/")),
    *(torch.tensor(2.0), torch.ones(0), torch.ones(4, dtype=torch.complex64)),
    *(date(2020, 1, 1), {1, 2}, range(3), iter([1]), int, [[[]]], memoryview(b"a")),
    np.array([None, {}], dtype=object),
)
# objects in whose place only their like is taken
STRICT = wire.Message, ring.Ring, type(train)
RAW = re.compile(
    r"not supported between|has no attribute|ufunc|operand|broadcast|could not (be )?conver"
    r"|object is not|is ambiguous|must be real number|too large to|division by|argument '"
    r"|math domain|inhomogeneous|zero-size|unsized|^can't|literal|y{81}",
    re.I,
)


def mistakes(value):
    "What is tried in the place of a good value."
    if isinstance(value, torch.Tensor):
        return TENSORS
    if isinstance(value, bool):
        return (*NUMBERS[:1], *OTHERS)
    if isinstance(value, (list, tuple, np.ndarray)):
        return ARRAYS
    if isinstance(value, (str, bytes)):
        return (*TEXTS, *OTHERS)
    if isinstance(value, (int, float)):
        return (*NUMBERS, *OTHERS)
    return OTHERS if value is None or type(value) in STRICT else ()


def is_sentence(text: str) -> bool:
    "Whether an error says what is wrong and what to do, in the package's words."
    return not RAW.search(text) and len(text) < 1000 and len(text.split()) >= 6


class TooSlow(BaseException):
    "Not an Exception, so that nothing catches it."


@contextmanager
def limited(seconds: float):
    "Stop after so much processor time."

    def stop(*_):
        raise TooSlow()

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def fault(call, given: dict) -> str:
    "What is wrong with how a call takes a mistake; nothing where it is as it should be."
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"), limited(SECONDS):
            warnings.simplefilter("ignore")
            call(**given)
    except (Exception, TooSlow) as error:
        if not isinstance(error, (ValueError, TypeError)) or not is_sentence(
            str(error)
        ):
            return f"{type(error).__name__}: {error!s:.110}"
    return ""


@tabled("door", DOORS)
def test_a_mistake_is_told_in_a_sentence(door):
    call, given = DOORS[door]
    call(**given)
    wrong = [
        f"{name} = {value!r:.60}: {said}"
        for name, good in given.items()
        for value in mistakes(good)
        if (said := fault(call, given | {name: value}))
    ]
    assert not wrong, "\n".join(wrong)


@tabled("name, value", [("checkpoint", "\0"), ("weights", 10**400), ("guarantee", int)])
def test_a_mistake_in_a_run_is_told_in_a_sentence(name, value):
    clients, net = images.Federation.of(CLIENTS, (X, Y)), torch.nn.Linear(4, 2)
    task = federated.Task(net, clients, GAUSSIAN, dpcomm.Config(3, 4), 0)
    with pytest.raises((ValueError, TypeError, IsADirectoryError)) as caught:
        federated.simulate(task, progress=False, **{name: value})
    assert is_sentence(str(caught.value))


@tabled("name", ["choose", "privquant", "sqsgd"])
def test_a_dimension_that_no_memory_holds_is_refused(name):
    where = replace(DEPLOYED, d=2**32 - 1)
    with limited(5), pytest.raises(ValueError, match="d is [0-9]*; "):
        if name == "choose":
            dpcomm.choose(deployment=where, eps=1.0)
        else:
            where.guarantee(mechanism=MADE[name])


@tabled("name", MADE)
@tabled("shape", [(4,), (), (2, 2, 4), (2, 0)])
def test_a_batch_is_simulated_and_nothing_else(name, shape):
    with pytest.raises(ValueError, match="u has shape"):
        MADE[name].simulate(torch.ones(shape), seed_tree(0))
