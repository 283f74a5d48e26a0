"""The record of many runs: how many per sort of output and per kind of fault, and the problems."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path


@dataclass
class Record:
    """Runs of one seed, numbered from 0.

    Args:
        runs: number of runs; disturbances: of all, one to three per run.
        by: sort of output -> kind of fault -> runs.
        problems: sentences, one for each run that ended in another way than it should.
        seconds: time on the clock.
    """

    seed: int
    runs: int = 0
    disturbances: int = 0
    by: dict[str, dict[str, int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    def add(self, sort: str, kind: str, disturbances: int, problems: list[str], seconds: float) -> None:
        """Count a run."""
        kinds = self.by.setdefault(sort, {})
        kinds[kind] = kinds.get(kind, 0) + 1
        self.runs += 1
        self.disturbances += disturbances
        self.problems += problems
        self.seconds = round(self.seconds + seconds, 1)
        self.versions = {"python": platform.python_version()} | {n: metadata.version(n) for n in ("actmat", "torch")}


def read_record(path: Path | None, seed: int) -> Record:
    """The record in a file; a new one of this seed if there is none."""
    return Record(**json.loads(path.read_text())) if path and path.exists() else Record(seed)


def write_record(path: Path, record: Record) -> None:
    """Replace the file."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(record), indent=1) + "\n")
    os.replace(partial, path)
