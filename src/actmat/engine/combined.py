"""Merge a tensor as a sum of its deltas: find the coefficients in one walk, add up and write in another.

For rules that declare `combine`. Neither a result nor the base in the compute dtype is ever as large as the tensor, and
the bits are those of the rule on deltas that are held.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from actmat.engine.apply import checked_finite, note
from actmat.engine.deltas import LazyDeltas
from actmat.engine.naming import named_errors
from actmat.engine.output import write_piece
from actmat.engine.reader import StreamedBase, TensorReader
from actmat.engine.variant import Variant
from actmat.linalg.inner import add_up, inner_products
from actmat.linalg.places import Preceded, walk
from actmat.plan.parts import Part

__all__ = ["merge_combined"]


def merge_combined(
    variant: Variant,
    part: Part,
    base_raw: Tensor | StreamedBase,
    deltas: LazyDeltas,
    held: Sequence[Tensor],
    reader: TensorReader,
) -> None:
    """Merge and write one part.

    Args:
        deltas: what the part is read through; it knows whether anything changed.
        held: the same, or the deltas that it keeps for the second walk.

    Raises:
        NumericalError, RecipeError: from the rule, with the name of the tensor.
    """
    method, call = variant.method, variant.call
    assert method.combine is not None
    basis = Preceded(_WideBase(part, base_raw, reader), held) if method.uses_base(call.options) else held
    with named_errors("tensor", variant.item.name, call.method):
        weights = {"weights": call.weights} if method.is_weighted else {}
        found = method.combine(inner_products(basis), **weights, **call.options)
        note(variant, part.label, found.stats)
    if not deltas.changed:
        write_piece(variant, part, base_raw, None, reader)
        return
    for start, pieces_TP in walk(basis):
        stop = start + pieces_TP[0].numel()
        sum_P = reader.scratch.take("sum", stop - start, reader.compute_dtype)
        add_up(pieces_TP, found.coefficients, sum_P)
        with named_errors("tensor", variant.item.name, call.method):
            checked_finite(sum_P, variant)
        place = Part(part.start + start, part.start + stop, (stop - start,), part.layout, part.label)
        write_piece(variant, place, base_raw[start:stop], sum_P, reader)


class _WideBase:
    """The base on one part in the compute dtype, converted where somebody looks (`linalg.places.Flat`)."""

    def __init__(self, part: Part, base_raw: Tensor | StreamedBase, reader: TensorReader) -> None:
        self._start = part.start
        self._base_raw = base_raw
        self._reader = reader

    def __getitem__(self, place: slice, /) -> Tensor:
        return self._reader.wide_base(self._start + place.start, self._base_raw[place])
