"""Pipelines of diffusers: a folder with `model_index.json` and one folder per component, read as one model.

Tensor names begin with the component's folder: `unet.conv_in.weight`. Components with weights are models of diffusers
(`unet`, `transformer`, `vae`) or transformers (`text_encoder`); schedulers, tokenizers and the rest are side files. A
quantized component is decoded according to its own config.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from actmat.bounds import read_object
from actmat.checkpoints.folder import foreign_format
from actmat.checkpoints.formats.joined import join_components, open_part
from actmat.checkpoints.model import Format, Model
from actmat.checkpoints.side_files import PIPELINE, SCHEDULER_CONFIG
from actmat.checkpoints.source import Source
from actmat.errors import CheckpointError


def _claims(source: Source) -> bool:
    return source.named is None and PIPELINE in source.names


def _open(source: Source) -> Model:
    """Open every component with weights.

    Raises:
        CheckpointError: weights of components cannot be read (all are named), or no component has weights.
    """
    index = read_object(source.fetch(PIPELINE))
    problems: list[str] = []
    with contextlib.ExitStack() as stack:
        opened: dict[str, Model] = {}
        top: dict[str, Any] = {"_class_name": str(index.get("_class_name", "DiffusionPipeline"))}
        for name in _declared(index):
            inner = source.child(name)
            if inner is None:
                continue
            if SCHEDULER_CONFIG in inner.names:
                top[name] = read_object(inner.fetch(SCHEDULER_CONFIG))
            foreign = [n for n in inner.names if foreign_format(n)]
            try:
                if (component := open_part(inner)) is not None:
                    opened[name] = stack.enter_context(component)
                elif foreign:
                    problems.append(f"{name}: {foreign[0]} is {foreign_format(foreign[0])}, which is not supported")
            except CheckpointError as error:
                problems += [f"{name}: {p}" for p in error.problems]
        if not opened and not problems:
            problems = [f"no component has weights; {PIPELINE} names {', '.join(_declared(index)) or 'none'}"]
        if problems:
            raise CheckpointError(
                f"{source.location}: components of the pipeline cannot be read. Fix: fetch the complete folder, with "
                "weights as safetensors",
                problems,
            )
        stack.pop_all()
        return join_components(source, opened, top)


def _declared(index: Mapping[str, Any]) -> list[str]:
    """Names of the components loaded by the pipeline."""
    named = [(n, v) for n, v in index.items() if not n.startswith("_") and isinstance(v, list)]
    return [n for n, value in named if value and value[0] is not None]


PIPELINES = Format(_claims, _open)
