"""Linear maps of a model, recognised by the memory of the weights that take part in an operation.

Shapes: `O` out_features, `I` in_features.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

__all__ = ["LinearMap", "ParameterIndex"]


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

    def linear_map(self, weight: Tensor, *, out_axis: int) -> LinearMap | None:
        """The linear map of a 2-D weight, `O I` for `out_axis` 0, `I O` for 1; None where some inputs are missing."""
        found = self._owner(weight)
        if found is None or weight.ndim != 2:
            return None
        name, parameter, offset = found
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
        found = self._owner(weight)
        return found[0] if found is not None and found[2] == 0 and found[1].shape == weight.shape else None

    def stack(self, weight: Tensor) -> tuple[str, int] | None:
        """Name and number of experts, where the weight is a whole stack."""
        found = self._owner(weight)
        if found is None or weight.ndim != 3 or found[2] != 0 or weight.numel() != found[1].numel():
            return None
        return found[0], weight.shape[0]

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
