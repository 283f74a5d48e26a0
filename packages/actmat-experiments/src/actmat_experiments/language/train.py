"""Fine-tuning of T5 on one task, fully or by LoRA, until its validation accuracy no longer rises.

The loss of an update is the mean over all answer tokens of its batch, however the batch is cut into pieces that fit
the memory. Which items an update sees, and its dropout, depend only on the seed and the number of the update: a run
that was interrupted goes on exactly where it stood.

Shapes: `B` items of a batch, `S` tokens of a prompt, `L` tokens of an answer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from actmat.demo.training import generator_for
from actmat_experiments.harness.cache import library_versions
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.results import Regime
from actmat_experiments.language.exams import IGNORED, Encoded, Exam, batches_by_length, chosen, training_tensors
from actmat_experiments.language.models import add_lora, load_model, load_tokenizer, save_expert, trained

__all__ = [
    "ExpertSettings",
    "FineTuning",
    "LanguageSettings",
    "PaperSettings",
    "Progress",
    "batch_at",
    "expert_key",
    "finetune",
    "summed_loss",
    "train_expert",
]


_LONGEST_GRADIENT = 1.0


@dataclass(frozen=True, slots=True)
class FineTuning:
    """Training of experts; the defaults are those of the paper's code.

    Args:
        learning_rate: constant.
        optimiser: "adamw", without weight decay, or "adafactor", whose steps are relative to the size of each tensor,
            as T5 was trained; not for LoRA, whose second factor begins at zero.
        batch_size: items per update.
        piece_tokens: prompt tokens that are computed at once, after padding; gradients are summed over pieces.
        max_updates: the run ends here at the latest.
        validate_every: updates between two validations.
        patience: the run ends after so many validations without a new best one.
        precision: "bf16" (autocast) or "no".
        max_length: tokens of a prompt.
    """

    learning_rate: float = 1e-4
    optimiser: Literal["adamw", "adafactor"] = "adamw"
    batch_size: int = 1024
    piece_tokens: int = 8192
    max_updates: int = 75_000
    validate_every: int = 100
    patience: int = 5
    precision: Literal["bf16", "no"] = "bf16"
    max_length: int = 128


@dataclass(frozen=True, slots=True)
class ExpertSettings:
    """Training of experts in both regimes.

    Args:
        full: training of all weights.
        lora: training of LoRA factors.
        rank: of LoRA, on all linear layers.
        alpha: of LoRA; the delta is `alpha / rank * B A`.
    """

    full: FineTuning = field(default_factory=FineTuning)
    lora: FineTuning = field(default_factory=FineTuning)
    rank: int = 16
    alpha: float = 16.0

    def of(self, regime: str) -> FineTuning:
        """The training of a regime."""
        return self.lora if regime == "lora" else self.full


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageSettings:
    """Settings of both suites; the defaults are the protocol of the paper's language experiments.

    Args:
        experts: how experts are trained.
        samples: training items per task that statistics are measured on, for the methods that need data.
        together: models merged in one reading of the inputs; all of them are on the disk at the same time.
        keep: merged models stay in the cache after their test.
    """

    experts: ExpertSettings = field(default_factory=ExpertSettings)
    samples: int = 320
    together: int = 4
    keep: bool = False

    def decisive(self) -> Self:
        """The same with all that changes no score at one value: how a run is made is no part of what it is."""
        return replace(self, together=1, keep=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperSettings(LanguageSettings):
    """Settings of the suite `language`.

    Args:
        cycle: training items are asked by all templates of a task in turn; otherwise by the first one, as validation
            and test items always are.
    """

    cycle: bool = True


@dataclass(slots=True)
class Progress:
    """State of a run.

    Args:
        best: highest validation accuracy so far; -1 before the first validation.
        best_update: when that was.
        stale: validations since then.
    """

    update: int = 0
    best: float = -1.0
    best_update: int = 0
    stale: int = 0


def batch_at(n_items: int, update: int, batch_size: int, seed: int, purpose: str) -> list[int]:
    """Positions of the items of an update: passes over all items in new random orders, cut every `batch_size`."""
    first, last = update * batch_size, (update + 1) * batch_size
    found: list[int] = []
    for epoch in range(first // n_items, math.ceil(last / n_items)):
        order = torch.randperm(n_items, generator=generator_for(seed, f"{purpose} epoch {epoch}"))
        found += order[max(first - epoch * n_items, 0) : last - epoch * n_items].tolist()
    return found


def summed_loss(model: Any, items: Sequence[Encoded], pad: int, device: Any) -> Tensor:
    """Negative log-likelihood of the right answers, summed over their tokens."""
    tensors = {name: tensor.to(device) for name, tensor in training_tensors(items, pad).items()}
    logits_BLV = model(**tensors).logits
    return nn.functional.cross_entropy(
        logits_BLV.float().flatten(0, 1), tensors["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
    )


def finetune(
    model: Any,
    train: Sequence[Encoded],
    validation: Sequence[Encoded],
    settings: FineTuning,
    *,
    seed: int,
    purpose: str,
    folder: Path,
    on_update: Callable[[Progress], object] = lambda progress: None,
) -> Progress:
    """Train the parameters that ask for a gradient; the model ends with those of its best validation.

    Args:
        model: base, or base with LoRA, where it will compute; it is changed.
        validation: items that decide when to stop and which weights are kept.
        seed: with `purpose`, decides order and dropout.
        folder: where its state is kept after every validation; a run that finds one goes on from there.
    """
    place = model.device
    autocast = partial(torch.autocast, place.type, torch.bfloat16, enabled=settings.precision == "bf16")
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = _optimiser(settings, parameters)
    state = _State(folder, model, optimiser)
    progress = state.load()
    pad = model.config.pad_token_id
    while progress.update < settings.max_updates and progress.stale < settings.patience:
        chosen_items = batch_at(len(train), progress.update, settings.batch_size, seed, purpose)
        batch = [train[n] for n in chosen_items]
        n_tokens = sum(len(item.target) for item in batch)
        model.train()
        with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
            torch.manual_seed(generator_for(seed, f"{purpose} dropout {progress.update}").initial_seed())
            for piece in _pieces(batch, settings.piece_tokens):
                with autocast():
                    loss = summed_loss(model, piece, pad, place) / n_tokens
                torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(parameters, _LONGEST_GRADIENT)
        optimiser.step()
        optimiser.zero_grad()
        progress.update += 1
        if progress.update % settings.validate_every == 0 or progress.update == settings.max_updates:
            with autocast():
                accuracy = _accuracy(model, validation, settings)
            _judge(progress, accuracy)
            state.save(progress)
        on_update(progress)
    state.restore_best()
    return progress


def _optimiser(settings: FineTuning, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    if settings.optimiser == "adafactor":
        return torch.optim.Adafactor(parameters, lr=settings.learning_rate)
    return torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=0.0, fused=True)


def _pieces(batch: Sequence[Encoded], piece_tokens: int) -> Iterator[list[Encoded]]:
    for positions in batches_by_length(batch, piece_tokens):
        yield [batch[n] for n in positions]


def _accuracy(model: Any, items: Sequence[Encoded], settings: FineTuning) -> float:
    found_N = chosen(model, items, max_tokens=settings.piece_tokens)
    return float((found_N == torch.tensor([item.label for item in items])).double().mean())


def _judge(progress: Progress, accuracy: float) -> None:
    if accuracy > progress.best:
        progress.best, progress.best_update, progress.stale = accuracy, progress.update, 0
    else:
        progress.stale += 1


class _State:
    """A run on disk: `last.pt` (weights, optimiser, progress) and `best.pt`, tensors and numbers alone."""

    def __init__(self, folder: Path, model: Any, optimiser: torch.optim.Optimizer) -> None:
        self._last, self._best = folder / "last.pt", folder / "best.pt"
        self._model, self._optimiser = model, optimiser

    def save(self, progress: Progress) -> None:
        """After a validation. The best weights first: `last.pt` may only speak of a best one that is there."""
        weights = trained(self._model)
        if progress.stale == 0:
            _write({"weights": weights}, self._best)
        numbers = (progress.update, progress.best, progress.best_update, progress.stale)
        _write({"weights": weights, "optimiser": self._optimiser.state_dict(), "progress": numbers}, self._last)

    def load(self) -> Progress:
        """Put the weights of an interrupted run into the model; its state, or that of a new run."""
        if not self._last.is_file():
            return Progress()
        state = torch.load(self._last, map_location="cpu", weights_only=True)
        self._put(state["weights"])
        self._optimiser.load_state_dict(state["optimiser"])
        return Progress(*state["progress"])

    def restore_best(self) -> None:
        """Put the best weights into the model."""
        if self._best.is_file():
            self._put(torch.load(self._best, map_location="cpu", weights_only=True)["weights"])

    def _put(self, weights: dict[str, Tensor]) -> None:
        for name, tensor in trained(self._model).items():
            tensor.copy_(weights[name])


def _write(state: dict[str, Any], path: Path) -> None:
    aside = path.with_suffix(".new")
    torch.save(state, aside)
    aside.replace(path)


_VERSION = 1


def expert_key(
    base: str, exam: Exam, regime: Regime, settings: ExpertSettings, seed: int, device: str
) -> dict[str, Any]:
    """All that determines an expert; `base` is the digest of the base."""
    lora = {"rank": settings.rank, "alpha": settings.alpha} if regime == "lora" else None
    return {
        "version": _VERSION,
        "base": base,
        "task": exam.key("train", "validation"),
        "regime": regime,
        "training": settings.of(regime),
        "lora": lora,
        "seed": seed,
        "device": device.split(":")[0],
        "libraries": library_versions("torch", "transformers", "peft"),
    }


def train_expert(
    base: Path,
    exam: Exam,
    regime: Regime,
    settings: ExpertSettings,
    *,
    seed: int,
    device: str,
    folder: Path,
    watch: Watch,
) -> None:
    """Train the expert of a task and write it, from the last validation on if it was interrupted.

    Beside the weights stands `training.json`: updates, best validation accuracy and when it was reached.
    """
    training = settings.of(regime)
    model = load_model(base)
    if regime == "lora":
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = add_lora(model, rank=settings.rank, alpha=settings.alpha, base=str(base))
    with watch.stage(f"experts: {exam.name} ({regime})", total=training.max_updates) as stage:

        def advance(progress: Progress) -> None:
            stage.advance()
            stage.say(f"best {100 * max(progress.best, 0):.1f} % at {progress.best_update}")
            if progress.update % training.validate_every == 0:
                stage.log(f"{exam.name} {regime} seed {seed} {progress}")

        progress = finetune(
            model.to(device),
            exam.train,
            exam.validation,
            training,
            seed=seed,
            purpose=f"expert {exam.name}",
            folder=folder,
            on_update=advance,
        )
    for state in ("last.pt", "best.pt"):
        (folder / state).unlink(missing_ok=True)
    save_expert(model.cpu(), load_tokenizer(base), folder)
    numbers = {"updates": progress.update, "best": progress.best, "best_update": progress.best_update}
    (folder / "training.json").write_text(json.dumps(numbers) + "\n", encoding="utf-8")
