"""Merged models by the real engine: all rows in one reading, and their scale tuned.

Every row of a table is a `Candidate`. Default and tuned scale are two things: the default uses no data at all; the
tuned one is chosen on the validation parts of the tasks, never on reported data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actmat_experiments.core import RunSettings, get_method, make_recipe
from actmat_experiments.harness.cache import code_digest

KINDS = ("gram", "fisher")
"""Statistics that the suites measure on experts."""

SCALES = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0)
"""Factors of the merged delta that tuning tries."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One merged model: a rule with options, under the name that tables show.

    Args:
        name: row of the table, and name of the folder.
        method: the rule.
        options: of the rule; others have their defaults.
        scale: `W* = W_0 + scale * D*`.
        fields: further fields of the recipe (`scope`, `post`, ...).
    """

    name: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    scale: float = 1.0
    fields: Mapping[str, Any] = field(default_factory=dict)


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
        Name of the row -> names of the tensors that its rule has merged; `scale` acts only on these.
    """
    from actmat.run import run_recipes

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
                "output": "model",
                "out": str(outs[row.name]),
                **row.fields,
            }
        )
        for row in rows
    ]
    reports = run_recipes(recipes, RunSettings(threads=threads, device=device, durable=False))
    acted = [tuple(item.name for item in report.plan.items if item.action == "merge") for report in reports]
    return {row.name: names for row, names in zip(rows, acted, strict=True)}


def needs_statistics(rows: Sequence[Candidate]) -> bool:
    """True if one of the rows needs statistics measured on data."""
    return any(get_method(row.method).needs_statistics for row in rows)


def kinds_needed(rows: Sequence[Candidate]) -> tuple[str, ...]:
    """Kinds of statistics that the rows need; all, if none needs one."""
    needed = {kind for row in rows for kind in get_method(row.method).needs_statistics}
    return tuple(kind for kind in KINDS if kind in needed or not needed)


def merging_code() -> str:
    """Hash of the code that decides the bytes of a merge, for cache keys."""
    core = ("linalg", "methods", "checkpoints", "experts", "layout", "recipe", "planning", "engine")
    return code_digest(*core, "extras/research")


def best_scale(score: Callable[[float], float], scales: Sequence[float] = SCALES) -> tuple[float, dict[float, float]]:
    """The scale of the highest score, of equal ones the nearest to 1, and all scores."""
    found = {scale: score(scale) for scale in scales}
    return max(found, key=lambda s: (found[s], -abs(s - 1.0))), found
