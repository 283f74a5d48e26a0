"""A float checkpoint rounded to the values it has when loaded in 4 bits for adapter training."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from actmat.checkpoints.base import Checkpoint, CheckpointHandle, TensorSpec
from actmat.checkpoints.raw import raw_bytes
from actmat.checkpoints.view import CheckpointView
from actmat.errors import CheckpointError
from actmat.extras.quantized.nf4 import rounded_nf4
from actmat.layout.classify import is_head
from actmat.layout.resolve import resolve_layout
from actmat.layout.types import Role

ROUNDINGS = {"nf4": partial(rounded_nf4, nested=False), "nf4-double": partial(rounded_nf4, nested=True)}
"""Scheme -> function that quantizes and decodes a tensor."""
BYTES_PER_ENTRY = 24
"""Memory for rounding a tensor, relative to its size."""


class SimulatedCheckpoint(CheckpointView):
    """View of a checkpoint whose tensors are rounded by a codec on reading; closes the checkpoint.

    Args:
        inner: the stored checkpoint.
        names: tensors to round.
        scheme: key of `ROUNDINGS`.
    """

    def __init__(self, inner: Checkpoint, names: Iterable[str], scheme: str) -> None:
        super().__init__(inner)
        self._names, self._scheme, self._round = frozenset(names), scheme, ROUNDINGS[scheme]
        self.specs, self.aliases = inner.specs, inner.aliases
        self.notes = (*inner.notes, f"{len(self._names)} tensors are rounded to {scheme} and back on reading")
        self._last = threading.local()

    @property
    def written_config(self) -> Mapping[str, Any] | None:
        """See `Checkpoint`."""
        return self.inner.written_config

    def read(self, name: str) -> Tensor:
        """Read the whole tensor, rounded."""
        found = self.inner.read(name)
        return self._round(found) if name in self._names else found

    def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        """Fill with the tensor's bytes; each thread caches its last rounded tensor."""
        if spec.name not in self._names:
            self.inner.read_into(spec.name, start, out)
            return
        if getattr(self._last, "name", None) != spec.name:
            self._last.value, self._last.name = self.read(spec.name), spec.name
        out[:] = raw_bytes(self._last.value)[start : start + len(out)]

    @property
    def buffer_bytes(self) -> int:
        """Memory of a thread's cached tensor and of rounding it."""
        return self.inner.buffer_bytes + BYTES_PER_ENTRY * max((self.specs[n].numel for n in self._names), default=0)

    def handle(self) -> CheckpointHandle:
        """Handle of the stored checkpoint, with the rounded tensors."""
        return self.viewed(_opened, (tuple(sorted(self._names)), self._scheme))


def _opened(inner: Checkpoint, data: tuple[Iterable[str], str]) -> SimulatedCheckpoint:
    return SimulatedCheckpoint(inner, *data)


def simulated(base: Checkpoint, scheme: str) -> Checkpoint:
    """Round the linear layers that bitsandbytes quantizes: all except the output head.

    Raises:
        CheckpointError: the base is already quantized, or has no such layers in the usual orientation.
    """
    if coded := next((n for n in base.specs if base.scheme(n)), None):
        base.close()
        raise CheckpointError(
            f"{base.location}: base_as={scheme} rounds floats, but tensor '{coded}' is already quantized: "
            "the adapter is added to its decoded values. Fix: remove base_as"
        )
    layouts = resolve_layout(base.specs, base.config).tensors
    names = [
        name
        for name, layout in layouts.items()
        if layout.role in (Role.LINEAR, Role.FUSED_LINEAR) and len(base.specs[name].shape) == 2 and not is_head(name)
    ]
    turned = [n for n in names if layouts[n].orientation != "OI"]
    if turned or not names:
        base.close()
        found = f"'{turned[0]}' is stored transposed" if turned else "it has none"
        raise CheckpointError(
            f"{base.location}: base_as={scheme} rounds linear layers with one row per output, but {found}. "
            "Fix: load the base in 4 bits, dequantize it (model.dequantize()), save it, and use that copy"
        )
    return SimulatedCheckpoint(base, names, scheme)
