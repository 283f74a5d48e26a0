"""`actmat export`: write a checkpoint in the form of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from actmat.cli import flags
from actmat.cli.listing import command
from actmat.cli.streams import optional_stdout


@command("share", "written", "the checkpoint cannot be read, or the output folder is wrong", imports_torch=True)
def export(
    checkpoint: Annotated[str, typer.Argument(help="Directory, file, hub id or URL.")],
    out: Annotated[Path, typer.Option("--out", help="Directory to write; must not exist.")],
    to: Annotated[str, typer.Option("--to", help="Form: dcp, of torch.distributed.checkpoint.")] = "dcp",
    under: Annotated[
        str, typer.Option("--under", help="Key of the state dict that holds the model, such as 'model'; default: none.")
    ] = "",
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Write a checkpoint, such as a merged model, in torch's distributed format, to continue training.

    actmat export MERGED --to dcp --out DIR

    torch.distributed.checkpoint.load reads DIR, with any number of processes.
    One tensor is in memory at a time.
    """
    if to != "dcp":
        raise typer.BadParameter(f"expected --to dcp, found --to {to}")
    from actmat.cli.screen import console, escape, print_result
    from actmat.extras.training.exporting import export as write

    write(checkpoint, out=out, under=under)
    with optional_stdout("The export is complete."):
        if json:
            print_result("export", {"out": str(out), "checkpoint": checkpoint, "form": to})
        if json or quiet:
            return
        console.print(f"[bold]{escape(out)}[/bold]: {escape(checkpoint)} for torch.distributed.checkpoint")
