"""The lists of CONTRIBUTING.md ("The way of one merge") against merges: what is listed is called, in that order."""

import importlib
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from tests.helpers.docs_fixture import write_models
from tests.helpers.family import tuned, write_family
from tests.helpers.repository import ROOT

import actmat

SECTION = re.compile(r"^## The way of one merge\n(.*?)^## ", re.DOTALL | re.MULTILINE)
LIST = re.compile(r"^\*\*(.+?)\*\*.*?```text\n(.*?)```", re.DOTALL | re.MULTILINE)


def full(root: Path) -> None:
    write_models(root)
    actmat.merge(root / "base", [*(root / "experts").iterdir()], method="actmat", out=root / "out", threads=1)


def adapter(root: Path) -> None:
    write_models(root)
    actmat.merge(None, [*(root / "adapters").iterdir()], method="actmat", out=root / "out", threads=1)


def tune(root: Path) -> None:
    write_family(root)
    tuned(root, root / "out", threads=1)


RUNS: dict[str, Callable[[Path], None]] = {"A full merge": full, "A merge of adapters": adapter, "A tune": tune}
"""Title of a list -> a small run that passes it."""


def lists() -> dict[str, list[str]]:
    """Title -> functions."""
    section = SECTION.search((ROOT / "CONTRIBUTING.md").read_text())
    assert section is not None, "CONTRIBUTING.md has no section 'The way of one merge'"
    return {title: [f"actmat.{row}" for row in rows.split()] for title, rows in LIST.findall(section[1])}


def calls_of(names: list[str], run: Callable[[], None]) -> list[str]:
    """Calls of the functions of these names in the order of time, in whatever thread."""
    functions, calls = {name.partition(":")[2] for name in names}, list[str]()

    def watch(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_qualname in functions:
            calls.append(f"{frame.f_globals.get('__name__', '')}:{frame.f_code.co_qualname}")

    for module in {name.partition(":")[0] for name in names}:
        importlib.import_module(module)  # imports take long while calls are watched
    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls


@pytest.mark.parametrize("title", sorted({*RUNS, *lists()}))
def test_a_merge_passes_the_functions_that_are_listed(title: str, tmp_path: Path) -> None:
    names = lists()[title]
    calls = calls_of(names, lambda: RUNS[title](tmp_path))
    later = iter(calls)
    missing = next((name for name in names if name not in later), None)
    assert missing is None, f"{missing} is not called after what stands above it; calls: {list(dict.fromkeys(calls))}"
