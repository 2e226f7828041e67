"""What the conformance suite builds: variants of every mechanism of the registry.

A new mechanism needs no entry: its cases follow from its class, from `audit_cases`
(parameters) and `ranges`. LISTED has variants that golden bytes name."""

import dataclasses
import math
import os
from collections.abc import Callable

from dpcomm.mechanisms import contract, mvu, noisy_sums, topk


@dataclasses.dataclass(frozen=True)
class Case:
    "How to build one variant of a mechanism, and what to ask of it."

    name: str
    parameters: Callable  # d -> arguments of its constructor
    release: dict  # arguments of a guarantee that can be given
    refused: tuple  # arguments, merged into release, of guarantees that cannot

    def make(self, d: int):
        return contract.mechanism(self.name, **self.parameters(d))

    def others(self, d: int) -> list:
        "The same with one field changed at a time, where the class accepts it."
        whole, found = self.make(d), []
        for field in dataclasses.fields(whole):
            for value in changed(whole, field):
                try:
                    other = dataclasses.replace(whole, **{field.name: value})
                except ValueError:
                    continue
                if other != whole:
                    found.append(other)
                    break
        return found


def changed(mechanism, field) -> list:
    "Other values of a field; the first that its class accepts is taken."
    value = getattr(mechanism, field.name)
    allowed = bool if field.type is bool else mechanism.ranges.get(field.name)
    if allowed is None or isinstance(allowed, contract.OrNone) and value is not None:
        return [None] if value is not None else []
    if allowed is bool:
        return [not value]
    if isinstance(allowed, tuple) and not hasattr(allowed, "_fields"):
        return list(allowed)
    return [1] if value is None else [value + 1, 0.9 * value, 0.5]


def variants(name: str) -> dict:
    "Cases of one mechanism: those listed here, or its own audited parameters."
    cls = contract.mechanism_class(name)
    audited = {f"audited {i}": each[0] for i, each in enumerate(cls.audit_cases)}
    return {
        label: Case(
            name,
            given if callable(given) else lambda d, given=given: given,
            release(cls),
            refused(cls),
        )
        for label, given in LISTED.get(name, audited).items()
    }


def release(cls) -> dict:
    "Arguments of a guarantee that every mechanism of a class can give."
    run = dict(rounds=3, delta=0.0 if issubclass(cls, contract.Local) else 1e-5)
    if issubclass(cls, noisy_sums.OnRing):
        run["d"] = 7
    return run | (dict(COHORT, delta=1e-3) if cls.name == "rec" else {})


def refused(cls) -> tuple:
    "Arguments, merged into a release, of guarantees that it cannot give."
    families = {
        contract.Local: (dict(d=0), dict(d=2.5)),
        contract.LocalRenyi: (dict(relation="add-remove"), NOBODY, dict(d=2.5)),
        noisy_sums.Central: (dict(COHORT, sampling="replacement"), UNKNOWN),
        noisy_sums.Summed: (UNKNOWN, dict(sampling="fixed"), SWAPPED),
        noisy_sums.OnRing: (dict(d=None), LOCAL),
    }
    made = REFUSED.get(cls.name, ())
    return sum((f for kind, f in families.items() if issubclass(cls, kind)), made)


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
COHORT = dict(n_clients=100, cohort=10)
UNKNOWN, NOBODY = dict(sampling="poisson"), dict(unit="nobody")
RENYI = dict(accountant="rdp-balle")  # which proves less than losses do
SWAPPED = dict(COHORT, sampling="poisson", relation="replace", **RENYI)
LOCAL = dict(relation="local", **RENYI)
REFUSED = {
    "mvu": (LOCAL, dict(accountant="grid-classic"), dict(d=0), NOBODY),
    "rec": (
        dict(sampling="poisson", accountant="theorem1-arxiv"),
        dict(accountant="theorem1-neurips"),
        dict(n_clients=1, accountant="theorem1-arxiv"),
        dict(n_clients=0),
        dict(cohort=0),
    ),
}
CLIP = dict(clip_norm=1.0)
NOISE = dict(CLIP, sigma=0.7)
WHOLE = dict(bound=1.0, eps=2.0, fraction=1.0, rule="best")  # of sqSGD


def part(**parameters):
    "With the fraction .6 where there is more than one coordinate."
    return lambda d: dict(fraction=0.6 if d > 1 else 1.0) | parameters


LISTED = {
    "compressive": {
        "random": lambda d: part(**NOISE, n_clients=3, chunks=min(d, 2))(d),
        "low, tolerant": part(**NOISE, n_clients=10, kept="low", tolerance=0.2),
        "everything": lambda d: dict(
            NOISE, fraction=1.0, n_clients=3, chunks=min(d, 3)
        ),
    },
    "gaussian": {"central": NOISE, "local": dict(NOISE, local=True)},
    "ddgauss": {
        "sixteen bits": dict(clip_norm=1.0, sigma=1.0, n_clients=20),
        "eleven bits": dict(NOISE, n_clients=5, ring_bits=11, tolerance=0.4, beta=0.3),
        "padded": dict(NOISE, n_clients=5, padded=True),
    },
    "imvu": {
        "one bit": dict(clip_norm=1.0, eps=0.5, beta=4.0),
        "clamped": dict(clip_norm=1.0, eps=0.5, beta=4.0, clamp=True),
        "three symbols": dict(clip_norm=1.0, eps=1.0, beta=2.0, table=THREE),
    },
    "pm": {
        "one coordinate": dict(bound=1.0, eps=1.0),
        "two coordinates": dict(bound=1.0, eps=6.0),
        "every coordinate": dict(bound=1.0, eps=4.0, count=100),
    },
    "privquant": {
        "paper's rule": dict(bound=1.0, levels=4, eps=3.0),
        "best rule": dict(bound=1.0, levels=3, eps=1.0, rule="best"),
        "one bit": dict(bound=1.0, levels=2, eps=3.0, rule="best", kappa_min=0),
    },
    "quantised": {
        "toward zero": NOISE,
        "at random": dict(NOISE, level_bits=5, rounding="random"),
        "at random, cut": dict(NOISE, level_bits=8, rounding="random", top=0.95),
    },
    "rec": {
        "one group": dict(clip_norm=1.0, std=0.6, index_bits=3),
        "two groups": lambda d: dict(CLIP, std=0.6, index_bits=2, groups=halves(d)),
        "three groups, strong": lambda d: dict(
            CLIP, std=0.3, index_bits=3, groups=thirds(d)
        ),
    },
    "sqkr": {"one bit": CLIP, "private": dict(CLIP, nbits=3, eps=2.0)},
    "signsgd": {"noisy": dict(CLIP, sigma=1.0), "quiet": dict(CLIP, sigma=0.5)},
    "mvu": {
        "one bit": dict(clip_norm=1.0, eps=2.0, beta=1.5),
        "two bits": dict(clip_norm=1.0, eps=2.0, n_inputs=5, n_outputs=4),
    },
    "skellam": {
        "sixteen bits": dict(clip_norm=1.0, sigma=1.0, n_clients=4),
        "tolerant": dict(NOISE, n_clients=5, ring_bits=13, tolerance=0.4),
    },
    "sqsgd": {
        "fixed range": part(bound=1.0, levels=4, eps=3.0),
        "tight, padded": dict(WHOLE, levels=2, span="tight", padded=True),
        "as it lies": dict(WHOLE, levels=3, rotated=False, residuals=False),
    },
    "topk": {
        "random": part(**NOISE, n_clients=3),
        "given, tolerant": lambda d: part(
            **NOISE, n_clients=10, support=first(d), tolerance=0.2
        )(d),
        "everything": dict(NOISE, fraction=1.0, n_clients=3),
    },
    "vqsgd": {
        "one corner": dict(CLIP, eps=2.0),
        "five corners": dict(CLIP, eps=1.0, repeats=5),
        "compression": dict(CLIP, eps=math.inf, repeats=3),
    },
}
# A mechanism of one's own: DPCOMM_MECHANISM=my.module:Class, or several with spaces.
places = os.environ.get("DPCOMM_MECHANISM", "").split()
OWN = [*map(contract.import_mechanism, places)]
CASES = {name: variants(name) for name in contract.registered()}
