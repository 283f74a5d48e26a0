"""Configs of inputs: what changes the function must agree, as the classes of transformers and diffusers read it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoint_files import edit_json
from tests.helpers.merging import CONFIG, actmat, llama_tensors, save_checkpoint
from tests.helpers.tinymodels import made

from actmat.identity.configs import InputAgreement, agree_configs
from actmat.identity.entries import is_harmless

pytestmark = pytest.mark.usefixtures("configs_read_here")
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
SMALL = LLAMA | {"intermediate_size": 96, "num_key_value_heads": 4}
YARN = {"rope_type": "yarn", "factor": 4.0}
QWEN = {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
GEMMA3 = {"model_type": "gemma3_text", "num_hidden_layers": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
UNET = {"_class_name": "UNet2DConditionModel", "cross_attention_dim": 768}
VISION = {"model_type": "siglip_vision_model"}
BIDIRECTIONAL = {"AutoConfig": "configuration_encoder.Config", "AutoModel": "modeling_encoder.LlamaEncoderModel"}


PROBLEMS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    (LLAMA, {"rope_theta": 1e6}, ["rope_theta (base 10000.0; 'one' 1000000.0)"]),
    (LLAMA | {"rope_theta": 5e5}, {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}}, []),
    (LLAMA | {"rope_scaling": None}, {"rope_scaling": YARN}, ["rope_type", "factor"]),
    (LLAMA | {"rope_scaling": YARN}, {"rope_scaling": None, "rope_parameters": YARN | {"rope_theta": 1e4}}, []),
    (LLAMA | {"rope_scaling": {"type": "linear", "factor": 2}}, {"rope_scaling": {"type": "linear", "factor": 4}},
     ["factor (base 2; 'one' 4)"]),
    (LLAMA | {"rope_scaling": {"type": "su", "factor": 2}},
     {"rope_scaling": {"rope_type": "longrope", "factor": 2}}, []),
    ({"model_type": "qwen2"}, {"use_sliding_window": True}, ["layer_types"]),
    (LLAMA | {"rms_norm_eps": 1e-6}, {"rms_norm_eps": 9.99999997e-7}, []),
    (LLAMA | {"hidden_act": "silu"}, {"hidden_act": "swish"}, []),
    (LLAMA, {"num_key_value_heads": 4, "head_dim": 16, "attention_bias": False}, []),
    (LLAMA, {"num_attention_heads": 8}, ["num_attention_heads", "head_dim"]),
    (LLAMA, {"attention_dropout": 0.1, "eos_token_id": 7, "use_cache": False, "transformers_version": "4.0",
             "torch_dtype": "float16", "vocab_size": 9, "_name_or_path": "x", "initializer_range": 1.0}, []),
    (QWEN, {"sliding_window": 32768, "max_window_layers": 21}, []),
    (QWEN, {"use_sliding_window": True, "num_hidden_layers": 32}, ["layer_types"]),
    ({"model_type": "mistral", "sliding_window": 4096}, {"sliding_window": None}, ["sliding_window"]),
    ({"model_type": "mixtral"}, {"num_experts_per_tok": 1}, ["num_experts_per_tok"]),
    ({"model_type": "phi"}, {"partial_rotary_factor": 0.25}, ["partial_rotary_factor"]),
    (GEMMA3 | {"sliding_window_pattern": 6}, {"sliding_window_pattern": None, "rope_theta": None,
     "rope_local_base_freq": None, "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
     "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}, []),
    (GEMMA3, {"rope_local_base_freq": 2e4}, ["rope_parameters.sliding_attention.rope_theta (base 10000.0;"]),
    ({"model_type": "gpt2", "n_head": 12}, {"num_attention_heads": 6, "n_head": 6}, ["n_head"]),
    ({"model_type": "llava", "text_config": LLAMA, "vision_config": VISION},
     {"text_config": LLAMA | {"rope_theta": 9.0}}, ["text_config.rope_parameters.rope_theta"]),
    ({"model_type": "llava", "text_config": LLAMA, "vision_config": VISION},
     {"vision_config": VISION | {"layer_norm_eps": 1.0}}, ["vision_config.layer_norm_eps"]),
    ({"model_type": "tapas"}, {"temperature": 0.5}, ["temperature (base 1.0; 'one' 0.5)"]),
    ({"model_type": "phimoe"}, {"router_jitter_noise": 0.5}, ["router_jitter_noise"]),
    ({"model_type": "mixtral"}, {"router_jitter_noise": 0.5, "temperature": 0.5}, []),
    ({"model_type": "esm", "token_dropout": True}, {"token_dropout": False}, ["token_dropout"]),
    ({"model_type": "gemma4_audio"}, {"residual_weight": 1.0}, ["residual_weight"]),
    (LLAMA | {"architectures": ["LlamaForCausalLM"]}, {"architectures": ["LlamaBiForMNTP"]},
     ["architectures (base Llama*; 'one' LlamaBi*)"]),
    (LLAMA | {"architectures": ["LlamaForCausalLM"]}, {"architectures": ["NVEmbedModel"]}, ["architectures"]),
    (LLAMA | {"architectures": ["LlamaForCausalLM"]}, {"architectures": ["LlamaForSequenceClassification"]}, []),
    (LLAMA, {"architectures": ["LlamaBiModel"]}, []),
    (UNET, {"cross_attention_dim": 1024}, ["cross_attention_dim"]),
    (UNET, {"norm_eps": 1e-3, "dropout": 0.5, "_diffusers_version": "0.1"}, ["norm_eps"]),
    (LLAMA, {"model_type": "mistral", "rms_norm_eps": 0.5}, ["rms_norm_eps (base 1e-06; 'one' 0.5)"]),
    ({"model_type": "own", "rope_theta": 1e4}, {"rope_theta": 1e6}, ["rope_theta"]),
    ({"model_type": "own"}, {"rope_theta": 1e6}, ["rope_parameters (base absent; 'one' {'partial"]),
    ({"model_type": "own", "window": 3}, {"window": None, "sliding_window": None}, []),
    ({"model_type": "own", "sliding_window": 3}, {"sliding_window": None}, ["sliding_window (base 3; 'one' None)"]),
    ({"model_type": "own", "my_width": 3}, {"my_width": 4}, ["my_width (base 3; 'one' 4). Cause: no installed"]),
]  # fmt: skip
"""Config of the base, entries that the expert has in their place (None: left out), and words of the problem."""
NOTES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {"max_position_embeddings": 9999}, "max_position_embeddings (base 2048; 'one' 9999)"),
    (
        LLAMA | {"odd": {"deep": 1}},
        {"odd": {"deep": 2}},
        "effect is not known, differ, and are written as the experts agree: odd.deep",
    ),
    (
        {"model_type": "llava", "audio_config": {"a": 1}},
        {"audio_config": None},
        "audio_config (base {'a': 1}; 'one' absent)",
    ),
    (LLAMA, {"odd_key": 3}, "as the experts agree: odd_key (base absent; 'one' 3)"),
    (LLAMA, {"problem_type": "multi_label_classification"}, "written as the experts agree: problem_type"),
    (LLAMA | {"repetition_penalty": 1.0}, {"repetition_penalty": 1.3}, "repetition_penalty (base 1.0; 'one' 1.3)"),
    ({"model_type": "own"}, {"my_width": 4}, "my_width (base absent; 'one' 4)"),
    (SMALL, {"model_type": "mistral"}, "model_type (base llama; 'one' mistral)"),
    (SMALL, {"model_type": "mistral", "sliding_window": 9}, "sliding_window (base absent; 'one' 9)"),
    (LLAMA | {"odd": 5}, {"model_type": "own", "odd": None}, "odd (base 5; 'one' absent)"),
    (LLAMA | {"eos_token_id": 2}, {"eos_token_id": [2, 7]}, "eos_token_id (base 2; 'one' [2, 7])"),
    (
        {"model_type": "llava", "image_token_index": 5},
        {"image_token_index": 6},
        "image_token_index (base 5; 'one' 6)",
    ),
    (LLAMA, {"auto_map": BIDIRECTIONAL}, "auto_map (base absent; 'one' modeling_encoder.py)"),
    (LLAMA | {"auto_map": {"AutoModel": "modeling_a.A"}}, {"auto_map": BIDIRECTIONAL}, "modeling_encoder.py)"),
    ({"hidden_size": 8}, {"model_type": "bert"}, "written as the experts agree: model_type (base absent; 'one' bert)"),
]
"""The same for notes."""


def changed(base: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in {**base, **entries}.items() if v is not None or k == "sliding_window"}


@pytest.mark.parametrize(("base", "entries", "named"), PROBLEMS)
def test_what_changes_the_function_is_a_problem(
    base: dict[str, Any], entries: dict[str, Any], named: list[str]
) -> None:
    found = agree_configs(base, [("one", changed(base, entries))])
    assert len(found.problems) == bool(named), found
    assert all(name in found.problems[0] for name in named), found
    assert not agree_configs(base, [("one", base), ("adapter", None)]).problems


@pytest.mark.parametrize(("base", "entries", "words"), NOTES)
def test_what_may_change_the_function_is_a_note(base: dict[str, Any], entries: dict[str, Any], words: str) -> None:
    found = agree_configs(base, [("one", changed(base, entries))])
    assert not found.problems
    assert words in " ".join(found.notes)


OTHER_STEMS = {"JevForDecision", "ShieldGemma2ForImageClassification"}
"""Classes of a model type with the name of another family."""


def test_classes_of_one_model_type_differ_by_their_heads_only() -> None:
    """All classes by which transformers loads a model type, none of which is the first one's other function."""
    modeling = pytest.importorskip("transformers.models.auto.modeling_auto")
    by_type: dict[str, set[str]] = {}
    for name, mapping in vars(modeling).items():
        for kind, classes in mapping.items() if name.endswith("_MAPPING_NAMES") and "CONFIG" not in name else ():
            by_type.setdefault(kind, set()).update([classes] if isinstance(classes, str) else classes)
    assert sum(map(len, by_type.values())) > 1400
    for kind, classes in by_type.items():
        configs = {name: {"model_type": kind, "architectures": [name]} for name in sorted(classes - OTHER_STEMS)}
        assert agree_configs(next(iter(configs.values()), {}), list(configs.items())) == InputAgreement(), kind


@pytest.mark.parametrize(
    ("base", "one"),
    [
        ({"AutoModel": "modeling_a.A"}, {"AutoModelForCausalLM": "org/name--modeling_a.AForCausalLM"}),
        ({"AutoModel": ["modeling_a.A"]}, {"AutoModel": "modeling_a.A", "AutoTokenizer": ["tok.T", None]}),
        ({"AutoConfig": "config_a.A"}, {"AutoConfig": "config_b.B"}),
    ],
)
def test_the_same_code_is_no_note(base: dict[str, Any], one: dict[str, Any]) -> None:
    assert agree_configs(LLAMA | {"auto_map": base}, [("one", LLAMA | {"auto_map": one})]) == InputAgreement()


def with_code(folder: Path, text: str, seed: int, auto_map: dict[str, str] | None = BIDIRECTIONAL) -> Path:
    """A checkpoint with code of its own."""
    save_checkpoint(folder, llama_tensors(seed=seed), CONFIG | ({"auto_map": auto_map} if auto_map else {}))
    (folder / "modeling_encoder.py").write_text(text)
    return folder


def test_code_of_the_written_config_is_in_the_output(tmp_path: Path) -> None:
    """Copied, not run; a note names files that differ."""
    base, one = (with_code(tmp_path / n, f"raise RuntimeError('{n}')", i) for i, n in enumerate(("base", "one")))
    (one / "rope.py").write_text("")
    run = ["merge", "-b", f"{base}", "-e", f"{one}", "-m", "linear", "--out"]
    for flags, owner, words in (
        ([], "base", "(its code in expert 'one'): that of the base is written. Another one: --set config_from=NAME"),
        (["--set", "config_from=one"], "one", "(its code in the base): that of expert 'one' is written"),
    ):
        found = actmat([*run, f"{tmp_path}/{owner}-out", *flags], code=0)
        text = found.words
        assert words in text
        assert (tmp_path / f"{owner}-out" / "modeling_encoder.py").read_text() == f"raise RuntimeError('{owner}')"
        assert (tmp_path / f"{owner}-out" / "rope.py").exists() == (owner == "one")


def test_an_experts_class_is_written_with_its_code(tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "base", llama_tensors(), CONFIG | {"architectures": ["LlamaForCausalLM"]})
    one = with_code(tmp_path / "one", "", 1)
    edit_json(one / "config.json", architectures=["LlamaBiModel"])
    run = ["merge", "-b", f"{base}", "-e", f"{one}", "-m", "linear", "--out", f"{tmp_path}/out"]
    assert "architectures (base Llama*; 'one' LlamaBi*)" in actmat(run).words
    actmat([*run, "--set", "config_from=one"], code=0)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["architectures"], written["auto_map"]) == (["LlamaBiModel"], BIDIRECTIONAL)
    assert (tmp_path / "out" / "modeling_encoder.py").exists()


PIPELINE = {"_class_name": "StableDiffusionPipeline", "components": {"unet": UNET}}
PNDM, EULER = ({"_class_name": f"{name}Scheduler", "beta_start": 0.00085} for name in ("PNDM", "EulerDiscrete"))


@pytest.mark.parametrize(
    ("expert", "named"),
    [
        (PNDM | {"prediction_type": "v_prediction"}, "scheduler.prediction_type (base epsilon; 'one' v_prediction)"),
        (EULER | {"prediction_type": "v_prediction"}, "scheduler.prediction_type"),
        (PNDM | {"rescale_betas_zero_snr": True}, "scheduler.rescale_betas_zero_snr"),
        (PNDM | {"beta_schedule": "scaled_linear"}, "scheduler.beta_schedule"),
        (PNDM | {"prediction_type": "epsilon", "num_train_timesteps": 1000, "trained_betas": None}, ""),
        (PNDM | {"clip_sample": False, "steps_offset": 1, "_diffusers_version": "0.1"}, ""),
        (EULER, ""),
    ],
)
def test_schedulers_of_pipelines_are_compared(expert: dict[str, Any], named: str) -> None:
    """What a model was trained to predict must agree_configs; how it is sampled is a note."""
    base, one = PIPELINE | {"scheduler": PNDM}, PIPELINE | {"scheduler": expert}
    found = agree_configs(base, [("one", one)])
    assert len(found.problems) == bool(named)
    assert all(named in p for p in found.problems)
    written = agree_configs(base, [("one", one)], "one").configs
    assert not named or {k: written["scheduler/scheduler_config.json"][k] for k in expert if k[0] != "_"} == {
        k: v for k, v in expert.items() if k[0] != "_"
    }


def test_what_a_class_sets_itself_is_not_compared_as_written() -> None:
    """Moshi gives its depth decoder the width of the whole, whatever the file says."""
    moshi = {"model_type": "moshi", "hidden_size": 32, "audio_vocab_size": 64}
    base, expert = (moshi | {"depth_decoder_config": {"input_size": n}} for n in (4096, 32))
    assert not agree_configs(base, [("one", expert)]).problems
    assert agree_configs(base, [("one", expert | {"hidden_size": 64})]).problems


def test_an_expert_may_be_a_part_of_the_base() -> None:
    """The tower of a multimodal model, or a component of a pipeline."""
    base = {"model_type": "llava", "text_config": LLAMA, "vision_config": VISION}
    assert not agree_configs(base, [("text", LLAMA)]).problems
    assert "rope_theta" in agree_configs(base, [("text", LLAMA | {"rope_theta": 1.0})]).problems[0]
    pipeline = {"_class_name": "StableDiffusionPipeline", "components": {"unet": UNET}}
    found = agree_configs(pipeline, [("unet", UNET | {"norm_eps": 1.0})], "unet")
    assert found.configs == {"unet/config.json": UNET | {"norm_eps": 1.0}}


@pytest.mark.parametrize("take", ["base", "one"])
def test_the_recipe_says_whose_entries_are_written(take: str) -> None:
    base = {"model_type": "llava", "text_config": LLAMA | {"rope_theta": 1e4}, "tie_word_embeddings": True}
    one = {"model_type": "llava", "text_config": LLAMA | {"rope_parameters": {"rope_theta": 1e6}, "odd": 1}}
    found = agree_configs(base, [("one", one)], take)
    assert not found.problems
    assert "rope_theta" in found.notes[0]
    assert found.configs == ({} if take == "base" else {"config.json": one | {"tie_word_embeddings": True}})


@pytest.mark.parametrize(
    ("base", "one", "words"),
    [
        ("base", "one", ""),
        ("base", "one/model.safetensors", "no config.json of 'one/model.safetensors' is there to be compared"),
        ("base/model.safetensors", "one", "no config.json of the base is there to be compared"),
        ("base/model.safetensors", "one/model.safetensors", ""),
    ],
)
def test_a_config_that_is_not_given_is_not_compared(base: str, one: str, words: str, tmp_path: Path) -> None:
    for seed, name in enumerate(("base", "one")):
        save_checkpoint(tmp_path / name, llama_tensors(seed=seed), CONFIG)
    found = actmat(["plan", "-b", f"{tmp_path}/{base}", "-e", f"one={tmp_path}/{one}", "-m", "linear"], code=0)
    assert words.replace("one/model.safetensors", "one") in found.words
    assert ("no config.json of" in found.out) == bool(words)


def test_config_from_writes_the_experts_entries(tmp_path: Path) -> None:
    """One expert at weight 1 is that expert again."""
    transformers = pytest.importorskip("transformers")
    models = {}
    for name, theta in (("base", 1e4), ("long", 1e6)):
        sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
        models[name] = made("llama", seed=int(theta) % 7, num_hidden_layers=1, **sizes, **rope)
        models[name].save_pretrained(tmp_path / name)
    run = ["merge", "-b", f"{tmp_path}/base", "-e", f"{tmp_path}/long", "-m", "linear", "--out", f"{tmp_path}/out"]
    found = actmat(run, code=1)
    text = found.out + found.err
    assert "rope_theta (base 10000.0; 'long' 1000000.0)" in text
    assert "--set config_from=base" in text
    found = actmat([*run, "--set", "config_from=long"], code=0)
    text = found.out + found.err
    assert "rope_theta" in text
    came = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(3, 35)[None]
    with torch.no_grad():
        torch.testing.assert_close(came(ids).logits, models["long"](ids).logits)


AGREED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"problem_type": "multi_label_classification"}, {}, {"problem_type": "multi_label_classification"}),
    ({"eos_token_id": [2, 7]}, {}, {"eos_token_id": [2, 7]}),
    ({"pad_token_id": 3}, {}, {"pad_token_id": 3}),
    ({"max_position_embeddings": 9999}, {}, {"max_position_embeddings": 9999}),
    ({"sentence_transformers": {"activation_fn": "torch.nn.Identity"}}, {},
     {"sentence_transformers": {"activation_fn": "torch.nn.Identity"}}),
    ({"eos_token_id": 7}, {"eos_token_id": 8}, {}),
    ({"auto_map": BIDIRECTIONAL}, {}, {}),
    ({"model_type": "mistral", "sliding_window": 9}, {}, {}),
]  # fmt: skip
"""Entries of both experts, those that the second has instead, and those that the output takes."""


@pytest.mark.parametrize(("entries", "second", "written"), AGREED)
def test_settings_follow_the_experts_where_they_agree(
    entries: dict[str, Any], second: dict[str, Any], written: dict[str, Any]
) -> None:
    base = SMALL | {"eos_token_id": 2}
    agreement = agree_configs(base, [("one", base | entries), ("two", base | entries | second)])
    assert agreement.problems == ()
    assert agreement.notes
    assert agreement.configs == ({"config.json": base | written} if written else {})


def test_a_base_with_all_entries_at_its_top_gets_no_part() -> None:
    """A part with a few entries would have the defaults of its class for all others."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2}
    nested = {"model_type": "qwen2_vl", "text_config": sizes | {"model_type": "qwen2_vl_text", "temperature": 0.5}}
    agreement = agree_configs({"model_type": "qwen2_vl"} | sizes, [("one", nested)])
    assert (agreement.problems, agreement.configs) == ((), {})


@pytest.mark.parametrize(
    ("keys", "ignored"),
    [
        ("attention_dropout initializer_range router_aux_loss_coef use_cache", True),
        ("tie_word_embeddings torch_dtype mask_time_prob vocab_size output_attentions architectures", True),
        ("token_dropout residual_weight conf_residual_weight inv_coeff_init_option embedding_init_target", False),
        ("output_range output_gate_type output_logit_soft_cap output_groups init_trk_keep_alive", False),
        ("layer_scale_init_value mask_weight init_std output_router_logits moe_token_dropout", True),
        ("rms_norm_eps layer_norm_eps logit_scale attention_bias hidden_act num_experts_per_tok output_dim", False),
        ("sliding_window final_logit_softcapping rope_scaling embedding_multiplier pooling_type", False),
    ],
)
def test_keys_of_training_and_names_change_nothing(keys: str, ignored: bool) -> None:
    assert {is_harmless(key) for key in keys.split()} == {ignored}
