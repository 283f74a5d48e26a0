"""Questions as token ids, and rank classification: the answer is the choice of the highest probability.

    score(c) = sum_l log p(c_l | prompt, c_1 ... c_{l-1}),  l over all tokens of the choice and its end;  argmax over c

Summed, not divided by the length. The encoder reads a prompt once, and keys and values of the cross-attention are
computed once for all choices of a prompt.

Shapes: `N` items, `B` items of a batch, `C` choices, `S` tokens of the prompt, `L` tokens of an answer, its end
included, `V` vocabulary, `K` tokens that are looked up in one distribution.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from actmat.errors import CheckpointError
from actmat_experiments.language.questions import Item, TextTask

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
    """`input_ids`, `attention_mask` (`B S`), `labels` (`B L`, `IGNORED` behind the end), `decoder_attention_mask`."""
    labels_BL = padded([item.target for item in items], IGNORED)
    return {
        "input_ids": padded([item.prompt for item in items], pad),
        "attention_mask": padded([[1] * len(item.prompt) for item in items], 0),
        "labels": labels_BL,
        "decoder_attention_mask": (labels_BL != IGNORED).long(),
    }


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


MAX_TOKENS, MAX_TOKENS_CPU = 8192, 2048
"""Prompt tokens per batch, after padding; on a CPU fewer, so that the data stay in its caches."""


def chosen(model: Any, items: Sequence[Encoded], *, max_tokens: int | None = None) -> Tensor:
    """Position of the chosen answer of every item, `N`, the first of equals; on the CPU.

    Args:
        model: an encoder-decoder of transformers; it is left in its mode.
        max_tokens: prompt tokens of a batch, after padding; default: what suits the model's device.
    """
    found_N = torch.zeros(len(items), dtype=torch.long)
    was_training = model.training
    most = max_tokens or (MAX_TOKENS_CPU if model.device.type == "cpu" else MAX_TOKENS)
    model.eval()
    try:
        for batch in batches_by_length(items, most):
            scores_BC = score_choices(model, [items[n] for n in batch])
            found_N[batch] = scores_BC.argmax(1).cpu()
    finally:
        model.train(was_training)
    return found_N


@torch.inference_mode()
def score_choices(model: Any, items: Sequence[Encoded]) -> Tensor:
    """`B C`: summed log-probabilities, `-inf` for choices that an item lacks. The model decides on dropout: eval mode.

    The first step of the decoder is the same for all choices of an item and runs once; its cache is then repeated.
    """
    config, device = model.config, model.device
    ids_BS = padded([item.prompt for item in items], config.pad_token_id).to(device)
    mask_BS = padded([[1] * len(item.prompt) for item in items], 0).to(device)
    choices_BCL = choice_tensors(items).to(device)
    n_items, n_choices, longest = choices_BCL.shape

    encoded = model.get_encoder()(input_ids=ids_BS, attention_mask=mask_BS)
    start_B1 = torch.full((n_items, 1), config.decoder_start_token_id, device=device)
    first = model(encoder_outputs=encoded, attention_mask=mask_BS, decoder_input_ids=start_B1, use_cache=True)
    is_token_BCL, tokens_BCL = choices_BCL != IGNORED, choices_BCL.clamp(min=0)
    logs_BC = _log_probabilities(first.logits.squeeze(1), tokens_BCL[..., 0])
    if longest > 1:
        cache = first.past_key_values
        cache.batch_repeat_interleave(n_choices)
        encoded.last_hidden_state = encoded.last_hidden_state.repeat_interleave(n_choices, 0)
        rest = model(
            encoder_outputs=encoded,
            attention_mask=mask_BS.repeat_interleave(n_choices, 0),
            decoder_input_ids=tokens_BCL[..., :-1].flatten(0, 1),
            past_key_values=cache,
            use_cache=True,
        )
        n_rows, n_steps, _ = rest.logits.shape
        logs_NL = _log_probabilities(rest.logits.flatten(0, 1), tokens_BCL[..., 1:].reshape(n_rows * n_steps, 1))
        logs_BCL = logs_NL.reshape(n_items, n_choices, n_steps)
        logs_BC = logs_BC + logs_BCL.where(is_token_BCL[..., 1:], 0.0).sum(2)
    return logs_BC.masked_fill(~is_token_BCL.any(2), -torch.inf)


def _log_probabilities(logits_NV: Tensor, tokens_NK: Tensor) -> Tensor:
    """`N V, N K -> N K`: `log softmax(logits)[token]`, in float32 or better."""
    wide_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    return wide_NV.gather(1, tokens_NK) - wide_NV.logsumexp(1, keepdim=True)


Counts = Mapping[str, float]
"""`correct`, `total`, and `balanced`: the mean over right answers' positions of the share that is answered rightly."""


@dataclass(frozen=True, slots=True)
class Exam:
    """A task in token ids."""

    task: TextTask
    train: Sequence[Encoded] = field(repr=False)
    validation: Sequence[Encoded] = field(repr=False)
    test: Sequence[Encoded] = field(repr=False)
    max_length: int

    @property
    def name(self) -> str:
        """The task's."""
        return self.task.name

    @property
    def majority(self) -> tuple[int, int]:
        """The task's."""
        return self.task.majority

    def key(self, *parts: str) -> dict[str, Any]:
        """Key of a result on these parts."""
        return {**self.task.key(*parts), "max_length": self.max_length}


def make_exams(tokenizer: Any, tasks: Sequence[TextTask], *, max_length: int) -> list[Exam]:
    """The tasks in token ids."""

    def coded(items: Sequence[Item]) -> list[Encoded]:
        return encode(tokenizer, items, max_length=max_length)

    return [Exam(t, coded(t.train), coded(t.validation), coded(t.test), max_length) for t in tasks]


def examine(model: Any, items: Sequence[Encoded]) -> Counts:
    """Rank classification of all items."""
    return counts(chosen(model, items), torch.tensor([item.label for item in items]))


def counts(chosen_N: Tensor, labels_N: Tensor) -> Counts:
    """Count right choices.

    `balanced` weighs every position of the right answer equally: where nine of ten answers are "no", a model that
    always says so is right nine times of ten, and its balanced share is a half.
    """
    right_N = chosen_N == labels_N
    shares = [float(right_N[labels_N == label].double().mean()) for label in sorted(set(labels_N.tolist()))]
    return {"correct": float(right_N.sum()), "total": len(right_N), "balanced": sum(shares) / len(shares)}
