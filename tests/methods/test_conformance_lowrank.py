"""Factored forms agree with the dense rule, and never form the dense matrix."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.helpers.experts import Experts
from tests.tolerances import F32_PRODUCT, relative_error
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from actmat.linalg.lowrank import LowRank
from actmat.methods import METHODS, MergedLowRank, MergeMethod

FACTORED = [m for m in METHODS if m.merge_lowrank is not None]
each_factored = pytest.mark.parametrize("method", FACTORED, ids=lambda m: m.name)


def factors(shape: tuple[int, ...], ranks: list[int], seed: int = 0) -> list[LowRank]:
    rng = torch.Generator().manual_seed(seed)
    *batch, n_out, n_in = shape

    def gaussian(*size: int) -> Tensor:
        return torch.randn(*batch, *size, generator=rng, dtype=torch.float64)

    return [LowRank(gaussian(n_out, r) / r, gaussian(r, n_in)) for r in ranks]


def needs_for(shape: Sequence[int], n_experts: int) -> dict[str, Any]:
    experts = Experts.random(n_experts, shape, seed=3)
    return {
        "generator": torch.Generator().manual_seed(0),
        "survey": None,
        "weights": None,
        "base": experts.base,
        "statistics": experts.statistics,
    }


def merge_lowrank(method: MergeMethod, deltas: list[LowRank]) -> MergedLowRank:
    return ready_lowrank(method, deltas)()


def ready_lowrank(method: MergeMethod, deltas: list[LowRank]) -> Callable[[], MergedLowRank]:
    """The call with every need made beforehand."""
    assert method.merge_lowrank is not None
    given = needs_for(deltas[0].shape, len(deltas))
    taken = inspect.signature(method.merge_lowrank).parameters
    needs = {n: v for n, v in given.items() if n in taken}
    return functools.partial(method.merge_lowrank, deltas, **needs, **method.resolve_options({}))


def merge_dense(method: MergeMethod, deltas: list[Tensor]) -> Tensor:
    given = needs_for(deltas[0].shape, len(deltas))
    needs = {n: v for n, v in given.items() if n in method.needs}
    return method.merge(deltas, **needs, **method.resolve_options({})).value


@each_factored
@pytest.mark.parametrize(
    ("shape", "ranks"),
    [
        ((20, 24), [2, 2, 2]),  # independent row spaces
        ((20, 24), [3, 1, 2, 4]),  # ranks differ
        ((10, 40), [4, 4, 4]),  # column spaces overlap
        ((40, 10), [4, 4, 4]),  # row spaces overlap
        ((16, 12), [3]),  # one expert
        ((2, 14, 16), [2, 3]),  # batch axis
    ],
)
def test_factored_equals_dense(method: MergeMethod, shape: tuple[int, ...], ranks: list[int]) -> None:
    deltas = factors(shape, ranks)
    out = merge_lowrank(method, deltas).value
    assert out.shape == shape
    assert relative_error(out.dense(), merge_dense(method, [d.dense() for d in deltas])) <= 1e-10


NULL_SENSITIVE = {"actmat_ridge", "actmat_bounded", "swudi"}
"""Their filters weigh directions in which the experts hold nothing: the dense form in float32 amplifies the rounding
that it finds there, by up to `1 / ridge`, and is itself as far from the float64 answer as from the factored one."""


@each_factored
@pytest.mark.parametrize(
    ("shape", "ranks"),
    [((20, 24), [3, 1, 2, 4]), ((10, 40), [4, 4, 4]), ((2, 14, 16), [2, 3]), ((256, 320), [8, 4, 8])],
)
def test_factored_equals_dense_in_float32(method: MergeMethod, shape: tuple[int, ...], ranks: list[int]) -> None:
    """The cut-offs are the same, so that no direction is kept by one form and dropped by the other."""
    deltas = [d.to(torch.float32) for d in factors(shape, ranks)]
    out = merge_lowrank(method, deltas).value
    assert out.b_OR.dtype == out.a_RI.dtype == torch.float32
    assert (
        relative_error(out.dense(), merge_dense(method, [d.to(torch.float64).dense() for d in deltas])) <= F32_PRODUCT
    )
    if method.name not in NULL_SENSITIVE:
        assert relative_error(out.dense(), merge_dense(method, [d.dense() for d in deltas])) <= F32_PRODUCT


@each_factored
def test_a_zero_adapter_is_no_trouble(method: MergeMethod) -> None:
    deltas = factors((20, 24), [2, 2, 2])
    deltas[1] = LowRank(torch.zeros_like(deltas[1].b_OR), deltas[1].a_RI)
    out = merge_lowrank(method, deltas).value.dense()
    assert relative_error(out, merge_dense(method, [d.dense() for d in deltas])) <= 1e-10


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return out


@pytest.mark.parametrize(
    "method",
    [m for m in FACTORED if not m.needs_statistics and "statistics" not in m.needs],  # a Gram is itself I x I
    ids=lambda m: m.name,
)
def test_no_dense_matrix_is_formed(method: MergeMethod) -> None:
    deltas = factors((280, 300), [2, 3, 2])  # larger than the histograms of a selection, whose size is fixed
    ready = ready_lowrank(method, deltas)
    with Largest() as largest:
        ready()
    assert 0 < largest.numel < 280 * 300


@each_factored
def test_inputs_are_left_alone(method: MergeMethod) -> None:
    deltas = factors((20, 24), [2, 3])
    before = [(d.b_OR.clone(), d.a_RI.clone()) for d in deltas]
    merge_lowrank(method, deltas)
    assert all(torch.equal(b, d.b_OR) and torch.equal(a, d.a_RI) for (b, a), d in zip(before, deltas, strict=True))
