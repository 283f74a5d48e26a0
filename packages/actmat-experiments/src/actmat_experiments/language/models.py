"""T5 on disk and in memory: bases, full experts, LoRA experts, merged models; and statistics measured on experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actmat.errors import CheckpointError
from actmat_experiments.harness.progress import quiet_libraries
from actmat_experiments.language.exams import IGNORED, Encoded, training_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


def load_model(base: str | Path, expert: Path | None = None, *, device: str = "cpu") -> Any:
    """The base, a full checkpoint, or the base with an adapter, in float32 and in eval mode.

    Args:
        base: folder or hub id.
        expert: folder of a model or of an adapter of the base.

    Raises:
        CheckpointError: there is no encoder-decoder model.
    """
    import torch
    from transformers import AutoModelForSeq2SeqLM

    quiet_libraries()
    place = base if expert is None or is_adapter_folder(expert) else expert
    try:
        model = AutoModelForSeq2SeqLM.from_pretrained(str(place), dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{place} is no encoder-decoder model that transformers can load: {error}. Give a folder or a hub id of "
            "a T5 (v1.0: t5-base, t5-large)."
        ) from error
    if expert is not None and is_adapter_folder(expert):
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(expert)).merge_and_unload()
    return model.to(device).eval()


def load_tokenizer(base: str | Path) -> Any:
    """The base's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(base))


def is_adapter_folder(folder: Path) -> bool:
    """True if PEFT has written it."""
    return (folder / "adapter_config.json").is_file()


def add_lora(model: Any, *, rank: int, alpha: float, base: str) -> Any:
    """LoRA on all linear layers but the output embedding, without dropout; only the factors will be trained.

    Args:
        model: of transformers; it is changed.
        alpha: the delta is `alpha / rank * B A`.
        base: what the adapter's config will call its base.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="SEQ_2_SEQ_LM", r=rank, lora_alpha=alpha, lora_dropout=0.0, bias="none", target_modules="all-linear"
    )
    adapted = get_peft_model(model, config)
    adapted.peft_config["default"].base_model_name_or_path = base
    return adapted


def save_expert(model: Any, tokenizer: Any, folder: Path) -> None:
    """As transformers or PEFT save it, with the tokenizer beside a full model."""
    model.save_pretrained(folder)
    if not is_adapter_folder(folder):
        tokenizer.save_pretrained(folder)


_BATCH = 32


def measure(
    base: Path,
    expert: Path,
    items: Sequence[Encoded],
    out: Path,
    *,
    device: str = "cpu",
    advance: Callable[[int], object] = lambda n: None,
    **collecting: Any,
) -> None:
    """Write the statistics of an expert on items of its task to the folder `out`; `collecting`: see `collect`."""
    from actmat_experiments.core import collect

    adapter = expert if is_adapter_folder(expert) else None
    model = load_model(base if adapter else expert)
    if adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter)).eval()
    pad = model.config.pad_token_id

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
        **{"fisher": True, **collecting},
    )
