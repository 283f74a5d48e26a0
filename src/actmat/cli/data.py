"""`actmat diagnose MERGED --data`, `verify --check`: the answers that a merge kept of its experts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from actmat.cli.flags import DataFlags, split_name

if TYPE_CHECKING:
    from actmat.diagnostics.model import AgreementRow


def compare_answers(
    merged: str | Path, given: DataFlags, *, base: str | None = None, device: str = "cpu", quiet: bool
) -> tuple[AgreementRow, ...]:
    """Compute `actmat.agreement` of a merged model and its experts; `base` of adapters defaults to the manifest's."""
    from actmat.cli.searching import showing_search
    from actmat.extras.tune.kept import agreement

    with showing_search(quiet=quiet) as progress:
        return agreement(
            merged,
            pairs_of(given.data or []),
            base=base,
            device=device,
            progress=progress,
            reading=given.options("", max_samples=given.samples),
            new_tokens=given.new_tokens,
            model_class=given.model_class,
            dtype=given.dtype,
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
