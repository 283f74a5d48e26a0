"""Residual of a merged model on disk on the inputs that each expert's layers really see.

`rho_t` uses the inputs that the deltas represent; here inputs are measured, as Gram matrices `C_t`:

    rho_t(data)^2 = sum_l E||(W* - W_t) z||^2 / sum_l E||D_t z||^2,    E||A z||^2 = tr(A C_t A^T)

over the merged matrices `l`: 0 is as the expert, 1 as the base. Sums over layers come before the ratio, so that a
layer counts by the size of its expert's change. `W*` is as stored, rounded to its dtype.

Shapes: `O` out_features, `I` in_features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from actmat.checkpoints.base import Checkpoint, torch_dtype
from actmat.checkpoints.raw import raw_bytes
from actmat.diagnostics.measure import tidy
from actmat.diagnostics.model import DataResidual
from actmat.engine.findings import Findings
from actmat.engine.memory import Scratch
from actmat.engine.reader import TensorReader
from actmat.engine.statistics import FOREIGN, check_models, check_probes
from actmat.errors import StatisticsError
from actmat.linalg.layer_error import output_energy
from actmat.plan.measured import Measured, gram_key
from actmat.plan.model import MergePlan, TensorPlan
from actmat.plan.parts import Part, cut

__all__ = ["data_residuals"]


def data_residuals(
    plan: MergePlan,
    base: Checkpoint,
    experts: Sequence[Checkpoint],
    merged: Checkpoint,
    measured: Measured,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[DataResidual, ...]:
    """One row per expert with Gram matrices; one tensor of all checkpoints in memory at a time.

    Args:
        plan: of the merge that made `merged`.
        base, experts, merged: open checkpoints.
        measured: statistics; experts without any have no row.
        progress: called with the number of tensors done, and of all.

    Raises:
        StatisticsError: statistics of another model, or of no merged matrix.
    """
    check_probes(base, experts, measured)
    items = [t for t in plan.tensors if t.call is not None and t.action != "tie" and t.layout.role.is_matrix]
    missed: list[list[float]] = [[] for _ in experts]
    changed: list[list[float]] = [[] for _ in experts]
    findings = Findings(tolerated=True)
    with torch.no_grad():
        for done, item in enumerate(items):
            reader = TensorReader(
                item, base, experts, measured.labels, torch.float64, torch.device("cpu"), Scratch(), findings
            )
            for t, error_energy, delta_energy in _energies(item, reader, merged, measured):
                missed[t].append(error_energy)
                changed[t].append(delta_energy)
            check_models(item, experts, measured, *reader.hashes(), findings)
            progress(done + 1, len(items))
    if findings.foreign_statistics:
        raise StatisticsError(FOREIGN, sorted(findings.foreign_statistics))
    files = [(t, f) for t, f in enumerate(measured.files) if f is not None]
    if empty := [measured.labels[t] for t, _ in files if not changed[t]]:
        raise StatisticsError(
            "Nothing can be measured with these statistics: they hold no Gram matrix of a merged matrix. Collect them "
            "with --gram.",
            [f"expert '{label}'" for label in empty],
        )
    return tuple(
        DataResidual(
            expert=measured.labels[t],
            statistics=file.location,
            residual=tidy(math.sqrt(math.fsum(missed[t]) / energy)) if (energy := math.fsum(changed[t])) else None,
            matrices=len(changed[t]),
        )
        for t, file in files
    )


def _energies(
    item: TensorPlan, reader: TensorReader, merged: Checkpoint, measured: Measured
) -> Iterator[tuple[int, float, float]]:
    """Per matrix and expert with a Gram: its index, `tr(E C E^T)` and `tr(D C D^T)`, summed over tokens."""
    for part in cut(item.shape, item.layout, "matrix"):
        base_raw = reader.read_base(part)
        step_OI = (_stored(merged, item, part).double() - base_raw.double()).view(part.shape)
        for t, source in enumerate(item.sources):
            delta, _ = reader.load(t, part, base_raw)
            file = measured.files[t]
            if file is None:
                continue
            pairs = zip(part.layout.to_matrices(step_OI), part.layout.to_matrices(delta), strict=True)
            for k, (step, change_OI) in enumerate(pairs):
                key = gram_key(file, source, item.shape, item.layout, part, k)
                if key is None:
                    continue
                gram_II = file.gram(key, mean="sum", dtype=torch.float64)
                if gram_II.shape[-1] != change_OI.shape[-1]:
                    raise StatisticsError(
                        f"expert '{measured.labels[t]}': the Gram of '{source}' in {file.location} is of "
                        f"{gram_II.shape[-1]} inputs, the tensor has {change_OI.shape[-1]}; are these the statistics "
                        "of this model?"
                    )
                yield t, output_energy(step - change_OI, gram_II), output_energy(change_OI, gram_II)


def _stored(merged: Checkpoint, item: TensorPlan, part: Part) -> Tensor:
    """The part's entries of the merged tensor, flat."""
    spec = merged.specs.get(item.name)
    if spec is None or tuple(spec.shape) != tuple(item.shape):
        found = "missing" if spec is None else list(spec.shape)
        raise StatisticsError(
            f"{merged.location}: tensor '{item.name}' is {found}, its manifest says {list(item.shape)}; was the model "
            "changed after the merge? (actmat verify)"
        )
    raw = torch.empty(part.numel, dtype=torch_dtype(spec.dtype))
    merged.read_into(item.name, part.start * raw.itemsize, raw_bytes(raw))
    return raw
