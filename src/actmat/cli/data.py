"""Values of flags that give data to experts."""

from __future__ import annotations

import os
from collections.abc import Sequence

import typer

from actmat.cli.flags import split_name


def pairs_of(given: Sequence[str], flag: str = "--data") -> dict[str, str] | str:
    """Expert -> data, or one data set for all; a value that is an existing path is not split at '='."""
    split = [("", text) if os.path.exists(text) else split_name(text) for text in given]
    names = [name for name, _ in split if name]
    if not names and len(split) == 1:
        return split[0][1]
    if len(names) < len(split):
        raise typer.BadParameter(f"give {flag} once for all experts, or {flag} NAME=DATA once per expert")
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise typer.BadParameter(f"{flag} is given twice for expert '{twice[0]}'")
    return dict(split)
