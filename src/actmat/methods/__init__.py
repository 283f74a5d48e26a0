"""Merge methods: one file each, listed once in `METHODS`.

Extras and other distributions add methods by entry points of the group `actmat.methods`.
"""

from __future__ import annotations

import contextlib

from actmat.errors import RecipeError, did_you_mean
from actmat.methods.actmat import ACTMAT
from actmat.methods.actmat_ridge import ACTMAT_RIDGE
from actmat.methods.average import AVERAGE
from actmat.methods.contract import Bounds, MergeMethod, Option
from actmat.methods.ct_merging import CT_MERGING
from actmat.methods.dc_merge import DC_MERGE
from actmat.methods.facets import Access, LowRankForm, Merged, MergedLowRank, MethodCost, Stages, Survey
from actmat.methods.linear import LINEAR
from actmat.methods.regmean import REGMEAN
from actmat.methods.task_arithmetic import TASK_ARITHMETIC
from actmat.methods.ties import TIES
from actmat.methods.user import GROUP, AnyMethod, hold_method, is_user_method, load_installed_method, load_user_method
from actmat.plugins import entries

__all__ = [
    "METHODS",
    "Access",
    "AnyMethod",
    "Bounds",
    "LowRankForm",
    "MergeMethod",
    "Merged",
    "MergedLowRank",
    "MethodCost",
    "Option",
    "Stages",
    "Survey",
    "all_methods",
    "get_method",
    "name_of_method",
]

METHODS: tuple[MergeMethod, ...] = (
    AVERAGE,
    TASK_ARITHMETIC,
    LINEAR,
    TIES,
    ACTMAT,
    REGMEAN,
    ACTMAT_RIDGE,
    DC_MERGE,
    CT_MERGING,
)
"""Methods of the core, in the order of the tables. Adding one: a file in this folder and an entry here."""


def get_method(name: AnyMethod) -> MergeMethod:
    """The method called `name`: of this package, of a user's own file (`PATH.py:NAME`), or of another distribution.

    A declaration is returned unchanged; a function becomes a method.

    Raises:
        RecipeError: no such method, or one that cannot be loaded; the message suggests a similar name and lists all.

    >>> get_method("average").acts_on
    'elementwise'
    """
    if isinstance(name, MergeMethod):
        return name
    if not isinstance(name, str) and not callable(name):
        raise RecipeError(f"A method is given by its name, as a MergeMethod, or as a function; got {name!r}.")
    if not isinstance(name, str) or is_user_method(name):
        return load_user_method(name)
    for method in METHODS:
        if method.name == name:
            return method
    if (method_elsewhere := load_installed_method(name)) is not None:
        return method_elsewhere
    if "@" in name:
        raise RecipeError(f"'{name}' was a function of another Python process. Fix: put it into a file, PATH.py:NAME")
    known = [*(m.name for m in METHODS), *entries(GROUP)]
    near, listed = did_you_mean(name, known), ", ".join(known)
    if ".py" in name or ":" in name:
        near = " A function of your own is named with its file: FILE.py:NAME."
    raise RecipeError(f"There is no method '{name}'.{near} Methods: {listed}.")


def name_of_method(method: AnyMethod) -> str:
    """The name by which recipes refer to a method; for a function, one that holds in this process."""
    declared = get_method(method)
    with contextlib.suppress(RecipeError):
        if get_method(declared.name) is declared:
            return declared.name
    return hold_method(declared)


def all_methods() -> list[MergeMethod]:
    """`METHODS`, then those of extras and other distributions by name; MergeError for a broken one."""
    core = {m.name: m for m in METHODS}
    return [*core.values(), *(get_method(name) for name in entries(GROUP) if name not in core)]
