"""Measure a merge, planned or finished."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Unpack

from actmat.api.fields import MergeFields, check_names
from actmat.api.held import MergeInput, MergeInputs, hold_inputs
from actmat.checkpoints.writing.staging import disk_errors
from actmat.diagnostics.model import REPORT_NAME, Diagnosis, read_diagnosis, write_diagnosis
from actmat.errors import StatisticsError
from actmat.methods import AnyMethod
from actmat.progress import Progress, usual_progress
from actmat.recipe.arguments import Location
from actmat.report.manifest import read_manifest
from actmat.run import diagnose_recipe
from actmat.settings import RunSettings


def diagnose(
    base: MergeInput | None = None,
    experts: MergeInputs = (),
    *,
    method: AnyMethod = "auto",
    weights: Sequence[float] | None = None,
    statistics: Mapping[str, Location] | Sequence[Location] | None = None,
    progress: Progress | None = None,
    **fields: Unpack[MergeFields],
) -> Diagnosis:
    """Measure the effect of `merge` with the same arguments on every matrix; nothing is written.

    Args:
        base, experts, method, weights, statistics, progress, fields: as for `merge`.

    Returns:
        Measures per matrix and the outcome of every check.

    Raises:
        MergeError: the same errors as `merge` for these inputs.
    """
    check_names(fields, MergeFields)
    recipe, settings = hold_inputs(base, experts).arguments({"method": method, **fields}, weights, statistics)
    return diagnose_recipe(recipe, settings, progress or usual_progress())


def diagnose_output(
    directory: str | Path, settings: RunSettings | None = None, progress: Progress | None = None
) -> Diagnosis:
    """The report of a merged model: the stored one, or the merge of its manifest measured again.

    Args:
        directory: output of `merge`.
        settings, progress: for the measurement.

    Raises:
        MergeError: the output has neither report nor manifest, or its inputs are missing.
    """
    folder = Path(directory)
    check_measurable(folder)
    if os.path.isfile(folder / REPORT_NAME):
        return read_diagnosis(folder)
    from actmat.extras.collect.outputs import recipe_of_output

    return diagnose_recipe(recipe_of_output(folder), settings, progress or usual_progress())


def check_measurable(directory: str | Path) -> None:
    """Raise if an output has no report, and cannot be measured again, since the merge removed its statistics.

    Raises:
        StatisticsError: gives the commands that help.
    """
    folder = Path(directory)
    if os.path.isfile(folder / REPORT_NAME):
        return
    if any(row.get("removed") for row in read_manifest(folder).get("statistics", ())):
        raise StatisticsError(
            f"The layers of {directory} cannot be measured: its merge measured inputs and removed the statistics. Fix: "
            f"'actmat verify {directory} --check NAME=INPUTS' compares answers; to have a report of the layers, merge "
            "again with --diagnose"
        )


def write_report(diagnosis: Diagnosis, path: str | Path) -> list[Path]:
    """Write a page if the name ends in .html, JSON if it ends in .json, else both into a directory.

    Returns:
        The written files; each is written atomically.

    Raises:
        OutputError: writing failed.
    """
    file = Path(path)
    with disk_errors(file.parent):
        if os.path.isdir(file) or file.suffix not in (".html", ".json"):
            file.mkdir(parents=True, exist_ok=True)
            return [write_diagnosis(diagnosis, file), draw_page(diagnosis, file / "report.html")]
        return [draw_page(diagnosis, file) if file.suffix == ".html" else write_diagnosis(diagnosis, file)]


def draw_page(diagnosis: Diagnosis, file: Path) -> Path:
    """Write the page of a diagnosis."""
    from actmat.extras.pages.html import write_html

    return write_html(diagnosis, file)
