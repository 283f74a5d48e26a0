"""Unlabeled inputs of every expert, prepared once: half to search with, half for the final comparison.

If statistics are measured, half of the inputs to search with are set apart for them: a merge by statistics is nearer to
the experts on inputs that were measured than on others, so these inputs would favor it.

Causal language models continue each input themselves, and encoder-decoder models write their own target, so that a
candidate is compared on the expert's own words, in one forward pass (teacher forcing).

Shapes: `N` samples, `L` tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from actmat.diagnostics.answers import UNENDED
from actmat.errors import StatisticsError
from actmat.extras.models.loading import Loaded

DECODER = "decoder_"
"""Beginning of the keyword arguments of an encoder-decoder model's decoder."""
COLUMNS = "logits_to_keep"
"""Keyword argument of causal models of transformers: columns of the inputs for which logits are computed."""
SIMILAR = 0.75
"""Least share of the longest sample's tokens that another of its batch has."""


@dataclass(frozen=True)
class InputBatch:
    """Samples of one expert.

    Args:
        arguments: keyword arguments of the model, without labels.
        counted: True for the predictions that count, in the shape of the logits without classes; None: all.
        labels: class or token labels in the same shape, where they are known; -100 counts as unknown.
        shared: keyword arguments that are not by sample: the prompts of the classes.
    """

    arguments: Mapping[str, Tensor]
    counted: Tensor | None
    labels: Tensor | None
    shared: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def keywords(self) -> dict[str, Tensor]:
        """All keyword arguments of the model."""
        return {**self.arguments, **self.shared}

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(next(iter(self.arguments.values())))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample up to the last that is no padding; 1 where there is no mask of tokens."""
        mask = self.arguments.get("attention_mask")
        if mask is None or mask.ndim != 2:
            return [1] * self.samples
        return ((mask != 0) * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(1).clamp(min=1).tolist()

    def rows(self, index: Sequence[int]) -> InputBatch:
        """Some of the samples."""
        arguments = {k: v[list(index)] for k, v in self.arguments.items()}
        counted, labels = (None if v is None else v[list(index)] for v in (self.counted, self.labels))
        return InputBatch(arguments, counted, labels, self.shared)

    def with_few_logits(self) -> InputBatch:
        """The batch for a causal model that is asked for logits only in columns with a prediction that counts."""
        if self.counted is None:
            return self
        columns = self.counted.any(0).nonzero()[:, 0]
        labels = None if self.labels is None else self.labels[:, columns]
        return replace(self, counted=self.counted[:, columns], labels=labels, shared={**self.shared, COLUMNS: columns})

    def without_padding(self) -> InputBatch:
        """The batch without the columns at its end that are padding of every sample."""
        mask = self.arguments.get("attention_mask")
        if mask is None or mask.ndim != 2:
            return self
        width = max(self.lengths)
        cut = {k: v[:, :width] if v.shape[:2] == mask.shape and not k.startswith(DECODER) else v
               for k, v in self.arguments.items()}  # fmt: skip
        if any(k.startswith(DECODER) for k in cut):
            return replace(self, arguments=cut)
        counted, labels = (v[:, :width] if v is not None and v.shape == mask.shape else v
                           for v in (self.counted, self.labels))  # fmt: skip
        return replace(self, arguments=cut, counted=counted, labels=labels)


@dataclass(frozen=True)
class ExpertInputs:
    """Inputs of one expert: `search` to choose with, `final` to compare the chosen merge with others, and `measured`,
    which only statistics are measured on.
    """

    label: str
    search: Sequence[InputBatch]
    final: Sequence[InputBatch]
    measured: Sequence[InputBatch] = ()


T = TypeVar("T")


def dealt(samples: Sequence[T], *, measuring: bool) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
    """Samples to search with, for the final comparison, and to measure; a single one to measure serves the search too.

    >>> dealt("abcdef", measuring=True), dealt("abcdef", measuring=False)
    (('c', 'bdf', 'ae'), ('ace', 'bdf', ''))
    """
    measured = samples[0::4] if measuring else samples[:0]
    return (samples[2::4] or measured) if measuring else samples[0::2], samples[1::2], measured


def prepare_inputs(
    label: str, loaded: Loaded, source: Sequence[Mapping[str, Tensor]], *, new_tokens: int = 16, measuring: bool = False
) -> ExpertInputs:
    """Deal the samples of batches that are ready, and let the expert write continuations if it is a generating model.

    Args:
        label: name of the expert.
        loaded: the expert.
        source: keyword arguments of the model.
        new_tokens: tokens that a generating model adds to an input; 0: the input's own tokens are predicted.
        measuring: set every second input of the search apart to measure statistics on.

    Raises:
        StatisticsError: too few inputs for a sample in each part.
    """
    device = next(loaded.model.parameters()).device
    whole = [completed(loaded, {k: v.to(device) for k, v in b.items()}, new_tokens) for b in source]
    samples = [(number, n) for number, batch in enumerate(whole) for n in range(batch.samples)]
    check_enough(label, len(samples), "the given batches")

    def batches(part: Sequence[tuple[int, int]]) -> list[InputBatch]:
        chosen = {number: [n for m, n in part if m == number] for number, _ in part}
        return [whole[number].rows(rows) for number, rows in chosen.items()]

    return ExpertInputs(label, *map(batches, dealt(samples, measuring=measuring)))


def check_enough(label: str, samples: int, where: str) -> None:
    """Raise `StatisticsError` for fewer than two samples."""
    if samples < 2:
        raise StatisticsError(
            f"{where}: expected at least 2 inputs for expert '{label}' (eight or more are better): one half for the "
            "search and one for the final comparison. For 'actmat merge --data' one input is enough"
        )


def of_similar_lengths(batches: Sequence[InputBatch], model: Any) -> list[InputBatch]:
    """The same samples in batches of similar lengths, with less padding, and few logits if the model allows it."""
    out = []
    for batch in batches:
        groups: list[list[int]] = []
        for n in sorted(range(batch.samples), key=lambda n: -batch.lengths[n]):
            if groups and batch.lengths[n] >= SIMILAR * batch.lengths[groups[-1][0]]:
                groups[-1].append(n)
            else:
                groups.append([n])
        out += [batch.rows(group).without_padding() for group in groups]
    return [b.with_few_logits() for b in out] if takes_columns(model) else out


def labeled_by_answers(written: InputBatch, right: InputBatch) -> tuple[InputBatch, InputBatch]:
    """Own answers to texts, whose labels are the right ones where they begin with them; and the other right answers.

    A model that is led through an own answer is led through the right one that it begins with.
    """
    assert written.labels is not None, "the tokens of its answer"
    labels, others = torch.full_like(written.labels, -100), []
    for n, tokens in enumerate(() if right.labels is None else right.labels):
        places = (tokens != -100).nonzero()[:, 0]
        if torch.equal(written.labels[n, places[places < written.labels.shape[1]]], tokens[places]):
            labels[n, places] = tokens[places]
        else:
            others.append(n)
    return replace(written, labels=labels), right.rows(others)


def cut_unended(batch: InputBatch, model: Any) -> tuple[InputBatch, list[bool]]:
    """Own answers, of which those without an end count up to `UNENDED` tokens; and which these are.

    A causal model need not read beyond the last prediction that counts.
    """
    assert batch.labels is not None, "the tokens of its answer"
    assert batch.counted is not None, "of which some count"
    is_end = torch.isin(batch.labels, torch.tensor(_ends(model), device=batch.labels.device))
    unended = ~(is_end & batch.counted).any(1)
    counted = batch.counted & ((batch.counted.cumsum(1) <= UNENDED) | ~unended[:, None])
    arguments = dict(batch.arguments)
    if is_causal(model):
        arguments["attention_mask"] = arguments["attention_mask"] * counted.flip(1).cummax(1).values.flip(1)
    cut = replace(batch, arguments=arguments, counted=counted, labels=batch.labels.masked_fill(~counted, -100))
    return cut, unended.tolist()


def takes_columns(model: Any) -> bool:
    """True if a model may be asked for the logits of some columns of its inputs."""
    inner = getattr(model, "get_base_model", lambda: model)()
    return COLUMNS in inspect.signature(inner.forward).parameters


def completed(loaded: Loaded, keywords: Mapping[str, Tensor], new_tokens: int) -> InputBatch:
    """A batch with the expert's own continuations, and a mask of the predictions that count."""
    arguments = dict(keywords)
    labels = arguments.pop("labels", None)
    model: Any = getattr(loaded.model, "get_base_model", lambda: loaded.model)()
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        if labels is not None:  # targets of the data set: teacher forcing on those
            return InputBatch(arguments, labels != -100, labels)
        return _with_target(model, arguments, new_tokens or 1)
    mask = arguments.get("attention_mask")
    if is_causal(model) and mask is not None:
        if labels is not None and labels.ndim == 2:  # texts that end with given answers
            labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
            return InputBatch(arguments, labels != -100, labels)
        if new_tokens and model.can_generate():
            return _continued(model, arguments, new_tokens)
        tokens = arguments["input_ids"][:, 1:].masked_fill(mask[:, 1:] == 0, -100)
        return InputBatch(arguments, mask.bool(), torch.nn.functional.pad(tokens, (0, 1), value=-100))
    by_token = type(model).__name__.endswith(("ForMaskedLM", "ForTokenClassification"))
    counted = mask.bool() if by_token and mask is not None else None
    return InputBatch(arguments, counted, labels)


def is_causal(model: Any) -> bool:
    """True for a model of transformers, or an adapter on one, that continues texts."""
    inner = getattr(model, "get_base_model", lambda: model)()
    return type(inner).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def _with_target(model: Any, arguments: dict[str, Tensor], new_tokens: int) -> InputBatch:
    """An encoder-decoder model's own answer as the target of its decoder."""
    asked = {k: v for k, v in arguments.items() if not k.startswith("decoder_")}
    with torch.no_grad():
        written_NL = model.generate(**asked, max_new_tokens=new_tokens, do_sample=False, num_beams=1)
    read_NL, next_NL = written_NL[:, :-1], written_NL[:, 1:]
    live_NL = _until_end(next_NL, model)
    decoder = {"decoder_input_ids": read_NL, "decoder_attention_mask": live_NL.to(torch.long)}
    return InputBatch({**asked, **decoder}, live_NL, next_NL.masked_fill(~live_NL, -100))


def _continued(model: Any, arguments: Mapping[str, Tensor], new_tokens: int) -> InputBatch:
    """Each input followed by the model's greedy continuation; only predictions of its tokens count.

    Inputs are padded on the right before and after, because a causal model needs no positions then; the continuation
    itself is written with padding on the left, as `generate` wants it.
    """
    ids_NL, mask_NL = arguments["input_ids"], arguments["attention_mask"].bool()
    lengths = mask_NL.sum(-1).tolist()
    rows = [ids[m] for ids, m in zip(ids_NL, mask_NL, strict=True)]
    longest = max(lengths)
    left = [torch.nn.functional.pad(r, (longest - len(r), 0), value=0) for r in rows]
    seen = [torch.nn.functional.pad(torch.ones_like(r), (longest - len(r), 0)) for r in rows]
    with torch.no_grad():
        written_NL = model.generate(
            input_ids=torch.stack(left), attention_mask=torch.stack(seen), max_new_tokens=new_tokens,
            do_sample=False, num_beams=1, pad_token_id=model.generation_config.pad_token_id or 0,
        )  # fmt: skip
    new_NL = written_NL[:, longest:]
    live_NL = _until_end(new_NL, model)
    whole = [torch.cat([r, n[m]]) for r, n, m in zip(rows, new_NL, live_NL, strict=True)]
    width = max(map(len, whole))
    counted = ids_NL.new_zeros((len(whole), width), dtype=torch.bool)
    out, labels = ids_NL.new_zeros((len(whole), width)), ids_NL.new_full((len(whole), width), -100)
    for n, (row, before) in enumerate(zip(whole, lengths, strict=True)):
        out[n, : len(row)] = row
        counted[n, before - 1 : len(row) - 1] = True
        labels[n, before - 1 : len(row) - 1] = row[before:]
    is_text = torch.arange(width, device=out.device) < torch.tensor([len(r) for r in whole], device=out.device)[:, None]
    return InputBatch({"input_ids": out, "attention_mask": is_text.to(torch.long)}, counted, labels)


def _until_end(ids_NL: Tensor, model: Any) -> Tensor:
    """True up to the first end token of every row, which counts."""
    is_end = torch.isin(ids_NL, torch.tensor(_ends(model), device=ids_NL.device))
    return (is_end.cumsum(-1) - is_end.to(torch.long)) == 0


def _ends(model: Any) -> list[int]:
    """Tokens that end an answer."""
    ends = getattr(model, "get_base_model", lambda: model)().generation_config.eos_token_id
    return [ends] if isinstance(ends, int) else list(ends or ())
