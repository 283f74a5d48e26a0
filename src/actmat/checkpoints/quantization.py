"""Signs of quantized weights in the config, tensor names and dtypes of a checkpoint.

Stored integers are codes, not weights: the difference of two codes is not a delta, and merging them would produce a
file that loads and computes nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actmat.checkpoints.base import TensorSpec
from actmat.errors import first_names

NF4, FP4 = (f".quant_state.bitsandbytes__{code}" for code in ("nf4", "fp4"))
SUFFIXES = {
    "GPTQ or AWQ": (".qweight", ".qzeros"),
    "GPTQ": (".g_idx",),
    "bitsandbytes 8-bit": (".SCB",),
    "bitsandbytes 4-bit": (".absmax", ".quant_map", NF4, FP4),
    "fp8 or compressed-tensors": (".weight_scale",),
    "fp8_scaled": (".scale_weight",),
    "fp8 with block scales": (".weight_scale_inv",),
    "compressed-tensors": (".weight_packed", ".weight_zero_point"),
    "MXFP4": ("_blocks", "_scales"),
}
"""Endings of tensor names that quantizers write. The last two count only as a pair of uint8 tensors."""

ALL_SUFFIXES = tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)

FIX = "Merge the checkpoint it was quantized from, or save a dequantized (bfloat16) copy first."


def quantization_problems(specs: Mapping[str, TensorSpec], config: Mapping[str, Any] | None) -> list[str]:
    """One line with the signs of quantization, an example of each and the fix; empty for an ordinary checkpoint.

    Signs: an entry about quantization in the config, names that quantizers write, float8 tensors, matrices of integers.
    """
    declared = declared_scheme(config)
    signs = [f"config.json declares quantized weights ({declared})"] if declared else []
    by_scheme: dict[str, list[str]] = {}
    for spec in specs.values():
        by_scheme.setdefault(scheme_of(spec, specs), []).append(spec.name)
    by_scheme.pop("", None)
    signs += [f"tensors look quantized ({scheme}): {first_names(n)}" for scheme, n in by_scheme.items()]
    return [f"{'; '.join(signs)}. {FIX}"] if signs else []


_AFTER_TRAINING = """
aqlm auto-round awq bitsandbytes compressed-tensors eetq fbgemm_fp8 fp8 gptq higgs hqq modelopt mxfp4 quanto spqr
torchao vptq
"""
AFTER_TRAINING = frozenset(_AFTER_TRAINING.split())
"""Methods whose layers store codes: a model that declares one and holds only floats was decoded."""

_BUFFERS = ("position_ids", "token_type_ids", "num_batches_tracked", "relative_position_index")


def is_plain(spec: TensorSpec) -> bool:
    """True for floats that are no scales, and for the integer buffers of architectures."""
    last = spec.name.rpartition(".")[2]
    return last in _BUFFERS or (spec.is_floating and not spec.dtype.startswith("float8") and "scale" not in last)


LEVELS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Entries of a config that may hold the settings of the text model."""

CONFIG_KEYS = ("quantization_config", "compression_config", "quantization")


def _levels(config: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The config, and those of its text model and of a pipeline's components."""
    top = config or {}
    components = top.get("components")
    inner = [*(top.get(key) for key in LEVELS), *(components.values() if isinstance(components, Mapping) else ())]
    return [level for level in (top, *inner) if isinstance(level, Mapping)]


def quantization_config(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The config's entry about quantization, of the whole model or of a part; may be empty."""
    entries = (level.get(key) for level in _levels(config) for key in CONFIG_KEYS)
    return next((entry for entry in entries if isinstance(entry, Mapping) and entry), {})


def float_dtype(config: Mapping[str, Any] | None) -> str:
    """dtype of the weights that a config declares; bfloat16 if it declares no wide float type.

    >>> float_dtype({"torch_dtype": "float16"}), float_dtype({"dtype": "auto"}), float_dtype(None)
    ('float16', 'bfloat16', 'bfloat16')
    """
    named = (
        str(level.get(key)).removeprefix("torch.") for level in _levels(config) for key in ("dtype", "torch_dtype")
    )
    return next((name for name in named if name in ("bfloat16", "float16", "float32")), "bfloat16")


def declared_scheme(config: Mapping[str, Any] | None) -> str:
    """Name of the scheme that the config declares; empty if none."""
    entry = quantization_config(config)
    return str(entry.get("quant_method") or entry.get("quant_algo") or "no method named") if entry else ""


def scheme_of(spec: TensorSpec, specs: Mapping[str, TensorSpec]) -> str:
    """Name of the scheme that a tensor is a sign of; empty if none."""
    if spec.dtype.startswith("float8"):
        return spec.dtype
    for scheme, suffixes in SUFFIXES.items() if spec.name.endswith(ALL_SUFFIXES) else ():
        if spec.name.endswith(suffixes):
            return scheme if scheme != "MXFP4" or _is_mxfp4(spec, specs) else ""
    # bitsandbytes and MLX store codes under the weight's name
    is_code = not spec.is_floating and spec.name.endswith(".weight") and len(spec.shape) >= 2
    return f"{spec.dtype} weights" if is_code else ""


def _is_mxfp4(spec: TensorSpec, specs: Mapping[str, TensorSpec]) -> bool:
    stem, _, ending = spec.name.rpartition("_")
    pair = specs.get(f"{stem}_{'scales' if ending == 'blocks' else 'blocks'}")
    return spec.dtype == "uint8" and pair is not None and pair.dtype == "uint8"
