"""Recipe + headers -> plan. Reads no tensor; finds all problems at once; linear in the number of tensors."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from actmat.checkpoints.layer_names import stack_parts
from actmat.checkpoints.model import Model
from actmat.checkpoints.resolve import commit_of
from actmat.errors import CheckpointError, Note
from actmat.experts.base import Expert
from actmat.methods import METHODS, get_method
from actmat.methods.spaces import KEEP_ROWS
from actmat.methods.user import method_version
from actmat.planning.adapter.extraction import plan_extraction
from actmat.planning.adapter.modules import plan_modules
from actmat.planning.choose import WHOLE
from actmat.planning.item import MethodCall
from actmat.planning.metadata import merged_metadata
from actmat.planning.model import InputSummary, Item, MergePlan
from actmat.planning.placement import HOST, DeviceRoom
from actmat.planning.statistics import ExpertStatistics
from actmat.planning.storage import files_left_out, left_out_note, unread_warnings
from actmat.planning.tensors import plan_tensors
from actmat.recipe import Recipe
from actmat.recipe.output import ExtractedOutput
from actmat.version import __version__

ADAPTERS_ON_HOST = "adapters are merged on the host, not on a device: their factors are small"


def build_plan(
    recipe: Recipe,
    base: Model | None,
    experts: Sequence[Expert],
    *,
    room: DeviceRoom = HOST,
    statistics: ExpertStatistics | None = None,
    base_config: Mapping[str, Any] | None = None,
) -> MergePlan:
    """The plan of a merged model, of an adapter that is extracted, or of merged adapters without a base.

    Args:
        base: the checkpoint that deltas are added to; None: the output is an adapter.
        experts: in the recipe's order; adapters for an adapter.
        room: devices that may merge items.
        statistics: of the experts, for methods that need them.
        base_config: `config.json` of an adapter's base, if known; it identifies packed projections.

    Raises:
        AlignmentError: the inputs do not fit together or the recipe does not fit them; carries all problems.
    """
    statistics = statistics or ExpertStatistics.none(recipe.labels)
    is_extracted = base is not None and isinstance(recipe.output, ExtractedOutput)
    if base is None:
        draft = plan_modules(recipe, experts, base_config, statistics)
    elif is_extracted:
        draft, room = plan_extraction(recipe, base, experts, statistics), HOST
    else:
        draft = plan_tensors(recipe, base, experts, statistics, room)
    left_out = {} if is_extracted else files_left_out(recipe, base, experts)
    is_model = base is not None and not is_extracted
    metadata, texts = merged_metadata(base, experts, recipe.labels) if base is not None and is_model else ({}, [])
    of_items = (*_method_notes(draft.items, len(experts)), *statistics.notes_on(draft.items))
    of_items = (*of_items, *(ADAPTERS_ON_HOST,) * (base is None and room.device != "cpu"))
    decisions = (*draft.notes, *texts, *of_items, *left_out_note(left_out))
    ignored = draft.ignored or ((),) * len(experts)
    likely = (*_negative_means(draft.items), *draft.warnings, *unread_warnings(recipe, base, experts))
    return MergePlan(
        recipe=recipe,
        output="model" if is_model else "adapter",
        base=None if base is None else _summary("base", base, "model"),
        experts=tuple(_summary(n, e.model, e.kind, i) for n, e, i in zip(recipe.labels, experts, ignored, strict=True)),
        items=draft.items,
        specs=draft.specs,
        max_shard_bytes=draft.max_shard_bytes,
        stem=draft.stem,
        stems=draft.stems,
        family=draft.family,
        metadata=metadata,
        adapter_config=draft.adapter_config,
        kept=draft.kept,
        notes=_notes(recipe, base, experts, decisions, likely),
        configs={} if is_extracted else draft.configs,
        left_out=left_out,
        device=room.device,
        device_memory=room.memory,
        versions=versions_of(draft.items),
        statistics=tuple(statistics.to_json()),
        statistics_identity=tuple(statistics.identity()) if statistics.any else (),
    )


def _notes(
    recipe: Recipe, base: Model | None, experts: Sequence[Expert], decisions: Sequence[str], likely: Sequence[str]
) -> tuple[Note, ...]:
    """Warnings of the recipe, of likely mistakes and of the inputs; then their notes, and decisions of the plan."""
    named = [(f"expert '{label}'", e) for label, e in zip(recipe.labels, experts, strict=True)]
    warnings = (*recipe.warnings, *likely, *_remarks((name, e.warnings) for name, e in named))
    of_base = [("base", base.folder.notes)] if base is not None else []
    notes = (*recipe.notes, *_remarks([*of_base, *((name, e.notes) for name, e in named)]), *decisions)
    return (*(Note("warning", text) for text in warnings), *(Note("note", text) for text in notes))


def _remarks(inputs: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Remarks of named inputs; a remark that several inputs share is listed once."""
    found: dict[str, list[str]] = {}
    for name, remarks in inputs:
        for text in remarks:
            found.setdefault(text, []).append(name)
    return [f"{', '.join(of[:3])}{' and others' if len(of) > 3 else ''}: {text}" for text, of in found.items()]


def _method_notes(items: Sequence[Item], n_experts: int) -> list[str]:
    """Notes on the step over layers, on methods that change one expert, on weights, and those that methods declare."""
    used = {i.call.method: get_method(i.call.method) for i in items if i.call is not None}
    declared = [f"{name}: {method.plan.note}" for name, method in used.items() if method.plan.note]
    calls = [i.call for i in items if n_experts == 1 and i.action == "merge" and i.call is not None]
    changing = dict.fromkeys(call.method for call in calls if not _adds(call))
    alone = [f"with one expert, {name} changes its delta: use -m linear to add it unchanged" for name in changing]
    return [*declared, *alone, *_weight_notes(items)]


def _adds(call: MethodCall) -> bool:
    """True if a call for one expert returns its delta unchanged."""
    if call.method == "task_arithmetic":
        return call.options == WHOLE
    method = get_method(call.method)
    return "single" in method.laws and method.acts_on == "elementwise"


def _weight_notes(items: Sequence[Item]) -> list[str]:
    """Note on weights without effect: the ranks of adapters leave their row spaces independent."""
    given = {i.name: i.call for i in items if i.call is not None and len(set(i.call.weights or ())) > 1}
    calls = {n: c for n, c in given.items() if get_method(c.method).meets_all(c.options) and min(c.weights or ()) > 0}
    vain = [i for i in items if i.name in calls and calls[i.name].space in KEEP_ROWS and _has_independent_rows(i)]
    if not vain:
        return []
    methods = ", ".join(dict.fromkeys(calls[i.name].method for i in vain))
    return [
        f"the weights have no effect in {len(vain)} of {len(given)} tensors if the row spaces of the adapters are "
        "independent (their ranks add up to at most the tensor's inputs; those of separately trained adapters "
        f"mostly are): {methods} reproduces every expert there, and weights change only rounding and its "
        "cut-off. Methods that use weights: linear, task_arithmetic, ties"
    ]


def _negative_means(items: Sequence[Item]) -> list[str]:
    """Warning on negative weights that a mean divides by their sum, which changes their size and sign."""
    given = [i.call for i in items if i.call is not None and min(i.call.weights or (0.0,)) < 0]
    means = [c for c in given if get_method(c.method).elsewhere(c.options, len(c.weights or ())) == "mean"]
    if not means:
        return []
    weights = means[0].weights or ()
    total = math.fsum(weights)
    shown, found = (", ".join(f"{w:.4g}" for w in ws) for ws in (weights, [w / total for w in weights if total]))
    return [
        f"{means[0].method} divides the weights {shown} by their sum {total:.4g} ({len(means)} tensors): the experts "
        f"count {found}. For the sum of w_t D_t: --method task_arithmetic --option scaling=1"
    ]


def _has_independent_rows(item: Item) -> bool:
    """True if the ranks of the experts of one matrix add up to at most its inputs."""
    factors = item.factors
    shape, is_turned = item.shape, item.layout.orientation == "IO"
    ranks = [s.rank if s.kind != "zero" else 0 for s in item.sources if s is not None]
    if factors is not None:
        shape, is_turned, ranks = factors.shape, factors.transposed, list(factors.ranks)
    elif any(s is not None and s.kind != "zero" and not s.rank for s in item.sources):
        return False  # of full rank, as far as headers tell
    return len(shape) == 2 and sum(r > 0 for r in ranks) > 1 and sum(ranks) <= shape[0 if is_turned else 1]


def versions_of(items: Sequence[Item]) -> dict[str, str]:
    """Versions of the software on this machine that determines the output, and of methods from elsewhere."""
    others = {i.call.method for i in items if i.call is not None} - {m.name for m in METHODS}
    versions = {"actmat": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return versions | {name: found for name in sorted(others) if (found := method_version(name)) is not None}


def _summary(label: str, model: Model, kind: Any, ignored: tuple[str, ...] = ()) -> InputSummary:
    files = model.tensors.identity()
    nbytes = sum(s.nbytes for s in model.specs.values())
    addresses = ((source.address, source.location) for source in model.folder.files)
    models = tuple(dict.fromkeys(address if commit_of(address) else location for address, location in addresses))
    return InputSummary(
        label, model.location, files, len(model.specs), nbytes, kind, ignored, *_commits(model), models=models
    )


def _commits(model: Model) -> tuple[str, str]:
    """Commit of a repository on the hub, and the text of a stack of such; empty for any other location."""
    try:
        address = model.tensors.handle().address
    except CheckpointError:  # tensors in memory have no address
        return "", ""
    return commit_of(address), address if any(commit_of(part.location) for part in stack_parts(address)) else ""
