"topk: supports, restriction, schemes, costs, the vote, training with held weights."

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from laws import radius
from tables import tabled
from torch import nn

from dpcomm.core import vectors
from dpcomm.core.chance import Insecure, seed_tree
from dpcomm.mechanisms import contract, topk
from dpcomm.mechanisms.distributed_noise import RING
from dpcomm.mechanisms.topk import SCHEMES, Support, TopK
from dpcomm.secagg import session as session_module
from dpcomm.tasks import images
from dpcomm.training import federated, models


def net() -> nn.Sequential:
    return models.initialise(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 4)),
        seed_tree(0),
        "glorot",
    )


def weights(model) -> torch.Tensor:
    return vectors.flatten(p.detach() for p in model.parameters())


def federation() -> images.Federation:
    rng = seed_tree(0, "toy")
    x = torch.from_numpy(rng.random((60, 1, 8, 8), dtype=np.float32))
    y = torch.from_numpy(rng.integers(0, 4, 60))
    return images.Federation(
        images.Dataset("toy", x, y, x[:20], y[:20]),
        tuple(np.split(np.arange(60), 12)),
        "toy",
    )


# ---- supports


def test_a_support_is_a_set_in_order():
    assert Support([5, 1, 3]) == Support(np.array([1, 3, 5])) and Support(
        [5, 1, 3]
    ).coordinates.tolist() == [1, 3, 5]
    assert (
        hash(Support([1, 2])) == hash(Support([2, 1]))
        and Support([1, 2]) != Support([1, 3])
        and Support([1, 2]) != {1, 2}
    )
    assert len(Support([4])) == 1 and Support([4]).digest[:12] in repr(Support([4]))
    for wrong in ([1, 1], [], [-1, 2]):
        with pytest.raises(
            ValueError,
            match=(
                "a support is one or more different numbers|coordinates (holds|is"
                " empty)"
            ),
        ):
            Support(wrong)


@tabled(
    "fraction, d, k",
    [
        (0.001, 1_663_370, 1663),
        (0.005, 1_663_370, 8316),
        (0.01, 1_663_370, 16633),
        (0.05, 1_663_370, 83168),
        (0.1, 1_663_370, 166337),
        (1.0, 7, 7),
        (0.3, 10, 3),
        (0.29, 100, 29),
        (0.57, 100, 57),
        (0.0001, 1_496_601, 149),
    ],
)
def test_k_is_the_floor_of_r_n(fraction, d, k):
    """... and not one less where r n is a whole number that floats miss: 0.29 * 100 is
    28.999999999999996.
    """
    assert topk.size(fraction, d) == k


def test_less_than_one_coordinate_is_refused():
    with pytest.raises(
        ValueError, match="r n must be at least 1: use a fraction of 0.01"
    ):
        topk.size(0.009, 100)
    for fraction in (0.0, -1.0, 1.1, math.nan):
        with pytest.raises(ValueError, match="fraction is"):
            topk.size(fraction, 10)


def test_the_largest_scores_are_kept_and_ties_go_to_the_first():
    assert topk.top_k(
        torch.tensor([1.0, 3.0, 2.0, 3.0, 3.0]), 0.4
    ).coordinates.tolist() == [1, 3]
    with pytest.raises(ValueError, match="nan or inf"):
        topk.top_k(torch.tensor([1.0, math.nan]), 0.5)


def test_random_supports_are_public_and_fresh_ones_change():
    one = topk.random_support(0.2, 50, 3)
    assert (
        one == topk.random_support(0.2, 50, 3) != topk.random_support(0.2, 50, 3, 1)
        and len(one) == 10
    )
    assert topk.random_support(1.0, 5, 0).coordinates.tolist() == [0, 1, 2, 3, 4]
    counts = np.zeros(50)
    for t in range(2000):
        counts[topk.random_support(0.2, 50, 9, t).coordinates] += 1
    assert (np.abs(counts / 2000 - 0.2) <= radius(0.4, 2000, 50)).all()


def test_accumulated_gradients_are_those_of_sgd():
    model, x, y = net(), federation().data.x[:5], federation().data.y[:5]
    w = weights(model)
    free, total = net(), torch.zeros_like(w)
    optimiser = torch.optim.SGD(free.parameters(), lr=0.3)
    for _ in range(3):
        optimiser.zero_grad()
        F.cross_entropy(free(x), y).backward()
        total += vectors.flatten(p.grad for p in free.parameters()).abs()
        optimiser.step()
    torch.testing.assert_close(topk.public_gradients(model, w, x, y, 3, 0.3), total)
    assert torch.equal(w, weights(model)), "the initial weights were changed"


# ---- the mechanism


def test_what_is_summed_is_restricted_then_clipped():
    mech = TopK(0.5, 1.0, 1.0, 10, support=Support([1, 3]))
    u = torch.tensor([[100.0, 0.3, 100.0, 0.4], [0.0, 30.0, 0.0, 40.0]])
    torch.testing.assert_close(mech.sketch(u), torch.tensor([[0.3, 0.4], [0.6, 0.8]]))
    plain = dataclasses.replace(mech, sigma=None)
    torch.testing.assert_close(plain.sketch(u), u[:, [1, 3]])
    torch.testing.assert_close(
        mech.reconstruct(torch.tensor([3.0, 5.0]), 10, 4),
        torch.tensor([0.0, 0.3, 0.0, 0.5]),
    )


def test_supports_of_another_model_are_refused():
    mech = TopK(0.5, 1.0, 1.0, 10, support=Support([1, 3]))
    for d in (3, 6, 100):
        with pytest.raises(ValueError, match="support is 2 coordinates up to 3"):
            topk.chosen(mech, d)
    with pytest.raises(ValueError, match="fresh is True, but a support is given"):
        TopK(0.5, 1.0, 1.0, 10, support=Support([1, 3]), fresh=True)


def test_the_mask_is_the_support_where_weights_are_held():
    mech = TopK(0.5, 1.0, 1.0, 10, support=Support([1, 3]))
    assert mech.trainable(4).tolist() == [False, True, False, True]
    assert (
        dataclasses.replace(mech, held=False).trainable(4) is None
        and TopK(1.0, 1.0, 1.0, 10).trainable(4) is None
    )


def test_ring_messages_of_a_cohort_add_up_to_the_noisy_sum():
    """Through secure aggregation with a dropout; the noise of the rest has the promised
    size.
    """
    mech = TopK(0.5, 1.0, 1.0, 6, support=Support(range(0, 4000, 2)), tolerance=0.2)
    u = torch.from_numpy(seed_tree(0, "u").standard_normal((6, 4000), dtype=np.float32))
    words = [
        np.frombuffer(mech.encode(row, Insecure(i)).payload, "<u4").astype(np.int64)
        for i, row in enumerate(u)
    ]
    session = session_module.run_session(
        words,
        RING,
        threshold=4,
        seed=0,
        drop={2: 2},
        support=bytes.fromhex(mech.support.digest),
    )
    assert set(session.survivors) == {0, 1, 3, 4, 5}
    total = RING.lift(session.total) * mech.scale
    noise = total - mech.sketch(u)[[0, 1, 3, 4, 5]].double().sum(0).numpy()
    assert np.abs(total).max() < 2**31 * mech.scale
    assert abs(np.mean(noise**2) - 5 * mech.share**2) <= radius(
        math.sqrt(2) * 5 * mech.share**2, 2000, 1
    )
    assert 5 * mech.share**2 >= 1.0, "five of six must keep the promise"


def test_decoding_and_moments_put_values_where_they_belong():
    mech = TopK(0.5, 1.0, None, 4, support=Support([0, 2]))
    u = torch.tensor([0.5, 7.0, -0.25, 7.0])
    assert mech.decode(mech.encode(u, Insecure(0))).tolist() == [0.5, 0.0, -0.25, 0.0]
    bias, variance = dataclasses.replace(mech, sigma=0.5).moments(u[None])
    assert bias[0].tolist() == [0.0, -7.0, 0.0, -7.0] and variance[
        0
    ].tolist() == pytest.approx([1 / 16, 0, 1 / 16, 0])
    assert mech.expand(torch.tensor([[1.0, 2.0]]), 4)[0].tolist() == [
        1.0,
        0.0,
        2.0,
        0.0,
    ]


# ---- schemes


def test_the_schemes_differ_as_the_paper_says():
    "Coordinates of two rounds, what is held, and what travels each way."
    rows = {}
    for name in SCHEMES:
        if name != "FL-CS":
            mech = topk.scheme(
                name,
                0.25,
                10,
                support=Support(range(10)) if SCHEMES[name][0] == "top" else None,
            )
            first, second = (topk.chosen(mech.at(t), 40) for t in (0, 1))
            rows[name] = (
                first == second,
                mech.trainable(40) is not None,
                mech.bits(40).payload // 32,
                mech.downlink_bits(40) // 32,
            )
    assert rows == {
        "FL-STD": (True, False, 40, 40),
        "FL-BASIC": (False, True, 10, 40),
        "FL-BAS-2": (False, False, 10, 40),
        "FL-BAS-3": (True, True, 10, 10),
        "FL-BAS-4": (True, False, 10, 10),
        "FL-TOP-BIS": (True, False, 10, 10),
        "FL-TOP": (True, True, 10, 10),
    }
    twin = topk.scheme("FL-BASIC", 0.25, 10, sigma=1.0)
    assert twin == dataclasses.replace(topk.scheme("FL-BASIC", 0.25, 10), sigma=1.0), (
        "one parameter apart"
    )
    assert topk.scheme("FL-CS", 0.25, 10, chunks=2).name == "compressive"


def test_schemes_are_refused_without_what_they_need():
    for name, support in (("FL-TOP", None), ("FL-BASIC", Support([0]))):
        with pytest.raises(ValueError, match=f"scheme is {name} and support is"):
            topk.scheme(name, 0.25, 10, support=support)
    with pytest.raises(ValueError, match="did you mean 'FL-TOP'"):
        topk.scheme("FL-TOPP", 0.25, 10)


@tabled(
    "rounds, r, direction, kb",
    [
        (200, 0.005, "up", 110.88),
        (193, 0.005, "up", 107.0),
        (193, 0.005, "down", 21402.03),
        (152, 0.05, "up", 842.77),
        (60, 1.0, "up", 6653.48),
    ],
)
def test_costs_are_the_table_s(rounds, r, direction, kb):
    n = 1_663_370
    assert (
        round(
            topk.cost_kb(topk.size(r, n) if direction == "up" else n, rounds, 1 / 60), 2
        )
        == kb
    )


@tabled("name", SCHEMES)
def test_training_moves_what_the_scheme_says(name):
    """Two rounds of the engine: which weights of the server differ from the initial
    ones.
    """
    model, fed = net(), federation()
    w = weights(model)
    support = (
        topk.top_k(
            topk.public_gradients(model, w, fed.data.x[:5], fed.data.y[:5], 3, 0.2), 0.1
        )
        if SCHEMES[name][0] == "top"
        else None
    )
    mech = topk.scheme(name, 0.1, 4, support=support, chunks=2)
    config = federated.Config(
        rounds=2,
        cohort=4,
        epochs=2,
        batch=5,
        lr=0.2,
        server="sgd",
        server_lr=1.0,
        eval_every=2,
        engine="fused",
    )
    run = federated.simulate(
        federated.Task(model, fed, mech, config, 0), progress=False
    )
    moved = set(np.flatnonzero((run.w.detach() != w).numpy()))
    if name == "FL-STD":
        assert len(moved) > 0.8 * len(w), (
            "but for units that no image of four clients switches on"
        )
    elif name == "FL-CS":
        assert moved
    else:
        allowed = set().union(
            *(topk.chosen(mech.at(t), len(w)).coordinates.tolist() for t in (0, 1))
        )
        assert moved <= allowed and len(moved) > 0.5 * len(allowed) - 5
    k = topk.size(mech.fraction, len(w))
    assert run.ledger.uplink_bits == 2 * 4 * 32 * k
    assert run.ledger.downlink_bits == 2 * 4 * 32 * (
        len(w) if SCHEMES[name][2] or name == "FL-CS" else k
    )


def test_held_and_free_weights_give_different_sums():
    """FL-TOP's clients compute another update on the support than FL-TOP-BIS's, whose
    other weights moved meanwhile.
    """
    model, fed = net(), federation()
    support = Support(range(0, 200, 10))
    fraction = 20 / len(weights(model))
    config = federated.Config(
        rounds=1,
        cohort=4,
        epochs=3,
        batch=5,
        lr=0.5,
        server="sgd",
        server_lr=1.0,
        eval_every=1,
        engine="fused",
    )
    runs = [
        federated.simulate(
            federated.Task(
                net(), fed, topk.scheme(name, fraction, 4, support=support), config, 0
            ),
            progress=False,
        ).w.detach()
        for name in ("FL-TOP", "FL-TOP-BIS")
    ]
    assert not torch.allclose(*runs, atol=1e-4)


def test_a_scheme_resumes_bit_for_bit(tmp_path):
    model = net()
    fed = federation()
    config = federated.Config(
        rounds=4,
        cohort=4,
        epochs=2,
        batch=5,
        lr=0.2,
        server="sgd",
        server_lr=1.0,
        eval_every=2,
        engine="fused",
    )
    mech = topk.scheme("FL-BASIC", 0.1, 4, 0.3, 0.5)
    straight = federated.simulate(
        federated.Task(model, fed, mech, config, 0), progress=False, workers=2
    )
    while not (
        pieces := federated.simulate(
            federated.Task(net(), fed, mech, config, 0),
            progress=False,
            checkpoint=tmp_path / "run.pt",
            resume=True,
            max_seconds=0,
        )
    ).finished:
        pass
    assert (
        torch.equal(pieces.w, straight.w)
        and pieces.history == straight.history
        and pieces.ledger == straight.ledger
    )


SUMS = {
    "topk": dict(fraction=0.5),
    "compressive": dict(fraction=0.5, chunks=2),
    "ddgauss": {},
    "skellam": {},
}


def test_every_mechanism_for_sums_is_known_here():
    assert {
        name
        for name in contract.registered()
        if hasattr(contract.mechanism_class(name), "sketch")
    } == set(SUMS)


@pytest.mark.parametrize("name", SUMS)
def test_the_engine_trains_with_every_mechanism_for_sums(name):
    """... and the two that send everything end one round at plain averaging plus the
    noise they promise, as long as a chi law says (false-alarm rate below 1e-6).
    """
    mech = contract.mechanism(
        name, clip_norm=5.0, sigma=1e-2, n_clients=4, **SUMS[name]
    )
    config = federated.Config(
        rounds=1,
        cohort=4,
        epochs=2,
        batch=5,
        lr=0.2,
        server="sgd",
        server_lr=1.0,
        eval_every=1,
        engine="loop",
    )
    run = federated.simulate(
        federated.Task(net(), federation(), mech, config, 0), progress=False
    )
    assert (
        run.round == 1
        and torch.isfinite(run.w.detach()).all()
        and (run.w.detach() != weights(net())).any()
    )
    if name in ("ddgauss", "skellam"):
        plain = federated.simulate(
            federated.Task(
                net(), federation(), topk.scheme("FL-STD", 1.0, 4), config, 0
            ),
            progress=False,
        )
        d, std = len(run.w), 1e-2 * 5.0 / 4
        assert abs(
            float((run.w - plain.w).detach().norm()) / (std * math.sqrt(d)) - 1
        ) < 5.5 / math.sqrt(2 * d)


@pytest.mark.parametrize("name", SUMS)
def test_nobody_at_all_is_a_round_without_a_change(name):
    "A Poisson cohort may be empty; then no share of noise arrives either."
    mech = contract.mechanism(name, clip_norm=1.0, sigma=1.0, n_clients=4, **SUMS[name])
    w = weights(net())
    mean, _ = federated.average(mech, w, None, 4, 0, seed_tree(0))
    assert mean.shape == w.shape and float(mean.abs().max()) < 1e-9


def test_a_diverging_client_stops_the_run_with_its_round():
    with pytest.raises(
        FloatingPointError, match="round 0: a client's loss or update is nan or inf"
    ):
        config = federated.Config(
            rounds=2,
            cohort=4,
            epochs=5,
            batch=5,
            lr=1e30,
            server="sgd",
            server_lr=1.0,
            engine="fused",
        )
        federated.simulate(
            federated.Task(
                net(), federation(), topk.scheme("FL-BASIC", 0.5, 4), config, 0
            ),
            progress=False,
        )


# ---- choosing S and the support


def test_s_is_the_norm_of_the_restricted_public_update():
    update = torch.arange(1.0, 9.0)
    fixed = TopK(0.25, 1.0, 1.0, 4, support=Support([0, 7]))
    assert topk.public_norm(fixed, lambda mask: update * mask, 8) == pytest.approx(
        math.hypot(1, 8)
    )
    assert topk.public_norm(
        TopK(1.0, 1.0, 1.0, 4), lambda mask: update, 8
    ) == pytest.approx(float(update.norm()))
    norms = [
        math.hypot(*update[topk.random_support(0.25, 8, seed).coordinates].tolist())
        for seed in range(5)
    ]
    assert topk.public_norm(
        TopK(0.25, 1.0, 1.0, 4, held=False), lambda mask: update, 8, draws=5
    ) == pytest.approx(np.median(norms))


def test_the_vote_finds_what_all_want_and_drowns_in_noise():
    updates = torch.zeros(30, 500)
    updates[:, :25] = 1.0
    assert topk.private_vote(
        updates, 0.05, 0.1, seed_tree(0)
    ).coordinates.tolist() == list(range(25))
    drowned = topk.private_vote(updates, 0.05, 100.0, seed_tree(0))
    assert len(drowned) == 25 and (drowned.coordinates < 25).mean() < 0.5


def test_the_noise_of_a_vote_has_norm_sigma_sqrt_k():
    """With 8 zero votes apart, the gap between two sums is sigma sqrt(2 k) normal: a
    vote decided against the majority happens as often as that says.
    """
    updates = torch.tensor([[1.0, 0.0]] * 3)
    wrong = np.mean(
        [
            topk.private_vote(updates, 0.5, 2.0, seed_tree(0, i)).coordinates[0] == 1
            for i in range(4000)
        ]
    )
    p = 0.5 * math.erfc(3 / (2.0 * math.sqrt(2)) / math.sqrt(2))
    assert abs(wrong - p) <= radius(math.sqrt(p * (1 - p)), 4000, 1)
