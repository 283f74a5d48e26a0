"""The laws of a merge rule, as distances that must vanish; used where a rule's own tests vary its options."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tests.helpers.spectra import orthogonal
from tests.tolerances import relative_error
from torch import Tensor

Rule = Callable[[Sequence[Tensor]], Tensor]


def law_gap(law: str, rule: Rule, deltas: Sequence[Tensor]) -> float:
    """How far `rule` is from obeying `law` on these deltas."""
    rows, columns = deltas[0].shape[-2:]
    merged = rule(deltas)
    left, right = orthogonal(rows, seed=71), orthogonal(columns, seed=72)
    zero = torch.zeros_like(deltas[0])
    cases: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "permutation": lambda: (rule([*deltas[1:], deltas[0]]), merged),
        "single": lambda: (rule(deltas[:1]), deltas[0]),
        "homogeneous": lambda: (rule([37.0 * d for d in deltas]), 37.0 * merged),
        "odd": lambda: (rule([-d for d in deltas]), -merged),
        "left_orthogonal": lambda: (rule([left @ d for d in deltas]), left @ merged),
        "right_orthogonal": lambda: (rule([d @ right for d in deltas]), merged @ right),
        "zero_expert": lambda: (rule([deltas[0], zero, *deltas[1:]]), merged),
        "zeros": lambda: (rule([zero] * len(deltas)), zero),
    }
    return relative_error(*cases[law]())
