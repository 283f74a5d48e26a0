"""The record of one finished item of one output; goes into the journal and the manifest."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OBSERVED = "observed"
"""Key in a record's JSON that holds the observer's measurements."""


@dataclass(frozen=True, slots=True)
class Record:
    """Record of one item of one output; goes into the journal and the manifest.

    Args:
        name: of the item.
        hash: content hash of the output (over the hashes of all outputs, for a module).
        hashes: content hash of every tensor written.
        base_hash, expert_hashes: content hashes of the inputs' tensors.
        stats: what the method reported.
        unchanged: no expert changed the tensor.
        nonfinite: NaN and Inf of the inputs that counted as unchanged.
        seconds: time it took; an item's share where several variants shared the reading.
        observed: what the observer measured.
        size: of the merged delta and of the experts', see `engine.size`; of tensors of models that a method merged.
        products: inner products of the experts' deltas, see `engine.size.products_of`.
    """

    name: str
    hash: str
    hashes: Mapping[str, str]
    base_hash: str = ""
    expert_hashes: tuple[str, ...] = ()
    stats: Mapping[str, Any] = field(default_factory=dict)
    unchanged: bool = False
    nonfinite: int = 0
    seconds: float = 0.0
    observed: Mapping[str, Any] | None = None
    size: Mapping[str, Any] | None = None
    products: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data for the journal."""
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in OPTIONAL}
        out |= {"hashes": dict(self.hashes), "expert_hashes": list(self.expert_hashes), "stats": dict(self.stats)}
        out["seconds"] = round(self.seconds, 6)
        out |= {} if self.size is None else {"size": dict(self.size)}
        out |= {"products": list(self.products)} if self.products else {}
        return out if self.observed is None else out | {OBSERVED: dict(self.observed)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record | None:
        """The record of a journal's line; None for a line that is not a record, or has a field of a wrong type."""
        names = {f.name for f in dataclasses.fields(cls)} - OPTIONAL
        if not names <= data.keys() or not all(_is_a(data[n], t) for n, t in _TYPES.items()):
            return None
        observed, stats = data.get(OBSERVED), data["stats"]
        if not all(_is_a(h, str) for h in (*data["hashes"].values(), *data["expert_hashes"])):
            return None
        if "error_norm" in stats and not (_is_a(stats["error_norm"], float) and _is_a(stats.get("norm"), float)):
            return None
        if observed is not None and not isinstance(observed, dict):
            return None
        fields = {n: data[n] for n in names} | {"expert_hashes": tuple(data["expert_hashes"])}
        products = data.get("products", [])
        if not isinstance(products, list) or not all(_is_a(p, float) for p in products):
            return None
        return cls(**fields, observed=observed, size=_size(data.get("size")), products=tuple(products))


OPTIONAL = {"observed", "size", "products"}
"""Optional fields of a record."""


def _size(data: Any) -> Mapping[str, Any] | None:
    """Sizes from a journal's line, or None if they do not have the form of `engine.size.size_of`."""
    if not isinstance(data, dict) or not isinstance(data.get("expert_norms"), list):
        return None
    numbers = [data.get("norm"), data.get("sum_norm"), data.get("sampled"), *data["expert_norms"]]
    return data if all(_is_a(n, float) for n in numbers) else None


_TYPES: Mapping[str, type] = {
    "name": str, "hash": str, "hashes": dict, "base_hash": str, "expert_hashes": list, "stats": dict,
    "unchanged": bool, "nonfinite": int, "seconds": float,
}  # fmt: skip
"""Types of a record's fields in JSON."""


def _is_a(value: Any, wanted: type) -> bool:
    """True if a value read from JSON has this type; an integer counts as a number, a bool does not."""
    if wanted in (int, float):
        return isinstance(value, (int, wanted)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return isinstance(value, wanted)
