"""Models on disk and in memory: checkpoints, adapters, a merged model at any scale."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

LOADING = threading.RLock()
"""Held around every load, and every model made, in code that several threads run.

`from_pretrained` swaps functions of its library for the time of a load (`PreTrainedModel.tie_weights` among them) and
puts back what it found. Of two loads in two threads the second finds, and in the end leaves, what the first had put
there: from then on no model of the process has its weights tied.
"""


def load_model(kind: str, folder: Path, **how: Any) -> Any:
    """A checkpoint as a class of transformers, in float32 and evaluation mode."""
    import transformers

    with LOADING:
        return getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32, **how).eval()


def is_adapter(folder: Path) -> bool:
    """True if PEFT has written it."""
    return (folder / "adapter_config.json").is_file()


def with_adapter(load: Callable[[Path], Any], base: Path, adapter: Path) -> Any:
    """The base with an adapter attached."""
    from peft import PeftModel

    with LOADING:
        return PeftModel.from_pretrained(load(base), str(adapter)).eval()


def add_adapter(
    model: Any,
    rank: int,
    generator: torch.Generator | None = None,
    alpha: float = 0,
    task: str | None = None,
    size: float = 1.0,
) -> Any:
    """The model with LoRA factors on all linear layers but the head; `A` as PEFT draws it, `B` zero.

    Args:
        generator: that `A` is drawn from; None: torch's own.
        alpha: 0: the rank.
        task: PEFT's kind of task.
        size: of `A`, relative to PEFT's; obeyed with a generator only.
    """
    from peft import LoraConfig, get_peft_model

    alpha = alpha or rank
    config = LoraConfig(task_type=task, r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules="all-linear")
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters() if generator else ():
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5), generator=generator)
            parameter.data.mul_(size)
    return adapted


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint's safetensors files, sharded or not."""
    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.is_file():
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return {name: tensor for file in sorted(files) for name, tensor in load_file(folder / file).items()}


def in_place(load: Callable[[Path], Any], base: Path, merged: Path, acted: Sequence[str]) -> Callable[[float], Any]:
    """From a scale to the merged model at it, `W_0 + scale (W* - W_0)` in the tensors on which the method acted.

    It is one model, whose weights the next call replaces: to load a checkpoint takes longer than to test it. At scale 1
    the weights are those of `merged` to the bit.

    Args:
        load: reads a checkpoint.
        acted: names, in the files, of the tensors that the scale acts on.

    Raises:
        ValueError: a tensor of the file cannot be told among the parameters of the model by its values.
    """
    tensors, first, model = read_tensors(base), load(base), load(merged)
    moved = []
    for name in acted:
        found = _parameters(first, name, tensors[name].to(model.device))
        if len(found) != 1:
            raise ValueError(f"'{name}' of {base} is the value of {len(found)} parameters of the model, not of one")
        start, parameter = first.get_parameter(found[0]).detach(), model.get_parameter(found[0])
        moved.append((parameter, start, parameter.detach().clone()))

    def at(scale: float) -> Any:
        with torch.no_grad():
            for parameter, start, end in moved:
                parameter.copy_(end if scale == 1 else start + scale * (end - start))
        return model

    return at


def _parameters(model: Any, name: str, value: Tensor) -> list[str]:
    """Parameters that have this value; of several (zero biases), those named as in the file up to a prefix."""
    equal = [n for n, p in model.named_parameters() if p.shape == value.shape and p.equal(value)]
    alike = [n for n in equal if f".{n}".endswith(f".{name}") or f".{name}".endswith(f".{n}")]
    return [name] if name in alike else alike or equal
