"""Models in folders of one folder, such as the components of a pipeline, read as one model.

Tensor names begin with the component's folder: `unet.conv_in.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.codecs import decoded
from actmat.checkpoints.composed import Composed, Piece, whole
from actmat.checkpoints.formats.safetensors import SAFETENSORS
from actmat.checkpoints.formats.torch_files import TORCH_FILES
from actmat.checkpoints.model import COMPONENTS, Config, Model, ModelFolder
from actmat.checkpoints.source import Source, handle_of


def open_part(source: Source) -> Model | None:
    """The model in a folder of the folder, decoded; None without weights that are read."""
    form = next((form for form in (SAFETENSORS, TORCH_FILES) if form.claims(source)), None)
    return None if form is None else decoded(form.open(source))


def join_components(source: Source, components: Mapping[str, Model], top: Config) -> Model:
    """The model of several in one folder; closing it closes them.

    Args:
        source: files of the folder.
        components: by the names of their folders; an empty one for a model whose tensors keep their names.
        top: config beside those of the components: the class of the whole, and the configs of its schedulers.
    """
    pieces: dict[str, tuple[Piece]] = {}
    specs: dict[str, TensorSpec] = {}
    aliases: dict[str, str] = {}
    for number, (component, model) in enumerate(components.items()):
        start, below = (component and f"{component}{mark}" for mark in "./")
        pieces |= {start + n: whole(spec, number) for n, spec in model.specs.items()}
        specs |= {start + n: replace(s, name=start + n, file=below + s.file) for n, s in model.specs.items()}
        aliases |= {start + a: start + n for a, n in model.tensors.aliases.items()}
    tensors = [model.tensors for model in components.values()]
    handle = handle_of(source, [file for part in tensors for file in part.identity()])
    folders = {component: model.folder for component, model in components.items()}
    folder = ModelFolder(
        {**top, COMPONENTS: {component: dict(f.config or {}) for component, f in folders.items()}},
        written={f"{component}/{path}": c for component, f in folders.items() for path, c in f.written.items()},
        files=(source,),
        merged=tuple(f"{component}/{name}".lstrip("/") for component, f in folders.items() for name in f.merged),
        notes=tuple(replace(n, text=f"component '{part}': {n.text}") for part, f in folders.items() for n in f.notes),
        absent=tuple(f"{component}.{name}" for component, f in folders.items() for name in f.absent),
    )
    return Model(Composed(tensors, pieces, specs, aliases, location=source.location, handle=handle), folder)
