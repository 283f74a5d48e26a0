"""Rules solved on a part of the spectrum: the same answers as on all of it, and on the record."""

import pytest
import torch
from tests.helpers.interference import naive, self_grams
from tests.helpers.spectra import with_spectrum
from tests.tolerances import F32_PRODUCT, F64_ORACLE, relative_error
from torch import Tensor

from actmat.linalg import krylov
from actmat.linalg.interference import moments, spectral_solve
from actmat.linalg.interference.rule import Estimator, Filter, InterferenceRule, Normalizer
from actmat.linalg.interference.solver import finish, prepare

ROWS, WIDTH, EXPERTS = 300, 560, 2
DUAL_RTOL = 2.0**-13


@pytest.fixture(autouse=True)
def small_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks in proportion to matrices of a test's size."""
    monkeypatch.setattr(krylov, "BLOCK", 8)
    monkeypatch.setattr(moments, "SMALLEST", 64)
    monkeypatch.setattr(spectral_solve, "SMALLEST", 64)


def flat_experts(rows: int, scale: float = 1.0) -> list[Tensor]:
    """Three deltas of independent entries; as many rows in all as columns leave a few directions near zero."""
    return [scale * torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(t)) for t in range(3)]


def experts(power: float, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Deltas with singular values `k^-power`."""
    values = torch.arange(1, ROWS + 1, dtype=torch.float64).pow(-power)
    return [with_spectrum(ROWS, WIDTH, values, seed=7 * t).to(dtype) for t in range(EXPERTS)]


@pytest.mark.parametrize("power", [1.5, 3.0])
def test_float64_answer_is_the_naive_formula(power: float) -> None:
    deltas = experts(power)
    value, stats = finish(prepare(deltas, InterferenceRule()), InterferenceRule())
    assert stats["solver"] == "primal/lanczos"
    assert 0 < int(stats["rank"]) < WIDTH / 2
    assert relative_error(value, naive(deltas, self_grams(deltas))) < F64_ORACLE


@pytest.mark.parametrize(("scale", "solver"), [(1.0, "lanczos"), (1e-20, "lanczos"), (1e-42, "eigh")], ids=str)
def test_float32_answer_is_as_near_to_float64_as_that_of_the_whole_spectrum(scale: float, solver: str) -> None:
    """Deltas of 1e-42 are denormal numbers of float32: their rounding is a flat spectrum above the cut-off."""
    deltas = [(d * scale).float() for d in experts(1.5)]
    unscaled = [d.double() / scale for d in deltas]
    exact = naive(unscaled, self_grams(unscaled))
    part, stats = finish(prepare(deltas, InterferenceRule()), InterferenceRule())
    full, full_stats = finish(prepare(deltas, InterferenceRule(solver="eigh")), InterferenceRule(solver="eigh"))
    assert (stats["solver"], full_stats["solver"]) == (f"primal/{solver}", "primal/eigh")
    assert stats["rank"] == full_stats["rank"]
    assert relative_error(part.double() / scale, exact) <= 1.01 * relative_error(full.double() / scale, exact)


def test_the_dual_form_takes_a_part_too() -> None:
    rule = InterferenceRule(solver="auto", spectral=Filter(rtol=DUAL_RTOL))
    deltas = [d[:200] for d in experts(1.5)]
    value, stats = finish(prepare(deltas, rule), rule)
    assert stats["solver"] == "dual/lanczos"
    assert relative_error(value, naive(deltas, self_grams(deltas), rtol=DUAL_RTOL)) < F64_ORACLE


@pytest.mark.parametrize("kind", ["hard", "adaptive"])
@pytest.mark.parametrize("null", ["zero", "sum", "minus_base"])
def test_filters_that_cut_and_fills_agree_with_the_whole_spectrum(kind: str, null: str) -> None:
    deltas, base = experts(1.5), torch.ones(ROWS, WIDTH, dtype=torch.float64)
    answers = []
    for solver in ("auto", "eigh"):
        rule = InterferenceRule(spectral=Filter(kind), null=null, solver=solver)
        answers.append(finish(prepare(deltas, rule), rule, base=base))
    assert [stats["solver"] for _, stats in answers] == ["primal/lanczos", "primal/eigh"]
    assert answers[0][1]["rank"] == answers[1][1]["rank"]
    assert relative_error(answers[0][0], answers[1][0]) < F64_ORACLE


def test_a_refusal_costs_no_accuracy() -> None:
    deltas = experts(1.0)
    value, stats = finish(prepare(deltas, InterferenceRule()), InterferenceRule())
    assert stats["solver"] == "primal/eigh"
    assert relative_error(value, naive(deltas, self_grams(deltas))) < F64_ORACLE


def test_a_proof_that_fails_late_spares_the_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but one direction lie far above the cut-off: a quarter of S is factorized, and all of it fails."""
    values = torch.ones(WIDTH, dtype=torch.float64)
    values[-1] = 0.0
    deltas = [with_spectrum(WIDTH, WIDTH, values, seed=1)]
    monkeypatch.setattr(spectral_solve, "largest", lambda _: (1.0, 0.0))
    monkeypatch.setattr(krylov, "_Basis", None)
    stats = finish(prepare(deltas, InterferenceRule()), InterferenceRule())[1]
    assert stats["solver"] == "primal/eigh"
    assert stats["rank"] == WIDTH - 1


def test_small_matrices_and_other_filters_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    deltas = experts(1.5)
    monkeypatch.setattr(krylov, "_Basis", None)
    for rule in (InterferenceRule(spectral=Filter("exponential")), InterferenceRule(solver="eigh")):
        finish(prepare(deltas, rule), rule)
    monkeypatch.setattr(moments, "SMALLEST", WIDTH + 1)
    monkeypatch.setattr(spectral_solve, "SMALLEST", WIDTH + 1)
    stats = finish(prepare(deltas, InterferenceRule()), InterferenceRule())[1]
    assert stats["solver"] == "primal/eigh"


def test_rules_that_share_sums_share_the_part_if_it_is_enough() -> None:
    deltas = experts(1.5)
    low, high = (InterferenceRule(spectral=Filter(rtol=rtol)) for rtol in (1e-4, 1e-2))
    state = prepare(deltas, low)
    ranks = []
    for rule, solver in (
        (low, "lanczos"),
        (high, "lanczos"),
        (InterferenceRule(spectral=Filter("exponential")), "eigh"),
    ):
        value, stats = finish(state, rule)
        alone, _ = finish(prepare(deltas, rule), rule)
        assert stats["solver"] == f"primal/{solver}"
        assert relative_error(value, alone) < F64_ORACLE
        ranks.append(stats.get("rank"))
    assert ranks[0] > ranks[1]
    part = prepare(deltas, high).items[0]
    assert part.spectrum_above(1e-2).values_N.numel() < part.spectrum_above(1e-4).values_N.numel()
    assert not part.has_spectrum
    assert part.coordinates(torch.eye(WIDTH, dtype=torch.float64), 200).shape == (WIDTH, 200)
    assert part.has_spectrum, "200 directions are more than the part holds"


@pytest.mark.parametrize("scale", [1.0, 1e-20])
@pytest.mark.parametrize(("rows", "solver"), [(189, "inverse"), (220, "cholesky"), (160, "cholesky")])
def test_where_nearly_all_directions_are_kept_the_others_are_computed(rows: int, solver: str, scale: float) -> None:
    """The same number of directions as by the whole spectrum, and as near to float64."""
    deltas = flat_experts(rows, scale)
    unscaled = [d.double() / scale for d in deltas]
    exact = naive(unscaled, self_grams(unscaled))
    part, stats = finish(prepare(deltas, InterferenceRule()), InterferenceRule())
    full, full_stats = finish(prepare(deltas, InterferenceRule(solver="eigh")), InterferenceRule(solver="eigh"))
    assert str(stats["solver"]).endswith(f"/{solver}")
    if str(stats["solver"]).startswith("primal"):
        assert stats["rank"] == full_stats["rank"]
    assert relative_error(part.double() / scale, exact) <= 1.05 * relative_error(full.double() / scale, exact)


@pytest.mark.parametrize("scales", [(1.0, 1.0, 0.0), (1e-15, 1e15, 1.0), (1e15, 1e-15, 1.0)], ids=str)
@pytest.mark.parametrize("normalize", ["none", "norm"])
def test_products_of_an_experts_own_rows_are_blocks_of_the_gram_matrix(
    monkeypatch: pytest.MonkeyPatch, scales: tuple[float, ...], normalize: Normalizer
) -> None:
    deltas = [scale * d for scale, d in zip(scales, flat_experts(120), strict=True)]
    rule = InterferenceRule(Estimator(normalize=normalize), Filter("tikhonov"))
    by_blocks, stats = finish(prepare(deltas, rule, weights=[0.5, 2.0, 1.0]), rule)
    monkeypatch.setattr(moments, "SMALLEST", 10_000)
    by_products, _ = finish(prepare(deltas, rule, weights=[0.5, 2.0, 1.0]), rule)
    assert stats["solver"] == "dual/cholesky"
    assert relative_error(by_blocks, by_products) < F32_PRODUCT
