"""The base's tensors as adapters imply them: name, shape, orientation."""

from __future__ import annotations

from collections.abc import Sequence

from actmat.checkpoints.base import TensorSpec
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.modules import AdapterModule
from actmat.layout.fused import GATED

__all__ = ["is_transposed", "stored_spec"]


def _tensor_name(name: str, found: Sequence[AdapterModule | None], adapters: Sequence[Adapter]) -> str:
    """Name of the tensor that a module's delta belongs to, as the model has it."""
    plain = name.replace(".base_layer", "")
    for adapter, module in zip(adapters, found, strict=True):
        if module is not None and module.kind == "parameter":
            return f"{plain}.{_parameter_name(plain, module, adapter)}"
    return f"{plain}.weight"


def _parameter_name(owner: str, module: AdapterModule, adapter: Adapter) -> str:
    """Name of the bare parameter that a module adapts.

    Several parameters of one owner are told apart by their place in a nest of wrappers, whose order only the model
    knows. Of a pair that is gated (`gate_up_proj`, `down_proj`) the shapes tell as well: the first has two rows for
    every column of the second.
    """
    parameters = adapter.config.parameters_of(owner)
    if len(parameters) == 1:
        return parameters[0]
    nest = [m for m in adapter.modules.values() if m.name.replace(".base_layer", "") == owner]
    down = next((GATED[p] for p in parameters if GATED.get(p) in parameters), None)
    if down is not None and len(parameters) == len(nest) == 2:
        (other,) = (m for m in nest if m is not module)
        (a, b), (c, d) = module.shape[-2:], other.shape[-2:]
        if (a, b) in ((2 * d, c), (d, 2 * c)):
            return next(p for p in parameters if p != down)
        if (c, d) in ((2 * b, a), (b, 2 * a)):
            return down
    return module.name[len(owner) :].lstrip(".") or "weight"


def is_transposed(found: Sequence[AdapterModule | None], adapters: Sequence[Adapter]) -> bool:
    """True if the base stores the tensor of a module as `I O` (GPT-2's `Conv1D`)."""
    adapter, module = next((a, m) for a, m in zip(adapters, found, strict=True) if m is not None)
    return module.kind == "linear" and adapter.config.fan_in_fan_out


def stored_spec(name: str, found: Sequence[AdapterModule | None], adapters: Sequence[Adapter]) -> TensorSpec:
    """The base's tensor as the adapters imply it: its shape, transposed for Conv1D, opened up for convolutions."""
    adapter, module = next((a, m) for a, m in zip(adapters, found, strict=True) if m is not None)
    shape = module.shape
    if is_transposed(found, adapters):
        shape = (shape[1], shape[0])
    elif module.kind == "convolution":
        shape = (shape[0], *module.kernel)
    return TensorSpec(_tensor_name(name, found, adapters), shape, adapter.dtype, adapter.location)
