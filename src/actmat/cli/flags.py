"""Flags that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MODEL_DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Dtypes in which a model can run."""

RecipeFile = Annotated[
    Path | None, typer.Argument(metavar="[RECIPE.yaml]", help="A recipe file; flags replace its fields.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with 1 if a check of severity 'issue' found something.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_DATA = "Data and the models that run on it"
ModelClass = Annotated[
    str | None,
    typer.Option(
        "--model-class", help="Class of transformers to load it with (default: the config's).", rich_help_panel=_DATA
    ),
]
Split = Annotated[
    str, typer.Option("--split", help="Split of a data set on the hub or of a folder.", rich_help_panel=_DATA)
]
Subset = Annotated[
    str | None, typer.Option("--subset", help="Configuration of a data set on the hub.", rich_help_panel=_DATA)
]
TextColumn = Annotated[
    str | None, typer.Option("--text-column", help="Column of texts (default: found).", rich_help_panel=_DATA)
]
ImageColumn = Annotated[
    str | None, typer.Option("--image-column", help="Column of images (default: found).", rich_help_panel=_DATA)
]
TargetColumn = Annotated[
    str | None,
    typer.Option("--target-column", help="What the decoder of an encoder-decoder model reads.", rich_help_panel=_DATA),
]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Samples in one forward pass.", rich_help_panel=_DATA)]
MaxLength = Annotated[int, typer.Option("--max-length", help="Tokens of one text at most.", rich_help_panel=_DATA)]
ModelDtype = Annotated[str, typer.Option("--dtype", help="dtype of the model while it runs.", rich_help_panel=_DATA)]
Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        help="File, folder or hub id of unlabelled inputs: compare the answers of MERGED with its experts'. NAME=DATA "
        "gives an expert its own; once per expert.",
        rich_help_panel=_DATA,
    ),
]
Samples = Annotated[
    int, typer.Option("--samples", help="How many samples per expert at most.", min=1, rich_help_panel=_DATA)
]
