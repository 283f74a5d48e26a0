"""Weights in quantized layouts, written by the layouts' own libraries, and what those libraries read back."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Stored = dict[str, Tensor]
Writer = Callable[[str, Tensor], tuple[Stored, Tensor]]
"""Name and weight -> stored tensors, and the weight as the layout's library reads it, in the weight's dtype."""


def fp8_blocks(name: str, weight: Tensor, block: tuple[int, int] = (128, 128)) -> tuple[Stored, Tensor]:
    """DeepSeek's layout with ragged edges: transformers' quantizer on the padded weight, cut again."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    class Settings:
        quantization_config = type("Config", (), {"weight_block_size": list(block), "scale_fmt": "float"})()

    rows, columns = weight.shape[-2:]
    padded = torch.nn.functional.pad(weight, (0, -columns % block[1], 0, -rows % block[0]))
    found = Fp8Quantize(Settings())._quantize_one(name, padded)
    codes, scale = found[name], next(t for n, t in found.items() if n != name)
    read = Fp8Dequantize(Settings())._dequantize_one(codes, scale, output_dtype=weight.dtype)
    cut = codes[..., :rows, :columns].contiguous()
    return {name: cut, f"{name}_scale_inv": scale}, read[..., :rows, :columns].contiguous()


def fp8_scaled(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """Single files of image tools: one float32 scale per tensor, and that of the inputs."""
    scale = weight.float().abs().max() / 448
    codes = (weight.float() / scale).to(torch.float8_e4m3fn)
    stem = name.removesuffix("weight")
    extra = {f"{stem}scale_weight": scale.reshape(()), f"{stem}scale_input": torch.tensor(0.5)}
    return {name: codes} | extra, (codes.double() * scale.double()).to(weight.dtype)


def _written(scheme: Any, state_of: Callable[[Tensor], Stored], more: Stored) -> tuple[Writer, dict[str, Any]]:
    """Writer of the states of weights in a scheme of compressed-tensors, and the config that goes with it."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig

    form = infer_module_format(torch.nn.Linear, scheme)
    compressor = BaseCompressor.get_value_from_registry(form.value)

    def write(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
        stored = compressor.compress(state_of(weight), scheme)
        read = compressor.decompress(dict(stored), scheme)["weight"]
        stem = name.removesuffix("weight")
        return {stem + n: t.contiguous() for n, t in (stored | more).items()}, read.to(weight.dtype)

    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=form.value, quant_method="compressed-tensors", ignore=["lm_head"],
        quantization_status="compressed",
    )  # fmt: skip
    return write, json.loads(config.model_dump_json())


def compressed(**arguments: Any) -> tuple[Writer, dict[str, Any]]:
    """Writer with the library compressed-tensors, and the config that goes with it, for arguments of weights."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    given = arguments.pop("activations", None)
    weights = QuantizationArgs(**arguments)
    activations = None if given is None else QuantizationArgs(**given)

    def state_of(weight: Tensor) -> Stored:
        scale, zero = calculate_qparams(*_extremes(weight, arguments), weights)
        return {"weight": weight, "weight_scale": scale.to(weight.dtype), "weight_zero_point": zero}

    return _written(
        QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations), state_of, {}
    )


def compressed_fp4(kind: str) -> tuple[Writer, dict[str, Any]]:
    """Writer of `NVFP4A16`, `NVFP4` or `MXFP4A16` with compressed-tensors, and the config that goes with it."""
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme(kind, ["Linear"])
    weights = scheme.weights
    assert weights is not None

    def state_of(weight: Tensor) -> Stored:
        groups = weight.float().view(len(weight), -1, weights.group_size)
        overall = generate_gparam(weight.float().amin(), weight.float().amax()) if kind.startswith("NV") else None
        scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), weights, global_scale=overall)
        state = {"weight": weight.float(), "weight_scale": scale.float()}
        return state | ({} if overall is None else {"weight_global_scale": overall})

    return _written(scheme, state_of, {"input_global_scale": torch.tensor([3.0])} if kind == "NVFP4" else {})


def _extremes(weight: Tensor, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Least and largest entry of what shares a scale, as the strategy says."""
    rows, columns = weight.shape
    strategy, size = arguments["strategy"], arguments.get("group_size", 1)
    if strategy == "tensor":
        return weight.amin().reshape(1), weight.amax().reshape(1)
    if strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if strategy == "group":
        groups = weight.view(rows, columns // size, size)
        return groups.amin(-1), groups.amax(-1)
    height, width = arguments["block_structure"]
    blocks = weight.view(rows // height, height, columns // width, width)
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def mxfp4(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """gpt-oss: codes of a stack `[E, I, O]` by the nearest of 16 values; read by transformers."""
    from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

    blocks = weight.float().transpose(1, 2).unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1).clamp(min=2.0**-100))) - 2
    scaled = blocks / exponent.exp2()[..., None]
    codes = (scaled[..., None] - torch.tensor(FP4_VALUES, dtype=torch.float32)).abs().argmin(-1).to(torch.uint8)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    scales = (exponent + 127).to(torch.uint8)
    read = convert_moe_packed_tensors(packed, scales, dtype=weight.dtype)
    return {f"{name}_blocks": packed.contiguous(), f"{name}_scales": scales.contiguous()}, read.contiguous()
