"""JSON on stdout: one object per command, with the name and version of its layout, compact unless all is wanted.

Every object begins with `schema`, such as `actmat.verify/1`. A version grows when a field is renamed, is removed or
means something else; new fields may appear at any time. Lists with a row per tensor are left out unless `--full` is
given; `left_out` says which, and how long they are. `docs/commands/README.md` has the table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actmat.report.totals import Norms
    from actmat.run import MergeReport

__all__ = ["SCHEMAS", "merge_data", "print_result", "size_data"]

SCHEMAS: Mapping[str, int] = {
    "analyze": 1,
    "average": 1,
    "compare": 1,
    "demo": 1,
    "diagnose": 1,
    "experiment": 1,
    "export": 1,
    "extract": 1,
    "finish": 1,
    "history": 1,
    "import": 1,
    "inspect": 1,
    "merge": 1,
    "methods": 1,
    "plan": 1,
    "push": 1,
    "report": 1,
    "serve-command": 1,
    "statistics": 1,
    "try": 1,
    "tune": 1,
    "ui": 1,
    "verify": 1,
}
"""Version of the JSON of each command."""


def print_result(command: str, data: Mapping[str, Any], *, long: Collection[str] = (), full: bool = False) -> None:
    """Print the JSON of a command.

    Args:
        command: which; it has a version in `SCHEMAS`.
        data: plain data.
        long: fields with a row per tensor, which are left out unless `full`.
    """
    from actmat.cli.screen import print_json

    left = {} if full else {name: len(data[name]) for name in long if name in data}
    kept = {name: value for name, value in data.items() if name not in left}
    told = {"left_out": left} if left else {}
    print_json({"schema": f"actmat.{command}/{SCHEMAS[command]}", **kept, **told})


def merge_data(report: MergeReport) -> dict[str, Any]:
    """One output of a merge."""
    from actmat.planning.model import count_actions

    plan, totals, found = report.plan, report.totals, report.diagnosis
    return {
        "out": str(report.out),
        "kind": plan.output,
        "method": plan.recipe.method,
        "options": dict(plan.recipe.options),
        "experts": [e.label for e in plan.experts],
        "was_finished": report.was_finished,
        "actions": count_actions(plan.items),
        "unchanged": totals.unchanged,
        "nonfinite": totals.nonfinite,
        "size": size_data(totals.norms, plan.recipe.mute),
        "read_bytes": plan.read_bytes,
        "write_bytes": plan.write_bytes,
        "seconds": round(report.seconds, 3),
        "notes": list(plan.notes),
        "findings": None if found is None else [c.code for c in found.checks if c.verdict == "found"],
    }


def size_data(norms: Norms | None, muted: Collection[str] = ()) -> dict[str, Any] | None:
    """Norms of a merge, and the code of the check that finds them far off; None where nothing was merged."""
    from actmat.report.words import size_finding

    if norms is None:
        return None
    found = size_finding(norms, muted)
    code = None if found is None else found[0]
    return {"merged": norms.merged, "sum": norms.total, "experts": list(norms.experts), "warning": code}
