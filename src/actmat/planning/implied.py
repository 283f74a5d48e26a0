"""Targets that adapters imply where no base is given: a module each, and the problems of their combination."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from actmat.checkpoints.base import TensorSpec
from actmat.experts.deltas import Deltas, DeltaSource
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.apart import names_of_packed
from actmat.experts.lora.fields import AXES
from actmat.experts.lora.modules import AdapterLayout, AdapterModule
from actmat.experts.lora.stacks import HOW_TO_SAY, release_of
from actmat.layout.types import Block, LayoutMap, Orientation, TensorLayout
from actmat.planning.choose import Chooser
from actmat.planning.item import ModuleForm, Target
from actmat.planning.targets import resolve_roles
from actmat.recipe import Recipe


def implied_targets(
    recipe: Recipe,
    adapters: Sequence[Adapter],
    base_config: Mapping[str, Any] | None,
    chooser: Chooser,
    kept: dict[str, str],
) -> tuple[list[Target], LayoutMap, list[str]]:
    """Targets of the modules of all adapters, in the order of their first occurrence; layouts; problems.

    Args:
        adapters: with names of one form.
        base_config: `config.json` of their base, if known; it identifies packed projections.
        chooser: of the recipe; modules that it keeps go to `kept`.
    """
    problems: list[str] = []
    rows: dict[str, tuple[AdapterModule | None, ...]] = {}
    specs: dict[str, TensorSpec] = {}
    owners: dict[str, str] = {}
    for name in {name: None for a in adapters for name in a.modules}:
        modules = tuple(a.modules.get(name) for a in adapters)
        problems += _module_problems(name, modules)
        spec = stored_spec(name, modules, adapters)
        if (pattern := chooser.keeps(spec.name)) is not None:
            kept[spec.name] = pattern
            continue
        if (other := owners.setdefault(spec.name, name)) != name:
            problems.append(f"modules '{other}' and '{name}' of the adapters both change '{spec.name}'")
        rows[name], specs[name] = modules, spec
    layouts, turned, role_problems = _orient_stacks(recipe, rows, specs, adapters, base_config)
    targets = []
    for name, modules in rows.items():
        first, spec = _first(modules), specs[name]
        form = ModuleForm(
            name=name,
            kind=first.kind,
            shape=spec.shape if name in turned else first.shape,
            ranks=tuple(0 if m is None else m.rank for m in modules),
            transposed=is_transposed(modules, adapters),
            turned=name in turned,
            kernel=first.kernel,
        )
        sources = tuple(None if m is None else _source(a, m) for a, m in zip(adapters, modules, strict=True))
        targets.append(Target(spec, layouts.tensors[spec.name], sources=sources, module=form))
    return targets, layouts, [*problems, *role_problems]


def _module_problems(name: str, modules: Sequence[AdapterModule | None]) -> list[str]:
    """Reasons why the modules of this name cannot be merged with each other."""
    problems = []
    having = [m for m in modules if m is not None]
    shapes = {m.shape: None for m in having}
    if len(shapes) > 1:
        problems.append(
            f"module '{name}' has deltas of shapes {shapes_text(shapes)}; are the adapters of one base, and their "
            "stacked experts written by versions of PEFT that agree on the axes?"
        )
    parameters = {m.parameters for m in having}
    if len(shapes) == 1 and not set.intersection(*(set(p) for p in parameters)) and any(parameters):
        named = " and ".join(" or ".join(p) or "the layer" for p in sorted(parameters))
        problems.append(f"module '{name}' adapts {named}: wrappers of other nests. Write a full model (--base ...)")
    return problems


def _orient_stacks(
    recipe: Recipe,
    rows: Mapping[str, Sequence[AdapterModule | None]],
    specs: dict[str, TensorSpec],
    adapters: Sequence[Adapter],
    config: Mapping[str, Any] | None,
) -> tuple[LayoutMap, frozenset[str], list[str]]:
    """Layouts of the implied tensors, names of the modules whose `B A` is `I O`, and problems.

    The specs of such modules are turned.
    """

    def resolve(of: Mapping[str, TensorSpec]) -> tuple[LayoutMap, list[str]]:
        return resolve_roles(recipe, {s.name: s for s in of.values()}, config)

    layouts, problems = resolve(specs)
    stacks = {name: specs[name] for name, modules in rows.items() if _first(modules).is_stack}
    if not stacks:
        return layouts, frozenset(), problems
    mirrored, _ = resolve(specs | {name: _transposed(spec) for name, spec in stacks.items()})
    turned = set()
    for name, spec in stacks.items():
        now, then = (of.tensors[spec.name].orientation for of in (layouts, mirrored))
        if is_turned(now, then, adapters):
            specs[name] = _transposed(spec)
            turned.add(name)
    layouts, problems = resolve(specs)
    return layouts, frozenset(turned), problems


def _transposed(spec: TensorSpec) -> TensorSpec:
    experts, rows, columns = spec.shape
    return dataclasses.replace(spec, shape=(experts, columns, rows))


def with_blocks(target: Target, layout: TensorLayout) -> Target:
    """A target with the layout that its method is given; of a module, with the rows of packed maps in its delta."""
    target = dataclasses.replace(target, layout=layout)
    if (form := target.module) is None:
        return target
    rows = sum((b.stop - b.start) * b.groups for b in layout.blocks)
    covers = rows == form.shape[-2] and form.kind in ("linear", "parameter")
    blocks: tuple[Block, ...] = layout.blocks if covers else ()
    return dataclasses.replace(target, module=dataclasses.replace(form, blocks=blocks))


def _first(modules: Sequence[AdapterModule | None]) -> AdapterModule:
    return next(m for m in modules if m is not None)


def _source(adapter: Adapter, module: AdapterModule) -> DeltaSource:
    stored = [adapter.weights.specs[n] for n in (module.a, module.b, module.bias) if n is not None]
    return DeltaSource(module.name, "formed", stored[0].dtype, sum(s.nbytes for s in stored), module.rank)


def _tensor_name(name: str, modules: Sequence[AdapterModule | None]) -> str:
    """Name of the tensor that a module's delta belongs to, as the model has it."""
    plain = name.replace(".base_layer", "")
    module = next((m for m in modules if m is not None and m.kind == "parameter"), None)
    if module is None:
        return f"{plain}.weight"
    nest = module.name[len(module.name.replace(".base_layer", "")) :].lstrip(".")  # of a parameter without a name
    return f"{plain}.{module.parameters[0] if len(module.parameters) == 1 else nest or 'weight'}"


def is_transposed(modules: Sequence[AdapterModule | None], adapters: Sequence[Adapter]) -> bool:
    """True if the base stores the tensor of a module as `I O` (GPT-2's `Conv1D`)."""
    adapter, module = next((a, m) for a, m in zip(adapters, modules, strict=True) if m is not None)
    return module.kind == "linear" and adapter.config.fan_in_fan_out


def stored_spec(name: str, modules: Sequence[AdapterModule | None], adapters: Sequence[Adapter]) -> TensorSpec:
    """The base's tensor as the adapters imply it: its shape, transposed for Conv1D, opened up for convolutions."""
    adapter, module = next((a, m) for a, m in zip(adapters, modules, strict=True) if m is not None)
    shape = module.shape
    if is_transposed(modules, adapters):
        shape = (shape[1], shape[0])
    elif module.kind == "convolution":
        shape = (shape[0], *module.kernel)
    return TensorSpec(_tensor_name(name, modules), shape, adapter.dtype, "")


def stack_problems(labels: Sequence[str], adapters: Sequence[Adapter]) -> list[str]:
    """Stacked experts whose factors may have other axes in one adapter than in another, without a base to decide."""
    having = [(label, a) for label, a in zip(labels, adapters, strict=True) if list_stacks(a)]
    if len({stack_axes(a) for _, a in having}) < 2:
        return []
    shapes = [{(m.name, m.shape) for m in list_stacks(a) if m.shape[-1] != m.shape[-2]} for _, a in having]
    if set.intersection(*shapes):
        return []  # A is as wide in all of them, so that it reads the same axis
    listed = ", ".join(f"{label}: {stack_axes(a)}" for label, a in having)
    return [
        f"stacked experts may be stored with other axes in one adapter than in another ({listed}), and no stack that "
        "is not square tells. Write a full model (--base ..., --to model), or " + HOW_TO_SAY.format("e_i_o|e_o_i")
    ]


def list_stacks(adapter: Adapter) -> list[AdapterModule]:
    """Modules of stacked experts."""
    return [m for m in adapter.modules.values() if m.is_stack]


def stack_axes(adapter: Adapter) -> str:
    """Axes of stacks as stated, else the versions of PEFT that write them alike."""
    said, release = adapter.config.said(AXES), release_of(adapter.config.version)
    if said is not None or release is None:
        return said or f"peft_version {adapter.config.version or 'not given'}"
    swapped = "PEFT 0.19.1 or later" if release > (0, 19, 0) else "PEFT 0.19.0"
    return "e_i_o" if release < (0, 19, 0) else swapped


def is_turned(now: Orientation, mirrored: Orientation, adapters: Sequence[Adapter]) -> bool:
    """True if `B A` of a stack is `I O`, from the orientations that its shape and the transposed one suggest.

    Where shapes leave it open, the orientations are that of the base, or of most families, and the version decides.
    """
    if now != mirrored:
        return now == "IO"
    return now == "OI" and any(stack_axes(a) == "e_i_o" for a in adapters if list_stacks(a))


def labeled_adapters(recipe: Recipe, experts: Sequence[Deltas]) -> list[tuple[str, Adapter]]:
    """The adapters among the experts, with their names."""
    pairs = zip(recipe.labels, experts, strict=True)
    return [(label, expert.adapter) for label, expert in pairs if expert.adapter is not None]


def adapter_problems(recipe: Recipe, pairs: Sequence[tuple[str, Adapter]]) -> list[str]:
    """Problems of the adapters themselves, and of their combination."""
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


def packing_problems(pairs: Sequence[tuple[str, Adapter]]) -> list[str]:
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


def shapes_text(shapes: Iterable[tuple[int, ...]]) -> str:
    """Shapes as a reader writes them: `4x8 and 4x16`."""
    return " and ".join("x".join(map(str, s)) for s in shapes)


IN_ONE_FILE = frozenset({"kohya", "diffusers", "comfy"})
"""Layouts of files without a config."""


def output_layout(recipe: Recipe, adapters: Sequence[Adapter]) -> AdapterLayout:
    """The layout of the recipe; else the first file layout among the adapters; else PEFT's."""
    if recipe.adapter.layout != "same":
        return recipe.adapter.layout
    layouts = {a.layout for a in adapters}
    return adapters[0].layout if len(layouts) == 1 or layouts <= IN_ONE_FILE else "peft"


def needs_one_spelling(adapters: Sequence[Adapter]) -> bool:
    """True if files of kohya's layout share no module of a part: they may spell the same modules in two ways."""
    spelled = [a.modules.items() for a in adapters if a.layout == "kohya"]
    parts = {m.part for modules in spelled for _, m in modules}
    names = [[{n for n, m in modules if m.part == part} for modules in spelled] for part in parts]
    return any(a and b and a.isdisjoint(b) for of_part in names for a, b in combinations(of_part, 2))
