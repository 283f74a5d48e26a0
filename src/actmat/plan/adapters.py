"""Adapters + recipe -> plan of an adapter. Reads no tensor, needs no base; finds all problems at once."""

from __future__ import annotations

import dataclasses
import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from actmat.checkpoints.adapter import Adapter, AdapterModule
from actmat.checkpoints.base import TensorSpec, torch_dtype
from actmat.checkpoints.shards import plan_shards
from actmat.errors import AlignmentError, RecipeError
from actmat.layout.fused import GATED
from actmat.layout.types import Block, Role, TensorLayout
from actmat.methods import get_method
from actmat.plan.adapter_config import output_config
from actmat.plan.adapter_model import AdapterPlan, ExtraPlan, ModulePlan, factored_bytes
from actmat.plan.adapter_notes import plan_notes
from actmat.plan.adapter_problems import (
    adapter_problems,
    problems_of_full_tensors,
    recipe_problems,
    why_not_factored,
)
from actmat.plan.choose import Chooser, Decision, depth_factors
from actmat.plan.cost import statistics_bytes
from actmat.plan.measured import Measured, kind_problems, module_statistics, notes_on
from actmat.plan.model import InputSummary
from actmat.plan.roles import resolve_roles
from actmat.recipe import Recipe
from actmat.version import __version__

__all__ = ["build_adapter_plan"]


def build_adapter_plan(
    recipe: Recipe,
    adapters: Sequence[Adapter],
    base_config: Mapping[str, Any] | None = None,
    measured: Measured | None = None,
) -> AdapterPlan:
    """Decide what happens to every module of every adapter.

    Args:
        recipe: what is wanted.
        adapters: one per expert.
        base_config: the base's `config.json`, where a base was given: it tells packed projections apart.
        measured: statistics of the adapters, for rules that need them.

    Raises:
        AlignmentError: the adapters or the recipe do not fit; carries all problems.
    """
    labels = recipe.labels
    problems = adapter_problems(recipe, adapters)
    measured = measured or Measured(labels, (None,) * len(labels))
    problems += kind_problems(measured, [True] * len(adapters))
    chooser = Chooser(recipe, measured.kinds)
    have, specs = {}, {}
    kept: dict[str, str] = {}
    for name in {name: None for a in adapters for name in a.modules}:
        found = tuple(a.modules.get(name) for a in adapters)
        shapes = {m.shape: None for m in found if m is not None}
        if len(shapes) > 1:
            problems.append(f"module '{name}' has deltas of shapes {_shapes(shapes)}; are the adapters of one base?")
        spec = _stored_spec(name, found, adapters)
        pattern = chooser.keeps(spec.name)
        if pattern is None:
            have[name], specs[spec.name] = found, spec
        else:
            kept[spec.name] = pattern
    layouts, layout_problems = resolve_roles(recipe, specs, base_config)
    decided = {n: chooser.decide(specs[t], layouts.tensors[t]) for n, t in zip(have, specs, strict=True)}
    grams: dict[str, tuple[tuple[str, ...], ...]] = {}
    for name, tensor in zip(have, specs, strict=True):
        first = next(m for m in have[name] if m is not None)
        blocks = _blocks(decided[name].layout, first)
        decided[name], grams[name] = module_statistics(
            decided[name], tensor, first, blocks, measured, chooser, problems
        )
    extras, extra_problems, notes = _extras(recipe, adapters, chooser, kept)
    known = {*specs, *kept, *(n for a in adapters for n in a.extras)}
    problems += chooser.problems + layout_problems + recipe_problems(recipe, decided) + extra_problems
    problems += [f"the pattern '{p}' matches no module of the adapters" for p in chooser.unused_patterns(known)]
    problems += problems_of_full_tensors(recipe, adapters, kept)
    if kept and not have and not extras:
        problems.append("'keep' leaves nothing to merge: every module of the adapters matches")
    if problems:
        raise AlignmentError(f"The adapters cannot be merged: {len(problems)} problem(s).", problems)
    depth = {}
    if recipe.postprocess.lines is not None:
        depth = depth_factors([n for n, d in decided.items() if d.action == "merge"], *recipe.postprocess.lines)
    modules = _modules(recipe, adapters, have, decided, depth, grams)
    dtype = recipe.dtype or _widest([a.dtype for a in adapters])
    config = output_config(recipe, adapters, modules, extras)
    out_specs = tuple(s for m in modules for s in _specs(m, dtype)) + tuple(
        TensorSpec(e.output, e.shape, dtype, "") for e in extras
    )
    return AdapterPlan(
        recipe=recipe,
        experts=tuple(_summary(label, a) for label, a in zip(labels, adapters, strict=True)),
        modules=modules,
        extras=extras,
        specs=out_specs,
        shards=plan_shards(out_specs, 1 << 62, stem="adapter_model"),
        config=config,
        dtype=dtype,
        kept=kept,
        notes=tuple(notes + plan_notes(recipe, adapters, have, modules, config) + notes_on(measured, modules)),
        versions={"actmat": __version__, "torch": torch.__version__, "python": platform.python_version()},
        statistics=tuple(measured.to_json()),
        statistics_identity=tuple(measured.identity()) if measured.any else (),
    )


def _modules(
    recipe: Recipe,
    adapters: Sequence[Adapter],
    have: Mapping[str, tuple[AdapterModule | None, ...]],
    decided: Mapping[str, Decision],
    depth: Mapping[str, float],
    grams: Mapping[str, tuple[tuple[str, ...], ...]],
) -> tuple[ModulePlan, ...]:
    reasons: dict[str, str] = {}
    out = []
    for name, found in have.items():
        decision, first = decided[name], next(m for m in found if m is not None)
        call, why = decision.call, decision.reason
        assert call is not None, "kept modules are not planned, unknown rules are problems"
        if name in depth:
            call = dataclasses.replace(call, scale=call.scale * depth[name])
            why += f", scaled by {depth[name]:.3g} for its depth"
        key = str((call.method, call.options, call.weights))
        if key not in reasons:
            reasons[key] = why_not_factored(call, len(adapters))
        ranks = tuple(0 if m is None else m.rank for m in found)
        limit = min(first.shape[-2:])
        blocks = _blocks(decision.layout, first)
        # packed maps whose merged rows leave the joint row space of the experts share no rows: their ranks add up
        apart = len(blocks) if blocks and not get_method(call.method).keeps_row_space else 1
        full = limit if reasons[key] else min(apart * sum(ranks), limit)
        rank = min(full, apart * sum(ranks)) if recipe.rank is None else min(recipe.rank, limit)
        reason = why + (f"; on dense deltas: {reasons[key]}" if reasons[key] else ", in factored form")
        dense = math.prod(first.shape) * torch_dtype(recipe.compute_dtype).itemsize
        peak = factored_bytes(first.shape, sum(ranks))
        if reasons[key]:
            method = get_method(call.method)
            size = math.prod(first.shape) if method.workspace is None else method.workspace(
                first.shape, len(adapters), call.options)  # fmt: skip
            peak += dense * (len(adapters) + 6) + size * torch_dtype(recipe.compute_dtype).itemsize
            peak = max(peak, factored_bytes(first.shape, limit))  # the cut decomposes a delta of full rank
        if grams[name]:
            peak += statistics_bytes(get_method(call.method), [first.shape], len(adapters), 8)
        a, b = first.a, first.b
        has_bias = any(m is not None and m.bias is not None for m in found)
        out.append(
            ModulePlan(
                name=name,
                kind=first.kind,
                shape=first.shape,
                ranks=ranks,
                full_rank=full,
                rank=rank,
                action=decision.action,
                reason=reason,
                call=call,
                factored=not reasons[key],
                a=a,
                b=b,
                kernel=first.kernel,
                blocks=blocks,
                bias=b.removesuffix("weight") + "bias" if has_bias else None,
                is_table=decision.layout.role is Role.EMBEDDING,
                grams=grams[name],
                peak_bytes=peak,
            )
        )
    if recipe.ranks == "uniform" and out:
        top = max(m.rank for m in out)
        out = [dataclasses.replace(m, rank=top) for m in out]
    return tuple(out)


def _blocks(layout: TensorLayout, module: AdapterModule) -> tuple[Block, ...]:
    """Rows of packed maps, where they cover the rows of the delta exactly."""
    rows = sum((b.stop - b.start) * b.groups for b in layout.blocks)
    return layout.blocks if rows == module.shape[-2] and module.kind in ("linear", "parameter") else ()


def _tensor_name(name: str, found: Sequence[AdapterModule | None], adapters: Sequence[Adapter]) -> str:
    """Name of the tensor that a module's delta belongs to, as the model has it."""
    plain = name.replace(".base_layer", "")
    for adapter, module in zip(adapters, found, strict=True):
        if module is not None and module.kind == "parameter":
            return f"{plain}.{_parameter_name(plain, module, adapter)}"
    return f"{plain}.weight"


def _parameter_name(owner: str, module: AdapterModule, adapter: Adapter) -> str:
    """Name of the bare parameter that a module adapts.

    Several parameters of one owner are told apart by their place in a nest of wrappers, whose order only the model
    knows. Of a pair that is gated (`gate_up_proj`, `down_proj`) the shapes tell as well: the first has two rows for
    every column of the second.
    """
    parameters = adapter.config.parameters_of(owner)
    if len(parameters) == 1:
        return parameters[0]
    nest = [m for m in adapter.modules.values() if m.name.replace(".base_layer", "") == owner]
    down = next((GATED[p] for p in parameters if GATED.get(p) in parameters), None)
    if down is not None and len(parameters) == len(nest) == 2:
        (other,) = (m for m in nest if m is not module)
        (a, b), (c, d) = module.shape[-2:], other.shape[-2:]
        if (a, b) in ((2 * d, c), (d, 2 * c)):
            return next(p for p in parameters if p != down)
        if (c, d) in ((2 * b, a), (b, 2 * a)):
            return down
    return module.name[len(owner) :].lstrip(".") or "weight"


def _stored_spec(name: str, found: Sequence[AdapterModule | None], adapters: Sequence[Adapter]) -> TensorSpec:
    """The base's tensor as the adapters imply it: its shape, transposed for Conv1D, opened up for convolutions."""
    adapter, module = next((a, m) for a, m in zip(adapters, found, strict=True) if m is not None)
    shape = module.shape
    if module.kind == "linear" and adapter.config.fan_in_fan_out:
        shape = (shape[1], shape[0])
    elif module.kind == "convolution":
        shape = (shape[0], *module.kernel)
    return TensorSpec(_tensor_name(name, found, adapters), shape, adapter.dtype, adapter.location)


def _extras(
    recipe: Recipe, adapters: Sequence[Adapter], chooser: Chooser, kept: dict[str, str]
) -> tuple[tuple[ExtraPlan, ...], list[str], list[str]]:
    """Full tensors, problems and notes; names that the recipe keeps go to `kept`."""
    out, problems, notes = [], [], []
    weights = recipe.weights if any(w != 1.0 for w in recipe.weights) else None
    for name in {n: None for a in adapters for n in a.extras}:
        if (pattern := chooser.keeps(name)) is not None:
            kept[name] = pattern
            continue
        sources = tuple(a.extras.get(name) for a in adapters)
        shapes = {a.weights.specs[s].shape: None for a, s in zip(adapters, sources, strict=True) if s is not None}
        if len(shapes) > 1:
            problems.append(f"tensor '{name}' has shapes {_shapes(shapes)} in the adapters; other numbers of classes?")
            continue
        missing = [label for label, s in zip(recipe.labels, sources, strict=True) if s is None]
        reason = "trained in full: mean over the experts"
        if missing:
            reason += f" that have it; not in {', '.join(missing)}"
            notes.append(f"'{name}' is not in {', '.join(missing)}: mean over the others")
        shape = next(iter(shapes))
        output = next(s for s in sources if s is not None)
        peak = 24 * math.prod(shape)
        out.append(ExtraPlan(name, shape, sources, output, reason, weights, "average", peak))
    return tuple(out), problems, notes


def _specs(module: ModulePlan, dtype: str) -> list[TensorSpec]:
    *batch, rows, columns = module.shape
    n = module.rank * math.prod(batch)
    if module.kind == "embedding":
        shapes: tuple[tuple[int, ...], tuple[int, ...]] = (n, rows), (columns, n)
    elif module.kind == "convolution":
        ones = (1,) * (len(module.kernel) - 1)
        shapes = (n, *module.kernel), (rows, n, *ones)
    else:
        shapes = (n, columns), (rows, n)
    out = [TensorSpec(module.a, shapes[0], dtype, ""), TensorSpec(module.b, shapes[1], dtype, "")]
    return out + ([TensorSpec(module.bias, (rows,), dtype, "")] if module.bias is not None else [])


def _summary(label: str, adapter: Adapter) -> InputSummary:
    specs = adapter.weights.specs.values()
    return InputSummary(label, adapter.location, adapter.weights.identity(), len(specs), sum(s.nbytes for s in specs))


def _widest(dtypes: Sequence[str]) -> str:
    known = [d for d in ("float64", "float32", "bfloat16", "float16") if d in dtypes]
    if not known:
        raise RecipeError("The adapters hold no floating point tensors.")
    return known[0]


def _shapes(shapes: Mapping[tuple[int, ...], None]) -> str:
    return " and ".join("x".join(map(str, s)) for s in shapes)
