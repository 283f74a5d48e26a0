"""`actmat conflicts`: what LoRA of one image or video model have in common."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from actmat.cli import flags
from actmat.cli.listing import command
from actmat.cli.streams import optional_stdout


@command(
    "look", "measured, whatever was found", "a file is no LoRA, or they are of different models", imports_torch=True
)
def conflicts(
    files: Annotated[list[str], typer.Argument(metavar="LORA", help="Files of LoRA of one model, two or more.")],
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Compare LoRA of an image or video model: blocks in common, and angles.

    actmat conflicts INK.safetensors OIL.safetensors

    A cosine near 0 says that two LoRA leave each other alone; near 1, that
    their sum is twice the same change (lower the weights); below 0, that they
    undo each other. Files in the layouts of diffusers, kohya and ComfyUI are
    compared with each other.
    """
    from actmat.cli.screen import console, escape, plain_table, print_result
    from actmat.extras.diffusion.conflicts import image_conflicts

    found = image_conflicts(files)
    with optional_stdout("The comparison is complete."):
        if json:
            pairs = [{"first": a, "second": b, "cosine": c} for (a, b), c in found.cosines.items()]
            data = {"pairs": pairs, "blocks": [dataclasses.asdict(b) for b in found.blocks]}
            only = {label: list(names) for label, names in found.only_in.items()}
            print_result("conflicts", {**data, "only_in": only, "norms": dict(found.norms)})
        if json or quiet:
            return
        for (first, second), cosine in found.cosines.items():
            own = [b for b in found.blocks if (b.first, b.second) == (first, second)]
            shown = "none in common" if cosine is None else f"cosine {cosine:+.3f} over {len(own)} blocks in common"
            console.print(f"[bold]{escape(first)}[/bold] and [bold]{escape(second)}[/bold]: {shown}")
            table = plain_table("block", "modules", "cosine", "norms")
            for b in sorted(own, key=lambda b: -abs(b.cosine or 0)):
                angle = "-" if b.cosine is None else f"{b.cosine:+.3f}"
                table.add_row(escape(b.block), str(b.modules), angle, f"{b.norms[0]:.3g} {b.norms[1]:.3g}")
            if own:
                console.print(table)
        for label, names in found.only_in.items():
            some = f": {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}" if names else ""
            console.print(f"only in {escape(label)}: {len(names)} modules{escape(some)}")
