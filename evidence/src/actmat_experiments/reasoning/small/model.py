"""The small decoder: settings of the suite, a Llama from its config, and a tokenizer with one token per character.

Both are saved as any checkpoint is, so that the engine merges them and `from_pretrained` loads its output.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actmat_experiments.harness.training import Schedule

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


def save_model(model: Any, folder: Path) -> None:
    """A checkpoint with its tokenizer."""
    model.save_pretrained(folder)
    new_tokenizer().save_pretrained(folder)


@dataclass(frozen=True, slots=True)
class Learning:
    """Settings of reinforcement learning.

    Args:
        steps: optimizer steps.
        prompts: prompts per step.
        group: answers per prompt, which are compared with one another.
        rate: constant but for a short warm-up.
        temperature: of the answers that are rewarded.
    """

    steps: int
    prompts: int
    group: int
    rate: float
    temperature: float


@dataclass(frozen=True, slots=True)
class SmallSettings:
    """Settings of the suite, for `--set name=value`.

    The learning rate was chosen by the training reward of the expert `add` of seed 0, before anything was merged: at
    four times the rate its reward fell after fifty steps.

    Args:
        hidden, intermediate, layers, heads: of the decoder; about 0.8 million parameters by default.
        reliability: share of right answers in the text that the base reads.
        base_steps, base_batch, base_rate: pretraining; lines per step are of all tasks in equal parts.
        steps: optimizer steps of reinforcement learning.
        prompts: prompts per step.
        group: answers per prompt, which are compared with one another.
        rate: learning rate of reinforcement learning, constant but for a short warm-up.
        validation: prompts per task kept for choosing scales.
        test: prompts per task that are reported.
        samples: answers per test prompt.
        k: of `@k`, in addition to `@1`.
        temperature: of all answers, in training and evaluation.
        validation_samples: answers per validation prompt, when scales are chosen.
        measured: training prompts per task that statistics are measured on.
        scales: of the merged delta, tried on validation prompts; empty: nothing is tuned.
    """

    hidden: int = 128
    intermediate: int = 352
    layers: int = 4
    heads: int = 4
    reliability: float = 0.5
    base_steps: int = 800
    base_batch: int = 256
    base_rate: float = 2e-3
    steps: int = 100
    prompts: int = 32
    group: int = 8
    rate: float = 5e-5
    validation: int = 64
    test: int = 200
    samples: int = 16
    k: int = 8
    temperature: float = 1.0
    validation_samples: int = 4
    measured: int = 320
    scales: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0, 3.0)

    @property
    def size(self) -> Size:
        """Of the decoder."""
        return Size(self.hidden, self.intermediate, self.layers, self.heads)

    @property
    def learning(self) -> Learning:
        """Of the experts."""
        return Learning(self.steps, self.prompts, self.group, self.rate, self.temperature)

    @property
    def pretraining(self) -> Schedule:
        """Of the base; its epochs are single steps, because every line is drawn anew."""
        return Schedule(self.base_steps, self.base_batch, self.base_rate, weight_decay=0.05)
