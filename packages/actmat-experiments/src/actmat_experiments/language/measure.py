"""Statistics of the experts, for the methods that need data: Gram matrices of all layers' inputs, the diagonal Fisher.

As in the paper, few training items suffice: 10 batches of 32. Prompts are read and right answers are forced, so that
the decoder's layers see what they see in training; padding is left out on both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from actmat_experiments.language.exams import Exam
from actmat_experiments.language.models import is_adapter_folder, load_model
from actmat_experiments.language.tokens import IGNORED, training_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["measure"]

_BATCH = 32


def measure(
    base: Path,
    expert: Path,
    exam: Exam,
    out: Path,
    *,
    samples: int,
    seed: int,
    device: str = "cpu",
    advance: Callable[[int], object] = lambda n: None,
) -> None:
    """Measure an expert on the first training items of its task and write the statistics to the folder `out`."""
    from actmat.statistics import collect

    adapter = expert if is_adapter_folder(expert) else None
    model = load_model(base if adapter else expert)
    if adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter)).eval()
    items, pad = exam.train[:samples], model.config.pad_token_id

    def batches() -> Iterator[dict[str, Tensor]]:
        for start in range(0, len(items), _BATCH):
            tensors = training_tensors(items[start : start + _BATCH], pad)
            tensors["decoder_attention_mask"] = (tensors["labels"] != IGNORED).long()
            yield {name: tensor.to(device) for name, tensor in tensors.items()}
            advance(len(tensors["labels"]))

    collect(
        model.to(device),
        batches(),
        checkpoint=base if adapter else expert,
        adapter=adapter,
        out=out,
        fisher=True,
        seed=seed,
        source=exam.name,
    )
