"""Locate the tensors of a model in memory in its checkpoint.

Adapters and statistics name tensors as the model has them in memory; a checkpoint has the names on disk. Names are
matched in three ways, tried in this order:

1. the same name;
2. the same name with, or without, the model's prefix (`transformer.`, `model.`) in all of them, or with the beginnings
   that the language model of a multimodal one has. It counts only if it is unique: of several that complete as many
   names, shapes decide, then the class of the part; else the names are refused;
3. transformers' own conversion for the architecture in `config.json`: renamed tensors (a ViT's `query` is `q_proj` in
   memory), and experts of a mixture that are separate on disk and stacked in memory. Needs transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.model import Model
from actmat.errors import CheckpointError
from actmat.layout.types import Block

Beginnings: TypeAlias = tuple[tuple[str, str], ...]
"""Other beginnings of names: pairs of an old and a new one; the first that fits counts."""

OF_PARTS: tuple[Beginnings, ...] = (
    (("model.diffusion_model.", ""),),
    (("text_encoder.text_model.", "text_encoder."),),
    (("model.language_model.", "model."), ("model.visual.", "visual.")),
    (
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
        ("model.vision_tower.", "vision_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
    ),
)
"""Beginnings of names in single files of image tools, and in other files of the diffusion model; in a pipeline or a
multimodal model, and in its text model or in the same model saved by other versions of transformers."""


def replace_beginning(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    """The name with another beginning: that of the first pair of an old and a new one that fits."""
    return next((new + name[len(old) :] for old, new in pairs if name.startswith(old)), name)


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A tensor on disk, and its part of the tensor in memory: expert `index` of a stack, rows `start:stop`."""

    name: str
    index: int | None = None
    start: int = 0
    stop: int | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """The part of a tensor that has the shape of the one in memory, as a view."""
        part = tensor if self.index is None else tensor[self.index]
        return part if self.stop is None else part[..., self.start : self.stop, :]


@dataclass(frozen=True, slots=True)
class TensorOnDisk:
    """A tensor in memory: its shape, and the tensors on disk that make it up.

    With `rows` it is these rows of the one tensor on disk, which packs several.
    """

    shape: tuple[int, ...]
    slices: tuple[TensorSlice, ...]
    rows: tuple[Block, ...] = ()


Fits = Callable[[str, TensorSpec], bool]
"""`fits(name, spec)`: True if a tensor may have this name in memory, by its shape."""


def find_on_disk(
    base: Model,
    groups: Sequence[Sequence[str]],
    optional: Iterable[str] = (),
    fits: Fits | None = None,
    part: str = "",
) -> tuple[dict[str, TensorOnDisk], str]:
    """The names located in a base, and the reason why others may not have been.

    Args:
        base: of the tensors.
        groups: of alternative names, one of each of which is wanted.
        optional: names that may be missing.
        fits: judges the shapes.
        part: class or component of the part of the model that the names are of; may be empty.

    Raises:
        CheckpointError: several parts of the base complete the names.
    """
    optional = list(optional)
    names = [*(n for group in groups for n in group), *optional]
    why = ""
    located = {n: _whole(base.specs[n]) for n in names if n in base.specs}

    def complete() -> bool:
        return all(any(n in located for n in group) for group in groups)

    several: list[str] = []
    if not complete():
        by_prefix, several = _by_prefix(base.specs, [n for n in names if n not in located], fits, part)
        located = by_prefix | located
    if not complete() or any(n not in located for n in optional):  # a head may have another name on disk
        converted, why = _converted(base, packed=True)
        located = {n: converted[n] for n in names if n in converted} | located
    if several and not complete():
        raise _ambiguous(base, names, several)
    return located, why


def find_by_name(base: Model, names: Sequence[str], part: str = "") -> dict[str, TensorOnDisk]:
    """The names that a base has, with the same prefix for all or without one.

    Raises:
        CheckpointError: several parts of the base complete the names.
    """
    located, several = _by_prefix(base.specs, [n for n in names if n not in base.specs], part=part, tried=64)
    if several:
        raise _ambiguous(base, names, several)
    return located | {n: _whole(base.specs[n]) for n in names if n in base.specs}


def _ambiguous(base: Model, names: Sequence[str], several: Sequence[str]) -> CheckpointError:
    shown = " and ".join(f"'{prefix}'" for prefix in several)
    return CheckpointError(
        f"its names, such as '{names[0]}', are completed by several parts of the base ({base.location}), {shown}: "
        "which one it changes is unknown. Likely cause: it was trained on a part of the model, and its config does not "
        "name the class (auto_mapping.base_model_class). Fix: give that part by itself as the base, or put the prefix "
        "before its names"
    )


def names_in_memory(base: Model) -> tuple[dict[str, str], str]:
    """Name in memory of every stored tensor that is one there too, and the reason if names on disk are used instead.

    Tensors that are put together in memory, such as experts of a mixture, are left out.
    """
    if base.config is None:
        return {name: name for name in base.specs}, ""
    converted, why = _converted(base)
    if not converted:
        return {name: name for name in base.specs}, why
    single = {n: p.slices[0] for n, p in converted.items() if len(p.slices) == 1}
    return {s.name: n for n, s in single.items() if s.index is None and s.stop is None}, why


def names_of_class(config: Mapping[str, Any] | None) -> tuple[tuple[str, ...], dict[str, str]]:
    """Of the class of transformers that a config names: ends of names of buffers only, and names of one parameter.

    Ends are the last two parts: releases move buffers, as `rotary_emb.inv_freq` out of the layers. A second name of a
    parameter leads to its first, and the first to the second. Both are empty without a class.
    """
    if config is None or (model := _in_memory(config)[0]) is None:
        return (), {}
    buffers, parameters = (
        {".".join(n.rsplit(".", 2)[-2:]) for n, _ in of} for of in (model.named_buffers(), model.named_parameters())
    )
    first: dict[int, str] = {}
    every = model.named_parameters(remove_duplicate=False)
    pairs = [(n, m) for n, p in every if (m := first.setdefault(id(p), n)) != n]
    return tuple(f".{end}" for end in buffers - parameters), {**{m: n for n, m in pairs}, **dict(pairs)}


def _whole(spec: TensorSpec) -> TensorOnDisk:
    return TensorOnDisk(spec.shape, (TensorSlice(spec.name),))


def find_beginnings(
    names: Collection[str],
    stored: Collection[str],
    score: Callable[[Sequence[tuple[str, str]]], tuple[int, int]],
    part: str,
    probes: Iterable[str],
) -> tuple[Beginnings, list[str]]:
    """Other beginnings with which more of the names are stored; none if there are no such.

    Args:
        names: that are wanted; those `probes` show which prefixes stored names may have.
        score: rates pairs of a name and its stored one; the larger the better.
        part: class or component that chooses among several that are as good.

    Returns:
        The beginnings; and, if several are as good, none and their prefixes.
    """
    added = {s.removesuffix(n) for n in probes for s in stored if s.endswith("." + n)}
    taken = {n[: n.index(".") + 1] for n in names if "." in n}
    candidates: list[Beginnings] = [()]
    candidates += [(pair,) for prefix in sorted(added | taken) for pair in (("", prefix), (prefix, ""))]
    candidates += [pairs for known in OF_PARTS for pairs in (known, tuple((new, old) for old, new in known))]
    by_pairs: dict[tuple[tuple[str, str], ...], Beginnings] = {}
    for pairs in candidates:
        renamed = ((n, replace_beginning(n, pairs)) for n in names)
        by_pairs.setdefault(tuple((n, r) for n, r in renamed if r in stored), pairs)
    scores = {pairs: score(pairs) for pairs in by_pairs if pairs}
    most = max(scores.values(), default=(0, 0))
    best = [by_pairs[pairs] for pairs, of_pairs in scores.items() if of_pairs == most]
    if not best or () in best:
        return (), []
    by_prefix = {"".join(beginnings[0]): beginnings for beginnings in best}
    if len(best) == 1 or not most[0]:
        return best[0], []
    chosen = choose_part(part, list(by_prefix))
    return ((), list(by_prefix)) if chosen is None else (by_prefix[chosen], [])


def _by_prefix(
    specs: Mapping[str, TensorSpec], names: list[str], fits: Fits | None = None, part: str = "", tried: int = 8
) -> tuple[dict[str, TensorOnDisk], list[str]]:
    """The names found with other beginnings, see `find_beginnings`; `tried` of them show which prefixes there are."""

    def score(pairs: Sequence[tuple[str, str]]) -> tuple[int, int]:
        fitting = len(pairs) if fits is None else sum(fits(n, specs[r]) for n, r in pairs)
        return fitting, fitting - len(pairs)

    beginnings, several = find_beginnings(names, specs, score, part, names[:tried])
    renamed = {n: replace_beginning(n, beginnings) for n in names}
    return {n: _whole(specs[r]) for n, r in renamed.items() if r in specs}, several


def choose_part(part: str, prefixes: Sequence[str]) -> str | None:
    """The one of several prefixes that is of a part of a model, by the name of its class or component; else None.

    >>> choose_part("CLIPVisionModel", ["text_model.", "vision_model."])
    'vision_model.'
    >>> choose_part("CLIPModel", ["text_model.", "vision_model."])
    """
    exact = [p for p in prefixes if p.rstrip(".") == part]
    words = {p: {w for w in re.split(r"[._]", p) if len(w) > 2} for p in prefixes}
    shared = set.intersection(*words.values())
    named = part.lower().replace("_", "")
    chosen = exact or [p for p in prefixes if any(w in named for w in words[p] - shared)]
    return chosen[0] if len(chosen) == 1 else None


def _converted(base: Model, *, packed: bool = False) -> tuple[dict[str, TensorOnDisk], str]:
    """Every tensor of the base by its name in memory, as transformers loads the architecture of its config."""
    model, why = _in_memory(base.config or {})
    return ({}, why) if model is None else names_on_disk(base, model, model.state_dict(), packed=packed)


def _in_memory(config: Mapping[str, Any]) -> tuple[Any, str]:
    """The model of a config without its values; None, and the reason, if transformers gives none."""
    text = config.get("text_config") or {}  # where transformers 4 writes it for Qwen2-VL
    architecture = next(iter(config.get("architectures") or text.get("architectures") or ()), None)
    if architecture is None:
        return None, "the base's config.json names no architecture, so that its tensors could not be renamed"
    try:
        import transformers
        from transformers import conversion_mapping  # noqa: F401 - transformers 4 has none
    except ImportError:
        return None, (
            f"the names of {architecture} in memory are known to transformers 5, which is not installed: "
            "pip install 'transformers>=5'"
        )
    model_class = getattr(transformers, architecture, None)
    if model_class is None or model_class.config_class.model_type != config.get("model_type"):
        known = f"{architecture} of the model type {config.get('model_type')}"
        return None, f"transformers {transformers.__version__} does not know the architecture {known}"
    try:
        with torch.device("meta"):
            return model_class(transformers.AutoConfig.for_model(**config)), ""
    except Exception as error:  # noqa: BLE001 - a class may raise anything for a config of another program
        return None, f"{architecture} of transformers {transformers.__version__} refuses the config ({error})"


def names_on_disk(
    base: Model, model: Any, state: Mapping[str, Any], *, packed: bool = False
) -> tuple[dict[str, TensorOnDisk], str]:
    """Every tensor of a checkpoint by its name in memory, as transformers 5 loads this `PreTrainedModel`.

    The text is the reason why tensors were left out, if any were.

    Args:
        base, model: the checkpoint and its model.
        state: its state dict; only the keys are used, and with `packed` the shapes.
        packed: also tensors that are packed in one place and separate in the other.
    """
    from transformers import conversion_mapping, core_model_loading

    conversions = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, core_model_loading.WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, core_model_loading.WeightConverter)]
    of_pattern = {p: c for c in converters for p in c.source_patterns}
    groups: dict[str, list[tuple[str, str | None]]] = {}
    for name in base.specs:
        renamed, pattern = core_model_loading.rename_source_key(
            name, renamings, converters, model.base_model_prefix, state
        )
        groups.setdefault(renamed, []).append((name, pattern))
    out: dict[str, TensorOnDisk] = {}
    why = ""
    for renamed, members in groups.items():
        pattern = members[0][1]
        if pattern is None:
            out[renamed] = _whole(base.specs[members[0][0]])
            continue
        converter = of_pattern[pattern]
        if _only_stacks(converter):
            out[renamed] = _stacked(
                base.specs, [(n, p) for n, p in members if p is not None], converter.source_patterns
            )
        elif packed and (rows := _packed(base.specs, renamed, members, converter, state)):
            out |= rows
        elif not why:
            why = f"transformers rearranges {renamed} beyond stacking; such tensors are not mapped"
    return out, why


def _only_stacks(converter: Any) -> bool:
    """Return True for a conversion that stacks separate experts, or concatenates their rows, and does nothing else."""
    steps = [(type(o).__name__, getattr(o, "dim", None)) for o in converter.operations]
    return steps in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


def _packed(
    specs: Mapping[str, TensorSpec],
    renamed: str,
    members: list[tuple[str, str | None]],
    converter: Any,
    state: Mapping[str, Any],
) -> dict[str, TensorOnDisk]:
    """Tensors in memory that are rows of one on disk, or one that is made of several; empty for other conversions."""
    steps = [(type(o).__name__, getattr(o, "dim", None)) for o in converter.operations]
    sources, targets = converter.source_patterns, converter.target_patterns
    if steps == [("Concatenate", 0)] and len(members) == len(sources):
        ordered = [next(specs[n] for n, q in members if q == p) for p in sources]
        ends = list(accumulate((s.shape[0] for s in ordered), initial=0))
        slices = tuple(TensorSlice(s.name, None, *e) for s, e in zip(ordered, pairwise(ends), strict=True))
        return {renamed: TensorOnDisk((ends[-1], *ordered[0].shape[1:]), slices)}
    alternates = steps[:1] == [("Interleave", 0)]
    if len(members) != 1 or steps[-1:] not in ([("Chunk", 0)], [("Split", 0)]) or len(steps) != 1 + alternates:
        return {}
    spec = specs[members[0][0]]
    names = [renamed.replace(targets[0], target) for target in targets]
    if not all(n in state for n in names) or (alternates and len(names) != 2):
        return {}
    sizes = [int(state[n].shape[0]) for n in names]
    if sum(sizes) != spec.shape[0]:
        return {}
    rows = [Block(n, *e) for n, e in zip(names, pairwise(accumulate(sizes, initial=0)), strict=True)]
    if alternates:
        rows = [Block(n, k, k + 1, groups=sizes[0]) for k, n in enumerate(names)]
    return {
        b.name: TensorOnDisk((s, *spec.shape[1:]), (TensorSlice(spec.name),), (b,))
        for b, s in zip(rows, sizes, strict=True)
    }


def _stacked(specs: Mapping[str, TensorSpec], members: list[tuple[str, str]], patterns: list[str]) -> TensorOnDisk:
    rows = {p: next(specs[n].shape[0] for n, q in members if q == p) for p in patterns}
    start = {p: sum(rows[q] for q in patterns[:k]) for k, p in enumerate(patterns)}
    slices = []
    for name, pattern in members:
        index = int(re.findall(r"experts\.(\d+)\.", name)[-1])
        slices.append(TensorSlice(name, index, start[pattern], start[pattern] + rows[pattern]))
    experts = 1 + max(s.index or 0 for s in slices)
    return TensorOnDisk((experts, sum(rows.values()), specs[members[0][0]].shape[1]), tuple(slices))
