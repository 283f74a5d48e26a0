"""The planner: recipe + headers -> plan. Reads no tensor; finds all problems at once; linear in the tensors.

    targets -> decisions -> items -> writes -> costs

Targets are the tensors that a base stores, or those that adapters imply.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.layer_names import stack_parts
from actmat.checkpoints.model import Model
from actmat.checkpoints.resolve import commit_of
from actmat.checkpoints.writing.shards import parse_size
from actmat.errors import AlignmentError, CheckpointError, RecipeError
from actmat.experts.deltas import Deltas
from actmat.experts.lora.adapter import Adapter, widest
from actmat.experts.lora.modules import AdapterLayout
from actmat.identity.agreement import OutputChoice, agree
from actmat.identity.configs import InputAgreement
from actmat.layout.types import LayoutMap, Role
from actmat.methods import METHODS, get_method
from actmat.methods.spaces import space_words
from actmat.methods.user import method_version
from actmat.planning.choose import Chooser, Decision, weight_problems
from actmat.planning.full_tensors import mean_items, problems_of_full_tensors
from actmat.planning.implied import (
    adapter_problems,
    implied_targets,
    labeled_adapters,
    output_layout,
    packing_problems,
    stack_problems,
    with_blocks,
)
from actmat.planning.item import Item, MethodCall, Reading, Target, Write
from actmat.planning.model import InputSummary, MergePlan
from actmat.planning.module_names import in_one_form
from actmat.planning.notes import adapter_notes, all_notes
from actmat.planning.problems import (
    base_problems,
    buffer_problems,
    check,
    factor_output_problems,
    idle_problems,
    input_problems,
)
from actmat.planning.regions import cut
from actmat.planning.statistics import ExpertStatistics, uses_statistics, with_module_names, with_statistics
from actmat.planning.storage import files_left_out, left_out_note, merged_metadata, output_dtypes, stems_of
from actmat.planning.targets import resolve_roles, targets_of
from actmat.planning.work import HOST, Costs, DeviceRoom, module_region, works_on_factors
from actmat.planning.writes import (
    ONE_FILE,
    STEMS,
    extracted_config,
    output_config,
    write_extracted,
    write_modules,
)
from actmat.recipe import Recipe
from actmat.recipe.output import ExtractedOutput
from actmat.version import __version__

ADAPTERS_ON_HOST = "adapters are merged on the host, not on a device: their factors are small"


@dataclass(frozen=True)
class _Scope:
    """Everything that the headers of the inputs say, before the recipe decides.

    Args:
        targets: tensors to be made.
        layouts: of the tensors that a model stores.
        copied: targets that are copied from the base -> reason.
        kept: tensors without a delta in an adapter -> the recipe's pattern that keeps them.
        agreed: configs and files of the inputs.
        ignored: per expert, its tensors that the base does not have and no training changes.
        adapters: experts of an output without a base, with names of one form; `dtype`, `form`: of that output.
        whole: items of tensors that they trained in full.
    """

    targets: Sequence[Target]
    layouts: LayoutMap
    agreed: InputAgreement
    problems: Sequence[str]
    notes: Sequence[str]
    copied: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    ignored: Sequence[tuple[str, ...]] = ()
    adapters: Sequence[Adapter] = ()
    form: AdapterLayout = "peft"
    dtype: str = ""
    whole: Sequence[Item] = ()


@dataclass(frozen=True)
class _Written:
    """Items with their outputs, and the files that hold these."""

    items: Sequence[Item]
    specs: Sequence[TensorSpec]
    stems: Mapping[str, str]
    max_shard_bytes: int = ONE_FILE
    config: Mapping[str, Any] | None = None
    notes: Sequence[str] = ()


def build_plan(
    recipe: Recipe,
    base: Model | None,
    experts: Sequence[Deltas],
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
        RecipeError: a method, option or step is unknown; carries all problems, those of the inputs among them.
        AlignmentError: the inputs do not fit together or the recipe does not fit them; carries all problems.
    """
    statistics = statistics or ExpertStatistics.none(recipe.labels)
    chooser = Chooser(recipe, statistics.kinds)
    if base is None:
        scope = _scope_of_adapters(recipe, experts, base_config, statistics, chooser)
    else:
        scope = _scope_of_base(recipe, base, experts, statistics, chooser)
    problems: list[str] = []
    decided = [_decide(target, scope, chooser, statistics, problems, experts) for target in scope.targets]
    calls = {t.name: d.call for t, d in decided} | {i.name: i.call for i in scope.whole}
    problems = [*scope.agreed.problems, *scope.problems, *problems, *chooser.problems, *weight_problems(calls)]
    if base is None:
        known = [*(t.spec.name for t in scope.targets), *scope.kept, *(n for a in scope.adapters for n in a.extras)]
        problems += factor_output_problems(recipe, scope.adapters, calls, known, chooser)
    merged = [*(t for t, d in decided if d.call is not None), *(i.target for i in scope.whole)]
    problems = problems or list(idle_problems(recipe.labels, merged))
    check(problems, RecipeError if chooser.problems else AlignmentError)
    written = _write(recipe, base, _items(recipe, decided), scope, chooser)
    is_extracted = base is not None and isinstance(recipe.output, ExtractedOutput)
    costs = Costs(recipe, base, HOST if is_extracted else room)
    items = tuple(map(costs.add, [*written.items, *scope.whole]))
    check(weight_problems({f"{i.name}.bias": i.write.bias for i in items}))
    return _plan(recipe, base, experts, scope, dataclasses.replace(written, items=items), statistics, costs.room)


def _scope_of_base(
    recipe: Recipe, base: Model, experts: Sequence[Deltas], statistics: ExpertStatistics, chooser: Chooser
) -> _Scope:
    """Tensors of a base, and their counterparts."""
    check(input_problems(recipe, base, experts))  # codes of a quantizer have other shapes and names, too
    layouts, of_roles = resolve_roles(recipe, base.specs, base.config)
    chooser.names = base.specs
    hits = {name: hit for name in base.specs if (hit := chooser.keeps(name)) is not None}
    kept = {name: f"kept from the base by the recipe ('{hit}')" for name, hit in hits.items()}
    aligned = targets_of(base, experts, recipe.labels, layouts, kept)
    copied = {**aligned.absent, **kept}
    written = OutputChoice(
        "adapter" if isinstance(recipe.output, ExtractedOutput) else "model",
        recipe.model.config_from,
        recipe.model.files_of if recipe.model.names_files else None,
        copied,
        recipe.model.vocabulary is not None,
    )
    agreed = agree([("base", base), *zip(recipe.labels, experts, strict=True)], written)
    problems = [
        *adapter_problems(recipe, labeled_adapters(recipe, experts)),
        *statistics.kind_problems([e.needs_base for e in experts]),
        *of_roles,
        *aligned.problems,
        *buffer_problems(base, experts, recipe.labels, [t for t in aligned.targets if t.name not in copied]),
        *base_problems(recipe, base, experts, chooser),
    ]
    return _Scope(
        aligned.targets,
        layouts,
        agreed,
        problems,
        notes=(*aligned.notes, *chooser.unused_entries()),
        copied=copied,
        kept=hits if isinstance(recipe.output, ExtractedOutput) else {},
        ignored=aligned.ignored,
    )


def _scope_of_adapters(
    recipe: Recipe,
    experts: Sequence[Deltas],
    base_config: Mapping[str, Any] | None,
    statistics: ExpertStatistics,
    chooser: Chooser,
) -> _Scope:
    """Modules of adapters without a base, and tensors that they trained in full.

    Raises:
        AlignmentError: some experts are no adapters.
    """
    stored = [e.adapter for e in experts if e.adapter is not None]
    if len(stored) < len(experts):
        raise AlignmentError("An adapter is merged from adapters: give a base to write a full model.")
    agreed = agree(list(zip(recipe.labels, experts, strict=True)), OutputChoice("adapter"))
    adapters, of_names, name_notes = in_one_form(recipe.labels, stored)
    kept: dict[str, str] = {}
    targets, layouts, of_modules = implied_targets(recipe, adapters, base_config, chooser, kept)
    chooser.names = [t.spec.name for t in targets]
    dtype = recipe.dtype or widest([a.dtype for a in adapters])
    whole, of_whole, whole_notes = mean_items(recipe, adapters, chooser, kept, dtype)
    problems = [
        *adapter_problems(recipe, labeled_adapters(recipe, experts)),
        *of_names,
        *stack_problems(recipe.labels, adapters),
        *packing_problems(list(zip(recipe.labels, adapters, strict=True))),
        *statistics.kind_problems([True] * len(adapters)),
        *of_modules,
        *of_whole,
        *problems_of_full_tensors(recipe, adapters, kept),
    ]
    if kept and not targets and not whole:
        problems.append("'keep' leaves nothing to merge: every module of the adapters matches")
    return _Scope(
        targets,
        layouts,
        agreed,
        problems,
        notes=(*name_notes, *whole_notes),
        kept=kept,
        adapters=adapters,
        form=output_layout(recipe, adapters),
        dtype=dtype,
        whole=whole,
    )


def _decide(
    target: Target,
    scope: _Scope,
    chooser: Chooser,
    statistics: ExpertStatistics,
    problems: list[str],
    experts: Sequence[Deltas],
) -> tuple[Target, Decision]:
    """The action and method of a target; `problems` receives those of its statistics."""
    spec, layout = target.spec, target.layout
    if spec.name in scope.copied:
        return target, Decision("copy", scope.copied[spec.name], layout)
    if target.module is None and (layout.role is Role.BUFFER or not spec.is_floating):
        return target, Decision("copy", f"{layout.reason}: copied from the base", layout)
    if not spec.numel:
        return target, Decision("copy", "no entries: nothing to merge", layout)
    decision = chooser.decide(spec, layout)
    target = with_blocks(target, decision.layout)
    if uses_statistics(decision, statistics):
        assert decision.call is not None
        if target.module is not None:
            target = with_module_names(target, statistics)
            regions = [module_region(target)]
        else:
            regions = cut(spec.shape, target.layout, get_method(decision.call.method).acts_on)
        decision = with_statistics(decision, target, regions, statistics, chooser, problems)
        if decision.action == "average":
            target = dataclasses.replace(target, measured=())
    return target, _of_touched(target, decision, chooser, experts)


def _of_touched(target: Target, decision: Decision, chooser: Chooser, experts: Sequence[Deltas]) -> Decision:
    """A copy if no expert changes the target; among adapters, an average over those that train it.

    A copy computes nothing and rounds nothing. An adapter without a delta for a tensor has no vote on it; a full
    checkpoint with the base's values has one, so that with such an expert all count.
    """
    sources = target.sources
    if decision.call is None or (target.module is None and any(s is None for s in sources)):
        return decision
    if not sources:
        return Decision("copy", "no experts: copied from the base", decision.layout)
    touched = [s is not None and s.kind != "zero" for s in sources]
    if not any(touched) and not get_method(decision.call.method).moves_base(decision.call.options):
        return Decision("copy", "no adapter changes it: copied from the base", decision.layout)
    if decision.action == "average" and not all(touched) and all(e.needs_base for e in experts):
        return chooser.average_over(target.spec.name, decision, touched)
    return decision


def _items(recipe: Recipe, decided: Sequence[tuple[Target, Decision]]) -> list[Item]:
    """One item per target, each followed by those tied to it; not written yet."""
    out: list[Item] = []
    for target, decision in decided:
        out.append(_item(recipe, target, decision))
        for alias in target.tied:
            spec = dataclasses.replace(target.spec, name=alias)
            tie = Target(spec, decision.layout, tied=(target.name,))
            out.append(Item(tie, "tie", f"tied to {target.name}: merged once, the same bytes", Write("nothing")))
    return out


def _item(recipe: Recipe, target: Target, decision: Decision) -> Item:
    """The item of a target without its outputs and cost."""
    call, reason, reading = decision.call, decision.reason, None
    target = dataclasses.replace(target, layout=decision.layout)
    if call is None:
        target = dataclasses.replace(target, sources=(), twins=())
    else:
        pairs = zip(recipe.labels, target.sources, strict=True)
        call, words = _in_space(call, [label for label, s in pairs if s is not None and s.kind == "stored"])
        reason += words
        is_module = target.module is not None
        if works_on_factors(call, target):
            reading, reason = Reading("factors", batched=is_module), f"{reason}, in factored form"
        elif is_module:
            why = get_method(call.method).why_dense(call.options, len(recipe.experts), call.weights)
            reading, reason = Reading("held", batched=True), f"{reason}; on dense deltas: {why}"
    return Item(target, decision.action, reason, Write("sum"), call, reading)


def _in_space(call: MethodCall, stored: Sequence[str]) -> tuple[MethodCall, str]:
    """The call in its space, or in the full one if experts store the tensor whole; and the words for the plan.

    Args:
        stored: names of the experts that store it.
    """
    words = ""
    if call.space != "full" and stored:
        words = f", in the full space: trained in full in {', '.join(stored)}"
        call = dataclasses.replace(call, space="full")
    words += space_words(call.space, get_method(call.method), call.options)
    return call, words + (f", then {', '.join(p.name for p in call.post)}" if call.post else "")


def _write(recipe: Recipe, base: Model | None, items: Sequence[Item], scope: _Scope, chooser: Chooser) -> _Written:
    """The items as they are written, and their files."""
    if base is None:
        modules = write_modules(recipe, items, scope.adapters, scope.form, scope.dtype, chooser)
        written = [*modules, *scope.whole]
        stem, config = STEMS[scope.form], None
        if stem == STEMS["peft"]:
            config = output_config(recipe, scope.adapters, modules, scope.whole)
        notes = adapter_notes(recipe, scope.adapters, modules)
        specs = [s for item in written for s in item.outputs]
        return _Written(modules, specs, {"": stem}, config=config, notes=notes)
    dtypes, of_dtypes = output_dtypes(recipe, base)
    if isinstance(recipe.output, ExtractedOutput):
        extracted, notes = write_extracted(recipe, base, items, scope.layouts, dtypes)
        specs = [s for item in extracted for s in item.outputs]
        config = extracted_config(recipe, extracted)
        return _Written(extracted, specs, {"": STEMS["peft"]}, config=config, notes=[*notes, *of_dtypes])
    specs = [TensorSpec(n, spec.shape, dtypes[n], "") for n, spec in base.specs.items()]
    by_name = {spec.name: spec for spec in specs}
    whole, most = [_written_whole(item, by_name) for item in items], parse_size(recipe.max_shard_size)
    return _Written(whole, specs, stems_of(base), most, notes=of_dtypes)


def _written_whole(item: Item, specs: Mapping[str, TensorSpec]) -> Item:
    """A tensor of a model, written with those tied to it; ties are written by their tensor."""
    names = (item.name,) if item.action == "tie" else (item.name, *item.target.tied)
    write = Write("nothing" if item.action == "tie" else "sum", tuple(specs[n] for n in names))
    return dataclasses.replace(item, write=write)


def _plan(
    recipe: Recipe,
    base: Model | None,
    experts: Sequence[Deltas],
    scope: _Scope,
    written: _Written,
    statistics: ExpertStatistics,
    room: DeviceRoom,
) -> MergePlan:
    """The plan of items that are written and costed."""
    items = tuple(written.items)
    is_model = base is not None and not isinstance(recipe.output, ExtractedOutput)
    left_out = files_left_out(recipe, base, experts) if is_model else {}
    metadata, texts = merged_metadata(base, experts, recipe.labels) if is_model and base is not None else ({}, [])
    decisions = [
        *scope.agreed.notes,
        *scope.notes,
        *written.notes,
        *texts,
        *statistics.notes_on(items),
        *left_out_note(left_out),
    ]
    decisions += (ADAPTERS_ON_HOST,) * (base is None and room.device != "cpu")
    ignored = scope.ignored or ((),) * len(experts)
    return MergePlan(
        recipe=recipe,
        output="model" if is_model else "adapter",
        base=None if base is None else _summary("base", base, "model"),
        experts=tuple(
            _summary(n, e.model, "adapter" if e.needs_base else "model", i)
            for n, e, i in zip(recipe.labels, experts, ignored, strict=True)
        ),
        items=items,
        specs=tuple(written.specs),
        max_shard_bytes=written.max_shard_bytes,
        stems=written.stems,
        family=scope.layouts.family if base is not None else None,
        metadata=metadata,
        adapter_config=written.config,
        kept=scope.kept,
        notes=all_notes(recipe, base, experts, items, decisions, scope.agreed.warnings),
        configs=scope.agreed.configs if is_model else {},
        files=scope.agreed.files if is_model or written.config is not None else {},
        left_out={path: why.text for path, why in left_out.items()},
        device=room.device,
        device_memory=room.memory,
        versions=versions_of(items),
        statistics=tuple(statistics.to_json()),
    )


def versions_of(items: Sequence[Item]) -> dict[str, str]:
    """Versions of the software on this machine that determines the output, and of methods from elsewhere."""
    others = {i.call.method for i in items if i.call is not None} - {m.name for m in METHODS}
    versions = {"actmat": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return versions | {name: version for name in sorted(others) if (version := method_version(name)) is not None}


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
