"""Items of a merged adapter: its modules, and the tensors trained in full next to them. Needs no base."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actmat.checkpoints.base import TensorSpec, torch_dtype
from actmat.errors import AlignmentError
from actmat.experts.base import DeltaSource, Expert
from actmat.experts.lora.adapter import Adapter, widest
from actmat.experts.lora.apart import names_of_packed
from actmat.experts.lora.modules import AdapterLayout, AdapterModule
from actmat.experts.lora.names import PREFIX
from actmat.identity.inputs import compare_adapters
from actmat.layout.types import Block, LayoutMap, Role, TensorLayout
from actmat.linalg.operations import total
from actmat.methods import get_method
from actmat.planning.adapter.forms import in_one_form
from actmat.planning.adapter.layouts import (
    STEMS,
    is_transposed,
    is_turned,
    module_outputs,
    output_config,
    output_layout,
    stack_problems,
    stored_spec,
)
from actmat.planning.adapter.serving import plan_notes
from actmat.planning.align import resolve_roles
from actmat.planning.calls import depth_factors
from actmat.planning.choose import Chooser, Decision, weight_problems
from actmat.planning.cost import factored_bytes, item_operations, statistics_bytes
from actmat.planning.item import FactorPlan, Item, ItemCost, MethodCall
from actmat.planning.model import Draft
from actmat.planning.post import factor_problems, in_space
from actmat.planning.statistics import ExpertStatistics, module_statistics
from actmat.recipe import Recipe


def check(problems: Sequence[str]) -> None:
    """Raise the problems of a plan, if there are any."""
    if problems:
        many = "s" * (len(problems) > 1)
        raise AlignmentError(f"The merge cannot be done: {len(problems)} problem{many}.", problems)


def adapter_problems(recipe: Recipe, adapters: Sequence[Adapter]) -> list[str]:
    """Problems of the adapters themselves, and of their combination."""
    pairs = list(zip(recipe.labels, adapters, strict=True))
    problems = [f"expert '{label}' ({a.location}): {p}" for label, a in pairs for p in a.problems]
    named = [(label, a.listing.models) for label, a in pairs if a.listing.models]
    if named and not frozenset.intersection(*(models for _, models in named)):
        listed = ", ".join(f"{label}: {' or '.join(sorted(models))}" for label, models in named)
        problems.append(
            f"the adapters are of different model architectures ({listed}), and no model has the modules of all. Fix: "
            "merge those of each model by themselves; if one was mistaken, correct modelspec.architecture in it"
        )
    bases = {a.config.base_model: label for label, a in reversed(pairs) if a.config.base_model}
    if len(bases) > 1 and not recipe.adapter.any_base:
        listed = ", ".join(f"'{b}' ({label})" for b, label in reversed(bases.items()))
        problems.append(
            f"the adapters name different bases: {listed}. Deltas of different bases do not add up; if these are "
            "copies of one model, say so with --set any_base=true ('any_base: true' in a recipe)"
        )
    return problems


def _packing_problems(pairs: Sequence[tuple[str, Adapter]]) -> list[str]:
    """Layers that one adapter has packed and another one separately; no model has both."""
    packed = {n: label for label, a in pairs for n, m in a.modules.items() if m.kind == "linear"}
    for label, adapter in pairs:
        for name in adapter.modules:
            for weight in names_of_packed(name):
                if (other := weight.removesuffix(".weight")) in packed:
                    return [
                        f"expert '{packed[other]}' adapts '{other}', in which '{name}' of expert '{label}' is packed: "
                        "no model has both layers, so that no adapter holds both. With a base (--base), write a model "
                        "(--to model), or an adapter that is extracted from the merge (--to extracted)"
                    ]
    return []


def recipe_problems(recipe: Recipe, decided: Mapping[str, Decision]) -> list[str]:
    """Settings of the recipe that an adapter cannot hold."""
    problems = []
    for name in dict.fromkeys(d.call.method for d in decided.values() if d.call is not None):
        if get_method(name).needs_base and get_method(name).lowrank is None:
            problems.append(f"method '{name}' reads the base's weights; write a full model (--base ..., --to model)")
    if recipe.allow_nonfinite:
        problems.append("'allow_nonfinite' acts on single entries of a delta, and NaN in a factor reaches whole rows")
    return problems


def problems_of_full_tensors(recipe: Recipe, adapters: Sequence[Adapter], kept: Mapping[str, str]) -> list[str]:
    """Tensors that one expert trained in full and another adapted: without the base these do not add up."""
    problems = []
    labeled = list(zip(recipe.labels, adapters, strict=True))
    for name in {n: None for a in adapters for n in a.extras if n not in kept}:
        module = name.rpartition(".")[0]
        full = [label for label, a in labeled if name in a.extras]
        factored = [label for label, a in labeled if module in a.modules and name.endswith(".weight")]
        if factored:
            problems.append(
                f"tensor '{name}' is trained in full in {', '.join(full)} and adapted in {', '.join(factored)}; only "
                "the base tells the difference of the two: write a full model (--base ..., --to model), or keep it"
            )
    return problems


def plan_full_tensors(
    recipe: Recipe, adapters: Sequence[Adapter], chooser: Chooser, kept: dict[str, str], dtype: str
) -> tuple[tuple[Item, ...], list[str], list[str]]:
    """Tensors trained in full, problems and notes; names that the recipe keeps go to `kept`."""
    out: list[Item] = []
    problems: list[str] = []
    notes: list[str] = []
    for name in {n: None for a in adapters for n in a.extras}:
        if (pattern := chooser.keeps(name)) is not None:
            kept[name] = pattern
            continue
        stored = [a.weights.specs[a.extras[name]] if name in a.extras else None for a in adapters]
        shapes = {s.shape: None for s in stored if s is not None}
        if len(shapes) > 1:
            problems.append(
                f"tensor '{name}' has shapes {shapes_text(shapes)} in the adapters; other numbers of classes?"
            )
            continue
        missing = [label for label, s in zip(recipe.labels, stored, strict=True) if s is None]
        weights, problem, note = _weights_of_full(name, chooser, [s is not None for s in stored])
        reason = "trained in full: mean over the experts"
        if missing:
            reason += f" that have it; not in {', '.join(missing)}"
            notes.append(f"'{name}' is not in {', '.join(missing)}: mean over the others")
        if problem:
            problems.append(problem)
            continue
        notes += [note] if note else []
        if weights is not None and sum(w for w, s in zip(weights, stored, strict=True) if s is not None) == 0:
            having = ", ".join(label for label in recipe.labels if label not in missing)
            problems.append(
                f"tensor '{name}' is trained in full in {having} only, of total weight 0; give a weight, or keep the "
                "tensor as it is in the base (--keep)"
            )
            continue
        out.append(_full_item(name, reason, stored, weights, dtype))
    return tuple(out), problems, notes


def _weights_of_full(name: str, chooser: Chooser, having: Sequence[bool]) -> tuple[tuple[float, ...] | None, str, str]:
    """Weights of the mean of a tensor that experts store in full, a problem and a note.

    Without the base a sum of deltas is known only if its factors add up to 1; it is a mean then.
    """
    call = chooser.elsewhere(name, having)
    if call.method != "task_arithmetic":
        return call.weights, "", ""
    weights = call.weights or (1.0,) * len(having)
    scaling = call.scale * call.options["scaling"]
    used = [scaling * w for w, has in zip(weights, having, strict=True) if has]
    total = math.fsum(used)
    if math.isclose(total, 1.0, rel_tol=1e-6):
        return tuple(scaling * w for w in weights), "", ""
    found = f"'{name}' is trained in full, so that the sum of its deltas, of factors that add up to {total:g}, needs"
    if min(used) < 0:
        return weights, f"tensor {found} the base. Write a full model (--base ..., --to model), or --keep '{name}'", ""
    return weights, "", f"{found} the base: the weighted mean is written (--base ... --to model writes the sum)"


def _full_item(
    name: str, reason: str, stored: Sequence[TensorSpec | None], weights: tuple[float, ...] | None, dtype: str
) -> Item:
    """The mean of a tensor that experts trained in full, of one shape."""
    having = [s for s in stored if s is not None]
    first = having[0]
    own = first.name.removeprefix(PREFIX).replace(".base_layer.", ".") == name
    output = TensorSpec(first.name if own else PREFIX + name, first.shape, dtype, "")
    return Item(
        name=name,
        shape=output.shape,
        layout=TensorLayout(Role.VECTOR, reason),
        action="average",
        reason=reason,
        outputs=(output,),
        call=MethodCall("average", {}, 1.0, weights),
        kernel="combine",
        sources=tuple(None if s is None else DeltaSource(s.name, "stored", s.dtype, s.nbytes) for s in stored),
        cost=ItemCost(
            read_bytes=sum(s.nbytes for s in having),
            write_bytes=output.nbytes,
            flops=output.numel * len(stored),
            host_bytes=24 * output.numel,
        ),
    )


def shapes_text(shapes: Iterable[tuple[int, ...]]) -> str:
    """Shapes as a reader writes them: `4x8 and 4x16`."""
    return " and ".join("x".join(map(str, s)) for s in shapes)


ONE_FILE = 1 << 62
"""Bytes: PEFT reads one file only, so an adapter is never sharded."""


def _adapters(experts: Sequence[Expert]) -> list[Adapter]:
    """The experts as adapters, if all of them are."""
    adapters = [e.adapter for e in experts if e.adapter is not None]
    if len(adapters) < len(experts):
        raise AlignmentError("An adapter is merged from adapters: give a base to write a full model.")
    return adapters


def plan_modules(
    recipe: Recipe, experts: Sequence[Expert], base_config: Mapping[str, Any] | None, statistics: ExpertStatistics
) -> Draft:
    """Decide what happens to every module of every adapter.

    Raises:
        AlignmentError: the adapters or the recipe do not fit; carries all problems.
    """
    adapters = _adapters(experts)
    problems, notes_of_tokens = compare_adapters(recipe.labels, experts)
    problems += adapter_problems(recipe, adapters)
    adapters, of_names, notes_of_names = in_one_form(recipe.labels, adapters)
    problems += of_names
    layout = output_layout(recipe, adapters)
    problems += stack_problems(recipe.labels, adapters)
    problems += _packing_problems(list(zip(recipe.labels, adapters, strict=True)))
    problems += statistics.kind_problems([True] * len(adapters))
    chooser = Chooser(recipe, statistics.kinds)
    kept: dict[str, str] = {}
    found = _collect(adapters, chooser, kept, problems)
    chooser.names = [m.spec.name for m in found]
    layouts, role_problems = _resolve(recipe, found, adapters, base_config)
    dtype = recipe.dtype or widest([a.dtype for a in adapters])
    planner = _ModulePlanner(recipe, adapters, chooser, dtype, layout)
    decided = {}
    for module in found:
        decision = planner.decide(module, layouts.tensors[module.spec.name])
        blocks = _blocks(decision.layout, module.first)
        decided[module.name], module.grams = module_statistics(
            decision, module.spec.name, module.first, blocks, statistics, chooser, problems
        )
    extras, extra_problems, notes = plan_full_tensors(recipe, adapters, chooser, kept, dtype)
    problems += chooser.problems + role_problems
    problems += weight_problems({n: d.call for n, d in decided.items()} | {i.name: i.call for i in extras})
    problems += factor_problems(recipe, list(zip(recipe.labels, adapters, strict=True)))
    problems += recipe_problems(recipe, decided)
    problems += extra_problems
    known = {*(m.spec.name for m in found), *kept, *(n for a in adapters for n in a.extras)}
    problems += [f"the pattern '{p}' matches no module of the adapters" for p in chooser.unused_patterns(known)]
    problems += problems_of_full_tensors(recipe, adapters, kept)
    if kept and not found and not extras:
        problems.append("'keep' leaves nothing to merge: every module of the adapters matches")
    check(problems)
    modules = planner.items(found, decided)
    check(weight_problems({f"{i.name}.bias": i.pair.bias for i in modules}))
    config = output_config(recipe, adapters, modules, extras) if STEMS[layout] == STEMS["peft"] else None
    return Draft(
        items=(*modules, *extras),
        specs=tuple(s for item in (*modules, *extras) for s in item.outputs),
        max_shard_bytes=ONE_FILE,
        stem=STEMS[layout],
        adapter_config=config,
        kept=kept,
        notes=(
            *(*notes_of_tokens, *notes_of_names, *notes),
            *plan_notes(recipe, adapters, [m.name for m in found], modules, config),
        ),
    )


@dataclass
class _Found:
    """A module of the adapters: one entry per expert, the tensor that its delta belongs to, the decision."""

    name: str
    modules: tuple[AdapterModule | None, ...]
    spec: TensorSpec
    transposed: bool
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
                f"module '{name}' has deltas of shapes {shapes_text(shapes)}; are the adapters of one base, and their "
                "stacked experts written by versions of PEFT that agree on the axes?"
            )
        parameters = {m.parameters for m in found if m is not None}
        if len(shapes) == 1 and not set.intersection(*(set(p) for p in parameters)) and any(parameters):
            named = " and ".join(" or ".join(p) or "the layer" for p in sorted(parameters))
            problems.append(f"module '{name}' adapts {named}: wrappers of other nests. Write a full model (--base ...)")
        spec = stored_spec(name, found, adapters)
        pattern = chooser.keeps(spec.name)
        if pattern is None:
            out.append(_Found(name, found, spec, is_transposed(found, adapters)))
        else:
            kept[spec.name] = pattern
    return out


def _resolve(
    recipe: Recipe, found: Sequence[_Found], adapters: Sequence[Adapter], config: Mapping[str, Any] | None
) -> tuple[LayoutMap, list[str]]:
    """Layouts of the tensors that the modules imply, and problems; stacks whose `B A` is `I O` are turned."""
    specs = {m.spec.name: m.spec for m in found}
    stacks = [m for m in found if m.first.is_stack]
    layouts, problems = resolve_roles(recipe, specs, config)
    if not stacks:
        return layouts, problems
    mirrored, _ = resolve_roles(recipe, specs | {m.spec.name: _transposed(m.spec) for m in stacks}, config)
    for module in stacks:
        now, then = (of.tensors[module.spec.name].orientation for of in (layouts, mirrored))
        if is_turned(now, then, adapters):
            module.spec = specs[module.spec.name] = _transposed(module.spec)
            module.modules = tuple(
                None if m is None else dataclasses.replace(m, shape=module.spec.shape, is_turned=True)
                for m in module.modules
            )
    return resolve_roles(recipe, specs, config)


def _transposed(spec: TensorSpec) -> TensorSpec:
    experts, rows, columns = spec.shape
    return dataclasses.replace(spec, shape=(experts, columns, rows))


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

    def items(self, found: Sequence[_Found], decided: Mapping[str, Decision]) -> tuple[Item, ...]:
        """One item per module, in the given order."""
        depth: dict[str, float] = {}
        if self.recipe.postprocess.lines is not None:
            merged = [name for name, decision in decided.items() if decision.action == "merge"]
            depth = depth_factors(merged, *self.recipe.postprocess.lines)
        out = []
        for module in found:
            decision = decided[module.name]
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
        biased = [m is not None and m.bias is not None for m in module.modules]
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
            turned=first.is_turned,
            kernel=first.kernel,
            blocks=blocks,
            grams=module.grams,
            bias=self.chooser.elsewhere(f"{module.name}.bias", biased) if any(biased) else None,
        )
        form = f"on dense deltas: {why_dense}" if why_dense else "in factored form"
        reason = decision.reason + in_space(call, ())[1] + ("; " if why_dense else ", ") + form
        if any(biased) and not all(biased):
            missing = [label for label, has in zip(self.recipe.labels, biased, strict=True) if not has]
            how = "mean over the" if factors.bias and factors.bias.method == "average" else "sum of those of"
            reason += f"; bias: {how} experts that have it; not in {', '.join(missing)}"
        item = Item(
            name=module.name,
            shape=first.shape,
            layout=decision.layout,
            action=decision.action,
            reason=reason,
            outputs=module_outputs(module.name, first, self.stored_as, rank, self.dtype, has_bias=any(biased)),
            call=call,
            kernel="factored",
            obeys_scale=decision.action == "merge",
            form="dense" if why_dense else "factored",
            sources=tuple(
                None if m is None else _source(a, m) for a, m in zip(self.adapters, module.modules, strict=True)
            ),
            factors=factors,
        )
        return dataclasses.replace(item, cost=self._cost(item, call))

    def _cost(self, item: Item, call: MethodCall) -> ItemCost:
        method, n_experts = get_method(call.method), len(self.adapters)
        width = torch_dtype(self.recipe.compute_dtype).itemsize
        peak = factored_bytes(item.shape, sum(item.pair.ranks))
        if item.form == "dense":
            size = method.cost.workspace(item.shape, n_experts, call.options)
            peak += item.numel * width * (n_experts + 6) + size * width
            # the truncation decomposes a delta of full rank
            peak = max(peak, factored_bytes(item.shape, min(item.shape[-2:])))
        if item.pair.grams:
            peak += statistics_bytes(method, [item.shape], n_experts, 8)
        return ItemCost(
            read_bytes=sum(s.nbytes for s in item.sources if s is not None),
            write_bytes=sum(s.nbytes for s in item.outputs),
            flops=total(item_operations(item, self.recipe.compute_dtype)),
            host_bytes=peak,
        )

    def _with_rank(self, item: Item, rank: int) -> Item:
        """The item written with another rank; zeros fill up."""
        first = next(m for a in self.adapters if (m := a.modules.get(item.name)) is not None)
        first = dataclasses.replace(first, shape=item.shape, is_turned=item.pair.turned)
        has_bias = any(s.name.endswith(".bias") for s in item.outputs)
        outputs = module_outputs(item.name, first, self.stored_as, rank, self.dtype, has_bias=has_bias)
        cost = dataclasses.replace(item.cost, write_bytes=sum(s.nbytes for s in outputs))
        return dataclasses.replace(item, outputs=outputs, factors=dataclasses.replace(item.pair, rank=rank),
                                   cost=cost)  # fmt: skip


def _exact_rank(call: MethodCall, ranks: Sequence[int], blocks: int) -> int:
    """Rank that holds every possible delta of a factored merge, by the number of packed maps."""
    method = get_method(call.method)
    if call.space == "factors":
        return max(ranks) * (blocks if blocks and method.is_random else 1)
    # packed maps whose merged rows leave the joint row space of the experts share no rows: their ranks add up
    keeps = method.keeps_row_space or call.space == "core"
    return sum(ranks) * (blocks if blocks and not keeps else 1)


def _source(adapter: Adapter, module: AdapterModule) -> DeltaSource:
    stored = [adapter.weights.specs[n] for n in (module.a, module.b, module.bias) if n is not None]
    return DeltaSource(module.name, "formed", stored[0].dtype, sum(s.nbytes for s in stored), module.rank)


def _blocks(layout: TensorLayout, module: AdapterModule) -> tuple[Block, ...]:
    """Rows of packed maps, if they cover the rows of the delta exactly."""
    rows = sum((b.stop - b.start) * b.groups for b in layout.blocks)
    return layout.blocks if rows == module.shape[-2] and module.kind in ("linear", "parameter") else ()
