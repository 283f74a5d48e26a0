"""What the suite `reasoning` can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ReasoningSettings"]


@dataclass(frozen=True, slots=True)
class ReasoningSettings:
    """Settings of the suite, for `--set name=value`; the defaults are those of the paper where it states them.

    Args:
        base: hub id or directory; `--models` says the same.
        math, code, instructions: experts, hub ids or directories; "none" leaves one out.
        backend: "hf" (transformers) or "vllm".
        dtype: of weights and arithmetic in evaluation.
        batch_size: answers drawn together by "hf".
        chat: put prompts into the model's chat template.
        longest: most tokens of prompt and answer together; none: what the model's config says.
        samples: answers per problem where the paper samples; none: as in the paper.
        temperature: where the paper samples; none: as in the paper.
        max_tokens: longest answer; none: as in the paper.
        problems: only the first so many of each benchmark; none: all.
        prompts: folder with training prompts per expert for the rules that want statistics, `math.jsonl`, `code.jsonl`,
            `instructions.jsonl`, each line {"prompt": ...}; none: those rules are left out.
        measured: prompts per expert that are looked at.
        keep_merged: leave merged models in the cache; otherwise each is removed when it has answered.
        programs: that run at the same time when code is judged.
    """

    base: str = "allenai/Olmo-3-1025-7B"
    math: str | None = "allenai/Olmo-3-7B-RL-Zero-Math"
    code: str | None = "allenai/Olmo-3-7B-RL-Zero-Code"
    instructions: str | None = "allenai/Olmo-3-7B-RL-Zero-IF"
    backend: Literal["hf", "vllm"] = "hf"
    dtype: str = "bfloat16"
    batch_size: int = 64
    chat: bool = False
    longest: int | None = None
    samples: int | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    problems: int | None = None
    prompts: str | None = None
    measured: int = 320
    keep_merged: bool = False
    programs: int = 4

    @property
    def experts(self) -> dict[str, str]:
        """Skill -> expert, in the order of the merge."""
        skills = {"math": self.math, "code": self.code, "instructions": self.instructions}
        return {skill: place for skill, place in skills.items() if place}
