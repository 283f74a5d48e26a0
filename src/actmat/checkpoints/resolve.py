"""Open what a user named: a folder, a weight file, a hub id `org/name[@revision]`, a URL, a stack of their layers, a
model with an adapter merged into it (`model+adapter`), or a mapping of tensors.

A local path wins over a hub id of the same text, unless that is written `hf://org/name`. Weights of a plain hub id are
downloaded into the hub's cache; those of `hf://`, as of every URL, are read by ranges.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType
from typing import TypeAlias

from torch import Tensor

from actmat import plugins
from actmat.bounds import is_url, list_folder, local_path
from actmat.checkpoints.base import Tensors, TensorsHandle
from actmat.checkpoints.codecs import decoded
from actmat.checkpoints.formats import find_format
from actmat.checkpoints.layer_names import adapted_parts, stack_parts
from actmat.checkpoints.memory import hold_model
from actmat.checkpoints.model import Model
from actmat.checkpoints.remote import storage_of
from actmat.checkpoints.source import LocalSource, Source
from actmat.errors import CheckpointError, did_you_mean

OpenComposed: TypeAlias = Callable[[str, Callable[[str], Model]], Model]
"""`view(location, open_part)` opens a model that a location names by several: a stack of layers, or a model with an
adapter merged into it. It opens every part by `open_part`, once each; closing the model closes them."""
COMMIT = re.compile("[0-9a-f]{40}")
HUB_ID = re.compile(r"(?P<scheme>hf://)?(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")


def commit_of(address: str) -> str:
    """The commit that a hub id names in full, else an empty string.

    >>> commit_of("hf://org/name@" + "0" * 40) == "0" * 40, commit_of("org/name@main"), commit_of("https://host/a")
    (True, '', '')
    """
    named = HUB_ID.fullmatch(address)
    revision = (named["revision"] if named is not None else None) or ""
    return revision if COMMIT.fullmatch(revision) else ""


def open_model(location: str | Path | Mapping[str, Tensor] | Model) -> Model:
    """Open a folder, file, hub id, tensors by name, or an open model (returned unchanged); reads headers only.

    >>> import torch
    >>> with open_model({"w": torch.ones(2, 3)}) as model:
    ...     model.tensors.read("w").sum()
    tensor(6.)

    Raises:
        CheckpointError: not found, of an unsupported format, damaged, or an adapter.
    """
    if isinstance(location, Model):
        return location
    if isinstance(location, Mapping):
        return decoded(hold_model(location))
    if not (kind := _composed_kind(location)):
        return open_source(find_source(location))
    view: OpenComposed = plugins.needed("actmat.formats", f"view.{kind}", FunctionType)
    return view(str(location), open_model)


def open_tensors(location: str | Path | Mapping[str, Tensor]) -> Tensors:
    """The tensors of `open_model`; closing them closes all that is open."""
    return open_model(location).tensors


def is_composed(location: str | Path) -> bool:
    """True for a stack of layers and for `model+adapter`, unless a file or folder has that name."""
    return bool(_composed_kind(location))


def _composed_kind(location: str | Path) -> str:
    text = str(location)
    kind = "stack" if stack_parts(text) else "adapted" if adapted_parts(text) else ""
    return "" if kind and os.path.lexists(location) else kind


def open_source(source: Source) -> Model:
    """Open the model in a source; quantized tensors are decoded."""
    return decoded(find_format(source).open(source))


def open_handle(handle: TensorsHandle) -> Tensors:
    """Open the tensors that `Tensors.handle` described, in any process that has the same storage."""
    if handle.make is not None:
        return handle.make([open_handle(source) for source in handle.sources], *handle.arguments)
    source = find_source(handle.address, handle)
    source.location = handle.location
    return decoded(find_format(source, of_adapter=True).open(source)).tensors


def find_source(location: str | Path, handle: TensorsHandle | None = None) -> Source:
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
        if text.startswith("hf://"):
            raise CheckpointError(f"{text}: expected hf://org/name or hf://org/name@revision, found something else")
        pinned = {} if handle is None else {name: (size, etag) for name, size, etag in handle.etags}
        return storage_of(text).open_source(text, pinned=pinned)
    if hub_id is None or not hub_id["scheme"]:
        if os.path.exists(path):
            return LocalSource(path, text)
        # a missing a/b whose parent is a folder is a path rather than a hub id
        if hub_id is None or (path.parent != Path() and os.path.isdir(path.parent)):
            raise _not_found(path, text)
    streams = bool(hub_id["scheme"]) if handle is None else handle.streams
    return storage_of("hf://").open_repository(hub_id["repo"], hub_id["revision"], streams=streams)


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
