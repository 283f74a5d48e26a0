"""`actmat diagnose`: see what a merge does before it is paid for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actmat.cli import flags
from actmat.cli.agreement import DataFlags, compare_answers, hold_against_statistics

if TYPE_CHECKING:
    from actmat.diagnostics.model import Diagnosis

__all__ = ["diagnose"]


def diagnose(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="[RECIPE.yaml|MERGED]", help="A recipe file, or the directory of a merged model."),
    ] = None,
    base: flags.Base = None,
    expert: flags.Experts = None,
    method: flags.Method = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="name=value of the rule, once per option.")
    ] = None,
    weight: flags.Weights = None,
    scale: flags.Scale = None,
    scope: flags.Scope = None,
    keep: flags.Keep = None,
    compute_dtype: flags.ComputeDtype = None,
    seed: flags.Seed = None,
    allow_nonfinite: flags.AllowNonfinite = False,
    ties: flags.Ties = True,
    to: flags.To = None,
    any_base: flags.AnyBase = False,
    exact: flags.Exact = False,
    mute: flags.Mute = None,
    statistics: flags.Statistics = None,
    strict: flags.Strict = False,
    device: flags.Device = "cpu",
    max_memory: flags.MaxMemory = None,
    threads: flags.Threads = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write the report: both forms into a directory, or to FILE.json or FILE.html."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print report.json instead of a summary.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
    data: flags.Data = None,
    samples: flags.Samples = 64,
    split: flags.Split = "train",
    subset: flags.Subset = None,
    text_column: flags.TextColumn = None,
    image_column: flags.ImageColumn = None,
    target_column: flags.TargetColumn = None,
    batch_size: flags.BatchSize = 8,
    max_length: flags.MaxLength = 512,
    model_class: flags.ModelClass = None,
    dtype: flags.ModelDtype = "float32",
) -> None:
    """Measure what a merge does to every layer, and check it; the model is not written.

    actmat diagnose -b BASE -e EXPERT1 -e EXPERT2
    actmat diagnose -e ADAPTER1 -e ADAPTER2              (adapters: takes seconds)
    actmat diagnose recipe.yaml --out report.html
    actmat diagnose MERGED                               (what 'actmat merge --diagnose' measured, or once more)
    actmat diagnose MERGED --data texts.jsonl            (answers on your data)
    actmat diagnose MERGED --statistics math=stats/math  (rho on measured inputs)

    Takes the inputs of 'actmat merge'. Prints norms, ranks and overlaps of the experts, what the checks found, and the
    ten layers that the experts contest most. To measure while merging: actmat merge --diagnose.
    """
    if recipe is not None and recipe.is_dir():
        if expert or (base and not data):
            raise typer.BadParameter(f"{recipe} is a merged model and names its own base and experts")
        how = DataFlags(
            samples, split, subset, text_column, image_column, target_column, batch_size, max_length, model_class, dtype
        )
        rows = compare_answers(recipe, data, how, base=base, device=device, quiet=quiet) if data else None
        found = _of_output(recipe, device, max_memory, threads, exact, quiet)
        residuals = hold_against_statistics(recipe, statistics, quiet=quiet) if statistics else None
        found = found if rows is None else replace(found, agreement=rows)
        found = found if residuals is None else replace(found, residual_on_data=residuals)
    else:
        if data:
            raise typer.BadParameter("--data goes with a merged model that exists: actmat diagnose MERGED --data DATA")
        fields: dict[str, Any] = {
            "scale": scale,
            "scope": scope,
            "keep": keep,
            "compute_dtype": compute_dtype,
            "seed": seed,
            "allow_nonfinite": allow_nonfinite or None,
            "ties": None if ties else False,
            "to": to,
            "any_base": any_base or None,
            "mute": mute,
        }
        recipes = flags.build_recipes(
            recipe,
            base=base,
            experts=expert,
            methods=None if method is None else [method],
            options=option,
            weights=weight,
            out=None,
            fields=fields,
            statistics=statistics,
        )
        if len(recipes) > 1:
            raise typer.BadParameter("one merge is diagnosed at a time: give one value per option")
        from actmat.api_diagnose import diagnose_recipe
        from actmat.cli.screen import MergeProgress

        settings: dict[str, Any] = {"device": device, "max_memory": max_memory, "threads": threads, "exact": exact}
        if quiet:
            found = diagnose_recipe(recipes[0], **settings)
        else:
            with MergeProgress("measuring") as progress:
                found = diagnose_recipe(recipes[0], progress=progress, **settings)  # type: ignore[arg-type]
    _show(found, out, json=json)
    if strict and found.issues:
        raise typer.Exit(1)


def _of_output(
    place: Path, device: str, max_memory: str | None, threads: int | None, exact: bool, quiet: bool
) -> Diagnosis:
    from actmat.api_diagnose import diagnose_output
    from actmat.cli.screen import MergeProgress

    settings: dict[str, Any] = {"device": device, "max_memory": max_memory, "threads": threads, "exact": exact}
    if quiet:
        return diagnose_output(place, **settings)
    with MergeProgress("measuring") as progress:
        return diagnose_output(place, progress=progress, **settings)


def _show(found: Diagnosis, out: Path | None, *, json: bool) -> None:
    if out is not None:
        from actmat.checkpoints.writing.staging import disk_errors
        from actmat.report.write import write_report

        with disk_errors(out.parent):
            write_report(found, out)
    if json:
        import json as json_module

        typer.echo(json_module.dumps(found.to_json(), indent=1))
        return
    from actmat.cli.diagnosis import print_diagnosis

    print_diagnosis(found)
