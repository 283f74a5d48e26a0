"""Every expert is loaded once: its inputs, its answers, and statistics on some of the inputs if a method needs any.

Statistics are kept in the work folder under a mark of the expert's files, the inputs and the settings: a second search
does not measure the expert again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from actmat.extras.models.loading import Loaded
from actmat.extras.tune.evaluate import Asked, keep_answers
from actmat.extras.tune.inputs import ExpertInputs, check_enough, dealt, prepare_inputs
from actmat.extras.tune.kept import Asking, Samples, split_folds
from actmat.extras.tune.merges import files_of, mark_of
from actmat.extras.tune.settings import TuneSettings
from actmat.extras.tune.sources import DataRows
from actmat.recipe import ExpertRef, Recipe

ExpertData = DataRows | Sequence[Mapping[str, Tensor]]


def ask_experts(
    recipe: Recipe,
    data: Mapping[str, ExpertData],
    settings: TuneSettings,
    asking: Asking,
    kinds: frozenset[str],
    work: Path,
) -> tuple[Recipe, dict[str, Asked], str]:
    """The recipe with statistics, the answers of each expert, and a mark of all inputs and answers.

    Args:
        data: expert -> its data.
        asking: loads them, and reads their data.
        kinds: statistics that the methods need; they are measured for experts without any.
        work: for statistics.
    """
    experts, asked, marks = [], {}, []
    for expert in recipe.experts:
        label, source = expert.label, data[expert.label]
        measuring = bool(kinds) and not expert.statistics
        marks.append(_mark(recipe, expert, source, settings, measuring=measuring))
        statistics = work / "statistics" / f"{label}-{marks[-1]}"
        predict = settings.predict_of(label)
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
        del loaded  # before the next one is loaded
        fields = expert.model_dump() | ({"statistics": str(statistics)} if measuring else {})
        experts.append(ExpertRef.model_validate(fields))
    for note in dict.fromkeys(asking.notes):
        asking.progress.note(note)
    return recipe.model_copy(update={"experts": tuple(experts)}), asked, mark_of(*marks)


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
