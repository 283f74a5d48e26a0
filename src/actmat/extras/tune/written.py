"""Prompts that experts write themselves, from the start of the user's turn in their template (`--data self`).

An expert that was trained on whole texts writes prompts of its task. One that was trained on answers only writes what
the base writes, and is refused: its prompts are about as probable under the base. Prompts may repeat private texts of
the training, so that only their number, seed and hash are recorded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from actmat.diagnostics.model import WRITTEN
from actmat.errors import StatisticsError
from actmat.extras.collect.data import MESSAGES, SELF, TEXT_COLUMNS, DataOptions, Row, pad_token
from actmat.extras.models.chats import render_chats
from actmat.extras.models.loading import Loaded, from_files
from actmat.extras.tune.live import Loader
from actmat.progress import Progress

MOST = 32
"""Prompts that an expert writes at most."""
LONGEST = 96
"""Tokens of a prompt at most; a longer one ends there."""
AT_ONCE = 32
"""Prompts written at a time."""
DIFFERENT = 0.5
"""Least share of different prompts among those that were sampled: one that learnt answers only repeats these."""
MORE_PROBABLE = 1.0
"""Nats per token by which an expert's prompts must be more probable under it than under the base."""
_MARK = "\x1fprompt\x1f"
"""Stands for the prompt in a template."""


@dataclass(frozen=True)
class WrittenPrompts:
    """Prompts of an expert.

    Args:
        texts: different ones, without the template.
        start: tokens of the template before the prompt.
        tokens: of each prompt, as it was written.
        log_p: log-probabilities of the tokens under the expert, summed over all prompts.
        different: share of different prompts among all that were sampled.
    """

    texts: tuple[str, ...]
    start: Sequence[int]
    tokens: Sequence[Sequence[int]]
    log_p: float
    different: float

    def gain(self, base: nn.Module) -> float:
        """Nats per token by which the prompts are more probable under the expert than under the base."""
        return (self.log_p - _log_p(base, self.start, self.tokens)) / max(1, sum(map(len, self.tokens)))

    def inputs(self, options: DataOptions, seed: int) -> tuple[DataOptions, list[Row]]:
        """The prompts as rows, and options whose location is the record of them."""
        digest = hashlib.sha256("\0".join(self.texts).encode()).hexdigest()[:16]
        location = f"{WRITTEN}{len(self.texts)} prompts, seed {seed}, SHA-256 {digest})"
        rows: list[Row] = [{TEXT_COLUMNS[0]: text} for text in self.texts]
        if options.template is None:
            rows = [{MESSAGES: [{"role": "user", "content": text}]} for text in self.texts]
        return dataclasses.replace(options, location=location, text_column=None), rows


def write_own(
    loader: Loader, progress: Progress, places: Mapping[str, str], options: Mapping[str, DataOptions], seed: int
) -> tuple[dict[str, WrittenPrompts], dict[str, float]]:
    """Prompts of each expert, and the nats per token by which they are more probable than under the base.

    Args:
        loader: of the models.
        progress: receives callbacks.
        places: expert -> its location.
        options: expert -> number of prompts, and the template around them.
        seed: of the samples.

    Raises:
        StatisticsError: a model that writes no texts, or a base that is not known.
    """
    prompts = {}
    for label, place in places.items():
        number = options[label].max_samples or MOST
        progress.doing(f"prompts of {label}", number)
        loaded = loader.load(place)
        prompts[label] = write_prompts(loaded, options[label], number, seed)
    with _base_of(loaded, loader) as base:
        return prompts, {label: written.gain(base) for label, written in prompts.items()}


def check_written(prompts: Mapping[str, WrittenPrompts], gains: Mapping[str, float]) -> None:
    """Raise `StatisticsError` for experts that do not write prompts of their tasks."""
    problems = [text for label, gain in gains.items() if (text := _refusal(label, prompts[label], gain))]
    if problems:
        raise StatisticsError("Experts do not write prompts of their tasks.", problems)


def write_prompts(loaded: Loaded, options: DataOptions, number: int, seed: int) -> WrittenPrompts:
    """Prompts of a model, sampled at temperature 1 from the most probable 95 %; at most twice `number` are tried.

    Raises:
        StatisticsError: the model writes no texts, or its template is not known.
    """
    model: Any = loaded.model
    if not getattr(model, "can_generate", lambda: False)() or getattr(model.config, "is_encoder_decoder", False):
        raise StatisticsError(f"{type(model).__name__} does not write prompts. Fix: --data NAME=PROMPT or a file")
    tokenizer = from_files("AutoTokenizer", loaded)
    pad_token(tokenizer)
    start, stops, end = _template(tokenizer, options.template)
    prompts: dict[str, list[int]] = {}
    tried = 0
    ids_NL = torch.tensor([start] * AT_ONCE, device=next(model.parameters()).device)
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(seed)
        for _ in range(0, 2 * number, AT_ONCE):
            out_NL = model.generate(
                ids_NL, attention_mask=torch.ones_like(ids_NL), do_sample=True, temperature=1.0, top_p=0.95, top_k=0,
                num_beams=1, repetition_penalty=1.0, max_new_tokens=LONGEST, eos_token_id=sorted(stops),
                pad_token_id=tokenizer.pad_token_id,
            )  # fmt: skip
            tried += len(out_NL)
            for tokens in out_NL[:, len(start) :].tolist():
                length = next((n for n, t in enumerate(tokens) if t in stops), len(tokens))
                text = tokenizer.decode(tokens[:length], skip_special_tokens=True).partition(end)[0].strip()
                if text:
                    prompts.setdefault(text, tokens[: length + 1])
            if len(prompts) >= number:
                break
    texts, written = tuple(prompts)[:number], list(prompts.values())[:number]
    return WrittenPrompts(texts, start, written, _log_p(model, start, written), len(prompts) / tried)


def _template(tokenizer: Any, template: str | None) -> tuple[list[int], set[int], str]:
    """Tokens before the prompt, those that end it, and the text that follows it.

    Raises:
        StatisticsError: no template, or nothing before the prompt.
    """
    if template is not None:
        before, _, after = template.partition("{}")
        start = tokenizer(before)["input_ids"]
    elif getattr(tokenizer, "chat_template", None):
        chat = [{"role": "user", "content": _MARK}]
        before, _, after = render_chats(tokenizer, [chat], SELF)[0].partition(_MARK)
        start = tokenizer(before, add_special_tokens=False)["input_ids"]
    else:
        raise StatisticsError(
            f"{tokenizer.name_or_path}: the tokenizer has no chat template that shows where a prompt starts. Fix: "
            "--template 'Question: {}\\nAnswer:'"
        )
    if not start:
        raise StatisticsError("The template begins with the prompt, and the tokenizer has no first token of a text.")
    special = set(tokenizer.all_special_ids)
    following = tokenizer(after, add_special_tokens=False)["input_ids"][:1]
    ends = {tokenizer.eos_token_id, *(t for t in following if t in special)} - {None}
    return start, ends, after.strip() or "\0"


def _log_p(model: Any, start: Sequence[int], tokens: Sequence[Sequence[int]]) -> float:
    """Log-probability of all tokens behind `start`; -inf for a token that the model does not have."""
    total, device = 0.0, next(model.parameters()).device
    for text in tokens:
        ids_1L = torch.tensor([[*start, *text]], device=device)
        with torch.inference_mode():
            logits_LC: Tensor = model(input_ids=ids_1L).logits[0, len(start) - 1 : -1].float()
        if max(text) >= logits_LC.shape[-1]:
            return -torch.inf
        total += float(logits_LC.log_softmax(-1).gather(-1, ids_1L[0, len(start) :, None]).double().sum())
    return total


@contextlib.contextmanager
def _base_of(loaded: Loaded, loader: Loader) -> Iterator[nn.Module]:
    """The base of an expert: without its adapter, or loaded.

    Raises:
        StatisticsError: the base is not known.
    """
    model: Any = loaded.model
    if loaded.adapter is not None:
        with model.disable_adapter():
            yield model
    elif not loader.base:
        raise StatisticsError(f"'{SELF}' compares prompts with the base's, which is not given. Fix: --base BASE")
    else:
        yield loader.load(loader.base).model


def _refusal(label: str, written: WrittenPrompts, gain: float) -> str:
    """The reason why the prompts are not those of a task; empty if they are."""
    fix = f"Fix: --data {label}=PROMPT or a file of prompts of its task"
    if written.different < DIFFERENT:
        return (
            f"'{label}' repeats itself: only {written.different:.0%} of the prompts that it writes are different. {fix}"
        )
    if gain < MORE_PROBABLE:
        return (
            f"'{label}' writes what the base writes: its prompts are more probable under it by {gain:.2f} nats per "
            f"token, expected {MORE_PROBABLE} or more. Likely cause: it was trained on answers only. {fix}"
        )
    return ""
