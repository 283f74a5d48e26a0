"""A small vocabulary, trained on the corpus: byte-level pairs of lower-case text, with T5's special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["END", "PAD", "sentinels", "train_tokenizer"]

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
