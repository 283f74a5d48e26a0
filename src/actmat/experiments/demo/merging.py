"""From a base and experts on disk to merged models on disk: the one place of the demo that knows the library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from actmat.errors import RecipeError
from actmat.methods import METHODS, MergeMethod, get_method

__all__ = ["choose_methods", "merge_with_engine", "why_not"]


def why_not(method: MergeMethod, n_experts: int) -> str | None:
    """Why the rule cannot merge that many experts without data, or None when it can."""
    if method.needs_statistics:
        return f"needs statistics measured on data: {', '.join(method.needs_statistics)}"
    if method.max_experts is not None and n_experts > method.max_experts:
        return f"merges at most {method.max_experts} expert(s), not {n_experts}"
    return None


def choose_methods(wanted: Sequence[str] | None, n_experts: int) -> tuple[list[str], dict[str, str]]:
    """Names of the rules to run, and the reasons why others are left out.

    Args:
        wanted: names in the order of the table, or None for every rule that can run.
        n_experts: number of experts that will be merged.

    Raises:
        RecipeError: a wanted rule is unknown or cannot run here.
    """
    if wanted is None:
        reasons = {m.name: why_not(m, n_experts) for m in METHODS}
        return [n for n, reason in reasons.items() if reason is None], {n: r for n, r in reasons.items() if r}
    problems = [f"'{m.name}' {reason}" for m in map(get_method, wanted) if (reason := why_not(m, n_experts))]
    if problems:
        raise RecipeError("The demo merges without data, and all its experts at once.", problems)
    return list(dict.fromkeys(wanted)), {}


def merge_with_engine(method: str, base: Path, experts: Sequence[Path], out: Path, *, seed: int, threads: int) -> None:
    """Merge with the default options of the rule, as `actmat merge` would.

    Not flushed to the disk one by one: a demo that loses power is run again.
    """
    from actmat.api import merge

    merge(base=base, experts=experts, method=method, out=out, seed=seed, threads=threads, durable=False)
