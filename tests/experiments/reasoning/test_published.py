"""Published solutions against their own tests: what no model can get right is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actmat_experiments.harness.cache import Cache
from actmat_experiments.harness.progress import Watch
from actmat_experiments.reasoning.benchmarks import get_benchmarks
from actmat_experiments.reasoning.evaluate import unsolvable

HUMANEVAL, PLUS = get_benchmarks(["humaneval", "humaneval_plus"])
DATA = Path(__file__).parent / "data"


def problem(number: int, test: str) -> dict[str, Any]:
    solution = "    return float(sum(xs))\n"
    known = {"task_id": f"Made/{number}", "prompt": "def total(xs):\n", "canonical_solution": solution}
    return known | {"entry_point": "total", "test": test}


def test_problems_that_nobody_can_solve_are_named_once(
    fenced: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starred = "def check(candidate):\n    assert sum(*candidate([1])) <= 1\n"  # a number is no list of arguments
    problems = [problem(0, "def check(candidate):\n    assert candidate([1, 2]) == 3\n"), problem(1, starred)]
    problems.append({k: v for k, v in problem(2, starred).items() if k != "canonical_solution"})
    with Watch(None, tmp_path / "logs") as watch:
        for _ in range(2):
            assert unsolvable(PLUS, problems, Cache(tmp_path), watch, threads=2) == ["Made/1"]
        (stored,) = tmp_path.rglob("failing.json")
        assert json.loads(stored.read_text()) == ["Made/1"]
        assert unsolvable(PLUS, problems[:1], Cache(tmp_path), watch, threads=None) == []


def test_the_published_problems_here_can_be_solved(fenced: None, tmp_path: Path) -> None:
    with Watch(None, tmp_path / "logs") as watch:
        assert unsolvable(HUMANEVAL, HUMANEVAL.load(DATA), Cache(tmp_path), watch, threads=2) == []
