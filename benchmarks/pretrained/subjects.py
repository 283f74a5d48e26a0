"""A pretrained base and its seven experts, in the memory of one model and of the experts' deltas.

Inputs of a task were neither trained on nor tested: validation images, and texts that the training left over. The first
part of them is what statistics are `measured` on, the rest is `held` back from these.

Shapes: `N` inputs, `D` features, `C` classes, `O` out_features, `I` in_features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actmat_experiments.datafree.factors import peft_factors
from actmat_experiments.datafree.matrices import Key, linear_maps, matrices
from actmat_experiments.forecast.models import Factors
from actmat_experiments.harness.progress import Watch
from actmat_experiments.suites import RunRequest

BATCH = 16
LEFT_OVER = 192
"""Inputs per task that are looked for beyond the training's; small tasks have fewer."""
DATA = {"vision-vits14": "images", "text-minilm": "text"}

Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Inputs:
    """Inputs of one task.

    Args:
        batches: positions of the inputs, and keyword arguments of the model.
    """

    batches: Sequence[tuple[Tensor, dict[str, Tensor]]]
    labels_N: Tensor

    def __len__(self) -> int:
        return len(self.labels_N)


@dataclass(frozen=True)
class Subject:
    """A suite, a regime and a seed.

    Args:
        model: whose weights each merge replaces.
        base: weights.
        rest: per expert, weights that no rule acts on and that it changed; merges have their mean.
        deltas: per expert, of every linear map that some expert changed.
        pool: `model, arguments -> N D`.
        heads, test, measured, held: by task.
        noise: inputs of no task.
        factors: per expert, of an adapter; empty otherwise.
    """

    suite: str
    regime: str
    seed: int
    model: nn.Module
    base: Mapping[str, Tensor]
    rest: Mapping[str, Mapping[str, Tensor]]
    maps: Mapping[str, int]
    deltas: Mapping[str, Mapping[Key, Tensor]]
    pool: Callable[[Any, dict[str, Tensor]], Tensor]
    heads: Mapping[str, Head]
    test: Mapping[str, Inputs]
    measured: Mapping[str, Inputs]
    held: Mapping[str, Inputs]
    noise: Inputs
    factors: Mapping[str, Factors]

    @property
    def name(self) -> str:
        """Suite, regime and seed."""
        return f"{self.suite}/{self.regime}/{self.seed}"

    @property
    def tasks(self) -> list[str]:
        """Names of the experts."""
        return list(self.deltas)

    @property
    def keys(self) -> list[Key]:
        """Matrices that some expert changed."""
        return list(next(iter(self.deltas.values())))

    def write(self, merged_OI: Mapping[Key, Tensor], scale: float = 1.0) -> None:
        """Make the model a merge: `W_0 + scale * D*`, and the mean of the experts elsewhere."""
        names = dict.fromkeys(n for some in self.rest.values() for n in some)
        experts = [{n: some.get(n, self.base[n]) for n in names} for some in self.rest.values()]
        self._write(merged_OI, {n: torch.stack([e[n] for e in experts]).mean(0) for n in names}, scale)

    def write_base(self) -> None:
        """Make the model the base."""
        self._write({}, {})

    def write_expert(self, task: str) -> None:
        """Make the model an expert."""
        self._write(self.deltas[task], self.rest[task])

    def _write(self, deltas_OI: Mapping[Key, Tensor], rest: Mapping[str, Tensor], scale: float = 1.0) -> None:
        weights = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in self.base.items():
                weights[name].copy_(rest.get(name, value))
            for key, block in matrices({n: w.detach() for n, w in weights.items()}, self.maps).items():
                if key in deltas_OI:
                    block += scale * deltas_OI[key]

    @torch.inference_mode()
    def features(self, inputs: Inputs) -> Tensor:
        """`N D` of the model as it is."""
        order = torch.cat([index for index, _ in inputs.batches])
        found = torch.cat([self.pool(self.model, dict(arguments)) for _, arguments in inputs.batches])
        return found[order.argsort()]


def open_subject(name: str, cache: Path, data: Path | None, *, most: int = 64) -> Subject:
    """The subject `suite/regime/seed`; experts that the cache lacks are trained.

    Args:
        most: inputs per task to measure on, and as many to hold back.
    """
    suite, regime, seed = name.split("/")
    more = {"ranks": "16"} if regime == "lora" else {}
    if suite == "vision-vits14":
        more["validation"] = str(LEFT_OVER)
    request = RunRequest(
        suite=suite,
        cache=cache,
        data=data / DATA[suite] if data is not None else None,
        regimes=("lora" if regime == "lora" else "full",),
        seeds=(int(seed),),
        threads=1,
        settings=more,
    )
    found: Any
    with Watch(None, cache / "logs") as watch:
        if suite == "vision-vits14":
            from actmat_experiments.pretrained.vision import experiments as vision

            (found,) = vision(request, watch)
            parts = _images(found, most)
        else:
            from actmat_experiments.pretrained.text import experiments as text

            (found,) = text(request, watch)
            parts = _texts(found, request, most)
        return _opened(found, suite, regime, int(seed), parts)


def _opened(experiment: Any, suite: str, regime: str, seed: int, parts: Mapping[str, Any]) -> Subject:
    model = experiment.load(experiment.base.path)
    base = {n: p.detach().clone() for n, p in model.named_parameters()}
    maps = linear_maps(model)
    start_OI = matrices(base, maps)
    deltas: dict[str, dict[Key, Tensor]] = {}
    rest: dict[str, dict[str, Tensor]] = {}
    experts = experiment.experts()
    for task, made in experts.items():
        weights = {n: p.detach() for n, p in experiment.load(made.path).named_parameters()}
        deltas[task] = {key: w - start_OI[key] for key, w in matrices(weights, maps).items()}
        rest[task] = {n: w.clone() for n, w in weights.items() if n not in maps and not w.equal(base[n])}
    still = [key for key in start_OI if all(not d[key].any() for d in deltas.values())]
    for some in deltas.values():
        for key in still:
            del some[key]
    factors = {}
    if regime == "lora":
        for task, made in experts.items():
            fresh = experiment.load(experiment.base.path)
            factors[task] = peft_factors(fresh, made.path, experiment.rank, experiment.seed, task)
    heads = {task: experiment._head(task) for task in deltas}
    return Subject(
        suite, regime, seed, model, base, rest, maps, deltas, heads=heads, factors=factors, **parts
    )  # fmt: skip


def _split(n: int, most: int) -> tuple[range, range]:
    """Positions to measure on and positions that are held back, as many of each, `most` at most."""
    half = min(n // 2, most)
    return range(half), range(half, 2 * half)


def _images(experiment: Any, most: int) -> dict[str, Any]:
    backbone = experiment.backbone

    def made(pixels_NSSC: Tensor, labels_N: Tensor) -> Inputs:
        images = backbone.scale(pixels_NSSC)
        index = torch.arange(len(images)).split(BATCH)
        return Inputs([(i, {"pixel_values": images[i]}) for i in index], labels_N)

    def part(examples: Any, positions: range) -> Inputs:
        whole = torch.cat(list(examples.head(positions.stop).batches(BATCH)))
        return made(whole[positions.start :], examples.labels_N[positions.start : positions.stop])

    splits = {t.name: _split(len(t.validation), most) for t in experiment.tasks}
    drawn = torch.Generator().manual_seed(experiment.seed)
    size = backbone.size
    noise = torch.randint(0, 256, (most, size, size, 3), generator=drawn, dtype=torch.uint8)
    return {
        "pool": lambda model, arguments: backbone.features(model, arguments["pixel_values"]),
        "test": {t.name: part(t.test, range(len(t.test))) for t in experiment.tasks},
        "measured": {t.name: part(t.validation, splits[t.name][0]) for t in experiment.tasks},
        "held": {t.name: part(t.validation, splits[t.name][1]) for t in experiment.tasks},
        "noise": made(noise, torch.zeros(most, dtype=torch.int64)),
    }


def _texts(experiment: Any, request: RunRequest, most: int) -> dict[str, Any]:
    from actmat_experiments.pretrained.text import TextSettings
    from actmat_experiments.pretrained.text_model import pooled
    from actmat_experiments.pretrained.text_tasks import load_texts

    usual = TextSettings()
    assert request.data is not None, "the suite has asked for it"
    sizes = {"train": usual.train + LEFT_OVER, "validation": usual.validation, "test": usual.test}
    wide = {t.name: t for t in load_texts(request.data, experiment.names, **sizes)}
    left = {t.name: wide[t.name].train[len(t.train) :] for t in experiment.tasks}
    splits = {name: _split(len(some), most) for name, some in left.items()}

    def made(examples: Sequence[Any]) -> Inputs:
        order = sorted(range(len(examples)), key=lambda i: len(examples[i].text) + len(examples[i].second))
        index = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
        labels_N = torch.tensor([e.label for e in examples])
        return Inputs([(torch.tensor(i), experiment.reader([examples[j] for j in i])) for i in index], labels_N)

    def part(name: str, number: int) -> Inputs:
        return made([left[name][i] for i in splits[name][number]])

    return {
        "pool": pooled,
        "test": {t.name: made(t.test) for t in experiment.tasks},
        "measured": {name: part(name, 0) for name in left},
        "held": {name: part(name, 1) for name in left},
        "noise": _random_tokens(part(experiment.names[0], 0), experiment),
    }


def _random_tokens(like: Inputs, experiment: Any) -> Inputs:
    """Texts of these lengths, of tokens drawn at random; the first and last token stay."""
    drawn = torch.Generator().manual_seed(experiment.seed)
    words = int(experiment.load(experiment.base.path).config.vocab_size)
    batches = []
    for index, arguments in like.batches:
        ids_NL, mask_NL = arguments["input_ids"].clone(), arguments["attention_mask"].bool()
        last_NL = torch.nn.functional.pad(mask_NL[:, 1:], (0, 1)) ^ mask_NL
        inner_NL = mask_NL & ~last_NL
        inner_NL[:, 0] = False
        random_NL = torch.randint(1000, words, ids_NL.shape, generator=drawn)
        batches.append((index, {**arguments, "input_ids": torch.where(inner_NL, random_NL, ids_NL)}))
    return Inputs(batches, torch.zeros_like(like.labels_N))
