"""A few hundred random cases per door, and all that once broke a promise; `make fuzz` runs more."""

from __future__ import annotations

import fuzz.doors  # noqa: F401 - registers the doors
import pytest
from fuzz.harness import DOORS, kept_cases
from fuzz.results import read_results
from fuzz.worker import run_batch, run_files

CASES = 200
WANTED = {"headers", "indexes", "configs", "adapter configs", "recipes", "options", "patterns", "manifests", "journals",
          "statistics", "torch files", "distributed checkpoints", "paths", "verify", "compare", "reports", "gguf files",
          "quantised checkpoints", "LoRA files", "rank shards", "mergekit configs", "LyCORIS files", "packed codes",
          "vocabularies", "pages", "web servers", "slow servers", "slow requests"}  # fmt: skip


@pytest.mark.fuzz
@pytest.mark.parametrize("name", sorted(DOORS))
def test_a_door_lets_nothing_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.harness.MAX_SECONDS", 10.0)  # a busy machine is no defect
    kept = list(kept_cases(name))
    again = run_files(name, [files for _, files in kept])
    assert not again.failures, [f"{kept[k][0]}: {said}" for k, _, said in again.failures]
    found = run_batch(name, seed=1, first=0, count=CASES)
    assert not found.failures, found.failures[0]
    assert found.cases == CASES


def test_every_reader_of_foreign_input_has_a_door() -> None:
    assert set(DOORS) == WANTED


@pytest.mark.parametrize("name", sorted(read_results()))
def test_what_a_recording_found_is_kept_and_its_cases_were_cheap(name: str) -> None:
    row = read_results()[name]
    assert row.cases >= 100_000
    assert row.found <= len(list(kept_cases(name))), "the cases that were found are tried above"
    assert row.slowest < 1.0
    assert row.memory < 300_000_000
    assert row.versions is not None
    assert {"actmat", "python", "torch"} <= row.versions.keys()
