"""Names of the modules of adapters that are merged without a base, in one form.

One layer has several names: `model.layers.0` in a language model, `model.language_model.layers.0` where that is part of
another, `layers.0` in a model without a head. PEFT ignores the factors of modules that a model lacks, without an error,
so that adapters in two forms would become one of which half is lost. The form of the output is that of the class that
its config names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import combinations

from actmat.experts.lora.adapter import Adapter

Prefix = tuple[str, ...]
"""Components of a name before the list of layers, or before the last one."""

_TRANSPARENT = frozenset({"model", "language_model", "base_model", "transformer", "unet"})
"""Components that models add around a part without having another one of the same names."""

_WRAPPERS = re.compile(r"(?:OptimizedModule|FSDP|FullySharded|(?:Distributed)?DataParallel|DeepSpeed)")
"""Classes around a model, which do not tell which one."""


def in_one_form(labels: Sequence[str], adapters: Sequence[Adapter]) -> tuple[list[Adapter], list[str], list[str]]:
    """The adapters with names of one form; problems; notes."""
    problems = _problems_of_classes(labels, adapters)
    listed = [(a.modules, (*a.modules, *a.extras)) for a in adapters]
    split = [{n: _split(n if n in having else n.rpartition(".")[0]) for n in names} for having, names in listed]
    heads: dict[str, list[set[Prefix]]] = {}
    for k, names in enumerate(split if all(a.layout in ("peft", "diffusers") for a in adapters) else ()):
        for head, container in names.values():
            heads.setdefault(container, [set() for _ in adapters])[k].add(head)
    renamed: list[dict[Prefix, Prefix]] = [{} for _ in adapters]
    claim = adapters[0].config.trained_class or str(adapters[0].config.fields.get("task_type") or "")
    for container, of_adapters in heads.items():
        forms = _related(of_adapters)
        if not forms:
            continue
        target = _form_of(claim, forms, of_adapters)
        if target is None:
            problems.append(_undecided(labels, container, forms, of_adapters, claim))
            break
        for known, names_of in zip(renamed, of_adapters, strict=True):
            known.update({head: target for head in names_of & forms if head != target})
    notes = [
        f"expert '{label}' calls its modules '{'.'.join(old)}.*', which are '{'.'.join(new)}.*' in the output"
        for label, names_of in zip(labels, renamed, strict=True)
        for old, new in names_of.items()
    ]
    rows = zip(adapters, split, renamed, strict=True)
    return [_renamed(a, names, names_of) if names_of else a for a, names, names_of in rows], problems, notes


def _split(module: str) -> tuple[Prefix, str]:
    """Components before the list of layers, and its name.

    >>> _split("model.layers.0.mlp.up_proj"), _split("lm_head")
    ((('model',), 'layers'), ((), 'lm_head'))
    """
    parts = module.split(".")
    end = next((i for i, part in enumerate(parts) if i and part.isdecimal()), len(parts))
    return tuple(parts[: end - 1]), parts[end - 1]


def _related(of_adapters: Sequence[set[Prefix]]) -> frozenset[Prefix]:
    """Heads of different adapters that may be names of one thing: equal but for what models add, or one ends so."""
    related: set[Prefix] = set()
    for first, second in combinations(sorted(set().union(*of_adapters)), 2):
        if any({first, second} <= prefixes for prefixes in of_adapters):
            continue  # one model has both
        short, long = sorted((first, second), key=len)
        is_end = long[len(long) - len(short) :] == short
        if is_end or _bare(first) == _bare(second):
            related |= {first, second}
    return frozenset(related)


def _bare(head: Prefix) -> Prefix:
    return tuple(part for part in head if part not in _TRANSPARENT)


def _form_of(claim: str, forms: frozenset[Prefix], of_adapters: Sequence[set[Prefix]]) -> Prefix | None:
    """The form of the class, or of the task, that a config names; None if that is unknown.

    >>> forms = frozenset({("model",), ("model", "language_model")})
    >>> _form_of("LlamaForCausalLM", forms, []), _form_of("LlavaForConditionalGeneration", forms, [])
    (('model',), ('model', 'language_model'))
    """
    if len({_bare(_without_prefix(f, claim)) for f in forms}) > 1 or any(
        len(heads & forms) > 1 for heads in of_adapters
    ):
        return None
    has_head = not claim.endswith("Model") and claim != "FEATURE_EXTRACTION"
    inner = [f for f in forms if "language_model" in f]
    candidates = list(forms)
    if inner:
        if not has_head or "For" not in claim:
            return None
        is_multimodal = "ForConditionalGeneration" in claim or "ImageTextToText" in claim
        candidates = inner if is_multimodal else [f for f in forms if f not in inner]
        if is_multimodal and len(candidates) > 1:
            return None
    by_length = sorted(candidates, key=len)
    if len(by_length) > 1 and len(by_length[0]) == len(by_length[-1]):
        return None
    is_component = any("unet" in f or "transformer" in f for f in forms) and not claim
    return by_length[-1 if has_head else 0] if claim or is_component else None


def _without_prefix(head: Prefix, claim: str) -> Prefix:
    """A head without the name that a model with a head gives the model in it, such as `bert`."""
    name = re.split(r"For[A-Z]|Model|LMHead", claim)[0].lower()
    return head[1:] if head and name.endswith(head[0].replace("_", "")) else head


def _undecided(
    labels: Sequence[str], container: str, forms: frozenset[Prefix], of_adapters: Sequence[set[Prefix]], claim: str
) -> str:
    listed = ", ".join(
        f"'{'.'.join((*head, container))}' in {label}"
        for label, heads in zip(labels, of_adapters, strict=True)
        for head in sorted(heads & forms)
    )
    return (
        f"the adapters name the same modules differently ({listed}), and their configs do not tell which names the "
        f"model has (auto_mapping.base_model_class or task_type: {claim or 'not given'}). PEFT would ignore those of "
        "the others. Fix: merge with the base (--base ...), which tells, or save the adapters from one class of model"
    )


def _problems_of_classes(labels: Sequence[str], adapters: Sequence[Adapter]) -> list[str]:
    """Adapters whose configs name classes of different models, such as the two towers of CLIP."""
    classes: dict[str, str] = {}
    for label, adapter in zip(labels, adapters, strict=True):
        classes.setdefault(adapter.config.trained_class, label)
    stems = {re.split(r"For[A-Z]|Model|LMHead", name)[0]: name for name in classes if not _WRAPPERS.match(name)}
    stems.pop("", None)
    for a, b in combinations(stems, 2):
        if not a.startswith(b) and not b.startswith(a):
            return [
                f"the adapters were trained on different classes of models: {stems[a]} ({classes[stems[a]]}) and "
                f"{stems[b]} ({classes[stems[b]]}). Fix: merge with the base that has both (--base ...)"
            ]
    return []


def _renamed(adapter: Adapter, names: Mapping[str, tuple[Prefix, str]], heads: Mapping[Prefix, Prefix]) -> Adapter:
    def new(name: str) -> str:
        head = names[name][0]
        rest = name.split(".")[len(head) :]
        return ".".join((*heads.get(head, head), *rest))

    extras = {new(n): stored for n, stored in adapter.extras.items()}
    return adapter.renamed({new(n): n for n in adapter.modules}, extras)
