"""Merge plain tensors, without checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actmat.errors import AlignmentError, NumericalError, RecipeError
from actmat.linalg.lowrank import LowRank
from actmat.methods import AnyMethod, MergeMethod, Survey, get_method
from actmat.methods.post import Step, apply_steps, get_step
from actmat.methods.spaces import MERGE_IN, Space, space_problems
from actmat.planning.choose import WHOLE
from actmat.recipe import PostRef
from actmat.run.automatic import AUTO, choice_for


def merge_layer(
    method: AnyMethod,
    deltas: Sequence[Any],
    given: Mapping[str, Any],
    options: dict[str, Any],
    space: Space,
    post: str | Sequence[str | Mapping[str, Any]],
) -> Tensor:
    """The result of `actmat.merge_matrices`; `given`: base, statistics, weights and generator, None without one."""
    deltas, generator = _as_tensors(deltas), given["generator"]
    base, statistics, weights = (_as_tensors(given[name]) for name in ("base", "statistics", "weights"))
    if method == AUTO:
        method, space, options = _automatic(deltas, space, statistics, weights, options)
    chosen = get_method(method)
    resolved = chosen.resolve_options(options)
    steps = _steps(post)
    pairs = _pairs(deltas, space)
    dense = [d for d in deltas if isinstance(d, Tensor)] if space == "full" else [p.b_OR for p in pairs]
    _check_shapes(chosen, pairs or dense, steps if space == "full" else [])
    needs = _needs(chosen, resolved, base, statistics, weights)
    if chosen.is_random:
        needs["generator"] = torch.Generator("cpu").manual_seed(0) if generator is None else generator
    if pairs:
        return _merge_pairs(chosen, pairs, space, needs, resolved, steps)
    if not dense[0].numel():
        return dense[0].clone()
    half = dense[0].dtype in (torch.bfloat16, torch.float16)
    with torch.no_grad():
        inputs = [d.float() for d in dense] if half else dense
        if half and needs.get("base") is not None:
            needs["base"] = needs["base"].float()
        merged = apply_steps(_merge(chosen, inputs, needs, resolved), inputs, steps).value
        return _checked(merged.to(dense[0].dtype), chosen.name, dense)


def _as_tensors(value: Any) -> Any:
    """Arrays as tensors, in lists and pairs too; anything else unchanged."""
    if isinstance(value, Mapping):
        return {name: _as_tensors(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_as_tensors, value))
    return torch.tensor(value.__array__()) if not isinstance(value, Tensor) and hasattr(value, "__array__") else value


def _automatic(
    deltas: Sequence[Any], space: Space, statistics: Any, weights: Any, options: dict[str, Any]
) -> tuple[str, Space, dict[str, Any]]:
    """Method, space and options of `auto`, as `run.automatic` chooses them for models."""
    pairs = bool(deltas) and not isinstance(deltas[0], Tensor)
    choice = choice_for("changes" if pairs else "full", "any")
    space = "core" if pairs and space == "full" else space
    if len(deltas) == 1:
        return "task_arithmetic", space, {**WHOLE, **options}
    name = "regmean" if statistics else "linear" if pairs and weights is not None else choice.method
    return name, space, options


def _needs(
    method: MergeMethod,
    options: Mapping[str, Any],
    base: Tensor | None,
    statistics: Mapping[str, Sequence[Tensor]] | None,
    weights: Sequence[float] | None,
) -> dict[str, Any]:
    """Base, statistics and weights for a method.

    Raises:
        RecipeError: one of them is missing, or is given and not used.
    """
    needs: dict[str, Any] = {"base": base} if method.needs_base else {}
    for name, value in (("statistics", statistics), ("weights", weights)):
        if name in method.needs:
            needs[name] = value
        elif value is not None:
            raise RecipeError(f"'{method.name}' makes no use of {name}; leave it out.")
    if method.uses_base(options) and base is None:
        raise RecipeError(f"'{method.name}' looks at the base weights: pass base=W_0.")
    missing = [k for k in method.needs_statistics if not statistics or k not in statistics]
    if missing:
        raise RecipeError(
            f"'{method.name}' needs statistics measured on data: pass statistics={{{missing[0]!r}: [...]}}."
        )
    return needs


def _steps(post: str | Sequence[str | Mapping[str, Any]]) -> list[Step]:
    """Steps with all their options.

    Raises:
        RecipeError: an unknown step or option.
    """
    out: list[Step] = []
    for entry in [post] if isinstance(post, str) else post:
        try:
            ref = PostRef.model_validate(entry)
        except ValueError as error:
            raise RecipeError(f"merge_matrices: post={entry!r} is no step: {error}") from None
        out.append(Step(ref.name, get_step(ref.name).resolve_options(ref.options)))
    return out


def _pairs(deltas: Sequence[Any], space: Space) -> list[LowRank]:
    """The factors of all experts, in a space other than the full one.

    Raises:
        RecipeError: another space, or deltas that are no pairs.
        AlignmentError: ranks that do not go together.
    """
    if space != "full" and space not in MERGE_IN:
        raise RecipeError(f"merge_matrices: space is one of {', '.join(('full', *MERGE_IN))}; got {space!r}.")
    if space == "full":
        if any(not isinstance(d, Tensor) for d in deltas):
            raise RecipeError("merge_matrices: expected tensors or arrays in the full space; pairs (b, a) go with "
            "another space, such as 'core'.")  # fmt: skip
        return []
    pairs = _as_factors(deltas)
    ranks = sorted({p.rank for p in pairs})
    if space == "factors" and len(ranks) > 1:
        raise AlignmentError(
            f"merge_matrices: space='factors' adds factors entry by entry, and their ranks differ: {ranks}. Take "
            "space='core'."
        )
    return pairs


def _merge_pairs(
    method: MergeMethod,
    pairs: Sequence[LowRank],
    space: Space,
    needs: Mapping[str, Any],
    options: Mapping[str, Any],
    steps: Sequence[Step],
) -> Tensor:
    """The merged delta of factors, multiplied out."""
    problems = space_problems(space, method, options, len(pairs))
    if problems:
        raise RecipeError(f"'{method.name}' cannot merge in this space.", problems)
    dtype = pairs[0].b_OR.dtype
    with torch.no_grad():
        exact = [p.to(torch.float64) for p in pairs]
        merged = MERGE_IN[space](method, exact, {**needs, **options}, steps)
        return _checked(merged.value.dense().to(dtype), method.name, [p.dense() for p in pairs])


def _check_shapes(method: MergeMethod, deltas: Sequence[Tensor | LowRank], steps: Sequence[Step]) -> None:
    if not deltas:
        raise RecipeError("merge_matrices: expected deltas, found none.")
    shapes = {tuple(d.shape) for d in deltas}
    if len(shapes) > 1:
        raise AlignmentError(f"merge_matrices: deltas of one layer have one shape; found {sorted(shapes)}.")
    ndim = len(deltas[0].shape)
    if method.acts_on == "matrix" and ndim < 2:
        raise AlignmentError(f"'{method.name}' merges matrices (..., O, I); got shape {tuple(deltas[0].shape)}.")
    if steps and ndim < 2:
        raise AlignmentError(f"'{steps[0].name}' changes matrices (..., O, I); got shape {tuple(deltas[0].shape)}.")


def _checked(value: Tensor, method: str, deltas: Sequence[Tensor]) -> Tensor:
    """The value itself, once it is known to be finite."""
    if bool(torch.isfinite(value.sum())) or bool(torch.isfinite(value).all()):
        return value
    bad = [t for t, delta in enumerate(deltas) if not bool(torch.isfinite(delta).all())]
    if bad:
        raise NumericalError(
            f"expected finite deltas, but that of expert {bad[0]} (counted from 0) holds NaN or infinity. "
            "Likely cause: a diverged or damaged expert. Fix: check that checkpoint, or leave the expert out."
        )
    raise NumericalError(
        f"method '{method}' gave NaN or Inf for finite deltas. Likely cause: options out of proportion to the deltas, "
        f"or values beyond {str(value.dtype).removeprefix('torch.')}'s range ({torch.finfo(value.dtype).max:g}). "
        "Fix: other options, or deltas in float64."
    )


def _merge(
    method: MergeMethod, deltas: Sequence[Tensor], needs: Mapping[str, Any], options: Mapping[str, Any]
) -> Tensor:
    """The merged delta; for a method with a survey, every matrix of a batch is a model of its own."""
    survey = method.survey
    if survey is None or not survey.applies(options):
        return method.merge(deltas, **needs, **options).value
    batch = deltas[0].shape[:-2] if method.acts_on == "matrix" else torch.Size()
    layers = [[d.reshape(-1, *d.shape[-2:])[i] for d in deltas] for i in range(batch.numel())] if batch else [deltas]
    values = []
    for layer in layers:
        surveyed = _survey(survey, layer, options)
        values.append(method.merge(layer, **{**needs, "survey": surveyed}, **options).value)
    return torch.stack(values).reshape(deltas[0].shape)


def _survey(survey: Survey, deltas: Sequence[Tensor], options: Mapping[str, Any]) -> Any:
    """The survey of a model that consists of this one layer."""
    state = survey.start(len(deltas), options)
    again = True
    while again:
        survey.observe(state, deltas, options)
        again = survey.advance(state)
    return survey.finish(state)


def _as_factors(deltas: Sequence[Any]) -> list[LowRank]:
    """Pairs `(b, a)` as low-rank deltas of one shape.

    Raises:
        RecipeError: something that is no pair of matrices with a common rank.
    """
    out = []
    for t, delta in enumerate(deltas):
        pair = (delta.b_OR, delta.a_RI) if isinstance(delta, LowRank) else delta
        if not isinstance(pair, tuple | list) or len(pair) != 2 or any(getattr(x, "ndim", 0) != 2 for x in pair):
            raise RecipeError(
                f"merge_matrices: outside of the full space an expert is a pair (b, a) of matrices `O x R` and "
                f"`R x I`; expert {t} (counted from 0) is {type(delta).__name__}. Pass the factors of the adapter."
            )
        b_OR, a_RI = pair
        if b_OR.shape[1] != a_RI.shape[0]:
            raise RecipeError(
                f"merge_matrices: expert {t} has b of shape {tuple(b_OR.shape)} and a of shape {tuple(a_RI.shape)}; "
                "the columns of b and the rows of a are the rank, and must be as many."
            )
        out.append(LowRank(b_OR, a_RI))
    return out
