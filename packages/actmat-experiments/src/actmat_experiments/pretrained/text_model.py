"""An encoder of texts behind a frozen head: features, fine-tuning, and the base out of a wheel's folder.

The feature is the mean of the last hidden states over the tokens, as the base was trained. Embeddings stay as they are;
no dropout. Shapes: `N` texts, `L` tokens, `D` features, `C` classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actmat.extras.demo.model import Head
from actmat.extras.demo.tasks import generator_for
from actmat_experiments.harness.progress import LOADING
from actmat_experiments.harness.results import Regime
from actmat_experiments.harness.training import OnStep, Schedule, descend
from actmat_experiments.pretrained.orders import order_of
from actmat_experiments.pretrained.text_tasks import Example
from actmat_experiments.vision.train import with_adapter

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
        """`input_ids`, `attention_mask` and `token_type_ids`, each `N L`."""
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
    """Write encoder and tokenizer of a BERT without its pooler, which no task uses."""
    from transformers import AutoTokenizer

    model = load_encoder(folder)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)


def load_encoder(folder: Path, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """The encoder of a checkpoint, or one of its config with other weights; float32, in evaluation mode.

    Args:
        tensors: named as in the folder's file.
    """
    from transformers import BertConfig, BertModel

    with LOADING:
        if tensors is None:
            return BertModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.float32).eval()
        config = BertConfig.from_pretrained(folder)
        return BertModel.from_pretrained(None, config=config, state_dict=dict(tensors), add_pooling_layer=False).eval()


def pooled(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """`N L -> N D`."""
    hidden_NLD = model(**batch).last_hidden_state
    mask_NL1 = batch["attention_mask"].unsqueeze(-1).to(hidden_NLD.dtype)
    features_ND: Tensor = (hidden_NLD * mask_NL1).sum(1) / mask_NL1.sum(1)
    return features_ND


@torch.inference_mode()
def text_features(
    reader: Reader, models: Sequence[Any], examples: Sequence[Example], device: str = "cpu"
) -> list[Tensor]:
    """`N D` of every encoder, on the CPU; texts of similar length share a batch."""
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].text) + len(examples[i].second))
    there = [model.to(device) for model in models]
    found: list[list[Tensor]] = [[] for _ in models]
    for start in range(0, len(order), _TESTED):
        batch = reader([examples[i] for i in order[start : start + _TESTED]], device)
        for model, parts in zip(there, found, strict=True):
            parts.append(pooled(model, batch).float().cpu())
    back = torch.tensor(order).argsort()
    return [torch.cat(parts)[back] for parts in found]


@dataclass(frozen=True, slots=True)
class TextTraining:
    """Training of an expert.

    Args:
        name: of the task; with the seed it decides the order of examples and the start of the factors.
        regime: all weights but the embeddings, or LoRA without dropout.
    """

    name: str
    seed: int
    schedule: Schedule
    regime: Regime = "full"
    rank: int = 16
    alpha: int = 0
    device: str = "cpu"


def finetune(
    reader: Reader,
    base: Path,
    head: Head,
    examples: Sequence[Example],
    how: TextTraining,
    out: Path,
    on_step: OnStep = lambda: None,
) -> None:
    """Train an expert and write it: a checkpoint like the base's, or a PEFT adapter.

    Args:
        head: frozen; takes no part in the merge.
    """
    schedule, model = how.schedule, load_encoder(base)
    if how.regime == "lora":
        model = with_adapter(model, how.rank, generator_for(how.seed, f"factors {how.name}"), how.alpha)
    else:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(_FIRST_LAYER))
    model, frozen_head = model.to(how.device), head.to(how.device)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def losses(first: int) -> Iterator[Tensor]:
        for index in order_of(len(examples), schedule, how.seed, how.name, first):
            some = [examples[i] for i in index]
            logits_NC = frozen_head(pooled(model, reader(some, how.device)))
            labels_N = torch.tensor([e.label for e in some], device=how.device)
            yield nn.functional.cross_entropy(logits_NC.float(), labels_N)

    descend(parameters, losses, schedule.steps(len(examples)), schedule, on_step)
    model.to("cpu").save_pretrained(out)
