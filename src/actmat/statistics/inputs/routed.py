"""Tokens routed to the experts of a mixture: padding is kept from them, and the tokens are counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from actmat.statistics.inputs.masks import Scope, Scopes, real_rows

__all__ = ["RoutedTokens"]


class RoutedTokens:
    """Removes padding from the inputs of stacked experts, and counts the tokens that come to them.

    Modules that own stacked (3-D) parameters and are called with states and the experts chosen for each of them are
    called with the rows of tokens only; in their output, rows of padding are zeros. Padding never reaches a token, so
    nothing else changes.

    Args:
        names: `id` of a parameter -> its name.

    Attributes:
        tokens: stacked parameter -> tokens that came to its router.
    """

    def __init__(self, model: nn.Module, names: Mapping[int, str], scopes: Scopes) -> None:
        self.tokens: dict[str, int] = {}
        self._scopes = scopes
        self._kept: list[tuple[Tensor | None, int] | None] = []
        self._handles: list[Any] = []
        self._stacks: dict[nn.Module, list[str]] = {}
        for module in model.modules():
            stacks = [names[id(p)] for p in module.parameters(recurse=False) if p.ndim == 3 and id(p) in names]
            if stacks:
                self._stacks[module] = stacks
                self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        found = self._rows([a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)])
        self._kept.append(found)
        if found is None:
            return None
        kept, n_rows = found
        for name in self._stacks[module]:
            self.tokens[name] = self.tokens.get(name, 0) + (n_rows if kept is None else int(kept.sum()))
        self._scopes.push(Scope())
        if kept is None:
            return None

        def tokens_of(value: Any) -> Any:
            return value[kept] if isinstance(value, Tensor) and value.ndim and value.shape[0] == n_rows else value

        return tuple(map(tokens_of, args)), {k: tokens_of(v) for k, v in kwargs.items()}

    def _rows(self, tensors: list[Tensor]) -> tuple[Tensor | None, int] | None:
        """Mask of the rows that are tokens (None: all), and their number; None: not a call with routed states."""
        chosen = any(not t.is_floating_point() for t in tensors)
        rows = {t.shape[0] for t in tensors if t.ndim == 2}
        if not chosen or len(rows) != 1 or tensors[0].ndim != 2:
            return None
        n_rows = rows.pop()
        kept = real_rows(torch.Size([n_rows]), self._scopes.current)
        return None if isinstance(kept, str) else (kept, n_rows)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        state = self._kept.pop() if self._kept else None
        if state is None:
            return None
        self._scopes.pop()
        kept, n_rows = state
        if kept is None or not isinstance(output, Tensor):
            return None
        whole = output.new_zeros(n_rows, *output.shape[1:])
        whole[kept] = output
        return whole
