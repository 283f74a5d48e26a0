"""SWUDI against the gradient flow that it is the closed form of."""

import pytest
from tests.helpers.interference import naive, self_grams
from tests.helpers.spectra import random_deltas
from tests.tolerances import relative_error

from actmat.methods import get_method

SWUDI = get_method("swudi")
WUDI = get_method("wudi")


merge = SWUDI.merge


@pytest.mark.parametrize("shape", [(4, 10, 10), (3, 4, 20)])
def test_swudi_is_gradient_flow_stopped_in_time(shape):
    """Integrate `dD/ds = -(D S - B)` from the sum with small steps up to s = time."""
    deltas = random_deltas(*shape)
    gram = sum(g / g.trace() for g in self_grams(deltas))
    left = sum(d @ g / g.trace() for d, g in zip(deltas, self_grams(deltas), strict=True))
    time, steps = 3.0, 20000
    point = sum(deltas)
    for _ in range(steps):
        point = point - time / steps * (point @ gram - left)
    assert relative_error(merge(deltas, time=time).value, point) < 1e-4


def test_swudi_tikhonov():
    deltas = random_deltas(3, 10, 8)
    grams = [g / g.trace() for g in self_grams(deltas)]
    expected = naive(deltas, grams, response=lambda v: v / (v + 0.5 * 3 / 8), fill=sum(deltas))
    assert relative_error(merge(deltas, filter="tikhonov", ridge=0.5).value, expected) < 1e-12
