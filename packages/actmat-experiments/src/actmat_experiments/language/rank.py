"""Rank classification: the answer is the choice to which the model gives the highest probability.

    score(c) = sum_l log p(c_l | prompt, c_1 ... c_{l-1}),  l over all tokens of the choice and its end;  argmax over c

Summed, not divided by the length. The encoder reads a prompt once, and keys and values of the cross-attention are
computed once for all choices of a prompt.

Shapes: `N` items, `B` items of a batch, `C` choices, `S` tokens of the prompt, `L` tokens of an answer, `V` vocabulary,
`K` tokens that are looked up in one distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from actmat_experiments.language.tokens import IGNORED, Encoded, batches_by_length, choice_tensors, padded

__all__ = ["chosen", "score_choices"]

MAX_TOKENS, MAX_TOKENS_CPU = 8192, 2048
"""Prompt tokens per batch, after padding; on a CPU fewer, so that what is computed on stays in its caches."""


def chosen(
    model: Any,
    items: Sequence[Encoded],
    *,
    max_tokens: int | None = None,
    on_batch: Callable[[int], object] = lambda n: None,
) -> Tensor:
    """Position of the chosen answer of every item, `N`, the first of equals; on the CPU.

    Args:
        model: an encoder-decoder of transformers; it is left in its mode.
        max_tokens: prompt tokens of a batch, after padding; default: what suits the model's device.
        on_batch: called with the number of items of each batch that is done.
    """
    found_N = torch.zeros(len(items), dtype=torch.long)
    was_training = model.training
    most = max_tokens or (MAX_TOKENS_CPU if model.device.type == "cpu" else MAX_TOKENS)
    model.eval()
    try:
        for batch in batches_by_length(items, most):
            scores_BC = score_choices(model, [items[n] for n in batch])
            found_N[batch] = scores_BC.argmax(1).cpu()
            on_batch(len(batch))
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
