"""What is held of a part of a tensor while a rule merges it: decided once, for the plan's estimate and the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actmat.methods.contract import MergeMethod
from actmat.plan.parts import CHUNK, Part, streams

__all__ = ["Reading", "reading_of"]


@dataclass(frozen=True, slots=True)
class Reading:
    """What is in memory as a whole.

    Args:
        walked: all that is done with the deltas is that one rule walks over them.
        combined: and the rule is a sum, so that a second walk adds up and writes (`engine.combined`): neither deltas,
            nor a result, nor the base in the compute dtype are held.
        lazy: deltas are read when they are asked for, one laid over the other, or in each walk; else all are held.
        base: the base is held as stored; else it is read place by place, with the deltas and again for the writing.
    """

    walked: bool
    combined: bool
    lazy: bool
    base: bool

    def deltas(self, n_experts: int) -> int:
        """How many deltas are in memory at a time as a whole."""
        return n_experts if not self.lazy else 0 if self.walked else 1


def reading_of(
    method: MergeMethod,
    options: Mapping[str, Any],
    part: Part,
    n_experts: int,
    itemsize: int,
    *,
    can_walk: bool,
    measured: bool,
    copied: bool = False,
) -> Reading:
    """How one rule alone is given a part.

    Args:
        itemsize: bytes per entry of the compute dtype.
        can_walk: whether deltas can be read place by place (`adapter_experts.can_walk`).
        measured: whether somebody beside the rule looks at the deltas: caps, or a diagnosis.
        copied: whether the base is also written as it is, by another variant of the run.
    """
    if measured or not can_walk or not method.streams(options):
        several = method.acts_on == "matrix" and len(part.layout.matrix_shapes(part.shape)) > 1
        once = method.one_pass and not several and not measured
        return Reading(walked=False, combined=False, lazy=once, base=True)
    large = part.numel > CHUNK
    combined = method.combine is not None and large
    streamed = combined or streams(method, options, part.numel, n_experts, itemsize)
    looked_at = method.uses_base(options) and not combined
    return Reading(
        walked=True,
        combined=combined,
        lazy=streamed,
        base=not (large and streamed) or looked_at or copied,
    )
