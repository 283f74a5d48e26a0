"""`actmat experiment`: the experiments of the paper, from data to tables."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actmat.cli import flags
from actmat.cli.listing import command

if TYPE_CHECKING:
    from actmat_experiments.harness.request import RunRequest

experiment = typer.Typer(
    name="experiment",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Run the experiments of the paper, or the same at laptop size, and show their tables.",
)
command("research", "run, or shown", "the suite or method is unknown, data are missing, or this cache has no results")(
    experiment
)

SuiteName = Annotated[str, typer.Argument(metavar="SUITE", help="Name of a suite, see 'actmat experiment list'.")]
CacheFolder = Annotated[Path, typer.Option("--cache", help="Folder of all stages, logs and scores.")]
Models = Annotated[list[str] | None, typer.Option("--models", help="Only these models; comma-separated.")]
Tasks = Annotated[list[str] | None, typer.Option("--tasks", help="Only these tasks; comma-separated.")]
Methods = Annotated[list[str] | None, typer.Option("--methods", help="Only these methods; comma-separated.")]
Full = Annotated[
    bool | None, typer.Option("--full/--no-full", help="Train experts by full fine-tuning (default: by suite).")
]
Lora = Annotated[bool | None, typer.Option("--lora/--no-lora", help="Also train experts by LoRA (default: by suite).")]
Seeds = Annotated[str, typer.Option("--seeds", help="Comma-separated; one run per seed.")]
Data = Annotated[Path | None, typer.Option("--data", help="Folder of local data sets (default: the hub).")]
Device = Annotated[str, typer.Option("--device", help="Device of the models: cpu, cuda or cuda:N.")]
Threads = Annotated[
    int | None, typer.Option("--threads", help="Parallel runs, tensors and tests (default: all cores).")
]
Settings = Annotated[list[str] | None, typer.Option("--set", help="name=value of the suite's settings.")]


@experiment.command("list")
def list_suites(json: flags.Json = False, quiet: flags.Quiet = False) -> None:
    """List the suites with a description."""
    from actmat.cli.screen import console, plain_table, print_result
    from actmat_experiments.suites import SUITES

    if json:
        rows = [{name: getattr(s, name) for name in ("name", "summary", "needs", "time")} for s in SUITES]
        print_result("experiment", {"suites": rows})
    if json or quiet:
        return
    listed = plain_table("suite", "experts", "needs")
    for suite in SUITES:
        listed.add_row(suite.name, suite.summary, f"{suite.needs}. Time: {suite.time}")
    console.print(listed)


@experiment.command()
def run(
    suite: SuiteName,
    models: Models = None,
    tasks: Tasks = None,
    methods: Methods = None,
    full: Full = None,
    lora: Lora = None,
    seeds: Seeds = "0",
    data: Data = None,
    cache: CacheFolder = Path("experiment-cache"),
    device: Device = "cpu",
    threads: Threads = None,
    setting: Settings = None,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Train, merge with every method, evaluate. Finished stages are reused from the cache.

    actmat experiment run vision-small --data DATA --lora --seeds 0,1,2
    actmat experiment run vision --models ViT-B/32 --methods average,actmat,tsv --device cuda
    """
    request = _request(locals())
    from actmat_experiments.suites import get_suite

    chosen = get_suite(suite)
    assert request.console is not None, "set by _request"
    request.console.print(f"{suite}: needs {chosen.needs}. Results go to {cache}.", highlight=False, markup=False)
    chosen.run(request)
    table(suite, cache, json=json, quiet=quiet)


@experiment.command()
def table(
    suite: SuiteName,
    cache: CacheFolder = Path("experiment-cache"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown instead of a terminal table.")] = False,
    paper: Annotated[bool, typer.Option("--paper", help="Show the paper's figures, without a run.")] = False,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Show the paper's table next to ours: per task, with majority baselines, seeds and 95 % intervals."""
    from actmat.cli.screen import SafeConsole, console
    from actmat_experiments.harness.request import TableRequest
    from actmat_experiments.suites import get_suite

    if json and (markdown or paper):
        raise typer.BadParameter("--json gives scores of a run: leave out --markdown and --paper")
    found = get_suite(suite)
    shown = SafeConsole(quiet=True) if json or quiet else console
    request = TableRequest(suite=suite, cache=cache, markdown=markdown, console=shown)
    if paper:
        from actmat_experiments.harness.report import show_paper

        show_paper(request)
    elif json:
        from actmat.cli.screen import print_result
        from actmat_experiments.harness.report import stored_scores

        scores = [asdict(score) for score in stored_scores(request)]
        print_result("experiment", {"suite": suite, "scores": scores})
    else:
        found.table(request)


def _request(given: dict[str, Any]) -> RunRequest:
    """Build a request from the flags of a command; raises usage errors."""
    from actmat_experiments.harness.request import RunRequest
    from actmat_experiments.suites import get_suite

    default = get_suite(given["suite"]).regimes
    asked = {name: given.pop(name) for name in ("full", "lora")}
    regimes: list[Any] = [n for n, wanted in asked.items() if wanted or (wanted is None and n in default)]
    if not regimes:
        left, other = ("full", "lora") if "full" in default else ("lora", "full")
        raise typer.BadParameter(f"--no-{left} leaves nothing to train: add --{other}")
    try:
        seeds = [int(s) for s in given.pop("seeds").split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--seeds takes whole numbers such as 0,1,2: {error}") from None
    from actmat.cli.screen import SafeConsole, note_console

    console = SafeConsole(quiet=True) if given.pop("quiet") else note_console
    given.pop("json")
    settings = dict(_pair(text) for text in given.pop("setting") or [])
    names: dict[str, Any] = {n: _names(given.pop(n)) for n in ("models", "tasks", "methods")}
    return RunRequest(**given, **names, regimes=regimes, seeds=seeds, settings=settings, console=console)


def _names(values: list[str] | None) -> list[str] | None:
    """`["a,b", "c"]` -> `["a", "b", "c"]`."""
    return [name for value in values for name in value.split(",") if name] if values else None


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"--set takes name=value, not {text!r}")
    return name, value
