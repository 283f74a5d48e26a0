"""Results of a merge with several outputs in one table; common facts are printed once."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from actmat.cli.screen import console, escape, plain_table
from actmat.cli.summary import ROUNDING, print_summary
from actmat.errors import Note, format_size
from actmat.planning.model import count_actions
from actmat.report.words import plural, size_ratios

if TYPE_CHECKING:
    from actmat.run import MergeReport

SEVERAL = 3
"""Number of outputs from which a table is shorter than separate summaries."""


def print_outputs(reports: Sequence[MergeReport]) -> None:
    """Print a summary of each output, or a table if there are at least `SEVERAL`."""
    outs = [str(r.out) for r in reports]
    if len(reports) < SEVERAL or any(r.plan.is_extracted or not r.plan.experts for r in reports):
        for report in reports:
            print_summary(report)
        return
    place = os.path.commonpath(outs) if "://" not in outs[0] else os.path.dirname(outs[0])
    names = {out: out.removeprefix(place).lstrip("/\\") for out in outs}
    plan = reports[0].plan
    counts = ", ".join(f"{n} {action}" for action, n in count_actions(plan.items).items() if n)
    tensors = "tensors" if plan.output != "adapter" else "modules and tensors"
    experts = plural(len(plan.experts), "expert")
    console.print(f"[bold]{escape(place or '.')}[/bold]: {len(reports)} outputs of {experts}")
    console.print(f"  {tensors} of each: {counts}")
    console.print(_table(reports, names))
    console.print("size: norm of the merged delta over the mean norm of the experts', and over the norm of their sum")
    _print_warnings(reports, names)
    for report in reports:
        if report.diagnosis is not None:
            console.print(f"report: {escape(report.out)}/report.html", soft_wrap=True)
    written = sum(r.plan.write_bytes for r in reports)
    seconds = max(r.seconds for r in reports)
    record = "recipe in the metadata" if os.path.isfile(outs[0]) else "all hashes in actmat_manifest.json"
    console.print(f"{format_size(written)} written in {seconds:.1f} s; {record} of each")
    _print_notes(reports, names)


def _table(reports: Sequence[MergeReport], names: Mapping[str, str]) -> object:
    numbers = ["x mean norm", "x sum's norm"]
    table = plain_table("output", *numbers, "remarks", numbers=numbers)
    for report in reports:
        ratios = size_ratios(report.totals.norms)
        sizes = [f"{ratios[of]:.3g}" if of in ratios else "-" for of in ("a mean expert", "the experts' sum")]
        table.add_row(escape(names[str(report.out)]), *sizes, escape("; ".join(_remarks(report))))
    return table


def _remarks(report: MergeReport) -> list[str]:
    """Facts that can differ between outputs."""
    remarks = ["complete before"] if report.was_finished else []
    lost = report.totals.relative_error
    remarks += [f"rank cut: relative error {lost:.2g}"] if lost and lost > ROUNDING else []
    if report.diagnosis is not None:
        return remarks + [f.code for f in report.diagnosis.findings if not f.muted]
    remarks += [f"warning {w.code}" for w in report.warnings]
    bad = report.totals.nonfinite
    return remarks + ([f"{bad} NaN or Inf entries treated as unchanged"] if bad else [])


def _print_warnings(reports: Sequence[MergeReport], names: Mapping[str, str]) -> None:
    """Print every warning once, with the text of the first output that has it."""
    rows_of: dict[str, list[tuple[str, str]]] = {}
    for report in reports if reports[0].diagnosis is None else ():
        for warning in report.warnings:
            rows_of.setdefault(warning.code, []).append((str(report.out), warning.text))
    for code, rows in rows_of.items():
        (out, wrong), more = rows[0], len(rows) - 1
        others = f", and {more} more have this warning" if more else ""
        console.print(f"[yellow]warning {code}[/]: {escape(names[out])}: {escape(wrong)}{others}; see")
        console.print(f"  actmat diagnose {escape(shlex.quote(out))}", soft_wrap=True)


def _print_notes(reports: Sequence[MergeReport], names: Mapping[str, str]) -> None:
    """Print every note once, with the outputs that have it unless all do."""
    notes: dict[Note, list[str]] = {}
    for report in reports:
        for note in dict.fromkeys(report.plan.notes):
            notes.setdefault(note, []).append(names[str(report.out)])
    for note, of in notes.items():
        whose = "" if len(of) == len(reports) else f" ({', '.join(of)})"
        warns = note.severity == "warning"
        console.print(f"{'[yellow]warning[/]' if warns else 'note'}{escape(whose)}: {escape(note.text)}")
