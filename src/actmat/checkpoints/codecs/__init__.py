"""Choose the codecs (quantized storage <-> floats) of a model.

A codec is a plug-in of the group `actmat.codecs`, imported when a model has signs of quantization. Each claims
tensors that no other claims.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from actmat import plugins
from actmat.checkpoints import quantization
from actmat.checkpoints.codecs.base import Codec, Headers
from actmat.checkpoints.codecs.quantized import QuantizedTensors, without_quantization
from actmat.checkpoints.composed import Composed
from actmat.checkpoints.keys import unknown_note
from actmat.checkpoints.model import Model
from actmat.errors import CheckpointError

__all__ = ["decoded"]


def decoded(model: Model) -> Model:
    """The model with its quantized tensors as floats; unchanged if no codec recognizes any of them.

    Parts of a composed model have been decoded, each by its own config.
    Tensors that look quantized but that no codec recognizes stay as stored; plans refuse them.

    Raises:
        CheckpointError: a known layout is damaged, rotated or sparse; names every tensor.
    """
    stored = model.tensors
    if isinstance(stored, Composed) or isinstance(model.folder.parsed, CheckpointError):
        return model
    if not any(quantization.scheme_of(spec, stored.specs) for spec in stored.specs.values()):
        return _without_leftover(model)
    config = model.config
    settings = quantization.quantization_config(config)
    method = str(settings.get("quant_method") or settings.get("quant_algo") or "").lower()
    if settings and not method:
        return model
    dtype = quantization.float_dtype(config)
    headers = Headers(model.location, stored.specs, method, settings, dtype, stored.read)
    codecs = plugins.load_all("actmat.codecs", Codec)
    claims = [codec.claim(headers) for codec in codecs.values()]
    coded, faults = [t for tensors, _, _ in claims for t in tensors], [p for _, _, problems in claims for p in problems]
    if not (coded or faults):
        return model
    judged = next((c.keys[method].judge(settings) for c in codecs.values() if method in c.keys), {})
    # the settings may be the reason for the problems of codecs
    problems = _refused(judged) or faults
    if problems:
        model.close()
        raise CheckpointError(f"{model.location}: quantized tensors that cannot be read", problems)
    unknown = sorted(key for key, why in judged.items() if not why)
    folder = model.folder.with_config(without_quantization).noted(*unknown_note("its quantization_config", unknown))
    return Model(QuantizedTensors(stored, coded, [n for _, unused, _ in claims for n in unused]), folder)


def _without_leftover(model: Model) -> Model:
    """A model without codes; an entry about quantization that its floats contradict is left out of its config."""
    method = quantization.declared_scheme(model.config)
    if method.lower() not in quantization.AFTER_TRAINING or not all(map(quantization.is_plain, model.specs.values())):
        return model
    note = (
        f"config.json declares quantized weights ({method}), and all its tensors are floats: read as they are, and the "
        "entry is not written"
    )
    return replace(model, folder=model.folder.with_config(without_quantization).noted(note))


def _refused(judged: Mapping[str, str]) -> list[str]:
    """One sentence for each setting that is not read."""
    return [
        f"config.json sets {key}: {why}. Fix: merge the checkpoint it was quantized from, or save a dequantized "
        "(bfloat16) copy with the library that wrote it"
        for key, why in judged.items()
        if why
    ]
