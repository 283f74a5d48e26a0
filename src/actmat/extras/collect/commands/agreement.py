"""`--data` and `--statistics` of `actmat diagnose MERGED`: compare a merged model with its experts on data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from actmat.cli import flags
from actmat.cli.recipes import split_name, statistics_of

if TYPE_CHECKING:
    from actmat.diagnostics.model import AgreementRow, DataResidual
    from actmat.extras.collect.data import DataOptions

__all__ = ["DataFlags", "compare_answers", "measure_on_data", "pairs_of"]


@dataclass(frozen=True)
class DataFlags:
    """Data, how to read it, and how to load the models that answer."""

    data: flags.Data = None
    samples: flags.Samples = 64
    split: flags.Split = "train"
    subset: flags.Subset = None
    text_column: flags.TextColumn = None
    image_column: flags.ImageColumn = None
    target_column: flags.TargetColumn = None
    batch_size: flags.BatchSize = 8
    max_length: flags.MaxLength = 512
    model_class: flags.ModelClass = None
    dtype: flags.ModelDtype = "float32"

    def options(self, location: str, **changed: Any) -> DataOptions:
        """Options to read the data set at `location`; `changed` ones go before the flags."""
        from actmat.extras.collect.data import DataOptions

        same = ("split", "subset", "text_column", "image_column", "target_column", "batch_size", "max_length")
        options = DataOptions(location, max_samples=self.samples, **{name: getattr(self, name) for name in same})
        return replace(options, **changed)


def compare_answers(
    merged: Path, given: DataFlags, *, base: str | None, device: str, quiet: bool
) -> tuple[AgreementRow, ...]:
    """`actmat.agreement` of a merged model and its experts; `base` under adapters: by default that of the manifest."""
    if given.dtype not in flags.MODEL_DTYPES:
        raise typer.BadParameter(f"--dtype is one of {', '.join(flags.MODEL_DTYPES)}; got '{given.dtype}'")
    pairs = pairs_of(given.data or [])
    from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

    from actmat.cli.screen import progress_bar
    from actmat.extras.collect.on_data import agreement

    columns = (BarColumn(24), MofNCompleteColumn(), "samples", TimeRemainingColumn())
    with progress_bar("{task.description}", *columns, quiet=quiet) as bar:
        task = bar.add_task("loading the merged model", total=given.samples)
        return agreement(
            merged,
            given.options(pairs) if isinstance(pairs, str) else {n: given.options(p) for n, p in pairs.items()},
            base=base,
            model_class=given.model_class,
            dtype=given.dtype,
            device=device,
            progress=lambda expert, done: bar.update(task, description=f"asking {expert}", completed=done),
        )


def measure_on_data(merged: Path, given: Sequence[str], *, quiet: bool) -> tuple[DataResidual, ...]:
    """`actmat.residual_on_data` of --statistics, with a progress bar unless `quiet`."""
    from actmat.cli.screen import counting
    from actmat.extras.collect.on_data import residual_on_data

    with counting("measuring on data", quiet=quiet) as progress:
        return residual_on_data(merged, statistics_of(given), progress=progress)


def pairs_of(given: Sequence[str], flag: str = "--data") -> dict[str, str] | str:
    """Expert -> data, or one data set for all; a text that is an existing path names no expert."""
    split = [("", text) if os.path.exists(text) else split_name(text) for text in given]
    names = [name for name, _ in split if name]
    if not names and len(split) == 1:
        return split[0][1]
    if len(names) < len(split):
        raise typer.BadParameter(f"{flag} is given once, for all experts, or as NAME=DATA, once per expert")
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise typer.BadParameter(f"{flag} is given twice for expert '{twice[0]}'")
    return dict(split)
