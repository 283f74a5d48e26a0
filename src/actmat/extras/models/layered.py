"""Models whose weights do not fit: each layer is put in place while it runs.

The weights stay where transformers has them, on the host, which for safetensors in their own dtype means mapped files.
A block (a child of an outermost list of modules, such as a layer of a decoder) is copied to the device, on a CPU to
float32, before its forward pass, and the copy is dropped behind it. Parameters stay the same objects and are never
without values, so that adapters are put on them, and statistics bound to them, as on a whole model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from actmat.checkpoints.base import TensorSpec, torch_dtype
from actmat.errors import StatisticsError, format_size

AUTO_DTYPE = "auto"
FLOAT32 = "float32"
_BLOCK = re.compile(r"(.*?\.\d+)\.")
"""Beginning of a tensor's name that names its block."""


@dataclass(frozen=True)
class Placement:
    """Where a model runs, and in which dtype.

    Args:
        device: such as "cpu" or "cuda:1".
        dtype: "auto" is float32 on the CPU, elsewhere the checkpoint's own.
        limit: bytes of weights at a time; None: the model is held whole.
        source: origin of the limit, in words.
    """

    device: str = "cpu"
    dtype: str = AUTO_DTYPE
    limit: int | None = None
    source: str = ""

    @property
    def running(self) -> str:
        """The dtype of a model that runs.

        >>> Placement().running, Placement("cuda:0").running, Placement("cuda:0", "float16").running
        ('float32', 'auto', 'float16')
        """
        return FLOAT32 if self.dtype == AUTO_DTYPE and self.device == "cpu" else self.dtype

    def peak(self, specs: Mapping[str, TensorSpec]) -> int:
        """Bytes of weights that a model has in place at a time, estimated: all, or the largest layer and what stays."""
        whole = model_bytes(specs, self.running)
        if self.limit is None or whole <= self.limit:
            return whole
        sizes: Counter[str] = Counter()
        for spec in specs.values():
            block = _BLOCK.match(spec.name)
            sizes[block[1] if block else ""] += model_bytes({spec.name: spec}, self.running)
        stays = sizes.pop("", 0)
        return stays + max(sizes.values(), default=0)

    def layers(self, specs: Mapping[str, TensorSpec]) -> str:
        """The plan of a model that runs layer by layer, in words; empty if it is held whole.

        Raises:
            StatisticsError: a layer does not fit either.
        """
        whole, peak = model_bytes(specs, self.running), self.peak(specs)
        if self.limit is None or whole <= self.limit:
            return ""
        plan = f"weights of {format_size(whole)} on {self.device}, where {format_size(self.limit)} may be used"
        plan = f"{plan} ({self.source}): layer by layer, {format_size(peak)} at a time"
        if peak > self.limit:
            raise StatisticsError(f"{plan}. That does not fit. Fix: --set model_dtype=bfloat16, or more memory")
        return plan


ON_CPU = Placement()
"""A model that is held whole on the host."""


def model_bytes(specs: Mapping[str, TensorSpec], dtype: str) -> int:
    """Weights of a model in a dtype, or as they are stored."""
    sizes = {s.name: s.itemsize if dtype == AUTO_DTYPE else torch_dtype(dtype).itemsize for s in specs.values()}
    return sum(s.numel * sizes[s.name] for s in specs.values() if s.is_floating)


class _Mover:
    """Puts a block in place before its forward pass, and back behind it."""

    def __init__(self, place: Placement) -> None:
        self._device, self._widens = place.device, place.running == FLOAT32
        self._stored: list[tuple[Tensor, Tensor]] = []

    def moved(self, value: Tensor) -> Tensor:
        """A tensor on the device, in the dtype of the run."""
        with torch.inference_mode(False), torch.no_grad():
            dtype = torch.float32 if self._widens and value.is_floating_point() else value.dtype
            return value.to(self._device, dtype)

    def enter(self, block: nn.Module, _: Any) -> None:
        """Hook before a block's forward pass."""
        self._stored = [(p, p.data) for p in block.parameters()]
        for parameter, stored in self._stored:
            parameter.data = self.moved(stored)

    def leave(self, *_: Any) -> None:
        """Hook behind a block's forward pass, also if that fails."""
        for parameter, stored in self._stored:
            parameter.data = stored
        self._stored = []


def block_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """The outermost lists of modules, by their names."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    return {n: m for n, m in lists.items() if not any(n.startswith(f"{other}.") for other in lists)}


def run_in_layers(model: nn.Module, place: Placement) -> None:
    """Let a model on the host run layer by layer; all that is in no block is put in place for good."""
    mover = _Mover(place)
    blocks = [block for modules in block_lists(model).values() for block in modules]
    inside = {id(module) for block in blocks for module in block.modules()}
    for module in model.modules():
        module._buffers.update({n: b if b is None else mover.moved(b) for n, b in module._buffers.items()})
        for parameter in () if id(module) in inside else module.parameters(recurse=False):
            parameter.data = mover.moved(parameter.data)
    for block in blocks:
        block.register_forward_pre_hook(mover.enter)
        block.register_forward_hook(mover.leave, always_call=True)
    model.in_layers = True  # type: ignore[assignment]
