"""A few hundred random cases per door, and all that once broke a promise; `make fuzz` runs more."""

from __future__ import annotations

import fuzz.doors  # noqa: F401 - registers the doors
import pytest
from fuzz.harness import DOORS, kept_cases
from fuzz.worker import run_batch, run_files

CASES = 200


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
