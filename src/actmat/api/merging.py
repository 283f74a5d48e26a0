"""Merge checkpoints, or plan a merge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from actmat.api.diagnosing import draw_page
from actmat.api.fields import AverageFields, InputFields, MergeArguments, MergeFields, check_names
from actmat.api.held import MergeInput, MergeInputs, hold_inputs
from actmat.methods import AnyMethod
from actmat.planning import MergePlan
from actmat.progress import Progress, usual_progress
from actmat.recipe import Recipe
from actmat.recipe.arguments import Location, split_fields
from actmat.run import MergeReport, plan_recipe, run_recipes
from actmat.settings import RunSettings

if TYPE_CHECKING:
    from actmat.extras.models.in_memory import MemoryMerge


@overload
def merge(
    base: MergeInput | None = None, experts: MergeInputs = (), *, out: Location, **rest: Unpack[MergeArguments]
) -> MergeReport: ...
@overload
def merge(
    base: MergeInput | None = None,
    experts: MergeInputs = (),
    *,
    out: None = None,
    **rest: Unpack[MergeArguments],
) -> MemoryMerge: ...
def merge(
    base: MergeInput | None = None,
    experts: MergeInputs = (),
    *,
    out: Location | None = None,
    method: AnyMethod = "auto",
    weights: Sequence[float] | None = None,
    statistics: Mapping[str, Location] | Sequence[Location] | None = None,
    data: Mapping[str, Any] | Literal["self"] | None = None,
    progress: Progress | None = None,
    **fields: Unpack[InputFields],
) -> MergeReport | MemoryMerge:
    """Merge checkpoints into one: `W* = W_0 + scale * D*`, tensor by tensor.

    Args:
        base: the checkpoint that all experts come from: directory, file, hub id `org/name[@revision]`, URL, module, or
            state dict; None merges adapters into an adapter.
        experts: the same, one per expert, in a list or by name; of a `PeftModel`, its active adapter. A mapping gives
            `path` (any of these), `name` and `weight`.
        out: directory to write, or its URL; must be missing or empty, unless `overwrite` is set. None: nothing is
            written, the merge is returned.
        method: merge method, see `actmat methods`, or a function from deltas to a delta; `auto` chooses by the inputs,
            from benchmark results.
        weights: one per expert, for methods that take weights.
        statistics: outputs of `actmat statistics collect`, by expert name or in the order of the experts, for
            methods that need them.
        data: expert -> inputs of its task, a prompt, a file, a list of texts or chats, `DataOptions`, or "self": the
            expert writes prompts itself ("self": all do). The merge is made for them, and `answers` of the report says
            what it kept. Needs `out`. Experts in memory are then models of transformers, which run as they are, with
            the tokenizer of the folder that they were loaded from.
        progress: see `Progress`; None: a line in a notebook only; `Progress()`: silent.
        fields: any other field of a recipe (`options`, `scale`, `scope`, `rules`, `keep`, `dtype`, `seed`, ...; see
            `recipe.Recipe`) or of the settings of a run (`device`, `max_memory`, `threads`, `overwrite`, `diagnose`,
            ...; see `settings.RunSettings`); `blocks`, for image models: per expert the text of `--blocks`; `check`,
            like `data`, but only to compare answers; with either, `template` (text around prompts, `{}` is their
            place, or expert -> its own), `new_tokens`, `model_class`, `model_dtype` and `keep_statistics`.

    Returns:
        The report; the model is in `out`. Without `out`, the merge: its `tensors`, with the bytes that would be
        written, `model`, ready to run, `plan` and `records`.

    Raises:
        MergeError: see `actmat.errors`; nothing is left at `out`.
    """
    check_names(fields, InputFields)
    inputs = hold_inputs(base, experts)
    arguments = {"out": out and str(out), "method": method, **fields}
    asked = {name: arguments.pop(name) for name in INPUT_FIELDS & arguments.keys()}
    recipe, settings = inputs.arguments(arguments, weights, statistics)
    progress = progress or usual_progress()
    if data or asked.get("check"):
        from actmat.extras.tune.with_inputs import merge_by_arguments

        return merge_by_arguments(recipe, settings, data or {}, asked, inputs.modules, progress)
    if out is not None:
        return merge_recipes([recipe], settings, progress)[0]
    from actmat.extras.models.in_memory import run_in_memory

    return run_in_memory(recipe, settings, progress, module=base)


INPUT_FIELDS = frozenset({"check", "template", "new_tokens", "model_class", "model_dtype", "keep_statistics"})
"""Arguments of `merge` about inputs, and the models that run on them."""


def merge_recipes(
    recipes: Sequence[Recipe], settings: RunSettings, progress: Progress | None = None
) -> list[MergeReport]:
    """`run_recipes`, plus a page per measured merge; LoRA and single files are written as one where `out` ends so."""
    if recipes and all(str(r.out).endswith(".safetensors") for r in recipes):
        from actmat.extras.diffusion.files import run_into_files

        if (made := run_into_files(recipes, settings, progress or Progress(), run_recipes)) is not None:
            return made
    return run_recipes(recipes, settings, progress, draw=draw_page)


def plan(
    base: MergeInput | None = None,
    experts: MergeInputs = (),
    *,
    method: AnyMethod = "auto",
    weights: Sequence[float] | None = None,
    statistics: Mapping[str, Location] | Sequence[Location] | None = None,
    **fields: Unpack[MergeFields],
) -> MergePlan:
    """Plan a merge tensor by tensor, from headers. Arguments as for `merge`.

    Raises:
        MergeError: the inputs are incompatible; lists all problems.
    """
    check_names(fields, MergeFields)
    recipe, settings = hold_inputs(base, experts).arguments({"method": method, **fields}, weights, statistics)
    return plan_recipe(recipe, device=settings.device, device_memory=settings.device_memory, held=settings.held)


def average(
    checkpoints: Sequence[Location],
    *,
    out: Location,
    weights: str | Sequence[float] = "uniform",
    as_given: bool = False,
    progress: Progress | None = None,
    **fields: Unpack[AverageFields],
) -> MergeReport:
    """Write `W* = sum_t w_t W_t`, the weighted average of checkpoints of one run; needs no base.

    Args:
        checkpoints: directories, files, hub ids or URLs, in any form that `merge` reads.
        out: directory to write, or its URL.
        weights: `uniform`, `linear`, `ema:0.9`, `wsd`, or one number per checkpoint (see
            `extras.averaging.recipe.trajectory_weights`); divided by their sum.
        as_given: keep the order of `checkpoints`; by default they are sorted by step number.
        progress: see `Progress`.
        fields: those of a recipe that `AverageFields` has (`dtype`, `keep`, `drop`, `files_from`, ...), or fields of
            `RunSettings`.

    Returns:
        The report; the model is in `out`, with config and tokenizer of the last checkpoint.

    Raises:
        MergeError: see `actmat.errors`; nothing is left at `out`.
    """
    from actmat.extras.averaging.recipe import average_recipe

    check_names(fields, AverageFields)
    settings, rest = split_fields(fields)
    recipe = average_recipe([str(c) for c in checkpoints], weights, as_given=as_given, out=str(out), **rest)
    return merge_recipes([recipe], settings, progress)[0]
