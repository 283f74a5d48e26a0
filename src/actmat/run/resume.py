"""The outputs that earlier runs of the same plans finished, and the report of a merge."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actmat.checkpoints.remote import staging_folder, staging_for, storage_of
from actmat.checkpoints.writing.staging import Staging
from actmat.diagnostics.answers import verdict
from actmat.diagnostics.model import REPORT_NAME, AgreementRow, Diagnosis, read_diagnosis
from actmat.diagnostics.totals import Totals
from actmat.errors import Note, OutputError
from actmat.foreign import terminal
from actmat.planning import MergePlan
from actmat.report.manifest import read_manifest
from actmat.report.words import size_words
from actmat.run.places import present_output
from actmat.run.run import Run
from actmat.settings import RunSettings


@dataclass(frozen=True, repr=False)
class MergeReport:
    """Result of one merge.

    Args:
        out: directory of the merged model, or its URL.
        plan: of the merge.
        seconds: wall time of this run.
        resumed: items reused from an interrupted run.
        diagnosis: contents of `report.json`, if it was requested.
        was_finished: an earlier call finished the output; nothing was read or written.
        totals: sums over all tensors; of an output that was finished before, its manifest has them.
        warnings: on problems with the size of the merge, and with its inputs.
        answers: comparison with each expert on inputs of its task, if any were given.
    """

    out: Path | str
    plan: MergePlan
    seconds: float
    resumed: int = 0
    diagnosis: Diagnosis | None = None
    was_finished: bool = False
    totals: Totals = field(default_factory=Totals)
    warnings: tuple[Note, ...] = ()
    answers: tuple[AgreementRow, ...] = ()

    def __repr__(self) -> str:
        how = "was finished before" if self.was_finished else f"{self.seconds:.1f} s"
        what = f"{len(self.plan.items)} items by {self.plan.recipe.method}"
        of_merge = verdict(self.answers) or size_words(self.totals.norms)
        said = [of_merge, *map(str, self.warnings)]
        return terminal(f"<MergeReport {self.out}: {'; '.join(s for s in (how, what, *said) if s)}>")

    @functools.cached_property
    def manifest(self) -> Mapping[str, Any]:
        """Contents of `actmat_manifest.json`, read on first use: about 2 kB per tensor."""
        with present_output(self.out) as folder:
            return read_manifest(folder)


def resume(run: Run) -> dict[Path | str, MergeReport]:
    """Reports of outputs that an earlier run finished.

    Raises:
        OutputError: a finished output is not what its plan gives now.
    """
    places = run.places
    pairs = zip(places.outs, run.plans, strict=True)
    return {out: _finished(plan, out, places.settings) for out, plan in pairs if out in places.finished}


def _finished(plan: MergePlan, out: Path | str, settings: RunSettings) -> MergeReport:
    """Report of an output that an earlier run of the same plan finished; what that run left beside it is removed.

    Raises:
        OutputError: it is of another plan, or another process builds there.
    """
    began = time.perf_counter()
    with present_output(out) as folder:
        manifest = read_manifest(folder)
        is_other = manifest["timing"]["plan"] != plan.fingerprint()
        reasons = {
            "files of its inputs, versions or the kind of device differ": is_other,
            "it was made without --diagnose": settings.diagnose and not (folder / REPORT_NAME).is_file(),
        }
        if problems := [reason for reason, holds in reasons.items() if holds]:
            raise OutputError(
                f"{out} exists and is not empty; choose another place or pass --overwrite. It was made by the same "
                f"recipe, but is not what the recipe gives now: {'; '.join(problems)}"
            )
        diagnosis = read_diagnosis(folder) if settings.diagnose else None
    if isinstance(out, Path):
        Staging(out, plan.fingerprint()).sweep()
    else:
        storage_of(out).clear(out)
        if staging_folder(out).parent.is_dir():
            staging_for(out, plan.fingerprint()).sweep()
    notes = [Note(row["severity"], row["code"], row["text"]) for row in manifest["notes"]]
    return MergeReport(
        out,
        plan,
        time.perf_counter() - began,
        resumed=sum(i.action != "tie" for i in plan.items),
        diagnosis=diagnosis,
        was_finished=True,
        warnings=tuple(n for n in notes if n.severity == "warning" and n not in plan.notes),
    )
