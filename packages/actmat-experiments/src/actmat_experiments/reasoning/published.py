"""Are the benchmarks themselves right? Published solutions of code problems, run against their own tests.

Some extended tests call the function in a way that no answer can satisfy (in the program that writes HumanEval+'s,
`find_zero` is handed to a star as if it returned a list). Such problems count as wrong for every model, as they do
elsewhere, so that figures stay comparable; a reader of the table must know how many there are.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from actmat_experiments.harness.cache import Cache, digest
from actmat_experiments.harness.progress import Watch
from actmat_experiments.reasoning.benchmarks import Benchmark, Problem

__all__ = ["unsolvable"]


def unsolvable(
    benchmark: Benchmark, problems: Sequence[Problem], cache: Cache, watch: Watch, threads: int | None
) -> list[str]:
    """Ids of the problems whose published solution fails their own test; run once per set of problems.

    Problems without a published solution are passed over.
    """

    def make(folder: Path) -> None:
        known = [(n, p) for n, p in enumerate(problems) if p.get("canonical_solution")]
        with watch.stage(f"published solutions: {benchmark.title}", len(known)) as stage:

            def fails(numbered: tuple[int, Problem]) -> str | None:
                n, problem = numbered
                right = benchmark.mark(problem, problem["canonical_solution"])[benchmark.name]
                stage.advance()
                return None if right else str(problem.get("task_id", n))

            with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
                found = [name for name in pool.map(fails, known) if name is not None]
        (folder / "failing.json").write_text(json.dumps(found), encoding="utf-8")

    key = {
        "benchmark": benchmark.name,
        "problems": digest({"problems": list(problems)}),
        "python": platform.python_version(),
    }
    folder = cache.get("reasoning-published", key, make)
    return [str(name) for name in json.loads((folder / "failing.json").read_text(encoding="utf-8"))]
