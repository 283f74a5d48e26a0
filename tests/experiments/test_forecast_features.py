"""Every number of a forecast against its formula, written out naively in float64."""

from __future__ import annotations

import math

import pytest
import torch
from tests.tolerances import F64_ORACLE
from torch import Tensor

from actmat.extras.collect.outputs import output_features
from actmat_experiments.forecast.features import FEATURES, Leading, activation_features, energies, features

SHAPES = ((7, 5), (4, 9))


def draw(seed: int, shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def layers() -> list[tuple[list[Tensor], Tensor, Tensor]]:
    """Two layers: three deltas, a merged delta and a base each."""
    return [
        ([draw(10 * k + t, shape) for t in range(3)], draw(10 * k + 5, shape), 3 * draw(10 * k + 6, shape))
        for k, shape in enumerate(SHAPES)
    ]


def found_of(layers: list[tuple[list[Tensor], Tensor, Tensor]]) -> dict[str, list[float]]:
    return features([energies(deltas, merged, base) for deltas, merged, base in layers])


def square(matrix: Tensor) -> float:
    return float((matrix * matrix).sum())


def projectors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    u, _, vh = torch.linalg.svd(matrix)
    return u[:, :rank] @ u[:, :rank].T, vh[:rank].T @ vh[:rank]


def effective_rank(matrix: Tensor) -> int:
    return math.ceil(square(matrix) ** 2 / square(matrix @ matrix.T))


def root(matrix: Tensor) -> Tensor:
    _, values, vh = torch.linalg.svd(matrix, full_matrices=False)
    return vh.T @ torch.diag(values) @ vh  # its square is D^T D


def naive(layers: list[tuple[list[Tensor], Tensor, Tensor]], t: int) -> dict[str, float]:
    """One expert, one loop over layers, as the docs say it."""
    own = sum(square(d[t]) for d, _, _ in layers)
    everyone = [sum(square(d[s]) for d, _, _ in layers) for s in range(3)]
    merged = sum(square(m) for _, m, _ in layers)
    base = sum(square(w) for _, _, w in layers)
    total = sum(square(d[0] + d[1] + d[2]) for d, _, _ in layers)
    apart = sum(square(m - d[t]) for d, m, _ in layers)
    inner = sum(float((m * d[t]).sum()) for d, m, _ in layers)
    rho = sum(square((m - d[t]) @ d[t].T) / square(d[t] @ d[t].T) * square(d[t]) for d, m, _ in layers) / own
    top = rooted = own_rooted = worst = inputs = own_inputs = inputs_base = 0.0
    rows = columns = out_merged = out_own = overlap = 0.0
    for d, m, w in layers:
        e = m - d[t]
        top += float(torch.linalg.svdvals(m)[0] / torch.linalg.svdvals(d[t])[0]) ** 2
        rooted += float(torch.trace(e @ root(d[t]) @ e.T))
        own_rooted += float(torch.trace(d[t] @ root(d[t]) @ d[t].T))
        worst = max(worst, math.sqrt(square(e) / square(w)))
        inputs += square(e @ w.T)
        own_inputs += square(d[t] @ w.T)
        inputs_base += square(e @ w.T) / square(w @ w.T)
        left, right = projectors(d[t], effective_rank(d[t]))
        rows += square(m - m @ right)
        columns += square(m - left @ m)
        left, right = projectors(w, effective_rank(w))
        out_merged += square(m) - square(left @ m @ right)
        out_own += square(d[t]) - square(left @ d[t] @ right)
        shares = [square(d[s] @ d[t].T) * w.shape[1] / (square(d[s]) * square(d[t])) for s in range(3) if s != t]
        overlap += sum(shares) / 2 * square(d[t]) / own
    return {
        "residual": math.sqrt(rho),
        "residual_root": math.sqrt(rooted / own_rooted),
        "distance": math.sqrt(apart / own),
        "distance_base": math.sqrt(apart / base),
        "distance_base_worst": worst,
        "distance_inputs": math.sqrt(inputs / own_inputs),
        "distance_inputs_base": math.sqrt(inputs_base / 2),
        "misalignment": 1 - inner / own,
        "angle": 1 - inner / math.sqrt(merged * own),
        "inflation": math.sqrt(merged / (sum(everyone) / 3)),
        "inflation_sum": math.sqrt(merged / total),
        "inflation_own": math.sqrt(merged / own),
        "inflation_top": math.sqrt(top / 2),
        "merged_base": math.sqrt(merged / base),
        "own_base": math.sqrt(own / base),
        "foreign_rows": math.sqrt(rows / own),
        "foreign_columns": math.sqrt(columns / own),
        "outside_base": (out_merged / merged) / (out_own / own),
        "overlap": overlap,
    }


def test_every_number_is_its_formula(layers: list[tuple[list[Tensor], Tensor, Tensor]]) -> None:
    found = found_of(layers)
    assert set(found) == set(FEATURES)
    for t in range(3):
        expected = naive(layers, t)
        assert {name: found[name][t] for name in FEATURES} == pytest.approx(expected, rel=F64_ORACLE)


def test_numbers_that_are_known_change_nothing(layers: list[tuple[list[Tensor], Tensor, Tensor]]) -> None:
    deltas, merged, base = layers[0]
    known = [Leading.of(x) for x in (*deltas, base)]
    assert features([energies(deltas, merged, base, leading=known)]) == features([energies(deltas, merged, base)])


def test_the_expert_itself_loses_nothing() -> None:
    delta, base = draw(0, (6, 6)), draw(1, (6, 6))
    found = features([energies([delta], delta, base)])
    for name in ("residual", "residual_root", "distance", "distance_base", "distance_inputs", "misalignment", "angle"):
        assert found[name] == pytest.approx([0.0], abs=1e-7)
    assert found["inflation_own"] == pytest.approx([1.0])


def test_an_expert_without_delta_divides_nothing_by_zero() -> None:
    deltas, base = [draw(0, (5, 4)), torch.zeros(5, 4)], draw(1, (5, 4))
    found = features([energies(deltas, deltas[0] / 2, base)])
    assert all(math.isfinite(v) for values in found.values() for v in values)
    assert found["distance"][1] == 0.0
    assert found["distance_base"][1] > 0.0


def test_numbers_do_not_depend_on_the_units_of_deltas() -> None:
    deltas, merged, base = [draw(t, (5, 6)) for t in range(2)], draw(7, (5, 6)), draw(8, (5, 6))
    plain = features([energies(deltas, merged, base)])
    scaled = features([energies([100 * d for d in deltas], 100 * merged, 100 * base)])
    for name in FEATURES:
        assert scaled[name] == pytest.approx(plain[name], rel=F64_ORACLE)


def test_activations_are_summed_over_tokens() -> None:
    inputs, deltas, merged, weights = (
        [draw(10 * k + j, shape) for k, shape in enumerate(shapes)]
        for j, shapes in enumerate((((30, 5), (30, 9)), SHAPES, SHAPES, SHAPES))
    )
    found = activation_features(deltas, merged, weights, [z.T @ z for z in inputs])
    residual = error = 0.0
    for z, d, m, w in zip(inputs, deltas, merged, weights, strict=True):
        apart = sum(float(((m - d) @ row).square().sum()) for row in z)
        residual += apart / sum(float((d @ row).square().sum()) for row in z) / 2
        error += apart / sum(float((w @ row).square().sum()) for row in z) / 2
    assert found["activation_residual"] == pytest.approx(math.sqrt(residual), rel=F64_ORACLE)
    assert found["activation_error"] == pytest.approx(math.sqrt(error), rel=F64_ORACLE)


def test_the_base_has_an_activation_residual_of_one() -> None:
    delta, weight, z = draw(0, (4, 3)), draw(1, (4, 3)), draw(2, (9, 3))
    found = activation_features([delta], [torch.zeros_like(delta)], [weight], [z.T @ z])
    assert found["activation_residual"] == pytest.approx(1.0)


def test_answers_are_compared_input_by_input() -> None:
    merged = torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0]])
    expert = torch.tensor([[1.0, 2.0], [0.0, 3.0], [1.0, 0.0]])
    found = output_features(merged, expert)
    p = math.exp(1) / (math.exp(1) + math.exp(2))
    divergence = (p * math.log(p / (1 - p)) + (1 - p) * math.log((1 - p) / p)) / 3
    assert found["disagreement"] == pytest.approx(1 / 3)
    assert found["divergence"] == pytest.approx(divergence)
    assert output_features(expert, expert) == {"disagreement": 0.0, "divergence": 0.0}
