"""Tables of the comparison of tools, from `results/tools*.json`."""

from __future__ import annotations

from typing import Any

from benchmarks.common import GIB, markdown, read_result
from benchmarks.pages import table


def tools_table(part: str) -> str:
    """`merges` and `large`: a row per input and method, a column per tool; `faults`: a row per tool."""
    found = read_result("tools" if part == "merges" else f"tools-{part}")
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    said = f"`{found['command']}`, {versions}, {found['processor']}, {found['cores']} cores, {found['date']}.\n\n"
    if part == "faults":
        return said + markdown(found["rows"], found["columns"]) + "\n"
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in found["rows"]:
        cells.setdefault((row["input"], row["method"]), {})[row["tool"]] = _cell(row)
    tools = list(next(iter(cells.values())))
    legend = "Cells: wall and processor time, peak memory, read from the disk, error.\n\n"
    rows = [[*name, *(of[tool] for tool in tools)] for name, of in cells.items()]
    return said + legend + table(["input", "method", *tools], rows) + _refusals(found["rows"])


def _cell(row: dict[str, Any]) -> str:
    if "wall_s" not in row:
        _, is_late, limit = row["refused"].partition("not done after ")
        return "-" if row["refused"] == "no such method" else f"more than {limit}" if is_late else "refused"
    costs = f"{row['wall_s']:.1f} s, {row['cpu_s']:.1f} s, {row['peak_anonymous_b'] / GIB:.2f} GiB"
    return f"{costs}, {row['read_b'] / 1e9:.2f} GB" + (f", {row['error']:.0e}" if "error" in row else "")


def _refusals(rows: list[dict[str, Any]]) -> str:
    """Every reason once, with the inputs that met it."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.get("refused", "no such method") != "no such method":
            reasons.setdefault((row["tool"], row["refused"]), []).append(f"{row['input']} ({row['method']})")
    lines = [f"* {tool}: `{reason}`: {', '.join(where)}." for (tool, reason), where in reasons.items()]
    return "\nRefused, or not done:\n\n" + "\n".join(lines) + "\n" if lines else ""
