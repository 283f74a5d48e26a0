"""Items of an adapter that is extracted from a merge into a base: one per tensor that any expert may change.

    D* = U diag(s) V^T,    B = U_r sqrt(s_r),  A = sqrt(s_r) V_r^T,  alpha = r

Tensors that LoRA cannot hold (norms, tables, convolutions, biases) are saved whole next to the factors
(`modules_to_save`), or left out. The changed tensors are known after the merge: `settled_plan` is then the plan of the
output.
Where all experts are adapters whose deltas are products (VeRA, PiSSA, OLoRA, AdaLoRA, LoRA), the ranks add up, and the
factors are exact up to rounding.

Source: Eckart and Young (https://doi.org/10.1007/BF02288367); PEFT's `LoraConfig`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from actmat.checkpoints.base import TensorSpec, torch_dtype
from actmat.checkpoints.model import Model
from actmat.errors import AlignmentError
from actmat.experts.base import Expert
from actmat.experts.lora.names import PREFIX
from actmat.layout.in_memory import names_in_memory
from actmat.layout.ties import is_output_head, is_token_table
from actmat.layout.types import LayoutMap, Role
from actmat.linalg.svd import svd_workspace
from actmat.methods import get_method
from actmat.planning.adapter.layouts import lora_config
from actmat.planning.adapter.modules import ONE_FILE
from actmat.planning.align import resolve_roles
from actmat.planning.choose import Chooser
from actmat.planning.cost import MATRIX_BYTES
from actmat.planning.item import Extraction, Item
from actmat.planning.model import Draft, MergePlan
from actmat.planning.statistics import ExpertStatistics
from actmat.planning.tensors import plan_tensors
from actmat.recipe import Recipe

HEAD = "lm_head.weight"
"""Output head of transformers' language models."""


def plan_extraction(recipe: Recipe, base: Model, experts: Sequence[Expert], statistics: ExpertStatistics) -> Draft:
    """Decide the form of every tensor in an extracted adapter.

    Raises:
        AlignmentError: the inputs do not fit together, or the recipe does not fit them; carries all problems.
    """
    draft = plan_tensors(recipe, base, experts, statistics)
    layouts, _ = resolve_roles(recipe, base.specs, base.config)
    names, why = names_in_memory(base)
    notes = list(draft.notes)
    if why:
        notes.append(f"modules have the names of the base's tensors: {why}")
    wanted = [i for i in draft.items if i.call is not None and i.layout.role is not Role.BUFFER]
    found = _with_exact_ranks(wanted, [_extraction(i, names.get(i.name), recipe) for i in wanted], recipe)
    factored = {e.module for e in found if e.kind == "factored"}
    aliases = _aliases(base, draft.items, layouts)
    items = []
    for item, extraction in zip(wanted, found, strict=True):
        checked = _checked(item, extraction, factored, recipe)
        items.append(_item(item, checked, aliases[item.name], names, recipe))
    if any(i.extraction is not None and i.extraction.kind == "saved" and len(i.outputs) > 1 for i in items):
        notes.append("a table is tied to the output head: PEFT versions with ensure_weight_tying keep it so")
    chooser = Chooser(recipe, statistics.kinds, base.specs)
    kept = {name: pattern for name in base.specs if (pattern := chooser.keeps(name)) is not None}
    return dataclasses.replace(
        draft,
        items=tuple(items),
        specs=tuple(s for item in items for s in item.outputs),
        max_shard_bytes=ONE_FILE,
        stem="adapter_model",
        stems={},
        adapter_config=_config(recipe, items),
        kept=kept,
        notes=tuple(notes),
    )


def settled_plan(plan: MergePlan, changed: Collection[str]) -> MergePlan:
    """The plan of an extraction's output, without the tensors that no expert changes.

    Args:
        plan: of an extraction.
        changed: names of the items of tensors that an expert changes.

    Raises:
        AlignmentError: no tensor is left.
    """
    items = [item if item.name in changed else dataclasses.replace(item, outputs=()) for item in plan.items]
    specs = tuple(s for item in items for s in item.outputs)
    if not specs:
        error = AlignmentError(
            f"{', '.join(e.location for e in plan.experts)}: the merge differs from {plan.recipe.base} in no "
            "tensor that an adapter could hold. Likely cause: the experts are copies of the base"
        )
        error.recurs = True
        raise error
    return dataclasses.replace(plan, items=tuple(items), specs=specs, adapter_config=_config(plan.recipe, items))


def _extraction(item: Item, in_memory: str | None, recipe: Recipe) -> Extraction:
    """Form of one tensor, before it is compared with the others."""
    if in_memory is None:
        return Extraction("left out", item.name, "put together with others in memory, where PEFT adapts the whole")
    module, _, leaf = in_memory.rpartition(".")
    layout = item.layout
    if layout.role in (Role.LINEAR, Role.FUSED_LINEAR) and len(item.shape) == 2 and leaf == "weight":
        turned = layout.orientation == "IO"
        return Extraction("factored", module, layout.reason, recipe.extracted.rank or 0, turned)
    if not module:
        return Extraction("left out", item.name, "a parameter of the model itself, which no module holds")
    return Extraction("saved", module, f"{layout.reason}, which no LoRA holds", bias=leaf == "bias")


def _with_exact_ranks(items: Sequence[Item], found: Sequence[Extraction], recipe: Recipe) -> list[Extraction]:
    """Factored tensors with ranks that hold the merged deltas exactly, if the recipe gives no rank.

    Raises:
        AlignmentError: such ranks do not exist; names the tensors.
    """
    if recipe.extracted.rank is not None:
        return list(found)
    ranks = [_exact_rank(item) for item in items]
    lacking = [i.name for i, e, r in zip(items, found, ranks, strict=True) if e.kind == "factored" and not r]
    if lacking:
        raise AlignmentError(
            f"An adapter of {len(lacking)} tensors, such as '{lacking[0]}', has no rank of its own: an expert's delta "
            "is not a product of two factors, or the method does not work on factors. Fix: give its rank "
            "(--rank 64)"
        )
    largest = max((r for e, r in zip(found, ranks, strict=True) if e.kind == "factored"), default=0)
    chosen = [largest] * len(ranks) if recipe.extracted.ranks == "uniform" else ranks
    pairs = zip(found, chosen, strict=True)
    return [dataclasses.replace(e, rank=r) if e.kind == "factored" else e for e, r in pairs]


def _exact_rank(item: Item) -> int:
    """Rank of the joint row space of the experts' factors; 0 if an expert has no factors."""
    known = all(s is not None and (s.rank or s.kind == "zero") for s in item.sources)
    if item.call is None or len(item.shape) != 2 or not known:
        return 0
    method = get_method(item.call.method)
    call, count = item.call, len(item.sources)
    in_rows = item.form == "factored" or not method.why_dense(call.options, count, call.weights)
    keeps = in_rows and method.keeps_row_space and not method.uses_base(call.options)
    return min(sum(s.rank for s in item.sources if s is not None), *item.shape) if keeps else 0


def _checked(item: Item, found: Extraction, factored: set[str], recipe: Recipe) -> Extraction:
    """Biases of factored layers by the name that PEFT gives them; modules that hold factored ones cannot be saved."""
    if found.kind != "saved":
        return found
    if recipe.extracted.others == "leave":
        return Extraction("left out", found.module, "left out as requested: no LoRA holds it")
    if found.module in factored:
        if found.bias:
            return found
        return Extraction("left out", found.module, "of a layer that it factors, PEFT saves the bias only")
    if any(m.startswith(found.module + ".") for m in factored):
        words = "its module holds layers that are factored, and PEFT saves whole modules"
        return Extraction("left out", found.module, words)
    return dataclasses.replace(found, bias=False)


def _aliases(base: Model, items: Sequence[Item], layouts: LayoutMap) -> dict[str, list[str]]:
    """Names under which a table is stored besides its own, as PEFT does with `ensure_weight_tying`."""
    out: dict[str, list[str]] = {i.name: [] for i in items if i.action != "tie"}
    for item in items:
        if item.tied_to is not None:
            out[item.tied_to].append(item.name)
    for alias, name in layouts.ties.items():
        if name in out and alias not in out[name]:
            out[name].append(alias)
    stored = {*out, *(a for found in out.values() for a in found)}
    architectures = (base.config or {}).get("architectures") or ()
    has_head = any(str(a).endswith(("ForCausalLM", "LMHeadModel")) for a in architectures)
    if has_head and not any(is_output_head(n) for n in stored):  # it is tied where it is not stored
        for name, found in out.items():
            if is_token_table(name) and not found:
                found.append(HEAD)
    return out


def _item(item: Item, found: Extraction, aliases: Sequence[str], names: Mapping[str, str], recipe: Recipe) -> Item:
    """The item of the tensor as it is written."""
    dtype = recipe.dtype or item.base_dtype
    found = dataclasses.replace(found, tied=item.aliases)
    outputs: tuple[TensorSpec, ...] = ()
    words = found.reason if found.kind == "left out" else "saved whole"
    if found.kind == "factored":
        outputs = _factor_specs(item, found, dtype)
        words = f"factors of rank {found.rank}"
    elif found.kind == "saved":
        own = [item.name, *aliases]
        stored = [f"{found.module}.base_layer.bias"] if found.bias else [names.get(n, n) for n in own]
        outputs = tuple(TensorSpec(PREFIX + n, item.shape, dtype, "") for n in dict.fromkeys(stored))
    short, long = min(item.shape, default=0), max(item.shape, default=0)
    flops = 6 * short * short * long + 9 * short**3  # a Gram matrix of the short side, its eigenvectors, two products
    cost = dataclasses.replace(
        item.cost,
        write_bytes=sum(s.nbytes for s in outputs),
        host_bytes=item.cost.host_bytes + _bytes_of(item, found, recipe),
        flops=item.cost.flops + (flops if found.kind == "factored" else 0),
    )
    return dataclasses.replace(
        item,
        outputs=outputs,
        reason=f"{item.reason}; {words}",
        kernel="extracted",
        obeys_scale=item.obeys_scale and found.kind != "left out",
        cost=dataclasses.replace(cost, device_bytes=0),
        extraction=found,
    )


def _factor_specs(item: Item, found: Extraction, dtype: str) -> tuple[TensorSpec, ...]:
    """Specs of A and B."""
    rows, columns = reversed(item.shape) if found.transposed else item.shape
    a, b = (f"{PREFIX}{found.module}.lora_{side}.weight" for side in "AB")
    return TensorSpec(a, (found.rank, columns), dtype, ""), TensorSpec(b, (rows, found.rank), dtype, "")


def _bytes_of(item: Item, found: Extraction, recipe: Recipe) -> int:
    """Memory of the merged delta, of its decomposition, and of the factors and their error in float64."""
    if found.kind != "factored":
        return 0
    width = torch_dtype(recipe.compute_dtype).itemsize
    factors = 8 * found.rank * sum(item.shape)
    return width * (item.numel + svd_workspace(*item.shape)) + 2 * factors + 16 * item.numel + MATRIX_BYTES


def _config(recipe: Recipe, items: Sequence[Item]) -> dict[str, Any]:
    """`adapter_config.json`: the most frequent rank, and the others by name; scaling 1 everywhere."""
    written = [i.extraction for i in items if i.extraction is not None and i.outputs]
    ranks = {e.module: e.rank for e in written if e.kind == "factored"}
    saved = {e.module for e in written if e.kind == "saved" and not e.bias}
    ties = any(i.extraction is not None and i.extraction.kind == "saved" and len(i.outputs) > 1 for i in items)
    return lora_config(
        list(ranks.items()),
        base_model_name_or_path=recipe.base,
        bias="all" if any(e.bias for e in written) else "none",
        fan_in_fan_out=any(e.transposed for e in written),
        target_modules=sorted(ranks),
        modules_to_save=sorted(saved) or None,
        **({"ensure_weight_tying": True} if ties else {}),
    )
