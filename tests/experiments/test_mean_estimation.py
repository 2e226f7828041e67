"mean-estimation: vectors, the error that is read from some of the clients, what is played."

import pytest
import torch
from tables import tabled

from dpcomm import mechanism
from dpcomm.core.random import seed_tree
from dpcomm.experiments import lines, mean_estimation


def rows(d, clients, seed):
    return torch.cat([*mean_estimation.blocks(d, clients, seed)])


def test_vectors_have_norm_one_and_half_of_their_energy_in_common(monkeypatch):
    monkeypatch.setattr(mean_estimation, "BLOCK", 1_000)
    u = rows(100, 35, 0).double()
    assert u.shape == (35, 100) and u.norm(dim=1) == pytest.approx([1.0] * 35, rel=1e-6)
    pairs = (u @ u.T)[~torch.eye(35, dtype=torch.bool)]
    assert abs(pairs.mean() - 0.5) < 0.02 and pairs.std() < 0.1
    assert not torch.equal(u, rows(100, 35, 1).double())


@tabled(
    "name, given",
    [
        ("privquant", dict(bound=0.1, levels=2, eps=4.0, rule="best")),  # biased
        ("gaussian", dict(clip_norm=1.0, sigma=1.0)),  # whose server adds the noise
        ("skellam", dict(clip_norm=1.0, sigma=1.0, n_clients=40)),
    ],
)
def test_some_of_the_clients_tell_the_error_of_all(name, given):
    "The mean over many rounds, of all 40 clients and of 20."
    m, d, n = mechanism(name, **given), 32, 40
    ends = {}
    for played in (n, 20):
        rng, errors = seed_tree(0, name, played), []
        for t in range(300):
            vectors = mean_estimation.blocks(d, played, t)
            errors.append(mean_estimation.round_error(m, 0.9, n, vectors, rng))
        errors = torch.tensor(errors, dtype=torch.float64)
        ends[played] = float(errors.mean()), float(errors.var()) / 300
    (a, va), (b, vb) = ends.values()
    assert abs(a - b) < 5.5 * (va + vb) ** 0.5


def test_a_line_says_what_it_predicted_or_what_no_setting_meets():
    line = next(x for x in mean_estimation.grid("smoke") if x.key == "rec.d32.n4")
    outcome = lines.run_one(line, 0)
    assert outcome["guarantee"].relation == "zero-out" and outcome["guarantee"].eps <= 4
    config, final = outcome["config"], outcome["final"]
    assert config["kind"] == "rec" and 4 <= config["played_rounds"] <= 64
    assert abs(final["mse"] - config["predicted"]) < 8 * final["se"]
    size = dict(name="signsgd", d=32, n=4, bits=0.5, entries=2**14)
    refused = mean_estimation.play(line, 0, None, {}, **size)
    assert "raise bits to" in refused["notes"][0] and "final" not in refused
