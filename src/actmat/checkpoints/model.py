"""`Model`: tensors, and the folder that gives them their meaning. A view of a model is another such pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from actmat.bounds import parse_json, read_object
from actmat.checkpoints.base import Tensors, TensorSpec
from actmat.checkpoints.folder import read_config
from actmat.checkpoints.side_files import SideFiles
from actmat.checkpoints.source import Source, TensorFiles
from actmat.errors import CheckpointError, Note, NoteSeverity

Config: TypeAlias = Mapping[str, Any]
"""Fields of a `config.json`."""
CONFIG = "config.json"
COMPONENTS = "components"
"""Key of the config of several models in one folder with the configs of each."""
GENERATION = "generation_config.json"


@dataclass(frozen=True)
class ModelFolder:
    """Everything that an input has beside its tensors: the raw material of what is compared, copied and written.

    Args:
        parsed: content of `config.json`; of a pipeline, its class with the configs of all components; None without one;
            the error of a file that cannot be read.
        written: path in an output -> config that is written there instead of a copy.
        files: files of every model that it is made of; the first has the side files. Empty for tensors in memory.
        merged: names of the first one's files that hold the merged weights.
        parts: beginning of the names of a module's tensors -> its folder, of sentence-transformers.
        header: texts in the headers of the weight files.
        texts: name -> text of a file that an output gets instead of a copy, such as a new tokenizer's.
        notes: remarks for the plan on what was read or left out; begin with a small letter.
        absent: names that an index lists and no file holds, which only ties can explain (`layout.ties.check_absent`).
        untied: output heads that the stored model ties, and this one has apart -> the table that they equal.
    """

    parsed: Config | CheckpointError | None = None
    written: Mapping[str, Config] = field(default_factory=dict)
    files: tuple[Source, ...] = ()
    merged: tuple[str, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)
    header: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    absent: tuple[str, ...] = ()
    untied: Mapping[str, str] = field(default_factory=dict)

    @property
    def config(self) -> Config | None:
        """The parsed config, or None without one.

        Raises:
            CheckpointError: the file cannot be read.
        """
        if isinstance(self.parsed, CheckpointError):
            raise self.parsed
        return self.parsed

    @property
    def copies_config(self) -> bool:
        """True if an output gets a copy of `config.json`, unless one is `written`."""
        return bool(self.files) and self.files[0].directory is not None

    @cached_property
    def side_files(self) -> SideFiles:
        """Files other than the weights: those that are copied to an output, and the rest."""
        return self.files[0].side_files(self.merged) if self.files else SideFiles()

    @cached_property
    def directory(self) -> Path | None:
        """Local folder of the side files, downloaded first if they are not local; None without one."""
        return self.files[0].fetch_sidecars() if self.files else None

    def object(self, name: str) -> dict[str, Any]:
        """The object in a JSON file that an output gets from here; empty without one.

        Raises:
            CheckpointError: the file cannot be read.
        """
        if name in self.texts:
            return dict(parse_json(self.texts[name]))
        return read_object(self.files[0].fetch(name)) if name in self.side_files.kept else {}

    def tokens(self) -> Sequence[str]:
        """Tokens by their rows, of a format that stores them in its header; empty for others."""
        return ()

    def header_settings(self) -> Mapping[str, Any]:
        """Settings of the tokenizer that a format stores in its header: templates, numbers of tokens; else empty."""
        return {}

    def converted_tokenizer(self) -> Mapping[str, str]:
        """Name -> text of a tokenizer's files, made from a header that holds one; takes seconds."""
        return {}

    def noted(self, *texts: str, severity: NoteSeverity = "note") -> ModelFolder:
        """The folder with more remarks."""
        return replace(self, notes=(*self.notes, *(Note(severity, "", text) for text in texts)))

    def with_config(self, change: Callable[[Config], Config]) -> ModelFolder:
        """The folder with a changed config, also where it is written or copied."""
        config = self.config
        if config is None:
            return self
        written = self.written.get(CONFIG, config if self.copies_config else None)
        top = {} if written is None else {CONFIG: change(written)}
        return replace(self, parsed=change(config), written={**self.written, **top})


@dataclass(frozen=True, eq=False, repr=False)
class Model(AbstractContextManager["Model"]):
    """A full model, or the stored tensors of an adapter with its files. Closing it closes the tensors.

    >>> import torch
    >>> from actmat.checkpoints.resolve import open_model
    >>> with open_model({"w": torch.ones(2, 3)}) as model:
    ...     model.specs["w"].shape, model.config
    ((2, 3), None)
    """

    tensors: Tensors
    folder: ModelFolder = field(default_factory=ModelFolder)

    @property
    def location(self) -> str:
        """Its location as the user wrote it, for messages."""
        return self.tensors.location

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Name -> spec of every tensor."""
        return self.tensors.specs

    @property
    def config(self) -> Config | None:
        """Parsed `config.json`, or None without one; see `ModelFolder.config`."""
        return self.folder.config

    def close(self) -> None:
        """Close the tensors. May be called twice."""
        self.tensors.close()

    def __repr__(self) -> str:
        return f"<Model: {self.tensors!r}>"

    def __exit__(self, *error: object) -> None:
        self.close()


def stored_model(tensors: TensorFiles) -> Model:
    """The model of which these are the weights, with its config and other files."""
    source = tensors.source
    try:
        config: Config | CheckpointError | None = read_config(source.directory)
    except CheckpointError as error:  # raised when the config is used, with all problems of the inputs
        config = error
    folder = ModelFolder(config, {}, (source,), tensors.labels, header=tensors.header, absent=tensors.absent)
    return Model(tensors, folder.noted(*source.notes, *tensors.notes))


@dataclass(frozen=True, slots=True)
class Format:
    """Declaration of a format: one of the core, or a plug-in of the group `actmat.formats`."""

    claims: Callable[[Source], bool]  # true if `Source.weights` has files of this format, maybe among others
    open: Callable[[Source], Model]  # the model in a source that is claimed; reads headers, no tensor
