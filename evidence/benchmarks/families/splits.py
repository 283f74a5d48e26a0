"""Splits of linear layers' outputs, observed while a model runs: the maps that its code takes out of one weight.

Beside the output of every linear layer runs a tensor of the same shape that holds the number of the weight's row in
every entry. Operations that only move entries (views, transposes, slices) are repeated on it. Where one of them leaves
some rows out (`chunk`, `split`, `unbind`, an index), the rows that it keeps are one piece of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_MOVES = {
    "transpose", "permute", "view", "reshape", "flatten", "unflatten", "contiguous", "squeeze", "unsqueeze", "movedim",
    "swapaxes", "swapdims", "narrow", "select", "clone", "float", "to", "mT", "T",
}  # fmt: skip
_CUTS = {"chunk", "split", "unbind", "tensor_split", "unsafe_chunk", "split_with_sizes"}
MOST_ENTRIES = 4_000_000


class _Watch(TorchFunctionMode):
    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names  # id of a weight -> its name
        self.rows: dict[
            int, tuple[Tensor, Tensor, str, bool]
        ] = {}  # id -> (the tensor, kept alive; rows; weight; whole)
        self.pieces: dict[str, set[frozenset[int]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "linear" and len(args) >= 2:
            self._start(out, args[1], 0)
        elif name == "addmm" and len(args) >= 3:
            self._start(out, args[2], 1)
        elif args and isinstance(args[0], Tensor) and id(args[0]) in self.rows:
            self._follow(func, name, args, kwargs, out)
        return out

    def _start(self, out: Tensor, weight: Any, axis: int) -> None:
        label = self.names.get(id(weight))
        if label is not None and out.numel() <= MOST_ENTRIES and out.shape[-1] == weight.shape[axis]:
            rows = torch.empty_like(out, dtype=torch.int64)  # strides alike, as views depend on them
            rows.copy_(torch.arange(out.shape[-1]).expand(out.shape))
            self.rows[id(out)] = (out, rows, label, True)

    def _follow(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        _, rows, label, whole = self.rows[id(args[0])]
        index = args[1] if name == "__getitem__" else None
        if name not in _MOVES | _CUTS and not (name == "__getitem__" and _is_plain(index)):
            return
        if name in ("float", "to"):
            moved: Any = rows
        else:
            moved = func(rows, *args[1:], **kwargs)
        outs, pieces = (out, moved) if isinstance(out, tuple | list) else ((out,), (moved,))
        every = int(rows.unique().numel())
        for one, piece in zip(outs, pieces, strict=True):
            kept = piece.unique()
            less = kept.numel() < every
            if less and whole and not (name == "__getitem__" and not _has_number(index)):
                self.pieces.setdefault(label, set()).add(frozenset(kept.tolist()))
            if isinstance(one, Tensor):
                self.rows[id(one)] = (one, piece, label, whole and not less)


def _is_plain(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(isinstance(p, int | slice) or p is Ellipsis or p is None for p in parts)


def _has_number(index: Any) -> bool:
    """True for an index with a number, which takes one map; slices of the last axis are those of rotary embeddings."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(p, int) and not isinstance(p, bool) for p in parts)


def observed_pieces(model: nn.Module, run: Callable[[], object]) -> dict[str, list[tuple[int, ...]]]:
    """Name of a 2-D parameter -> the sets of rows into which the code first splits its output; only those it splits."""
    names = {id(p): n for n, p in model.named_parameters() if p.ndim == 2}
    with _Watch(names) as watch, torch.no_grad():
        run()

    found = {label: _partition(pieces) for label, pieces in watch.pieces.items()}
    return {n: p for n, p in found.items() if len(p) > 1}


def _partition(pieces: set[frozenset[int]]) -> list[tuple[int, ...]]:
    """The coarsest partition of all rows that were seen that every piece is a union of."""
    signature: dict[frozenset[frozenset[int]], list[int]] = {}
    for row in sorted(set().union(*pieces)):
        signature.setdefault(frozenset(p for p in pieces if row in p), []).append(row)
    return [tuple(rows) for rows in signature.values()]
