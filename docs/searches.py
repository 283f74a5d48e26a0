"""Tables of the two searches for failures, from the files that `python -m fuzz --record` and `chaos --record` write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from chaos.results import read_record
from fuzz.results import read_results

Table = Callable[[list[str], list[list[str]]], str]


def fuzz_table(table: Table) -> str:
    """A row per door."""
    rows = [
        [r.door, f"{r.cases:,}", str(r.found), f"{1000 * r.slowest:.0f} ms", f"{r.memory / 1e6:.0f} MB"]
        for r in read_results().values()
    ]
    return table(["door", "cases", "found", "slowest", "most memory"], rows)


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
