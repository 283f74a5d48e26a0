"""Deltas of `Change`s on a base: formed row by row, with the base's own rows if they depend on it.

Shapes: `O` rows and `I` columns of the logical delta, `P` requested rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from actmat.checkpoints.base import Tensors, TensorSpec, torch_dtype
from actmat.checkpoints.model import Model
from actmat.checkpoints.raw import raw_bytes
from actmat.errors import CheckpointError
from actmat.experts.changes.base import Change, Content
from actmat.experts.fitted import FittedDeltas, FormedPart
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.fitting import hidden_names
from actmat.experts.untied import tied_parts
from actmat.layout.in_memory import TensorOnDisk, TensorSlice, find_on_disk
from actmat.layout.resolve import resolve_layout
from actmat.layout.ties import is_output_head, tied_partner
from actmat.layout.types import LayoutMap
from actmat.linalg.lowrank import LowRank


def fit_changes(stored: Adapter, base: Model, content: Content) -> FittedDeltas:
    """An adapter of changes on a base, which must stay open, as deltas may depend on it.

    Raises:
        CheckpointError: the adapter does not fit the base, or cannot be read; carries all problems.
    """
    content = _without_copies(content, base, stored)
    # PEFT ties trained tokens itself
    untied = [c for c in content.changes if c.kind != "tokens" or is_output_head(c.target)]
    tied = tied_parts(stored, base, content.extras, {c.target: () for c in untied})
    layouts = resolve_layout(tied.base.specs, tied.base.config)
    fitted = replace(content, changes=[c for c in content.changes if c.target not in tied.refused])
    formed, full, problems = _fit(fitted, tied.base, layouts, stored)
    hidden = hidden_names(layouts, tied.base, {*formed, *full})
    deltas = FittedDeltas(stored, tied, formed, full, hidden, problems)
    deltas.note(*tied.notes)
    return deltas


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
    content: Content, base: Model, layouts: LayoutMap, stored: Adapter
) -> tuple[dict[str, FormedPart], dict[str, str], list[str]]:
    """The base's tensor -> its delta; tensors trained in full; problems."""
    problems = list(content.problems)
    wanted = [[c.target] for c in content.changes if not c.is_optional]
    optional = [*content.extras, *(c.target for c in content.changes if c.is_optional)]
    of_name = {c.target: c for c in content.changes}

    def fits(name: str, spec: TensorSpec) -> bool:
        whole = TensorOnDisk(spec.shape, (TensorSlice(spec.name),))
        return name not in of_name or not isinstance(_place(of_name[name], whole, layouts), str)

    try:
        on_disk, why = find_on_disk(base, wanted, optional, fits, stored.config.trained_class)
    except CheckpointError as error:
        return {}, {}, [*problems, error.sentence]
    formed: dict[str, FormedPart] = {}
    for change in content.changes:
        located = on_disk.get(change.target)
        if located is None:
            if not change.is_optional:
                problems.append(f"'{change.target}' is not in the base ({base.location})"
                                + (f"; {why}" if why else "; is it an adapter of this base?"))  # fmt: skip
            continue
        place = _place(change, located, layouts)
        if isinstance(place, str):
            problems.append(f"module of '{change.target}': {place}")
        elif (name := located.slices[0].name) in formed:
            problems.append(f"'{name}' of the base would be changed twice")
        else:
            formed[name] = _formed(change, stored.weights, base, name, *place)
    full = {}
    for name, n in content.extras.items():
        slices = on_disk[name].slices if name in on_disk else ()
        full[slices[0].name if len(slices) == 1 else name] = n
    return formed, full, problems


def _place(change: Change, located: TensorOnDisk, layouts: LayoutMap) -> tuple[tuple[int, int], bool] | str:
    """Shape `O I` of the delta, and whether the base's tensor is its transpose; where both fit, the layout decides."""
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
            return (turned if is_turned else straight), is_turned
    return f"{misfits[allowed[0]]}, the base's tensor is {' x '.join(map(str, stored)) or 'a scalar'}"


def _formed(
    change: Change, weights: Tensors, base: Model, name: str, shape: tuple[int, int], is_turned: bool
) -> FormedPart:
    """The delta of the tensor `name` of the base, `O I` in this shape; a transposed one is formed whole."""

    def tensors(dtype: torch.dtype) -> dict[str, Tensor]:
        return {n: weights.read(n).to(dtype) for n in change.stored}

    def base_rows(first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Logical rows of the base; all of a transposed layer, none unless the change depends on them."""
        if not change.reads_base:
            return torch.empty(0, shape[1], dtype=dtype)
        if is_turned:
            return base.tensors.read(name).to(dtype).mT
        raw = torch.empty((last - first, shape[1]), dtype=torch_dtype(base.specs[name].dtype))
        base.tensors.read_into(name, first * shape[1] * raw.itemsize, raw_bytes(raw))
        return raw.to(dtype)

    def form(dtype: torch.dtype) -> Tensor | LowRank:
        stored, base_OI = tensors(dtype), base_rows(0, shape[0], dtype)
        if not change.rank:
            return change.rows(stored, base_OI, 0, shape[0]).mT.contiguous()
        product = change.factors(stored, base_OI, shape)
        turned = LowRank(product.a_RI.mT.contiguous(), product.b_OR.mT.contiguous())
        return turned if is_turned else product

    def rows(dtype: torch.dtype) -> Callable[[int, int], Tensor]:
        stored = tensors(dtype)
        return lambda first, last: change.rows(stored, base_rows(first, last, dtype), first, last)

    return FormedPart(change.stored, change.rank, form, None if change.rank or is_turned else rows)
