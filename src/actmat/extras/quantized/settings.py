"""Settings of quantized checkpoints: used by a codec, irrelevant, or refused.

Settings in none of the lists are named in the plan if set.

Sources: `transformers.utils.quantization_config` of transformers 5, compressed-tensors 0.20, AutoAWQ 0.2, GPTQModel.
"""

from __future__ import annotations

from collections.abc import Mapping

from actmat.checkpoints.keys import Keys

_IN_THE_FILE = "given by the stored tensors"
_WHICH_LAYERS = "the stored tensors show which layers were quantized"
_CALIBRATION = "affects only how codes were chosen"
_RUN_TIME = "affects only how the layer is computed"

_LAYERS = ("modules_to_not_convert", "modules_to_convert", "ignored_layers", "ignore", "lm_head", "targets",
           "llm_int8_skip_modules", "block_name_to_quantize", "module_name_preceding_first_block",
           "modules_in_block_to_quantize", "modules_to_fuse")  # fmt: skip
_FITTED = ("dataset", "tokenizer", "damp_percent", "damp_auto_increment", "true_sequential", "act_group_aware", "meta",
           "model_seqlen", "batch_size", "pad_token_id", "cache_block_outputs", "mse", "observer",
           "observer_kwargs")  # fmt: skip
_COMPUTED = ("backend", "max_input_length", "use_exllama", "disable_exllama", "exllama_config", "use_cuda_fp16",
             "do_fuse", "fuse_max_seq_len", "dequantize", "run_compressed", "use_optimized_inference",
             "activation_scheme", "kv_cache_scheme", "input_activations", "output_activations",
             "bnb_4bit_compute_dtype", "llm_int8_threshold", "llm_int8_enable_fp32_cpu_offload")  # fmt: skip
_STORED = ("sym", "desc_act", "static_groups", "group_size", "q_group_size", "zero_point", "pack_dtype", "symmetric",
           "strategy", "dynamic", "actorder", "scale_dtype", "zp_dtype", "scale_fmt", "quantization_status",
           "global_compression_ratio", "version", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant",
           "bnb_4bit_quant_storage", "llm_int8_has_fp16_weight", "load_in_4bit", "load_in_8bit", "_load_in_4bit",
           "_load_in_8bit")  # fmt: skip
_COMMON: Mapping[str, str] = {
    **dict.fromkeys(_LAYERS, _WHICH_LAYERS),
    **dict.fromkeys(_FITTED, _CALIBRATION),
    **dict.fromkeys(_COMPUTED, _RUN_TIME),
    **dict.fromkeys(_STORED, _IN_THE_FILE),
}
_METHOD = ("quant_method", "quant_algo")


def _keys(
    *obeyed: str,
    refused: Mapping[str, str] | None = None,
    inside: Mapping[str, Keys] | None = None,
    values: Mapping[str, tuple[str, ...]] | None = None,
) -> Keys:
    keys = {*obeyed, *(refused or {}), *(inside or {}), *(values or {})}
    irrelevant = {k: why for k, why in _COMMON.items() if k not in keys}
    return Keys(obeyed, irrelevant, refused or {}, inside or {}, values or {})


ROTATED = "weights were rotated before quantization, so that their deltas are in another basis"
PACKINGS = ("gptq", "gptq_v2")
GPTQ_KEYS = _keys(
    *_METHOD,
    "bits",
    refused={
        "is_marlin_format": "codes in the order of a GPU kernel are not supported",
        "rotation": ROTATED,
        "adapter": "EoRA adds a low-rank correction from another file",
    },
    values={"checkpoint_format": PACKINGS, "format": PACKINGS},
)
AWQ_KEYS = _keys(
    *_METHOD, "bits", "w_bit", "checkpoint_format", values={"version": ("gemm",), "format": ("gemm",)}
)  # `checkpoint_format` is a field of GPTQ, on whose config class AWQ's is based
BITSANDBYTES_KEYS = _keys(*_METHOD)
FP8_KEYS = _keys(*_METHOD, "weight_block_size", values={"expert_dtype": ("fp8",)})
MXFP4_KEYS = _keys(*_METHOD)

_FORMATS = ("dense", "fakequant", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized",
            "mixed-precision", "nvfp4-pack-quantized", "mxfp4-pack-quantized")  # fmt: skip
_WEIGHTS = _keys("num_bits", "type", "block_structure")
_SCHEME = _keys(inside={"weights": _WEIGHTS}, values={"format": _FORMATS})
_SPARSITY = ("targets", "ignore", "global_sparsity", "registry_requires_subclass", "sparsity_structure")
COMPRESSED_KEYS = _keys(
    *_METHOD,
    refused={"moe_sparsity_config": "experts were removed, so the remaining ones are renumbered"},
    inside={
        "config_groups": Keys(inside={"*": _SCHEME}),
        "transform_config": Keys(refused={"config_groups": ROTATED}),
        "sparsity_config": Keys(_SPARSITY, values={"format": ("dense",)}),
    },
    values={"format": _FORMATS},
)
