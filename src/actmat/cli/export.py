"""`actmat export`: write a checkpoint in the form of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from actmat.cli import flags
from actmat.cli.listing import command
from actmat.cli.screen import console, escape, print_result
from actmat.cli.streams import optional_stdout


@command("share", "written", "the checkpoint cannot be read, or the output location is invalid", imports_torch=True)
def export(
    checkpoint: Annotated[str, typer.Argument(help="Directory, file, hub id or URL.")],
    out: Annotated[Path, typer.Option(help="File to write; must not exist.")],
    to: Annotated[str, typer.Option(help="Format: gguf (llama.cpp); for LoRA of images: comfy, kohya or diffusers.")],
    like: Annotated[
        str | None, typer.Option(help="gguf: a GGUF file of the base; gives names, metadata and tokenizer.")
    ] = None,
    type_: Annotated[
        str | None, typer.Option("--type", help="gguf: type of the matrices: f32, f16, bf16 or q8_0 (default: bf16).")
    ] = None,
    shown: flags.JsonQuiet = flags.USUAL,
) -> None:
    """Write a checkpoint, such as a merged model, in the form of another tool.

    actmat export MERGED --to gguf --like BASE.gguf --out MERGED.gguf
    actmat export LORA.safetensors --to comfy --out LORA-comfy.safetensors

    llama.cpp reads a GGUF file; a LoRA adapter becomes a GGUF adapter. One
    tensor is in memory at a time. LoRA adapters of image and video models are
    converted exactly between the layouts of ComfyUI, kohya and diffusers.
    """
    from actmat.api.exporting import export as write

    options = {"like": like, "type": type_}
    said = write(checkpoint, out=out, to=to, **{name: value for name, value in options.items() if value is not None})
    with optional_stdout("The export is complete."):
        if shown.json:
            print_result("export", {"out": str(out), "checkpoint": checkpoint, "form": to})
        if shown.json or shown.quiet:
            return
        console.print(f"[bold]{escape(out)}[/bold]: {escape(checkpoint)} as {escape(to)}; {said}")
