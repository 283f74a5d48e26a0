"""Methods that keep leading directions only: the same answer from a part of each spectrum as from all of it."""

from typing import Any

import pytest
import torch
from tests.helpers.spectra import attempts_at_parts, with_spectrum
from tests.tolerances import F32_ELEMENTWISE, F32_PRODUCT, relative_error

from actmat.methods import get_method

SIDE = 256
METHODS = [
    ("cart", {}),
    ("tsv", {"k": 12}),
    ("iso_cts", {}),
    ("dc_merge", {"k": 12}),
]


def deltas(rows: int) -> list[torch.Tensor]:
    falling = torch.arange(1, SIDE + 1, dtype=torch.float64).pow(-1.2)
    return [1e-2 * with_spectrum(rows, SIDE, falling, seed).float() for seed in range(3)]


@pytest.mark.parametrize("rows", [SIDE, 2 * SIDE])
@pytest.mark.parametrize(("method", "options"), METHODS, ids=[m for m, _ in METHODS])
def test_a_part_gives_the_answer_of_the_whole(
    method: str, options: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = deltas(rows)
    whole = get_method(method).merge(experts, **options)
    attempts = attempts_at_parts(monkeypatch, block=4, smallest=SIDE)
    part = get_method(method).merge(experts, **options)
    assert any(attempts)
    # the entries that DC-Merge keeps are chosen by size: one that is chosen otherwise is a small one
    bound = F32_PRODUCT if method == "dc_merge" else F32_ELEMENTWISE
    assert relative_error(part.value, whole.value) < bound


def test_flat_experts_are_decomposed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = [with_spectrum(SIDE, SIDE, torch.linspace(1, 0.5, SIDE), seed).float() for seed in range(3)]
    whole = get_method("cart").merge(flat)
    attempts = attempts_at_parts(monkeypatch, block=4, smallest=SIDE)
    part = get_method("cart").merge(flat)
    assert attempts
    assert not any(attempts)
    assert torch.equal(part.value, whole.value)
