"""`actmat remove`: a finished merge without some of its experts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from actmat.cli import flags
from actmat.cli.add import NewOut, Running, tell

__all__ = ["remove"]


def remove(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A finished merge.")],
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="The experts to take out, by their names.")],
    *,
    new_out: NewOut = None,
    run: Running,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Take an expert out of a finished merge.

    actmat remove OUT code                     (OUT is replaced when it is done)
    actmat remove OUT code --out OUT2          (OUT stays)

    Merges the other experts by the recipe that OUT records, so that the output
    has the bytes of a merge without the expert. The others are read again, also
    where sums were kept: a sum of rounded numbers without one of its terms has
    other last bits. 'actmat history OUT' names the experts of a merge.
    """
    from actmat.cli.screen import showing_progress
    from actmat.growing import remove_experts

    with showing_progress(quiet=quiet or json) as progress:
        report = remove_experts(out, names, to=new_out, settings=run, progress=progress)
    tell("remove", report, json=json, quiet=quiet)
