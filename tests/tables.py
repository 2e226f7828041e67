"Cases of a test, each an item of its own."

import pytest


def tabled(names: str, cases, ids=None):
    "`pytest.mark.parametrize`; `cases` may be a function that makes them."
    made = list(cases() if callable(cases) else cases)
    return pytest.mark.parametrize(names, made, ids=ids)
