"""Parts of a merge: each is a run of its own, on any machine; `finish_parts` makes one output of them.

    run_part(recipe, Part(3, 16))        # sixteen of these, in any order, also at the same time
    finish_parts(out)                    # once

Parts need nothing of each other but a folder that all of them see, beside the output (`stage`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from actmat.bounds import is_url
from actmat.checkpoints.hashing import sha256_file
from actmat.checkpoints.writing.journal import Journal
from actmat.checkpoints.writing.shards import Shard
from actmat.checkpoints.writing.staging import disk_errors
from actmat.checkpoints.writing.writer import ShardWriter
from actmat.diagnostics.observer import check_mutes
from actmat.engine.inputs import Inputs
from actmat.engine.units import plan_units
from actmat.errors import MergeError, OutputError, RecipeError, memory_errors
from actmat.extras.parts.differences import plan_differences
from actmat.extras.parts.plan_files import read_plan, write_plan
from actmat.extras.parts.shares import Part, plan_part, share_units
from actmat.extras.parts.stage import SharedStage
from actmat.planning import MergePlan
from actmat.progress import NoProgress, Progress
from actmat.recipe import Recipe
from actmat.recipe.output import Extracted
from actmat.report import Totals, read_manifest, recorded_totals, verify
from actmat.run.driver import execute
from actmat.run.open import open_inputs
from actmat.run.prepare import prepare
from actmat.run.resume import check_same_merge
from actmat.run.stage import JournalRecords, StagedOutput, check_room, intact_items
from actmat.settings import RunSettings
from actmat.system import usable_cores

SHOWN = 8
"""Missing parts that an error lists with their commands."""


@dataclass(frozen=True, slots=True)
class PartReport:
    """Result of one part.

    Args:
        part: which one.
        out: directory of the output, which `finish` makes.
        items: tensors of this part.
        resumed: those that an earlier attempt had finished.
        seconds: wall time.
        was_finished: all parts were finished earlier, and the output is there; nothing was done.
    """

    part: Part
    out: Path
    items: int
    resumed: int
    seconds: float
    was_finished: bool = False


@dataclass(frozen=True, slots=True)
class FinishReport:
    """Result of `finish_parts`.

    Args:
        out: directory of the output.
        tensors: number of its tensors.
        seconds: wall time.
        parts: that it was made of; 0 where `was_finished`.
        was_finished: an earlier call finished it; it was verified.
        totals: sums over all tensors.
        notes: of the plan.
    """

    out: Path
    tensors: int
    seconds: float
    parts: int = 0
    was_finished: bool = False
    totals: Totals = field(default_factory=Totals)
    notes: tuple[str, ...] = ()


@memory_errors()
def run_part(
    recipe: Recipe,
    part: Part,
    settings: RunSettings | None = None,
    progress: Progress | None = None,
    *,
    command: str = "",
) -> PartReport:
    """Merge the share of one part into the folder that all parts build; `finish_parts` completes it.

    A part that is run again goes on where it stopped, or verifies what it wrote. Methods that survey the whole model
    before they merge do so in every part: all shares are cut from the same survey, at the price of reading its tensors
    once more in each.

    Args:
        recipe: with its own `out`, the same for all parts.
        part: which share of the units.
        settings: how to run it; `diagnose` and `exact` must be the same for all parts.
        progress: receives callbacks; a plan with the items of this part only.
        command: the command line without its `--part`, for messages.

    Raises:
        OutputError: the folder is of parts of another merge; says what differs.
        MergeError: whatever merging the recipe would raise. What was done is kept for the same call.
    """
    settings, progress = settings or RunSettings(), progress or NoProgress()
    if recipe.out is not None and is_url(recipe.out):
        raise RecipeError(f"The parts of a merge write into one folder that all machines see; {recipe.out} is a URL.")
    if settings.diagnose:
        check_mutes([recipe])
    with open_inputs([recipe], settings, "part") as opened:
        if isinstance(opened.recipes[0].output, Extracted):
            raise RecipeError(
                "An adapter is extracted in one run: leave out --part, or merge into a model (--to model) and extract "
                "from that (actmat extract)."
            )
        prepared = prepare(opened)
        (plan,), out = prepared.plans, Path(opened.place.outs[0])
        shared, names = SharedStage(out), frozenset(plan_part(prepared.plans[0], part).names)
        if opened.place.finished and not shared.is_open:
            check_same_merge(plan, out, settings)
            seconds = time.perf_counter() - opened.began
            return PartReport(part, out, len(names), 0, seconds, was_finished=True)
        with _staged_part(plan, shared, part, names, settings, command) as output:
            execute([output], prepared, progress)
            progress.finishing()
    return PartReport(part, out, len(names), output.resumed, time.perf_counter() - opened.began)


class PartStage:
    """The folder of a `StagedOutput`: the shared one, with a journal of its own while a part is merged."""

    def __init__(self, stage: SharedStage, journal: Journal | None = None) -> None:
        self.place, self.path = stage.out, stage.path
        self._journal = journal

    def sha256(self, file: str) -> str:
        """SHA-256 of a finished file of the output."""
        return sha256_file(self.path / file)

    def settle(self, shards: Sequence[Shard]) -> None:
        """Parts have known files."""

    def record(self, entry: Mapping[str, Any]) -> None:
        """Append a finished item."""
        assert self._journal is not None, "nothing is merged once all parts are there"
        with disk_errors(self.path):
            self._journal.append(entry)


@contextlib.contextmanager
def _staged_part(
    plan: MergePlan, stage: SharedStage, part: Part, mine: frozenset[str], settings: RunSettings, command: str
) -> Iterator[StagedOutput]:
    """The output of one part, whose items are `mine`; at the end it is on the disk.

    Raises:
        OutputError: the folder is of another merge, or its disk is too small.
    """
    head = {
        "fingerprint": plan.fingerprint(),
        "parts": part.of,
        "diagnose": settings.diagnose,
        "exact": settings.diagnose and settings.exact,
        "command": command,
    }
    if not stage.is_open:
        with disk_errors(stage.out.parent):
            stage.out.parent.mkdir(parents=True, exist_ok=True)
        check_room([(stage.out, stage.out.parent)], [plan])
        stage.create(head, partial(write_plan, plan), plan.shards)
    _check_same(stage, head, plan)
    with contextlib.ExitStack() as stack:
        writer = ShardWriter(stage.path, plan.shards, durable=settings.durable, attach="cached")
        stack.callback(writer.close)
        attempts = stage.journals(part.number)
        done: set[str] = set()
        for attempt in attempts:
            entries = {name: attempt[name] for name in attempt.keys() & mine - done}
            done |= set(intact_items(plan, entries, writer, observed=settings.diagnose))
        journal = stage.begin(part.number)
        stack.callback(journal.close)
        others = frozenset(i.name for i in plan.items) - mine
        folder = PartStage(stage, journal)
        shown = dataclasses.replace(plan, items=tuple(i for i in plan.items if i.name in mine))
        output = StagedOutput(plan, writer, JournalRecords(journal), folder, others | done, len(done), shown)
        try:
            yield output
            writer.sync()
            with disk_errors(stage.folder):
                journal.end({"end": str(part)})
        except BaseException as error:  # Ctrl-C and bugs too: whatever stops a part, what is finished is kept
            journal.catch_up()
            kept = len(done) + len(journal)
            if not (isinstance(error, MergeError) and error.recurs):
                error.add_note(f"{kept} of {len(mine)} tensors of part {part} are kept; the same command goes on.")
            raise


def _check_same(stage: SharedStage, head: Mapping[str, Any], plan: MergePlan) -> None:
    """Refuse a folder of parts of another merge.

    Raises:
        OutputError: lists what differs.
    """
    there = stage.head()
    problems = []
    if there["parts"] != head["parts"]:
        problems.append(f"the merge there is in {there['parts']} parts, this is one of {head['parts']}")
    problems += [
        f"the parts there are made {'with' if there.get(key) else 'without'} --{key}"
        for key in ("diagnose", "exact")
        if bool(there.get(key)) != head[key]
    ]
    if there.get("fingerprint") != head["fingerprint"]:
        problems += plan_differences(read_plan(stage.plan_path), plan)
    if problems:
        raise OutputError(
            f"{stage.folder} holds parts of another merge into {stage.out}. Finish that one (actmat merge --finish), "
            f"choose another --out, or start anew: rm -r {stage.folder}",
            problems,
        )


@memory_errors()
def finish_parts(
    out: Path,
    *,
    check: bool = True,
    overwrite: bool = False,
    durable: bool = True,
    sha256: bool = False,
    threads: int | None = None,
) -> FinishReport:
    """Complete the output that parts have built: index, config, model card and manifest; then its final name.

    An output that is finished is verified.

    Args:
        out: as it was given to the parts.
        check: hash every tensor again as it lies on the disk, and compare it with what its part wrote.
        overwrite: replace an earlier output of actmat at `out`.
        durable: wait until all is on the disk before it appears.
        sha256: add SHA-256 of the weight files to the manifest.
        threads: that hash; default: all cores.

    Raises:
        OutputError: parts are missing, each with the command that makes it; nothing is changed then. Or there are no
            parts, inputs changed since, or a finished output is not as it was written.
    """
    began = time.perf_counter()
    shared = SharedStage(out)
    if not shared.is_open:
        return _verified(shared, began)
    head = shared.head()
    plan = read_plan(shared.plan_path)
    if plan.fingerprint() != head.get("fingerprint"):
        raise OutputError(
            f"{shared.plan_path} was changed. Fix: remove {shared.folder} (rm -r) and run all parts again."
        )
    shared.take_lock()
    try:
        with open_inputs([plan.recipe]) as opened, contextlib.ExitStack() as stack:
            _check_unchanged(plan, opened.inputs, shared)
            writer = ShardWriter(shared.path, plan.shards, durable=durable, attach="cached")
            stack.callback(writer.close)
            workers = usable_cores() if threads is None else threads
            records = JournalRecords(_Gathered(_gather(shared, head, plan, writer if check else None, workers)))
            output = StagedOutput(plan, writer, records, PartStage(shared))
            if head.get("diagnose"):
                output.write_report(time.perf_counter() - began)
            totals = output.finish(opened.inputs, time.perf_counter() - began, sha256=sha256)
        shared.commit(overwrite=overwrite)
    finally:
        shared.release_lock()
    seconds = time.perf_counter() - began
    return FinishReport(out, len(plan.specs), seconds, head["parts"], totals=totals, notes=plan.notes)


def _check_unchanged(plan: MergePlan, inputs: Inputs, stage: SharedStage) -> None:
    """Refuse inputs that are not those of the plan any more.

    Raises:
        OutputError: names them.
    """
    opened = (*(() if inputs.base is None else (inputs.base,)), *inputs.experts)
    changed = [s.label for s, now in zip(plan.inputs, opened, strict=True) if s.files != now.identity()]
    if changed:
        raise OutputError(
            f"Files of {', '.join(changed)} have changed since the parts were made, so that {stage.out} would not be "
            f"what its manifest says. Restore them, or remove {stage.folder} (rm -r) and run all parts again."
        )


def _verified(stage: SharedStage, began: float) -> FinishReport:
    """Report of an output that is finished.

    Raises:
        OutputError: there is none, or it is not as it was written.
    """
    out = stage.out
    if not os.path.isdir(out) or not os.listdir(out):
        raise OutputError(
            f"There are no parts of a merge into {out}: expected the folder {stage.folder}. Likely cause: another "
            f"--out, or another machine's disk. Make them: actmat merge ... --out {out} --part 1/N to N/N."
        )
    result = verify(out)
    if not result.ok:
        raise OutputError(f"{out} is finished, but is not as it was written.", result.problems)
    stage.sweep()
    totals = recorded_totals(read_manifest(out))
    return FinishReport(out, result.tensors, time.perf_counter() - began, was_finished=True, totals=totals)


Gathered = dict[str, Journal]
"""Name of an item -> the journal that has its record."""


class _Gathered(Mapping[str, Mapping[str, Any]]):
    """Entries of all parts."""

    def __init__(self, journals: Gathered) -> None:
        self._journals = journals

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        return self._journals[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._journals)

    def __len__(self) -> int:
        return len(self._journals)


def _gather(
    stage: SharedStage, head: Mapping[str, Any], plan: MergePlan, writer: ShardWriter | None, workers: int
) -> Gathered:
    """The journals of all items, all of which are there and, with a writer, as they were written.

    Raises:
        OutputError: parts that are missing, not finished, or whose bytes are not on the disk, with their commands.
    """
    found: Gathered = {}
    problems: list[str] = []
    total = head["parts"]
    command = head.get("command") or "actmat.merge_part(...)"
    shares = share_units(plan_units([plan], [()], None), total)
    with concurrent.futures.ThreadPoolExecutor(max(1, workers)) as pool:
        for number, share in enumerate(shares, start=1):
            names = [plan.items[n].name for unit in share for group in unit.groups for _, n in group]
            attempts = stage.journals(number)
            of_item = [[a for a in attempts if name in a] for name in names]
            done = sum(map(bool, of_item))
            problem = None
            if not attempts:
                problem = f"part {number}/{total} is missing ({len(names)} tensors)"
            elif done < len(names) or not any(a.closing for a in attempts):
                problem = f"part {number}/{total} is not finished: {done} of {len(names)} tensors are done"
            else:
                good = list(pool.map(partial(_first_intact, plan, writer), names, of_item))
                bad = [name for name, journal in zip(names, good, strict=True) if journal is None]
                if bad:
                    problem = (
                        f"part {number}/{total}: {len(bad)} tensors are not on the disk as it wrote them, such as "
                        f"'{bad[0]}'"
                    )
                found.update((n, j) for n, j in zip(names, good, strict=True) if j is not None)
            if problem is not None:
                problems.append(f"{problem}. Run it: {command} --part {number}/{total}")
    if problems:
        few = problems[:SHOWN] + ([f"... and {len(problems) - SHOWN} more parts"] if len(problems) > SHOWN else [])
        raise OutputError(f"{stage.out} cannot be finished: {len(problems)} of {total} parts are not ready.", few)
    return found


def _first_intact(
    plan: MergePlan, writer: ShardWriter | None, name: str, journals: Sequence[Journal]
) -> Journal | None:
    """The first of an item's journals whose record fits the item, and the bytes on the disk."""
    for journal in journals:
        if any(intact_items(plan, {name: journal[name]}, writer, observed=False)):
            return journal
    return None
