"""Batches of a data set: texts through a tokenizer, images through an image processor.

A data set is a file (`.jsonl`, `.json`, `.csv`, `.parquet`, `.arrow`, `.txt` with one text a line), a folder of such
files or of images, or the id of a data set on the hub. It is streamed, not copied.
"""

from __future__ import annotations

import csv
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actmat.bounds import local_path, parse_json
from actmat.checkpoints.resolve import HUB_ID
from actmat.errors import RecipeError, StatisticsError, did_you_mean
from actmat.extras.models.chats import render_chats
from actmat.extras.models.loading import Loaded, extra, from_files
from actmat.foreign import in_one_line
from actmat.recipe import Recipe

READERS = {
    ".json": "json", ".jsonl": "json", ".csv": "csv", ".txt": "text", ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
LINES = frozenset({".csv", ".jsonl", ".txt"})
"""Files that are read here, line by line; others by `datasets`."""
IMAGES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
MESSAGES = "messages"
"""Column of chats: messages with `role` and `content`, for the template of the tokenizer."""
ROLES = {"human": "user", "gpt": "assistant"}
"""Roles of messages with `from` and `value`, of ShareGPT -> those of chat templates."""
RENDERED = "rendered chat"
"""Column of the text of a chat."""
CHATS = 256
"""Chats that are rendered by one process."""
TEXT_COLUMNS = ("text", "sentence", "content", "prompt", "document", "question")
IMAGE_COLUMNS = ("image", "img", "images")
TEMPLATE = "a photo of a {}."
"""Prompt of a class, for models with an image and a text encoder."""
SELF = "self"
"""In place of a data set: prompts that each expert writes itself."""

SAMPLES = 64
"""Inputs per expert, as many as the study of docs/tried.md had."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class DataOptions:
    """A data set, and how to read it."""

    location: str  # file, folder or hub id; a name of the rows, if those are given
    rows: tuple[Row, ...] = ()  # in place of a data set
    split: str = "train"  # of a data set on the hub, or of a folder of images
    subset: str | None = None  # configuration of a data set on the hub
    text_column: str | None = None  # default: found by name
    image_column: str | None = None  # default: found by name
    target_column: str | None = None  # column of texts for the decoder of an encoder-decoder model
    label_column: str | None = None  # column of class labels, for the Fisher with given labels
    batch_size: int = 8  # samples in a batch
    max_samples: int | None = None  # samples in all; None: every sample
    max_length: int = 512  # tokens of one text at most
    classes: tuple[str, ...] = ()  # of images, for a model that compares images with texts (CLIP)
    template: str | None = None  # around a text, or around a class, default `TEMPLATE`; {} is its place

    def details(self) -> dict[str, str]:
        """Options that are set, for the record."""
        columns = ("text_column", "image_column", "target_column", "label_column")
        names = ("split", "subset", *columns, "max_length", "template")
        fields = {k: str(v) for k in names if (v := getattr(self, k)) is not None}
        classes = {"classes": ", ".join(self.classes), "template": self.template or TEMPLATE}
        return fields | (classes if self.classes else {})


def read_rows(options: DataOptions) -> list[Row]:
    """The first rows of a data set; the last message of a chat is its answer if the assistant wrote it.

    Raises:
        StatisticsError: it cannot be read, or has no rows.
    """
    try:
        rows = list(itertools.islice(_rows(options), options.max_samples))
    except StatisticsError:
        raise
    except StopIteration:  # raised by `datasets` for an empty file
        rows = []
    except Exception as error:  # readers of files raise errors of many types
        raise StatisticsError(f"{options.location}: the data cannot be read: {in_one_line(error)}") from error
    if not rows:
        raise StatisticsError(f"{options.location} is empty; expected at least one sample")
    rows = [_asked(row, options.text_column) for row in rows]
    columns = (MESSAGES, *TEXT_COLUMNS)
    places = dict.fromkeys(next((c for c in columns if row.get(c) is not None), "none of these") for row in rows)
    if len(places) > 1 and options.text_column is None:
        raise StatisticsError(
            f"{options.location}: expected the texts of all rows in one column, found them in {', '.join(places)}. "
            "Fix: --set text_column=NAME of a column that every row has, or a file for each"
        )
    return rows


def _asked(row: Row, column: str | None) -> Row:
    """The row of a chat as `messages`, without the answer of the assistant, which gets a column of its own.

    Args:
        column: of the texts, if the user names one; else a chat is in `messages`, or in place of a text.
    """
    has_text = any(isinstance(row.get(name), str) for name in TEXT_COLUMNS)
    names = [column] if column else [MESSAGES, *(() if has_text else row)]
    chat = next((messages for name in names if (messages := _messages(row.get(name)))), None)
    if chat is None:
        return {k: v for k, v in row.items() if k != MESSAGES} if column else row
    chat = [*chat, *(_messages(row.get("completion")) or ())]  # beside a prompt, in TRL's form
    is_answered = len(chat) > 1 and chat[-1].get("role") == "assistant" and isinstance(chat[-1].get("content"), str)
    answer = {"answer": chat[-1]["content"]} if is_answered else {}
    return {**answer, **row, MESSAGES: chat[:-1] if is_answered else chat}


def _messages(value: Any) -> list[Mapping[str, Any]] | None:
    """The messages of a chat, with `role` and `content`; None for any other value."""
    if not (isinstance(value, list) and value and all(isinstance(m, Mapping) for m in value)):
        return None
    if all({"from", "value"} <= m.keys() for m in value):
        return [{"role": ROLES.get(m["from"], m["from"]), "content": m["value"]} for m in value]
    return [*value] if all("role" in m for m in value) else None


def by_expert(recipe: Recipe, data: Any) -> dict[str, Any]:
    """Expert -> its data of any form, in the order of the experts; one data set may be that of all.

    Raises:
        RecipeError: data of an expert that the merge does not have.
        StatisticsError: no data.
    """
    by_name = data if isinstance(data, Mapping) else dict.fromkeys(recipe.labels, data)
    if unknown := [name for name in by_name if name not in recipe.labels]:
        experts = f"Experts: {', '.join(recipe.labels)}"
        raise RecipeError(
            "Data is given for unknown experts.",
            [f"no expert is named '{n}'.{did_you_mean(n, recipe.labels)} {experts}" for n in unknown],
        )
    if not by_name:
        raise StatisticsError("No data given: name a data set for at least one expert.")
    return {label: by_name[label] for label in recipe.labels if label in by_name}


def prepare_data(chosen: Mapping[str, DataOptions]) -> dict[str, list[Row]]:
    """Rows of every data set, read before the first model is loaded, which may take minutes."""
    problems: list[str] = []
    read: dict[str, list[Row]] = {}
    for key, options in {repr(o): o for o in chosen.values()}.items():
        try:
            read[key] = read_rows(options)
        except StatisticsError as error:
            problems += error.problems
    if problems:
        raise StatisticsError("The data cannot be used.", problems)
    return {label: read[repr(options)] for label, options in chosen.items()}


def make_batches(
    loaded: Loaded,
    options: DataOptions,
    *,
    rows: Iterable[Row] | None = None,
    labels: bool = False,
    apart: bool = False,
    note: Callable[[str], object] = lambda text: None,
) -> Iterator[dict[str, Tensor]]:
    """Batches of keyword arguments for the model, on its device.

    Args:
        rows: that were read already.
        labels: add labels to them, if the model takes any.
        apart: the labels of `label_column` are taken out before the model is called: they are there in any case.
        note: called with a fact about the data that the user should know.
    """
    if rows is None:
        rows = (_asked(row, options.text_column) for row in itertools.islice(_rows(options), options.max_samples))
    rows = iter(rows)
    encode = _Encoder(loaded, options, labels=labels, apart=apart)
    if encode.padded_by is not None:
        note(f"the tokenizer has no pad token: texts are padded by '{encode.padded_by}', and padding is masked")
    device = next(loaded.model.parameters()).device
    if encode.tokenizer is not None:
        rows = _with_texts(rows, encode.tokenizer, options.location)
    while batch := list(itertools.islice(rows, options.batch_size)):
        yield {k: v.to(device) for k, v in encode(batch).items()}


def _with_texts(rows: Iterator[Row], tokenizer: Any, where: str) -> Iterator[Row]:
    """The rows, those of chats with their text in a column of its own."""
    for row in rows:
        if not isinstance(row.get(MESSAGES), list):
            yield row
            continue
        chats = [row, *itertools.islice(rows, CHATS - 1)]
        texts = render_chats(tokenizer, [chat.get(MESSAGES) for chat in chats], where)
        yield from ({**chat, RENDERED: text} for chat, text in zip(chats, texts, strict=True))


def is_contrastive(config: Mapping[str, Any]) -> bool:
    """True for the config of a model that compares images with texts, such as CLIP."""
    return {"text_config", "vision_config", "projection_dim"} <= config.keys()


def class_names(location: str) -> tuple[str, ...]:
    """Names of the classes of a local folder of images, one folder each; () where there are none.

    Sorted, as the labels of the reader are. `train/`, `test/` and `validation/` above them are splits.
    """
    root = local_path(location, error=StatisticsError)
    names = {p.parent.name for p in root.rglob("*") if p.suffix.lower() in IMAGES} if root.is_dir() else set()
    return tuple(sorted(names - {root.name, "train", "test", "validation"}))


def class_prompts(loaded: Loaded, options: DataOptions) -> dict[str, Tensor]:
    """Keyword arguments of a model that compares images with texts: `C` prompts, one for each class.

    Raises:
        StatisticsError: the model takes no texts, a template without `{}`, or a prompt that is too long.
    """
    template = options.template or TEMPLATE
    if "{}" not in template:
        raise StatisticsError(f"The template needs {{}} for the class; got '{template}'.")
    encode = _Encoder(loaded, replace(options, classes=()), labels=False)
    if encode.tokenizer is None:
        raise StatisticsError(
            f"{type(loaded.model).__name__} takes no texts, so it cannot use classes. From Python, pass its "
            "predictions with predict=."
        )
    prompts = [template.format(c.replace("_", " ")) for c in options.classes]
    tokens = encode.tokenizer(prompts, padding=True, return_tensors="pt")
    config: Any = getattr(getattr(loaded.model, "config", None), "text_config", None)
    limit = min(encode.tokenizer.model_max_length, getattr(config, "max_position_embeddings", 1 << 30))
    if (length := tokens["input_ids"].shape[1]) > limit:
        raise StatisticsError(f"The prompt of a class has {length} tokens, but the model reads {limit}: shorten it.")
    device = next(loaded.model.parameters()).device
    return {k: v.to(device) for k, v in tokens.items() if k in encode.known}


def _rows(options: DataOptions) -> Iterable[Row]:
    """Rows of a data set, streamed."""
    if options.rows:
        return options.rows
    if options.location == SELF:
        raise StatisticsError(f"'{SELF}': experts write prompts for --data of 'merge' and --check only; give a file")
    path = local_path(options.location, error=StatisticsError)
    is_path = path.suffix in READERS or options.location.startswith(("/", ".", "~"))
    if not path.exists() and (is_path or HUB_ID.fullmatch(options.location) is None):
        hint = "" if is_path else f"; a prompt? Write text:{options.location}"
        raise StatisticsError(f"{options.location}: no such file or folder{hint}")
    reader, files = _local(path) if path.exists() else ("", [])
    if files and {Path(file).suffix.lower() for file in files} <= LINES:
        return itertools.chain.from_iterable(_lines(Path(file), options) for file in files)
    load: Callable[..., Iterable[Row]] = extra("datasets").load_dataset
    try:
        if reader == "imagefolder":
            return load(reader, data_dir=str(path), split=options.split, streaming=True)
        if reader:
            return load(reader, data_files=files, split="train", streaming=True)
        name, _, revision = options.location.partition("@")
        return load(name, options.subset, split=options.split, revision=revision or None, streaming=True)
    except (OSError, ValueError) as error:  # DatasetNotFoundError is a FileNotFoundError
        raise StatisticsError(f"{options.location}: the data cannot be read: {in_one_line(error)}") from error


def _lines(path: Path, options: DataOptions) -> Iterator[Row]:
    """A row for each line that is not blank: its values, its object, its chat, or its text."""
    if path.suffix.lower() == ".csv":
        yield from _table(path, options)
        return
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = parse_json(line) if path.suffix.lower() == ".jsonl" else {TEXT_COLUMNS[0]: line.rstrip("\n")}
            except ValueError as error:
                raise StatisticsError(f"{path}: the data cannot be read: line {number}: {in_one_line(error)}") from None
            if isinstance(row, list):
                row = {MESSAGES: row}
            if not isinstance(row, dict):
                raise StatisticsError(f"{path}: line {number}: expected an object, found {type(row).__name__}")
            yield row


def _table(path: Path, options: DataOptions) -> Iterator[Row]:
    """The rows of a CSV file, whose first line names the columns; labels are whole numbers."""
    named = {options.text_column, options.target_column, options.label_column, *TEXT_COLUMNS} - {None}
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.DictReader(file, strict=True)
        columns = lines.fieldnames or []
        if columns and not (named & {*columns} and len({*columns}) == len(columns)):
            raise StatisticsError(
                f"{path}: expected a first line that names each column once, such as {TEXT_COLUMNS[0]}, found "
                f"{','.join(columns)[:80]!r}. Fix: --set text_column=NAME, write such a line, or name the file .txt if "
                "each line is a text."
            )
        for row in lines:
            if None in row or None in row.values():  # values without a column, or columns without a value
                how = "more" if None in row else "fewer"
                raise StatisticsError(
                    f"{path}: line {lines.line_num} has {how} values than the first line names columns, "
                    f"{len(columns)}. Likely cause: commas in a text. Fix: put the text in double "
                    "quotes, or name the file .txt if each line is a text."
                )
            label = options.label_column or ""
            yield row | ({label: int(row[label])} if row.get(label, "").lstrip("-").isdecimal() else {})


def _local(path: Path) -> tuple[str, list[str]]:
    """Name of the reader of a local file or folder, and the files."""
    if path.is_file():
        if path.suffix not in READERS:
            readable = ", ".join(READERS)
            raise StatisticsError(f"{path}: expected one of {readable}, a folder, or the id of a data set on the hub")
        return READERS[path.suffix], [str(path)]
    suffixes = {p.suffix.lower() for p in path.rglob("*") if p.is_file()}
    if suffixes & IMAGES:
        return "imagefolder", []
    readers = {READERS[s] for s in suffixes & READERS.keys()}
    if len(readers) != 1:
        present = ", ".join(sorted(suffixes)) or "nothing"
        raise StatisticsError(f"{path}: expected images or files of one kind ({', '.join(READERS)}), found {present}")
    chosen = [s for s, r in READERS.items() if r in readers]
    return readers.pop(), sorted(str(p) for p in path.rglob("*") if p.suffix.lower() in chosen)


class _Encoder:
    """Rows -> keyword arguments of a model."""

    def __init__(self, loaded: Loaded, options: DataOptions, *, labels: bool, apart: bool = False) -> None:
        self._model: Any = getattr(loaded.model, "get_base_model", lambda: loaded.model)()  # PEFT wraps it
        self._options = options
        self._labels, self._apart = labels, apart
        self.known = inspect.signature(self._model.forward).parameters
        wants_text, wants_images = "input_ids" in self.known, "pixel_values" in self.known
        wants_text = wants_text and not (wants_images and options.classes)  # `class_prompts` are its texts
        if not (wants_text or wants_images):
            raise StatisticsError(
                f"{type(self._model).__name__} takes neither text nor images ({', '.join(list(self.known)[:4])}); "
                "make the batches yourself and call actmat.extras.collect.collect.collect"
            )
        self.tokenizer = from_files("AutoTokenizer", loaded) if wants_text else None
        self._processor = from_files("AutoImageProcessor", loaded, backend="pil") if wants_images else None
        self.padded_by = None if self.tokenizer is None else pad_token(self.tokenizer)

    def __call__(self, rows: list[Row]) -> dict[str, Tensor]:
        """Keyword arguments that the model has parameters for."""
        options = self._options
        out = {} if self.tokenizer is None else self._text(rows)
        if self._processor is not None:
            images = _column(rows, options.image_column, IMAGE_COLUMNS, None, "image", options.location)
            pixels = self._processor([i.convert("RGB") for i in images], return_tensors="pt")
            out["pixel_values"] = pixels["pixel_values"]
        if self._labels and options.label_column is not None:
            out["labels"] = torch.tensor(_column(rows, options.label_column, (), int, "label", options.location))
        return {k: v for k, v in out.items() if k in self.known or (self._apart and k == "labels")}

    def _text(self, rows: list[Row]) -> dict[str, Tensor]:
        options = self._options
        out = _tokens(self.tokenizer, rows, options, options.text_column, "text")
        out["input_ids"] = known_ids(self._model, **{k: out[k] for k in ("input_ids", "attention_mask")})
        if getattr(self._model.config, "is_encoder_decoder", False):
            out |= _decoder_inputs(self._model, self.tokenizer, rows, options)
        elif self._apart and options.target_column is not None:
            out = _followed(self.tokenizer, rows, options, out)
        elif self._labels and options.label_column is None and "labels" in self.known:
            out["labels"] = out["input_ids"].masked_fill(out["attention_mask"] == 0, -100)
        return out


def pad_token(tokenizer: Any) -> str | None:
    """Give a tokenizer without a pad token one, and return it; any token will do, since padding is masked.

    Raises:
        StatisticsError: it has no tokens at all.
    """
    if tokenizer.pad_token is not None:
        return None
    ids = tokenizer.get_vocab()
    if not ids:
        raise StatisticsError(
            f"{tokenizer.name_or_path}: the tokenizer has no tokens. Fix: copy the model's own there."
        )
    first = min(ids, key=ids.__getitem__)
    padding = next(t for t in (tokenizer.eos_token, tokenizer.unk_token, first) if t in ids)
    tokenizer.pad_token = padding
    return str(padding)


def known_ids(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """The ids, those of padding replaced where the model has no row for them: padding is masked.

    Raises:
        StatisticsError: the model has no row for a token of a text.
    """
    table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    rows = getattr(table, "num_embeddings", None)
    if rows is None or not input_ids.numel() or int(input_ids.max()) < rows:
        return input_ids
    ids = input_ids.masked_fill(attention_mask == 0, 0)
    if (largest := int(ids.max())) >= rows:
        raise StatisticsError(
            f"The tokenizer gives the token id {largest}, but the model has a table of {rows} tokens. Likely cause: "
            "the tokenizer files of another model, or added tokens for which the model was not resized. Fix: copy the "
            "tokenizer that the model was trained with."
        )
    return ids


def _tokens(tokenizer: Any, rows: list[Row], options: DataOptions, column: str | None, what: str) -> dict[str, Tensor]:
    is_chat = what == "text" and RENDERED in rows[0]
    usual = TEXT_COLUMNS if what == "text" else ()
    texts = _column(rows, RENDERED if is_chat else column, usual, str, what, options.location)
    if what == "text" and options.template is not None and not is_chat:
        texts = [options.template.replace("{}", text) for text in texts]
    tokens = tokenizer(
        texts, padding=True, truncation=True, max_length=min(options.max_length, tokenizer.model_max_length),
        add_special_tokens=not is_chat, return_tensors="pt",
    )  # fmt: skip
    return {k: v for k, v in tokens.items() if isinstance(v, Tensor)}


def _decoder_inputs(model: Any, tokenizer: Any, rows: list[Row], options: DataOptions) -> dict[str, Tensor]:
    """Inputs of the decoder: the targets, shifted by one, and their labels; without targets, its start token."""
    start = _start_token(model)
    if options.target_column is None:
        first = torch.full((len(rows), 1), start)
        return {"decoder_input_ids": first, "decoder_attention_mask": torch.ones_like(first)}
    tokens = _tokens(tokenizer, rows, options, options.target_column, "target")
    ids, mask = tokens["input_ids"], tokens["attention_mask"]
    shifted = torch.cat([torch.full((len(rows), 1), start), ids[:, :-1]], dim=1)
    seen = torch.cat([torch.ones(len(rows), 1, dtype=mask.dtype), mask[:, :-1]], dim=1)
    return {"decoder_input_ids": shifted, "decoder_attention_mask": seen, "labels": ids.masked_fill(mask == 0, -100)}


def _followed(tokenizer: Any, rows: list[Row], options: DataOptions, texts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Texts with their targets behind them, whose tokens are the labels."""
    targets = _column(rows, options.target_column, (), str, "target", options.location)
    answers = tokenizer(targets, add_special_tokens=False)["input_ids"]
    ids = [t[m.bool()].tolist() for t, m in zip(texts["input_ids"], texts["attention_mask"], strict=True)]
    lengths = [len(i) + len(t) for i, t in zip(ids, answers, strict=True)]
    out = {name: torch.full((len(ids), max(lengths)), fill) for name, fill in
           (("input_ids", 0), ("attention_mask", 0), ("labels", -100))}  # fmt: skip
    for n, (text, target) in enumerate(zip(ids, answers, strict=True)):
        out["input_ids"][n, : lengths[n]] = torch.tensor(text + target)
        out["attention_mask"][n, : lengths[n]] = 1
        out["labels"][n, len(text) : lengths[n]] = torch.tensor(target)
    return out


def _start_token(model: Any) -> int:
    """First token of a decoder, from the model's configs."""
    configs = (getattr(model, "generation_config", None), model.config)
    named = [(config, name) for config in configs for name in ("decoder_start_token_id", "bos_token_id")]
    for config, name in [*named, (model.config, "pad_token_id")]:  # the last is the start token of T5
        if isinstance(token := getattr(config, name, None), int):
            return token
    raise StatisticsError(f"{type(model).__name__}: its config does not name the decoder's start token")


def _column(
    rows: list[Row], wanted: str | None, usual: tuple[str, ...], kind: type | None, what: str, where: str
) -> list[Any]:
    """Values of the column `wanted`, else of the first of the `usual` ones, else of the only one with texts."""
    columns = list(rows[0])
    name = wanted or next((c for c in usual if c in columns), None)
    if name is None and kind is str:
        texts = [c for c in columns if isinstance(rows[0][c], str)]
        name = texts[0] if len(texts) == 1 else None
    if name is None or name not in columns:
        hint = did_you_mean(wanted, columns) if wanted else f" Fix: --set {what}_column=NAME."
        named = f" {wanted!r}" if wanted else ""
        raise StatisticsError(f"{where}: no column of {what}s{named}; it has {', '.join(columns)}.{hint}")
    values = [row.get(name) for row in rows]
    wrong = [type(v).__name__ for v in values if v is None or (kind is not None and not isinstance(v, kind))]
    if wrong:
        expected = (kind.__name__ if kind else what) + " or a list of messages with role and content" * (what == "text")
        raise StatisticsError(f"{where}: column '{name}' holds {wrong[0]}, expected {expected}, in every row")
    return values
