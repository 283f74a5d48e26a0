"""Coded judgments over a merge; `CHECKS` is the list.

A check finds something that a user should know, in one sentence that holds the numbers. All but AM101 are made by every
merge from its records, see `diagnostics.warnings`; AM101 needs the measures of a diagnosis. Thresholds are constants,
each with its reason; docs/checks.md has a section for every code. AM1xx: errors of rounding; AM2xx: identity of base
and experts; AM3xx: balance between experts; AM4xx: size of the merged delta.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from actmat.diagnostics.model import Finding, MatrixRow, Severity
from actmat.errors import RecipeError, did_you_mean

SHOWN_TENSORS = 20


@dataclass(frozen=True, slots=True)
class Check:
    """One judgment with a code.

    Args:
        code: "AM101".
        title: a few words, the heading in docs/checks.md.
        severity: "issue": the merge is likely wrong; "tip": worth knowing.
    """

    code: str
    title: str
    severity: Severity


MOST = 0.5
"""Least share of an expert's tensors at which the expert is reported."""


def _below_rounding(labels: Sequence[str], measures: Sequence[MatrixRow]) -> tuple[str, Sequence[str]] | None:
    """A sentence, and the tensors concerned."""
    rows = [(m, m.snr) for m in measures if m.snr is not None]
    said, names = [], []
    for t, label in enumerate(labels):
        changed = [(m.name, snr[t]) for m, snr in rows if m.norms[t] > 0]
        below = [name for name, snr in changed if snr < 1]
        if changed and len(below) >= MOST * len(changed):
            middle = statistics.median(snr for _, snr in changed)
            said.append(f"'{label}' in {len(below)} of {len(changed)} matrices (median {middle:.2g} half ulps)")
            names += below
    if not said:
        return None
    return (
        f"Deltas are smaller than half a unit in the last place of the stored weights: {'; '.join(said)}. The "
        "deltas there are mostly rounding. Merge experts saved in float32, or adapters before they are merged in, "
        "and leave out an expert that is the base saved again in another dtype",
        names,
    )


CHECKS = (
    Check("AM101", "Delta below the rounding of its storage", "issue"),
    Check("AM201", "Expert equals the base", "issue"),
    Check("AM202", "Two experts are the same", "issue"),
    Check("AM203", "Expert is not from this base", "issue"),
    Check("AM205", "Base looks like an expert", "tip"),
    Check("AM301", "Experts of unequal size", "issue"),
    Check("AM402", "Merged delta is much larger than the experts'", "tip"),
    Check("AM403", "Merged delta collapsed or exploded", "issue"),
    Check("AM404", "Rank of the adapter loses much of the merge", "issue"),
)


def run_checks(
    labels: Sequence[str], measures: Sequence[MatrixRow], of_records: Mapping[str, str], mute: Collection[str] = ()
) -> tuple[Finding, ...]:
    """Everything that checks find, in the order of their codes.

    Args:
        labels: names of the experts.
        measures: of matrices.
        of_records: code -> words, of `diagnostics.warnings.merge_findings`.
        mute: codes.
    """
    said: dict[str, tuple[str, Sequence[str]]] = {c: (w[0].upper() + w[1:], ()) for c, w in of_records.items()}
    if (rounding := _below_rounding(labels, measures)) is not None:
        said["AM101"] = rounding
    findings = []
    for check in (c for c in CHECKS if c.code in said):
        message, concerned = said[check.code]
        about, names = (check.code, check.title, check.severity, message), tuple(dict.fromkeys(concerned))
        findings.append(Finding(*about, names[:SHOWN_TENSORS], len(names), check.code in mute))
    return tuple(findings)


def check_codes(codes: Collection[str]) -> None:
    """Refuse codes that no check has, with a RecipeError that lists all of them."""
    known = [c.code for c in CHECKS]
    listed = ", ".join(known)
    wrong = [
        f"there is no check '{c}'.{did_you_mean(c, known)} Codes: {listed}"
        for c in dict.fromkeys(codes)
        if c not in known
    ]
    if wrong:
        raise RecipeError("The recipe mutes checks that do not exist.", wrong)
