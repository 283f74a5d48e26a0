"""Rank classification by a language model: the answer is the option of the highest probability.

    score(c) = sum_l log p(c_l | prompt, c_1 ... c_{l-1}),   l over all tokens of the option and its end

Summed, not divided by the length, as in `language.exams`. A question is one row: its prompt once, then its options;
each attends to the prompt and to itself, at the positions that it would have behind the prompt.

Shapes: `N` questions, `C` options of each, `L` places of a row, `U` places whose outputs are used, `V` vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actmat_experiments.pretrained.decoder import Coded, Coder
from actmat_experiments.pretrained.generated import Question

_TOGETHER = 16
"""Questions of one pass, of similar length."""


class Row(NamedTuple):
    """A question in tokens.

    Args:
        prompt: at least one token.
        options: tokens of each option, its end included.
    """

    prompt: list[int]
    options: list[list[int]]


class Packed(NamedTuple):
    """Some questions as one batch.

    Args:
        inputs: `input_ids` and `position_ids`, `N L`; `attention_mask`, `N 1 L L`, added to the logits of attention.
        used: row and column of the `U` places whose outputs are used.
        targets: of every token of every option: place in `used`, the token, and which of all `N C` options it is of.
    """

    inputs: dict[str, Tensor]
    used: list[tuple[int, int]]
    targets: list[tuple[int, int, int]]


def rows_of(coder: Coder, questions: Sequence[Question]) -> list[Row]:
    """Token ids of questions and of all their options."""
    prompts: list[Coded] = coder(questions)
    options = coder([Question("", option) for q in questions for option in q.options])
    found, first = [], 0
    for question, coded in zip(questions, prompts, strict=True):
        n = len(question.options)
        found.append(Row(coded.prompt, [o.answer for o in options[first : first + n]]))
        first += n
    return found


def packed(rows: Sequence[Row]) -> Packed:
    """One batch of them."""
    lengths = [len(r.prompt) + sum(len(o) - 1 for o in r.options) for r in rows]
    ids_NL = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    places_NL, segment_NL = torch.zeros_like(ids_NL), torch.full_like(ids_NL, -1)
    used: list[tuple[int, int]] = []
    targets: list[tuple[int, int, int]] = []
    for n, (prompt, options) in enumerate(rows):
        tokens, places, segments = list(prompt), list(range(len(prompt))), [0] * len(prompt)
        used.append((n, len(prompt) - 1))
        start = len(used) - 1
        for c, option in enumerate(options):
            targets.append((start, option[0], n * len(options) + c))
            for i, (token, following) in enumerate(itertools.pairwise(option)):
                used.append((n, len(tokens)))
                targets.append((len(used) - 1, following, n * len(options) + c))
                tokens.append(token)
                places.append(len(prompt) + i)
                segments.append(c + 1)
        for into_NL, values in ((ids_NL, tokens), (places_NL, places), (segment_NL, segments)):
            into_NL[n, : len(values)] = torch.tensor(values)
    earlier_LL = torch.ones(max(lengths), max(lengths), dtype=torch.bool).tril()
    of_prompt_N1L = (segment_NL == 0)[:, None]
    seen_NLL = earlier_LL & (of_prompt_N1L | (segment_NL[:, None] == segment_NL[:, :, None]))
    mask_NLL = torch.zeros(seen_NLL.shape).masked_fill(~seen_NLL, torch.finfo(torch.float32).min)
    return Packed({"input_ids": ids_NL, "position_ids": places_NL, "attention_mask": mask_NLL[:, None]}, used, targets)


@torch.inference_mode()
def scores_of(model: Any, rows: Sequence[Row], device: str = "cpu") -> Tensor:
    """`N C`, on the CPU; all questions have equally many options."""
    n_options = len(rows[0].options)
    found_NC = torch.zeros(len(rows), n_options)
    order, model = sorted(range(len(rows)), key=lambda n: len(rows[n].prompt)), model.to(device)
    for start in range(0, len(rows), _TOGETHER):
        some = order[start : start + _TOGETHER]
        batch = packed([rows[n] for n in some])
        inputs = {name: value.to(device) for name, value in batch.inputs.items()}
        inputs["attention_mask"] = inputs["attention_mask"].to(_dtype(model))  # another dtype is added wrongly
        hidden_NLD = model.get_decoder()(**inputs, use_cache=False).last_hidden_state
        row_U, column_U = torch.tensor(batch.used, device=device).unbind(1)
        logits_UV = model.get_output_embeddings()(hidden_NLD[row_U, column_U]).float()
        place_T, token_T, option_T = torch.tensor(batch.targets, device=device).unbind(1)
        log_T = logits_UV[place_T, token_T] - logits_UV.logsumexp(1)[place_T]
        sums = torch.zeros(len(some) * n_options, device=device).index_add(0, option_T, log_T)
        found_NC[some] = sums.reshape(len(some), n_options).cpu()
    return found_NC


def _dtype(model: Any) -> torch.dtype:
    """That its attention computes in."""
    kind = model.device.type
    dtype: torch.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype
    return dtype
