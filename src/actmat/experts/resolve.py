"""Open what a user named as an expert: adapters through a registry of families, all else as a full checkpoint.

A new family of adapters is a file with an `Expert` and an entry in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from actmat.checkpoints.base import Checkpoint, CheckpointHandle, versions_of_files
from actmat.checkpoints.resolve import open_checkpoint
from actmat.checkpoints.resolve import open_handle as open_checkpoint_handle
from actmat.errors import CheckpointError
from actmat.experts.base import AdapterHandle, ConvertedHandle, Expert, ExpertHandle, Family
from actmat.experts.checkpoint import CheckpointExpert
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.lora_files import is_lora_file, open_lora_file, tensor_names, unmerged_problem
from actmat.experts.lora.open import open_adapter as open_peft_adapter
from actmat.experts.peft import LORA_FILE, PEFT, reader_of
from actmat.extras.diffusion.expert import is_in_other_layout, open_converted
from actmat.extras.diffusion.lycoris import LYCORIS

__all__ = ["FAMILIES", "has_factors", "is_adapter", "open_adapter", "open_base", "open_expert", "open_handle"]

FAMILIES: tuple[Family, ...] = (PEFT, LYCORIS, LORA_FILE)
"""The known families of adapters; the first that claims a location opens it."""


def is_adapter(location: str | Path) -> bool:
    """True where an adapter is, and no full checkpoint; reads no tensor of a full checkpoint."""
    return _family(location) is not None


def has_factors(location: str | Path) -> bool:
    """True where an adapter is whose deltas are stored as factors, from which an adapter is merged without its base."""
    family = _family(location)
    if family in (None, LYCORIS, LORA_FILE):
        return family is LORA_FILE
    try:
        with open_peft_adapter(location) as adapter:
            return reader_of(adapter.config.fields) is None
    except CheckpointError:
        return True  # opening it as an expert will say why


def open_adapter(location: str | Path) -> Adapter:
    """Open an adapter without a base, for its stored tensors and its factors, if it has any.

    Raises:
        CheckpointError: no adapter there, or its files cannot be read. Problems of its contents are in
            `Adapter.problems`.
    """
    return open_lora_file(location) if is_lora_file(location) else open_peft_adapter(location)


def open_base(location: str | Path | Mapping[str, Tensor] | Checkpoint) -> Checkpoint:
    """Open a full checkpoint, and refuse one that holds factors of adapters: they are no weights of a model.

    Raises:
        CheckpointError: not found, of an unsupported format, damaged, or an adapter.
    """
    opened = open_checkpoint(location)
    if problem := unmerged_problem(opened):
        opened.close()
        raise CheckpointError(problem)
    return opened


def open_expert(location: str | Path | Mapping[str, Tensor] | Checkpoint, base: Checkpoint | None) -> Expert:
    """Open what `location` names; reads headers, and no tensor of a full checkpoint.

    >>> import torch
    >>> from actmat.checkpoints.memory import MemoryCheckpoint
    >>> base = MemoryCheckpoint({"w": torch.ones(2)})
    >>> with open_expert({"w": torch.zeros(2)}, base) as expert:
    ...     expert.source("w")
    Source(name='w', kind='stored', dtype='float32', nbytes=8, rank=0)

    Args:
        base: what the deltas are added to. None opens an adapter for its factors.

    Raises:
        CheckpointError: nothing there, damaged, or an adapter that cannot be merged into this base; carries all
            problems.
    """
    family = _family(location) if isinstance(location, str | Path) else None
    if base is not None:
        if family is not None:
            return family.open(str(location), base)
        opened = open_base(location)
        try:
            return open_converted(opened, base) if is_in_other_layout(opened, base) else CheckpointExpert(opened)
        except CheckpointError:
            opened.close()
            raise
    if family is None:
        found = location if isinstance(location, str | Path) else "<memory>"
        raise CheckpointError(f"{found}: expected an adapter, found none; a full checkpoint is merged into a base")
    return _open_unfitted(family, str(location))


def open_handle(handle: ExpertHandle) -> Expert:
    """Open the expert that `Expert.handle` described, in any process that has the same storage.

    Raises:
        CheckpointError: its files are gone or damaged, or remote ones have other versions than the handle says.
    """
    if isinstance(handle, CheckpointHandle):
        return CheckpointExpert(open_checkpoint_handle(handle))
    if isinstance(handle, ConvertedHandle):
        other = open_checkpoint_handle(handle.base)
        return open_converted(open_checkpoint_handle(handle.checkpoint), other, owns_base=True)
    if handle.base is None:
        return _as_it_was(_open_unfitted(handle.family, handle.location), handle)
    base = open_checkpoint_handle(handle.base)
    try:
        expert = handle.family.open(handle.location, base)
    except CheckpointError:
        base.close()
        raise
    expert.adopt(base)
    return _as_it_was(expert, handle)


def _as_it_was(expert: Expert, handle: AdapterHandle) -> Expert:
    """The expert, closed and refused if its remote files are not those of the handle."""
    now = {name: (size, etag) for name, size, etag in versions_of_files(expert.identity())}
    problems = [
        f"{handle.location}: {name} had {size} bytes, version {etag}; found "
        + ("{} bytes, version {}".format(*now[name]) if name in now else "no such file")
        for name, size, etag in handle.etags
        if now.get(name) != (size, etag)
    ]
    if problems:
        expert.close()
        raise CheckpointError(
            f"{handle.location}: the adapter changed since it was opened. Likely cause: somebody uploads it. Fix: wait "
            "until that is done, then run again.",
            problems,
        )
    return expert


def _open_unfitted(family: Family, location: str) -> Expert:
    if family.open_unfitted is None:
        raise CheckpointError(
            f"{location}: a {family.name} adapter has no factors that an adapter could be merged from. Fix: give the "
            "base and write a model (--base ..., --to model)"
        )
    return family.open_unfitted(location)


def _family(location: str | Path) -> Family | None:
    """The first family that claims a location; the header of a single file is read once for all."""
    for family in FAMILIES:
        if family.claims is not None and family.claims(location):
            return family
    names = tensor_names(location)
    return next((family for family in FAMILIES if family.holds is not None and family.holds(names)), None)
