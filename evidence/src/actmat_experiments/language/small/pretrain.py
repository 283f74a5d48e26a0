"""The base of the small suite: its tokenizer, a small T5, and pretraining on texts with spans cut out and on questions.

C. Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text transformer", JMLR 2020.

    text      a b c d e f g h
    prompt    a <0> d e <1> h        spans are replaced by sentinels, each used once, in order
    target    <0> b c <1> f g <2>    the spans, each behind its sentinel, and a last sentinel
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actmat.extras.demo.tasks import generator_for
from actmat_experiments.harness.training import Schedule, descend
from actmat_experiments.language.exams import Encoded
from actmat_experiments.language.train import summed_loss

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
_N_SENTINELS = 16


def train_tokenizer(corpus: Sequence[str], vocabulary: int, out: Path) -> None:
    """Write a tokenizer that `AutoTokenizer.from_pretrained` loads: pad 0, end 1, unknown 2, sentinels last.

    Args:
        vocabulary: number of tokens, special ones included; a small corpus may give fewer.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, END, UNKNOWN]
    extra = [f"<extra_id_{n}>" for n in range(_N_SENTINELS)]
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(extra),
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=extra,
    )
    wrapped.save_pretrained(out)


def sentinels(tokenizer: Any) -> list[int]:
    """Ids of the sentinels, in their order."""
    return [tokenizer.convert_tokens_to_ids(f"<extra_id_{n}>") for n in range(_N_SENTINELS)]


def corrupt(
    ids: Sequence[int],
    sentinels: Sequence[int],
    generator: torch.Generator,
    *,
    density: float = 0.15,
    mean_span: float = 3.0,
) -> tuple[list[int], list[int]]:
    """Prompt and target of a text, both without an end token.

    Args:
        ids: at least two tokens.
        sentinels: tokens that stand for spans; one more than there are spans is needed, fewer make fewer spans.
        density: share of tokens in spans; at least one token is in a span, at least one is not.
        mean_span: mean length of a span.

    Raises:
        ValueError: fewer than two tokens or sentinels.
    """
    if len(ids) < 2 or len(sentinels) < 2:
        raise ValueError(f"{len(ids)} tokens and {len(sentinels)} sentinels: two of each are the least")
    n_hidden = min(max(round(len(ids) * density), 1), len(ids) - 1)
    n_shown = len(ids) - n_hidden
    n_spans = min(max(round(n_hidden / mean_span), 1), n_hidden, n_shown + 1, len(sentinels) - 1)
    spans = span_lengths(n_hidden, n_spans, generator)
    gaps = span_lengths(n_shown + 2, n_spans + 1, generator)  # the outer two may be empty: one less each
    gaps[0] -= 1
    gaps[-1] -= 1
    prompt, target, at = list[int](), list[int](), 0
    for sentinel, gap, span in zip(sentinels, gaps[:-1], spans, strict=False):
        prompt += [*ids[at : at + gap], sentinel]
        target += [sentinel, *ids[at + gap : at + gap + span]]
        at += gap + span
    return [*prompt, *ids[at:]], [*target, sentinels[n_spans]]


def span_lengths(total: int, parts: int, generator: torch.Generator) -> list[int]:
    """`parts` lengths of at least 1 that add up to `total >= parts`, all such divisions equally likely."""
    cuts = torch.randperm(total - 1, generator=generator)[: parts - 1].add(1).sort().values.tolist()
    ends = [*cuts, total]
    return [end - begin for begin, end in zip([0, *cuts], ends, strict=True)]


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes of the small T5 (v1.0: ReLU, tied embeddings).

    Args:
        vocabulary: tokens, special ones included.
        d_model, d_kv, d_ff, heads: of every layer.
        layers: of the encoder, and again of the decoder.
        dropout: of all layers.
    """

    vocabulary: int = 4096
    d_model: int = 64
    d_kv: int = 16
    d_ff: int = 256
    heads: int = 4
    layers: int = 2
    dropout: float = 0.0


@dataclass(frozen=True, slots=True)
class Pretraining:
    """Training of the base.

    Args:
        updates: steps of Adafactor; warm-up over a tenth, then half a cosine to zero.
        batch_size: texts or questions per update.
        learning_rate: its peak, relative to the size of each tensor.
        supervised: share of updates on questions, over the whole run; the others are on texts.
        supervised_items: training items per task that the mixture may see.
        max_length: tokens of a prompt.
    """

    updates: int = 400
    batch_size: int = 32
    learning_rate: float = 2e-2
    supervised: float = 1.0
    supervised_items: int = 300
    max_length: int = 48


def new_model(architecture: Architecture, *, seed: int) -> Any:
    """A T5 with random weights."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=architecture.vocabulary,
        d_model=architecture.d_model,
        d_kv=architecture.d_kv,
        d_ff=architecture.d_ff,
        num_heads=architecture.heads,
        num_layers=architecture.layers,
        num_decoder_layers=architecture.layers,
        dropout_rate=architecture.dropout,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return T5ForConditionalGeneration(config)


def pretrain(
    model: Any,
    texts: Sequence[Sequence[int]],
    questions: Sequence[Encoded],
    sentinels: Sequence[int],
    settings: Pretraining,
    *,
    seed: int,
    device: str = "cpu",
    on_step: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Train all weights; returns the loss per token of every update, on texts and on questions.

    By Adafactor, as T5 was: a step is relative to the root mean square of its tensor. T5's embeddings are eight times
    as large as its other weights at this width, and steps of one size for all leave them where they were drawn.

    Args:
        model: it is changed.
        texts: token ids, without an end token.
        sentinels: tokens that stand for spans.
        seed: order, spans and mixture.
    """
    model.to(device).train()
    usable = [text for text in texts if len(text) >= 2]
    measured: dict[str, list[float]] = {"texts": [], "questions": []}

    def losses(_: int) -> Iterator[Tensor]:
        for kind, batch in _batches(usable, questions, sentinels, settings, model.config.eos_token_id, seed):
            loss = summed_loss(model, batch, model.config.pad_token_id, device) / sum(len(i.target) for i in batch)
            measured[kind].append(loss.item())
            yield loss

    schedule = Schedule(settings.updates, settings.batch_size, settings.learning_rate, optimizer="adafactor")
    descend(list(model.parameters()), losses, settings.updates, schedule, on_step)
    return measured


def _batches(
    texts: Sequence[Sequence[int]],
    questions: Sequence[Encoded],
    sentinels: Sequence[int],
    settings: Pretraining,
    end: int,
    seed: int,
) -> Iterator[tuple[str, list[Encoded]]]:
    """One batch per update and its kind, "texts" or "questions", drawn from items of similar length."""
    spans = generator_for(seed, "spans")
    order = random.Random(f"{seed}/pretraining")
    of_texts, of_questions = (
        _similar(lengths, settings.batch_size, order)
        for lengths in ([min(len(t), settings.max_length) for t in texts], [len(q.prompt) for q in questions])
    )
    for _ in range(settings.updates):
        if order.random() < settings.supervised:
            yield "questions", [questions[n] for n in next(of_questions)]
        else:
            chosen = [texts[n][: settings.max_length - 1] for n in next(of_texts)]
            yield "texts", [_corrupted(text, sentinels, end, spans) for text in chosen]


def _corrupted(text: Sequence[int], sentinels: Sequence[int], end: int, generator: torch.Generator) -> Encoded:
    prompt, target = corrupt(text, sentinels, generator)
    return Encoded((*prompt, end), ((*target, end),), 0)


def _similar(lengths: Sequence[int], batch_size: int, order: random.Random, pool: int = 16) -> Iterator[list[int]]:
    """Endless batches of positions: pools of random items are sorted by length, cut, and given in random order."""
    while True:
        shuffled = list(range(len(lengths)))
        order.shuffle(shuffled)
        for begin in range(0, len(shuffled), pool * batch_size):
            members = sorted(shuffled[begin : begin + pool * batch_size], key=lambda n: lengths[n])
            batches = [members[at : at + batch_size] for at in range(0, len(members), batch_size)]
            order.shuffle(batches)
            yield from batches
