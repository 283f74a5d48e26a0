"""Lists of functions in CONTRIBUTING: a merge calls each below the one that it stands under, in that order.

The lists are read from the page. A row is `module:function`, without `actmat.`; its indent says below which it runs.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.helpers.merging import Family
from tests.helpers.repository import ROOT

import actmat

MOST = 15
SECTION = re.compile(r"^## The way of one merge\n(.*?)^## ", re.DOTALL | re.MULTILINE)
LIST = re.compile(r"^\*\*(.+?)\*\*.*?```text\n(.*?)```", re.DOTALL | re.MULTILINE)


Run = Callable[[], object]


def full(root: Path) -> Run:
    family = Family.make(root, layers=1)
    return lambda: actmat.merge(family.base, family.experts, method="actmat", out=root / "out", threads=1)


def adapter(root: Path) -> Run:
    from tests.e2e.test_short_forms import write_adapter

    for seed, name in enumerate(("one", "two")):
        write_adapter(root / name, seed=seed)
    experts = [root / "one", root / "two"]
    return lambda: actmat.merge(None, experts, method="actmat", out=root / "out", threads=1)


def tune(root: Path) -> Run:
    from tests.helpers.docs_fixture import write_models
    from transformers import AutoTokenizer, LlamaForCausalLM

    for module in ("actmat.extras.tune.tuning", "accelerate", "datasets", "peft", "scipy.stats"):
        importlib.import_module(module)  # imports take long while calls are watched
    write_models(root)
    LlamaForCausalLM.from_pretrained(root / "base")
    AutoTokenizer.from_pretrained(root / "base")
    experts = [root / "experts" / name for name in ("math", "code")]
    inputs = root / "inputs.jsonl"
    inputs.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one two", "three", "four five", "six")))
    space = {"methods": ["average"], "scales": [1.0]}
    return lambda: actmat.tune(root / "base", experts, data=inputs, space=space, out=root / "out", threads=1)


RUNS: dict[str, Callable[[Path], Run]] = {"A full merge": full, "A merge of adapters": adapter, "A tune": tune}
"""Title of a list -> preparation of a small run that passes it."""


def lists() -> dict[str, list[tuple[int, str]]]:
    """Title -> rows: depth and function."""
    section = SECTION.search((ROOT / "CONTRIBUTING.md").read_text())
    assert section is not None, "CONTRIBUTING.md has no section 'The way of one merge'"
    return {
        title: [((len(row) - len(row.lstrip())) // 2, f"actmat.{row.strip()}") for row in rows.splitlines()]
        for title, rows in LIST.findall(section[1])
    }


class Calls:
    """The first call of each of some functions below each other one of them, in order of time."""

    def __init__(self, names: set[str]) -> None:
        self.edges: dict[tuple[str | None, str], int] = {}
        self._names, self._functions = names, {n.partition(":")[2] for n in names}
        self._running: list[str] = []  # of the main thread, at the moment when a worker calls

    def _name(self, frame: FrameType) -> str | None:
        if frame.f_code.co_qualname not in self._functions:
            return None
        name = f"{frame.f_globals.get('__name__', '')}:{frame.f_code.co_qualname}"
        return name if name in self._names else None

    def _above(self, frame: FrameType | None) -> list[str]:
        """The functions that a frame runs below, the nearest first; work of a thread is below the main thread's."""
        found = []
        while frame is not None:
            if (name := self._name(frame)) is not None:
                found.append(name)
            frame = frame.f_back
        if threading.current_thread() is threading.main_thread():
            return found
        return found + self._above_of_main()

    def _above_of_main(self) -> list[str]:
        found, frame = [], sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            if (name := self._name(frame)) is not None:
                found.append(name)
            frame = frame.f_back
        return found

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and (name := self._name(frame)) is not None:
            above = self._above(frame.f_back)
            self.edges.setdefault((above[0] if above else None, name), len(self.edges))


def passed(names: set[str], run: Run) -> dict[tuple[str | None, str], int]:
    """(the nearest function above, a function) -> order of its first call there, while `run` runs."""
    calls = Calls(names)
    threading.setprofile(calls)
    sys.setprofile(calls)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls.edges


@pytest.mark.parametrize("title", RUNS)
def test_a_merge_passes_the_functions_that_are_listed(title: str, tmp_path: Path) -> None:
    rows = lists()[title]
    assert len(rows) <= MOST
    edges = passed({name for _, name in rows}, RUNS[title](tmp_path))
    above: list[str] = []
    last = -1
    for depth, name in rows:
        above = above[:depth]
        edge = (above[-1] if above else None, name)
        assert edge in edges, f"{name} is not called below {edge[0]}; found {sorted(map(str, edges))}"
        assert edges[edge] > last, f"{name} is called before the row above it"
        last = edges[edge]
        above.append(name)


def test_every_list_has_a_run() -> None:
    assert lists().keys() == RUNS.keys()


def test_what_is_not_below_is_seen(tmp_path: Path) -> None:
    """A function that runs, but elsewhere, is no step of the way."""
    names = {"actmat.run.recipes:run_recipes", "actmat.run.resume:resume", "actmat.run.prepare:prepare"}
    edges = passed(names, full(tmp_path))
    assert ("actmat.run.recipes:run_recipes", "actmat.run.resume:resume") in edges
    assert ("actmat.run.prepare:prepare", "actmat.run.resume:resume") not in edges
