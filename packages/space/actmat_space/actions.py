"""The work behind the buttons of the page: what a visitor typed goes in, HTML comes out. Knows nothing of Gradio."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from actmat.errors import MergeError, RecipeError
from actmat_space.asking import AUTO, Form
from actmat_space.html import error_html, plan_html, pushed_html, result_html
from actmat_space.jobs import Jobs, Merged, Progress

NOTHING = "There is no merged adapter yet. Fix: merge, then push."
MOST_RANK = 100_000


def form_of(values: Sequence[Any]) -> Form:
    """The form as filled in: adapters, method, rank, scale, any base; an empty field is its default.

    >>> form_of(["org/a", None, None, 0.5, False])
    Form(adapters='org/a', method='auto', rank=0, scale=0.5, any_base=False)

    Raises:
        RecipeError: a number that is none.
    """
    adapters, method, rank, scale, any_base = values
    rank, scale = rank or 0, 1.0 if scale is None else scale
    numbers = all(isinstance(n, int | float) and math.isfinite(n) for n in (rank, scale))
    if not numbers or not 0 <= rank <= MOST_RANK or rank != int(rank):
        raise RecipeError("Expected a rank from 0 (exact) and a finite scale.",
                          [f"rank: {str(rank)[:40]}", f"scale: {str(scale)[:40]}"])  # fmt: skip
    return Form(str(adapters or ""), str(method or AUTO), int(rank), float(scale), bool(any_base))


def plan(jobs: Jobs, values: Sequence[Any]) -> Markup:
    """The plan of a form, or the error."""
    try:
        return plan_html(jobs.plan(form_of(values)))
    except MergeError as error:
        return error_html(error)


def merge(jobs: Jobs, values: Sequence[Any], progress: Progress | None = None) -> tuple[Markup, Merged | None]:
    """The result of a form, or the error and None."""
    try:
        merged = jobs.merge(form_of(values), progress)
    except MergeError as error:
        return error_html(error), None
    return result_html(merged.plan, merged.result), merged


def push(jobs: Jobs, key: str, repo_id: str, token: str, *, public: bool) -> Markup:
    """The push of a merged adapter, or the error.

    Args:
        jobs: that merged it.
        key: of the merged adapter; empty: there is none.
        repo_id, token: as the visitor typed them.
        public: make a new repository public.
    """
    try:
        if not key:
            raise MergeError(NOTHING)
        return pushed_html(jobs.push(key, repo_id or "", token or "", public=public))
    except MergeError as error:
        return error_html(error)
