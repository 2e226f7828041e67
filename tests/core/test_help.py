"help: comments of signatures in docstrings, for every module of the package."

import ast
import dataclasses
import importlib
import inspect
import sys
import textwrap

import pytest
from checkout import python
from tables import tabled

import dpcomm
from dpcomm.core import help as shown
from dpcomm.mechanisms import contract
from dpcomm.privacy import accounting
from dpcomm.training import federated

CASES = {
    "one argument": (
        "def f(\n    a: int,  # whole\n):  # half\n    pass",
        "a: whole|returns: half",
    ),
    "on one line": ("def f(a, b=2):  # both\n    pass", "returns: both"),
    "a text with a hash": ("def f(\n    a='#',  # sign\n):\n    pass", "a: sign"),
    "no comment": ("def f(\n    a,\n    b: int = 3,\n):\n    pass", ""),
    "stars": (
        "def f(\n    *a,  # many\n    b,  # one\n    **c,  # named\n):\n    pass",
        "a: many|b: one|c: named",
    ),
    "a default of two lines": (
        "def f(\n    a=(\n        1,\n        2,\n    ),  # pair\n    b=3,  # three\n) -> int:  # sum\n    pass",
        "a: pair|b: three|returns: sum",
    ),
    "a comment that goes on": (
        "def f(\n    a,  # first\n    # second\n):\n    pass",
        "a: first|a: second",
    ),
    "no ascii": ("def f(\n    a='ä',  # ü\n):\n    pass", "a: ü"),
    "a class": (
        "class C:\n    a: int  # one\n    b: int = 2\n    c = 3  # no field\n    d: str = '#'  # text",
        "a: one|d: text",
    ),
}  # source -> rows


@tabled("source, rows", CASES.values(), ids=CASES)
def test_comments_go_with_what_they_stand_behind(source, rows):
    node = ast.parse(source).body[0]
    assert "|".join(shown.comments(source.splitlines(), node)) == rows


def test_a_function_is_described_by_its_signature():
    @shown.described
    def encode(
        u,  # one vector, (d,)
    ):  # its message
        "Send."

    assert encode.__doc__.split("\n") == [
        "Send.",
        "",
        "    u: one vector, (d,)",
        "    returns: its message",
    ]
    assert shown.described(eval("lambda x: x")).__doc__ is None, "nothing to read"


class Above:
    @shown.described
    def send(
        self,
        u,  # any vector
        key=None,  # of the noise
    ):  # bytes
        "Send."


class Below(Above):
    pass


def test_a_method_says_what_it_overrides_said_and_its_own_first():
    def send(
        self: Below,
        u,  # one vector, (d,)
        key=None,
    ):
        "Send less."

    assert shown.described(send).__doc__.split("\n") == [
        "Send less.",
        "",
        "    key: of the noise",
        "    returns: bytes",
        "    u: one vector, (d,)",
    ]


@tabled(
    "thing",
    [
        *(getattr(dpcomm, name) for name in ("mechanism", "simulate")),
        accounting.gaussian_guarantee,
        accounting.calibrate,
        federated.check_promise,
        shown.comments,
    ],
)
def test_help_tells_every_argument_of_what_an_importer_calls(thing):
    for name in inspect.signature(thing).parameters:
        assert f"\n    {name}: " in thing.__doc__, name


@pytest.mark.parametrize("name", contract.registered())
def test_help_tells_every_field_of_a_mechanism(name):
    cls = contract.mechanism_class(name)
    if not cls.__module__.startswith("dpcomm."):
        pytest.skip("registered by another test")
    for field in dataclasses.fields(cls):
        assert f"\n    {field.name}: " in cls.__doc__, field.name


def test_a_module_is_described_once_and_only_what_is_public_and_its_own(tmp_path):
    source = textwrap.dedent("""
        from math import sqrt
        def f(
            a,  # number
        ):
            "F."
        def _g(
            a,  # number
        ):
            "G."
    """)
    (tmp_path / "made.py").write_text(source)
    spec = importlib.util.spec_from_file_location("made", tmp_path / "made.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shown.describe(module, source)
    assert module.f.__doc__ == "F.\n\n    a: number" and module._g.__doc__ == "G."
    assert module.sqrt.__doc__.startswith("Return the square root")


def test_only_modules_of_the_package_are_found():
    before = list(sys.meta_path)
    shown.install()
    assert sys.meta_path == before and before.count(shown._Finder) == 1
    assert shown._Finder.find_spec("json") is None
    assert shown._Finder.find_spec("dpcomm.nothing", dpcomm.__path__) is None
    found = shown._Finder.find_spec("dpcomm.cli", dpcomm.__path__)
    assert isinstance(found.loader, shown._Loader)


def test_reading_comments_needs_nothing_that_is_large():
    code = "import sys, dpcomm; print({'torch', 'numpy'} & {*sys.modules})"
    assert python("-c", code).stdout.strip() == "set()"
