"""Singular values and decompositions, and calls that LAPACK fails at first."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.lapack import failing
from tests.helpers.spectra import attempts_at_parts, graded, random_deltas, symmetric, with_spectrum
from tests.tolerances import F32_ELEMENTWISE, F64_IDENTITY, relative_error

from actmat.errors import NumericalError
from actmat.linalg import svd
from actmat.linalg.lapack import eigh, retry_stats
from actmat.linalg.lowrank import LowRank
from actmat.linalg.svd import RANK_RTOL, numerical_range, orthogonal_svd, thin_svd

# Thin SVD: both routes against LAPACK in float64, on constructed spectra, at the edge of the numerical range.


SHAPES = [(12, 12), (9, 31), (31, 9), (7, 40), (1, 5), (5, 1)]


def rebuilt(parts: svd.ThinSVD) -> torch.Tensor:
    return (parts.u_OK * parts.s_K.unsqueeze(-2)) @ parts.v_IK.mT


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-13)])
def test_triplets_rebuild_the_matrix_and_are_orthonormal(shape, dtype, bound):
    (matrix,) = random_deltas(1, *shape, dtype=dtype)
    parts = thin_svd(matrix)
    eye = torch.eye(min(shape), dtype=torch.float64)
    assert relative_error(rebuilt(parts), matrix) < bound * 10
    assert relative_error(parts.u_OK.mT @ parts.u_OK, eye) < bound * 1e3
    assert relative_error(parts.v_IK.mT @ parts.v_IK, eye) < bound * 1e3
    assert relative_error(parts.s_K, torch.linalg.svdvals(matrix.double())) < bound
    assert int(parts.rank) == min(shape)


@pytest.mark.parametrize(("rank", "k"), [(5, 3), (5, 20), (40, 20), (40, None)])
def test_factors_are_decomposed_as_their_product(rank, k):
    (left,), (right,) = random_deltas(1, 26, rank, seed=1), random_deltas(1, rank, 30, seed=2)
    parts, dense = thin_svd(LowRank(left, right), k=k), thin_svd(left @ right, k=k)
    assert parts.s_K.shape == dense.s_K.shape
    assert relative_error(rebuilt(parts), rebuilt(dense)) < F64_IDENTITY
    assert int(parts.rank) == int(dense.rank) == min(rank, 26)


@pytest.mark.parametrize("condition", [1e3, 1e6])
@pytest.mark.parametrize("shape", [(20, 60), (60, 20), (30, 30)])
def test_gram_route_beats_a_float32_svd_on_steep_spectra(condition, shape):
    matrix = graded(*shape, condition).float()
    s_exact = torch.linalg.svdvals(matrix.double())
    parts = thin_svd(matrix)
    u32, s32, vh32 = torch.linalg.svd(matrix, full_matrices=False)
    error = float((parts.s_K - s_exact).abs().max() / s_exact[0])
    assert error < 1e-9
    assert error < float((s32.double() - s_exact).abs().max() / s_exact[0])
    assert int(parts.rank) == min(shape)

    # Isometries that the rules build from the factors: U V^T is as far from exact as eps64 kappa^2 allows.
    u, _, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    found, plain = relative_error(parts.u_OK @ parts.v_IK.mT, u @ vh), relative_error(u32 @ vh32, u @ vh)
    assert found < 2.0**-50 * condition**2
    assert found < plain


@pytest.mark.parametrize("condition", [1e3, 1e6])
def test_float64_is_never_squared(condition):
    matrix = graded(24, 60, condition)
    parts = thin_svd(matrix)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    assert relative_error(parts.s_K, s) < 1e-14
    assert relative_error(parts.u_OK @ parts.v_IK.mT, u @ vh) < 1e-15 * condition


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (18, 18)])
def test_null_directions_are_zero_and_counted_out(dtype, shape):
    matrix = with_spectrum(*shape, [3.0, 1.0, 0.2, 1e-3]).to(dtype)
    parts = thin_svd(matrix)
    assert int(parts.rank) == 4
    assert parts.s_K.shape == (min(shape),)
    for tail in (parts.s_K[4:], parts.u_OK[:, 4:], parts.v_IK[:, 4:]):
        assert not tail.any()
    assert relative_error(rebuilt(parts), matrix) < 1e-6


def test_the_cut_is_the_same_in_both_dtypes_and_either_side_of_it_counts():
    for factor, rank in ((2.0, 3), (0.5, 2)):
        matrix = with_spectrum(8, 20, [1.0, 0.5, RANK_RTOL * factor])
        assert int(thin_svd(matrix).rank) == rank
        assert int(thin_svd(matrix, accuracy=torch.float32).rank) == rank


def test_rounding_of_a_product_is_below_the_cut():
    g = torch.Generator().manual_seed(0)
    product = torch.randn(96, 16, generator=g) @ torch.randn(16, 128, generator=g)
    assert int(thin_svd(product).rank) == 16
    assert int(thin_svd(product, accuracy=torch.float64).rank) == 16


@given(scale=st.floats(-8, 8), rank=st.integers(0, 6))
@settings(max_examples=20)
def test_rank_does_not_depend_on_the_scale(scale, rank):
    matrix = with_spectrum(6, 9, torch.linspace(1, 2, rank), seed=3) * 10.0**scale
    assert int(thin_svd(matrix).rank) == rank
    assert int(thin_svd(matrix.float()).rank) == rank


def test_wide_columns_are_widened_in_parts_without_changing_the_result(monkeypatch):
    (matrix,) = random_deltas(1, 5, 50, dtype=torch.float32)
    whole = thin_svd(matrix)
    monkeypatch.setattr(svd, "COLUMNS", 7)
    pieced = thin_svd(matrix)
    assert relative_error(rebuilt(pieced), rebuilt(whole)) < 1e-14
    assert relative_error(svd.row_gram(matrix), matrix.double() @ matrix.double().mT) < 1e-15


def test_orthogonal_svd_completes_null_directions():
    u, s, v, retries = orthogonal_svd(torch.zeros(4, 9))
    assert relative_error(u.mT @ u, torch.eye(4)) < 1e-15
    assert relative_error(v.mT @ v, torch.eye(4)) < 1e-15
    assert not s.any()
    assert retries == ()


def test_numerical_range_of_an_empty_spectrum():
    s, rank = numerical_range(torch.zeros(2, 0))
    assert s.shape == (2, 0)
    assert rank.tolist() == [0, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_that_are_not_finite_are_named(value, dtype):
    matrix = torch.ones(3, 5, dtype=dtype)
    matrix[1, 2] = value
    with pytest.raises(NumericalError, match="NaN or infinity"):
        thin_svd(matrix)


@pytest.mark.parametrize(("name", "dtype"), [("eigh", torch.float32), ("svd", torch.float64)])
def test_a_decomposition_that_does_not_converge_is_tried_again_and_recorded(monkeypatch, name, dtype):
    (matrix,) = random_deltas(1, 6, 9, dtype=dtype)
    expected = rebuilt(thin_svd(matrix))
    failing(monkeypatch, name)
    parts = thin_svd(matrix)
    assert parts.retries == ("jitter",)
    assert relative_error(rebuilt(parts), expected) < 1e-13

    monkeypatch.undo()
    failing(monkeypatch, name, 2)
    with pytest.raises(NumericalError, match="did not converge"):
        thin_svd(matrix)


@pytest.fixture
def in_part(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each attempt at a part succeeded; parts are computed of matrices of a test's size."""
    return attempts_at_parts(monkeypatch, block=8, smallest=64)


def falling(rows: int, columns: int) -> torch.Tensor:
    return with_spectrum(rows, columns, torch.arange(1, min(rows, columns) + 1, dtype=torch.float64).pow(-1)).float()


@pytest.mark.parametrize("shape", [(400, 400), (300, 700), (700, 300)])
def test_a_part_of_the_triplets_is_that_of_all(shape, monkeypatch, in_part):
    matrix = falling(*shape)
    part = thin_svd(matrix, k=20)
    monkeypatch.setattr(svd, "SMALLEST", 10_000)
    whole = thin_svd(matrix, k=20)
    assert in_part == [True], "the part, and no attempt at the whole"
    assert int(part.rank) == 20
    assert int(whole.rank) == min(shape)
    assert relative_error(part.s_K, whole.s_K) < F64_IDENTITY
    assert relative_error(rebuilt(part), rebuilt(whole)) < F32_ELEMENTWISE
    assert [t.shape for t in (part.u_OK, part.s_K, part.v_IK)] == [t.shape for t in (whole.u_OK, whole.s_K, whole.v_IK)]


def test_a_part_has_zeros_beyond_the_rank_and_below_the_floor(in_part):
    values = torch.cat([torch.linspace(1, 0.1, 10, dtype=torch.float64), torch.zeros(290, dtype=torch.float64)])
    matrix = with_spectrum(300, 300, values).float()
    for floor, rank in ((0.0, 10), (0.45, 6)):
        part = thin_svd(matrix, k=16, rtol=2.0**-16, floor=floor)
        assert in_part.pop()
        assert int(part.rank) == rank
        assert part.s_K.shape == (16,)
        assert not part.s_K[rank:].any()
        assert not part.u_OK[:, rank:].any()


def test_what_is_decomposed_whole_is_not_tried_or_given_up(in_part):
    flat = with_spectrum(300, 300, torch.linspace(1, 0.5, 300, dtype=torch.float64)).float()
    thin_svd(flat, k=30)
    assert in_part == [False]
    thin_svd(falling(300, 300))  # all are asked for
    thin_svd(torch.stack([flat, flat]), k=30)
    assert in_part == [False]


@pytest.mark.usefixtures("in_part")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_part_of_what_is_not_finite_is_an_error_that_names_the_whole_shape(bad):
    matrix = falling(300, 300)
    matrix[3, 4] = bad
    with pytest.raises(NumericalError, match=r"shape \(300, 300\) holds NaN or infinity"):
        thin_svd(matrix, k=20)


# Every retry is named, and changes no more than it says.


@pytest.mark.parametrize(
    ("failures", "retries", "dtypes"),
    [
        (0, (), [torch.float32]),
        (1, ("float64",), [torch.float32, torch.float64]),
        (2, ("float64", "jitter"), [torch.float32, torch.float64, torch.float64]),
    ],
)
def test_eigh_retries_are_named_and_keep_the_answer(monkeypatch, failures, retries, dtypes):
    matrix = symmetric([5.0, 2.0, 1.0, 1e-3]).float()
    calls = failing(monkeypatch, "eigh", failures)
    values, vectors, named = eigh(matrix)
    assert named == retries
    assert calls == dtypes
    assert values.dtype == vectors.dtype == torch.float32
    assert relative_error((vectors * values) @ vectors.T, matrix) < 1e-6


def test_jitter_moves_no_eigenvalue_by_more_than_stated(monkeypatch):
    matrix = symmetric([4.0, 4.0, 1.0, 1e-12])
    failing(monkeypatch, "eigh", 1)
    moved = (eigh(matrix)[0] - torch.tensor([1e-12, 1, 4, 4], dtype=torch.float64)).abs().max()
    assert moved < 40 * torch.finfo(torch.float64).eps * matrix.abs().max()


@pytest.mark.parametrize(("dtype", "attempts"), [(torch.float32, 3), (torch.float64, 2)])
def test_failures_are_an_error_not_another_method(monkeypatch, dtype, attempts):
    calls = failing(monkeypatch, "eigh", 99)
    with pytest.raises(NumericalError, match="did not converge"):
        eigh(symmetric([1.0, 2.0]).to(dtype))
    assert len(calls) == attempts  # float64 does not try the same again


def test_nan_from_a_finite_matrix_is_a_failure_too(monkeypatch):
    real, calls = torch.linalg.eigh, []

    def silent(matrix):
        calls.append(matrix)
        values, vectors = real(matrix)
        return (values * float("nan"), vectors) if len(calls) == 1 else (values, vectors)

    monkeypatch.setattr(torch.linalg, "eigh", silent)
    values, _, retries = eigh(symmetric([3.0, 1.0]))
    assert retries == ("jitter",)
    assert values.tolist() == pytest.approx([1.0, 3.0])


def test_batches_are_jittered_by_their_own_size(monkeypatch):
    batch = torch.stack([symmetric([3.0, 1.0]), 1e-9 * symmetric([3.0, 1.0])])
    failing(monkeypatch, "eigh", 1)
    values, *_ = eigh(batch)
    assert relative_error(values[1], torch.tensor([1e-9, 3e-9], dtype=torch.float64)) < 1e-14


def test_a_record_names_each_kind_once_or_says_nothing():
    assert retry_stats(("float64", "jitter", "float64")) == {"retries": "float64, jitter"}
    assert retry_stats(()) == {}
