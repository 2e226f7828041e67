"""One bad argument at a time, for everything that a module exports and that runs in
milliseconds.

A call may refuse its argument by a ValueError or TypeError that says in a sentence what
is wrong, or accept it and return finite numbers. GOOD holds a working call of every
name that is fuzzed.
"""

import ast
import dataclasses
import importlib
import inspect
import math
import re
import signal
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from checkout import MODULES, ROOT
from tables import tabled

from dpcomm.core import checks, vectors, wire
from dpcomm.core.random import seed_tree
from dpcomm.mechanisms import compressive, contract, mvu_table
from dpcomm.privacy import fixed_size_accountant, rec_accountant, rec_moments
from dpcomm.privacy.accounting import gaussian_guarantee
from dpcomm.secagg import masking, protocol, ring, shamir
from dpcomm.training import downlink, federated
from dpcomm.training.task import sample_cohort

SECONDS = 60.0  # of processor time before a call counts as hung; the slowest took 5

# ---- working calls

RNG = "a fresh stream"
ROW = torch.tensor([0.3, -0.2, 0.1, 0.25])
ROWS = torch.stack([ROW, -ROW])
MECHANISMS = {
    "compressive": dict(fraction=1.0, clip_norm=1.0, sigma=1.0, n_clients=10),
    "ddgauss": dict(clip_norm=1.0, sigma=1.0, n_clients=10, ring_bits=12),
    "gaussian": dict(clip_norm=1.0, sigma=1.0, local=True),
    "imvu": dict(clip_norm=1.0, eps=1.0),
    "mvu": dict(clip_norm=1.0, eps=1.0),
    "pm": dict(bound=1.0, eps=1.0),
    "privquant": dict(bound=1.0, levels=4, eps=3.0, rule="best"),
    "quantised": dict(clip_norm=1.0, sigma=1.0),
    "rec": dict(clip_norm=1.0, std=1.0, index_bits=2),
    "signsgd": dict(clip_norm=1.0, sigma=1.0),
    "skellam": dict(clip_norm=1.0, sigma=1.0, n_clients=10, ring_bits=12),
    "sqkr": dict(clip_norm=1.0, eps=1.0),
    "sqsgd": dict(bound=1.0, levels=2, eps=2.0, fraction=1.0, rule="best"),
    "topk": dict(fraction=1.0, clip_norm=1.0, sigma=1.0, n_clients=10),
    "vqsgd": dict(clip_norm=1.0, eps=1.0),
}
MADE = {name: contract.mechanism(name, **given) for name, given in MECHANISMS.items()}
RUN = {
    "ddgauss": dict(d=4),
    "skellam": dict(d=4),
    "rec": dict(sampling="none", accountant="exact-balle"),
}
METHODS = {
    name: {  # class method -> arguments
        "clip": dict(u=ROWS),
        "simulate": dict(u=ROWS, rng=RNG),
        "moments": dict(u=ROWS),
        "bits": dict(d=4),
        "guarantee": dict(rounds=2, delta=1e-5) | RUN.get(name, {}),
        "privacy_profile": dict(relation=next(iter(made.relations)), eps=[0.5, 1.0]),
        "attack_scores": dict(
            relation=next(iter(made.relations)), present=True, n=3, rng=RNG
        ),
    }
    for name, made in MADE.items()
}
for _name in ("ddgauss", "skellam"):
    METHODS[_name]["noise"] = dict(m=3, n=2, rng=RNG)
METHODS["pm"]["simulate_with_memory"] = dict(memory=0 * ROWS, u=ROWS, rng=RNG)
METHODS["topk"] |= {
    "trainable": dict(d=4),
    "guarantee": dict(
        rounds=2,
        delta=1e-5,
        n_clients=100,
        cohort=10,
        sampling="poisson",
        accountant="rdp-balle",
        relation="zero-out",
    ),
}


TABLE = mvu_table.two_symbols(1.0)
SCORES = np.linspace(0, 1, 200)
LAW = [0.6, 0.4], [0.4, 0.6]
SMALL = dict(sigma=1.0, q=0.1, rounds=10, delta=1e-5)
DPREC = dict(slots=20, n_clients=10, K=8, groups=1, relation="poisson-null", cohort=2)
OF_RUN = dict(c=1.0, run=rec_accountant.RecRun(**DPREC), delta=1e-5)
SUM = dict(clip_norm=1.0, sigma=1.0, n_clients=10, tolerance=0.1)
GOOD = {
    "flower.client": {"RemoteFederation": dict(n_clients=4)},
    "flower.transport": {
        "Deadlines": dict(start=1.0, hello=1.0, round=1.0, poll=0.1, least=1, skips=3),
    },
    "training.floor": {
        "Floor": dict(
            claims="claims",
            mechanisms=["rec"],
            clip=1.0,
            noise=1.0,
            epsilon_round=1.0,
            epsilon_total=8.0,
            delta=1e-5,
            clients=4,
            rounds=3,
            models=[[[10, 784], [10]]],
            trusted_server=False,
            simulation=False,
        ),
    },
    "privacy.guarantee": {
        "Guarantee": dict(
            eps=1.0,
            delta=1e-5,
            unit="client",
            relation="zero-out",
            sampling="none",
            accountant="x",
            scope="total",
            trust="central",
            note="n",
            premises={"proof": "p"},
            rounds=3,
            q=0.5,
        ),
    },
    "privacy.accounting": {
        "rdp_gaussian": dict(orders=[2, 3], sigma=1.0),
        "rdp_subsampled_gaussian": dict(orders=[2, 3.5], sigma=1.0, q=0.1),
        "compose": dict(rdp=[0.1, 0.2], rounds=3),
        "rdp_to_eps": dict(
            orders=[2, 3], rdp=[0.1, 0.2], delta=1e-5, conversion="balle"
        ),
        "rdp_to_delta": dict(
            orders=[2, 3], rdp=[0.1, 0.2], eps=1.0, conversion="balle"
        ),
        "guarantee_from_rdp": dict(
            orders=[2, 3],
            rdp=[0.1, 0.2],
            delta=1e-5,
            conversion="balle",
            unit="client",
            relation="zero-out",
            sampling="none",
            scope="total",
            trust="central",
        ),
        "gaussian_delta": dict(sigma=1.0, eps=1.0, rounds=2),
        "gaussian_guarantee": (
            SMALL
            | dict(
                sampling="poisson",
                relation="zero-out",
                accountant="rdp-balle",
                unit="client",
                scope="total",
                trust="central",
                orders=[2, 3],
                note="n",
                premises={"proof": "p"},
            )
        ),
        "calibrate": dict(
            guarantee_at=lambda s: gaussian_guarantee(s, 1e-5, orders=[2, 4, 8]),
            eps=3.0,
            low=0.1,
            high=100.0,
            increasing=False,
            tol=1e-2,
        ),
    },
    "privacy.audit": {
        "enumerated_eps": dict(p=LAW[0], q=LAW[1], delta=0.1),
        "distinguish": dict(
            present=SCORES,
            absent=SCORES[::-1] - 1,
            delta=0.1,
            alarm=0.05,
            directions=("forward",),
        ),
        "audit_play": dict(
            mechanism=MADE["gaussian"],
            relation="zero-out",
            trials=100,
            delta=1e-5,
            rng=RNG,
            alarm=0.05,
        ),
        "claim": dict(
            mechanism=MADE["gaussian"], relation="zero-out", delta=1e-5, rounds=2
        ),
        "judge": dict(
            present=SCORES, absent=SCORES - 0.5, claims=([0.5], [0.1]), alarm=0.05
        ),
        "claims": dict(mechanism=MADE["gaussian"], relation="zero-out", deltas=(0.1,)),
        "judge_play": dict(
            mechanism=MADE["gaussian"],
            relation="zero-out",
            trials=100,
            rng=RNG,
            alarm=0.05,
        ),
    },
    "privacy.audit_cases": {
        "detectable_noise_factor": dict(
            mechanism=MADE["gaussian"], relation="zero-out", trials=1000, alarm=0.05
        ),
    },
    "privacy.one_run": {
        "one_run_eps": dict(
            correct=30, guesses=40, canaries=100, delta=1e-5, alarm=0.05
        ),
        "guess": dict(scores=SCORES, guesses=20),
        "one_run": dict(
            scores=SCORES, included=SCORES > 0.5, guesses=20, delta=1e-5, alarm=0.05
        ),
    },
    "core.random": {
        "Insecure": dict(seed=3),
        "private_stream": dict(key=None),
        "bernoulli": dict(p=[0.5], rng=RNG),
    },
    "core.checks": {
        "check_positive": dict(name="x", value=1.0),
        "check_between": dict(name="x", value=1, low=0, high=3),
        "check_number": dict(name="x", value=1.0, range="[0, 1]"),
        "check_choice": dict(name="x", value="a", allowed=("a", "b")),
        "check_size": dict(name="d", value=3),
        "check_reals": dict(name="x", values=[1.0], range="[0, 1]"),
        "check_stream": dict(rng=RNG),
    },
    "core.vectors": {
        "check_finite": dict(name="u", x=ROW),
        "check_vector": dict(name="u", x=ROW),
        "check_rows": dict(name="u", x=ROWS),
        "clip_l2": dict(u=ROWS, clip=0.1),
        "walsh_hadamard": dict(x=ROW),
        "rotate": dict(u=ROWS, seed=0),
        "unrotate": dict(v=ROWS, seed=0),
    },
    "privacy.hypothesis_tests": {
        "check_plays": dict(present=True, n=3),
        "profile_of_gaussian": dict(mu=1.0, eps=[0.5]),
        "profile_of_pmfs": dict(p=LAW[0], q=LAW[1], eps=[0.5]),
        "multinomial_laws": dict(p=LAW[0], q=LAW[1], n=3),
        "profile_of_two_ratios": dict(often=0.5, spent=1.0, eps=[0.5]),
        "profile_of_pure": dict(spent=1.0, eps=[0.5]),
    },
    "secagg.ring": {
        "Ring": dict(bits=16),
        "FixedPoint": dict(ring=ring.Ring(16), scale=0.1, bound=1.0, n_clients=3),
    },
    "secagg.discrete": {
        "discrete_gaussian": dict(sigma2=2.0, shape=3, rng=RNG),
    },
    "mechanisms.noisy_sums": {
        "sampling_rate": dict(sampling="poisson", n_clients=10, cohort=5, least=1),
    },
    "mechanisms.distributed_noise": {
        "grid": SUM,
    },
    "mechanisms.contract": {
        "Sender": dict(mechanism=MADE["vqsgd"]),
        "mechanism": dict(name="gaussian", clip_norm=1.0, sigma=1.0),
        "mechanism_class": dict(name="rec"),
    },
    "core.wire": {
        "finite_floats": dict(data=np.ones(2, "<f4").tobytes()),
    },
    "training.task": {
        "Config": dict(
            rounds=3,
            cohort=2,
            sampling="poisson",
            epochs=1,
            batch=2,
            lr=0.1,
            server="sgd",
            server_lr=0.1,
            momentum=0.5,
            adam_eps=1e-8,
            eval_every=2,
            engine="loop",
            precision="bfloat16",
            balance=False,
            steps=3,
        ),
        "sample_cohort": dict(n_clients=10, cohort=2, sampling="poisson", rng=RNG),
    },
    "training.run_state": {
        "Ledger": dict(n_clients=3),
    },
    "training.downlink": {
        "count_bits": dict(
            n_clients=5,
            cohort=2,
            rounds=3,
            bits=MADE["rec"].bits(4),
            model_bits=128,
            replay=True,
            sampling="fixed",
            seed=0,
        ),
    },
    "training.linear_model": {
        "Settings": dict(epochs=1, lr=0.1, momentum=0.5, batch=10),
    },
    "experiments.configurations": {
        "delta_of": dict(n_clients=100),
    },
    "mechanisms.compressive": {
        "plan": dict(d=10, fraction=0.5, chunks=2, seed=0, kept="random", t=0),
    },
    "mechanisms.ddgauss": {
        "calibrate": dict(
            eps=3.0,
            delta=1e-5,
            clip_norm=1.0,
            n_clients=10,
            d=4,
            rounds=2,
            q=1.0,
            ring_bits=16,
            most=1.5,
        ),
    },
    "mechanisms.imvu": {
        "closed_form": dict(eps=1.0),
    },
    "mechanisms.mvu_table": {
        "Table": dict(
            eps=1.0,
            alphabet=TABLE.alphabet,
            rows=TABLE.rows,
            constraint="strict",
            log="",
        ),
        "solve": dict(eps=1.0, n_inputs=2, n_outputs=2, constraint="metric"),
    },
    "mechanisms.pm": {
        "cells": dict(eps=1.0, count=2),
    },
    "mechanisms.privquant": {
        "calibrate": dict(d=4, levels=4, eps=3.0, rule="best", kappa_min=0),
    },
    "privacy.rec_moments": {
        "rdp": dict(orders=[2, 3], c=1.0, K=8, groups=2, direction="both"),
    },
    "privacy.rec_accountant": {
        "theorem1_epsilon": dict(
            c=1.0, slots=20, n_clients=10, nbits=70, delta=1e-5, version="iclr"
        ),
        "RecRun": DPREC,
        "exact_epsilon": OF_RUN | dict(conversion="balle"),
        "pld_epsilon": OF_RUN,
        "calibrate_clip": dict(
            eps=3.0,
            accountant=rec_accountant.theorem1_epsilon,
            low=0.1,
            high=1.5,
            tol=0.5,
            slots=20,
            n_clients=10,
            nbits=70,
            delta=1e-5,
        ),
    },
    "secagg.skellam_noise": {
        "poisson": dict(mu=1.5, shape=3, rng=RNG),
        "skellam": dict(mu=1.5, shape=3, rng=RNG),
    },
    "mechanisms.sqsgd": {
        "rotate": dict(x=ROWS, seed=0),
        "unrotate": dict(x=ROWS, seed=0, count=3),
    },
    "mechanisms.topk": {
        "Support": dict(coordinates=[0, 2]),
        "scheme": dict(
            name="FL-CS",
            fraction=0.5,
            n_clients=10,
            clip_norm=1.0,
            sigma=1.0,
            seed=0,
            chunks=1,
            tolerance=0.1,
        ),
    },
    "privacy.fixed_size_accountant": {
        "theorem1_epsilon": SMALL | dict(lambdas=[1.0, 2.0]),
        "fixed_size_rdp": dict(
            sigma=1.0, q=0.1, orders=[2, 3], relation="replace", bound="wang"
        ),
        "fixed_size_epsilon": SMALL | dict(relation="replace", accountant="rdp-balle"),
        "participations": dict(rounds=10, q=0.1, quantile=0.5, n_clients=3),
        "known_cohort_epsilon": dict(
            sigma=1.0, participations=3, delta=1e-5, relation="replace", honest=0.9
        ),
    },
    "secagg.protocol": {
        "Setup": dict(
            n_clients=4,
            d=3,
            ring=ring.Ring(16),
            threshold=2,
            neighbours=3,
            session=bytes(16),
            quorum=3,
            largest=10,
            support=b"",
            committee=4,
            signatures=3,
        ),
    },
    "secagg.shamir": {
        "split": dict(
            secret=3, at=(1, 2, 3), threshold=2, draw=masking.random_source(0)
        ),
        "reconstruct": dict(shares={1: 5, 2: 7}, threshold=2),
    },
    "secagg.session": {
        "identities": dict(n_clients=2, seed=0),
        "silent_from": dict(drop={3: "masked"}, n=4),
        "run_session": dict(
            vectors=[[1, 2]] * 4,
            ring=ring.Ring(8),
            threshold=2,
            neighbours=3,
            seed=0,
            drop={3: "masked"},
        ),
        "graph_parameters": dict(
            n_clients=20,
            dropout=0.1,
            corrupt=0.1,
            malicious=True,
            security=10,
            correctness=5,
        ),
        "overhead": dict(
            n_clients=4,
            neighbours=3,
            d=5,
            bits=16,
            threshold=2,
            quorum=3,
            committee=4,
            signatures=3,
        ),
    },
    "secagg.hierarchical": {
        "sum_of_sums": dict(
            vectors=[[1, 2]] * 12,
            ring=ring.Ring(8),
            most=12,
            rates=(0.2, 0),
            seed=0,
            drop={3: "masked"},
            largest=3,
        ),
    },
}
for _name in MECHANISMS:  # every constructor, with all of its fields
    GOOD.setdefault(f"mechanisms.{_name}", {})[type(MADE[_name]).__name__] = {
        f.name: getattr(MADE[_name], f.name) for f in dataclasses.fields(MADE[_name])
    }

# ---- bad arguments

LONG, HUGE = "y" * 10**6, 10**5000  # a refusal quotes 80 characters of them
NUMBERS = (
    LONG,
    HUGE,
    1e308,
    5e-324,
    math.nan,
    math.inf,
    -math.inf,
    -1,
    0,
    -0.5,
    0.5,
    2**63,
    True,
    1j,
    "x",
    "",
    None,
    (),
    [],
    {},
    np.array([1.0, 2.0]),
    np.array(math.nan),
)
ARRAYS = (
    LONG,
    [HUGE],
    [1e308],
    [5e-324],
    list(range(10**5)),
    torch.ones(3).to_sparse(),
    torch.ones(3, device="meta"),
    "x",
    None,
    [],
    [math.nan],
    [math.inf],
    [-1.0],
    [0.0],
    [2**63],
    [1e300],
    ["x"],
    [None],
    [[1.0], [1.0, 2.0]],
    np.zeros((0, 3)),
    np.array([1j]),
    {},
    math.nan,
    7,
)
TENSORS = (
    LONG,
    HUGE,
    torch.ones(2, 4).to_sparse(),
    torch.ones(2, 4, device="meta"),
    torch.full((2, 4), 1e308, dtype=torch.float64),
    torch.full((2, 4), 5e-324, dtype=torch.float64),
    None,
    "x",
    [0.1, 0.2],
    [],
    1.0,
    np.ones((2, 4), np.float32),
    torch.ones(2, 4, dtype=torch.int64),
    torch.ones(2, 4, dtype=torch.float16),
    torch.ones(2, 4, dtype=torch.bfloat16),
    torch.ones(2, 4, requires_grad=True),
    torch.full((2, 4), math.nan),
    torch.full((4,), math.inf),
    torch.ones(4),
    torch.ones(2, 4),
    torch.ones(()),
    torch.ones(2, 0),
    torch.ones(0, 4),
    torch.ones(2, 2, 4),
    torch.ones(2, 4, dtype=torch.complex64),
)
STREAMS = (
    None,
    0,
    "x",
    [],
    {},
    [None, None],
    np.random.RandomState(0),
    torch.Generator(),
    seed_tree,
)
TEXTS = (
    LONG,
    HUGE,
    "x",
    "",
    "Poisson",
    "None",
    None,
    0,
    True,
    math.nan,
    [],
    b"x",
    np.array(["x", "y"]),
)


def bad(value):
    """What is tried in the place of a good value; nothing for an object that only the
    package makes.
    """
    if isinstance(value, torch.Tensor):
        return TENSORS
    if isinstance(value, str) and value == RNG:
        return STREAMS
    if hasattr(value, "_fields"):
        return ()
    if isinstance(value, (list, tuple, np.ndarray, dict)):
        return ARRAYS
    if isinstance(value, (str, bytes)):
        return TEXTS
    return NUMBERS if value is None or isinstance(value, (int, float)) else ()


RAW = re.compile(
    r"not supported between|has no attribute|ufunc|operand|broadcast|could not (be"
    r" )?conver|cannot (be )?(convert|interpreted)|object is not|is ambiguous|arrays?"
    r" can be|must be real number|"
    r"too large to|division by|argument '|expected (np|str|sequence)|got an"
    r" unexpected|math domain|inhomogeneous|zero-size|out of range|unsized|integer is"
    r" required|^can't|literal|setting an array|Exceeds the limit|y{81}",
    re.I,
)


def is_sentence(text: str) -> bool:
    """Whether an error says what is wrong and what to do, in the package's words; that
    a cached function takes no list is Python's to say.
    """
    return (
        text.startswith("unhashable type: ")
        or not RAW.search(text)
        and len(text) < 1000
        and len(text.split()) >= 8
        and bool(re.search(r"(: | not allowed).*[a-z]", text))
    )


def finite(x) -> bool:
    "Whether a result holds no nan and no infinity, however deep."
    if isinstance(x, torch.Tensor):
        return bool(torch.isfinite(x).all())
    if isinstance(x, np.ndarray):
        return x.dtype.kind not in "fc" or bool(np.isfinite(x).all())
    if isinstance(x, (float, np.floating, complex)):
        return bool(np.isfinite(x))
    if isinstance(x, dict):
        return all(map(finite, x.values()))
    if isinstance(x, (list, tuple)):
        return all(map(finite, x))
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return all(finite(getattr(x, f.name)) for f in dataclasses.fields(x))
    return True


class TooSlow(BaseException):
    "Not an Exception, so that nothing catches it."


@contextmanager
def limited(seconds: float):
    "Stop after so much processor time."

    def stop(*_):
        raise TooSlow()

    old = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)


def fresh(given: dict) -> dict:
    return {
        name: seed_tree(0) if isinstance(value, str) and value == RNG else value
        for name, value in given.items()
    }


def fault(call, given: dict, name: str, value, may_be_infinite: bool = False):
    "What is wrong with how a call takes one bad argument, or None."
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"), limited(SECONDS):
            warnings.simplefilter("ignore")
            found = call(**fresh(given) | {name: value})
    except (ValueError, TypeError) as error:
        return (
            None
            if is_sentence(str(error))
            else f"{type(error).__name__}: {str(error)[:110]}"
        )
    except (Exception, TooSlow) as error:
        return f"{type(error).__name__}: {str(error)[:110]}"
    return None if may_be_infinite or finite(found) else f"returned {str(found)[:110]}"


# ---- what is allowed

OF_THE_CHECK = {
    "low",
    "high",
    "range",
    "allowed",
    "name",
}  # what a check is told by the line that calls it
INFINITE = {  # an infinity or nan that is documented where it is returned
    "privacy.guarantee.Guarantee": "eps = inf: nothing is proved",
    "privacy.accounting.compose": "an infinite divergence stays one",
    "core.vectors.check_vector": "looks at type and shape only",
    "core.vectors.check_rows": "the same",
    "core.vectors.walsh_hadamard": "a linear map hands on what it gets",
    "core.vectors.rotate": "the same",
    "core.vectors.unrotate": "the same",
    "mechanisms.mvu_table.Table": "log is text for people",
    "mechanisms.sqkr.Sqkr": "eps = inf: compression only",
    "mechanisms.vqsgd.VqSgd": "the same",
    "mechanisms.sqsgd.rotate": "a linear map hands on what it gets",
    "mechanisms.sqsgd.unrotate": "the same",
    "privacy.rec_accountant.theorem1_epsilon": "eps = inf: nothing is proved",
}


CALLS = {
    f"{module}.{name}": (
        getattr(importlib.import_module(f"dpcomm.{module}"), name),
        given,
    )
    for module, calls in GOOD.items()
    for name, given in calls.items()
}
CALLS |= {
    f"{name}'s {method}": (getattr(MADE[name], method), given)
    for name, methods in METHODS.items()
    for method, given in methods.items()
}


@tabled("label", CALLS, ids=str)
def test_a_bad_argument_is_refused_in_a_sentence_or_harmless(label):
    call, given = CALLS[label]
    tried = {
        name: value
        for name, value in given.items()
        if not (
            label.startswith(
                ("core.checks.", "core.vectors.", "privacy.hypothesis_tests.")
            )
            and name in OF_THE_CHECK
        )
    }
    assert finite(call(**fresh(given))) or label in INFINITE, (
        "the working call does not work"
    )
    found = [
        f"{name} = {str(value)[:60]!r}: {wrong}"
        for name, good in tried.items()
        for value in bad(good)
        if (wrong := fault(call, given, name, value, label in INFINITE))
    ]
    assert not found, "\n".join(found)


def test_the_fuzz_notices_raw_errors_hangs_and_nonsense(monkeypatch):
    monkeypatch.setattr(f"{__name__}.SECONDS", 0.2)

    def hang(x):
        while x:
            pass

    for call in (
        lambda x: x < 3,
        lambda x: x.shape,
        lambda x: [1][x],
        lambda x: float("nan"),
        lambda x: np.ones(x),
        hang,
    ):
        assert (
            fault(call, dict(x=1), "x", "text", False)
            if call is not hang
            else fault(call, dict(x=0), "x", 1)
        )
    said = "x is {}; it must be a whole number from 1 to 3: change x"
    assert is_sentence(said.format("y" * 80)) and not is_sentence(said.format("y" * 81))
    assert not is_sentence(
        "'<' not supported between instances of 'str' and 'int' when it must be: so"
    ) and is_sentence("d is 'x'; it must be a whole number from 1 to 3: change d")


# ---- hangs, and nonsense that was accepted


@tabled(
    "call, says",
    [
        (lambda: rec_moments.rdp_local([1.5, 2], 1.0, -1), "K is -1"),
        (lambda: rec_moments.rdp_local([1.5], math.nan, 4), "c is nan"),
        (lambda: rec_moments.log_moment(200, 5.0, 16), "s is 5.0; .*lower s or j"),
        (lambda: rec_moments.log_moment(-(10**6), 1.0, 16), "j holds"),
        (
            lambda: fixed_size_accountant.guarantee_table(1.0, 100, 10, 2**63, 1e-5),
            "rounds is",
        ),
        (lambda: fixed_size_accountant.participations(2**63, 0.1), "rounds is"),
        (
            lambda: gaussian_guarantee(
                1.0, 1e-5, 0.1, 1000, sampling="poisson", orders=[2, 3, 2**63]
            ),
            "orders holds .*1048576",
        ),
        (
            lambda: gaussian_guarantee(
                1.0, 1e-5, 0.1, sampling="poisson", orders=np.full(10**6, 1000.0)
            ),
            "orders sum to",
        ),
        (lambda: gaussian_guarantee(1.0, 1e-5, rounds=2**60), "rounds is"),
        (lambda: compressive.largest_factors(5, 10**9), "high is"),
        (
            lambda: sample_cohort(100, 10, "Poisson", seed_tree(0)),
            "sampling is 'Poisson'.*did you mean 'poisson'",
        ),
        (
            lambda: downlink.count_bits(
                10, 2, 3, MADE["rec"].bits(4), 128, sampling="Poisson"
            ),
            "sampling is 'Poisson'",
        ),
        (
            lambda: contract.mechanism(
                "gaussian", clip_norm=1.0, sigma=1.0, local=None
            ),
            "local is None",
        ),
        (
            lambda: shamir.split(7, (0, 1, 2), 2, masking.random_source(0)),
            "at 0 a share is the secret",
        ),
        (
            lambda: shamir.reconstruct({0: 5, 1: 2}, 2),
            "distinct whole numbers above 0",
        ),
        (lambda: downlink.read_counts(b"\xff" * 300_000), "more than 70 bits"),
        (
            lambda: MADE["topk"].__class__(0.5, 1.0, 1.0, 10, support="anything"),
            "support is 'anything'",
        ),
        (
            lambda: protocol.Setup(4, 3, ring.Ring(16), 2, support="anything"),
            "support is 'anything'",
        ),
        (
            lambda: federated.simulate(None, workers=math.nan),
            "workers is nan; it must be a whole number from 1 to 1024",
        ),
        (lambda: federated.simulate(None, max_seconds=math.nan), "max_seconds is nan"),
        (lambda: federated.simulate(None, save_every=math.nan), "save_every is nan"),
        (lambda: federated.simulate(None, unit=5), "unit is 5; .*client, example"),
        *(
            (
                lambda device=device: federated.simulate(None, device=device),
                f"device is {device!r}; torch cannot use it on this machine: use 'cpu'",
            )
            for device in ("tpu", "cuda:99", "meta", 10**6, None, LONG[:20])
        ),
        (lambda: vectors.unrotate(ROWS, -1), "seed is -1"),
        (lambda: wire.Bits.of(8, 8, 0, math.nan), "d is nan"),
        (lambda: wire.Bits.of(-8, 8, 0, 3), "payload is -8"),
    ],
)
def test_what_hung_or_was_accepted_is_refused(call, says):
    with limited(SECONDS), pytest.raises((ValueError, TypeError), match=says):
        call()


@tabled("name", METHODS)
@tabled("sampling", ["Poisson", "poison", "all", None, ""])
def test_no_accountant_takes_a_sampling_that_does_not_exist(name, sampling):
    given = METHODS[name]["guarantee"] | dict(
        sampling=sampling, n_clients=100, cohort=10
    )
    known = inspect.signature(MADE[name].guarantee).parameters
    with pytest.raises(ValueError, match="sampling"):
        MADE[name].guarantee(
            **{
                key: value
                for key, value in given.items()
                if key in known or key == "sampling"
            }
        )


@tabled(
    "length, chunks",
    [
        (1_663_370, 2),
        (1_663_370, 10),
        (5_000_500, 2),
        (10**7, 4),
        (2**32 - 1, 2),
        (2**32 - 1, 3),
    ],
)
def test_a_chunk_length_takes_less_than_a_second(length, chunks):
    with limited(1.0):
        found = compressive.chunk_length.__wrapped__(length, chunks)
    assert (
        -(-length // chunks) <= found <= 1.02 * length / chunks + 1
        and -(-length // found) == chunks
    )


# ---- everyday mistakes as an update


@tabled("name", MADE)
@tabled(
    "wrong, says",
    [
        (np.ones((2, 4), np.float32), "u is a ndarray.*torch.as_tensor"),
        ([[0.1, 0.2]], "u is a list.*torch.as_tensor"),
        (torch.ones(2, 4, dtype=torch.int64), "u is torch.int64.*u.float"),
        (torch.ones(2, 4, requires_grad=True), "u requires gradients.*detach"),
        (torch.ones(2, 4).half(), "u is torch.float16.*pass u.float"),
        (torch.ones(2, 4).bfloat16(), "u is torch.bfloat16.*pass u.float"),
    ],
)
def test_an_update_of_the_wrong_kind_is_named(name, wrong, says):
    for call in (
        lambda: MADE[name].clip(wrong),
        lambda: MADE[name].simulate(wrong, seed_tree(0)),
        lambda: MADE[name].moments(wrong),
    ):
        with pytest.raises((ValueError, TypeError), match=says):
            call()


@tabled("name", MADE)
@tabled("shape", [(4,), (), (2, 2, 4), (2, 0)])
def test_a_batch_is_simulated_and_nothing_else(name, shape):
    with pytest.raises(ValueError, match=r"u has shape .*a batch of rows.*u\[None\]"):
        MADE[name].simulate(torch.ones(shape), seed_tree(0))


def test_one_vector_and_a_batch_are_told_apart():
    assert (
        vectors.check_vector("u", ROW) is ROW and vectors.check_rows("u", ROWS) is ROWS
    )
    for shape in ((2, 4), (), (0,)):
        with pytest.raises(ValueError, match="u has shape .*must be one vector"):
            vectors.check_vector("u", torch.ones(shape))


@pytest.mark.parametrize(
    "dtype, excess", [(torch.float32, 1.2e-7), (torch.float64, 1e-12)]
)
def test_a_clipped_row_is_longer_than_the_clip_by_its_rounding_only(dtype, excess):
    worst = 0.0
    for d in (1, 2, 3, 10, 1000, 100_000):
        u = torch.from_numpy(
            seed_tree(0, "rows", d).standard_normal((max(1, 20_000 // d), d))
            * np.geomspace(1e-3, 1e6, max(1, 20_000 // d))[:, None]
        ).to(dtype)
        for clip in (1.0, 0.1, 3.7e-5, 1.7e9):
            worst = max(
                worst,
                float(vectors.clip_l2(u, clip).double().norm(dim=-1).max()) / clip - 1,
            )
    assert worst <= excess and (worst > 1e-8 or dtype == torch.float64)


# ---- what an error quotes


def test_an_error_quotes_eighty_characters_of_any_value():
    class Rude:
        def __repr__(self):
            raise RuntimeError("no")

    deep = []
    for _ in range(10**4):
        deep = [deep]
    values = [LONG, LONG.encode(), HUGE, -HUGE, [HUGE], {1: HUGE}, Rude(), deep]
    values += [list(range(10**6)), dict.fromkeys(range(10**4)), np.ones(10**6)]
    values += [torch.ones(10**4), torch.ones(3, device="meta"), math.nan, None, "x"]
    for value in values:
        assert 0 < len(checks.shown(value)) <= checks.QUOTED == 80
        for call in (checks.check_positive, checks.check_between, checks.check_number):
            more = dict(low=1, high=3) if call is checks.check_between else {}
            more |= dict(range="(0, 1)") if call is checks.check_number else {}
            if value is not HUGE or more:
                with pytest.raises(ValueError) as refused:
                    call("x", value, **more)
                assert len(str(refused.value)) < 200
        with pytest.raises(ValueError) as refused:
            checks.check_choice("x", value, ("a", "b"))
        assert len(str(refused.value)) < 200
    assert checks.shown(0.5) == "0.5" and checks.shown("x") == "'x'"
    assert checks.shown(HUGE) == "a whole number of 16610 bits"


def test_every_error_of_the_package_quotes_through_shown():
    "An f-string that quotes a value with !r says how much of it at most."
    loose = []
    for path in MODULES:
        for node in ast.walk(ast.parse((ROOT / path).read_text("utf-8"))):
            if isinstance(node, ast.FormattedValue) and node.conversion == ord("r"):
                spec = ast.unparse(node.format_spec) if node.format_spec else ""
                width = re.search(r"\d+", spec)
                called = ast.unparse(node.value).split("(")[0]
                if not (width and int(width[0]) <= 80) and called != "nearest":
                    loose.append(f"{path}:{node.lineno}")
    assert not loose, f"use core.checks.shown: {loose}"
