"""Numbers of layers in names of tensors, and locations that name layers of several checkpoints; text only.

    base[0:16] + math[8:24]

is a *stack*: layers 0 to 15 of `base`, then layers 8 to 23 of `math`, renumbered from 0. `base+lora` is the model
`base` with the adapter `lora` merged into it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_PART = re.compile(r"\s*(?P<location>[^\[\]]+?)\[(?P<start>\d{1,6}):(?P<stop>\d{1,6})\]\s*")
_TABLES = re.compile(r"(?:^|\.)(?:embed|wte|wpe|tok_embed|word_embed|shared\.|embeddings?\b|\w*embed_tokens)")


@dataclass(frozen=True, slots=True)
class StackPart:
    """Layers `start` to `stop - 1` of the checkpoint at `location`."""

    location: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.location}[{self.start}:{self.stop}]"


def stack_parts(text: str) -> tuple[StackPart, ...]:
    """The parts of a location that is a stack; empty for any other text.

    >>> [str(part) for part in stack_parts("base[0:16] + ./math[8:24]")]
    ['base[0:16]', './math[8:24]']
    >>> stack_parts("org/model@main")
    ()
    """
    if not text.rstrip().endswith("]"):
        return ()
    parts, position = [], 0
    while True:
        part = _PART.match(text, position)
        if part is None:
            return ()
        parts.append(StackPart(part["location"], int(part["start"]), int(part["stop"])))
        if part.end() == len(text):
            return tuple(parts)
        if text[part.end()] != "+":
            return ()
        position = part.end() + 1


def adapted_parts(text: str) -> tuple[str, str] | None:
    """Locations of a model and of the adapter that is merged into it; None for text that is not `MODEL+ADAPTER`.

    >>> adapted_parts("org/base+./lora"), adapted_parts("org/base")
    (('org/base', './lora'), None)
    """
    model, _, adapter = text.partition("+")
    return (model, adapter) if model and adapter and "+" not in adapter and "://" not in model else None


def split_layer(name: str) -> tuple[str, int, str] | None:
    """Name before the number of the layer, the number, and the rest; None for a tensor outside of all layers.

    The number is the first numeric component of the name.

    >>> split_layer("model.layers.3.mlp.up_proj.weight")
    ('model.layers.', 3, '.mlp.up_proj.weight')
    """
    match = _LAYER.search(name)
    return (name[: match.start(1)], int(match[1]), name[match.end(1) :]) if match else None


def is_before_layers(name: str) -> bool:
    """True for a tensor outside of all layers that acts before them (embeddings), False for one after them.

    >>> [is_before_layers(f"{n}.weight") for n in ("model.embed_tokens", "transformer.wpe", "model.norm", "lm_head")]
    [True, True, False, False]
    """
    return split_layer(name) is None and _TABLES.search(name) is not None and "embed_out" not in name
