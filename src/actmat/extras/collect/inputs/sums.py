"""Linear maps of a model, recognized by the memory of the weights in an operation, and sums over their inputs.

Layers that read the same input (query, key and value; gate and up) share one sum. Sharing is detected in the first pass
that uses a linear map, and checked in every later one.

Shapes: `O` out_features, `I` in_features, `G` groups of a convolution, `N` rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from actmat.errors import StatisticsError
from actmat.statistics.triangle import BLOCK, packed_size


@dataclass(frozen=True, slots=True)
class LinearMap:
    """A parameter used as a linear map, or a part of it: expert `expert` of a stack, output features `rows`."""

    parameter: str
    expert: int | None = None
    rows: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"'{self.parameter}'" + (f" [{self.expert}]" if self.expert is not None else "")


class ParameterIndex:
    """Parameters by memory address: maps the weight in an operation, often a view, to the parameter it is part of."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._known: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in parameters.items():
            if tensor.numel():
                self._known.setdefault(tensor.data_ptr(), (name, tensor))
        self._starts = sorted(self._known)

    def move(self, parameter: Tensor, data: Tensor) -> None:
        """Follow a parameter that is about to get other memory."""
        known = self._known.get(parameter.data_ptr())
        if known is not None and known[1] is parameter:
            del self._known[parameter.data_ptr()]
            self._known[data.data_ptr()] = known
            self._starts = sorted(self._known)

    def linear_map(self, weight: Tensor, *, out_axis: int) -> LinearMap | None:
        """The linear map of a 2-D weight, `O I` for `out_axis` 0, `I O` for 1; None if some inputs are missing."""
        owner = self._owner(weight)
        if owner is None or weight.ndim != 2:
            return None
        name, parameter, offset = owner
        if parameter.ndim not in (2, 3) or not parameter.is_contiguous():
            return None
        expert = None
        if parameter.ndim == 3:
            expert, offset = divmod(offset, parameter.stride(0))
        first = divmod(offset, parameter.stride(-2))
        transposed = weight.stride() != parameter.stride()[-2:]
        if transposed and weight.stride() != parameter.stride()[-2:][::-1]:
            return None
        shape = tuple(weight.shape[::-1] if transposed else weight.shape)
        axis = 1 - out_axis if transposed else out_axis
        full = tuple(parameter.shape[-2:])
        if first[1 - axis] != 0 or shape[1 - axis] != full[1 - axis]:
            return None
        rows = (first[axis], first[axis] + shape[axis])
        return LinearMap(name, expert, None if rows == (0, full[axis]) else rows)

    def whole(self, weight: Tensor) -> str | None:
        """Name of the parameter that has this weight's memory and shape."""
        owner = self._owner(weight)
        return owner[0] if owner is not None and owner[2] == 0 and owner[1].shape == weight.shape else None

    def stack(self, weight: Tensor) -> tuple[str, int] | None:
        """Name and number of experts, if the weight is a whole stack."""
        owner = self._owner(weight)
        if owner is None or weight.ndim != 3 or owner[2] != 0 or weight.numel() != owner[1].numel():
            return None
        return owner[0], weight.shape[0]

    def _owner(self, weight: Tensor) -> tuple[str, Tensor, int] | None:
        """Name and parameter in whose memory the weight begins, and the offset in elements."""
        index = bisect_right(self._starts, weight.data_ptr()) - 1
        if index < 0:
            return None
        name, parameter = self._known[self._starts[index]]
        offset = weight.data_ptr() - self._starts[index]
        if offset >= parameter.numel() * parameter.itemsize or weight.dtype != parameter.dtype:
            return None
        return name, parameter, offset // parameter.itemsize


REMEMBERED = 8
"""Inputs kept alive to recognize them when the next layer reads them."""


class GramSum:
    """A running `sum z z^T` of width `I`: the rows `z` while they are at most `I / 2`, then their sum in float64.

    `groups` (a convolution's) is the number of independent sums; rows then have the shape `N G I`, and are summed at
    once. Rows and sums are kept on `device`; the products are computed where the rows come from, in `dtype`, float32 or
    float64.
    """

    def __init__(
        self, width: int, groups: int = 1, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        self.width = width
        self.groups = groups
        self.rows = 0
        self._dtype = dtype
        self._starts = range(0, width, BLOCK)
        shapes = [(min(BLOCK, width - s), min(s + BLOCK, width)) for s in self._starts]
        # float64 is unknown to some accelerators; there the sums stay on the CPU
        self._home = torch.device(device) if torch.device(device).type in ("cpu", "cuda") else torch.device("cpu")
        self._shapes = [(groups, *shape) for shape in shapes]
        self._sums: list[Tensor] = []
        self._held: list[Tensor] = []  # rows that are not in the sums

    def add(self, rows_NI: Tensor) -> None:
        """Add rows, `N I` (`N G I` for groups)."""
        self._place = rows_NI.device
        self._held.append(rows_NI.detach().to(self._home, self._dtype, copy=True))
        self.rows += len(rows_NI)
        if self.groups > 1 or 2 * sum(map(len, self._held)) > self.width:
            self._sum_up()

    def _sum_up(self) -> None:
        """Add the held rows to the sums."""
        self._sums = self._sums or [torch.zeros(s, dtype=torch.float64, device=self._home) for s in self._shapes]
        rows, self._held = torch.cat(self._held).to(self._place), []
        rows_GNI = rows.unsqueeze(0) if rows.ndim == 2 else rows.transpose(0, 1)
        for start, total in zip(self._starts, self._sums, strict=True):
            stop = start + total.shape[1]
            product = rows_GNI[..., start:stop].mT @ rows_GNI[..., :stop]
            total.add_(product.to(self._home))

    def stored(self, dtype: torch.dtype = torch.float64, *, whole: bool = False) -> Tensor:
        """The rows `N I` if all are held, else the lower triangle, `I(I+1)/2` entries or `G` times that; on the CPU.

        Args:
            whole: the triangle, however few the rows.
        """
        if not self._sums and self._held and not whole:
            return torch.cat(self._held).to("cpu", dtype)
        if self._held:
            self._sum_up()
        out = torch.empty(self.groups, packed_size(self.width), dtype=dtype)
        for start, total in zip(self._starts, self._sums, strict=True):
            rows = total.shape[1]
            lower = torch.ones(rows, start + rows, dtype=torch.bool).tril(start)
            triangle = total.to("cpu", dtype).masked_select(lower).view(self.groups, -1)
            out[:, packed_size(start) : packed_size(start + rows)] = triangle
        return out if self.groups > 1 else out[0]

    def clear(self) -> None:
        """Free the rows and the sums."""
        self._held, self._sums = [], []

    def nonfinite(self) -> bool:
        """Return True if a NaN or infinity was added: a sum of squares keeps it."""
        return not all(bool(torch.isfinite(s.sum())) for s in (*self._sums, *(h.square() for h in self._held)))


@dataclass
class SharedSum:
    """Linear maps that read the same inputs, and their common sum."""

    sum: GramSum
    first_pass: int  # number of the pass in which it was made
    members: list[LinearMap] = field(default_factory=list)
    seen: list[Hashable] = field(default_factory=list)  # keys of the inputs of this pass


@dataclass(frozen=True)
class Input:
    """An input of a linear map."""

    key: Hashable  # identity of the input while `owner` lives
    size: tuple[int, int]  # `I` and the number of groups
    rows: Callable[[], Tensor]  # computes `N I` (`N G I`)
    owner: Tensor  # the tensor that must stay alive for the key to mean this input
    held: bool  # the tensor stays alive to the end of the pass by itself


class InputSums:
    """Sums over the inputs of all linear maps seen so far, each made by `make(width, groups)`; see the module."""

    def __init__(self, make: Callable[[int, int], GramSum], *, share: bool = True) -> None:
        self._make = make
        self._share = share
        self._shared: dict[LinearMap, SharedSum] = {}
        self._read: Counter[LinearMap] = Counter()  # inputs that each map has read in this pass
        self._pass = 0
        self._recent: deque[tuple[Hashable, SharedSum, Any]] = deque()
        self._held: dict[Hashable, SharedSum] = {}

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

    def shared(self) -> list[SharedSum]:
        """Every sum, in the order of first use."""
        return list({id(shared): shared for shared in self._shared.values()}.values())

    def _known(self, key: Hashable) -> SharedSum | None:
        """The sum of this pass that has taken this input and no other."""
        if not self._share:
            return None
        shared = self._held.get(key) or next((s for k, s, _ in self._recent if k == key), None)
        return shared if shared is not None and shared.first_pass == self._pass and shared.seen == [key] else None

    def _remember(self, given: Input, shared: SharedSum) -> None:
        if given.held:
            self._held[given.key] = shared
            return
        self._recent.append((given.key, shared, given.owner))
        if len(self._recent) > REMEMBERED:
            old, of, _ = self._recent.popleft()
            of.seen[of.seen.index(old)] = object()  # its memory may now hold something else


def _diverged(shared: SharedSum, linear_map: LinearMap) -> StatisticsError:
    others = ", ".join(str(m) for m in shared.members if m != linear_map)
    return StatisticsError(
        f"{linear_map} read the same input as {others} in the first batch, but not in a later one, so that one "
        "sum cannot serve both. Collect with share=False (--no-share)."
    )
