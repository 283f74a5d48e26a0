"""Arcee Fusion entry by entry, against the rule in plain Python."""

import math

import pytest
import torch
from tests.helpers.experts import Experts
from torch import Tensor

from actmat.extras.research.arcee_fusion import merge


def plain(delta: Tensor, base: Tensor, spread: float) -> Tensor:
    rows = []
    for d_row, w_row in zip(delta.tolist(), base.tolist(), strict=True):

        def softmax(row: list[float]) -> list[float]:
            powers = [math.exp(v) for v in row]
            return [p / sum(powers) + 1e-8 for p in powers]

        p, q = softmax([d + w for d, w in zip(d_row, w_row, strict=True)]), softmax(w_row)
        divergence = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        rows.append([abs(d) * divergence for d in d_row])
    ranked = sorted(v for row in rows for v in row)
    q1, middle, q3 = (ranked[math.floor(k * (len(ranked) - 1))] for k in (0.25, 0.5, 0.75))
    threshold = middle + spread * (q3 - q1)
    kept = [
        [d if v >= threshold else 0.0 for d, v in zip(*pair, strict=True)]
        for pair in zip(delta.tolist(), rows, strict=True)
    ]
    return torch.tensor(kept, dtype=torch.float64)


@pytest.mark.parametrize("spread", [0.0, 1.5, 10.0])
def test_entries_above_the_threshold_stay(spread: float) -> None:
    experts = Experts.random(1, (9, 6))
    found = merge(experts.deltas, base=experts.base, spread=spread)
    assert torch.equal(found.value, plain(experts.deltas[0], experts.base, spread))
    kept = float((found.value != 0).double().mean())
    assert found.stats["kept_fraction"] == pytest.approx(kept)
    assert kept < 0.6


def test_a_vector_has_one_divergence() -> None:
    delta, base = torch.tensor([0.1, -3.0, 0.2, 0.05]), torch.zeros(4)
    assert merge([delta], base=base).value.tolist() == [0.0, -3.0, 0.0, 0.0]
