"""The two ways of adding masked deltas up: a weighted sum, or sign election.

The rules of the TIES, DARE, breadcrumbs and SCE family are `masked_sum` or `elect` with different masks, so they
share one pass over memory: for each place, mask every expert into a buffer that stays in the cache, then add up.

Shapes: `T` experts, `N` entries of a flattened tensor, `P` entries of one piece of it, `S` entries of it with several
votes, `C` contested entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from actmat.linalg.masks import Drop, Mask
from actmat.linalg.places import PLACE, empty_result, place_size, walk
from actmat.linalg.threshold import true_indices

__all__ = ["ZeroSign", "elect", "masked_sum", "piece_workspace", "sign_balance"]

ZeroSign = Literal["majority", "positive", "zero"]
"""Sign elected where the votes cancel exactly: that of the sum of all elected signs (a draw elects nothing),
always plus, or none (the merged entry is 0)."""

FEW = 6
"""Entries with several votes are looked at apart where random masks leave fewer than one in so many."""

MOST = 127
"""Experts whose flags are counted in bytes."""


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
    plain = all(factor == 1 for factor in (*mix, *(divisor or ())))
    balance, contested = 0, []
    drops = [mask for mask in masks if isinstance(mask, Drop)] if plain and out_N.device.type == "cpu" else []
    apart = len(masks) == len(drops) <= MOST and _share_of_several([drop.density for drop in drops]) < 1 / FEW
    room = _Room(len(masks), out_N, apart=apart)
    for start, pieces_TP in walk(deltas):
        out_P = out_N[start : start + pieces_TP[0].numel()]
        if apart:
            several_S, votes_TS = room.vote_apart(pieces_TP, start, drops, scales, out_P)
            sign_S, out_S, *work_3S = room.rows(several_S.numel())[:5]
            torch.index_select(out_P, 0, several_S, out=sign_S).sign_()
            if tie_break < 0:  # of one vote or none; zeros get the sign that `_agreeing` gives them
                out_P.neg_().add_(0.0).neg_()
        else:
            several_S, votes_TS = None, room.vote(pieces_TP, start, masks, scales, out_P)
            sign_S, out_S, work_3S = room.signs(out_P), out_P, room.rows(out_P.numel())[:3]
        if not settled:
            balance += _sum_of_signs(room.signs(out_P) if apart else sign_S)
        _agreeing(votes_TS, sign_S, tie_break, mix, divisor, out_S, work_3S)
        if several_S is not None:
            out_P.index_copy_(0, several_S, out_S)
        if not settled:
            # Take plus for now: where votes cancelled, entries then differ from 0, and only those are looked at again.
            index_C = true_indices(sign_S.eq_(0).mul_(out_S).bool())
            place_C = index_C if several_S is None else several_S[index_C]
            contested.append((place_C + start, [vote_S[index_C] for vote_S in votes_TS]))
    sign_of_all = (balance > 0) - (balance < 0)
    if sign_of_all != tie_break:
        for index_C, votes_TC in contested:
            fixed_C, sign_C, *work_3C = out_N.new_zeros(5, index_C.numel())
            _agreeing(votes_TC, sign_C, sign_of_all, mix, divisor, fixed_C, work_3C)
            out_N[index_C] = fixed_C
    return out


class _Room:
    """Votes and memory of one call of `elect`, used again at each place: arrays of ever other sizes would leave holes.

    An election is twenty passes over memory, but where at most one expert votes there is nothing to elect. Sparse
    random masks leave few entries with several votes, and `apart` looks at these alone.
    """

    def __init__(self, n_experts: int, like_N: Tensor, *, apart: bool) -> None:
        size = min(place_size(like_N.device), like_N.numel())
        self._few = size // FEW
        self._zero = like_N.new_zeros(())
        self._sign_P = like_N.new_empty(size)
        self._votes_TP = [like_N.new_empty(0 if apart else size) for _ in range(n_experts)]
        self._work_P = [like_N.new_empty(size) for _ in range(_work_rows(n_experts) if apart else 3)]

    def rows(self, numel: int) -> list[Tensor]:
        """Rows to compute in, the same ones at each call: three of a place, or `5 + T` of few entries."""
        if numel <= self._few:
            return [row_P[k * self._few :][:numel] for row_P in self._work_P for k in range(FEW)]
        if self._votes_TP[0].numel():
            return [row_P[:numel] for row_P in self._work_P]
        return list(self._sign_P.new_empty(5 + len(self._votes_TP), numel))  # more than chance gives, of a small tensor

    def signs(self, sum_P: Tensor) -> Tensor:
        """Sign of each entry."""
        return torch.sign(sum_P, out=self._sign_P[: sum_P.numel()])

    def vote(
        self, pieces_TP: Sequence[Tensor], start: int, masks: Sequence[Mask], scales: Sequence[float], sum_P: Tensor
    ) -> list[Tensor]:
        """`y_t` of every expert, and their sum in `sum_P`."""
        votes_TP = [row_P[: sum_P.numel()] for row_P in self._votes_TP]
        for vote_P, piece_P, mask, scale in zip(votes_TP, pieces_TP, masks, scales, strict=True):
            mask.apply(piece_P, start, vote_P)
            if scale != 1:
                vote_P.mul_(scale)
        _add_up(votes_TP, sum_P)
        return votes_TP

    def vote_apart(
        self, pieces_TP: Sequence[Tensor], start: int, masks: Sequence[Drop], scales: Sequence[float], sum_P: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Indices of the entries that several experts may vote on and `y_t` there; the sum of all votes in `sum_P`."""
        flags_TP = [mask.flags(sum_P.numel(), start) for mask in masks]
        kept_P, count_P = self._sign_P[: sum_P.numel()], flags_TP[0].clone()
        # from +0 on, so that no sum is -0
        torch.addcmul(self._zero, pieces_TP[0], kept_P.copy_(flags_TP[0]), value=scales[0], out=sum_P)
        for piece_P, flag_P, scale in zip(pieces_TP[1:], flags_TP[1:], scales[1:], strict=True):
            sum_P.addcmul_(piece_P, kept_P.copy_(flag_P), value=scale)
            count_P.add_(flag_P)
        several_S = true_indices(count_P.gt_(1).view(torch.bool))
        votes_TS = self.rows(several_S.numel())[5 : 5 + len(masks)]
        for vote_S, piece_P, flag_P, scale in zip(votes_TS, pieces_TP, flags_TP, scales, strict=True):
            torch.index_select(piece_P, 0, several_S, out=vote_S)
            vote_S.mul_(flag_P.index_select(0, several_S)).mul_(scale)
        return several_S, votes_TS


def _share_of_several(densities: Sequence[float]) -> float:
    """Expected share of entries that more than one of these independent masks keeps."""
    none = math.prod(1 - d for d in densities)
    one = sum(d * math.prod(1 - e for s, e in enumerate(densities) if s != t) for t, d in enumerate(densities))
    return 1 - none - one


def _work_rows(n_experts: int) -> int:
    """Rows of a place that hold three of a place, or sign, result, three more and the votes of few entries."""
    return max(3, -(-(n_experts + 5) // FEW))


def _add_up(votes_TP: Sequence[Tensor], out_P: Tensor) -> Tensor:
    """`sum_t y_t`: its sign is the elected one, 0 where the votes cancel."""
    first_P, *others_TP = votes_TP
    if not others_TP:
        return out_P.copy_(first_P)
    torch.add(first_P, others_TP[0], out=out_P)
    for vote_P in others_TP[1:]:
        out_P.add_(vote_P)
    return out_P


def _sum_of_signs(sign_P: Tensor) -> int:
    """Exact: pieces have at most 2^24 entries, and floats of 4 bytes hold every integer up to there."""
    return int(sign_P.sum(dtype=torch.float64 if sign_P.itemsize < 4 else None))


def sign_balance(deltas: Sequence[Tensor], masks: Sequence[Mask]) -> int:
    """Sum over all entries of the elected signs: its sign is the majority that settles cancelled votes."""
    balance = 0
    for start, pieces_TP in walk(deltas):
        votes_TP: list[Tensor] = []
        for piece_P, mask in zip(pieces_TP, masks, strict=True):
            vote_P = torch.empty_like(piece_P)
            mask.apply(piece_P, start, vote_P)
            votes_TP.append(vote_P)
        balance += _sum_of_signs(_add_up(votes_TP, torch.empty_like(votes_TP[0])).sign_())
    return balance


def _agreeing(
    votes_TP: Sequence[Tensor],
    sign_P: Tensor,
    tie_break: int,
    mix: Sequence[float],
    counts: Sequence[float] | None,
    out_P: Tensor,
    work_3P: Sequence[Tensor],
) -> None:
    """`out = sum mix y / sum counts` over the votes whose sign is the elected one.

    Plain arithmetic on floats throughout: boolean masks cost several times as much on a CPU.
    """
    elected_P, divisor_P, agreeing_P = work_3P
    if tie_break:  # -1, 0, 1 plus half a tie-break has the sign that is wanted
        torch.add(sign_P, 0.5 * tie_break, out=elected_P).sign_()
    else:
        elected_P = sign_P
    for t, vote_P in enumerate(votes_TP):
        torch.mul(vote_P, elected_P, out=agreeing_P)
        if t == 0:
            torch.threshold(agreeing_P, 0, 0, out=out_P)  # unlike `clamp_min`, it gives +0 for -0
            if counts is not None:
                torch.sign(out_P, out=divisor_P)
                if counts[0] != 1:
                    divisor_P.mul_(counts[0])
            if mix[0] != 1:
                out_P.mul_(mix[0])
            continue
        out_P.add_(agreeing_P.clamp_min_(0), alpha=mix[t])
        if counts is not None:
            divisor_P.add_(agreeing_P.sign_(), alpha=counts[t])
    out_P.mul_(elected_P)
    if counts is not None:
        out_P.div_(divisor_P.add_(torch.eq(divisor_P, 0, out=agreeing_P)))  # a divisor of 0 becomes 1


def piece_workspace(entries: int, n_experts: int) -> int:
    """Elements of the buffers of one call of `elect` or `masked_sum`: votes or flags, signs, work, a mask's own."""
    return min(entries, PLACE) * (n_experts + 2 + _work_rows(n_experts))
