from __future__ import annotations

import pytest
import torch
from tests.helpers.masking import call
from tests.helpers.spectra import random_deltas
from tests.tolerances import relative_error

from actmat.methods.task_arithmetic import TASK_ARITHMETIC


@pytest.mark.parametrize("weights", [None, [0.5, -1.0, 2.0]])
def test_naive_sum(weights: list[float] | None) -> None:
    deltas = random_deltas(3, 4, 5)
    expected = torch.zeros(4, 5, dtype=torch.float64)
    for o in range(4):
        for i in range(5):
            expected[o, i] = 0.4 * sum((weights or [1, 1, 1])[t] * deltas[t][o, i] for t in range(3))
    assert relative_error(call(TASK_ARITHMETIC, deltas, weights=weights), expected) < 1e-15


def test_scaling_is_lambda() -> None:
    deltas = random_deltas(2, 6)
    assert torch.equal(call(TASK_ARITHMETIC, deltas, scaling=1.0), deltas[0] + deltas[1])
