"""Pools: linear layers that read the same input, merged as one matrix with one covariance estimate.

Query, key and value of one attention layer see the same inputs; stacking their deltas along `O` lets the interference
methods combine their information on those inputs: the Gram of stacked rows is the sum of the Grams.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from actmat.layout.patterns import compile_pattern
from actmat.layout.types import Role, TensorLayout
from actmat.methods import get_method
from actmat.planning.item import Item
from actmat.planning.placement import Placed

PooledLayout = TensorLayout(Role.LINEAR, "pooled with the layers that read the same input")


def assign_pools(
    items: Sequence[Item],
    patterns: Sequence[str],
    place: Callable[[Item], Placed],
    flops: Callable[[Item], int],
) -> tuple[tuple[Item, ...], list[str]]:
    """Items with their pools filled in, and problems.

    Tensors that match one pattern and whose names agree up to their last two parts (`layers.0.self_attn` of
    `layers.0.self_attn.q_proj.weight`) form a pool. A packed tensor that matches is a pool of its own: it stays whole.

    Args:
        items: the plan so far.
        patterns: see `recipe.Recipe.pool`.
        place: place of a (pooled) tensor.
        flops: operations of a (pooled) tensor, of which each member bears its share.
    """
    groups: dict[str, list[int]] = {}
    problems: list[str] = []
    for text in patterns:
        matches = compile_pattern(text)
        hits = [i for i, t in enumerate(items) if matches(t.name)]
        if not hits:
            problems.append(f"pool: the pattern '{text}' matches no tensor of the base")
        for i in hits:
            groups.setdefault(f"{items[i].name.rsplit('.', 2)[0]} ({text})", []).append(i)
    out = list(items)
    for pool, indices in groups.items():
        indices.sort(key=lambda i: items[i].name)  # the order of rows must not depend on how the base is stored
        members = [items[i] for i in indices]
        problem = _problem(members)
        if problem is not None:
            problems.append(f"pool: {', '.join(m.name for m in members)} cannot be merged as one matrix: {problem}")
            continue
        whole = dataclasses.replace(pooled(members), pool=pool)
        placed = place(whole)
        share = flops(whole) // len(members)
        for i, member in zip(indices, members, strict=True):
            cost = dataclasses.replace(
                member.cost, flops=share, host_bytes=placed.host_bytes, device_bytes=placed.device_bytes
            )
            reason = member.reason.removesuffix(place(member).words)
            reason += f", pooled over {len(members)} tensors" if len(members) > 1 else ""
            reason += placed.words
            out[i] = dataclasses.replace(
                member,
                pool=pool,
                reason=reason,
                layout=TensorLayout(Role.LINEAR, member.layout.reason),
                kernel=placed.kernel,
                reading=placed.reading,
                cost=cost,
            )
    return tuple(out), problems


def pooled(members: Sequence[Item]) -> Item:
    """The one matrix of a pool: the members' rows one below the other, under the first member's name."""
    rows = sum(m.shape[0] for m in members)
    return dataclasses.replace(members[0], shape=(rows, *members[0].shape[1:]), layout=PooledLayout)


def _problem(members: Sequence[Item]) -> str | None:
    first = members[0]
    if any(m.call != first.call or m.action != "merge" for m in members):
        return "they are not all merged by one method with the same options"
    if first.call is not None and get_method(first.call.method).needs_statistics:
        return "the method takes statistics of each layer's inputs; without the pool its result is the same"
    if any(len(m.shape) != 2 or m.layout.orientation != "OI" for m in members):
        return "they are not all stored as out_features x in_features"
    if len({m.shape[1] for m in members}) > 1:
        return "they have different numbers of input features"
    if len({(m.base_dtype, m.out_dtype, m.expert_dtypes) for m in members}) > 1:
        return "they are stored in different dtypes"
    return None
