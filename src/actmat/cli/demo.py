"""`actmat demo`: train small experts, merge them with every method, and print a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from actmat.cli import flags
from actmat.cli.listing import command
from actmat.cli.screen import SafeConsole, console, print_result


@command("merge", "all merges are written", "the output folder or a method is wrong")
def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for checkpoints and results.")] = Path("demo-output"),
    method: Annotated[list[str] | None, typer.Option("--method", "-m", help="Only this method; repeatable.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the data splits and of training.")] = 0,
    shown: flags.JsonQuiet = flags.USUAL,
) -> None:
    """Train a small transformer and several experts on real digits, merge them with every method, compare.

    Takes about a minute on two cores and keeps all checkpoints, so that you can go on with 'actmat merge'.
    """
    from actmat.extras.demo.run import run_demo

    printer = SafeConsole(quiet=True) if shown.quiet or shown.json else console
    result = run_demo(out, seed=seed, methods=method, console=printer)
    if shown.json:
        print_result("demo", result)
