"""Every expert is loaded once: its inputs, its answers, and statistics on some of the inputs if a method needs any."""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from actmat.extras.collect.batches import DataSeen
from actmat.extras.collect.collect import collect
from actmat.extras.collect.data import DataOptions
from actmat.extras.models.loading import Loaded
from actmat.extras.tune.evaluate import Asked, default_predict, keep_answers
from actmat.extras.tune.inputs import COLUMNS, ExpertInputs, InputSource, cut_at, predictions_of, prepare_inputs
from actmat.extras.tune.live import Loader, folded
from actmat.extras.tune.search import shares_of
from actmat.extras.tune.settings import TuneProgress, TuneSettings
from actmat.recipe import ExpertRef, Recipe


def ask_experts(
    recipe: Recipe,
    data: Mapping[str, InputSource],
    settings: TuneSettings,
    loader: Loader,
    kinds: frozenset[str],
    folder: Path,
    progress: TuneProgress,
) -> tuple[Recipe, dict[str, Asked]]:
    """The recipe with statistics, and the answers of each expert.

    Args:
        data: expert -> its data.
        kinds: statistics that the methods need; they are measured for experts without any.
        folder: for statistics.
    """
    experts, asked = [], {}
    notes: set[str] = set()
    for number, expert in enumerate(recipe.experts, start=1):
        progress.doing(f"asking {expert.label} ({number} of {len(recipe.experts)})")
        loaded, source = loader.load(expert.path), data[expert.label]
        measuring = bool(kinds) and not expert.statistics
        if not measuring and loader.is_exact:  # its answers are the same, in less time
            loaded = replace(loaded, model=folded(loaded.model))
        predict, labels = settings.predict_of(expert.label), settings.score in ("accuracy", "perplexity")
        inputs = prepare_inputs(
            expert.label,
            loaded,
            source,
            new_tokens=settings.new_tokens,
            labels=labels,
            measuring=measuring,
            note=notes.add,
        )
        shares = shares_of(sum(map(predictions_of, inputs.search)))
        inputs = replace(inputs, search=cut_at(inputs.search, shares), final=cut_at(inputs.final))
        if predict is default_predict and isinstance(settings.score, str) and takes_columns(loaded.model):
            few = ([b.with_few_logits() for b in half] for half in (inputs.search, inputs.final))
            inputs = replace(inputs, search=tuple(next(few)), final=tuple(next(few)))
        began = time.perf_counter()
        search = keep_answers(loaded.model, inputs.search, predict)
        seconds = time.perf_counter() - began
        asked[expert.label] = Asked(inputs, search, keep_answers(loaded.model, inputs.final, predict), predict, seconds)
        statistics = expert.statistics
        if measuring:
            mark = mark_of({expert.label: replace(inputs, search=inputs.measured)})
            out = folder / f"{expert.label}-{mark}"
            if not out.exists():
                _collect(loaded, inputs, source, kinds, out)
            statistics = str(out)
        del loaded  # before the next one is loaded
        experts.append(ExpertRef.model_validate({**expert.model_dump(), "statistics": statistics}))
    for note in sorted(notes):
        progress.note(note)
    return recipe.model_copy(update={"experts": tuple(experts)}), asked


def takes_columns(model: Any) -> bool:
    """True if a model may be asked for the logits of some columns of its inputs."""
    inner = getattr(model, "get_base_model", lambda: model)()
    return COLUMNS in inspect.signature(inner.forward).parameters


def _collect(loaded: Loaded, inputs: ExpertInputs, source: InputSource, kinds: frozenset[str], out: Path) -> None:
    """Statistics of an expert on the inputs that are set apart for them."""
    about: dict[str, Any] = {"source": "batches"}
    if isinstance(source, DataOptions):
        about = {"source": source.location, "details": source.details()}
    collect(
        loaded.model,
        [b.keywords for b in inputs.measured],
        checkpoint=loaded.checkpoint,
        adapter=loaded.adapter,
        out=out,
        gram="gram" in kinds,
        fisher="fisher" in kinds,
        **about,
    )


def mark_of(inputs: Mapping[str, ExpertInputs], *more: str) -> str:
    """Hash of all inputs of the search, with the experts' continuations and the labels, and of some texts."""
    total = hashlib.sha256()
    for label, given in inputs.items():
        seen = DataSeen()
        for batch in given.search:
            extra = {} if batch.labels is None else {"labels": batch.labels}
            seen.add(batch.keywords | extra)
        total.update(f"{label} {seen.fingerprint()}\n".encode())
    for text in more:
        total.update(f"{text}\n".encode())
    return total.hexdigest()[:12]
