"""Commands that load a finished output in transformers or PEFT, and in vLLM if supported.

Adapters are judged by the demands of vLLM's loader; vLLM is not needed.

| demand | source in vLLM |
|---|---|
| `r`, `lora_alpha`, `target_modules`; no `modules_to_save`, no `bias`, no DoRA | `lora/peft_helper.py` |
| `r <= --max-lora-rank`, which is one of a few numbers, 16 by default | `lora/peft_helper.py`, `config/lora.py` |
| one `lora_alpha / r` for all modules: `rank_pattern` and `alpha_pattern` are not read | `lora/peft_helper.py` |
| nothing but factors, called `[base_model.model.]MODULE.lora_A.weight` and so on | `lora/utils.py` |

Source: vLLM (https://github.com/vllm-project/vllm), versions 0.6 to 0.22.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actmat.bounds import read_object
from actmat.checkpoints.folder import LORA_FILES
from actmat.checkpoints.resolve import find_source
from actmat.checkpoints.writing.listed import MANIFEST_NAME
from actmat.errors import CheckpointError
from actmat.experts.locate import open_file_of_factors
from actmat.experts.lora.names import first_factor

TASKS = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
}
"""PEFT's task name of an adapter -> transformers class."""
DECODERS = ("ForCausalLM", "LMHeadModel")
"""Suffixes of decoder-only text generation classes."""
PACKAGE = re.compile(r"[A-Za-z_]\w*")
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that every version of vLLM since 0.9 takes for `--max-lora-rank`; recent ones take 1 as well."""

VLLM_DEFAULT_RANK = 16


@dataclass(frozen=True, slots=True)
class Serving:
    """Ways to load an output.

    Args:
        python: Python lines that load it with transformers, or with PEFT on its base.
        vllm: the vLLM command; empty if vLLM cannot serve it.
        notes: the reason why vLLM cannot, or hints.
    """

    python: tuple[str, ...]
    vllm: str = ""
    notes: tuple[str, ...] = ()


def serving_commands(out: str) -> Serving:
    """Loading commands for a finished output: a folder, or `hf://org/name`.

    Raises:
        CheckpointError: it is not an output of actmat, or neither library can load it.
    """
    source = find_source(out)
    file = open_file_of_factors(source) if source.named is not None else None
    if file is not None and first_factor(file.specs) is not None:
        file.close()
        return _of_lora_file(out, Path(out).name)
    if source.named is not None:
        return Serving((), "", ("load it where its base is loaded, such as ComfyUI/models/checkpoints/",))
    if MANIFEST_NAME not in source.names:
        raise CheckpointError(f"{out} has no {MANIFEST_NAME}: expected a merged model or adapter made by actmat.")
    place = out.removeprefix("hf://")
    if "adapter_config.json" in source.names:
        return _of_adapter(place, read_object(source.fetch("adapter_config.json")))
    if (name := next((n for n in LORA_FILES if n in source.names), None)) is not None:
        return _of_lora_file(place, name)
    if "model_index.json" in source.names:
        return Serving(_pipeline(place), "", ("vLLM serves decoder-only text models; this is a diffusion pipeline",))
    if "config.json" not in source.names:
        raise CheckpointError(
            f"{out} has no config.json, because its base has none: load the tensors with safetensors into your own "
            "model code."
        )
    return _of_model(place, read_object(source.fetch("config.json")))


def _pipeline(place: str) -> tuple[str, str]:
    """Lines that load a pipeline of diffusers."""
    loading = f'pipe = DiffusionPipeline.from_pretrained({place!r}, torch_dtype="auto")'
    return "from diffusers import DiffusionPipeline", loading


def _of_lora_file(place: str, name: str) -> Serving:
    """Loading commands for a LoRA of an image or video model: a file, or a folder with a file of this name."""
    path = place if Path(place).name == name else f"{place}/{name}"
    python = (*_pipeline("BASE"), f"pipe.load_lora_weights({place!r})")
    return Serving(
        python,
        "",
        (
            "replace BASE by the model that it was trained on",
            f"ComfyUI: copy {path} to ComfyUI/models/loras/ under any name, and load it with a LoRA loader; "
            "if it reports keys not loaded, write the file with --to comfy",
            "vLLM serves text models only",
        ),
    )


def _of_model(place: str, config: Mapping[str, Any]) -> Serving:
    architecture = str(next(iter(config.get("architectures") or ()), "AutoModel"))
    generates = architecture.endswith((*DECODERS, "ForConditionalGeneration"))
    kind = _class_of(config)
    helper = "AutoTokenizer" if "vision_config" not in config and "image_size" not in config else "AutoProcessor"
    code = ", trust_remote_code=True" if config.get("auto_map") else ""
    python = (
        f"from transformers import {', '.join(sorted({kind, helper}))}",
        f'model = {kind}.from_pretrained({place!r}, dtype="auto"{code})',
        f"{'tokenizer' if helper == 'AutoTokenizer' else 'processor'} = {helper}.from_pretrained({place!r})",
    )
    notes = ["its code comes from the base's folder: review it before running it"] if code else []
    if not generates or config.get("is_encoder_decoder"):
        what = "an encoder-decoder model" if config.get("is_encoder_decoder") else f"a {architecture}"
        return Serving(python, "", (*notes, f"vLLM serves decoder-only text models; this is {what}"))
    return Serving(python, shlex.join(["vllm", "serve", place, *(["--trust-remote-code"] if code else [])]), (*notes,))


def _class_of(config: Mapping[str, Any]) -> str:
    """Transformers class that loads a model with this config.json."""
    architecture = str(next(iter(config.get("architectures") or ()), "AutoModel"))
    if architecture.endswith(DECODERS):
        return "AutoModelForCausalLM"
    if config.get("is_encoder_decoder"):
        return "AutoModelForSeq2SeqLM"
    return architecture if PACKAGE.fullmatch(architecture) else "AutoModel"


def _config_below(adapter: Mapping[str, Any]) -> Mapping[str, Any]:
    """Config of an adapter's base, if the task is missing: the class recorded by PEFT, else the base's local config."""
    if recorded := (adapter.get("auto_mapping") or {}).get("base_model_class"):
        return {"architectures": [recorded]}
    beside = Path(str(adapter.get("base_model_name_or_path") or "")) / "config.json"
    return read_object(beside) if beside.is_file() else {}


def _of_adapter(place: str, config: Mapping[str, Any]) -> Serving:
    base = str(config.get("base_model_name_or_path") or "BASE")
    kind = TASKS.get(str(config.get("task_type"))) or _class_of(_config_below(config))
    python = (
        "from peft import PeftModel",
        f"from transformers import {kind}",
        f'model = {kind}.from_pretrained({base!r}, dtype="auto")',
        f"model = PeftModel.from_pretrained(model, {place!r})",
    )
    notes = [] if config.get("base_model_name_or_path") else ["the adapter does not name its base: replace BASE by it"]
    problems = _vllm_problems(config)
    if kind != "AutoModelForCausalLM":
        problems.append("its task is not causal language modelling")
    if problems:
        return Serving(python, "", (*notes, f"vLLM cannot serve it as an adapter: {'; '.join(problems)}"))
    name = Path(place).name or "merged"
    flags = _vllm_flags(config)
    vllm = shlex.join(["vllm", "serve", base, "--enable-lora", *flags, "--lora-modules", f"{name}={place}"])
    return Serving(python, vllm, (*notes, f"request the model '{name}'"))


def _vllm_problems(config: Mapping[str, Any]) -> list[str]:
    """Why vLLM would refuse, or misread, an adapter with this `adapter_config.json`; empty when it can serve it."""
    problems = []
    if config.get("modules_to_save") or config.get("bias", "none") != "none" or config.get("lora_bias"):
        problems.append("it has full tensors or biases (write a full model)")
    if config.get("target_parameters"):
        problems.append("it adapts bare parameters (write a full model)")
    if config.get("rank_pattern"):
        problems.append("it has several ranks (write it with --set ranks=uniform)")
    if (rank := _largest_rank(config)) > VLLM_RANKS[-1]:
        problems.append(f"its rank {rank} exceeds vLLM's maximum, {VLLM_RANKS[-1]} (merge with --rank)")
    return problems


def _largest_rank(config: Mapping[str, Any]) -> int:
    """Largest rank of an adapter."""
    return max([int(config.get("r") or 0), *map(int, (config.get("rank_pattern") or {}).values())])


def _vllm_flags(config: Mapping[str, Any]) -> list[str]:
    """Flags with which vLLM serves an adapter that it can serve; empty for its default settings."""
    rank = _largest_rank(config)
    return ["--max-lora-rank", str(next(n for n in VLLM_RANKS if n >= rank))] if rank > VLLM_DEFAULT_RANK else []
