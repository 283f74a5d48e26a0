"""Inputs of the ledger's merges: tiny models, adapters, files of other tools, statistics; made once, without chance.

python -m tests.ledger.inputs FOLDER llama peft ...
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.helpers.checkpoint_files import save_folder, save_sharded
from tests.helpers.family import write_family
from tests.helpers.models import BY_NAME, VOCABULARY, Case, perturbed, save_family
from tests.helpers.repository import ROOT
from torch import Tensor

NAMES = ("base", "expert1", "expert2")
LORA: Mapping[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
MIXTURE: Mapping[str, Any] = {"r": 2, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
LORAS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "lora1": ("llama", LORA),
    "lora2": ("llama", {**LORA, "r": 2}),
    "lora3": ("llama", {**LORA, "r": 3, "target_modules": "all-linear"}),
    "lora4": ("llama", LORA),
    "saved1": ("llama", {**LORA, "modules_to_save": ["lm_head"], "bias": "all"}),
    "saved2": ("llama", {**LORA, "r": 3, "modules_to_save": ["lm_head"], "bias": "all"}),
    "pattern": ("llama", {**LORA, "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"v_proj": 1}, "use_rslora": True}),
    "dora1": ("llama", {**LORA, "use_dora": True}),
    "dora2": ("llama", {**LORA, "r": 2, "use_dora": True}),
    "pissa": ("llama", {**LORA, "init_lora_weights": "pissa"}),
    "rows": ("llama", {**LORA, "trainable_token_indices": [1, 4]}),
    "gpt2_1": ("gpt2", {"r": 3, "target_modules": ["c_attn", "c_fc", "wpe"], "fan_in_fan_out": True}),
    "gpt2_2": ("gpt2", {"r": 2, "target_modules": ["c_attn", "c_proj", "wpe"], "fan_in_fan_out": True}),
    "mixtral1": ("mixtral", MIXTURE),
    "mixtral2": ("mixtral", {**MIXTURE, "r": 3}),
    "vision1": ("vision", {"r": 2, "target_modules": ["line", "plane", "point", "head"]}),
    "vision2": ("vision", {"r": 3, "target_modules": ["plane", "solid", "head"]}),
}
"""Adapter of PEFT -> its base and options of LoRA."""
CONVOLUTIONS = ["line", "plane", "point", "head"]
OTHERS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "loha1": ("llama", "LoHaConfig", {"r": 2, "target_modules": ["q_proj", "down_proj"]}),
    "loha2": ("vision", "LoHaConfig", {"r": 2, "target_modules": CONVOLUTIONS, "use_effective_conv2d": True}),
    "lokr1": ("llama", "LoKrConfig", {"r": 2, "target_modules": ["q_proj", "down_proj"]}),
    "ia3": ("llama", "IA3Config", {"target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "vera": ("llama", "VeraConfig", {"r": 4, "target_modules": ["q_proj"], "vera_dropout": 0.0}),
    "adalora": ("llama", "AdaLoraConfig", {"init_r": 4, "total_step": 10, "target_modules": ["q_proj", "down_proj"]}),
    "oft": ("llama", "OFTConfig", {"oft_block_size": 4, "target_modules": ["q_proj", "down_proj"]}),
}
"""Adapter of PEFT of another family -> its base, the class of its config and options."""


def save_peft_adapters(folder: Path) -> None:
    """The tiny bases `base_NAME`, and adapters of them."""
    import peft
    from tests.helpers.adapters import save_base, save_peft

    for base in ("llama", "gpt2", "mixtral", "vision"):
        save_base(base, folder / f"base_{base}", torch.float32)
    configs = {name: (base, peft.LoraConfig(**options)) for name, (base, options) in LORAS.items()}
    configs |= {name: (base, getattr(peft, kind)(**options)) for name, (base, kind, options) in OTHERS.items()}
    for seed, (name, (base, config)) in enumerate(configs.items()):
        torch.manual_seed(seed)  # of what PEFT draws at the start
        save_peft(folder / name, base, seed, config, dtype=torch.float32, scale=0.1)


def save_architecture(folder: Path) -> None:
    """A base and three experts of the architecture that the folder is named for."""
    name = folder.name
    save_family(BY_NAME.get(name) or Case(name, {}, tied=name == "llama_tied"), folder)


def variants(base: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Names and tensors of a base and two experts."""
    for seed, name in enumerate(NAMES):
        yield name, perturbed(base, seed) if seed else {n: t.clone() for n, t in base.items()}


def llama_model() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config of the tiny Llama."""
    model = BY_NAME["llama"].build()
    return model.state_dict(), model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}


def save_stored_forms(folder: Path) -> None:
    """One Llama in half precision, with NaN, in shards, torch files, distributed checkpoints, single files."""
    from tests.helpers.distributed import halves, save_dcp

    base, config = llama_model()
    folder.mkdir()
    kinds = (torch.float16, torch.bfloat16, torch.float32)
    for name, tensors in variants(base):
        save_file(tensors, folder / f"{name}.safetensors", {"format": "pt", "note": name})
        save_folder(
            folder / "halves" / name, {n: t.to(kinds[k % 3]) for k, (n, t) in enumerate(tensors.items())}, config
        )
        for form in ("sharded", "torch"):
            (folder / form / name).mkdir(parents=True)
            (folder / form / name / "config.json").write_text(json.dumps(config))
        save_sharded(tensors, folder / "sharded" / name, shards=3)
        torch.save(tensors, folder / "torch" / name / "pytorch_model.bin")
        cut = {f"model.{n}": halves(t.shape, 0) for n, t in tensors.items() if t.ndim == 2}
        save_dcp({"model": tensors, "optim": {"m": torch.zeros(2)}}, folder / "dcp" / name, files=2, cut=cut)
        if name == "expert1":
            tensors["model.layers.0.self_attn.q_proj.weight"][1, 2] = torch.nan
            tensors["model.norm.weight"][3] = torch.inf
        save_folder(folder / "broken" / name, tensors, config)


def save_large(folder: Path) -> None:
    """Tensors of more than a chunk in bfloat16: matrices, tables and vectors."""
    shapes = {"mlp.up_proj.weight": (760, 740), "mlp.down_proj.weight": (740, 760), "input_layernorm.weight": (740,)}
    shapes = {f"model.layers.{n}.{name}": s for n in range(2) for name, s in shapes.items()}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (1100, 740))
    rng = torch.Generator().manual_seed(0)
    for name, tensors in variants({n: torch.randn(s, generator=rng).bfloat16() for n, s in shapes.items()}):
        save_folder(folder / name, tensors, {"model_type": "llama", "tie_word_embeddings": False})


def save_quantized(folder: Path) -> None:
    """Llamas in codes: FP8 with scales of blocks, INT8 and INT4 of compressed-tensors, GGUF."""
    from tests.checkpoints.test_gguf import write_gguf
    from tests.helpers.quantized import compressed, fp8_blocks

    base, config = llama_model()
    writers = {
        "fp8": (lambda n, w: fp8_blocks(n, w, (16, 16)), {"quant_method": "fp8", "weight_block_size": [16, 16]}),
        "int8": compressed(num_bits=8, type="int", symmetric=True, strategy="channel"),
        "int4": compressed(num_bits=4, type="int", symmetric=False, strategy="group", group_size=16),
    }
    for seed, (name, tensors) in enumerate(variants({n: t.bfloat16() for n, t in base.items()})):
        for form, (write, entry) in writers.items():
            parts = (write(n, t)[0] if n.endswith("proj.weight") else {n: t} for n, t in tensors.items())
            codes = {n: t for part in parts for n, t in part.items()}
            save_folder(folder / form / name, codes, config | {"quantization_config": entry, "dtype": "bfloat16"})
        write_gguf(folder / f"{name}.gguf", seed=seed)


def save_diffusion(folder: Path) -> None:
    """A pipeline with two experts, the same in single files, a UNet, and LoRA files of it in two layouts."""
    from tests.helpers.diffusion import moved, pipeline, single_file
    from tests.helpers.lora_files import TEXT, UNET, random_factors, save_diffusers, save_kohya, tiny_text, tiny_unet

    for seed, name in enumerate(NAMES):
        drawn = pipeline(folder / f"tokenizer{seed}")
        if seed:
            moved(drawn.unet, seed)
        drawn.save_pretrained(folder / "pipelines" / name)
        save_file(single_file(drawn), folder / f"{name}.safetensors", {"format": "pt"})
    tiny_unet().float().save_pretrained(folder / "unet")
    for seed in (1, 2):
        unet, text = (random_factors(m, n, seed, alpha=1.0) for m, n in ((tiny_unet(), UNET), (tiny_text(), TEXT)))
        save_kohya(folder / f"kohya{seed}.safetensors", unet, text)
        save_kohya(folder / f"unet{seed}.safetensors", unet)
        save_diffusers(folder / f"diffusers{seed}", unet, text)


def save_statistics(folder: Path) -> None:
    """Gram matrices and Fisher information of experts: a Llama, packed Conv1D layers, a mixture."""
    from tests.helpers.grams import padded_batches

    from actmat.extras.collect.collect import collect

    for name in ("llama", "gpt2", "mixtral"):
        family = folder.parent / name
        for n in (1, 2):
            model = BY_NAME[name].loader.from_pretrained(family / f"expert{n}", dtype=torch.float32).eval()
            collect(model, padded_batches(VOCABULARY, n=3)[n:], out=folder / name / f"gram{n}")
            if name == "llama":
                collect(model, padded_batches(VOCABULARY, n=3)[n:], out=folder / name / f"fisher{n}", fisher=True)


def save_vocabularies(folder: Path) -> None:
    """Models with tokens of their own."""
    from tests.e2e import test_vocabularies

    test_vocabularies.save_model(folder / "base", 1, [])
    test_vocabularies.save_model(folder / "chat", 2, ["<user>", "<bot>"])
    test_vocabularies.save_model(folder / "tool", 3, ["<call>", "<user>", "<ret>", "<x>"], rows=20)


def save_mergekit(folder: Path) -> None:
    """Models and configurations of mergekit."""
    data = ROOT / "tests" / "data" / "mergekit"
    shutil.copytree(data, folder)
    for case in json.loads((data / "cases.json").read_text())["cases"]:
        (folder / f"{case['name']}.yml").write_text(case["yaml"])


def save_rule(folder: Path) -> None:
    """A method in a user's own file."""
    folder.mkdir()
    (folder / "rule.py").write_text(
        "from actmat.methods import Merged, MergeMethod\n\n\n"
        "def merge(deltas, *, factor: float = 2.0):\n"
        '    "the first expert and half of the second"\n'
        "    return Merged(deltas[0] * factor + deltas[1] / 2)\n\n\n"
        'FIRST = MergeMethod("first", merge, "elementwise")\n'
    )


SAVERS: Mapping[str, Callable[[Path], None]] = {
    "peft": save_peft_adapters, "stored": save_stored_forms, "large": save_large, "coded": save_quantized,
    "images": save_diffusion, "statistics": save_statistics, "vocabulary": save_vocabularies,
    "mergekit": save_mergekit, "texts": write_family, "user": save_rule,
}  # fmt: skip
"""Group of inputs -> what makes it; other groups are architectures."""
NEEDS: Mapping[str, tuple[str, ...]] = {"statistics": ("llama", "gpt2", "mixtral")}


def main(folder: Path, groups: list[str]) -> None:
    """Make these groups and those that they need, each in a folder of its name."""
    for name in dict.fromkeys([g for group in groups for g in NEEDS.get(group, ())] + groups):
        SAVERS.get(name, save_architecture)(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
