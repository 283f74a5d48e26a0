"""The result of a comparison as frozen, JSON-able data."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from actmat.foreign import terminal

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Difference:
    """A value in both merges, such as a recipe field or a share of answers. None: missing."""

    name: str
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor (for adapters: one module) of both outputs.

    Args:
        name, shape: name and shape of the tensor.
        actions: its action in each merge, or the method's name.
        same: whether both outputs store equal values in the same dtype, or factors of equal deltas.
        distance: `||W_1 - W_2||`.
        norms: norms of the merged deltas; None without the base.
        relative, cosine: between the merged deltas; None if a norm is zero or unknown.
        dtypes: stored dtypes, if they differ.
    """

    name: str
    shape: tuple[int, ...]
    actions: tuple[str, str]
    same: bool
    distance: float
    norms: tuple[float, float] | None = None
    relative: float | None = None
    cosine: float | None = None
    dtypes: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, repr=False)
class MergeComparison:
    """Differences between two merges.

    Args:
        outs: the two outputs.
        methods: their methods.
        base: the common base, as written in the first recipe; None for adapters.
        experts: names of the experts, in the first and in the second.
        settings: differing recipe fields, versions and device.
        tensors: every tensor (for adapters: every module) in output order, without ties.
        answers: by expert, if both reports have them: share of answers kept.
        notes: parts that could not be compared, with reasons.
    """

    outs: tuple[str, str]
    methods: tuple[str, str]
    base: str | None
    experts: tuple[tuple[str, str], ...]
    settings: tuple[Difference, ...]
    tensors: tuple[TensorDifference, ...]
    answers: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        first, second = self.names
        apart = "" if self.relative is None else f"; relative distance {self.relative:.3g}"
        counted = f"{len(self.differing)} of {len(self.tensors)} tensors differ"
        return terminal(f"<MergeComparison: {first} and {second}; {counted}{apart}>")

    @property
    def tables(self) -> list[tuple[str, list[list[str]]]]:
        """All differences except tensors, as titled rows of text: a name, the first merge, the second."""
        return [
            ("differs in", [[s.name, _short(s.first), _short(s.second)] for s in self.settings]),
            ("answers kept", [[r.name, f"{r.first:.1%}", f"{r.second:.1%}"] for r in self.answers]),
        ]

    @property
    def names(self) -> tuple[str, str]:
        """Distinct names of the two: their methods, else the last parts of their paths, else their order."""
        ends = (PurePath(self.outs[0]).name, PurePath(self.outs[1]).name)
        for first, second in (self.methods, ends):
            if first != second:
                return first, second
        return "first", "second"

    @property
    def sizes(self) -> tuple[float, float] | None:
        """Norms of both merged deltas over the differing tensors; None if unknown."""
        norms = [t.norms for t in self.tensors if not t.same]
        known = [n for n in norms if n is not None]
        if not known or len(known) < len(norms):
            return None
        first, second = (math.sqrt(math.fsum(n[side] ** 2 for n in known)) for side in (0, 1))
        return first, second

    @property
    def distance(self) -> float:
        """`||W_1 - W_2||` over all tensors."""
        return math.hypot(*(t.distance for t in self.tensors))

    @property
    def relative(self) -> float | None:
        """Distance over all differing tensors, relative to their deltas; None if those are unknown."""
        sizes = self.sizes
        return 2 * self.distance / math.fsum(sizes) if sizes is not None and any(sizes) else None

    @property
    def differing(self) -> tuple[TensorDifference, ...]:
        """Differing tensors, the largest relative distance first, or the largest distance without a base."""
        changed = [t for t in self.tensors if not t.same]
        known = all(t.relative is not None for t in changed)
        return tuple(sorted(changed, key=lambda t: -(t.relative or 0.0) if known else -t.distance))

    def to_json(self) -> dict[str, Any]:
        """Plain data as printed by `actmat compare --json`."""
        counted = {"relative": self.relative, "differing": len(self.differing), "names": list(self.names)}
        return {"format": FORMAT, "kind": "comparison"} | dataclasses.asdict(self) | counted


def _short(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
