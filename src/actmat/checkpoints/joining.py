"""Specs of all weight files of a checkpoint, joined."""

from __future__ import annotations

from collections.abc import Mapping

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.folder import shown
from actmat.errors import CheckpointError

__all__ = ["join_shards"]


def join_shards(
    shards: Mapping[str, Mapping[str, TensorSpec]], weight_map: Mapping[str, str] | None, *, location: str
) -> dict[str, TensorSpec]:
    """Specs of all files in order; every disagreement between files, or with the index, is an error."""
    specs: dict[str, TensorSpec] = {}
    problems: list[str] = []
    for label, shard in shards.items():
        for name, spec in shard.items():
            if name in specs:
                problems.append(f"tensor {shown(name)}: in {specs[name].file} and again in {label}")
            elif weight_map is not None and name not in weight_map:
                problems.append(f"tensor {shown(name)}: in {label}, but not in the index")
            else:
                specs[name] = spec
    for name, label in (weight_map or {}).items():
        found = specs.get(name)
        if found is None:
            problems.append(f"tensor {shown(name)}: the index says {label}, which does not hold it")
        elif found.file != label:
            problems.append(f"tensor {shown(name)}: the index says {label}, it is in {found.file}")
    if problems:
        raise CheckpointError(
            f"{location}: the shards do not agree with each other or with the index. Likely cause: files of two saves "
            "mixed in one folder. Fix: fetch or save the whole folder again",
            problems,
        )
    return specs
