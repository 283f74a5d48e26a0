"""Stage three of a run, one output: its folder, its finished items, and its completion."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from actmat.checkpoints.model import GENERATION, Model, ModelFolder
from actmat.checkpoints.remote import staging_for
from actmat.checkpoints.writing.sidecars import copy_sidecars
from actmat.checkpoints.writing.staging import Staging, disk_errors
from actmat.checkpoints.writing.writer import ShardWriter
from actmat.diagnostics.build import build_diagnosis, is_observation
from actmat.diagnostics.model import Diagnosis, write_diagnosis
from actmat.diagnostics.totals import totals_of
from actmat.diagnostics.warnings import warnings_of
from actmat.engine.inputs import Inputs
from actmat.engine.observer import Writer
from actmat.engine.record import Record
from actmat.errors import MergeError, Note, OutputError, format_size
from actmat.experts.deltas import Deltas
from actmat.identity.inventory import files_of, matches
from actmat.identity.templates import chat_template
from actmat.identity.tokens import TOKENIZERS
from actmat.planning import MergePlan
from actmat.planning.model import Item
from actmat.planning.writes import settled_plan
from actmat.report.card import model_card
from actmat.report.manifest import build_manifest, write_manifest
from actmat.run.resume import MergeReport
from actmat.run.run import Run
from actmat.settings import RunSettings
from actmat.system import stored_bytes

Entries = Mapping[str, Mapping[str, Any]]
"""Journal entries by the name of their item."""

DrawPage = Callable[[Diagnosis, Path], object]
"""Writes the page of a diagnosis to a file."""


class JournalRecords(Mapping[str, Record]):
    """Records of finished items, read from the journal on request: of each, about 8 kB."""

    def __init__(self, journal: Entries) -> None:
        self._journal = journal

    def __getitem__(self, name: str) -> Record:
        record = Record.from_json(self._journal[name])
        if record is None:
            raise OutputError(f"The journal was changed while its merge ran: its entry of '{name}' is damaged.")
        return record

    def __iter__(self) -> Iterator[str]:
        return iter(self._journal)

    def __len__(self) -> int:
        return len(self._journal)


@dataclass
class Output:
    """An output that is being built.

    Args:
        plan: of the output.
        writer: receives its bytes; None if the merge is only measured.
        records: of everything that is done, by item.
        stage: its partial folder; None if nothing is written.
        done: items that an earlier run finished, or that need no work.
        resumed: number of items that an earlier run finished.
    """

    plan: MergePlan
    writer: Writer | None
    records: Mapping[str, Record] = field(default_factory=dict)
    stage: Staging | None = None
    done: frozenset[str] = frozenset()
    resumed: int = 0

    @property
    def out(self) -> Path | str:
        """The final folder, or its URL."""
        return self._staging.place

    @property
    def folder(self) -> Path | None:
        """The folder that is written to."""
        return None if self.stage is None else self.stage.path

    @property
    def _staging(self) -> Staging:
        assert self.stage is not None, "an output that is only measured has no folder"
        return self.stage

    def keep(self, record: Record) -> None:
        """Add a finished item to the journal; without a journal, keep it in memory."""
        if self.stage is not None:
            self.stage.record(record.to_json())
        else:
            assert isinstance(self.records, dict)
            self.records[record.name] = record

    def finish(self, run: Run, draw: DrawPage | None) -> MergeReport:
        """Close the shards and write all other files.

        Args:
            run: the inputs and settings.
            draw: writes the page of a measured merge; None: no page.

        Raises:
            OutputError: writing failed.
        """
        staging, settings, seconds = self._staging, run.places.settings, time.perf_counter() - run.inputs.began
        diagnosis = self._write_report(draw) if settings.diagnose else None
        assert isinstance(self.writer, ShardWriter), "a merge into a folder"
        if self.plan.is_extracted:
            changed = {n for n, r in self.records.items() if not r.unchanged and r.stats.get("norm") != 0.0}
            self.plan = settled_plan(self.plan, changed)
            self.writer.keep_only(*self.plan.shards)
        self.writer.finish(self.plan.specs)
        with disk_errors(staging.path):
            copied = self._write_files(run.inputs, staging.path)
            totals = totals_of(self.plan, self.records)
            warnings = warnings_of(self.plan, self.records, totals)
            manifest = build_manifest(
                self.plan,
                self.records,
                run.inputs.experts,
                out=None if isinstance(self.out, str) else self.out,
                fingerprint=staging.fingerprint,
                seconds=seconds,
                totals=totals,
                files=copied,
            )
            manifest["notes"] += [asdict(note) for note in warnings]
            card = model_card(self.plan, run.inputs, warnings)
            (staging.path / "README.md").write_text(card, encoding="utf-8", newline="\n")
            write_manifest(staging.path, manifest)
        seconds = time.perf_counter() - run.inputs.began
        return MergeReport(self.out, self.plan, seconds, self.resumed, diagnosis, totals=totals, warnings=warnings)

    def _write_files(self, inputs: Inputs, folder: Path) -> Sequence[str]:
        """Write the config, and copy the files beside the weights; returns the paths of those."""
        of_experts = {label: e.model.folder for label, e in zip(inputs.labels, inputs.experts, strict=True)}
        taken = {path: of_experts[label] for path, label in self.plan.files.items()}
        if self.plan.adapter_config is not None:
            config = json.dumps(self.plan.adapter_config, indent=2) + "\n"
            (folder / "adapter_config.json").write_text(config, encoding="utf-8", newline="\n")
        if self.plan.output != "model":
            return copy_sidecars(*[ModelFolder()] * 3, out=folder, dtype=None, taken=taken)
        assert inputs.base is not None, "a model is merged into a base"
        base, output, dtype = inputs.base.folder, self.plan.recipe.model, self.plan.recipe.dtype
        chosen = [of_experts.get(label or "base", base) for label in (output.files_of, output.config_from)]
        giver = taken.get(GENERATION, chosen[0])  # maybe in memory; all other texts are the base's, made anew
        texts = {name: text for name, text in base.texts.items() if name != GENERATION}
        texts |= {name: text for name, text in giver.texts.items() if name == GENERATION}
        template = output.chat_template
        if template == "auto":
            template = most_frequent_template((inputs.base, *inputs.experts))
        if template is not None:
            texts["chat_template.jinja"] = template
        written = {**base.written, **self.plan.configs}
        copied = copy_sidecars(base, *chosen, out=folder, dtype=dtype, configs=written, taken=taken)
        if not any(matches(name, TOKENIZERS) for name in (*copied, *texts)):
            texts = {**(converted := base.converted_tokenizer()), **texts}
            if base.header_settings() and not converted:
                lost = "the tokenizer in the base's header cannot be converted, and the output has none: copy its files"
                self.plan = replace(self.plan, notes=(*self.plan.notes, Note("note", "", lost)))
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8", newline="\n")
        return copied

    def _write_report(self, draw: DrawPage | None) -> Diagnosis:
        """The diagnosis of a measured merge, written into the output before the manifest, which has its hash."""
        folder = self._staging
        diagnosis = build_diagnosis(self.plan, self.records, out=str(self.out))
        with disk_errors(folder.path):
            write_diagnosis(diagnosis, folder.path)
            if draw is not None:
                draw(diagnosis, folder.path / "report.html")
        return diagnosis


@contextlib.contextmanager
def stage(run: Run) -> Iterator[list[Output]]:
    """Outputs under construction, each locked, with what an earlier run finished; committed at the end.

    Whatever stops the run, finished items are kept for the same command, and a note of the error says how many; not
    after an error that would recur, because another recipe or other inputs start from the beginning.

    Raises:
        OutputError: another process writes the same output, the place cannot be written, or its disk is too small.
    """
    settings = run.places.settings
    plans = [plan for _, plan in run.unfinished]
    with contextlib.ExitStack() as stack:
        stages = [_staging(out, plan, settings) for out, plan in run.unfinished]
        journals = []
        try:
            for staging in stages:
                stack.callback(staging.close)
                journals.append(staging.open())
            check_room([(staging.out, staging.path) for staging in stages], plans)
            outputs = []
            for staging, plan, journal in zip(stages, plans, journals, strict=True):
                writer = ShardWriter(staging.path, plan.shards, durable=settings.durable)
                stack.callback(writer.close)
                intact = frozenset(intact_items(plan, journal, writer, observed=settings.diagnose))
                for name in journal.keys() - intact:
                    journal.drop(name)
                outputs.append(Output(plan, writer, JournalRecords(journal), staging, intact, len(intact)))
            yield outputs
            for staging in stages:
                staging.commit()
        except BaseException as error:  # Ctrl-C and bugs too: finished items are kept whatever stops a run
            _leave(stages, plans, error)
            raise


def _staging(out: Path | str, plan: MergePlan, settings: RunSettings) -> Staging:
    """Staging of an output in a folder, in a bucket, or on the hub."""
    if isinstance(out, Path):
        return Staging(out, plan.fingerprint(), overwrite=settings.overwrite)
    return staging_for(out, plan.fingerprint(), overwrite=settings.overwrite)


def _leave(stages: Sequence[Staging], plans: Sequence[MergePlan], error: BaseException) -> None:
    """Keep unfinished outputs with finished items, remove the others; the error gets a note of their number."""
    useless = isinstance(error, MergeError) and error.is_permanent
    n_kept = total = 0
    for stage, plan in reversed(list(zip(stages, plans, strict=True))):  # the first one made the folder of all
        if useless or not stage.finished:
            stage.discard()
        n_kept += stage.finished
        total += 0 if stage.committed else sum(i.action != "tie" for i in plan.items)
    if n_kept:
        error.add_note(f"{n_kept} of {total} tensors are kept; the same command goes on where it stopped.")


def intact_items(plan: MergePlan, journal: Entries, writer: ShardWriter, *, observed: bool) -> Iterator[str]:
    """Items that an earlier run finished and whose bytes are unchanged; measured ones if requested.

    Args:
        plan: of the output.
        journal: entries by item.
        writer: compares the bytes on the disk.
        observed: only those that were measured, if the plan measures them.
    """
    for name, entry in journal.items():
        record, item = Record.from_json(entry), plan.by_name.get(name)
        if record is None or item is None or not _is_record_of(record, item):
            continue
        measured = record.observed is not None and is_observation(record.observed)
        if observed and not measured and item.call is not None and item.is_observed:
            continue
        if all(writer.holds(tensor, digest) for tensor, digest in record.hashes.items()):
            yield name


def _is_record_of(record: Record, item: Item) -> bool:
    """True if a journal's record covers all outputs and inputs of the item."""
    read = len(item.sources) if item.has_base and item.call is not None else 0
    if item.write.kind == "svd" and not record.hashes:
        return record.stats.get("norm") == 0.0 and len(record.expert_hashes) >= read
    return record.hashes.keys() == {s.name for s in item.outputs} and len(record.expert_hashes) >= read


def most_frequent_template(inputs: Sequence[Model | Deltas]) -> str | None:
    """The chat template that most inputs have, the first of several; None if no input has one."""
    templates = [text for each_input in inputs if (text := chat_template(files_of(each_input), name="default"))]
    return Counter(templates).most_common(1)[0][0] if templates else None


def check_room(places: Sequence[tuple[Path, Path]], plans: Sequence[MergePlan]) -> None:
    """Refuse a disk without room for all outputs that go there; files of an interrupted run count as free space.

    Args:
        places: per plan, the output and the folder that it is built in.

    Raises:
        OutputError: too little; names the bytes that are needed and that are free.
    """
    by_disk: dict[int, list[tuple[Path, Path, int]]] = {}
    for (out, folder), plan in zip(places, plans, strict=True):
        needs = plan.write_bytes * (2 if plan.is_extracted else 1)  # copied without the tensors that no expert changes
        by_disk.setdefault(folder.stat().st_dev, []).append((out, folder, needs))
    for rows in by_disk.values():
        reusable = sum(stored_bytes(f.stat()) for _, folder, _ in rows for f in folder.rglob("*") if f.is_file())
        folder = rows[0][1]
        with disk_errors(folder):
            free = shutil.disk_usage(folder).free
        needed = sum(nbytes for *_, nbytes in rows)
        if free + reusable < needed:
            names = ", ".join(str(out) for out, *_ in rows)
            raise OutputError(
                f"{names}: needs {format_size(needed)}, but the disk has only {format_size(free + reusable)} free. "
                "Free some space or choose another place with --out; the inputs are untouched."
            )
