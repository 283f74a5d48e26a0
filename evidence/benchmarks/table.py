"""Fill the parts of the pages that follow from result files.

    python -m benchmarks.table             # writes the pages anew
    python -m benchmarks.table --check     # exit status 1 when one is not what the result files say

Kinds of parts: `result NAME` (the rows of `results/NAME.json`), `scores NAME` and `small NAME` (experiments on
pretrained models and at laptop size), `gpu PART`, `matrix PART`, `semantics PART`,
`mergekit`, `tools PART`, `demo`, `chaos`; and from the code of a suite `settings SUITE`. The marks are in
`benchmarks/pages.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import inspect
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from actmat.report.words import plural
from benchmarks.common import RESULTS, cell, markdown, read_lines, read_result, title
from benchmarks.evidence.choice import measured_table
from benchmarks.evidence.picture import picture
from benchmarks.evidence.small import small_table
from benchmarks.evidence.tables import evidence_table
from benchmarks.families.tables import family_table
from benchmarks.gpu.rows import NAMES
from benchmarks.mergekit.tables import mergekit_table
from benchmarks.pages import Kinds, filled, pages, table
from benchmarks.provenance import REPOSITORY
from benchmarks.semantics.tables import semantics_table
from benchmarks.tools.tables import tools_table


def result(name: str, folder: Path | None = None) -> str:
    """The table of one result file, under a line that says how and where it was made."""
    measured = read_result(name, folder)
    columns = list(measured.get("columns") or measured["rows"][0])
    if name == "floor":  # the ratios of another machine beside those of this one
        other = {tuple(map(r.get, columns[:5])): r["times_floor"] for r in read_result("floor-second")["rows"]}
        measured["rows"] = [r | {"elsewhere": other.get(tuple(map(r.get, columns[:5])))} for r in measured["rows"]]
        columns.insert(columns.index("times_floor") + 1, "elsewhere")
    return f"{made_by(measured)}.\n\n{markdown(measured['rows'], columns)}\n"


def made_by(measured: dict[str, Any]) -> str:
    """Command, machine and date of a result file."""
    facts = {"command": "{}", "processor": "{}", "cores": "{} cores", "torch": "torch {}", "date": "{}"}
    stated = measured | {"command": command_of(measured["command"])}
    return ", ".join(text.format(stated[fact]) for fact, text in facts.items() if fact in stated)


CLOSED = "318a946b"
"""The last commit that has the programs of closed studies."""


def command_of(text: str) -> str:
    """A command as code; of a program that went when its question was answered, with a commit that has it."""
    program = re.search(r"benchmarks[.\w]+", text)
    is_there = program is None or importlib.util.find_spec(program[0]) is not None
    return f"`{text}`" + f" of commit `{CLOSED}`" * (not is_there)


def gpu(part: str) -> str:
    """Rates, layers or merges of `benchmarks.gpu`; layers and merges also of an earlier run, on another card."""
    runs = {card: read_result(f"gpu{end}") for card, end in (("H200", ""), ("H100", "-h100"))}
    rows = {
        card: {tuple(map(r.get, NAMES)): r for p in run["rows"] if part[:-1] in p["part"] for r in p["rows"]}
        for card, run in runs.items()
    }
    now, before = rows.values()
    if part == "inputs":
        stages = [f"{stage}_s" for stage in ("loading", "measuring", "asking", "merging", "running")]
        columns = ["what", "wall_s", *stages, "device_peak_b", "host_peak_b"]
        return f"{made_by(runs['H200'])}.\n\n{markdown(list(now.values()), columns)}\n"
    if part == "rates":
        return table(["rate", "value"], [[title(r["fact"]), cell("", r["value"])] for r in now.values()])
    whole = dict.fromkeys(name for name in (*now, *before) if "inputs made" not in name)
    time = "wall_s" if part == "merges" else "times_products"
    joined = [
        before.get(name, {})
        | now.get(name, {})
        | {f"{card}_{time}": rows[card].get(name, {}).get(time) for card in rows}
        for name in whole
    ]
    sources = [
        f"{card}: {made_by(run)}" + "".join(f"; {p['part']}: {p['ended']}" for p in run["rows"] if p["ended"])
        for card, run in runs.items()
    ]
    columns = ["size", "what"] if part == "merges" else ["model", "shape", "method", "matrix_s"]
    columns += [
        *(f"{card}_{time}" for card in rows),
        *(["device_peak_b", "planned_b"] if part == "merges" else ["peak_b"]),
    ]
    return f"{'. '.join(sources)}.\n\n{markdown(joined, [*columns, 'difference'])}\n"


def chaos(_: str) -> str:
    """Runs per kind of fault and per sort of output, as `python -m chaos --record` wrote them."""
    record = read_result("chaos")
    kinds: Counter[str] = Counter()
    for counts in record["by"].values():
        kinds.update(counts)
    summary = f"{record['runs']} runs with {record['disturbances']} disturbances, {len(record['problems'])} problems."
    by_kind = ", ".join(f"{kind} {runs}" for kind, runs in sorted(kinds.items()))
    rows = [[sort, str(sum(counts.values()))] for sort, counts in record["by"].items()]
    return f"{summary} Runs by kind of disturbance: {by_kind}.\n\n" + table(["output", "runs"], rows)


def demo(_: str) -> str:
    """Mean test accuracy of base, average, all other merges (lowest to highest) and experts of `actmat demo`."""
    run = read_result("demo")
    rows = {row["name"]: row["average"] for row in run["rows"]}
    base, average, experts = (f"{100 * rows[name]:.1f}" for name in ("base", "average", "experts"))
    others = [100 * rows[row["name"]] for row in run["rows"] if row["kind"] == "merged"]
    half = max(row["half"] for row in run["rows"] if row["name"] != "majority")
    titles = ["base", "`average`", f"all {len(others)} merges", "each expert on its own task"]
    cells = [base, average, f"{min(others):.1f} to {max(others):.1f}", experts]
    tested = f"{len(run['rows'][0]['tasks'])} tasks, {run['settings']['n_test']} images, seed {run['seed']}"
    return table(titles, [cells]) + f"\nAccuracy in %, mean of {tested}; 95 % intervals: ±{100 * half:.1f} or less.\n"


SETS = {
    "adapters": ("three adapters of SmolLM2-135M", "average"),
    "whole-texts": ("two of its adapters, trained on whole texts", "ct_merging"),
    "encoder-full": ("five full models of MiniLM", "dc_merge"),
    "encoder-adapters": ("five adapters of MiniLM", "dc_merge"),
    "digits": ("six full models of digits", "dc_merge"),
    "images-full": ("seven full models of ViT-S/14", "dc_merge"),
    "images-adapters": ("seven adapters of ViT-S/14", "ct_merging"),
    "decoder-full": ("eight full models of SmolLM2-135M", "actmat_ridge"),
    "answers": ("eight adapters of Qwen2.5-Coder-0.5B, trained on answers", "ct_merging"),
    "whole": ("eight adapters of Qwen2.5-Coder-0.5B, trained on whole texts", "ct_merging"),
}
"""Subject of `benchmarks.few`, or key of `SCORES` -> name, and what `auto` takes without inputs."""
SCORES: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "encoder-adapters": ("regimes-text-minilm", "alpha = 32, 256 steps at 0.00025", (0,)),
    "images-full": ("inputs-vision-vits14", "ViT-S/14", (0, 1)),
    "images-adapters": ("inputs-vision-vits14", "r = 16", (0, 1)),
    "decoder-full": ("inputs-llm-tasks", "", (0, 1)),
    "answers": ("larger-llm-qwen", "loss on answers", (0, 1)),
    "whole": ("larger-llm-qwen", "loss on whole texts", (0, 1)),
}
"""File of scores, end of the model's name and seeds, of what `benchmarks.few` did not measure."""


def few(subject: str) -> str:
    """Accuracy and answers kept by kind and number of inputs, means over tasks and draws, as `benchmarks.few` wrote."""
    rows = [r for r in read_lines(RESULTS / "few.jsonl") if r["subject"] == subject]
    kinds = {
        ("average", 0.0, 0.0): "average, no inputs",
        ("actmat", 0.0, 0.0): "`actmat`, no inputs",
        ("own", 0.0, 0.0): "`regmean`, own inputs",
        ("own", 1.0, 0.0): "with a prior of 1 / n",
        ("own", 4.0, 0.0): "with a prior of 4 / n",
        ("own", 0.0, 0.001): "with a ridge of 0.001",
        ("own", 1.0, 0.001): "with a prior of 1 / n and the ridge",
        ("own", 4.0, 0.001): "with a prior of 4 / n and the ridge: `merge --data`",
        ("featcal", 0.0, 0.05): "FeatCal, own inputs",
        ("self", 4.0, 0.001): "`merge --data self`, prompts that the experts wrote",
        ("reworded", 0.0, 0.0): "`regmean`, own inputs in other words than in training",
        ("reworded", 4.0, 0.001): "`merge --data`, the same",
        ("other", 0.0, 0.0): "`regmean`, another task's inputs",
        ("other", 4.0, 0.001): "`merge --data`, the same",
        ("mixed", 0.0, 0.0): "`regmean`, inputs of all tasks",
        ("mixed", 4.0, 0.001): "`merge --data`, the same",
        ("random", 0.0, 0.0): "`regmean`, random inputs",
        ("random", 4.0, 0.001): "`merge --data`, random inputs",
    }
    numbers = sorted({r["n"] for r in rows} - {0})
    lines = []
    for kind, name in kinds.items():
        own = [r for r in rows if (r["kind"], r["prior"], r["ridge"]) == kind]
        cells = {n: _percents([r for r in own if r["n"] == n]) for n in (0, *numbers)}
        shown = [cells[0]] * len(numbers) if cells[0] else [cells[n] for n in numbers]
        lines += [[name, *shown]] if own else []
    by_n = {n: 1 + max(r["draw"] for r in rows if r["n"] == n and r["kind"] in ("own", "self")) for n in numbers}
    machine = sorted({f"{r['processor']}, {r['date']}" for r in rows})
    said = f"Accuracy (answers kept) in %, means of {plural(len(rows[0]['tasks']), 'task')} and of draws"
    said += f" ({', '.join(f'n = {n}: {k}' for n, k in by_n.items())})"
    header = ["inputs of each expert", *map(str, numbers)]
    command = command_of(f"python -m benchmarks.few {subject}")
    return f"{table(header, lines)}\n{said}; {command}, {'; '.join(machine)}.\n"


LIKE_DATA = "ridge=0.05:prior=0.5"
"""Of regressions toward another merge: the prior of `merge --data` for eight inputs."""


def sets(form: str) -> str:
    """Accuracy of merges with eight inputs of each expert, and without, on every set where both were measured.

    In the form "brief" with the best merge without inputs of each set.
    """
    columns: dict[str, tuple[str, float, str, tuple[str, ...]]] = {
        # kind, ridge and start of the regression in `few.jsonl`; rows of a suite
        "average": ("average", 0.0, "", ("average",)),
        **{f"`{name}`": (name, 0.0, "", (name,)) for name in ("ct_merging", "dc_merge", "tsv", "auto")},
        "`merge --data`": ("own", 0.001, "", ("regmean:data=training", "regmean:data=8")),
        "toward `ct_merging`": ("own", 0.05, "ct_merging", (f"regmean:training:toward=ct_merging:{LIKE_DATA}",)),
        "toward `dc_merge`": ("own", 0.05, "dc_merge", ()),
    }
    few = [r for r in read_lines(RESULTS / "few.jsonl") if r["n"] == 0 or (r["n"] == 8 and r["prior"] == 4.0)]
    lines = []
    for subject, (name, auto) in SETS.items():
        by_few = [r for r in few if r["subject"] == subject]
        file, model, seeds = SCORES.get(subject, ("", "", ()))
        scores = read_lines(RESULTS / "evidence" / f"{file}.jsonl") if file else []
        scores = [r for r in scores if r["model"].endswith(model) and r["seed"] in seeds and r["scale"] == "default"]
        cells = []
        for kind, ridge, start, methods in columns.values():
            key = (auto if kind == "auto" else kind, ridge, start)
            matching = [r for r in by_few if (r["kind"], r["ridge"], r.get("toward", "")) == key]
            some = [r for r in scores if r["method"] in ((auto,) if kind == "auto" else methods)]
            mean = f"{100 * sum(r['correct'] / r['total'] for r in some) / len(some):.1f}" if some else ""
            cells.append(_accuracy(matching) or mean)
        lines.append([name, *cells])
    if form != "brief":
        return table(["experts", *columns], lines)
    times = read_result("inputs")
    took = next(f"{row['wall_s']:.0f} s on {times['cores']} cores" for row in times["rows"] if row["prompts"] == 8)
    brief = [[name, some[0], some[4], max(some[:5], key=float), some[5]] for name, *some in lines]
    note = f"In %. *Best*: of these two, `ct_merging`, `dc_merge` and `tsv`, in hindsight. The first merge took {took}."
    return table(["experts", "average", "`auto`", "best", "`merge --data`"], brief) + f"\n{note}\n"


def _by(prompts: str, number: int) -> str:
    """Row of the suite `llm-qwen` that is `merge --data` by so many prompts."""
    return f"regmean:{prompts}:number={number}:ridge=0.001:prior={4 / number:g}"


PROMPTS = {
    "none: average": ("average", "average", 0),
    "none: `auto`": ("auto", "average", 0),
    "8 of the user": (_by("training", 8), "own", 8),
    "8 written": (_by("self", 8), "self", 8),
    "32 written": (_by("self", 32), "self", 32),
    "4 of each": (_by("mixed", 8), "", 8),
    "8 random": (_by("random", 8), "random", 8),
    "each expert": ("experts", "", 0),
}
"""Origin of the prompts of each expert -> row of `self-llm-qwen.jsonl`; kind and number of inputs in `few.jsonl`."""


def written(_: str) -> str:
    """Accuracy of merges by prompts of several origins, a line for each training of adapters."""
    few = [r for r in read_lines(RESULTS / "few.jsonl") if r["subject"] == "adapters"]
    few = [r for r in few if r["n"] == 0 or (r["prior"], r["ridge"], r.get("toward")) == (4.0, 0.001, None)]
    by_few = ([r for r in few if (r["kind"], r["n"]) == (kind, n)] for _, kind, n in PROMPTS.values())
    lines = [["SmolLM2-135M, 3 tasks, answers, adapters from elsewhere", "", *map(_accuracy, by_few)]]
    trainings: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in read_lines(RESULTS / "evidence" / "self-llm-qwen.jsonl"):
        weights = row["detail"]["training"]["weights"]
        base, learnt = row["model"].partition("-Instruct")[0], row["model"].partition("loss on ")[2].partition(",")[0]
        trainings.setdefault((base, learnt, row["seed"], row["settings"], weights), []).append(row)
    by_size = sorted(trainings.items(), key=lambda item: (*item[0][:2], len({r["task"] for r in item[1]}), item[0][2]))
    for (base, learnt, seed, *_), rows in by_size:
        gains = [gain for r in rows for gain in r["detail"].get("gains", {}).values()]
        n_tasks = len({r["task"] for r in rows})
        cells = []
        for method, _, _ in PROMPTS.values():
            of_row = [r for r in rows if r["method"] == method]
            asked = [[r for r in of_row if r["model"].endswith(" other words") == other] for other in (False, True)]
            shares = [100 * sum(r["correct"] for r in some) / sum(r["total"] for r in some) for some in asked if some]
            cells.append("{:.1f} ({:.1f})".format(*shares) if shares else "")
        name = f"{base}, {n_tasks} tasks, {learnt}, seed {seed}"
        lines.append([name, f"{min(gains):.1f} to {max(gains):.1f}" if gains else "", *cells])
    return table(["adapters", "nats", *PROMPTS], lines)


def _accuracy(rows: list[dict[str, Any]]) -> str:
    return _percents(rows).partition(" ")[0]


def _percents(rows: list[dict[str, Any]]) -> str:
    """Mean accuracy and mean share of answers kept, over tasks and draws."""
    means = ([sum(r[key]) / len(r[key]) for r in rows] for key in ("accuracy", "kept"))
    return "{:.1f} ({:.1f})".format(*(100 * sum(m) / len(m) for m in means)) if rows else ""


def settings(name: str) -> str:
    """Settings of a suite, from its dataclass and the docstrings of it: `vision_small` is `vision/small.py`."""
    module = importlib.import_module("actmat_experiments." + name.replace("_", "."))
    (declared,) = [c for n, c in vars(module).items() if n.endswith("Settings") and c.__module__ == module.__name__]
    return table(["setting", "default", "meaning"], _settings(declared(), ""))


def _settings(value: Any, prefix: str) -> list[list[str]]:
    """A row per line below "Args:" of the dataclass and its parents; a field that is a dataclass has its own rows."""
    rows = []
    for kind in filter(dataclasses.is_dataclass, type(value).__mro__[::-1]):
        text = inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")[2]
        for line in filter(None, re.sub(r"\n {6,}", " ", text).splitlines()):  # a long line goes on, indented further
            names, _, meaning = line.strip().partition(": ")
            shown = {n: getattr(value, n) for n in names.split(", ")}
            if dataclasses.is_dataclass(inner := next(iter(shown.values()))):
                rows += _settings(inner, f"{prefix}{names}.")
            else:
                rows.append([", ".join(f"`{prefix}{n}`" for n in shown), ", ".join(f"`{v}`" for v in shown.values())])
                rows[-1].append(meaning)
    return rows


KINDS: Kinds = {
    "result": result,
    "few": few,
    "sets": sets,
    "written": written,
    "scores": evidence_table,
    "measured": measured_table,
    "small": small_table,
    "gpu": gpu,
    "matrix": family_table,
    "semantics": semantics_table,
    "mergekit": mergekit_table,
    "tools": tools_table,
    "demo": demo,
    "chaos": chaos,
    "settings": settings,
}
FILES = {REPOSITORY / "docs" / "merges.svg": picture}
"""Whole files that are made from results."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 when something is old")
    check = parser.parse_args().check
    stale = stale_files()
    for path, text in stale.items():
        print(f"{path.relative_to(REPOSITORY)}: {'old' if check else 'written'}")
        if not check:
            path.write_text(text, encoding="utf-8")
    sys.exit(bool(stale and check))


def stale_files() -> dict[Path, str]:
    """Pages and files that are not what the results say, with what they should be."""
    before = pages() | {path: path.read_text(encoding="utf-8") for path in FILES}
    made = {path: filled(text, KINDS) for path, text in before.items()} | {path: text() for path, text in FILES.items()}
    return {path: text for path, text in made.items() if text != before[path]}


if __name__ == "__main__":
    main()
