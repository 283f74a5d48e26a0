"""`actmat extract`: an adapter from a fine-tuned model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actmat.cli import flags
from actmat.cli.streams import optional_stdout

if TYPE_CHECKING:
    from actmat.api.extracting import ExtractReport

__all__ = ["extract", "extraction_data", "print_extraction"]

WORST = 3
"""Layers that are listed by name."""


def extract(
    base: Annotated[str, typer.Option("--base", "-b", help="Checkpoint that the model was fine-tuned from.")],
    model: Annotated[str, typer.Option("--model", help="Fine-tuned checkpoint, or an adapter of any family.")],
    out: Annotated[Path, typer.Option("--out", help="Directory of the adapter.")],
    rank: Annotated[int | None, typer.Option("--rank", help="Rank of every layer.")] = None,
    energy: Annotated[
        float | None, typer.Option("--energy", help="Share of each layer's squared norm to keep, such as 0.99.")
    ] = None,
    others: Annotated[
        str, typer.Option("--others", help="Changed tensors that LoRA cannot hold: save them whole, or leave them out.")
    ] = "save",
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="float64, float32, bfloat16 or float16 of the adapter (default: the base's)."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Layers at the same time (default: all cores).")
    ] = None,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Extract a LoRA adapter from a fine-tuned model: the best approximation of its delta, layer by layer.

    actmat extract --base BASE --model MODEL --rank 64 --out ADAPTER
    actmat extract --base BASE --model MODEL --energy 0.99 --out ADAPTER

    The error of every layer is in actmat_extract.json; PEFT loads the adapter.
    Interrupted, the same command goes on.
    """
    from actmat.api.extracting import extract as run

    report = run(base, model, out=out, rank=rank, energy=energy, others=others, dtype=dtype, threads=threads)
    with optional_stdout("The adapter is complete."):
        if json:
            from actmat.cli.results import print_result

            print_result("extract", extraction_data(report))
        elif not quiet:
            print_extraction(report)


def extraction_data(report: ExtractReport) -> dict[str, Any]:
    """An extracted adapter as plain data; the error of every layer is in its record."""
    rows: list[dict[str, Any]] = list(report.record["tensors"])
    return {
        "out": str(report.out),
        "was_finished": report.was_finished,
        "relative_error": report.relative_error,
        "layers": sum("rank" in r for r in rows),
        "saved": sum(r["kind"] == "saved" for r in rows),
        "left_out": sum(r["kind"] == "left out" for r in rows),
        "notes": list(report.record["notes"]),
    }


def print_extraction(report: ExtractReport) -> None:
    """Say what is in an extracted adapter."""
    from actmat.cli.screen import console, escape

    rows: list[dict[str, Any]] = list(report.record["tensors"])
    factored = [r for r in rows if "rank" in r]
    ranks = sorted({r["rank"] for r in factored})
    shown = "none" if not ranks else str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    was = " (made by an earlier call)" if report.was_finished else ""
    console.print(f"[bold]{escape(report.out)}[/bold]: {len(factored)} layers of rank {shown}{was}")
    worst = sorted(factored, key=lambda r: -float(r["relative_error"]))[:WORST]
    console.print(f"  relative error {report.relative_error:.3g} over all layers" + ("; largest:" if worst else ""))
    for row in worst:
        console.print(f"    {row['relative_error']:.3g}  {escape(row['name'])}")
    for kind, words in (("saved", "saved whole"), ("left out", "left out")):
        found = [r for r in rows if r["kind"] == kind]
        for reason in dict.fromkeys(r["reason"] for r in found):
            names = [r["name"] for r in found if r["reason"] == reason]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            console.print(f"  {words}: {escape(names[0])}{more} ({escape(reason)})")
    for note in report.record["notes"]:
        console.print(f"  note: {escape(note)}")
