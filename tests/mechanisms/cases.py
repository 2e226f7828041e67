"""What the conformance suite builds: variants of every mechanism of the registry.

A new mechanism needs no entry: its cases follow from its class, from `audited` (parameters)
and `ranges` (what is refused). LISTED adds variants that depend on the dimension, and
guarantees that cannot be given."""

import dataclasses
import math
from collections.abc import Callable

from dpcomm.mechanisms import contract, mvu, topk


@dataclasses.dataclass(frozen=True)
class Case:
    "How to build one variant of a mechanism, and what to ask of it."

    make: Callable  # d -> mechanism
    others: tuple  # d -> mechanism, each with one parameter changed: their messages must be refused
    release: dict  # arguments of a guarantee that can be given
    refused: tuple  # arguments, merged into release, of guarantees that cannot
    bad: tuple  # constructor arguments, merged into those of make(3), that are out of range


def variants(
    name: str, cases: dict, release: dict, refused: tuple, bad: tuple = ()
) -> dict:
    """Cases of one mechanism from constructor parameters, each a function of d, and the
    changes that make another mechanism of it.
    """

    def build(parameters, change):
        return lambda d: contract.mechanism(name, **(parameters(d) | change))

    bad = [*bad, *out_of_range(contract.mechanism_class(name))]
    refused = (*refused, *NEVER)
    return {
        label: Case(
            build(parameters, {}),
            tuple(build(parameters, change) for change in changes),
            release,
            refused,
            tuple((parameters(3) | change, change) for change in bad),
        )
        for label, (parameters, changes) in cases.items()
    }


NEVER = (  # no guarantee of any mechanism is given with these
    dict(rounds=0),
    dict(rounds=1.5),
    dict(delta=1.0),
    dict(delta=-1e-3),
    dict(sampling="nobody"),
)


def outside(allowed) -> list:
    "Values that a range of `Mechanism.ranges` does not allow."
    if isinstance(allowed, contract.Maybe):
        return outside(allowed.allowed)
    if allowed is bool:
        return ["no", 1, 0.0, None]
    if isinstance(allowed, contract.Whole):
        low, high = allowed
        found = [low - 1, low + 0.5, float(low), str(low), True]
        return found + [high + 1] * (high < math.inf)
    if not isinstance(allowed, str):
        return ["nothing of this"]
    low, high = map(float, allowed[1:-1].split(","))
    found = [math.nan, low - 1.0, str(high), True] + [low] * (allowed[0] == "(")
    above = [max(high + 1.0, 2 * high)] * (high < math.inf)
    return found + above + [high] * (allowed[-1] == ")")


def out_of_range(cls: type) -> list:
    "Constructor arguments that the class refuses by its own declaration, one each."
    return [
        {name: value}
        for name, allowed in cls.ranges.items()
        for value in outside(allowed)
    ]


def changed(cls: type, parameters: dict) -> list:
    "One field changed at a time, where the class accepts it."
    found, whole = [], cls(**parameters)
    for name, allowed in cls.ranges.items():
        value = getattr(whole, name)
        if isinstance(allowed, tuple) and not hasattr(allowed, "_fields"):
            others = [choice for choice in allowed if choice != value]
        else:
            others = [not value] if allowed is bool else [value + 1, 0.9 * value, 0.5]
        for other in others:
            try:
                another = cls(**(parameters | {name: other}))
            except ValueError:
                continue
            if another != whole:
                found.append({name: other})
                break
    return found


def derived(name: str) -> dict:
    "Cases of a mechanism that lists none here: its own `audited` parameters."
    cls = contract.mechanism_class(name)
    given = {
        f"audited {i}": ((lambda d, p=parameters: p), tuple(changed(cls, parameters)))
        for i, (parameters, _, _) in enumerate(cls.audited)
    }
    return variants(name, given, dict(rounds=3, delta=1e-5), ())


def halves(d: int) -> tuple:
    "Two groups where there is more than one entry."
    return (d - d // 2, d // 2) if d > 1 else (1,)


def thirds(d: int) -> tuple:
    "Three groups of unequal size, one of them a single entry, where there is room."
    return (d - d // 3 - 1, 1, d // 3) if d > 2 else (1,) * d


def first(d: int) -> topk.Support:
    "The support of the first six tenths."
    return topk.Support(range(topk.size(0.6 if d > 1 else 1.0, d)))


NUMBERS = (0.0, -1.0, math.nan, math.inf)
THREE = mvu.Table(
    1.0,
    (0.5 - 2.5 / (math.e - 1), 0.5, 0.5 + 2.5 / (math.e - 1)),
    ((0.2 * math.e, 0.8 - 0.2 * math.e, 0.2), (0.2, 0.8 - 0.2 * math.e, 0.2 * math.e)),
)
LISTED = {
    "compressive": variants(
        "compressive",
        {
            "random": (
                lambda d: dict(
                    fraction=0.6 if d > 1 else 1.0,
                    clip_norm=1.0,
                    sigma=0.7,
                    n_clients=3,
                    chunks=min(d, 2),
                ),
                (
                    dict(clip_norm=1.1),
                    dict(sigma=0.71),
                    dict(n_clients=4),
                    dict(chunks=3),
                    dict(seed=1),
                    dict(round=1),
                    dict(kept="low"),
                    dict(sigma=None),
                ),
            ),
            "low, tolerant": (
                lambda d: dict(
                    fraction=0.6 if d > 1 else 1.0,
                    clip_norm=1.0,
                    sigma=0.7,
                    n_clients=10,
                    kept="low",
                    tolerance=0.2,
                ),
                (dict(tolerance=0.1), dict(fraction=0.9)),
            ),
            "everything": (
                lambda d: dict(
                    fraction=1.0,
                    clip_norm=1.0,
                    sigma=0.7,
                    n_clients=3,
                    chunks=min(d, 3),
                ),
                (dict(fraction=0.9), dict(chunks=2)),
            ),
        },
        release=dict(rounds=3, delta=1e-5),
        refused=(
            dict(sampling="fixed", n_clients=100, cohort=10),
            dict(sampling="poisson"),
            dict(sampling="poisson", n_clients=100, cohort=10, relation="replace"),
            dict(relation="local"),
            dict(accountant="magic"),
            dict(delta=0.0),
        ),
    ),
    "gaussian": variants(
        "gaussian",
        {
            "central": (
                lambda d: dict(clip_norm=1.0, sigma=0.7),
                (
                    dict(clip_norm=1.1),
                    dict(sigma=0.71),
                    dict(local=True),
                    dict(exact=False),
                ),
            ),
            "local": (
                lambda d: dict(clip_norm=1.0, sigma=0.7, local=True),
                (
                    dict(clip_norm=1.1),
                    dict(sigma=0.71),
                    dict(local=False),
                    dict(exact=False),
                ),
            ),
        },
        release=dict(rounds=3, delta=1e-5),
        refused=(
            dict(sampling="replacement", n_clients=100, cohort=10),
            dict(sampling="poisson"),
            dict(accountant="magic"),
            dict(delta=0.0),
        ),
    ),
    "ddgauss": variants(
        "ddgauss",
        {
            "sixteen bits": (
                lambda d: dict(clip_norm=1.0, sigma=1.0, n_clients=20),
                (
                    dict(clip_norm=1.1),
                    dict(sigma=1.1),
                    dict(n_clients=21),
                    dict(rotation_seed=1),
                    dict(k=5.0),
                ),
            ),
            "eleven bits": (
                lambda d: dict(
                    clip_norm=1.0,
                    sigma=0.7,
                    n_clients=5,
                    ring_bits=11,
                    tolerance=0.4,
                    beta=0.3,
                ),
                (dict(ring_bits=10), dict(tolerance=0.2), dict(beta=0.4)),
            ),
        },
        release=dict(rounds=3, delta=1e-5, d=7),
        refused=(
            dict(d=None),
            dict(d=0),
            dict(sampling="fixed"),
            dict(sampling="poisson"),
            dict(sampling="poisson", n_clients=100, cohort=10, relation="replace"),
            dict(relation="local"),
            dict(accountant="magic"),
            dict(delta=0.0),
        ),
    ),
    "imvu": variants(
        "imvu",
        {
            "one bit": (
                lambda d: dict(clip_norm=1.0, eps=0.5, beta=4.0),
                (
                    dict(clip_norm=1.1),
                    dict(eps=0.51),
                    dict(beta=4.1),
                    dict(clamp=True),
                    dict(table=mvu.solve(0.5)),
                ),
            ),
            "clamped": (
                lambda d: dict(clip_norm=1.0, eps=0.5, beta=4.0, clamp=True),
                (dict(clamp=False), dict(eps=0.51)),
            ),
            "three symbols": (
                lambda d: dict(clip_norm=1.0, eps=1.0, beta=2.0, table=THREE),
                (dict(clip_norm=1.1), dict(beta=2.1), dict(table=None)),
            ),
        },
        release=dict(rounds=3, delta=1e-5),
        refused=(
            dict(sampling="poisson"),
            dict(relation="add-remove"),
            dict(accountant="magic"),
            dict(accountant="fisher"),
            dict(delta=0.0),
            dict(unit="nobody"),
            dict(accountant="exact-balle", d=0),
        ),
        bad=(
            *(
                {name: value}
                for name in ("clip_norm", "eps", "beta")
                for value in NUMBERS
            ),
            dict(eps=701.0),
            dict(clamp="no"),
        ),
    ),
    "pm": variants(
        "pm",
        {
            "one coordinate": (
                lambda d: dict(bound=1.0, eps=1.0),
                (dict(bound=1.1), dict(eps=1.1), dict(count=1), dict(residuals=True)),
            ),
            "two coordinates": (
                lambda d: dict(bound=1.0, eps=6.0),
                (dict(bound=0.9), dict(eps=5.9), dict(count=2)),
            ),
            "every coordinate": (
                lambda d: dict(bound=1.0, eps=4.0, count=100),
                (dict(count=None), dict(count=99)),
            ),
        },
        release=dict(rounds=3, delta=0.0),
        refused=(
            dict(sampling="poisson"),
            dict(sampling="fixed"),
        ),
        bad=(
            *({name: value} for name in ("bound", "eps") for value in NUMBERS),
            dict(eps=1e-7),
            *(dict(count=k) for k in (0, -1, 2.0)),
            dict(residuals="no"),
        ),
    ),
    "privquant": variants(
        "privquant",
        {
            "paper's rule": (
                lambda d: dict(bound=1.0, levels=4, eps=3.0),
                (
                    dict(bound=1.1),
                    dict(levels=3),
                    dict(eps=3.1),
                    dict(rule="best"),
                    dict(kappa_min=-2),
                ),
            ),
            "best rule": (
                lambda d: dict(bound=1.0, levels=3, eps=1.0, rule="best"),
                (dict(levels=4), dict(eps=1.1), dict(kappa_min=-1)),
            ),
            "one bit": (
                lambda d: dict(bound=1.0, levels=2, eps=3.0, rule="best", kappa_min=0),
                (dict(kappa_min=None), dict(bound=0.9)),
            ),
        },
        release=dict(rounds=3, delta=0.0),
        refused=(
            dict(sampling="poisson"),
            dict(sampling="fixed"),
            dict(d=0),
            dict(d=2.5),
        ),
        bad=(
            *({name: value} for name in ("bound", "eps") for value in NUMBERS),
            *(dict(levels=k) for k in (1, 0, 2.0, 2**16 + 1)),
            dict(rule="worst"),
            dict(kappa_min=0.5),
        ),
    ),
    "quantised": variants(
        "quantised",
        {
            "toward zero": (
                lambda d: dict(clip_norm=1.0, sigma=0.7),
                (
                    dict(clip_norm=1.1),
                    dict(sigma=0.71),
                    dict(level_bits=7),
                    dict(rounding="random"),
                    dict(top=0.9),
                    dict(exact=False),
                ),
            ),
            "at random": (
                lambda d: dict(
                    clip_norm=1.0, sigma=0.7, level_bits=5, rounding="random"
                ),
                (dict(level_bits=6), dict(rounding="zero"), dict(top=0.9)),
            ),
            "at random, cut": (
                lambda d: dict(
                    clip_norm=1.0, sigma=0.7, level_bits=8, rounding="random", top=0.95
                ),
                (dict(top=1.0), dict(sigma=0.71)),
            ),
        },
        release=dict(rounds=3, delta=1e-5),
        refused=(
            dict(sampling="replacement", n_clients=100, cohort=10),
            dict(sampling="poisson"),
            dict(relation="local"),
            dict(accountant="magic"),
            dict(delta=0.0),
        ),
    ),
    "rec": variants(
        "rec",
        {
            "one group": (
                lambda d: dict(clip_norm=1.0, std=0.6, index_bits=3),
                (dict(clip_norm=1.1), dict(std=0.61), dict(index_bits=4)),
            ),
            "two groups": (
                lambda d: dict(clip_norm=1.0, std=0.6, index_bits=2, groups=halves(d)),
                (dict(std=0.61), dict(index_bits=3), dict(groups=None)),
            ),
            "three groups, strong": (
                lambda d: dict(clip_norm=1.0, std=0.3, index_bits=3, groups=thirds(d)),
                (dict(std=0.31), dict(groups=None)),
            ),
        },
        release=dict(rounds=3, delta=1e-3, n_clients=100, cohort=10),
        refused=(
            dict(sampling="poisson", accountant="theorem1-arxiv"),
            dict(accountant="theorem1-neurips"),
            dict(n_clients=1, accountant="theorem1-arxiv"),
            dict(n_clients=0),
            dict(cohort=0),
        ),
        bad=(
            *({name: value} for name in ("clip_norm", "std") for value in NUMBERS),
            *(dict(index_bits=b) for b in (0, 25, 2.0)),
            dict(groups=(2, 0, 1)),
        ),
    ),
    "sqkr": variants(
        "sqkr",
        {
            "one bit": (
                lambda d: dict(clip_norm=1.0),
                (
                    dict(clip_norm=1.1),
                    dict(nbits=2),
                    dict(eps=9.0),
                    dict(frame_seed=1),
                    dict(support=0.7),
                ),
            ),
            "private": (
                lambda d: dict(clip_norm=1.0, nbits=3, eps=2.0),
                (dict(clip_norm=1.1), dict(nbits=4), dict(eps=2.1), dict(frame_seed=1)),
            ),
        },
        release=dict(rounds=3, delta=0.0),
        refused=(
            dict(sampling="poisson"),
            dict(sampling="fixed"),
        ),
        bad=(
            *(
                {name: value}
                for name in ("clip_norm", "shrink", "support")
                for value in NUMBERS
            ),
            *(dict(eps=e) for e in (0.0, -1.0, math.nan)),
            dict(shrink=1.0),
            dict(support=1.1),
            *(dict(nbits=b) for b in (0, 513, 2.0)),
            *(dict(frame_seed=b) for b in (-1, 0.5)),
        ),
    ),
    "signsgd": variants(
        "signsgd",
        {
            "noisy": (
                lambda d: dict(clip_norm=1.0, sigma=1.0),
                (dict(clip_norm=1.1), dict(sigma=1.01)),
            ),
            "quiet": (
                lambda d: dict(clip_norm=1.0, sigma=0.5),
                (dict(clip_norm=1.1), dict(sigma=0.51)),
            ),
        },
        release=dict(rounds=3, delta=1e-5),
        refused=(
            dict(sampling="poisson"),
            dict(sampling="fixed"),
            dict(relation="add-remove"),
            dict(accountant="magic"),
            dict(delta=0.0),
            dict(accountant="exact-classic", delta=0.0),
            dict(accountant="exact-classic", rounds=0),
            dict(accountant="exact-balle", d=0),
        ),
        bad=tuple(
            {name: value} for name in ("clip_norm", "sigma") for value in NUMBERS
        ),
    ),
    "mvu": variants(
        "mvu",
        {
            "one bit": (
                lambda d: dict(clip_norm=1.0, eps=2.0, beta=1.5),
                (
                    dict(clip_norm=1.1),
                    dict(eps=2.1),
                    dict(n_inputs=3),
                    dict(n_outputs=3),
                    dict(beta=1.4),
                    dict(constraint="metric"),
                ),
            ),
            "two bits": (
                lambda d: dict(clip_norm=1.0, eps=2.0, n_inputs=5, n_outputs=4),
                (dict(clip_norm=1.1), dict(n_outputs=2), dict(beta=1.1)),
            ),
        },
        release=dict(rounds=3, delta=1e-5),
        refused=(
            dict(sampling="poisson"),
            dict(sampling="fixed"),
            dict(relation="local"),
            dict(accountant="magic"),
            dict(accountant="grid-classic"),
            dict(delta=0.0),
            dict(d=0),
            dict(unit="nobody"),
        ),
        bad=(
            *(
                {name: value}
                for name in ("clip_norm", "eps", "beta")
                for value in NUMBERS
            ),
            dict(eps=701.0),
            dict(eps=1e-6),
            *(dict(n_inputs=b) for b in (1, 2.0)),
            *(dict(n_outputs=b) for b in (1, 300)),
            dict(constraint="l2"),
        ),
    ),
    "skellam": variants(
        "skellam",
        {
            "sixteen bits": (
                lambda d: dict(clip_norm=1.0, sigma=1.0, n_clients=4),
                (
                    dict(clip_norm=1.1),
                    dict(sigma=1.01),
                    dict(n_clients=5),
                    dict(ring_bits=17),
                    dict(beta=0.5),
                    dict(k=5.0),
                    dict(rotation_seed=1),
                    dict(tolerance=0.1),
                ),
            ),
            "tolerant": (
                lambda d: dict(
                    clip_norm=1.0, sigma=0.7, n_clients=5, ring_bits=13, tolerance=0.4
                ),
                (dict(sigma=0.71), dict(tolerance=0.0)),
            ),
        },
        release=dict(rounds=3, delta=1e-5, d=7),
        refused=(
            dict(sampling="poisson"),
            dict(sampling="fixed"),
            dict(sampling="poisson", n_clients=100, cohort=10, relation="replace"),
            dict(d=None),
            dict(d=0),
            dict(relation="local"),
            dict(accountant="pld"),
            dict(delta=0.0),
        ),
    ),
    "sqsgd": variants(
        "sqsgd",
        {
            "fixed range": (
                lambda d: dict(
                    bound=1.0, levels=4, eps=3.0, fraction=0.6 if d > 1 else 1.0
                ),
                (
                    dict(bound=1.1),
                    dict(levels=5),
                    dict(eps=3.1),
                    dict(seed=1),
                    dict(round=1),
                    dict(rule="best"),
                    dict(rotated=False),
                    dict(span="tight"),
                ),
            ),
            "tight, padded": (
                lambda d: dict(
                    bound=1.0,
                    levels=2,
                    eps=2.0,
                    fraction=1.0,
                    span="tight",
                    padded=True,
                    rule="best",
                ),
                (
                    dict(padded=False),
                    dict(fraction=0.9),
                    dict(span="fixed"),
                    dict(projected="sum"),
                ),
            ),
            "as it lies": (
                lambda d: dict(
                    bound=1.0,
                    levels=3,
                    eps=2.0,
                    fraction=1.0,
                    rotated=False,
                    residuals=False,
                    rule="best",
                ),
                (dict(rotated=True), dict(residuals=True)),
            ),
        },
        release=dict(rounds=3, delta=0.0),
        refused=(
            dict(sampling="poisson"),
            dict(sampling="fixed"),
            dict(d=0),
        ),
        bad=(
            *({name: value} for name in ("bound", "eps") for value in NUMBERS),
            *(dict(levels=k) for k in (1, 2.5, 0)),
            *(dict(fraction=r) for r in (0.0, -0.1, 1.1, math.nan)),
            dict(seed=-1),
            dict(round=-1),
            dict(span="loose"),
            dict(projected="twice"),
            dict(rule="free"),
            dict(alpha=-0.1),
            dict(beta=0.0),
            dict(beta=math.inf),
            dict(momentum=1.0),
            dict(rotated="no"),
            dict(padded="no"),
            dict(residuals="no"),
        ),
    ),
    "topk": variants(
        "topk",
        {
            "random": (
                lambda d: dict(
                    fraction=0.6 if d > 1 else 1.0,
                    clip_norm=1.0,
                    sigma=0.7,
                    n_clients=3,
                ),
                (
                    dict(clip_norm=1.1),
                    dict(sigma=0.71),
                    dict(n_clients=4),
                    dict(seed=1),
                    dict(held=False),
                    dict(fresh=True),
                    dict(round=1),
                    dict(sigma=None),
                ),
            ),
            "given, tolerant": (
                lambda d: dict(
                    fraction=0.6 if d > 1 else 1.0,
                    clip_norm=1.0,
                    sigma=0.7,
                    n_clients=10,
                    support=first(d),
                    tolerance=0.2,
                ),
                (dict(tolerance=0.1), dict(support=None)),
            ),
            "everything": (
                lambda d: dict(fraction=1.0, clip_norm=1.0, sigma=0.7, n_clients=3),
                (dict(fraction=0.9),),
            ),
        },
        release=dict(rounds=3, delta=1e-5),
        refused=(
            dict(sampling="fixed", n_clients=100, cohort=10),
            dict(sampling="poisson"),
            dict(sampling="poisson", n_clients=100, cohort=10, relation="replace"),
            dict(relation="local"),
            dict(accountant="magic"),
            dict(delta=0.0),
        ),
    ),
    "vqsgd": variants(
        "vqsgd",
        {
            "one corner": (
                lambda d: dict(clip_norm=1.0, eps=2.0),
                (dict(clip_norm=1.1), dict(eps=2.1), dict(repeats=2)),
            ),
            "five corners": (
                lambda d: dict(clip_norm=1.0, eps=1.0, repeats=5),
                (dict(clip_norm=1.1), dict(eps=math.inf), dict(repeats=4)),
            ),
            "compression": (
                lambda d: dict(clip_norm=1.0, eps=math.inf, repeats=3),
                (dict(clip_norm=0.9), dict(eps=400.0), dict(repeats=1)),
            ),
        },
        release=dict(rounds=3, delta=0.0),
        refused=(
            dict(sampling="poisson"),
            dict(sampling="fixed"),
            dict(d=0),
            dict(d=2.5),
        ),
        bad=(
            *(dict(clip_norm=value) for value in NUMBERS),
            *(dict(eps=e) for e in (0.0, -1.0, math.nan)),
            *(dict(repeats=r) for r in (0, -1, 2.0)),
        ),
    ),
}
CASES = {name: LISTED.get(name) or derived(name) for name in contract.registered()}
