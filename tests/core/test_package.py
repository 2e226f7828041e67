"What `import dpcomm` offers, and what it does not load."

import dataclasses
import inspect
import re

import pytest
from checkout import python

import dpcomm


def test_every_name_is_there_and_documented():
    for name in dpcomm.__all__:
        assert name in dir(dpcomm) and getattr(dpcomm, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'laplace'"):
        dpcomm.laplace


def test_help_tells_every_argument_of_what_an_importer_calls():
    silent = []
    for name in dpcomm.__all__:
        thing = getattr(dpcomm, name)
        asked = ()
        if inspect.isfunction(thing):
            asked = inspect.signature(thing).parameters
        elif dataclasses.is_dataclass(thing):
            asked = [field.name for field in dataclasses.fields(thing)]
        silent += [
            f"{name}: {argument}"
            for argument in asked
            if not re.search(rf"(^|\s){argument}:\s", inspect.getdoc(thing))
        ]
    assert not silent


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
