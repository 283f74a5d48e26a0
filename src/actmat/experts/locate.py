"""`locate`: one look at a place that a user named gives an open `Model` or `Adapter`, its header and config read.

All later questions (does it have factors, what is its config) are answered by that input; `fit_expert` gives its
deltas.
Families of adapters beyond PEFT's are plug-ins of the group `actmat.experts`. Those of `SIGNED` are imported for a
single file whose tensors have the names of factors; any other is asked about every place that is not a PEFT adapter.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any, Final, TypeAlias

from torch import Tensor

from actmat import plugins
from actmat.checkpoints.base import TensorsHandle
from actmat.checkpoints.codecs import decoded
from actmat.checkpoints.folder import ADAPTER_CONFIG, LORA_FILES
from actmat.checkpoints.formats.safetensors import SAFETENSORS
from actmat.checkpoints.formats.torch_files import TORCH_FILES
from actmat.checkpoints.model import CONFIG, Model, ModelFolder
from actmat.checkpoints.resolve import find_source, is_composed, open_model, open_source
from actmat.checkpoints.resolve import open_handle as open_tensors_handle
from actmat.checkpoints.source import LocalSource, Source
from actmat.errors import CheckpointError, MergeError
from actmat.experts.deltas import AdapterFamily, Deltas, DeltasHandle
from actmat.experts.lora.adapter import Adapter, leave_out
from actmat.experts.lora.fields import StackWord
from actmat.experts.lora.modules import AdapterLayout
from actmat.experts.lora.names import first_factor
from actmat.experts.peft import PEFT
from actmat.experts.restacked import in_layout_of
from actmat.experts.stored import StoredDeltas, UnfittedDeltas
from actmat.layout.ties import check_absent, is_output_head, is_token_table

OpenInput: TypeAlias = Model | Adapter
"""One named input: a full model or an adapter. Closing it closes what was made of it."""
GROUP: Final = "actmat.experts"
SIGNED = ("lycoris", "lora_file")
"""Plug-ins for single files of factors, in the order in which they are asked."""
_MODEL_FILES = (CONFIG, "model_index.json", ADAPTER_CONFIG)


ConvertLayout: TypeAlias = Callable[[Adapter, AdapterLayout], tuple[Adapter, list[str]]]
"""Converts an adapter to the modules, names and factors of a layout; and lists parts that have no form there."""


def locate(
    place: str | Path | Mapping[str, Tensor] | Model,
    stacks: tuple[StackWord, ...] = (),
    handle: TensorsHandle | None = None,
) -> OpenInput:
    """Look at what a user named: a folder, file, hub id, URL, stack of layers, `model+adapter`, or tensors by name.

    Args:
        place: its text, or tensors, or an open model.
        stacks: the user's statements on stacked experts in an adapter.
        handle: of a place, with the versions that remote files must have.

    Raises:
        CheckpointError: nothing there, damaged, or in an unsupported format.
    """
    if not isinstance(place, str | Path) or is_composed(place):
        located: OpenInput = open_model(place)
    else:
        located = _look(find_source(str(place), handle), stacks)
    if isinstance(located, Model):
        check_absent(located)
    if stacks and (isinstance(located, Model) or located.family):
        located.close()
        raise CheckpointError(f"{located.location}: 'stacks' applies to PEFT adapters only: leave it out")
    return located


def locate_in(stack: contextlib.ExitStack, place: str | Path | Model) -> OpenInput:
    """The input at a place, which the stack closes."""
    located = locate(place)
    stack.callback(located.close)
    return located


def _look(source: Source, stacks: tuple[StackWord, ...]) -> OpenInput:
    if (adapter := PEFT.look(source, None, stacks)) is not None:
        return adapter
    file = open_file_of_factors(source)
    try:
        for name, family in _families(source, file):
            if (adapter := family.look(source, file, stacks)) is not None:
                adapter.family = name
                return adapter
        if file is not None and source.named is not None and isinstance(source, LocalSource):
            return decoded(file)
    except MergeError:
        if file is not None:
            file.close()
        raise
    if file is not None:
        file.close()
    return open_source(source)


def _families(source: Source, file: Model | None) -> Iterator[tuple[str, AdapterFamily]]:
    """The plug-ins to ask, in order; each is imported when its turn comes."""
    for name in plugins.names(GROUP):
        if name not in SIGNED:
            yield name, plugins.needed(GROUP, name, AdapterFamily)
    if file is not None and first_factor(file.specs) is not None:
        signed = {n: family for n in SIGNED if (family := plugins.load(GROUP, n, AdapterFamily)) is not None}
        if not signed:
            raise CheckpointError(
                f"{source.location}: is a file of an adapter without {ADAPTER_CONFIG}, which no installed part of "
                "actmat reads"
            )
        yield from signed.items()


def open_file_of_factors(source: Source) -> Model | None:
    """The single file that may hold factors, open, its header read; None without such a file.

    It is a `.safetensors` file, one in a folder that has no other and no `config.json`, or a file of diffusers' name
    `pytorch_lora_weights`.
    """
    names = source.names if source.named is None else [source.named]
    files = [n for n in names if n.endswith(".safetensors")]
    of_model = source.named is None and (len(files) > 1 or any(n in names for n in _MODEL_FILES))
    name = next((n for n in LORA_FILES if n in names), None if of_model or not files else files[0])
    if name is None:
        return None
    try:
        file = (TORCH_FILES if name.endswith(".bin") else SAFETENSORS).open(source.only(name))
    except CheckpointError:
        return None  # opening it as a model gives the error
    folder = replace(file.folder, files=(source,), merged=(name,))  # what lies beside it may be weights, too
    return file if source.named else replace(file, folder=folder)


def without(located: OpenInput, drop: Sequence[str]) -> OpenInput:
    """An input without the stored tensors that the recipe leaves out; itself if it has none of them."""
    if not isinstance(located, Adapter):
        return leave_out(located, drop)[0]
    if located.family in SIGNED:  # without a config its names tell what it is: what is left may be without problems
        model, lost = leave_out(located.model, drop)
        adapter = family_of(located).look(model.folder.files[0], model, ()) if lost else None
        if adapter is not None:
            adapter.family, adapter.drop = located.family, tuple(drop)
            return adapter
    return located.without(drop)


def stored_of(located: OpenInput) -> Model:
    """The tensors of an input by their stored names."""
    return located.model if isinstance(located, Adapter) else located


def fields_of(located: OpenInput) -> Mapping[str, Any]:
    """Fields of `config.json`, or of `adapter_config.json`; empty without such a file."""
    return located.config.fields if isinstance(located, Adapter) else located.config or {}


def read_paths(located: OpenInput) -> dict[str, Path | str]:
    """Folders, files and URLs that an input is read from, which no output may replace, by the user's names."""
    if os.path.exists(located.location):
        return {located.location: Path(located.location)}
    files = stored_of(located).folder.files
    return {s.location: Path(s.address) if isinstance(s, LocalSource) else s.address for s in files}


def require_model(located: OpenInput) -> Model:
    """The full model that an input is.

    Raises:
        CheckpointError: it is an adapter, or a file of factors.
    """
    if isinstance(located, Adapter):
        raise CheckpointError(
            f"{located.location}: expected a full checkpoint, found a {family_of(located).name} adapter. Fix: merge "
            "adapters by 'actmat merge' (-m average averages them), or fold it into its base first "
            "(PeftModel.merge_and_unload, save_pretrained)."
        )
    if (first := first_factor(located.specs, located.config or {})) is not None:
        raise CheckpointError(
            f"{located.location}: expected a full checkpoint, found factors of an adapter, such as '{first}', "
            "which are not weights of a model. Fix: a LoRA file by itself is read from a .safetensors file "
            "(safetensors.torch.save_file); merge one that is part of a model into it first (merge_and_unload, "
            "fuse_lora)"
        )
    return located


def token_tables(located: OpenInput) -> Model | None:
    """Its tensors, if they have tables whose rows can be matched by token; None for an adapter without any."""
    if not isinstance(located, Adapter):
        return require_model(located)
    trained = (*located.extras, *located.copies)
    return located.model if any(is_token_table(n) or is_output_head(n) for n in trained) else None


def family_of(adapter: Adapter) -> AdapterFamily:
    """The family that an adapter is of."""
    return plugins.needed(GROUP, adapter.family, AdapterFamily) if adapter.family else PEFT


def has_factors(located: OpenInput) -> bool:
    """True if its deltas are stored as factors, from which an adapter is merged without a base."""
    return isinstance(located, Adapter) and not family_of(located).why_no_factors(located)


def fit_expert(located: OpenInput, base: Model | None) -> Deltas:
    """The deltas of an input on a base; without one, an adapter for outputs that are adapters.

    >>> import torch
    >>> from actmat.checkpoints.memory import hold_model
    >>> base = hold_model({"w": torch.ones(2)})
    >>> fit_expert(locate({"w": torch.zeros(2)}), base).source("w")
    DeltaSource(name='w', kind='stored', dtype='float32', nbytes=8, rank=0)

    Raises:
        CheckpointError: it does not fit the base; carries all problems.
    """
    if isinstance(located, Adapter):
        family = family_of(located)
        if base is not None:
            return family.fit(located, base)
        reason = family.why_no_factors(located)
        return UnfittedDeltas(located.with_problems((reason,)) if reason else located)
    if base is None:
        raise CheckpointError(f"{located.location}: expected an adapter, found a full checkpoint, which needs a base")
    return StoredDeltas(in_layout_of(base, require_model(located)))


def in_layout(expert: Deltas, layout: AdapterLayout) -> Deltas:
    """An adapter that was opened without a base, with modules, names and factors as a layout has them.

    It stays open as long as the other. Parts that have no form there are among the problems of its `adapter`.
    """
    adapter = expert.adapter
    assert adapter is not None, "only adapters have layouts"
    convert: ConvertLayout | None = plugins.load(GROUP, "layout.image", FunctionType)
    if convert is None:
        converted, problems = adapter, ["no installed part of actmat converts it"]
    else:
        converted, problems = convert(adapter, layout)
    problems = [f"cannot be written as '{layout}': {p}" for p in problems]
    if problems or adapter.problems:
        converted = adapter.with_problems((*adapter.problems, *problems))
    converted.converted_to = layout
    return UnfittedDeltas(converted)


def open_handle(handle: DeltasHandle) -> Deltas:
    """Open the expert that `Deltas.handle` described, in any process that has the same storage.

    Raises:
        CheckpointError: its files are gone or damaged, or remote ones have other versions than the handle says.
    """
    if isinstance(handle, TensorsHandle):
        return StoredDeltas(Model(open_tensors_handle(handle)))
    pinned = TensorsHandle(handle.location, handle.location, etags=handle.etags)
    located = without(locate(handle.location, handle.stacks, pinned), handle.drop)
    if handle.base is None:
        expert = fit_expert(located, None)
        return expert if handle.layout is None else in_layout(expert, handle.layout)
    base = Model(open_tensors_handle(handle.base), ModelFolder(handle.config))
    try:
        if handle.weights is not None and isinstance(located, Adapter):
            located = located.with_rows(replace(located.model, tensors=open_tensors_handle(handle.weights)))
        expert = fit_expert(located, base)
    except CheckpointError:
        base.close()
        raise
    expert.owned = (base,)
    return expert
