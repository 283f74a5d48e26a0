"""Merge by a few inputs of each expert: statistics are measured on them, answers compared on those held back."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from actmat.checkpoints.base import torch_dtype
from actmat.checkpoints.model import Model
from actmat.checkpoints.writing.staging import disk_errors
from actmat.diagnostics.model import AgreementRow, write_diagnosis
from actmat.errors import OutputError, RecipeError, StatisticsError, format_size
from actmat.experts.locate import locate_in, require_model
from actmat.experts.lora.adapter import Adapter
from actmat.extras.collect.batches import evaluating
from actmat.extras.collect.binding import Binding
from actmat.extras.collect.collect import bound, measured
from actmat.extras.collect.data import SELF
from actmat.extras.collect.measures import Measurement, Settings
from actmat.extras.models.loading import Loaded, can_switch
from actmat.extras.pages.html import write_html
from actmat.extras.tune.inputs import completed
from actmat.extras.tune.kept import FEWEST, Asking, DataRows, InputSettings, read_sources
from actmat.extras.tune.memory import gram_bytes, model_device
from actmat.extras.tune.progress import MergingProgress, TuneProgress, usual_tune_progress
from actmat.extras.tune.space import PRIOR, RIDGE, prior_of
from actmat.methods import get_method
from actmat.recipe import ExpertRef, Recipe
from actmat.recipe.output import AdapterOutput, ModelOutput
from actmat.report.manifest import write_manifest
from actmat.run import MergeReport, run_recipes
from actmat.run.automatic import AUTO
from actmat.run.locate import Located, locate_inputs
from actmat.settings import RunSettings


def merge_with_inputs(
    recipes: Sequence[Recipe],
    data: Any,
    check: Any,
    settings: InputSettings,
    run: RunSettings,
    progress: TuneProgress,
) -> list[MergeReport]:
    """Merge recipes by inputs of their experts, and compare the answers of each merge with the experts'.

    Of `data`, every fourth input of an expert is held back for the comparison, where there are at least `FEWEST`; the
    others are measured, if a method uses statistics. `auto` takes `regmean` then.

    Args:
        recipes: of one run, see `run_recipes`.
        data: expert -> inputs of its task: a data set, one text, a list, or `SELF`; or `SELF` for all.
        check: expert -> inputs that are only compared on, in place of those held back.
        settings: of the models.
        run: of the merges.
        progress: receives callbacks.

    Returns:
        Reports of the merges, with answers.

    Raises:
        RecipeError, StatisticsError, OutputError: inputs, data or output that cannot be used.
    """
    outs = [str(r.out) for r in recipes]
    if wrong := [out for out in outs if "://" in out or out.endswith(".safetensors")]:
        raise OutputError(f"{wrong[0]} is not a local folder: a merge with inputs is loaded and run from its folder")
    with locate_inputs(recipes[0], run.held) as given:
        adapters = settings.as_adapter and given.only_adapters and given.have_factors
        kinds = kinds_of(recipes, given) if data else frozenset()
        both = ((data, True), (check, False))
        given_data, checked = (
            read_sources(recipes[0], d, settings, given.config, measured=m) if d else {} for d, m in both
        )
    folder = Path(f"{outs[0]}.statistics")
    asking = Asking(settings.loader(recipes[0].base, model_device(run.device)[0]), settings, progress)
    measuring = InputMeasuring(asking, kinds, folder)
    removed = not (settings.keep_statistics or folder.exists())
    try:
        given_data, checked = (asking.with_written(recipes[0], sources) for sources in (given_data, checked))
        experts = [measuring.expert(e, given_data.get(e.label), checked.get(e.label)) for e in recipes[0].experts]
        notes = tuple(dict.fromkeys(asking.notes))
        if kinds and removed:
            notes += (
                "statistics of these inputs are removed after the merge; --set keep_statistics=true keeps them, to "
                "merge again from the recipe",
            )
        fewest = min(measuring.measured, default=0)
        ready = [_ready(r, experts, notes, as_adapter=adapters, fewest=fewest) for r in recipes]
        reports = run_recipes(ready, run, MergingProgress(progress, "merging"), draw=write_html)
        rows = asking.rows([r.out for r in reports], ready[0], Path(outs[0]).parent, run.held)
        return [_finished(r, own, removed=removed) for r, own in zip(reports, rows, strict=True)]
    finally:
        if removed:
            shutil.rmtree(folder, ignore_errors=True)


def merge_by_arguments(
    recipe: Recipe,
    run: RunSettings,
    data: Any,
    asked: Mapping[str, Any],
    modules: Mapping[str, nn.Module],
) -> MergeReport:
    """Merge by inputs of the experts, from the arguments of `actmat.merge`.

    Args:
        recipe, run: of the merge.
        data: expert -> its inputs, or "self".
        asked: `check` and fields of `InputSettings`.
        modules: those among the inputs in memory, by their places.

    Raises:
        RecipeError: an expert in memory that cannot run, no output, or inputs that are not by expert.
    """
    check, fields = asked.get("check") or {}, {n: value for n, value in asked.items() if n != "check"}
    odd = [type(d).__name__ for d in (data, check) if not isinstance(d, Mapping) and d != SELF]
    held = {e.label: e.path for e in recipe.experts if e.path in run.held}
    loaded = {}
    for place, opener in run.held.items():
        model, files = opener(), getattr(modules.get(place), "name_or_path", "")
        if files and isinstance(model, Model):
            loaded[place] = Loaded(modules[place], model, None, files)
    stuck = ", ".join(label for label, place in held.items() if place not in loaded)
    causes = {
        f"in memory: {stuck}; only a transformers model that was loaded from a folder runs, with its tokenizer. Fix: "
        "save_pretrained of model and tokenizer, and give the folders": bool(stuck),
        "no output given. Fix: out=FOLDER": recipe.out is None,
        f"data and check: expected expert -> inputs, found {', '.join(odd)}. Fix: {{'NAME': INPUTS, ...}}": bool(odd),
    }
    if problems := [text for text, is_found in causes.items() if is_found]:
        raise RecipeError("A merge by inputs cannot be made of these arguments.", problems)
    with contextlib.ExitStack() as stack:
        for expert in loaded.values():
            stack.enter_context(evaluating(expert.model))
            fields.setdefault("model_dtype", str(next(expert.model.parameters()).dtype).removeprefix("torch."))
        settings = InputSettings(loaded=loaded, **fields)
        return merge_with_inputs([recipe], data, check, settings, run, usual_tune_progress())[0]


def plan_inputs(recipe: Recipe, data: Any, check: Any, settings: InputSettings) -> list[str]:
    """Lines about the inputs, measurements and memory of a merge with inputs; data sets are read, no model is loaded.

    Raises:
        RecipeError, StatisticsError: inputs or data that cannot be used.
    """
    with locate_inputs(recipe) as given, contextlib.ExitStack() as stack:
        kinds = kinds_of([recipe], given) if data else frozenset()
        both = ((data, True), (check, False))
        measured, checked = (read_sources(recipe, d, settings, given.config, measured=m) if d else {} for d, m in both)
        base = given.base
        if base is None:
            place = next((e.config.base_model for e in given.experts if isinstance(e, Adapter)), None)
            base = locate_in(stack, place or recipe.experts[0].path)
        specs = require_model(base).specs
        method = "regmean" if recipe.method == AUTO and kinds else recipe.method
        lines = [f"{method}, with inputs of {len({**measured, **checked})} experts"]
        for label in recipe.labels:
            rows, own = measured.get(label), checked.get(label)
            held = 0 if rows is None or own or len(rows.rows) < FEWEST else len(rows.part(held=True).rows)
            few = len(rows.rows) - held if rows and kinds else 0
            asked = len(own.rows) if own else held or (len(rows.rows) if rows else 0)
            lines.append(f"  {label}: {few} inputs measured, answers compared on {asked}")
    if "gram" in kinds:
        size, matrices = gram_bytes(specs), sum(len(s.shape) == 2 for s in specs.values())
        lines.append(f"  inputs of {matrices} matrices: at most {format_size(size)} on the disk per expert,")
        lines.append("  removed after the merge")
    model = sum(s.numel * torch_dtype(settings.model_dtype).itemsize for s in specs.values() if s.is_floating)
    return [*lines, f"  memory: one model of {format_size(model)} at a time; nothing was run"]


def kinds_of(recipes: Sequence[Recipe], given: Located) -> frozenset[str]:
    """Kinds of statistics that the merges use."""
    found: set[str] = set()
    for recipe in recipes:
        if recipe.method != AUTO:
            found.update(get_method(recipe.method).needs_statistics)
        elif len(recipe.experts) > 1 and (recipe.base or given.only_adapters):
            found.add("gram")
    return frozenset(found)


def _ready(
    recipe: Recipe, experts: Sequence[ExpertRef], notes: tuple[str, ...], *, as_adapter: bool, fewest: int
) -> Recipe:
    """The recipe with statistics and notes; adapters become an adapter, also if the base that they run on is given.

    Args:
        fewest: inputs of an expert that were measured; 0: none.
    """
    given = {e.label: e.statistics for e in experts}
    own = [{**e.model_dump(), "statistics": given[e.label]} for e in recipe.experts]
    fields: dict[str, Any] = {"experts": tuple(map(ExpertRef.model_validate, own)), "notes": (*recipe.notes, *notes)}
    if recipe.method == AUTO and fewest:
        fields |= {"method": "regmean", "options": prior_of(fewest)}
        how = f"with a ridge of {RIDGE:g} and a prior that counts as {PRIOR:g} inputs"
        fields["notes"] += (f"auto: inputs of the experts: regmean {how}",)
    if as_adapter and recipe.output == ModelOutput():
        fields["output"] = AdapterOutput()
        fields["notes"] += ("adapters are merged into an adapter; --to model writes a full model of the base",)
    return recipe.model_copy(update=fields)


class InputMeasuring:
    """Measures experts on their inputs, and asks them, one after the other.

    Args:
        asking: loads and asks them.
        kinds: of statistics.
        folder: for statistics.
    """

    def __init__(self, asking: Asking, kinds: frozenset[str], folder: Path) -> None:
        self._asking, self._kinds, self._folder = asking, kinds, folder
        self._binding: Binding | None = None
        self.measured: list[int] = []

    def expert(self, expert: ExpertRef, data: DataRows | None, check: DataRows | None) -> ExpertRef:
        """The expert with statistics on its data; its answers are kept."""
        source = check or data
        if source is None:
            return expert
        asking, label = self._asking, expert.label
        asking.progress.doing(f"loading {label}")
        loaded, statistics = asking.loader.load(expert.path), expert.statistics
        holds = data is not None and check is None and len(data.rows) >= FEWEST
        measures, few = bool(self._kinds and data is not None and not statistics), 0
        if measures and data is not None:
            given = data.part(held=False) if holds else data
            statistics, few = str(self._folder / label), len(given.rows)
            self._collect(loaded, label, given, Path(statistics))
            self.measured.append(few)
        asked = source.part(held=True) if holds else source
        what = "of --check" if check is not None else "held back" if holds else "the same" if measures else "given"
        kind = "prompt" if source.options.rows else "inputs"
        asking.notes.append(f"{kind} of '{label}': {few} measured; answers compared on {len(asked.rows)} ({what})")
        try:
            asking.ask(label, loaded, asked, measured=measures and not holds and check is None)
        except StatisticsError as error:
            if check is not None:
                raise
            asking.notes.append(f"answers of '{label}' are not compared: {error.problems[0]}")
        return ExpertRef.model_validate({**expert.model_dump(), "statistics": statistics})

    def _collect(self, loaded: Loaded, label: str, data: DataRows, out: Path) -> None:
        """Statistics on inputs, of an encoder-decoder model with its own answers; a switched base is compared once."""
        batches = self._asking.batches(loaded, data)
        if getattr(getattr(loaded.model, "config", None), "is_encoder_decoder", False):
            new_tokens = self._asking.settings.new_tokens
            batches = [completed(loaded, b.arguments, new_tokens) for b in batches]
        progress = self._asking.progress
        progress.doing(f"measuring {label}", len(data.rows))
        settings = Settings(
            gram="gram" in self._kinds,
            fisher="fisher" in self._kinds,
            source=data.options.location,
            details=data.options.details(),
        )
        same = self._binding if loaded.adapter is not None and can_switch(loaded.adapter) else None
        with bound(loaded.model, loaded.checkpoint, loaded.adapter, same) as binding:
            found = measured(
                Measurement(loaded.model, binding, settings),
                [b.keywords for b in batches],
                lambda n, tokens: progress.done(n),
            )
            self._binding = binding
        found.save(out, overwrite=True)


def _finished(report: MergeReport, rows: tuple[AgreementRow, ...], *, removed: bool) -> MergeReport:
    """The report with answers, also in `report.json` and its page; the manifest marks removed statistics."""
    folder, manifest = Path(report.out), dict(report.manifest)
    diagnosis = None if report.diagnosis is None else dataclasses.replace(report.diagnosis, agreement=rows or None)
    with disk_errors(folder):
        if diagnosis is not None:
            write_diagnosis(diagnosis, folder)
            write_html(diagnosis, folder / "report.html")
        manifest["statistics"] = [{**row, "removed": removed} for row in manifest.get("statistics", ())]
        write_manifest(folder, manifest)
    return dataclasses.replace(report, answers=rows, diagnosis=diagnosis)
