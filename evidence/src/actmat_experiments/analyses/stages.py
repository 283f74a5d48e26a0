"""The layers of a network in the order of execution, as parts whose parameters can be replaced one after the other.

Shapes: `N` samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from actmat_experiments.analyses.taps import Tap, find_taps, reading


@dataclass(frozen=True, slots=True)
class Stage:
    """Parameters that are replaced together: those of one module, or of one linear map read along by `tap`."""

    name: str
    parameters: tuple[str, ...]
    module: nn.Module | None = None
    tap: Tap | None = None


def stages_of(model: nn.Module, run: Callable[[], object]) -> list[Stage]:
    """The stages of a model in the order in which a forward pass first reaches them.

    Parameters that no module of their own reads (class tokens) come first; their stage has no output.
    """
    taps, _ = find_taps(model)
    by_weight = {t.weight_name: t for t in taps}
    order: list[str] = []
    modules = {name: m for name, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None}
    handles = [
        m.register_forward_pre_hook(lambda module, given, name=name: order.append(name)) for name, m in modules.items()
    ]
    try:
        with torch.no_grad(), reading(taps, lambda tap, z, y: order.append(tap.weight_name)):
            run()
    finally:
        for handle in handles:
            handle.remove()
    found: dict[str, Stage] = {}
    left = dict.fromkeys(name for name, _ in model.named_parameters())
    for name in dict.fromkeys(order):
        tap = by_weight.get(name) or by_weight.get(f"{name}.weight")
        if tap is not None:
            bias = tap.weight_name.replace("weight", "bias")
            own = [n for n in (tap.weight_name, bias) if n in left]
            stage = Stage(tap.weight_name, tuple(own), tap=tap)
        elif isinstance(modules[name], nn.MultiheadAttention):
            continue  # its two maps are stages of their own
        else:
            own = [n for n in left if n.rpartition(".")[0] == name]
            stage = Stage(name or "model", tuple(own), module=modules[name])
        if own:
            found[stage.name] = stage
            for parameter in own:
                del left[parameter]
    return [*([Stage("parameters without a module", tuple(left))] if left else []), *found.values()]


@contextlib.contextmanager
def outputs_of(stage: Stage) -> Iterator[list[Tensor]]:
    """Outputs of a stage, one per forward pass; of a stage without a module, or whose output is no tensor, none."""
    found: list[Tensor] = []

    def seen(module: nn.Module, given: object, y: object) -> None:
        if isinstance(y, Tensor):
            found.append(y.detach().clone())

    with contextlib.ExitStack() as stack:
        if stage.tap is not None:
            stack.enter_context(reading([stage.tap], lambda tap, z, y: found.append(y.detach().clone())))
        elif stage.module is not None:
            stack.callback(stage.module.register_forward_hook(seen).remove)
        yield found


def by_sample(x: Tensor, n: int, tap: Tap | None) -> Tensor:
    """`N tokens width`, whatever axes the layer has."""
    rows = x.reshape(-1, x.shape[-1])
    if tap is not None and tap.sequence_first:
        return rows.view(-1, n, rows.shape[1]).transpose(0, 1)
    return rows.view(n, -1, rows.shape[1])
