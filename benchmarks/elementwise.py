"""Elementwise merges of a Llama checkpoint: actmat against mergekit, both from files to files.

    python -m benchmarks.elementwise                                            # 1.1 B, average and task arithmetic
    python -m benchmarks.elementwise --hidden 1024 --intermediate 2816 --layers 18 --methods average ties

mergekit lives in an environment of its own, made with pip on first use (`--mergekit-python` names another one). The
tools run in turn, `--repeats` times each; times are medians of whole processes, start-up included, inputs in the page
cache as far as memory allows. mergekit computes in the dtype of its recipe, so it runs twice: bfloat16 (its usual
setting) and float32 (what actmat computes in). `durable` adds the time until the output is on the disk, which mergekit
leaves to the kernel. `floor` is reading every input once and writing the output once, synced.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from benchmarks import common
from benchmarks.common import WORK, finish, fresh, measure, merge_words, merged, program, relative_error
from benchmarks.make_llama import add_size_arguments, home, make_family, size_from

MERGEKIT = "mergekit==0.1.5"
COLUMNS = ("method", "tool", "wall_s", "durable_s", "peak_anonymous_b", "times_floor", "largest_difference")


@dataclass(frozen=True)
class Rule:
    """One merge, said to both tools.

    Args:
        mergekit: `merge_method` of mergekit.
        options: of `actmat merge --method NAME`.
        method: NAME, where it is not the key in `RULES`.
        per_model: mergekit's parameters of every expert.
        overall: mergekit's parameters of the merge.
        with_base: whether mergekit's rule takes a base model.
        deterministic: whether both tools must give the same numbers.
    """

    mergekit: str
    options: dict[str, Any] = field(default_factory=dict)
    method: str = ""
    per_model: dict[str, Any] = field(default_factory=dict)
    overall: dict[str, Any] = field(default_factory=dict)
    with_base: bool = True
    deterministic: bool = True


RULES: dict[str, Rule] = {
    "average": Rule("linear", per_model={"weight": 1.0}, overall={"normalize": True}, with_base=False),
    "task_arithmetic": Rule(
        "task_arithmetic", {"scaling": 0.4}, per_model={"weight": 0.4}, overall={"normalize": False},
    ),
    "ties": Rule(
        "ties", {"density": 0.2, "trim": "tensor", "variant": "mergekit"},
        per_model={"weight": 1.0, "density": 0.2}, overall={"normalize": True},
    ),
    "breadcrumbs": Rule(
        "breadcrumbs", {"density": 0.9, "gamma": 0.01, "scaling": 1.0},
        per_model={"weight": 1.0, "density": 0.9, "gamma": 0.01}, overall={"normalize": False},
    ),
    "dare": Rule(
        "dare_linear", {"density": 0.1, "rule": "task_arithmetic", "scaling": 0.4},
        per_model={"weight": 0.4, "density": 0.1}, overall={"normalize": False}, deterministic=False,
    ),
    "dare_ties": Rule(
        "dare_ties", {"density": 0.1, "rule": "ties"}, "dare",
        per_model={"weight": 1.0, "density": 0.1}, overall={"normalize": True}, deterministic=False,
    ),
    "model_stock": Rule("model_stock", {"filter_wise": "false"}, overall={"filter_wise": False}),
    "karcher": Rule("karcher", {"max_iter": 10}, overall={"max_iter": 10, "tol": 1e-5}, with_base=False),
}  # fmt: skip


def mergekit_python(given: Path | None) -> Path:
    """Interpreter of an environment that holds mergekit; made once under `work/mergekit` unless one is given."""
    if given is not None:
        return given
    python = WORK / "mergekit" / "bin" / "python"
    if not python.exists():
        print(f"installing {MERGEKIT} into {WORK / 'mergekit'}")
        torch_version = torch.__version__.partition("+")[0]
        subprocess.run([sys.executable, "-m", "venv", WORK / "mergekit"], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", f"torch=={torch_version}", MERGEKIT], check=True)
    return python


def mergekit_recipe(rule: Rule, base: Path, experts: Sequence[Path], compute: str, out: str) -> dict[str, Any]:
    """mergekit's configuration (JSON is YAML)."""
    models: list[dict[str, Any]] = [{"model": str(e), "parameters": rule.per_model} for e in experts]
    recipe: dict[str, Any] = {"merge_method": rule.mergekit, "models": models, "dtype": compute, "out_dtype": out}
    if rule.with_base:
        recipe["base_model"] = str(base)
    if rule.overall:
        recipe["parameters"] = rule.overall
    return recipe


def largest_difference(ours: Path, theirs: Path) -> float:
    """`max over tensors of ||a - b||_F / ||b||_F` of two checkpoints, in float64.

    Raises:
        RuntimeError: they do not hold the same tensors.
    """
    here, there = _places(ours), _places(theirs)
    if here.keys() != there.keys():
        raise RuntimeError(f"{ours} and {theirs} hold different tensors: {sorted(here.keys() ^ there.keys())[:5]}")
    worst = 0.0
    for name, file in here.items():
        with safe_open(file, "pt") as a_file, safe_open(there[name], "pt") as b_file:
            worst = max(worst, relative_error(a_file.get_tensor(name), b_file.get_tensor(name)))
    return worst


def _places(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= dict.fromkeys(opened.keys(), file)
    return found


def benchmark(name: str, base: Path, experts: Sequence[Path], python: Path, given: argparse.Namespace) -> list[dict]:
    """Rows of one method."""
    rule = RULES[name]
    peers = [f"mergekit-{compute}" for compute in given.compute]
    outputs = {tool: WORK / "out" / f"{name}-{tool}" for tool in ("actmat", *peers)}
    options = [word for option, value in rule.options.items() for word in ("--option", f"{option}={value}")]
    words = merge_words(base, experts, rule.method or name, "--scope", "all", "--dtype", given.dtype, *options)

    def mergekit(tool: str) -> Any:
        out, compute = fresh(outputs[tool]), tool.removeprefix("mergekit-")
        recipe = out.with_suffix(".yaml")
        recipe.write_text(json.dumps(mergekit_recipe(rule, base, experts, compute, given.dtype)))
        return measure([python, "-m", "mergekit.scripts.run_yaml", recipe, out, "--quiet"], out)

    found = common.alternate(
        {"actmat": lambda: merged(words, outputs["actmat"], durable=True), **{p: partial(mergekit, p) for p in peers}},
        given.repeats,
    )
    inputs = [f for folder in (base, *experts) for f in sorted(folder.glob("*.safetensors"))]
    written = sum(f.stat().st_size for f in outputs["actmat"].glob("*.safetensors"))
    floor = common.floor_seconds(inputs, written, WORK)
    rows: list[dict[str, Any]] = []
    for tool, runs in found.items():
        row = {"method": name, "tool": tool, **common.summary(runs)}
        row["times_floor"] = row["durable_s"] / floor
        if tool != "actmat" and rule.deterministic:
            row["largest_difference"] = largest_difference(outputs["actmat"], outputs[tool])
        rows.append(row)
    rows.append({"method": name, "tool": "floor", "durable_s": floor, "times_floor": 1.0})
    return rows


def main() -> None:
    parser = program(__doc__, "elementwise", 3)
    parser.add_argument("--methods", nargs="+", choices=sorted(RULES), default=["average", "task_arithmetic"])
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of inputs and output")
    parser.add_argument(
        "--compute", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"], help="of mergekit"
    )
    parser.add_argument("--mergekit-python", type=Path, help="interpreter of an environment that holds mergekit")
    add_size_arguments(parser)
    given = parser.parse_args()
    python = mergekit_python(given.mergekit_python)
    size = size_from(given)
    parameters = size.parameters()
    base, experts = make_family(home(WORK, size, given.dtype), size, given.experts, dtype=given.dtype)
    rows = [row for name in given.methods for row in benchmark(name, base, experts, python, given)]
    for row in rows:
        row["parameters"] = parameters
    finish(given.name, rows, COLUMNS, parameters=parameters, experts=given.experts)


if __name__ == "__main__":
    main()
