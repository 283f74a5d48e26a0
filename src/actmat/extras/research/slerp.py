"""Method `slerp`.

Shapes: `B` tensors of the basis, the base and the experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from actmat.linalg.chunks import empty_result
from actmat.linalg.inner import inner_products, inner_workspace, weighted_sum
from actmat.methods._shared.per_expert import given_base
from actmat.methods.contract import Fraction, MergeMethod
from actmat.methods.facets import Access, Combination, Merged, MethodCost


def merge(deltas: Sequence[Tensor], *, base: Tensor, t: float = 0.5, linear_above: Fraction = 0.9995) -> Merged:
    """Point on the great circle from the base to one expert, or from one expert to another.

        W* = [sin((1-t) a) X + sin(t a) Y] / sin(a),   cos a = <X, Y> / (|X| |Y|)

    On the circle the norm does not shrink half-way, as it does on the chord. Each tensor is one vector, with its own
    angle `a`. One expert: from the base (`X = W_0`) to it (`Y = W_1`). Two experts: from the first to the second.
    If the angle is undefined (|cos| above `linear_above`, or a zero tensor) the interpolation is linear.

    Args:
        t: position between the ends, 0 = first, 1 = second; outside of [0, 1] the path goes on beyond an end.
        linear_above: |cosine| above which the ends count as parallel.

    Source:
        K. Shoemake, "Animating rotation with quaternion curves", SIGGRAPH 1985.
    """
    basis = [given_base("slerp", base), *deltas]
    combination = combine(inner_products(basis), t=t, linear_above=linear_above)
    return Merged(weighted_sum(basis, combination.coefficients, empty_result(deltas)), combination.stats)


def combine(gram_BB: Tensor, *, t: float, linear_above: float) -> Combination:
    """The coefficients of `W_0, D_1 (, D_2)`; an end of the path is a row of coordinates in them.

    Raises:
        ValueError: not two ends, the base included.
    """
    if len(gram_BB) > 3:
        raise ValueError(f"slerp: a path has two ends, so one expert (with the base) or two, not {len(gram_BB) - 1}")
    ends = torch.eye(2).double() if len(gram_BB) == 2 else torch.eye(3).double()[1:]
    ends[:, 0] = 1.0
    gram = ends @ gram_BB @ ends.mT
    product = math.sqrt(float(gram[0, 0]) * float(gram[1, 1]))
    cosine = max(-1.0, min(1.0, float(gram[0, 1]) / product)) if product > 0 else 1.0
    linear = abs(cosine) > linear_above
    if linear:
        first, second, excess = 1.0 - t, t, 0.0
    else:
        angle = math.acos(cosine)
        first, second = math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)
        excess = first + second - 1.0
    shares = [second] if len(gram_BB) == 2 else [first, second]
    return Combination([excess, *shares], {"cosine": cosine, "linear": linear})


SLERP = MergeMethod(
    "slerp",
    merge,
    "tensor",
    laws=frozenset({"left_orthogonal", "right_orthogonal", "zeros"}),
    # with one expert, the base is the other end
    access=Access(streams=True, walks_again=True, baseless=lambda options, n_experts: n_experts == 2),
    cost=MethodCost(
        workspace=lambda shape, n_experts, options: inner_workspace(math.prod(shape), n_experts + 1),
    ),
    max_experts=2,
    elsewhere=lambda options, n_experts: [1 - options["t"], options["t"]][-n_experts:],  # the chord
    combine=combine,
)
