"""Tables of the two searches for failures, from the files that `python -m fuzz --record` and `chaos --record` write."""

from __future__ import annotations

from collections.abc import Callable

from chaos.on_ray import LABEL
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
    """A row per sort of output, a column per kind of fault; those of Ray are of other kinds, and have a table."""
    record = read_record()
    assert record is not None, "python -m chaos --record writes it"
    said = f"{record.runs} runs with {record.disturbances} disturbances, {len(record.problems)} problems.\n\n"
    on_ray = {sort: counts for sort, counts in record.by.items() if sort == LABEL}
    others = {sort: counts for sort, counts in record.by.items() if sort != LABEL}
    return said + "\n".join(_counts(table, by) for by in (others, on_ray) if by)


def _counts(table: Table, by: dict[str, dict[str, int]]) -> str:
    kinds = sorted({kind for counts in by.values() for kind in counts})
    rows = [[sort, *(str(counts.get(kind, 0)) for kind in kinds)] for sort, counts in by.items()]
    return table(["output", *kinds], rows)
