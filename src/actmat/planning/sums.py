"""Running sums that a merge keeps beside its output (`keep_sums`), so that experts can be added to it later.

`total = sum_t w_t D_t` in the compute dtype, before anything is divided or scaled: an expert that is added at the end
continues the same sum, so that the bytes are those of a merge of all.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

from actmat.checkpoints.base import TensorSpec
from actmat.methods import get_method
from actmat.planning.model import SUMS, Item
from actmat.planning.placement import DeviceRoom
from actmat.planning.sample import sampled_entries
from actmat.recipe import Recipe

__all__ = ["SAMPLE", "sum_problems", "weights_of", "with_sums"]

SAMPLE = ":sample"
"""End of the name of the sum of sampled entries."""


def with_sums(items: Iterable[Item], compute_dtype: str) -> tuple[Item, ...]:
    """The items, each that a method merges with the specs of what is kept of it."""
    return tuple(_with_sum(item, compute_dtype) if item.call is not None else item for item in items)


def _with_sum(item: Item, compute_dtype: str) -> Item:
    specs = (
        TensorSpec(f"{SUMS}{item.name}", item.shape, compute_dtype, ""),
        TensorSpec(f"{SUMS}{item.name}{SAMPLE}", (sampled_entries(item.numel),), "float64", ""),
    )
    cost = dataclasses.replace(item.cost, write_bytes=item.cost.write_bytes + sum(s.nbytes for s in specs))
    return dataclasses.replace(item, sums=specs, cost=cost)


def sum_problems(recipe: Recipe, items: Sequence[Item], room: DeviceRoom) -> list[str]:
    """Reasons why the sums of a merge would not be enough to add an expert to it, one sentence each."""
    fields = {
        "normalize": (recipe.normalize, "a further expert changes the weights of all"),
        "pool": (bool(recipe.pool), "several tensors are merged as one"),
        "post": (bool(recipe.post), "it looks at the deltas again after the method"),
        "postprocess": (recipe.postprocess.caps, "its caps look at the deltas again after the method"),
        "quantise": (recipe.model.quantise is not None, "codes are written"),
        "vocabulary": (recipe.model.vocabulary is not None, "a further expert may bring tokens"),
        "allow_nonfinite": (recipe.allow_nonfinite, "what counts as unchanged depends on all experts"),
        "files_from": (recipe.model.files_of != "base", "files are copied from an expert"),
        "to": (recipe.output is not None and recipe.output.kind != "model", "an adapter is written"),
        "device": (room.device != "cpu", "sums of a device have other last bits"),
    }
    problems = [f"keep_sums: drop '{name}': {reason}" for name, (is_given, reason) in fields.items() if is_given]
    refused = Counter(
        i.call.method for i in items if i.call is not None and get_method(i.call.method).finish_sum is None
    )
    return problems + [
        f"keep_sums: {count} tensor{'s' * (count > 1)} merged by '{name}', whose result is no function of the sum of "
        "the deltas: drop keep_sums, or take average, task_arithmetic or linear"
        for name, count in refused.items()
    ]


def weights_of(weights: Sequence[float] | None, n_experts: int) -> list[float]:
    """The weights of a running sum: 1 unless given."""
    return [1.0] * n_experts if weights is None else list(weights)
