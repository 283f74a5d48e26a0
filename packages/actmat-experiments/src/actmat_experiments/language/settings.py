"""Settings of the experiments; `--set name=value` changes them, `--set experts.full.batch_size=64` for instance."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from actmat_experiments.language.train import FineTuning

__all__ = ["ExpertSettings", "LanguageSettings", "PaperSettings"]


@dataclass(frozen=True, slots=True)
class ExpertSettings:
    """How experts are trained, in both regimes.

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
    """What both suites can be told; the defaults are the protocol of the paper's language experiments.

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
