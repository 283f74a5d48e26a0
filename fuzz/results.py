"""`fuzz/results.json`: what a recording of many cases found, door by door; written after every batch."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

from benchmarks import provenance

from fuzz.worker import Batch

RESULTS = Path(__file__).parent / "results.json"


@dataclass(frozen=True)
class Row:
    """Record of one door.

    Args:
        door: its name.
        seed: of all its cases, which are numbered from 0.
        cases: number of cases that were tried.
        found: cases that broke a promise, as the code was then.
        slowest: processor time of the slowest case in seconds.
        memory: memory of the largest case in bytes.
        seconds: time on the clock.
        versions: of the software, when the last case was tried.
    """

    door: str
    seed: int
    cases: int = 0
    found: int = 0
    slowest: float = 0.0
    memory: int = 0
    seconds: float = 0.0
    versions: dict[str, str] | None = None

    @property
    def rate(self) -> float:
        """Cases per second."""
        return self.cases / self.seconds if self.seconds else 0.0

    def plus(self, batch: Batch) -> Row:
        """The record with a further batch."""
        return replace(
            self,
            cases=self.cases + batch.cases,
            found=self.found + len(batch.failures),
            slowest=round(max(self.slowest, batch.slowest), 4),
            memory=max(self.memory, batch.memory),
            seconds=round(self.seconds + batch.wall, 1),
            versions=_versions(),
        )


def _versions() -> dict[str, str]:
    names = ("actmat", "torch", "safetensors", "pydantic", "PyYAML", "google-re2")
    return {"python": platform.python_version()} | {n: metadata.version(n) for n in names}


def read_results() -> dict[str, Row]:
    """Door -> its record; empty without a file."""
    if not RESULTS.exists():
        return {}
    return {row["door"]: Row(**row) for row in json.loads(RESULTS.read_text())}


def write_results(rows: dict[str, Row]) -> None:
    """Replace the file."""
    text = json.dumps([asdict(rows[name]) for name in sorted(rows)], indent=1) + "\n"
    partial = RESULTS.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, RESULTS)
    provenance.record(RESULTS, "python -m fuzz --record")
