"""Compare a merged model on disk with its experts, on data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actmat.api.diagnosing import recipe_of_output
from actmat.checkpoints.resolve import open_checkpoint
from actmat.diagnostics.measure import tidy
from actmat.diagnostics.model import AgreementRow, DataResidual
from actmat.engine.statistics import check_adapters
from actmat.errors import RecipeError, StatisticsError, did_you_mean
from actmat.experts.resolve import is_adapter
from actmat.extras.collect.agreement import agreement as compare
from actmat.extras.collect.data import DataOptions, check_data, make_batches
from actmat.extras.collect.models import Loaded, load_model
from actmat.extras.collect.on_data import data_residuals
from actmat.recipe import ExpertRef, Recipe, add_statistics
from actmat.run.open import open_inputs
from actmat.run.prepare import plans_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from actmat.extras.collect.batches import Batch

__all__ = ["SAMPLES", "DataSource", "agreement", "data_of", "prepare_data", "residual_on_data"]

SAMPLES = 64
"""Inputs per expert, as many as the study of docs/forecast.md had."""

DataSource = str | Path | DataOptions


def agreement(  # noqa: PLR0913 - keyword arguments of a public function
    directory: str | Path,
    data: DataSource | Mapping[str, DataSource],
    *,
    base: str | Path | None = None,
    model_class: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    logits: Callable[[Any], Tensor] | None = None,
    mask: Callable[[Any], Tensor | None] | None = None,
    progress: Callable[[str, int], None] = lambda expert, samples: None,
) -> tuple[AgreementRow, ...]:
    """Compare the answers of a merged model with those of each of its experts, on unlabelled inputs.

    `disagreement` is the share of predictions whose most probable class differs, `divergence` the mean of
    `KL(expert || merged)` in nats; both are 0 where the merged model answers as the expert. A measurement, not a
    forecast: docs/forecast.md says what it has to do with the accuracy that an expert loses.

    The merged model stays in memory, with one expert at a time beside it. Texts and images are prepared by the
    tokenizer or image processor that lies with the expert.

    Args:
        directory: output of `merge`, a model or an adapter; its manifest names the experts.
        data: a data set for all experts, or expert -> its own (better: each expert's own inputs); experts that are not
            named are left out. A location means its first 64 samples, `DataOptions` says more.
        base: the checkpoint under adapters; default: as the manifest, else the adapter, says.
        model_class: class of transformers to load all models with; default: what the config of each names.
        dtype, device: of the models while they run.
        logits, mask: see `actmat.statistics.agreement`.
        progress: called with an expert's name and its samples so far.

    Raises:
        CheckpointError: no manifest there.
        RecipeError: data for an expert that the merge does not have.
        StatisticsError: data or a model that cannot be used, or answers that cannot be compared.
    """
    place = Path(directory)
    recipe = recipe_of_output(place)
    chosen = data_of(recipe, data)
    prepare_data(chosen)
    experts = {e.label: e.path for e in recipe.experts if e.label in chosen}
    if base is not None and not any(map(is_adapter, (str(place), *experts.values()))):
        raise StatisticsError(f"A base goes with adapters; {place} and the experts compared are full models.")

    def load(location: str) -> Loaded:
        under = str(base or recipe.base or "") or None
        return load_model(
            location,
            base=under if is_adapter(location) else None,
            model_class=model_class,
            dtype=dtype,
            device=device,
        )

    comparison = _Comparison(place, load(str(place)).model, load, logits, mask, progress)
    return tuple(comparison.row(label, experts[label], chosen[label]) for label in experts)


@dataclass(frozen=True)
class _Comparison:
    """A merged model in memory, to be compared with its experts one after another.

    Args:
        place: output that the merged model was loaded from.
        merged: the model.
        load: loads an expert.
        logits, mask, progress: see `agreement`.
    """

    place: Path
    merged: nn.Module
    load: Callable[[str], Loaded]
    logits: Callable[[Any], Tensor] | None
    mask: Callable[[Any], Tensor | None] | None
    progress: Callable[[str, int], None]

    def row(self, label: str, location: str, data: DataOptions) -> AgreementRow:
        """Compare with one expert, which is freed on return: two models are in memory, never three."""
        try:
            expert = self.load(location)
            batches = _counted(make_batches(expert, data), label, self.progress)
            found = compare(self.merged, expert.model, batches, logits=self.logits, mask=self.mask)
        except StatisticsError as error:
            raise StatisticsError(f"Expert '{label}' cannot be compared with {self.place}.", error.problems) from None
        return AgreementRow(
            expert=label,
            data=data.location,
            disagreement=tidy(found.disagreement),
            divergence=tidy(max(0.0, found.divergence)),  # rounding gives values below 0
            predictions=found.predictions,
        )


def residual_on_data(
    directory: str | Path,
    statistics: Mapping[str, str | Path] | Sequence[str | Path],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[DataResidual, ...]:
    """Distance of a merged model from its experts on the inputs that their layers see, `rho_t` of measured inputs.

    `rho_t^2 = sum_l E||(W* - W_t) z||^2 / sum_l E||D_t z||^2` over the merged matrices `l` with a Gram matrix: 0 is as
    the expert, 1 as the base. A few tensors are in memory at a time, and no model is run.

    Args:
        directory: output of `merge`, a full model.
        statistics: expert -> what `actmat statistics collect` wrote for it, or one for each in their order.
        progress: called with tensors done and of how many.

    Raises:
        CheckpointError: no manifest there, or inputs that are gone.
        RecipeError: statistics for an expert that the merge does not have.
        StatisticsError: statistics of another model, or a merged adapter.
    """
    place = Path(directory)
    recipe = recipe_of_output(place)
    if is_adapter(str(place)):
        raise StatisticsError(
            f"{place} is an adapter, and statistics are held against full matrices. Merge with a base (--base, --to "
            "model), or compare answers (--data)."
        )
    given = statistics if isinstance(statistics, Mapping) else [str(s) for s in statistics]
    experts = add_statistics([e.model_dump() for e in recipe.experts], given)
    recipe = recipe.model_copy(update={"experts": tuple(ExpertRef.model_validate(e) for e in experts)})
    with open_inputs([recipe]) as opened, open_checkpoint(place) as merged:
        inputs, (plan,) = opened.inputs, plans_of(opened)
        check_adapters(inputs)
        return data_residuals(plan, inputs, merged, progress=progress)


def data_of(recipe: Recipe, data: DataSource | Mapping[str, DataSource]) -> dict[str, DataOptions]:
    """Expert -> its data, in the order of the experts."""
    given = data if isinstance(data, Mapping) else dict.fromkeys(recipe.labels, data)
    if unknown := [name for name in given if name not in recipe.labels]:
        known = f"Experts: {', '.join(recipe.labels)}"
        raise RecipeError(
            "Data is given for experts that the merge does not have.",
            [f"no expert is named '{n}'.{did_you_mean(n, recipe.labels)} {known}" for n in unknown],
        )
    if not given:
        raise StatisticsError("No data is given: name a data set for at least one expert.")
    return {label: _options(given[label]) for label in recipe.labels if label in given}


def _options(source: DataSource) -> DataOptions:
    return source if isinstance(source, DataOptions) else DataOptions(str(source), max_samples=SAMPLES)


def prepare_data(chosen: Mapping[str, DataOptions]) -> None:
    """Open every data set before the first model is loaded, which may take minutes."""
    problems: list[str] = []
    for options in dict.fromkeys(chosen.values()):
        try:
            check_data(options)
        except StatisticsError as error:
            problems += error.problems
    if problems:
        raise StatisticsError("The data cannot be used.", problems)


def _counted(batches: Iterable[Batch], label: str, progress: Callable[[str, int], None]) -> Iterator[Batch]:
    """The batches, each reported once both models have answered it."""
    samples = 0
    for batch in batches:
        yield batch
        samples += len(next(iter(batch.values()))) if isinstance(batch, Mapping) else 0
        progress(label, samples)
