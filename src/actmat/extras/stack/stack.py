"""A stack: layers of one or several models, one after the other, as one model ("frankenmerge").

    base[0:16] + math[8:24]

The layers are renumbered from 0. Tensors before the layers (embeddings) come from the first part, tensors after them
(final norm, output head) from the last part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from actmat.checkpoints.composed import Composed, whole
from actmat.checkpoints.layer_names import StackPart, is_before_layers, split_layer, stack_parts
from actmat.checkpoints.model import CONFIG, Model, ModelFolder
from actmat.checkpoints.resolve import commit_of
from actmat.checkpoints.untied import TIE
from actmat.errors import CheckpointError, first_of
from actmat.extras.stack.layers import Slice, depth_of, restacked, without_layers
from actmat.identity.agreement import OutputChoice, agree
from actmat.identity.configs import InputAgreement, compare_configs, listed
from actmat.identity.entries import label_names
from actmat.layout.ties import is_output_head

SAME_KEYS = ("model_type", "hidden_size", "n_embd", "num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Config entries that must be equal in all parts."""
ONE_VOCABULARY = "stack models of one vocabulary (resize_token_embeddings)"


def open_stack(location: str, open_part: Callable[[str], Model]) -> Model:
    """Open every model of a stack once with `open_part`; reads only headers. Closing the stack closes them.

    Config, tokenizer and code files are those of the first.

    Raises:
        CheckpointError: a model cannot be opened, lacks layers, or has other shapes; lists all problems.
    """
    parts = stack_parts(location)
    with contextlib.ExitStack() as stack:
        opened: dict[str, Model] = {}
        problems: list[str] = []
        for part in parts:
            if part.location in opened:
                continue
            try:
                opened[part.location] = stack.enter_context(open_part(part.location))
            except CheckpointError as error:
                problems += error.problems
        if not problems:
            problems = _problems(parts, opened)
        if problems:
            raise CheckpointError(f"The stack {location} cannot be built.", problems)
        stack.pop_all()
        return _stacked(location, [(opened[p.location], p) for p in parts])


def _stacked(location: str, parts: Sequence[tuple[Model, StackPart]]) -> Model:
    """The model of layers of open models.

    Args:
        location: the stack as given by the user.
        parts: model and layers of every part.
    """
    origins, first = _origins(parts), parts[0][0]
    models = list({id(m): m for m in [first, *(model for model, _ in origins.values())]}.values())
    number = {id(model): k for k, model in enumerate(models)}
    specs = {
        name: replace(model.specs[source], name=name, file=f"{model.location}/{model.specs[source].file}")
        for name, (model, source) in origins.items()
    }
    stored = {(id(model), source): name for name, (model, source) in reversed(origins.items())}
    shared = {n: stored.get((id(m), m.tensors.aliases.get(source, ""))) for n, (m, source) in origins.items()}
    tensors = Composed(
        [model.tensors for model in models],
        {name: whole(model.specs[source], number[id(model)]) for name, (model, source) in origins.items()},
        specs,
        {name: target for name, target in shared.items() if target is not None},
        location=location,
        address=" + ".join(str(replace(part, location=_pinned(model, part.location))) for model, part in parts),
    )
    config = None if first.config is None else restacked(_slices(parts))[0]
    agreed, last = InputAgreement(), parts[-1][0]
    if len(models) > 1:
        agreed = agree(
            [("base", first), (last.location, last)], OutputChoice("stack", files_from="base", fix=ONE_VOCABULARY)
        )
    if config is not None and CONFIG in agreed.configs:
        config = {**config, TIE: True}
    folder = ModelFolder(
        config,
        written={} if config is None else {CONFIG: config},
        files=tuple(dict.fromkeys(file for model in models for file in model.folder.files)),
        merged=first.folder.merged,
        absent=tuple(dict.fromkeys(name for model in models for name in model.folder.absent)),
    )
    warnings = [*_of_parts(agreed, first, last), *_lost_tensors(models, last, origins)]
    return Model(tensors, folder.noted(*warnings, severity="warning").noted(*_notes(models)))


def _of_parts(agreed: InputAgreement, first: Model, last: Model) -> list[str]:
    """Warnings on a stack, whose token table and files are those of its first part, and whose head is the last's."""
    warnings = [*agreed.warnings, *agreed.notes]
    words = f"table and files are those of the first part, and the output head is that of the last, '{last.location}'"
    if agreed.problems:
        warnings.append(f"{words}, which has other tokens in its rows: {ONE_VOCABULARY}")
    labels = [names for part in (first, last) if (names := label_names(part.config))]
    if len(set(labels)) > 1:
        warnings.append(f"{words}, whose rows have other labels: {first_of(labels[1])}")
    return warnings


def _lost_tensors(models: Sequence[Model], last: Model, origins: Mapping[str, tuple[Model, str]]) -> list[str]:
    """Warnings on tensors that the stack does not take, and on those that its first part lacks or has alone."""
    lost = [f"{n} ({m.location})" for m in models for n in m.specs if split_layer(n) is None and n not in origins]
    added = [n for n in last.specs if n in origins and n not in models[0].specs and split_layer(n) is None]
    first, unlike = _layers(models[0]), []
    for model in models[1:]:
        taken = {layer[1] for m, n in origins.values() if m is model and (layer := split_layer(n)) is not None}
        layers = _layers(model)
        names = sorted(set().union(*(first[k] ^ layers[k] for k in taken & first.keys())))
        unlike += [f"{n} ({'only' if n in model.specs else 'not'} in {model.location})" for n in names]
    rows = {
        "tensors that are neither in layers nor in the part that gives them are left out": lost,
        f"tensors that the first part does not have are those of {last.location}": added,
        "layers of one number have other tensors than in the first part": unlike,
    }
    return [f"{text}: {first_of(names)}" for text, names in rows.items() if names]


def _layers(model: Model) -> dict[int, set[str]]:
    """Names of tensors by the number of their layer."""
    out: dict[int, set[str]] = {}
    for name in model.specs:
        if (layer := split_layer(name)) is not None:
            out.setdefault(layer[1], set()).add(name)
    return out


def _pinned(model: Model, location: str) -> str:
    """Address of a model on the hub with its commit; the location of any other."""
    return address if commit_of(address := model.tensors.handle().address) else location


def _slices(parts: Sequence[tuple[Model, StackPart]]) -> list[Slice]:
    prefix = next((layer[0] for n in parts[0][0].specs if (layer := split_layer(n)) is not None), "")
    return [Slice(m.config or {}, p.start, p.stop, prefix) for m, p in parts]


def _origins(parts: Sequence[tuple[Model, StackPart]]) -> dict[str, tuple[Model, str]]:
    """Origin of every tensor of the stack: embeddings, layers, the rest."""
    first, last = parts[0][0], parts[-1][0]
    out = {n: (first, n) for n in first.specs if is_before_layers(n)}
    offset = 0
    for model, part in parts:
        for name in model.specs:
            layer = split_layer(name)
            if layer is not None and part.start <= layer[1] < part.stop:
                out[f"{layer[0]}{offset + layer[1] - part.start}{layer[2]}"] = model, name
        offset += part.stop - part.start
    after = [n for n in last.specs if split_layer(n) is None and not is_before_layers(n)]
    return out | {n: (last, n) for n in after}


def _problems(parts: Sequence[StackPart], opened: Mapping[str, Model]) -> list[str]:
    """Problems that prevent stacking these parts."""
    problems: list[str] = []
    stacks: dict[str, str] = {}
    for part in dict.fromkeys(parts):
        layers = [layer for n in opened[part.location].specs if (layer := split_layer(n)) is not None]
        prefixes = sorted({prefix for prefix, _, _ in layers})
        count = 1 + max((number for _, number, _ in layers), default=-1)
        if len(prefixes) != 1:
            listed = ", ".join(f"'{p}'" for p in prefixes) or "none"
            problems.append(f"{part.location}: expected one stack of numbered layers, found {listed}")
            continue
        stacks.setdefault(prefixes[0], part.location)
        if (depth := depth_of(opened[part.location].config or {})) is not None and depth > count:
            problems.append(
                f"{part.location}: config.json says {depth} layers, and {count} are stored: an incomplete folder?"
            )
        if not part.start < part.stop <= count:
            problems.append(
                f"{part}: expected at least one layer within [0:{count}], the layers of the model; the "
                "second number is excluded"
            )
    if len(stacks) > 1:
        listed = ", ".join(f"'{prefix}' in {location}" for prefix, location in stacks.items())
        problems.append(f"the layers have different names: {listed}. Likely cause: models of different architectures")
    problems += _disagreements(opened)
    first, last = (opened[p.location] for p in (parts[0], parts[-1]))
    heads = [n for n in first.specs if is_output_head(n)]
    if heads and not any(map(is_output_head, last.specs)):
        problems.append(
            f"'{heads[0]}' is in {first.location} and not in {last.location}, whose table of tokens stands for it: the "
            "stack would have no output head. Fix: save the last part with a head of its own"
        )
    outside = [n for n in first.specs if split_layer(n) is None and n in last.specs]
    if unlike := [n for n in outside if first.specs[n].shape != last.specs[n].shape]:
        problems.append(
            f"{first_of(unlike)}: other shapes in {first.location} than in {last.location}, and a stack has the table "
            f"of the first part and the head of the last. Fix: {ONE_VOCABULARY}"
        )
    placed = [(opened[p.location], p) for p in parts]
    return problems if problems or placed[0][0].config is None else restacked(_slices(placed))[1]


def _notes(models: Sequence[Model]) -> tuple[str, ...]:
    """A note on entries of config.json that differ between the parts, except those of each layer."""
    first, *others = [(m.location, without_layers(m.config)) for m in models if m.config is not None] or [("", {})]
    differences, _ = compare_configs(first[1], dict(others))
    owner = f"'{first[0]}'"
    words = f"entries of the parts differ, and are written as in {owner}: {listed(differences, owner)}"
    return (f"config.json: {words}",) if differences else ()


def _disagreements(opened: Mapping[str, Model]) -> list[str]:
    """Problems: config entries that differ but must be equal."""
    problems = []
    for key in SAME_KEYS:
        values = {n: c.config[key] for n, c in opened.items() if c.config is not None and key in c.config}
        if len({str(v) for v in values.values()}) > 1:
            listed = ", ".join(f"{v} in {n}" for n, v in values.items())
            problems.append(f"config.json: '{key}' is {listed}; layers of these models cannot be stacked")
    return problems
