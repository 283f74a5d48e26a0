"""Masks of tokens and padding for the rows of an activation, and the tokens routed to the experts of a mixture.

A *scope* is open while a module runs that takes the model's inputs (an encoder, a decoder, a vision tower); its mask is
the one of this call. Modules inside it see only hidden states and use the mask of the enclosing scope. Tensors passed
from one stack to another (`encoder_hidden_states`, the `memory` of `nn.TransformerDecoder`) keep the mask that they
came with.

Shapes: `B` samples, `S` positions; masks are `B S`, True for a token.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

INPUTS = ("input_ids", "inputs_embeds", "decoder_input_ids", "pixel_values", "input_features", "input_values")
SIGNALS = frozenset({"pixel_values", "input_features", "input_values"})
TORCH_MODULES = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoder, nn.TransformerDecoderLayer)


@dataclass(frozen=True)
class MaskScope:
    """Meaning of the rows of activations inside one call."""

    mask: Tensor | None = None  # `B S`, or None: every row is a token
    vectors: frozenset[int] = frozenset()  # numbers of rows that mean one vector per sample (a pooled state)
    seq_first: bool = False  # activations have the shape `S B ...`
    padded: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "padded", self.mask is not None and not bool(self.mask.all()))


def real_rows(lead: torch.Size, scope: MaskScope) -> Tensor | str | None:
    """Flat mask over rows of shape `lead`; None: all are tokens; a text: the reason why the mask cannot be applied."""
    mask = scope.mask
    if mask is None or not scope.padded:
        return None
    n_samples, length = mask.shape
    shape = tuple(lead)
    if scope.seq_first and shape == (length, n_samples):
        return mask.T.reshape(-1)
    if shape in ((n_samples, length), (n_samples * length,)):
        return mask.reshape(-1)
    if len(shape) > 2 and shape[:2] == (n_samples, length):
        return mask.reshape(n_samples, length, *(1,) * (len(shape) - 2)).expand(shape).reshape(-1)
    if len(shape) == 1 and shape[0] in scope.vectors:
        return None
    return (
        f"its inputs come as {' x '.join(map(str, shape))} rows, which the model's mask ({n_samples} x {length}) does "
        "not divide into tokens and padding; collect with batches without padding (--set batch_size=1)"
    )


def identity(tensor: Tensor) -> tuple[int, int, int, int]:
    """Identity of a live tensor's values: address, size, width and number of changes in place."""
    version = 0 if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), tensor.numel(), tensor.shape[-1] if tensor.ndim else 1, version


class Scopes:
    """The stack of open scopes, maintained by hooks on the modules that open one."""

    def __init__(self, model: nn.Module) -> None:
        self._stack: list[MaskScope] = [MaskScope()]
        self._passed: list[tuple[Tensor, Tensor | None]] = []
        self._handles: list[Any] = []
        for module in model.modules():
            parameters = _parameters(module)
            opens = any(n in parameters for n in INPUTS) or isinstance(module, TORCH_MODULES)
            if opens or (module is model and "attention_mask" in parameters):
                enter = module.register_forward_pre_hook(self._enter, with_kwargs=True)
                leave = module.register_forward_hook(self._leave, with_kwargs=True, always_call=True)
                self._handles += [enter, leave]

    @property
    def current(self) -> MaskScope:
        """The innermost scope."""
        return self._stack[-1]

    def push(self, scope: MaskScope) -> None:
        """Open a scope by hand."""
        self._stack.append(scope)

    def pop(self) -> None:
        """Close the innermost scope."""
        self._stack.pop()

    def of(self, tensor: Tensor) -> MaskScope:
        """The scope whose mask applies to this activation."""
        for passed, mask in self._passed:
            if identity(passed)[:2] == identity(tensor)[:2]:
                return MaskScope(mask, self.current.vectors, self.current.seq_first)
        return self.current

    def is_passed(self, tensor: Tensor) -> bool:
        """Return True for a tensor passed on from another stack, which stays alive to the end of the pass."""
        return any(identity(f)[:2] == identity(tensor)[:2] for f, _ in self._passed)

    def reset(self) -> None:
        """Discard the state of one pass."""
        del self._stack[1:]
        self._passed.clear()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.reset()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = _arguments(module, args, kwargs)
        if isinstance(module, TORCH_MODULES):
            self._stack.append(self._of_torch(module, arguments))
            return
        self._pass_on(arguments.get("encoder_hidden_states"), arguments.get("encoder_attention_mask"))
        parameters = _parameters(module)
        name = "decoder_attention_mask" if "decoder_input_ids" in parameters else "attention_mask"
        mask = arguments.get(name)
        inputs = [n for n in INPUTS if isinstance(v := arguments.get(n), Tensor) and v.ndim]
        prepared = isinstance(mask, Tensor) and mask.ndim != 2
        if prepared or (name not in parameters and not any(n in SIGNALS for n in inputs)):
            self._stack.append(self.current)  # an inner module, given a mask that the model has transformed
            return
        self._stack.append(MaskScope(_two_axes(mask), frozenset(arguments[n].shape[0] for n in inputs)))

    def _of_torch(self, module: nn.Module, arguments: Mapping[str, Any]) -> MaskScope:
        """MaskScope of PyTorch's own transformer modules; a layer inside a stack is called with the stack's masks."""
        decoder = isinstance(module, nn.TransformerDecoder | nn.TransformerDecoderLayer)
        seq_first = not _batch_first(module)
        if decoder:
            self._pass_on(arguments.get("memory"), real_keys(arguments.get("memory_key_padding_mask")))
        tokens = arguments.get("tgt" if decoder else "src")
        padding = real_keys(arguments.get("tgt_key_padding_mask" if decoder else "src_key_padding_mask"))
        samples = tokens.shape[1 if seq_first else 0] if isinstance(tokens, Tensor) and tokens.ndim == 3 else 1
        return MaskScope(padding, frozenset({samples}), seq_first)

    def _pass_on(self, tensor: Any, mask: Any) -> None:
        if isinstance(tensor, Tensor) and not self.is_passed(tensor):
            self._passed.append((tensor, _two_axes(mask)))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if len(self._stack) > 1:
            self._stack.pop()


def real_keys(key_padding_mask: Any) -> Tensor | None:
    """PyTorch's `key_padding_mask` (True or -inf for padding) as a mask of tokens."""
    if not isinstance(key_padding_mask, Tensor):
        return None
    mask = key_padding_mask if key_padding_mask.ndim == 2 else key_padding_mask.unsqueeze(0)
    return ~mask if mask.dtype == torch.bool else mask == 0


def _two_axes(mask: Any) -> Tensor | None:
    return mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None


def _batch_first(module: nn.Module) -> bool:
    attention = next((m for m in module.modules() if isinstance(m, nn.MultiheadAttention)), None)
    return attention is None or attention.batch_first


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # a compiled or scripted forward has no signature
        return {}


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call by name."""
    try:
        bound = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    except TypeError:
        return dict(kwargs)
    return {**bound, **bound.get("kwargs", {})}


class RoutedTokens:
    """Removes padding from the inputs of stacked experts, and counts the tokens that come to them.

    Modules that own stacked (3-D) parameters and are called with states and the experts chosen for each of them are
    called with the rows of tokens only; in their output, rows of padding are zeros. Padding never reaches a token, so
    nothing else changes. `names` maps the `id` of a parameter to its name, `tokens` a stack to its number of tokens.
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
        rows = self._rows([a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)])
        self._kept.append(rows)
        if rows is None:
            return None
        kept, n_rows = rows
        for name in self._stacks[module]:
            self.tokens[name] = self.tokens.get(name, 0) + (n_rows if kept is None else int(kept.sum()))
        self._scopes.push(MaskScope())
        if kept is None:
            return None

        def tokens_of(value: Any) -> Any:
            return value[kept] if isinstance(value, Tensor) and value.ndim and value.shape[0] == n_rows else value

        return tuple(map(tokens_of, args)), {k: tokens_of(v) for k, v in kwargs.items()}

    def _rows(self, tensors: list[Tensor]) -> tuple[Tensor | None, int] | None:
        """Mask of the rows that are tokens (None: all), and their number; None: not a call with routed states."""
        rows = {t.shape[0] for t in tensors if t.ndim == 2}
        if all(t.is_floating_point() for t in tensors) or len(rows) != 1 or tensors[0].ndim != 2:
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
