"""`actmat diagnose`: measure and check a merge, planned or written, without writing a model."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actmat.cli import flags
from actmat.cli.data import COMPARED, InputFlags
from actmat.cli.flags import FlagFields, RecipeFlags, statistics_of
from actmat.cli.listing import BAD_INPUTS, command
from actmat.cli.screen import counting, print_json, print_result, showing_progress
from actmat.settings import RunSettings

if TYPE_CHECKING:
    from actmat.diagnostics.model import Diagnosis

OF_OUTPUT = ("dtype", "rank", "out", "blocks")
"""Recipe fields that affect only the written output."""
MEASURING = ("device", "device_memory", "max_memory", "threads", "executor")
"""Run settings that apply when nothing is written."""


@command(
    "look",
    "measured; findings of checks do not change the code",
    f"{BAD_INPUTS}; with `--strict`, a check of severity issue found something",
)
def diagnose(
    *,
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RECIPE.yaml|MERGED|REPORT.json]",
            help="A recipe file, the directory of a merged model, or its report.json.",
        ),
    ] = None,
    fields: Annotated[RecipeFlags, FlagFields(without=OF_OUTPUT, set=("to", "drop"))],
    run: Annotated[RunSettings, FlagFields(only=MEASURING)],
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if a check found an issue.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the report to FILE.html, FILE.json, or a directory.")] = None,
    shown: flags.OutputFlags,
    asked: Annotated[InputFlags, COMPARED],
) -> None:
    """Measure and check what a merge does to every layer, without writing the model.

    actmat diagnose -b BASE -e EXPERT1 -e EXPERT2
    actmat diagnose -e ADAPTER1 -e ADAPTER2              (adapters: takes seconds)
    actmat diagnose recipe.yaml --out report.html
    actmat diagnose MERGED                               (its report)
    actmat diagnose MERGED --out page.html               (the same as a page)
    actmat diagnose report.json --out page.html
    actmat diagnose MERGED --data math=math.jsonl        (answers on your data)
    actmat diagnose MERGED --statistics math=stats/math  (rho on measured inputs)

    Takes the inputs of 'actmat merge'. Prints how near the merge is to every
    expert, and the findings of the checks. To measure while merging: actmat
    merge --diagnose.
    """
    from actmat.api.diagnosing import write_report
    from actmat.diagnostics.model import read_diagnosis

    if recipe is not None and _is_report(recipe):
        if fields.chosen or asked.data:
            raise typer.BadParameter(f"{recipe} is a report, which is only shown: remove the inputs")
        diagnosis = read_diagnosis(recipe)
    elif recipe is not None and os.path.isdir(recipe):
        diagnosis = _of_output(recipe, fields, run, asked, quiet=shown.quiet)
    elif asked.data:
        raise typer.BadParameter("--data goes with a merged model that exists: actmat diagnose MERGED --data DATA")
    else:
        diagnosis = _of_recipe(recipe, fields, run, quiet=shown.quiet)
    files = [] if out is None else write_report(diagnosis, out)
    if shown.json and shown.full:  # as `read_diagnosis` reads it
        print_json(diagnosis.to_json())
    elif shown.json:
        print_result("diagnose", diagnosis.to_json(), long=("measures",))
    elif not shown.quiet:
        from actmat.cli.summary import print_diagnosis

        print_diagnosis(diagnosis, files)
    if strict and diagnosis.issues:
        raise typer.Exit(1)


def _is_report(path: Path) -> bool:
    """True for a file with the name or the first bytes of a report; a recipe may be a JSON file as well."""
    from actmat.diagnostics.model import REPORT_NAME

    if path.name == REPORT_NAME:
        return True
    if path.suffix != ".json" or not path.is_file():
        return False
    with path.open("rb") as file:
        return re.search(rb'"kind"\s*:\s*"diagnosis"', file.read(200)) is not None


def _of_output(merged: Path, fields: RecipeFlags, run: RunSettings, asked: InputFlags, *, quiet: bool) -> Diagnosis:
    """The report of a merged model, measured again if it has none, with rows on data if requested."""
    if "experts" in fields or ("base" in fields and not asked.data):
        raise typer.BadParameter(f"{merged} is a merged model and names its own base and experts")
    from actmat.api.diagnosing import check_measurable, diagnose_output

    check_measurable(merged)
    base, statistics = fields.values["base"], fields.values["statistics"]
    rows = None
    if asked.data:
        from actmat.cli.searching import compare_answers

        rows = compare_answers(merged, asked, base=base, run=run, quiet=quiet)
    with showing_progress(quiet=quiet) as progress:
        diagnosis = diagnose_output(merged, run, progress)
    if rows is not None:
        from actmat.diagnostics.answers import with_answers

        diagnosis = with_answers(diagnosis, rows)
    if not statistics:
        return diagnosis
    from actmat.api.measuring import residual_on_data

    with counting("measuring on data", quiet=quiet) as counted:
        measured = residual_on_data(merged, statistics_of(statistics), progress=counted)
    return replace(diagnosis, residual_on_data=measured)


def _of_recipe(file: Path | None, fields: RecipeFlags, run: RunSettings, *, quiet: bool) -> Diagnosis:
    recipes = fields.recipes(file)
    if len(recipes) > 1:
        raise typer.BadParameter("diagnose takes one merge: one method, one value per option")
    from actmat.run import diagnose_recipe

    with showing_progress(quiet=quiet) as progress:
        return diagnose_recipe(recipes[0], run, progress)
