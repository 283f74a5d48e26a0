"""Operations of an item by class, from its plan: the FLOPs of its cost."""

from __future__ import annotations

import math

from actmat.linalg.operations import Operation, entries, product, repeated, thin_svd
from actmat.methods import get_method
from actmat.planning.cost import method_operations
from actmat.planning.model import Item, MethodCall

__all__ = ["item_operations"]


def item_operations(item: Item, compute_dtype: str) -> list[Operation]:
    """Operations of the method of an item, without reading, subtracting, adding to the base and writing.

    Args:
        item: of a plan; a tensor or an adapter's module.
        compute_dtype: the recipe's.
    """
    if item.call is None:
        return []
    method, double = get_method(item.call.method), compute_dtype == "float64"
    steps = _steps(item, item.call, double=double)
    if item.form == "factored":
        return _twice([*_factored(item, item.call), *steps], item.call)
    shapes = [item.shape or (1,)]
    if method.acts_on == "matrix" and item.factors is None:
        shapes = item.layout.matrix_shapes(item.shape)
    found = method_operations(method, shapes, len(item.sources), item.call.options, double=double)
    if item.factors is not None:  # deltas are formed from their factors, and the merged one is decomposed again
        rank = sum(item.factors.ranks)
        found += _dense_module(item.shape, rank)
    return _twice([*found, *steps], item.call)


def _twice(found: list[Operation], call: MethodCall) -> list[Operation]:
    """The same operations, twice where layers are measured on the merged model before it is written."""
    return found if call.layer_call is None else repeated(found, 2)


def _steps(item: Item, call: MethodCall, *, double: bool) -> list[Operation]:
    """Each step decomposes the merged matrix and multiplies it out; some look at every expert along its directions."""
    if not call.matrix_steps:
        return []
    shapes, inner = item.layout.matrix_shapes(item.shape), None
    if item.form == "factored":
        total = sum(item.factors.ranks if item.factors is not None else [s.rank for s in item.sources if s is not None])
        shapes, inner = [item.shape], max(1, total)
    found = []
    for *batch, rows, columns in shapes:
        kept = min(rows, columns, inner or rows)
        wide, long = (rows, columns) if inner is None else (kept, kept)
        once = [*thin_svd(wide, long, kept, double=double or inner is not None)]
        once += [product(rows, columns, kept)] * (1 + len(item.sources))
        found += repeated(once, len(call.matrix_steps) * math.prod(batch))
    return found


def _factored(item: Item, call: MethodCall) -> list[Operation]:
    """Two common bases of the factors by QR, the merge of small cores, and its product with the bases, in float64."""
    *batch, rows, columns = item.shape
    ranks = [0 if s is None else s.rank for s in item.sources] if item.factors is None else list(item.factors.ranks)
    total = max(1, sum(ranks))
    left, right = min(total, rows), min(total, columns)
    bases = [product(rows, left, total), product(columns, right, total)]
    cores = [product(left, right, rank) for rank in ranks if rank]
    rule = method_operations(get_method(call.method), [(left, right)], len(ranks), call.options, double=True)
    lifted = [product(rows, right, left)]
    if item.factors is None:  # a tensor of a full model
        lifted += [product(rows, columns, right), entries(2 * rows * columns)]
    return repeated([*repeated(bases, 2), *cores, *rule, *lifted], math.prod(batch))


def _dense_module(shape: tuple[int, ...], rank: int) -> list[Operation]:
    *batch, rows, columns = shape
    kept = min(rank, rows, columns)
    formed = product(rows, columns, max(rank, 1))
    return repeated([formed, product(rows, columns, max(kept, 1))], math.prod(batch))
