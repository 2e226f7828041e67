"What a node's owner allows: the file, the ledger, the log."

import json
import stat
from dataclasses import replace

import pytest
from tables import tabled

import dpcomm
from dpcomm.mechanisms.mvu_table import two_symbols
from dpcomm.training import floor

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
    path = tmp_path / "floor.toml"
    path.write_text(text)
    path.chmod(0o600)
    return path


def limits(tmp_path):
    return floor.read_floor(owned(tmp_path))


def test_a_floor_is_read_with_its_ledger_beside_it(tmp_path):
    made = limits(tmp_path)
    assert (made.claims, made.rounds) == (tmp_path / "claims", 3)
    assert made.trusted_server is made.simulation is False
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
    ],
    ids=range(15),
)  # fmt: skip
def test_a_damaged_floor_allows_nothing(text, tmp_path):
    with pytest.raises(floor.Beyond, match="floor.toml") as caught:
        floor.read_floor(owned(tmp_path, text))
    assert caught.value.limit == "floor" and len(str(caught.value)) < 400


def test_no_floor_and_one_that_others_may_write_allow_nothing(tmp_path):
    for nothing in (None, "", tmp_path / "floor.toml"):
        with pytest.raises(floor.Beyond, match="takes part in no run"):
            floor.read_floor(nothing)
    path = owned(tmp_path)
    path.chmod(0o666)
    with pytest.raises(floor.Beyond, match="open to other users"):
        floor.read_floor(path)


def test_one_setting_composes_and_settings_share_delta(tmp_path):
    made = limits(tmp_path)
    how = dict(sampling="none", d=7850)
    assert floor.total_epsilon(made) == 0
    for t in range(3):
        assert floor.claim(made, REC, 7850, f"run-0-{t}")
    assert floor.total_epsilon(made) == REC.guarantee(3, 1e-5, sampling="none").eps
    assert floor.claim(made, IMVU, 7850, "run-0-0")
    both = (
        REC.guarantee(3, 5e-6, sampling="none").eps + IMVU.guarantee(1, 5e-6, **how).eps
    )
    assert floor.total_epsilon(made) == both
    assert floor.sent(made, REC, 7850, "run") == (3, 0)
    assert floor.sent(made, REC, 7850, "another") == (0, 3)
    assert floor.sent(made, REC, 7851, "run") == (0, 0)


def test_the_last_of_the_budget_is_answered_once(tmp_path):
    two = REC.guarantee(2, 1e-5, sampling="none").eps
    made = replace(limits(tmp_path), epsilon_total=two)
    assert [floor.claim(made, REC, 7850, f"{seed}-0") for seed in range(2)] == [
        True
    ] * 2
    assert not floor.claim(made, REC, 7850, "0-0")
    with pytest.raises(floor.Beyond, match="epsilon_total is"):
        floor.claim(made, REC, 7850, "2-0")
    again = limits(tmp_path)  # a process of its own
    assert floor.total_epsilon(again) == two
    assert floor.sent(again, REC, 7850, "2") == (0, 2)


def test_mechanisms_are_built_again_from_the_ledger(tmp_path):
    made = limits(tmp_path)
    grouped = dpcomm.mechanism(
        "rec", clip_norm=1.0, std=1.0, index_bits=7, groups=(10, 20)
    )
    topk = dict(fraction=0.05, clip_norm=1.0, sigma=1.0, n_clients=4)
    cases = [REC, grouped, IMVU, dpcomm.mechanism("topk", **topk)]
    for k, mechanism in enumerate(cases):
        floor.claim(replace(made, epsilon_total=1e9), mechanism, 30, str(k))
    found = sorted(repr(mechanism) for mechanism, *_ in floor.answered(made).values())
    assert found == sorted(map(repr, cases))
    table = dpcomm.mechanism("imvu", clip_norm=1.0, eps=3.0, table=two_symbols(3.0))
    with pytest.raises(floor.Beyond, match="cannot be written to the ledger"):
        floor.claim(made, table, 30, "t")


def test_a_ledger_that_cannot_be_read_is_no_permission(tmp_path):
    made = limits(tmp_path)
    floor.claim(made, REC, 7850, "0")
    (place,) = (tmp_path / "claims").glob("*/setting.json")
    for text in ("", "{", "[" * 10**5):
        place.write_text(text)
        with pytest.raises(ValueError, match="setting.json.*backup"):
            floor.claim(made, REC, 7850, "1")


def test_a_line_of_the_log_is_one_line_of_ascii(tmp_path):
    made = limits(tmp_path)
    floor.note(made, "a\nround 1\x1b[31m é")
    floor.note(made, "b")
    first, second = (tmp_path / "claims" / "log.txt").read_bytes().splitlines()
    assert b"\x1b" not in first and first.endswith(b"\\xe9") and second.endswith(b"Z b")
    assert stat.S_IMODE((tmp_path / "claims" / "log.txt").stat().st_mode) == 0o600


def test_what_cannot_be_accounted_is_refused():
    topk = dict(fraction=0.05, clip_norm=1.0, sigma=None, n_clients=4)
    for name, given in (
        ("topk", topk),
        ("gaussian", dict(clip_norm=1.0, sigma=5e-324)),
    ):
        with pytest.raises(floor.Beyond, match="has no guarantee") as caught:
            floor.account(dpcomm.mechanism(name, **given), 30, 1, 1e-5)
        assert caught.value.limit == "epsilon_round"
    free = dpcomm.mechanism("vqsgd", clip_norm=1.0, eps=float("inf"))
    assert floor.account(free, 30, 1, 1e-5).eps == float("inf")


def test_files_of_one_user(tmp_path):
    place = floor.write_private(tmp_path / "a" / "b.json", json.dumps([1]).encode())
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    assert floor.private_folder(place.parent) == place.parent
    assert floor.check_private(place) == place
    place.chmod(0o644)
    assert floor.check_private(place, 0o022) == place
    with pytest.raises(ValueError, match="chmod go= b.json"):
        floor.check_private(place)
    place.parent.chmod(0o750)
    with pytest.raises(ValueError, match="chmod go= a"):
        floor.write_private(place, b"")
    assert place.read_text() == "[1]"
