"""The study on prepared experts: every variant on every subset within a half, and what is written.

Below the cache: `study/<suite>.json` with seeds, halves, comparisons by regime and all points, `study/<suite>.md` with
the comparisons as tables.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from actmat_experiments.harness.results import Regime
from actmat_experiments.harness.study import Half, Point, compare_variants, halves, markdown_study, subsets_within

__all__ = ["Answers", "Subject", "run_study"]

Answers = Mapping[str, Mapping[str, Sequence[float]]]
"""Part ("validation", "test") -> task -> right and all answers."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Experts of one regime and seed, ready to be merged in subsets.

    Args:
        regime, seed: of the experts.
        tasks: names, in the order of the merge.
        own: what every expert answers of its own task.
        merged: subset of the tasks -> variant -> what its merge answers of these tasks, at the variant's own scale.
    """

    regime: Regime
    seed: int
    tasks: tuple[str, ...]
    own: Answers
    merged: Callable[[tuple[str, ...]], Mapping[str, Answers]]

    def points(self, cuts: Sequence[Half]) -> list[Point]:
        """All variants on every subset within a half."""
        return [
            Point(self.regime, self.seed, subset, variant, *self._of_experts(answers))
            for subset in subsets_within(cuts)
            for variant, answers in self.merged(subset).items()
        ]

    def _of_experts(self, answers: Answers) -> tuple[float, float]:
        """Validation and test: mean over tasks of the share divided by the expert's share."""

        def mean(part: str) -> float:
            own, found = self.own[part], answers[part]
            return sum((found[t][0] / found[t][1]) / (own[t][0] / own[t][1]) for t in found) / len(found)

        return mean("validation"), mean("test")


def run_study(suite: str, cache: Path, subjects: Iterable[Subject], splits: int, family: Sequence[str]) -> str:
    """Points of all subjects, compared per regime, written below the cache.

    Args:
        subjects: all of the same tasks; each is made when its turn comes.
        family: names of the variants that may be chosen; the others are what they are held against.

    Returns:
        The tables, in Markdown.
    """
    points: list[Point] = []
    cuts: list[Half] = []
    seeds: list[int] = []
    for subject in subjects:
        cuts = halves(subject.tasks, splits)
        points += subject.points(cuts)
        seeds += [] if subject.seed in seeds else [subject.seed]
    regimes = list(dict.fromkeys(p.regime for p in points))
    found = {r: compare_variants([p for p in points if p.regime == r], cuts, choose_among=family) for r in regimes}
    text = "".join(f"**{regime}**\n\n{markdown_study(rows)}\n" for regime, rows in found.items())
    folder = cache / "study"
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "seeds": seeds,
        "halves": [asdict(cut) for cut in cuts],
        "comparisons": {regime: [c.to_json() for c in rows] for regime, rows in found.items()},
        "points": [asdict(p) for p in points],
    }
    (folder / f"{suite}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    (folder / f"{suite}.md").write_text(text, encoding="utf-8")
    return text
