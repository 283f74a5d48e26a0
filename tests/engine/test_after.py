"""Factors of layers on merged factors: one for each matrix of a stack, zero included."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actmat.engine.calls import limit_factors
from actmat.layout.types import Role, TensorLayout
from actmat.linalg.lowrank import LowRank

LAYOUT = TensorLayout(Role.LINEAR, "for the test")


def task(factors: dict[str, float] | None) -> Any:
    noted: dict[str, Any] = {}
    caps = SimpleNamespace(caps=False)
    return SimpleNamespace(
        caps=caps, layer_factors=factors, noted=noted, note=lambda label, s: noted.update({label: s})
    )


@pytest.mark.parametrize("label", ["", "q"])
def test_each_matrix_of_a_stack_has_its_factor(label: str) -> None:
    rng = torch.Generator().manual_seed(0)
    value = LowRank(torch.randn(3, 5, 2, generator=rng), torch.randn(3, 2, 4, generator=rng))
    names = [f"{e}/{label}" if label else str(e) for e in range(3)]
    given = task(dict(zip(names, (0.0, 1.0, 2.5), strict=True)))
    found = limit_factors(given, value, [], LAYOUT, label)
    expected = value.dense().double() * torch.tensor([0.0, 1.0, 2.5], dtype=torch.float64).view(3, 1, 1)
    torch.testing.assert_close(found.dense(), expected)
    assert given.noted == {n: {"layer_factor": f} for n, f in given.layer_factors.items()}


def test_a_factor_of_zero_leaves_nothing_of_a_matrix() -> None:
    value = LowRank(torch.ones(5, 2), torch.ones(2, 4))
    assert not limit_factors(task({"q": 0.0}), value, [], LAYOUT, "q").dense().any()
    assert torch.equal(limit_factors(task(None), value, [], LAYOUT, "q").dense(), value.dense().double())
