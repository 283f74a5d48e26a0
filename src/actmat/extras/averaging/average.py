"""Average checkpoints of one training run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actmat.extras.averaging.recipe import average_recipe
from actmat.progress import Progress
from actmat.recipe.arguments import Location, split_fields
from actmat.run import MergeReport, run_recipes


def average(
    checkpoints: Sequence[Location],
    *,
    out: Location,
    weights: str | Sequence[float] = "uniform",
    as_given: bool = False,
    progress: Progress | None = None,
    **fields: Any,
) -> MergeReport:
    """Write `W* = sum_t w_t W_t`, the weighted average of checkpoints of one run; needs no base.

    Args:
        checkpoints: directories, files, hub ids or URLs, in any form that `merge` reads.
        out: directory to write, or its URL.
        weights: `uniform`, `linear`, `ema:0.9`, `wsd`, or one number per checkpoint (see
            `extras.averaging.recipe.trajectory_weights`); divided by their sum.
        as_given: keep the order of `checkpoints`; by default they are sorted by step number.
        progress: see `Progress`.
        fields: other fields of a recipe (`dtype`, `compute_dtype`, `max_shard_size`, ...) or of `RunSettings`.

    Returns:
        The report; the model is in `out`, with config and tokenizer of the last checkpoint.

    Raises:
        MergeError: see `actmat.errors`; nothing is left at `out`.
    """
    settings, rest = split_fields(fields)
    recipe = average_recipe([str(c) for c in checkpoints], weights, as_given=as_given, out=str(out), **rest)
    return run_recipes([recipe], settings, progress)[0]
