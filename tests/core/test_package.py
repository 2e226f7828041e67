"What `import dpcomm` offers, and what it does not load."

import pytest
from checkout import python

import dpcomm


def test_every_name_is_there_and_documented():
    for name in dpcomm.__all__:
        assert name in dir(dpcomm) and getattr(dpcomm, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'laplace'"):
        dpcomm.laplace


LOADS = """
import sys

def loaded(start):
    return {name.split(".")[-1] for name in sys.modules if name.startswith(start)}

import dpcomm
from dpcomm import Guarantee, audit
assert not loaded("torch")
dpcomm.mechanism("gaussian", clip_norm=1.0, sigma=1.0)
rooms = loaded("dpcomm.mechanisms.")
assert "gaussian" in rooms and not rooms & {"rec", "mvu", "sqsgd", "skellam"}, rooms
from dpcomm import *
assert mechanism and simulate and loaded("torch")
"""


def test_torch_and_mechanisms_are_loaded_when_they_are_needed():
    done = python("-c", LOADS)
    assert done.returncode == 0, done.stderr
