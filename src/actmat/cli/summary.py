"""Format plans, results and diagnoses of merges for a terminal of 80 columns and as JSON."""

from __future__ import annotations

import dataclasses
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from actmat.cli.screen import console, escape, note_console, plain_table
from actmat.diagnostics.answers import RIVALS, UNENDED, kept_words, verdict
from actmat.diagnostics.model import AgreementRow, Diagnosis, Finding
from actmat.errors import format_size
from actmat.planning.model import Item, count_actions
from actmat.recipe.values import format_value
from actmat.report.words import (
    action_counts,
    are_image_files,
    item_groups,
    measure_answers,
    plan_time,
    plan_traffic,
    plural,
)
from actmat.system import usable_cores

if TYPE_CHECKING:
    from actmat.diagnostics.totals import Norms
    from actmat.planning import MergePlan
    from actmat.run import MergeReport

WORST = 3
"""Number of layers of an extraction listed by name."""

ROUNDING = 1e-5
"""Relative error of a layer explained by rounding the factors; smaller errors are not listed."""

MOST_NOTES = 10
"""Notes of a summary; all are in the manifest."""
MOST_PATTERNS = 4
"""Maximum number of name patterns shown per group."""


def print_plan(plan: MergePlan, *, full: bool) -> None:
    """Print groups of outputs with action and reason; `full` prints one line per output."""
    from_adapters = plan.output == "adapter" and not plan.is_extracted
    over = plural(len(plan.experts), "adapter" if from_adapters else "expert")
    over += ", into an adapter" if from_adapters else f" of {escape(plan.recipe.base)}"
    over += ", extracted into an adapter" if plan.is_extracted else ""
    weights = plan.recipe.weights
    over += f", weights {', '.join(map(format_value, weights))}" if {*weights} - {1.0} else ""
    if plan.experts:
        console.print(f"[bold]{escape(plan.recipe.method)}[/bold] over {over}")
    else:
        console.print(f"copy of the stack of layers {escape(plan.recipe.base)}")
    _print_notes(plan, "warning")
    print_items(plan, plan.items, plan.kept, full=full)
    console.print(_ranks(plan) if from_adapters else escape(action_counts(plan)))
    console.print(plan_traffic(plan))
    console.print(plan_time(plan, usable_cores()) if plan.device == "cpu" else _devices(plan))
    _print_notes(plan, "note")


def _print_notes(plan: MergePlan, severity: str, indent: str = "", most: int | None = None) -> None:
    """Notes of one severity, at most so many; warnings, likely mistakes in a recipe, stand at the top."""
    notes = [note for note in plan.notes if note.severity == severity]
    for note in notes[:most]:
        console.print(
            f"[yellow]{escape(note)}[/yellow]" if note.severity == "warning" else f"{indent}note: {escape(note)}"
        )
    if len(notes[:most]) < len(notes):
        command = f"actmat inspect {shlex.quote(str(plan.recipe.out))} --notes"
        console.print(f"{indent}and {len(notes) - len(notes[:most])} more notes: {escape(command)}", soft_wrap=True)


def print_warnings(plan: MergePlan) -> None:
    """Print warnings to stderr, for commands whose summary is not printed."""
    for note in plan.notes:
        if note.severity == "warning":
            note_console.print(escape(note), soft_wrap=True)


def print_items(plan: MergePlan, items: Sequence[Item], copied: Mapping[str, str], *, full: bool) -> None:
    """Print outputs grouped by action and reason, with their name patterns."""
    counted = "modules" if plan.output == "adapter" and not plan.is_extracted else "tensors"
    if full:
        for item in items:  # line by line: a table of 100,000 rows would take gigabytes
            shape = "x".join(map(str, item.shape)) or "scalar"
            way = item.write.kind if item.reading is None else f"{item.write.kind}, {item.reading}"
            console.print(f"{item.action}  {escape(item.name)}  {shape} ({way}): {escape(item.reason)}")
    groups = item_groups(items if not full else (), copied)
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
    """Line with the number of tensors merged on devices, and the memory for them."""
    moved = len(plan.on_device)
    most = max(plan.on_device, key=lambda item: item.cost.device_bytes, default=None)
    needs = "" if most is None else f"; {escape(most.name)} needs the most, {format_size(most.cost.device_bytes)}"
    has = "" if plan.device_memory is None else f"; limit per tensor {format_size(plan.device_memory)}"
    return f"devices: {escape(plan.device)}: {moved} of {len(plan.items)} tensors{needs}{has}"


def _ranks(plan: MergePlan) -> str:
    ranks = Counter(m.write.rank for m in plan.modules)
    return (
        f"ranks written: {', '.join(f'{r} ({n} modules)' for r, n in sorted(ranks.items()))}; exact merges need up to "
        f"{max((m.write.exact_rank for m in plan.modules), default=0)}"
    )


def print_summary(report: MergeReport) -> None:
    """Print the result of a merge: counts, norms of an adapter, bytes, notes, and findings of a diagnosis."""
    plan = report.plan
    from_adapters = plan.output == "adapter" and not plan.is_extracted
    of = plural(len(plan.experts), "adapter" if from_adapters else "expert")
    of += " into an adapter" if from_adapters else ", extracted into an adapter" if plan.is_extracted else ""
    what = f"{plan.recipe.method}; {of}" if plan.experts else "a stack of layers"
    console.print(f"[bold]{escape(report.out)}[/bold]  ({escape(what)})")
    print_answers(report)
    _print_notes(plan, "warning")
    if report.was_finished:
        console.print("  already complete from an earlier run of the same command; 'actmat verify' checks its content")
        _print_report_size(report)
        _print_findings(report)
        return
    if plan.is_extracted:
        print_extracted(report)
    else:
        for line in _adapter_lines(report) if from_adapters else _model_lines(report):
            console.print(f"  {line}")
    _print_report_size(report)
    is_file = isinstance(report.out, Path) and report.out.is_file()
    console.print(
        f"  {format_size(plan.read_bytes)} read, {format_size(plan.write_bytes)} written in {report.seconds:.1f} s; "
        + ("recipe in the file's metadata" if is_file else "all hashes in actmat_manifest.json")
    )
    _print_notes(plan, "note", "  ", most=None if is_file else MOST_NOTES)
    _print_findings(report)


def print_answers(report: MergeReport) -> None:
    """Print the answers that a merge kept of each expert, or how to measure them."""
    if report.answers:
        print_kept(report.answers)
    elif len(report.plan.experts) > 1:
        how = "add --data NAME=INPUTS per expert (a prompt or file)"
        of_images = "" not in report.plan.stems
        if of_images or are_image_files(i.location for i in report.plan.inputs):
            how = "compare its images with the experts'"
        console.print(f"  is it good? Not measured: {how}")


def print_kept(rows: Sequence[AgreementRow]) -> None:
    """Print the verdict on the answers kept, and those of each expert."""
    line = verdict(rows)
    console.print(f"[{'green' if line.startswith('better') else 'yellow'}]{escape(line)}[/]")
    console.print(answers_table(rows))
    if unended := sum(row.unended for row in rows):
        console.print(f"  {unended} answers did not end in time: their first {UNENDED} tokens are compared")
    if any(row.measured for row in rows):
        console.print("  *: measured on these very inputs")
    if any(row.is_self_written for row in rows):
        console.print("  +: prompts that the expert wrote itself (--data self), not a user's")


def answers_table(rows: Sequence[AgreementRow]) -> Table:
    """Table with the answers kept of each expert, by other merges as well; with labels, accuracies in brackets."""
    graded = any(row.expert_accuracy is not None for row in rows)
    table = _table("expert", "answers kept", "95 %", *RIVALS, "inputs", *["expert's"] * graded)
    for row in rows:
        wide = "-" if row.low is None or row.high is None else f"{row.low:.0%} to {row.high:.0%}"
        cells = [kept_words(merge, row.inputs) for merge in (row, row.without, row.average)]
        expert = "-" if row.expert_accuracy is None else f"({row.expert_accuracy:.1%})"
        count = f"{row.inputs}{'*' * row.measured}{'+' * row.is_self_written}"
        table.add_row(escape(row.expert), cells[0], wide, *cells[1:], count, *[expert] * graded)
    return table


def _print_report_size(report: MergeReport) -> None:
    """Print warnings about the size of the merged delta and the cut of a rank, except after a diagnosis."""
    for warning in report.warnings if report.diagnosis is None else ():
        # at a URL: diagnose the recipe
        where = f" {shlex.quote(str(report.out))}" if isinstance(report.out, Path) else ""
        if not warning.code.startswith("AM4"):
            console.print(f"  [yellow]warning[/]: {escape(warning.text)} ({warning.code})")
            continue
        console.print(f"  [yellow]warning {warning.code}[/]: {warning.text}; see")
        console.print(f"    actmat diagnose{escape(where)}", soft_wrap=True)


def _print_findings(report: MergeReport) -> None:
    """Print findings and the report page of a diagnosed merge."""
    if report.diagnosis is not None:
        print_findings(report.diagnosis.findings)
        console.print(f"report: {escape(report.out)}/report.html", soft_wrap=True)


def print_extracted(report: MergeReport) -> None:
    """Print layers, ranks and errors of an extracted adapter, and tensors saved whole or left out."""
    rows: list[dict[str, Any]] = report.manifest["modules"]
    changed = [r for r in rows if not (r["unchanged"] or r["stats"].get("norm") == 0.0)]
    factored = [r for r in changed if r["kind"] == "factored"]
    ranks = sorted({r["stats"]["rank"] for r in factored})
    shown = "none" if not ranks else str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    errors = sorted(((float(r["stats"]["relative_error"]), r["name"]) for r in factored), key=lambda e: -e[0])
    worst = [(error, name) for error, name in errors[:WORST] if error > ROUNDING]
    of_what = "all layers" + " and what is left out" * any(r["kind"] == "left out" for r in changed)
    console.print(
        f"  {len(factored)} layers of rank {shown}; relative error {report.totals.relative_error:.3g} over {of_what}"
        + ("; largest:" if worst else "")
    )
    for error, name in worst:
        console.print(f"    {error:.3g}  {escape(name)}")
    whole: dict[tuple[str, str], list[str]] = {}
    for row in changed:
        if row["kind"] != "factored":
            whole.setdefault((row["kind"], row["why"]), []).append(row["name"])
    for (kind, why), names in whole.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        words = "saved whole" if kind == "saved" else kind
        console.print(f"  {words}: {escape(names[0])}{more} ({escape(why)})")
    if same := len(rows) - len(changed):
        console.print(f"  {same} tensors are the same as in the base")


def _model_lines(report: MergeReport) -> list[str]:

    words = {"merge": "merged", "average": "averaged", "copy": "copied", "tie": "tied"}
    counts = ", ".join(f"{n} {words[a]}" for a, n in count_actions(report.plan.items).items() if n)
    unchanged, vanished = report.totals.unchanged, report.totals.vanished
    lines = [counts + (f"; {unchanged} of them not changed by any expert" if unchanged > vanished else "")]
    if vanished:
        lines += [f"warning: deltas of {plural(vanished, 'float64 tensor')} are too small to be computed and count as "
                  "zero. Fix: --set compute_dtype=float64, or larger numbers"]  # fmt: skip
    return lines


def _adapter_lines(report: MergeReport) -> list[str]:
    modules = report.plan.modules
    full = len(report.plan.items) - len(modules)
    rank = max((m.write.rank for m in modules), default=0)
    counts = f"{len(modules)} module{'s' * (len(modules) != 1)} of rank {rank}, {full} full tensor{'s' * (full != 1)}"
    error = report.totals.relative_error
    if not error or error < ROUNDING:
        return [counts, "exact: nothing was truncated" + (", apart from rounding" if error else "")]
    return [counts, f"truncated to this rank: relative error {error:.2g}"]


# JSON


def merge_data(report: MergeReport) -> dict[str, Any]:
    """One output of a merge as plain data."""
    plan, totals, diagnosis = report.plan, report.totals, report.diagnosis
    return {
        "out": str(report.out),
        "kind": plan.output,
        "method": plan.recipe.method,
        "options": dict(plan.recipe.options),
        "experts": [e.label for e in plan.experts],
        "was_finished": report.was_finished,
        "actions": count_actions(plan.items),
        "unchanged": totals.unchanged,
        "answers": [dataclasses.asdict(row) for row in report.answers] or None,
        "relative_error": totals.relative_error,
        "size": size_data(totals.norms),
        "warnings": list(map(str, report.warnings)),
        "read_bytes": plan.read_bytes,
        "write_bytes": plan.write_bytes,
        "seconds": round(report.seconds, 3),
        "notes": [dataclasses.asdict(n) for n in plan.notes],
        "findings": None if diagnosis is None else [f.code for f in diagnosis.findings if not f.muted],
    }


def compact_plan(plan: MergePlan) -> dict[str, Any]:
    """A plan without its tensors: counts by action and reason, and totals."""
    groups: dict[tuple[str, str | None, str], list[str]] = {}
    for item in plan.items:
        method = item.call.method if item.call else None
        groups.setdefault((item.action, method, item.reason), []).append(item.name)
    rows = [
        {"action": action, "method": method, "count": len(names), "reason": reason, "first": names[0]}
        for (action, method, reason), names in groups.items()
    ]
    return {
        "kind": plan.output,
        "method": plan.recipe.method,
        "base": plan.recipe.base,
        "experts": [e.label for e in plan.experts],
        "family": plan.family,
        "items": len(plan.items),
        "groups": rows,
        "kept": len(plan.kept),
        "read_bytes": plan.read_bytes,
        "write_bytes": plan.write_bytes,
        "peak_bytes": plan.peak_bytes(1),
        "seconds_one_worker": plan.seconds,
        "device": plan.device,
        "notes": [dataclasses.asdict(n) for n in plan.notes],
    }


def size_data(norms: Norms | None) -> dict[str, Any] | None:
    """Norms of a merge; None if nothing was merged."""
    return None if norms is None else {"merged": norms.merged, "sum": norms.total, "experts": list(norms.experts)}


# Diagnoses


def print_diagnosis(diagnosis: Diagnosis, files: Sequence[Path] = ()) -> None:
    """Print experts, checks, and the report's files."""
    console.print(
        f"[bold]{escape(diagnosis.method)}[/bold] over {len(diagnosis.experts)} experts"
        + (f" of {escape(diagnosis.base)}" if diagnosis.base else "")
        + f": {len(diagnosis.measures)} matrices measured"
    )
    if diagnosis.agreement is not None:
        print_kept(diagnosis.agreement)
    else:
        commands = measure_answers(diagnosis).splitlines()
        how = "On a few inputs of each expert's task, without labels:" if commands else "Compare images."
        console.print(f"\nis it good? Not measured. {how}")
        for line in commands:
            console.print(f"  {escape(line)}", soft_wrap=True)
    if diagnosis.measures:
        console.print("\nrho: 0 as the expert, 1 as the base")
        console.print(_experts(diagnosis))
    print_findings(diagnosis.findings)
    for note in diagnosis.recipe.get("notes", ()):
        console.print(f"note: {escape(note)}")
    for file in files:
        console.print(f"report: {escape(file)}", soft_wrap=True)


def print_findings(findings: Sequence[Finding]) -> None:
    """Print what checks found, and the codes of muted ones."""
    for finding in (f for f in findings if not f.muted):
        color = "red" if finding.severity == "issue" else "yellow"
        console.print(f"\n[{color}]{finding.severity} {finding.code}[/{color}] [bold]{escape(finding.title)}[/bold]")
        console.print(f"  {escape(finding.message)}.")
    muted = [f.code for f in findings if f.muted]
    words = f"\nchecks: {len(findings) - len(muted)} found something"
    console.print(words + (f", muted: {', '.join(muted)}" if muted else ""))


def _experts(diagnosis: Diagnosis) -> Table:
    """Table with a row per expert, over all matrices."""
    on_data = {row.expert: row.residual for row in diagnosis.residual_on_data or ()}
    table = _table("expert", "share of change", "rho", *["rho on data"] * bool(on_data))
    for expert in diagnosis.experts:
        measured = on_data.get(expert.name)
        more = ["-" if measured is None else f"{measured:.2f}"] * bool(on_data)
        table.add_row(escape(expert.name), f"{expert.energy_share:.0%}", f"{expert.residual:.2f}", *more)
    return table


def _table(*columns: str) -> Table:
    return plain_table(*columns, numbers={*columns[1:]} - {"expert", "data"})
