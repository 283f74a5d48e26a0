"""Compare two outputs of `actmat merge`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.resolve import open_checkpoint
from actmat.diagnostics.model import REPORT_NAME, read_diagnosis
from actmat.errors import CheckpointError, MergeError
from actmat.report.comparison.inputs import matched_experts
from actmat.report.comparison.model import Comparison, TensorDifference
from actmat.report.comparison.outputs import Output, open_output
from actmat.report.comparison.reports import check_differences, method_of, residual_differences, setting_differences
from actmat.report.comparison.tensors import difference, factored_sums, stored_sums
from actmat.report.inputs import input_location
from actmat.report.manifest import read_manifest

__all__ = ["compare"]


def compare(
    first: str | Path, second: str | Path, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> Comparison:
    """Compare two outputs of `actmat merge`; memory is bounded whatever the size of a tensor.

    Args:
        first, second: directories of merged models, or of merged adapters.
        progress: called with the number of tensors compared so far, and of all.

    Raises:
        CheckpointError: no manifest, or an output that cannot be read.
        AlignmentError: no merges of the same base and experts; lists every difference.
    """
    outs = str(first), str(second)
    manifests = read_manifest(Path(first)), read_manifest(Path(second))
    experts = matched_experts(*manifests, outs)
    notes: list[str] = []
    with open_output(Path(first), manifests[0]) as one, open_output(Path(second), manifests[1]) as two:
        tensors = _tensors(one, two, notes, progress)
    report_one, report_two = (read_diagnosis(o) if (Path(o) / REPORT_NAME).is_file() else None for o in outs)
    if missing := [o for o, r in zip(outs, (report_one, report_two), strict=True) if r is None]:
        notes.append(f"no {REPORT_NAME} in {' and '.join(missing)}: residuals and checks are not compared")
    base = manifests[0]["base"]
    return Comparison(
        outs=outs,
        methods=(method_of(manifests[0]), method_of(manifests[1])),
        base=None if base is None else base["location"],
        experts=tuple(experts),
        settings=tuple(setting_differences(*manifests, experts)),
        tensors=tuple(tensors),
        diagnosed=(report_one is not None, report_two is not None),
        residuals=residual_differences(report_one, report_two, experts) if report_one and report_two else (),
        checks=check_differences(report_one, report_two) if report_one and report_two else (),
        notes=tuple(notes),
    )


def _tensors(
    one: Output, two: Output, notes: list[str], progress: Callable[[int, int], None]
) -> list[TensorDifference]:
    """Differences of all items of the outputs, in the order of the first."""
    if problems := [*one.missing(), *two.missing()]:
        raise CheckpointError("An output is not what its manifest says; actmat verify tells more.", problems)
    found = []
    with _opened_base((one, two), notes) as base:
        for name in one.items:
            if one.action(name) == two.action(name) == "tie":
                continue
            found.append(_difference(one, two, base, name))
            progress(len(found), len(one.items))
    return found


def _difference(one: Output, two: Output, base: Checkpoint | None, name: str) -> TensorDifference:
    """Difference of one item: from hashes where they agree, from factors where there are any, else from the bytes."""
    shape, actions = one.shape(name) or (), (one.action(name), two.action(name))
    if one.identity(name) is not None and one.identity(name) == two.identity(name):
        return TensorDifference(name, shape, actions, same=True, distance=0.0)
    factors = one.factors(name), two.factors(name)
    if factors[0] is not None and factors[1] is not None:
        return difference(name, shape, actions, factored_sums(factors[0], factors[1]))
    stored = one.stored_name(name)
    return difference(name, shape, actions, stored_sums(one.checkpoint, two.checkpoint, base, stored))


@contextlib.contextmanager
def _opened_base(outputs: tuple[Output, Output], notes: list[str]) -> Iterator[Checkpoint | None]:
    """The base, where a merge can still find it with the same names and shapes; else None and a note why.

    Merges without a base, those of adapters, yield None.
    """
    reasons = []
    for output in outputs:
        if output.manifest["base"] is None:
            continue
        location = input_location(output.manifest["base"], output.directory)
        try:
            opened = open_checkpoint(location)
        except MergeError as error:
            reasons.append(error.problems[0])
            continue
        with opened:
            shapes = {n: tuple(row["shape"]) for n, row in output.items.items()}
            if all(n in opened.specs and opened.specs[n].shape == s for n, s in shapes.items()):
                yield opened
                return
        reasons.append(f"{location} holds other tensors now")
    if reasons:
        notes.append(f"the base was not read, so distances are not relative to deltas: {reasons[0]}")
    yield None
