"""Metadata of kohya's trainers and LyCORIS: what of it matters for the deltas. Tensors and their names say the rest.

A setting that is in no list is named in the plan.

Sources: kohya-ss/sd-scripts (2026), `networks`; KohakuBlueleaf/LyCORIS 4.1, `kohya.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from actmat.checkpoints.folder import shown
from actmat.checkpoints.keys import Keys, unknown_note

MODULE, ARGUMENTS = "ss_network_module", "ss_network_args"

_MODULES = ("lora", "lora_fa", "lora_flux", "lora_sd3", "lora_lumina", "lora_anima", "lora_hunyuan_image", "lora_wan",
            "dylora", "oft", "oft_flux", "control_net_lllite")  # fmt: skip
NETWORKS = Keys(
    irrelevant=dict.fromkeys(
        (*(f"networks.{n}" for n in _MODULES), "lycoris.kohya", "locon.locon_kohya"), "the tensors' names say it"
    )
)
ALGORITHMS = Keys(
    irrelevant=dict.fromkeys(
        ("lora", "locon", "loha", "lokr", "ia3", "dylora", "full", "diag-oft", "boft", "glora", "tlora"),
        "the tensors' names say it",
    )
)

_SIZES = ("conv_dim", "conv_alpha", "block_dims", "block_alphas", "conv_block_dims", "conv_block_alphas", "unit",
          "in_dims", "emb_dims", "embedder_dims", "network_reg_dims", "attn_dim", "mlp_dim", "mod_dim", "single_dim",
          "single_mod_dim", "refiner_dim", "context_attn_dim", "context_mlp_dim", "context_mod_dim", "x_attn_dim",
          "x_mlp_dim", "x_mod_dim", "img_attn_dim", "img_mlp_dim", "img_mod_dim", "txt_attn_dim", "txt_mlp_dim",
          "txt_mod_dim", "factor", "decompose_both", "full_matrix", "unbalanced_factorization", "use_tucker", "use_cp",
          "use_conv_cp", "disable_conv_cp", "dora_wd", "wd_on_output", "block_size")  # fmt: skip
_WHICH = ("preset", "train_norm", "train_t5xxl", "train_llm_adapter", "train_blocks", "train_block_indices",
          "train_double_block_indices", "train_single_block_indices", "split_qkv", "enable_conv", "enable_all_linear",
          "include_patterns", "exclude_patterns")  # fmt: skip
_TRAINING = ("dropout", "rank_dropout", "module_dropout", "rank_dropout_scale", "verbose", "loraplus_lr_ratio",
             "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio", "down_lr_weight", "mid_lr_weight",
             "up_lr_weight", "block_lr_zero_threshold", "network_reg_lrs", "ggpo_beta", "ggpo_sigma")  # fmt: skip
_OF_OTHERS = ("constraint", "constrain", "rescaled", "sig_type", "use_data_init", "mask_group_id")
SETTINGS = Keys(
    obeyed=("algo",),
    irrelevant={
        **dict.fromkeys(_SIZES, "the shapes of the tensors say it"),
        **dict.fromkeys(_WHICH, "the file holds the modules that were adapted"),
        **dict.fromkeys(_TRAINING, "acts in training only"),
        **dict.fromkeys(_OF_OTHERS, "of algorithms whose tensors are not read"),
        "rs_lora": "the alpha of the file is divided by the rank all the same",
        "use_scalar": "the factors of the file are multiplied by it",
        "bypass_mode": "how it is computed",
    },
)


def metadata_notes(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """Remarks on settings of a trainer that are not known here.

    >>> metadata_notes({"ss_network_module": "networks.lora", "ss_network_args": '{"conv_dim": "4", "curl": "1"}'})
    ('the metadata ss_network_args has fields that are not known here and are not obeyed: curl',)
    """
    arguments = _arguments(metadata.get(ARGUMENTS))
    if arguments is None:
        return (f"the metadata {ARGUMENTS} is no JSON object, and is not obeyed: {shown(metadata[ARGUMENTS])}",)
    algorithm = str(arguments.get("algo") or "lora").lower()
    unknown = [f"algo={name}" for name in ALGORITHMS.sort({algorithm: True}).unknown]
    unknown += SETTINGS.sort({k: v for k, v in arguments.items() if v not in ("False", "None")}).unknown
    networks = NETWORKS.sort({metadata.get(MODULE) or "networks.lora": True}).unknown
    return (
        *unknown_note(f"the metadata {ARGUMENTS}", unknown),
        *(f"the metadata {MODULE} names a trainer's module that is not known here: {shown(n)}" for n in networks),
    )


def _arguments(text: str | None) -> dict[str, Any] | None:
    """Settings of the network; None where they cannot be read."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    if found is None:
        return {}
    return found if isinstance(found, dict) else None
