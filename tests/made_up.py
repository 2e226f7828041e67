"A record of a run that nobody made; a copy with other fields."

import dataclasses

import msgspec

from dpcomm.evidence.records import Record

EMPTY = "config final history cells as_run data cost".split()
DAY = "2026-01-01"


def made_up(key="all", seed=0, **given) -> Record:
    "What is given, and nothing else."
    known = dict(paper="dprec", experiment="made_up", scale="full", trained=True)
    known |= {name: {} for name in EMPTY} | dict(guarantee=None, bits=None)
    origin = {"date": DAY} | given.pop("origin", {})
    return Record(**known | dict(key=key, seed=seed, origin=origin) | given)


def replace(original, /, **fields):
    "A copy of a struct or a dataclass."
    struct = isinstance(original, msgspec.Struct)
    return (msgspec.structs if struct else dataclasses).replace(original, **fields)
