"""`actmat diagnose MERGED --data`: compare a merged model with its experts on data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from actmat.cli.flags import DataFlags, split_name

if TYPE_CHECKING:
    from actmat.diagnostics.model import AgreementRow
    from actmat.extras.collect.data import DataOptions


def compare_answers(
    merged: Path, given: DataFlags, *, base: str | None, device: str, quiet: bool
) -> tuple[AgreementRow, ...]:
    """Compute `actmat.agreement` of a merged model and its experts; `base` of adapters defaults to the manifest's."""

    def options(place: str) -> DataOptions:
        return given.options(place, max_samples=given.samples)

    pairs = pairs_of(given.data or [])
    from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

    from actmat.cli.screen import progress_bar
    from actmat.extras.collect.on_data import agreement

    columns = (BarColumn(24), MofNCompleteColumn(), "samples", TimeRemainingColumn())
    with progress_bar("{task.description}", *columns, quiet=quiet) as bar:
        task = bar.add_task("loading the merged model", total=given.samples)
        return agreement(
            merged,
            options(pairs) if isinstance(pairs, str) else {n: options(p) for n, p in pairs.items()},
            base=base,
            model_class=given.model_class,
            dtype=given.dtype,
            device=device,
            progress=lambda expert, done: bar.update(task, description=f"asking {expert}", completed=done),
        )


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
