"""Open what a user named: a folder, a weight file, a hub id `org/name[@revision]`, a URL, a stack of their layers, a
model with an adapter merged into it (`model+adapter`), or a mapping of tensors.

A local path wins over a hub id of the same text, unless that is written `hf://org/name`. Weights of a plain hub id are
downloaded into the hub's cache; those of `hf://`, as of every URL, are read by ranges.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from actmat import plugins
from actmat.bounds import is_url, list_folder, local_path
from actmat.checkpoints.base import Checkpoint, CheckpointHandle
from actmat.checkpoints.codecs import decoded
from actmat.checkpoints.formats import find_format, format_named
from actmat.checkpoints.layer_names import StackPart, adapted_parts, stack_parts
from actmat.checkpoints.memory import MemoryCheckpoint
from actmat.checkpoints.source import LocalSource, Source
from actmat.checkpoints.view import ViewHandle
from actmat.errors import CheckpointError, did_you_mean


@runtime_checkable
class OpenAdapted(Protocol):
    """Models with an adapter merged into them."""

    def __call__(self, location: str, model: Checkpoint, adapter: str) -> Checkpoint:
        """The model with the adapter at a location merged into it; closing it closes the model."""


@runtime_checkable
class OpenStack(Protocol):
    """Layers of several checkpoints as one."""

    def __call__(self, location: str, parts: Sequence[StackPart], open_part: Callable[[str], Checkpoint]) -> Checkpoint:
        """Open every part by `open_part`, once each."""


COMMIT = re.compile("[0-9a-f]{40}")
HUB_ID = re.compile(r"(?P<scheme>hf://)?(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")


def commit_of(address: str) -> str:
    """The commit that a hub id names in full, else an empty string.

    >>> commit_of("hf://org/name@" + "0" * 40) == "0" * 40, commit_of("org/name@main"), commit_of("https://host/a")
    (True, '', '')
    """
    found = HUB_ID.fullmatch(address)
    revision = (found["revision"] if found is not None else None) or ""
    return revision if COMMIT.fullmatch(revision) else ""


@dataclass(frozen=True, slots=True)
class StackHandle:
    """Address of a stack: a `View`."""

    location: str
    parts: tuple[tuple[CheckpointHandle, StackPart], ...]

    def open(self, open_handle: Callable[[CheckpointHandle], Checkpoint]) -> Checkpoint:
        """The stack."""
        handles = {part.location: handle for handle, part in self.parts}
        return _open_stack(self.location, [p for _, p in self.parts], lambda place: open_handle(handles[place]))


def pinned_stack(handle: CheckpointHandle) -> str:
    """Text of a stack with the commits of its parts on the hub; empty if no part is there, or without a stack."""
    view = handle.view
    while isinstance(view, ViewHandle):
        view = view.inner.view
    if not isinstance(view, StackHandle) or not any(commit_of(h.address) for h, _ in view.parts):
        return ""
    return " + ".join(str(replace(p, location=h.address) if commit_of(h.address) else p) for h, p in view.parts)


def open_checkpoint(
    location: str | Path | Mapping[str, Tensor] | Checkpoint, *, cache_dir: str | Path | None = None
) -> Checkpoint:
    """Open a folder, file, hub id, tensors by name, or an open checkpoint (returned unchanged); reads headers only.

    >>> import torch
    >>> with open_checkpoint({"w": torch.ones(2, 3)}) as checkpoint:
    ...     checkpoint.specs["w"].shape
    (2, 3)

    Raises:
        CheckpointError: not found, of an unsupported format, damaged, or an adapter.
    """
    if isinstance(location, Checkpoint):
        return location
    if isinstance(location, Mapping):
        return decoded(MemoryCheckpoint(location))
    parts, pair = _parts(location)
    if parts:
        return _open_stack(str(location), parts, lambda place: open_checkpoint(place, cache_dir=cache_dir))
    if pair is None:
        return open_source(find_source(location, cache_dir=cache_dir))
    merged = plugins.needed("actmat.formats", "view.adapted", OpenAdapted)
    return merged(str(location), open_checkpoint(pair[0], cache_dir=cache_dir), pair[1])


def is_composed(location: str | Path) -> bool:
    """True for a stack of layers and for `model+adapter`, unless a file or folder has that name."""
    return any(_parts(location))


def _parts(location: str | Path) -> tuple[Sequence[StackPart], tuple[str, str] | None]:
    text = str(location)
    parts, pair = stack_parts(text), adapted_parts(text)
    return (parts, pair) if (parts or pair) and not os.path.lexists(location) else ((), None)


def open_source(source: Source) -> Checkpoint:
    """Open the checkpoint in a source; quantized tensors are decoded."""
    return decoded(find_format(source).open(source))


def open_handle(handle: CheckpointHandle) -> Checkpoint:
    """Open the checkpoint that `Checkpoint.handle` described, in any process that has the same storage."""
    if handle.view is not None:
        return handle.view.open(open_handle)
    source = find_source(handle.address, cache_dir=handle.cache_dir or None, handle=handle)
    source.location = handle.location
    return decoded(format_named(handle.format).open(source))


def _open_stack(location: str, parts: Sequence[StackPart], open_part: Callable[[str], Checkpoint]) -> Checkpoint:
    return plugins.needed("actmat.formats", "view.stack", OpenStack)(location, parts, open_part)


def find_source(
    location: str | Path, *, cache_dir: str | Path | None = None, handle: CheckpointHandle | None = None
) -> Source:
    """The folder, file, hub repository or URL that `location` names; a `handle` pins its version.

    Raises:
        CheckpointError: nothing there, or not a location.
    """
    text = str(location)
    if not text or "\0" in text:
        raise CheckpointError(f"expected a folder, a weight file, a hub id or a URL, found {text!r}")
    path = local_path(text)
    hub_id = HUB_ID.fullmatch(text) if isinstance(location, str) else None
    if hub_id is None and is_url(location):
        return _open_url(text, handle)
    if hub_id is None or not hub_id["scheme"]:
        if os.path.exists(path):
            return LocalSource(path, text)
        # a missing a/b whose parent is a folder is a path rather than a hub id
        if hub_id is None or (path.parent != Path() and os.path.isdir(path.parent)):
            raise _not_found(path, text)
    from actmat.checkpoints.remote import GROUP, HubStorage

    streams = bool(hub_id["scheme"]) if handle is None else handle.streams
    hub = plugins.needed(GROUP, "hf", HubStorage)
    return hub.open_repository(hub_id["repo"], hub_id["revision"], cache_dir=cache_dir, streams=streams)


def _open_url(url: str, handle: CheckpointHandle | None) -> Source:
    if url.startswith("hf://"):
        raise CheckpointError(f"{url}: expected hf://org/name or hf://org/name@revision, found something else")
    from actmat.checkpoints.remote import storage_of

    pinned = {} if handle is None else {name: (size, etag) for name, size, etag in handle.etags}
    return storage_of(url).open_source(url, pinned=pinned)


def _not_found(path: Path, text: str) -> CheckpointError:
    parent = path.parent
    while not os.path.isdir(parent) and parent != parent.parent:
        parent = parent.parent
    missing = path.relative_to(parent).parts[0]
    hint = did_you_mean(missing, list_folder(parent))
    return CheckpointError(
        f"{text}: expected a folder, a weight file or a hub id (org/name or org/name@revision), found nothing there: "
        f"'{parent}' has no '{missing}'.{hint} Fix: correct the path; to mean the hub, write hf://org/name."
    )
