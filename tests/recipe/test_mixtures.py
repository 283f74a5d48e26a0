"""Mixtures of experts from dense models, loaded with transformers and held against the dense model."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file
from tests.tolerances import F32_ELEMENTWISE, F32_PRODUCT
from torch import Tensor

from actmat.api.reading import read_recipe
from actmat.checkpoints.raw import raw_bytes
from actmat.checkpoints.resolve import open_checkpoint, open_handle
from actmat.errors import MergeError, format_size
from actmat.run import plan_recipe, run_recipes
from actmat.settings import RunSettings

TOKENIZER = Path(__file__).parents[1] / "data" / "mergekit" / "base" / "tokenizer.json"
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SIZES),
    "mistral": transformers.MistralConfig(**SIZES),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=8),
}
PROMPTS = [["a b", "ab ba b"], ["ba"], ["bb aa"]]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Per kind, three models: KIND/0, 1 and 2."""
    folder = tmp_path_factory.mktemp("dense")
    for kind, config in KINDS.items():
        for i in range(3):
            torch.manual_seed(i)
            model = transformers.AutoModelForCausalLM.from_config(config)
            for name, tensor in model.named_parameters():
                if "bias" in name or "norm" in name:
                    torch.nn.init.normal_(tensor, mean=0.9)
                else:
                    torch.nn.init.normal_(tensor, std=0.2)
            place = folder / kind / str(i)
            model.save_pretrained(place)
            shutil.copy(TOKENIZER, place / "tokenizer.json")
            names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
            (place / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


Build = Callable[..., Path]


@pytest.fixture
def build(models: Path, tmp_path: Path) -> Build:
    """Write a configuration of models of one kind, and build it."""

    def run(kind: str, out: str = "out", **fields: Any) -> Path:
        file = models / kind / f"{out}.yml"
        data = {"base_model": "./0", "gate_mode": "random", "dtype": "float32", **fields}
        file.write_text(yaml.safe_dump(data), encoding="utf-8")
        run_recipes([read_recipe(file, {"out": str(tmp_path / out)})], RunSettings(threads=1, durable=False))
        return tmp_path / out

    return run


def experts(*numbers: int, **more: Any) -> list[dict[str, Any]]:
    return [{"source_model": f"./{n}", "positive_prompts": PROMPTS[n], **more} for n in numbers]


def logits(folder: Path) -> Tensor:
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not found["missing_keys"], found
    assert not found["unexpected_keys"], found
    with torch.no_grad():
        answer: Tensor = model.eval()(torch.arange(3, 27).reshape(2, 12)).logits
    return answer


@pytest.mark.parametrize(
    ("kind", "model_class", "more"),
    [
        ("llama", "MixtralForCausalLM", {}),
        ("mistral", "MixtralForCausalLM", {}),
        ("qwen3", "Qwen3MoeForCausalLM", {}),
        ("qwen2", "Qwen2MoeForCausalLM", {"shared_experts": [{"source_model": "./1", "residual_scale": 0}]}),
        ("llama", "Qwen2MoeForCausalLM", {"shared_experts": [{"source_model": "./1", "residual_scale": 0}],
                                          "architecture": "qwen"}),
    ],
)  # fmt: skip
def test_identical_experts_give_the_dense_model(
    kind: str, model_class: str, more: dict[str, Any], build: Build, models: Path
) -> None:
    out = build(kind, experts=experts(0, 0, 0), **more)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == [model_class]
    got, want = logits(out), logits(models / kind / "0")
    assert float((got - want).abs().max()) < 1e3 * F32_ELEMENTWISE * float(want.abs().max())
    other = logits(build(kind, "others", experts=experts(0, 1, 2), **more))
    assert float((other - want).abs().max()) > 1e-2


def test_one_expert_per_token_is_the_model_of_that_expert(build: Build, models: Path) -> None:
    """A gate that always prefers expert 1 leaves its MLPs in the base's model."""
    out = build("qwen3", experts=experts(1, 2), experts_per_token=1)
    tensors = load_file(out / "model.safetensors")
    mlps = {n: t for n, t in load_file(models / "qwen3" / "1" / "model.safetensors").items() if ".mlp." in n}
    for name, tensor in mlps.items():
        assert torch.equal(tensors[name.replace(".mlp.", ".mlp.experts.0.")], tensor)
    base = load_file(models / "qwen3" / "0" / "model.safetensors")
    kept = {n: t for n, t in base.items() if ".mlp." not in n}
    assert all(torch.equal(tensors[n], t) for n, t in kept.items())
    assert len(tensors) == len(kept) + 2 * len(mlps) + 2


def states(folder: Path, prompts: list[str], *, average: bool) -> Tensor:
    """Naive: prompt by prompt, without padding."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    found = []
    for prompt in prompts:
        tokens = tokenizer("<s>" + prompt, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            layers = model(**tokens, output_hidden_states=True).hidden_states[:-1]
        found.append(torch.stack([h[0].float().mean(0) if average else h[0, -1].float() for h in layers]))
    return torch.stack(found).mean(0)


@pytest.mark.parametrize("mode", ["hidden", "hidden_avg"])
def test_hidden_gates_are_states_of_the_base(mode: str, build: Build, models: Path) -> None:
    listed = experts(1, 2)
    listed[0]["positive_prompts"] = ["aa"]  # one prompt each: nothing is padded
    listed[1]["negative_prompts"] = ["ab"]
    listed[1]["positive_prompts"] = ["bb aa"]
    out = build("llama", experts=listed, gate_mode=mode)
    tensors, base = load_file(out / "model.safetensors"), models / "llama" / "0"
    plan = plan_recipe(read_recipe(models / "llama" / "out.yml", {"out": "out"}))
    numel = sum(t.numel() for t in load_file(base / "model.safetensors").values())
    assert any(f"runs in bfloat16: {format_size(2 * numel)} of memory" in note for note in map(str, plan.notes))
    want = [states(base, ["aa"], average=mode == "hidden_avg"), states(base, ["bb aa"], average=mode == "hidden_avg")]
    want[1] -= states(base, ["ab"], average=mode == "hidden_avg")
    for layer in range(2):
        rows = torch.stack([w[layer] / w[layer].norm() for w in want])
        got = tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"]
        assert float((got - rows).abs().max()) < 2**-5, "states in bfloat16"
        assert torch.allclose(got.norm(dim=1), torch.ones(2), atol=2**-7)


def test_cheap_embed_gates_are_sums_of_embeddings(build: Build, models: Path) -> None:
    out = build("llama", experts=experts(0, 1), gate_mode="cheap_embed")
    tensors, base = load_file(out / "model.safetensors"), models / "llama" / "0"
    table = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    for expert in (0, 1):
        total = torch.zeros(16)
        for prompt in PROMPTS[expert]:
            total += table[tokenizer.encode("<s>" + prompt, add_special_tokens=False)].sum(0)
        for layer in range(2):
            got = tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"][expert]
            assert float((got - total / total.norm()).abs().max()) < 4 * F32_ELEMENTWISE


def test_random_gates_follow_their_seed(build: Build) -> None:
    names = [f"model.layers.{i}.mlp.gate.weight" for i in range(2)]

    def gates(seed: int, mode: str, out: str) -> Tensor:
        folder = build("qwen3", out, experts=experts(0, 1, 2), gate_mode=mode, random_seed=seed)
        tensors = load_file(folder / "model.safetensors")
        return torch.stack([tensors[n] for n in names])

    one, same, other = gates(3, "random", "one"), gates(3, "random", "same"), gates(4, "random", "other")
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(one, torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(3)))
    uniform = gates(3, "uniform_random", "uniform")
    assert 0.2 < float(uniform.abs().max()) <= 16**-0.5


def test_residual_scale_and_noise_change_their_expert(build: Build, models: Path) -> None:
    listed = [*experts(0), *experts(1, residual_scale=0.25, noise_scale=0.1)]
    tensors = load_file(build("llama", experts=listed) / "model.safetensors")
    place = "model.layers.1.block_sparse_moe.experts"
    stored = [load_file(models / "llama" / str(i) / "model.safetensors") for i in (0, 1)]
    for own, name in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        dense = f"model.layers.1.mlp.{name}.weight"
        assert torch.equal(tensors[f"{place}.0.{own}.weight"], stored[0][dense])
        factor = 0.25 if own == "w2" else 1.0
        noise = tensors[f"{place}.1.{own}.weight"] / factor - stored[1][dense]
        assert 0.08 < float(noise.std()) < 0.12


def test_any_range_of_a_tensor_is_read_here_and_from_a_handle(models: Path, build: Build) -> None:
    listed = [*experts(0), *experts(1, residual_scale=0.5), *experts(2, noise_scale=0.5)]
    build("llama", "ranges", experts=listed, dtype="bfloat16")
    rng = random.Random(0)
    with open_checkpoint(models / "llama" / "ranges.yml") as here, open_handle(here.handle()) as there:
        assert dict(here.specs) == dict(there.specs)
        assert here.identity() == there.identity()
        for name, spec in here.specs.items():
            whole = here.read(name)
            assert (tuple(whole.shape), whole.dtype) == (spec.shape, torch.bfloat16)
            assert torch.equal(there.read(name), whole)
            start = rng.randrange(spec.nbytes)
            buffer = bytearray(rng.randrange(spec.nbytes - start + 1))
            there.read_into(name, start, memoryview(buffer))
            assert bytes(buffer) == bytes(raw_bytes(whole)[start : start + len(buffer)]), name


def test_a_run_goes_on_with_the_same_description_only(models: Path, build: Build) -> None:
    """Prompts of the same length: no file of weights tells the two apart, and no size."""

    def described(prompt: str) -> Any:
        file = models / "llama" / "prompts.yml"
        listed = [{"source_model": "./0", "positive_prompts": [prompt]}, *experts(1)]
        file.write_text(yaml.safe_dump({"base_model": "./0", "gate_mode": "cheap_embed", "experts": listed}))
        with open_checkpoint(file) as checkpoint:
            return [(f.size, f.etag) for f in checkpoint.identity()]

    one, other = described("aa"), described("ab")
    assert [size for size, _ in one] == [size for size, _ in other]
    assert one != other
    assert described("aa") == one
    out = build("llama", "again", experts=experts(0, 1))
    before = (out / "model.safetensors").stat().st_mtime_ns
    assert build("llama", "again", experts=experts(0, 1)) == out, "found complete"
    assert (out / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(MergeError, match="is not what the recipe gives now"):
        build("llama", "again", experts=experts(1, 0))


def test_dtype_is_that_of_the_file_or_of_the_base(build: Build) -> None:
    for given, dtype in ({"dtype": "bfloat16"}, torch.bfloat16), ({"dtype": None}, torch.float32):
        out = build("llama", f"of-{dtype}", experts=experts(0, 1), **given)
        assert {t.dtype for t in load_file(out / "model.safetensors").values()} == {dtype}
        assert json.loads((out / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_a_missing_key_and_value_heads_is_what_the_dense_model_means(
    build: Build, models: Path, tmp_path: Path
) -> None:
    """Configs of old Llamas leave it out: all heads; Mixtral would take 8."""
    place = tmp_path / "old"
    config = transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 4, "rms_norm_eps": 1e-6})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(place)
    data = json.loads((place / "config.json").read_text())
    for key in ("num_key_value_heads", "rms_norm_eps", "rope_parameters", "max_position_embeddings"):
        del data[key]
    (place / "config.json").write_text(json.dumps(data))
    same = [{"source_model": str(place)}, {"source_model": str(place)}]
    out = build("llama", "of_old", base_model=str(place), experts=same)
    assert torch.allclose(logits(out), logits(place), atol=F32_PRODUCT)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"experts": experts(0, 1), "gate_mode": "hiden"}, "expected one of hidden, hidden_avg"),
        (
            {"experts": experts(0), "gate_mode": "hidden"},
            "expected 1 to 1, the number of experts, found 2; the default is 2",
        ),
        ({"experts": experts(0, 1), "experts_per_token": 3}, "expected 1 to 2, the number of experts, found 3"),
        ({"experts": [{"source_model": "./0"}] * 2, "gate_mode": "hidden"}, "'positive_prompts' are missing"),
        ({"experts": [experts(0)[0], experts(0)[0]], "gate_mode": "hidden"}, "the prompts of all experts are equal"),
        (
            {"experts": experts(0, 1), "architecture": "mamba"},
            "'architecture: mamba': expected one of Mixtral, DeepSeek",
        ),
        ({"experts": [{"source_model": "../qwen3/0"}, {"source_model": "./1"}]}, "found llama, qwen3"),
        ({"experts": experts(0, 1), "shared_experts": experts(0, 1)}, "expected at most one shared expert, found 2"),
        ({"experts": experts(0, 1), "shared_experts": experts(0)}, "Mixtral has no shared expert"),
        (
            {
                "experts": experts(0, 1),
                "gate_mode": "hidden",
                "architecture": "qwen moe",
                "shared_experts": [{"source_model": "./0", "negative_prompts": ["a"]}],
            },
            "Qwen MoE needs 'positive_prompts' of the shared expert",
        ),
        ({"experts": experts(0, 1), "dtype": "int8"}, "expected one of float32, bfloat16, float16, found 'int8'"),
        ({"experts": [{"source_model": "./0", "residual_scale": "much"}] * 2}, "expected a number, found 'much'"),
        ({"experts": [{"source_model": "./0"}, {"source_model": "./missing"}]}, "has no 'missing'"),
        ({"experts": [{"source_model": "./0", "positive_prompts": "a"}] * 2}, "expected a list of strings, found 'a'"),
        ({"base_model": None, "experts": experts(0, 1)}, "'base_model' is missing"),
    ],
)
def test_what_is_refused_says_why(fields: dict[str, Any], words: str, build: Build, tmp_path: Path) -> None:
    architecture = {"architecture": "mixtral"} if "shared_experts" in fields else {}
    with pytest.raises(MergeError) as refused:
        build("llama", **(architecture | fields))
    assert words in str(refused.value), refused.value
    assert not (tmp_path / "out").exists()


def test_biases_without_a_place_are_refused(models: Path, build: Build, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "biased")
    biased = {"source_model": str(tmp_path / "biased")}
    with pytest.raises(MergeError) as refused:
        build("llama", base_model=str(tmp_path / "biased"), experts=[biased, biased])
    assert "Mixtral does not support the bias 'model.layers.0.self_attn.q_proj.bias'" in "".join(refused.value.problems)
    assert "in every MLP, found 'model.layers.0.mlp.gate_proj.bias'" in "".join(refused.value.problems)


def test_a_base_without_a_tokenizer_leaves_no_output(models: Path, build: Build, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(models / "llama" / "0", bare)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    with pytest.raises(MergeError, match="the tokenizer of the base model"):
        build("llama", base_model=str(bare), experts=experts(0, 1), gate_mode="cheap_embed")
    assert not (tmp_path / "out").exists()


def test_remarks_of_a_configuration(models: Path, tmp_path: Path) -> None:
    file = models / "llama" / "remarks.yml"
    listed = experts(0, 0, 0)
    file.write_text(yaml.safe_dump({"base_model": "./0", "gate_mode": "random", "exprts": 1, "experts": listed}))
    recipe = read_recipe(file)
    notes = " ".join(recipe.notes)
    assert "a mixture of experts (mergekit-moe): no weights are merged" in notes
    assert "'exprts' is ignored, as mergekit ignores it. Did you mean 'experts'?" in " ".join(recipe.warnings)
    assert "all experts are the same model" in " ".join(recipe.warnings)
    assert "3 experts: llama.cpp expects a power of two" in notes


def test_a_mixture_can_be_the_base_of_a_merge(models: Path, build: Build, tmp_path: Path) -> None:
    """The file stands for the checkpoint anywhere: here with another mixture as an expert of weight 1."""
    target = build("llama", "target", experts=experts(2, 1))
    build("llama", "start", experts=experts(0, 1))
    recipe = tmp_path / "r.yaml"
    start = models / "llama" / "start.yml"
    recipe.write_text(f"base: {start}\nexperts: [{target}]\nmethod: linear\nscope: all\n")
    run_recipes([read_recipe(recipe, {"out": str(tmp_path / "whole")})], RunSettings(threads=1, durable=False))
    name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    got, end = (load_file(tmp_path / n / "model.safetensors") for n in ("whole", "target"))
    torch.testing.assert_close(got[name], end[name], rtol=0, atol=F32_ELEMENTWISE)
    assert got.keys() == end.keys()


def test_gates_that_are_nearly_alike_are_a_warning(build: Build) -> None:
    listed = experts(0, 1)
    listed[1]["positive_prompts"] = [*PROMPTS[0], "b"]
    with pytest.warns(UserWarning, match=r"the gates of all layers are nearly alike"):
        build("llama", experts=listed, gate_mode="cheap_embed")


def test_the_card_of_a_mixture_has_the_licenses_of_its_models(models: Path, build: Build, tmp_path: Path) -> None:
    cards = [models / "llama" / str(n) / "README.md" for n in (0, 2)]
    for card, license in zip(cards, ("mit", "apache-2.0"), strict=True):
        card.write_text(f"---\nlicense: {license}\n---\n", encoding="utf-8")
    try:
        build("llama", experts=experts(0, 2))
    finally:
        for card in cards:
            card.unlink()
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert yaml.safe_load(text.split("---")[1])["license"] == ["mit", "apache-2.0"]
    assert all(f"base ({card.parent})" in text for card in cards)
