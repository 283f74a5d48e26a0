"""`drift`: Theorem 1's quantities along a real fine-tuning run (AdamW on minibatches).

The theorem is about gradient descent. For another optimiser `D` is not `-eta G`; the angle between `D^T D` and `G^T G`
says how much that matters, and with it the inequality holds again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from actmat_experiments.analyses.demo_models import batches, load_demo
from actmat_experiments.analyses.drift_result import DriftResult, Moment, moments_until
from actmat_experiments.analyses.monitor import DriftMonitor, MonitorCallback

__all__ = ["DriftAlongRun", "drift"]


class DriftAlongRun(DriftResult):
    """Angles along a fine-tuning run."""

    name = "drift"


def drift(
    demo: Path,
    *,
    task: str = "digit",
    layers: Sequence[str] | None = None,
    n_moments: int = 10,
    on_step: Callable[[], object] = lambda: None,
) -> DriftAlongRun:
    """Fine-tune an expert of a demo once more, bit by bit as the demo did, with a monitor attached.

    `C` is measured on all training examples of the task, at the weights of the moment.

    Args:
        n_moments: how often to measure, evenly spaced on a logarithmic scale.

    Raises:
        CheckpointError: no demo there.
        RecipeError: an unknown task or layer.
    """
    from actmat.demo.train import finetune
    from actmat.demo.training import generator_for, steps_of
    from actmat.engine.resources import one_thread

    models = load_demo(demo)
    examples = models.data[models.task(task).name].train
    schedule = models.settings.finetuning
    n_steps = steps_of(schedule, len(examples))
    wanted = set(moments_until(n_steps, n_moments))
    moments: list[Moment] = []
    expert = models.base()
    monitor = DriftMonitor(layers=layers).attach(expert)

    def measure(done: int) -> None:
        if done not in wanted:
            return
        total = 0.0
        for number, batch in enumerate(batches(examples)):
            with monitor.inputs(more=number > 0):
                total += float(models.loss(expert, task, batch)) * len(batch)
        moments.append(Moment(done, total / len(examples), monitor.angles()))

    with contextlib.ExitStack() as stack:
        stack.callback(monitor.detach)
        stack.enter_context(one_thread())
        finetune(
            expert,
            models.heads[task],
            examples,
            schedule,
            generator=generator_for(models.seed, f"finetuning {task}"),
            on_step=on_step,
            callbacks=[MonitorCallback(monitor, measure)],
        )
    settings = {
        "task": task,
        "seed": models.seed,
        "optimiser": "AdamW",
        **asdict(schedule),
        "n_examples": len(examples),
        "n_steps": n_steps,
    }
    return DriftAlongRun(f"demo expert '{task}', AdamW", settings, moments, monitor.not_read)
