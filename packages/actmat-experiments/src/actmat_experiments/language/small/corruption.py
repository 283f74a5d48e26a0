"""Span corruption, the pretraining task of T5.

C. Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text transformer", JMLR 2020.

    text      a b c d e f g h
    prompt    a <0> d e <1> h        spans are replaced by sentinels, each used once, in order
    target    <0> b c <1> f g <2>    the spans, each behind its sentinel, and a last sentinel
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["corrupt", "span_lengths"]


def corrupt(
    ids: Sequence[int],
    sentinels: Sequence[int],
    generator: torch.Generator,
    *,
    density: float = 0.15,
    mean_span: float = 3.0,
) -> tuple[list[int], list[int]]:
    """Prompt and target of a text, both without an end token.

    Args:
        ids: at least two tokens.
        sentinels: tokens that stand for spans; one more than there are spans is needed, fewer make fewer spans.
        density: share of tokens in spans; at least one token is in a span, at least one is not.
        mean_span: mean length of a span.

    Raises:
        ValueError: fewer than two tokens or sentinels.
    """
    if len(ids) < 2 or len(sentinels) < 2:
        raise ValueError(f"{len(ids)} tokens and {len(sentinels)} sentinels: two of each are the least")
    n_hidden = min(max(round(len(ids) * density), 1), len(ids) - 1)
    n_shown = len(ids) - n_hidden
    n_spans = min(max(round(n_hidden / mean_span), 1), n_hidden, n_shown + 1, len(sentinels) - 1)
    spans = span_lengths(n_hidden, n_spans, generator)
    gaps = span_lengths(n_shown + 2, n_spans + 1, generator)  # the outer two may be empty: one less each
    gaps[0] -= 1
    gaps[-1] -= 1
    prompt, target, at = list[int](), list[int](), 0
    for sentinel, gap, span in zip(sentinels, gaps[:-1], spans, strict=False):
        prompt += [*ids[at : at + gap], sentinel]
        target += [sentinel, *ids[at + gap : at + gap + span]]
        at += gap + span
    return [*prompt, *ids[at:]], [*target, sentinels[n_spans]]


def span_lengths(total: int, parts: int, generator: torch.Generator) -> list[int]:
    """`parts` lengths of at least 1 that add up to `total >= parts`, all such divisions equally likely."""
    cuts = torch.randperm(total - 1, generator=generator)[: parts - 1].add(1).sort().values.tolist()
    ends = [*cuts, total]
    return [end - begin for begin, end in zip([0, *cuts], ends, strict=True)]
