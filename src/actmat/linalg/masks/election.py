"""The two ways of adding masked deltas up: a weighted sum, or sign election.

TIES, DARE, breadcrumbs, DELLA and SCE are `masked_sum` or `elect` with different masks, so they share one pass over
memory: for each chunk, mask every expert into a buffer that stays in the cache, then add up.

Shapes: `T` experts, `N` entries of a flattened tensor, `P` entries of one chunk of it, `C` contested entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from actmat.linalg.chunks import CHUNK_ENTRIES, chunk_size, empty_result, walk
from actmat.linalg.masks.mask import Mask
from actmat.linalg.masks.threshold import true_indices

ZeroSign = Literal["majority", "positive", "zero"]
"""Sign elected where the votes cancel exactly: that of the sum of all elected signs (a draw elects nothing),
always plus, or none (the merged entry is 0)."""


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
    election = _Election(
        masks=masks,
        scales=scales,
        mix=[1.0] * len(deltas) if mix is None else mix,
        counts=counts if reduce == "mean" else None,
        tie_break={"positive": 1, "zero": 0, "majority": 1 if majority is None else majority}[zero_sign],
        settled=majority is not None or zero_sign != "majority",
        rows=list(out_N.new_empty(len(masks) + 4, min(chunk_size(out_N.device), out_N.numel()))),
    )
    for start, chunks_TP in walk(deltas):
        election.add(chunks_TP, start, out_N[start : start + chunks_TP[0].numel()])
    election.settle(out_N)
    return out


@dataclass(slots=True)
class _Election:
    """The state of one call of `elect`, which explains `masks`, `scales`, `mix` and `counts` (None for a sum)."""

    masks: Sequence[Mask]
    scales: Sequence[float]
    mix: Sequence[float]
    counts: Sequence[float] | None
    tie_break: int  # sign taken where the votes cancel; provisional unless `settled`
    settled: bool  # the tie-break does not depend on the sum of all elected signs
    rows: Sequence[Tensor]  # memory for signs, three more and the votes, used again for each chunk
    balance: int = 0  # sum of the elected signs so far
    # entries where the votes canceled, and the votes there
    contested: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)

    def add(self, chunks_TP: Sequence[Tensor], start: int, out_P: Tensor) -> None:
        """Write the merged entries of one chunk to `out_P`."""
        sign_P, *rows = (row_P[: out_P.numel()] for row_P in self.rows)
        work_3P, votes_TP = rows[:3], rows[3:]
        for vote_P, chunk_P, mask, scale in zip(votes_TP, chunks_TP, self.masks, self.scales, strict=True):
            mask.apply(chunk_P, start, vote_P)
            if scale != 1:
                vote_P.mul_(scale)
        torch.sign(_add_up(votes_TP, out_P), out=sign_P)
        if not self.settled:
            self.balance += _sum_of_signs(sign_P)
        self._merge(votes_TP, sign_P, out_P, work_3P)
        if not self.settled:
            # The provisional tie-break is plus. Only entries where the votes canceled and the result differs from 0
            # depend on it.
            index_C = true_indices(sign_P.eq_(0).mul_(out_P).bool())
            self.contested.append((index_C + start, [vote_P[index_C] for vote_P in votes_TP]))

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
    """Elements of the buffers of one call of `elect` or `masked_sum`: votes, signs, work, a mask's own."""
    return min(entries, CHUNK_ENTRIES) * (n_experts + 5)


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
