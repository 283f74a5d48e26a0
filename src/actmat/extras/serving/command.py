"""Flag `--serve` of `actmat inspect`."""

from __future__ import annotations

import dataclasses

import typer

from actmat.cli.screen import print_result
from actmat.cli.streams import say
from actmat.extras.serving.serving import serving_commands
from actmat.foreign import terminal


def print_serving(out: str, *, json: bool, quiet: bool) -> None:
    """Print the commands that load an output."""
    found = serving_commands(out)
    if json:
        print_result("serve", dataclasses.asdict(found))
    elif not quiet:
        if found.vllm:
            typer.echo(f"# vLLM\n{terminal(found.vllm)}\n")
        typer.echo("\n".join(["# Python", *map(terminal, found.python)]))
        for note in found.notes:
            typer.echo(f"# {terminal(note)}")
    elif found.vllm:
        typer.echo(terminal(found.vllm))
    else:
        say("\n".join(f"actmat: {terminal(note)}" for note in found.notes))
        raise typer.Exit(1)
