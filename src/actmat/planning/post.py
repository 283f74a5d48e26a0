"""Spaces and post-processing of a plan: the calls of the recipe's steps, problems, and the plan's words for both."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from actmat.errors import MergeError
from actmat.experts.lora.adapter import Adapter
from actmat.layout.types import Role, TensorLayout
from actmat.methods import get_method
from actmat.methods.post import get_step
from actmat.methods.spaces import space_words
from actmat.planning.item import MethodCall, PostCall
from actmat.recipe import Recipe


def post_calls(recipe: Recipe, problems: list[str]) -> tuple[PostCall, ...]:
    """The recipe's steps with all their options; `problems` receives their problems."""
    calls = []
    for named in recipe.post:
        try:
            step = get_step(named.name)
            calls.append(PostCall(step.name, step.resolve_options(named.options)))
        except MergeError as error:
            problems.extend(f"post: {problem}" for problem in error.problems)
    return tuple(calls)


def has_spectrum(layout: TensorLayout) -> bool:
    """True if the tensor holds linear maps: a table of vectors has no meaningful singular values."""
    return layout.role.is_matrix or layout.role is Role.CONVOLUTION


def in_space(call: MethodCall, stored: Sequence[str]) -> tuple[MethodCall, str]:
    """The call in its space, or in the full one if experts store the tensor whole; and the words for the plan.

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
        f"'space: {recipe.space}' merges factors of adapters, but {names} {has} none; drop 'space', or give adapters"
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
