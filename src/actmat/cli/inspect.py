"""`actmat inspect`: show the content of a checkpoint or an adapter from its headers, and how to load it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actmat.cli import flags
from actmat.cli.listing import command
from actmat.cli.screen import console, escape, first_to_last, plain_table, print_result
from actmat.cli.streams import say
from actmat.errors import CheckpointError, format_size
from actmat.foreign import terminal

if TYPE_CHECKING:
    from actmat.checkpoints.model import Model
    from actmat.experts.lora.adapter import Adapter
    from actmat.layout.types import LayoutMap


@command(
    "look",
    "described",
    "the checkpoint or adapter cannot be read; with `--serve --quiet`: vLLM cannot serve it",
)
def inspect(
    place: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Directory, file, hub id or URL.")],
    serve: Annotated[bool, typer.Option("--serve", help="Print the commands that load a merged model.")] = False,
    json: flags.Json = False,
    notes: Annotated[bool, typer.Option("--notes", help="Print all notes of a merge.")] = False,
    every: Annotated[bool, typer.Option("--all", "--full", help="One line per tensor; in JSON, a row.")] = False,
    quiet: flags.Quiet = False,
) -> None:
    """Show tensors, roles, dtypes, shards and ties of a checkpoint, from headers only.

    actmat inspect MERGED --serve                                (how to load it)

    With --serve --quiet, only the vLLM command is printed. If vLLM cannot
    serve the model, the reason is printed and the exit code is 1.
    """
    if serve:
        _print_serving(place, json=json, quiet=quiet)
    elif notes:
        _print_notes(place)
    else:
        _print_content(place, json=json, every=every, quiet=quiet)


def _print_notes(out: str) -> None:
    """Print the notes in the manifest of a merge."""
    from actmat.report.manifest import read_manifest

    for note in read_manifest(Path(out))["notes"]:
        console.print(f"{note['severity']}: {escape(note['text'])}")


def _print_serving(out: str, *, json: bool, quiet: bool) -> None:
    """Print the commands that load a merged model."""
    from actmat.extras.serving import serving_commands

    commands = serving_commands(out)
    if json:
        print_result("serve", dataclasses.asdict(commands))
    elif not quiet:
        if commands.vllm:
            typer.echo(f"# vLLM\n{terminal(commands.vllm)}\n")
        typer.echo("\n".join(["# Python", *map(terminal, commands.python)]))
        for note in commands.notes:
            typer.echo(f"# {terminal(note)}")
    elif commands.vllm:
        typer.echo(terminal(commands.vllm))
    else:
        say("\n".join(f"actmat: {terminal(note)}" for note in commands.notes))
        raise typer.Exit(1)


def _print_content(checkpoint: str, *, json: bool, every: bool, quiet: bool) -> None:
    from actmat.experts.locate import locate
    from actmat.experts.lora.adapter import Adapter
    from actmat.layout.resolve import resolve_layout
    from actmat.report.manifest import read_manifest

    with locate(checkpoint) as located:
        if isinstance(located, Adapter):
            data, show = _describe_adapter(located), _print_adapter
        else:
            data, show = _describe(located, resolve_layout(located.specs, located.config)), _print
    with contextlib.suppress(CheckpointError):
        data |= {k: v for k, v in read_manifest(Path(checkpoint)).items() if k == "verdict"}
    if json:
        print_result("inspect", data, long=("tensors", "modules", "full_tensors", "base_copies"), full=every)
    elif not quiet:
        if "verdict" in data:
            console.print(escape(data["verdict"]))
        show(data, every=every)


def _describe(opened: Model, layouts: LayoutMap) -> dict[str, Any]:
    ties = {a: c for a, c in {**layouts.ties, **opened.tensors.aliases}.items() if a in opened.specs}
    tensors = []
    for name, spec in opened.specs.items():
        layout = layouts.tensors[name]
        row: dict[str, Any] = {
            "name": name,
            "shape": list(spec.shape),
            "dtype": spec.dtype,
            "file": spec.file,
            "bytes": spec.nbytes,
            "role": str(layout.role),
            "reason": layout.reason,
        }
        stored, scheme = opened.tensors.parts(name)
        if scheme:
            row["stored"] = {"scheme": scheme, "bytes": sum(s.nbytes for s in stored)}
        if layout.orientation != "OI":
            row["orientation"] = layout.orientation
        if layout.blocks:
            row["blocks"] = {b.name: [b.start, b.stop] for b in layout.blocks}
        if name in ties:
            row["tied_to"] = ties[name]
        tensors.append(row)
    specs = opened.specs.values()
    return {
        "location": opened.location,
        "family": layouts.family,
        "tensors": tensors,
        "parameters": sum(s.numel for s in specs if s.is_floating and s.name not in ties),
        "bytes": sum(s.nbytes for s in specs),
        "stored_bytes": sum(r.get("stored", r)["bytes"] for r in tensors),
        "dtypes": dict(Counter(s.dtype for s in specs)),
        "schemes": dict(Counter(r["stored"]["scheme"] for r in tensors if "stored" in r)),
        "roles": dict(Counter(r["role"] for r in tensors)),
        "files": dict(Counter(s.file for s in specs)),
        "ties": ties,
        "notes": [note.text for note in opened.folder.notes],
    }


def _print(data: Mapping[str, Any], *, every: bool) -> None:

    family = data["family"] or "not recognized, by names and shapes"
    console.print(f"[bold]{escape(data['location'])}[/bold]")
    console.print(f"{data['parameters']:,} parameters, {format_size(data['bytes'])}, family: {escape(family)}")
    console.print("dtypes: " + ", ".join(f"{escape(k)} ({n})" for k, n in data["dtypes"].items()))
    for scheme, n in data["schemes"].items():
        console.print(f"quantized: {n} tensors in {escape(scheme)}; decoded to floats on reading")
    if data["schemes"]:
        console.print(f"stored in {format_size(data['stored_bytes'])}")
    files = ", ".join(list(data["files"])[:3]) + (", ..." if len(data["files"]) > 3 else "")
    console.print(f"files: {len(data['files'])} ({escape(files)})")
    for alias, canonical in data["ties"].items():
        console.print(f"tied: {escape(alias)} = {escape(canonical)}")
    for note in data["notes"]:
        console.print(f"note: {escape(note)}")
    table = plain_table("tensors", "role", "which, and why", numbers=["tensors"])
    groups: dict[tuple[str, str], list[str]] = {}
    for row in data["tensors"]:
        groups.setdefault((row["role"], row["reason"]), []).append(row["name"])
    if every:
        for row in data["tensors"]:
            table.add_row("x".join(map(str, row["shape"])), row["role"], escape(f"{row['name']}: {row['reason']}"))
    else:
        for (role, reason), names in groups.items():
            shown = escape(first_to_last(names))
            table.add_row(str(len(names)), role, f"{escape(reason)}\n[dim]{shown}[/dim]")
    console.print(table)


def _describe_adapter(adapter: Adapter) -> dict[str, Any]:
    from actmat.experts.locate import family_of

    specs = adapter.weights.specs
    return {
        "location": adapter.location,
        "adapter": "lora" if adapter.layout == "peft" else adapter.layout,
        "base_model": adapter.config.base_model,
        "use_rslora": adapter.config.use_rslora,
        "fan_in_fan_out": adapter.config.fan_in_fan_out,
        "modules": [
            {name: getattr(m, name) for name in ("name", "kind", "shape", "rank", "scaling")}
            | {"bias": m.bias is not None}
            | ({"part": m.part} if m.part else {})
            for m in adapter.modules.values()
        ],
        "full_tensors": {n: list(specs[s].shape) for n, s in adapter.extras.items()},
        "base_copies": list(adapter.copies),
        "parameters": sum(s.numel for s in specs.values()),
        "bytes": sum(s.nbytes for s in specs.values()),
        "dtypes": dict(Counter(s.dtype for s in specs.values())),
        "problems": list(adapter.problems),
        **family_of(adapter).describe(adapter),
    }


def _print_adapter(data: Mapping[str, Any], *, every: bool) -> None:
    """Print an adapter of factor pairs, which merges without a base, or one whose deltas need their base."""
    needs_base, kind, of = "needs_base" in data, data["adapter"], data["base_model"] or "an unnamed base"
    counts = Counter(m["part"] for m in data["modules"] if m.get("part"))
    parts = ", ".join(f"{part} ({n})" for part, n in counts.items())
    if needs_base:
        words = f"{kind}, " + (f"modules of {parts}" if parts else f"an adapter of {of}")
    elif kind == "lora":
        words = f"LoRA adapter of {of}"
    else:
        words = f"LoRA file in {kind}'s layout, modules of {parts or 'one model'}"
    console.print(f"[bold]{escape(data['location'])}[/bold]: {escape(words)}")
    if needs_base:
        console.print(f"merged with its base only: {escape(data['needs_base'])}")
    console.print(f"{data['parameters']:,} parameters, {format_size(data['bytes'])}, " + ", ".join(data["dtypes"]))
    columns = ("tensors", "kind", "made of") if needs_base else ("modules", "kind", "rank", "scaling", "O x I")
    table = plain_table(*columns, "which", numbers=["tensors"])
    groups: dict[tuple[str, ...], list[str]] = {}
    for m in data["modules"]:
        cells: tuple[str, ...] = (m["kind"], ", ".join(m.get("stored", ())))
        if not needs_base:
            cells = (m["kind"], str(m["rank"]), f"{m['scaling']:g}", "x".join(map(str, m["shape"])))
        groups.setdefault((*cells, m["name"] if every else ""), []).append(m["name"])
    for cells, names in groups.items():
        table.add_row(str(len(names)), *map(escape, cells[:-1]), escape(first_to_last(names)))
    console.print(table)
    for name, shape in data["full_tensors"].items():
        console.print(f"trained in full: {escape(name)} {'x'.join(map(str, shape))}")
    for problem in data["problems"]:
        console.print(f"[red]problem[/red]: {escape(problem)}")
