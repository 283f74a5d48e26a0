"""`locate`: one look at a place that a user named; `Located`: the opened input, with its header and config.

All later questions (is it an adapter, does it have factors, its config) are answered by the `Located`.
Families of adapters beyond PEFT's are plug-ins of the group `actmat.experts`. Those of `SIGNED` are imported for a
single file whose tensors have the names of factors; any other is asked about every place that is not a PEFT adapter.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Protocol, runtime_checkable

from torch import Tensor

from actmat import plugins
from actmat.checkpoints.base import TensorsHandle, versions_of_files
from actmat.checkpoints.folder import ADAPTER_CONFIG
from actmat.checkpoints.model import Model, ModelFolder
from actmat.checkpoints.resolve import find_source, is_composed, open_model
from actmat.checkpoints.resolve import open_handle as open_tensors_handle
from actmat.checkpoints.source import LocalSource
from actmat.errors import CheckpointError, MergeError
from actmat.experts.base import AdapterFamily, AdapterHandle, Expert, ExpertHandle
from actmat.experts.candidate import Candidate
from actmat.experts.checkpoint import CheckpointExpert
from actmat.experts.fitted import UnfittedAdapter
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.fields import StackWord
from actmat.experts.lora.modules import AdapterLayout
from actmat.experts.lora.names import first_factor, foreign_writer
from actmat.experts.peft import PEFT
from actmat.experts.restacked import in_layout_of
from actmat.layout.ties import check_absent, is_output_head, is_token_table

GROUP: Final = "actmat.experts"
SIGNED = ("lycoris", "lora_file")
"""Plug-ins for single files of factors, in the order in which they are asked."""


@runtime_checkable
class ConvertLayout(Protocol):
    """Convert an adapter to the modules, names and factors of a layout; list parts that have no form there."""

    def __call__(self, adapter: Adapter, layout: AdapterLayout) -> tuple[Adapter, list[str]]:
        """The adapter in the layout, and problems."""


class Located(AbstractContextManager["Located"]):
    """One named input: a full checkpoint or an adapter. Closing it closes what was made of it.

    Attributes:
        place: what the user called it.
        kind: `model` or `adapter`.
        stored: its tensors by their stored names; headers are read, no tensor.
        has_factors: its deltas are stored as factors, from which an adapter is merged without a base.
    """

    place: str
    kind: ClassVar[Literal["model", "adapter"]]
    stored: Model
    has_factors: bool

    @property
    def needs_base(self) -> bool:
        """True for changes to a base, which are not a model by themselves."""
        return self.kind == "adapter"

    @property
    @abc.abstractmethod
    def config(self) -> Mapping[str, Any]:
        """Fields of `config.json`, or of `adapter_config.json`; empty without such a file."""

    def paths(self) -> dict[str, Path | str]:
        """Folders, files and URLs that it is read from, which no output may replace, by the user's names."""
        if os.path.exists(self.place):
            return {self.place: Path(self.place)}
        files = self.stored.folder.files
        return {s.location: Path(s.address) if isinstance(s, LocalSource) else s.address for s in files}

    @abc.abstractmethod
    def model(self) -> Model:
        """The full checkpoint that it is.

        Raises:
            CheckpointError: it is an adapter, or a file of factors.
        """

    @property
    @abc.abstractmethod
    def token_tables(self) -> Model | None:
        """Its tensors, if they have tables whose rows can be matched by token; None for an adapter without any."""

    @abc.abstractmethod
    def with_rows(self, aligned: Model) -> Located:
        """The same input with the rows of another vocabulary; closed with this one."""

    @abc.abstractmethod
    def expert(self, base: Model | None) -> Expert:
        """The source of deltas on a base; without one, an adapter for outputs that are adapters.

        >>> import torch
        >>> from actmat.checkpoints.memory import hold_model
        >>> base = hold_model({"w": torch.ones(2)})
        >>> locate({"w": torch.zeros(2)}).expert(base).source("w")
        DeltaSource(name='w', kind='stored', dtype='float32', nbytes=8, rank=0)

        Raises:
            CheckpointError: it does not fit the base; carries all problems.
        """

    def close(self) -> None:
        """Release files. May be called twice."""
        self.stored.close()

    def __exit__(self, *error: object) -> None:
        self.close()


class LocatedModel(Located):
    """A full checkpoint, or a file that holds no adapter as a whole."""

    kind = "model"
    has_factors = False

    def __init__(self, place: str, stored: Model) -> None:
        self.place, self.stored = place, stored
        check_absent(stored)

    @property
    def config(self) -> Mapping[str, Any]:
        """Fields of `config.json`."""
        return self.stored.config or {}

    def model(self) -> Model:
        """The checkpoint."""
        if (first := first_factor(self.stored.specs, self.config)) is not None:
            raise CheckpointError(
                f"{self.place}: expected a full checkpoint, found factors of an adapter, such as '{first}', "
                + (
                    foreign_writer(first)
                    or "which are not weights of a model. Fix: a LoRA file by itself is read from a .safetensors file "
                    "(safetensors.torch.save_file); merge one that is part of a model into it first (merge_and_unload, "
                    "fuse_lora)"
                )
            )
        return self.stored

    @property
    def token_tables(self) -> Model:
        """The checkpoint."""
        return self.model()

    def with_rows(self, aligned: Model) -> Located:
        """The checkpoint with other rows."""
        return LocatedModel(self.place, aligned)

    def expert(self, base: Model | None) -> Expert:
        """The checkpoint as an expert, in the base's layout."""
        if base is None:
            raise CheckpointError(f"{self.place}: expected an adapter, found a full checkpoint, which needs a base")
        return CheckpointExpert(in_layout_of(base, self.model()))


class LocatedAdapter(Located):
    """An adapter of some family.

    Attributes:
        adapter: its config and modules; problems of its contents are in `Adapter.problems`.
        family: its family.
    """

    kind = "adapter"

    def __init__(self, place: str, adapter: Adapter, family: AdapterFamily) -> None:
        self.place, self.adapter, self.family = place, adapter, family
        self.stored = adapter.model
        self._why_no_factors = family.why_no_factors(adapter)
        self.has_factors = not self._why_no_factors

    @property
    def config(self) -> Mapping[str, Any]:
        """Fields of `adapter_config.json`."""
        return self.adapter.config.fields

    def model(self) -> Model:
        """Raise an error: an adapter is not a model."""
        raise CheckpointError(
            f"{self.place}: expected a full checkpoint, found a {self.family.name} adapter. Fix: give it where an "
            "adapter is accepted, or fold it into its base first (PeftModel.merge_and_unload, save_pretrained)."
        )

    @property
    def token_tables(self) -> Model | None:
        """The stored tensors, if a token table or an output head is among those trained in full."""
        trained = (*self.adapter.extras, *self.adapter.copies)
        return self.stored if any(is_token_table(n) or is_output_head(n) for n in trained) else None

    def with_rows(self, aligned: Model) -> Located:
        """The adapter with tables of other rows; its own stay those of its base."""
        return LocatedAdapter(self.place, self.adapter.with_rows(aligned), self.family)

    def expert(self, base: Model | None) -> Expert:
        """The adapter on its base, or its factors; if it has none, the reason is among its problems."""
        if base is not None:
            return self.family.fit(self.adapter, base)
        adapter = self.adapter
        return UnfittedAdapter(adapter if self.has_factors else adapter.with_problems((self._why_no_factors,)))


def locate(place: str | Path | Mapping[str, Tensor] | Model, stacks: tuple[StackWord, ...] = ()) -> Located:
    """Look at what a user named: a folder, file, hub id, URL, stack of layers, `model+adapter`, or tensors by name.

    Args:
        place: its text, or tensors, or an open checkpoint.
        stacks: the user's statements on stacked experts in an adapter.

    Raises:
        CheckpointError: nothing there, damaged, or in an unsupported format.
    """
    text = str(place) if isinstance(place, str | Path) else "<memory>"
    if not isinstance(place, str | Path) or is_composed(place):
        found: Located = LocatedModel(text, open_model(place))
    else:
        found = _look(text, Candidate(find_source(place), stacks))
    if stacks and not (isinstance(found, LocatedAdapter) and found.family is PEFT):
        found.close()
        raise CheckpointError(f"{text}: 'stacks' applies to PEFT adapters only: leave it out")
    return found


def _look(place: str, candidate: Candidate) -> Located:
    try:
        for family in _families(candidate):
            if (adapter := family.look(candidate)) is not None:
                return LocatedAdapter(place, adapter, family)
        return LocatedModel(place, candidate.model())
    except MergeError:
        candidate.close()
        raise


def _families(candidate: Candidate) -> Iterator[AdapterFamily]:
    """The families to ask, in order; a plug-in is imported when its turn comes."""
    yield PEFT
    for name in plugins.names(GROUP):
        if name not in SIGNED:
            yield plugins.needed(GROUP, name, AdapterFamily)
    if candidate.file is not None and first_factor(candidate.file.specs) is not None:
        signed = [family for name in SIGNED if (family := plugins.load(GROUP, name, AdapterFamily)) is not None]
        if not signed:
            raise CheckpointError(
                f"{candidate.source.location}: is a file of an adapter without {ADAPTER_CONFIG}, which no installed "
                f"part of actmat reads.{plugins.hint(GROUP)}"
            )
        yield from signed


def in_layout(expert: Expert, layout: AdapterLayout) -> Expert:
    """An adapter that was opened without a base, with modules, names and factors as a layout has them.

    It stays open as long as the other. Parts that have no form there are among the problems of its `adapter`.
    """
    adapter = expert.adapter
    assert adapter is not None, "only adapters have layouts"
    convert = plugins.load(GROUP, "layout.image", ConvertLayout)
    if convert is None:
        found, problems = adapter, [f"no installed part of actmat converts it.{plugins.hint(GROUP, prefix='layout')}"]
    else:
        found, problems = convert(adapter, layout)
    if adapter.extras:
        problems.append(f"'{layout}' has no names for its tensors trained in full ({', '.join(adapter.extras)})")
    problems = [f"cannot be written as '{layout}': {p}" for p in problems]
    if problems or adapter.problems:
        found = adapter.with_problems((*adapter.problems, *problems))
    found.converted_to = layout
    return UnfittedAdapter(found)


def open_handle(handle: ExpertHandle) -> Expert:
    """Open the expert that `Expert.handle` described, in any process that has the same storage.

    Raises:
        CheckpointError: its files are gone or damaged, or remote ones have other versions than the handle says.
    """
    if isinstance(handle, TensorsHandle):
        return CheckpointExpert(Model(open_tensors_handle(handle)))
    located = locate(handle.location, handle.stacks)
    if handle.base is None:
        found = located.expert(None)
        return _as_it_was(found if handle.layout is None else in_layout(found, handle.layout), handle)
    base = Model(open_tensors_handle(handle.base), ModelFolder(handle.config))
    try:
        if handle.weights is not None:
            located = located.with_rows(replace(located.stored, tensors=open_tensors_handle(handle.weights)))
        expert = located.expert(base)
    except CheckpointError:
        base.close()
        raise
    expert.adopt(base)
    return _as_it_was(expert, handle)


def _as_it_was(expert: Expert, handle: AdapterHandle) -> Expert:
    """The expert, closed and refused if its remote files are not those of the handle."""
    now = {name: (size, etag) for name, size, etag in versions_of_files(expert.identity())}
    problems = [
        f"{handle.location}: {name} had {size} bytes, version {etag}; found "
        + ("{} bytes, version {}".format(*now[name]) if name in now else "no such file")
        for name, size, etag in handle.etags
        if now.get(name) != (size, etag)
    ]
    if problems:
        expert.close()
        raise CheckpointError(
            f"{handle.location}: the adapter changed since it was opened. Likely cause: a running upload. Fix: wait "
            "until that is done, then run again.",
            problems,
        )
    return expert
