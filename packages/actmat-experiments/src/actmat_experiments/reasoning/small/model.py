"""The small decoder: a Llama from its config, and a tokenizer with one token per character.

Both are saved as any checkpoint is, so that the engine merges them and `from_pretrained` loads what it wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actmat_experiments.reasoning.quiet import quiet

__all__ = ["Size", "load_model", "new_model", "new_tokenizer", "save_model"]

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789+= "
SPECIAL = ("<pad>", "<eos>", "<unk>")
LONGEST = 32
"""Positions of the model, more than any prompt with its answer."""


@dataclass(frozen=True, slots=True)
class Size:
    """Of the Llama: about 0.8 million parameters by default."""

    hidden: int = 128
    intermediate: int = 352
    layers: int = 4
    heads: int = 4


def new_tokenizer() -> Any:
    """One token per character; padding goes to the left, as generation needs it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def new_model(size: Size, *, seed: int) -> Any:
    """A Llama with random weights; the global random state is left as it was."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def save_model(model: Any, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """A checkpoint with its tokenizer; `dtype` is that of the storage, the model itself is left as it is."""
    with quiet():
        if dtype == torch.float32:
            model.save_pretrained(folder)
        else:
            stored = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
            model.config.save_pretrained(folder)
            _save_tensors(stored, folder)
        new_tokenizer().save_pretrained(folder)


def _save_tensors(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def load_model(folder: Path) -> Any:
    """A checkpoint in float32, whatever it was stored in, ready to generate."""
    from transformers import AutoModelForCausalLM

    with quiet():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
