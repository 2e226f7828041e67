"""The contract, checked for every mechanism of the registry.

A new mechanism needs one entry in CASES; without it these tests fail. Each statistical test has false-alarm rate 1e-6, split over
its comparisons, and fixed seeds."""
import dataclasses
import functools
import math
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from laws import ALARM, radius, same_law

from dpcomm.core import wire
from dpcomm.mechanisms import contract
from dpcomm.privacy import audit, games
from dpcomm.privacy.accounting import Guarantee, RELATIONS
from dpcomm.core.chance import Insecure, seed_tree
from dpcomm.mechanisms import mvu, topk


@dataclasses.dataclass(frozen=True)
class Case:
    "How to build one variant of a mechanism, and what to ask of it."
    make: Callable  # d -> mechanism
    others: tuple  # d -> mechanism, each with one parameter changed: their messages must be refused
    release: dict  # arguments of a guarantee that can be given
    refused: tuple  # arguments, merged into release, of guarantees that cannot
    bad: tuple  # constructor arguments, merged into those of make(3), that are out of range


def variants(name: str, cases: dict, release: dict, refused: tuple, bad: tuple) -> dict:
    "Cases of one mechanism from constructor parameters, each a function of d, and the changes that make another mechanism of it."
    build = lambda parameters, change: lambda d: contract.mechanism(name, **(parameters(d) | change))
    return {label: Case(build(parameters, {}), tuple(build(parameters, change) for change in changes), release, refused,
                        tuple((parameters(3) | change, change) for change in bad))
            for label, (parameters, changes) in cases.items()}


def halves(d: int) -> tuple:
    "Two groups where there is more than one entry."
    return (d - d // 2, d // 2) if d > 1 else (1,)


def first(d: int) -> topk.Support:
    "The support of the first six tenths."
    return topk.Support(range(topk.size(0.6 if d > 1 else 1.0, d)))


NUMBERS = (0.0, -1.0, math.nan, math.inf)
THREE = mvu.Table(1.0, (0.5 - 2.5 / (math.e - 1), 0.5, 0.5 + 2.5 / (math.e - 1)), ((0.2 * math.e, 0.8 - 0.2 * math.e, 0.2), (0.2, 0.8 - 0.2 * math.e, 0.2 * math.e)))
CASES = {
    "compressive": variants(
        "compressive",
        {"random": (lambda d: dict(fraction=0.6 if d > 1 else 1.0, clip_norm=1.0, sigma=0.7, n_clients=3, chunks=min(d, 2)),
                    (dict(clip_norm=1.1), dict(sigma=0.71), dict(n_clients=4), dict(chunks=3), dict(seed=1), dict(round=1), dict(kept="low"), dict(sigma=None))),
         "low, tolerant": (lambda d: dict(fraction=0.6 if d > 1 else 1.0, clip_norm=1.0, sigma=0.7, n_clients=10, kept="low", tolerance=0.2),
                           (dict(tolerance=0.1), dict(fraction=0.9))),
         "everything": (lambda d: dict(fraction=1.0, clip_norm=1.0, sigma=0.7, n_clients=3, chunks=min(d, 3)), (dict(fraction=0.9), dict(chunks=2)))},
        release=dict(rounds=3, delta=1e-5),
        refused=(dict(sampling="fixed", n_clients=100, cohort=10), dict(sampling="poisson"), dict(sampling="poisson", n_clients=100, cohort=10, relation="replace"),
                 dict(relation="local"), dict(accountant="magic"), dict(delta=0.0), dict(rounds=0)),
        bad=(*({name: value} for name in ("clip_norm", "sigma", "penalty") for value in NUMBERS), *(dict(fraction=r) for r in (0.0, -0.1, 1.1, math.nan)),
             *(dict(n_clients=n) for n in (0, 2.5)), *(dict(chunks=n) for n in (0, 1.5)), *(dict(tolerance=r) for r in (-0.1, 1.0, math.nan)),
             dict(iterations=-1), dict(seed=-1), dict(round=-1), dict(kept="high"), dict(fresh="no"))),
    "gaussian": variants(
        "gaussian",
        {"central": (lambda d: dict(clip_norm=1.0, sigma=0.7), (dict(clip_norm=1.1), dict(sigma=0.71), dict(local=True), dict(exact=False))),
         "local": (lambda d: dict(clip_norm=1.0, sigma=0.7, local=True), (dict(clip_norm=1.1), dict(sigma=0.71), dict(local=False), dict(exact=False)))},
        release=dict(rounds=3, delta=1e-5),
        refused=(dict(sampling="fixed", n_clients=100, cohort=10), dict(sampling="poisson"), dict(sampling="nobody"), dict(accountant="magic"),
                 dict(delta=0.0), dict(rounds=0)),
        bad=(*({name: value} for name in ("clip_norm", "sigma") for value in NUMBERS), dict(local=None), dict(local="no"), dict(exact=None), dict(exact=1))),
    "ddgauss": variants(
        "ddgauss",
        {"sixteen bits": (lambda d: dict(clip_norm=1.0, sigma=1.0, n_clients=20), (dict(clip_norm=1.1), dict(sigma=1.1), dict(n_clients=21), dict(rotation_seed=1), dict(k=5.0))),
         "eleven bits": (lambda d: dict(clip_norm=1.0, sigma=0.7, n_clients=5, ring_bits=11, tolerance=0.4, beta=0.3), (dict(ring_bits=10), dict(tolerance=0.2), dict(beta=0.4)))},
        release=dict(rounds=3, delta=1e-5, d=7),
        refused=(dict(d=None), dict(d=0), dict(sampling="fixed"), dict(sampling="poisson"), dict(sampling="poisson", n_clients=100, cohort=10, relation="replace"),
                 dict(relation="local"), dict(accountant="magic"), dict(delta=0.0), dict(rounds=0)),
        bad=(*({name: value} for name in ("clip_norm", "sigma", "k") for value in NUMBERS), *(dict(n_clients=n) for n in (0, 2.5)), *(dict(ring_bits=b) for b in (1, 33, 2.0)),
             *(dict(beta=b) for b in (-0.1, 1.0, math.nan)), *(dict(tolerance=b) for b in (-0.1, 1.0, math.nan)), dict(rotation_seed=-1))),
    "imvu": variants(
        "imvu",
        {"one bit": (lambda d: dict(clip_norm=1.0, eps=0.5, beta=4.0), (dict(clip_norm=1.1), dict(eps=0.51), dict(beta=4.1), dict(clamp=True), dict(table=mvu.solve(0.5)))),
         "clamped": (lambda d: dict(clip_norm=1.0, eps=0.5, beta=4.0, clamp=True), (dict(clamp=False), dict(eps=0.51))),
         "three symbols": (lambda d: dict(clip_norm=1.0, eps=1.0, beta=2.0, table=THREE), (dict(clip_norm=1.1), dict(beta=2.1), dict(table=None)))},
        release=dict(rounds=3, delta=1e-5),
        refused=(dict(sampling="poisson"), dict(relation="add-remove"), dict(accountant="magic"), dict(accountant="fisher"), dict(delta=0.0), dict(rounds=0),
                 dict(unit="nobody"), dict(accountant="exact-balle", d=0)),
        bad=(*({name: value} for name in ("clip_norm", "eps", "beta") for value in NUMBERS), dict(eps=701.0), dict(clamp="no"))),
    "pm": variants(
        "pm",
        {"one coordinate": (lambda d: dict(bound=1.0, eps=1.0), (dict(bound=1.1), dict(eps=1.1), dict(count=1), dict(residuals=True))),
         "two coordinates": (lambda d: dict(bound=1.0, eps=6.0), (dict(bound=0.9), dict(eps=5.9), dict(count=2))),
         "every coordinate": (lambda d: dict(bound=1.0, eps=4.0, count=100), (dict(count=None), dict(count=99)))},
        release=dict(rounds=3, delta=0.0),
        refused=(dict(sampling="poisson"), dict(sampling="fixed"), dict(delta=1.0), dict(rounds=0), dict(rounds=1.5)),
        bad=(*({name: value} for name in ("bound", "eps") for value in NUMBERS), dict(eps=1e-7), *(dict(count=k) for k in (0, -1, 2.0)), dict(residuals="no"))),
    "privquant": variants(
        "privquant",
        {"paper's rule": (lambda d: dict(bound=1.0, levels=4, eps=3.0), (dict(bound=1.1), dict(levels=3), dict(eps=3.1), dict(rule="best"), dict(kappa_min=-2))),
         "best rule": (lambda d: dict(bound=1.0, levels=3, eps=1.0, rule="best"), (dict(levels=4), dict(eps=1.1), dict(kappa_min=-1))),
         "one bit": (lambda d: dict(bound=1.0, levels=2, eps=3.0, rule="best", kappa_min=0), (dict(kappa_min=None), dict(bound=0.9)))},
        release=dict(rounds=3, delta=0.0),
        refused=(dict(sampling="poisson"), dict(sampling="fixed"), dict(delta=1.0), dict(rounds=0), dict(rounds=1.5), dict(d=0), dict(d=2.5)),
        bad=(*({name: value} for name in ("bound", "eps") for value in NUMBERS), *(dict(levels=k) for k in (1, 0, 2.0, 2**16 + 1)), dict(rule="worst"),
             dict(kappa_min=0.5))),
    "quantised": variants(
        "quantised",
        {"toward zero": (lambda d: dict(clip_norm=1.0, sigma=0.7), (dict(clip_norm=1.1), dict(sigma=0.71), dict(level_bits=7), dict(rounding="random"), dict(top=0.9), dict(exact=False))),
         "at random": (lambda d: dict(clip_norm=1.0, sigma=0.7, level_bits=5, rounding="random"), (dict(level_bits=6), dict(rounding="zero"), dict(top=0.9))),
         "at random, cut": (lambda d: dict(clip_norm=1.0, sigma=0.7, level_bits=8, rounding="random", top=0.95), (dict(top=1.0), dict(sigma=0.71)))},
        release=dict(rounds=3, delta=1e-5),
        refused=(dict(sampling="fixed", n_clients=100, cohort=10), dict(sampling="poisson"), dict(sampling="nobody"), dict(relation="local"), dict(accountant="magic"),
                 dict(delta=0.0), dict(rounds=0)),
        bad=(*({name: value} for name in ("clip_norm", "sigma", "top") for value in NUMBERS), dict(top=1.1), *(dict(level_bits=b) for b in (1, 17, 2.5)), dict(rounding="nearest"), dict(exact="no"))),
    "rec": variants(
        "rec",
        {"one group": (lambda d: dict(clip_norm=1.0, std=0.6, index_bits=3), (dict(clip_norm=1.1), dict(std=0.61), dict(index_bits=4))),
         "two groups": (lambda d: dict(clip_norm=1.0, std=0.6, index_bits=2, groups=halves(d)), (dict(std=0.61), dict(index_bits=3), dict(groups=None)))},
        release=dict(rounds=3, delta=1e-3, n_clients=100, cohort=10),
        refused=(dict(sampling="poisson"), dict(sampling="fixed"), dict(accountant="theorem1-neurips"), dict(delta=1.0), dict(rounds=0),
                 dict(n_clients=1), dict(cohort=0)),
        bad=(*({name: value} for name in ("clip_norm", "std") for value in NUMBERS),
             *(dict(index_bits=b) for b in (0, 25, 2.0)), dict(groups=(2, 0, 1)))),
    "sqkr": variants(
        "sqkr",
        {"one bit": (lambda d: dict(clip_norm=1.0), (dict(clip_norm=1.1), dict(nbits=2), dict(eps=9.0), dict(frame_seed=1), dict(support=0.7))),
         "private": (lambda d: dict(clip_norm=1.0, nbits=3, eps=2.0), (dict(clip_norm=1.1), dict(nbits=4), dict(eps=2.1), dict(frame_seed=1)))},
        release=dict(rounds=3, delta=0.0),
        refused=(dict(sampling="poisson"), dict(sampling="fixed"), dict(delta=1.0), dict(rounds=0), dict(rounds=1.5)),
        bad=(*({name: value} for name in ("clip_norm", "shrink", "support") for value in NUMBERS), *(dict(eps=e) for e in (0.0, -1.0, math.nan)),
             dict(shrink=1.0), dict(support=1.1), *(dict(nbits=b) for b in (0, 513, 2.0)), *(dict(frame_seed=b) for b in (-1, 0.5)))),
    "signsgd": variants(
        "signsgd",
        {"noisy": (lambda d: dict(clip_norm=1.0, sigma=1.0), (dict(clip_norm=1.1), dict(sigma=1.01))),
         "quiet": (lambda d: dict(clip_norm=1.0, sigma=0.5), (dict(clip_norm=1.1), dict(sigma=0.51)))},
        release=dict(rounds=3, delta=1e-5),
        refused=(dict(sampling="poisson"), dict(sampling="fixed"), dict(relation="add-remove"), dict(accountant="magic"), dict(delta=0.0), dict(rounds=0),
                 dict(accountant="exact-classic", delta=0.0), dict(accountant="exact-classic", rounds=0), dict(accountant="exact-balle", d=0)),
        bad=tuple({name: value} for name in ("clip_norm", "sigma") for value in NUMBERS)),
    "mvu": variants(
        "mvu",
        {"one bit": (lambda d: dict(clip_norm=1.0, eps=2.0, beta=1.5), (dict(clip_norm=1.1), dict(eps=2.1), dict(n_inputs=3), dict(n_outputs=3),
                                                                        dict(beta=1.4), dict(constraint="metric"))),
         "two bits": (lambda d: dict(clip_norm=1.0, eps=2.0, n_inputs=5, n_outputs=4), (dict(clip_norm=1.1), dict(n_outputs=2), dict(beta=1.1)))},
        release=dict(rounds=3, delta=1e-5),
        refused=(dict(sampling="poisson"), dict(sampling="fixed"), dict(relation="local"), dict(accountant="magic"), dict(accountant="grid-classic"),
                 dict(delta=0.0), dict(rounds=0)),
        bad=(*({name: value} for name in ("clip_norm", "eps", "beta") for value in NUMBERS), dict(eps=701.0), dict(eps=1e-6),
             *(dict(n_inputs=b) for b in (1, 2.0)), *(dict(n_outputs=b) for b in (1, 300)), dict(constraint="l2"))),
    "skellam": variants(
        "skellam",
        {"sixteen bits": (lambda d: dict(clip_norm=1.0, sigma=1.0, n_clients=4), (dict(clip_norm=1.1), dict(sigma=1.01), dict(n_clients=5), dict(ring_bits=17), dict(beta=0.5),
                                                                                  dict(k=5.0), dict(rotation_seed=1), dict(tolerance=0.1))),
         "tolerant": (lambda d: dict(clip_norm=1.0, sigma=0.7, n_clients=5, ring_bits=13, tolerance=0.4), (dict(sigma=0.71), dict(tolerance=0.0)))},
        release=dict(rounds=3, delta=1e-5, d=7),
        refused=(dict(sampling="poisson"), dict(sampling="fixed"), dict(sampling="poisson", n_clients=100, cohort=10, relation="replace"), dict(d=None), dict(d=0),
                 dict(relation="local"), dict(accountant="pld"), dict(delta=0.0), dict(rounds=0)),
        bad=(*({name: value} for name in ("clip_norm", "sigma", "k") for value in NUMBERS), *(dict(tolerance=t) for t in (-0.1, 1.0, math.nan)),
             *(dict(beta=b) for b in (-0.1, 1.0, math.nan)), *(dict(n_clients=n) for n in (0, 1.5)), *(dict(ring_bits=b) for b in (1, 33, 8.0)),
             *(dict(rotation_seed=r) for r in (-1, 0.5)))),
    "sqsgd": variants(
        "sqsgd",
        {"fixed range": (lambda d: dict(bound=1.0, levels=4, eps=3.0, fraction=0.6 if d > 1 else 1.0),
                         (dict(bound=1.1), dict(levels=5), dict(eps=3.1), dict(seed=1), dict(round=1), dict(rule="best"), dict(rotated=False), dict(span="tight"))),
         "tight, padded": (lambda d: dict(bound=1.0, levels=2, eps=2.0, fraction=1.0, span="tight", padded=True, rule="best"), (dict(padded=False), dict(fraction=0.9), dict(span="fixed"), dict(projected="sum"))),
         "as it lies": (lambda d: dict(bound=1.0, levels=3, eps=2.0, fraction=1.0, rotated=False, residuals=False, rule="best"), (dict(rotated=True), dict(residuals=True)))},
        release=dict(rounds=3, delta=0.0),
        refused=(dict(sampling="poisson"), dict(sampling="fixed"), dict(delta=1.0), dict(rounds=0), dict(rounds=1.5), dict(d=0)),
        bad=(*({name: value} for name in ("bound", "eps") for value in NUMBERS), *(dict(levels=k) for k in (1, 2.5, 0)), *(dict(fraction=r) for r in (0.0, -0.1, 1.1, math.nan)),
             dict(seed=-1), dict(round=-1), dict(span="loose"), dict(projected="twice"), dict(rule="free"), dict(alpha=-0.1), dict(beta=0.0), dict(beta=math.inf), dict(momentum=1.0), dict(rotated="no"),
             dict(padded="no"), dict(residuals="no"))),
    "topk": variants(
        "topk",
        {"random": (lambda d: dict(fraction=0.6 if d > 1 else 1.0, clip_norm=1.0, sigma=0.7, n_clients=3),
                    (dict(clip_norm=1.1), dict(sigma=0.71), dict(n_clients=4), dict(seed=1), dict(held=False), dict(fresh=True), dict(round=1), dict(sigma=None))),
         "given, tolerant": (lambda d: dict(fraction=0.6 if d > 1 else 1.0, clip_norm=1.0, sigma=0.7, n_clients=10, support=first(d), tolerance=0.2),
                             (dict(tolerance=0.1), dict(support=None))),
         "everything": (lambda d: dict(fraction=1.0, clip_norm=1.0, sigma=0.7, n_clients=3), (dict(fraction=0.9),))},
        release=dict(rounds=3, delta=1e-5),
        refused=(dict(sampling="fixed", n_clients=100, cohort=10), dict(sampling="poisson"), dict(sampling="poisson", n_clients=100, cohort=10, relation="replace"),
                 dict(relation="local"), dict(accountant="magic"), dict(delta=0.0), dict(rounds=0)),
        bad=(*({name: value} for name in ("clip_norm", "sigma") for value in NUMBERS), *(dict(fraction=r) for r in (0.0, -0.1, 1.1, math.nan)),
             *(dict(n_clients=n) for n in (0, 2.5)), *(dict(tolerance=r) for r in (-0.1, 1.0, math.nan)))),
    "vqsgd": variants(
        "vqsgd",
        {"one corner": (lambda d: dict(clip_norm=1.0, eps=2.0), (dict(clip_norm=1.1), dict(eps=2.1), dict(repeats=2))),
         "five corners": (lambda d: dict(clip_norm=1.0, eps=1.0, repeats=5), (dict(clip_norm=1.1), dict(eps=math.inf), dict(repeats=4))),
         "compression": (lambda d: dict(clip_norm=1.0, eps=math.inf, repeats=3), (dict(clip_norm=0.9), dict(eps=400.0), dict(repeats=1)))},
        release=dict(rounds=3, delta=0.0),
        refused=(dict(sampling="poisson"), dict(sampling="fixed"), dict(delta=1.0), dict(rounds=0), dict(rounds=1.5), dict(d=0), dict(d=2.5)),
        bad=(*(dict(clip_norm=value) for value in NUMBERS), *(dict(eps=e) for e in (0.0, -1.0, math.nan)), *(dict(repeats=r) for r in (0, -1, 2.0)))),
}
NAMES = contract.registered()
ALL = [pytest.param(case, id=f"{name}, {label}") for name in NAMES for label, case in CASES.get(name, {}).items()]
each = pytest.mark.parametrize("case", ALL)
SIZES = [1, 2, 3, 7, 64, 100]


@pytest.mark.parametrize("name", NAMES)
def test_every_registered_mechanism_is_put_to_the_test(name):
    assert CASES.get(name), f"{name} is registered but has no entry in CASES: add its parameters there"
    assert {case.make(3).name for case in CASES[name].values()} == {name}


def vector(d: int, norm: float, *path) -> torch.Tensor:
    "A float32 vector of the given norm and a random direction."
    u = seed_tree(0, "vector", d, *path).standard_normal(d)
    return torch.from_numpy((norm * u / np.linalg.norm(u)).astype(np.float32))


def inputs(d: int, clip: float = 1.0) -> dict:
    return {"zero": torch.zeros(d), "one-hot": torch.eye(d)[d // 2] * 0.5 * clip, "inside": vector(d, 0.6 * clip),
            "boundary": vector(d, clip), "clipped": vector(d, 5 * clip), "tiny": torch.full((d,), 1e-30), "huge": vector(d, 1e30)}



def streams(n: int, *path) -> list:
    return [seed_tree(0, "row", *path, i) for i in range(n)]


def limit(mechanism) -> tuple:
    "What clipping enforces: the name of the bound, its value, and the order of the norm."
    return next((name, getattr(mechanism, name), order) for name, order in (("clip_norm", 2), ("bound", math.inf)) if hasattr(mechanism, name))


def round_trip(mechanism, u: torch.Tensor, key=None) -> torch.Tensor:
    return mechanism.decode(wire.Message.from_bytes(mechanism.encode(u, key).to_bytes(), len(u)))


@functools.cache
def is_random(mechanism, d: int) -> bool:
    "Whether the declared variance of a decoded row is above zero."
    return bool(mechanism.moments(vector(1, 0.8).expand(1, d) / d)[1].max() > 0)


# ---- the form of the contract

@each
def test_the_contract_is_signed(case):
    mechanism = case.make(5)
    for method in ("clip", "encode", "decode", "simulate", "aggregate", "bits", "guarantee", "moments", "play", "curve"):
        assert callable(getattr(mechanism, method)), f"{method} is missing"
    assert isinstance(mechanism.replay, bool) and mechanism.name in NAMES
    with pytest.raises(dataclasses.FrozenInstanceError):
        mechanism.clip_norm = 3.0
    assert mechanism == case.make(5) and all(mechanism != other(5) for other in case.others)


@each
@pytest.mark.parametrize("d", SIZES)
def test_shapes_and_types(case, d):
    mechanism = case.make(d)
    rows = torch.stack(list(inputs(d).values()))
    before = rows.clone()
    estimates = mechanism.simulate(rows, streams(len(rows)))
    bias, variance = mechanism.moments(rows[::3])
    assert estimates.shape == mechanism.clip(rows).shape == rows.shape and bias.shape == variance.shape == rows[::3].shape
    assert estimates.dtype == mechanism.clip(rows).dtype == torch.float32
    assert mechanism.aggregate(estimates, 7, seed_tree(0)).shape == (d,)
    for row in rows:
        decoded = round_trip(mechanism, row, Insecure(3))
        assert decoded.shape == (d,) and decoded.dtype == torch.float32 and torch.isfinite(decoded).all()
    assert torch.isfinite(estimates).all() and torch.isfinite(variance).all() and (variance >= 0).all()
    assert torch.equal(rows, before), "the argument was changed"


@each
@pytest.mark.parametrize("d", SIZES)
def test_clipping_bounds_the_norm(case, d):
    mechanism = case.make(d)
    _, bound, order = limit(mechanism)
    for kind, u in inputs(d, bound).items():
        clipped = mechanism.clip(u[None])[0].double()
        assert torch.linalg.vector_norm(clipped, order) <= bound * (1 + 1e-6), kind
        if kind in ("zero", "one-hot", "inside", "tiny"):
            assert torch.equal(clipped.float(), u), kind


@each
@pytest.mark.parametrize("d", SIZES)
def test_measured_bits_are_declared_bits(case, d):
    mechanism = case.make(d)
    declared = mechanism.bits(d)
    for i, u in enumerate(inputs(d).values()):
        message = mechanism.encode(u, Insecure(i))
        assert 8 * len(message.to_bytes()) == 8 * message.nbytes == declared.total
        assert 8 * len(message.payload) == declared.content
        assert declared.header == wire.header_bits(mechanism.name)
    assert declared.total == declared.payload + declared.header + declared.shared_randomness
    assert declared.per_param == declared.total / d


# ---- randomness

@each
def test_the_key_alone_decides_the_message(case):
    "In 64 dimensions, where messages of one bit a parameter do not coincide by chance."
    mechanism, u = case.make(64), vector(64, 0.8)
    messages = {key: mechanism.encode(u, Insecure(key)).to_bytes() for key in (0, 1, 2, 2**31, 2**63, 2**100)}
    torch.rand(3), np.random.rand(3)
    assert messages == {key: mechanism.encode(u, Insecure(key)).to_bytes() for key in reversed(messages)}
    assert len(set(messages.values())) == (len(messages) if is_random(mechanism, len(u)) else 1)
    for data in messages.values():
        first, again = (mechanism.decode(wire.Message.from_bytes(data, len(u))) for _ in range(2))
        assert torch.equal(first, again)


@each
@pytest.mark.parametrize("d", SIZES)
def test_a_batch_is_its_rows(case, d):
    mechanism = case.make(d)
    rows = torch.stack(list(inputs(d).values()))
    batch = mechanism.simulate(rows, streams(len(rows)))
    alone = torch.cat([mechanism.simulate(row[None], [stream]) for row, stream in zip(rows, streams(len(rows)))])
    torch.testing.assert_close(batch, alone, rtol=1e-5, atol=1e-6)


@each
def test_moments_of_a_batch_are_those_of_its_rows(case):
    mechanism, rows = case.make(7), torch.stack(list(inputs(7).values()))[[0, 2, 4]]
    for whole, parts in zip(mechanism.moments(rows), zip(*(mechanism.moments(row[None]) for row in rows))):
        torch.testing.assert_close(whole, torch.cat(parts), rtol=1e-6, atol=1e-9)


@each
def test_the_order_of_clients_changes_nothing(case):
    mechanism, order = case.make(7), [4, 2, 6, 0, 3, 5, 1]
    rows = torch.stack(list(inputs(7).values()))
    straight = mechanism.simulate(rows, streams(7))
    shuffled = mechanism.simulate(rows[order], [streams(7)[i] for i in order])
    torch.testing.assert_close(shuffled, straight[order], rtol=1e-5, atol=1e-6)
    averages = [mechanism.aggregate(e, 7, seed_tree(0, "server")) for e in (straight, straight[order])]
    torch.testing.assert_close(*averages, rtol=1e-5, atol=1e-6)


@each
@pytest.mark.parametrize("n", [1, 2, 5])
def test_as_many_streams_as_rows(case, n):
    "One stream for three clients would give them the same noise by broadcasting."
    mechanism = case.make(4)
    if is_random(mechanism, 4):
        with pytest.raises(ValueError):
            mechanism.simulate(torch.stack([vector(4, 0.5, i) for i in range(3)]), streams(n))


@each
def test_one_stream_for_the_whole_cohort_gives_every_row_its_own_noise(case):
    mechanism, u = case.make(64), vector(64, 0.8)
    rows = mechanism.simulate(u.repeat(5, 1), seed_tree(0))
    assert len({tuple(row.tolist()) for row in rows}) == (5 if is_random(mechanism, len(u)) else 1)


@each
def test_the_aggregate_is_the_mean_over_the_expected_cohort(case):
    "Up to the server's noise, which must not touch an aggregate that clients replay from messages."
    mechanism, estimates = case.make(6), torch.stack([vector(6, 0.5, i) for i in range(4)])
    draw = lambda e, i: mechanism.aggregate(e, 5, seed_tree(0, "server", i))
    if mechanism.replay:
        assert torch.equal(draw(estimates, 0), draw(estimates, 1))
    for i in range(3):
        difference = draw(estimates, i) - draw(estimates[:0], i)
        torch.testing.assert_close(difference, estimates.sum(0) / 5, rtol=1e-5, atol=1e-5)
    assert not torch.isnan(draw(estimates[:0], 0)).any(), "an empty cohort"


# ---- laws

@each
@pytest.mark.parametrize("d, kind", [(1, "boundary"), (1, "clipped"), *((6, kind) for kind in ("zero", "one-hot", "inside", "boundary", "clipped"))])
def test_declared_bias_and_variance(case, kind, d):
    "12,000 simulated rows against the closed forms, every entry; central-limit radii with the fourth moment measured."
    mechanism, n = case.make(d), 12_000
    u = inputs(d, limit(mechanism)[1])[kind]
    bias, variance = (m[0].double().numpy() for m in mechanism.moments(u[None]))
    error = (mechanism.simulate(u.expand(n, d), seed_tree(0, "moments", kind, d)).double() - u.double()).numpy() - bias
    if not variance.any():
        np.testing.assert_allclose(error, 0, atol=1e-6)
        return
    assert (np.abs(error.mean(0)) <= radius(np.sqrt(variance), n, 2 * d)).all()
    square = error**2
    assert (np.abs(square.mean(0) - variance) <= radius(square.std(0), n, 2 * d) + 1e-6 * variance).all(), "a square of one size has only rounding for a spread"


@each
@pytest.mark.parametrize("d, kind", [(1, "boundary"), (5, "zero"), (5, "inside"), (5, "clipped")])
def test_messages_and_simulation_have_one_law(case, kind, d):
    "Kolmogorov-Smirnov on 1,500 messages and 9,000 simulated rows: along u, across u, each half of it, the squared norm."
    mechanism, n = case.make(d), 1500
    u = inputs(d, limit(mechanism)[1])[kind]
    sent = torch.stack([round_trip(mechanism, u, Insecure(key)) for key in range(n)]).double().numpy()
    drawn = mechanism.simulate(u.expand(6 * n, d), seed_tree(0, "laws", kind, d)).double().numpy()
    if not is_random(mechanism, len(u)):
        assert np.array_equal(sent[0], drawn[0]) and (np.ptp(sent, axis=0) == 0).all() and (np.ptp(drawn, axis=0) == 0).all()
        return
    looks = directions(u.numpy()) + [lambda x: (x**2).sum(1)]
    p_values = [same_law(look(sent), look(drawn)) for look in looks]
    assert min(p_values) > ALARM / len(looks), p_values


def directions(u: np.ndarray) -> list:
    "Projections on u, on its halves, and on a direction orthogonal to u."
    d = len(u)
    along = u if u.any() else np.ones(d)
    along = along / np.linalg.norm(along)
    across = seed_tree(1, d).standard_normal(d)
    across -= along * (along @ across)
    axes = [along] + ([across, *np.split(along, [d - d // 2])] if d > 1 else [])
    axes = [np.pad(a, (0, d - len(a)) if i < 3 else (d - len(a), 0)) for i, a in enumerate(axes)]
    return [lambda x, a=a / np.linalg.norm(a): x @ a for a in axes]


# ---- refusals

@each
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(case, bad):
    mechanism, u = case.make(4), torch.tensor([0.1, bad, 0.0, 0.2])
    for call in (lambda: mechanism.encode(u), lambda: mechanism.simulate(torch.stack([u * 0, u]), seed_tree(0)),
                 lambda: mechanism.clip(u[None]), lambda: mechanism.moments(u[None])):
        with pytest.raises(ValueError, match="nan or inf"):
            call()


@each
def test_constructor_arguments_out_of_range_are_refused_by_name(case):
    cls = type(case.make(3))
    for parameters, change in case.bad:
        (name, value), = change.items()
        with pytest.raises(ValueError, match=f"{name} is"):
            cls(**parameters)
            pytest.fail(f"{name}={value!r} was accepted")


@each
def test_damaged_messages_are_refused(case):
    mechanism = case.make(7)
    data = mechanism.encode(vector(7, 0.8)).to_bytes()
    damaged = [data[:n] for n in range(len(data))] + [data + b"\0"]
    damaged += [data[:i] + bytes([data[i] ^ flip]) + data[i + 1:] for i in range(len(data)) for flip in (1, 128, 255)]
    for wrong in damaged:
        with pytest.raises(ValueError):
            mechanism.decode(wire.Message.from_bytes(wrong, 7))


@each
def test_payloads_of_the_wrong_length_are_refused(case):
    "Framed and summed correctly, so that only the mechanism can notice."
    mechanism = case.make(64)
    message = mechanism.encode(vector(64, 0.8))
    for payload in {message.payload[:-1], message.payload + b"\0", b"", message.payload[:3]} - {message.payload}:
        with pytest.raises(wire.BadMessage):
            mechanism.decode(dataclasses.replace(message, payload=payload))


@each
def test_another_version_is_refused(case):
    mechanism = case.make(7)
    body = bytearray(mechanism.encode(vector(7, 0.8)).to_bytes()[:-4])
    body[2] += 1
    with pytest.raises(ValueError, match="version 2"):
        mechanism.decode(wire.Message.from_bytes(bytes(body) + struct.pack("<I", zlib.crc32(body)), 7))


@each
def test_messages_of_other_parameters_are_refused_both_ways(case):
    mechanism, u = case.make(7), vector(7, 0.8)
    for other in (make(7) for make in case.others):
        for sender, receiver in ((mechanism, other), (other, mechanism)):
            with pytest.raises(wire.BadMessage, match="sender's parameters"):
                receiver.decode(sender.encode(u))


@each
def test_messages_of_every_other_mechanism_are_refused(case):
    mechanism = case.make(7)
    for name in NAMES:
        for other in CASES.get(name, {}).values():
            if name != mechanism.name:
                with pytest.raises(wire.BadMessage):
                    mechanism.decode(other.make(7).encode(vector(7, 0.8)))


@each
def test_equal_mechanisms_read_each_other(case):
    "However the same number was written: 1, 1.0, numpy's 1.0."
    mechanism, u = case.make(7), vector(7, 0.8)
    whole = {f.name: getattr(mechanism, f.name) for f in dataclasses.fields(mechanism)}
    name, bound, _ = limit(mechanism)
    for number in (int, np.float64, np.float32):
        twin = type(mechanism)(**(whole | {name: number(bound)}))
        assert twin == mechanism
        assert torch.equal(twin.decode(mechanism.encode(u, Insecure(1))), mechanism.decode(twin.encode(u, Insecure(1))))


# ---- guarantees

@each
def test_a_guarantee_is_complete_and_grows_with_rounds(case):
    mechanism = case.make(7)
    guarantee = mechanism.guarantee(**case.release)
    more = mechanism.guarantee(**(case.release | dict(rounds=10 * case.release["rounds"])))
    for g in (guarantee, more):
        assert isinstance(g, Guarantee) and g.scope == "total" and g.unit and g.relation and g.accountant and g.trust
        assert g.delta == case.release["delta"]
    assert 0 < guarantee.eps <= more.eps


@each
def test_a_guarantee_that_cannot_be_given_is_refused(case):
    mechanism = case.make(7)
    for change in case.refused:
        with pytest.raises(ValueError):
            mechanism.guarantee(**(case.release | change))
            pytest.fail(f"{change} was accepted")


@each
def test_a_mechanism_says_whether_it_may_be_deployed(case):
    "One sentence, which the page of limits prints; where it is not safe, the guarantee says why or there is none."
    kind, _, why = case.make(7).safe.partition(": ")
    assert kind.startswith(("safe to deploy", "simulation only")) and why and "\n" not in why


# ---- audits

@each
def test_the_audit_does_not_exceed_the_claim(case):
    "Every relation that the mechanism names, through its own game; alarm 1e-6 for each audit."
    mechanism, delta = case.make(4), 1e-2
    assert set(mechanism.relations) <= set(RELATIONS)
    for relation in mechanism.relations:
        claimed = audit.claim(mechanism, relation, delta)
        found = audit.audit_play(mechanism, relation, 500, delta, seed_tree(0, "audit", relation), ALARM)
        assert claimed.relation == relation and claimed.delta == delta
        assert not audit.refutes(found, claimed), f"{found}, but claimed {claimed}"


@each
def test_the_audit_does_not_refute_the_whole_curve(case):
    "Everything that is claimed of the game at once, 4,000 plays; alarm 1e-6 for each relation."
    mechanism = case.make(4)
    for relation in mechanism.relations:
        found = audit.judge_play(mechanism, relation, 4000, seed_tree(0, "curve", relation), ALARM)
        assert not found.refuted, f"{relation}: {found}"


@each
def test_a_curve_is_a_curve_below_the_guarantee(case):
    "Falling from at most 1, convex in e^eps, and never above what the accountant states of one release."
    mechanism = case.make(4)
    for relation in mechanism.relations:
        arguments = without_relation(mechanism.relations[relation])
        eps = np.log(np.linspace(1, 30, 59))
        delta = mechanism.curve(relation, eps, **arguments)
        assert delta.shape == eps.shape and (0 <= delta).all() and (delta <= 1).all() and (np.diff(delta) <= 1e-9).all()
        assert (np.diff(delta, 2) >= -1e-7).all(), relation
        if (delta == 1).all():
            continue
        for at in (1e-1, 1e-2, 1e-4):
            stated = audit.claim(mechanism, relation, at)
            assert mechanism.curve(relation, stated.eps, **arguments) <= (0 if stated.accountant == "pure" else at) + 1e-5, (relation, at)
    with pytest.raises(ValueError, match="relation"):
        mechanism.curve("nobody", np.zeros(1))


@each
def test_half_the_noise_is_caught(case):
    "A mechanism with half the noise, or twice the epsilon, plays 20,000 times against the honest one's curve; alarm 1e-6."
    mechanism = case.make(4)
    if mechanism.name in ("rec", "mvu", "privquant", "sqsgd") or not mechanism.relations or getattr(mechanism, "table", None): return  # test_audit has them
    relation = next(iter(mechanism.relations))
    arguments = without_relation(mechanism.relations[relation])
    lie, known = games.less_noise(mechanism, 2.0), (audit.EPS, mechanism.curve(relation, audit.EPS, **arguments))
    assert audit.judge_play(lie, relation, 20_000, seed_tree(0, "half"), ALARM, known).refuted


SHARES = "topk", "compressive", "ddgauss", "skellam"


@each
def test_presence_is_not_claimed_where_noise_comes_in_shares(case):
    "One share fewer on 16 n^2 coordinates moves the length by 2.8 standard deviations: 400 plays refute the Gaussian's curve for a client who leaves."
    mechanism = case.make(4)
    assert (mechanism.name in SHARES) == hasattr(mechanism, "n_clients")
    if mechanism.name not in SHARES or not mechanism.relations: return
    assert "add-remove" not in mechanism.relations and set(mechanism.relations) == {"zero-out", "replace"}
    never, d = (audit.EPS, games.gaussian_curve(1 / mechanism.sigma, audit.EPS)), 16 * mechanism.n_clients**2
    worlds = [mechanism.play("add-remove", here, 400, seed_tree(0, "fewer", here), d=d) for here in (True, False)]
    assert set(worlds[0]) == {"length"} and audit.judge(*worlds, never, ALARM).refuted


@each
def test_a_game_has_one_finite_score_a_play_and_a_closed_list_of_relations(case):
    mechanism = case.make(4)
    for relation in mechanism.relations:
        first, again = (mechanism.play(relation, True, 60, seed_tree(1), **without_relation(mechanism.relations[relation])) for _ in range(2))
        for attack, scores in first.items():
            assert scores.shape == (60,) and np.isfinite(scores).all() and np.array_equal(scores, again[attack])
    with pytest.raises(ValueError, match="relation"):
        mechanism.play("nobody", True, 100, seed_tree(1))
    with pytest.raises(ValueError, match="relation"):
        audit.audit_play(mechanism, "nobody", 100, 1e-2, seed_tree(1))


def without_relation(arguments: dict) -> dict:
    "Arguments of a game, whose relation goes by position."
    return {name: value for name, value in arguments.items() if name != "relation"}
