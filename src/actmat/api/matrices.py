"""Merge plain tensors, without checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from actmat.methods import AnyMethod
from actmat.methods.spaces import Space


def merge_matrices(
    method: AnyMethod,
    deltas: Sequence[Any] | Sequence[tuple[Any, Any]],
    *,
    base: Any = None,
    statistics: Mapping[str, Sequence[Any]] | None = None,
    weights: Sequence[float] | None = None,
    generator: torch.Generator | None = None,
    space: Space = "full",
    post: str | Sequence[str | Mapping[str, Any]] = (),
    **options: Any,
) -> torch.Tensor:
    """Merge the deltas of one layer.

    Args:
        method: name, declaration, or function `deltas -> delta`; `auto` as in `merge`, for pairs with the space.
        deltas: one `*batch O I` tensor per expert, `D_t = W_t - W_0` (any shape for elementwise methods); floating
            point, one dtype, one device; arrays of numpy are copied. bfloat16 and float16 are computed in float32. In
            another space than the full one, a pair `(b, a)` of `O x R` and `R x I` per expert, computed in float64.
        base: `W_0`; ignored by methods that do not read it.
        statistics: kind ("gram", "fisher") -> one tensor per expert, for methods that need them.
        weights: one per expert, for methods that take them.
        generator: CPU generator of random methods; default: seeded with 0.
        space: in which deltas of adapters are merged, see `methods.spaces`.
        post: steps of post-processing in order, "isotropize:mean=rank" or {"name": "isotropize", "options": {}}.
        options: options of the method.

    Returns:
        The merged delta `D*` (`O x I`), a tensor in the dtype of the deltas.

    Raises:
        MergeError: unknown method, option, step or space; unfit shapes; a result that is not finite.

    >>> import actmat
    >>> actmat.merge_matrices("average", [torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0, 2.0]])])
    tensor([[2., 1.]])
    """
    from actmat.extras.research.matrices import merge_layer

    given = {"base": base, "statistics": statistics, "weights": weights, "generator": generator}
    return merge_layer(method, deltas, given, options, space, post)
