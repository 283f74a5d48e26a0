"""Plans and results of merges on a terminal of 80 columns."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actmat.plan import MergePlan
    from actmat.run import MergeReport

__all__ = ["print_plan", "print_summary"]


def print_plan(plan: MergePlan, *, every: bool) -> None:
    """Groups of outputs with what happens to them and why; `every`: one line per output."""
    from actmat.cli.screen import console, escape, first_to_last, plain_table

    to_adapter = plan.output == "adapter"
    over = "adapters, into an adapter" if to_adapter else f"experts of {escape(plan.recipe.base)}"
    console.print(f"[bold]{escape(plan.recipe.method)}[/bold] over {len(plan.experts)} {over}")
    counted = "modules" if to_adapter else "tensors"
    table = plain_table(counted, "action", "which, and why", numbers=[counted])
    groups: dict[tuple[str, str], list[str]] = {}
    for item in plan.items:
        groups.setdefault((item.action, item.reason), []).append(item.name)
        if every:
            table.add_row("x".join(map(str, item.shape)), item.action, escape(f"{item.name}: {item.reason}"))
    for name, pattern in plan.kept.items():
        key = ("keep", f"kept by the recipe ('{pattern}'): no delta is written")
        groups.setdefault(key, []).append(name)
    for (action, reason), names in groups.items():
        if not every or action == "keep":
            shown = escape(first_to_last(names))
            table.add_row(str(len(names)), action, f"{escape(reason)}\n[dim]{shown}[/dim]")
    console.print(table)
    console.print(_ranks(plan) if to_adapter else _counts(plan))
    console.print(_traffic(plan))
    for note in plan.notes:
        console.print(f"note: {escape(note)}")


def _ranks(plan: MergePlan) -> str:
    ranks = Counter(m.pair.rank for m in plan.modules)
    return (
        f"ranks written: {', '.join(f'{r} ({n} modules)' for r, n in sorted(ranks.items()))}; exact would be up to "
        f"{max((m.pair.exact_rank for m in plan.modules), default=0)}"
    )


def _counts(plan: MergePlan) -> str:
    from actmat.cli.screen import escape
    from actmat.plan.model import count_actions

    counts = ", ".join(f"{n} {a}" for a, n in count_actions(plan.items).items() if n)
    family = escape(plan.family or "not recognised, by names and shapes")
    return f"{len(plan.items)} tensors: {counts}; family: {family}"


def _traffic(plan: MergePlan) -> str:
    from actmat.errors import format_size

    files = "" if plan.output == "adapter" else f" in {len(plan.shards)} file(s)"
    return (
        f"read {format_size(plan.read_bytes)}, write {format_size(plan.write_bytes)}{files}; peak memory "
        f"{format_size(plan.peak_bytes(1))} with one worker, {format_size(plan.peak_bytes(2))} with two"
    )


def print_summary(report: MergeReport) -> None:
    """Result of a merge: what was done, norms of an adapter, traffic, notes, findings if it was diagnosed."""
    from actmat.cli.screen import console, escape
    from actmat.errors import format_size

    plan = report.plan
    to_adapter = plan.output == "adapter"
    of = "adapters into an adapter" if to_adapter else "experts"
    console.print(f"[bold]{escape(report.out)}[/bold]  ({escape(plan.recipe.method)}; {len(plan.experts)} {of})")
    if report.was_finished:
        checked = "all its tensors, and its inputs, are intact"
        if isinstance(report.out, str):
            checked = "its files have their sizes ('actmat verify' reads them)"
        console.print(f"  is complete: an earlier run of the same command finished it; {checked}")
        return
    for line in _adapter_lines(report) if to_adapter else _model_lines(report):
        console.print(f"  {line}")
    console.print(
        f"  {format_size(plan.read_bytes)} read, {format_size(plan.write_bytes)} written in {report.seconds:.1f} s; "
        "all hashes in actmat_manifest.json"
    )
    for note in plan.notes:
        console.print(f"  note: {escape(note)}")
    if not to_adapter and (nonfinite := sum(t["nonfinite"] for t in report.manifest["tensors"])):
        console.print(f"  note: {nonfinite} NaN or Inf entries of experts were treated as unchanged")
    if report.diagnosis is not None:
        from actmat.cli.diagnosis import print_checks

        print_checks(report.diagnosis.checks)


def _model_lines(report: MergeReport) -> list[str]:
    from actmat.plan.model import count_actions

    words = {"merge": "merged", "average": "averaged", "copy": "copied", "tie": "tied"}
    counts = ", ".join(f"{n} {words[a]}" for a, n in count_actions(report.plan.items).items() if n)
    unchanged = sum(t["unchanged"] and t["action"] in ("merge", "average") for t in report.manifest["tensors"])
    return [counts + (f"; {unchanged} of them unchanged by every expert" if unchanged else "")]


def _adapter_lines(report: MergeReport) -> list[str]:
    modules = report.plan.modules
    full = len(report.plan.items) - len(modules)
    lines = [
        f"{len(modules)} modules of rank {max((m.pair.rank for m in modules), default=0)}, {full} full tensors; "
        f"relative error of the truncation {report.manifest['output']['relative_error']:.2e}"
    ]
    stats = [m["stats"] for m in report.manifest["modules"] if "norm" in m["stats"]]
    if stats:
        merged = sum(s["norm"] ** 2 for s in stats) ** 0.5
        total = sum(s["sum_norm"] ** 2 for s in stats) ** 0.5
        experts = [sum(n**2 for n in ns) ** 0.5 for ns in zip(*(s["expert_norms"] for s in stats), strict=True)]
        lines.append(
            f"norm of the merged delta {merged:.4g}; of the experts' {', '.join(f'{n:.4g}' for n in experts)}; of "
            f"their sum {total:.4g}"
        )
    return lines
