"""Mechanisms that send signs: their mean, which the simulation of steps uses in place of
coins.
"""

import numpy as np
import torch
from tables import tabled

from dpcomm.mechanisms.imvu import Imvu
from dpcomm.mechanisms.mvu import Mvu
from dpcomm.mechanisms.signsgd import SignSgd

SIGNS = [
    Imvu(2.0, 1.5, beta=5.0),
    Imvu(2.0, 1.5, beta=5.0, clamp=True),
    Mvu(2.0, eps=1.5, beta=3.0),
    Mvu(2.0, eps=1.5, beta=3.0, n_inputs=9, constraint="metric"),
    SignSgd(2.0, 1.5),
]


@tabled("m", SIGNS)
def test_step_and_mean_sign_give_the_mean(m):
    u = torch.from_numpy(np.linspace(-1.9, 1.9, 39)[:, None])
    mean = m.moments(u)[0] + u
    torch.testing.assert_close(m.step * m.mean_sign(u), mean, rtol=1e-9, atol=1e-12)


@tabled("m", SIGNS)
@tabled("kind", [np.float32, np.float64])
def test_the_mean_sign_has_the_callers_type(m, kind):
    u = np.linspace(-40, 40, 41).astype(kind)
    seen, of_tensor = m.mean_sign(u), m.mean_sign(torch.from_numpy(u))
    assert seen.dtype == kind and of_tensor.dtype == torch.from_numpy(u).dtype
    assert np.abs(seen).max() <= 1 and (np.diff(seen) >= 0).all()
    np.testing.assert_allclose(of_tensor, seen, rtol=1e-5, atol=1e-6)
