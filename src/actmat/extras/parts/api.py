"""Merge one part of a merge; finish the output when all parts are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actmat.api import Location, make_arguments
from actmat.extras.parts.merging import FinishReport, PartReport, finish_parts, run_part
from actmat.extras.parts.shares import Part
from actmat.progress import Progress


def merge_part(
    base: Location | None = None,
    experts: Sequence[Location | Mapping[str, Any]] = (),
    *,
    part: str,
    out: Location,
    method: str = "auto",
    weights: Sequence[float] | None = None,
    statistics: Mapping[str, Location] | Sequence[Location] | None = None,
    progress: Progress | None = None,
    **fields: Any,
) -> PartReport:
    """Merge one part of what `merge` with the same arguments would; `finish(out)` completes the output.

    Args:
        part: such as "3/16": the third of sixteen, counted from 1.
        base, experts, out, method, weights, statistics, progress, fields: as for `merge`, the same for all parts.

    Raises:
        OutputError: there are parts of another merge into `out`; says what differs.
        MergeError: whatever `merge` would raise.
    """
    recipe, settings = make_arguments(base, experts, {"out": str(out), "method": method} | fields, weights, statistics)
    return run_part(recipe, Part.parse(part), settings, progress)


def finish(out: Location, *, check: bool = True, overwrite: bool = False, sha256: bool = False) -> FinishReport:
    """Complete the output of which all parts are there; one that is finished is verified.

    Args:
        out: as given to `merge_part`.
        check: hash every tensor again as it lies on the disk.
        overwrite: replace an earlier output of actmat at `out`.
        sha256: add SHA-256 of the weight files to the manifest.

    Raises:
        OutputError: parts are missing, each named; nothing is changed then.
    """
    return finish_parts(Path(out), check=check, overwrite=overwrite, sha256=sha256)
