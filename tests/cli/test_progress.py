"""The progress bar of merging commands, and the default that shows nothing."""

from __future__ import annotations

import inspect

import pytest

from actmat.cli.screen import MergeProgress, showing_progress
from actmat.progress import NoProgress, Progress


def calls(kind: type) -> dict[str, list[str]]:
    functions = inspect.getmembers(kind, inspect.isfunction)
    return {name: list(inspect.signature(f).parameters) for name, f in functions if not name.startswith("_")}


@pytest.mark.parametrize("kind", [NoProgress, MergeProgress])
def test_implementations_have_the_calls_of_the_protocol(kind: type) -> None:
    assert set(calls(Progress)) == {"started", "tensor", "finishing"}
    assert calls(kind) == calls(Progress)


def test_quiet_is_no_bar() -> None:
    with showing_progress(quiet=True) as nothing:
        assert nothing is None
    with showing_progress(quiet=False) as bar:
        assert isinstance(bar, MergeProgress)


def test_no_progress_ignores_all_calls() -> None:
    nothing: Progress = NoProgress()
    nothing.started([], 0, 1)
    nothing.tensor("a", 1)
    nothing.finishing()
