"""The tables of docs/data-free.md from `results/datafree.jsonl` (digits) and `results/pretrained.jsonl`.

Differences are percentage points of test accuracy, per task of a subject, to the average of the same experts: the mean
over all tasks of all subjects with half of Student's interval at 95 % over them; `at worst` is the lowest mean of a
subject over its tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean

from benchmarks.datafree.judged import near_rows, verdict
from benchmarks.datafree.picks import (
    FILE,
    PRETRAINED,
    SEES_DATA,
    SUITES,
    Merge,
    Row,
    average,
    cells,
    chosen_on,
    differences,
    found,
    groups,
    has,
    is_lora,
    least_of_all,
    length_picks,
    lengthened,
    measured_lengths,
    read_rows,
    rules_of,
)


def subject_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Subjects, and how much there is to gain."""
    out = []
    for name, some in groups(rows).items():

        def points(value: Callable[[Row], Mapping[str, float]], some: Sequence[Row] = some) -> str:
            return f"{mean(100 * mean(value(r).values()) for r in some):.1f}"

        cells_ = [points(lambda r: r["base"]), points(lambda r: average(r)["test"]), points(lambda r: r["own"])]
        seeds = ", ".join(str(r["seed"]) for r in some)
        out.append([name, seeds, str(len(some[0]["tasks"])), *cells_])
    return out


def alignment_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Estimate -> mean cosine with the measured Gram matrix, by kind of experts."""
    by_group = groups(rows)
    names = dict.fromkeys(n for row in rows for n in row["alignment"] if n != SEES_DATA)
    return [
        [name, *(_mean_cosine(some, name) for some in by_group.values())]
        for name in sorted(names, key=lambda n: n != "identity")
    ]


def _mean_cosine(rows: Sequence[Row], name: str) -> str:
    values = [row["alignment"][name] for row in rows if name in row["alignment"]]
    return f"{mean(values):.2f}" if values else ""


def rule_rows(rows: Sequence[Row], lora: bool) -> list[list[str]]:
    """Rules at length one, on the seed that chose and on those that confirm; the best on all that they have first."""
    some = [row for row in rows if is_lora(row) == lora]
    parts = (
        [row for row in some if chosen_on(row)],
        [row for row in some if row["suite"] == "digits" and not chosen_on(row)],
        *([row for row in some if row["suite"] == suite] for suite in SUITES if suite != "digits"),
    )
    out = []
    for rule in rules_of(some):

        def pick(row: Row, rule: str = rule) -> Merge:
            return found(row, rule)

        if rule != "average":
            gain = mean(mean(differences(row, pick, average)) for row in some if has(row, rule))
            there = [part if all(has(row, rule) for row in part) else [] for part in parts]
            out.append((gain, [_named(rule), *(c for part in there for c in cells(part, pick))]))
    return [line for _, line in sorted(out, key=lambda pair: -pair[0])]


def _named(rule: str) -> str:
    return f"*{rule}* (sees data)" if rule.startswith(SEES_DATA) else f"`{rule}`"


def length_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Rule and length -> difference to the average, of the digits and of pretrained models, full and LoRA."""
    kinds = [
        [r for r in rows if is_lora(r) == lora and (r["suite"] == "digits") == digits]
        for digits in (True, False)
        for lora in (False, True)
    ]
    out = []
    for rule in lengthened(rows):
        for length, pick in length_picks(rows, rule).items():
            there = [some if measured_lengths(some, rule, length) else [] for some in kinds]
            out.append([f"`{rule}`", length, *(c for some in there for c in cells(some, pick))])
    out.append(["any", "least divergence on noise", *(c for some in kinds for c in cells(some, least_of_all))])
    return out


_KINDS = ("digits, full", "digits, LoRA", "pretrained, full", "pretrained, LoRA")
_OTHERS = [name for suite, name in SUITES.items() if suite != "digits"]
_CHOSEN = [c for name in ("digits, seed 0", "digits, other seeds", *_OTHERS) for c in (name, "at worst")]
TABLES: dict[str, tuple[Callable[[Sequence[Row]], list[str]], Callable[[Sequence[Row]], list[list[str]]]]] = {
    "subjects": (lambda rows: ["experts", "seeds", "tasks", "base", "average", "experts' own"], subject_rows),
    "alignment": (lambda rows: ["estimate", *groups(rows)], alignment_rows),
    "lora": (lambda rows: ["rule", *_CHOSEN], lambda rows: rule_rows(rows, True)),
    "full": (lambda rows: ["rule", *_CHOSEN], lambda rows: rule_rows(rows, False)),
    "near_lora": (lambda rows: ["rule", "- average", "at worst"], lambda rows: near_rows(rows, True)),
    "near_full": (
        lambda rows: ["rule", "- `actmat`", "at worst, - better of average and TSV"],
        lambda rows: near_rows(rows, False),
    ),
    "lengths": (
        lambda rows: ["rule", "length", *(c for name in _KINDS for c in (name, "at worst"))],
        length_rows,
    ),
}


def filled(header: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """The columns that are not empty in all rows.

    >>> filled(["a", "b"], [["x", ""], ["y", ""]])
    (['a'], [['x'], ['y']])
    """
    kept = [n for n in range(len(header)) if any(row[n] for row in rows)]
    return [header[n] for n in kept], [[row[n] for n in kept] for row in rows]


def datafree_table(name: str, table: Callable[[list[str], list[list[str]]], str]) -> str:
    """One of `TABLES`, or the `verdict`, in Markdown."""
    rows = read_rows(FILE, PRETRAINED)
    if name == "verdict" or not rows:
        return verdict(rows)
    header, made = TABLES[name]
    machines = sorted({f"{r['machine']}, {r['date']}" for r in rows})
    commands = "`python -m benchmarks.datafree`, `python -m benchmarks.pretrained`"
    return table(*filled(header(rows), made(rows))) + f"\n{commands}, {'; '.join(machines)}.\n"
