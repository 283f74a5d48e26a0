"""`Inventory`: what an input has beside its tensors, whatever the input is: settings, files, tokens, other weights."""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from actmat.bounds import parse_json, read_bytes, read_object
from actmat.checkpoints.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, INDEX_SUFFIX, may_be_weights
from actmat.checkpoints.hashing import hash_file
from actmat.checkpoints.model import CONFIG, GENERATION, Model, ModelFolder
from actmat.checkpoints.side_files import MODULES, PIPELINE, SCHEDULER_CONFIG, SideFiles, is_weights
from actmat.checkpoints.source import Source
from actmat.errors import CheckpointError, first_names
from actmat.experts.deltas import Deltas
from actmat.experts.stored import UnfittedDeltas
from actmat.identity.templates import chat_template
from actmat.identity.tokens import TOKENIZER, WORDS, TokenInput, TokenReader, tokenizer_file
from actmat.layout.ties import is_output_head, is_token_table

DAMAGED = "a file that cannot be read"
TEMPLATES = "the chat template"
"""Stands for the files and entries that hold all of them."""
_UNREAD = re.compile(r"(?i)(^|/)(readme|licen[sc]e|notice|citation|use_policy|requirements)[^/]*$|\.(md|rst|html)$")
"""Files that no program reads with a model."""
HARMLESS = re.compile(
    r"^_|_version$|^(name_or_path|chat_template|added_tokens_decoder|tokenizer_file|model_max_length"
    r"|special_tokens_map_file|is_local|local_files_only|backend|clean_up_tokenization_spaces|from_slow|auto_map)$"
)
"""Entries of settings by which nothing is computed, or that are compared elsewhere."""
_KINDS = ("_class", "_type")
"""Ends of entries that name classes, of which a fast one gives the same."""
_WHOLE = re.compile(
    r"(pytorch_|tf_|flax_|diffusion_pytorch_|rust_)?model\b|consolidated|(onnx|original|openvino|coreml|gguf)/"
    r"|.*\.(gguf|llamafile)$"
)
"""Beginnings of files and folders that hold the whole model again."""
_EARLIER = re.compile("checkpoint|global_step")
"""Beginnings of folders that hold an earlier state of it."""
_NUMBER = re.compile(r"\d+")
_ADDED_BY_TASK = frozenset({"classifier", "score"})
"""Heads that PEFT lists for every classifier, of which a model has one."""


def matches(path: str, patterns: Sequence[str]) -> bool:
    """True if a path has the form of one of these."""
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def files_of(model: Model | Deltas) -> Source | None:
    """Files of an input's folder; None for a single file, whose folder may hold the files of other models."""
    for files in _folder(model).files[:1]:
        folder = files.whole()
        if files.named is None or files.named.endswith(INDEX_SUFFIX) or ADAPTER_CONFIG in folder.names:
            return folder
    return None


def _folder(model: Model | Deltas) -> ModelFolder:
    return model.folder if isinstance(model, Model) else model.model.folder


@dataclass(frozen=True)
class Inventory:
    """An input of a command.

    Args:
        label: `base`, or the name of an expert.
        model: the input.
        reader: of tokens.
    """

    label: str
    model: Model | Deltas
    reader: TokenReader

    @property
    def folder(self) -> ModelFolder:
        """Everything beside the tensors, as it was opened."""
        return _folder(self.model)

    @property
    def is_adapter(self) -> bool:
        """True for an adapter, which has few of a model's files."""
        return isinstance(self.model, Deltas) and self.model.needs_base

    @cached_property
    def source(self) -> Source | None:
        """Files of its folder, see `files_of`."""
        return files_of(self.model)

    @cached_property
    def side(self) -> SideFiles:
        """The files that an output may get."""
        return SideFiles() if self.source is None else self.folder.side_files

    @property
    def weighted_modules(self) -> set[str]:
        """Folders of modules of sentence-transformers that have weights."""
        tops = {path.partition("/")[0] for path in (*self.folder.merged, *self.side.left_out) if is_weights(path)}
        return tops & {*self.side.modules}

    @cached_property
    def config(self) -> Mapping[str, Any] | None:
        """Config of a full model, or of the model that an adapter was trained on, where its folder has it."""
        if not self.is_adapter:
            return self.model.config
        with contextlib.suppress(CheckpointError, OSError, ValueError):
            has_config = self.source is not None and CONFIG in self.source.names
            config = read_object(self.source.fetch(CONFIG)) if self.source is not None and has_config else {}
            return config if config.get("model_type") else None
        return None

    @cached_property
    def contents(self) -> dict[str, dict[str, Any]]:
        """Path -> its entries that count, or a hash of what is no JSON object; templates of all files together."""
        out: dict[str, dict[str, Any]] = {}
        if (source := self.source) is not None:
            for path in filter(self._counts, self.side.kept):
                out[path] = {DAMAGED: True}
                with contextlib.suppress(OSError, CheckpointError, ValueError, TypeError):
                    out[path] = self._read(source, path)
        if GENERATION in self.folder.texts:  # of a model in memory, whatever the file says that it was loaded from
            out[GENERATION] = _counted(self.folder.object(GENERATION))
        templates = {p: out.pop(p) for p in [*out] if "chat_template" in p}
        templates = {p: c for p, c in templates.items() if "/" in p}
        if self.template is not None:
            templates["default"] = {"": self.template}
        return out | ({TEMPLATES: templates} if templates else {})

    @cached_property
    def template(self) -> str | None:
        """Chat template of its tokenizer's files."""
        with contextlib.suppress(OSError, CheckpointError):
            return chat_template(self.source, self.reader.config)
        return None

    def _counts(self, path: str) -> bool:
        """True for files that are read with a model and compared here; configs of models are compared elsewhere."""
        top, slash, _ = path.partition("/")
        name = path.rpartition("/")[2]
        if _UNREAD.search(path) or is_weights(path) or (TOKENIZER in self.side.kept and matches(path, WORDS)):
            return False
        is_config = name in (CONFIG, SCHEDULER_CONFIG)
        return not is_config or (bool(slash) and top in self.side.modules)

    def _read(self, source: Source, path: str) -> dict[str, Any]:
        if path == TOKENIZER:
            tokens, rules = self.reader.read(source, path)
            return {"tokens": dict(tokens), **rules}
        file = source.fetch(path)
        value: Any = None
        if path.endswith(".json"):
            try:
                value = self.reader.config(file)  # the same as for tokens and templates, read once
            except CheckpointError:  # a list, or none
                value = parse_json(read_bytes(file))
        if path == MODULES and isinstance(value, list):
            return {"its modules": [str(m.get("type")).rpartition(".")[2] for m in value]}
        if not isinstance(value, Mapping):
            return {"its code" if path.endswith(".py") else "its content": value or hash_file(file)}
        if path == PIPELINE:  # its lists name components
            value = {k: v for k, v in value.items() if not isinstance(v, list)}
        return _counted(value)

    def tables(self) -> list[str]:
        """Token embeddings by name; else output heads, as of speech recognition; else matrices with a row per token."""
        matrices = {n: s.shape[0] for n, s in self.model.specs.items() if len(s.shape) == 2}
        levels = [c := self.config or {}, *(v for v in c.values() if isinstance(v, Mapping))]
        sizes = {level["vocab_size"] for level in levels if isinstance(level.get("vocab_size"), int)}
        named = [n for n in matrices if is_token_table(n)] or [n for n in matrices if is_output_head(n)]
        return named or [n for n, rows in matrices.items() if rows in sizes]

    def changes_tables(self) -> bool:
        """True if rows of its tables are merged: of an adapter, those that it trained."""
        if not (isinstance(self.model, Deltas) and self.is_adapter):
            return True
        names: Iterable[str] = (n for n in self.model.specs if self.model.source(n).kind != "zero")
        if isinstance(self.model, UnfittedDeltas):
            names = (*self.model.adapter.extras, *(f"{m}.weight" for m in self.model.adapter.modules))
        return any(is_token_table(n) or is_output_head(n) for n in names)

    def tokens(self, notes: list[str]) -> Iterator[TokenInput]:
        """The input with its tokens, if it has any; a note says that they cannot be read."""
        if listed := self.folder.tokens():
            yield TokenInput(self.label, {t: row for row, t in enumerate(listed) if t}, self.changes_tables())
        elif self.source is not None and (name := tokenizer_file(self.source)) is not None:
            try:
                tokens = self.reader.read(self.source, name)[0]
                yield TokenInput(self.label, tokens, self.changes_tables(), self.source.fetch(name))
            except CheckpointError as error:
                notes.append(f"{self.label}: its tokens are not compared with those of others: {error.problems[0]}")

    def unread(self, base: Inventory | None) -> list[str]:
        """Warnings on trained weights that are not read, and that the base's folder does not have as well."""
        stored = self.model.stored if isinstance(self.model, Deltas) else None
        known = {} if base is None else base.folder.side_files.left_out
        left_out = {} if self.source is None else self.source.side_files(self.folder.merged).left_out
        left = [p for p, why in left_out.items() if why.code == "weights" and p not in known and not _EARLIER.match(p)]
        if stored is None:
            shards = {_NUMBER.sub("", p) for p in self.folder.merged}  # another one belongs to no other form of them
            left = [p for p in left if p in ADAPTER_WEIGHTS or not _WHOLE.match(p) or _NUMBER.sub("", p) in shards]
        warnings = []
        if others := [p for p in left if may_be_weights(p) or (stored is None and p in ADAPTER_WEIGHTS)]:
            warnings = [
                f"expert '{self.label}' has weights beside its {'model' if stored is None else 'adapter'} that are not "
                f"merged: {first_names(others)}. If it needs them, merge them by themselves, or load them after the "
                "merge with the code that trained them"
            ]
        if stored is None or stored.drop:
            return warnings
        held, of_base = _parts(stored.weights.specs), _parts(() if base is None else base.model.specs)
        return [*warnings, *self._lost_modules(stored.config.fields, held, of_base)]

    def _lost_modules(self, fields: Mapping[str, Any], held: set[str], of_base: set[str]) -> Iterator[str]:
        """A warning on modules that an adapter's config lists as trained, and that its file lacks."""
        listed = fields.get("modules_to_save")
        saved = [str(n) for n in listed] if isinstance(listed, list | tuple) else []
        absent = [n for n in saved if not set(n.split(".")) <= held]
        lost = [n for n in absent if n.rpartition(".")[2] in of_base]
        if saved and not lost and absent == saved and set(saved) <= _ADDED_BY_TASK:
            lost = saved[-1:]
        if lost:
            yield (
                f"expert '{self.label}': modules_to_save lists {first_names(lost)}, and its file has no tensor of "
                "them: their training is lost, the base's stay. Likely cause: a trainer that saved the factors only"
            )


def _counted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The entries by which something is computed."""
    plain = {k: v["content"] if isinstance(v, Mapping) and "content" in v else v for k, v in settings.items()}
    kinds = {k: v.removesuffix("Fast") for k, v in plain.items() if k.endswith(_KINDS) and isinstance(v, str)}
    return {k: v for k, v in {**plain, **kinds}.items() if not HARMLESS.search(k)}


def _parts(names: Iterable[str]) -> set[str]:
    return {part for name in names for part in name.split(".")}
