"""Compare two outputs of `actmat merge`: their tensors, manifests and reports."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.resolve import open_checkpoint
from actmat.diagnostics.model import REPORT_NAME, CheckResult, Diagnosis, read_diagnosis
from actmat.errors import CheckpointError, MergeError
from actmat.extras.pages.comparison.inputs import matched_experts
from actmat.extras.pages.comparison.model import (
    CheckDifference,
    Comparison,
    ResidualDifference,
    SettingDifference,
    TensorDifference,
)
from actmat.extras.pages.comparison.outputs import Output, open_output
from actmat.extras.pages.comparison.tensors import difference, factored_sums, stored_sums
from actmat.report.manifest import input_location, read_manifest
from actmat.report.totals import Norms, recorded_totals

__all__ = ["compare"]

ExpertNames = Sequence[tuple[str, str]]


def compare(
    first: str | Path, second: str | Path, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> Comparison:
    """Compare two outputs of `actmat merge`, models or adapters; memory is bounded whatever the size of a tensor.

    Args:
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
    report_one, report_two = (read_diagnosis(o) if os.path.isfile(Path(o) / REPORT_NAME) else None for o in outs)
    if missing := [o for o, r in zip(outs, (report_one, report_two), strict=True) if r is None]:
        notes.append(f"no {REPORT_NAME} in {' and '.join(missing)}: residuals and checks are not compared")
    base = manifests[0]["base"]
    return Comparison(
        outs=outs,
        methods=(_method_of(manifests[0]), _method_of(manifests[1])),
        base=None if base is None else base["location"],
        experts=tuple(experts),
        settings=tuple(_setting_differences(*manifests, experts)),
        tensors=tuple(tensors),
        diagnosed=(report_one is not None, report_two is not None),
        residuals=_residual_differences(report_one, report_two, experts) if report_one and report_two else (),
        checks=_check_differences(report_one, report_two) if report_one and report_two else (),
        notes=tuple(notes),
        totals=(_norms(manifests[0]), _norms(manifests[1])),
    )


def _norms(manifest: Mapping[str, Any]) -> Norms | None:
    """Norms on record; None where an earlier version, or somebody else, wrote none."""
    try:
        return recorded_totals(manifest).norms
    except CheckpointError:
        return None


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
    first, second = (o.checkpoint.specs[stored].dtype for o in (one, two))
    sums = stored_sums(one.checkpoint, two.checkpoint, base, stored)
    return difference(name, shape, actions, sums, None if first == second else (first, second))


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


def _method_of(manifest: Mapping[str, Any]) -> str:
    """Name of the merge's method."""
    return str(manifest["recipe"].get("method", "actmat"))


def _setting_differences(
    first: Mapping[str, Any], second: Mapping[str, Any], experts: ExpertNames
) -> Iterator[SettingDifference]:
    """Fields that differ: of recipes without locations and names of inputs (their contents agree), versions, device."""
    mine = _flat(first, {a: a for a, _ in experts})
    other = _flat(second, {b: a for a, b in experts})
    for field in dict.fromkeys([*mine, *other]):
        if mine.get(field) != other.get(field):
            yield SettingDifference(field, mine.get(field), other.get(field))


def _flat(manifest: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    recipe = {k: v for k, v in manifest["recipe"].items() if k not in ("base", "experts", "method")}
    out: dict[str, Any] = {"method": _method_of(manifest)}
    for field, value in recipe.items():
        out |= {f"{field}.{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {field: value}
    labels = [names[e["name"]] for e in manifest["experts"]]
    listed = manifest["recipe"].get("experts", [])
    out["order of experts"] = ", ".join(labels)
    out |= {f"weight of {n}": e.get("weight", 1.0) for n, e in zip(labels, listed, strict=True)}
    out |= {f"version of {k}": v for k, v in manifest["versions"].items()}
    return out | {"device": manifest.get("device", "cpu")}


def _residual_differences(first: Diagnosis, second: Diagnosis, experts: ExpertNames) -> tuple[ResidualDifference, ...]:
    """Residuals of the experts that both reports have."""
    one, two = ({s.name: s.residual for s in r.experts_summary} for r in (first, second))
    return tuple(ResidualDifference(a, one[a], two[b]) for a, b in experts if a in one and b in two)


def _check_differences(first: Diagnosis, second: Diagnosis) -> tuple[CheckDifference, ...]:
    """Checks with other outcomes, in the order of their codes."""
    one, two = ({c.code: c for c in r.checks} for r in (first, second))
    titles = {c.code: c.title for c in (*second.checks, *first.checks)}
    found = (CheckDifference(c, titles[c], _outcome(one.get(c)), _outcome(two.get(c))) for c in sorted(titles))
    return tuple(c for c in found if c.first != c.second)


def _outcome(check: CheckResult | None) -> str | None:
    """`issue found, 3 tensors`, `clear`; None for a check that is not in the report."""
    if check is None:
        return None
    if check.verdict != "found":
        return check.verdict.replace("_", " ")
    tensors = f", {check.count} tensor{'s' if check.count != 1 else ''}" if check.count else ""
    return f"{check.severity} found{tensors}"
