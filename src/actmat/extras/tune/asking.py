"""Every expert is loaded once: its inputs, its answers, and statistics on some of the inputs if a method needs any."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actmat.experts.resolve import needs_base
from actmat.extras.collect.batches import DataSeen
from actmat.extras.collect.collect import collect
from actmat.extras.collect.data import DataOptions
from actmat.extras.collect.models import Loaded, load_model
from actmat.extras.tune.answers import keep_answers
from actmat.extras.tune.evaluate import Asked
from actmat.extras.tune.inputs import ExpertInputs, Source, prepare_inputs
from actmat.extras.tune.settings import TuneSettings
from actmat.recipe import ExpertRef, Recipe

__all__ = ["Questioner", "load_with"]


def load_with(settings: TuneSettings, base: str) -> Callable[[str], Loaded]:
    """From a location to a model; adapters get the base."""
    if settings.load is not None:
        return settings.load

    def load(location: str) -> Loaded:
        return load_model(
            location,
            base=base if needs_base(location) else None,
            model_class=settings.model_class,
            dtype=settings.dtype,
            device=settings.device,
        )

    return load


@dataclass(frozen=True)
class Questioner:
    """Asks the experts of a recipe.

    Args:
        data: expert -> its data.
        settings: of the search.
        kinds: of statistics that the methods need and that are measured for experts without any.
        folder: for statistics.
        load: from a location to a model.
        doing: is told who is asked.
    """

    data: Mapping[str, Source]
    settings: TuneSettings
    kinds: frozenset[str]
    folder: Path
    load: Callable[[str], Loaded]
    doing: Callable[[str], None]

    def ask(self, recipe: Recipe) -> tuple[Recipe, dict[str, Asked]]:
        """The recipe with statistics, and what each expert answers."""
        experts, asked = [], {}
        for expert in recipe.experts:
            self.doing(f"asking {expert.label}")
            loaded = self.load(expert.path)
            measuring = bool(self.kinds) and not expert.statistics
            asked[expert.label] = found = self._answers(expert.label, loaded, measuring=measuring)
            statistics = self._collected(expert.label, loaded, found.inputs) if measuring else expert.statistics
            del loaded  # before the next one is loaded
            experts.append(ExpertRef.model_validate({**expert.model_dump(), "statistics": statistics}))
        return recipe.model_copy(update={"experts": tuple(experts)}), asked

    def _answers(self, label: str, loaded: Loaded, *, measuring: bool) -> Asked:
        settings, predict = self.settings, self.settings.predict_of(label)
        labels = settings.score in ("accuracy", "perplexity")
        inputs = prepare_inputs(
            label, loaded, self.data[label], new_tokens=settings.new_tokens, labels=labels, measuring=measuring
        )
        search, final = (keep_answers(loaded.model, half, predict) for half in (inputs.search, inputs.final))
        return Asked(inputs, search, final, predict)

    def _collected(self, label: str, loaded: Loaded, inputs: ExpertInputs) -> str:
        """Statistics of an expert on the inputs that are there for them."""
        out = self.folder / f"{label}-{mark_of({label: replace(inputs, search=inputs.measured)})}"
        if not out.exists():
            source = self.data[label]
            about: dict[str, Any] = {"source": "batches"}
            if isinstance(source, DataOptions):
                about = {"source": source.location, "details": source.details()}
            collect(
                loaded.model,
                [b.keywords for b in inputs.measured],
                checkpoint=loaded.checkpoint,
                adapter=loaded.adapter,
                out=out,
                gram="gram" in self.kinds,
                fisher="fisher" in self.kinds,
                **about,
            )
        return str(out)


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
