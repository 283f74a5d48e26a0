"""Coded judgments over the measures of a merge. One small file per group; `CHECKS` is the list."""

from __future__ import annotations

from collections.abc import Collection

from actmat.diagnostics.checks.base import Check, Facts, Outcome
from actmat.diagnostics.checks.deltas import IDENTITY_CHECKS, SIGNAL_CHECKS
from actmat.diagnostics.checks.merged import BALANCE_CHECKS, SIZE_CHECKS, TABLE_CHECKS
from actmat.diagnostics.model import CheckResult
from actmat.errors import RecipeError, did_you_mean

__all__ = ["CHECKS", "Check", "Facts", "Outcome", "check_codes", "run_checks"]

CHECKS: tuple[Check, ...] = (*SIGNAL_CHECKS, *IDENTITY_CHECKS, *BALANCE_CHECKS, *SIZE_CHECKS, *TABLE_CHECKS)


def run_checks(facts: Facts, mute: Collection[str] = ()) -> tuple[CheckResult, ...]:
    """The outcome of every check, in the order of their codes."""
    return tuple(check.result(facts, muted=check.code in mute) for check in CHECKS)


def check_codes(codes: Collection[str]) -> None:
    """Refuse codes that no check has, with a RecipeError that lists all of them."""
    known = [c.code for c in CHECKS]
    listed = ", ".join(known)
    wrong = [
        f"there is no check '{c}'.{did_you_mean(c, known)} Codes: {listed}"
        for c in dict.fromkeys(codes)
        if c not in known
    ]
    if wrong:
        raise RecipeError("The recipe mutes checks that do not exist.", wrong)
