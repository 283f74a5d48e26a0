"""A language model that answers questions: which answers are right, supervised fine-tuning, and the base out of GGUF.

An answer is right if greedy decoding writes it, token by token, with its end. One pass over question and right answer
tells: greedy decoding goes along a text exactly as long as the most probable token is the next one of it.

Shapes: `N` questions, `L` tokens, `T` tokens of all answers, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from actmat.errors import CheckpointError
from actmat_experiments.harness.models import LOADING, load_model
from actmat_experiments.harness.training import OnStep, Training, train_by, trainable
from actmat_experiments.pretrained.generated import Question

_TESTED = 64
_FROZEN = ("embed", "lm_head")
"""Parts of the names of weights that full fine-tuning leaves as they are: embeddings, which are the head as well."""


class Coded(NamedTuple):
    """Tokens of a question and of an answer to it."""

    prompt: list[int]
    answer: list[int]


class Coder:
    """Questions to tokens.

    Args:
        folder: of the tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")

    def __call__(self, questions: Sequence[Question]) -> list[Coded]:
        """Each question with its right answer."""
        return [Coded(self._tokens(q.prompt), self._tokens(q.answer)) for q in questions]

    def _tokens(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return found


@dataclass(frozen=True, slots=True)
class Batch:
    """Questions with answers, padded on the right.

    Args:
        inputs: `input_ids` and `attention_mask`, `N L`.
        row_T, column_T: the places whose outputs predict the answers' tokens.
        target_T: these tokens.
    """

    inputs: Mapping[str, Tensor]
    row_T: Tensor
    column_T: Tensor
    target_T: Tensor


def collated(some: Sequence[Coded], device: str = "cpu") -> Batch:
    """One batch of them."""
    longest = max(len(c.prompt) + len(c.answer) for c in some)
    ids_NL = torch.zeros(len(some), longest, dtype=torch.long)
    mask_NL = torch.zeros_like(ids_NL)
    places = []
    for row, (prompt, answer) in enumerate(some):
        ids_NL[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        mask_NL[row, : len(prompt) + len(answer)] = 1
        places += [(row, len(prompt) - 1 + i, token) for i, token in enumerate(answer)]
    row_T, column_T, target_T = torch.tensor(places).to(device).unbind(1)
    inputs = {"input_ids": ids_NL.to(device), "attention_mask": mask_NL.to(device)}
    return Batch(inputs, row_T, column_T, target_T)


def answer_logits(model: Any, batch: Batch) -> Tensor:
    """`T V`, float32; the head is applied to the answers' places only."""
    hidden_NLD = model.get_decoder()(**batch.inputs).last_hidden_state
    logits_TV: Tensor = model.get_output_embeddings()(hidden_NLD[batch.row_T, batch.column_T]).float()
    return logits_TV


@torch.inference_mode()
def logits_of(model: Any, coded: Sequence[Coded], device: str = "cpu") -> Tensor:
    """`T V` of all answers in one batch, on the CPU."""
    return answer_logits(model.to(device), collated(coded, device)).cpu()


@torch.inference_mode()
def right(model: Any, coded: Sequence[Coded], device: str = "cpu", together: int = _TESTED) -> Tensor:
    """Bool `N`: whether greedy decoding answers with exactly these tokens.

    Args:
        together: questions of one pass.
    """
    found, model = [], model.to(device)
    for start in range(0, len(coded), together):
        batch = collated(coded[start : start + together], device)
        wrong_T = answer_logits(model, batch).argmax(-1) != batch.target_T
        n_wrong_N = torch.zeros(len(batch.inputs["input_ids"]), dtype=torch.long, device=device)
        found.append(n_wrong_N.index_add(0, batch.row_T, wrong_T.long()).eq(0).cpu())
    return torch.cat(found)


@torch.inference_mode()
def greedy(model: Any, coder: Coder, questions: Sequence[Question], longest: int, device: str = "cpu") -> list[Coded]:
    """The questions with the model's own answers, by greedy decoding up to an end of turn or `longest` tokens."""
    tokenizer = coder.tokenizer
    inputs = tokenizer([q.prompt for q in questions], add_special_tokens=False, padding=True, return_tensors="pt")
    inputs = {name: inputs[name].to(device) for name in ("input_ids", "attention_mask")}
    written = model.to(device).generate(**inputs, do_sample=False, max_new_tokens=longest, min_new_tokens=1)
    answers = written[:, inputs["input_ids"].shape[1] :].tolist()
    end = tokenizer.eos_token_id
    cut = [answer[: answer.index(end) + 1] if end in answer else answer for answer in answers]
    return [Coded(c.prompt, answer) for c, answer in zip(coder(questions), cut, strict=True)]


def load_decoder(folder: Path) -> Any:
    """A checkpoint in float32, in evaluation mode."""
    return load_model("AutoModelForCausalLM", folder)


def write_base(folder: Path, out: Path, *, tied: bool = False) -> None:
    """Write the only GGUF file of a folder as a checkpoint: its weights, no longer quantized, and its tokenizer.

    Args:
        tied: the head is the embeddings, as the original's; a head that the file stores, too, is left out.

    Raises:
        CheckpointError: the folder has no GGUF file, or several.
    """
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise CheckpointError(f"{folder} has {len(files)} GGUF files, not one.")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with LOADING, torch.random.fork_rng(devices=[]):
        read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=files[0].name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=files[0].name)
        config = read.config
        if hasattr(config, "quantization_config"):  # the weights are no longer quantized
            del config.quantization_config
        if tied:
            read.get_output_embeddings().weight = read.get_input_embeddings().weight
            config.tie_word_embeddings = True
        model = type(read)(config)
        model.load_state_dict(read.state_dict())
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


def trainable_decoder(base: Path, how: Training) -> Any:
    """The base with LoRA factors, or with all weights but the embeddings set to be trained."""
    return trainable(load_decoder(base), how, lambda name: not any(part in name for part in _FROZEN))


def supervise(base: Path, coded: Sequence[Coded], how: Training, out: Path, on_step: OnStep = lambda: None) -> None:
    """Train an expert on right answers and write it: a checkpoint like the base's, or a PEFT adapter."""
    model = trainable_decoder(base, how)

    def loss(index: Tensor) -> Tensor:
        batch = collated([coded[i] for i in index.tolist()], how.device)
        return nn.functional.cross_entropy(answer_logits(model, batch), batch.target_T)

    train_by(model, loss, len(coded), how, out, on_step)
