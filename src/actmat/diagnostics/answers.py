"""The verdict on the answers that a merge kept: better than other merges of its experts, or not, or not to be said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import comb

from actmat.diagnostics.model import AgreementRow, Diagnosis, RivalAnswers

FEW = 8
"""Inputs of an expert below which nothing is concluded, and counts are shown in place of percentages."""
UNENDED = 8
"""Tokens of an answer that are compared where the expert did not end it in time."""
CHANCE = 0.05
"""Largest probability by chance, of the one-sided sign test, of a difference that counts as shown."""
OF_SIZE = ("AM402", "AM403")
"""Checks of the size of a merge."""
GUESSES = ("AM203", *OF_SIZE)
"""Checks that guess from sizes whether a merge is good: silent where its answers were measured."""
JUDGED = "answers were measured, and judge the merge"
RIVALS = {"without": "without inputs", "average": "the average"}
"""Fields of a row with another merge -> its name."""


def is_shown(gained: int, lost: int) -> bool:
    """True if so many gains among all differences are improbable by chance (sign test).

    >>> is_shown(5, 0), is_shown(4, 0), is_shown(9, 2)
    (True, False, True)
    """
    count = gained + lost
    return sum(comb(count, n) for n in range(gained, count + 1)) <= float(CHANCE * 2**count)


def share_words(kept: int, inputs: int) -> str:
    """Share of answers kept in %; of few inputs, their number.

    >>> share_words(3, 4), share_words(7, 8)
    ('3 of 4', '88')
    """
    return f"{100 * kept / inputs:.0f}" if inputs >= FEW else f"{kept} of {inputs}"


def kept_words(merge: AgreementRow | RivalAnswers | None, inputs: int) -> str:
    """Answers that a merge kept, with its accuracy in brackets where it is known; a dash without a merge."""
    if merge is None:
        return "-"
    accuracy = "" if merge.accuracy is None else f" ({merge.accuracy:.1%})"
    return f"{share_words(merge.kept, inputs)}{'%' * (inputs >= FEW)}{accuracy}"


def verdict(rows: Sequence[AgreementRow]) -> str:
    """One line on the answers of a merge, against the best other merge of its experts; empty without rows."""
    if not rows:
        return ""
    rivals = {name: [r for row in rows if (r := getattr(row, name)) is not None] for name in RIVALS}
    totals = {name: sum(r.kept for r in some) for name, some in rivals.items() if len(some) == len(rows)}
    kept, inputs, fewest = sum(r.kept for r in rows), sum(r.inputs for r in rows), min(r.inputs for r in rows)
    counts = f"kept {kept} of {inputs} answers"
    if not totals:
        return f"{counts}; compared with no other merge"
    best = max(totals, key=lambda name: totals[name])
    name, others = RIVALS[best], rivals[best]
    counts += f", {name} {totals[best]}"
    if fewest < FEW or any(r.measured for r in rows):
        return f"too few inputs to say: give {FEW} a task ({counts})"
    by_sign: dict[str, list[str]] = {">": [], "<": [], "~": []}
    for row, other in zip(rows, others, strict=True):
        mine, theirs = (share_words(n, row.inputs) for n in (row.kept, other.kept))
        by_sign[sign := _sign(other)].append(f"{row.expert} {mine}{sign}{theirs}")
    is_above = is_shown(sum(r.gained for r in others), sum(r.lost for r in others))
    if kept <= totals[best] or (by_sign["<"] and not is_above):
        parts = ", ".join(p for some in by_sign.values() for p in some)
        return f"NOT BETTER than {name}: {parts} ({fewest} inputs)"
    if not is_above and not by_sign[">"]:
        return f"too few inputs to say: give {2 * fewest} a task ({counts})"
    shown = by_sign[">"] or [f"all {share_words(kept, inputs)}>{share_words(totals[best], inputs)}"]
    named = {f"better than {name}": shown, "WORSE": by_sign["<"], "not shown": by_sign["~"]}
    words = "; ".join(f"{what}: {', '.join(parts)}" for what, parts in named.items() if parts)
    return f"{words} ({fewest} inputs)"


def with_answers(diagnosis: Diagnosis, rows: Sequence[AgreementRow]) -> Diagnosis:
    """The diagnosis with answers; checks that guess are silent then, and give no advice."""
    findings = (replace(f, muted=True, message=JUDGED) if f.code in GUESSES else f for f in diagnosis.findings)
    return replace(diagnosis, agreement=tuple(rows), findings=tuple(findings))


def _sign(rival: RivalAnswers) -> str:
    """`>` where the merge is shown to keep more than another, `<` where it is shown to keep less, else `~`."""
    if is_shown(rival.gained, rival.lost):
        return ">"
    return "<" if is_shown(rival.lost, rival.gained) else "~"
