"""`actmat plan`: what would happen to every tensor, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from actmat.cli import flags

__all__ = ["plan"]


def plan(
    recipe: flags.RecipeFile = None,
    base: flags.Base = None,
    expert: flags.Experts = None,
    method: flags.Methods = None,
    option: flags.Options = None,
    weight: flags.Weights = None,
    statistics: flags.Statistics = None,
    scale: flags.Scale = None,
    scope: flags.Scope = None,
    keep: flags.Keep = None,
    dtype: flags.Dtype = None,
    compute_dtype: flags.ComputeDtype = None,
    seed: flags.Seed = None,
    ties: flags.Ties = True,
    files_from: flags.FilesFrom = None,
    max_shard_size: flags.MaxShardSize = None,
    to: flags.To = None,
    rank: flags.Rank = None,
    ranks: flags.Ranks = None,
    any_base: flags.AnyBase = False,
    device: flags.Device = "cpu",
    json: flags.Json = False,
    every: Annotated[bool, typer.Option("--all", help="One line per tensor instead of groups.")] = False,
) -> None:
    """Show what 'actmat merge' would do with the same inputs; nothing is written, no tensor is read.

    Prints for groups of tensors what happens to them and why, the bytes to read and write, and the peak of memory.
    When the inputs do not fit together, ALL problems are listed and the exit code is 1.
    """
    recipes = flags.build_recipes(
        recipe,
        base=base,
        experts=expert,
        methods=method,
        options=option,
        weights=weight,
        statistics=statistics,
        out=None,
        fields={
            "scale": scale,
            "scope": scope,
            "keep": keep,
            "dtype": dtype,
            "compute_dtype": compute_dtype,
            "seed": seed,
            "ties": None if ties else False,
            "files_from": files_from,
            "max_shard_size": max_shard_size,
            "to": to,
            "rank": rank,
            "ranks": ranks,
            "any_base": any_base or None,
        },
    )
    from actmat.api import plan_recipe

    plans = [plan_recipe(r, device=device) for r in recipes]
    if json:
        import json as json_module

        data = [p.to_json() for p in plans]
        typer.echo(json_module.dumps(data[0] if len(data) == 1 else data, indent=1))
        return
    from actmat.cli.summary import print_plan

    for p in plans:
        print_plan(p, every=every)
