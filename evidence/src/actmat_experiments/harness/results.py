"""Scores of one experiment: one line of JSON per model, task and seed.

    {"suite": ..., "model": ..., "regime": ..., "method": ..., "scale": ..., "task": ..., "seed": ...,
     "correct": ..., "total": ..., "settings": ..., "detail": {...}}

`settings` stands for everything else that decided the number (schedules, sizes, data): scores are only put into one
table when it is equal. A later line replaces an earlier one with the same identity.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from actmat.errors import CheckpointError

Regime = Literal["full", "lora"]
REGIMES: tuple[Regime, ...] = ("full", "lora")
ScaleKind = Literal["default", "tuned"]
Part = Literal["train", "validation"]
"""Part of a task that statistics may be measured on."""

REFERENCES = ("majority", "base", "experts")
"""Rows that are no merge: the most frequent answer, the base, and every task by its own expert."""


@dataclass(frozen=True, slots=True)
class Score:
    """Score of one model on one task.

    Args:
        method: row of the table: a method, a variant, or one of `REFERENCES`.
        scale: "default": nothing was chosen; "tuned": the scale was chosen on validation data.
        correct: right answers; a fraction where a metric averages over samples.
        model: architecture, such as "ViT-B/32"; empty where a suite has one.
        settings: digest of everything else that decided the number.
        detail: further facts: the chosen scale, options, ...
    """

    suite: str
    regime: Regime
    method: str
    scale: ScaleKind
    task: str
    seed: int
    correct: float
    total: int
    model: str = ""
    settings: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """`correct / total`."""
        return self.correct / self.total

    @property
    def identity(self) -> tuple[str, ...]:
        """Fields that a later score must share to replace this one; experts that were trained again are others."""
        return (
            *(self.suite, self.model, self.regime, self.method, self.scale, self.task),
            *(str(self.seed), self.settings, self.detail.get("training", {}).get("weights", "")),
        )


def append_scores(path: Path, scores: Iterable[Score]) -> None:
    """Add lines to a file, which is made if need be; in one write, since several processes may share a cache."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(asdict(s), sort_keys=True) + "\n" for s in scores)
    with path.open("ab", buffering=0) as file:
        file.write(text.encode())


def read_scores(path: Path) -> list[Score]:
    """All scores of a file, the latest of each identity, in the order of their first appearance.

    An incomplete last line (an interrupted write) is ignored.

    Raises:
        CheckpointError: a line is no score; names the file and all such lines.
    """
    found: dict[tuple[str, ...], Score] = {}
    problems = []
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    lines = text.split("\n")[:-1]
    for number, line in enumerate(lines, start=1):
        try:
            score = Score(**json.loads(line))
            found[score.identity] = score
        except (TypeError, ValueError) as error:
            problems.append(f"{path}:{number}: not a score: {error}")
    if problems:
        raise CheckpointError(f"{path} has lines that are not scores. Fix: remove them or the file.", problems)
    return list(found.values())


def majority_share(train: Sequence[Any], test: Sequence[Any]) -> tuple[int, int]:
    """Right and all answers when every test item gets the most frequent training answer (the smallest of equals)."""
    values = sorted(set(train))
    most = max(values, key=lambda v: sum(1 for t in train if t == v))
    return sum(1 for t in test if t == most), len(test)
