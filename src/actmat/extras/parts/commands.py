"""Flags `--part` and `--finish`: a merge made in parts, on a terminal and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from actmat.api import plan_recipe
from actmat.cli import flags
from actmat.cli.screen import console, escape, print_result, showing_progress
from actmat.cli.streams import optional_stdout
from actmat.cli.summary import print_items, print_nonfinite, print_size, size_data, warning_data
from actmat.errors import format_size
from actmat.extras.parts.merging import FinishReport, finish_parts, run_part
from actmat.extras.parts.shares import Part, PartPlan, plan_part
from actmat.planning import MergePlan
from actmat.recipe import Recipe
from actmat.settings import RunSettings


def part_of(
    recipes: Sequence[Recipe], text: str, run: RunSettings, shown: flags.OutputFlags, *, plans: bool = False
) -> None:
    """Run one part and print its result; `plans`: only print its share of the plan."""
    if len(recipes) > 1:
        raise typer.BadParameter("--part goes with one method and one value of each option")
    (recipe,), part = recipes, Part.parse(text)
    if plans:
        _show_share(plan_recipe(recipe, device=run.device, device_memory=run.device_memory), part, shown)
    else:
        _merge_part(recipe, part, run, shown)


def _show_share(plan: MergePlan, part: Part, shown: flags.OutputFlags) -> None:
    share = plan_part(plan, part)
    if shown.json:
        print_result("plan", {"plans": [], "part": share.to_json()})
    elif not shown.quiet:
        print_part(plan, share, full=shown.full)


def _merge_part(recipe: Recipe, part: Part, run: RunSettings, shown: flags.OutputFlags) -> None:
    arguments = sys.argv[1:]  # those of another part: without --part
    kept = [a for before, a in zip(["", *arguments], arguments, strict=False) if "--part" not in (before, a)]
    again = flags.shell_command(a for a in kept if not a.startswith("--part="))
    with showing_progress(f"part {part}", quiet=shown.quiet or shown.json) as progress:
        report = run_part(recipe, part, run, progress, command=again)
    with optional_stdout("The part is complete."):
        if shown.json:
            done = {"part": str(part), "out": str(report.out), "tensors": report.items, "resumed": report.resumed}
            print_result("merge", {"outputs": [], "part": {**done, "was_finished": report.was_finished}})
        if shown.quiet or shown.json:
            return
        if report.was_finished:
            console.print(f"{escape(report.out)} is complete: all parts were finished earlier; nothing was done")
            return
        console.print(f"part {part} of [bold]{escape(report.out)}[/bold]: {report.items} tensors", end="")
        console.print(f", {report.resumed} of them from an earlier attempt" if report.resumed else "")
        seconds, out = f"{report.seconds:.1f} s", escape(report.out)
        console.print(f"  in {seconds}; when all parts are there: actmat merge --finish {out}")


def finish(out: Path, run: RunSettings, shown: flags.OutputFlags, *, check: bool) -> None:
    """Complete a merge that was made in parts, or verify one that is complete."""
    report = finish_parts(
        out, check=check, overwrite=run.overwrite, durable=run.durable, sha256=run.sha256, threads=run.threads
    )
    with optional_stdout("The merge is complete."):
        if shown.json:
            print_result("finish", finished_data(report, out))
        elif not shown.quiet:
            print_finished(report, out)


def print_part(plan: MergePlan, share: PartPlan, *, full: bool) -> None:
    """The share of one part: its tensors, its traffic, the cost of surveys."""
    total = sum(i.action != "tie" for i in plan.items)
    console.print(f"[bold]part {share.part}[/bold]: {len(share.names)} of {total} tensors")
    print_items(plan, [plan.by_name[name] for name in share.names], {}, full=full)
    console.print(
        f"{100 * share.work:.2f} % of the work (the largest part: {100 * share.largest:.2f} %); read "
        f"{format_size(share.read_bytes)}, write {format_size(share.write_bytes)}"
    )
    if share.survey_bytes:
        console.print(
            f"before that, each pass of the survey of the whole model reads {format_size(share.survey_bytes)}, in this "
            "part as in every other"
        )


def print_finished(report: FinishReport, out: Path) -> None:
    """Result of making one output of the parts of a merge."""
    if report.was_finished:
        console.print(f"{escape(out)} is complete: all its {report.tensors} tensors, and its inputs, are intact")
        print_size(report.totals, out)
        return
    console.print(f"[bold]{escape(out)}[/bold]: {report.tensors} tensors of {report.parts} parts")
    print_size(report.totals, out)
    for note in report.notes:
        console.print(f"  note: {escape(note)}")
    print_nonfinite(report.totals)
    console.print("  all hashes in actmat_manifest.json")


def finished_data(report: FinishReport, out: Path) -> dict[str, Any]:
    """An output that was made of the parts of a merge."""
    fields = {name: getattr(report, name) for name in ("tensors", "parts", "was_finished")}
    seconds, size = round(report.seconds, 3), size_data(report.totals.norms)
    more = {
        "nonfinite": report.totals.nonfinite,
        "size": size,
        "warnings": warning_data(report.totals),
        "seconds": seconds,
    }
    return {"out": str(out), **fields, **more, "notes": list(report.notes)}
