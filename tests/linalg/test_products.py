"""Inner products part by part: blocks in float32 against float64, whatever the length, the size and the layout."""

import pytest
import torch
from torch import Tensor

from actmat.linalg.chunks import Stacked
from actmat.linalg.inner import MANY, PRODUCT, RUN, Products


def rows(count: int, size: int, seed: int = 0) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


def exact(rows_TS: Tensor) -> Tensor:
    return rows_TS.double() @ rows_TS.double().mT


def cosines(gram_TT: Tensor) -> Tensor:
    norm_T = gram_TT.diagonal().sqrt()
    return gram_TT / (norm_T[:, None] * norm_T)


def found(rows_TS: Tensor) -> Tensor:
    products = Products(rows_TS.shape[1:], rows_TS.dtype)
    return sum((products.of(part) for part in products.parts(list(rows_TS))), torch.zeros(()))


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [1, RUN + 1, MANY - 1, MANY, MANY + 1, PRODUCT + RUN - 1, 2 * PRODUCT + 5])
def test_the_gram_matrix_of_all_spans(count: int, size: int) -> None:
    rows_TS = rows(count, size)
    torch.testing.assert_close(found(rows_TS), exact(rows_TS), rtol=1e-6, atol=1e-8 * size)


@pytest.mark.parametrize("apart", [1.0, 1e-2, 3e-4])
@pytest.mark.parametrize("size", [MANY - 1, MANY, PRODUCT, 4 * PRODUCT])
def test_cosines_are_right_to_one_in_a_hundred_million(size: int, apart: float) -> None:
    rows_TS = (rows(1, size) + apart * rows(3, size, seed=1)).bfloat16().float() * 1e-3
    assert float((cosines(found(rows_TS)) - cosines(exact(rows_TS))).abs().max()) < 1e-8


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-18, 1e18, 1e30])
def test_squares_that_float32_does_not_hold(scale: float) -> None:
    rows_TS = rows(3, MANY + 7) * scale
    torch.testing.assert_close(found(rows_TS), exact(rows_TS), rtol=1e-12, atol=1e-12 * MANY * scale**2)
    assert bool((found(rows_TS).diagonal() > 0).all())


def test_a_tensor_of_zeros_beside_others() -> None:
    rows_TS = rows(3, MANY)
    rows_TS[1] = 0
    torch.testing.assert_close(found(rows_TS), exact(rows_TS), rtol=1e-12, atol=1e-9)


def test_a_small_tensor_beside_a_large_one() -> None:
    rows_TS = rows(2, MANY) * torch.tensor([[1e-17], [1.0]])
    torch.testing.assert_close(cosines(found(rows_TS)), cosines(exact(rows_TS)), rtol=0, atol=1e-8)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(bad: float) -> None:
    rows_TS = rows(2, MANY)
    rows_TS[1, 77] = bad
    gram = found(rows_TS)
    assert bool(gram[0, 0].isfinite())
    assert not bool(gram[1, 1].isfinite())


@pytest.mark.parametrize("size", [PRODUCT, PRODUCT - 3])
def test_rows_of_one_tensor_give_the_bits_of_tensors_apart(size: int) -> None:
    room = torch.empty(4, PRODUCT)
    stacked, apart = Products((size,), torch.float32), Products((size,), torch.float32)
    for seed in range(2):  # the same room, other entries
        room[:, :size] = rows(4, size, seed)
        as_one = stacked.of(Stacked(room[1:, :size]))
        assert torch.equal(as_one, apart.of([row.clone() for row in room[1:, :size]]))
        torch.testing.assert_close(as_one, exact(room[1:, :size]), rtol=1e-6, atol=1e-8 * size)


def test_lengths_may_change_from_part_to_part() -> None:
    products = Products((2 * MANY,), torch.float32)
    for size in (MANY, 100, MANY, 100, MANY):
        rows_TS = rows(2, size)
        torch.testing.assert_close(products.of(list(rows_TS)), exact(rows_TS), rtol=1e-6, atol=1e-8 * MANY)
