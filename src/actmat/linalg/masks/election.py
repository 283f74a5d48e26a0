"""The two ways of adding masked deltas up: a weighted sum, or sign election.

TIES, DARE, breadcrumbs, DELLA and SCE are `masked_sum` or `elect` with different masks, so they share one pass over
memory: for each chunk, mask every expert into a buffer that stays in the cache, then add up.

Shapes: `T` experts, `N` entries of a flattened tensor, `P` entries of one chunk of it, `S` entries of a chunk with
several votes (or all of them), `C` contested entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from actmat.linalg.chunks import CHUNK_ENTRIES, chunk_size, empty_result, walk
from actmat.linalg.masks.mask import Drop, Mask
from actmat.linalg.masks.threshold import true_indices

ZeroSign = Literal["majority", "positive", "zero"]
"""Sign elected where the votes cancel exactly: that of the sum of all elected signs (a draw elects nothing),
always plus, or none (the merged entry is 0)."""

FEW = 6
"""Entries with several votes are elected separately where random masks leave fewer than one in this many."""

MOST = 127
"""Largest number of experts whose flags are counted in bytes."""


def masked_sum(deltas: Sequence[Tensor], masks: Sequence[Mask], scales: Sequence[float]) -> Tensor:
    """`sum_t scale_t * mask_t(D_t)`, of the shape of a delta, in one pass."""
    out = empty_result(deltas)
    out_N = out.view(-1)
    buffer_P: Tensor | None = None
    for start, chunks_TP in walk(deltas):
        sum_P = out_N[start : start + chunks_TP[0].numel()]
        buffer_P = torch.empty_like(sum_P) if buffer_P is None else buffer_P[: sum_P.numel()]
        for t, (chunk_P, mask, scale) in enumerate(zip(chunks_TP, masks, scales, strict=True)):
            if t == 0:
                mask.apply(chunk_P, start, sum_P)
                sum_P.mul_(scale)
            else:
                mask.apply(chunk_P, start, buffer_P)
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
        scales: factors of the votes.
        counts: contribution of each agreeing expert to the divisor of the mean.
        mix: factors of the agreeing entries on top of their scale; 1 unless given.
        reduce: `"sum"` leaves the division out.
        zero_sign: the sign elected where the votes cancel.
        majority: sign (-1, 0, 1) of the sum of the elected signs over more than this tensor; computed over this
            tensor when it is not given and `zero_sign` needs it.
    """
    out = empty_result(deltas)
    out_N = out.view(-1)
    mix = [1.0] * len(deltas) if mix is None else mix
    divisor = counts if reduce == "mean" else None
    plain = all(factor == 1 for factor in (*mix, *(divisor or ())))
    drops = [mask for mask in masks if isinstance(mask, Drop)] if plain and out_N.device.type == "cpu" else []
    apart = len(masks) == len(drops) <= MOST and _share_of_several([drop.density for drop in drops]) < 1 / FEW
    election = _Election(
        masks=masks,
        drops=drops if apart else [],
        scales=scales,
        mix=mix,
        counts=divisor,
        tie_break={"positive": 1, "zero": 0, "majority": 1 if majority is None else majority}[zero_sign],
        settled=majority is not None or zero_sign != "majority",
        buffers=_Buffers(len(masks), out_N, apart=apart),
    )
    for start, chunks_TP in walk(deltas):
        election.add(chunks_TP, start, out_N[start : start + chunks_TP[0].numel()])
    election.settle(out_N)
    return out


@dataclass(slots=True)
class _Election:
    """The state of one call of `elect`, which explains `masks`, `scales`, `mix` and `counts` (None for a sum)."""

    masks: Sequence[Mask]
    drops: Sequence[Drop]  # the same masks, where entries with several votes are elected separately; else empty
    scales: Sequence[float]
    mix: Sequence[float]
    counts: Sequence[float] | None
    tie_break: int  # sign taken where the votes cancel; provisional unless `settled`
    settled: bool  # the tie-break does not depend on the sum of all elected signs
    buffers: _Buffers
    balance: int = 0  # sum of the elected signs so far
    # entries where the votes canceled, and the votes there
    contested: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)

    def add(self, chunks_TP: Sequence[Tensor], start: int, out_P: Tensor) -> None:
        """Write the merged entries of one chunk to `out_P`."""
        if self.drops:
            several_S, votes_TS = self.buffers.vote_apart(chunks_TP, start, self.drops, self.scales, out_P)
            sign_S, out_S, *work_3S = self.buffers.rows(several_S.numel())[:5]
            torch.index_select(out_P, 0, several_S, out=sign_S).sign_()
            if self.tie_break < 0:  # of one vote or none; zeros get the sign that `_agreeing` gives them
                out_P.neg_().add_(0.0).neg_()
            if not self.settled:
                self.balance += _sum_of_signs(self.buffers.signs(out_P))
            self._merge(votes_TS, sign_S, out_S, work_3S)
            out_P.index_copy_(0, several_S, out_S)
        else:
            several_S = None
            votes_TS = self.buffers.vote(chunks_TP, start, self.masks, self.scales, out_P)
            sign_S, out_S, work_3S = self.buffers.signs(out_P), out_P, self.buffers.rows(out_P.numel())[:3]
            if not self.settled:
                self.balance += _sum_of_signs(sign_S)
            self._merge(votes_TS, sign_S, out_S, work_3S)
        if not self.settled:
            # The provisional tie-break is plus. Only entries where the votes canceled and the result differs from 0
            # depend on it.
            index_C = true_indices(sign_S.eq_(0).mul_(out_S).bool())
            entry_C = index_C if several_S is None else several_S[index_C]
            self.contested.append((entry_C + start, [vote_S[index_C] for vote_S in votes_TS]))

    def settle(self, out_N: Tensor) -> None:
        """Merge the contested entries again where the sign of all is not the provisional one."""
        sign_of_all = (self.balance > 0) - (self.balance < 0)
        if sign_of_all == self.tie_break:
            return
        self.tie_break = sign_of_all
        for index_C, votes_TC in self.contested:
            fixed_C, sign_C, *work_3C = out_N.new_zeros(5, index_C.numel())
            self._merge(votes_TC, sign_C, fixed_C, work_3C)
            out_N[index_C] = fixed_C

    def _merge(self, votes_TP: Sequence[Tensor], sign_P: Tensor, out_P: Tensor, work_3P: Sequence[Tensor]) -> None:
        """`out = sum mix y / sum counts` over the votes whose sign is the elected one.

        Arithmetic on floats throughout: boolean masks cost several times as much on a CPU.
        """
        elected_P, divisor_P, agreeing_P = work_3P
        if self.tie_break:  # -1, 0, 1 plus half a tie-break has the wanted sign
            torch.add(sign_P, 0.5 * self.tie_break, out=elected_P).sign_()
        else:
            elected_P = sign_P
        torch.mul(votes_TP[0], elected_P, out=agreeing_P)
        torch.threshold(agreeing_P, 0, 0, out=out_P)  # unlike `clamp_min`, it gives +0 for -0
        if self.counts is not None:
            torch.sign(out_P, out=divisor_P)
            if self.counts[0] != 1:
                divisor_P.mul_(self.counts[0])
        if self.mix[0] != 1:
            out_P.mul_(self.mix[0])
        for t, vote_P in enumerate(votes_TP[1:], 1):
            torch.mul(vote_P, elected_P, out=agreeing_P)
            out_P.add_(agreeing_P.clamp_min_(0), alpha=self.mix[t])
            if self.counts is not None:
                divisor_P.add_(agreeing_P.sign_(), alpha=self.counts[t])
        out_P.mul_(elected_P)
        if self.counts is not None:
            out_P.div_(divisor_P.add_(torch.eq(divisor_P, 0, out=agreeing_P)))  # a divisor of 0 becomes 1


class _Buffers:
    """Memory for the votes of one call of `elect`, used again for each chunk: varying sizes would fragment the heap.

    An election is twenty passes over memory, but where at most one expert votes there is nothing to elect. Sparse
    random masks leave few entries with several votes, and with `apart` only these are elected.
    """

    def __init__(self, n_experts: int, like_N: Tensor, *, apart: bool) -> None:
        size = min(chunk_size(like_N.device), like_N.numel())
        self._few = size // FEW
        self._zero = like_N.new_zeros(())
        self._sign_P = like_N.new_empty(size)
        self._votes_TP = [like_N.new_empty(0 if apart else size) for _ in range(n_experts)]
        self._work_P = [like_N.new_empty(size) for _ in range(_work_rows(n_experts) if apart else 3)]

    def rows(self, numel: int) -> list[Tensor]:
        """Work rows of `numel` entries, the same memory at each call: three of a chunk, or `5 + T` of few entries."""
        if numel <= self._few:
            return [row_P[k * self._few :][:numel] for row_P in self._work_P for k in range(FEW)]
        if self._votes_TP[0].numel():
            return [row_P[:numel] for row_P in self._work_P]
        # a small tensor in which more entries than expected have several votes
        return list(self._sign_P.new_empty(5 + len(self._votes_TP), numel))

    def signs(self, sum_P: Tensor) -> Tensor:
        """Sign of each entry."""
        return torch.sign(sum_P, out=self._sign_P[: sum_P.numel()])

    def vote(
        self, chunks_TP: Sequence[Tensor], start: int, masks: Sequence[Mask], scales: Sequence[float], sum_P: Tensor
    ) -> list[Tensor]:
        """`y_t` of every expert, and their sum in `sum_P`."""
        votes_TP = [row_P[: sum_P.numel()] for row_P in self._votes_TP]
        for vote_P, chunk_P, mask, scale in zip(votes_TP, chunks_TP, masks, scales, strict=True):
            mask.apply(chunk_P, start, vote_P)
            if scale != 1:
                vote_P.mul_(scale)
        _add_up(votes_TP, sum_P)
        return votes_TP

    def vote_apart(
        self, chunks_TP: Sequence[Tensor], start: int, masks: Sequence[Drop], scales: Sequence[float], sum_P: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Indices of the entries with possibly several votes, and `y_t` there; the sum of all votes in `sum_P`."""
        flags_TP = [mask.flags(sum_P.numel(), start) for mask in masks]
        kept_P, count_P = self._sign_P[: sum_P.numel()], flags_TP[0].clone()
        # starting from +0, so that no sum is -0
        torch.addcmul(self._zero, chunks_TP[0], kept_P.copy_(flags_TP[0]), value=scales[0], out=sum_P)
        for chunk_P, flag_P, scale in zip(chunks_TP[1:], flags_TP[1:], scales[1:], strict=True):
            sum_P.addcmul_(chunk_P, kept_P.copy_(flag_P), value=scale)
            count_P.add_(flag_P)
        several_S = true_indices(count_P.gt_(1).view(torch.bool))
        votes_TS = self.rows(several_S.numel())[5 : 5 + len(masks)]
        for vote_S, chunk_P, flag_P, scale in zip(votes_TS, chunks_TP, flags_TP, scales, strict=True):
            torch.index_select(chunk_P, 0, several_S, out=vote_S)
            vote_S.mul_(flag_P.index_select(0, several_S)).mul_(scale)
        return several_S, votes_TS


def sign_balance(deltas: Sequence[Tensor], masks: Sequence[Mask]) -> int:
    """Sum over all entries of the elected signs: its sign is the majority that decides canceled votes."""
    balance = 0
    for start, chunks_TP in walk(deltas):
        votes_TP: list[Tensor] = []
        for chunk_P, mask in zip(chunks_TP, masks, strict=True):
            vote_P = torch.empty_like(chunk_P)
            mask.apply(chunk_P, start, vote_P)
            votes_TP.append(vote_P)
        balance += _sum_of_signs(_add_up(votes_TP, torch.empty_like(votes_TP[0])).sign_())
    return balance


def election_workspace(entries: int, n_experts: int) -> int:
    """Elements of the buffers of one call of `elect` or `masked_sum`: votes or flags, signs, work, a mask's own."""
    return min(entries, CHUNK_ENTRIES) * (n_experts + 2 + _work_rows(n_experts))


def _share_of_several(densities: Sequence[float]) -> float:
    """Expected share of entries that more than one of these independent masks keeps."""
    none = math.prod(1 - d for d in densities)
    one = sum(d * math.prod(1 - e for s, e in enumerate(densities) if s != t) for t, d in enumerate(densities))
    return 1 - none - one


def _work_rows(n_experts: int) -> int:
    """Rows of a chunk that hold three of a chunk, or sign, result, three more and the votes of few entries."""
    return max(3, -(-(n_experts + 5) // FEW))


def _add_up(votes_TP: Sequence[Tensor], out_P: Tensor) -> Tensor:
    """`sum_t y_t`: its sign is the elected one, 0 where the votes cancel."""
    if len(votes_TP) == 1:
        return out_P.copy_(votes_TP[0])
    torch.add(votes_TP[0], votes_TP[1], out=out_P)
    for vote_P in votes_TP[2:]:
        out_P.add_(vote_P)
    return out_P


def _sum_of_signs(sign_P: Tensor) -> int:
    """Sum of signs, exact: chunks have at most 2^24 entries, and float32 holds every integer up to there."""
    return int(sign_P.sum(dtype=torch.float64 if sign_P.itemsize < 4 else None))
