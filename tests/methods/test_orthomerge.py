"""OrthoMerge against a transcription of its formula and of its published script, and rotations that W_0 leaves open."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.laws import law_gap
from tests.helpers.spectra import orthogonal, random_deltas
from tests.tolerances import F32_ELEMENTWISE, F64_ORACLE, relative_error
from torch import Tensor

from actmat.errors import NumericalError, RecipeError
from actmat.extras.research import tsv
from actmat.extras.research.orthomerge import generator_of, merge, nearest_rotation


def base_and_deltas(count: int, rows: int, columns: int, size: float = 0.1) -> tuple[Tensor, list[Tensor]]:
    base, *deltas = random_deltas(count + 1, rows, columns)
    return base, [size * d for d in deltas]


def rotation(columns: int, size: float, seed: int) -> Tensor:
    skew = size * random_deltas(1, columns, columns, seed=seed)[0]
    return torch.linalg.matrix_exp(skew - skew.T)


def cayley(matrix: Tensor) -> Tensor:
    eye = torch.eye(matrix.shape[0]).double()
    return torch.linalg.inv(matrix + eye) @ (matrix - eye)


def naive(base: Tensor, deltas: list[Tensor], *, conflict: bool, scaling: float) -> Tensor:
    """Plain inverses and SVDs, row by row."""
    mean, eye = sum(deltas) / len(deltas), torch.eye(base.shape[1]).double()
    generators, rests = [], []
    for delta in deltas:
        target = base + delta
        if conflict:
            target = torch.stack([b + d if float(d @ m) < 0 else b for b, d, m in zip(base, delta, mean, strict=True)])
        u, _, vh = torch.linalg.svd(base.T @ target)
        generators.append(cayley(u @ vh))
        rests.append(base + delta - base @ u @ vh)
    total = sum(generators)
    merged = total / total.norm() * sum(float(a.norm()) for a in generators) / len(deltas)
    turned = base @ torch.linalg.inv(eye - merged) @ (eye + merged)
    return turned + scaling * sum(rests) - base


@pytest.mark.parametrize("shape", [(3, 14, 14), (2, 20, 9)])
@pytest.mark.parametrize("targets", ["expert", "conflict"])
def test_equals_formula_and_script(shape, targets):
    base, deltas = base_and_deltas(*shape)
    found = merge(deltas, base=base, targets=targets)
    assert relative_error(found.value, naive(base, deltas, conflict=targets == "conflict", scaling=0.2)) < F64_ORACLE
    half = merge(deltas, base=base, targets=targets, scaling=0.5).value
    assert relative_error(half, naive(base, deltas, conflict=targets == "conflict", scaling=0.5)) < F64_ORACLE


def test_float32_is_near_float64():
    base, deltas = base_and_deltas(3, 16, 12)
    rough = [d.float() for d in deltas]
    found = merge(rough, base=base.float())
    assert found.value.dtype == torch.float32
    exact = merge([d.double() for d in rough], base=base.float().double())
    assert relative_error(found.value, exact.value) < F32_ELEMENTWISE


def test_a_rotated_base_leaves_no_residual():
    base, turn = random_deltas(1, 12, 7)[0], rotation(7, 0.05, 3)
    delta = base @ turn - base
    found = merge([delta], base=base, targets="expert")
    assert relative_error(found.value, delta) < 1e-10
    opposite = base @ turn.T - base
    both = merge([delta, opposite], base=base, targets="expert")
    assert relative_error(both.value, torch.zeros_like(delta)) < 1e-10 * float(base.norm())


def test_equal_experts_turn_as_far_as_one_and_conflict_nowhere():
    base, deltas = base_and_deltas(1, 12, 7)
    one, three = (merge(deltas * n, base=base, targets="expert", scaling=0.0).value for n in (1, 3))
    assert relative_error(three, one) < 1e-11
    script = merge(deltas * 3, base=base, targets="conflict", scaling=0.25)
    assert script.stats["angle_max"] == 0
    assert relative_error(script.value, 0.75 * deltas[0]) < 1e-13


@pytest.mark.parametrize("shape", [(2, 5, 12), (3, 12, 12)])
def test_open_rotations_are_the_nearest_to_the_identity(shape):
    """Where `W_0^T W` is singular, the answer is the limit of the polar factors of `W_0^T W + e I`."""
    base, deltas = base_and_deltas(*shape)
    if shape[1] == shape[2]:
        base = base @ torch.diag(torch.tensor([1.0] * 9 + [0.0] * 3).double())  # a base of lower rank
    target = base + deltas[0] * (base.abs().sum(0) > 0)
    found, _ = nearest_rotation(base, target)
    assert relative_error(found @ found.T, torch.eye(12).double()) < 1e-12
    u, _, vh = torch.linalg.svd(base.T @ target + 1e-9 * torch.eye(12).double())
    assert relative_error(found, u @ vh) < 1e-6
    largest = torch.linalg.svdvals(base.T @ target).sum()
    assert float(((base @ found) * target).sum()) == pytest.approx(float(largest), rel=1e-12)


def test_wide_layers_obey_rotations_of_their_inputs():
    base, deltas = base_and_deltas(3, 5, 11)
    turn = orthogonal(11, 4)
    turned = merge([d @ turn for d in deltas], base=base @ turn).value
    assert relative_error(turned, merge(deltas, base=base).value @ turn) < 1e-10


def test_ties_of_the_residuals():
    base, deltas = base_and_deltas(3, 10, 8)
    found = merge(deltas, base=base, rule="ties", density=0.3, targets="conflict")
    rests, turned = [], merge(deltas, base=base, scaling=0.0, targets="conflict").value
    mean = sum(deltas) / 3
    for delta in deltas:
        moved = delta * ((delta * mean).sum(1, keepdim=True) < 0)
        rests.append(base + delta - base @ nearest_rotation(base, base + moved)[0])
    kept = []
    for rest in rests:
        least = rest.abs().flatten().sort().values[int(80 * 0.7) - 1]
        kept.append(torch.where(rest.abs() >= least, rest, 0.0))
    want = torch.zeros_like(base)
    for i in range(10):
        for j in range(8):
            votes = [float(k[i, j]) for k in kept]
            agreeing = [v for v in votes if (v > 0 if sum(votes) >= 0 else v < 0)]
            want[i, j] = sum(agreeing) / max(1, len(agreeing))
    assert relative_error(found.value, turned + want) < 1e-10
    assert relative_error(merge(deltas, base=base, rule="ties", density=1.0).value, turned) > 0.1


def test_tsv_of_the_residuals():
    base, deltas = base_and_deltas(2, 10, 8)
    turned = merge(deltas, base=base, scaling=0.0, targets="expert").value
    rests = [base + d - base @ nearest_rotation(base, base + d)[0] for d in deltas]
    found = merge(deltas, base=base, rule="tsv", targets="expert").value
    assert relative_error(found, turned + tsv.merge(rests).value) < 1e-10


def test_zero_experts_keep_the_base_to_the_bit():
    base, deltas = base_and_deltas(2, 9, 7)
    assert law_gap("zeros", lambda d: merge(d, base=base).value, deltas) == 0
    padded = merge([*deltas, torch.zeros_like(base)], base=base, targets="expert")
    assert relative_error(padded.value, naive(base, [*deltas, 0 * base], conflict=False, scaling=0.2)) < F64_ORACLE


def test_reflections_are_no_rotations():
    """Every direction of the base weights is reversed by the expert in a direction that they hardly use."""
    base = random_deltas(1, 9, 4)[0] @ torch.diag(torch.tensor([1.0, 1.0, 1.0, 1e-3]).double())
    target = base @ torch.diag(torch.tensor([1.0, 1.0, 1.0, -1.0]).double())
    found, _ = nearest_rotation(base, target)
    assert float(torch.linalg.det(found)) == pytest.approx(1)
    assert relative_error(found @ found.T, torch.eye(4).double()) < 1e-12
    assert relative_error(base @ found, target) < 0.01
    assert bool(merge([target - base], base=base).value.isfinite().all())


def test_a_plane_turned_around_is_an_error():
    base = random_deltas(1, 9, 4)[0]
    flip = torch.diag(torch.tensor([1.0, 1.0, -1.0, -1.0]).double())
    with pytest.raises(NumericalError, match="turns a direction around"):
        merge([base @ flip - base], base=base, targets="expert")
    with pytest.raises(NumericalError, match="check the base"):
        generator_of(flip)


def test_the_base_is_needed():
    with pytest.raises(TypeError):
        merge(random_deltas(2, 4, 4))
    with pytest.raises(RecipeError, match="needs the base"):
        merge(random_deltas(2, 4, 4), base=None)


def test_batches_are_merged_element_by_element():
    base, *deltas = random_deltas(3, 3, 8, 6)
    deltas = [0.1 * d for d in deltas]
    deltas[0][1] = 0
    found = merge(deltas, base=base)
    for element in range(3):
        own = merge([d[element] for d in deltas], base=base[element])
        assert relative_error(found.value[element], own.value) < 1e-12
