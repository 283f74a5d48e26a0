"""Merge a tensor as a sum of its deltas: find the coefficients in one walk, add up and write in another.

For rules that declare `combine`. No delta, no result and no base is ever held as a whole, and the bits are those of the
rule on deltas that are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actmat.engine.apply import checked_finite, note
from actmat.engine.naming import named_errors
from actmat.engine.output import write_piece, write_value
from actmat.engine.reader import StreamedBase, TensorReader
from actmat.engine.stacked import StackedDeltas
from actmat.engine.variant import Variant
from actmat.linalg.inner import add_up, inner_products
from actmat.plan.parts import Part

__all__ = ["merge_combined"]


def merge_combined(variant: Variant, part: Part, base_raw: Tensor | StreamedBase, reader: TensorReader) -> bool:
    """Merge and write one part; whether anything changed.

    Raises:
        NumericalError, RecipeError: from the rule, with the name of the tensor.
    """
    method, call = variant.method, variant.call
    assert method.combine is not None
    with_base = method.uses_base(call.options)
    basis = StackedDeltas(reader, part, with_base=with_base)
    with named_errors("tensor", variant.item.name, call.method):
        gram_BB = inner_products(basis)
        if not bool(gram_BB.isfinite().all()):  # as rare as a broken checkpoint: find what is not, and clear it
            basis.clear()
            gram_BB = inner_products(basis)
        weights = {"weights": call.weights} if method.is_weighted else {}
        found = method.combine(gram_BB, **weights, **call.options)
        note(variant, part.label, found.stats)
    norm_B = gram_BB.diagonal().sqrt()
    if not bool(norm_B[int(with_base) :].any()):
        write_piece(variant, part, base_raw, None, reader)
        return False
    # no entry of the sum is larger than this; what may not hold it is looked at
    largest = float(torch.tensor(found.coefficients, dtype=torch.float64).abs() @ norm_B)
    may_overflow = not largest < torch.finfo(reader.compute_dtype).max / 2
    for _, place in basis.places():
        # the deltas of a place are not needed again: the first takes the sum, unless the base is added before it
        sum_S = reader.scratch.take("sum", place.base_S.numel(), reader.compute_dtype)
        sum_S = add_up(place.basis, found.coefficients, sum_S if with_base else place.deltas_TS[0])
        if may_overflow:
            with named_errors("tensor", variant.item.name, call.method):
                checked_finite(sum_S, variant)
        write_value(variant, torch.add(place.base_S, sum_S, alpha=call.scale, out=sum_S), reader)
    return True
