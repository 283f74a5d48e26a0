"""The table of the search for failures by interruptions, from the file that `chaos --record` writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from chaos.results import read_record

Table = Callable[[list[str], list[list[str]]], str]


def chaos_table(table: Table) -> str:
    """A row per sort of output with its runs, and a sentence with the runs per kind of fault."""
    record = read_record()
    assert record is not None, "python -m chaos --record writes it"
    kinds: Counter[str] = Counter()
    for counts in record.by.values():
        kinds.update(counts)
    said = f"{record.runs} runs with {record.disturbances} disturbances, {len(record.problems)} problems."
    first = ", ".join(f"{kind} {runs}" for kind, runs in sorted(kinds.items()))
    rows = [[sort, str(sum(counts.values()))] for sort, counts in record.by.items()]
    return f"{said} Runs by kind of disturbance: {first}.\n\n" + table(["output", "runs"], rows)
