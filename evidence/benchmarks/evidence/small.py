"""Tables of the suites at laptop size from `results/small/*.jsonl`, as `actmat experiment table` makes them.

actmat experiment run vision-small --data DATA --lora --cache CACHE
python -m benchmarks.evidence --cache CACHE        # then: python -m benchmarks.table
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from actmat_experiments.harness.report import latest
from actmat_experiments.harness.results import Regime, Score, read_scores
from actmat_experiments.harness.table import markdown_table, summarize
from actmat_experiments.reasoning.passk import at, at_k_markdown
from benchmarks.common import RESULTS
from benchmarks.evidence.group import is_known, made_by

FOLDER = RESULTS / "small"
SMALL = ("vision-small", "language-small", "reasoning-small")


def small_table(name: str, folder: Path = FOLDER) -> str:
    """One of the tables, in Markdown: `SUITE_full`, `SUITE_lora`, and `reasoning-small_at-k`."""
    suite, what = name.split("_")
    scores = read_scores(folder / f"{suite}.jsonl")
    regime: Regime = "lora" if what == "lora" else "full"
    own = [s for s in latest(scores, _model(suite), regime)[0] if s.method.startswith("expert ") or is_known(s.method)]
    if not own:
        return "*Not run yet.*\n"
    if what == "at-k":
        text = _at_k(own)
    else:
        text = markdown_table(
            summarize([s for s in own if not s.method.startswith("expert ")], _tasks(own)), _tasks(own)
        )
    return f"{text}\nSeed {made_by(own)}. Source: `evidence/results/small/{suite}.jsonl`.\n"


def _model(suite: str) -> str:
    return "float32" if suite == "reasoning-small" else ""


def _tasks(scores: Sequence[Score]) -> list[str]:
    """Tasks in their order; of answers that were drawn several times, at one answer."""
    tasks = list(dict.fromkeys(s.task for s in scores))
    return [t for t in tasks if "@" not in t or t.endswith("@1")]


def _at_k(scores: Sequence[Score]) -> str:
    columns = [(t, t) for t in dict.fromkeys(s.task for s in scores)]
    names = [t.partition("@")[0] for t in _tasks(scores)]
    lines = summarize(scores, [at(t, 1) for t in names])
    merged = dict.fromkeys(line.method for line in lines if line.scale == "default")
    experts = [f"expert {t}" for t in names]
    order = ["base", *experts, *(m for m in merged if m != "base" and m not in experts)]
    return at_k_markdown([s for s in scores if s.scale == "default"], columns, order)
