"""Low-rank arithmetic and joint bases."""

import pytest
import torch
from tests.helpers.spectra import graded, random_deltas, random_lowrank, with_spectrum
from tests.tolerances import F64_IDENTITY, relative_error

from actmat.extras.research.joint import joint_basis
from actmat.linalg.lowrank import (
    LowRank,
    frobenius_norm,
    inner_products,
    orthonormal,
    padded,
    truncate,
    truncate_dense,
    weighted_sum,
)

# Truncation in factored form is the best approximation of its rank; norms and sums need no dense matrix.


@pytest.mark.parametrize(("condition", "dtype"), [(10, torch.float32), (1e6, torch.float32), (10, torch.float64)])
@pytest.mark.parametrize("zero", [False, True])
def test_bases_of_well_conditioned_columns_come_from_their_gram_matrix(condition, dtype, zero, monkeypatch):
    columns = graded(60, 8, condition) * torch.logspace(-6, 6, 8, dtype=torch.float64)  # columns of any size
    columns[:, 3] *= not zero
    calls, reflected = [], torch.linalg.qr
    monkeypatch.setattr(torch.linalg, "qr", lambda matrix: calls.append(matrix) or reflected(matrix))
    basis, r_NN = orthonormal(columns.to(dtype))
    assert bool(calls) == (condition > 10 or zero or dtype == torch.float64)
    q_MN = basis.dense()
    assert relative_error(q_MN.mT @ q_MN, torch.eye(8, dtype=torch.float64)) < 1e-9
    assert relative_error(q_MN @ r_NN, columns.to(dtype).double()) < F64_IDENTITY
    assert relative_error(basis.times(r_NN), q_MN @ r_NN) < F64_IDENTITY
    assert relative_error(basis.rows(r_NN), r_NN @ q_MN.mT) < F64_IDENTITY


@pytest.mark.parametrize("shape", [(20, 12), (12, 20), (3, 8, 6), (2, 30)])
def test_truncation_is_that_of_the_dense_svd(shape: tuple[int, ...]) -> None:
    delta = random_lowrank([5], *shape)[0]
    u, s, vh = torch.linalg.svd(delta.dense(), full_matrices=False)
    for rank in (1, 2, 4):
        reduced = truncate(delta, rank)
        best = u[..., :rank] @ torch.diag_embed(s[..., :rank]) @ vh[..., :rank, :]
        assert relative_error(reduced.value.dense(), best) <= 1e-12
        assert reduced.value.rank == rank
        assert reduced.norm == pytest.approx(float(delta.dense().norm()))
        assert reduced.error == pytest.approx(float((delta.dense() - best).norm()), abs=1e-12)


def test_enough_rank_is_exact_and_balanced() -> None:
    delta = random_lowrank([3], 9, 14)[0]
    reduced = truncate(delta, 6)  # padded with zeros
    assert relative_error(reduced.value.dense(), delta.dense()) <= 1e-13
    assert (reduced.error, reduced.value.rank) == (0, 6)
    assert float(reduced.value.b_OR.norm()) == pytest.approx(float(reduced.value.a_RI.norm()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(280, 400), (400, 280), (2, 260, 300)])
def test_a_dense_matrix_is_truncated_nearly_as_by_its_svd(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn(shape, generator=rng, dtype=torch.float64)
    delta = (random_lowrank([6], *shape)[0].dense() + 0.1 * noise).to(dtype)
    smallest = float(torch.linalg.svdvals(delta.double())[..., 8:].norm())
    reduced = truncate_dense(delta, 8)
    assert reduced.value.rank == 8
    assert reduced.norm == pytest.approx(float(delta.double().norm()))
    assert reduced.error == pytest.approx(float((delta.double() - reduced.value.dense()).norm()), rel=1e-5)
    assert smallest * (1 - 1e-6) <= reduced.error <= 1.01 * smallest
    assert float(reduced.value.b_OR.norm()) == pytest.approx(float(reduced.value.a_RI.norm()))


@pytest.mark.parametrize("shape", [(280, 400), (12, 20)])
def test_a_dense_matrix_of_the_rank_is_kept(shape: tuple[int, ...]) -> None:
    delta = random_lowrank([3], *shape)[0].dense()
    reduced = truncate_dense(delta, 5)
    assert relative_error(reduced.value.dense(), delta) <= 1e-13
    assert truncate_dense(torch.zeros(shape), 5).value.dense().any().logical_not()


@pytest.mark.parametrize("shape", [(9, 14), (3, 8, 6)])
def test_padding_moves_powers_of_two_and_changes_no_bit_of_the_delta(shape: tuple[int, ...]) -> None:
    delta = random_lowrank([4], *shape)[0]
    uneven = LowRank(delta.b_OR * torch.tensor([1e-9, 0.0, 7.0, 1e9], dtype=torch.float64), delta.a_RI)
    same = padded(uneven, 6)
    assert same.value.rank == 6
    assert torch.equal(same.value.dense(), torch.nn.functional.pad(uneven.b_OR, (0, 2)) @ same_rows(uneven, 6))
    assert (same.norm, same.error) == (pytest.approx(float(uneven.dense().norm())), 0)
    ratio_R = same.value.b_OR.norm(dim=-2) / same.value.a_RI.norm(dim=-1)
    assert bool(((ratio_R[..., [0, 2, 3]] > 0.25) & (ratio_R[..., [0, 2, 3]] < 4)).all())


def same_rows(delta: LowRank, rank: int) -> torch.Tensor:
    return torch.nn.functional.pad(delta.a_RI, (0, 0, 0, rank - delta.rank))


@pytest.mark.parametrize("batch", [(), (3,)])
def test_inner_products_are_those_of_the_dense_deltas(batch: tuple[int, ...]) -> None:
    deltas = [random_lowrank([rank], *batch, 20, 12, seed=rank)[0] for rank in (1, 3, 5)]
    flat_TN = torch.stack([d.dense().reshape(-1) for d in deltas])
    torch.testing.assert_close(inner_products(deltas), flat_TN @ flat_TN.mT, rtol=1e-13, atol=1e-12)


def test_a_zero_delta_stays_zero() -> None:
    delta = LowRank(torch.zeros(4, 2), torch.ones(2, 5))
    reduced = truncate(delta, 2)
    assert (reduced.norm, reduced.error) == (0, 0)
    assert not reduced.value.dense().any()


def test_norm_and_sum() -> None:
    one, two = random_lowrank([2], 6, 7, seed=1)[0], random_lowrank([3], 6, 7, seed=2)[0]
    total = weighted_sum([one, two], [0.5, -2])
    assert relative_error(total.dense(), 0.5 * one.dense() - 2 * two.dense()) <= 1e-14
    assert frobenius_norm(total) == pytest.approx(float(total.dense().norm()))


# Joint basis: both routes against the SVD of the concatenation.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_the_joint_range_is_kept(dtype):
    deltas = [d.dense().to(dtype) for d in random_lowrank([2] * 3, 20, 15)]
    assert joint_basis(deltas).s_R.shape == (6,)


def test_absolute_and_relative_floors_both_drop():
    deltas = [with_spectrum(8, 12, [10.0, 1.0, 1e-4])]
    assert joint_basis(deltas).s_R.shape == (3,)
    assert joint_basis(deltas, atol=1e-3).s_R.shape == (2,)
    assert joint_basis(deltas, rtol=0.5).s_R.shape == (1,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_zero_delta_has_coordinates_that_are_exactly_zero(dtype):
    deltas = [*random_deltas(2, 6, 9, dtype=dtype), torch.zeros(6, 9, dtype=dtype)]
    assert not joint_basis(deltas).coordinates(deltas[2]).any()


def test_lower_ranks_of_a_batch_are_padded_and_marked():
    batch = torch.stack([with_spectrum(5, 7, [2.0, 1.0, 0.5]), with_spectrum(5, 7, [1.0]), torch.zeros(5, 7)])
    basis = joint_basis([batch])
    assert basis.on_R.sum(-1).tolist() == [3, 1, 0]
    assert not basis.whitened(batch)[~basis.on_R].any()
    assert relative_error(basis.u_OR @ basis.coordinates(batch), batch) < 1e-12
