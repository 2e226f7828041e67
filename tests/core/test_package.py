"What `import dpcomm` offers, and what it does not load."

import pytest
from checkout import python

import dpcomm


def test_every_name_is_there_and_documented():
    for name in dpcomm.__all__:
        assert name in dir(dpcomm) and getattr(dpcomm, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'laplace'"):
        dpcomm.laplace


@pytest.mark.parametrize(
    "code, torch",
    [
        ("import dpcomm", False),
        ("from dpcomm import Guarantee, audit", False),
        ("from dpcomm import *; assert mechanism and simulate", True),
    ],
)
def test_torch_is_loaded_when_it_is_needed(code, torch):
    done = python("-c", f"{code}\nimport sys; sys.exit('torch' in sys.modules)")
    assert done.returncode == torch, done.stderr


def test_one_mechanism_is_loaded_alone():
    code = "import dpcomm, sys; dpcomm.mechanism('gaussian', clip_norm=1.0, sigma=1.0)"
    loaded = "print(*[m for m in sys.modules if m.startswith('dpcomm.mechanisms.')])"
    done = python("-c", f"{code}\n{loaded}")
    rooms = {name.split(".")[-1] for name in done.stdout.split()}
    assert "gaussian" in rooms and not rooms & {"rec", "mvu", "sqsgd", "skellam"}
