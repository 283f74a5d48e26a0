"""Run a model and sum the inputs of its linear maps; name the sums after tensors of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Generic

import torch
from torch import nn

from actmat.extras.collect.batches import Batch, call_model, named_tensors
from actmat.extras.collect.inputs.masks import RoutedTokens, Scope, Scopes
from actmat.extras.collect.inputs.observer import Observer
from actmat.extras.collect.inputs.sums import InputSums, LinearMap, S
from actmat.extras.collect.settings import TokenMask
from actmat.statistics.binding import Binding

__all__ = ["LayerInputs", "NamedSum"]


@dataclass(frozen=True)
class NamedSum(Generic[S]):
    """A sum over the inputs of some layers."""

    key: str  # name of the first stored tensor that reads the input, made unique
    sum: S
    parameter: str  # the parameter that reads the input, by its name in memory
    readers: tuple[LinearMap, ...]  # all linear maps that read it, by the names of stored tensors


class LayerInputs(Generic[S]):
    """Sums, each made by `make(width, groups)`, over the inputs of the layers of a model; padding is left out.

    Hooks are put on the model until `close`. `share` recognises inputs that several layers read; `mask` gives the mask
    of a batch, for models whose calls do not carry one; `only` names the parameters to measure.

    Attributes:
        tokens: stack of experts -> tokens that came to its router.
        counts: table -> number of look-ups of each row.
    """

    def __init__(
        self,
        model: nn.Module,
        binding: Binding,
        make: Callable[[int, int], S],
        *,
        share: bool = True,
        mask: TokenMask | None = None,
        only: Collection[str] | None = None,
    ) -> None:
        self._model = model
        self._binding = binding
        self._mask = mask
        self._sums: InputSums[S] = InputSums(make, share=share)
        self._scopes = Scopes(model)
        weights = {n: w for n, w in binding.weights().items() if only is None or n in only}
        self._routed = RoutedTokens(model, {id(p): n for n, p in weights.items()}, self._scopes)
        self._observer = Observer(weights, self._scopes, self._sums)
        self.tokens = self._routed.tokens
        self.counts = self._observer.counts

    def add(self, batch: Batch) -> None:
        """Run the model on a batch."""
        if self._mask is not None:
            mask = self._mask(batch)
            sizes = frozenset(t.shape[0] for t in named_tensors(batch).values())
            self._scopes.push(Scope(None if mask is None else mask.bool(), sizes))
        try:
            with torch.no_grad(), self._observer:
                call_model(self._model, batch)
            self._sums.end_pass()
        finally:
            self._scopes.reset()

    def close(self) -> None:
        """Remove all hooks."""
        self._routed.close()
        self._scopes.close()

    def sums(self) -> Iterator[NamedSum[S]]:
        """Every sum that a stored tensor reads, in the order of first use."""
        refused = self._refused()
        taken: set[str] = set()
        for shared in self._sums.shared():
            used = [(m, self._readers(m)) for m in shared.members if m.parameter not in refused]
            if not used:
                continue
            first, its_readers = used[0]
            key = its_readers[0].parameter
            key += "" if first.expert is None or len(its_readers) > 1 else f".{first.expert}"
            key += "" if first.rows is None else f".{first.rows[0]}"
            while key in taken:
                key += "'"
            taken.add(key)
            yield NamedSum(key, shared.sum, first.parameter, tuple(r for _, readers in used for r in readers))

    def absent(self, present: set[str]) -> dict[str, str]:
        """Stored matrices that are not in `present`, and why no input of them was summed."""
        refused = self._refused()
        out: dict[str, str] = {}
        for name, parameter in self._binding.parameters.items():
            pieces = self._binding.located[name].slices if parameter.ndim >= 2 and name not in self.counts else ()
            for piece in pieces:
                if piece.name not in present:
                    why = "no input of it was seen" if piece.index is None else "no token of the data was routed to it"
                    out[piece.name] = refused.get(name, why)
        return out

    def _readers(self, linear_map: LinearMap) -> list[LinearMap]:
        """Stored tensors of a linear map; the expert is named where they are stacked on disk as well."""
        slices = self._binding.located[linear_map.parameter].slices
        return [
            LinearMap(s.name, linear_map.expert if s.index is None else None, linear_map.rows)
            for s in slices
            if s.index in (None, linear_map.expert)
        ]

    def _refused(self) -> dict[str, str]:
        """Parameters whose inputs cannot be told, or that were used in two ways, and why."""
        uses: dict[str, set[bool]] = {}
        for shared in self._sums.shared():
            for member in shared.members:
                uses.setdefault(member.parameter, set()).add(member.rows is None)
        mixed = {n: "it was used as a whole and in parts" for n, kinds in uses.items() if len(kinds) > 1}
        return {**self._observer.absent, **mixed}
