"""A plan in words, for the terminal and the page: groups of outputs, counts, traffic."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from actmat.diagnostics.model import Diagnosis
from actmat.diagnostics.totals import Norms
from actmat.errors import format_size
from actmat.foreign import terminal
from actmat.planning.model import Item, MergePlan, count_actions

_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")
_KOHYA_NUMBER = re.compile(r"(?<=[._])\d+(?=[._]|$)")
"""A layer's or an expert's number in a name."""


def plural(count: int, noun: str, several: str | None = None) -> str:
    """`1 tensor`, `2 tensors`; templates give another form for several, `2 matrices`."""
    return f"{count:,} {noun if count == 1 else several or noun + 's'}"


@dataclass(frozen=True, slots=True)
class ItemGroup:
    """Outputs to which the same happens for the same reason; `patterns`: their names and shapes, most frequent first,
    with `*` for numbers.
    """

    action: str
    reason: str
    count: int
    patterns: tuple[str, ...]


def mask_numbers(name: str) -> str:
    """A name with `*` for the numbers of its layers; kohya's names have underscores between their parts.

    >>> mask_numbers("h.3.fc"), mask_numbers("lora_unet_down_blocks_1_attentions_0_proj_in")
    ('h.*.fc', 'lora_unet_down_blocks_*_attentions_*_proj_in')
    """
    pattern = _KOHYA_NUMBER if name.startswith(("lora_", "lycoris_")) else _NUMBER
    return pattern.sub("*", name)


def item_groups(items: Iterable[Item], kept_modules: Mapping[str, str]) -> list[ItemGroup]:
    """Groups in the order of their first outputs.

    Args:
        kept_modules: of adapters: name of a module that is kept -> the recipe's pattern.
    """
    groups: dict[tuple[str, str], Counter[str]] = {}
    for item in items:
        sizes = "x".join(map(str, item.shape))
        pattern = f"{mask_numbers(item.name)}  {sizes}".rstrip()
        groups.setdefault((item.action, item.reason), Counter())[pattern] += 1
    for name, pattern in kept_modules.items():
        key = ("keep", f"kept by the recipe ('{pattern}'): no delta is written")
        groups.setdefault(key, Counter())[mask_numbers(name)] += 1
    return [
        ItemGroup(action, reason, patterns.total(), tuple(p for p, _ in patterns.most_common()))
        for (action, reason), patterns in groups.items()
    ]


def action_counts(plan: MergePlan) -> str:
    """`290 tensors: 200 merge, 90 average; family: llama`."""
    counts = ", ".join(f"{n} {action}" for action, n in count_actions(plan.items).items() if n)
    return f"{len(plan.items)} tensors: {counts}; family: {plan.family or 'not recognized, by names and shapes'}"


def plan_traffic(plan: MergePlan) -> str:
    """Bytes to read and to write, and the peak of memory."""
    most = "at most " if plan.is_extracted else ""
    files = "" if plan.output == "adapter" else f" in {len(plan.shards)} file(s)"
    return (
        f"read {format_size(plan.read_bytes)}, write {most}{format_size(plan.write_bytes)}{files}; peak memory "
        f"{format_size(plan.peak_bytes(1))} with one worker, {format_size(plan.peak_bytes(2))} with two"
    )


def plan_time(plan: MergePlan, workers: int) -> str:
    """Predicted time of a merge on the host."""
    minutes = plan.seconds / workers / 60
    if minutes < 1:
        words = "less than a minute"
    else:
        amount = f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"
        words = f"about {amount} on {plural(workers, 'worker')}"
    return f"{words} (from shapes and bytes; a guide, not a measurement)"


def size_words(norms: Norms | None) -> str:
    """Norm of a merged delta against that of a mean expert and of the experts' sum; empty if nothing was merged.

    >>> size_words(Norms(merged=3.0, total=2.0, experts=(1.0, 1.0)))
    "3 x the experts' mean norm, 1.5 x the norm of their sum"
    """
    if norms is None or not any(norms.experts):
        return ""
    mean = math.hypot(*norms.experts) / math.sqrt(len(norms.experts))
    of_sum = f", {norms.merged / norms.total:.3g} x the norm of their sum" if norms.total else ""
    return f"{norms.merged / mean:.3g} x the experts' mean norm{of_sum}"


def are_image_files(places: Iterable[str]) -> bool:
    """True for single weight files without a config, as image tools write them: they are merged, but not run.

    >>> are_image_files(["ink.safetensors"]), are_image_files(["math/adapter_model.safetensors", "math"])
    (True, False)
    """
    return all(p.endswith(".safetensors") and not p.endswith("adapter_model.safetensors") for p in places)


def measure_answers(diagnosis: Diagnosis) -> str:
    """The commands that measure whether a merged model still answers as its experts do; empty for image models."""
    if are_image_files(p for p in (diagnosis.base, *(e.location for e in diagnosis.experts)) if p):
        return ""
    more = " ..." if len(diagnosis.experts) > 1 else ""
    data = f"--data {shlex.quote(diagnosis.experts[0].name)}=INPUTS{more}" if diagnosis.experts else "--data INPUTS"
    merge = "" if diagnosis.out else "actmat merge ... --out merged\n"
    command = f"actmat diagnose {shlex.quote(diagnosis.out or 'merged')} {data}"
    return merge + terminal(command)
