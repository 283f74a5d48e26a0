"""Plans and results of merges on a terminal of 80 columns."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actmat.engine.shares import PartPlan
    from actmat.planning import MergePlan
    from actmat.planning.model import Item
    from actmat.report.totals import Norms
    from actmat.run import MergeReport

__all__ = ["print_extracted", "print_part", "print_plan", "print_size", "print_summary"]


WORST = 3
"""Layers of an extraction that are listed by name."""

ROUNDING = 1e-5
"""Relative error of a layer below which it is that of rounding the factors, and worth no line."""

MOST_PATTERNS = 4
"""Patterns of names that are shown of one group."""


def print_plan(plan: MergePlan, *, full: bool) -> None:
    """Groups of outputs with what happens to them and why; `full`: one line per output."""
    from actmat.cli.screen import console, escape
    from actmat.report.words import action_counts, plan_time, plan_traffic, plural
    from actmat.system import usable_cores

    from_adapters = plan.output == "adapter" and not plan.is_extracted
    over = plural(len(plan.experts), "adapter" if from_adapters else "expert")
    over += ", into an adapter" if from_adapters else f" of {escape(plan.recipe.base)}"
    over += ", extracted into an adapter" if plan.is_extracted else ""
    if plan.experts:
        console.print(f"[bold]{escape(plan.recipe.method)}[/bold] over {over}")
    else:
        console.print(f"copy of the layers {escape(plan.recipe.base)}")
    _print_items(plan, plan.items, plan.kept, full=full)
    console.print(_ranks(plan) if from_adapters else escape(action_counts(plan)))
    console.print(plan_traffic(plan))
    console.print(plan_time(plan, usable_cores()) if plan.device == "cpu" else _devices(plan))
    for note in plan.notes:
        console.print(f"note: {escape(note)}")


def print_part(plan: MergePlan, share: PartPlan, *, full: bool) -> None:
    """The share of one part: its tensors, its traffic, the cost of surveys."""
    from actmat.cli.screen import console
    from actmat.errors import format_size

    total = sum(i.action != "tie" for i in plan.items)
    console.print(f"[bold]part {share.part}[/bold]: {len(share.names)} of {total} tensors")
    _print_items(plan, [plan.by_name[name] for name in share.names], {}, full=full)
    console.print(
        f"{100 * share.work:.2f} % of the work (the largest part: {100 * share.largest:.2f} %); read "
        f"{format_size(share.read_bytes)}, write {format_size(share.write_bytes)}"
    )
    if share.survey_bytes:
        console.print(
            f"before that, each pass of the survey of the whole model reads {format_size(share.survey_bytes)}, in this "
            "part as in every other"
        )


def _print_items(plan: MergePlan, items: Sequence[Item], kept: Mapping[str, str], *, full: bool) -> None:
    """A table of outputs, in groups of the same action and reason, each with the patterns of its names."""
    from actmat.cli.screen import console, escape, plain_table
    from actmat.report.words import item_groups

    counted = "modules" if plan.output == "adapter" and not plan.is_extracted else "tensors"
    if full:
        for item in items:  # line by line: a table of 100,000 rows would take gigabytes
            shape = "x".join(map(str, item.shape)) or "scalar"
            console.print(f"{item.action}  {escape(item.name)}  {shape}: {escape(item.reason)}")
    groups = item_groups(items if not full else (), kept)
    if not groups:
        return
    table = plain_table(counted, "action", "which, and why", numbers=[counted])
    for group in groups:
        lines = [escape(p) for p in group.patterns[:MOST_PATTERNS]]
        if len(group.patterns) > MOST_PATTERNS:
            lines.append(f"and {len(group.patterns) - MOST_PATTERNS} more patterns")
        shown = "\n".join(f"[dim]{line}[/dim]" for line in lines)
        table.add_row(str(group.count), group.action, f"{escape(group.reason)}\n{shown}")
    console.print(table)


def _devices(plan: MergePlan) -> str:
    """Number of tensors that devices merge, and the memory for them."""
    from actmat.cli.screen import escape
    from actmat.errors import format_size
    from actmat.planning.placement import STAGING_BYTES

    moved = len(plan.on_device)
    most = max(plan.on_device, key=lambda item: item.cost.device_bytes, default=None)
    needs = "" if most is None else f"; {escape(most.name)} needs most, {format_size(most.cost.device_bytes)} of one"
    has = "" if plan.device_memory is None else f", which has {format_size(plan.device_memory)} for a tensor"
    simulated = plan.device.startswith("cpu")
    staging = "" if simulated else f"; the way to each takes {format_size(STAGING_BYTES)} more, on host and device"
    return (
        f"devices: {escape(plan.device)}, one worker each (executor 'devices'): {moved} of {len(plan.items)} tensors"
        f"{needs}{has}{staging}"
    )


def _ranks(plan: MergePlan) -> str:
    ranks = Counter(m.pair.rank for m in plan.modules)
    return (
        f"ranks written: {', '.join(f'{r} ({n} modules)' for r, n in sorted(ranks.items()))}; exact would be up to "
        f"{max((m.pair.exact_rank for m in plan.modules), default=0)}"
    )


def print_summary(report: MergeReport) -> None:
    """Result of a merge: what was done, norms of an adapter, traffic, notes, findings if it was diagnosed."""
    from actmat.cli.screen import console, escape
    from actmat.errors import format_size
    from actmat.report.words import plural

    plan = report.plan
    from_adapters = plan.output == "adapter" and not plan.is_extracted
    of = plural(len(plan.experts), "adapter" if from_adapters else "expert")
    of += " into an adapter" if from_adapters else ", extracted into an adapter" if plan.is_extracted else ""
    what = f"{plan.recipe.method}; {of}" if plan.experts else "a stack of layers"
    console.print(f"[bold]{escape(report.out)}[/bold]  ({escape(what)})")
    if report.was_finished:
        checked = "all its tensors, and its inputs, are intact"
        if isinstance(report.out, str):
            checked = "its files have their sizes ('actmat verify' reads them)"
        console.print(f"  is complete: an earlier run of the same command finished it; {checked}")
        _print_report_size(report)
        _print_findings(report)
        return
    if plan.is_extracted:
        print_extracted(report)
    else:
        for line in _adapter_lines(report) if from_adapters else _model_lines(report):
            console.print(f"  {line}")
    _print_report_size(report)
    console.print(
        f"  {format_size(plan.read_bytes)} read, {format_size(plan.write_bytes)} written in {report.seconds:.1f} s; "
        "all hashes in actmat_manifest.json"
    )
    for note in plan.notes:
        console.print(f"  note: {escape(note)}")
    if not from_adapters and report.totals.nonfinite:
        console.print(f"  note: {report.totals.nonfinite} NaN or Inf entries of experts were treated as unchanged")
    _print_findings(report)


def _print_report_size(report: MergeReport) -> None:
    """Size of the merged delta; of an extraction from one model it says nothing."""
    if len(report.plan.experts) > 1 or not report.plan.is_extracted:
        warn, muted = report.diagnosis is None, report.plan.recipe.mute
        print_size(report.totals.norms, report.out, warn=warn, muted=muted)


def _print_findings(report: MergeReport) -> None:
    """Findings, and the page that shows them, where they were asked for."""
    if report.diagnosis is not None:
        from actmat.cli.diagnosis import print_checks
        from actmat.cli.screen import console, escape

        print_checks(report.diagnosis.checks)
        console.print(f"report: {escape(report.out)}/report.html", soft_wrap=True)


def print_extracted(report: MergeReport) -> None:
    """Layers, ranks and errors of an adapter that was extracted, and what it holds besides them or lacks."""
    from actmat.api.extracting import extracted_rows
    from actmat.cli.screen import console, escape

    rows = extracted_rows(report.manifest)
    factored = [r for r in rows if r["kind"] == "factored"]
    ranks = sorted({r["rank"] for r in factored})
    shown = "none" if not ranks else str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    worst = sorted((r for r in factored if r["relative_error"] > ROUNDING), key=lambda r: -float(r["relative_error"]))
    worst = worst[:WORST]
    error = report.manifest["output"]["relative_error"]
    console.print(f"  {len(factored)} layers of rank {shown}; relative error {error:.3g} over all layers"
                  + ("; largest:" if worst else ""))  # fmt: skip
    for row in worst:
        console.print(f"    {row['relative_error']:.3g}  {escape(row['name'])}")
    for kind, words in (("saved", "saved whole"), ("left out", "left out")):
        found = [r for r in rows if r["kind"] == kind]
        for reason in dict.fromkeys(r["reason"] for r in found):
            names = [r["name"] for r in found if r["reason"] == reason]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            console.print(f"  {words}: {escape(names[0])}{more} ({escape(reason)})")
    if same := sum(r["kind"] == "unchanged" for r in rows):
        console.print(f"  {same} tensors are the same as in the base")


def print_size(norms: Norms | None, out: Path | str, *, warn: bool, muted: Sequence[str] = ()) -> None:
    """Size of a merged delta against the sum of the experts' and a mean expert's; nothing where nothing was merged.

    Args:
        norms: of a finished merge.
        out: where it is.
        warn: warn where it is far off; a diagnosis says more.
        muted: codes of checks that shall not count.
    """
    from actmat.cli.screen import console, escape
    from actmat.diagnostics.checks.size import SIZE_CHECKS
    from actmat.report.words import size_finding, size_words

    if norms is None or not (words := size_words(norms)):
        return
    console.print(f"  size: {words} (norm {norms.merged:.3g})")
    found = size_finding(norms, muted)
    if warn and found is not None:
        code, wrong = found
        where = f" {shlex.quote(str(out))}" if isinstance(out, Path) else ""  # what is at a URL is diagnosed by recipe
        severity = next(check.severity for check in SIZE_CHECKS if check.code == code)
        console.print(f"  [{'red' if severity == 'issue' else 'yellow'}]warning {code}[/]: {wrong}; see")
        console.print(f"    actmat diagnose{escape(where)}", soft_wrap=True)


def _model_lines(report: MergeReport) -> list[str]:
    from actmat.planning.model import count_actions

    words = {"merge": "merged", "average": "averaged", "copy": "copied", "tie": "tied"}
    counts = ", ".join(f"{n} {words[a]}" for a, n in count_actions(report.plan.items).items() if n)
    unchanged = report.totals.unchanged
    return [counts + (f"; {unchanged} of them unchanged by every expert" if unchanged else "")]


def _adapter_lines(report: MergeReport) -> list[str]:
    modules = report.plan.modules
    full = len(report.plan.items) - len(modules)
    rank = max((m.pair.rank for m in modules), default=0)
    counts = f"{len(modules)} module{'s' * (len(modules) != 1)} of rank {rank}, {full} full tensor{'s' * (full != 1)}"
    error = report.totals.relative_error
    return [counts, f"truncated to this rank: relative error {error:.2g}" if error else "exact: nothing was truncated"]
