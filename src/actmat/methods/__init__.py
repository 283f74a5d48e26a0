"""Merge methods: one file each, listed once in `METHODS`."""

from __future__ import annotations

from actmat.errors import RecipeError, did_you_mean
from actmat.methods.ace import ACE
from actmat.methods.actmat import ACTMAT
from actmat.methods.actmat_bounded import ACTMAT_BOUNDED
from actmat.methods.actmat_ridge import ACTMAT_RIDGE
from actmat.methods.adamerging import ADAMERGING
from actmat.methods.aswudi import ASWUDI
from actmat.methods.average import AVERAGE
from actmat.methods.breadcrumbs import BREADCRUMBS
from actmat.methods.cart import CART
from actmat.methods.cat import CAT
from actmat.methods.centred import CENTRED
from actmat.methods.contract import Bounds, Merged, MergedLowRank, MergeMethod, Option, Stages, Survey
from actmat.methods.ctm import CTM
from actmat.methods.dare import DARE
from actmat.methods.dc_merge import DC_MERGE
from actmat.methods.della import DELLA
from actmat.methods.fisher import FISHER
from actmat.methods.iso_c import ISO_C
from actmat.methods.iso_cts import ISO_CTS
from actmat.methods.karcher import KARCHER
from actmat.methods.knots import KNOTS
from actmat.methods.linear import LINEAR
from actmat.methods.lot import LOT
from actmat.methods.model_stock import MODEL_STOCK
from actmat.methods.nearswap import NEARSWAP
from actmat.methods.orthomerge import ORTHOMERGE
from actmat.methods.regmean import REGMEAN
from actmat.methods.resmerge import RESMERGE
from actmat.methods.sce import SCE
from actmat.methods.slerp import SLERP
from actmat.methods.swudi import SWUDI
from actmat.methods.tact import TACT
from actmat.methods.task_arithmetic import TASK_ARITHMETIC
from actmat.methods.ties import TIES
from actmat.methods.tsv import TSV
from actmat.methods.user import is_user_method, load_user_method
from actmat.methods.wudi import WUDI

__all__ = ["METHODS", "Bounds", "MergeMethod", "Merged", "MergedLowRank", "Option", "Stages", "Survey", "get_method"]

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
    ACTMAT_RIDGE,
    ACTMAT_BOUNDED,
    TACT,
    CENTRED,
    ACE,
    WUDI,
    SWUDI,
    ASWUDI,
    REGMEAN,
    LOT,
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
"""All methods, in the order of the tables. Adding a method = a file in this folder + an entry here."""

_BY_NAME = {method.name: method for method in METHODS}


def get_method(name: str) -> MergeMethod:
    """The method called `name`; `PATH.py:NAME` is a method in a user's own file.

    Raises:
        RecipeError: no such method; the message offers the nearest name and lists all.

    >>> get_method("average").acts_on
    'elementwise'
    """
    if is_user_method(name):
        return load_user_method(name)
    if (found := _BY_NAME.get(name)) is not None:
        return found
    for method in METHODS:  # one that was added to it later
        if method.name == name:
            return method
    known = [m.name for m in METHODS]
    raise RecipeError(f"There is no method '{name}'.{did_you_mean(name, known)} Methods: {', '.join(known)}")
