"""Pico against a plain transcription of its equations, its laws, and its refusals."""

from __future__ import annotations

import pytest
import torch
from tests.tolerances import F64_ORACLE
from torch import Tensor

from actmat.errors import RecipeError
from actmat.extras.research.matrices import merge_matrices
from actmat.methods import get_method
from actmat.methods.spaces import space_problems, space_words

Pairs = list[tuple[Tensor, Tensor]]

METHODS = ("average", "task_arithmetic", "actmat", "tsv", "dc_merge", "cart")


def adapters(rows: int = 12, columns: int = 16, ranks: tuple[int, ...] = (2, 3, 2), *, shared: float = 3.0) -> Pairs:
    """Factors with one output direction that all experts share."""
    rng = torch.Generator().manual_seed(7)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    common = gaussian(rows, 1)
    return [(gaussian(rows, r) + shared * common, gaussian(r, columns)) for r in ranks]


def dense(pairs: Pairs) -> list[Tensor]:
    return [b @ a for b, a in pairs]


def calibrated(pairs: Pairs) -> list[Tensor]:
    """The paper's equations, direction by direction: `s_j = sigma_j^2 / sum`, `alpha_j = 1 / (1 + (T - 1) s_j)`."""
    u, sigma, _ = torch.linalg.svd(torch.cat([b for b, _ in pairs], 1), full_matrices=False)
    out = []
    for b, a in pairs:
        moved = b.clone()
        for j in range(len(sigma)):
            score = float(sigma[j] ** 2 / (sigma**2).sum())
            alpha = 1 / (1 + (len(pairs) - 1) * score)
            moved += (alpha - 1) * torch.outer(u[:, j], u[:, j] @ b)
        out.append(moved @ a)
    return out


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("method", METHODS)
def test_the_method_sees_calibrated_deltas_and_the_result_has_the_mean_norm(method: str) -> None:
    pairs = adapters()
    expected = merge_matrices(method, calibrated(pairs))
    assert distance(merge_matrices(method, pairs, space="pico_unscaled"), expected) <= F64_ORACLE
    mean = sum(float(d.norm()) for d in dense(pairs)) / len(pairs)
    found = merge_matrices(method, pairs, space="pico")
    assert distance(found, expected * mean / expected.norm()) <= F64_ORACLE
    assert distance(found, merge_matrices(method, dense(pairs))) > 1e-2  # it is another merge


def test_a_direction_that_all_share_is_damped_most() -> None:
    pairs = adapters(shared=20.0)
    u = torch.linalg.svd(torch.cat([b for b, _ in pairs], 1), full_matrices=False).U
    before, after = dense(pairs), calibrated(pairs)
    kept = [float((u.mT @ x).norm(dim=1)[0] / (u.mT @ y).norm(dim=1)[0]) for x, y in zip(after, before, strict=True)]
    assert max(kept) < 0.4  # towards 1 / T
    found = merge_matrices("task_arithmetic", pairs, space="pico_unscaled")
    plain = merge_matrices("task_arithmetic", dense(pairs))
    ratio = (u.mT @ found).norm(dim=1) / (u.mT @ plain).norm(dim=1)
    assert int(ratio.argmin()) == 0


def test_one_expert_and_experts_without_the_module_change_nothing() -> None:
    pairs = adapters()
    assert distance(merge_matrices("average", pairs[:1], space="pico"), dense(pairs)[0]) <= F64_ORACLE
    zero = (torch.zeros(12, 2, dtype=torch.float64), torch.zeros(2, 16, dtype=torch.float64))
    found = merge_matrices("task_arithmetic", [*pairs, zero], space="pico")
    assert distance(found, merge_matrices("task_arithmetic", pairs, space="pico")) <= F64_ORACLE
    assert not merge_matrices("average", [zero, zero], space="pico").any()


def test_the_order_of_experts_changes_nothing() -> None:
    pairs = adapters()
    found = merge_matrices("cart", pairs, space="pico")
    assert distance(merge_matrices("cart", pairs[::-1], space="pico"), found) <= F64_ORACLE


def test_methods_without_a_form_on_factors_are_refused() -> None:
    chosen = get_method("ties")
    problems = space_problems("pico", chosen, chosen.resolve_options({}), 3)
    assert any("acts on single entries" in p and "dc_merge" in p for p in problems)


def test_a_call_in_a_space_that_does_not_serve_is_refused() -> None:
    with pytest.raises(RecipeError, match="cannot merge in this space"):
        merge_matrices("ties", adapters(), space="pico")


def test_the_plan_says_what_is_done() -> None:
    method = get_method("tsv")
    assert "mean norm" in space_words("pico", method, method.resolve_options({}))
    assert "mean norm" not in space_words("pico_unscaled", method, method.resolve_options({}))
