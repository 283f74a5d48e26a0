"""Differences between two plans, in words: the reasons why parts of two merges do not go together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from actmat.planning.model import InputSummary, MergePlan

LONGEST = 80


def plan_differences(there: MergePlan, here: MergePlan) -> list[str]:
    """Everything that gives two plans other fingerprints: one sentence each, never none."""
    found = [*_recipes(there, here), *_inputs(there, here), *_surroundings(there, here)]
    if not found:
        found = [_items(there, here)]
    return found


def _recipes(there: MergePlan, here: MergePlan) -> Iterator[str]:
    one, other = (p.recipe.model_dump(mode="json", exclude={"out", "mute"}) for p in (there, here))
    for name in one:
        if one[name] != other[name]:
            yield f"recipe: '{name}' is {_shown(one[name])} there, {_shown(other[name])} here"


def _inputs(there: MergePlan, here: MergePlan) -> Iterator[str]:
    if len(there.inputs) != len(here.inputs):
        yield f"there are {len(there.inputs)} inputs there, {len(here.inputs)} here"
        return
    for one, other in zip(there.inputs, here.inputs, strict=True):
        yield from _files(one, other)


def _files(there: InputSummary, here: InputSummary) -> Iterator[str]:
    one, other = ({f.path: f for f in side.files} for side in (there, here))
    name = here.label if here.label == "base" else f"expert '{here.label}'"
    for path in sorted(one.keys() | other.keys()):
        if path not in one or path not in other:
            yield f"{name}: {path} is missing {'there' if path not in one else 'here'}"
        elif one[path].size != other[path].size:
            yield f"{name}: {path} has {one[path].size} bytes there, {other[path].size} here"
        elif one[path] != other[path]:
            yield (
                f"{name}: {path} was written at another time, or is another copy: all parts must read the same files, "
                "on storage that they share (or from the hub)"
            )


def _surroundings(there: MergePlan, here: MergePlan) -> Iterator[str]:
    for name in sorted(there.versions.keys() | here.versions.keys()):
        one, other = there.versions.get(name), here.versions.get(name)
        if one != other:
            yield f"version of {name}: {one} there, {other} here"
    kinds = [p.device.partition(":")[0] for p in (there, here)]
    if kinds[0] != kinds[1]:
        yield f"device: {kinds[0]} there, {kinds[1]} here"
    if there.statistics_identity != here.statistics_identity:
        yield "the files of statistics are others"


def _items(there: MergePlan, here: MergePlan) -> str:
    if len(there.items) != len(here.items):
        return f"{len(there.items)} tensors would be merged there, {len(here.items)} here"
    name = next((h.name for t, h in zip(there.items, here.items, strict=True) if t != h), "")
    moved = [p.by_name[name].cost.device_bytes > 0 for p in (there, here)] if name else [False, False]
    if moved[0] != moved[1]:
        where = ["on a device" if m else "on the host" for m in moved]
        return (
            f"tensor '{name}' would be merged {where[0]} there, {where[1]} here, as the devices have other memory: "
            "give all parts the same --device-memory"
        )
    return f"tensor '{name}' would be merged in another way" if name else "the plans differ"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
