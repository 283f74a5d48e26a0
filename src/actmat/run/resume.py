"""The work of earlier runs: finished outputs are verified, unfinished ones with the same inputs are continued."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actmat.checkpoints.remote import staging_folder, staging_for, storage_of
from actmat.checkpoints.writing.journal import Journal
from actmat.checkpoints.writing.staging import Staging, left_journal
from actmat.diagnostics.answers import verdict
from actmat.diagnostics.model import REPORT_NAME, AgreementRow, Diagnosis, read_diagnosis
from actmat.engine.content import content_hash
from actmat.engine.inputs import Inputs
from actmat.engine.record import Record
from actmat.errors import MergeError, OutputError
from actmat.foreign import terminal
from actmat.methods import get_method
from actmat.planning import MergePlan
from actmat.planning.model import InputSummary, Item
from actmat.report.manifest import input_location, read_manifest
from actmat.report.totals import Totals, recorded_totals
from actmat.report.verify import verify
from actmat.report.words import size_words, warnings_of
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
        was_finished: an earlier call finished the output; it was only verified.
        totals: sums over all tensors.
        answers: comparison with each expert on inputs of its task, if any were given.
    """

    out: Path | str
    plan: MergePlan
    seconds: float
    resumed: int = 0
    diagnosis: Diagnosis | None = None
    was_finished: bool = False
    totals: Totals = field(default_factory=Totals)
    answers: tuple[AgreementRow, ...] = ()

    def __repr__(self) -> str:
        how = "was finished before" if self.was_finished else f"{self.seconds:.1f} s"
        what = f"{len(self.plan.items)} items by {self.plan.recipe.method}"
        of_merge = verdict(self.answers) or size_words(self.totals.norms)
        said = [of_merge, *map(str, warnings_of(self.totals, self.plan))]
        return terminal(f"<MergeReport {self.out}: {'; '.join(s for s in (how, what, *said) if s)}>")

    @functools.cached_property
    def manifest(self) -> Mapping[str, Any]:
        """Contents of `actmat_manifest.json`, read on first use: about 2 kB per tensor."""
        with present_output(self.out) as folder:
            return read_manifest(folder)


def resume(run: Run) -> dict[Path | str, MergeReport]:
    """Reports of outputs that are finished, each verified.

    Raises:
        OutputError: a finished output is not what its plan gives now.
    """
    places = run.places
    pairs = zip(places.outs, run.plans, strict=True)
    return {out: _finished(plan, out, places.settings) for out, plan in pairs if out in places.finished}


def _finished(plan: MergePlan, out: Path | str, settings: RunSettings) -> MergeReport:
    """Report of an output that an earlier run finished.

    Raises:
        OutputError: it is not what the plan gives now.
    """
    began = time.perf_counter()
    with present_output(out) as folder:
        _check_finished(plan, out, folder, settings)
        totals = recorded_totals(read_manifest(folder))
        diagnosis = read_diagnosis(folder) if settings.diagnose else None
    items = sum(i.action != "tie" for i in plan.items)
    return MergeReport(out, plan, time.perf_counter() - began, items, diagnosis, was_finished=True, totals=totals)


def _check_finished(plan: MergePlan, out: Path | str, folder: Path, settings: RunSettings) -> None:
    """Compare an output and its inputs with its manifest, and that with the plan; remove leftovers.

    Tensors and inputs of an output in a folder are hashed again; of one at a URL, the sizes of its files are compared.

    Args:
        folder: with its manifest, see `present_output`.

    Raises:
        OutputError: it is not what this plan would give now, or another process builds there.
    """
    try:
        manifest = read_manifest(folder)
        problems = list(_differences(plan, manifest, folder, settings))
        if not problems:
            problems = list(verify(out).problems) if isinstance(out, Path) else list(_other_sizes(manifest, out))
    except MergeError as error:
        problems = list(error.problems)
    if problems:
        said = "; ".join(problems[:3]) + ("; ..." if len(problems) > 3 else "")
        raise OutputError(
            f"{out} exists and is not empty; choose another place or pass --overwrite. It was made by the same "
            f"recipe, but is not what the recipe gives now: {said}"
        )
    if isinstance(out, Path):
        Staging(out, plan.fingerprint()).sweep()
        return
    storage_of(out).clear(out)
    if staging_folder(out).parent.is_dir():
        staging_for(out, plan.fingerprint()).sweep()


def _other_sizes(manifest: Mapping[str, Any], url: str) -> Iterator[str]:
    """Files of an output at a URL that are missing, or of another size than the merge wrote."""
    sizes = storage_of(url).sizes(url)
    side = {n: row["size"] for n, row in manifest["output"]["side_files"].items()}
    for name, size in {**manifest["output"]["files"], **side}.items():
        if name not in sizes:
            yield f"file '{name}' is missing"
        elif sizes[name] != size:
            yield f"file '{name}' has {sizes[name]} bytes, the merge wrote {size}"


def _differences(plan: MergePlan, manifest: Mapping[str, Any], out: Path, settings: RunSettings) -> Iterator[str]:
    """Reasons why a finished output is not that of the plan, apart from the bytes of its tensors and inputs."""
    rows = [manifest["base"], *manifest["experts"]] if plan.base is not None else manifest["experts"]
    if manifest.get("versions") != dict(plan.versions):
        yield f"it was made with the versions {manifest.get('versions')}, these are {dict(plan.versions)}"
    elif len(rows) != len(plan.inputs) or not all(map(_is_there, plan.inputs, rows, [out] * len(rows))):
        yield "the inputs differ, or are in another place"
    elif manifest.get("plan") != plan.fingerprint(times=False):
        yield "files of its inputs or their statistics have changed, or it was made on another kind of device"
    if settings.sha256 and "sha256" not in manifest["output"]:
        yield "it was made without --set sha256=true"
    if settings.diagnose and not (out / REPORT_NAME).is_file():
        yield "it was made without --diagnose"


def _is_there(summary: InputSummary, row: Mapping[str, Any], out: Path) -> bool:
    """True if an input that a manifest records lies in the place of this one; on the hub, its commit tells."""
    pinned = bool(summary.commit or summary.pinned)
    return pinned or os.path.realpath(input_location(row, out)) == os.path.realpath(summary.location)


def find_unchanged(plan: MergePlan, out: Path | str, inputs: Inputs) -> Journal | None:
    """The journal of an interrupted run, if only the times of its inputs changed since; their content is compared."""
    journal = left_journal(out) if isinstance(out, Path) else None
    if journal is None or journal.head.get("lasting") != plan.fingerprint(times=False):
        return None
    is_same = journal.head.get("fingerprint") == plan.fingerprint()
    return None if is_same or not has_same_inputs(plan, journal, inputs) else journal


def has_same_inputs(plan: MergePlan, journal: Mapping[str, Mapping[str, Any]], inputs: Inputs) -> bool:
    """True if everything that the journal's items were made from is unchanged; reads their inputs again.

    Also False if the journal cannot show it: adapters that are merged into an adapter, and methods that measure the
    whole model before the first tensor.
    """
    from_adapters = plan.output == "adapter" and not plan.is_extracted
    surveys = ((get_method(c.method).survey, c.options) for i in plan.items if (c := i.call) is not None)
    if from_adapters or any(survey is not None and survey.applies(options) for survey, options in surveys):
        return False
    try:
        return all(_is_same(plan.by_name.get(name), entry, inputs) for name, entry in journal.items())
    except (MergeError, OSError):  # the merge itself will say what cannot be read
        return False


def _is_same(item: Item | None, entry: Mapping[str, Any], inputs: Inputs) -> bool:
    record = Record.from_json(entry)
    if item is None or record is None or inputs.base is None:
        return False
    if any(content_hash(inputs.base.tensors, name) != record.base_hash for name in (item.name, *item.target.tied)):
        return False
    if item.call is None:
        return True
    if len(record.expert_hashes) != len(item.sources):
        return False
    for t, (expert, source) in enumerate(zip(inputs.experts, item.sources, strict=True)):
        if source is None:
            continue
        if source.kind == "stored":
            twins = item.target.twins[t] if t < len(item.target.twins) else ()
            contents = {content_hash(expert, name) for name in (source.name, *twins)}
        else:
            contents = {expert.content(source.name)}
        if contents != {record.expert_hashes[t]}:
            return False
    return True
