"""Answers of a small model, and how many are right.

Shapes: `N` prompts, `S` samples per prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actmat_experiments.reasoning.small.model import new_tokenizer
from actmat_experiments.reasoning.small.puzzles import Puzzle
from actmat_experiments.reasoning.small.train import LONGEST_ANSWER

__all__ = ["answers", "right_answers"]

_ROWS = 2048


@torch.inference_mode()
def answers(model: Any, prompts: Sequence[str], n_samples: int, *, temperature: float, seed: int) -> list[list[str]]:
    """`n_samples` answers to every prompt, drawn from the model's whole distribution at a temperature.

    The global random state, from which the library draws, is set by `seed` inside and left as it was.
    """
    tokenizer, found = new_tokenizer(), []
    step = max(1, _ROWS // n_samples)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for start in range(0, len(prompts), step):
            some = prompts[start : start + step]
            batch = tokenizer(list(some), padding=True, return_tensors="pt")
            tokens = model.generate(
                **batch,
                do_sample=True,
                temperature=temperature,
                top_k=0,
                top_p=1.0,
                num_return_sequences=n_samples,
                max_new_tokens=LONGEST_ANSWER,
            )
            texts = tokenizer.batch_decode(tokens[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
            found += [texts[i * n_samples : (i + 1) * n_samples] for i in range(len(some))]
    return found


def right_answers(
    model: Any, puzzle: Puzzle, prompts: Sequence[str], n_samples: int, *, temperature: float, seed: int
) -> Tensor:
    """Bool `N S`: whether each answer is right."""
    drawn = answers(model, prompts, n_samples, temperature=temperature, seed=seed)
    return torch.tensor([[puzzle.right(p, a) for a in some] for p, some in zip(prompts, drawn, strict=True)])
