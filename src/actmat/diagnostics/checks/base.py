"""Checks, the facts that they judge, and their findings.

A check is a function from facts to a finding, something that a user should know, in one sentence that holds the
numbers; or None. Thresholds are constants of its file, each with its reason; docs/checks.md has a section for every
code.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actmat.diagnostics.model import Finding, MatrixRow, NormRow, Severity

SHOWN_TENSORS = 20


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a merge that checks judge.

    Args:
        labels: names of the experts.
        measures: of matrices.
        norms: of merged tensors that are not matrices.
        samples: tensor -> counts of `diagnostics.sample`.
        of_records: code -> words, of `diagnostics.warnings.merge_findings`.
    """

    labels: Sequence[str]
    measures: Sequence[MatrixRow]
    norms: Sequence[NormRow] = ()
    samples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    of_records: Mapping[str, str] = field(default_factory=dict)

    def median_relative_norm(self, t: int) -> float | None:
        """Median of `||D_t|| / ||W_0||` over the matrices that the expert changed; None without a base."""
        sizes = [m.relative_norms[t] for m in self.measures if m.relative_norms is not None and m.norms[t] > 0]
        return statistics.median(sizes) if sizes else None


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
