"topk: supports, restriction, schemes."

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
from dpcomm.core.random import seed_tree
from dpcomm.mechanisms import topk
from dpcomm.mechanisms.topk import SCHEMES, Support, TopK
from dpcomm.training import models

# ---- supports


def test_a_support_is_a_set_in_order():
    one = Support([5, 1, 3])
    assert one == Support(np.array([1, 3, 5])) and one.coordinates.tolist() == [1, 3, 5]
    assert hash(Support([1, 2])) == hash(Support([2, 1]))
    assert Support([1, 2]) != Support([1, 3]) and Support([1, 2]) != {1, 2}
    assert len(Support([4])) == 1 and Support([4]).digest[:12] in repr(Support([4]))


@tabled("fraction, d, k", [(0.005, 1_663_370, 8316), (1.0, 7, 7), (0.29, 100, 29)])
def test_k_is_the_floor_of_r_n(fraction, d, k):
    "Not one less where r n is a whole number that floats miss: 0.29 * 100 is 28.999999999999996."
    assert topk.size(fraction, d) == k


def test_the_largest_scores_are_kept_and_ties_go_to_the_first():
    scores = torch.tensor([1.0, 3.0, 2.0, 3.0, 3.0])
    assert topk.top_k(scores, 0.4).coordinates.tolist() == [1, 3]


def test_random_supports_are_public_and_fresh_ones_change():
    one = topk.random_support(0.2, 50, 3)
    assert one == topk.random_support(0.2, 50, 3) != topk.random_support(0.2, 50, 3, 1)
    assert len(one) == 10
    assert topk.random_support(1.0, 5, 0).coordinates.tolist() == [0, 1, 2, 3, 4]
    drawn = [topk.random_support(0.2, 50, 9, t).coordinates for t in range(2000)]
    counts = np.bincount(np.concatenate(drawn), minlength=50)
    assert (np.abs(counts / 2000 - 0.2) <= radius(0.4, 2000, 50)).all()


def test_accumulated_gradients_are_those_of_sgd():
    layers = nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 4)
    model = models.initialise(nn.Sequential(*layers), seed_tree(0), "glorot")
    x = torch.from_numpy(seed_tree(0, "toy").random((5, 1, 8, 8), dtype=np.float32))
    y, w = torch.tensor([0, 3, 1, 2, 0]), vectors.flatten(model.parameters()).detach()
    found, total = topk.public_gradients(model, w, x, y, 3, 0.3), torch.zeros_like(w)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(3):
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        total += vectors.flatten(p.grad for p in model.parameters()).abs()
        optimiser.step()
    torch.testing.assert_close(found, total)


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


def test_the_mask_is_the_support_where_weights_are_held():
    mech = TopK(0.5, 1.0, 1.0, 10, support=Support([1, 3]))
    assert mech.trainable(4).tolist() == [False, True, False, True]
    assert dataclasses.replace(mech, held=False).trainable(4) is None
    assert TopK(1.0, 1.0, 1.0, 10).trainable(4) is None


# ---- schemes


def test_the_schemes_differ_as_the_paper_says():
    "Coordinates of two rounds, what is held, and what travels each way."
    rows = {}
    for name in set(SCHEMES) - {"FL-CS"}:
        support = Support(range(10)) if SCHEMES[name][0] == "top" else None
        mech = topk.scheme(name, 0.25, 10, support=support)
        first, second = (mech.for_round(t).current_support(40) for t in (0, 1))
        up, down = mech.bits(40).payload // 32, mech.downlink_bits(40) // 32
        rows[name] = first == second, mech.trainable(40) is not None, up, down
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
    # one parameter apart
    assert twin == dataclasses.replace(topk.scheme("FL-BASIC", 0.25, 10), sigma=1.0)
    assert topk.scheme("FL-CS", 0.25, 10, chunks=2).name == "compressive"


# ---- choosing S and the support


def test_s_is_the_norm_of_the_restricted_public_update():
    update = torch.arange(1.0, 9.0)

    def norm(mech, **more):
        masked = lambda mask: update if mask is None else update * mask  # noqa: E731
        return topk.public_norm(mech, masked, 8, **more)

    fixed = TopK(0.25, 1.0, 1.0, 4, support=Support([0, 7]))
    assert norm(fixed) == pytest.approx(math.hypot(1, 8))
    assert norm(TopK(1.0, 1.0, 1.0, 4)) == pytest.approx(float(update.norm()))
    drawn = [topk.random_support(0.25, 8, seed).coordinates for seed in range(5)]
    norms = [float(update[at].norm()) for at in drawn]
    found = norm(TopK(0.25, 1.0, 1.0, 4, held=False), draws=5)
    assert found == pytest.approx(np.median(norms))
