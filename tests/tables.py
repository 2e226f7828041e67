"""Many small cases in one test: `@tabled` stands where `@pytest.mark.parametrize` would, and
costs one item to collect and to report, whatever the number of cases.
"""

import functools
import inspect

import pytest


def short(value):
    "A value of a row; its kind where Python does not write so many digits."
    try:
        return f"{value!r:.40}"
    except ValueError:
        return f"{type(value).__name__} with a huge number"


def label(ids, i: int, values: list) -> str:
    "The name of a case, as parametrize would give it, or its values in short."
    if callable(ids):
        return "-".join(str(ids(value)) for value in values)
    return str(ids[i]) if ids else ", ".join(map(short, values))


def values_of(case, count: int):
    if isinstance(case, type(pytest.param())):
        return case.values
    return case if count > 1 else (case,)


def together(calls):
    "Make every (label, call); those that fail are told together at the end."
    failed, count = [], 0
    for count, (name, call) in enumerate(calls, 1):
        try:
            call()
        except (Exception, pytest.fail.Exception) as error:
            why = f"{type(error).__name__}: {error}"
            failed.append(f"[{name}] {why[:3000]}")
    if failed:
        told = f"{len(failed)} of {count} cases:\n" + "\n".join(failed)
        pytest.fail(told, pytrace=False)


def tabled(names: str, cases, ids=None):
    """Run the test on every case; the failures are told together at the end, each with
    its case. For tests that skip nothing and have no fixture that a case could change.
    `cases` may be a function that makes them: it is called when the test runs.
    """
    names = [name.strip() for name in names.split(",")]
    ids = ids if ids is None or callable(ids) else list(ids)

    @functools.cache
    def table() -> list:
        made = cases() if callable(cases) else cases
        rows = [values_of(case, len(names)) for case in made]
        assert rows and all(len(row) == len(names) for row in rows)
        return rows

    if not callable(cases):
        table()

    def decorate(test):
        @functools.wraps(test)
        def run(**fixtures):
            together(
                (
                    label(ids, i, row),
                    lambda row=row: test(**dict(zip(names, row)), **fixtures),
                )
                for i, row in enumerate(table())
            )

        signature = inspect.signature(test)
        rest = [p for name, p in signature.parameters.items() if name not in names]
        run.__signature__ = signature.replace(parameters=rest)
        return run

    return decorate


class Rest(tuple):
    "Cases that share one item, each `pytest.param` with its id."


def first_alone(name: str, firsts: list, rest: dict):
    """Parametrize `name`: each of `firsts` is an item of its own; `rest` lists, by the id of
    an slow item, cases that the test is run on one after the other.
    """
    deep = [
        pytest.param(Rest(cases), id=label, marks=pytest.mark.slow)
        for label, cases in rest.items()
    ]

    def decorate(test):
        @functools.wraps(test)
        def run(**given):
            if not isinstance(given[name], Rest):
                return test(**given)
            together(
                (case.id, lambda case=case: test(**given | {name: case.values[0]}))
                for case in given[name]
            )

        return pytest.mark.parametrize(name, [*firsts, *deep])(run)

    return decorate
