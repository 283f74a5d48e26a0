"""`Candidate`: a place that may hold an adapter, with its files, and the one file that may hold factors.

Such a file is a `.safetensors` file, one in a folder that has no other and no `config.json`, a file of diffusers' name
`pytorch_lora_weights`, and, elsewhere than on this machine, the only file where its name says `lora`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from actmat.checkpoints.codecs import decoded
from actmat.checkpoints.folder import ADAPTER_CONFIG, LORA_FILES
from actmat.checkpoints.formats.safetensors import SAFETENSORS
from actmat.checkpoints.formats.torch_files import TORCH_FILES
from actmat.checkpoints.model import Model
from actmat.checkpoints.resolve import open_source
from actmat.checkpoints.source import LocalSource, Source
from actmat.errors import CheckpointError
from actmat.experts.lora.fields import StackWord

_MODEL_FILES = ("config.json", "model_index.json", ADAPTER_CONFIG)


class Candidate:
    """A place that is offered to each family of adapters, and is a full checkpoint if no family claims it.

    Args:
        source: its files.
        stacks: the user's statements on stacked experts in an adapter.
    """

    def __init__(self, source: Source, stacks: tuple[StackWord, ...] = ()) -> None:
        self.source, self.stacks = source, stacks

    @cached_property
    def file(self) -> Model | None:
        """The single file that may hold factors, open, its header read; None without such a file."""
        names = [self.source.named] if self.source.named is not None else self.source.names
        name = (_local_file if isinstance(self.source, LocalSource) else _remote_file)(names, self.source.named)
        if name is None:
            return None
        try:
            return (TORCH_FILES if name.endswith(".bin") else SAFETENSORS).open(self.source.only(name))
        except CheckpointError:
            return None  # opening it as a model gives the error

    def model(self) -> Model:
        """The full model that it is."""
        if self.file is not None and self.source.named is not None and isinstance(self.source, LocalSource):
            return decoded(self.file)
        self.close()
        return open_source(self.source)

    def close(self) -> None:
        """Close the file, if it was opened."""
        if (opened := self.__dict__.get("file")) is not None:
            opened.close()


def _local_file(names: Sequence[str], named: str | None) -> str | None:
    if named is not None:
        return named if named.endswith(".safetensors") or named in LORA_FILES else None
    found = [n for n in LORA_FILES if n in names]
    if not found and not any(n in names for n in _MODEL_FILES):
        found = [n for n in names if n.endswith(".safetensors")]
        found = found if len(found) == 1 else []
    return found[0] if found else None


def _remote_file(names: Sequence[str], named: str | None) -> str | None:
    if any(n in names for n in _MODEL_FILES):
        return None
    if LORA_FILES[0] in names:
        return LORA_FILES[0]
    found = [n for n in names if n.endswith(".safetensors")]
    return found[0] if len(found) == 1 and "lora" in found[0].lower() else None
