"Cases of a test, each an item of its own."

import pytest


def tabled(names: str, cases, ids=None):
    "`pytest.mark.parametrize`; `cases` may be a function that makes them."
    made = list(cases() if callable(cases) else cases)
    return pytest.mark.parametrize(names, made, ids=ids)


def first_alone(name: str, firsts: list, rest: dict):
    "Parametrize `name` by `firsts`, and in the slow tier by all of `rest`."
    slow = [
        pytest.param(*case.values, id=case.id, marks=pytest.mark.slow)
        for cases in rest.values()
        for case in cases
    ]
    return pytest.mark.parametrize(name, [*firsts, *slow])
