"""Every expert is loaded once: its inputs, its answers, and statistics on some of the inputs if a method needs any.

Answers to texts, and statistics, are kept in the work folder under a mark of the expert's files, the inputs and the
settings: a second search does not load the expert again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from actmat.checkpoints.writing.staging import disk_errors
from actmat.errors import StatisticsError
from actmat.extras.models.loading import Loaded
from actmat.extras.tune.evaluate import Answers, Asked, default_predict, keep_answers
from actmat.extras.tune.inputs import ExpertInputs, InputBatch, check_enough, dealt, prepare_inputs
from actmat.extras.tune.kept import Asking, Samples, split_folds
from actmat.extras.tune.merges import files_of, mark_of
from actmat.extras.tune.settings import TuneSettings
from actmat.extras.tune.sources import DataRows
from actmat.recipe import ExpertRef, Recipe

ExpertData = DataRows | Sequence[Mapping[str, Tensor]]


@dataclasses.dataclass(frozen=True)
class AskedExperts:
    """The recipe with statistics, the answers of each expert, and a mark of all inputs and answers."""

    recipe: Recipe
    asked: Mapping[str, Asked]
    mark: str


def ask_experts(
    recipe: Recipe,
    data: Mapping[str, ExpertData],
    settings: TuneSettings,
    asking: Asking,
    kinds: frozenset[str],
    work: Path,
) -> AskedExperts:
    """Ask every expert.

    Args:
        data: expert -> its data.
        asking: loads them, and reads their data.
        kinds: statistics that the methods need; they are measured for experts without any.
        work: for answers and statistics.
    """
    experts, asked, marks = [], {}, []
    for expert in recipe.experts:
        label, source = expert.label, data[expert.label]
        measuring = bool(kinds) and not expert.statistics
        marks.append(_mark(recipe, expert, source, settings, measuring=measuring))
        answers = work / "answers" / f"{label}-{marks[-1]}.safetensors"
        statistics = work / "statistics" / f"{label}-{marks[-1]}"
        is_known = isinstance(source, DataRows) and answers.exists() and (statistics.exists() or not measuring)
        predict = settings.predict_of(label)
        if is_known:
            asked[label] = _read(answers, label)
        else:
            asking.progress.doing(f"loading {label}")
            loaded = asking.loader.load(expert.path)
            inputs = dealt_inputs(label, loaded, source, asking, settings, measuring=measuring)
            if measuring and not statistics.exists():
                part: Samples = inputs.measured
                if isinstance(source, DataRows):
                    part = dataclasses.replace(source, rows=dealt(source.rows, measuring=True)[2])
                asking.measure(label, loaded, part, kinds, statistics)
            search, final = (keep_answers(loaded.model, half, predict) for half in (inputs.search, inputs.final))
            asked[label] = Asked(dataclasses.replace(inputs, measured=()), search, final, predict)
            if isinstance(source, DataRows) and predict is default_predict and not source.options.classes:
                _write(asked[label], answers)
            del loaded  # before the next one is loaded
        fields = expert.model_dump() | ({"statistics": str(statistics)} if measuring else {})
        experts.append(ExpertRef.model_validate(fields))
    for note in dict.fromkeys(asking.notes):
        asking.progress.note(note)
    return AskedExperts(recipe.model_copy(update={"experts": tuple(experts)}), asked, mark_of(*marks))


def dealt_inputs(
    label: str, loaded: Loaded, source: ExpertData, asking: Asking, settings: TuneSettings, *, measuring: bool
) -> ExpertInputs:
    """The inputs to search with and to compare finally, dealt, with the expert's own continuations."""
    if not isinstance(source, DataRows):
        return prepare_inputs(label, loaded, source, new_tokens=settings.new_tokens, measuring=measuring)
    check_enough(label, len(source.rows), source.options.location)
    search, final, _ = dealt(source.rows, measuring=measuring)
    rows = [*search, *final]
    batches = asking.batches(
        loaded, dataclasses.replace(source, rows=rows), labels=settings.score in ("accuracy", "perplexity")
    )
    folds = [0] * len(search) + [1] * len(final)
    return ExpertInputs(label, *split_folds(asking.completed(loaded, batches, label), rows, folds))


def _mark(recipe: Recipe, expert: ExpertRef, source: ExpertData, settings: TuneSettings, *, measuring: bool) -> str:
    """Mark of everything that an expert's answers and statistics depend on."""
    if isinstance(source, DataRows):
        data: object = (source.options, json.dumps(source.rows, default=_content, sort_keys=True))
    else:
        data = [[(k, tuple(v.shape), float(v.double().sum()), _content(v)) for k, v in b.items()] for b in source]
    fields = (settings.new_tokens, settings.model_class, settings.model_dtype, settings.score_name, measuring)
    return mark_of(*fields, data, files_of([recipe.base, expert.path]))


def _content(value: Any) -> str:
    """Hash of an image, or of another value of a row."""
    content = value.tobytes() if hasattr(value, "tobytes") else str(getattr(value, "tolist", lambda: value)()).encode()
    return hashlib.sha256(content).hexdigest()


def _write(asked: Asked, path: Path) -> None:
    """Keep an expert's inputs and answers."""
    tensors: dict[str, Tensor] = {}
    for half in ("search", "final"):
        for n, (batch, answers) in enumerate(zip(getattr(asked.inputs, half), getattr(asked, half), strict=True)):
            fields = {"counted": batch.counted, "labels": batch.labels, **dataclasses.asdict(answers)}
            fields |= {f"arguments.{k}": v for k, v in batch.arguments.items()}
            fields |= {f"shared.{k}": v for k, v in batch.shared.items()}
            tensors |= {f"{half}.{n:04d}.{k}": v.contiguous() for k, v in fields.items() if v is not None}
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        save_file(tensors, part)
        part.replace(path)


def _read(path: Path, label: str) -> Asked:
    """An expert's inputs and answers as `_write` kept them."""
    halves: dict[str, dict[str, dict[str, Tensor]]] = {"search": {}, "final": {}}
    for name, tensor in load_file(path).items():
        half, number, field = name.split(".", 2)
        halves[half].setdefault(number, {})[field] = tensor

    def under(fields: Mapping[str, Tensor], start: str) -> dict[str, Tensor]:
        return {k.removeprefix(start): v for k, v in fields.items() if k.startswith(start)}

    batches, answers = {}, {}
    for half, numbered in halves.items():
        rows = [fields for _, fields in sorted(numbered.items())]
        batches[half] = [
            InputBatch(under(f, "arguments."), f.get("counted"), f.get("labels"), under(f, "shared.")) for f in rows
        ]
        answers[half] = [Answers(f["log_p_PK"], f.get("classes_PK"), f["log_rest_P"], f["best_P"]) for f in rows]
    if not batches["search"] or not batches["final"]:
        raise StatisticsError(f"{path} is damaged: remove it")
    return Asked(ExpertInputs(label, **batches), answers["search"], answers["final"], default_predict)
