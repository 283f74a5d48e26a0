"""`actmat merge`: the main job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actmat.cli import flags

if TYPE_CHECKING:
    from actmat.api import MergeReport

__all__ = ["merge"]


def merge(
    recipe: flags.RecipeFile = None,
    base: flags.Base = None,
    expert: flags.Experts = None,
    method: flags.Methods = None,
    option: flags.Options = None,
    out: Annotated[Path | None, typer.Option("--out", help="Directory of the merged model.")] = None,
    weight: flags.Weights = None,
    statistics: flags.Statistics = None,
    scale: flags.Scale = None,
    scope: flags.Scope = None,
    keep: flags.Keep = None,
    dtype: flags.Dtype = None,
    compute_dtype: flags.ComputeDtype = None,
    seed: flags.Seed = None,
    allow_nonfinite: flags.AllowNonfinite = False,
    ties: flags.Ties = True,
    files_from: flags.FilesFrom = None,
    max_shard_size: flags.MaxShardSize = None,
    to: flags.To = None,
    rank: flags.Rank = None,
    ranks: flags.Ranks = None,
    any_base: flags.AnyBase = False,
    device: flags.Device = "cpu",
    max_memory: flags.MaxMemory = None,
    threads: flags.Threads = None,
    diagnose: Annotated[
        bool, typer.Option("--diagnose", help="Measure and check on the way; a report goes into the output.")
    ] = False,
    exact: flags.Exact = False,
    mute: flags.Mute = None,
    strict: flags.Strict = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier output of actmat.")] = False,
    fsync: Annotated[
        bool, typer.Option("--fsync/--no-fsync", help="Wait until the output is on the disk before it appears.")
    ] = True,
    sha256: Annotated[bool, typer.Option("--sha256", help="Add SHA-256 of the weight files to the manifest.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar, no summary.")] = False,
) -> None:
    """Merge fine-tuned checkpoints of one base into one model.

    actmat merge -b BASE -e EXPERT1 -e EXPERT2 --out MERGED
    actmat merge -b BASE -e E1 -e E2 -m ties -o density=0.3 --out MERGED
    actmat merge -e ADAPTER1 -e ADAPTER2 --out MERGED           (LoRA adapters into an adapter, without a base)
    actmat merge recipe.yaml --out MERGED

    The output is a directory that from_pretrained loads. It is built aside and appears whole; an interrupted merge
    goes on when the same command is given again. 'actmat plan' shows beforehand what will happen to every tensor.
    """
    recipes = flags.build_recipes(
        recipe,
        base=base,
        experts=expert,
        methods=method,
        options=option,
        weights=weight,
        statistics=statistics,
        out=out,
        fields={
            "scale": scale,
            "scope": scope,
            "keep": keep,
            "dtype": dtype,
            "compute_dtype": compute_dtype,
            "seed": seed,
            "allow_nonfinite": allow_nonfinite or None,
            "ties": None if ties else False,
            "files_from": files_from,
            "max_shard_size": max_shard_size,
            "to": to,
            "rank": rank,
            "ranks": ranks,
            "any_base": any_base or None,
            "mute": mute,
        },
    )
    if (strict or exact) and not diagnose:
        raise typer.BadParameter("--strict and --exact go with --diagnose")
    if any(r.out is None for r in recipes):
        raise typer.BadParameter("say where the merged model goes: --out OUT, or 'out' in the recipe")
    from actmat.api import run_recipes
    from actmat.cli.screen import MergeProgress
    from actmat.cli.summary import print_summary
    from actmat.settings import RunSettings

    settings = RunSettings(device=device, max_memory=max_memory, threads=threads, overwrite=overwrite, durable=fsync,
                           sha256=sha256, diagnose=diagnose, exact=exact)  # fmt: skip
    if quiet:
        reports = run_recipes(recipes, settings)
    else:
        with MergeProgress() as progress:
            reports = run_recipes(recipes, settings, progress)
        for report in reports:
            print_summary(report)
            _judgement(report)
    if strict and any(r.diagnosis is not None and r.diagnosis.issues for r in reports):
        raise typer.Exit(1)


def _judgement(report: MergeReport) -> None:
    """What the checks found, where the merge was diagnosed."""
    if report.diagnosis is not None:
        from actmat.cli.diagnosis import print_checks

        print_checks(report.diagnosis.checks)
