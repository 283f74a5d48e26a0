import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.test_regions import layouts

from actmat.layout.types import Role, TensorLayout

PACKED = layouts([Role.FUSED_LINEAR, Role.STACKED_EXPERTS])


@given(PACKED)
def test_packing_undoes_unpacking(shaped: tuple[tuple[int, ...], TensorLayout]) -> None:
    shape, layout = shaped
    tensor = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    matrices = layout.to_matrices(tensor)
    assert [tuple(m.shape) for m in matrices] == layout.matrix_shapes(shape)
    back = layout.from_matrices(matrices, shape)
    assert torch.equal(back, tensor)
    assert back.is_contiguous()


@given(PACKED)
def test_rows_land_where_the_definition_of_groups_says(shaped: tuple[tuple[int, ...], TensorLayout]) -> None:
    shape, layout = shaped
    tensor = torch.randn(shape)
    by_row = tensor if layout.orientation == "OI" else tensor.transpose(-1, -2)
    for block, matrix in zip(layout.blocks, layout.to_matrices(tensor), strict=True):
        per_group = by_row.shape[-2] // block.groups
        rows = [g * per_group + r for g in range(block.groups) for r in range(block.start, block.stop)]
        assert torch.equal(matrix, by_row[..., rows, :])


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_convolutions_flatten_their_kernels_and_come_back(rows: int, channels: int, kernel: list[int]) -> None:
    layout = TensorLayout(Role.CONVOLUTION, "test")
    tensor = torch.randn(rows, channels, *kernel)
    (matrix,) = layout.to_matrices(tensor)
    assert matrix.shape == (rows, tensor[0].numel())
    assert torch.equal(layout.from_matrices([matrix], tensor.shape), tensor)


def test_a_transposed_linear_layer_is_a_view_and_comes_back() -> None:
    layout = TensorLayout(Role.LINEAR, "test", "IO")
    tensor = torch.randn(3, 5)
    (matrix,) = layout.to_matrices(tensor)
    assert matrix.shape == (5, 3)
    assert matrix.data_ptr() == tensor.data_ptr()
    assert torch.equal(layout.from_matrices([matrix.clone()], tensor.shape), tensor)
