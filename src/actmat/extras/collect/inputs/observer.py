"""Inputs of a model's linear maps, observed in its operations.

Operations are observed, not modules: `nn.Linear`, Conv1D, a router that calls `F.linear` itself, experts that are
slices of a stacked parameter, `x @ self.proj`. `nn.MultiheadAttention` passes all its weights to one function: the
inputs of q, k and v are its arguments; its output projection is replaced by the identity there and computed afterwards,
so that its input can be observed.

Shapes: `B` samples, `C` channels, `G` groups, `k` kernel, `I` in_features (`(C / G) prod(k)` of a convolution), `L` and
`S` positions, `N` rows.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from actmat.extras.collect.inputs.masks import MaskScope, Scopes, identity, real_keys, real_rows
from actmat.extras.collect.inputs.sums import Input, InputSums, LinearMap, ParameterIndex

_ATTENTION = inspect.signature(functional.multi_head_attention_forward)


class InputObserver(TorchFunctionMode):
    """Adds the inputs of every weight to sums while it is active.

    Attributes:
        absent: parameter -> reason why it cannot be measured.
        counts: parameter -> number of look-ups of each row of a table.
    """

    def __init__(self, parameters: Mapping[str, Tensor], scopes: Scopes, sums: InputSums) -> None:
        super().__init__()
        self.absent: dict[str, str] = {}
        self.counts: dict[str, Tensor] = {}
        self._index = ParameterIndex(parameters)
        self._scopes = scopes
        self._sums = sums
        self._eyes: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}
        self._observed: dict[Any, Callable[..., None]] = {functional.linear: self._linear, torch.addmm: self._addmm}
        for product in (torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__):
            self._observed[product] = self._matmul
        for convolution in (functional.conv1d, functional.conv2d, functional.conv3d):
            self._observed[convolution] = self._convolution
        self._observed[functional.embedding] = self._embedding
        self._observed[Tensor.data.__set__] = self._index.move  # type: ignore[attr-defined]  # of a layer in turn

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for every operation; operations made in here are not observed."""
        given = kwargs or {}
        if func is functional.multi_head_attention_forward:
            return self._attention(*args, **given)
        observe = self._observed.get(func)
        if observe is not None:
            with torch.no_grad():
                observe(*args, **given)
        return func(*args, **given)

    def _add(self, linear_map: LinearMap | None, inputs: Tensor, scope: MaskScope | None = None) -> None:
        """Add `inputs` (`* I`) of a linear map; None: the weight is not measured."""
        if linear_map is None:
            return
        kept = real_rows(inputs.shape[:-1], scope or self._scopes.of(inputs))
        width = inputs.shape[-1]
        self._add_rows(linear_map, inputs, kept, (width, 1), lambda: inputs.reshape(-1, width))

    def _add_rows(
        self,
        linear_map: LinearMap,
        inputs: Tensor,
        kept: Tensor | str | None,
        size: tuple[int, int],
        rows: Callable[[], Tensor],
        settings: tuple[Any, ...] = (),
    ) -> None:
        """Add rows made from `inputs`; `kept` as `real_rows` returns it, `settings`: of how the rows are made."""
        if isinstance(kept, str):
            self.absent[linear_map.parameter] = kept
            return

        def tokens() -> Tensor:
            return rows() if kept is None else rows()[kept.to(inputs.device)]

        key = (*identity(inputs), *settings)
        self._sums.add(linear_map, Input(key, size, tokens, inputs, self._scopes.is_passed(inputs)))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        self._add(self._index.linear_map(weight, out_axis=0), input)

    def _addmm(self, input: Tensor, mat1: Tensor, mat2: Tensor, **factors: Any) -> None:
        self._matmul(mat1, mat2)

    def _matmul(self, input: Tensor, other: Any = None, *, mat2: Any = None, **given: Any) -> None:
        other = mat2 if other is None else other
        if not isinstance(other, Tensor) or not isinstance(input, Tensor) or input.ndim == 0:
            return
        if other.ndim == 3 and input.ndim == 3 and (stack := self._index.stack(other)) is not None:
            for expert in range(stack[1]):
                self._add(LinearMap(stack[0], expert), input[expert])
            return
        self._add(self._index.linear_map(other, out_axis=1), input)

    def _embedding(self, input: Tensor, weight: Tensor, *args: Any, **given: Any) -> None:
        name = self._index.whole(weight)
        if name is None:
            return
        kept = real_rows(input.shape, self._scopes.current)
        if isinstance(kept, str):
            return  # a table of positions, looked up once for all samples
        ids = input.reshape(-1) if kept is None else input.reshape(-1)[kept.to(input.device)]
        counts = torch.bincount(ids.cpu(), minlength=weight.shape[0])
        self.counts[name] = self.counts[name] + counts if name in self.counts else counts

    def _convolution(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> None:
        name = self._index.whole(weight)
        if name is None:
            return
        batched = input if input.ndim == weight.ndim else input.unsqueeze(0)
        patches, lead = unfold(batched, tuple(weight.shape[2:]), stride, padding, dilation, groups)
        settings = (tuple(weight.shape[1:]), str(stride), str(padding), str(dilation), groups)
        kept = real_rows(lead, self._scopes.of(input))
        self._add_rows(LinearMap(name), input, kept, (weight[0].numel(), groups), patches, settings)

    def _attention(self, *args: Any, **kwargs: Any) -> Any:
        bound = _ATTENTION.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        query, key, value = given["query"], given["key"], given["value"]
        key_mask = real_keys(given["key_padding_mask"])
        keys = MaskScope(key_mask, seq_first=True) if key_mask is not None else self._seq_first(key)
        queries = keys if query is key else self._seq_first(query)
        with torch.no_grad():
            self._projections(given, (query, key, value), (queries, keys, keys))
        weight, bias = given["out_proj_weight"], given["out_proj_bias"]
        given["out_proj_weight"], given["out_proj_bias"] = self._eye(weight), None
        mixed, attention = functional.multi_head_attention_forward(*bound.args, **bound.kwargs)
        with torch.no_grad():
            self._add(self._index.linear_map(weight, out_axis=0), mixed, queries)
        return functional.linear(mixed, weight, bias), attention

    def _projections(
        self,
        given: Mapping[str, Any],
        inputs: tuple[Tensor, Tensor, Tensor],
        scopes: tuple[MaskScope, MaskScope, MaskScope],
    ) -> None:
        """Add the inputs of q, k and v."""
        if given["use_separate_proj_weight"]:
            for name, tensor, scope in zip("qkv", inputs, scopes, strict=True):
                self._add(self._index.linear_map(given[f"{name}_proj_weight"], out_axis=0), tensor, scope)
            return
        packed = self._index.whole(given["in_proj_weight"])
        if packed is None:
            return
        if inputs[0] is inputs[1] is inputs[2]:
            self._add(LinearMap(packed), inputs[0], scopes[0])
            return
        width = inputs[0].shape[-1]
        for k, (tensor, scope) in enumerate(zip(inputs, scopes, strict=True)):
            self._add(LinearMap(packed, rows=(k * width, (k + 1) * width)), tensor, scope)

    def _seq_first(self, tensor: Tensor) -> MaskScope:
        """The scope of an attention input, which has the shape `L B I` whatever the enclosing module uses."""
        scope = self._scopes.of(tensor)
        return MaskScope(scope.mask, scope.vectors, seq_first=True)

    def _eye(self, weight: Tensor) -> Tensor:
        key = (weight.shape[1], weight.dtype, weight.device)
        if key not in self._eyes:
            self._eyes[key] = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
        return self._eyes[key]


def unfold(
    input: Tensor, kernel: Sequence[int], stride: Any, padding: Any, dilation: Any, groups: int
) -> tuple[Callable[[], Tensor], torch.Size]:
    """Patches under the kernel as rows `N I`, or `N G I`, in the order of `weight.flatten(1)`.

    The input is `B C *spatial`; stride, padding ("same" and "valid" too) and dilation are as for `functional.conv2d`.
    The result is a function that computes the rows, and their leading shape `B *positions`.
    """
    n_axes = len(kernel)
    strides, dilations = _each(stride, n_axes), _each(dilation, n_axes)
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
    if padding == "same":
        before = [(s - 1) // 2 for s in spans]
        pads = list(zip(before, [s - 1 - b for s, b in zip(spans, before, strict=True)], strict=True))
    else:
        pads = [(p, p) for p in _each(0 if padding == "valid" else padding, n_axes)]
    sizes = [n + a + b for n, (a, b) in zip(input.shape[2:], pads, strict=True)]
    positions = [(n - s) // t + 1 for n, s, t in zip(sizes, spans, strides, strict=True)]

    def patches() -> Tensor:
        value = functional.pad(input, [n for pair in reversed(pads) for n in pair])
        for axis, (span, step, gap) in enumerate(zip(spans, strides, dilations, strict=True)):
            value = value.unfold(2 + axis, span, step)[..., ::gap]
        width = input.shape[1] // groups
        value = value.reshape(input.shape[0], groups, width, *positions, *kernel)
        order = [0, *range(3, 3 + n_axes), 1, 2, *range(3 + n_axes, 3 + 2 * n_axes)]
        rows = value.permute(order).reshape(-1, groups, width * math.prod(kernel))
        return rows.squeeze(1) if groups == 1 else rows

    return patches, torch.Size([input.shape[0], *positions])


def _each(value: Any, n: int) -> list[int]:
    return [int(v) for v in value] * (n if len(value) == 1 else 1) if isinstance(value, Sequence) else [int(value)] * n
