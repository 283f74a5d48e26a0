"""Compare a merged model on disk with its experts, on data: their answers, and the inputs that their layers see.

`rho_t` of a diagnosis uses the inputs that the deltas represent; `residual_on_data` uses measured ones, as Gram
matrices `C_t`:

    rho_t(data)^2 = sum_l E||(W* - W_t) z||^2 / sum_l E||D_t z||^2,    E||A z||^2 = tr(A C_t A^T)

over the merged matrices `l`: 0 is as the expert, 1 as the base. Sums over layers come before the ratio, so that a
layer counts by the size of its expert's change. `W*` is as stored, rounded to its dtype.

Shapes: `O` out_features, `I` in_features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actmat.checkpoints.base import Checkpoint, torch_dtype
from actmat.checkpoints.raw import raw_bytes
from actmat.diagnostics.measure import tidy
from actmat.diagnostics.model import AgreementRow, DataResidual
from actmat.engine.content import FOREIGN, check_adapters, check_probes, foreign_tensors
from actmat.engine.findings import Findings
from actmat.engine.inputs import Inputs
from actmat.engine.memory import Scratch
from actmat.engine.reader import TensorReader
from actmat.errors import StatisticsError
from actmat.experts.locate import locate
from actmat.extras.collect.agreement import Agreement
from actmat.extras.collect.agreement import agreement as compare
from actmat.extras.collect.batches import Batch
from actmat.extras.collect.data import DataOptions, DataSource, data_of, make_batches, prepare_data
from actmat.extras.models.loading import Loaded, load_model
from actmat.planning.model import Item, MergePlan
from actmat.planning.regions import Region, cut
from actmat.recipe import ExpertRef, add_statistics
from actmat.report.outputs import recipe_of_output
from actmat.run.open import open_inputs
from actmat.run.prepare import plans_of


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
    """Compare the answers of a merged model with those of each of its experts, on unlabeled inputs.

    `disagreement` is the share of predictions whose most probable class differs, `divergence` the mean of
    `KL(expert || merged)` in nats; both are 0 where the merged model answers as the expert. A measurement, not a
    forecast: docs/tried.md says what it has to do with the accuracy that an expert loses.

    The merged model stays in memory, with one expert at a time beside it. Texts and images are prepared by the
    tokenizer or image processor that lies with the expert.

    Args:
        directory: output of `merge`, a model or an adapter; its manifest names the experts.
        data: a data set for all experts, or expert -> its own (better: each expert's own inputs); experts that are not
            named are left out. A location means its first 64 samples, `DataOptions` says more.
        base: the checkpoint under adapters; default: as the manifest, else the adapter, says.
        model_class: class of transformers to load all models with; default: the one that the config of each names.
        dtype, device: of the models while they run.
        logits, mask: see `extras.collect.agreement`.
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
    if base is not None and not any(map(_is_adapter, (str(place), *experts.values()))):
        raise StatisticsError(f"A base goes with adapters; {place} and the experts compared are full models.")

    def load(location: str) -> Loaded:
        under = str(base or recipe.base or "") or None
        return load_model(location, adapters_base=under, model_class=model_class, dtype=dtype, device=device)

    merged = load(str(place)).model
    rows = []
    for label, location in experts.items():
        told = partial(progress, label)
        try:
            found = _with_expert(merged, partial(load, location), chosen[label], told, logits=logits, mask=mask)
        except StatisticsError as error:
            raise StatisticsError(f"Expert '{label}' cannot be compared with {place}.", error.problems) from None
        divergence = max(0.0, found.divergence)  # rounding gives values below 0
        data_set = chosen[label].location
        rows.append(AgreementRow(label, data_set, tidy(found.disagreement), tidy(divergence), found.predictions))
    return tuple(rows)


def _with_expert(
    merged: nn.Module, load: Callable[[], Loaded], data: DataOptions, progress: Callable[[int], None], **how: Any
) -> Agreement:
    """Compare with one expert, which is freed on return: two models are in memory, never three."""
    expert = load()
    return compare(merged, expert.model, _counted(make_batches(expert, data), progress), **how)


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
    given = statistics if isinstance(statistics, Mapping) else [str(s) for s in statistics]
    experts = add_statistics([e.model_dump() for e in recipe.experts], given)
    recipe = recipe.model_copy(update={"experts": tuple(ExpertRef.model_validate(e) for e in experts)})
    with locate(place) as merged:
        if merged.needs_base:
            raise StatisticsError(
                f"{place} is an adapter, and statistics are held against full matrices. Merge with a base (--base, "
                "--to model), or compare answers (--data)."
            )
        with open_inputs([recipe]) as opened:
            inputs, (plan,) = opened.inputs, plans_of(opened)
            check_adapters(inputs)
            return _residuals(plan, inputs, merged.stored, progress=progress)


def _is_adapter(place: str) -> bool:
    with locate(place) as found:
        return found.needs_base


def _counted(batches: Iterable[Batch], progress: Callable[[int], None]) -> Iterator[Batch]:
    """The batches, each reported once both models have answered it."""
    samples = 0
    for batch in batches:
        yield batch
        samples += len(next(iter(batch.values()))) if isinstance(batch, Mapping) else 0
        progress(samples)


def _residuals(
    plan: MergePlan,
    inputs: Inputs,
    merged: Checkpoint,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[DataResidual, ...]:
    """One row per expert with Gram matrices; one tensor of all checkpoints in memory at a time.

    Args:
        plan: of the merge that made `merged`.
        progress: called with tensors done and of how many.

    Raises:
        StatisticsError: statistics of another model, or of no merged matrix.
    """
    check_probes(inputs)
    items = [i for i in plan.items if i.call is not None and i.layout.role.is_matrix]
    apart: list[list[float]] = [[] for _ in inputs.experts]
    own: list[list[float]] = [[] for _ in inputs.experts]
    foreign: list[str] = []
    with torch.no_grad():
        for done, item in enumerate(items):
            findings = Findings(tolerated=True)
            reader = TensorReader(item, inputs, torch.float64, Scratch(), findings)
            for t, missed, changed in _energies(item, reader, merged):
                apart[t].append(missed)
                own[t].append(changed)
            foreign += foreign_tensors(item, inputs, *reader.hashes())
            progress(done + 1, len(items))
    if foreign:
        raise StatisticsError(FOREIGN, sorted(foreign))
    files = [(t, f) for t, f in enumerate(inputs.statistics.files) if f is not None]
    if empty := [inputs.labels[t] for t, _ in files if not own[t]]:
        raise StatisticsError(
            "Nothing can be measured with these statistics: they hold no Gram matrix of a merged matrix. Collect them "
            "with --gram.",
            [f"expert '{label}'" for label in empty],
        )
    return tuple(
        DataResidual(
            expert=inputs.labels[t],
            statistics=file.location,
            residual=tidy(math.sqrt(math.fsum(apart[t]) / energy)) if (energy := math.fsum(own[t])) else None,
            matrices=len(own[t]),
        )
        for t, file in files
    )


def _energies(item: Item, reader: TensorReader, merged: Checkpoint) -> Iterator[tuple[int, float, float]]:
    """Per matrix and expert with a Gram: its index, `tr(E C E^T)` and `tr(D C D^T)`, summed over tokens."""
    for region in cut(item.shape, item.layout, "matrix"):
        base_raw = reader.read_base(region)
        step_OI = (_stored(merged, item, region).double() - base_raw.double()).view(region.shape)
        for t, file in enumerate(reader.inputs.statistics.files):
            delta, _ = reader.load(t, region, base_raw)
            if file is None:
                continue
            pairs = zip(region.layout.to_matrices(step_OI), region.layout.to_matrices(delta), strict=True)
            for k, (step, change_OI) in enumerate(pairs):
                key = reader.inputs.statistics.gram_keys(item, region, k)[t]
                if key is None:
                    continue
                gram_II = file.gram(key, mean="sum", dtype=torch.float64)
                if gram_II.shape[-1] != change_OI.shape[-1]:
                    raise StatisticsError(
                        f"expert '{reader.inputs.labels[t]}': the Gram of '{key}' in {file.location} is of "
                        f"{gram_II.shape[-1]} inputs, the tensor has {change_OI.shape[-1]}; are these the statistics "
                        "of this model?"
                    )
                yield t, output_energy(step - change_OI, gram_II), output_energy(change_OI, gram_II)


def output_energy(matrix_OI: Tensor, gram_II: Tensor) -> float:
    """`E||A z||^2 = tr(A C A^T)` with `C = E[z z^T]`, in float64, not below zero."""
    wide = matrix_OI.double()
    return max(0.0, float(((wide @ gram_II.double()) * wide).sum()))


def _stored(merged: Checkpoint, item: Item, region: Region) -> Tensor:
    """The region's entries of the merged tensor, flat."""
    spec = merged.specs.get(item.name)
    if spec is None or tuple(spec.shape) != tuple(item.shape):
        found = "missing" if spec is None else list(spec.shape)
        raise StatisticsError(
            f"{merged.location}: tensor '{item.name}' is {found}, its manifest says {list(item.shape)}; was the model "
            "changed after the merge? (actmat verify)"
        )
    raw = torch.empty(region.numel, dtype=torch_dtype(spec.dtype))
    merged.read_into(item.name, region.start * raw.itemsize, raw_bytes(raw))
    return raw
