"""States of long training runs, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

__all__ = ["Resume"]


@dataclass(frozen=True, slots=True)
class Resume:
    """The state of a training run on disk, for `descend`: weights, moments, number of steps, in one file.

    Args:
        path: of the file, replaced whole every time.
        every: steps between two states.
    """

    path: Path
    every: int = 500

    def load(self, parameters: Sequence[nn.Parameter], optimiser: torch.optim.Optimizer) -> int:
        """Put the state back; the number of steps that it holds, 0 without one."""
        from safetensors import safe_open

        if not self.path.is_file():
            return 0
        with safe_open(self.path, framework="pt") as file, torch.no_grad():
            step = int(file.metadata()["step"])
            for i, parameter in enumerate(parameters):
                parameter.copy_(file.get_tensor(f"weight.{i}"))
                optimiser.state[parameter] = {
                    "step": torch.tensor(float(step), device=parameter.device),
                    "exp_avg": file.get_tensor(f"mean.{i}").to(parameter.device),
                    "exp_avg_sq": file.get_tensor(f"square.{i}").to(parameter.device),
                }
        return step

    def keep(
        self, step: int, n_steps: int, parameters: Sequence[nn.Parameter], optimiser: torch.optim.Optimizer
    ) -> None:
        """Write the state if it is time."""
        from safetensors.torch import save_file

        if step % self.every or step == n_steps:
            return
        tensors = {}
        for i, parameter in enumerate(parameters):
            state = optimiser.state[parameter]
            tensors[f"weight.{i}"] = parameter.detach().contiguous()
            tensors[f"mean.{i}"], tensors[f"square.{i}"] = state["exp_avg"], state["exp_avg_sq"]
        aside = self.path.with_suffix(".new")
        save_file(tensors, aside, metadata={"step": str(step)})
        aside.replace(self.path)
