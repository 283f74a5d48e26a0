"""Constants of the planned memory cover what was measured, and are not far above it."""

import pytest

from actmat.planning.cost import ITEM_BYTES, SOURCE_BYTES


@pytest.mark.parametrize(("experts", "measured"), [(2, 7_300), (8, 11_800)])
def test_memory_of_a_small_tensor_is_counted(experts: int, measured: int) -> None:
    """Bytes that stay with each of 20,000 tensors of 16 entries: the most of two methods, 2026-11-22."""
    assert measured <= ITEM_BYTES + experts * SOURCE_BYTES <= 1.2 * measured
