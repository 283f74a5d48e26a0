"""Architectures of mixtures: tensor names, config.json entries, and supported dense models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from actmat.errors import CheckpointError
from actmat.extras.mergekit.mixtures.config import RANDOM, Mixture

DENSE: Mapping[str, Mapping[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "mistral": {"rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "num_key_value_heads": 8},
    "qwen2": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
"""Model type -> transformers defaults that a config may omit and that differ for the mixture's type."""
ROPE_THETA = 10000.0
"""Default for all types in `DENSE`."""
HUB_CODE = "deepseek-ai/deepseek-moe-16b-base"
"""Repository with the code of DeepSeek's first mixture, which transformers lacks."""


@dataclass(frozen=True)
class MixtureArchitecture:
    """One architecture of the output.

    Args:
        name: mergekit's name.
        inputs: supported model types; all models must have the same type.
        model_type, model_class: fields of the output's config.
        block: layer module with router and experts.
        projections: an expert's projections, by their names in the dense model.
        shared: module of the shared expert; may be empty.
        gated: whether a shared expert is required and has a gate.
        biases: attention modules that may have a bias.
        entries: further entries of config.json.
    """

    name: str
    inputs: tuple[str, ...]
    model_type: str
    model_class: str
    block: str = "mlp"
    projections: Mapping[str, str] = field(
        default_factory=lambda: {n: n for n in ("gate_proj", "up_proj", "down_proj")}
    )
    shared: str = ""
    gated: bool = False
    biases: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    entries: Mapping[str, Any] = field(default_factory=dict)

    def objection(self, mixture: Mixture, types: set[str]) -> str:
        """Reason why a mixture's models do not fit; may be empty."""
        found = ", ".join(sorted(types))
        if len(types) > 1 or not types <= set(self.inputs):
            return f"is made of {' or '.join(self.inputs)} models, all of one type; found {found}"
        if mixture.shared and not self.shared:
            return "has no shared expert"
        if self.gated and not mixture.shared:
            return "needs one shared expert ('shared_experts')"
        if self.gated and mixture.gate_mode not in RANDOM and not all(e.positive for e in mixture.shared):
            return "needs 'positive_prompts' of the shared expert, for its gate"
        has_prompts = any(e.positive or e.negative for e in mixture.shared)
        return "has no gate for the shared expert: remove its prompts" if has_prompts and not self.gated else ""

    def config(self, base: Mapping[str, Any], mixture: Mixture) -> dict[str, Any]:
        """config.json of the output."""
        heads = base.get("num_attention_heads")
        out = {"num_key_value_heads": heads, **DENSE[str(base["model_type"])], **base}
        if not out.get("rope_parameters"):
            out.setdefault("rope_theta", ROPE_THETA)
        out |= {"architectures": [self.model_class], "model_type": self.model_type}
        out |= {"num_experts_per_tok": mixture.per_token, **self.entries}
        out[{"mixtral": "num_local_experts", "deepseek": "n_routed_experts"}.get(self.model_type, "num_experts")] = len(
            mixture.experts
        )
        if self.model_type != "mixtral":
            out["moe_intermediate_size"] = base.get("intermediate_size")
        if self.model_type == "qwen2_moe":
            out["shared_expert_intermediate_size"] = base.get("intermediate_size")
        if self.model_type == "deepseek":
            out["n_shared_experts"] = len(mixture.shared) or None
        if "sliding_window" in self.entries:
            out.pop("layer_types", None)
        return out


_TOPK: Mapping[str, Any] = {"norm_topk_prob": True, "decoder_sparse_step": 1}
ARCHITECTURES = (
    MixtureArchitecture(
        "Mixtral",
        ("llama", "mistral"),
        "mixtral",
        "MixtralForCausalLM",
        "block_sparse_moe",
        {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
        biases=(),
        entries={"sliding_window": None},
    ),
    MixtureArchitecture(
        "DeepSeek MoE",
        ("llama", "mistral"),
        "deepseek",
        "DeepseekForCausalLM",
        shared="shared_experts",
        entries={
            "norm_topk_prob": True,
            "first_k_dense_replace": 0,
            "moe_layer_freq": 1,
            "scoring_func": "softmax",
            "auto_map": {
                "AutoConfig": f"{HUB_CODE}--configuration_deepseek.DeepseekConfig",
                "AutoModel": f"{HUB_CODE}--modeling_deepseek.DeepseekModel",
                "AutoModelForCausalLM": f"{HUB_CODE}--modeling_deepseek.DeepseekForCausalLM",
            },
        },
    ),
    MixtureArchitecture(
        "Qwen MoE",
        ("llama", "mistral", "qwen2"),
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        shared="shared_expert",
        gated=True,
        biases=("q_proj", "k_proj", "v_proj"),
        entries={**_TOPK, "sliding_window": None, "use_sliding_window": False},
    ),
    MixtureArchitecture("Qwen3 MoE", ("qwen3",), "qwen3_moe", "Qwen3MoeForCausalLM", entries=_TOPK),
)


def choose(mixture: Mixture, types: set[str]) -> MixtureArchitecture:
    """Choose the first architecture, beginning with Mixtral, that supports these model types.

    Raises:
        CheckpointError: no architecture fits; gives the reason for each.
    """
    wanted = (mixture.architecture or "").lower()
    named = [a for a in ARCHITECTURES if a.name.lower().startswith(wanted)]
    if not named:
        known = ", ".join(a.name for a in ARCHITECTURES)
        raise CheckpointError(
            f"'architecture: {mixture.architecture}': expected one of {known} (or the beginning of a name)"
        )
    objections = {a.name: a.objection(mixture, types) for a in named}
    chosen = next((a for a in named if not objections[a.name]), None)
    if chosen is None:
        raise CheckpointError(
            "No mixture of experts supports these models.", [f"{n} {why}" for n, why in objections.items()]
        )
    return chosen
