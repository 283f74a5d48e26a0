"""Memory of a simulated device: every tensor that an operation makes is counted, and refused above a bound.

A CPU has no allocator of its own that fails early. `Ledger` is one, for tests, benchmarks and dry runs: what torch
allocates inside of `counting()` is added up until it is freed. Scratch memory inside LAPACK is not seen.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actmat.errors import format_size


class Ledger:
    """Bytes in use of one simulated device; threads share it.

    Args:
        name: of the device, for messages.
        limit: bytes.

    Attributes:
        used, peak: bytes now, and at most so far.

    >>> ledger = Ledger("cpu:0", 1000)
    >>> with ledger.counting():
    ...     kept = torch.zeros(100)
    >>> ledger.used
    400
    >>> with ledger.counting():
    ...     torch.zeros(1000)
    Traceback (most recent call last):
    torch.OutOfMemoryError: cpu:0 is out of memory: tried to allocate 4 kB, 400 B of 1 kB are in use
    """

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        self.used = 0
        self.peak = 0
        self._lock = threading.RLock()  # a tensor may be freed, and then noted, while another is noted
        self._alive: dict[int, weakref.ref[Any]] = {}

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count what this thread allocates inside."""
        mode = _Counting()
        mode.ledger = self
        with mode:
            yield

    def note(self, made: Any, given: Any) -> None:
        """Count the storages of `made` that are new: no view of what was `given`, and not counted before.

        Raises:
            torch.OutOfMemoryError: they do not fit.
        """
        before = {t.untyped_storage()._cdata for t in tree_leaves(given) if isinstance(t, Tensor)}
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in before:
                    self._add(storage)

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, nbytes = storage._cdata, storage.nbytes()
        with self._lock:
            if address in self._alive:
                return
            if self.used + nbytes > self.limit:
                raise torch.OutOfMemoryError(
                    f"{self.name} is out of memory: tried to allocate {format_size(nbytes)}, {format_size(self.used)} "
                    f"of {format_size(self.limit)} are in use"
                )
            self.used += nbytes
            self.peak = max(self.peak, self.used)
            self._alive[address] = weakref.ref(storage, lambda _: self._free(address, nbytes))

    def _free(self, address: int, nbytes: int) -> None:
        with self._lock:
            del self._alive[address]
            self.used -= nbytes


def _dispatch(
    self: Any,
    func: Callable[..., Any],
    types: Sequence[type],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    kwargs = kwargs or {}
    made = func(*args, **kwargs)
    self.ledger.note(made, (args, kwargs))
    return made


_Counting: Any = type("_Counting", (TorchDispatchMode,), {"__torch_dispatch__": _dispatch})
"""Sees every operation of the thread that enters it; its base has no annotations."""
