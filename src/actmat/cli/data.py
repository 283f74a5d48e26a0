"""Inputs of experts: flags that name them, settings for reading them, and for the models that run on them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from actmat.cli.flags import FlagFields, split_name
from actmat.flag import Setting

if TYPE_CHECKING:
    from actmat.extras.collect.data import DataOptions
    from actmat.extras.tune.sources import InputSettings

DATA = "Unlabeled inputs of expert NAME's task: a prompt, eight in a file, or 'self'."
CHECK = "Inputs on which the answers of the merge are compared with those of expert NAME."
CheckFlag = Annotated[list[str] | None, typer.Option("--check", metavar="NAME=INPUTS", help=CHECK)]
AROUND = "Text around prompts, {} in their place."
TemplateFlag = Annotated[list[str] | None, typer.Option("--template", metavar="NAME=TEXT", help=AROUND)]
ModelClass = Annotated[str | None, Setting("Transformers class that loads the model; default: the config's.")]
ModelDtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16", "float64"],
    Setting("Dtype of the models while they run; `auto` is float32 on the CPU, elsewhere the checkpoint's."),
]


@dataclass(frozen=True)
class ReadingFlags:
    """Settings for reading a data set."""

    split: Annotated[str, Setting("Split of a data set on the hub or in a folder.")] = "train"
    subset: Annotated[str | None, Setting("Configuration of a data set on the hub.")] = None
    text_column: Annotated[str | None, Setting("Column of texts; default: detected.")] = None
    image_column: Annotated[str | None, Setting("Column of images; default: detected.")] = None
    target_column: Annotated[str | None, Setting("Column of the decoder's texts, for encoder-decoder models.")] = None
    label_column: Annotated[str | None, Setting("Column of labels; default: 'label', if it has numbers.")] = None
    batch_size: Annotated[int, Setting("Samples in one forward pass.", low=1)] = 8
    max_length: Annotated[int, Setting("Maximum number of tokens per text.", low=1)] = 512
    samples: Annotated[int | None, Setting("Number of samples; default: 64, of 'tune' 128.", low=1)] = None

    def options(self, location: str, samples: int | None = None, **more: Any) -> DataOptions:
        """Options to read the data set at `location`, `samples` by default, and `more` fields of them."""
        from actmat.extras.collect.data import DataOptions

        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(ReadingFlags) if f.name != "samples"}
        return DataOptions(location, max_samples=self.samples or samples, **fields, **more)


@dataclass(frozen=True)
class InputFlags(ReadingFlags):
    """Inputs of the experts of a merge, and the models that run on them."""

    data: Annotated[list[str] | None, typer.Option("--data", metavar="NAME=INPUTS", help=DATA)] = None
    check: CheckFlag = None
    template: TemplateFlag = None
    new_tokens: Annotated[int | None, Setting("Tokens of an answer; default: 32, of 'tune' 16.", low=0)] = None
    model_class: ModelClass = None
    model_dtype: ModelDtype = "auto"
    keep_statistics: Annotated[bool, Setting("Keep the statistics of the inputs in OUT.statistics.")] = False
    tune_scale: Annotated[bool, Setting("Choose the scale by the inputs.")] = False

    def settings(self) -> InputSettings:
        """Settings of models that run on inputs."""
        from actmat.extras.collect.data import SAMPLES
        from actmat.extras.tune.sources import InputSettings

        names = ("new_tokens", "model_class", "model_dtype", "keep_statistics")
        fields: dict[str, Any] = {name: value for name in names if (value := getattr(self, name)) is not None}
        texts = [text.replace("\\n", "\n") for text in self.template or ()]
        fields["template"] = pairs_of(texts, "--template") or None
        return InputSettings(reading=self.options("", SAMPLES), **fields)


COMPARED = FlagFields(without=("check", "keep_statistics", "tune_scale"))
"""Fields of `InputFlags` of commands that do not merge by the inputs."""


def pairs_of(texts: Sequence[str], flag: str = "--data") -> dict[str, str] | str:
    """Expert -> data, or one data set for all; a value that is an existing path is not split at '='."""
    split = [("", text) if os.path.exists(text) else split_name(text) for text in texts]
    names = [name for name, _ in split if name]
    if not names and len(split) == 1:
        return split[0][1]
    if len(names) < len(split):
        raise typer.BadParameter(f"give {flag} once for all experts, or {flag} NAME=DATA once per expert")
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise typer.BadParameter(f"{flag} is given twice for expert '{twice[0]}'")
    return dict(split)
