"""Items of a merged model: one for every tensor of the base."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actmat.checkpoints.base import Checkpoint, TensorSpec, torch_dtype
from actmat.checkpoints.quantization import quantization_problems
from actmat.checkpoints.writing.shards import parse_size
from actmat.errors import MergeError
from actmat.experts.base import DeltaSource, Expert
from actmat.identity.configs import InputAgreement
from actmat.identity.inputs import compare_inputs
from actmat.layout.ties import tied_partner
from actmat.layout.types import Role, TensorLayout
from actmat.linalg.operations import total
from actmat.methods import get_method
from actmat.planning.adapter.modules import adapter_problems, check
from actmat.planning.align import Alignment, align, resolve_roles
from actmat.planning.calls import depth_factors
from actmat.planning.choose import Chooser, Decision, weight_problems
from actmat.planning.cost import CallShape, item_operations
from actmat.planning.item import Form, Item, ItemCost, MethodCall
from actmat.planning.model import Draft
from actmat.planning.placement import HOST, DeviceRoom, Placed, place
from actmat.planning.post import factor_problems, in_space, space_input_problems
from actmat.planning.statistics import ExpertStatistics, with_statistics
from actmat.planning.storage import (
    absent_parts,
    named_base_notes,
    part_notes,
    quantization_notes,
    scheme_words,
    stems_of,
    trained_on_codes_notes,
)
from actmat.recipe import Recipe
from actmat.recipe.output import ExtractedOutput


def plan_tensors(
    recipe: Recipe, base: Checkpoint, experts: Sequence[Expert], statistics: ExpertStatistics, room: DeviceRoom = HOST
) -> Draft:
    """Decide what happens to every tensor of the base.

    Raises:
        AlignmentError: the inputs do not fit together, or the recipe does not fit them; carries all problems.
    """
    problems = _input_problems(recipe, base, experts)
    layouts, layout_problems = resolve_roles(recipe, base.specs, base.config)
    problems += statistics.kind_problems([e.needs_base for e in experts])
    chooser = Chooser(recipe, statistics.kinds, base.specs)
    kept = absent_parts(base, experts, recipe.labels) | _kept(base, chooser)
    agreed = _agreed(recipe, base, experts, kept)
    problems += agreed.problems
    stem, stems = stems_of(base)
    alignment = align(base, experts, recipe.labels, layouts, frozenset(kept))
    decided: dict[str, Decision] = {}
    given: dict[str, list[DeltaSource | None]] = {}
    only_adapters = all(e.needs_base for e in experts)
    for name in alignment.canonical:
        spec, sources = base.specs[name], alignment.sources[name]
        decision = _decide(spec, layouts.tensors[name], chooser, kept)
        decision = with_statistics(decision, spec, sources, statistics, chooser, problems)
        given[name] = [None if s is None else e.source(s) for e, s in zip(experts, sources, strict=True)]
        decided[name] = _of_touched(name, decision, given[name], chooser, only_adapters=only_adapters)
    problems += layout_problems + chooser.problems + list(alignment.problems)
    problems += weight_problems({n: d.call for n, d in decided.items()})
    problems += _recipe_problems(recipe, base, experts, alignment, chooser)
    max_shard_bytes = 1
    try:
        max_shard_bytes = parse_size(recipe.max_shard_size)
    except MergeError as error:
        problems += error.problems
    check(problems)
    planner = _TensorPlanner(recipe, base, experts, room)
    items = planner.items(alignment, decided, given)
    check(_adapter_problems(recipe, experts))
    return Draft(
        items=items,
        specs=tuple(planner.out_spec(spec) for spec in base.specs.values()),
        max_shard_bytes=max_shard_bytes,
        stem=stem,
        stems=stems,
        family=layouts.family,
        ignored=alignment.ignored,
        warnings=alignment.warnings,
        notes=(
            *part_notes(base),
            *agreed.notes,
            *alignment.notes,
            *chooser.unused_entries(),
            *_storage_notes(recipe, base, experts),
            *_adapter_notes(recipe.labels, experts, items),
            *trained_on_codes_notes(recipe, base, experts),
            *named_base_notes(recipe, base, experts),
        ),
        configs=agreed.configs,
    )


def _kept(base: Checkpoint, chooser: Chooser) -> dict[str, str]:
    """Tensors that the recipe keeps -> reason."""
    hits = {name: chooser.keeps(name) for name in base.specs}
    return {name: f"kept from the base by the recipe ('{hit}')" for name, hit in hits.items() if hit is not None}


def _agreed(recipe: Recipe, base: Checkpoint, experts: Sequence[Expert], kept: Collection[str]) -> InputAgreement:
    """Comparison of the inputs beside their weights."""
    return compare_inputs(
        base,
        list(zip(recipe.labels, experts, strict=True)),
        kept,
        config_from=recipe.model.config_from,
        files_from=recipe.model.files_of,
        has_vocabulary=recipe.model.vocabulary is not None,
        is_model=not isinstance(recipe.output, ExtractedOutput),
    )


def _recipe_problems(
    recipe: Recipe, base: Checkpoint, experts: Sequence[Expert], alignment: Alignment, chooser: Chooser
) -> Iterator[str]:
    """Reasons why a recipe does not fit these inputs."""
    yield from _lost_heads(recipe, base, experts, alignment, chooser)
    yield from _space_problems(recipe, experts, chooser)
    names = [*base.specs, *(n for of_expert in alignment.ignored for n in of_expert)]
    yield from (f"the pattern '{p}' matches no tensor of the base" for p in chooser.unused_patterns(names))


def _lost_heads(
    recipe: Recipe, base: Checkpoint, experts: Sequence[Expert], alignment: Alignment, chooser: Chooser
) -> Iterator[str]:
    """Problems of adapters that trained tensors in full that the base does not have, unless the recipe keeps it so."""
    for label, expert, extra in zip(recipe.labels, experts, alignment.ignored, strict=True):
        lost = [n for n in extra if chooser.keeps(n) is None] if expert.needs_base else []
        lost = [n for n in lost if tied_partner(n, base.specs, base.config) is None]  # else it is merged by that name
        if lost:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            shape = "x".join(map(str, expert.specs[lost[0]].shape))
            yield (
                f"expert '{label}' ({expert.location}) trained '{lost[0]}' {shape}{more} in full, which the base does "
                "not have: this training would be lost. Likely cause: an adapter of a model with another head. Fix: "
                "give a base with this head (load the base with the class that the adapter was trained on, such as "
                f"AutoModelForSequenceClassification, and save_pretrained), or leave it out (--keep '{lost[0]}')"
            )


def _input_problems(recipe: Recipe, base: Checkpoint, experts: Sequence[Expert]) -> list[str]:
    """Problems of inputs: signs of codes instead of weights, or no tensors."""
    inputs: list[tuple[str, Checkpoint | Expert]] = [
        ("base", base),
        *((f"expert '{n}'", e) for n, e in zip(recipe.labels, experts, strict=True)),
    ]
    problems = []
    for label, checkpoint in inputs:
        problems += [f"{label}: {p}" for p in quantization_problems(checkpoint.specs, checkpoint.config)]
        if not checkpoint.specs:
            problems.append(f"{label} ({checkpoint.location}) holds no tensors")
    return problems


def _decide(spec: TensorSpec, layout: TensorLayout, chooser: Chooser, kept: Mapping[str, str]) -> Decision:
    if spec.name in kept:
        return Decision("copy", kept[spec.name], layout)
    if layout.role is Role.BUFFER or not spec.is_floating:
        return Decision("copy", f"{layout.reason}: copied from the base", layout)
    if not spec.numel:
        return Decision("copy", "no entries: nothing to merge", layout)
    return chooser.decide(spec, layout)


def _of_touched(
    name: str, decision: Decision, sources: Sequence[DeltaSource | None], chooser: Chooser, *, only_adapters: bool
) -> Decision:
    """A copy if no expert changes the tensor; among adapters, an average over those that train it.

    A copy computes nothing and rounds nothing. An adapter without a delta for a tensor has no vote on it; a full
    checkpoint with the base's values has one, so that with such an expert all count.
    """
    if decision.call is None or any(s is None for s in sources):
        return decision
    if not sources:
        return Decision("copy", "no experts: copied from the base", decision.layout)
    touched = [s is not None and s.kind != "zero" for s in sources]
    if not any(touched) and not get_method(decision.call.method).moves_base(decision.call.options):
        return Decision("copy", "no adapter changes it: copied from the base", decision.layout)
    if decision.action == "average" and only_adapters and not all(touched):
        return chooser.average_over(name, decision, touched)
    return decision


@dataclass
class _TensorPlanner:
    """Makes the items, with their costs."""

    recipe: Recipe
    base: Checkpoint
    experts: Sequence[Expert]
    room: DeviceRoom

    def __post_init__(self) -> None:
        self._places: dict[Any, Placed] = {}
        self._counted: dict[Any, int] = {}

    def items(
        self, alignment: Alignment, decided: Mapping[str, Decision], given: Mapping[str, Sequence[DeltaSource | None]]
    ) -> tuple[Item, ...]:
        """One item per tensor, each followed by those tied to it."""
        depth: dict[str, float] = {}
        if self.recipe.postprocess.lines is not None:
            merged = [n for n, d in decided.items() if d.action == "merge"]
            depth = depth_factors(merged, *self.recipe.postprocess.lines)
        out: list[Item] = []
        for name, aliases in alignment.canonical.items():
            decision = decided[name]
            if decision.call is not None and name in depth:
                decision = decision.scaled(depth[name])
            twins = alignment.twins[name] if decision.call is not None else ()
            sources = tuple(s for s in given[name] if s is not None) if decision.call is not None else ()
            out.append(self._item((name, *aliases), decision, sources, twins))
            out.extend(self._tie(alias, name, decision) for alias in aliases)
        return tuple(out)

    def out_spec(self, spec: TensorSpec) -> TensorSpec:
        """Spec of the output for a tensor of the base."""
        dtype = self.recipe.dtype if self.recipe.dtype is not None and spec.is_floating else spec.dtype
        return TensorSpec(spec.name, spec.shape, dtype, "")

    def _item(
        self,
        names: tuple[str, ...],
        decision: Decision,
        sources: tuple[DeltaSource, ...],
        twins: tuple[tuple[str, ...], ...],
    ) -> Item:
        """Item of a tensor and of those tied to it."""
        spec, call, reason = self.base.specs[names[0]], decision.call, decision.reason
        if call is not None:
            stored = [n for n, s in zip(self.recipe.labels, sources, strict=True) if s.kind == "stored"]
            call, words = in_space(call, stored)
            reason += words
        form: Form = "dense"
        if call is not None and self._is_factored(call, sources):
            form, reason = "factored", f"{reason}, in factored form"
        reason += scheme_words(spec.name, self.base, sources, self.experts, self.recipe.labels)
        outputs = tuple(self.out_spec(self.base.specs[n]) for n in names)
        item = Item(
            name=names[0],
            shape=spec.shape,
            layout=decision.layout,
            action=decision.action,
            reason=reason,
            outputs=outputs,
            call=call,
            obeys_scale=decision.action == "merge",
            form=form,
            base_dtype=spec.dtype,
            sources=sources,
            twins=twins,
        )
        placed = self.place(item)
        cost = ItemCost(
            read_bytes=self.base.stored_bytes(spec.name) + sum(s.nbytes for s in sources),
            write_bytes=sum(o.nbytes for o in outputs),
            flops=self.flops(item),
            host_bytes=placed.host_bytes,
            device_bytes=placed.device_bytes,
        )
        return dataclasses.replace(
            item, cost=cost, reason=item.reason + placed.words, kernel=placed.kernel, reading=placed.reading
        )

    def _tie(self, alias: str, name: str, decision: Decision) -> Item:
        spec = self.base.specs[alias]
        return Item(
            name=alias,
            shape=spec.shape,
            layout=decision.layout,
            action="tie",
            reason=f"tied to {name}: merged once, the same bytes",
            outputs=(self.out_spec(spec),),
            base_dtype=spec.dtype,
            tied_to=name,
        )

    def _is_factored(self, call: MethodCall, sources: Sequence[DeltaSource]) -> bool:
        """True if a matrix method can work on factors: no expert stores the whole tensor."""
        if call.space != "full":
            return True
        method = get_method(call.method)
        if method.acts_on != "matrix":
            return False
        if method.survey is not None and method.survey.applies(call.options):
            return False  # the survey of a full model sees dense deltas, and both must see the same
        return all(s.kind == "zero" or s.rank for s in sources) and not method.why_dense(
            call.options, len(sources), call.weights
        )

    def flops(self, item: Item) -> int:
        """Operations of the method on an item."""
        if item.call is None:
            return 0
        call = item.call
        named = (call.method, str(call.options), call.space, str(call.post))
        key = (named, item.shape, item.layout, len(item.sources), self._ranks(item))
        if key not in self._counted:
            self._counted[key] = total(item_operations(item, self.recipe.compute_dtype))
        return self._counted[key]

    def place(self, item: Item) -> Placed:
        """Place of an item with its kernel and reading, and its memory there."""
        if item.call is None:
            return Placed(item.numel * torch_dtype(item.base_dtype).itemsize)
        # the options live as long as the decisions, which outlive this planner
        named = (item.call.method, id(item.call.options), item.call.space, bool(item.call.post))
        key = (named, item.shape, item.base_dtype, item.layout, item.is_chunkable, self._ranks(item))
        if key not in self._places:
            call = CallShape(
                method=get_method(item.call.method),
                options=item.call.options,
                n_experts=len(self.experts),
                base_itemsize=torch_dtype(item.base_dtype).itemsize,
                compute_dtype=self.recipe.compute_dtype,
                caps=self.recipe.postprocess,
                post=bool(item.call.post),
            )
            self._places[key] = place(item, call, self.room)
        return self._places[key]

    def _ranks(self, item: Item) -> tuple[int, ...]:
        """Ranks of the deltas of an item that is merged by its factors."""
        return tuple(s.rank for s in item.sources if s is not None) if item.form == "factored" else ()


def _space_problems(recipe: Recipe, experts: Sequence[Expert], chooser: Chooser) -> list[str]:
    labeled = list(zip(recipe.labels, experts, strict=True))
    return [
        *space_input_problems(recipe, [label for label, e in labeled if e.adapter is None]),
        *factor_problems(recipe, [(label, e.adapter) for label, e in labeled if e.adapter is not None]),
    ]


def _storage_notes(recipe: Recipe, base: Checkpoint, experts: Sequence[Expert]) -> list[str]:
    """Notes about inputs that are stored in other forms than the base, or as codes."""

    def dtypes(specs: Mapping[str, TensorSpec]) -> str:
        return ", ".join(sorted({s.dtype for s in specs.values() if s.is_floating}))

    mine = dtypes(base.specs)
    return [
        f"expert '{label}' is stored in {dtypes(e.specs)}, the base in {mine}: the delta of a coarser copy is part "
        "rounding"
        for label, e in zip(recipe.labels, experts, strict=True)
        if dtypes(e.specs) != mine
    ] + quantization_notes(recipe, base, experts)


def _adapter_problems(recipe: Recipe, experts: Sequence[Expert]) -> list[str]:
    pairs = [(e, x.adapter) for e, x in zip(recipe.experts, experts, strict=True) if x.adapter is not None]
    chosen = recipe.model_copy(update={"experts": tuple(e for e, _ in pairs)})
    return adapter_problems(chosen, [a for _, a in pairs]) if pairs else []


def _adapter_notes(labels: Sequence[str], experts: Sequence[Expert], items: Sequence[Item]) -> list[str]:
    """Notes about the adapters among the experts."""
    alike: dict[int, list[str]] = {}
    for t, (label, expert) in enumerate(zip(labels, experts, strict=True)):
        if not expert.needs_base:
            continue
        changed = sum(
            any(expert.source(n).kind != "zero" for n in _names(item, t) if n in expert.specs) for item in items
        )
        alike.setdefault(changed, []).append(f"'{label}'")
    return [
        f"expert {who[0]} is an adapter: it changes {changed} tensors, the rest are zero deltas"
        if len(who) == 1
        else f"experts {', '.join(who)} are adapters: each changes {changed} tensors, the rest are zero deltas"
        for changed, who in alike.items()
    ]


def _names(item: Item, t: int) -> set[str]:
    own = item.sources[t] if item.sources else None
    return {item.name} | ({own.name} if own is not None else set())
