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
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the command of vLLM.")] = False,
) -> None:
    """Print the commands that load a merged model: vLLM's, and transformers'.

    An adapter is loaded on its base: with PEFT, and in vLLM with --enable-lora
    and the rank that it needs. Exit code 1 with --quiet if vLLM cannot serve it.
    """
    from actmat.foreign import terminal
    from actmat.serving import serving_commands

    found = serving_commands(out)
    if json:
        from actmat.cli.results import print_result

        print_result("serve-command", dataclasses.asdict(found))
        return
    if quiet:
        typer.echo(terminal(found.vllm), nl=bool(found.vllm))
        raise typer.Exit(0 if found.vllm else 1)
    if found.vllm:
        typer.echo(f"# vLLM\n{terminal(found.vllm)}\n")
    typer.echo("\n".join(["# Python", *map(terminal, found.python)]))
    for note in found.notes:
        typer.echo(f"# {terminal(note)}")
