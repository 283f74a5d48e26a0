"""Flags that several commands share."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

MODEL_DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Dtypes in which a model can run."""

RecipeFile = Annotated[
    Path | None, typer.Argument(metavar="[RECIPE.yaml]", help="A recipe file; flags replace its fields.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with 1 if a check of severity 'issue' found something.")]
PartOption = Annotated[
    str | None, typer.Option("--part", metavar="K/N", help="Only this part of the merge, such as 3/16, counted from 1.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON in place of words.")]
Full = Annotated[bool, typer.Option("--full", help="With --json: also the lists with a row per tensor.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors, and what a script reads.")]
"""The same everywhere: no words for people. A script reads JSON (with --json), and what a command is asked to print:
the recipe of `import`, the command of `serve-command`, the answers of `try`, the address of `ui`."""


@dataclass(frozen=True)
class OutputFlags:
    """Form of what is printed."""

    json: Json = False
    full: Full = False
    quiet: Quiet = False


def without_part(arguments: Sequence[str]) -> str:
    """The command line without its part, to be continued with another `--part`.

    >>> without_part(["merge", "a b", "--part", "1/2", "--out", "x"])
    "actmat merge 'a b' --out x"
    """
    kept = [a for before, a in zip(["", *arguments], arguments, strict=False) if "--part" not in (before, a)]
    return shlex.join(["actmat", *(a for a in kept if not a.startswith("--part="))])


def _data_option(flag: str, text: str, **more: Any) -> Any:
    return typer.Option(flag, help=text, rich_help_panel="Data and the models that run on it", **more)


ModelClass = Annotated[
    str | None, _data_option("--model-class", "Class of transformers to load it with (default: the config's).")
]
Split = Annotated[str, _data_option("--split", "Split of a data set on the hub or of a folder.")]
Subset = Annotated[str | None, _data_option("--subset", "Configuration of a data set on the hub.")]
TextColumn = Annotated[str | None, _data_option("--text-column", "Column of texts (default: found).")]
ImageColumn = Annotated[str | None, _data_option("--image-column", "Column of images (default: found).")]
TargetColumn = Annotated[
    str | None, _data_option("--target-column", "What the decoder of an encoder-decoder model reads.")
]
BatchSize = Annotated[int, _data_option("--batch-size", "Samples in one forward pass.")]
MaxLength = Annotated[int, _data_option("--max-length", "Tokens of one text at most.")]
ModelDtype = Annotated[str, _data_option("--dtype", "dtype of the model while it runs.")]
Samples = Annotated[int, _data_option("--samples", "How many samples per expert at most.", min=1)]
Data = Annotated[
    list[str] | None,
    _data_option(
        "--data",
        "File, folder or hub id of unlabelled inputs, on which a merged model is compared with its experts. NAME=DATA "
        "gives an expert its own; once per expert.",
    ),
]
