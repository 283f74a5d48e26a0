"""Inner products and weighted sums, against one-line float64 formulae, across the chunk boundary."""

import pytest
import torch

from actmat.linalg.chunks import SHORT_CHUNK
from actmat.linalg.inner import inner_products, is_finite, one_pass_sum, weighted_sum

SIZES = [0, 1, SHORT_CHUNK - 1, SHORT_CHUNK, SHORT_CHUNK + 1, 2 * SHORT_CHUNK + 5]


def tensors(count: int, size: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(size + count)
    return [torch.randn(size, generator=rng).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("size", SIZES)
def test_inner_products_are_the_gram_matrix(size: int) -> None:
    rows = tensors(3, size)
    expected = torch.stack(rows).double() @ torch.stack(rows).double().mT
    torch.testing.assert_close(inner_products(rows), expected, rtol=1e-13, atol=1e-10)


@pytest.mark.parametrize("size", SIZES)
def test_weighted_sum_is_the_sum(size: int) -> None:
    rows = tensors(4, size, torch.float64)
    coefficients = [0.5, -2.0, 0.0, 3.0]
    expected = sum((c * x for c, x in zip(coefficients, rows, strict=True)), torch.zeros(size, dtype=torch.float64))
    torch.testing.assert_close(weighted_sum(rows, coefficients), expected, rtol=0, atol=1e-14)


def test_weighted_sum_skips_what_has_no_weight_and_keeps_the_shape() -> None:
    bad = torch.full((3, 5), float("nan"))
    good = torch.arange(15.0).reshape(5, 3).mT
    out = weighted_sum([bad, good], [0.0, 2.0])
    assert out.is_contiguous()
    assert torch.equal(out, 2 * good)


def test_one_pass_sum_is_the_same_sum_of_an_iterator() -> None:
    rows, weights = tensors(3, 50, torch.float64), [0.5, -2.0, 3.0]
    assert torch.equal(one_pass_sum(iter(rows), weights), weighted_sum(rows, weights))
    with pytest.raises(ValueError, match="argument 2"):
        one_pass_sum(rows, [1.0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_sum_that_overflows_is_no_infinity(dtype: torch.dtype) -> None:
    large = torch.full((4,), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(large)
    for bad in (float("nan"), float("inf")):
        assert not is_finite(torch.cat([large, torch.tensor([bad], dtype=dtype)]))
    assert not is_finite(torch.tensor([float("inf"), float("-inf")], dtype=dtype))
