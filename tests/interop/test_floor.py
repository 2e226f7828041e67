"What a node's owner allows: the file, the ledger, the log."

import importlib
import json
import stat
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import make_dataclass, replace

import pytest
from scipy import stats
from tables import tabled

import dpcomm
from dpcomm import cli
from dpcomm.interop import floor
from dpcomm.mechanisms.contract import Mechanism
from dpcomm.mechanisms.mvu_table import two_symbols

REC = dpcomm.mechanism("rec", clip_norm=1.0, std=1.0, index_bits=7)
IMVU = dpcomm.mechanism("imvu", clip_norm=1.0, eps=3.0)
TEXT = """mechanisms = ["rec"]
clip = 1.0
noise = 1.0
epsilon_round = 11.0
epsilon_total = 50.0
delta = 1e-5
clients = 4
rounds = 3
models = [[[10, 784], [10]]]
"""


def owned(tmp_path, text=TEXT):
    return floor.write_private(tmp_path / "floor.toml", text.encode())


def limits(tmp_path):
    return floor.read_floor(owned(tmp_path))


def test_a_floor_is_read_with_its_ledger_beside_it(tmp_path):
    made = limits(tmp_path)
    assert (made.claims, made.rounds) == (tmp_path / "claims", 3)
    assert made.trusted_server is made.simulation is made.evaluation is False
    assert made.relation == "replace" and made.metrics == ()
    more = TEXT + f'trusted_server = true\nclaims = "{tmp_path}/else"\n'
    made = floor.read_floor(owned(tmp_path, more))
    assert made.trusted_server is True and made.claims == tmp_path / "else"


@tabled(
    "text",
    [
        "", "[", "\x00", "x = " + "[" * 10**5, TEXT + "clip_norm = 2.0\n",
        TEXT.replace("noise = 1.0\n", ""), TEXT.replace("clip = 1.0", "clip = nan"),
        TEXT.replace("clip = 1.0", "clip = -1.0"), TEXT.replace("= 11.0", "= inf"),
        TEXT.replace("delta = 1e-5", "delta = 1.0"), TEXT.replace("= 3", "= 2.5"),
        TEXT.replace('["rec"]', '"rec"'), TEXT.replace("[[[10, 784], [10]]]", "[7850]"),
        TEXT + 'simulation = "no"\n', TEXT.replace("clients = 4", "clients = 0"),
        TEXT + 'relation = "local"\n', TEXT + "tolerance = 1.0\n", TEXT + "metrics = 1\n",
    ],
    ids=range(18),
)  # fmt: skip
def test_a_damaged_floor_allows_nothing(text, tmp_path):
    with pytest.raises(floor.Beyond, match="floor.toml .{,400}$") as caught:
        floor.read_floor(owned(tmp_path, text))
    assert caught.value.limit == "floor"


def test_no_floor_and_one_that_others_may_write_allow_nothing(tmp_path):
    "Nor one in a folder that others may write, who could put another in its place."
    for nothing in (None, "", tmp_path / "floor.toml"):
        with pytest.raises(floor.Beyond, match="a node without one answers no run"):
            floor.read_floor(nothing)
    path = owned(tmp_path)
    for place, mode, usual in ((path, 0o666, 0o600), (tmp_path, 0o777, 0o700)):
        place.chmod(mode)
        with pytest.raises(floor.Beyond, match="users of this machine can access"):
            floor.read_floor(path)
        place.chmod(usual)
    assert floor.read_floor(path)


@tabled("words", [[], ["--sums"]])
def test_an_app_is_laid_out_whose_floor_fits_one_run_and_no_second(
    words, tmp_path, capsys, monkeypatch
):
    name = f"laid_out{len(words)}"
    folder = tmp_path / name
    assert cli.main(["flower", "new", str(folder), *words]) == 0
    assert floor.TRUST in " ".join(capsys.readouterr().out.split())
    assert cli.main(["flower", "new", str(folder), *words]) == 2
    assert "is not empty" in capsys.readouterr().err
    table = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
    assert table["project"]["dependencies"] == []
    config = table["tool"]["flwr"]["app"]["config"]
    assert stat.S_IMODE((folder / "floor.toml").stat().st_mode) == 0o600
    made = floor.read_floor(folder / "floor.toml")
    assert made.trusted_server == (config["trust"] == "central")
    monkeypatch.syspath_prepend(str(folder))
    where, mechanism = importlib.import_module(f"{name}.private").protection(config)
    floor.allow(made, mechanism, [[10, 784], [10]], where.n_clients, where.rounds)
    often = stats.binom.isf(1e-8, where.rounds, where.cohort / where.n_clients)
    for answers, fits in ((int(often), True), (2 * where.rounds, False)):
        total = floor.total_epsilon(made, mechanism, 7850, answers)
        assert (total <= made.epsilon_total) is fits, total


# ---- what a message costs


LOCAL = dict(clip_norm=1.0, sigma=1.0, local=True)


@tabled(
    "name, given, least",
    [
        ("gaussian", LOCAL, 9.9),
        ("signsgd", dict(clip_norm=1.0, sigma=1.0), 7.3),
        ("mvu", dict(clip_norm=1.0, eps=1.0), 5.0),
        ("imvu", dict(clip_norm=1.0, eps=1.0), 4.3),
        ("ddgauss", dict(clip_norm=1.0, sigma=1.0, n_clients=4), 9.9),
        ("rec", dict(clip_norm=1.0, std=1.0, index_bits=7), 10.9),
        ("vqsgd", dict(clip_norm=1.0, eps=2.0), 0.8),
    ],
)
def test_epsilons_are_of_any_two_updates_unless_the_file_says_less(name, given, least):
    "They were of an update that becomes zero: 4.38 where 10.0 lies between two."
    made = dpcomm.mechanism(name, **given)
    strict = floor.account(made, 30, 1, 1e-5)
    assert strict.relation in ("replace", "local") and strict.eps >= least
    loose = floor.account(made, 30, 1, 1e-5, "zero-out")
    assert loose.eps <= strict.eps and loose.relation in ("zero-out", "local")


def test_what_cannot_be_accounted_is_refused():
    topk = dict(fraction=0.05, clip_norm=1.0, sigma=None, n_clients=4)
    none = dict(clip_norm=1.0, sigma=5e-324)
    for name, given in (("topk", topk), ("gaussian", none)):
        with pytest.raises(floor.Beyond, match="has no guarantee") as caught:
            floor.account(dpcomm.mechanism(name, **given), 30, 1, 1e-5)
        assert caught.value.limit == "epsilon_round"
    free = dpcomm.mechanism("vqsgd", clip_norm=1.0, eps=float("inf"))
    assert floor.account(free, 30, 1, 1e-5).eps == float("inf")


def test_a_floor_states_the_least_tolerance_of_sums(tmp_path):
    "With tolerance 0 one colluder takes the noise that is counted on."
    changed = dict(mechanisms=["ddgauss"], tolerance=0.25, epsilon_round=1e3, noise=0.1)
    usual, shapes = replace(limits(tmp_path), **changed), [[10, 784], [10]]
    given = dict(clip_norm=1.0, sigma=1.0, n_clients=4)
    enough = dpcomm.mechanism("ddgauss", **given, tolerance=0.25)
    promise = floor.allow(usual, enough, shapes, 4, 3)
    assert (promise.trust, promise.relation) == ("secagg", "replace")
    with pytest.raises(floor.Beyond, match="tolerance is 0.25") as caught:
        floor.allow(usual, replace(enough, tolerance=0.0), shapes, 4, 3)
    assert caught.value.limit == "tolerance"


def test_noise_is_in_units_of_the_clip_and_none_goes_without_one(tmp_path):
    made, shapes = replace(limits(tmp_path), clip=2.0), [[10, 784], [10]]
    loose = replace(REC, clip_norm=2.0)
    bare = make_dataclass("Bare", ["sigma"], bases=(Mechanism,), frozen=True)(1.0)
    object.__setattr__(bare, "name", "rec")
    for mechanism, limit in ((loose, "noise"), (bare, "clip")):
        with pytest.raises(floor.Beyond) as caught:
            floor.allow(made, mechanism, shapes, 4, 3)
        assert caught.value.limit == limit


# ---- the ledger


def test_one_setting_composes_and_settings_share_delta(tmp_path):
    made, how = limits(tmp_path), dict(sampling="none", d=7850, relation="replace")
    assert floor.total_epsilon(made) == 0
    three = REC.guarantee(3, 1e-5, sampling="none").eps
    said = [floor.claim(made, REC, 7850, "run-0", t) for t in range(3)]
    assert said[-1] == three == floor.total_epsilon(made)
    assert floor.claim(made, IMVU, 7850, "run-1", 0)
    both = REC.guarantee(3, 5e-6, sampling="none").eps
    both += IMVU.guarantee(1, 5e-6, **how).eps
    assert floor.total_epsilon(made) == both


def test_of_many_at_once_no_more_are_answered_than_the_budget_covers(tmp_path):
    made = limits(tmp_path)
    made = replace(made, epsilon_total=REC.guarantee(4, 1e-5, sampling="none").eps)

    def attempt(run):
        try:
            return floor.claim(made, REC, 7850, str(run), 0)
        except floor.Beyond:
            return None

    with ThreadPoolExecutor(8) as pool:
        answers = [one for one in pool.map(attempt, range(16)) if one]
    assert len(answers) <= 4 and floor.total_epsilon(made) <= made.epsilon_total


def test_a_round_of_a_run_is_claimed_once_whatever_the_mechanism(tmp_path):
    made = replace(limits(tmp_path), epsilon_total=1e9)
    assert floor.claim(made, REC, 7850, "7-1001", 0)
    assert floor.claim(made, IMVU, 7850, "7-1001", 0) is None
    assert floor.claim(made, REC, 7850, "7-100", 0)


def test_mechanisms_are_built_again_from_the_ledger(tmp_path):
    made = limits(tmp_path)
    grouped = replace(REC, groups=(10, 20))
    topk = dict(fraction=0.05, clip_norm=1.0, sigma=1.0, n_clients=4)
    cases = [REC, grouped, IMVU, dpcomm.mechanism("topk", **topk)]
    for k, mechanism in enumerate(cases):
        floor.claim(replace(made, epsilon_total=1e9), mechanism, 30, str(k), 0)
    found = sorted(repr(mechanism) for mechanism, *_ in floor.answered(made).values())
    assert found == sorted(map(repr, cases))
    table = dpcomm.mechanism("imvu", clip_norm=1.0, eps=3.0, table=two_symbols(3.0))
    with pytest.raises(floor.Beyond, match="cannot be stored in the ledger"):
        floor.claim(made, table, 30, "t", 0)


def test_a_ledger_that_was_changed_is_no_permission(tmp_path):
    "One digit of it lowered what was spent from .79 to .12."
    made = limits(tmp_path)
    floor.claim(made, REC, 7850, "0", 0)
    (place,) = (tmp_path / "claims").glob("*/setting.json")
    text = place.read_text()
    changed = ["", "{", "[1]", text.replace("1.0", "9.0"), text.replace("7850", "1")]
    for change in changed:
        assert change != text
        place.write_text(change)
        with pytest.raises(ValueError, match="setting.json .*changed: .*backup"):
            floor.claim(made, REC, 7850, "1", 0)
        with pytest.raises(ValueError, match="setting.json .*changed: .*backup"):
            floor.total_epsilon(made)


def test_files_of_one_user(tmp_path):
    place = floor.write_private(tmp_path / "a" / "b.json", json.dumps([1]).encode())
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    assert floor.private_folder(place.parent) == place.parent
    place.chmod(0o644)
    assert floor.check_private(place, 0o022) == place
    with pytest.raises(ValueError, match="chmod go= b.json"):
        floor.check_private(place)
    place.parent.chmod(0o750)
    with pytest.raises(ValueError, match="chmod go= a"):
        floor.write_private(place, b"")
    assert place.read_text() == "[1]"
