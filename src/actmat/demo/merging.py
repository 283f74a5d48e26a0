"""Merged models by the real engine: which methods can run, and all of them in one reading of the inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from actmat.errors import RecipeError
from actmat.methods import METHODS, MergeMethod, get_method

__all__ = ["Candidate", "choose_methods", "merge_candidates", "merged_names", "why_not"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One merged model: a rule with options, under the name that tables show.

    Args:
        name: row of the table, and name of the folder.
        method: the rule.
        options: of the rule; what is left out has its default.
        scale: `W* = W_0 + scale * D*`.
        fields: further fields of the recipe (`scope`, `pool`, `postprocess`, ...).
    """

    name: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    scale: float = 1.0
    fields: Mapping[str, Any] = field(default_factory=dict)

    def at(self, scale: float) -> Candidate:
        """The same rule at another scale."""
        return replace(self, scale=scale)


def why_not(method: MergeMethod, n_experts: int, statistics: Sequence[str] = ()) -> str | None:
    """Reason why the rule cannot merge that many experts with these kinds of statistics; None if it can."""
    missing = [kind for kind in method.needs_statistics if kind not in statistics]
    if missing:
        return f"needs statistics measured on data: {', '.join(missing)}"
    if method.max_experts is not None and n_experts > method.max_experts:
        return f"merges at most {method.max_experts} expert(s), not {n_experts}"
    return None


def choose_methods(
    wanted: Sequence[str] | None, n_experts: int, statistics: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """Names of the rules to run, and the reasons why others are left out.

    Args:
        wanted: names in the order of the table, or None for every rule that can run.
        n_experts: number of experts that will be merged.
        statistics: kinds of statistics that are there.

    Raises:
        RecipeError: a wanted rule is unknown or cannot run here.
    """
    if wanted is None:
        reasons = {m.name: why_not(m, n_experts, statistics) for m in METHODS}
        return [n for n, reason in reasons.items() if reason is None], {n: r for n, r in reasons.items() if r}
    problems = [
        f"'{m.name}' {reason}" for m in map(get_method, wanted) if (reason := why_not(m, n_experts, statistics))
    ]
    if problems:
        raise RecipeError(
            "Not all these methods can run here: all experts are merged at once, with the statistics that are there.",
            problems,
        )
    return list(dict.fromkeys(wanted)), {}


def merge_candidates(
    base: Path,
    experts: Mapping[str, Path],
    rows: Sequence[Candidate],
    outs: Mapping[str, Path],
    *,
    seed: int = 0,
    threads: int | None = None,
    device: str = "cpu",
    statistics: Mapping[str, Path] | None = None,
) -> dict[str, tuple[str, ...]]:
    """Merge by the engine, all rows in one reading of the inputs, as `actmat merge` would.

    Not flushed to the disk one by one: an experiment that loses power is run again.

    Args:
        base: checkpoint.
        experts: name -> checkpoint or adapter, in the order of the merge.
        rows: what to make.
        outs: name of the row -> folder to write, missing or empty.
        seed: of random rules.
        threads: tensors at work side by side; changes no number.
        device: where matrix rules compute.
        statistics: name of the expert -> folder of its statistics, for the rules that need some.

    Returns:
        Name of the row -> names of the tensors that its rule has merged; `scale` acts on these alone.
    """
    from actmat.api import run_recipes
    from actmat.recipe import make_recipe
    from actmat.settings import RunSettings

    measured = statistics or {}
    recipes = [
        make_recipe(
            {
                "base": str(base),
                "experts": [
                    {"path": str(path), "name": name, "statistics": str(measured.get(name, ""))}
                    for name, path in experts.items()
                ],
                "method": row.method,
                "options": dict(row.options),
                "scale": row.scale,
                "seed": seed,
                "to": "model",
                "out": str(outs[row.name]),
                **row.fields,
            }
        )
        for row in rows
    ]
    reports = run_recipes(recipes, RunSettings(threads=threads, device=device, durable=False))
    return {row.name: merged_names(report.plan) for row, report in zip(rows, reports, strict=True)}


def merged_names(plan: Any) -> tuple[str, ...]:
    """Names of the tensors on which the rule acts; all others are the mean of the deltas, copied or tied."""
    return tuple(t.name for t in plan.items if t.action == "merge")
