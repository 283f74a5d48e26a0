"""Facts behind the verdicts of a page: findings, sizes, the experts in words, and texts about checks.

`checks.json` holds the sections of docs/checks.md, without links, for readers who have no documentation at hand;
`python -m docs.generate` writes it. `next_steps.json` has the step to try after a finding.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from actmat.diagnostics.model import CheckResult, Diagnosis, ExpertSummary
from actmat.extras.pages.html.charts import expert_class
from actmat.extras.pages.html.environment import OWN
from actmat.extras.pages.html.scales import number
from actmat.report.words import SIZE_CODES, plural

FILE = "checks.json"


@cache
def _texts(file: str) -> dict[str, str]:
    found: dict[str, str] = json.loads(files(OWN).joinpath(file).read_text(encoding="utf-8"))
    return found


def explanation(code: str) -> str | None:
    """The meaning of a check, with code between backticks; None for a code that this version does not know."""
    return _texts(FILE).get(code)


def next_step(code: str) -> str | None:
    """The step to try after a finding, in a sentence; None where nothing has to be done."""
    return _texts("next_steps.json").get(code)


_RHO = (
    (0.1, "met", "misses it by less than a tenth of what the base does"),
    (0.5, "mostly met", "misses it by less than half of what the base does"),
    (1.0, "partly met", "misses it by more than half of what the base does"),
    (float("inf"), "not met", "no nearer to it than the base is"),
)


def rho_words(residual: float) -> tuple[str, str]:
    """Verdict in one or two words, and its meaning for the merged weights. The base itself has residual 1."""
    return next((word, meaning) for bound, word, meaning in _RHO if residual < bound)


def findings(diagnosis: Diagnosis) -> list[CheckResult]:
    """Checks that found something, issues first."""
    found = [c for c in diagnosis.checks if c.verdict == "found"]
    return sorted(found, key=lambda c: (c.severity != "issue", c.code))


def size_finding(diagnosis: Diagnosis) -> CheckResult | None:
    """The check that found the merge too large or too small, if one did."""
    return next((c for c in findings(diagnosis) if c.code in SIZE_CODES), None)


def off_where(diagnosis: Diagnosis, found: CheckResult) -> str:
    """` in 1 tensor`, where the size of few tensors is off and that of the whole merge is not; else empty."""
    measured = len({m.name for m in diagnosis.measures})
    is_whole = any(c.code == "AM402" for c in findings(diagnosis)) or found.count >= measured
    return "" if is_whole else f" in {plural(found.count, 'tensor')}"


class Sizes(NamedTuple):
    """Norms over all measured matrices; `mean`: root mean square of the experts'."""

    merged: float
    total: float
    mean: float
    average: float


def sizes(diagnosis: Diagnosis) -> Sizes | None:
    """Sizes of the merged change and of the experts'; None where nothing was measured."""
    rows = diagnosis.measures
    if not rows:
        return None
    merged, total, average = (
        math.hypot(*(getattr(m, f) for m in rows)) for f in ("merged_norm", "sum_norm", "mean_norm")
    )
    squares = math.fsum(n * n for m in rows for n in m.norms)
    return Sizes(merged, total, math.sqrt(squares / len(diagnosis.experts)), average)


def summary(diagnosis: Diagnosis) -> dict[str, Any]:
    """Facts of the verdict: findings, size, the expert that is met least, actions."""
    found, far = findings(diagnosis), size_finding(diagnosis)
    counted = Counter(c.verdict for c in diagnosis.checks)
    return {
        "found": found,
        "issues": sum(c.severity == "issue" for c in found),
        "passed": counted["clear"],
        "without": len(diagnosis.checks) - counted["clear"] - len(found),
        "sizes": sizes(diagnosis),
        "ranked": sorted(diagnosis.experts_summary, key=lambda e: e.residual),
        "far": far,
        "off": "" if far is None else off_where(diagnosis, far),
        "steps": [step for c in found if (step := next_step(c.code)) is not None],
        "actions": Counter(t.action for t in diagnosis.tensors).most_common(),
        "unchanged": sum(t.unchanged for t in diagnosis.tensors),
        "parameters": _short(diagnosis.totals.parameters),
    }


def _short(count: int) -> str:
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


BAR_END = 1.5
"""Residual at the end of its bar."""


class ExpertRow(NamedTuple):
    """One expert of the table: its line, its entry and summary, verdict and meaning, and change over rounding."""

    style: str
    entry: Any
    summary: ExpertSummary
    verdict: str
    meaning: str
    rounding: str
    is_unchanged: bool


def expert_rows(diagnosis: Diagnosis) -> list[ExpertRow]:
    """The experts with their verdicts."""
    rows = []
    for t, (entry, row) in enumerate(zip(diagnosis.experts, diagnosis.experts_summary, strict=True)):
        snr = [m.snr[t] for m in diagnosis.measures if m.snr is not None and m.norms[t]]
        rounding = " to ".join(dict.fromkeys(map(number, (min(snr), max(snr))))) if snr else "–"
        still = not any(m.norms[t] for m in diagnosis.measures)
        words = ("no change", "no measured matrix differs from the base") if still else rho_words(row.residual)
        rows.append(ExpertRow(expert_class(t), entry, row, *words, rounding, still))
    return rows
