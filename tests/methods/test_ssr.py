"""SSR-Merge against the authors' router, the least-squares problem, and RegMean."""

import torch
from tests.helpers.spectra import gaussian_of
from tests.tolerances import F64_ORACLE, relative_error
from torch import Tensor

from actmat.extras.research.ssr import merge
from actmat.linalg.lowrank import LowRank
from actmat.methods import get_method


def adapters(rows: int = 9, columns: int = 14, ranks: tuple[int, ...] = (2, 3)) -> tuple[list[LowRank], list[Tensor]]:
    """Factors, and inputs of each task side by side (`I x N`)."""
    gaussian = gaussian_of(3)
    return [LowRank(gaussian(rows, r), gaussian(r, columns)) for r in ranks], [gaussian(columns, 40) for _ in ranks]


def grams_of(inputs: list[Tensor]) -> dict[str, list[Tensor]]:
    return {"gram": [x @ x.mT for x in inputs]}


def test_without_a_ridge_it_is_the_router_of_the_paper() -> None:
    pairs, inputs = adapters()
    stacked_a, stacked_b = torch.cat([p.a_RI for p in pairs]), torch.cat([p.b_OR for p in pairs], 1)
    gram, guide, start = 0.0, [], 0
    for pair, x in zip(pairs, inputs, strict=True):  # Z_k = A_comb X_k, H_k = A_k X_k, R = Q G^-1
        z = stacked_a @ x
        gram = gram + z @ z.mT
        guide.append(z[start : start + pair.rank] @ z.mT)
        start += pair.rank
    router = torch.cat(guide) @ torch.linalg.inv(gram)
    expected = stacked_b @ router @ stacked_a
    found = merge([p.dense() for p in pairs], statistics=grams_of(inputs), ridge=0.0)
    assert relative_error(found.value, expected) <= F64_ORACLE
    assert found.stats["rank_max"] == 5


def test_with_rows_of_full_rank_it_is_regmean() -> None:
    pairs, inputs = adapters(rows=9, columns=6, ranks=(6, 6))
    given = {"statistics": grams_of(inputs)}
    deltas = [p.dense() for p in pairs]
    expected = get_method("regmean").merge(deltas, **given, rtol=0.0).value
    assert relative_error(merge(deltas, **given, ridge=0.0).value, expected) <= 1e-9


def test_factors_give_the_same_and_experts_may_share_rows() -> None:
    pairs, inputs = adapters()
    shared = [*pairs, LowRank(pairs[0].b_OR.flip(0), pairs[0].a_RI)]
    given = {"statistics": grams_of([*inputs, inputs[0].flip(1) * 2])}
    method = get_method("ssr")
    dense = method.merge([p.dense() for p in shared], **given)
    factored = method.lowrank.merge(shared, **given)
    assert relative_error(factored.value.dense(), dense.value) <= F64_ORACLE
    assert factored.stats["rank_max"] == dense.stats["rank_max"] == 5


def test_the_ridge_is_relative() -> None:
    pairs, inputs = adapters()
    deltas = [p.dense() for p in pairs]
    found = merge(deltas, statistics=grams_of(inputs), ridge=0.5).value
    large = {"gram": [1e6 * g for g in grams_of(inputs)["gram"]]}
    assert relative_error(merge(deltas, statistics=large, ridge=0.5).value, found) <= F64_ORACLE
    assert float(found.norm()) < float(merge(deltas, statistics=large, ridge=0.0).value.norm())
    nothing = {"gram": [torch.zeros_like(g) for g in large["gram"]]}
    assert not merge(deltas, statistics=nothing).value.any()
