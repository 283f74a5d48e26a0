"""Merge by a few inputs of each expert: each input judges a merge that has not seen it, then all make the merge.

The inputs are dealt into folds. Statistics are measured by fold and added up, so that each expert runs once over its
inputs; for each fold there is a merge by the others, which some inputs of the fold judge. Where a merge is dear, every
fourth input is held back in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.model import Model
from actmat.checkpoints.writing.staging import disk_errors
from actmat.diagnostics.answers import FEW, GUESSES, verdict, with_answers
from actmat.diagnostics.model import AgreementRow, write_diagnosis
from actmat.errors import OutputError, RecipeError, StatisticsError, format_size
from actmat.experts.locate import locate_in
from actmat.experts.lora.adapter import Adapter
from actmat.extras.collect.batches import evaluating
from actmat.extras.collect.data import SELF
from actmat.extras.collect.files import merge_statistics
from actmat.extras.models.layered import model_bytes
from actmat.extras.models.loading import Loaded
from actmat.extras.pages.html import write_html
from actmat.extras.tune.kept import ASKED, FEWEST, SMALL_BYTES, Asking, Compared, RivalMerge
from actmat.extras.tune.memory import gram_bytes, place_models
from actmat.extras.tune.sources import DataRows, InputSettings, read_sources
from actmat.extras.tune.space import PRIOR, RIDGE, prior_of
from actmat.foreign import markdown
from actmat.methods import get_method
from actmat.progress import Progress
from actmat.recipe import ExpertRef, Recipe
from actmat.recipe.output import AdapterOutput, ModelOutput
from actmat.report.manifest import write_manifest
from actmat.run import MergeReport, run_recipes
from actmat.run.automatic import AUTO
from actmat.run.locate import Held, Located, locate_inputs
from actmat.settings import RunSettings


def merge_with_inputs(
    recipes: Sequence[Recipe],
    data: Any,
    check: Any,
    settings: InputSettings,
    run: RunSettings,
    progress: Progress,
) -> list[MergeReport]:
    """Merge recipes by inputs of their experts, and compare the answers of each merge with the experts'.

    Args:
        recipes: of one run, see `run_recipes`; `auto` takes `regmean`, or its choice without inputs, see `choose`.
        data: expert -> inputs of its task: a data set, one text, a list, or `SELF`; or `SELF` for all.
        check: expert -> inputs that are only compared on, in place of the others.
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
    sources = read_inputs(recipes, data, check, settings, run.held)
    folder = Path(f"{outs[0]}.statistics")
    asking = Asking(settings.loader(recipes[0].base, run), settings, progress)
    measuring = InputMeasuring(asking, sources, folder)
    removed = not (settings.keep_statistics or folder.exists())
    try:
        data, checked = (asking.with_written(recipes[0], rows) for rows in (sources.data, sources.check))
        for expert in recipes[0].experts:
            measuring.add(expert, data.get(expert.label), checked.get(expert.label))
        notes = tuple(dict.fromkeys(asking.notes))
        if sources.kinds and removed:
            notes += (
                "statistics of these inputs are removed after the merge; --set keep_statistics=true keeps them, to "
                "merge again from the recipe",
            )
        judging = [_as_adapter(r) for r in recipes] if sources.are_factors else recipes
        judged = _judge(judging, measuring, run)
        measuring.work.mkdir(parents=True, exist_ok=True)
        rivals = asking.rivals(judging[0], measuring.work, run.held)
        chosen = [choose(r, seen, rivals) for r, seen in zip(recipes, judged, strict=True)]
        ready = measuring.ready([r for r, _ in chosen], notes)
        reports = run_recipes(ready, run, progress, draw=write_html)
        merges = [
            (r.plan.recipe, {**seen, **asking.compare(r.out, str(r.out), asking.questions)})
            for r, (_, seen) in zip(reports, chosen, strict=True)
        ]
        rows = asking.rows(merges, rivals)
        return [_finished(r, answers, removed=removed) for r, answers in zip(reports, rows, strict=True)]
    finally:
        shutil.rmtree(folder if removed else measuring.work, ignore_errors=True)
        with contextlib.suppress(OSError):  # of statistics that are kept
            folder.rmdir()


@dataclasses.dataclass(frozen=True)
class MergeSources:
    """Inputs of a merge, and decisions that depend on them.

    Args:
        data, check: by expert.
        kinds: of statistics that the merges use.
        specs: tensors of the base.
        measured: weights whose inputs are measured, among these.
        folds: see `count_folds`.
        are_factors: the experts are adapters with factors, so that a merge is judged as an adapter.
    """

    data: Mapping[str, DataRows]
    check: Mapping[str, DataRows]
    kinds: frozenset[str]
    specs: Mapping[str, TensorSpec]
    measured: Mapping[str, TensorSpec]
    folds: int
    are_factors: bool


def read_inputs(recipes: Sequence[Recipe], data: Any, check: Any, settings: InputSettings, held: Held) -> MergeSources:
    """Read the inputs; raises the errors of `read_sources`."""
    with locate_inputs(recipes[0], held) as located, contextlib.ExitStack() as stack:
        kinds, both = kinds_of(recipes, located) if data else frozenset(), ((data, True), (check, False))
        rows, checked = (
            read_sources(recipes[0], d, settings, located.config, measured=m) if d else {} for d, m in both
        )
        specs = _specs_under(located, stack)
        are_factors = located.only_adapters and located.have_factors
        weights = _changed(located, specs)
        fewest = min((len(source.rows) for source in rows.values()), default=0)
        nbytes = max(gram_bytes(weights), 0 if are_factors else model_bytes(specs, "float32"))
        folds = count_folds(fewest, nbytes) if kinds else 1
        return MergeSources(rows, checked, kinds, specs, weights, folds, are_factors)


def _judge(recipes: Sequence[Recipe], measuring: InputMeasuring, run: RunSettings) -> list[dict[str, Compared]]:
    """Comparison of each recipe with the experts whose inputs are dealt: each fold on a merge by the others."""
    asking = measuring.asking
    judged = [dict.fromkeys(asking.dealt, Compared()) for _ in recipes]
    quick = dataclasses.replace(run, durable=False, overwrite=True, diagnose=False)
    for fold in range(measuring.folds if asking.dealt else 0):
        made = [r.model_copy(update={"out": str(measuring.work / f"merge-{n}")}) for n, r in enumerate(recipes)]
        ready = measuring.ready(made, (), without=fold)
        name = f"merging, {fold + 1} of {measuring.folds} to compare"
        for n, report in enumerate(run_recipes(ready, quick, asking.progress, doing=name)):
            compared = asking.compare(report.out, f"merge {fold + 1}", asking.dealt, fold)
            judged[n] = {label: judged[n][label] + compared[label] for label in asking.dealt}
            shutil.rmtree(report.out, ignore_errors=True)
    return judged


def choose(
    recipe: Recipe, judged: dict[str, Compared], rivals: Mapping[str, RivalMerge]
) -> tuple[Recipe, dict[str, Compared]]:
    """The recipe of `auto` by inputs, or without where that keeps more answers of the folds; and its comparison."""
    if recipe.method != AUTO or not judged or "without" not in rivals:
        return recipe, judged
    (method, options, space), without = rivals["without"]
    by_inputs, others = (sum(sum(c[label].kept) for label in judged) for c in (judged, without))
    count = sum(len(compared.kept) for compared in judged.values())
    said = f"auto: of {count} answers, a merge by inputs keeps {by_inputs}, {method} without inputs {others}"
    fields: dict[str, Any] = {"notes": (*recipe.notes, said)}
    if others <= by_inputs:
        return recipe.model_copy(update=fields), judged
    return recipe.model_copy(update=fields | {"method": method, "options": options, "space": space}), without


def count_folds(fewest: int, nbytes: int) -> int:
    """Folds of a merge by inputs, of an expert `fewest`; 1 where a merge, or the sums of a fold, take too many bytes.

    >>> [count_folds(n, 0) for n in (6, 8, 32)], count_folds(8, 3 << 30)
    ([2, 4, 2], 1)
    """
    if nbytes > SMALL_BYTES:
        return 1
    return 4 if FEW <= fewest < ASKED else 2


def _changed(located: Located, specs: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
    """Weights that adapters of linear layers change; of other experts all."""
    adapters = [expert for expert in located.experts if isinstance(expert, Adapter)]
    names = {f"{module.name}.weight" for adapter in adapters for module in adapter.modules.values()}
    return {n: specs[n] for n in names} if len(adapters) == len(located.experts) and names <= specs.keys() else specs


def _specs_under(located: Located, stack: contextlib.ExitStack) -> Mapping[str, TensorSpec]:
    """Tensors of the base, which may be that of the adapters, or of the first expert."""
    base = located.base
    if base is None:
        place = next((e.config.base_model for e in located.experts if isinstance(e, Adapter)), None)
        base = locate_in(stack, place or located.recipe.experts[0].path)
    return {} if isinstance(base, Adapter) else base.specs  # loading says what a file without a base cannot do


def merge_by_arguments(
    recipe: Recipe,
    run: RunSettings,
    data: Any,
    asked: Mapping[str, Any],
    modules: Mapping[str, nn.Module],
    progress: Progress,
) -> MergeReport:
    """Merge by inputs of the experts, from the arguments of `actmat.merge`.

    Args:
        recipe, run: of the merge.
        data: expert -> its inputs, or "self".
        asked: `check` and fields of `InputSettings`.
        modules: those among the inputs in memory, by their places.
        progress: receives callbacks.

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
        return merge_with_inputs([recipe], data, check, settings, run, progress)[0]


def plan_inputs(recipe: Recipe, data: Any, check: Any, settings: InputSettings, run: RunSettings) -> list[str]:
    """Lines about the inputs, measurements and memory of a merge with inputs; data sets are read, no model is loaded.

    Raises:
        RecipeError, StatisticsError: inputs or data that cannot be used.
    """
    sources = read_inputs([recipe], data, check, settings, {})
    checked, kinds, specs = sources.check, sources.kinds, sources.specs
    method = "regmean" if recipe.method == AUTO and kinds else recipe.method
    lines = [f"{method}, with inputs of {len({**sources.data, **checked})} experts"]
    for label in recipe.labels:
        rows = sources.data.get(label)
        dealt = deal(rows, sources.folds, checks=label in checked) if rows and kinds else []
        few = sum(n is not None for n in dealt)
        asked = dealt.count(None) or min(len(rows.rows) if rows else 0, ASKED)
        asked = len(checked[label].rows) if label in checked else asked
        what = "prompts that it writes" if rows and rows.options.location == SELF else "inputs"
        lines.append(f"  {label}: {few} {what} measured, answers compared on {asked}")
    if sources.folds > 1:
        lines.append(f"  inputs of {sources.folds} folds: those of each are compared with a merge by the others")
    if "gram" in kinds:
        weights = sources.measured
        size, matrices = format_size(gram_bytes(weights)), sum(len(s.shape) == 2 for s in weights.values())
        inputs = f"  inputs of {matrices} matrices: at most {size} on the disk per expert and fold,"
        lines += [inputs, "  removed after the merge"]
    place = place_models(run, settings.model_dtype)
    model = place.layers(specs) or f"one model of {format_size(place.peak(specs))} at a time, on {place.device}"
    return [*lines, f"  memory: {model}; nothing was run"]


def kinds_of(recipes: Sequence[Recipe], located: Located) -> frozenset[str]:
    """Kinds of statistics that the merges use."""
    named = {kind for r in recipes if r.method != AUTO for kind in get_method(r.method).needs_statistics}
    by_auto = any(r.method == AUTO and len(r.experts) > 1 and (r.base or located.only_adapters) for r in recipes)
    return frozenset(named | {"gram"} if by_auto else named)


def deal(data: DataRows, folds: int, *, checks: bool = False) -> list[int | None]:
    """The fold of each input that is measured; None for inputs that are held back.

    Args:
        folds: 1 holds every fourth back, if there are enough.
        checks: answers are compared on other inputs.
    """
    holds = folds == 1 and not checks and len(data.rows) >= FEWEST
    return [None if holds and n % FEWEST == FEWEST - 1 else n % folds for n in range(len(data.rows))]


def _as_adapter(recipe: Recipe) -> Recipe:
    """The recipe that makes an adapter of adapters, in place of a full model with the same deltas."""
    return recipe.model_copy(update={"output": AdapterOutput()}) if recipe.output == ModelOutput() else recipe


class InputMeasuring:
    """Measures experts on their inputs, and asks them, one after the other.

    Args:
        asking: loads and asks them.
        sources: of the inputs.
        folder: for statistics.
    """

    def __init__(self, asking: Asking, sources: MergeSources, folder: Path) -> None:
        self.asking, self.folds, self.work = asking, sources.folds, folder / ".folds"
        self._kinds, self._only, self._folder = sources.kinds, sources.measured.keys(), folder
        self._measured: dict[str, dict[int, int]] = {}  # expert -> fold -> inputs

    def add(self, expert: ExpertRef, data: DataRows | None, check: DataRows | None) -> None:
        """Measure an expert by fold, and keep its answers."""
        if (source := check or data) is None:
            return
        asking, label = self.asking, expert.label
        asking.progress.doing(f"loading {label}")
        loaded = asking.load(expert.path)
        folds: list[int | None] = []
        if self._kinds and data is not None and not expert.statistics:
            folds = deal(data, self.folds, checks=check is not None)
            self._measure(loaded, label, data, folds)
        measured = [n for n in folds if n is not None]
        what, dealt = "of --check" if check is not None else "given", check is None and len(set(measured)) > 1
        if dealt:
            what = f"each by a merge without it, of {self.folds}"
            source = dataclasses.replace(source, rows=source.rows[:ASKED])
        elif None in folds:
            source = dataclasses.replace(source, rows=[r for r, n in zip(source.rows, folds, strict=True) if n is None])
            what = "held back"
        elif folds and check is None:
            what = "the same"
        kind = "prompt" if source.options.rows else "inputs"
        asking.notes.append(
            f"{kind} of '{label}': {len(measured)} measured; answers compared on {len(source.rows)} ({what})"
        )
        try:
            asking.ask(label, loaded, source, folds=measured[:ASKED] if dealt else (), measured=what == "the same")
        except StatisticsError as error:
            if check is not None:
                raise
            asking.notes.append(f"answers of '{label}' are not compared: {error.problems[0]}")

    def ready(self, recipes: Sequence[Recipe], notes: tuple[str, ...], without: int | None = None) -> list[Recipe]:
        """The recipes with statistics of all inputs that were measured, or of those `without` a fold."""
        chosen = {k: [n for n in counts if n != without] or list(counts) for k, counts in self._measured.items()}
        uses_inputs = any(r.method == AUTO or get_method(r.method).needs_statistics for r in recipes)
        statistics = {label: str(self._sum(label, n, without)) for label, n in chosen.items()} if uses_inputs else {}
        fewest = min((sum(self._measured[k][n] for n in folds) for k, folds in chosen.items()), default=0)
        ready = []
        for recipe in recipes:
            rows = ({**e.model_dump(), "statistics": statistics.get(e.label, e.statistics)} for e in recipe.experts)
            fields: dict[str, Any] = {"experts": tuple(map(ExpertRef.model_validate, rows))}
            fields["mute"] = tuple(dict.fromkeys((*recipe.mute, *(GUESSES if self.asking.asked else ()))))
            fields["notes"] = (*recipe.notes, *notes)
            if recipe.method == AUTO and fewest:
                how = f"with a ridge of {RIDGE:g} and a prior that counts as {PRIOR:g} inputs"
                fields["notes"] += (f"auto: inputs of the experts: regmean {how}",)
                fields |= {"method": "regmean", "options": prior_of(fewest)}
            ready.append(recipe.model_copy(update=fields))
        return ready

    def _sum(self, label: str, folds: Sequence[int], without: int | None) -> Path:
        """Statistics of some folds."""
        parts = [self.work / f"{label}.{n}" for n in folds]
        out = self._folder / label if without is None else self.work / f"{label}-others"
        if len(parts) > 1:
            merge_statistics(parts, out, overwrite=True, repeated=True)
        elif without is None:
            parts[0].replace(out)
        return out if without is None or len(parts) > 1 else parts[0]

    def _measure(self, loaded: Loaded, label: str, data: DataRows, folds: Sequence[int | None]) -> None:
        """Statistics on the inputs of each fold."""
        self._measured[label] = {}
        for fold in sorted({n for n in folds if n is not None}):
            rows = [row for row, n in zip(data.rows, folds, strict=True) if n == fold]
            part = dataclasses.replace(data, rows=rows)
            self.asking.measure(label, loaded, part, self._kinds, self.work / f"{label}.{fold}", self._only)
            self._measured[label][fold] = len(rows)


def _finished(report: MergeReport, rows: tuple[AgreementRow, ...], *, removed: bool) -> MergeReport:
    """The report with answers, also in `report.json` and its page; the manifest marks removed statistics.

    The verdict on the answers is in the manifest, and begins the model card.
    """
    folder, manifest = Path(report.out), dict(report.manifest)
    diagnosis = with_answers(report.diagnosis, rows) if rows and report.diagnosis is not None else report.diagnosis
    card = folder / "README.md"
    with disk_errors(folder):
        if diagnosis is not None:
            write_diagnosis(diagnosis, folder)
            write_html(diagnosis, folder / "report.html")
        if line := verdict(rows):
            text = card.read_text(encoding="utf-8").replace(f"\n\n**{markdown(manifest.get('verdict', ''))}**", "", 1)
            head, title, rest = text.partition("\n# ")
            name, _, rest = rest.partition("\n")
            text = f"{head}{title}{name}\n\n**{markdown(line)}**\n{rest}"
            card.write_text(text, encoding="utf-8", newline="\n")
            manifest["verdict"] = line
        manifest["statistics"] = [{**row, "removed": removed} for row in manifest.get("statistics", ())]
        write_manifest(folder, manifest)
    return dataclasses.replace(report, answers=rows, diagnosis=diagnosis)
