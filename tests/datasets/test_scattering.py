"scattering: kymatio's coefficients one by one, and a cache that is never half written."

import math
import re

import numpy as np
import pytest
import scipy.special
import torch
from tables import tabled
from torch.nn import functional
from torch.nn.functional import group_norm

from dpcomm.core.random import seed_tree
from dpcomm.datasets import images as data
from dpcomm.datasets import scattering
from dpcomm.datasets.scattering import cache_path, features, scatter

DIGITS = data.load("digits")
ORDER = torch.tensor([1] + 16 * [2] + 64 * [3])  # filters that a coefficient has passed


def noise(*shape, seed=0):
    return torch.from_numpy(seed_tree(seed, "images").random(shape, dtype=np.float32))


def standard(x, name):
    mean, std = (torch.tensor(v).reshape(-1, 1, 1) for v in scattering.PIXELS[name])
    return (x - mean) / std


def colour(n):
    "Smooth coloured images with edges, normalised as CIFAR-10's are."
    x = functional.interpolate(noise(n, 3, 5, 5), size=(32, 32), mode="bicubic")
    return standard(x + (noise(n, 3, 1, 1, seed=1) > 0.5) * torch.eye(32), "cifar10")


def near(a, b, atol=1e-12):
    return torch.allclose(a, b, rtol=0, atol=atol)


# ---- against the reference


@pytest.fixture(scope="module")
def kymatio():
    """kymatio's transform; scipy has renamed a function that its import asks for and
    the two-dimensional transform does not call.
    """
    if not hasattr(scipy.special, "sph_harm"):
        scipy.special.sph_harm = None
    from kymatio.torch import Scattering2D

    return lambda x, **more: Scattering2D(J=2, shape=tuple(x.shape[2:]), **more)(
        x.contiguous()
    ).flatten(1, 2)


KINDS = {
    "digits": DIGITS.x[:12],
    "grey noise": noise(6, 1, 28, 28),
    "strokes": (DIGITS.x[12:20] > 0.5).float(),
    "colour": colour(6),
    "colour noise": noise(3, 3, 32, 32),
    "wide": noise(2, 2, 28, 40),
    "tiny": noise(2, 1, 8, 12),
}


@tabled("kind", KINDS)
def test_every_coefficient_is_kymatios(kind, kymatio):
    images = KINDS[kind]
    ours, theirs = scatter(images), kymatio(images)
    assert ours.shape == theirs.shape and ours.dtype == torch.float32
    scale = max(1.0, float(images.abs().max()))
    assert (ours - theirs).abs().max() < 4e-5 * scale
    # kymatio's normalisation writes 3.1415 for pi, once a filter
    pi = (3.1415 / math.pi) ** ORDER.repeat(images.shape[1])[:, None, None]
    assert (ours - theirs * pi).abs().max() < 2e-6 * scale
    if kind in ("digits", "colour"):
        assert near(group_norm(ours, 27), group_norm(theirs, 27), 1e-3)


# ---- properties of the transform


def test_a_batch_is_a_loop_and_channels_do_not_mix():
    images = colour(5)
    whole = scatter(images)
    assert near(whole, torch.cat([scatter(x[None]) for x in images]), 1e-5)
    alone = torch.cat([scatter(images[:, c : c + 1]) for c in range(3)], 1)
    assert near(whole, alone, 1e-5)
    images[:, 1] = 0
    changed = (scatter(images) - whole).abs().amax((0, 2, 3)) > 1e-6
    assert changed[81:162].all() and not changed[:81].any() and not changed[162:].any()


# ---- the cache


def small(name="digits", channels=1, n=7, side=28, seed=0):
    x, x_test = (noise(n, channels, side, side, seed=seed + i) for i in range(2))
    y = torch.zeros(n, dtype=torch.int64)
    return data.Dataset(name, x, y, x_test, y)


@tabled("name, channels, side", [("mnist", 1, 28), ("cifar10", 3, 32)])
def test_features_are_the_normalised_coefficients(
    name, channels, side, tmp_path, monkeypatch
):
    monkeypatch.setattr(scattering, "BATCH", 3)
    given = small(name, channels, side=side)
    for x, got in zip((given.x, given.x_test), features(given, root=tmp_path)):
        x = standard(x, name) if name in scattering.PIXELS else x
        assert got.shape == (7, 81 * channels * side * side // 16)
        assert np.allclose(got, group_norm(scatter(x), 27).flatten(1), atol=2e-5)


def test_features_lie_on_disk_are_not_computed_again_and_cannot_be_changed(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("DPCOMM_DATA", str(tmp_path))
    whole, part = features(small()), features(small(), limit=(5, 3))
    for split, n, got, all_of in zip(("train", "test"), (5, 3), part, whole):
        assert isinstance(got, np.memmap) and got.dtype == np.float32 and len(got) == n
        assert np.allclose(got, all_of[:n], atol=1e-5), "the first images' rows"
        assert got.filename.parent == tmp_path / "features"
        name = rf"digits-{split}-\d-[0-9a-f]{{16}}\.npy"
        assert re.fullmatch(name, got.filename.name)
        with pytest.raises(ValueError, match="read-only"):
            got[0] = 0
    assert [p.suffix for p in (tmp_path / "features").iterdir()] == [".npy"] * 4
    monkeypatch.setattr(scattering, "scatter", None)
    for a, b in zip(whole, features(small(), root=tmp_path)):
        assert (a == b).all()
    with pytest.raises(TypeError):
        features(small(seed=5), root=tmp_path)


def test_the_name_knows_all_that_matters(tmp_path, monkeypatch):
    def names(given, limit=None):
        return {a.filename.name[-20:] for a in features(given, limit, tmp_path)}

    base, changed = small(), small()
    changed.x[0, 0, 0, 0] += 0.5
    changed.x_test[0, 0, 0, 0] += 0.5
    seen = [names(base), names(changed), names(base, (6, 6))]
    monkeypatch.setattr(scattering, "VERSION", 2)
    seen.append(names(base))
    monkeypatch.setitem(scattering.PIXELS, "digits", ((0.5,), (1.0,)))
    seen.append(names(base))
    assert len(set().union(*seen)) == 2 * len(seen)
    assert names(small()) == seen[-1]


def test_the_name_does_not_change_between_releases():
    settings = dict(scales=2, orientations=8, groups=27, mean=(0.0,), std=(1.0,))
    path = cache_path("features", "mnist-train", torch.zeros(2, 1, 8, 8), settings)
    assert path.as_posix() == "features/mnist-train-2-1de5ad1cf4fdcdcb.npy"
