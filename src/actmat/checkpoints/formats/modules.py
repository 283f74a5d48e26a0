"""Folders of sentence-transformers: an encoder at the top, and modules in folders that `modules.json` names.

Modules with weights (Dense, LayerNorm, sparse ones) are read with the encoder as one model. Its tensors keep their
names; those of a module begin with its folder: `2_Dense.linear.weight`. All other files are side files.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from actmat.checkpoints.composed import Composed, Piece, whole
from actmat.checkpoints.formats.safetensors import SAFETENSORS
from actmat.checkpoints.formats.torch_files import TORCH_FILES
from actmat.checkpoints.model import Format, Model
from actmat.checkpoints.side_files import MODULES, is_weights
from actmat.checkpoints.source import Source, handle_of
from actmat.errors import CheckpointError

_INSIDE = (SAFETENSORS, TORCH_FILES)


def _form_of(source: Source) -> Format | None:
    return next((form for form in _INSIDE if form.claims(source)), None)


def _claims(source: Source) -> bool:
    return source.named is None and MODULES in source.names and _form_of(source) is not None


def _open(source: Source) -> Model:
    """Open the encoder, and every module with weights.

    Raises:
        CheckpointError: weights of a module cannot be read.
    """
    form = _form_of(source)
    assert form is not None, "claimed"
    with ExitStack() as stack:
        parts = {"": stack.enter_context(form.open(source))}
        side = source.side_files(parts[""].folder.merged)
        for folder in side.modules:
            if any(path.startswith(f"{folder}/") and is_weights(path) for path in side.left_out):
                inner = source.child(folder)
                form = None if inner is None else _form_of(inner)
                if inner is None or form is None:
                    raise CheckpointError(
                        f"{source.location}: the weights of the module '{folder}' cannot be read, expected safetensors "
                        "or torch files in its folder. Fix: load and save the model with sentence-transformers."
                    )
                parts[folder] = stack.enter_context(form.open(inner))
        stack.pop_all()
    return parts[""] if len(parts) == 1 else _joined(source, parts)


def _joined(source: Source, parts: dict[str, Model]) -> Model:
    """The model of an encoder and its modules; closing it closes them."""
    encoder, prefixes = parts[""], [f"{folder}." * bool(folder) for folder in parts]
    rows = [(n, p, s) for n, (p, m) in enumerate(zip(prefixes, parts.values(), strict=True)) for s in m.specs.values()]
    pieces: dict[str, tuple[Piece]] = {prefix + spec.name: whole(spec, n) for n, prefix, spec in rows}
    specs = {p + s.name: replace(s, name=p + s.name, file=f"{p[:-1]}/{s.file}" if p else s.file) for _, p, s in rows}
    tensors = [model.tensors for model in parts.values()]
    files = [file for part in tensors for file in part.identity()]
    handle = handle_of(source, "modules", files)
    merged = [f"{folder}/{n}" if folder else n for folder, m in parts.items() for n in m.folder.merged]
    folder = replace(encoder.folder, merged=tuple(merged), parts={p: p[:-1] for p in prefixes if p})
    aliases = encoder.tensors.aliases
    return Model(Composed(tensors, pieces, specs, aliases, location=source.location, handle=handle), folder)


SENTENCE_MODULES = Format("modules", (MODULES,), _claims, _open)
