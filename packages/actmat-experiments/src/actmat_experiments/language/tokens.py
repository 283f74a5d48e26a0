"""Items as token ids, and batches of them.

Shapes: `B` items of a batch, `C` choices, `S` tokens of the prompt, `L` tokens of an answer, its end included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actmat.errors import CheckpointError
from actmat_experiments.language.items import Item

__all__ = ["IGNORED", "Encoded", "batches_by_length", "choice_tensors", "encode", "padded", "training_tensors"]

IGNORED = -100
"""Label of a position that has no loss."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """An item in token ids; the prompt and every choice end with the end-of-sequence token."""

    prompt: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    label: int

    @property
    def target(self) -> tuple[int, ...]:
        """The right answer."""
        return self.choices[self.label]


def encode(tokenizer: Any, items: Sequence[Item], *, max_length: int) -> list[Encoded]:
    """Token ids of all items; prompts and choices are cut to `max_length`, the end token stays.

    Raises:
        CheckpointError: two choices of an item are the same tokens, so that no model can tell them apart.
    """
    if not items:
        return []
    prompts = _ids(tokenizer, [item.prompt for item in items], max_length)
    distinct = list(dict.fromkeys(choice for item in items for choice in item.choices))
    choices = dict(zip(distinct, _ids(tokenizer, distinct, max_length), strict=True))
    found = [
        Encoded(prompt, tuple(choices[c] for c in item.choices), item.label)
        for item, prompt in zip(items, prompts, strict=True)
    ]
    problems = [
        f"item {n}: {items[n].choices}" for n, item in enumerate(found) if len(set(item.choices)) < len(item.choices)
    ]
    if problems:
        raise CheckpointError(
            f"Choices that become the same tokens when cut to {max_length}: a larger length is needed.", problems
        )
    return found


def _ids(tokenizer: Any, texts: Sequence[str], max_length: int) -> list[tuple[int, ...]]:
    end = tokenizer.eos_token_id
    plain = tokenizer(list(texts), add_special_tokens=False, truncation=True, max_length=max_length - 1)["input_ids"]
    return [(*ids, end) for ids in plain]


def padded(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
    """`B x longest`, `fill` behind the end of shorter rows."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])


def training_tensors(items: Sequence[Encoded], pad: int) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask` (`B S`) and `labels` (`B L`, `IGNORED` behind the end)."""
    ids_BS = padded([item.prompt for item in items], pad)
    mask_BS = padded([[1] * len(item.prompt) for item in items], 0)
    return {"input_ids": ids_BS, "attention_mask": mask_BS, "labels": padded([i.target for i in items], IGNORED)}


def choice_tensors(items: Sequence[Encoded]) -> Tensor:
    """`B C L`: tokens of all choices, `IGNORED` behind the end and for choices that an item lacks."""
    n_choices = max(len(item.choices) for item in items)
    longest = max(len(choice) for item in items for choice in item.choices)
    found_BCL = torch.full((len(items), n_choices, longest), IGNORED)
    for b, item in enumerate(items):
        for c, choice in enumerate(item.choices):
            found_BCL[b, c, : len(choice)] = torch.tensor(choice)
    return found_BCL


def batches_by_length(items: Sequence[Encoded], max_tokens: int) -> Iterator[list[int]]:
    """Positions of items of similar length, together at most `max_tokens` after padding (one item may exceed it)."""
    batch: list[int] = []
    longest = 0
    for n in sorted(range(len(items)), key=lambda n: (len(items[n].prompt), n)):
        longest = max(longest, len(items[n].prompt))  # sorted: the newest is the longest
        if batch and (len(batch) + 1) * longest > max_tokens:
            yield batch
            batch, longest = [], len(items[n].prompt)
        batch.append(n)
    if batch:
        yield batch
