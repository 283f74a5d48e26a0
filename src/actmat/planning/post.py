"""Spaces and post-processing of a plan: what the recipe asks for, what cannot be, and the words for both.

Matrices are told apart by the item's name and the label of the logical matrix in it, as in records.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from actmat.errors import MergeError
from actmat.experts.lora.adapter import Adapter
from actmat.layout.types import Role, TensorLayout
from actmat.methods import get_method
from actmat.methods.post import Layer, get_step
from actmat.methods.spaces import space_words
from actmat.planning.item import Item, MethodCall, PostCall
from actmat.recipe import Recipe

_NUMBER = re.compile(r"(?:(?<=[./])|^)\d+(?=[./]|$)")
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def post_calls(recipe: Recipe, problems: list[str]) -> tuple[PostCall, ...]:
    """The recipe's steps with all their options; `problems` receives what is wrong with them."""
    found = []
    for given in recipe.post:
        try:
            step = get_step(given.name)
            found.append(PostCall(step.name, step.resolve_options(given.options)))
        except MergeError as error:
            problems.extend(f"post: {problem}" for problem in error.problems)
    over_layers = [call.name for call in found if call.step.layers is not None]
    if len(over_layers) > 1:
        problems.append(
            f"post: {' and '.join(over_layers)} both scale layers by measures of the merged model; choose one of them"
        )
    elif over_layers and found[-1].name != over_layers[0]:
        problems.append(
            f"post: '{over_layers[0]}' scales what all other steps leave, and is not the last: put it at the end"
        )
    return tuple(found)


def post_problems(recipe: Recipe, calls: Sequence[PostCall], *, has_base: bool) -> list[str]:
    """Problems of the recipe's steps with its other fields."""
    problems = []
    for call in calls:
        if call.step.layers is not None and recipe.pool:
            problems.append(
                f"post: '{call.name}' measures layers one by one, and 'pool' merges several as one; drop one"
            )
        if call.step.layers is not None and call.step.layers.needs_base and not has_base:
            problems.append(
                f"post: '{call.name}' compares the merged deltas with the base's weights; write a full model "
                "(--base ..., --to model)"
            )
    if recipe.space != "full" and recipe.pool:
        problems.append(f"'space: {recipe.space}' works on the factors of one module; drop 'pool'")
    return problems


def has_spectrum(layout: TensorLayout) -> bool:
    """True if the tensor holds linear maps: a table of vectors has no singular values worth the name."""
    return layout.role.is_matrix or layout.role is Role.CONVOLUTION


def in_space(call: MethodCall, stored: Sequence[str]) -> tuple[MethodCall, str]:
    """The call in its space, or in the full one where experts store the tensor whole; and the words for the plan.

    Args:
        stored: names of the experts that store it.
    """
    words = ""
    if call.space != "full" and stored:
        words = f", in the full space: trained in full in {', '.join(stored)}"
        call = dataclasses.replace(call, space="full")
    words += space_words(call.space, get_method(call.method), call.options)
    return call, words + (f", then {', '.join(p.name for p in call.post)}" if call.post else "")


def space_input_problems(recipe: Recipe, full: Sequence[str]) -> list[str]:
    """Problem of experts that are full checkpoints, named in `full`, in a space of factors."""
    if recipe.space == "full" or not full:
        return []
    names, has = ", ".join(full), "have" if len(full) > 1 else "has"
    return [
        f"'space: {recipe.space}' merges factors of adapters, and {names} {has} none; drop 'space', or give adapters"
    ]


def factor_problems(recipe: Recipe, adapters: Sequence[tuple[str, Adapter]]) -> list[str]:
    """Modules whose factors cannot be added up, entry by entry: other ranks, or other scalings."""
    if recipe.space != "factors":
        return []
    problems = []
    for name in dict.fromkeys(n for _, a in adapters for n in a.modules):
        having = [(label, a.modules[name]) for label, a in adapters if name in a.modules]
        for what, values in (
            ("ranks", {label: m.rank for label, m in having}),
            ("scalings alpha / r", {label: m.scaling for label, m in having}),
        ):
            if len(set(values.values())) > 1:
                listed = ", ".join(f"{value:g} ({label})" for label, value in values.items())
                problems.append(
                    f"'space: factors' adds factors entry by entry, and module '{name}' has {what} {listed}; take "
                    "'space: core'"
                )
    return problems


def layer_items(items: Sequence[Item]) -> list[Item]:
    """Items whose factors come from a survey of the merged model."""
    return [i for i in items if i.call is not None and i.call.layer_call is not None]


def layer_notes(items: Sequence[Item]) -> list[str]:
    """Note for the reader of a plan whose model is merged twice."""
    found = layer_items(items)
    names = {i.call.layer_call.name: None for i in found if i.call is not None and i.call.layer_call is not None}
    return [f"'{n}' measures the merged model before it is written: {len(found)} items are merged twice" for n in names]


def layers_of(keys: Sequence[tuple[str, str]]) -> Mapping[tuple[str, str], Layer]:
    """Positions of matrices in the model, by name of their item and label.

    The first number in a name is its layer's; names that agree before it form one stack. The layers of a stack are
    counted from 1, those without a merged matrix included.

    >>> layers_of([("h.0.mlp.weight", ""), ("h.2.attn.weight", "q"), ("head.weight", "")])[("h.2.attn.weight", "q")]
    Layer(kind='h.*.attn.weight/q', number=3, count=3)
    """
    places = {key: (key[0][: m.start()], int(m[1])) for key in keys if (m := _LAYER.search(key[0])) is not None}
    deepest: dict[str, int] = {}
    for stack, number in places.values():
        deepest[stack] = max(deepest.get(stack, 0), number)
    out = {}
    for key in keys:
        kind = _NUMBER.sub("*", "/".join(part for part in key if part))
        stack, number = places.get(key, ("", -1))
        out[key] = Layer(kind, number + 1, deepest[stack] + 1) if key in places else Layer(kind, None, 0)
    return out
