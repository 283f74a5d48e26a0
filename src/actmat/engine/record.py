"""The record of one finished item of one output; goes into the journal and the manifest."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, TypeAdapter, ValidationError


def _with_norm(stats: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a method, if those that are added up are numbers."""
    if "error_norm" in stats and not all(isinstance(stats.get(name), float) for name in ("error_norm", "norm")):
        raise ValueError("expected an error with its norm")
    return stats


def _complete(size: dict[str, Any] | None) -> dict[str, Any] | None:
    """Sizes, if they have the form of `engine.size.size_of`."""
    wanted = {"norm": float, "sum_norm": float, "base_norm": float, "sampled": int, "expert_norms": list}
    if size is not None and not all(isinstance(size.get(name), kind) for name, kind in wanted.items()):
        raise ValueError(f"expected the fields {', '.join(wanted)}")
    return size


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
        seconds: time it took; an item's share where several variants shared the reading.
        observed: what the observer measured.
        size: of the merged delta and of the experts', see `engine.size`; of tensors of models that a method merged.
        products: inner products of the experts' deltas, see `engine.size.products_of`.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"strict": True, "allow_inf_nan": False}

    name: str
    hash: str
    hashes: Mapping[str, str]
    base_hash: str = ""
    expert_hashes: tuple[str, ...] = ()
    stats: Annotated[Mapping[str, Any], AfterValidator(_with_norm)] = field(default_factory=dict)
    unchanged: bool = False
    seconds: float = 0.0
    observed: Mapping[str, Any] | None = None
    size: Annotated[Mapping[str, Any] | None, AfterValidator(_complete)] = None
    products: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data for the journal."""
        fields = dataclasses.asdict(self) | {"seconds": round(self.seconds, 6)}
        return {name: value for name, value in fields.items() if value or name not in OPTIONAL}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record | None:
        """The record of a journal's line; None for a line that is not a record, or has a field of a wrong type."""
        try:
            record: Record = _reader().validate_json(json.dumps(data))
        except ValidationError:
            return None
        return record


OPTIONAL = ("observed", "size", "products")
"""Fields of a record that are left out where they are empty."""


@functools.cache
def _reader() -> TypeAdapter[Record]:
    return TypeAdapter(Record)
