"""Options of PEFT's adapters that change what is merged; imported by every version of PEFT."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.semantics.families import FAMILIES, Family

EXACT = 1e-12
"""Largest relative Frobenius error of a tensor in float64: some thousand roundings."""
OF_FLOAT32 = 1e-5
"""The same where PEFT rounds a decomposition of the base, or a setting, to float32."""


@dataclass(frozen=True)
class Option:
    """One option, and how an adapter with it is made.

    Args:
        fields: of the config, for a family; None where it does not apply.
        config: name of PEFT's config.
        of: families that it is tried on; empty: all.
        scale: of the random numbers that are added to all that is trained.
        bound: largest relative error.
        start: what else happens before training: `eva`, `corda`, or `convert` (save as plain LoRA).
        dtype: of the base; float32 where PEFT takes no other.
    """

    fields: Callable[[Family], dict[str, Any] | None]
    config: str = "LoraConfig"
    of: tuple[str, ...] = ()
    scale: float = 0.3
    bound: float = EXACT
    start: str = ""
    dtype: str = "float64"


def _lora(**fields: Any) -> Callable[[Family], dict[str, Any]]:
    """Plain LoRA with more fields."""
    return lambda f: {"r": 2, "lora_alpha": 6, "target_modules": list(f.modules)} | fields


def _where(part: str, fields: Callable[[Family], dict[str, Any]]) -> Callable[[Family], dict[str, Any] | None]:
    """The fields for families that have this part."""
    return lambda f: fields(f) if getattr(f, part) else None


def _of(config: str, **fields: Any) -> Option:
    """A tuner of another type on the same layers."""
    return Option(lambda f: {"target_modules": list(f.modules)} | fields, config)


def _patterns(f: Family) -> dict[str, Any]:
    first, last = f.modules[0].replace("|", "$|"), f.modules[-1]
    return {"rank_pattern": {first: 3, rf".*\.1\..*({last})": 5}}


def _saved(*parts: str, **fields: Any) -> Callable[[Family], dict[str, Any] | None]:
    """Plain LoRA with parts of the model trained in full."""

    def found(f: Family) -> dict[str, Any] | None:
        names = [getattr(f, p) for p in parts]
        return {**_lora(**fields)(f), "modules_to_save": names} if all(names) else None

    return found


def _targets(*parts: str, **fields: Any) -> Callable[[Family], dict[str, Any] | None]:
    """LoRA on parts of the model as well."""

    def found(f: Family) -> dict[str, Any] | None:
        names = [getattr(f, p) for p in parts]
        return _lora(**fields)(f) | {"target_modules": [*f.modules, *names]} if all(names) else None

    return found


def _ia3(f: Family) -> dict[str, Any]:
    return {"target_modules": list(f.modules), "feedforward_modules": [f.modules[-1]]}


def _stacks(names: int, **fields: Any) -> Callable[[Family], dict[str, Any] | None]:
    return _where("stacks", lambda f: _lora(target_parameters=list(f.stacks[-names:]), **fields)(f))


def _turned(fields: Callable[[Family], dict[str, Any]]) -> Callable[[Family], dict[str, Any] | None]:
    """The fields for families with transposed layers."""
    return _where("is_transposed", lambda f: fields(f) | {"fan_in_fan_out": True})


def _started(kind: str, change: Callable[[Any], Any] = lambda fields: fields) -> Option:
    """LoRA whose factors, and base, begin from a decomposition in float32."""
    return Option(change(_lora(init_lora_weights=kind)), bound=OF_FLOAT32, dtype="float32")


_SOME = ("llama", "gpt2, tied", "qwen2, tied", "mixtral", "t5, tied", "qwen2_vl")
_DECODERS = ("llama", "qwen2, tied", "phi3, packed", "gpt2, tied", "gpt_neox, packed", "qwen3_moe")
_ONE = ("llama",)

OPTIONS: dict[str, Option] = {
    "plain": Option(_lora()),
    "use_rslora": Option(_lora(use_rslora=True)),
    "rank_pattern": Option(lambda f: _lora()(f) | _patterns(f)),
    "alpha_pattern": Option(lambda f: _lora(alpha_pattern={f.modules[0].replace("|", "$|"): 5})(f)),
    "rank_pattern, alpha_pattern, use_rslora": Option(
        lambda f: _lora(use_rslora=True, alpha_pattern={f.modules[-1]: -3.5})(f) | _patterns(f)
    ),
    "lora_alpha=7.3": Option(_lora(lora_alpha=7.3)),
    "lora_alpha=-4": Option(_lora(lora_alpha=-4)),
    "bias=all": Option(_lora(bias="all")),
    "bias=lora_only": Option(_lora(bias="lora_only")),
    "lora_bias": Option(_lora(lora_bias=True)),
    "layers_to_transform": Option(_lora(layers_to_transform=[0])),
    "layers_to_transform, layers_pattern": Option(lambda f: _lora(layers_to_transform=[0], layers_pattern=f.layers)(f)),
    "exclude_modules": Option(lambda f: _lora(exclude_modules=rf".*\.0\..*({f.modules[0]})")(f)),
    "target_modules=all-linear": Option(_lora(target_modules="all-linear")),
    "target_modules as a pattern": Option(
        lambda f: _lora(target_modules=rf".*\.(0|1)\..*({f.modules[0]}|{f.modules[-1]})")(f)
    ),
    "fan_in_fan_out": Option(_turned(_lora())),
    "convolutions": Option(_where("convolutions", lambda f: _lora(target_modules=[*f.modules, *f.convolutions])(f))),
    "use_dora": Option(_lora(use_dora=True)),
    "use_dora, use_rslora, patterns": Option(lambda f: _lora(use_dora=True, use_rslora=True)(f) | _patterns(f)),
    "use_dora, fan_in_fan_out": Option(_turned(_lora(use_dora=True))),
    "use_dora on the table": Option(_targets("table", use_dora=True)),
    "use_dora, lora_bias": Option(_lora(use_dora=True, lora_bias=True), of=_SOME),
    "use_dora, modules_to_save=head": Option(_saved("head", use_dora=True), of=_SOME),
    "modules_to_save=head": Option(_saved("head")),
    "modules_to_save=table": Option(_saved("table")),
    "modules_to_save=table, head": Option(_saved("table", "head")),
    "modules_to_save=table, ensure_weight_tying": Option(_saved("table", ensure_weight_tying=True)),
    "modules_to_save=head, ensure_weight_tying": Option(_saved("head", ensure_weight_tying=True)),
    "LoRA on the table": Option(_targets("table")),
    "LoRA on the head": Option(_targets("head")),
    "LoRA on the table and the head": Option(_targets("table", "head")),
    "LoRA on the table, ensure_weight_tying": Option(_targets("table", ensure_weight_tying=True)),
    "LoRA on the head, ensure_weight_tying": Option(_targets("head", ensure_weight_tying=True)),
    "trainable_token_indices": Option(
        _where("table", lambda f: _lora(trainable_token_indices={f.table: [3, 0, 17]})(f))
    ),
    "trainable_token_indices as a list": Option(_lora(trainable_token_indices=[3, 0, 17]), of=_DECODERS),
    "trainable_token_indices, ensure_weight_tying": Option(
        _where("table", lambda f: _lora(trainable_token_indices={f.table: [3, 0, 17]}, ensure_weight_tying=True)(f))
    ),
    "trainable_token_indices, modules_to_save=head": Option(
        _where("table", lambda f: (_saved("head")(f) or {}) | {"trainable_token_indices": {f.table: [3, 0, 17]}}),
        of=_DECODERS,
    ),
    "target_parameters": Option(_stacks(2)),
    "target_parameters, one": Option(_stacks(1)),
    "target_parameters, r=1": Option(_stacks(2, r=1)),
    "target_parameters only": Option(_stacks(2, target_modules=[])),
    "target_parameters, patterns": Option(
        _stacks(2, rank_pattern={"experts.down_proj": 3}, alpha_pattern={"experts.gate_up_proj": 5})
    ),
    "target_parameters=weight of a layer": Option(
        lambda f: _lora(target_modules=[], target_parameters=[f"{f.modules[0]}.weight"])(f), of=_SOME
    ),
    "init_lora_weights=gaussian": Option(_lora(init_lora_weights="gaussian")),
    "init_lora_weights=false": Option(_lora(init_lora_weights=False)),
    "init_lora_weights=orthogonal": Option(_lora(init_lora_weights="orthogonal")),
    "init_lora_weights=pissa": _started("pissa"),
    "init_lora_weights=pissa, fan_in_fan_out": _started("pissa", _turned),
    "init_lora_weights=pissa, saved as LoRA": replace(_started("pissa"), start="convert"),
    "init_lora_weights=pissa_niter_4": replace(_started("pissa_niter_4"), of=_SOME),
    "init_lora_weights=olora": _started("olora"),
    "init_lora_weights=olora, fan_in_fan_out": _started("olora", _turned),
    "init_lora_weights=olora, saved as LoRA": replace(_started("olora"), start="convert"),
    "init_lora_weights=eva": replace(_started("eva"), of=_DECODERS, start="eva"),
    "init_lora_weights=corda": replace(_started("corda"), of=_DECODERS, start="corda"),
    "init_lora_weights=corda, saved as LoRA": replace(_started("corda"), of=_DECODERS, start="corda, convert"),
    "init_lora_weights=loftq": Option(
        _lora(init_lora_weights="loftq", loftq_config={"loftq_bits": 4, "loftq_iter": 1}), of=_SOME, dtype="float32"
    ),
    "init_lora_weights=lora_ga": replace(_started("lora_ga"), of=_ONE),
    "alora_invocation_tokens": Option(_lora(alora_invocation_tokens=[1, 2], task_type="CAUSAL_LM"), of=_ONE),
    "use_qalora": Option(_lora(use_qalora=True, qalora_group_size=4), of=_ONE),
    "layer_replication": Option(_lora(layer_replication=[[0, 2], [1, 2]]), of=_ONE),
    "use_bdlora": Option(
        _lora(use_bdlora={"target_modules_bd_a": ["q_proj"], "nblocks": 2, "match_strict": False}), of=_ONE
    ),
    "velora_config": Option(_lora(velora_config={}), of=_ONE),
    "kasa_config": Option(_lora(kasa_config={}), of=_ONE),
    "monteclora_config": Option(_lora(monteclora_config={}), of=_ONE),
    # the scales of LoHa are exact in float32, to which PEFT rounds them
    "LoHa": _of("LoHaConfig", r=2, alpha=5),
    "LoHa, patterns": replace(
        _of("LoHaConfig", r=2, alpha=5, rank_pattern={"q_proj": 4}, alpha_pattern={"v_proj": 7}), of=_SOME
    ),
    "LoKr": _of("LoKrConfig", r=2, alpha=5),
    "LoKr, decompose_both": _of("LoKrConfig", r=1, alpha=5, decompose_both=True, decompose_factor=4),
    "(IA)^3": Option(_ia3, "IA3Config"),
    "(IA)^3, fan_in_fan_out": Option(_turned(_ia3), "IA3Config"),
    "VeRA": _of("VeraConfig", r=2),
    "VeRA, save_projection=false": replace(_of("VeraConfig", r=2, save_projection=False), of=_SOME),
    "AdaLoRA": _of("AdaLoraConfig", init_r=3, lora_alpha=5, total_step=10),
    "OFT": replace(_of("OFTConfig", oft_block_size=4, use_cayley_neumann=False), scale=0.05),
    "OFT, Cayley-Neumann": replace(_of("OFTConfig", oft_block_size=4, use_cayley_neumann=True), scale=0.05),
    "OFT, block_share": replace(_of("OFTConfig", oft_block_size=4, block_share=True), scale=0.05, of=_SOME),
    "OFT, coft": replace(
        _of("OFTConfig", oft_block_size=4, coft=True, eps=0.1, use_cayley_neumann=False), bound=OF_FLOAT32, of=_SOME
    ),
    "trained tokens": Option(
        _where("table", lambda f: {"target_modules": [f.table], "token_indices": [3, 0, 17]}), "TrainableTokensConfig"
    ),
}

_UNREAD: dict[str, dict[str, Any]] = {
    "BOFTConfig": {"boft_block_size": 4},
    "HRAConfig": {"r": 2},
    "FourierFTConfig": {"n_frequency": 10},
    "VBLoRAConfig": {"r": 2, "num_vectors": 8, "vector_length": 4, "topk": 2},
    "RandLoraConfig": {"r": 2},
    "MissConfig": {"r": 2},
    "BoneConfig": {"r": 2},
    "ShiraConfig": {"r": 2},
    "C3AConfig": {"block_size": 4},
    "DeloraConfig": {"r": 2},
    "RoadConfig": {"group_size": 4},
    "WaveFTConfig": {"n_frequency": 10},
    "GraloraConfig": {"r": 4, "gralora_k": 2},
    "LNTuningConfig": {"target_modules": ["norm"]},
}
OPTIONS |= {name: replace(_of(name, **fields), of=_ONE) for name, fields in _UNREAD.items()}


def cases() -> list[tuple[str, str]]:
    """Every family with every option that applies to it."""
    return [
        (family, name)
        for family, f in FAMILIES.items()
        for name, option in OPTIONS.items()
        if (not option.of or family in option.of) and option.fields(f) is not None
    ]
