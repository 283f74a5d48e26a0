"""The tables of docs/tune-results.md from `results/tune.jsonl`.

Points are percentage points of test accuracy, the mean over a subject's tasks. An interval is Student's t at 95 % over
the subjects of a row: a subject is a suite, a regime and a seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean
from typing import Any, cast

from scipy.stats import spearmanr

from actmat.extras.tune.evaluate import Evaluator, Trial
from actmat.extras.tune.search import SearchBudget, choose, search
from actmat.extras.tune.space import DEFAULT_METHODS, TuneCandidate, make_space
from benchmarks.common import RESULTS, read_lines
from benchmarks.evidence.intervals import interval
from benchmarks.pages import table
from benchmarks.tune.choices import HEADER, choices, evidence_goal, evidence_rows

FILE = RESULTS / "tune.jsonl"
SUITES = {
    "digits": "digits, six tasks",
    "vision-small": "images, four tasks",
    "reasoning-small": "puzzles by reinforcement learning, three",
}
ALLOWED = 0.5
"""Points: the goal for the mean regret, and for being below the average."""

Row = Mapping[str, Any]
Pick = Callable[[Row], float]


def with_interval(values: Sequence[float]) -> str:
    """Mean and half the width of the 95 % interval.

    >>> with_interval([1.0, 2.0, 3.0])
    '2.0 ±2.5'
    """
    return interval({n: {"all": value} for n, value in enumerate(values)}).text()


def best(row: Row) -> float:
    """Test accuracy of the best candidate, the chosen one among them."""
    return max(row["chosen"]["test"], *(c["test"] for c in row["candidates"]))


def at(row: Row, method: str, scale: float = 1.0) -> float:
    """Test accuracy of one candidate."""
    return next(c["test"] for c in row["candidates"] if c["method"] == method and c["scale"] == scale)


def picked(row: Row, key: str, *, largest: bool = False) -> float:
    """Test accuracy of the candidate with the least (or largest) value."""
    chosen = (max if largest else min)(row["candidates"], key=lambda c: c[key])
    return float(chosen["test"])


def groups(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Suite and regime -> subjects, and all together."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"{SUITES[row['suite']]}, {row['regime']}", []).append(row)
    return {**found, "all": [row for some in found.values() for row in some]}


def points(rows: Sequence[Row], pick: Pick) -> str:
    """A cell, in points."""
    return with_interval([100 * pick(row) for row in rows])


def choice_rows(rows: Sequence[Row]) -> list[list[str]]:
    """What was chosen, and what it was worth."""
    out = []
    for name, some in groups(rows).items():
        worst = min(100 * (r["chosen"]["test"] - at(r, "average")) for r in some)
        out.append(
            [
                *(name, str(len(some)), points(some, lambda r: r["expert_test"])),
                *(points(some, lambda r: r["chosen"]["test"]), points(some, lambda r: best(r) - r["chosen"]["test"])),
                *(points(some, lambda r: r["chosen"]["test"] - at(r, "average")), f"{worst:+.1f}"),
                points(some, lambda r: r["chosen"]["test"] - at(r, "actmat")),
            ]
        )
    return out


def rival_rows(rows: Sequence[Row]) -> list[list[str]]:
    """The chosen merge against others that see data, and how well the divergence ranks candidates."""
    out = []
    for name, some in groups(rows).items():
        trained = [r for r in some if "adamerging_test" in r]
        own = points(trained, lambda r: r["chosen"]["test"] - r["adamerging_test"]) if trained else ""
        ranks = [
            -spearmanr([c["own_64"] for c in r["candidates"]], [c["test"] for c in r["candidates"]])[0] for r in some
        ]
        out.append(
            [
                *(name, str(len(some))),
                points(some, lambda r: r["chosen"]["test"] - picked(r, "validation", largest=True)),
                *(own, f"{mean(ranks):.2f} ({min(ranks):.2f})"),
                str(sum(r["chosen"]["verdict_on_average"] == "worse" for r in some)),
            ]
        )
    return out


def number_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Regret by the number of inputs, of the grid's candidates."""
    keys = [k for k in rows[0]["candidates"][0] if k.startswith("own_")] if rows else []
    return [
        [name, str(len(some)), *(points(some, lambda r, k=k: _grid_best(r) - picked(r, k)) for k in keys)]
        for name, some in groups(rows).items()
    ]


def wrong_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Regret, and distance from the average, with inputs of a wrong kind."""
    out = []
    for name, some in groups(rows).items():
        cells = []
        for key in ("own_64", "other_64", "noise_64"):
            cells.append(points(some, lambda r, k=key: _grid_best(r) - picked(r, k)))
            cells.append(f"{min(100 * (picked(r, key) - at(r, 'average')) for r in some):+.1f}")
        out.append([name, str(len(some)), *cells])
    return out


class _Recorded:
    """Losses of a subject's candidates that are on record, in place of an evaluator; refined scales have none."""

    def __init__(self, row: Row) -> None:
        self.candidates = {(c["method"], c["scale"]): c for c in row["candidates"]}
        self.tried = 0

    def trial(self, candidate: TuneCandidate) -> Trial:
        """The loss on 64 inputs."""
        found = self.candidates.get((candidate.merge.method, candidate.scale))
        self.tried += found is not None
        return Trial(candidate, {"all": found["own_64"] if found else math.inf}, {"all": 1.0})


def replayed(row: Row, methods: Sequence[str] = ()) -> tuple[float, int]:
    """Test accuracy of the candidate that the search chooses, and the number of its trials."""
    recorded = _Recorded(row)
    known = dict.fromkeys(method for method, _ in recorded.candidates)
    space = make_space(
        {
            "methods": [m for m in methods or known if m in known],
            "scales": sorted({scale for _, scale in recorded.candidates}),
        }
    )
    chosen, _ = choose(search(space, space.merges, cast(Evaluator, recorded), SearchBudget()))
    key = (chosen.candidate.merge.method, chosen.candidate.scale)
    return float(recorded.candidates[key]["test"]), recorded.tried


def replay_lines(rows: Sequence[Row]) -> str:
    """How the search, without refined scales, compares with all candidates: by all methods, and by the usual five."""
    whole = mean(100 * (best(r) - picked(r, "own_64")) for r in rows)
    lines = [f"* All candidates: regret {whole:.2f} points in {mean(len(r['candidates']) for r in rows):.0f} trials."]
    for name, methods in (("The search among all methods", ()), ("The search among the usual five", DEFAULT_METHODS)):
        found = [(*replayed(r, methods), r) for r in rows]
        regret, tried = mean(100 * (best(r) - test) for test, _, r in found), mean(tried for _, tried, _ in found)
        lines.append(f"* {name}: regret {regret:.2f} points in {tried:.0f} trials.")
    return "\n".join(lines) + "\n"


def _grid_best(row: Row) -> float:
    return max(float(c["test"]) for c in row["candidates"])


def goal_lines(rows: Sequence[Row]) -> str:
    """The goal and where it fails, in words."""
    regret = mean(100 * (best(r) - r["chosen"]["test"]) for r in rows)
    below = [(r, 100 * (r["chosen"]["test"] - at(r, "average"))) for r in rows]
    failed = [f"`{r['subject']}` ({d:+.1f}: {r['chosen']['candidate']})" for r, d in below if d < -ALLOWED]
    over = {
        name: value
        for name, some in groups(rows).items()
        if (value := mean(100 * (best(r) - r["chosen"]["test"]) for r in some)) > ALLOWED and name != "all"
    }
    met = "met" if regret <= ALLOWED else "**missed**"
    above = f" Above it: {', '.join(f'{n} ({v:.1f})' for n, v in over.items())}." if over else ""
    lowest = f"met, {min(d for _, d in below):+.1f} at worst."
    missed = f"**missed** in {len(failed)} of {len(rows)}: {', '.join(failed)}."
    lines = [
        f"* Mean regret at most {ALLOWED} points: {met} on these {len(rows)} subjects, {regret:.2f}.{above}",
        f"* Never more than {ALLOWED} points below the average: {missed if failed else lowest}",
    ]
    return "\n".join(lines) + "\n"


def short_table(rows: Sequence[Row]) -> str:
    """What the summary says of the search, in points."""
    some = choices()
    gains = [c.over("average") for c in some]
    more = [c for c in some if c.with_data is not None]
    worst = min(100 * (picked(r, "other_64") - at(r, "average")) for r in rows)
    found = {
        "pretrained models: sets of experts": str(len(some)),
        "the choice below the best candidate, on average": f"{mean(c.regret for c in some):.1f}",
        "the choice above the average of the experts, on average": f"{mean(gains):.0f}",
        "the same in the worst set": f"{min(gains):+.1f}",
        "with `regmean` a candidate: below the best": f"{mean(c.lost_with_data for c in more):.1f}",
        "with `regmean` a candidate: above the average": f"{mean(c.over('average', c.with_data) for c in more):.0f}",
        "small models: sets of experts": str(len(rows)),
        "by 8 inputs per expert: below the best": points(rows, lambda r: _grid_best(r) - picked(r, "own_8")),
        "by 64 inputs": points(rows, lambda r: _grid_best(r) - picked(r, "own_64")),
        "by 64 inputs of another task": points(rows, lambda r: _grid_best(r) - picked(r, "other_64")),
        "the worst of these, above the average": f"{worst:+.0f}",
    }
    return table(["measured", "value"], [[what, value] for what, value in found.items()])


TABLES: dict[str, tuple[list[str], Callable[[Sequence[Row]], list[list[str]]]]] = {
    "choice": (
        ["experts", "n", "experts' own", "chosen", "regret", "over average", "at worst", "over `actmat`"],
        choice_rows,
    ),
    "rivals": (
        ["experts", "n", "over labels", "over AdaMerging", "rank correlation (least)", "significantly better"],
        rival_rows,
    ),
    "numbers": (["experts", "n", "8", "16", "32", "64", "128", "256"], number_rows),
    "wrong": (
        ["experts", "n", "own", "at worst", "another task's", "at worst", "noise", "at worst"],
        wrong_rows,
    ),
}


def tune_table(name: str) -> str:
    """One of `TABLES`, the `goal`, the `replay`, the choice among the merges of the evidence, or the `short` table."""
    if name.startswith("evidence"):
        return evidence_goal() if name == "evidence-goal" else table(HEADER, evidence_rows())
    rows = read_lines(FILE)
    if name in (plain := {"goal": goal_lines, "replay": replay_lines, "short": short_table}):
        return plain[name](rows)
    header, made = TABLES[name]
    machines = sorted({f"{r['machine']}, {r['date']}" for r in rows})
    return table(header, made(rows)) + f"\n{'; '.join(machines)}.\n"
