"""`actmat import`: another tool's recipe as a recipe of actmat."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from actmat.cli import flags

__all__ = ["import_"]


def import_(
    file: Annotated[Path, typer.Argument(metavar="MERGEKIT.yml", help="A configuration of mergekit.")],
    *,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Print the recipe that does the same as a configuration of mergekit.

    actmat import mergekit.yml > recipe.yaml
    actmat merge mergekit.yml --out MERGED   (the same without a new file)

    No model is opened. What has no counterpart is an error that lists all of it;
    notes on what was decided are in the recipe and on stderr.
    """
    from actmat.cli.streams import say
    from actmat.recipe import import_recipe as read
    from actmat.recipe import recipe_yaml

    recipe = read(file)
    if json:
        from actmat.cli.results import print_result

        notes = list(recipe.notes)
        print_result("import", {"recipe": recipe.model_dump(mode="json", exclude_defaults=True), "notes": notes})
    else:
        typer.echo(recipe_yaml(recipe), nl=False)
    for note in recipe.notes if not quiet else ():
        say(f"note: {note}")


import_.__name__ = "import"  # the command's name, which is no name of a function in Python
