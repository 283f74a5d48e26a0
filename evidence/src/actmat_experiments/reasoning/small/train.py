"""The base, the experts that reinforcement learning makes of it, and how many of their answers are right.

The base is trained on text with next-token prediction. An expert is trained by GRPO (Shao et al., "DeepSeekMath",
2024) as TRL implements it: for every prompt a group of `G` answers is drawn, answer `i` with reward `r_i` in {0, 1}
has the advantage `A_i = (r_i - mean r) / (std r + eps)`, and the loss is
`-1/G sum_i 1/|o_i| sum_t min(rho_it A_i, clip(rho_it, 1 - e, 1 + e) A_i)`, `rho` the ratio of the probabilities now
and at drawing time. No reference model, no reward but the verifier's.

Shapes: `N` lines or prompts, `S` tokens of a line, or answers per prompt.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actmat_experiments.harness.training import OnStep, Schedule, descend
from actmat_experiments.reasoning.small.model import Learning, Size, new_model, new_tokenizer
from actmat_experiments.reasoning.small.puzzles import Puzzle, unreliable

LONGEST_ANSWER = 10
"""Tokens of an answer with its end: the longest right one has 8 letters."""
_IGNORED = -100

Right = Callable[[str, str], bool]
"""True if an answer to a prompt is right: the verifiable reward."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of reinforcement learning.

    Args:
        seed: of prompts and answers.
        folder: where the library may write; nothing of value is left there.
        tokenizer: that pads on the left; default: the suite's own.
        longest: tokens of an answer with its end.
        device: where the model is trained.
    """

    seed: int
    folder: Path
    tokenizer: Any = None
    longest: int = LONGEST_ANSWER
    device: str = "cpu"


def pretrain(
    size: Size,
    texts: Sequence[tuple[Puzzle, Sequence[str]]],
    reliability: float,
    schedule: Schedule,
    *,
    seed: int,
    on_step: OnStep = lambda: None,
) -> Any:
    """The base: next-token prediction on lines of all tasks in equal parts, of which only some are right.

    Args:
        texts: every task with its training prompts.
        reliability: share of right answers.
        schedule: an epoch is one step.
        seed: of weights and lines.
    """
    model, tokenizer = new_model(size, seed=seed).train(), new_tokenizer()
    draw = random.Random(f"{seed}/lines of the base")

    def line(number: int) -> str:
        puzzle, prompts = texts[number % len(texts)]
        prompt = draw.choice(prompts)
        return f"{prompt}{unreliable(puzzle, prompt, reliability, draw)}{tokenizer.eos_token}"

    def losses(first: int) -> Iterator[Tensor]:
        for step in range(schedule.epochs):
            lines = [line(i) for i in range(schedule.batch_size)]
            if step < first:
                continue
            batch = tokenizer(lines, padding=True, padding_side="right", return_tensors="pt")
            labels_NS = batch.input_ids.masked_fill(batch.attention_mask == 0, _IGNORED)
            yield model(**batch, labels=labels_NS).loss

    descend(list(model.parameters()), losses, schedule.epochs, schedule, on_step)
    return model.eval()


def new_trainer(
    model: Any,
    right: Right,
    prompts: Sequence[str],
    settings: Learning,
    run: Run,
    *,
    on_step: OnStep = lambda: None,
    on_log: Callable[[str], object] = lambda text: None,
) -> Any:
    """TRL's trainer, set up for one expert; it trains `model` in place.

    Args:
        model: or a PEFT model, of which the factors are trained.
        right: the verifier, whose verdict is the reward.
        prompts: of the training part.
        settings: length and step size, prompts per step, answers per prompt.
        on_log: gets a line with mean reward and gradient norm now and then.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    class Watching(TrainerCallback):  # type: ignore[misc]  # the library is not typed
        def on_step_end(self, *_: Any, **__: Any) -> None:
            on_step()

        def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any], **__: Any) -> None:
            if "reward" in logs:
                on_log(f"step {state.global_step}: mean reward {logs['reward']}, gradient norm {logs['grad_norm']}")

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [float(right(p, c)) for p, c in zip(prompts, completions, strict=True)]

    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=_configuration(settings, run),
        train_dataset=Dataset.from_list([{"prompt": p} for p in prompts]),
        processing_class=run.tokenizer or new_tokenizer(),
        callbacks=[Watching()],
    )


def _configuration(settings: Learning, run: Run) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(run.folder),
        use_cpu=run.device == "cpu",
        bf16=False,
        seed=run.seed,
        max_steps=settings.steps,
        per_device_train_batch_size=settings.prompts * settings.group,
        num_generations=settings.group,
        max_completion_length=run.longest,
        temperature=settings.temperature,
        learning_rate=settings.rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=max(1, settings.steps // 20),
        loss_type="grpo",
        scale_rewards="group",
        beta=0.0,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=max(1, settings.steps // 10),
        log_level="error",
    )


def reinforce(
    model: Any,
    right: Right,
    prompts: Sequence[str],
    settings: Learning,
    run: Run,
    **watching: Any,
) -> Any:
    """The expert on one task: `model` after reinforcement learning. Arguments as of `new_trainer`.

    The global random state, from which the library draws, is left as it was.
    """
    from transformers.trainer_callback import PrinterCallback

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the library about its own settings
        trainer = new_trainer(model, right, prompts, settings, run, **watching)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return trainer.model.eval()


_ROWS = 2048


@torch.inference_mode()
def answers(model: Any, prompts: Sequence[str], n_samples: int, *, temperature: float, seed: int) -> list[list[str]]:
    """`n_samples` answers to every prompt, drawn from the model's whole distribution at a temperature.

    The global random state, from which the library draws, is set by `seed` inside and left as it was.
    """
    tokenizer, found = new_tokenizer(), []
    step = max(1, _ROWS // n_samples)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for start in range(0, len(prompts), step):
            some = prompts[start : start + step]
            batch = tokenizer(list(some), padding=True, return_tensors="pt")
            tokens = model.generate(
                **batch,
                do_sample=True,
                temperature=temperature,
                top_k=0,
                top_p=1.0,
                num_return_sequences=n_samples,
                max_new_tokens=LONGEST_ANSWER,
            )
            texts = tokenizer.batch_decode(tokens[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
            found += [texts[i * n_samples : (i + 1) * n_samples] for i in range(len(some))]
    return found


def right_answers(
    model: Any, puzzle: Puzzle, prompts: Sequence[str], n_samples: int, *, temperature: float, seed: int
) -> Tensor:
    """Bool `N S`: whether each answer is right."""
    drawn = answers(model, prompts, n_samples, temperature=temperature, seed=seed)
    return torch.tensor([[puzzle.right(p, a) for a in some] for p, some in zip(prompts, drawn, strict=True)])
