"""Folders of sentence-transformers: an encoder at the top, and modules in folders that `modules.json` names.

Modules with weights (Dense, LayerNorm, sparse ones) are read with the encoder as one model. Its tensors keep their
names; those of a module begin with its folder: `2_Dense.linear.weight`. All other files are side files. The encoders of
a router are components, as those of a pipeline.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from actmat.checkpoints.formats.joined import join_components, open_part
from actmat.checkpoints.formats.safetensors import SAFETENSORS
from actmat.checkpoints.formats.torch_files import TORCH_FILES
from actmat.checkpoints.model import Format, Model
from actmat.checkpoints.side_files import MODULES, ROUTER, is_weights
from actmat.checkpoints.source import Source
from actmat.errors import CheckpointError


def _claims(source: Source) -> bool:
    is_model = source.named is None and MODULES in source.names
    return is_model and (ROUTER in source.names or any(f.claims(source) for f in (SAFETENSORS, TORCH_FILES)))


def _open(source: Source) -> Model:
    """Open the encoder, and every module with weights.

    Raises:
        CheckpointError: weights of a module cannot be read.
    """
    with ExitStack() as stack:
        encoder = open_part(source)
        parts = {} if encoder is None else {"": stack.enter_context(encoder)}
        side = source.side_files(encoder.folder.merged if encoder is not None else ())
        for folder in side.modules:
            if any(path.startswith(f"{folder}/") and is_weights(path) for path in side.left_out):
                inner = source.child(folder)
                module = None if inner is None else open_part(inner)
                if module is None:
                    raise CheckpointError(
                        f"{source.location}: the weights of the module '{folder}' cannot be read, expected safetensors "
                        "or torch files in its folder. Fix: load and save the model with sentence-transformers."
                    )
                parts[folder] = stack.enter_context(module)
        stack.pop_all()
    model = join_components(source, parts, {"_class_name": "SentenceTransformer"})
    if encoder is None:  # a router has no encoder of its own
        return model
    if len(parts) == 1:
        return encoder
    prefixes = {f"{name}.": name for name in parts if name}
    return replace(model, folder=replace(encoder.folder, merged=model.folder.merged, parts=prefixes))


SENTENCE_MODULES = Format(_claims, _open)
