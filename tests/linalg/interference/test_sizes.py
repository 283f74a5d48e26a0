"""Deltas far from 1: the interference family solves their problem at a size that float32 holds."""

import pytest
import torch
from tests.helpers.spectra import random_deltas
from tests.tolerances import F32_SOLVE, relative_error
from torch import Tensor

from actmat.errors import NumericalError
from actmat.linalg.interference.rule import Estimator, Filter, InterferenceRule
from actmat.linalg.interference.solver import finish, prepare
from actmat.linalg.lowrank import LowRank
from actmat.linalg.scaling import exponent_of, scaled
from actmat.methods import get_method

RULES = {
    "hard": InterferenceRule(),
    "ridge": InterferenceRule(spectral=Filter("tikhonov"), null="mean"),
    "flow": InterferenceRule(spectral=Filter("exponential"), null="sum"),
    "power": InterferenceRule(Estimator(power=0.5)),
    "normalized": InterferenceRule(Estimator(normalize="norm"), null="sum"),
    "normalized power": InterferenceRule(Estimator(power=0.5, normalize="norm")),
    "centered": InterferenceRule(Estimator(center=True)),
    "stacked": InterferenceRule(solver="stacked"),
    "dual": InterferenceRule(solver="dual"),
}


def merged(deltas: list[Tensor], rule: InterferenceRule) -> tuple[Tensor, dict[str, float | int | str | bool]]:
    return finish(prepare(deltas, rule), rule)


def near(found: object, expected: object) -> bool:
    return found == expected if isinstance(expected, str) else bool(found == pytest.approx(expected, rel=1e-3))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("exponent", [-100, -50, 40, 60])
@pytest.mark.parametrize("shape", [(3, 9, 6), (2, 3, 12)], ids=["tall", "few rows"])
def test_value_and_record_are_those_of_float64(
    rule: InterferenceRule, exponent: int, shape: tuple[int, int, int]
) -> None:
    """Records are in the units of the deltas."""
    deltas = [scaled(d.float(), exponent) for d in random_deltas(*shape)]
    value, stats = merged(deltas, rule)
    exact, expected = merged([d.double() for d in deltas], rule)
    assert relative_error(value, exact) < F32_SOLVE
    assert stats.keys() == expected.keys()
    assert all(near(stats[name], expected[name]) for name in stats if name not in ("rtol", "solver"))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("exponents", [(-50, 0, -60), (0, -50, 50), (-100, -98, -102)])
def test_experts_and_batch_items_of_different_sizes(rule: InterferenceRule, exponents: tuple[int, ...]) -> None:
    """Sums are rescaled when a larger expert comes; each item of a batch has a size of its own."""
    items = [random_deltas(3, 9, 6, seed=s) for s in (1, 2)]
    first = [scaled(d.float(), e) for d, e in zip(items[0], exponents, strict=True)]
    second = [scaled(d.float(), -40) for d in items[1]]
    value, _ = merged([torch.stack(pair) for pair in zip(first, second, strict=True)], rule)
    for found, deltas in zip(value, (first, second), strict=True):
        assert relative_error(found, merged([d.double() for d in deltas], rule)[0]) < F32_SOLVE


@pytest.mark.parametrize("name", ["actmat", "wudi", "wudi adam", "swudi", "aswudi", "knots"])
def test_denormal_deltas_are_merged(name: str) -> None:
    name, _, optimizer = name.partition(" ")
    method, options = get_method(name), {"optimizer": optimizer} if optimizer else {}
    deltas = [scaled(d.float(), -145) for d in random_deltas(3, 9, 6)]
    assert all(0 < float(d.abs().max()) < torch.finfo(torch.float32).tiny for d in deltas)
    value = method.merge(deltas, **options).value
    assert value.isfinite().all()
    assert value.any()


@pytest.mark.parametrize("name", ["actmat", "wudi", "swudi", "knots"])
def test_small_factors_give_the_dense_answer(name: str) -> None:
    pairs = zip(random_deltas(3, 14, 2), random_deltas(3, 2, 18, seed=9), strict=True)
    deltas = [LowRank(scaled(b, -70), scaled(a, -50)) for b, a in pairs]
    method = get_method(name)
    options = method.resolve_options({"rule": "task_arithmetic"}) if name == "knots" else {}
    found = method.lowrank.merge(deltas, **options).value
    expected = method.merge([d.dense() for d in deltas], **options).value
    assert expected.any()
    assert relative_error(scaled(found.dense(), 120), scaled(expected, 120)) < F32_SOLVE


def test_the_absolute_cut_of_knots_holds_unless_it_drops_everything() -> None:
    knots = get_method("knots")
    large, small = torch.diag(torch.tensor([1.0, 1e-6])), torch.diag(torch.tensor([1e-6, 1e-7]))
    kept = knots.merge([large], rule="task_arithmetic")
    assert kept.stats["rank_max"] == 1
    spared = knots.merge([small], rule="task_arithmetic")
    assert spared.stats["rank_max"] == 2
    assert relative_error(spared.value, small) < F32_SOLVE
    assert not knots.merge([small], rule="task_arithmetic", atol=1e-5).value.any(), "a cut that was asked for holds"
    both = knots.merge([torch.stack([large, small])], rule="task_arithmetic")
    assert (both.stats["rank_min"], both.stats["rank_max"]) == (1, 2), "each matrix of a batch by itself"


def test_weights_beyond_the_compute_dtype_are_named() -> None:
    deltas = [d.float() for d in random_deltas(2, 4, 3)]
    with pytest.raises(NumericalError, match="1e\\+300, is beyond float32's range"):
        get_method("actmat").merge(deltas, weights=[1.0, 1e300])


def test_exponents() -> None:
    assert [exponent_of(x) for x in (0.0, 1.0, 1e-5, 1e8, float("nan"), float("inf"))] == [0] * 6
    assert exponent_of(1e-300) == -160
    for exponent in (-149, -140, -1, 0, 1, 127):
        assert float(scaled(torch.tensor(1.0), exponent)) == 2.0**exponent
