"""Choose the codecs (quantized storage <-> floats) of a checkpoint.

A codec is a plug-in of the group `actmat.codecs`, imported when a checkpoint has signs of quantization. Each claims
tensors that no other claims.
"""

from __future__ import annotations

from actmat import plugins
from actmat.checkpoints import quantization
from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.codecs.base import Codec, Headers
from actmat.checkpoints.codecs.checkpoint import QuantizedCheckpoint
from actmat.checkpoints.keys import Sorted, unknown_note
from actmat.errors import CheckpointError

__all__ = ["decoded"]


def decoded(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with its quantized tensors as floats; unchanged if no codec recognizes any of them.

    A checkpoint of several models (`is_composed`) has decoded each of them by its own config.

    Tensors that look quantized but that no codec recognizes stay as stored; plans refuse them.

    Raises:
        CheckpointError: a known layout is damaged, rotated or sparse; names every tensor.
    """
    if checkpoint.is_composed:
        return checkpoint
    if not any(quantization.scheme_of(spec, checkpoint.specs) for spec in checkpoint.specs.values()):
        return _without_leftover(checkpoint)
    try:
        config = checkpoint.config
    except CheckpointError:  # raised again when the config is used, with all problems of the inputs
        return checkpoint
    settings = quantization.quantization_config(config)
    method = str(settings.get("quant_method") or settings.get("quant_algo") or "").lower()
    if settings and not method:
        return checkpoint
    headers = Headers(
        checkpoint.location, checkpoint.specs, method, settings, quantization.float_dtype(config), checkpoint.read
    )
    codecs = plugins.load_all("actmat.codecs", Codec)
    found = [codec.claims(headers) for codec in codecs.values()]
    keys = next((codec.keys[method] for codec in codecs.values() if method in codec.keys), None)
    listed = keys.sort(settings) if keys is not None else Sorted({}, [])
    if not any(claims.tensors or claims.problems for claims in found):
        return checkpoint
    # the settings may be the reason for the problems of codecs
    problems = [*_refused(listed), *_turned(headers)] or [p for claims in found for p in claims.problems]
    if problems:
        checkpoint.close()
        raise CheckpointError(f"{checkpoint.location}: quantized tensors that cannot be read", problems)
    coded = [c for claims in found for c in claims.tensors]
    opened = QuantizedCheckpoint(checkpoint, coded, dict.fromkeys(n for claims in found for n in claims.unused))
    opened.notes = (*opened.notes, *unknown_note("its quantization_config", listed.unknown))
    return opened


def _without_leftover(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint without codes; an entry about quantization that its floats contradict is left out of its config."""
    try:
        method = quantization.declared_scheme(checkpoint.config)
    except CheckpointError:  # see above
        return checkpoint
    if method.lower() not in quantization.AFTER_TRAINING or not all(
        map(quantization.is_plain, checkpoint.specs.values())
    ):
        return checkpoint
    opened = QuantizedCheckpoint(checkpoint, ())
    opened.notes = (
        *opened.notes,
        f"config.json declares quantized weights ({method}), and all its tensors are floats: read as they are, and the "
        "entry is not written",
    )
    return opened


def _refused(listed: Sorted) -> list[str]:
    """One sentence for each setting that is not read."""
    return [
        f"config.json sets {key}: {why}. Fix: merge the checkpoint it was quantized from, or save a dequantized "
        "(bfloat16) copy with the library that wrote it"
        for key, why in listed.refused.items()
    ]


def _turned(headers: Headers) -> list[str]:
    """Reasons why readable codes are not the weights: rotation or sparsity."""
    problems = []
    transform = headers.settings.get("transform_config")
    if isinstance(transform, dict) and transform.get("config_groups"):
        problems.append(
            "config.json declares weights that were rotated before they were quantized (transform_config): their "
            "deltas are in another basis. Fix: merge the checkpoint it was quantized from"
        )
    sparsity = headers.settings.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        problems.append(
            f"config.json declares sparse storage ({str(sparsity['format'])[:80]}), which is not read. Fix: merge the "
            "checkpoint it was made from"
        )
    return problems
