"""Reading along a model's linear layers: inputs `z`, outputs `y` and the gradients `g` at them, call by call.

Shapes: `N` tokens (all leading axes of an input, flattened), `O` out_features, `I` in_features.

A *tap* belongs to one stored weight that layout calls a matrix. Its values are split as in a merge: packed q,
k, v are three linear maps with one input. Reading changes no bit of what the model computes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from actmat.errors import RecipeError, did_you_mean
from actmat_experiments.core import TensorLayout, resolve_layout, tensor_specs


@dataclass(frozen=True, slots=True)
class LinearMap:
    """One logical matrix of a stored weight; `name` is the weight's, with the block if it is packed: `qkv.weight[q]`.

    `rows_O` are its rows among the outputs of the stored weight.
    """

    name: str
    rows_O: Tensor


@dataclass(frozen=True, slots=True)
class Tap:
    """One stored weight and the module that multiplies by it.

    `sequence_first`: the module sees `(tokens, samples)`, whatever the model was given.
    """

    weight_name: str
    weight: nn.Parameter
    layout: TensorLayout
    module: nn.Module
    maps: tuple[LinearMap, ...]
    sequence_first: bool = False

    def matrices(self, weight: Tensor) -> list[Tensor]:
        """The logical matrices, `O I` each, of a tensor stored like the weight."""
        return self.layout.to_matrices(weight)


OnCall = Callable[[Tap, Tensor, Tensor], None]
"""Called with a tap, its input `(..., I)` and its output `(..., O)`, once per forward call."""


def find_taps(
    model: nn.Module, config: Mapping[str, Any] | None = None, *, layers: Sequence[str] | None = None
) -> tuple[list[Tap], list[str]]:
    """The linear layers of a model, and the names of matrices that cannot be read along.

    `nn.Linear`, `nn.MultiheadAttention` (self-attention) and the `Conv1D` of GPT-2 are known. What else layout calls a
    matrix (stacked experts of a mixture, a table tied to the head) is in the second list.

    Args:
        config: parsed `config.json` for the layout; default: that of a transformers model.

    Raises:
        RecipeError: a pattern matches no linear layer.
    """
    if config is None:
        found: Any = getattr(model, "config", None)
        config = found.to_dict() if hasattr(found, "to_dict") else None
    parameters = dict(model.named_parameters())
    layouts = resolve_layout(tensor_specs(parameters, "<memory>", location="the model"), config)
    taps = {}
    for prefix, module in model.named_modules():
        for name, first in _weights_of(module):
            full = f"{prefix}.{name}" if prefix else name
            if full in parameters and layouts.tensors[full].role.is_matrix:
                taps[full] = _tap(full, parameters[full], layouts.tensors[full], module, first)
    missed = [n for n, layout in layouts.tensors.items() if layout.role.is_matrix and n not in taps]
    if layers is None:
        return list(taps.values()), missed
    for pattern in layers:
        if not any(fnmatchcase(n, pattern) for n in taps):
            raise RecipeError(
                f"No linear layer is called '{pattern}'.{did_you_mean(pattern, taps)} There are {len(taps)}, "
                f"such as {', '.join(list(taps)[:3])}."
            )
    return [t for n, t in taps.items() if any(fnmatchcase(n, p) for p in layers)], missed


def _weights_of(module: nn.Module) -> Iterator[tuple[str, bool]]:
    """Weights that a module multiplies its input by, and whether it does so with the sequence axis first."""
    if isinstance(module, nn.MultiheadAttention):
        if module._qkv_same_embed_dim:
            yield "in_proj_weight", module.batch_first
        yield "out_proj.weight", module.batch_first
    elif isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return  # the output projection of an nn.MultiheadAttention, which never calls it
    elif isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
        yield "weight", False


def _tap(name: str, weight: nn.Parameter, layout: TensorLayout, module: nn.Module, first: bool) -> Tap:
    n_rows = weight.shape[1] if layout.orientation == "IO" else weight.shape[0]
    rows = replace(layout, orientation="OI").to_matrices(torch.arange(n_rows).unsqueeze(1))
    labels = [f"{name}[{b.name}]" for b in layout.blocks] or [name]
    maps = tuple(LinearMap(label, r.flatten()) for label, r in zip(labels, rows, strict=True))
    return Tap(name, weight, layout, module, maps, first)


@contextlib.contextmanager
def reading(taps: Sequence[Tap], on_call: OnCall) -> Iterator[None]:
    """While the context lasts, every forward call of a tapped layer is told to `on_call`.

    `nn.MultiheadAttention` computes without calling modules; its weights are recognized where it hands them to
    `torch.nn.functional.linear`, during its own forward pass. Its fused inference kernel, which does not hand them
    over, is switched off in that time.
    """
    attention = {id(t.weight): t for t in taps if isinstance(t.module, nn.MultiheadAttention)}
    with contextlib.ExitStack() as stack:
        for tap in taps:
            if id(tap.weight) not in attention:
                stack.callback(tap.module.register_forward_hook(_hook(tap, on_call)).remove)
        for module in {id(t.module): t.module for t in attention.values()}.values():
            before, after = _around_attention(attention, on_call)
            stack.callback(module.register_forward_pre_hook(before).remove)
            stack.callback(module.register_forward_hook(after, always_call=True).remove)
        yield


def _around_attention(
    taps: Mapping[int, Tap], on_call: OnCall
) -> tuple[Callable[[nn.Module, Any], None], Callable[[nn.Module, Any, Any], None]]:
    """Hooks before and after a forward pass of one attention."""
    inside = contextlib.ExitStack()

    def before(module: nn.Module, inputs: Any) -> None:
        inside.enter_context(_LINEAR.watched(lambda w, z, y: _seen(taps, on_call, w, z, y)))

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        inside.close()

    return before, after


def _hook(tap: Tap, on_call: OnCall) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    def called(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        on_call(tap, inputs[0], output)

    return called


def _seen(taps: Mapping[int, Tap], on_call: OnCall, weight: Tensor, z: Tensor, y: Tensor) -> None:
    tap = taps.get(id(weight))
    if tap is not None:
        on_call(tap, z, y)


Watcher = Callable[[Tensor, Tensor, Tensor], None]


class _WatchedLinear:
    """While there are watchers, a function that tells them of its calls stands for `torch.nn.functional.linear`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watchers: list[Watcher] = []
        self._original = nn.functional.linear
        self._fast = True

    @contextlib.contextmanager
    def watched(self, watcher: Watcher) -> Iterator[None]:
        """`watcher(weight, input, output)` after every call, from whatever thread."""
        with self._lock:
            if not self._watchers:
                self._original, self._fast = nn.functional.linear, torch.backends.mha.get_fastpath_enabled()
                nn.functional.linear = self._call
                torch.backends.mha.set_fastpath_enabled(False)
            self._watchers.append(watcher)
        try:
            yield
        finally:
            with self._lock:
                self._watchers.remove(watcher)
                if not self._watchers:
                    nn.functional.linear = self._original
                    torch.backends.mha.set_fastpath_enabled(self._fast)

    def _call(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output = self._original(input, weight, bias)
        for watcher in list(self._watchers):
            watcher(weight, input, output)
        return output


_LINEAR = _WatchedLinear()
