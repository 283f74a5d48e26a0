"""Models of mixtures whose experts are stored one by one, for a base that stacks them; or the reverse.

| one by one, each `O x I` | stacked, `E x O x I` |
|---|---|
| `experts.0.gate_proj.weight` or `w1`, then `up_proj` or `w3` | `experts.gate_up_proj`: gate above up |
| `experts.0.down_proj.weight` or `w2` | `experts.down_proj` |

Transformers 5 has the right column in memory and writes the left one; other tools write what is in memory. The same
tools rename `block_sparse_moe` to `mlp`. `in_layout_of` refuses other layouts.
Shapes: `E` experts, `O` out_features, `I` in_features.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.composed import Composed, Piece, whole
from actmat.checkpoints.model import Model
from actmat.errors import CheckpointError
from actmat.experts.lora.modules import times
from actmat.layout.components import single_file_of
from actmat.layout.resolve import resolve_layout
from actmat.layout.types import TensorLayout

_SINGLE = re.compile(r"(?P<at>.*\.experts)\.(?P<expert>\d+)\.(?P<part>w[123]|(?:gate|up|down)_proj)\.weight")
_STACK = re.compile(r"(?P<at>.*\.experts)\.(?P<part>gate_up_proj|down_proj)(?:\.weight)?")
_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_OF_STACK = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


SHOWN = 2
"""Stacks that an error describes: those of all layers are alike."""


Singles: TypeAlias = dict[tuple[int, str], str]
"""Number of an expert, and part of its stack -> name of the tensor."""


def _in_order(stack: str, singles: Singles) -> list[str]:
    """All tensors of a stack; empty if one is missing."""
    parts = next(parts for part, parts in _OF_STACK.items() if part in stack)
    keys = [(e, p) for e in range(1 + max(e for e, _ in singles)) for p in parts]
    return [singles[k] for k in keys] if singles.keys() == set(keys) else []


def _renamed(name: str) -> str:
    return name.replace(".block_sparse_moe.", ".mlp.")


def _stacks(singles: Iterable[str], stacked: Mapping[str, TensorSpec]) -> dict[str, Singles]:
    """Stack in one checkpoint -> its parts in the other, for stacks that the other stores one by one."""
    of_part: dict[tuple[str, str], str] = {}
    for name, spec in stacked.items():
        if len(spec.shape) == 3 and (m := _STACK.fullmatch(name)) is not None:
            of_part |= {(_renamed(m["at"]), part): name for part in _OF_STACK[m["part"]]}
    stacks: dict[str, Singles] = {}
    for name in singles:
        if (m := _SINGLE.fullmatch(name)) is not None:
            part = _PARTS.get(m["part"], m["part"])
            if (stack := of_part.get((_renamed(m["at"]), part))) is not None:
                stacks.setdefault(stack, {})[int(m["expert"]), part] = name
    return stacks


def _is_stack_of(stack: TensorSpec, count: int, specs: Sequence[TensorSpec], layout: TensorLayout) -> bool:
    """True if a stack holds the matrices of its experts, all alike, one above the other."""
    if not specs or len(specs[0].shape) != 2 or len({(s.shape, s.dtype) for s in specs}) > 1:
        return False
    rows, columns = specs[0].shape
    parts = len(specs) // count
    blocks = [(b.start, b.groups) for b in layout.blocks]
    is_plain = layout.orientation == "OI" and (parts == 1 or blocks in ([], [(0, 1), (rows, 1)]))
    return is_plain and stack.shape == (count, parts * rows, columns)


def _pieces(model: Model, base: Model) -> tuple[dict[str, tuple[Piece, ...]], list[str]]:
    """Pieces of the model's tensors that make up those of the base that it stores otherwise; and problems."""
    pieces: dict[str, tuple[Piece, ...]] = {}
    problems = []
    for single, stacked in ((model, base), (base, model)):
        stacks = _stacks(single.specs, stacked.specs)
        if not stacks:
            continue
        layouts = resolve_layout(stacked.specs, stacked.config or single.config)
        for stack, of_stack in stacks.items():
            names = _in_order(stack, of_stack)
            spec, layout, count = stacked.specs[stack], layouts.tensors[stack], 1 + max(e for e, _ in of_stack)
            if not _is_stack_of(spec, count, [single.specs[n] for n in names], layout):
                shapes = dict.fromkeys(times(single.specs[n].shape) for n in of_stack.values())
                problems.append(
                    f"'{stack}' is {times(spec.shape)} in one of them ({layout.reason}), and the {len(of_stack)} parts "
                    f"of {' or '.join(shapes)} that the other has of it do not make that, one above the other"
                )
            elif stacked is base:
                pieces[stack] = tuple(piece for name in names for piece in whole(single.specs[name]))
            else:
                size = stacked.specs[stack].nbytes // len(names)
                pieces |= {name: (Piece(0, stack, k * size, (k + 1) * size),) for k, name in enumerate(names)}
    if pieces:  # the router beside them
        stored = {_renamed(n): n for n in model.specs}
        for name, spec in base.specs.items():
            other = stored.get(_renamed(name))
            if other is not None and other != name and name not in pieces and spec.shape:
                pieces[name] = whole(model.specs[other])
    return pieces, problems


def _restacked(model: Model, base: Model) -> Model:
    """The model with its experts stored as in the base.

    Raises:
        CheckpointError: they cannot be brought into that layout; one problem per stack.
    """
    pieces, problems = _pieces(model, base)
    if problems:
        more = f"; and {len(problems) - SHOWN} more stacks" if len(problems) > SHOWN else ""
        raise CheckpointError(
            f"{model.location}: stores the experts of its layers in another layout than the base "
            f"({base.location}), in which they cannot be read: {'; '.join(problems[:SHOWN])}{more}. Fix: load the one "
            "that transformers did not write in transformers and save it again (save_pretrained)"
        )
    used = {piece.name for of_tensor in pieces.values() for piece in of_tensor}
    same = {n: s for n, s in model.specs.items() if n not in used and n not in pieces}
    firsts = {name: model.specs[of_tensor[0].name] for name, of_tensor in pieces.items()}
    specs = {n: TensorSpec(n, base.specs[n].shape, first.dtype, first.file) for n, first in firsts.items()}
    tensors = Composed([model.tensors], {**{n: whole(s) for n, s in same.items()}, **pieces}, {**same, **specs})
    count = sum(_SINGLE.fullmatch(n) is not None or _STACK.fullmatch(n) is not None for n in pieces)
    way = "one by one" if any(map(_SINGLE.fullmatch, pieces)) else "stacked"
    note = f"its experts of a mixture are read {way}, as the base stores them: {count} tensors, exactly"
    return Model(tensors, model.folder.noted(note))


def in_layout_of(base: Model, model: Model) -> Model:
    """The model in the layout of the base; itself if it needs no conversion.

    Raises:
        CheckpointError: not all of it can be converted, or only one of them is a single file of an image tool.
    """
    # one of the two stacks experts that the other stores one by one
    if _stacks(model.specs, base.specs) or _stacks(base.specs, model.specs):
        return _restacked(model, base)
    shares_names = 2 * sum(name in model.specs for name in base.specs) >= len(base.specs)
    if not shares_names and _is_diffusers(model) != _is_diffusers(base):
        single = base if _is_diffusers(model) else model
        kind = single_file_of(single.specs)
        if kind is not None:
            raise CheckpointError(
                f"{model.location}: its layout differs from the base's ({base.location}): {single.location} is "
                f"{kind.words}, the other is a folder of diffusers. Fix: convert the file with diffusers "
                "(from_single_file, then save_pretrained), and give folders only."
            )
    return model


def _is_diffusers(model: Model) -> bool:
    return model.config is not None and "_class_name" in model.config
