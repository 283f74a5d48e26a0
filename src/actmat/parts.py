"""Parts of a merge: each is a run of its own, on any machine; `finishing.finish_parts` makes one output of them.

    run_part(recipe, Part(3, 16))        # sixteen of these, in any order, also at the same time

Parts need nothing of each other but a folder that all of them see, beside the output (`checkpoints.writing.shared`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actmat.checkpoints.hashing import sha256_file
from actmat.checkpoints.writing.journal import Journal
from actmat.checkpoints.writing.shards import Shard
from actmat.checkpoints.writing.shared import SharedStage
from actmat.checkpoints.writing.staging import disk_errors
from actmat.checkpoints.writing.writer import ShardWriter
from actmat.diagnostics.observer import Observers, check_mutes
from actmat.engine.shares import Part, plan_part
from actmat.errors import MergeError, OutputError, RecipeError, memory_errors
from actmat.finished import check_same_merge, has_manifest_of
from actmat.inputs import Problems, check_copied_files, check_values, is_extraction, opened_inputs, plans_of
from actmat.output import JournalRecords, StagedOutput, check_outputs, check_room, intact_items
from actmat.places import checked_room, executor_of, out_path, resources_of
from actmat.planning import MergePlan
from actmat.planning.differences import plan_differences
from actmat.progress import NoProgress, Progress
from actmat.recipe import Recipe
from actmat.reference import with_reference
from actmat.run import execute_units
from actmat.settings import RunSettings

__all__ = ["PartReport", "PartStage", "run_part"]


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
    began = time.perf_counter()
    settings, progress = settings or RunSettings(), progress or NoProgress()
    recipe = with_reference(recipe)
    out, problems = out_path(recipe), Problems()
    if is_extraction(recipe):
        raise RecipeError("An adapter is extracted in one run: leave out --part, or merge into a model (--to model) "
                          "and extract from that (actmat extract).")  # fmt: skip
    if isinstance(out, str):
        raise RecipeError(f"The parts of a merge write into one folder that all machines see; {out} is a URL.")
    if settings.diagnose:
        check_mutes([recipe])
    executor = executor_of(settings, recipe)
    room = checked_room(settings, executor, problems)
    same = not settings.overwrite and has_manifest_of(recipe, out)
    with problems.noted():
        check_outputs([recipe], [out], overwrite=settings.overwrite, finished={out} if same else (), parts=True)
    with opened_inputs([recipe], problems) as inputs:
        with problems.noted():
            check_copied_files([recipe], inputs)
        (plan,) = plans_of([recipe], inputs, room, problems)
        stage = SharedStage(out)
        if same and not stage.is_open:
            check_same_merge(plan, out, settings)
            return PartReport(
                part, out, len(plan_part(plan, part).names), 0, time.perf_counter() - began, was_finished=True
            )
        observers = Observers(recipe.seed, settings.exact) if settings.diagnose else None
        resources = resources_of([plan], settings, inputs, observers)
        with _staged_part(plan, stage, part, settings, command) as (output, mine, resumed):
            progress.started([_only(plan, mine)], resumed, resources.workers)
            check_values(inputs)
            execute_units([output], inputs, executor, resources, observers, progress)
            progress.finishing()
    return PartReport(part, out, len(mine), resumed, time.perf_counter() - began)


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
    plan: MergePlan, stage: SharedStage, part: Part, settings: RunSettings, command: str
) -> Iterator[tuple[StagedOutput, frozenset[str], int]]:
    """The output of one part, the names of its items, and how many of them are done; at the end it is on the disk.

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
        stage.create(head, plan.write, plan.shards)
    _check_same(stage, head, plan)
    mine = frozenset(plan_part(plan, part).names)
    with contextlib.ExitStack() as stack:
        writer = ShardWriter(stage.path, plan.shards, durable=settings.durable, attach="cached")
        stack.callback(writer.close)
        attempts = stage.journals(part.number)
        done: set[str] = set()
        for attempt in attempts:
            entries = {name: attempt[name] for name in attempt.keys() & mine - done}
            done |= set(intact_items(plan, entries, writer.holds, observed=settings.diagnose))
        journal = stage.begin(part.number)
        stack.callback(journal.close)
        others = frozenset(i.name for i in plan.items) - mine
        output = StagedOutput(plan, writer, JournalRecords(journal), PartStage(stage, journal), others | done)
        try:
            yield output, mine, len(done)
            writer.sync()
            with disk_errors(stage.folder):
                journal.end({"end": str(part)})
        except BaseException as error:  # Ctrl-C and bugs too: whatever stops a part, what is finished is kept
            journal.catch_up()
            kept = len(done) + len(journal)
            if not (isinstance(error, MergeError) and error.recurs):
                error.add_note(f"{kept} of {len(mine)} tensors of part {part} are kept; the same command goes on.")
            raise


def _only(plan: MergePlan, names: frozenset[str]) -> MergePlan:
    """The plan with these items only, for a progress bar."""
    return dataclasses.replace(plan, items=tuple(i for i in plan.items if i.name in names))


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
        problems += plan_differences(MergePlan.read(stage.plan_path), plan)
    if problems:
        raise OutputError(
            f"{stage.folder} holds parts of another merge into {stage.out}. Finish that one (actmat merge --finish), "
            f"choose another --out, or start anew: rm -r {stage.folder}",
            problems,
        )
