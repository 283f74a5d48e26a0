"""Merge methods: one file each, listed once in `METHODS`; presets are rows of one table.

Other distributions add methods by entry points of the group `actmat.methods`.
"""

from __future__ import annotations

from actmat.errors import RecipeError, did_you_mean
from actmat.methods.ace import ACE
from actmat.methods.actmat import ACTMAT
from actmat.methods.adamerging import ADAMERGING
from actmat.methods.average import AVERAGE
from actmat.methods.breadcrumbs import BREADCRUMBS
from actmat.methods.cart import CART
from actmat.methods.cat import CAT
from actmat.methods.contract import Bounds, MergeMethod, Option
from actmat.methods.ctm import CTM
from actmat.methods.dare import DARE
from actmat.methods.dc_merge import DC_MERGE
from actmat.methods.della import DELLA
from actmat.methods.facets import About, Access, Cost, LowRankForm, Merged, MergedLowRank, Stages, Survey
from actmat.methods.fisher import FISHER
from actmat.methods.iso_c import ISO_C
from actmat.methods.iso_cts import ISO_CTS
from actmat.methods.karcher import KARCHER
from actmat.methods.knots import KNOTS
from actmat.methods.linear import LINEAR
from actmat.methods.model_stock import MODEL_STOCK
from actmat.methods.nearswap import NEARSWAP
from actmat.methods.orthomerge import ORTHOMERGE
from actmat.methods.presets import PRESETS
from actmat.methods.regmean import REGMEAN
from actmat.methods.resmerge import RESMERGE
from actmat.methods.sce import SCE
from actmat.methods.slerp import SLERP
from actmat.methods.task_arithmetic import TASK_ARITHMETIC
from actmat.methods.ties import TIES
from actmat.methods.tsv import TSV
from actmat.methods.user import installed_methods, is_user_method, load_installed_method, load_user_method

__all__ = [
    "METHODS",
    "About",
    "Access",
    "Bounds",
    "Cost",
    "LowRankForm",
    "MergeMethod",
    "Merged",
    "MergedLowRank",
    "Option",
    "Stages",
    "Survey",
    "all_methods",
    "get_method",
]

METHODS: tuple[MergeMethod, ...] = (
    AVERAGE,
    TASK_ARITHMETIC,
    LINEAR,
    SLERP,
    NEARSWAP,
    KARCHER,
    MODEL_STOCK,
    TIES,
    DARE,
    BREADCRUMBS,
    DELLA,
    SCE,
    ACTMAT,
    REGMEAN,
    *PRESETS,
    ACE,
    CAT,
    TSV,
    ISO_C,
    ISO_CTS,
    KNOTS,
    CART,
    DC_MERGE,
    CTM,
    RESMERGE,
    ORTHOMERGE,
    FISHER,
    ADAMERGING,
)
"""All methods, in the order of the tables. Adding a method: a file in this folder and an entry here."""


def get_method(name: str | MergeMethod) -> MergeMethod:
    """The method called `name`: of this package, of a user's own file (`PATH.py:NAME`), or of another distribution.

    A declaration is returned as it is.

    Raises:
        RecipeError: no such method, or one that cannot be loaded; the message offers the nearest name and lists all.

    >>> get_method("average").acts_on
    'elementwise'
    """
    if isinstance(name, MergeMethod):
        return name
    if not isinstance(name, str):
        raise RecipeError(f"A method is given by its name, such as 'average', or as a MergeMethod; got {name!r}.")
    if is_user_method(name):
        return load_user_method(name)
    for method in METHODS:
        if method.name == name:
            return method
    if (found := load_installed_method(name)) is not None:
        return found
    known = [*(m.name for m in METHODS), *installed_methods()]
    raise RecipeError(f"There is no method '{name}'.{did_you_mean(name, known)} Methods: {', '.join(known)}")


def all_methods() -> list[MergeMethod]:
    """`METHODS`, then those of other distributions in the order of their names; RecipeError for a broken one."""
    own = {m.name: m for m in METHODS}
    return [*own.values(), *(get_method(name) for name in installed_methods() if name not in own)]
