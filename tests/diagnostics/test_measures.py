"""Every measure against a naive float64 formula, on constructed spectra; dense, probed and factored agree."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.tolerances import F32_SOLVE, F64_IDENTITY
from torch import Tensor

from actmat.diagnostics.measure import PROBES, against_base, measure_dense, measure_lowrank
from actmat.linalg.lowrank import LowRank
from actmat.methods.actmat import ACTMAT

PRINTED = 1e-5
"""Numbers of a report have six significant digits."""

SHAPES = [(40, 24), (24, 40), (6, 40), (30, 30)]


def spectral(rows: int, columns: int, decay: float, seed: int) -> Tensor:
    """A delta with singular values `k^-decay` and random singular vectors, float64."""
    rng = torch.Generator().manual_seed(seed)
    u = torch.linalg.qr(torch.randn(rows, rows, generator=rng, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(columns, columns, generator=rng, dtype=torch.float64)).Q
    k = min(rows, columns)
    return 1e-3 * (u[:, :k] * torch.arange(1, k + 1, dtype=torch.float64) ** -decay) @ v[:, :k].T


def factored(rows: int, columns: int, rank: int, seed: int) -> LowRank:
    rng = torch.Generator().manual_seed(seed)
    b = torch.randn(rows, rank, generator=rng, dtype=torch.float64)
    return LowRank(0.1 * b, torch.randn(rank, columns, generator=rng, dtype=torch.float64))


def naive(deltas: Sequence[Tensor], merged: Tensor) -> dict[str, Any]:
    """Every number by its definition in docs/diagnostics.md."""
    total = torch.stack(list(deltas)).sum(0)

    def table(entry: Callable[[int, int], float]) -> list[list[float]]:
        return [[entry(s, t) for t in range(len(deltas))] for s in range(len(deltas))]

    return {
        "norms": [float(d.norm()) for d in deltas],
        "cosine": table(lambda s, t: float((deltas[s] * deltas[t]).sum() / deltas[s].norm() / deltas[t].norm())),
        "residual": [float(((merged - d) @ d.T).norm() / (d @ d.T).norm()) for d in deltas],
        "merged_norm": float(merged.norm()),
        "sum_norm": float(total.norm()),
    }


def flat(value: Any) -> list[float]:
    if isinstance(value, list | tuple):
        return [x for v in value for x in flat(v)]
    return [float("nan") if value is None else float(value)]


def differing(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> dict[str, Any]:
    """Fields of `expected` that were found to be something else."""
    return {
        k: (found[k], v)
        for k, v in expected.items()
        if flat(found[k]) != pytest.approx(flat(v), rel=tolerance, abs=tolerance, nan_ok=True)
    }


@pytest.mark.parametrize("decay", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_dense_measures_are_the_naive_ones(shape: tuple[int, int], decay: float) -> None:
    deltas = [spectral(*shape, decay, seed) for seed in range(3)]
    merged = ACTMAT.merge(deltas).value
    assert not differing(measure_dense(deltas, merged), naive(deltas, merged), PRINTED)


@pytest.mark.parametrize("shape", SHAPES)
def test_factored_measures_are_the_dense_ones(shape: tuple[int, int]) -> None:
    deltas = [factored(*shape, rank, seed) for seed, rank in enumerate([1, 3, 4])]
    merged = ACTMAT.lowrank.merge(deltas)
    expected = naive([d.dense() for d in deltas], merged.value.dense())
    for value in (merged.value, merged.value.dense()):
        assert not differing(measure_lowrank(deltas, value), expected, PRINTED)


def test_float32_measures_to_float32() -> None:
    deltas = [spectral(40, 24, 0.5, seed) for seed in range(3)]
    merged = ACTMAT.merge(deltas).value
    expected = naive(deltas, merged)
    found = measure_dense([d.float() for d in deltas], merged.float())
    assert not differing(found, expected, F32_SOLVE)


def test_the_scale_is_part_of_the_merged_delta() -> None:
    deltas = [spectral(20, 16, 0.5, seed) for seed in range(2)]
    merged = deltas[0] + deltas[1]
    assert measure_dense(deltas, merged, scale=0.4) == measure_dense(deltas, 0.4 * merged)
    low = [factored(20, 16, 2, seed) for seed in range(2)]
    value = LowRank(torch.cat([d.b_OR for d in low], 1), torch.cat([d.a_RI for d in low]))
    half = LowRank(0.4 * value.b_OR, value.a_RI)
    assert measure_lowrank(low, value, scale=0.4) == measure_lowrank(low, half)


def test_transposed_storage_gives_the_same() -> None:
    deltas = [spectral(20, 16, 0.5, seed) for seed in range(2)]
    turned = [d.T.contiguous().T for d in deltas]
    merged = deltas[0] - deltas[1]
    found, other = measure_dense(deltas, merged), measure_dense(turned, merged.T.contiguous().T)
    assert not differing(found, other, PRINTED)


@pytest.mark.parametrize("c", [0.0, 0.5, 1.0, 3.0])
def test_what_holds_whatever_the_probes(c: float) -> None:
    """`D* = c D_t` gives `rho_t = |1 - c|`."""
    full = spectral(300, 50, 0.7, 1)
    found = measure_dense([full, full], c * full, generator=torch.Generator().manual_seed(3))
    assert found["residual"][0] == pytest.approx(abs(1 - c), abs=PRINTED)


DEVIATION = 0.2
"""Largest relative standard deviation of a probed number, see docs/diagnostics.md; 0.17 is the largest measured."""


@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
def test_probes_estimate_the_exact_numbers(decay: float) -> None:
    draws = 30
    deltas = [spectral(400, 60, decay, seed) for seed in range(2)]
    merged = ACTMAT.merge(deltas).value
    exact = measure_dense(deltas, merged)
    found = [measure_dense(deltas, merged, generator=torch.Generator().manual_seed(s)) for s in range(draws)]
    ratios = torch.tensor([f["residual"] for f in found]) / torch.tensor(exact["residual"])
    spread = ratios.std(0)
    assert float(spread.max()) < DEVIATION
    assert bool(((ratios.mean(0) - 1).abs() < 4 * spread / math.sqrt(draws) + 0.02).all()), "biased"
    for field in ("norms", "cosine", "sum_norm", "merged_norm"):
        assert all(f[field] == exact[field] for f in found), "second order is never probed"


def test_few_rows_are_not_probed() -> None:
    deltas = [spectral(PROBES, 20, 0.5, seed) for seed in range(2)]
    found = measure_dense(deltas, deltas[0], generator=torch.Generator())
    assert found == measure_dense(deltas, deltas[0])


def test_zero_deltas_are_nothing() -> None:
    zero = torch.zeros(8, 6, dtype=torch.float64)
    delta = spectral(8, 6, 0.5, 0)
    found = measure_dense([zero, delta], delta)
    assert (found["norms"][0], found["residual"][0], found["cosine"][0][1]) == (0, 0, 0)
    assert measure_lowrank([LowRank(zero[:, :1], zero[:1])], zero)["norms"] == (0.0,)


def test_half_an_ulp_of_the_storage_dtype() -> None:
    """In bfloat16, numbers in [1, 2) are 2^-7 apart."""
    eps = torch.finfo(torch.bfloat16).eps
    found = against_base([2.0**-8 * 10, 0.0], 100, base_norm=1.5 * 10, eps=[eps, eps])
    assert found == {"relative_norms": (pytest.approx(2.0**-8 / 1.5, rel=PRINTED), 0.0), "snr": (1.0, 0.0)}
    assert against_base([1.0], 100, 0.0, [eps]) == {"relative_norms": None, "snr": None}
    assert against_base([1.0], 100, 1.0, None)["snr"] is None


def test_identities_of_the_residual() -> None:
    """The merge of one expert meets it exactly; ACTMat of independent row spaces meets all."""
    delta = spectral(12, 16, 0.3, 0)
    assert measure_dense([delta], ACTMAT.merge([delta]).value)["residual"][0] < F64_IDENTITY
    low = [factored(20, 16, 3, seed) for seed in range(3)]
    merged = ACTMAT.lowrank.merge(low)
    assert max(measure_lowrank(low, merged.value)["residual"]) < 1e-7  # the float64 Gram's square root
