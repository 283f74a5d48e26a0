"""Tokenizers without a pad token, of any ids, and of another vocabulary than the model's."""

import json
import shutil
from pathlib import Path

import pytest
from tests.helpers.merging import actmat
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actmat.errors import StatisticsError
from actmat.extras.collect.data import pad_token


def _tokenizer(words: dict[str, int], **special: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=next(iter(words))))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.mark.parametrize(
    ("moon", "special", "code", "says"),
    [
        (5, {}, 0, "padded by 'hello'"),  # no token 0
        (63, {"pad_token": "[PAD]"}, 0, ""),  # a pad token beyond the model's table is masked
        (500, {}, 1, "the token id 500, but the model has a table of 64 tokens"),
    ],
)
def test_ids_of_a_tokenizer_and_rows_of_the_model(
    moon: int, special: dict[str, str], code: int, says: str, family: Path, tmp_path: Path
) -> None:
    expert = shutil.copytree(family / "experts" / "math", tmp_path / "expert")
    _tokenizer({"hello": 3, "world": 4, "moon": moon}, **special).save_pretrained(expert)
    texts = ["hello moon", "hello", "world world world"]
    (tmp_path / "q.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    argv = ["statistics", "collect", str(expert), "--data", str(tmp_path / "q.jsonl"), "--out", str(tmp_path / "out")]
    done = actmat(argv)
    assert (done.code, says in done.err) == (code, True), done.err


def test_the_end_token_pads_only_if_the_vocabulary_has_it() -> None:
    tokenizer = _tokenizer({"a": 7, "b": 2, "</s>": 9}, eos_token="</s>")
    assert pad_token(tokenizer) == "</s>"
    assert pad_token(_tokenizer({"a": 7, "b": 2})) == "b"


def test_a_tokenizer_without_tokens_is_an_error() -> None:
    class Empty:
        pad_token = eos_token = unk_token = None
        name_or_path = "here"

        def get_vocab(self) -> dict[str, int]:
            return {}

    with pytest.raises(StatisticsError, match="here: the tokenizer has no tokens"):
        pad_token(Empty())
