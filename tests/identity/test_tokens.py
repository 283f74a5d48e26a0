"""Rows of token tables mean the same token in all inputs, or the merge is refused, or a note says what is lost."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.merging import actmat, llama_tensors, save_checkpoint

from actmat.checkpoints.sentencepiece import pieces
from actmat.identity.tokens import TokenInput, compare_tokens

ROWS = 20
WORDS = [f"w{i}" for i in range(16)]


def compared(*tokens: list[str], written: str = "base", merged: bool = True) -> str:
    """Problems and notes on the base and experts `a`, `b`, with these tokens, in one text."""
    inputs = [
        TokenInput(label, {t: i for i, t in enumerate(own)})
        for label, own in zip(("base", "a", "b"), tokens, strict=False)
    ]
    problems, notes = compare_tokens(inputs, written, ROWS, merged=merged)
    return " | ".join([*(f"PROBLEM {p}" for p in problems), *notes])


SWAPPED = [*WORDS[:4], WORDS[5], WORDS[4], *WORDS[6:]]
RENAMED = [*WORDS[:15], "<think>"]
TABLE = {
    "equal": ([WORDS, WORDS, WORDS], ""),
    "a token in padding": ([WORDS, [*WORDS, "<think>"]], "expert 'a' has 1 tokens that the written tokenizer"),
    "the same token in padding": ([WORDS, [*WORDS, "<t>"], [*WORDS, "<t>"]], 'of the base, lacks: "<t>" (row 16)'),
    "two tokens in one row": ([WORDS, [*WORDS, "<a>"], [*WORDS, "<b>"]], "PROBLEM expert 'a' and expert 'b'"),
    "a reserved token renamed": ([WORDS, RENAMED, WORDS], '"<think>" (row 15)'),
    "renamed in two ways": ([WORDS, RENAMED, [*WORDS[:15], "<tool>"]], "row 15 is '<think>' and '<tool>'"),
    "rows that moved": ([WORDS, SWAPPED], "PROBLEM the base and expert 'a' have different tokens in 2 rows"),
    "another tokenizer": ([WORDS, [f"x{i}" for i in range(16)]], "in 16 rows of their token tables"),
    "no tokens of the base": ([[], WORDS, SWAPPED], "PROBLEM expert 'a' and expert 'b'"),
    "two tokens, unknown ones of the base": ([[], [*WORDS, "<a>"], [*WORDS, "<b>"]], "PROBLEM expert 'a' and expert"),
    "tokens of one input": ([[], WORDS], ""),
    "tokens beyond the table": (
        [WORDS, [*WORDS, "p", "q", "r", "s", "beyond"], [*WORDS, "p", "q", "r", "s"]],
        '"r" (row 18) and 1 more',
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_tokens_of_two_inputs(case: str) -> None:
    tokens, said = TABLE[case]
    found = compared(*tokens)
    assert said in found if said else not found
    assert ("PROBLEM" in said or "is '<think>'" in said or "in 16 rows" in said) == ("PROBLEM" in found)
    assert "beyond" not in found
    assert "PROBLEM" not in compared(*tokens, merged=False), "nothing is mixed in tables that are kept"


def test_experts_that_agree_need_no_base() -> None:
    assert "PROBLEM" not in compared(WORDS, SWAPPED, SWAPPED, written="a")
    assert "PROBLEM" in compared(WORDS, SWAPPED, WORDS, written="a")


def field(number: int, content: bytes) -> bytes:
    """A field of a protobuf message that holds bytes."""
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def sentencepiece(tokens: list[str]) -> bytes:
    """A model of SentencePiece: pieces with their scores and kinds, and what it was trained with."""
    scored = (field(1, t.encode()) + b"\x15\0\0\x80\xbf\x18\x01" for t in tokens)
    return b"".join(field(1, piece) for piece in scored) + field(2, field(1, b"corpus.txt"))


def write_tokens(folder: Path, form: str, tokens: list[str]) -> None:
    """A tokenizer with these tokens, the last one added, in one of the forms that transformers writes."""
    (folder / "tokenizer.json").unlink()
    *plain, added = tokens
    last = len(plain)
    vocabulary = {t: i for i, t in enumerate(plain)}
    if form in ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"):
        (folder / form).write_bytes(sentencepiece(plain))
        (folder / "added_tokens.json").write_text(json.dumps({added: last}))
        return
    files: dict[str, dict[str, Any]] = {
        "fast": {"tokenizer.json": {"model": {"vocab": vocabulary}, "added_tokens": [{"id": last, "content": added}]}},
        "slow": {"vocab.json": vocabulary, "added_tokens.json": {added: last}},
        "decoder": {
            "tokenizer.json": {"model": {"vocab": [[t, 0.0] for t in plain]}},
            "tokenizer_config.json": {"added_tokens_decoder": {str(last): {"content": added}}},
        },
        "words": {"vocab.txt": "\n".join(tokens)},
    }
    for name, data in files[form].items():
        (folder / name).write_text(data if isinstance(data, str) else json.dumps(data))


@pytest.mark.parametrize("form", ["fast", "slow", "decoder", "words", "tokenizer.model", "spiece.model"])
def test_tokens_are_read_in_all_forms(form: str, tmp_path: Path) -> None:
    for seed, (name, tokens) in enumerate({"base": WORDS, "a": [*WORDS, "<a>"], "b": [*WORDS, "<b>"]}.items()):
        write_tokens(save_checkpoint(tmp_path / name, llama_tensors(seed=seed)), form, tokens)
    flags = ["-b", tmp_path / "base", "-e", tmp_path / "a", "-e", tmp_path / "b", "-m", "linear"]
    refused = actmat(["plan", *map(str, flags)], code=1)
    assert "row 16 is '<a>' and '<b>'" in refused.words
    actmat(["plan", *map(str, flags), "--keep", "*embed_tokens*", "--keep", "lm_head.weight"], code=0)
    (tmp_path / "b" / "tokenizer.json").write_text("{")
    assert "its tokens are not compared" in actmat(["plan", *map(str, flags)]).words


@pytest.mark.parametrize("trained", ["embed_tokens.weight", "lm_head.lora_{}.weight", "v_proj.lora_{}.weight"])
def test_tokens_of_adapters_without_a_base(trained: str, tmp_path: Path) -> None:
    """Compared where both adapt a table, or train it in full."""
    names = [f"base_model.model.{n.format(s)}" for n in ("q_proj.lora_{}.weight", trained) for s in "AB"]
    for name, own in (("a", "<a>"), ("b", "<b>")):
        folder = save_checkpoint(tmp_path / name, {n: torch.ones(2, 2) for n in names})
        (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
        (folder / "config.json").rename(folder / "adapter_config.json").write_text(
            '{"peft_type": "LORA", "r": 2, "lora_alpha": 2}'
        )
        write_tokens(folder, "fast", [*WORDS, own])
    done = actmat(["plan", "-e", tmp_path / "a", "-e", tmp_path / "b", "-m", "linear"], code="v_proj" not in trained)
    assert ("row 16 is '<a>' and '<b>'" in done.words) == done.code


@pytest.mark.parametrize("form", ["tokenizer.model", "tekken.json"])
@pytest.mark.parametrize(("texts", "who"), [("aaa", ""), ("aab", "b"), ("abb", "b"), ("-aa", "a"), ("-ab", "b")])
def test_tokenizers_that_are_not_read_are_said(form: str, texts: str, who: str, tmp_path: Path) -> None:
    """Files of SentencePiece and of Mistral by their content; `-` is a tokenizer that is read."""
    for seed, (name, text) in enumerate(zip(("base", "a", "b"), texts, strict=True)):
        folder = save_checkpoint(tmp_path / name, llama_tensors(seed=seed))
        if text == "-":
            write_tokens(folder, "fast", WORDS)
        else:
            (folder / "tokenizer.json").unlink()
            (folder / form).write_text(json.dumps({"vocab": [text]}))
    flags = ["-b", tmp_path / "base", "-e", tmp_path / "a", "-e", tmp_path / "b", "-m", "linear"]
    found = actmat(["plan", *map(str, flags)]).words
    assert ("are not compared with those of others: their tokenizers differ" in found) == bool(who)
    assert not who or f"expert '{who}' ({form})" in found


def planned(folder: Path) -> str:
    done = actmat(["plan", "-b", f"{folder}/base", "-e", f"{folder}/a", "-m", "linear"])
    return " ".join((done.out + done.err).split())


MOVED = ["w1", "w0", *WORDS[2:]]
SHIFTED = ["<s>", "<pad>", "</s>", "<unk>", *WORDS[:14]]
"""The rows that XLM-RoBERTa gives to pieces that begin with three of its own."""
PIECES: dict[str, tuple[str, list[str], str, list[str], str]] = {
    "equal": ("spiece.model", WORDS, "spiece.model", WORDS, ""),
    "moved": ("spiece.model", WORDS, "spiece.model", MOVED, "row 0 is 'w0' and 'w1'"),
    "beside JSON, equal": ("tokenizer.model", WORDS, "fast", WORDS, ""),
    "beside JSON, moved": ("tokenizer.model", WORDS, "fast", MOVED, "row 0 is 'w0' and 'w1'"),
    "rows of another numbering": (
        *("sentencepiece.bpe.model", ["<unk>", "<s>", "</s>", *WORDS[:14]]),
        *("fast", SHIFTED, "tokens of the base (sentencepiece.bpe.model) are not compared"),
    ),
}


@pytest.mark.parametrize("case", PIECES)
def test_pieces_are_compared_by_token(case: str, tmp_path: Path) -> None:
    form, tokens, other, others, said = PIECES[case]
    write_tokens(save_checkpoint(tmp_path / "base", llama_tensors(seed=0)), form, tokens)
    write_tokens(save_checkpoint(tmp_path / "a", llama_tensors(seed=1)), other, others)
    found = planned(tmp_path)
    assert said in found
    assert ("have different tokens" in found) == ("row 0" in said)
    assert ("not compared" in found) == ("not compared" in said)
    assert "lacks" not in found


def test_t5_numbers_its_own_tokens(tmp_path: Path) -> None:
    """Its class adds them behind the pieces, downwards; they are in no file of the slow tokenizer."""
    own = [f"<extra_id_{i}>" for i in (2, 1, 0)]
    base = save_checkpoint(tmp_path / "base", llama_tensors(seed=0))
    write_tokens(base, "spiece.model", [*WORDS[:10], "<extra_id_2>"])
    (base / "tokenizer_config.json").write_text('{"extra_ids": 3}')
    write_tokens(save_checkpoint(tmp_path / "a", llama_tensors(seed=1)), "fast", [*WORDS[:10], *own])
    found = planned(tmp_path)
    assert "different tokens" not in found
    assert "lacks" not in found


@pytest.mark.parametrize("count", [0, 1, 3, 300])
def test_pieces_are_those_of_the_message(count: int) -> None:
    message = pytest.importorskip("transformers.utils.sentencepiece_model_pb2_new").ModelProto()
    for i in range(count):
        message.pieces.add(piece=f"\u2581p{i}" * (1 + i), score=-1.5 * i, type=1 + i % 6)
    message.trainer_spec.model_prefix = "m"
    message.normalizer_spec.precompiled_charsmap = bytes(range(256))
    whole = message.SerializeToString()
    assert pieces(whole) == {p.piece: i for i, p in enumerate(message.pieces)}
    for cut in range(1, min(len(whole), 300)):
        assert len(pieces(whole[:cut])) <= count, "a damaged file is not read, or as far as it goes"


@pytest.mark.parametrize("moved", [False, True])
def test_rows_of_a_head_without_embeddings(moved: bool, tmp_path: Path) -> None:
    """Models of speech have a head over characters, and no table."""
    for name, tokens in (("base", WORDS), ("a", MOVED if moved else WORDS)):
        tensors = {n: t for n, t in llama_tensors(seed=len(name)).items() if "embed" not in n}
        folder = save_checkpoint(tmp_path / name, tensors | {"lm_head.weight": torch.randn(20, 8)})
        write_tokens(folder, "slow", tokens)
    assert ("have different tokens" in planned(tmp_path)) == moved
