"""`actmat serve-command`: the lines that load a finished output."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from actmat.cli import flags

__all__ = ["serve_command"]


def serve_command(
    out: Annotated[str, typer.Argument(help="Directory of a merged model or adapter, or hf://org/name.")],
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Print the commands that load a merged model: vLLM's, and transformers'.

    An adapter is loaded on its base: with PEFT, and in vLLM with --enable-lora
    and the rank that it needs. With --quiet only the command of vLLM is printed,
    or the reason why vLLM cannot serve the model, with exit code 1.
    """
    from actmat.api.serving import serving_commands
    from actmat.cli.streams import say
    from actmat.foreign import terminal

    found = serving_commands(out)
    if json:
        from actmat.cli.results import print_result

        print_result("serve-command", dataclasses.asdict(found))
        return
    if quiet:
        if not found.vllm:
            say("\n".join(f"actmat: {terminal(note)}" for note in found.notes))
            raise typer.Exit(1)
        typer.echo(terminal(found.vllm))
        return
    if found.vllm:
        typer.echo(f"# vLLM\n{terminal(found.vllm)}\n")
    typer.echo("\n".join(["# Python", *map(terminal, found.python)]))
    for note in found.notes:
        typer.echo(f"# {terminal(note)}")
