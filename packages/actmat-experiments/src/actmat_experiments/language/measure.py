"""Statistics of the experts, for the methods that need data: Gram matrices of all layers' inputs, the diagonal Fisher.

As in the paper, few training items suffice: 10 batches of 32. Prompts are read and right answers are forced, so that
the decoder's layers see what they see in training; padding is left out on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actmat.demo.merging import Candidate
from actmat.methods import get_method
from actmat_experiments.harness.cache import Cache, code_digest, library_versions
from actmat_experiments.harness.progress import Watch
from actmat_experiments.language.exams import Exam
from actmat_experiments.language.experts import Made
from actmat_experiments.language.models import is_adapter_folder, load_model
from actmat_experiments.language.tokens import IGNORED, training_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

__all__ = ["KINDS", "measure_experts", "needs_statistics"]

KINDS = ("gram", "fisher")
"""What is measured."""

_VERSION = 1
_BATCH = 32


def needs_statistics(rows: Sequence[Candidate]) -> bool:
    """Whether one of the rows is a rule that needs data."""
    return any(get_method(row.method).needs_statistics for row in rows)


def measure_experts(
    base: Made,
    experts: Mapping[str, Made],
    exams: Mapping[str, Exam],
    *,
    samples: int,
    seed: int,
    device: str,
    cache: Cache,
    watch: Watch,
) -> dict[str, Made]:
    """Task -> statistics of its expert on the first `samples` training items; measured now unless they are there."""
    found = {}
    for name, made in experts.items():
        exam = exams[name]
        key = {
            "version": _VERSION,
            "base": base[1],
            "expert": made[1],
            "task": exam.key("train"),
            "samples": samples,
            "seed": seed,
            "device": device.split(":")[0],
            "code": code_digest("statistics"),
            "libraries": library_versions("torch", "transformers", "peft"),
        }

        def make(folder: Path, made: Made = made, exam: Exam = exam) -> None:
            with watch.stage(f"statistics: {exam.name}", total=samples) as stage:
                _measure(base[0], made[0], exam, folder / "statistics", samples, seed, device, stage.advance)

        place = cache.get("statistics", key, make)
        found[name] = (place / "statistics", place.name)
    return found


def _measure(
    base: Path, expert: Path, exam: Exam, out: Path, samples: int, seed: int, device: str, advance: Any
) -> None:
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
