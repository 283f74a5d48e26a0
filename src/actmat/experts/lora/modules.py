"""Factors of a LoRA adapter as PEFT stores them, paired up by module.

Shapes: `O` out_features, `I` in_features, `R` rank, `E` stacked experts, `V` vocabulary, `k` kernel of a convolution.

| module | A stored | B stored | delta, `scaling * B A` |
|---|---|---|---|
| Linear, Conv1D | `lora_A.weight`, R x I | `lora_B.weight`, O x R | O x I (Conv1D stores the transpose) |
| Embedding | `lora_embedding_A`, R x V | `lora_embedding_B`, I x R | V x I, the transpose of `B A` |
| Conv1d/2d/3d | `lora_A.weight`, R x I x k | `lora_B.weight`, O x R x 1 | O x (I k) |
| parameter E x O x I | `lora_A.weight`, (E R) x I | `lora_B.weight`, O x (R E) | O x I for each expert (see `stacks`) |

Source: PEFT (https://github.com/huggingface/peft), `tuners/lora/layer.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.folder import ADAPTER_CONFIG
from actmat.experts.lora.config import AdapterConfig
from actmat.experts.lora.fields import LORA
from actmat.experts.lora.names import PREFIX, adapter_name, first_factor, looks_like_factor
from actmat.experts.lora.stacks import fitting_names, is_grouped
from actmat.layout.patterns import MatchError

ModuleKind = Literal["linear", "embedding", "convolution", "parameter"]

AdapterLayout = Literal["peft", "kohya", "diffusers", "comfy"]
"""Storage of an adapter: PEFT's folder with a config, a file in kohya's, diffusers' or ComfyUI's names, pairs."""

_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<kind>embedding_)?(?P<side>[AB])(?:\.(?P<leaf>weight|bias))?")
_TWICE = ".base_layer.out_proj"
"""Suffix of a layer inside an attention that PEFT wraps as a whole: `MultiheadAttention.merge` in PEFT adds the delta
of `out_proj` itself and then calls `out_proj.merge`, and its forward pass does the same."""


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """One pair of factors, `delta = scaling * B A`."""

    name: str  # of the module in the model (nested wrappers of a parameter keep their `.base_layer`)
    kind: ModuleKind  # form of the stored factors, see the table at the top of this file
    a: str  # name of the stored factor
    b: str
    rank: int
    scaling: float
    shape: tuple[int, ...]  # `*batch O I` of the logical delta (`V I` of an embedding; `O, I k` of a convolution)
    kernel: tuple[int, ...] = ()  # `I, *k` of a convolution
    bias: str | None = None  # name of the stored `lora_B.bias`, which `scaling` multiplies too
    alpha: str | None = None  # name of the stored scale, in files without a config
    part: str = ""  # component of a pipeline, such as `unet`, in files that hold several
    path: str = ""  # name inside of that component; empty: the name
    parameters: tuple[str, ...] = ()  # of a bare parameter: its name, or those that the file does not tell apart
    is_turned: bool = False  # of a stack: `shape` is that of the delta, and `B A` is `I O`
    is_grouped: bool = False  # of a stack: the columns of B are grouped by expert, not by rank

    @property
    def is_stack(self) -> bool:
        """True for stacked experts."""
        return self.kind == "parameter" and len(self.shape) == 3

    @property
    def inside(self) -> str:
        """Name of the module in the model that it belongs to; kohya's has underscores for dots."""
        return self.path or self.name


@dataclass(frozen=True, slots=True)
class Listing:
    """The content of an adapter.

    Args:
        modules: by name.
        extras: tensors trained in full, name in the model -> stored name.
        copies: copies of base weights, which PEFT stores for embeddings that it adapts, likewise.
        problems: one sentence each.
        layout: how the tensors are named.
        find: `find(specs, modules)` gives the tensors of a base that each module may change, by its name, and problems;
            for layouts whose names only the base resolves.
        notes, warnings: remarks for plans.
        models: names of the models that it may be of; empty if nothing tells.
    """

    modules: Mapping[str, AdapterModule]
    extras: Mapping[str, str]
    copies: Mapping[str, str]
    problems: Sequence[str]
    layout: AdapterLayout = "peft"
    find: Callable[..., tuple[dict[str, list[str]], list[str]]] | None = None
    notes: Sequence[str] = ()
    warnings: tuple[str, ...] = ()
    models: frozenset[str] = frozenset()


def unreadable(spec: TensorSpec) -> str:
    """One sentence on a tensor of integers or 8-bit floats, or without entries."""
    if not spec.numel:
        return (
            f"tensor '{spec.name}' is empty. Likely cause: it was saved while it was sharded (DeepSpeed ZeRO-3, FSDP). "
            "Fix: save again with all shards gathered (stage3_gather_16bit_weights_on_model_save)"
        )
    if not spec.is_floating:
        return f"tensor '{spec.name}' is {spec.dtype}; a quantized adapter cannot be merged"
    return (
        f"tensor '{spec.name}' is {spec.dtype}; an adapter in 8-bit floats is quantized, with scales that this file "
        "may not hold. Merge the adapter that it was quantized from, or save a bfloat16 copy first"
    )


def list_modules(specs: Mapping[str, TensorSpec], config: AdapterConfig) -> Listing:
    """Pair the factors that PEFT stored."""
    halves: dict[tuple[str, bool], dict[str, str]] = {}
    extras: dict[str, str] = {}
    copies: dict[str, str] = {}
    problems: list[str] = []
    for name, spec in specs.items():
        bare = name.removeprefix(PREFIX)
        match = _FACTOR.fullmatch(bare)
        if not spec.numel or not spec.is_floating or spec.dtype.startswith("float8"):
            problems.append(unreadable(spec))
        elif match is not None:
            side = "bias" if match["leaf"] == "bias" else match["side"]
            halves.setdefault((match["module"], match["kind"] is not None), {})[side] = name
        elif looks_like_factor(bare):
            problems.append(_other_factor(name))
        elif bare.endswith(".base_layer.weight") or ".original_module." in bare:
            copies[re.sub(r"\.(base_layer|original_module)\.", ".", bare)] = name
        else:
            extras[bare.replace(".base_layer.", ".")] = name
    if (odd := first_factor(extras)) is not None:
        problems.append(_other_factor(odd))
    modules: dict[str, AdapterModule] = {}
    parameters = _parameters(halves, specs, config)
    for (module, embedding), names in halves.items():
        if module.endswith(_TWICE):
            problems.append(
                f"module '{module}' is the output projection of an nn.MultiheadAttention. PEFT (0.21 and before) adds "
                "its delta twice, in training as in merging, later versions may not: the file does not say what was "
                "trained. Fold the adapter into its base with the PEFT that trained it, and merge full models"
            )
            continue
        try:
            paired = _pair(module, embedding, names, specs, config, parameters.get(module, ()))
        except MatchError as error:
            problems.append(str(error))
            break
        if isinstance(paired, str):
            problems.append(paired)
        else:
            modules[module] = paired
    layers = (n.replace(".base_layer", "") for n, m in modules.items() if not m.parameters)
    problems += config.targets.problems(layers)
    if not modules and not extras and not problems:
        problems.append("the adapter holds no tensors")
    return Listing(modules, extras, copies, list(dict.fromkeys(problems or _of_stacks(modules, config))))


def _other_factor(name: str) -> str:
    if "lora_magnitude_vector" in name:
        return f"tensor '{name}': a magnitude of DoRA, whose delta is not low rank"
    if adapter := adapter_name(name):
        return f"tensor '{name}' is of '{adapter}', one of several adapters in this file. Fix: save each by itself"
    return f"tensor '{name}' is not part of a plain LoRA adapter"


def _of_stacks(modules: Mapping[str, AdapterModule], config: AdapterConfig) -> Iterator[str]:
    """Problems of adapters of stacked experts, and 'stacks' given for any other adapter."""
    has_stacks = any(m.is_stack for m in modules.values())
    if has_stacks and (unknown := LORA.unknown(config.fields)):
        yield (
            f"{ADAPTER_CONFIG} has unknown fields ({', '.join(unknown)}), and stacked experts, whose "
            "factors such fields have redefined before. Likely cause: a newer PEFT, or another trainer. Fix: fold it "
            "into its base with the software that wrote it, or remove the fields if they change no delta"
        )
    if config.stacks and not has_stacks:
        yield f"'stacks' ({', '.join(config.stacks)}) applies to stacked experts, and it has none: leave it"


def _parameters(
    halves: Mapping[tuple[str, bool], Mapping[str, str]], specs: Mapping[str, TensorSpec], config: AdapterConfig
) -> dict[str, tuple[str, ...]]:
    """Wrappers of bare parameters -> the names that each may have."""
    nests: dict[str, list[str]] = {}
    for (module, embedding), names in halves.items():
        whole = {"A", "B"} <= names.keys() and all(len(specs[names[side]].shape) == 2 for side in "AB")
        if config.target_parameters and not embedding and whole:
            nests.setdefault(module.replace(".base_layer", ""), []).append(module)
    out: dict[str, tuple[str, ...]] = {}
    for owner, wrappers in nests.items():
        a, b = ([specs[halves[w, False][side]].shape for w in wrappers] for side in "AB")
        shapes = [(y[0], x[1]) for x, y in zip(a, b, strict=True)]
        try:
            fitting = fitting_names(config, owner, [x[0] for x in a], shapes)
        except MatchError:
            return {}  # the first module gives the error
        out |= {w: tuple(names) for w, names in zip(wrappers, fitting, strict=True)}
    return out


def _pair(
    module: str,
    embedding: bool,
    names: Mapping[str, str],
    specs: Mapping[str, TensorSpec],
    config: AdapterConfig,
    parameters: tuple[str, ...],
) -> AdapterModule | str:
    """The module, or its problem in one sentence."""
    missing = [side for side in "AB" if side not in names]
    if missing:
        has = ", ".join(names.values())
        return f"module '{module}' has no lora_{missing[0]} (it has {has}): half of a pair is missing"
    a, b = specs[names["A"]].shape, specs[names["B"]].shape
    stripped = module.replace(".base_layer", "")
    keys = [f"{stripped}.{p}" for p in parameters] or [stripped]
    settings = {(config.rank_of(k), config.scaling_of(k)) for k in keys}
    if len(settings) > 1:
        return f"module '{module}': rank_pattern or alpha_pattern tell its parameters apart, the adapter's names do not"
    rank, scaling = settings.pop()
    rows = a[0] if a else 0
    stack = rows // rank if parameters and rows % rank == 0 else 1
    if problem := _misfit(module, a, b, rank * stack, rank):
        return problem
    kernel = tuple(a[1:]) if len(a) > 2 else ()
    kind: ModuleKind = "linear"
    shape: tuple[int, ...] = (b[0], a[1])
    if embedding:
        kind, shape = "embedding", (a[1], b[0])
    elif parameters:
        kind, shape = "parameter", (stack, *shape) if stack > 1 else shape
    elif kernel:
        kind, shape = "convolution", (b[0], TensorSpec("", kernel, "float32", "").numel)
        if any(size != 1 for size in b[2:]):
            return f"module '{module}': lora_B is {times(b)}; expected a convolution of kernel 1"
    by_expert = is_grouped(config, stripped, parameters) if kind == "parameter" and stack > 1 and rank > 1 else False
    if isinstance(by_expert, str):
        return by_expert
    return AdapterModule(
        *(module, kind, names["A"], names["B"], rank, scaling, shape, kernel, names.get("bias")),
        parameters=parameters,
        is_grouped=by_expert,
    )


def _misfit(module: str, a: tuple[int, ...], b: tuple[int, ...], expected: int, rank: int) -> str:
    """Why factors of these shapes are no pair of the rank that is expected of them all; empty if they are."""
    if len(a) < 2 or len(b) != len(a):
        return f"module '{module}': lora_A is {times(a)} and lora_B is {times(b)}; expected matrices or kernels"
    rows, columns = a[0], b[1]
    if rows != columns:
        grouped = len(a) > 2 and columns and rows % columns == 0
        cause = ": a grouped convolution, which is not merged" if grouped else ""
        return f"module '{module}': lora_A has rank {rows}, lora_B has rank {columns}{cause}"
    if rows != expected:
        return (
            f"module '{module}': its factors have rank {rows}, adapter_config.json says {rank}; scaling would be "
            "wrong. Likely cause: the config of another adapter, or PiSSA or OLoRA on a layer with a shorter side. "
            f"Fix: put the config of these weights there, or the rank into its rank_pattern ({{'{module}': {rows}}})."
        )
    return ""


def times(shape: tuple[int, ...]) -> str:
    """A shape in a message."""
    return " x ".join(map(str, shape)) or "a scalar"
