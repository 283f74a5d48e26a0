"""Deltas that are read a second time when the gain is known: the answers of the naive formula, in fewer products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.helpers.experts import LazyDeltas, Overlaid
from tests.helpers.spectra import random_deltas, with_spectrum
from tests.tolerances import F64_ORACLE, relative_error
from torch import Tensor

from actmat.linalg.interference import rereading
from actmat.linalg.interference.cost import operations
from actmat.linalg.interference.rereading import products, second_reading
from actmat.linalg.interference.rule import FLOAT32_EPS, Estimator, Filter, FilterKind, Rule
from actmat.linalg.interference.solver import finish, prepare
from actmat.linalg.interference.spectral_solve import EigenPairs, Inverse, Stats
from actmat.linalg.operations import total

EXPERTS, TALL, WIDE = 3, (260, 48), (40, 96)
CUT, LOW_CUT = 1e-5, 1e-6


@pytest.fixture(autouse=True)
def small_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of a test's size are read twice."""
    monkeypatch.setattr(rereading, "SMALLEST", 32)


def experts(shape: tuple[int, int], power: float, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Deltas with singular values `k^-power`."""
    values = torch.arange(1, min(shape) + 1, dtype=torch.float64).pow(-power)
    return [with_spectrum(*shape, values, seed=7 * t).to(dtype) for t in range(EXPERTS)]


def naive(deltas: Sequence[Tensor], rtol: float, grams: Sequence[Tensor] | None = None) -> Tensor:
    """`(sum_t D_t K_t) (sum_t K_t)^+` in float64, by eigenvectors."""
    deltas = [d.double() for d in deltas]
    grams = [d.mT @ d for d in deltas] if grams is None else grams
    values, vectors = torch.linalg.eigh(torch.stack(list(grams)).sum(0))
    kept = values > rtol * values[-1]
    target = torch.stack([d @ k for d, k in zip(deltas, grams, strict=True)]).sum(0)
    return (target @ vectors[:, kept] / values[kept]) @ vectors[:, kept].mT


CASES = {
    "tall, a part kept": (TALL, 3.0, 1e-4, "factors"),
    "tall, all kept": (TALL, 0.1, 1e-9, "grams"),
    "hardly tall, all kept": ((100, 48), 0.1, 1e-9, "numerator"),
    "wide, few kept": ((30, 88), 3.0, 1e-3, "factors"),
    "wide, half kept": (WIDE, 1.0, 2e-2, "factors"),
    "wide, nearly all kept": (WIDE, 0.1, 1e-9, "numerator"),
}


@pytest.mark.parametrize("case", list(CASES))
def test_the_answer_is_the_naive_formula_by_every_way(case: str) -> None:
    shape, power, rtol, way = CASES[case]
    deltas, rule = experts(shape, power), Rule(spectral=Filter(rtol=rtol))
    value, stats = finish(prepare(deltas, rule), rule)
    assert stats["second_reading"] == way
    assert relative_error(value, naive(deltas, rtol)) < F64_ORACLE
    once, once_stats = finish(prepare(deltas, replace(rule, solver="eigh")), replace(rule, solver="eigh"))
    assert "second_reading" not in once_stats
    assert stats["rank"] == once_stats["rank"]
    assert relative_error(value, once) < F64_ORACLE


@pytest.mark.parametrize("kept", [4, 30])
def test_few_directions_of_a_wide_matrix_spare_its_square(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`D^T (D X)` where few are kept, `(D D^T) X` where more are; each is exact."""
    squares = 0
    formed = rereading.gram_of_rows

    def counted(factors: Sequence[Tensor]) -> Tensor:
        nonlocal squares
        squares += 1
        return formed(factors)

    monkeypatch.setattr(rereading, "gram_of_rows", counted)
    values = torch.cat([torch.ones(kept), torch.full((40 - kept,), 1e-6)])
    left = torch.linalg.qr(torch.randn(96, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    deltas = [(d * values) @ left.mT for d in random_deltas(EXPERTS, 40, 40)]
    rule = Rule(spectral=Filter(rtol=LOW_CUT))
    value, stats = finish(prepare(deltas, rule), rule)
    assert (stats["rank"], stats["second_reading"]) == (kept, "factors")
    assert squares == (0 if kept == 4 else EXPERTS)
    assert relative_error(value, naive(deltas, LOW_CUT)) < F64_ORACLE


ESTIMATORS = {
    "trimmed": Estimator(trim=0.3),
    "centred": Estimator(centre=True),
    "root": Estimator(power=0.5),
    "normalised": Estimator(normalize="norm"),
    "all": Estimator(trim=0.5, centre=True, power=1.5, normalize="norm"),
}


def agreeing(rule: Rule, deltas: Sequence[Tensor]) -> tuple[Stats, Stats]:
    """Records of weighted merges in two readings and in one, which agree."""
    found = []
    for chosen in (rule, replace(rule, solver="eigh")):
        found.append(finish(prepare(deltas, chosen, weights=[1.0, 0.5, 2.0]), chosen))
    (twice, stats), (once, once_stats) = found
    assert "second_reading" in stats
    assert "second_reading" not in once_stats
    assert relative_error(twice, once) < F64_ORACLE
    return stats, once_stats


@pytest.mark.parametrize("name", list(ESTIMATORS))
@pytest.mark.parametrize("sizes", [(1.0, 1.0, 1.0), (1e-20, 1e-12, 1e-15), (1.0, 1e9, 1e-9)], ids=str)
def test_every_estimate_of_a_tall_matrix_is_kept_from_the_first_reading(name: str, sizes: tuple[float, ...]) -> None:
    """In any unit: what was added before a larger delta came is brought to its unit."""
    rule = Rule(ESTIMATORS[name], Filter(rtol=CUT))
    stats, once_stats = agreeing(rule, [s * d for s, d in zip(sizes, experts(TALL, 2.0), strict=True)])
    assert stats["rank"] == once_stats["rank"]
    if stats["solver"] == once_stats["solver"]:  # else it is proven that all is kept, with a bound of the cut-off
        assert math.isclose(float(stats["cutoff"]), float(once_stats["cutoff"]), rel_tol=F64_ORACLE)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("hard", TALL), ("hard", WIDE), ("adaptive", TALL), ("adaptive", WIDE), ("tikhonov", TALL), ("exponential", TALL)],
)
@pytest.mark.parametrize("sizes", [(1.0, 1.0, 1.0), (1e-9, 1.0, 1e12)], ids=str)
def test_every_filter_and_size(kind: FilterKind, shape: tuple[int, int], sizes: tuple[float, ...]) -> None:
    rule = Rule(spectral=Filter(kind, rtol=CUT))
    agreeing(rule, [s * d for s, d in zip(sizes, experts(shape, 1.0), strict=True)])


@pytest.mark.parametrize(("shape", "power"), [(TALL, 4.0), (WIDE, 4.0)], ids=["tall", "wide"])
def test_float32_is_not_further_from_float64_than_in_one_reading(shape: tuple[int, int], power: float) -> None:
    rtol = shape[1] * FLOAT32_EPS
    deltas, rule = experts(shape, power, torch.float32), Rule()
    twice, stats = finish(prepare(deltas, rule), rule)
    once, _ = finish(prepare(deltas, Rule(solver="eigh")), Rule(solver="eigh"))
    assert stats["second_reading"] == "factors"
    exact = naive(deltas, rtol)
    assert relative_error(twice, exact) <= relative_error(once, exact)


@pytest.mark.parametrize("shape", [TALL, WIDE, (1, *TALL)], ids=["tall", "wide", "batch of one"])
def test_one_delta_is_alive_at_a_time_and_each_is_read_twice(shape: tuple[int, ...]) -> None:
    deltas, rule = random_deltas(EXPERTS, *shape), Rule()
    lazy = LazyDeltas(deltas)
    value, stats = finish(prepare(lazy, rule), rule, consume=True)
    assert "second_reading" in stats
    assert lazy.reads == [2] * EXPERTS
    assert lazy.alive_before_read <= 1
    assert value.shape == shape
    assert torch.equal(finish(prepare(Overlaid(deltas), rule), rule)[0], value)
    state = prepare(deltas, rule)
    first, second = finish(state, rule)[0], finish(state, rule, consume=True)[0]
    assert torch.equal(first, value), "a state may be finished several times"
    assert torch.equal(second, value)


def test_experts_that_did_not_move_are_not_read_again() -> None:
    lazy = LazyDeltas([torch.zeros(TALL) for _ in range(EXPERTS)])
    value, stats = finish(prepare(lazy, Rule()), Rule())
    assert (stats["rank"], stats["solver"]) == (0, "primal/none")
    assert not bool(value.any())
    assert lazy.reads == [1] * EXPERTS


@pytest.mark.parametrize(
    ("rule", "shape", "n_experts", "expected"),
    [
        (Rule(), TALL, 3, "grams"),
        (Rule(), (48, 48), 4, "grams"),
        (Rule(), (48, 48), 5, None),  # five Gram matrices, where one reading holds one and `B`
        (Rule(), TALL, 8, "grams"),
        (Rule(), TALL, 9, None),
        (Rule(), WIDE, 3, "deltas"),
        (Rule(), WIDE, 2, None),  # the dual form is smaller
        (Rule(), (64, 31), 3, None),
        (Rule(), (2, *TALL), 3, None),
        (Rule(solver="eigh"), TALL, 3, None),
        (Rule(solver="stacked"), TALL, 3, None),
        (Rule(null="sum"), TALL, 3, None),
        (Rule(null="minus_base"), TALL, 3, None),
        (Rule(spectral=Filter("tikhonov")), TALL, 3, "grams"),
        (Rule(spectral=Filter("tikhonov")), (143, 48), 3, None),  # the same products
        (Rule(spectral=Filter("exponential")), WIDE, 3, None),
        (Rule(Estimator(trim=0.5)), TALL, 3, "grams"),
        (Rule(Estimator(trim=0.5)), WIDE, 3, None),
        (Rule(Estimator(normalize="norm")), WIDE, 3, None),
    ],
)
def test_what_is_read_twice(rule: Rule, shape: tuple[int, ...], n_experts: int, expected: str | None) -> None:
    assert second_reading(rule, shape, n_experts) == expected
    assert second_reading(rule, shape, n_experts, has_grams=True) is None


def test_products_of_each_way() -> None:
    """Counted by hand: 3 experts of 100 x 10, of which 4 directions are kept; and a wide 10 x 30, of which 5 are."""
    pairs = EigenPairs(torch.empty(10, 4), torch.empty(10, 4))
    assert products("grams", (100, 10), 3, pairs) == {
        "factors": 3 * (100 * 10 * 4 + 10 * 10 * 4) + 100 * 10 * 4,
        "grams": 3 * 100 * 10 * 10 + 2 * 30 * 10 * 4,
        "numerator": 3 * 100 * 10 * 10 + 2 * 100 * 10 * 4,
    }
    inverse = Inverse(torch.empty(10, 10), torch.float32)
    assert products("grams", (100, 10), 3, inverse) == {
        "grams": 3 * 100 * 10 * 10 + 30 * 10 * 10 + 333,
        "numerator": 3 * 100 * 10 * 10 + 100 * 10 * 10 + 333,
    }
    pairs = EigenPairs(torch.empty(30, 5), torch.empty(30, 5))
    assert products("deltas", (10, 30), 3, pairs) == {
        "factors": 3 * (10 * 30 * 5 + 2 * 10 * 30 * 5) + 10 * 30 * 5,
        "numerator": 3 * (10 * 10 * 30 + 10 * 10 * 30) + 2 * 10 * 30 * 5,
    }


@pytest.mark.parametrize(("kind", "spared"), [("hard", 0.3), ("tikhonov", 0.13)])
def test_planned_operations_are_fewer_than_in_one_reading(
    kind: FilterKind, spared: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head, half of whose directions are kept."""
    shape, rule = (32000, 2048), Rule(spectral=Filter(kind))
    twice = total(operations(shape, 3, rule, has_grams=False))
    monkeypatch.setattr(rereading, "SMALLEST", 10**6)
    once = total(operations(shape, 3, rule, has_grams=False))
    assert spared <= 1 - twice / once < spared + 0.05
