"""`Format`: a way of storing tensors in files, and how to open it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.source import Source

__all__ = ["Format"]


@dataclass(frozen=True, slots=True)
class Format:
    """Declaration of a format, one entry of `FORMATS`.

    Args:
        name: in handles.
        patterns: its weight files as error messages list them, such as `*.safetensors`.
        claims: true if the file names include weights of this format. Names of adapters and of optimizer states are
            removed before.
        open: the checkpoint in a source that is claimed, or in a file that the user named. Reads headers, no tensor.
            A folder may hold files of other formats too.
    """

    name: str
    patterns: tuple[str, ...]
    claims: Callable[[Sequence[str]], bool]
    open: Callable[[Source], Checkpoint]
