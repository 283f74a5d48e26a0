"""Tokenizers without a pad token, of any ids, and of another vocabulary than the model's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.helpers.docs_fixture import write_models
from tests.helpers.merging import actmat
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actmat.errors import StatisticsError
from actmat.extras.collect.data import pad_token


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_models(tmp_path)
    texts = ["hello moon", "hello", "world world world"] * 4
    (tmp_path / "q.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    return tmp_path


def _tokenizer(words: dict[str, int], **special: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=next(iter(words))))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def _collected(place: Path, tokenizer: PreTrainedTokenizerFast) -> tuple[int, str]:
    tokenizer.save_pretrained(place / "experts" / "math")
    argv = ["statistics", "collect", str(place / "experts" / "math"), "--data", str(place / "q.jsonl")]
    done = actmat([*argv, "--out", str(place / "out")])
    return done.code, done.err


def test_statistics_are_measured_with_a_tokenizer_that_has_no_token_0(place: Path) -> None:
    code, said = _collected(place, _tokenizer({"hello": 3, "world": 4, "moon": 5}))
    assert code == 0, said
    assert "padded by 'hello'" in said


def test_a_pad_token_beyond_the_models_table_is_masked(place: Path) -> None:
    code, said = _collected(place, _tokenizer({"hello": 3, "world": 4, "moon": 63}, pad_token="[PAD]"))
    assert code == 0, said


def test_a_token_beyond_the_models_table_is_an_error_that_names_the_tokenizer(place: Path) -> None:
    code, said = _collected(place, _tokenizer({"hello": 3, "world": 4, "moon": 500}))
    assert code == 1
    assert "the token id 500, and the model has a table of 64 tokens" in said


def test_a_tune_runs_with_such_a_tokenizer(place: Path) -> None:
    for folder in ("base", "experts/math", "experts/code"):
        _tokenizer({"hello": 3, "world": 4, "moon": 5}).save_pretrained(place / folder)
    experts = [f for name in ("math", "code") for f in ("-e", str(place / "experts" / name))]
    argv = ["tune", "-b", str(place / "base"), *experts, "--data", str(place / "q.jsonl"), "--budget", "2"]
    done = actmat([*argv, "--out", str(place / "tuned")])
    assert done.code == 0, done.err


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
