"""Mechanisms inside pfl: pfl comes to what dpcomm does by hand. Where pfl is not
installed, NOT CHECKED.
"""

import os

import pytest
import torch
from tables import tabled

from dpcomm.bench import inside_pfl, peers
from dpcomm.mechanisms import contract

PYTHON = os.environ.get("DPCOMM_PEER_PYTHON")  # of pfl, where it is not ours
FEW = ("gaussian", "rec", "sqsgd")  # server's noise, a replay, rounds that differ


def made(name):
    return contract.mechanism(name, **inside_pfl.SETTINGS[name][0])


def test_pfl_and_hand_come_to_the_same_bits_and_to_the_record():
    stored = {row["name"]: row for row in peers.recorded("pfl")["rows"]}
    try:
        rows = inside_pfl.run(PYTHON, FEW)["rows"]
    except peers.NotRun as why:
        if "is not installed here" not in str(why):
            raise
        pytest.skip(f"NOT CHECKED: {why}")
    assert [row["name"] for row in rows] == list(FEW)
    for row in rows:
        assert row["bytes"] == stored[row["name"]]["bytes"]
        assert row["accuracy"] == pytest.approx(stored[row["name"]]["accuracy"], abs=5)


def test_the_record_has_every_mechanism_that_fits():
    record = peers.recorded("pfl")
    assert record["versions"]["pfl"] and record["date"]
    assert [row["name"] for row in record["rows"]] == list(inside_pfl.SETTINGS)
    fit = {n for n in contract.registered() if not contract.mechanism_class(n).summed}
    assert fit == set(inside_pfl.SETTINGS)


@tabled("name", FEW)
def test_by_hand_is_aggregate_of_decoded_messages(name):
    model, clients, _ = inside_pfl.workload()
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    updates = [inside_pfl.local_update(model, x, y) for x, y in clients]
    w, sent = inside_pfl.by_hand(name, rounds=1)
    again, _ = inside_pfl.by_hand(name, rounds=1)
    now, d, seed = made(name).for_round(0), len(before), inside_pfl.SEED
    keys = [inside_pfl.Insecure(inside_pfl.derive(seed, 0, i)) for i in range(30)]
    messages = [now.encode(u, key) for u, key in zip(updates, keys)]
    server = inside_pfl.Insecure(inside_pfl.derive(seed, 0, "server"))
    estimates = torch.stack([now.decode(message) for message in messages])
    mean = now.aggregate(estimates, len(clients), inside_pfl.private_stream(server))
    step = inside_pfl.SETTINGS[name][1]
    assert torch.equal(w, again) and 8 * sent == 30 * now.bits(d).total
    torch.testing.assert_close(w, before + step * mean, rtol=1e-4, atol=1e-5)


def test_training_learns_the_digits():
    w, _ = inside_pfl.by_hand("gaussian")
    start = torch.nn.utils.parameters_to_vector(inside_pfl.workload()[0].parameters())
    assert inside_pfl.accuracy(w) > 60 > inside_pfl.accuracy(start.detach())


def test_the_run_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(peers, "package_versions", lambda *_: None)
    with pytest.raises(peers.NotRun, match=r"pfl or .* is not installed.*\.\[bench\]"):
        inside_pfl.run()


@tabled("name", inside_pfl.SETTINGS)
def test_a_run_whose_keys_follow_from_a_seed_says_so_first(name):
    said = inside_pfl.guarantee(name)
    assert said.premises["keys"] == "as if nobody could guess the key"
    assert str(said).startswith("As if nobody could guess the key (premise keys)")
    assert inside_pfl.METRICS in said.note and said.rounds == inside_pfl.ROUNDS
