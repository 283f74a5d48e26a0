"""Forms of the targets in the output: tensors of a model, modules of an adapter, or an extracted adapter.

An extracted adapter holds the best approximation of every merged delta,

    D* = U diag(s) V^T,    B = U_r sqrt(s_r),  A = sqrt(s_r) V_r^T,  alpha = r

Tensors that LoRA cannot hold (norms, tables, convolutions, biases) are saved whole next to the factors
(`modules_to_save`), or left out. The changed tensors are known after the merge: `settled_plan` is then the plan of the
output. Where all experts are adapters whose deltas are products (VeRA, PiSSA, OLoRA, AdaLoRA, LoRA), the ranks add up,
and the factors are exact up to rounding. In every adapter the scaling is exactly 1 and module names are full.

Source: Eckart and Young (https://doi.org/10.1007/BF02288367); PEFT's `LoraConfig`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.model import Model
from actmat.errors import AlignmentError
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.fields import AXES, ORDERS
from actmat.experts.lora.modules import AdapterLayout
from actmat.experts.lora.names import PREFIX
from actmat.experts.lora.stacks import WRITERS, axes_by_version, release_of
from actmat.layout.in_memory import names_in_memory
from actmat.layout.ties import is_output_head, is_token_table
from actmat.layout.types import LayoutMap, Role
from actmat.methods import get_method
from actmat.planning.choose import Chooser
from actmat.planning.implied import list_stacks
from actmat.planning.item import Item, MethodCall, ModuleForm, Write
from actmat.planning.model import MergePlan
from actmat.recipe import Recipe

ONE_FILE = 1 << 62
"""Bytes: PEFT reads one file only, so an adapter is never sharded."""

HEAD = "lm_head.weight"
"""Output head of transformers' language models."""

ALPHA = ".alpha"
"""End of the name of a scale in kohya's layout and ComfyUI's: the rank, so that the factor of `B A` is 1."""

STEMS: dict[AdapterLayout, str] = {
    "peft": "adapter_model",
    "kohya": "pytorch_lora_weights",
    "diffusers": "pytorch_lora_weights",
    "comfy": "pytorch_lora_weights",
}
"""Names of the written files; `load_lora_weights` of diffusers finds the last three."""


def write_modules(
    recipe: Recipe,
    items: Sequence[Item],
    adapters: Sequence[Adapter],
    layout: AdapterLayout,
    dtype: str,
    chooser: Chooser,
) -> list[Item]:
    """Modules with the ranks and names of the factors that they become.

    Args:
        items: of modules, with call and reading.
        adapters: of all experts.
        layout, dtype: of the output.
        chooser: of the means of biases.
    """
    ranks = [_ranks(recipe, item) for item in items]
    if recipe.adapter.ranks == "uniform":
        top = max((rank for rank, _ in ranks), default=0)
        ranks = [(top, exact) for _, exact in ranks]
    out = []
    for item, (rank, exact) in zip(items, ranks, strict=True):
        modules = [a.modules.get(item.name) for a in adapters]
        biased = [m is not None and m.bias is not None for m in modules]
        bias, reason = chooser.elsewhere(f"{item.name}.bias", biased) if any(biased) else None, item.reason
        if any(biased) and not all(biased):
            missing = [label for label, has in zip(recipe.labels, biased, strict=True) if not has]
            how = "mean over the" if bias and bias.method == "average" else "sum of those of"
            reason += f"; bias: {how} experts that have it; not in {', '.join(missing)}"
        outputs = module_outputs(item.module, layout, rank, dtype, has_bias=any(biased))
        write = Write("factors", outputs, rank=rank, exact_rank=exact, bias=bias)
        out.append(dataclasses.replace(item, write=write, reason=reason))
    return out


def _ranks(recipe: Recipe, item: Item) -> tuple[int, int]:
    """Rank that is written, and the one that holds every merged delta exactly."""
    assert item.call is not None, "unknown methods are problems"
    limit, form = min(item.shape[-2:]), item.module
    together = _joint_rank(item.call, form.ranks, len(form.blocks))
    exact = min(together, limit) if item.is_factored else limit
    return (min(exact, together) if recipe.adapter.rank is None else min(recipe.adapter.rank, limit)), exact


def _joint_rank(call: MethodCall, ranks: Sequence[int], blocks: int) -> int:
    """Rank that holds every possible delta of a factored merge, by the number of packed maps."""
    method = get_method(call.method)
    if call.space == "factors":
        return max(ranks) * (blocks if blocks and method.is_random else 1)
    # packed maps whose merged rows leave the joint row space of the experts share no rows: their ranks add up
    keeps = method.keeps_row_space or call.space == "core"
    return sum(ranks) * (blocks if blocks and not keeps else 1)


def module_outputs(
    form: ModuleForm, layout: AdapterLayout, rank: int, dtype: str, *, has_bias: bool
) -> tuple[TensorSpec, ...]:
    """The stored tensors of a module: A and B, and a bias (PEFT) or a scale (kohya)."""
    *batch, rows, columns = form.shape
    if form.turned:
        rows, columns = columns, rows
    n = rank * math.prod(batch)
    shapes: tuple[tuple[int, ...], tuple[int, ...]] = (n, columns), (rows, n)
    if form.kind == "embedding":
        shapes = (n, rows), (columns, n)
    elif form.kind == "convolution":
        ones = (1,) * (len(form.kernel) - 1)
        shapes = (n, *form.kernel), (rows, n, *ones)
    a, b = _factor_names(form, layout)
    out = [TensorSpec(a, shapes[0], dtype, ""), TensorSpec(b, shapes[1], dtype, "")]
    if layout in ("kohya", "comfy"):
        out.append(TensorSpec(form.name + ALPHA, (), "float32", ""))
    elif has_bias:
        out.append(TensorSpec(b.removesuffix("weight") + "bias", (rows,), dtype, ""))
    return tuple(out)


def _factor_names(form: ModuleForm, layout: AdapterLayout) -> tuple[str, str]:
    if layout in ("kohya", "comfy"):
        return f"{form.name}.lora_down.weight", f"{form.name}.lora_up.weight"
    start, end = f"{PREFIX if layout == 'peft' else ''}{form.name}.lora_", ".weight"
    if form.kind == "embedding" and layout == "peft":
        start, end = f"{start}embedding_", ""
    return f"{start}A{end}", f"{start}B{end}"


def output_config(
    recipe: Recipe, adapters: Sequence[Adapter], modules: Sequence[Item], extras: Sequence[Item]
) -> dict[str, Any]:
    """Config with which PEFT loads merged modules: `lora_alpha = r` everywhere, so that its scaling is 1.

    Modules are listed with their full names, because endings would also match modules that no expert adapted. Where
    ranks differ (`ranks: pattern`), `rank_pattern` and `alpha_pattern` name each.
    """
    first = adapters[0].config.fields
    bias_kinds = {a.config.bias for a in adapters}
    by_bias = bool(bias_kinds - {"none"})  # then biases are known to `bias`, not to `modules_to_save`
    saved = [e.name.rpartition(".")[0] for e in extras if not (by_bias and e.name.endswith(".bias"))]
    bases = [a.config.base_model for a in adapters if a.config.base_model]
    config = lora_config(
        [(_pattern_name(m, adapters), m.write.rank) for m in modules],
        task_type=first.get("task_type"),
        base_model_name_or_path=bases[0] if bases else (recipe.base or None),
        lora_bias=any(len(m.outputs) > 2 for m in modules),
        bias=next(iter(sorted(bias_kinds - {"none"})), "none"),
        fan_in_fan_out=any(a.config.fan_in_fan_out for a in adapters),
        target_modules=[m.name for m in modules if m.module.kind != "parameter"],
        modules_to_save=sorted(set(saved)) or None,
        auto_mapping=first.get("auto_mapping"),
        revision=first.get("revision"),
        target_parameters=sorted({p for a in adapters for p in a.config.target_parameters}) or None,
    )
    return {**config, **_version(adapters)}


def lora_config(ranks: Sequence[tuple[str, int]], **fields: Any) -> dict[str, Any]:
    """Config of plain LoRA of scaling 1: the most frequent rank, and the others by name.

    Args:
        ranks: of each module.
        fields: of this adapter.
    """
    counts = [n for _, n in ranks]
    common = max(set(counts), key=lambda n: (counts.count(n), n)) if counts else 1
    odd = {re.escape(m): n for m, n in ranks if n != common}
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "auto_mapping": ...,
        "base_model_name_or_path": None,
        "revision": ...,
        "inference_mode": True,
        "r": common,
        "lora_alpha": common,
        "use_rslora": False,
        "use_dora": False,
        "lora_dropout": 0.0,
        "lora_bias": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": [],
        "target_parameters": ...,
        "modules_to_save": None,
        "rank_pattern": odd,
        "alpha_pattern": dict(odd),
        **fields,
    }
    return {key: value for key, value in config.items() if value is not ...}


def _pattern_name(module: Item, adapters: Sequence[Adapter]) -> str:
    """Name that PEFT matches patterns against: the module, or the bare parameter of a module."""
    plain = module.name.replace(".base_layer", "")
    adapted = next(m for a in adapters if (m := a.modules.get(module.name)) is not None)
    return f"{plain}.{adapted.parameters[0]}" if len(adapted.parameters) == 1 else plain


def _version(adapters: Sequence[Adapter]) -> dict[str, str]:
    """`peft_version` and `lora_B_layout`, by which stacks are read as those of the adapters were."""
    having = [a for a in adapters if list_stacks(a)]
    versions = [a.config.version for a in having or adapters]
    known = sorted((v for v in versions if release_of(v)), key=lambda v: release_of(v) or ())
    newest = {"peft_version": known[-1]} if known and (len(known) == len(versions) or not having) else {}
    if said := next((w for a in having if (w := a.config.said(AXES)) is not None), None):
        newer = [v for v in known if axes_by_version(v, "OI", "") == said]
        newest = {"peft_version": newer[-1] if newer else WRITERS[said]}
    fields = {n for a in having for n in a.config.fields}
    marked = any(a.config.said(ORDERS) for a in having) or "lora_B_layout" in fields
    return {**newest, **({"lora_B_layout": "rank_major"} if marked else {})}


def write_extracted(
    recipe: Recipe, base: Model, items: Sequence[Item], layouts: LayoutMap, dtypes: Mapping[str, str]
) -> tuple[list[Item], list[str]]:
    """Tensors of a merge into the base in the form that an adapter holds, and notes.

    Args:
        items: of all tensors of the base, with call and reading.
        layouts: of the base, whose ties count.
        dtypes: of the output, by tensor of the base.

    Raises:
        AlignmentError: a rank is needed and cannot be known; names the tensors.
    """
    names, why = names_in_memory(base)
    notes = [f"modules have the names of the base's tensors: {why}"] if why else []
    wanted = [i for i in items if i.call is not None and i.layout.role is not Role.BUFFER]
    writes = _with_exact_ranks(wanted, [_form_of(i, names.get(i.name), recipe) for i in wanted], recipe)
    factored = {w.module for w in writes if w.kind == "svd"}
    aliases = _aliases(base, items, layouts)
    out = []
    for item, write in zip(wanted, writes, strict=True):
        checked = _checked(write, factored, names.get(item.name, ""), recipe)
        in_memory = [names.get(n, n) for n in (item.name, *aliases[item.name])]
        if checked.kind == "sum" and checked.module in factored:
            in_memory = [_bias_name(checked.module)]
        out.append(_with_outputs(item, checked, in_memory, dtypes[item.name]))
    if any(i.write.kind == "sum" and len(i.outputs) > 1 for i in out):
        notes.append("a table is tied to the output head: PEFT versions with ensure_weight_tying keep it so")
    return out, notes


def settled_plan(plan: MergePlan, changed: Collection[str]) -> MergePlan:
    """The plan of an extraction's output, without the tensors that no expert changes.

    Args:
        plan: of an extraction.
        changed: names of the items of tensors that an expert changes.

    Raises:
        AlignmentError: no tensor is left.
    """
    writes = [i.write if i.name in changed else dataclasses.replace(i.write, outputs=()) for i in plan.items]
    items = [dataclasses.replace(item, write=write) for item, write in zip(plan.items, writes, strict=True)]
    specs = tuple(s for item in items for s in item.outputs)
    if not specs:
        error = AlignmentError(
            f"{', '.join(e.location for e in plan.experts)}: the merge differs from {plan.recipe.base} in no "
            "tensor that an adapter could hold. Likely cause: the experts are copies of the base"
        )
        error.is_permanent = True
        raise error
    config = extracted_config(plan.recipe, items)
    return dataclasses.replace(plan, items=tuple(items), specs=specs, adapter_config=config)


def _form_of(item: Item, in_memory: str | None, recipe: Recipe) -> Write:
    """Form of one tensor, before it is compared with the others."""
    if in_memory is None:
        why = "put together with others in memory, where PEFT adapts the whole"
        return Write("nothing", module=item.name, why=why)
    module, _, leaf = in_memory.rpartition(".")
    is_linear = item.layout.role in (Role.LINEAR, Role.FUSED_LINEAR) and len(item.shape) == 2
    if is_linear and leaf == "weight":
        return Write("svd", module=module, why=item.layout.reason, rank=recipe.extracted.rank or 0)
    if not module:
        return Write("nothing", module=item.name, why="a parameter of the model itself, which no module holds")
    return Write("sum", module=module, why=f"{item.layout.reason}, which no LoRA holds")


def _with_exact_ranks(items: Sequence[Item], writes: Sequence[Write], recipe: Recipe) -> list[Write]:
    """Factored tensors with ranks that hold the merged deltas exactly, if the recipe gives no rank.

    Raises:
        AlignmentError: such ranks do not exist; names the tensors.
    """
    if recipe.extracted.rank is not None:
        return list(writes)
    ranks = [_exact_rank(item) if write.kind == "svd" else 0 for item, write in zip(items, writes, strict=True)]
    lacking = [i.name for i, w, r in zip(items, writes, ranks, strict=True) if w.kind == "svd" and not r]
    if lacking:
        raise AlignmentError(
            f"An adapter of {len(lacking)} tensors, such as '{lacking[0]}', has no rank of its own: an expert's delta "
            "is not a product of two factors, or the method does not work on factors. Fix: give its rank "
            "(--rank 64)"
        )
    largest = max(ranks, default=0)
    is_uniform = recipe.extracted.ranks == "uniform"
    pairs = zip(writes, ranks, strict=True)
    return [dataclasses.replace(w, rank=largest if is_uniform else r) if w.kind == "svd" else w for w, r in pairs]


def _exact_rank(item: Item) -> int:
    """Rank of the joint row space of the experts' factors; 0 if an expert has no factors."""
    known = all(s is not None and (s.rank or s.kind == "zero") for s in item.sources)
    if item.call is None or not known:
        return 0
    method, call = get_method(item.call.method), item.call
    in_rows = item.is_factored or not method.why_dense(call.options, len(item.sources), call.weights)
    keeps = in_rows and method.keeps_row_space and not method.uses_base(call.options)
    return min(sum(s.rank for s in item.sources if s is not None), *item.shape) if keeps else 0


def _checked(write: Write, factored: set[str], in_memory: str, recipe: Recipe) -> Write:
    """Biases of factored layers by the name that PEFT gives them; modules that hold factored ones cannot be saved."""
    if write.kind != "sum":
        return write
    if recipe.extracted.others == "leave":
        return Write("nothing", module=write.module, why="left out as requested: no LoRA holds it")
    if write.module in factored:
        if in_memory.rpartition(".")[2] == "bias":
            return write
        return Write("nothing", module=write.module, why="of a layer that it factors, PEFT saves the bias only")
    if any(m.startswith(write.module + ".") for m in factored):
        why = "its module holds layers that are factored, and PEFT saves whole modules"
        return Write("nothing", module=write.module, why=why)
    return write


def _with_outputs(item: Item, write: Write, names: Sequence[str], dtype: str) -> Item:
    """The item of the tensor as it is written; `names`: of the tensors that are saved whole."""
    outputs: tuple[TensorSpec, ...] = ()
    words = write.why if write.kind == "nothing" else "saved whole"
    if write.kind == "svd":
        rows, columns = reversed(item.shape) if item.layout.orientation == "IO" else item.shape
        a, b = (f"{PREFIX}{write.module}.lora_{side}.weight" for side in "AB")
        outputs = TensorSpec(a, (write.rank, columns), dtype, ""), TensorSpec(b, (rows, write.rank), dtype, "")
        words = f"factors of rank {write.rank}"
    elif write.kind == "sum":
        outputs = tuple(TensorSpec(PREFIX + n, item.shape, dtype, "") for n in dict.fromkeys(names))
    write = dataclasses.replace(write, outputs=outputs)
    return dataclasses.replace(item, write=write, reason=f"{item.reason}; {words}")


def _aliases(base: Model, items: Sequence[Item], layouts: LayoutMap) -> dict[str, list[str]]:
    """Names under which a table is stored besides its own, as PEFT does with `ensure_weight_tying`."""
    out: dict[str, list[str]] = {i.name: [] for i in items if i.action != "tie"}
    for item in items:
        if item.tied_to is not None:
            out[item.tied_to].append(item.name)
    for alias, name in layouts.ties.items():
        if name in out and alias not in out[name]:
            out[name].append(alias)
    stored = {*out, *(a for names in out.values() for a in names)}
    architectures = (base.config or {}).get("architectures") or ()
    has_head = any(str(a).endswith(("ForCausalLM", "LMHeadModel")) for a in architectures)
    if has_head and not any(is_output_head(n) for n in stored):  # it is tied where it is not stored
        for name, names in out.items():
            if is_token_table(name) and not names:
                names.append(HEAD)
    return out


def extracted_config(recipe: Recipe, items: Sequence[Item]) -> dict[str, Any]:
    """Config with which PEFT loads an extracted adapter: the most frequent rank, and the others by name; scaling 1."""
    written = [i for i in items if i.outputs]
    ranks = {i.write.module: i.write.rank for i in written if i.write.kind == "svd"}
    whole = [i for i in written if i.write.kind == "sum"]
    biases = [i for i in whole if i.outputs[0].name == PREFIX + _bias_name(i.write.module)]
    saved = {i.write.module for i in whole if i not in biases}
    return lora_config(
        list(ranks.items()),
        base_model_name_or_path=recipe.base,
        bias="all" if biases else "none",
        fan_in_fan_out=any(i.write.kind == "svd" and i.layout.orientation == "IO" for i in written),
        target_modules=sorted(ranks),
        modules_to_save=sorted(saved) or None,
        **({"ensure_weight_tying": True} if any(len(i.outputs) > 1 for i in whole) else {}),
    )


def _bias_name(module: str) -> str:
    """Name that PEFT gives the bias of a layer that it factors."""
    return f"{module}.base_layer.bias"
