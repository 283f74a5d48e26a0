"""Recipe + headers -> plan. Reads no tensor; finds all problems at once; linear in the number of tensors."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from actmat.checkpoints.adapter_expert import AdapterExpert
from actmat.checkpoints.base import Checkpoint, TensorSpec, torch_dtype
from actmat.checkpoints.quantisation import quantisation_problems
from actmat.checkpoints.writing.shards import parse_size, plan_shards
from actmat.errors import AlignmentError, MergeError
from actmat.layout.types import Role, TensorLayout
from actmat.methods import MergeMethod, get_method
from actmat.methods.user import is_user_method, user_method_hash
from actmat.plan.adapter_experts import adapter_notes, can_walk, is_factored, read_bytes, untouched
from actmat.plan.align import Alignment, align
from actmat.plan.choose import Chooser, Decision, depth_factors
from actmat.plan.cost import tensor_peak_bytes
from actmat.plan.measured import Measured, is_adapted, kind_problems, notes_on, with_statistics
from actmat.plan.model import InputSummary, MergePlan, TensorPlan
from actmat.plan.parts import cut, granularity
from actmat.plan.pools import assign_pools
from actmat.plan.roles import resolve_roles
from actmat.recipe import Recipe
from actmat.version import __version__

__all__ = ["build_plan"]


def build_plan(
    recipe: Recipe,
    base: Checkpoint,
    experts: Sequence[Checkpoint],
    *,
    device: str = "cpu",
    measured: Measured | None = None,
) -> MergePlan:
    """Decide what happens to every tensor of the base; `measured`: statistics of the experts, for rules that need them.

    Raises:
        AlignmentError: the inputs do not fit together or the recipe does not fit them; carries all problems.
    """
    problems: list[str] = []
    labels = recipe.labels
    for label, checkpoint in zip(("base", *(f"expert '{n}'" for n in labels)), (base, *experts), strict=True):
        problems += [f"{label}: {p}" for p in quantisation_problems(checkpoint.specs, checkpoint.config)]
        if not checkpoint.specs:
            problems.append(f"{label} ({checkpoint.location}) holds no tensors")
    layouts, layout_problems = resolve_roles(recipe, base.specs, base.config)
    measured = measured or Measured(labels, (None,) * len(labels))
    problems += kind_problems(measured, is_adapted(experts))
    chooser = Chooser(recipe, measured.kinds)
    kept = {name: hit for name in base.specs if (hit := chooser.keeps(name)) is not None}
    alignment = align(base, experts, labels, layouts, frozenset(kept))
    decided = {name: _decide(base.specs[name], layouts.tensors[name], chooser, kept) for name in alignment.canonical}
    decided = {
        name: with_statistics(d, base.specs[name], alignment.sources[name], measured, chooser, problems)
        for name, d in decided.items()
    }
    decided = {name: untouched(d, alignment.sources[name], experts) for name, d in decided.items()}
    problems += layout_problems + chooser.problems + list(alignment.problems)
    problems += [f"the pattern '{p}' matches no tensor of the base" for p in chooser.unused_patterns(base.specs)]
    try:
        max_shard = parse_size(recipe.max_shard_size)
    except MergeError as error:
        problems += error.problems
    if problems:
        raise AlignmentError(_headline(problems), problems)
    kind = device.partition(":")[0]
    tensors, problems = assign_pools(
        _tensor_plans(recipe, base, experts, alignment, decided, kind),
        recipe.pool,
        lambda item: _pooled_peak(recipe, item, experts, kind),
    )
    if problems:
        raise AlignmentError(_headline(problems), problems)
    specs = tuple(
        dataclasses.replace(spec, dtype=_out_dtype(recipe, spec), file="", offset=0) for spec in base.specs.values()
    )
    return MergePlan(
        recipe=recipe,
        base=_summary("base", base),
        experts=tuple(_summary(*pair) for pair in zip(labels, experts, alignment.ignored, strict=True)),
        tensors=tensors,
        specs=specs,
        shards=plan_shards(specs, max_shard),
        family=layouts.family,
        notes=(
            *alignment.notes,
            *_dtype_notes(base, experts, labels),
            *adapter_notes(recipe, experts, tensors),
            *notes_on(measured, tensors),
        ),
        device=device,
        versions=_versions(tensors),
        statistics=tuple(measured.to_json()),
        statistics_identity=tuple(measured.identity()) if measured.any else (),
    )


def _versions(tensors: Sequence[TensorPlan]) -> dict[str, str]:
    """Versions of what computes the answer; a user's own rule is told by the hash of its file."""
    own = {t.call.method for t in tensors if t.call is not None and is_user_method(t.call.method)}
    versions = {"actmat": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return versions | {name: user_method_hash(name) for name in sorted(own)}


def _headline(problems: Sequence[str]) -> str:
    n = len(problems)
    return f"The merge cannot be done: {n} problem{'s' if n > 1 else ''}."


def _decide(spec: TensorSpec, layout: TensorLayout, chooser: Chooser, kept: Mapping[str, str]) -> Decision:
    if spec.name in kept:
        return Decision("copy", f"kept from the base by the recipe ('{kept[spec.name]}')", layout)
    if layout.role is Role.BUFFER or not spec.is_floating:
        return Decision("copy", f"{layout.reason}: copied from the base", layout)
    return chooser.decide(spec, layout)


def _tensor_plans(
    recipe: Recipe,
    base: Checkpoint,
    experts: Sequence[Checkpoint],
    alignment: Alignment,
    decided: Mapping[str, Decision],
    device: str,
) -> tuple[TensorPlan, ...]:
    depth: dict[str, float] = {}
    if recipe.postprocess.lines is not None:
        depth = depth_factors([n for n, d in decided.items() if d.action == "merge"], *recipe.postprocess.lines)
    peaks: dict[Any, int] = {}
    out: list[TensorPlan] = []
    for name, aliases in alignment.canonical.items():
        spec, decision = base.specs[name], decided[name]
        call, reason = decision.call, decision.reason
        if call is not None and name in depth:
            call = dataclasses.replace(call, scale=call.scale * depth[name])
            reason += f", scaled by {depth[name]:.3g} for its depth"
        sources = tuple(s for s in alignment.sources[name] if s is not None) if call is not None else ()
        out_dtype = _out_dtype(recipe, spec)
        read = spec.nbytes + sum(read_bytes(e, s) for e, s in zip(experts, sources, strict=False))
        written = spec.numel * torch_dtype(out_dtype).itemsize
        peak = spec.nbytes
        if call is not None:
            method = get_method(call.method)
            walks = can_walk(device, experts, sources)
            key = (method.name, spec.shape, spec.dtype, decision.layout, tuple(map(str, call.options.items())), walks)
            if key not in peaks:
                peaks[key] = _peak(recipe, method, spec, decision.layout, call.options, len(experts), walks)
            peak = peaks[key]
        factored = call is not None and is_factored(recipe, call, experts, sources)
        if factored:
            reason += ", in factored form"
        out.append(
            TensorPlan(
                name=name,
                shape=spec.shape,
                base_dtype=spec.dtype,
                out_dtype=out_dtype,
                layout=decision.layout,
                action=decision.action,
                reason=reason,
                call=call,
                sources=sources,
                expert_dtypes=tuple(e.specs[s].dtype for e, s in zip(experts, sources, strict=False)),
                aliases=aliases,
                twins=alignment.twins[name] if call is not None else (),
                read_bytes=read,
                write_bytes=written * (1 + len(aliases)),
                peak_bytes=peak,
                factored=factored,
            )
        )
        out.extend(
            TensorPlan(alias, spec.shape, base.specs[alias].dtype, _out_dtype(recipe, base.specs[alias]),
                       decision.layout, "tie", f"tied to {name}: merged once, the same bytes", tied_to=name)
            for alias in aliases
        )  # fmt: skip
    return tuple(out)


def _pooled_peak(recipe: Recipe, item: TensorPlan, experts: Sequence[Checkpoint], device: str) -> int:
    assert item.call is not None, "only merged tensors are pooled"
    spec = TensorSpec(item.name, item.shape, item.base_dtype, "")
    walks = can_walk(device, experts, item.sources)
    return _peak(recipe, get_method(item.call.method), spec, item.layout, item.call.options, len(experts), walks)


def _peak(
    recipe: Recipe,
    method: MergeMethod,
    spec: TensorSpec,
    layout: TensorLayout,
    options: Mapping[str, Any],
    n_experts: int,
    walks: bool,
) -> int:
    parts = cut(spec.shape, layout, granularity(method, recipe.postprocess))
    caps = recipe.postprocess
    itemsize, dtype = spec.itemsize, recipe.compute_dtype
    return tensor_peak_bytes(parts, method, n_experts, options, itemsize, dtype, caps=caps, walks=walks)


def _out_dtype(recipe: Recipe, spec: TensorSpec) -> str:
    return recipe.dtype if recipe.dtype is not None and spec.is_floating else spec.dtype


def _summary(label: str, checkpoint: Checkpoint, ignored: tuple[str, ...] = ()) -> InputSummary:
    specs = checkpoint.adapter.weights.specs if isinstance(checkpoint, AdapterExpert) else checkpoint.specs
    nbytes = sum(s.nbytes for s in specs.values())
    return InputSummary(label, checkpoint.location, checkpoint.identity(), len(specs), nbytes, ignored)


def _dtype_notes(base: Checkpoint, experts: Sequence[Checkpoint], labels: Sequence[str]) -> list[str]:
    def dtypes(checkpoint: Checkpoint) -> str:
        return ", ".join(sorted({s.dtype for s in checkpoint.specs.values() if s.is_floating}))

    mine = dtypes(base)
    return [
        f"expert '{label}' is stored in {dtypes(e)}, the base in {mine}: the delta of a coarser copy is part rounding"
        for label, e in zip(labels, experts, strict=True)
        if dtypes(e) != mine
    ]
