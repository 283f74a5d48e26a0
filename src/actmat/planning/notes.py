"""Notes of a plan: on its method and weights, and on storage."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from actmat.checkpoints.model import Model
from actmat.checkpoints.resolve import HUB_ID
from actmat.errors import Note, NoteSeverity, first_of
from actmat.experts.deltas import Deltas
from actmat.experts.lora.adapter import Adapter
from actmat.methods import get_method
from actmat.methods.spaces import KEEP_ROWS
from actmat.planning.choose import WHOLE
from actmat.planning.item import Item, MethodCall
from actmat.planning.storage import storage_notes
from actmat.recipe import Recipe


def all_notes(
    recipe: Recipe,
    base: Model | None,
    experts: Sequence[Deltas],
    items: Sequence[Item],
    decisions: Sequence[str],
    likely: Sequence[str],
) -> tuple[Note, ...]:
    """Warnings of the recipe, of likely mistakes and of the inputs; then notes on these, on methods, and decisions."""
    of_inputs = [("base", note) for note in (base.folder.notes if base is not None else ())]
    pairs = zip(recipe.labels, experts, strict=True)
    of_inputs += [(f"expert '{label}'", note) for label, e in pairs for note in e.model.folder.notes]
    warnings = (*recipe.warnings, *_negative_means(items), *likely, *_remarks(of_inputs, "warning"))
    of_storage = [] if base is None else [*_named_bases(recipe, experts), *storage_notes(recipe, base, experts)]
    notes = (*recipe.notes, *_remarks(of_inputs, "note"), *decisions, *of_storage, *_method_notes(items, len(experts)))
    return (*(Note("warning", "", text) for text in warnings), *(Note("note", "", text) for text in notes))


def _named_bases(recipe: Recipe, experts: Sequence[Deltas]) -> list[str]:
    """A note on adapters that name another model than the given base, where both look like names on a hub."""
    given = recipe.base or ""
    named = {e.adapter.config.base_model for e in experts if e.adapter is not None and HUB_ID.fullmatch(given)}
    others = sorted(b for b in named if HUB_ID.fullmatch(b) and _model_name(b) != _model_name(given))
    return [f"adapters name '{b}' as their base, and are merged into {given}: is it the same model?" for b in others]


def _model_name(location: str) -> str:
    """Name of a model without its owner, revision, and what copies with other numbers add.

    >>> _model_name("unsloth/Qwen2.5-7B-unsloth-bnb-4bit"), _model_name("Qwen/Qwen2.5-7B@main")
    ('qwen2.5-7b', 'qwen2.5-7b')
    """
    return re.sub(r"-(?:unsloth|bnb|awq|gptq|fp8|gguf)\b.*", "", location.partition("@")[0].rpartition("/")[2].lower())


def adapter_notes(recipe: Recipe, adapters: Sequence[Adapter], modules: Sequence[Item]) -> list[str]:
    """Notes on merged adapters: zero deltas, copies, truncations and padding."""
    notes = []
    for label, adapter in zip(recipe.labels, adapters, strict=True):
        if missing := [m.name for m in modules if m.name not in adapter.modules]:
            of = f"{len(missing)} modules (a zero delta there): {first_of(missing)}"
            notes.append(f"expert '{label}' does not change {of}")
        if adapter.copies:
            notes.append(f"expert '{label}' holds copies of base weights ({', '.join(adapter.copies)}); not merged")
    dense = [m for m in modules if not m.is_factored]
    if dense:
        notes.append(
            f"{len(dense)} modules are merged on dense deltas and cut to rank {max(m.write.rank for m in dense)}: "
            "'relative_error' in the records is the share that is lost"
        )
    widths = {m.write.rank for m in modules}
    if recipe.adapter.ranks == "uniform" and widths and any(m.write.rank > m.write.exact_rank for m in modules):
        notes.append(f"all modules are written with rank {max(widths)}, padded with zeros; 'ranks: pattern' avoids it")
    return notes


def _remarks(inputs: Iterable[tuple[str, Note]], severity: NoteSeverity) -> list[str]:
    """Remarks of named inputs; a remark that several inputs share is listed once."""
    names: dict[str, list[str]] = {}
    for name, note in inputs:
        if note.severity == severity:
            names.setdefault(note.text, []).append(name)
    return [f"{', '.join(of[:3])}{' and others' if len(of) > 3 else ''}: {text}" for text, of in names.items()]


def _method_notes(items: Sequence[Item], n_experts: int) -> list[str]:
    """Notes on the step over layers, on methods that change one expert, on weights, and those that methods declare."""
    used = {i.call.method: get_method(i.call.method) for i in items if i.call is not None}
    declared = [f"{name}: {method.note}" for name, method in used.items() if method.note]
    calls = [i.call for i in items if n_experts == 1 and i.action == "merge" and i.call is not None]
    changing = dict.fromkeys(call.method for call in calls if not _adds(call))
    alone = [f"with one expert, {name} changes its delta: use -m linear to add it unchanged" for name in changing]
    return [*declared, *alone, *_weight_notes(items)]


def _adds(call: MethodCall) -> bool:
    """True if a call for one expert returns its delta unchanged, or is a path from the base to it."""
    if call.method == "task_arithmetic":
        return call.options == WHOLE
    method = get_method(call.method)
    return method.max_experts is not None or ("single" in method.laws and method.acts_on == "elementwise")


def _weight_notes(items: Sequence[Item]) -> list[str]:
    """Note on weights without effect: the ranks of adapters leave their row spaces independent."""
    calls = {i.name: i.call for i in items if i.call is not None and len(set(i.call.weights or ())) > 1}
    calls = {n: c for n, c in calls.items() if get_method(c.method).meets_all(c.options) and min(c.weights or ()) > 0}
    vain = [i for i in items if i.name in calls and calls[i.name].space in KEEP_ROWS and _has_independent_rows(i)]
    if not vain:
        return []
    methods = ", ".join(dict.fromkeys(calls[i.name].method for i in vain))
    return [
        f"the weights have no effect in {len(vain)} of {len(calls)} tensors if the row spaces of the adapters are "
        "independent (their ranks add up to at most the tensor's inputs; those of separately trained adapters "
        f"mostly are): {methods} reproduces every expert there, and weights change only rounding and its "
        "cut-off. Methods that use weights: linear, task_arithmetic, ties"
    ]


def _negative_means(items: Sequence[Item]) -> list[str]:
    """Warning on negative weights that a mean divides by their sum, which changes their size and sign."""
    calls = [i.call for i in items if i.call is not None and min(i.call.weights or (0.0,)) < 0]
    means = [c for c in calls if get_method(c.method).elsewhere(c.options, len(c.weights or ())) == "mean"]
    if not means:
        return []
    weights = means[0].weights or ()
    total = math.fsum(weights)
    shown, shares = (", ".join(f"{w:.4g}" for w in ws) for ws in (weights, [w / total for w in weights if total]))
    return [
        f"{means[0].method} divides the weights {shown} by their sum {total:.4g} ({len(means)} tensors): the experts "
        f"count {shares}. For the sum of w_t D_t: --method task_arithmetic --option scaling=1"
    ]


def _has_independent_rows(item: Item) -> bool:
    """True if the ranks of the experts of one matrix add up to at most its inputs."""
    shape, is_turned = item.shape, item.layout.orientation == "IO"
    ranks = [s.rank if s.kind != "zero" else 0 for s in item.sources if s is not None]
    if item.is_module:
        is_turned = item.module.transposed
        shape = item.target.spec.shape
    elif any(s is not None and s.kind != "zero" and not s.rank for s in item.sources):
        return False  # of full rank, as far as headers tell
    return len(shape) == 2 and sum(r > 0 for r in ranks) > 1 and sum(ranks) <= shape[0 if is_turned else 1]
