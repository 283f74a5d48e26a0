"""Compare a merged model on disk with its experts on the inputs that their layers see.

`rho_t` of a diagnosis uses the inputs that the deltas represent; this one uses measured ones, as Gram
matrices `C_t`:

    rho_t(data)^2 = sum_l E||(W* - W_t) z||^2 / sum_l E||D_t z||^2,    E||A z||^2 = tr(A C_t A^T)

over the merged matrices `l`: 0 is as the expert, 1 as the base. Sums over layers come before the ratio, so that a
layer counts by the size of its expert's change. `W*` is as stored, rounded to its dtype.

Shapes: `O` out_features, `I` in_features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from actmat.checkpoints.base import torch_dtype
from actmat.checkpoints.model import Model
from actmat.checkpoints.raw import raw_bytes
from actmat.diagnostics.measure import tidy
from actmat.diagnostics.model import DataResidual
from actmat.engine.content import FOREIGN, check_adapters, foreign_tensors
from actmat.engine.findings import Findings
from actmat.engine.inputs import Inputs
from actmat.engine.memory import Scratch
from actmat.engine.reader import ItemReader
from actmat.errors import StatisticsError
from actmat.experts.locate import locate
from actmat.extras.collect.outputs import recipe_of_output
from actmat.planning.model import Item, MergePlan
from actmat.planning.regions import Region, cut
from actmat.recipe import ExpertRef, add_statistics
from actmat.run.inputs import open_inputs
from actmat.run.run import plan_all


def measure_residuals(
    directory: str | Path,
    statistics: Mapping[str, str | Path] | Sequence[str | Path],
    progress: Callable[[int, int], None],
) -> tuple[DataResidual, ...]:
    """Rows of `actmat.residual_on_data`."""
    place = Path(directory)
    recipe = recipe_of_output(place)
    places_of = statistics if isinstance(statistics, Mapping) else [str(s) for s in statistics]
    experts = add_statistics([e.model_dump() for e in recipe.experts], places_of)
    recipe = recipe.model_copy(update={"experts": tuple(ExpertRef.model_validate(e) for e in experts)})
    with locate(place) as merged:
        if not isinstance(merged, Model):
            raise StatisticsError(
                f"{place} is an adapter, and statistics are held against full matrices. Merge with a base (--base, "
                "--to model), or compare answers (--data)."
            )
        with open_inputs([recipe]) as (inputs, places):
            (plan,) = plan_all(inputs, places.room)
            check_adapters(inputs)
            return _residuals(plan, inputs, merged, progress=progress)


def _residuals(
    plan: MergePlan,
    inputs: Inputs,
    merged: Model,
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
    items = [i for i in plan.items if i.call is not None and i.layout.role.is_matrix]
    apart: list[list[float]] = [[] for _ in inputs.experts]
    changes: list[list[float]] = [[] for _ in inputs.experts]
    with torch.no_grad():
        for done, item in enumerate(items):
            findings = Findings()
            reader = ItemReader(item, inputs, torch.float64, Scratch(), findings)
            for t, missed, changed in _energies(item, reader, merged):
                apart[t].append(missed)
                changes[t].append(changed)
            if foreign := foreign_tensors(item, inputs, *reader.hashes()):
                raise StatisticsError(FOREIGN, foreign)
            progress(done + 1, len(items))
    files = [(t, f) for t, f in enumerate(inputs.statistics.files) if f is not None]
    if empty := [inputs.labels[t] for t, _ in files if not changes[t]]:
        raise StatisticsError(
            "Nothing can be measured with these statistics: they hold no Gram matrix of a merged matrix. Collect them "
            "with --gram.",
            [f"expert '{label}'" for label in empty],
        )
    return tuple(
        DataResidual(
            expert=inputs.labels[t],
            statistics=file.location,
            residual=tidy(math.sqrt(math.fsum(apart[t]) / energy)) if (energy := math.fsum(changes[t])) else None,
            matrices=len(changes[t]),
        )
        for t, file in files
    )


def _energies(item: Item, reader: ItemReader, merged: Model) -> Iterator[tuple[int, float, float]]:
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


def _stored(merged: Model, item: Item, region: Region) -> Tensor:
    """The region's entries of the merged tensor, flat."""
    spec = merged.specs.get(item.name)
    if spec is None or tuple(spec.shape) != tuple(item.shape):
        shape = "missing" if spec is None else list(spec.shape)
        raise StatisticsError(
            f"{merged.location}: tensor '{item.name}' is {shape}, its manifest says {list(item.shape)}; was the model "
            "changed after the merge? (actmat verify)"
        )
    raw = torch.empty(region.numel, dtype=torch_dtype(spec.dtype))
    merged.tensors.read_into(item.name, region.start * raw.itemsize, raw_bytes(raw))
    return raw
