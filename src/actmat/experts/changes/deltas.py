"""An adapter of `Change`s as an expert: deltas formed row by row, with the base's own rows if they depend on it.

Shapes: `O` rows and `I` columns of the logical delta, `P` requested rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from actmat.checkpoints.base import TensorSpec, torch_dtype
from actmat.checkpoints.model import Model
from actmat.checkpoints.raw import raw_bytes
from actmat.errors import CheckpointError
from actmat.experts.changes.base import Change, Content
from actmat.experts.fitted import FittedDeltas
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.deltas import entries_of
from actmat.experts.lora.fitting import hidden_names
from actmat.layout.in_memory import TensorOnDisk, TensorSlice, find_on_disk
from actmat.layout.resolve import resolve_layout
from actmat.layout.ties import is_output_head, tied_partner
from actmat.layout.types import LayoutMap
from actmat.linalg.lowrank import LowRank

_SLAB = 1 << 20
"""Entries of a delta that are formed at a time."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A change on a tensor of the base, and the logical shape `O I` of the delta."""

    change: Change
    shape: tuple[int, int]
    is_turned: bool


class FormedDeltas(FittedDeltas):
    """The base with changes; only tensors trained in full are stored.

    Args:
        stored: closed with the expert.
        base: must stay open, as deltas may depend on it.
        content: of the adapter.

    Raises:
        CheckpointError: the adapter does not fit the base, or cannot be read; carries all problems.
    """

    def __init__(self, stored: Adapter, base: Model, content: Content) -> None:
        content = _without_copies(content, base, stored)
        # PEFT ties trained tokens itself
        own = [c for c in content.changes if c.kind != "tokens" or is_output_head(c.target)]
        super().__init__(stored, base, content.extras, {c.target: () for c in own})
        parts = self._parts
        layouts = resolve_layout(parts.base.specs, parts.base.config)
        fitted = replace(content, changes=[c for c in content.changes if c.target not in parts.refused])
        self._places, full, problems = _fit(fitted, parts.base, layouts, stored.config.trained_class)
        self._take(full, hidden_names(layouts, parts.base, {*self._places, *full}), problems)
        self.note(*parts.notes)

    def dense(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Entries `start:stop` of the flattened delta of `name`; only the rows around them are formed, where possible.

        A transposed layer, and a product of factors, is formed whole and kept until the next is asked for.
        """
        if self.source(name).kind != "formed":
            return super().dense(name, start, stop, dtype)
        place = self._places[name]
        if place.change.rank or place.is_turned:
            whole = self._whole(name, dtype)
            return entries_of(whole, start, stop) if isinstance(whole, LowRank) else whole.flatten()[start:stop].clone()
        tensors, columns = self._tensors(place.change, dtype), place.shape[1]
        out = torch.empty(stop - start, dtype=dtype)
        position = start
        while position < stop:
            first = position // columns
            last = min(place.shape[0], first + max(1, _SLAB // columns), -(-stop // columns))
            rows = place.change.rows(tensors, self._base_rows(name, place, first, last, dtype), first, last)
            found = rows.flatten()[position - first * columns :][: stop - position]
            out[position - start : position - start + found.numel()] = found
            position += found.numel()
        return out

    def _formed_of(self, name: str) -> tuple[Sequence[str], int] | None:
        place = self._places.get(name)
        return None if place is None else (place.change.stored, place.change.rank)

    def _tensors(self, change: Change, dtype: torch.dtype) -> dict[str, Tensor]:
        return {n: self.model.tensors.read(n).to(dtype) for n in change.stored}

    def _form(self, name: str, dtype: torch.dtype) -> Tensor | LowRank:
        place = self._places[name]
        tensors = self._tensors(place.change, dtype)
        base_OI = self._base_rows(name, place, 0, place.shape[0], dtype)
        if not place.change.rank:
            return place.change.rows(tensors, base_OI, 0, place.shape[0]).mT.contiguous()
        product = place.change.factors(tensors, base_OI, place.shape)
        turned = LowRank(product.a_RI.mT.contiguous(), product.b_OR.mT.contiguous())
        return turned if place.is_turned else product

    def _base_rows(self, name: str, place: _Place, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Logical rows of the base; all of a transposed layer, none unless the change depends on them."""
        if not place.change.reads_base:
            return torch.empty(0, place.shape[1], dtype=dtype)
        if place.is_turned:
            return self._base.tensors.read(name).to(dtype).mT
        spec, columns = self._base.specs[name], place.shape[1]
        raw = torch.empty((last - first, columns), dtype=torch_dtype(spec.dtype))
        self._base.tensors.read_into(name, first * columns * raw.itemsize, raw_bytes(raw))
        return raw.to(dtype)


def _without_copies(content: Content, base: Model, stored: Adapter) -> Content:
    """The content without trained tokens that a tied table has too: PEFT saves them under every name of it."""
    tokens = [c for c in content.changes if c.kind == "tokens"]
    copies: list[Change] = []

    def is_copy(change: Change, other: Change) -> bool:
        partner = tied_partner(change.target, base.specs, base.config)
        if other is change or other in copies or partner is None or not f".{partner}".endswith(f".{other.target}"):
            return False
        a, b = (vars(c) | {"target": "", "stored": [stored.hashes[n] for n in c.stored]} for c in (change, other))
        return a == b

    for change in sorted(tokens, key=lambda c: not is_output_head(c.target)):  # the head of two that are stored
        copies += [change] if any(is_copy(change, other) for other in tokens) else []
    return replace(content, changes=[c for c in content.changes if c not in copies])


def _fit(
    content: Content, base: Model, layouts: LayoutMap, part: str
) -> tuple[dict[str, _Place], dict[str, str], list[str]]:
    """Place of every change by the base's tensor; tensors trained in full; problems."""
    problems = list(content.problems)
    wanted = [[c.target] for c in content.changes if not c.is_optional]
    optional = [*content.extras, *(c.target for c in content.changes if c.is_optional)]
    of_name = {c.target: c for c in content.changes}

    def fits(name: str, spec: TensorSpec) -> bool:
        place = TensorOnDisk(spec.shape, (TensorSlice(spec.name),))
        return name not in of_name or not isinstance(_place(of_name[name], place, layouts), str)

    try:
        found, why = find_on_disk(base, wanted, optional, fits, part)
    except CheckpointError as error:
        return {}, {}, [*problems, error.sentence]
    places: dict[str, _Place] = {}
    for change in content.changes:
        located = found.get(change.target)
        if located is None:
            if not change.is_optional:
                problems.append(f"'{change.target}' is not in the base ({base.location})"
                                + (f"; {why}" if why else "; is it an adapter of this base?"))  # fmt: skip
            continue
        place = _place(change, located, layouts)
        if isinstance(place, str):
            problems.append(f"module of '{change.target}': {place}")
        elif located.slices[0].name in places:
            problems.append(f"'{located.slices[0].name}' of the base would be changed twice")
        else:
            places[located.slices[0].name] = place
    full = {}
    for name, stored in content.extras.items():
        slices = found[name].slices if name in found else ()
        full[slices[0].name if len(slices) == 1 else name] = stored
    return places, full, problems


def _place(change: Change, located: TensorOnDisk, layouts: LayoutMap) -> _Place | str:
    """The change in the orientation that fits; where both do (a square matrix), the base's layout decides."""
    if located.rows:
        return f"the base packs it with others in '{located.slices[0].name}', which only plain LoRA is merged into"
    if len(located.slices) > 1 or located.slices[0].index is not None or located.slices[0].stop is not None:
        return f"the base stores it in {len(located.slices)} tensors, which only plain LoRA is merged into"
    name, stored = located.slices[0].name, located.shape
    straight = (stored[0], math.prod(stored[1:])) if stored else (1, 1)
    turned = straight[::-1]
    misfits = {False: change.misfit(straight), True: change.misfit(turned) if len(stored) == 2 else "no matrix"}
    if change.is_turned or change.only_straight:
        allowed: Sequence[bool] = [change.is_turned]
    elif len(stored) == 2 and change.kind == "linear":
        allowed = [True, False] if layouts.tensors[name].orientation == "IO" else [False, True]
    else:
        allowed = [False]
    for is_turned in allowed:
        if not misfits[is_turned]:
            return _Place(change, turned if is_turned else straight, is_turned)
    return f"{misfits[allowed[0]]}, the base's tensor is {' x '.join(map(str, stored)) or 'a scalar'}"
