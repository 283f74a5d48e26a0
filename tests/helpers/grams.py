"""Naive statistics: hooks on modules and loops over single tokens, in float64."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from actmat.extras.collect.collect import Collected
from actmat.statistics.triangle import unpack


def outer_sum(rows: Iterable[Tensor]) -> Tensor:
    """`sum z z^T`, one row after the other."""
    total: Tensor | None = None
    for row in rows:
        one = torch.outer(row.double(), row.double())
        total = one if total is None else total + one
    return total


def tokens(states: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Rows of `B S I` that are tokens."""
    n_samples, length = states.shape[:2]
    return [states[b, s] for b in range(n_samples) for s in range(length) if mask is None or bool(mask[b, s])]


def record_inputs(model: nn.Module, kinds: tuple[type, ...], run: Callable[[], Any]) -> dict[str, list[Tensor]]:
    """What every module of these kinds was called with, by name."""
    seen: dict[str, list[Tensor]] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, kinds):

            def hook(_: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
                seen.setdefault(name, []).append(args[0].detach().clone())

            handles.append(module.register_forward_pre_hook(hook))
    with torch.no_grad():
        run()
    for handle in handles:
        handle.remove()
    return seen


def linear_grams(
    model: nn.Module,
    kinds: tuple[type, ...],
    run: Callable[[], Any],
    mask_of: Callable[[str, Tensor], Tensor | None],
) -> dict[str, Tensor]:
    """Gram of every module's input; `mask_of(name, input)` says which of its tokens count."""
    out = {}
    for name, calls in record_inputs(model, kinds, run).items():
        rows: list[Tensor] = []
        for states in calls:
            wide = states if states.ndim == 3 else states.unsqueeze(1)
            rows += tokens(wide, mask_of(name, states) if states.ndim == 3 else None)
        out[name] = outer_sum(rows)
    return out


def measured_gram(result: Collected, name: str, *, rows: Any = None) -> Tensor:
    """The sum that `collect` has for a stored tensor."""
    for place in result.header.places[name]:
        if place.expert is None and (place.rows is None or place.rows == rows):
            info = result.header.grams[place.gram]
            return unpack(result.tensors[f"gram.{place.gram}"].double(), info.width, info.groups)
    raise AssertionError(f"{name} has no Gram for {rows}")


def padded_batches(vocabulary: int, *, left: bool = False, n: int = 2) -> list[dict[str, Tensor]]:
    """Batches of different lengths; some samples are padded, on the right or on the left."""
    generator = torch.Generator().manual_seed(7)
    out = []
    for k in range(n):
        ids = torch.randint(3, vocabulary, (3, 6 + k), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        mask[2, -4:] = 0
        if left:
            mask = mask.flip(1)
        ids[mask == 0] = 0
        out.append({"input_ids": ids, "attention_mask": mask})
    return out
