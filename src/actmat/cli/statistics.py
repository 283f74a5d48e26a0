"""`actmat statistics`: measure models on data, for methods that need statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from actmat.cli import flags
from actmat.cli.data import ModelClass, ModelDtype, ReadingFlags
from actmat.cli.flags import FlagFields, with_flags
from actmat.cli.listing import command
from actmat.cli.screen import console, escape, print_result, progress_bar
from actmat.cli.streams import say
from actmat.flag import Flag, Setting
from actmat.settings import RunSettings

if TYPE_CHECKING:
    from actmat.extras.models.loading import Loaded
    from actmat.statistics.header import StatisticsHeader

statistics = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Measure experts on data: Gram matrices of layer inputs (regmean, lot, cat), diagonal Fisher (fisher).",
)
command("research", "measured, added up or shown", "the model, the data or the statistics are invalid")(statistics)
Out = Annotated[Path, typer.Option("--out", help="Folder to write.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace statistics that already exist at --out.")]
SumDtype = Literal["float32", "float64"]


@dataclass(frozen=True)
class Loading:
    """Flags for loading the model."""

    base: Annotated[
        str | None, Flag(("--base", "-b"), "Base of an adapter; default: the base that its config names.")
    ] = None
    device: Annotated[str, Flag(help="Device the model runs on: cpu, cuda or cuda:N.")] = "cpu"
    device_memory: Annotated[str | None, Setting("Memory limit of the device; a larger model runs layer by layer.")] = (
        None
    )
    max_memory: Annotated[str | None, Setting("The same of the host.")] = None
    model_class: ModelClass = None
    model_dtype: ModelDtype = "auto"

    def load(self, model: str, *, whole: bool = False) -> Loaded:
        """Load the model at a location; if it need not be `whole`, layer by layer where it does not fit."""
        from actmat.extras.models.loading import load_model
        from actmat.extras.tune.memory import place_models

        run = RunSettings(device=self.device, device_memory=self.device_memory, max_memory=self.max_memory)
        place = place_models(run, self.model_dtype)
        place = replace(place, limit=None) if whole else place
        return load_model(model, base=self.base, model_class=self.model_class, place=place)


@dataclass(frozen=True)
class DataReading(ReadingFlags):
    """Flags and settings for reading the data."""

    samples: Annotated[int | None, Flag(help="Number of samples; default: all.", low=1)] = None


@dataclass(frozen=True)
class Measuring:
    """Flags for the measurement."""

    gram: Annotated[bool, Flag(("--gram/--no-gram",), "Measure Gram matrices.")] = True
    fisher: Annotated[bool, Flag(help="Measure the diagonal Fisher; takes one backward pass per sample.")] = False
    fisher_labels: Annotated[
        Literal["drawn", "given"],
        typer.Option("--fisher-labels", help="Labels drawn from the model's predictions, or those of the data."),
    ] = "drawn"
    compute_dtype: Annotated[SumDtype, typer.Option(help="Dtype of products; sums are float64.")] = "float32"
    dtype: Annotated[SumDtype, typer.Option("--store-dtype", help="Dtype of the stored sums.")] = "float32"
    share: Annotated[
        bool, Flag(("--share/--no-share",), "Store one Gram matrix for layers that read the same input.")
    ] = True
    seed: Annotated[int, Flag(help="Seed for drawing the labels of the Fisher.")] = 0


@statistics.command()
@with_flags
def collect(
    model: Annotated[str, typer.Argument(help="The expert: folder or hub id of a checkpoint or an adapter.")],
    data: Annotated[str, typer.Option("--data", help="File, folder or hub id of a data set.")],
    out: Out,
    *,
    loading: Loading,
    reading: DataReading,
    measuring: Measuring,
    overwrite: Overwrite = False,
    shown: flags.JsonQuiet,
) -> None:
    """Run a model on data and store sums over the inputs of its layers, without padding.

    actmat statistics collect EXPERT --data texts.jsonl --out STATS
    actmat statistics collect ADAPTER --base BASE --data images/ --out STATS

    The file records the hashes of the model's weights: a merge refuses statistics of another model.
    """
    from rich.progress import BarColumn, TimeRemainingColumn

    from actmat.extras.collect.collect import collect as measure
    from actmat.extras.collect.data import make_batches
    from actmat.extras.collect.files import check_output

    check_output(out, overwrite=overwrite)
    options = reading.options(data)
    loaded = loading.load(model, whole=measuring.fisher)
    labels = measuring.fisher and measuring.fisher_labels == "given"
    notes = [loaded.note] if loaded.note else []
    counts = "{task.completed} samples, {task.fields[tokens]} tokens"
    if getattr(loaded.model, "main_input_name", "") == "pixel_values":
        counts = "{task.completed} images"
    with progress_bar("measuring", BarColumn(24), counts, TimeRemainingColumn(), quiet=shown.quiet) as bar:
        task = bar.add_task("measuring", total=reading.samples, tokens=0)
        result = measure(
            loaded.model,
            make_batches(loaded, options, labels=labels, note=notes.append),
            checkpoint=loaded.checkpoint,
            adapter=loaded.adapter,
            out=out,
            overwrite=overwrite,
            progress=lambda samples, tokens: bar.update(task, completed=samples, tokens=tokens),
            source=options.location,
            details=options.details(),
            **asdict(measuring),
        )
    for note in () if shown.quiet else notes:
        say(f"note: {note}")
    _show({out: result.header}, json=shown.json, quiet=shown.quiet)


@dataclass(frozen=True)
class StageFlags:
    """Flags of the block-wise measurement."""

    blocks: Annotated[str | None, Flag(help="Module with the blocks, such as model.layers; default: detected.")] = None
    off_diagonal: Annotated[float, Flag(help="Factor on off-diagonal Gram entries when merging a block.")] = 0.95
    compute_dtype: Annotated[SumDtype, typer.Option(help="Dtype of products and merges; sums are float64.")] = "float32"


@statistics.command()
@with_flags
def staged(
    base: Annotated[str, typer.Option("--base", "-b", help="Checkpoint that all experts were fine-tuned from.")],
    expert: Annotated[
        list[str],
        typer.Option("--expert", "-e", help="Fine-tuned checkpoint, once per expert: PATH, or NAME=PATH to name it."),
    ],
    data: Annotated[
        list[str],
        typer.Option("--data", help="Data set of expert NAME, once per expert: NAME=DATA, a file, folder or hub id."),
    ],
    out: Out,
    *,
    loading: Annotated[Loading, FlagFields(without=("base", "device_memory", "max_memory"))],
    staging: StageFlags,
    reading: Annotated[DataReading, FlagFields(without=("label_column",))],
    shown: flags.JsonQuiet,
) -> None:
    """Measure all experts block by block, each on the output of the merged blocks before it (RegMean++).

    actmat statistics staged -b BASE -e math=MATH -e code=CODE --data math=a.jsonl --data code=b.jsonl --out STATS

    Writes STATS/NAME for every expert, for 'actmat merge -m regmean'. The same command continues an interrupted run.
    """
    from actmat.api.measuring import staged_statistics
    from actmat.cli.flags import split_name
    from actmat.extras.collect.data import make_batches
    from actmat.recipe import ExpertRef
    from actmat.statistics import open_statistics

    named = [split_name(text) for text in expert]
    experts = {name or ExpertRef(path=place).label: place for name, place in named}
    if len(experts) < len(expert):
        raise typer.BadParameter("two experts have the same name; name them with NAME=PATH")
    loaded = loading.load(base, whole=True)
    sources = {name: reading.options(place) for name, place in map(split_name, data)}
    written = staged_statistics(
        loaded.model,
        base,
        experts,
        {name: partial(make_batches, loaded, options) for name, options in sources.items()},
        out=out,
        **asdict(staging),
    )
    headers = {}
    for folder in written.values():
        with open_statistics(folder) as opened:
            headers[folder] = opened.header
    _show(headers, json=shown.json, quiet=shown.quiet)


@statistics.command()
def merge(
    inputs: Annotated[list[Path], typer.Argument(help="Statistics of one model on different data.")],
    out: Out,
    store_dtype: Annotated[
        SumDtype | None, typer.Option("--store-dtype", help="Dtype of the stored sums (default: the widest there is).")
    ] = None,
    overwrite: Overwrite = False,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Add up statistics of one model measured on several data sets; the result is exact, because they are sums."""
    from actmat.extras.collect.files import merge_statistics

    header = merge_statistics(inputs, out, dtype=store_dtype, overwrite=overwrite)
    _show({out: header}, json=json, quiet=quiet)


@statistics.command()
def show(
    path: Annotated[Path, typer.Argument(help="Output of 'actmat statistics collect'.")],
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Show the content of a statistics file: model, data, measured tensors, and reasons for those not measured."""
    from actmat.statistics import open_statistics

    with open_statistics(path) as opened:
        _show({path: opened.header}, json=json, quiet=quiet, every=True)


def _show(headers: Mapping[Path, StatisticsHeader], *, json: bool, quiet: bool, every: bool = False) -> None:
    """Print the measured tensors, as text or JSON."""
    if json:
        print_result("statistics", {"statistics": [_data(path, header) for path, header in headers.items()]})
    for path, header in () if json or quiet else headers.items():
        _print(path, header, every=every)


def _data(path: Path, header: StatisticsHeader) -> dict[str, Any]:
    """Summary of a statistics file, without a row per tensor."""
    from actmat.statistics.header import describe_contents, is_of_images

    sources = [d.source for d in header.data]
    model = header.model.location
    tokens = None if is_of_images(header) else header.tokens
    counts = {"samples": header.samples, "tokens": tokens, "not_measured": len(header.absent)}
    return {"path": str(path), "model": model, **counts, "data": sources, "kinds": describe_contents(header)}


def _print(out: Path, header: StatisticsHeader, *, every: bool = False) -> None:
    from actmat.statistics.header import describe_amount, describe_contents

    on = f" with the adapter {header.model.adapter.location}" if header.model.adapter else ""
    console.print(f"[bold]{escape(out)}[/bold]  ({escape(header.model.location + on)})")
    console.print(f"  {describe_amount(header)} of {escape(', '.join(d.source for d in header.data))}")
    console.print("  " + "; ".join(describe_contents(header)))
    groups: dict[str, list[str]] = {}
    for name, why in header.absent.items():
        groups.setdefault(why, []).append(name)
    for why, names in groups.items():
        shown = ", ".join(names if every else names[:2]) + (", ..." if len(names) > 2 and not every else "")
        console.print(f"  not measured ({len(names)}): {escape(why)}: {escape(shown)}")
