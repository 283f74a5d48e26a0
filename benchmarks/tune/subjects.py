"""Experts on which the search is tried: images by full fine-tuning, puzzles by reinforcement learning.

Everything is trained once and kept in a cache; a seed changes the base, every expert and the order of the data. The
rows of digits in `results/tune.jsonl` were made by the commit that `provenance.json` names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actmat.extras.models.loading import Loaded
from actmat.extras.tune.evaluate import Predict, default_predict
from actmat_experiments.harness.experiment import Experiment
from actmat_experiments.harness.progress import Watch
from actmat_experiments.suites import RunRequest

BATCH = 32
VALIDATION = 256
"""Inputs per task that are not trained on: the search sees them without labels, the tuned baseline with."""
VISION = {
    "tasks": ("mnist", "eurosat", "gtsrb", "sign_digits"),
    "settings": {"base_epochs": "20", "train": "1000", "validation": str(VALIDATION), "test": "300"},
}
REASONING = {"settings": {"samples": "4"}}
"""The suite's own base and experts; fewer answers per test prompt, for there are some seventy candidates to test."""
CHOSEN: Mapping[str, Mapping[str, Any]] = {"vision-small": VISION, "reasoning-small": REASONING}
SUITES = tuple(CHOSEN)

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Subject:
    """A base and its experts.

    Args:
        base, experts: checkpoints or adapters.
        load: a checkpoint or an adapter as a model.
        predict: logits by expert.
        inputs: `(task, n)` -> batches of that task; the same first ones for every n. Labels are with them, if any.
        noise: `(task, n)` -> batches of no task, in the form of the task's.
        share: `(model, task, part)` -> share of right answers on "validation" or "test".
    """

    suite: str
    regime: str
    seed: int
    base: Path
    experts: Mapping[str, Path]
    load: Callable[[str], Loaded]
    predict: Mapping[str, Predict]
    inputs: Callable[[str, int], list[Batch]]
    noise: Callable[[str, int], list[Batch]]
    share: Callable[[nn.Module, str, str], float]

    @property
    def name(self) -> str:
        """Suite, regime and seed."""
        return f"{self.suite}/{self.regime}/{self.seed}"


def subjects(suite: str, cache: Path, data: Path | None, seeds: Sequence[int]) -> Iterator[Subject]:
    """The subjects of a suite, trained when they are asked for.

    Args:
        data: folder of the suites' data sets.
    """
    if suite == "vision-small":
        from actmat_experiments.vision.small import experiments
    else:
        from actmat_experiments.reasoning.small.suite import experiments
    chosen = CHOSEN[suite]
    request = RunRequest(
        suite=suite,
        cache=cache,
        tasks=chosen.get("tasks"),
        regimes=["full"],
        seeds=seeds,
        data=data / "images" if data is not None and suite == "vision-small" else None,
        threads=1,
        settings=chosen["settings"],
    )
    with Watch(None, cache / "logs") as watch:
        for experiment in experiments(request, watch):
            yield _of_experiment(experiment)


def _of_experiment(experiment: Experiment) -> Subject:
    kind = _reasoning if experiment.suite == "reasoning-small" else _vision
    made = {name: made.path for name, made in experiment.experts().items()}

    def load(location: str) -> Loaded:
        return Loaded(experiment.load(Path(location)), location, None, str(experiment.base.path))

    def share(model: nn.Module, task: str, part: str) -> float:
        with torch.no_grad():
            found = experiment.test(model, task, part)
        return float(found["correct"] / found["total"])

    return Subject(
        *(experiment.suite, experiment.regime, experiment.seed, experiment.base.path, made, load),
        share=share,
        **kind(experiment),
    )


def _by_size(arguments: Mapping[str, Tensor]) -> list[Batch]:
    size = len(next(iter(arguments.values())))
    return [{k: v[i : i + BATCH] for k, v in arguments.items()} for i in range(0, size, BATCH)]


# Images


def _vision(experiment: Any) -> dict[str, Any]:
    backbone = experiment.backbone
    parts = {task.name: task.validation for task in experiment.tasks}
    heads = {task: experiment._head(task) for task in parts}

    def predict(task: str) -> Predict:
        return lambda model, batch: heads[task](backbone.features(model, batch["pixel_values"]))

    def inputs(task: str, n: int) -> list[Batch]:
        examples = parts[task].head(n)
        pixels = torch.cat([backbone.scale(p) for p in examples.batches(BATCH)])
        return _by_size({"pixel_values": pixels, "labels": examples.labels_N})

    def noise(task: str, n: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(experiment.seed)
        drawn = torch.randint(0, 256, (n, backbone.size, backbone.size, 3), generator=generator, dtype=torch.uint8)
        return _by_size({"pixel_values": backbone.scale(drawn)})

    predicts = {task: predict(task) for task in parts}
    return {"predict": predicts, "inputs": inputs, "noise": noise}


# Texts


def _reasoning(experiment: Any) -> dict[str, Any]:
    from actmat_experiments.reasoning.small.model import new_tokenizer

    tokenizer = new_tokenizer()

    def batches(prompts: Sequence[str]) -> list[Batch]:
        out: list[Batch] = []
        for start in range(0, len(prompts), BATCH):
            rows = list(prompts[start : start + BATCH])
            out.append(dict(tokenizer(rows, padding=True, padding_side="right", return_tensors="pt")))
        return out

    def inputs(task: str, n: int) -> list[Batch]:
        return batches(experiment.parts[task].train[:n])

    def noise(task: str, n: int) -> list[Batch]:
        """The task's prompts with their letters in any order."""
        generator = torch.Generator().manual_seed(experiment.seed)
        prompts = experiment.parts[task].train[:n]
        return batches(["".join(p[i] for i in torch.randperm(len(p), generator=generator)) for p in prompts])

    return {"predict": dict.fromkeys(experiment.names, default_predict), "inputs": inputs, "noise": noise}
