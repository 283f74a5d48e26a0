"""Folders of sentence-transformers: an encoder at the top, and modules in folders that `modules.json` names.

Modules with weights (Dense, LayerNorm, sparse ones) are read with the encoder as one model. Its tensors keep their
names; those of a module begin with its folder: `2_Dense.linear.weight`. All other files are side files. The encoders of
a router are components, as those of a pipeline.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from actmat.checkpoints.formats.joined import join_components
from actmat.checkpoints.formats.safetensors import SAFETENSORS
from actmat.checkpoints.formats.torch_files import TORCH_FILES
from actmat.checkpoints.model import Format, Model
from actmat.checkpoints.side_files import MODULES, ROUTER, is_weights
from actmat.checkpoints.source import Source
from actmat.errors import CheckpointError

_INSIDE = (SAFETENSORS, TORCH_FILES)


def _form_of(source: Source) -> Format | None:
    return next((form for form in _INSIDE if form.claims(source)), None)


def _claims(source: Source) -> bool:
    is_model = source.named is None and MODULES in source.names
    return is_model and (_form_of(source) is not None or ROUTER in source.names)


def _open(source: Source) -> Model:
    """Open the encoder, and every module with weights.

    Raises:
        CheckpointError: weights of a module cannot be read.
    """
    form = _form_of(source)
    with ExitStack() as stack:
        parts = {} if form is None else {"": stack.enter_context(form.open(source))}
        side = source.side_files(parts[""].folder.merged if parts else ())
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
    model = join_components(source, parts, {"_class_name": "SentenceTransformer"}, SENTENCE_MODULES.name)
    if "" not in parts:  # a router has no encoder of its own
        return model
    if len(parts) == 1:
        return parts[""]
    prefixes = {f"{name}.": name for name in parts if name}
    return replace(model, folder=replace(parts[""].folder, merged=model.folder.merged, parts=prefixes))


SENTENCE_MODULES = Format("modules", (MODULES,), _claims, _open)
