"""Average the checkpoints of one training run, without a base."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from actmat.api.merging import Location
from actmat.errors import RecipeError
from actmat.progress import Progress
from actmat.recipe import Recipe, make_recipe
from actmat.recipe.trajectory import distinct_names, in_order, trajectory_weights
from actmat.run import MergeReport, run_recipes
from actmat.settings import RunSettings

__all__ = ["average", "average_recipe"]

_SETTINGS = frozenset(f.name for f in dataclasses.fields(RunSettings))


def average(
    checkpoints: Sequence[Location],
    *,
    out: Location,
    weights: str | Sequence[float] = "uniform",
    as_given: bool = False,
    progress: Progress | None = None,
    **fields: Any,
) -> MergeReport:
    """Write `W* = sum_t w_t W_t`, the weighted average of checkpoints of one run; no base is needed.

    Args:
        checkpoints: directories, files, hub ids or URLs, in any form that `merge` reads.
        out: directory to write, or its URL.
        weights: `uniform`, `linear`, `ema:0.9`, `wsd`, or one number per checkpoint (see
            `recipe.trajectory.trajectory_weights`); divided by their sum.
        as_given: keep the order of `checkpoints`; else they are put in the order of their step numbers.
        progress: see `Progress`.
        fields: other fields of a recipe (`dtype`, `compute_dtype`, `max_shard_size`, ...) or of `RunSettings`.

    Returns:
        The report; the model is in `out`, with config and tokenizer of the last checkpoint.

    Raises:
        MergeError: see `actmat.errors`; nothing is left at `out`.
    """
    settings = {k: v for k, v in fields.items() if k in _SETTINGS}
    rest = {k: v for k, v in fields.items() if k not in _SETTINGS}
    recipe = average_recipe([str(c) for c in checkpoints], weights, as_given=as_given, out=str(out), **rest)
    return run_recipes([recipe], RunSettings(**settings), progress)[0]


def average_recipe(
    places: Sequence[str], weights: str | Sequence[float] = "uniform", *, as_given: bool = False, **fields: Any
) -> Recipe:
    """The recipe of an average: `linear` on all tensors; the newest checkpoint is the point that deltas start from.

    Raises:
        RecipeError: no checkpoints, one twice, or weights that do not fit; also numbers for checkpoints that were not
            given in the order of their steps, as it would be open to which they belong.
    """
    if not places:
        raise RecipeError("There is nothing to average: give two checkpoints or more.")
    text = weights if isinstance(weights, str) else ",".join(repr(float(w)) for w in weights)
    ordered = list(places) if as_given else in_order(places)
    share, formula = trajectory_weights(text, len(places))
    if formula.startswith("as given") and ordered != list(places):
        raise RecipeError(
            "--weights lists one number per checkpoint, but the checkpoints are not in the order of their steps, which "
            f"is {', '.join(ordered)}. Fix: give them in this order, or say --as-given."
        )
    names = distinct_names(ordered)
    experts = [{"path": p, "name": n, "weight": w} for p, n, w in zip(ordered, names, share, strict=True)]
    listed = ", ".join(f"{n} {w:.6g}" for n, w in zip(names, share, strict=True))
    kind = text if not formula.startswith("as given") else "numbers"
    notes = (
        f"weights '{kind}' ({formula}), oldest first: {listed}",
        f"files and buffers are those of the last checkpoint, {names[-1]}; deltas are measured from it, which does not "
        "change the average",
    )
    return make_recipe(
        {"base": ordered[-1], "experts": experts, "method": "linear", "scope": "all", **fields, "notes": notes}
    )
