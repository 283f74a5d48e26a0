"""ESM against a direction-by-direction transcription of the authors' code."""

from __future__ import annotations

import torch
from tests.helpers.experts import Experts
from tests.tolerances import F64_ORACLE, relative_error
from torch import Tensor

from actmat.extras.research.esm import merge


def transcription(deltas: list[Tensor], inputs: list[Tensor], power: float, spread: float) -> Tensor:
    """Principal directions of the shifts `X D^T` by SVD, both scalings, and polar factors by SVD."""
    share = 1 / len(deltas)
    mean_norm = sum(d.norm() for d in deltas) / len(deltas)
    sum_u, sum_v = [], []
    for delta, x in zip(deltas, inputs, strict=True):
        _, s, vh = torch.linalg.svd(x @ delta.T, full_matrices=False)
        kept = int(min(delta.shape) * share)
        values, directions = (s**2)[:kept], vh.T[:, :kept]
        scale = (values / values.mean()) ** spread
        scale = scale / scale.mean()
        v = directions.T @ delta * (delta.norm() / mean_norm) ** power
        sum_u.append(directions * scale)
        sum_v.append(v * scale[:, None])
    u, v = torch.cat(sum_u, 1), torch.cat(sum_v, 0)
    columns = v.norm(dim=0)
    v = v * (columns / columns.mean()) ** power
    uu, us, uv = torch.linalg.svd(u, full_matrices=False)
    vu, vs, vv = torch.linalg.svd(v, full_matrices=False)
    return (uu @ uv * us.mean()) @ (vu @ vv * vs.mean()) * 2


def with_inputs(shape: tuple[int, int] = (12, 15)) -> tuple[list[Tensor], list[Tensor], dict[str, list[Tensor]]]:
    deltas = [d * (1 + t) for t, d in enumerate(Experts.random(3, shape).deltas)]
    rng = torch.Generator().manual_seed(1)
    inputs = [torch.randn((50, shape[1]), generator=rng, dtype=torch.float64) for _ in deltas]
    return deltas, inputs, {"gram": [x.T @ x for x in inputs]}


def test_it_is_the_authors_rule() -> None:
    deltas, inputs, statistics = with_inputs()
    for power, spread in ((2.0, 0.15), (1.0, 0.0)):
        expected = transcription(deltas, inputs, power, spread)
        found = merge(deltas, statistics=statistics, power=power, spread=spread)
        assert relative_error(found.value, expected) <= F64_ORACLE
        assert found.stats["directions_min"] == 4


def test_directions_without_effect_on_the_inputs_are_left_out() -> None:
    deltas, inputs, _ = with_inputs()
    thin = [x @ torch.diag((torch.arange(15) < 2).double()) for x in inputs]  # two inputs only
    found = merge(deltas, statistics={"gram": [x.T @ x for x in thin]})
    assert found.stats["directions_min"] == 2
    assert torch.linalg.matrix_rank(found.value) == 6
    assert not merge(deltas, statistics={"gram": [torch.zeros(15, 15).double()] * 3}).value.any()


def test_the_scale_of_the_statistics_does_not_matter() -> None:
    deltas, _, statistics = with_inputs()
    found = merge(deltas, statistics=statistics).value
    larger = {"gram": [7.0 * g for g in statistics["gram"]]}
    assert relative_error(merge(deltas, statistics=larger).value, found) <= F64_ORACLE
    assert relative_error(merge([3 * d for d in deltas], statistics=statistics).value, 3 * found) <= F64_ORACLE


def test_a_stack_is_merged_matrix_by_matrix() -> None:
    deltas, _, statistics = with_inputs()
    stacks = [torch.stack([d, d.flip(0)]) for d in deltas]
    found = merge(stacks, statistics=statistics).value
    assert relative_error(found[0], merge(deltas, statistics=statistics).value) <= F64_ORACLE
