"""Strategies of reading the deltas of a region: decided once, for the plan's estimate and for the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from actmat.methods.contract import MergeMethod
from actmat.planning.regions import CHUNK, Region, streams

__all__ = ["Access", "Reading", "Strategy", "reading_of"]

Strategy = Literal["held", "each", "chunks", "chunks_held", "combine"]
"""The way in which a method is given its deltas.

held         all of them, in memory
each         one at a time, each in the memory of the one before it; as often as `Reading.times` says
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
        times: of `each`: how often a delta may be asked for.
    """

    strategy: Strategy
    base_held: bool = True
    times: int = 1

    def whole_deltas(self, n_experts: int) -> int:
        """Number of deltas that are in memory as a whole at a time."""
        return {"held": n_experts, "chunks_held": n_experts, "each": 1}.get(self.strategy, 0)


@dataclass(frozen=True, slots=True)
class Access:
    """Circumstances that decide how deltas are read, beside the method and their number and size.

    Args:
        chunkable: whether deltas can be read chunk by chunk: all are stored, and the method computes on the CPU.
            Products of factors have the same bits for whole regions only, and a chunk is too small for an accelerator.
        costly: whether some expert costs more than its bytes to read again, because it lies in remote storage, which
            would send them twice, or holds codes: deltas that a method asks for twice are then held.
        observed: whether something else looks at the deltas too: caps, or a diagnosis.
        copied: whether the base is also written as it is, by another variant of the run.
    """

    chunkable: bool = True
    costly: bool = False
    observed: bool = False
    copied: bool = False


def reading_of(
    method: MergeMethod, options: Mapping[str, Any], region: Region, n_experts: int, itemsize: int, access: Access
) -> Reading:
    """Strategy for a region that one method merges; `itemsize`: bytes per entry of the compute dtype."""
    if access.observed or not access.chunkable or not method.streams(options):
        shapes = region.layout.matrix_shapes(region.shape) if method.acts_on == "matrix" else [region.shape]
        times = 2 if method.reads_again(shapes[0], n_experts, options) else 1
        each = method.access.one_pass and len(shapes) == 1 and not access.observed and not (times > 1 and access.costly)
        return Reading("each", times=times) if each else Reading("held")
    if method.combine is not None:  # small regions too: memory of their own would come on top of the warm buffers
        return Reading("combine", base_held=access.copied)
    streamed = streams(method, options, region.numel, n_experts, itemsize)
    base_held = not (streamed and region.numel > CHUNK) or method.uses_base(options) or access.copied
    return Reading("chunks" if streamed else "chunks_held", base_held)
