"""Open what a user named as an expert: adapters of some family, all else as a full checkpoint.

Families beyond PEFT's are plug-ins of the group `actmat.experts`. Those of `SIGNED` are imported for a single file
whose tensors have the names of factors; any other is asked about every location that is no adapter of PEFT.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from actmat import plugins
from actmat.checkpoints.base import Checkpoint, CheckpointHandle, versions_of_files
from actmat.checkpoints.folder import ADAPTER_CONFIG
from actmat.checkpoints.resolve import open_checkpoint
from actmat.checkpoints.resolve import open_handle as open_checkpoint_handle
from actmat.errors import CheckpointError
from actmat.experts.base import AdapterHandle, Conversion, ConvertedHandle, Expert, ExpertHandle, Family
from actmat.experts.checkpoint import CheckpointExpert
from actmat.experts.files import holds_factors, tensor_names, unmerged_problem
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.expert import unfitted_expert
from actmat.experts.lora.fields import StackWord
from actmat.experts.lora.modules import AdapterLayout
from actmat.experts.peft import PEFT
from actmat.experts.restacked import RESTACKED

Convert: TypeAlias = Callable[[Adapter, AdapterLayout], tuple[Adapter, list[str]]]
GROUP = "actmat.experts"
SIGNED = ("lycoris", "lora_file")
"""Plug-ins for single files of factors, in the order in which they are asked."""


def needs_base(location: str | Path) -> bool:
    """True where changes to a base are, which are no model by themselves; reads no tensor of a full checkpoint."""
    return _family(location) is not None


def has_factors(location: str | Path) -> bool:
    """True where an adapter is whose deltas are stored as factors, from which an adapter is merged without its base."""
    family = _family(location)
    return family is not None and family.has_factors is not None and family.has_factors(location)


def open_adapter(location: str | Path) -> Adapter:
    """Open an adapter without a base, for its stored tensors and its factors, if it has any.

    Raises:
        CheckpointError: no adapter there, or its files cannot be read. Problems of its contents are in
            `Adapter.problems`.
    """
    family = _family(location) or PEFT  # which says that there is none
    if family.open_stored is None:
        raise CheckpointError(f"{location}: adapters of the family {family.name} are read with their base only")
    return family.open_stored(location)


def open_stored(location: str | Path) -> Checkpoint:
    """The stored tensors of a checkpoint or of an adapter, by their stored names."""
    return open_adapter(location).weights if needs_base(location) else open_checkpoint(location)


def describe_adapter(location: str | Path, adapter: Adapter) -> dict[str, Any]:
    """Entries of `inspect` that the family of an open adapter has of its own; none for plain LoRA."""
    family = _family(location)
    return {} if family is None or family.describe is None else family.describe(adapter)


def in_layout(expert: Expert, layout: AdapterLayout) -> Expert:
    """An adapter that was opened without a base, with modules, names and factors as a layout has them.

    It is open as long as the other. What has no form there is among the problems of its `adapter`.
    """
    adapter, handle = expert.adapter, expert.handle()
    assert adapter is not None, "only adapters have layouts"
    assert isinstance(handle, AdapterHandle), "it has factors"
    convert: Convert | None = plugins.load("actmat.layouts", "image")
    if convert is None:
        found, problems = adapter, [f"no installed part of actmat converts it.{plugins.hint('actmat.layouts')}"]
    else:
        found, problems = convert(adapter, layout)
    if adapter.extras:
        problems.append(f"'{layout}' has no names for its tensors trained in full ({', '.join(adapter.extras)})")
    problems = [f"cannot be written as '{layout}': {p}" for p in problems]
    if problems or adapter.problems:
        found = adapter.with_problems((*adapter.problems, *problems))
    reopen = partial(_open_in_layout, handle.family, layout)
    return unfitted_expert(found, dataclasses.replace(handle.family, open_unfitted=reopen))


def _open_in_layout(family: Family, layout: AdapterLayout, location: str | Path) -> Expert:
    return in_layout(_open_unfitted(family, str(location)), layout)


def shares_names(names: Collection[str], others: Collection[str]) -> bool:
    """True if at least half of the names are among the others: two checkpoints in one layout."""
    return 2 * sum(name in others for name in names) >= len(names)


def convert(checkpoint: Checkpoint, base: Checkpoint, *, owns_base: bool = False) -> Expert | None:
    """The checkpoint as an expert in another layout, that of the base; None if it needs no conversion, or has none.

    Raises:
        CheckpointError: not all of it can be converted.
    """
    if RESTACKED.applies(checkpoint, base):
        return RESTACKED.open(checkpoint, base, owns_base)
    if shares_names(base.specs, checkpoint.specs):
        return None
    found: dict[str, Conversion] = plugins.load_all("actmat.conversions")
    for conversion in found.values():
        if conversion.applies(checkpoint, base):
            return conversion.open(checkpoint, base, owns_base)
    return None


def open_base(location: str | Path | Mapping[str, Tensor] | Checkpoint, scheme: str | None = None) -> Checkpoint:
    """Open a full checkpoint, and refuse one that holds factors of adapters: they are no weights of a model.

    Args:
        scheme: of codes, to which its linear layers are rounded and back, as `Recipe.base_as` says.

    Raises:
        CheckpointError: not found, of an unsupported format, damaged, an adapter, or already stored as codes.
    """
    opened = open_checkpoint(location)
    if problem := unmerged_problem(opened):
        opened.close()
        raise CheckpointError(problem)
    if scheme is None:
        return opened
    rounded: Checkpoint = plugins.needed("actmat.views", "simulated").of(opened, scheme)
    return rounded


def open_expert(
    location: str | Path | Mapping[str, Tensor] | Checkpoint,
    base: Checkpoint | None,
    *,
    is_full: bool = False,
    stacks: tuple[StackWord, ...] = (),
) -> Expert:
    """Open what `location` names; reads headers, and no tensor of a full checkpoint.

    >>> import torch
    >>> from actmat.checkpoints.memory import MemoryCheckpoint
    >>> base = MemoryCheckpoint({"w": torch.ones(2)})
    >>> with open_expert({"w": torch.zeros(2)}, base) as expert:
    ...     expert.source("w")
    Source(name='w', kind='stored', dtype='float32', nbytes=8, rank=0)

    Args:
        base: what the deltas are added to. None opens an adapter for its factors.
        is_full: whether the location is known to hold no adapter, so that it need not be looked at again.
        stacks: what the user says of stacked experts in an adapter.

    Raises:
        CheckpointError: nothing there, damaged, or an adapter that cannot be merged into this base; carries all
            problems.
    """
    family = _family(location) if isinstance(location, str | Path) and not is_full else None
    if stacks:
        if family is None or family.told is None:
            raise CheckpointError(f"{location}: 'stacks' is of adapters of PEFT, and it is none: leave it out")
        family = family.told(stacks)
    if base is not None:
        if family is not None:
            return family.open(str(location), base)
        opened = open_base(location)
        try:
            return convert(opened, base) or CheckpointExpert(opened)
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
        return handle.conversion.open(open_checkpoint_handle(handle.checkpoint), other, True)
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
    for family in (PEFT, *_others()):
        if family.claims is not None and family.claims(location):
            return family
    names = tensor_names(location)
    signed = _signed(location) if holds_factors(names) else ()
    return next((f for f in (*signed, *_others()) if f.holds is not None and f.holds(names)), None)


def _others() -> Iterator[Family]:
    """Plug-ins without a sign by which the core knows whom to ask."""
    return (plugins.load(GROUP, name) for name in plugins.entries(GROUP) if name not in SIGNED)


def _signed(location: str | Path) -> list[Family]:
    """Plug-ins for a file of factors.

    Raises:
        CheckpointError: they were removed.
    """
    found = [family for name in SIGNED if (family := plugins.load(GROUP, name)) is not None]
    if not found:
        raise CheckpointError(
            f"{location}: is a file of an adapter without {ADAPTER_CONFIG}, which no installed part of actmat reads."
            f"{plugins.hint(GROUP)}"
        )
    return found
