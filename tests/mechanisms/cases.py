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
    """Cases of one mechanism from constructor parameters, a function of d, and the fields
    that make another mechanism of it, one at a time.
    """

    def build(parameters, change):
        return lambda d: contract.mechanism(name, **(parameters(d) | change))

    bad = [*bad, *out_of_range(contract.mechanism_class(name))]
    refused = (*refused, *NEVER)
    return {
        label: Case(
            build(parameters, {}),
            tuple(
                build(parameters, {name: value})
                for change in changes
                for name, value in change.items()
            ),
            release,
            refused,
            tuple((parameters(3) | change, change) for change in bad),
        )
        for label, (parameters, *changes) in cases.items()
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
    if isinstance(allowed, contract.OrNone):
        return outside(allowed.allowed)
    if allowed is bool:
        return ["no", 1, 0.0, None]
    if isinstance(allowed, contract.IntRange):
        low, high = allowed
        found = [0.5, "0", True]
        if low > -math.inf:
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
            others = [not value] if allowed is bool else [1]
            if allowed is not bool and value is not None:
                others = [value + 1, 0.9 * value, 0.5]
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
        f"audited {i}": ((lambda d, p=parameters: p), *changed(cls, parameters))
        for i, (parameters, _, _) in enumerate(cls.audit_cases)
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


THREE = mvu.Table(
    1.0,
    (0.5 - 2.5 / (math.e - 1), 0.5, 0.5 + 2.5 / (math.e - 1)),
    ((0.2 * math.e, 0.8 - 0.2 * math.e, 0.2), (0.2, 0.8 - 0.2 * math.e, 0.2 * math.e)),
)
DRAWN = (dict(sampling="poisson"), dict(sampling="fixed"))
UNPROVED = (dict(accountant="magic"), dict(delta=0.0))
COHORT = dict(n_clients=100, cohort=10)
RENYI = dict(accountant="rdp-balle")  # which proves less than losses do
SWAPPED = dict(COHORT, sampling="poisson", relation="replace", **RENYI)
LOCAL, NULL, NO_D = (
    dict(relation="local", **RENYI),
    dict(relation="null-slot"),
    (dict(d=None), dict(d=0)),
)
CENTRAL = (dict(COHORT, sampling="replacement"), dict(sampling="poisson"), *UNPROVED)
SHARES = (*DRAWN, SWAPPED, NULL, *UNPROVED)
ON_RING = (*NO_D, *DRAWN, SWAPPED, LOCAL, *UNPROVED)
CLIP = dict(clip_norm=1.0)
NOISE = dict(CLIP, sigma=0.7)
PURE = dict(rounds=3, delta=0.0)
RDP = dict(rounds=3, delta=1e-5)


def fixed(**parameters):
    "Parameters that do not depend on the dimension."
    return lambda d: parameters


def part(**parameters):
    "With the fraction .6 where there is more than one coordinate."
    return lambda d: dict(fraction=0.6 if d > 1 else 1.0) | parameters


LISTED = {
    "compressive": variants(
        "compressive",
        {
            "random": (
                lambda d: part(**NOISE, n_clients=3, chunks=min(d, 2))(d),
                dict(clip_norm=1.1, sigma=0.71, n_clients=4, chunks=3, seed=1),
                dict(round=1, kept="low", sigma=None),
            ),
            "low, tolerant": (
                part(**NOISE, n_clients=10, kept="low", tolerance=0.2),
                dict(tolerance=0.1, fraction=0.9),
            ),
            "everything": (
                lambda d: dict(NOISE, fraction=1.0, n_clients=3, chunks=min(d, 3)),
                dict(fraction=0.9, chunks=2),
            ),
        },
        RDP,
        SHARES,
    ),
    "gaussian": variants(
        "gaussian",
        {
            label: (
                fixed(**NOISE, **more),
                dict(clip_norm=1.1, sigma=0.71, local=not more, exact=False),
            )
            for label, more in (("central", {}), ("local", dict(local=True)))
        },
        RDP,
        CENTRAL,
    ),
    "ddgauss": variants(
        "ddgauss",
        {
            "sixteen bits": (
                fixed(clip_norm=1.0, sigma=1.0, n_clients=20),
                dict(clip_norm=1.1, sigma=1.1, n_clients=21, rotation_seed=1, k=5.0),
            ),
            "eleven bits": (
                fixed(**NOISE, n_clients=5, ring_bits=11, tolerance=0.4, beta=0.3),
                dict(ring_bits=10, tolerance=0.2, beta=0.4),
            ),
            "padded": (
                fixed(**NOISE, n_clients=5, padded=True),
                dict(sigma=0.71),
            ),
        },
        dict(RDP, d=7),
        ON_RING,
    ),
    "imvu": variants(
        "imvu",
        {
            "one bit": (
                fixed(clip_norm=1.0, eps=0.5, beta=4.0),
                dict(clip_norm=1.1, eps=0.51, beta=4.1, clamp=True),
                dict(table=mvu.solve(0.5)),
            ),
            "clamped": (
                fixed(clip_norm=1.0, eps=0.5, beta=4.0, clamp=True),
                dict(clamp=False, eps=0.51),
            ),
            "three symbols": (
                fixed(clip_norm=1.0, eps=1.0, beta=2.0, table=THREE),
                dict(clip_norm=1.1, beta=2.1, table=None),
            ),
        },
        RDP,
        (
            dict(sampling="poisson"),
            dict(relation="add-remove"),
            dict(accountant="fisher"),
            dict(unit="nobody"),
            dict(accountant="exact-balle", d=0),
            *UNPROVED,
        ),
    ),
    "pm": variants(
        "pm",
        {
            "one coordinate": (
                fixed(bound=1.0, eps=1.0),
                dict(bound=1.1, eps=1.1, count=1, residuals=True),
            ),
            "two coordinates": (
                fixed(bound=1.0, eps=6.0),
                dict(bound=0.9, eps=5.9, count=2),
            ),
            "every coordinate": (
                fixed(bound=1.0, eps=4.0, count=100),
                dict(count=None),
                dict(count=99),
            ),
        },
        PURE,
        DRAWN,
        (dict(eps=1e-7), *(dict(count=k) for k in (0, -1, 2.0))),
    ),
    "privquant": variants(
        "privquant",
        {
            "paper's rule": (
                fixed(bound=1.0, levels=4, eps=3.0),
                dict(bound=1.1, levels=3, eps=3.1, rule="best", kappa_min=-2),
            ),
            "best rule": (
                fixed(bound=1.0, levels=3, eps=1.0, rule="best"),
                dict(levels=4, eps=1.1, kappa_min=-1),
            ),
            "one bit": (
                fixed(bound=1.0, levels=2, eps=3.0, rule="best", kappa_min=0),
                dict(kappa_min=None, bound=0.9),
            ),
        },
        PURE,
        (*DRAWN, dict(d=0), dict(d=2.5)),
        (dict(kappa_min=0.5),),
    ),
    "quantised": variants(
        "quantised",
        {
            "toward zero": (
                fixed(**NOISE),
                dict(clip_norm=1.1, sigma=0.71, level_bits=7, rounding="random"),
                dict(top=0.9, exact=False),
            ),
            "at random": (
                fixed(**NOISE, level_bits=5, rounding="random"),
                dict(level_bits=6, rounding="zero", top=0.9),
            ),
            "at random, cut": (
                fixed(**NOISE, level_bits=8, rounding="random", top=0.95),
                dict(top=1.0, sigma=0.71),
            ),
        },
        RDP,
        (*CENTRAL, NULL),
    ),
    "rec": variants(
        "rec",
        {
            "one group": (
                fixed(clip_norm=1.0, std=0.6, index_bits=3),
                dict(clip_norm=1.1, std=0.61, index_bits=4),
            ),
            "two groups": (
                lambda d: dict(CLIP, std=0.6, index_bits=2, groups=halves(d)),
                dict(std=0.61, index_bits=3, groups=None),
            ),
            "three groups, strong": (
                lambda d: dict(CLIP, std=0.3, index_bits=3, groups=thirds(d)),
                dict(std=0.31, groups=None),
            ),
        },
        dict(COHORT, rounds=3, delta=1e-3),
        (
            dict(sampling="poisson", accountant="theorem1-arxiv"),
            dict(accountant="theorem1-neurips"),
            dict(n_clients=1, accountant="theorem1-arxiv"),
            dict(n_clients=0),
            dict(cohort=0),
        ),
        (dict(groups=(2, 0, 1)),),
    ),
    "sqkr": variants(
        "sqkr",
        {
            "one bit": (
                fixed(clip_norm=1.0),
                dict(clip_norm=1.1, nbits=2, eps=9.0, frame_seed=1, support=0.7),
            ),
            "private": (
                fixed(clip_norm=1.0, nbits=3, eps=2.0),
                dict(clip_norm=1.1, nbits=4, eps=2.1, frame_seed=1),
            ),
        },
        PURE,
        DRAWN,
    ),
    "signsgd": variants(
        "signsgd",
        {
            "noisy": (
                fixed(clip_norm=1.0, sigma=1.0),
                dict(clip_norm=1.1, sigma=1.01),
            ),
            "quiet": (
                fixed(clip_norm=1.0, sigma=0.5),
                dict(clip_norm=1.1, sigma=0.51),
            ),
        },
        RDP,
        (
            *DRAWN,
            dict(relation="add-remove"),
            *UNPROVED,
            dict(accountant="exact-classic", delta=0.0),
            dict(accountant="exact-classic", rounds=0),
            dict(accountant="exact-balle", d=0),
        ),
    ),
    "mvu": variants(
        "mvu",
        {
            "one bit": (
                fixed(clip_norm=1.0, eps=2.0, beta=1.5),
                dict(clip_norm=1.1, eps=2.1, n_inputs=3, n_outputs=3, beta=1.4),
                dict(constraint="metric"),
            ),
            "two bits": (
                fixed(clip_norm=1.0, eps=2.0, n_inputs=5, n_outputs=4),
                dict(clip_norm=1.1, n_outputs=2, beta=1.1),
            ),
        },
        RDP,
        (
            *DRAWN,
            LOCAL,
            *UNPROVED,
            dict(accountant="grid-classic"),
            dict(d=0),
            dict(unit="nobody"),
        ),
    ),
    "skellam": variants(
        "skellam",
        {
            "sixteen bits": (
                fixed(clip_norm=1.0, sigma=1.0, n_clients=4),
                dict(clip_norm=1.1, sigma=1.01, n_clients=5, ring_bits=17),
                dict(beta=0.5, k=5.0, rotation_seed=1, tolerance=0.1),
            ),
            "tolerant": (
                fixed(**NOISE, n_clients=5, ring_bits=13, tolerance=0.4),
                dict(sigma=0.71, tolerance=0.0),
            ),
        },
        dict(RDP, d=7),
        ON_RING,
    ),
    "sqsgd": variants(
        "sqsgd",
        {
            "fixed range": (
                part(bound=1.0, levels=4, eps=3.0),
                dict(bound=1.1, levels=5, eps=3.1, seed=1, round=1, rule="best"),
                dict(rotated=False, span="tight"),
            ),
            "tight, padded": (
                fixed(
                    bound=1.0,
                    levels=2,
                    eps=2.0,
                    fraction=1.0,
                    span="tight",
                    padded=True,
                    rule="best",
                ),
                dict(padded=False, fraction=0.9, span="fixed", projected="sum"),
            ),
            "as it lies": (
                fixed(
                    bound=1.0,
                    levels=3,
                    eps=2.0,
                    fraction=1.0,
                    rotated=False,
                    residuals=False,
                    rule="best",
                ),
                dict(rotated=True, residuals=True),
            ),
        },
        PURE,
        (*DRAWN, dict(d=0)),
    ),
    "topk": variants(
        "topk",
        {
            "random": (
                part(**NOISE, n_clients=3),
                dict(clip_norm=1.1, sigma=0.71, n_clients=4, seed=1, held=False),
                dict(fresh=True, round=1, sigma=None),
            ),
            "given, tolerant": (
                lambda d: part(**NOISE, n_clients=10, support=first(d), tolerance=0.2)(
                    d
                ),
                dict(tolerance=0.1, support=None),
            ),
            "everything": (
                fixed(**NOISE, fraction=1.0, n_clients=3),
                dict(fraction=0.9),
            ),
        },
        RDP,
        SHARES,
    ),
    "vqsgd": variants(
        "vqsgd",
        {
            "one corner": (
                fixed(clip_norm=1.0, eps=2.0),
                dict(clip_norm=1.1, eps=2.1, repeats=2),
            ),
            "five corners": (
                fixed(clip_norm=1.0, eps=1.0, repeats=5),
                dict(clip_norm=1.1, eps=math.inf, repeats=4),
            ),
            "compression": (
                fixed(clip_norm=1.0, eps=math.inf, repeats=3),
                dict(clip_norm=0.9, eps=400.0, repeats=1),
            ),
        },
        PURE,
        (*DRAWN, dict(d=0), dict(d=2.5)),
    ),
}
CASES = {name: LISTED.get(name) or derived(name) for name in contract.registered()}
