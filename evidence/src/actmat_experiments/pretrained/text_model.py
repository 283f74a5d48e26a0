"""An encoder of texts behind a frozen head: features, fine-tuning, and the base out of a wheel's folder.

The feature is the mean of the last hidden states over the tokens, as the base was trained. Embeddings stay as they are;
no dropout. Shapes: `N` texts, `L` tokens, `D` features, `C` classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actmat.extras.demo.model import Head
from actmat_experiments.harness.heads import ClipHead
from actmat_experiments.harness.models import load_model
from actmat_experiments.harness.training import OnStep, Training, train_by, trainable
from actmat_experiments.pretrained.text_tasks import Example

_TESTED = 64
_FIRST_LAYER = "encoder."


class Reader:
    """Examples to batches of tokens.

    Args:
        folder: of the tokenizer.
        length: longest input, in tokens; longer ones are cut.
    """

    def __init__(self, folder: Path, length: int) -> None:
        from transformers import AutoTokenizer

        self._tokenizer, self._length = AutoTokenizer.from_pretrained(folder), length

    def __call__(self, examples: Sequence[Example], device: str = "cpu") -> dict[str, Tensor]:
        """`input_ids`, `attention_mask` and, of a BERT, `token_type_ids`, each `N L`."""
        second = [e.second for e in examples]
        found = self._tokenizer(
            [e.text for e in examples],
            second if any(second) else None,
            padding=True,
            truncation=True,
            max_length=self._length,
            return_tensors="pt",
        )
        return {name: tensor.to(device) for name, tensor in found.items()}


def write_base(folder: Path, out: Path) -> None:
    """Write encoder and tokenizer of a BERT or MPNet without its pooler, which no task uses."""
    from transformers import AutoTokenizer

    model = load_encoder(folder)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)


def load_encoder(folder: Path) -> Any:
    """The encoder of a checkpoint."""
    return load_model("AutoModel", folder, add_pooling_layer=False)


def pooled(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """`N L -> N D`."""
    hidden_NLD = model(**batch).last_hidden_state
    mask_NL1 = batch["attention_mask"].unsqueeze(-1).to(hidden_NLD.dtype)
    features_ND: Tensor = (hidden_NLD * mask_NL1).sum(1) / mask_NL1.sum(1)
    return features_ND


@torch.inference_mode()
def text_features(reader: Reader, model: Any, examples: Sequence[Example], device: str = "cpu") -> Tensor:
    """`N D` of an encoder, on the CPU; texts of similar length share a batch."""
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].text) + len(examples[i].second))
    there, parts = model.to(device), []
    for start in range(0, len(order), _TESTED):
        batch = reader([examples[i] for i in order[start : start + _TESTED]], device)
        parts.append(pooled(there, batch).float().cpu())
    return torch.cat(parts)[torch.tensor(order).argsort()]


def finetune(
    reader: Reader,
    base: Path,
    head: Head | ClipHead,
    examples: Sequence[Example],
    how: Training,
    out: Path,
    on_step: OnStep = lambda: None,
) -> None:
    """Train an expert and write it: a checkpoint like the base's, or a PEFT adapter.

    Args:
        head: frozen; takes no part in the merge.
    """
    model = trainable(load_encoder(base), how, lambda name: name.startswith(_FIRST_LAYER))
    frozen_head = head.to(how.device)

    def loss(index: Tensor) -> Tensor:
        some = [examples[i] for i in index.tolist()]
        logits_NC = frozen_head(pooled(model, reader(some, how.device)))
        labels_N = torch.tensor([e.label for e in some], device=how.device)
        return nn.functional.cross_entropy(logits_NC.float(), labels_N)

    train_by(model, loss, len(examples), how, out, on_step)
