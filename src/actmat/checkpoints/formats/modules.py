"""Folders of sentence-transformers: an encoder at the top, and modules in folders that `modules.json` names.

Modules with weights (Dense, LayerNorm, sparse ones) are read with the encoder as one model. Its tensors keep their
names; those of a module begin with its folder: `2_Dense.linear.weight`. All other files are side files. An encoder in
a folder of its own (`0_Transformer`) is read, and written, as if it lay at the top, where the library puts it now. The
encoders of a router are components, as those of a pipeline.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from actmat.bounds import parse_json, read_bytes
from actmat.checkpoints.base import FileIdentity
from actmat.checkpoints.formats.joined import join_components
from actmat.checkpoints.formats.safetensors import SAFETENSORS
from actmat.checkpoints.formats.torch_files import TORCH_FILES
from actmat.checkpoints.model import Format, Model
from actmat.checkpoints.side_files import MODULES, OWN, ROUTER, SideFiles, is_weights
from actmat.checkpoints.source import Source
from actmat.errors import CheckpointError

_INSIDE = (SAFETENSORS, TORCH_FILES)


def _form_of(source: Source) -> Format | None:
    return next((form for form in _INSIDE if form.claims(source)), None)


class _Flat(Source):
    """A folder whose encoder is in a folder of its own, as if it were at the top."""

    def __init__(self, outer: Source, folder: str, encoder: Source) -> None:
        self.location, self.hub_id, self.notes = outer.location, outer.hub_id, outer.notes
        self.cache_dir, self.streams = outer.cache_dir, outer.streams
        self.names = sorted({*outer.names, *encoder.names})
        self._outer, self.folder, self._encoder = outer, folder, encoder

    def _holder(self, name: str) -> Source:
        return self._encoder if name in self._encoder.names else self._outer

    @property
    def address(self) -> str:
        return self._outer.address

    @property
    def directory(self) -> Path | None:
        return self._encoder.directory

    def local(self, name: str) -> Path | None:
        return self._holder(name).local(name)

    def fetch(self, name: str) -> Path:
        return self._holder(name).fetch(name)

    def weight_map(self, index: str) -> dict[str, str]:
        return self._encoder.weight_map(index)

    def identity(self, names: Iterable[str]) -> tuple[FileIdentity, ...]:
        return self._encoder.identity(names)

    def read_remote(self, name: str) -> tuple[Callable[[int, int], bytes], int]:
        return self._encoder.read_remote(name)

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        return self._encoder.read_range(name, offset, length)

    def child(self, name: str) -> Source | None:
        return self._outer.child(name)

    def only(self, name: str) -> Source:
        return self._holder(name).only(name)

    def whole(self) -> Source:
        return self

    def side_files(self, merged: Sequence[str]) -> SideFiles:
        start = f"{self.folder}/"
        side = self._outer.side_files([*merged, *(start + name for name in merged)])
        kept = {path.removeprefix(start) for path in side.kept} - OWN
        left_out = {path.removeprefix(start): why for path, why in side.left_out.items()}
        return SideFiles(tuple(sorted(kept)), left_out, tuple(m for m in side.modules if m != self.folder))

    def fetch_sidecars(self) -> Path | None:
        return self._outer.fetch_sidecars()

    def below(self, name: str) -> str:
        return f"{self.folder}/{name}" if name.partition("/")[0] in self._encoder.names else name


def _with_encoder(source: Source) -> Source | None:
    """The source with its encoder at the top; None without one."""
    if source.named is not None or MODULES not in source.names:
        return None
    if _form_of(source) is not None:
        return source
    first = str(next(iter(_listed(source)), {}).get("path"))
    encoder = source.child(first) if first in source.side_files(()).modules else None
    return _Flat(source, first, encoder) if encoder is not None and _form_of(encoder) is not None else None


def _listed(source: Source) -> list[dict[str, Any]]:
    """Modules in the order in which they compute."""
    return list(parse_json(read_bytes(source.fetch(MODULES))))


def _texts(source: _Flat) -> dict[str, str]:
    """`modules.json` of a folder whose encoder is now at the top."""
    modules = [{**m, "path": "" if m["path"] == source.folder else m["path"]} for m in _listed(source)]
    return {MODULES: json.dumps(modules, indent=2) + "\n"}


def _claims(source: Source) -> bool:
    if source.named is not None or MODULES not in source.names:
        return False
    return _with_encoder(source) is not None or ROUTER in source.names


def _open(source: Source) -> Model:
    """Open the encoder, and every module with weights.

    Raises:
        CheckpointError: weights of a module cannot be read.
    """
    source = _with_encoder(source) or source
    form = _form_of(source)
    with ExitStack() as stack:
        parts = {} if form is None else {"": stack.enter_context(form.open(source))}
        side = source.side_files(parts[""].folder.merged if parts else ())
        for folder in side.modules:
            if any(path.startswith(f"{folder}/") and is_weights(path) for path in side.left_out):
                inner = source.child(folder)
                form = None if inner is None else _form_of(inner)
                if inner is None or form is None:
                    raise CheckpointError(
                        f"{source.location}: the weights of the module '{folder}' cannot be read, expected safetensors "
                        "or torch files in its folder. Fix: load and save the model with sentence-transformers."
                    )
                parts[folder] = stack.enter_context(form.open(inner))
        stack.pop_all()
    model = join_components(source, parts, {"_class_name": "SentenceTransformer"}, SENTENCE_MODULES.name)
    if "" not in parts:  # a router has no encoder of its own
        return model
    if len(parts) == 1 and not isinstance(source, _Flat):
        return parts[""]
    texts = _texts(source) if isinstance(source, _Flat) else {}
    prefixes = {f"{name}.": name for name in parts if name}
    of_encoder = replace(parts[""].folder, merged=model.folder.merged, parts=prefixes, texts=texts)
    return replace(model, folder=of_encoder)


SENTENCE_MODULES = Format("modules", (MODULES,), _claims, _open)
