"""Metadata of kohya's trainers and LyCORIS that affect deltas; the rest follows from tensors and their names.

Settings that are in none of the lists are named in the plan. What people look for in a header is merged.

Sources: kohya-ss/sd-scripts (2026), `networks`, `train_network.py`; KohakuBlueleaf/LyCORIS 4.1, `kohya.py`;
Stability-AI/ModelSpec 1.0.1.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from actmat.bounds import parse_json
from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.folder import shown
from actmat.checkpoints.keys import Keys, unknown_note

RECORD = "actmat"
"""Metadata key of the recipe and the inputs of a file that actmat wrote, as JSON."""
MODULE, ARGUMENTS = "ss_network_module", "ss_network_args"

_MODULES = ("lora", "lora_fa", "lora_flux", "lora_sd3", "lora_lumina", "lora_anima", "lora_hunyuan_image", "lora_wan",
            "dylora", "oft", "oft_flux", "control_net_lllite")  # fmt: skip
NETWORKS = Keys(
    irrelevant=dict.fromkeys(
        (*(f"networks.{n}" for n in _MODULES), "lycoris.kohya", "locon.locon_kohya"), "given by the tensors' names"
    )
)
ALGORITHMS = Keys(
    irrelevant=dict.fromkeys(
        ("lora", "locon", "loha", "lokr", "ia3", "dylora", "full", "diag-oft", "boft", "glora", "tlora"),
        "given by the tensors' names",
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
        **dict.fromkeys(_SIZES, "given by the shapes of the tensors"),
        **dict.fromkeys(_WHICH, "given by the modules in the file"),
        **dict.fromkeys(_TRAINING, "affects training only"),
        **dict.fromkeys(_OF_OTHERS, "belongs to unsupported algorithms"),
        "rs_lora": "the file's alpha is divided by the rank anyway",
        "use_scalar": "already multiplied into the factors",
        "bypass_mode": "affects only how the layer is computed",
    },
)


def metadata_notes(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """Notes on unknown trainer settings.

    >>> metadata_notes({"ss_network_module": "networks.lora", "ss_network_args": '{"conv_dim": "4", "curl": "1"}'})
    ('the metadata ss_network_args has unknown fields, which are ignored: curl',)
    """
    arguments = _read_object(metadata.get(ARGUMENTS))
    if arguments is None:
        return (f"the metadata {ARGUMENTS} is not a JSON object, so it is ignored: {shown(metadata[ARGUMENTS])}",)
    algorithm = str(arguments.get("algo") or "lora").lower()
    unknown = [f"algo={name}" for name in ALGORITHMS.unknown({algorithm: True})]
    unknown += SETTINGS.unknown({k: v for k, v in arguments.items() if v not in ("False", "None")})
    networks = NETWORKS.unknown({metadata.get(MODULE) or "networks.lora": True})
    return (
        *unknown_note(f"the metadata {ARGUMENTS}", unknown),
        *(f"the metadata {MODULE} names an unknown trainer module: {shown(n)}" for n in networks),
    )


def _read_object(text: str | None) -> dict[str, Any] | None:
    """A JSON object in metadata, empty for no text; None if it cannot be read."""
    try:
        value = parse_json(text or "{}")
    except ValueError:
        return None
    if value is None:
        return {}
    return value if isinstance(value, dict) else None


_ALPHA = re.compile(r'"(?P<key>\w*alpha)"\s*:\s*"?(?P<value>[\d.]+)')
"""A scale in metadata that are JSON."""


def alpha_notes(metadata: Mapping[str, str], ranks: Collection[int]) -> tuple[str, ...]:
    """Note on a scale in the metadata of a file without `alpha` tensors, which loaders do not obey; may be empty.

    >>> alpha_notes({"lora_alpha": "8"}, [64])[0][:50]
    'the metadata of its header say lora_alpha = 8, and'
    """
    text = json.dumps({k: v for k, v in metadata.items() if k.endswith("alpha")}) + " ".join(metadata.values())
    odd = next((m for m in _ALPHA.finditer(text) if {m["value"].removesuffix(".0")} != set(map(str, ranks))), None)
    if odd is None or not ranks:
        return ()
    return (
        f"the metadata of its header say {odd['key']} = {odd['value']}, and it has no alpha tensors: its scale is "
        f"1 here, as in the loaders of such files. If it was trained with alpha / rank (rank {min(ranks)}), give it "
        "that as its weight (-w)",
    )


_SHARED = ("ss_base_model_version", "ss_sd_model_name", "ss_sd_model_hash", "ss_new_sd_model_hash", "ss_v2",
           "ss_vae_name", "ss_clip_skip", "modelspec.sai_model_spec", "modelspec.architecture",
           "modelspec.implementation", "modelspec.prediction_type", "modelspec.resolution")  # fmt: skip
"""Metadata about the base, kept in a merge if all files agree."""
OF_MODEL = ("ss_base_model_version", "ss_v2", "modelspec.architecture", "modelspec.prediction_type")
"""Those that tell which model an adapter is for."""
_OUTDATED = ("sshs_", "modelspec.hash", "lora_adapter_metadata", "format")
"""Prefixes of keys that are invalid after tensors change: file hashes, scales folded into factors."""


def kept_metadata(sources: Sequence[Mapping[str, str]], tensors: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Metadata of a LoRA file made from others: of one file all that is still valid, of several the common entries.

    >>> kept_metadata([{"sshs_model_hash": "a1", "ss_v2": "False"}, {"ss_v2": "False"}], {})
    {'format': 'pt', 'ss_v2': 'False'}
    """
    first, *others = sources
    if others:
        kept = {k: first[k] for k in _SHARED if k in first and all(o.get(k) == first[k] for o in others)}
        kept |= joint_metadata(sources)
    else:
        kept = {k: v for k, v in first.items() if not k.startswith(_OUTDATED)}
    ranks = {s.shape[0] for n, s in tensors.items() if n.endswith((".lora_down.weight", ".lora_A.weight"))}
    if any(key.startswith("ss_") for key in kept) and ranks:
        kept["ss_network_module"] = kept.get("ss_network_module", "networks.lora")
        kept["ss_network_dim"] = str(ranks.pop()) if len(ranks) == 1 else "Dynamic"
        kept.pop("ss_network_alpha", None)
    return {"format": "pt", **kept}


_TITLE, _NAME, _TAGS = "modelspec.title", "ss_output_name", "ss_tag_frequency"
_JOINED = {_TITLE: " + ", "modelspec.trigger_phrase": ", ", "modelspec.usage_hint": "; ", "modelspec.tags": ","}
"""Texts of several files that are one text of their merge -> what stands between them."""
HASHES = ("sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256")
"""Hashes of a file's tensors, by which people find it."""
_LONGEST, _MOST_TAGS = 2000, 1 << 22
"""Characters of a text, and of the counts of tags, that are read; longer ones are left out."""


def joint_metadata(sources: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """What people look for in the header of a merge: titles, trigger words with their counts, and of what it is made.

    >>> tags = ['{"10_ink": {"inkstyle": 20}}', '{"10_ink": {"inkstyle": 5}, "oil": {"oil": 3}}']
    >>> joint_metadata([{"ss_tag_frequency": text} for text in tags])
    {'ss_tag_frequency': '{"10_ink": {"inkstyle": 25}, "oil": {"oil": 3}}'}
    """
    texts = {k: dict.fromkeys(m[k] for m in sources if 0 < len(m.get(k, "")) <= _LONGEST) for k in (*_JOINED, _NAME)}
    joint = {key: between.join(texts[key]) for key, between in _JOINED.items() if texts[key]}
    if names := texts[_TITLE] or texts[_NAME]:
        joint["modelspec.merged_from"] = ", ".join(names)
    tags: dict[str, Counter[str]] = {}
    for source in sources:
        for folder, counts in _tags_of(source).items():
            tags.setdefault(folder, Counter()).update(counts)
    return joint | ({_TAGS: json.dumps(tags)} if tags else {})


def _tags_of(metadata: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Folder of training images -> its tags with their numbers of images."""
    text = metadata.get(_TAGS, "")
    folders = (_read_object(text) or {}) if len(text) <= _MOST_TAGS else {}
    return {
        folder: {tag: n for tag, n in counts.items() if isinstance(n, int) and 0 < n < 1 << 31}
        for folder, counts in folders.items()
        if isinstance(counts, dict)
    }


DISTILLED = re.compile(
    r"(?<![a-z])(lightning|turbo|lcm|hyper.?sd(?:xl)?|dmd2?|distill(?:ed)?|lightx2v|causvid|accvid|flash.?sd|schnell|"
    r"\d+.?steps?)(?![a-z])"
)
"""Lower-case words in the names of distilled adapters, which replace guidance and most sampling steps."""
_NAMED_IN = ("ss_output_name", "modelspec.title", "modelspec.description", "ss_tag")


def distilled_warning(location: str, metadata: Mapping[str, str]) -> tuple[str, ...]:
    """A warning if an adapter's name or metadata indicate distillation; may be empty.

    >>> distilled_warning("/loras/sdxl_lightning_4step.safetensors", {})[0][:44]
    "is called 'lightning', as distilled adapters"
    """
    texts = [PurePath(location).name, *(str(metadata.get(key, "")) for key in _NAMED_IN)]
    word = next((m[1] for text in texts if (m := DISTILLED.search(text.lower())) is not None), None)
    if word is None:
        return ()
    return (
        f"is called '{word}', as distilled adapters are, which replace guidance and most sampling steps. "
        "They work at full weight only: scaled, or merged by a method that cuts or rotates deltas, one may fail. Fix: "
        "load it alongside the merge of the others, or add it unchanged (-m task_arithmetic -o scaling=1)",
    )
