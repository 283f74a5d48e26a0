"""Differences between what two manifests and two reports say: settings, residuals, checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from actmat.diagnostics.model import CheckResult, Diagnosis
from actmat.report.comparison.model import CheckDifference, ResidualDifference, SettingDifference

__all__ = ["check_differences", "method_of", "residual_differences", "setting_differences"]

ExpertNames = Sequence[tuple[str, str]]


def method_of(manifest: Mapping[str, Any]) -> str:
    """Name of the merge's method."""
    return str(manifest["recipe"].get("method", "actmat"))


def setting_differences(
    first: Mapping[str, Any], second: Mapping[str, Any], experts: ExpertNames
) -> Iterator[SettingDifference]:
    """Fields that differ: of recipes without locations and names of inputs (their contents agree), versions, device."""
    mine = _flat(first, {a: a for a, _ in experts})
    other = _flat(second, {b: a for a, b in experts})
    for field in dict.fromkeys([*mine, *other]):
        if mine.get(field) != other.get(field):
            yield SettingDifference(field, mine.get(field), other.get(field))


def _flat(manifest: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    recipe = {k: v for k, v in manifest["recipe"].items() if k not in ("base", "experts", "method")}
    out: dict[str, Any] = {"method": method_of(manifest)}
    for field, value in recipe.items():
        out |= {f"{field}.{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {field: value}
    labels = [names[e["name"]] for e in manifest["experts"]]
    listed = manifest["recipe"].get("experts", [])
    out["order of experts"] = ", ".join(labels)
    out |= {f"weight of {n}": e.get("weight", 1.0) for n, e in zip(labels, listed, strict=True)}
    out |= {f"version of {k}": v for k, v in manifest["versions"].items()}
    return out | {"device": manifest.get("device", "cpu")}


def residual_differences(first: Diagnosis, second: Diagnosis, experts: ExpertNames) -> tuple[ResidualDifference, ...]:
    """Residuals of the experts that both reports have."""
    one, two = ({s.name: s.residual for s in r.experts_summary} for r in (first, second))
    return tuple(ResidualDifference(a, one[a], two[b]) for a, b in experts if a in one and b in two)


def check_differences(first: Diagnosis, second: Diagnosis) -> tuple[CheckDifference, ...]:
    """Checks with other outcomes, in the order of their codes."""
    one, two = ({c.code: c for c in r.checks} for r in (first, second))
    titles = {c.code: c.title for c in (*second.checks, *first.checks)}
    found = (CheckDifference(c, titles[c], _outcome(one.get(c)), _outcome(two.get(c))) for c in sorted(titles))
    return tuple(c for c in found if c.first != c.second)


def _outcome(check: CheckResult | None) -> str | None:
    """`issue found, 3 tensors`, `clear`; None for a check that is not in the report."""
    if check is None:
        return None
    if check.verdict != "found":
        return check.verdict.replace("_", " ")
    tensors = f", {check.count} tensor{'s' if check.count != 1 else ''}" if check.count else ""
    return f"{check.severity} found{tensors}"
