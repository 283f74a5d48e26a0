"""Items of a merged adapter: its modules, and the tensors trained in full next to them. Needs no base."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actmat.checkpoints.base import TensorSpec, torch_dtype
from actmat.errors import AlignmentError, RecipeError
from actmat.experts.base import Source
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.modules import AdapterLayout, AdapterModule
from actmat.layout.types import Block, TensorLayout
from actmat.linalg.operations import total
from actmat.methods import get_method
from actmat.planning.adapter.config import output_config
from actmat.planning.adapter.full_tensors import plan_full_tensors, shapes_text
from actmat.planning.adapter.implied import is_transposed, stored_spec
from actmat.planning.adapter.layouts import STEMS, in_one_layout, module_outputs, output_layout
from actmat.planning.adapter.notes import plan_notes
from actmat.planning.adapter.problems import adapter_problems, problems_of_full_tensors, recipe_problems
from actmat.planning.choose import Chooser, Decision, depth_factors
from actmat.planning.cost import factored_bytes, statistics_bytes
from actmat.planning.draft import Draft
from actmat.planning.model import Cost, FactorPlan, Item, MethodCall
from actmat.planning.operations import item_operations
from actmat.planning.post import factor_problems, in_space, post_problems
from actmat.planning.roles import resolve_roles
from actmat.planning.statistics import ExpertStatistics, module_statistics
from actmat.recipe import Recipe

__all__ = ["plan_modules"]

ONE_FILE = 1 << 62
"""Bytes: PEFT reads one file only, so an adapter is never sharded."""


def plan_modules(
    recipe: Recipe,
    adapters: Sequence[Adapter],
    base_config: Mapping[str, Any] | None,
    statistics: ExpertStatistics,
) -> Draft:
    """Decide what happens to every module of every adapter.

    Raises:
        AlignmentError: the adapters or the recipe do not fit; carries all problems.
    """
    problems = adapter_problems(recipe, adapters)
    layout = output_layout(recipe, adapters)
    adapters, layout_problems = in_one_layout(recipe, adapters, layout)
    problems += layout_problems
    problems += statistics.kind_problems([True] * len(adapters))
    chooser = Chooser(recipe, statistics.kinds)
    kept: dict[str, str] = {}
    found = _collect(adapters, chooser, kept, problems)
    chooser.names = [m.spec.name for m in found]
    layouts, role_problems = resolve_roles(recipe, {m.spec.name: m.spec for m in found}, base_config)
    dtype = recipe.dtype or _widest([a.dtype for a in adapters])
    planner = _ModulePlanner(recipe, adapters, chooser, dtype, layout)
    for module in found:
        module.decision = planner.decide(module, layouts.tensors[module.spec.name])
        blocks = _blocks(module.decision.layout, module.first)
        module.decision, module.grams = module_statistics(
            module.decision, module.spec.name, module.first, blocks, statistics, chooser, problems
        )
    extras, extra_problems, notes = plan_full_tensors(recipe, adapters, chooser, kept, dtype)
    problems += chooser.problems + role_problems
    problems += post_problems(recipe, chooser.post, has_base=False)
    problems += factor_problems(recipe, list(zip(recipe.labels, adapters, strict=True)))
    problems += recipe_problems(recipe, {m.name: m.decision for m in found if m.decision is not None})
    problems += extra_problems
    known = {*(m.spec.name for m in found), *kept, *(n for a in adapters for n in a.extras)}
    problems += [f"the pattern '{p}' matches no module of the adapters" for p in chooser.unused_patterns(known)]
    problems += problems_of_full_tensors(recipe, adapters, kept)
    if kept and not found and not extras:
        problems.append("'keep' leaves nothing to merge: every module of the adapters matches")
    if problems:
        raise AlignmentError(f"The adapters cannot be merged: {len(problems)} problem(s).", problems)
    modules = planner.items(found)
    config = output_config(recipe, adapters, modules, extras) if STEMS[layout] == STEMS["peft"] else None
    return Draft(
        items=(*modules, *extras),
        specs=tuple(s for item in (*modules, *extras) for s in item.outputs),
        max_shard_bytes=ONE_FILE,
        stem=STEMS[layout],
        adapter_config=config,
        kept=kept,
        notes=tuple(notes + plan_notes(recipe, adapters, [m.name for m in found], modules, config)),
    )


@dataclass
class _Found:
    """A module of the adapters: one entry per expert, the tensor that its delta belongs to, what was decided."""

    name: str
    modules: tuple[AdapterModule | None, ...]
    spec: TensorSpec
    transposed: bool
    decision: Decision | None = None
    grams: tuple[tuple[str, ...], ...] = ()

    @property
    def first(self) -> AdapterModule:
        return next(m for m in self.modules if m is not None)


def _collect(adapters: Sequence[Adapter], chooser: Chooser, kept: dict[str, str], problems: list[str]) -> list[_Found]:
    """Modules of all adapters, in the order of their first occurrence; those that the recipe keeps go to `kept`."""
    out = []
    for name in {name: None for a in adapters for name in a.modules}:
        found = tuple(a.modules.get(name) for a in adapters)
        shapes = {m.shape: None for m in found if m is not None}
        if len(shapes) > 1:
            problems.append(
                f"module '{name}' has deltas of shapes {shapes_text(shapes)}; are the adapters of one base?"
            )
        spec = stored_spec(name, found, adapters)
        pattern = chooser.keeps(spec.name)
        if pattern is None:
            out.append(_Found(name, found, spec, is_transposed(found, adapters)))
        else:
            kept[spec.name] = pattern
    return out


@dataclass
class _ModulePlanner:
    """Makes the items of modules, with their ranks and costs."""

    recipe: Recipe
    adapters: Sequence[Adapter]
    chooser: Chooser
    dtype: str
    stored_as: AdapterLayout

    def decide(self, module: _Found, layout: TensorLayout) -> Decision:
        """Action and method; an average counts only the experts that have the module."""
        decision = self.chooser.decide(module.spec, layout)
        having = [m is not None for m in module.modules]
        if decision.action == "average" and decision.call is not None and not all(having):
            return self.chooser.average_over(module.spec.name, decision, having)
        return decision

    def items(self, found: Sequence[_Found]) -> tuple[Item, ...]:
        """One item per module, in the given order."""
        depth: dict[str, float] = {}
        if self.recipe.postprocess.lines is not None:
            merged = [m.name for m in found if m.decision is not None and m.decision.action == "merge"]
            depth = depth_factors(merged, *self.recipe.postprocess.lines)
        out = []
        for module in found:
            decision = module.decision
            assert decision is not None
            if module.name in depth:
                decision = decision.scaled(depth[module.name])
            assert decision.call is not None, "unknown methods are problems"
            out.append(self._item(module, decision, decision.call))
        if self.recipe.adapter.ranks == "uniform" and out:
            top = max(i.pair.rank for i in out)
            out = [self._with_rank(i, top) for i in out]
        return tuple(out)

    def _item(self, module: _Found, decision: Decision, call: MethodCall) -> Item:
        method = get_method(call.method)
        why_dense = None
        if call.space == "full":
            why_dense = method.why_dense(call.options, len(self.adapters), call.weights)
        first = module.first
        ranks = tuple(0 if m is None else m.rank for m in module.modules)
        limit = min(first.shape[-2:])
        blocks = _blocks(decision.layout, first)
        together = _exact_rank(call, ranks, len(blocks))
        exact = limit if why_dense else min(together, limit)
        rank = min(exact, together) if self.recipe.adapter.rank is None else min(self.recipe.adapter.rank, limit)
        factors = FactorPlan(
            kind=first.kind,
            tensor=module.spec.name,
            shape=module.spec.shape,
            ranks=ranks,
            exact_rank=exact,
            rank=rank,
            transposed=module.transposed,
            kernel=first.kernel,
            blocks=blocks,
            grams=module.grams,
        )
        biased = [m is not None and m.bias is not None for m in module.modules]
        form = f"on dense deltas: {why_dense}" if why_dense else "in factored form"
        reason = decision.reason + in_space(call, ())[1] + ("; " if why_dense else ", ") + form
        if any(biased) and not all(biased):
            missing = [label for label, has in zip(self.recipe.labels, biased, strict=True) if not has]
            reason += f"; bias: mean over the experts that have it; not in {', '.join(missing)}"
        item = Item(
            name=module.name,
            shape=first.shape,
            layout=decision.layout,
            action=decision.action,
            reason=reason,
            outputs=self._outputs(module.name, first, rank, has_bias=any(biased)),
            call=call,
            form="dense" if why_dense else "factored",
            sources=tuple(
                None if m is None else _source(a, m) for a, m in zip(self.adapters, module.modules, strict=True)
            ),
            factors=factors,
        )
        return dataclasses.replace(item, cost=self._cost(item))

    def _cost(self, item: Item) -> Cost:
        assert item.call is not None
        method, n_experts = get_method(item.call.method), len(self.adapters)
        width = torch_dtype(self.recipe.compute_dtype).itemsize
        peak = factored_bytes(item.shape, sum(item.pair.ranks))
        if item.form == "dense":
            size = method.cost.workspace(item.shape, n_experts, item.call.options)
            peak += item.numel * width * (n_experts + 6) + size * width
            # the truncation decomposes a delta of full rank
            peak = max(peak, factored_bytes(item.shape, min(item.shape[-2:])))
        if item.pair.grams:
            peak += statistics_bytes(method, [item.shape], n_experts, 8)
        return Cost(
            read_bytes=sum(s.nbytes for s in item.sources if s is not None),
            write_bytes=sum(s.nbytes for s in item.outputs),
            flops=total(item_operations(item, self.recipe.compute_dtype)),
            host_bytes=peak,
        )

    def _outputs(self, name: str, module: AdapterModule, rank: int, *, has_bias: bool) -> tuple[TensorSpec, ...]:
        return module_outputs(name, module, self.stored_as, rank, self.dtype, has_bias=has_bias)

    def _with_rank(self, item: Item, rank: int) -> Item:
        """The item written with another rank; zeros fill up."""
        first = next(m for a in self.adapters if (m := a.modules.get(item.name)) is not None)
        has_bias = any(s.name.endswith(".bias") for s in item.outputs)
        outputs = self._outputs(item.name, first, rank, has_bias=has_bias)
        cost = dataclasses.replace(item.cost, write_bytes=sum(s.nbytes for s in outputs))
        return dataclasses.replace(item, outputs=outputs, factors=dataclasses.replace(item.pair, rank=rank),
                                   cost=cost)  # fmt: skip


def _exact_rank(call: MethodCall, ranks: Sequence[int], blocks: int) -> int:
    """Rank that holds every delta that a factored merge can give, by the number of packed maps."""
    method = get_method(call.method)
    if call.space == "factors":
        return max(ranks) * (blocks if blocks and method.is_random else 1)
    # packed maps whose merged rows leave the joint row space of the experts share no rows: their ranks add up
    keeps = method.keeps_row_space or call.space == "core"
    return sum(ranks) * (blocks if blocks and not keeps else 1)


def _source(adapter: Adapter, module: AdapterModule) -> Source:
    stored = [adapter.weights.specs[n] for n in (module.a, module.b, module.bias) if n is not None]
    return Source(module.name, "formed", stored[0].dtype, sum(s.nbytes for s in stored), module.rank)


def _blocks(layout: TensorLayout, module: AdapterModule) -> tuple[Block, ...]:
    """Rows of packed maps, where they cover the rows of the delta exactly."""
    rows = sum((b.stop - b.start) * b.groups for b in layout.blocks)
    return layout.blocks if rows == module.shape[-2] and module.kind in ("linear", "parameter") else ()


def _widest(dtypes: Sequence[str]) -> str:
    known = [d for d in ("float64", "float32", "bfloat16", "float16") if d in dtypes]
    if not known:
        raise RecipeError("The adapters hold no floating point tensors.")
    return known[0]
