"""Tensors of the base that an expert lacks, in as few sentences as there are parts of the model that it lacks."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from actmat.checkpoints.base import TensorSpec
from actmat.errors import first_of
from actmat.experts.deltas import Deltas

COPY = "To copy it from the base, list it under 'keep' in the recipe"
MOST_PARTS = 20
"""Patterns that an error lists."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_SPECIAL = re.compile(r"([*?\[\]{}\\])")


def missing_problems(
    missing: Sequence[TensorSpec], present: Sequence[str], others: Mapping[str, TensorSpec], label: str, location: str
) -> list[str]:
    """One sentence for each part of the base that an expert lacks as a whole, or for each tensor.

    Args:
        missing: tensors of the base that it lacks, in order.
        there: those of the base that it has.
        others: tensors of the expert that the base lacks.
        label, location: of the expert.
    """
    problems = []
    specs = {spec.name: spec for spec in missing}
    beside = {_place(n): n for n in reversed(list(others))}
    shaped = {_form(s): n for n, s in reversed(list(others.items()))}
    for pattern, names in lost_parts(list(specs), present).items():
        first, who = specs[names[0]], f"missing in expert '{label}' ({location})"
        shape = "x".join(map(str, first.shape)) or "a scalar"
        text = f"tensor '{first.name}' {shape} is {who}"
        if len(names) > 1:
            text = f"{len(names)} tensors '{pattern}' are {who}, such as '{first.name}' {shape}"
        near = [beside[p] for n in names if (p := _place(n)) in beside]
        near += [shaped[k] for n in names if (k := _form(specs[n])) in shaped]
        if near:
            text += (
                f"; it has '{near[0]}', which the base lacks. Is it the same by another name or in another layout, or "
                "of another architecture? Fix: save it in the base's layout, with the library that wrote the base"
            )
        elif len(names) > 1 and len(others) > len(present):
            text += "; most of its own names are not in the base. Is it of another architecture?"
        elif len(names) > 1:
            text += (
                ". Did the tool that saved it leave this part out, as some do with heads of multi-token prediction and "
                f"vision towers? {COPY} (--keep '{pattern}')"
            )
        else:
            text += f". Is it fine-tuned from this base? {COPY} (--keep)"
        problems.append(text)
    return problems


def lost_problems(expert: Deltas, label: str, lost: Sequence[str], untrained: Collection[str]) -> list[str]:
    """One sentence on an expert's trained tensors that the base lacks, with the flags that leave them out."""
    if not lost:
        return []
    stored = {} if expert.adapter is None else expert.adapter.extras
    names = [stored.get(n, n) for n in lost]
    held = expert.model.specs if expert.needs_base else expert.specs
    others = [n for n in held if n not in {*names, *untrained}]
    flags = [f"--drop '{pattern}'" for pattern in lost_parts(names, others)]
    shape = "x".join(map(str, expert.specs[lost[0]].shape)) or "a scalar"
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return [
        f"expert '{label}' ({expert.location}) has '{lost[0]}' {shape}{more}, which the base lacks: what was trained "
        "there would be lost. Likely cause: a model with another head, or with more parts than the base. Fix: give a "
        "base with them (load it with the class that the expert was trained with, such as "
        "AutoModelForSequenceClassification, and save_pretrained), or leave them out "
        f"({first_of(flags, MOST_PARTS)})"
    ]


def _form(spec: TensorSpec) -> tuple[tuple[int, ...], str]:
    """Shape of a matrix; of a vector, of which a model has many, with the last part of its name."""
    return spec.shape, spec.name.rpartition(".")[2] if len(spec.shape) < 2 else ""


def lost_parts(missing: Sequence[str], present: Sequence[str]) -> dict[str, list[str]]:
    """Pattern -> the missing names that it describes, and no name that is there; the shortest patterns that do.

    >>> lost_parts(["a.0.b", "a.1.b", "mtp.w", "mtp.b"], ["a.0.w", "a.1.w"])
    {'a.*.b': ['a.0.b', 'a.1.b'], 'mtp.*': ['mtp.w', 'mtp.b']}
    """
    parts: dict[str, list[str]] = {}
    rest = list(missing)
    for spelled in (_in_all_layers, _escaped):
        known = {p for name in present for p in _prefixes(spelled(name))}
        left = []
        for name in rest:
            whole = next((p for p in _prefixes(spelled(name)) if p not in known), None)
            if whole is None:
                left.append(name)
            else:
                parts.setdefault(whole, []).append(name)
        rest = left
    return parts


def _in_all_layers(name: str) -> str:
    return _NUMBER.sub("*", _escaped(name))


def _escaped(name: str) -> str:
    return _SPECIAL.sub(r"\\\1", name)


def _prefixes(name: str) -> list[str]:
    """Patterns of all parts that a name is in, the largest first, and of the name itself."""
    return [f"{name[: m.start()]}.*" for m in re.finditer(r"\.", name)] + [name]


def _place(name: str) -> str:
    """The block that a layer's tensor is in."""
    return _in_all_layers(name).rsplit(".", 2)[0] if name.count(".") > 1 else name
