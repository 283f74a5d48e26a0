"""Build the diagnosis of a run from its plan and records."""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from actmat.diagnostics.checks import run_checks
from actmat.diagnostics.measure import tidy
from actmat.diagnostics.model import (
    Diagnosis,
    ExpertRow,
    MatrixRow,
    rows_from_json,
)
from actmat.diagnostics.totals import totals_of
from actmat.diagnostics.warnings import merge_findings
from actmat.engine.record import Record
from actmat.planning.model import MergePlan

Records = Mapping[str, Record]


def is_observation(observed: Mapping[str, Any]) -> bool:
    """True if a diagnosis can be built from the measurements of one item, which come from a journal."""
    try:
        rows_from_json(observed["measures"])
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return False
    return True


def build_diagnosis(plan: MergePlan, records: Records, *, out: str | None) -> Diagnosis:
    """Measures, summaries and checks, from the records of all items; `out`: the output's folder, if any."""
    names = [of.name for of in (plan.items if plan.output == "adapter" else plan.specs)]
    observed = {n: o for n in names if n in records and (o := records[n].observed) is not None}
    measures = rows_from_json([m for o in observed.values() for m in o["measures"]])
    recipe, of_records = plan.recipe, merge_findings(plan, records, totals_of(plan, records))
    return Diagnosis(
        actmat=plan.versions["actmat"],
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        recipe=recipe.model_dump(mode="json", exclude={"out"}, exclude_defaults=True),
        method=recipe.method,
        source="adapters" if plan.base is None else "diagnose" if out is None else "merge",
        base=recipe.base or None,
        out=out,
        experts=_experts(plan, measures),
        actions=dict(Counter(plan.by_name[name].action for name in names)),
        measures=measures,
        findings=run_checks(recipe.labels, measures, of_records, recipe.mute),
    )


def _experts(plan: MergePlan, measures: Sequence[MatrixRow]) -> tuple[ExpertRow, ...]:
    """Norms and residuals of each expert, over all matrices that were measured."""
    rows, everyone = [], math.fsum(n * n for m in measures for n in m.norms)
    for t, (ref, summary) in enumerate(zip(plan.recipe.experts, plan.experts, strict=True)):
        energy = math.fsum(m.norms[t] ** 2 for m in measures)
        missed = math.fsum((m.residual[t] * m.norms[t]) ** 2 for m in measures)
        row = ExpertRow(
            name=ref.label,
            location=ref.path,
            kind=summary.kind,
            weight=ref.weight if isinstance(ref.weight, float) else None,
            residual=tidy(math.sqrt(missed / energy)) if energy else 0.0,
            energy_share=tidy(energy / everyone) if everyone else 0.0,
        )
        rows.append(row)
    return tuple(rows)
