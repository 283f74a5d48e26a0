"""The plan of an extraction: each tensor is factored, saved whole, or left out, with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from actmat.checkpoints.base import Checkpoint
from actmat.errors import AlignmentError
from actmat.experts.base import Expert
from actmat.layout import resolve_layout
from actmat.layout.in_memory import names_in_memory
from actmat.layout.ties import is_output_head, is_token_table
from actmat.layout.types import Role, TensorLayout
from actmat.plan.align import align

__all__ = ["Target", "extraction_targets"]

HEAD = "lm_head.weight"
"""Output head of transformers' language models."""

_STORED = "base_model.model.{}"


@dataclass(frozen=True, slots=True)
class Target:
    """One tensor of the base.

    Args:
        name: in the base; `source`: in the model.
        module: that holds it, by its name in memory.
        kind: factored by LoRA, saved whole, or left out.
        reason: why.
        stored: names of what is written: A and B, or the tensor.
        is_turned: the base stores `I O`.
    """

    name: str
    source: str
    module: str
    kind: Literal["factored", "saved", "left out"]
    reason: str
    stored: tuple[str, ...] = ()
    is_turned: bool = False


def extraction_targets(
    base: Checkpoint, expert: Expert, *, save: bool
) -> tuple[list[Target], list[str], dict[str, Any]]:
    """Targets in the order of the base; notes; and the fields of the adapter's config that follow from the base.

    Raises:
        AlignmentError: the model does not fit the base; carries all problems.
    """
    layouts = resolve_layout(base.specs, base.config)
    found = align(base, [expert], ["model"], layouts, frozenset())
    if found.problems:
        raise AlignmentError(f"No adapter can be extracted: {len(found.problems)} problem(s).", found.problems)
    names, why = names_in_memory(base)
    notes = [*found.notes, *expert.notes]
    if why:
        notes.append(f"modules have the names of the base's tensors: {why}")
    tied = {name: [*aliases, *(a for a, c in layouts.ties.items() if c == name and a not in aliases)]
            for name, aliases in found.canonical.items()}  # fmt: skip
    targets = []
    for name in found.canonical:
        source = found.sources[name][0]
        if source is None or not base.specs[name].is_floating or layouts.tensors[name].role is Role.BUFFER:
            continue
        targets.append(_target(name, source, names.get(name), layouts.tensors[name], len(base.specs[name].shape)))
    if not save:
        targets = [_left_out(t, "left out as asked for: no LoRA holds it") if t.kind == "saved" else t for t in targets]
    if not any(is_output_head(n) for n in found.canonical) and _has_head(base):
        tied |= {name: [*aliases, HEAD] for name, aliases in tied.items() if is_token_table(name) and not aliases}
    factored = {t.module for t in targets if t.kind == "factored"}
    targets = [_with_aliases(_checked(t, factored), tied[t.name], names) for t in targets]
    ties = any(t.kind == "saved" and tied[t.name] for t in targets)
    if ties:
        notes.append("a table is tied to the output head: PEFT keeps it so where it knows ensure_weight_tying")
    return targets, notes, _fields(targets, ties=ties)


def _has_head(base: Checkpoint) -> bool:
    """True for an architecture with an output head, which is tied where it is not stored."""
    return any(str(a).endswith(("ForCausalLM", "LMHeadModel")) for a in (base.config or {}).get("architectures") or ())


def _target(name: str, source: str, in_memory: str | None, layout: TensorLayout, axes: int) -> Target:
    """Target of one tensor, before the policy."""
    if in_memory is None:
        return Target(name, source, name, "left out", "put together with others in memory, where PEFT adapts the whole")
    module, _, leaf = in_memory.rpartition(".")
    if layout.role in (Role.LINEAR, Role.FUSED_LINEAR) and axes == 2 and leaf == "weight":
        stored = tuple(_STORED.format(f"{module}.lora_{side}.weight") for side in "AB")
        return Target(name, source, module, "factored", layout.reason, stored, layout.orientation == "IO")
    if not module:
        return Target(name, source, name, "left out", "a parameter of the model itself, which no module holds")
    return Target(name, source, module, "saved", f"{layout.reason}, which no LoRA holds", (_STORED.format(in_memory),))


def _left_out(target: Target, reason: str) -> Target:
    return replace(target, kind="left out", reason=reason, stored=())


def _checked(target: Target, factored: set[str]) -> Target:
    """Biases of factored layers by the name that PEFT gives them; modules that hold factored ones cannot be saved."""
    if target.kind != "saved":
        return target
    if target.module in factored:
        leaf = target.stored[0].rpartition(".")[2]
        if leaf != "bias":
            return _left_out(target, "PEFT saves no other tensor than the bias of a layer that it factors")
        return replace(target, stored=(_STORED.format(f"{target.module}.base_layer.bias"),))
    if any(m.startswith(target.module + ".") for m in factored):
        return _left_out(target, "its module holds layers that are factored, and PEFT saves whole modules")
    return target


def _with_aliases(target: Target, aliases: Sequence[str], names: Mapping[str, str]) -> Target:
    """A table that is saved is stored under all its names, as PEFT does with `ensure_weight_tying`."""
    if target.kind != "saved":
        return target
    return replace(target, stored=(*target.stored, *(_STORED.format(names.get(a, a)) for a in aliases)))


def _fields(targets: Sequence[Target], *, ties: bool) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": None,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
        "lora_dropout": 0.0,
        "fan_in_fan_out": any(t.is_turned for t in targets if t.kind == "factored"),
        "init_lora_weights": True,
        **({"ensure_weight_tying": True} if ties else {}),
    }
