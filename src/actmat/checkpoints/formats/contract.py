"""`Format`: a way of storing tensors in files, and how to open it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.source import Source

__all__ = ["Format"]


@dataclass(frozen=True, slots=True)
class Format:
    """Declaration of a format, one entry of `FORMATS`."""

    name: str  # in handles
    patterns: tuple[str, ...]  # its weight files as error messages list them, such as `*.safetensors`
    claims: Callable[[Source], bool]  # true if `Source.weights` has files of this format, maybe among others
    open: Callable[[Source], Checkpoint]  # the checkpoint in a source that is claimed; reads headers, no tensor
