"""A few hundred random cases per door; `make fuzz` runs more."""

from __future__ import annotations

import time

import fuzz.doors  # noqa: F401 - registers the doors
import pytest
from fuzz.harness import DOORS, BrokenPromise, guarded, run_door

from actmat.errors import CheckpointError

CASES, SECONDS = 300, 3.0


@pytest.mark.fuzz
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(DOORS))
def test_a_door_lets_nothing_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.harness.MAX_SECONDS", 10.0)  # a busy machine is no defect
    result = run_door(name, cases=CASES, deadline=time.monotonic() + SECONDS)
    assert not result.failure, result.failure
    assert result.cases > 20, "the reader is too slow for this test to mean anything"


def test_broken_promises_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class RawError(CheckpointError):
        """An error that shows foreign text as it is."""

        def __str__(self) -> str:
            return self.headline

    def refuse(text: str) -> None:
        raise RawError(text)

    guarded(lambda: refuse("two\nlines"))
    for text in ("\x1b[2J", "a\rb", "\u202e", "\x9b", "\udcff"):
        with pytest.raises(BrokenPromise, match="control character"):
            guarded(lambda text=text: refuse(text))
    with pytest.raises(BrokenPromise, match="bytes"):
        guarded(lambda: bytearray(400_000_000))
    with pytest.raises(KeyError):
        guarded(lambda: {}["x"])
    monkeypatch.setattr("fuzz.harness.MAX_SECONDS", 0.01)
    with pytest.raises(BrokenPromise, match=" s, at most"):
        guarded(lambda: sum(range(3_000_000)))
