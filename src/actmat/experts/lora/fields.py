"""Every field of `adapter_config.json` of LoRA: obeyed, known not to matter, or refused.

A field that is in no list, and is set, is named in the plan; in an adapter of stacked experts it is an error, since
such fields have changed what their factors mean.

Source: PEFT (https://github.com/huggingface/peft), `LoraConfig` of 0.2 to 0.21; Unsloth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from actmat.checkpoints.keys import Keys

StackWord = Literal["e_i_o", "e_o_i", "rank_major", "grouped_by_expert"]
"""Words of a user about stacked experts: the axes of a stack as PEFT took them, and the order of B's columns."""
AXES: tuple[StackWord, ...] = ("e_i_o", "e_o_i")
ORDERS: tuple[StackWord, ...] = ("rank_major", "grouped_by_expert")

OBEYED = frozenset(
    {
        *("peft_type", "peft_version", "base_model_name_or_path", "auto_mapping"),
        *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out"),
        *("target_modules", "target_parameters", "bias", "init_lora_weights"),
        *("lora_B_layout", "unsloth_fused_expert_lora", "ensure_weight_tying"),
    }
)

OF_EVERY_FAMILY: Mapping[str, str] = {
    "task_type": "the class of the loaded model",
    "revision": "of the base",
    "inference_mode": "whether factors are trained",
    "exclude_modules": "the file may hold no factors of these modules (`targets`)",
    "layers_to_transform": "the file may hold no factors of modules in other layers (`targets`)",
    "layers_pattern": "of layers_to_transform",
    "modules_to_save": "the file holds the tensors that were trained in full",
}
"""Fields that no delta depends on, in whichever config of PEFT they are."""

IRRELEVANT: Mapping[str, str] = {
    **OF_EVERY_FAMILY,
    "lora_bias": "the file holds the biases",
    "lora_dropout": "acts in training only",
    "eva_config": "how A began",
    "loftq_config": "initial values of factors and base; init_lora_weights tells if it was used",
    "corda_config": "initial values of factors and base; init_lora_weights tells if it was used",
    "lora_ga_config": "initial values of factors and base; init_lora_weights tells if it was used",
    "qalora_group_size": "of use_qalora",
    "megatron_core": "of megatron_config",
    "runtime_config": "where it is computed",
    "merge_weights": "of PEFT 0.2: when it merged",
}
"""Field -> the reason why no delta depends on it."""

REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA normalizes W_0 + B A, so that its delta depends on the base and is not low rank",
    "alora_invocation_tokens": "activated LoRA applies its delta to some tokens only; no weight equals it",
    "use_qalora": "QA-LoRA pools the inputs of a quantized base",
    "use_bdlora": "block-diagonal LoRA has another shape of factors",
    "arrow_config": "Arrow routes between adapters at run time",
    "velora_config": "VeLoRA is not read",
    "kasa_config": "KaSA is not read",
    "monteclora_config": "MonteCLoRA draws its weights at run time",
    "layer_replication": "layer replication gives one base layer several deltas",
    "trainable_token_indices": "trainable tokens replace rows of the embedding",
    "megatron_config": "Megatron's parallel layers are not read",
    "enable_lora": "the merged projections of PEFT 0.2 have another shape of factors",
}
"""Field -> the reason why an adapter that sets it has no plain low-rank delta."""

LORA = Keys(OBEYED, IRRELEVANT, REFUSED)
