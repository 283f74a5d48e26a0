"""Merge plain tensors: the rules without checkpoints around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actmat.errors import AlignmentError, RecipeError
from actmat.methods import Survey, get_method

__all__ = ["merge_matrices"]


def merge_matrices(
    method: str,
    deltas: Sequence[Tensor],
    *,
    base: Tensor | None = None,
    statistics: Mapping[str, Sequence[Tensor]] | None = None,
    weights: Sequence[float] | None = None,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Tensor:
    """Merge the deltas of one layer.

    Args:
        method: merge rule.
        deltas: one `*batch O I` tensor per expert, `D_t = W_t - W_0` (any shape for elementwise rules); floating
            point, one dtype, one device. bfloat16 and float16 are computed in float32.
        base: `W_0`, for rules that look at it.
        statistics: kind ("gram", "fisher") -> one tensor per expert, for rules that need them.
        weights: one per expert, for rules that take them.
        generator: CPU generator of random rules; default: seeded with 0.
        options: options of the rule.

    Returns:
        The merged delta `D*`, in the dtype of the deltas.

    Raises:
        RecipeError: unknown rule or option, or something the rule needs is missing.
    """
    rule = get_method(method)
    resolved = rule.resolve_options(options)
    if not deltas:
        raise RecipeError("merge_matrices: there are no deltas to merge.")
    shapes = {tuple(d.shape) for d in deltas}
    if len(shapes) > 1:
        raise AlignmentError(f"merge_matrices: deltas of one layer have one shape; found {sorted(shapes)}.")
    if rule.acts_on == "matrix" and deltas[0].ndim < 2:
        raise AlignmentError(f"'{method}' merges matrices (..., O, I); got shape {tuple(deltas[0].shape)}.")
    needs: dict[str, Any] = {}
    for name, value in (("base", base), ("statistics", statistics), ("weights", weights)):
        if name in rule.needs:
            needs[name] = value
        elif value is not None:
            raise RecipeError(f"'{method}' makes no use of {name}; leave it out.")
    if rule.uses_base(resolved) and base is None:
        raise RecipeError(f"'{method}' looks at the base weights: pass base=W_0.")
    missing = [k for k in rule.needs_statistics if not statistics or k not in statistics]
    if missing:
        raise RecipeError(f"'{method}' needs statistics measured on data: pass statistics={{{missing[0]!r}: [...]}}.")
    if rule.is_random:
        needs["generator"] = torch.Generator("cpu").manual_seed(0) if generator is None else generator
    half = deltas[0].dtype in (torch.bfloat16, torch.float16)
    with torch.no_grad():
        inputs = [d.float() for d in deltas] if half else list(deltas)
        if half and base is not None:
            needs["base"] = base.float()
        if rule.survey is None or not rule.survey.applies(resolved):
            return rule.merge(inputs, **needs, **resolved).value.to(deltas[0].dtype)
        batch = inputs[0].shape[:-2] if rule.acts_on == "matrix" else torch.Size()
        layers = (
            [[d.reshape(-1, *d.shape[-2:])[i] for d in inputs] for i in range(batch.numel())] if batch else [inputs]
        )
        values = [
            rule.merge(layer, **needs | {"survey": _survey(rule.survey, layer, resolved)}, **resolved).value
            for layer in layers
        ]
        return torch.stack(values).reshape(inputs[0].shape).to(deltas[0].dtype)


def _survey(survey: Survey, deltas: Sequence[Tensor], options: Mapping[str, Any]) -> Any:
    """What a survey of the whole model gives when the model is this one layer."""
    state = survey.start(len(deltas), options)
    again = True
    while again:
        survey.observe(state, deltas, options)
        again = survey.advance(state)
    return survey.finish(state)
