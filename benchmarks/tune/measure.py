"""One subject: what the search chooses, and what every candidate would have been worth on the test data."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actmat.checkpoints.resolve import open_checkpoint
from actmat.extras.tune.evaluate import Answers, Predict, compare_answers, keep_answers, loss_of
from actmat.extras.tune.inputs import InputBatch, prepare_inputs
from actmat.extras.tune.live import LiveModel, fixed_tensors
from actmat.extras.tune.merges import Merges
from actmat.extras.tune.progress import TuneProgress
from actmat.extras.tune.settings import TuneSettings
from actmat.extras.tune.space import make_space
from actmat.extras.tune.tuning import tune_recipe
from actmat.recipe import make_recipe
from actmat.settings import RunSettings
from actmat_experiments.adamerging import learn
from benchmarks.tune.subjects import VALIDATION, Batch, Subject

NUMBERS = (8, 16, 32, 64, 128, 256)
"""Inputs per expert by which a merge is chosen."""
GIVEN = 128
"""Inputs per expert that the search is given; half of them choose."""
WRONG = 64
"""Inputs per expert of a wrong kind by which a merge is chosen."""
NEW_TOKENS = 4
METHODS = (
    *("average", "ties", "tsv", "iso_c", "knots", "cart", "dc_merge", "actmat", "actmat_ridge", "swudi", "aswudi"),
    "regmean",
)
"""All that is measured: those that came first or second in some suite."""
ADAMERGING = {"steps": 150, "lr": 1e-2, "batch": 16}
"""Fewer and larger steps than the authors' 500 at 1e-3, so that all subjects fit an hour."""


def measure(subject: Subject, folder: Path, *, adamerging: bool = True) -> dict[str, Any]:
    """Everything that the tables need of one subject, as plain data.

    Args:
        folder: for merges, which are removed in the end.
        adamerging: train its coefficients too, where every input has one prediction.
    """
    began = time.process_time()
    tasks = list(subject.experts)
    settings = TuneSettings(load=subject.load, predict=subject.predict, new_tokens=NEW_TOKENS, keep=True)
    run = RunSettings(threads=1, durable=False)
    experts = [{"path": str(p), "name": t} for t, p in subject.experts.items()]
    recipe = make_recipe(
        {"base": str(subject.base), "experts": experts, "out": str(folder / "out"), "seed": subject.seed}
    )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    data = {t: [_bare(b) for b in subject.inputs(t, GIVEN)] for t in tasks}
    report = tune_recipe(recipe, make_space({"methods": METHODS}), data, settings, run)
    rows = _grid(subject, recipe, folder, settings)
    chosen = subject.load(str(report.out)).model
    found = {
        "subject": subject.name,
        "suite": subject.suite,
        "regime": subject.regime,
        "seed": subject.seed,
        "experts": len(tasks),
        "inputs": GIVEN // 2,
        "expert_test": _mean(
            [subject.share(subject.load(str(p)).model, t, "test") for t, p in subject.experts.items()]
        ),
        "base_test": _mean([subject.share(subject.load(str(subject.base)).model, t, "test") for t in tasks]),
        "chosen": {
            "candidate": str(report.chosen.candidate),
            "test": _mean([subject.share(chosen, t, "test") for t in tasks]),
            "trials": len(report.trials),
            "verdict_on_average": next((f.verdict for f in report.finals if f.name == "average"), "chosen"),
            "seconds": round(report.seconds, 1),
        },
        "refused": list(report.refused.values()),
        "candidates": rows,
    }
    if adamerging and subject.suite == "vision-small":
        found["adamerging_test"] = _adamerging(subject)
    shutil.rmtree(folder, ignore_errors=True)
    return found | {"cpu_seconds": round(time.process_time() - began, 1)}


def _bare(batch: Batch) -> dict[str, Tensor]:
    return {k: v for k, v in batch.items() if k != "labels"}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _grid(subject: Subject, recipe: Any, folder: Path, settings: TuneSettings) -> list[dict[str, Any]]:
    """Every method at every scale of the default space: test, validation, divergence by kind and number of inputs."""
    work, space = folder / "out.tune", make_space({"methods": METHODS})
    statistics = {p.name.rpartition("-")[0]: str(p) for p in (work / "statistics").iterdir()}
    experts = [e.model_copy(update={"statistics": statistics[e.label]}) for e in recipe.experts]
    asked_of = recipe.model_copy(update={"experts": tuple(experts), "out": None})
    merges = Merges(asked_of, work / "merges", RunSettings(threads=1, durable=False), TuneProgress())
    choices = merges.make(space.merges)
    base = open_checkpoint(subject.base)
    live = LiveModel(settings.loader(str(subject.base)), base, fixed_tensors(merges.plans[choices[0].key]))
    asked = _asked(subject)
    rows = []
    for choice in choices:
        live.take(str(merges.folder_of(choice)))
        for scale in space.scales:
            rows.append({"method": str(choice), "scale": scale, **_scored(subject, live.scaled(scale), asked)})
    return rows


@dataclass(frozen=True)
class Kept:
    """Inputs of an expert, its answers to them, and how a model is asked."""

    batches: Sequence[InputBatch]
    answers: Sequence[Answers]
    predict: Predict


def _asked(subject: Subject) -> dict[str, dict[str, Kept]]:
    """Kind of inputs -> expert -> its answers: its own inputs, another task's, noise."""
    tasks = list(subject.experts)
    kinds: dict[str, dict[str, Kept]] = {"own": {}, "other": {}, "noise": {}}
    for number, task in enumerate(tasks):
        loaded, predict = subject.load(str(subject.experts[task])), subject.predict[task]
        other = tasks[(number + 1) % len(tasks)]
        batches = {
            "own": subject.inputs(task, VALIDATION),
            "other": subject.inputs(other, WRONG),
            "noise": subject.noise(task, WRONG),
        }
        for kind, given in batches.items():
            inputs = prepare_inputs(task, loaded, [_bare(b) for b in given], new_tokens=NEW_TOKENS)
            whole = _in_order(inputs.search, inputs.final)
            kinds[kind][task] = Kept(whole, keep_answers(loaded.model, whole, predict), predict)
    return kinds


def _in_order(search: Sequence[InputBatch], final: Sequence[InputBatch]) -> list[InputBatch]:
    """All batches of both halves: the first ones of each in turn."""
    return [b for pair in zip(search, final, strict=False) for b in pair]


def _scored(subject: Subject, model: nn.Module, kinds: Mapping[str, Mapping[str, Kept]]) -> dict[str, Any]:
    tasks = list(subject.experts)
    tests = [subject.share(model, t, "test") for t in tasks]
    row: dict[str, Any] = {
        "test": round(_mean(tests), 5),
        "worst_test": round(min(tests), 5),
        "validation": round(_mean([subject.share(model, t, "validation") for t in tasks]), 5),
    }
    for kind, asked in kinds.items():
        found = {t: compare_answers(model, a.batches, a.answers, a.predict) for t, a in asked.items()}
        for n in NUMBERS if kind == "own" else (WRONG,):
            losses = [loss_of(c, "divergence", range(min(n, len(c.predictions)))) for c in found.values()]
            row[f"{kind}_{n}"] = float(f"{_mean(losses):.6g}")
    return row


def _adamerging(subject: Subject) -> float:
    """Test accuracy of AdaMerging, layer by layer, trained on the inputs that the search chooses by."""
    tasks, batch = list(subject.experts), int(ADAMERGING["batch"])
    base = subject.load(str(subject.base)).model
    states = [_state(subject.load(str(subject.experts[t])).model) for t in tasks]
    inputs = {t: [_bare(b) for b in subject.inputs(t, GIVEN // 2)] for t in tasks}

    def batches(task: str) -> Any:
        whole = {k: torch.cat([b[k] for b in inputs[task]]) for k in inputs[task][0]}
        size = len(next(iter(whole.values())))
        return lambda: iter([{k: v[i : i + batch] for k, v in whole.items()} for i in range(0, size, batch)])

    def logits(number: int, output: Any) -> Tensor:
        return subject.predict[tasks[number]](_Given(output), {k: torch.empty(0) for k in inputs[tasks[number]][0]})

    how: dict[str, Any] = {"steps": int(ADAMERGING["steps"]), "lr": float(ADAMERGING["lr"]), "logits": logits}
    found = learn(base, _state(base), states, [batches(t) for t in tasks], per="tensor", **how)
    start = _state(base)
    merged = {
        name: start[name] + sum(float(c) * (s[name] - start[name]) for c, s in zip(row, states, strict=True))
        for name, row in zip(found.names, found.values_LT, strict=True)
    }
    base.load_state_dict({**base.state_dict(), **merged})
    return _mean([subject.share(base, t, "test") for t in tasks])


class _Given(nn.Module):
    """Returns an output that is there already, so that a head is applied to it as to a model's."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._output


def _state(model: Any) -> dict[str, Tensor]:
    """Weights by name."""
    return {n: t.detach().clone() for n, t in model.state_dict().items()}
