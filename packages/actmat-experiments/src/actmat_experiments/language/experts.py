"""One expert per task, by full fine-tuning or LoRA, each a stage of the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from actmat_experiments.harness.cache import library_versions
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.results import Regime
from actmat_experiments.language.exams import Exam
from actmat_experiments.language.models import add_lora, load_model, load_tokenizer, save_expert
from actmat_experiments.language.settings import ExpertSettings
from actmat_experiments.language.train import Progress, finetune

__all__ = ["expert_key", "train_expert"]

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
            model,
            exam.train,
            exam.validation,
            training,
            seed=seed,
            purpose=f"expert {exam.name}",
            folder=folder,
            device=device,
            on_update=advance,
        )
    for state in ("last.pt", "best.pt"):
        (folder / state).unlink(missing_ok=True)
    save_expert(model.cpu(), load_tokenizer(base), folder)
    numbers = {"updates": progress.update, "best": progress.best, "best_update": progress.best_update}
    (folder / "training.json").write_text(json.dumps(numbers) + "\n", encoding="utf-8")
