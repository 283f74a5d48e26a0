"""Coded judgments over the measures of a merge; `CHECKS` is the list.

A check is a function from facts to a finding, something that a user should know, in one sentence that holds the
numbers; or None. Thresholds are constants, each with its reason; docs/checks.md has a section for every code. AM1xx:
errors of rounding; AM2xx: identity of base and experts; AM3xx: balance between experts; AM4xx: size of
the merged delta.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from actmat.diagnostics.model import Finding, MatrixRow, Severity
from actmat.errors import RecipeError, did_you_mean

SHOWN_TENSORS = 20


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a merge that checks judge.

    Args:
        labels: names of the experts.
        measures: of matrices.
        of_records: code -> words, of `diagnostics.warnings.merge_findings`.
    """

    labels: Sequence[str]
    measures: Sequence[MatrixRow]
    of_records: Mapping[str, str] = field(default_factory=dict)


Outcome = tuple[str, Sequence[str]] | None
"""One sentence, and the tensors concerned; None: nothing was found."""


@dataclass(frozen=True, slots=True)
class Check:
    """One judgment with a code.

    Args:
        code: "AM101".
        title: a few words, the heading in docs/checks.md.
        severity: "issue": the merge is likely wrong; "tip": worth knowing.
        judge: facts -> outcome; default: every merge makes this check from its records.
    """

    code: str
    title: str
    severity: Severity
    judge: Callable[[Facts], Outcome] | None = None

    def finding(self, facts: Facts, *, muted: bool) -> Finding | None:
        """Judge the facts."""
        if self.judge is not None:
            outcome = self.judge(facts)
        else:
            said = facts.of_records.get(self.code, "")
            outcome = (said[0].upper() + said[1:], ()) if said else None
        if outcome is None:
            return None
        message, tensors = outcome[0], tuple(dict.fromkeys(outcome[1]))
        return Finding(self.code, self.title, self.severity, message, tensors[:SHOWN_TENSORS], len(tensors), muted)


MOST = 0.5
"""Least share of an expert's tensors at which the expert is reported."""


def _below_rounding(facts: Facts) -> Outcome:
    rows = [(m, m.snr) for m in facts.measures if m.snr is not None]
    said, names = [], []
    for t, label in enumerate(facts.labels):
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


FOREIGN = 0.5
"""Relative norm of a delta above which it is not fine-tuning: independent weights of one size differ by 1.4."""


def _foreign(facts: Facts) -> Outcome:
    far = []
    for t, label in enumerate(facts.labels):
        sizes = [m.relative_norms[t] for m in facts.measures if m.relative_norms is not None and m.norms[t] > 0]
        if sizes and (size := statistics.median(sizes)) > FOREIGN:
            far.append((label, size))
    if not far:
        return None
    names = "; ".join(f"'{label}' by {size:.2g} of its norm (median)" for label, size in far)
    first = facts.labels.index(far[0][0])
    return (
        f"The weights differ from the base as much as unrelated weights do: {names}. These experts do not come "
        "from this base (another size, version or initialization); merging them gives noise",
        [m.name for m in facts.measures if m.relative_norms and m.relative_norms[first] > FOREIGN],
    )


CHECKS = (
    Check("AM101", "Delta below the rounding of its storage", "issue", _below_rounding),
    Check("AM201", "Expert equals the base", "issue"),
    Check("AM202", "Two experts are the same", "issue"),
    Check("AM203", "Expert is not from this base", "issue", _foreign),
    Check("AM205", "Base looks like an expert", "tip"),
    Check("AM301", "Experts of unequal size", "issue"),
    Check("AM402", "Merged delta is much larger than the experts'", "tip"),
    Check("AM403", "Merged delta collapsed or exploded", "issue"),
    Check("AM404", "Rank of the adapter loses much of the merge", "issue"),
)


def run_checks(facts: Facts, mute: Collection[str] = ()) -> tuple[Finding, ...]:
    """Everything that checks find, in the order of their codes."""
    findings = (check.finding(facts, muted=check.code in mute) for check in CHECKS)
    return tuple(f for f in findings if f is not None)


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
