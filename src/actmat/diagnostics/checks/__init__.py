"""Coded judgments over the measures of a merge. One small file per group; `CHECKS` is the list."""

from __future__ import annotations

from collections.abc import Collection

from actmat.diagnostics.checks.base import Check, Facts
from actmat.diagnostics.checks.deltas import DELTA_CHECKS
from actmat.diagnostics.checks.merged import MERGE_CHECKS
from actmat.diagnostics.model import Finding
from actmat.errors import RecipeError, did_you_mean

__all__ = ["CHECKS", "Check", "Facts", "check_codes", "run_checks"]

CHECKS: tuple[Check, ...] = (*DELTA_CHECKS, *MERGE_CHECKS)


def run_checks(facts: Facts, mute: Collection[str] = ()) -> tuple[Finding, ...]:
    """Everything that checks find, in the order of their codes."""
    findings = (check.finding(facts, muted=check.code in mute) for check in CHECKS)
    return tuple(f for f in findings if f is not None)


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
