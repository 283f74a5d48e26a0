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
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from actmat.extras.demo.tasks import generator_for
from actmat_experiments.harness.models import add_adapter
from actmat_experiments.harness.progress import Stage
from actmat_experiments.harness.results import Part, Regime
from actmat_experiments.harness.training import Progress, Schedule, Selection, descend
from actmat_experiments.language.exams import IGNORED, Encoded, Exam, batches_by_length, chosen, training_tensors
from actmat_experiments.language.models import load_t5, load_tokenizer, save_expert


@dataclass(frozen=True, slots=True)
class FineTuning:
    """Training of experts; the defaults are those of the paper's code.

    Args:
        learning_rate: constant.
        optimizer: "adamw", without weight decay, or "adafactor", whose steps are relative to the size of each tensor,
            as T5 was trained; not for LoRA, whose second factor begins at zero.
        batch_size: items per update.
        piece_tokens: prompt tokens that are computed at once, after padding; gradients are summed over pieces.
        max_updates: the run ends here at the latest.
        validate_every: updates between two validations.
        patience: the run ends after so many validations without a new best one.
        precision: "bf16" (autocast) or "no".
        max_length: tokens of a prompt.
        clip: longest gradient; none: as it is, as in the paper's code.
    """

    learning_rate: float = 1e-4
    optimizer: Literal["adamw", "adafactor"] = "adamw"
    batch_size: int = 1024
    piece_tokens: int = 8192
    max_updates: int = 75_000
    validate_every: int = 100
    patience: int = 5
    precision: Literal["bf16", "no"] = "bf16"
    max_length: int = 128
    clip: float | None = None

    @property
    def schedule(self) -> Schedule:
        """For `descend`; an epoch is one update."""
        return Schedule(
            self.max_updates,
            self.batch_size,
            self.learning_rate,
            constant=True,
            optimizer=self.optimizer,
            clip=self.clip,
        )


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
        samples: items per task that statistics are measured on, for the methods that need data.
        measured: the part that they are of: "train", as in the paper's code, or "validation", as in its text.
        together: models merged in one reading of the inputs; all of them are on the disk at the same time.
        keep: merged models stay in the cache after their test.
        shuffled: statistics are of items in the order of the paper's code, not of the first ones of the files.
    """

    experts: ExpertSettings = field(default_factory=ExpertSettings)
    samples: int = 320
    measured: Part = "train"
    together: int = 4
    keep: bool = False
    shuffled: bool = True

    def decisive(self) -> Self:
        """The same with fixed values of all settings that change no score, for the cache key."""
        return replace(self, together=1, keep=False)


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
    place, pad = model.device, model.config.pad_token_id
    autocast = partial(torch.autocast, place.type, torch.bfloat16, enabled=settings.precision == "bf16")
    labels_N = torch.tensor([item.label for item in validation])

    def score() -> float:
        with autocast():
            found_N = chosen(model, validation, max_tokens=settings.piece_tokens)
        return float((found_N == labels_N).double().mean())

    def terms(update: int) -> Iterator[Tensor]:
        batch = [train[n] for n in batch_at(len(train), update, settings.batch_size, seed, purpose)]
        n_tokens = sum(len(item.target) for item in batch)
        model.train()
        with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
            torch.manual_seed(generator_for(seed, f"{purpose} dropout {update}").initial_seed())
            for positions in batches_by_length(batch, settings.piece_tokens):
                with autocast():
                    loss = summed_loss(model, [batch[n] for n in positions], pad, place) / n_tokens
                yield loss

    def losses(first: int) -> Iterator[Iterator[Tensor]]:
        for update in range(first, settings.max_updates):
            if selection.ended:
                return
            yield terms(update)

    parameters = [p for p in model.parameters() if p.requires_grad]
    numbers = settings.validate_every, settings.max_updates, settings.patience
    selection = Selection(folder, parameters, score, *numbers, on_update)
    descend(parameters, losses, settings.max_updates, settings.schedule, callbacks=[selection], resume=selection)
    selection.restore_best()
    return selection.progress


def train_expert(
    base: Path,
    exam: Exam,
    regime: Regime,
    settings: ExpertSettings,
    *,
    seed: int,
    device: str,
    folder: Path,
    stage: Stage,
) -> None:
    """Train the expert of a task and write it, from the last validation on if it was interrupted.

    Beside the weights stands `training.json`: updates, best validation accuracy and when it was reached.
    """
    training = settings.of(regime)
    model = load_t5(base)
    if regime == "lora":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = add_adapter(model, settings.rank, alpha=settings.alpha, task="SEQ_2_SEQ_LM")
            model.peft_config["default"].base_model_name_or_path = str(base)

    def advance(progress: Progress) -> None:
        stage.advance()
        stage.say(f"{exam.name}: best {100 * max(progress.best, 0):.1f} % at {progress.best_update}")
        if progress.update % training.validate_every == 0:
            stage.log(f"{exam.name} {regime} seed {seed} {progress}")

    about: dict[str, Any] = {"seed": seed, "purpose": f"expert {exam.name}", "folder": folder, "on_update": advance}
    progress = finetune(model.to(device), exam.train, exam.validation, training, **about)
    for state in ("last.pt", "best.pt"):
        (folder / state).unlink(missing_ok=True)
    save_expert(model.cpu(), load_tokenizer(base), folder)
    (folder / "training.json").write_text(json.dumps(asdict(progress)) + "\n", encoding="utf-8")
