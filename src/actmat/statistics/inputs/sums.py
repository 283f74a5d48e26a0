"""Sums over the inputs of linear maps.

Layers that read the same input (query, key and value; gate and up) share one sum. Sharing is detected in the first pass
that uses a linear map, and checked in every later one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from actmat.errors import StatisticsError
from actmat.statistics.inputs.linear_maps import LinearMap

__all__ = ["Input", "InputSums", "RowSum", "SharedSum"]

REMEMBERED = 8
"""Inputs kept alive to recognise them when the next layer reads them."""


class RowSum(Protocol):
    """Running sum over rows."""

    def add(self, rows_NI: Tensor) -> None:
        """Add rows, `N I` (`N G I` for a convolution in groups)."""


S = TypeVar("S", bound=RowSum)


@dataclass
class SharedSum(Generic[S]):
    """Linear maps that read the same inputs, and their common sum."""

    sum: S  # the sum
    first_pass: int  # number of the pass in which it was made
    members: list[LinearMap] = field(default_factory=list)  # the linear maps
    seen: list[Hashable] = field(default_factory=list)  # keys of the inputs of this pass


@dataclass(frozen=True)
class Input:
    """An input of a linear map."""

    key: Hashable  # identity of the input while `owner` lives
    size: tuple[int, int]  # `I` and the number of groups
    rows: Callable[[], Tensor]  # computes `N I` (`N G I`)
    owner: Tensor  # the tensor that must stay alive for the key to mean this input
    held: bool  # the tensor stays alive to the end of the pass by itself


class InputSums(Generic[S]):
    """Sums over the inputs of all linear maps seen so far, each made by `make(width, groups)`; see the module."""

    def __init__(self, make: Callable[[int, int], S], *, share: bool = True) -> None:
        self._make = make
        self._share = share
        self._shared: dict[LinearMap, SharedSum[S]] = {}
        self._read: Counter[LinearMap] = Counter()  # inputs that each map has read in this pass
        self._pass = 0
        self._recent: deque[tuple[Hashable, SharedSum[S], Any]] = deque()
        self._held: dict[Hashable, SharedSum[S]] = {}

    def add(self, linear_map: LinearMap, given: Input) -> None:
        """Add an input of a linear map; its rows are computed and summed once for all maps that read it."""
        shared = self._shared.get(linear_map)
        if shared is None:
            shared = self._known(given.key) or SharedSum(self._make(*given.size), self._pass)
            self._shared[linear_map] = shared
            shared.members.append(linear_map)
        position = self._read[linear_map]
        if position < len(shared.seen):
            if shared.seen[position] != given.key:
                raise _diverged(shared, linear_map)
        elif position == len(shared.seen):
            shared.sum.add(given.rows())
            shared.seen.append(given.key)
            self._remember(given, shared)
        self._read[linear_map] += 1

    def end_pass(self) -> None:
        """Check that linear maps with a common sum have read the same inputs, and start the next pass."""
        for linear_map, shared in self._shared.items():
            if self._read[linear_map] != len(shared.seen):
                raise _diverged(shared, linear_map)
        for shared in self._shared.values():
            shared.seen.clear()
        self._read.clear()
        self._recent.clear()
        self._held.clear()
        self._pass += 1

    def shared(self) -> list[SharedSum[S]]:
        """Every sum, in the order of first use."""
        return list({id(shared): shared for shared in self._shared.values()}.values())

    def _known(self, key: Hashable) -> SharedSum[S] | None:
        """The sum of this pass that has taken this input and no other."""
        if not self._share:
            return None
        shared = self._held.get(key) or next((s for k, s, _ in self._recent if k == key), None)
        return shared if shared is not None and shared.first_pass == self._pass and shared.seen == [key] else None

    def _remember(self, given: Input, shared: SharedSum[S]) -> None:
        if given.held:
            self._held[given.key] = shared
            return
        self._recent.append((given.key, shared, given.owner))
        if len(self._recent) > REMEMBERED:
            old, of, _ = self._recent.popleft()
            of.seen[of.seen.index(old)] = object()  # its memory may now hold something else


def _diverged(shared: SharedSum[Any], linear_map: LinearMap) -> StatisticsError:
    others = ", ".join(str(m) for m in shared.members if m != linear_map)
    return StatisticsError(
        f"{linear_map} read the same input as {others} in the first batch, but not in a later one, so that one "
        "sum cannot serve both. Collect with share=False (--no-share)."
    )
