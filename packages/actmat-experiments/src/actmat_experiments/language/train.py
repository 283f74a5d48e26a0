"""Fine-tuning: all weights or LoRA factors, on one task, until its validation accuracy no longer rises.

Shapes: `B` items of a batch, `S` tokens of a prompt, `L` tokens of an answer.

The loss of an update is the mean over all answer tokens of its batch, however the batch is cut into pieces that fit
the memory. Which items an update sees, and its dropout, depend on the seed and the number of the update alone: a run
that was interrupted goes on exactly where it stood.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from actmat.demo.training import generator_for
from actmat_experiments.language.models import trained
from actmat_experiments.language.rank import chosen
from actmat_experiments.language.tokens import IGNORED, Encoded, batches_by_length, training_tensors

__all__ = ["FineTuning", "Progress", "batch_at", "finetune", "summed_loss"]

_LONGEST_GRADIENT = 1.0


@dataclass(frozen=True, slots=True)
class FineTuning:
    """How experts are trained; the defaults are those of the paper's code.

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


@dataclass(slots=True)
class Progress:
    """Where a run stands.

    Args:
        update: updates that are done.
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
    device: str = "cpu",
    on_update: Callable[[Progress], object] = lambda progress: None,
) -> Progress:
    """Train the parameters that ask for a gradient; the model ends with those of its best validation.

    Args:
        model: base, or base with LoRA; it is changed.
        validation: items that decide when to stop and which weights are kept.
        seed: with `purpose`, decides order and dropout.
        folder: where its state is kept after every validation; a run that finds one goes on from there.
    """
    place = torch.device(device)
    autocast = partial(torch.autocast, place.type, torch.bfloat16, enabled=settings.precision == "bf16")
    model.to(place)
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
                loss.backward()  # type: ignore[no-untyped-call]
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
        """Where an interrupted run stood, its weights put into the model; the beginning if there was none."""
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
