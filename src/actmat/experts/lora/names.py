"""Names of factors as others write them: their signs, and one canonical form.

Trainers save names with what wraps a model or an adapter: `torch.compile`, FSDP, activation checkpointing, DDP, and the
adapter's own name. PEFT loads `base_model.model.MODULE.lora_A.weight` and ignores any other name without an error.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from actmat.checkpoints.composed import renamed
from actmat.checkpoints.model import Model
from actmat.errors import CheckpointError

PREFIX = "base_model.model."
"""Beginning of the names in an adapter of PEFT."""

_WRAPPERS = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module", "_forward_module"}
)
"""Components that `torch.compile`, FSDP, activation checkpointing and Lightning add, anywhere in a name."""

_BEGIN = re.compile(rf"^(?:module\.)*(?:{re.escape(PREFIX)}(?:module\.)*)?")
_PLAIN = re.compile(
    r".\.(?:lora_(?:down|up|[AB]|[AB]\.default)\.weight|(?:to_\w+_lora|lora|lora_linear_layer)\.(?:down|up)\.weight"
    r"|(?:hada|lokr|oft|boft|ia3|glora|bora)_[^.]*(?:\.\w+)?"
    r"|(?:dora_scale|lora_magnitude_vector|lora_mid|on_input)[^.]*(?:\.\w+)?)$"
)
"""Names of factors of LoRA and of related families that no architecture has by itself."""

_TUNERS = (
    *("lora", "lycoris", "locon", "hada", "lokr", "oft", "boft", "ia3", "glora", "bora", "vera_lambda", "pvera_lambda"),
    *("vblora", "randlora", "tinylora", "unilora", "gralora", "delora", "fourierft", "waveft", "shira", "hira", "hra"),
    *("c3a", "road", "poly", "bone", "miss", "deft", "beft", "osf", "frod", "psoft", "adamss", "peanut", "lily"),
    *("ln_tuning", "supertuning", "shadow", "trainable_tokens", "dora"),
)
"""Beginnings of the components that PEFT's tuners and LyCORIS name their tensors by, followed by an underscore."""

_LIKE = re.compile(
    rf"(?:^|\.)(?:{'|'.join(_TUNERS)})_|(?:^|\.)vera_[AB](?:\.|$)|(?<![a-z])lora\d*[_.]?(?:[abe]|down|up|mid)(?![a-z])"
    r"|lora\w*\.(?:down|up|[ab])(?![a-z])|\.on_input$",
    re.IGNORECASE,
)
_SIDE = re.compile(r"(?P<module>.+)[._](?P<side>[ab][12]|[ABab])(?:\.weight)?")
_NAMED = re.compile(
    r"(?P<factor>.+\.lora_(?:[ABE]|embedding_[AB]|magnitude_vector)|.+\.modules_to_save)"
    r"\.(?P<name>(?!weight$|bias$)[^.]+)(?P<leaf>\.[\w.]+)?"
)


def looks_like_factor(name: str) -> bool:
    """True for a name that a factor or a scale of any known sort of adapter may have.

    >>> [looks_like_factor(n) for n in ("a.q_proj.lora_a", "0.processor.qkv_lora1.down.weight", "att.w_lora.lora.0.weight")]
    [True, True, False]
    """  # noqa: E501 - an example
    return _LIKE.search(name) is not None


def first_factor(names: Iterable[str], config: Mapping[str, Any] | None = None) -> str | None:
    """The first name of a factor of an adapter, None without any; a scale by itself is not one.

    >>> first_factor(["a.norm", "a.lora_up.weight"]), first_factor(["a.lora_A.style"]), first_factor(["a.w", "b.alpha"])
    ('a.lora_up.weight', 'a.lora_A.style', None)
    >>> first_factor(["q.A.weight", "q.B.weight"]), first_factor(["q.A.weight", "q.B.weight", "norm.weight"])
    ('q.A.weight', None)

    Args:
        config: that of a model. If it has settings of LoRA, factors with other names than a trainer's are of the
            architecture, as those of Phi-4-multimodal.
    """
    of_architecture, listed = any("lora" in str(key) for key in config or ()), list(names)
    sides: dict[str, list[str]] = {}
    for name in listed:
        if _PLAIN.search(name) is not None or (not of_architecture and looks_like_factor(name)):
            return name
        if (match := _SIDE.fullmatch(name)) is not None:
            of_module = sides.setdefault(match["module"], [])
            of_module.append(match["side"])
            if {"a1", "a2", "b1", "b2"} <= set(of_module):
                return name  # of GLoRA
    are_pairs = all(sorted(map(str.lower, of_module)) == ["a", "b"] for of_module in sides.values())
    only_pairs = 2 * len(sides) == len(listed) and are_pairs
    return listed[0] if sides and only_pairs and not config else None


def unwrapped(name: str) -> str:
    """A name without what wraps the model, and without PEFT's prefix.

    >>> unwrapped("module.base_model.model._orig_mod.h.0._checkpoint_wrapped_module.c_attn.lora_A.weight")
    'h.0.c_attn.lora_A.weight'
    """
    bare = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    return _BEGIN.sub("", bare)


def without_adapter_name(names: Collection[str]) -> dict[str, str]:
    """Names -> names without the name of the adapter, which state dicts of PEFT hold, if all have the same one.

    >>> without_adapter_name(["q.lora_A.style.weight", "q.lora_B.style.weight"])
    {'q.lora_A.style.weight': 'q.lora_A.weight', 'q.lora_B.style.weight': 'q.lora_B.weight'}
    """
    named = {n: m for n in names if (m := _NAMED.fullmatch(n)) is not None}
    if len({m["name"] for m in named.values()}) != 1:
        return {n: n for n in names}
    plain = {n: named[n]["factor"] + (named[n]["leaf"] or "") if n in named else n for n in names}
    return {n: text.replace(".modules_to_save.", ".") for n, text in plain.items()}


def adapter_name(name: str) -> str:
    """Name of the adapter in a tensor's name; empty without one."""
    return "" if (match := _NAMED.fullmatch(name)) is None else match["name"]


def canonical(weights: Model) -> Model:
    """The weights of a PEFT adapter by the names that PEFT saves; closed with them.

    Raises:
        CheckpointError: two tensors have the same name in that form.
    """
    plain = without_adapter_name(weights.specs)
    names: dict[str, str] = {}
    for stored, without in plain.items():
        bare = unwrapped(without)
        name = bare if bare.startswith("base_model.") else PREFIX + bare
        if (other := names.setdefault(name, stored)) != stored:
            raise CheckpointError(
                f"{weights.location}: expected one tensor per name, found '{other}' and '{stored}', which are both "
                f"'{name}' without the names of wrappers. Likely cause: two adapters in one file. Fix: save each by "
                "itself (PeftModel.save_pretrained)"
            )
    if all(new == old for new, old in names.items()):
        return weights
    return replace(weights, tensors=renamed(weights.tensors, names))
