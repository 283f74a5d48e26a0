"""The two ways of adding masked deltas up: a weighted sum, or sign election.

The rules of the TIES, DARE, breadcrumbs and SCE family are `masked_sum` or `elect` with different masks, so they
share one pass over memory: for each place, mask every expert into a buffer that stays in the cache, then add up.

Shapes: `T` experts, `N` entries of a flattened tensor, `P` entries of one piece of it, `C` contested entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from actmat.linalg.masks import Mask
from actmat.linalg.places import PLACE, empty_result, walk
from actmat.linalg.threshold import true_indices

__all__ = ["ZeroSign", "elect", "masked_sum", "piece_workspace", "sign_balance"]

ZeroSign = Literal["majority", "positive", "zero"]
"""Sign elected where the votes cancel exactly: that of the sum of all elected signs (a draw elects nothing),
always plus, or none (the merged entry is 0)."""


def masked_sum(deltas: Sequence[Tensor], masks: Sequence[Mask], scales: Sequence[float]) -> Tensor:
    """`sum_t scale_t * mask_t(D_t)`, of the shape of a delta, in one pass."""
    out = empty_result(deltas)
    out_N = out.view(-1)
    buffer_P: Tensor | None = None
    for start, pieces_TP in walk(deltas):
        sum_P = out_N[start : start + pieces_TP[0].numel()]
        buffer_P = torch.empty_like(sum_P) if buffer_P is None else buffer_P[: sum_P.numel()]
        for t, (piece_P, mask, scale) in enumerate(zip(pieces_TP, masks, scales, strict=True)):
            if t == 0:
                mask.apply(piece_P, start, sum_P)
                sum_P.mul_(scale)
            else:
                mask.apply(piece_P, start, buffer_P)
                sum_P.add_(buffer_P, alpha=scale)
    return out


def elect(
    deltas: Sequence[Tensor],
    masks: Sequence[Mask],
    *,
    scales: Sequence[float],
    counts: Sequence[float],
    mix: Sequence[float] | None = None,
    reduce: Literal["mean", "sum"] = "mean",
    zero_sign: ZeroSign = "majority",
    majority: int | None = None,
) -> Tensor:
    """Sign election, then the mean or sum of the entries that agree with the elected sign.

    With `y_t = scale_t * mask_t(D_t)`, per entry: `s = sign(sum_t y_t)`, `A = {t: sign(y_t) = s}`,
    `D* = sum_{t in A} mix_t y_t / sum_{t in A} counts_t` (0 where `A` is empty).

    Args:
        deltas: one per expert, same shape.
        masks: one per expert.
        scales: factors of the votes.
        counts: what each agreeing expert adds to the divisor of the mean.
        mix: factors of the agreeing entries on top of their scale; 1 unless given.
        reduce: `"sum"` leaves the division out.
        zero_sign: what is elected where the votes cancel.
        majority: sign (-1, 0, 1) of the sum of the elected signs over more than this tensor; found over this tensor
            when it is not given and `zero_sign` asks for it.
    """
    out = empty_result(deltas)
    out_N = out.view(-1)
    mix = [1.0] * len(deltas) if mix is None else mix
    divisor = counts if reduce == "mean" else None
    settled = majority is not None or zero_sign != "majority"
    tie_break = {"positive": 1, "zero": 0, "majority": 1 if majority is None else majority}[zero_sign]
    balance, contested = 0, []
    votes_TP = [out_N.new_empty(min(PLACE, out_N.numel())) for _ in masks] if out_N.device.type == "cpu" else []
    for start, pieces_TP in walk(deltas):
        out_P = out_N[start : start + pieces_TP[0].numel()]
        parts_TP = []
        for t, (piece_P, mask, scale) in enumerate(zip(pieces_TP, masks, scales, strict=True)):
            vote_P = votes_TP[t][: out_P.numel()] if votes_TP else torch.empty_like(out_P)
            mask.apply(piece_P, start, vote_P)
            parts_TP.append(vote_P if scale == 1 else vote_P.mul_(scale))
        sign_P = _elected_sign(parts_TP)
        _agreeing(parts_TP, sign_P, tie_break, mix, divisor, out_P)
        if not settled:
            # Take plus for now: where votes cancelled, entries then differ from 0, and only those are looked at again.
            balance += _sum_of_signs(sign_P)
            index_C = true_indices(sign_P.eq_(0).mul_(out_P).bool())
            contested.append((index_C + start, [part[index_C] for part in parts_TP]))
    sign_of_all = (balance > 0) - (balance < 0)
    if sign_of_all != tie_break:
        for index_C, parts_TC in contested:
            fixed_C = torch.empty_like(parts_TC[0])
            _agreeing(parts_TC, torch.zeros_like(fixed_C), sign_of_all, mix, divisor, fixed_C)
            out_N[index_C] = fixed_C
    return out


def _elected_sign(parts_TP: Sequence[Tensor]) -> Tensor:
    total_P = parts_TP[0] + parts_TP[1] if len(parts_TP) > 1 else parts_TP[0].clone()
    for part_P in parts_TP[2:]:
        total_P.add_(part_P)
    return total_P.sign_()


def _sum_of_signs(sign_P: Tensor) -> int:
    """Exact: pieces have at most 2^24 entries, and floats of 4 bytes hold every integer up to there."""
    return int(sign_P.sum(dtype=torch.float64 if sign_P.itemsize < 4 else None))


def sign_balance(deltas: Sequence[Tensor], masks: Sequence[Mask]) -> int:
    """Sum over all entries of the elected signs: its sign is the majority that settles cancelled votes."""
    balance = 0
    for start, pieces_TP in walk(deltas):
        parts_TP = []
        for piece_P, mask in zip(pieces_TP, masks, strict=True):
            part_P = torch.empty_like(piece_P)
            mask.apply(piece_P, start, part_P)
            parts_TP.append(part_P)
        balance += _sum_of_signs(_elected_sign(parts_TP))
    return balance


def _agreeing(
    parts_TP: Sequence[Tensor],
    sign_P: Tensor,
    tie_break: int,
    mix: Sequence[float],
    counts: Sequence[float] | None,
    out_P: Tensor,
) -> None:
    """`out = sum mix y / sum counts` over the parts whose sign is the elected one.

    Plain arithmetic on floats throughout: boolean masks cost several times as much on a CPU.
    """
    # -1, 0, 1 plus half a tie-break has the sign that is wanted.
    elected_P = (sign_P + 0.5 * tie_break).sign_() if tie_break else sign_P
    divisor_P = torch.empty_like(out_P) if counts is not None else None
    agreeing_P = torch.empty_like(out_P)
    for t, part_P in enumerate(parts_TP):
        torch.mul(part_P, elected_P, out=agreeing_P)
        if t == 0:
            torch.threshold(agreeing_P, 0, 0, out=out_P)  # unlike `clamp_min`, it gives +0 for -0
            if divisor_P is not None and counts is not None:
                torch.sign(out_P, out=divisor_P)
                if counts[0] != 1:
                    divisor_P.mul_(counts[0])
            if mix[0] != 1:
                out_P.mul_(mix[0])
            continue
        out_P.add_(agreeing_P.clamp_min_(0), alpha=mix[t])
        if divisor_P is not None and counts is not None:
            divisor_P.add_(agreeing_P.sign_(), alpha=counts[t])
    out_P.mul_(elected_P)
    if divisor_P is not None:
        out_P.div_(divisor_P.add_(torch.eq(divisor_P, 0, out=agreeing_P)))  # a divisor of 0 becomes 1


def piece_workspace(entries: int, n_experts: int) -> int:
    """Elements of the piece buffers of one call of `elect` or `masked_sum`."""
    return min(entries, PLACE) * (n_experts + 5)
