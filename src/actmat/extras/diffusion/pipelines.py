"""Pipelines of diffusers: a folder with `model_index.json` and one folder per component, read as one checkpoint.

Tensor names begin with the component's folder: `unet.conv_in.weight`. Components with weights are models of diffusers
(`unet`, `transformer`, `vae`) or transformers (`text_encoder`); schedulers, tokenizers and the rest are side files. A
quantized component is decoded according to its own config.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

from actmat.bounds import read_object
from actmat.checkpoints.base import Checkpoint, FileIdentity, TensorSpec
from actmat.checkpoints.codecs import decoded
from actmat.checkpoints.codecs.checkpoint import QuantizedCheckpoint
from actmat.checkpoints.folder import foreign_format
from actmat.checkpoints.formats.safetensors import SAFETENSORS
from actmat.checkpoints.formats.torch_files import TORCH_FILES
from actmat.checkpoints.side_files import PIPELINE, SCHEDULER_CONFIG, SideFiles
from actmat.checkpoints.source import Format, Source, StoredCheckpoint
from actmat.checkpoints.view import DelegatingCheckpoint
from actmat.errors import CheckpointError

COMPONENTS = "components"
"""Config key of the components' configs; read by `layout.components`."""
_INSIDE = (SAFETENSORS, TORCH_FILES)


class PipelineCheckpoint(DelegatingCheckpoint, StoredCheckpoint):
    """Checkpoint of a pipeline; closes its components."""

    format = "pipeline"
    is_composed = True

    def __init__(self, source: Source, components: Mapping[str, Checkpoint], own: Mapping[str, Any]) -> None:
        super().__init__(source, ())
        self.components = dict(components)
        self._own = own
        self.specs = MappingProxyType(
            {f"{c}.{n}": _moved(spec, c) for c, opened in components.items() for n, spec in opened.specs.items()}
        )
        self.notes = tuple(f"component '{c}': {note}" for c, opened in components.items() for note in opened.notes)
        self.absent = tuple(f"{c}.{n}" for c, opened in components.items() for n in opened.absent)
        self.aliases = MappingProxyType(
            {f"{c}.{a}": f"{c}.{n}" for c, opened in components.items() for a, n in opened.aliases.items()}
        )

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The pipeline's class, component name -> config, and the configs of its schedulers."""
        configs = {name: dict(opened.config or {}) for name, opened in self.components.items()}
        return {**self._own, COMPONENTS: configs}

    @property
    def written_configs(self) -> Mapping[str, Mapping[str, Any]]:
        """Configs of quantized components, without quantization."""
        written = {f"{name}/config.json": opened.written_config for name, opened in self.components.items()}
        return {path: config for path, config in written.items() if config is not None}

    def origin(self, name: str) -> tuple[Checkpoint, str]:
        """The component, and the tensor's name in it."""
        component, _, own = name.partition(".")
        return self.components[component], own

    def stored_specs(self, name: str) -> tuple[TensorSpec, ...]:
        """Specs of the tensors stored for it in its component."""
        return tuple(_moved(spec, name.partition(".")[0]) for spec in super().stored_specs(name))

    def identity(self) -> tuple[FileIdentity, ...]:
        """Identity of the weight files of all components."""
        return tuple(i for opened in self.components.values() for i in opened.identity())

    def side_files(self) -> SideFiles:
        """Files of the pipeline and its components, except merged weights."""
        merged = [f"{c}/{label}" for c, opened in self.components.items() for label in _labels(opened)]
        return self.source.side_files(merged)

    @property
    def buffer_bytes(self) -> int:
        """Sum over all components, because each may read ahead."""
        return sum(c.buffer_bytes for c in self.components.values())

    def close(self) -> None:
        """Close all components."""
        for opened in self.components.values():
            opened.close()


def _moved(spec: TensorSpec, component: str) -> TensorSpec:
    return TensorSpec(f"{component}.{spec.name}", spec.shape, spec.dtype, f"{component}/{spec.file}", spec.offset)


def _labels(opened: Checkpoint) -> tuple[str, ...]:
    stored = opened.inner if isinstance(opened, QuantizedCheckpoint) else opened
    return stored.labels if isinstance(stored, StoredCheckpoint) else ()


def _claims(source: Source) -> bool:
    return source.named is None and PIPELINE in source.names


def _open(source: Source) -> PipelineCheckpoint:
    """Open every component with weights.

    Raises:
        CheckpointError: weights of components cannot be read (all are named), or no component has weights.
    """
    index = read_object(source.fetch(PIPELINE))
    problems: list[str] = []
    with contextlib.ExitStack() as stack:
        opened: dict[str, Checkpoint] = {}
        own: dict[str, Any] = {"_class_name": str(index.get("_class_name", "DiffusionPipeline"))}
        for name in _declared(index):
            inner = source.child(name)
            if inner is None:
                continue
            if SCHEDULER_CONFIG in inner.names:
                own[name] = read_object(inner.fetch(SCHEDULER_CONFIG))
            form = next((f for f in _INSIDE if f.claims(inner)), None)
            foreign = [n for n in inner.names if foreign_format(n)]
            try:
                if form is not None:
                    opened[name] = stack.enter_context(decoded(form.open(inner)))
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
        return PipelineCheckpoint(source, opened, own)


def _declared(index: Mapping[str, Any]) -> list[str]:
    """Names of the components loaded by the pipeline."""
    named = [(n, v) for n, v in index.items() if not n.startswith("_") and isinstance(v, list)]
    return [n for n, value in named if value and value[0] is not None]


PIPELINES = Format(PipelineCheckpoint.format, (PIPELINE,), _claims, _open)
