"""Print a diagnosis on a terminal of 80 columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from actmat.cli.screen import console, escape, plain_table
from actmat.diagnostics.model import AgreementRow, CheckResult, DataResidual, Diagnosis, Measure

__all__ = ["print_checks", "print_diagnosis"]

CONTESTED = 10
"""Largest number of matrices listed."""


def print_diagnosis(found: Diagnosis, files: Sequence[Path] = ()) -> None:
    """Print the experts, the checks, the matrices on which the experts disagree most, and the files of the report."""
    totals = found.totals
    console.print(
        f"[bold]{escape(found.method)}[/bold] over {len(found.experts)} experts"
        + (f" of {escape(found.base)}" if found.base else "")
        + f": {totals.measured} matrices measured in {totals.seconds or 0:.1f} s"
    )
    if found.measures:
        console.print("\nper expert: norm and rho over all matrices, medians of the rest")
        console.print(_experts(found))
        console.print(_merged(found.measures))
    if found.agreement is not None:
        console.print("\nanswers on unlabelled inputs, against each expert's; a measurement, no forecast")
        console.print(_agreement(found.agreement))
    if found.residual_on_data is not None:
        console.print("\nrho on the inputs of the statistics; 0: as the expert, 1: as the base")
        console.print(_on_data(found.residual_on_data))
    print_checks(found.checks)
    if found.measures:
        console.print("\nmost contested matrices: rho of the expert that is met worst")
        console.print(_contested(found))
    for file in files:
        console.print(f"report: {escape(file)}", soft_wrap=True)


def print_checks(checks: Sequence[CheckResult]) -> None:
    """Print findings, and how many checks were clear, did not apply, or were muted."""
    for check in checks:
        if check.verdict == "found":
            colour = "red" if check.severity == "issue" else "yellow"
            console.print(f"\n[{colour}]{check.severity} {check.code}[/{colour}] [bold]{escape(check.title)}[/bold]")
            console.print(f"  {escape(check.message)}.")
    counts = {v: [c.code for c in checks if c.verdict == v] for v in ("clear", "not_applicable", "muted", "found")}
    words = f"\nchecks: {len(counts['found'])} found something, {len(counts['clear'])} clear, "
    words += f"{len(counts['not_applicable'])} not applicable"
    console.print(words + (f", muted: {', '.join(counts['muted'])}" if counts["muted"] else ""))


def _experts(found: Diagnosis) -> Table:
    """A row per expert, over all matrices."""
    table = _table("expert", "norm", "of base", "snr", "eff. rank", "overlap", "rho")
    for t, summary in enumerate(found.experts_summary):
        rows = [m for m in found.measures if m.norms[t] > 0]
        norm = math.sqrt(math.fsum(m.norms[t] ** 2 for m in rows))
        others = [max((m.subspace_overlap[t][s] for s in range(len(m.norms)) if s != t), default=0.0) for m in rows]
        table.add_row(
            escape(summary.name),
            f"{norm:.3g}",
            _middle([m.relative_norms[t] for m in rows if m.relative_norms is not None]),
            _middle([m.snr[t] for m in rows if m.snr is not None]),
            _middle([m.effective_rank[t] for m in rows]),
            _middle(others),
            f"{summary.residual:.2f}",
        )
    return table


def _merged(measures: Sequence[Measure]) -> str:
    merged, mean, total = (
        math.sqrt(math.fsum(getattr(m, f) ** 2 for m in measures)) for f in ("merged_norm", "mean_norm", "sum_norm")
    )
    chance = _middle([m.chance_overlap for m in measures])
    return (
        f"independent experts would overlap by {chance}\n"
        f"merged delta: norm {merged:.3g}; of the experts' mean {mean:.3g}, of their sum {total:.3g}"
    )


def _agreement(rows: Sequence[AgreementRow]) -> Table:
    table = _table("expert", "differ", "KL (nats)", "predictions", "data")
    for row in rows:
        differ, nats = f"{row.disagreement:.1%}", f"{row.divergence:.3g}"
        table.add_row(escape(row.expert), differ, nats, f"{row.predictions:,}", escape(row.data))
    return table


def _on_data(rows: Sequence[DataResidual]) -> Table:
    table = _table("expert", "rho", "matrices", "data")
    for row in rows:
        rho = "-" if row.residual is None else f"{row.residual:.2f}"
        table.add_row(escape(row.expert), rho, f"{row.matrices:,}", escape(row.statistics))
    return table


def _contested(found: Diagnosis) -> Table:
    table = _table("matrix", "rho", "expert", "overlap", "signs", "norm/mean", "rank")
    for m in sorted(found.measures, key=lambda m: (-m.contested, m.label))[:CONTESTED]:
        worst = max(range(len(m.residual)), key=m.residual.__getitem__)
        pairs = [(s, t) for s in range(len(m.norms)) for t in range(s)]
        table.add_row(
            escape(m.label.replace(".weight", "")),
            f"{m.residual[worst]:.2f}",
            escape(found.experts[worst].name),
            _most([m.subspace_overlap[s][t] for s, t in pairs]),
            "-" if m.sign_conflict is None else _most([m.sign_conflict[s][t] for s, t in pairs]),
            f"{m.merged_norm / m.mean_norm:.2f}" if m.mean_norm else "-",
            f"{m.rank_kept}/{m.shape[1]}" if m.rank_kept is not None else "-",
        )
    return table


def _table(*columns: str) -> Table:
    return plain_table(*columns, numbers={*columns[1:]} - {"expert", "data"})


def _middle(values: Sequence[float]) -> str:
    """The median, or a dash."""
    return f"{sorted(values)[len(values) // 2]:.3g}" if values else "-"


def _most(values: Sequence[float]) -> str:
    return f"{max(values):.2f}" if values else "-"
