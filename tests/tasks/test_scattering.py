"""scattering: kymatio's coefficients one by one, symmetries that any scattering
transform has, and a cache that is never half written.
"""

import io
import math
import re
import signal
import threading

import numpy as np
import pytest
import scipy.special
import torch
from checkout import python
from tables import tabled
from torch.nn import functional

from dpcomm.core.chance import seed_tree
from dpcomm.tasks import images as data
from dpcomm.tasks import scattering
from dpcomm.tasks.scattering import (
    averaging_matrix,
    cache_fault,
    cache_path,
    check_images,
    features,
    gabor,
    group_norm,
    morlet,
    scatter,
    write_once,
)

DIGITS = data.load("digits")
ORDER = torch.tensor([1] + 16 * [2] + 64 * [3])  # filters that a coefficient has passed


def noise(*shape, seed=0):
    return torch.from_numpy(seed_tree(seed, "images").random(shape, dtype=np.float32))


def colour(n, side=32):
    "Smooth coloured images with edges, normalised as CIFAR-10's are."
    x = functional.interpolate(noise(n, 3, 5, 5), size=(side, side), mode="bicubic") + (
        noise(n, 3, 1, 1, seed=1) > 0.5
    ) * torch.eye(side)
    mean, std = (torch.tensor(v).reshape(3, 1, 1) for v in scattering.PIXELS["cifar10"])
    return (x - mean) / std


# ---- against the reference


@pytest.fixture(scope="module")
def kymatio():
    """kymatio's transform; scipy has renamed a function that its import asks for and
    the two-dimensional transform does not call.
    """
    if not hasattr(scipy.special, "sph_harm"):
        scipy.special.sph_harm = lambda m, n, theta, phi: scipy.special.sph_harm_y(
            n, m, phi, theta
        )
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
    pi = (3.1415 / math.pi) ** ORDER.repeat(images.shape[1])[
        :, None, None
    ]  # kymatio's normalisation writes 3.1415 for pi, once a filter
    assert (ours - theirs * pi).abs().max() < 2e-6 * scale


@pytest.mark.parametrize("orientations", [2, 3, 6])
def test_other_numbers_of_directions_are_kymatios(orientations, kymatio):
    images = noise(2, 1, 28, 28)
    assert (
        scatter(images, orientations) - kymatio(images, L=orientations)
    ).abs().max() < 4e-5


@pytest.mark.parametrize("kind", ["digits", "colour"])
def test_normalised_features_are_those_of_kymatio_and_torch(kind, kymatio):
    ours = group_norm(scatter(KINDS[kind]))
    theirs = functional.group_norm(kymatio(KINDS[kind]), 27)
    assert (ours - theirs).abs().max() < 1e-3


# ---- filters


def test_gabor_is_centred_and_has_the_stated_peak():
    bell = gabor((40, 36), 1.6)
    assert (
        bell.shape == (40, 36)
        and np.abs(bell).argmax() == 0
        and np.allclose(bell.sum(), 1, atol=1e-5)
    )
    peak = np.abs(np.fft.fft2(gabor((40, 40), 3.0, 0.0, 2 * np.pi * 7 / 40))).argmax()
    assert np.unravel_index(peak, (40, 40)) == (7, 0)


def test_wavelets_sum_to_zero_and_have_real_spectra():
    for scale, turn in np.ndindex(2, 8):
        wavelet = morlet((36, 40), scale, turn)
        assert (
            abs(wavelet.sum()) < 1e-12
            and np.abs(np.fft.fft2(wavelet).imag).max() < 1e-12
        )


def test_averages_sum_to_one_and_drop_the_margin():
    for n, step in ((36, 1), (36, 2), (40, 1), (40, 2)):
        matrix = averaging_matrix(n, step)
        assert matrix.shape == (n // 4 - 2, n // step) and np.allclose(matrix.sum(1), 1)
        assert (matrix.argmax(1) == np.arange(4, n - 4, 4) // step).all()


def test_no_frequency_is_amplified():
    for size in ((36, 36), (40, 40)):
        psi = np.stack(
            [np.fft.fft2(morlet(size, j, t)).real for j in (0, 1) for t in range(8)]
        )
        cover = (
            np.fft.fft2(gabor(size, 1.6)).real ** 2
            + (psi**2 + np.roll(psi[:, ::-1, ::-1], 1, (1, 2)) ** 2).sum(0) / 2
        )
        assert cover.max() <= 1 + 1e-12


# ---- properties of the transform


@pytest.mark.parametrize("channels, side, d", [(1, 28, 3_969), (3, 32, 15_552)])
def test_shapes_are_the_papers(channels, side, d):
    s = scatter(noise(2, channels, side, side))
    assert s.shape == (2, 81 * channels, side // 4, side // 4) and s[0].numel() == d


def test_a_batch_is_a_loop_and_channels_do_not_mix():
    images = colour(5)
    whole = scatter(images)
    assert torch.allclose(
        whole, torch.cat([scatter(x[None]) for x in images]), atol=1e-6
    )
    assert torch.allclose(
        whole,
        torch.cat([scatter(images[:, c : c + 1]) for c in range(3)], 1),
        atol=1e-6,
    )
    for block in (1, 7, 10_000):
        assert torch.allclose(whole, scatter(images, block=block), atol=1e-6)
    images[:, 1] = 0
    changed = (scatter(images) - whole).abs().amax((0, 2, 3)) > 1e-6
    assert changed[81:162].all() and not changed[:81].any() and not changed[162:].any()
    assert scatter(images[:0]).shape == (0, 243, 8, 8)


def test_single_and_double_precision_agree():
    images = torch.cat([DIGITS.x[:20], noise(4, 1, 28, 28)])
    double = scatter(images.double())
    assert (
        double.dtype == torch.float64 and (scatter(images) - double).abs().max() < 2e-6
    )


def test_zero_stays_zero_and_a_constant_is_order_zero():
    assert not scatter(torch.zeros(2, 1, 28, 28)).any()
    constant = scatter(torch.full((1, 1, 28, 28), 0.7).double())[0]
    assert (
        torch.allclose(constant[0], torch.tensor(0.7).double(), atol=1e-5)
        and constant[1:].abs().max() < 1e-6
    )
    assert not group_norm(torch.zeros(2, 81, 7, 7)).any()


def test_scaling_an_image_scales_its_coefficients():
    images = noise(3, 1, 28, 28).double()
    assert torch.allclose(
        scatter(-2.5 * images)[:, 1:], 2.5 * scatter(images)[:, 1:], rtol=0, atol=1e-12
    )
    assert torch.allclose(
        scatter(-2.5 * images)[:, :1], -2.5 * scatter(images)[:, :1], rtol=0, atol=1e-12
    )


def test_four_pixels_move_the_coefficients_by_one():
    images = torch.zeros(2, 1, 64, 64).double()
    images[:, :, 28:36, 28:36] = noise(2, 1, 8, 8)
    moved = scatter(images.roll((4, -8), (2, 3)))
    inside = slice(2, -2)  # what enters over the border comes from the margin
    assert torch.allclose(
        moved[..., inside, inside],
        scatter(images).roll((1, -2), (2, 3))[..., inside, inside],
        rtol=0,
        atol=1e-12,
    )


def test_a_mirror_at_the_diagonal_permutes_the_directions():
    images = noise(3, 1, 28, 28).double()
    mirror = (
        2 - torch.arange(8)
    ) % 8  # direction t has angle (3 - t) pi / 8, mirrored it has (1 + t) pi / 8
    channel = torch.cat(
        [
            torch.tensor([0]),
            1 + mirror,
            9 + mirror,
            17 + (8 * mirror[:, None] + mirror).flatten(),
        ]
    )
    assert torch.allclose(
        scatter(images.mT), scatter(images).mT[:, channel], rtol=0, atol=1e-12
    )


def test_two_images_come_no_further_apart():
    x, y = noise(6, 1, 40, 40).double(), noise(6, 1, 40, 40, seed=3).double()
    for z in (y, x + 0.1 * y, x.roll(1, -1)):
        assert (
            4 * (scatter(x) - scatter(z)).flatten(1).norm(dim=1)
            <= 1.02 * (x - z).flatten(1).norm(dim=1)
        ).all()


def test_a_shifted_stroke_changes_the_features_less_than_the_pixels():
    x = (DIGITS.x_test[:64] > 0.5).float()

    def change(f):
        return float(
            (
                (f(x.roll(1, -1)) - f(x)).flatten(1).norm(dim=1)
                / f(x).flatten(1).norm(dim=1)
            ).mean()
        )

    assert change(scatter) < change(lambda images: images) / 2


@pytest.mark.parametrize("channels, groups", [(81, 27), (243, 27), (81, 1), (81, 81)])
def test_group_norm_is_torchs(channels, groups):
    x = (
        noise(4, channels, 7, 7) ** 4
        * 10.0 ** -torch.arange(channels).div(20, rounding_mode="floor")[:, None, None]
    )
    assert torch.allclose(
        group_norm(x, groups), functional.group_norm(x, groups), atol=1e-5
    )
    assert torch.allclose(
        group_norm(x, groups, tiny=0.1),
        functional.group_norm(x, groups, eps=0.1),
        atol=1e-5,
    )


# ---- refusals


@tabled(
    "images, says",
    [
        (noise(1, 28, 28), "(n, channels, height, width)"),
        (noise(1, 1, 28, 28).numpy(), "ndarray"),
        ((255 * noise(1, 1, 28, 28)).byte(), "divide bytes by 255"),
        (noise(1, 1, 30, 28), "30 x 28 pixels; both sides must be multiples of 4"),
        (noise(1, 1, 4, 4), "at least 8"),
        (noise(1, 1, 28, 28) / 0, "nan or inf"),
    ],
    ids=["axes", "array", "bytes", "size", "small", "inf"],
)
def test_bad_images_are_refused(images, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        check_images(images)
    with pytest.raises(ValueError, match=r"^images .*: \w+"):
        scatter(images)


def test_bad_settings_are_refused():
    x = noise(1, 1, 28, 28)
    for call, word in (
        (lambda: scatter(x, 1), "orientations"),
        (lambda: scatter(x, block=0), "block"),
        (lambda: group_norm(scatter(x), 10), "groups"),
        (lambda: group_norm(scatter(x), 0), "groups"),
        (lambda: features(DIGITS, limit=(0, 1)), "limit"),
        (lambda: features(DIGITS, limit=(10, 361)), "limit"),
    ):
        with pytest.raises(ValueError, match=f"^{word} is "):
            call()


# ---- the cache


def small(name="digits", channels=1, n=7, side=28, seed=0):
    y = torch.zeros(n, dtype=torch.int64)
    return data.Dataset(
        name,
        noise(n, channels, side, side, seed=seed),
        y,
        noise(n, channels, side, side, seed=seed + 1),
        y,
    )


@pytest.mark.parametrize("name, channels, side", [("mnist", 1, 28), ("cifar10", 3, 32)])
def test_features_are_the_normalised_coefficients(
    name, channels, side, tmp_path, monkeypatch
):
    monkeypatch.setattr(scattering, "BATCH", 3)
    given = small(name, channels, side=side)
    mean, std = (
        torch.tensor(v).reshape(-1, 1, 1)
        for v in scattering.PIXELS.get(name, ((0.0,), (1.0,)))
    )
    for images, got in zip((given.x, given.x_test), features(given, root=tmp_path)):
        wanted = group_norm(scatter((images - mean) / std)).flatten(1)
        assert got.shape == (7, 81 * channels * side * side // 16) and np.allclose(
            got, wanted, atol=2e-5
        )


def test_features_lie_on_disk_and_cannot_be_changed(tmp_path):
    for split, got in zip(
        ("train", "test"), features(small(), limit=(5, 3), root=tmp_path)
    ):
        assert (
            isinstance(got, np.memmap)
            and got.dtype == np.float32
            and len(got) == {"train": 5, "test": 3}[split]
        )
        assert got.filename.parent == tmp_path / "features" and re.fullmatch(
            rf"digits-{split}-\d-[0-9a-f]{{16}}\.npy", got.filename.name
        )
        with pytest.raises(ValueError, match="read-only"):
            got[0] = 0
    assert sorted(p.suffix for p in (tmp_path / "features").iterdir()) == [
        ".npy",
        ".npy",
    ]


def test_features_use_the_data_root(tmp_path, monkeypatch):
    monkeypatch.setenv("DPCOMM_DATA", str(tmp_path))
    assert features(small(n=2))[0].filename.parent == tmp_path / "features"


def test_what_is_there_is_not_computed_again(tmp_path, monkeypatch):
    first = features(small(), root=tmp_path)
    monkeypatch.setattr(scattering, "scatter", None)
    for a, b in zip(first, features(small(), root=tmp_path)):
        assert (a == b).all()
    with pytest.raises(TypeError):
        features(small(seed=5), root=tmp_path)


def test_the_first_images_are_the_first_rows(tmp_path):
    whole = features(small(), root=tmp_path)[0]
    part = features(small(), limit=(4, 2), root=tmp_path)[0]
    assert np.allclose(whole[:4], part, atol=1e-5)


def test_the_name_knows_all_that_matters(tmp_path, monkeypatch):
    def names(given, **more):
        return {a.filename.name[-20:] for a in features(given, root=tmp_path, **more)}

    base, changed = small(), small()
    changed.x[0, 0, 0, 0] += 0.5
    changed.x_test[0, 0, 0, 0] += 0.5
    variants = [
        (base, {}),
        (changed, {}),
        (base, {"limit": (6, 6)}),
        (base, {"groups": 9}),
        (base, {"orientations": 2, "groups": 9}),
    ]
    seen = [names(given, **more) for given, more in variants]
    monkeypatch.setattr(scattering, "VERSION", 2)
    seen.append(names(base))
    monkeypatch.setitem(scattering.PIXELS, "digits", ((0.5,), (1.0,)))
    seen.append(names(base))
    assert len(set().union(*seen)) == 2 * len(seen)
    assert names(small()) == seen[-1]


def test_the_name_does_not_change_between_releases():
    settings = dict(scales=2, orientations=8, groups=27, mean=(0.0,), std=(1.0,))
    assert (
        cache_path(
            "features", "mnist-train", torch.zeros(2, 1, 8, 8), settings
        ).as_posix()
        == "features/mnist-train-2-1de5ad1cf4fdcdcb.npy"
    )


def test_a_killed_write_leaves_no_file_under_the_name(tmp_path):
    script = (
        "import os, signal, sys, numpy as np\nfrom pathlib import Path\nfrom"
        " dpcomm.tasks.scattering import write_once\ndef blocks():\n    yield"
        " np.ones((500, 1000), 'f4')\n    os.kill(os.getpid(),"
        " signal.SIGKILL)\nwrite_once(Path(sys.argv[1]), (1000, 1000), blocks())"
    )
    path = tmp_path / "deep" / "a.npy"
    assert python("-c", script, path).returncode == -signal.SIGKILL
    assert [p.suffix for p in path.parent.iterdir()] == [".part"]
    write_once(path, (3, 2), [np.ones((1, 2), "f4"), np.zeros((2, 2), "f4")])
    assert np.load(path).tolist() == [[1, 1], [0, 0], [0, 0]] and [
        p.name for p in path.parent.iterdir()
    ] == ["a.npy"]


def test_a_failed_write_starts_again(tmp_path):
    def blocks():
        yield np.ones((1, 2), "f4")
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_once(tmp_path / "a.npy", (2, 2), blocks())
    assert not list(tmp_path.iterdir()), "a full disk leaves nothing behind"
    assert np.load(
        write_once(tmp_path / "a.npy", (1, 2), [np.full((1, 2), 3.0)])
    ).tolist() == [[3, 3]]


def damaged(whole):
    """A file of features after every accident of the attack: what to call it, and its
    bytes.
    """
    head, middle = 128, 128 + (len(whole) - 193) // 2
    other = io.BytesIO()
    np.save(other, np.ones((3, 3), "f4"))
    yield "a small array", other.getvalue()
    yield "zeros behind the right header", whole[:head] + bytes(len(whole) - head)
    yield "zeros and a hash", whole[:head] + bytes(len(whole) - head - 65) + whole[-65:]
    yield "no hash", whole[:-65]
    yield "cut", whole[:middle]
    yield "empty", b""
    yield "longer", whole + b"0"
    yield "a hole", whole[:middle] + bytes(64) + whole[middle + 64 :]
    yield (
        "another shape",
        whole[:head].replace(b"(5, 3969)", b"(3969, 5)") + whole[head:],
    )
    for at in seed_tree(0, "flips").integers(0, 8 * len(whole), 20).tolist():
        yield (
            f"bit {at}",
            whole[: at // 8]
            + bytes([whole[at // 8] ^ 1 << at % 8])
            + whole[at // 8 + 1 :],
        )


def test_damaged_features_are_made_again_with_one_sentence(tmp_path, recwarn):
    wanted = [np.array(a) for a in features(small(), limit=(5, 3), root=tmp_path)]
    path = next((tmp_path / "features").glob("digits-train*.npy"))
    whole = path.read_bytes()
    assert not recwarn.list and cache_fault(path, wanted[0].shape) == ""
    for what, content in damaged(whole):
        assert content != whole, what
        path.write_bytes(content)
        assert cache_fault(path, wanted[0].shape), what
        with pytest.warns(
            UserWarning,
            match=(
                rf"^{path.name} is damaged \([^()]+\): its features are computed again$"
            ),
        ):
            found = features(small(), limit=(5, 3), root=tmp_path)
        assert (
            all((a == b).all() for a, b in zip(found, wanted))
            and path.read_bytes() == whole
        ), what
    assert len(list((tmp_path / "features").iterdir())) == 2


def test_a_second_writer_waits_and_takes_what_the_first_made(tmp_path):
    begun, go = threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert go.wait(10)
        yield np.ones((1, 2), "f4")

    path = tmp_path / "a.npy"
    first = threading.Thread(target=write_once, args=(path, (1, 2), slow()))
    second = threading.Thread(
        target=write_once, args=(path, (1, 2), iter([np.zeros((1, 2), "f4")]))
    )
    first.start()
    assert begun.wait(10)
    second.start()
    second.join(0.2)
    assert second.is_alive() and not path.exists()
    go.set()
    first.join(10)
    second.join(10)
    assert np.load(path).tolist() == [[1, 1]] and [
        p.name for p in tmp_path.iterdir()
    ] == ["a.npy"]
    assert write_once(path, (1, 2), None) == path and [
        p.name for p in tmp_path.iterdir()
    ] == ["a.npy"]


@pytest.mark.parametrize(
    "watched, progress, shown",
    [("1", True, True), ("0", True, False), ("1", False, False), (None, True, False)],
)
def test_the_bar_is_shown_where_it_is_wanted(
    watched, progress, shown, tmp_path, monkeypatch, capsys
):
    if watched:
        monkeypatch.setenv("DPCOMM_PROGRESS", watched)
    else:
        monkeypatch.delenv("DPCOMM_PROGRESS", raising=False)
    features(small(n=2), root=tmp_path, progress=progress)
    assert ("image" in capsys.readouterr().err) == shown


def test_threads_are_as_they_were_after_features(tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        features(data.load("digits"), limit=(20, 10), root=tmp_path)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
