"""Strategies of reading the deltas of a region: decided once, for the plan's estimate and for the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from actmat.methods.contract import MergeMethod
from actmat.plan.regions import CHUNK, Region, streams

__all__ = ["Reading", "Strategy", "reading_of"]

Strategy = Literal["held", "each", "chunks", "chunks_held", "combine"]
"""The way in which a method is given its deltas.

held         all of them, in memory
each         one at a time, each in the memory of the one before it
chunks       chunk by chunk, as often as the method asks; no delta is in memory as a whole
chunks_held  chunk by chunk; what the first pass reads stays in memory for the next
combine      as coefficients: one pass over chunks finds them, a second adds up and writes
"""


@dataclass(frozen=True, slots=True)
class Reading:
    """Strategy of one region.

    Args:
        strategy: see `Strategy`.
        base_held: whether the base is in memory as stored; else it is read chunk by chunk, with the deltas and again
            for the output.
    """

    strategy: Strategy
    base_held: bool = True

    def whole_deltas(self, n_experts: int) -> int:
        """Number of deltas that are in memory as a whole at a time."""
        return {"held": n_experts, "chunks_held": n_experts, "each": 1}.get(self.strategy, 0)


def reading_of(
    method: MergeMethod,
    options: Mapping[str, Any],
    region: Region,
    n_experts: int,
    itemsize: int,
    *,
    chunkable: bool,
    observed: bool,
    copied: bool = False,
) -> Reading:
    """Strategy for a region that one method merges.

    Args:
        itemsize: bytes per entry of the compute dtype.
        chunkable: whether deltas can be read chunk by chunk: all are stored, and the method computes on the CPU.
            Products of factors have the same bits for whole regions only, and a chunk is too small for an accelerator.
        observed: whether something else looks at the deltas too: caps, or a diagnosis.
        copied: whether the base is also written as it is, by another variant of the run.
    """
    if observed or not chunkable or not method.streams(options):
        several = method.acts_on == "matrix" and len(region.layout.matrix_shapes(region.shape)) > 1
        return Reading("each" if method.one_pass and not several and not observed else "held")
    if method.combine is not None:  # small regions too: memory of their own would come on top of the warm buffers
        return Reading("combine", base_held=copied)
    streamed = streams(method, options, region.numel, n_experts, itemsize)
    base_held = not (streamed and region.numel > CHUNK) or method.uses_base(options) or copied
    return Reading("chunks" if streamed else "chunks_held", base_held)
