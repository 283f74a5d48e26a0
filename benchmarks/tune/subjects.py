"""Experts on which the search is tried: digits, images and texts of the small suites, full fine-tuning and LoRA.

Everything is trained once and kept in a cache; a seed changes the base, every expert and the order of the data.
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
from actmat_experiments.datafree.factors import peft_factors, read_factors, save_factors
from actmat_experiments.forecast.models import FAMILIES, Factors, train
from actmat_experiments.harness.cache import Cache, library_versions
from actmat_experiments.harness.experiment import Experiment
from actmat_experiments.harness.progress import Watch
from actmat_experiments.suites import RunRequest

BATCH = 32
VALIDATION = 256
"""Inputs per task that are not trained on: the search sees them without labels, the tuned baseline with."""
DIGITS = ("full", "full-fast", "lora", "lora-deep")
"""Families of `actmat_experiments.forecast.models`: gentle and coarse full fine-tuning, two kinds of LoRA."""
VISION = {
    "tasks": ("mnist", "eurosat", "gtsrb", "sign_digits"),
    "settings": {"base_epochs": "20", "train": "1000", "validation": str(VALIDATION), "test": "300"},
}
PRETRAINED = {
    "tasks": ("mnist", "eurosat", "gtsrb", "sign_digits"),
    "settings": {"validation": "64", "test": "150", "ranks": "16"},
}
LANGUAGE = {
    "tasks": ("agnews", "subj", "trec", "cr"),
    "settings": {
        "n_validation": str(VALIDATION),
        "n_test": "300",
        "experts.full.max_updates": "240",
        "experts.lora.max_updates": "240",
    },
}
REASONING = {"settings": {"storages": "float32", "samples": "4"}}
"""The suite's own base and experts; fewer answers per test prompt, for there are some seventy candidates to test."""
SUITES = ("digits", "vision-small", "vision-vits14", "language-small", "reasoning-small")
CHOSEN: Mapping[str, Mapping[str, Any]] = {
    "vision-small": VISION,
    "vision-vits14": PRETRAINED,
    "language-small": LANGUAGE,
    "reasoning-small": REASONING,
}
FOLDERS = {"vision-small": "images", "vision-vits14": "images", "language-small": "text"}

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
        factors: task -> factors of its adapter and their starts; nothing of a full expert.
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
    factors: Callable[[str], Factors] = lambda task: {}

    @property
    def name(self) -> str:
        """Suite, regime and seed."""
        return f"{self.suite}/{self.regime}/{self.seed}"


def subjects(suite: str, cache: Path, data: Path | None, seeds: Sequence[int], wanted: str = "") -> Iterator[Subject]:
    """The subjects of a suite, trained when they are asked for.

    Args:
        data: folder of the suites' data sets.
        wanted: only the regime of this name.
    """
    if suite == "digits":
        for family in DIGITS:
            for seed in seeds if wanted in ("", family) else ():
                yield _digits(family, seed, cache)
        return
    regimes = [r for r in (("full", "lora") if suite != "reasoning-small" else ("full",)) if wanted in ("", r)]
    watch = Watch(None, cache / "logs")
    with watch:
        for experiment in _experiments(suite, cache, data, seeds, regimes, watch):
            yield _of_experiment(experiment)


def _experiments(
    suite: str, cache: Path, data: Path | None, seeds: Sequence[int], regimes: Sequence[Any], watch: Watch
) -> Iterator[Experiment]:
    chosen = CHOSEN[suite]
    request = RunRequest(
        suite=suite,
        cache=cache,
        tasks=chosen.get("tasks"),
        regimes=regimes,
        seeds=seeds,
        data=_data_of(suite, data),
        threads=1,
        settings=chosen["settings"],
    )
    if suite == "vision-small":
        from actmat_experiments.vision.small import experiments as vision

        yield from vision(request, watch)
    elif suite == "vision-vits14":
        from actmat_experiments.pretrained.vision import experiments as pretrained

        yield from pretrained(request, watch)
    elif suite == "language-small":
        from actmat_experiments.language.small.suite import experiments as language

        yield from language(request, watch)
    else:
        from actmat_experiments.reasoning.small.suite import experiments as reasoning

        yield from reasoning(request, watch)


def _data_of(suite: str, data: Path | None) -> Path | None:
    return data / FOLDERS[suite] if data is not None and suite in FOLDERS else None


def _of_experiment(experiment: Experiment) -> Subject:
    kinds = {"language-small": _language, "reasoning-small": _reasoning}
    kind = kinds.get(experiment.suite, _vision)
    made = {name: made.path for name, made in experiment.experts().items()}

    def load(location: str) -> Loaded:
        place = Path(location)
        adapter = place if (place / "adapter_config.json").is_file() else None
        base = experiment.base.path if adapter else place
        return Loaded(_model(experiment, place), str(base), adapter and str(adapter), str(experiment.base.path))

    def share(model: nn.Module, task: str, part: str) -> float:
        with torch.no_grad():
            found = experiment.test(model, task, part)
        return float(found["correct"] / found["total"])

    return Subject(
        experiment.suite,
        experiment.regime,
        experiment.seed,
        experiment.base.path,
        made,
        load,
        share=share,
        **kind(experiment),
    )


def _model(experiment: Any, place: Path) -> Any:
    """The model as it is measured: an adapter stays one, so that its statistics have the names of the base."""
    if not (place / "adapter_config.json").is_file():
        return experiment.load(place)
    from peft import PeftModel

    return PeftModel.from_pretrained(experiment.load(experiment.base.path), str(place)).eval()


def _cut(batches: Sequence[Batch], n: int) -> list[Batch]:
    """The first `n` samples."""
    out, left = [], n
    for batch in batches:
        size = len(next(iter(batch.values())))
        if left > 0:
            out.append({k: v[:left] for k, v in batch.items()})
        left -= size
    return out


def _by_size(arguments: Mapping[str, Tensor]) -> list[Batch]:
    size = len(next(iter(arguments.values())))
    return [{k: v[i : i + BATCH] for k, v in arguments.items()} for i in range(0, size, BATCH)]


# Digits


def _digits(name: str, seed: int, cache: Path) -> Subject:
    from actmat.extras.demo.heads import load_heads, save_heads
    from actmat.extras.demo.model import load_encoder, save_encoder
    from actmat.extras.demo.run import load_data

    (family,) = [f for f in FAMILIES if f.name == name]
    key = {"version": 2, "family": repr(family), "seed": seed, "libraries": library_versions("torch", "scikit-learn")}

    def make(folder: Path) -> None:
        trained = train(family, seed)
        save_encoder(trained.base, folder / "base")
        for task, expert in trained.experts.items():
            (folder / "experts").mkdir(exist_ok=True)
            save_encoder(expert, folder / "experts" / task)
        save_heads(trained.heads, folder / "heads.safetensors")
        save_factors(trained.factors, folder)

    place = Cache(cache).get("tune-digits", key, make)
    heads = load_heads(place / "heads.safetensors")
    _, data = load_data(family.settings, seed)
    tasks = list(data)

    def load(location: str) -> Loaded:
        return Loaded(load_encoder(Path(location)).eval(), location, None, location)

    def predict(task: str) -> Predict:
        return lambda model, batch: heads[task](model(batch["images_NHW"]))

    def inputs(task: str, n: int) -> list[Batch]:
        examples = data[task].validation
        return _by_size({"images_NHW": examples.images_NHW[:n], "labels": examples.labels_N[:n]})

    def noise(task: str, n: int) -> list[Batch]:
        like = data[task].validation.images_NHW
        drawn = torch.rand(n, *like.shape[1:], generator=torch.Generator().manual_seed(seed))
        return _by_size({"images_NHW": drawn * like.max()})

    def share(model: nn.Module, task: str, part: str) -> float:
        examples = getattr(data[task], part)
        with torch.no_grad():
            right = heads[task](model(examples.images_NHW)).argmax(-1) == examples.labels_N
        return float(right.double().mean())

    experts = {task: place / "experts" / task for task in tasks}
    predicts = {task: predict(task) for task in tasks}
    adapter = (lambda task: read_factors(place, task)) if family.rank else (lambda task: {})
    return Subject("digits", name, seed, place / "base", experts, load, predicts, inputs, noise, share, adapter)


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

    def factors(task: str) -> Factors:
        if experiment.regime != "lora":
            return {}
        expert = experiment.experts()[task].path
        return peft_factors(backbone.load(experiment.base.path), expert, experiment.rank, experiment.seed, task)

    predicts = {task: predict(task) for task in parts}
    return {"predict": predicts, "inputs": inputs, "noise": noise, "factors": factors}


# Texts


def _language(experiment: Any) -> dict[str, Any]:
    from actmat_experiments.language.exams import padded

    def batches(prompts: Sequence[Sequence[int]]) -> list[Batch]:
        out: list[Batch] = []
        for start in range(0, len(prompts), BATCH):
            rows = prompts[start : start + BATCH]
            mask = padded([[1] * len(row) for row in rows], 0)
            out.append({"input_ids": padded(rows, 0), "attention_mask": mask})
        return out

    def inputs(task: str, n: int) -> list[Batch]:
        return batches([item.prompt for item in experiment.exams[task].validation[:n]])

    def noise(task: str, n: int) -> list[Batch]:
        """Prompts of the task's lengths, of tokens drawn at random."""
        items = experiment.exams[task].validation[:n]
        most = max(max(item.prompt) for item in items)
        generator = torch.Generator().manual_seed(experiment.seed)
        return batches([torch.randint(3, most, (len(i.prompt),), generator=generator).tolist() for i in items])

    return {"predict": dict.fromkeys(experiment.names, default_predict), "inputs": inputs, "noise": noise}


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
