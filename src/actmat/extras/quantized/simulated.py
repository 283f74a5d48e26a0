"""A checkpoint of floats with the values that it has when it is loaded as codes, as trainers of adapters load it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from actmat.checkpoints.base import Checkpoint, CheckpointHandle, TensorSpec
from actmat.checkpoints.raw import raw_bytes
from actmat.checkpoints.view import CheckpointView
from actmat.errors import CheckpointError
from actmat.extras.quantized.nf4 import rounded_nf4
from actmat.layout import resolve_layout
from actmat.layout.classify import HEAD_WORDS
from actmat.layout.types import Role

ROUNDINGS = {"nf4": partial(rounded_nf4, nested=False), "nf4-double": partial(rounded_nf4, nested=True)}
"""Scheme -> function that quantizes a tensor and decodes it."""
FORMAT = "simulated"
"""Format of its handles, whose view is the scheme, the names and the handle of what it is made of."""
BYTES_PER_ENTRY = 24
"""Memory while a tensor is rounded."""


class SimulatedCheckpoint(CheckpointView):
    """Tensors of a checkpoint, which is closed with it, rounded by a codec when they are read.

    Args:
        inner: the checkpoint as stored.
        names: tensors that are rounded, whole.
        scheme: key of `ROUNDINGS`.
    """

    def __init__(self, inner: Checkpoint, names: Iterable[str], scheme: str) -> None:
        super().__init__(inner)
        self._names, self._scheme, self._round = frozenset(names), scheme, ROUNDINGS[scheme]
        self.specs, self.aliases, self.written_sidecars = inner.specs, inner.aliases, inner.written_sidecars
        self.notes = (*inner.notes, f"{len(self._names)} tensors are rounded to {scheme} and back as they are read")
        self._last = threading.local()

    @property
    def written_config(self) -> Mapping[str, Any] | None:
        """See `Checkpoint`."""
        return self.inner.written_config

    def read(self, name: str) -> Tensor:
        """The whole tensor, rounded."""
        found = self.inner.read(name)
        return self._round(found) if name in self._names else found

    def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        """Bytes of the tensor; a thread keeps the last one that it rounded."""
        if spec.name not in self._names:
            self.inner.read_into(spec.name, start, out)
            return
        if getattr(self._last, "name", None) != spec.name:
            self._last.value, self._last.name = self.read(spec.name), spec.name
        out[:] = raw_bytes(self._last.value)[start : start + len(out)]

    @property
    def buffer_bytes(self) -> int:
        """A tensor that a thread keeps, and its memory while it rounds it."""
        return self.inner.buffer_bytes + BYTES_PER_ENTRY * max((self.specs[n].numel for n in self._names), default=0)

    def handle(self) -> CheckpointHandle:
        """Address of the stored checkpoint, with the tensors that are rounded."""
        inner = self.inner.handle()
        return CheckpointHandle(
            inner.address, FORMAT, self.location, view=(self._scheme, tuple(sorted(self._names)), inner)
        )


class _Simulated:
    """See `checkpoints.resolve.View`."""

    def open(self, view: Any, open_handle: Callable[[CheckpointHandle], Checkpoint]) -> Checkpoint:
        """The checkpoint of a handle's view, which may have gone through JSON."""
        scheme, names, inner = view
        return SimulatedCheckpoint(
            open_handle(inner if isinstance(inner, CheckpointHandle) else CheckpointHandle(**inner)), names, scheme
        )

    def of(self, base: Checkpoint, scheme: str) -> Checkpoint:
        """The base with the linear layers rounded that bitsandbytes replaces: all but the output head.

        Raises:
            CheckpointError: it is stored as codes already, or has no such layers in the usual orientation.
        """
        if coded := next((n for n in base.specs if base.scheme(n)), None):
            base.close()
            raise CheckpointError(
                f"{base.location}: base_as={scheme} rounds floats, and tensor '{coded}' is stored as codes already: "
                "the adapter is added to what they stand for. Fix: leave out base_as"
            )
        layouts = resolve_layout(base.specs, base.config).tensors
        names = [
            name
            for name, layout in layouts.items()
            if layout.role in (Role.LINEAR, Role.FUSED_LINEAR)
            and len(base.specs[name].shape) == 2
            and not layout.reason.startswith(HEAD_WORDS)
        ]
        turned = [n for n in names if layouts[n].orientation != "OI"]
        if turned or not names:
            base.close()
            found = f"'{turned[0]}' is stored transposed" if turned else "none was found"
            raise CheckpointError(
                f"{base.location}: base_as={scheme} rounds linear layers, stored as rows of outputs, and {found}. "
                "Fix: save a copy that was loaded in 4 bits and dequantized (model.dequantize()), as the base"
            )
        return SimulatedCheckpoint(base, names, scheme)


SIMULATED = _Simulated()
