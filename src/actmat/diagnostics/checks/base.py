"""Checks, the facts that they judge, and their outcomes.

A check is a function from facts to one of three outcomes: found (something a user should know), clear, or not
applicable (these inputs cannot show it), each with one sentence that holds the numbers. Thresholds are constants of
its file, each with its reason; docs/checks.md has a section for every code.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actmat.diagnostics.model import CheckResult, MatrixRow, Severity, TensorRow, Verdict

SHOWN_TENSORS = 20


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a merge that checks judge.

    Args:
        labels: names of the experts.
        tensors: rows of the report; `stats` of merged ones that are not matrices hold `norms` and `base_norm`.
        measures: of matrices.
        samples: tensor -> counts of `diagnostics.sample`.
        twins: pairs of tensors with the same bytes in the base and in every expert.
        by_inputs: a method merged by statistics of the experts' inputs.
        identity: code -> words, of `diagnostics.identity`.
    """

    labels: Sequence[str]
    tensors: Sequence[TensorRow]
    measures: Sequence[MatrixRow]
    samples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    twins: Sequence[tuple[str, str]] = ()
    by_inputs: bool = False
    identity: Mapping[str, str] = field(default_factory=dict)

    def median_relative_norm(self, t: int) -> float | None:
        """Median of `||D_t|| / ||W_0||` over the matrices that the expert changed; None without a base."""
        sizes = [m.relative_norms[t] for m in self.measures if m.relative_norms is not None and m.norms[t] > 0]
        return statistics.median(sizes) if sizes else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a check: the verdict, one sentence, the tensors concerned."""

    verdict: Verdict
    message: str
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Check:
    """One judgment with a code.

    Args:
        code: "AM101".
        title: a few words, the heading in docs/checks.md.
        severity: "issue": the merge is likely wrong; "tip": worth knowing.
        judge: facts -> outcome.
    """

    code: str
    title: str
    severity: Severity
    judge: Callable[[Facts], Outcome]

    def result(self, facts: Facts, *, muted: bool) -> CheckResult:
        """Judge the facts; a finding is muted if the recipe says so."""
        outcome = self.judge(facts)
        return CheckResult(
            code=self.code,
            title=self.title,
            severity=self.severity,
            verdict="muted" if muted and outcome.verdict == "found" else outcome.verdict,
            message=outcome.message,
            tensors=outcome.tensors[:SHOWN_TENSORS],
            count=len(outcome.tensors),
            docs=f"docs/checks.md#{self.code.lower()}",
        )


def finding(message: str, tensors: Iterable[str] = ()) -> Outcome:
    """Outcome "found"; `tensors` are listed once each, in their order."""
    return Outcome("found", message, tuple(dict.fromkeys(tensors)))


def clear(message: str) -> Outcome:
    """Outcome "clear"."""
    return Outcome("clear", message)


def not_applicable(message: str) -> Outcome:
    """Outcome "not applicable"; the message says why these inputs cannot show it."""
    return Outcome("not_applicable", message)


def check_of_every_merge(code: str, title: str, severity: Severity, otherwise: str) -> Check:
    """A check that every merge makes, see `diagnostics.identity`; `otherwise`: the words of a clear one."""
    return Check(code, title, severity, lambda f: finding(f.identity[code]) if code in f.identity else clear(otherwise))
